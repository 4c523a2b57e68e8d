package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/term"
)

/* ===== A tap does what was read, silence does nothing: the running program, seen from outside ===== */

// init is where the test binary becomes a scripted tool; it belongs into TestMain.
func init() {
	mode := os.Getenv("ATLASBRIDGE_TEST_CHILD")
	if childTool(mode) {
		os.Exit(0)
	}
}

// What a phone may say, in no particular words.
var (
	saysKeyboard = regexp.MustCompile(`(?i)keyboard`)
	saysPhone    = regexp.MustCompile(`(?i)phone`)
	saysReplaced = regexp.MustCompile(`(?i)replaced|changed|another question|no longer|out of date|left the screen`)
	saysExpired  = regexp.MustCompile(`(?i)expired|nobody|no answer`)
	saysLost     = regexp.MustCompile(`(?i)not delivered|ended before|did not reach|not taken|gave up|given up|gone`)
	saysNothing  = regexp.MustCompile(`(?i)nothing|no longer|already|out of date|over|replaced|expired|too late|answered`)
	saysAnswered = regexp.MustCompile(`(?i)✅|answered .*phone|(yes|no)\b.* · phone`)
)

// What is a button for. Each is looked for with or without a number and a picture in front of its word.
var (
	yesButton     = regexp.MustCompile(`(?i)^[^\pL\d]*(\d+[.:)]?\s*)?(yes|allow|continue)[^\pL]*$`)
	noButton      = regexp.MustCompile(`(?i)^[^\pL\d]*(\d+[.:)]?\s*)?(no|deny)[^\pL]*$`)
	lastingButton = regexp.MustCompile(`(?i)always|stop asking|don.t ask|lasting|remember|session|project`)
	showAllButton = regexp.MustCompile(`(?i)show all`)
	againButton   = regexp.MustCompile(`(?i)ask again`)
	enterButton   = regexp.MustCompile(`(?i)enter|continue`)
	leaveButton   = regexp.MustCompile(`(?i)leave it|cancel|skip`)
	grantButton   = regexp.MustCompile(`(?i)\b(yes|enter|allow|approve|continue|execute)\b`)
	anyButton     = regexp.MustCompile(`.`)
)

// TestTapRefusesWhileTheDialogIsPainted: whenever a dialog is painted and whenever No is tapped, the hook refuses, in one
// message whose buttons never change their meaning, and not one byte goes into the dialog.
func TestTapRefusesWhileTheDialogIsPainted(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type tap struct{ paint, after int } // ms: from the hook's call to the dialog, from the message to the tap
	var sessions [][]tap
	waits := []int{0, 100, 300, 500, 1000}
	if os.Getenv("ATLASBRIDGE_TEST_ROUNDS") == "" {
		sessions = [][]tap{
			{{0, 0}, {400, 300}, {1400, 100}}, {{50, 100}, {500, 500}, {2000, 0}}, {{100, 300}, {700, 0}, {1000, 1000}},
			{{200, 500}, {350, 0}, {1200, 300}}, {{300, 100}, {450, 1000}, {1700, 500}},
		}
	} else {
		for paint := 0; paint <= 2000; paint += 50 {
			one := []tap{}
			for _, after := range waits {
				one = append(one, tap{paint, after})
			}
			sessions = append(sessions, one)
		}
	}
	beside(t, 5, sessions, func(t *testing.T, taps []tap) {
		asks := []ask{}
		for i, tap := range taps {
			asks = append(asks, ask{Command: fmt.Sprintf("rm -rf /important/%d", i), Paint: tap.paint, Halves: i%2 == 1})
		}
		w, c, dir, _ := claudeSession(t, "", play{Asks: asks, Deaf: 100})
		ids := []int{}
		for i, tap := range taps {
			m := w.find(asks[i].Command, noButton)
			<-time.After(time.Duration(tap.after) * time.Millisecond)
			w.tap(w.now(m.id), noButton)
			if r := c.until("decided", i); r.By != "hook" || r.Text != "deny" {
				t.Errorf("painted after %d ms, tapped %d ms after the message: %s by %s", tap.paint, tap.after, r.Text, r.By)
			}
			w.settled(m.id)
			ids = append(ids, m.id)
		}
		c.until("done", -1)
		for i, id := range ids {
			w.honest(t, asks[i].Command, id, 1)
		}
		if keys := c.keys(); keys != "" {
			t.Errorf("%q was typed", keys)
		}
		if n := auditCount(t, dir, "REPLY_INJECTED"); n != len(taps) {
			t.Errorf("%d answers in the audit log, want %d", n, len(taps))
		}
	})
}

// TestHookIsAnsweredWhole: Yes allows once; the lasting Allow says what, where and for how long, and gives all suggestions
// back; words of the operator are the reason of a refusal.
func TestHookIsAnsweredWhole(t *testing.T) {
	needUnix(t)
	t.Parallel()
	folder := `[{"type":"addDirectories","directories":["/srv/demo/out"],"destination":"session"},` +
		`{"type":"setMode","mode":"acceptEdits","destination":"session"}]`
	rule := `[{"type":"addRules","rules":[{"toolName":"Bash","ruleContent":"npm --version"}],"behavior":"allow",` +
		`"destination":"localSettings"}]`
	type row struct {
		name, suggestions string
		press             *regexp.Regexp
		text              string
		behavior          string
		words             []string // of the message, each a pattern
	}
	rows := []row{
		{"yes", folder, yesButton, "", "allow", nil},
		{"yes without suggestions", "", yesButton, "", "allow", nil},
		{"lasting folder", folder, lastingButton, "", "allow", []string{`demo/out|\bout/`, `(?i)accept\s?edits`, `(?i)session`}},
		{"lasting rule", rule, lastingButton, "", "allow", []string{`npm --version`, `(?i)project|local`}},
		{"yes, no dialog", folder, yesButton, "", "allow", nil},
		{"reason", folder, nil, "use the test database", "deny", nil},
	}
	beside(t, 5, rows, func(t *testing.T, row row) {
		a := ask{Command: "npm --version", Suggestions: json.RawMessage(row.suggestions), Paint: 300}
		if row.name == "yes, no dialog" {
			a.Paint = -1
		}
		w, c, dir, _ := claudeSession(t, "", play{Asks: []ask{a}})
		m := w.find(a.Command, yesButton)
		if _, ok := m.choice(lastingButton); ok != (row.suggestions != "") {
			t.Errorf("a lasting button: %v; buttons %v", ok, m.buttons)
		}
		if row.press != nil {
			w.tap(w.now(m.id), row.press)
		} else {
			openPrompt(t, dir) // only now it is known which message asked
			w.writes(row.text, m.id)
		}
		r := c.until("decided", 0)
		var answer struct {
			Message            string
			UpdatedPermissions any
		}
		if err := json.Unmarshal(r.JSON, &answer); err != nil && r.By == "hook" {
			t.Fatal(err)
		}
		if r.By != "hook" || r.Text != row.behavior || answer.Message != row.text {
			t.Errorf("%s by %s, message %q; want %s by hook, message %q", r.Text, r.By, answer.Message, row.behavior, row.text)
		}
		var want any
		if row.press == lastingButton {
			if err := json.Unmarshal([]byte(row.suggestions), &want); err != nil {
				t.Fatal(err)
			}
		}
		if !reflect.DeepEqual(answer.UpdatedPermissions, want) {
			t.Errorf("updatedPermissions %v, want %v", answer.UpdatedPermissions, want)
		}
		for _, word := range row.words {
			if !regexp.MustCompile(word).MatchString(m.text) {
				t.Errorf("the message does not say %s:\n%s", word, m.text)
			}
		}
		w.settled(m.id)
		w.honest(t, a.Command, m.id, 1)
		if keys := c.keys(); keys != "" {
			t.Errorf("%q was typed", keys)
		}
	})
}

// TestTwoHooksAtOnce: of two commands that wait at once, a tap decides the one its message shows and no other, whichever
// dialog stands; a key in the standing dialog ends the question of that one.
func TestTwoHooksAtOnce(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type row struct {
		order []int  // of the dialogs
		taps  string // per question in the order asked, Y or N
		late  bool   // they are tapped when a dialog stands
		key   string // or: first typed at the keyboard
	}
	rows := []row{}
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		for _, taps := range []string{"YY", "YN", "NY", "NN"} {
			rows = append(rows, row{order, taps, false, ""}, row{order, taps, true, ""})
		}
		rows = append(rows, row{order, "N", false, "1"}, row{order, "N", false, "\x1b"})
	}
	commands := []string{"ls -la", "rm -rf /important"}
	beside(t, 6, rows, func(t *testing.T, row row) {
		asks := []ask{{Command: commands[0], Paint: rand.IntN(900)}, {Command: commands[1], Paint: rand.IntN(900)}}
		w, c, dir, x := claudeSession(t, "", play{Asks: asks, Order: row.order, Together: true})
		asked := func(except int) (int, seen) { // which question is on the phone
			m := w.where("a question of a command", func(m seen) bool {
				_, ok := m.choice(noButton)
				return ok && (except < 0 || !strings.Contains(m.text, commands[except]))
			})
			if strings.Contains(m.text, commands[1]) {
				return 1, m
			}
			return 0, m
		}
		except, typed := -1, ""
		if row.key != "" {
			asked(-1)
			standing := c.until("paint", row.order[0]).Dialog
			x.types(row.key)
			typed = row.key
			if r := c.until("decided", standing); r.By != "keyboard" {
				t.Errorf("%q was to be answered at the keyboard: %s by %s", commands[standing], r.Text, r.By)
			}
			p := promptOf(t, dir, commands[standing], func(p *PromptRecord) bool { return p.over() })
			if by := decidedBy(p); by != "cli:local" {
				t.Errorf("%q: %s by %q (%s), want it answered at the keyboard", commands[standing], p.Status, by, p.Reason)
			}
			except = standing
		}
		for n, tap := range row.taps {
			i, m := asked(except)
			except = i
			if row.late {
				c.that("a dialog stands", func() bool {
					has := func(what string, dialog int) bool {
						return slices.ContainsFunc(c.reports, func(r report) bool { return r.What == what && r.Dialog == dialog })
					}
					return has("paint", 0) && !has("decided", 0) || has("paint", 1) && !has("decided", 1)
				})
			}
			button, want := noButton, "deny"
			if tap == 'Y' {
				button, want = yesButton, "allow"
			}
			<-time.After(time.Duration(rand.IntN(500)) * time.Millisecond)
			w.tap(w.now(m.id), button)
			if r := c.until("decided", i); r.By != "hook" || r.Text != want {
				t.Errorf("tap %d on %q: %s by %s, want %s by hook", n, commands[i], r.Text, r.By, want)
			}
			if n == 0 && len(row.taps) == 2 && c.count("decided") != 1 {
				t.Errorf("one tap decided %d", c.count("decided"))
			}
			w.settled(m.id)
			w.honest(t, commands[i], m.id, 1)
		}
		c.until("done", -1)
		if keys := c.keys(); keys != typed {
			t.Errorf("the dialogs got %q, want %q", keys, typed)
		}
	})
}

// TestAnsweredAtTheKeyboardFirst: the message says so, the waiting hook ends, and a tap that comes late does nothing and
// says so.
func TestAnsweredAtTheKeyboardFirst(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 4, []string{"1", "4", "\r", "\x1b"}, func(t *testing.T, key string) {
		a := ask{Command: "touch /srv/x", Paint: 200}
		w, c, _, x := claudeSession(t, "", play{Asks: []ask{a}})
		m := w.find(a.Command, noButton)
		c.until("paint", 0)
		x.types(key)
		decided := c.until("decided", 0)
		if took := c.until("hookend", 0).At.Sub(decided.At); took > 4*time.Second {
			t.Errorf("the hook goes on for %v", took)
		}
		w.ended(m.id, saysKeyboard)
		if said := w.answer(w.tap(m, noButton)); !saysNothing.MatchString(said) {
			t.Errorf("a late tap is told %q", said)
		}
		w.honest(t, a.Command, m.id, 1)
		if keys := c.keys(); keys != key || decided.By != "keyboard" {
			t.Errorf("%q was typed, decided by %s", keys, decided.By)
		}
	})
}

// TestHookTimesOut: run --timeout holds for hooks: nobody's answer is a refusal with its reason, and nothing is typed.
func TestHookTimesOut(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 3, []int{0, 1000, -1}, func(t *testing.T, paint int) {
		a := ask{Command: "touch /srv/x", Paint: paint}
		w, c, _, _ := claudeSession(t, "", play{Asks: []ask{a}}, "--timeout", "2s")
		m := w.find(a.Command, noButton)
		if r := c.until("decided", 0); r.By != "hook" || r.Text != "deny" || !saysExpired.Match(r.JSON) {
			t.Errorf("%s by %s: %s", r.Text, r.By, r.JSON)
		}
		w.ended(m.id, saysExpired)
		w.honest(t, a.Command, m.id, 1)
		if keys := c.keys(); keys != "" {
			t.Errorf("%q was typed", keys)
		}
	})
}

// TestHookCannotAnswer: what the hook could not write was not answered: nobody is told that it was, nothing is typed.
func TestHookCannotAnswer(t *testing.T) {
	needLinux(t)
	t.Parallel()
	beside(t, 2, []string{"full", "closed"}, func(t *testing.T, out string) {
		a := ask{Command: "touch /srv/x", Paint: 200, Out: out}
		w, c, dir, _ := claudeSession(t, "", play{Asks: []ask{a}})
		m := w.find(a.Command, yesButton)
		w.tap(m, yesButton)
		c.until("hookend", 0)
		p := promptOf(t, dir, a.Command, func(p *PromptRecord) bool { return p.over() })
		if p.Status == Resolved {
			t.Errorf("it is %s", p.Status)
		}
		if auditCount(t, dir, "REPLY_INJECTED") > 0 {
			t.Error("the audit log has it as typed")
		}
		if keys := c.keys(); keys != "" || c.count("decided") > 0 {
			t.Errorf("%q was typed, %d decided", keys, c.count("decided"))
		}
		w.unanswered(m.id)
	})
}

// TestHookKilled: a hook that is killed answers nothing: the phone is told, the old buttons do nothing, nothing is typed
// that was not asked of the dialog that stands there.
func TestHookKilled(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 2, []string{"while it asks", "after the decision"}, func(t *testing.T, moment string) {
		a := ask{Command: "touch /srv/x", Paint: 200}
		w, c, dir, _ := claudeSession(t, "", play{Asks: []ask{a}})
		m := w.find(a.Command, yesButton)
		c.until("paint", 0)
		if moment == "after the decision" {
			c.order(order{Signal: "STOP"})
			w.tap(m, yesButton)
			promptOf(t, dir, a.Command, func(p *PromptRecord) bool { return p.NonceUsed })
		}
		c.order(order{Signal: "KILL"})
		c.until("hookend", 0)
		w.unanswered(m.id)
		if said := w.answer(w.tap(m, yesButton)); !saysNothing.MatchString(said) {
			t.Errorf("a tap on the old button is told %q", said)
		}
		again := w.where("the dialog as a question of its own", func(n seen) bool {
			_, ok := n.choice(noButton)
			return n.id != m.id && ok && strings.Contains(n.text, a.Command)
		})
		if keys := c.keys(); keys != "" || auditCount(t, dir, "REPLY_INJECTED") > 0 {
			t.Errorf("%q was typed", keys)
		}
		w.tap(again, noButton)
		if r := c.until("decided", 0); r.By != "keyboard" || !strings.HasPrefix(r.Text, "No") && r.Text != "Esc" {
			t.Errorf("the new No: %s by %s", r.Text, r.By)
		}
		w.honest(t, a.Command, m.id, 2)
	})
}

// TestTextAboveAQuestionCounts: when anything above a question changes after it was shown, the old message's Yes types
// nothing and says why; a message of its own, with its own buttons, shows the new text, and its Yes answers that.
func TestTextAboveAQuestionCounts(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type row struct {
		name, ask, change string // ask: with %s for what it is about, change: likewise
		before, after     string
		late              bool // the old button is tapped when the new message is there
	}
	lines := strings.Repeat("some line of output\r\n", 30)
	rows := []row{}
	for _, shape := range []row{
		{name: "in place", ask: "\x1b[H\x1b[J%s\r\nProceed? (y/n) ", change: "\x1b[H\x1b[J%s\r\nProceed? (y/n) "},
		{name: "in place, blank line", ask: "\x1b[H\x1b[J%s\r\n\r\nProceed? (y/n) ",
			change: "\x1b[H\x1b[J%s\r\n\r\nProceed? (y/n) "},
		{name: "alternate screen", ask: "\x1b[?1049h\x1b[2J\x1b[H%s\r\n\r\nProceed? (y/n) ",
			change: "\x1b7\x1b[1;1H%s\x1b[K\x1b8"},
		{name: "scrolled", ask: lines + "%s\r\nProceed? (y/n) ", change: "\x1b7\x1b[1A\r%s\x1b[K\x1b8"},
		{name: "scrolled, blank line", ask: lines + "%s\r\n\r\nProceed? (y/n) ", change: "\x1b7\x1b[2A\r%s\x1b[K\x1b8"},
		{name: "asked anew below", ask: "%s\r\nProceed? (y/n) ", change: "\r\n%s\r\nProceed? (y/n) "},
	} {
		for _, late := range []bool{false, true} {
			one := shape
			one.before, one.after, one.late = "Delete the file a.txt", "Delete the file b.txt", late
			rows = append(rows, one)
		}
		shape.before, shape.after = "$ rm -rf ~/x", "$ rm -rf ~/ x"
		rows = append(rows, shape)
	}
	beside(t, 6, rows, func(t *testing.T, row row) {
		w, c, dir, _ := stageSession(t, "")
		c.show("a", fmt.Sprintf(row.ask, row.before))
		m := w.find("Proceed?", yesButton)
		if !strings.Contains(m.text, row.before) {
			t.Errorf("the message does not show %q: %s", row.before, m.text)
		}
		c.show("b", fmt.Sprintf(row.change, row.after))
		fresh := func() seen {
			return w.where(row.after+" in a message of its own", func(n seen) bool {
				_, ok := n.choice(yesButton)
				return ok && n.id != m.id && strings.Contains(n.text, row.after)
			})
		}
		if row.late {
			fresh()
		}
		tap := w.tap(m, yesButton)
		if said := w.answer(tap); row.late && !saysNothing.MatchString(said) {
			t.Errorf("the old button says %q", said)
		}
		w.unanswered(m.id, saysReplaced, saysLost)
		n := fresh()
		for label, data := range m.buttons {
			if n.buttons[label] == data {
				t.Errorf("button %q is the same in both messages", label)
			}
		}
		if keys := c.keys(); keys != "" || auditCount(t, dir, "REPLY_INJECTED") > 0 {
			t.Errorf("the old button typed %q", keys)
		}
		w.tap(n, yesButton)
		c.reads("b", "y\n")
		if keys := c.keys(); keys != "y\n" {
			t.Errorf("typed in all: %q", keys)
		}
	})
}

// TestTextChangesWhileItIsTapped: a Yes that is tapped in the moment when the text above it changes is never read by what
// asks about something else. Nobody can look and type in one step, so what comes in a screen's first 20 ms does not count.
func TestTextChangesWhileItIsTapped(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 6, make([]int, rounds(t)), func(t *testing.T, _ int) {
		w, c, dir, _ := stageSession(t, "")
		c.show("a", "\x1b[H\x1b[JDelete the file a.txt\r\n\r\nProceed? (y/n) ")
		m := w.find("Proceed?", yesButton)
		changed := make(chan struct{})
		go func() {
			defer close(changed)
			<-time.After(time.Duration(rand.IntN(150)) * time.Millisecond)
			c.show("b", "\x1b[H\x1b[JDelete the file b.txt\r\n\r\nProceed? (y/n) ")
		}()
		<-time.After(time.Duration(rand.IntN(150)) * time.Millisecond)
		w.tap(m, yesButton)
		<-changed
		p := promptOf(t, dir, "Proceed?", func(p *PromptRecord) bool { return p.MsgID == int64(m.id) && p.over() })
		if p.Status == Resolved {
			c.until("key", -1)
		} else {
			w.unanswered(m.id, saysReplaced, saysLost)
		}
		if keys := c.keysAt("b"); keys != "" {
			t.Errorf("%q answers what was not shown", keys)
		}
	})
}

// TestRestlessText: text that keeps changing above a question brings at most six messages a minute.
func TestRestlessText(t *testing.T) {
	needUnix(t)
	t.Parallel()
	long := 12 * time.Second
	if os.Getenv("ATLASBRIDGE_TEST_ROUNDS") != "" {
		long = time.Minute
	}
	shapes := []string{"\r\x1b[K12:00:%02d a line of a log\r\nProceed? (y/n) ",
		"\x1b[H\x1b[J%d files done\r\nDelete them all\r\nProceed? (y/n) "}
	beside(t, 2, shapes, func(t *testing.T, shape string) {
		w, c, _, _ := stageSession(t, "")
		pace := time.NewTicker(300 * time.Millisecond)
		defer pace.Stop()
		c.show("0", fmt.Sprintf(shape, 0))
		w.find("Proceed?", anyButton)
		end := time.Now().Add(long)
		for i := 1; time.Now().Before(end); i++ {
			<-pace.C
			c.show(fmt.Sprint(i), fmt.Sprintf(shape, i))
		}
		if n := w.count("Proceed?"); n > 6 {
			t.Errorf("%d messages in %v", n, long)
		}
	})
}

// TestNothingUnseenIsAllowed: an answer that grants comes with all of what it is about, or after "Show all" did.
func TestNothingUnseenIsAllowed(t *testing.T) {
	needUnix(t)
	t.Parallel()
	words := func(n int) (all string) {
		for i := range n {
			all += fmt.Sprintf("w%03d ", i)
		}
		return all
	}
	command := func(rows int) (all string) {
		for i := range rows {
			all += fmt.Sprintf("run --now w%03d /srv/data \\\r\n", i)
		}
		return all
	}
	menu := "\r\nProceed?\r\n❯ Yes\r\n  No\r\n"
	type row struct {
		name  string
		raw   bool
		text  string
		words int
		want  string
	}
	beside(t, 7, []row{
		{"a line of 1200", false, words(240) + "Proceed? (y/n) ", 240, "y\n"},
		{"13 rows", false, command(13) + "Proceed? (y/n) ", 13, "y\n"},
		{"40 rows", false, command(40) + "Proceed? (y/n) ", 40, "y\n"},
		{"menu of 13 rows", true, "\x1b[?25l" + command(13) + menu, 13, "\r"},
		{"menu of 40 rows", true, "\x1b[?25l" + command(40) + menu, 40, "\r"},
		{"Enter after 13 rows", false, command(13) + "Press Enter to continue", 13, "\n"},
		{"Enter after 40 rows", false, command(40) + "Press Enter to continue", 40, "\n"},
	}, func(t *testing.T, row row) {
		w, c, _, _ := stageSession(t, "")
		c.order(order{Raw: row.raw, Name: "ask", Write: row.text})
		m := w.where("a question", func(m seen) bool { return len(m.buttons) > 0 })
		missing := func() (list []string) {
			all := strings.Join(strings.Fields(w.texts()), "")
			for i := range row.words {
				if word := fmt.Sprintf("w%03d", i); !strings.Contains(all, word) {
					list = append(list, word)
				}
			}
			return list
		}
		if _, grants := m.choice(grantButton); !grants {
			if _, ok := m.choice(noButton); !ok && row.want != "\n" {
				t.Errorf("it cannot be refused: %v", m.buttons)
			}
			w.tap(m, showAllButton)
			m = w.where("a Yes with all of it", func(m seen) bool {
				_, ok := m.choice(grantButton)
				return ok
			})
		}
		if list := missing(); len(list) > 0 {
			t.Errorf("%v can be tapped, and %d of %d words were never shown: %v", m.buttons, len(list), row.words, list)
		}
		w.tap(m, grantButton)
		c.reads("ask", row.want)
	})
}

// TestWaitingDecidesNothing: what nobody answers gets a refusal where one is known, Enter where it is bare, else nothing.
func TestWaitingDecidesNothing(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type row struct {
		name  string
		mode  string // "": a line is read; "raw"; "noecho"
		text  string
		typed string // a pattern of all that may be typed
	}
	pair := func(question, yes, no string) string { // as gum draws it
		dim := "\x1b[38;5;59m"
		return "\x1b[?25l\x1b[?2004h\r \x1b[1;38;5;99m" + question + "\x1b[0m\x1b[K\r\n\x1b[K\r\n \x1b[48;5;212m   \x1b[0m" +
			"\x1b[38;5;230;48;5;212m" + yes + "\x1b[0m\x1b[48;5;212m   \x1b[0m  \x1b[48;5;235m   \x1b[0m\x1b[38;5;254;48;5;235m" +
			no + "\x1b[0m\x1b[48;5;235m   \x1b[0m\x1b[K\r\n\x1b[K\r\n" + dim + "←→ toggle • enter submit • y " + yes + " • n " +
			no + "\x1b[0m\x1b[K\x1b[100D"
	}
	beside(t, 8, []row{
		{"default 1", "", "1. deploy\r\n2. abort\r\nChoose [1]: ", `^(2\n)?$`},
		{"default 1, no refusal", "", "1. staging\r\n2. production\r\nChoose [1]: ", `^$`},
		{"j/N", "", "Fortfahren? (j/N) ", `^([nN]\n)?$`},
		{"o/n", "", "Continuer ? (o/n) ", `^([nN]\n)?$`},
		{"Y/n", "", "Really delete it? [Y/n] ", `^[nN]\n$`},
		{"y/N", "", "Really delete it? (y/N) ", `^[nN]\n$`},
		{"bare Enter", "", "Press Enter to continue", `^\n$`},
		{"Enter wipes", "", "Press [ENTER] to wipe the disk or Ctrl-C to cancel", `^$`},
		{"Da Net", "raw", "\x1b[?25lUdalit fajl?\r\n❯ Da\r\n  Net\r\n", `^(\x1b\[B)*$`},
		{"Да Нет", "raw", "\x1b[?25lУдалить файл?\r\n❯ Да\r\n  Нет\r\n", `^(\x1b\[B)*$`},
		{"execute", "raw", "\x1b[?25lRun the tool?\r\n✓ Yes, execute this tool\r\n✗ No\r\n", `^(\x1b\[B)*$`},
		{"pair of buttons", "raw", pair("Commit changes?", "Yes", "No"), `^(\x1b\[C|\t)*[nN]?$`},
		{"pair of buttons, German", "raw", pair("Änderungen verwerfen?", "Ja", "Nein"), `^(\x1b\[C|\t)*[nN]?$`},
		{"password", "noecho", "Password: ", `^$`},
		{"text", "", "Name: ", `^$`},
		{"choices unread", "raw", "\x1b[?25lWhich one? (use arrows)\r\n❯ staging\r\n  production\r\n", `^$`},
	}, func(t *testing.T, row row) {
		_, c, dir, _ := stageSession(t, "timeout_seconds = 2\npermission_timeout_seconds = 2\nstuck_timeout_seconds = 0.5")
		c.order(order{Raw: row.mode == "raw", NoEcho: row.mode == "noecho", Name: "ask", Write: row.text})
		promptOf(t, dir, "", func(p *PromptRecord) bool { return p.over() })
		allowed := regexp.MustCompile(row.typed)
		if !allowed.MatchString("") {
			c.reads("ask", "\n")
		}
		<-time.After(1500 * time.Millisecond) // in which nothing more may come
		if keys := c.keys(); !allowed.MatchString(keys) {
			t.Errorf("%q was typed", keys)
		}
	})
}

// TestWaitingLeavesAPipeAlone: what is piped into a tool arrives as it is, whatever waits meanwhile.
func TestWaitingLeavesAPipeAlone(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type row struct {
		script string
		after  time.Duration // until the data comes
	}
	beside(t, 3, []row{
		{`cat > "$0"`, time.Second},
		{`cat > "$0"`, 4 * time.Second},
		{`echo Press Enter to continue; cat > "$0"`, 4 * time.Second},
	}, func(t *testing.T, row row) {
		dir, file := home(t, "timeout_seconds = 1\nstuck_timeout_seconds = 0.5\n"), filepath.Join(t.TempDir(), "f")
		cmd := exec.Command(os.Args[0], "run", "bash", "-c", row.script, file)
		cmd.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		<-time.After(row.after)
		if _, err := io.WriteString(in, "data\n"); err != nil {
			t.Error(err)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != "data\n" {
			t.Errorf("the file holds %q (%v)", got, err)
		}
	})
}

// TestTextSwitchedOff: with free_text_enabled = false the phone learns that a text is asked for and can press Enter or
// leave it; a text from there is refused.
func TestTextSwitchedOff(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 3, []string{"enter", "leave", "text"}, func(t *testing.T, what string) {
		w, c, _, _ := stageSession(t, "free_text_enabled = false")
		c.show("ask", "Enter your name: ")
		m := w.find("Enter your name", enterButton)
		if _, ok := m.choice(leaveButton); !ok {
			t.Errorf("it cannot be left: %v", m.buttons)
		}
		want := ""
		switch what {
		case "enter":
			w.tap(m, enterButton)
			c.reads("ask", "\n")
			want = "\n"
		case "leave":
			w.tap(m, leaveButton)
			w.settled(m.id)
		case "text":
			w.writes("Ada", m.id)
			refuses := regexp.MustCompile(`(?i)✗|free.?text|switched off|nothing was done`)
			w.where("that the text is refused", func(n seen) bool { return n.id > m.id && refuses.MatchString(n.text) })
		}
		if keys := c.keys(); keys != want {
			t.Errorf("%q was typed, want %q", keys, want)
		}
	})
}

// TestAnsweredOnlyWhatWasTyped: what was decided when the program had already ended is never "answered". What was decided
// just before may have been typed in time: nobody can look and type in one step.
func TestAnsweredOnlyWhatWasTyped(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 6, make([]int, rounds(t)), func(t *testing.T, _ int) {
		w, c, dir, x := stageSession(t, "")
		c.show("ask", "Go? (y/n) ")
		m := w.find("Go?", yesButton)
		w.tap(m, yesButton)
		<-time.After(time.Duration(rand.IntN(30)) * time.Millisecond)
		c.order(order{Exit: true})
		gone := c.until("gone", -1).At.Add(20 * time.Millisecond)
		select {
		case <-x.code:
		case <-time.After(patience):
			t.Fatal("it does not end")
		}
		p := promptOf(t, dir, "Go?", func(p *PromptRecord) bool { return p.over() })
		after := w.now(m.id)
		if len(after.buttons) > 0 {
			t.Errorf("it still has buttons: %v", after.buttons)
		}
		if p.DecidedAt == nil || p.DecidedAt.Before(gone) {
			return
		}
		if saysAnswered.MatchString(after.text) || auditCount(t, dir, "REPLY_INJECTED") > 0 {
			t.Errorf("decided when nobody could read it, and it says %s", after.text)
		}
	})
}

// TestProgramEndsAsItIsAnswered: an answer that finds its program gone is "not delivered", never "answered".
func TestProgramEndsAsItIsAnswered(t *testing.T) {
	needUnix(t)
	t.Parallel()
	check := func(t *testing.T, w *watch, dir string, id int) {
		if p := promptOf(t, dir, "Go?", func(p *PromptRecord) bool { return p.over() }); p.Status != Failed {
			t.Errorf("it is %s", p.Status)
		}
		if auditCount(t, dir, "REPLY_INJECTED") > 0 {
			t.Error("the audit log has it as typed")
		}
		w.unanswered(id, saysLost)
	}
	beside(t, 2, []string{"before it is known", "while its child holds the terminal"}, func(t *testing.T, moment string) {
		w := newWatch(t)
		c := newPuppet(t, "tool", "puppet")
		dir := home(t, w.config("away_after_seconds = 0"))
		if moment == "while its child holds the terminal" {
			bridge(t, dir, "run", "sh", "-c", `trap "" HUP; sleep 30 & exec "$0"`, c.tool)
			c.show("ask", "Go? (y/n) ")
			m := w.find("Go?", yesButton)
			c.order(order{Exit: true})
			c.until("gone", -1)
			w.tap(m, yesButton)
			check(t, w, dir, m.id)
			return
		}
		x := bridge(t, dir, "run", c.tool)
		signal := func(name string) {
			if out, err := exec.Command("sh", "-c", fmt.Sprintf("kill -%s %d", name, x.pty.PID())).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v", out, err)
			}
		}
		c.show("ask", "Go? (y/n) ")
		m := w.find("Go?", yesButton)
		id := openPrompt(t, dir)
		signal("STOP") // so that it learns of both at once
		bridge(t, dir, "answer", shortID(id), "y")
		promptOf(t, dir, "Go?", func(p *PromptRecord) bool { return p.NonceUsed })
		c.order(order{Exit: true})
		c.until("gone", -1)
		signal("CONT")
		check(t, w, dir, m.id)
	})
}

// TestPhoneIsNotTheKeyboard: keys and texts that come from the phone are recorded and shown as the phone's.
func TestPhoneIsNotTheKeyboard(t *testing.T) {
	needUnix(t)
	t.Parallel()
	check := func(t *testing.T, w *watch, dir, text string, id int) {
		p := promptOf(t, dir, text, func(p *PromptRecord) bool { return p.over() && (id == 0 || p.MsgID == int64(id)) })
		if by := decidedBy(p); by != "telegram:1001" {
			t.Errorf("it is %s by %q", p.Status, by)
		}
		after := w.where("the outcome", func(m seen) bool {
			return m.id == id && (saysPhone.MatchString(m.text) || saysKeyboard.MatchString(m.text))
		})
		if saysKeyboard.MatchString(after.text) {
			t.Errorf("it says %s", after.text)
		}
	}
	beside(t, 3, []string{"/keys ENTER", "/keys TAB ENTER", "text"}, func(t *testing.T, what string) {
		if what != "text" {
			w, c, dir, _ := stageSession(t, "")
			c.show("ask", "Continue? (y/n) ")
			m := w.find("Continue?", yesButton)
			w.writes(what, 0)
			c.reads("ask", "\n")
			c.show("over", "\x1b[H\x1b[Jworking on it\r\n")
			check(t, w, dir, "Continue?", m.id)
			return
		}
		w, c, dir, _ := claudeSession(t, "away_after_seconds = 0\nnotify_idle = true", play{})
		c.until("done", -1)
		p := promptOf(t, dir, "", func(p *PromptRecord) bool { return p.Idle && p.Status == AwaitingReply })
		w.writes("go on", int(p.MsgID))
		if r := c.until("message", -1); r.Text != "go on" {
			t.Errorf("it got %q", r.Text)
		}
		check(t, w, dir, "", int(p.MsgID))
	})
}

// TestPrintedStatusIsNotBelieved: what a shown file says about the state of the terminal neither silences a question nor
// replaces its words.
func TestPrintedStatusIsNotBelieved(t *testing.T) {
	needUnix(t)
	t.Parallel()
	message := base64.StdEncoding.EncodeToString([]byte("approve Bash: harmless"))
	beside(t, 4, []string{
		"\x1b]7501;state=working:app=claude-code\a",
		"\x1b]7501;state=working\x1b\\",
		"\x1b]7501;state=blocked:app=claude-code:kind=permission:msg=" + message + "\a",
		"\x1b]7501;state=done:app=claude-code\a\x1b]0;◐ Claude Code\a",
	}, func(t *testing.T, printed string) {
		w, c, _, _ := stageSession(t, "")
		c.show("file", "$ cat notes\r\n"+printed+"some notes\r\n")
		c.show("ask", "Delete all? (y/n) ")
		m := w.find("Delete all?", yesButton)
		w.tap(m, yesButton)
		c.reads("ask", "y\n")
		w.settled(m.id)
		if strings.Contains(w.texts(), "harmless") {
			t.Error("the phone shows the words of the file")
		}
	})
}

// TestKeysWhileAnswering: a key that was typed for one question never answers the next one.
func TestKeysWhileAnswering(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 6, make([]int, rounds(t)), func(t *testing.T, _ int) {
		w := newWatch(t)
		x := bridge(t, home(t, w.config("away_after_seconds = 0")), "run", "bash", "-c",
			`read -p "Go? (y/n) " a; read -p "Delete all? (y/n) " b; echo "got [$a][$b]"; read c`)
		second := func() bool {
			x.mu.Lock()
			defer x.mu.Unlock()
			return strings.Contains(x.scr.Text(), "Delete all?")
		}
		m := w.find("Go?", yesButton)
		w.tap(m, yesButton)
		<-time.After(time.Duration(rand.IntN(30000)) * time.Microsecond)
		if second() {
			return // the key would rightly be the second question's
		}
		x.types("y\r")
		if second() {
			return // who knows
		}
		x.sees("Delete all?")
		<-time.After(time.Second) // longer than anything holds a key back
		x.types("n\r")
		x.sees("got [")
		x.mu.Lock()
		defer x.mu.Unlock()
		if shown := x.scr.Text(); !strings.Contains(shown, "got [y][n]") {
			t.Errorf("a key for the first question answers the second:\n%s", shown)
		}
	})
}

// TestNoKeyIsLost: whatever is typed arrives, all of it and in order, a question on the phone or not.
func TestNoKeyIsLost(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, 2, []string{"ready", "Go? (y/n) "}, func(t *testing.T, shown string) {
		_, c, dir, x := stageSession(t, "")
		c.order(order{Raw: true, Name: "ask", Write: shown})
		if shown != "ready" {
			openPrompt(t, dir)
		}
		want := ""
		for i := 0; len(want) < 3000; i++ {
			piece := fmt.Sprintf("%d,", i)[rand.IntN(2):]
			x.types(piece)
			want += piece
			<-time.After(time.Duration(rand.IntN(1500)) * time.Microsecond) // as fast as a paste over a slow line
		}
		c.that("it read all", func() bool {
			got := ""
			for _, r := range c.reports {
				if r.What == "key" {
					got += r.Text
				}
			}
			return got == want
		})
	})
}

// TestAskAgain: a question that nobody answered and that still stands can be asked again, in a new message with buttons of
// its own, and then be answered.
func TestAskAgain(t *testing.T) {
	needUnix(t)
	t.Parallel()
	red := regexp.MustCompile(`(?i)red|^\W*1`)
	w, c, _, _ := stageSession(t, "timeout_seconds = 3\npermission_timeout_seconds = 3")
	c.show("ask", "Colours\r\n1) red\r\n2) green\r\nChoose a number: ")
	m := w.where("the list", func(m seen) bool {
		_, ok := m.choice(red)
		return ok
	})
	over := w.find(saysExpiredWord(w, m.id), againButton)
	w.tap(over, againButton)
	n := w.where("it in a new message", func(n seen) bool {
		_, ok := n.choice(red)
		return ok && n.id != m.id
	})
	for label, data := range m.buttons {
		if n.buttons[label] == data {
			t.Errorf("button %q is the same in both messages", label)
		}
	}
	w.tap(n, red)
	c.reads("ask", "1\n")
	if keys := c.keys(); keys != "1\n" {
		t.Errorf("typed in all: %q", keys)
	}
}

// saysExpiredWord waits until a message says that nobody answered, and returns the word for it.
func saysExpiredWord(w *watch, id int) string {
	w.t.Helper()
	m := w.where("that nobody answered", func(m seen) bool { return m.id == id && overWord.MatchString(m.text) })
	return overWord.FindString(m.text)
}

var overWord = regexp.MustCompile(`(?i)⌛|nobody answered|no answer`)

/* ===== The bench: a phone that remembers, tools that do as they are told ===== */

// beside runs f for every row in a subtest of its own, so many at a time: they mostly wait.
func beside[T any](t *testing.T, width int, rows []T, f func(*testing.T, T)) {
	t.Helper()
	var all sync.WaitGroup
	room := make(chan struct{}, width)
	for i, row := range rows {
		name := fmt.Sprintf("%d %.30q", i, fmt.Sprint(row))
		if v := reflect.ValueOf(row); v.Kind() == reflect.Struct && v.FieldByName("name").IsValid() {
			name = fmt.Sprint(i, " ", v.FieldByName("name"))
		}
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			t.Run(name, func(t *testing.T) { f(t, row) })
		})
	}
	all.Wait()
}

// ---- watch: a phone that remembers every message as it was at any time ----

type watch struct {
	*phone
	past []seen            // guarded by phone.mu: what was sent or edited, in order
	said map[string]string // guarded by phone.mu: what a tap was told, by its id
	taps int               // guarded by phone.mu
}

// seen is a message at one time.
type seen struct {
	phoneMessage
	sent bool // it came, else it was edited
}

func newWatch(t *testing.T) *watch {
	p := &phone{t: t, next: make(chan struct{}), lastID: 100}
	w := &watch{phone: p, said: map[string]string{}}
	p.server = httptest.NewServer(w)
	t.Cleanup(p.server.Close)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the phone shows:\n%s", p.dump())
		}
	})
	return w
}

// ServeHTTP remembers what passes on its way to the phone. A document counts as a message with its content as text.
func (w *watch) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	method := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	if method == "getUpdates" {
		w.phone.ServeHTTP(rw, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller has gone
	}
	if method == "sendDocument" {
		body = documentAsMessage(r.Header.Get("Content-Type"), body)
		r.URL.Path = strings.TrimSuffix(r.URL.Path, method) + "sendMessage"
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	answer := httptest.NewRecorder()
	w.phone.ServeHTTP(answer, r)
	var sent struct {
		Text     string          `json:"text"`
		ID       int             `json:"message_id"`
		Callback string          `json:"callback_query_id"`
		Markup   json.RawMessage `json:"reply_markup"`
	}
	var got struct {
		Result struct {
			ID int `json:"message_id"`
		} `json:"result"`
	}
	_, _ = json.Unmarshal(body, &sent), json.Unmarshal(answer.Body.Bytes(), &got) // of another shape: nothing to remember
	w.change(func() {
		switch {
		case strings.HasPrefix(method, "send"):
			w.past = append(w.past, seen{phoneMessage{id: got.Result.ID, text: sent.Text, buttons: buttonsOf(sent.Markup)}, true})
		case strings.HasPrefix(method, "editMessage"):
			w.past = append(w.past, seen{phoneMessage{id: sent.ID, text: sent.Text, buttons: buttonsOf(sent.Markup)}, false})
		case method == "answerCallbackQuery":
			w.said[sent.Callback] = sent.Text
		}
	})
	rw.Write(answer.Body.Bytes())
}

// documentAsMessage is the JSON of a sendMessage that says what a sendDocument carries.
func documentAsMessage(contentType string, body []byte) []byte {
	_, boundary, _ := strings.Cut(contentType, "boundary=")
	fields := map[string]any{}
	parts := multipart.NewReader(bytes.NewReader(body), strings.Trim(boundary, `"`))
	text := ""
	for part, err := parts.NextPart(); err == nil; part, err = parts.NextPart() {
		content, readErr := io.ReadAll(part)
		switch {
		case readErr != nil:
			text += readErr.Error()
		case part.FormName() == "reply_markup":
			fields["reply_markup"] = json.RawMessage(content)
		case part.FormName() == "caption" || part.FileName() != "":
			text += string(content) + "\n"
		}
	}
	fields["text"] = text
	out, err := json.Marshal(fields)
	if err != nil {
		return []byte(`{"text":"a document that cannot be read"}`)
	}
	return out
}

// choice is the label of a button for that purpose.
func (m seen) choice(purpose *regexp.Regexp) (label string, ok bool) {
	for _, label := range slices.Sorted(maps.Keys(m.buttons)) {
		if purpose.MatchString(label) && (purpose != lastingButton || !noButton.MatchString(label)) {
			return label, true
		}
	}
	return "", false
}

// where waits for a message as it is now that fits.
func (w *watch) where(what string, fits func(seen) bool) seen {
	w.t.Helper()
	deadline := time.After(patience)
	for {
		w.mu.Lock()
		next := w.next
		for _, m := range w.messages {
			if fits(seen{phoneMessage: m}) {
				w.mu.Unlock()
				return seen{phoneMessage: m}
			}
		}
		w.mu.Unlock()
		select {
		case <-next:
		case <-deadline:
			w.t.Fatalf("the phone never shows %s", what)
		}
	}
}

// find waits for a message that holds text and has a button for that purpose.
func (w *watch) find(text string, purpose *regexp.Regexp) seen {
	w.t.Helper()
	return w.where(fmt.Sprintf("%q with a button %v", text, purpose), func(m seen) bool {
		_, ok := m.choice(purpose)
		return ok && strings.Contains(m.text, text)
	})
}

// settled waits until a message has no buttons any more.
func (w *watch) settled(id int) seen {
	w.t.Helper()
	return w.where(fmt.Sprintf("message %d without buttons", id), func(m seen) bool {
		return m.id == id && len(m.buttons) == 0
	})
}

// ended waits until a message has no buttons any more and says one of these; what is on its way is not over.
func (w *watch) ended(id int, words ...*regexp.Regexp) seen {
	w.t.Helper()
	return w.where(fmt.Sprintf("message %d with its outcome, one of %v", id, words), func(m seen) bool {
		says := func(one *regexp.Regexp) bool { return one.MatchString(m.text) }
		return m.id == id && len(m.buttons) == 0 && slices.ContainsFunc(words, says)
	})
}

// unanswered waits until a message has no buttons any more and does not say that it was answered.
func (w *watch) unanswered(id int, words ...*regexp.Regexp) seen {
	w.t.Helper()
	return w.where(fmt.Sprintf("message %d as not answered, one of %v", id, words), func(m seen) bool {
		says := func(one *regexp.Regexp) bool { return one.MatchString(m.text) }
		return m.id == id && len(m.buttons) == 0 && !says(saysAnswered) &&
			(len(words) == 0 || slices.ContainsFunc(words, says))
	})
}

// now is a message as it is.
func (w *watch) now(id int) seen {
	w.t.Helper()
	return w.where(fmt.Sprint("message ", id), func(m seen) bool { return m.id == id })
}

// texts is all that was ever shown.
func (w *watch) texts() (all string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.past {
		all += m.text + "\n"
	}
	for _, m := range w.messages { // past is a moment behind
		all += m.text + "\n"
	}
	return all
}

// count is how many messages came that hold text.
func (w *watch) count(text string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.past {
		if m.sent && strings.Contains(m.text, text) {
			n++
		}
	}
	return n
}

// tap presses a button of a message as it was seen, and returns the tap's id.
func (w *watch) tap(m seen, purpose *regexp.Regexp) (id string) {
	w.t.Helper()
	label, ok := m.choice(purpose)
	if !ok {
		w.t.Errorf("no button %v to tap; there are %v", purpose, m.buttons)
	}
	w.change(func() {
		w.taps++
		id = fmt.Sprint("tap", w.taps)
	})
	w.update(map[string]any{"callback_query": map[string]any{"id": id, "data": m.buttons[label],
		"from": map[string]any{"id": 1001, "first_name": "Operator"},
		"message": map[string]any{"message_id": m.id, "date": time.Now().Unix(),
			"chat": map[string]any{"id": 1001, "type": "private"}}}})
	return id
}

// answer waits for what a tap is told.
func (w *watch) answer(id string) (said string) {
	w.t.Helper()
	deadline := time.After(patience)
	for {
		w.mu.Lock()
		said, told := w.said[id]
		next := w.next
		w.mu.Unlock()
		if told {
			return said
		}
		select {
		case <-next:
		case <-deadline:
			w.t.Fatalf("tap %s is told nothing", id)
		}
	}
}

// honest checks the life of a message: text came in so many messages; a label always meant the same, and an answer always
// had the same label; buttons that went never came back.
func (w *watch) honest(t *testing.T, text string, id, messages int) {
	t.Helper()
	if n := w.count(text); n != messages {
		t.Errorf("%d messages show %q, want %d", n, text, messages)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	meant, named, over := map[string]string{}, map[string]string{}, false
	for _, m := range w.past {
		if m.id != id {
			continue
		}
		if over && len(m.buttons) > 0 {
			t.Errorf("buttons come back: %v", m.buttons)
		}
		over = over || len(m.buttons) == 0
		for label, data := range m.buttons {
			if was, ok := meant[label]; ok && was != data {
				t.Errorf("button %q meant %s and means %s", label, was, data)
			}
			if was, ok := named[data]; ok && was != label {
				t.Errorf("%s was called %q and is called %q", data, was, label)
			}
			meant[label], named[data] = data, label
		}
	}
}

// promptOf waits for a prompt in the state that shows text and fits.
func promptOf(t *testing.T, dir, text string, fits func(*PromptRecord) bool) *PromptRecord {
	t.Helper()
	all := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-time.After(20 * time.Millisecond) {
		st, err := openStore(dir)
		if err != nil {
			continue // it is being written
		}
		v, err := st.View()
		st.Close()
		if err != nil {
			continue
		}
		all = ""
		for _, p := range v.Prompts {
			if strings.Contains(p.Question+p.Excerpt+p.Full, text) && fits(p) {
				return p
			}
			all += fmt.Sprintf("%s %q %s %s\n", p.ID, p.Question, p.Status, p.Reason)
		}
	}
	t.Fatalf("no prompt %q in that state; prompts:\n%s", text, all)
	return nil
}

// decidedBy is who decided, "" nobody.
func decidedBy(p *PromptRecord) string {
	if p.DecidedBy == nil {
		return ""
	}
	return *p.DecidedBy
}

// auditCount is how many entries of that name the audit log has.
func auditCount(t *testing.T, dir, event string) int {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(dir, "audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(log), `"event":"`+event+`"`)
}

// ---- puppet: a tool in a terminal that does what the test says, and tells what it read while which screen stood ----

// order is what the test has a tool do.
type order struct {
	Seq    int
	Name   string // of the screen from now on
	Write  string
	Raw    bool   // the terminal is made raw before
	NoEcho bool   // it no longer echoes
	Exit   bool   // the tool ends
	Signal string // what claude's hooks get
	Play   *play  // what claude does
}

// report is what a tool tells.
type report struct {
	At     time.Time
	What   string // done key shown hook hookend paint decided ran message done
	Seq    int
	Dialog int
	By     string
	Text   string
	Screen string // that stood when a key was read
	Early  bool   // in its first 20 ms: nobody can look and type in one step
	JSON   json.RawMessage
}

type puppet struct {
	t       *testing.T
	tool    string // the path of the script that starts it
	mu      sync.Mutex
	orders  *json.Encoder // nil until it has called; guarded like what follows
	reports []report
	next    chan struct{}
	seq     int
}

// newPuppet makes a tool of that name; mode is what the test binary becomes.
func newPuppet(t *testing.T, name, mode string) *puppet {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &puppet{t: t, tool: filepath.Join(t.TempDir(), name), next: make(chan struct{})}
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in --version) echo '2.1.330 (Claude Code)'; exit;; esac\n"+
		"ATLASBRIDGE_TEST_CHILD=%q exec %q \"$@\"\n", mode+" "+listener.Addr().String(), os.Args[0])
	syscall.ForkLock.RLock() // no child has the file open for writing when it is started: that fails with "text file busy"
	err = os.WriteFile(c.tool, []byte(script), 0o700)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
	go c.listen(listener)
	t.Cleanup(func() {
		_ = listener.Close() // it may be closed
		if t.Failed() {
			t.Logf("the tool tells:\n%s", c.log())
		}
	})
	return c
}

// listen gathers the reports until the tool is gone.
func (c *puppet) listen(listener net.Listener) {
	conn, err := listener.Accept()
	if err != nil {
		return // the test is over
	}
	defer conn.Close()
	c.change(func() { c.orders = json.NewEncoder(conn) })
	reports := json.NewDecoder(conn)
	for {
		var r report
		if err := reports.Decode(&r); err != nil {
			c.change(func() { c.reports = append(c.reports, report{At: time.Now(), What: "gone"}) })
			return
		}
		c.change(func() { c.reports = append(c.reports, r) })
	}
}

func (c *puppet) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	close(c.next)
	c.next = make(chan struct{})
}

// log is all that was told.
func (c *puppet) log() (all string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reports {
		all += fmt.Sprintf("%s %s dialog %d by %q %q screen %q early %v %s\n", r.At.Format("05.000"), r.What, r.Dialog, r.By,
			r.Text, r.Screen, r.Early, r.JSON)
	}
	return all
}

// that waits until something holds.
func (c *puppet) that(what string, holds func() bool) {
	c.t.Helper()
	deadline := time.After(patience)
	for {
		c.mu.Lock()
		ok, next := holds(), c.next
		c.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-next:
		case <-deadline:
			c.t.Fatalf("the tool never tells: %s", what)
		}
	}
}

// until waits for such a report; dialog -1: of any.
func (c *puppet) until(what string, dialog int) (found report) {
	c.t.Helper()
	c.that(fmt.Sprintf("%s of dialog %d", what, dialog), func() bool {
		i := slices.IndexFunc(c.reports, func(r report) bool { return r.What == what && (dialog < 0 || r.Dialog == dialog) })
		if i >= 0 {
			found = c.reports[i]
		}
		return i >= 0
	})
	return found
}

func (c *puppet) count(what string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reports {
		if r.What == what {
			n++
		}
	}
	return n
}

// keys is all it read, but for what came too early.
func (c *puppet) keys() string { return c.keysAt("") }

// keysAt is what it read while that screen stood, "" any.
func (c *puppet) keysAt(screen string) (keys string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reports {
		if r.What == "key" && !r.Early && (screen == "" || r.Screen == screen) {
			keys += r.Text
		}
	}
	return keys
}

// reads waits until it has read want, while that screen stood.
func (c *puppet) reads(screen, want string) {
	c.t.Helper()
	c.that(fmt.Sprintf("it read %q at %q", want, screen), func() bool {
		keys := ""
		for _, r := range c.reports {
			if r.What == "key" && !r.Early && r.Screen == screen {
				keys += r.Text
			}
		}
		return strings.Contains(keys, want)
	})
}

// order waits until the tool is there and has done it.
func (c *puppet) order(o order) {
	c.t.Helper()
	c.that("hello", func() bool { return c.orders != nil })
	c.mu.Lock()
	c.seq++
	o.Seq = c.seq
	err := c.orders.Encode(o)
	c.mu.Unlock()
	if err != nil {
		c.t.Fatal(err)
	}
	if !o.Exit {
		c.that(fmt.Sprint("order ", o.Seq, " done"), func() bool {
			return slices.ContainsFunc(c.reports, func(r report) bool { return r.What == "obeyed" && r.Seq == o.Seq })
		})
	}
}

// show has it write text, after which the screen has that name.
func (c *puppet) show(name, text string) {
	c.t.Helper()
	c.order(order{Name: name, Write: text})
}

// toldOnFailure has the log of a failed test show the screen.
func (x *terminal) toldOnFailure() {
	x.t.Cleanup(func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.t.Failed() {
			x.t.Logf("the terminal shows:\n%s", x.scr.Text())
		}
	})
}

// stageSession runs a puppet under atlasbridge.
func stageSession(t *testing.T, config string, flags ...string) (*watch, *puppet, string, *terminal) {
	t.Helper()
	w := newWatch(t)
	c := newPuppet(t, "tool", "puppet")
	dir := home(t, w.config("away_after_seconds = 0\n"+config))
	x := bridge(t, dir, slices.Concat([]string{"run"}, flags, []string{c.tool})...)
	x.toldOnFailure()
	return w, c, dir, x
}

// claudeSession runs a stand-in for claude under atlasbridge.
func claudeSession(t *testing.T, config string, p play, flags ...string) (*watch, *puppet, string, *terminal) {
	t.Helper()
	w := newWatch(t)
	c := newPuppet(t, "claude", "claude")
	if config == "" {
		config = "away_after_seconds = 0\nnotify_idle = false"
	}
	dir := home(t, w.config(config))
	x := bridge(t, dir, slices.Concat([]string{"run"}, flags, []string{c.tool})...)
	x.toldOnFailure()
	c.order(order{Play: &p})
	return w, c, dir, x
}

// ---- the tools themselves: what the test binary becomes ----

// childTool is such a tool until it ends; false: mode is none.
func childTool(mode string) bool {
	name, addr, _ := strings.Cut(mode, " ")
	if name != "puppet" && name != "claude" {
		return false
	}
	os.Unsetenv("ATLASBRIDGE_TEST_CHILD")
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		fmt.Println("calling the test:", err)
		os.Exit(9)
	}
	l := &wire{reports: json.NewEncoder(conn), orders: json.NewDecoder(conn)}
	if name == "puppet" {
		l.obey()
	} else {
		newActor(l).act()
	}
	return true
}

// wire is a tool's connection to its test.
type wire struct {
	mu      sync.Mutex // guards reports, screen and changed
	reports *json.Encoder
	orders  *json.Decoder
	screen  string
	changed time.Time
}

// tell ends the tool when nobody listens any more.
func (l *wire) tell(r report) {
	r.At = time.Now()
	if err := l.reports.Encode(r); err != nil {
		os.Exit(0)
	}
}

// obey does what the test says and tells every key with the screen that stood when it was read.
func (l *wire) obey() {
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := os.Stdin.Read(buf)
			l.mu.Lock()
			l.tell(report{What: "key", Text: string(buf[:n]), Screen: l.screen,
				Early: time.Since(l.changed) < 20*time.Millisecond})
			l.mu.Unlock()
			if err != nil && err != io.EOF { // which is no more than a ^D
				os.Exit(0)
			}
		}
	}()
	for {
		var o order
		if err := l.orders.Decode(&o); err != nil || o.Exit {
			os.Exit(0)
		}
		if o.Raw {
			l.raw()
		}
		if o.NoEcho {
			stty := exec.Command("stty", "-echo")
			stty.Stdin = os.Stdin
			if err := stty.Run(); err != nil {
				fmt.Println("stty:", err)
				os.Exit(9)
			}
		}
		l.mu.Lock()
		if o.Name != "" {
			l.screen, l.changed = o.Name, time.Now()
		}
		fmt.Print(o.Write)
		l.tell(report{What: "obeyed", Seq: o.Seq})
		l.mu.Unlock()
	}
}

// raw makes the terminal raw, for good.
func (l *wire) raw() {
	if _, err := term.MakeRaw(int(os.Stdin.Fd())); err != nil {
		fmt.Println("making the terminal raw:", err)
		os.Exit(9)
	}
}

// ---- the actor: claude's terminal, hooks and dialogs as measured ----

// play is what claude is to ask.
type play struct {
	Asks     []ask
	Together bool  // all hooks are called at once
	Order    []int // of the dialogs; nil: of the hooks
	Deaf     int   // ms in which a new dialog ignores keys
}

type ask struct {
	Command     string
	Suggestions json.RawMessage `json:",omitempty"`
	Paint       int             // ms from the hook's call to the dialog; -1: there is none, as with -p
	Halves      bool            // it is painted in two steps, 150 ms apart
	Out         string          // the hook's standard output: "" a pipe, "full" /dev/full, "closed" a pipe that nobody reads
}

type actor struct {
	*wire
	play     play
	hooks    map[string][]string // commands by event
	asked    []bool              // the hooks were called
	decided  []bool
	running  map[int]*exec.Cmd // permission hooks
	speaks   bool              // the terminal knows OSC 7501
	up       int               // the dialog that stands, -1 none
	coming   int               // the one that will be painted, -1 none
	pointer  int
	paintAt  time.Time
	idle     bool
	box      string // what stands in the input box
	blink    bool
	happened chan func() // for the one goroutine that owns all this
}

var (
	statusAnswer  = regexp.MustCompile("\x1b\\]7501;\\?(\x1b\\\\|\a)")
	pasteBrackets = strings.NewReplacer("\x1b[200~", "", "\x1b[201~", "")
	dialogOptions = []string{"Yes", "Yes, and always allow access to out/ from this project",
		"Yes, and switch to auto mode", "No"}
)

func newActor(l *wire) *actor {
	return &actor{wire: l, hooks: map[string][]string{}, running: map[int]*exec.Cmd{}, up: -1, coming: -1,
		happened: make(chan func(), 100)}
}

// act never returns: the tool ends with its terminal or with the test.
func (a *actor) act() {
	a.readSettings(os.Args[1:])
	a.raw()
	go a.readKeys()
	go a.readOrders()
	fmt.Print("\x1b[?2004h\x1b]0;✳ Claude Code\a\x1b[?1049h\x1b[2J\x1b[H\x1b[?25l\x1b]7501;?\a")
	for tick := time.NewTicker(600 * time.Millisecond); ; {
		select {
		case f := <-a.happened:
			f()
		case <-tick.C:
			a.blink = !a.blink
			if a.up >= 0 && time.Since(a.paintAt) > time.Second {
				mark := " "
				if a.blink {
					mark = "●"
				}
				fmt.Print("\x1b[H\x1b[2B\r" + mark + "\x1b[24;1H")
			}
		}
	}
}

// readSettings takes the hooks from the last --settings.
func (a *actor) readSettings(args []string) {
	var settings struct {
		Hooks map[string][]struct{ Hooks []struct{ Command string } }
	}
	for i, arg := range args {
		text, ok := strings.CutPrefix(arg, "--settings=")
		if arg == "--settings" && i+1 < len(args) {
			text, ok = args[i+1], true
		}
		if ok {
			if err := json.Unmarshal([]byte(text), &settings); err != nil {
				a.tell(report{What: "settings", Text: err.Error()})
			}
		}
	}
	for event, groups := range settings.Hooks {
		for _, group := range groups {
			for _, hook := range group.Hooks {
				a.hooks[event] = append(a.hooks[event], hook.Command)
			}
		}
	}
}

func (a *actor) readKeys() {
	buf := make([]byte, 4096)
	for {
		n, err := os.Stdin.Read(buf)
		if err != nil {
			os.Exit(0)
		}
		chunk := string(buf[:n])
		a.happened <- func() { a.keys(chunk) }
	}
}

func (a *actor) readOrders() {
	for {
		var o order
		if err := a.orders.Decode(&o); err != nil || o.Exit {
			os.Exit(0)
		}
		a.happened <- func() {
			if o.Play != nil {
				a.play = *o.Play
				a.asked = make([]bool, len(a.play.Asks))
				a.decided = make([]bool, len(a.play.Asks))
				a.paintBox()
				a.later(150*time.Millisecond, a.work)
			}
			for _, cmd := range a.running {
				if o.Signal != "" {
					a.signal(cmd, o.Signal)
				}
			}
			a.tell(report{What: "obeyed", Seq: o.Seq})
		}
	}
}

// signal reaches the hook's whole process group.
func (a *actor) signal(cmd *exec.Cmd, name string) {
	kill := fmt.Sprintf("kill -%s -%d", name, cmd.Process.Pid)
	if out, err := exec.Command("sh", "-c", kill).CombinedOutput(); err != nil {
		a.tell(report{What: "signal", Text: string(out)})
	}
}

func (a *actor) later(d time.Duration, f func()) {
	time.AfterFunc(d, func() { a.happened <- f })
}

// state tells the terminal what is done, where it wants to know.
func (a *actor) state(words string) {
	if a.speaks {
		fmt.Printf("\x1b]7501;%s\a", words)
	}
}

// work goes on with what is not asked yet, or shows the next dialog, or ends the turn.
func (a *actor) work() {
	if a.up >= 0 || a.coming >= 0 {
		return
	}
	waiting := slices.IndexFunc(a.asked, func(asked bool) bool { return !asked })
	next := a.nextDialog()
	switch {
	case next >= 0 && a.play.Asks[next].Paint >= 0:
		a.comes(next)
	case next >= 0: // there is no dialog: the hook alone decides
	case waiting >= 0:
		fmt.Print("\x1b]0;◐ Claude Code\a")
		a.state("state=working:app=claude-code")
		a.paint("✶ Brewing…", "")
		for i := range a.play.Asks {
			if a.play.Together || i == waiting {
				a.asked[i] = true
			}
		}
		go func() {
			for i := range a.play.Asks {
				if a.play.Together || i == waiting {
					a.runHooks(i, "PreToolUse", nil)
				}
			}
			a.happened <- func() { a.request(waiting) }
		}()
	case !a.idle && !slices.Contains(a.decided, false):
		a.idle = true
		go func() {
			a.runHooks(0, "Stop", nil)
			a.happened <- func() {
				fmt.Print("\x1b]0;✳ Claude Code\a")
				a.state("state=done:app=claude-code")
				a.paintBox()
				a.tell(report{What: "done", Dialog: -1})
			}
		}()
	}
}

// nextDialog is the first in order that was asked and is not decided, -1 none.
func (a *actor) nextDialog() int {
	for n := range a.play.Asks {
		i := n
		if a.play.Order != nil {
			i = a.play.Order[n]
		}
		if a.asked[i] && !a.decided[i] {
			return i
		}
	}
	return -1
}

// request calls the permission hooks, of this one or of all.
func (a *actor) request(first int) {
	for i := range a.play.Asks {
		if i == first || a.play.Together {
			a.tell(report{What: "hook", Dialog: i})
			ready := make(chan struct{})
			go a.runHooks(i, "PermissionRequest", ready)
			<-ready
		}
	}
	if n := a.nextDialog(); n >= 0 && a.play.Asks[n].Paint >= 0 {
		a.comes(n)
	}
}

// comes tells that this dialog waits, and paints it when its time has come.
func (a *actor) comes(i int) {
	a.coming = i
	fmt.Print("\x1b]0;✳ Claude Code\a")
	words := base64.StdEncoding.EncodeToString([]byte("approve Bash: " + a.play.Asks[i].Command))
	a.state("state=blocked:app=claude-code:kind=permission:msg=" + words)
	a.later(time.Duration(a.play.Asks[i].Paint)*time.Millisecond, func() {
		a.coming = -1
		if a.decided[i] {
			a.work()
			return
		}
		a.up, a.pointer, a.paintAt = i, 0, time.Now()
		if a.play.Asks[i].Halves {
			a.paintDialog(true)
			a.later(150*time.Millisecond, func() {
				if a.up == i {
					a.paintDialog(false)
				}
			})
		} else {
			a.paintDialog(false)
		}
		a.tell(report{What: "paint", Dialog: i})
	})
}

// paint shows rows from the top and the last row, with the cursor behind what stands in the box.
func (a *actor) paint(rows string, foot string) {
	lines := strings.Split(rows, "\n")
	for len(lines) < 23 {
		lines = append(lines, "")
	}
	fmt.Print("\x1b[H" + strings.Join(append(lines[:23], foot), "\x1b[K\r\n") + "\x1b[K\x1b[24;1H")
}

func (a *actor) paintBox() {
	rule := strings.Repeat("─", 80)
	a.paint("● Hello\n\n"+rule+"\n❯\u00a0"+a.box+"\n"+rule+"\n  ? for shortcuts", "")
	fmt.Printf("\x1b[4;%dH", 3+len(a.box))
	if !a.idle {
		a.state("state=idle:app=claude-code")
	}
}

func (a *actor) paintDialog(half bool) {
	command := a.play.Asks[a.up].Command
	out := "> go on\n\n● Bash(" + command + ")\n  ⎿  Running…\n\n" + strings.Repeat("─", 80) + "\n Bash command\n\n   " + command +
		"\n   Do it\n\n"
	if half {
		a.paint(out, "")
		return
	}
	out += " Do you want to proceed?\n"
	for i, option := range dialogOptions {
		mark := "   "
		if i == a.pointer {
			mark = " ❯ "
		}
		out += fmt.Sprintf("%s%d. %s\n", mark, i+1, option)
	}
	a.paint(out+"\n Esc to cancel · Tab to amend", "")
}

// keys does what a chunk of input does: as measured, one with more than a key in it is ignored by a dialog.
func (a *actor) keys(chunk string) {
	rest := statusAnswer.ReplaceAllString(chunk, "")
	if rest != chunk {
		a.speaks = true
		a.state("state=idle:app=claude-code")
	}
	if rest == "" {
		return
	}
	a.tell(report{What: "key", Dialog: a.up, Text: rest})
	switch {
	case a.up >= 0 && time.Since(a.paintAt) < time.Duration(a.play.Deaf)*time.Millisecond:
	case a.up >= 0 && rest == "\x1b":
		a.decide(a.up, "keyboard", "Esc", nil)
	case a.up >= 0 && rest == "\r":
		a.decide(a.up, "keyboard", dialogOptions[a.pointer], nil)
	case a.up >= 0 && len(rest) == 1 && rest >= "1" && rest <= "4":
		a.decide(a.up, "keyboard", dialogOptions[rest[0]-'1'], nil)
	case a.up >= 0 && rest == "\x1b[A":
		a.pointer = max(0, a.pointer-1)
		a.paintDialog(false)
	case a.up >= 0 && rest == "\x1b[B":
		a.pointer = min(len(dialogOptions)-1, a.pointer+1)
		a.paintDialog(false)
	case a.idle && strings.HasPrefix(rest, "\x1b[200~"):
		a.box += pasteBrackets.Replace(rest)
		a.paintBox()
	case a.idle && rest == "\r":
		a.tell(report{What: "message", Text: a.box})
		a.box = ""
		a.paintBox()
		fmt.Print("\x1b]0;◐ Claude Code\a")
		a.state("state=working:app=claude-code")
		a.later(300*time.Millisecond, func() {
			fmt.Print("\x1b]0;✳ Claude Code\a")
			a.state("state=done:app=claude-code")
		})
	case a.idle && rest >= " ":
		a.box += strings.TrimSuffix(rest, "\r")
		a.paintBox()
		if strings.HasSuffix(rest, "\r") && len(rest) < 64 {
			a.keys("\r")
		}
	}
}

// decide ends a question, once, and goes on a moment later.
func (a *actor) decide(i int, by, text string, decision json.RawMessage) {
	if a.decided[i] {
		a.tell(report{What: "late", Dialog: i, By: by, Text: text})
		return
	}
	a.decided[i] = true
	a.tell(report{What: "decided", Dialog: i, By: by, Text: text, JSON: decision})
	if a.up == i {
		a.up = -1
		fmt.Print("\x1b]0;◐ Claude Code\a")
		a.state("state=working:app=claude-code")
		a.paint("✶ Brewing…", "")
	}
	go func() {
		if text == "allow" || strings.HasPrefix(text, "Yes") {
			a.runHooks(i, "PostToolUse", nil)
		}
		a.later(150*time.Millisecond, a.work)
	}()
}

// runHooks calls an event's hooks and waits for them; ready is closed when the first has started, or there is none.
func (a *actor) runHooks(i int, event string, ready chan struct{}) {
	one := ask{}
	if i < len(a.play.Asks) {
		one = a.play.Asks[i]
	}
	input := map[string]any{"session_id": "5e551011", "transcript_path": "", "cwd": "/", "prompt_id": "p",
		"permission_mode": "default", "hook_event_name": event}
	if event == "Stop" {
		input["stop_hook_active"], input["last_assistant_message"] = false, "That is done."
	} else {
		input["tool_name"] = "Bash"
		input["tool_input"] = map[string]string{"command": one.Command, "description": "Do it"}
	}
	if event == "PermissionRequest" {
		input["permission_suggestions"] = []any{}
		if len(one.Suggestions) > 0 {
			input["permission_suggestions"] = one.Suggestions
		}
	} else {
		input["tool_use_id"] = fmt.Sprint("toolu_", i)
	}
	text, err := json.Marshal(input)
	if err != nil {
		a.happened <- func() { a.tell(report{What: "trouble", Text: err.Error()}) }
	}
	for _, command := range a.hooks[event] {
		out, err := a.runHook(i, event, command, text, ready)
		ready = nil
		if event == "PermissionRequest" {
			a.happened <- func() {
				delete(a.running, i)
				a.tell(report{What: "hookend", Dialog: i, Text: out, By: fmt.Sprint(err)})
				a.hookSaid(i, out)
			}
		}
	}
	if ready != nil {
		close(ready)
	}
}

// runHook is one hook as claude runs it: by sh, in a session of its own, without a terminal.
func (a *actor) runHook(i int, event, command string, input []byte, ready chan struct{}) (string, error) {
	var out bytes.Buffer
	cmd := exec.Command("sh", "-c", command)
	cmd.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "CLAUDECODE=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if session := reflect.ValueOf(cmd.SysProcAttr).Elem().FieldByName("Setsid"); session.IsValid() {
		session.SetBool(true)
	}
	cmd.Stdin, cmd.Stdout = bytes.NewReader(input), &out
	switch {
	case event != "PermissionRequest":
	case a.play.Asks[i].Out == "full":
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			return "", err
		}
		defer full.Close()
		cmd.Stdout = full
	case a.play.Asks[i].Out == "closed":
		r, w, err := os.Pipe()
		if err != nil {
			return "", err
		}
		_ = r.Close() // nobody reads
		defer w.Close()
		cmd.Stdout = w
	}
	err := cmd.Start()
	if err == nil && ready != nil {
		a.running[i] = cmd // the owner waits for ready
	}
	if ready != nil {
		close(ready)
	}
	if err != nil {
		return "", err
	}
	err = cmd.Wait()
	return out.String(), err
}

// hookSaid takes a hook's decision, if it is one.
func (a *actor) hookSaid(i int, out string) {
	var said struct {
		Out struct {
			Decision json.RawMessage
		} `json:"hookSpecificOutput"`
	}
	var decision struct{ Behavior string }
	if err := json.Unmarshal([]byte(out), &said); err != nil {
		return // no decision: the dialog stays
	}
	if err := json.Unmarshal(said.Out.Decision, &decision); err != nil {
		return
	}
	if decision.Behavior == "allow" || decision.Behavior == "deny" {
		a.decide(i, "hook", decision.Behavior, said.Out.Decision)
	}
}
