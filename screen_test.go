package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// screenRecording is an asciicast v2 file: the size, and the output up to the first resize.
func screenRecording(t testing.TB, file string) (rows, cols int, out []byte) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	in := bufio.NewReader(f)
	for first := true; ; first = false {
		text, err := in.ReadBytes('\n')
		if len(text) == 0 && err != nil {
			return rows, cols, out
		}
		if first {
			var h struct{ Width, Height int }
			if err := json.Unmarshal(text, &h); err != nil {
				t.Fatal(err)
			}
			rows, cols = h.Height, h.Width
			continue
		}
		var e []any
		if json.Unmarshal(text, &e) != nil || len(e) < 3 {
			continue
		}
		if e[1] == "r" {
			return rows, cols, out
		}
		if e[1] == "o" {
			out = append(out, e[2].(string)...)
		}
	}
}

func screenShared() string {
	if dir := os.Getenv("ATLASBRIDGE_SHARED"); dir != "" {
		return dir
	}
	return "../shared"
}

// tmuxShows runs output through a tmux pane and returns what it then shows, with the cursor.
type tmuxServer struct {
	t    *testing.T
	dir  string
	sock string
}

func (s tmuxServer) run(args ...string) string {
	s.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-u", "-S", s.sock, "-f", "/dev/null"}, args...)...)
	cmd.Env = append(os.Environ(), "TMUX=", "LC_ALL=C.UTF-8")
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("tmux %q: %v: %s", args, err, out)
	}
	return string(out)
}

type tmuxShot struct {
	text     string
	col, row int
	alt      string
}

// shots shows every output in a window of its own, all at once.
func (s tmuxServer) shots(rows, cols int, outs [][]byte) []tmuxShot {
	s.t.Helper()
	s.run("set", "-g", "default-size", fmt.Sprintf("%dx%d", cols, rows), ";",
		"new-session", "-d", "-s", "x", "exec sleep 600")
	defer s.run("kill-session", "-t", "x")
	for i, out := range outs {
		name := filepath.Join(s.dir, fmt.Sprint(i))
		if err := os.WriteFile(name, append(out, "\x1b\\\x1b]2;all done\a"...), 0o600); err != nil {
			s.t.Fatal(err)
		}
		s.run("new-window", "-d", "-t", fmt.Sprintf("x:%d", i+1), "stty raw -echo; cat "+name+"; exec sleep 600")
	}
	deadline := time.Now().Add(30 * time.Second)
	for strings.Count(s.run("list-windows", "-t", "x", "-F", "#{pane_title}"), "all done") < len(outs) {
		if time.Now().After(deadline) {
			s.t.Fatal("tmux does not get through the recordings")
		}
	}
	all := make([]tmuxShot, len(outs))
	for i := range outs {
		win := fmt.Sprintf("x:%d", i+1)
		all[i].text = strings.TrimRight(s.run("capture-pane", "-p", "-t", win), "\n")
		fmt.Sscanf(s.run("display-message", "-p", "-t", win, "#{cursor_x} #{cursor_y} #{alternate_on}"), "%d %d %s",
			&all[i].col, &all[i].row, &all[i].alt)
	}
	return all
}

// TestScreenAgainstTmux compares the text of the screen with tmux's, at the end of recordings and on the way.
func TestScreenAgainstTmux(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skip("tmux is not here")
	}
	files, _ := filepath.Glob(filepath.Join(screenShared(), "recordings", "*.cast"))
	if len(files) == 0 {
		t.Skip("no recordings; ATLASBRIDGE_SHARED names their folder")
	}
	step, parts := 20, 2
	if os.Getenv("ATLASBRIDGE_TMUX_ALL") != "" {
		step, parts = 1, 4
	}
	type shot struct {
		name       string
		rows, cols int
		out        []byte
	}
	bySize := map[[2]int][]shot{}
	for i := 0; i < len(files); i += step {
		rows, cols, out := screenRecording(t, files[i])
		for k := 1; k <= parts; k++ {
			cut := len(out) * k / parts
			if k < parts { // never inside a sequence: tmux waits for its end
				cut = bytes.LastIndexByte(out[:cut], 0x1b)
				if cut < 0 {
					continue
				}
			}
			bySize[[2]int{rows, cols}] = append(bySize[[2]int{rows, cols}],
				shot{fmt.Sprintf("%s %d/%d", filepath.Base(files[i]), k, parts), rows, cols, out[:cut:cut]})
		}
	}
	server := tmuxServer{t, t.TempDir(), filepath.Join(t.TempDir(), "tmux")}
	server.run("new-session", "-d", "exec sleep 600", ";", "set", "-g", "status", "off")
	defer server.run("kill-server")
	compared, differ := 0, 0
	for size, shots := range bySize {
		for len(shots) > 0 {
			n := min(len(shots), 24)
			outs := make([][]byte, n)
			for i := range outs {
				outs[i] = shots[i].out
			}
			for i, want := range server.shots(size[0], size[1], outs) {
				s := newScreen(size[0], size[1])
				s.Write(shots[i].out)
				compared++
				if got := s.Text(); got != want.text {
					differ++
					t.Errorf("%s:\n%s", shots[i].name, screenDiff(got, want.text))
				}
				row, col, _ := s.Cursor()
				if s.wrapNext {
					col++
				}
				if row != want.row || col != want.col || s.AltScreen() != (want.alt == "1") {
					t.Errorf("%s: cursor %d,%d alt %v, tmux has %d,%d alt %s", shots[i].name, row, col, s.AltScreen(),
						want.row, want.col, want.alt)
				}
			}
			shots = shots[n:]
		}
	}
	t.Logf("%d screens compared, %d differ", compared, differ)
}

func screenDiff(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	var b strings.Builder
	for i := range max(len(g), len(w)) {
		var x, y string
		if i < len(g) {
			x = g[i]
		}
		if i < len(w) {
			y = w[i]
		}
		if x != y {
			fmt.Fprintf(&b, "  row %d: %q\n    tmux: %q\n", i, x, y)
		}
	}
	return b.String()
}

func BenchmarkScreenPlain(b *testing.B) {
	text := bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog, line after line\r\n"), 1000)
	s := newScreen(30, 100)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		s.Write(text)
	}
}
