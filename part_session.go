package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

/* ===== The session: one run of a tool ===== */

// A session's goroutines, each with one owner of its data and a written end:
//
//	loop      Screen, Detector, the question in force, the gate, all queues   child gone and output drained
//	reader    PTY.Read, the host's stdout                                      EOF of the PTY
//	writer    PTY.Write                                                        its channel is closed
//	keyboard  the host's stdin                                                 with the process
//	waiter    PTY.Wait                                                         child gone
//	follower  its position in state.jsonl                                      context
//	sender    the channel to the phone                                         its channel is closed
//	poller    getUpdates, while this process holds the poll lock               context
//
// The loop only selects: no network, no PTY write, no sleep. Appends to the store are the exception; each
// costs one fsync. Output reaches the host before anything looks at it.

const (
	joinWindow    = 400 * time.Millisecond // hook and dialog come within 0.2 s of each other (measured on claude 2.1)
	hookGrace     = 2 * time.Second        // for a waiting hook to take its decision before the gate types it instead
	keyGrace      = 300 * time.Millisecond // after a key at the keyboard, for the screen to show what it did
	followTime    = time.Second            // for the screen to follow one key of the gate
	submitTime    = 3 * time.Second        // for a text to leave the input box after Enter
	reapEvery     = time.Minute            // between looks for sessions that died
	drainSend     = 3 * time.Second        // for the last messages, at the end of a session
	drainStream   = 10 * time.Minute       // the same with --stream: the output was asked for in full
	maxTyped      = 64 << 10               // bytes waiting to be written to the child before the keyboard has to wait
	maxUnread     = 1 << 20                // bytes the screen may lag behind the host before the reader has to wait
	maxBacklog    = 4 << 20                // bytes of --stream text waiting for the phone before the oldest is left out
	activityEvery = time.Second            // between records of what the session is doing
)

// session is what the loop owns.
type session struct {
	cfg     *Config
	st      *Store
	ch      Channel
	tg      *Telegram // nil without Telegram
	log     *slog.Logger
	quiet   bool // --quiet
	adapter *Adapter
	hooked  bool // the tool's hooks call `atlasbridge hook`

	in, out     *os.File
	errOut      *os.File
	tty         *os.File // the host's terminal, nil when there is none
	interactive bool     // stdin is a terminal: somebody may type
	restore     func() error

	argv []string
	pty  PTY
	det  *Detector
	rec  SessionRecord
	cast *castWriter

	seen    *Prompt     // what the detector last found, until it is gone
	q       *question   // in force
	queued  []*question // hooks' questions behind it
	gate    *gate
	lastKey time.Time
	answer  string // beginning of the tool's last answer, for the idle notice

	typing   []byte // to the writer
	inFlight bool   // the writer has a chunk it has not reported
	outgoing []job  // to the sender, most urgent first
	sending  bool
	stream   stream

	signals      chan os.Signal
	activity     string
	activityAt   time.Time
	touched      time.Time
	reapAt       time.Time
	exit         *int
	hungUp       bool
	troubleShown string
	open         atomic.Bool // a question is open: the follower looks more often
}

// question is the prompt in force, and what is known of it beyond its record.
type question struct {
	rec     PromptRecord // Status "" until it is stored
	screen  *Prompt      // nil: only a hook asked
	joinBy  time.Time    // until then the tool's hook may still bring the exact arguments
	routeAt time.Time    // presence: not to the phone before
	hookBy  time.Time    // decided through the hook: the gate types it if nothing happened by then
	remind  time.Time    // when the time left is shown anew
	typed   bool         // keys went to the child since it appeared
}

// job is one thing for the sender; less is more urgent.
type job struct {
	kind    jobKind
	prompt  PromptRecord
	session SessionRecord // the prompt's
	notice  Notice
}

type jobKind int

const (
	jobAsk jobKind = iota
	jobSettle
	jobNotice
	jobStream
)

// sent is what became of a job.
type sent struct {
	job job
	id  int64
	err error
}

// feed hands the child's bytes from the reader to the loop, in order. Bounded: the reader waits, nothing is
// dropped. mu guards buf and spare.
type feed struct {
	mu         sync.Mutex
	room       *sync.Cond
	buf, spare []byte
	ready      chan struct{} // capacity 1: buf is not empty
	ended      chan struct{} // closed after the last put
}

func newFeed() *feed {
	f := &feed{ready: make(chan struct{}, 1), ended: make(chan struct{})}
	f.room = sync.NewCond(&f.mu)
	return f
}

func (f *feed) put(p []byte) {
	f.mu.Lock()
	for len(f.buf) > maxUnread {
		f.room.Wait()
	}
	f.buf = append(f.buf, p...)
	f.mu.Unlock()
	select {
	case f.ready <- struct{}{}:
	default:
	}
}

// take returns what has come; the slice is good until the next take.
func (f *feed) take() []byte {
	f.mu.Lock()
	p := f.buf
	f.buf, f.spare = f.spare[:0], p
	f.mu.Unlock()
	f.room.Signal()
	return p
}

// cmdRun is `atlasbridge run [flags] tool [args…]`.
func cmdRun(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s, err := prepareSession(c, o)
	if err != nil {
		c.fail(err)
		return exitCodeOf(err)
	}
	return s.run(c.ctx)
}

// exitCodeOf is what a shell would exit with when it cannot run a program, and 125 for failures of our own.
func exitCodeOf(err error) int {
	switch {
	case errors.Is(err, errNoTool):
		return 127
	case errors.Is(err, fs.ErrPermission) && strings.HasPrefix(err.Error(), "starting "):
		return 126
	}
	return exitInternal
}

// prepareSession does everything that can fail before anything is spawned.
func prepareSession(c *command, o *options) (*session, error) {
	argv, settings := o.args, map[string]string{}
	if o.given("channel") {
		settings["channel"] = o.text("channel")
	}
	if o.on("stream") {
		settings["stream.enabled"] = "true"
	}
	if o.given("timeout") {
		life, _ := time.ParseDuration(o.text("timeout"))
		seconds := strconv.Itoa(int(life / time.Second))
		settings["timeout_seconds"], settings["permission_timeout_seconds"] = seconds, seconds
	}
	cfg, err := c.config(settings)
	if err != nil {
		return nil, err
	}
	name := cmp.Or(o.text("adapter"), filepath.Base(argv[0]))
	adapter := adapterFor(name)
	if o.given("adapter") && adapter.Name == "generic" && name != "generic" {
		return nil, hinted(fmt.Errorf("no adapter is called %q", name), "`atlasbridge adapters` lists them")
	}
	if _, err := findTool(argv[0]); err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	log, _, err := openLog(cfg.Dir, cfg.LogLevel)
	if err != nil {
		return nil, err
	}
	st, err := openStore(cfg.Dir)
	if err != nil {
		return nil, err
	}
	s := &session{argv: argv, cfg: cfg, st: st, ch: localChannel{}, log: log, quiet: o.on("quiet"), adapter: adapter,
		in: c.stdin, out: c.stdout, errOut: c.stderr, restore: func() error { return nil }}
	if cfg.Channel == "telegram" {
		if s.tg, err = newTelegram(cfg, st, log); err != nil {
			return nil, err
		}
		s.ch = s.tg
	}
	cwd, _ := os.Getwd()
	s.rec = SessionRecord{Head: Head{Rec: "session", ID: newID()}, Tool: filepath.Base(argv[0]), Args: argv[1:], Cwd: cwd,
		Wrapper: os.Getpid(), Label: o.text("name"), Status: "active", Activity: "starting", StartedAt: time.Now().UTC()}
	for _, file := range []*os.File{s.in, s.out, s.errOut} {
		if s.tty == nil && onTerminal(file) {
			s.tty = file
		}
	}
	s.interactive = onTerminal(s.in)
	if o.given("record") {
		if s.cast, err = newCast(o.text("record"), s.rec.Tool, s.size()); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// size is the host's, or 30 × 100 without one.
func (s *session) size() Size {
	if s.tty != nil {
		if size, err := terminalSize(s.tty); err == nil && size.Rows > 0 && size.Cols > 0 {
			return size
		}
	}
	return Size{Rows: 30, Cols: 100}
}

// say prints a line of our own on the terminal, before the tool starts or after it ended.
func (s *session) say(format string, args ...any) {
	if !s.quiet {
		fmt.Fprintf(s.errOut, "atlasbridge: "+format+"\n", args...)
	}
}

// run spawns the tool and returns its exit code.
func (s *session) run(ctx context.Context) int {
	release, err := s.st.HoldSession(s.rec.ID)
	if err != nil {
		s.say("%v", err)
		return exitInternal
	}
	defer release()
	if s.tg == nil {
		s.say("no Telegram here: questions wait for the keyboard or `atlasbridge answer` (see `atlasbridge setup`)")
	}
	if s.adapter.Name == "generic" {
		s.log.Info("no adapter of its own: tool calls are not intercepted", "tool", s.rec.Tool)
	}
	argv, err := s.installHooks(s.argv)
	if err != nil {
		s.say("%v", err)
		return exitInternal
	}
	size := s.size()
	s.pty, err = startPTY(argv, childEnv(os.Environ(), s.cfg, s.rec.ID), s.rec.Cwd, size, s.tty)
	if err != nil {
		s.say("%v", err)
		return exitCodeOf(err)
	}
	if s.interactive { // nothing of the child's has been copied yet
		if s.restore, err = rawMode(s.in); err != nil {
			s.pty.Close()
			s.say("setting the terminal to raw mode: %v", err)
			return exitInternal
		}
	}
	defer func() { s.restore() }()
	s.rec.PID, s.rec.PIDStart = s.pty.PID(), processStart(s.pty.PID())
	s.det = newDetector(s.adapter, int(size.Rows), int(size.Cols), DetectOptions{Threshold: s.cfg.Threshold,
		Stuck: s.cfg.Stuck, BufferBytes: s.cfg.BufferBytes, SafeDefaults: s.cfg.SafeDefaults})
	return s.loop(ctx)
}

// loop starts the goroutines and selects until the child is gone and its output drained.
func (s *session) loop(ctx context.Context) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := wires{feed: newFeed(), keys: make(chan []byte), writes: make(chan []byte), wrote: make(chan error, 1),
		exited: make(chan int, 1), jobs: make(chan job), sent: make(chan sent, 1)}
	s.signals = make(chan os.Signal, 8)
	signal.Notify(s.signals, append(endSignals(), suspendSignal)...)
	signal.Notify(make(chan os.Signal), syscall.SIGPIPE) // caught, not ignored: the child does not inherit it
	resized, stopResize := resizeSignals(s.tty)
	defer stopResize()
	records := s.st.Follow(ctx, s.rec.ID, s.open.Load)
	background := s.start(ctx, w)
	s.begin(time.Now())
	timer := time.NewTimer(0)
	defer timer.Stop()
	ended := w.feed.ended
	for s.exit == nil || ended != nil {
		keys := w.keys
		if s.gate != nil || len(s.typing) > maxTyped {
			keys = nil // a nil channel never becomes ready
		}
		end := ended
		if s.exit == nil {
			end = nil // a closed terminal without an exit: the waiter will say
		}
		writes, chunk := s.nextWrite(w.writes)
		jobs, urgent := s.nextJob(w.jobs)
		select {
		case <-w.feed.ready:
			s.output(w.feed.take(), time.Now())
		case <-end:
			s.output(w.feed.take(), time.Now())
			ended = nil
		case p := <-keys:
			s.keyboard(p, time.Now())
		case writes <- chunk:
			s.typing, s.inFlight = nil, true
		case err := <-w.wrote:
			s.inFlight = false
			if err != nil {
				s.typing = nil
			}
		case jobs <- urgent:
			s.outgoing, s.sending = s.outgoing[1:], true
		case r := <-w.sent:
			s.delivered(r, time.Now())
		case rec := <-records:
			s.followed(rec, time.Now())
		case <-resized:
			s.resize(time.Now())
		case sig := <-s.signals:
			s.signaled(sig)
		case code := <-w.exited:
			s.exit = &code
		case <-timer.C:
		}
		now := time.Now()
		timer.Reset(s.tick(now).Sub(now))
	}
	return s.finish(cancel, w, background)
}

// wires are the channels between the loop and the other goroutines.
type wires struct {
	feed   *feed
	keys   chan []byte
	writes chan []byte
	wrote  chan error
	exited chan int
	jobs   chan job
	sent   chan sent
}

// start starts all goroutines but the loop; the returned group is done when those that stop with the session have.
func (s *session) start(ctx context.Context, w wires) *sync.WaitGroup {
	background := new(sync.WaitGroup)
	guard := func(f func()) func() {
		return func() {
			defer func() {
				if r := recover(); r != nil {
					s.restore() // a panic must not leave the terminal raw
					panic(r)
				}
			}()
			f()
		}
	}
	go guard(func() { s.read(w.feed) })()
	go guard(func() {
		for p := range w.writes {
			_, err := s.pty.Write(p)
			w.wrote <- err
		}
	})()
	go guard(func() { s.readKeyboard(w.keys) })()
	go guard(func() { w.exited <- s.pty.Wait() })()
	background.Go(guard(func() {
		for j := range w.jobs {
			w.sent <- s.send(ctx, j)
		}
		close(w.sent)
	}))
	if s.tg != nil {
		background.Go(guard(func() { s.tg.Poll(ctx) }))
	}
	return background
}

// read copies the child's output to the host, then hands it to the loop.
func (s *session) read(f *feed) {
	defer close(f.ended)
	buf := make([]byte, 64<<10)
	for {
		n, err := s.pty.Read(buf)
		if n > 0 {
			if _, werr := s.out.Write(buf[:n]); werr != nil {
				s.pty.Signal(syscall.SIGHUP) // nobody can see the output any more, as when a terminal closes
			}
			f.put(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// readKeyboard hands over what is typed. A nil chunk is the end of a pipe.
func (s *session) readKeyboard(keys chan<- []byte) {
	some := false
	for {
		buf := make([]byte, 4096)
		n, err := s.in.Read(buf)
		if n > 0 {
			some = true
			keys <- buf[:n]
		}
		if err != nil || n == 0 {
			if some && !s.interactive {
				keys <- nil
			}
			return
		}
	}
}

// begin records the session and closes the books of those that died.
func (s *session) begin(now time.Time) {
	s.store("recording the session", s.st.Update(func(*View) ([]Record, error) { return []Record{&s.rec}, nil }))
	s.reap(now)
	s.log.Info("session started", "session", s.rec.ID, "tool", s.rec.Tool, "pid", s.rec.PID)
	if s.tg != nil {
		s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID, Text: "▶ started: " + s.rec.Tool + " in " + s.rec.Cwd}})
	}
}

// reap fails the prompts of sessions whose process is gone, and has their messages edited.
func (s *session) reap(now time.Time) {
	s.reapAt = now.Add(reapEvery)
	dead, failed, err := s.st.Reap(now)
	s.store("closing dead sessions", err)
	for _, p := range failed {
		i := slices.IndexFunc(dead, func(d *SessionRecord) bool { return d.ID == p.SessionID })
		if p.MsgID != 0 && i >= 0 {
			s.push(job{kind: jobSettle, prompt: *p, session: *dead[i]})
		}
	}
}

// store reports a failure of the state: the child keeps running, the operator is told once, nothing is typed.
func (s *session) store(doing string, err error) bool {
	if err == nil {
		return true
	}
	s.log.Error(doing, "error", err.Error())
	if text := "the state cannot be written, so nothing is typed: " + err.Error(); s.troubleShown != text {
		s.troubleShown = text
		s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID, Text: "⚠ " + redact(text), Ring: true}})
	}
	return false
}

/* ===== Bytes ===== */

// output feeds the child's bytes, which the host has already, to the screen.
func (s *session) output(p []byte, now time.Time) {
	if len(p) == 0 {
		return
	}
	s.det.Feed(p, now)
	if s.cast != nil {
		s.cast.output(p, now)
	}
	if reply := s.det.Screen.TakeReplies(s.tty == nil); len(reply) > 0 {
		s.typing = append(s.typing, reply...)
	}
	if s.cfg.Stream && s.stream.flushAt.IsZero() {
		s.stream.flushAt = now.Add(s.cfg.Flush)
	}
	if now.Sub(s.touched) >= activityEvery {
		s.touched = now
		s.st.Touch(s.rec.ID, now)
	}
}

// keyboard passes on what was typed here; nil is the end of a pipe, which the line discipline makes from ^D.
func (s *session) keyboard(p []byte, now time.Time) {
	if p == nil {
		if s.pty.State().Canonical {
			s.typing = append(s.typing, 4, 4) // the first may only end an unfinished line
		}
		return
	}
	s.typing = append(s.typing, p...)
	s.det.Typed(p, now)
	if s.cast != nil {
		s.cast.input(p, now)
	}
	if isTyping(p) {
		s.lastKey = now
		if s.q != nil {
			s.q.typed = true
		}
	}
}

// isTyping tells a person's keys from what a terminal sends by itself: focus, mouse and answers to queries
// (xterm ctlseqs).
func isTyping(p []byte) bool {
	text := string(p)
	for _, prefix := range []string{"\x1b[I", "\x1b[O", "\x1b[<", "\x1b[M", "\x1b[?", "\x1b[>", "\x1b]", "\x1bP", "\x1b_"} {
		if strings.HasPrefix(text, prefix) {
			return false
		}
	}
	return !(strings.HasPrefix(text, "\x1b[") && strings.HasSuffix(text, "R")) // a cursor position report
}

// nextWrite is the writer's channel and what to send on it; a nil channel never becomes ready.
func (s *session) nextWrite(writes chan []byte) (chan<- []byte, []byte) {
	if len(s.typing) == 0 || s.inFlight {
		return nil, nil
	}
	return writes, s.typing
}

func (s *session) resize(now time.Time) {
	size := s.size()
	if err := s.pty.Resize(size); err != nil {
		s.log.Debug("resizing the terminal", "error", err.Error())
		return
	}
	s.det.Resize(int(size.Rows), int(size.Cols), now)
	if s.cast != nil {
		s.cast.resized(size, now)
	}
}

// signaled acts on a signal to the wrapper. SIGHUP of a closed terminal ends the session; with the terminal
// alive, or none at all, it asks for the configuration to be read again.
func (s *session) signaled(sig os.Signal) {
	switch {
	case sig == suspendSignal:
		s.restore()
		stopSelf()
		signal.Notify(s.signals, suspendSignal)
		if s.interactive {
			if restore, err := rawMode(s.in); err == nil {
				s.restore = restore
			}
		}
		s.resize(time.Now())
	case sig == syscall.SIGHUP && !s.terminalGone():
		s.reload()
	default:
		s.hungUp = true
		s.pty.Signal(sig)
		gone := make(chan struct{})
		go s.pty.Terminate(gone)
	}
}

func (s *session) terminalGone() bool {
	if s.tty == nil {
		return false
	}
	_, err := terminalSize(s.tty)
	return err != nil
}

// reload takes over the allowlist and limits of the file as it is now, or keeps the old ones and says so.
func (s *session) reload() {
	cfg, err := loadConfig(s.cfg.Dir, os.Getenv, nil)
	if err != nil {
		s.log.Error("reloading the configuration", "error", err.Error())
		s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID, Text: "⚠ configuration kept as it was: " + err.Error()}})
		return
	}
	if s.tg != nil {
		s.tg.Reload(cfg)
	}
	s.cfg.Timeout, s.cfg.PermissionTimeout, s.cfg.Away = cfg.Timeout, cfg.PermissionTimeout, cfg.Away
	s.cfg.FreeText, s.cfg.NotifyIdle = cfg.FreeText, cfg.NotifyIdle
	s.store("auditing the reload", s.st.Audit().Append(Event{Name: "CONFIG_RELOADED", SessionID: s.rec.ID}))
}

/* ===== Questions ===== */

// tick judges the screen and everything that waits for a time, and returns when it wants to be called again.
func (s *session) tick(now time.Time) time.Time {
	tty := TTYState{}
	if s.gate != nil || s.det.WantTTY(now) {
		tty = s.pty.State()
		if s.cast != nil {
			s.cast.tty(tty, now)
		}
	}
	next := now.Add(time.Hour)
	sooner := func(t time.Time) {
		if !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	if s.gate == nil {
		if p := s.det.Tick(tty, now); p != nil {
			s.ask(p, now)
		}
		if s.seen != nil && s.det.Gone(tty, now) {
			s.seen = nil
			s.leave(now)
		}
	}
	if s.gate != nil {
		sooner(s.gateStep(tty, now))
	} else {
		sooner(s.det.Next(now))
	}
	sooner(s.questionStep(now))
	sooner(s.streamStep(now))
	sooner(s.activityStep(now))
	if !now.Before(s.reapAt) {
		s.reap(now)
	}
	sooner(s.reapAt)
	s.open.Store(s.q != nil)
	if next.Before(now) {
		next = now
	}
	return next
}

// patience is when a question that appears now may go to the phone: not while somebody types here.
func (s *session) patience(now time.Time) time.Time {
	if !s.interactive || s.lastKey.IsZero() {
		return now
	}
	if until := s.lastKey.Add(s.cfg.Away); until.After(now) {
		return until
	}
	return now
}

// ask takes a question that the detector has just found.
func (s *session) ask(p *Prompt, now time.Time) {
	s.seen = p
	if s.q != nil {
		if s.q.screen == nil && s.q.rec.Source == "hook" && !p.Idle {
			s.join(s.q, p, now)
			return
		}
		s.leave(now) // the screen went straight on to another question
	}
	if p.Idle && !s.cfg.NotifyIdle {
		return
	}
	s.q = &question{screen: p, joinBy: now, routeAt: s.patience(now)}
	if s.hooked && !p.Idle && p.Type == MultipleChoice {
		s.q.joinBy = now.Add(joinWindow)
	}
	s.capture(p, now)
}

// hookAsked takes a question that `atlasbridge hook` has stored for this session.
func (s *session) hookAsked(rec PromptRecord, now time.Time) {
	switch {
	case s.q == nil || s.q.rec.Status == "":
		q := &question{rec: rec, routeAt: s.patience(now)}
		if s.seen != nil && !s.seen.Idle {
			q.screen = s.seen
		}
		s.q = q
		if q.screen != nil {
			s.join(q, q.screen, now)
		}
	case s.q.screen != nil && s.q.rec.Source == "screen" && s.q.screen.Permission:
		s.move(rec, Canceled, func(r *PromptRecord) { r.Reason = "asked from the screen already" })
	default:
		s.queued = append(s.queued, &question{rec: rec, routeAt: s.patience(now)})
	}
}

// join makes one prompt of what hook and screen report: exact arguments from the hook, choices and keys from
// the screen. What the hook can say too is marked, so that it is said without a keystroke.
func (s *session) join(q *question, p *Prompt, now time.Time) {
	q.screen = p
	if q.rec.Tool == "AskUserQuestion" || len(p.Choices) == 0 {
		return // the hook knows the questions and answers them all at once
	}
	choices := slices.Clone(p.Choices)
	allowed, refusal := false, q.rec.SafeDefault
	for i, c := range choices {
		switch plain := isPlain(c.Label); {
		case !c.Grants && i == len(choices)-1:
			choices[i].Hook, refusal = "deny", new(c.Key)
		case c.Grants && plain && !allowed:
			choices[i].Hook, allowed = "allow", true
		}
	}
	if !allowed {
		return
	}
	before := q.rec.Status
	s.store("joining hook and screen", s.st.Update(func(v *View) ([]Record, error) {
		r, ok := v.Prompts[q.rec.ID]
		if !ok || r.NonceUsed {
			return nil, nil
		}
		merged := *r
		merged.Choices, merged.Signals = choices, append(slices.Clone(r.Signals), p.Signals...)
		merged.Fingerprint, merged.SafeDefault = p.Fingerprint, refusal
		q.rec = merged
		return []Record{&merged}, nil
	}))
	if before == AwaitingReply {
		s.push(job{kind: jobSettle, prompt: q.rec})
	}
}

// isPlain tells a bare yes from one that also changes a rule or a mode.
func isPlain(label string) bool {
	label = strings.ToLower(label)
	return strings.HasPrefix(label, "yes") && !strings.ContainsAny(label, ",;") && !strings.Contains(label, " and ") ||
		strings.HasPrefix(label, "yes, manually approve")
}

// leave ends a question that left the screen without us.
func (s *session) leave(now time.Time) {
	q := s.q
	if q == nil || q.screen == nil {
		return
	}
	switch q.rec.Status {
	case "", ReplyReceived: // never stored; or decided, and the hook is at it
		if q.rec.Status == "" {
			s.q = nil
		}
		return
	case Created, Routed, AwaitingReply:
		s.leaveTo(q, now)
	}
	s.close(q)
}

// leaveTo records why: answered at the keyboard, or gone by itself.
func (s *session) leaveTo(q *question, now time.Time) {
	if !q.typed {
		s.move(q.rec, Canceled, func(r *PromptRecord) { r.Reason = "the question left the screen" })
		return
	}
	by, at := "cli:local", now.UTC()
	s.move(q.rec, Resolved, func(r *PromptRecord) { r.DecidedBy, r.DecidedAt, r.NonceUsed = &by, &at, true })
}

// move takes a prompt along one transition and keeps our copy true.
func (s *session) move(rec PromptRecord, to State, change func(*PromptRecord)) bool {
	var after PromptRecord
	ok, err := s.st.Move(rec.ID, to, func(r *PromptRecord) {
		if change != nil {
			change(r)
		}
		after = *r
	})
	if !s.store("recording a prompt", err) || !ok {
		return false
	}
	if s.q != nil && s.q.rec.ID == rec.ID {
		after.Status = to
		s.q.rec = after
	}
	return true
}

// close takes the question out of force, has its message edited, and lets the next one in.
func (s *session) close(q *question) {
	if q.rec.MsgID != 0 {
		if v, err := s.st.View(); err == nil && v.Prompts[q.rec.ID] != nil {
			s.push(job{kind: jobSettle, prompt: *v.Prompts[q.rec.ID]})
		}
	}
	s.outgoing = slices.DeleteFunc(s.outgoing, func(j job) bool { return j.kind == jobAsk && j.prompt.ID == q.rec.ID })
	if s.q == q {
		s.q = nil
	}
	if s.q == nil && len(s.queued) > 0 {
		s.q, s.queued = s.queued[0], s.queued[1:]
		if s.seen != nil && !s.seen.Idle {
			s.join(s.q, s.seen, time.Now())
		}
	}
}

// questionStep moves the question in force on when its time has come: stored, routed, reminded, expired.
func (s *session) questionStep(now time.Time) (next time.Time) {
	q := s.q
	if q == nil || s.gate != nil {
		return
	}
	if q.rec.Status == "" {
		if now.Before(q.joinBy) {
			return q.joinBy
		}
		if !s.create(q, now) {
			s.q = nil
			return
		}
	}
	switch q.rec.Status {
	case Created:
		if now.Before(q.routeAt) {
			return earliest(q.routeAt, q.rec.ExpiresAt)
		}
		if q.rec.Type == FreeText && !q.rec.Idle && !q.rec.Secret && !s.cfg.FreeText {
			s.expire(q, now, "free text is switched off")
			return now
		}
		if s.move(q.rec, Routed, nil) {
			s.push(job{kind: jobAsk, prompt: q.rec})
		}
	case ReplyReceived:
		if !q.hookBy.IsZero() && !now.Before(q.hookBy) {
			q.hookBy = time.Time{}
			s.openGate(q, now)
			return now
		}
		return q.hookBy
	case AwaitingReply:
		if !now.Before(q.remind) {
			s.push(job{kind: jobSettle, prompt: q.rec})
			q.remind = reminder(now, q.rec.ExpiresAt)
		}
		next = q.remind
	}
	if !now.Before(q.rec.ExpiresAt) && (q.rec.Status == Routed || q.rec.Status == AwaitingReply) {
		s.expire(q, now, fmt.Sprintf("no answer in %d s", int(q.rec.ExpiresAt.Sub(q.rec.CreatedAt).Seconds())))
		return now
	}
	return earliest(next, q.rec.ExpiresAt)
}

// reminder is when the time left is next worth an edit: half way, then a minute before the end.
func reminder(now, expires time.Time) time.Time {
	left := expires.Sub(now)
	if left > 2*time.Minute {
		return now.Add(left / 2)
	}
	if left > time.Minute {
		return expires.Add(-time.Minute)
	}
	return expires.Add(time.Hour)
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// create stores what the screen asks.
func (s *session) create(q *question, now time.Time) bool {
	p := q.screen
	life := s.cfg.Timeout
	if p.Permission {
		life = s.cfg.PermissionTimeout
	}
	rec := PromptRecord{Head: Head{Rec: "prompt", ID: newID()}, SessionID: s.rec.ID, Type: p.Type, Confidence: p.Confidence(),
		Score: p.Score, Excerpt: p.Excerpt, Question: p.Question, Full: p.Full, Recent: p.Recent, Cut: p.Cut, Choices: p.Choices,
		SafeDefault: p.SafeDefault, Idle: p.Idle, Secret: p.Secret, Permission: p.Permission, Multi: p.Multi, Signals: p.Signals,
		Source: "screen", Cwd: s.rec.Cwd, Fingerprint: p.Fingerprint, Status: Created, Nonce: newNonce(),
		CreatedAt: now.UTC(), ExpiresAt: now.Add(life).UTC(), Key: idempotencyKey(s.rec.ID, p.Excerpt, now)}
	if p.Idle {
		rec.Full, rec.MaxLength = s.answer, maxMessage
	}
	if rec.Choices == nil {
		rec.Choices = []Choice{}
	}
	s.rec.Prompts++
	ok := s.store("recording a question", s.st.Update(func(*View) ([]Record, error) {
		session := s.rec
		return []Record{&rec, &session}, nil
	}))
	q.rec, q.remind = rec, reminder(now, rec.ExpiresAt)
	return ok
}

// expire ends a question nobody answered: its safe default is typed if it is still there.
func (s *session) expire(q *question, now time.Time, why string) {
	if q.rec.SafeDefault == nil {
		s.move(q.rec, Expired, func(r *PromptRecord) { r.Reason = why })
		s.close(q)
		return
	}
	if !s.move(q.rec, Expired, func(r *PromptRecord) { r.Reason = why; r.Value = r.SafeDefault }) {
		return // somebody decided in this very moment: the follower brings it
	}
	if q.rec.Source == "hook" {
		q.hookBy = now.Add(hookGrace) // the hook gives the refusal with its reason
		q.rec.Status = ReplyReceived
		return
	}
	s.openGate(q, now)
}

// followed takes a record that changed: a decision, a hook's question, something the phone wants.
func (s *session) followed(rec Record, now time.Time) {
	switch r := rec.(type) {
	case *PromptRecord:
		switch {
		case s.q != nil && s.q.rec.ID == r.ID:
			s.decided(s.q, *r, now)
		case r.Source == "hook" && r.Status == Created && !s.knows(r.ID):
			s.hookAsked(*r, now)
		}
	case *InputRecord:
		if r.Status == "queued" {
			s.input(r, now)
		}
	}
}

func (s *session) knows(id string) bool {
	return slices.ContainsFunc(s.queued, func(q *question) bool { return q.rec.ID == id })
}

// decided acts on a change of the question in force that somebody else made.
func (s *session) decided(q *question, r PromptRecord, now time.Time) {
	if s.gate != nil && s.gate.q == q || r.Status == q.rec.Status && r.NonceUsed == q.rec.NonceUsed {
		return
	}
	hookBy := q.hookBy
	q.rec = r
	switch r.Status {
	case ReplyReceived:
		if choice := choiceOf(&r); r.Source == "hook" && choice != nil && choice.Hook != "" || r.Tool == "AskUserQuestion" {
			q.hookBy = now.Add(hookGrace)
			return
		}
		if hookBy.IsZero() {
			s.openGate(q, now)
		}
	case Injected:
		s.move(r, Resolved, nil)
		s.det.Sleep(now.Add(s.cfg.EchoWindow))
		s.seen = nil
		s.close(q)
	case Resolved, Canceled, Failed, Expired:
		s.close(q)
	}
}

// choiceOf is the choice a decided prompt's value names, nil when it is text or a bare refusal.
func choiceOf(r *PromptRecord) *Choice {
	if r.Value == nil {
		return nil
	}
	for i := range r.Choices {
		if c := &r.Choices[i]; c.Key == *r.Value || *r.Value == "deny" && !c.Grants && c.Hook == "deny" {
			return c
		}
	}
	return nil
}

/* ===== What the phone asks of the session ===== */

// input does what an operator asked for: text, keys, a look at the screen, the end.
func (s *session) input(r *InputRecord, now time.Time) {
	done, why := "done", ""
	reply := Notice{SessionID: s.rec.ID, ReplyTo: r.ReplyTo}
	switch r.Kind {
	case "answer": // the tool's own Stop hook: the beginning of its last answer
		s.answer = r.Text
	case "screen":
		reply.Mono = visible(redact(s.det.Screen.Text()))
	case "last", "show_recent":
		reply.Mono = lastRunes(visible(redact(s.det.Screen.Text())), 500)
	case "keys":
		if why = s.pressKeys(r.Text, now); why == "" {
			reply.Text = "⌨ pressed " + r.Text
		}
	case "text":
		if why = s.freeInput(r, now); why == "" && s.gate != nil {
			return // the gate answers when it has typed
		}
	case "cancel":
		reply.Text = "⏹ ending the session"
		go s.pty.Terminate(make(chan struct{}))
	default:
		why = "this session does not know how to do that"
	}
	if why != "" {
		done, reply.Text = "refused", "✗ "+why
	}
	s.inputDone(r, done, why)
	if r.Kind != "answer" {
		s.push(job{kind: jobNotice, notice: reply})
	}
}

func (s *session) inputDone(r *InputRecord, status, why string) {
	after := *r
	after.Status, after.Reason = status, why
	s.store("recording an input", s.st.Update(func(*View) ([]Record, error) { return []Record{&after}, nil }))
}

// pressKeys writes the bytes of named keys, which the child sees as typed at its keyboard: ^C becomes SIGINT
// where the terminal is set so, and a byte where it is not.
func (s *session) pressKeys(names string, now time.Time) (why string) {
	var keys strings.Builder
	for _, name := range strings.Fields(names) {
		k, ok := keyBytes(name, s.det.Screen.AppCursorKeys())
		if !ok {
			return "there is no key called " + name
		}
		keys.WriteString(k)
	}
	if s.gate != nil {
		return "an answer is being typed just now; try again"
	}
	s.inject(keys.String(), now)
	if s.q != nil {
		s.q.typed = true
	}
	return ""
}

// freeInput types the operator's text into an input box or a REPL; never into a question.
func (s *session) freeInput(r *InputRecord, now time.Time) (why string) {
	switch tty := s.pty.State(); {
	case s.gate != nil:
		return "an answer is being typed just now; try again"
	case s.q != nil && !s.q.rec.Idle && s.q.rec.Status != "":
		return "a question is open: answer it, or press ESC with /keys"
	case s.adapter.Name == "generic" && tty.Reading == ReadingBusy:
		return "the program is not reading its keyboard just now"
	}
	s.gate = &gate{input: r, text: cleanText(r.Text), until: now.Add(followTime)}
	return ""
}

// inject queues bytes for the child that did not come from the keyboard.
func (s *session) inject(keys string, now time.Time) {
	s.typing = append(s.typing, keys...)
	s.det.Typed([]byte(keys), now)
	if s.cast != nil {
		s.cast.input([]byte(keys), now)
	}
}

/* ===== The sender's side ===== */

// localChannel reaches nobody: questions wait for the keyboard or for `atlasbridge answer`.
type localChannel struct{}

func (localChannel) Ask(context.Context, *PromptRecord, *SessionRecord) (int64, error) { return 0, nil }
func (localChannel) Settle(context.Context, *PromptRecord, *SessionRecord) error       { return nil }
func (localChannel) Notify(context.Context, Notice) (int64, error)                     { return 0, nil }
func (localChannel) Close() error                                                      { return nil }

func (s *session) push(j job) {
	if s.tg == nil && j.kind != jobAsk {
		return
	}
	if j.session.ID == "" {
		j.session = s.rec
	}
	s.outgoing = append(s.outgoing, j)
	slices.SortStableFunc(s.outgoing, func(a, b job) int { return int(a.kind) - int(b.kind) })
}

func (s *session) nextJob(jobs chan job) (chan<- job, job) {
	if len(s.outgoing) == 0 || s.sending {
		return nil, job{}
	}
	return jobs, s.outgoing[0]
}

// send is the sender: one blocking call of the channel. A question is not worth sending after its time.
func (s *session) send(ctx context.Context, j job) sent {
	r := sent{job: j}
	switch j.kind {
	case jobAsk:
		ctx, cancel := context.WithDeadline(ctx, j.prompt.ExpiresAt)
		defer cancel()
		r.id, r.err = s.ch.Ask(ctx, &j.prompt, &j.session)
	case jobSettle:
		r.err = s.ch.Settle(ctx, &j.prompt, &j.session)
	default:
		r.id, r.err = s.ch.Notify(ctx, j.notice)
	}
	return r
}

// delivered takes the sender's report.
func (s *session) delivered(r sent, now time.Time) {
	s.sending = false
	if r.err != nil && !errors.Is(r.err, context.DeadlineExceeded) && !errors.Is(r.err, context.Canceled) {
		s.log.Error("sending to the channel", "error", r.err.Error())
	}
	switch {
	case r.job.kind == jobStream:
		s.stream.delivered(r)
	case r.job.kind != jobAsk:
	case r.err != nil:
		// It stays routed: the keyboard and `atlasbridge answer` still work, and it expires in its time.
	default:
		s.move(r.job.prompt, AwaitingReply, func(p *PromptRecord) { p.MsgID = r.id })
		if s.q == nil || s.q.rec.ID != r.job.prompt.ID { // answered while it was being sent
			if v, err := s.st.View(); err == nil && v.Prompts[r.job.prompt.ID] != nil {
				late := *v.Prompts[r.job.prompt.ID]
				late.MsgID = r.id
				s.push(job{kind: jobSettle, prompt: late})
			}
		}
	}
}

// activityStep records what the session is doing when that has changed, at most once a second.
func (s *session) activityStep(now time.Time) time.Time {
	doing := s.det.Activity()
	if doing == s.activity {
		return time.Time{}
	}
	if wait := s.activityAt.Add(activityEvery); now.Before(wait) {
		return wait
	}
	s.activity, s.activityAt, s.rec.Activity = doing, now, doing
	rec := s.rec
	s.store("recording the session", s.st.Update(func(*View) ([]Record, error) { return []Record{&rec}, nil }))
	return time.Time{}
}

// finish closes the books, sends the last messages, and returns the exit code.
func (s *session) finish(cancel func(), w wires, background *sync.WaitGroup) int {
	close(w.writes)
	s.pty.Close()
	s.restore()
	now := time.Now()
	if s.gate != nil && s.gate.q != nil {
		s.move(s.gate.q.rec, Failed, func(r *PromptRecord) { r.Reason = "the program ended" })
	}
	for _, q := range append(s.queued, s.q) {
		if q == nil || q.rec.Status == "" {
			continue
		}
		if q.typed {
			s.leaveTo(q, now)
		}
		s.move(q.rec, Failed, func(r *PromptRecord) { r.Reason = "the program ended" })
		s.queued = nil
		s.close(q)
	}
	ended := now.UTC()
	s.rec.EndedAt, s.rec.ExitCode, s.rec.Activity = &ended, s.exit, ""
	switch {
	case s.hungUp:
		s.rec.Status = "terminated"
	case *s.exit > 128:
		s.rec.Status = "crashed"
	default:
		s.rec.Status = "completed"
	}
	s.store("recording the end", s.st.Update(func(*View) ([]Record, error) { return []Record{&s.rec}, nil }))
	seq, hash, _ := s.st.Audit().Head()
	s.push(job{kind: jobNotice, notice: Notice{SessionID: s.rec.ID,
		Text: fmt.Sprintf("⏹ ended: %s, exit code %d\naudit %d %s", s.rec.Tool, *s.exit, seq, hash)}})
	s.drain(w)
	cancel()
	close(w.jobs)
	for range w.sent {
		continue // the last report of a job cut short by cancel
	}
	background.Wait()
	s.ch.Close()
	if s.cast != nil {
		s.store("writing the recording", s.cast.close(now))
	}
	if s.tg != nil && s.tg.Trouble() != "" {
		s.say("%s", s.tg.Trouble())
	}
	return *s.exit
}

// drain sends what is still queued, for a moment; the whole output where it was asked for.
func (s *session) drain(w wires) {
	limit := drainSend
	if s.cfg.Stream && s.tg != nil && s.tg.Trouble() == "" {
		limit = drainStream
		s.stream.flushAt = time.Now()
		s.streamEnd()
	}
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	for len(s.outgoing) > 0 || s.sending || s.stream.pending() {
		if !s.sending {
			s.streamStep(time.Now())
		}
		jobs, urgent := s.nextJob(w.jobs)
		select {
		case jobs <- urgent:
			s.outgoing, s.sending = s.outgoing[1:], true
		case r := <-w.sent:
			s.delivered(r, time.Now())
		case <-s.signals:
			return
		case <-deadline.C:
			return
		}
	}
}
