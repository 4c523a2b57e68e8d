package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

/* ===== Audit: the chain goes on, or says that it does not ===== */

// auditNames are the events of the log in dir.
func auditNames(t testing.TB, dir string) (names []string) {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(dir, "audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(log) {
		var e struct{ Event string }
		json.Unmarshal(line, &e)
		names = append(names, e.Event)
	}
	return names
}

// auditGaps is how often the log in dir says that it did not continue the noted head.
func auditGaps(t testing.TB, dir string) (n int) {
	t.Helper()
	for _, name := range auditNames(t, dir) {
		if name == discontinued {
			n++
		}
	}
	return n
}

// auditAppend adds an entry as a process does that has just been started.
func auditAppend(t testing.TB, dir, name string) {
	t.Helper()
	s := storeAt(t, dir)
	defer s.Close()
	if err := s.Audit().Append(Event{Name: name}); err != nil {
		t.Fatal(err)
	}
}

// auditVerify runs audit verify, or with aside audit verify --aside.
func auditVerify(t testing.TB, dir string, aside bool, session string) (code int, stdout, stderr string) {
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
	set := flag.NewFlagSet("audit", flag.ContinueOnError)
	set.Bool("json", false, "")
	set.String("head", "", "")
	set.Bool("aside", aside, "")
	env := map[string]string{"ATLASBRIDGE_HOME": dir, "ATLASBRIDGE_SESSION": session}
	code = cmdAudit(&command{ctx: t.Context(), name: "audit", stdout: files[0], stderr: files[1],
		getenv: func(k string) string { return env[k] }, opts: &options{set: set, args: []string{"verify"}}})
	out, _ := os.ReadFile(files[0].Name())
	errs, _ := os.ReadFile(files[1].Name())
	return code, string(out), string(errs)
}

// noteOf is the state's note about the audit log in dir.
func noteOf(t testing.TB, dir string) MetaRecord {
	t.Helper()
	s := storeAt(t, dir)
	defer s.Close()
	m := storeView(t, s).Meta["audit"]
	if m == nil {
		t.Fatal("the state notes no head")
	}
	return *m
}

// loseNotes takes the last n notes about the audit log out of the state file, as a power cut does with what was not
// fsynced.
func loseNotes(t testing.TB, dir string, n int) {
	t.Helper()
	path := filepath.Join(dir, "state.jsonl")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	for i := len(lines) - 1; i >= 0 && n > 0; i-- {
		if bytes.Contains(lines[i], []byte(`"rec":"meta","id":"audit"`)) {
			lines = slices.Delete(lines, i, i+1)
			n--
		}
	}
	if n > 0 {
		t.Fatalf("%d notes too few", n)
	}
	if err := os.WriteFile(path, bytes.Join(lines, nil), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A head that was noted late, or whose note was lost, is no gap, however far back it stands.
func TestAuditNotesLost(t *testing.T) {
	for name, size := range map[string]int{"near": 10, "beyond one read": 4000} {
		t.Run(name, func(t *testing.T) {
			dir := storeDir(t)
			s := storeAt(t, dir)
			for i := range 90 {
				e := Event{Name: "TOOL_CALL", Fields: []Field{{"n", i}, {"text", strings.Repeat("x", size)}}}
				if err := s.Audit().Append(e); err != nil {
					t.Fatal(err)
				}
			}
			s.Close()
			for _, lost := range []int{1, 5, 85} {
				loseNotes(t, dir, lost)
				auditAppend(t, dir, "UNAUTHORIZED")
				if code, out, _ := auditVerify(t, dir, false, ""); code != 0 || auditGaps(t, dir) != 0 {
					t.Fatalf("%d notes lost: %s", lost, out)
				}
			}
			if note := noteOf(t, dir); note.Seq != 93 || note.Values["broken"] != "" {
				t.Errorf("noted %+v", note)
			}
		})
	}
}

// A log that does not continue the noted head says so once, and never verifies again: not after the next entries, nor
// when it is deleted again, nor when it is written anew without the entry.
func TestAuditDiscontinued(t *testing.T) {
	_, other := auditFilled(t, 9) // another chain
	lines := func(b []byte, n int) []byte { return bytes.Join(bytes.SplitAfter(b, []byte("\n"))[:n], nil) }
	rows := []struct {
		name string
		do   func(path string, log []byte)
	}{
		{"cut by one", func(path string, log []byte) { os.WriteFile(path, lines(log, 4), 0o600) }},
		{"cut by three", func(path string, log []byte) { os.WriteFile(path, lines(log, 2), 0o600) }},
		{"deleted", func(path string, log []byte) { os.Remove(path) }},
		{"emptied", func(path string, log []byte) { os.Truncate(path, 0) }},
		{"anew, shorter", func(path string, log []byte) { os.WriteFile(path, lines(other, 3), 0o600) }},
		{"anew, as long", func(path string, log []byte) { os.WriteFile(path, lines(other, 5), 0o600) }},
		{"anew, longer", func(path string, log []byte) { os.WriteFile(path, other, 0o600) }},
		{"moved away", func(path string, log []byte) { os.Rename(path, path+".old") }},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			s, log := auditFilled(t, 5)
			dir, path := s.Dir, s.audit.log.path
			before := noteOf(t, dir)
			row.do(path, log)
			auditAppend(t, dir, "UNAUTHORIZED")
			wrong := fmt.Sprintf("did not continue the entry 5:%s", before.Hash)
			fails := func(when string) {
				t.Helper()
				code, out, _ := auditVerify(t, dir, false, "")
				if code != exitFailed || !strings.Contains(out, "--aside") {
					t.Errorf("%s: exit %d, %s", when, code, out)
				}
				if note := noteOf(t, dir); note.Values["broken"] != "5:"+before.Hash {
					t.Errorf("%s: noted %+v", when, note)
				}
			}
			fails("at once")
			if _, out, _ := auditVerify(t, dir, false, ""); !strings.Contains(out, wrong) {
				t.Errorf("it does not name the head: %s", out)
			}
			now, _ := os.ReadFile(path)
			v := verify(now)
			at := bytes.SplitAfter(now, []byte("\n"))[max(0, v.Line-1)]
			if v.OK || !strings.Contains(v.Reason, wrong) || !bytes.Contains(at, []byte(discontinued)) {
				t.Errorf("without the state: %+v", v)
			}
			auditAppend(t, dir, "UNAUTHORIZED")
			storePrompt(t, s, storeSession(t, s), Resolved, nil)
			if n := auditGaps(t, dir); n != 1 {
				t.Errorf("said %d times", n)
			}
			fails("later")
			os.Remove(path)
			auditAppend(t, dir, "UNAUTHORIZED")
			if n := auditGaps(t, dir); n != 1 {
				t.Errorf("deleted again, said %d times", n)
			}
			fails("deleted again")
		})
	}
}

// An entry of another chain, sound by itself and at its place, is none of this one.
func TestAuditSpliced(t *testing.T) {
	s, log := auditFilled(t, 5)
	_, other := auditFilled(t, 5)
	here, there := bytes.SplitAfter(log, []byte("\n")), bytes.SplitAfter(other, []byte("\n"))
	for n := 1; n < 5; n++ {
		spliced := bytes.Join(slices.Concat(here[:n], there[n:]), nil)
		if v := verify(spliced); v.OK || v.Line != int64(n+1) || !strings.Contains(v.Reason, "hash") {
			t.Errorf("from line %d on: %+v", n+1, v)
		}
	}
	note := storeView(t, s).Meta["audit"]
	for _, noted := range []chainHead{{4, note.Hash}, {6, note.Hash}, {5, digest(nil)}} {
		if _, yes, err := s.audit.continues(noted); yes || err != nil {
			t.Errorf("the log continues %v: %v, %v", noted, yes, err)
		}
	}
}

// What is looked for is found behind a line longer than an entry can be, and such a line is no reason to lose entries.
func TestAuditHugeLine(t *testing.T) {
	s, log := auditFilled(t, 3)
	huge := append(bytes.Repeat([]byte("x"), 3*maxEntry), '\n')
	os.WriteFile(s.audit.log.path, slices.Concat(huge, log), 0o600)
	auditAppend(t, s.Dir, "UNAUTHORIZED")
	if n := auditGaps(t, s.Dir); n != 0 {
		t.Errorf("%d gaps", n)
	}
	os.WriteFile(s.audit.log.path, slices.Concat(huge, log), 0o600)
	auditAppend(t, s.Dir, "UNAUTHORIZED")
	if n := auditGaps(t, s.Dir); n != 1 {
		t.Errorf("%d gaps", n)
	}
}

// The state's note alone keeps a broken log from verifying: also when the log shows nothing of it.
func TestAuditBrokenIsNoted(t *testing.T) {
	s, log := auditFilled(t, 3)
	note := *storeView(t, s).Meta["audit"]
	note.Values = map[string]string{"broken": "57:" + digest(nil)}
	if err := storeUpdate(s, &note); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		code, out, _ := auditVerify(t, s.Dir, false, "")
		if v := verify(log); code != exitFailed || !strings.Contains(out, "57:"+digest(nil)) || !v.OK {
			t.Errorf("exit %d, %s", code, out)
		}
		auditAppend(t, s.Dir, "UNAUTHORIZED")
	}
	v, err := s.verifyAudit(storeView(t, s))
	if err != nil || v.OK || v.Line != 7 || v.Remedy == "" || v.Proves != "" {
		t.Errorf("%+v, %v", v, err)
	}
	if code, _, _ := storeCommand(t, t.Context(), s.Dir, "doctor", "--json"); code != exitFailed {
		t.Error("doctor is content")
	}
}

// What was found is said once, also when the process died before it noted it, and when two find it at the same time.
func TestAuditGapSaidOnce(t *testing.T) {
	s, _ := auditFilled(t, 3)
	old := noteOf(t, s.Dir)
	os.Remove(s.audit.log.path)
	auditAppend(t, s.Dir, "UNAUTHORIZED")
	loseNotes(t, s.Dir, 1)
	if note := noteOf(t, s.Dir); note.Seq != 3 || note.Values["broken"] != "" {
		t.Fatalf("noted %+v", note)
	}
	stale := storeAt(t, s.Dir)
	noted, err := stale.lockAudit() // knows the head of before, and waits for its turn
	stale.audit.log.release()
	if err != nil {
		t.Fatal(err)
	}
	auditAppend(t, s.Dir, "UNAUTHORIZED")
	stale.audit.commit(noted, stale.audit.log.acquire(), Event{Name: "UNAUTHORIZED"})
	if names := auditNames(t, s.Dir); len(names) != 4 || auditGaps(t, s.Dir) != 1 {
		t.Errorf("the log: %q", names)
	}
	if note := noteOf(t, s.Dir); note.Seq != 4 || note.Values["broken"] != fmt.Sprint("3:", old.Hash) {
		t.Errorf("noted %+v", note)
	}
}

// Notes that come late, in another order, or of a log that is not there any more, never take the place of a head that the
// log does not continue.
func TestAuditLateNotes(t *testing.T) {
	s, log := auditFilled(t, 5)
	head := func(n int) chainHead {
		line := bytes.SplitAfter(log, []byte("\n"))[n-1]
		var e struct{ Hash string }
		json.Unmarshal(line, &e)
		return chainHead{int64(n), e.Hash}
	}
	now := headOf(storeView(t, s).Meta["audit"])
	if now != head(5) {
		t.Fatal(now)
	}
	forged := chainHead{99, digest(nil)}
	set := func(h chainHead) {
		t.Helper()
		if err := storeUpdate(s, &MetaRecord{Head: Head{ID: "audit"}, Seq: h.Seq, Hash: h.Hash}); err != nil {
			t.Fatal(err)
		}
	}
	rows := []struct {
		name string
		have chainHead
		note appended
		want chainHead
	}{
		{"the next", head(4), appended{noted: head(4), last: head(5)}, head(5)},
		{"late", head(4), appended{noted: head(2), last: head(3)}, head(4)},
		{"late, and gap found meanwhile", head(4), appended{noted: head(2), last: head(3), gap: true}, head(4)},
		{"others have noted since", head(4), appended{noted: head(3), last: head(5)}, head(5)},
		{"of a log that is gone", head(4), appended{noted: head(3), last: forged}, head(5)},
		{"what is noted is not in the log", chainHead{4, digest(nil)}, appended{noted: head(3), last: head(5)},
			chainHead{4, digest(nil)}},
		{"first", chainHead{}, appended{last: head(5)}, head(5)},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			set(row.have)
			s.noteHead(row.note, nil)
			got := *storeView(t, s).Meta["audit"]
			if headOf(&got) != row.want || got.Values["broken"] != "" {
				t.Errorf("noted %+v, want %v", got, row.want)
			}
		})
	}
}

// Eight processes that append, more that are killed and others that do nothing but append, are never called a broken log.
func TestAuditCrowd(t *testing.T) {
	dir := storeDir(t)
	span := 1500 * time.Millisecond
	if os.Getenv("ATLASBRIDGE_LONG") != "" {
		span = time.Minute
	} else if testing.Short() {
		t.Skip("short")
	}
	t.Setenv("ATLASBRIDGE_TEST_SPAN", span.String())
	end := time.Now().Add(span)
	var all sync.WaitGroup
	for range 8 {
		cmd := storeChild(dir, "store-crowd")
		var out bytes.Buffer
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			if err := cmd.Wait(); err != nil || strings.Contains(out.String(), "error") {
				t.Errorf("%v: %s", err, out.String())
			}
		})
	}
	all.Go(func() {
		for i := 0; time.Now().Before(end); i++ {
			cmd := storeChild(dir, "store-crowd")
			if err := cmd.Start(); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Duration(30+i*7%100) * time.Millisecond)
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	for range 2 {
		s := storeAt(t, dir)
		all.Go(func() {
			for time.Now().Before(end) {
				if err := s.Audit().Append(Event{"UNAUTHORIZED", "", "", nil}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if code, out, _ := auditVerify(t, dir, false, ""); code != 0 || auditGaps(t, dir) != 0 {
		t.Error(out)
	}
	if note := noteOf(t, dir); note.Values["broken"] != "" || int(note.Seq) < len(auditNames(t, dir))-20 {
		t.Errorf("noted %+v of %d", note, len(auditNames(t, dir)))
	}
	t.Logf("%d entries", len(auditNames(t, dir)))
}

// Put aside, the old log is kept as it was, the new one begins with a word about it, and all is well again: for open
// questions, for those who have the old file open, and while others append.
func TestAuditAside(t *testing.T) {
	s, _ := auditFilled(t, 3)
	dir, path := s.Dir, s.audit.log.path
	session := storeSession(t, s)
	noted := noteOf(t, dir)
	os.Remove(path)
	p := storePrompt(t, s, session, AwaitingReply, func(p *PromptRecord) { p.Shown = "Go on?" })
	over := storePrompt(t, s, session, Resolved, func(p *PromptRecord) { p.Shown = "Done?" })
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := noteOf(t, dir)
	if code, out, _ := auditVerify(t, dir, false, ""); code != exitFailed {
		t.Fatal(out)
	}
	code, out, errs := auditVerify(t, dir, true, "")
	kept, _ := filepath.Glob(path + ".aside-*")
	if code != 0 || len(kept) != 1 || !strings.Contains(out, kept[0]) || !strings.Contains(out, "head 2:sha256:") {
		t.Fatalf("exit %d, %s %s, kept %q", code, out, errs, kept)
	}
	if b, err := os.ReadFile(kept[0]); err != nil || !bytes.Equal(b, old) || ownedPrivate(kept[0]) != nil {
		t.Errorf("what is kept differs (%v, %v)", err, ownedPrivate(kept[0]))
	}
	log, _ := os.ReadFile(path)
	wants := []string{`{"seq":1,`, `"event":"AUDIT_PUT_ASIDE"`, `"aside":"` + filepath.Base(kept[0]) + `"`,
		fmt.Sprintf(`"noted_seq":%d,"noted_hash":"%s"`, last.Seq, last.Hash), `"broken":"4:` + noted.Hash + `"`, genesis}
	for _, want := range wants {
		first, _, _ := strings.Cut(string(log), "\n")
		if !strings.Contains(first, want) {
			t.Errorf("the first entry lacks %s: %s", want, first)
		}
	}
	if strings.Contains(string(log), over.ID) || !strings.Contains(string(log), p.ID) {
		t.Errorf("open questions, and only they, are carried over: %s", log)
	}
	if _, why, err := s.Decide(storeTap(p, "y"), time.Now()); why != "" || err != nil {
		t.Fatal(why, err)
	}
	s.Move(p.ID, Injected, func(p *PromptRecord) { p.ScreenSHA = digest([]byte("Go on?")) })
	s.Move(p.ID, Resolved, nil)
	auditAppend(t, dir, "UNAUTHORIZED")
	if code, out, _ := auditVerify(t, dir, false, ""); code != 0 || auditGaps(t, dir) != 0 {
		t.Error(out)
	}
	if note := noteOf(t, dir); note.Values["broken"] != "" {
		t.Errorf("noted %+v", note)
	}
	if code, _, errs := auditVerify(t, dir, true, "no session"); code != 0 {
		t.Error("a sound log is not put aside:", errs)
	}
	release, err := s.HoldSession(session)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if code, _, errs := auditVerify(t, dir, true, session); code != exitFailed || !strings.Contains(errs, "inside") {
		t.Errorf("a session puts the log aside: %d %s", code, errs)
	}
}

// A log whose last line is damaged takes no entry; put aside, a new one does.
func TestAuditAsideDamaged(t *testing.T) {
	s, log := auditFilled(t, 3)
	os.WriteFile(s.audit.log.path, append(log, "garbage\n"...), 0o600)
	if err := s.Audit().Append(Event{Name: "UNAUTHORIZED"}); err == nil {
		t.Error("an entry behind garbage")
	}
	if code, _, errs := auditVerify(t, s.Dir, true, ""); code != 0 {
		t.Fatal(errs)
	}
	if err := s.Audit().Append(Event{Name: "UNAUTHORIZED"}); err != nil || s.Trouble() != nil {
		t.Error(err, s.Trouble())
	}
	if code, out, _ := auditVerify(t, s.Dir, false, ""); code != 0 || len(auditNames(t, s.Dir)) != 2 {
		t.Error(out)
	}
}

// While many append, putting the log aside again and again is no gap for any of them.
func TestAuditAsideCrowd(t *testing.T) {
	dir := storeDir(t)
	end := time.Now().Add(time.Second)
	var all sync.WaitGroup
	for range 4 {
		s := storeAt(t, dir)
		all.Go(func() {
			for time.Now().Before(end) {
				if err := s.Audit().Append(Event{Name: "UNAUTHORIZED"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	n := 0
	for time.Now().Before(end) {
		if code, _, errs := auditVerify(t, dir, true, ""); code != 0 {
			t.Fatal(errs)
		}
		n++
		time.Sleep(time.Millisecond)
	}
	all.Wait()
	if code, out, _ := auditVerify(t, dir, false, ""); code != 0 || auditGaps(t, dir) != 0 {
		t.Error(out)
	}
	kept, _ := filepath.Glob(filepath.Join(dir, "audit.log.aside-*"))
	for _, path := range kept {
		b, err := os.ReadFile(path)
		if v := verify(b); err != nil || !v.OK {
			t.Errorf("%s: %v %s", path, err, v.Reason)
		}
	}
	if len(kept) != n || n < 3 {
		t.Errorf("put aside %d times, kept %d", n, len(kept))
	}
}

/* ===== Audit: what was shown, what stood there ===== */

// verify names the first answer that was typed at something else than was shown.
func TestAuditShown(t *testing.T) {
	shown, other := "Run rm -rf x? (y/n)", "Run rm -rf /? (y/n)"
	rows := []struct {
		name   string
		shown  string
		screen string // "": the answer was not typed at a screen
		way    []State
		want   string
	}{
		{"the same", shown, shown, []State{Routed, AwaitingReply, ReplyReceived, Injected, Resolved}, ""},
		{"not routed", shown, shown, []State{ReplyReceived, Injected, Resolved}, ""},
		{"not routed, other", shown, other, []State{ReplyReceived, Injected}, "something else than was shown (prompt"},
		{"other", shown, other, []State{Routed, AwaitingReply, ReplyReceived, Injected, Resolved}, "something else than was shown"},
		{"the default after a timeout", shown, shown, []State{Routed, AwaitingReply, Expired, Injected, Resolved}, ""},
		{"other after a timeout", shown, other, []State{Routed, AwaitingReply, Expired, Injected}, "something else than was shown"},
		{"nothing to compare with", "", shown, []State{Routed, AwaitingReply, ReplyReceived, Injected}, "no entry before says"},
		{"by a hook", shown, "", []State{Routed, AwaitingReply, ReplyReceived, Injected}, ""},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			s := storeAt(t, storeDir(t))
			session := storeSession(t, s)
			good := storePrompt(t, s, session, Injected, func(p *PromptRecord) { p.Shown = "before" })
			p := storePrompt(t, s, session, Created, func(p *PromptRecord) {
				p.Shown = row.shown
				p.ExpiresAt = time.Now().Add(-time.Second)
			})
			for _, to := range row.way {
				moved, err := s.Move(p.ID, to, func(p *PromptRecord) {
					p.Value, p.DecidedBy = ref("n"), ref("cli:answer")
					if to == Injected && row.screen != "" {
						p.ScreenSHA = digest([]byte(row.screen))
					}
				})
				if !moved || err != nil {
					t.Fatal(to, moved, err)
				}
			}
			auditAppend(t, s.Dir, "UNAUTHORIZED")
			log, _ := os.ReadFile(s.audit.log.path)
			for line := range strings.Lines(string(log)) { // detected and routed
				asks := strings.Contains(line, "PROMPT_DETECTED") || strings.Contains(line, "PROMPT_ROUTED")
				has := strings.Contains(line, `"shown_sha256":"`+digest([]byte(row.shown)))
				if strings.Contains(line, p.ID) && has != (asks && row.shown != "") {
					t.Errorf("the hash of what was shown: %s", line)
				}
			}
			v := verify(log)
			if v.OK != (row.want == "") || !strings.Contains(v.Reason, row.want) {
				t.Fatalf("%+v, want %q", v, row.want)
			}
			if v.Entries != int64(bytes.Count(log, []byte("\n"))) {
				t.Errorf("the chain is not followed to its end: %+v", v)
			}
			if row.want == "" {
				return
			}
			line := string(bytes.SplitAfter(log, []byte("\n"))[v.Line-1])
			if !strings.Contains(line, "REPLY_INJECTED") || !strings.Contains(line, p.ID) || !strings.Contains(v.Reason, p.ID) ||
				strings.Contains(line, good.ID) {
				t.Errorf("line %d: %s", v.Line, line)
			}
		})
	}
}

// A question is forgotten with its end or its session's, so that a long log costs no memory.
func TestAuditShownIsForgotten(t *testing.T) {
	s := storeAt(t, storeDir(t))
	session := storeSession(t, s)
	for _, to := range []State{Resolved, Canceled, Failed, Expired, AwaitingReply} {
		storePrompt(t, s, session, to, func(p *PromptRecord) {
			p.Shown = "Go on?"
			p.ExpiresAt = time.Now().Add(-time.Second)
		})
	}
	log, _ := os.ReadFile(s.audit.log.path)
	asked := questions{}
	for line := range bytes.Lines(log) {
		fields, err := parseEntry(line)
		if why := asked.judge(fields); err != nil || why != "" {
			t.Fatal(err, why)
		}
	}
	if len(asked) != 2 {
		t.Errorf("%d are kept, 2 can still be answered", len(asked))
	}
	if why := asked.judge([]Field{{"event", "SESSION_END"}, {"session_id", session}}); why != "" || len(asked) != 0 {
		t.Errorf("%d are kept after the session, %s", len(asked), why)
	}
}

// Findings do not hide one another: a tail cut after a wrong answer is named too.
func TestAuditFindingsAdd(t *testing.T) {
	s := storeAt(t, storeDir(t))
	p := storePrompt(t, s, storeSession(t, s), ReplyReceived, func(p *PromptRecord) { p.Shown = "a" })
	s.Move(p.ID, Injected, func(p *PromptRecord) { p.ScreenSHA = digest([]byte("b")) })
	auditAppend(t, s.Dir, "UNAUTHORIZED")
	log, _ := os.ReadFile(s.audit.log.path)
	head := "5:" + verify(log).Hash
	cut := log[:bytes.LastIndexByte(log[:len(log)-1], '\n')+1]
	if v := verify(cut, head); v.Line != 4 || !strings.Contains(v.Reason, "; line 5: ") || !strings.Contains(v.Reason, "cut") {
		t.Errorf("%+v", v)
	}
	changed := bytes.Replace(log, []byte("UNAUTHORIZED"), []byte("UNAUTHORISED"), 1)
	if v := verify(changed, head); v.Line != 4 || v.Entries != 4 || !strings.Contains(v.Reason, "; line 5: a hash") {
		t.Errorf("%+v", v)
	}
}

// The README's jq lines find such an answer, and the text whose hash the log has.
func TestREADMEShown(t *testing.T) {
	for _, need := range []string{"bash", "jq", "sha256sum"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Skip(need + " is not installed")
		}
	}
	blocks := readmeBlocks(t, "sh")
	if len(blocks) != 3 {
		t.Fatalf("README.md has %d shell blocks", len(blocks))
	}
	configHome(t, "")
	user := t.TempDir()
	t.Setenv("HOME", user)
	t.Setenv("ATLASBRIDGE_HOME", "")
	s := storeAt(t, filepath.Join(user, ".atlasbridge"))
	session := storeSession(t, s)
	shell := func(script string) string {
		t.Helper()
		out, err := exec.Command("bash", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	typedAt := func(shown, screen string) *PromptRecord {
		t.Helper()
		p := storePrompt(t, s, session, AwaitingReply, func(p *PromptRecord) { p.Shown = shown })
		s.Move(p.ID, ReplyReceived, func(p *PromptRecord) { p.Value = ref("y") })
		s.Move(p.ID, Injected, func(p *PromptRecord) { p.ScreenSHA = digest([]byte(screen)) })
		return p
	}
	text := "Rûn <this> & \"that\"?\n\t\u2028\x7f\\n"
	p := typedAt(text, text)
	storePrompt(t, s, session, Injected, nil)
	if out := shell(blocks[1]); out != "" {
		t.Errorf("it names an answer that was right: %s", out)
	}
	bad := typedAt("a", "b")
	none := typedAt("", "b")
	if out := shell(blocks[1]); strings.Count(out, "\n") != 2 || !strings.Contains(out, bad.ID) || !strings.Contains(out, none.ID) {
		t.Errorf("it does not name the two wrong answers: %s", out)
	}
	if out := shell("id=" + p.ID + "\n" + blocks[2]); out != digest([]byte(text))+"\n"+digest([]byte(text))+"\n" {
		t.Errorf("the shown text: %q", out)
	}
}

/* ===== Answers from inside a session ===== */

// insideScript asks, and meanwhile runs what the test writes into a file, each with its output in another.
const insideScript = `(
  while [ ! -e "$0/end" ]; do
    sleep 0.05
    [ -e "$0/go" ] || continue
    mv "$0/go" "$0/now"
    bash "$0/now" "$0"
  done
) </dev/null >/dev/null 2>&1 &
read -p "Continue? (y/n) " a
echo got $a
touch "$0/end"`

// A tool that answers its own question is refused, however it gets away from its parents, its environment or its
// terminal; from elsewhere the same answer is taken.
func TestAnswerFromInside(t *testing.T) {
	needUnix(t)
	if _, err := exec.LookPath("setsid"); err != nil {
		t.Skip("setsid is not installed")
	}
	dir, work := configHome(t, ""), t.TempDir()
	x := bridge(t, dir, "run", "bash", "-c", insideScript, work)
	x.sees("Continue?")
	st := storeAt(t, dir)
	var p *PromptRecord
	for deadline := time.Now().Add(patience); p == nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no question")
		}
		for _, q := range storeView(t, st).Prompts {
			p = q
		}
	}
	answer := fmt.Sprintf("ATLASBRIDGE_TEST_CHILD=main %s answer %s y", os.Args[0], shortID(p.ID))
	say := func(run string) string {
		return run + ` > "$1/out" 2>&1; echo "exit $?" >> "$1/out"; mv "$1/out" "$1/said"`
	}
	later := "'sleep 0.3; " + answer + "'"
	rows := []struct{ name, script string }{
		{"plainly", say(answer)},
		{"in its own system session", say("setsid sh -c " + later)},
		{"without the environment", say("env -u ATLASBRIDGE_SESSION " + answer)},
		{"only its parents tell", say("env -u ATLASBRIDGE_SESSION setsid sh -c '" + answer + "; exit $?'")},
		{"only its environment tells", "(setsid nohup bash -c '" + say("sleep 0.3; "+answer) + "' x \"$1\" &) ; exit"},
		{"only its system session tells", "(env -u ATLASBRIDGE_SESSION nohup bash -c '" + say("sleep 0.3; "+answer) + "' x \"$1\" &) ; exit"},
	}
	for _, row := range rows {
		refused := t.Run(row.name, func(t *testing.T) {
			os.Remove(filepath.Join(work, "said"))
			if err := os.WriteFile(filepath.Join(work, "new"), []byte(row.script), 0o600); err != nil {
				t.Fatal(err)
			}
			os.Rename(filepath.Join(work, "new"), filepath.Join(work, "go"))
			var said []byte
			for deadline := time.Now().Add(patience); said == nil; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("it says nothing")
				}
				said, _ = os.ReadFile(filepath.Join(work, "said"))
			}
			want := "atlasbridge: this runs inside the session that is asked about"
			if !strings.Contains(string(said), want) || !strings.HasSuffix(string(said), "exit 1\n") {
				t.Errorf("%s\nsays %s", row.script, said)
			}
			if q := storeView(t, st).Prompts[p.ID]; !q.Open() {
				t.Fatalf("the question is %s", q.Status)
			}
		})
		if !refused {
			t.FailNow() // it may have been answered
		}
	}
	log, _ := os.ReadFile(filepath.Join(dir, "audit.log"))
	rejected := 0
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, `"REPLY_REJECTED"`) && strings.Contains(line, p.ID) && strings.Contains(line, p.SessionID) {
			rejected++
		}
	}
	if rejected != len(rows) {
		t.Errorf("%d refusals in the audit log, want %d", rejected, len(rows))
	}
	if code, _, stderr := cli(t, "answer", shortID(p.ID), "y"); code != 0 {
		t.Errorf("from elsewhere: %s", stderr)
	}
	x.sees("got y")
	x.exits(0)
}

// inside knows a session by its tool or its wrapper above this process, by the environment, or by the system's session;
// what is not there any more, or another process by now, is no session.
func TestInside(t *testing.T) {
	needUnix(t)
	parent, grandparent := os.Getppid(), parentOf(os.Getppid())
	if parentOf(os.Getpid()) != parent || parentOf(1<<30) != 0 {
		t.Fatalf("the parent is %d, not %d", parentOf(os.Getpid()), parent)
	}
	above := processStart(parent)
	rows := []struct {
		name  string
		r     SessionRecord
		held  bool // its wrapper lives
		env   bool
		found bool
	}{
		{"nothing", SessionRecord{}, true, false, false},
		{"the tool above", SessionRecord{PID: parent, PIDStart: above}, true, false, true},
		{"the tool further above", SessionRecord{PID: grandparent, PIDStart: processStart(grandparent)}, true, false, true},
		{"the tool above, its wrapper killed", SessionRecord{PID: parent, PIDStart: above}, false, false, true},
		{"another process by now", SessionRecord{PID: parent, PIDStart: above + 1}, true, false, false},
		{"the wrapper above", SessionRecord{Wrapper: parent}, true, false, true},
		{"the wrapper above is another by now", SessionRecord{Wrapper: parent}, false, false, false},
		{"environment", SessionRecord{}, true, true, true},
		{"environment of a session that is over", SessionRecord{}, false, true, false},
		{"the system's session", SessionRecord{PID: systemSession()}, true, false, true},
		{"the system's session, over", SessionRecord{PID: systemSession(), PIDStart: 1}, false, false, false},
		{"this process itself", SessionRecord{Wrapper: os.Getpid()}, true, false, false},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			s := storeAt(t, storeDir(t))
			row.r.ID, row.r.Status = newID(), "active"
			if row.held {
				release, err := s.HoldSession(row.r.ID)
				if err != nil {
					t.Fatal(err)
				}
				defer release()
			}
			if err := storeUpdate(s, &row.r); err != nil {
				t.Fatal(err)
			}
			env := ""
			if row.env {
				env = row.r.ID
			}
			want := ""
			if row.found {
				want = row.r.ID
			}
			if got := s.inside(env); got != want {
				t.Errorf("inside %q, want %q", got, want)
			}
		})
	}
}

// What runs in one session answers no other session's question either, and the audit log names the question.
func TestAnswerFromAnotherSession(t *testing.T) {
	dir := configHome(t, "")
	s := storeAt(t, dir)
	var ids [2]string
	for i := range ids {
		ids[i] = newID()
		release, err := s.HoldSession(ids[i])
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		if err := storeUpdate(s, &SessionRecord{Head: Head{ID: ids[i]}, Status: "active"}); err != nil {
			t.Fatal(err)
		}
	}
	p := storePrompt(t, s, ids[0], AwaitingReply, nil)
	t.Setenv("ATLASBRIDGE_SESSION", ids[1])
	code, _, stderr := cli(t, "answer", shortID(p.ID), "y")
	if code != exitFailed || !strings.Contains(stderr, "inside the session "+shortID(ids[1])) {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if q := storeView(t, s).Prompts[p.ID]; q.Status != AwaitingReply {
		t.Error("it was answered")
	}
	log, _ := os.ReadFile(s.audit.log.path)
	if !strings.Contains(string(log), `"REPLY_REJECTED","session_id":"`+ids[0]+`","prompt_id":"`+p.ID) {
		t.Errorf("not audited: %s", log)
	}
}

// A session whose process is dead takes no answer, and answer does not say that it did.
func TestAnswerToTheDead(t *testing.T) {
	dir := configHome(t, "")
	s := storeAt(t, dir)
	p := storePrompt(t, s, storeSession(t, s), AwaitingReply, nil)
	code, stdout, stderr := cli(t, "answer", shortID(p.ID), "y")
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "session has ended") {
		t.Errorf("exit %d: %s%s", code, stdout, stderr)
	}
}
