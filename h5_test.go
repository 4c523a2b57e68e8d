package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// storeTears adds the beginning of a line to the state's file, as a write that a crash cut short.
func storeTears(t *testing.T, s *Store) {
	t.Helper()
	f, err := os.OpenFile(s.log.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(`{"v":1,"rec":"prompt","id":"torn`); err != nil {
		t.Fatal(err)
	}
}

// A lock file that was refused is used as soon as the user has made it private: no later entry is missing.
func TestLockFileRefusedOnce(t *testing.T) {
	needUnix(t)
	s := storeAt(t, home(t, ""))
	lock := filepath.Join(s.Dir, "audit.lock")
	os.WriteFile(lock, nil, 0o600)
	os.Chmod(lock, 0o644)
	entry := Event{Name: "UNAUTHORIZED"}
	if err := s.Audit().Append(entry); err == nil || !strings.Contains(err.Error(), "can be reached by others") {
		t.Fatalf("with a lock that others can open: %v", err)
	}
	os.Chmod(lock, 0o600)
	if err := s.Audit().Append(entry); err != nil || s.Trouble() != nil {
		t.Errorf("made private: %v, trouble %v", err, s.Trouble())
	}
	storeSession(t, s)
	log, _ := os.ReadFile(s.audit.log.path)
	if n := strings.Count(string(log), "\n"); n != 2 {
		t.Errorf("%d entries, want 2:\n%s", n, log)
	}
}

// Nothing is made inside a folder that is refused, nor behind a symbolic link.
func TestRefusedFolderStaysEmpty(t *testing.T) {
	needUnix(t)
	shared := filepath.Join(t.TempDir(), "shared")
	os.Mkdir(shared, 0o700)
	os.Chmod(shared, 0o755)
	behind := filepath.Join(t.TempDir(), "behind")
	os.Mkdir(behind, 0o700)
	link := filepath.Join(t.TempDir(), "link")
	os.Symlink(behind, link)
	for _, row := range []struct{ name, dir, real string }{
		{"others can enter it", shared, shared},
		{"a symbolic link", link, behind},
	} {
		t.Run(row.name, func(t *testing.T) {
			s, err := openStore(row.dir)
			if err == nil || s != nil || hintOf(err) == "" {
				t.Errorf("openStore = %v, %v", s, err)
			}
			if _, err := openLog(row.dir, "info"); err == nil {
				t.Error("openLog accepted it")
			}
			if made, _ := os.ReadDir(row.real); len(made) > 0 {
				t.Errorf("%s was made in it", made[0].Name())
			}
		})
	}
}

// A compaction that failed is told until one succeeds, whatever is written between.
func TestCompactionTroubleStays(t *testing.T) {
	full := errors.New("no space left on device")
	broken := true
	s, err := openStoreWith(home(t, ""), faultyFiles(func(op string, _ int64) error {
		if broken && op == "rename" {
			return full
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range 3 { // each writes to the audit log, too, which works
		if i == 0 {
			storeCompactNext(s)
		}
		storeSession(t, s)
		if err := s.Trouble(); !errors.Is(err, full) {
			t.Fatalf("after %d more changes Trouble() = %v", i, err)
		}
	}
	broken = false
	storeCompactNext(s)
	storeSession(t, s)
	if err := s.Trouble(); err != nil {
		t.Errorf("it has been compacted, and Trouble() = %v", err)
	}
}

// Another process's compaction ends the trouble with ours.
func TestCompactionTroubleEndsElsewhere(t *testing.T) {
	dir := home(t, "")
	s, err := openStoreWith(dir, faultyFiles(func(op string, _ int64) error {
		if op == "rename" {
			return errors.New("permission denied")
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	storeCompactNext(s)
	storeSession(t, s)
	if s.Trouble() == nil {
		t.Fatal("the compaction did not fail")
	}
	other := storeAt(t, dir)
	storeCompactNext(other)
	storeSession(t, other)
	storeView(t, s)
	if err := s.Trouble(); err != nil {
		t.Errorf("the file is compacted, and Trouble() = %v", err)
	}
}

// That a torn end was moved aside is said when it was, and once; until then nothing of it is left aside.
func TestTornEndIsToldWhenMoved(t *testing.T) {
	for _, op := range []string{"write", "ftruncate"} {
		t.Run(op, func(t *testing.T) {
			broken := false
			s, err := openStoreWith(home(t, ""), faultyFiles(func(now string, _ int64) error {
				if broken && now == op {
					return errors.New("input/output error")
				}
				return nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			session := storeSession(t, s)
			before, _ := os.ReadFile(s.log.path)
			storeTears(t, s)
			broken = true
			for range 2 {
				if _, err := s.View(); err == nil || len(s.notes) != 0 {
					t.Fatalf("it cannot be moved: %v, notes %q", err, s.notes)
				}
			}
			kept, _ := filepath.Glob(s.log.path + ".torn-*")
			for _, name := range kept {
				if b, _ := os.ReadFile(name); op == "ftruncate" || len(b) > 0 {
					t.Errorf("%s is left with %q", filepath.Base(name), b)
				}
			}
			broken = false
			v := storeView(t, s)
			storeView(t, s)
			if len(s.notes) != 1 || !strings.Contains(s.notes[0], "was moved aside") || v.Sessions[session] == nil {
				t.Errorf("notes %q, %d sessions", s.notes, len(v.Sessions))
			}
			if now, _ := os.ReadFile(s.log.path); string(now) != string(before) {
				t.Errorf("the file is now %q", now)
			}
		})
	}
}

// What follows a failed step of a copy is not done: nothing is written to a file that was refused, and what could not
// be read is not copied.
func TestCopyEndsWithItsFirstFailure(t *testing.T) {
	var ops []string
	s, err := openStoreWith(home(t, ""), faultyFiles(func(op string, _ int64) error {
		ops = append(ops, op)
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	storeSession(t, s)
	ops = nil
	if err := os.Mkdir(s.log.path+".new", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.log.create(s.log.path+".new", []byte("x")); err == nil || len(ops) > 0 {
		t.Errorf("refused: %v, and then %q", err, ops)
	}
	s.log.f.Close()
	if _, err := s.log.aside("backup", 0); err == nil || len(ops) > 0 {
		t.Errorf("unreadable: %v, and then %q", err, ops)
	}
	if made, _ := filepath.Glob(s.log.path + ".backup-*"); len(made) > 0 {
		t.Errorf("%s was made of what could not be read", made[0])
	}
}

// A dead session whose end could not be recorded is still there with its lock's file, and is closed the next time.
func TestReapThatFails(t *testing.T) {
	broken := false
	s, err := openStoreWith(home(t, ""), faultyFiles(func(op string, _ int64) error {
		if broken && op == "write" {
			return errors.New("no space left on device")
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	dead := storeSession(t, s)
	p := storePrompt(t, s, dead, AwaitingReply, nil)
	lock := filepath.Join(s.Dir, lockName(dead))
	os.WriteFile(lock, nil, 0o600) // as kill -9 leaves it
	for _, fails := range []bool{true, false} {
		broken = fails
		err := s.Reap(time.Now())
		v := storeView(t, s)
		_, gone := os.Stat(lock)
		if failed := v.Prompts[p.ID].Status == Failed; (err != nil) != fails || failed == fails || (gone == nil) != fails {
			t.Errorf("writing fails: %v; Reap = %v, the question is %s, the lock's file: %v", fails, err,
				v.Prompts[p.ID].Status, gone)
		}
	}
}

// An answer that was given is "answered", exit 0, though the audit log cannot be written: that is said beside it.
func TestAnsweredWithoutAuditLog(t *testing.T) {
	dir := home(t, "")
	s := storeAt(t, dir)
	id := newID()
	release, err := s.HoldSession(id)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := storeUpdate(s, &SessionRecord{Head: Head{ID: id}, Status: "active"}); err != nil {
		t.Fatal(err)
	}
	p := storePrompt(t, s, id, AwaitingReply, nil)
	f, err := os.OpenFile(s.audit.log.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString("garbage\n")
	f.Close()
	code, stdout, stderr := cli(t, dir, "answer", shortID(p.ID), "y")
	if code != 0 || stdout != "answered "+shortID(p.ID)+"\n" || !strings.Contains(stderr, "the audit log lacks an entry") {
		t.Errorf("exit %d: %q, %q", code, stdout, stderr)
	}
	if q := storeView(t, s).Prompts[p.ID]; q.Status != ReplyReceived {
		t.Errorf("the question is %s", q.Status)
	}
}

// What the configuration lacks is said of what asks for it, and names where that came from.
func TestLackNamesItsOrigin(t *testing.T) {
	token := "bot_token = '" + fakeToken + "'\n"
	for _, row := range []struct {
		name, file, env string
		flags           map[string]string
		want            string
	}{
		{"token from the environment", "", fakeToken, nil, "environment TELEGRAM_BOT_TOKEN: a bot token needs"},
		{"the environment wins", "[telegram]\n" + token, fakeToken, nil, "environment TELEGRAM_BOT_TOKEN: a bot token"},
		{"token from the file", "[telegram]\n" + token, "", nil, "config.toml:2: a bot token needs"},
		{"nobody allowed", "[telegram]\n" + token + "chat_id = 5\n", "", nil, "config.toml:2: telegram.allowed_users"},
		{"channel from the file", "channel = 'telegram'\n", "", nil, "config.toml:1: channel telegram needs"},
		{"channel from a flag", "", "", map[string]string{"channel": "telegram"}, "flag: channel telegram needs"},
	} {
		t.Run(row.name, func(t *testing.T) {
			getenv := func(name string) string {
				if name != "TELEGRAM_BOT_TOKEN" {
					return ""
				}
				return row.env
			}
			c, err := loadConfig(home(t, row.file), getenv, row.flags)
			if err == nil || !strings.HasPrefix(err.Error(), row.want) || hintOf(err) == "" || c.Token != "" {
				t.Errorf("loadConfig: %v, want %s", err, row.want)
			}
		})
	}
}

// A config.toml that cannot be written leaves no copy of the token behind.
func TestSetupLeavesNoToken(t *testing.T) {
	for _, row := range []struct {
		name string
		make func(path string) error
	}{
		{"config.toml is a folder", func(path string) error { return os.Mkdir(path, 0o700) }},
		{"a link in a circle", func(path string) error { return os.Symlink(path, path) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := home(t, "")
			path := filepath.Join(dir, "config.toml")
			if err := row.make(path); err != nil {
				t.Fatal(err)
			}
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			s := &setup{command: &command{stdout: out}, cfg: &Config{Dir: dir, Token: fakeToken, ChatID: 5}}
			if err := s.save(); err == nil {
				t.Error("it says that it was saved")
			}
			if left, err := os.ReadFile(path + ".new"); err == nil {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// A record's times stand in the file in UTC with six decimals, wherever it was made; none is null.
func TestTimesInTheFile(t *testing.T) {
	east := time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.FixedZone("", 5*3600))
	r := &SessionRecord{Head: Head{1, "session", "a", east}, StartedAt: east.Truncate(time.Second), LastSeen: &east}
	line, err := encode(r)
	for _, want := range []string{`"at":"2026-01-01T22:04:05.123456Z"`, `"started_at":"2026-01-01T22:04:05.000000Z"`,
		`"ended_at":null`, `"last_output_at":"2026-01-01T22:04:05.123456Z"`} {
		if err != nil || !strings.Contains(string(line), want) {
			t.Errorf("%s is not in %s (%v)", want, line, err)
		}
	}
}

// What compaction keeps of each kind of record, by its age and by whether it is alive.
func TestRetained(t *testing.T) {
	const day = 24 * time.Hour
	s := storeAt(t, home(t, ""))
	live, over := storeSession(t, s), newID()
	storeUpdate(s, &SessionRecord{Head: Head{ID: over}, Status: "completed"})
	now := time.Now()
	for _, row := range []struct {
		name string
		r    Record
		want string // kept when it is 1, 10 and 40 days old
	}{
		{"meta", &MetaRecord{}, "yes yes yes"},
		{"update", &UpdateRecord{}, "yes no no"},
		{"input", &InputRecord{}, "yes no no"},
		{"reply", &ReplyRecord{}, "yes yes no"},
		{"session that is active", &SessionRecord{Head: Head{ID: live}}, "yes yes yes"},
		{"session that is over", &SessionRecord{Head: Head{ID: over}}, "yes yes no"},
		{"open question", &PromptRecord{SessionID: live, Status: AwaitingReply}, "yes yes yes"},
		{"question that is over", &PromptRecord{SessionID: live, Status: Resolved}, "yes yes no"},
		{"question of a session that is over", &PromptRecord{SessionID: over, Status: AwaitingReply}, "yes yes no"},
	} {
		t.Run(row.name, func(t *testing.T) {
			var got []string
			for _, age := range []time.Duration{day, 10 * day, 40 * day} {
				row.r.head().At = now.Add(-age)
				if s.retained(row.r) {
					got = append(got, "yes")
				} else {
					got = append(got, "no")
				}
			}
			if fmt.Sprint(got) != "["+row.want+"]" {
				t.Errorf("kept: %s, want %s", got, row.want)
			}
		})
	}
}

// Followers of a state that cannot be read try again now and then: one's attempt does not set off the other's.
func TestFollowersOfTroubleAreCalm(t *testing.T) {
	t.Parallel()
	var attempts atomic.Int64
	s, err := openStoreWith(home(t, ""), faultyFiles(func(op string, _ int64) error {
		if op != "ftruncate" {
			return nil
		}
		attempts.Add(1)
		return errors.New("input/output error")
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	session := storeSession(t, s)
	storeTears(t, s)
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Second) // from the first second on it watches the folder
	defer stop()
	for range 2 {
		records := s.Follow(ctx, session, nil)
		defer func() { // it has ended
			for range records {
			}
		}()
	}
	<-ctx.Done()
	if n := attempts.Load(); n < 2 || n > 12 {
		t.Errorf("%d attempts in 2 s, want 2 in each second of each", n)
	}
}
