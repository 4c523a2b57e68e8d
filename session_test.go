package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

/* ===== The session, from outside: the test binary is atlasbridge, in a real terminal ===== */

const patience = 20 * time.Second // longer than anything here takes on a slow machine

func TestMain(m *testing.M) {
	mode := os.Getenv("ATLASBRIDGE_TEST_CHILD")
	os.Unsetenv("ATLASBRIDGE_TEST_CHILD") // what a child starts is no test child
	switch {
	case mode == "main":
		os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	case mode != "" && (childPTY(mode) || childStore(mode)):
		return
	}
	os.Exit(m.Run())
}

// terminal is a program in a real pseudo-terminal of 24 × 80 and the screen it paints.
type terminal struct {
	t    *testing.T
	pty  PTY
	mu   sync.Mutex // guards screen and change
	scr  *Screen
	next chan struct{} // closed at the next change
	code chan int
}

// home makes a state folder with this configuration.
func home(t *testing.T, config string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if config != "" {
		if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// bridge starts atlasbridge with these arguments in a terminal.
func bridge(t *testing.T, dir string, args ...string) *terminal {
	t.Helper()
	env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir, "TERM=xterm-256color", "PS1=$ ")
	return inTerminal(t, env, append([]string{os.Args[0]}, args...)...)
}

func inTerminal(t *testing.T, env []string, argv ...string) *terminal {
	t.Helper()
	pty, err := startPTY(argv, env, "", Size{Rows: 24, Cols: 80}, nil)
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, pty: pty, scr: newScreen(24, 80), next: make(chan struct{}), code: make(chan int, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := pty.Read(buf)
			term.mu.Lock()
			term.scr.Write(buf[:n])
			close(term.next)
			term.next = make(chan struct{})
			term.mu.Unlock()
			if err != nil {
				term.code <- pty.Wait()
				return
			}
		}
	}()
	t.Cleanup(func() {
		pty.Signal(os.Kill)
		pty.Close()
		<-done
	})
	return term
}

// sees waits until the screen holds text.
func (x *terminal) sees(text string) {
	x.t.Helper()
	deadline := time.After(patience)
	for {
		x.mu.Lock()
		shown, next := x.scr.Text(), x.next
		x.mu.Unlock()
		if strings.Contains(shown, text) {
			return
		}
		select {
		case <-next:
		case <-deadline:
			x.t.Fatalf("the terminal never shows %q; it shows:\n%s", text, shown)
		}
	}
}

func (x *terminal) types(keys string) { x.pty.Write([]byte(keys)) }

// exits waits for the end and checks the exit code.
func (x *terminal) exits(want int) {
	x.t.Helper()
	select {
	case got := <-x.code:
		if got != want {
			x.t.Errorf("exit code %d, want %d; screen:\n%s", got, want, x.scr.Text())
		}
	case <-time.After(patience):
		x.t.Fatalf("it does not end; screen:\n%s", x.scr.Text())
	}
}

// phone is a Bot API server for one operator, 1001, and what the phone shows.
type phone struct {
	t        *testing.T
	server   *httptest.Server
	mu       sync.Mutex // guards what follows
	messages []phoneMessage
	updates  []map[string]any
	lastID   int
	toasts   []string
	next     chan struct{}
}

type phoneMessage struct {
	id      int
	text    string
	buttons map[string]string // label → callback data
	deleted bool
}

func newPhone(t *testing.T) *phone {
	p := &phone{t: t, next: make(chan struct{}), lastID: 100}
	p.server = httptest.NewServer(p)
	t.Cleanup(p.server.Close)
	return p
}

// config is a configuration that reaches this phone.
func (p *phone) config(more string) string {
	return fmt.Sprintf("%s\n[telegram]\nbot_token = \"123456789:AAFakeTokenForLoopbackTestsOnly0123\"\n"+
		"chat_id = 1001\nallowed_users = [1001]\napi_base = %q\n", more, p.server.URL)
}

func (p *phone) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Offset  int             `json:"offset"`
		Timeout int             `json:"timeout"`
		Text    string          `json:"text"`
		ID      int             `json:"message_id"`
		Markup  json.RawMessage `json:"reply_markup"`
	}
	body, _ := io.ReadAll(r.Body)
	json.Unmarshal(body, &q)
	var result any = true
	switch method := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]; method {
	case "getMe":
		result = map[string]any{"id": 123456789, "is_bot": true, "username": "test_bot"}
	case "getUpdates":
		result = p.poll(r.Context(), q.Offset, time.Duration(q.Timeout)*time.Second)
	case "sendMessage":
		p.change(func() {
			p.lastID++
			p.messages = append(p.messages, phoneMessage{id: p.lastID, text: q.Text, buttons: buttonsOf(q.Markup)})
			result = map[string]any{"message_id": p.lastID, "date": time.Now().Unix(), "chat": map[string]any{"id": 1001, "type": "private"}}
		})
	case "editMessageText", "editMessageReplyMarkup", "deleteMessage":
		p.change(func() {
			for i := range p.messages {
				m := &p.messages[i]
				if m.id == q.ID {
					m.deleted = method == "deleteMessage"
					m.buttons = buttonsOf(q.Markup)
					if q.Text != "" {
						m.text = q.Text
					}
				}
			}
			result = map[string]any{"message_id": q.ID, "date": time.Now().Unix(), "chat": map[string]any{"id": 1001, "type": "private"}}
		})
	case "answerCallbackQuery":
		p.change(func() { p.toasts = append(p.toasts, q.Text) })
	}
	json.NewEncoder(w).Encode(map[string]any{"ok": true, "result": result})
}

func buttonsOf(markup json.RawMessage) map[string]string {
	var m struct {
		Rows [][]struct {
			Text string `json:"text"`
			Data string `json:"callback_data"`
		} `json:"inline_keyboard"`
	}
	json.Unmarshal(markup, &m)
	buttons := map[string]string{}
	for _, row := range m.Rows {
		for _, b := range row {
			buttons[b.Text] = b.Data
		}
	}
	return buttons
}

func (p *phone) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.next)
	p.next = make(chan struct{})
}

// poll answers a long poll: updates from offset on, or nothing when the time is over.
func (p *phone) poll(ctx context.Context, offset int, wait time.Duration) []map[string]any {
	deadline := time.After(wait)
	for {
		p.mu.Lock()
		fresh, next := []map[string]any{}, p.next
		for _, u := range p.updates {
			if u["update_id"].(int) >= offset {
				fresh = append(fresh, u)
			}
		}
		p.mu.Unlock()
		if len(fresh) > 0 {
			return fresh
		}
		select {
		case <-next:
		case <-deadline:
			return fresh
		case <-ctx.Done():
			return fresh
		}
	}
}

// shows waits for a message that holds text and, where named, has that button.
func (p *phone) shows(text, button string) phoneMessage {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		p.mu.Lock()
		next, all := p.next, ""
		for _, m := range p.messages {
			all += fmt.Sprintf("%d %q %v\n", m.id, m.text, m.buttons)
			if _, ok := m.button(button); strings.Contains(m.text, text) && (button == "" || ok) {
				p.mu.Unlock()
				return m
			}
		}
		p.mu.Unlock()
		select {
		case <-next:
		case <-deadline:
			p.t.Fatalf("the phone never shows %q with button %q; it shows:\n%s", text, button, all)
		}
	}
}

// dump is what the phone shows.
func (p *phone) dump() (all string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.messages {
		all += fmt.Sprintf("%d %q %v\n", m.id, m.text, m.buttons)
	}
	return all + fmt.Sprint(p.toasts)
}

// button finds a button by the end of its label.
func (m phoneMessage) button(label string) (data string, ok bool) {
	for text, data := range m.buttons {
		if strings.HasSuffix(text, label) {
			return data, true
		}
	}
	return "", false
}

// press taps a button of a message.
func (p *phone) press(m phoneMessage, label string) {
	data, _ := m.button(label)
	p.update(map[string]any{"callback_query": map[string]any{"id": fmt.Sprint("cb", m.id, label), "data": data,
		"from":    map[string]any{"id": 1001, "first_name": "Operator"},
		"message": map[string]any{"message_id": m.id, "date": time.Now().Unix(), "chat": map[string]any{"id": 1001, "type": "private"}}}})
}

// writes sends a text message, as a reply where to is not 0.
func (p *phone) writes(text string, to int) {
	m := map[string]any{"message_id": 5000 + len(p.updates), "date": time.Now().Unix() + 1, "text": text,
		"from": map[string]any{"id": 1001, "first_name": "Operator"}, "chat": map[string]any{"id": 1001, "type": "private"}}
	if to != 0 {
		m["reply_to_message"] = map[string]any{"message_id": to, "date": time.Now().Unix(), "chat": map[string]any{"id": 1001, "type": "private"}}
	}
	p.update(map[string]any{"message": m})
}

func (p *phone) update(u map[string]any) {
	p.change(func() {
		u["update_id"] = 9001 + len(p.updates)
		p.updates = append(p.updates, u)
	})
}

// TestAnswered runs shell programs and answers them in every way there is.
func TestAnswered(t *testing.T) {
	phoneConfig := func(p *phone) string { return p.config("away_after_seconds = 1\nfree_text_enabled = true") }
	t.Run("tap", func(t *testing.T) {
		p := newPhone(t)
		x := bridge(t, home(t, phoneConfig(p)), "run", "bash", "-c", `read -p "Continue? (y/n) " a; echo "got [$a]"`)
		m := p.shows("Continue?", "Yes")
		p.press(m, "Yes")
		x.sees("got [y]")
		x.exits(0)
		if m = p.shows("on the phone", ""); len(m.buttons) > 0 {
			t.Errorf("after the answer the message still has buttons: %v", m.buttons)
		}
	})
	t.Run("keyboard", func(t *testing.T) {
		p := newPhone(t)
		x := bridge(t, home(t, phoneConfig(p)), "run", "bash", "-c", `read -p "Continue? (y/n) " a; echo "got [$a]"; sleep 1`)
		p.shows("Continue?", "Yes")
		x.types("n\r")
		x.sees("got [n]")
		p.shows("keyboard", "")
		x.exits(0)
	})
	t.Run("timeout", func(t *testing.T) {
		p := newPhone(t)
		dir := home(t, p.config("timeout_seconds = 2"))
		x := bridge(t, dir, "run", "bash", "-c", `read -p "Really? [Y/n] " a; echo "got [$a]"`)
		x.sees("got [n]")
		x.exits(0)
	})
	t.Run("text", func(t *testing.T) {
		p := newPhone(t)
		dir := home(t, phoneConfig(p))
		x := bridge(t, dir, "run", "bash", "-c", `read -p "Enter your name: " a; echo "got [$a]"`)
		m := p.shows("Enter your name", "")
		openPrompt(t, dir)
		p.writes("Ada Lovelace", m.id)
		x.sees("got [Ada Lovelace]")
		x.exits(0)
	})
	t.Run("command", func(t *testing.T) {
		dir := home(t, "")
		x := bridge(t, dir, "run", "bash", "-c", `read -p "Continue? (y/n) " a; echo "got [$a]"`)
		id := openPrompt(t, dir)
		bridge(t, dir, "answer", shortID(id), "y").exits(0)
		x.sees("got [y]")
		x.exits(0)
	})
}

// openPrompt waits for the one question that waits for an answer in dir.
func openPrompt(t *testing.T, dir string) (id string) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if st, err := openStore(dir); err == nil {
			if v, err := st.View(); err == nil {
				for id, p := range v.Prompts {
					if p.Status == AwaitingReply {
						return id
					}
				}
			}
		}
		<-time.After(20 * time.Millisecond)
	}
	t.Fatal("no question waits for an answer")
	return ""
}

// TestHook lets a tool called claude call its hook and shows what comes back.
func TestHook(t *testing.T) {
	bash := `{"hook_event_name":"PermissionRequest","tool_name":"Bash","cwd":"/tmp","tool_input":{"command":"touch /tmp/x","description":"Make x"}}`
	ask := `{"hook_event_name":"PermissionRequest","tool_name":"AskUserQuestion","tool_input":{"questions":[` +
		`{"question":"Which colour?","header":"Colour","options":[{"label":"Red"},{"label":"Blue"}],"multiSelect":false}]}}`
	plan := `{"hook_event_name":"PermissionRequest","tool_name":"ExitPlanMode","tool_input":{"plan":"# Plan\n1. look"}}`
	edit := `{"hook_event_name":"PermissionRequest","tool_name":"Edit","tool_input":{"file_path":"a.txt","old_string":"old\nsame","new_string":"new\nsame"}}`
	for _, test := range []struct{ name, input, shown, press, text, want string }{
		{"allow", bash, "touch /tmp/x", "Yes", "", `"behavior":"allow"`},
		{"deny", bash, "touch /tmp/x", "No", "", `"behavior":"deny"`},
		{"reason", bash, "touch /tmp/x", "", "not now", `"message":"not now"`},
		{"question", ask, "Which colour?", "Blue", "", `"answers":{"Which colour?":"Blue"}`},
		{"own words", ask, "Which colour?", "", "mauve", `"answers":{"Which colour?":"mauve"}`},
		{"plan", plan, "1. look", "Yes", "", `"updatedInput":{}`},
		{"diff", edit, "-old", "Yes", "", `"behavior":"allow"`},
		{"timeout", bash, "touch /tmp/x", "", "", `no answer in 2 s`},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPhone(t)
			more := "away_after_seconds = 1"
			if test.name == "timeout" {
				more += "\npermission_timeout_seconds = 2"
			}
			dir := home(t, p.config(more))
			x := bridge(t, dir, "run", fakeClaude(t, test.input))
			m := p.shows(test.shown, test.press)
			switch {
			case test.press != "":
				p.press(m, test.press)
			case test.text != "":
				openPrompt(t, dir) // only now it is known which message asked
				p.writes(test.text, m.id)
			}
			defer func() {
				if t.Failed() {
					t.Logf("the phone shows:\n%s", p.dump())
				}
			}()
			x.sees("end of hook")
			x.exits(0)
			x.mu.Lock()
			defer x.mu.Unlock()
			if shown := strings.ReplaceAll(x.scr.Text(), "\n", ""); !strings.Contains(shown, test.want) {
				t.Errorf("the hook does not say %s, it says:\n%s", test.want, shown)
			}
		})
	}
	for _, input := range []string{"", "{", `{"hook_event_name":"PermissionRequest","tool_name":7}`, `{"hook_event_name":"Other"}`} {
		x := bridge(t, home(t, ""), "run", fakeClaude(t, input))
		x.exits(0)
		if shown := x.scr.Text(); strings.Contains(shown, "allow") {
			t.Errorf("hook input %q: %s", input, shown)
		}
	}
}

// fakeClaude is a script called claude that calls the hook with input.
func fakeClaude(t *testing.T, input string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "input.json"), []byte(input), 0o600); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nATLASBRIDGE_TEST_CHILD=main %q hook < %q\necho end of hook\n", os.Args[0], filepath.Join(dir, "input.json"))
	path := filepath.Join(dir, "claude")
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestExitCodes holds the wrapper's exit code against what a shell would say.
func TestExitCodes(t *testing.T) {
	dir := home(t, "")
	notExecutable := filepath.Join(t.TempDir(), "tool")
	if err := os.WriteFile(notExecutable, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		args []string
		want int
		says string
	}{
		{[]string{"run", "sh", "-c", "exit 0"}, 0, ""},
		{[]string{"run", "sh", "-c", "exit 7"}, 7, ""},
		{[]string{"run", "sh", "-c", "kill -9 $$"}, 137, ""},
		{[]string{"run", "sh", "-c", "kill -TERM $$"}, 143, ""},
		{[]string{"run", "no-such-tool-here"}, 127, "not found"},
		{[]string{"run", notExecutable}, 126, "permission denied"},
		{[]string{"run"}, 2, "usage"},
		{[]string{"run", "--no-such-flag", "sh"}, 2, "unknown flag"},
	} {
		x := bridge(t, dir, test.args...)
		x.exits(test.want)
		if shown := strings.ReplaceAll(x.scr.Text(), "\n", " "); !strings.Contains(shown, test.says) {
			t.Errorf("%q does not say %q: %s", test.args, test.says, shown)
		}
	}
}

// rounds is how often a race is run: a few times, or as often as ATLASBRIDGE_TEST_ROUNDS says.
func rounds(t *testing.T) int {
	n := 12
	if text := os.Getenv("ATLASBRIDGE_TEST_ROUNDS"); text != "" {
		fmt.Sscan(text, &n)
	}
	return n
}

// TestRace answers each question from two places at nearly the same time: exactly one answer reaches it.
func TestRace(t *testing.T) {
	n := rounds(t)
	dir := home(t, "")
	x := bridge(t, dir, "run", "bash", "-c", fmt.Sprintf(`for i in $(seq %d); do read -p "Q$i? (y/n) " a; echo "got $i [$a]"; done; read`, n))
	st, err := openStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	answered := regexp.MustCompile(`got (\d+) \[(.*)\]`)
	for i := 1; i <= n; i++ {
		p := awaits(x, st, fmt.Sprintf("Q%d?", i), fmt.Sprintf("got %d [", i))
		if p == nil {
			continue // the keys of the last round have answered it
		}
		decided := make(chan struct{})
		go func() {
			defer close(decided)
			<-time.After(time.Duration(rand.IntN(30)) * time.Millisecond)
			st.Decide(Decision{PromptID: p.ID, SessionID: p.SessionID, Value: "y", By: "cli:answer", Trusted: true}, time.Now())
		}()
		<-time.After(time.Duration(rand.IntN(30)) * time.Millisecond)
		x.types("n\r")
		<-decided
		x.sees(fmt.Sprintf("got %d [", i))
		x.mu.Lock()
		for _, m := range answered.FindAllStringSubmatch(x.scr.Text(), -1) {
			if m[2] != "y" && m[2] != "n" {
				t.Errorf("question %s got %q", m[1], m[2])
			}
		}
		x.mu.Unlock()
	}
}

// awaits waits for the question to be asked, nil when the screen shows that it was over sooner.
func awaits(x *terminal, st *Store, text, over string) *PromptRecord {
	x.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-time.After(5 * time.Millisecond) {
		v, err := st.View()
		if err != nil {
			x.t.Fatal(err)
		}
		for _, p := range v.Prompts {
			if strings.HasSuffix(p.Question, text+" (y/n)") && p.Open() {
				return p
			}
		}
		x.mu.Lock()
		gone := strings.Contains(x.scr.Text(), over)
		x.mu.Unlock()
		if gone {
			return nil
		}
	}
	x.t.Fatalf("never asked: %s; screen:\n%s", text, x.scr.Text())
	return nil
}

// TestVanished answers questions that go away by themselves at about the same time: what follows never gets the answer.
func TestVanished(t *testing.T) {
	n := rounds(t)
	dir := home(t, "")
	script := fmt.Sprintf(`for i in $(seq %d); do read -t 0.$((RANDOM %% 5 + 3)) -p "Q$i? (y/n) " a || echo; `+
		`read -t 0.5 -p "$ " b; echo "after $i [$b]"; a=; b=; done`, n)
	x := bridge(t, dir, "run", "bash", "-c", script)
	st, err := openStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	after := regexp.MustCompile(`after (\d+) \[(.*)\]`)
	for i := 1; i <= n; i++ {
		if p := awaits(x, st, fmt.Sprintf("Q%d?", i), fmt.Sprintf("after %d [", i)); p != nil {
			<-time.After(time.Duration(rand.IntN(500)) * time.Millisecond)
			st.Decide(Decision{PromptID: p.ID, SessionID: p.SessionID, Value: "y", By: "cli:answer", Trusted: true}, time.Now())
		}
		x.sees(fmt.Sprintf("after %d [", i))
		x.mu.Lock()
		for _, m := range after.FindAllStringSubmatch(x.scr.Text(), -1) {
			if m[2] != "" {
				t.Errorf("after question %s came %q", m[1], m[2])
			}
		}
		x.mu.Unlock()
	}
	x.exits(0)
}
