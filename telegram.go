// Telegram: the one file that reaches the network.
//
// Out: Ask, Settle and Notify send and edit messages of this process's own session. In: Poll, in the one process that
// holds the poll lock, receives for all sessions. A tap or an answer becomes a Decision for Store.Decide, anything
// else an InputRecord that the session's owner executes; a few commands are answered here, from the state.
//
// Rules:
//   - Every request goes through call, every message through send: deadline, pacing, retries in one place each.
//   - Text is sent with entities (offsets in UTF-16 units), never with a parse_mode: what a program printed cannot
//     become markup. All text passes clean on its way out.
//   - Every update passes admitted first. Strangers are audited and never answered.
//   - An update is confirmed to the server only after what it did is on disk; ids acted on are in the state, so that
//     the next poller repeats nothing.
//   - A message to a session always ends in a line of ours with [SID:…]; only that line is believed when a reply
//     quotes it, so a program cannot print itself into another session.
//   - The token never leaves this file: no error carries a URL, and pending updates are never dropped.
//
// Sources: https://core.telegram.org/bots/api, and "server" where only the source of tdlib/telegram-bot-api tells.
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
	messageUnits   = 4096              // UTF-16 units, https://core.telegram.org/bots/api#sendmessage
	maxCallback  = 64                // bytes, https://core.telegram.org/bots/api#inlinekeyboardbutton
	maxToast     = 200               // characters, https://core.telegram.org/bots/api#answercallbackquery
	maxAnswer    = 16 << 20          // bytes: 100 updates, each with the message it replies to, stay far below
	pollSeconds  = 50                // the server clamps longer ones (server)
	pollGrace    = 10 * time.Second  // on top of pollSeconds: then the connection is taken for dead
	callTimeout  = 20 * time.Second  // any other request
	tapLife      = 150 * time.Second // the server forgets an undelivered callback_query (server)
	conflictWait = 5 * time.Second   // after a 409, before the next getUpdates
	maxBackoff   = time.Minute
	showPart     = 3500 // UTF-16 units of foreign text per message: leaves room for our own lines
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
	polling atomic.Bool // this process holds the poll lock

	mu          sync.Mutex // guards what follows
	chat        int64      // the configured chat, or the supergroup it became
	sendTrouble string
	pollTrouble string
	skew        time.Duration // Telegram's clock minus ours

	paceMu sync.Mutex // guards slot
	slot   slot       // the pacing, as far as this process knows
}

// newTelegram checks what would otherwise fail late: no token, no chat, nobody allowed, a base URL that is not safe.
func newTelegram(cfg *Config, st *Store, log *slog.Logger) (*Telegram, error) {
	switch {
	case cfg.Token == "":
		return nil, errors.New("no telegram.bot_token: run atlasbridge setup")
	case cfg.ChatID == 0:
		return nil, errors.New("no telegram.chat_id: run atlasbridge setup")
	case len(cfg.Users) == 0:
		return nil, errors.New("telegram.allowed_users is empty: nobody could answer; run atlasbridge setup")
	}
	if err := checkBaseURL(cfg.APIBase); err != nil {
		return nil, err
	}
	t := newBot(cfg.Token, cfg.APIBase)
	t.store, t.log, t.chat = st, log, cfg.ChatID
	t.cfg.Store(cfg)
	if v, err := st.View(); err == nil {
		t.chat = migrated(v, cfg.ChatID)
	}
	return t, nil
}

// newBot is the part of a Telegram that can make calls.
func newBot(token, base string) *Telegram {
	tr := http.DefaultTransport.(*http.Transport).Clone() // proxies from the environment, TLS and dial timeouts
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true) // one connection per request in flight: a dead long poll takes no message with it
	return &Telegram{token: token, base: strings.TrimRight(base, "/"), log: slog.New(slog.DiscardHandler),
		http: &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // the token is not for whoever we are sent to
		}}}
}

// Close lets idle connections go. Calls in flight end with their contexts.
func (t *Telegram) Close() error {
	t.http.CloseIdleConnections()
	return nil
}

// Reload takes over the allowlist and limits of a new configuration. An empty allowlist is ignored.
func (t *Telegram) Reload(cfg *Config) {
	if len(cfg.Users) == 0 {
		return
	}
	next := *t.cfg.Load()
	next.Users, next.FreeText, next.MaxChars, next.Flush = cfg.Users, cfg.FreeText, cfg.MaxChars, cfg.Flush
	t.cfg.Store(&next)
}

// Trouble is a sentence about what keeps Telegram from working (wrong token, blocked bot), "" when it works.
func (t *Telegram) Trouble() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sendTrouble != "" {
		return t.sendTrouble
	}
	return t.pollTrouble
}

func (t *Telegram) chatID() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.chat
}

// clockSkew is how far Telegram's clock, which dates the operator's messages, is ahead of ours.
func (t *Telegram) clockSkew() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.skew
}

// apiError is every way a call can fail. Its text never holds the URL, whose path is the token.
type apiError struct {
	method  string
	code    int // the Bot API's error_code; 0: no answer of the Bot API came (network, proxy, cut answer)
	text    string
	after   time.Duration // retry_after
	migrate int64         // the supergroup this group became
}

func (e *apiError) Error() string {
	if e.code == 0 {
		return fmt.Sprintf("telegram %s: %s", e.method, e.text)
	}
	return fmt.Sprintf("telegram %s: %d: %s", e.method, e.code, e.text)
}

// temporary tells whether the same request may succeed later.
func (e *apiError) temporary() bool { return e.code == 0 || e.code == 429 || e.code >= 500 }

// asAPI is err as an *apiError, or an empty one with code −1.
func asAPI(err error) *apiError {
	var e *apiError
	if errors.As(err, &e) {
		return e
	}
	return &apiError{code: -1}
}

// cutMessage finds the id in the answer to a sendMessage that was carried out but whose answer broke off.
var cutMessage = regexp.MustCompile(`^\{"ok":true,"result":\{"message_id":(\d+)[,}]`)

// call makes one request and decodes its result into result (nil: ignored). Errors are *apiError.
func (t *Telegram) call(ctx context.Context, method string, params, result any) error {
	limit := callTimeout
	if method == "getUpdates" {
		limit = pollSeconds*time.Second + pollGrace
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := json.Marshal(params)
	if err != nil {
		return &apiError{method: method, code: -1, text: "encoding the request: " + err.Error()}
	}
	target := t.base + "/bot" + t.token + "/" + method
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
	if err != nil {
		return &apiError{method: method, code: -1, text: "api_base and token do not make a URL"}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.http.Do(req)
	if err != nil {
		return t.broken(method, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return t.answer(method, resp, data, err, result)
}

// broken is a failure of the network, without the URL that net/http puts into its errors.
func (t *Telegram) broken(method string, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return &apiError{method: method, text: strings.ReplaceAll(err.Error(), t.token, "‹token›")}
}

// answer reads what came back: the Bot API's JSON, or a proxy's page, or a part of either.
func (t *Telegram) answer(method string, resp *http.Response, data []byte, readErr error, result any) error {
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		t.mu.Lock()
		t.skew = time.Until(date).Round(time.Second)
		t.mu.Unlock()
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
		if m := cutMessage.FindSubmatch(data); m != nil && resp.StatusCode == http.StatusOK {
			return json.Unmarshal([]byte(`{"message_id":`+string(m[1])+`}`), result)
		}
		if readErr != nil && len(data) > 0 {
			return t.broken(method, readErr)
		}
		secs, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return &apiError{method: method, after: time.Duration(secs) * time.Second,
			text: fmt.Sprintf("HTTP %d with something that is not the Bot API's answer", resp.StatusCode)}
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

// backoff is the pause before attempt n+1 (n from 0): 1 s doubling to 60 s, up to a quarter less by r in [0,1).
func backoff(n int, r float64) time.Duration {
	d := maxBackoff
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

// send is call for what makes or changes a message: paced, and retried until it is done, refused for good, or ctx
// ends. It returns the message's id. An edit that changes nothing is done; so is one whose message is gone.
func (t *Telegram) send(ctx context.Context, method string, params map[string]any, urgent bool) (int64, error) {
	for failures := 0; ; {
		if err := t.pace(ctx, urgent); err != nil {
			return 0, err
		}
		var sent struct {
			ID int64 `json:"message_id"`
		}
		params["chat_id"] = t.chatID()
		err := t.call(ctx, method, params, &sent)
		t.noteSend(err, failures)
		if err == nil || ctx.Err() != nil {
			return sent.ID, cmp.Or(ctx.Err(), err)
		}
		e := asAPI(err)
		switch {
		case strings.Contains(e.text, "message is not modified"):
			return 0, nil
		case e.migrate != 0:
			t.migrate(e.migrate)
		case e.code == 400 && strings.Contains(e.text, "parse entities") && params["entities"] != nil:
			delete(params, "entities") // a question is never lost to its looks
		case e.after > 0:
			t.block(e.after)
		case e.temporary():
			if err := sleep(ctx, backoff(failures, mrand.Float64())); err != nil {
				return 0, err
			}
			failures++
		default:
			return 0, err
		}
	}
}

// noteSend keeps Trouble current after an attempt to send.
func (t *Telegram) noteSend(err error, failures int) {
	text := ""
	switch e := asAPI(err); {
	case err == nil:
	case e.code == 401 || e.code == 404:
		text = fmt.Sprintf("Telegram refuses the bot token (%d): run atlasbridge setup", e.code)
	case e.code == 403 || strings.Contains(e.text, "chat not found"):
		text = fmt.Sprintf("the bot may not write to chat %d (%s): press Start in its chat", t.chatID(), e.text)
	case e.code != 0 && e.code < 500 || failures == 0:
		return
	default:
		text = "Telegram cannot be reached, still trying: " + e.text
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sendTrouble = text
}

// slot is the pacing of the chat, kept in one small file for all processes. About one message a second is allowed
// in a chat and 20 a minute in a group, https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this.
type slot struct {
	next  time.Time // when the next message may leave; in the past: that much is saved up for a burst
	until time.Time // retry_after: nothing leaves before
}

// reserve takes the next place at most burst messages early and tells how long to wait for it. What is not urgent
// takes nothing while it would have to wait, and always leaves one place free, so that questions overtake.
func (s slot) reserve(now time.Time, every time.Duration, burst int, urgent bool) (slot, time.Duration) {
	if s.next.After(now.Add(10 * time.Minute)) { // not by our own doing: the clock was set back
		s.next = now
	}
	if s.until.After(now.Add(24 * time.Hour)) {
		s.until = time.Time{}
	}
	if s.until.After(s.next) {
		s.next = s.until
	}
	if rested := now.Add(-every * time.Duration(burst-1)); s.next.Before(rested) {
		s.next = rested
	}
	at := s.next
	if !urgent {
		at = at.Add(every)
	}
	if wait := at.Sub(now); wait > 0 && !urgent {
		return s, wait
	}
	s.next = s.next.Add(every)
	return s, max(0, at.Sub(now))
}

// pace waits until a message may leave.
func (t *Telegram) pace(ctx context.Context, urgent bool) error {
	every, burst := 1050*time.Millisecond, 3
	if t.chatID() < 0 { // a group: burst + 60 s / every stays below 20
		every, burst = 3900*time.Millisecond, 4
	}
	for reserved := false; ; {
		var wait time.Duration
		t.shareSlot(func(s slot) slot {
			now := time.Now()
			if reserved { // but another process may have been told to wait meanwhile
				wait = s.until.Sub(now)
				return s
			}
			s, wait = s.reserve(now, every, burst, urgent)
			reserved = wait <= 0 || urgent
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

// block keeps all processes from sending for d.
func (t *Telegram) block(d time.Duration) {
	t.shareSlot(func(s slot) slot {
		s.until = time.Now().Add(d)
		return s
	})
}

// shareSlot changes the pacing under a lock. Where the file cannot be used, this process paces itself alone.
func (t *Telegram) shareSlot(change func(slot) slot) {
	t.paceMu.Lock()
	defer t.paceMu.Unlock()
	f, err := openPrivate(filepath.Join(t.store.Dir, "telegram.pace"), os.O_RDWR|os.O_CREATE)
	if err == nil {
		defer f.Close() // and with it the lock
		err = lockFile(f, true)
	}
	if err == nil {
		var next, until int64
		if n, _ := fmt.Fscanf(f, "%d %d\n", &next, &until); n == 2 {
			t.slot = slot{time.Unix(0, next), time.Unix(0, until)}
		}
	}
	t.slot = change(t.slot)
	if err == nil {
		line := fmt.Sprintf("%020d %020d\n", max(0, t.slot.next.UnixNano()), max(0, t.slot.until.UnixNano()))
		_, err = f.WriteAt([]byte(line), 0)
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

// add appends s, which has passed clean or is our own, marked as kind ("bold", "pre") unless that is "".
func (r *richText) add(kind, s string) {
	n := utf16Len(s)
	if kind != "" && n > 0 {
		r.marks = append(r.marks, entity{kind, r.units, n})
	}
	r.WriteString(s)
	r.units += n
}

// line is add on a line of its own.
func (r *richText) line(kind, s string) {
	if s == "" {
		return
	}
	if r.units > 0 {
		r.add("", "\n")
	}
	r.add(kind, s)
}

func (r *richText) params() map[string]any {
	p := map[string]any{"text": r.String(), "link_preview_options": map[string]bool{"is_disabled": true}}
	if len(r.marks) > 0 {
		p["entities"] = r.marks
	}
	return p
}

func utf16Len(s string) int {
	n := 0
	for _, c := range s {
		n += utf16.RuneLen(c)
	}
	return n
}

// clean makes text from elsewhere fit to leave: valid, trimmed as the server would, no secret, nothing invisible.
func clean(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n")
	return visible(redact(s))
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

// clipUnits cuts s to at most n UTF-16 units, ending in "…".
func clipUnits(s string, n int) string {
	if fitUnits(s, n) == len(s) {
		return s
	}
	return s[:fitUnits(s, n-1)] + "…"
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
		cut, rest := fit, fit
		if i := strings.LastIndexByte(s[:fit+1], '\n'); i > 0 {
			cut, rest = i, i+1
		}
		parts = append(parts, s[:cut])
		s = s[rest:]
	}
}

// origin is the last line of every message about a session: which one it is. sessionMark reads it back.
func origin(s *SessionRecord) string {
	parts := []string{clip(clean(s.Tool), 40)}
	if s.Label != "" {
		parts = append(parts, clip(clean(s.Label), 60))
	}
	if s.Cwd != "" {
		parts = append(parts, clip(clean(filepath.Base(s.Cwd)), 60))
	}
	return strings.Join(parts, " · ") + " [SID:" + shortID(s.ID) + "]"
}

var sessionMark = regexp.MustCompile(`\[SID:([0-9a-f]{8})\]\s*$`)

// button is one key of an inline keyboard.
type button struct {
	Text string `json:"text"`
	Data string `json:"callback_data"`
}

// What a button of ours can say besides a value for Store.Decide. No choice has such a key.
const (
	tapAll    = "~all"    // show the whole question
	tapRecent = "~recent" // show the last 500 characters
	tapToggle = "~t:"     // + a choice's key: tick or untick it
	tapSubmit = "~submit" // give the ticked choices
	tapCancel = "cancel"  // it is no question: drop it, type nothing
)

// tapData is what a button sends back, `ans:{prompt}:{session}:{nonce}:{value}` with the first 8, 8 and 16 hex digits.
func tapData(p *PromptRecord, value string) string {
	return fmt.Sprintf("ans:%s:%s:%.16s:%s", shortID(p.ID), shortID(p.SessionID), p.Nonce, value)
}

// keyboard is the rows of buttons of a question. whole: all of it has been shown, so nothing is held back. ticked are
// the keys chosen so far where several may be. What grants and what refuses never share a row.
func keyboard(p *PromptRecord, whole bool, ticked []string) [][]button {
	rows := [][]button{}
	add := func(text, value string) {
		if data := tapData(p, value); len(data) <= maxCallback {
			rows = append(rows, []button{{text, data}})
		}
	}
	held := p.Cut && !whole
	switch {
	case p.Idle || p.Secret:
		return rows
	case p.ambiguous():
		add("↩️ Send Enter", "enter")
		add("🚫 Cancel / Skip", tapCancel)
		add("🔍 Show last 500 characters", tapRecent)
		return rows
	case held:
		add("📄 Show all", tapAll)
	}
	switch {
	case p.Type == ConfirmEnter && !held:
		add("↩️ Press Enter", "enter")
	case p.Type == ConfirmEnter, p.Type == FreeText && len(p.Choices) == 0:
	default:
		for _, c := range answers(p) {
			if held && !refuses(c) {
				continue
			}
			if p.Multi {
				add(tickMark(slices.Contains(ticked, c.Key))+choiceText(p, c), tapToggle+c.Key)
			} else {
				add(choiceMark(p, c)+choiceText(p, c), c.Key)
			}
		}
	}
	if p.Multi && !held {
		add("📨 Submit", tapSubmit)
	}
	if p.SafeDefault != nil && !(held && p.Type == ConfirmEnter) {
		add("⏩ Use default ("+clipUnits(valueName(p, *p.SafeDefault), 30)+")", "default")
	}
	return rows
}

// answers are the choices of a question; a plain yes/no need not list its two.
func answers(p *PromptRecord) []Choice {
	if p.Type == YesNo && len(p.Choices) == 0 {
		return []Choice{{Key: "y", Label: "Yes", Grants: true}, {Key: "n", Label: "No"}}
	}
	return p.Choices
}

// refuses tells whether a choice may be offered before the whole question was shown: it must grant nothing, by the
// detector's word and by the hook's.
func refuses(c Choice) bool { return !c.Grants && c.Hook != "allow" && c.Key != "y" }

func choiceMark(p *PromptRecord, c Choice) string {
	switch {
	case !p.Permission && p.Type != YesNo:
		return ""
	case c.Grants || c.Key == "y":
		return "✅ "
	}
	return "❌ "
}

func tickMark(on bool) string {
	if on {
		return "✓ "
	}
	return "▫️ "
}

func choiceText(p *PromptRecord, c Choice) string {
	if p.Type == YesNo {
		return clean(c.Label)
	}
	return c.Key + ". " + clean(c.Label)
}

// valueName is a decision's value in words a person reads.
func valueName(p *PromptRecord, v string) string {
	switch {
	case v == "default" && p.SafeDefault != nil && *p.SafeDefault != v:
		return "the default, " + valueName(p, *p.SafeDefault)
	case v == "enter" || v == "\n" || v == "\r":
		return "Enter"
	case v == "esc":
		return "Esc"
	case v == "":
		return "empty"
	}
	for _, c := range answers(p) {
		if c.Key == v {
			return choiceText(p, c)
		}
	}
	if reason, ok := strings.CutPrefix(v, "deny:"); ok {
		return "No: " + clean(reason)
	}
	return clean(v)
}

// questionText is a question's message while it waits. body replaces the excerpt ("Show all").
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord, body string, now time.Time) *richText {
	r := &richText{}
	ask := clipUnits(clean(p.Question), 400)
	if body == "" {
		body = clean(p.Excerpt)
	}
	switch {
	case p.Idle:
		r.add("bold", "✅ "+clip(clean(s.Tool), 40)+" has finished and waits for your next message")
		if p.Full != "" {
			body = clipUnits(clean(p.Full), 700)
		}
	case p.Secret:
		r.add("bold", "🔑 "+cmp.Or(ask, "A password is asked for"))
	case p.ambiguous():
		r.add("bold", "❔ AtlasBridge detected a possible prompt ("+p.Confidence+" confidence).")
	case p.Permission:
		r.add("bold", "🛡️ "+cmp.Or(ask, "Permission request"))
	default:
		r.add("bold", "❓ "+cmp.Or(ask, "Waiting for your input"))
	}
	if body != "" && body != ask {
		r.line("pre", body)
	}
	for _, c := range p.Choices {
		if utf16Len(c.Label) > 30 && !p.ambiguous() { // a button shows about this much
			r.line("", choiceText(p, c))
		}
	}
	if p.Tool != "" {
		r.line("", "🔧 "+clip(clean(p.Tool), 60)+" in "+clip(clean(p.Cwd), 200))
	}
	r.line("", t.advice(p))
	if !p.Idle {
		r.line("", timeLeft(p, now))
	}
	r.line("", origin(s))
	return r
}

// advice tells what to do where buttons do not.
func (t *Telegram) advice(p *PromptRecord) string {
	switch {
	case p.Idle:
		return "Reply to this message with what to do next."
	case p.Secret && t.cfg.Load().FreeText && t.polling.Load():
		return "Type it at the keyboard. Or reply to this message with it: your message is deleted at once, but " +
			"Telegram has seen it."
	case p.Secret:
		return "It is not asked for here: type it at the keyboard."
	case p.ambiguous():
		return "What should AtlasBridge do?"
	case p.Cut:
		return "This is not all of it: it can be allowed after Show all."
	case p.Multi:
		return "Tick what applies, then Submit."
	case p.Type == FreeText:
		return "Reply to this message with your answer."
	case p.Permission:
		return "Reply with text to refuse and say why."
	}
	return ""
}

func timeLeft(p *PromptRecord, now time.Time) string {
	left := p.ExpiresAt.Sub(now)
	then := "nothing is typed"
	if p.SafeDefault != nil && !p.Secret {
		then = "default: " + clipUnits(valueName(p, *p.SafeDefault), 80)
	}
	if left <= 0 {
		return "⏳ Time is up: " + then
	}
	secs := int(left.Round(time.Second) / time.Second)
	return fmt.Sprintf("⏳ Expires in %dm %02ds, then %s", secs/60, secs%60, then)
}

// outcomeText is a question's message when it is over.
func outcomeText(p *PromptRecord, s *SessionRecord) *richText {
	r := &richText{}
	ask := cmp.Or(clipUnits(clean(p.Question), 400), "Question")
	if p.Idle {
		ask = clip(clean(s.Tool), 40) + " had finished"
	}
	r.add("bold", ask)
	if body := clean(p.Excerpt); body != "" && body != ask && !p.Idle {
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
		value = ": " + clipUnits(valueName(p, *p.Value), 300)
	}
	if p.DecidedAt != nil {
		at = " at " + p.DecidedAt.Local().Format("15:04:05 MST")
	}
	if p.Reason != "" {
		reason = " (" + clipUnits(clean(p.Reason), 300) + ")"
	}
	timeout := p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"
	switch {
	case p.Status == Failed:
		return "⚠️ Not delivered" + value + at + reason
	case p.Status == Canceled:
		return "🚫 Canceled " + byWhom(p.DecidedBy) + at + reason
	case (p.Status == Expired || timeout) && value == "":
		return "⌛ Expired" + at + ": nothing was typed" + reason
	case p.Status == Expired || timeout:
		return "⌛ No answer in time" + at + "; given by default" + value + reason
	case p.Status == ReplyReceived:
		return "⏱ Answered " + byWhom(p.DecidedBy) + at + value + " (on its way)"
	}
	return "✅ Answered " + byWhom(p.DecidedBy) + at + value + reason
}

// Ask sends the question. It rings, except for the announcement that a tool is idle.
func (t *Telegram) Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error) {
	return t.ask(ctx, p, s, "", false)
}

// ask is Ask with another body than the excerpt; whole: nothing of the question is hidden any more.
func (t *Telegram) ask(ctx context.Context, p *PromptRecord, s *SessionRecord, body string, whole bool) (int64, error) {
	params := t.questionText(p, s, body, time.Now()).params()
	if rows := keyboard(p, whole, nil); len(rows) > 0 {
		params["reply_markup"] = map[string]any{"inline_keyboard": rows}
	}
	params["disable_notification"] = p.Idle
	return t.send(ctx, "sendMessage", params, !p.Idle)
}

// Settle edits the question's message to what p now says. While a cut or several-choice question waits its message
// is left alone: only the poller knows what of it was shown and ticked.
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error {
	if p.MsgID == 0 || p.open() && (p.Cut || p.Multi) {
		return nil
	}
	r := outcomeText(p, s)
	if p.open() {
		r = t.questionText(p, s, "", time.Now())
	}
	params := r.params()
	params["message_id"] = p.MsgID
	if rows := keyboard(p, false, nil); p.open() && len(rows) > 0 {
		params["reply_markup"] = map[string]any{"inline_keyboard": rows}
	}
	return t.edit(ctx, params)
}

// edit changes a message; one that the operator deleted needs no change.
func (t *Telegram) edit(ctx context.Context, params map[string]any) error {
	_, err := t.send(ctx, "editMessageText", params, true)
	if e := asAPI(err); e.code == 400 && strings.Contains(e.text, "message to edit not found") {
		return nil
	}
	return err
}

// Notify sends a notice in as many messages as it needs and returns the id of the last; with Edit the first of them
// is an edit of that message.
func (t *Telegram) Notify(ctx context.Context, n Notice) (int64, error) {
	last := ""
	if n.SessionID != "" {
		if v, err := t.store.View(); err == nil && v.Sessions[n.SessionID] != nil {
			last = origin(v.Sessions[n.SessionID])
		}
	}
	id := n.Edit
	for i, r := range noticeTexts(clean(n.Text), clean(n.Mono), last) {
		params := r.params()
		if i == 0 && n.Edit != 0 {
			params["message_id"] = n.Edit
			if _, err := t.send(ctx, "editMessageText", params, n.Ring); err != nil {
				return 0, err
			}
			continue
		}
		params["disable_notification"] = !n.Ring
		if n.ReplyTo != 0 {
			params["reply_parameters"] = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		}
		sent, err := t.send(ctx, "sendMessage", params, n.Ring || n.ReplyTo != 0)
		if err != nil {
			return 0, err
		}
		id = sent
	}
	return id, nil
}

// noticeTexts lays a notice out: the text, the monospace part, and the session's line at the end of every message.
func noticeTexts(text, mono, last string) []*richText {
	var out []*richText
	for _, part := range splitText(text, showPart) {
		r := &richText{}
		r.line("", part)
		out = append(out, r)
	}
	if mono != "" {
		for i, part := range splitText(mono, showPart) {
			if r := out[len(out)-1]; i > 0 || r.units+utf16Len(part) > showPart {
				out = append(out, &richText{})
			}
			out[len(out)-1].line("pre", part)
		}
	}
	for _, r := range out {
		r.line("", last)
	}
	return slices.DeleteFunc(out, func(r *richText) bool { return r.units == 0 })
}

// update is the part of the Bot API's Update that counts here; everything else is ignored.
type update struct {
	ID       int64    `json:"update_id"`
	Message  *message `json:"message"`
	Callback *press   `json:"callback_query"`
}

type message struct {
	ID            int64           `json:"message_id"`
	From          *user           `json:"from"`
	SenderChat    json.RawMessage `json:"sender_chat"` // a channel, or an anonymous administrator
	Chat          chat            `json:"chat"`
	Date          int64           `json:"date"` // Unix seconds by the server's clock; 0: no longer accessible
	EditDate      int64           `json:"edit_date"`
	ForwardOrigin json.RawMessage `json:"forward_origin"`
	ForwardDate   int64           `json:"forward_date"`
	Automatic     bool            `json:"is_automatic_forward"`
	ViaBot        json.RawMessage `json:"via_bot"`
	Text          string          `json:"text"`
	Caption       string          `json:"caption"`
	ReplyTo       *message        `json:"reply_to_message"`
	MigrateTo     int64           `json:"migrate_to_chat_id"`
	Markup        struct {
		Rows [][]button `json:"inline_keyboard"`
	} `json:"reply_markup"`
}

type user struct {
	ID       int64  `json:"id"`
	IsBot    bool   `json:"is_bot"`
	Name     string `json:"first_name"`
	Username string `json:"username"` // for display only: it can be taken by others
}

type chat struct {
	ID    int64  `json:"id"`
	Type  string `json:"type"`
	Title string `json:"title"`
}

// press is a CallbackQuery: a button was pressed.
type press struct {
	ID      string   `json:"id"`
	From    *user    `json:"from"`
	Message *message `json:"message"`
	Data    string   `json:"data"`
}

// admitted decides, for every kind of update and nowhere else, whether it counts: "" or the reason why not. It counts
// when a person on the allowlist, known by number alone, wrote it himself in the configured chat.
func admitted(u *update, users []int64, chatID int64) (who *user, reason string) {
	var in chat
	switch {
	case u.Callback != nil && u.Message == nil:
		who = u.Callback.From
		if u.Callback.Message != nil {
			in = u.Callback.Message.Chat
		}
	case u.Message != nil && u.Callback == nil:
		who, in = u.Message.From, u.Message.Chat
	default:
		return nil, "kind of update"
	}
	switch {
	case who == nil || who.IsBot || who.ID <= 0:
		return who, "not a person"
	case !slices.Contains(users, who.ID):
		return who, "not on the allowlist"
	case chatID == 0 || in.ID != chatID:
		return who, "another chat"
	case chatID > 0 && (in.Type != "private" || in.ID != who.ID):
		return who, "not a private chat"
	case chatID < 0 && in.Type != "group" && in.Type != "supergroup":
		return who, "not a group"
	}
	if m := u.Message; m != nil {
		switch {
		case len(m.SenderChat) > 0:
			return who, "sent as a chat"
		case len(m.ForwardOrigin) > 0 || m.ForwardDate != 0 || m.Automatic:
			return who, "forwarded"
		case len(m.ViaBot) > 0:
			return who, "sent via a bot"
		case m.EditDate != 0:
			return who, "edited"
		}
	}
	return who, ""
}

// receiver is a Telegram while it polls. Its fields belong to the goroutine that listens.
type receiver struct {
	*Telegram
	me         user
	jobs       chan func(context.Context) // answers that may wait for the pacing, done in order by one goroutine
	toasts     sync.WaitGroup             // answers to taps under way
	ticked     map[string][]string        // prompt id → keys of the choices ticked so far
	lastOK     time.Time                  // wall clock of the last successful getUpdates
	noted      string                     // the failure already reported
	strangers  int                        // audited in the minute that began at strangerAt
	strangerAt time.Time
	unaudited  int
}

// Poll receives for all sessions as long as this process holds the poll lock, and otherwise waits for it.
// Decisions go to Store.Decide, everything else for a session becomes an InputRecord. It returns when ctx ends, or
// when the token is refused for good.
func (t *Telegram) Poll(ctx context.Context) {
	for ctx.Err() == nil {
		release, held, err := t.store.TryPoll()
		switch {
		case err != nil:
			t.notePoll("the poll lock cannot be used: " + err.Error())
		case held:
			t.polling.Store(true)
			final := t.receive(ctx)
			t.polling.Store(false)
			release()
			if final {
				return
			}
		default:
			t.watchPoller()
		}
		if sleep(ctx, time.Second) != nil {
			return
		}
	}
}

func (t *Telegram) notePoll(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pollTrouble != text && text != "" {
		t.log.Warn(text)
	}
	t.pollTrouble = text
}

// heartbeat is the file whose time of change says when the poller last got an answer.
func (t *Telegram) heartbeat() string { return filepath.Join(t.store.Dir, "poll.lock") }

// watchPoller says so when another process holds the lock but is stopped or stuck. A held lock is never taken away.
func (t *Telegram) watchPoller() {
	info, err := os.Stat(t.heartbeat())
	if age := time.Since(modTime(info, err)); age > 2*tapLife {
		t.notePoll("the atlasbridge that listens to Telegram has been silent for " + age.Round(time.Minute).String() +
			": see atlasbridge status")
		return
	}
	t.notePoll("")
}

func modTime(info os.FileInfo, err error) time.Time {
	if err != nil {
		return time.Now()
	}
	return info.ModTime()
}

// receive is Poll with the lock held. It returns true when polling makes no sense any more.
func (t *Telegram) receive(ctx context.Context) (final bool) {
	ctx, stop := context.WithCancel(ctx)
	r := &receiver{Telegram: t, ticked: map[string][]string{}, jobs: make(chan func(context.Context), 64)}
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
	r.lastOK = time.Now().Round(0)
	if v, err := t.store.View(); err == nil {
		if at, err := time.Parse(time.RFC3339, metaValue(v, "down_since")); err == nil {
			r.lastOK = at
		}
	}
	t.setMeta(map[string]string{"poller_pid": strconv.Itoa(os.Getpid()),
		"poller_since": time.Now().UTC().Format(time.RFC3339)})
	r.later(r.register)
	return r.listen(ctx)
}

// later queues a job for the worker. When 64 wait already the chat is far behind, and the job is dropped.
func (r *receiver) later(job func(context.Context)) {
	select {
	case r.jobs <- job:
	default:
		r.log.Warn("too many answers are waiting to be sent to Telegram: one was dropped")
	}
}

// listen polls until ctx ends (false) or the token is refused (true).
func (r *receiver) listen(ctx context.Context) (final bool) {
	var offset int64
	for failures, probe := 0, true; ctx.Err() == nil; {
		params := map[string]any{"timeout": pollSeconds, "allowed_updates": []string{"message", "callback_query"}}
		if probe { // to know soon whether all is well
			params["timeout"] = 1
		}
		if offset != 0 {
			params["offset"] = offset
		}
		var updates []json.RawMessage
		err := r.awake(ctx, func(ctx context.Context) error { return r.call(ctx, "getUpdates", params, &updates) })
		if err == nil {
			for _, raw := range updates {
				id, failed := r.take(ctx, raw)
				if err = failed; err != nil {
					break // not on disk, so not confirmed: it comes again
				}
				offset = id + 1 // assigned, not the maximum: ids restart at random after a week (server)
			}
			r.recovered(ctx)
		}
		if probe = err != nil; !probe {
			failures = 0
			continue
		}
		pause, final := r.failed(ctx, err, failures)
		if failures++; final {
			return true
		}
		if sleep(ctx, pause) != nil {
			break
		}
	}
	return false
}

// awake runs a long request and ends it early when the machine has slept: the connection will not have survived.
func (r *receiver) awake(ctx context.Context, request func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the request
		const beat = 10 * time.Second
		tick := time.NewTicker(beat)
		defer tick.Stop()
		for last := time.Now().Round(0); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if time.Since(last) > 3*beat { // by the wall clock, which goes on while the machine sleeps
					cancel()
				}
				last = time.Now().Round(0)
			}
		}
	}()
	return request(ctx)
}

// failed judges a failed getUpdates: how long to wait, or that it is final.
func (r *receiver) failed(ctx context.Context, err error, failures int) (pause time.Duration, final bool) {
	if ctx.Err() != nil {
		return 0, false
	}
	e, pause := asAPI(err), backoff(failures, mrand.Float64())
	text := "Telegram cannot be reached, still trying: " + e.text
	switch {
	case e.code == 401 || e.code == 404:
		text, final = fmt.Sprintf("Telegram refuses the bot token (%d): run atlasbridge setup", e.code), true
	case e.code == 409 && strings.Contains(e.text, "webhook"):
		text = "a webhook is set for this bot, so it cannot be polled: atlasbridge setup removes it"
	case e.code == 409:
		text = "another program polls with this bot's token: stop it, or make a bot of its own for it"
	case e.after > 0:
		return e.after, false
	case e.method == "":
		text = "what Telegram sent cannot be recorded: " + err.Error()
	case failures == 0:
		text = ""
	}
	if e.code == 409 {
		pause = max(pause, conflictWait)
	}
	r.notePoll(text)
	if text != "" && r.noted == "" {
		r.noted = text
		r.setMeta(map[string]string{"down_since": r.lastOK.UTC().Format(time.RFC3339)})
	}
	return pause, final
}

// recovered notes a successful poll. After an outage longer than a tap lives, taps may be lost: what still waits is
// offered again.
func (r *receiver) recovered(ctx context.Context) {
	now := time.Now().Round(0)
	gap := now.Sub(r.lastOK)
	r.lastOK = now
	_ = os.Chtimes(r.heartbeat(), now, now) // only a sign of life
	r.notePoll("")
	if r.noted != "" {
		r.noted = ""
		r.setMeta(map[string]string{"down_since": ""})
	}
	if gap <= tapLife {
		return
	}
	v, err := r.store.View()
	if err != nil {
		return
	}
	for _, p := range v.Prompts {
		if p.Status == AwaitingReply && p.MsgID != 0 && !p.Idle && now.Sub(p.At) > tapLife && now.Before(p.ExpiresAt) {
			r.later(func(ctx context.Context) { r.offer(ctx, p.ID, nil, false) })
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
		_ = json.Unmarshal(raw, &only) // what cannot be read is confirmed unread
		return only.ID, nil
	}
	who, reason := admitted(&u, r.cfg.Load().Users, r.chatID())
	if reason != "" {
		r.stranger(&u, who, reason)
		return u.ID, nil
	}
	v, err := r.store.View()
	if err != nil || v.Updates[strconv.FormatInt(u.ID, 10)] != nil {
		return u.ID, err
	}
	if u.Callback != nil {
		return u.ID, r.tap(ctx, u.ID, u.Callback, v)
	}
	return u.ID, r.said(ctx, u.ID, u.Message, v)
}

// stranger audits an update that does not count, at most ten a minute, and does nothing else.
func (r *receiver) stranger(u *update, who *user, reason string) {
	if now := time.Now(); now.Sub(r.strangerAt) > time.Minute {
		r.strangerAt, r.strangers = now, 0
	}
	if r.strangers++; r.strangers > 10 {
		r.unaudited++
		return
	}
	e := Event{Name: "UNAUTHORIZED", Fields: []Field{{"update_id", u.ID}, {"reason", reason}}}
	if who != nil {
		e.Fields = append(e.Fields, Field{"user_id", strconv.FormatInt(who.ID, 10)})
	}
	if r.unaudited > 0 {
		e.Fields = append(e.Fields, Field{"not_audited_before", int64(r.unaudited)})
		r.unaudited = 0
	}
	r.audit(e)
}

func (r *receiver) audit(e Event) {
	if err := r.store.Audit().Append(e); err != nil {
		r.log.Warn("auditing "+e.Name, "error", err)
	}
}

// toast answers a tap: a line on the phone, or a box to be closed when it says that nothing was done.
func (r *receiver) toast(ctx context.Context, q *press, text string, box bool) {
	r.toasts.Go(func() {
		params := map[string]any{"callback_query_id": q.ID, "show_alert": box}
		if text != "" {
			params["text"] = clipUnits(clean(text), maxToast)
		}
		if err := r.call(ctx, "answerCallbackQuery", params, nil); err != nil {
			r.log.Debug("answering a tap", "error", err) // too old is not worth another try
		}
	})
}

// tapped finds the question a button belongs to. All four fields must match; the nonce is compared in constant time.
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

// tap acts on a pressed button.
func (r *receiver) tap(ctx context.Context, id int64, q *press, v *View) error {
	p, value := tapped(q.Data, v)
	for tries := 0; p != nil && p.open() && q.Message.ID > p.MsgID && tries < 100; tries++ {
		// The message is newer than the record of it, which is being written.
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
		if v, err := r.store.View(); err == nil {
			p, value = tapped(q.Data, v)
		}
	}
	switch {
	case p == nil:
		r.rejected(id, q, "unknown question or nonce", nil)
		r.toast(ctx, q, "This question is not known any more. Nothing was done.", true)
		r.later(func(ctx context.Context) { r.bare(ctx, q.Message.ID) })
		return r.once(id, "callback_query")
	case q.Message.ID != p.MsgID:
		r.rejected(id, q, "not the question's message", p)
		r.toast(ctx, q, "This message is out of date: use the newest one of this question. Nothing was done.", true)
		r.later(func(ctx context.Context) { r.bare(ctx, q.Message.ID) })
		return r.once(id, "callback_query")
	case strings.HasPrefix(value, "~") && value != tapSubmit && p.open():
		if err := r.once(id, "callback_query"); err != nil {
			return err
		}
		r.show(ctx, q, p, value)
		return nil
	}
	if value == tapSubmit {
		value = strings.Join(r.ticks(q, p), ",")
	}
	return r.decide(ctx, id, q, p, value)
}

// decide gives the answer to the store and tells the operator what became of it.
func (r *receiver) decide(ctx context.Context, id int64, q *press, p *PromptRecord, value string) error {
	d := Decision{PromptID: p.ID, SessionID: p.SessionID, Nonce: p.Nonce, Value: value, UpdateID: id,
		By: "telegram:" + strconv.FormatInt(q.From.ID, 10)}
	now, refusal, err := r.store.Decide(d, time.Now())
	switch {
	case err != nil:
		r.toast(ctx, q, "It could not be recorded, so nothing was done yet. It is tried again.", true)
		return err
	case refusal == "":
		delete(r.ticked, p.ID)
		r.toast(ctx, q, "✓ "+valueName(p, value), false)
		return nil
	}
	r.toast(ctx, q, string(refusal), true)
	if !now.open() {
		r.later(func(ctx context.Context) { r.settle(ctx, now) })
	}
	return r.once(id, "callback_query")
}

// settle shows a question's outcome in its message, whichever session it belongs to.
func (r *receiver) settle(ctx context.Context, p PromptRecord) {
	v, err := r.store.View()
	if err != nil || v.Sessions[p.SessionID] == nil {
		return
	}
	if err := r.Settle(ctx, &p, v.Sessions[p.SessionID]); err != nil {
		r.log.Warn("editing a question's message", "error", err)
	}
}

// bare takes the buttons off a message.
func (r *receiver) bare(ctx context.Context, msg int64) {
	_, err := r.send(ctx, "editMessageReplyMarkup", map[string]any{"message_id": msg}, true)
	if err != nil {
		r.log.Debug("taking the buttons off a message", "error", err)
	}
}

func (r *receiver) rejected(id int64, q *press, reason string, p *PromptRecord) {
	e := Event{Name: "REPLY_REJECTED", Fields: []Field{{"reason", reason}, {"update_id", id},
		{"by", "telegram:" + strconv.FormatInt(q.From.ID, 10)}}}
	if p != nil {
		e.SessionID, e.PromptID = p.SessionID, p.ID
	}
	r.audit(e)
}

// show does what a button asks that decides nothing: show more, or tick a choice.
func (r *receiver) show(ctx context.Context, q *press, p *PromptRecord, value string) {
	switch key, toggle := strings.CutPrefix(value, tapToggle); {
	case toggle:
		keys := r.ticks(q, p)
		if i := slices.Index(keys, key); i >= 0 {
			keys = slices.Delete(keys, i, i+1)
		} else {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		r.ticked[p.ID] = keys
		r.toast(ctx, q, "", false)
		rows := keyboard(p, !hasButton(q.Message, tapAll), keys)
		r.later(func(ctx context.Context) {
			params := map[string]any{"message_id": q.Message.ID, "reply_markup": map[string]any{"inline_keyboard": rows}}
			if _, err := r.send(ctx, "editMessageReplyMarkup", params, true); err != nil {
				r.log.Warn("ticking a choice", "error", err)
			}
		})
	case value == tapAll:
		r.toast(ctx, q, "Here is all of it", false)
		r.later(func(ctx context.Context) { r.offer(ctx, p.ID, splitText(clean(p.Full), 3000), true) })
	case value == tapRecent:
		r.toast(ctx, q, "Here is more of it", false)
		r.later(func(ctx context.Context) { r.offer(ctx, p.ID, splitText(clean(p.Recent), 3000), false) })
	}
}

// ticks are the keys ticked so far: as this poller knows, or else as the message's buttons say.
func (r *receiver) ticks(q *press, p *PromptRecord) []string {
	if keys, ok := r.ticked[p.ID]; ok {
		return slices.Clone(keys)
	}
	var keys []string
	for _, row := range q.Message.Markup.Rows {
		for _, b := range row {
			if _, key, ok := strings.Cut(b.Data, ":"+tapToggle); ok && strings.HasPrefix(b.Text, tickMark(true)) {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

func hasButton(m *message, value string) bool {
	return slices.ContainsFunc(m.Markup.Rows, func(row []button) bool {
		return slices.ContainsFunc(row, func(b button) bool { return strings.HasSuffix(b.Data, ":"+value) })
	})
}

// offer sends a waiting question again, in full (parts) or as it was, and makes the new message the one that counts.
func (r *receiver) offer(ctx context.Context, id string, parts []string, whole bool) {
	v, err := r.store.View()
	if err != nil || v.Prompts[id] == nil || v.Sessions[v.Prompts[id].SessionID] == nil || !v.Prompts[id].open() {
		return
	}
	p, s := *v.Prompts[id], v.Sessions[v.Prompts[id].SessionID]
	body := ""
	for i, part := range parts {
		if body = part; i == len(parts)-1 {
			break
		}
		if _, err := r.Notify(ctx, Notice{Mono: part, SessionID: s.ID, ReplyTo: p.MsgID}); err != nil {
			return
		}
	}
	msg, err := r.ask(ctx, &p, s, body, whole)
	if err != nil {
		r.log.Warn("offering a question again", "error", err)
		return
	}
	old, over := int64(0), false
	err = r.store.Update(func(v *View) ([]Record, error) {
		p = *v.Prompts[id]
		if over = !p.open(); over {
			return nil, nil
		}
		old, p.MsgID = p.MsgID, msg
		return []Record{&p}, nil
	})
	switch {
	case over:
		p.MsgID = msg
		r.settle(ctx, p)
	case err == nil:
		r.bare(ctx, old)
	}
}

// once records that an update has been acted on.
func (r *receiver) once(id int64, kind string, with ...Record) error {
	return r.store.Update(func(v *View) ([]Record, error) {
		key := strconv.FormatInt(id, 10)
		if v.Updates[key] != nil {
			return nil, nil
		}
		return append(with, &UpdateRecord{Head: Head{Rec: "update", ID: key}, Kind: kind}), nil
	})
}

func metaValue(v *View, key string) string {
	if m := v.Meta["telegram"]; m != nil {
		return m.Values[key]
	}
	return ""
}

// setMeta changes values of the record "telegram"; "" removes one.
func (t *Telegram) setMeta(values map[string]string) error {
	err := t.store.Update(func(v *View) ([]Record, error) {
		next := MetaRecord{Head: Head{Rec: "meta", ID: "telegram"}, Values: map[string]string{}}
		if m := v.Meta["telegram"]; m != nil {
			next = *m
			next.Values = maps.Clone(m.Values)
		}
		for k, value := range values {
			if next.Values[k] = value; value == "" {
				delete(next.Values, k)
			}
		}
		return []Record{&next}, nil
	})
	if err != nil {
		t.log.Warn("recording the poller's state", "error", err)
	}
	return err
}

// migrate follows a group that became a supergroup, for all processes.
func (t *Telegram) migrate(to int64) {
	t.mu.Lock()
	t.chat = to
	t.mu.Unlock()
	t.log.Warn("the group became a supergroup: set telegram.chat_id to the new id", "chat_id", to)
	t.setMeta(map[string]string{"migrated": fmt.Sprintf("%d %d", t.cfg.Load().ChatID, to)})
}

// migrated is the chat that the configured one has become.
func migrated(v *View, chat int64) int64 {
	var from, to int64
	if n, _ := fmt.Sscanf(metaValue(v, "migrated"), "%d %d", &from, &to); n == 2 && from == chat {
		return to
	}
	return chat
}

// botCommands is what the operator can type, as setMyCommands takes it.
func botCommands() []map[string]string {
	var list []map[string]string
	for _, c := range [][2]string{
		{"start", "what this is"},
		{"help", "all commands"},
		{"status", "open questions, who listens, the audit log's head"},
		{"sessions", "what is running"},
		{"switch", "SID: text without a reply goes to this session"},
		{"send", "SID TEXT: send text to a session"},
		{"claim", "SID: all text goes to this session until /release"},
		{"release", "undo /claim and /switch"},
		{"cancel", "SID: end the session's program"},
		{"keys", "SID CTRL_C: press keys (ENTER ESC TAB UP DOWN …)"},
		{"screen", "SID: show the screen"},
		{"last", "SID: show the end of the screen"},
	} {
		list = append(list, map[string]string{"command": c[0], "description": c[1]})
	}
	return list
}

// register tells Telegram the commands, for the configured chat alone, unless it knows them.
func (r *receiver) register(ctx context.Context) {
	scope := map[string]any{"type": "chat", "chat_id": r.chatID()}
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
	keys := map[string]string{"ENTER": "\r", "ESC": "\x1b", "TAB": "\t", "SHIFT_TAB": "\x1b[Z", "SPACE": " ",
		"BACKSPACE": "\x7f", "DELETE": "\x1b[3~", "PGUP": "\x1b[5~", "PGDN": "\x1b[6~", "UP": arrow + "A",
		"DOWN": arrow + "B", "RIGHT": arrow + "C", "LEFT": arrow + "D", "HOME": arrow + "H", "END": arrow + "F"}
	b, ok := keys[name]
	return b, ok
}

// operatorText is a message's text as data: no control characters but newline and tab. ok is false when it came
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

// wish is what a message asks for: an answer now, and at most one thing to be done.
type wish struct {
	reply, mono string
	decision    *Decision
	secret      bool // the decision's value is a password
	input       *InputRecord
	meta        map[string]string
}

// said acts on a message.
func (r *receiver) said(ctx context.Context, id int64, m *message, v *View) (err error) {
	if m.MigrateTo != 0 {
		r.migrate(m.MigrateTo)
	}
	at := time.Unix(m.Date, 0).Add(time.Second)
	if skew := r.clockSkew(); skew.Abs() > 2*time.Second { // less may be the network
		at = at.Add(-skew)
	}
	w := (&heard{message: m, view: v, at: at}).understand()
	switch {
	case w.secret:
		w.reply, err = r.password(ctx, id, m, *w.decision)
	case w.decision != nil:
		w.decision.UpdateID = id
		_, refusal, failed := r.store.Decide(*w.decision, time.Now())
		if err = failed; err == nil && refusal != "" {
			w.reply, err = "✗ "+string(refusal), r.once(id, "message")
		}
	case w.input != nil:
		w.input.UpdateID = id
		err = r.once(id, "message", w.input)
	case w.reply != "" || w.mono != "":
		err = r.once(id, "message")
	}
	if err == nil && w.meta != nil {
		err = r.setMeta(w.meta)
	}
	if err != nil {
		w = wish{reply: "✗ It could not be recorded, so nothing was done yet. It is tried again."}
	}
	if w.reply != "" || w.mono != "" {
		r.later(func(ctx context.Context) {
			if _, err := r.Notify(ctx, Notice{Text: w.reply, Mono: w.mono, ReplyTo: m.ID}); err != nil {
				r.log.Warn("answering the operator", "error", err)
			}
		})
	}
	return err
}

// password hands a secret to the session of this process that asked for it. The message is deleted whatever comes.
func (r *receiver) password(ctx context.Context, id int64, m *message, d Decision) (reply string, err error) {
	r.later(func(ctx context.Context) {
		params := map[string]any{"message_id": m.ID}
		if _, err := r.send(ctx, "deleteMessage", params, true); err != nil {
			r.Notify(ctx, Notice{Text: "⚠️ Your message could not be deleted: delete it yourself.", ReplyTo: m.ID, Ring: true})
		}
	})
	if !r.cfg.Load().FreeText {
		return "✗ A password cannot be given from here: type it at the keyboard.", r.once(id, "message")
	}
	d.UpdateID = id
	_, refusal, err := r.store.Decide(d, time.Now())
	if err == nil && refusal != "" {
		return "✗ " + string(refusal), r.once(id, "message")
	}
	return "", err
}

// heard is a message of the operator together with all that decides what it means.
type heard struct {
	*message
	view *View
	at   time.Time // the end of the second it was written in, by our clock
}

// understand tells what a message asks for. It changes nothing.
func (h *heard) understand() wish {
	text, ok := operatorText(h.Text)
	switch {
	case !ok:
		return wish{reply: "✗ This text came damaged. Nothing was done."}
	case text == "" && h.Text+h.Caption == "":
		return wish{}
	case strings.TrimSpace(text) == "":
		return wish{reply: "✗ Only text can be sent to a session."}
	case strings.HasPrefix(text, "/"):
		name, rest := cutWord(text[1:])
		name, _, _ = strings.Cut(strings.ToLower(name), "@")
		return h.command(name, rest)
	}
	s, p, refusal := h.target("")
	if refusal != "" {
		return wish{reply: refusal}
	}
	return h.speak(s, p, text)
}

func cutWord(s string) (word, rest string) {
	if i := strings.IndexAny(s, " \t\n"); i >= 0 {
		return s[:i], strings.TrimLeft(s[i:], " \t\n")
	}
	return s, ""
}

// command does what is answered from the state, and turns the rest into something for a session.
func (h *heard) command(name, line string) wish {
	sid, rest := cutWord(line)
	who := strconv.FormatInt(h.From.ID, 10)
	switch name {
	case "start", "help":
		text := "The questions of your atlasbridge sessions come here: tap an answer, or reply to a message with text.\n"
		for _, c := range botCommands() {
			text += "\n/" + c["command"] + "  " + c["description"]
		}
		return wish{reply: text}
	case "status":
		return wish{reply: h.status()}
	case "sessions":
		return wish{reply: sessionList("Running:", h.view)}
	case "release":
		return wish{reply: "Released: text goes where it is a reply to.", meta: map[string]string{"claim:" + who: "", "switch:" + who: ""}}
	case "keys":
		if _, ok := keyBytes(sid, false); ok {
			sid, rest = "", line
		}
		for _, key := range strings.Fields(rest) {
			if _, ok := keyBytes(key, false); !ok {
				return wish{reply: "✗ There is no key " + key + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB SHIFT_TAB SPACE BACKSPACE DELETE " +
					"UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
			}
		}
	case "switch", "send", "claim", "cancel", "screen", "last":
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
	case refusal != "":
		return wish{reply: refusal}
	case name == "switch" || name == "claim":
		return wish{reply: "Your text goes to " + origin(s), meta: map[string]string{name + ":" + who: s.ID}}
	case rest == "" && (name == "send" || name == "keys"):
		return wish{reply: "✗ What? Example: /" + name + " " + shortID(s.ID) + map[string]string{"send": " go on", "keys": " CTRL_C"}[name]}
	case name == "send":
		return h.speak(s, nil, rest)
	}
	return wish{input: h.input(s, name, rest)}
}

func (h *heard) input(s *SessionRecord, kind, text string) *InputRecord {
	return &InputRecord{Head: Head{Rec: "input", ID: newID()}, SessionID: s.ID, Kind: kind, Text: text,
		By: "telegram:" + strconv.FormatInt(h.From.ID, 10), ReplyTo: h.ID, Status: "queued"}
}

// target finds the session meant: the one named, or whose message this replies to (then also the question asked
// there), or the claimed or switched one, or the only one. Otherwise it refuses with the list; it never guesses.
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
	who := strconv.FormatInt(h.From.ID, 10)
	held := cmp.Or(metaValue(h.view, "claim:"+who), metaValue(h.view, "switch:"+who))
	switch {
	case sid != "":
		if len(named) != 1 {
			return nil, nil, sessionList("✗ "+sid+" does not name one session. Running:", h.view)
		}
		s = named[0]
	case h.ReplyTo != nil && h.replied() != nil:
		s, p = h.replied(), h.question()
	case held != "":
		s = h.view.Sessions[held]
	case h.Chat.ID < 0:
		return nil, nil, "" // people talk in a group: only what is addressed counts
	case len(live) == 1:
		s = live[0]
	case len(live) > 1:
		return nil, nil, sessionList("✗ Which session? Reply to one of its messages, or /switch SID. Running:", h.view)
	}
	switch {
	case s == nil:
		return nil, nil, "✗ No session is running here."
	case s.Status != "active":
		return nil, nil, sessionList("✗ "+origin(s)+" has ended. Nothing was sent. Running:", h.view)
	case h.at.Before(s.StartedAt):
		return nil, nil, "✗ That was written before " + origin(s) + " began. Nothing was sent."
	}
	return s, p, ""
}

// question is the question whose message this replies to.
func (h *heard) question() *PromptRecord {
	for _, p := range h.view.Prompts {
		if h.ReplyTo != nil && p.MsgID != 0 && p.MsgID == h.ReplyTo.ID {
			return p
		}
	}
	return nil
}

// replied is the session whose message this replies to: by the question asked in it, or by its last line.
func (h *heard) replied() *SessionRecord {
	if p := h.question(); p != nil {
		return h.view.Sessions[p.SessionID]
	}
	m := sessionMark.FindStringSubmatch(h.ReplyTo.Text)
	if m == nil || h.ReplyTo.From == nil || !h.ReplyTo.From.IsBot {
		return nil
	}
	for _, s := range h.view.Sessions {
		if shortID(s.ID) == m[1] {
			return s
		}
	}
	return nil
}

// speak gives text to a session: as the answer to its open question, or as free input. p is the question replied to.
func (h *heard) speak(s *SessionRecord, p *PromptRecord, text string) wish {
	if s == nil {
		return wish{}
	}
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
		return wish{reply: "✗ A question came after you wrote that. Nothing was sent: " + p.Question}
	case p.Secret && !replied:
		return wish{reply: "✗ " + origin(s) + " waits for a password, so nothing was sent."}
	}
	value, refusal := answerTo(p, text, replied)
	if refusal != "" {
		return wish{reply: "✗ " + refusal}
	}
	return wish{secret: p.Secret, decision: &Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: value,
		By: "telegram:" + strconv.FormatInt(h.From.ID, 10)}}
}

// answerTo turns text into a value for Store.Decide: a choice by its key or label, several by their keys; else the
// text itself, which refuses a permission when it replies to the question.
func answerTo(p *PromptRecord, text string, replied bool) (value, refusal string) {
	if p.Secret {
		return text, ""
	}
	var keys []string
	words := []string{text}
	if p.Multi {
		words = strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == ' ' })
	}
	for _, word := range words {
		word = strings.TrimSpace(word)
		for _, c := range answers(p) {
			if !strings.EqualFold(word, c.Key) && !strings.EqualFold(word, c.Label) {
				continue
			}
			if p.Cut && !refuses(c) {
				return "", "Not all of it was shown: tap Show all, then answer there."
			}
			keys = append(keys, c.Key)
		}
		if strings.EqualFold(word, "enter") && (p.Type == ConfirmEnter || p.ambiguous()) {
			keys = append(keys, "enter")
		}
	}
	switch {
	case len(keys) > 0 && len(keys) == len(words):
		return strings.Join(keys, ","), ""
	case p.Permission && replied:
		return "deny:" + text, ""
	case p.Permission:
		return "", "A permission is asked for. Tap a button, or reply to that message to refuse and say why: " + p.Question
	}
	return text, ""
}

// status is what /status shows: what waits, who listens, and the audit log's head, which the chat then witnesses.
func (h *heard) status() string {
	text := sessionList("Running:", h.view)
	for _, p := range h.view.Prompts {
		if s := h.view.Sessions[p.SessionID]; s != nil && p.open() && !p.Idle {
			text += "\n❓ " + clipUnits(p.Question, 100) + "\n" + timeLeft(p, time.Now()) + " · " + origin(s)
		}
	}
	text += "\nListening: process " + metaValue(h.view, "poller_pid") + " since " + metaValue(h.view, "poller_since")
	if a := h.view.Meta["audit"]; a != nil {
		text += fmt.Sprintf("\nAudit log: %d %s", a.Seq, a.Hash)
	}
	return text
}

// sessionList is the running sessions under a heading.
func sessionList(heading string, v *View) string {
	var lines []string
	for _, s := range v.Sessions {
		if s.Status == "active" {
			lines = append(lines, "\n• "+strings.ReplaceAll(s.Activity, "_", " ")+" · "+origin(s))
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
// seen this terminal, so a stranger who writes to the bot first cannot be taken for the operator by one careless key.
func cmdSetup(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s := &setup{command: c, o: o}
	if err := s.run(); err != nil {
		return c.fail(err)
	}
	return 0
}

// setup is one run of cmdSetup.
type setup struct {
	*command
	o      *options
	bot    *Telegram
	me     user
	offset int64
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
	kept := func(key string) string { return fmt.Sprint(cmp.Or(old[key].value, any(""))) }
	token, err := s.token(kept("telegram.bot_token"))
	if err == nil {
		err = checkToken(token)
	}
	if err != nil {
		return fmt.Errorf("bot token: %w", err)
	}
	base := cmp.Or(s.o.text("api-base"), s.getenv("TELEGRAM_API_BASE"), kept("telegram.api_base"), "https://api.telegram.org")
	if err := checkBaseURL(base); err != nil {
		return fmt.Errorf("api base: %w", err)
	}
	s.bot = newBot(token, base)
	if s.bot.store, err = openStore(dir); err != nil {
		return err
	}
	if err := s.bot.call(s.ctx, "getMe", map[string]any{}, &s.me); err != nil {
		return hinted(err, "401 or 404: the token is not valid, ask @BotFather for it; else check the network")
	}
	s.say("Bot: @%s", s.me.Username)
	release, held, err := s.bot.store.TryPoll()
	if err != nil {
		return err
	}
	if held {
		defer release()
	}
	if err := s.webhook(); err != nil {
		return err
	}
	chatID, users, err := s.operator(old, held)
	if err != nil {
		return err
	}
	ids := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(users)), ", "), "[]")
	values := [][2]string{{"bot_token", strconv.Quote(token)}, {"chat_id", strconv.FormatInt(chatID, 10)}, {"allowed_users", "[" + ids + "]"}}
	if base != "https://api.telegram.org" {
		values = append(values, [2]string{"api_base", strconv.Quote(base)})
	}
	if err := writeConfig(path, values); err != nil {
		return err
	}
	s.say("Written: %s", path)
	return s.test(chatID, users, held)
}

// token finds the bot token: file, standard input, environment, what is configured, or asks without echo.
func (s *setup) token(kept string) (string, error) {
	if name := s.o.text("token-file"); name != "" {
		text, err := os.ReadFile(name)
		return strings.TrimSpace(string(text)), err
	}
	if s.o.on("token-stdin") {
		text, err := io.ReadAll(io.LimitReader(s.stdin, 1024))
		return strings.TrimSpace(string(text)), err
	}
	if token := cmp.Or(s.getenv("TELEGRAM_BOT_TOKEN"), kept); token != "" {
		return token, nil
	}
	if !onTerminal(s.stdin) {
		return "", errors.New("give it by --token-file, --token-stdin or TELEGRAM_BOT_TOKEN")
	}
	fmt.Fprint(s.stdout, "Make a bot with @BotFather (/newbot) and paste its token here (not shown): ")
	text, err := term.ReadPassword(int(s.stdin.Fd()))
	s.say("")
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
		answer, _ := bufio.NewReader(s.stdin).ReadString('\n')
		if strings.TrimSpace(answer) != "y" {
			return errors.New("a bot with a webhook cannot be polled: remove it, or use another bot")
		}
	}
	return s.bot.call(s.ctx, "deleteWebhook", map[string]any{}, nil)
}

// operator finds chat and user: by flag, as configured, or by a code from the phone.
func (s *setup) operator(old map[string]tomlEntry, held bool) (chatID int64, users []int64, err error) {
	var was Config
	for _, row := range settings(&was) {
		if e, ok := old[row.key]; ok && (row.key == "telegram.chat_id" || row.key == "telegram.allowed_users") {
			if err := row.put(&was, e.value); err != nil {
				return 0, nil, fmt.Errorf("config.toml:%d: %s %w", e.line, row.key, err)
			}
		}
	}
	chatID, users = was.ChatID, was.Users
	if text := s.o.text("user-id"); text != "" {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id <= 0 {
			return 0, nil, errors.New("--user-id must be a number, not a name")
		}
		if chatID = cmp.Or(chatID, id); !slices.Contains(users, id) {
			users = append(users, id)
		}
	}
	if text := s.o.text("chat-id"); text != "" {
		if chatID, err = strconv.ParseInt(text, 10, 64); err != nil {
			return 0, nil, errors.New("--chat-id must be a number")
		}
	}
	if chatID != 0 && len(users) > 0 {
		s.say("Chat %d, allowed users %v", chatID, users)
		return chatID, users, nil
	}
	if !held {
		return 0, nil, hinted(errors.New("a running session listens to this bot"), "end it first, or give --chat-id and --user-id")
	}
	number, err := rand.Int(rand.Reader, big.NewInt(1_000_000))
	if err != nil {
		return 0, nil, err
	}
	code, tries := fmt.Sprintf("%06d", number), map[int64]int{}
	s.say("Open https://t.me/%s, press Start (or send anything), then send it this code:  %s", s.me.Username, code)
	err = s.wait(func(u *update) bool {
		m := u.Message
		if m == nil || m.From == nil || m.From.IsBot || len(m.SenderChat) > 0 || m.ForwardDate != 0 || m.EditDate != 0 {
			return false
		}
		if tries[m.From.ID]++; tries[m.From.ID] > 5 { // of a million: nobody guesses it
			return false
		}
		if subtle.ConstantTimeCompare([]byte(strings.TrimSpace(m.Text)), []byte(code)) == 1 {
			chatID, users = m.Chat.ID, append(users, m.From.ID)
			s.say("\nConfirmed: %s (user %d) in %s chat %d", clip(visible(m.From.Name), 40), m.From.ID, m.Chat.Type, m.Chat.ID)
			return true
		}
		s.say("\n%s (user %d) wrote to the bot. If that is you, send the code.", clip(visible(m.From.Name), 40), m.From.ID)
		return false
	})
	return chatID, users, err
}

// wait polls until done, a dot for every round.
func (s *setup) wait(done func(*update) bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	for failures := 0; ; {
		var updates []update
		params := map[string]any{"timeout": 10, "allowed_updates": []string{"message", "callback_query"}}
		if s.offset != 0 {
			params["offset"] = s.offset
		}
		err := s.bot.call(ctx, "getUpdates", params, &updates)
		if ctx.Err() != nil {
			return hinted(errors.New("nothing came within 10 minutes"), "run atlasbridge setup again; the code will be another one")
		}
		if err != nil {
			if failures++; !asAPI(err).temporary() || failures > 10 {
				return err
			}
			_ = sleep(ctx, max(asAPI(err).after, backoff(failures-1, 0)))
			continue
		}
		fmt.Fprint(s.stdout, ".")
		for i := range updates {
			if s.offset = updates[i].ID + 1; done(&updates[i]) {
				return s.bot.call(ctx, "getUpdates", map[string]any{"offset": s.offset, "timeout": 0}, nil)
			}
		}
	}
}

// test sends a message with a button and waits until it is pressed.
func (s *setup) test(chatID int64, users []int64, held bool) error {
	if s.o.on("no-test") {
		return nil
	}
	s.bot.chat = chatID
	data := "setup:" + newNonce()
	params := (&richText{}).params()
	params["text"] = "AtlasBridge is connected. Press the button to finish the setup."
	params["reply_markup"] = map[string]any{"inline_keyboard": [][]button{{{"✅ It works", data}}}}
	id, err := s.bot.send(s.ctx, "sendMessage", params, true)
	if err != nil {
		return hinted(err, "press Start in the bot's chat, then run atlasbridge setup again")
	}
	if !held {
		s.say("A test message was sent; the session that listens to this bot takes its button.")
		return nil
	}
	s.say("A test message was sent: press its button (--no-test skips this)")
	err = s.wait(func(u *update) bool {
		if _, reason := admitted(u, users, chatID); reason != "" || u.Callback == nil || u.Callback.Data != data {
			return false
		}
		_ = s.bot.call(s.ctx, "answerCallbackQuery", map[string]any{"callback_query_id": u.Callback.ID}, nil)
		return true
	})
	if err != nil {
		return err
	}
	s.say("\nIt works. Now: atlasbridge run claude")
	return s.bot.edit(s.ctx, map[string]any{"message_id": id, "text": "✅ AtlasBridge is connected."})
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
	if err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

// withTelegram is the text of a configuration with these keys in its [telegram] table; values are as TOML writes them.
func withTelegram(text string, values [][2]string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	isTable := func(line string) bool { return strings.HasPrefix(strings.TrimSpace(line), "[") }
	start := slices.IndexFunc(lines, func(line string) bool {
		m := tomlTable.FindStringSubmatch(line)
		return m != nil && m[1] == "telegram"
	})
	if start < 0 {
		lines = append(lines, "", "[telegram]")
		start = len(lines) - 1
	}
	for _, kv := range values {
		end := len(lines)
		if i := slices.IndexFunc(lines[start+1:], isTable); i >= 0 {
			end = start + 1 + i
		}
		line := kv[0] + " = " + kv[1]
		at := slices.IndexFunc(lines[start+1:end], func(l string) bool {
			name, _, ok := strings.Cut(l, "=")
			return ok && strings.TrimSpace(name) == kv[0]
		})
		if at >= 0 {
			lines[start+1+at] = line
			continue
		}
		for end > start+1 && strings.TrimSpace(lines[end-1]) == "" {
			end--
		}
		lines = slices.Insert(lines, end, line)
	}
	return strings.TrimLeft(strings.Join(lines, "\n"), "\n") + "\n"
}
