package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	readUntil(t, p, "[a][one]")
	begin := make([]byte, 16<<10)
	for i := range begin { // so slowly that the terminal is full
		if _, err := p.Read(begin[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	rest, code := readAll(t, p)
	all := string(begin) + rest
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
