// Telegram: the one file that reaches the network. Out: Ask, Settle and Notify, for this process's own session. In:
// Poll, in the process that holds the poll lock, for all sessions: an answer becomes a Decision, else an InputRecord.
// Text is sent with entities, never with a parse_mode: what a program printed cannot become markup. A message about a
// session ends in our [SID:…]; only that line routes a reply. The token never leaves this file: no error carries a URL.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/term"
)

const (
	partUnits     = 3400                   // UTF-16 units of foreign text in a message of 4096: room for our own lines
	urgencyLook   = time.Second            // what waits its turn looks so often whether it has become urgent
	answerLinger  = 2 * time.Second        // after a question is over: its message's id is still worth that
	onItsWayAfter = 900 * time.Millisecond // an answer typed by then needs no edit in between
	debtsEvery    = 5 * time.Second        // messages that are owed an edit are looked for so often
	debtsPatience = 30 * time.Second       // a living session has that long to edit its own messages
	debtsPause    = time.Minute            // after an edit that failed for good
	tapCrosses    = 10 * time.Second       // a tap may be that old when it comes: it was made before the edit was seen
	lostLife      = time.Minute            // a request without an answer is carried out by then, or never
)

// What buttons say, and no choice has as its key.
const (
	tapAll    = "~all"    // show all of the question
	tapRecent = "~recent" // show the end of the screen
	tapAgain  = "~again"  // ask what stands there anew
	tapEnter  = "~enter"  // press Enter at a question for text
	tapLeave  = "~leave"  // leave the question to the terminal
	tapTick   = "~t:"     // and keys: these are ticked
	tapSubmit = "~s:"     // and keys: these are chosen
)

var (
	sessionMark   = regexp.MustCompile(`\[SID:([0-9a-f]{8})\]\s*$`)
	cutAnswer     = regexp.MustCompile(`^\{"ok":true,"result":(\{"message_id":\d+)[,}]`) // broken off, but carried out
	telegramTable = regexp.MustCompile(`(?m)^[ \t]*\[[ \t]*telegram[ \t]*\].*\n`)        // the keys are only in this one
	mixedWord     = regexp.MustCompile(`\S*([a-zA-Z][\p{Cyrillic}\p{Greek}]|[\p{Cyrillic}\p{Greek}][a-zA-Z])\S*`)
	telegramKeys  = regexp.MustCompile(`(?m)^[ \t]*(bot_token|chat_id|allowed_users|api_base)[ \t]*=.*\n`)
	botCommands   = []struct { // what the operator can type, as setMyCommands takes it
		Name  string `json:"command"`
		About string `json:"description"`
	}{{"start", "what this is"}, {"help", "all commands"}, {"status", "open questions, and the head of the audit log"},
		{"sessions", "what is running"}, {"switch", "SID: text that is no reply goes to this session"},
		{"send", "SID TEXT: send text to a session"}, {"claim", "SID: the same, until /release"},
		{"release", "undo /claim and /switch"}, {"cancel", "SID: end the session's program"},
		{"keys", "SID CTRL_C: press keys"}, {"screen", "SID: show the screen"}, {"last", "SID: show the end of the screen"}}
)

type Channel interface { // questions to the operator, and outcomes; methods block, are paced and retry until ctx ends
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (msg int64, err error) // msg: the message's id, 0 none
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error               // has it say what the record says
	Notify(ctx context.Context, n Notice) (msg int64, err error)
	Close() error
}
type Notice struct { // a message that asks nothing: Text, then Mono in monospace, then which session it is about
	Text, Mono, SessionID string
	ReplyTo, Edit         int64 // message ids, 0 none; Edit: change that message instead of sending one
	Ring, Urgent          bool  // with sound, silent otherwise; before streams, as what rings or replies goes
}
type Telegram struct { // the Bot API channel and its poller; its methods may be called from different goroutines
	store    *Store
	log      *slog.Logger
	http     *http.Client
	jitter   func() float64 // rand.Float64, or a test's own
	cfg      atomic.Pointer[Config]
	skew     atomic.Int64 // Telegram's clock minus ours, a time.Duration
	polling  atomic.Bool  // this process holds the poll lock
	troubles sync.Map     // by "send" and "poll": what keeps it from working, "" nothing; set by note

	crosses time.Duration // how old a tap may be when it comes: tapCrosses

	postsMu sync.Mutex
	posts   map[string]*post // by prompt, while somebody edits its message or has to know what became of that
}
type apiError struct { // an answer of the Bot API, and every way in which a call can fail; never with the URL
	OK         bool
	Result     json.RawMessage
	Code       int    `json:"error_code"` // 0: no answer of the Bot API came (network, proxy, cut answer)
	Text       string `json:"description"`
	Parameters map[string]time.Duration
	method     string
}
type richText struct { // a message's text with its entities, whose offsets and lengths count UTF-16 units
	text  string
	marks []map[string]any
}
type button = map[string]string // text and callback_data

func newTelegram(cfg *Config, st *Store, log *slog.Logger) *Telegram { // st and log may be nil where it only calls
	tr := http.DefaultTransport.(*http.Transport).Clone() // proxies from the environment; limits on dialing and TLS
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true) // a dead long poll takes no message with it
	t := &Telegram{store: st, log: cmp.Or(log, slog.New(slog.DiscardHandler)), http: &http.Client{Transport: tr},
		posts: map[string]*post{}, crosses: tapCrosses, jitter: rand.Float64}
	t.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	t.cfg.Store(cfg)
	return t
}
func (t *Telegram) Close() error             { t.http.CloseIdleConnections(); return nil }
func (t *Telegram) clockSkew() time.Duration { return time.Duration(t.skew.Load()) }
func (t *Telegram) Trouble() (text string) { // a sentence about what keeps Telegram from working, "" when it works
	t.troubles.Range(func(_, trouble any) bool { text = trouble.(string); return text == "" })
	return text
}
func (t *Telegram) note(way, text string) {
	if old, _ := t.troubles.Swap(way, text); text != "" && text != old {
		t.log.Warn(text)
	}
}
func when[T any](holds bool, v T) (out T) { // v where the condition holds, and else nothing; v is computed in any case
	if holds {
		out = v
	}
	return out
}

func (e *apiError) Error() string        { return "telegram " + e.method + ": " + e.Text }
func (e *apiError) temporary() bool      { return e.Code == 0 || e.Code == 429 || e.Code >= 500 }
func (e *apiError) after() time.Duration { return e.Parameters["retry_after"] * time.Second }

func (e *apiError) says(words ...string) bool {
	return e.Code > 0 && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(e.Text, w) })
}
func (e *apiError) trouble(failures int) string { // of an error that is not one request's alone, nor soon over
	e = cmp.Or(e, &apiError{Code: http.StatusOK})
	return cmp.Or(
		when(e.Code == 401 || e.Code == 404, "Telegram refuses the bot token ("+e.Text+"): run atlasbridge setup"),
		when(e.Code == 403 || e.says("chat not found", "upgraded to a supergroup"),
			"the bot may not write to its chat ("+e.Text+"): press Start there, or run atlasbridge setup"),
		when(e.says("webhook"),
			"a webhook is set for this bot, so it cannot be polled: remove it, or give AtlasBridge a bot of its own"),
		when(e.Code == 409, "another program polls with this bot's token: stop it, or give it a bot of its own"),
		when(e.temporary() && e.after() == 0 && failures > 0, "Telegram cannot be reached, still trying: "+e.Text))
}

// call makes one request and decodes its result, if it is wanted. An error, such as a proxy's page, is an *apiError.
func (t *Telegram) call(ctx context.Context, method string, params map[string]any, result any) error {
	seconds, _ := params["timeout"].(int) // of a poll, on top of the 15 that any request may take
	ctx, cancel := context.WithTimeout(ctx, time.Duration(15+seconds)*time.Second)
	defer cancel()
	cfg, e, resp, data := t.cfg.Load(), &apiError{method: method}, &http.Response{}, []byte{}
	url := strings.TrimRight(cfg.APIBase, "/") + "/bot" + cfg.Token + "/" + method
	body, _ := json.Marshal(params) // plain values: cannot fail
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(string(body)))
	if err == nil {
		req.Header.Set("Content-Type", "application/json")
		resp, err = t.http.Do(req)
	}
	if err == nil {
		defer resp.Body.Close()
		data, err = io.ReadAll(io.LimitReader(resp.Body, 16<<20)) // 100 updates and what they reply to stay far below
	}
	if err != nil && len(data) == 0 { // what url.Error wraps is without the URL
		e.Text = strings.ReplaceAll(cmp.Or(errors.Unwrap(err), err).Error(), cfg.Token, "‹token›")
		return e
	}
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		t.skew.Store(int64(time.Until(date)))
	}
	if m := cutAnswer.FindSubmatch(data); json.Unmarshal(data, e) != nil && m != nil && resp.StatusCode == http.StatusOK {
		e.OK, e.Result = true, append(m[1], '}')
	}
	if e.OK && (result == nil || json.Unmarshal(e.Result, result) == nil) {
		return nil
	}
	e.Text = cmp.Or(when(e.OK, "a result of another shape than documented"),
		when(e.Code == 0, resp.Status+", but nothing the Bot API would say"), fmt.Sprintf("%d: %s", e.Code, e.Text))
	return e
}

func backoff(n int, r float64) time.Duration { // after failure n ≥ 0: 1 s doubling to 60 s, less r of a quarter
	d := min(time.Minute, time.Second<<min(n, 6))
	return d - time.Duration(r*float64(d)/4)
}
func sleep(ctx context.Context, d time.Duration) error { // the error is that of ctx, when it ends first
	timer, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-timer.Done()
	return ctx.Err()
}

// draft is a message that is written when it leaves: after its turn has come, and anew for every attempt.
type draft struct {
	urgent func() bool                                   // it may overtake what is not
	write  func() (method string, params map[string]any) // params nil: there is nothing to say any more
	lost   func()                                        // an attempt had no answer: it may be carried out, even later
	linger time.Duration                                 // so long an answer on its way is waited for after ctx has ended
}

// send is call for messages: paced, repeated until done, refused for good or ctx ends. Id 0: the one to edit is gone.
func (t *Telegram) send(ctx context.Context, method string, params map[string]any, urgent bool) (int64, error) {
	return t.deliver(ctx, draft{
		urgent: func() bool { return urgent },
		write:  func() (string, map[string]any) { return method, params },
		lost:   func() {},
	})
}

// deliver sends a draft: paced, repeated until done, refused for good or ctx ends. Id 0 without an error: the message
// to edit is gone, or there was nothing to say any more.
func (t *Telegram) deliver(ctx context.Context, d draft) (int64, error) {
	plain := false
	for failures := 0; ; failures++ {
		if err := t.pace(ctx, d.urgent); err != nil {
			return 0, err
		}
		method, params := d.write()
		if params == nil {
			return 0, nil
		}
		params["chat_id"] = t.cfg.Load().ChatID
		if plain {
			delete(params, "entities")
		}
		id, e := t.attempt(ctx, d.linger, method, params)
		if e == nil {
			t.note("send", "")
			return id, nil
		}
		if e.Code == 0 || e.Code >= 500 {
			d.lost()
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		t.note("send", e.trouble(failures))
		switch {
		case e.says("message is not modified"):
			id, _ := params["message_id"].(int64)
			return id, nil
		case e.says("message to edit not found", "message can't be edited"):
			return 0, nil
		case e.says("parse entities") && params["entities"] != nil:
			plain = true // a question is never lost to its looks
		case !e.temporary():
			return 0, e
		default:
			t.postpone(e.after())
			wait := e.after()
			if wait == 0 {
				wait = backoff(failures, t.jitter())
			}
			_ = sleep(ctx, wait) // the next turn notices that ctx has ended
		}
	}
}

// attempt makes one request for a message, whose id it returns.
func (t *Telegram) attempt(ctx context.Context, linger time.Duration, method string,
	params map[string]any) (int64, *apiError) {
	inFlight, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(linger, cancel) })
	defer stop()
	var sent message
	err := t.call(inFlight, method, params, &sent)
	if err != nil {
		return 0, err.(*apiError) // call has no other errors
	}
	return sent.ID, nil
}

// postpone keeps all processes from sending for as long as Telegram has asked for; 0: it has not.
func (t *Telegram) postpone(wait time.Duration) {
	if wait > 0 {
		t.turn(func(time.Time) time.Time { return time.Now().Add(wait) })
	}
}

// pace waits until a message may leave. What is not urgent may become so meanwhile.
func (t *Telegram) pace(ctx context.Context, urgent func() bool) error {
	// 1/s in a chat, 20/min in a group: https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this
	every := 1050 * time.Millisecond
	if t.cfg.Load().ChatID < 0 {
		every = 3900 * time.Millisecond // 4 + 60/3.9 < 20
	}
	for ctx.Err() == nil {
		hurry := urgent()
		wait := time.Duration(0)
		t.turn(func(next time.Time) time.Time {
			next, wait = reserve(next, time.Now(), every, hurry)
			return next
		})
		if wait == 0 {
			return nil
		}
		if !hurry {
			wait = min(wait, urgencyLook)
		}
		_ = sleep(ctx, wait) // its error is that of ctx
	}
	return ctx.Err()
}
func reserve(next, now time.Time, every time.Duration, urgent bool) (time.Time, time.Duration) { // or how long to wait
	due := max(next.Sub(now), -3*every)               // up to four turns are saved up
	if wait := due + when(!urgent, every); wait > 0 { // what is not urgent leaves one of them free: questions overtake
		return next, wait
	}
	return now.Add(due + every), 0
}
func (t *Telegram) turn(change func(next time.Time) time.Time) { // changes when the next message of all may leave
	f, err := openPrivate(filepath.Join(t.store.Dir, "telegram.pace"), os.O_RDWR|os.O_CREATE)
	var next, written int64 // 0, 0 where it cannot be used: then only Telegram paces
	if err == nil && lockFile(f, true) == nil {
		_, _ = fmt.Fscanf(f, "%d %d", &next, &written)
	}
	due := change(time.Unix(0, when(written <= time.Now().UnixNano(), next))) // written later: the clock has been set back
	_, _ = f.WriteAt(fmt.Appendf(nil, "%020d %020d\n", due.UnixNano(), time.Now().UnixNano()), 0)
	f.Close() // and with it the lock
}

func (r *richText) line(kind, s string) { // s, unless empty, as lines of their own; kind: "bold", "pre" or ""
	r.text += when(s != "" && r.text != "", "\n")
	if s != "" && kind != "" {
		r.marks = append(r.marks, map[string]any{"type": kind, "offset": units(r.text), "length": units(s)})
	}
	r.text += s
}
func units(s string) int { return len(utf16.Encode([]rune(s))) }
func (r *richText) params(rows [][]button) map[string]any {
	return map[string]any{"text": r.text, "entities": append([]map[string]any{}, r.marks...), "reply_markup": markup(rows),
		"link_preview_options": map[string]bool{"is_disabled": true}}
}
func markup(rows [][]button) any {
	return map[string][][]button{"inline_keyboard": append([][]button{}, rows...)}
}
func clean(s string, n int) string { // text from elsewhere: valid, no secret, nothing invisible, at most n UTF-16 units
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = visible(redact(strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n")))
	short, _ := cutText(s, n-1)
	return cmp.Or(when(units(s) > n, short+"…"), s)
}
func cutText(s string, n int) (part, rest string) { // of n UTF-16 units, or to a line end in its second half, then lost
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
func origin(s *SessionRecord) string { // the last line of every message about a session: which one; see sessionMark
	line := clean(s.Tool, 40)
	for _, more := range []string{s.Label, filepath.Base(s.Cwd)} {
		line += when(more != "" && more != ".", " · "+clean(more, 60))
	}
	return line + " [SID:" + shortID(s.ID) + "]"
}

// keyboard is an open question's buttons, one a row. While not all of it has been shown, nothing but what refuses it is
// offered. ticked are the keys chosen so far where several may be; they live in the buttons: what is seen is submitted.
func keyboard(p *PromptRecord, ticked ...string) (rows [][]button) {
	add := func(text, value string) { // https://core.telegram.org/bots/api#inlinekeyboardbutton
		if data := buttonData(p, value); len(data) <= 64 {
			rows = append(rows, []button{{"text": text, "callback_data": data}})
		}
	}
	if !p.Open() || p.Idle || p.Secret {
		return nil
	}
	read := p.ShownAll && !p.Cut
	if !p.ShownAll && !p.ambiguous() {
		add("📄 Show all", tapAll)
	}
	if read && (p.ambiguous() || p.Type == FreeText) {
		add("↩️ Send Enter", tapEnter)
	}
	switch {
	case p.ambiguous():
		add("🚫 Cancel / Skip", tapLeave)
		add("🔍 Show last 500 characters", tapRecent)
		return rows
	case p.Type == FreeText:
		add("🚫 Leave it", tapLeave)
	case p.Type == ConfirmEnter && read:
		add("↩️ Press Enter", "enter")
	}
	for _, c := range answers(p) {
		switch {
		case p.Multi && read:
			text, value := tickButton(p, c, ticked)
			add(text, value)
		case !p.Multi && (read || p.refuses(c.Key)):
			add(choiceMark(p, c)+choiceText(p, c), c.Key)
		}
	}
	if p.Multi && read {
		add("📨 Submit", tapSubmit+strings.Join(ticked, ","))
	}
	if p.SafeDefault != nil && *p.SafeDefault == "esc" {
		add("⏩ Use default (Esc)", "default")
	}
	return rows
}

// buttonData is what a tap on a button of p sends back: source 3, section 7.2.
func buttonData(p *PromptRecord, value string) string {
	return fmt.Sprintf("ans:%.8s:%.8s:%.16s:%s", p.ID, p.SessionID, p.Nonce, value)
}

// keyboardAfter is what can be tapped when a question is over: one that nobody answered and that may still stand can be
// asked again.
func keyboardAfter(p *PromptRecord) [][]button {
	if p.Status != Expired || p.Value != nil || p.Idle || p.Source != "screen" {
		return nil
	}
	return [][]button{{{"text": "🔁 Ask again", "callback_data": buttonData(p, tapAgain)}}}
}

// tickButton ticks the choice, or unticks it.
func tickButton(p *PromptRecord, c Choice, ticked []string) (text, value string) {
	on := slices.Contains(ticked, c.Key)
	keys := slices.DeleteFunc(append(slices.Clone(ticked), c.Key), func(key string) bool { return on && key == c.Key })
	slices.Sort(keys)
	mark := "▫️ "
	if on {
		mark = "✓ "
	}
	return mark + choiceText(p, c), tapTick + strings.Join(keys, ",")
}

// choiceMark tells at a glance what a choice does: it allows, allows for good, or refuses.
func choiceMark(p *PromptRecord, c Choice) string {
	switch {
	case !p.Permission && p.Type != YesNo:
		return ""
	case c.Key == hookAlways:
		return "🔓 "
	case grants(c):
		return "✅ "
	}
	return "❌ "
}

func answers(p *PromptRecord) []Choice { // a list of its own; a plain yes/no need not have its two
	plain := []Choice{{Key: "y", Label: "Yes"}, {Key: "n", Label: "No"}}
	return append(slices.Clone(p.Choices), when(p.Type == YesNo && len(p.Choices) == 0, plain)...)
}
func grants(c Choice) bool { return c.Grants || c.Key == "y" } // by whatever says so
func choiceText(p *PromptRecord, c Choice) string {
	if p.Type == YesNo || p.Source == "hook" && p.Permission {
		return clean(c.Label, 60)
	}
	return clean(c.Key, 9) + ". " + clean(c.Label, 60)
}
func valueName(p *PromptRecord, value *string) string { // a decision's value, nil none, in a person's words
	if value == nil {
		return "empty"
	}
	if p.Multi {
		return chosenNames(p, *value)
	}
	for _, c := range answers(p) {
		if c.Key == *value {
			return choiceText(p, c)
		}
	}
	switch *value {
	case "", "enter", enterAlone:
		return "Enter"
	case "esc":
		return "Esc"
	case leaveIt:
		return "left to the terminal"
	case "default":
		return "the default"
	}
	return *value
}

// chosenNames are the labels of several choices; words of the operator's own stay as they are.
func chosenNames(p *PromptRecord, keys string) string {
	var names []string
	for key := range strings.SplitSeq(keys, ",") {
		label := p.label(key)
		if label == "" {
			return keys
		}
		names = append(names, label)
	}
	return strings.Join(names, ", ")
}

// foreign is what of a question comes from the program, in the order in which a message shows it: what stands above it,
// and the question's own text without the line that says it again.
func foreign(p *PromptRecord) (above, body string) {
	above, body = clean(p.Above, 1<<20), clean(cmp.Or(p.Full, p.Excerpt), 1<<20)
	question := clean(p.Question, 400)
	var lines []string
	for line := range strings.SplitSeq(body, "\n") {
		if strings.TrimSuffix(strings.TrimSpace(line), "…") != question {
			lines = append(lines, line)
		}
	}
	return above, strings.Trim(strings.Join(lines, "\n"), "\n")
}

// fitsMessage tells whether all of an open question fits into one message, so that it can be answered there.
func fitsMessage(p *PromptRecord) bool {
	above, body := foreign(p)
	return units(above)+units(body)+units(clean(p.Lasting, 1<<20)) <= partUnits
}

// ends is the beginning and the end of a text that is too long for a message, and what of it is missing.
func ends(text string, n int) string {
	if units(text) <= n {
		return text
	}
	head, rest := cutText(text, 2*n/3)
	skip := max(0, len(rest)-n/3)
	tail := strings.ToValidUTF8(rest[skip:], "")
	missing := utf8.RuneCountInString(rest) - utf8.RuneCountInString(tail)
	return fmt.Sprintf("%s\n… %d more characters …\n%s", head, missing, tail)
}

// questionText is a question's message: what is asked, what about, what can be or was done, how long, which session.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord) *richText {
	r, ask, open := &richText{}, clean(p.Question, 400), p.Open()
	above, body := foreign(p)
	hint, left := t.hint(p), outcome(p)
	switch {
	case p.Idle && open: // with the tool's last answer where that is known
		ask, body, left = "✅ "+clean(s.Tool, 40)+" has finished", clean(p.Full, 700), ""
	case p.Idle:
		ask, body = clean(s.Tool, 40)+" had finished", ""
	case !open:
		above, body = "", ends(body, 700)
	case p.Secret:
		ask = "🔑 " + ask
	case p.ambiguous():
		ask, body = "❔ Possibly a question ("+p.Confidence+" confidence)", clean(cmp.Or(p.Full, p.Excerpt), partUnits)
	case p.Permission:
		ask = "🛡️ " + ask
	default: // with the lines around it, such as which file is to be overwritten
		ask = "❓ " + ask
	}
	if open && (!p.ShownAll || !fitsMessage(p)) {
		above, body = "", ends(body, partUnits-600)
	}
	r.line("bold", ask)
	r.line("expandable_blockquote", above)
	r.line("pre", body)
	if open {
		r.remarks(p, ask, body)
	}
	r.line("", hint)
	r.line("", left)
	r.line("", origin(s))
	return r
}

// remarks adds what an open question's text does not say by itself: words that deceive, what buttons cannot show, which
// tool asks and where.
func (r *richText) remarks(p *PromptRecord, ask, body string) {
	if mixed := clean(mixedWord.FindString(ask+"\n"+body), 60); mixed != "" {
		r.line("", "⚠️ Letters of different alphabets in one word: "+mixed)
	}
	if p.Cut {
		r.line("", "⚠️ Part of it is not known here: look at the terminal. From here it can only be refused.")
	}
	for _, c := range p.Choices { // a button shows about 30 characters
		shown := strings.Contains(strings.Join(strings.Fields(body), " "), strings.TrimSuffix(clean(c.Label, 60), "…"))
		if units(c.Label) > 30 && !shown && c.Key != hookAlways {
			r.line("", choiceText(p, c))
		}
	}
	if p.Lasting != "" {
		r.line("", "Lasting: "+clean(p.Lasting, partUnits))
	}
	if p.Tool != "" {
		r.line("", "🔧 "+clean(p.Tool, 60)+" in "+clean(p.Cwd, 200))
	}
}

// hint tells what can be done about an open question besides tapping, "" nothing.
func (t *Telegram) hint(p *PromptRecord) string {
	freeText := t.cfg.Load().FreeText
	switch {
	case !p.Open():
		return ""
	case p.Idle:
		return "Reply to this message with what to do next."
	case p.Secret && freeText && t.polling.Load():
		return "Type it at the keyboard. Or reply with it: your message is deleted at once, but Telegram has seen it."
	case p.Secret:
		return "It is not asked for here: type it at the keyboard."
	case p.ambiguous():
		return "What should AtlasBridge do?"
	case p.Permission:
		return "To refuse and say why, reply with text."
	case p.Type == FreeText && freeText:
		return "Reply to this message with your answer."
	case p.Type == FreeText:
		return "Answering with text is switched off (free_text_enabled)."
	case p.Multi:
		return "Tick what applies, then Submit."
	}
	return ""
}

// outcome tells how long an open question waits and what happens then, or who answered what, when and from where.
func outcome(p *PromptRecord) string {
	at, value, reason := "", "", ""
	if p.DecidedAt != nil {
		at = p.DecidedAt.Local().Format(" at 15:04:05 MST")
	}
	if p.Value != nil && !p.Secret {
		value = ": " + clean(valueName(p, p.Value), 300)
	}
	if p.Reason != "" {
		reason = " (" + clean(p.Reason, 300) + ")"
	}
	late := p.Status == Expired || p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"
	switch {
	case p.Open():
		return waiting(p)
	case p.Reason == bothAnswered:
		return "⚠️ Answered on the phone and at the keyboard in the same moment" + at + ": the terminal shows which counted"
	case p.Status == Failed:
		return "⚠️ Not delivered" + value + at + reason
	case p.Status == Canceled:
		return "🚫 Canceled" + at + reason
	case late && p.Value == nil:
		return "⌛ Expired" + at + ", nobody answered: nothing was typed, it may still wait" + reason
	case late:
		return "⌛ No answer in time" + at + ", so it was refused" + value + reason
	}
	mark, onItsWay := "✅", ""
	if p.Status == ReplyReceived {
		mark, onItsWay = "⏱", ", on its way"
	} else if p.Value != nil && p.refuses(*p.Value) {
		mark = "❌"
	}
	return mark + " Answered" + at + " " + byWhom(p.DecidedBy) + value + onItsWay + reason
}

// waiting tells until when an open question waits, and what happens then.
func waiting(p *PromptRecord) string {
	secs := max(0, int(time.Until(p.ExpiresAt).Seconds()+0.5))
	then := "nothing is typed"
	if p.SafeDefault != nil && !p.Secret {
		then = "default: " + clean(valueName(p, p.SafeDefault), 80)
	}
	return fmt.Sprintf("⏳ Expires in %dm %02ds, then %s", secs/60, secs%60, then)
}

// Ask sends the question. Id 0 without an error: it was over before it left, nothing was sent.
func (t *Telegram) Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error) {
	return t.ask(ctx, p.ID, s, func(*PromptRecord) {})
}

// ask sends the question as the state has it when the message leaves, changed by dress, and only if it is open then.
// other is its session where the state does not know it yet.
func (t *Telegram) ask(ctx context.Context, id string, other *SessionRecord, dress func(*PromptRecord)) (int64, error) {
	write := func() (string, map[string]any) {
		stored, s, _ := t.store.Prompt(id) // as it was, where it cannot be read
		if stored == nil || !stored.Open() {
			return "", nil
		}
		if s == nil {
			s = other
		}
		p := *stored
		dress(&p)
		params := t.questionText(&p, s).params(keyboard(&p))
		params["disable_notification"] = p.Idle
		return "sendMessage", params
	}
	urgent := func() bool {
		p, _, _ := t.store.Prompt(id)
		return p != nil && !p.Idle
	}
	return t.deliver(ctx, draft{urgent: urgent, write: write, lost: func() {}, linger: answerLinger})
}

// Settle has the question's message say what the state says of it, as soon as edits of it that are under way are done;
// of an open question, how long it still waits.
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, _ *SessionRecord) error {
	return t.catchUp(ctx, p.ID, errand{wish: func(m *post) { m.reminds++ }})
}

// post is what this process knows of a question's message, and what it still wants of it.
type post struct {
	users    int      // who hold it; guarded by Telegram.postsMu, as are:
	over     bool     // the question was, when it was last looked at
	reminds  int      // how often the time left was to be shown anew
	ticked   []string // the choices ticked last
	tickedIn int64    // the message in which they were, 0: none were ticked
	cleared  int64    // the message that is to lose its buttons although the question is open, 0: none

	turn     chan struct{} // taken while an edit is under way; whoever has it owns what follows
	says     string        // print of the edit that was carried out last, "" none was
	reminded int           // of reminds

	// lost are the prints of edits whose answer was lost, and when that was: until lostLife is over each may still be
	// carried out, also after one that said the same.
	lost map[string]time.Time
}

// errand is why a question's messages are to catch up.
type errand struct {
	wish func(*post)              // what is wanted beyond the outcome; nil: nothing
	due  func(*PromptRecord) bool // whether it is still wanted, asked until the first edit is done; nil: it is
	slow bool                     // what is urgent goes first, even of an outcome
}

// edit is one request that a question's messages need.
type edit struct {
	msg     int64
	method  string // "": the message says it already, which has only to be recorded
	params  map[string]any
	print   string // tells what it says, and of which message
	status  State  // that the message shows then, "" with buttons
	old     bool   // the message has been replaced by a newer one
	reminds int    // how many are done with it
}

// hold is the post of a question, with a wish added to it. drop follows.
func (t *Telegram) hold(id string, wish func(*post)) *post {
	t.postsMu.Lock()
	defer t.postsMu.Unlock()
	m := t.posts[id]
	if m == nil {
		m = &post{turn: make(chan struct{}, 1), lost: map[string]time.Time{}}
		t.posts[id] = m
	}
	m.users++
	if wish != nil {
		wish(m)
	}
	return m
}

// drop gives a post back. When nobody holds it any more, the question is over and no edit of it can come late, the
// state alone tells what is owed.
func (t *Telegram) drop(m *post) {
	t.postsMu.Lock()
	defer t.postsMu.Unlock()
	m.users--
	for id, m := range t.posts {
		if m.users == 0 && m.over && !m.mayBeOvertaken(&edit{}) {
			delete(t.posts, id)
		}
	}
}

// catchUp edits the messages of a question until they say what the state says of it; after an error they may not, and
// what is over remains owed. Of the edits of one question one is under way at a time. Each is written when it leaves,
// so that one which has become superfluous is dropped; and as it may have landed after one of another process, the
// state is looked at again afterwards.
func (t *Telegram) catchUp(ctx context.Context, id string, why errand) error {
	m := t.hold(id, why.wish)
	defer t.drop(m)
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		e := t.nextEdit(id, m, why)
		if e == nil {
			return nil
		}
		if e.method != "" {
			sent, err := t.sendEdit(ctx, id, m, why)
			if err != nil {
				return err
			}
			if sent == nil {
				continue
			}
			e = sent
		}
		certain, err := t.carriedOut(id, m, e)
		if err != nil || !certain {
			return err
		}
		why.due = nil
	}
}

// nextEdit is what the messages of a question need first, by the state as it is now; nil: nothing.
func (t *Telegram) nextEdit(id string, m *post, why errand) *edit {
	p, s, _ := t.store.Prompt(id) // as it was, where it cannot be read
	t.postsMu.Lock()
	m.over = p == nil || !p.Open()
	t.postsMu.Unlock()
	if p == nil || why.due != nil && !why.due(p) {
		return nil
	}
	if s == nil {
		s = &SessionRecord{Head: Head{ID: p.SessionID}}
	}
	var next *edit
	if p.Open() {
		next = t.openEdit(p, s, m)
	} else {
		next = t.outcomeEdit(p, s, m)
	}
	if next == nil && len(p.OldMsgIDs) > 0 {
		next = clearEdit(p.OldMsgIDs[0])
		next.status = p.Status
		next.old = true
		if next.print == m.says { // it has lost its buttons already
			next.method = ""
		}
	}
	return next
}

// newEdit is a request to change a message.
func newEdit(msg int64, method string, params map[string]any) *edit {
	params["message_id"] = msg
	print, _ := json.Marshal(params) // plain values: cannot fail
	return &edit{msg: msg, method: method, params: params, print: digest(print)}
}

// clearEdit takes a message's buttons away.
func clearEdit(msg int64) *edit {
	return newEdit(msg, "editMessageReplyMarkup", map[string]any{"reply_markup": markup(nil)})
}

// openEdit is the next edit of an open question: what is ticked, else the time left.
func (t *Telegram) openEdit(p *PromptRecord, s *SessionRecord, m *post) *edit {
	t.postsMu.Lock()
	ticked, tickedIn, reminds, cleared := m.ticked, m.tickedIn, m.reminds, m.cleared
	t.postsMu.Unlock()
	if cleared != 0 && cleared == p.MsgID {
		e := clearEdit(cleared)
		e.reminds = m.reminded
		if e.print == m.says {
			return nil
		}
		return e
	}
	if p.Multi && tickedIn != 0 && tickedIn >= p.MsgID { // it can be newer than what is recorded
		e := newEdit(tickedIn, "editMessageReplyMarkup", map[string]any{"reply_markup": markup(keyboard(p, ticked...))})
		if e.print != m.says {
			e.reminds = m.reminded
			return e
		}
	}
	if p.MsgID == 0 || reminds == m.reminded || !fitsMessage(p) || p.Multi {
		return nil // it may have been shown in parts, or choices be ticked
	}
	e := newEdit(p.MsgID, "editMessageText", t.questionText(p, s).params(keyboard(p)))
	e.reminds = reminds
	return e
}

// outcomeEdit makes the message of a question that is over say so, unless it does already.
func (t *Telegram) outcomeEdit(p *PromptRecord, s *SessionRecord, m *post) *edit {
	if p.MsgID == 0 {
		return nil
	}
	outcomeAs := func(status State) *edit {
		shown := *p
		shown.Status = status
		return newEdit(p.MsgID, "editMessageText", t.questionText(&shown, s).params(keyboardAfter(&shown)))
	}
	e := outcomeAs(p.Status)
	e.status = p.Status
	e.reminds = m.reminded
	doubtful := m.mayBeOvertaken(e)
	switch {
	case p.MsgStatus == p.Status && !doubtful:
		return nil
	case m.says == e.print, m.says == "" && !doubtful && !p.shownOpen() && outcomeAs(p.MsgStatus).print == e.print:
		e.method = ""
	}
	return e
}

// mayBeOvertaken tells that an edit that says something else than e may still be carried out after it.
func (m *post) mayBeOvertaken(e *edit) bool {
	for print, at := range m.lost {
		if print != e.print && time.Since(at) < lostLife {
			return true
		}
	}
	return false
}

// sendEdit sends the edit that is needed when its turn comes, and returns it; nil: none was needed any more. A message
// that is gone, or takes no edit, counts as edited.
func (t *Telegram) sendEdit(ctx context.Context, id string, m *post, why errand) (*edit, error) {
	var sent *edit
	_, err := t.deliver(ctx, draft{
		urgent: func() bool {
			p, _, _ := t.store.Prompt(id) // as it was, where it cannot be read
			return p != nil && !p.Open() && !why.slow
		},
		write: func() (string, map[string]any) {
			sent = t.nextEdit(id, m, why)
			if sent == nil || sent.method == "" {
				sent = nil
				return "", nil
			}
			return sent.method, sent.params
		},
		lost: func() {
			m.lost[sent.print] = time.Now()
		},
	})
	var e *apiError
	if sent != nil && errors.As(err, &e) && e.Code == http.StatusBadRequest && e.trouble(0) == "" {
		t.log.Warn("a message cannot be edited, now or later", "error", e.Error())
		return sent, nil
	}
	if err != nil {
		return nil, err
	}
	return sent, nil
}

// carriedOut notes what a message says now, for good where the question is over. It is not certain while an earlier
// edit may still be carried out after this one: then it stays owed, and a later edit makes sure.
func (t *Telegram) carriedOut(id string, m *post, e *edit) (certain bool, err error) {
	if e.old {
		return true, t.store.Edited(id, e.msg, e.status)
	}
	doubtful := e.status != "" && m.mayBeOvertaken(e)
	m.says = e.print
	m.reminded = e.reminds
	if doubtful {
		m.says = ""
		return false, t.store.Edited(id, e.msg, "")
	}
	return true, t.store.Edited(id, e.msg, e.status)
}

func (t *Telegram) Notify(ctx context.Context, n Notice) (id int64, err error) { // in as many as it needs; id: the last
	last, text, mono := "", clean(n.Text, 1<<20), clean(n.Mono, 1<<20)
	if v, _ := t.store.View(); v.Sessions[n.SessionID] != nil {
		last = origin(v.Sessions[n.SessionID])
	}
	for text+mono != "" && err == nil {
		part, restText := cutText(text, partUnits)
		block, restMono := cutText(mono, when(restText == "", partUnits-units(part)))
		r := &richText{text: part}
		r.line("pre", block)
		r.line("", last)
		params, method := r.params(nil), "sendMessage"
		if n.Edit != 0 {
			method, params["message_id"] = "editMessageText", n.Edit
		} else if params["disable_notification"] = !n.Ring; n.ReplyTo != 0 {
			params["reply_parameters"] = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		}
		n.Edit = 0 // used, or deleted: then the same in a new one
		if id, err = t.send(ctx, method, params, n.Ring || n.Urgent || n.ReplyTo != 0); id != 0 || method == "sendMessage" {
			text, mono = restText, restMono
		}
	}
	return id, err
}

/* ===== --stream ===== */
// stream turns the transcript into messages: finished text fills a message, which is edited as it grows and followed by
// another when it is full; the live part stands at its end.
type stream struct {
	flushAt           time.Time
	text, live, shown string // finished lines, from the current message's first on; what may still change; what it says
	raw               []byte // with strip_ansi = false: output not in text yet
	msg               int64  // the current message, 0 when the next text starts one
	cut               int    // bytes of text in the current message, which is full; 0 while it is not
	busy              bool   // a job is with the sender
}

func (t *stream) message(limit int) string { // of at most limit UTF-16 units; it is full when text goes on
	part, rest := cutText(t.text, limit)
	if t.cut = when(rest != "", len(t.text)-len(rest)); t.cut == 0 {
		part, _ = cutText(part+t.live, limit)
	}
	return strings.TrimRight(part, " \n")
}
func (t *stream) delivered(msg int64, _ error) { // the next text goes into the same message, or starts another
	if t.busy, t.msg = false, cmp.Or(msg, t.msg); t.cut > 0 {
		t.text, t.cut, t.msg, t.shown = t.text[t.cut:], 0, 0, ""
	}
}

type update struct { // what of the Bot API's Update counts here: a message, or a button pressed
	ID       int64 `json:"update_id"`
	Message  *message
	Callback *press `json:"callback_query"`
}
type press struct {
	ID, Data string
	From     *user
	Message  *message
}
type message struct {
	ID            int64 `json:"message_id"`
	From          *user
	Chat          user
	Date          int64 // Unix seconds by the server's clock
	Text          string
	ReplyTo       *message        `json:"reply_to_message"`
	SenderChat    json.RawMessage `json:"sender_chat"` // a channel, or an anonymous administrator
	ForwardOrigin json.RawMessage `json:"forward_origin"`
	ViaBot        json.RawMessage `json:"via_bot"`
	EditDate      int64           `json:"edit_date"`
}
type user struct { // a person, a bot or a chat; the names are for display only: anyone can take them
	ID             int64
	IsBot          bool   `json:"is_bot"`
	Name           string `json:"first_name"`
	Username, Type string // Type: of a chat, "private", "group", "supergroup" or "channel"
}
type receiver struct { // a Telegram while it polls; the fields belong to the goroutine that listens
	*Telegram
	ctx               context.Context // ends with the polling
	work              sync.WaitGroup  // answers on their way, each a goroutine that ends with it
	lastOK            time.Time       // of getUpdates, by the wall clock, which goes on while the machine sleeps
	minute, strangers int64           // of the last one, by the wall clock; so many in it
}
type wish struct { // what a message asks for: an answer now, and one thing to be done
	reply    string
	decision *Decision
	record   Record // an InputRecord, or the MetaRecord with the session that text goes to from now on
}
type heard struct { // a message of the operator together with all that decides what it means
	*message
	view   *View
	texts  bool      // questions for text take text
	at     time.Time // the end of the second it was written in, by our clock
	update int64
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
func (u *user) who() string { return "telegram:" + fmt.Sprint(u.ID) }

func (t *Telegram) Poll(ctx context.Context) { // for all sessions, with the lock; ends with ctx, or a refused token
	release, held, err := t.store.TryPoll()
	for ; !held; release, held, err = t.store.TryPoll() {
		t.note("poll", when(err != nil, fmt.Sprint("no answers come from the phone: ", err)))
		if sleep(ctx, time.Second) != nil { // so another takes over within 2 s
			return
		}
	}
	defer release()
	t.polling.Store(true)
	defer t.polling.Store(false)
	ctx, enough := context.WithCancel(ctx)
	r := &receiver{Telegram: t, ctx: ctx, lastOK: time.Now().Round(0)}
	defer r.work.Wait()
	defer enough()
	r.work.Go(r.payDebts)
	here := map[string]any{"type": "chat", "chat_id": t.cfg.Load().ChatID}
	menu := map[string]any{"commands": botCommands, "scope": here}
	r.later(func() (int64, error) { return 0, r.call(ctx, "setMyCommands", menu, nil) })
	params := map[string]any{"allowed_updates": []string{"message", "callback_query"}, "timeout": 1}
	for failures := 0; ctx.Err() == nil; {
		var updates []json.RawMessage
		r.warn(0, r.store.Polled())
		e, _ := r.call(ctx, "getUpdates", params, &updates).(*apiError)
		if e != nil && ctx.Err() != nil {
			return
		}
		trouble := e.trouble(failures)
		for _, raw := range updates {
			id, err := r.take(raw)
			if err != nil { // not on disk, so not confirmed: it comes again
				trouble = "answers cannot be recorded, so they are not acted on: " + err.Error()
				_ = sleep(ctx, time.Second)
				break
			}
			params["offset"] = id + 1 // not the maximum: ids restart at random after a week (source of telegram-bot-api)
		}
		r.note("poll", trouble)
		switch {
		case e == nil:
			failures, params["timeout"] = 0, 50 // seconds; more are clamped (same source)
			r.recovered()
		case e.Code == 401 || e.Code == 404:
			return
		default:
			_ = sleep(ctx, max(cmp.Or(e.after(), backoff(failures, t.jitter())), when(e.Code == 409, 5*time.Second)))
			failures, params["timeout"] = failures+1, 1 // short: to know soon that all is well
		}
	}
}

func (r *receiver) recovered() { // after an outage longer than an undelivered tap lives, what waits is offered again
	last := r.lastOK
	r.lastOK = time.Now().Round(0)
	old := func(t time.Time) bool { return r.lastOK.Sub(t) > 150*time.Second } // it lives so long (same source)
	v, err := r.store.View()
	for _, p := range when(err == nil && old(last), v.Prompts) {
		if p.Status == AwaitingReply && p.MsgID != 0 && !p.Idle && old(p.At) && r.lastOK.Before(p.ExpiresAt) {
			r.later(func() (int64, error) { return r.offer(v.Sessions[p.SessionID], *p, "", false) })
		}
	}
}

// payDebts has messages catch up that no session takes care of: of what is over, while its session has ended or has not
// done it in its time. It ends with the polling.
func (r *receiver) payDebts() {
	var owed []*PromptRecord
	var changed <-chan struct{} // the state, since owed was looked for
	for r.ctx.Err() == nil {
		found, now, err := r.store.Owed(changed)
		if now != changed {
			owed, changed = found, now
		}
		for _, p := range owed {
			if err == nil && r.ctx.Err() == nil && r.mustPay(p) {
				err = r.catchUp(r.ctx, p.ID, errand{due: (*PromptRecord).owes, slow: true})
			}
		}
		pause := debtsEvery
		if err != nil {
			r.warn(0, err)
			pause = debtsPause
		}
		_ = sleep(r.ctx, pause) // the loop ends with it
	}
}

// mustPay tells that a prompt's own session will not edit its message, and that replaced ones it never does. A dead
// session's prompts are over once it is reaped.
func (r *receiver) mustPay(p *PromptRecord) bool {
	replacedOnly := p.Open() || p.MsgStatus == p.Status
	if replacedOnly || time.Since(p.At) > debtsPatience {
		return true
	}
	return p.over() && !r.store.Alive(p.SessionID)
}

// onItsWay shows that an answer was taken whose typing takes long; else the session shows the outcome at once.
func (r *receiver) onItsWay(id string) (int64, error) {
	if err := sleep(r.ctx, onItsWayAfter); err != nil {
		return 0, err
	}
	waits := func(p *PromptRecord) bool { return p.Status == ReplyReceived }
	return 0, r.catchUp(r.ctx, id, errand{due: waits})
}

// outlived has a message lose the buttons that somebody has just tapped in vain: its question, nil where it is not
// known any more, is over, or has a newer message.
func (r *receiver) outlived(p *PromptRecord, msg int64) (int64, error) {
	if p == nil {
		return r.send(r.ctx, "editMessageReplyMarkup", map[string]any{"message_id": msg, "reply_markup": markup(nil)}, true)
	}
	if err := r.store.Offered(p.ID, msg); err != nil {
		return 0, err
	}
	return 0, r.catchUp(r.ctx, p.ID, errand{})
}

func (r *receiver) later(do func() (int64, error)) { r.work.Go(func() { r.warn(do()) }) } // beside the polling
func (r *receiver) audit(e Event)                  { r.warn(0, r.store.Audit().Append(e)) }
func (r *receiver) warn(_ int64, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		r.log.Warn("left undone", "error", err)
	}
}
func (r *receiver) tell(replyTo int64, text string) { // nothing for ""
	r.later(func() (int64, error) { return r.Notify(r.ctx, Notice{Text: text, ReplyTo: replyTo}) })
}
func (r *receiver) toast(q *press, text string, box bool) { // answers a tap, once; box: to be closed, nothing was done
	params := map[string]any{"callback_query_id": q.ID, "text": clean(text, 200), "show_alert": box} // the API's limit
	r.later(func() (int64, error) { return 0, r.call(r.ctx, "answerCallbackQuery", params, nil) })
}

func (r *receiver) take(raw json.RawMessage) (int64, error) { // with an error, nothing was done and it must come again
	var u update
	damaged := json.Unmarshal(raw, &u) != nil
	if from, ok := admitted(&u, r.cfg.Load().Users, r.cfg.Load().ChatID); damaged || !ok {
		minute := time.Now().Unix() / 60
		r.strangers, r.minute = 1+when(minute == r.minute, r.strangers), minute
		if r.strangers <= 10 && from != nil && !damaged { // a minute: a flood must not fill the disk
			r.audit(Event{Name: "UNAUTHORIZED", Fields: []Field{{"update_id", u.ID}, {"by", from.who()}}})
		}
		return u.ID, nil
	}
	v, err := r.store.View()
	if fresh := err == nil && v.Updates[fmt.Sprint(u.ID)] == nil; fresh && u.Message != nil {
		err = r.said(u.ID, u.Message, v)
	} else if fresh {
		err = r.tap(u.ID, u.Callback, v)
	}
	if err != nil && u.Callback != nil {
		r.toast(u.Callback, "It could not be recorded, so nothing was done yet; it is tried again.", true)
	}
	return u.ID, err
}

func (r *receiver) once(id int64, with ...Record) error { // an update has been acted on, together with what it led to
	done := &UpdateRecord{Head: Head{ID: fmt.Sprint(id)}, Kind: "operator"}
	return r.store.Update(func(*View) ([]Record, error) { return append(with, done), nil })
}

func (r *receiver) decide(id int64, from *user, d Decision, why Refusal) (now PromptRecord, _ Refusal, err error) {
	if d.By, d.UpdateID = from.who(), id; why == "" { // else it is refused already
		now, why, err = r.store.Decide(d, time.Now())
	}
	if err == nil && why != "" {
		r.audit(Event{"REPLY_REJECTED", d.SessionID, d.PromptID, []Field{{"reason", string(why)}, {"by", d.By}}})
		err = r.once(id)
	} else if err == nil && now.Permission && now.Value != nil {
		r.audit(Event{"PERMISSION_RESOLVE", now.SessionID, now.ID, []Field{{"user_id", from.ID}, {"decision", *now.Value}}})
	}
	return now, why, err
}
func tapped(data string, v *View) (d Decision, p *PromptRecord) { // what a button says, and of which question: nil none
	f := append(strings.SplitN(when(strings.HasPrefix(data, "ans:"), data), ":", 5), "", "", "", "")
	d = Decision{PromptID: f[1], SessionID: f[2], Nonce: f[3], Value: strings.TrimPrefix(f[4], tapSubmit)}
	switch d.Value {
	case tapEnter:
		d.Value = enterAlone
	case tapLeave:
		d.Value = leaveIt
	}
	if p = v.find(d); p != nil {
		d.SessionID, d.PromptID = p.SessionID, p.ID
	}
	return d, p
}
func (r *receiver) tap(id int64, q *press, v *View) error {
	d, p := tapped(q.Data, v)
	old := p == nil || q.Message.ID < p.MsgID // replaced; a newer one is only not recorded yet
	if !old && strings.HasPrefix(d.Value, "~") && p.Open() {
		r.show(q, *p, v.Sessions[p.SessionID], d.Value)
		return r.once(id)
	}
	if !old && d.Value == tapAgain && strings.HasPrefix(p.Nonce, d.Nonce) && len(d.Nonce) >= 16 {
		return r.again(id, q, p, v.Sessions[p.SessionID])
	}
	now, why, err := r.decide(id, q.From, d,
		when(old, Refusal("this message is out of date, use the newest one of its question")))
	if err != nil {
		return err
	}
	if why == "" {
		r.toast(q, "✓ "+valueName(&now, &d.Value), false)
		r.later(func() (int64, error) { return r.onItsWay(now.ID) })
		return nil
	}
	r.toast(q, "Nothing was done: "+string(why), true)
	genuine := p == nil || strings.HasPrefix(p.Nonce, d.Nonce)
	paid := p == nil || q.Message.ID != p.MsgID || !p.shownOpen() // else its edit is on its way, or owed
	// A tap that crossed the edit on its way to the phone proves nothing.
	crossed := p != nil && q.Message.ID == p.MsgID && time.Since(p.At) < r.crosses
	if genuine && paid && !crossed && (old || !now.Open()) {
		r.later(func() (int64, error) { return r.outlived(p, q.Message.ID) })
	}
	return nil
}

// again has the session ask anew what stands on its screen, where that is still so.
func (r *receiver) again(id int64, q *press, p *PromptRecord, s *SessionRecord) error {
	if s == nil || s.Status != "active" || p.Status != Expired {
		r.toast(q, "Nothing was done: there is nothing to ask again", true)
		return r.once(id)
	}
	in := &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: "again", By: q.From.who(), PromptID: p.ID,
		ReplyTo: q.Message.ID, UpdateID: id, Status: "queued"}
	if err := r.once(id, in); err != nil {
		return err
	}
	r.toast(q, "✓ asking again", false)
	return nil
}

// show does what a button asks for that decides nothing: ticks a choice, or shows more.
func (r *receiver) show(q *press, p PromptRecord, s *SessionRecord, value string) {
	r.toast(q, "", false)
	if keys, tick := strings.CutPrefix(value, tapTick); tick {
		ticks := func(m *post) {
			m.ticked = strings.Fields(strings.ReplaceAll(keys, ",", " "))
			m.tickedIn = q.Message.ID
		}
		r.later(func() (int64, error) { return 0, r.catchUp(r.ctx, p.ID, errand{wish: ticks}) })
		return
	}
	text := p.Recent
	if value == tapAll {
		text = strings.Trim(p.Above+"\n\n"+p.Full, "\n")
	}
	r.later(func() (int64, error) { return r.offer(s, p, text, value == tapAll) })
}

// offer sends a question again, with text, in as many messages as that needs; the last has the question and its
// buttons. Without a text it is sent as it was at first. all: the text is all of it, so that it can be answered from
// then on. The buttons of the new message count from then on, those of the one before go.
func (r *receiver) offer(s *SessionRecord, p PromptRecord, text string, all bool) (msg int64, err error) {
	ctx, cancel := context.WithDeadline(r.ctx, p.ExpiresAt)
	defer cancel()
	part, rest := cutText(clean(text, 1<<20), partUnits-800)
	for rest != "" {
		_, err := r.Notify(ctx, Notice{Mono: part, SessionID: p.SessionID, ReplyTo: p.MsgID})
		if err != nil {
			return 0, err // not shown in full, so not to be allowed
		}
		part, rest = cutText(rest, partUnits-800)
	}
	if text != "" { // the buttons move to the new message
		if err := r.catchUp(ctx, p.ID, errand{wish: func(m *post) { m.cleared = p.MsgID }}); err != nil {
			return 0, err
		}
	}
	if s == nil {
		s = &SessionRecord{}
	}
	shown := p.ShownAll || all
	msg, err = r.ask(ctx, p.ID, s, func(now *PromptRecord) {
		if text != "" {
			now.Above, now.Full, now.ShownAll = "", part, shown
		}
	})
	if err != nil || msg == 0 {
		return 0, err
	}
	_, err = r.store.Move(p.ID, AwaitingReply, func(now *PromptRecord) { now.MsgID, now.ShownAll = msg, shown })
	if err != nil {
		_, _ = r.outlived(nil, msg) // nobody would ever edit it; the error to tell is that of the state
		return 0, err
	}
	return msg, r.catchUp(r.ctx, p.ID, errand{})
}

func (r *receiver) said(id int64, m *message, v *View) (err error) {
	skew := r.clockSkew() // up to 3 s may be rounding and the network
	at := time.Unix(m.Date, 0).Add(time.Second - when(skew.Abs() > 3*time.Second, skew))
	w := (&heard{message: m, view: v, texts: r.cfg.Load().FreeText, at: at, update: id}).understand()
	if w.decision != nil && v.Prompts[w.decision.PromptID].Secret { // deleted unpaced: every second counts
		r.work.Go(func() {
			err := r.call(r.ctx, "deleteMessage", map[string]any{"chat_id": m.Chat.ID, "message_id": m.ID}, nil)
			r.tell(m.ID, when(err != nil, "⚠ Your message could not be deleted: delete it yourself."))
		})
		if !r.cfg.Load().FreeText {
			w = wish{reply: "✗ A password cannot be given from here: type it at the keyboard."}
		}
	}
	if why := Refusal(""); w.decision == nil {
		err = r.once(id, when(w.record != nil, []Record{w.record})...)
	} else if _, why, err = r.decide(id, m.From, *w.decision, ""); why != "" {
		w.reply = "✗ Nothing was done: " + string(why)
	}
	if in, ok := w.record.(*InputRecord); ok && err == nil && in.Kind != "text" {
		r.audit(Event{"SESSION_COMMAND", in.SessionID, "", []Field{{"command", in.Kind}, {"by", in.By}}})
	}
	r.tell(m.ID, when(err == nil, w.reply))
	return err
}

func (h *heard) understand() wish { // changes nothing; text that came damaged or too long counts as none
	damaged := len(h.Text) > maxMessage || strings.Contains(h.Text, "\uFFFD")
	text := when(!damaged, strings.TrimSpace(cleanText(h.Text)))
	if line, ok := strings.CutPrefix(text, "/"); ok {
		name, rest, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(strings.ToLower(name), "@")
		return h.command(name, strings.TrimSpace(rest))
	}
	s, p, refusal := h.target("")
	if s != nil && text != "" {
		return h.speak(s, p, text)
	}
	return wish{reply: cmp.Or(refusal,
		when(s != nil, "✗ Nothing was done: only text of up to 4096 bytes can be sent to a session."))}
}

func (h *heard) command(name, line string) wish { // answers from the state; the rest is for a session
	sid, rest, _ := strings.Cut(line, " ")
	help, names := "Questions come here. Tap an answer, or reply to a message with text.\n", []string{}
	for _, c := range botCommands {
		help, names = help+"\n/"+c.Name+"  "+c.About, append(names, c.Name)
	}
	isKey := func(word string) bool { _, ok := keyBytes(word, false); return ok }
	if name == "keys" && isKey(sid) {
		sid, rest = "", line
	}
	s, _, refusal := h.target(sid)
	near, unknown := nearest(name, names), slices.DeleteFunc(strings.Fields(rest), isKey)
	example := map[string]string{"send": "go on", "keys": "CTRL_C"}[name]
	switch {
	case near != name || near == "":
		return wish{reply: "✗ There is no /" + name + " here. " +
			cmp.Or(when(near != "", "Did you mean /"+near+"?"), "To send it to a session: /send SID /"+name)}
	case name == "start" || name == "help":
		return wish{reply: help}
	case name == "status" || name == "sessions":
		return wish{reply: h.list(name == "status")}
	case name == "release":
		return h.claim("", "Text goes to what it replies to.")
	case s == nil:
		return wish{reply: cmp.Or(refusal, "✗ Which session? "+h.list(false))}
	case name == "switch" || name == "claim":
		return h.claim(s.ID, "Your text goes to "+origin(s))
	case rest == "" && example != "":
		return wish{reply: "✗ What? Example: /" + name + " " + shortID(s.ID) + " " + example}
	case name == "send":
		return h.speak(s, nil, strings.TrimSpace(rest))
	case name == "keys" && len(unknown) > 0:
		return wish{reply: "✗ There is no key " + unknown[0] + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB SHIFT_TAB SPACE " +
			"BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
	}
	return h.input(s, name, rest)
}

func (h *heard) claim(sid, reply string) wish { // text that is no reply goes to this session from now on, "" to none
	next := *cmp.Or(h.view.Meta["telegram"], &MetaRecord{Head: Head{ID: "telegram"}})
	next.Values = maps.Collect(maps.All(next.Values))
	next.Values["claim "+h.From.who()] = sid
	return wish{reply: reply, record: &next}
}
func (h *heard) input(s *SessionRecord, kind, text string) wish {
	return wish{record: &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: kind, Text: text, By: h.From.who(),
		ReplyTo: h.ID, UpdateID: h.update, Status: "queued"}}
}

// target finds the session meant, by the first of: the command; the message replied to (then also the question asked
// there); the claim; being the only one. Else it refuses: it never guesses. No refusal: people talking in a group.
func (h *heard) target(sid string) (s *SessionRecord, p *PromptRecord, refusal string) {
	re, claims := cmp.Or(h.ReplyTo, &message{}), cmp.Or(h.view.Meta["telegram"], &MetaRecord{}).Values
	for _, asked := range h.view.Prompts {
		if sid == "" && re.ID != 0 && (asked.MsgID == re.ID || slices.Contains(asked.OldMsgIDs, re.ID)) {
			p = asked
		}
	}
	mark := append(sessionMark.FindStringSubmatch(when(cmp.Or(re.From, &user{}).IsBot, re.Text)), "", "")[1]
	id := cmp.Or(strings.ToLower(sid), cmp.Or(p, &PromptRecord{}).SessionID, mark, claims["claim "+h.From.who()])
	found := slices.DeleteFunc(slices.Collect(maps.Values(h.view.Sessions)), func(s *SessionRecord) bool {
		only := id == "" && s.Status == "active" && h.Chat.ID > 0
		return !only && (id == "" || !strings.HasPrefix(s.ID, id)) && (sid == "" || s.Label != sid)
	})
	switch {
	case len(found) != 1 && sid != "":
		return nil, nil, "✗ " + sid + " does not name one session. " + h.list(false)
	case len(found) != 1:
		return nil, nil, when(h.Chat.ID > 0, "✗ Which session? Reply to one of its messages, or /switch SID. "+h.list(false))
	case found[0].Status != "active":
		return nil, nil, "✗ Nothing was sent: " + origin(found[0]) + " has ended. " + h.list(false)
	case h.at.Before(found[0].StartedAt):
		return nil, nil, "✗ Nothing was sent: you wrote that before " + origin(found[0]) + " began."
	}
	return found[0], p, ""
}

// speak gives text to a session: as the answer to its open question, or as free input. p is the question replied to;
// then text that is no choice refuses a permission. A choice can be named by its key or its label.
func (h *heard) speak(s *SessionRecord, p *PromptRecord, text string) wish {
	replied := p != nil
	for _, open := range h.view.Prompts {
		if !replied && open.SessionID == s.ID && open.Status == AwaitingReply {
			p = open
		}
	}
	if p == nil || p.Idle {
		return h.input(s, "text", text)
	}
	other := func(c Choice) bool {
		first, _ := utf8.DecodeRuneInString(c.Label)
		letter := p.Source == "hook" && p.Permission && c.Key != hookAlways && strings.EqualFold(text, string(first))
		return !letter && !strings.EqualFold(text, c.Key) && !strings.EqualFold(text, c.Label)
	}
	named := append(slices.DeleteFunc(when(!p.Secret, answers(p)), other), Choice{})[0]
	keys := strings.Join(strings.Fields(strings.ReplaceAll(text, ",", " ")), ",")
	several := when(p.Multi && p.offered(keys), keys)
	refusal := cmp.Or(
		when(!replied && h.ReplyTo != nil && cmp.Or(h.ReplyTo.From, &user{}).IsBot, // it may be another question's
			"✗ Nothing was done: you replied to another message. Reply to the open question's own."),
		when(!replied && h.at.Before(p.CreatedAt), "✗ Nothing was sent: you wrote that before this was asked."),
		when(!replied && p.Secret, "✗ Nothing was sent: "+origin(s)+" waits for a password."),
		when(!h.texts && (p.Type == FreeText || p.Type == Unknown) && !p.Secret && several+named.Key == "",
			"✗ Nothing was done: answering with text is switched off (free_text_enabled)."),
		when(!replied && p.Permission && several+named.Key == "",
			"✗ Nothing was done: a permission is asked for. Tap a button, or reply to it to refuse."))
	value := cmp.Or(several, named.Key, when(p.Permission, "deny:")+text)
	return wish{reply: refusal, decision: when(refusal == "",
		&Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: value})}
}

func (h *heard) list(more bool) string { // what runs; more: what waits, and the audit log's head to witness
	var lines []string
	for _, s := range h.view.Sessions {
		line := "\n• " + origin(s) + " " + strings.ReplaceAll(cmp.Or(s.Activity, "running"), "_", " ")
		for _, p := range h.view.Prompts {
			line += when(more && p.SessionID == s.ID && p.Open() && !p.Idle,
				"\n   ❓ "+clean(p.Question, 100)+"\n   "+outcome(p))
		}
		lines = append(lines, when(s.Status == "active", line))
	}
	slices.Sort(lines)
	if a := h.view.Meta["audit"]; more && a != nil {
		lines = append(lines, fmt.Sprintf("\nAudit log: %d %s\nListening: process %d", a.Seq, a.Hash, os.Getpid()))
	}
	return "Running:" + cmp.Or(strings.Join(lines, ""), " nothing")
}

type setup struct { // a run of `atlasbridge setup`: token, who the operator is, config.toml, a test
	*command
	*Telegram
	cfg *Config
	me  user // the bot
}

func cmdSetup(c *command) int {
	return c.withState(func(st *Store) int {
		s := &setup{command: c, Telegram: &Telegram{store: st}}
		for _, step := range []func() error{s.settings, s.connect, s.pair, s.save, s.test} {
			if err := step(); err != nil {
				return c.fail(err)
			}
		}
		return 0
	})
}
func (s *setup) say(format string, args ...any) { fmt.Fprintf(s.stdout, format+"\n", args...) }

func (s *setup) settings() (err error) { // the file, the flags, and a token that is nowhere from the terminal
	in := map[string]string{"channel": "local", // so that nothing need be complete yet
		"telegram.chat_id": s.opts.text("chat-id"), "telegram.allowed_users": s.opts.text("user-id"),
		"telegram.api_base": s.opts.text("api-base")}
	if s.cfg, err = s.config(in); err != nil {
		return err
	}
	token := []byte(s.cfg.Token)
	if file := s.opts.text("token-file"); file != "" {
		token, err = os.ReadFile(file)
	} else if s.cfg.Token == "" && onTerminal(s.stdin) {
		fmt.Fprint(s.stdout, "Make a bot with @BotFather (/newbot) and paste its token here (it is not shown): ")
		token, err = term.ReadPassword(int(s.stdin.Fd()))
		s.say("")
	}
	in["telegram.bot_token"] = strings.TrimSpace(string(token))
	missing := errors.New("no bot token: use --token-file FILE (/dev/stdin will do) or TELEGRAM_BOT_TOKEN")
	if err = cmp.Or(err, when(in["telegram.bot_token"] == "", missing)); err == nil {
		s.cfg, err = s.config(in)
	}
	return err
}

func (s *setup) connect() error { // nobody else listens, till the store is closed, and no webhook
	s.Telegram = newTelegram(s.cfg, s.store, nil)
	if _, held, err := s.store.TryPoll(); !held {
		busy := hinted(errors.New("a running session listens to the bot"), "end it, then run atlasbridge setup again")
		return cmp.Or(err, busy)
	}
	if err := s.call(s.ctx, "getMe", map[string]any{}, &s.me); err != nil {
		return err
	}
	s.say("Bot: @%s", s.me.Username)
	var hook struct{ URL string }
	if err := s.call(s.ctx, "getWebhookInfo", map[string]any{}, &hook); err != nil || hook.URL == "" {
		return err
	}
	answer := ""
	if onTerminal(s.stdin) {
		fmt.Fprint(s.stdout, "A webhook is set: the bot's messages go elsewhere. Remove it? [y/N] ")
		_, _ = fmt.Fscanln(s.stdin, &answer) // an empty line is an error, and a no
	}
	if !strings.EqualFold(answer, "y") {
		return hinted(errors.New("a webhook is set for this bot, so it cannot be polled"), "give AtlasBridge a bot of its "+
			"own; or run atlasbridge setup in a terminal and say y, or call the Bot API's deleteWebhook")
	}
	return s.call(s.ctx, "deleteWebhook", map[string]any{}, nil)
}

func (s *setup) pair() error { // whoever sends the code has seen this terminal: a careless y lets no stranger in
	if len(s.cfg.Users) > 0 {
		s.cfg.ChatID = cmp.Or(s.cfg.ChatID, s.cfg.Users[0])
		return nil
	}
	code := newNonce()[:6]
	s.say("Open https://t.me/%s and send it anything; then send it this code:  %s", s.me.Username, code)
	return s.wait(func(u *update) (right bool) {
		m := cmp.Or(u.Message, &message{})
		if from, ok := admitted(u, []int64{cmp.Or(m.From, &user{}).ID}, m.Chat.ID); ok {
			right = strings.EqualFold(strings.TrimSpace(m.Text), code)
			s.say("\n%s, user %d, wrote in %s chat %d%s", clip(visible(from.Name), 40), from.ID, m.Chat.Type, m.Chat.ID,
				when(!right, "\nIf that is you, send the code."))
		}
		if right {
			s.cfg.ChatID, s.cfg.Users = m.Chat.ID, []int64{m.From.ID}
		}
		return right
	})
}
func (s *setup) test() error { // a message with a button, which must be pressed
	if s.opts.on("no-test") {
		return nil
	}
	text, data := &richText{text: "AtlasBridge is connected. Press the button to finish the setup."}, "setup:"+newNonce()
	rows := [][]button{{{"text": "✅ It works", "callback_data": data}}}
	if _, err := s.send(s.ctx, "sendMessage", text.params(rows), true); err != nil {
		return hinted(err, "press Start in the bot's chat, then run atlasbridge setup again")
	}
	s.say("A test message was sent: press its button.")
	return s.wait(func(u *update) bool {
		_, ok := admitted(u, s.cfg.Users, s.cfg.ChatID)
		if ok = ok && u.Callback != nil && u.Callback.Data == data; ok {
			_ = s.call(s.ctx, "answerCallbackQuery", map[string]any{"callback_query_id": u.Callback.ID}, nil)
			s.say("\nIt works. Now: atlasbridge run claude")
		}
		return ok
	})
}
func (s *setup) wait(done func(*update) bool) error { // polls until done says so, a dot for every round
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	params := map[string]any{"allowed_updates": []string{"message", "callback_query"}, "timeout": 10}
	for pause := time.Duration(0); sleep(ctx, pause) == nil; fmt.Fprint(s.stdout, ".") {
		var updates []update
		e, _ := s.call(ctx, "getUpdates", params, &updates).(*apiError)
		if e != nil && !e.temporary() {
			return hinted(e, e.trouble(0))
		}
		pause = max(time.Second, cmp.Or(e, &apiError{}).after())
		for _, u := range updates {
			if params["offset"] = u.ID + 1; done(&u) {
				return s.call(ctx, "getUpdates", map[string]any{"offset": u.ID + 1}, nil) // confirms what was read
			}
		}
	}
	return hinted(errors.New("nothing came within 10 minutes"), "run atlasbridge setup again: it makes a new code")
}

// save writes into config.toml, which keeps every other line as it is.
func (s *setup) save() error {
	s.say("Chat %d, allowed users %v", s.cfg.ChatID, s.cfg.Users)
	path := filepath.Join(s.cfg.Dir, "config.toml")
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return replacePrivate(path, []byte(withTelegram(string(old), s.cfg)))
}

func withTelegram(text string, c *Config) string {
	text = telegramKeys.ReplaceAllString(strings.TrimRight(text, "\n")+"\n", "")
	text += when(!telegramTable.MatchString(text), "\n[telegram]\n")
	at, users := telegramTable.FindStringIndex(text)[1], strings.ReplaceAll(fmt.Sprint(c.Users), " ", ", ")
	lines := fmt.Sprintf("bot_token = %q\nchat_id = %d\nallowed_users = %s\n", c.Token, c.ChatID, users)
	return strings.TrimLeft(text[:at], "\n") + lines + fmt.Sprintf("api_base = %q\n", c.APIBase) + text[at:]
}
