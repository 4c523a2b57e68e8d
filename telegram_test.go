package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf16"
)

/* ===== Telegram ===== */

const tgToken = "123456789:AAFakeTokenForLoopbackTestsOnly0123"

// tgServer is a Bot API that misbehaves on command.
type tgServer struct {
	*httptest.Server
	mu      sync.Mutex
	queue   []string                                          // updates as JSON, in order of their ids
	calls   []tgCall                                          // all but getUpdates
	polls   []int64                                           // offsets asked for
	wake    chan struct{}                                     // closed and renewed on every change
	fault   func(method string, w http.ResponseWriter) bool   // true: it has answered
	answers map[string]func(p map[string]any) (result string) // instead of the usual ones
	lastID  int64
}

type tgCall struct {
	method string
	p      map[string]any
}

func newTGServer(t *testing.T) *tgServer {
	s := &tgServer{wake: make(chan struct{}), lastID: 100, answers: map[string]func(map[string]any) string{}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s
}

func (s *tgServer) changed() { close(s.wake); s.wake = make(chan struct{}) }

func (s *tgServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method := filepath.Base(r.URL.Path)
	var p map[string]any
	if r.Header.Get("Content-Type") != "application/json" || json.NewDecoder(r.Body).Decode(&p) != nil || p == nil {
		http.Error(w, "not JSON", http.StatusTeapot)
		return
	}
	s.mu.Lock()
	fault := s.fault
	s.mu.Unlock()
	if fault != nil && fault(method, w) {
		return
	}
	if method == "getUpdates" {
		s.serveUpdates(w, r, p)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, tgCall{method, p})
	s.changed()
	result := "true"
	switch answer := s.answers[method]; {
	case answer != nil:
		result = answer(p)
	case method == "getMe":
		result = `{"id":9,"is_bot":true,"first_name":"Bot","username":"my_bot"}`
	case method == "getWebhookInfo":
		result = `{"url":""}`
	case method == "getMyCommands":
		result = "[]"
	case method == "sendMessage":
		s.lastID++
		result = fmt.Sprintf(`{"message_id":%d,"date":1,"chat":{"id":1001}}`, s.lastID)
	case strings.HasPrefix(method, "editMessage"):
		result = fmt.Sprintf(`{"message_id":%v}`, p["message_id"])
	}
	fmt.Fprintf(w, `{"ok":true,"result":%s}`, result)
}

func (s *tgServer) serveUpdates(w http.ResponseWriter, r *http.Request, p map[string]any) {
	offset, _ := p["offset"].(float64)
	timeout, _ := p["timeout"].(float64)
	end := time.After(min(time.Duration(timeout)*time.Second, 20*time.Millisecond+time.Duration(timeout)*10*time.Millisecond))
	for first := true; ; first = false {
		s.mu.Lock()
		if first {
			s.polls = append(s.polls, int64(offset))
			s.changed()
		}
		s.queue = slices.DeleteFunc(s.queue, func(u string) bool { return tgID(u) < int64(offset) })
		batch, wake := strings.Join(s.queue, ","), s.wake
		s.mu.Unlock()
		over := false
		if batch == "" {
			select {
			case <-wake:
				continue
			case <-r.Context().Done():
				return
			case <-end:
				over = true
			}
		}
		if batch != "" || over {
			fmt.Fprintf(w, `{"ok":true,"result":[%s]}`, batch)
			return
		}
	}
}

func tgID(u string) int64 {
	var v update
	json.Unmarshal([]byte(u), &v)
	return v.ID
}

func (s *tgServer) send(updates ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, updates...)
	s.changed()
}

// until waits for the n-th call of the method that matches, and returns it.
func (s *tgServer) until(t *testing.T, method, pattern string) tgCall {
	t.Helper()
	re, deadline := regexp.MustCompile(pattern), time.After(8*time.Second)
	for {
		s.mu.Lock()
		calls, wake := slices.Clone(s.calls), s.wake
		s.mu.Unlock()
		for _, c := range calls {
			if b, _ := json.Marshal(c.p); c.method == method && re.Match(b) {
				return c
			}
		}
		select {
		case <-wake:
		case <-deadline:
			t.Fatalf("no %s matching %q; calls: %v", method, pattern, calls)
		}
	}
}

func (s *tgServer) count(method string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.method == method {
			n++
		}
	}
	return n
}

// confirmed waits until an update has been confirmed by a greater offset.
func (s *tgServer) confirmed(t *testing.T, id int64) {
	t.Helper()
	deadline := time.After(8 * time.Second)
	for {
		s.mu.Lock()
		ok, wake := slices.ContainsFunc(s.polls, func(o int64) bool { return o > id }), s.wake
		s.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-wake:
		case <-deadline:
			t.Fatalf("update %d was not confirmed", id)
		}
	}
}

// tgEnv is a store with one session, and a Telegram that talks to a tgServer.
type tgEnv struct {
	*Telegram
	t   *testing.T
	srv *tgServer
	s   *SessionRecord
}

func newTGEnv(t *testing.T) *tgEnv {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := secureDir(dir); err != nil {
		t.Fatal(err)
	}
	e := &tgEnv{t: t, srv: newTGServer(t)}
	e.Telegram = e.other(dir)
	s := &SessionRecord{Head: Head{ID: newID()}, Tool: "claude", Label: "api", Cwd: "/home/u/proj", Status: "active",
		Activity: "running", StartedAt: time.Now().UTC()}
	if err := e.store.Update(func(*View) ([]Record, error) { return []Record{s}, nil }); err != nil {
		t.Fatal(err)
	}
	e.s = s
	return e
}

// other is a Telegram as another process of the same user would have it.
func (e *tgEnv) other(dir string) *Telegram {
	e.t.Helper()
	st, err := openStore(dir)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { st.Close() })
	cfg := &Config{Token: tgToken, ChatID: 1001, Users: []int64{1001}, APIBase: e.srv.URL}
	tg, err := newTelegram(cfg, st, slog.New(slog.DiscardHandler))
	if err != nil {
		e.t.Fatal(err)
	}
	return tg
}

// poll runs Poll until stop is called, or the test's end.
func (e *tgEnv) poll(tg *Telegram) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); tg.Poll(ctx) }()
	stop = func() { cancel(); <-done }
	e.t.Cleanup(stop)
	return stop
}

// ask records a question, sends it, and returns it as it then is.
func (e *tgEnv) ask(p PromptRecord) *PromptRecord {
	e.t.Helper()
	p.ID, p.SessionID, p.Nonce, p.Status = newID(), e.s.ID, newNonce(), Created
	p.CreatedAt, p.ExpiresAt = time.Now().UTC(), time.Now().Add(5*time.Minute).UTC()
	if p.Confidence == "" {
		p.Confidence, p.Signals = "high", []string{"pattern"}
	}
	err := e.store.Update(func(*View) ([]Record, error) { return []Record{&p}, nil })
	if err != nil {
		e.t.Fatal(err)
	}
	e.store.Move(p.ID, Routed, nil)
	id, err := e.Ask(context.Background(), &p, e.s)
	if err != nil || id == 0 {
		e.t.Fatalf("Ask = %d, %v", id, err)
	}
	e.store.Move(p.ID, AwaitingReply, func(q *PromptRecord) { q.MsgID = id })
	return e.prompt(p.ID)
}

func (e *tgEnv) prompt(id string) *PromptRecord {
	e.t.Helper()
	v, err := e.store.View()
	if err != nil {
		e.t.Fatal(err)
	}
	p := *v.Prompts[id]
	return &p
}

func (e *tgEnv) auditLog() string {
	b, _ := os.ReadFile(filepath.Join(e.store.Dir, "audit.log"))
	return string(b)
}

func tgTap(id int64, p *PromptRecord, value string) string {
	return tgTapOn(id, p, value, p.MsgID, 1001)
}

func tgTapOn(id int64, p *PromptRecord, value string, msg, from int64) string {
	return fmt.Sprintf(`{"update_id":%d,"callback_query":{"id":"q%d","from":{"id":%d},"message":{"message_id":%d,"date":5,`+
		`"chat":{"id":%d,"type":"private"}},"data":"ans:%s:%s:%.16s:%s"}}`, id, id, from, msg, from, shortID(p.ID),
		shortID(p.SessionID), p.Nonce, value)
}

func tgSay(id int64, text string, more string) string {
	b, _ := json.Marshal(text)
	return fmt.Sprintf(`{"update_id":%d,"message":{"message_id":%d,"date":%d,"from":{"id":1001},"chat":{"id":1001,"type":"private"},"text":%s%s}}`,
		id, id, time.Now().Unix(), b, more)
}

var yesNo = PromptRecord{Type: YesNo, Question: "Continue? (y/n)", Excerpt: "Continue? (y/n)", SafeDefault: ref("n")}

var tgMenu = PromptRecord{Type: MultipleChoice, Permission: true, Question: "Do you want to proceed?", Excerpt: "touch /tmp/x",
	SafeDefault: ref("3"), Choices: []Choice{{Key: "1", Label: "Yes", Grants: true},
		{Key: "2", Label: "Yes, and don't ask again for touch", Grants: true}, {Key: "3", Label: "No"}}}

func tgWith(p PromptRecord, change func(*PromptRecord)) PromptRecord { change(&p); return p }

func tgKeys(rows [][]button) string {
	var out []string
	for _, row := range rows {
		var keys []string
		for _, b := range row {
			keys = append(keys, b.Text+"="+b.Data[strings.LastIndex(b.Data, ":")+1:])
		}
		out = append(out, strings.Join(keys, " & "))
	}
	return strings.Join(out, " | ")
}

func TestTelegramKeyboards(t *testing.T) {
	for _, c := range []struct {
		name  string
		p     PromptRecord
		whole bool
		want  string
	}{
		{"yes/no", yesNo, false, "✅ Yes=y | ❌ No=n | ⏩ Use default (No)=default"},
		{"enter", PromptRecord{Type: ConfirmEnter, SafeDefault: ref("enter")}, false, "↩️ Press Enter=enter | ⏩ Use default (Enter)=default"},
		{"plain menu", PromptRecord{Type: MultipleChoice, SafeDefault: ref("1"), Choices: []Choice{{Key: "1", Label: "Red"}, {Key: "2", Label: "Blue"}}},
			false, "1. Red=1 | 2. Blue=2 | ⏩ Use default (1. Red)=default"},
		{"permission", tgMenu, false, "✅ 1. Yes=1 | ✅ 2. Yes, and don't ask again for touch=2 | ❌ 3. No=3 | ⏩ Use default (3. No)=default"},
		{"cut permission", tgWith(tgMenu, func(p *PromptRecord) { p.Cut = true }), false, "📄 Show all=~all | ❌ 3. No=3 | ⏩ Use default (3. No)=default"},
		{"cut, shown", tgWith(tgMenu, func(p *PromptRecord) { p.Cut = true }), true,
			"✅ 1. Yes=1 | ✅ 2. Yes, and don't ask again for touch=2 | ❌ 3. No=3 | ⏩ Use default (3. No)=default"},
		{"cut yes/no", tgWith(yesNo, func(p *PromptRecord) { p.Cut = true }), false, "📄 Show all=~all | ❌ No=n | ⏩ Use default (No)=default"},
		{"free text", PromptRecord{Type: FreeText, SafeDefault: ref("")}, false, "⏩ Use default (empty)=default"},
		{"secret", PromptRecord{Type: FreeText, Secret: true}, false, ""},
		{"idle", PromptRecord{Type: FreeText, Idle: true}, false, ""},
		{"unknown", PromptRecord{Type: Unknown, Confidence: "low"}, false, "↩️ Send Enter=enter | 🚫 Cancel / Skip=cancel | 🔍 Show last 500 characters=~recent"},
		{"answered", tgWith(yesNo, func(p *PromptRecord) { p.Status = Resolved }), false, ""},
	} {
		c.p.ID, c.p.SessionID, c.p.Nonce = newID(), newID(), newNonce()
		if c.p.Confidence == "" {
			c.p.Confidence, c.p.Signals = "high", []string{"pattern"}
		}
		if c.p.Status == "" {
			c.p.Status = AwaitingReply
		}
		c.p.Cut = c.p.Cut && !c.whole
		rows := keyboard(&c.p)
		if got := tgKeys(rows); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
		for _, row := range rows {
			for _, b := range row {
				if len(b.Data) > 64 || !strings.HasPrefix(b.Data, "ans:"+c.p.ID[:8]+":"+c.p.SessionID[:8]+":"+c.p.Nonce[:16]+":") {
					t.Errorf("%s: callback data %q", c.name, b.Data)
				}
			}
		}
	}
}

// The ticks of a multi-select live in the buttons; nine of them must still fit into 64 bytes.
func TestTelegramTicks(t *testing.T) {
	p := PromptRecord{Head: Head{ID: newID()}, SessionID: newID(), Nonce: newNonce(), Type: MultipleChoice, Multi: true,
		Confidence: "high", Signals: []string{"pattern"}, Status: AwaitingReply}
	for i := range 9 {
		p.Choices = append(p.Choices, Choice{Key: fmt.Sprint(i + 1), Label: strings.Repeat("x", 60)})
	}
	data := func(rows [][]button, i int) string {
		return rows[i][0].Data[len("ans:12345678:12345678:1234567890123456:"):]
	}
	rows := keyboard(&p, "2")
	if got := data(rows, 0); got != "~t:1,2" {
		t.Errorf("ticking 1 with 2 ticked = %q", got)
	}
	if got := data(rows, 1); got != "~t:" || !strings.HasPrefix(rows[1][0].Text, "✓") {
		t.Errorf("unticking 2 = %q %q", got, rows[1][0].Text)
	}
	rows = keyboard(&p, "1", "2", "3", "4", "5", "6", "7", "8", "9")
	if len(rows) != 10 || data(rows, 9) != "~s:1,2,3,4,5,6,7,8,9" {
		t.Errorf("submit with all ticked: %d rows, %q", len(rows), data(rows, len(rows)-1))
	}
}

func TestTelegramTexts(t *testing.T) {
	e := newTGEnv(t)
	s := *e.s
	at := time.Date(2026, 11, 20, 14, 2, 11, 0, time.UTC)
	sid := "claude · api · proj [SID:" + shortID(s.ID) + "]"
	clock := " at " + at.Local().Format("15:04:05 MST")
	open := func(p PromptRecord) PromptRecord {
		p.Status, p.ExpiresAt = AwaitingReply, time.Now().Add(598*time.Second)
		if p.Confidence == "" {
			p.Confidence, p.Signals = "high", []string{"pattern"}
		}
		return p
	}
	over := func(p PromptRecord, st State, by, value, reason string) PromptRecord {
		p.Status, p.DecidedAt, p.DecidedBy, p.Reason = st, &at, &by, reason
		if value != "" {
			p.Value = &value
		}
		return p
	}
	for _, c := range []struct {
		p    PromptRecord
		want string
	}{
		{open(yesNo), "❓ Continue? (y/n)\n⏳ Expires in 9m 58s, then default: No\n" + sid},
		{open(tgWith(tgMenu, func(p *PromptRecord) { p.Tool, p.Cwd = "Bash", "/home/u/proj" })),
			"🛡️ Do you want to proceed?\ntouch /tmp/x\n2. Yes, and don't ask again for touch\n🔧 Bash in /home/u/proj\n" +
				"To refuse and say why, reply with text.\n⏳ Expires in 9m 58s, then default: 3. No\n" + sid},
		{open(PromptRecord{Type: FreeText, Question: "Your name:", Excerpt: "Your name:"}),
			"❓ Your name:\nReply to this message with your answer.\n⏳ Expires in 9m 58s, then nothing is typed\n" + sid},
		{open(PromptRecord{Type: FreeText, Secret: true, Question: "Password:"}),
			"🔑 Password:\nIt is not asked for here: type it at the keyboard.\n⏳ Expires in 9m 58s, then nothing is typed\n" + sid},
		{open(PromptRecord{Type: Unknown, Confidence: "low", Excerpt: "> "}),
			"❔ Possibly a question (low confidence)\n>\nWhat should AtlasBridge do?\n⏳ Expires in 9m 58s, then nothing is typed\n" + sid},
		{open(PromptRecord{Type: FreeText, Idle: true, Full: "All tests pass.\nShall I commit?"}),
			"✅ claude has finished\nAll tests pass.\nShall I commit?\nReply to this message with what to do next.\n" + sid},
		{over(yesNo, Resolved, "telegram:1001", "y", ""), "Continue? (y/n)\n✅ Answered on the phone (telegram:1001)" + clock + ": Yes\n" + sid},
		{over(yesNo, ReplyReceived, "telegram:1001", "y", ""), "Continue? (y/n)\n⏱ Answered on the phone (telegram:1001)" + clock + ": Yes, on its way\n" + sid},
		{over(tgMenu, Resolved, "cli:local", "", ""), "Do you want to proceed?\ntouch /tmp/x\n✅ Answered at the keyboard" + clock + "\n" + sid},
		{over(tgMenu, Resolved, "telegram:1001", "3", "use pnpm"),
			"Do you want to proceed?\ntouch /tmp/x\n✅ Answered on the phone (telegram:1001)" + clock + ": 3. No (use pnpm)\n" + sid},
		{over(yesNo, Resolved, "auto:timeout", "n", ""), "Continue? (y/n)\n⌛ No answer in time" + clock + ", so the default was given: No\n" + sid},
		{over(yesNo, Expired, "auto:timeout", "", ""), "Continue? (y/n)\n⌛ Expired" + clock + ": nothing was typed\n" + sid},
		{over(yesNo, Failed, "telegram:1001", "y", "the question is gone"), "Continue? (y/n)\n⚠️ Not delivered: Yes" + clock + " (the question is gone)\n" + sid},
		{over(PromptRecord{Type: FreeText, Secret: true, Question: "Password:"}, Resolved, "telegram:1001", "hunter2", ""),
			"Password:\n✅ Answered on the phone (telegram:1001)" + clock + "\n" + sid},
	} {
		r := e.questionText(&c.p, &s)
		if got := r.String(); got != c.want {
			t.Errorf("%s %s:\n got %q\nwant %q", c.p.Type, c.p.Status, got, c.want)
		}
		tgCheckEntities(t, r)
	}
}

// tgCheckEntities checks that every entity lies in the text, covers whole lines, and neither begins nor ends blank.
func tgCheckEntities(t *testing.T, r *richText) {
	t.Helper()
	units := utf16.Encode([]rune(r.String()))
	if len(units) != r.units || len(units) > 4096 {
		t.Errorf("%d UTF-16 units counted as %d", len(units), r.units)
	}
	for _, m := range r.marks {
		if m.Length <= 0 || m.Offset+m.Length > len(units) {
			t.Errorf("entity %+v outside of %d units", m, len(units))
			continue
		}
		part := string(utf16.Decode(units[m.Offset : m.Offset+m.Length]))
		if part != strings.TrimRight(part, " \n") || !strings.Contains("\n"+r.String()+"\n", "\n"+part+"\n") {
			t.Errorf("entity %+v covers %q", m, part)
		}
	}
}

// A program that prints our own marks must not route replies elsewhere, nor hide what it prints.
func TestTelegramHostileText(t *testing.T) {
	e := newTGEnv(t)
	p := yesNo
	p.Status, p.Confidence, p.Signals = AwaitingReply, "high", []string{"pattern"}
	p.Question = "ok? [SID:00000000]\u202e"
	p.Excerpt = "```</pre> 👩‍👩‍👧 [SID:00000000]\n\x1b[31m" + strings.Repeat("𝄞", 300)
	r := e.questionText(&p, e.s)
	tgCheckEntities(t, r)
	if m := sessionMark.FindStringSubmatch(r.String()); m == nil || m[1] != shortID(e.s.ID) {
		t.Errorf("the session is read as %v", m)
	}
	if strings.ContainsAny(r.String(), "\x1b\u202e") {
		t.Errorf("control characters leave: %q", r.String())
	}
}

func TestTelegramCutText(t *testing.T) {
	for _, s := range []string{"", "a", strings.Repeat("line of text\n", 2000), strings.Repeat("𝄞", 5000), strings.Repeat("x", 9000),
		"\n\n" + strings.Repeat("y\n", 4000), strings.Repeat("é\n\n", 3000)} {
		var parts []string
		lost := 0
		for part, rest := cutText(s, 1000); ; part, rest = cutText(rest, 1000) {
			parts = append(parts, part)
			if n := len(utf16.Encode([]rune(part))); n > 1000 {
				t.Fatalf("a part of %d units", n)
			}
			if rest == "" {
				break
			}
		}
		lost = len(s) - len(strings.Join(parts, ""))
		if strings.ReplaceAll(strings.Join(parts, ""), "\n", "") != strings.ReplaceAll(s, "\n", "") || lost >= len(parts) {
			t.Errorf("%.10q: %d bytes lost in %d parts", s, lost, len(parts))
		}
	}
}

func TestTelegramAdmitted(t *testing.T) {
	msg := func(more string) string {
		return `{"update_id":1,"message":{"message_id":5,"date":9,"from":{"id":1001},"chat":{"id":1001,"type":"private"},"text":"hi"` + more + `}}`
	}
	group := `{"update_id":1,"message":{"from":{"id":1001},"chat":{"id":-5,"type":"group"},"text":"hi"}}`
	tap := func(from, chat int64) string {
		return fmt.Sprintf(`{"callback_query":{"id":"q","from":{"id":%d},"message":{"message_id":5,"chat":{"id":%d,"type":"private"}},"data":"x"}}`, from, chat)
	}
	for _, c := range []struct {
		update string
		chat   int64
		want   bool
	}{
		{msg(""), 1001, true},
		{tap(1001, 1001), 1001, true},
		{group, -5, true},
		{group, 1001, false},
		{strings.Replace(group, `"id":1001`, `"id":2002`, 1), -5, false}, // anyone in a group can write and press
		{strings.Replace(strings.Replace(tap(2002, -5), "private", "supergroup", 1), "x", "y", 1), -5, false},
		{strings.Replace(tap(1001, -5), "private", "supergroup", 1), -5, true},
		{msg(""), -5, false},
		{msg(""), 0, false},
		{tap(2002, 1001), 1001, false},
		{tap(1001, 7), 1001, false},
		{tap(2002, 2002), 1001, false},
		{strings.ReplaceAll(msg(""), `"from":{"id":1001}`, `"from":{"id":2002,"username":"operator"}`), 1001, false},
		{strings.ReplaceAll(msg(""), `"type":"private"`, `"type":"group"`), 1001, false},
		{strings.ReplaceAll(group, "1001", "1001,\"is_bot\":true"), -5, false},
		{strings.Replace(group, `"text"`, `"sender_chat":{"id":-5},"text"`, 1), -5, false},
		{msg(`,"forward_origin":{"type":"user"}`), 1001, false},
		{msg(`,"forward_date":7`), 1001, false},
		{msg(`,"via_bot":{"id":3}`), 1001, false},
		{msg(`,"edit_date":7`), 1001, false},
		{strings.Replace(msg(""), `"message"`, `"edited_message"`, 1), 1001, false},
		{strings.Replace(msg(""), `"message"`, `"channel_post"`, 1), 1001, false},
		{`{"update_id":1}`, 1001, false},
		{`{"callback_query":{"id":"q","from":{"id":1001},"inline_message_id":"x","data":"y"}}`, 1001, false},
		{`{"message":{"chat":{"id":1001,"type":"private"},"text":"hi"}}`, 1001, false},
	} {
		var u update
		if err := json.Unmarshal([]byte(c.update), &u); err != nil {
			t.Fatal(err)
		}
		if _, reason := admitted(&u, []int64{1001}, c.chat); (reason == "") != c.want {
			t.Errorf("admitted(%s, chat %d) = %q, want admitted: %v", c.update, c.chat, reason, c.want)
		}
	}
}

// tgWish puts a wish on one line.
func tgWish(w wish) string {
	switch {
	case w.decision != nil && w.secret:
		return "secret"
	case w.decision != nil:
		return "decide " + shortID(w.decision.PromptID) + " " + w.decision.Value
	case w.input != nil:
		return fmt.Sprintf("%s %s %q", w.input.Kind, shortID(w.input.SessionID), w.input.Text)
	case w.meta != nil:
		return fmt.Sprint(w.meta)
	}
	return "reply " + w.reply
}

func TestTelegramUnderstand(t *testing.T) {
	now := time.Now()
	session := func(id, label, status string) *SessionRecord {
		return &SessionRecord{Head: Head{ID: id + "-0000"}, Tool: "claude", Label: label, Status: status, StartedAt: now.Add(-time.Hour)}
	}
	a, b, dead := session("aaaaaaaa", "api", "active"), session("bbbbbbbb", "web", "active"), session("dddddddd", "", "completed")
	prompt := func(id string, s *SessionRecord, msg int64, p PromptRecord) *PromptRecord {
		p.ID, p.SessionID, p.MsgID, p.Status, p.Nonce = id+"-0000", s.ID, msg, AwaitingReply, newNonce()
		p.CreatedAt, p.ExpiresAt = now.Add(-time.Minute), now.Add(time.Minute)
		return &p
	}
	reply := func(id int64, text string) *message { return &message{ID: id, Text: text, From: &user{IsBot: true}} }
	one, two := []*SessionRecord{a, dead}, []*SessionRecord{a, b, dead}
	idle := PromptRecord{Type: FreeText, Idle: true}
	secret := PromptRecord{Type: FreeText, Secret: true}
	menu := []*PromptRecord{prompt("11111111", a, 50, tgMenu)}
	for _, c := range []struct {
		text     string
		to       *message
		sessions []*SessionRecord
		prompts  []*PromptRecord
		held     map[string]string
		want     string // a regular expression
	}{
		{"go on", nil, one, nil, nil, `^text aaaaaaaa "go on"$`},
		{"go on", nil, two, nil, nil, `(?s)^reply ✗ Which session\? .*api.*\n.*web`},
		{"go on", nil, []*SessionRecord{dead}, nil, nil, `^reply ✗ Which session\?.* nothing$`},
		{"go on", reply(7, "x\nclaude · web [SID:bbbbbbbb]"), two, nil, nil, `^text bbbbbbbb "go on"$`},
		{"go on", reply(7, "[SID:bbbbbbbb]\nclaude [SID:aaaaaaaa]"), two, nil, nil, `^text aaaaaaaa`},
		{"go on", &message{ID: 7, Text: "x [SID:bbbbbbbb]", From: &user{ID: 1001}}, two, nil, nil, `^reply ✗ Which`},
		{"go on", reply(7, "claude [SID:dddddddd]"), two, nil, nil, `^reply ✗ Nothing was sent: .*ended`},
		{"go on", nil, two, nil, map[string]string{"claim telegram:1001": b.ID, "switch telegram:1001": a.ID}, `^text bbbbbbbb`},
		{"go on", nil, two, nil, map[string]string{"switch telegram:1001": a.ID}, `^text aaaaaaaa`},
		{"go on", nil, two, nil, map[string]string{"claim telegram:2002": b.ID}, `^reply ✗ Which`},
		{"go on", nil, two, nil, map[string]string{"claim telegram:1001": dead.ID}, `^reply ✗ Nothing was sent: .*ended`},
		{"go on", nil, one, []*PromptRecord{prompt("11111111", a, 50, idle)}, nil, `^text aaaaaaaa "go on"$`},
		{"Red", nil, one, []*PromptRecord{prompt("11111111", a, 50, PromptRecord{Type: FreeText})}, nil, `^decide 11111111 Red$`},
		{"go\x1b[201~\r\x03 on", nil, one, nil, nil, `^text aaaaaaaa "go\[201~\\n on"$`},
		{"bad \uFFFD", nil, one, nil, nil, `^reply ✗ Nothing was done`},
		{"", nil, one, nil, nil, `^reply ✗ Nothing was done`},
		{"1", nil, one, menu, nil, `^decide 11111111 1$`},
		{"no", nil, one, menu, nil, `^decide 11111111 3$`},
		{"use pnpm", reply(50, ""), two, menu, nil, `^decide 11111111 deny:use pnpm$`},
		{"use pnpm", nil, one, menu, nil, `^reply ✗ Nothing was done: a permission`},
		{"hunter2", reply(50, ""), one, []*PromptRecord{prompt("11111111", a, 50, secret)}, nil, `^secret$`},
		{"hunter2", nil, one, []*PromptRecord{prompt("11111111", a, 50, secret)}, nil, `^reply ✗ Nothing was sent: .*password`},
		{"1", nil, one, []*PromptRecord{prompt("11111111", a, 50, tgWith(tgMenu, func(p *PromptRecord) { p.Cut = true }))}, nil, `^reply .*Show all`},
		{"3", nil, one, []*PromptRecord{prompt("11111111", a, 50, tgWith(tgMenu, func(p *PromptRecord) { p.Cut = true }))}, nil, `^decide 11111111 3$`},
		{"3, 1", nil, one, []*PromptRecord{prompt("11111111", a, 50, tgWith(tgMenu, func(p *PromptRecord) { p.Multi = true }))}, nil, `^decide 11111111 3,1$`},
		{"/send bbbb do it\nnow", nil, two, nil, nil, `^text bbbbbbbb "do it\\nnow"$`},
		{"/send web do it", nil, two, nil, nil, `^text bbbbbbbb "do it"$`},
		{"/send cccc do it", nil, two, nil, nil, `^reply ✗ cccc does not name one`},
		{"/send bbbb", nil, two, nil, nil, `^reply ✗ What\? Example: /send bbbbbbbb go on$`},
		{"/claim web", nil, two, nil, nil, `^map\[claim telegram:1001:bbbbbbbb-0000\]$`},
		{"/switch aaaa", nil, two, nil, nil, `^map\[switch telegram:1001:aaaaaaaa-0000\]$`},
		{"/release", nil, two, nil, nil, `^map\[claim telegram:1001: switch telegram:1001:\]$`},
		{"/keys CTRL_C", nil, one, nil, nil, `^keys aaaaaaaa "CTRL_C"$`},
		{"/keys bbbb esc UP", nil, two, nil, nil, `^keys bbbbbbbb "esc UP"$`},
		{"/keys bbbb FOO", nil, two, nil, nil, `^reply ✗ There is no key FOO`},
		{"/keys CTRL_C", nil, two, nil, nil, `^reply ✗ Which session`},
		{"/cancel", nil, two, nil, nil, `^reply ✗ Which session`},
		{"/cancel dddd", nil, two, nil, nil, `^reply ✗ Nothing was sent: .*ended`},
		{"/screen@my_bot web", nil, two, nil, nil, `^screen bbbbbbbb ""$`},
		{"/last", reply(7, "claude [SID:bbbbbbbb]"), two, nil, nil, `^last bbbbbbbb ""$`},
		{"/sessions", nil, two, nil, nil, `^reply Running:\n• claude · api .*\n• claude · web`},
		{"/status", nil, one, menu, nil, `(?s)^reply Running:.*proceed\?.*Expires.*Audit log: 7 sha256:x`},
		{"/help", nil, nil, nil, nil, `(?s)^reply .*/claim .*/keys`},
		{"/sesions", nil, one, nil, nil, `Did you mean /sessions\?`},
		{"/clear", nil, one, nil, nil, `To send it to a session: /send SID /clear`},
	} {
		v := viewOf(map[string]Record{})
		for _, s := range c.sessions {
			v.put(s)
		}
		for _, p := range c.prompts {
			v.put(p)
		}
		v.put(&MetaRecord{Head: Head{Rec: "meta", ID: "telegram"}, Values: c.held})
		v.put(&MetaRecord{Head: Head{Rec: "meta", ID: "audit"}, Seq: 7, Hash: "sha256:x"})
		m := &message{ID: 60, From: &user{ID: 1001}, Text: c.text, ReplyTo: c.to}
		m.Chat.ID = 1001
		got := tgWish((&heard{message: m, view: v, at: now, by: "telegram:1001"}).understand())
		if !regexp.MustCompile(c.want).MatchString(got) {
			t.Errorf("%q: got %s, want %s", c.text, got, c.want)
		}
	}
}

// What was written before the session or the question does not count for it; in a group, only what is addressed does.
func TestTelegramOldAndGroupText(t *testing.T) {
	now := time.Now()
	s := &SessionRecord{Head: Head{Rec: "session", ID: "aaaaaaaa-0000"}, Status: "active", StartedAt: now.Add(-time.Hour)}
	p := yesNo
	p.Rec, p.ID, p.SessionID, p.Status, p.CreatedAt = "prompt", "11111111-0000", s.ID, AwaitingReply, now.Add(-time.Minute)
	v := viewOf(map[string]Record{})
	v.put(s)
	v.put(&p)
	for _, c := range []struct {
		age  time.Duration
		chat int64
		want string
	}{
		{0, 1001, "decide 11111111 y"},
		{2 * time.Minute, 1001, "reply ✗ Nothing was sent: you wrote that before this was asked."},
		{2 * time.Hour, 1001, "reply ✗ Nothing was sent: you wrote that before  [SID:aaaaaaaa] began."},
		{0, -5, "reply "},
	} {
		m := &message{From: &user{ID: 1001}, Text: "yes"}
		m.Chat.ID = c.chat
		if got := tgWish((&heard{message: m, view: v, at: now.Add(-c.age), by: "telegram:1001"}).understand()); got != c.want {
			t.Errorf("%v old in chat %d: %q, want %q", c.age, c.chat, got, c.want)
		}
	}
}

func TestTelegramKeyBytes(t *testing.T) {
	for name, want := range map[string]string{"CTRL_C": "\x03", "ctrl_d": "\x04", "CTRL_[": "\x1b", "ENTER": "\r", "ESC": "\x1b",
		"TAB": "\t", "UP": "\x1b[A", "HOME": "\x1b[H", "PGDN": "\x1b[6~"} {
		if got, ok := keyBytes(name, false); got != want || !ok {
			t.Errorf("keyBytes(%q) = %q, %v", name, got, ok)
		}
	}
	if got, _ := keyBytes("LEFT", true); got != "\x1bOD" {
		t.Errorf("LEFT in application mode = %q", got)
	}
	for _, name := range []string{"", "CTRL_", "CTRL_CC", "CTRL_1", "A"} {
		if got, ok := keyBytes(name, false); ok {
			t.Errorf("keyBytes(%q) = %q", name, got)
		}
	}
}

func TestTelegramBackoff(t *testing.T) {
	want := []time.Duration{1, 2, 4, 8, 16, 32, 60, 60}
	for n, w := range want {
		if high, low := backoff(n, 0), backoff(n, 0.999999); high != w*time.Second || low < high*3/4 || low >= high {
			t.Errorf("backoff(%d) = %v to %v, want up to %d s", n, low, high, w)
		}
	}
	if got := backoff(1000, 0); got != time.Minute {
		t.Errorf("backoff(1000) = %v", got)
	}
}

// Over any minute a private chat gets at most burst + 60 messages, a group 20; a question never waits behind a stream.
func TestTelegramPacing(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	for _, c := range []struct {
		every     time.Duration
		burst     int
		perMinute int
	}{{1050 * time.Millisecond, 3, 61}, {3900 * time.Millisecond, 4, 20}} {
		var s slot
		var wait time.Duration
		var sent []time.Time
		for now := start; now.Before(start.Add(5 * time.Minute)); {
			s, wait = s.reserve(now, c.every, c.burst, true)
			now = now.Add(wait)
			sent = append(sent, now)
		}
		for i := range sent {
			if j := i + c.perMinute; j < len(sent) && sent[j].Sub(sent[i]) < time.Minute {
				t.Fatalf("%v: %d messages within %v", c.every, c.perMinute+1, sent[j].Sub(sent[i]))
			}
		}
		s = slot{}
		now := start
		for range 50 { // a stream that takes all it can get
			if s, wait = s.reserve(now, c.every, c.burst, false); wait > 0 {
				now = now.Add(wait)
			}
		}
		if _, wait = s.reserve(now, c.every, c.burst, true); wait > 0 {
			t.Errorf("a question waits %v behind a stream", wait)
		}
		s.until = now.Add(9 * time.Second)
		if _, wait = s.reserve(now, c.every, c.burst, true); wait != 9*time.Second {
			t.Errorf("after retry_after 9 the wait is %v", wait)
		}
	}
	if _, wait := (slot{next: start.Add(time.Hour)}).reserve(start, time.Second, 3, true); wait != 0 {
		t.Errorf("after the clock was set back the wait is %v", wait)
	}
}

func TestTelegramErrors(t *testing.T) {
	reply := func(code int, body string) func(string, http.ResponseWriter) bool {
		return func(_ string, w http.ResponseWriter) bool { w.WriteHeader(code); io.WriteString(w, body); return true }
	}
	for _, c := range []struct {
		name      string
		fault     func(string, http.ResponseWriter) bool
		temporary bool
		want      string
	}{
		{"refused", reply(403, `{"ok":false,"error_code":403,"description":"Forbidden: bot was blocked by the user"}`), false, "403: Forbidden"},
		{"server", reply(502, `{"ok":false,"error_code":502,"description":"Bad Gateway"}`), true, "502"},
		{"page", reply(404, `<html>proxy</html>`), true, "404 Not Found"},
		{"garbage", reply(200, `{"ok":tr`), true, "200 OK"},
		{"empty", reply(200, ""), true, "200 OK"},
		{"null", reply(200, "null"), true, "200 OK"},
		{"redirect", func(_ string, w http.ResponseWriter) bool {
			w.Header().Set("Location", "http://example.invalid/")
			w.WriteHeader(302)
			return true
		}, true, "302 Found"},
		{"cut", func(_ string, w http.ResponseWriter) bool { panic(http.ErrAbortHandler) }, true, "EOF"},
	} {
		srv := newTGServer(t)
		srv.fault = c.fault
		err := newBot(tgToken, srv.URL).call(context.Background(), "sendMessage", map[string]any{}, nil)
		var e *apiError
		if !errors.As(err, &e) || e.temporary() != c.temporary || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v (%+v)", c.name, err, e)
		}
		if err != nil && (strings.Contains(err.Error(), "AAFake") || strings.Contains(err.Error(), srv.URL)) {
			t.Errorf("%s: the error shows the token or URL: %v", c.name, err)
		}
	}
	for _, base := range []string{"http://127.0.0.1:1", "http://bad host", "http://[::1]:namedport"} {
		err := newBot(tgToken, base).call(context.Background(), "getMe", map[string]any{}, nil)
		if err == nil || strings.Contains(err.Error(), "AAFake") {
			t.Errorf("%s: %v", base, err)
		}
	}
}

// One send meets one failure after another and is done exactly once at the end.
func TestTelegramSendRetries(t *testing.T) {
	e := newTGEnv(t)
	bodies := []string{`{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":1}}`,
		`{"ok":false,"error_code":400,"description":"Bad Request: can't parse entities: x"}`,
		`{"ok":false,"error_code":400,"description":"x","parameters":{"migrate_to_chat_id":1002}}`, ``}
	var times []time.Time
	e.srv.fault = func(_ string, w http.ResponseWriter) bool {
		if times = append(times, time.Now()); len(times) > len(bodies) {
			return false
		}
		io.WriteString(w, bodies[len(times)-1])
		return true
	}
	r := &richText{}
	r.line("bold", "hi")
	id, err := e.send(context.Background(), "sendMessage", r.params(nil), true)
	if err != nil || id == 0 || len(times) != len(bodies)+1 || e.srv.count("sendMessage") != 1 {
		t.Fatalf("send = %d, %v after %d attempts", id, err, len(times))
	}
	if gap := times[1].Sub(times[0]); gap < time.Second || gap > 2*time.Second {
		t.Errorf("retry_after 1 was waited for %v", gap)
	}
	last := e.srv.until(t, "sendMessage", "hi").p
	if last["entities"] != nil || last["chat_id"] != float64(1002) {
		t.Errorf("the last attempt was %v", last)
	}
	for text, want := range map[string]int64{"Bad Request: message is not modified": 7, "Bad Request: message to edit not found": 0} {
		e.srv.fault = func(_ string, w http.ResponseWriter) bool {
			fmt.Fprintf(w, `{"ok":false,"error_code":400,"description":%q}`, text)
			return true
		}
		if id, err := e.send(context.Background(), "editMessageText", map[string]any{"message_id": int64(7)}, true); err != nil || id != want {
			t.Errorf("%s: %d, %v", text, id, err)
		}
	}
	e.srv.fault = func(_ string, w http.ResponseWriter) bool { // carried out, but the answer broke off
		w.Header().Set("Content-Length", "500")
		io.WriteString(w, `{"ok":true,"result":{"message_id":77,"from":{"id"`)
		return true
	}
	if id, err := e.send(context.Background(), "sendMessage", map[string]any{"text": "x"}, true); err != nil || id != 77 {
		t.Errorf("a cut answer: %d, %v", id, err)
	}
}

// Taps through the poller: the right one counts once, whatever else comes with it.
func TestTelegramTaps(t *testing.T) {
	e := newTGEnv(t)
	p := e.ask(yesNo)
	late := e.prompt(p.ID)
	e.srv.send(tgTapOn(1, p, "y", p.MsgID, 2002), // a stranger
		strings.Replace(tgTap(2, p, "y"), p.Nonce[:16], "0123456789abcdef", 1),
		tgTapOn(3, p, "y", p.MsgID-1, 1001),
		tgTap(4, p, "maybe"),
		tgTap(5, p, "y"), tgTap(5, p, "y"), // delivered twice
		tgTap(6, p, "n"),
		`{"update_id":7,"edited_message":{}}`, `{"update_id":8,"message":"not what was documented"}`)
	e.poll(e.Telegram)
	e.srv.confirmed(t, 8)
	got := e.prompt(p.ID)
	if got.Status != ReplyReceived || *got.Value != "y" || *got.DecidedBy != "telegram:1001" {
		t.Fatalf("%s %v %v", got.Status, got.Value, got.DecidedBy)
	}
	for query, want := range map[string]string{"q2": "out of date", "q3": "out of date", "q4": "not an answer", "q5": "✓ Yes", "q6": "already answered"} {
		if c := e.srv.until(t, "answerCallbackQuery", `"`+query+`"`); !strings.Contains(fmt.Sprint(c.p["text"]), want) {
			t.Errorf("%s was answered %q, want %q", query, c.p["text"], want)
		}
	}
	if n := e.srv.count("answerCallbackQuery"); n != 5 {
		t.Errorf("%d taps were answered, want 5: a stranger never, a repeated update once", n)
	}
	audit := e.auditLog()
	if strings.Count(audit, `"UNAUTHORIZED"`) != 1 || strings.Count(audit, `"REPLY_REJECTED"`) != 4 || strings.Count(audit, `"REPLY_RECEIVED"`) != 1 {
		t.Errorf("audit:\n%s", audit)
	}
	e.srv.until(t, "editMessageText", "Answered on the phone") // the late tap's message says what happened
	if late.Status != AwaitingReply {
		t.Errorf("the question was %s before the tap", late.Status)
	}
}

// When the answer cannot be recorded, nothing is done and the update stays with the server.
func TestTelegramNotRecorded(t *testing.T) {
	e := newTGEnv(t)
	p := e.ask(yesNo)
	other := e.other(e.store.Dir)
	broken := errors.New("no space left on device")
	other.store.log.write = func(*os.File, []byte) (int, error) { return 0, broken }
	e.srv.send(tgTap(1, p, "y"))
	stop := e.poll(other)
	e.srv.until(t, "answerCallbackQuery", "could not be recorded")
	stop()
	if !strings.Contains(other.Trouble(), broken.Error()) || e.prompt(p.ID).Status != AwaitingReply {
		t.Errorf("trouble %q, question %s", other.Trouble(), e.prompt(p.ID).Status)
	}
	e.poll(e.Telegram)
	e.srv.confirmed(t, 1)
	if got := e.prompt(p.ID); got.Status != ReplyReceived {
		t.Errorf("the question is %s after the disk has room again", got.Status)
	}
}

// Another process takes over when the poller ends, and repeats nothing.
func TestTelegramTakeover(t *testing.T) {
	e := newTGEnv(t)
	second := e.other(e.store.Dir)
	e.srv.send(tgSay(1, "first", ""))
	stop := e.poll(e.Telegram)
	e.srv.confirmed(t, 1)
	e.poll(second)
	if second.polling.Load() {
		t.Fatal("two processes poll")
	}
	stop()
	e.srv.mu.Lock()
	e.srv.polls = nil
	e.srv.mu.Unlock()
	begin := time.Now()
	e.srv.send(tgSay(1, "first", ""), tgSay(2, "second", ""))
	e.srv.confirmed(t, 2)
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("taking over took %v", took)
	}
	v, _ := second.store.View()
	var texts []string
	for _, in := range v.Inputs {
		texts = append(texts, in.Text)
	}
	slices.Sort(texts)
	if !slices.Equal(texts, []string{"first", "second"}) {
		t.Errorf("inputs %q", texts)
	}
}

// After an outage longer than a tap lives, old open questions are asked again; young, idle and expired ones are not.
func TestTelegramOutage(t *testing.T) {
	e := newTGEnv(t)
	old := e.ask(yesNo)
	e.store.now = func() time.Time { return time.Now().Add(-3 * time.Minute) }
	e.store.Update(func(v *View) ([]Record, error) { q := *v.Prompts[old.ID]; q.Reason = "aged"; return []Record{&q}, nil })
	aged := e.prompt(old.ID)
	aged.At = time.Now().Add(-3 * time.Minute)
	v, _ := e.store.View()
	v.Prompts[old.ID].At = aged.At // the store never dates a record before the one it follows
	r := &receiver{Telegram: e.Telegram, ctx: context.Background(), lastOK: time.Now().Add(-100 * time.Second)}
	r.recovered()
	if r.work.Wait(); e.srv.count("sendMessage") != 1 {
		t.Error("offered again after 100 s, when taps still lived")
	}
	r.lastOK = time.Now().Add(-200 * time.Second)
	r.recovered()
	r.work.Wait()
	if got := e.prompt(old.ID); got.MsgID <= old.MsgID || got.Status != AwaitingReply {
		t.Errorf("message %d → %d, %s", old.MsgID, got.MsgID, got.Status)
	}
	if c := e.srv.until(t, "editMessageReplyMarkup", fmt.Sprint(old.MsgID)); fmt.Sprint(c.p["reply_markup"]) != "map[inline_keyboard:<nil>]" {
		t.Errorf("the old message keeps buttons: %v", c.p)
	}
}

func TestTelegramFinalErrors(t *testing.T) {
	for _, c := range []struct {
		body, want string
		ends       bool
	}{
		{`{"ok":false,"error_code":401,"description":"Unauthorized"}`, "refuses the bot token", true},
		{`{"ok":false,"error_code":404,"description":"Not Found"}`, "refuses the bot token", true},
		{`{"ok":false,"error_code":409,"description":"Conflict: terminated by other getUpdates request"}`, "another program polls", false},
		{`{"ok":false,"error_code":409,"description":"Conflict: can't use getUpdates method while webhook is active"}`, "webhook", false},
	} {
		e := newTGEnv(t)
		polls := make(chan time.Time, 10)
		e.srv.fault = func(method string, w http.ResponseWriter) bool {
			if method == "getUpdates" {
				polls <- time.Now()
				io.WriteString(w, c.body)
			}
			return method == "getUpdates"
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); e.Poll(ctx) }()
		<-polls
		if !c.ends { // at least 5 s to the next: this waits for one of them only
			for e.Trouble() == "" {
				<-time.After(time.Millisecond)
			}
			cancel()
		}
		<-done
		cancel()
		if !strings.Contains(e.Trouble(), c.want) || len(polls) != 0 {
			t.Errorf("%s: trouble %q, %d more polls", c.body, e.Trouble(), len(polls))
		}
	}
}

// A cut question is allowed only from the message that shows all of it.
func TestTelegramShowAll(t *testing.T) {
	e := newTGEnv(t)
	full := strings.Repeat("echo harmless\n", 400) + "rm -rf /"
	p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Cut, p.Full = true, full }))
	e.srv.send(tgTap(1, p, "~all"))
	e.poll(e.Telegram)
	last := e.srv.until(t, "sendMessage", `rm -rf /.*don't ask again`)
	var shown string
	e.srv.mu.Lock()
	for _, c := range e.srv.calls[1:] {
		if text, ok := c.p["text"].(string); ok && c.method == "sendMessage" {
			shown += text
		}
	}
	e.srv.mu.Unlock()
	if n := strings.Count(shown, "echo harmless"); n != 400 {
		t.Errorf("%d of 400 lines were shown", n)
	}
	if !strings.Contains(fmt.Sprint(last.p["reply_markup"]), "✅ 1. Yes") {
		t.Errorf("the last part has no affirmative button: %v", last.p["reply_markup"])
	}
	e.srv.until(t, "editMessageReplyMarkup", fmt.Sprint(p.MsgID))
	now := e.prompt(p.ID)
	e.srv.send(tgTap(2, p, "1"), tgTap(3, now, "1"))
	e.srv.confirmed(t, 3)
	if got := e.prompt(p.ID); got.Status != ReplyReceived || got.MsgID <= p.MsgID {
		t.Errorf("%s, message %d → %d", got.Status, p.MsgID, got.MsgID)
	}
	if c := e.srv.until(t, "answerCallbackQuery", `"q2"`); !strings.Contains(fmt.Sprint(c.p["text"]), "out of date") {
		t.Errorf("the old message's button: %v", c.p["text"])
	}
	got := e.prompt(p.ID)
	e.store.Move(p.ID, Injected, nil)
	e.store.Move(p.ID, Resolved, nil)
	stale := e.prompt(p.ID)
	stale.MsgID = p.MsgID // as the session knows it that asked
	if err := e.Settle(context.Background(), stale, e.s); err != nil {
		t.Fatal(err)
	}
	e.srv.until(t, "editMessageText", fmt.Sprintf(`"message_id":%d.*Answered`, got.MsgID))
}

// What cannot be shown in full is not offered for approval by "Show all" either.
func TestTelegramShowAllOfNothing(t *testing.T) {
	for _, full := range []string{"", strings.Repeat("x", 16380) + "…"} {
		e := newTGEnv(t)
		p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Cut, p.Full = true, full }))
		r := &receiver{Telegram: e.Telegram, ctx: context.Background()}
		r.show(&press{ID: "q", Message: &message{ID: p.MsgID}}, p, tapAll)
		r.work.Wait()
		e.srv.mu.Lock()
		last := e.srv.calls[len(e.srv.calls)-1]
		for _, c := range e.srv.calls {
			if c.method == "sendMessage" && c.p["reply_markup"] != nil {
				last = c
			}
		}
		e.srv.mu.Unlock()
		if strings.Contains(fmt.Sprint(last.p["reply_markup"]), "1. Yes") {
			t.Errorf("the last message with %d bytes of it offers %v", len(full), last.p["reply_markup"])
		}
	}
}

// A password is deleted from the chat, reaches the session that asked, and no file.
func TestTelegramSecret(t *testing.T) {
	e := newTGEnv(t)
	if err := os.MkdirAll(filepath.Join(e.store.Dir, "sessions"), 0o700); err != nil {
		t.Fatal(err)
	}
	release, err := e.store.HoldSession(e.s.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	p := e.ask(PromptRecord{Type: FreeText, Secret: true, Question: "Password:"})
	reply := fmt.Sprintf(`,"reply_to_message":{"message_id":%d}`, p.MsgID)
	e.srv.send(tgSay(1, "hunter1", reply))
	e.poll(e.Telegram)
	e.srv.until(t, "deleteMessage", `"message_id":1\b`)
	e.srv.until(t, "sendMessage", "cannot be given from here")
	if got := e.prompt(p.ID); got.Status != AwaitingReply {
		t.Fatalf("with free_text_enabled off it is %s", got.Status)
	}
	cfg := *e.cfg.Load()
	cfg.FreeText = true
	e.Reload(&cfg)
	e.srv.send(tgSay(2, "hunter2", reply))
	e.srv.until(t, "deleteMessage", `"message_id":2\b`)
	e.srv.confirmed(t, 2)
	if value, ok := e.store.TakeSecret(p.ID); !ok || value != "hunter2" {
		t.Errorf("the session gets %q, %v", value, ok)
	}
	for _, name := range []string{"state.jsonl", "audit.log"} {
		if b, _ := os.ReadFile(filepath.Join(e.store.Dir, name)); strings.Contains(string(b), "hunter") {
			t.Errorf("%s holds the password", name)
		}
	}
}

// Notices are split, never lost, and each part says whose it is; an edited one goes on in new messages.
func TestTelegramNotify(t *testing.T) {
	e := newTGEnv(t)
	var lines []string
	for i := range 600 {
		lines = append(lines, fmt.Sprintf("line %d of the output", i))
	}
	id, err := e.Notify(context.Background(), Notice{Text: "Output:", Mono: strings.Join(lines, "\n"), SessionID: e.s.ID, Edit: 7})
	if err != nil || id == 7 {
		t.Fatalf("Notify = %d, %v", id, err)
	}
	var shown []string
	for i, c := range e.srv.calls {
		text := c.p["text"].(string)
		if want := map[bool]string{true: "editMessageText", false: "sendMessage"}[i == 0]; c.method != want || len(utf16.Encode([]rune(text))) > 4096 {
			t.Errorf("message %d is a %s of %d bytes", i, c.method, len(text))
		}
		if !strings.HasSuffix(text, origin(e.s)) {
			t.Errorf("message %d does not say whose it is", i)
		}
		shown = append(shown, strings.Split(strings.TrimSuffix(text, "\n"+origin(e.s)), "\n")...)
	}
	if got := strings.Join(shown, "\n"); got != "Output:\n"+strings.Join(lines, "\n") {
		t.Errorf("%d of %d lines arrived", len(shown)-1, len(lines))
	}
	if silent := e.srv.calls[1].p["disable_notification"]; silent != true {
		t.Errorf("disable_notification = %v", silent)
	}
}

func TestTelegramRefusesToStart(t *testing.T) {
	good := Config{Token: tgToken, ChatID: 1, Users: []int64{1}, APIBase: "https://api.telegram.org"}
	if _, err := newTelegram(&good, &Store{}, slog.Default()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Config){"token": func(c *Config) { c.Token = "" }, "chat": func(c *Config) { c.ChatID = 0 },
		"nobody": func(c *Config) { c.Users = nil }, "plain http": func(c *Config) { c.APIBase = "http://api.telegram.org" }} {
		c := good
		if change(&c); func() error { _, err := newTelegram(&c, &Store{}, slog.Default()); return err }() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestTelegramConfigTable(t *testing.T) {
	values := []string{`bot_token = "1:a"`, "chat_id = 5"}
	for in, want := range map[string]string{
		"": "[telegram]\nbot_token = \"1:a\"\nchat_id = 5\n",
		"# mine\ntimeout_seconds = 9\n\n[stream]\nenabled = true\n": "# mine\ntimeout_seconds = 9\n\n[stream]\nenabled = true\n\n[telegram]\n" +
			"bot_token = \"1:a\"\nchat_id = 5\n",
		"[telegram] # bot\nchat_id=4\napi_base = \"https://x\" # keep\n\n[stream]\nenabled = true\n": "[telegram] # bot\nbot_token = \"1:a\"\n" +
			"chat_id = 5\napi_base = \"https://x\" # keep\n\n[stream]\nenabled = true\n",
	} {
		if got := withTelegram(in, values); got != want {
			t.Errorf("withTelegram(%q) =\n%s\nwant\n%s", in, got, want)
		}
		if got := withTelegram(withTelegram(in, values), values); got != want {
			t.Errorf("twice is not once for %q:\n%s", in, got)
		}
	}
}

// The whole setup: the code must come from the phone; a second run keeps what is there.
func TestTelegramSetup(t *testing.T) {
	srv := newTGServer(t)
	dir := filepath.Join(t.TempDir(), "home")
	env := map[string]string{"ATLASBRIDGE_HOME": dir, "TELEGRAM_BOT_TOKEN": tgToken, "TELEGRAM_API_BASE": srv.URL}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	null, _ := os.Open(os.DevNull)
	defer null.Close()
	exit := make(chan int, 1)
	setup := func(args ...string) {
		c := &command{ctx: context.Background(), name: "setup", args: args, stdin: null, stdout: in, stderr: in,
			getenv: func(k string) string { return env[k] }}
		exit <- cmdSetup(c)
		in.Close()
	}
	go setup()
	text, code := "", regexp.MustCompile(`code:  ([0-9a-f]{6})\n`)
	for buf := make([]byte, 512); !code.MatchString(text); {
		n, err := out.Read(buf)
		if text += string(buf[:n]); err != nil {
			t.Fatalf("%v after %q", err, text)
		}
	}
	go io.Copy(io.Discard, out)
	digits := code.FindStringSubmatch(text)[1]
	wrong := map[bool]string{true: "111111", false: "000000"}[digits == "000000"]
	srv.send(strings.ReplaceAll(tgSay(1, wrong, ""), ":1001", ":2002"), tgSay(2, "hello", ""), tgSay(3, digits, ""))
	test := srv.until(t, "sendMessage", "setup:")
	data := regexp.MustCompile(`setup:[0-9a-f]+`).FindString(fmt.Sprint(test.p["reply_markup"]))
	srv.send(fmt.Sprintf(`{"update_id":4,"callback_query":{"id":"q","from":{"id":2002},"message":{"message_id":101,"chat":{"id":2002,"type":"private"}},"data":%q}}`, data),
		fmt.Sprintf(`{"update_id":5,"callback_query":{"id":"q","from":{"id":1001},"message":{"message_id":101,"chat":{"id":1001,"type":"private"}},"data":%q}}`, data))
	if got := <-exit; got != 0 {
		t.Fatalf("setup ended with %d", got)
	}
	check := func(users string) {
		t.Helper()
		delete(env, "TELEGRAM_BOT_TOKEN")
		delete(env, "TELEGRAM_API_BASE")
		cfg, err := loadConfig(dir, func(k string) string { return env[k] }, nil)
		if err != nil || cfg.Token != tgToken || cfg.ChatID != 1001 || fmt.Sprint(cfg.Users) != users || cfg.APIBase != srv.URL {
			t.Fatalf("%+v, %v", cfg, err)
		}
		if info, err := os.Stat(filepath.Join(dir, "config.toml")); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("config.toml: %v, %v", info, err)
		}
	}
	check("[1001]")
	in, _ = os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	setup("--user-id", "1002", "--no-test")
	if got := <-exit; got != 0 {
		t.Fatalf("the second setup ended with %d", got)
	}
	check("[1001 1002]")
}

// Whatever the server sends, nothing panics, and nothing but the operator's own update acts.
func FuzzUpdate(f *testing.F) {
	p := yesNo
	p.Rec, p.ID, p.SessionID, p.Nonce, p.Status, p.MsgID = "prompt", "11111111-0000", "aaaaaaaa-0000", "0123456789abcdef0123456789abcdef", AwaitingReply, 50
	s := &SessionRecord{Head: Head{Rec: "session", ID: "aaaaaaaa-0000"}, Status: "active", Tool: "claude"}
	for _, seed := range []string{tgTap(1, &p, "y"), tgTapOn(1, &p, "y", 50, 2002), tgTap(1, &p, "~all"), tgTap(1, &p, "~s:1,2"), tgSay(2, "yes", ""),
		tgSay(2, "/keys CTRL_C", ""), tgSay(2, "/send aaaa \x1b[201~", `,"reply_to_message":{"message_id":50}`), tgSay(2, "x", `,"via_bot":{}`),
		`{"update_id":1,"callback_query":{}}`, `{"message":{"from":null}}`, `[]`, `{"update_id":"x"}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		var u update
		if json.Unmarshal([]byte(raw), &u) != nil {
			return
		}
		from, reason := admitted(&u, []int64{1001}, 1001)
		if reason != "" {
			return
		}
		if from.ID != 1001 {
			t.Fatalf("user %d is admitted by %s", from.ID, raw)
		}
		v := viewOf(map[string]Record{})
		v.put(s)
		v.put(&p)
		if u.Callback != nil {
			if got, value := tapped(u.Callback.Data, v); got != nil && u.Callback.Data != "ans:11111111:aaaaaaaa:0123456789abcdef:"+value {
				t.Fatalf("%q is taken for a button", u.Callback.Data)
			}
			return
		}
		w := (&heard{message: u.Message, view: v, at: time.Unix(1<<33, 0), by: from.who()}).understand()
		for _, text := range []string{w.reply, tgWish(w)} {
			if i := strings.IndexFunc(text, func(c rune) bool { return c < ' ' && c != '\n' && c != '\t' }); i >= 0 && w.reply == "" {
				t.Fatalf("%q gets through in %q", text[i], text)
			}
		}
	})
}
