package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"
)

/* ===== Store: helpers ===== */

// storeDir is a private folder.
func storeDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "home")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// storeAt opens the state in dir and closes it with the test.
func storeAt(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := openStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func storeUpdate(s *Store, recs ...Record) error {
	return s.Update(func(*View) ([]Record, error) { return recs, nil })
}

// storeSession adds an active session and returns its id.
func storeSession(t testing.TB, s *Store) string {
	t.Helper()
	r := &SessionRecord{Head: Head{ID: newID()}, Tool: "claude", Status: "active", StartedAt: time.Now()}
	if err := storeUpdate(s, r); err != nil {
		t.Fatal(err)
	}
	return r.ID
}

func storeQuestion(session string) *PromptRecord {
	return &PromptRecord{Head: Head{ID: newID()}, SessionID: session, Type: YesNo, Confidence: "high", Excerpt: "Go on? (y/n)",
		SafeDefault: ref("n"), Signals: []string{"pattern"}, Status: Created, Nonce: newNonce(), CreatedAt: time.Now(),
		ExpiresAt: time.Now().Add(time.Hour)}
}

// storePrompt adds a question and takes it to a state through legal moves.
func storePrompt(t testing.TB, s *Store, session string, to State, change func(*PromptRecord)) *PromptRecord {
	t.Helper()
	p := storeQuestion(session)
	if change != nil {
		change(p)
	}
	if err := storeUpdate(s, p); err != nil {
		t.Fatal(err)
	}
	way := map[State][]State{Routed: {Routed}, AwaitingReply: {Routed, AwaitingReply}, ReplyReceived: {ReplyReceived},
		Injected: {ReplyReceived, Injected}, Resolved: {Resolved}, Expired: {Expired}, Canceled: {Canceled}, Failed: {Failed}}
	for _, st := range way[to] {
		if ok, err := s.move(p.ID, st, p.ExpiresAt, nil); !ok || err != nil {
			t.Fatalf("moving to %s: %v %v", st, ok, err)
		}
	}
	return storeView(t, s).Prompts[p.ID]
}

func storeView(t testing.TB, s *Store) *View {
	t.Helper()
	v, err := s.View()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func storeTap(p *PromptRecord, value string) Decision {
	return Decision{PromptID: shortID(p.ID), SessionID: shortID(p.SessionID), Nonce: p.Nonce[:16], Value: value, By: "telegram:1001"}
}

// storeCommand runs a command on dir and returns its exit code and output.
func storeCommand(t testing.TB, ctx context.Context, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var files [2]*os.File
	for i := range files {
		f, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	c := &command{ctx: ctx, name: args[0], args: args[1:], stdout: files[0], stderr: files[1],
		getenv: func(k string) string { return map[string]string{"ATLASBRIDGE_HOME": dir}[k] }}
	code = c.spec().do(c)
	out, _ := os.ReadFile(files[0].Name())
	errs, _ := os.ReadFile(files[1].Name())
	return code, string(out), string(errs)
}

// faultyFiles calls fault before each operation with its number; an error stands for the operation's, and a
// write's leaves half of its bytes.
func faultyFiles(fault func(op string, n int64) error) files {
	var count atomic.Int64
	real := systemFiles()
	check := func(op string) error { return fault(op, count.Add(1)) }
	return files{
		write: func(f *os.File, b []byte) (int, error) {
			if err := check("write"); err != nil {
				n, _ := f.Write(b[:len(b)/2])
				return n, err
			}
			return f.Write(b)
		},
		sync: func(f *os.File) error {
			if err := check("fsync"); err != nil {
				return err
			}
			return f.Sync()
		},
		truncate: func(f *os.File, n int64) error {
			if err := check("ftruncate"); err != nil {
				return err
			}
			return f.Truncate(n)
		},
		rename: func(a, b string) error {
			if err := check("rename"); err != nil {
				return err
			}
			return real.rename(a, b)
		},
		syncDir: func(dir string) error {
			if err := check("fsync folder"); err != nil {
				return err
			}
			return real.syncDir(dir)
		},
	}
}

// storeSteps is a question's life, with a compaction in the middle. Each step ends in the state of its name.
func storeSteps(session string, p *PromptRecord) []struct {
	to State
	do func(*Store) error
} {
	move := func(to State) func(*Store) error {
		return func(s *Store) error {
			ok, err := s.Move(p.ID, to, nil)
			if err == nil && !ok {
				err = fmt.Errorf("guard refused %s", to)
			}
			return err
		}
	}
	return []struct {
		to State
		do func(*Store) error
	}{
		{Created, func(s *Store) error {
			return storeUpdate(s, &SessionRecord{Head: Head{ID: session}, Status: "active", StartedAt: time.Now()}, p)
		}},
		{Routed, move(Routed)},
		{AwaitingReply, move(AwaitingReply)},
		{ReplyReceived, func(s *Store) error {
			_, why, err := s.Decide(storeTap(p, "y"), time.Now())
			if err == nil && why != "" {
				err = errors.New(string(why))
			}
			return err
		}},
		{Injected, func(s *Store) error {
			s.mu.Lock()
			s.compactAt = 0
			s.mu.Unlock()
			return move(Injected)(s)
		}},
		{Resolved, move(Resolved)},
	}
}

/* ===== Store: states and decisions ===== */

// The table of SPEC section 6 and source 3 section 6, with what the agreement adds: answered at the keyboard.
func TestStoreTransitions(t *testing.T) {
	legal := map[State]string{
		Created:       "routed reply_received resolved expired canceled failed",
		Routed:        "awaiting_reply reply_received resolved expired canceled failed",
		AwaitingReply: "reply_received resolved expired canceled failed",
		ReplyReceived: "injected resolved failed",
		Injected:      "resolved failed",
		Expired:       "injected resolved failed",
	}
	all := []State{Created, Routed, AwaitingReply, ReplyReceived, Injected, Resolved, Expired, Canceled, Failed}
	s := storeAt(t, storeDir(t))
	for _, from := range all {
		for _, to := range all {
			p := storePrompt(t, s, storeSession(t, s), from, nil)
			want := slices.Contains(strings.Fields(legal[from]), string(to))
			got, err := s.move(p.ID, to, p.ExpiresAt, nil)
			after := storeView(t, s).Prompts[p.ID]
			if got != want || err != nil || (after.Status == to) != (want || from == to) {
				t.Errorf("move(%s → %s) = %v, %v, now %s; want %v", from, to, got, err, after.Status, want)
			}
			q := *p
			q.Status = to
			if err := storeUpdate(s, &q); from != to && (err == nil) && !want {
				t.Errorf("update(%s → %s) accepted", from, to)
			}
		}
	}
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
	if ok, _ := s.Expire(p.ID, p.ExpiresAt.Add(-time.Second)); ok {
		t.Error("expired before its time")
	}
	second := storePrompt(t, s, p.SessionID, Routed, nil)
	if ok, _ := s.Move(second.ID, AwaitingReply, nil); ok {
		t.Error("two questions of one session await a reply")
	}
	for _, change := range []func(*PromptRecord){func(p *PromptRecord) { p.NonceUsed = false }, func(p *PromptRecord) { p.Nonce = newNonce() }} {
		q := *storePrompt(t, s, storeSession(t, s), ReplyReceived, nil)
		change(&q)
		if err := storeUpdate(s, &q); err == nil {
			t.Error("a used nonce became fresh")
		}
	}
}

func TestStoreDecideGuards(t *testing.T) {
	type setup struct {
		s   *Store
		p   *PromptRecord
		d   Decision
		now time.Time
	}
	rows := []struct {
		name, why string // part of the refusal, "" accepted
		change    func(*setup)
	}{
		{"a tap", "", func(*setup) {}},
		{"full ids and nonce", "", func(x *setup) { x.d.PromptID, x.d.SessionID, x.d.Nonce = x.p.ID, x.p.SessionID, x.p.Nonce }},
		{"unknown id", "no question", func(x *setup) { x.d.PromptID = "00000000" }},
		{"id too short", "no question", func(x *setup) { x.d.PromptID = x.p.ID[:7] }},
		{"no id", "no question", func(x *setup) { x.d.PromptID = "" }},
		{"other session", "no question", func(x *setup) { x.d.SessionID = shortID(newID()) }},
		{"no session", "no question", func(x *setup) { x.d.SessionID = "" }},
		{"wrong nonce", "does not belong", func(x *setup) { x.d.Nonce = newNonce()[:16] }},
		{"no nonce", "does not belong", func(x *setup) { x.d.Nonce = "" }},
		{"short nonce", "does not belong", func(x *setup) { x.d.Nonce = x.p.Nonce[:15] }},
		{"too late", "expired at", func(x *setup) { x.now = x.p.ExpiresAt }},
		{"just in time", "", func(x *setup) { x.now = x.p.ExpiresAt.Add(-time.Microsecond) }},
		{"clock set back after expiry", "expired at", func(x *setup) { x.s.Expire(x.p.ID, x.p.ExpiresAt); x.now = x.p.CreatedAt }},
		{"answered before", "already answered on the phone", func(x *setup) { x.s.Decide(x.d, x.now) }},
		{"answered at the keyboard", "already answered at the keyboard", func(x *setup) {
			x.s.Decide(Decision{PromptID: x.p.ID, Value: "n", By: "cli:local", Trusted: true}, x.now)
		}},
		{"left the screen", "left the screen", func(x *setup) { x.s.Move(x.p.ID, Resolved, nil) }},
		{"failed", "session has ended", func(x *setup) { x.s.Move(x.p.ID, Failed, nil) }},
		{"session over", "session has ended", func(x *setup) {
			r := *storeView(t, x.s).Sessions[x.p.SessionID]
			r.Status = "completed"
			storeUpdate(x.s, &r)
		}},
		{"wrong value", "it takes y n", func(x *setup) { x.d.Value = "maybe" }},
		{"trusted without nonce and session", "", func(x *setup) {
			x.d.Nonce, x.d.SessionID, x.d.Trusted, x.d.By = "", "", true, "cli:answer"
		}},
		{"trusted but another session", "no question", func(x *setup) { x.d.Trusted, x.d.SessionID = true, newID() }},
		{"not asked yet", "not been asked", func(x *setup) { x.p = storePrompt(t, x.s, x.p.SessionID, Created, nil); x.d = storeTap(x.p, "y") }},
		{"not asked yet, keyboard", "", func(x *setup) {
			x.p = storePrompt(t, x.s, x.p.SessionID, Created, nil)
			x.d = Decision{PromptID: x.p.ID, Value: "y", By: "cli:local", Trusted: true}
		}},
		{"tap before its delivery is recorded", "", func(x *setup) {
			x.p = storePrompt(t, x.s, x.p.SessionID, Routed, nil)
			x.d = storeTap(x.p, "y")
		}},
		{"keyboard after the time", "", func(x *setup) { x.d.Trusted, x.d.By, x.now = true, "cli:local", x.p.ExpiresAt }},
		{"secret of another process", "own keyboard", func(x *setup) {
			x.p = storePrompt(t, x.s, x.p.SessionID, Routed, func(p *PromptRecord) { p.Secret, p.Type = true, FreeText })
			x.d = storeTap(x.p, "hunter2")
		}},
		{"eleventh in a minute", "10 answers in a minute", func(x *setup) {
			for range 10 {
				p := storePrompt(t, x.s, x.p.SessionID, Routed, nil)
				if _, why, err := x.s.Decide(storeTap(p, "y"), x.now); why != "" || err != nil {
					t.Fatal(why, err)
				}
			}
		}},
		{"eleventh, a minute later", "", func(x *setup) {
			for range 10 {
				x.s.Decide(storeTap(storePrompt(t, x.s, x.p.SessionID, Routed, nil), "y"), x.now)
			}
			x.now = x.now.Add(time.Minute)
		}},
	}
	s := storeAt(t, storeDir(t))
	for _, row := range rows {
		x := &setup{s: s, now: time.Now()}
		x.p = storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
		x.d = storeTap(x.p, "y")
		row.change(x)
		before := storeView(t, s).Prompts[x.p.ID]
		got, why, err := s.Decide(x.d, x.now)
		after := storeView(t, s).Prompts[x.p.ID]
		if err != nil || (why == "") != (row.why == "") || !strings.Contains(string(why), row.why) {
			t.Errorf("%s: refusal %q, %v; want %q", row.name, why, err, row.why)
		}
		if why != "" && after != nil && before.At != after.At {
			t.Errorf("%s: refused, but the record changed", row.name)
		}
		if why == "" && (after.Status != ReplyReceived || !after.NonceUsed || *after.DecidedBy != x.d.By || got.At != after.At) {
			t.Errorf("%s: accepted, but the record is %+v", row.name, after)
		}
	}
}

func TestStoreDecideValues(t *testing.T) {
	menu := []Choice{{Key: "1", Label: "Yes", Grants: true}, {Key: "2", Label: "No"}, {Key: "3", Label: "Later"}}
	rows := []struct {
		p           PromptRecord
		given, want string // want "!" for refused
	}{
		{PromptRecord{Type: YesNo}, "y", "y"}, {PromptRecord{Type: YesNo}, "YES", "y"}, {PromptRecord{Type: YesNo}, "No", "n"},
		{PromptRecord{Type: YesNo}, "1", "!"}, {PromptRecord{Type: YesNo}, "", "!"}, {PromptRecord{Type: YesNo}, "enter", "!"},
		{PromptRecord{Type: YesNo, SafeDefault: ref("n")}, "default", "n"}, {PromptRecord{Type: YesNo}, "default", "!"},
		{PromptRecord{Type: ConfirmEnter}, "enter", "enter"}, {PromptRecord{Type: ConfirmEnter}, "", "enter"}, {PromptRecord{Type: ConfirmEnter}, "y", "!"},
		{PromptRecord{Type: MultipleChoice, Choices: menu}, "2", "2"}, {PromptRecord{Type: MultipleChoice, Choices: menu}, "4", "!"},
		{PromptRecord{Type: MultipleChoice, Choices: menu}, "1,3", "!"}, {PromptRecord{Type: MultipleChoice, Choices: menu}, "text", "!"},
		{PromptRecord{Type: MultipleChoice, Choices: menu, Multi: true}, "1,3", "1,3"},
		{PromptRecord{Type: MultipleChoice, Choices: menu, Multi: true}, "1,1", "!"}, {PromptRecord{Type: MultipleChoice, Choices: menu, Multi: true}, "1,", "!"},
		{PromptRecord{Type: MultipleChoice, Choices: append(menu, Choice{Key: "4", Label: "Type something."})}, "a text", "a text"},
		{PromptRecord{Type: MultipleChoice, Choices: menu, SafeDefault: ref("esc")}, "esc", "esc"}, {PromptRecord{Type: MultipleChoice, Choices: menu}, "esc", "!"},
		{PromptRecord{Type: MultipleChoice, Choices: menu, Permission: true, SafeDefault: ref("2")}, "deny:use make", "2"},
		{PromptRecord{Type: MultipleChoice, Choices: menu}, "deny:use make", "!"},
		{PromptRecord{Type: MultipleChoice, Permission: true}, "deny:", "deny"},
		{PromptRecord{Type: FreeText}, strings.Repeat("é", 100), strings.Repeat("é", 100)}, {PromptRecord{Type: FreeText}, strings.Repeat("é", 101), "!"},
		{PromptRecord{Type: FreeText, MaxLength: 3}, "four", "!"}, {PromptRecord{Type: FreeText, Idle: true}, strings.Repeat("a", 4096), strings.Repeat("a", 4096)},
		{PromptRecord{Type: FreeText}, "", ""}, {PromptRecord{Type: FreeText}, "YES", "YES"}, {PromptRecord{Type: FreeText}, "two\nlines\there", "two\nlines\there"},
		{PromptRecord{Type: FreeText}, "a\x1b[201~b", "!"}, {PromptRecord{Type: FreeText}, "a\x00", "!"}, {PromptRecord{Type: FreeText}, "\u009b31m", "!"},
		{PromptRecord{Type: FreeText}, "\xff", "!"}, {PromptRecord{Type: FreeText}, "a\rb", "!"},
		{PromptRecord{Type: Unknown}, "enter", "enter"}, {PromptRecord{Type: Unknown}, "esc", "esc"}, {PromptRecord{Type: Unknown}, "default", "!"},
		{PromptRecord{Type: YesNo, Confidence: "low"}, "enter", "enter"}, {PromptRecord{Type: YesNo, Confidence: "medium"}, "cancel", "cancel"},
		{PromptRecord{Type: YesNo, Confidence: "medium", Signals: []string{"pattern"}}, "cancel", "!"},
	}
	for _, row := range rows {
		if value, reason, why := row.p.judge(row.given); row.want == "!" && why == "" || row.want != "!" && (why != "" || value != row.want) {
			t.Errorf("judge(%s %q) = %q %q %q, want %q", row.p.Type, row.given, value, reason, why, row.want)
		}
	}
	s := storeAt(t, storeDir(t))
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, func(p *PromptRecord) {
		p.Type, p.Choices, p.Permission, p.SafeDefault = MultipleChoice, menu, true, ref("2")
	})
	if got, why, _ := s.Decide(storeTap(p, "deny:use make"), time.Now()); *got.Value != "2" || got.Reason != "use make" || why != "" {
		t.Errorf("refusal with a reason: %+v %q", got, why)
	}
	p = storePrompt(t, s, storeSession(t, s), AwaitingReply, func(p *PromptRecord) { p.Type = Unknown })
	if got, _, _ := s.Decide(storeTap(p, "cancel"), time.Now()); got.Status != Canceled {
		t.Errorf("cancel: %s", got.Status)
	}
}

// A secret is in no file, and comes out once.
func TestStoreSecret(t *testing.T) {
	dir := storeDir(t)
	s := storeAt(t, dir)
	session := storeSession(t, s)
	release, err := s.HoldSession(session)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	p := storePrompt(t, s, session, AwaitingReply, func(p *PromptRecord) { p.Secret, p.Type = true, FreeText })
	got, why, err := s.Decide(storeTap(p, "hunter2-cancel"), time.Now())
	if why != "" || err != nil || got.Value != nil || !got.ValueHidden {
		t.Fatal(got, why, err)
	}
	if v, ok := s.TakeSecret(p.ID); v != "hunter2-cancel" || !ok {
		t.Error("secret is", v)
	}
	if _, ok := s.TakeSecret(p.ID); ok {
		t.Error("secret taken twice")
	}
	s.Move(p.ID, Injected, nil)
	for _, name := range []string{"state.jsonl", "audit.log"} {
		if b, _ := os.ReadFile(filepath.Join(dir, name)); len(b) == 0 || bytes.Contains(b, []byte("hunter2")) ||
			bytes.Contains(b, []byte(digest([]byte("hunter2-cancel"))[7:])) {
			t.Error(name, "holds the secret")
		}
	}
}

/* ===== Store: the file ===== */

// Records are what DESIGN section 6 says: member order, six decimals, CRC-32C over the line without crc.
func TestStoreFormat(t *testing.T) {
	r := &SessionRecord{Head: Head{1, "session", "a", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), 0}, Tool: "<t> at\":\"2026-01-02T03:04:05Z\"",
		StartedAt: time.Date(2026, 1, 2, 3, 4, 5, 120000, time.FixedZone("", 3600))}
	r.StartedAt = r.StartedAt.UTC()
	line, err := encode(r, 2)
	want := `{"v":1,"rec":"session","id":"a","at":"2026-01-02T03:04:05.000000Z","tool":"<t> at\":\"2026-01-02T03:04:05Z\"","args":null,` +
		`"cwd":"","pid":0,"pid_start":0,"wrapper":0,"label":"","status":"","activity":"","started_at":"2026-01-02T02:04:05.000120Z",` +
		`"ended_at":null,"exit_code":null,"prompts":0,"last_output_at":null,"more":2,"crc":"`
	if err != nil || !strings.HasPrefix(string(line), want) || len(line) != len(want)+len("00000000\"}\n") {
		t.Errorf("encode = %s\nwant     %s", line, want)
	}
	if h, more, err := parseHead(line); err != nil || h.Rec != "session" || h.ID != "a" || h.V != 1 || more != 2 {
		t.Error(h, more, err)
	}
	for i := range line[:len(line)-1] {
		for bit := range 8 {
			bad := slices.Clone(line)
			if bad[i] ^= 1 << bit; bad[i] == '\n' {
				continue
			}
			if _, _, err := parseHead(bad); err == nil {
				t.Fatalf("bit %d of byte %d flipped and nothing noticed: %s", bit, i, bad)
			}
		}
	}
}

// Cut anywhere, the file opens, every complete Update is there, and what was cut is kept aside.
func TestStoreTruncatedAtEveryByte(t *testing.T) {
	full := storeDir(t)
	s := storeAt(t, full)
	p := storeQuestion(newID())
	p.Excerpt = "short"
	type mark struct {
		end    int
		status State
	}
	marks := []mark{{0, ""}}
	for _, step := range storeSteps(p.SessionID, p)[:4] {
		if err := step.do(s); err != nil {
			t.Fatal(err)
		}
		all, _ := os.ReadFile(s.log.path)
		marks = append(marks, mark{len(all), step.to})
	}
	all, _ := os.ReadFile(s.log.path)
	quick := systemFiles()
	quick.sync, quick.syncDir = func(*os.File) error { return nil }, func(string) error { return nil }
	for cut := range len(all) + 1 {
		dir := storeDir(t)
		os.WriteFile(filepath.Join(dir, "state.jsonl"), all[:cut], 0o600)
		s, err := openStoreWith(dir, quick)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		var atLeast State // the last Update that ended at or before the cut; its audit head line follows it
		for i, m := range marks {
			head := m.end
			if i > 0 {
				if n := bytes.LastIndex(all[:m.end], []byte(`{"v":1,"rec":"meta"`)); m.status != Routed {
					head = n
				}
			}
			if head <= cut {
				atLeast = m.status
			}
		}
		got := State("")
		if q := storeView(t, s).Prompts[p.ID]; q != nil {
			got = q.Status
		}
		if got != atLeast {
			t.Fatalf("cut at %d: %q, want %q", cut, got, atLeast)
		}
		kept, _ := os.ReadFile(filepath.Join(dir, "state.jsonl"))
		names, _ := filepath.Glob(filepath.Join(dir, "state.jsonl.torn-*"))
		for _, name := range names {
			tail, _ := os.ReadFile(name)
			kept = append(kept, tail...)
		}
		if !bytes.Equal(kept, all[:cut]) {
			t.Fatalf("cut at %d: bytes were lost", cut)
		}
		if got == AwaitingReply {
			if _, why, err := s.Decide(storeTap(p, "y"), time.Now()); why != "" || err != nil {
				t.Fatalf("cut at %d: then %q %v", cut, why, err)
			}
		}
		s.Close()
	}
}

// A damaged line is reported, kept, and its question not answered; the others go on.
func TestStoreDamage(t *testing.T) {
	dir := storeDir(t)
	s := storeAt(t, dir)
	session := storeSession(t, s)
	bad, good := storePrompt(t, s, session, Routed, nil), storePrompt(t, s, session, Routed, nil)
	if _, why, err := s.Decide(storeTap(bad, "y"), time.Now()); why != "" || err != nil {
		t.Fatal(why, err)
	}
	s.Close()
	path := filepath.Join(dir, "state.jsonl")
	all, _ := os.ReadFile(path)
	at := bytes.LastIndex(all, []byte("reply_received"))
	all[at] ^= 0x20
	os.WriteFile(path, append(all, "not a record\n"...), 0o600)

	s = storeAt(t, dir)
	if notes := s.Damage(); len(notes) != 2 || !strings.Contains(notes[0], "checksum") {
		t.Errorf("Damage() = %q", notes)
	}
	if _, why, _ := s.Decide(storeTap(bad, "n"), time.Now()); !strings.Contains(string(why), "damaged") {
		t.Errorf("a question whose answer may be lost was answered again: %q", why)
	}
	if _, why, _ := s.Decide(storeTap(good, "n"), time.Now()); why != "" {
		t.Errorf("the other: %q", why)
	}
	release, _ := s.HoldSession(session)
	defer release()
	if _, prompts, err := s.Reap(time.Now()); err != nil || len(prompts) != 1 || prompts[0].ID != bad.ID {
		t.Error(prompts, err)
	}
	s.mu.Lock()
	s.compactAt = 0
	s.mu.Unlock()
	s.Move(good.ID, Injected, nil)
	kept, _ := os.ReadFile(path + ".damaged")
	if now, _ := os.ReadFile(path); !bytes.Contains(kept, []byte("not a record\n")) || bytes.Contains(now, []byte("not a record")) {
		t.Errorf("compaction kept %q", kept)
	}
}

func TestStoreSchema(t *testing.T) {
	dir := storeDir(t)
	s := storeAt(t, dir)
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
	s.Close()
	path := filepath.Join(dir, "state.jsonl")
	all, _ := os.ReadFile(path)
	version := func(v string) []byte { // every line with another version and its right checksum
		var out []byte
		for line := range bytes.Lines(all) {
			line = bytes.Replace(line[:len(line)-crcMember], []byte(`{"v":1`), []byte(`{"v":`+v), 1)
			out = append(out, storeSeal(line)...)
		}
		return out
	}
	os.WriteFile(path, version("0"), 0o600)
	s = storeAt(t, dir)
	if backups, _ := filepath.Glob(path + ".backup-*"); len(backups) != 1 {
		t.Error("no backup before the upgrade")
	} else if b, _ := os.ReadFile(backups[0]); !bytes.Equal(b, version("0")) {
		t.Error("the backup is not the file")
	}
	if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(`"v":0`)) || storeView(t, s).Prompts[p.ID].Status != AwaitingReply {
		t.Error("not upgraded")
	}
	os.WriteFile(path, version("2"), 0o600)
	s = storeAt(t, dir)
	if _, _, err := s.Decide(storeTap(p, "y"), time.Now()); err == nil || !strings.Contains(err.Error(), "newer") {
		t.Errorf("wrote into a newer file: %v", err)
	}
}

// storeSeal adds crc and the end to a line without them.
func storeSeal(open []byte) []byte {
	sum := crc32.Checksum(append(slices.Clone(open), '}'), castagnoli)
	return fmt.Appendf(slices.Clone(open), `,"crc":"%08x"}`+"\n", sum)
}

// Each operation fails in turn, once or from then on, until none is injected: the state is the one before the
// step or the one after, an error never leaves the record behind, and what follows works again.
func TestStoreEveryOperationFails(t *testing.T) {
	for _, forever := range []bool{false, true} {
		for n := int64(1); ; n++ {
			dir, injected := storeDir(t), ""
			s, err := openStoreWith(dir, faultyFiles(func(op string, i int64) error {
				if i == n || forever && i > n {
					injected = op
					return fmt.Errorf("injected at %s %d", op, i)
				}
				return nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			p := storeQuestion(newID())
			want, attempts := State(""), 0
			for _, step := range storeSteps(p.SessionID, p) {
				err := step.do(s)
				for attempts = 0; err != nil && !forever && attempts < 2; attempts++ { // the operator tries again
					storeCheckState(t, dir, p.ID, want, fmt.Sprintf("%s failed (%d, %v), %s", injected, n, err, step.to))
					err = step.do(s)
				}
				if err != nil {
					break
				}
				want = step.to
				if view := storeView(t, s); view.Prompts[p.ID].Status != want {
					t.Fatalf("%d %s: own view has %s, want %s", n, injected, view.Prompts[p.ID].Status, want)
				}
			}
			if !forever && want != Resolved {
				t.Fatalf("one failed %s (%d) stopped everything at %q: %v", injected, n, want, s.Trouble())
			}
			if s.Trouble() == nil || s.log.poison == nil {
				storeCheckState(t, dir, p.ID, want, fmt.Sprintf("%s failed (%d, forever %v)", injected, n, forever))
			}
			s.Close()
			if injected == "" {
				if n < 20 {
					t.Errorf("only %d operations were there to fail", n-1)
				}
				break
			}
		}
	}
}

// storeCheckState reads dir as another process would.
func storeCheckState(t *testing.T, dir, prompt string, want State, when string) {
	t.Helper()
	other, err := openStore(dir)
	if err != nil {
		t.Fatalf("%s: %v", when, err)
	}
	defer other.Close()
	got := State("")
	if p := storeView(t, other).Prompts[prompt]; p != nil {
		got = p.Status
	}
	if got != want {
		t.Fatalf("%s: state is %q, want %q", when, got, want)
	}
}

// When even cutting back fails, nothing is written or believed any more.
func TestStorePoison(t *testing.T) {
	broken := false
	s, err := openStoreWith(storeDir(t), faultyFiles(func(op string, _ int64) error {
		if broken && (op == "fsync" || op == "ftruncate") {
			return errors.New("no space left on device")
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
	follow := s.Follow(t.Context(), p.SessionID, nil)
	broken = true
	if _, _, err := s.Decide(storeTap(p, "y"), time.Now()); err == nil {
		t.Fatal("a reply that is not on the disk was accepted")
	}
	broken = false
	if _, _, err := s.Decide(storeTap(p, "y"), time.Now()); err == nil || s.Trouble() == nil {
		t.Fatal("written after a failed cut")
	}
	select {
	case r := <-follow:
		t.Errorf("follower was told of %+v", r)
	default:
	}
	if v := storeView(t, s); v.Prompts[p.ID].Status != AwaitingReply {
		t.Error("own view believes the record that failed")
	}
}

// What makes a record durable, in its order: the folder's entry once per file, the line, and for a compaction the
// new file before its name and the name before what follows.
func TestStoreDurableOrder(t *testing.T) {
	var ops []string
	s, err := openStoreWith(storeDir(t), faultyFiles(func(op string, _ int64) error {
		ops = append(ops, op)
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i, want := range []string{"fsync folder, write, fsync", "write, fsync",
		"write, fsync, write, fsync, fsync folder, rename, fsync folder", "write, fsync"} {
		if s.compactAt = 1 << 20; i == 2 {
			s.compactAt = 0
		}
		ops = nil
		if err := storeUpdate(s, &UpdateRecord{Head{ID: fmt.Sprint(i)}, "message"}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(ops, ", "); got != want {
			t.Errorf("update %d: %s; want %s", i, got, want)
		}
	}
}

/* ===== Store: several processes ===== */

// childStore is what the re-executed test binary does: "store-live N" kills itself at the Nth operation,
// "store-crowd" asks and answers until the time is over.
func childStore(mode string) bool {
	dir := os.Getenv("ATLASBRIDGE_TEST_DIR")
	if n, ok := strings.CutPrefix(mode, "store-live "); ok {
		at, _ := strconv.ParseInt(n, 10, 64)
		me, _ := os.FindProcess(os.Getpid())
		s, err := openStoreWith(dir, faultyFiles(func(_ string, i int64) error {
			if i == at/2 && at%2 == 0 { // before the operation
				me.Kill()
				select {}
			} else if i == at/2+1 && at%2 == 1 && at > 1 { // after it, as the next begins
				me.Kill()
				select {}
			}
			return nil
		}))
		if err != nil {
			fmt.Println("error", err)
			return true
		}
		p := storeQuestion("5e551011-0000-4000-8000-000000000000")
		p.ID = "9a9a9a9a-0000-4000-8000-000000000000"
		for _, step := range storeSteps(p.SessionID, p) {
			if err := step.do(s); err != nil {
				fmt.Println("error", err)
				return true
			}
			fmt.Println(step.to)
		}
		fmt.Println("end")
		return true
	}
	if kind, ok := strings.CutPrefix(mode, "store-append "); ok {
		s, err := openStore(dir)
		append := bareAppend(dir)
		if kind == "store" && err == nil {
			append = storeAppend(s)
		}
		n := 0
		for end := time.Now().Add(time.Second); time.Now().Before(end); n++ {
			if err := append(); err != nil {
				fmt.Println("error", err)
			}
		}
		fmt.Println(n)
		return true
	}
	if mode != "store-crowd" {
		return false
	}
	if err := storeCrowd(dir); err != nil {
		fmt.Println("error", err)
	}
	return true
}

func storeChild(dir, mode string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], "-test.run=^$") // should TestMain not call childStore, nothing runs
	cmd.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD="+mode, "ATLASBRIDGE_TEST_DIR="+dir)
	return cmd
}

// Killed with -9 before and after every durable operation: what was acknowledged is there, at most one step
// more, and the next process goes on, with a sound audit log.
func TestStoreKilledAnywhere(t *testing.T) {
	order := []State{"", Created, Routed, AwaitingReply, ReplyReceived, Injected, Resolved}
	step := 1
	if testing.Short() {
		step = 7
	}
	for n := 2; ; n += step {
		dir := storeDir(t)
		out, _ := storeChild(dir, fmt.Sprintf("store-live %d", n)).Output()
		said := strings.Fields(string(out))
		if strings.Contains(string(out), "error") {
			t.Fatalf("%d: %s", n, out)
		}
		if len(said) > 0 && said[len(said)-1] == "end" {
			if n < 40 {
				t.Errorf("only %d points to be killed at", n)
			}
			return
		}
		acked := len(said)
		s := storeAt(t, dir)
		at := 0
		if p := storeView(t, s).Prompts["9a9a9a9a-0000-4000-8000-000000000000"]; p != nil {
			at = slices.Index(order, p.Status)
		}
		if at < acked || at > acked+1 {
			t.Fatalf("killed at %d: acknowledged %q, found %q", n, order[acked], order[at])
		}
		_, failed, err := s.Reap(time.Now())
		if want := at > 0 && at < len(order)-1; err != nil || (len(failed) == 1) != want {
			t.Fatalf("killed at %d in %q: reaped %d, %v", n, order[at], len(failed), err)
		}
		storePrompt(t, s, storeSession(t, s), Resolved, nil)
		if code, out, _ := storeCommand(t, t.Context(), dir, "audit", "verify"); code != 0 || s.Trouble() != nil {
			t.Fatalf("killed at %d: %s %v", n, out, s.Trouble())
		}
		s.Close()
	}
}

// storeCrowd asks, answers whatever is open, and compacts. It prints the prompts whose reply it was first to give.
func storeCrowd(dir string) error {
	s, err := openStore(dir)
	if err != nil {
		return err
	}
	span, _ := time.ParseDuration(os.Getenv("ATLASBRIDGE_TEST_SPAN"))
	id := newID()
	if _, err := s.HoldSession(id); err != nil {
		return err
	}
	if err := storeUpdate(s, &SessionRecord{Head: Head{ID: id}, Status: "active", StartedAt: time.Now()}); err != nil {
		return err
	}
	for i, end := 0, time.Now().Add(span); time.Now().Before(end); i++ {
		p := storeQuestion(id)
		if err := storeUpdate(s, p); err != nil {
			return err
		}
		s.Move(p.ID, Routed, nil)
		s.Move(p.ID, AwaitingReply, nil)
		v, err := s.View()
		if err != nil {
			return err
		}
		for _, q := range v.Prompts {
			if q.Open() && rand.Intn(4) > 0 {
				_, why, err := s.Decide(Decision{PromptID: q.ID, Value: "n", By: "cli:answer", Trusted: true}, time.Now())
				if err != nil {
					return err
				} else if why == "" {
					fmt.Println(q.ID)
				}
			}
			if q.Status == ReplyReceived {
				if ok, err := s.Move(q.ID, Injected, nil); err != nil {
					return err
				} else if ok {
					s.Move(q.ID, Resolved, nil)
				}
			}
		}
		if i%16 == 0 {
			s.mu.Lock()
			s.compactAt, s.Retention = 0, time.Hour
			s.mu.Unlock()
		}
	}
	return s.Trouble()
}

// Processes that ask, answer and compact at once: every reply was given once, every history is one of the table,
// and the audit log holds. ATLASBRIDGE_LONG=1 makes it eight processes and a minute.
func TestStoreCrowd(t *testing.T) {
	dir, span, n := storeDir(t), "1500ms", 4
	if os.Getenv("ATLASBRIDGE_LONG") != "" {
		span, n = "60s", 8
	} else if testing.Short() {
		t.Skip("short")
	}
	t.Setenv("ATLASBRIDGE_TEST_SPAN", span)
	outs := make([]bytes.Buffer, n)
	var cmds []*exec.Cmd
	for i := range n {
		cmd := storeChild(dir, "store-crowd")
		cmd.Stdout, cmd.Stderr = &outs[i], os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	given := map[string]int{}
	for i, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		for _, id := range strings.Fields(outs[i].String()) {
			given[id]++
		}
		if strings.Contains(outs[i].String(), "error") {
			t.Fatal(outs[i].String())
		}
	}
	state := map[string]State{"PROMPT_DETECTED": Created, "PROMPT_ROUTED": AwaitingReply, "REPLY_RECEIVED": ReplyReceived,
		"REPLY_INJECTED": Injected, "PROMPT_RESOLVED": Resolved}
	at := map[string]State{}
	log, _ := os.ReadFile(filepath.Join(dir, "audit.log"))
	for line := range bytes.Lines(log) {
		var e struct {
			Event string
			ID    string `json:"prompt_id"`
		}
		json.Unmarshal(line, &e)
		to := state[e.Event]
		if from := at[e.ID]; to == AwaitingReply && from == Created { // routed has no entry
			at[e.ID] = to
		} else if to != "" && !slices.Contains(next[from], to) {
			t.Fatalf("prompt %s went from %q to %q", e.ID, from, to)
		} else if to != "" {
			at[e.ID] = to
		}
		if to == ReplyReceived {
			if given[e.ID]--; given[e.ID] != 0 {
				t.Fatalf("prompt %s: answers given and recorded differ by %d", e.ID, given[e.ID])
			}
		}
	}
	for id, count := range given {
		if count != 0 {
			t.Errorf("prompt %s was answered %d times more than recorded", id, count)
		}
	}
	s := storeAt(t, dir)
	v := storeView(t, s)
	for id, p := range v.Prompts {
		if at[id] != p.Status && !(p.Status == Routed && at[id] == Created) {
			t.Errorf("prompt %s is %s, its history says %s", id, p.Status, at[id])
		}
	}
	if notes := s.Damage(); len(notes) > 0 || len(at) < 10 {
		t.Errorf("%d prompts, damage: %q", len(at), notes)
	}
	if code, out, _ := storeCommand(t, t.Context(), dir, "audit", "verify"); code != 0 {
		t.Error(out)
	}
	t.Logf("%d processes, %s: %d prompts, %d audit bytes", n, span, len(at), len(log))
}

// A follower sees what another process writes, across a compaction, and its own at once.
func TestStoreFollow(t *testing.T) {
	dir := storeDir(t)
	a, b := storeAt(t, dir), storeAt(t, dir)
	session := storeSession(t, a)
	ctx, stop := context.WithCancel(t.Context())
	out := a.Follow(ctx, session, nil)
	wait := func(id string, status State) {
		t.Helper()
		timeout := time.After(5 * time.Second)
		for {
			select {
			case r := <-out:
				if p, ok := r.(*PromptRecord); ok && p.ID == id && p.Status == status {
					return
				}
			case <-timeout:
				t.Fatalf("%s never came", status)
			}
		}
	}
	other := storePrompt(t, b, storeSession(t, b), AwaitingReply, nil)
	p := storePrompt(t, b, session, AwaitingReply, nil)
	wait(p.ID, AwaitingReply)
	b.mu.Lock()
	b.compactAt = 0
	b.mu.Unlock()
	b.Decide(storeTap(p, "y"), time.Now())
	b.Decide(storeTap(other, "y"), time.Now())
	wait(p.ID, ReplyReceived)
	a.Move(p.ID, Injected, nil)
	wait(p.ID, Injected)
	stop()
	for r := range out {
		t.Errorf("more came: %+v", r)
	}
}

// What is old goes, what is alive or may be replayed stays.
func TestStoreRetention(t *testing.T) {
	dir := storeDir(t)
	s := storeAt(t, dir)
	now := time.Now()
	day := 24 * time.Hour
	at := func(ago time.Duration) { s.now = func() time.Time { return now.Add(-ago) } }
	at(40 * day)
	live, ended := storeSession(t, s), storeSession(t, s)
	waiting := storePrompt(t, s, live, AwaitingReply, nil)
	old := storePrompt(t, s, ended, Resolved, func(p *PromptRecord) { p.ExpiresAt = now.Add(-40 * day) })
	fresh := storePrompt(t, s, ended, Resolved, func(p *PromptRecord) { p.ExpiresAt = now.Add(-day) })
	r := *storeView(t, s).Sessions[ended]
	r.Status, r.EndedAt = "completed", ref(now.Add(-40*day))
	storeUpdate(s, &r, &UpdateRecord{Head{ID: "1"}, "message"}, &InputRecord{Head: Head{ID: "i"}, SessionID: ended, Status: "done"})
	at(10 * day)
	recent := storePrompt(t, s, live, Resolved, func(p *PromptRecord) { p.Full = "the whole dialog" })
	at(day)
	storeUpdate(s, &UpdateRecord{Head{ID: "2"}, "message"})
	s.now = time.Now
	s.Close()
	s = storeAt(t, dir)
	storeUpdate(s, &UpdateRecord{Head{ID: "3"}, "message"})
	for range 2 {
		v := storeView(t, s)
		if v.Prompts[old.ID] != nil || v.Sessions[ended] != nil || v.Updates["1"] != nil || v.Inputs["i"] != nil {
			t.Error("something old was kept")
		}
		if v.Prompts[waiting.ID] == nil || v.Prompts[fresh.ID] == nil || v.Prompts[recent.ID] == nil || v.Sessions[live] == nil ||
			v.Updates["2"] == nil || v.Updates["3"] == nil || v.Meta["audit"] == nil {
			t.Error("something alive was dropped")
		}
		if v.Prompts[recent.ID].Full != "" {
			t.Error("an old answer keeps its dialog")
		}
		s = storeAt(t, dir)
	}
}

// The file stays small however long a session lives.
func TestStoreCompactsItself(t *testing.T) {
	s := storeAt(t, storeDir(t))
	s.log.sync, s.audit.log.sync = func(*os.File) error { return nil }, func(*os.File) error { return nil }
	session := storeSession(t, s)
	p := storePrompt(t, s, session, AwaitingReply, nil)
	largest := int64(0)
	for i := range 4000 {
		q := *storeView(t, s).Prompts[p.ID]
		q.MsgID = int64(i)
		if err := storeUpdate(s, &q); err != nil {
			t.Fatal(err)
		}
		largest = max(largest, s.read)
	}
	if largest > compactMin+4096 || storeView(t, s).Prompts[p.ID].MsgID != 3999 {
		t.Errorf("grew to %d bytes", largest)
	}
}

// Locks live as long as they are held, whatever the collector does, and dead sessions are found by theirs.
func TestStoreLocksAndReap(t *testing.T) {
	dir := storeDir(t)
	a, b := storeAt(t, dir), storeAt(t, dir)
	release, held, err := a.TryPoll()
	if !held || err != nil {
		t.Fatal(held, err)
	}
	live, dead := newID(), storeSession(t, a)
	drop, err := a.HoldSession(live)
	if err != nil {
		t.Fatal(err)
	}
	defer drop()
	storeUpdate(a, &SessionRecord{Head: Head{ID: live}, Status: "active", PID: os.Getpid(), PIDStart: processStart(os.Getpid())})
	for range 3 {
		runtime.GC()
	}
	if _, held, err = b.TryPoll(); held || err != nil {
		t.Error("two pollers", err)
	}
	if pid := b.holder("poll.lock"); pid != os.Getpid() {
		t.Error("poller is", pid)
	}
	open, typed, mine := storePrompt(t, a, dead, AwaitingReply, nil), storePrompt(t, a, dead, ReplyReceived, nil), storePrompt(t, a, live, AwaitingReply, nil)
	storeUpdate(a, &InputRecord{Head: Head{ID: "i"}, SessionID: dead, Status: "queued"})
	sessions, prompts, err := b.Reap(time.Now())
	if err != nil || len(sessions) != 1 || sessions[0].ID != dead || len(prompts) != 2 {
		t.Fatal(sessions, prompts, err)
	}
	v := storeView(t, a)
	if v.Sessions[dead].Status != "crashed" || v.Prompts[open.ID].Status != Failed || v.Inputs["i"].Status != "refused" ||
		!strings.Contains(v.Prompts[typed.ID].Reason, "uncertain") || v.Prompts[mine.ID].Status != AwaitingReply {
		t.Errorf("%+v", v)
	}
	if sessions, prompts, _ = b.Reap(time.Now()); len(sessions)+len(prompts) != 0 {
		t.Error("reaped twice")
	}
	release()
	if release, held, _ = b.TryPoll(); !held {
		t.Error("a released lock is not free")
	}
	release()
}

/* ===== Store: commands ===== */

func TestStoreCommands(t *testing.T) {
	dir := storeDir(t)
	run := func(args ...string) (int, string, string) { return storeCommand(t, t.Context(), dir, args...) }
	if code, _, errs := run("status"); code != 0 || !strings.Contains(errs, "no sessions") {
		t.Error(code, errs)
	}
	s := storeAt(t, dir)
	id := newID()
	release, _ := s.HoldSession(id)
	defer release()
	storeUpdate(s, &SessionRecord{Head: Head{ID: id}, Tool: "claude", Label: strings.Repeat("long ", 20), PID: 4242, Status: "active", Activity: "waiting",
		StartedAt: time.Now().Add(-90 * time.Minute), LastSeen: ref(time.Now().Add(-3 * time.Second))})
	storeSession(t, s) // dead
	p := storePrompt(t, s, id, AwaitingReply, func(p *PromptRecord) { p.Question = "Go on\x1b[31m?" + strings.Repeat("x", 100) })
	for _, args := range [][]string{{"status"}, {"approvals"}, {"logs"}} {
		_, out, _ := run(args...)
		for line := range strings.Lines(out) {
			if n := utf8.RuneCountInString(line); n > 81 && args[0] != "logs" || strings.ContainsRune(line, 0x1b) {
				t.Errorf("%v: %d columns: %q", args, n, line)
			}
		}
		if !strings.Contains(out, shortID(id)) && args[0] != "approvals" || args[0] == "approvals" && !strings.Contains(out, shortID(p.ID)) {
			t.Errorf("%v: %s", args, out)
		}
	}
	var rows []map[string]any
	if _, out, _ := run("status", "--all", "--json"); json.Unmarshal([]byte(out), &rows) != nil || len(rows) != 2 || rows[0]["id"] != id ||
		rows[0]["open_prompts"] != 1.0 || rows[1]["status"] != "crashed" {
		t.Error(out)
	}
	if _, out, _ := run("approvals", "--json"); json.Unmarshal([]byte(out), &rows) != nil || len(rows) != 1 || rows[0]["status"] != "awaiting_reply" {
		t.Error(out)
	}
	if code, _, errs := run("answer", shortID(p.ID), "maybe"); code != 1 || !strings.Contains(errs, "it takes y n") {
		t.Error(code, errs)
	}
	if code, out, errs := run("answer", shortID(p.ID), "y"); code != 0 || !strings.Contains(out, "answered") {
		t.Error(code, out, errs)
	}
	if code, _, errs := run("answer", shortID(p.ID), "n"); code != 1 || !strings.Contains(errs, "already answered") {
		t.Error(code, errs)
	}
	if code, _, errs := run("approvals"); code != 0 || !strings.Contains(errs, "no open questions") {
		t.Error(code, errs)
	}
	if _, out, _ := run("logs", "--json", "--session", shortID(id)); strings.Count(out, "\n") != 6 || !strings.Contains(out, "REPLY_REJECTED") {
		t.Error(out)
	}
}

/* ===== Audit ===== */

// auditFilled is a chain with all sorts of text in it, and its bytes.
func auditFilled(t testing.TB, n int) (*Store, []byte) {
	t.Helper()
	s := storeAt(t, storeDir(t))
	for i := range n {
		err := s.Audit().Append(Event{"TOOL_CALL", newID(), "", []Field{{"text", fmt.Sprintf("%d <&> \x7f \u2028 \" \\ é 😀 \xff", i)}, {"n", i}, {"ok", true}, {"none", nil}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	b, _ := os.ReadFile(s.audit.log.path)
	return s, b
}

// The lines are what jq -c prints, for every code point, and verify without us.
func TestAuditEveryCodePoint(t *testing.T) {
	for in, want := range map[string]string{"a\"\\/": `"a\"\\/"`, "\b\f\n\r\t\x00\x1f\x7f": `"\b\f\n\r\t\u0000\u001f\u007f"`,
		"<>&\u2028\u2029é😀": "\"<>&\u2028\u2029é😀\"", "\xffa\ufffd": "\"\ufffda\ufffd\""} {
		if got := string(appendString(nil, in)); got != want {
			t.Errorf("appendString(%q) = %s, want %s", in, got, want)
		}
	}
	if _, err := exec.LookPath("jq"); err != nil {
		t.Skip("no jq")
	}
	var all []byte
	for r := rune(0); r <= utf8.MaxRune; r++ {
		if utf8.ValidRune(r) {
			all = append(appendString(all, string(r)+"x"), '\n')
		}
	}
	jq := exec.Command("jq", "-c", ".")
	jq.Stdin = bytes.NewReader(all)
	if out, err := jq.Output(); err != nil || !bytes.Equal(out, all) {
		t.Errorf("jq prints other bytes: %v", err)
	}
	s, log := auditFilled(t, 3)
	for line := range bytes.Lines(log) {
		var e struct{ Hash string }
		json.Unmarshal(line, &e)
		sh := exec.Command("sh", "-c", `jq -cj 'del(.hash)' | sha256sum`)
		sh.Stdin = bytes.NewReader(line)
		if out, err := sh.Output(); err != nil || !strings.HasPrefix(string(out), strings.TrimPrefix(e.Hash, "sha256:")+" ") {
			t.Errorf("sha256sum says %s for %s", out, line)
		}
	}
	if err := s.Audit().Append(Event{Name: "X", Fields: []Field{{"f", 1.5}}}); err == nil {
		t.Error("a float was accepted")
	}
	if err := s.Audit().Append(Event{Name: "X", Fields: []Field{{"seq", 1}}}); err == nil {
		t.Error("a member twice was accepted")
	}
}

// Any bit, any edit: noticed, and the line named.
func TestAuditTampering(t *testing.T) {
	_, log := auditFilled(t, 3)
	if v := verify(bytes.NewReader(log), nil); !v.OK || v.Entries != 3 {
		t.Fatal(v)
	}
	for i := range log {
		for bit := range 8 {
			log[i] ^= 1 << bit
			if v := verify(bytes.NewReader(log), nil); v.OK || v.Line < 1 || v.Line > int64(bytes.Count(log[:i+1], []byte("\n"))+1) {
				t.Fatalf("bit %d of byte %d: %+v", bit, i, v)
			}
			log[i] ^= 1 << bit
		}
	}
	l := bytes.SplitAfter(log, []byte("\n"))
	head := Anchor{3, verify(bytes.NewReader(log), nil).Hash, "state.jsonl"}
	s2, other := auditFilled(t, 4) // a chain computed anew
	defer s2.Close()
	rows := []struct {
		name string
		log  []byte
		line int64
		why  string
	}{
		{"removed", slices.Concat(l[0], l[2]), 2, "seq is 3"},
		{"first removed", slices.Concat(l[1], l[2]), 1, "seq is 2"},
		{"swapped", slices.Concat(l[0], l[2], l[1]), 2, "seq is 3"},
		{"repeated", slices.Concat(l[0], l[0], l[1], l[2]), 2, "seq is 1"},
		{"cut", slices.Concat(l[0], l[1]), 3, "cut"},
		{"all gone", nil, 1, "cut"},
		{"computed anew", other, 3, "computed anew"},
		{"torn", log[:len(log)-1], 3, "cut short"},
		{"blank", slices.Concat(l[0], bytes.Replace(l[1], []byte(":"), []byte(": "), 1), l[2]), 2, "jq -c"},
		{"empty line", slices.Concat(l[0], []byte("\n"), l[1], l[2]), 2, "jq -c"},
		{"CRLF", bytes.ReplaceAll(log, []byte("\n"), []byte("\r\n")), 1, "jq -c"},
		{"BOM", slices.Concat([]byte("\ufeff"), log), 1, "jq -c"},
		{"escaped", bytes.Replace(log, []byte("é"), []byte("\\u00e9"), 1), 1, "jq -c"},
	}
	for _, row := range rows {
		if v := verify(bytes.NewReader(row.log), []Anchor{head}); v.OK || v.Line != row.line || !strings.Contains(v.Reason, row.why) {
			t.Errorf("%s: %+v, want line %d %s", row.name, v, row.line, row.why)
		}
	}
	if v := verify(bytes.NewReader(log), []Anchor{head, {0, head.Hash, "--head"}}); !v.OK {
		t.Error(v)
	}
	if v := verify(bytes.NewReader(log), []Anchor{{0, digest(nil), "--head"}}); v.OK {
		t.Error("a head that no entry has was accepted")
	}
}

// A torn last line is moved aside and the chain goes on; a lost log costs the state nothing, and is noticed.
func TestAuditTornAndLost(t *testing.T) {
	s, log := auditFilled(t, 3)
	path := s.audit.log.path
	whole := bytes.LastIndexByte(log[:len(log)-1], '\n') + 1
	for _, cut := range []int{whole + 1, whole + 50, len(log) - 1, 10, 0} {
		os.WriteFile(path, log[:cut], 0o600)
		if err := s.Audit().Append(Event{Name: "UNAUTHORIZED", Fields: []Field{{"big", strings.Repeat("x", 4000)}, {"more", strings.Repeat("é", 2000)}}}); err != nil {
			t.Fatal(err)
		}
		now, _ := os.ReadFile(path)
		if v := verify(bytes.NewReader(now), nil); !v.OK {
			t.Errorf("cut at %d: %+v", cut, v)
		}
	}
	code, out, _ := storeCommand(t, t.Context(), s.Dir, "audit", "verify")
	if code != 1 || !strings.Contains(out, "state.jsonl") {
		t.Error("a log started anew passes:", out)
	}
	os.WriteFile(path, []byte("garbage\n"), 0o600)
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
	if err := s.Trouble(); err == nil || !strings.Contains(err.Error(), "audit") {
		t.Errorf("Trouble() = %v", err)
	}
	if _, why, err := s.Decide(storeTap(p, "y"), time.Now()); why != "" || err != nil {
		t.Error("a damaged audit log stops the answers:", why, err)
	}
}

// Typed text is in the log as length and hash only.
func TestAuditHidesText(t *testing.T) {
	s := storeAt(t, storeDir(t))
	for _, text := range []string{"my private words", "enter"} {
		p := storePrompt(t, s, storeSession(t, s), AwaitingReply, func(p *PromptRecord) { p.Type, p.SafeDefault = FreeText, nil })
		s.Decide(storeTap(p, text), time.Now())
		s.Move(p.ID, Injected, nil)
		log, _ := os.ReadFile(s.audit.log.path)
		if bytes.Contains(log, []byte(`"`+text+`"`)) || bytes.Count(log, []byte(digest([]byte(text)))) != 2 {
			t.Errorf("%s", log)
		}
	}
}

func TestAuditCommands(t *testing.T) {
	s, _ := auditFilled(t, 30)
	s.Audit().Append(Event{"UNAUTHORIZED", "", "", []Field{{"who", "x\x1b[2J\u009b31m\n{\"seq\":1}"}}})
	for _, args := range [][]string{{"logs"}, {"logs", "--json"}} {
		code, out, _ := storeCommand(t, t.Context(), s.Dir, args...)
		if code != 0 || strings.Count(out, "\n") != 31 || strings.ContainsAny(out, "\x1b\u009b") {
			t.Errorf("%v: %d %q", args, code, out)
		}
	}
	seq, hash, _ := s.Audit().Head()
	for head, want := range map[string]int{fmt.Sprintf("%d:%s", seq, hash): 0, hash: 0, fmt.Sprintf("%d:%s", seq+1, hash): 1,
		digest(nil): 1, "1:" + hash: 1, "x": 2, "x:" + hash: 2, "31": 2} {
		if code, out, errs := storeCommand(t, t.Context(), s.Dir, "audit", "verify", "--json", "--head", head); code != want {
			t.Errorf("--head %s: %d %s %s", head, code, out, errs)
		}
	}
	before, _ := os.ReadFile(s.audit.log.path)
	os.WriteFile(s.audit.log.path, before[:len(before)-2], 0o600)
	storeCommand(t, t.Context(), s.Dir, "audit", "verify")
	if after, _ := os.ReadFile(s.audit.log.path); !bytes.Equal(after, before[:len(before)-2]) {
		t.Error("verify changed the file")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if code, out, _ := storeCommand(t, ctx, s.Dir, "logs", "--tail"); code != 0 || !strings.Contains(out, "TOOL_CALL") {
		t.Error(code, out)
	}
}

/* ===== Fuzzing and speed ===== */

func FuzzStateLine(f *testing.F) {
	line, _ := encode(storeQuestion("s"), 0)
	f.Add(line)
	f.Add([]byte(`{"v":1,"rec":"prompt","id":"a","at":"2026`))
	f.Fuzz(func(t *testing.T, b []byte) {
		sealed := storeSeal(bytes.TrimSuffix(bytes.ReplaceAll(b, []byte("\n"), nil), []byte("}")))
		if h, _, err := parseHead(sealed); err == nil {
			if r := decode([][]byte{sealed})[0]; r != nil && h.ID != r.head().ID {
				t.Errorf("two ids: %q and %q in %s", h.ID, r.head().ID, sealed)
			}
		}
		parseHead(b)
		decode([][]byte{b})
	})
}

func FuzzAuditLine(f *testing.F) {
	_, log := auditFilled(f, 2)
	f.Add(log)
	f.Fuzz(func(t *testing.T, b []byte) {
		if v := verify(bytes.NewReader(b), nil); v.OK && bytes.Count(b, []byte("\n")) != int(v.Entries) {
			t.Errorf("%d entries in %q", v.Entries, b)
		}
	})
}

// bareAppend is what no store can avoid: lock, write, fsync.
func bareAppend(dir string) func() error {
	line, _ := encode(storeQuestion(newID()), 0)
	lock, err := openPrivate(filepath.Join(dir, "bare.lock"), os.O_RDWR|os.O_CREATE)
	f, err2 := openPrivate(filepath.Join(dir, "bare.jsonl"), os.O_RDWR|os.O_APPEND|os.O_CREATE)
	return func() error {
		err := errors.Join(err, err2, lockFile(lock, true))
		defer unlockFile(lock)
		if err == nil {
			_, err = f.Write(line)
		}
		return errors.Join(err, f.Sync())
	}
}

// storeAppend writes a question anew each time, without a change of status and so without an audit entry.
func storeAppend(s *Store) func() error {
	p := storeQuestion(newID())
	err := storeUpdate(s, p)
	return func() error {
		q := *p
		q.MsgID++
		return errors.Join(err, storeUpdate(s, &q))
	}
}

// BenchmarkAppend compares one durable record with the bare calls, in turns.
func BenchmarkAppend(b *testing.B) {
	dir := storeDir(b)
	do := []func() error{bareAppend(dir), storeAppend(storeAt(b, dir))}
	times := make([][]time.Duration, len(do))
	for b.Loop() {
		for i := range do {
			start := time.Now()
			if err := do[i](); err != nil {
				b.Fatal(err)
			}
			times[i] = append(times[i], time.Since(start))
		}
	}
	for i := range times {
		slices.Sort(times[i])
	}
	bare, store := times[0][len(times[0])/2].Seconds(), times[1][len(times[1])/2].Seconds()
	b.ReportMetric(bare*1e6, "bare-p50-µs")
	b.ReportMetric(store*1e6, "store-p50-µs")
	b.ReportMetric(store/bare, "ratio")
}

// BenchmarkAppendFour compares what four processes append in a second with what one or four do by bare calls.
func BenchmarkAppendFour(b *testing.B) {
	total := func(kind string, n int) (sum float64) {
		dir := storeDir(b)
		var outs []*bytes.Buffer
		var cmds []*exec.Cmd
		for range n {
			cmd, out := storeChild(dir, "store-append "+kind), &bytes.Buffer{}
			cmd.Stdout, outs, cmds = out, append(outs, out), append(cmds, cmd)
			cmd.Start()
		}
		for i, cmd := range cmds {
			cmd.Wait()
			count, err := strconv.Atoi(strings.TrimSpace(outs[i].String()))
			if err != nil {
				b.Fatal(outs[i])
			}
			sum += float64(count)
		}
		return sum
	}
	for b.Loop() {
		one, four, ours := total("bare", 1), total("bare", 4), total("store", 4)
		b.ReportMetric(ours/four, "of-bare-four")
		b.ReportMetric(ours/one, "of-bare-one")
		b.ReportMetric(ours, "appends/s")
	}
}

// BenchmarkOpen opens 100,000 records, all of different ids, and with four lines each.
func BenchmarkOpen(b *testing.B) {
	for _, each := range []int{1, 4} {
		b.Run(fmt.Sprintf("%d-lines-each", each), func(b *testing.B) {
			dir := storeDir(b)
			f, _ := os.OpenFile(filepath.Join(dir, "state.jsonl"), os.O_CREATE|os.O_WRONLY, 0o600)
			w := bufio.NewWriter(f)
			for i := range 100000 {
				p := storeQuestion("s")
				p.ID, p.V, p.Rec, p.At = fmt.Sprintf("%08x-0000-4000-8000-000000000000", i/each), 1, "prompt", p.CreatedAt.UTC()
				p.Choices = []Choice{{Key: "y", Label: "Yes"}, {Key: "n", Label: "No"}}
				line, _ := encode(p, 0)
				w.Write(line)
			}
			w.Flush()
			f.Close()
			for b.Loop() {
				s, err := openStore(dir)
				if err != nil {
					b.Fatal(err)
				}
				s.Close()
			}
		})
	}

}
