package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

/* ===== The simulation: the session, its store and its Telegram in virtual time, against models ===== */
// Real: session.loop with all its goroutines, hook.decide, Store on files, Telegram with its poller. Modelled, each with
// its own random numbers from the seed: the tool behind the terminal, the Bot API and the way to it, a person with a
// phone and a keyboard. What the person types is told from what AtlasBridge types by its bytes: the model tool takes
// upper-case letters and ^J from the one where the other sends lower-case letters, digits and ^M.
//
// One allowance: to look and to type are two steps, so what changes less than simBlind before a byte is read cannot be
// seen by anybody. The tool ignores what it reads that soon after a change, as claude's dialogs do for longer.

const (
	simSeeds    = 2000
	simBlind    = 20 * time.Millisecond
	simChat     = 1001
	simFailures = 3 // are enough to look at
)

// TestSimulation plays many scenarios. ATLASBRIDGE_TEST_SEEDS is how many, ATLASBRIDGE_TEST_SEED plays that one and
// prints its timeline.
func TestSimulation(t *testing.T) {
	needUnix(t)
	one := os.Getenv("ATLASBRIDGE_TEST_SEED")
	if one != "" {
		seed, err := strconv.ParseUint(one, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		s := simulate(t, seed)
		for range 50 { // who of several goroutines is first in the same instant is not the seed's
			if len(s.faults) > 0 {
				break
			}
			s = simulate(t, seed)
		}
		t.Logf("seed %d\n%s", seed, strings.Join(s.log, "\n"))
		for _, fault := range s.faults {
			t.Error(fault)
		}
		return
	}
	seeds := uint64(simSeeds)
	if n, err := strconv.ParseUint(os.Getenv("ATLASBRIDGE_TEST_SEEDS"), 10, 64); err == nil {
		seeds = n
	} else if testing.Short() || simRaces() {
		seeds /= 20
	}
	var next, failed atomic.Uint64
	var told sync.Mutex
	total := map[string]int{}
	began := time.Now()
	t.Run("seeds", func(t *testing.T) {
		for w := range runtime.GOMAXPROCS(0) {
			t.Run(fmt.Sprint("worker ", w), func(t *testing.T) {
				t.Parallel()
				for seed := next.Add(1); seed <= seeds && failed.Load() < simFailures; seed = next.Add(1) {
					s := simulate(t, seed)
					told.Lock()
					for what, n := range s.count {
						total[what] += n
					}
					told.Unlock()
					if len(s.faults) > 0 {
						failed.Add(1)
						t.Errorf("seed %d, replay with ATLASBRIDGE_TEST_SEED=%d go test -run '^TestSimulation$' -v\n%s\n%s", seed,
							seed, strings.Join(s.faults, "\n"), strings.Join(s.log, "\n"))
					}
				}
			})
		}
	})
	t.Logf("%d seeds in %v: %v", seeds, time.Since(began).Round(time.Millisecond), total)
}

// TestSimulationReplays: the same seed gives the same timeline, but where several messages wait for the same turn: which
// of them goes first is decided by the order of goroutines, which a bubble does not fix.
func TestSimulationReplays(t *testing.T) {
	needUnix(t)
	seeds, times := uint64(20), 3
	if n, err := strconv.Atoi(os.Getenv("ATLASBRIDGE_TEST_REPLAYS")); err == nil {
		times = n
	}
	differ := 0
	for seed := range seeds {
		first := simulate(t, seed+1)
		for range times - 1 {
			again := simulate(t, seed+1)
			at := 0
			for at < min(len(first.log), len(again.log)) && first.log[at] == again.log[at] {
				at++
			}
			if at < len(first.log) || at < len(again.log) {
				differ++
				from := max(0, at-3)
				t.Logf("seed %d differs from line %d on:\n%s\n---\n%s", seed+1, at,
					strings.Join(first.log[from:min(len(first.log), at+4)], "\n"),
					strings.Join(again.log[from:min(len(again.log), at+4)], "\n"))
				break
			}
		}
	}
	t.Logf("%d of %d seeds differ in %d runs", differ, seeds, times)
	if differ > int(seeds)*3/4 {
		t.Error("hardly any seed replays")
	}
}

// simRaces tells whether the race detector is on: everything takes ten times as long.
func simRaces() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(b debug.BuildSetting) bool { return b.Key == "-race" && b.Value == "true" })
}

// sim is one scenario. Its events take the lock and never wait with it.
type sim struct {
	mu     sync.Mutex
	seed   uint64
	dir    string
	start  time.Time
	over   bool
	log    []string
	faults []string
	count  map[string]int
	wakes  []chan struct{} // of who watches the folder

	cfg  *Config
	st   *Store
	sess *session

	simTool
	simPhone
	keys simKeys
}

// simulate plays a seed and returns what happened.
func simulate(t *testing.T, seed uint64) *sim {
	t.Helper()
	simSignals()
	base := t.TempDir()
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		if dir, err := os.MkdirTemp("/dev/shm", "atlasbridge-sim"); err == nil {
			base = dir
			defer os.RemoveAll(dir)
		}
	}
	s := &sim{seed: seed, dir: filepath.Join(base, "state"), count: map[string]int{}}
	defer func() {
		if r := recover(); r != nil {
			fmt.Printf("seed %d\n%s\n", seed, strings.Join(s.log, "\n"))
			panic(r)
		}
	}()
	synctest.Test(t, func(*testing.T) { s.play() })
	return s
}

// simSignals starts the goroutines of package signal outside of every bubble.
var simSignals = sync.OnceFunc(func() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt)
	signal.Stop(c)
})

// now is a number that two moments do not share: what is drawn by it does not depend on the order of goroutines.
func (s *sim) now() int { return int(time.Since(s.start)) }

// random is a stream of random numbers of its own for every purpose.
func (s *sim) random(purpose string, n int) *rand.Rand {
	h := s.seed
	for _, c := range []byte(fmt.Sprint(purpose, n)) {
		h = (h ^ uint64(c)) * 0x100000001b3
	}
	return rand.New(rand.NewPCG(s.seed, h))
}

// between is a time from min to max milliseconds, to the nanosecond: two events hardly ever meet.
func between(r *rand.Rand, min, max int) time.Duration {
	return time.Duration(min)*time.Millisecond + time.Duration(r.Int64N(int64(max-min)*1e6+1e6))
}

// at does something after a time.
func (s *sim) at(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.over {
			f()
		}
	})
}

func (s *sim) note(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf("%10.6f  ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

func (s *sim) fault(format string, args ...any) {
	text := fmt.Sprintf("%10.6f  FAULT ", time.Since(s.start).Seconds()) + fmt.Sprintf(format, args...)
	s.faults = append(s.faults, text)
	s.log = append(s.log, text)
}

// files are the calls of a store's journals: nothing waits for the disk, and a change wakes who watches the folder.
func (s *sim) files(dead *atomic.Bool) files {
	return func(op string, f *os.File, call func() error) error {
		if dead != nil && dead.Load() {
			return errors.New("killed")
		}
		if strings.HasPrefix(op, "fsync") {
			return nil
		}
		err := call()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, c := range s.wakes {
			select {
			case c <- struct{}{}:
			default:
			}
		}
		return err
	}
}

// watchFolder is inotify. It takes the lock, so nobody may hold that when a store is used.
func (s *sim) watchFolder(string) (<-chan struct{}, func()) {
	c := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wakes = append(s.wakes, c)
	return c, func() {}
}

// play is the whole scenario, inside of its bubble.
func (s *sim) play() {
	s.start = time.Now()
	r := s.random("session", 0)
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		s.fault("%v", err)
		return
	}
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	s.cfg = &Config{Dir: s.dir, Channel: "telegram", Token: "1:x", APIBase: "http://sim", ChatID: simChat, Users: []int64{simChat},
		Timeout: seconds(5 + r.IntN(26)), PermissionTimeout: seconds(5 + r.IntN(26)), Stuck: 2 * time.Second,
		EchoWindow: 150 * time.Millisecond, Threshold: 0.65, BufferBytes: 4096, MaxChars: 3500, FreeText: r.IntN(5) > 0,
		NotifyIdle: r.IntN(3) == 0, Flush: 200 * time.Millisecond, RetentionDays: 30,
		SafeDefaults: map[PromptType]string{YesNo: "n", ConfirmEnter: "enter"}}
	if r.IntN(4) == 0 {
		s.cfg.Away = seconds(1 + r.IntN(4))
	}
	st, err := openStoreWith(s.dir, s.files(nil))
	if err != nil {
		s.fault("%v", err)
		return
	}
	defer st.Close()
	st.watch = s.watchFolder
	s.st = st
	log := slog.New(slog.DiscardHandler)
	tg := s.telegram(st)
	name := "plain"
	if s.simTool.begin(s); s.claude {
		name = "claude"
	}
	s.simPhone.begin(s)
	s.keys.more = make(chan struct{}, 1)
	sess := &session{cfg: s.cfg, flags: map[string]string{}, st: st, ch: tg, tg: tg, log: log, adapter: adapterFor(name),
		in: &s.keys, out: io.Discard, notes: io.Discard, interactive: true, restore: func() error { return nil },
		hooked: s.claude, signals: make(chan os.Signal, 8), events: make(chan func()), pty: &simPTY{s},
		rec: SessionRecord{Head: Head{ID: newID()}, Tool: name, Cwd: "/work", Wrapper: os.Getpid(), Status: "active",
			Activity: "starting", StartedAt: time.Now().UTC()}}
	s.sess = sess
	release, err := st.HoldSession(sess.rec.ID)
	if err != nil {
		s.fault("%v", err)
		return
	}
	sess.ctx, sess.stop = context.WithCancel(context.Background())
	sess.polling.Go(func() { tg.Poll(sess.ctx) })
	sess.watch(Size{Rows: 24, Cols: 80})
	s.mu.Lock()
	s.note("%s, timeouts %v and %v, away %v, free text %v, idle %v, rough %v, blind %v", name, s.cfg.Timeout, s.cfg.PermissionTimeout,
		s.cfg.Away, s.cfg.FreeText, s.cfg.NotifyIdle, s.rough, s.blind)
	s.at(between(r, 50, 300), s.next)
	s.mu.Unlock()
	sess.loop()
	sess.finish()
	release()
	s.mu.Lock()
	s.note("the session is over")
	for _, h := range s.hooks {
		h.cancel()
	}
	s.mu.Unlock()
	s.payLater()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	s.mu.Unlock()
	s.judgeAll()
	s.mu.Lock()
}

// telegram is the real channel with the model of the Bot API behind it.
func (s *sim) telegram(st *Store) *Telegram {
	tg := newTelegram(s.cfg, st, slog.New(slog.DiscardHandler))
	tg.http.Transport = s
	tg.jitter = func() float64 { return 0.5 }
	return tg
}

// payLater lets the next process that polls pay the edits that are owed.
func (s *sim) payLater() {
	owed := func() bool {
		list, _, err := s.st.Owed(nil)
		return err != nil || len(list) > 0
	}
	time.Sleep(25 * time.Second) // what is late has come
	if !owed() {
		return
	}
	st, err := openStoreWith(s.dir, s.files(nil))
	if err != nil {
		s.faults = append(s.faults, err.Error())
		return
	}
	defer st.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	st.watch = s.watchFolder
	var polling sync.WaitGroup
	tg := s.telegram(st)
	polling.Go(func() { tg.Poll(ctx) })
	for n := 0; n < 60 && owed(); n++ {
		time.Sleep(5 * time.Second)
	}
	stop()
	polling.Wait()
}

// ---- the keyboard ----

// simKeys is standard input.
type simKeys struct {
	mu    sync.Mutex
	typed []byte
	ended bool
	more  chan struct{}
}

func (k *simKeys) Read(p []byte) (int, error) {
	for {
		k.mu.Lock()
		n := copy(p, k.typed)
		k.typed = k.typed[n:]
		ended := k.ended
		k.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		if ended {
			return 0, io.EOF
		}
		<-k.more
	}
}

func (k *simKeys) put(text string, end bool) {
	k.mu.Lock()
	k.typed = append(k.typed, text...)
	k.ended = k.ended || end
	k.mu.Unlock()
	select {
	case k.more <- struct{}{}:
	default:
	}
}

// press has the person press keys.
func (s *sim) press(text string) {
	if s.ending {
		return
	}
	s.note("keyboard %q", text)
	s.count["keys"]++
	if s.up != nil {
		s.up.touched = true
	}
	s.keyAt = time.Now()
	s.keys.put(text, false)
}

// ---- the terminal ----

// simPTY is the child's terminal.
type simPTY struct{ *sim }

func (p *simPTY) Read(b []byte) (int, error) {
	for {
		p.mu.Lock()
		some := len(p.out) > 0
		ended := p.ended
		r := p.random("busy", p.now())
		delay := between(r, 0, 1)
		if r.IntN(12) == 0 {
			delay = between(r, 5, 80)
		}
		p.mu.Unlock()
		if some {
			time.Sleep(delay) // the machine is busy
			p.mu.Lock()
			n := copy(b, p.out)
			p.out = p.out[n:]
			p.mu.Unlock()
			return n, nil
		}
		if ended {
			return 0, io.EOF
		}
		<-p.more
	}
}

// Write has the tool read the bytes a little later.
func (p *simPTY) Write(b []byte) (int, error) {
	answer := p.deciding()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return 0, io.ErrClosedPipe
	}
	text := statusAnswer.ReplaceAllString(string(b), "")
	if text != "" {
		due := time.Now().Add(between(p.random("reads", p.now()), 0, 4))
		if due.Before(p.readAt) {
			due = p.readAt.Add(time.Microsecond)
		}
		p.readAt = due
		p.at(time.Until(due), func() { p.takes(text, answer) })
	}
	return len(b), nil
}

func (p *simPTY) Unread() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.out)
}

func (p *simPTY) State() TTYState {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := TTYState{Reading: ReadingYes}
	switch {
	case p.claude:
	case p.up == nil || p.up.over:
		state = TTYState{Reading: ReadingBusy, Canonical: true, Echo: true}
	case p.up.kind != "menu":
		state.Canonical, state.Echo = true, p.up.kind != "secret"
	}
	if p.blind {
		state.Reading = ReadingUnknown
	}
	return state
}

func (p *simPTY) Close() error               { p.mu.Lock(); p.end(); p.mu.Unlock(); return nil }
func (p *simPTY) Wait() int                  { <-p.exited; return 0 }
func (p *simPTY) PID() int                   { return 0 }
func (p *simPTY) Resize(Size) error          { return nil }
func (p *simPTY) Signal(os.Signal) error     { return nil }
func (p *simPTY) Terminate(<-chan struct{})  {}
func (s *sim) end()                          { s.ended = true; s.wake() }
func (s *sim) print(format string, a ...any) { s.out = fmt.Appendf(s.out, format, a...); s.wake() }
func (s *sim) wake() {
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// deciding is the question that is decided and not typed yet: what the gate types about.
func (s *sim) deciding() *PromptRecord {
	v, err := s.st.View()
	if err != nil {
		return nil
	}
	for _, p := range v.Prompts {
		if p.Source == "screen" && (p.Status == ReplyReceived || p.Status == Expired && p.Value != nil) {
			return p
		}
	}
	return nil
}

// ---- the tool ----

// simTool is the model of the program behind the terminal.
type simTool struct {
	claude bool
	blind  bool // the system cannot tell who reads
	out    []byte
	more   chan struct{}
	exited chan struct{}
	ended  bool
	last   bool // no dialog will come
	ending bool // nobody acts any more
	readAt time.Time
	keyAt  time.Time // of the last key at the keyboard

	left      int // dialogs still to come
	made      int
	up        *simDialog
	changedAt time.Time // when what is on the screen last changed, or could be taken for something else
	pointer   int
	line      string // typed so far, in canonical mode
	lineBy    []*PromptRecord
	box       string // the input box
	idle      bool
	ahead     bool // a text was typed where nothing asked
	speaks    bool
	hooks     []*simHook
	queue     []*simDialog // of claude: asked by hooks, not shown yet
	stands    []simStand
	took      map[string][]string // meanings that the tool took, by prompt
	dropped   map[string]bool     // something of the prompt's was ignored, within the allowance
	outrun    map[string]bool     // a hook's answer came after the dialog was answered
	messages  []string            // the tool got from its input box
}

// simDialog is a version of a dialog: what stands on the screen.
type simDialog struct {
	n, version int
	kind       string // yesno enter text secret list menu, of claude bash edit trust
	above      []string
	body       []string
	ask        string
	choices    []string
	hooked     bool // its hook is called
	shownAt    time.Time
	bornAt     time.Time // in this version, in this place
	painted    bool
	touched    bool // somebody typed or tapped while it stood
	over       bool // answered, though it may still be painted
	ours       bool // by us
	overAt     time.Time
}

// simStand is a time in which a version stood and nobody touched it.
type simStand struct {
	*simDialog
	from, to time.Time
}

type simHook struct {
	d      *simDialog
	cancel func()
	dead   *atomic.Bool
	done   bool
	from   time.Time
	to     time.Time
}

func (t *simTool) begin(s *sim) {
	r := s.random("tool", 0)
	t.claude, t.blind = r.IntN(2) == 0, r.IntN(10) == 0
	t.more, t.exited = make(chan struct{}, 1), make(chan struct{})
	t.left = 3 + r.IntN(5)
	t.took, t.dropped, t.outrun = map[string][]string{}, map[string]bool{}, map[string]bool{}
	if t.claude {
		t.speaks = r.IntN(6) > 0
		s.print("\x1b[?2004h\x1b]0;✳ Claude Code\a\x1b[?1049h\x1b[2J\x1b[H\x1b[?25l\x1b]7501;?\a")
		s.status("state=idle:app=claude-code")
	} else {
		s.print("starting\r\n")
	}
}

// status tells the terminal what claude does.
func (s *sim) status(words string) {
	if s.speaks {
		s.print("\x1b]7501;%s\a", words)
	}
}

var simWords = strings.Fields("alpha bravo carol delta eagle fjord gamma hotel igloo joker koala lemon mango north olive piano")

// next goes on to the next dialog, or to the end.
func (s *sim) next() {
	if s.ending || s.up != nil {
		return
	}
	r := s.random("next", s.made)
	if s.left <= 0 && len(s.queue) == 0 && !slices.ContainsFunc(s.hooks, func(h *simHook) bool { return !h.done && !h.d.over }) {
		s.finale(r)
		return
	}
	if s.claude {
		s.nextOfClaude(r)
		return
	}
	s.left--
	s.made++
	s.show(s.plainDialog(r))
}

// finale ends the program.
func (s *sim) finale(r *rand.Rand) {
	if s.last {
		return
	}
	s.last = true
	if s.claude {
		s.idle = true
		s.print("\x1b]0;✳ Claude Code\a")
		s.status("state=done:app=claude-code")
		s.paintClaude()
	}
	s.at(between(r, 500, 6000), func() {
		s.ending = true
		s.note("nobody acts any more")
		s.keys.put("", true)
		s.at(between(r, 1500, 2500), func() {
			s.note("tool exits")
			s.end()
			close(s.exited)
		})
	})
}

// plainDialog makes a question of a program that is not known.
func (s *sim) plainDialog(r *rand.Rand) *simDialog {
	d := &simDialog{n: s.made, kind: []string{"yesno", "yesno", "yesno", "menu", "menu", "enter", "text", "secret", "list", "list"}[r.IntN(10)]}
	word := func() string { return simWords[r.IntN(len(simWords))] + strconv.Itoa(r.IntN(10)) }
	for range r.IntN(3) {
		d.above = append(d.above, "note: "+word()+" and "+word())
	}
	switch d.kind {
	case "yesno":
		d.body = []string{"About to delete " + word() + " for good"}
		d.ask, d.choices = "Delete "+word()+" now?", []string{"Yes", "No"}
	case "menu":
		d.ask = "Which way for " + word() + "?"
		d.choices = []string{"Use " + word(), "Use " + word() + " instead", "Skip " + word()}
		if r.IntN(3) == 0 {
			d.ask, d.choices = "Allow access to "+word()+"?", []string{"Yes, allow", "No, refuse", "Show " + word()}
		}
	case "enter":
		d.body, d.ask = []string{"All of " + word() + " is done"}, "Press Enter to continue"
	case "text":
		d.body, d.ask = []string{"A new branch beside " + word()}, "Name of the branch for "+word()+":"
	case "secret":
		d.ask = "Password for " + word() + ":"
	case "list":
		d.ask = "Your choice for " + word() + " [1-3]:"
		d.choices = []string{"Keep " + word(), "Drop " + word(), "Merge " + word()}
	}
	return d
}

// variant is another version of a dialog: one thing in it differs.
func (s *sim) variant(d *simDialog, r *rand.Rand) *simDialog {
	v := *d
	v.version++
	v.above, v.body, v.choices = slices.Clone(d.above), slices.Clone(d.body), slices.Clone(d.choices)
	word := simWords[r.IntN(len(simWords))] + strconv.Itoa(10+s.random("word", d.n*100+v.version).IntN(90))
	blank := func(text string) string { return strings.Replace(text, " ", "  ", 1) }
	change := r.IntN(5)
	switch {
	case change == 0 && len(v.above) > 0 && !s.claude:
		v.above[0] = "note: " + word + " only"
	case change == 1 && len(v.body) > 0:
		v.body[0] = blank(v.body[0])
	case change == 2 && len(v.choices) > 2:
		v.choices[0], v.choices[1] = v.choices[1], v.choices[0]
	case change == 3 && len(v.choices) > 2:
		v.choices[1] += " " + word
	case len(v.body) > 0:
		v.body[len(v.body)-1] += " " + word
	default:
		v.ask = strings.Replace(v.ask, " ", " "+word+" ", 1)
	}
	for _, text := range slices.Concat(v.above, v.body, v.choices, []string{v.ask}) {
		if len(text) > 70 { // no row is full
			v.above, v.body, v.choices, v.ask = d.above, d.body, d.choices, d.ask
		}
	}
	v.touched, v.over, v.ours, v.painted = false, false, false, false
	return &v
}

// lines are the rows of a plain dialog above the cursor's, and the text in that.
func (d *simDialog) lines(pointer int) (rows []string, line string) {
	rows = append(rows, d.above...)
	rows = append(rows, "")
	rows = append(rows, d.body...)
	switch d.kind {
	case "yesno":
		return rows, d.ask + " [y/n] "
	case "menu":
		rows = append(rows, "? "+d.ask)
		for i, c := range d.choices {
			mark := "  "
			if i == pointer {
				mark = "❯ "
			}
			rows = append(rows, mark+c)
		}
		return rows, ""
	case "list":
		for i, c := range d.choices {
			rows = append(rows, fmt.Sprintf("  %d) %s", i+1, c))
		}
		return rows, d.ask + " "
	case "enter":
		return rows, d.ask
	}
	return rows, d.ask + " "
}

// show puts a plain dialog on the screen, below what was there.
func (s *sim) show(d *simDialog) {
	s.pointer, s.line, s.lineBy = 0, "", nil
	rows, line := d.lines(0)
	if d.kind == "menu" {
		s.print("\x1b[?25l")
	}
	s.print("%s\r\n%s", strings.Join(rows, "\r\n"), line)
	s.stand(d)
	s.lives(d)
}

// stand notes that this version stands from now on; what is decided of it is taken a little later.
func (s *sim) stand(d *simDialog) {
	s.leave()
	s.up, s.changedAt = d, time.Now()
	d.shownAt, d.bornAt, d.painted = time.Now(), time.Now(), true
	s.count["dialogs"]++
	s.note("tool shows %d.%d %s: %s | %s | %s %q", d.n, d.version, d.kind, strings.Join(d.above, " / "), strings.Join(d.body, " / "), d.ask, d.choices)
}

// leave notes that what stood does not stand any more.
func (s *sim) leave() {
	if d := s.up; d != nil && d.painted {
		s.stands = append(s.stands, simStand{d, d.shownAt, time.Now()})
	}
	s.changedAt = time.Now()
	s.up = nil
}

// lives has a plain dialog change, vanish, be swapped, be painted again, and be typed at.
func (s *sim) lives(d *simDialog) {
	r := s.random("lives", d.n)
	for range r.IntN(3) {
		s.at(between(r, 0, 7000), func() { s.acts(d.n, r) })
	}
	s.at(between(r, 9000, 35000), func() { s.vanish(d.n, r) })
	s.typist(d, r)
}

// typist has somebody at the keyboard answer, or press a key by mistake.
func (s *sim) typist(d *simDialog, r *rand.Rand) {
	if r.IntN(5) == 0 {
		s.at(between(r, 0, 9000), func() { s.press(s.answerKeys(r)) })
	}
	if r.IntN(12) == 0 {
		s.at(between(r, 0, 9000), func() { s.press([]string{"X", "\x1bOB", "Q", "\x03"}[r.IntN(4)]) })
	}
}

// answerKeys are keys that answer what stands.
func (s *sim) answerKeys(r *rand.Rand) string {
	switch {
	case s.up == nil:
		return "\n"
	case s.claude:
		return []string{"A", "B", "C", "\n", "\x03"}[r.IntN(5)]
	}
	switch s.up.kind {
	case "yesno":
		return []string{"Y\n", "N\n", "Y", "\n"}[r.IntN(4)]
	case "list":
		return string(rune('A'+r.IntN(3))) + "\n"
	case "menu":
		return []string{"\n", "\x1bOB", "\x1bOB\n", "\x03"}[r.IntN(4)]
	case "enter":
		return "\n"
	}
	return "KEYBOARD\n"
}

// acts does something with the dialog number n, if it still stands.
func (s *sim) acts(n int, r *rand.Rand) {
	d := s.up
	if d == nil || d.n != n || d.over || s.ending {
		return
	}
	switch r.IntN(8) {
	case 0:
		s.vanish(n, r)
	case 1: // the same shape, below, at once
		s.note("tool swaps %d", n)
		v := s.variant(d, r)
		if !s.claude && r.IntN(2) == 0 { // in the same words
			*v = *d
			v.version++
		}
		if s.claude {
			s.pointer = 0
			s.stand(v)
			s.paintClaude()
			return
		}
		s.clear()
		s.show2(v)
	case 2, 3: // painted again as it is
		s.note("tool paints %d again", n)
		s.repaint()
	case 4: // away for a moment, then back as it was
		s.note("tool hides %d for a moment", n)
		if s.claude {
			s.up = nil
			s.changedAt = time.Now()
			s.paintClaude()
			s.at(between(r, 10, 900), func() {
				if s.up == nil && !d.over && !s.ending {
					s.up = d
					s.changedAt = time.Now()
					d.shownAt = time.Now()
					s.paintClaude()
				}
			})
		}
	default:
		v := s.variant(d, r)
		s.stand(v)
		s.repaint()
	}
}

// show2 shows a plain dialog that follows another at once: the screen has nothing in between.
func (s *sim) show2(d *simDialog) {
	s.pointer, s.line, s.lineBy = 0, "", nil
	rows, line := d.lines(0)
	if d.kind == "menu" {
		s.print("\x1b[?25l")
	}
	s.print("%s\r\n%s", strings.Join(rows, "\r\n"), line)
	s.stand(d)
}

// repaint writes what stands over what was there.
func (s *sim) repaint() {
	if s.claude {
		s.paintClaude()
		return
	}
	rows, line := s.up.lines(s.pointer)
	if s.up.kind == "menu" {
		s.print("\x1b[%dA\r%s\x1b[K\r\n", len(rows)-1, strings.Join(rows, "\x1b[K\r\n"))
		s.print("\x1b[1A\x1b[%dC", len([]rune(rows[len(rows)-1])))
		return
	}
	s.print("\x1b[%dA\r%s\x1b[K\r\n%s%s\x1b[K", len(rows), strings.Join(rows, "\x1b[K\r\n"), line, s.shownLine())
}

// shownLine is what was typed and echoed.
func (s *sim) shownLine() string {
	if s.up.kind == "secret" {
		return ""
	}
	var b strings.Builder
	for _, c := range s.line {
		b.WriteString(simEcho(c))
	}
	return b.String()
}

// simEcho is how a terminal in canonical mode shows a character.
func simEcho(c rune) string {
	if c < ' ' {
		return "^" + string(c+'@')
	}
	return string(c)
}

// clear takes a plain dialog away.
func (s *sim) clear() {
	if s.up.kind == "menu" {
		rows, _ := s.up.lines(0)
		s.print("\x1b[%dA\r\x1b[J? %s\r\n\x1b[?25h", len(rows)-1, s.up.ask)
		return
	}
	s.print("\r\n")
}

// vanish has the tool give the dialog number n up.
func (s *sim) vanish(n int, r *rand.Rand) {
	d := s.up
	if d == nil || d.n != n || d.over || s.ending {
		return
	}
	s.note("tool gives %d up", n)
	d.over, d.overAt = true, time.Now()
	if s.claude {
		s.leave()
		s.paintClaude()
	} else {
		s.clear()
		s.leave()
		s.print("never mind\r\n")
	}
	s.at(s.gap(r), s.next)
}

// gap is the time between two dialogs: often none.
func (s *sim) gap(r *rand.Rand) time.Duration {
	if r.IntN(3) == 0 {
		return between(r, 0, 25)
	}
	return between(r, 25, 1500)
}

// simOurs tells whether AtlasBridge has typed this: the person's keys are others.
func simOurs(text string) bool {
	return strings.ContainsFunc(strings.ReplaceAll(text, "\x1bO", ""), func(c rune) bool {
		return c == '\r' || c == 0x1b || c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
	})
}

// takes is the tool reading bytes; p is the decision of which they are, where they are ours.
func (s *sim) takes(text string, p *PromptRecord) {
	if s.ended {
		return
	}
	by := "keyboard"
	if simOurs(text) {
		by = "us"
		s.count["typed"]++
	} else {
		p = nil
	}
	what := "nothing"
	if s.up != nil {
		what = fmt.Sprintf("%d.%d", s.up.n, s.up.version)
	}
	if time.Since(s.changedAt) < simBlind {
		s.note("tool ignores %q of %s at %s: too soon after a change", text, by, what)
		if p != nil {
			s.dropped[p.ID] = true
		}
		s.ahead = s.ahead || by == "us" && s.said[text]
		return
	}
	s.note("tool reads %q of %s at %s", text, by, what)
	if by == "us" && !s.allowed(text, p) {
		return
	}
	switch {
	case s.claude:
		s.takesClaude(text, p)
	case s.up == nil || s.up.over:
		for _, c := range text { // the terminal echoes what is typed ahead
			if c == '\r' || c == '\n' {
				s.print("\r\n")
			} else {
				s.print("%s", simEcho(c))
			}
		}
	case s.up.kind == "menu":
		s.takesMenu(text, p)
	default:
		s.takesLine(text, p)
	}
}

// allowed checks that bytes of ours belong to what stands.
func (s *sim) allowed(text string, p *PromptRecord) bool {
	d := s.up
	if said := s.said[pasteBrackets.Replace(strings.TrimSuffix(text, "\r"))]; said && d == nil {
		s.ahead = true
	} else if text == "\r" && s.ahead && p == nil {
		s.ahead = false
		if d != nil {
			s.fault("Enter after a text of the phone's answers dialog %d.%d", d.n, d.version)
		}
		return d == nil
	}
	if s.said[pasteBrackets.Replace(strings.TrimSuffix(text, "\r"))] || text == "\r" && s.box != "" && s.said[s.box] || text == "\x15" && s.box != "" {
		if d != nil && p == nil {
			s.fault("text %q of the phone's went into dialog %d.%d", text, d.n, d.version)
		}
		if d == nil {
			return true
		}
	}
	switch {
	case p == nil:
		s.fault("%q of ours, and nothing was decided", text)
	case d == nil:
		s.fault("%q of ours where nothing asks; it was for %q", text, p.Question)
	case d.over:
		s.fault("%q of ours at dialog %d.%d, which is answered already", text, d.n, d.version)
	case d.hooked && s.hookLives(d):
		s.fault("%q of ours was typed into dialog %d.%d, whose hook waits", text, d.n, d.version)
	default:
		s.shown(d, p)
		return true
	}
	return false
}

func (s *sim) hookLives(d *simDialog) bool {
	return slices.ContainsFunc(s.hooks, func(h *simHook) bool { return h.d.n == d.n && !h.done && !h.dead.Load() })
}

// shown checks that the person has seen all of d in the messages of the decision p, or what p would have shown them.
func (s *sim) shown(d *simDialog, p *PromptRecord) {
	value := ""
	if p.Value != nil {
		value = *p.Value
	}
	refuses := p.Value != nil && p.refuses(value)
	text := p.Shown
	if by := *cmp.Or(p.DecidedBy, ref("")); strings.HasPrefix(by, "telegram:") {
		text = s.seenOf(p)
	} else if by != "auto:timeout" {
		s.fault("decided by %q", by)
	} else if d.kind != "enter" && !refuses {
		s.fault("waiting has typed %q at %d.%d", value, d.n, d.version)
	}
	if !s.claude && p.CreatedAt.Before(d.bornAt) {
		s.fault("typed at %d.%d what was asked of one that stood before", d.n, d.version)
	}
	needs := []string{d.ask}
	if !refuses {
		needs = slices.Concat(d.above, d.body, needs)
	}
	if d.kind != "yesno" {
		needs = append(needs, d.choices...)
	}
	if d.kind == "bash" || d.kind == "edit" || d.kind == "trust" {
		needs = append(needs, d.body...)
	}
	for _, need := range needs {
		if !strings.Contains(text, strings.TrimSpace(need)) {
			s.fault("typed at %d.%d, but %q was not shown for it; shown was:\n%s", d.n, d.version, need, text)
			return
		}
	}
	if len(d.choices) > 2 && p.Type != Unknown {
		labels := make([]string, 0, 4)
		for _, c := range p.Choices {
			labels = append(labels, c.Label)
		}
		if !slices.Equal(labels, mapped(d.choices, func(c string) string { return clip(c, 60) })) {
			s.fault("typed at %d.%d with the choices %q, shown were %q", d.n, d.version, d.choices, labels)
		}
	}
}

// means checks that what the tool took is what was decided.
func (s *sim) means(d *simDialog, meaning string, p *PromptRecord) {
	d.over, d.overAt = true, time.Now()
	if p == nil {
		s.note("dialog %d.%d: %q at the keyboard", d.n, d.version, meaning)
		return
	}
	if d.ours {
		s.fault("dialog %d.%d is answered twice", d.n, d.version)
	}
	d.ours = true
	s.count["answers"]++
	want := s.meaningOf(p)
	s.note("dialog %d.%d: %q by %s", d.n, d.version, meaning, *p.DecidedBy)
	if meaning != want && clip(meaning, 60) != want {
		s.fault("dialog %d.%d took %q, decided was %q", d.n, d.version, meaning, want)
	}
	s.took[p.ID] = append(s.took[p.ID], meaning)
	if len(s.took[p.ID]) > 1 {
		s.fault("the answer to %q was taken twice", p.Question)
	}
	if by := *p.DecidedBy; strings.HasPrefix(by, "telegram:") {
		s.wasChosen(p, want)
	}
}

// meaningOf is what was decided, in words.
func (s *sim) meaningOf(p *PromptRecord) string {
	if p.ValueHidden {
		return "text:" + s.secrets[p.ID]
	}
	if p.Value == nil {
		return "nothing"
	}
	for _, c := range answers(p) {
		if c.Key == *p.Value {
			return c.Label
		}
	}
	switch *p.Value {
	case "enter", "\r", "":
		return "Enter"
	case "esc", "cancel":
		return "Esc"
	}
	return "text:" + *p.Value
}

// takesLine is a program that reads a line.
func (s *sim) takesLine(text string, p *PromptRecord) {
	d := s.up
	for _, c := range text {
		if c == 0x1b || c == 0x03 {
			continue
		}
		if c != '\r' && c != '\n' {
			s.line += string(c)
			s.lineBy = append(s.lineBy, p)
			if d.kind != "secret" {
				s.print("%s", simEcho(c))
			}
			continue
		}
		begun := ""
		for i, c := range s.line {
			if s.lineBy[i] != p {
				begun += simEcho(c)
			}
		}
		known := p != nil && (p.Type == Unknown || strings.Contains(p.Shown, "] "+begun) || strings.Contains(p.Shown, ": "+begun))
		for _, by := range s.lineBy {
			if by != p && d.kind != "enter" && !known {
				s.fault("a line of dialog %d.%d is typed by two: %q", d.n, d.version, s.line)
				break
			}
		}
		line := s.line
		if known && len(begun) == 1 { // the person has seen it, and added to it
			line = strings.TrimPrefix(line, begun)
		}
		s.line, s.lineBy = "", nil
		meaning := ""
		switch {
		case d.kind == "yesno" && strings.EqualFold(line, "y"):
			meaning = "Yes"
		case d.kind == "yesno" && strings.EqualFold(line, "n"):
			meaning = "No"
		case d.kind == "list" && len(line) == 1 && strings.Contains("123", line):
			meaning = d.choices[line[0]-'1']
		case d.kind == "list" && len(line) == 1 && strings.Contains("ABC", line):
			meaning = d.choices[line[0]-'A']
		case d.kind == "enter", (d.kind == "text" || d.kind == "secret") && line == "":
			meaning = "Enter"
		case d.kind == "text" || d.kind == "secret":
			meaning = "text:" + line
		}
		s.print("\r\n")
		if meaning == "" { // asked again below
			if p != nil {
				s.dropped[p.ID] = true
			}
			if p != nil && !known {
				s.fault("the program does not understand %q of ours", line)
			}
			v := *d
			v.version++
			v.touched = true
			s.show2(&v)
			return
		}
		s.means(d, meaning, p)
		s.answered(d)
		return
	}
}

// answered goes on after an answer.
func (s *sim) answered(d *simDialog) {
	r := s.random("answered", d.n)
	s.leave()
	if !s.claude && r.IntN(2) == 0 {
		s.print("ok %d\r\n", d.n)
	}
	s.at(s.gap(r), s.next)
}

// takesMenu is a program with a pointer that takes no digits.
func (s *sim) takesMenu(text string, p *PromptRecord) {
	d := s.up
	moved := strings.NewReplacer("\x1b[A", "U", "\x1bOA", "U", "\x1b[B", "D", "\x1bOB", "D").Replace(text)
	for _, c := range moved {
		switch c {
		case 'U', 'D':
			step := 1
			if c == 'U' {
				step = -1
			}
			s.pointer = max(0, min(len(d.choices)-1, s.pointer+step))
			r := s.random("moves", d.n)
			at := s.pointer
			s.at(between(r, 0, 120), func() {
				if s.up == d && s.pointer == at {
					s.repaint()
				}
			})
		case '\r', '\n', 0x03, 0x1b:
			meaning := d.choices[s.pointer]
			if c == 0x03 || c == 0x1b {
				meaning = "Esc"
			}
			s.means(d, meaning, p)
			s.clear()
			s.answered(d)
			return
		}
	}
}

// ---- claude ----

// nextOfClaude calls hooks, or shows the next dialog of those that were called for.
func (s *sim) nextOfClaude(r *rand.Rand) {
	for len(s.queue) > 0 {
		d := s.queue[0]
		s.queue = s.queue[1:]
		if !d.over {
			s.comes(d, r)
			return
		}
	}
	if s.left <= 0 {
		s.at(between(r, 300, 900), s.next)
		return
	}
	s.print("\x1b]0;◐ Claude Code\a")
	s.status("state=working:app=claude-code")
	s.paintClaude()
	together := 1
	if r.IntN(3) == 0 {
		together = min(s.left, 2+r.IntN(2))
	}
	var dialogs []*simDialog
	for range together {
		s.left--
		s.made++
		dialogs = append(dialogs, s.claudeDialog(s.random("claude", s.made)))
	}
	for _, d := range dialogs {
		if d.hooked {
			s.callHook(d, between(r, 23, 440))
			if r.IntN(8) == 0 {
				s.callHook(d, between(r, 23, 1400))
			}
		}
	}
	if r.IntN(3) == 0 {
		slices.Reverse(dialogs)
	}
	s.queue = append(s.queue, dialogs...)
	s.at(between(r, 30, 300), s.next)
}

func (s *sim) claudeDialog(r *rand.Rand) *simDialog {
	word := func() string { return simWords[r.IntN(len(simWords))] + strconv.Itoa(r.IntN(100)) }
	d := &simDialog{n: s.made, kind: []string{"bash", "bash", "edit", "trust"}[r.IntN(4)], hooked: r.IntN(3) > 0}
	switch d.kind {
	case "bash":
		d.body = []string{"rm -rf build/" + word() + " && echo " + word()}
		d.ask = "Do you want to proceed?"
		d.choices = []string{"Yes", "Yes, and always allow access to " + word() + "/ from this project", "No"}
	case "edit":
		file := word() + ".txt"
		d.body = []string{"src/" + file, "1 -old " + word(), "1 +new " + word()}
		d.ask = "Do you want to make this edit to " + file + "?"
		d.choices = []string{"Yes", "Yes, allow all edits during this session", "No"}
	case "trust":
		d.hooked = false
		d.body = []string{"Accessing workspace:", "/work/" + word()}
		d.ask = "Is this a project you created or one you trust?"
		d.choices = []string{"Yes, I trust this folder", "No, exit"}
	}
	return d
}

// comes tells that a dialog waits and paints it later, in one piece or two.
func (s *sim) comes(d *simDialog, r *rand.Rand) {
	s.print("\x1b]0;✳ Claude Code\a")
	if d.kind == "bash" {
		s.status("state=blocked:app=claude-code:kind=permission:msg=" + base64.StdEncoding.EncodeToString([]byte("approve Bash: "+d.body[0])))
	} else {
		s.status("state=blocked:app=claude-code:kind=permission:msg=" + base64.StdEncoding.EncodeToString([]byte("approve "+d.kind)))
	}
	paint := between(r, 20, 400)
	if r.IntN(4) == 0 {
		paint = between(r, 400, 2000)
	}
	if !d.hooked {
		paint = between(r, 5, 200)
	}
	s.at(paint, func() {
		if d.over || s.up != nil || s.ending {
			s.next()
			return
		}
		s.pointer = 0
		s.print("\x1b]0;✳ Claude Code\a")
		s.stand(d)
		if r.IntN(3) == 0 {
			s.paintHalf()
			s.at(between(r, 20, 250), func() {
				if s.up == d {
					s.changedAt = time.Now()
					s.paintClaude()
				}
			})
		} else {
			s.paintClaude()
		}
		for range r.IntN(3) {
			if !d.hooked {
				s.at(between(r, 0, 7000), func() { s.acts(d.n, r) })
			}
		}
		if r.IntN(4) == 0 {
			s.at(between(r, 500, 9000), func() { s.vanish(d.n, r) })
		}
		s.at(between(r, 25000, 40000), func() { s.vanish(d.n, r) })
		s.typist(d, r)
	})
}

// rows are those of claude's screen.
func (s *sim) rows() (rows []string, row, col int) {
	rule := strings.Repeat("─", 80)
	rows = []string{"> go on", "", "● On it", ""}
	d := s.up
	switch {
	case d == nil && s.idle:
		rows = append(rows, rule, "❯\u00a0"+s.box, rule, "  ? for shortcuts")
		return rows, 6, 3 + len(s.box)
	case d == nil:
		return append(rows, "✶ Brewing…", ""), 24, 1
	}
	rows = append(rows, rule, map[string]string{"bash": " Bash command", "edit": " Edit file", "trust": " Folder"}[d.kind], "")
	for _, line := range d.body {
		rows = append(rows, "   "+line)
	}
	rows = append(rows, "", " "+d.ask)
	at := 0
	for i, c := range d.choices {
		mark := "   "
		if i == s.pointer {
			mark, at = " ❯ ", len(rows)+1
		}
		rows = append(rows, fmt.Sprintf("%s%d. %s", mark, i+1, c))
	}
	return append(rows, "", " Esc to cancel · Tab to amend"), at, 2
}

func (s *sim) paintClaude() {
	rows, row, col := s.rows()
	for len(rows) < 24 {
		rows = append(rows, "")
	}
	s.print("\x1b[H%s\x1b[K\x1b[%d;%dH", strings.Join(rows, "\x1b[K\r\n"), row, col)
}

// paintHalf paints the upper part of a dialog.
func (s *sim) paintHalf() {
	rows, _, _ := s.rows()
	rows = rows[:5+len(s.up.body)]
	s.print("\x1b[H%s\x1b[K\x1b[J\x1b[24;1H", strings.Join(rows, "\x1b[K\r\n"))
}

// takesClaude is claude reading bytes.
func (s *sim) takesClaude(text string, p *PromptRecord) {
	d := s.up
	pasted := strings.HasPrefix(text, "\x1b[200~")
	switch {
	case d == nil && !s.idle:
	case d == nil && pasted:
		s.box += pasteBrackets.Replace(text)
		s.paintClaude()
	case d == nil && text == "\x15":
		s.box = ""
		s.paintClaude()
	case d == nil && (text == "\r" || text == "\n"):
		s.note("tool gets the message %q", s.box)
		if s.box != "" {
			s.messages = append(s.messages, s.box)
		}
		s.box = ""
		s.paintClaude()
	case d == nil:
	case d.over || pasted:
	case text == "\x1b" || text == "\x03":
		s.decides(d, "Esc", p)
	case text == "\r" || text == "\n":
		s.decides(d, d.choices[s.pointer], p)
	case len(text) == 1 && text[0] >= '1' && int(text[0]-'1') < len(d.choices):
		s.decides(d, d.choices[text[0]-'1'], p)
	case len(text) == 1 && text[0] >= 'A' && int(text[0]-'A') < len(d.choices):
		s.decides(d, d.choices[text[0]-'A'], p)
	case text == "\x1bOB" || text == "\x1b[B":
		s.pointer = min(len(d.choices)-1, s.pointer+1)
		s.paintClaude()
	case text == "\x1bOA" || text == "\x1b[A":
		s.pointer = max(0, s.pointer-1)
		s.paintClaude()
	}
}

// decides ends a dialog of claude's; the screen shows it a little later.
func (s *sim) decides(d *simDialog, meaning string, p *PromptRecord) {
	s.means(d, meaning, p)
	s.goesOn(d)
}

func (s *sim) goesOn(d *simDialog) {
	r := s.random("goes on", d.n)
	for _, h := range s.hooks {
		if h.d.n == d.n && !h.done && r.IntN(2) == 0 {
			h.cancel()
		}
	}
	s.at(between(r, 0, 400), func() {
		if s.up == d {
			s.leave()
			s.print("\x1b]0;◐ Claude Code\a")
			s.status("state=working:app=claude-code")
			s.paintClaude()
		}
		s.at(s.gap(r), s.next)
	})
}

// callHook runs `atlasbridge hook` for a dialog.
func (s *sim) callHook(d *simDialog, delay time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	h := &simHook{d: d, cancel: cancel, dead: &atomic.Bool{}, from: time.Now()}
	s.hooks = append(s.hooks, h)
	n := len(s.hooks)
	r := s.random("hook", n)
	after := between(r, 0, 200)
	if r.IntN(7) == 0 {
		kill9 := r.IntN(2) == 0
		s.at(between(r, 100, 8000), func() {
			if !h.done {
				s.note("hook %d of dialog %d is killed, by SIGKILL %v", n, d.n, kill9)
				h.dead.Store(kill9)
				cancel()
			}
		})
	}
	tool, input := "Bash", map[string]string{"command": d.body[0]}
	if d.kind == "edit" {
		tool = "Edit"
		input = map[string]string{"file_path": "/work/" + d.body[0], "old_string": d.body[1][3:], "new_string": d.body[2][3:]}
	}
	raw, _ := json.Marshal(input) // of strings: cannot fail
	hk := &hook{Event: "PermissionRequest", Cwd: "/work", Tool: tool, Input: raw, life: s.cfg.PermissionTimeout,
		release: func() {}}
	if r.IntN(2) == 0 {
		hk.Suggestions = []json.RawMessage{json.RawMessage(`{"type":"setMode","mode":"acceptEdits","destination":"session"}`)}
	}
	go func() {
		time.Sleep(delay)
		text := s.runHook(ctx, hk, h, n)
		time.Sleep(after)
		p := (*PromptRecord)(nil)
		if v, err := s.st.View(); err == nil {
			p = v.Prompts[hk.last]
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		h.done, h.to = true, time.Now()
		s.hookSaid(h, n, text, p)
	}()
}

func (s *sim) runHook(ctx context.Context, hk *hook, h *simHook, n int) string {
	st, err := openStoreWith(s.dir, s.files(h.dead))
	if err != nil {
		return ""
	}
	defer st.Close()
	st.watch = s.watchFolder
	hk.st, hk.session = st, s.sess.rec.ID
	if !st.Alive(hk.session) {
		return ""
	}
	s.mu.Lock()
	s.note("hook %d of dialog %d is called", n, h.d.n)
	s.mu.Unlock()
	r, w, err := os.Pipe()
	if err != nil {
		return ""
	}
	defer r.Close()
	hk.decide(&command{ctx: ctx, stdout: w})
	w.Close()
	text, err := io.ReadAll(r)
	if err != nil || h.dead.Load() {
		return ""
	}
	return string(text)
}

// hookSaid is claude taking what a hook printed.
func (s *sim) hookSaid(h *simHook, n int, text string, p *PromptRecord) {
	d := h.d
	var said struct {
		Out struct {
			Decision struct {
				Behavior           string
				Message            string
				UpdatedPermissions []json.RawMessage
			}
		} `json:"hookSpecificOutput"`
	}
	if err := json.Unmarshal([]byte(text), &said); err != nil || p == nil {
		s.note("hook %d of dialog %d says nothing", n, d.n)
		return
	}
	got := said.Out.Decision
	s.note("hook %d of dialog %d says %s, lasting %v", n, d.n, got.Behavior, len(got.UpdatedPermissions) > 0)
	if now := s.up; now != nil && now.n == d.n {
		d = now
	}
	if d.over {
		s.note("it is too late")
		soon := p.DecidedAt == nil || p.DecidedAt.Sub(d.overAt) < 3*time.Second
		s.outrun[p.ID] = soon || slices.ContainsFunc(s.hooks, func(twin *simHook) bool { return twin != h && twin.d.n == d.n })
		return
	}
	meaning := map[string]string{"allow": "allow", "deny": "deny"}[got.Behavior]
	if len(got.UpdatedPermissions) > 0 {
		meaning = "always"
	}
	s.count["hook answers"]++
	d.over, d.ours, d.overAt = true, true, time.Now()
	s.took[p.ID] = append(s.took[p.ID], meaning)
	byPhone := strings.HasPrefix(*cmp.Or(p.DecidedBy, ref("")), "telegram:")
	switch {
	case p.Value == nil || *p.Value != meaning:
		s.fault("the hook said %q, the record %v", meaning, p.Value)
	case !byPhone && meaning != "deny":
		s.fault("the hook said %q, and nobody decided it: %v", meaning, p.DecidedBy)
	case byPhone:
		s.wasChosen(p, map[string]string{"allow": "Yes", "always": "Yes, and", "deny": "No"}[meaning])
		for i, need := range d.body {
			if i > 0 {
				need = need[3:]
			}
			if meaning != "deny" && !strings.Contains(s.seenOf(p), need) {
				s.fault("the hook said %q, but %q was never shown:\n%s", meaning, need, s.seenOf(p))
			}
		}
	}
	s.goesOn(d)
	if s.up == nil {
		s.changedAt = time.Now()
	}
}

// ---- the Bot API, and the person with the phone ----

// simPhone is the model of Telegram, of the way to it and of who reads it.
type simPhone struct {
	rough   bool
	net     *rand.Rand
	person  *rand.Rand
	present int // of ten messages, how many are answered
	msgs    map[int64]*simMessage
	lastMsg int64
	updates []map[string]any
	updated chan struct{}
	lastUp  int64
	outage  [2]time.Time
	said    map[string]bool   // texts that were written
	secrets map[string]string // the last reply by prompt
	chosen  []simChoice
	labels  map[string]string // of buttons by message and data
	toasts  map[string]bool
}

type simMessage struct {
	id      int64
	replyTo int64
	lost    bool // nobody has been told its id
	seen    []simText
	prompt  string // first 8 digits of the prompt's id
}

type simText struct {
	at      time.Time
	text    string
	buttons []simButton
	late    bool
}

type simButton struct {
	Text string `json:"text"`
	Data string `json:"callback_data"`
}

// simChoice is something the person did to answer.
type simChoice struct {
	at     time.Time
	prompt string
	label  string
	data   string
	text   string // of a reply
}

func (p *simPhone) begin(s *sim) {
	p.net, p.person = s.random("net", 0), s.random("person", 0)
	p.rough = p.net.IntN(2) == 0
	p.present = []int{0, 5, 9, 9}[p.person.IntN(4)]
	p.msgs, p.said, p.secrets, p.labels = map[int64]*simMessage{}, map[string]bool{}, map[string]string{}, map[string]string{}
	p.updated = make(chan struct{}, 1)
	p.lastMsg, p.lastUp = 100, 5000
	if p.rough && p.net.IntN(3) == 0 {
		from := s.start.Add(between(p.net, 1000, 30000))
		p.outage = [2]time.Time{from, from.Add(between(p.net, 2000, 40000))}
	}
}

// fate is what becomes of a request.
type simFate struct {
	there, back time.Duration
	lost        string // "", before, after, late
	code, again int
}

func (s *sim) fate(method string, in *simRequest) simFate {
	text, _, _ := strings.Cut(in.Text, " sha256:")
	text, _, _ = strings.Cut(text, "[SID:")
	r := s.random(fmt.Sprint(method, in.MessageID, in.Offset, text), s.now())
	f := simFate{there: between(r, 3, 120), back: between(r, 3, 120)}
	n := r.IntN(100)
	later := between(r, 500, 15000)
	if !s.rough || s.over {
		return f
	}
	if now := time.Now(); now.After(s.outage[0]) && now.Before(s.outage[1]) {
		f.lost = "before"
		return f
	}
	switch {
	case n < 5:
		f.lost = "before"
	case n < 10:
		f.lost = "after"
	case n < 13 && method != "getUpdates":
		f.lost, f.there = "late", later
	case n < 17:
		f.code, f.again = 429, 1+r.IntN(3)
	case n < 20:
		f.code = 502
	case n < 28:
		f.there = between(r, 1000, 4000)
	}
	return f
}

type simRequest struct {
	Offset          int64
	Timeout         int
	MessageID       int64 `json:"message_id"`
	Text            string
	CallbackQueryID string `json:"callback_query_id"`
	ReplyParameters struct {
		MessageID int64 `json:"message_id"`
	} `json:"reply_parameters"`
	ReplyMarkup struct {
		Keyboard [][]simButton `json:"inline_keyboard"`
	} `json:"reply_markup"`
}

var errSimNet = errors.New("connection reset by peer")

// RoundTrip is the Bot API and the way to it.
func (s *sim) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	var in simRequest
	if err := json.Unmarshal(body, &in); err != nil {
		return nil, err
	}
	ctx, method := req.Context(), path.Base(req.URL.Path)
	s.mu.Lock()
	f := s.fate(method, &in)
	s.mu.Unlock()
	if f.lost == "late" {
		s.mu.Lock()
		s.note("network: %s %d will come %v later", method, in.MessageID, f.there.Round(time.Millisecond))
		s.at(f.there, func() { s.carryOut(method, &in, true) })
		s.mu.Unlock()
		if err := sleep(ctx, f.back); err != nil {
			return nil, err
		}
		return nil, errSimNet
	}
	if err := sleep(ctx, f.there); err != nil {
		return nil, err
	}
	if f.lost == "before" {
		s.mu.Lock()
		if method != "getUpdates" {
			s.note("network: %s is lost", method)
		}
		s.mu.Unlock()
		return nil, errSimNet
	}
	var answer any
	status := 200
	switch {
	case f.code == 429:
		status = 429
		answer = map[string]any{"ok": false, "error_code": 429, "description": "Too Many Requests",
			"parameters": map[string]any{"retry_after": f.again}}
	case f.code != 0:
		status = f.code
		answer = map[string]any{"ok": false, "error_code": f.code, "description": "Bad Gateway"}
	case method == "getUpdates":
		updates, err := s.poll(ctx, &in)
		if err != nil {
			return nil, err
		}
		answer = map[string]any{"ok": true, "result": updates}
	default:
		s.mu.Lock()
		status, answer = s.carryOut(method, &in, f.lost == "after")
		sent := s.msgs[s.lastMsg]
		s.mu.Unlock()
		if err := sleep(ctx, f.back); err != nil && method == "sendMessage" {
			s.mu.Lock()
			sent.lost = true
			s.mu.Unlock()
		}
	}
	if err := sleep(ctx, 0); err != nil {
		return nil, err
	}
	if f.lost == "after" {
		s.mu.Lock()
		if method != "getUpdates" {
			s.note("network: the answer to %s is lost", method)
		}
		s.mu.Unlock()
		return nil, errSimNet
	}
	text, _ := json.Marshal(answer) // plain values: cannot fail
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(text)), Request: req}, nil
}

// poll is getUpdates: it waits for one.
func (s *sim) poll(ctx context.Context, in *simRequest) ([]map[string]any, error) {
	end := time.After(time.Duration(in.Timeout) * time.Second)
	for {
		s.mu.Lock()
		s.updates = slices.DeleteFunc(s.updates, func(u map[string]any) bool { return u["update_id"].(int64) < in.Offset })
		found := slices.Clone(s.updates)
		s.mu.Unlock()
		if len(found) > 0 {
			return found, nil
		}
		select {
		case <-s.updated:
		case <-end:
			return []map[string]any{}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// carryOut does what a request asks for; unknown: its answer never arrives.
func (s *sim) carryOut(method string, in *simRequest, unknown bool) (status int, answer any) {
	ok := func(result any) (int, any) { return 200, map[string]any{"ok": true, "result": result} }
	bad := func(text string) (int, any) {
		return 400, map[string]any{"ok": false, "error_code": 400, "description": "Bad Request: " + text}
	}
	buttons := slices.Concat(in.ReplyMarkup.Keyboard...)
	switch method {
	case "sendMessage":
		s.lastMsg++
		m := &simMessage{id: s.lastMsg, replyTo: in.ReplyParameters.MessageID, lost: unknown}
		s.msgs[m.id] = m
		s.becomes(m, simText{time.Now(), in.Text, buttons, unknown})
		return ok(map[string]any{"message_id": m.id})
	case "editMessageText", "editMessageReplyMarkup":
		m := s.msgs[in.MessageID]
		if m == nil {
			return bad("message to edit not found")
		}
		last := m.seen[len(m.seen)-1]
		if method == "editMessageReplyMarkup" {
			in.Text = last.text
		}
		if in.Text == last.text && slices.Equal(buttons, last.buttons) {
			return bad("message is not modified")
		}
		s.becomes(m, simText{time.Now(), in.Text, buttons, unknown})
		return ok(map[string]any{"message_id": m.id})
	case "answerCallbackQuery":
		s.note("phone: toast %q", in.Text)
	}
	return ok(true)
}

// becomes gives a message a new text, and the person something to do.
func (s *sim) becomes(m *simMessage, now simText) {
	verb := "edited"
	if len(m.seen) == 0 {
		verb = "comes"
	}
	var labels []string
	answers := false
	for _, b := range now.buttons {
		labels = append(labels, b.Text)
		f := strings.SplitN(b.Data, ":", 5)
		if len(f) < 5 {
			s.fault("a button with the data %q", b.Data)
			continue
		}
		again := f[4] == tapAgain
		answers = answers || !again
		if m.prompt != "" && m.prompt != f[1] {
			s.fault("message %d has buttons of two questions", m.id)
		}
		m.prompt = f[1]
		key := fmt.Sprint(m.id, b.Data)
		if was, known := s.labels[key]; known && was != b.Text {
			s.fault("a button of message %d was %q and is %q", m.id, was, b.Text)
		}
		s.labels[key] = b.Text
	}
	if answers && len(m.seen) > 0 && !now.late {
		for _, before := range m.seen {
			if len(m.seen[0].buttons) > 0 && (len(before.buttons) == 0 || strings.HasSuffix(before.buttons[0].Data, tapAgain)) {
				s.fault("buttons have come back on message %d", m.id)
				break
			}
		}
	}
	m.seen = append(m.seen, now)
	s.note("phone: message %d %s: %s %q", m.id, verb, firstLine(now.text, answers), labels)
	s.count["messages"]++
	if !s.ending && len(now.buttons) > 0 && s.up != nil {
		s.reacts(m, now)
	} else if !s.ending && s.claude && s.idle && s.random("idle", s.now()).IntN(10) < s.present {
		s.at(between(s.random("idle", s.now()+1), 200, 3000), func() { s.says(fmt.Sprintf("say-%d", len(s.said)), m) })
	}
}

// firstLine is what a message says, in short.
func firstLine(text string, open bool) string {
	text, _, _ = strings.Cut(text, " sha256:") // no two runs have the same
	lines := strings.Split(text, "\n")
	if open {
		return lines[0]
	}
	return lines[0] + " … " + lines[max(0, len(lines)-2)]
}

// reacts is the person who reads a message with buttons.
func (s *sim) reacts(m *simMessage, now simText) {
	r := s.random("reacts", s.now())
	if r.IntN(10) >= s.present {
		return
	}
	b := now.buttons[r.IntN(len(now.buttons))]
	when := between(r, 150, 4000)
	if r.IntN(5) == 0 {
		when = between(r, 4000, 25000)
	}
	if r.IntN(8) == 0 {
		text := fmt.Sprintf("say-%d", len(s.said)+r.IntN(3))
		s.at(when, func() { s.says(text, m) })
		return
	}
	s.at(when, func() { s.taps(m, b) })
	if r.IntN(5) == 0 {
		s.at(when+between(r, 0, 900), func() { s.taps(m, b) })
	}
	if r.IntN(6) == 0 {
		other := now.buttons[r.IntN(len(now.buttons))]
		s.at(when+between(r, 0, 8000), func() { s.taps(m, other) })
	}
	if r.IntN(7) == 0 { // at the keyboard in the same moment
		s.at(when+between(r, 0, 700), func() { s.press(s.answerKeys(r)) })
	}
	if r.IntN(10) == 0 { // the dialog changes in the same moment
		s.at(when+between(r, 0, 500), func() {
			if s.up != nil && !s.up.hooked {
				s.acts(s.up.n, r)
			}
		})
	}
	if r.IntN(25) == 0 {
		s.at(when+between(r, 0, 2000), func() { s.command("/keys CTRL_F") })
	}
	if r.IntN(25) == 0 {
		text := fmt.Sprintf("say-%d", len(s.said)+r.IntN(3))
		s.said[text] = true
		s.at(when+between(r, 0, 2000), func() { s.command("/send " + s.sess.rec.ID[:8] + " " + text) })
	}
}

// taps presses a button, whether it is still there or not.
func (s *sim) taps(m *simMessage, b simButton) {
	if s.ending {
		return
	}
	s.note("person taps %q of message %d", b.Text, m.id)
	s.count["taps"]++
	if s.up != nil {
		s.up.touched = true
	}
	s.chosen = append(s.chosen, simChoice{time.Now(), m.prompt, b.Text, b.Data, ""})
	s.update(map[string]any{"callback_query": map[string]any{"id": fmt.Sprint("q", s.lastUp), "data": b.Data,
		"from": map[string]any{"id": simChat}, "message": map[string]any{"message_id": m.id,
			"chat": map[string]any{"id": simChat, "type": "private"}}}})
}

// says replies to a message.
func (s *sim) says(text string, m *simMessage) {
	if s.ending {
		return
	}
	s.note("person replies %q to message %d", text, m.id)
	if s.up != nil {
		s.up.touched = true
	}
	s.said[text] = true
	s.chosen = append(s.chosen, simChoice{time.Now(), m.prompt, "", "", text})
	s.message(text, map[string]any{"message_id": m.id, "from": map[string]any{"id": 1, "is_bot": true},
		"text": m.seen[len(m.seen)-1].text, "chat": map[string]any{"id": simChat, "type": "private"}})
}

func (s *sim) command(text string) {
	if s.ending {
		return
	}
	s.note("person writes %q", text)
	if s.up != nil {
		s.up.touched = true
	}
	_, words, _ := strings.Cut(strings.TrimPrefix(text, "/send "), " ")
	s.chosen = append(s.chosen, simChoice{time.Now(), "", "", "", words})
	s.message(text, nil)
}

func (s *sim) message(text string, replyTo map[string]any) {
	s.lastMsg++
	m := map[string]any{"message_id": s.lastMsg, "from": map[string]any{"id": simChat}, "date": time.Now().Unix(),
		"chat": map[string]any{"id": simChat, "type": "private"}, "text": text}
	if replyTo != nil {
		m["reply_to_message"] = replyTo
	}
	s.update(map[string]any{"message": m})
}

// update is on its way to the server, which may take a while.
func (s *sim) update(u map[string]any) {
	r := s.random("update", s.now())
	delay := between(r, 5, 150)
	if s.rough && r.IntN(5) == 0 {
		delay = between(r, 150, 5000)
	}
	s.at(delay, func() {
		s.lastUp++
		u["update_id"] = s.lastUp
		s.updates = append(s.updates, u)
		select {
		case s.updated <- struct{}{}:
		default:
		}
	})
}

// seenOf is all that the phone has shown of a question, up to its decision.
func (s *sim) seenOf(p *PromptRecord) string {
	var b strings.Builder
	for _, id := range slices.Sorted(simKeysOf(s.msgs)) {
		m := s.msgs[id]
		for _, t := range m.seen {
			if m.prompt == p.ID[:8] && (p.DecidedAt == nil || !t.at.After(*p.DecidedAt)) {
				b.WriteString(t.text + "\n")
				for _, button := range t.buttons {
					b.WriteString(button.Text + "\n")
				}
			}
		}
	}
	return b.String()
}

func simKeysOf[K comparable, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// wasChosen checks that the person chose that, for this question, with this button or in words.
func (s *sim) wasChosen(p *PromptRecord, meaning string) {
	for _, c := range s.chosen {
		if c.prompt != p.ID[:8] && (c.prompt != "" || c.at.Before(p.CreatedAt.Add(-time.Second))) { // Telegram counts seconds
			continue
		}
		label := strings.TrimLeft(c.label, "✅❌🔓↩️📨🚫⏩ 0123456789.")
		if label == meaning || label == clip(meaning, 60) || meaning == "Yes, and" && strings.HasPrefix(label, meaning) {
			return
		}
		if meaning == "Enter" && (label == "Press Enter" || label == "Send Enter") || meaning == "Esc" && strings.Contains(label, "Esc") {
			return
		}
		if c.text != "" && (meaning == "text:"+c.text || meaning == "No" && p.Permission || strings.HasPrefix(meaning, "No") && p.Permission || meaning == "Esc" && p.Permission) {
			return
		}
	}
	s.fault("%q was decided for %q, but nobody chose that: %+v", meaning, p.Question, s.chosen)
}

// ---- the verdict ----

func (s *sim) judgeAll() {
	v, err := s.st.View()
	if err != nil {
		s.fault("%v", err)
		return
	}
	verdict, err := s.st.verifyAudit(v)
	if err != nil || !verdict.OK {
		s.fault("the audit log does not verify: %v %s", err, verdict.Reason)
	}
	byShort := map[string]*PromptRecord{}
	for _, p := range v.Prompts {
		byShort[p.ID[:8]] = p
		if p.Open() || p.Status == ReplyReceived || p.Status == Injected {
			s.fault("the question %q is left %s", p.Question, p.Status)
		}
	}
	for _, id := range slices.Sorted(simKeysOf(s.msgs)) {
		if m := s.msgs[id]; m.prompt != "" && byShort[m.prompt] != nil {
			s.judgeMessage(m, byShort[m.prompt])
		}
	}
	s.judgeRepeats(v)
	for id, took := range s.took {
		if p := v.Prompts[id]; p != nil && p.Status != Resolved {
			s.fault("the tool took %q, the record of %q says %s (%s)", took, p.Question, p.Status, p.Reason)
		}
	}
	if !s.rough {
		s.judgeStands(v)
	}
}

// judgeRepeats checks that what expired, or was left to the terminal, is not asked again by itself.
func (s *sim) judgeRepeats(v *View) {
	for _, p := range v.Prompts {
		if p.Value != nil || p.DecidedAt == nil || p.Source != "screen" {
			continue
		}
		again := slices.ContainsFunc(s.chosen, func(c simChoice) bool { return c.prompt == p.ID[:8] && strings.HasSuffix(c.data, tapAgain) })
		waited := *cmp.Or(p.DecidedBy, ref("")) == "auto:timeout" || strings.HasPrefix(p.Reason, "left as it is")
		for _, q := range v.Prompts {
			after := q.CreatedAt.Sub(*p.DecidedAt)
			if waited && !again && q != p && q.Shown == p.Shown && after >= 0 && after < 20*time.Millisecond {
				s.fault("%q was over and is asked again by itself", p.Question)
			}
		}
	}
}

// judgeMessage checks that a message tells the truth at last.
func (s *sim) judgeMessage(m *simMessage, p *PromptRecord) {
	last := m.seen[len(m.seen)-1]
	if m.lost || slices.Contains(p.OldMsgIDs, m.id) {
		return
	}
	if len(last.buttons) > 0 {
		s.fault("message %d of %q (%s) still has buttons", m.id, p.Question, p.Status)
	}
	if m.id != p.MsgID || p.Idle {
		return
	}
	took := s.took[p.ID]
	says := ""
	for line := range strings.SplitSeq(last.text, "\n") {
		for _, mark := range []string{"✅ Answered", "❌ Answered", "⚠️", "🚫 Canceled", "⌛", "⏱"} {
			if strings.HasPrefix(line, mark) {
				says = line
			}
		}
	}
	byUs := strings.Contains(says, "on the phone by") && strings.Contains(says, "Answered") && strings.Contains(says, "telegram:1001: ") ||
		strings.Contains(says, "so it was refused")
	switch {
	case says == "":
		s.fault("message %d of %q says nothing of its end: %s", m.id, p.Question, last.text)
	case byUs && len(took) == 0 && !s.dropped[p.ID] && !s.outrun[p.ID]:
		s.fault("message %d says %q, but the tool took nothing", m.id, says)
	case !byUs && len(took) > 0 && !strings.Contains(says, "in the same moment"):
		s.fault("message %d says %q, but the tool took %q", m.id, says, took)
	}
}

// judgeStands checks that what stood was asked.
func (s *sim) judgeStands(v *View) {
	const enough = 5 * time.Second
	for i, one := range s.stands {
		d := one.simDialog
		long := one.to.Sub(one.from) - s.cfg.Away
		asked := func(h *simHook) bool { return h.from.Before(one.to) && (h.to.IsZero() || h.to.After(one.from)) }
		if d.touched || long < enough || d.hooked || s.blind && d.kind == "menu" || slices.ContainsFunc(s.hooks, asked) {
			continue
		}
		recent := 0
		for _, before := range s.stands[:i] {
			if one.from.Sub(before.to) < time.Minute {
				recent++
			}
		}
		if recent > 3 {
			continue
		}
		n := 0
		for _, p := range v.Prompts {
			if p.MsgID != 0 && strings.Contains(p.Shown, strings.TrimSpace(d.ask)) && (len(d.body) == 0 || strings.Contains(p.Shown, d.body[0])) {
				n++
			}
		}
		if n == 0 {
			s.fault("dialog %d.%d stood for %v and was never asked", d.n, d.version, long)
		}
	}
}
