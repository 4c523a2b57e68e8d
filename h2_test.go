package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

/* ===== Telegram: what a question's message says in the end ===== */

// chatServer is a Bot API that knows what its messages say, and does to a request what the test wants.
type chatServer struct {
	*httptest.Server
	t *testing.T

	mu       sync.Mutex
	fate     func(method string, p map[string]any) fate // what becomes of a request; nil: it is carried out
	updates  []string
	messages map[int64]*chatMessage
	lastID   int64
	done     []chatEdit    // what was carried out, in order
	flying   map[int64]int // edits under way by message
	maxFly   int           // the most there were at a time
	twice    int           // edits that changed nothing
	changed  chan struct{}
}
type chatMessage struct {
	text    string
	buttons int
}
type chatEdit struct {
	at      time.Time
	method  string
	msg     int64
	text    string
	buttons int
}

// fate is what becomes of a request. The zero value: it is carried out and answered.
type fate struct {
	hold   <-chan struct{} // it is held until this is closed
	answer string          // it is not carried out, and answered so
	cut    bool            // the connection is closed instead of an answer
	late   <-chan struct{} // cut at once, and carried out when this is closed
}

func newChatServer(t *testing.T) *chatServer {
	s := &chatServer{t: t, messages: map[int64]*chatMessage{}, lastID: 100, flying: map[int64]int{},
		changed: make(chan struct{})}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// chatEnv is a tgEnv whose messages are kept by a chatServer.
type chatEnv struct {
	*tgEnv
	chat *chatServer
}

func newChatEnv(t *testing.T) *chatEnv {
	e := &chatEnv{newTGEnv(t), newChatServer(t)}
	e.through(e.Telegram)
	return e
}

func (e *chatEnv) through(tg *Telegram) *Telegram {
	cfg := *tg.cfg.Load()
	cfg.APIBase = e.chat.URL
	tg.cfg.Store(&cfg)
	return tg
}

// process is a Telegram as another process of the same user has it.
func (e *chatEnv) process() *Telegram { return e.through(e.other(e.store.Dir)) }

// receiver is one that polls, as far as a test wants.
func (e *chatEnv) receiver(tg *Telegram) *receiver {
	return &receiver{Telegram: tg, ctx: e.t.Context(), lastOK: time.Now()}
}

func (s *chatServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method := filepath.Base(r.URL.Path)
	var p map[string]any
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
		http.Error(w, "not JSON", http.StatusTeapot)
		return
	}
	if method == "getUpdates" {
		s.serveUpdates(w, r, p)
		return
	}
	msg, _ := p["message_id"].(float64)
	s.mu.Lock()
	edit := strings.HasPrefix(method, "editMessage")
	if edit {
		s.flying[int64(msg)]++
		s.maxFly = max(s.maxFly, s.flying[int64(msg)])
	}
	todo := fate{}
	if s.fate != nil {
		todo = s.fate(method, p)
	}
	s.mu.Unlock()
	if todo.hold != nil {
		<-todo.hold
	}
	if todo.late != nil {
		go func() {
			<-todo.late
			s.carryOut(method, p)
		}()
	}
	answer := todo.answer
	if answer == "" && todo.late == nil {
		answer = s.carryOut(method, p)
	}
	s.mu.Lock()
	if edit {
		s.flying[int64(msg)]--
	}
	s.mu.Unlock()
	if todo.cut || todo.late != nil {
		panic(http.ErrAbortHandler)
	}
	fmt.Fprint(w, answer)
}

func (s *chatServer) serveUpdates(w http.ResponseWriter, r *http.Request, p map[string]any) {
	offset, _ := p["offset"].(float64)
	end := time.After(100 * time.Millisecond)
	for {
		s.mu.Lock()
		s.updates = slices.DeleteFunc(s.updates, func(u string) bool { return tgID(u) < int64(offset) })
		batch, changed := strings.Join(s.updates, ","), s.changed
		s.mu.Unlock()
		select {
		case <-end:
			fmt.Fprintf(w, `{"ok":true,"result":[%s]}`, batch)
			return
		case <-r.Context().Done():
			return
		default:
		}
		if batch != "" {
			fmt.Fprintf(w, `{"ok":true,"result":[%s]}`, batch)
			return
		}
		select {
		case <-changed:
		case <-end:
			fmt.Fprint(w, `{"ok":true,"result":[]}`)
			return
		case <-r.Context().Done():
			return
		}
	}
}

// carryOut does to the messages what a request asks for, and returns the answer.
func (s *chatServer) carryOut(method string, p map[string]any) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.wake()
	msg, _ := p["message_id"].(float64)
	id := int64(msg)
	m := s.messages[id]
	next := chatMessage{}
	if m != nil {
		next = *m
	}
	if text, ok := p["text"].(string); ok {
		next.text = text
	}
	next.buttons = chatButtons(p)
	switch {
	case method == "sendMessage":
		s.lastID++
		id = s.lastID
	case !strings.HasPrefix(method, "editMessage"):
		return `{"ok":true,"result":true}`
	case m == nil:
		return `{"ok":false,"error_code":400,"description":"Bad Request: message to edit not found"}`
	case *m == next && method == "editMessageText":
		s.twice++
		return `{"ok":false,"error_code":400,"description":"Bad Request: message is not modified"}`
	}
	s.messages[id] = &next
	s.done = append(s.done, chatEdit{time.Now(), method, id, next.text, next.buttons})
	return fmt.Sprintf(`{"ok":true,"result":{"message_id":%d,"date":1,"chat":{"id":1001}}}`, id)
}

func chatButtons(p map[string]any) (n int) {
	markup, _ := p["reply_markup"].(map[string]any)
	rows, _ := markup["inline_keyboard"].([]any)
	return len(rows)
}

func (s *chatServer) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *chatServer) send(updates ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.updates = append(s.updates, updates...)
	s.wake()
}

// decides sets what becomes of the requests to come.
func (s *chatServer) decides(f func(method string, p map[string]any) fate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fate = f
}

// first gives the first edit its fate, and tells when it is there.
func (s *chatServer) first(todo fate) (there <-chan struct{}) {
	arrived := make(chan struct{})
	n := 0
	s.decides(func(method string, _ map[string]any) fate {
		if !strings.HasPrefix(method, "editMessage") {
			return fate{}
		}
		n++
		if n > 1 {
			return fate{}
		}
		close(arrived)
		return todo
	})
	return arrived
}

// edits are those that were carried out on the message, 0: on any.
func (s *chatServer) edits(msg int64) (done []chatEdit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.done {
		if strings.HasPrefix(e.method, "editMessage") && (msg == 0 || e.msg == msg) {
			done = append(done, e)
		}
	}
	return done
}

func (s *chatServer) message(id int64) chatMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.messages[id] == nil {
		return chatMessage{}
	}
	return *s.messages[id]
}

// comesTrue until a condition holds.
func comesTrue(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !holds(); {
		if time.Now().After(end) {
			t.Fatalf("it never came that %s", what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

// says checks what a message says at last, and that it has no buttons.
func (e *chatEnv) says(msg int64, want string) {
	e.t.Helper()
	if m := e.chat.message(msg); m.buttons != 0 || !strings.Contains(m.text, want) {
		e.t.Errorf("message %d says %q with %d rows of buttons, want %q and none", msg, m.text, m.buttons, want)
	}
}

// paid checks that nothing is owed.
func (e *chatEnv) paid() {
	e.t.Helper()
	owed, _, err := e.store.Owed(nil)
	if len(owed) > 0 || err != nil {
		e.t.Errorf("owed: %v, %v; the first is %s and its message says %q, replaced %v", len(owed), err, owed[0].Status,
			owed[0].MsgStatus, owed[0].OldMsgIDs)
	}
}

// over decides a question and takes it to the status, without an edit.
func (e *chatEnv) over(p *PromptRecord, to State) *PromptRecord {
	e.t.Helper()
	if to != Canceled && to != Failed && to != Expired {
		_, why, err := e.store.Decide(storeTap(p, "y"), time.Now())
		if err != nil || why != "" {
			e.t.Fatal(why, err)
		}
	}
	for _, step := range map[State][]State{Injected: {Injected}, Resolved: {Injected, Resolved}, Canceled: {Canceled},
		Failed: {Failed}}[to] {
		if moved, err := e.store.Move(p.ID, step, nil); !moved || err != nil {
			e.t.Fatal(moved, err)
		}
	}
	return e.prompt(p.ID)
}

// settling calls Settle beside the test, so often, and waits until that is known to all; the result waits for them.
func (e *chatEnv) settling(tg *Telegram, p *PromptRecord, times int) (wait func()) {
	e.t.Helper()
	var all sync.WaitGroup
	users := func() int {
		tg.postsMu.Lock()
		defer tg.postsMu.Unlock()
		if tg.posts[p.ID] == nil {
			return 0
		}
		return tg.posts[p.ID].users
	}
	before := users()
	var ended sync.Map
	for i := range times {
		all.Go(func() {
			defer ended.Store(i, true)
			if err := tg.Settle(e.t.Context(), p, e.s); err != nil {
				e.t.Errorf("Settle: %v", err)
			}
		})
	}
	comesTrue(e.t, "Settle was called", func() bool {
		n := 0
		ended.Range(func(any, any) bool {
			n++
			return true
		})
		return users()+n >= before+times
	})
	return all.Wait
}

// One edit of a message is under way at a time; what comes meanwhile leaves once, as the last truth.
func TestEditsInOrder(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	e.chat.messages[p.MsgID].text = "asked some time ago"
	held := make(chan struct{})
	there := e.chat.first(fate{hold: held})
	first := e.settling(e.Telegram, p, 1)
	<-there
	e.over(p, ReplyReceived)
	second := e.settling(e.Telegram, p, 1)
	e.store.Move(p.ID, Injected, nil)
	e.store.Move(p.ID, Resolved, nil)
	third := e.settling(e.Telegram, p, 2)
	close(held)
	first()
	second()
	third()
	e.says(p.MsgID, "✅ Answered")
	if n := e.chat.edits(p.MsgID); len(n) != 2 || n[0].buttons == 0 {
		t.Errorf("edits: %v", n)
	}
	if e.chat.maxFly != 1 || e.chat.twice != 0 {
		t.Errorf("%d edits at a time, %d that changed nothing", e.chat.maxFly, e.chat.twice)
	}
	e.paid()
	if len(e.posts) != 0 {
		t.Errorf("%d posts are kept of what is over", len(e.posts))
	}
}

// Somebody who gives up waiting for an edit leaves the order to those who still wait.
func TestGivingUpKeepsTheOrder(t *testing.T) {
	e := newChatEnv(t)
	p := e.over(e.ask(yesNo), ReplyReceived)
	held := make(chan struct{})
	there := e.chat.first(fate{hold: held})
	first := e.settling(e.Telegram, p, 1)
	<-there
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Settle(impatient, p, e.s); err == nil {
		t.Error("an edit that was given up counts as done")
	}
	e.store.Move(p.ID, Injected, nil)
	e.store.Move(p.ID, Resolved, nil)
	last := e.settling(e.Telegram, p, 1)
	if n := e.chat.edits(p.MsgID); len(n) != 0 {
		t.Errorf("an edit overtook another: %v", n)
	}
	close(held)
	first()
	last()
	e.says(p.MsgID, "✅ Answered")
	if e.chat.maxFly != 1 {
		t.Errorf("%d edits at a time", e.chat.maxFly)
	}
	e.paid()
}

// What an edit says is the truth of the moment in which it leaves: after its turn, and anew for each attempt.
func TestEditsAreWrittenWhenTheyLeave(t *testing.T) {
	again := `{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":1}}`
	broken := `{"ok":false,"error_code":502,"description":"Bad Gateway"}`
	for name, answer := range map[string]string{"its turn": "", "429": again, "502": broken} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newChatEnv(t)
			p := e.ask(yesNo)
			held := make(chan struct{})
			there := e.chat.first(fate{hold: held, answer: answer})
			if answer == "" {
				e.turn(func(time.Time) time.Time { return time.Now().Add(1200 * time.Millisecond) })
				there = nil
			}
			wait := e.settling(e.Telegram, p, 1)
			if there != nil {
				<-there
			}
			e.over(p, Resolved)
			close(held)
			wait()
			e.says(p.MsgID, "✅ Answered")
			if n := len(e.chat.edits(p.MsgID)); n != 1 || e.chat.twice != 0 {
				t.Errorf("%d edits, %d changed nothing", n, e.chat.twice)
			}
		})
	}
}

// An edit that has become superfluous while it waited is dropped.
func TestSuperfluousEditIsDropped(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	e.over(p, Resolved)
	e.turn(func(time.Time) time.Time { return time.Now().Add(800 * time.Millisecond) })
	wait := e.settling(e.Telegram, p, 1)
	if err := e.process().store.Edited(p.ID, p.MsgID, Resolved); err != nil { // another process was quicker
		t.Fatal(err)
	}
	wait()
	if n := e.chat.edits(0); len(n) != 0 {
		t.Errorf("edits: %v", n)
	}
}

// A tick of the process that polls, overtaken by the outcome of the session's process, does not bring the buttons back.
func TestTickOvertakenByOutcome(t *testing.T) {
	for name, lost := range map[string]bool{"slow": false, "without an answer": true} {
		t.Run(name, func(t *testing.T) {
			e := newChatEnv(t)
			p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Multi, p.Permission = true, false }))
			poller := e.process()
			r := e.receiver(poller)
			held := make(chan struct{})
			there := e.chat.first(fate{hold: held, cut: lost})
			r.show(&press{ID: "q", Message: &message{ID: p.MsgID}}, *p, e.s, tapTick+"1")
			<-there
			if _, why, err := e.store.Decide(storeTap(p, "1"), time.Now()); err != nil || why != "" {
				t.Fatal(why, err)
			}
			e.store.Move(p.ID, Injected, nil)
			e.store.Move(p.ID, Resolved, nil)
			e.settling(e.Telegram, p, 1)()
			e.says(p.MsgID, "✅ Answered")
			close(held)
			r.work.Wait()
			e.says(p.MsgID, "✅ Answered")
			if lost { // it can still be carried out: that is looked at again
				if owed, _, _ := e.store.Owed(nil); len(owed) != 1 {
					t.Errorf("%d owed", len(owed))
				}
				e.settling(e.Telegram, p, 1)()
			}
			e.paid()
		})
	}
}

// Of ticks that come while one is under way the last is shown, and none twice.
func TestTicksInOrder(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Multi, p.Permission = true, false }))
	r := e.receiver(e.Telegram)
	held := make(chan struct{})
	there := e.chat.first(fate{hold: held})
	tick := func(keys string) {
		r.show(&press{ID: "q", Message: &message{ID: p.MsgID}}, *p, e.s, tapTick+keys)
	}
	users := func(n int) func() bool {
		return func() bool {
			e.postsMu.Lock()
			defer e.postsMu.Unlock()
			return e.posts[p.ID] != nil && e.posts[p.ID].users == n
		}
	}
	tick("1")
	<-there
	tick("1,2")
	comesTrue(t, "the second tick waits", users(2))
	tick("1,3")
	comesTrue(t, "the third tick waits", users(3))
	close(held)
	r.work.Wait()
	tick("1,3")
	r.work.Wait()
	if n := e.chat.edits(p.MsgID); len(n) != 2 || n[1].buttons == 0 {
		t.Errorf("edits: %v", n)
	}
	tick("")
	r.work.Wait()
	if n := e.chat.edits(p.MsgID); len(n) != 3 {
		t.Errorf("unticking: %v", n)
	}
	e.over(p, Canceled)
	tick("1")
	r.work.Wait()
	e.says(p.MsgID, "🚫 Canceled")
}

// What a process left undone when it died is done by whoever polls next, in the order in which it came about, within
// the rate; and questions go first.
func TestDebtsArePaid(t *testing.T) {
	e := newChatEnv(t)
	var owed []*PromptRecord
	for i := range 8 {
		p := yesNo
		p.Idle = i == 7
		q := storeQuestion(e.s.ID)
		q.Prompt = p.Prompt
		if err := storeUpdate(e.store, q); err != nil {
			t.Fatal(err)
		}
		id := int64(10 + i)
		e.chat.messages[id] = &chatMessage{text: "open", buttons: 2}
		e.store.Move(q.ID, Routed, nil)
		e.store.Move(q.ID, AwaitingReply, func(r *PromptRecord) { r.MsgID = id })
		owed = append(owed, e.over(e.prompt(q.ID), []State{Resolved, Canceled, Failed}[i%3]))
	}
	begin := time.Now()
	poller := e.process()
	stop := e.poll(poller)
	comesTrue(t, "the first are paid", func() bool { return len(e.chat.edits(0)) >= 4 })
	asking := time.Now()
	asked := e.ask(yesNo)
	if took := time.Since(asking); took > 600*time.Millisecond {
		t.Errorf("a question waited for %v behind debts", took)
	}
	comesTrue(t, "all are paid", func() bool { return len(e.chat.edits(0)) >= len(owed) })
	comesTrue(t, "that is recorded", func() bool {
		left, _, _ := e.store.Owed(nil)
		return len(left) == 0
	})
	for i, edit := range e.chat.edits(0) {
		if edit.msg != owed[i].MsgID {
			t.Errorf("edit %d is of message %d", i, edit.msg)
		}
		e.says(edit.msg, map[State]string{Resolved: "Answered", Canceled: "Canceled", Failed: "Not delivered"}[owed[i].Status])
	}
	e.chat.mu.Lock()
	for i, d := range e.chat.done {
		if earliest := begin.Add(time.Duration(i-3) * 1050 * time.Millisecond); d.at.Before(earliest) {
			t.Errorf("request %d left %v too early", i, earliest.Sub(d.at))
		}
	}
	e.chat.mu.Unlock()
	stop()
	e.poll(e.Telegram)
	comesTrue(t, "it polls", e.polling.Load)
	if n := e.chat.edits(0); len(n) != len(owed) || e.chat.twice != 0 {
		t.Errorf("%d edits, %d that changed nothing", len(n), e.chat.twice)
	}
	if m := e.chat.message(asked.MsgID); m.buttons == 0 {
		t.Error("the open question lost its buttons")
	}
}

// A debt that comes about while somebody polls is paid soon; a living session pays its own, for a while; a decision of
// a dead session waits for its end to be recorded.
func TestWhoPays(t *testing.T) {
	e := newChatEnv(t)
	poller := e.process()
	e.poll(poller)
	comesTrue(t, "it polls", poller.polling.Load)
	p := e.ask(yesNo)
	e.over(p, Resolved)
	comesTrue(t, "it is paid", func() bool { return len(e.chat.edits(p.MsgID)) == 1 })
	e.says(p.MsgID, "✅ Answered")

	r := e.receiver(e.Telegram)
	release, err := e.store.HoldSession(e.s.ID)
	if err != nil {
		t.Fatal(err)
	}
	alive := PromptRecord{Head: Head{At: time.Now()}, SessionID: e.s.ID, Status: Resolved, MsgID: 1}
	for _, c := range []struct {
		name   string
		change func(*PromptRecord)
		ends   bool
		want   bool
	}{
		{"its session lives", func(*PromptRecord) {}, false, false},
		{"for long", func(p *PromptRecord) { p.At = p.At.Add(-debtsPatience - time.Second) }, false, true},
		{"only a replaced message", func(p *PromptRecord) { p.MsgStatus, p.OldMsgIDs = Resolved, []int64{7} }, false, true},
		{"a replaced one, too", func(p *PromptRecord) { p.OldMsgIDs = []int64{7} }, false, false},
		{"its session is dead", func(*PromptRecord) {}, true, true},
		{"not reaped", func(p *PromptRecord) { p.Status = ReplyReceived }, true, false},
	} {
		if c.ends {
			release()
		}
		p := alive
		c.change(&p)
		if r.mustPay(&p) != c.want {
			t.Errorf("%s: mustPay = %v", c.name, !c.want)
		}
	}
}

// Nothing is looked for while nothing changes.
func TestOwedLooksOnlyAtChanges(t *testing.T) {
	e := newChatEnv(t)
	p := e.over(e.ask(yesNo), Resolved)
	owed, changed, err := e.store.Owed(nil)
	if err != nil || len(owed) != 1 || owed[0].ID != p.ID {
		t.Fatal(owed, err)
	}
	again, same, err := e.store.Owed(changed)
	if err != nil || again != nil || same != changed {
		t.Errorf("unchanged: %v, %v", again, err)
	}
	if err := e.process().store.Edited(p.ID, p.MsgID, Resolved); err != nil {
		t.Fatal(err)
	}
	again, same, err = e.store.Owed(changed)
	if err != nil || len(again) != 0 || same == changed {
		t.Errorf("changed by another process: %v, %v", again, err)
	}
}

// A message that is gone, or takes no edit, is paid; what keeps the whole chat from working is not.
func TestDebtsOfMessagesThatAreGone(t *testing.T) {
	for text, paid := range map[string]bool{
		"400,Bad Request: message to edit not found": true,
		"400,Bad Request: message can't be edited":   true,
		"400,Bad Request: MESSAGE_ID_INVALID":        true,
		"400,Bad Request: MESSAGE_TOO_LONG":          true,
		"400,Bad Request: chat not found":            false,
		"403,Forbidden: bot was blocked by the user": false,
		"404,Not Found": false,
		"400,Bad Request: group chat was upgraded to a supergroup chat": false,
	} {
		t.Run(text, func(t *testing.T) {
			e := newChatEnv(t)
			p := e.over(e.ask(yesNo), Resolved)
			code, description, _ := strings.Cut(text, ",")
			tries := 0
			e.chat.decides(func(string, map[string]any) fate {
				tries++
				return fate{answer: fmt.Sprintf(`{"ok":false,"error_code":%s,"description":%q}`, code, description)}
			})
			err := e.Settle(t.Context(), p, e.s)
			if (err == nil) != paid || tries != 1 {
				t.Errorf("Settle: %v after %d tries", err, tries)
			}
			owed, _, _ := e.store.Owed(nil)
			if (len(owed) == 0) != paid {
				t.Errorf("%d owed", len(owed))
			}
		})
	}
}

// 429 and a lost answer in between: each outcome is shown, and none twice.
func TestDebtsThroughTrouble(t *testing.T) {
	again := `{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":1}}`
	for name, c := range map[string]struct {
		todo  fate
		twice int
	}{"429": {fate{answer: again}, 0}, "carried out": {fate{cut: true}, 1}, "never came": {fate{hold: nil, late: make(chan struct{})}, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newChatEnv(t)
			a := e.over(e.ask(yesNo), Resolved)
			b := e.over(e.ask(yesNo), Resolved)
			<-e.chat.firstAndPoll(e, c.todo)
			comesTrue(t, "both are paid", func() bool {
				owed, _, _ := e.store.Owed(nil)
				return len(owed) == 0
			})
			e.says(a.MsgID, "✅ Answered")
			e.says(b.MsgID, "✅ Answered")
			if n := e.chat.edits(0); len(n) != 2 || e.chat.twice != c.twice {
				t.Errorf("%d edits, %d changed nothing", len(n), e.chat.twice)
			}
		})
	}
}

// firstAndPoll gives the first edit its fate and has another process poll.
func (s *chatServer) firstAndPoll(e *chatEnv, todo fate) <-chan struct{} {
	there := s.first(todo)
	e.poll(e.process())
	return there
}

// An edit whose answer was lost can be carried out after a later one: what it brings back is taken away again.
func TestLostEditComesLate(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	late := make(chan struct{})
	there := e.chat.first(fate{late: late})
	wait := e.settling(e.Telegram, p, 1) // the time left
	<-there
	e.over(p, Resolved)
	wait()
	e.says(p.MsgID, "✅ Answered")
	close(late)
	comesTrue(t, "the lost edit lands", func() bool { return e.chat.message(p.MsgID).buttons > 0 })
	poller := e.process()
	poller.store.now = func() time.Time { return time.Now().Add(time.Hour) }
	e.poll(poller)
	comesTrue(t, "it is edited again", func() bool { return e.chat.message(p.MsgID).buttons == 0 })
	comesTrue(t, "that is recorded", func() bool { return e.prompt(p.ID).MsgStatus == Resolved })
	e.says(p.MsgID, "✅ Answered")
	e.paid()
}

// What a message says already is not sent: by whom ever it was said, and in what ever status.
func TestNothingIsSaidTwice(t *testing.T) {
	e := newChatEnv(t)
	p := e.over(e.ask(yesNo), Injected)
	other := e.process()
	for _, tg := range []*Telegram{e.Telegram, other, e.Telegram} {
		e.settling(tg, p, 1)()
	}
	e.store.Move(p.ID, Resolved, nil)
	e.settling(other, p, 1)()
	e.settling(e.Telegram, p, 2)()
	if n := e.chat.edits(p.MsgID); len(n) != 1 || e.chat.twice != 0 {
		t.Errorf("%d edits, %d that changed nothing", len(n), e.chat.twice)
	}
	if got := e.prompt(p.ID).MsgStatus; got != Resolved {
		t.Errorf("recorded: %s", got)
	}
	e.says(p.MsgID, "✅ Answered")
}

// A question that is over when its turn comes is not asked; one whose delivery is no longer wanted while it is under
// way is known by its message all the same.
func TestAskOfWhatIsOver(t *testing.T) {
	e := newChatEnv(t)
	stored := func() *PromptRecord {
		p := storeQuestion(e.s.ID)
		if err := storeUpdate(e.store, p); err != nil {
			t.Fatal(err)
		}
		e.store.Move(p.ID, Routed, nil)
		return p
	}
	p := stored()
	e.turn(func(time.Time) time.Time { return time.Now().Add(500 * time.Millisecond) })
	e.store.Move(p.ID, Canceled, nil)
	if id, err := e.Ask(t.Context(), p, e.s); id != 0 || err != nil {
		t.Errorf("Ask = %d, %v", id, err)
	}
	if len(e.chat.done) != 0 {
		t.Errorf("sent: %v", e.chat.done)
	}

	q := stored()
	held, there := make(chan struct{}), make(chan struct{})
	e.chat.decides(func(method string, _ map[string]any) fate {
		if method == "sendMessage" {
			close(there)
			return fate{hold: held}
		}
		return fate{}
	})
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan int64)
	go func() {
		id, err := e.Ask(ctx, q, e.s)
		if err != nil {
			t.Errorf("Ask: %v", err)
		}
		result <- id
	}()
	<-there
	e.store.Move(q.ID, Canceled, nil)
	if err := e.Settle(t.Context(), q, e.s); err != nil { // no message is known yet
		t.Fatal(err)
	}
	cancel()
	close(held)
	id := <-result
	if moved, err := e.store.Move(q.ID, AwaitingReply, func(r *PromptRecord) { r.MsgID = id }); moved || err != nil {
		t.Fatal(moved, err)
	}
	if owed, _, _ := e.store.Owed(nil); len(owed) != 1 || owed[0].MsgID != id || id == 0 {
		t.Errorf("message %d: %d owed", id, len(owed))
	}
	e.settling(e.Telegram, q, 1)()
	e.says(id, "🚫 Canceled")
	e.paid()
}

// The buttons of a message that a newer one has replaced are owed, through the end of the process that replaced it.
func TestReplacedMessageIsOwed(t *testing.T) {
	for _, to := range []State{AwaitingReply, Canceled} {
		e := newChatEnv(t)
		p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Cut, p.Full = true, strings.Repeat("x", 3300)+"\nend" }))
		e.chat.decides(func(method string, params map[string]any) fate {
			return when(strings.HasPrefix(method, "editMessage"), fate{answer: `{"ok":false,"error_code":403,"description":"x"}`})
		})
		r := e.receiver(e.process())
		if _, err := r.offer(e.s, *p, "", false); err == nil {
			t.Error("the failed edit is not told")
		}
		now := e.prompt(p.ID)
		if now.MsgID <= p.MsgID || !slices.Equal(now.OldMsgIDs, []int64{p.MsgID}) {
			t.Fatalf("message %d, replaced %v", now.MsgID, now.OldMsgIDs)
		}
		if to == Canceled {
			e.over(now, to)
		}
		e.chat.decides(nil)
		e.poll(e.process())
		comesTrue(t, "the old one has no buttons", func() bool { return e.chat.message(p.MsgID).buttons == 0 })
		comesTrue(t, "that is recorded", func() bool { return len(e.prompt(p.ID).OldMsgIDs) == 0 })
		if to == Canceled {
			e.says(now.MsgID, "🚫 Canceled")
		} else if e.chat.message(now.MsgID).buttons == 0 {
			t.Error("the new one has no buttons")
		}
		e.paid()
	}
}

// A question that is answered while it is offered again: the new message says the outcome.
func TestOfferedAgainWhileAnswered(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	held, there := make(chan struct{}), make(chan struct{})
	e.chat.decides(func(method string, _ map[string]any) fate {
		if method == "sendMessage" {
			close(there)
			return fate{hold: held}
		}
		return fate{}
	})
	r := e.receiver(e.process())
	msg := make(chan int64)
	go func() {
		id, err := r.offer(e.s, *p, "", false)
		if err != nil {
			t.Errorf("offer: %v", err)
		}
		msg <- id
	}()
	<-there
	e.over(p, Resolved)
	e.settling(e.Telegram, p, 1)()
	close(held)
	id := <-msg
	e.says(p.MsgID, "✅ Answered")
	e.says(id, "✅ Answered")
	e.paid()
	if e.chat.twice != 0 || len(e.chat.edits(p.MsgID)) != 1 {
		t.Errorf("edits: %v", e.chat.edits(0))
	}
	if again, err := r.offer(e.s, *e.prompt(p.ID), "", false); again != 0 || err != nil {
		t.Errorf("what is over is offered again as %d, %v", again, err)
	}
}

// The message loses its buttons soon after the decision even if typing takes long; else one edit says it all.
func TestButtonsGoSoonAfterTheDecision(t *testing.T) {
	for name, slow := range map[string]bool{"typing takes long": true, "typed at once": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newChatEnv(t)
			release, err := e.store.HoldSession(e.s.ID)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			p := e.ask(yesNo)
			e.poll(e.process())
			e.chat.send(tgTap(1, p, "y"), tgTap(2, p, "y")) // a finger that trembles
			comesTrue(t, "it is decided", func() bool { return storeView(t, e.store).Updates["2"] != nil })
			begin := time.Now()
			if slow {
				comesTrue(t, "the buttons go", func() bool { return e.chat.message(p.MsgID).buttons == 0 })
				if took := time.Since(begin); took > 1500*time.Millisecond {
					t.Errorf("that took %v", took)
				}
				e.says(p.MsgID, "on its way")
			}
			e.store.Move(p.ID, Injected, nil)
			e.store.Move(p.ID, Resolved, nil)
			for time.Since(begin) < onItsWayAfter+200*time.Millisecond {
				<-time.After(10 * time.Millisecond) // an edit too many would come now
			}
			if n := len(e.chat.edits(p.MsgID)); !slow && n != 0 {
				t.Errorf("%d edits before the session's own", n)
			}
			e.settling(e.Telegram, p, 1)()
			e.says(p.MsgID, "✅ Answered")
			if n := len(e.chat.edits(p.MsgID)); n != 1+when(slow, 1) || e.chat.twice != 0 {
				t.Errorf("%d edits, %d changed nothing", n, e.chat.twice)
			}
		})
	}
}

// "On its way" that lands after the outcome is put right at once.
func TestOnItsWayOvertakenByOutcome(t *testing.T) {
	e := newChatEnv(t)
	p := e.over(e.ask(yesNo), ReplyReceived)
	held := make(chan struct{})
	there := e.chat.first(fate{hold: held})
	r := e.receiver(e.process())
	r.later(func() (int64, error) { return r.onItsWay(p.ID) })
	<-there
	e.store.Move(p.ID, Injected, nil)
	e.store.Move(p.ID, Resolved, nil)
	e.settling(e.Telegram, p, 1)()
	close(held)
	r.work.Wait()
	e.says(p.MsgID, "Yes\n")
	if text := e.chat.message(p.MsgID).text; strings.Contains(text, "on its way") {
		t.Errorf("it says %q", text)
	}
	e.paid()
}

// An edit that waits its turn leaves with the urgency that its question has by then.
func TestEditBecomesUrgent(t *testing.T) {
	e := newChatEnv(t)
	cfg := *e.cfg.Load()
	cfg.ChatID = -1001 // a group: a message that is not urgent waits for 3.9 s more
	e.cfg.Store(&cfg)
	p := e.ask(yesNo)
	e.turn(func(time.Time) time.Time { return time.Now() })
	begin := time.Now()
	wait := e.settling(e.Telegram, p, 1)
	e.over(p, Resolved)
	wait()
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("it waited for %v", took)
	}
	e.says(p.MsgID, "✅ Answered")
}

// The time left is shown where the message shows what the state says, and nowhere else.
func TestTimeLeftOnlyWhereNothingElseIsShown(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*PromptRecord)
		want   int
	}{
		"plain":   {func(*PromptRecord) {}, 1},
		"in full": {func(p *PromptRecord) { p.Cut, p.Full = true, "all of it" }, 1},
		"cut":     {func(p *PromptRecord) { p.Cut, p.Full = true, strings.Repeat("x", 5000) }, 0},
		"ticks":   {func(p *PromptRecord) { p.Multi = true }, 0},
	} {
		e := newChatEnv(t)
		p := e.ask(tgWith(tgMenu, c.change))
		e.chat.messages[p.MsgID].text = "asked some time ago"
		e.settling(e.Telegram, p, 1)()
		if n := e.chat.edits(p.MsgID); len(n) != c.want {
			t.Errorf("%s: %v", name, n)
		}
	}
}

// What was ticked in a message that has been replaced is not ticked in the new one.
func TestTicksStayInTheirMessage(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Multi, p.Permission = true, false }))
	r := e.receiver(e.Telegram)
	r.show(&press{ID: "q", Message: &message{ID: p.MsgID}}, *p, e.s, tapTick+"1")
	r.work.Wait()
	id, err := r.offer(e.s, *p, "", false)
	if err != nil {
		t.Fatal(err)
	}
	if n := e.chat.edits(id); len(n) != 0 {
		t.Errorf("edits of the new one: %v", n)
	}
	if n := e.chat.edits(p.MsgID); len(n) != 2 || n[1].buttons != 0 {
		t.Errorf("edits of the old one: %v", n)
	}
}

// A tick that waits while its message is replaced brings no buttons back there.
func TestTickOfReplacedMessage(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Multi, p.Permission = true, false }))
	r := e.receiver(e.Telegram)
	held := make(chan struct{})
	there := e.chat.first(fate{hold: held})
	tick := func(keys string) {
		r.show(&press{ID: "q", Message: &message{ID: p.MsgID}}, *p, e.s, tapTick+keys)
	}
	tick("1")
	<-there
	tick("2")
	comesTrue(t, "the second tick waits", func() bool {
		e.postsMu.Lock()
		defer e.postsMu.Unlock()
		return e.posts[p.ID].users == 2
	})
	if err := e.store.Offered(p.ID, p.MsgID+1); err != nil {
		t.Fatal(err)
	}
	close(held)
	r.work.Wait()
	n := e.chat.edits(p.MsgID)
	if len(n) != 2 || n[1].buttons != 0 {
		t.Fatalf("edits: %v", n)
	}
	if all := len(p.Choices) + 1; n[0].buttons != all { // with Submit
		t.Errorf("a tick of what was cut leaves %d rows of buttons, want %d", n[0].buttons, all)
	}
}

// Where a message cannot be recorded nobody would ever take its buttons away, so they go at once.
func TestOfferThatCannotBeRecorded(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	other := e.process()
	other.store.log.do = faultyFiles(func(op string, _ int64) error { return when(op == "write", http.ErrServerClosed) })
	if _, err := e.receiver(other).offer(e.s, *p, "", false); err == nil {
		t.Error("the error is not told")
	}
	if e.chat.message(p.MsgID).buttons == 0 || e.chat.message(p.MsgID+1).buttons != 0 {
		t.Errorf("messages: %v", e.chat.messages)
	}
}

// A button that somebody can still tap although it is of no use shows that its message has buttons: they go.
func TestTappedInVain(t *testing.T) {
	for _, c := range []struct {
		name  string
		begin func(e *chatEnv, p *PromptRecord) (msg int64) // the message tapped, of a question asked
		want  string
	}{
		{"brought back", func(e *chatEnv, p *PromptRecord) int64 {
			e.settling(e.Telegram, e.over(p, Resolved), 1)()
			return p.MsgID
		}, "✅ Answered"},
		{"an unknown older one", func(e *chatEnv, p *PromptRecord) int64 { return p.MsgID - 50 }, "open"},
		{"an unknown one of what is over", func(e *chatEnv, p *PromptRecord) int64 {
			e.settling(e.Telegram, e.over(p, Canceled), 1)()
			return p.MsgID - 50
		}, "open"},
		{"a newer one that was never recorded", func(e *chatEnv, p *PromptRecord) int64 {
			e.settling(e.Telegram, e.over(p, Failed), 1)()
			return p.MsgID + 50
		}, "Not delivered"},
		{"of a question that is forgotten", func(e *chatEnv, p *PromptRecord) int64 {
			p.ID = newID()
			return p.MsgID
		}, "Continue"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := newChatEnv(t)
			p := e.ask(yesNo)
			asked := p.ID
			msg := c.begin(e, p)
			e.chat.mu.Lock()
			text := "open"
			if m := e.chat.messages[msg]; m != nil {
				text = m.text
			}
			e.chat.messages[msg] = &chatMessage{text: text, buttons: 2}
			e.chat.mu.Unlock()
			e.poll(e.process())
			e.chat.send(tgTapOn(1, p, "y", msg, 1001))
			comesTrue(t, "its buttons go", func() bool { return e.chat.message(msg).buttons == 0 })
			e.says(msg, c.want)
			if got := e.prompt(asked); got.Open() && msg != p.MsgID && e.chat.message(p.MsgID).buttons == 0 {
				t.Error("the open question's own message lost them")
			}
			comesTrue(t, "nothing is owed", func() bool {
				owed, _, _ := e.store.Owed(nil)
				return len(owed) == 0
			})
		})
	}
}

// A forged tap does not make another message one of the question's.
func TestForgedTapInVain(t *testing.T) {
	e := newChatEnv(t)
	p := e.ask(yesNo)
	e.settling(e.Telegram, e.over(p, Resolved), 1)()
	q := *e.prompt(p.ID)
	q.Nonce = newNonce()
	r := e.receiver(e.Telegram)
	v, _ := e.store.View()
	var u update
	if err := json.Unmarshal([]byte(tgTapOn(1, &q, "y", p.MsgID+50, 1001)), &u); err != nil {
		t.Fatal(err)
	}
	if err := r.tap(1, u.Callback, v); err != nil {
		t.Fatal(err)
	}
	r.work.Wait()
	if got := e.prompt(p.ID); got.MsgID != p.MsgID || len(got.OldMsgIDs) != 0 {
		t.Errorf("message %d, replaced %v", got.MsgID, got.OldMsgIDs)
	}
}

// What is known of a prompt's messages, change by change.
func TestMessagesOfAPrompt(t *testing.T) {
	type state struct {
		MsgID     int64
		MsgStatus State
		Old       []int64
	}
	for _, c := range []struct {
		name   string
		before state
		change func(*Store, string) error
		after  state
	}{
		{"the first", state{}, func(s *Store, id string) error { return s.Offered(id, 5) }, state{5, "", nil}},
		{"a newer one", state{5, "", nil}, func(s *Store, id string) error { return s.Offered(id, 9) }, state{9, "", []int64{5}}},
		{"one after the outcome", state{5, Canceled, nil}, func(s *Store, id string) error { return s.Offered(id, 9) },
			state{9, "", nil}},
		{"an older one", state{5, Canceled, nil}, func(s *Store, id string) error { return s.Offered(id, 3) },
			state{5, Canceled, []int64{3}}},
		{"its own", state{5, Canceled, nil}, func(s *Store, id string) error { return s.Offered(id, 5) }, state{5, "", nil}},
		{"edited", state{5, "", []int64{3}}, func(s *Store, id string) error { return s.Edited(id, 5, Canceled) },
			state{5, Canceled, []int64{3}}},
		{"edited, an old one", state{5, "", []int64{3, 4}}, func(s *Store, id string) error { return s.Edited(id, 3, Canceled) },
			state{5, "", []int64{4}}},
		{"buttons on an old one", state{5, Canceled, []int64{3}}, func(s *Store, id string) error { return s.Edited(id, 3, "") },
			state{5, Canceled, []int64{3}}},
		{"moved with a late id", state{5, Canceled, nil}, func(s *Store, id string) error {
			_, err := s.Move(id, AwaitingReply, func(p *PromptRecord) { p.MsgID = 9 })
			return err
		}, state{9, "", nil}},
		{"moved without a message", state{5, "", nil}, func(s *Store, id string) error {
			_, err := s.Move(id, AwaitingReply, func(p *PromptRecord) { p.MsgID = 0 })
			return err
		}, state{5, "", nil}},
		{"moved with a late older id", state{5, Canceled, nil}, func(s *Store, id string) error {
			_, err := s.Move(id, AwaitingReply, func(p *PromptRecord) { p.MsgID = 3 })
			return err
		}, state{5, Canceled, []int64{3}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := storeAt(t, storeDir(t))
			p := storePrompt(t, s, storeSession(t, s), Canceled, func(p *PromptRecord) {
				p.MsgID, p.MsgStatus, p.OldMsgIDs = c.before.MsgID, c.before.MsgStatus, c.before.Old
			})
			if err := c.change(s, p.ID); err != nil {
				t.Fatal(err)
			}
			now := storeView(t, s).Prompts[p.ID]
			if got := (state{now.MsgID, now.MsgStatus, append([]int64(nil), now.OldMsgIDs...)}); !reflect.DeepEqual(got, c.after) {
				t.Errorf("%+v, want %+v", got, c.after)
			}
			at := now.At
			if err := s.Edited(p.ID, 77, Canceled); err != nil || !storeView(t, s).Prompts[p.ID].At.Equal(at) {
				t.Errorf("what changes nothing is written: %v", err)
			}
		})
	}
}
