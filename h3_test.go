package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestNeighbourSetsNonBlocking: another process that has the host's terminal may set it to O_NONBLOCK: every key typed
// after that still arrives, all of the output reaches the terminal, and the child ends by itself.
func TestNeighbourSetsNonBlocking(t *testing.T) {
	needUnix(t)
	needTool(t, "python3")
	dir := t.TempDir()
	for _, fifo := range []string{"go", "done"} {
		if out, err := exec.Command("mkfifo", filepath.Join(dir, fifo)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	const (
		line      = "0123456789abcde"
		lines     = 1 << 20 / (len(line) + 1)
		neighbour = `import os
open("go").read()
os.set_blocking(1, False)
open("done", "w").write("set\n")`
		child = `echo ready; read a; echo x > go; cat done; read b; echo "[$a][$b]"
			yes "$LINE" | head -n "$LINES_WANTED"; echo "the end"; exit 7`
	)
	env := append(ptyEnv("main"), "ATLASBRIDGE_HOME="+home(t, ""), "EXE="+os.Args[0], "LINE="+line,
		fmt.Sprint("LINES_WANTED=", lines), "NEIGHBOUR="+neighbour, "CHILD="+child)
	p := mustPTYIn(t, dir, env, "sh", "-c", `python3 -c "$NEIGHBOUR" & exec "$EXE" run sh -c "$CHILD"`)
	readUntil(t, p, "ready")
	typeIn(t, p, "a\r")
	readUntil(t, p, "set")
	for _, key := range []string{"o", "n", "e"} {
		typeIn(t, p, key)
		readUntil(t, p, key)
	}
	typeIn(t, p, "\r")
	answer := readUntil(t, p, "[a][one]")
	begin := make([]byte, 16<<10)
	for i := range begin { // so slowly that the terminal is full
		if _, err := p.Read(begin[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	rest, code := readAll(t, p)
	all := answer + string(begin) + rest
	if n := strings.Count(all, line); n != lines || !strings.Contains(all, "the end") || code != 7 {
		t.Errorf("%d lines of %d, exit %d, at the end %q", n, lines, code, all[max(0, len(all)-200):])
	}
}

// TestWaitReadyBlocks: waiting for a stream to be read, or written, ends when it can be, and not before.
func TestWaitReadyBlocks(t *testing.T) {
	needUnix(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for _, c := range []struct {
		name   string
		f      *os.File
		write  bool
		before func() error // nothing can be done after it
		after  func() error // ends that
	}{
		{
			"read", r, false,
			func() error { return nil },
			func() error { _, err := w.WriteString("x"); return err },
		},
		{
			"write", w, true,
			func() error { return fill(w) },
			func() error { _, err := r.Read(make([]byte, 64<<10)); return err },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.before(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			go func() { ended <- waitReady(c.f, c.write) }()
			select {
			case err := <-ended:
				t.Fatalf("it does not wait: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			if err := c.after(); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(patience):
				t.Error("it waits for ever")
			}
		})
	}
}

// fill writes to a pipe until it takes no more.
func fill(w *os.File) error {
	for {
		if err := w.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
			return err
		}
		_, err := w.Write(make([]byte, 4096))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return w.SetWriteDeadline(time.Time{})
		}
		if err != nil {
			return err
		}
	}
}

// TestReloadWhileProbing: the configuration is read anew while the tool's version is looked at (go test -race).
func TestReloadWhileProbing(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // the tool is not there
	st := storeAt(t, home(t, ""))
	for range 20 {
		s := &session{
			cfg:     &Config{Dir: st.Dir, Token: "1:old"},
			st:      st,
			ch:      localChannel{},
			log:     slog.New(slog.DiscardHandler),
			adapter: adapterFor("claude"),
			ctx:     t.Context(),
			events:  make(chan func(), 1),
		}
		s.tg = newTelegram(s.cfg, st, s.log)
		before := s.cfg
		s.probeVersion()
		s.reload()
		if s.cfg == before {
			t.Error("the configuration is not taken over")
		}
		happened := <-s.events
		happened()
		if s.warning != "" {
			t.Errorf("a tool that is not there: %s", s.warning)
		}
	}
}

// TestFinishTellsOfKeys: an answer counts as typed only where the program was written all of it before it ended: keys
// that waited for the writer, and a write that failed, are told as not typed.
func TestFinishTellsOfKeys(t *testing.T) {
	for _, c := range []struct {
		name   string
		handed bool  // the writer has the keys
		err    error // that it reports
		want   State
		why    string
	}{
		{"they wait for the writer", false, nil, Failed, "the program ended before the answer was typed"},
		{"written", true, nil, Resolved, ""},
		{"the write fails", true, io.ErrClosedPipe, Failed, "it could not be typed: io: read/write on closed pipe"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := gateBench(t, "x", TTYState{ReadingYes, true, true}, "Go? (y/n) ", "y")
			id := s.q.rec.ID
			s.pty = &ptyEnded{ptyWriter{err: c.err}}
			s.stop = func() {}
			s.tg = newTelegram(s.cfg, s.st, s.log)
			s.notes = io.Discard
			s.rec.ExitCode = new(int)
			s.gate.keys, s.gate.after = []byte("y"), s.echo()
			if c.handed {
				w, _ := s.nextWrite()
				s.handedOver(w)
				writes := make(chan write, 1)
				writes <- w
				close(writes)
				go s.writePTY(writes)
			}
			s.finish()
			got := storeView(t, s.st).Prompts[id]
			if got.Status != c.want || got.Reason != c.why {
				t.Errorf("it is %s (%s), want %s (%s)", got.Status, got.Reason, c.want, c.why)
			}
			if n := strings.Count(auditText(t, s.st), `"REPLY_INJECTED"`); (n == 1) != (c.want == Resolved) {
				t.Errorf("the audit log has it %d times as typed", n)
			}
		})
	}
}

// ptyEnded is the terminal of a program that has ended.
type ptyEnded struct {
	ptyWriter
}

func (p *ptyEnded) Close() error { return nil }

// auditText is all of the audit log.
func auditText(t *testing.T, st *Store) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(st.Dir, "audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestNextHookByArrival: of the hooks that wait, the next is the one that asked first; of two that asked in the same
// moment, the one that was recorded first.
func TestNextHookByArrival(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		name string
		asks []time.Duration // when each asks, in the order in which they are recorded
		want []int           // the order in which they come into force
	}{
		{"one after the other", []time.Duration{0, 1, 2, 3}, []int{0, 1, 2, 3}},
		{"recorded later than asked", []time.Duration{0, 3, 2, 1}, []int{0, 3, 2, 1}},
		{"in the same moment", []time.Duration{0, 0, 0, 0}, []int{0, 1, 2, 3}},
		{"two in the same moment", []time.Duration{0, 5, 1, 5}, []int{0, 2, 1, 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _, _ := hookBench(t)
			var ids []string
			for i, at := range c.asks {
				p := storePrompt(t, s.st, s.rec.ID, Created, func(p *PromptRecord) {
					p.Source, p.Tool, p.Subject = "hook", "Bash", fmt.Sprint("touch ", i)
					p.CreatedAt = now.Add(at * time.Millisecond)
				})
				ids = append(ids, p.ID)
				s.handleRecord(p)
			}
			var got []int
			for range c.asks {
				got = append(got, slices.Index(ids, s.q.rec.ID))
				s.end(s.q, Canceled, "the next")
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("in force in the order %v, want %v", got, c.want)
			}
		})
	}
}

// TestNameOfTheNextDialog: a dialog that still stands when the tool names the next one is not taken for that: the next
// one's hook waits on when it goes.
func TestNameOfTheNextDialog(t *testing.T) {
	named := func(command string) ProgramStatus {
		return ProgramStatus{State: "blocked", App: "claude-code", Kind: "permission", Msg: "approve Bash: " + command}
	}
	for _, row := range []struct {
		name   string
		before string // named while the dialog came
		mine   bool
	}{
		{"the next is named", "touch a", false},
		{"named after it was painted", "", true},
		{"named before it was painted", "touch b", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s, hooks, _ := hookBench(t, "touch b")
			if row.before != "" {
				s.handleStatus(named(row.before))
			}
			s.shows(claudeDialog("touch a"))
			s.seen = s.det.Look(TTYState{ReadingYes, false, false}, time.Now())
			s.seenAs = s.named
			s.handleStatus(named("touch b"))
			if got := s.hookOf(s.seen) == hooks[0]; got != row.mine {
				t.Errorf("taken for its dialog: %v", got)
			}
		})
	}
}
