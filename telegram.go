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
	"bytes"
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
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
	partUnits   = 3400              // UTF-16 units of foreign text in a message of 4096: room for our own lines
	maxToast    = 200               // characters, https://core.telegram.org/bots/api#answercallbackquery
	maxResponse = 16 << 20          // bytes: 100 updates, each with the message it replies to, stay far below
	pollSeconds = 50                // the server clamps longer ones (server)
	callTimeout = 15 * time.Second  // of a request; of a poll on top of pollSeconds
	tapLife     = 150 * time.Second // an undelivered callback_query is forgotten after this (server)
)

// Channel carries questions to the operator and outcomes back; receiving is the poller's. Methods block,
// obey the pacing and retry what can be retried until ctx ends; an error is final.
type Channel interface {
	// Ask sends the question with its buttons and returns the message's id (0: the channel has none).
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error)
	// Settle edits the question's message to what p now says: still waiting (time left), or who answered what and when.
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error
	// Notify sends a message that asks nothing, or edits one, and returns its id.
	Notify(ctx context.Context, n Notice) (int64, error)
	Close() error
}

// Notice is a message that asks nothing.
type Notice struct {
	Text, Mono    string // Mono follows Text as a monospace block
	SessionID     string // adds the session's label and [SID:…]
	ReplyTo, Edit int64  // message ids, 0 none; Edit: change that message instead of sending one
	Ring          bool   // with sound; notices are silent otherwise
	Urgent        bool   // goes before streams, as what rings or replies does
}

// Telegram is the Bot API channel and its poller. Its methods may be called from different goroutines.
type Telegram struct {
	store       *Store
	log         *slog.Logger
	token, base string // base: api_base without a slash at its end
	http        *http.Client
	cfg         atomic.Pointer[Config]
	chat        atomic.Int64 // the configured chat, or the supergroup it became
	skew        atomic.Int64 // Telegram's clock minus ours, a time.Duration
	polling     atomic.Bool  // this process holds the poll lock

	mu                       sync.Mutex // guards what follows
	sendTrouble, pollTrouble string
	slot                     slot // the pacing, as far as this process knows
}

// newTelegram refuses what would otherwise fail late.
func newTelegram(cfg *Config, st *Store, log *slog.Logger) (*Telegram, error) {
	if cfg.Token == "" || cfg.ChatID == 0 || len(cfg.Users) == 0 {
		return nil, errors.New("telegram needs bot_token, chat_id and allowed_users: run atlasbridge setup")
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
	tr.Protocols.SetHTTP1(true)                            // a connection per request in flight: a dead long poll takes no message with it
	refuse := func(*http.Request, []*http.Request) error { // the token is in the path
		return http.ErrUseLastResponse
	}
	return &Telegram{token: token, base: strings.TrimRight(base, "/"), log: slog.New(slog.DiscardHandler),
		http: &http.Client{Transport: tr, CheckRedirect: refuse}}
}

func (t *Telegram) Close() error { t.http.CloseIdleConnections(); return nil }

// clockSkew is how far Telegram's clock, as last heard, is ahead of ours.
func (t *Telegram) clockSkew() time.Duration { return time.Duration(t.skew.Load()) }

// Reload takes over the allowlist and limits of a new configuration; an empty allowlist is not one.
func (t *Telegram) Reload(cfg *Config) {
	if next := *t.cfg.Load(); len(cfg.Users) > 0 {
		next.Users, next.FreeText = cfg.Users, cfg.FreeText
		t.cfg.Store(&next)
	}
}

// Trouble is a sentence about what keeps Telegram from working (wrong token, blocked bot), "" when it works.
func (t *Telegram) Trouble() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return cmp.Or(t.sendTrouble, t.pollTrouble)
}

// warn logs a failure that changes nothing else.
func (t *Telegram) warn(doing string, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		t.log.Warn(doing, "error", err)
	}
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
	code    int // the Bot API's error_code; 0: no answer of the Bot API came (network, proxy, cut answer)
	text    string
	after   time.Duration // retry_after
	migrate int64         // the supergroup this group became
}

func (e *apiError) Error() string { return "telegram " + e.method + ": " + e.text }

// says tells whether the Bot API refused the request with these words.
func (e *apiError) says(words string) bool { return e.code > 0 && strings.Contains(e.text, words) }

// temporary tells whether the same request may succeed later.
func (e *apiError) temporary() bool { return e.code == 0 || e.code == 429 || e.code >= 500 }

// trouble is what the operator should know of an error that is not one request's alone, "" otherwise.
func (e *apiError) trouble() string {
	switch {
	case e.code == 401 || e.code == 404:
		return "Telegram refuses the bot token (" + e.text + "): run atlasbridge setup"
	case e.code == 403 || e.says("chat not found"):
		return "the bot may not write to its chat (" + e.text + "): press Start there"
	case e.says("webhook"):
		return "a webhook is set for this bot, so it cannot be polled: atlasbridge setup --yes removes it"
	case e.code == 409:
		return "another program polls with this bot's token: stop it, or give it a bot of its own"
	case e.temporary() && e.after == 0:
		return "Telegram cannot be reached, still trying: " + e.text
	}
	return ""
}

// cutMessage finds the id in the answer to a sendMessage that was carried out but whose answer broke off.
var cutMessage = regexp.MustCompile(`^\{"ok":true,"result":(\{"message_id":\d+)[,}]`)

// call makes one request and decodes its result into result (nil: ignored). Its error is an *apiError.
func (t *Telegram) call(ctx context.Context, method string, params, result any) error {
	if e := t.request(ctx, method, params, result); e != nil {
		return e
	}
	return nil
}

func (t *Telegram) request(ctx context.Context, method string, params, result any) *apiError {
	limit := callTimeout
	if method == "getUpdates" {
		limit += pollSeconds * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := json.Marshal(cmp.Or(params, any(struct{}{})))
	var req *http.Request
	if err == nil {
		req, err = http.NewRequestWithContext(ctx, http.MethodPost, t.base+"/bot"+t.token+"/"+method, bytes.NewReader(body))
	}
	if err != nil { // its text would show the URL
		return &apiError{method: method, code: 400, text: "parameters, api_base and token do not make a request"}
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
func (t *Telegram) answer(method string, resp *http.Response, data []byte, result any) *apiError {
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		t.skew.Store(int64(time.Until(date)))
	}
	var a struct {
		OK          bool
		Result      json.RawMessage
		ErrorCode   int `json:"error_code"`
		Description string
		Parameters  struct {
			RetryAfter int64 `json:"retry_after"`
			MigrateTo  int64 `json:"migrate_to_chat_id"`
		}
	}
	if err := json.Unmarshal(data, &a); err != nil || !a.OK && a.ErrorCode == 0 {
		m := cutMessage.FindSubmatch(data)
		if m == nil || resp.StatusCode != http.StatusOK {
			return &apiError{method: method, text: resp.Status + ", but nothing the Bot API would say"}
		}
		a.Result, a.OK = append(m[1], '}'), true
	}
	if !a.OK {
		return &apiError{method, a.ErrorCode, fmt.Sprintf("%d: %s", a.ErrorCode, a.Description),
			time.Duration(a.Parameters.RetryAfter) * time.Second, a.Parameters.MigrateTo}
	}
	if result != nil && json.Unmarshal(a.Result, result) != nil {
		return &apiError{method: method, text: "a result of another shape than documented"}
	}
	return nil
}

// backoff is the pause after failure n, from 0: 1 s doubling to 60 s, less up to a quarter by r in [0,1).
func backoff(n int, r float64) time.Duration {
	d := min(time.Minute, time.Second<<min(n, 6))
	return d - time.Duration(r*float64(d)/4)
}

// sleep waits for d or the end of ctx, whichever is first.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
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
		params["chat_id"] = t.chat.Load()
		e := t.request(ctx, method, params, &result)
		if e == nil {
			var sent message
			_ = json.Unmarshal(result, &sent) // deleteMessage gives only true
			t.note(&t.sendTrouble, "")
			return sent.ID, nil
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
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
			t.log.Warn("the group became a supergroup: set telegram.chat_id to the new id", "chat_id", e.migrate)
			t.chat.Store(e.migrate)
		case e.says("parse entities") && params["entities"] != nil:
			delete(params, "entities") // a question is never lost to its looks
		case e.after > 0:
			t.shareSlot(func(s slot) slot { return slot{s.next, time.Now().Add(e.after)} })
		case !e.temporary():
			return 0, e
		default:
			_ = sleep(ctx, backoff(failures, rand.Float64()))
			failures++
		}
	}
}

// slot is the pacing of the chat, kept in one small file for all processes. About one message a second is allowed in
// a chat, and 20 a minute in a group: https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this
type slot struct {
	next  time.Time // when the next message may leave; in the past: that much is saved up for a burst
	until time.Time // retry_after: nothing leaves before
}

// reserve takes the next place, at most burst of them without a pause of every between, and tells how long to wait for
// it. What is not urgent takes nothing while it would have to wait, and leaves one place free: questions overtake.
func (s slot) reserve(now time.Time, every time.Duration, burst int, urgent bool) (slot, time.Duration) {
	if s.next.Sub(now) > 10*time.Minute || s.until.Sub(now) > 24*time.Hour { // the clock was set back
		s = slot{}
	}
	for _, least := range []time.Time{s.until, now.Add(-every * time.Duration(burst-1))} {
		if least.After(s.next) {
			s.next = least
		}
	}
	wait := s.next.Sub(now)
	if !urgent {
		wait += every
	}
	if urgent || wait <= 0 {
		s.next = s.next.Add(every)
	}
	return s, max(0, wait)
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
				reserved = urgent
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
	if err != nil {
		t.slot = change(t.slot)
		return
	}
	var next, until int64
	if n, _ := fmt.Fscanf(f, "%d %d", &next, &until); n == 2 {
		t.slot = slot{time.Unix(0, next), time.Unix(0, until)}
	}
	t.slot = change(t.slot)
	next, until = max(0, t.slot.next.UnixNano()), max(0, t.slot.until.UnixNano())
	_, _ = f.WriteAt(fmt.Appendf(nil, "%020d %020d\n", next, until), 0)
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
	n := len(utf16.Encode([]rune(s)))
	if kind != "" {
		r.marks = append(r.marks, entity{kind, r.units, n})
	}
	r.WriteString(s)
	r.units += n
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

// clean makes text from elsewhere fit to leave: valid, no secret, nothing invisible, at most n UTF-16 units.
func clean(s string, n int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = visible(redact(strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n")))
	if fit := fitUnits(s, n); fit < len(s) {
		s = s[:fitUnits(s, n-1)] + "…"
	}
	return s
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

// cutText cuts a part of at most n UTF-16 units off s, at a line end if there is one, which is then lost.
func cutText(s string, n int) (part, rest string) {
	fit := fitUnits(s, n)
	if fit == len(s) {
		return s, ""
	}
	if i := strings.LastIndexByte(s[:fit+1], '\n'); i > 0 {
		return s[:i], s[i+1:]
	}
	return s[:fit], s[fit:]
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

// inFull lets an open permission question show all it is about where that fits into one message: then nothing of it
// is cut, and nothing held back.
func (p *PromptRecord) inFull() *PromptRecord {
	if !p.Permission || !p.Open() || p.Full == "" || len(p.Full) > partUnits {
		return p
	}
	q := *p
	q.Excerpt, q.Cut = p.Full, false
	return &q
}

// keyboard is an open question's rows of buttons. While part of it is hidden (Cut), nothing that grants is offered.
// ticked are the keys chosen so far where several may be; they live in the buttons, so that what is seen is what is
// submitted. What grants and what refuses never share a row.
//
// A button sends back `ans:{prompt}:{session}:{nonce}:{value}`, with the first 8, 8 and 16 hex digits; the limit is 64
// bytes, https://core.telegram.org/bots/api#inlinekeyboardbutton.
func keyboard(p *PromptRecord, ticked ...string) (rows [][]button) {
	add := func(text, value string) {
		data := fmt.Sprintf("ans:%s:%s:%.16s:%s", shortID(p.ID), shortID(p.SessionID), p.Nonce, value)
		if len(data) <= 64 {
			rows = append(rows, []button{{text, data}})
		}
	}
	switch {
	case p.Idle || p.Secret || !p.Open():
		return nil
	case p.ambiguous():
		add("↩️ Send Enter", "enter")
		add("🚫 Cancel / Skip", "cancel")
		add("🔍 Show last 500 characters", tapRecent)
		return rows
	case p.Cut:
		add("📄 Show all", tapAll)
	case p.Type == ConfirmEnter:
		add("↩️ Press Enter", "enter")
	}
	for _, c := range answers(p) {
		then := slices.DeleteFunc(slices.Clone(ticked), func(key string) bool { return key == c.Key })
		on := len(then) < len(ticked)
		if !on {
			then = append(then, c.Key)
			slices.Sort(then)
		}
		switch text := choiceText(p, c); {
		case p.Cut && (p.Multi || grants(c)):
		case p.Multi:
			add(map[bool]string{true: "✓ ", false: "▫️ "}[on]+text, tapTick+strings.Join(then, ","))
		case p.Permission || p.Type == YesNo:
			add(map[bool]string{true: "✅ ", false: "❌ "}[grants(c)]+text, c.Key)
		default:
			add(text, c.Key)
		}
	}
	if p.Multi && !p.Cut {
		add("📨 Submit", tapSubmit+strings.Join(ticked, ","))
	}
	if p.SafeDefault != nil && !(p.Cut && p.Type == ConfirmEnter) {
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
		return clean(c.Label, 60)
	}
	return clean(c.Key, 9) + ". " + clean(c.Label, 60)
}

// valueName is a decision's value in a person's words.
func valueName(p *PromptRecord, v string) string {
	for _, c := range answers(p) {
		if c.Key == v {
			return choiceText(p, c)
		}
	}
	return cmp.Or(map[string]string{"": "empty", "enter": "Enter", "esc": "Esc", "default": "the default"}[v], v)
}

// questionText is a question's message: what is asked, what about, what can be done or was done, how long, by which
// session.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord) *richText {
	ask, body, hint, left := clean(p.Question, 400), clean(p.Excerpt, partUnits), "", timeLeft(p)
	switch {
	case !p.Open():
		if ask, hint, left = cmp.Or(ask, "Question"), outcome(p), ""; p.Idle {
			ask, body = clean(s.Tool, 40)+" had finished", ""
		}
	case p.Idle:
		ask, hint, left = "✅ "+clean(s.Tool, 40)+" has finished", "Reply to this message with what to do next.", ""
		body = cmp.Or(clean(p.Full, 700), body)
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
		if ask = "❓ " + cmp.Or(ask, "Waiting for your input"); p.Type == FreeText {
			hint = "Reply to this message with your answer."
		} else if p.Multi {
			hint = "Tick what applies, then Submit."
		}
	}
	r := &richText{}
	r.line("bold", ask)
	if !strings.HasSuffix(ask, body) {
		r.line("pre", body)
	}
	for _, c := range p.Choices {
		if len(c.Label) > 30 && p.Open() { // a button shows about this much
			r.line("", choiceText(p, c))
		}
	}
	if p.Tool != "" && p.Open() {
		r.line("", "🔧 "+clean(p.Tool, 60)+" in "+clean(p.Cwd, 200))
	}
	r.line("", hint)
	r.line("", left)
	r.line("", origin(s))
	return r
}

func timeLeft(p *PromptRecord) string {
	then := "nothing is typed"
	if p.SafeDefault != nil && !p.Secret {
		then = "default: " + clean(valueName(p, *p.SafeDefault), 80)
	}
	secs := max(0, int(time.Until(p.ExpiresAt).Seconds()+0.5))
	return fmt.Sprintf("⏳ Expires in %dm %02ds, then %s", secs/60, secs%60, then)
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
	switch timeout := p.Status == Expired || p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"; {
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
	p = p.inFull()
	params := t.questionText(p, s).params(keyboard(p))
	params["disable_notification"] = p.Idle
	return t.send(ctx, "sendMessage", params, !p.Idle)
}

// Settle edits the question's message, which may be a newer one than p knows, to what p now says. While a question
// waits whose message has been shown in full, or in which choices have been ticked, there is nothing to say.
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error {
	if p = p.inFull(); p.MsgID == 0 || p.Open() && (p.Cut || p.Multi) {
		return nil
	}
	params := t.questionText(p, s).params(keyboard(p))
	params["message_id"] = p.MsgID
	if v, err := t.store.View(); err == nil && v.Prompts[p.ID] != nil {
		params["message_id"] = max(p.MsgID, v.Prompts[p.ID].MsgID)
	}
	_, err := t.send(ctx, "editMessageText", params, !p.Open())
	return err
}

// Notify sends a notice in as many messages as it needs and returns the id of the last; with Edit the first of them
// is that message, unless the operator deleted it.
func (t *Telegram) Notify(ctx context.Context, n Notice) (id int64, err error) {
	last := ""
	if v, err := t.store.View(); err == nil && v.Sessions[n.SessionID] != nil {
		last = origin(v.Sessions[n.SessionID])
	}
	edit, text, mono, part := n.Edit, clean(n.Text, 1<<20), clean(n.Mono, 1<<20), ""
	for text+mono != "" && err == nil {
		r := &richText{}
		part, text = cutText(text, partUnits)
		r.line("", part)
		if text == "" && r.units < partUnits/2 {
			part, mono = cutText(mono, partUnits-r.units)
			r.line("pre", part)
		}
		r.line("", last)
		params := r.params(nil)
		if id = 0; edit != 0 {
			params["message_id"] = edit
			id, err = t.send(ctx, "editMessageText", params, n.Ring)
			delete(params, "message_id")
			edit = 0
		}
		params["disable_notification"] = !n.Ring
		if n.ReplyTo != 0 {
			params["reply_parameters"] = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		}
		if id == 0 && err == nil {
			id, err = t.send(ctx, "sendMessage", params, n.Ring || n.ReplyTo != 0)
		}
	}
	return id, err
}

// update is what of the Bot API's Update counts here; everything else is ignored.
type update struct {
	ID       int64 `json:"update_id"`
	Message  *message
	Callback *press `json:"callback_query"`
}

type message struct {
	ID   int64 `json:"message_id"`
	From *user
	Chat struct {
		ID   int64
		Type string
	}
	Date          int64 // Unix seconds by the server's clock
	Text          string
	ReplyTo       *message        `json:"reply_to_message"`
	SenderChat    json.RawMessage `json:"sender_chat"` // a channel, or an anonymous administrator
	ForwardOrigin json.RawMessage `json:"forward_origin"`
	ForwardDate   int64           `json:"forward_date"`
	ViaBot        json.RawMessage `json:"via_bot"`
	EditDate      int64           `json:"edit_date"`
}

// user is a person or bot. The names are for display only: anyone can take them.
type user struct {
	ID       int64
	IsBot    bool   `json:"is_bot"`
	Name     string `json:"first_name"`
	Username string
}

// who is decided_by for a user.
func (u *user) who() string { return "telegram:" + strconv.FormatInt(u.ID, 10) }

// press is a CallbackQuery: a button was pressed.
type press struct {
	ID      string
	From    *user
	Message *message
	Data    string
}

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
	case len(m.SenderChat)+len(m.ViaBot)+len(m.ForwardOrigin) > 0 || m.ForwardDate != 0 || m.EditDate != 0:
		return from, "forwarded, edited, or sent through a bot or as a chat"
	}
	return from, ""
}

// receiver is a Telegram while it polls. Its fields belong to the goroutine that listens.
type receiver struct {
	*Telegram
	ctx       context.Context // ends with the polling
	work      sync.WaitGroup  // answers on their way, each a goroutine that ends with it
	lastOK    time.Time       // of getUpdates, by the wall clock
	stuck     int64           // the update that could not be recorded, of which the operator was told
	minute    time.Time       // in which strangers were audited
	strangers int
}

// Poll receives for all sessions as long as this process holds the poll lock, and otherwise waits for it.
// Decisions go to Store.Decide, everything else for a session becomes an InputRecord. It returns when ctx ends, or
// when the token is refused for good.
func (t *Telegram) Poll(ctx context.Context) {
	for final := false; !final && ctx.Err() == nil; {
		beat := time.Now().Round(0) // when any poller last got an answer: the time of change of its lock file
		if info, err := os.Stat(filepath.Join(t.store.Dir, "poll.lock")); err == nil {
			beat = info.ModTime()
		}
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
			t.note(&t.pollTrouble, "the session that listens to Telegram has been silent for long: see atlasbridge status")
		default:
			t.note(&t.pollTrouble, "")
		}
		_ = sleep(ctx, time.Second) // so another takes over within 2 s
	}
}

// receive is Poll with the lock held. It returns true when polling makes no sense any more.
func (t *Telegram) receive(ctx context.Context, beat time.Time) (final bool) {
	ctx, stop := context.WithCancel(ctx)
	r := &receiver{Telegram: t, ctx: ctx, lastOK: beat}
	defer r.work.Wait()
	defer stop()
	r.work.Go(r.register)
	return r.listen()
}

// tell answers the operator's message.
func (r *receiver) tell(replyTo int64, text string) {
	r.work.Go(func() {
		_, err := r.Notify(r.ctx, Notice{Text: text, ReplyTo: replyTo})
		r.warn("answering the operator", err)
	})
}

// buttons replaces a message's buttons.
func (r *receiver) buttons(msg int64, rows [][]button) {
	r.work.Go(func() {
		params := map[string]any{"message_id": msg, "reply_markup": markup(rows)}
		_, err := r.send(r.ctx, "editMessageReplyMarkup", params, true)
		r.warn("changing buttons", err)
	})
}

// listen polls until ctx ends or the lock is lost (false), or the token is refused (true).
func (r *receiver) listen() (final bool) {
	params := map[string]any{"allowed_updates": []string{"message", "callback_query"}}
	for failures, timeout := 0, 1; r.ctx.Err() == nil; { // after a failure, short: to know soon that all is well
		params["timeout"] = timeout
		updates, e := r.poll(params)
		if failures, timeout = failures+1, 1; e == nil {
			trouble := ""
			for _, raw := range updates {
				id, err := r.take(raw)
				if err != nil { // not on disk, so not confirmed: it comes again
					trouble = "answers cannot be recorded, so they are not acted on: " + err.Error()
					_ = sleep(r.ctx, time.Second)
					break
				}
				params["offset"] = id + 1 // assigned, never the maximum: ids restart at random after a week (server)
			}
			failures, timeout = 0, pollSeconds
			r.note(&r.pollTrouble, trouble)
			r.recovered()
			continue
		}
		if text := e.trouble(); text != "" && (failures > 1 || !e.temporary()) && r.ctx.Err() == nil {
			r.note(&r.pollTrouble, text)
		}
		pause := cmp.Or(e.after, backoff(failures-1, rand.Float64()))
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
		_ = sleep(r.ctx, pause)
	}
	return false
}

// poll is one getUpdates. It ends early when the machine has slept meanwhile: the connection will not have survived.
func (r *receiver) poll(params any) (updates []json.RawMessage, e *apiError) {
	const beat = 10 * time.Second
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	go func() { // ends with the request
		for last := time.Now().Round(0); sleep(ctx, beat) == nil; last = time.Now().Round(0) {
			if time.Since(last) > 3*beat { // by the wall clock, which goes on while the machine sleeps
				cancel()
			}
		}
	}()
	e = r.request(ctx, "getUpdates", params, &updates)
	return updates, e
}

// recovered notes a successful poll. After an outage longer than a tap lives, taps may be lost: what still waits is
// offered again.
func (r *receiver) recovered() {
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
			r.work.Go(func() { r.offer(p.ID, p.Excerpt, p.Cut) })
		}
	}
}

// take acts on one update. An error means that nothing was done and the update must come again.
func (r *receiver) take(raw json.RawMessage) (id int64, err error) {
	var u update
	if json.Unmarshal(raw, &u) != nil {
		var only struct {
			ID int64 `json:"update_id"`
		}
		err = json.Unmarshal(raw, &only)
		return only.ID, err // what cannot be read is confirmed unread
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
		err = r.tap(u.ID, u.Callback, v)
	default:
		err = r.said(u.ID, u.Message, v)
	}
	const untold = "It could not be recorded, so nothing was done yet; it is tried again."
	if told := r.stuck == u.ID; err != nil && !told && u.Callback != nil {
		r.toast(u.Callback, untold, true)
	} else if err != nil && !told {
		r.tell(u.Message.ID, "✗ "+untold)
	}
	if err != nil {
		r.stuck = u.ID
	}
	return u.ID, err
}

// stranger audits an update that does not count, at most ten a minute, and does nothing else.
func (r *receiver) stranger(u *update, from *user, reason string) {
	if now := time.Now(); now.Sub(r.minute) > time.Minute {
		r.minute, r.strangers = now, 0
	}
	if r.strangers++; r.strangers <= 10 && from != nil {
		fields := []Field{{"update_id", u.ID}, {"reason", reason}, {"by", from.who()}}
		r.audit(Event{Name: "UNAUTHORIZED", Fields: fields})
	}
}

func (r *receiver) audit(e Event) { r.warn("auditing "+e.Name, r.store.Audit().Append(e)) }

// reject audits an answer of the operator that changed nothing, and records its update as done with.
func (r *receiver) reject(id int64, by, session, prompt, reason string) error {
	r.audit(Event{"REPLY_REJECTED", session, prompt, []Field{{"reason", reason}, {"by", by}}})
	return r.once(id)
}

// once records that an update has been acted on, together with what it led to.
func (r *receiver) once(id int64, with ...Record) error {
	return r.store.Update(func(*View) ([]Record, error) {
		return append(with, &UpdateRecord{Head: Head{ID: strconv.FormatInt(id, 10)}, Kind: "operator"}), nil
	})
}

// toast answers a tap: a line on the phone, or a box to be closed when it says that nothing was done.
func (r *receiver) toast(q *press, text string, box bool) {
	r.work.Go(func() {
		params := map[string]any{"callback_query_id": q.ID, "text": clean(text, maxToast), "show_alert": box}
		r.warn("answering a tap", r.call(r.ctx, "answerCallbackQuery", params, nil)) // too old is not worth another try
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

// tap acts on a pressed button. The phone is told at once; what takes longer is done beside.
func (r *receiver) tap(id int64, q *press, v *View) error {
	p, value := tapped(q.Data, v)
	for tries := 0; p != nil && p.Open() && q.Message.ID > p.MsgID && tries < 100; tries++ {
		if err := sleep(r.ctx, 10*time.Millisecond); err != nil { // until the record of that message is written
			return err
		}
		if v, err := r.store.View(); err == nil {
			p, value = tapped(q.Data, v)
		}
	}
	if p == nil || q.Message.ID != p.MsgID {
		p = cmp.Or(p, &PromptRecord{})
		r.toast(q, "Nothing was done: this message is out of date. Use the newest one of its question.", true)
		r.buttons(q.Message.ID, nil)
		return r.reject(id, q.From.who(), p.SessionID, p.ID, "not a button of an open question")
	}
	keys, submit := strings.CutPrefix(value, tapSubmit)
	if submit {
		value = keys
	} else if strings.HasPrefix(value, "~") && p.Open() {
		r.show(q, p, value)
		return r.once(id)
	}
	d := Decision{PromptID: p.ID, SessionID: p.SessionID, Nonce: p.Nonce, Value: value, By: q.From.who(), UpdateID: id}
	now, why, err := r.store.Decide(d, time.Now())
	switch {
	case err != nil:
	case why != "":
		r.toast(q, "Nothing was done: "+string(why), true)
		r.work.Go(func() { r.settle(&now) })
		err = r.reject(id, d.By, p.SessionID, p.ID, string(why))
	default:
		r.toast(q, "✓ "+valueName(p, value), false)
	}
	return err
}

// settle shows in its message what became of a question that is over, whichever session it belongs to.
func (r *receiver) settle(p *PromptRecord) {
	if v, err := r.store.View(); err == nil && v.Sessions[p.SessionID] != nil && !p.Open() {
		r.warn("editing a question's message", r.Settle(r.ctx, p, v.Sessions[p.SessionID]))
	}
}

// show does what a button asks that decides nothing: tick a choice, or show more.
func (r *receiver) show(q *press, p *PromptRecord, value string) {
	keys, tick := strings.CutPrefix(value, tapTick)
	switch {
	case tick:
		r.toast(q, "", false)
		ticked := strings.FieldsFunc(keys, func(c rune) bool { return c == ',' })
		shown := *p
		shown.Cut = false // or there would have been nothing to tick
		r.buttons(q.Message.ID, keyboard(&shown, ticked...))
	case value == tapAll:
		r.toast(q, "Here it is", false)
		cut := p.Full == "" || len(p.Full) > 16000 && strings.HasSuffix(p.Full, "…") // Full ends at 16 KiB
		r.work.Go(func() { r.offer(p.ID, cmp.Or(p.Full, p.Excerpt), cut) })
	default:
		r.toast(q, "Here is more of it", false)
		r.work.Go(func() { r.offer(p.ID, p.Recent, p.Cut) })
	}
}

// offer sends a waiting question again, about this text, and makes the new message the one whose buttons count. cut
// tells whether the text hides something.
func (r *receiver) offer(id, text string, cut bool) {
	v, err := r.store.View()
	if err != nil || v.Prompts[id] == nil || !v.Prompts[id].Open() || v.Sessions[v.Prompts[id].SessionID] == nil {
		return
	}
	p, s := *v.Prompts[id], v.Sessions[v.Prompts[id].SessionID]
	ctx, cancel := context.WithDeadline(r.ctx, p.ExpiresAt)
	defer cancel()
	old, rest := p.MsgID, ""
	for p.Excerpt, rest = cutText(clean(text, 1<<20), partUnits-800); rest != "" && err == nil; {
		_, err = r.Notify(ctx, Notice{Mono: p.Excerpt, SessionID: s.ID, ReplyTo: old})
		p.Excerpt, rest = cutText(rest, partUnits-800)
	}
	if err != nil {
		return // not shown in full, so not to be allowed
	}
	p.Cut = cut
	msg, err := r.Ask(ctx, &p, s)
	if err == nil {
		err = r.store.Update(func(v *View) ([]Record, error) {
			p = *cmp.Or(v.Prompts[id], &p)
			p.MsgID = msg
			return []Record{&p}, nil
		})
	}
	if r.warn("offering a question again", err); err == nil {
		r.settle(&p) // if it has been answered meanwhile
		r.buttons(old, nil)
	}
}

// botCommands is what the operator can type, as setMyCommands takes it.
func botCommands() (list []map[string]string) {
	for _, line := range []string{"start what this is", "help all commands",
		"status open questions, and the head of the audit log", "sessions what is running",
		"switch SID: text that is no reply goes to this session", "send SID TEXT: send text to a session",
		"claim SID: all text goes to this session, until /release", "release undo /claim and /switch",
		"cancel SID: end the session's program", "keys SID CTRL_C: press keys",
		"screen SID: show the screen", "last SID: show the end of the screen"} {
		name, about, _ := strings.Cut(line, " ")
		list = append(list, map[string]string{"command": name, "description": about})
	}
	return list
}

// register tells Telegram the commands, for the configured chat alone, unless it knows them.
func (r *receiver) register() {
	scope := map[string]any{"type": "chat", "chat_id": r.chat.Load()}
	var known []map[string]string
	err := r.call(r.ctx, "getMyCommands", map[string]any{"scope": scope}, &known)
	if want := botCommands(); err == nil && fmt.Sprint(known) != fmt.Sprint(want) {
		err = r.call(r.ctx, "setMyCommands", map[string]any{"scope": scope, "commands": want}, nil)
	}
	r.warn("registering the commands", err)
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

// operatorText is a message's text as data, see cleanText; "" when it came damaged, or would have to be cut.
func operatorText(s string) string {
	if len(s) > maxMessage || strings.ContainsRune(s, utf8.RuneError) {
		return ""
	}
	return strings.TrimSpace(cleanText(s))
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
func (r *receiver) said(id int64, m *message, v *View) (err error) {
	at := time.Unix(m.Date, 0).Add(time.Second)
	if skew := r.clockSkew(); skew.Abs() > 3*time.Second { // less may be rounding and the network
		at = at.Add(-skew)
	}
	w := (&heard{message: m, view: v, at: at, by: m.From.who()}).understand()
	if w.secret {
		r.work.Go(func() {
			if _, err := r.send(r.ctx, "deleteMessage", map[string]any{"message_id": m.ID}, true); err != nil {
				r.tell(m.ID, "⚠ Your message could not be deleted: delete it yourself.")
			}
		})
		if !r.cfg.Load().FreeText {
			w = wish{reply: "✗ A password cannot be given from here: type it at the keyboard."}
		}
	}
	switch d := w.decision; {
	case d != nil:
		d.UpdateID = id
		_, why, failed := r.store.Decide(*d, time.Now())
		if err = failed; err == nil && why != "" {
			w.reply, err = "✗ Nothing was done: "+string(why), r.reject(id, d.By, d.SessionID, d.PromptID, string(why))
		}
	case w.input != nil:
		w.input.UpdateID = id
		if err = r.once(id, w.input); err == nil && w.input.Kind != "text" {
			fields := []Field{{"command", w.input.Kind}, {"by", w.input.By}}
			r.audit(Event{"SESSION_COMMAND", w.input.SessionID, "", fields})
		}
	case w.meta != nil:
		next := &MetaRecord{Head: Head{ID: "telegram"}, Values: map[string]string{}}
		maps.Copy(next.Values, cmp.Or(v.Meta["telegram"], next).Values)
		maps.Copy(next.Values, w.meta)
		maps.DeleteFunc(next.Values, func(_, value string) bool { return value == "" })
		err = r.once(id, next)
	case w.reply != "":
		err = r.once(id)
	}
	if err == nil && w.reply != "" {
		r.tell(m.ID, w.reply)
	}
	return err
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
	text := operatorText(h.Text)
	if name, ok := strings.CutPrefix(text, "/"); ok {
		name, rest := cutWord(name)
		name, _, _ = strings.Cut(strings.ToLower(name), "@")
		return h.command(name, rest)
	}
	s, p, refusal := h.target("")
	switch {
	case s == nil:
		return wish{reply: refusal}
	case text == "":
		return wish{reply: "✗ Nothing was done: only text of up to 4096 bytes can be sent to a session."}
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
	example := map[string]string{"send": "go on", "keys": "CTRL_C"}[name]
	help, names := "", []string{}
	for _, c := range botCommands() {
		names = append(names, c["command"])
		help += "\n/" + c["command"] + "  " + c["description"]
	}
	switch name {
	case "start", "help":
		return wish{reply: "Questions come here. Tap an answer, or reply to a message with text.\n" + help}
	case "status", "sessions":
		return wish{reply: "Running:" + h.list(name == "status")}
	case "release":
		none := map[string]string{"claim " + h.by: "", "switch " + h.by: ""}
		return wish{reply: "Text goes to what it replies to.", meta: none}
	case "keys":
		if _, ok := keyBytes(sid, false); ok {
			sid, rest = "", line
		}
		for _, key := range strings.Fields(rest) {
			if _, ok := keyBytes(key, false); !ok {
				return wish{reply: "✗ There is no key " + key + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB SHIFT_TAB SPACE " +
					"BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
			}
		}
	default:
		if !slices.Contains(names, name) {
			near := nearest(name, names)
			if near != "" {
				near = " Did you mean /" + near + "?"
			}
			return wish{reply: "✗ There is no /" + name + " here." + near + " To send it to a session: /send SID /" + name}
		}
	}
	s, _, refusal := h.target(sid)
	switch {
	case s == nil:
		return wish{reply: cmp.Or(refusal, "✗ Which session? Running:"+h.list(false))}
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
	return &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: kind, Text: text, By: h.by, ReplyTo: h.ID,
		Status: "queued"}
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
	held := cmp.Or(h.view.Meta["telegram"], &MetaRecord{}).Values
	claimed := h.view.Sessions[cmp.Or(held["claim "+h.by], held["switch "+h.by])]
	replied, question := h.replied()
	switch {
	case sid != "" && len(named) != 1:
		return nil, nil, "✗ " + sid + " does not name one session. Running:" + h.list(false)
	case sid != "":
		s = named[0]
	case replied != nil:
		s, p = replied, question
	case claimed != nil:
		s = claimed
	case h.Chat.ID < 0:
		return nil, nil, ""
	case len(live) == 1:
		s = live[0]
	default:
		return nil, nil, "✗ Which session? Reply to one of its messages, or /switch SID. Running:" + h.list(false)
	}
	if s.Status != "active" {
		return nil, nil, "✗ Nothing was sent: " + origin(s) + " has ended. Running:" + h.list(false)
	}
	if h.at.Before(s.StartedAt) {
		return nil, nil, "✗ Nothing was sent: you wrote that before " + origin(s) + " began."
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
		return wish{reply: "✗ Nothing was sent: you wrote that before this was asked."}
	case !replied && p.Secret:
		return wish{reply: "✗ Nothing was sent: " + origin(s) + " waits for a password."}
	}
	value, refusal := answerTo(p, text, replied)
	if refusal != "" {
		return wish{reply: "✗ Nothing was done: " + refusal}
	}
	d := &Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: value, By: h.by}
	return wish{secret: p.Secret, decision: d}
}

// answerTo turns text into a value for Store.Decide: a choice by its key or label, several by their keys; else the
// text itself, which refuses a permission when it replies to the question.
func answerTo(p *PromptRecord, text string, replied bool) (value, refusal string) {
	words, keys := []string{text}, []string{}
	if p.Multi {
		words = strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == ' ' })
	}
	for _, word := range words {
		for _, c := range answers(p) {
			if !strings.EqualFold(word, c.Key) && !strings.EqualFold(word, c.Label) {
				continue
			}
			if keys = append(keys, c.Key); p.Cut && grants(c) {
				return "", "not all of it was shown. Tap Show all, then answer there."
			}
		}
	}
	switch {
	case !p.Secret && len(keys) > 0 && len(keys) == len(words):
		return strings.Join(keys, ","), ""
	case p.Permission && replied:
		return "deny:" + text, ""
	case p.Permission:
		return "", "a permission is asked for. Tap a button, or reply to that message to refuse and say why."
	}
	return text, ""
}

// list is the running sessions; more: and what waits, and the head of the audit log, which the chat then witnesses.
func (h *heard) list(more bool) string {
	var lines []string
	for _, s := range h.view.Sessions {
		if s.Status != "active" {
			continue
		}
		line := "\n• " + origin(s) + " " + strings.ReplaceAll(cmp.Or(s.Activity, "running"), "_", " ")
		for _, p := range h.view.Prompts {
			if more && p.SessionID == s.ID && p.Open() && !p.Idle {
				line += "\n   ❓ " + clean(p.Question, 100) + "\n   " + timeLeft(p)
			}
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	if a := h.view.Meta["audit"]; more && a != nil {
		lines = append(lines, fmt.Sprintf("\nAudit log: %d %s\nListening: process %d", a.Seq, a.Hash, os.Getpid()))
	}
	return cmp.Or(strings.Join(lines, ""), " nothing")
}

// setup is one run of `atlasbridge setup`.
type setup struct {
	*command
	o      *options
	bot    *Telegram
	held   bool   // nobody else polls
	config Config // as far as config.toml has it
}

// cmdSetup connects a bot: token, who the operator is, config.toml, a test. What is there already is kept.
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
	for _, row := range settings(&s.config) {
		if e, ok := old[row.key]; ok && strings.HasPrefix(row.key, "telegram.") {
			if err := row.put(&s.config, e.value); err != nil {
				return fmt.Errorf("config.toml:%d: %s %w", e.line, row.key, err)
			}
		}
	}
	token, err := s.token()
	base := cmp.Or(s.o.text("api-base"), s.getenv("TELEGRAM_API_BASE"), s.config.APIBase, "https://api.telegram.org")
	if err = cmp.Or(err, checkToken(token), checkBaseURL(base)); err != nil {
		return fmt.Errorf("bot token and api base: %w", err)
	}
	s.bot = newBot(token, base)
	if s.bot.store, err = openStore(dir); err != nil {
		return err
	}
	defer s.bot.store.Close()
	release, held, err := s.bot.store.TryPoll()
	if err != nil {
		return err
	}
	if s.held = held; held {
		defer release()
	}
	if err := s.operator(); err != nil {
		return err
	}
	values := []string{"bot_token = " + strconv.Quote(token), "chat_id = " + strconv.FormatInt(s.config.ChatID, 10),
		"allowed_users = " + strings.ReplaceAll(fmt.Sprint(s.config.Users), " ", ", ")}
	if base != "https://api.telegram.org" {
		values = append(values, "api_base = "+strconv.Quote(base))
	}
	if err := writeConfig(path, values); err != nil {
		return fmt.Errorf("writing config.toml: %w", err)
	}
	s.say("Written: %s", path)
	return s.test()
}

// token finds the bot token: file, environment, configuration; or asks, without echo.
func (s *setup) token() (string, error) {
	var text []byte
	var err error
	kept := cmp.Or(s.getenv("TELEGRAM_BOT_TOKEN"), s.config.Token)
	switch name := s.o.text("token-file"); {
	case name != "":
		text, err = os.ReadFile(name)
	case kept == "" && onTerminal(s.stdin):
		fmt.Fprint(s.stdout, "Make a bot with @BotFather (/newbot) and paste its token here (it is not shown): ")
		text, err = term.ReadPassword(int(s.stdin.Fd()))
		s.say("")
	default:
		text = []byte(kept)
	}
	if err == nil && len(text) == 0 {
		err = errors.New("none given: use --token-file FILE (/dev/stdin will do) or TELEGRAM_BOT_TOKEN")
	}
	return strings.TrimSpace(string(text)), err
}

// operator checks the bot, and finds chat and user: by flag, as configured, or by a code from the phone.
//
// The code is shown in this terminal and has to come from the phone, not the other way round: whoever sends it has
// seen this terminal, so a stranger who writes to the bot first is not taken for the operator by a careless "y".
func (s *setup) operator() error {
	var me user
	var hook struct{ URL string }
	err := s.bot.call(s.ctx, "getMe", nil, &me)
	if err == nil {
		err = s.bot.call(s.ctx, "getWebhookInfo", nil, &hook)
	}
	if err == nil && hook.URL != "" && s.o.on("yes") {
		err = s.bot.call(s.ctx, "deleteWebhook", nil, nil)
	} else if err == nil && hook.URL != "" {
		err = hinted(fmt.Errorf("the bot has a webhook, %s", visible(hook.URL)), "--yes removes it; or make another bot")
	}
	if err != nil {
		return err
	}
	s.say("Bot: @%s", me.Username)
	c := &s.config
	chat, err1 := strconv.ParseInt(cmp.Or(s.o.text("chat-id"), fmt.Sprint(c.ChatID)), 10, 64)
	id, err2 := strconv.ParseInt(cmp.Or(s.o.text("user-id"), "0"), 10, 64)
	if err := cmp.Or(err1, err2); err != nil || id < 0 {
		return errors.New("--chat-id and --user-id must be numbers, not names")
	}
	if c.ChatID = cmp.Or(chat, id); id != 0 && !slices.Contains(c.Users, id) {
		c.Users = append(c.Users, id)
	}
	if c.ChatID != 0 && len(c.Users) > 0 {
		s.say("Chat %d, allowed users %v", c.ChatID, c.Users)
		return nil
	}
	code, tries := newNonce()[:6], map[int64]int{}
	s.say("Open https://t.me/%s and send it anything; then send it this code:  %s", me.Username, code)
	return s.wait(func(u *update) bool {
		if u.Message == nil || u.Message.From == nil {
			return false
		}
		m := u.Message
		tries[m.From.ID]++
		if _, reason := admitted(u, []int64{m.From.ID}, m.Chat.ID); reason != "" || tries[m.From.ID] > 5 { // of 16 million
			return false
		}
		s.say("\n%s, user %d, wrote in %s chat %d", clip(visible(m.From.Name), 40), m.From.ID, m.Chat.Type, m.Chat.ID)
		if subtle.ConstantTimeCompare([]byte(strings.ToLower(strings.TrimSpace(m.Text))), []byte(code)) != 1 {
			s.say("If that is you, send the code.")
			return false
		}
		c.ChatID, c.Users = m.Chat.ID, append(c.Users, m.From.ID)
		return true
	})
}

// wait polls until done says so, a dot for every round.
func (s *setup) wait(done func(*update) bool) error {
	if !s.held {
		return hinted(errors.New("a running session listens to this bot"), "end it, or use --chat-id, --user-id, --no-test")
	}
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	params := map[string]any{"timeout": 10, "allowed_updates": []string{"message", "callback_query"}}
	for failures := 0; ctx.Err() == nil; {
		var updates []update
		if e := s.bot.request(ctx, "getUpdates", params, &updates); e != nil {
			if !e.temporary() {
				return hinted(e, e.trouble())
			}
			_ = sleep(ctx, max(e.after, backoff(failures, 0)))
			failures++
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
	return hinted(errors.New("nothing came within 10 minutes"), "run atlasbridge setup again: it makes a new code")
}

// test sends a message with a button and waits until it is pressed.
func (s *setup) test() error {
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
	s.say("A test message was sent: press its button.")
	err = s.wait(func(u *update) bool {
		_, reason := admitted(u, s.config.Users, s.config.ChatID)
		if reason != "" || u.Callback == nil || u.Callback.Data != data {
			return false
		}
		_ = s.bot.call(s.ctx, "answerCallbackQuery", map[string]any{"callback_query_id": u.Callback.ID}, nil)
		return true
	})
	if err == nil {
		s.say("\nIt works. Now: atlasbridge run claude")
		done := map[string]any{"message_id": id, "text": "✅ AtlasBridge is connected."}
		_, err = s.bot.send(s.ctx, "editMessageText", done, true)
	}
	return err
}

// writeConfig puts the lines into the [telegram] table of the file and leaves every other line as it is.
func writeConfig(path string, values []string) error {
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

// withTelegram is the text of a configuration with these lines in its [telegram] table instead of those with the
// same keys.
func withTelegram(text string, values []string) string {
	key := func(line string) string { k, _, _ := strings.Cut(line, "="); return strings.TrimSpace(k) }
	inside, found, out := false, false, []string{}
	for _, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "[") {
			m := tomlTable.FindStringSubmatch(line)
			inside = m != nil && m[1] == "telegram"
			if out = append(out, line); inside {
				found, out = true, append(out, values...)
			}
			continue
		}
		if !inside || !slices.ContainsFunc(values, func(v string) bool { return key(v) == key(line) }) {
			out = append(out, line)
		}
	}
	if !found {
		out = append(append(out, "", "[telegram]"), values...)
	}
	return strings.TrimLeft(strings.Join(out, "\n"), "\n") + "\n"
}
