// Telegram: the one file that reaches the network.
//
// Out: Ask, Settle and Notify, for this process's own session. In: Poll, in the one process that holds the poll lock,
// for all sessions. An answer becomes a Decision for Store.Decide, anything else an InputRecord for its session.
//
// Rules:
//   - Text is sent with entities (offsets in UTF-16 units), never with a parse_mode: what a program printed cannot
//     become markup. Text from elsewhere passes clean on its way out.
//   - Every update passes admitted first. Strangers are audited and never answered.
//   - An update is confirmed to the server only after what it did is on disk, with its id: nothing is repeated.
//   - A message about a session ends in our [SID:…]; only that line routes a reply, so a program cannot.
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

// Channel carries questions to the operator and outcomes back. Methods block, obey the pacing and retry until ctx ends.
type Channel interface {
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (msg int64, err error) // msg: the message's id, 0 none
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error               // edits it to what p now says
	Notify(ctx context.Context, n Notice) (msg int64, err error)
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
	skew        atomic.Int64 // Telegram's clock minus ours, a time.Duration
	polling     atomic.Bool  // this process holds the poll lock

	mu                       sync.Mutex // guards what follows
	sendTrouble, pollTrouble string
	next                     time.Time // the pacing, as far as this process knows, see turn
}

// newTelegram is the channel of a complete configuration.
func newTelegram(cfg *Config, st *Store, log *slog.Logger) (*Telegram, error) {
	if cfg.Token == "" || cfg.ChatID == 0 || len(cfg.Users) == 0 {
		return nil, errors.New("telegram needs bot_token, chat_id and allowed_users: run atlasbridge setup")
	}
	t := newBot(cfg.Token, cfg.APIBase)
	t.store, t.log = st, log
	t.cfg.Store(cfg)
	return t, nil
}

// newBot is a Telegram that can make calls, but knows no chat and no store.
func newBot(token, base string) *Telegram {
	tr := http.DefaultTransport.(*http.Transport).Clone() // proxies from the environment; limits on dialing and TLS
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true) // a dead long poll takes no message with it
	// The token is in the path, so no redirect is followed.
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Telegram{token: token, base: strings.TrimRight(base, "/"), log: slog.New(slog.DiscardHandler),
		http: &http.Client{Transport: tr, CheckRedirect: stay}}
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

// note sets one of the two troubles; a new one is logged.
func (t *Telegram) note(trouble *string, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if text != "" && text != *trouble {
		t.log.Warn(text)
	}
	*trouble = text
}

// warn logs a failure that changes nothing else.
func (t *Telegram) warn(doing string, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		t.log.Warn(doing, "error", err)
	}
}

// apiError is every way a call can fail. Its text never holds the URL, whose path is the token.
type apiError struct {
	method string
	code   int // the Bot API's error_code; 0: no answer of the Bot API came (network, proxy, cut answer)
	text   string
	after  time.Duration // retry_after
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
	case e.code == 403 || e.says("chat not found") || e.says("upgraded to a supergroup"):
		return "the bot may not write to its chat (" + e.text + "): press Start there, or run atlasbridge setup"
	case e.says("webhook"):
		return "a webhook is set for this bot, so it cannot be polled: remove it, or give AtlasBridge a bot of its own"
	case e.code == 409:
		return "another program polls with this bot's token: stop it, or give it a bot of its own"
	case e.temporary() && e.after == 0:
		return "Telegram cannot be reached, still trying: " + e.text
	}
	return ""
}

// cutAnswer finds the id in the answer to a sendMessage that was carried out but whose answer broke off.
var cutAnswer = regexp.MustCompile(`^\{"ok":true,"result":(\{"message_id":\d+)[,}]`)

// call makes one request and decodes its result into result (nil: ignored). What comes back is the Bot API's JSON, or a
// proxy's page, or a part of either. The error is an *apiError.
func (t *Telegram) call(ctx context.Context, method string, params, result any) error {
	limit := callTimeout
	if method == "getUpdates" {
		limit += pollSeconds * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, _ := json.Marshal(cmp.Or(params, any(struct{}{}))) // of maps of plain values: cannot fail
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.base+"/bot"+t.token+"/"+method, bytes.NewReader(body))
	if err != nil { // its text would show the URL
		return &apiError{method: method, code: 400, text: "api_base and token do not make a URL"}
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
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		t.skew.Store(int64(time.Until(date)))
	}
	var a struct {
		OK          bool
		Result      json.RawMessage
		ErrorCode   int `json:"error_code"`
		Description string
		Parameters  map[string]int64
	}
	if err := json.Unmarshal(data, &a); err != nil || !a.OK && a.ErrorCode == 0 {
		m := cutAnswer.FindSubmatch(data)
		if m == nil || resp.StatusCode != http.StatusOK {
			return &apiError{method: method, text: resp.Status + ", but nothing the Bot API would say"}
		}
		a.Result, a.OK = append(m[1], '}'), true
	}
	if !a.OK {
		after := time.Duration(a.Parameters["retry_after"]) * time.Second
		return &apiError{method, a.ErrorCode, fmt.Sprintf("%d: %s", a.ErrorCode, a.Description), after}
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

// send is call for messages: paced, and repeated until it is done, refused for good, or ctx ends. It returns the
// message's id; 0 when the message to change is gone, which is no error.
func (t *Telegram) send(ctx context.Context, method string, params map[string]any, urgent bool) (int64, error) {
	for failures := 0; ; {
		if err := t.pace(ctx, urgent); err != nil {
			return 0, err
		}
		var sent message
		params["chat_id"] = t.cfg.Load().ChatID
		e, _ := t.call(ctx, method, params, &sent).(*apiError)
		if e == nil {
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
		case e.says("message is not modified"), e.says("message to edit not found"), e.says("message can't be edited"):
			id, _ := params["message_id"].(int64)
			return map[bool]int64{true: id}[e.says("not modified")], nil
		case e.says("parse entities") && params["entities"] != nil:
			delete(params, "entities") // a question is never lost to its looks
		case e.after > 0:
			t.turn(func(time.Time) time.Time { return time.Now().Add(e.after) })
		case !e.temporary():
			return 0, e
		default:
			_ = sleep(ctx, backoff(failures, rand.Float64()))
			failures++
		}
	}
}

// pace waits until a message may leave. About one a second is allowed in a chat, 20 a minute in a group:
// https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this
func (t *Telegram) pace(ctx context.Context, urgent bool) (err error) {
	every := 1050 * time.Millisecond
	if t.cfg.Load().ChatID < 0 { // a group: the burst + 60 s / every stays below 20
		every = 3900 * time.Millisecond
	}
	for wait := every; wait > 0 && err == nil; {
		t.turn(func(next time.Time) time.Time {
			next, wait = reserve(next, time.Now(), every, urgent)
			return next
		})
		err = sleep(ctx, wait)
	}
	return err
}

// reserve takes a turn, or tells how long none is free. The next is due at next; when that is past, up to four are
// saved up. What is not urgent leaves one of them free: questions overtake.
func reserve(next, now time.Time, every time.Duration, urgent bool) (time.Time, time.Duration) {
	if full := now.Add(-3 * every); full.After(next) {
		next = full
	}
	wait := next.Sub(now)
	if !urgent {
		wait += every
	}
	if wait > 0 {
		return next, wait
	}
	return next.Add(every), 0
}

// turn changes when the next message may leave, kept for all processes in one small file, together with when it was
// written: before that, the clock has been set back. Without the file this process paces itself alone.
func (t *Telegram) turn(change func(next time.Time) time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f, err := openPrivate(filepath.Join(t.store.Dir, "telegram.pace"), os.O_RDWR|os.O_CREATE)
	if err != nil || lockFile(f, true) != nil {
		t.next = change(t.next)
		return
	}
	defer f.Close() // and with it the lock
	var next, written int64
	if _, err := fmt.Fscanf(f, "%d %d", &next, &written); err != nil || written > time.Now().UnixNano() {
		next = 0
	}
	t.next = change(time.Unix(0, next))
	_, _ = f.WriteAt(fmt.Appendf(nil, "%020d %020d\n", t.next.UnixNano(), time.Now().UnixNano()), 0)
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
	if _, rest := cutText(s, n); rest != "" {
		s, _ = cutText(s, n-1)
		s += "…"
	}
	return s
}

// cutText cuts at most n UTF-16 units off s, if it can at a line end in their second half, which is then lost.
func cutText(s string, n int) (part, rest string) {
	for i, c := range s {
		if n -= utf16.RuneLen(c); n >= 0 {
			continue
		}
		if end := strings.LastIndexByte(s[:i+1], '\n'); end > i/2 {
			return s[:end], s[end+1:]
		}
		return s[:i], s[i:]
	}
	return s, ""
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

// inFull lets an open permission question show all it is about where that fits into one message: nothing is cut.
func (p *PromptRecord) inFull() *PromptRecord {
	if !p.Permission || !p.Open() || p.Full == "" || len(p.Full) > partUnits {
		return p
	}
	q := *p
	q.Excerpt, q.Cut = p.Full, false
	return &q
}

// keyboard is an open question's buttons, one a row. While part of it is hidden (Cut), nothing that grants is offered.
// ticked are the keys chosen so far where several may be; they live in the buttons: what is seen is submitted.
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
		text, mark := choiceText(p, c), map[bool]string{true: "✅ ", false: "❌ "}[grants(c)]
		switch {
		case p.Cut && (p.Multi || grants(c)):
		case p.Multi && slices.Contains(ticked, c.Key):
			others := slices.DeleteFunc(slices.Clone(ticked), func(key string) bool { return key == c.Key })
			add("✓ "+text, tapTick+strings.Join(others, ","))
		case p.Multi:
			more := append(slices.Clone(ticked), c.Key)
			slices.Sort(more)
			add("▫️ "+text, tapTick+strings.Join(more, ","))
		case p.Permission || p.Type == YesNo:
			add(mark+text, c.Key)
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

// questionText is a question's message: what is asked, what about, what can be or was done, how long, which session.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord) *richText {
	ask, body, hint, tool := clean(p.Question, 400), clean(p.Excerpt, partUnits), "", clean(s.Tool, 40)
	r, left := &richText{}, timeLeft(p)
	switch {
	case !p.Open():
		if ask, hint, left = cmp.Or(ask, "Question"), outcome(p), ""; p.Idle {
			ask, body = tool+" had finished", ""
		}
	case p.Idle:
		ask, hint, left = "✅ "+tool+" has finished", "Reply to this message with what to do next.", ""
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
		ask = "❓ " + cmp.Or(ask, "Waiting for your input")
		if p.Source == "screen" && p.Full != "" && len(p.Full) <= 700 {
			body = clean(p.Full, 700) // the lines around it, such as which file is to be overwritten
		}
		hint = map[bool]string{true: "Tick what applies, then Submit."}[p.Multi]
		if p.Type == FreeText {
			hint = "Reply to this message with your answer."
		}
	}
	if r.line("bold", ask); !strings.HasSuffix(ask, body) {
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
	then, secs := "nothing is typed", max(0, int(time.Until(p.ExpiresAt).Seconds()+0.5))
	if p.SafeDefault != nil && !p.Secret {
		then = "default: " + clean(valueName(p, *p.SafeDefault), 80)
	}
	return fmt.Sprintf("⏳ Expires in %dm %02ds, then %s", secs/60, secs%60, then)
}

// outcome says what happened to a question: who answered what, when, and from where.
func outcome(p *PromptRecord) string {
	by, value, at, reason := byWhom(p.DecidedBy), "", "", ""
	if p.Value != nil && !p.Secret {
		value = ": " + clean(valueName(p, *p.Value), 300)
	}
	if p.DecidedAt != nil {
		at = p.DecidedAt.Local().Format(" at 15:04:05 MST")
	}
	if p.Reason != "" {
		reason = " (" + clean(p.Reason, 300) + ")"
	}
	switch timeout := p.Status == Expired || p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"; {
	case p.Status == Failed:
		return "⚠️ Not delivered" + value + at + reason
	case p.Status == Canceled:
		return "🚫 Canceled " + by + at + reason
	case timeout && value == "":
		return "⌛ Expired" + at + ": nothing was typed" + reason
	case timeout:
		return "⌛ No answer in time" + at + ", so the default was given" + value + reason
	case p.Status == ReplyReceived:
		return "⏱ Answered " + by + at + value + ", on its way" + reason
	}
	return "✅ Answered " + by + at + value + reason
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
	last, text, mono := "", clean(n.Text, 1<<20), clean(n.Mono, 1<<20)
	if v, err := t.store.View(); err == nil && v.Sessions[n.SessionID] != nil {
		last = origin(v.Sessions[n.SessionID])
	}
	for text+mono != "" && err == nil {
		r, restMono := &richText{}, mono
		part, restText := cutText(text, partUnits)
		if r.line("", part); restText == "" && r.units < partUnits/2 {
			part, restMono = cutText(mono, partUnits-r.units)
			r.line("pre", part)
		}
		r.line("", last)
		params, method := r.params(nil), "sendMessage"
		if n.Edit != 0 {
			method, params["message_id"] = "editMessageText", n.Edit
		} else if params["disable_notification"] = !n.Ring; n.ReplyTo != 0 {
			params["reply_parameters"] = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		}
		n.Edit = 0
		if id, err = t.send(ctx, method, params, n.Ring || n.Urgent || n.ReplyTo != 0); id != 0 || method == "sendMessage" {
			text, mono = restText, restMono
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

// who names a user in records.
func (u *user) who() string { return "telegram:" + strconv.FormatInt(u.ID, 10) }

// press is a CallbackQuery: a button was pressed.
type press struct {
	ID      string
	From    *user
	Message *message
	Data    string
}

// admitted decides, for every kind of update and nowhere else, whether it counts: when a person on the allowlist, known
// by number alone, wrote it himself in the configured chat. The message of a tap is the bot's own.
func admitted(u *update, users []int64, chatID int64) (from *user, ok bool) {
	m, own := u.Message, true
	if u.Callback != nil && m == nil {
		from, m = u.Callback.From, u.Callback.Message
	} else if m != nil && u.Callback == nil {
		from, own = m.From, len(m.SenderChat)+len(m.ViaBot)+len(m.ForwardOrigin) == 0 && m.EditDate == 0
	}
	if m == nil || from == nil || from.IsBot || from.ID <= 0 || !slices.Contains(users, from.ID) || chatID == 0 {
		return from, false
	}
	private := chatID > 0 && m.Chat.Type == "private" && m.Chat.ID == from.ID
	return from, own && m.Chat.ID == chatID && (private || chatID < 0 && strings.HasSuffix(m.Chat.Type, "group"))
}

// receiver is a Telegram while it polls. Its fields belong to the goroutine that listens.
type receiver struct {
	*Telegram
	ctx       context.Context // ends with the polling
	work      sync.WaitGroup  // answers on their way, each a goroutine that ends with it
	lastOK    time.Time       // of getUpdates, by the wall clock, which goes on while the machine sleeps
	minute    time.Time       // in which strangers were audited
	strangers int
}

// Poll receives for all sessions while this process holds the poll lock, and otherwise waits for it. It returns when
// ctx ends, or when the token is refused for good.
func (t *Telegram) Poll(ctx context.Context) {
	for ; ctx.Err() == nil; _ = sleep(ctx, time.Second) { // so another takes over within 2 s
		release, held, err := t.store.TryPoll()
		if !held {
			t.note(&t.pollTrouble, map[bool]string{true: fmt.Sprint("the poll lock cannot be used: ", err)}[err != nil])
			continue
		}
		t.polling.Store(true)
		inner, stop := context.WithCancel(ctx)
		r := &receiver{Telegram: t, ctx: inner, lastOK: time.Now().Round(0)}
		r.work.Go(func() {
			scope := map[string]any{"type": "chat", "chat_id": t.cfg.Load().ChatID}
			params := map[string]any{"scope": scope, "commands": botCommands()}
			t.warn("registering the commands", t.call(inner, "setMyCommands", params, nil))
		})
		r.listen()
		stop()
		r.work.Wait()
		t.polling.Store(false)
		if release(); ctx.Err() == nil {
			return
		}
	}
}

// listen polls until ctx ends or the token is refused.
func (r *receiver) listen() {
	params := map[string]any{"allowed_updates": []string{"message", "callback_query"}}
	for failures, timeout := 0, 1; r.ctx.Err() == nil; { // after a failure, short: to know soon that all is well
		var updates []json.RawMessage
		params["timeout"] = timeout
		e, _ := r.call(r.ctx, "getUpdates", params, &updates).(*apiError)
		if e == nil {
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
		if text := e.trouble(); text != "" && (failures > 0 || !e.temporary()) && r.ctx.Err() == nil {
			r.note(&r.pollTrouble, text)
		}
		pause := cmp.Or(e.after, backoff(failures, rand.Float64()))
		switch failures, timeout = failures+1, 1; e.code {
		case 401, 404:
			return
		case 409: // two pollers
			pause = max(pause, 5*time.Second)
		}
		_ = sleep(r.ctx, pause)
	}
}

// recovered notes a successful poll. After an outage longer than a tap lives, taps may be lost: what still waits is
// offered again.
func (r *receiver) recovered() {
	now := time.Now().Round(0)
	gap := now.Sub(r.lastOK)
	r.lastOK = now
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

// toast answers a tap: a line on the phone, or a box to be closed when it says that nothing was done. Once: it is soon
// too late for it.
func (r *receiver) toast(q *press, text string, box bool) {
	r.work.Go(func() {
		params := map[string]any{"callback_query_id": q.ID, "text": clean(text, maxToast), "show_alert": box}
		r.warn("answering a tap", r.call(r.ctx, "answerCallbackQuery", params, nil))
	})
}

// take acts on one update. An error means that nothing was done and the update must come again.
func (r *receiver) take(raw json.RawMessage) (int64, error) {
	var u update
	if json.Unmarshal(raw, &u) != nil {
		return u.ID, nil // what cannot be read is confirmed unread
	}
	if from, ok := admitted(&u, r.cfg.Load().Users, r.cfg.Load().ChatID); !ok {
		if now := time.Now(); now.Sub(r.minute) > time.Minute {
			r.minute, r.strangers = now, 0
		}
		if r.strangers++; r.strangers <= 10 && from != nil { // a minute: a flood must not fill the disk
			r.audit(Event{Name: "UNAUTHORIZED", Fields: []Field{{"update_id", u.ID}, {"by", from.who()}}})
		}
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
	if err != nil && u.Callback != nil {
		r.toast(u.Callback, "It could not be recorded, so nothing was done yet; it is tried again.", true)
	}
	return u.ID, err
}

func (r *receiver) audit(e Event) { r.warn("auditing "+e.Name, r.store.Audit().Append(e)) }

// once records that an update has been acted on, together with what it led to.
func (r *receiver) once(id int64, with ...Record) error {
	return r.store.Update(func(*View) ([]Record, error) {
		return append(with, &UpdateRecord{Head: Head{ID: strconv.FormatInt(id, 10)}, Kind: "operator"}), nil
	})
}

// decide gives an answer to the store, unless it is refused already, and audits one that is refused or decides about a
// permission.
func (r *receiver) decide(d Decision, from *user, why Refusal) (now PromptRecord, _ Refusal, err error) {
	if why == "" {
		now, why, err = r.store.Decide(d, time.Now())
	}
	switch {
	case err != nil:
	case why != "":
		r.audit(Event{"REPLY_REJECTED", d.SessionID, d.PromptID, []Field{{"reason", string(why)}, {"by", d.By}}})
		err = r.once(d.UpdateID)
	case now.Permission && now.Value != nil:
		fields := []Field{{"user_id", from.ID}, {"decision", *now.Value}}
		r.audit(Event{"PERMISSION_RESOLVE", now.SessionID, now.ID, fields})
	}
	return now, why, err
}

// tapped is the answer that a button gives and the question it is about, nil when there is none of that name.
func tapped(data string, v *View) (d Decision, p *PromptRecord) {
	if f := strings.SplitN(data, ":", 5); len(f) == 5 && f[0] == "ans" {
		d = Decision{PromptID: f[1], SessionID: f[2], Nonce: f[3], Value: f[4]}
		p = v.find(d)
	}
	return d, p
}

// tap acts on a pressed button. The phone is told at once; what takes longer is done beside. A message that is newer
// than the question's is one whose sending is not recorded yet; an older one has been replaced.
func (r *receiver) tap(id int64, q *press, v *View) error {
	d, p := tapped(q.Data, v)
	why := Refusal("")
	d.By, d.UpdateID = q.From.who(), id
	if p == nil || q.Message.ID < p.MsgID {
		why = "this message is out of date, use the newest one of its question"
	} else if d.SessionID, d.PromptID = p.SessionID, p.ID; strings.HasPrefix(d.Value, tapSubmit) {
		d.Value = d.Value[len(tapSubmit):]
	} else if strings.HasPrefix(d.Value, "~") && p.Open() {
		r.show(q, p, d.Value)
		return r.once(id)
	}
	now, why, err := r.decide(d, q.From, why)
	if err == nil && why != "" {
		r.toast(q, "Nothing was done: "+string(why), true)
		if !now.Open() {
			r.buttons(q.Message.ID, nil)
		}
	} else if err == nil {
		r.toast(q, "✓ "+valueName(p, d.Value), false)
	}
	return err
}

// show does what a button asks that decides nothing: tick a choice, or show more.
func (r *receiver) show(q *press, p *PromptRecord, value string) {
	r.toast(q, "", false)
	if keys, tick := strings.CutPrefix(value, tapTick); tick {
		shown := *p
		shown.Cut = false // or there would have been nothing to tick
		r.buttons(q.Message.ID, keyboard(&shown, strings.FieldsFunc(keys, func(c rune) bool { return c == ',' })...))
		return
	}
	text, cut := p.Recent, p.Cut
	if value == tapAll { // Full ends at 16 KiB
		text, cut = cmp.Or(p.Full, p.Excerpt), p.Full == "" || len(p.Full) > 16000 && strings.HasSuffix(p.Full, "…")
	}
	r.work.Go(func() { r.offer(p.ID, text, cut) })
}

// offer sends a waiting question again, about this text, and makes the new message the one whose buttons count. cut
// tells whether the text hides something.
func (r *receiver) offer(id, text string, cut bool) {
	v, err := r.store.View()
	if err != nil || v.Prompts[id] == nil || !v.Prompts[id].Open() || v.Sessions[v.Prompts[id].SessionID] == nil {
		return
	}
	p, s, rest := *v.Prompts[id], v.Sessions[v.Prompts[id].SessionID], ""
	ctx, cancel := context.WithDeadline(r.ctx, p.ExpiresAt)
	defer cancel()
	old := p.MsgID
	for p.Excerpt, rest = cutText(clean(text, 1<<20), partUnits-800); rest != "" && err == nil; {
		_, err = r.Notify(ctx, Notice{Mono: p.Excerpt, SessionID: s.ID, ReplyTo: old})
		p.Excerpt, rest = cutText(rest, partUnits-800)
	}
	if p.Cut = cut; err == nil { // else not shown in full, so not to be allowed
		p.MsgID, err = r.Ask(ctx, &p, s)
	}
	if err == nil {
		err = r.store.Update(func(v *View) ([]Record, error) {
			now := *cmp.Or(v.Prompts[id], &p)
			now.MsgID, p = p.MsgID, now
			return []Record{&now}, nil
		})
	}
	if r.warn("offering a question again", err); err == nil {
		r.buttons(old, nil)
		if !p.Open() { // answered meanwhile
			r.buttons(p.MsgID, nil)
		}
	}
}

// botCommands is what the operator can type, as setMyCommands takes it.
func botCommands() (list []map[string]string) {
	for _, line := range []string{"start what this is", "help all commands",
		"status open questions, and the head of the audit log", "sessions what is running",
		"switch SID: text that is no reply goes to this session", "send SID TEXT: send text to a session",
		"claim SID: the same, until /release", "release undo /claim and /switch",
		"cancel SID: end the session's program", "keys SID CTRL_C: press keys",
		"screen SID: show the screen", "last SID: show the end of the screen"} {
		name, about, _ := strings.Cut(line, " ")
		list = append(list, map[string]string{"command": name, "description": about})
	}
	return list
}

// keyBytes is what a key of /keys sends; appCursor: the program has switched the arrows to application mode (DECCKM).
// The codes are xterm's, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html.
func keyBytes(name string, appCursor bool) (string, bool) {
	name = strings.ToUpper(name)
	if c, ok := strings.CutPrefix(name, "CTRL_"); ok && len(c) == 1 && c[0] >= '@' && c[0] <= '_' {
		return string(rune(c[0] & 0x1f)), true
	}
	arrow := map[bool]string{false: "\x1b[", true: "\x1bO"}[appCursor]
	b, ok := map[string]string{"ENTER": "\r", "ESC": "\x1b", "TAB": "\t", "SHIFT_TAB": "\x1b[Z", "SPACE": " ",
		"BACKSPACE": "\x7f", "DELETE": "\x1b[3~", "PGUP": "\x1b[5~", "PGDN": "\x1b[6~", "UP": arrow + "A",
		"DOWN": arrow + "B", "RIGHT": arrow + "C", "LEFT": arrow + "D", "HOME": arrow + "H", "END": arrow + "F"}[name]
	return b, ok
}

// wish is what a message asks for: an answer now, or one thing to be done.
type wish struct {
	reply    string
	decision *Decision
	input    *InputRecord
	claim    *string // the session that text which is no reply goes to from now on, "" none
}

// said acts on a message.
func (r *receiver) said(id int64, m *message, v *View) (err error) {
	at := time.Unix(m.Date, 0).Add(time.Second)
	if skew := r.clockSkew(); skew.Abs() > 3*time.Second { // less may be rounding and the network
		at = at.Add(-skew)
	}
	w := (&heard{message: m, view: v, at: at, by: m.From.who()}).understand()
	if w.decision != nil && v.Prompts[w.decision.PromptID].Secret { // deleted unpaced: every second counts
		r.work.Go(func() {
			if r.call(r.ctx, "deleteMessage", map[string]any{"chat_id": m.Chat.ID, "message_id": m.ID}, nil) != nil {
				r.tell(m.ID, "⚠ Your message could not be deleted: delete it yourself.")
			}
		})
		if !r.cfg.Load().FreeText {
			w = wish{reply: "✗ A password cannot be given from here: type it at the keyboard."}
		}
	}
	switch {
	case w.decision != nil:
		w.decision.UpdateID = id
		var why Refusal
		if _, why, err = r.decide(*w.decision, m.From, ""); why != "" {
			w.reply = "✗ Nothing was done: " + string(why)
		}
	case w.input != nil:
		w.input.UpdateID = id
		if err = r.once(id, w.input); err == nil && w.input.Kind != "text" {
			fields := []Field{{"command", w.input.Kind}, {"by", w.input.By}}
			r.audit(Event{"SESSION_COMMAND", w.input.SessionID, "", fields})
		}
	case w.claim != nil:
		next := *cmp.Or(v.Meta["telegram"], &MetaRecord{Head: Head{ID: "telegram"}})
		next.Values = maps.Collect(maps.All(next.Values))
		next.Values["claim "+m.From.who()] = *w.claim
		err = r.once(id, &next)
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

// understand tells what a message asks for. It changes nothing. Text that came damaged or too long counts as none.
func (h *heard) understand() wish {
	text := strings.TrimSpace(cleanText(h.Text))
	if len(h.Text) > maxMessage || strings.Contains(h.Text, "\uFFFD") {
		text = ""
	}
	if line, ok := strings.CutPrefix(text, "/"); ok {
		name, rest, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(strings.ToLower(name), "@")
		return h.command(name, strings.TrimSpace(rest))
	}
	s, p, refusal := h.target("")
	if s != nil && text == "" {
		refusal = "✗ Nothing was done: only text of up to 4096 bytes can be sent to a session."
	}
	if refusal != "" || s == nil {
		return wish{reply: refusal}
	}
	return h.speak(s, p, text)
}

// command does what is answered from the state, and turns the rest into something for a session.
func (h *heard) command(name, line string) wish {
	sid, rest, _ := strings.Cut(line, " ")
	help, names := "", []string{}
	for _, c := range botCommands() {
		names = append(names, c["command"])
		help += "\n/" + c["command"] + "  " + c["description"]
	}
	if _, key := keyBytes(sid, false); key && name == "keys" {
		sid, rest = "", line
	}
	switch near := nearest(name, names); {
	case name == "start" || name == "help":
		return wish{reply: "Questions come here. Tap an answer, or reply to a message with text.\n" + help}
	case name == "status" || name == "sessions":
		return wish{reply: "Running:" + h.list(name == "status")}
	case name == "release":
		return wish{reply: "Text goes to what it replies to.", claim: ref("")}
	case !slices.Contains(names, name) && near != "":
		return wish{reply: "✗ There is no /" + name + " here. Did you mean /" + near + "?"}
	case !slices.Contains(names, name):
		return wish{reply: "✗ There is no /" + name + " here. To send it to a session: /send SID /" + name}
	}
	s, _, refusal := h.target(sid)
	example := map[string]string{"send": "go on", "keys": "CTRL_C"}[name]
	switch {
	case s == nil:
		return wish{reply: cmp.Or(refusal, "✗ Which session? Running:"+h.list(false))}
	case name == "switch" || name == "claim":
		return wish{reply: "Your text goes to " + origin(s), claim: &s.ID}
	case rest == "" && example != "":
		return wish{reply: "✗ What? Example: /" + name + " " + shortID(s.ID) + " " + example}
	case name == "send":
		return h.speak(s, nil, strings.TrimSpace(rest))
	case name == "keys":
		for _, key := range strings.Fields(rest) {
			if _, ok := keyBytes(key, false); !ok {
				return wish{reply: "✗ There is no key " + key + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB SHIFT_TAB SPACE " +
					"BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
			}
		}
	}
	return wish{input: h.input(s, name, rest)}
}

func (h *heard) input(s *SessionRecord, kind, text string) *InputRecord {
	return &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: kind, Text: text, By: h.by, ReplyTo: h.ID,
		Status: "queued"}
}

// target finds the session meant: the one named, or whose message this replies to (then also the question asked
// there), or the claimed one, or the only one. Otherwise it refuses with the list: it never guesses. No session and no
// refusal: people talking in a group.
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
	s, p = h.replied()
	if sid != "" {
		s, p = nil, nil
	} else if claim := cmp.Or(h.view.Meta["telegram"], &MetaRecord{}).Values["claim "+h.by]; s == nil {
		s = h.view.Sessions[claim]
	}
	switch {
	case len(named) == 1:
		s = named[0]
	case sid != "":
		refusal = "✗ " + sid + " does not name one session. Running:" + h.list(false)
	case s != nil || h.Chat.ID < 0:
	case len(live) == 1:
		s = live[0]
	default:
		refusal = "✗ Which session? Reply to one of its messages, or /switch SID. Running:" + h.list(false)
	}
	if s != nil && s.Status != "active" {
		return nil, nil, "✗ Nothing was sent: " + origin(s) + " has ended. Running:" + h.list(false)
	} else if s != nil && h.at.Before(s.StartedAt) {
		return nil, nil, "✗ Nothing was sent: you wrote that before " + origin(s) + " began."
	}
	return s, p, refusal
}

// replied is the session, and the question if it was one, whose message this replies to.
func (h *heard) replied() (*SessionRecord, *PromptRecord) {
	re := cmp.Or(h.ReplyTo, &message{})
	for _, p := range h.view.Prompts {
		if p.MsgID != 0 && p.MsgID == re.ID {
			return h.view.Sessions[p.SessionID], p
		}
	}
	m := sessionMark.FindStringSubmatch(re.Text)
	for _, s := range h.view.Sessions {
		if m != nil && shortID(s.ID) == m[1] && re.From != nil && re.From.IsBot {
			return s, nil
		}
	}
	return nil, nil
}

// speak gives text to a session: as the answer to its open question, or as free input. p is the question replied to;
// then text that is no choice refuses a permission. A choice can be named by its key or its label.
func (h *heard) speak(s *SessionRecord, p *PromptRecord, text string) wish {
	replied, value := p != nil, text
	for _, open := range h.view.Prompts {
		if p == nil && open.SessionID == s.ID && open.Status == AwaitingReply {
			p = open
		}
	}
	if p == nil || p.Idle {
		return wish{input: h.input(s, "text", text)}
	}
	choices := answers(p)
	named := slices.IndexFunc(choices, func(c Choice) bool {
		return strings.EqualFold(text, c.Key) || strings.EqualFold(text, c.Label)
	})
	keys := strings.Join(strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == ' ' }), ",")
	switch {
	case !replied && h.at.Before(p.CreatedAt):
		return wish{reply: "✗ Nothing was sent: you wrote that before this was asked."}
	case !replied && p.Secret:
		return wish{reply: "✗ Nothing was sent: " + origin(s) + " waits for a password."}
	case p.Secret:
	case p.Cut && (p.Multi || named >= 0 && grants(choices[named])):
		return wish{reply: "✗ Nothing was done: not all of it was shown. Tap Show all, then answer there."}
	case p.Multi && p.offered(keys):
		value = keys
	case named >= 0:
		value = choices[named].Key
	case p.Permission && replied:
		value = "deny:" + text
	case p.Permission:
		return wish{reply: "✗ Nothing was done: a permission is asked for. Tap a button, or reply to it to refuse."}
	}
	return wish{decision: &Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: value, By: h.by}}
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

// setup is one run of `atlasbridge setup`: token, who the operator is, config.toml, a test. What is there is kept.
type setup struct {
	*command
	bot *Telegram
	cfg *Config
}

func cmdSetup(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s := &setup{command: c}
	err := s.settings(o)
	if err == nil {
		err = s.run(o)
	}
	if err != nil {
		return c.fail(err)
	}
	return 0
}

func (s *setup) say(format string, args ...any) { fmt.Fprintf(s.stdout, format+"\n", args...) }

// settings takes what is configured already, the flags, and the token, if it is nowhere, from the terminal.
func (s *setup) settings(o *options) (err error) {
	in := map[string]string{"channel": "local"} // so that nothing need be complete yet
	for flag, key := range map[string]string{"chat-id": "chat_id", "user-id": "allowed_users", "api-base": "api_base"} {
		if o.given(flag) {
			in["telegram."+key] = o.text(flag)
		}
	}
	var token []byte
	if name := o.text("token-file"); name != "" {
		token, err = os.ReadFile(name)
	} else if s.cfg, err = s.config(in); err == nil && s.cfg.Token == "" && onTerminal(s.stdin) {
		fmt.Fprint(s.stdout, "Make a bot with @BotFather (/newbot) and paste its token here (it is not shown): ")
		token, err = term.ReadPassword(int(s.stdin.Fd()))
		s.say("")
	}
	if len(token) > 0 {
		in["telegram.bot_token"] = strings.TrimSpace(string(token))
	}
	if err == nil {
		s.cfg, err = s.config(in)
	}
	if err == nil && s.cfg.Token == "" {
		err = errors.New("no bot token: use --token-file FILE (/dev/stdin will do) or TELEGRAM_BOT_TOKEN")
	}
	return err
}

func (s *setup) run(o *options) (err error) {
	c, me := s.cfg, user{}
	if err = secureDir(c.Dir); err != nil {
		return err
	}
	s.bot = newBot(c.Token, c.APIBase)
	if s.bot.store, err = openStore(c.Dir); err != nil {
		return err
	}
	defer s.bot.store.Close()
	release, held, err := s.bot.store.TryPoll()
	if err == nil && !held {
		err = hinted(errors.New("a running session listens to the bot"), "end it, then run atlasbridge setup again")
	}
	if err != nil {
		return err
	}
	defer release()
	if err = s.bot.call(s.ctx, "getMe", nil, &me); err == nil {
		s.say("Bot: @%s", me.Username)
	}
	if c.ChatID == 0 && len(c.Users) > 0 {
		c.ChatID = c.Users[0]
	} else if err == nil && len(c.Users) == 0 {
		err = s.pair(me.Username)
	}
	if err == nil {
		s.say("Chat %d, allowed users %v", c.ChatID, c.Users)
		err = writeConfig(filepath.Join(c.Dir, "config.toml"), c)
	}
	if s.bot.cfg.Store(c); err == nil && !o.on("no-test") {
		err = s.test()
	}
	return err
}

// pair finds chat and user: whoever sends the code has seen this terminal. The other way round, a stranger who writes
// to the bot first could be taken for the operator by a careless "y".
func (s *setup) pair(bot string) error {
	code := newNonce()[:6]
	s.say("Open https://t.me/%s and send it anything; then send it this code:  %s", bot, code)
	return s.wait(func(u *update) bool {
		m := cmp.Or(u.Message, &message{})
		from := cmp.Or(m.From, &user{})
		if _, ok := admitted(u, []int64{from.ID}, m.Chat.ID); !ok {
			return false
		}
		s.say("\n%s, user %d, wrote in %s chat %d", clip(visible(from.Name), 40), from.ID, m.Chat.Type, m.Chat.ID)
		if subtle.ConstantTimeCompare([]byte(strings.ToLower(strings.TrimSpace(m.Text))), []byte(code)) != 1 {
			s.say("If that is you, send the code.")
			return false
		}
		s.cfg.ChatID, s.cfg.Users = m.Chat.ID, []int64{from.ID}
		return true
	})
}

// test sends a message with a button and waits until it is pressed.
func (s *setup) test() error {
	text, data := &richText{}, "setup:"+newNonce()
	text.line("", "AtlasBridge is connected. Press the button to finish the setup.")
	if _, err := s.bot.send(s.ctx, "sendMessage", text.params([][]button{{{"✅ It works", data}}}), true); err != nil {
		return hinted(err, "press Start in the bot's chat, then run atlasbridge setup again")
	}
	s.say("A test message was sent: press its button.")
	return s.wait(func(u *update) bool {
		if _, ok := admitted(u, s.cfg.Users, s.cfg.ChatID); !ok || u.Callback == nil || u.Callback.Data != data {
			return false
		}
		_ = s.bot.call(s.ctx, "answerCallbackQuery", map[string]any{"callback_query_id": u.Callback.ID}, nil)
		s.say("\nIt works. Now: atlasbridge run claude")
		return true
	})
}

// wait polls until done says so, a dot for every round.
func (s *setup) wait(done func(*update) bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	params := map[string]any{"timeout": 10, "allowed_updates": []string{"message", "callback_query"}}
	for ctx.Err() == nil {
		var updates []update
		if e, _ := s.bot.call(ctx, "getUpdates", params, &updates).(*apiError); e != nil && !e.temporary() {
			return hinted(e, e.trouble())
		} else if e != nil {
			_ = sleep(ctx, max(e.after, time.Second))
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

// What stands in the [telegram] table of a valid configuration, and in no other.
var (
	telegramKeys  = regexp.MustCompile(`(?m)^[ \t]*(bot_token|chat_id|allowed_users|api_base)[ \t]*=.*\n`)
	telegramTable = regexp.MustCompile(`(?m)^[ \t]*\[[ \t]*telegram[ \t]*\].*\n`)
)

// writeConfig puts the bot into the file and leaves every other line as it is.
func writeConfig(path string, c *Config) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	f, err := openPrivate(path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err == nil {
		_, err = f.WriteString(withTelegram(string(old), c))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = cmp.Or(os.Rename(path+".new", path), syncDir(filepath.Dir(path)))
	}
	if err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	return nil
}

// withTelegram is the text of a configuration with this bot in it.
func withTelegram(text string, c *Config) string {
	text = telegramKeys.ReplaceAllString(strings.TrimRight(text, "\n")+"\n", "")
	if !telegramTable.MatchString(text) {
		text += "\n[telegram]\n"
	}
	at, users := telegramTable.FindStringIndex(text)[1], strings.ReplaceAll(fmt.Sprint(c.Users), " ", ", ")
	lines := fmt.Sprintf("bot_token = %q\nchat_id = %d\nallowed_users = %s\n", c.Token, c.ChatID, users)
	return strings.TrimLeft(text[:at], "\n") + lines + fmt.Sprintf("api_base = %q\n", c.APIBase) + text[at:]
}
