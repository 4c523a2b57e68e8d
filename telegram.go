// telegram.go is the one file that reaches the network. Out: Show, one goroutine per process, makes messages equal to
// what the state says, for its own session and, where it polls, for those whose process has ended. In: Poll, in the
// process that holds the poll lock, for all sessions: an update becomes an intent, and that an answer or a record,
// together with its number. Text is sent with entities, never with a parse_mode: what a program printed cannot become
// markup. A reply is routed by its question's number or buttons, or by the [SID:…] that ends our messages, other text
// by its topic. The token never leaves this file: no error carries a URL.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
)

// ---- the channel ----
// All that the program knows of Telegram.

// Channel carries to the operator what the state says of questions, and notices. Only Show blocks.
type Channel interface {
	// Show has all messages show what they are to show, until ctx ends, or end is closed and they do.
	Show(ctx context.Context, end <-chan struct{})
	Notify(n Notice)
	Close() error
}

// Notice is a message that asks nothing: which session it is about, then Text, then Mono in monospace.
type Notice struct {
	Text      string
	Mono      string
	Lang      string // what Mono is written in, "" unknown
	SessionID string
	ReplyTo   int64 // the message that it replies to, 0: none
	ThreadID  int64 // with ReplyTo: the topic that one is in, 0: none
	Done      bool  // nothing is said: the message ReplyTo is marked as done
	Ring      bool  // with sound, silent otherwise

	edit    int64 // the message that becomes it, 0: it is a new one
	leftOut int   // notices before it, which were too many
}

// transport carries requests.
type transport = http.RoundTripper

// Telegram is the Bot API channel and its poller. Its methods may be called from different goroutines.
type Telegram struct {
	store    *Store
	log      *slog.Logger
	http     *http.Client
	jitter   func() float64 // rand.Float64, or a test's own
	cfg      atomic.Pointer[Config]
	skew     atomic.Int64 // Telegram's clock minus ours, by its last answer, a time.Duration
	troubles sync.Map     // by "send" and "poll": what keeps it from working, "" nothing; by "told": what did for long;
	// by "refused" and "looks": what was last logged of messages that Telegram did not take

	// tell says that to the person at the terminal, where it is still possible; or nil.
	tell func(string) (told bool)

	refreshMu sync.Mutex // held by refresh

	// Set before Show is called.
	session string      // whose messages this process takes care of
	stream  *stream     // of that session, nil: none
	giveUp  func(error) // told why a question could not be sent; nil: that is tried again for as long as it is open

	noticesMu sync.Mutex
	notices   [2][]*Notice  // that wait, the oldest first: replies, and the others
	bell      chan struct{} // a value when there is something new to say

	mailer mailer // belongs to Show
}

// newTelegram returns a channel with the settings; st and log may be nil where it only calls.
func newTelegram(cfg *Config, st *Store, log *slog.Logger) *Telegram {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone() // proxies from the environment; limits on dialing and TLS
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true) // a dead long poll takes no message with it
	t := &Telegram{
		store:  st,
		log:    log,
		http:   &http.Client{Transport: tr},
		jitter: rand.Float64,
		bell:   make(chan struct{}, 1),
	}
	t.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	t.cfg.Store(cfg)
	return t
}

// refresh takes over config.toml as it is now, if it was written since or somebody asked for that: a user who was taken
// out of it is ignored. If the file is invalid the old settings stay, which is said once: to who asked, or by the
// poller.
func (t *Telegram) refresh(asked bool) {
	t.refreshMu.Lock()
	defer t.refreshMu.Unlock()
	old := t.cfg.Load()
	if !asked && configTime(old.Dir) == old.stamp {
		return
	}
	fresh, err := old.reloaded()
	t.cfg.Store(fresh)
	ring(t.bell)
	if err == nil {
		err = t.store.Audit(Event{Name: "CONFIG_RELOADED", SessionID: t.session})
	} else if asked || t.store.Polls() {
		t.Notify(Notice{Text: "⚠ " + err.Error(), SessionID: t.session})
	}
	t.warn(err)
}

// Close gives back connections that are not in use.
func (t *Telegram) Close() error {
	t.http.CloseIdleConnections()
	return nil
}

// Trouble is a sentence about what keeps Telegram from working, "" when it works.
func (t *Telegram) Trouble() string {
	for _, way := range []string{"send", "poll"} {
		if text, ok := t.troubles.Load(way); ok && text != "" {
			return text.(string)
		}
	}
	return ""
}

// noteTrouble remembers text as the trouble with that way, "" for none, and logs it if it is new.
func (t *Telegram) noteTrouble(way, text string) {
	old, _ := t.troubles.Swap(way, text) // nil: it is the first
	if text != "" && text != old {
		t.log.Warn(text)
	}
}

// noteFailure remembers what e says about sending or polling. Lasting trouble is reported at the terminal, and noted
// for other processes until works is called.
func (t *Telegram) noteFailure(way string, e *apiError, failures int) {
	text := e.trouble(failures)
	if text == "" {
		return
	}
	t.noteTrouble(way, text)
	if e.trouble(0) == "" { // it may soon be over
		return
	}
	t.troubles.Store("told", text)
	t.warn(t.store.NoteFact("trouble "+way, text))
	if t.tell != nil {
		t.tell(text)
	}
}

// works records that sending (or polling) has just succeeded, which ends trouble of other processes, too.
func (t *Telegram) works(way string) {
	t.noteTrouble(way, "")
	t.warn(t.store.NoteFact("trouble "+way, ""))
}

// warn logs an error of which nobody else learns.
func (t *Telegram) warn(err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		t.log.Warn("left undone", "error", err)
	}
}

// ---- one call ----
// Every request goes through call: https://core.telegram.org/bots/api#making-requests

const (
	callLimit = 15 * time.Second // that any request may take, a poll on top of its timeout
	maxAnswer = 64 << 20         // bytes that are read of an answer: 100 updates, or a file, are far less
)

// apiError is every way in which a call can fail. It never has the URL in it.
type apiError struct {
	Code       int    `json:"error_code"` // 0: no answer of the Bot API came (network, proxy, cut answer)
	Text       string `json:"description"`
	Parameters struct {
		RetryAfter int64 `json:"retry_after"` // seconds, 0: it was not said
	}
	method string
}

// apiAnswer is an answer of the Bot API.
type apiAnswer struct {
	OK     bool
	Result json.RawMessage
	apiError
}

// pollParams are the parameters of getUpdates.
type pollParams struct {
	Offset  int64    `json:"offset,omitempty"`  // the first update wanted; those before are confirmed
	Timeout int      `json:"timeout,omitempty"` // seconds that the server waits for one
	Allowed []string `json:"allowed_updates,omitempty"`
}

func (e *apiError) Error() string { return "telegram " + e.method + ": " + e.Text }

// temporary reports whether the same request may succeed later.
func (e *apiError) temporary() bool { return e.Code == 0 || e.Code == 429 || e.Code >= 500 }

// retryAfter is how long Telegram asks to wait, 0: it does not.
func (e *apiError) retryAfter() time.Duration {
	return time.Duration(e.Parameters.RetryAfter) * time.Second
}

// mentions reports whether the Bot API's own words have one of these in them.
func (e *apiError) mentions(words ...string) bool {
	return e.Code > 0 && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(e.Text, w) })
}

// causes are what an error says about all requests, and what to do about that, behind a pattern of the Bot API's own
// words. The first that fits counts.
const causes = `
^40[14]: => Telegram refuses the bot token (…) => run atlasbridge setup
^429: .*after \d{3,}$ => Telegram takes nothing for so many seconds (…) => ` +
	`what is asked goes out after that; until then answer it at the keyboard, or with atlasbridge answer
rights to send (text|a message)|CHAT_WRITE_FORBIDDEN|no write access => the bot may not write in its group (…) => ` +
	`allow it in the group's permissions, or run atlasbridge setup
^403: .*(kicked|not a member|deleted) => the bot is not in its group (…) => add it there again, or run atlasbridge setup
^403: |chat not found|upgraded to a supergroup => the bot may not write to its chat (…) => ` +
	`press Start there, or run atlasbridge setup
[wW]ebhook => a webhook is set for this bot, so it cannot be polled => give AtlasBridge a bot of its own
^409: => another program polls this bot, and each gets only some of the answers => ` +
	`stop it; or give each machine a bot of its own, and share ATLASBRIDGE_HOME on one
`

// reCause is a row of causes.
var reCause = re(`(?m)^(.+) => (.+) => (.+)$`)

// cause is what the error says about all requests, and what to do about that; "" where it is one request's alone, or
// may soon be over.
func (e *apiError) cause() (what, todo string) {
	for _, row := range reCause.expr().FindAllStringSubmatch(causes, -1) {
		if e.Code > 0 && re(row[1]).MatchString(e.Text) {
			return strings.Replace(row[2], "…", e.Text, 1), row[3]
		}
	}
	return "", ""
}

// trouble returns cause as one sentence; from the second failure on also for what may soon be over.
func (e *apiError) trouble(failures int) string {
	what, todo := e.cause()
	switch {
	case what != "":
		return what + ": " + todo
	case e.temporary() && e.retryAfter() == 0 && failures > 0:
		return "Telegram cannot be reached, still trying: " + e.Text
	}
	return ""
}

// explained returns an error of call in plain words, with a hint; nil stays nil.
func explained(err error) error {
	e, ok := err.(*apiError)
	if !ok {
		return err
	}
	what, todo := e.cause()
	switch {
	case what != "":
		return hinted(errors.New(what), todo)
	case e.temporary():
		todo = "check the network, a proxy (HTTPS_PROXY), and telegram.api_base where it is set; or try again later"
	}
	return hinted(e, todo)
}

// call makes one request and decodes its result into what result points to, unless that is nil. Its errors are all
// of the type *apiError.
func (t *Telegram) call(ctx context.Context, method string, params, result any) error {
	limit := callLimit
	if poll, ok := params.(*pollParams); ok {
		limit += time.Duration(poll.Timeout) * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	resp, body, err := t.exchange(ctx, "/bot", method, params)
	if err != nil {
		return t.noAnswer(method, err)
	}
	var a apiAnswer
	_ = json.Unmarshal(body, &a) // what is no answer of the Bot API leaves zeros
	a.method = method
	date, err := http.ParseTime(resp.Header.Get("Date"))
	if err == nil && (a.OK || a.Code != 0) {
		t.skew.Store(int64(time.Until(date)))
	}
	switch {
	case a.OK && (result == nil || json.Unmarshal(a.Result, result) == nil):
		return nil
	case a.OK:
		a.Text = "a result of another shape than documented"
	case a.Code == 0:
		a.Text = resp.Status + ", but nothing the Bot API would say"
	default:
		a.Text = fmt.Sprintf("%d: %s", a.Code, a.Text)
	}
	a.Text = t.withoutToken(a.Text)
	return &a.apiError
}

// withoutToken returns what a server or the network said without the token: they may repeat the path, which has it.
func (t *Telegram) withoutToken(text string) string {
	_, secret, found := strings.Cut(t.cfg.Load().Token, ":")
	text = redact(text)
	if found {
		text = strings.ReplaceAll(text, secret, "[redacted]")
	}
	return text
}

// exchange makes one request, and returns its answer and what that says. The request posts params, or, where they are
// nil, gets a file. The token is in its address.
func (t *Telegram) exchange(ctx context.Context, kind, path string, params any) (*http.Response, []byte, error) {
	cfg := t.cfg.Load()
	method := http.MethodPost
	body, err := json.Marshal(params)
	if err != nil {
		return nil, nil, err
	}
	if params == nil {
		method = http.MethodGet
		body = nil
	}
	url := strings.TrimRight(cfg.APIBase, "/") + kind + cfg.Token + "/" + path
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp, answer, err
}

// noAnswer is what went wrong with a request that got no answer. It has neither the URL nor the token in it.
func (t *Telegram) noAnswer(method string, err error) *apiError {
	if inner := errors.Unwrap(err); inner != nil { // what url.Error wraps is without the URL
		err = inner
	}
	return &apiError{method: method, Text: t.withoutToken(err.Error())}
}

// ---- pacing ----
// At each turn of the chat, the message that ranks first among all processes is sent.

const (
	// 1/s in a chat, 20/min in a group: https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this
	paceChat  = 1050 * time.Millisecond
	paceGroup = 3900 * time.Millisecond // 4 + 60/3.9 < 20
)

// rank orders messages: a lower one overtakes a higher one.
type rank int

const (
	rankQuestion rank = iota // or what a person has just asked for
	rankOutcome
	rankNotice
	rankRest
)

// takeTurn takes the chat's next turn for a message of that rank, or returns how long to wait before the next attempt.
func (t *Telegram) takeTurn(as rank) (wait time.Duration) {
	every := paceChat
	if t.chat() < 0 {
		every = paceGroup
	}
	t.updatePace(func(next time.Time) time.Time {
		next, wait = reserve(next, time.Now(), every, as)
		return next
	})
	return wait
}

// reserve takes a turn and returns when the next one is, or, without changing that, how long to wait. Up to four turns
// are saved up. What ranks behind a question waits up to a turn longer than needed, so that a question can pass it.
func reserve(next, now time.Time, every time.Duration, as rank) (time.Time, time.Duration) {
	due := max(next.Sub(now), -3*every)
	wait := due + every*time.Duration(as)/time.Duration(rankRest)
	if wait > 0 {
		return next, wait
	}
	return now.Add(due + every), 0
}

// updatePace changes when the next message of the bot may be sent by any process. The file holds that and when it was
// written, in Unix nanoseconds. If it is unusable change gets the zero time, and Telegram alone paces.
func (t *Telegram) updatePace(change func(next time.Time) time.Time) {
	f, err := holdLock(filepath.Join(t.store.Dir, t.botID()+".pace"), paceChat)
	if err != nil {
		change(time.Unix(0, 0))
		return
	}
	defer f.Close() // and with it the lock, which is held for microseconds
	var next, written int64
	_, _ = fmt.Fscanf(f, "%d %d", &next, &written) // zeros of one that is new, or damaged
	if written > time.Now().UnixNano() {           // the clock has been set back
		next = 0
	}
	next = change(time.Unix(0, next)).UnixNano()
	_, _ = f.WriteAt(fmt.Appendf(nil, "%020d %020d\n", next, time.Now().UnixNano()), 0) // if lost, Telegram paces
}

// botID is the number of the bot, which is the beginning of its token and no secret.
func (t *Telegram) botID() string {
	bot, _, _ := strings.Cut(t.cfg.Load().Token, ":")
	return bot
}

// chat is the number of the chat that gets the questions.
func (t *Telegram) chat() int64 { return t.cfg.Load().ChatID }

// here names the bot and the chat whose message numbers we use.
func (t *Telegram) here() string { return fmt.Sprintf("%s/%d", t.botID(), t.chat()) }

// backoff is the pause after failure n ≥ 0: 1 s doubling to 60 s, less r of a quarter.
func backoff(n int, r float64) time.Duration {
	d := min(time.Minute, time.Second<<min(n, 6))
	return d - time.Duration(r*float64(d)/4)
}

// ring wakes the goroutine that waits for bell, now or as soon as it does.
func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default: // it was rung already
	}
}

// ---- the mailer ----
// One goroutine per process sends and edits messages, one request at a time: whatever is most urgent of what the state,
// the notices and the stream are not shown as yet. After each request it looks anew, so that what has been overtaken is
// not sent, and what failed is tried again.

const (
	mailLook     = 5 * time.Second        // between looks, where nothing tells of a change
	answerLinger = 2 * time.Second        // for an answer on its way, when the process ends: a message's id is worth that
	lostLife     = time.Minute            // an edit without an answer is carried out by then, or never
	typingTime   = 900 * time.Millisecond // the typing of an answer may take so long before its message says so
	sideLimit    = 3 * time.Second        // that a request may take which is no message: a question may wait behind it
	refusedPause = time.Minute            // after a question that Telegram does not take
	maxNotices   = 50                     // that wait
	maxRun       = 2 << 20                // bytes of a stream that wait
)

// mailer is what Show remembers of what it did, by the keys of jobs.
type mailer struct {
	failures int                     // in a row
	notYet   map[string]time.Time    // when the next attempt may be made
	undone   map[string]func() error // what is still to be recorded of a request that was made
	topics   map[int64]bool          // whether a chat has topics, where that is known
	before   map[string]Notice       // what is left of the text that goes before a question, once that has begun
	refused  bool                    // Telegram takes nothing at all, until somebody mends that
	cfg      *Config                 // the settings so far: with others all may be tried at once
}

// job is one request that is due.
type job struct {
	key     string    // tells what it is about
	rank    rank      // what it may overtake
	at      time.Time // not before that
	ready   time.Time // the soonest that it may be done: after failures, too
	free    bool      // it is no message: it takes no turn
	insists bool      // where it is refused for good it is tried again, all others count as done
	method  string    // "" none: there is only something to be recorded
	params  any       // *outgoing of a message
	result  jobResult
	done    func() error // records that it was done
	lost    func() error // records that no answer came: it may be carried out even later; nil: never mind
}

// outgoing is a message to send, or an edit of one, as the Bot API takes it.
type outgoing struct {
	method string

	ChatID   int64          `json:"chat_id"`
	ThreadID int64          `json:"message_thread_id,omitempty"` // the topic it goes to
	EditID   int64          `json:"message_id,omitempty"`        // the message to edit
	Text     string         `json:"text,omitempty"`
	Entities *richText      `json:"entities,omitempty"`
	Markup   inlineKeyboard `json:"reply_markup"` // without rows it takes away the buttons that are there
	Preview  map[string]any `json:"link_preview_options,omitempty"`
	Silent   bool           `json:"disable_notification,omitempty"`
	ReplyTo  map[string]any `json:"reply_parameters,omitempty"`
}

// jobResult is what counts of Telegram's answer. A member of another shape than documented stays zero: what was sent is
// not sent again for that.
type jobResult struct {
	ID       int64 `json:"message_id"`
	Date     int64 // Unix seconds by Telegram's clock
	ThreadID int64 `json:"message_thread_id"`
	Topics   bool  `json:"has_topics_enabled"` // of getMe: in private chats
	Forum    bool  `json:"is_forum"`           // of getChat: in this group
}

// Show sends and edits until ctx ends. Once end is closed it returns when nothing more can be done at once.
func (t *Telegram) Show(ctx context.Context, end <-chan struct{}) {
	t.mailer = mailer{notYet: map[string]time.Time{}, before: map[string]Notice{},
		undone: map[string]func() error{}, topics: map[int64]bool{}}
	for ending := false; ctx.Err() == nil; {
		t.refresh(false)
		if cfg := t.cfg.Load(); cfg != t.mailer.cfg {
			t.mailer.cfg = cfg
			clear(t.mailer.notYet)
		}
		j, changed := t.nextJob()
		wait := mailLook
		if j != nil {
			wait = min(wait, time.Until(j.ready))
		}
		if ending && (j == nil || time.Now().Before(j.at) || t.mailer.refused) {
			return
		}
		if wait <= 0 && !j.free {
			wait = t.takeTurn(j.rank)
		}
		if wait <= 0 {
			t.do(ctx, j)
			continue
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		case <-t.bell:
		case <-changed:
		case <-end:
			ending = true
			end = nil
		}
	}
}

// nextJob returns the most urgent job that may be done now, else the one that may be done first, nil for none. changed
// is closed by the next change of the state. Only records of this process's session count and, if this process polls,
// those of sessions whose process has ended.
func (t *Telegram) nextJob() (next *job, changed <-chan struct{}) {
	prompts, v, changed := t.store.Unsettled()
	counts := func(session string, over bool) bool {
		return session == t.session || over && t.store.Polls() && !t.store.Alive(session)
	}
	jobs := []*job{t.noticeJob(v), t.streamJob(v)}
	for _, p := range prompts {
		if counts(p.SessionID, !p.Open()) {
			about := v.Sessions[p.SessionID]
			if about == nil { // it is not recorded
				about = &SessionRecord{Head: Head{ID: p.SessionID}}
			}
			jobs = append(jobs, t.due(p, about)...)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(v.Inputs)) {
		in := v.Inputs[id]
		if in.Status == "failed" && counts(in.SessionID, true) {
			jobs = append(jobs, t.dueRefusal(in, v.Sessions[in.SessionID]))
		}
	}
	for id, s := range v.Sessions {
		if counts(id, s.Status != "active" && (s.Farewell != nil || s.ThreadID > 0 && !s.ThreadEnded)) {
			jobs = append(jobs, t.dueFarewell(s), t.dueTopic(s))
		}
	}
	now := time.Now()
	for _, j := range jobs {
		if j == nil {
			continue
		}
		j.ready = later(now, later(j.at, t.mailer.notYet[j.key]))
		if next == nil || j.before(next) {
			next = j
		}
	}
	return next, changed
}

// before reports whether j is more urgent than the other.
func (j *job) before(other *job) bool {
	if j.ready.Equal(other.ready) {
		return j.rank < other.rank
	}
	return j.ready.Before(other.ready)
}

// do makes the job's request and records the outcome. If it cannot record that, it tries again later without repeating
// the request; other jobs go on, such as the notice that nothing can be recorded.
func (t *Telegram) do(ctx context.Context, j *job) {
	m := &t.mailer
	record := m.undone[j.key]
	if record == nil {
		record = t.outcome(ctx, j)
	}
	delete(m.undone, j.key)
	if record == nil {
		return
	}
	if err := record(); err != nil {
		t.warn(err)
		m.undone[j.key] = record
		m.notYet[j.key] = time.Now().Add(time.Second)
	}
}

// outcome makes the job's request and returns what is to be recorded, nil nothing.
func (t *Telegram) outcome(ctx context.Context, j *job) (record func() error) {
	m := &t.mailer
	failed := t.request(ctx, j)
	_, isMessage := j.params.(*outgoing)
	if failed == nil {
		if isMessage { // what else is taken says nothing of these
			m.failures = 0
			m.refused = false
			t.works("send")
		}
		return j.done
	}
	if wait := failed.retryAfter(); wait > 0 { // for all processes
		t.updatePace(func(next time.Time) time.Time { return later(next, time.Now().Add(wait)) })
	}
	if failed.Code == 0 || failed.Code >= 500 { // it may be done, or be done yet
		record = j.lost
	}
	if ctx.Err() != nil {
		return record
	}
	why := failed.trouble(0)
	lasting := isMessage && why != "" // else a Bot API that is older may not know the method
	pause := t.pause(failed, m.failures)
	switch {
	case failed.temporary() || lasting:
		t.noteFailure("send", failed, m.failures)
	default:
		why = failed.Error()
		t.noteTrouble("refused", "Telegram does not take it, now or later: "+why)
		if !j.insists {
			return j.done
		}
		pause = refusedPause
	}
	m.notYet[j.key] = time.Now().Add(pause)
	m.failures++
	m.refused = lasting
	if !failed.temporary() && t.giveUp != nil {
		t.giveUp(errors.New(why))
	}
	return record
}

// request makes the job's request. A message that is not taken as it is goes where the chat has no topics, or without
// what a Bot API of 2020 may not know, as text and buttons: no question is lost to that.
func (t *Telegram) request(ctx context.Context, j *job) (failed *apiError) {
	if j.method == "" {
		return nil
	}
	flying, cancel := lingering(ctx)
	defer cancel()
	out, isMessage := j.params.(*outgoing)
	if !isMessage {
		flying, cancel = context.WithTimeout(flying, sideLimit)
		defer cancel()
	}
	for plain := false; ; {
		var result json.RawMessage
		failed, _ = t.call(flying, j.method, j.params, &result).(*apiError)
		_ = json.Unmarshal(result, &j.result) // see jobResult
		switch {
		case failed == nil || !isMessage:
			return failed
		case failed.mentions("message is not modified"): // it was carried out before, and the answer lost
			j.result.ID = out.EditID
			return nil
		case out.ThreadID != 0 && failed.mentions(topicGone...):
			out.ThreadID = 0
			continue
		}
		if plain || failed.Code != http.StatusBadRequest || failed.trouble(0) != "" {
			return failed
		}
		t.noteTrouble("looks", "messages are sent again without formatting: "+failed.Error())
		plain = true
		out.Entities = nil
		for _, row := range out.Markup.Rows {
			for i := range row {
				row[i].Style = ""
			}
		}
	}
}

// lingering returns a context that outlives ctx by answerLinger, for requests under way.
func lingering(ctx context.Context) (_ context.Context, cancel func()) {
	longer, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(answerLinger, end) })
	return longer, func() {
		stop()
		end()
	}
}

// pause is how long to wait after that many failures before this one: as Telegram asks, else longer each time.
func (t *Telegram) pause(e *apiError, failures int) time.Duration {
	if e.retryAfter() > 0 {
		return e.retryAfter()
	}
	return backoff(failures, t.jitter())
}

// ---- what is due ----
// A question's messages show what its record says; this is the difference.

// due returns what the messages of a question need next, nothing if they are up to date. Messages of another bot or
// chat cannot be changed from here.
func (t *Telegram) due(p *PromptRecord, s *SessionRecord) (jobs []*job) {
	elsewhere := p.elsewhere(t.here())
	switch {
	case p.Open() && (p.Send != "" || elsewhere):
		if time.Now().Before(p.ExpiresAt) {
			jobs = append(jobs, t.dueMessage(p, s))
		}
	case !elsewhere:
		for _, m := range p.Messages {
			jobs = append(jobs, t.dueEdit(p, s, m))
		}
	}
	return jobs
}

// dueMessage is the next message of an open question: the question itself, behind all of the text that goes before it.
func (t *Telegram) dueMessage(p *PromptRecord, s *SessionRecord) *job {
	here := t.here()
	key := p.ID + p.Send + here // another chat has been shown nothing of it
	j := &job{key: key, insists: true}
	if p.Idle {
		j.rank = rankRest
	}
	before, begun := t.mailer.before[key]
	if !begun {
		before = Notice{Mono: clean(p.before(), 1<<20), Lang: p.Lang, Ring: true}
	}
	if before.Mono != "" {
		part, rest := t.notice(key, before, s)
		part.rank = j.rank
		part.insists = true
		part.done = func() error {
			t.mailer.before[key] = rest
			return nil
		}
		return part
	}
	q := *p
	out := t.offer(&q, s)
	if p.Chat != here || p.ShownAll != q.ShownAll {
		j.free = true
		j.done = amends(t.store, p.key(), func(p *PromptRecord) {
			p.ShownAll = q.ShownAll
			if p.elsewhere(here) { // those cannot be changed any more, and here nothing was shown
				p.Messages = nil
				p.Send = sendQuestion
				p.ShownAll = false
			}
			p.Chat = here
		})
		return j
	}
	if own := p.newest(); own.ID != 0 && own.Shows != p.wants(own) { // two with buttons would confuse
		return t.dueEdit(p, s, own)
	}
	out.Silent = p.Watched
	j.done = amends(t.store, p.key(), func(p *PromptRecord) {
		delete(t.mailer.before, key)
		m := p.message(j.result.ID)
		m.Date = j.result.Date
		m.Shows = q.shows()
		if p.Send == q.Send { // else more has been asked for meanwhile
			p.Send = ""
		}
		if p.Status == Routed {
			p.Status = AwaitingReply
		}
	})
	return t.message(j, s, out)
}

// offer returns an open question's message with its buttons. They include what affirms, and all counts as shown, only
// if the message, with what was sent before it, says every word that is asked.
func (t *Telegram) offer(p *PromptRecord, s *SessionRecord) *outgoing {
	r := t.questionText(p, s)
	rows := strings.Split(r.text, "\n")
	asked := rows[1:max(1, len(rows)-1)] // without our own words: a command may be called like one of them
	message := p.before() + "\n" + strings.Join(asked, "\n")
	was := p.ShownAll
	p.ShownAll = true
	for _, b := range slices.Concat(keyboard(p)...) {
		if utf8.RuneCountInString(b.Text) <= wideLabel { // of what is longer the phone shows a part
			message += "\n" + b.Text
		}
	}
	p.ShownAll = !p.Cut && (was || p.accountedIn(message))
	return r.outgoing(0, keyboard(p))
}

// message completes the job of a message about the session, nil none.
func (t *Telegram) message(j *job, about *SessionRecord, out *outgoing) *job {
	if out.EditID == 0 && about != nil {
		out.ThreadID = t.topicOf(about)
	}
	out.ChatID = t.chat()
	j.method = out.method
	j.params = out
	return j
}

// dueEdit returns the edit that a message of a question needs, nil for none. An edit whose answer was lost may still
// land on top of a later one: that one is repeated once it no longer can.
func (t *Telegram) dueEdit(p *PromptRecord, s *SessionRecord, m Message) *job {
	j := &job{key: fmt.Sprint(p.ID, " ", m.ID), rank: rankOutcome}
	shows := p.wants(m)
	again := m.Shows == shows
	switch {
	case again && m.LostAt == 0:
		return nil
	case again:
		j.at = time.Unix(m.LostAt+1, 0).Add(lostLife)
	case shows == string(ReplyReceived):
		j.at = p.At.Add(typingTime)
	}
	if p.SessionID != t.session { // that is over
		j.rank = rankRest
	}
	j.done = amends(t.store, p.key(), func(p *PromptRecord) {
		m := p.message(m.ID)
		m.Shows = shows
		if time.Since(time.Unix(m.LostAt, 0)) >= lostLife {
			m.LostAt = 0
		}
	})
	j.lost = amends(t.store, p.key(), func(p *PromptRecord) { p.message(m.ID).LostAt = time.Now().Unix() })
	out := &outgoing{method: "editMessageReplyMarkup", EditID: m.ID, Markup: markup(nil)}
	switch {
	case shows == replaced:
	case p.Open():
		out.Markup = markup(keyboard(p))
	default:
		out = t.questionText(p, s).outgoing(m.ID, keyboard(p))
	}
	return t.message(j, s, out)
}

// dueFarewell is the last message about a session, below all others; nil where none is owed.
func (t *Telegram) dueFarewell(s *SessionRecord) *job {
	if s.Farewell == nil {
		return nil
	}
	j, _ := t.notice("end "+s.ID, Notice{Text: s.Farewell.Text, Ring: s.Farewell.Ring && s.ID == t.session}, s)
	j.rank = rankRest
	j.done = amends(t.store, s.key(), func(r *SessionRecord) { r.Farewell = nil })
	return j
}

// dueRefusal is the answer to what was sent to a session that ended before it could do it; nil where another bot was
// asked.
func (t *Telegram) dueRefusal(in *InputRecord, s *SessionRecord) *job {
	if !strings.HasPrefix(in.ID, t.botID()+":") {
		return nil
	}
	n := Notice{Text: "✗ " + in.Reason, Ring: true, ReplyTo: in.ReplyTo, ThreadID: in.ThreadID}
	j, _ := t.notice("input "+in.ID, n, s)
	j.done = amends(t.store, in.key(), func(in *InputRecord) { in.Status = "refused" })
	return j
}

// message returns the prompt's message with that number, to be changed; one that was not known is new.
func (p *PromptRecord) message(id int64) *Message {
	i, known := slices.BinarySearchFunc(p.Messages, id, func(m Message, id int64) int { return cmp.Compare(m.ID, id) })
	p.Messages = slices.Clone(p.Messages)
	if !known {
		p.Messages = slices.Insert(p.Messages, i, Message{ID: id, Shows: string(AwaitingReply)})
	}
	return &p.Messages[i]
}

// before is what goes before the question, when it is sent the next time.
func (p *PromptRecord) before() string {
	switch p.Send {
	case sendAll:
		return strings.TrimLeft(p.Far+"\n"+p.region(), "\n")
	case sendRecent:
		return p.Recent
	}
	return ""
}

// ---- notices and streams ----
// Messages that ask nothing.

// Notify queues the notice, in as many messages as it needs; replies are a queue of their own. If too many wait, the
// oldest are left out.
func (t *Telegram) Notify(n Notice) {
	n.Text = clean(n.Text, 1<<20)
	n.Mono = clean(n.Mono, 1<<20)
	if n.Text+n.Mono == "" && !n.Done {
		return
	}
	t.noticesMu.Lock()
	defer t.noticesMu.Unlock()
	queue := &t.notices[0]
	if n.ReplyTo == 0 {
		queue = &t.notices[1]
	}
	*queue = append(*queue, &n)
	if len(*queue) > maxNotices {
		(*queue)[2].leftOut += 1 + (*queue)[1].leftOut // the first may be on its way
		*queue = slices.Delete(*queue, 1, 2)
	}
	ring(t.bell)
}

// noticeJob is the next message of the notices, replies first, nil: none is to be sent.
func (t *Telegram) noticeJob(v *View) *job {
	t.noticesMu.Lock()
	defer t.noticesMu.Unlock()
	queue := &t.notices[0]
	if len(*queue) == 0 {
		queue = &t.notices[1]
	}
	if len(*queue) == 0 {
		return nil
	}
	n := (*queue)[0]
	j, rest := t.notice(fmt.Sprintf("%p", n), *n, v.Sessions[n.SessionID])
	j.done = func() error {
		t.noticesMu.Lock()
		defer t.noticesMu.Unlock()
		*n = rest
		if rest.Text+rest.Mono == "" {
			*queue = (*queue)[1:]
		}
		return nil
	}
	return j
}

// notice returns the job of the notice's first message, about that session (nil: none), and the rest, for further ones
// if it has Text or Mono.
func (t *Telegram) notice(key string, n Notice, about *SessionRecord) (j *job, rest Notice) {
	j = &job{key: key, rank: rankRest}
	switch {
	case n.ReplyTo != 0:
		j.rank = rankQuestion
	case n.Ring:
		j.rank = rankNotice
	}
	if n.Done {
		j.free = true
		j.method = "setMessageReaction"
		j.params = map[string]any{
			"chat_id":    t.chat(),
			"message_id": n.ReplyTo,
			"reaction":   []map[string]string{{"type": "emoji", "emoji": "👍"}}, // every chat has that one
		}
		return j, n
	}
	var text, mono string
	text, n.Text = cutText(n.Text, partUnits)
	if n.Text == "" {
		mono, n.Mono = cutText(n.Mono, partUnits-units(text))
	}
	r := &richText{}
	if about != nil {
		r.addLine("bold", title(about))
	}
	r.addLine("", text)
	r.addLine("pre "+n.Lang, mono)
	if n.leftOut > 0 {
		r.addLine("", fmt.Sprintf("(%d messages before this one were left out)", n.leftOut))
		n.leftOut = 0
	}
	if about != nil {
		r.addLine("", sid(about))
	}
	out := r.outgoing(n.edit, nil)
	out.Silent = !n.Ring
	t.message(j, about, out)
	if n.ReplyTo != 0 {
		out.ReplyTo = map[string]any{"message_id": n.ReplyTo, "allow_sending_without_reply": true}
		out.ThreadID = n.ThreadID // it goes where that message is
	}
	return j, n
}

// stream turns the transcript into messages. The text up to a mark goes into the current message, which is edited as
// that grows, and into the next ones where it is longer; the live part stands at the end of all.
type stream struct {
	mu    sync.Mutex
	text  string // finished lines that are in no message but the current one, with breakMark where a new one begins
	live  string // what may still change
	key   string // how the key in PEM begins in which the text so far ends, "" in none
	shown string // what the current message says
	msg   int64  // the current message, 0: it has not begun
	chat  string // whose number that is
}

// breakMark is in no text that is safe.
const breakMark = "\x1e"

// add adds lines that are finished, and what follows them now. If the phone cannot keep up, the middle is left out.
func (s *stream) add(lines []string, live string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.Join(append(lines, ""), "\n")
	safe := strings.TrimPrefix(redact(s.key+visible(text)), s.key)
	s.key = openKey(s.key + text)
	s.live = strings.TrimPrefix(redact(s.key+visible(live)), s.key)
	s.text += safe
	if len(s.text) > maxRun {
		s.text = abridge(s.text, maxRun/2)
	}
}

// breakHere makes what is added from now on begin a new message: another one is about to be sent.
func (s *stream) breakHere() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text += breakMark
}

// next returns the current message's new text, "" for no change, and whether more follows. If the message says it all
// already, a new one begins.
func (s *stream) next(limit int) (text string, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		run, _, broken := strings.Cut(s.text, breakMark)
		page, rest := cutText(run, limit)
		more = rest != "" || broken
		if !more {
			page, _ = cutText(page+s.live, limit)
		}
		page = strings.TrimRight(strings.TrimLeft(page, "\n"), " \t\n")
		switch {
		case page != s.shown:
			return page, more
		case !more:
			return "", false
		}
		s.text = strings.TrimPrefix(s.text[len(run)-len(rest):], breakMark)
		s.msg = 0
		s.shown = ""
	}
}

// streamJob brings the stream's current message up to date, or begins it. One refused for good is not sent again.
func (t *Telegram) streamJob(v *View) *job {
	if t.stream == nil {
		return nil
	}
	s := t.stream
	limit := t.cfg.Load().MaxChars
	about := v.Sessions[t.session]
	if about != nil { // its first and last line count, too
		limit = max(limit/2, limit-units(origin(about))-1)
	}
	text, more := s.next(min(limit, partUnits))
	if text == "" {
		return nil
	}
	here := t.here()
	if s.chat != here { // another chat's message
		s.msg = 0
	}
	n := Notice{Mono: text, edit: s.msg, Ring: s.msg != 0} // an edit has no sound to leave out
	j, _ := t.notice("stream", n, about)
	j.rank = rankRest
	if more {
		j.rank = rankNotice
	}
	j.done = func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.msg = j.result.ID
		s.chat = here
		s.shown = text
		return nil
	}
	return j
}

// ---- text ----
// What a message is made of: lines with their looks, and text from elsewhere made safe and cut to fit.

const (
	maxUnits  = 4096 // UTF-16 units of a message: https://core.telegram.org/bots/api#sendmessage
	partUnits = 3400 // of foreign text in a notice: the rest is room for our own lines
)

// sessionMark is the end of a message of ours that says which session it is about.
var sessionMark = re(`\[SID:([0-9a-f]{8})\]\s*$`)

// entity is how a part of a text looks: https://core.telegram.org/bots/api#messageentity
type entity struct {
	Type     string `json:"type"`
	Offset   int    `json:"offset"` // in UTF-16 units, as is the length
	Length   int    `json:"length"`
	Language string `json:"language,omitempty"` // of a pre
}

// richText is a message's text with its looks: each byte has one, so that none can overlap with another. A look is an
// entity's type: bold, code or pre, that with a blank and what it is written in; "" is plain.
type richText struct {
	text  string
	looks []string // of the bytes; what is missing is plain
	quote [2]int   // from which byte up to which it is a quotation, whatever stands in there
}

// addLine adds s, unless it is empty, as lines of their own with that look.
func (r *richText) addLine(look, s string) {
	if s == "" {
		return
	}
	if r.text != "" {
		r.add("", "\n")
	}
	r.add(look, s)
}

// add adds s to the last line, with that look.
func (r *richText) add(look, s string) {
	r.looks = append(r.looks, slices.Repeat([]string{look}, len(s))...)
	r.text += s
}

// MarshalJSON returns the looks as the Bot API takes them, the quotation before what stands in it. Nothing in the text
// is a link, a mention or a command. It runs when a message is sent: most that are composed never are.
func (r *richText) MarshalJSON() ([]byte, error) {
	r.disarm()
	all := []entity{}
	before := ""
	at := 0
	for i, c := range r.text {
		if i == r.quote[0] && i < r.quote[1] {
			quoted := units(r.text[i:r.quote[1]])
			all = append(all, entity{Type: "expandable_blockquote", Offset: at, Length: quoted})
		}
		size := utf16.RuneLen(c)
		look := r.looks[i]
		if look != "" && look != before {
			kind, lang, _ := strings.Cut(look, " ")
			all = append(all, entity{Type: kind, Language: lang, Offset: at})
		}
		if look != "" {
			all[len(all)-1].Length += size
		}
		before = look
		at += size
	}
	if len(all) > maxEntities {
		all = []entity{{Type: "pre", Length: at}}
	}
	return json.Marshal(all)
}

// outgoing is a message with the text and these buttons, or, if edit is not 0, the change of that message into it.
func (r *richText) outgoing(edit int64, rows [][]button) *outgoing {
	method := "sendMessage"
	if edit != 0 {
		method = "editMessageText"
	}
	return &outgoing{method: method, EditID: edit, Text: r.text, Entities: r, Markup: markup(rows),
		Preview: map[string]any{"is_disabled": true}}
}

// units is the length of s in UTF-16 units, as Telegram counts.
func units(s string) int { return len(utf16.Encode([]rune(s))) }

// clean makes text from elsewhere valid, without secrets and without what is invisible, of at most n UTF-16 units.
func clean(s string, n int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = safeText(strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n"))
	if units(s) <= n {
		return s
	}
	short, _ := cutText(s, n-1)
	return short + "…"
}

// cutText cuts s after at most n UTF-16 units: at a line end, which is lost, if there is one in the second half, else
// behind a blank there.
func cutText(s string, n int) (part, rest string) {
	for i, c := range s {
		n -= utf16.RuneLen(c)
		if n >= 0 {
			continue
		}
		end := strings.LastIndexByte(s[:i+1], '\n')
		if end > i/2 {
			return s[:end], s[end+1:]
		}
		blank := strings.LastIndexByte(s[:i], ' ')
		if blank > i/2 {
			return s[:blank+1], s[blank+1:]
		}
		return s[:i], s[i:]
	}
	return s, ""
}

// abridge gives the beginning and the end of a text that is longer than n UTF-16 units, and how much is missing.
func abridge(text string, n int) string {
	if units(text) <= n {
		return text
	}
	head, rest := cutText(text, 2*n/3)
	skip := max(0, len(rest)-n/3)
	tail := strings.ToValidUTF8(rest[skip:], "")
	missing := utf8.RuneCountInString(rest) - utf8.RuneCountInString(tail)
	return fmt.Sprintf("%s\n… %d more characters …\n%s", head, missing, tail)
}

// span is a time that has passed, or is left, without its seconds from a minute on.
func span(d time.Duration) string {
	text, _, long := strings.Cut(max(d, 0).Truncate(time.Second).String(), "m")
	if long {
		text += "m"
	}
	return text
}

// clock is when, in a message.
func clock(t time.Time) string { return t.Local().Format("15:04") }

// title is what a session is called, on the first line of its messages: its label, else its folder, and the tool.
func title(s *SessionRecord) string {
	name := s.Label
	if name == "" {
		name = filepath.Base(s.Cwd)
	}
	tool := oneLine(clean(s.Tool, 40))
	if strings.Trim(name, "./\\") == "" {
		return tool
	}
	return oneLine(clean(name, 60)) + " · " + tool
}

// sid ends every message about a session; sessionMark reads it.
func sid(s *SessionRecord) string { return "[SID:" + shortID(s.ID) + "]" }

// origin is a session by both, in a list.
func origin(s *SessionRecord) string { return title(s) + " " + sid(s) }

// ---- markdown ----
// Code, bold words, headings and bullets in an agent's answer become entities; a table stays as it is, in monospace.
// All else is plain text.

var (
	// reFence begins a block of code: its indentation, its marks, the language.
	reFence = re("(?m)^( *)(```+|~~~+) *([A-Za-z0-9+#-]{0,20}).*$")
	// reInline is one of a table, a heading, code, bold words.
	reInline = re("(?m)^(.*\\|.*\n(?:[ |:-]*-[ |:-]*\\|[ |:-]*| *\\|[ |:-]*-[ |:-]*)(?:\n.*\\|.*)*)$|" +
		"^#{1,6} +(.*?)[ #]*$|(``.+?``|`[^`\n]+`)|\\*\\*([^\\s*]|[^\\s*].*?\\S)\\*\\*")
	// reBullet begins a row of a list.
	reBullet = re(`(?m)^( *)[-*+] +`)
	// reBlanks are blank lines, one after the other.
	reBlanks = re(`(?: *\n){3,}`)
)

// markdown renders what an agent wrote.
func markdown(text string) *richText {
	r := &richText{}
	text = strings.NewReplacer("\r", "", "\t", "    ").Replace(text)
	text = strings.TrimRight(strings.TrimLeft(text, "\n"), " \n")
	for {
		at := reFence.expr().FindStringIndex(text)
		if at == nil {
			r.addInline("", text)
			return r
		}
		r.addInline("", strings.TrimSuffix(text[:at[0]], "\n"))
		fence := reFence.FindStringSubmatch(text[at[0]:at[1]])
		code := text[at[1]:]
		text = ""
		end := regexp.MustCompile(`(?m)\n *` + fence[2] + ` *$`).FindStringIndex(code)
		if end != nil {
			text = code[end[1]:]
			code = code[:end[0]]
		}
		r.addLine("pre "+fence[3], strings.Trim(strings.ReplaceAll(code, "\n"+fence[1], "\n"), "\n"))
	}
}

// addInline adds text to the last line, with its tables, headings, code and bold words, else with that look. Of several
// blank lines one stays.
func (r *richText) addInline(look, text string) {
	text = reBlanks.ReplaceAllString(reBullet.ReplaceAllString(text, "$1• "), "\n\n")
	from := 0
	for _, at := range reInline.expr().FindAllStringIndex(text, -1) {
		r.add(look, text[from:at[0]])
		from = at[1]
		found := reInline.FindStringSubmatch(text[at[0]:at[1]])
		r.add("pre", found[1])
		r.addInline("bold", strings.ReplaceAll(found[2], "**", "")+found[4])
		r.add("code", strings.Trim(found[3], "`"))
	}
	r.add(look, text[from:])
}

// ---- what Telegram must not act on ----
// A tap on /cancel in a text sends it: what others wrote is to be read and copied, never to be tapped.

// maxEntities is how many entities a message may have, with room: Telegram drops what is over 100 without a word.
const maxEntities = 96

// reToken is a word, or a number that is written in groups with what stands around it.
var reToken = re(`\S*\d(?:[ ().-]*\d){6,}\S*|\S+`)

// reActive is in a word that Telegram or the phone may make a link, an address, a mention, a command, a tag, or the
// number of a telephone, a card or a host of by itself: tdlib, td/telegram/MessageEntity.cpp.
var reActive = re(`://|(^|[^\pL\pN_])(/[\w]|@\w|#\d*[\pL_]|\$[A-Z])|\w@\w|` +
	`[\pL\pN_-]\.\pL{2}|\.xn--|\d\.\d+\.\d+\.\d|\+\d|\d([ ().-]*\d){6}|:[\da-fA-F]{0,4}:`)

// disarm draws every word that Telegram would act on as code, which it leaves alone and copies well. Text beside code
// is a word of its own, too.
func (r *richText) disarm() {
	r.looks = append(r.looks, make([]string, len(r.text)-len(r.looks))...)
	plain := []byte(r.text)
	for i := range plain {
		if isCode(r.looks[i]) {
			plain[i] = ' '
		}
	}
	for _, text := range []string{r.text, string(plain)} {
		for _, at := range reToken.expr().FindAllStringIndex(text, -1) {
			word := strings.TrimLeft(text[at[0]:at[1]], "([{<\"'“‘«")
			if !reActive.MatchString(word) {
				continue
			}
			from := at[1] - len(word)
			end := from + len(strings.TrimRight(word, ".,;:!?…\"'”’»)]}>"))
			for i := from; i < end; i++ {
				if !isCode(r.looks[i]) {
					r.looks[i] = "code"
				}
			}
		}
	}
}

// isCode reports whether Telegram acts on nothing that is drawn so.
func isCode(look string) bool { return look == "code" || strings.HasPrefix(look, "pre") }

// ---- keyboards ----
// The buttons below a question, and what its choices are called.

// Values of buttons that no choice has as its key.
const (
	tapAll    = "~" + sendAll    // show all of the question
	tapRecent = "~" + sendRecent // show the end of the screen
	tapAgain  = "~again"         // ask what stands there anew
	tapEnter  = "~enter"         // press Enter at a question for text
	tapLeave  = "~leave"         // leave the question to the terminal
	tapTick   = "~t:+"           // and a key: that choice is ticked
	tapUntick = "~t:-"           // and a key: it is not
	tapSubmit = "~s:"            // and keys: these are chosen

	maxCallbackData = 64 // bytes: https://core.telegram.org/bots/api#inlinekeyboardbutton
)

// Styles of buttons: https://core.telegram.org/bots/api#inlinekeyboardbutton. The word of a button says the same.
const (
	styleYes     = "success" // green: it allows, once
	styleNo      = "danger"  // red: it refuses
	styleLasting = "primary" // blue: it allows for longer, or ends a choosing
)

// How many characters of buttons a phone shows side by side, 36 columns wide.
const (
	rowWidth   = 28
	leastWidth = 7  // a button takes, for a thumb
	wideLabel  = 32 // a button shows; of what is longer the text has all
)

// button is one button, as the Bot API takes it.
type button struct {
	Text  string `json:"text"`
	Data  string `json:"callback_data"`
	Style string `json:"style,omitempty"`
}

// inlineKeyboard is the buttons of a message, in rows.
type inlineKeyboard struct {
	Rows [][]button `json:"inline_keyboard"` // not null
}

func markup(rows [][]button) inlineKeyboard {
	return inlineKeyboard{Rows: append([][]button{}, rows...)}
}

// keyboard returns a question's buttons: its answers, and those that show more of it. Until all of it has been shown
// only refusals are offered; when it is over, at most "Ask again". The data of Submit holds the ticks, so that what is
// seen is submitted.
func keyboard(p *PromptRecord) [][]button {
	switch {
	case p.expiredOpen():
		return buttonRows(p, []button{{Text: "Ask again", Data: tapAgain}})
	case !p.Open() || p.Secret || p.Idle && !p.isLong():
		return nil
	case p.Idle:
		return buttonRows(p, []button{{Text: "The whole answer", Data: tapAll}})
	}
	var all []button
	for _, a := range p.Answers {
		if p.ShownAll || a.Refuses && !p.Turned {
			all = append(all, answerButton(p, a))
		}
	}
	if p.Multi && p.ShownAll {
		all = append(all, button{"Submit", tapSubmit + strings.Join(p.Ticked, ","), styleLasting})
	}
	if p.ambiguous() {
		all = append(all, button{Text: "Show last 500", Data: tapRecent})
	}
	if p.Far != "" || !p.ShownAll && !p.ambiguous() {
		all = append(all, button{Text: "Show all", Data: tapAll})
	}
	return buttonRows(p, all)
}

// isLong reports whether a message shows only a part of the answer that ended a turn.
func (p *PromptRecord) isLong() bool { return units(p.Full) > partUnits }

// answerButton gives the answer, in the colour of what it means. Where several may be ticked, it ticks the choice or
// unticks it.
func answerButton(p *PromptRecord, a Answer) button {
	b := button{Text: buttonText(p, a), Data: a.Key}
	switch {
	case a.Key == enterAlone:
		b.Data = tapEnter
	case a.Key == leaveIt:
		b.Data = tapLeave
	case a.Always:
		b.Style = styleLasting
	case a.Grants && consents(a.Label):
		b.Style = styleYes
	case a.Refuses:
		b.Style = styleNo
	case p.Multi && a.Keys == "":
		mark := "▫️ "
		b.Data = tapTick + a.Key
		if slices.Contains(p.Ticked, a.Key) {
			mark = "✓ "
			b.Data = tapUntick + a.Key
		}
		b.Text = mark + b.Text
	}
	return b
}

// buttonRows puts as many buttons side by side as fit, each as wide as the widest, and blue ones apart, below. A button
// whose data is too long to be sent back is left out.
func buttonRows(p *PromptRecord, all []button) [][]button {
	var rows, apart [][]button
	widest := 0
	for _, b := range all {
		b.Data = p.buttonMark() + b.Data
		last := len(rows) - 1
		width := max(utf8.RuneCountInString(b.Text), leastWidth)
		switch {
		case len(b.Data) > maxCallbackData:
		case b.Style == styleLasting:
			apart = append(apart, []button{b})
		case last >= 0 && max(widest, width)*(len(rows[last])+1) <= rowWidth:
			rows[last] = append(rows[last], b)
			widest = max(widest, width)
		default:
			rows = append(rows, []button{b})
			widest = width
		}
	}
	return append(rows, apart...)
}

// buttonMark is how the data of the prompt's buttons begins. Without one of them nobody knows the nonce in it.
func (p *PromptRecord) buttonMark() string {
	return "ans:" + shortID(p.ID) + ":" + shortID(p.SessionID) + ":" + clipBytes(p.Nonce, 16) + ":"
}

// buttonOf returns the question that a button with this data belongs to, nil for none that is known, and what the
// button says.
func (v *View) buttonOf(data string) (p *PromptRecord, value string) {
	for _, p := range v.Prompts {
		value, found := strings.CutPrefix(data, p.buttonMark())
		if found {
			return p, value
		}
	}
	return nil, ""
}

// buttonText is what an answer is called: its label, behind its number where the program gives it one.
func buttonText(p *PromptRecord, a Answer) string {
	if p.Permission || p.Source == fromAsk || a.Label == a.Key || strings.Trim(a.Key, "0123456789") != "" {
		return a.Label
	}
	return a.Key + " " + a.Label
}

// valueName is a decision's value in a person's words.
func valueName(p *PromptRecord, value string) string {
	named := p.answers(value)
	switch {
	case value == "", named != nil && named[0].Keys == "\r":
		return "Enter"
	case len(named) == 1 && !p.Multi:
		return buttonText(p, named[0])
	}
	return cmp.Or(p.labels(value), value)
}

// ---- what a question's message says ----
// One message for a question's whole life: what is asked, then what became of it.

var (
	// reAtMargin is a row that begins at the left margin.
	reAtMargin = re(`(?m)^[^ \n]`)
	// reRowEnd is the end of a row, with the blanks before it.
	reRowEnd = re(`[ \x{a0}]*(\n|$)`)
	// reBlankRows are blank rows, one after the other.
	reBlankRows = re(`\n{3,}`)
)

// dense returns a screen's text with single blank rows, and without blanks at the ends of its rows and its own.
func dense(text string) string {
	text = reRowEnd.ReplaceAllString(text, "\n")
	return strings.Trim(reBlankRows.ReplaceAllString(text, "\n\n"), "\n")
}

// bodyOf returns the text that a question's message shows, without the rows of the question itself and of its choices
// if the buttons say all of them, and what is asked: the question, or its row where how to choose stands behind it.
func bodyOf(p *PromptRecord) (body, asked string) {
	asked = oneLine(p.Question)
	whole := strings.TrimRight(cmp.Or(p.Full, p.Excerpt), " \t\n")
	if p.ambiguous() && p.Open() {
		return whole, asked
	}
	text := without(whole, "", `\s+`, strings.Fields(p.Question))
	shared := text == whole
	if p.Source == fromHook || p.Source == fromAsk { // those have no screen: every blank of theirs counts
		return strings.Trim(text, "\n"), asked
	}
	unsaid := func(a Answer) bool {
		return p.Multi || utf8.RuneCountInString(buttonText(p, a)) > wideLabel || strings.HasSuffix(a.Label, "…")
	}
	if !slices.ContainsFunc(p.Answers, unsaid) {
		text = without(text, itemMark, columnGap+`|\s*\n\s*`, labels(p.Choices))
	}
	body = dense(text)
	for body != "" && !reAtMargin.MatchString(body) {
		body = strings.ReplaceAll("\n"+body, "\n ", "\n")[1:]
	}
	last := body[strings.LastIndex(body, "\n")+1:]
	if shared && strings.Contains(last, asked) {
		return strings.TrimSuffix(body, last), last
	}
	return body, asked
}

// without returns text less its first rows that say all words and nothing else, each behind what mark matches, with
// what gap matches between them.
func without(text, mark, gap string, words []string) string {
	var all []string
	for _, word := range words {
		all = append(all, mark+regexp.QuoteMeta(word))
	}
	rows := regexp.MustCompile(`(?m)^[ \t]*` + strings.Join(all, "(?:"+gap+")") + `[ \t]*(\n|\z)`)
	at := rows.FindStringIndex(text)
	if at == nil {
		return text
	}
	return text[:at[0]] + text[at[1]:]
}

// questionText returns a question's message: whose it is, what it is about, what is asked (and in which folder, if not
// its session's), and at last until when and what happens then, or what became of it. If room is short, the text above
// the question is left out, and the middle of all else.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord) *richText {
	if p.Idle {
		return t.turnText(p, s)
	}
	body, asked := bodyOf(p)
	lasting := before("Blue also means: ", oneLine(p.Lasting))
	above := p.Above
	room := partUnits
	switch {
	case !p.Open():
		lasting = before("From now on: ", oneLine(p.granted()))
		above = ""
		room = 1200
	case p.ambiguous():
		asked = "Possibly a question: it waits for keys"
	case p.Cwd != "":
		asked += "\nin " + oneLine(p.Cwd)
	}
	asked = abridge(asked, maxUnits/4)
	lasting = abridge(lasting, maxUnits/4)
	body = abridge(body, max(0, room-units(asked+lasting)))
	if units(above+body+asked+lasting) > room {
		above = ""
	}
	r := &richText{}
	r.addLine("bold", title(s))
	r.addLine("", above)
	r.quote = [2]int{len(r.text) - len(above), len(r.text)}
	r.addLine("pre "+p.Lang, body)
	r.addLine("", asked)
	r.addLine("", lasting)
	if !p.Open() {
		t.addOutcome(r, p)
		r.add("", sid(s))
		return r
	}
	if p.Cut {
		r.addLine("", "⚠️ Part of it is missing here: see the terminal. Only there you can allow it.")
	}
	then := "left unanswered"
	if p.SafeDefault != nil && !p.Secret {
		then = clean(valueName(p, *p.SafeDefault), 80)
	}
	r.addLine("", "No answer by "+clock(p.ExpiresAt)+" = "+then+". "+t.hint(s, p)+sid(s))
	return r
}

// hint tells what can be done about an open question besides tapping.
func (t *Telegram) hint(s *SessionRecord, p *PromptRecord) string {
	switch {
	case p.Secret:
		return "Passwords never go through Telegram: type it at the keyboard. "
	case p.Permission && p.refusal() != "":
		if p.Source == fromScreen && adapterFor(s.Tool).Box == nil { // nobody there reads why
			return "Reply = No. "
		}
		return "Reply = No, with your reason. "
	case p.takesReply():
		return "Reply = the text to type. "
	case p.Type == FreeText && t.cfg.Load().FreeText:
		return "Reply with the text. "
	case p.Type == FreeText:
		return "Answering with text is off (free_text_enabled): type it at the keyboard. "
	case p.Multi:
		return "Tap to tick, then Submit. "
	case p.takesText():
		return "Or reply in your own words. "
	}
	return ""
}

// addOutcome adds what became of a question: what was answered, by whom and when, or why nothing was.
func (t *Telegram) addOutcome(r *richText, p *PromptRecord) {
	what, more := outcomeOf(p, len(t.cfg.Load().Users) > 1)
	r.addLine("bold", what)
	r.add("", more+before(" · ", p.Note)+" · ")
}

// explain returns why an answer to p was refused; if p was over, what became of it.
func explain(why string, p *PromptRecord) string {
	if why != questionOver {
		return why
	}
	what, more := outcomeOf(p, false)
	return why + ": " + what + more
}

// deciders are those who decide, as people call them, but for users.
var deciders = map[string]string{
	"":             "terminal",
	"cli:local":    "keyboard",
	"cli:answer":   "atlasbridge answer",
	"auto:timeout": "nobody answered",
}

// outcomeOf returns what was answered, or what happened instead, and as more who decided it, and when. If several users
// may answer, it names the one who did.
func outcomeOf(p *PromptRecord, several bool) (what, more string) {
	what = "answered"
	if p.Idle {
		what = "went on"
	}
	if p.Value != nil {
		what = clean(valueName(p, *p.Value), 300)
	}
	reason := clean(p.Reason, 300)
	if p.DecidedAt != nil {
		who := deciders[p.DecidedBy]
		user, byPhone := strings.CutPrefix(p.DecidedBy, "telegram:")
		if byPhone {
			who = "phone"
		}
		if byPhone && several {
			who += " " + user
		}
		more = " · " + who + ", " + clock(*p.DecidedAt)
	}
	late := p.Open() || p.Status == Expired || p.DecidedBy == "auto:timeout"
	switch {
	case p.Reason == bothAnswered:
		return "answered on the phone and at the keyboard in the same moment", ": the terminal shows which counted"
	case p.Status == Failed && p.Value == nil:
		return "not answered", before(": ", reason)
	case p.Status == Failed:
		fate := "not delivered: "
		switch {
		case p.ScreenSHA != "":
			fate = "typed: "
		case strings.HasSuffix(p.Reason, isUncertain):
			fate = "perhaps "
		}
		return fate + what, before(" · ", reason)
	case p.Status == Canceled:
		return cmp.Or(reason, "canceled"), more
	case p.expiredOpen():
		return "nobody answered", "; it still waits"
	case late && p.Value == nil:
		return "nobody answered", ""
	case p.onItsWay():
		more += " · on its way"
	case !late && reason != "":
		more += ": “" + reason + "”"
	}
	return what, more
}

// ---- the end of a turn ----
// One message a turn: what it came to, and the answer.

// turnText returns the message of a turn's end: whose it was, how it ended, how long it took, the tool's answer, how to
// go on or what followed. A reply still reaches the session when the notice has expired.
func (t *Telegram) turnText(p *PromptRecord, s *SessionRecord) *richText {
	came := string(p.Turn)
	switch {
	case p.Turn == TurnFailed:
		_, why, _ := strings.Cut(p.Question, " failed: ")
		came = "failed: " + oneLine(why)
	case p.Turn == "" || p.Turn == TurnReady:
		came = "waits for your next message"
	case p.Took > 0:
		came += " · " + span(time.Duration(p.Took)*time.Second)
	}
	r := &richText{}
	r.addLine("bold", title(s))
	r.add("", " "+came)
	if answer := markdown(abridge(p.Full, partUnits)); answer.text != "" {
		r.add("", "\n")
		r.text += answer.text
		r.looks = append(r.looks, answer.looks...)
	}
	switch {
	case p.Open(), p.Status == Expired:
		r.addLine("", "reply to go on · ")
	case p.Status == Failed:
		r.addLine("", "the session has ended · ")
	default:
		t.addOutcome(r, p)
	}
	r.add("", sid(s))
	return r
}

// ---- topics ----
// In a chat with topics each session that has run for some seconds has one, which ends with it. None is deleted: what
// the operator wrote there is his. If a topic fails, the message goes to the plain chat.

const topicAfter = 5 * time.Second // a session that lives so long gets a topic

// topicGone are the Bot API's words for a topic that cannot be written to.
var topicGone = []string{"message thread not found", "TOPIC_ID_INVALID", "TOPIC_DELETED", "TOPIC_CLOSED"}

// topicOf is the topic that messages about the session go to, 0: none.
func (t *Telegram) topicOf(s *SessionRecord) int64 {
	if s.ThreadChat != t.chat() {
		return 0
	}
	return max(0, s.ThreadID)
}

// dueTopic makes a topic for the session, where the chat has them, only once lest two be made, or ends that of an ended
// session; nil for neither. A group's topic is closed; in a private chat, where that cannot be, its name tells how the
// session ended.
func (t *Telegram) dueTopic(s *SessionRecord) *job {
	chat := t.chat()
	active := s.Status == "active"
	has, known := t.mailer.topics[chat]
	mark := "✗ "
	switch {
	case active:
		mark = ""
	case s.ExitCode != nil && *s.ExitCode == 0:
		mark = "✓ "
	}
	j := &job{key: "topic " + s.ID, rank: rankRest}
	j.params = map[string]any{"chat_id": chat, "message_thread_id": s.ThreadID,
		"name": mark + title(s) + " " + shortID(s.ID)}
	j.done = amends(t.store, s.key(), func(r *SessionRecord) {
		r.Topic = Topic{cmp.Or(s.ThreadID, j.result.ThreadID, noTopic), chat, !active}
	})
	switch {
	case active && s.ThreadID == 0 && !known:
		j.method = "getMe"
		if chat < 0 {
			j.method = "getChat"
		}
		j.at = s.StartedAt.Add(topicAfter)
		j.free = true
		j.done = func() error {
			t.mailer.topics[chat] = j.result.Topics || j.result.Forum
			return nil
		}
	case active && s.ThreadID == 0 && has:
		j.method = "createForumTopic"
		j.lost = j.done
	case active, s.ThreadEnded, t.topicOf(s) == 0:
		return nil
	case chat > 0:
		j.method = "editForumTopic"
	default:
		j.method = "closeForumTopic"
	}
	return j
}

// inTopic returns the session with that topic, nil: none.
func (v *View) inTopic(chat, thread int64) *SessionRecord {
	for _, s := range v.Sessions {
		if thread > 0 && s.ThreadID == thread && s.ThreadChat == chat {
			return s
		}
	}
	return nil
}

// ---- files from the phone ----
// A photo or a document is fetched by its session into a folder of that. Its name and its type are the sender's word.

// maxFile is what getFile gives out, in bytes: https://core.telegram.org/bots/api#getfile
const maxFile = 20 << 20

// fetch gets a file, and puts it into the session's folder.
func (t *Telegram) fetch(ctx context.Context, session string, file *FileRef) (path string, body []byte, err error) {
	var there struct {
		Path string `json:"file_path"`
	}
	if err := t.call(ctx, "getFile", map[string]string{"file_id": file.ID}, &there); err != nil {
		return "", nil, err
	}
	resp, body, err := t.exchange(ctx, "/file/bot", there.Path, nil)
	switch {
	case err != nil:
		return "", nil, t.noAnswer("getFile", err)
	case resp.StatusCode != http.StatusOK: // a redirection too
		return "", nil, errors.New(t.withoutToken(resp.Status))
	case len(body) > maxFile:
		return "", nil, errors.New("the file is too big: 20 MB are allowed")
	}
	name := file.Name
	if name == "" {
		name = there.Path
	}
	path, err = t.store.saveFile(session, name, body)
	return path, body, err
}

// ---- polling ----
// One process asks for updates, for all sessions. It confirms those it recorded; the rest arrive again.

const (
	pollTimeout   = 50                     // seconds; more are clamped (source of telegram-bot-api)
	tapLife       = 150 * time.Second      // an undelivered tap is forgotten then (same source)
	tapCrosses    = 10 * time.Second       // a tap so soon after an edit was made before that was seen
	reapEvery     = 5 * time.Second        // sessions that have died are looked for so often
	strangersMax  = 10                     // recorded in a minute: a flood must not fill the disk
	pollLeast     = 500 * time.Millisecond // between polls that bring nothing new, whatever the server does
	conflictPause = 5 * time.Second        // after another program's poll: two that take turns get half of it each
	conflictLife  = 2 * time.Minute        // without another one it is over
)

// update is what of the Bot API's Update counts here: a message, or a button pressed.
type update struct {
	ID       int64 `json:"update_id"`
	Message  *message
	Callback *callbackQuery `json:"callback_query"`
}

// callbackQuery is a tap on a button.
type callbackQuery struct {
	ID      string
	Data    string
	From    *user
	Message *message
}

// message is a message of the operator's, or the one with the button.
type message struct {
	ID       int64 `json:"message_id"`
	From     *user
	Chat     chat
	Date     int64 // Unix seconds by the server's clock
	Text     string
	ThreadID int64     `json:"message_thread_id"`
	InTopic  bool      `json:"is_topic_message"` // else ThreadID is no topic's
	Photo    []FileRef // in several sizes, the largest last
	Document *FileRef
	Caption  string         // of either
	ReplyTo  *message       `json:"reply_to_message"`
	Markup   inlineKeyboard `json:"reply_markup"` // of a message of ours
	abroad
	changed
	service
}

// there is a member of a message of which only the presence counts.
type there = *struct{}

// abroad has the members of a message that replies to something outside of its chat.
type abroad struct {
	ExternalReply there `json:"external_reply"` // to a message of another chat or topic
	Quote         there `json:"quote"`          // what it quotes of the message replied to
	ReplyToStory  there `json:"reply_to_story"`
}

// changed has the members of a message that is not its sender's own words, in his own name.
type changed struct {
	SenderChat    there `json:"sender_chat"` // a channel, or an anonymous administrator
	ForwardOrigin there `json:"forward_origin"`
	ForwardDate   int64 `json:"forward_date"` // the same, by a Bot API before 7.0
	ViaBot        there `json:"via_bot"`
	EditDate      int64 `json:"edit_date"`
}

// service has the members of a message that nobody wrote: something happened in the chat.
type service struct {
	TopicCreated  there `json:"forum_topic_created"`
	TopicEdited   there `json:"forum_topic_edited"`
	TopicClosed   there `json:"forum_topic_closed"`
	TopicReopened there `json:"forum_topic_reopened"`
	Pinned        there `json:"pinned_message"`
	AutoDelete    there `json:"message_auto_delete_timer_changed"`
}

// user is a person or a bot; the names are for display only: anyone can take them.
type user struct {
	ID       int64
	IsBot    bool   `json:"is_bot"`
	Name     string `json:"first_name"`
	Username string
}

// chat is where a message stands.
type chat struct {
	ID   int64
	Type string // private, group, supergroup or channel
}

// receiver is a Telegram while it polls. The fields after work belong to the goroutine that polls.
type receiver struct {
	*Telegram
	ctx       context.Context // ends with the polling
	work      sync.WaitGroup  // goroutines beside the polling; each ends soon after ctx
	failures  int             // of getUpdates in a row
	lastOK    time.Time       // of getUpdates, or when another process polled; by the wall clock, which never sleeps
	bot       string          // the number of the bot whose updates these are
	name      string          // its user name, by which a command for it is told from another bot's; "" not known yet
	minute    int64           // since 1970, in which is counted:
	strangers int             // updates of others
	clashedAt time.Time       // when another program's poll ended ours last
}

// who names a person in records.
func (u *user) who() string { return fmt.Sprint("telegram:", u.ID) }

// name is what a person is called, for display.
func (u *user) name() string { return safely(cmp.Or(u.Username, u.Name), 64) }

// admitted decides, for every kind of update and nowhere else, whether it counts: when a person on the allowlist, known
// by number alone, wrote it himself in the configured chat: that person's private one, or a group. The message of a tap
// is the bot's own.
func admitted(u *update, users []int64, chatID int64) (from *user, ok bool) {
	m := u.Message
	switch {
	case u.Callback != nil && m == nil: // no update has both
		from = u.Callback.From
		m = u.Callback.Message
		ok = m != nil
	case m != nil:
		from = m.From
		ok = u.Callback == nil && m.original()
	}
	if !ok || from == nil || from.IsBot {
		return from, false
	}
	own := m.Chat.Type == "private" && m.Chat.ID == from.ID
	group := strings.HasSuffix(m.Chat.Type, "group") && chatID < 0
	return from, slices.Contains(users, from.ID) && m.Chat.ID == chatID && (own || group)
}

// original reports whether its sender wrote the message as it is: in his own name, not forwarded, not changed.
func (m *message) original() bool { return m.changed == changed{} }

// Poll handles updates for all sessions while it has the poll lock. It tries for that each second, so another process
// takes over within 2 s. It ends with ctx, and so does all that it began. While it cannot poll it leaves the lock to
// others, such as setup.
func (t *Telegram) Poll(ctx context.Context) {
	r := &receiver{Telegram: t}
	for ctx.Err() == nil {
		held, err := t.store.TryPoll()
		pause := time.Second
		switch {
		case err != nil:
			t.noteTrouble("poll", fmt.Sprint("no answers arrive from the phone: ", err))
		case !held: // another process polls
			t.noteTrouble("poll", "")
			r.lastOK = time.Now().Round(0)
		default:
			pause = r.listen(ctx)
		}
		_ = sleep(ctx, pause) // the loop ends with it
	}
}

// listen polls, with what goes on beside that, until ctx ends, this process is no longer the poller, or lasting trouble
// stops it. It returns how long to wait then.
func (r *receiver) listen(ctx context.Context) time.Duration {
	ctx, stop := context.WithCancel(ctx)
	defer r.store.LeavePoll()
	defer r.work.Wait()
	defer stop()
	r.ctx = ctx
	r.bot = r.botID()
	r.name = ""
	r.beside(r.reap)
	r.beside(r.greet)
	params := &pollParams{Allowed: []string{"message", "callback_query"}, Timeout: 1}
	for {
		var err error
		if r.name == "" {
			var me user
			err = r.call(ctx, "getMe", struct{}{}, &me)
			r.name = me.Username
		}
		began := time.Now()
		offset := params.Offset
		var updates []json.RawMessage
		if err == nil {
			err = r.call(ctx, "getUpdates", params, &updates)
		}
		if ctx.Err() != nil || !r.store.Polls() {
			return 0
		}
		r.refresh(false)
		if r.botID() != r.bot { // they are another bot's
			return pollLeast
		}
		failed, ok := err.(*apiError)
		if !ok {
			r.failures = 0
			params.Timeout = pollTimeout
			r.handleUpdates(updates, params)
			if params.Offset == offset {
				_ = sleep(ctx, pollLeast-time.Since(began)) // the loop ends with it
			}
			continue
		}
		r.noteFailure("poll", failed, r.failures)
		pause := r.pause(failed, r.failures)
		if failed.Code == http.StatusConflict && !failed.mentions("webhook", "Webhook") {
			r.clashedAt = time.Now()
			pause = conflictPause
		}
		r.failures++
		if !failed.temporary() {
			return pause
		}
		params.Timeout = 1    // short: to know soon that all is well
		_ = sleep(ctx, pause) // the loop ends with it
	}
}

// reach tests that the bot may write to its chat: there it seems to be typing for some seconds.
func (t *Telegram) reach(ctx context.Context) error {
	return t.call(ctx, "sendChatAction", map[string]any{"chat_id": t.chat(), "action": "typing"}, nil)
}

// greet gives the chat its menu of commands. Whether the bot may write there shows before there is something to say.
func (r *receiver) greet() {
	failed, ok := r.reach(r.ctx).(*apiError)
	if ok {
		r.noteFailure("send", failed, 0)
	} else {
		r.works("send")
	}
	var menu []map[string]string
	for _, line := range reHelp.expr().FindAllStringSubmatch(helpText, -1) {
		menu = append(menu, map[string]string{"command": line[1], "description": line[2]})
	}
	scope := map[string]any{"type": "chat", "chat_id": r.chat()}
	r.warn(r.call(r.ctx, "setMyCommands", map[string]any{"commands": menu, "scope": scope}, nil))
}

// handleUpdates handles updates in their order. The next poll confirms those that are done. Where one cannot be
// recorded, it comes again with all behind it.
func (r *receiver) handleUpdates(updates []json.RawMessage, params *pollParams) {
	for _, raw := range updates {
		id, err := r.dispatch(raw)
		if err != nil {
			r.noteTrouble("poll", "answers cannot be recorded, so they are not acted on: "+err.Error())
			_ = sleep(r.ctx, time.Second) // the caller notices that ctx has ended
			return
		}
		if id != 0 { // else only a later one can confirm it
			params.Offset = id + 1 // not the maximum: ids restart at random after a week (source of telegram-bot-api)
		}
	}
	if time.Since(r.clashedAt) > conflictLife {
		r.works("poll")
	}
	r.resendAfterOutage()
}

// resendAfterOutage sends waiting questions again after an outage in which Telegram may have dropped a tap. While the
// state cannot be read, the outage is not over.
func (r *receiver) resendAfterOutage() {
	now := time.Now().Round(0)
	if now.Sub(r.lastOK) > tapLife {
		err := r.store.Update(func(v *View) (recs []Record, _ error) {
			for _, p := range v.Prompts {
				if p.Status == AwaitingReply && len(p.Messages) > 0 && !p.Idle && now.Sub(p.At) > tapLife {
					again := *p
					again.Send = sendQuestion
					recs = append(recs, &again)
				}
			}
			return recs, nil
		})
		if err != nil {
			r.warn(err)
			return
		}
	}
	r.lastOK = now
}

// reap finds sessions that have died: Show takes over their messages. It ends with the polling.
func (r *receiver) reap() {
	for r.ctx.Err() == nil {
		pause := reapEvery
		if err := r.store.Reap(); err != nil {
			r.warn(err)
			pause = refusedPause
		}
		_ = sleep(r.ctx, pause) // the loop ends with it
	}
}

// beside does something beside the polling, which must end soon after ctx.
func (r *receiver) beside(do func()) {
	r.work.Go(func() {
		defer r.store.catchPanic()
		do()
	})
}

// tell reports the outcome of an update: of a message in replies, in order; of a tap at once and only once, in a box
// that must be closed if nothing was done. It does so even if this process waited for nothing else.
func (r *receiver) tell(u *update, reply string) {
	if m := u.Message; m != nil {
		r.Notify(Notice{Text: reply, ReplyTo: m.ID, ThreadID: m.topic()})
		return
	}
	text, refused := strings.CutPrefix(reply, "✗ ")
	params := map[string]any{
		"callback_query_id": u.Callback.ID,
		"text":              clean(text, 200), // https://core.telegram.org/bots/api#answercallbackquery
		"show_alert":        refused,
	}
	r.beside(func() {
		ctx, cancel := lingering(r.ctx)
		defer cancel()
		r.warn(r.call(ctx, "answerCallbackQuery", params, nil))
	})
}

// ---- what an update means ----
// From here on every update is one of the operator's, and is acted on once: what it means is understood without
// touching anything, recorded together with its number, and then told.

// incoming is an update of the operator's together with all that decides what it means.
type incoming struct {
	*message                // that he wrote, or the one with the button that he tapped
	from     *user          // the operator
	tap      *callbackQuery // nil: he wrote
	update   string         // the update's number, as UpdateRecord has it
	at       time.Time      // the end of the second it was written in, by our clock; of a tap, when it came
	view     *View
	here     string // whose numbers messages have
	bot      string // the bot's name
	freeText bool   // questions for text take text
}

// intent is what an update asks for: one thing to be done, and what to say of it.
type intent struct {
	question *PromptRecord // that is answered, as it is then; nil: none, without an ID: one that is not known
	value    string        // the answer, as Decide takes it
	refused  string        // why it is none, "" that is for the state to say
	record   Record        // what changes without an answer, or the session that text goes to from now on
	reply    string        // begins with ✗ where nothing is done
}

// dispatch handles one update and returns its number, 0 without one. After an error nothing was done, and the update
// must be fetched again. An update of a stranger, or of an undocumented shape, counts as handled; if that was the
// operator's, he is told.
func (r *receiver) dispatch(raw json.RawMessage) (int64, error) {
	var u update
	bad := json.Unmarshal(raw, &u) // the other members stay
	cfg := r.cfg.Load()
	from, ok := admitted(&u, cfg.Users, cfg.ChatID)
	var err error
	switch {
	case bad != nil:
		if ok {
			r.tell(&u, "✗ Nothing was done: this kind of message is not known here. Look for a newer atlasbridge.")
		}
		r.warn(fmt.Errorf("update %d is not acted on: %w", u.ID, bad))
	case !ok:
		r.auditStranger(&u, from)
	default:
		err = r.act(&u, from)
	}
	if err != nil && u.Callback != nil {
		r.tell(&u, "✗ The tap could not be recorded, so nothing was done yet; it is tried again.")
	}
	return u.ID, err
}

// auditStranger records the first messages and taps of strangers in each minute; from may be nil.
func (r *receiver) auditStranger(u *update, from *user) {
	minute := time.Now().Unix() / 60
	if minute != r.minute {
		r.minute = minute
		r.strangers = 0
	}
	r.strangers++
	if r.strangers <= strangersMax && from != nil {
		fields := append([]Field{{"update_id", u.ID}}, person(from.who(), from.name())...)
		r.warn(r.store.Audit(Event{Name: "UNAUTHORIZED", Fields: fields}))
	}
}

// act does what an update of the operator asks for, and notes that it was acted on, in one write. Then it says what
// came of it. After an error nothing was done.
func (r *receiver) act(u *update, from *user) error {
	in := &incoming{message: u.Message, from: from, tap: u.Callback, update: fmt.Sprintf("%s:%d", r.bot, u.ID),
		at: time.Now(), here: r.here(), bot: r.name, freeText: r.cfg.Load().FreeText}
	if in.tap != nil {
		in.message = in.tap.Message
	} else {
		in.at = time.Unix(in.Date, 0).Add(time.Second)
		if skew := time.Duration(r.skew.Load()); skew.Abs() > 3*time.Second { // less may be rounding and the network
			in.at = in.at.Add(-skew)
		}
		r.warn(r.store.Reap()) // who has died is not meant
	}
	var want intent
	err := r.store.Update(func(v *View) (records []Record, _ error) {
		if v.acted(in.update) { // it came again
			return nil, nil
		}
		in.view = v
		want = in.understand()
		if want.question != nil && want.refused == "" {
			want.refused = r.store.Decide(v, want.question, want.value, from.who(), from.name())
			if want.refused == "" {
				want.record = want.question
			}
		}
		if want.record != nil {
			records = append(records, want.record)
		}
		return append(records, &UpdateRecord{Head{ID: in.update}}), nil
	})
	p := want.question
	switch {
	case err != nil || in.view == nil:
		return err
	case want.refused != "":
		want.reply = "✗ Nothing was done: " + explain(want.refused, p)
		fields := append([]Field{{"reason", want.refused}}, person(from.who(), from.name())...)
		r.warn(r.store.Audit(Event{"REPLY_REJECTED", p.SessionID, p.ID, fields}))
	case p != nil && in.tap != nil:
		want.reply = "✓ " + valueName(p, want.value)
	}
	r.tell(u, want.reply)
	return nil
}

// ---- callback queries ----
// A button was pressed.

// tapped is what a button asks for: an answer to its question, or what the button itself is for.
func (in *incoming) tapped() intent {
	p, value := in.view.buttonOf(in.tap.Data)
	if p == nil || cmp.Or(in.questionOf(in.message), p) != p {
		return intent{question: new(PromptRecord), refused: "this question is not known here. It belongs to another " +
			"machine or state folder with the same bot, or is long over: answer at its terminal"}
	}
	value, submits := strings.CutPrefix(value, tapSubmit)
	switch value {
	case tapEnter:
		value = enterAlone
	case tapLeave:
		value = leaveIt
	}
	q := ref(*p)
	want := intent{question: q, value: value}
	crossed := in.ID == p.newest().ID && (p.Open() || time.Since(p.At) < tapCrosses)
	if !crossed { // the message has buttons of which the state knows nothing: its sending was never answered
		m := q.message(in.ID)
		m.Date = in.Date
		m.Shows = string(AwaitingReply)
		want.record = q
	}
	switch {
	case in.ID < p.newest().ID && (p.Open() || value == tapAgain): // a newer message is only not recorded yet
		want.refused = "this message is out of date, use the newest one of its question"
	case submits && p.Open() && value != strings.Join(p.Ticked, ","): // tapped before the message showed them
		want.refused = "what is ticked has changed since: look at it, then tap Submit again"
	case value == tapAgain && in.view.active(p.SessionID) && p.Status == Expired: // what stands there is asked anew
		return intent{record: in.input(in.view.Sessions[p.SessionID], "again", ""), reply: "✓ asking again"}
	case strings.HasPrefix(value, "~") && p.Open():
		if !q.tick(value) {
			q.Send = value[1:]
		}
		return intent{record: q}
	}
	return want
}

// tick ticks or unticks what a button says, one choice alone: others may have been tapped since it was shown. False: it
// is no such button.
func (p *PromptRecord) tick(value string) bool {
	key, on := strings.CutPrefix(value, tapTick)
	key, off := strings.CutPrefix(key, tapUntick)
	var ticked []string
	for _, c := range p.Choices {
		if c.Key == key && on || c.Key != key && slices.Contains(p.Ticked, c.Key) {
			ticked = append(ticked, c.Key)
		}
	}
	if on || off {
		p.Ticked = ticked
	}
	return on || off
}

// ---- messages and commands ----
// What the operator writes: an answer, text for a session, or a command.

// reCommand is a command for us: a word behind a slash. A path is text; what begins with // is a command of the tool's.
var reCommand = re(`(?i)^/([a-z][\w:.-]*)(@\w+)?(\s|$)`)

// reOwnCommand is how the operator writes a command of the tool's own.
var reOwnCommand = re(`^//\w`)

// helpText says what can be done here, in lines that a phone need not break: what is used most comes first.
const helpText = `Questions arrive here: tap an answer
or reply with text.

Other text goes to the session that
it replies to, or to the only one.
//word is the tool's own /word.

/sessions  what runs
/screen  show the screen
/stop  interrupt the turn
/keys  press keys
/send  text to one session
/switch  all my text to one session
/release  undo /switch
/cancel  end the program
/help  this list

With several sessions, name one:
/stop 1a2b3c4d`

// reHelp is the line of a command in helpText.
var reHelp = re(`(?m)^/([a-z]+)  (.+)$`)

// understand is what the update asks for. Text that came damaged or too long counts as none.
func (in *incoming) understand() intent {
	switch {
	case in.tap != nil:
		return in.tapped()
	case in.service != service{}:
		return intent{}
	}
	file := in.Document
	if len(in.Photo) > 0 {
		file = &in.Photo[len(in.Photo)-1] // as large as there is
	}
	text := in.Text
	if file != nil {
		text = in.Caption
	}
	if len(text) > maxMessage || strings.Contains(text, "\uFFFD") {
		text = ""
	}
	text = strings.TrimSpace(cleanText(text))
	command := reCommand.FindStringSubmatch(text)
	switch {
	case command == nil || file != nil:
	case command[2] != "" && !strings.EqualFold(command[2], "@"+in.bot):
		return intent{} // a group's administrator gets all of them
	default:
		return in.command(strings.ToLower(command[1]), strings.TrimSpace(text[len(command[0]):]))
	}
	s, p, refused := in.target("", "")
	switch {
	case s == nil:
		return refused
	case file != nil:
		record := in.input(s, "file", text)
		record.File = file
		return intent{record: record}
	case text == "":
		return intent{reply: "✗ Nothing was done: send it as plain text of up to 4095 bytes, as a photo or as a document."}
	}
	return in.answerOrInput(s, p, text)
}

// command returns what a command asks for. One about a session may begin with the session's name.
func (in *incoming) command(name, line string) intent {
	switch name { // people know them by other names, too
	case "claim":
		name = "switch"
	case "start":
		name = "help"
	}
	switch {
	case !strings.Contains(helpText, "\n/"+name+"  "):
		return intent{reply: "✗ There is no /" + name + " here; /help has the commands. //" + name + " sends /" + name +
			" to the tool."}
	case name == "help":
		return intent{reply: helpText}
	case name == "sessions":
		return intent{reply: in.list()}
	case name == "release":
		return in.claim(nil)
	}
	word, rest, _ := strings.Cut(line, " ")
	if name == "keys" && len(in.view.named(word)) == 0 {
		word = ""
		rest = line
	}
	s, p, refused := in.target(name, word)
	if s == nil {
		return refused
	}
	text := strings.TrimSpace(rest)
	switch {
	case name == "switch":
		return in.claim(s)
	case name == "keys" && !areKeys(strings.Fields(rest)):
		return intent{reply: "✗ Press what? Example: /keys ESC UP. Keys: CTRL_A … CTRL_Z ENTER ESC TAB " +
			"SHIFT_TAB Y N 1 2 3 SPACE BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
	case name != "send":
		record := in.input(s, name, rest)
		if p != nil && !p.Idle {
			record.PromptID = p.ID
		}
		return intent{record: record}
	case text == "":
		return intent{reply: "✗ Send what? Example: /send " + shortID(s.ID) + " go on"}
	case reCommand.MatchString(text): // it is the tool's own
		text = "/" + text
	}
	return in.answerOrInput(s, nil, text)
}

// areKeys reports whether the words are names of keys, one at least.
func areKeys(words []string) bool {
	unknown := func(word string) bool { return keyBytes(word, false) == "" }
	return len(words) > 0 && !slices.ContainsFunc(words, unknown)
}

// claim sends text that is no reply to this session from now on; nil: to the only one.
func (in *incoming) claim(to *SessionRecord) intent {
	id := ""
	reply := "✓ Your text goes to the only session, or to what it replies to."
	if to != nil {
		id = to.ID
		reply = "✓ Your text goes to " + origin(to)
	}
	return intent{reply: reply, record: &MetaRecord{Head: Head{ID: in.claimed()}, Value: id}}
}

// claimed names the fact that tells the session the operator's text goes to.
func (in *incoming) claimed() string { return "claim " + in.from.who() }

// input is something for a session to do.
func (in *incoming) input(s *SessionRecord, kind, text string) *InputRecord {
	return &InputRecord{Head: Head{ID: in.update}, SessionID: s.ID, Kind: kind, By: in.from.who(), User: in.from.name(),
		Text: text, ReplyTo: in.ID, ThreadID: in.topic(), WrittenAt: in.at, Status: "queued"}
}

// named are the live sessions that a word names, by the beginning of the id or by the label, in alphabetical order; ""
// names all. Those that ask nobody by phone are none of them: nothing could be said of what came of it.
func (v *View) named(word string) (live []*SessionRecord) {
	for _, s := range v.Sessions {
		named := word == "" || s.Label == word || isShort(strings.ToLower(word), s.ID)
		if s.Status == "active" && !s.Local && named {
			live = append(live, s)
		}
	}
	slices.SortFunc(live, func(a, b *SessionRecord) int { return cmp.Compare(origin(a), origin(b)) })
	return live
}

// target finds the live session meant, by the first of: the word in a command; the message replied to, by its question
// (p, too) or by the session that it names; the topic it was written in; where it replies to nothing, the claim, unless
// that session had ended when the message was written, or being the only one. Else it refuses: it never guesses. No
// refusal: people talking in a group, for text is of no command.
func (in *incoming) target(command, word string) (s *SessionRecord, p *PromptRecord, refused intent) {
	to := in.repliedTo()
	mustBeNamed := command == "cancel" || command == "switch" // by the word, or by what it replies to or stands in
	var mark []string
	if in.repliesToBot() && strings.HasPrefix(in.here, fmt.Sprintf("%d/", to.From.ID)) { // a group may have others
		mark = sessionMark.FindStringSubmatch(to.Text)
	}
	topic := in.view.inTopic(in.Chat.ID, in.topic())
	claimed := in.view.Sessions[in.view.fact(in.claimed()).Value]
	p = in.questionOf(to)
	name := word
	switch {
	case word != "":
	case p != nil:
		name = p.SessionID
	case mark != nil:
		name = mark[1]
	case topic != nil:
		name = topic.ID
	case to != nil, mustBeNamed, claimed == nil:
	case claimed.EndedAt == nil || claimed.EndedAt.After(in.at):
		name = claimed.ID
	}
	private := in.Chat.ID > 0
	elsewhere := in.ReplyTo == nil && in.abroad != abroad{} // such as to a story
	live := in.view.named(name)
	if word == "" && elsewhere || name == "" && (to != nil || mustBeNamed || !private) { // the only one is not meant
		live = nil
	}
	switch {
	case len(live) == 1 && in.at.Before(live[0].StartedAt) && time.Until(live[0].StartedAt) < textCrosses:
		refused.reply = "✗ Nothing was sent: you wrote that before " + origin(live[0]) + " began."
	case len(live) == 1:
		return live[0], p, intent{}
	case name != "", private, command != "":
		refused.reply = "✗ Which session? Reply to one of its messages, or write /" + cmp.Or(command, "send") +
			" 1a2b3c4d. " + in.list()
	}
	return nil, nil, refused
}

// questionOf returns the question that a message of ours shows, nil: none. If Telegram's answer is late or lost, and so
// no number recorded, the buttons tell it.
func (in *incoming) questionOf(m *message) *PromptRecord {
	if m == nil || m.ID == 0 {
		return nil
	}
	for _, p := range in.view.Prompts {
		if !p.elsewhere(in.here) && slices.ContainsFunc(p.Messages, func(own Message) bool { return own.ID == m.ID }) {
			return p
		}
	}
	for _, b := range slices.Concat(m.Markup.Rows...) {
		p, _ := in.view.buttonOf(b.Data)
		if p != nil {
			return p
		}
	}
	return nil
}

// topic is the topic that the message is in, 0: none.
func (m *message) topic() int64 {
	if !m.InTopic {
		return 0
	}
	return m.ThreadID
}

// repliedTo is the message that it replies to, nil: none. In a topic what replies to nothing replies to the message
// that opened the topic, whose number is the topic's.
func (m *message) repliedTo() *message {
	if m.ReplyTo != nil && m.ReplyTo.ID == m.topic() {
		return nil
	}
	return m.ReplyTo
}

// repliesToBot reports whether it replies to a bot's message.
func (m *message) repliesToBot() bool {
	to := m.repliedTo()
	return to != nil && to.From != nil && to.From.IsBot
}

// answerOrInput gives text to a session: as the answer to its open question, or as free input. p is the question
// replied to; then text that is no choice refuses a permission.
func (in *incoming) answerOrInput(s *SessionRecord, p *PromptRecord, text string) intent {
	replied := p != nil
	if !replied {
		p = in.waitingQuestion(s)
		secret := p != nil && p.Secret
		if !secret && in.doubtful(s, p, text) {
			return intent{reply: "✗ Nothing was done: it is not clear which question you mean. " +
				"Reply to the question's own message, or send it again."}
		}
	}
	if p == nil || p.Idle {
		return intent{record: in.input(s, "text", text)}
	}
	if reOwnCommand.MatchString(text) {
		text = text[1:]
	}
	value := p.named(text)
	if refusal := in.refusal(p, value, replied); refusal != "" {
		return intent{reply: refusal}
	}
	if value == "" && p.Permission {
		text = "deny:" + text
	}
	return intent{question: ref(*p), value: text}
}

// For text that replies to nothing.
const (
	textAfter   = 2               // seconds, by Telegram's clock, that its question must have been there
	textCrosses = 5 * time.Second // that what is over may be meant: the same, where the clocks are 3 s apart
)

// doubtful reports whether a text that replies to nothing may not be meant for p, the question that waits in the
// session (nil: none), because p had only just been sent, or another had just ended, or expired and still stands. Of
// other sessions only ended ones count: text for a live one names it. Another question that this user answered counts
// only if p waits, or the text answers it.
func (in *incoming) doubtful(s *SessionRecord, p *PromptRecord, text string) bool {
	waits := p != nil && !p.Idle
	if waits && (p.newest().Date == 0 || in.Date < p.newest().Date+textAfter) {
		return true
	}
	for _, other := range in.view.Prompts {
		here := other.SessionID == s.ID || !in.view.active(other.SessionID)
		asked := !other.Idle && other.Chat != ""
		own := !waits && other.DecidedBy == in.from.who() &&
			!other.takesText() && other.named(text) == ""
		if other == p || !here || !asked || own {
			continue
		}
		over := other.At
		if other.DecidedAt != nil && other.Status != Failed { // that was noted after its answer could not be typed
			over = *other.DecidedAt
		}
		recent := over.After(in.at.Add(-textCrosses)) && time.Until(over) < textCrosses // else the clock was ahead then
		if other.Open() || other.mayBeAsked() || recent {
			return true
		}
	}
	return false
}

// waitingQuestion returns the session's question in this chat that waits for an answer, nil: none, even if its message
// is not recorded yet.
func (in *incoming) waitingQuestion(s *SessionRecord) (found *PromptRecord) {
	for _, p := range in.view.Prompts {
		waits := p.Status == AwaitingReply // there is one at most
		seen := p.SessionID == s.ID && !p.elsewhere(in.here)
		if seen && (waits || p.Status == Routed && p.Chat != "" && found == nil) {
			found = p
		}
	}
	return found
}

// typedHere is said of a message that may have a password in it.
const typedHere = "a password is typed at the keyboard. If your message has a password in it, delete it."

// refusal returns why text cannot answer the question, "" where it can. keys are the answers that it names; replied: it
// is a reply to the question's own message.
func (in *incoming) refusal(p *PromptRecord, keys string, replied bool) string {
	switch {
	case p.Secret:
		return "✗ Nothing was typed: " + typedHere
	case !replied && in.repliesToBot(): // it may be about another question
		return "✗ Nothing was done: you replied to another message. Reply to the open question's own."
	case keys != "", p.takesReply() && replied:
		return ""
	case p.takesKeys(), p.takesReply() && !in.freeText:
		return "✗ Nothing was typed: that may be no question. Reply to its own message to type there."
	case p.Type == FreeText && !in.freeText:
		return "✗ Nothing was typed: answering with text is off (free_text_enabled)."
	case p.Permission && !replied:
		return "✗ Nothing was done: a permission is asked for. Tap a button, or reply to it to refuse."
	}
	return ""
}

// list names what runs.
func (in *incoming) list() string {
	list := "Running:"
	for _, s := range in.view.named("") {
		list += "\n• " + origin(s) + " " + strings.ReplaceAll(s.Activity, "_", " ")
	}
	if list == "Running:" {
		list += " nothing"
	}
	return list
}

// ---- setup ----
// `atlasbridge setup` is one conversation: the token, who the operator is, a test message, config.toml. It asks only
// for settings that Telegram refuses. Settings from the environment are used, and never stored.

// setup is one run of the command.
type setup struct {
	*command
	bot *Telegram
	cfg *Config // the bot's, filled in as the conversation goes on
}

// cmdSetup keeps what is typed meanwhile off the screen and from the shell: it may be the token.
func cmdSetup(c *command) int {
	ctx, quit := context.WithCancelCause(c.ctx)
	defer quit(nil)
	catchSignals(quit, nil)
	c.ctx = ctx
	show, err := muteEcho(c.stdin)
	if err == nil {
		defer func() { _ = errors.Join(dropTyped(c.stdin), show()) }() // a terminal that has gone shows nothing
	}
	s := &setup{command: c}
	err = s.converse()
	end, ended := errors.AsType[*ending](context.Cause(ctx))
	switch {
	case err == nil:
		return 0
	case !ended:
		return c.fail(err)
	}
	fmt.Fprintln(c.stderr, "\natlasbridge: setup was ended; config.toml is as it was")
	return 128 + int(end.sig)
}

// converse takes one step after the other. The file is written last, so that an error leaves it as it was.
func (s *setup) converse() error {
	if err := s.configure(); err != nil {
		return err
	}
	name, err := s.connect()
	if err != nil {
		return err
	}
	if err := s.pair(name); err != nil {
		return err
	}
	path := filepath.Join(s.cfg.Dir, "config.toml")
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := s.withBot(string(old))
	if text != string(old) {
		if err := replacePrivate(path, []byte(text)); err != nil { // a session that runs reads it anew
			return err
		}
	}
	s.bot.works("poll")
	s.bot.works("send")
	s.say("It works. Now: atlasbridge run claude")
	return nil
}

// configure opens the state, and reads the file, the environment and the flags. A wrong setting in the file that setup
// can find anew is ignored.
func (s *setup) configure() error {
	st, err := s.openState()
	if err != nil {
		return err
	}
	flags := map[string]string{
		"channel": "local", // so that nothing need be complete yet
		tokenKey:  "",
		chatKey:   s.flags["chat-id"],
		usersKey:  s.flags["user-id"],
		baseKey:   s.flags["api-base"],
	}
	if file := s.flags["token-file"]; file != "" {
		token, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		flags[tokenKey] = string(token)
	}
	s.cfg, err = s.config(flags)
	s.bot = newTelegram(s.cfg, st, nil)
	return err
}

// given reports whether a setting comes from a flag or the environment: setup cannot replace it.
func (s *setup) given(key string) bool {
	origin := s.cfg.row(key).Origin
	return origin == "flag" || strings.HasPrefix(origin, "environment ")
}

// reject reports why settings must be found anew. It returns an error if one of them is given, or the trouble may soon
// be over.
func (s *setup) reject(failed *apiError, keys ...string) error {
	problem := explained(failed)
	if failed.temporary() {
		return problem
	}
	for _, key := range keys {
		if s.given(key) {
			return hintedf("press Start in the bot's chat or correct the setting, then run atlasbridge setup again",
				"%s: %s", s.cfg.row(key).Origin, problem)
		}
	}
	s.say("%v", problem)
	return nil
}

// connect returns the name of the bot whose token Telegram takes: the one that is configured, else one that is typed.
func (s *setup) connect() (bot string, err error) {
	for {
		if s.cfg.Token != "" {
			var me user
			failed, ok := s.bot.call(s.ctx, "getMe", struct{}{}, &me).(*apiError)
			if !ok {
				s.say("Bot: @%s", me.Username)
				return me.Username, nil
			}
			if err := s.reject(failed, tokenKey); err != nil {
				return "", err
			}
		}
		if !onTerminal(s.stdin) {
			return "", errors.New("no bot token: use --token-file FILE (/dev/stdin will do) or TELEGRAM_BOT_TOKEN")
		}
		s.say("In Telegram, @BotFather makes a bot (/newbot) or shows its token (/mybots).")
		token, err := s.ask("Paste the token here (it is not shown): ")
		if err != nil {
			return "", err
		}
		s.cfg.Token = ""
		row := s.cfg.row(tokenKey)
		row.Value = quoted(token)
		if row.assign(s.cfg) != nil {
			s.say("That is not a token. One looks like\n123456789:AAExample-of_35_letters")
		}
	}
}

// pair finds a chat that the bot reaches, and users who can answer there: those that are configured, else those of the
// person who sends the code.
func (s *setup) pair(bot string) error {
	c := s.cfg
	if len(c.Users) == 0 && c.ChatID > 0 { // a private chat has the number of its user
		c.Users = []int64{c.ChatID}
	}
	if len(c.Users) > 0 && c.ChatID >= 0 && !slices.Contains(c.Users, c.ChatID) {
		if s.given(chatKey) {
			return fmt.Errorf("chat %d is the private chat of none of the users %v", c.ChatID, c.Users)
		}
		c.ChatID = c.Users[0]
	}
	for {
		if c.ChatID != 0 && len(c.Users) > 0 {
			err := s.bot.reach(s.ctx)
			if err == nil && !s.on("no-test") {
				err = s.bot.call(s.ctx, "sendMessage", map[string]any{"chat_id": c.ChatID,
					"text": "✅ AtlasBridge is connected: questions arrive here."}, nil)
			}
			failed, ok := err.(*apiError)
			if !ok {
				s.say("Chat %d, allowed users %v", c.ChatID, c.Users)
				return nil
			}
			if err := s.reject(failed, chatKey, usersKey); err != nil {
				return err
			}
		}
		if err := s.meet(bot); err != nil {
			return err
		}
	}
}

// meet learns who the operator is, and where: from a message with a code that only this terminal shows, and from a yes
// at the terminal. No session polls meanwhile. Nothing that was typed before is a yes.
func (s *setup) meet(bot string) error {
	if !onTerminal(s.stdin) {
		return hintedf("give --user-id ID; or run atlasbridge setup in a terminal",
			"without a terminal nobody can be asked who may answer")
	}
	held, err := s.bot.store.TryPoll()
	if err != nil {
		return err
	}
	if !held {
		listener := s.bot.store.holder("poll.lock")
		return hintedf("end it, then run atlasbridge setup again",
			"process %d listens to the bot: a session, or another setup", listener)
	}
	defer s.bot.store.LeavePoll()
	code := newNonce()[:8] // short, for it may be typed by hand
	s.say("Open https://t.me/%s?start=%s\nand tap Start.", bot, code)
	s.say("Or send the bot this code:  %s\n(in a group: /start %[1]s)", code)
	m, err := s.awaitCode(code)
	if err != nil {
		return err
	}
	if err := dropTyped(s.stdin); err != nil {
		return err
	}
	s.say("This account could then type into your terminal.")
	answer, err := s.ask("Is that you? [y/N] ")
	yes := strings.EqualFold(answer, "y") || strings.EqualFold(answer, "yes")
	if err == nil && !yes {
		err = hintedf("run atlasbridge setup again: it makes a new code", "nobody was trusted")
	}
	if !s.given(chatKey) { // else that is where to ask, and the code only tells who answers
		s.cfg.ChatID = m.Chat.ID
	}
	if !slices.Contains(s.cfg.Users, m.From.ID) { // else it is only the chat that did not do
		s.cfg.Users = []int64{m.From.ID}
	}
	return err
}

// awaitCode waits for a person's message with the code, shows who writes meanwhile, and confirms all of that.
func (s *setup) awaitCode(code string) (*message, error) {
	ctx, stop := context.WithTimeout(s.ctx, 10*time.Minute)
	defer stop()
	params := &pollParams{Allowed: []string{"message", "callback_query"}, Timeout: 10}
	for ctx.Err() == nil {
		var updates []update
		failed, ok := s.bot.call(ctx, "getUpdates", params, &updates).(*apiError)
		if ok {
			if !failed.temporary() {
				return nil, explained(failed)
			}
			_ = sleep(ctx, s.bot.pause(failed, 0)) // the loop ends with it
		}
		for _, u := range updates {
			params.Offset = u.ID + 1
			m := u.Message
			if m == nil || m.From == nil || m.From.IsBot || !m.original() {
				continue
			}
			s.say("%s, user %d, %s chat %d", m.From.name(), m.From.ID, m.Chat.Type, m.Chat.ID)
			if slices.Contains(strings.Fields(strings.ToLower(m.Text)), code) { // of the link: "/start CODE"
				_ = s.bot.call(ctx, "getUpdates", &pollParams{Offset: params.Offset}, nil) // else it comes again, too old to act
				return m, nil
			}
			s.say("That was not the code.")
		}
	}
	return nil, hintedf("run atlasbridge setup again: it makes a new code", "no code arrived within 10 minutes")
}

// say prints a line.
func (s *setup) say(format string, args ...any) {
	fmt.Fprintf(s, format+"\n", args...)
}

// ask returns the line that is typed next, without blanks around it.
func (s *setup) ask(question string) (string, error) {
	fmt.Fprint(s.stdout, question)
	typed := make(chan string, 1)
	go func() { // ends with the process, where nothing is typed any more
		line, _ := bufio.NewReader(s.stdin).ReadString('\n') // "" at the end of the input
		typed <- line
	}()
	select {
	case line := <-typed:
		s.say("")
		if line == "" {
			return "", hintedf("run atlasbridge setup again", "nothing was typed")
		}
		return strings.TrimSpace(line), nil
	case <-s.ctx.Done():
		return "", context.Cause(s.ctx)
	}
}

// withBot returns config.toml's text with the bot's settings as they are now, first in their table, without those of
// the environment. All else stays.
func (s *setup) withBot(text string) string {
	c := s.cfg
	lines := ""
	text = strings.TrimRight(text, "\n") + "\n"
	set := func(key string, value any) {
		origin := c.row(key).Origin
		if strings.HasPrefix(origin, "environment ") || origin == "default" && key == baseKey {
			return
		}
		name := strings.TrimPrefix(key, "telegram.")
		old := regexp.MustCompile(`(?m)^[ \t]*` + name + `[ \t]*=[ \t]*` + tomlValue + `.*\n`)
		text = old.ReplaceAllString(text, "")
		lines += name + " = " + inJSON(value) + "\n"
	}
	set(tokenKey, c.Token)
	set(chatKey, c.ChatID)
	set(usersKey, c.Users)
	set(baseKey, c.APIBase)
	table := regexp.MustCompile(`(?m)^[ \t]*\[[ \t]*telegram[ \t]*\].*\n`) // the only one with these keys
	if lines != "" && !table.MatchString(text) {
		text += "\n[telegram]\n"
	}
	text = table.ReplaceAllStringFunc(text, func(head string) string { return head + lines })
	return strings.TrimLeft(text, "\n")
}
