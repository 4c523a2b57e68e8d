// telegram.go is the one file that reaches the network. Out: Ask, Settle and Notify, for this process's own session.
// In: Poll, in the process that holds the poll lock, for all sessions: an answer becomes a Decision, anything else an
// InputRecord. Text is sent with entities, never with a parse_mode: what a program printed cannot become markup. A
// reply is routed by its question's number or buttons, or by the [SID:…] that ends our messages, other text by its
// topic. The token never leaves this file: no error carries a URL.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// ---- the channel ----
// What the rest of the program knows of Telegram.

// Channel carries questions to the operator, and outcomes. Its methods block, are paced, and retry until ctx ends.
type Channel interface {
	// Ask sends a question and returns its message's id, 0 without one.
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (msg int64, err error)
	// Settle has a question's message say what the record says.
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error
	// Notify returns the id of the last message that it needed.
	Notify(ctx context.Context, n Notice) (msg int64, err error)
	Close() error
}

// Notice is a message that asks nothing: which session it is about, Text on the same line, then Mono in monospace.
type Notice struct {
	Text      string
	Mono      string
	Lang      string // what Mono is written in, "" unknown
	SessionID string
	ReplyTo   int64 // the message that it replies to, 0: none
	ThreadID  int64 // with ReplyTo: the topic that one is in, 0: none
	Done      bool  // nothing is said: the message ReplyTo is marked as done
	Edit      int64 // with Late: the message to change instead of sending one, 0: none
	Ring      bool  // with sound, silent otherwise
	Urgent    bool  // before streams, as what rings or replies goes
	Ours      bool  // all of Text is ours: a tap on a command in it may send it
	First     bool  // worth saying only as the first message about the session
	Last      bool  // the session has ended, and its topic does with it

	// Late, where it is set, gives Mono and Edit when the message's turn has come, no Mono: nothing is to be said.
	Late func() Notice
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
	skew     atomic.Int64 // Telegram's clock minus ours, a time.Duration
	polling  atomic.Bool  // this process holds the poll lock
	troubles sync.Map     // by "send" and "poll": what keeps it from working, "" nothing; by "told": what did for long
	tell     func(string) // says that to the person at the terminal, where it is still possible; or nil
	hasty    bool         // a question that is refused is not tried again

	fresh atomic.Pointer[chan struct{}] // closed when other settings count

	messagesMu sync.Mutex
	messages   map[string]*questionMessages // by prompt, while its messages are edited or may be by a lost edit

	paying chan struct{} // full while debts are paid

	streamChat string // whose number the message has that the stream edits; owned by notifyLate

	topicMu    turn // held while a topic is made, and while the state is read for that
	topicTried bool // one was made, or may have been: this process makes no other
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
		store:    st,
		log:      log,
		http:     &http.Client{Transport: tr},
		jitter:   rand.Float64,
		paying:   make(chan struct{}, 1),
		messages: map[string]*questionMessages{},
		topicMu:  make(turn, 1),
	}
	t.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	t.fresh.Store(ref(make(chan struct{})))
	t.cfg.Store(cfg)
	return t
}

// configure has other settings count, and ends pauses.
func (t *Telegram) configure(cfg *Config) {
	t.cfg.Store(cfg)
	close(*t.fresh.Swap(ref(make(chan struct{}))))
}

// refresh has the settings count that config.toml has now: who was taken out of it answers nothing more. Once it tells
// that they are wrong; then nothing changes.
func (t *Telegram) refresh() error {
	old := t.cfg.Load()
	if configStamp(old.Dir) == old.stamp {
		return nil
	}
	fresh, err := old.reloaded()
	t.configure(fresh)
	if err != nil {
		return err
	}
	return t.store.audit.Append(Event{Name: "CONFIG_RELOADED"})
}

// Close gives back connections that are not in use.
func (t *Telegram) Close() error {
	t.http.CloseIdleConnections()
	return nil
}

// clockSkew is Telegram's clock minus ours, by its last answer.
func (t *Telegram) clockSkew() time.Duration { return time.Duration(t.skew.Load()) }

// Trouble is a sentence about what keeps Telegram from working, "" when it works.
func (t *Telegram) Trouble() string {
	for _, way := range []string{"send", "poll"} {
		if text, ok := t.troubles.Load(way); ok && text != "" {
			return text.(string)
		}
	}
	return ""
}

// noteTrouble remembers what keeps that way from working, "" nothing, and logs it when it is new.
func (t *Telegram) noteTrouble(way, text string) {
	old, _ := t.troubles.Swap(way, text) // nil: it is the first
	if text != "" && text != old {
		t.log.Warn(text)
	}
}

// noteFailure remembers what an error says about a way of working. What is not soon over is said at the terminal, and
// noted for other processes, until that way works.
func (t *Telegram) noteFailure(way string, e *apiError, failures int) {
	text := e.trouble(failures)
	if text == "" {
		return
	}
	t.noteTrouble(way, text)
	if e.temporary() {
		return
	}
	t.troubles.Store("told", text)
	if t.tell != nil {
		t.tell(text)
	}
	t.noteForOthers(way, text)
}

// works remembers that a way of working works, whatever kept it from that before, here or in another process.
func (t *Telegram) works(way string) {
	old, known := t.troubles.Swap(way, "")
	if known && old == "" && t.known().trouble == "" {
		return
	}
	if known && old != "" {
		t.log.Info("Telegram works again", "before", old)
	}
	t.noteForOthers(way, "")
}

// noteForOthers has other processes know what keeps a way of working from that, "" nothing.
func (t *Telegram) noteForOthers(way, text string) {
	if err := t.store.NoteFact("trouble "+way, text); err != nil {
		t.log.Warn("noting trouble for others", "error", err)
	}
	now := t.store.ChannelTrouble()
	t.updateShared(func(s *shared) {
		if s.trouble != now {
			s.trouble = now
			s.noted = time.Now().UnixNano()
		}
	})
}

// noteBot remembers the bot's name, for who starts a session.
func (t *Telegram) noteBot(name string) {
	bot := t.botID() + " " + name
	t.updateShared(func(s *shared) { s.bot = bot })
}

// known is what all processes share of their sending; where that cannot be read, zeros.
func (t *Telegram) known() (s shared) {
	f, err := openPrivate(t.pacePath(), os.O_RDONLY)
	if err == nil {
		defer f.Close()
		s.read(f)
	}
	return s
}

// botName is the bot's name as it was when somebody last asked for it, "" when nobody has.
func (t *Telegram) botName() string {
	number, name, _ := strings.Cut(t.known().bot, " ")
	if number != t.botID() {
		return ""
	}
	return name
}

// destination is a sentence about where questions go, and what kept Telegram from working when somebody last tried, ""
// nothing. Both are known from the last time: the network is not asked.
func (t *Telegram) destination() (where, trouble string) {
	known := t.known()
	where = "questions go to Telegram, bot " + t.botID()
	name := t.botName()
	if name != "" {
		where = "questions go to @" + name
	}
	if time.Unix(0, known.noted).Before(configTime(t.store.Dir)) { // it may have been mended
		return where, ""
	}
	return where, known.trouble
}

// ---- one call ----
// Every request goes through call: https://core.telegram.org/bots/api#making-requests

const (
	callLimit = 15 * time.Second // that any request may take, a poll on top of its timeout
	maxAnswer = 16 << 20         // bytes that are read of an answer
	maxBatch  = 100              // updates in one answer: https://core.telegram.org/bots/api#getupdates
)

// firstUpdate is the number of the first update in an answer to getUpdates, of which only the beginning was read.
var firstUpdate = re(`"update_id":\s*\d+`)

// apiError is every way in which a call can fail. It never has the URL in it.
type apiError struct {
	Code       int    `json:"error_code"` // 0: no answer of the Bot API came (network, proxy, cut answer)
	Text       string `json:"description"`
	Parameters struct {
		RetryAfter int64 `json:"retry_after"` // seconds, 0: it was not said
	}
	method   string
	unsent   bool   // there was no connection: nothing can have been done
	answered bool   // by whom ever
	large    string // firstUpdate in an answer that is larger than what is read of one, "" in all others
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
	Limit   int      `json:"limit,omitempty"`   // updates in one answer
	Allowed []string `json:"allowed_updates,omitempty"`
}

func (e *apiError) Error() string { return "telegram " + e.method + ": " + e.Text }

// temporary tells that the same request may succeed later.
func (e *apiError) temporary() bool { return e.Code == 0 || e.Code == 429 || e.Code >= 500 }

// refusesLooks tells that the message may be taken with plainer looks.
func (e *apiError) refusesLooks(out *outgoing) bool {
	named := e.mentions("parse", "entit", "style", "nsupported")
	return e.Code == http.StatusBadRequest && e.trouble(0) == "" && (named || out.EditID == 0)
}

// retryAfter is how long Telegram asks to wait, 0: it does not.
func (e *apiError) retryAfter() time.Duration {
	return time.Duration(e.Parameters.RetryAfter) * time.Second
}

// mentions tells whether the Bot API's own words have one of these in them.
func (e *apiError) mentions(words ...string) bool {
	return e.Code > 0 && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(e.Text, w) })
}

// refusesToken tells that the Bot API knows no bot with the token.
func (e *apiError) refusesToken() bool { return e.Code == 401 || e.Code == 404 }

// cause is what the error says about all requests, and what to do about that; "" where it is one request's alone, or
// may soon be over.
func (e *apiError) cause() (what, todo string) {
	switch {
	case e.refusesToken():
		return "Telegram refuses the bot token (" + e.Text + ")", "run atlasbridge setup"
	case e.mentions("rights to send text", "rights to send a message", "CHAT_WRITE_FORBIDDEN", "no write access"):
		return "the bot may not write in its group (" + e.Text + ")", "allow it in the group's permissions, or run " +
			"atlasbridge setup"
	case e.Code == 403 && e.mentions("kicked", "not a member", "deleted"):
		return "the bot is not in its group (" + e.Text + ")", "add it there again, or run atlasbridge setup"
	case e.Code == 403 || e.mentions("chat not found", "upgraded to a supergroup"):
		return "the bot may not write to its chat (" + e.Text + ")", "press Start there, or run atlasbridge setup"
	case e.mentions("webhook"):
		return "a webhook is set for this bot, so it cannot be polled", "run atlasbridge setup, which can remove it, " +
			"or give AtlasBridge a bot of its own"
	case e.Code == 409:
		return "another program polls this bot, and each gets only some of the answers", "stop it; or give each " +
			"machine a bot of its own, and share ATLASBRIDGE_HOME on one"
	}
	return "", ""
}

// trouble is cause in one sentence, where there was a failure before also of what may soon be over.
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

// explained is what an error of call means, and what to do about it; nil stays nil.
func explained(err error) error {
	e, ok := err.(*apiError)
	if !ok {
		return err
	}
	what, todo := e.cause()
	if what == "" {
		what = e.Error()
	}
	switch {
	case todo != "":
	case e.Code == 429:
		todo = "wait that long, then try again"
	case strings.Contains(e.Text, "certificate has expired or is not yet valid"):
		todo = "set this machine's clock, best by the network"
	case e.Code == 0 && !e.answered:
		todo = "check the network, a proxy (HTTPS_PROXY), and telegram.api_base where it is set; then try again"
	case e.temporary():
		todo = "that is Telegram's own trouble, or that of a proxy: try again later"
	}
	return hinted(errors.New(what), todo)
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
	resp, body, err := t.post(ctx, method, params)
	if err != nil {
		return t.noAnswer(method, err)
	}
	var a apiAnswer
	_ = json.Unmarshal(body, &a) // what is no answer of the Bot API leaves zeros
	a.method = method
	a.answered = true
	if len(body) == maxAnswer {
		a.large = string(firstUpdate.expr().Find(body))
	}
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
		a.Text = redact(fmt.Sprintf("%d: %s", a.Code, a.Text)) // a server may repeat the path, which has the token
	}
	return &a.apiError
}

// noAnswer is what went wrong with a request that got no answer. It has neither the URL nor the token in it.
func (t *Telegram) noAnswer(method string, err error) *apiError {
	if inner := errors.Unwrap(err); inner != nil { // what url.Error wraps is without the URL
		err = inner
	}
	text := strings.ReplaceAll(err.Error(), t.cfg.Load().Token, "‹token›")
	var dial *net.OpError
	unsent := errors.As(err, &dial) && dial.Op == "dial"
	return &apiError{method: method, Text: text, unsent: unsent}
}

// post sends one request and returns the answer and as much of its body as came.
func (t *Telegram) post(ctx context.Context, method string, params any) (*http.Response, []byte, error) {
	cfg := t.cfg.Load()
	body, err := json.Marshal(params)
	if err != nil {
		return nil, nil, err
	}
	url := strings.TrimRight(cfg.APIBase, "/") + "/bot" + cfg.Token + "/" + method
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil && len(data) == 0 {
		return nil, nil, err
	}
	return resp, data, nil
}

// ---- pacing and retries ----
// A message leaves when its turn has come, as it is to be then, and is repeated until it is done or refused for good.

const (
	// 1/s in a chat, 20/min in a group: https://core.telegram.org/bots/faq#my-bot-is-hitting-limits-how-do-i-avoid-this
	paceChat    = 1050 * time.Millisecond
	paceGroup   = 3900 * time.Millisecond // 4 + 60/3.9 < 20
	urgencyLook = time.Second             // what waits its turn looks so often whether its rank has changed
)

// rank is what a message may overtake: what has a later one.
type rank int

const (
	rankQuestion rank = iota // or what a person has just asked for
	rankOutcome
	rankNotice
	rankRest
)

// outcomeLate is for how long an outcome waits behind questions: buttons of what is over are tapped again.
const outcomeLate = 3 * time.Second

// aged is the rank of what has waited so long.
func (as rank) aged(waited time.Duration) rank {
	if as == rankOutcome && waited > outcomeLate {
		return rankQuestion
	}
	return as
}

// outgoing is a message to send, or an edit of one, as the Bot API takes it.
type outgoing struct {
	method string
	sent   *sentMessage // for what has become of it, nil: never mind

	ChatID   int64          `json:"chat_id"`                     // set by deliver
	ThreadID int64          `json:"message_thread_id,omitempty"` // the topic it goes to, set by deliver
	EditID   int64          `json:"message_id,omitempty"`        // the message to edit
	Text     string         `json:"text,omitempty"`
	Entities []entity       `json:"entities,omitempty"`
	Markup   inlineKeyboard `json:"reply_markup"` // without rows it takes away the buttons that are there
	Preview  *linkPreview   `json:"link_preview_options,omitempty"`
	Silent   bool           `json:"disable_notification,omitempty"`
	ReplyTo  *replyTo       `json:"reply_parameters,omitempty"`
}

// sentMessage is a message as Telegram has it once it is sent or edited. It has no other members: what was sent is not
// sent again because one of them has another shape.
type sentMessage struct {
	ID   int64 `json:"message_id"`
	Date any   // Unix seconds by Telegram's clock
}

// date is when the message was sent, in Unix seconds by Telegram's clock, 0: that is not known.
func (m *sentMessage) date() int64 {
	seconds, _ := m.Date.(float64) // 0 of another shape
	return int64(seconds)
}

type linkPreview struct {
	Disabled bool `json:"is_disabled"`
}

type replyTo struct {
	MessageID int64 `json:"message_id"`
	Optional  bool  `json:"allow_sending_without_reply"`
}

// delivery is a message that is written when it leaves: after its turn has come, and anew for every attempt.
type delivery struct {
	session  string           // that it is about, in whose topic it goes, "" in threadID
	threadID int64            // the topic that it goes to, 0: none
	rank     func() rank      // what it may overtake, which can change while it waits
	write    func() *outgoing // nil: there is nothing to say any more
	lost     func()           // an attempt had no answer: it may be carried out, even later; nil: never mind
	patient  bool             // what refuses all messages is waited out, too
	linger   time.Duration    // so long an answer on its way is waited for after ctx has ended
}

// send is call for messages: paced, repeated until done, refused for good or ctx ends. Id 0: the one to edit is gone.
func (t *Telegram) send(ctx context.Context, out *outgoing, as rank) (int64, error) {
	return t.deliver(ctx, delivery{
		rank:  func() rank { return as },
		write: func() *outgoing { return out },
	})
}

// deliver sends what is written: paced, repeated until done, refused for good or ctx ends. Id 0 without an error: the
// message to edit is gone, or there was nothing to say any more.
func (t *Telegram) deliver(ctx context.Context, d delivery) (int64, error) {
	plain := false   // without what an old Bot API refuses
	hasTurn := false // what was refused has not used it
	outside := false // the topic is gone: it goes to the plain chat
	began := time.Now()
	for failures := 0; ; failures++ {
		fresh := *t.fresh.Load()
		if !hasTurn {
			if err := t.awaitTurn(ctx, d, began); err != nil {
				return 0, err
			}
		}
		hasTurn = false
		out := d.write()
		if out == nil {
			return 0, nil
		}
		t.address(out, d, outside)
		id, failed := t.attempt(ctx, d.linger, out.looking(plain))
		if failed == nil {
			t.works("send")
			return id, nil
		}
		unanswered := failed.Code == 0 && !failed.unsent || failed.Code >= 500
		if unanswered && d.lost != nil {
			d.lost()
		}
		t.postpone(failed.retryAfter())
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		t.noteFailure("send", failed, failures)
		waits := failed.temporary() || d.patient && failed.trouble(0) != ""
		switch {
		case failed.mentions("message is not modified"):
			return out.EditID, nil
		case failed.mentions("message to edit not found", "message can't be edited"):
			return 0, nil
		case out.ThreadID != 0 && failed.mentions(topicGone...):
			t.leaveTopic(out.ThreadID, failed)
			outside = true
		case failed.refusesLooks(out) && !plain:
			t.noteTrouble("looks", "messages are sent again without their looks: "+failed.Error())
			plain = true // a question is never lost to its looks
			hasTurn = true
		case !waits:
			return 0, failed
		default:
			rest(ctx, t.pause(failed, failures), fresh) // the next turn notices that ctx has ended
		}
	}
}

// looking is the message, plain: without what a Bot API of 2020 may not know, as text and buttons.
func (o *outgoing) looking(plain bool) *outgoing {
	if !plain {
		return o
	}
	bare := *o
	bare.Entities = nil
	bare.Markup.Rows = [][]button{}
	for _, row := range o.Markup.Rows {
		row = slices.Clone(row)
		for i := range row {
			row[i].Style = ""
		}
		bare.Markup.Rows = append(bare.Markup.Rows, row)
	}
	return &bare
}

// attempt makes one request for a message, whose id it returns. When ctx ends, the request is given up after linger.
func (t *Telegram) attempt(ctx context.Context, linger time.Duration, out *outgoing) (int64, *apiError) {
	inFlight, cancel := lingering(ctx, linger)
	defer cancel()
	var sent sentMessage
	err := t.call(inFlight, out.method, out, &sent)
	if err != nil {
		return 0, err.(*apiError)
	}
	if out.sent != nil {
		*out.sent = sent
	}
	return sent.ID, nil
}

// lingering is a context that ends so long after ctx: what is on its way may still arrive.
func lingering(ctx context.Context, linger time.Duration) (_ context.Context, cancel func()) {
	longer, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(linger, end) })
	return longer, func() {
		stop()
		end()
	}
}

// postpone keeps all processes from sending for as long as Telegram has asked for; 0: it has not.
func (t *Telegram) postpone(wait time.Duration) {
	if wait > 0 {
		t.updatePace(func(next time.Time) time.Time { return later(next, time.Now().Add(wait)) })
	}
}

// pause is how long to wait after that many failures before this one: as Telegram asks, else longer each time.
func (t *Telegram) pause(e *apiError, failures int) time.Duration {
	if e.retryAfter() > 0 {
		return e.retryAfter()
	}
	return backoff(failures, t.jitter())
}

// backoff is the pause after failure n ≥ 0: 1 s doubling to 60 s, less r of a quarter.
func backoff(n int, r float64) time.Duration {
	d := min(time.Minute, time.Second<<min(n, 6))
	return d - time.Duration(r*float64(d)/4)
}

// sleep returns after d, or with the error of ctx when that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-timer.Done()
	return ctx.Err()
}

// rest returns after d, or when ctx ends, or other settings count.
func rest(ctx context.Context, d time.Duration, fresh <-chan struct{}) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	case <-fresh:
	}
}

// pace waits until a message may leave, and returns how many turns it has taken, as turns said last. Its rank
// may change meanwhile.
func (t *Telegram) pace(ctx context.Context, as func() rank, turns func() int) (taken int, err error) {
	every := paceChat
	if t.cfg.Load().ChatID < 0 {
		every = paceGroup
	}
	for ctx.Err() == nil {
		now := as()
		taken = turns()
		var wait time.Duration
		t.updatePace(func(next time.Time) time.Time {
			next, wait = reserve(next, time.Now(), every, taken, now)
			return next
		})
		if wait == 0 {
			return taken, nil
		}
		if now != rankQuestion || taken > 1 {
			wait = min(wait, urgencyLook)
		}
		_ = sleep(ctx, wait) // its error is that of ctx
	}
	return 0, ctx.Err()
}

// reserve takes that many turns at once and returns when the next one is, or, without changing that, how long to wait.
// Up to four turns are saved up, and one may be borrowed by a question; what ranks behind it leaves that one free, and
// a part of the next, so that others overtake.
func reserve(next, now time.Time, every time.Duration, turns int, as rank) (time.Time, time.Duration) {
	due := max(next.Sub(now), -3*every)
	cost := time.Duration(turns) * every
	wait := due + cost*time.Duration(as)/time.Duration(rankRest)
	if wait > 0 {
		return next, wait
	}
	return now.Add(due + cost), 0
}

// updatePace changes when the next message of all processes may leave. Where the file cannot be used, change sees the
// zero time, and Telegram alone paces.
func (t *Telegram) updatePace(change func(next time.Time) time.Time) {
	t.updateShared(func(s *shared) {
		if s.written > time.Now().UnixNano() { // the clock has been set back
			s.next = 0
		}
		s.next = change(time.Unix(0, s.next)).UnixNano()
	})
}

// shared is what all processes share of their sending, in a file.
type shared struct {
	next    int64  // Unix nanoseconds: when the next message may leave
	written int64  // when that was
	bot     string // the bot's number and name
	noted   int64  // when the next was
	trouble string // what keeps Telegram from working, "" nothing
}

// read takes over what the file says. One that is new, or damaged, leaves zeros.
func (s *shared) read(f *os.File) {
	in := bufio.NewReader(f)
	first, _ := in.ReadString('\n')                        // as said
	_, _ = fmt.Sscanf(first, "%d %d", &s.next, &s.written) // as said
	s.bot, _ = in.ReadString('\n')                         // as said
	trouble, _ := in.ReadString('\n')                      // as said
	noted, trouble, _ := strings.Cut(trouble, " ")
	s.noted, _ = strconv.ParseInt(noted, 10, 64) // as said
	s.bot = strings.TrimSpace(s.bot)
	s.trouble = strings.TrimSpace(trouble)
}

// write puts the lines where the file begins. What an older one had more of stands behind them, and is never read.
func (s *shared) write(f *os.File) {
	lines := fmt.Appendf(nil, "%020d %020d\n%s\n%d %s\n", s.next, time.Now().UnixNano(), s.bot,
		s.noted, strings.Join(strings.Fields(s.trouble), " "))
	_, _ = f.WriteAt(lines, 0) // if lost, Telegram paces
}

func (t *Telegram) pacePath() string { return filepath.Join(t.store.Dir, "telegram.pace") }

// updateShared changes that; where the file cannot be used, it is lost.
func (t *Telegram) updateShared(change func(*shared)) {
	var s shared
	f, err := openPrivate(t.pacePath(), os.O_RDWR|os.O_CREATE)
	if err != nil {
		change(&s)
		return
	}
	defer f.Close() // and with it the lock, which is held for microseconds
	if err := awaitLock(f, paceChat); err != nil {
		change(&s)
		return
	}
	s.read(f)
	change(&s)
	s.write(f)
}

// here says whose numbers messages have: the bot's, in its chat.
func (t *Telegram) here() string {
	cfg := t.cfg.Load()
	bot, _, _ := strings.Cut(cfg.Token, ":")
	return fmt.Sprintf("%s/%d", bot, cfg.ChatID)
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

// end is the offset behind the entity.
func (e entity) end() int { return e.Offset + e.Length }

// richText is a message's text with its entities.
type richText struct {
	text  string
	marks []entity
	ours  bool // all of it: a tap on a command in it may send it
}

// addLine adds s, unless it is empty, as lines of their own; kind is an entity's type, "" for plain text.
func (r *richText) addLine(kind, s string) {
	if s == "" {
		return
	}
	if r.text != "" {
		r.text += "\n"
	}
	r.add(kind, s)
}

// add adds s to the last line; kind is an entity's type, "" for plain text.
func (r *richText) add(kind, s string) {
	if kind != "" && s != "" {
		r.marks = append(r.marks, entity{Type: kind, Offset: units(r.text), Length: units(s)})
	}
	r.text += s
}

// addPre adds s as addLine does, in monospace; lang is what it is written in, "" unknown.
func (r *richText) addPre(s, lang string) {
	r.addLine("pre", s)
	if s != "" {
		r.marks[len(r.marks)-1].Language = lang
	}
}

// append adds other as lines of its own.
func (r *richText) append(other *richText) {
	if other.text == "" {
		return
	}
	if r.text != "" {
		r.text += "\n"
	}
	before := units(r.text)
	r.text += other.text
	for _, m := range other.marks {
		m.Offset += before
		r.marks = append(r.marks, m)
	}
}

// part is a part of the text that begins at an offset, with its entities; one that goes on outside is cut.
func (r *richText) part(text string, from int) *richText {
	p := &richText{text: text, ours: r.ours}
	end := from + units(text)
	for _, m := range r.marks {
		first := len(p.marks)
		p.marks = appendPart(p.marks, m, max(m.Offset, from), min(m.end(), end))
		for i := first; i < len(p.marks); i++ {
			p.marks[i].Offset -= from
		}
	}
	return p
}

// appendPart appends the part of the entity between two offsets, unless it is empty.
func appendPart(marks []entity, m entity, from, end int) []entity {
	if from >= end {
		return marks
	}
	m.Offset = from
	m.Length = end - from
	return append(marks, m)
}

// split cuts r after at most n UTF-16 units: at a line end, which is lost, if there is one in the second half.
func (r *richText) split(n int) (part, rest *richText) {
	head, tail := cutText(r.text, n)
	return r.part(head, 0), r.part(tail, units(r.text)-units(tail))
}

// abridge is r in about n UTF-16 units: where it is longer, its beginning, how much is missing, its end.
func (r *richText) abridge(n int) *richText {
	length := units(r.text)
	if length <= n {
		return r
	}
	short, rest := r.split(2 * n / 3)
	length = units(rest.text)
	tail := rest.text
	for left := length; left > n/3; { // in whole characters
		c, size := utf8.DecodeRuneInString(tail)
		left -= utf16.RuneLen(c)
		tail = tail[size:]
	}
	end := strings.IndexByte(tail, '\n')
	if end < len(tail)/2 {
		tail = tail[end+1:]
	}
	missing := utf8.RuneCountInString(rest.text) - utf8.RuneCountInString(tail)
	short.addLine("", fmt.Sprintf("… %d more characters …", missing))
	short.append(rest.part(tail, length-units(tail)))
	return short
}

// outgoing is a message with the text and these buttons, or, if edit is not 0, the change of that message into it.
// Nothing in it is a link, a mention or a command.
func (r *richText) outgoing(edit int64, rows [][]button) *outgoing {
	r.disarm()
	method := "sendMessage"
	if edit != 0 {
		method = "editMessageText"
	}
	return &outgoing{method: method, EditID: edit, Text: r.text, Entities: r.marks, Markup: markup(rows),
		Preview: &linkPreview{Disabled: true}}
}

// units is the length of s in UTF-16 units, as Telegram counts.
func units(s string) int { return len(utf16.Encode([]rune(s))) }

// clean makes text from elsewhere valid, without secrets and without what is invisible, of at most n UTF-16 units.
func clean(s string, n int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\r", "")
	s = visible(redact(strings.TrimRight(strings.TrimLeft(s, "\n"), " \t\n")))
	if units(s) <= n {
		return s
	}
	short, _ := cutText(s, n-1)
	return short + "…"
}

// oneLine is a text that is to be one row: where it begins another, it shows so.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", " ⏎ ") }

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
// Of an agent's answer code, bold words, headings and bullets become entities; a table stays as it is, in monospace.
// All else is plain text.

var (
	reFence    = re("^( *)(```+|~~~+) *([A-Za-z0-9+#-]{0,20})")
	reTitle    = re(`^#{1,6} +(.*?)[ #]*$`)
	reBullet   = re(`^( *)[-*+] +`)
	reTableRow = re(`^[ |:-]*-[ |:-]*\|[ |:-]*$|^ *\|[ |:-]*-[ |:-]*$`) // below a table's head
	reInline   = re("``(.+?)``|`([^`]+)`|\\*\\*([^\\s*]|[^\\s*].*?\\S)\\*\\*")
)

// markdown renders what an agent wrote.
func markdown(text string) *richText {
	r := &richText{}
	lines := strings.Split(strings.NewReplacer("\r", "", "\t", "    ").Replace(text), "\n")
	for len(lines) > 0 {
		lines = lines[r.addBlock(lines):]
	}
	r.text = strings.TrimRight(r.text, "\n")
	r.carve()
	return r
}

// addBlock adds what begins in the first line, and returns how many lines that takes. Of several blank lines one stays.
func (r *richText) addBlock(lines []string) int {
	line := strings.TrimRight(lines[0], " ")
	taken := 1
	if line == "" {
		if r.text != "" && !strings.HasSuffix(r.text, "\n") {
			r.text += "\n"
		}
		return taken
	}
	if fence := reFence.FindStringSubmatch(line); fence != nil {
		var code []string
		for ; taken < len(lines) && strings.Trim(lines[taken], " ") != fence[2]; taken++ {
			code = append(code, strings.TrimPrefix(lines[taken], fence[1]))
		}
		r.addPre(strings.Trim(strings.Join(code, "\n"), "\n"), fence[3])
		return min(taken+1, len(lines))
	}
	if len(lines) > 1 && strings.Contains(line, "|") && reTableRow.MatchString(lines[1]) {
		for taken < len(lines) && strings.Contains(lines[taken], "|") {
			taken++
		}
		r.addPre(strings.Join(lines[:taken], "\n"), "")
		return taken
	}
	if r.text != "" {
		r.text += "\n"
	}
	if heading := reTitle.FindStringSubmatch(line); heading != nil {
		from := units(r.text)
		r.addInline(strings.ReplaceAll(heading[1], "**", ""))
		r.marks = appendPart(r.marks, entity{Type: "bold"}, from, units(r.text))
		return taken
	}
	r.addInline(reBullet.ReplaceAllString(line, "$1• "))
	return taken
}

// addInline adds text to the last line, with its code and bold words.
func (r *richText) addInline(line string) {
	at := 0
	for _, m := range reInline.expr().FindAllStringSubmatchIndex(line, -1) {
		r.add("", line[at:m[0]])
		at = m[1]
		switch {
		case m[2] >= 0:
			r.add("code", line[m[2]:m[3]])
		case m[4] >= 0:
			r.add("code", line[m[4]:m[5]])
		default:
			from := units(r.text)
			r.addInline(line[m[6]:m[7]])
			r.marks = appendPart(r.marks, entity{Type: "bold"}, from, units(r.text))
		}
	}
	r.add("", line[at:])
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

// disarm puts every word that Telegram would act on into a code entity, which it leaves alone and copies well, unless
// all of the text is ours. What stands beside code is a word by itself, too.
func (r *richText) disarm() {
	if r.ours {
		return
	}
	for _, text := range []string{r.text, r.withoutCode()} {
		code := r.code()
		for _, at := range reToken.expr().FindAllStringIndex(text, -1) {
			word := strings.TrimLeft(text[at[0]:at[1]], "([{<\"'“‘«")
			if !reActive.MatchString(word) {
				continue
			}
			from := units(text[:at[1]]) - units(word)
			length := units(strings.TrimRight(word, ".,;:!?…\"'”’»)]}>"))
			r.marks = append(r.marks, outside(entity{Type: "code", Offset: from, Length: length}, code)...)
		}
	}
	r.carve()
	r.limit()
}

// withoutCode is the text with blanks in the place of code.
func (r *richText) withoutCode() string {
	text := utf16.Encode([]rune(r.text))
	for _, m := range r.code() {
		for i := m.Offset; i < m.end(); i++ {
			text[i] = ' '
		}
	}
	return string(utf16.Decode(text))
}

// isCode tells whether nothing else can be in the entity, nor it in anything but a quotation.
func (e entity) isCode() bool { return e.Type == "code" || e.Type == "pre" }

// isQuotation tells whether code can be in the entity.
func (e entity) isQuotation() bool { return strings.HasSuffix(e.Type, "blockquote") }

// code are the entities that are code, in their order.
func (r *richText) code() []entity {
	var code []entity
	for _, m := range r.marks {
		if m.isCode() {
			code = append(code, m)
		}
	}
	sort.Slice(code, func(i, j int) bool { return code[i].Offset < code[j].Offset })
	return code
}

// outside are the parts of an entity outside of others that do not overlap and are in order.
func outside(m entity, others []entity) []entity {
	var parts []entity
	at := m.Offset
	first, _ := slices.BinarySearchFunc(others, at, func(e entity, at int) int {
		if e.end() > at {
			return 1
		}
		return -1
	})
	for _, e := range others[first:] {
		if e.Offset >= m.end() {
			break
		}
		parts = appendPart(parts, m, at, e.Offset)
		at = e.end()
	}
	return appendPart(parts, m, at, m.end())
}

// carve cuts the code out of the entities that cannot hold it and brings all into order, the outer one first.
func (r *richText) carve() {
	code := r.code()
	var quotations, marks []entity
	for _, m := range r.marks {
		switch {
		case m.isQuotation():
			quotations = append(quotations, m)
		case m.isCode():
			marks = append(marks, m)
		default:
			marks = append(marks, outside(m, code)...)
		}
	}
	marks = append(quotations, marks...)
	sort.SliceStable(marks, func(i, j int) bool {
		a, b := marks[i], marks[j]
		return a.Offset < b.Offset || a.Offset == b.Offset && a.Length > b.Length
	})
	r.marks = marks
}

// limit leaves out emphasis where there are too many entities; where that is not enough, the rest of the text is one.
func (r *richText) limit() {
	if len(r.marks) <= maxEntities {
		return
	}
	r.marks = slices.DeleteFunc(r.marks, func(m entity) bool { return !m.isCode() && !m.isQuotation() })
	if len(r.marks) <= maxEntities {
		return
	}
	from := r.marks[maxEntities-1].Offset
	r.marks = r.marks[:maxEntities-1]
	for i, m := range r.marks {
		r.marks[i].Length = min(m.Length, from-m.Offset)
	}
	r.marks = append(r.marks, entity{Type: "pre", Offset: from, Length: units(r.text) - from})
}

// ---- keyboards ----
// The buttons below a question, and what its choices are called.

// Values of buttons that no choice has as its key.
const (
	tapAll    = "~all"    // show all of the question
	tapRecent = "~recent" // show the end of the screen
	tapAgain  = "~again"  // ask what stands there anew
	tapEnter  = "~enter"  // press Enter at a question for text
	tapLeave  = "~leave"  // leave the question to the terminal
	tapTick   = "~t:"     // and keys: these are ticked
	tapSubmit = "~s:"     // and keys: these are chosen

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

type button struct {
	Text  string `json:"text"`
	Data  string `json:"callback_data"`
	Style string `json:"style,omitempty"`
}

type inlineKeyboard struct {
	Rows [][]button `json:"inline_keyboard"` // not null
}

func markup(rows [][]button) inlineKeyboard {
	return inlineKeyboard{Rows: append([][]button{}, rows...)}
}

// keyboard is a question's buttons: its answers, and what else can be seen of it. While not all of it has been shown,
// nothing but what refuses it is offered; when it is over, at most to ask it again. ticked are the keys chosen so far
// where several may be; they live in the buttons: what is seen is submitted.
func keyboard(p *PromptRecord, ticked ...string) [][]button {
	switch {
	case p.expiredOpen():
		return buttonRows(p, []button{{Text: "Ask again", Data: tapAgain}})
	case !p.Open() || p.Secret || p.Idle && units(p.Full) <= partUnits:
		return nil
	case p.Idle:
		return buttonRows(p, []button{{Text: "The whole answer", Data: tapAll}})
	}
	var all []button
	read := p.ShownAll && !p.Cut
	for _, a := range p.Answers {
		if read || a.Refuses {
			all = append(all, answerButton(p, a, ticked))
		}
	}
	if p.Multi && read {
		all = append(all, button{"Submit", tapSubmit + strings.Join(ticked, ","), styleLasting})
	}
	if p.ambiguous() {
		all = append(all, button{Text: "Show last 500", Data: tapRecent})
	}
	if p.Far != "" || !p.ShownAll && !p.ambiguous() {
		all = append(all, button{Text: "Show all", Data: tapAll})
	}
	return buttonRows(p, all)
}

// answerButton gives the answer, in the colour of what it means. Where several may be ticked, it ticks the choice or
// unticks it.
func answerButton(p *PromptRecord, a Answer, ticked []string) button {
	b := button{Text: buttonText(p, a), Data: a.Key}
	switch {
	case a.Key == enterAlone:
		b.Data = tapEnter
	case a.Key == leaveIt:
		b.Data = tapLeave
	case a.Always:
		b.Style = styleLasting
	case a.Grants:
		b.Style = styleYes
	case a.Refuses:
		b.Style = styleNo
	case p.Multi && a.Keys == "":
		mark := "▫️ "
		if slices.Contains(ticked, a.Key) {
			mark = "✓ "
		}
		var keys []string
		for _, c := range p.Choices {
			if slices.Contains(ticked, c.Key) != (c.Key == a.Key) {
				keys = append(keys, c.Key)
			}
		}
		b.Text = mark + b.Text
		b.Data = tapTick + strings.Join(keys, ",")
	}
	return b
}

// buttonRows puts as many buttons side by side as fit, each as wide as the widest, and blue ones apart, below. A button
// whose data is too long to be sent back is left out; parseCallbackData reads what is.
func buttonRows(p *PromptRecord, all []button) [][]button {
	var rows, apart [][]button
	widest := 0
	for _, b := range all {
		b.Data = fmt.Sprintf("ans:%.8s:%.8s:%.16s:%s", p.ID, p.SessionID, p.Nonce, b.Data)
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

// buttonText is what an answer is called: its label, behind its number where the program gives it one.
func buttonText(p *PromptRecord, a Answer) string {
	if p.Permission || p.Source == fromAsk || a.Label == a.Key || !strings.Contains("0123456789", a.Key) {
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

// programText is what of a question comes from the program, in the order in which a message shows it: what stands above
// it, and the question's own text without the rows that its sentence and its buttons say again.
func programText(p *PromptRecord) (above, body string) {
	above = clean(p.Above, 1<<20)
	body = clean(cmp.Or(p.Full, p.Excerpt), 1<<20)
	if p.ambiguous() && p.Open() {
		return above, body
	}
	lines := strings.Split(body, "\n")
	first, end := spokenRows(lines, strings.Fields(oneLine(clean(p.Question, 1<<20))))
	lines = slices.Delete(lines, first, end)
	if p.Source != fromHook && p.Source != fromAsk { // those have no screen: every blank of theirs counts
		lines = unindented(withoutChoices(lines, p))
		return above, dense(strings.Join(lines, "\n"))
	}
	return above, strings.Trim(strings.Join(lines, "\n"), "\n")
}

var (
	reColumnGap = re(` {2,}`)                               // between buttons side by side
	reItemMark  = re(`^(?:[^\pL\pN\s]\s*)?(?:\d+[.)]\s+)?`) // a pointer, a number
)

// withoutChoices are the lines without the rows of the choices, where buttons say all of those and nothing else stands
// among them.
func withoutChoices(lines []string, p *PromptRecord) []string {
	labels := labels(p.Choices)
	cut := func(a Answer) bool {
		return utf8.RuneCountInString(buttonText(p, a)) > wideLabel || strings.HasSuffix(a.Label, "…")
	}
	if len(labels) == 0 || p.Multi || slices.ContainsFunc(p.Answers, cut) {
		return lines
	}
	first := -1
	for i, line := range lines {
		row := strings.TrimSpace(line)
		said, rest := labelsSaid(row, labels)
		switch {
		case said == 0 && first >= 0 && row != "":
			return lines
		case said > 0 && first < 0:
			first = i
		}
		labels = labels[said:]
		if first >= 0 && len(labels) == 0 {
			lines[i] = line[:strings.Index(line, row)] + rest
			return slices.Delete(lines, first, i)
		}
	}
	return lines
}

// labelsSaid is how many of the labels a row of choices says, the first one or all of them side by side, and what else.
func labelsSaid(row string, labels []string) (said int, rest string) {
	if reItemMark.ReplaceAllString(row, "") == labels[0] {
		return 1, ""
	}
	side := reColumnGap.expr().Split(row, -1)
	n := len(labels)
	if n > 1 && len(side) >= n && slices.Equal(side[:n], labels) {
		return n, strings.Join(side[n:], "  ")
	}
	return 0, ""
}

// unindented are the lines without the margin that they have in common.
func unindented(lines []string) []string {
	margin := -1
	for _, line := range lines {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if strings.TrimSpace(line) != "" && (margin < 0 || indent < margin) {
			margin = indent
		}
	}
	var out []string
	for _, line := range lines {
		out = append(out, line[min(max(margin, 0), len(line)):])
	}
	return out
}

// spokenRows are the lines from first up to end, without that one, which say these words and nothing else; the same
// twice: none do. A line may be cut.
func spokenRows(lines, words []string) (first, end int) {
	for first := range lines {
		left := words
		for i := first; i < len(lines) && len(left) > 0; i++ {
			row := strings.Fields(strings.TrimSuffix(lines[i], "…"))
			if len(row) == 0 || len(row) > len(left) || !slices.Equal(row, left[:len(row)]) {
				break
			}
			left = left[len(row):]
			if len(left) == 0 {
				return first, i + 1
			}
		}
	}
	return 0, 0
}

// questionText is a question's message: whose it is, what is asked, what about, and at last until when and what happens
// then, or what became of it. What there is no room for is left out: of what stands above it first, then in the middle.
func (t *Telegram) questionText(p *PromptRecord, s *SessionRecord) *richText {
	r := &richText{}
	r.addLine("bold", title(s))
	if p.Idle {
		t.addTurn(r, p)
		r.add("", sid(s))
		return r
	}
	above, body := programText(p)
	end := &richText{}
	if p.Open() {
		t.addDeadline(end, p)
	} else {
		above = ""
		body = abridge(body, 700)
		t.addOutcome(end, p)
	}
	end.add("", sid(s))
	room := maxUnits - units(r.text) - units(end.text) - len("\n\n… 1234567 more characters …\n")
	asked := askedText(p, s, above, body)
	if units(asked.text) > room {
		asked = askedText(p, s, "", body)
	}
	r.append(asked.abridge(room))
	r.append(end)
	return r
}

// askedText is what a question asks, and what about.
func askedText(p *PromptRecord, s *SessionRecord, above, body string) *richText {
	r := &richText{}
	if p.Open() && p.ambiguous() {
		r.addLine("", "Possibly a question: it stands still and waits for keys")
	} else {
		r.addLine("", oneLine(clean(p.Question, 1<<20)))
	}
	if p.Open() && p.Cwd != "" && p.Cwd != s.Cwd {
		r.addLine("", "in "+oneLine(clean(shortPath(p.Cwd, s.Cwd), 1<<20)))
	}
	r.addPre(body, p.Lang)
	r.addLine("expandable_blockquote", above)
	lasting := p.granted()
	if p.Open() {
		lasting = p.Lasting
	}
	if lasting != "" {
		r.addLine("", "Lasting: "+oneLine(clean(lasting, 1<<20)))
	}
	return r
}

// addDeadline adds until when a question is open and what happens then, below what can be done about it, and that a
// part is missing.
func (t *Telegram) addDeadline(r *richText, p *PromptRecord) {
	if p.Cut {
		r.addLine("", "⚠️ Part of it is not known here: look at the terminal. From here it can only be refused.")
	}
	r.addLine("", t.hint(p)+"until "+clock(p.ExpiresAt)+", then "+afterwards(p)+" · ")
}

// shortPath is a path as it is seen from the folder, where it lies in there.
func shortPath(path, folder string) string {
	short, err := filepath.Rel(folder, path)
	if err != nil || !filepath.IsAbs(path) || !filepath.IsLocal(short) {
		return path
	}
	return short
}

// hint tells what can be done about an open question besides tapping, before until when.
func (t *Telegram) hint(p *PromptRecord) string {
	freeText := t.cfg.Load().FreeText
	switch {
	case p.Secret:
		return "It is not asked for here: type it at the keyboard.\n"
	case p.Permission:
		return "or reply why not · "
	case p.takesReply():
		return "or reply with a text · "
	case p.Type == FreeText && freeText:
		return "reply with the text · "
	case p.Type == FreeText:
		return "Text from here is switched off (free_text_enabled): type it at the keyboard.\n"
	case p.Multi:
		return "tick, then Submit · "
	case len(p.Choices) == maxChoices && p.takesText():
		return "or reply with a number, or your own words · "
	case p.takesText():
		return "or reply with your own words · "
	}
	return ""
}

// afterwards tells what happens to an open question when its time is over.
func afterwards(p *PromptRecord) string {
	switch {
	case p.Source == fromAsk, p.Source == fromHook && p.SafeDefault == nil:
		return "no answer"
	case p.SafeDefault == nil, p.Secret:
		return "nothing is typed"
	}
	return clean(valueName(p, *p.SafeDefault), 80)
}

// silence tells what became of a question to which nobody gave an answer.
func silence(p *PromptRecord) string {
	switch p.Source {
	case fromAsk:
		return "; the script was told so"
	case fromHook:
		return "; the tool was told so"
	}
	return "; it still waits"
}

// addOutcome adds what became of a question: what was answered, by whom and when, or why nothing was.
func (t *Telegram) addOutcome(r *richText, p *PromptRecord) {
	what, at, why := t.outcome(p)
	r.addLine("bold", what)
	if !at.IsZero() {
		r.add("", " · "+t.decider(p)+", "+clock(at))
	}
	r.add("", why+before(" · ", p.Note)+" · ")
}

// before is s behind a mark, "" where there is none.
func before(mark, s string) string {
	if s == "" {
		return ""
	}
	return mark + s
}

// decider names who decided a question, before when.
func (t *Telegram) decider(p *PromptRecord) string {
	who := byWhom(p.DecidedBy)
	if who == "phone" && len(t.cfg.Load().Users) > 1 {
		_, person, _ := strings.Cut(*p.DecidedBy, ":")
		who += " " + person
	}
	return who
}

// outcome is what was answered, or what happened instead; when somebody decided it, zero: nobody did; and what more
// there is to say.
func (t *Telegram) outcome(p *PromptRecord) (what string, at time.Time, why string) {
	value := "answered"
	if p.Idle {
		value = "went on"
	}
	if p.Value != nil {
		value = clean(valueName(p, *p.Value), 300)
	}
	reason := clean(p.Reason, 300)
	if p.DecidedAt != nil {
		at = *p.DecidedAt
	}
	late := p.Status == Expired || p.DecidedBy != nil && *p.DecidedBy == "auto:timeout"
	switch {
	case p.Reason == bothAnswered:
		return "answered on the phone and at the keyboard in the same moment", time.Time{},
			": the terminal shows which counted"
	case p.Status == Failed && p.ScreenSHA != "":
		return "typed: " + value, time.Time{}, before(" · ", reason)
	case p.Status == Failed && p.Value != nil:
		return "not delivered: " + value, time.Time{}, before(" · ", reason)
	case p.Status == Failed:
		return "not answered", time.Time{}, before(": ", reason)
	case p.Status == Canceled && p.DecidedAt == nil:
		return cmp.Or(reason, "canceled"), time.Time{}, ""
	case p.Status == Canceled:
		return cmp.Or(reason, "canceled"), at, ""
	case late && (p.Value == nil || p.Source == fromAsk):
		return "nobody answered", time.Time{}, silence(p)
	case p.Status == Expired, p.Status == ReplyReceived:
		return value, at, " · on its way"
	case late:
		return value, at, ""
	case reason != "":
		return value, at, ": “" + reason + "”"
	}
	return value, at, ""
}

// ---- the end of a turn ----
// One message a turn: what it came to, and the answer.

// addTurn adds what a turn of the tool came to, its answer, and how to go on or how it went. A reply still reaches the
// session when the notice has expired.
func (t *Telegram) addTurn(r *richText, p *PromptRecord) {
	r.add("", " "+turnWords(p))
	r.append(markdown(abridge(clean(p.Full, 1<<20), partUnits)))
	switch {
	case p.Open(), p.Status == Expired:
		r.addLine("", "reply to go on · ")
	case p.Status == Failed:
		r.addLine("", "the session has ended · ")
	default:
		t.addOutcome(r, p)
	}
}

// turnWords is what a turn came to, and how long it took.
func turnWords(p *PromptRecord) string {
	took := ""
	if p.Took > 0 {
		took = " · " + span(time.Duration(p.Took)*time.Second)
	}
	switch p.Turn {
	case TurnFailed:
		_, why, _ := strings.Cut(p.Question, " failed: ")
		return "failed: " + oneLine(clean(why, 400))
	case TurnInterrupted, TurnFinished, TurnAsks:
		return string(p.Turn) + took
	}
	return "waits for your next message"
}

// ---- ask and settle ----
// A question's messages say what the state says of it: asked when they leave, edited until that is so.

const (
	answerLinger = 2 * time.Second // after a question is over: its message's id is still worth that
	lostLife     = time.Minute     // a request without an answer is carried out by then, or never
)

// questionMessages is what this process knows of a question's messages, and what it still wants of them.
type questionMessages struct {
	users  int // who hold it; guarded by Telegram.messagesMu, as is wanted
	wanted wantedEdits

	editing chan struct{} // taken while an edit is under way; whoever has it owns what follows
	says    string        // print of the edit that was carried out last, "" none was

	// lost are the edits whose answer was lost, and when that was: until lostLife is over each may still be
	// carried out, also after one that said the same.
	lost map[lostEdit]time.Time
}

// lostEdit is an edit of a message, of, whose answer was lost.
type lostEdit struct {
	of    int64
	print string
}

// wantedEdits is what an open question's messages are to show beyond what the state says.
type wantedEdits struct {
	ticked   []string // the choices ticked last
	tickedIn int64    // the message in which they were, 0: none were ticked
	cleared  int64    // the message that is to lose its buttons although the question is open, 0: none
}

// catchUpOptions is why a question's messages are to catch up with the state.
type catchUpOptions struct {
	want func(*wantedEdits)       // adds what is wanted beyond the outcome; nil: nothing
	due  func(*PromptRecord) bool // whether it is still wanted, asked until the first edit is done; nil: it is
	slow bool                     // what is urgent goes first, even of an outcome
}

// edit is one request that a question's messages need.
type edit struct {
	*outgoing
	print    string // tells what it says, and of which message
	said     bool   // the message says it already, which has only to be recorded
	status   State  // that the message shows then, "" with buttons
	replaced bool   // the message has been, by a newer one
}

// Ask sends the question. Id 0 without an error: it was over before it left, nothing was sent.
func (t *Telegram) Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error) {
	return t.ask(ctx, p.ID, s, "")
}

// offer is the message of an open question with its buttons. What affirms is among them, and all of it counts as shown,
// only where the message says every word that is asked, with what was shown before.
func (t *Telegram) offer(p *PromptRecord, s *SessionRecord, before string) *outgoing {
	r := t.questionText(p, s)
	message := before + "\n" + r.text
	was := p.ShownAll
	p.ShownAll = true
	for _, b := range slices.Concat(keyboard(p)...) {
		if utf8.RuneCountInString(b.Text) <= wideLabel { // of what is longer the phone shows a part
			message += "\n" + b.Text
		}
	}
	p.ShownAll = !p.Cut && (was || len(p.unaccounted(message)) == 0)
	return r.outgoing(0, keyboard(p))
}

// ask sends the question as the state has it when the message leaves, and only if it is open then. other is its session
// where the state does not know it yet; before is what of the question has been shown. An error with an id: the message
// could not be recorded.
func (t *Telegram) ask(ctx context.Context, id string, other *SessionRecord, before string) (int64, error) {
	t.warn(t.refresh())
	var sent sentMessage
	write := func() *outgoing {
		stored, s, _ := t.store.Prompt(id) // as it was, where it cannot be read
		if stored == nil || !stored.Open() {
			return nil
		}
		if s == nil {
			s = other
		}
		p := *stored
		out := t.offer(&p, s, before)
		out.Silent = p.Idle && p.Watched
		out.sent = &sent
		t.warn(t.store.Sending(id, t.here(), p.ShownAll)) // unknown buttons are better than no question
		return out
	}
	as := func() rank {
		p, _, _ := t.store.Prompt(id) // as it was, where it cannot be read
		if p == nil || p.Idle {
			return rankRest
		}
		return rankQuestion
	}
	msg, err := t.deliver(ctx, delivery{session: other.ID, rank: as, write: write, linger: answerLinger,
		patient: !t.hasty})
	if msg == 0 {
		return 0, err
	}
	return msg, t.store.Offered(id, msg, sent.date())
}

// Settle has the question's message say what the state says of it, as soon as edits of it that are under way are done.
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, _ *SessionRecord) error {
	return t.catchUp(ctx, p.ID, catchUpOptions{})
}

// catchUp edits the messages of a question until they say what the state says of it; after an error they may not, and
// what is over remains owed. Those of another bot or chat stay as they are. Of the edits of one question one is under
// way at a time. Each is written when it leaves, so that one which has become superfluous is dropped; and as it may
// have landed after one of another process, the state is looked at again afterwards.
func (t *Telegram) catchUp(ctx context.Context, id string, why catchUpOptions) error {
	p, _, _ := t.store.Prompt(id) // as it was, where it cannot be read
	if p != nil && p.elsewhere(t.here()) {
		return t.store.changePrompt(id, (*PromptRecord).forgive)
	}
	m := t.acquireMessages(id, why.want)
	defer t.releaseMessages(m)
	select {
	case m.editing <- struct{}{}:
		defer func() { <-m.editing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		e := t.nextEdit(id, m, why)
		if e == nil {
			return nil
		}
		if !e.said {
			sent, err := t.sendEdit(ctx, id, m, why)
			if err != nil {
				return err
			}
			if sent == nil {
				continue
			}
			e = sent
		}
		certain, err := t.recordEdit(id, m, e)
		if err != nil || !certain {
			return err
		}
		why.due = nil
	}
}

// acquireMessages is what is known of a question's messages, with what want adds. releaseMessages follows.
func (t *Telegram) acquireMessages(id string, want func(*wantedEdits)) *questionMessages {
	t.messagesMu.Lock()
	defer t.messagesMu.Unlock()
	m := t.messages[id]
	if m == nil {
		m = &questionMessages{editing: make(chan struct{}, 1), lost: map[lostEdit]time.Time{}}
		t.messages[id] = m
	}
	m.users++
	if want != nil {
		want(&m.wanted)
	}
	return m
}

// releaseMessages gives it back. When nobody holds it any more and no edit of it can come late, the state alone tells
// what is owed.
func (t *Telegram) releaseMessages(m *questionMessages) {
	t.messagesMu.Lock()
	defer t.messagesMu.Unlock()
	m.users--
	for id, m := range t.messages {
		if m.users == 0 && !m.mayBeOvertaken(nil) {
			delete(t.messages, id)
		}
	}
}

// nextEdit is what the messages of a question need first, by the state as it is now; nil: nothing.
func (t *Telegram) nextEdit(id string, m *questionMessages, why catchUpOptions) *edit {
	p, s, _ := t.store.Prompt(id) // as it was, where it cannot be read
	t.messagesMu.Lock()
	wanted := m.wanted
	t.messagesMu.Unlock()
	if p == nil || p.elsewhere(t.here()) || why.due != nil && !why.due(p) {
		return nil
	}
	if s == nil {
		s = &SessionRecord{Head: Head{ID: p.SessionID}}
	}
	var next *edit
	if p.Open() {
		next = openEdit(p, m, wanted)
	} else {
		next = t.outcomeEdit(p, s, m)
	}
	if next != nil || len(p.OldMsgIDs) == 0 {
		return next
	}
	next = newEdit(buttonsEdit(p.OldMsgIDs[0], nil))
	next.status = p.Status
	next.replaced = true
	next.said = next.print == m.says // it has lost its buttons already
	return next
}

// newEdit is the edit that makes the request.
func newEdit(out *outgoing) *edit {
	b, _ := json.Marshal(out) // plain values: cannot fail
	return &edit{outgoing: out, print: digest(b)}
}

// buttonsEdit gives a message these buttons and leaves its text as it is.
func buttonsEdit(msg int64, rows [][]button) *outgoing {
	return &outgoing{method: "editMessageReplyMarkup", EditID: msg, Markup: markup(rows)}
}

// openEdit is the next edit of an open question: its message has been replaced, or choices were ticked.
func openEdit(p *PromptRecord, m *questionMessages, wanted wantedEdits) *edit {
	var e *edit
	switch {
	case wanted.cleared != 0 && wanted.cleared == p.MsgID:
		e = newEdit(buttonsEdit(p.MsgID, nil))
	case p.Multi && wanted.tickedIn != 0 && wanted.tickedIn >= p.MsgID: // it can be newer than what is recorded
		e = newEdit(buttonsEdit(wanted.tickedIn, keyboard(p, wanted.ticked...)))
	}
	if e == nil || e.print == m.says {
		return nil
	}
	return e
}

// outcomeEdit makes the message of a question that is over say so, unless it does already.
func (t *Telegram) outcomeEdit(p *PromptRecord, s *SessionRecord, m *questionMessages) *edit {
	if p.MsgID == 0 {
		return nil
	}
	outcomeAs := func(status State) *edit {
		shown := *p
		shown.Status = status
		return newEdit(t.questionText(&shown, s).outgoing(p.MsgID, keyboard(&shown)))
	}
	e := outcomeAs(p.Status)
	e.status = p.Status
	doubtful := m.mayBeOvertaken(e)
	if p.MsgStatus == p.Status && !doubtful {
		return nil
	}
	recorded := m.says == "" && !doubtful && (p.Idle || !p.shownOpen()) // what it says is known from the state alone
	e.said = m.says == e.print || recorded && outcomeAs(cmp.Or(p.MsgStatus, AwaitingReply)).print == e.print
	return e
}

// mayBeOvertaken tells that an edit of its message with another print than this one, nil: any, may still be carried out
// after it.
func (m *questionMessages) mayBeOvertaken(e *edit) bool {
	for lost, at := range m.lost {
		other := e == nil || lost.of == e.EditID && lost.print != e.print
		if other && time.Since(at) < lostLife {
			return true
		}
	}
	return false
}

// sendEdit sends the edit that is needed when its turn comes, and returns it; nil: none was needed any more. A message
// that is gone, or takes no edit, counts as edited.
func (t *Telegram) sendEdit(ctx context.Context, id string, m *questionMessages, why catchUpOptions) (*edit, error) {
	var sent *edit
	began := time.Now()
	_, err := t.deliver(ctx, delivery{
		rank: func() rank {
			p, _, _ := t.store.Prompt(id) // as it was, where it cannot be read
			if p == nil || p.Open() || why.slow {
				return rankRest
			}
			return rankOutcome.aged(time.Since(began))
		},
		write: func() *outgoing {
			sent = t.nextEdit(id, m, why)
			if sent == nil || sent.said {
				sent = nil
				return nil
			}
			return sent.outgoing
		},
		lost: func() {
			m.lost[lostEdit{sent.EditID, sent.print}] = time.Now()
		},
	})
	if refusedForGood(err) {
		t.log.Warn("a message cannot be edited, now or later", "error", err.Error())
		return sent, nil
	}
	if err != nil {
		return nil, err
	}
	return sent, nil
}

// recordEdit notes what a message says now, for good where the question is over. It is not certain while an earlier
// edit may still be carried out after this one: then it stays owed, and a later edit makes sure.
func (t *Telegram) recordEdit(id string, m *questionMessages, e *edit) (certain bool, err error) {
	if !e.replaced {
		m.says = e.print
		if e.status != "" && m.mayBeOvertaken(e) {
			m.says = ""
			return false, t.store.Edited(id, e.EditID, "", true)
		}
	}
	return true, t.store.Edited(id, e.EditID, e.status, e.status == "" || len(e.Markup.Rows) > 0)
}

// ---- notices and streams ----
// Messages that ask nothing.

// Notify sends the notice in as many messages as it needs and returns the id of the last, 0 where it says nothing.
// After an error the rest of it was not sent.
func (t *Telegram) Notify(ctx context.Context, n Notice) (int64, error) {
	if n.Done {
		t.markDone(ctx, n.ReplyTo)
		return 0, nil
	}
	if n.Late != nil {
		return t.notifyLate(ctx, &n)
	}
	text := clean(n.Text, 1<<20)
	mono := clean(n.Mono, 1<<20)
	about, _ := t.store.Session(n.SessionID)
	var id int64
	for text+mono != "" {
		part, restText := cutText(text, partUnits)
		room := 0
		if restText == "" {
			room = partUnits - units(part)
		}
		block, restMono := cutText(mono, room)
		sent, err := t.sendNotice(ctx, &n, noticeText(about, part, block, n.Lang, n.Ours).outgoing(0, nil))
		if err != nil {
			return 0, err
		}
		id = sent
		text = restText
		mono = restMono
	}
	if n.Last {
		return id, t.endTopic(ctx, n.SessionID)
	}
	return id, nil
}

// noticeText is a notice's message: the session that it is about, nil none, and what there is to say of it.
func noticeText(about *SessionRecord, text, mono, lang string, ours bool) *richText {
	r := &richText{ours: ours}
	if about != nil {
		r.addLine("bold", title(about))
		text = " " + text
	}
	r.add("", strings.TrimRight(text, " "))
	r.addPre(mono, lang)
	if about != nil {
		r.addLine("", sid(about))
	}
	return r
}

// sendNotice sends one message of a notice.
func (t *Telegram) sendNotice(ctx context.Context, n *Notice, out *outgoing) (int64, error) {
	out.Silent = !n.Ring
	if n.ReplyTo != 0 {
		out.ReplyTo = &replyTo{MessageID: n.ReplyTo, Optional: true}
	}
	d := delivery{
		rank:  n.rank,
		write: func() *outgoing { return out },
	}
	if n.ReplyTo != 0 {
		d.threadID = n.ThreadID
	} else {
		d.session = n.SessionID
	}
	if n.First {
		d.write = func() *outgoing {
			if t.spoke(n.SessionID) {
				return nil
			}
			return out
		}
	}
	return t.deliver(ctx, d)
}

// rank is what the notice may overtake.
func (n *Notice) rank() rank {
	switch {
	case n.ReplyTo != 0:
		return rankQuestion
	case n.Ring || n.Urgent:
		return rankNotice
	}
	return rankRest
}

// spoke tells that a session has said more than that it began: a question was sent, or it has ended.
func (t *Telegram) spoke(session string) bool {
	s, _ := t.store.Session(session)
	asked := slices.ContainsFunc(t.store.PromptsOf(session), func(p *PromptRecord) bool { return p.MsgID != 0 })
	return asked || s == nil || s.Status != "active"
}

// notifyLate sends a notice that is written when its turn has come, one at a time. Id 0: there was nothing to say, or
// the message to edit is gone.
func (t *Telegram) notifyLate(ctx context.Context, n *Notice) (int64, error) {
	about, _ := t.store.Session(n.SessionID)
	chat := ""
	id, err := t.deliver(ctx, delivery{
		session: n.SessionID,
		rank:    n.rank,
		write: func() *outgoing {
			now := n.Late()
			if now.Mono == "" {
				return nil
			}
			chat = t.here()
			if chat != t.streamChat {
				now.Edit = 0 // another chat's message
			}
			out := noticeText(about, "", now.Mono, "", false).outgoing(now.Edit, nil)
			out.Silent = now.Edit == 0
			return out
		},
	})
	if err == nil {
		t.streamChat = chat
	}
	return id, err
}

// stream turns the transcript into messages: finished text fills a message, which is edited as it grows and followed by
// another when it is full; the live part stands at its end. It belongs to the session's loop.
type stream struct {
	lookAt  time.Time // when an agent's window is looked at, zero: there is nothing new
	flushAt time.Time // when what was gathered is looked at, zero: there is nothing
	text    string    // finished lines, from the current message's first on
	live    string    // what may still change
	key     string    // how the key in PEM begins in which the text so far ends, "" in none
	shown   string    // what the current message says
	sent    string    // what it is about to say, "" nothing new
	msg     int64     // the current message, 0 when the next text starts one
	cut     int       // bytes of text in the current message, which is full; 0 while it is not
	until   int       // bytes of text that belong into it at most: another message has come; 0 none has
	busy    bool      // a job is with the sender
}

// fill returns what the current message is to say, of at most limit UTF-16 units, and notes whether that fills it.
func (t *stream) fill(limit int) string {
	text := t.text
	if t.until > 0 {
		text = t.text[:t.until]
	}
	part, rest := cutText(text, limit)
	t.cut = 0
	if rest != "" || t.until > 0 {
		t.cut = len(text) - len(rest)
	} else {
		part, _ = cutText(part+t.live, limit)
	}
	return strings.TrimRight(strings.TrimLeft(part, "\n"), " \t\n") // as clean does: an edit must change something
}

// next is what there is to send, no Mono: nothing. Where the current message says it all already, the next one begins.
func (t *stream) next(limit int) Notice {
	text := t.fill(limit)
	for t.cut > 0 && text == t.shown {
		t.turnPage()
		text = t.fill(limit)
	}
	if text == t.shown {
		return Notice{}
	}
	return Notice{Mono: text, Edit: t.msg}
}

// delivered goes on after a message: the next text goes into the same, or starts another when it is full. What was
// refused for good is not sent again; the sender has logged it.
func (t *stream) delivered(msg int64, _ error) {
	t.busy = false
	if t.sent == "" {
		return
	}
	t.msg = msg
	t.shown = t.sent
	t.sent = ""
	if t.cut > 0 {
		t.turnPage()
	}
}

// turnPage has the next message begin.
func (t *stream) turnPage() {
	t.text = t.text[t.cut:]
	t.until = max(0, t.until-t.cut)
	t.cut = 0
	t.msg = 0
	t.shown = ""
}

// ---- reactions ----
// What a message of the operator's asked for was done: that is no message of its own.

// doneMark is the reaction that says that what a message asked for was done. It is one of those that every chat has:
// https://core.telegram.org/bots/api#reactiontypeemoji
const doneMark = "👍"

// markDone marks a message of the operator's as done. It is for looks: where it cannot be, that is only logged, once.
func (t *Telegram) markDone(ctx context.Context, msg int64) {
	if msg == 0 {
		return
	}
	params := map[string]any{
		"chat_id":    t.cfg.Load().ChatID,
		"message_id": msg,
		"reaction":   []map[string]string{{"type": "emoji", "emoji": doneMark}},
	}
	err := t.call(ctx, "setMessageReaction", params, nil)
	if err != nil && ctx.Err() == nil {
		t.noteTrouble("react", "messages are not marked as done: "+err.Error())
	}
}

// ---- topics ----
// Where the chat has topics each session has one: made soon, or with its first message, and ended with it. What the
// operator wrote there is his: none is deleted. Whatever fails about it, the message goes to the plain chat.

const (
	topicAfter    = 5 * time.Second  // a session that lives so long has one, before it is needed
	topicLimit    = 3 * time.Second  // that making one may take, while a message waits
	topicPatience = 30 * time.Second // a message that has waited so long for two turns leaves with one, and without it
	topicsEvery   = 5 * time.Minute  // topics are looked after so often
)

// topicGone are the words of an error that tells that a topic cannot be written to.
var topicGone = []string{"message thread not found", "TOPIC_ID_INVALID", "TOPIC_DELETED", "TOPIC_CLOSED"}

// turnsFor is how many turns a message about the session needs, which has waited that long: two where its topic is to
// be made first.
func (t *Telegram) turnsFor(session string, waited time.Duration) int {
	if session != "" && waited < topicPatience && t.topicless(session) != nil {
		return 2
	}
	return 1
}

// PrepareTopic makes the session's topic before its first message, so that none waits for it.
func (t *Telegram) PrepareTopic(ctx context.Context, session string) {
	if t.topicless(session) == nil {
		return
	}
	_, err := t.pace(ctx, func() rank { return rankRest }, func() int { return 1 })
	if err == nil {
		t.openTopic(ctx, session)
	}
}

// topicless is the session if a topic is to be made for it, nil otherwise. Only its own process makes one.
func (t *Telegram) topicless(session string) *SessionRecord {
	t.topicMu.Lock()
	defer t.topicMu.Unlock()
	return t.topiclessLocked(session)
}

// topiclessLocked is topicless with topicMu held.
func (t *Telegram) topiclessLocked(session string) *SessionRecord {
	s, topicsIn := t.store.Session(session)
	ours := s != nil && s.Wrapper == os.Getpid() && s.Status == "active"
	if !ours || t.topicTried || s.ThreadID != 0 || topicsIn != t.cfg.Load().ChatID {
		return nil
	}
	return s
}

// awaitTurn waits until a message may leave, and makes the topic of its session where that comes first.
func (t *Telegram) awaitTurn(ctx context.Context, d delivery, began time.Time) error {
	turns := func() int { return t.turnsFor(d.session, time.Since(began)) }
	for {
		taken, err := t.pace(ctx, d.rank, turns)
		if err != nil || taken == 1 || t.openTopic(ctx, d.session) {
			return err
		}
	}
}

// address tells a message where it goes; outside: not into its topic, which is gone with what it replies to.
func (t *Telegram) address(out *outgoing, d delivery, outside bool) {
	out.ChatID = t.cfg.Load().ChatID
	out.ThreadID = 0
	switch {
	case outside:
		out.ReplyTo = nil
	case out.EditID == 0:
		out.ThreadID = t.threadOf(d)
	}
}

// openTopic makes the session's topic, unless that was done. What may have been made is not made again. False: Telegram
// asks to wait, with everything.
func (t *Telegram) openTopic(ctx context.Context, session string) (goesOn bool) {
	t.topicMu.Lock()
	defer t.topicMu.Unlock()
	s := t.topiclessLocked(session)
	if s == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), topicLimit)
	defer cancel()
	chat := t.cfg.Load().ChatID
	v, _ := t.store.View() // as it was, where it cannot be read
	var made struct {
		ThreadID int64 `json:"message_thread_id"`
	}
	params := map[string]any{"chat_id": chat, "name": topicName(v, s)}
	err := t.call(ctx, "createForumTopic", params, &made)
	failed, ok := err.(*apiError)
	if ok && (failed.unsent || failed.Code == http.StatusTooManyRequests) { // nothing was made
		t.postpone(failed.retryAfter())
		return failed.retryAfter() == 0
	}
	t.topicTried = true
	switch {
	case err == nil:
		err = t.store.SetTopic(session, Topic{ThreadID: made.ThreadID, ThreadChat: chat})
	case !failed.temporary(): // nor do others try, until the poller has asked again
		err = errors.Join(err, t.store.NoteTopics(0))
	}
	if err != nil {
		t.noteTrouble("topics", "the session has no topic, its messages go to the plain chat: "+err.Error())
	}
	return true
}

// threadOf is the topic that a message goes to, 0: none. It waits while one is being made.
func (t *Telegram) threadOf(d delivery) int64 {
	if d.session == "" {
		return d.threadID
	}
	t.topicMu.Lock()
	defer t.topicMu.Unlock()
	s, _ := t.store.Session(d.session)
	if s == nil || s.ThreadChat != t.cfg.Load().ChatID {
		return 0
	}
	return max(0, s.ThreadID)
}

// leaveTopic has the session of a topic that is gone stay in the plain chat.
func (t *Telegram) leaveTopic(thread int64, why *apiError) {
	t.noteTrouble("topics", fmt.Sprintf("topic %d is gone, its messages go to the plain chat: %v", thread, why))
	v, _ := t.store.View() // as it was, where it cannot be read
	s := v.inTopic(t.cfg.Load().ChatID, thread)
	if s == nil {
		return
	}
	if err := t.store.SetTopic(s.ID, Topic{ThreadID: noTopic}); err != nil {
		t.log.Warn("recording that a topic is gone", "error", err)
	}
}

// inTopic is the session whose topic that is, nil: none's.
func (v *View) inTopic(chat, thread int64) *SessionRecord {
	for _, s := range v.Sessions {
		if thread > 0 && s.ThreadID == thread && s.ThreadChat == chat {
			return s
		}
	}
	return nil
}

// topicName is what the topic of a session is called: as no other that lives.
func topicName(v *View, s *SessionRecord) string {
	name := title(s)
	for id, other := range v.Sessions {
		if id != s.ID && other.Status == "active" && title(other) == name {
			name += " " + shortID(s.ID)
			break
		}
	}
	return strings.Join(strings.Fields(name), " ") // on one line
}

// endTopic ends the topic of a session that has ended: in a group nobody writes there any more, in a private chat,
// where topics cannot be closed, its name tells how it ended. What is refused for good stays as it is.
func (t *Telegram) endTopic(ctx context.Context, session string) error {
	s, _ := t.store.Session(session)
	if s == nil || s.ThreadID <= 0 || s.ThreadEnded {
		return nil
	}
	method := "closeForumTopic"
	params := map[string]any{"chat_id": s.ThreadChat, "message_thread_id": s.ThreadID}
	if s.ThreadChat > 0 {
		method = "editForumTopic"
		params["name"] = "✓ " + title(s)
		if s.ExitCode == nil || *s.ExitCode != 0 {
			params["name"] = "✗ " + title(s)
		}
	}
	_, err := t.pace(ctx, func() rank { return rankNotice }, func() int { return 1 })
	if err != nil {
		return err
	}
	err = t.call(ctx, method, params, nil)
	failed, ok := err.(*apiError)
	if ok && failed.temporary() {
		t.postpone(failed.retryAfter())
		return err
	}
	if ok && !failed.mentions("TOPIC_NOT_MODIFIED") {
		t.noteTrouble("topics", "a topic stays as it is: "+failed.Error())
	}
	ended := s.Topic
	ended.ThreadEnded = true
	return t.store.SetTopic(session, ended)
}

// topicsHere tells whether the chat has topics. Whether the bot may make one shows when it does.
func (t *Telegram) topicsHere(ctx context.Context) (bool, error) {
	var me struct {
		user
		Topics bool `json:"has_topics_enabled"`
	}
	if err := t.call(ctx, "getMe", struct{}{}, &me); err != nil {
		return false, err
	}
	if me.Username != "" {
		t.noteBot(me.Username)
	}
	chatID := t.cfg.Load().ChatID
	if chatID > 0 {
		return me.Topics, nil
	}
	var group struct {
		Forum bool `json:"is_forum"`
	}
	err := t.call(ctx, "getChat", map[string]any{"chat_id": chatID}, &group)
	return group.Forum, err
}

// reach makes sure that the bot may write to its chat, where it shows for some seconds that it types, and tells which
// chat that is.
func (t *Telegram) reach(ctx context.Context) (chat string, err error) {
	here := map[string]any{"chat_id": t.cfg.Load().ChatID}
	var found struct {
		Type     string
		Title    string
		Username string
	}
	if err := t.call(ctx, "getChat", here, &found); err != nil {
		return "", err
	}
	chat = strings.TrimSpace(found.Type + " " + cmp.Or(found.Title, found.Username))
	here["action"] = "typing"
	return chat, t.call(ctx, "sendChatAction", here, nil)
}

// webhook tells whether the bot's messages go elsewhere: then a poll would be refused.
func (t *Telegram) webhook(ctx context.Context) (set bool, err error) {
	var hook struct{ URL string }
	err = t.call(ctx, "getWebhookInfo", struct{}{}, &hook)
	return hook.URL != "", err
}

// keepTopics looks after topics until ctx ends: whether there are any, and what is to become of those of sessions that
// have ended.
func (r *receiver) keepTopics() {
	for r.ctx.Err() == nil {
		pause := topicsEvery
		err := r.lookAfterTopics()
		if err != nil && r.ctx.Err() == nil {
			r.noteTrouble("topics", "topics are not looked after: "+err.Error())
			pause = debtsPause
		}
		_ = sleep(r.ctx, pause) // the loop ends with it
	}
}

// lookAfterTopics records whether the chat has topics, and tidies them.
func (r *receiver) lookAfterTopics() error {
	here, err := r.topicsHere(r.ctx)
	if err != nil {
		return err
	}
	if !here {
		return r.store.NoteTopics(0)
	}
	if err := r.store.NoteTopics(r.cfg.Load().ChatID); err != nil {
		return err
	}
	return r.tidyTopics()
}

// tidyTopics ends the topics of sessions that could not do it.
func (r *receiver) tidyTopics() error {
	v, err := r.store.View()
	if err != nil {
		return err
	}
	for id, s := range v.Sessions {
		late := s.EndedAt != nil && time.Since(*s.EndedAt) > debtsPatience
		if !late || s.ThreadChat != r.cfg.Load().ChatID {
			continue
		}
		if err := r.endTopic(r.ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// ---- files from the phone ----
// A photo or a document is fetched by its session into a folder of that. Its name and its type are the sender's word.

// maxFile is what getFile gives out, in bytes: https://core.telegram.org/bots/api#getfile
const maxFile = 20 << 20

// fetched is a file of the operator's as it came.
type fetched struct {
	path string
	size int64
	sha  string // SHA-256, "sha256:…"
	err  error
}

// fileRef is a file as a message has it.
type fileRef struct {
	ID   string `json:"file_id"`
	Name string `json:"file_name"` // "" of a photo
	Size int64  `json:"file_size"` // 0: unknown
}

// fetch gets a file into the session's folder, and tries again until ctx ends.
func (t *Telegram) fetch(ctx context.Context, session string, file *FileRef) fetched {
	for failures := 0; ; failures++ {
		got := t.fetchOnce(ctx, session, file)
		failed, ok := got.err.(*apiError)
		if !ok || !failed.temporary() || sleep(ctx, t.pause(failed, failures)) != nil {
			return got
		}
	}
}

// fetchOnce is one attempt; what came of a file that did not come whole is removed.
func (t *Telegram) fetchOnce(ctx context.Context, session string, file *FileRef) (got fetched) {
	var there struct {
		Path string `json:"file_path"`
	}
	got.err = t.call(ctx, "getFile", map[string]string{"file_id": file.ID}, &there)
	if got.err != nil {
		return got
	}
	name := file.Name
	if name == "" {
		name = reEnding.FindString(there.Path)
	}
	var f *os.File
	f, got.err = t.store.newFile(session, name)
	if got.err != nil {
		return got
	}
	sum := sha256.New()
	got.size, got.err = t.download(ctx, there.Path, io.MultiWriter(f, sum))
	closed := f.Close()
	if got.err == nil {
		got.err = closed
	}
	if got.err != nil {
		_ = os.Remove(f.Name()) // what it is about is the error before
		return got
	}
	got.path = f.Name()
	got.sha = fmt.Sprintf("sha256:%x", sum.Sum(nil))
	return got
}

// download gets what getFile names. The token is in the address: that is in no error.
func (t *Telegram) download(ctx context.Context, path string, to io.Writer) (int64, error) {
	cfg := t.cfg.Load()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, cfg.APIBase, nil)
	if err != nil {
		return 0, t.noAnswer("getFile", err)
	}
	req.URL.Path = strings.TrimRight(req.URL.Path, "/") + "/file/bot" + cfg.Token + "/" + path
	resp, err := t.http.Do(req)
	if err != nil {
		return 0, t.noAnswer("getFile", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK { // a redirection too
		return 0, &apiError{method: "getFile", Code: resp.StatusCode, Text: resp.Status}
	}
	n, err := io.Copy(to, io.LimitReader(resp.Body, maxFile+1))
	switch {
	case err != nil:
		return n, t.noAnswer("getFile", err)
	case n > maxFile:
		return n, &apiError{method: "getFile", Code: http.StatusRequestEntityTooLarge, Text: "the file is too big"}
	}
	return n, nil
}

// ---- polling ----
// One process asks for updates, for all sessions. What it has recorded it confirms; the rest comes again.

const (
	pollTimeout   = 50                     // seconds; more are clamped (source of telegram-bot-api)
	tapLife       = 150 * time.Second      // an undelivered tap is forgotten then (same source)
	tapCrosses    = 10 * time.Second       // a tap so soon after an edit was made before that was seen
	onItsWayAfter = 900 * time.Millisecond // an answer typed by then needs no edit in between
	debtsEvery    = 5 * time.Second        // messages that are owed an edit are looked for so often
	debtsPatience = 30 * time.Second       // a living session has that long to edit its own messages
	debtsPause    = time.Minute            // after an edit that failed for good
	questionLife  = 24 * time.Hour         // no question is open for longer: see timeout_seconds
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

type callbackQuery struct {
	ID      string
	Data    string
	From    *user
	Message *message
}

type message struct {
	ID            int64 `json:"message_id"`
	From          *user
	Chat          chat
	Date          int64 // Unix seconds by the server's clock
	Text          string
	ThreadID      int64     `json:"message_thread_id"`
	InTopic       bool      `json:"is_topic_message"` // else ThreadID is no topic's
	Photo         []fileRef // in several sizes, the largest last
	Document      *fileRef
	Caption       string          // of either
	ReplyTo       *message        `json:"reply_to_message"`
	Markup        inlineKeyboard  `json:"reply_markup"`   // of a message of ours
	ExternalReply json.RawMessage `json:"external_reply"` // to a message of another chat or topic
	Quote         json.RawMessage `json:"quote"`          // what it quotes of the message replied to
	ReplyToStory  json.RawMessage `json:"reply_to_story"`
	SenderChat    json.RawMessage `json:"sender_chat"` // a channel, or an anonymous administrator
	ForwardOrigin json.RawMessage `json:"forward_origin"`
	ViaBot        json.RawMessage `json:"via_bot"`
	EditDate      int64           `json:"edit_date"`
	service
}

// service are the members of a message that nobody wrote: something happened in the chat.
type service struct {
	TopicCreated  json.RawMessage `json:"forum_topic_created"`
	TopicEdited   json.RawMessage `json:"forum_topic_edited"`
	TopicClosed   json.RawMessage `json:"forum_topic_closed"`
	TopicReopened json.RawMessage `json:"forum_topic_reopened"`
	Pinned        json.RawMessage `json:"pinned_message"`
	AutoDelete    json.RawMessage `json:"message_auto_delete_timer_changed"`
}

// isService tells whether the message has one of these.
func (s *service) isService() bool {
	return len(s.TopicCreated)+len(s.TopicEdited)+len(s.TopicClosed)+len(s.TopicReopened)+len(s.Pinned)+
		len(s.AutoDelete) > 0
}

// user is a person or a bot; the names are for display only: anyone can take them.
type user struct {
	ID       int64
	IsBot    bool   `json:"is_bot"`
	Name     string `json:"first_name"`
	Username string
}

type chat struct {
	ID   int64
	Type string // private, group, supergroup or channel
}

// receiver is a Telegram while it polls. The fields after work belong to the goroutine that polls.
type receiver struct {
	*Telegram
	ctx       context.Context // ends with the polling
	work      sync.WaitGroup  // goroutines beside the polling; each ends soon after ctx
	lastOK    time.Time       // of getUpdates, by the wall clock, which goes on while the machine sleeps
	replied   chan struct{}   // closed when the last reply has been sent; nil: there was none
	bot       string          // the number of the bot whose updates these are
	minute    int64           // since 1970, in which is counted:
	strangers int             // updates of others
	clashedAt time.Time       // when another program's poll ended ours last
}

// who names a person in records.
func (u *user) who() string { return fmt.Sprint("telegram:", u.ID) }

// name is what a person is called, for display.
func (u *user) name() string { return safely(cmp.Or(u.Username, u.Name), 64) }

// admitted decides, for every kind of update and nowhere else, whether it counts: when a person on the allowlist, known
// by number alone, wrote it himself in the configured chat. The message of a tap is the bot's own.
func admitted(u *update, users []int64, chatID int64) (from *user, ok bool) {
	var m *message
	switch {
	case u.Message != nil && u.Callback != nil: // no update has both
		return nil, false
	case u.Message != nil:
		from = u.Message.From
		if u.Message.original() {
			m = u.Message
		}
	case u.Callback != nil:
		from = u.Callback.From
		m = u.Callback.Message
	}
	if m == nil || from == nil || from.IsBot {
		return from, false
	}
	return from, from.ID > 0 && slices.Contains(users, from.ID) && m.Chat.configured(chatID, from.ID)
}

// original tells that its sender wrote the message as it is: in his own name, not forwarded, not changed.
func (m *message) original() bool {
	return len(m.SenderChat)+len(m.ViaBot)+len(m.ForwardOrigin) == 0 && m.EditDate == 0
}

// configured tells that it is the chat of the settings, 0 none: that person's private chat, or a group.
func (c *chat) configured(chatID, person int64) bool {
	switch {
	case c.ID != chatID:
		return false
	case chatID > 0:
		return c.Type == "private" && chatID == person
	}
	return chatID < 0 && strings.HasSuffix(c.Type, "group")
}

// Poll handles updates for all sessions whenever it has the lock. It ends with ctx, and with it all that it has begun.
func (t *Telegram) Poll(ctx context.Context) {
	for t.lockPolling(ctx) {
		t.polling.Store(true)
		t.receive(ctx)
		t.polling.Store(false)
		t.store.LeavePoll()
	}
}

// receive polls until ctx ends, or this process is not the poller any more, and with it all that it has begun.
func (t *Telegram) receive(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	r := &receiver{Telegram: t, ctx: ctx, lastOK: time.Now().Round(0)}
	defer r.work.Wait()
	defer stop()
	r.beside(r.payDebts)
	r.beside(r.keepTopics)
	r.background(r.setCommands)
	r.poll()
}

// lockPolling waits until this process is the poller, or ctx ends.
func (t *Telegram) lockPolling(ctx context.Context) (held bool) {
	for ctx.Err() == nil {
		held, err := t.store.TryPoll()
		if held {
			return true
		}
		trouble := ""
		if err != nil {
			trouble = fmt.Sprint("no answers come from the phone: ", err)
		}
		t.noteTrouble("poll", trouble)
		_ = sleep(ctx, time.Second) // so another takes over within 2 s; the loop ends with ctx
	}
	return false
}

// setCommands gives the chat its menu of commands, unless it has it.
func (r *receiver) setCommands() error {
	cfg := r.cfg.Load()
	here := map[string]any{"type": "chat", "chat_id": cfg.ChatID}
	menu := digest(fmt.Appendf(nil, "%s %d %v", r.botID(), cfg.ChatID, botCommands))
	v, err := r.store.View()
	if err != nil || v.fact("commands") == menu {
		return err
	}
	err = r.call(r.ctx, "setMyCommands", map[string]any{"commands": botCommands, "scope": here}, nil)
	if err != nil {
		return err
	}
	return r.store.NoteFact("commands", menu)
}

// poll asks for updates and handles them until ctx ends or this process is not the poller any more.
func (r *receiver) poll() {
	params := &pollParams{Allowed: []string{"message", "callback_query"}, Timeout: 1, Limit: maxBatch}
	for failures := 0; r.ctx.Err() == nil; {
		fresh := *r.fresh.Load()
		bot := r.botID()
		if bot != r.bot {
			r.bot = bot
			params.Offset = 0 // those of another bot say nothing
		}
		began := time.Now()
		offset := params.Offset
		var updates []json.RawMessage
		err := r.call(r.ctx, "getUpdates", params, &updates)
		if r.ctx.Err() != nil || !r.store.Polls() {
			return
		}
		r.refreshAndTell()
		if r.botID() != bot { // they are another bot's
			continue
		}
		failed, ok := err.(*apiError)
		if ok && failed.large != "" {
			r.warn(params.shrink(failed.large))
			continue
		}
		if ok {
			r.waitOut(failed, failures, fresh)
			failures++
			params.Timeout = 1 // short: to know soon that all is well
			continue
		}
		failures = 0
		params.Timeout = pollTimeout
		params.Limit = min(2*params.Limit, maxBatch)
		r.handleUpdates(updates, params)
		if params.Offset == offset {
			_ = sleep(r.ctx, pollLeast-time.Since(began)) // the loop ends with it
		}
	}
}

// refreshAndTell is refresh before updates are handled: what is wrong with the settings is told on the phone too.
func (r *receiver) refreshAndTell() {
	err := r.refresh()
	if err == nil {
		return
	}
	r.warn(err)
	r.background(func() error {
		_, err := r.Notify(r.ctx, Notice{Text: "⚠ " + err.Error()})
		return err
	})
}

// shrink asks for half as many updates after an answer that was too large to be read. A single one is skipped by its
// number: a stranger's flood must not keep the operator's taps away. The error tells that. first: the apiError's large.
func (p *pollParams) shrink(first string) error {
	if p.Limit > 1 {
		p.Limit /= 2
		return nil
	}
	_, number, _ := strings.Cut(first, ":")
	id, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
	if err != nil {
		return err
	}
	p.Offset = id + 1
	return fmt.Errorf("update %d is larger than %d MiB: it is skipped", id, maxAnswer>>20)
}

// botID is the number of the bot, which is the beginning of its token and no secret.
func (t *Telegram) botID() string {
	bot, _, _ := strings.Cut(t.cfg.Load().Token, ":")
	return bot
}

// waitOut waits until it is worth asking again, or other settings count. Whoever may mend what lasts, such as setup,
// can poll meanwhile.
func (r *receiver) waitOut(failed *apiError, failures int, fresh <-chan struct{}) {
	r.noteFailure("poll", failed, failures)
	pause := r.pause(failed, failures)
	if failed.Code == http.StatusConflict && !failed.mentions("webhook") {
		r.clashedAt = time.Now()
		pause = conflictPause + time.Duration(r.jitter()*float64(time.Second))
	}
	if failed.temporary() {
		rest(r.ctx, pause, fresh)
		return
	}
	r.store.LeavePoll()
	rest(r.ctx, pause, fresh)
	r.lockPolling(r.ctx)
}

// handleUpdates handles updates in their order. The next poll confirms those that are done. Where one cannot be
// recorded, it comes again with all behind it.
func (r *receiver) handleUpdates(updates []json.RawMessage, params *pollParams) {
	r.turnMinute()
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

// resendAfterOutage sends the questions that wait again when an outage is over that lasted longer than an undelivered
// tap lives. While the state cannot be read, it is not over.
func (r *receiver) resendAfterOutage() {
	now := time.Now().Round(0)
	old := func(t time.Time) bool { return now.Sub(t) > tapLife }
	if !old(r.lastOK) {
		r.lastOK = now
		return
	}
	v, err := r.store.View()
	if err != nil {
		r.warn(err)
		return
	}
	r.lastOK = now
	waiting := inOrder(v, func(p *PromptRecord) bool {
		asked := p.Status == AwaitingReply && p.MsgID != 0
		return asked && !p.Idle && old(p.At) && now.Before(p.ExpiresAt)
	})
	r.beside(func() {
		for _, p := range waiting {
			_, err := r.resend(*p, "")
			r.warn(err)
		}
	})
}

// inOrder are the questions that want holds for, in the order in which they were asked.
func inOrder(v *View, want func(*PromptRecord) bool) []*PromptRecord {
	found := v.which(want)
	sort.Slice(found, func(i, j int) bool { return found[i].CreatedAt.Before(found[j].CreatedAt) })
	return found
}

// payDebts has messages catch up that no session takes care of: of what is over, while its session has ended or has not
// done it in its time. It ends with the polling.
func (r *receiver) payDebts() {
	var owed []*PromptRecord
	var looked <-chan struct{} // closed by the next change of the state since these were looked for
	for r.ctx.Err() == nil {
		r.warn(r.store.Reap(time.Now())) // who has died owes
		found, changed, err := r.store.Owed(looked)
		if err == nil && changed != looked {
			owed = found
			looked = changed
		}
		if err == nil {
			err = r.pay(r.ctx, owed)
		}
		if err == nil {
			err = r.tellFailed()
		}
		pause := debtsEvery
		if err != nil {
			r.warn(err)
			pause = debtsPause
		}
		_ = sleep(r.ctx, pause) // the loop ends with it
	}
}

// tellFailed tells who sent something to a session that was killed before it could do that.
func (r *receiver) tellFailed() error {
	failed, err := r.store.Failed()
	for _, in := range failed {
		if err != nil {
			return err
		}
		ours := strings.HasPrefix(in.UpdateID, r.botID()+":")
		if ours && fromPhone(in.By) {
			_, err = r.Notify(r.ctx, Notice{Text: "✗ " + in.Reason, Ring: true, SessionID: in.SessionID,
				ReplyTo: in.ReplyTo, ThreadID: in.ThreadID})
		}
		if err == nil {
			err = r.store.Told(*in)
		}
	}
	return err
}

// PayDebts does once what this process does while it polls, if it does: who polls next may come days later.
func (t *Telegram) PayDebts(ctx context.Context) error {
	if !t.polling.Load() {
		return nil
	}
	owed, _, err := t.store.Owed(nil)
	if err != nil {
		return err
	}
	return t.pay(ctx, owed)
}

// pay edits the messages of those questions that are not left to their sessions. One that fails keeps no other from it,
// unless all would.
func (t *Telegram) pay(ctx context.Context, owed []*PromptRecord) error {
	select {
	case t.paying <- struct{}{}:
		defer func() { <-t.paying }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var unpaid error
	for _, p := range owed {
		if !t.mustPay(p) {
			continue
		}
		err := t.catchUp(ctx, p.ID, catchUpOptions{due: (*PromptRecord).owes, slow: true})
		failed, ok := err.(*apiError)
		if err != nil && (!ok || failed.trouble(0) != "") {
			return err
		}
		unpaid = cmp.Or(unpaid, err)
	}
	return unpaid
}

// refusedForGood tells that a message cannot be edited, now or later.
func refusedForGood(err error) bool {
	failed, ok := err.(*apiError)
	return ok && failed.Code == http.StatusBadRequest && failed.trouble(0) == ""
}

// mustPay tells that a prompt's own session will not edit its message, and that replaced ones it never does. A dead
// session's prompts are over once it is reaped.
func (t *Telegram) mustPay(p *PromptRecord) bool {
	replacedOnly := p.Open() || p.MsgStatus == p.Status
	if replacedOnly || time.Since(p.At) > debtsPatience {
		return true
	}
	return p.over() && !t.store.Alive(p.SessionID)
}

// beside does something beside the polling, which must end soon after ctx.
func (r *receiver) beside(do func()) {
	r.work.Go(func() {
		defer r.store.catchPanic()
		do()
	})
}

// background is beside for what may fail, and logs its error.
func (r *receiver) background(do func() error) { r.beside(func() { r.warn(do()) }) }

// inTurn is background for replies: they are sent in the order of what they reply to.
func (r *receiver) inTurn(send func() error) {
	before := r.replied
	sent := make(chan struct{})
	r.replied = sent
	r.background(func() error {
		defer close(sent)
		if before != nil {
			<-before // each ends soon after ctx
		}
		return send()
	})
}

// warn logs an error of which nobody else learns.
func (t *Telegram) warn(err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		t.log.Warn("left undone", "error", err)
	}
}

// audit records what happened; where that fails, the store tells.
func (r *receiver) audit(e Event) { r.warn(r.store.audit.Append(e)) }

// reply answers a message of the operator.
func (r *receiver) reply(to *message, text string) {
	r.background(func() error {
		_, err := r.Notify(r.ctx, Notice{Text: text, ReplyTo: to.ID, ThreadID: to.topic()})
		return err
	})
}

// answerCallback answers a tap, once, also where that was the last that this process waited for; alert: in a box that
// must be closed, for nothing was done.
func (r *receiver) answerCallback(q *callbackQuery, text string, alert bool) {
	short := clean(text, 200) // UTF-16 units: https://core.telegram.org/bots/api#answercallbackquery
	params := map[string]any{"callback_query_id": q.ID, "text": short, "show_alert": alert}
	r.background(func() error {
		ctx, cancel := lingering(r.ctx, answerLinger)
		defer cancel()
		return r.call(ctx, "answerCallbackQuery", params, nil)
	})
}

// ---- what an update means ----
// From here on every update is one of the operator's, and is acted on once.

// dispatch handles one update and returns its number, 0 without one. After an error nothing was done, and it must come
// again. What has a member of another shape than documented, which the operator is told where the rest names him, or
// comes from anybody else, counts as handled.
func (r *receiver) dispatch(raw json.RawMessage) (int64, error) {
	var u update
	bad := json.Unmarshal(raw, &u) // the other members stay
	cfg := r.cfg.Load()
	from, ok := admitted(&u, cfg.Users, cfg.ChatID)
	switch {
	case bad != nil && ok && u.Message != nil:
		r.reply(u.Message, "✗ Nothing was done: "+unreadable)
	case bad != nil && ok:
		r.answerCallback(u.Callback, "Nothing was done: "+unreadable, true)
	}
	if bad != nil {
		r.warn(fmt.Errorf("update %d is not acted on: %w", u.ID, bad))
		return u.ID, nil
	}
	if !ok {
		r.auditStranger(&u, from)
		return u.ID, nil
	}
	done, err := r.store.ActedOn(r.bot, u.ID)
	if done {
		return u.ID, nil
	}
	if err == nil {
		err = r.handleUpdate(&u)
	}
	if err != nil && u.Callback != nil {
		r.answerCallback(u.Callback, "The tap could not be recorded, so nothing was done yet; it is tried again.", true)
	}
	return u.ID, err
}

// unreadable is why an update of the operator's is not acted on that is of no documented shape.
const unreadable = "it came in a form that is not known here. Look for a newer atlasbridge."

// turnMinute begins to count anew with every minute, and records how many updates of others it has only counted.
func (r *receiver) turnMinute() {
	minute := time.Now().Unix() / 60
	if minute == r.minute {
		return
	}
	if r.strangers > strangersMax {
		r.audit(Event{Name: "UNAUTHORIZED", Fields: []Field{{"more", r.strangers - strangersMax}}})
	}
	r.minute = minute
	r.strangers = 0
}

// key is the id of an update's record.
func (r *receiver) key(update int64) string { return fmt.Sprintf("%s:%d", r.bot, update) }

// auditStranger records that somebody else wrote, or pressed a button; from may be nil.
func (r *receiver) auditStranger(u *update, from *user) {
	r.strangers++
	if r.strangers <= strangersMax && from != nil {
		fields := append([]Field{{"update_id", u.ID}}, person(from.who(), from.name())...)
		r.audit(Event{Name: "UNAUTHORIZED", Fields: fields})
	}
}

// handleUpdate acts on an update of the operator.
func (r *receiver) handleUpdate(u *update) error {
	v, err := r.store.View()
	if err != nil {
		return err
	}
	if u.Message != nil {
		return r.handleMessage(u.ID, u.Message, v)
	}
	return r.handleCallbackQuery(u.ID, u.Callback, v)
}

// recordUpdate records that an update has been acted on, together with what it led to, nil nothing.
func (r *receiver) recordUpdate(id int64, ledTo Record) error {
	records := []Record{&UpdateRecord{Head: Head{ID: r.key(id)}, Kind: "operator"}}
	if ledTo != nil {
		records = slices.Insert(records, 0, ledTo)
	}
	return r.store.Update(func(v *View) ([]Record, error) {
		if v.Updates[r.key(id)] != nil { // by another process, while this one was stopped
			return nil, nil
		}
		return records, nil
	})
}

// decide gives the store a person's decision, unless it is refused already, and records the update in any case. now is
// the question after that.
func (r *receiver) decide(id int64, from *user, d Decision, why Refusal) (now PromptRecord, _ Refusal, err error) {
	d.By = from.who()
	d.User = from.name()
	d.UpdateID = r.key(id)
	if why == "" {
		now, why, err = r.store.Decide(d, time.Now())
	}
	if err != nil {
		return PromptRecord{}, "", err
	}
	if why != "" {
		fields := append([]Field{{"reason", string(why)}}, person(d.By, d.User)...)
		r.audit(Event{"REPLY_REJECTED", d.SessionID, d.PromptID, fields})
		return now, why, r.recordUpdate(id, nil)
	}
	return now, "", nil
}

// ---- callback queries ----
// A button was pressed.

// handleCallbackQuery decides the question that a button belongs to, or does what the button asks for.
func (r *receiver) handleCallbackQuery(id int64, q *callbackQuery, v *View) error {
	d, p := parseCallbackData(q.Data, v)
	if p != nil && p.Open() && p.hasNonce(d.Nonce) && q.Message.ID > p.MsgID { // its number is not recorded (yet)
		err := r.store.Offered(p.ID, q.Message.ID, q.Message.Date)
		if err == nil {
			p, _, err = r.store.Prompt(p.ID)
		}
		if err != nil {
			return err
		}
	}
	why := Refusal("")
	switch {
	case p == nil:
		why = "this question is not known here. It belongs to another machine or state folder with the same bot, or is " +
			"long over: answer at its terminal"
	case q.Message.ID < p.MsgID && (p.Open() || d.Value == tapAgain): // a newer message is only not recorded yet
		why = "this message is out of date, use the newest one of its question"
	case strings.HasPrefix(d.Value, "~") && (p.Open() || p.Idle):
		if err := r.recordUpdate(id, nil); err != nil {
			return err
		}
		r.handleViewButton(q, *p, d.Value)
		return nil
	case d.Value == tapAgain && p.hasNonce(d.Nonce):
		return r.handleAskAgain(id, q, p, v.Sessions[p.SessionID])
	}
	now, why, err := r.decide(id, q.From, d, why)
	if err != nil {
		return err
	}
	if why == "" {
		r.answerCallback(q, "✓ "+valueName(&now, d.Value), false)
		r.background(func() error { return r.showOnItsWay(now.ID) })
		return nil
	}
	r.answerCallback(q, "Nothing was done: "+string(why), true)
	if r.provesStale(q.Message, d, p, !now.Open()) {
		r.background(func() error { return r.removeButtons(p, q.Message.ID) })
	}
	return nil
}

// parseCallbackData is what a button says, and of which question: nil of none that is known.
func parseCallbackData(data string, v *View) (d Decision, p *PromptRecord) {
	f := strings.SplitN(data, ":", 5)
	if len(f) < 5 || f[0] != "ans" {
		return Decision{}, nil
	}
	d = Decision{PromptID: f[1], SessionID: f[2], Nonce: f[3], Value: strings.TrimPrefix(f[4], tapSubmit)}
	switch d.Value {
	case tapEnter:
		d.Value = enterAlone
	case tapLeave:
		d.Value = leaveIt
	}
	p = v.find(d)
	if p != nil {
		d.SessionID = p.SessionID
		d.PromptID = p.ID
	}
	return d, p
}

// provesStale tells that the tap in vain shows that the message m has buttons which should be gone. p is its question,
// nil where it is not known, and another machine's unless it is old; over: it is over.
func (r *receiver) provesStale(m *message, d Decision, p *PromptRecord, over bool) bool {
	switch {
	case p == nil:
		return time.Since(time.Unix(m.Date, 0)) > questionLife
	case !p.hasNonce(d.Nonce): // forged
		return false
	case m.ID != p.MsgID:
		return m.ID < p.MsgID || over
	case p.shownOpen(): // its edit is on its way, or owed
		return false
	}
	return over && time.Since(p.At) >= tapCrosses // else it may have crossed the edit on its way to the phone
}

// showOnItsWay shows that an answer was taken whose typing takes long; else the session shows the outcome at once.
func (r *receiver) showOnItsWay(id string) error {
	if err := sleep(r.ctx, onItsWayAfter); err != nil {
		return err
	}
	waits := func(p *PromptRecord) bool { return p.Status == ReplyReceived }
	return r.catchUp(r.ctx, id, catchUpOptions{due: waits})
}

// removeButtons has a message lose its buttons: its question, nil where it is not known any more, is over, or has a
// newer message.
func (r *receiver) removeButtons(p *PromptRecord, msg int64) error {
	if p == nil {
		_, err := r.send(r.ctx, buttonsEdit(msg, nil), rankOutcome)
		return err
	}
	if err := r.store.Offered(p.ID, msg, 0); err != nil {
		return err
	}
	return r.catchUp(r.ctx, p.ID, catchUpOptions{})
}

// handleAskAgain has the session ask anew what stands on its screen, where that is still so.
func (r *receiver) handleAskAgain(id int64, q *callbackQuery, p *PromptRecord, s *SessionRecord) error {
	if s == nil || s.Status != "active" || p.Status != Expired {
		r.answerCallback(q, "Nothing was done: there is nothing to ask again", true)
		return r.recordUpdate(id, nil)
	}
	in := newInput(s, "again", q.From, q.Message, r.key(id))
	in.PromptID = p.ID
	if err := r.recordUpdate(id, in); err != nil {
		return err
	}
	r.answerCallback(q, "✓ asking again", false)
	return nil
}

// newInput is something for a session to do, asked in the message m.
func newInput(s *SessionRecord, kind string, from *user, m *message, update string) *InputRecord {
	return &InputRecord{Head: Head{ID: newID()}, SessionID: s.ID, Kind: kind, By: from.who(), User: from.name(),
		ReplyTo: m.ID, ThreadID: m.topic(), UpdateID: update, WrittenAt: time.Now().UTC(), Status: "queued"}
}

// handleViewButton does what a button asks for that decides nothing: ticks a choice, or shows more.
func (r *receiver) handleViewButton(q *callbackQuery, p PromptRecord, value string) {
	r.answerCallback(q, "", false)
	if keys, ok := strings.CutPrefix(value, tapTick); ok {
		ticks := func(w *wantedEdits) {
			w.ticked = strings.Split(keys, ",")
			w.tickedIn = q.Message.ID
		}
		r.background(func() error { return r.catchUp(r.ctx, p.ID, catchUpOptions{want: ticks}) })
		return
	}
	if p.Idle {
		answer := Notice{Text: "the whole answer", Mono: p.Full, SessionID: p.SessionID, Urgent: true}
		r.background(func() error {
			_, err := r.Notify(r.ctx, answer)
			return err
		})
		return
	}
	text := p.Recent
	if value == tapAll {
		text = strings.TrimLeft(p.Far+"\n"+p.region(), "\n")
	}
	r.background(func() error {
		_, err := r.resend(p, text)
		return err
	})
}

// resend sends a question again, below the text, which may be what it asks, in full. The buttons of the new message
// count from then on, those of the one before go.
func (r *receiver) resend(p PromptRecord, text string) (msg int64, err error) {
	ctx, cancel := context.WithDeadline(r.ctx, p.ExpiresAt)
	defer cancel()
	m := r.acquireMessages(p.ID, nil) // what is cleared before the new message stays known behind it
	defer r.releaseMessages(m)
	if text != "" {
		_, err := r.Notify(ctx, Notice{Mono: text, Lang: p.Lang, SessionID: p.SessionID, Urgent: true})
		if err != nil {
			return 0, err // not shown in full, so not to be allowed
		}
		move := catchUpOptions{want: func(w *wantedEdits) { w.cleared = p.MsgID }}
		if err := r.catchUp(ctx, p.ID, move); err != nil {
			return 0, err
		}
	}
	msg, err = r.ask(ctx, p.ID, &SessionRecord{Head: Head{ID: p.SessionID}}, text)
	if msg == 0 {
		return 0, err
	}
	if err != nil {
		_ = r.removeButtons(nil, msg) // nobody would ever edit it; the error to tell is that of the state
		return 0, err
	}
	return msg, r.catchUp(r.ctx, p.ID, catchUpOptions{})
}

// ---- messages and commands ----
// What the operator writes: an answer, text for a session, or a command.

// reCommand is a command for us: a word behind a slash. A path is text; what begins with // is a command of the tool's.
var reCommand = re(`(?i)^/([a-z][\w:.-]*)(@\w+)?(\s|$)`)

// botCommands are what the operator can type, as setMyCommands takes it: what is used most comes first.
var botCommands = []botCommand{
	{"status", "sessions and questions", "sessions"},
	{"screen", "show the screen", "last"},
	{"stop", "interrupt the turn", ""},
	{"keys", "press keys", ""},
	{"send", "text to one session", ""},
	{"switch", "all my text to one session", "claim"},
	{"release", "undo /switch", ""},
	{"cancel", "end the program", ""},
	{"help", "what can be done here", "start"},
}

type botCommand struct {
	Name  string `json:"command"`
	About string `json:"description"`
	also  string // another name for the same
}

// incoming is a message of the operator together with all that decides what it means.
type incoming struct {
	*message
	view     *View
	here     string    // whose numbers messages have
	freeText bool      // questions for text take text
	at       time.Time // the end of the second it was written in, by our clock
	updateID string
}

// intent is what a message asks for: an answer now, or a mark that it is done, and one thing to be done.
type intent struct {
	reply    string
	ours     bool // all of reply
	done     bool
	decision *Decision
	record   Record // an InputRecord, or the MetaRecord with the session that text goes to from now on
}

// handleMessage does what a message asks for and replies when that is recorded.
func (r *receiver) handleMessage(id int64, m *message, v *View) error {
	at := time.Unix(m.Date, 0).Add(time.Second)
	if skew := r.clockSkew(); skew.Abs() > 3*time.Second { // less may be rounding and the network
		at = at.Add(-skew)
	}
	ours, err := r.isForUs(m)
	if err != nil {
		return err
	}
	if !ours {
		return r.recordUpdate(id, nil)
	}
	v.markDead(r.store.Killed)
	in := &incoming{message: m, view: v, here: r.here(), freeText: r.cfg.Load().FreeText, at: at, updateID: r.key(id)}
	want := in.understand()
	if want.decision != nil {
		_, why, err := r.decide(id, m.From, *want.decision, "")
		if err != nil {
			return err
		}
		if why != "" {
			r.reply(m, "✗ Nothing was done: "+string(why))
		}
		return nil
	}
	if err := r.recordUpdate(id, want.record); err != nil {
		return err
	}
	if input, ok := want.record.(*InputRecord); ok && !input.isText() {
		r.auditCommand(input)
	}
	if want.reply != "" || want.done {
		n := Notice{Text: want.reply, ReplyTo: m.ID, ThreadID: m.topic(), Done: want.done, Ours: want.ours}
		r.inTurn(func() error {
			_, err := r.Notify(r.ctx, n)
			return err
		})
	}
	return nil
}

// isForUs reports whether the message is no command for another bot: a group's administrator gets all of them.
func (r *receiver) isForUs(m *message) (bool, error) {
	command := reCommand.FindStringSubmatch(strings.TrimSpace(cleanText(m.Text)))
	if command == nil || command[2] == "" {
		return true, nil
	}
	name := r.botName()
	if name == "" {
		var me user
		if err := r.call(r.ctx, "getMe", struct{}{}, &me); err != nil {
			return false, err
		}
		name = me.Username
		r.noteBot(name)
	}
	return strings.EqualFold(command[2], "@"+name), nil
}

// markDead has sessions count as ended that were killed.
func (v *View) markDead(killed func(session string) bool) {
	for id, s := range v.Sessions {
		if s.Status == "active" && killed(id) {
			dead := *s
			dead.Status = "crashed"
			v.Sessions[id] = &dead
		}
	}
}

// auditCommand records what a session is told to do.
func (r *receiver) auditCommand(input *InputRecord) {
	fields := append([]Field{{"command", input.Kind}}, said("keys", input.Text)...)
	fields = append(fields, person(input.By, input.User)...)
	r.audit(Event{"SESSION_COMMAND", input.SessionID, "", fields})
}

// deleteIt is added where a message is refused that may have a password in it.
const deleteIt = " If your message has a password in it, delete it."

// understand is what the message asks for. Who may have typed a password that is not taken is asked to delete it.
func (in *incoming) understand() intent {
	want := in.meaning()
	replied := in.repliedQuestion()
	asked := in.view.which(func(p *PromptRecord) bool {
		return p.Secret && (p == replied || p.Open() && in.view.active(p.SessionID))
	})
	if strings.HasPrefix(want.reply, "✗") && len(asked) > 0 {
		want.reply += deleteIt
	}
	return want
}

// meaning is what the message asks for. Text that came damaged or too long counts as none.
func (in *incoming) meaning() intent {
	if in.isService() {
		return intent{}
	}
	text := ""
	file := in.file()
	given := in.Text
	if file != nil {
		given = in.Caption
	}
	damaged := len(given) > maxMessage || strings.Contains(given, "\uFFFD")
	if !damaged {
		text = strings.TrimSpace(cleanText(given))
	}
	if file != nil {
		return in.sendFile(file, text)
	}
	if command := reCommand.FindStringSubmatch(text); command != nil {
		return in.command(strings.ToLower(command[1]), strings.TrimSpace(text[len(command[0]):]))
	}
	s, p, refusal := in.target("")
	switch {
	case s == nil:
		return intent{reply: refusal}
	case text == "":
		return intent{reply: "✗ Nothing was done: send it as plain text of up to 4096 bytes, as a photo or as a document."}
	}
	return in.answerOrInput(s, p, text)
}

// file is the photo, as large as there is, or the document that the message brings, nil none.
func (m *message) file() *fileRef {
	if len(m.Photo) > 0 {
		return &m.Photo[len(m.Photo)-1]
	}
	return m.Document
}

// sendFile is a file for a session, with a caption: it answers no question.
func (in *incoming) sendFile(file *fileRef, caption string) intent {
	s, p, refusal := in.target("")
	if s == nil {
		return intent{reply: refusal}
	}
	if p == nil {
		p = in.waitingQuestion(s)
	}
	switch {
	case p != nil && p.Open() && !p.Idle:
		return intent{reply: "✗ Nothing was done: a file answers no question. " + questionOpen}
	case file.Size > maxFile:
		size := fmt.Sprintf("the file has %d MB, %d MB are allowed.", file.Size>>20, maxFile>>20)
		return intent{reply: "✗ Nothing was done: " + size}
	}
	record := newInput(s, "file", in.From, in.message, in.updateID)
	record.Text = caption
	record.File = &FileRef{ID: file.ID, Name: clip(file.Name, 100)}
	return intent{record: record}
}

// command is what a command asks for; those that are not answered from the state are for a session.
func (in *incoming) command(name, line string) intent {
	var names []string
	for _, c := range botCommands {
		names = append(names, c.Name)
		if c.also != "" {
			names = append(names, c.also)
		}
		if name == c.also {
			name = c.Name
		}
	}
	if !slices.Contains(names, name) {
		return intent{reply: "✗ There is no /" + name + " here; /help has the commands. //" + name + " sends /" + name +
			" to the tool."}
	}
	switch name {
	case "help":
		return intent{reply: helpText(), ours: true}
	case "status":
		return intent{reply: in.list(true)}
	case "release":
		return in.claim("")
	}
	return in.sessionCommand(name, line)
}

// helpText says what can be done here, in lines that a phone need not break.
func helpText() string {
	var b strings.Builder
	b.WriteString("Questions come here: tap an answer,\nor reply with text.\n\nOther text goes to the session that\n" +
		"it replies to, or to the only one.\n//word is the tool's own /word.\n")
	for _, c := range botCommands {
		fmt.Fprintf(&b, "\n/%s  %s", c.Name, c.About)
	}
	b.WriteString("\n\nOf several sessions name one:\n/stop 1a2b3c4d")
	return b.String()
}

// sessionCommand is what a command about a session asks for: its name, or none, comes first in the line.
func (in *incoming) sessionCommand(name, line string) intent {
	sid, rest, _ := strings.Cut(line, " ")
	if name == "keys" && isKey(sid) {
		sid = ""
		rest = line
	}
	s, _, refusal := in.target(sid)
	switch {
	case name == "cancel" && sid == "" && in.repliedTo() == nil && in.view.inTopic(in.Chat.ID, in.topic()) == nil:
		return intent{reply: "✗ End which program? Example: /cancel 1a2b3c4d. " + in.list(false)}
	case s == nil && name == "keys" && (sid != "" || line == ""):
		return noKey(sid)
	case s == nil && refusal == "":
		return intent{reply: "✗ Which session? " + in.list(false)}
	case s == nil:
		return intent{reply: refusal}
	}
	switch name {
	case "switch":
		return in.claim(s.ID)
	case "send":
		return in.send(s, strings.TrimSpace(rest))
	case "keys":
		return in.keys(s, rest)
	}
	return in.input(s, name, rest)
}

// send is text for a session that is named; a command in it is the tool's own.
func (in *incoming) send(s *SessionRecord, text string) intent {
	if text == "" {
		return intent{reply: "✗ Send what? Example: /send " + shortID(s.ID) + " go on"}
	}
	if reCommand.MatchString(text) {
		text = "/" + text
	}
	return in.answerOrInput(s, nil, text)
}

// keys are those to press.
func (in *incoming) keys(s *SessionRecord, line string) intent {
	words := strings.Fields(line)
	if len(words) == 0 {
		return noKey("")
	}
	for _, word := range words {
		if !isKey(word) {
			return noKey(word)
		}
	}
	return in.input(s, "keys", line)
}

// noKey says which keys there are, where a word names none, or where there is no word.
func noKey(word string) intent {
	why := "✗ There is no key " + word
	if word == "" {
		why = "✗ Press what? Example: /keys ESC UP"
	}
	return intent{reply: why + ". Keys: CTRL_A … CTRL_Z ENTER ESC TAB " +
		"SHIFT_TAB Y N 1 2 3 SPACE BACKSPACE DELETE UP DOWN LEFT RIGHT PGUP PGDN HOME END"}
}

func isKey(word string) bool {
	_, ok := keyBytes(word, false)
	return ok
}

// claim makes text that is no reply go to this session from now on, "" to none.
func (in *incoming) claim(sid string) intent {
	next := MetaRecord{Head: Head{ID: "telegram"}}
	if old := in.view.Meta["telegram"]; old != nil {
		next = *old
	}
	next.Values = maps.Collect(maps.All(next.Values)) // a copy: the view is read only
	next.Values["claim "+in.From.who()] = sid
	return intent{done: true, record: &next}
}

// input is something for a session to do.
func (in *incoming) input(s *SessionRecord, kind, text string) intent {
	record := newInput(s, kind, in.From, in.message, in.updateID)
	record.Text = text
	record.WrittenAt = in.at.UTC()
	return intent{record: record}
}

// target finds the live session meant, by the first of: the command; the message replied to (then also the question
// asked there); the topic it was written in; where it replies to nothing, the claim, or being the only one. Else it
// refuses: it never guesses. No refusal: people talking in a group.
func (in *incoming) target(sid string) (s *SessionRecord, p *PromptRecord, refusal string) {
	id := strings.ToLower(sid)
	if sid == "" {
		p = in.repliedQuestion()
		id = in.impliedSession(p)
	}
	if sid == "" && in.repliesElsewhere() {
		return nil, nil, "✗ Nothing was done: you replied to something that is no message of this chat."
	}
	private := in.Chat.ID > 0
	var found []*SessionRecord
	var ended *SessionRecord // the last one
	for _, s := range in.view.Sessions {
		named := id != "" && strings.HasPrefix(s.ID, id) || sid != "" && s.Label == sid
		candidate := id == "" && in.repliedTo() == nil && private
		switch {
		case s.Status == "active" && (named || candidate):
			found = append(found, s)
		case named && (ended == nil || s.StartedAt.After(ended.StartedAt)):
			ended = s
		}
	}
	switch {
	case len(found) == 1:
		s = found[0]
	case len(found) == 0 && ended != nil:
		return nil, nil, "✗ Nothing was sent: " + origin(ended) + " has ended. " + in.list(false)
	case len(found) > 1 && sid != "":
		return nil, nil, "✗ " + sid + " names several sessions. " + in.list(false)
	case sid != "":
		return nil, nil, "✗ There is no session " + sid + ". " + in.list(false)
	case private:
		return nil, nil, "✗ Which session? Reply to one of its messages, or /switch SID. " + in.list(false)
	default:
		return nil, nil, ""
	}
	if in.at.Before(s.StartedAt) {
		return nil, nil, "✗ Nothing was sent: you wrote that before " + origin(s) + " began."
	}
	return s, p, ""
}

// repliedQuestion is the question that the message replies to, nil: none. A message whose number is not recorded, for
// the answer of Telegram is late or was lost, is known by its buttons.
func (in *incoming) repliedQuestion() *PromptRecord {
	to := in.repliedTo()
	if to == nil || to.ID == 0 {
		return nil
	}
	for _, p := range in.view.Prompts {
		if !p.elsewhere(in.here) && (p.MsgID == to.ID || slices.Contains(p.OldMsgIDs, to.ID)) {
			return p
		}
	}
	if !in.repliesToBot() {
		return nil
	}
	for _, b := range slices.Concat(to.Markup.Rows...) {
		d, p := parseCallbackData(b.Data, in.view)
		if p != nil && p.hasNonce(d.Nonce) {
			return p
		}
	}
	return nil
}

// impliedSession is the id of the session that the message is about, or the beginning of it: that of the question
// replied to, the one that the message replied to names or was for, the one whose topic it is in, the one claimed where
// it replies to nothing; "" where nothing tells.
func (in *incoming) impliedSession(p *PromptRecord) string {
	if p != nil {
		return p.SessionID
	}
	to := in.repliedTo()
	if in.repliesToBot() {
		if mark := sessionMark.FindStringSubmatch(cmp.Or(to.Text, to.Caption)); mark != nil {
			return mark[1]
		}
	}
	s := in.view.inTopic(in.Chat.ID, in.topic())
	m := in.view.Meta["telegram"]
	switch {
	case s != nil:
		return s.ID
	case to == nil && m != nil:
		claimed := m.Values["claim "+in.From.who()]
		if in.view.active(claimed) {
			return claimed
		}
	}
	return ""
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

// repliesElsewhere reports whether the message replies to what is no message of this chat, such as a story.
func (m *message) repliesElsewhere() bool {
	return m.ReplyTo == nil && len(m.ExternalReply)+len(m.Quote)+len(m.ReplyToStory) > 0
}

// repliesToBot tells whether it replies to a message of ours: only a bot in the chat can be that.
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
		if in.doubtful(s, p, text) {
			return intent{reply: "✗ Nothing was done: it is not sure which question you mean. " +
				"Reply to the question's own message, or send it again."}
		}
	}
	if p == nil || p.Idle {
		return in.input(s, "text", text)
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
	return intent{decision: &Decision{PromptID: p.ID, SessionID: s.ID, Nonce: p.Nonce, Value: text}}
}

// Of a text that replies to nothing.
const (
	textAfter   = 2               // seconds, by Telegram's clock, that its question must have been there
	textCrosses = 5 * time.Second // that what is over may be meant: the same, where the clocks are 3 s apart
)

// doubtful reports whether a text for the session that replies to nothing may not be meant for p, the question that
// waits there now, nil none: that had only just been sent, or another had just ended. Other sessions count when they
// are over: those that are not would have to be named. Who has answered the other one did not mean it again, unless p
// waits, or the text is an answer to it.
func (in *incoming) doubtful(s *SessionRecord, p *PromptRecord, text string) bool {
	waits := p != nil && !p.Idle
	if waits && (p.MsgDate == 0 || in.Date < p.MsgDate+textAfter) {
		return true
	}
	for _, other := range in.view.Prompts {
		here := other.SessionID == s.ID || !in.view.active(other.SessionID)
		asked := !other.Idle && (other.MsgID != 0 || other.Chat != "")
		own := !waits && other.DecidedBy != nil && *other.DecidedBy == in.From.who() &&
			!other.takesText() && other.named(text) == ""
		if other == p || !here || !asked || own {
			continue
		}
		over := *cmp.Or(other.DecidedAt, &other.At)
		if other.Open() || over.After(in.at.Add(-textCrosses)) {
			return true
		}
	}
	return false
}

// waitingQuestion is the session's question in this chat that waits for an answer, nil: none does. One whose message is
// only not recorded does, too.
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

// refusal tells why text cannot answer the question, "" where it can. keys are the answers that it names; replied: it
// is a reply to the question's own message.
func (in *incoming) refusal(p *PromptRecord, keys string, replied bool) string {
	switch {
	case !replied && in.repliesToBot(): // it may be about another question
		return "✗ Nothing was done: you replied to another message. Reply to the open question's own."
	case p.Secret:
		return "✗ Nothing was typed: a password is typed at the keyboard."
	case keys != "", p.takesReply() && replied:
		return ""
	case p.takesKeys(), p.takesReply() && !in.freeText:
		return "✗ Nothing was typed: it is not sure that something is asked. Reply to its own message to type there."
	case p.Type == FreeText && !in.freeText:
		return "✗ Nothing was typed: text from here is switched off (free_text_enabled)."
	case p.Permission && !replied:
		return "✗ Nothing was done: a permission is asked for. Tap a button, or reply to it to refuse."
	}
	return ""
}

// list names what runs; more: also what waits, and the audit log's head to witness.
func (in *incoming) list(more bool) string {
	var lines []string
	for _, s := range in.view.Sessions {
		if s.Status != "active" {
			continue
		}
		line := "\n• " + origin(s) + " " + strings.ReplaceAll(cmp.Or(s.Activity, "running"), "_", " ")
		if more {
			line += in.openQuestions(s)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	if a := in.view.Meta["audit"]; more && a != nil {
		lines = append(lines, fmt.Sprintf("\nAudit log: %d %s\nListening: process %d", a.Seq, a.Hash, os.Getpid()))
	}
	if len(lines) == 0 {
		return "Running: nothing"
	}
	return "Running:" + strings.Join(lines, "")
}

// openQuestions are a session's open questions, two lines each.
func (in *incoming) openQuestions(s *SessionRecord) string {
	open := inOrder(in.view, func(p *PromptRecord) bool { return p.SessionID == s.ID && p.Open() && !p.Idle })
	var b strings.Builder
	for _, p := range open {
		until := clock(p.ExpiresAt)
		fmt.Fprintf(&b, "\n   ❓ %s\n   until %s, then %s", oneLine(clean(p.Question, 100)), until, afterwards(p))
	}
	return b.String()
}

// ---- setup ----
// `atlasbridge setup`: token, who the operator is, config.toml, a test. What is there is asked of Telegram first: what
// fits stays, what does not is asked for again, and what only the environment says is never stored.

var (
	telegramTable = re(`(?m)^[ \t]*\[[ \t]*telegram[ \t]*\].*\n`) // the keys are only in this one
	telegramKey   = re(`(?m)^([ \t]*(bot_token|chat_id|allowed_users|api_base)[ \t]*=[ \t]*)` + tomlValue + `(.*\n)`)
)

// Keys of what setup finds out.
const (
	tokenKey = "telegram.bot_token"
	chatKey  = "telegram.chat_id"
	usersKey = "telegram.allowed_users"
	baseKey  = "telegram.api_base"
)

// A session that has trouble with the bot does not listen between its tries.
const (
	pollSoon    = 20 * time.Second      // one request may take 15
	pollBetween = 50 * time.Millisecond // the lock is tried so often
)

// setup is one run of the command.
type setup struct {
	*command
	*Telegram
	cfg    *Config
	name   string          // the bot's
	broken map[string]bool // keys that are of no use in config.toml
	saved  bool
}

// cmdSetup shows nothing that is typed meanwhile, and leaves none of it for the shell: it may be the token.
func cmdSetup(c *command) int {
	ctx, quit := context.WithCancelCause(c.ctx)
	defer quit(nil)
	release := catchSignals(quit)
	defer release()
	c.ctx = ctx
	show, err := muteEcho(c.stdin)
	if err == nil {
		defer func() { _ = errors.Join(dropTyped(c.stdin), show()) }() // a terminal that has gone shows nothing
	}
	return c.withState(func(st *Store) int {
		s := &setup{command: c, Telegram: &Telegram{store: st}, broken: map[string]bool{}}
		err := s.run()
		end, ok := errors.AsType[*stopped](err)
		if !ok {
			if err != nil {
				return c.fail(err)
			}
			return 0
		}
		s.say("")
		changed := "config.toml is as it was"
		if s.saved {
			changed = "config.toml is written, but was not tried: `atlasbridge doctor` checks it"
		}
		fmt.Fprintf(c.stderr, "atlasbridge: setup was ended; %s\n", changed)
		return 128 + int(end.sig)
	})
}

// run takes the steps.
func (s *setup) run() error {
	for _, step := range []func() error{s.configure, s.listen, s.connect, s.removeWebhook, s.pair, s.save, s.test} {
		err := step()
		if s.ctx.Err() != nil {
			return context.Cause(s.ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *setup) say(format string, args ...any) {
	fmt.Fprint(s.stdout, s.folded(fmt.Sprintf(format+"\n", args...)))
}

// configure reads the file, the environment and the flags. What of the bot's settings in the file cannot be used counts
// as not there.
func (s *setup) configure() error {
	dir, err := s.stateDir()
	if err != nil {
		return err
	}
	flags := map[string]string{
		"channel": "local", // so that nothing need be complete yet
		chatKey:   s.opts.text("chat-id"),
		usersKey:  s.opts.text("user-id"),
		baseKey:   s.opts.text("api-base"),
	}
	file := s.opts.text("token-file")
	if file != "" {
		token, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		flags[tokenKey] = strings.TrimSpace(string(token))
	}
	s.cfg = newConfig(dir)
	s.cfg.mend = func(key string, problem error) bool {
		ours := strings.HasPrefix(key, "telegram.")
		if ours {
			s.broken[key] = true
			s.say("%v", problem)
		}
		return ours
	}
	err = s.cfg.load(s.getenv, flags)
	for _, ignored := range s.cfg.ignored {
		s.command.warn(ignored)
	}
	return err
}

// listen makes sure that no session listens to the bot until the store is closed. One that has trouble with the bot
// is between two tries soon: to end the trouble is what setup is for.
func (s *setup) listen() error {
	for end := time.Now().Add(pollSoon); ; {
		held, err := s.store.TryPoll()
		if held || err != nil {
			return err
		}
		if s.store.ChannelTrouble() == "" || time.Now().After(end) {
			err := fmt.Errorf("process %d listens to the bot: a session, or another setup", s.store.holder("poll.lock"))
			return hinted(err, "end it, then run atlasbridge setup again")
		}
		if err := sleep(s.ctx, pollBetween); err != nil {
			return err
		}
	}
}

// connect finds a token that Telegram takes.
func (s *setup) connect() error {
	for {
		if s.cfg.Token == "" {
			if err := s.askToken(); err != nil {
				return err
			}
		}
		s.Telegram = newTelegram(s.cfg, s.store, nil)
		var me user
		err := s.call(s.ctx, "getMe", struct{}{}, &me)
		if err == nil {
			s.name = me.Username
			s.say("Bot: @%s", s.name)
			return nil
		}
		if !err.(*apiError).refusesToken() {
			return explained(err)
		}
		if err := s.discard(tokenKey, explained(err)); err != nil {
			return err
		}
		s.cfg.Token = ""
	}
}

// discard says what is wrong with a setting that is to be found anew. It is an error where another one in config.toml
// would not count.
func (s *setup) discard(key string, problem error) error {
	from := s.cfg.row(key).Origin
	switch {
	case !s.stores(key):
		todo := "correct or unset it, then run atlasbridge setup again: it counts more than config.toml"
		return hinted(fmt.Errorf("%s: %s", from, problem), todo)
	case key == tokenKey && (from == "flag" || !onTerminal(s.stdin)):
		return &hintedError{problem, "give another one with --token-file, or run atlasbridge setup in a terminal"}
	case from == "flag":
		return problem
	}
	s.say("%v", problem)
	return nil
}

// askToken asks for a token until something that looks like one is typed.
func (s *setup) askToken() error {
	if !onTerminal(s.stdin) {
		return errors.New("no bot token: use --token-file FILE (/dev/stdin will do) or TELEGRAM_BOT_TOKEN")
	}
	const here = "here" // asked for before
	row := s.cfg.row(tokenKey)
	if row.Origin != here {
		s.say("Make a bot with @BotFather in Telegram\n(/newbot), or /mybots shows its token.")
	}
	row.Origin = here
	for {
		token, err := s.ask("Paste the token here (it is not shown): ")
		if err != nil {
			return err
		}
		row.Value = quoted(token)
		if token != "" && row.assign(s.cfg) == nil {
			return nil
		}
		s.say("That is no token: it looks like\n123456789:AAExample-of_35_letters")
	}
}

// ask gives the next line that is typed.
func (s *setup) ask(question string) (string, error) {
	fmt.Fprint(s.stdout, s.folded(question))
	type answer struct {
		line string
		err  error
	}
	typed := make(chan answer, 1)
	go func() { // ends with the process, where nothing is typed any more
		line, err := readLine(s.stdin)
		typed <- answer{line, err}
	}()
	select {
	case a := <-typed:
		s.say("")
		if a.err != nil {
			return "", hinted(errors.New("nothing was typed"), "run atlasbridge setup again")
		}
		return strings.TrimSpace(a.line), nil
	case <-s.ctx.Done():
		return "", context.Cause(s.ctx)
	}
}

// readLine reads a line and nothing beyond it. At the end of the input it is an error to have nothing.
func readLine(f *os.File) (string, error) {
	var line []byte
	for b := make([]byte, 1); b[0] != '\n'; {
		_, err := f.Read(b)
		if err != nil && len(line) == 0 {
			return "", err
		}
		if err != nil {
			break
		}
		line = append(line, b[0])
	}
	return string(line), nil
}

// agreed asks for a yes. Nothing that was typed before is one.
func (s *setup) agreed(question string) (bool, error) {
	if err := dropTyped(s.stdin); err != nil {
		return false, nil
	}
	answer, err := s.ask(question + " [y/N] ")
	answer = strings.ToLower(answer)
	return answer == "y" || answer == "yes", err
}

// removeWebhook makes sure that the bot's messages do not go elsewhere.
func (s *setup) removeWebhook() error {
	set, err := s.webhook(s.ctx)
	if !set || err != nil {
		return explained(err)
	}
	yes, err := s.agreed("A webhook is set: the bot's messages go elsewhere. Remove it?")
	if err != nil {
		return err
	}
	if !yes {
		return hinted(errors.New("a webhook is set for this bot, so it cannot be polled"),
			"give AtlasBridge a bot of its own; or run atlasbridge setup in a terminal and say y, or call the Bot "+
				"API's deleteWebhook")
	}
	return s.call(s.ctx, "deleteWebhook", struct{}{}, nil)
}

// pair learns who the operator is, unless what is configured fits.
func (s *setup) pair() error {
	for {
		known, err := s.complete()
		if err != nil {
			return err
		}
		if known {
			chat, err := s.reach(s.ctx)
			if err == nil {
				s.say("Chat %d (%s), allowed users %v", s.cfg.ChatID, chat, s.cfg.Users)
				return nil
			}
			if err.(*apiError).temporary() {
				return explained(err)
			}
			if err := s.discard(chatKey, explained(err)); err != nil {
				return err
			}
		}
		if err := s.awaitCode(); err != nil {
			return err
		}
	}
}

// complete makes chat and users go together, where one of them decides the other: known tells that it did. A private
// chat is one person's, and only who is in it can answer there.
func (s *setup) complete() (known bool, err error) {
	c := s.cfg
	switch {
	case len(c.Users) == 0 && c.ChatID > 0:
		c.Users = []int64{c.ChatID}
	case len(c.Users) == 0:
		return false, nil
	case c.ChatID == 0:
		c.ChatID = c.Users[0]
	}
	if c.ChatID < 0 || slices.Contains(c.Users, c.ChatID) {
		return true, nil
	}
	chatGiven, usersGiven := s.given(chatKey), s.given(usersKey)
	problem := fmt.Errorf("chat %d is the private chat of none of the users %v", c.ChatID, c.Users)
	switch {
	case chatGiven && usersGiven:
		return false, hinted(problem, "a private chat has the number of its user: give only one of them")
	case usersGiven:
		c.ChatID = c.Users[0]
	case chatGiven:
		c.Users = []int64{c.ChatID}
	default:
		s.say("%v", problem)
		return false, nil
	}
	return true, nil
}

// given tells that a setting comes from a flag or the environment, and not from config.toml or the phone.
func (s *setup) given(key string) bool {
	return !s.stores(key) || s.cfg.row(key).Origin == "flag"
}

// codeTries is how many wrong codes may come: it is short, for it is typed by hand.
const codeTries = 5

// reCode is a code that somebody may have typed.
var reCode = re(`^[0-9a-f]{8}$`)

// awaitCode waits for who sends the code: they have seen this terminal, where they are then trusted by a yes, so that
// no stranger gets in by a guess, nor by a careless yes. Where the users are given it is one of them.
func (s *setup) awaitCode() error {
	if !s.given(usersKey) && !onTerminal(s.stdin) {
		return hinted(errors.New("without a terminal nobody can be asked who may answer"),
			"give --user-id ID; or run atlasbridge setup in a terminal")
	}
	link := newNonce()
	code := newNonce()[:8]
	s.say("Open https://t.me/%s?start=%s\nand tap Start.\nOr send it the code:  %s\n(in a group: /start %s)", s.name, link,
		code, code)
	wrong := 0
	var sender *user
	err := s.await(func(u *update) bool {
		m := u.Message
		if m == nil || m.From == nil {
			return false
		}
		from, ok := admitted(u, []int64{m.From.ID}, m.Chat.ID)
		if !ok {
			return false
		}
		name := from.Name
		if from.Username != "" {
			name += " (@" + from.Username + ")"
		}
		s.say("\n%s, user %d, %s chat %d", clip(visible(name), 80), from.ID, m.Chat.Type, m.Chat.ID)
		said := codeIn(m.Text, s.name)
		switch {
		case said == link, said == code && wrong < codeTries:
		case reCode.MatchString(said):
			wrong++
			if wrong == codeTries {
				s.say("%d wrong codes came: only the link counts now.", wrong)
			}
			return false
		default:
			s.say("If that is you, send the code.")
			return false
		}
		if s.given(usersKey) && !slices.Contains(s.cfg.Users, from.ID) {
			s.say("That is none of the users %v.", s.cfg.Users)
			return false
		}
		s.cfg.ChatID = m.Chat.ID
		sender = from
		return true
	})
	if err != nil {
		return err
	}
	s.cfg.row(chatKey).Origin = "the phone"
	if s.given(usersKey) {
		return nil
	}
	yes, err := s.agreed("Is that you? Who is trusted here can type into your terminal.")
	if err == nil && !yes {
		err = hinted(errors.New("nobody was trusted"), "run atlasbridge setup again: it makes a new code")
	}
	s.cfg.Users = []int64{sender.ID}
	s.cfg.row(usersKey).Origin = "the phone"
	return err
}

// codeIn is what a message says for the code: all of it, or what Telegram sends for the link: /start and the code, in a
// group with the bot's name. "" of more words.
func codeIn(text, bot string) string {
	words := strings.Fields(strings.ToLower(text))
	if len(words) == 2 && (words[0] == "/start" || words[0] == "/start@"+strings.ToLower(bot)) {
		words = words[1:]
	}
	if len(words) != 1 {
		return ""
	}
	return words[0]
}

// save writes the bot and the operator into config.toml, which keeps every other line as it is.
func (s *setup) save() error {
	path := filepath.Join(s.cfg.Dir, "config.toml")
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	text := withTelegram(string(old), s.found(), s.broken)
	if text != string(old) {
		if err := replacePrivate(path, []byte(text)); err != nil {
			return err
		}
	}
	s.saved = true
	now, err := s.config(nil)
	if err != nil {
		return err
	}
	if now.Channel != "telegram" {
		s.say("%s: channel is %s: until that is removed no question goes to Telegram", now.row("channel").Origin, now.Channel)
	}
	s.works("poll")
	s.works("send")
	s.noteBot(s.name)
	v, err := s.store.View()
	for id, running := range v.Sessions {
		if running.Status == "active" && s.store.Alive(id) {
			s.say("%s goes on with this after kill -HUP %d, or started anew", origin(running), running.Wrapper)
		}
	}
	return err
}

// found is what config.toml is to say of the bot; what is zero stays as it is there.
func (s *setup) found() *Config {
	c := &Config{}
	if s.stores(tokenKey) {
		c.Token = s.cfg.Token
	}
	if s.stores(chatKey) {
		c.ChatID = s.cfg.ChatID
	}
	if s.stores(usersKey) {
		c.Users = s.cfg.Users
	}
	if s.stores(baseKey) && s.cfg.row(baseKey).Origin != "default" {
		c.APIBase = s.cfg.APIBase
	}
	return c
}

// stores tells whether config.toml is to have a setting: what the environment says is its own.
func (s *setup) stores(key string) bool {
	return !strings.HasPrefix(s.cfg.row(key).Origin, "environment ")
}

// withTelegram is the text of config.toml with those settings of the bot that c has, and without those to drop. What
// stands behind a value stays.
func withTelegram(text string, c *Config, drop map[string]bool) string {
	values := map[string]string{}
	if c.Token != "" {
		values["bot_token"] = fmt.Sprintf("%q", c.Token)
	}
	if c.ChatID != 0 {
		values["chat_id"] = fmt.Sprint(c.ChatID)
	}
	if len(c.Users) > 0 {
		values["allowed_users"] = strings.ReplaceAll(fmt.Sprint(c.Users), " ", ", ")
	}
	if c.APIBase != "" {
		values["api_base"] = fmt.Sprintf("%q", c.APIBase)
	}
	text = strings.TrimRight(text, "\n") + "\n"
	text = telegramKey.expr().ReplaceAllStringFunc(text, func(line string) string {
		m := telegramKey.FindStringSubmatch(line)
		value := values[m[2]]
		delete(values, m[2])
		switch {
		case value != "":
			return m[1] + value + m[4]
		case drop["telegram."+m[2]]:
			return ""
		}
		return line
	})
	if len(values) > 0 && !telegramTable.MatchString(text) {
		text += "\n[telegram]\n"
	}
	lines := ""
	for _, name := range []string{"bot_token", "chat_id", "allowed_users", "api_base"} {
		if values[name] != "" {
			lines += name + " = " + values[name] + "\n"
		}
	}
	at := 0
	if lines != "" {
		at = telegramTable.expr().FindStringIndex(text)[1]
	}
	return strings.TrimLeft(text[:at]+lines+text[at:], "\n")
}

// test sends a message with a button, which must be pressed, and then says that it was.
func (s *setup) test() error {
	if s.opts.on("no-test") {
		return nil
	}
	text := &richText{text: "AtlasBridge is connected. Press the button to finish the setup."}
	works := button{Text: "✅ It works", Data: "setup:" + newNonce()}
	msg, err := s.send(s.ctx, text.outgoing(0, [][]button{{works}}), rankQuestion)
	if err != nil {
		return hinted(err, "press Start in the bot's chat, then run atlasbridge setup again")
	}
	s.say("A test message was sent: press its button.")
	err = s.await(func(u *update) bool {
		_, ok := admitted(u, s.cfg.Users, s.cfg.ChatID)
		if !ok || u.Callback == nil || u.Callback.Data != works.Data {
			return false
		}
		params := map[string]any{"callback_query_id": u.Callback.ID}
		_ = s.call(s.ctx, "answerCallbackQuery", params, nil) // for looks: the button was pressed
		return true
	})
	if err != nil {
		return err
	}
	text = &richText{text: "✅ AtlasBridge is connected: its questions come here."}
	_, _ = s.send(s.ctx, text.outgoing(msg, nil), rankRest) // for looks, too
	s.say("\nIt works. Now: atlasbridge run claude")
	return nil
}

// await polls until an update is the one awaited and confirms it, with all before; it prints a dot for every round.
func (s *setup) await(awaited func(*update) bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Minute)
	defer cancel()
	params := &pollParams{Allowed: []string{"message", "callback_query"}, Timeout: 10}
	for ctx.Err() == nil {
		var updates []update
		pause := time.Second
		err := s.call(ctx, "getUpdates", params, &updates)
		if err != nil {
			failed := err.(*apiError)
			if !failed.temporary() {
				return explained(failed)
			}
			pause = max(pause, failed.retryAfter())
			updates = nil
		}
		for _, u := range updates {
			params.Offset = u.ID + 1
			if awaited(&u) {
				return s.call(ctx, "getUpdates", &pollParams{Offset: params.Offset}, nil)
			}
		}
		fmt.Fprint(s.stdout, ".")
		_ = sleep(ctx, pause) // the loop ends with it
	}
	return hinted(errors.New("nothing came within 10 minutes"), "run atlasbridge setup again: it makes a new code")
}
