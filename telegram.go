// Telegram: the one file that reaches the network.
//
// Out: Ask, Settle and Notify send and edit messages for this process's own session. In: Poll, in the one process
// that holds the poll lock, receives for all sessions. A tap or an answer becomes a Decision for Store.Decide,
// anything else an InputRecord that the session's owner executes; a few commands are answered from the state.
//
// Rules:
//   - Every request goes through call, every message through send: deadline, pacing and retries in one place each.
//   - Text is sent with entities (offsets in UTF-16 units), never with a parse_mode: what a program printed cannot
//     become markup. Text from elsewhere passes clean on its way out.
//   - Every update passes admitted first. Strangers are audited and never answered.
//   - An update is confirmed to the server only after what it did is on disk; ids acted on are in the state, so that
//     the next poller repeats nothing. Pending updates are never dropped.
//   - A message about a session ends in a line of ours with [SID:…], and only that line is believed when a reply
//     quotes it: a program cannot print itself into another session.
//   - The token never leaves this file: no error carries a URL.
//
// Where a comment says "server", only the source of tdlib/telegram-bot-api tells.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math/big"
	mrand "math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/term"
)

const (
	messageUnits = 4096              // UTF-16 units, https://core.telegram.org/bots/api#sendmessage
	partUnits    = 3400              // of foreign text in one message: leaves room for our own lines
	maxCallback  = 64                // bytes, https://core.telegram.org/bots/api#inlinekeyboardbutton
	maxToast     = 200               // characters, https://core.telegram.org/bots/api#answercallbackquery
	maxResponse  = 16 << 20          // bytes: 100 updates, each with the message it replies to, stay far below
	pollSeconds  = 50                // the server clamps longer ones (server)
	callTimeout  = 20 * time.Second  // for one request; a poll gets pollSeconds and 10 s
	tapLife      = 150 * time.Second // an undelivered callback_query is forgotten after this (server)
)

// Channel carries questions to the operator and outcomes back; receiving is the poller's. Methods block,
// obey the pacing and retry what can be retried until ctx ends; an error is final.
type Channel interface {
	// Ask sends the question with its buttons and returns the message's id (0: the channel has none).
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error)
	// Settle edits the question's message to what p now says: still waiting (time left), or who answered what and when.
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error
	// Notify sends a message that asks nothing, or edits one.
	Notify(ctx context.Context, n Notice) (int64, error)
	Close() error
}

// Notice is a message that asks nothing.
type Notice struct {
	Text      string
	Mono      string // follows Text as a monospace block
	SessionID string // adds the session's label and [SID:…]
	ReplyTo   int64  // message id, 0 none
	Edit      int64  // message to edit instead of sending, 0 none
	Ring      bool   // with sound; notices are silent otherwise
}

// Telegram is the Bot API channel and its poller. Its methods may be called from different goroutines.
type Telegram struct {
	store   *Store
	log     *slog.Logger
	token   string
	base    string // api_base without a slash at its end
	http    *http.Client
	cfg     atomic.Pointer[Config]
	chat    atomic.Int64 // the configured chat, or the supergroup it became
	skew    atomic.Int64 // Telegram's clock minus ours, a time.Duration
	polling atomic.Bool  // this process holds the poll lock

	mu          sync.Mutex // guards what follows
	sendTrouble string
	pollTrouble string
	slot        slot // the pacing, as far as this process knows
}

// newTelegram refuses what would otherwise fail late.
func newTelegram(cfg *Config, st *Store, log *slog.Logger) (*Telegram, error) {
	if cfg.Token == "" || cfg.ChatID == 0 || len(cfg.Users) == 0 {
		return nil, errors.New("telegram needs bot_token, chat_id and at least one of allowed_users: run atlasbridge setup")
	}
	if err := checkBaseURL(cfg.APIBase); err != nil {
		return nil, fmt.Errorf("telegram.api_base %w", err)
	}
	t := newBot(cfg.Token, cfg.APIBase)
	t.store, t.log = st, log
	t.chat.Store(cfg.ChatID)
	t.cfg.Store(cfg)
	return t, nil
}

// newBot is a Telegram that can make calls, but knows no chat and no store.
func newBot(token, base string) *Telegram {
	tr := http.DefaultTransport.(*http.Transport).Clone() // proxies from the environment; limits on dialing and TLS
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true)                                                             // a connection per request in flight: a dead long poll takes no message with it
	refuse := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse } // the token is in the path
	return &Telegram{token: token, base: strings.TrimRight(base, "/"), log: slog.New(slog.DiscardHandler),
		http: &http.Client{Transport: tr, CheckRedirect: refuse}}
}

// Close lets idle connections go. Calls in flight end with their contexts.
func (t *Telegram) Close() error {
	t.http.CloseIdleConnections()
	return nil
}

// clockSkew is how far Telegram's clock, as last heard, is ahead of ours.
func (t *Telegram) clockSkew() time.Duration { return time.Duration(t.skew.Load()) }

// Reload takes over the allowlist and limits of a new configuration; an empty allowlist is not one.
func (t *Telegram) Reload(cfg *Config) {
	if next := *t.cfg.Load(); len(cfg.Users) > 0 {
		next.Users, next.FreeText, next.MaxChars = cfg.Users, cfg.FreeText, cfg.MaxChars
		t.cfg.Store(&next)
	}
}

// Trouble is a sentence about what keeps Telegram from working (wrong token, blocked bot), "" when it works.
func (t *Telegram) Trouble() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return cmp.Or(t.sendTrouble, t.pollTrouble)
}

// note sets one of the two troubles; a new one is logged.
func (t *Telegram) note(trouble *string, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if text != "" && text != *trouble {
		t.log.Warn(text)
	}
	*trouble = text
}

// apiError is every way a call can fail. Its text never holds the URL, whose path is the token.
type apiError struct {
	method  string
	code    int // the Bot API's error_code; 0: no answer of the Bot API came (network, proxy, cut answer); −1: ours
	text    string
	after   time.Duration // retry_after
	migrate int64         // the supergroup this group became
}

func (e *apiError) Error() string {
	if e.code <= 0 {
		return fmt.Sprintf("telegram %s: %s", e.method, e.text)
	}
	return fmt.Sprintf("telegram %s: %d: %s", e.method, e.code, e.text)
}

// temporary tells whether the same request may succeed later.
func (e *apiError) temporary() bool { return e.code == 0 || e.code == 429 || e.code >= 500 }

// says tells whether the Bot API refused the request with these words.
func (e *apiError) says(words string) bool { return e.code > 0 && strings.Contains(e.text, words) }

// trouble is what an operator should know of an error that is not this one request's alone, "" otherwise.
func (e *apiError) trouble() string {
	switch {
	case e.code == 401 || e.code == 404:
		return fmt.Sprintf("Telegram refuses the bot token (%d): run atlasbridge setup", e.code)
	case e.code == 403 || e.says("chat not found"):
		return "the bot may not write to its chat (" + e.text + "): press Start there"
	case e.code == 409 && e.says("webhook"):
		return "a webhook is set for this bot, so it cannot be polled: atlasbridge setup removes it"
	case e.code == 409:
		return "another program polls with this bot's token: stop it, or give it a bot of its own"
	case e.temporary() && e.after == 0:
		return "Telegram cannot be reached, still trying: " + e.text
	}
	return ""
}

// asAPI is err as an *apiError; any other error becomes one of ours.
func asAPI(err error) *apiError {
	var e *apiError
	if !errors.As(err, &e) {
		e = &apiError{code: -1, text: err.Error()}
	}
	return e
}

// cutMessage finds the id in the answer to a sendMessage that was carried out but whose answer broke off.
var cutMessage = regexp.MustCompile(`^\{"ok":true,"result":(\{"message_id":\d+)[,}]`)

// call makes one request and decodes its result into result (nil: ignored). Errors are *apiError.
func (t *Telegram) call(ctx context.Context, method string, params, result any) error {
	limit := callTimeout
	if method == "getUpdates" {
		limit = (pollSeconds + 10) * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := json.Marshal(params)
	if err != nil {
		return &apiError{method: method, code: -1, text: "encoding the request: " + err.Error()}
	}
	target := t.base + "/bot" + t.token + "/" + method
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
	if err != nil { // its text would show the URL
		return &apiError{method: method, code: -1, text: "api_base and token do not make a URL"}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.http.Do(req)
	var data []byte
	if err == nil {
		defer resp.Body.Close()
		data, err = io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	}
	if err != nil && len(data) == 0 {
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = u.Err // without the URL
		}
		return &apiError{method: method, text: strings.ReplaceAll(err.Error(), t.token, "‹token›")}
	}
	return t.answer(method, resp, data, result)
}

// answer reads what came back: the Bot API's JSON, or a proxy's page, or a part of either.
func (t *Telegram) answer(method string, resp *http.Response, data []byte, result any) error {
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		t.skew.Store(int64(time.Until(date)))
	}
	var a struct {
		OK          bool            `json:"ok"`
		Result      json.RawMessage `json:"result"`
		ErrorCode   int             `json:"error_code"`
		Description string          `json:"description"`
		Parameters  struct {
			RetryAfter int64 `json:"retry_after"`
			MigrateTo  int64 `json:"migrate_to_chat_id"`
		} `json:"parameters"`
	}
	if err := json.Unmarshal(data, &a); err != nil || !a.OK && a.ErrorCode == 0 {
		m := cutMessage.FindSubmatch(data)
		if m == nil || resp.StatusCode != http.StatusOK {
			secs, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
			return &apiError{method: method, after: time.Duration(secs) * time.Second,
				text: fmt.Sprintf("HTTP %d with something that is not the Bot API's answer", resp.StatusCode)}
		}
		a.Result, a.OK = append(m[1], '}'), true
	}
	if !a.OK {
		return &apiError{method: method, code: a.ErrorCode, text: a.Description, migrate: a.Parameters.MigrateTo,
			after: time.Duration(a.Parameters.RetryAfter) * time.Second}
	}
	if result != nil {
		if err := json.Unmarshal(a.Result, result); err != nil {
			return &apiError{method: method, text: "a result of another shape than documented"}
		}
	}
	return nil
}

// backoff is the pause after failure n, from 0: 1 s doubling to 60 s, less up to a quarter by r in [0,1).
func backoff(n int, r float64) time.Duration {
	d := time.Minute
	if n < 6 {
		d = time.Second << n
	}
	return d - time.Duration(r*float64(d)/4)
}

// sleep waits for d or the end of ctx, whichever is first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send is call for what makes or changes a message: paced, and repeated until it is done, refused for good, or ctx
// ends. It returns the message's id; 0 when the message to change is gone, which is no error.
func (t *Telegram) send(ctx context.Context, method string, params map[string]any, urgent bool) (int64, error) {
	for failures := 0; ; {
		if err := t.pace(ctx, urgent); err != nil {
			return 0, err
		}
		var result json.RawMessage
		var sent message
		params["chat_id"] = t.chat.Load()
		err := t.call(ctx, method, params, &result)
		if err == nil {
			t.note(&t.sendTrouble, "")
			_ = json.Unmarshal(result, &sent) // deleteMessage gives only true
			return sent.ID, nil
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		e := asAPI(err)
		if text := e.trouble(); text != "" && (!e.temporary() || failures > 0) {
			t.note(&t.sendTrouble, text)
		}
		switch {
		case e.says("message is not modified"):
			id, _ := params["message_id"].(int64)
			return id, nil
		case e.says("message to edit not found") || e.says("message can't be edited"):
			return 0, nil
		case e.migrate != 0:
			t.migrate(e.migrate)
		case e.says("parse entities") && params["entities"] != nil:
			delete(params, "entities") // a question is never lost to its looks
		case e.after > 0:
			t.shareSlot(func(s slot) slot { return slot{s.next, time.Now().Add(e.after)} })
		case !e.temporary():
			return 0, err
		default:
			if err := sleep(ctx, backoff(failures, mrand.Float64())); err != nil {
				return 0, err
			}
			failures++
		}
	}
}

// migrate follows the group that became a supergroup.
func (t *Telegram) migrate(to int64) {
	t.log.Warn("the group became a supergroup: set telegram.chat_id to the new id", "chat_id", to)
	t.chat.Store(to)
}

// slot is the pacing of the chat, kept in one small file for all processes. About one message a second is allowed
// in a chat and 20 a minute in a group, https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this.
type slot struct {
	next  time.Time // when the next message may leave; in the past: that much is saved up for a burst
	until time.Time // retry_after: nothing leaves before
}

// reserve takes the next place, at most burst of them without a pause of every between, and tells how long to wait for
// it. What is not urgent takes nothing while it would have to wait, and leaves one place free: questions overtake.
func (s slot) reserve(now time.Time, every time.Duration, burst int, urgent bool) (slot, time.Duration) {
	if s.next.Sub(now) > 10*time.Minute { // not by our own doing: the clock was set back
		s.next = now
	}
	if s.until.Sub(now) > 24*time.Hour {
		s.until = now
	}
	rested := now.Add(-every * time.Duration(burst-1))
	for _, at := range []time.Time{s.until, rested} {
		if at.After(s.next) {
			s.next = at
		}
	}
	at := s.next
	if !urgent {
		if at = at.Add(every); at.After(now) {
			return s, at.Sub(now)
		}
	}
	s.next = s.next.Add(every)
	return s, max(0, at.Sub(now))
}

// pace waits until a message may leave.
func (t *Telegram) pace(ctx context.Context, urgent bool) error {
	every, burst := 1050*time.Millisecond, 3
	if t.chat.Load() < 0 { // a group: burst + 60 s / every stays below 20
		every, burst = 3900*time.Millisecond, 4
	}
	for reserved := false; ; {
		var wait time.Duration
		t.shareSlot(func(s slot) slot {
			if now := time.Now(); reserved {
				wait = s.until.Sub(now) // another process may have been told to wait meanwhile
			} else {
				s, wait = s.reserve(now, every, burst, urgent)
				reserved = wait <= 0 || urgent
			}
			return s
		})
		if wait <= 0 {
			return ctx.Err()
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// shareSlot changes the pacing under a lock. Where the file cannot be used, this process paces itself alone.
func (t *Telegram) shareSlot(change func(slot) slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f, err := openPrivate(filepath.Join(t.store.Dir, "telegram.pace"), os.O_RDWR|os.O_CREATE)
	if err == nil {
		defer f.Close() // and with it the lock
		err = lockFile(f, true)
	}
	var next, until int64
	if err == nil {
		if n, _ := fmt.Fscanf(f, "%d %d\n", &next, &until); n == 2 {
			t.slot = slot{time.Unix(0, next), time.Unix(0, until)}
		}
	}
	t.slot = change(t.slot)
	if err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "%020d %020d\n", max(0, t.slot.next.UnixNano()), max(0, t.slot.until.UnixNano())), 0)
	}
	if err != nil {
		t.log.Debug("sharing the pacing", "error", err)
	}
}

// richText is a message's text with its entities, whose offsets and lengths count UTF-16 units.
type richText struct {
	strings.Builder
	units int
	marks []entity
}

type entity struct {
	Type   string `json:"type"`
	Offset int    `json:"offset"`
	Length int    `json:"length"`
}

// line appends s as lines of their own, marked as kind ("bold", "pre") unless that is "". Nothing for an empty s.
func (r *richText) line(kind, s string) {
	if s == "" {
		return
	}
	if r.units > 0 {
		r.WriteByte('\n')
		r.units++
	}
	if kind != "" {
		r.marks = append(r.marks, entity{kind, r.units, utf16Len(s)})
	}
	r.WriteString(s)
	r.units += utf16Len(s)
}

// params are those of sendMessage and editMessageText.
func (r *richText) params(rows [][]button) map[string]any {
	p := map[string]any{"text": r.String(), "link_preview_options": map[string]bool{"is_disabled": true}}
	if len(r.marks) > 0 {
		p["entities"] = r.marks
	}
	if len(rows) > 0 {
		p["reply_markup"] = markup(rows)
	}
	return p
}

func markup(rows [][]button) map[string]any { return map[string]any{"inline_keyboard": rows} }

func utf16Len(s string) (n int) {
	for _, c := range s {
		n += utf16.RuneLen(c)
	}
	return n
}

// fitUnits is how many bytes of s, in whole characters, make at most n UTF-16 units.
func fitUnits(s string, n int) int {
	for i, c := range s {
		if n -= utf16.RuneLen(c); n < 0 {
			return i
		}
	}
	return len(s)
}

// clean makes text from elsewhere fit to leave: valid, no secret, nothing invisible, and cut to n UTF-16 units.
func clean(s string, n int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = visible(redact(strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n")))
	if fitUnits(s, n) < len(s) {
		s = s[:fitUnits(s, n-1)] + "…"
	}
	return s
}

// splitText cuts s into parts of at most n UTF-16 units, at line ends where there are any; only the line ends it
// cuts at are lost.
func splitText(s string, n int) []string {
	var parts []string
	for {
		fit := fitUnits(s, n)
		if fit == len(s) {
			return append(parts, s)
		}
		rest := fit
		if i := strings.LastIndexByte(s[:fit+1], '\n'); i > 0 {
			fit, rest = i, i+1
		}
		parts = append(parts, s[:fit])
		s = s[rest:]
	}
}

// origin is the last line of every message about a session: which one it is. sessionMark reads it back.
func origin(s *SessionRecord) string {
	line := clean(s.Tool, 40)
	for _, more := range []string{s.Label, filepath.Base(s.Cwd)} {
		if more = clean(more, 60); more != "" && more != "." {
			line += " · " + more
		}
	}
	return line + " [SID:" + shortID(s.ID) + "]"
}

var sessionMark = regexp.MustCompile(`\[SID:([0-9a-f]{8})\]\s*$`)

// button is one key of an inline keyboard.
type button struct {
	Text string `json:"text"`
	Data string `json:"callback_data"`
}

// What a button can say besides a value for Store.Decide. No choice has such a key.
const (
	tapAll    = "~all"    // show the whole question
	tapRecent = "~recent" // show the last 500 characters
	tapTick   = "~t:"     // + the keys that are then ticked, with commas
	tapSubmit = "~s:"     // + the keys that are ticked: give these choices
)

// tapData is what a button sends back, `ans:{prompt}:{session}:{nonce}:{value}` with the first 8, 8 and 16 hex digits.
func tapData(p *PromptRecord, value string) string {
	return fmt.Sprintf("ans:%s:%s:%.16s:%s", shortID(p.ID), shortID(p.SessionID), p.Nonce, value)
}

// keyboard is a question's rows of buttons. whole: all of it has been shown, so nothing is held back. ticked are the
// keys chosen so far where several may be; they live in the buttons, so that what is seen is what is submitted. What
// grants and what refuses never share a row.
func keyboard(p *PromptRecord, whole bool, ticked []string) (rows [][]button) {
	add := func(text, value string) {
		if data := tapData(p, value); len(data) <= maxCallback {
			rows = append(rows, []button{{clean(text, 64), data}})
		}
	}
	held := p.Cut && !whole
	switch {
	case p.Idle || p.Secret:
		return nil
	case p.ambiguous():
		add("↩️ Send Enter", "enter")
		add("🚫 Cancel / Skip", "cancel")
		add("🔍 Show last 500 characters", tapRecent)
		return rows
	case held:
		add("📄 Show all", tapAll)
	case p.Type == ConfirmEnter:
		add("↩️ Press Enter", "enter")
	}
	for _, c := range answers(p) {
		mark := ""
		switch on := slices.Contains(ticked, c.Key); {
		case held && (p.Multi || grants(c)):
			continue
		case p.Multi && on:
			others := slices.DeleteFunc(slices.Clone(ticked), func(k string) bool { return k == c.Key })
			add("✓ "+choiceText(p, c), tapTick+strings.Join(others, ","))
			continue
		case p.Multi:
			with := append(slices.Clone(ticked), c.Key)
			slices.Sort(with)
			add("▫️ "+choiceText(p, c), tapTick+strings.Join(with, ","))
			continue
		case (p.Permission || p.Type == YesNo) && grants(c):
			mark = "✅ "
		case p.Permission || p.Type == YesNo:
			mark = "❌ "
		}
		add(mark+choiceText(p, c), c.Key)
	}
	if p.Multi && !held {
		add("📨 Submit", tapSubmit+strings.Join(ticked, ","))
	}
	if p.SafeDefault != nil && !(held && p.Type == ConfirmEnter) {
		add("⏩ Use default ("+clean(valueName(p, *p.SafeDefault), 30)+")", "default")
	}
	return rows
}

// answers are the choices of a question; a plain yes/no need not list its two.
func answers(p *PromptRecord) []Choice {
	if p.Type == YesNo && len(p.Choices) == 0 {
		return []Choice{{Key: "y", Label: "Yes"}, {Key: "n", Label: "No"}}
	}
	return p.Choices
}

// grants tells whether a choice lets something happen, by whatever says so.
func grants(c Choice) bool { return c.Grants || c.Hook == "allow" || c.Key == "y" }

func choiceText(p *PromptRecord, c Choice) string {
	if p.Type == YesNo {
		return c.Label
	}
	return c.Key + ". " + c.Label
}

// valueName is a decision's value in a person's words.
func valueName(p *PromptRecord, v string) string {
	for _, c := range answers(p) {
		if c.Key == v {
			return choiceText(p, c)
		}
	}
	switch v {
	case "default":
		if p.SafeDefault != nil && *p.SafeDefault != v {
			return "the default, " + valueName(p, *p.SafeDefault)
		}
	case "enter":
		return "Enter"
	case "esc":
		return "Esc"
	case "":
		return "empty"
	}
	return v
}

// questionText is a question's message: what is asked, what about, what can be done, how long, by which session. body
// stands for the excerpt when more of the question is shown.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord, body string, now time.Time) *richText {
	ask, hint, left := clean(p.Question, 400), "", timeLeft(p, now)
	switch {
	case p.Idle:
		ask, hint, left = "✅ "+clean(s.Tool, 40)+" has finished", "Reply to this message with what to do next.", ""
		body = cmp.Or(clean(p.Full, 700), clean(p.Excerpt, 700))
	case p.Secret:
		ask, hint = "🔑 "+cmp.Or(ask, "A password is asked for"), "It is not asked for here: type it at the keyboard."
		if t.cfg.Load().FreeText && t.polling.Load() {
			hint = "Type it at the keyboard. Or reply with it: your message is deleted at once, but Telegram has seen it."
		}
	case p.ambiguous():
		ask, hint = "❔ Possibly a question ("+p.Confidence+" confidence)", "What should AtlasBridge do?"
	case p.Permission:
		ask, hint = "🛡️ "+cmp.Or(ask, "Permission request"), "To refuse and say why, reply with text."
	default:
		ask = "❓ " + cmp.Or(ask, "Waiting for your input")
		if p.Type == FreeText {
			hint = "Reply to this message with your answer."
		} else if p.Multi {
			hint = "Tick what applies, then Submit."
		}
	}
	r := &richText{}
	r.line("bold", ask)
	if body = cmp.Or(body, clean(p.Excerpt, 700)); !strings.HasSuffix(ask, body) {
		r.line("pre", body)
	}
	for _, c := range p.Choices {
		if utf16Len(c.Label) > 30 { // a button shows about this much
			r.line("", clean(choiceText(p, c), 80))
		}
	}
	if p.Tool != "" {
		r.line("", "🔧 "+clean(p.Tool, 60)+" in "+clean(p.Cwd, 200))
	}
	r.line("", hint)
	r.line("", left)
	r.line("", origin(s))
	return r
}

func timeLeft(p *PromptRecord, now time.Time) string {
	then := "nothing is typed"
	if p.SafeDefault != nil && !p.Secret {
		then = "default: " + clean(valueName(p, *p.SafeDefault), 80)
	}
	secs := max(0, int(p.ExpiresAt.Sub(now).Round(time.Second)/time.Second))
	return fmt.Sprintf("⏳ Expires in %dm %02ds, then %s", secs/60, secs%60, then)
}

// outcomeText is a question's message when it is over.
func outcomeText(p *PromptRecord, s *SessionRecord) *richText {
	r := &richText{}
	ask := cmp.Or(clean(p.Question, 400), "Question")
	if p.Idle {
		ask = clean(s.Tool, 40) + " had finished"
	}
	r.line("bold", ask)
	if body := clean(p.Excerpt, 700); body != ask && !p.Idle {
		r.line("pre", body)
	}
	r.line("", outcome(p))
	r.line("", origin(s))
	return r
}

// outcome says what happened to a question: who answered what, when, and from where.
func outcome(p *PromptRecord) string {
	value, at, reason := "", "", ""
	if p.Value != nil && !p.Secret {
		value = ": " + clean(valueName(p, *p.Value), 300)
	}
	if p.DecidedAt != nil {
		at = " at " + p.DecidedAt.Local().Format("15:04:05 MST")
	}
	if p.Reason != "" {
		reason = " (" + clean(p.Reason, 300) + ")"
	}
	timeout := p.Status == Expired || p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"
	switch {
	case p.Status == Failed:
		return "⚠️ Not delivered" + value + at + reason
	case p.Status == Canceled:
		return "🚫 Canceled " + byWhom(p.DecidedBy) + at + reason
	case timeout && value == "":
		return "⌛ Expired" + at + ": nothing was typed" + reason
	case timeout:
		return "⌛ No answer in time" + at + ", so the default was given" + value + reason
	case p.Status == ReplyReceived:
		return "⏱ Answered " + byWhom(p.DecidedBy) + at + value + ", on its way" + reason
	}
	return "✅ Answered " + byWhom(p.DecidedBy) + at + value + reason
}

// Ask sends the question. It rings, unless it only tells that a tool is idle.
func (t *Telegram) Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error) {
	return t.ask(ctx, p, s, "", false)
}

// ask is Ask with another body than the excerpt; whole: nothing of the question is hidden any more.
func (t *Telegram) ask(ctx context.Context, p *PromptRecord, s *SessionRecord, body string, whole bool) (int64, error) {
	params := t.questionText(p, s, body, time.Now()).params(keyboard(p, whole, nil))
	params["disable_notification"] = p.Idle
	return t.send(ctx, "sendMessage", params, !p.Idle)
}

// Settle edits the question's message, which may be a newer one than p knows, to what p now says. While a question
// waits whose message has been shown in full, or in which choices have been ticked, there is nothing to say.
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error {
	if p.MsgID == 0 || p.open() && (p.Cut || p.Multi) {
		return nil
	}
	params := outcomeText(p, s).params(nil)
	if p.open() {
		params = t.questionText(p, s, "", time.Now()).params(keyboard(p, false, nil))
	}
	params["message_id"] = p.MsgID
	if v, err := t.store.View(); err == nil && v.Prompts[p.ID] != nil {
		params["message_id"] = max(p.MsgID, v.Prompts[p.ID].MsgID)
	}
	_, err := t.send(ctx, "editMessageText", params, !p.open())
	return err
}

// Notify sends a notice in as many messages as it needs and returns the id of the last; with Edit the first of them
// is that message.
func (t *Telegram) Notify(ctx context.Context, n Notice) (id int64, err error) {
	last := ""
	if v, err := t.store.View(); err == nil && v.Sessions[n.SessionID] != nil {
		last = origin(v.Sessions[n.SessionID])
	}
	for i, r := range noticeTexts(clean(n.Text, 1<<20), clean(n.Mono, 1<<20), last) {
		params := r.params(nil)
		if i == 0 && n.Edit != 0 {
			params["message_id"] = n.Edit
			if id, err = t.send(ctx, "editMessageText", params, n.Ring); err != nil {
				return 0, err
			}
			if id != 0 {
				continue
			}
			delete(params, "message_id") // the operator deleted it
		}
		params["disable_notification"] = !n.Ring
		if n.ReplyTo != 0 {
			params["reply_parameters"] = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		}
		if id, err = t.send(ctx, "sendMessage", params, n.Ring || n.ReplyTo != 0); err != nil {
			return 0, err
		}
	}
	return id, nil
}

// noticeTexts lays a notice out: the text, the monospace part, and the session's line at the end of every message.
func noticeTexts(text, mono, last string) []*richText {
	var out []*richText
	for _, part := range splitText(text, partUnits) {
		out = append(out, &richText{})
		out[len(out)-1].line("", part)
	}
	for i, part := range splitText(mono, partUnits) {
		if i > 0 || out[len(out)-1].units+utf16Len(part) > partUnits {
			out = append(out, &richText{})
		}
		out[len(out)-1].line("pre", part)
	}
	out = slices.DeleteFunc(out, func(r *richText) bool { return strings.TrimSpace(r.String()) == "" })
	for _, r := range out {
		r.line("", last)
	}
	return out
}

// update is what of the Bot API's Update counts here; everything else is ignored.
type update struct {
	ID       int64    `json:"update_id"`
	Message  *message `json:"message"`
	Callback *press   `json:"callback_query"`
}

type message struct {
	ID            int64           `json:"message_id"`
	From          *user           `json:"from"`
	Chat          chat            `json:"chat"`
	Date          int64           `json:"date"` // Unix seconds by the server's clock
	Text          string          `json:"text"`
	ReplyTo       *message        `json:"reply_to_message"`
	MigrateTo     int64           `json:"migrate_to_chat_id"`
	SenderChat    json.RawMessage `json:"sender_chat"` // a channel, or an anonymous administrator
	ForwardOrigin json.RawMessage `json:"forward_origin"`
	ForwardDate   int64           `json:"forward_date"`
	ViaBot        json.RawMessage `json:"via_bot"`
	EditDate      int64           `json:"edit_date"`
}

type user struct {
	ID       int64  `json:"id"`
	IsBot    bool   `json:"is_bot"`
	Name     string `json:"first_name"` // names are for display only: anyone can take them
	Username string `json:"username"`
}

type chat struct {
	ID   int64  `json:"id"`
	Type string `json:"type"`
}

// press is a CallbackQuery: a button was pressed.
type press struct {
	ID      string   `json:"id"`
	From    *user    `json:"from"`
	Message *message `json:"message"`
	Data    string   `json:"data"`
}

// who is decided_by for a user.
func (u *user) who() string { return "telegram:" + strconv.FormatInt(u.ID, 10) }

// admitted decides, for every kind of update and nowhere else, whether it counts: "" or the reason why not. It counts
// when a person on the allowlist, known by number alone, wrote it himself in the configured chat.
func admitted(u *update, users []int64, chatID int64) (from *user, reason string) {
	m := u.Message
	if u.Callback != nil && m == nil {
		from, m = u.Callback.From, u.Callback.Message
	} else if m != nil && u.Callback == nil {
		from = m.From
	}
	switch {
	case m == nil || from == nil || from.IsBot || from.ID <= 0:
		return from, "nothing a person sent"
	case !slices.Contains(users, from.ID):
		return from, "not on the allowlist"
	case chatID == 0 || m.Chat.ID != chatID:
		return from, "another chat"
	case chatID > 0 && (m.Chat.Type != "private" || m.Chat.ID != from.ID):
		return from, "not a private chat"
	case chatID < 0 && m.Chat.Type != "group" && m.Chat.Type != "supergroup":
		return from, "not a group"
	case u.Callback != nil: // its message is the bot's own
		return from, ""
	case len(m.SenderChat) > 0 || len(m.ViaBot) > 0:
		return from, "sent by a chat or through a bot"
	case len(m.ForwardOrigin) > 0 || m.ForwardDate != 0 || m.EditDate != 0:
		return from, "forwarded or edited"
	}
	return from, ""
}

// receiver is a Telegram while it polls. Its fields belong to the goroutine that listens.
type receiver struct {
	*Telegram
	jobs      chan func(context.Context) // answers that may wait for the pacing, done in order by one goroutine
	toasts    sync.WaitGroup             // answers to taps under way
	lastOK    time.Time                  // of getUpdates, by the wall clock
	strangers map[string]int             // audited, by minute
}

// Poll receives for all sessions as long as this process holds the poll lock, and otherwise waits for it.
// Decisions go to Store.Decide, everything else for a session becomes an InputRecord. It returns when ctx ends, or
// when the token is refused for good.
func (t *Telegram) Poll(ctx context.Context) {
	for final := false; !final && ctx.Err() == nil; {
		beat := t.lastBeat()
		release, held, err := t.store.TryPoll()
		switch {
		case err != nil:
			t.note(&t.pollTrouble, "the poll lock cannot be used: "+err.Error())
		case held:
			t.polling.Store(true)
			final = t.receive(ctx, beat)
			t.polling.Store(false)
			release()
		case time.Since(beat) > 2*tapLife: // stopped, or stuck; a held lock is never taken away
			t.note(&t.pollTrouble, "the atlasbridge that listens to Telegram has been silent for long: see atlasbridge status")
		default:
			t.note(&t.pollTrouble, "")
		}
		_ = sleep(ctx, time.Second) // so another takes over within 2 s
	}
}

// lastBeat is when any poller last got an answer: the time of change of its lock file.
func (t *Telegram) lastBeat() time.Time {
	info, err := os.Stat(filepath.Join(t.store.Dir, "poll.lock"))
	if err != nil {
		return time.Now().Round(0)
	}
	return info.ModTime()
}

// receive is Poll with the lock held. It returns true when polling makes no sense any more.
func (t *Telegram) receive(ctx context.Context, beat time.Time) (final bool) {
	ctx, stop := context.WithCancel(ctx)
	r := &receiver{Telegram: t, jobs: make(chan func(context.Context), 64), lastOK: beat, strangers: map[string]int{}}
	var worker sync.WaitGroup
	worker.Go(func() {
		for {
			select {
			case job := <-r.jobs:
				job(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	defer worker.Wait()
	defer r.toasts.Wait()
	defer stop()
	r.later(r.register)
	return r.listen(ctx)
}

// later queues a job for the worker. When 64 wait already the chat is far behind, and the job is dropped.
func (r *receiver) later(job func(context.Context)) {
	select {
	case r.jobs <- job:
	default:
		r.log.Warn("too many answers wait to be sent to Telegram: one was dropped")
	}
}

// try makes an attempt at something the operator would like to see, from the worker.
func (r *receiver) try(method string, params map[string]any) {
	r.later(func(ctx context.Context) {
		if _, err := r.send(ctx, method, params, true); err != nil && ctx.Err() == nil {
			r.log.Warn("answering the operator", "error", err)
		}
	})
}

// listen polls until ctx ends or the lock is lost (false), or the token is refused (true).
func (r *receiver) listen(ctx context.Context) (final bool) {
	params := map[string]any{"allowed_updates": []string{"message", "callback_query"}}
	for failures, timeout := 0, 1; ctx.Err() == nil; { // the first poll is short: to know soon whether all is well
		params["timeout"] = timeout
		var updates []json.RawMessage
		err := r.awake(ctx, func(ctx context.Context) error { return r.call(ctx, "getUpdates", params, &updates) })
		if err == nil {
			r.note(&r.pollTrouble, "")
			for _, raw := range updates {
				var id int64
				if id, err = r.take(ctx, raw); err != nil {
					r.note(&r.pollTrouble, "an answer cannot be recorded, so it is not acted on: "+err.Error())
					break // not on disk, so not confirmed: it comes again
				}
				params["offset"] = id + 1 // assigned, never the maximum: ids restart at random after a week (server)
			}
			r.recovered(ctx)
		}
		if failures, timeout = failures+1, 1; err == nil {
			failures, timeout = 0, pollSeconds
			continue
		}
		e := asAPI(err)
		if text := e.trouble(); text != "" && (failures > 1 || !e.temporary()) && ctx.Err() == nil {
			r.note(&r.pollTrouble, text)
		}
		pause := cmp.Or(e.after, backoff(failures-1, mrand.Float64()))
		switch e.code {
		case 401, 404:
			return true
		case 409: // two pollers: is the lock still ours?
			if release, free, err := r.store.TryPoll(); err == nil && free {
				release()
				return false
			}
			pause = max(pause, 5*time.Second)
		}
		_ = sleep(ctx, pause)
	}
	return false
}

// awake runs a long request and ends it when the machine has slept meanwhile: the connection will not have survived.
func (r *receiver) awake(ctx context.Context, request func(context.Context) error) error {
	const beat = 10 * time.Second
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the request
		for last := time.Now().Round(0); sleep(ctx, beat) == nil; last = time.Now().Round(0) {
			if time.Since(last) > 3*beat { // by the wall clock, which goes on while the machine sleeps
				cancel()
			}
		}
	}()
	return request(ctx)
}

// recovered notes a successful poll. After an outage longer than a tap lives, taps may be lost: what still waits is
// offered again.
func (r *receiver) recovered(ctx context.Context) {
	now := time.Now().Round(0)
	gap := now.Sub(r.lastOK)
	r.lastOK = now
	_ = os.Chtimes(filepath.Join(r.store.Dir, "poll.lock"), now, now) // a sign of life, nothing else
	v, err := r.store.View()
	if err != nil || gap <= tapLife {
		return
	}
	for _, p := range v.Prompts {
		if p.Status == AwaitingReply && p.MsgID != 0 && !p.Idle && now.Sub(p.At) > tapLife && now.Before(p.ExpiresAt) {
			r.later(func(ctx context.Context) { r.offer(ctx, p.ID, "", false) })
		}
	}
}

// take acts on one update. An error means that nothing was done and the update must come again.
func (r *receiver) take(ctx context.Context, raw json.RawMessage) (id int64, err error) {
	var u update
	if json.Unmarshal(raw, &u) != nil {
		var only struct {
			ID int64 `json:"update_id"`
		}
		return only.ID, json.Unmarshal(raw, &only) // what cannot be read is confirmed unread
	}
	from, reason := admitted(&u, r.cfg.Load().Users, r.chat.Load())
	if reason != "" {
		r.stranger(&u, from, reason)
		return u.ID, nil
	}
	v, err := r.store.View()
	switch {
	case err != nil || v.Updates[strconv.FormatInt(u.ID, 10)] != nil:
	case u.Callback != nil:
		err = r.tap(ctx, u.ID, u.Callback, v)
	default:
		err = r.said(ctx, u.ID, u.Message, v)
	}
	return u.ID, err
}

// stranger audits an update that does not count, at most ten a minute, and does nothing else.
func (r *receiver) stranger(u *update, from *user, reason string) {
	minute := time.Now().UTC().Format("15:04")
	if _, same := r.strangers[minute]; !same {
		clear(r.strangers)
	}
	if r.strangers[minute]++; r.strangers[minute] <= 10 {
		e := Event{Name: "UNAUTHORIZED", Fields: []Field{{"update_id", u.ID}, {"reason", reason}}}
		if from != nil {
			e.Fields = append(e.Fields, Field{"by", from.who()})
		}
		r.audit(e)
	}
}

func (r *receiver) audit(e Event) {
	if err := r.store.Audit().Append(e); err != nil {
		r.log.Warn("auditing "+e.Name, "error", err)
	}
}

// reject audits an answer of the operator that changed nothing, and records its update as done with.
func (r *receiver) reject(id int64, from *user, p *PromptRecord, reason string) error {
	e := Event{Name: "REPLY_REJECTED", Fields: []Field{{"reason", reason}, {"by", from.who()}}}
	if p != nil {
		e.SessionID, e.PromptID = p.SessionID, p.ID
	}
	r.audit(e)
	return r.once(id, "rejected")
}

// once records that an update has been acted on, together with what it led to.
func (r *receiver) once(id int64, kind string, with ...Record) error {
	return r.store.Update(func(*View) ([]Record, error) {
		return append(with, &UpdateRecord{Head: Head{ID: strconv.FormatInt(id, 10)}, Kind: kind}), nil
	})
}

// toast answers a tap: a line on the phone, or a box to be closed when it says that nothing was done.
func (r *receiver) toast(ctx context.Context, q *press, text string, box bool) {
	r.toasts.Go(func() {
		params := map[string]any{"callback_query_id": q.ID, "text": clean(text, maxToast), "show_alert": box}
		if err := r.call(ctx, "answerCallbackQuery", params, nil); err != nil {
			r.log.Debug("answering a tap", "error", err) // too old is not worth another try
		}
	})
}

// tapped finds the question a button belongs to. All its fields must match; the nonce is compared in constant time.
func tapped(data string, v *View) (p *PromptRecord, value string) {
	f := strings.SplitN(data, ":", 5)
	if len(f) != 5 || f[0] != "ans" || len(f[3]) != 16 {
		return nil, ""
	}
	for _, p := range v.Prompts {
		if shortID(p.ID) == f[1] && shortID(p.SessionID) == f[2] && len(p.Nonce) >= 16 &&
			subtle.ConstantTimeCompare([]byte(p.Nonce[:16]), []byte(f[3])) == 1 {
			return p, f[4]
		}
	}
	return nil, ""
}

// tap acts on a pressed button. The phone is told at once; what takes longer is left to the worker.
func (r *receiver) tap(ctx context.Context, id int64, q *press, v *View) error {
	p, value := tapped(q.Data, v)
	for tries := 0; p != nil && p.open() && q.Message.ID > p.MsgID && tries < 100; tries++ {
		if err := sleep(ctx, 10*time.Millisecond); err != nil { // until the record of that message is written
			return err
		}
		if v, err := r.store.View(); err == nil {
			p, value = tapped(q.Data, v)
		}
	}
	refusal := ""
	if p == nil {
		refusal = "This question is not known any more. Nothing was done."
	} else if q.Message.ID != p.MsgID {
		refusal = "This message is out of date: answer in the newest one of this question. Nothing was done."
	}
	if refusal != "" {
		r.toast(ctx, q, refusal, true)
		r.try("editMessageReplyMarkup", map[string]any{"message_id": q.Message.ID})
		return r.reject(id, q.From, p, refusal)
	}
	keys, submit := strings.CutPrefix(value, tapSubmit)
	switch {
	case submit:
		value = keys
	case strings.HasPrefix(value, "~") && p.open():
		if err := r.once(id, "callback_query"); err != nil {
			return err
		}
		r.show(ctx, q, p, value)
		return nil
	}
	d := Decision{PromptID: p.ID, SessionID: p.SessionID, Nonce: p.Nonce, Value: value, By: q.From.who(), UpdateID: id}
	now, why, err := r.store.Decide(d, time.Now())
	switch {
	case err != nil:
		r.toast(ctx, q, "It could not be recorded, so nothing was done yet; it is tried again.", true)
		return err
	case why != "":
		r.toast(ctx, q, "Nothing was done: "+string(why), true)
		r.later(func(ctx context.Context) { r.settle(ctx, now) })
		return r.reject(id, q.From, p, string(why))
	}
	r.toast(ctx, q, "✓ "+valueName(p, value), false)
	return nil
}

// settle shows in its message what became of a question that is over, whichever session it belongs to.
func (r *receiver) settle(ctx context.Context, p PromptRecord) {
	if v, err := r.store.View(); err == nil && v.Sessions[p.SessionID] != nil && !p.open() {
		if err := r.Settle(ctx, &p, v.Sessions[p.SessionID]); err != nil {
			r.log.Warn("editing a question's message", "error", err)
		}
	}
}

// show does what a button asks that decides nothing: tick a choice, or show more.
func (r *receiver) show(ctx context.Context, q *press, p *PromptRecord, value string) {
	if keys, ok := strings.CutPrefix(value, tapTick); ok {
		r.toast(ctx, q, "", false)
		ticked := strings.FieldsFunc(keys, func(c rune) bool { return c == ',' })
		rows := keyboard(p, true, ticked)
		r.try("editMessageReplyMarkup", map[string]any{"message_id": q.Message.ID, "reply_markup": markup(rows)})
		return
	}
	r.toast(ctx, q, "Here it is", false)
	body := p.Recent
	if value == tapAll {
		body = p.Full
	}
	r.later(func(ctx context.Context) { r.offer(ctx, p.ID, body, value == tapAll) })
}

// offer sends a waiting question again, with another body if there is one, and makes the new message the one whose
// buttons count.
func (r *receiver) offer(ctx context.Context, id, body string, whole bool) {
	v, err := r.store.View()
	if err != nil || v.Prompts[id] == nil || !v.Prompts[id].open() || v.Sessions[v.Prompts[id].SessionID] == nil {
		return
	}
	p, s := *v.Prompts[id], v.Sessions[v.Prompts[id].SessionID]
	ctx, cancel := context.WithDeadline(ctx, p.ExpiresAt)
	defer cancel()
	parts := splitText(clean(body, 1<<20), partUnits-600)
	for _, part := range parts[:len(parts)-1] {
		if _, err = r.Notify(ctx, Notice{Mono: part, SessionID: s.ID, ReplyTo: p.MsgID}); err != nil {
			return // not shown in full, so not to be allowed
		}
	}
	msg, err := r.ask(ctx, &p, s, parts[len(parts)-1], whole)
	old := p.MsgID
	if err == nil {
		err = r.store.Update(func(v *View) ([]Record, error) {
			if now := v.Prompts[id]; now != nil {
				p = *now
			}
			p.MsgID = msg
			return []Record{&p}, nil
		})
	}
	if err != nil {
		r.log.Warn("offering a question again", "error", err)
		return
	}
	r.settle(ctx, p) // if it has been answered meanwhile
	r.try("editMessageReplyMarkup", map[string]any{"message_id": old})
}

// botCommands is what the operator can type, as setMyCommands takes it.
func botCommands() (list []map[string]string) {
	for _, line := range []string{
		"start what this is", "help all commands",
		"status open questions, and the head of the audit log",
		"sessions what is running",
		"switch SID: text that is no reply goes to this session",
		"send SID TEXT: send text to a session",
		"claim SID: all text goes to this session, until /release",
		"release undo /claim and /switch",
		"cancel SID: end the session's program",
		"keys SID CTRL_C: press keys",
		"screen SID: show the screen", "last SID: show the end of the screen",
	} {
		name, about, _ := strings.Cut(line, " ")
		list = append(list, map[string]string{"command": name, "description": about})
	}
	return list
}

// register tells Telegram the commands, for the configured chat alone, unless it knows them.
func (r *receiver) register(ctx context.Context) {
	scope := map[string]any{"type": "chat", "chat_id": r.chat.Load()}
	var known []map[string]string
	err := r.call(ctx, "getMyCommands", map[string]any{"scope": scope}, &known)
	if want := botCommands(); err == nil && !reflect.DeepEqual(known, want) {
		err = r.call(ctx, "setMyCommands", map[string]any{"scope": scope, "commands": want}, nil)
	}
	if err != nil {
		r.log.Info("registering the commands", "error", err)
	}
}

// keyBytes is what a key of /keys sends; appCursor: the program has switched the arrows to application mode (DECCKM).
// The codes are xterm's, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html.
func keyBytes(name string, appCursor bool) (string, bool) {
	name = strings.ToUpper(name)
	if c, ok := strings.CutPrefix(name, "CTRL_"); ok && len(c) == 1 && c[0] >= '@' && c[0] <= '_' {
		return string(rune(c[0] & 0x1f)), true
	}
	arrow := "\x1b["
	if appCursor {
		arrow = "\x1bO"
	}
	b, ok := map[string]string{"ENTER": "\r", "ESC": "\x1b", "TAB": "\t", "SHIFT_TAB": "\x1b[Z", "SPACE": " ",
		"BACKSPACE": "\x7f", "DELETE": "\x1b[3~", "PGUP": "\x1b[5~", "PGDN": "\x1b[6~", "UP": arrow + "A",
		"DOWN": arrow + "B", "RIGHT": arrow + "C", "LEFT": arrow + "D", "HOME": arrow + "H", "END": arrow + "F"}[name]
	return b, ok
}

// operatorText is a message's text as data: no control characters but newline and tab; "" and false when it came
// damaged.
func operatorText(s string) (text string, ok bool) {
	if !utf8.ValidString(s) || strings.ContainsRune(s, utf8.RuneError) || utf16Len(s) > messageUnits {
		return "", false
	}
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
	return strings.Map(func(c rune) rune {
		if c < ' ' && c != '\n' && c != '\t' || c >= 0x7f && c < 0xa0 {
			return -1
		}
		return c
	}, s), true
}

// wish is what a message asks for: an answer now, or one thing to be done.
type wish struct {
	reply    string
	decision *Decision
	secret   bool // the decision's value is a password
	input    *InputRecord
	meta     map[string]string // changes of the record "telegram"; "" removes a value
}

// said acts on a message.
func (r *receiver) said(ctx context.Context, id int64, m *message, v *View) (err error) {
	if m.MigrateTo != 0 {
		r.migrate(m.MigrateTo)
	}
	at := time.Unix(m.Date, 0).Add(time.Second)
	if skew := r.clockSkew(); skew.Abs() > 3*time.Second { // less may be rounding and the network
		at = at.Add(-skew)
	}
	w := (&heard{message: m, view: v, at: at, by: m.From.who()}).understand()
	if w.secret {
		r.later(func(ctx context.Context) { r.erase(ctx, m.ID) })
		if !r.cfg.Load().FreeText {
			w = wish{reply: "✗ A password cannot be given from here: type it at the keyboard."}
		}
	}
	switch {
	case w.decision != nil:
		w.decision.UpdateID = id
		p, why, failed := r.store.Decide(*w.decision, time.Now())
		if err = failed; err == nil && why != "" {
			w.reply, err = "✗ Nothing was done: "+string(why), r.reject(id, m.From, &p, string(why))
		}
	case w.input != nil:
		w.input.UpdateID = id
		if err = r.once(id, "message", w.input); err == nil && w.input.Kind != "text" {
			r.audit(Event{Name: "SESSION_COMMAND", SessionID: w.input.SessionID,
				Fields: []Field{{"command", w.input.Kind}, {"by", w.input.By}}})
		}
	case w.reply != "":
		err = r.change(id, v, w.meta)
	}
	if err != nil {
		w.reply = "✗ It could not be recorded, so nothing was done yet; it is tried again."
	}
	if w.reply != "" {
		r.later(func(ctx context.Context) {
			if _, err := r.Notify(ctx, Notice{Text: w.reply, ReplyTo: m.ID}); err != nil {
				r.log.Warn("answering the operator", "error", err)
			}
		})
	}
	return err
}

// erase deletes a message with a password in it.
func (r *receiver) erase(ctx context.Context, msg int64) {
	if _, err := r.send(ctx, "deleteMessage", map[string]any{"message_id": msg}, true); err != nil && ctx.Err() == nil {
		_, _ = r.Notify(ctx, Notice{Text: "⚠️ Your message could not be deleted: delete it yourself.", ReplyTo: msg, Ring: true})
	}
}

// change records an update, and what it changes of the record "telegram".
func (r *receiver) change(id int64, v *View, values map[string]string) error {
	next := &MetaRecord{Head: Head{ID: "telegram"}, Values: map[string]string{}}
	if m := v.Meta["telegram"]; m != nil {
		maps.Copy(next.Values, m.Values)
	}
	maps.Copy(next.Values, values)
	maps.DeleteFunc(next.Values, func(_, value string) bool { return value == "" })
	if values == nil {
		return r.once(id, "message")
	}
	return r.once(id, "message", next)
}

// heard is a message of the operator together with all that decides what it means.
type heard struct {
	*message
	view *View
	at   time.Time // the end of the second it was written in, by our clock
	by   string
}

// understand tells what a message asks for. It changes nothing.
func (h *heard) understand() wish {
	text, ok := operatorText(h.Text)
	if !ok {
		return wish{reply: "✗ This text came damaged. Nothing was done."}
	}
	if strings.HasPrefix(text, "/") {
		name, rest := cutWord(text[1:])
		name, _, _ = strings.Cut(strings.ToLower(name), "@")
		return h.command(name, rest)
	}
	s, p, refusal := h.target("")
	switch {
	case strings.TrimSpace(text) == "" && h.MigrateTo == 0:
		return wish{reply: "✗ Only text can be sent to a session."}
	case s == nil:
		return wish{reply: refusal}
	}
	return h.speak(s, p, text)
}

// cutWord splits off the first word.
func cutWord(s string) (word, rest string) {
	if i := strings.IndexAny(s, " \t\n"); i >= 0 {
		return s[:i], strings.TrimLeft(s[i:], " \t\n")
	}
	return s, ""
}

// command does what is answered from the state, and turns the rest into something for a session.
func (h *heard) command(name, line string) wish {
	sid, rest := cutWord(line)
	example := ""
	switch name {
	case "start", "help":
		text := "The questions of your atlasbridge sessions come here. Tap an answer, or reply to a message with text.\n"
		for _, c := range botCommands() {
			text += "\n/" + c["command"] + "  " + c["description"]
		}
		return wish{reply: text}
	case "status":
		return wish{reply: h.status()}
	case "sessions":
		return wish{reply: sessionList("Running:", h.view)}
	case "release":
		return wish{reply: "Released: text goes to what it replies to.", meta: map[string]string{"claim " + h.by: "", "switch " + h.by: ""}}
	case "keys":
		example = "CTRL_C"
		if _, ok := keyBytes(sid, false); ok {
			sid, rest = "", line
		}
		for _, key := range strings.Fields(rest) {
			if _, ok := keyBytes(key, false); !ok {
				return wish{reply: "✗ There is no key " + key + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB SHIFT_TAB SPACE " +
					"BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
			}
		}
	case "send":
		example = "go on"
	case "switch", "claim", "cancel", "screen", "last":
	default:
		var names []string
		for _, c := range botCommands() {
			names = append(names, c["command"])
		}
		reply := "✗ There is no /" + name + " here."
		if near := nearest(name, names); near != "" {
			reply += " Did you mean /" + near + "?"
		}
		return wish{reply: reply + " To send it to a session as it is: /send SID /" + name}
	}
	s, _, refusal := h.target(sid)
	switch {
	case s == nil:
		return wish{reply: cmp.Or(refusal, sessionList("✗ Which session? Running:", h.view))}
	case name == "switch" || name == "claim":
		return wish{reply: "Your text goes to " + origin(s), meta: map[string]string{name + " " + h.by: s.ID}}
	case rest == "" && example != "":
		return wish{reply: "✗ What? Example: /" + name + " " + shortID(s.ID) + " " + example}
	case name == "send":
		return h.speak(s, nil, rest)
	}
	return wish{input: h.input(s, name, rest)}
}

func (h *heard) input(s *SessionRecord, kind, text string) *InputRecord {
	return &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: kind, Text: text, By: h.by, ReplyTo: h.ID, Status: "queued"}
}

// target finds the session meant: the one named, or whose message this replies to (then also the question asked
// there), or the claimed or switched one, or the only one. Otherwise it refuses with the list: it never guesses.
// No session and no refusal: people talking in a group.
func (h *heard) target(sid string) (s *SessionRecord, p *PromptRecord, refusal string) {
	var live, named []*SessionRecord
	for _, s := range h.view.Sessions {
		if s.Status == "active" {
			live = append(live, s)
		}
		if sid != "" && (strings.HasPrefix(s.ID, strings.ToLower(sid)) || s.Label == sid) {
			named = append(named, s)
		}
	}
	held := ""
	if m := h.view.Meta["telegram"]; m != nil {
		held = cmp.Or(m.Values["claim "+h.by], m.Values["switch "+h.by])
	}
	replied, p := h.replied()
	switch {
	case sid != "" && len(named) != 1:
		return nil, nil, sessionList("✗ "+sid+" does not name one session. Running:", h.view)
	case sid != "":
		s, p = named[0], nil
	case replied != nil:
		s = replied
	case held != "" && h.view.Sessions[held] != nil:
		s = h.view.Sessions[held]
	case h.Chat.ID < 0:
		return nil, nil, ""
	case len(live) == 1:
		s = live[0]
	default:
		return nil, nil, sessionList("✗ Which session? Reply to one of its messages, or /switch SID. Running:", h.view)
	}
	if s.Status != "active" {
		return nil, nil, sessionList("✗ "+origin(s)+" has ended. Nothing was sent. Running:", h.view)
	}
	if h.at.Before(s.StartedAt) {
		return nil, nil, "✗ That was written before " + origin(s) + " began. Nothing was sent."
	}
	return s, p, ""
}

// replied is the session, and the question if it was one, whose message this replies to.
func (h *heard) replied() (*SessionRecord, *PromptRecord) {
	if h.ReplyTo == nil {
		return nil, nil
	}
	for _, p := range h.view.Prompts {
		if p.MsgID != 0 && p.MsgID == h.ReplyTo.ID {
			return h.view.Sessions[p.SessionID], p
		}
	}
	m := sessionMark.FindStringSubmatch(h.ReplyTo.Text)
	for _, s := range h.view.Sessions {
		if m != nil && shortID(s.ID) == m[1] && h.ReplyTo.From != nil && h.ReplyTo.From.IsBot {
			return s, nil
		}
	}
	return nil, nil
}

// speak gives text to a session: as the answer to its open question, or as free input. p is the question replied to.
func (h *heard) speak(s *SessionRecord, p *PromptRecord, text string) wish {
	replied := p != nil
	for _, open := range h.view.Prompts {
		if p == nil && open.SessionID == s.ID && open.Status == AwaitingReply {
			p = open
		}
	}
	switch {
	case p == nil || p.Idle:
		return wish{input: h.input(s, "text", text)}
	case !replied && h.at.Before(p.CreatedAt):
		return wish{reply: "✗ You wrote that before this was asked, so nothing was sent: " + p.Question}
	case !replied && p.Secret:
		return wish{reply: "✗ " + origin(s) + " waits for a password, so nothing was sent."}
	}
	value, refusal := answerTo(p, text, replied)
	if refusal != "" {
		return wish{reply: "✗ " + refusal}
	}
	return wish{secret: p.Secret, decision: &Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: value, By: h.by}}
}

// answerTo turns text into a value for Store.Decide: a choice by its key or label, several by their keys; else the
// text itself, which refuses a permission when it replies to the question.
func answerTo(p *PromptRecord, text string, replied bool) (value, refusal string) {
	words, keys := []string{strings.TrimSpace(text)}, []string{}
	if p.Multi {
		words = strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == ' ' })
	}
	for _, word := range words {
		for _, c := range answers(p) {
			if !strings.EqualFold(word, c.Key) && !strings.EqualFold(word, c.Label) {
				continue
			}
			if p.Cut && grants(c) {
				return "", "Not all of it was shown: tap Show all, then answer there."
			}
			keys = append(keys, c.Key)
		}
	}
	switch {
	case p.Secret:
		return text, ""
	case len(keys) > 0 && len(keys) == len(words):
		return strings.Join(keys, ","), ""
	case p.Permission && replied:
		return "deny:" + text, ""
	case p.Permission:
		return "", "A permission is asked for: tap a button, or reply to that message to refuse and say why. " + p.Question
	}
	return text, ""
}

// status is what /status shows: what waits, and the audit log's head, which the chat then witnesses.
func (h *heard) status() string {
	text := sessionList("Running:", h.view)
	for _, p := range h.view.Prompts {
		if s := h.view.Sessions[p.SessionID]; s != nil && p.open() && !p.Idle {
			text += "\n\n❓ " + clean(p.Question, 100) + "\n" + timeLeft(p, time.Now()) + "\n" + origin(s)
		}
	}
	if a := h.view.Meta["audit"]; a != nil {
		text += fmt.Sprintf("\n\nAudit log: %d %s", a.Seq, a.Hash)
	}
	return text + fmt.Sprintf("\nListening: process %d", os.Getpid())
}

// sessionList is the running sessions under a heading.
func sessionList(heading string, v *View) string {
	var lines []string
	for _, s := range v.Sessions {
		if s.Status == "active" {
			lines = append(lines, "\n• "+cmp.Or(strings.ReplaceAll(s.Activity, "_", " "), "running")+": "+origin(s))
		}
	}
	slices.Sort(lines)
	if lines == nil {
		lines = []string{"\nnothing"}
	}
	return heading + strings.Join(lines, "")
}

// cmdSetup connects a bot: token, who the operator is, config.toml, a test. What is there already is kept.
//
// The code is shown in this terminal and has to come from the phone, not the other way round: whoever sends it has
// seen this terminal, so a stranger who writes to the bot first is not taken for the operator by a careless "y".
func cmdSetup(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	if err := (&setup{command: c, o: o}).run(); err != nil {
		return c.fail(err)
	}
	return 0
}

// setup is one run of cmdSetup.
type setup struct {
	*command
	o      *options
	bot    *Telegram
	offset int64
	config Config // as far as config.toml has it
}

func (s *setup) say(format string, args ...any) { fmt.Fprintf(s.stdout, format+"\n", args...) }

func (s *setup) run() error {
	dir, err := stateDir(s.getenv)
	if err == nil {
		err = secureDir(dir)
	}
	if err != nil {
		return err
	}
	path := filepath.Join(dir, "config.toml")
	old, err := readConfigFile(path)
	if err != nil {
		return err
	}
	s.config.SafeDefaults = map[PromptType]string{}
	for _, row := range settings() {
		if e, ok := old[row.key]; ok && strings.HasPrefix(row.key, "telegram.") {
			if err := row.put(&s.config, e.value); err != nil {
				return fmt.Errorf("config.toml:%d: %s %w", e.line, row.key, err)
			}
		}
	}
	token, err := s.token()
	if err = cmp.Or(err, checkToken(token)); err != nil || token == "" {
		return fmt.Errorf("bot token: %w", cmp.Or(err, errors.New("none given")))
	}
	base := cmp.Or(s.o.text("api-base"), s.getenv("TELEGRAM_API_BASE"), s.config.APIBase, "https://api.telegram.org")
	if err := checkBaseURL(base); err != nil {
		return fmt.Errorf("api base: %w", err)
	}
	st, err := openStore(dir)
	if err != nil {
		return err
	}
	defer st.Close()
	s.bot = newBot(token, base)
	s.bot.store = st
	var me user
	if err := s.bot.call(s.ctx, "getMe", map[string]any{}, &me); err != nil {
		return hinted(err, "401 or 404: the token is not valid, ask @BotFather for it; otherwise check the network")
	}
	s.say("Bot: @%s", me.Username)
	release, held, err := st.TryPoll()
	if err != nil {
		return err
	}
	if held {
		defer release()
	}
	if err := s.webhook(); err != nil {
		return err
	}
	if err := s.operator(me.Username, held); err != nil {
		return err
	}
	values := [][2]string{{"bot_token", strconv.Quote(token)}, {"chat_id", fmt.Sprint(s.config.ChatID)},
		{"allowed_users", strings.ReplaceAll(fmt.Sprint(s.config.Users), " ", ", ")}}
	if base != "https://api.telegram.org" {
		values = append(values, [2]string{"api_base", strconv.Quote(base)})
	}
	if err := writeConfig(path, values); err != nil {
		return fmt.Errorf("writing config.toml: %w", err)
	}
	s.say("Written: %s", path)
	return s.test(held)
}

// token finds the bot token: file, standard input, environment, configuration; or asks, without echo.
func (s *setup) token() (string, error) {
	in := io.Reader(s.stdin)
	switch name := s.o.text("token-file"); {
	case name != "":
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	case s.o.on("token-stdin"):
	case s.getenv("TELEGRAM_BOT_TOKEN") != "":
		return s.getenv("TELEGRAM_BOT_TOKEN"), nil
	case s.config.Token != "":
		return s.config.Token, nil
	case !onTerminal(s.stdin):
		return "", errors.New("give it by --token-file, --token-stdin or TELEGRAM_BOT_TOKEN")
	default:
		fmt.Fprint(s.stdout, "Make a bot with @BotFather (/newbot) and paste its token here (it is not shown): ")
		text, err := term.ReadPassword(int(s.stdin.Fd()))
		s.say("")
		return strings.TrimSpace(string(text)), err
	}
	text, err := io.ReadAll(io.LimitReader(in, 1024))
	return strings.TrimSpace(string(text)), err
}

// webhook removes a webhook, which keeps a bot from being polled, if the user agrees.
func (s *setup) webhook() error {
	var hook struct{ URL string }
	if err := s.bot.call(s.ctx, "getWebhookInfo", map[string]any{}, &hook); err != nil || hook.URL == "" {
		return err
	}
	if !s.o.on("yes") {
		fmt.Fprintf(s.stdout, "This bot sends its updates to %s. Remove that webhook? (y/n) ", visible(hook.URL))
		if answer, _ := bufio.NewReader(s.stdin).ReadString('\n'); strings.TrimSpace(answer) != "y" {
			return errors.New("a bot with a webhook cannot be polled: remove it, or make another bot")
		}
	}
	return s.bot.call(s.ctx, "deleteWebhook", map[string]any{}, nil)
}

// operator finds chat and user: by flag, as configured, or by a code from the phone.
func (s *setup) operator(bot string, held bool) error {
	c := &s.config
	for name, set := range map[string]func(int64){"chat-id": func(id int64) { c.ChatID = id },
		"user-id": func(id int64) { c.Users, c.ChatID = append(c.Users, id), cmp.Or(c.ChatID, id) }} {
		if text := s.o.text(name); text != "" {
			id, err := strconv.ParseInt(text, 10, 64)
			if err != nil || id == 0 || name == "user-id" && (id < 0 || slices.Contains(c.Users, id)) {
				return fmt.Errorf("--%s %s: must be a new number, not a name", name, clip(visible(text), 40))
			}
			set(id)
		}
	}
	if c.ChatID != 0 && len(c.Users) > 0 {
		s.say("Chat %d, allowed users %v", c.ChatID, c.Users)
		return nil
	}
	if !held {
		return hinted(errors.New("a running session listens to this bot"), "end it first, or give --chat-id and --user-id")
	}
	number, err := rand.Int(rand.Reader, big.NewInt(1_000_000))
	if err != nil {
		return err
	}
	code, tries := fmt.Sprintf("%06d", number), map[int64]int{}
	s.say("Open https://t.me/%s, send it anything (or press Start), then send it this code:  %s", bot, code)
	return s.wait(func(u *update) bool {
		m := u.Message
		if m == nil || m.From == nil {
			return false
		}
		if _, reason := admitted(u, []int64{m.From.ID}, m.Chat.ID); reason != "" {
			return false
		}
		name := clip(visible(m.From.Name), 40)
		if tries[m.From.ID]++; tries[m.From.ID] > 5 { // five of a million
			return false
		}
		if subtle.ConstantTimeCompare([]byte(strings.TrimSpace(m.Text)), []byte(code)) == 1 {
			c.ChatID, c.Users = m.Chat.ID, append(c.Users, m.From.ID)
			s.say("\nConfirmed: %s, user %d, in %s chat %d", name, m.From.ID, m.Chat.Type, m.Chat.ID)
			return true
		}
		s.say("\n%s (user %d) wrote. If that is you, send the code now.", name, m.From.ID)
		return false
	})
}

// wait polls until done says so, a dot for every round.
func (s *setup) wait(done func(*update) bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	params := map[string]any{"timeout": 10, "allowed_updates": []string{"message", "callback_query"}}
	for failures := 0; ; {
		var updates []update
		err := s.bot.call(ctx, "getUpdates", params, &updates)
		if ctx.Err() != nil {
			return hinted(errors.New("nothing came within 10 minutes"), "run atlasbridge setup again; there will be another code")
		}
		if err != nil {
			if failures++; !asAPI(err).temporary() || failures > 10 {
				return hinted(err, asAPI(err).trouble())
			}
			_ = sleep(ctx, max(asAPI(err).after, backoff(failures-1, 0)))
			continue
		}
		fmt.Fprint(s.stdout, ".")
		for i := range updates {
			params["offset"] = updates[i].ID + 1
			if done(&updates[i]) {
				params["timeout"] = 0
				return s.bot.call(ctx, "getUpdates", params, nil) // confirms what was read
			}
		}
	}
}

// test sends a message with a button and waits until it is pressed.
func (s *setup) test(held bool) error {
	if s.o.on("no-test") {
		return nil
	}
	s.bot.chat.Store(s.config.ChatID)
	text, data := &richText{}, "setup:"+newNonce()
	text.line("", "AtlasBridge is connected. Press the button to finish the setup.")
	id, err := s.bot.send(s.ctx, "sendMessage", text.params([][]button{{{"✅ It works", data}}}), true)
	if err != nil {
		return hinted(err, "press Start in the bot's chat, then run atlasbridge setup again")
	}
	if !held {
		s.say("A test message was sent. Its button is for the session that listens to this bot.")
		return nil
	}
	s.say("A test message was sent: press its button. (--no-test leaves this out)")
	err = s.wait(func(u *update) bool {
		_, reason := admitted(u, s.config.Users, s.config.ChatID)
		if reason != "" || u.Callback == nil || u.Callback.Data != data {
			return false
		}
		_ = s.bot.call(s.ctx, "answerCallbackQuery", map[string]any{"callback_query_id": u.Callback.ID}, nil)
		return true
	})
	if err != nil {
		return err
	}
	s.say("\nIt works. Now: atlasbridge run claude")
	_, err = s.bot.send(s.ctx, "editMessageText", map[string]any{"message_id": id, "text": "✅ AtlasBridge is connected."}, true)
	return err
}

// writeConfig puts the values into the [telegram] table of the file and leaves every other line as it is.
func writeConfig(path string, values [][2]string) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := withTelegram(string(old), values)
	if _, err := parseConfig(text); err != nil {
		return err
	}
	f, err := openPrivate(path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(path+".new", path)
	}
	return cmp.Or(err, syncDir(filepath.Dir(path)))
}

// withTelegram is the text of a configuration with these keys in its [telegram] table; values are as TOML writes them.
func withTelegram(text string, values [][2]string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	find := func(from int, is func(string) bool) int {
		if i := slices.IndexFunc(lines[from:], is); i >= 0 {
			return from + i
		}
		return len(lines)
	}
	start := 1 + find(0, func(l string) bool { m := tomlTable.FindStringSubmatch(l); return m != nil && m[1] == "telegram" })
	if start > len(lines) {
		lines = append(lines, "", "[telegram]")
		start = len(lines)
	}
	for _, kv := range values {
		end := find(start, func(l string) bool { return strings.HasPrefix(strings.TrimSpace(l), "[") })
		at := find(start, func(l string) bool { k, _, _ := strings.Cut(l, "="); return strings.TrimSpace(k) == kv[0] })
		line := kv[0] + " = " + kv[1]
		if at < end {
			lines[at] = line
			continue
		}
		for end > start && strings.TrimSpace(lines[end-1]) == "" {
			end--
		}
		lines = slices.Insert(lines, end, line)
	}
	return strings.TrimLeft(strings.Join(lines, "\n"), "\n") + "\n"
}
