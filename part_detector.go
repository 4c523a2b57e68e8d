package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The detector judges a Screen over time: does a human have to answer now, and what exactly is asked?
// Its rules are:
//   - What the screen shows decides, near the cursor and after the output has settled; the raw bytes never do.
//   - What the tool says of itself (OSC 7501, its title) comes first: nothing is asked while it works.
//   - The state of the terminal confirms a pattern, and refutes it where nobody reads.
//   - Silence counts on the screen with spinners masked, and only for an unfinished line.
//   - A choice that grants something is never a default.
// It never does I/O, never reads a clock and never types: time and terminal state are arguments.

/* ----- types ----- */

// PromptType is one of the five kinds of question.
type PromptType string

const (
	YesNo          PromptType = "yes_no"
	ConfirmEnter   PromptType = "confirm_enter"
	MultipleChoice PromptType = "multiple_choice"
	FreeText       PromptType = "free_text"
	Unknown        PromptType = "unknown"
)

// Reading is what the system says of the foreground processes: whether one of them waits to read the terminal.
type Reading int

const (
	ReadingUnknown Reading = iota
	ReadingYes
	ReadingBusy
)

// TTYState is signal 2, the terminal's own state as the system sees it. The zero value: not known.
type TTYState struct {
	Reading         Reading
	Canonical, Echo bool
}

// Choice is one answer a question offers.
type Choice struct {
	Key    string `json:"key"`              // names it in a Decision: "y", "n", "1" … "9", or the letter shown
	Label  string `json:"label"`            // as on the screen, made safe, ≤ 60 characters
	Keys   string `json:"keys,omitempty"`   // the exact bytes that choose it; "" when a pointer must be moved to it
	Grants bool   `json:"grants,omitempty"` // lets the agent do something (Yes, Allow, Trust…)
	Hook   string `json:"hook,omitempty"`   // "allow" or "deny" where the tool's hook can say the same; set by the session
}

// Prompt is a question (or an idle input box) found on the screen. Identifiers, times and the nonce are
// the store's business, not the detector's.
type Prompt struct {
	Type        PromptType
	Score       float64  // 0.60 … 1.0
	Excerpt     string   // safe and redacted, ≤ 200 bytes, ends in "…" when cut
	Question    string   // the sentence a person would read out, safe
	Full        string   // the whole dialog as text, safe and redacted, ≤ 16 KiB: "Show all"
	Cut         bool     // the excerpt hides part of what is being allowed: no quick affirmative buttons
	Choices     []Choice // ≤ 9
	SafeDefault *string  // a choice's key, "enter", "esc" or "" (Enter with no text); nil: never type anything
	Idle        bool     // an agent's empty input box: finished, waits for the next message
	Secret      bool     // echo is off
	Permission  bool     // grants something: no affirmative default
	Multi       bool     // several choices may be ticked
	Pointer     int      // index of the choice highlighted now, −1 when there is no pointer
	Ticked      []bool   // Multi: which are ticked now
	Axis        string   // "vertical" or "horizontal": which arrows move the pointer; "" none
	Toggle      string   // Multi: the byte that ticks the choice under the pointer; "" when its Keys do
	Submit      string   // Multi: the bytes that end the choosing and submit (after verification), "" unknown
	Signals     []string // what agreed: "hook", "protocol", "title", "pattern", "structure", "tty", "silence"
	Fingerprint string   // same question ⇔ same fingerprint; pointer position, ticks and spinners do not count
	Recent      string   // last 500 characters of the screen, safe and redacted: "Show last 500 characters"
}

// Confidence is the band of Score: "high", "medium" or "low".
func (p *Prompt) Confidence() string {
	switch {
	case p.Score >= 0.85:
		return "high"
	case p.Score >= 0.65:
		return "medium"
	}
	return "low"
}

// DetectOptions are the settings of a Detector.
type DetectOptions struct {
	Threshold    float64
	Stuck        time.Duration
	BufferBytes  int
	SafeDefaults map[PromptType]string
}

/* ----- adapters ----- */

// Adapter is what atlasbridge knows of one tool: one table row.
type Adapter struct {
	Name           string
	Names          []string      // command names it stands for
	MinVer, MaxVer string        // supported versions, inclusive; "" no bound
	PasteSubmit    bool          // bracketed paste then Enter submits
	SubmitDelay    time.Duration // between the text and its Enter
	ClearInput     string        // bytes that empty the input box
	Hooks          string        // how hooks are installed: "claude-settings" or ""
	EscapeBang     bool          // a leading ! / # must be defused with a space

	Digits     bool           // a digit chooses a numbered option at once, without Enter
	Box        *regexp.Regexp // a row of the empty input box, the cursor in it: the turn is over
	Works      *regexp.Regexp // a row that is there only while the tool works
	WorksTitle *regexp.Regexp // the title while it works
	AsksTitle  *regexp.Regexp // the title while a dialog is open
	Head       *regexp.Regexp // the first row of a dialog without a frame
	Submit     string         // of a list with ticks: goes on to the review
}

// adapters is the registry; the last row stands for every other tool. Shapes, timing and keys were measured
// with the versions named as MaxVer on 2026-11-20.
var adapters = []*Adapter{
	{
		Name: "claude", Names: []string{"claude"}, MinVer: "2.1.0", MaxVer: "2.1.329",
		PasteSubmit: true, SubmitDelay: 100 * time.Millisecond, ClearInput: "\x15",
		Hooks: "claude-settings", EscapeBang: true, Digits: true, Submit: "\x1b[C",
		Box:        regexp.MustCompile(`^❯(\x{a0}|$)`),
		Works:      regexp.MustCompile(`esc to interrupt|^[·✻✽✳✶✢*] .*… \(|\(running \w+ hook`),
		WorksTitle: regexp.MustCompile(`^[◐◑◒◓]`),
	},
	{
		Name: "codex", Names: []string{"codex", "openai"}, MinVer: "0.160.0", MaxVer: "0.169.0",
		PasteSubmit: true, SubmitDelay: 100 * time.Millisecond, ClearInput: "\x15", EscapeBang: true,
		Box:        regexp.MustCompile(`^› (Ask Codex to do anything)?$|^›$`),
		Works:      regexp.MustCompile(`\(\d+[hms][^)]* • esc to interrupt\)`),
		WorksTitle: regexp.MustCompile(`^[⠁-⣿]`),
		AsksTitle:  regexp.MustCompile(`^\[ [!.] \] Action Required`),
	},
	{
		Name: "gemini", Names: []string{"gemini"}, MinVer: "0.50.0", MaxVer: "0.61.0",
		SubmitDelay: 1500 * time.Millisecond, ClearInput: "\x15", EscapeBang: true, Digits: true,
		Box:        regexp.MustCompile(`^> {1,3}(Type your message.*)?$|^>$`),
		Works:      regexp.MustCompile(`\(esc to cancel, \d+[hms]`),
		WorksTitle: regexp.MustCompile(`^\s*✦`),
		AsksTitle:  regexp.MustCompile(`^\s*✋`),
	},
	{
		Name: "opencode", Names: []string{"opencode"}, MinVer: "1.0.0", MaxVer: "1.18.33",
		PasteSubmit: true, SubmitDelay: 300 * time.Millisecond, ClearInput: "\x15", EscapeBang: true,
		Box:   regexp.MustCompile(`^┃\s*(Ask anything….*)?$`),
		Works: regexp.MustCompile(`^[⬝■]+\s+esc (again to )?interrupt`),
		Head:  regexp.MustCompile(`^△ `),
	},
	{
		Name: "qwen", Names: []string{"qwen"}, MinVer: "0.20.0", MaxVer: "0.24.4",
		PasteSubmit: true, SubmitDelay: 100 * time.Millisecond, ClearInput: "\x15", EscapeBang: true, Digits: true,
		Box:        regexp.MustCompile(`^> {1,3}(Type your message.*)?$|^>$`),
		Works:      regexp.MustCompile(`\(\d+[hms][^)]*esc to cancel\)`),
		WorksTitle: regexp.MustCompile(`^[◐◑◒◓]`),
		AsksTitle:  regexp.MustCompile(`^✳`),
		Head:       regexp.MustCompile(`^\? `),
	},
	{Name: "generic", SubmitDelay: 50 * time.Millisecond},
}

// adapterFor finds the row for a command name (base name, no extension), or the generic one.
func adapterFor(name string) *Adapter {
	name = strings.ToLower(strings.TrimSuffix(filepath.Base(name), filepath.Ext(name)))
	for _, a := range adapters {
		if slices.Contains(a.Names, name) {
			return a
		}
	}
	return adapters[len(adapters)-1]
}

func (a *Adapter) generic() bool { return a.Name == "generic" }

/* ----- the detector: judging over time ----- */

// How long the masked screen must have been still before a judgement counts. Measured on 442 recordings: a
// reader of the terminal is seen within 50 ms of the last output in 97 of 100, and repaints come in pieces
// up to 30 ms apart.
const (
	settleTold = 30 * time.Millisecond  // the tool itself reports a dialog
	settle     = 100 * time.Millisecond // a pattern, confirmed by the terminal's state or a tool's own shape
	settleBare = 300 * time.Millisecond // a pattern alone
	settleIdle = 500 * time.Millisecond // an empty input box: between two steps of a turn it shows for a moment
	goneAfter  = 200 * time.Millisecond // a question out of sight for so long is gone; a repaint is not
	lookEvery  = 250 * time.Millisecond // while output keeps coming
	repeatWait = time.Second            // a question still there so long after its answer was typed is asked again
)

// Detector judges a Screen over time. Deterministic: the same calls give the same prompts. One goroutine uses it.
type Detector struct {
	Screen *Screen
	a      *Adapter
	o      DetectOptions
	raw    []byte // ring of the last BufferBytes bytes
	rawAt  int

	out     time.Time // last output
	changed time.Time // last output that changed the masked screen
	looked  time.Time
	dirty   bool // output since looked
	mask    [32]byte

	tty     TTYState // the last one known
	ttyAt   time.Time
	ttyNext time.Time
	ttyGap  time.Duration

	found   *found // what the screen asks, by the last judgement
	pending time.Time
	cur     *found // the question in force: the last one returned
	absent  time.Time
	resized bool

	typed     time.Time // Enter went to the child since cur was returned
	committed bool
	idleSaid  bool
	sleep     time.Time
	slept     *found // what was in force when Sleep was called
	sleptMask [32]byte
	sleptAt   time.Time
	began     time.Time // first look
}

// found is a judgement: a prompt, where it stands, and what it still needs to be believed.
type found struct {
	Prompt
	line  string        // of a question on the cursor's line: the text up to the cursor; "" for dialogs
	place int           // which line of the session that is, counted from the first
	wait  time.Duration // how long the masked screen must have been still
	mute  bool          // no byte at all must have come for so long
}

func newDetector(a *Adapter, rows, cols int, o DetectOptions) *Detector {
	if a == nil {
		a = adapterFor("")
	}
	if o.Threshold == 0 {
		o.Threshold = 0.65
	}
	if o.Stuck == 0 {
		o.Stuck = 2 * time.Second
	}
	if o.BufferBytes == 0 {
		o.BufferBytes = 4096
	}
	return &Detector{Screen: newScreen(rows, cols), a: a, o: o}
}

// Feed takes the child's bytes as they came.
func (d *Detector) Feed(p []byte, now time.Time) {
	if len(p) == 0 {
		return
	}
	d.Screen.Write(p)
	d.out, d.dirty = now, true
	if n := d.o.BufferBytes; len(p) >= n {
		d.raw = append(d.raw[:0], p[len(p)-n:]...)
	} else {
		d.raw = append(d.raw, p...)
		if len(d.raw) > 2*n {
			d.raw = append(d.raw[:0], d.raw[len(d.raw)-n:]...)
		}
	}
}

// Raw is the rolling buffer: the last BufferBytes bytes of the child.
func (d *Detector) Raw() []byte { return d.raw[max(0, len(d.raw)-d.o.BufferBytes):] }

// LastOutput is when bytes last came.
func (d *Detector) LastOutput() time.Time { return d.out }

// Resize changes the size of the screen. The question in force may now stand elsewhere.
func (d *Detector) Resize(rows, cols int, now time.Time) {
	d.Screen.Resize(rows, cols)
	d.out, d.dirty, d.resized = now, true, true
}

// Typed notes bytes that went to the child, by keyboard or gate. Only Enter can end a question for good.
func (d *Detector) Typed(p []byte, now time.Time) {
	if strings.ContainsAny(string(p), "\r\n") {
		d.typed, d.committed = now, true
		d.idleSaid = false
	}
}

// Sleep ignores everything until the echo window has passed and forgets the question in force, so that
// the same words asked again are a new prompt.
func (d *Detector) Sleep(until time.Time) {
	d.sleep, d.slept, d.sleptMask, d.sleptAt = until, d.cur, d.mask, until
	d.cur, d.absent, d.idleSaid, d.committed = nil, time.Time{}, false, false
}

// Activity is "starting", "running", "waiting_permission", "waiting" or "idle", for status.
func (d *Detector) Activity() string {
	switch {
	case d.cur != nil && d.cur.Idle:
		return "idle"
	case d.cur != nil && d.cur.Permission:
		return "waiting_permission"
	case d.cur != nil:
		return "waiting"
	case d.out.IsZero():
		return "starting"
	}
	return "running"
}

// look folds the output since the last look into the masked screen and judges it.
func (d *Detector) look(tty TTYState, now time.Time) {
	if d.began.IsZero() {
		d.began = now
	}
	if tty != (TTYState{}) || d.ttyAt.Before(d.changed) {
		if tty != d.tty {
			d.pending = time.Time{}
		}
		d.tty, d.ttyAt = tty, now
	}
	if d.dirty {
		d.dirty, d.looked = false, now
		if m := d.masked(); m != d.mask {
			d.mask, d.changed = m, d.out
			d.ttyGap, d.ttyNext = 0, d.out.Add(settle/2)
			d.tty = tty
		}
	}
	d.found = judge(d.view(d.tty), d.o)
}

// Tick returns a question that is seen for the first time, else nil.
func (d *Detector) Tick(tty TTYState, now time.Time) *Prompt {
	d.look(tty, now)
	if !d.ttyNext.After(now) {
		d.ttyGap = min(max(2*d.ttyGap, settle/2), 2*time.Second)
		d.ttyNext = now.Add(d.ttyGap)
	}
	d.pending = time.Time{}
	f := d.found
	if working(d.view(d.tty)) {
		d.idleSaid = false
	}
	if now.Before(d.sleep) {
		return nil
	}
	if d.cur != nil && d.still() {
		d.absent = time.Time{}
		if !d.committed || now.Sub(d.typed) < repeatWait || !d.out.After(d.typed) || d.cur.Idle {
			return nil
		}
		if f == nil || f.Fingerprint != d.cur.Fingerprint {
			return nil
		}
	} else if d.cur != nil && f == nil {
		d.missing(now)
	}
	if f == nil || d.repeats(f, now) {
		return nil
	}
	since := d.changed
	if f.mute {
		since = d.out
	}
	if since.IsZero() {
		since = d.began
	}
	if due := since.Add(f.wait); now.Before(due) {
		d.pending = due
		return nil
	}
	d.cur, d.absent, d.committed, d.resized, d.slept = f, time.Time{}, false, false, nil
	if f.Idle && d.idleSaid {
		return nil
	}
	d.idleSaid = f.Idle
	p := f.Prompt
	p.Recent = clipHead(redact(visible(d.Screen.Text())), 500)
	return &p
}

// missing notes that the question in force is not on the screen, and forgets it when that lasts.
func (d *Detector) missing(now time.Time) {
	if d.absent.IsZero() {
		d.absent = now
	}
	if now.Sub(d.absent) >= goneAfter {
		d.cur = nil
	}
}

// repeats tells that f is only what was answered a moment ago and has not left the screen yet.
func (d *Detector) repeats(f *found, now time.Time) bool {
	if d.slept == nil {
		return false
	}
	if f.Fingerprint != d.slept.Fingerprint || f.line != "" && f.place != d.slept.place {
		d.slept = nil
		return false
	}
	if d.out.After(d.sleptAt) && now.Sub(d.sleptAt) >= 2*repeatWait {
		d.slept = nil
		return false
	}
	d.pending = d.sleptAt.Add(2 * repeatWait)
	return true
}

// still tells whether the question in force is on the screen now.
func (d *Detector) still() bool {
	c := d.cur
	if c.line != "" {
		v := d.view(d.tty)
		line, top := v.cursorLine()
		if v.place(top) == c.place || d.resized {
			if d.tty.Reading == ReadingBusy && slices.Contains(c.Signals, "tty") {
				return false
			}
			return strings.HasPrefix(line+v.after(), strings.TrimRight(c.line, " "))
		}
		return false
	}
	return d.found != nil && same(d.found, c)
}

// same tells whether a and b are one question: the label under the pointer may be a text field being filled in.
func same(a, b *found) bool {
	if a.Fingerprint == b.Fingerprint {
		return true
	}
	if a.Question != b.Question || a.Excerpt != b.Excerpt || a.Axis == "" || len(a.Choices) != len(b.Choices) {
		return false
	}
	for i := range a.Choices {
		if a.Choices[i].Label != b.Choices[i].Label && i != a.Pointer && i != b.Pointer {
			return false
		}
	}
	return true
}

// Next is when Tick is next worth calling without new bytes; zero: not before something happens.
func (d *Detector) Next(now time.Time) time.Time {
	var next time.Time
	soonest := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if d.dirty {
		due := d.out.Add(settleTold)
		if d.looked.Add(lookEvery).Before(due) {
			due = d.looked.Add(lookEvery)
		}
		soonest(due)
	}
	if d.sleep.After(now) {
		soonest(d.sleep)
	}
	soonest(d.pending)
	if !d.absent.IsZero() && d.cur != nil {
		soonest(d.absent.Add(goneAfter))
	}
	if d.committed && d.cur != nil && d.typed.Add(repeatWait).After(now) {
		soonest(d.typed.Add(repeatWait))
	}
	if d.needsTTY() {
		soonest(d.ttyNext)
	}
	if !next.IsZero() && next.Before(now) {
		next = now
	}
	return next
}

// needsTTY tells whether the state of the terminal decides at all: full-screen agents always read it.
func (d *Detector) needsTTY() bool {
	return !d.out.IsZero() && (d.a.generic() || !d.Screen.AltScreen() && !d.told())
}

func (d *Detector) told() bool { return d.Screen.Status().State != "" }

// WantTTY tells whether TTYState can change what Tick says now. It costs a look at the foreground processes.
func (d *Detector) WantTTY(now time.Time) bool {
	return d.needsTTY() && !d.ttyNext.After(now) && !d.dirty
}

// Look is what the screen asks this instant, judged without waiting: the gate's eye. nil: nothing.
func (d *Detector) Look(tty TTYState, now time.Time) *Prompt {
	d.look(tty, now)
	if d.found == nil {
		return nil
	}
	p := d.found.Prompt
	return &p
}

// Gone tells that the question Tick last returned has left the screen for good (answered, or the program went on).
func (d *Detector) Gone(tty TTYState, now time.Time) bool {
	if d.cur == nil {
		return true
	}
	d.look(tty, now)
	if d.still() {
		d.absent = time.Time{}
		return false
	}
	d.missing(now)
	return d.cur == nil
}

// spinners are the marks that blink or turn while nothing else changes (Claude ●✻, ora ⠋, opencode ⬝■, clocks).
const spinners = "●○◐◑◒◓✻✽✳✶✢·*◇◆✦⏺⬝■▪•∙"

// masked is a digest of the screen without spinners, and without the digits of the rows that have one.
func (d *Detector) masked() [32]byte {
	h := sha256.New()
	rows, _ := d.Screen.Size()
	for r := range rows {
		t, turning := d.Screen.Row(r), false
		t = strings.Map(func(c rune) rune {
			if c >= 0x2800 && c <= 0x28ff || strings.ContainsRune(spinners, c) {
				turning = true
				return ' '
			}
			return c
		}, t)
		if turning {
			t = strings.Map(func(c rune) rune {
				if unicode.IsDigit(c) {
					return '0'
				}
				return c
			}, strings.TrimSpace(t))
		}
		h.Write([]byte(strings.TrimRight(t, " ")))
		h.Write([]byte{'\n'})
	}
	row, col, hidden := d.Screen.Cursor()
	if !hidden {
		fmt.Fprint(h, row, col)
	}
	return [32]byte(h.Sum(nil))
}

/* ----- one look at the screen ----- */

// view is the screen as one look sees it: rows freed of the frames around them.
type view struct {
	s        *Screen
	a        *Adapter
	tty      TTYState
	rows     []viewRow
	row, col int
	hidden   bool
	last     int // the last row that shows anything, −1 none
}

type viewRow struct {
	raw   string
	text  string // without frame, trailing blanks and scroll bar
	at    int    // column of its first character
	depth int    // upright lines crossed on the left
	rule  bool   // lines and corners only
	top   bool   // a rule over the whole width, or the upper edge of a frame
}

const (
	uprights = "│┃║▌▎▏┆╎"
	corners  = "╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝╠╣╹╻╷╵◆◇"
	levels   = "─━═╌┄┈▔▁▀▄‾╴╶"
)

func (d *Detector) view(tty TTYState) *view {
	v := &view{s: d.Screen, a: d.a, tty: tty, last: -1}
	v.row, v.col, v.hidden = d.Screen.Cursor()
	n, cols := d.Screen.Size()
	v.rows = make([]viewRow, n)
	for r := range v.rows {
		v.rows[r] = unframe(d.Screen.Row(r), cols)
		if v.rows[r].raw != "" {
			v.last = r
		}
	}
	return v
}

// unframe takes the lines drawn around and beside a row's text away.
func unframe(raw string, cols int) viewRow {
	w := viewRow{raw: raw}
	rest, edge := raw, false
	for rest != "" {
		c, n := utf8.DecodeRuneInString(rest)
		switch {
		case strings.ContainsRune(uprights, c):
			w.depth++
		case c != ' ' && strings.ContainsRune(corners+levels, c):
			edge = true
		case c != ' ':
			goto text
		}
		w.at++
		rest = rest[n:]
	}
text:
	w.text = strings.TrimRight(rest, " █▐"+uprights+corners+levels)
	w.rule = w.text == "" && edge
	w.top = w.rule && (strings.ContainsAny(raw, "╭┌╔") || w.at >= cols-1 && strings.ContainsAny(raw[:3], "─▔━"))
	return w
}

// place numbers a row so that it keeps its number while the primary screen scrolls.
func (v *view) place(r int) int { return v.s.Scrolled() + r }

// cells is the text of row r from column a to b.
func (v *view) cells(r, a, b int) string {
	var t strings.Builder
	for c := a; c < b; c++ {
		if ch, _ := v.s.Cell(r, c); ch != 0 {
			t.WriteRune(ch)
		}
	}
	return t.String()
}

// cursorLine is the text of the cursor's line up to the cursor, over rows that ran over the margin, and the
// row where it begins.
func (v *view) cursorLine() (line string, top int) {
	line, top = v.cells(v.row, 0, v.col), v.row
	for ; top > 0 && v.s.Wrapped(top-1); top-- {
		_, cols := v.s.Size()
		line = v.cells(top-1, 0, cols) + line
	}
	return line, top
}

// after is what stands behind the cursor on its row.
func (v *view) after() string {
	_, cols := v.s.Size()
	return strings.TrimRight(v.cells(v.row, v.col, cols), " ")
}

// lineAbove is the line that ends above row r (blank rows skipped, at most two), joined over the margin.
func (v *view) lineAbove(r int) (line string, top int) {
	for r--; r >= 0 && v.rows[r].raw == ""; r-- {
	}
	if r < 0 {
		return "", -1
	}
	line = v.s.Row(r)
	for ; r > 0 && v.s.Wrapped(r-1); r-- {
		line = v.s.Row(r-1) + line
	}
	return line, r
}

// attr is how the text of row r begins to be drawn.
func (v *view) attr(r, c int) Attr {
	_, a := v.s.Cell(r, c)
	return a
}

// faint tells text that explains rather than offers: dim or grey.
func faint(a Attr) bool {
	grey := a.FG >= 1<<24 && a.FG>>16&0xff == a.FG>>8&0xff && a.FG>>8&0xff == a.FG&0xff && a.FG&0xff < 0xd0
	return a.Dim || a.FG == 8 || a.FG >= 240 && a.FG <= 250 || grey
}

// odd is the index of the one place that is drawn unlike all others (reverse, background, then colour), or −1.
func odd(attrs []Attr) int {
	for _, key := range []func(Attr) any{
		func(a Attr) any { return [2]any{a.Reverse, a.BG} },
		func(a Attr) any { return [2]any{a.FG, a.Bold} },
	} {
		count := map[any]int{}
		for _, a := range attrs {
			count[key(a)]++
		}
		if len(count) != 2 {
			continue
		}
		for i, a := range attrs {
			if count[key(a)] == 1 && (len(attrs) > 2 || a.Reverse || key(a) != key(Attr{FG: -1, BG: -1})) {
				return i
			}
		}
	}
	return -1
}

/* ----- judging one look ----- */

// working tells whether a known tool says, or shows, that it is at work.
func working(v *view) bool {
	if st := v.s.Status().State; st != "" && st != "clear" {
		return st == "working"
	}
	if v.a.generic() {
		return false
	}
	if t := v.a.WorksTitle; t != nil && t.MatchString(v.s.Title()) {
		return true
	}
	for r := max(0, v.last-12); v.a.Works != nil && r <= v.last; r++ {
		if v.a.Works.MatchString(v.rows[r].text) {
			return true
		}
	}
	return false
}

// judge finds what the screen asks, if anything.
func judge(v *view, o DetectOptions) *found {
	if v.last < 0 && v.tty.Reading != ReadingYes || working(v) {
		return nil
	}
	told := v.s.Status().State == "blocked" || v.a.AsksTitle != nil && v.a.AsksTitle.MatchString(v.s.Title())
	f := v.readBox()
	if f == nil && !told {
		f = v.readIdle()
	}
	if f == nil {
		f = v.readMenu()
	}
	if f == nil {
		f = v.readButtons()
	}
	if f == nil {
		f = v.readLine(o)
	}
	if f == nil && v.s.Status().State == "blocked" {
		f = v.readReport()
	}
	if f == nil {
		return nil
	}
	v.finish(f, told, o)
	if f.Score < o.Threshold && slices.Contains(f.Signals, "pattern") || f.Score < 0.60 {
		return nil
	}
	return f
}

// finish adds what all kinds of prompt share: signals and score, permission, default, fingerprint.
func (v *view) finish(f *found, told bool, o DetectOptions) {
	if f.Signals == nil {
		f.Signals = []string{"structure"}
	}
	if v.tty.Reading == ReadingYes && (v.a.generic() || f.line != "") {
		f.Signals = append(f.Signals, "tty")
	}
	switch st := v.s.Status().State; {
	case st == "blocked" && !f.Idle, (st == "idle" || st == "done") && f.Idle:
		f.Signals, f.Score = append(f.Signals, "protocol"), 1
		if !f.Idle && f.Type != Unknown {
			f.wait = settleTold
		}
	case told && !f.Idle:
		f.Signals, f.Score, f.wait = append(f.Signals, "title"), 1, settleTold
	}
	if f.Score < 1 {
		f.Score = min(f.Score+0.05*float64(len(f.Signals)-1), 0.99)
	}
	if f.wait == 0 {
		f.wait = settle
		if v.a.generic() && v.tty.Reading == ReadingUnknown {
			f.wait = settleBare
		}
	}
	grants, refuses := -1, -1
	for i := range f.Choices {
		c := &f.Choices[i]
		c.Grants = reGrants.MatchString(c.Label)
		if c.Grants && grants < 0 {
			grants = i
		}
		if reRefuses.MatchString(c.Label) {
			c.Grants, refuses = false, i
		}
		c.Label = clipHead(visible(c.Label), 60)
	}
	if f.Type == MultipleChoice && grants >= 0 || v.s.Status().State == "blocked" && v.s.Status().Kind == "permission" {
		f.Permission = !f.Multi
	}
	v.setDefault(f, refuses, o)
	if f.Full == "" {
		f.Full = f.Question
	}
	f.Question = strings.TrimSpace(redact(visible(f.Question)))
	f.Full = clipHead(redact(visible(f.Full)), 16<<10)
	if f.Excerpt == "" {
		f.Excerpt = f.Question
	}
	f.Excerpt = clip(redact(visible(f.Excerpt)), 200)
	f.Fingerprint = fingerprint(&f.Prompt)
}

// setDefault chooses what a timeout types: the refusing choice wherever something is granted.
func (v *view) setDefault(f *found, refuses int, o DetectOptions) {
	value, has := o.SafeDefaults[f.Type]
	set := func(s string) { f.SafeDefault = &s }
	switch {
	case f.Idle, f.Secret, f.Type == Unknown:
	case f.Permission && refuses >= 0:
		set(f.Choices[refuses].Key)
	case f.Permission:
		set("esc")
	case f.Type == YesNo:
		set("n")
	case f.Type == ConfirmEnter:
		set("enter")
	case f.Type == MultipleChoice && has && slices.ContainsFunc(f.Choices, func(c Choice) bool { return c.Key == value }):
		set(value)
	case f.Type == MultipleChoice && f.Pointer >= 0 && f.Pointer < len(f.Choices):
		set(f.Choices[f.Pointer].Key)
	case f.Type == MultipleChoice && len(f.Choices) > 0:
		set(f.Choices[0].Key)
	case f.Type == MultipleChoice:
		set("1")
	default:
		set(value)
	}
}

// What a label says it does. Refusing words win: "No, and tell Codex what to do", "Continue without trusting".
var (
	reGrants  = regexp.MustCompile(`(?i)^(yes|allow|always allow|approve|accept|trust|grant|run|proceed|i trust)\b`)
	reRefuses = regexp.MustCompile(`(?i)^(no|reject|deny|don['’]?t|do not|never|cancel|exit|quit|skip|refuse|decline|abort|` +
		`back|disallow|continue without)\b`)
)

// fingerprint names a question by its words, without blanks: wrapping, pointer and ticks do not count.
func fingerprint(p *Prompt) string {
	h := sha256.New()
	words := func(s string) { fmt.Fprintln(h, strings.Join(strings.Fields(s), "")) }
	words(string(p.Type))
	words(p.Question)
	words(p.Excerpt)
	for _, c := range p.Choices {
		words(c.Label)
	}
	fmt.Fprint(h, p.Idle, p.Secret)
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// readIdle finds the empty input box of a known tool, the cursor in it.
func (v *view) readIdle() *found {
	if v.a.Box == nil || v.row > v.last {
		return nil
	}
	w := v.rows[v.row]
	text := w.text
	if strings.HasPrefix(v.a.Box.String(), "^┃") {
		text = strings.TrimSpace(w.raw)
	}
	if !v.a.Box.MatchString(text) || w.text == "" && v.hidden {
		return nil
	}
	if rest := strings.TrimLeft(text, "❯ \u00a0"); v.a.Name == "claude" && rest != "" && !faint(v.attr(v.row, w.at+2)) {
		return nil
	}
	f := &found{wait: settleIdle}
	f.Prompt = Prompt{Type: FreeText, Score: 0.90, Idle: true, Pointer: -1,
		Question: v.a.Name + " has finished and waits for your next message"}
	return f
}

// readReport is a dialog the tool reports but the screen does not show (a small window).
func (v *view) readReport() *found {
	st := v.s.Status()
	f := &found{wait: repeatWait}
	f.Prompt = Prompt{Type: Unknown, Score: 1, Pointer: -1, Cut: true, Question: st.Msg, Full: v.s.Text()}
	if f.Question == "" {
		f.Question = st.App + " waits for an answer (" + st.Kind + ")"
	}
	return f
}

/* ----- menus with a pointer ----- */

const pointers = "❯›▸▶►➤‣→>●◉"

// option is a row of a menu.
type option struct {
	row     int
	at      int // column of the label, behind pointer and radio mark
	label   string
	num     string
	short   string // the key named in brackets at the end: "(esc)", "(y)"
	pointer rune
	tick    int // −1 no box, 0 empty, 1 ticked
	tickAt  int
	textAt  int // column of the words, behind number and box
}

var (
	reTick   = regexp.MustCompile(`^(\[[ xX*✔✓]\]|\([ xX*•]\)|[◯◉◻◼☐☑☒□■])\s*`)
	reNumber = regexp.MustCompile(`^\(?(\d{1,2})[.):]\)?\s+`)
	reShort  = regexp.MustCompile(`\s\((\w|esc|shift\+tab)\)$`)
)

func (v *view) option(r int) option {
	w := v.rows[r]
	o := option{row: r, at: w.at, tick: -1}
	t := strings.TrimLeft(w.text, "↑↓ ")
	o.at += utf8.RuneCountInString(w.text) - utf8.RuneCountInString(t)
	c, n := utf8.DecodeRuneInString(t)
	if strings.ContainsRune(pointers+"○", c) && !(c == '◉' && v.row != r) {
		rest := strings.TrimLeft(t[n:], " ")
		if c != '○' {
			o.pointer = c
		}
		o.at += 1 + len(t[n:]) - len(rest)
		t = rest
	}
	o.textAt = o.at
	strip := func(re *regexp.Regexp) string {
		m := re.FindStringSubmatch(t)
		if m == nil {
			return ""
		}
		o.textAt += utf8.RuneCountInString(m[0])
		t = t[len(m[0]):]
		return m[1]
	}
	box := func() {
		at := o.textAt
		if m := strip(reTick); m != "" && o.tick < 0 {
			o.tick, o.tickAt = 0, at
			if strings.ContainsAny(m, "xX*✔✓•◉◼☑☒■") {
				o.tick = 1
			}
		}
	}
	box()
	o.num = strip(reNumber)
	box()
	o.label = t
	return o
}

// readMenu finds a list of options with a pointer at one of them, the lowest on the screen.
func (v *view) readMenu() *found {
	if v.tty.Canonical || v.tty.Reading == ReadingBusy && v.a.generic() {
		return nil
	}
	for r := v.last; r >= 0 && r > v.last-40; r-- {
		if v.rows[r].text == "" {
			continue
		}
		head := v.option(r)
		if head.pointer == 0 || head.label == "" || !v.a.generic() && (strings.ContainsRune(">→", head.pointer) ||
			v.a.Box.MatchString(v.rows[r].text) || !v.hidden && head.num == "") {
			continue
		}
		if opts := v.menuAt(head); (len(opts) >= 2 || len(opts) == 1 && head.tick >= 0) && v.live(opts) {
			return v.menu(opts)
		}
	}
	return nil
}

// menuAt collects the options of the menu whose pointer is at head.
func (v *view) menuAt(head option) []option {
	start := head.row
	for r, gap, next := head.row-1, 0, number(head.num)-1; r >= 0 && gap < 4; r-- {
		o := v.option(r)
		switch {
		case head.num != "" && o.num != "" && number(o.num) == next:
			start, gap, next = r, 0, next-1
		case head.num != "" && next >= 1 && (o.at > head.at || v.rows[r].text == "" || v.rows[r].rule):
			gap++
		case head.num == "" && v.rows[r].text != "" && o.at == head.at && o.num == "" && o.pointer == 0 && (o.tick < 0) == (head.tick < 0):
			start, gap = r, 0
		case head.num == "" && v.rows[r].text != "" && (o.at > head.at || v.dimmer(o, head)):
			gap++
		case head.num == "" && v.rows[r].raw != "" && v.rows[r].text == "" && !v.rows[r].rule && gap > 0:
			gap++
		default:
			gap = 4
		}
	}
	var opts []option
	described := false
	for r, gap := start, 0; r <= v.last && gap < 3; r++ {
		o := v.option(r)
		w := v.rows[r]
		switch {
		case w.text == "" && (head.num == "" && (w.rule || !described) || gap > 1):
			return opts
		case w.text == "":
			gap++
		case head.num != "" && o.num != "" && (len(opts) == 0 || number(o.num) == number(lastNum(opts))+1):
			opts, gap = append(opts, o), 0
		case head.num != "" && head.tick >= 0 && o.at == head.tickAt && o.num == "":
			opts, gap = append(opts, o), 0
		case head.num == "" && o.at == head.at && !v.dimmer(o, head) && (o.tick < 0) == (head.tick < 0) && !reCount.MatchString(w.text):
			opts, gap, described = append(opts, o), 0, false
		case len(opts) > 0 && gap == 0 && (o.at > head.at || v.dimmer(o, head) || v.s.Wrapped(r-1) || v.spilled(r, head)):
			described = true
			if last := &opts[len(opts)-1]; !v.dimmer(o, *last) && (o.at == last.textAt || o.at < last.at) {
				last.label += " " + w.text
			}
		default:
			return opts
		}
	}
	return opts
}

// spilled tells that row r is the end of an option that its program broke at the margin itself.
func (v *view) spilled(r int, head option) bool {
	_, cols := v.s.Size()
	return r+1 < len(v.rows) && v.option(r+1).at == head.at && v.rows[r+1].text != "" && len([]rune(v.rows[r-1].raw)) > cols-20
}

// dimmer tells that row o explains option p: its text is fainter.
func (v *view) dimmer(o, p option) bool {
	a, b := v.attr(o.row, o.textAt), v.attr(p.row, p.textAt)
	return faint(a) && !faint(b) && o.tick < 0 && !strings.HasPrefix(v.rows[o.row].text, "○")
}

func number(s string) (n int) {
	for _, c := range s {
		n = n*10 + int(c-'0')
	}
	return n
}

func lastNum(opts []option) string {
	for i := len(opts) - 1; i >= 0; i-- {
		if opts[i].num != "" {
			return opts[i].num
		}
	}
	return "0"
}

var reHint = regexp.MustCompile(`(?i)\b(arrow|navigate|to select|to confirm|to submit|to choose|use .{0,12}keys|enter |space |` +
	`esc )|↑/?↓|⏎|⇆|^\d+/\d+|^\(.*\)$|^tip:`)

var reCount = regexp.MustCompile(`^\d+/\d+\b`)

// live tells whether the menu is what the program waits at, not text it once printed: nothing but hints
// below it, the cursor not on a line of its own.
func (v *view) live(opts []option) bool {
	first, end := opts[0].row, opts[len(opts)-1].row
	below, hint := 0, v.hidden
	for r := end + 1; r <= v.last; r++ {
		if t := v.rows[r].text; t != "" {
			below++
			hint = hint || reHint.MatchString(t)
		}
	}
	for r := max(0, first-3); r < first; r++ {
		hint = hint || reHint.MatchString(v.rows[r].text)
	}
	inside := v.row >= first-2 && v.row <= end
	if below > 9 {
		return false
	}
	if v.a.generic() && !inside && !v.hidden && strings.TrimSpace(v.cells(v.row, 0, v.col)) != "" && !hint {
		return false
	}
	if v.a.generic() && !hint && !inside {
		return false
	}
	if v.a.Box != nil && !inside && v.a.Box.MatchString(v.rows[v.row].text) && v.rows[v.row].text != "" {
		return false
	}
	return !v.a.generic() || v.tty.Reading == ReadingYes || hint || inside && opts[0].num != ""
}

// menu makes the prompt of a list of options.
func (v *view) menu(opts []option) *found {
	f := &found{}
	f.Prompt = Prompt{Type: MultipleChoice, Score: 0.90, Pointer: -1, Axis: "vertical"}
	for i, o := range opts {
		if i == 9 {
			break
		}
		c := Choice{Key: o.num, Label: o.label}
		if m := reShort.FindStringSubmatch(o.label); m != nil && !v.a.generic() {
			switch m[1] {
			case "esc":
				c.Keys = "\x1b"
			case "shift+tab":
			default:
				c.Keys = m[1]
			}
		}
		if o.num == "" {
			c.Key = fmt.Sprint(i + 1)
			if strings.EqualFold(o.label, "submit") {
				c.Key = "submit"
			}
		} else if v.a.Digits {
			c.Keys = o.num
		}
		if o.pointer != 0 {
			f.Pointer = i
		}
		if o.tick >= 0 {
			f.Multi = true
		}
		f.Choices = append(f.Choices, c)
		f.Ticked = append(f.Ticked, o.tick == 1)
	}
	if !f.Multi {
		f.Ticked = nil
	} else if f.Submit = v.a.Submit; f.Submit == "" {
		f.Submit, f.Toggle = "\r", " "
	}
	if len(opts) == 2 && opts[0].num == "" && isYesNo(f.Choices) && v.a.generic() {
		f.Type = YesNo
	}
	v.describe(f, opts[0].row, opts[len(opts)-1].row)
	return f
}

// isYesNo makes the keys of two choices that say just Yes and No "y" and "n".
func isYesNo(c []Choice) bool {
	for i := range c {
		if !strings.EqualFold(c[i].Label, "yes") && !strings.EqualFold(c[i].Label, "no") || len(c) != 2 {
			return false
		}
	}
	for i := range c {
		c[i].Key = strings.ToLower(c[i].Label[:1])
	}
	return true
}

var (
	reAsked  = regexp.MustCompile(`^[^:]*\?\W*$`)
	reLead   = regexp.MustCompile(`^([?◆◇✔●■] |\? )\s*`)
	reHinted = regexp.MustCompile(`\s*([\[(](Use|use|Press|Move)[^\])]*(arrow|space|enter|up|down)[^\])]*[\])]|› ?-? ?Use arrow-keys.*|[›…·]\s*)$`)
)

// describe finds the question of the dialog whose options are in rows first to end, and its text.
func (v *view) describe(f *found, first, end int) {
	top := first
	for blank := 0; top > 0 && first-top < 60; top-- {
		w := v.rows[top-1]
		if w.top || v.a.Head != nil && top < first && v.a.Head.MatchString(v.rows[top].text) {
			break
		}
		if w.text == "" && !w.rule {
			if blank++; blank > 1 && v.a.generic() {
				break
			}
		} else {
			blank = 0
		}
	}
	var body []string // paragraphs above the options, nearest last
	var at []int
	joined := false
	for r := top; r < first; r++ {
		w := v.rows[r]
		t := strings.TrimSpace(w.text)
		switch {
		case t == "" || w.rule:
			joined = false
		case joined && r > 0 && (w.at == v.rows[r-1].at || v.s.Wrapped(r-1)) && !reLead.MatchString(t):
			body[len(body)-1] += " " + t
		default:
			body, at, joined = append(body, t), append(at, r), true
		}
	}
	f.Question = pickQuestion(body, v.a.generic())
	f.Full = v.text(top, end+1)
	f.Excerpt = f.Question
	if f.Question == "" {
		f.Question = v.s.Title()
	}
	if slices.ContainsFunc(f.Choices, func(c Choice) bool { return reGrants.MatchString(c.Label) }) && f.Type == MultipleChoice {
		v.quote(f, top, first)
	}
}

func pickQuestion(body []string, lead bool) string {
	body = slices.DeleteFunc(body, func(s string) bool { return strings.HasPrefix(s, "→ ") || strings.HasPrefix(s, "● ") })
	clean := func(s string) string {
		return strings.TrimSpace(reHinted.ReplaceAllString(reLead.ReplaceAllString(s, ""), ""))
	}
	n := len(body)
	if n == 0 {
		return ""
	}
	for i := n - 1; lead && i >= max(0, n-6); i-- {
		if reLead.MatchString(body[i]) && strings.HasPrefix(body[i], "?") {
			return clean(body[i])
		}
	}
	for i := n - 1; i >= 0; i-- {
		if reAsked.MatchString(body[i]) {
			return clean(body[i])
		}
	}
	for i := n - 1; i >= 0; i-- {
		if strings.Contains(body[i], "? ") || strings.HasSuffix(body[i], "?") {
			return clean(body[i])
		}
	}
	return clean(body[n-1])
}

// text is rows a to b without frames.
func (v *view) text(a, b int) string {
	var t []string
	for r := a; r < b && r < len(v.rows); r++ {
		if !v.rows[r].rule {
			t = append(t, strings.Repeat(" ", min(v.rows[r].at, 8))+v.rows[r].text)
		}
	}
	return strings.Trim(strings.Join(t, "\n"), "\n ")
}

// quote makes the excerpt of a permission question: the command with its head and its tail, then the
// question. What is allowed is what stands between dashed rules, in an inner frame or after "$ ", else all
// the text of the dialog.
func (v *view) quote(f *found, top, first int) {
	var dashed, inner, shell, all []string
	inside, prompt := false, false
	for r := top; r < first; r++ {
		w := v.rows[r]
		t := strings.TrimSpace(w.text)
		switch {
		case w.rule && strings.Contains(w.raw, "╌╌"):
			inside = !inside
			continue
		case w.rule || t == "" || reHint.MatchString(t) && strings.HasPrefix(t, "Tip"):
			prompt = prompt && t != ""
			continue
		}
		if inside {
			dashed = append(dashed, t)
		}
		if w.depth >= 2 {
			inner = append(inner, t)
		}
		if prompt = prompt || strings.HasPrefix(t, "$ "); prompt {
			shell = append(shell, t)
		}
		if t != f.Question {
			all = append(all, t)
		}
	}
	what := all
	for _, c := range [][]string{shell, inner, dashed} {
		if len(c) > 0 {
			what = c
		}
	}
	body := redact(visible(strings.Join(what, "\n")))
	question := redact(visible(f.Question))
	whole := strings.TrimSpace(body + "\n" + question)
	if len(whole) <= 200 {
		f.Excerpt = whole
		return
	}
	f.Cut = true
	question = clipHead(question, 70)
	f.Excerpt = middle(body, 200-len(question)-4) + "\n" + question + "…"
}

/* ----- dialogs with buttons ----- */

var reButtons = regexp.MustCompile(`^<\s*[^<>]{1,20}\s*>(\s+<\s*[^<>]{1,20}\s*>)*$`)
var reButton = regexp.MustCompile(`<\s*([^<>]*?)\s*>`)

// readBox finds a framed dialog with buttons in angle brackets, as whiptail, dialog and pinentry draw it.
func (v *view) readBox() *found {
	if v.tty.Canonical {
		return nil
	}
	for r := v.last; r > 1; r-- {
		w := v.rows[r]
		if w.depth == 0 || !reButtons.MatchString(w.text) {
			continue
		}
		top := r
		for top > 0 && (v.rows[top-1].depth > 0 || v.rows[top-1].rule) && !(v.rows[top].top && v.rows[top].depth == 0) {
			top--
		}
		return v.box(top, r)
	}
	return nil
}

func (v *view) box(top, buttons int) *found {
	f := &found{}
	f.Prompt = Prompt{Type: MultipleChoice, Score: 0.90, Pointer: -1}
	var attrs []Attr
	line := v.rows[buttons].text
	for _, m := range reButton.FindAllStringSubmatchIndex(line, -1) {
		f.Choices = append(f.Choices, Choice{Key: fmt.Sprint(len(f.Choices) + 1), Label: line[m[2]:m[3]]})
		attrs = append(attrs, v.attr(buttons, v.rows[buttons].at+utf8.RuneCountInString(line[:m[0]])+1))
	}
	var words, list []int
	for r := top; r < buttons; r++ {
		if v.rows[r].text != "" && strings.Trim(v.rows[r].text, "_ ") != "" {
			words = append(words, r)
		}
	}
	field := !v.hidden && v.row > top && v.row < buttons
	if !field {
		list = v.listed(words)
	}
	if len(list) > 0 {
		words = words[:slices.Index(words, list[0])]
	}
	if field {
		words = slices.DeleteFunc(words, func(r int) bool { return r >= v.row && !strings.Contains(v.rows[r].text, ":") })
	}
	var text []string
	for _, r := range words {
		text = append(text, strings.TrimRight(v.rows[r].text, "_ "))
	}
	f.Question = strings.Join(text, " ")
	f.Full = v.text(top, buttons+1)
	switch {
	case field:
		f.Choices, f.Type = nil, FreeText
		f.Secret = reSecret.MatchString(f.Question)
	case len(list) > 0:
		v.boxList(f, list)
	case len(f.Choices) == 1:
		f.Type = ConfirmEnter
		f.Choices = nil
	default:
		f.Pointer, f.Axis = max(odd(attrs), 0), "horizontal"
		if v.row == buttons { // dialog(1) puts the cursor on the button in force
			for i, m := range reButton.FindAllStringSubmatchIndex(line, -1) {
				at := v.rows[buttons].at
				if a, b := utf8.RuneCountInString(line[:m[0]]), utf8.RuneCountInString(line[:m[1]]); v.col >= at+a && v.col < at+b {
					f.Pointer = i
				}
			}
		}
		if isYesNo(f.Choices) {
			f.Type = YesNo
		}
	}
	return f
}

// listed are the rows of a box that form a list: ticked or with one drawn unlike the others.
func (v *view) listed(words []int) (list []int) {
	for _, r := range words {
		if v.option(r).tick >= 0 {
			list = append(list, r)
		}
	}
	if len(list) > 0 {
		return list
	}
	for n := len(words); n >= 2; n-- {
		var attrs []Attr
		rows := words[len(words)-n:]
		for _, r := range rows {
			attrs = append(attrs, v.attr(r, v.rows[r].at))
			if v.rows[r].at != v.rows[rows[0]].at {
				attrs = nil
				break
			}
		}
		if i := odd(attrs); attrs != nil && i >= 0 && (n > 2 || v.rows[rows[0]].depth > 1 || i == 0) {
			return rows
		}
	}
	return nil
}

func (v *view) boxList(f *found, list []int) {
	f.Choices, f.Axis = nil, "vertical"
	var attrs []Attr
	for i, r := range list {
		o := v.option(r)
		attrs = append(attrs, v.attr(r, o.at))
		if i < 9 {
			f.Choices = append(f.Choices, Choice{Key: fmt.Sprint(i + 1), Label: o.label})
			f.Ticked = append(f.Ticked, o.tick == 1)
			f.Multi = f.Multi || o.tick >= 0 && strings.Contains(v.rows[r].text, "[")
		}
	}
	if f.Pointer = odd(attrs); f.Pointer < 0 {
		f.Pointer = 0
	}
	if f.Multi {
		f.Toggle, f.Submit = " ", "\r"
	} else {
		f.Ticked = nil
	}
}

var (
	reRadio  = regexp.MustCompile(`^([●○])\s*(\S.*?)\s*/\s*([●○])\s*(\S.*)$`)
	reGap    = regexp.MustCompile(`\s{2,}`)
	reKeyTip = regexp.MustCompile(`⇆|^(ctrl|enter|esc|tab)\b`)
)

// readButtons finds choices side by side: "● Yes / ○ No" (clack), opencode's row of buttons.
func (v *view) readButtons() *found {
	if v.tty.Canonical {
		return nil
	}
	for r := v.last; r >= max(0, v.last-4); r-- {
		t := v.rows[r].text
		f := &found{}
		f.Prompt = Prompt{Type: MultipleChoice, Score: 0.90, Pointer: -1, Axis: "horizontal"}
		if m := reRadio.FindStringSubmatch(t); m != nil {
			f.Choices = []Choice{{Key: "1", Label: m[2]}, {Key: "2", Label: m[4]}}
			if f.Pointer = 0; m[3] == "●" {
				f.Pointer = 1
			}
			if isYesNo(f.Choices) {
				f.Type = YesNo
			}
		} else if strings.Contains(t, "⇆") {
			var attrs []Attr
			for i, at := 0, v.rows[r].at; i < 9; i++ {
				label := reGap.Split(t, 2)
				if reKeyTip.MatchString(label[0]) || len(label) < 2 {
					break
				}
				f.Choices = append(f.Choices, Choice{Key: fmt.Sprint(i + 1), Label: label[0]})
				attrs = append(attrs, v.attr(r, at))
				at += utf8.RuneCountInString(t) - utf8.RuneCountInString(label[1])
				t = label[1]
			}
			f.Pointer = max(odd(attrs), 0)
		}
		if len(f.Choices) >= 2 {
			v.describe(f, r, r)
			return f
		}
	}
	return nil
}

/* ----- questions on the cursor's line ----- */

var (
	reMarked  = regexp.MustCompile(`[\[(<]([^()<>\[\]]{1,60}|[^()<>\[\]]{0,20}\[[^\]]{1,12}\][^()<>\[\]]{0,40})[\])>]`)
	reSplit   = regexp.MustCompile(`\s*[/,|]\s*(?:or\s+)?|\s+or\s+`)
	reWord    = regexp.MustCompile(`(?i)^(yes|no|always|never|all|none|quit|cancel|retry|abort|ignore|skip|edit|help|fingerprint|once|C-.)$`)
	reTyped   = regexp.MustCompile(`(?i)(?:type|enter)\s+['"‘]?(yes)['"’]?\b|\b(yes)\s*/\s*no\s*[?:]?$|\b(y)\s*/\s*n\s*[?:]?$`)
	reHotkeys = regexp.MustCompile(`[\[(]([A-Za-z])[\])]([a-z][\w-]*(?: [A-Za-z][\w-]*)?)`)
	rePress   = regexp.MustCompile(`(?i)\b(press|hit|strike|push)\s+(the\s+)?[\[<("']?(enter|return|any\s+key|a\s+key|space)\b|` +
		`\[(press )?(enter|return|more)\]\s*$|^\[press .*\]$`)
	reNotPress = regexp.MustCompile(`(?i)to skip|for (the )?default|selection|number|choice|keep|path|press [a-z] to`)
	rePager    = regexp.MustCompile(`(?i)^-+ ?\(?more\b|^\(END\)|^:$|^lines \d+-\d+|\(press h for help|^Manual page `)
	reSecret   = regexp.MustCompile(`(?i)\b(password|passphrase|pass phrase|passcode|pin|secret|secret value|token|api[ _-]?key|otp|` +
		`verification code|2fa code)\b[^?]*[:›>]?\s*$`)
	reREPL = regexp.MustCompile(`^(\s*[\w@~:.,/()\[\]<>+=-]*(\s[\w@~:./()\[\]-]{1,40}){0,2}\s?(>|\$|#|%|»|❯|λ|➜)\s?|\(\w[\w-]*\)|\.\.\.|` +
		`In \[\d+\]:|\S+:\d+[*"']|(?i:(cmd|command)\b[^:]*:))$`)
	reChoose = regexp.MustCompile(`(?i)choice|choose|select|option|number|which|pick|\bwhat\b|your |#\?|\d ?- ?\d`)
	reAsks   = regexp.MustCompile(`(?i)^(\S+[:.] )?(what|which|where|who|how|why|when|name|enter|in which)\b`)
	reInstr  = regexp.MustCompile(`(?i)^(enter|choose|type|select|provide|specify|option)\b\s*[a-z]`)
)

// readLine judges the line the cursor stands on; where the cursor is in column 0, the line above it.
func (v *view) readLine(o DetectOptions) *found {
	line, top := v.cursorLine()
	busy := v.tty.Reading == ReadingBusy
	if busy && v.tty.Canonical && v.tty.Echo || v.a.Box != nil && v.s.AltScreen() {
		return nil
	}
	f := &found{line: line, place: v.place(top)}
	f.Prompt = Prompt{Pointer: -1, Signals: []string{"pattern"}}
	if v.tty.Canonical && !v.tty.Echo && v.col > 0 {
		f.Type, f.Score, f.Secret, f.Question = FreeText, 0.90, true, strings.TrimSpace(line)
		return v.paragraph(f, top)
	}
	text := strings.TrimSpace(line)
	if c, _ := utf8.DecodeRuneInString(text); c >= 0x2800 && c <= 0x28ff {
		return nil
	}
	if text == "" {
		return v.readAbove(f, o)
	}
	if strings.HasPrefix(text, "(") && strings.HasSuffix(text, ")") && strings.Contains(text, " ") {
		above, up := v.lineAbove(top) // a remark in brackets below the question
		text, top = strings.TrimSpace(above)+" "+text, max(up, 0)
	}
	if strings.TrimSpace(v.after()) != "" && !v.s.AltScreen() && !reLead.MatchString(text) && !faint(v.attr(v.row, v.col)) {
		return nil
	}
	if v.s.AltScreen() && v.row < v.last-2 {
		return nil
	}
	if v.classify(f, text, top) {
		return v.paragraph(f, top)
	}
	if busy || !v.a.generic() {
		return nil
	}
	return v.unfinished(f, o)
}

// classify fills in what kind of question text is; false: none that can be told by its words.
func (v *view) classify(f *found, text string, top int) bool {
	strong := v.strong(f, text, top)
	if strong {
		return true
	}
	if v.tty.Reading == ReadingBusy || !v.a.generic() {
		return false
	}
	f.Question = text
	unsure := v.tty.Reading != ReadingYes
	f.Score, f.mute = 0.75, true
	if unsure {
		f.wait, f.Score = 2*time.Second, 0.65
	}
	secret := reSecret.MatchString(text) && !v.tty.Echo && !(v.tty.Canonical && v.tty.Echo)
	above, _ := v.lineAbove(top)
	word := strings.ToLower(strings.TrimRight(text, "> "))
	switch {
	case secret:
		f.Type, f.Secret, f.Score = FreeText, true, f.Score+0.10
	case v.s.AltScreen() && !strings.HasSuffix(text, ":") && !strings.HasSuffix(text, "?"):
		return false
	case reREPL.MatchString(text) && !(reInstr.MatchString(above) && strings.Contains(strings.ToLower(above), word)):
		f.Type, f.Idle = FreeText, true
	case strings.HasSuffix(text, "?") && !reAsks.MatchString(text) && !strings.HasPrefix(text, "? "):
		f.Type = YesNo
		f.Choices = v.yesNo("y", "n", false)
	case strings.ContainsAny(text[len(text)-1:], ":?") || strings.HasSuffix(text, "›") || strings.HasPrefix(text, "? ") ||
		strings.HasSuffix(text, ">") || regexp.MustCompile(`[:?]\s*[\[(][^\])]*[\])]\s*$|[\[(][^\])]*[\])]\s*:?$`).MatchString(text):
		f.Type = FreeText
	default:
		return false
	}
	return true
}

// strong finds questions that name their answers: markers, hot keys, lists, keys to press.
func (v *view) strong(f *found, text string, top int) bool {
	f.Question, f.Score = text, 0.85
	switch {
	case rePager.MatchString(strings.TrimSpace(v.cells(v.row, 0, v.col))) && !v.tty.Canonical && v.row >= v.last:
		f.Type = ConfirmEnter
	case v.listAbove(f, text, top):
		f.Type = MultipleChoice
	case v.marked(f, text):
	case rePress.MatchString(text) && !reNotPress.MatchString(text):
		f.Type = ConfirmEnter
	case v.s.AltScreen() && v.row == v.last && v.attr(v.row, 0).Reverse && v.a.generic() && v.tty.Reading == ReadingYes:
		f.Type = ConfirmEnter // a pager shows the file's name in reverse
	default:
		return false
	}
	return true
}

// marked finds "[Y/n]" in its forms, letter menus and hot keys in the last sentence of text.
func (v *view) marked(f *found, text string) bool {
	if keys := reHotkeys.FindAllStringSubmatch(text, -1); len(keys) >= 2 {
		for _, k := range keys {
			f.Choices = append(f.Choices, v.letter(k[1], k[1]+k[2], false))
		}
		f.Type = MultipleChoice
		v.narrow(f)
		return true
	}
	all := reMarked.FindAllStringSubmatchIndex(text, -1)
	for i := len(all) - 1; i >= max(0, len(all)-3); i-- {
		m := all[i]
		inner, before, rest := text[m[2]:m[3]], strings.TrimSpace(text[:m[0]]), strings.Trim(text[m[1]:], " ?:>›»…")
		tokens, single := answerTokens(inner)
		if len(tokens) == 0 || before == "" && len(tokens) < 2 {
			continue
		}
		angle := text[m[0]] == '<'
		if angle && (len(tokens) != 1 || rest != "") {
			continue
		}
		if len(tokens) == 1 && (rest != "" || !angle && !strings.HasSuffix(before, "?") && !strings.Contains(text[m[1]:], "?") &&
			!strings.HasSuffix(text, ":")) {
			continue
		}
		if rest != "" && !strings.HasPrefix(rest, "[") && !strings.HasPrefix(rest, "(") && len(strings.Fields(rest)) < 3 {
			continue // an answer was typed behind it
		}
		if len(tokens) == 1 {
			tokens = []string{"y", "n"}
			if len(inner) > 2 {
				tokens = []string{"yes", "no"}
			}
		}
		for _, t := range tokens {
			f.Choices = append(f.Choices, v.letter(t, t, angle || single))
		}
		f.Type = MultipleChoice
		v.narrow(f)
		return true
	}
	if m := reTyped.FindStringSubmatch(text); m != nil {
		f.Type = YesNo
		switch {
		case strings.Contains(text, "capital"):
			f.Choices = v.yesNo("YES", "no", false)
		case m[3] != "":
			f.Choices = v.yesNo("y", "n", false)
		default:
			f.Choices = v.yesNo("yes", "no", false)
		}
		return true
	}
	return false
}

// answers splits what stands in the brackets of a marker; nil when that is no list of answers. single: the
// answers are letters without anything between them, read one key at a time.
func answerTokens(inner string) (tokens []string, single bool) {
	parts := reSplit.Split(strings.TrimSpace(inner), -1)
	if len(parts) == 1 {
		low := strings.ToLower(strings.Trim(inner, "[] "))
		switch {
		case slices.Contains([]string{"y", "n", "yes", "no"}, low):
			return []string{low}, false
		case slices.Contains([]string{"yn", "ny", "ynq", "yna", "ynaq"}, low):
			return strings.Split(inner, ""), false
		case len(low) <= 9 && strings.Contains(low, "?") && !strings.Contains(low, " "):
			return strings.Split(inner, ""), true
		}
		return nil, false
	}
	letters := 0
	for _, p := range parts {
		p = strings.Trim(p, "[]'\"‘’ ")
		if utf8.RuneCountInString(p) == 1 {
			letters++
		} else if !reWord.MatchString(p) {
			return nil, false
		}
		tokens = append(tokens, p)
	}
	yes := slices.ContainsFunc(tokens, func(t string) bool { return strings.EqualFold(t, "y") || strings.EqualFold(t, "yes") })
	if !yes && letters < len(tokens) || len(tokens) < 2 {
		return nil, false
	}
	return tokens, false
}

// narrow turns a choice between yes and no, give or take help and quit, into a yes/no question.
func (v *view) narrow(f *found) {
	var y, n *Choice
	for i := range f.Choices {
		c := &f.Choices[i]
		switch strings.ToLower(c.Label) {
		case "y", "yes":
			y = c
		case "n", "no":
			n = c
		case "?", "q", "quit", "h", "help", "fingerprint":
		default:
			if len(f.Choices) > 9 {
				f.Choices = f.Choices[:9]
			}
			return
		}
	}
	if y == nil || n == nil {
		return
	}
	y.Key, n.Key = "y", "n"
	f.Type, f.Choices = YesNo, []Choice{{"y", "Yes", y.Keys, false, ""}, {"n", "No", n.Keys, false, ""}}
}

// letter is a choice that is typed: with Enter, unless the program reads single keys.
func (v *view) letter(key, label string, single bool) Choice {
	c := Choice{Key: key, Label: label, Keys: key + "\r"}
	if strings.HasPrefix(key, "C-") && len(key) == 3 {
		c.Keys = string(rune(key[2] & 0x1f))
	} else if single && !v.tty.Canonical || v.s.AltScreen() {
		c.Keys = key
	}
	return c
}

func (v *view) yesNo(yes, no string, single bool) []Choice {
	y, n := v.letter(yes, "Yes", single), v.letter(no, "No", single)
	y.Key, n.Key = "y", "n"
	return []Choice{y, n}
}

var (
	reItem    = regexp.MustCompile(`^[*>]?\s*\(?(\d{1,2})(?:\s?[.):/]\)?\s|\s{2,})\s*(\S.*)$`)
	reLetters = regexp.MustCompile(`^(?:\s*([A-Za-z?])\)\s+|\s{2,}([A-Za-z])\s{2,})(\S.*)$`)
	reColumns = regexp.MustCompile(`(\d{1,2})[.:)]\s+(\S+(?: \S+)*)(?:\s{2,}|$)`)
)

// listAbove finds the list of options printed over a line that asks for one of them.
func (v *view) listAbove(f *found, text string, top int) bool {
	if !strings.ContainsAny(text[len(text)-1:], ":>?]#") || strings.HasSuffix(text, "#") && text != "#" || strings.HasSuffix(text, ">>>") {
		return false
	}
	var items []Choice
	rows := 0
	skip := func(r int) bool {
		t := strings.TrimSpace(v.rows[r].raw)
		return strings.HasPrefix(t, `\`) || t == ""
	}
	r := top - 1
	for n := 0; r >= 0 && len(v.items(r)) == 0 && (skip(r) || n == 0 && reChoose.MatchString(text)); r-- {
		if !skip(r) {
			n++
		}
	}
	first := r
	for n := 0; r >= 0 && n < 2; r-- {
		if row := v.items(r); len(row) > 0 {
			items = append(row, items...)
			rows, first, n = rows+1, r, 0
		} else if skip(r) {
			n++
		} else {
			break
		}
	}
	if len(items) > 0 && items[0].Key <= "9" {
		slices.SortStableFunc(items, func(a, b Choice) int { return number(a.Key) - number(b.Key) })
	}
	if len(items) < 2 || !reChoose.MatchString(text) && !regexp.MustCompile(`^(#\?|[\w /]{0,30}[:>?])$`).MatchString(text) {
		return false
	}
	single := !v.tty.Canonical && strings.HasPrefix(text, "[") // dosfsck: [12?q]?
	if n := items[0].Key; n > "1" && n <= "9" || len(n) == 2 {
		items = nil // the beginning has left the screen
	}
	for i, c := range items {
		if i < 9 {
			k := v.letter(c.Key, c.Label, single)
			f.Choices = append(f.Choices, k)
		}
	}
	if v.rows[max(first-1, 0)].raw != "" && !reChoose.MatchString(text) {
		f.Question = strings.TrimSpace(v.rows[max(first-1, 0)].text) + "\n" + text
	}
	return true
}

// items are the options in row r of a printed list: one, or several in columns.
func (v *view) items(r int) (items []Choice) {
	raw := v.rows[r].raw
	if all := reColumns.FindAllStringSubmatch(raw, -1); len(all) > 1 && strings.HasPrefix(strings.TrimSpace(raw), all[0][1]) {
		for _, m := range all {
			items = append(items, Choice{Key: m[1], Label: m[2]})
		}
		return items
	}
	if m := reItem.FindStringSubmatch(strings.TrimSpace(raw)); m != nil {
		return []Choice{{Key: m[1], Label: strings.TrimSpace(m[2])}}
	}
	if m := reLetters.FindStringSubmatch(raw); m != nil {
		return []Choice{{Key: m[1] + m[2], Label: strings.TrimSpace(m[3])}}
	}
	return nil
}

// readAbove judges a cursor in column 0: a program that ended its question with a newline, one that never
// said anything, or text that came after the question.
func (v *view) readAbove(f *found, o DetectOptions) *found {
	if v.a.Box != nil && v.last >= 0 { // a known tool, not its input box: only what it names outright
		line, top := v.lineAbove(v.last + 1)
		if f.line, f.place = "", 0; rePress.MatchString(line) && !reNotPress.MatchString(line) && len(line) < 80 {
			f.Type, f.Score, f.Question = ConfirmEnter, 0.85, strings.TrimSpace(line)
			return v.paragraph(f, top)
		}
		return nil
	}
	line, top := v.lineAbove(v.row)
	if t := strings.TrimSpace(line); !v.tty.Canonical && v.row-top <= 2 && strings.HasPrefix(t, "[") && rePress.MatchString(t) {
		f.Type, f.Score, f.Question = ConfirmEnter, 0.85, t
		return f
	}
	if v.tty.Reading != ReadingYes || v.s.AltScreen() {
		return nil
	}
	f.line = ""
	text := strings.TrimSpace(line)
	if v.tty.Canonical {
		f.wait = settleBare
		f.place = v.place(max(top, 0))
		switch {
		case text == "" && v.last < 0:
			f.Type, f.Score, f.wait, f.mute, f.Signals = FreeText, 0.65, o.Stuck, true, []string{"silence"}
			f.Question = "the program waits for input"
			return f
		case v.strong(f, text, top), strings.HasSuffix(text, "?") && v.classify(f, text, top), strings.HasSuffix(text, ":") && len(text) < 60 && v.classify(f, text, top):
			f.mute, f.wait = true, settleBare
			return v.paragraph(f, top)
		}
		f.Choices = nil
		f.Type, f.Idle, f.Score, f.wait, f.mute = FreeText, true, 0.60, o.Stuck, true
		f.Signals, f.Question = []string{"silence"}, text
		return f
	}
	// Raw: a line written below an open question, or a prompt that hides the cursor.
	for n := 0; n < 3 && top >= 0; n++ {
		if f.Choices = nil; v.marked(f, strings.TrimSpace(line)) && f.Type == YesNo {
			f.Score, f.Question = 0.85, strings.TrimSpace(line)
			return v.paragraph(f, top)
		}
		if t := strings.Trim(v.rows[top].text, " "); v.hidden && (reAsked.MatchString(t) || strings.Contains(t, "? ")) || strings.Contains(v.rows[top].raw, "◆") && v.hidden {
			f.Type, f.Score, f.Question = FreeText, 0.75, reLead.ReplaceAllString(strings.TrimSpace(strings.TrimLeft(v.rows[top].raw, "│◆ ")), "")
			f.Question = strings.TrimLeft(f.Question, corners+levels+" ")
			return f
		}
		line, top = v.lineAbove(top)
	}
	return nil
}

// unfinished is a line without a newline that no rule knows, where a reader or long silence says the rest.
func (v *view) unfinished(f *found, o DetectOptions) *found {
	if v.s.AltScreen() || v.hidden {
		return nil
	}
	f.Type, f.Score, f.wait, f.mute, f.Signals = Unknown, 0.60, o.Stuck, true, []string{"silence"}
	if v.tty.Reading == ReadingYes {
		f.Score = 0.65
	}
	f.Choices = nil
	return f
}

// paragraph completes a question with the lines before it that belong to the same sentence.
func (v *view) paragraph(f *found, top int) *found {
	full := []string{f.Question}
	short := len(strings.Fields(f.Question)) < 3
	for n := 0; n < 12 && top > 0 && !v.s.AltScreen(); n++ {
		if v.rows[top-1].raw == "" || v.rows[top-1].rule {
			break
		}
		var line string
		line, top = v.lineAbove(top)
		full = append([]string{strings.TrimRight(line, " ")}, full...)
		c, _ := utf8.DecodeRuneInString(f.Question)
		if n < 3 && (unicode.IsLower(c) && !strings.Contains(f.Question, ": ") || short && n == 0) && !f.Idle && !f.Secret {
			f.Question = strings.TrimSpace(line) + "\n" + f.Question
		}
	}
	f.Full = strings.Join(full, "\n")
	return f
}

/* ----- text made safe ----- */

// shapes of secrets: keys of AWS, GitHub, Slack, OpenAI and Anthropic, JWT, PEM, bot tokens, passwords in
// URLs and assignments.
var shapes = []*regexp.Regexp{
	regexp.MustCompile(`\b(?:AKIA|ASIA)[0-9A-Z]{16}\b`),
	regexp.MustCompile(`\b(?:gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|sk-|sk_live_|rk_live_|AIza|npm_|hf_)[\w-]{16,}`),
	regexp.MustCompile(`\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*`),
	regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`),
	regexp.MustCompile(`\b\d{6,}:[A-Za-z0-9_-]{30,}`),
	regexp.MustCompile(`(://[^\s/:@]*:)[^\s/@]+(@)`),
	regexp.MustCompile(`(?i)((?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key)["']?\s*[=:]\s*["']?)[^\s"'&;,]{4,}()`),
	regexp.MustCompile(`(?i)(\bauthorization:\s*(?:bearer|basic|token)\s+)[\w.+/=~-]{8,}()`),
}

// redact replaces known shapes of secrets (keys, tokens, passwords in URLs, bot tokens). Every sink uses it.
func redact(s string) string {
	for _, re := range shapes {
		with := "[redacted]"
		if re.NumSubexp() == 2 {
			with = "${1}[redacted]${2}"
		}
		s = re.ReplaceAllString(s, with)
	}
	return s
}

// hiding are the characters a terminal does not show, or that turn the text around: C0, C1, zero width, bidi,
// tags and variation selectors.
var hiding = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x00, 0x1f, 1}, {0x7f, 0x9f, 1}, {0xad, 0xad, 1}, {0x61c, 0x61c, 1}, {0x180e, 0x180e, 1}, {0x200b, 0x200f, 1},
		{0x2028, 0x202e, 1}, {0x2060, 0x206f, 1}, {0xfe00, 0xfe0f, 1}, {0xfeff, 0xfeff, 1}, {0xfff9, 0xfffb, 1},
	},
	R32: []unicode.Range32{{0xe0000, 0xe01ef, 1}},
}

// visible shows control, zero-width and bidi characters as \u{200B}; newline and tab stay.
func visible(s string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return unicode.Is(hiding, r) || r == utf8.RuneError }) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.Is(hiding, r) && r != '\n' && r != '\t' {
			fmt.Fprintf(&b, `\u{%04X}`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// clip cuts s to at most n bytes on a rune boundary, ending in "…".
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	n -= len("…")
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:max(n, 0)] + "…"
}

// clipHead cuts s to at most n characters, ending in "…".
func clipHead(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// middle cuts s to at most n bytes by taking out its middle.
func middle(s string, n int) string {
	if len(s) <= n {
		return s
	}
	head, tail := (n-5)/2, len(s)-(n-5)/2
	for head > 0 && !utf8.RuneStart(s[head]) {
		head--
	}
	for tail < len(s) && !utf8.RuneStart(s[tail]) {
		tail++
	}
	return s[:head] + " … " + s[tail:]
}

/* ----- the Prompt Lab ----- */

// labEvent is what the lab prints of one prompt: an object per line with --json.
type labEvent struct {
	File        string     `json:"file"`
	T           float64    `json:"t"`
	Type        PromptType `json:"type"`
	Confidence  string     `json:"confidence"`
	Score       float64    `json:"score"`
	Idle        bool       `json:"idle"`
	Secret      bool       `json:"secret"`
	Excerpt     string     `json:"excerpt"`
	Choices     []Choice   `json:"choices"`
	SafeDefault *string    `json:"safe_default"`
	Signals     []string   `json:"signals"`
	prompt      *Prompt
	last        float64 // seconds from the last byte to the event
}

// tape is a recording (asciicast v2) or a scenario, ready to be replayed.
type tape struct {
	name, tool string
	rows, cols int
	events     []tapeEvent
	want       *scenario
}

type tapeEvent struct {
	t    float64
	kind string // "o", "i", "r", "t"
	data string
}

// scenario is a file of the Prompt Lab: the format of the adapter interface, section 9.
type scenario struct {
	Tool        string   `json:"tool"`
	ID          string   `json:"scenario_id"`
	Description string   `json:"description"`
	Output      string   `json:"pty_output"`
	Recording   string   `json:"recording"`
	TTY         string   `json:"tty"` // as in a "t" event
	Rows        int      `json:"rows"`
	Cols        int      `json:"cols"`
	Type        *string  `json:"expected_type"`
	Band        string   `json:"expected_confidence_band"`
	Contains    string   `json:"expected_excerpt_contains"`
	Choices     []string `json:"expected_choices"`
	Idle        bool     `json:"expected_idle"`
	Secret      bool     `json:"expected_secret"`
	Default     *string  `json:"expected_safe_default"`
}

// parseCast reads an asciicast v2 recording.
func parseCast(name string, data []byte) (*tape, error) {
	lines := bytes.Split(data, []byte("\n"))
	var head struct {
		Version, Width, Height int
		Title, Command         string
	}
	if err := json.Unmarshal(lines[0], &head); err != nil {
		return nil, fmt.Errorf("reading the header of %s: %w", name, err)
	}
	if head.Version != 2 {
		return nil, fmt.Errorf("reading %s: asciicast version %d, want 2", name, head.Version)
	}
	tp := &tape{name: name, tool: head.Title, rows: head.Height, cols: head.Width}
	if f := strings.Fields(head.Command); len(f) > 0 {
		tp.tool = f[0]
	}
	for i, l := range lines[1:] {
		if len(bytes.TrimSpace(l)) == 0 {
			continue
		}
		var e tapeEvent
		if err := json.Unmarshal(l, &[]any{&e.t, &e.kind, &e.data}); err != nil {
			return nil, fmt.Errorf("reading %s, line %d: %w", name, i+2, err)
		}
		if n := len(tp.events); n > 0 && e.t < tp.events[n-1].t {
			e.t = tp.events[n-1].t
		}
		tp.events = append(tp.events, e)
	}
	return tp, nil
}

// parseTTY reads the words of a "t" event.
func parseTTY(s string) (t TTYState) {
	for _, w := range strings.Fields(s) {
		switch w {
		case "reading":
			t.Reading = ReadingYes
		case "busy":
			t.Reading = ReadingBusy
		case "canon":
			t.Canonical = true
		case "echo":
			t.Echo = true
		}
	}
	return t
}

// replay runs a tape through a detector as a session would, and stops at the time of its last event. The
// terminal's state holds until more output comes; each is called for every event, with what was asked.
func replay(tp *tape, o DetectOptions, each func(labEvent)) *Detector {
	d := newDetector(adapterFor(tp.tool), tp.rows, tp.cols, o)
	zero := time.Unix(0, 0)
	at := func(t float64) time.Time { return zero.Add(time.Duration(t * float64(time.Second))) }
	var tty TTYState
	fresh := false
	tick := func(now time.Time) {
		s := tty
		if !fresh {
			s.Reading = ReadingUnknown
		}
		if p := d.Tick(s, now); p != nil {
			each(labEvent{tp.name, now.Sub(zero).Seconds(), p.Type, p.Confidence(), p.Score, p.Idle, p.Secret, p.Excerpt,
				p.Choices, p.SafeDefault, p.Signals, p, now.Sub(d.LastOutput()).Seconds()})
		}
	}
	for _, e := range tp.events {
		now := at(e.t)
		for next, n := d.Next(zero), 0; !next.IsZero() && next.Before(now) && n < 10000; n++ {
			tick(next)
			zeroed := next
			if next = d.Next(zeroed); !next.IsZero() && !next.After(zeroed) {
				next = zeroed.Add(time.Millisecond)
			}
		}
		switch e.kind {
		case "o":
			d.Feed([]byte(e.data), now)
			fresh = false
		case "i":
			d.Typed([]byte(e.data), now)
		case "r":
			var cols, rows int
			if n, _ := fmt.Sscanf(e.data, "%dx%d", &cols, &rows); n == 2 {
				d.Resize(rows, cols, now)
			}
		case "t":
			tty, fresh = parseTTY(e.data), true
			tick(now)
		}
	}
	return d
}

// cmdLab is `atlasbridge lab [--json] [--explain] [--screen] [FILE|DIR…]`: it replays recordings and
// scenarios and prints what would have been asked. Exit 1 when a scenario or a file is not as it should be.
func cmdLab(c *command) int {
	fs := flag.NewFlagSet("lab", flag.ContinueOnError)
	fs.SetOutput(c.stderr)
	asJSON := fs.Bool("json", false, "one object per event, and nothing else")
	explain := fs.Bool("explain", false, "the question, its choices and what agreed")
	screen := fs.Bool("screen", false, "print the screen a recording ends with")
	if err := fs.Parse(c.args); err != nil {
		return 2
	}
	paths := fs.Args()
	if len(paths) == 0 {
		paths = []string{"testdata"}
	}
	files, index, err := labFiles(paths)
	if err != nil {
		fmt.Fprintln(c.stderr, "atlasbridge lab:", err)
		return 1
	}
	out := bufio.NewWriter(c.stdout)
	defer out.Flush()
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	bad, events := 0, 0
	sum := tally{}
	for _, file := range files {
		tp, err := openTape(file)
		if err != nil {
			fmt.Fprintln(c.stderr, "atlasbridge lab:", err)
			bad++
			continue
		}
		var seen []labEvent
		d := replay(tp, DetectOptions{}, func(e labEvent) { seen = append(seen, e) })
		events += len(seen)
		if *screen {
			fmt.Fprintln(out, d.Screen.Text())
			continue
		}
		for _, e := range seen {
			if *asJSON {
				enc.Encode(e)
				continue
			}
			fmt.Fprintf(out, "%-40s %8.2f s  %-15s %-6s %.2f  %s\n", e.File, e.T, e.Type, e.Confidence, e.Score,
				strings.ReplaceAll(e.Excerpt, "\n", " ⏎ "))
			if *explain {
				e.explain(out)
			}
		}
		if why := tp.want.check(seen); why != "" {
			bad++
			if !*asJSON {
				fmt.Fprintf(out, "%-40s NOT AS EXPECTED: %s\n", tp.name, why)
			}
		}
		if l, ok := index[tp.name]; ok {
			sum.add(l, seen)
		}
	}
	if !*asJSON && !*screen {
		fmt.Fprintf(out, "%d files, %d events, %d not as expected\n", len(files), events, bad)
		sum.print(out)
	}
	return min(bad, 1)
}

// explain says why an event was raised.
func (e *labEvent) explain(w io.Writer) {
	p := e.prompt
	fmt.Fprintf(w, "    question  %q\n    signals   %s, %.0f ms after the last byte\n", p.Question, strings.Join(p.Signals, " "), e.last*1000)
	for i, c := range p.Choices {
		mark := ' '
		if i == p.Pointer {
			mark = '>'
		}
		fmt.Fprintf(w, "   %c %-8s %q types %q grants=%v\n", mark, c.Key, c.Label, c.Keys, c.Grants)
	}
	def := "nothing is typed"
	if p.SafeDefault != nil {
		def = fmt.Sprintf("%q", *p.SafeDefault)
	}
	fmt.Fprintf(w, "    default   %s\n", def)
}

// labFiles are the tapes in paths (folders: all *.cast and *.json in them) and the labels beside them.
func labFiles(paths []string) (files []string, index map[string]label, err error) {
	index = map[string]label{}
	for _, p := range paths {
		st, err := os.Stat(p)
		if err != nil {
			return nil, nil, err
		}
		if !st.IsDir() {
			files = append(files, p)
			continue
		}
		err = filepath.WalkDir(p, func(path string, e os.DirEntry, err error) error {
			if ext := filepath.Ext(path); err == nil && !e.IsDir() && (ext == ".cast" || ext == ".json") {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			return nil, nil, err
		}
		data, _ := os.ReadFile(filepath.Join(p, "index.jsonl"))
		for _, line := range bytes.Split(data, []byte("\n")) {
			var l label
			if json.Unmarshal(line, &l) == nil {
				index[l.File] = l
			}
		}
	}
	return files, index, nil
}

// openTape reads a recording, or a scenario and the recording it names.
func openTape(path string) (*tape, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	name := filepath.Base(path)
	if filepath.Ext(path) != ".json" {
		return parseCast(name, data)
	}
	tp, err := parseScenario(name, data)
	if err == nil && tp.want.Recording != "" {
		want := tp.want
		if data, err = os.ReadFile(filepath.Join(filepath.Dir(path), want.Recording)); err == nil {
			if tp, err = parseCast(name, data); err == nil {
				tp.want, tp.tool = want, want.Tool
			}
		}
	}
	return tp, err
}

// parseScenario makes a tape of a scenario: its output at once, then five seconds of waiting.
func parseScenario(name string, data []byte) (*tape, error) {
	s := &scenario{Rows: 30, Cols: 100}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fmt.Errorf("reading scenario %s: %w", name, err)
	}
	tp := &tape{name: name, tool: s.Tool, rows: s.Rows, cols: s.Cols, want: s}
	tp.events = []tapeEvent{{0, "o", s.Output}}
	for i := 0; i < 20; i++ {
		tty := s.TTY
		if tty == "" {
			tty = "unknown"
		}
		tp.events = append(tp.events, tapeEvent{0.05 + 0.25*float64(i), "t", tty})
	}
	return tp, nil
}

// check compares what was asked with what the scenario expects: the last event; "" when it is so.
func (s *scenario) check(seen []labEvent) string {
	if s == nil {
		return ""
	}
	if s.Type == nil {
		for _, e := range seen {
			if !e.Idle || !s.Idle {
				return fmt.Sprintf("asked %q (%s)", e.Excerpt, e.Type)
			}
		}
		return ""
	}
	if len(seen) == 0 {
		return "nothing was asked"
	}
	e := seen[len(seen)-1]
	want := strings.ToLower(strings.TrimPrefix(*s.Type, "TYPE_"))
	bands := map[string]string{"high": "HIGH", "medium": "MED", "low": "LOW"}
	var labels []string
	for _, c := range e.Choices {
		labels = append(labels, c.Label)
	}
	switch {
	case string(e.Type) != want:
		return fmt.Sprintf("type %s, want %s", e.Type, want)
	case s.Band != "" && bands[e.Confidence] != s.Band:
		return fmt.Sprintf("confidence %s, want %s", e.Confidence, s.Band)
	case !strings.Contains(e.Excerpt, s.Contains):
		return fmt.Sprintf("excerpt %q lacks %q", e.Excerpt, s.Contains)
	case len(s.Choices) > 0 && !slices.Equal(labels, s.Choices):
		return fmt.Sprintf("choices %q, want %q", labels, s.Choices)
	case e.Idle != s.Idle || e.Secret != s.Secret:
		return fmt.Sprintf("idle %v, secret %v", e.Idle, e.Secret)
	case s.Default != nil && (e.SafeDefault == nil || *e.SafeDefault != *s.Default):
		return "another safe default"
	}
	return ""
}

// label is a line of index.jsonl: what a person says a recording shows.
type label struct {
	File, Label, Source string
	Waiting             *bool
	At                  *float64 `json:"t_wait"`
	Choices             []string
	AcceptsKeys         bool `json:"accepts_keys"`
}

// tally counts hits and cases of each figure.
type tally map[string][2]int

func (t tally) count(name string, hit bool) {
	n := t[name]
	if n[1]++; hit {
		n[0]++
	}
	t[name] = n
}

func (t tally) add(l label, seen []labEvent) {
	asked := slices.DeleteFunc(slices.Clone(seen), func(e labEvent) bool {
		return e.Idle || l.Source == "agent" && l.At != nil && e.T < *l.At-0.5
	})
	switch l.Label {
	case "none", "":
		if l.Waiting != nil && !*l.Waiting {
			t.count("busy taken for waiting ("+l.Source+")", len(asked) > 0)
		}
		return
	case "repl", "idle":
		t.count("idle", len(seen) > 0 && seen[len(seen)-1].Idle)
		return
	case "fullscreen":
		t.count("full-screen programs left alone", len(asked) == 0)
		return
	}
	if l.Waiting == nil || !*l.Waiting {
		return
	}
	t.count("questions found ("+l.Source+")", len(asked) > 0)
	if len(asked) == 0 {
		return
	}
	e := asked[len(asked)-1]
	if l.Source == "agent" {
		e = asked[0]
	}
	kind := map[string]PromptType{"secret": FreeText, "pager": ConfirmEnter, "confirm": ConfirmEnter}[l.Label]
	if kind == "" {
		kind = PromptType(l.Label)
	}
	t.count("right type ("+l.Source+")", e.Type == kind && e.Secret == (l.Label == "secret"))
	if l.Label == "multiple_choice" {
		t.count("menus with all choices ("+l.Source+")", len(e.Choices) >= min(len(l.Choices), 9))
	}
}

func (t tally) print(w io.Writer) {
	for _, k := range slices.Sorted(maps.Keys(t)) {
		fmt.Fprintf(w, "%-45s %4d of %4d  %.1f %%\n", k, t[k][0], t[k][1], 100*float64(t[k][0])/float64(t[k][1]))
	}
}
