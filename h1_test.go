package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What stands behind "--" is an argument, also where it begins with a dash.
func TestDashesEndTheFlags(t *testing.T) {
	for _, test := range []struct {
		args string
		want string // arguments
		json bool
	}{
		{"lab -- -x -y", "-x -y", false},
		{"lab -- --json", "--json", false},
		{"lab --json -- -x --json", "-x --json", true},
		{"lab a.cast -- -x --json b.cast", "a.cast -x --json b.cast", false},
		{"lab a.cast --json b.cast -- -x -- -y", "a.cast b.cast -x -- -y", true},
		{"lab a.cast --", "a.cast", false},
		{"lab --", "", false},
		{"run -- -x --quiet", "-x --quiet", false},
		{"answer 12345678 -x", "12345678 -x", false},
	} {
		t.Run(test.args, func(t *testing.T) {
			words := strings.Fields(test.args)
			null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer null.Close()
			c := &command{name: words[0], args: words[1:], stdout: null, stderr: null}
			o, code := c.options()
			if o == nil {
				t.Fatalf("exit %d", code)
			}
			if got := strings.Join(o.args, " "); got != test.want {
				t.Errorf("arguments %q, want %q", got, test.want)
			}
			if o.set.Lookup("json") != nil && o.on("json") != test.json {
				t.Errorf("--json is %v", !test.json)
			}
		})
	}
}

// brokenWriter takes some bytes and fails from then on.
type brokenWriter struct{ room int }

var errBroken = errors.New("no space left")

func (w *brokenWriter) Write(p []byte) (int, error) {
	n := min(len(p), w.room)
	w.room -= n
	if n < len(p) {
		return n, errBroken
	}
	return n, nil
}

// Whatever write of a recording fails, its end tells it.
func TestRecordingTellsItsFirstError(t *testing.T) {
	for _, room := range []int{0, 10, 5000, 40000} {
		t.Run(fmt.Sprint(room), func(t *testing.T) {
			now := time.Unix(0, 0)
			c := newCast(&brokenWriter{room}, castHeader{Title: "demo"}, now)
			for range 10 {
				c.output(bytes.Repeat([]byte("x"), 5000), now)
				c.event("i", "y", now)
				c.tty(TTYState{Reading: ReadingBusy}, now)
			}
			if err := c.close(now); !errors.Is(err, errBroken) {
				t.Errorf("it ends with %v", err)
			}
		})
	}
}

// A session without a recording records nothing; one whose file cannot be written says so at its end.
func TestSessionTellsOfItsRecording(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.cast")
	s := &session{}
	s.record(func(*castWriter) { t.Error("it records") })
	if err := s.endRecording(time.Now()); err != nil {
		t.Error(err)
	}
	if _, err := startRecording(filepath.Join(path, "x"), "demo", Size{}, time.Now()); err == nil ||
		!strings.HasPrefix(err.Error(), "creating the recording: ") {
		t.Error(err)
	}
	for _, closed := range []bool{false, true} {
		r, err := startRecording(path, "demo", Size{Rows: 5, Cols: 40}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if closed {
			r.file.Close()
		}
		s.cast = r
		s.record(func(c *castWriter) { c.event("i", "y", time.Now()) })
		if err := s.endRecording(time.Now()); errors.Is(err, os.ErrClosed) != closed {
			t.Errorf("with the file closed %v: %v", closed, err)
		}
	}
}

// A scenario that cannot be captured is told in the log, and nothing else comes of it.
func TestCaptureTellsWhatFails(t *testing.T) {
	t.Setenv("ATLASBRIDGE_CAPTURE_PROMPTS", "1")
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		dir   string
		fails bool
	}{
		{dir, false},
		{file, true},
	} {
		var log bytes.Buffer
		s := &session{
			cfg: &Config{Dir: test.dir, Stuck: time.Second},
			log: slog.New(slog.NewTextHandler(&log, nil)),
			det: newDetector(adapterFor("x"), 5, 40, DetectOptions{}),
			pty: ptyState{},
			rec: SessionRecord{Tool: "x"},
		}
		s.det.Feed([]byte("Go? (y/n) "), time.Now())
		s.capture(&Prompt{Type: YesNo})
		captured, err := filepath.Glob(filepath.Join(test.dir, "captured_scenarios", "x-yes_no-*.cast"))
		if err != nil {
			t.Fatal(err)
		}
		if (log.Len() > 0) != test.fails || (len(captured) == 0) != test.fails {
			t.Errorf("%s: captured %q, log %q", test.dir, captured, log.String())
		}
	}
}

// The words of the terminal's state say the same when they are read again.
func TestTTYWords(t *testing.T) {
	for _, reading := range []Reading{ReadingUnknown, ReadingYes, ReadingBusy} {
		for _, bit := range []bool{false, true} {
			for _, echo := range []bool{false, true} {
				state := TTYState{reading, bit, echo}
				if got := parseTTY(state.words()); got != state {
					t.Errorf("%q reads as %+v", state.words(), got)
				}
			}
		}
	}
}

// Of several expectations that fail it is always the same one that the lab tells.
func TestScenarioTellsTheSame(t *testing.T) {
	s := scenario{"expected_type": "TYPE_YES_NO", "expected_secret": true, "expected_excerpt": "x"}
	for range 50 {
		err := s.check(nil)
		if err == nil || !strings.HasPrefix(err.Error(), "expected_excerpt: ") {
			t.Fatal(err)
		}
	}
}

// A character is repeated as it was written, also when the row it stood in has left meanwhile; a
// code of SGR that means nothing changes nothing.
func TestScreenOfOddSequences(t *testing.T) {
	s := newScreen(3, 4)
	s.Write([]byte("\x1b[?1049h\x1b[3;1Hab\x1b[30b"))
	if got := s.Text(); got != "bbbb\nbbbb\nbb" { // of rows × columns at most
		t.Errorf("it shows %q", got)
	}
	s = newScreen(3, 4)
	s.Write([]byte("\x1b[98;5;1ma\x1b[108;7mb"))
	if got := s.attr(0, 0); got != (Attr{FG: -1, BG: -1}) {
		t.Errorf("after 98;5;1 it draws with %+v", got)
	}
	if got := s.attr(0, 1); got != (Attr{FG: -1, BG: -1, Reverse: true}) {
		t.Errorf("after 108;7 it draws with %+v", got)
	}
}
