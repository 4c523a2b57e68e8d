package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
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
		if bytes.Contains(outs[i], []byte("\x1b(0")) || bytes.Contains(outs[i], []byte("\x1b)0")) {
			all[i].text = tmuxGraphics(s.run("capture-pane", "-e", "-p", "-t", win))
		}
		fmt.Sscanf(s.run("display-message", "-p", "-t", win, "#{cursor_x} #{cursor_y} #{alternate_on}"), "%d %d %s",
			&all[i].col, &all[i].row, &all[i].alt)
	}
	return all
}

// tmuxGraphics is the one difference there is: for the line drawing set, capture-pane -p prints the letters
// that the program sent ("lqqk") where a terminal shows the lines. With -e it marks them with SO and SI.
func tmuxGraphics(text string) string {
	const lines = "◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·"
	var b strings.Builder
	graphics := false
	for _, r := range regexp.MustCompile("\x1b\\[[0-9;:]*m").ReplaceAllString(text, "") {
		switch {
		case r == 0x0e || r == 0x0f:
			graphics = r == 0x0e
		case graphics && r >= '`' && r <= '~':
			b.WriteRune([]rune(lines)[r-'`'])
		default:
			b.WriteRune(r)
		}
	}
	return strings.TrimRight(regexp.MustCompile(" +\n").ReplaceAllString(b.String(), "\n"), "\n")
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

// screenGolden: what is written to a screen of 5 rows × 10 columns, and what it then shows. "|" ends a row; "@r,c"
// is the cursor.
var screenGolden = []struct{ name, in, want string }{
	{"text", "hello\r\nworld", "hello|world @1,5"},
	{"lf keeps column", "ab\ncd", "ab|  cd @1,4"},
	{"pending wrap", "0123456789", "0123456789 @0,9"},
	{"wrap", "0123456789a", "0123456789|a @1,1"},
	{"pending wrap, cr", "0123456789\rX", "X123456789 @0,1"},
	{"no autowrap", "\x1b[?7l0123456789abc", "012345678c @0,9"},
	{"autowrap again", "\x1b[?7l0123456789abc\x1b[?7hd", "012345678d @0,9"},
	{"scroll", "1\r\n2\r\n3\r\n4\r\n5\r\n6", "2|3|4|5|6 @4,1"},
	{"cup", "\x1b[2;3Hx\x1b[Hy\x1b[;5Hz", "y   z|  x @0,5"},
	{"cup far away", "\x1b[99;99Hx", "||||         x @4,9"},
	{"huge parameter", "\x1b[99999999999999999999;1Hx", "||||x @4,1"},
	{"empty parameter is the default", "\x1b[;3Hx\x1b[3;Hy", "  x||y @2,1"},
	{"relative", "\x1b[3;3H\x1b[AA\x1b[BB\x1b[2CC\x1b[9DD", "|  A|D  B  C @2,1"},
	{"cnl cpl cha vpa", "\x1b[2;5H\x1b[Ea\x1b[2Fb\x1b[4Gc\x1b[4dd", "b  c||a|    d @3,5"},
	{"backspace", "abc\b\bX", "aXc @0,2"},
	{"ed 0", "aaa\r\nbbb\r\nccc\x1b[2;2H\x1b[J", "aaa|b @1,1"},
	{"ed 1", "aaa\r\nbbb\r\nccc\x1b[2;2H\x1b[1J", "|  b|ccc @1,1"},
	{"ed 1 on row 1", "aaa\r\nbbb\x1b[1;2H\x1b[1J", "  a|bbb @0,1"},
	{"ed 2", "aaa\r\nbbb\x1b[2J", " @1,3"},
	{"el", "abcdef\x1b[3G\x1b[K\r\nabcdef\x1b[3G\x1b[1K\r\nabcdef\x1b[2K", "ab|   def @2,6"},
	{"ech", "abcdef\x1b[2G\x1b[3X", "a   ef @0,1"},
	{"ich dch", "abcdef\x1b[2G\x1b[2@\r\nabcdef\x1b[2G\x1b[2P", "a  bcdef|adef @1,1"},
	{"dch of a half", "中0P\r\x1b[2G\x1b[P", " 0P @0,1"},
	{"dch with wide at the margin", "01234567中\r\x1b[P", "1234567中 @0,0"},
	{"ich pushes half out", "01234567中\r\x1b[@", " 01234567 @0,0"},
	{"ich pushes out", "0123456789\x1b[5G\x1b[3@", "0123   456 @0,4"},
	{"il dl", "1\r\n2\r\n3\r\n4\r\n5\x1b[2H\x1b[2L", "1|||2|3 @1,0"},
	{"dl", "1\r\n2\r\n3\r\n4\r\n5\x1b[2H\x1b[2M", "1|4|5 @1,0"},
	{"rep", "ab\x1b[3b", "abbbb @0,5"},
	{"region", "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[4H\nx", "1|3|4|x|5 @3,1"},
	{"region, ri", "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[2H\x1bMx", "1|x|2|3|5 @1,1"},
	{"region, il", "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[3H\x1b[L", "1|2||3|5 @2,0"},
	{"region, su sd", "1\r\n2\r\n3\r\n4\r\n5\x1b[2;4r\x1b[S\x1b[2T", "1|||3|5 @0,0"},
	{"below the region nothing scrolls", "\x1b[1;2r\x1b[5Ha\nb", "||||ab @4,2"},
	{"bad region", "\x1b[3;2rx", "x @0,1"},
	{"cud stops at the margin", "\x1b[2;3r\x1b[2H\x1b[9Bx", "||x @2,1"},
	{"origin", "\x1b[2;4r\x1b[?6hx\x1b[9;2Hy", "|x|| y @3,2"},
	{"ind nel ri", "a\x1bDb\x1bEc\x1bM\x1bMd", "ad| b|c @0,2"},
	{"ri at the top", "1\r\n2\x1b[H\x1bM", "|1|2 @0,0"},
	{"tabs", "a\tb\tc", "a       bc @0,9"},
	{"tabs back", "\x1b[20Gx\x1b[Zy\x1b[2Zz\x1b[Iu", "z       ux @0,9"},
	{"decsc", "ab\x1b7\x1b[4;4Hx\x1b8c", "abc|||   x @0,3"},
	{"sco", "ab\x1b[s\x1b[4;4Hx\x1b[uc", "abc|||   x @0,3"},
	{"decsc keeps the set", "\x1b(0\x1b7\x1b(B\x1b8q", "─ @0,1"},
	{"alternate", "ab\x1b[?1049hxy\x1b[?1049lc", "abc @0,3"},
	{"alternate is blank", "\x1b[?1049hxy\x1b[?1049l\x1b[?1049hz", "z @0,1"},
	{"alternate 47", "ab\x1b[?47h\x1b[3Hxy", "||xy @2,2"},
	{"insert", "abc\r\x1b[4hXY\x1b[4lZ", "XYZbc @0,3"},
	{"graphics", "\x1b(0lqk\x1b(Blqk", "┌─┐lqk @0,6"},
	{"g1", "\x1b)0\x0eqx\x0fqx", "─│qx @0,4"},
	{"ris", "abc\x1b[2;3r\x1b[?6h\x1b[4h\x1bcx", "x @0,1"},
	{"wide", "中文x", "中文x @0,5"},
	{"wide at the margin", "123456789中", "123456789|中 @1,2"},
	{"half overwritten", "中文\x1b[2Gx", " x文 @0,2"},
	{"other half overwritten", "中文\x1b[3Gx", "中x @0,3"},
	{"wide erased in the middle", "中文\x1b[2G\x1b[K", " @0,1"},
	{"combining", "e\u0301x", "e\u0301x @0,2"},
	{"combining at the margin", "012345678e\u0301", "012345678e\u0301 @0,9"},
	{"mark without a letter", "\u0301x", "x @0,1"},
	{"joiner", "👩\u200d🚀x", "👩\u200d🚀x @0,3"},
	{"selector", "❤\ufe0fx", "❤\ufe0fx @0,2"},
	{"c1 as utf-8", "a\u009bb", "ab @0,2"},
	{"c1 as a byte is a broken character", "a\x9b1mb", "a\ufffd1mb @0,5"},
	{"broken utf-8", "a\xe2\x82(b\xc0c", "a\ufffd(b\ufffdc @0,6"},
	{"broken by escape", "a\xe2\x82\x1b[1mb", "a\ufffdb @0,3"},
	{"✳ in a title holds 0x9c", "\x1b]0;✳ x\x1b\\a", "a @0,1"},
	{"osc and st", "a\x1b]0;t\x1b\\b\x1b]0;t\ac", "abc @0,3"},
	{"can and sub end strings", "a\x1b]0;t\x18b\x1bPxx\x1ac", "abc @0,3"},
	{"other strings", "a\x1bPq\x07x\x1b\\b\x1b_G\x1b\\c\x1b^p\x1b\\d\x1bXs\x1b\\e\x1bkt\x1b\\f", "abcdef @0,6"},
	{"escape ends a string", "a\x1b]0;t\x1b[3Cb", "a   b @0,5"},
	{"can ends a sequence", "a\x1b[3\x18Cb", "aCb @0,3"},
	{"control inside a sequence", "a\x1b[\n3Cb", "a|    b @1,5"},
	{"unknown is ignored", "a\x1b[?99;1;2ub\x1b[1 zc\x1b[<1Md\x1b%Ge\x1b[1<5mf", "abcdef @0,6"},
}

func screenShown(s *Screen) string {
	row, col, _ := s.Cursor()
	return fmt.Sprintf("%s @%d,%d", strings.ReplaceAll(s.Text(), "\n", "|"), row, col)
}

// Each row is fed whole, and in two parts at every cut (charm's ✳ lost its end in just that way), and byte by byte.
func TestScreenGolden(t *testing.T) {
	for _, g := range screenGolden {
		for cut := range g.in {
			s := newScreen(5, 10)
			s.Write([]byte(g.in[:cut]))
			s.Write([]byte(g.in[cut:]))
			if got := screenShown(s); got != g.want {
				t.Errorf("%s, cut at %d: %q shows %q, want %q", g.name, cut, g.in, got, g.want)
				break
			}
		}
		s := newScreen(5, 10)
		for i := range len(g.in) {
			s.Write([]byte{g.in[i]})
		}
		if got := screenShown(s); got != g.want {
			t.Errorf("%s, by bytes: %q shows %q, want %q", g.name, g.in, got, g.want)
		}
	}
}

// screenFrame is a repaint as the agents' tools send it: home, colours, jumps instead of spaces, box drawing.
func screenFrame() []byte {
	var b bytes.Buffer
	b.WriteString("\x1b[?2026h\x1b[H")
	for i := range 28 {
		fmt.Fprintf(&b, "\x1b[%d;1H\x1b[38;5;246m●\x1b[39m \x1b[1mBash\x1b[22m(go\x1b[12Gtest\x1b[17G./...)"+
			"\x1b[48;2;0;%d;0m %d passed \x1b[49m\x1b[K\r\x1b[1B\x1b[2m%s\x1b[22m", i+1, i*9, i, strings.Repeat("─", 20))
	}
	b.WriteString("\x1b[30;1H\x1b[22;2H\x1b[?2026l")
	return b.Bytes()
}

func benchmarkScreen(b *testing.B, text []byte) {
	s := newScreen(30, 100)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		s.Write(text)
	}
}

func BenchmarkScreenPlain(b *testing.B) {
	benchmarkScreen(b, bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog, line after line\r\n"), 1000))
}

func BenchmarkScreenRepaint(b *testing.B) { benchmarkScreen(b, bytes.Repeat(screenFrame(), 20)) }

func BenchmarkScreenWide(b *testing.B) {
	benchmarkScreen(b, bytes.Repeat([]byte("端末の画面を読む 👍🏽 é\r\n"), 1000))
}

func BenchmarkScreenRecordings(b *testing.B) {
	files, _ := filepath.Glob(filepath.Join(screenShared(), "recordings", "*-*.cast"))
	if len(files) == 0 {
		b.Skip("no recordings; ATLASBRIDGE_SHARED names their folder")
	}
	var all []byte
	for _, f := range files {
		_, _, out := screenRecording(b, f)
		all = append(all, out...)
	}
	benchmarkScreen(b, all)
}

func BenchmarkScreenTranscript(b *testing.B) {
	text := bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog, line after line\r\n"), 1000)
	s := newScreen(30, 100)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		s.Transcript(false)
		s.Write(text)
	}
}

func BenchmarkScreenText(b *testing.B) {
	s := newScreen(30, 100)
	s.Write(screenFrame())
	b.ReportAllocs()
	for b.Loop() {
		s.Text()
	}
}

// Any bytes: no panic, the cursor stays inside, every cut gives the same screen, the memory stays small.
func FuzzScreen(f *testing.F) {
	for _, g := range screenGolden {
		f.Add([]byte(g.in), uint16(len(g.in)/2))
	}
	f.Add(screenFrame(), uint16(77))
	f.Fuzz(func(t *testing.T, in []byte, at uint16) {
		whole, cut := newScreen(5, 10), newScreen(5, 10)
		whole.Transcript(false)
		cut.Transcript(false)
		whole.Write(in)
		n := min(int(at), len(in))
		cut.Write(in[:n])
		cut.Write(in[n:])
		if a, b := screenShown(whole), screenShown(cut); a != b || whole.Title() != cut.Title() ||
			whole.Status() != cut.Status() || whole.Scrolled() != cut.Scrolled() {
			t.Errorf("%q cut at %d: %q, whole %q", in, n, b, a)
		}
		if a, b := whole.TakeReplies(true), cut.TakeReplies(true); !bytes.Equal(a, b) || len(a) > 2*maxReplies {
			t.Errorf("%q cut at %d: replies %q, whole %q", in, n, b, a)
		}
		row, col, _ := whole.Cursor()
		if row < 0 || row >= 5 || col < 0 || col >= 10 {
			t.Errorf("%q: cursor at %d,%d", in, row, col)
		}
		for r := range 5 {
			sameLine(t, whole, r, in)
		}
		whole.Resize(3, 4)
		cut.Resize(9, 30)
		whole.Write(in)
		cut.Write(in)
		whole.Transcript(true)
		if row, col, _ = whole.Cursor(); row >= 3 || col >= 4 {
			t.Errorf("%q: cursor at %d,%d after a resize", in, row, col)
		}
	})
}

// sameLine: wide characters are whole, and marks have an end.
func sameLine(t *testing.T, s *Screen, r int, in []byte) {
	cells := s.grid[r].cells
	for c, x := range cells {
		wide := x.flags&flagTail == 0 && x.ch >= 0x1100 && runeWidth(x.ch) == 2
		if tail := c+1 < len(cells) && cells[c+1].flags&flagTail != 0; wide != tail {
			t.Errorf("%q: half a character in row %d column %d", in, r, c)
		}
		if len(x.marks) > maxMarks {
			t.Errorf("%q: a character with %d bytes of marks", in, len(x.marks))
		}
	}
}

// A long stream of random bytes, and strings that never end, stay within the limits; then text shows again.
func TestScreenHostile(t *testing.T) {
	s := newScreen(30, 100)
	s.Transcript(false)
	rng := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 64<<10)
	for range 128 {
		for i := range buf {
			buf[i] = byte(rng.Uint32())
		}
		s.Write(buf)
	}
	endless := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	for _, start := range []string{"\x1b]0;", "\x1b]7501;", "\x1bP", "\x1b_G", "\x1bk", "\x1b[", "\x1b[1;", "\x1b[;:", "\x1b("} {
		s.Write([]byte(start))
		s.Write(endless)
	}
	for range 100000 {
		s.Write([]byte("\x1b[6n\x1b[c\x1b]11;?\a\x1b[22t\x1b]7501;?\a\x1b[99999b"))
	}
	s.Write(bytes.Repeat([]byte("\x1b[1;1He\u0301\u0302\u0303\u0304\u0305\u0306\u0307\u0308\u0309\u030a\u030b\u030c\u030d\u030e"), 1000))
	if len(s.seq) > maxString || len(s.replies) > 2*maxReplies || s.tr.bytes > maxPending {
		t.Error("a limit is passed")
	}
	s.Write([]byte("\x1bcback\r\n"))
	if got := s.Row(0); got != "back" {
		t.Errorf("after all that row 0 is %q", got)
	}
}

func TestScreenReplies(t *testing.T) {
	for _, q := range []struct{ in, all, own string }{
		{"\x1b[5n", "\x1b[0n", ""},
		{"ab\r\nc\x1b[6n", "\x1b[2;2R", ""},

		{"\x1b[2;4r\x1b[?6h\x1b[2;3H\x1b[6n", "\x1b[2;3R", ""},
		{"\x1b[c", "\x1b[?62;22c", ""},
		{"\x1b[>c", "\x1b[>0;10;1c", ""},

		{"\x1b[>0q", "\x1bP>|atlasbridge\x1b\\", ""},
		{"\x1b[?u", "\x1b[?0u", ""},
		{"\x1b]10;?\x1b\\", "\x1b]10;rgb:cdcd/cdcd/cdcd\x1b\\", ""},
		{"\x1b]11;?\a", "\x1b]11;rgb:0000/0000/0000\a", ""},
		{"\x1b]4;1;?\a", "\x1b]4;1;rgb:cdcd/cdcd/cdcd\a", ""},
		{"\x1b]11;#ffffff\a\x1b]4;1;red\a\x1b]52;c;?\a", "", ""},
		{"\x1b[?2026$p\x1b[?1016$p", "\x1b[?2026;0$y\x1b[?1016;0$y", ""},
		{"\x1b[14t", "\x1b[4;480;800t", ""},
		{"\x1bP+q544e\x1b\\\x1bP$qm\x1b\\", "\x1bP0+r\x1b\\\x1bP0$r\x1b\\", ""},
		{"\x1b]7501;?\a\x1b[c", "\x1b]7501;?\x1b\\\x1b[?62;22c", "\x1b]7501;?\x1b\\"},
		{"plain", "", ""},
	} {
		for cut := range q.in {
			for _, all := range []bool{true, false} {
				s := newScreen(30, 100)
				s.Write([]byte(q.in[:cut]))
				s.Write([]byte(q.in[cut:]))
				want := q.own
				if all {
					want = q.all
				}
				if got := s.TakeReplies(all); string(got) != want {
					t.Errorf("TakeReplies(%v) after %q, cut at %d = %q, want %q", all, q.in, cut, got, want)
				}
				if got := s.TakeReplies(true); len(got) > 0 {
					t.Errorf("%q is answered twice: %q", q.in, got)
				}
			}
		}
	}
}

func TestScreenAttributes(t *testing.T) {
	plain := Attr{FG: -1, BG: -1}
	with := func(f func(*Attr)) Attr { a := plain; f(&a); return a }
	for in, want := range map[string]Attr{
		"":                            plain,
		"\x1b[1;4;7;2m":               {Bold: true, Dim: true, Reverse: true, Underline: true, FG: -1, BG: -1},
		"\x1b[1;2;4;7m\x1b[22;24;27m": plain,
		"\x1b[1;31m\x1b[m":            plain,
		"\x1b[31;47m":                 with(func(a *Attr) { a.FG, a.BG = 1, 7 }),
		"\x1b[91;107m":                with(func(a *Attr) { a.FG, a.BG = 9, 15 }),
		"\x1b[31;42m\x1b[39;49m":      plain,
		"\x1b[38;5;246;1m":            with(func(a *Attr) { a.FG, a.Bold = 246, true }),
		"\x1b[38:5:246;1m":            with(func(a *Attr) { a.FG, a.Bold = 246, true }),
		"\x1b[48;2;1;2;3;4m":          with(func(a *Attr) { a.BG, a.Underline = 1<<24|0x010203, true }),
		"\x1b[48:2:1:2:3;4m":          with(func(a *Attr) { a.BG, a.Underline = 1<<24|0x010203, true }),
		"\x1b[48:2::1:2:3;4m":         with(func(a *Attr) { a.BG, a.Underline = 1<<24|0x010203, true }),
		"\x1b[58;5;1;1m":              with(func(a *Attr) { a.Bold = true }),
		"\x1b[58:2::1:2:3;1m":         with(func(a *Attr) { a.Bold = true }),
		"\x1b[4:3m":                   with(func(a *Attr) { a.Underline = true }),
		"\x1b[4m\x1b[4:0m":            plain,
		"\x1b[38;5m":                  plain,
		"\x1b[38;2;1m":                plain,
		"\x1b[>4;1m\x1b[?4m":          plain,
		"\x1b[8;28;29;38;48m":         plain,
		"\x1b[18;2;1;2;3;98;108;999m": {Dim: true, Bold: true, FG: -1, BG: -1},
	} {
		s := newScreen(2, 10)
		s.Write([]byte(in + "x"))
		if r, a := s.Cell(0, 0); r != 'x' || a != want {
			t.Errorf("Cell after %q = %q %+v, want %+v", in, r, a, want)
		}
	}
	s := newScreen(2, 10)
	s.Write([]byte("中e\u0301\x1b[44m\x1b[K"))
	for c, want := range []rune{'中', 0, 'e', ' '} {
		if r, _ := s.Cell(0, c); r != want {
			t.Errorf("Cell(0, %d) = %q, want %q", c, r, want)
		}
	}
	if _, a := s.Cell(0, 9); a.BG != 4 {
		t.Errorf("erased with background %d, want 4", a.BG)
	}
	if _, a := s.Cell(7, 9); a != plain {
		t.Errorf("outside of the screen: %+v", a)
	}
}

func TestScreenReports(t *testing.T) {
	for _, c := range []struct {
		in   string
		want ProgramStatus
	}{
		{"\x1b]7501;state=idle:app=claude-code\x1b\\", ProgramStatus{State: "idle", App: "claude-code", Seq: 1}},
		{"\x1b]7501;state=working:app=codex\a\x1b]7501;state=working:app=codex\a", ProgramStatus{State: "working", App: "codex", Seq: 2}},
		{"\x1b]7501;state=blocked:app=claude-code:kind=permission:msg=YXBwcm92ZSBCYXNoOiBscw==\x1b\\",
			ProgramStatus{State: "blocked", App: "claude-code", Kind: "permission", Msg: "approve Bash: ls", Seq: 1}},
		{"\x1b]7501;state=blocked:msg=YXBwcm92ZSBCYXNoOiBscw\a", ProgramStatus{State: "blocked", Msg: "approve Bash: ls", Seq: 1}},
		{"\x1b]7501;state=blocked:msg=***\a", ProgramStatus{State: "blocked", Seq: 1}},
		{"\x1b]7501;?\a\x1b]7501;\a\x1b]7501\a", ProgramStatus{}},
		{"\x1b]9;n\a\x1b]7501;state=done\a", ProgramStatus{State: "done", Seq: 1}},
	} {
		for cut := range c.in {
			s := newScreen(5, 40)
			s.Write([]byte(c.in[:cut]))
			s.Write([]byte(c.in[cut:]))
			if got := s.Status(); got != c.want {
				t.Errorf("Status after %q, cut at %d = %+v, want %+v", c.in, cut, got, c.want)
			}
			if s.Text() != "" {
				t.Errorf("%q shows %q", c.in, s.Text())
			}
		}
	}
	s := newScreen(5, 40)
	s.Write([]byte("\x1b]2;other\x1b\\\x1b]0;✳ Claude Code\a\x1b[?2004h\x1b[?1h\x1b[?25l\x1b[?1049h"))
	if _, _, hidden := s.Cursor(); s.Title() != "✳ Claude Code" || !s.BracketedPaste() || !s.AppCursorKeys() || !hidden || !s.AltScreen() {
		t.Errorf("title %q, paste %v, keys %v, hidden %v, alternate %v", s.Title(), s.BracketedPaste(), s.AppCursorKeys(), hidden, s.AltScreen())
	}
}

func TestScreenResize(t *testing.T) {
	for _, c := range []struct {
		in         string
		rows, cols int
		want       string
		scrolled   int
	}{
		{"a\r\nb\r\nc", 3, 10, "a|b|c @2,1", 0},
		{"a\r\nb\r\nc\r\nd\r\ne", 3, 10, "c|d|e @2,1", 2},
		{"a\r\nb\r\nc\r\nd\r\ne\x1b[2;1H", 3, 10, "a|b|c @1,0", 0},
		{"0123456789", 5, 4, "0123 @0,3", 0},
		{"123中", 5, 4, "123 @0,3", 0},
		{"ab", 9, 20, "ab @0,2", 0},
		{"ab", 0, 0, "a @0,0", 0},
		{"\x1b[2;3r\x1b[5Ha\x1b[?1049hb", 3, 5, "|| b @2,2", 2},
		{"1\r\n2\r\n3\r\n4\r\n5\x1b[?1049h\x1b[Hx", 3, 10, "x @0,1", 2},
		{"1\r\n2\r\n3\r\n4\r\n5\x1b[?1049h\x1b[Hx\x1b[?1049l", 3, 10, "3|4|5 @2,1", 2},
	} {
		s := newScreen(5, 10)
		s.Write([]byte(c.in))
		s.Resize(c.rows, c.cols)
		if got := screenShown(s); got != c.want || s.Scrolled() != c.scrolled {
			t.Errorf("%q resized to %d×%d: %q, %d scrolled; want %q, %d", c.in, c.rows, c.cols, got, s.Scrolled(), c.want, c.scrolled)
		}
	}
	s := newScreen(5, 10)
	s.Resize(5, 30)
	s.Write([]byte("a\t\t\tb"))
	if got := s.Row(0); got != "a                       b" {
		t.Errorf("tabs in the new columns: %q", got)
	}
}

// A plain program's lines arrive complete, in order and once, however the calls fall between them.
func TestTranscriptPlain(t *testing.T) {
	var want, got []string
	s := newScreen(24, 40)
	s.Transcript(false)
	for i := range 10000 {
		line := fmt.Sprintf("line %d %s.", i, strings.Repeat("x", i%100))
		want = append(want, line)
		s.Write([]byte(line + "\r\n"))
		if i%7 == 0 || i%1000 < 20 {
			final, _ := s.Transcript(false)
			got = append(got, final...)
		}
	}
	final, live := s.Transcript(true)
	if got = append(got, final...); !slices.Equal(got, want) || live != "" {
		t.Errorf("%d lines, want %d; live %q", len(got), len(want), live)
		for i := range min(len(got), len(want)) {
			if got[i] != want[i] {
				t.Fatalf("line %d is %q, want %q", i, got[i], want[i])
			}
		}
	}
}

func TestTranscript(t *testing.T) {
	type step struct {
		in     string
		settle bool
		final  string
		live   string
	}
	for name, steps := range map[string][]step{
		"live part": {{"a\r\nb", false, "a", "b"}, {"c\r\n", false, "bc", ""}, {"", false, "", ""}},
		"progress bar": {{"start\r\n10%", false, "start", "10%"}, {"\r50%", false, "", "50%"},
			{"\r100%\r\ndone\r\n", false, "100%|done", ""}},
		"wrapped, repainted": {{"012345678\r\nxyz\r\n", false, "012345678|xyz", ""},
			{"\x1b[H0123456789abc\r\n", true, "0123456789abc", ""}},
		"wrapped":               {{"0123456789abcdef", false, "", "0123456789abcdef"}, {"g\r\nx", false, "0123456789abcdefg", "x"}},
		"wrapped, scrolled":     {{strings.Repeat("0123456789", 7), false, "", strings.Repeat("0123456789", 7)}, {"\r\n", false, strings.Repeat("0123456789", 7), ""}},
		"spaces at the wrap":    {{"012345678 9\r\n", false, "012345678 9", ""}},
		"typing at a prompt":    {{"$ ", false, "", "$"}, {"ls\b\b", false, "", "$ ls"}, {"\r\nf\r\n$ ", false, "$ ls|f", "$"}},
		"blank lines stay":      {{"a\r\n\r\nb\r\n", false, "a||b", ""}},
		"same line twice":       {{"ok\r\nok\r\n", false, "ok|ok", ""}, {"ok\r\n", false, "ok", ""}},
		"before the first call": {{"", false, "", ""}},
		"repaint above": {{"one\r\n1 busy\r\n", false, "one|1 busy", ""},
			{"\x1b[A\x1b[2K2 busy\r\n", false, "", "2 busy"}, {"\x1b[A\x1b[2Kanswer\r\n", false, "", "answer"},
			{"", true, "answer", ""}, {"two\r\n", false, "two", ""}},
		"repaint scrolls out": {{"1 busy\r\n", false, "1 busy", ""}, {"\x1b[A\x1b[2Ktext\r\nb\r\nc\r\nd\r\ne\r\nf\r\n", false, "text|b|c|d|e|f", ""},
			{"g\r\nh\r\ni\r\nj\r\nk\r\nl\r\n", true, "g|h|i|j|k|l", ""}},
		"clear":                    {{"a\r\nb\r\n", false, "a|b", ""}, {"c\r\n\x1b[H\x1b[2J", false, "c", ""}, {"d\r\n", false, "", "d"}, {"", true, "d", ""}},
		"clear and the same again": {{"a\r\nb\r\n", false, "a|b", ""}, {"\x1b[2J\x1b[Ha\r\nb\r\nnew\r\n", true, "new", ""}},
		"alternate": {{"$ tool\r\n\x1b[?1049h\x1b[Hhead\r\n────\r\nq1\r\n", false, "$ tool", ""}, {"", true, "head|q1", ""},
			{"\x1b[4Hanswer", false, "", ""}, {"", true, "answer", ""}, {"", true, "", ""},
			{"\x1b[2J\x1b[Hhead\r\n────\r\nanswer\r\nq1\r\nlast", true, "last", ""},
			{"\x1b[?1049l$ ", false, "", "$"}},
		"alternate scrolls": {{"\x1b[?1049ha\r\nb\r\nc\r\nd\r\ne", true, "a|b|c|d|e", ""}, {"\r\nf\r\ng", true, "f|g", ""}},
	} {
		s := newScreen(5, 10)
		s.Transcript(false)
		for i, st := range steps {
			s.Write([]byte(st.in))
			final, live := s.Transcript(st.settle)
			if got := strings.Join(final, "|"); got != st.final || live != st.live {
				t.Errorf("%s, step %d: %q live %q, want %q live %q", name, i, got, live, st.final, st.live)
			}
		}
	}
}

// When nobody takes them, the oldest lines are left out, and that is said.
func TestTranscriptBounded(t *testing.T) {
	s := newScreen(24, 80)
	s.Write(bytes.Repeat([]byte("unasked\r\n"), 100000))
	if len(s.tr.pending) > 0 {
		t.Error("lines are kept before anybody asked")
	}
	s.Transcript(false)
	for i := range 100000 {
		fmt.Fprintf(s, "line %d\r\n", i)
	}
	final, _ := s.Transcript(false)
	n := 100000 + 1 - len(final)
	if want := fmt.Sprintf("[… %d lines left out …]", n); final[0] != want || len(final) > maxPending/lineCost {
		t.Errorf("%d lines begin with %q, want %q", len(final), final[0], want)
	}
	if want := fmt.Sprintf("line %d", n); final[1] != want || final[len(final)-1] != "line 99999" {
		t.Errorf("the lines go from %q to %q", final[1], final[len(final)-1])
	}
	s.Write(bytes.Repeat([]byte("no end "), 1<<20))
	if s.tr.bytes > maxPending || len(s.tr.part) > maxLine+80 {
		t.Errorf("an endless line keeps %d and %d bytes", s.tr.bytes, len(s.tr.part))
	}
}
