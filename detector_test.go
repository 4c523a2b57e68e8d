package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

/* ----- helpers of the detector's tests ----- */

var detectorStart = time.Unix(1000, 0)

// stage drives a detector the way a session does, on a clock of its own.
type stage struct {
	t   *testing.T
	d   *Detector
	now time.Time
	tty TTYState
}

func newStage(t *testing.T, tool, tty string) *stage {
	return &stage{t, newDetector(adapterFor(tool), 30, 100, DetectOptions{}), detectorStart, parseTTY(tty)}
}

// show feeds output and lets time pass; it returns every prompt of that time.
func (s *stage) show(output string, d time.Duration) (asked []*Prompt) {
	s.d.Feed([]byte(output), s.now)
	return s.wait(d)
}

func (s *stage) wait(d time.Duration) (asked []*Prompt) {
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(10 * time.Millisecond) {
		if p := s.d.Tick(s.tty, s.now); p != nil {
			asked = append(asked, p)
		}
	}
	return asked
}

func (s *stage) one(output string) *Prompt {
	s.t.Helper()
	asked := s.show(output, time.Second)
	if len(asked) != 1 {
		s.t.Fatalf("%q: %d prompts, want 1", output, len(asked))
	}
	return asked[0]
}

// claudeDialog is Claude's command dialog at 100 columns, as measured with 2.1.329.
func claudeDialog(command string) string {
	rule := strings.Repeat("─", 100)
	return "\x1b]0;✳ Claude Code\a\x1b[?25l\x1b[H\x1b[2J● Running a command\r\n" + rule + "\r\n Bash command\r\n\r\n Say hi\r\n" +
		strings.Repeat("╌", 100) + "\r\n " + strings.ReplaceAll(command, "\n", "\r\n ") + "\r\n" + strings.Repeat("╌", 100) +
		"\r\n Do you want to proceed?\r\n ❯ 1. Yes\r\n   2. Yes, and switch to auto mode\r\n   3. No\r\n\r\n Esc to cancel · Tab to amend"
}

/* ----- scenarios and recordings ----- */

func TestScenarios(t *testing.T) {
	files, _ := filepath.Glob("testdata/scenarios/*.json")
	questions := 0
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			tp, err := openTape(file)
			if err != nil {
				t.Fatal(err)
			}
			var seen []labEvent
			replay(tp, DetectOptions{}, func(e labEvent) { seen = append(seen, e) })
			if why := tp.want.check(seen); why != "" {
				t.Error(why)
			}
			for _, e := range seen {
				checkPrompt(t, e.Prompt)
			}
			if tp.want.Type == nil {
				return
			}
			questions++
			if !strings.HasPrefix(tp.want.TTY, "reading canon echo") || tp.want.Tool != "generic" {
				return
			}
			tp.want.TTY, seen = "busy canon echo", nil // the same text by a program that goes on working
			for i := range tp.events {
				if tp.events[i].kind == "t" {
					tp.events[i].data = tp.want.TTY
				}
			}
			if replay(tp, DetectOptions{}, func(e labEvent) { seen = append(seen, e) }); len(seen) > 0 {
				t.Errorf("asks %q although nobody reads", seen[0].Excerpt)
			}
		})
	}
	if others := len(files) - questions; questions < 60 || others < 60 {
		t.Errorf("%d questions and %d others, want at least 60 of each", questions, others)
	}
}

// checkPrompt tests what holds for every prompt.
func checkPrompt(t *testing.T, p *Prompt) {
	t.Helper()
	if len(p.Excerpt) > 200 || !utf8.ValidString(p.Excerpt) || p.Excerpt == "" && p.Type != Unknown {
		t.Errorf("excerpt %q", p.Excerpt)
	}
	if p.Score < 0.60 || p.Score > 1 || len(p.Signals) == 0 || p.Fingerprint == "" || len(p.Full) > 16<<10 {
		t.Errorf("score %v, signals %v, fingerprint %q, %d bytes of full text", p.Score, p.Signals, p.Fingerprint, len(p.Full))
	}
	if len(p.Choices) > 9 || utf8.RuneCountInString(p.Recent) > 500 {
		t.Errorf("%d choices, %d characters", len(p.Choices), utf8.RuneCountInString(p.Recent))
	}
	for i, c := range p.Choices {
		if utf8.RuneCountInString(c.Label) > 60 || c.Key == "" || p.Axis == "" && c.Keys == "" {
			t.Errorf("choice %d: %+v", i, c)
		}
		if p.SafeDefault != nil && *p.SafeDefault == c.Key && c.Grants {
			t.Errorf("the safe default %q grants %q", c.Key, c.Label)
		}
	}
	if (p.Idle || p.Secret || p.Type == Unknown) != (p.SafeDefault == nil) {
		t.Errorf("safe default %v of type %s, idle %v, secret %v", p.SafeDefault, p.Type, p.Idle, p.Secret)
	}
}

// TestRecordings prints the figures over the shared recordings, and holds them to the goals.
func TestRecordings(t *testing.T) {
	dir := filepath.Join(os.Getenv("ATLASBRIDGE_SHARED"), "recordings")
	if os.Getenv("ATLASBRIDGE_SHARED") == "" {
		dir = filepath.Join("..", "shared", "recordings")
	}
	data, err := os.ReadFile(filepath.Join(dir, "index.jsonl"))
	if err != nil {
		t.Skip("no shared recordings (set ATLASBRIDGE_SHARED):", err)
	}
	sum := tally{}
	for dec := json.NewDecoder(bytes.NewReader(data)); dec.More(); {
		var l label
		if err := dec.Decode(&l); err != nil {
			t.Fatal(err)
		}
		tp, err := openTape(filepath.Join(dir, l.File))
		if err != nil {
			t.Fatal(err)
		}
		var seen []labEvent
		replay(tp, DetectOptions{}, func(e labEvent) { seen = append(seen, e) })
		for _, e := range seen {
			checkPrompt(t, e.Prompt)
		}
		sum.add(&l, seen)
	}
	for _, k := range slices.Sorted(maps.Keys(sum)) {
		n := sum[k]
		share := 100 * float64(n[0]) / float64(n[1])
		t.Logf("%-45s %4d of %4d  %5.1f %%", k, n[0], n[1], share)
		figure, _, _ := strings.Cut(k, ",")
		goal := map[string]float64{"questions found": 99, "right type": 97, "menus with all choices": 95, "delay": 50}[figure]
		if share < goal || strings.HasPrefix(k, "busy") && share > 2 {
			t.Errorf("%s: %.1f %%", k, share)
		}
	}
}

// tally counts hits and cases of each figure.
type tally map[string][2]int

// label is a line of index.jsonl: what a person says a recording shows.
type label struct {
	File, Label, Source string
	Waiting             *bool
	At                  *float64 `json:"t_wait"`
	Choices             []string
}

func (t tally) hit(figure string, yes bool) {
	n := t[figure]
	if n[1]++; yes {
		n[0]++
	}
	t[figure] = n
}

func (t tally) add(l *label, seen []labEvent) {
	if l.Waiting == nil {
		return
	}
	asked := slices.DeleteFunc(slices.Clone(seen), func(e labEvent) bool {
		return e.Idle || l.Source == "agent" && l.At != nil && e.T < *l.At-0.5
	})
	switch {
	case l.Label == "repl" || l.Label == "idle":
		t.hit("idle boxes and REPLs, "+l.Source, len(seen) > 0 && seen[len(seen)-1].Idle)
	case l.Label == "fullscreen":
		t.hit("full-screen programs left alone", len(asked) == 0)
	case l.Label == "confirm": // a hint that stands for less than a second
	case !*l.Waiting && l.Source == "agent": // some of these show a dialog before the work that is meant
	case !*l.Waiting:
		t.hit("busy taken for waiting", len(asked) > 0)
	default:
		t.hit("questions found, "+l.Source, len(asked) > 0)
		if len(asked) == 0 {
			return
		}
		e := asked[len(asked)-1]
		if l.Source == "agent" {
			e = asked[0]
		}
		kind := map[string]PromptType{"secret": FreeText, "pager": ConfirmEnter}[l.Label]
		if kind == "" {
			kind = PromptType(l.Label)
		}
		t.hit("right type, "+l.Source, e.Type == kind && e.Secret == (l.Label == "secret"))
		t.hit("delay ≤ 150 ms", e.delay <= 150*time.Millisecond)
		if slices.Contains(e.Signals, "protocol") || slices.Contains(e.Signals, "title") {
			t.hit("delay ≤ 50 ms where the tool says so", e.delay <= 50*time.Millisecond)
		}
		if e.Type == MultipleChoice {
			t.hit("menus with all choices, "+l.Source, len(e.Choices) >= min(len(l.Choices), 9))
		}
	}
}

/* ----- one question is one prompt ----- */

func TestOneQuestionOnePrompt(t *testing.T) {
	s := newStage(t, "claude", "")
	first := s.one(claudeDialog("touch a"))
	for i := range 200 { // the mark of the tool row blinks for ever
		mark := "●"
		if i%2 == 0 {
			mark = " "
		}
		if asked := s.show("\x1b[1;1H"+mark, 600*time.Millisecond); len(asked) > 0 {
			t.Fatalf("blink %d asks again: %q", i, asked[0].Excerpt)
		}
		if s.d.Gone(s.tty, s.now) {
			t.Fatalf("blink %d: gone", i)
		}
	}
	s.show("\x1b[10;2H \x1b[11;2H❯", time.Second) // the pointer moves down
	p := s.d.Look(s.tty, s.now)
	if p == nil || p.Pointer != 1 || p.Fingerprint != first.Fingerprint {
		t.Fatalf("after the arrow key: %+v", p)
	}
	s.d.Resize(24, 60, s.now)
	narrow := claudeDialog("touch a")
	for _, c := range []string{"─", "╌"} {
		narrow = strings.ReplaceAll(narrow, strings.Repeat(c, 100), strings.Repeat(c, 60))
	}
	if asked := s.show(narrow, time.Second); len(asked) > 0 {
		t.Errorf("a resize asks again: %q", asked[0].Excerpt)
	}
}

func TestRepaintIsNotGone(t *testing.T) {
	s := newStage(t, "claude", "")
	s.one(claudeDialog("touch a"))
	s.show("\x1b[H\x1b[2J", 60*time.Millisecond)
	if s.d.Gone(s.tty, s.now) {
		t.Error("a cleared screen is gone after 60 ms")
	}
	if asked := s.show(claudeDialog("touch a"), time.Second); len(asked) > 0 {
		t.Error("a repaint asks again")
	}
	s.show("\x1b[H\x1b[2J\x1b]0;◐ Claude Code\aworking", time.Second)
	if !s.d.Gone(s.tty, s.now) || s.d.Activity() != "running" {
		t.Error("answered, but not gone")
	}
	if asked := s.show(claudeDialog("touch a"), time.Second); len(asked) != 1 {
		t.Error("the same dialog later is not a new prompt")
	}
}

func TestSameWordsAgain(t *testing.T) {
	s := newStage(t, "generic", "reading canon echo")
	for i := range 3 { // read -p in a loop
		if p := s.one("Continue? (y/n) "); p.Type != YesNo {
			t.Fatalf("round %d: %s", i, p.Type)
		}
		s.d.Typed([]byte("y\r"), s.now)
		if asked := s.show("y", 50*time.Millisecond); len(asked) > 0 || s.d.Gone(s.tty, s.now) {
			t.Fatalf("round %d: the echo of the answer asks %v", i, asked)
		}
		s.d.Feed([]byte("\r\n"), s.now)
	}
}

func TestSleepForgetsAndDoesNotRepeat(t *testing.T) {
	s := newStage(t, "claude", "")
	s.one(claudeDialog("touch a"))
	s.d.Typed([]byte("1"), s.now)
	s.d.Sleep(s.now.Add(150 * time.Millisecond))
	if asked := s.wait(time.Second); len(asked) > 0 {
		t.Error("a dialog that is slow to go is asked twice")
	}
	s.show("\x1b[H\x1b[2Jworking", 300*time.Millisecond)
	if asked := s.show(claudeDialog("touch a"), time.Second); len(asked) != 1 {
		t.Errorf("asked again with the same words: %d prompts", len(asked))
	}
}

func TestIdleOnce(t *testing.T) {
	box := "\x1b]0;✳ Claude Code\a\x1b[H\x1b[2Jhello\r\n──────\r\n❯\u00a0\r\n──────\x1b[?25l\x1b[3;3H"
	s := newStage(t, "claude", "")
	if p := s.one(box); !p.Idle || p.SafeDefault != nil || s.d.Activity() != "idle" {
		t.Fatalf("%+v", p)
	}
	if asked := s.show("\x1b[3;3Hdraft\x1b[3;8H", time.Second); len(asked) > 0 {
		t.Error("a draft is no question")
	}
	if asked := s.show("\x1b[3;3H\x1b[K", time.Second); len(asked) > 0 {
		t.Error("an emptied draft is announced again")
	}
	s.show("\x1b]0;◐ Claude Code\a", time.Second)
	if asked := s.show(box, time.Second); len(asked) != 1 {
		t.Error("the end of the next turn is not announced")
	}
}

/* ----- safety ----- */

func TestSafeDefaultsCannotGrant(t *testing.T) {
	for _, typ := range []PromptType{YesNo, MultipleChoice, ConfirmEnter, FreeText} {
		d := newDetector(adapterFor("claude"), 30, 100, DetectOptions{SafeDefaults: map[PromptType]string{typ: "1", YesNo: "y"}})
		d.Feed([]byte(claudeDialog("touch a")), detectorStart)
		if p := d.Look(TTYState{}, detectorStart); p == nil || !p.Permission || *p.SafeDefault != "3" {
			t.Errorf("%s: %+v", typ, p)
		}
		d = newDetector(adapterFor("x"), 30, 100, DetectOptions{SafeDefaults: map[PromptType]string{YesNo: "y"}})
		d.Feed([]byte("Go on? [Y/n] "), detectorStart)
		if p := d.Look(parseTTY("reading canon echo"), detectorStart); p == nil || *p.SafeDefault != "n" {
			t.Errorf("yes/no: %+v", p)
		}
	}
	s := newStage(t, "generic", "reading canon echo")
	s.d.o.SafeDefaults = map[PromptType]string{MultipleChoice: "2"}
	if p := s.one("1) red\r\n2) blue\r\nYour choice: "); *p.SafeDefault != "2" {
		t.Errorf("a menu without permissions: %q", *p.SafeDefault)
	}
}

func TestLongCommandIsNotHidden(t *testing.T) {
	s := newStage(t, "claude", "")
	var lines []string
	for i := range 12 {
		lines = append(lines, fmt.Sprintf("echo harmless line number %d of many", i))
	}
	p := s.one(claudeDialog("cd /srv\n" + strings.Join(lines, "\n") + "\nrm -rf /precious"))
	if !p.Cut || !strings.HasPrefix(p.Excerpt, "cd /srv") || !strings.Contains(p.Excerpt, "rm -rf /precious") ||
		!strings.Contains(p.Excerpt, "proceed?") || !strings.HasSuffix(p.Excerpt, "…") || len(p.Excerpt) > 200 {
		t.Errorf("cut %v, excerpt %q", p.Cut, p.Excerpt)
	}
	for _, l := range append(lines, "rm -rf /precious", "1. Yes") {
		if !strings.Contains(p.Full, l) {
			t.Errorf("the full text lacks %q", l)
		}
	}
	if p := newStage(t, "claude", "").one(claudeDialog("touch a")); p.Cut || p.Excerpt != "touch a\nDo you want to proceed?" {
		t.Errorf("cut %v, excerpt %q", p.Cut, p.Excerpt)
	}
	for _, trick := range []string{"echo hi\n╌╌╌╌\nrm -rf /x\n╌╌╌╌", "Tip: || rm -rf /x", "echo Do you want to proceed?; rm -rf /x", "$ a\n\nrm -rf /x"} {
		if p := newStage(t, "claude", "").one(claudeDialog(trick)); !strings.Contains(p.Excerpt, "rm -rf /x") {
			t.Errorf("%q hides its danger: %q", trick, p.Excerpt)
		}
	}
	dialog := strings.Replace(claudeDialog("touch a"), " Say hi", " ↑ 16 more lines", 1)
	if p := newStage(t, "claude", "").one(dialog); !p.Cut {
		t.Error("a dialog clipped by the window is not marked as cut")
	}
}

func TestTricksAreShown(t *testing.T) {
	s := newStage(t, "generic", "reading canon echo")
	if p := s.one("rm -rf ~\rls -l    \r\nRun ls? [y/N] "); strings.Contains(p.Full, "rm -rf") {
		t.Errorf("full text is not what the screen shows: %q", p.Full)
	}
	p := newStage(t, "generic", "reading canon echo").one("Run a\u200bb\u202etxt.exe? [y/N] ")
	if !strings.Contains(p.Excerpt, `\u{200B}`) || !strings.Contains(p.Excerpt, `\u{202E}`) {
		t.Errorf("hidden characters: %q", p.Excerpt)
	}
	p = newStage(t, "generic", "reading canon echo").one("Use https://bob:hunter22@h/ and ghp_0123456789abcdefghijABCDEFGHIJ? [y/N] ")
	if strings.Contains(p.Excerpt+p.Question+p.Full+p.Recent, "hunter22") || strings.Contains(p.Full+p.Recent, "ghp_0123") {
		t.Errorf("secrets: %q", p.Excerpt)
	}
}

func TestVisible(t *testing.T) {
	for in, want := range map[string]string{
		"plain ascii, ü, 日本, 🎉\n\t": "plain ascii, ü, 日本, 🎉\n\t",
		"a\x1b[31mb\x7f\r":          `a\u{001B}[31mb\u{007F}\u{000D}`,
		"\u0085\u009b":              `\u{0085}\u{009B}`,
		"\u00ad\u061c\u180e":        `\u{00AD}\u{061C}\u{180E}`,
		"\u200b\u200f\u2028\u202e":  `\u{200B}\u{200F}\u{2028}\u{202E}`,
		"\u2060\u206f\ufe00\ufe0f":  `\u{2060}\u{206F}\u{FE00}\u{FE0F}`,
		"\ufeff\ufff9\ufffb":        `\u{FEFF}\u{FFF9}\u{FFFB}`,
		"\U000e0000\U000e01ef":      `\u{E0000}\u{E01EF}`,
	} {
		if got := visible(in); got != want {
			t.Errorf("visible(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestRedact(t *testing.T) {
	for _, secret := range []string{
		"AKIAIOSFODNN7EXAMPLE", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "sk-ant-REDACTED-REDACTED-1234",
		"xoxb-123456789012-abcdefghijkl", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
		"-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "123456789:AAE-abcdefghijklmnopqrstuvwxyz012345",
	} {
		if got := redact("use " + secret + " now"); got != "use [redacted] now" {
			t.Errorf("redact(%q) = %q", secret, got)
		}
	}
	for in, want := range map[string]string{
		"curl https://bob:hunter2@h/x":        "curl https://bob:[redacted]h/x",
		"password=hunter22 next":              "password=[redacted] next",
		`{"api_key": "abcdef"}`:               `{"api_key": "[redacted]"}`,
		"Authorization: Bearer abcdefgh12345": "Authorization: Bearer [redacted]",
		"git push origin main":                "git push origin main",
		"http://localhost:8080/a@b":           "http://localhost:8080/a@b",
	} {
		if got := redact(in); got != want {
			t.Errorf("redact(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestClip(t *testing.T) {
	for n := range 20 {
		if got := clip("aü日🎉bcdefghij", n); len(got) > max(n, 3) || !utf8.ValidString(got) || !strings.HasSuffix(got, "…") && n < 18 {
			t.Errorf("clip to %d: %q", n, got)
		}
	}
	if clip("abc", 3) != "abc" {
		t.Error("clipped without need")
	}
}

func TestAdapterTable(t *testing.T) {
	for name, want := range map[string]string{"claude": "claude", "/usr/bin/claude": "claude", "codex": "codex", "openai": "codex",
		"gemini": "gemini", "opencode": "opencode", "qwen.exe": "qwen", "bash": "generic", "": "generic"} {
		if got := adapterFor(name).Name; got != want {
			t.Errorf("adapterFor(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestKeys(t *testing.T) {
	for _, c := range []struct{ tool, tty, out, keys string }{
		{"claude", "", claudeDialog("x"), `["1" "2" "3"]`},
		{"generic", "reading canon echo", "Go? [y/N] ", `["y\r" "n\r"]`},
		{"generic", "reading raw echo", "Go? [y/N] ", `["y" "n"]`}, // bash read -n1
		{"generic", "reading raw noecho", "Clear<y>? ", `["y" "n"]`},
		{"generic", "reading canon echo", "Go? (yes/no) ", `["yes\r" "no\r"]`},
		{"generic", "reading canon echo", "1) a\r\n2) b\r\nSelect option: ", `["1\r" "2\r"]`},
		{"generic", "reading raw noecho", "\x1b[?25l? Pick one (Use arrow keys)\r\n❯ a\r\n  b\r\n", `["" ""]`},
	} {
		var keys []string
		for _, k := range newStage(t, c.tool, c.tty).one(c.out).Choices {
			keys = append(keys, k.Keys)
		}
		if got := fmt.Sprintf("%q", keys); got != c.keys {
			t.Errorf("%q: %s, want %s", c.out, got, c.keys)
		}
	}
}

func TestProtocolJoins(t *testing.T) {
	s := newStage(t, "claude", "")
	s.d.Feed([]byte("\x1b]7501;state=blocked:app=claude-code:kind=permission:msg=YXBwcm92ZQ==\a"+claudeDialog("touch a")), s.now)
	if s.wait(30 * time.Millisecond); s.d.cur != nil {
		t.Fatal("asked before the screen was still")
	}
	asked := s.wait(30 * time.Millisecond)
	if len(asked) != 1 || asked[0].Score != 1 || !slices.Contains(asked[0].Signals, "protocol") || !slices.Contains(asked[0].Signals, "structure") {
		t.Fatalf("%+v", asked)
	}
	if s.d.Activity() != "waiting_permission" {
		t.Error(s.d.Activity())
	}
	s = newStage(t, "claude", "") // a window so small that the dialog does not show
	p := s.one("\x1b]7501;state=blocked:app=claude-code:kind=permission:msg=YXBwcm92ZSBCYXNo\a\x1b[?25l↓ 9 more")
	if p.Type != Unknown || p.Question != "approve Bash" || p.SafeDefault != nil || !p.Cut {
		t.Errorf("%+v", p)
	}
}

/* ----- hostile output ----- */

func TestHostileOutput(t *testing.T) {
	rnd := rand.New(rand.NewSource(1))
	var before, after runtime.MemStats
	s := newStage(t, "generic", "busy canon echo")
	runtime.ReadMemStats(&before)
	chunk := make([]byte, 64<<10)
	for range 32 {
		rnd.Read(chunk)
		if asked := s.show(string(chunk), 50*time.Millisecond); len(asked) > 0 {
			t.Fatalf("noise asks %q", asked[0].Excerpt)
		}
	}
	for range 32 { // a string that never ends
		s.show("\x1b]0;"+strings.Repeat("A", 64<<10), 50*time.Millisecond)
	}
	runtime.GC()
	if runtime.ReadMemStats(&after); after.HeapAlloc > before.HeapAlloc+(4<<20) {
		t.Errorf("heap grew by %d KiB", (after.HeapAlloc-before.HeapAlloc)>>10)
	}
	if len(s.d.Raw()) != 4096 {
		t.Errorf("%d bytes kept", len(s.d.Raw()))
	}
	s = newStage(t, "generic", "busy canon echo") // a copy of a dialog, line by line, for an hour
	for range 600 {
		if asked := s.show(claudeDialog("rm -rf /")+"\r\nContinue? (y/n) ", 200*time.Millisecond); len(asked) > 0 {
			t.Fatalf("a copy asks %q", asked[0].Excerpt)
		}
	}
}

// promptsOf replays output cut at the given places, all at once, and lets it settle.
func promptsOf(tool, tty string, output []byte, cut func() int) (asked []string) {
	d := newDetector(adapterFor(tool), 24, 80, DetectOptions{})
	now, state := detectorStart, parseTTY(tty)
	for len(output) > 0 {
		n := min(max(cut(), 1), len(output))
		d.Feed(output[:n], now)
		output = output[n:]
	}
	for range 60 {
		if p := d.Tick(state, now); p != nil {
			asked = append(asked, p.Fingerprint+p.Excerpt)
		}
		now = now.Add(100 * time.Millisecond)
	}
	return asked
}

func FuzzDetector(f *testing.F) {
	f.Add("claude", "", []byte(claudeDialog("touch a")), int64(1))
	f.Add("generic", "reading canon echo", []byte("Continue? (y/n) "), int64(2))
	f.Add("generic", "reading raw noecho", []byte("\x1b[?25l? Pick (Use arrow keys)\r\n❯ a\r\n  b\r\n"), int64(3))
	f.Add("generic", "reading raw noecho", []byte("┌──┐\r\n│ Go? │\r\n│ <Yes>  <No> │\r\n└──┘\x1b[?25l"), int64(4))
	f.Add("opencode", "", []byte("┃ $ a\r\n┃ Allow once   Reject  ⇆ select\x1b[?25l"), int64(5))
	f.Add("generic", "reading canon noecho", []byte("(1) a\r\n  p   b\r\n[12?q]? <y>? [Ynq] "), int64(6))
	f.Fuzz(func(t *testing.T, tool, tty string, output []byte, seed int64) {
		rnd := rand.New(rand.NewSource(seed))
		whole := promptsOf(tool, tty, output, func() int { return len(output) })
		if cut := promptsOf(tool, tty, output, func() int { return rnd.Intn(9) }); !slices.Equal(whole, cut) {
			t.Errorf("whole %q, in pieces %q", whole, cut)
		}
	})
}

func FuzzTape(f *testing.F) {
	f.Add("a.cast", []byte("{\"version\":2,\"width\":80,\"height\":24}\n[0.1,\"o\",\"Go? [y/N] \"]\n[0.2,\"t\",\"reading canon echo\"]\n[1,\"r\",\"40x10\"]\n"))
	f.Add("a.json", []byte(`{"tool":"claude","pty_output":"Go? (y/n) ","expected_type":"TYPE_YES_NO"}`))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		tp, err := parseTape(name, data)
		if err != nil || len(tp.events) > 1000 || tp.rows > 200 || tp.cols > 200 {
			return
		}
		for _, e := range tp.events {
			if e.t > 60 || e.kind == "r" {
				return
			}
		}
		replay(tp, DetectOptions{}, func(e labEvent) {
			if len(e.Excerpt) > 200 || len(e.Choices) > 9 {
				t.Errorf("%+v", e.Prompt)
			}
		})
	})
}

/* ----- the lab ----- */

func TestLab(t *testing.T) {
	dir := t.TempDir()
	run := func(args ...string) (string, int) {
		out, err := os.Create(filepath.Join(dir, "out"))
		if err != nil {
			t.Fatal(err)
		}
		null, _ := os.Open(os.DevNull)
		code := cmdLab(&command{name: "lab", args: args, stdin: null, stdout: out, stderr: null, getenv: os.Getenv})
		data, _ := os.ReadFile(out.Name())
		return string(data), code
	}
	cast := filepath.Join("testdata", "recordings", "generic-tune2fs.cast")
	out, code := run("--json", cast)
	var e map[string]any
	if err := json.Unmarshal([]byte(out), &e); err != nil || code != 0 {
		t.Fatalf("%v, exit %d: %s", err, code, out)
	}
	want := []string{"choices", "confidence", "excerpt", "file", "idle", "safe_default", "score", "secret", "signals", "t", "type"}
	if got := slices.Sorted(maps.Keys(e)); !slices.Equal(got, want) {
		t.Errorf("fields %q, want %q", got, want)
	}
	if out, code = run("--explain", cast); code != 0 || !strings.Contains(out, "pattern+tty") || !strings.Contains(out, "Label:Yes") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, _ = run("--screen", cast); !strings.Contains(out, "Proceed anyway (or wait 5 seconds to proceed) ? (y,N)") {
		t.Error(out)
	}
	bad := filepath.Join(dir, "bad.json")
	os.WriteFile(bad, []byte(`{"tool":"generic","pty_output":"hello\r\n","expected_type":"TYPE_YES_NO"}`), 0o600)
	for _, args := range [][]string{{bad}, {dir}, {filepath.Join(dir, "missing")}, {"part_detector.go"}} {
		if _, code := run(args...); code != 1 {
			t.Errorf("lab %q: exit %d, want 1", args, code)
		}
	}
}

func BenchmarkDetectorFlood(b *testing.B) {
	line := []byte(strings.Repeat("some plain output of a build, 80 columns of it, with nothing to ask in it.....\r\n", 800))
	d := newDetector(adapterFor("generic"), 30, 100, DetectOptions{})
	b.SetBytes(int64(len(line)))
	now := detectorStart
	for b.Loop() {
		d.Feed(line, now)
		now = now.Add(time.Millisecond)
		if next := d.Next(now); !next.IsZero() && !next.After(now) {
			d.Tick(TTYState{}, now)
		}
	}
}

func BenchmarkDetectorLook(b *testing.B) {
	d := newDetector(adapterFor("claude"), 30, 100, DetectOptions{})
	for b.Loop() {
		d.Feed([]byte(claudeDialog("touch a")), detectorStart)
		d.Look(TTYState{}, detectorStart)
	}
}
