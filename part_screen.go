package main

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Screen is what the terminal shows: a parser over a grid of cells, fed with the child's bytes cut anywhere.
// Pure: no I/O, no clock. One goroutine uses it. Whatever comes in, its memory stays within fixed limits.
//
// The parser is that of https://vt100.net/emu/dec_ansi_parser, simplified as today's terminals are: text is UTF-8;
// there are no 8-bit C1 controls (0x9C is part of ✳, not ST); an OSC also ends on BEL; any ESC ends a string and begins
// a sequence; ESC k begins a string. What sequences do is in https://invisible-island.net/xterm/ctlseqs/ctlseqs.html;
// the text is what tmux shows. No scrollback, no reflow, no graphics; tab stops are 8 columns apart.
type Screen struct {
	rows, cols      int
	state           byte       // 0 text, 0x1b behind an ESC, '[' in a control sequence, or what began a string: ] P X ^ _ k
	seq, part       []byte     // the string or sequence so far; the beginning of a character whose end is not here yet
	params          []param    // of the last control sequence
	cursor                     // the one in use
	saved, savedAlt cursor     // by DECSC; by mode 1049
	grid, other     []*line    // the screen in use; the other one of primary and alternate
	alt, insert     bool       // the alternate screen; IRM
	dec             [2006]bool // modes of DECSET by number, the last is any other
	top, bottom     int        // scroll region, inclusive
	scrolled        int        // rows that left the primary screen at the top, so that scrolled+row names a row for good
	base            *cell      // the character just written, for marks and REP
	title           string
	status          ProgramStatus
	replies         []byte // what a terminal would have answered
	tr              transcript
}

// param is a parameter of a control sequence, −1 when empty; colon is 1 when it is a part of the one before.
type param struct{ n, colon int }

// cursor is where and how the next character is written: what DECSC saves.
type cursor struct {
	row, col int
	wrapNext bool // it stands behind the last column
	pen      cell
	charset  [2]byte // what G0 and G1 are: '0' is line drawing
	shift    int     // which of them is in use
}

// Attr is how the cell is drawn: enough to tell a highlighted choice from the others.
type Attr struct {
	Bold, Dim, Reverse, Underline bool
	FG, BG                        int32 // −1 default, 0–255 palette, else 1<<24|rgb
}

// ProgramStatus is what a program last reported with OSC 7501 (measured). Seq rises with every report, repeats too.
type ProgramStatus struct {
	State, App, Kind string // idle, working, blocked, done, clear or ""; the program; permission, question
	Msg              string // decoded from base64
	Seq              int
}

// cell is one place of the grid; its zero value is a blank in the default colours.
type cell struct {
	ch     rune   // 0 blank
	marks  string // what combines with it
	fg, bg int32  // 0 default, else 1 + that of Attr
	flags  uint8
}

// The flags of a cell; a wide character is a flagWide and, to its right, a flagTail.
const flagBold, flagDim, flagReverse, flagUnderline, flagWide, flagTail uint8 = 1, 2, 4, 8, 16, 32

type line struct {
	cells       []cell
	wrapped     bool // the text goes on in the next row
	told, again bool // of the transcript: it is told; it was, before it was written anew
}

// The limits of what output can make us keep. Real strings have up to 1 KiB (measured).
const (
	maxSize     = 2000                // rows and columns
	maxParam    = 65535               // value of one
	maxString   = 16384               // bytes of a string or sequence; of a longer one the rest is ignored
	statusReply = "\x1b]7501;?\x1b\\" // we understand OSC 7501
	maxReplies  = 4096                // bytes waiting for TakeReplies; what comes after is not answered
	maxPending  = 4 << 20             // bytes of lines kept for the next Transcript, each with lineCost
	lineCost    = 64
	maxLine     = 1 << 14 // bytes of one line; a longer one is told in pieces
	maxRecent   = 1000    // lines compared: some screens
	maxMarks    = 28      // bytes of what combines with one character (tmux: 32 with the character)
)

func newScreen(rows, cols int) *Screen {
	s := &Screen{}
	s.Resize(rows, cols)
	s.reset(0)
	return s
}

// Resize changes the size without reflow: rows are added at the bottom; they are taken from below the cursor, then
// from the top, which scrolls out.
func (s *Screen) Resize(rows, cols int) {
	rows, cols = min(max(rows, 1), maxSize), min(max(cols, 1), maxSize)
	cursors, grids := []*cursor{&s.cursor, &s.savedAlt}, []*[]*line{&s.grid, &s.other}
	for i, c := range cursors {
		grid := *grids[i]
		for ; c.row >= rows; c.row-- {
			if s.alt == (i == 1) { // it is the primary screen
				s.tell(grid[0])
				s.scrolled++
			}
			grid = grid[1:]
		}
		for len(grid) < rows {
			grid = append(grid, &line{})
		}
		for _, l := range grid[:rows] {
			n := min(len(l.cells), cols)
			l.cells, l.wrapped = append(l.cells[:n], make([]cell, cols-n)...), l.wrapped && cols == s.cols
			l.mend(cols)
		}
		*grids[i] = grid[:rows]
	}
	for _, c := range append(cursors, &s.saved) {
		c.row, c.col, c.wrapNext = min(c.row, rows-1), min(c.col, cols-1), c.wrapNext && cols == s.cols
	}
	s.rows, s.cols, s.top, s.bottom = rows, cols, 0, rows-1
}

// reset is RIS: everything as at the start, but what was counted or reported so far.
func (s *Screen) reset(int) {
	s.useAlternate(false)
	s.cursor, s.saved, s.top, s.bottom = cursor{}, cursor{}, 0, s.rows-1
	s.insert, s.dec = false, [2006]bool{7: true, 25: true}
	s.erase(0, 0, s.rows-1, s.cols)
}

// Row is the text of row r from 0, trailing blanks removed, as tmux capture-pane -p prints it.
func (s *Screen) Row(r int) string {
	if r < 0 || r >= s.rows {
		return ""
	}
	return strings.TrimRight(string(s.grid[r].text(nil)), " ")
}

// text appends what the row shows to b, up to the last character written; that may be a space.
func (l *line) text(b []byte) []byte {
	end := len(l.cells)
	for ; end > 0 && l.cells[end-1].ch == 0; end-- {
	}
	for _, c := range l.cells[:end] {
		if c.flags&flagTail == 0 {
			b = append(utf8.AppendRune(b, max(c.ch, ' ')), c.marks...)
		}
	}
	return b
}

// Cell is the rune at (r, c), without its marks, and its attributes; 0 is the right half of a wide one.
func (s *Screen) Cell(r, c int) (rune, Attr) {
	if r < 0 || r >= s.rows || c < 0 || c >= s.cols {
		return 0, Attr{FG: -1, BG: -1}
	}
	x := s.grid[r].cells[c]
	on := func(f uint8) bool { return x.flags&f != 0 }
	a := Attr{on(flagBold), on(flagDim), on(flagReverse), on(flagUnderline), x.fg - 1, x.bg - 1}
	if on(flagTail) {
		return 0, a
	}
	return max(x.ch, ' '), a
}

// Text is all rows joined with "\n", trailing empty rows removed.
func (s *Screen) Text() string {
	var all strings.Builder
	for r := range s.rows {
		all.WriteString(s.Row(r) + "\n")
	}
	return strings.TrimRight(all.String(), "\n")
}

func (s *Screen) Size() (rows, cols int)              { return s.rows, s.cols }
func (s *Screen) Cursor() (row, col int, hidden bool) { return s.row, s.col, !s.dec[25] } // from 0
func (s *Screen) Title() string                       { return s.title }                  // OSC 0 / 2
func (s *Screen) Status() ProgramStatus               { return s.status }
func (s *Screen) Scrolled() int                       { return s.scrolled } // so that Scrolled()+row names a row for good
func (s *Screen) AltScreen() bool                     { return s.alt }
func (s *Screen) BracketedPaste() bool                { return s.dec[2004] }
func (s *Screen) AppCursorKeys() bool                 { return s.dec[1] } // arrows are ESC O A, not ESC [ A

// Wrapped tells whether row r continues on row r+1 because the text ran over the right margin.
func (s *Screen) Wrapped(r int) bool { return r >= 0 && r < s.rows && s.grid[r].wrapped }

// TakeReplies returns and forgets the answers to the queries seen so far: all when there is no host terminal, otherwise
// only that to OSC 7501, which no host is expected to know.
func (s *Screen) TakeReplies(answerAll bool) []byte {
	out := s.replies
	if s.replies = nil; !answerAll {
		return []byte(strings.Repeat(statusReply, strings.Count(string(out), statusReply)))
	}
	return out
}

// Write feeds bytes of the child. It never fails. Broken UTF-8 shows as one U+FFFD, up to the byte that breaks it.
func (s *Screen) Write(b []byte) (int, error) {
	p := append(s.part, b...)
	for s.part = nil; len(p) > 0; {
		n := 1
		if s.state != 0 || p[0] < 0x20 {
			s.control(p[0])
		} else if !utf8.FullRune(p) {
			s.part, n = p, len(p)
		} else if n = s.ascii(p); n == 0 {
			r, size := utf8.DecodeRune(p)
			for n = size; r == utf8.RuneError && n < len(p) && !utf8.FullRune(p[:n+1]); n++ {
			}
			s.print(r)
		}
		p = p[n:]
	}
	return len(b), nil
}

func (s *Screen) control(b byte) {
	inString := s.state > 0x1b && s.state != '['
	switch {
	case b == 0x1b, b == '\a' && s.state == ']':
		s.endString(b)
		if s.state, s.seq = 0, s.seq[:0]; b == 0x1b {
			s.state = b
		}
	case b == 0x18 || b == 0x1a: // CAN, SUB
		s.state = 0
	case b < 0x20 && !inString:
		s.act([]byte{b})
	case b < 0x20, b >= 0x7f && !inString:
	case inString, b < 0x30, b < 0x40 && s.state == '[':
		if len(s.seq) < maxString {
			s.seq = append(s.seq, b)
		}
	case s.state == 0x1b && len(s.seq) == 0 && strings.IndexByte("[]PX^_k", b) >= 0:
		s.state = b
	default:
		s.endSequence(b)
	}
}

// endSequence acts on a complete escape or control sequence. The key is what is left of it without parameters.
func (s *Screen) endSequence(final byte) {
	key := make([]byte, 0, 8)
	s.params = append(s.params[:0], param{-1, 0})
	if s.state == 0x1b {
		key = append(append(key, 0x1b), s.seq...)
	}
	for i := 0; i < len(s.seq) && s.state == '['; i++ {
		switch b, p := s.seq[i], &s.params[len(s.params)-1]; {
		case b < '0' || b > ';':
			key = append(key, b)
		case b > '9':
			s.params = append(s.params, param{-1, int(';' - b)})
		default:
			p.n = min(max(p.n, 0)*10+int(b-'0'), maxParam)
		}
	}
	s.state, s.seq = 0, s.seq[:0]
	s.act(append(key, final))
}

func (s *Screen) act(key []byte) {
	if f := sequences[string(key)]; f != nil {
		f(s, s.arg(0, 1))
	} else if len(key) == 3 && key[0] == 0x1b && (key[1] == '(' || key[1] == ')') { // SCS
		s.charset[key[1]-'('] = key[2]
	}
	s.base = nil
}

// arg is parameter i, or def when it is absent; an explicit 0 counts as absent unless def is 0.
func (s *Screen) arg(i, def int) int {
	if i >= len(s.params) || s.params[i].n < min(def, 1) {
		return def
	}
	return s.params[i].n
}

// sequences are the control characters, the escape sequences (with the ESC) and the control sequences (without CSI and
// parameters) of xterm's list. n is the first parameter, 1 when it is absent or 0.
var sequences = map[string]func(s *Screen, n int){
	"\b": func(s *Screen, _ int) { s.moveTo(s.row, s.col-1) }, "\r": func(s *Screen, _ int) { s.moveTo(s.row, 0) },
	"\n": (*Screen).lineFeed, "\v": (*Screen).lineFeed, "\f": (*Screen).lineFeed, "\x1bD": (*Screen).lineFeed,
	"\x1bE": func(s *Screen, n int) { s.lineFeed(n); s.moveTo(s.row, 0) },                                // NEL
	"\x1bM": (*Screen).reverseIndex, "\x1bc": (*Screen).reset, "\t": func(s *Screen, _ int) { s.tab(1) }, // RI, RIS, HT
	"\x0e": func(s *Screen, _ int) { s.shift = 1 }, "\x0f": func(s *Screen, _ int) { s.shift = 0 }, // SO, SI
	"\x1b7": func(s *Screen, _ int) { s.saved = s.cursor }, "\x1b8": func(s *Screen, _ int) { s.cursor = s.saved },
	"s": func(s *Screen, _ int) { s.saved = s.cursor }, "u": func(s *Screen, _ int) { s.cursor = s.saved },
	"@": func(s *Screen, n int) { s.shiftCells(n) }, "P": func(s *Screen, n int) { s.shiftCells(-n) }, // ICH, DCH
	"A": func(s *Screen, n int) { s.moveBy(-n, s.col) }, "B": func(s *Screen, n int) { s.moveBy(n, s.col) },
	"E": func(s *Screen, n int) { s.moveBy(n, 0) }, "F": func(s *Screen, n int) { s.moveBy(-n, 0) }, // CNL, CPL
	"C": func(s *Screen, n int) { s.moveTo(s.row, s.col+n) }, "D": func(s *Screen, n int) { s.moveTo(s.row, s.col-n) },
	"G": func(s *Screen, n int) { s.moveTo(s.row, n-1) }, "d": func(s *Screen, n int) { s.moveOrigin(n-1, s.col) },
	"I": func(s *Screen, n int) { s.tab(n) }, "Z": func(s *Screen, n int) { s.tab(-n) }, // CHT, CBT
	"J": func(s *Screen, _ int) { s.eraseRows(0, s.rows-1) }, "K": func(s *Screen, _ int) { s.eraseRows(s.row, s.row) },
	"X": func(s *Screen, n int) { s.erase(s.row, s.col, s.row, s.col+n) },
	"b": func(s *Screen, n int) { s.repeat(min(n, s.rows*s.cols)) }, // ECH, REP
	"L": func(s *Screen, n int) { s.scroll(s.row, -n) }, "M": func(s *Screen, n int) { s.scroll(s.row, n) },
	"S": func(s *Screen, n int) { s.scroll(s.top, n) }, "T": func(s *Screen, n int) { s.scroll(s.top, -n) },
	"h": func(s *Screen, n int) { s.insert = s.insert || n == 4 }, "?h": func(s *Screen, _ int) { s.setModes(true) },
	"l": func(s *Screen, n int) { s.insert = s.insert && n != 4 }, "?l": func(s *Screen, _ int) { s.setModes(false) },
	"H": (*Screen).moveHome, "f": (*Screen).moveHome, "m": (*Screen).sgr, "r": (*Screen).setRegion, // CUP, HVP, DECSTBM
	"n": (*Screen).report, "t": func(s *Screen, n int) { s.report(max(n, 7)) }, // DSR, XTWINOPS
	"c": func(s *Screen, _ int) { s.reply("\x1b[?62;22c") }, ">c": func(s *Screen, _ int) { s.reply("\x1b[>0;10;1c") },
	"?u":  func(s *Screen, _ int) { s.reply("\x1b[?0u") },                  // kitty's keyboard flags: none
	">q":  func(s *Screen, _ int) { s.reply("\x1bP>|atlasbridge\x1b\\") },  // XTVERSION
	"?$p": func(s *Screen, _ int) { s.reply("\x1b[?%d;0$y", s.arg(0, 0)) }, // DECRQM: not known
}

func (s *Screen) setModes(on bool) {
	for i := range s.params {
		n := min(s.arg(i, 0), len(s.dec)-1)
		switch s.dec[n] = on; n {
		case 6: // DECOM
			s.moveOrigin(0, 0)
		case 47, 1047, 1049:
			s.useAlternate(on)
		}
	}
}

// useAlternate switches between the screens. The alternate one is blank each time it comes up, as in tmux.
func (s *Screen) useAlternate(on bool) {
	if on && !s.alt {
		s.tellAbove(s.row, false)
		s.alt, s.savedAlt, s.grid, s.other = true, s.cursor, s.other, s.grid
		s.erase(0, 0, s.rows-1, s.cols)
	} else if !on && s.alt {
		s.alt, s.cursor, s.grid, s.other = false, s.savedAlt, s.other, s.grid
	}
}

func (s *Screen) repeat(n int) {
	for base := s.base; base != nil && n > 0; n-- {
		s.print(base.ch)
	}
}

// sgrFlags are the attributes that SGR 1 … 29 turn on and off.
var sgrFlags = [30]struct{ on, off uint8 }{
	1: {flagBold, 0}, 2: {flagDim, 0}, 4: {flagUnderline, 0}, 7: {flagReverse, 0},
	21: {flagUnderline, 0}, 22: {0, flagBold | flagDim}, 24: {0, flagUnderline}, 27: {0, flagReverse},
}

// sgr sets the pen. Parameters behind a colon belong to the one before.
func (s *Screen) sgr(int) {
	for p := s.params; len(p) > 0; {
		n := 1 // how many parameters this attribute takes
		for ; n < len(p) && p[n].colon == 1; n++ {
		}
		code := max(p[0].n, 0)
		tens, digit := code/10, int32(code%10)
		colour := [11]*int32{3: &s.pen.fg, 4: &s.pen.bg, 5: new(int32), 9: &s.pen.fg, 10: &s.pen.bg} // 58: of underlines
		switch {
		case code == 0:
			s.pen = cell{}
		case code == 4 && n > 1 && p[1].n == 0: // 4:0
			s.pen.flags &^= flagUnderline
		case code < len(sgrFlags):
			s.pen.flags = s.pen.flags&^sgrFlags[code].off | sgrFlags[code].on
		case digit == 8 && tens <= 5: // 38;5;n, 38;2;r;g;b and, with colons, 38:2:space:r:g:b
			args := p
			if n > 1 {
				args = p[:n]
			}
			at := func(i int) int32 { return int32(min(max(args[i].n, 0), 255)) }
			if len(args) > 2 && args[1].n == 5 {
				*colour[tens], n = at(2)+1, max(n, 3)
			} else if i := 2 + min(max(n-5, 0), 1); len(args) > 4 && args[1].n == 2 {
				*colour[tens], n = 1<<24|at(i)<<16|at(i+1)<<8|at(i+2)+1, max(n, 5)
			} else {
				n = len(args)
			}
		case tens == 3 || tens == 4: // 9 is the default
			*colour[tens] = (digit + 1) % 10
		case (tens == 9 || tens == 10) && digit < 8:
			*colour[tens] = digit + 8 + 1
		}
		p = p[n:]
	}
}

// decGraphics is what the line drawing set shows for '`' to '~': https://vt100.net/docs/vt220-rm/table2-4.html
var decGraphics = []rune("◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")

// print puts one character at the cursor. Marks, and what follows a joiner, join the character before.
func (s *Screen) print(r rune) {
	if r >= '`' && r <= '~' && s.charset[s.shift] == '0' {
		r = decGraphics[r-'`']
	}
	w := runeWidth(r)
	if b := s.base; b != nil && r >= 0x300 && (w == 0 || strings.HasSuffix(b.marks, "\u200d")) {
		if len(b.marks)+utf8.RuneLen(r) <= maxMarks {
			b.marks += string(r)
		}
		return
	}
	if w > 0 && s.dec[7] && (s.wrapNext || s.col+w > s.cols) {
		s.lineFeed(-1)
		s.moveTo(s.row, 0)
	}
	if w == 0 || s.col+w > s.cols {
		return
	}
	s.touch(s.row)
	if s.insert {
		s.shiftCells(w)
	}
	l, c := s.grid[s.row], s.pen
	if c.ch = r; w == 2 {
		l.cells[s.col+1] = cell{fg: c.fg, bg: c.bg, flags: c.flags | flagTail, ch: ' '}
		c.flags |= flagWide
	}
	s.base, l.cells[s.col] = &l.cells[s.col], c
	l.mend(s.col)
	l.mend(s.col + w)
	if s.col += w; s.col >= s.cols {
		s.col, s.wrapNext = s.cols-1, s.dec[7]
	}
}

// ascii prints what p begins with of printable ASCII, as far as nothing special happens: the fast path of print.
func (s *Screen) ascii(p []byte) (n int) {
	if s.insert || s.charset[s.shift] == '0' || s.wrapNext {
		return 0
	}
	s.touch(s.row)
	l, c := s.grid[s.row], s.pen
	for room := l.cells[s.col : s.cols-1]; n < min(len(p), len(room)) && p[n] >= ' ' && p[n] < 0x7f; n++ {
		c.ch = rune(p[n])
		room[n] = c
	}
	if n > 0 {
		l.mend(s.col)
		l.mend(s.col + n)
		s.base, s.col = &l.cells[s.col+n-1], s.col+n
	}
	return n
}

// mend blanks the half of a wide character whose other half is no longer across the boundary left of column c.
func (l *line) mend(c int) {
	head := c > 0 && l.cells[c-1].flags&flagWide != 0
	if tail := c < len(l.cells) && l.cells[c].flags&flagTail != 0; head && !tail {
		l.cells[c-1] = cell{bg: l.cells[c-1].bg}
	} else if tail && !head {
		l.cells[c] = cell{bg: l.cells[c].bg}
	}
}

// lineFeed moves down, and scrolls at the end of the region. At −1 the text of this row goes on in the next.
func (s *Screen) lineFeed(n int) {
	if s.grid[s.row].wrapped = n < 0; s.row == s.bottom {
		s.scroll(s.top, 1)
	} else {
		s.row = min(s.row+1, s.rows-1)
	}
}

func (s *Screen) reverseIndex(int) {
	if s.wrapNext = false; s.row == s.top {
		s.scroll(s.top, -1)
	} else {
		s.row = max(s.row-1, 0)
	}
}

// scroll moves the rows from top to the bottom of the region up by n, or down when negative.
func (s *Screen) scroll(top, n int) {
	if top < s.top || top > s.bottom {
		return
	}
	region, from, to := s.grid[top:s.bottom+1], 0, s.bottom-top // where rows leave and come back blank
	if n < 0 {
		from, to = to, from
	}
	for range min(max(n, -n), len(region)) {
		l := region[from]
		if n > 0 && top == 0 && !s.alt {
			s.tell(l)
			s.scrolled++
		}
		*l = line{cells: l.cells}
		region = slices.Insert(slices.Delete(region, from, from+1), to, l)
		s.erase(top+to, 0, top+to, s.cols)
	}
}

// erase blanks what lies between two places, in the pen's background; column c1 is the first that stays.
func (s *Screen) erase(r0, c0, r1, c1 int) {
	for r := r0; r <= r1; r++ {
		l, from, to := s.grid[r], 0, s.cols
		if r == r0 {
			from = c0
		}
		if r == r1 {
			to = min(c1, s.cols)
		}
		clear(l.cells[from:to])
		for c := from; c < to && s.pen.bg != 0; c++ {
			l.cells[c].bg = s.pen.bg
		}
		l.mend(from)
		l.mend(to)
		l.wrapped = l.wrapped && to < s.cols
	}
}

// eraseRows erases in some rows, as the first parameter says: from the cursor on (0), up to it (1), or all (2).
func (s *Screen) eraseRows(first, last int) {
	spans := [][4]int{{s.row, s.col, last, s.cols}, {first, 0, s.row, s.col + 1}, {first, 0, last, s.cols}}
	if mode := s.arg(0, 0); mode < len(spans) {
		a := spans[mode]
		if a == [4]int{0, 0, s.rows - 1, s.cols} && s.tr.on && !s.alt { // what is there is final
			text := s.Text()
			s.tellAbove(strings.Count(text, "\n")+min(len(text), 1), false)
			s.tr.part = nil
			for _, l := range s.grid {
				l.told, l.again = false, true
			}
		}
		s.erase(a[0], a[1], a[2], a[3])
	}
}

// shiftCells moves the rest of the row, from the cursor on, by n columns; to the left when negative.
func (s *Screen) shiftCells(n int) {
	l, row, col := s.grid[s.row], s.row, s.col
	if n = max(min(n, s.cols-col), col-s.cols); n > 0 {
		copy(l.cells[col+n:], l.cells[col:])
		s.erase(row, col, row, col+n)
	} else {
		s.erase(row, col, row, col-n)
		copy(l.cells[col:], l.cells[col-n:])
		s.erase(row, s.cols+n, row, s.cols)
	}
	l.mend(s.cols)
	l.wrapped = false
}

func (s *Screen) moveTo(row, col int) {
	s.row, s.col, s.wrapNext = min(max(row, 0), s.rows-1), min(max(col, 0), s.cols-1), false
}

func (s *Screen) moveHome(row int) { s.moveOrigin(row-1, s.arg(1, 1)-1) }

// moveOrigin places the cursor relative to the scroll region when DECOM is set.
func (s *Screen) moveOrigin(row, col int) {
	if s.dec[6] {
		row = min(row+s.top, s.bottom)
	}
	s.moveTo(row, col)
}

// moveBy moves n rows down, to a column, stopping at the margin that it does not start behind.
func (s *Screen) moveBy(n, col int) {
	row := s.row + n
	if s.row >= s.top {
		row = max(row, s.top)
	}
	if s.row <= s.bottom {
		row = min(row, s.bottom)
	}
	s.moveTo(row, col)
}

func (s *Screen) setRegion(top int) {
	if bottom := min(s.arg(1, s.rows), s.rows); top < bottom {
		s.top, s.bottom = top-1, bottom-1
		s.moveOrigin(0, 0)
	}
}

// tab moves n tab stops to the right, to the left when negative. They are 8 columns apart.
func (s *Screen) tab(n int) {
	if n < 0 {
		s.col += 7
	}
	s.moveTo(s.row, (s.col/8+n)*8)
}

func (s *Screen) reply(format string, args ...any) {
	if len(s.replies) < maxReplies {
		s.replies = fmt.Appendf(s.replies, format, args...)
	}
}

// report answers DSR (5, 6), and XTWINOPS for the window in pixels (14; a cell has 8 × 16).
func (s *Screen) report(n int) {
	switch n {
	case 5:
		s.reply("\x1b[0n")
	case 6:
		row := s.row + 1
		if s.dec[6] {
			row -= s.top
		}
		s.reply("\x1b[%d;%dR", row, s.col+1)
	case 14:
		s.reply("\x1b[4;%d;%dt", s.rows*16, s.cols*8)
	}
}

// endString acts on a complete string; end is the byte that ended it.
func (s *Screen) endString(end byte) {
	text := strings.ToValidUTF8(string(s.seq), "\ufffd")
	code, rest, _ := strings.Cut(text, ";")
	switch {
	case s.state == 'P' && (strings.HasPrefix(code, "+q") || strings.HasPrefix(code, "$q")):
		s.reply("\x1bP0%cr\x1b\\", code[0]) // XTGETTCAP, DECRQSS: not known
	case s.state != ']':
	case code == "0" || code == "2":
		s.title = rest
	case code == "7501" && rest == "?":
		s.reply(statusReply)
	case code == "7501": // key=value:key=value, msg in base64, padded or not
		f := map[string]string{}
		for _, field := range strings.Split(rest, ":") {
			key, value, _ := strings.Cut(field, "=")
			f[key] = value
		}
		msg, _ := base64.RawStdEncoding.DecodeString(strings.TrimRight(f["msg"], "="))
		if f["msg"] = strings.ToValidUTF8(string(msg), "\ufffd"); f["state"] != "" {
			s.status = ProgramStatus{f["state"], f["app"], f["kind"], f["msg"], s.status.Seq + 1}
		}
	case strings.Contains(" 4 10 11 12 ", " "+code+" ") && strings.HasSuffix(text, "?") && len(text) < 9: // light on black
		level := map[bool]int{true: 0, false: 0xcdcd}[code == "11"]
		st := map[byte]string{'\a': "\a", 0x1b: "\x1b\\"}[end]
		s.reply("\x1b]%srgb:%04[2]x/%04[2]x/%04[2]x%[3]s", strings.TrimSuffix(text, "?"), level, st)
	}
}

// wideEdges are where the characters of two columns (East Asian Wide and Fullwidth, emoji; unassigned gaps are joined)
// begin and, in turn, end. From wcwidth of glibc 2.36 (Unicode 15), which tmux uses.
var wideEdges = []rune{
	0x1100, 0x1160, 0x231a, 0x231c, 0x2329, 0x232b, 0x23e9, 0x23ed, 0x23f0, 0x23f1, 0x23f3, 0x23f4, 0x25fd, 0x25ff,
	0x2614, 0x2616, 0x2648, 0x2654, 0x267f, 0x2680, 0x2693, 0x2694, 0x26a1, 0x26a2, 0x26aa, 0x26ac, 0x26bd, 0x26bf,
	0x26c4, 0x26c6, 0x26ce, 0x26cf, 0x26d4, 0x26d5, 0x26ea, 0x26eb, 0x26f2, 0x26f4, 0x26f5, 0x26f6, 0x26fa, 0x26fb,
	0x26fd, 0x26fe, 0x2705, 0x2706, 0x270a, 0x270c, 0x2728, 0x2729, 0x274c, 0x274d, 0x274e, 0x274f, 0x2753, 0x2756,
	0x2757, 0x2758, 0x2795, 0x2798, 0x27b0, 0x27b1, 0x27bf, 0x27c0, 0x2b1b, 0x2b1d, 0x2b50, 0x2b51, 0x2b55, 0x2b56,
	0x2e80, 0x302a, 0x302e, 0x303f, 0x3041, 0x3097, 0x309b, 0xa4c7, 0xa960, 0xa97d, 0xac00, 0xd7a4, 0xf900, 0xfada,
	0xfe10, 0xfe1a, 0xfe30, 0xfe6c, 0xff01, 0xff61, 0xffe0, 0xffe7, 0x16fe0, 0x16fe4, 0x16ff0, 0x1b2fc, 0x1f004,
	0x1f005, 0x1f0cf, 0x1f0d0, 0x1f18e, 0x1f18f, 0x1f191, 0x1f19b, 0x1f200, 0x1f321, 0x1f32d, 0x1f336, 0x1f337, 0x1f37d,
	0x1f37e, 0x1f394, 0x1f3a0, 0x1f3cb, 0x1f3cf, 0x1f3d4, 0x1f3e0, 0x1f3f1, 0x1f3f4, 0x1f3f5, 0x1f3f8, 0x1f43f, 0x1f440,
	0x1f441, 0x1f442, 0x1f4fd, 0x1f4ff, 0x1f53e, 0x1f54b, 0x1f54f, 0x1f550, 0x1f568, 0x1f57a, 0x1f57b, 0x1f595, 0x1f597,
	0x1f5a4, 0x1f5a5, 0x1f5fb, 0x1f650, 0x1f680, 0x1f6c6, 0x1f6cc, 0x1f6cd, 0x1f6d0, 0x1f6d3, 0x1f6d5, 0x1f6e0, 0x1f6eb,
	0x1f6ed, 0x1f6f4, 0x1f6fd, 0x1f7e0, 0x1f7f1, 0x1f90c, 0x1f93b, 0x1f93c, 0x1f946, 0x1f947, 0x1fa00, 0x1fa70, 0x1faf7,
	0x20000, 0x3134b,
}

// runeWidth is the number of columns of r: 0, 1 or 2. DEL, C1 controls and marks have none.
func runeWidth(r rune) int {
	switch {
	case r < 0x7f || r >= 0xa0 && r < 0x300 || r >= 0x2500 && r < 0x25fd: // the last are frames, frequent in tools
		return 1
	case r < 0xa0, r >= 0x1160 && r <= 0x11ff, r >= 0xd7b0 && r <= 0xd7fb, // the latter are Hangul vowels and finals
		unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r):
		return 0
	}
	edges, _ := slices.BinarySearch(wideEdges, r+1) // up to r
	return 1 + edges%2
}

// transcript turns the screen into lines of text, each told once. A row is final when it has scrolled out, or when the
// cursor's paragraph is below it, unless the program has gone back to write in it: from there on it repaints, and rows
// are final only by scrolling out or by settling. Lines that are told again, after the screen was cleared, or on the
// alternate screen are left out when they were among the last told, or have neither letter nor digit.
type transcript struct {
	on              bool
	part            []byte // the beginning of a wrapped line that has scrolled out
	pending, recent []string
	bytes, left     int // in pending; lines that did not fit there
}

// touch notes that the program writes to a row: its paragraph is to be told again.
func (s *Screen) touch(row int) {
	if s.grid[row].told {
		first := row
		for ; first > 0 && s.grid[first-1].wrapped; first-- {
		}
		for r := first; r < s.rows && (r <= row || s.grid[r-1].wrapped); r++ {
			s.grid[r].told, s.grid[r].again = false, true
		}
	}
}

// tellAbove takes the rows above a paragraph as final, as far as they are not being repainted.
func (s *Screen) tellAbove(row int, repainted bool) {
	for row > 0 && s.grid[row-1].wrapped {
		row--
	}
	for _, l := range s.grid[:row] {
		if l.again && !l.told && !repainted {
			return
		}
		s.tell(l)
	}
}

// tell takes a row of the primary screen as final.
func (s *Screen) tell(l *line) {
	t := &s.tr
	if !t.on || l.told {
		return
	}
	l.told = true
	if t.part = l.text(t.part); !l.wrapped || len(t.part) >= maxLine {
		t.add(strings.TrimRight(string(t.part), " "), l.again)
		t.part = t.part[:0]
	}
}

// add takes a finished line; again: only if it is new.
func (t *transcript) add(text string, again bool) {
	word := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }
	if again && (!strings.ContainsFunc(text, word) || slices.Contains(t.recent, text)) {
		return
	}
	t.recent = append(t.recent[max(0, len(t.recent)-maxRecent+1):], text)
	t.pending, t.bytes = append(t.pending, text), t.bytes+len(text)+lineCost
	for ; t.bytes > maxPending; t.left++ {
		t.bytes -= len(t.pending[0]) + lineCost
		t.pending = t.pending[1:]
	}
}

// Transcript returns the text that became final since the last call, in lines and each once, and the part that may
// still change. Lines that left the screen, and those above the cursor's paragraph on the primary screen, are final; on
// the alternate screen nothing is until settle (the tool's turn is over), when what is new on it is returned. The first
// call turns it on. Of more than 4 MiB between two calls the oldest lines are left out, and a line says how many.
func (s *Screen) Transcript(settle bool) (final []string, live string) {
	t := &s.tr
	if t.on = true; !s.alt {
		s.tellAbove(s.row, settle)
		live = string(t.part)
		for _, l := range slices.DeleteFunc(slices.Clone(s.grid), func(l *line) bool { return l.told }) {
			if live += string(l.text(nil)); !l.wrapped {
				live = strings.TrimRight(live, " ") + "\n"
			}
		}
		live = strings.TrimRight(live, "\n ")
	} else if settle {
		for _, text := range strings.Split(s.Text(), "\n") {
			t.add(text, true)
		}
	}
	if final = t.pending; t.left > 0 {
		final = append([]string{fmt.Sprintf("[… %d lines left out …]", t.left)}, final...)
	}
	t.pending, t.bytes, t.left = nil, 0, 0
	return final, live
}
