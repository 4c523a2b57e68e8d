package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Of two troubles the same one is told each time.
func TestTroubleIsToldInOrder(t *testing.T) {
	for range 200 {
		tg := newTelegram(&Config{}, nil, nil)
		tg.noteTrouble("poll", "it cannot poll")
		tg.noteTrouble("send", "it cannot send")
		if got := tg.Trouble(); got != "it cannot send" {
			t.Fatalf("told: %q", got)
		}
	}
}

// What Telegram has asked one process to wait is not shortened by what it asks of another.
func TestLongestWaitHolds(t *testing.T) {
	e := newTGEnv(t)
	e.postpone(time.Minute)
	e.other(e.store.Dir).postpone(time.Second)
	e.updatePace(func(next time.Time) time.Time {
		if left := time.Until(next); left < 50*time.Second {
			t.Errorf("the next message leaves in %v", left)
		}
		return next
	})
}

// A message that was sent is not sent again because its description has a member of an unknown shape.
func TestSentIsSent(t *testing.T) {
	e := newTGEnv(t)
	e.srv.answers["sendMessage"] = func(map[string]any) string {
		return `{"message_id":5,"date":"today","chat":[]}`
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	id, err := e.Notify(ctx, Notice{Text: "hello"})
	if id != 5 || err != nil || e.srv.count("sendMessage") != 1 {
		t.Errorf("message %d, %v, sent %d times", id, err, e.srv.count("sendMessage"))
	}
}

// An update without a number, which cannot be confirmed, does not make the poller ask without a pause.
func TestUpdateWithoutNumber(t *testing.T) {
	e := newTGEnv(t)
	var polls atomic.Int64
	e.srv.fault = func(method string, w http.ResponseWriter) bool {
		if method != "getUpdates" {
			return false
		}
		polls.Add(1)
		fmt.Fprint(w, `{"ok":true,"result":[{"update_id":"x"}]}`)
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	e.Poll(ctx)
	if n := polls.Load(); n > 3 {
		t.Errorf("it polls %d times a second", n)
	}
}

// openIn records an open question of a session, asked in that message so long ago.
func openIn(t *testing.T, e *tgEnv, session string, msg int64, ago time.Duration, question string) *PromptRecord {
	t.Helper()
	p := storeQuestion(session)
	p.Question = question
	p.CreatedAt = time.Now().Add(-ago)
	if err := storeUpdate(e.store, p); err != nil {
		t.Fatal(err)
	}
	if msg != 0 {
		e.store.Move(p.ID, Routed, nil)
		e.store.Move(p.ID, AwaitingReply, func(q *PromptRecord) { q.MsgID = msg })
	}
	return e.prompt(p.ID)
}

// /status names a session's open questions in the order in which they came.
func TestStatusInOrder(t *testing.T) {
	e := newTGEnv(t)
	var want []string
	for i := range 6 {
		openIn(t, e, e.s.ID, 0, time.Hour-time.Duration(i)*time.Minute, fmt.Sprintf("question %d", i))
		want = append(want, fmt.Sprintf("question %d", i))
	}
	m := &message{From: &user{ID: 1001}, Text: "/status"}
	reply := (&incoming{message: m, view: storeView(t, e.store), at: time.Now()}).understand().reply
	var got []string
	for line := range strings.SplitSeq(reply, "\n") {
		if _, question, ok := strings.Cut(line, "❓ "); ok {
			got = append(got, question)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// Message numbers begin anew in another chat: a reply means the newest question that had the number.
func TestReplyToNewestOfANumber(t *testing.T) {
	e := newTGEnv(t)
	var want *PromptRecord
	for i := range 8 {
		session := storeSession(t, e.store)
		want = openIn(t, e, session, 50, time.Hour-time.Duration(i)*time.Minute, "Go on?")
	}
	bot := &user{IsBot: true}
	m := &message{From: &user{ID: 1001}, Text: "y", ReplyTo: &message{ID: 50, From: bot}}
	m.Chat.ID = 1001
	for range 20 {
		got := (&incoming{message: m, view: storeView(t, e.store), at: time.Now()}).understand()
		if got.decision == nil || got.decision.PromptID != want.ID {
			t.Fatalf("%+v, want the question %s", got.decision, want.ID)
		}
	}
}

// aged makes the store believe that its questions were asked long before the last outage began.
func aged(v *View) {
	for _, p := range v.Prompts {
		p.At = time.Now().Add(-time.Hour)
	}
}

// After an outage the questions that wait are sent again in the order in which they were asked.
func TestResentInOrder(t *testing.T) {
	e := newTGEnv(t)
	want := []string{"question 0", "question 1", "question 2", "question 3"}
	for i, question := range want {
		ago := time.Hour - time.Duration(i)*time.Minute
		openIn(t, e, storeSession(t, e.store), int64(10+i), ago, question)
	}
	aged(storeView(t, e.store))
	r := &receiver{Telegram: e.Telegram, ctx: t.Context(), lastOK: time.Now().Add(-200 * time.Second)}
	r.resendAfterOutage()
	r.work.Wait()
	var got []string
	for _, c := range e.srv.calls {
		if text, _ := c.p["text"].(string); c.method == "sendMessage" {
			got = append(got, strings.TrimPrefix(strings.Split(text, "\n")[0], "❓ "))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// Questions that wait are sent again after an outage although the state could not be read when it ended.
func TestResentWhenTheStateCanBeRead(t *testing.T) {
	e := newTGEnv(t)
	p := openIn(t, e, e.s.ID, 10, time.Hour, "Go on?")
	aged(storeView(t, e.store))
	state := filepath.Join(e.store.Dir, "state.jsonl")
	sound, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	newer := []byte(`{"v":99,"rec":"prompt","id":"x","at":"2026-11-20T14:02:11.000000Z"`)
	unknown := slices.Concat(sound, newer, []byte(seal(newer)))
	if err := os.WriteFile(state, unknown, 0o600); err != nil {
		t.Fatal(err)
	}
	r := &receiver{Telegram: e.Telegram, ctx: t.Context(), lastOK: time.Now().Add(-200 * time.Second)}
	r.resendAfterOutage()
	if err := os.WriteFile(state, sound, 0o600); err != nil {
		t.Fatal(err)
	}
	r.resendAfterOutage()
	r.work.Wait()
	if now := e.prompt(p.ID); now.MsgID == p.MsgID {
		t.Error("it was not sent again")
	}
}

// fullDisk lets every write of the store fail from now on.
func fullDisk(st *Store) {
	st.log.do = faultyFiles(func(op string, _ int64) error {
		if op == "write" {
			return http.ErrServerClosed
		}
		return nil
	})
}

// What a tap asks to see is shown when that is recorded, not at each of the attempts to record it.
func TestShownOnceRecorded(t *testing.T) {
	e := newTGEnv(t)
	p := e.ask(tgWith(tgMenu, func(p *PromptRecord) { p.Full = "all of it" }))
	sent := e.srv.count("sendMessage")
	other := e.other(e.store.Dir)
	fullDisk(other.store)
	r := &receiver{Telegram: other, ctx: t.Context()}
	for range 2 { // it comes again
		if _, err := r.dispatch(json.RawMessage(tgTap(1, p, tapAll))); err == nil {
			t.Fatal("the tap counts as recorded")
		}
	}
	r.work.Wait()
	if n := e.srv.count("sendMessage") - sent; n != 0 {
		t.Errorf("%d messages", n)
	}
}

// A password's message that is gone already has been deleted: nobody is asked to do it.
func TestDeletedAlready(t *testing.T) {
	e := newTGEnv(t)
	p := e.ask(PromptRecord{Prompt: Prompt{Type: FreeText, Secret: true, Question: "Password:"}})
	e.srv.fault = func(method string, w http.ResponseWriter) bool {
		if method != "deleteMessage" {
			return false
		}
		fmt.Fprint(w, `{"ok":false,"error_code":400,"description":"Bad Request: message to delete not found"}`)
		return true
	}
	r := &receiver{Telegram: e.Telegram, ctx: t.Context()}
	say := tgSay(1, "hunter2", fmt.Sprintf(`,"reply_to_message":{"message_id":%d}`, p.MsgID))
	if _, err := r.dispatch(json.RawMessage(say)); err != nil {
		t.Fatal(err)
	}
	r.work.Wait()
	for _, c := range e.srv.calls {
		if text, _ := c.p["text"].(string); strings.Contains(text, "could not be deleted") {
			t.Errorf("it says %q", text)
		}
	}
}

// An outage is not over while what came meanwhile cannot be recorded: only then the questions that wait are sent again.
func TestOutageLastsUntilRecorded(t *testing.T) {
	e := newTGEnv(t)
	tapped := openIn(t, e, e.s.ID, 10, time.Hour, "tapped")
	openIn(t, e, storeSession(t, e.store), 11, time.Hour, "waits")
	aged(storeView(t, e.store))
	works := e.store.log.do
	fullDisk(e.store)
	r := &receiver{Telegram: e.Telegram, ctx: t.Context(), lastOK: time.Now().Add(-200 * time.Second)}
	tap := []json.RawMessage{json.RawMessage(tgTap(1, tapped, "y"))}
	params := &pollParams{}
	r.handleUpdates(tap, params)
	r.work.Wait()
	if n := e.srv.count("sendMessage"); n != 0 || params.Offset != 0 {
		t.Errorf("%d messages, the next poll begins at %d", n, params.Offset)
	}
	e.store.log.do = works
	aged(storeView(t, e.store)) // it has been read anew
	r.handleUpdates(tap, params)
	r.work.Wait()
	if n := e.srv.count("sendMessage"); n != 1 || params.Offset != 2 {
		t.Errorf("%d messages, the next poll begins at %d", n, params.Offset)
	}
}
