package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

/* ===== The gate: the only way an answer becomes bytes ===== */

// gate types one answer, closed loop. While it exists the keyboard waits and the detector is not asked for
// new questions. It looks before its first key, after every key of a menu, and never presses Enter blind; if
// the screen does not follow in time it stops, undoes nothing and tells the operator. Each step is one call
// of gateStep, so the loop never waits.
type gate struct {
	q       *question
	input   *InputRecord // instead of q: free input
	text    string       // what is typed as text
	want    *Choice      // the choice to make
	ticks   []bool       // Multi: which are to be ticked
	phase   gatePhase
	until   time.Time // the screen must have followed by then
	pointer int       // Multi and pointer menus: where the pointer was before the last key
	tries   int       // Enter presses so far
}

type gatePhase int

const (
	gateLook   gatePhase = iota // is the question still there, is nobody typing?
	gateMove                    // pointer or ticks are on their way
	gateReview                  // Multi: the last page asks to submit
	gateEnter                   // the text is in the box, Enter is next
	gateLeft                    // Enter is pressed, the text must leave the box
	gateEcho                    // everything is typed; the echo window passes
)

// openGate starts typing the decision that q's record holds.
func (s *session) openGate(q *question, now time.Time) {
	s.gate = &gate{q: q, until: now.Add(s.cfg.EchoWindow + followTime), pointer: -1}
}

// gateStep moves the gate on and returns when to call again.
func (s *session) gateStep(tty TTYState, now time.Time) time.Time {
	g := s.gate
	if len(s.typing) > 0 || s.inFlight {
		return time.Time{} // the writer's report comes first
	}
	if g.phase == gateLook {
		if ready := s.lastKey.Add(keyGrace); now.Before(ready) {
			return ready
		}
	}
	if g.phase == gateEcho {
		if now.Before(g.until) {
			return g.until
		}
		s.gateDone(now)
		return now
	}
	p := s.det.Look(tty, now)
	switch {
	case g.input != nil || g.q.rec.Idle:
		return s.gateText(p, now)
	case g.phase == gateLook:
		return s.gateFirst(p, now)
	case g.phase == gateReview:
		return s.gateReview(p, now)
	default:
		return s.gateMenu(p, now)
	}
}

// gateFirst is the look before the first key: the question must be on the screen as it was asked.
func (s *session) gateFirst(p *Prompt, now time.Time) time.Time {
	g, rec := s.gate, &s.gate.q.rec
	if p == nil || p.Fingerprint != rec.Fingerprint {
		if now.Before(g.until) {
			return now.Add(gatePoll) // a repaint may be half done
		}
		return s.gateFail("the question is no longer on the screen", now)
	}
	if g.q.typed && p.Pointer < 0 && p.Axis == "" && g.q.screen != nil && p.Recent != g.q.screen.Recent {
		return s.gateFail("somebody began to answer at the keyboard", now)
	}
	value := ""
	if rec.Value != nil {
		value = *rec.Value
	}
	if rec.Secret {
		value, _ = s.st.TakeSecret(rec.ID)
	}
	if value == "default" && rec.SafeDefault != nil {
		value = *rec.SafeDefault
	}
	g.want = choiceOf(&PromptRecord{Value: &value, Choices: rec.Choices})
	switch {
	case value == "enter":
		return s.gateType("\r", now)
	case value == "esc" || value == "cancel" || value == "deny" && g.want == nil && refusing(rec) == nil:
		return s.gateType("\x1b", now)
	case value == "deny":
		g.want = refusing(rec)
		return s.gateMenu(p, now)
	case p.Multi && rec.Multi:
		g.ticks = make([]bool, len(p.Choices))
		for _, key := range strings.Split(value, ",") {
			i := slices.IndexFunc(p.Choices, func(c Choice) bool { return c.Key == strings.TrimSpace(key) })
			if i < 0 {
				return s.gateFail("there is no choice "+key, now)
			}
			g.ticks[i] = true
		}
		return s.gateMenu(p, now)
	case g.want != nil && g.want.Keys != "":
		return s.gateType(g.want.Keys, now)
	case g.want != nil:
		return s.gateMenu(p, now)
	case rec.Type == FreeText || rec.Type == Unknown:
		return s.gateType(s.pasted(cleanText(value))+"\r", now)
	}
	return s.gateFail("there is no choice "+value, now)
}

// refusing is the choice that grants nothing, the last one first: "No" comes last in every dialog seen.
func refusing(rec *PromptRecord) *Choice {
	for i := len(rec.Choices) - 1; i >= 0 && rec.Permission; i-- {
		if !rec.Choices[i].Grants {
			return &rec.Choices[i]
		}
	}
	return nil
}

const gatePoll = 25 * time.Millisecond // between looks at a screen that has not followed yet

// gateMenu moves one key closer to the wanted pointer position or ticks, once the last key shows.
func (s *session) gateMenu(p *Prompt, now time.Time) time.Time {
	g := s.gate
	if p == nil || p.Fingerprint != g.q.rec.Fingerprint || g.phase == gateMove && p.Pointer == g.pointer && !g.ticked(p) {
		if now.Before(g.until) {
			return now.Add(gatePoll)
		}
		return s.gateFail("the menu did not follow the keys; look at the terminal", now)
	}
	target := -1
	if g.ticks != nil {
		for i := range g.ticks {
			if i < len(p.Ticked) && p.Ticked[i] != g.ticks[i] {
				target = i
				break
			}
		}
		if target < 0 {
			submit := p.Submit
			if submit == "" {
				submit = "\r"
			}
			s.inject(submit, now)
			g.phase, g.until = gateReview, now.Add(followTime)
			return now.Add(gatePoll)
		}
		if keys := p.Choices[target].Keys; keys != "" {
			return s.gateKey(p, keys, target, now)
		}
		if p.Pointer == target {
			return s.gateKey(p, " ", target, now)
		}
	} else {
		target = slices.IndexFunc(p.Choices, func(c Choice) bool { return c.Key == g.want.Key })
		if keys := g.want.Keys; keys != "" {
			return s.gateType(keys, now)
		}
		if p.Pointer == target {
			return s.gateType("\r", now)
		}
	}
	if target < 0 || p.Pointer < 0 {
		return s.gateFail("the menu shows no pointer to move", now)
	}
	back, on := "UP", "DOWN"
	if p.Axis == "horizontal" {
		back, on = "LEFT", "RIGHT"
	}
	name := on
	if target < p.Pointer {
		name = back
	}
	keys, _ := keyBytes(name, s.det.Screen.AppCursorKeys())
	return s.gateKey(p, keys, -1, now)
}

// gateKey types one key that must show before the next: the pointer leaves its place, or tick i turns.
func (s *session) gateKey(p *Prompt, keys string, tick int, now time.Time) time.Time {
	g := s.gate
	s.inject(keys, now)
	g.phase, g.pointer, g.until = gateMove, p.Pointer, now.Add(followTime)
	g.tries = tick
	return now.Add(gatePoll)
}

// ticked tells whether the tick that the last key was to turn has turned.
func (g *gate) ticked(p *Prompt) bool {
	return g.ticks != nil && g.tries >= 0 && g.tries < len(p.Ticked) && p.Ticked[g.tries] == g.ticks[g.tries]
}

// gateReview answers the page that asks to submit several answers, where the tool has one.
func (s *session) gateReview(p *Prompt, now time.Time) time.Time {
	g := s.gate
	if p != nil && p.Fingerprint != g.q.rec.Fingerprint {
		for _, c := range p.Choices {
			if strings.HasPrefix(strings.ToLower(c.Label), "submit") && c.Keys != "" {
				return s.gateType(c.Keys, now)
			}
		}
	}
	if p == nil || p.Fingerprint != g.q.rec.Fingerprint {
		return s.gateTyped(now)
	}
	if now.Before(g.until) {
		return now.Add(gatePoll)
	}
	return s.gateFail("the menu did not take the answer; look at the terminal", now)
}

// gateType types the last keys of an answer.
func (s *session) gateType(keys string, now time.Time) time.Time {
	s.inject(keys, now)
	return s.gateTyped(now)
}

func (s *session) gateTyped(now time.Time) time.Time {
	g := s.gate
	g.phase, g.until = gateEcho, now.Add(s.cfg.EchoWindow)
	s.det.Sleep(g.until)
	s.seen = nil
	return g.until
}

// pasted brackets text for a child that has bracketed paste on; otherwise it is one line, so that no line end
// inside it presses Enter.
func (s *session) pasted(text string) string {
	if s.det.Screen.BracketedPaste() {
		return "\x1b[200~" + text + "\x1b[201~"
	}
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' }), " ")
}

// gateText types free text into an input box, and Enter once the text is seen there; it is done when the text
// has left the box.
func (s *session) gateText(p *Prompt, now time.Time) time.Time {
	g := s.gate
	if g.text == "" && g.q != nil && g.q.rec.Value != nil {
		g.text = cleanText(*g.q.rec.Value)
	}
	switch g.phase {
	case gateLook:
		if g.q != nil && (p == nil || !p.Idle) {
			if now.Before(g.until) {
				return now.Add(gatePoll)
			}
			return s.gateFail("the input box is no longer there", now)
		}
		text := g.text
		if s.adapter.EscapeBang { // a leading ! runs a command, / opens a dialog (measured on claude 2.1)
			if strings.HasPrefix(text, "/") {
				text = "\\" + text
			} else if strings.ContainsAny(clipBytes(text, 1), "!#&@") {
				text = " " + text
			}
		}
		s.inject(s.pasted(text), now)
		g.phase, g.until = gateEnter, now.Add(s.adapter.SubmitDelay)
		return g.until
	case gateEnter:
		if now.Before(g.until) {
			return g.until
		}
		s.inject("\r", now)
		g.tries++
		g.phase, g.until = gateLeft, now.Add(submitTime)
		return now.Add(gatePoll)
	}
	if !s.boxHolds(g.text) || s.adapter.Name == "generic" {
		return s.gateTyped(now)
	}
	if now.Before(g.until) {
		return now.Add(gatePoll)
	}
	if g.tries < 2 {
		g.phase, g.until = gateEnter, now
		return now
	}
	return s.gateFail("the text is in the input box but was not taken; look at the terminal", now)
}

// boxHolds tells whether the end of text stands in the cursor's row or the row above, or is folded there as a paste.
func (s *session) boxHolds(text string) bool {
	row, _, _ := s.det.Screen.Cursor()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	end := strings.TrimSpace(lastRunes(lines[len(lines)-1], 16))
	for r := max(0, row-1); r <= row; r++ {
		if line := s.det.Screen.Row(r); strings.Contains(line, end) || strings.Contains(line, "[Pasted text") {
			return true
		}
	}
	return false
}

// gateDone records that everything was typed and lets the keyboard in again.
func (s *session) gateDone(now time.Time) {
	g := s.gate
	s.gate = nil
	if g.input != nil {
		s.inputDone(g.input, "done", "")
		s.auditInput(g.input.By, g.text)
		s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID, ReplyTo: g.input.ReplyTo, Text: "✓ sent"}})
		if s.q != nil && s.q.rec.Idle && s.q.rec.Status != "" {
			s.q.typed = true
			s.leaveTo(s.q, now)
			s.close(s.q)
		}
		return
	}
	rec := g.q.rec
	s.store("recording the reply", s.st.Update(func(*View) ([]Record, error) {
		reply := &ReplyRecord{Head: Head{Rec: "reply", ID: newID()}, PromptID: rec.ID, SessionID: s.rec.ID,
			Source: "operator", InjectedAt: now.UTC()}
		if rec.Value != nil && !rec.Secret {
			reply.Value = *rec.Value
		}
		if rec.Status == Expired {
			reply.Source = "timeout_default"
		}
		return []Record{reply}, nil
	}))
	timedOut := rec.Status == Expired
	s.move(rec, Injected, func(r *PromptRecord) {
		if by := "auto:timeout"; timedOut {
			r.DecidedBy = &by
		}
	})
	s.move(rec, Resolved, nil)
	s.close(g.q)
}

// gateFail stops typing: nothing more is pressed, the operator is told.
func (s *session) gateFail(why string, now time.Time) time.Time {
	g := s.gate
	s.gate = nil
	s.log.Info("not typed", "why", why)
	if g.input != nil {
		s.inputDone(g.input, "refused", why)
		s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID, ReplyTo: g.input.ReplyTo, Text: "✗ " + why, Ring: true}})
		return now
	}
	if g.q.rec.Status == Expired {
		s.close(g.q) // nothing was typed, nothing was asked for
		return now
	}
	s.move(g.q.rec, Failed, func(r *PromptRecord) { r.Reason = why })
	s.close(g.q)
	return now
}

func (s *session) auditInput(by, text string) {
	sum := sha256.Sum256([]byte(text))
	s.store("auditing an input", s.st.Audit().Append(Event{Name: "INPUT_FORWARDED", SessionID: s.rec.ID, Fields: []Field{
		{"by", by}, {"bytes_len", len(text)}, {"text_sha256", hex.EncodeToString(sum[:])}}}))
}

// maxMessage bounds operator text, in bytes (SPEC section 8).
const maxMessage = 4096

// cleanText makes operator text safe to type: no control character but newline and tab gets through, so no
// paste terminator either.
func cleanText(text string) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, ""), "\r\n", "\n")
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\r':
			return '\n'
		case r == '\n' || r == '\t' || r >= 0x20 && r < 0x7f || r >= 0xa0:
			return r
		}
		return -1
	}, text)
	return clipBytes(strings.TrimRight(text, "\n"), maxMessage)
}

// clipBytes cuts at a rune boundary.
func clipBytes(text string, n int) string {
	if len(text) <= n {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

// lastRunes is the end of text, at most n runes.
func lastRunes(text string, n int) string {
	r := []rune(text)
	return string(r[max(0, len(r)-n):])
}

// idempotencyKey names an occurrence of a question: the same words within 5 s have the same key.
func idempotencyKey(session, excerpt string, now time.Time) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s:%s:%d", session, excerpt, now.Unix()/5))
	return hex.EncodeToString(sum[:])
}

/* ===== --stream ===== */

// stream turns the transcript into messages: finished lines fill a message, which is edited as it grows and
// followed by another when it is full; the live part stands at its end.
type stream struct {
	flushAt time.Time
	waiting []string // finished lines not in a message yet
	bytes   int      // of waiting
	live    string
	body    string // finished text of the current message
	shown   string // what the current message says, body and live part
	msg     int64  // the current message, 0 when the next text starts one
	busy    bool   // a job is with the sender
	full    bool   // the current message takes no more
	dropped int    // lines left out because the phone could not keep up
}

func (t *stream) pending() bool { return t.busy || len(t.waiting) > 0 }

// delivered takes the sender's report: the next text goes into the same message, or starts another.
func (t *stream) delivered(r sent) {
	t.busy = false
	if r.err == nil && r.id != 0 {
		t.msg = r.id
	}
	if t.full {
		t.msg, t.body, t.shown, t.full = 0, "", "", false
	}
}

// fill moves finished lines into the current message, and cuts those that fit in none.
func (t *stream) fill(limit int) {
	for len(t.waiting) > 0 {
		line := clipBytes(t.waiting[0], limit)
		if t.full = t.body != "" && len(t.body)+1+len(line) > limit; t.full {
			return
		}
		t.body = strings.TrimPrefix(t.body+"\n"+line, "\n")
		t.bytes -= len(line)
		if t.waiting[0] = t.waiting[0][len(line):]; t.waiting[0] == "" {
			t.waiting = t.waiting[1:]
		}
	}
}

// streamStep gathers output for flush_ms and keeps one message at a time with the sender.
func (s *session) streamStep(now time.Time) time.Time {
	t := &s.stream
	if !s.cfg.Stream || s.tg == nil {
		return time.Time{}
	}
	if !t.flushAt.IsZero() && !now.Before(t.flushAt) {
		t.flushAt = time.Time{}
		s.streamTake(s.activity == "idle" || strings.HasPrefix(s.activity, "waiting"))
	}
	if t.busy {
		return t.flushAt
	}
	t.fill(s.cfg.MaxChars)
	text := t.body
	if live := clipBytes(t.live, s.cfg.MaxChars-len(t.body)); !t.full && live != "" {
		text = strings.TrimPrefix(t.body+"\n"+live, "\n")
	}
	if text == t.shown || strings.TrimSpace(text) == "" {
		if t.full {
			t.delivered(sent{})
			return now
		}
		return t.flushAt
	}
	t.shown, t.busy = text, true
	s.push(job{kind: jobStream, notice: Notice{SessionID: s.rec.ID, Mono: text, Edit: t.msg}})
	return t.flushAt
}

func (s *session) streamTake(settle bool) {
	t := &s.stream
	lines, live := s.det.Screen.Transcript(settle)
	for _, line := range lines {
		line = redact(visible(line))
		t.waiting, t.bytes = append(t.waiting, line), t.bytes+len(line)
	}
	t.live = redact(visible(live))
	for t.bytes > maxBacklog && len(t.waiting) > 1 {
		t.bytes -= len(t.waiting[0])
		t.waiting, t.dropped = t.waiting[1:], t.dropped+1
	}
}

func (s *session) streamEnd() { s.streamTake(true) }

/* ===== Recordings ===== */

// castWriter writes an asciicast v2 file: a header line, then [seconds, kind, text] with kinds o, i, r and t
// (https://docs.asciinema.org/manual/asciicast/v2/; t is ours: the system's view of the terminal).
type castWriter struct {
	file  *os.File
	w     *bufio.Writer
	start time.Time
	tail  []byte // of a rune that was cut
	state string
}

func newCast(path, title string, size Size) (*castWriter, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("creating the recording: %w", err)
	}
	c := &castWriter{file: file, w: bufio.NewWriter(file), start: time.Now()}
	head, _ := json.Marshal(map[string]any{"version": 2, "width": size.Cols, "height": size.Rows, "title": title,
		"env": map[string]string{"TERM": os.Getenv("TERM")}})
	fmt.Fprintf(c.w, "%s\n", head)
	return c, nil
}

func (c *castWriter) event(kind, text string, now time.Time) {
	quoted, _ := json.Marshal(text)
	fmt.Fprintf(c.w, "[%.4f, %q, %s]\n", now.Sub(c.start).Seconds(), kind, quoted)
}

func (c *castWriter) output(p []byte, now time.Time) {
	p = append(c.tail, p...)
	keep := 0
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if b := p[len(p)-n]; utf8.RuneStart(b) {
			if !utf8.FullRune(p[len(p)-n:]) {
				keep = n
			}
			break
		}
	}
	c.tail = slices.Clone(p[len(p)-keep:])
	c.event("o", string(p[:len(p)-keep]), now)
}

func (c *castWriter) input(p []byte, now time.Time) { c.event("i", string(p), now) }

func (c *castWriter) resized(size Size, now time.Time) {
	c.event("r", fmt.Sprintf("%dx%d", size.Cols, size.Rows), now)
}

func (c *castWriter) tty(t TTYState, now time.Time) {
	state := []string{"unknown", "reading", "busy"}[t.Reading]
	state += map[bool]string{true: " canon", false: " raw"}[t.Canonical] + map[bool]string{true: " echo", false: " noecho"}[t.Echo]
	if state != c.state {
		c.state = state
		c.event("t", state, now)
	}
}

func (c *castWriter) close(now time.Time) error {
	c.event("t", c.state, now) // the end: a replay's clock stops here
	if err := c.w.Flush(); err != nil {
		return err
	}
	return c.file.Close()
}

// capture keeps what led to a question as a recording of its own, where ATLASBRIDGE_CAPTURE_PROMPTS asks for it.
func (s *session) capture(p *Prompt, now time.Time) {
	if os.Getenv("ATLASBRIDGE_CAPTURE_PROMPTS") != "1" || p.Secret {
		return
	}
	dir := filepath.Join(s.cfg.Dir, "captured_scenarios")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		s.log.Error("capturing a prompt", "error", err.Error())
		return
	}
	name := fmt.Sprintf("%s-%s-%s.cast", s.rec.Tool, p.Type, now.UTC().Format("20060102T150405.000"))
	c, err := newCast(filepath.Join(dir, name), s.rec.Tool, s.size())
	if err == nil {
		c.start = now
		c.output(s.det.Raw(), now)
		c.tty(s.pty.State(), now)
		err = c.close(now.Add(s.cfg.Stuck + time.Second))
	}
	s.store("capturing a prompt", err)
}
