package main

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Screen is what the terminal shows: a parser over a grid of cells, fed with the child's bytes cut anywhere.
// Pure: no I/O, no clock. One goroutine uses it. Whatever comes in, its memory stays within fixed limits.
//
// The parser is the state machine of https://vt100.net/emu/dec_ansi_parser with these differences, which
// today's terminals share: text is UTF-8; the 8-bit C1 controls do not exist (0x9C is part of ✳, not ST);
// an OSC also ends on BEL; any ESC ends a string and begins a sequence; ESC k (screen's title) is a string.
// What sequences do follows xterm (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html); the width of
// characters follows tmux and glibc. There is no scrollback, no reflow, no 132 columns and no graphics.
type Screen struct {
	rows, cols int
	state      parseState
	utf        [utf8.UTFMax]byte // the beginning of a character whose end is not here yet
	utfLen     int

	prefix byte // of a CSI: one of < = > ?
	inter  byte // intermediate byte, the last one
	params [maxParams]int32
	nparam int
	colons uint32 // bit i: parameter i came after a colon
	kind   byte   // of a string: ] P X ^ _ k
	str    []byte

	primary, alternate []*line
	grid               []*line // the one in use
	row, col           int
	wrapNext           bool // the cursor stands behind the last column
	top, bottom        int  // scroll region, inclusive
	pen                cell
	charset            [2]byte // what G0 and G1 are: 'B' ASCII, '0' line drawing
	shift              int     // which of them is in use
	last               rune    // for REP
	tabs               []bool
	saved, savedAlt    cursorState // by DECSC; by mode 1049
	origin, insert     bool
	noWrap, newline    bool // DECAWM off; LNM on
	hidden             bool
	appKeys, paste     bool

	clusters   []string // what cells with a negative rune show
	clusterIDs map[string]rune

	scrolled int
	title    string
	titles   []string // pushed by XTWINOPS 22
	bells    int
	status   ProgramStatus
	replies  []byte // what a terminal would have answered
	own      []byte // the part of it that the host terminal will not answer
	tr       transcript
}

// Attr is how the cell is drawn: enough to tell a highlighted choice from the others.
type Attr struct {
	Bold, Dim, Reverse, Underline bool
	FG, BG                        int32 // −1 default, 0–255 palette, else 1<<24|rgb
}

// ProgramStatus is what a program last reported of itself: OSC 7501 (the Program Status Protocol, measured
// with Claude Code and Codex), and the last notification (OSC 9, 99, 777). Seq rises with every report, so
// that a repeat is seen as one.
type ProgramStatus struct {
	State  string // "", idle, working, blocked, done, clear
	App    string
	Kind   string // permission, question
	Msg    string // decoded from base64
	Seq    int
	Notice string
}

// cell is one place of the grid; its zero value is a blank in the default colours.
type cell struct {
	ch     rune  // 0 blank, negative: −1−index into clusters
	fg, bg int32 // 0 default, else 1 + palette index, else 1<<24|rgb
	flags  uint8
}

const (
	flagBold uint8 = 1 << iota
	flagDim
	flagReverse
	flagUnderline
	flagWide // left half of a wide character
	flagTail // its right half
)

// line is a row of the grid. Cells from used on are blank, so that clearing costs what was written.
type line struct {
	cells   []cell
	used    int
	wrapped bool // the text goes on in the next row
	wide    bool // may hold wide characters
}

type cursorState struct {
	row, col int
	wrapNext bool
	pen      cell
	charset  [2]byte
	shift    int
	origin   bool
}

// The limits of what output can make us keep. Real sequences have up to 20 parameters and strings of 1 KiB (measured).
const (
	maxSize     = 2000  // rows and columns
	maxParams   = 32    // of a CSI; the rest is ignored, as in xterm (30)
	maxParam    = 65535 // value of one
	maxString   = 16384 // bytes of an OSC or DCS; of a longer one the rest is ignored
	maxReplies  = 4096  // bytes waiting for TakeReplies; what comes after is not answered
	maxTitles   = 10    // xterm's depth of the title stack
	maxCluster  = 32    // bytes of one character with all its marks (tmux: UTF8_SIZE)
	maxClusters = 1 << 14
)

// newScreen is an empty screen of rows × cols, both at least 1.
func newScreen(rows, cols int) *Screen {
	s := &Screen{clusterIDs: map[string]rune{}}
	s.rows, s.cols = min(max(rows, 1), maxSize), min(max(cols, 1), maxSize)
	s.primary, s.alternate = newGrid(s.rows, s.cols), newGrid(s.rows, s.cols)
	s.reset()
	return s
}

func newGrid(rows, cols int) []*line {
	g := make([]*line, rows)
	for i := range g {
		g[i] = &line{cells: make([]cell, cols)}
	}
	return g
}

// reset is RIS: everything as at the start, but what was counted or reported so far.
func (s *Screen) reset() {
	s.grid = s.alternate
	s.eraseRows(0, s.rows)
	s.grid = s.primary
	s.softReset()
	s.eraseRows(0, s.rows)
	s.row, s.col, s.wrapNext = 0, 0, false
	s.tabs = make([]bool, s.cols)
	for c := 8; c < s.cols; c += 8 {
		s.tabs[c] = true
	}
	s.paste, s.newline, s.title, s.titles = false, false, "", nil
}

// softReset is DECSTR.
func (s *Screen) softReset() {
	s.top, s.bottom = 0, s.rows-1
	s.pen, s.charset, s.shift = cell{}, [2]byte{'B', 'B'}, 0
	s.origin, s.insert, s.noWrap, s.hidden, s.appKeys = false, false, false, false, false
	s.saved = cursorState{charset: s.charset}
}

/* ----- what others ask ----- */

func (s *Screen) Size() (rows, cols int) { return s.rows, s.cols }

// Cursor is the position from 0; hidden tells DECTCEM.
func (s *Screen) Cursor() (row, col int, hidden bool) { return s.row, s.col, s.hidden }

// Row is the text of row r from 0, trailing blanks removed, as tmux capture-pane -p prints it.
func (s *Screen) Row(r int) string {
	if r < 0 || r >= s.rows {
		return ""
	}
	return strings.TrimRight(s.text(s.grid[r]), " ")
}

func (s *Screen) text(l *line) string {
	var b strings.Builder
	b.Grow(l.used + l.used/2)
	for i := range l.cells[:l.used] {
		switch c := &l.cells[i]; {
		case c.flags&flagTail != 0:
		case c.ch == 0:
			b.WriteByte(' ')
		case c.ch < 0:
			b.WriteString(s.clusters[-1-c.ch])
		default:
			b.WriteRune(c.ch)
		}
	}
	return b.String()
}

// Wrapped tells whether row r continues on row r+1 because the text ran over the right margin.
func (s *Screen) Wrapped(r int) bool { return r >= 0 && r < s.rows && s.grid[r].wrapped }

// Cell is the rune at (r, c), 0 for the right half of a wide one, with its attributes. Of a character with
// combining marks it is the first rune.
func (s *Screen) Cell(r, c int) (rune, Attr) {
	if r < 0 || r >= s.rows || c < 0 || c >= s.cols {
		return 0, Attr{FG: -1, BG: -1}
	}
	x := s.grid[r].cells[c]
	a := Attr{FG: colour(x.fg), BG: colour(x.bg)}
	a.Bold, a.Dim = x.flags&flagBold != 0, x.flags&flagDim != 0
	a.Reverse, a.Underline = x.flags&flagReverse != 0, x.flags&flagUnderline != 0
	switch {
	case x.flags&flagTail != 0:
		x.ch = 0
	case x.ch == 0:
		x.ch = ' '
	case x.ch < 0:
		x.ch, _ = utf8.DecodeRuneInString(s.clusters[-1-x.ch])
	}
	return x.ch, a
}

func colour(c int32) int32 {
	if c >= 1<<24 {
		return c
	}
	return c - 1
}

// Text is all rows joined with "\n", trailing empty rows removed.
func (s *Screen) Text() string {
	all := make([]string, s.rows)
	for r := range all {
		all[r] = s.Row(r)
	}
	return strings.TrimRight(strings.Join(all, "\n"), "\n")
}

// Scrolled counts the lines that left the top of the primary screen, so that Scrolled()+row names a
// line for good.
func (s *Screen) Scrolled() int         { return s.scrolled }
func (s *Screen) Title() string         { return s.title } // OSC 0 / 2
func (s *Screen) AltScreen() bool       { return &s.grid[0] == &s.alternate[0] }
func (s *Screen) BracketedPaste() bool  { return s.paste }   // DECSET 2004
func (s *Screen) AppCursorKeys() bool   { return s.appKeys } // DECCKM: arrows are ESC O A, not ESC [ A
func (s *Screen) Status() ProgramStatus { return s.status }
func (s *Screen) Bell() int             { return s.bells } // BELs seen outside of strings

// TakeReplies returns and forgets what a terminal would have answered to the queries seen so far.
// answerAll (no host terminal): DSR, DA, colours, XTVERSION, DECRQM, sizes…; otherwise only OSC 7501,
// which the host is not expected to know.
func (s *Screen) TakeReplies(answerAll bool) []byte {
	out := s.own
	if answerAll {
		out = s.replies
	}
	s.own, s.replies = nil, nil
	return out
}

// Resize changes the size without reflow: rows are added at the bottom; they are taken from the blank ones
// below the cursor, then from the top, which scrolls out.
func (s *Screen) Resize(rows, cols int) {
	rows, cols = min(max(rows, 1), maxSize), min(max(cols, 1), maxSize)
	up := max(0, s.row-rows+1)
	for _, g := range []*[]*line{&s.primary, &s.alternate} {
		inUse := &s.grid[0] == &(*g)[0]
		for _, l := range (*g)[:up] {
			if inUse && !s.AltScreen() {
				s.scrollOut(l)
			}
		}
		next := newGrid(rows, cols)
		for i, l := range (*g)[up:min(up+rows, s.rows)] {
			next[i].used = min(copy(next[i].cells, l.cells), l.used)
			next[i].wide, next[i].wrapped = l.wide, l.wrapped && cols == s.cols
			if l.wide && cols < s.cols && l.cells[cols].flags&flagTail != 0 {
				next[i].cells[cols-1] = cell{}
			}
		}
		if *g = next; inUse {
			s.grid = next
		}
	}
	for c := len(s.tabs); c < cols; c++ {
		s.tabs = append(s.tabs, c%8 == 0)
	}
	s.tabs = s.tabs[:cols]
	s.wrapNext = s.wrapNext && cols == s.cols
	s.rows, s.cols = rows, cols
	s.row, s.col = min(s.row-up, rows-1), min(s.col, cols-1)
	s.top, s.bottom = 0, rows-1
}

/* ----- parser ----- */

type parseState uint8

const (
	stGround parseState = iota
	stEscape
	stEscapeInter
	stCSI
	stCSIParam
	stCSIInter
	stCSIIgnore
	stOSC
	stString
	nStates
)

type parseAction uint8

const (
	actNone parseAction = iota
	actPrint
	actExecute
	actClear // a sequence begins
	actCollect
	actParam
	actEscape
	actCSI
	actStart // a string begins
	actPut
	actEnd // a string is complete
)

// parseTable gives, for each state and byte, action<<4 | next state.
var parseTable = buildParseTable()

func buildParseTable() (t [nStates][256]uint8) {
	on := func(st parseState, lo, hi int, act parseAction, next parseState) {
		for b := lo; b <= hi; b++ {
			t[st][b] = uint8(act)<<4 | uint8(next)
		}
	}
	for st := stGround; st < nStates; st++ {
		on(st, 0x00, 0xff, actNone, st)
		if st < stOSC {
			on(st, 0x00, 0x1f, actExecute, st)
		}
		on(st, 0x18, 0x18, actNone, stGround) // CAN
		on(st, 0x1a, 0x1a, actNone, stGround) // SUB
		on(st, 0x1b, 0x1b, actClear, stEscape)
	}
	on(stGround, 0x20, 0x7e, actPrint, stGround)
	on(stGround, 0x80, 0xff, actPrint, stGround)
	on(stEscape, 0x20, 0x2f, actCollect, stEscapeInter)
	on(stEscape, 0x30, 0x7e, actEscape, stGround)
	on(stEscape, '[', '[', actClear, stCSI)
	on(stEscape, ']', ']', actStart, stOSC)
	for _, b := range "PX^_k" {
		on(stEscape, int(b), int(b), actStart, stString)
	}
	on(stEscapeInter, 0x20, 0x2f, actCollect, stEscapeInter)
	on(stEscapeInter, 0x30, 0x7e, actEscape, stGround)
	for _, st := range []parseState{stCSI, stCSIParam} {
		on(st, 0x20, 0x2f, actCollect, stCSIInter)
		on(st, 0x30, 0x3b, actParam, stCSIParam)
		on(st, 0x3c, 0x3f, actNone, stCSIIgnore)
		on(st, 0x40, 0x7e, actCSI, stGround)
	}
	on(stCSI, 0x3c, 0x3f, actCollect, stCSIParam)
	on(stCSIInter, 0x20, 0x2f, actCollect, stCSIInter)
	on(stCSIInter, 0x30, 0x3f, actNone, stCSIIgnore)
	on(stCSIInter, 0x40, 0x7e, actCSI, stGround)
	on(stCSIIgnore, 0x40, 0x7e, actNone, stGround)
	for _, st := range []parseState{stOSC, stString} {
		on(st, 0x20, 0xff, actPut, st)
		on(st, 0x1b, 0x1b, actEnd, stEscape)
	}
	on(stOSC, 0x07, 0x07, actEnd, stGround)
	return t
}

// Write feeds bytes of the child. It never fails.
func (s *Screen) Write(p []byte) (int, error) {
	for i := 0; i < len(p); {
		b := p[i]
		if s.state == stGround && s.utfLen == 0 {
			if b >= 0x20 && b < 0x7f {
				n := i + 1
				for n < len(p) && p[n] >= 0x20 && p[n] < 0x7f {
					n++
				}
				s.printASCII(p[i:n])
				i = n
				continue
			}
			if b >= 0x80 {
				if r, n := utf8.DecodeRune(p[i:]); n > 1 {
					s.print(r)
					i += n
					continue
				}
			}
		}
		if s.state == stGround && (s.utfLen > 0 || b >= 0x80) && !s.decode(b) {
			continue
		}
		if s.state != stGround || b < 0x80 {
			s.step(b)
		}
		i++
	}
	return len(p), nil
}

// decode collects a character that was cut. A broken one shows as one U+FFFD. It returns false when b was not used.
func (s *Screen) decode(b byte) bool {
	s.utf[s.utfLen] = b
	if part := s.utf[:s.utfLen+1]; b >= 0x80 {
		if !utf8.FullRune(part) {
			s.utfLen++
			return true
		}
		if r, n := utf8.DecodeRune(part); n > 1 || s.utfLen == 0 {
			s.utfLen = 0
			s.print(r)
			return true
		}
	}
	s.utfLen = 0
	s.print(utf8.RuneError)
	return false
}

func (s *Screen) step(b byte) {
	e := parseTable[s.state][b]
	s.state = parseState(e & 15)
	switch parseAction(e >> 4) {
	case actExecute:
		s.execute(b)
	case actClear:
		s.prefix, s.inter, s.nparam, s.colons = 0, 0, 0, 0
	case actCollect:
		if b >= 0x3c {
			s.prefix = b
		} else {
			s.inter = b
		}
	case actParam:
		s.param(b)
	case actEscape:
		s.escape(b)
	case actCSI:
		s.csi(b)
	case actStart:
		s.kind, s.str = b, s.str[:0]
	case actPut:
		if len(s.str) < maxString {
			s.str = append(s.str, b)
		}
	case actEnd:
		s.prefix, s.inter, s.nparam, s.colons = 0, 0, 0, 0
		s.endString(b)
	}
}

// param adds one byte of a parameter list. An empty parameter is −1.
func (s *Screen) param(b byte) {
	if s.nparam == 0 {
		s.params[0], s.nparam = -1, 1
	}
	switch {
	case b == ';' || b == ':':
		if s.nparam < maxParams {
			s.params[s.nparam] = -1
			if b == ':' {
				s.colons |= 1 << s.nparam
			}
		}
		s.nparam = min(s.nparam+1, maxParams+1)
	case s.nparam <= maxParams:
		p := &s.params[s.nparam-1]
		*p = min(max(*p, 0)*10+int32(b-'0'), maxParam)
	}
}

// arg is parameter i, or def when it is absent; an explicit 0 counts as absent where def is 1.
func (s *Screen) arg(i, def int) int {
	if i >= min(s.nparam, maxParams) || s.params[i] < int32(def) {
		return def
	}
	return int(s.params[i])
}

func (s *Screen) execute(b byte) {
	switch b {
	case '\a':
		s.bells++
	case '\b':
		s.moveTo(s.row, s.col-1)
	case '\t':
		s.tab(1)
	case '\n', '\v', '\f':
		s.grid[s.row].wrapped = false
		s.index()
		if s.newline {
			s.col, s.wrapNext = 0, false
		}
	case '\r':
		s.col, s.wrapNext = 0, false
	case 0x0e:
		s.shift = 1
	case 0x0f:
		s.shift = 0
	}
}

func (s *Screen) escape(b byte) {
	switch s.inter {
	case '(', ')':
		s.charset[s.inter-'('] = b
		return
	case '#':
		if b == '8' {
			s.alignmentTest()
		}
		return
	case 0:
	default:
		return
	}
	switch b {
	case '7':
		s.saved = s.cursorState()
	case '8':
		s.restore(s.saved)
	case 'c':
		s.reset()
	case 'D':
		s.index()
	case 'E':
		s.index()
		s.col, s.wrapNext = 0, false
	case 'H':
		s.tabs[s.col] = true
	case 'M':
		s.wrapNext = false
		if s.row == s.top {
			s.scrollDown(s.top, s.bottom, 1)
		} else {
			s.row = max(s.row-1, 0)
		}
	}
}

// csi acts on a complete control sequence. The names are those of xterm's list.
func (s *Screen) csi(final byte) {
	if s.prefix != 0 || s.inter != 0 {
		s.csiMarked(final)
		return
	}
	n := s.arg(0, 1)
	switch final {
	case '@': // ICH
		s.shiftCells(s.row, s.col, n)
	case 'A': // CUU
		s.moveBy(-n)
	case 'B', 'e': // CUD, VPR
		s.moveBy(n)
	case 'C', 'a': // CUF, HPR
		s.moveTo(s.row, s.col+n)
	case 'D': // CUB
		s.moveTo(s.row, s.col-n)
	case 'E': // CNL
		s.moveBy(n)
		s.col = 0
	case 'F': // CPL
		s.moveBy(-n)
		s.col = 0
	case 'G', '`': // CHA, HPA
		s.moveTo(s.row, n-1)
	case 'H', 'f': // CUP, HVP
		s.moveOrigin(n-1, s.arg(1, 1)-1)
	case 'd': // VPA
		s.moveOrigin(n-1, s.col)
	case 'I': // CHT
		s.tab(n)
	case 'Z': // CBT
		s.tab(-n)
	case 'J': // ED
		s.eraseDisplay(s.arg(0, 0))
	case 'K': // EL
		s.eraseLine(s.arg(0, 0))
	case 'L': // IL
		if s.row >= s.top && s.row <= s.bottom {
			s.scrollDown(s.row, s.bottom, n)
			s.col, s.wrapNext = 0, false
		}
	case 'M': // DL
		if s.row >= s.top && s.row <= s.bottom {
			s.scrollUp(s.row, s.bottom, n, false)
			s.col, s.wrapNext = 0, false
		}
	case 'P': // DCH
		s.shiftCells(s.row, s.col, -n)
	case 'S': // SU
		s.scrollUp(s.top, s.bottom, n, true)
	case 'T': // SD; with five parameters it is mouse tracking
		if s.nparam <= 1 {
			s.scrollDown(s.top, s.bottom, n)
		}
	case 'X': // ECH
		s.erase(s.row, s.col, min(s.col+n, s.cols))
	case 'b': // REP
		for range min(n, s.rows*s.cols) {
			if s.last == 0 {
				break
			}
			s.print(s.last)
		}
	case 'c': // DA1: a VT220 with colours
		s.reply("\x1b[?62;22c")
	case 'g': // TBC
		if m := s.arg(0, 0); m == 3 {
			clear(s.tabs)
		} else if m == 0 {
			s.tabs[s.col] = false
		}
	case 'h', 'l': // SM, RM
		s.setModes(final == 'h')
	case 'm': // SGR
		s.sgr()
	case 'n': // DSR
		s.reportStatus("\x1b[")
	case 'r': // DECSTBM
		top, bottom := n-1, min(s.arg(1, s.rows), s.rows)-1
		if s.arg(1, 0) == 0 {
			bottom = s.rows - 1
		}
		if top < bottom {
			s.top, s.bottom = top, bottom
			s.moveOrigin(0, 0)
		}
	case 's': // SCOSC
		s.saved = s.cursorState()
	case 'u': // SCORC
		s.restore(s.saved)
	case 't': // XTWINOPS
		s.windowOp()
	}
}

// csiMarked acts on control sequences with a private prefix or an intermediate byte.
func (s *Screen) csiMarked(final byte) {
	switch string([]byte{s.prefix, s.inter, final}) {
	case "?\x00h", "?\x00l":
		s.setModes(final == 'h')
	case "?\x00J":
		s.eraseDisplay(s.arg(0, 0))
	case "?\x00K":
		s.eraseLine(s.arg(0, 0))
	case "?\x00n":
		s.reportStatus("\x1b[?")
	case "?\x00u": // kitty keyboard flags: none
		s.reply("\x1b[?0u")
	case ">\x00c": // DA2
		s.reply("\x1b[>0;10;1c")
	case "=\x00c": // DA3
		s.reply("\x1bP!|00000000\x1b\\")
	case ">\x00q": // XTVERSION
		s.reply("\x1bP>|atlasbridge\x1b\\")
	case "\x00!p":
		s.softReset()
	case "?$p", "\x00$p": // DECRQM
		s.reportMode()
	}
}

func (s *Screen) setModes(on bool) {
	for i := range min(s.nparam, maxParams) {
		m := s.arg(i, 0)
		if s.prefix == 0 {
			switch m {
			case 4:
				s.insert = on
			case 20:
				s.newline = on
			}
			continue
		}
		switch m {
		case 1:
			s.appKeys = on
		case 3: // DECCOLM: the size stays, the rest of its effect is known to be relied on
			s.top, s.bottom = 0, s.rows-1
			s.eraseRows(0, s.rows)
			s.moveOrigin(0, 0)
		case 6:
			s.origin = on
			s.moveOrigin(0, 0)
		case 7:
			s.noWrap = !on
		case 25:
			s.hidden = !on
		case 47, 1047, 1049:
			s.useAlternate(on, m == 1049)
		case 1048:
			if on {
				s.saved = s.cursorState()
			} else {
				s.restore(s.saved)
			}
		case 2004:
			s.paste = on
		}
	}
}

// useAlternate switches between the screens. The alternate one is blank each time it comes up, as in tmux.
func (s *Screen) useAlternate(on, keepCursor bool) {
	if on == s.AltScreen() {
		return
	}
	if on {
		if keepCursor {
			s.savedAlt = s.cursorState()
		}
		s.grid = s.alternate
		s.eraseRows(0, s.rows)
		return
	}
	s.grid = s.primary
	if keepCursor {
		s.restore(s.savedAlt)
	}
}

func (s *Screen) cursorState() cursorState {
	return cursorState{s.row, s.col, s.wrapNext, s.pen, s.charset, s.shift, s.origin}
}

func (s *Screen) restore(c cursorState) {
	s.row, s.col = min(c.row, s.rows-1), min(c.col, s.cols-1)
	s.wrapNext = c.wrapNext && s.col == s.cols-1
	s.pen, s.charset, s.shift, s.origin = c.pen, c.charset, c.shift, c.origin
}

// sgr sets the pen. Colours come as 38;5;n, 38;2;r;g;b and with colons, 38:2::r:g:b.
func (s *Screen) sgr() {
	if s.nparam == 0 {
		s.params[0], s.nparam = 0, 1
	}
	n := min(s.nparam, maxParams)
	for i := 0; i < n; i++ {
		sub := i + 1
		for sub < n && s.colons>>sub&1 != 0 {
			sub++
		}
		p := s.arg(i, 0)
		switch f := &s.pen.flags; {
		case p == 0:
			s.pen = cell{}
		case p == 1:
			*f |= flagBold
		case p == 2:
			*f |= flagDim
		case p == 4 && sub > i+1 && s.arg(i+1, 0) == 0, p == 24:
			*f &^= flagUnderline
		case p == 4, p == 21:
			*f |= flagUnderline
		case p == 7:
			*f |= flagReverse
		case p == 22:
			*f &^= flagBold | flagDim
		case p == 27:
			*f &^= flagReverse
		case p >= 30 && p <= 37:
			s.pen.fg = int32(p - 30 + 1)
		case p >= 90 && p <= 97:
			s.pen.fg = int32(p - 90 + 8 + 1)
		case p >= 40 && p <= 47:
			s.pen.bg = int32(p - 40 + 1)
		case p >= 100 && p <= 107:
			s.pen.bg = int32(p - 100 + 8 + 1)
		case p == 39:
			s.pen.fg = 0
		case p == 49:
			s.pen.bg = 0
		case p == 38 || p == 48 || p == 58:
			c, next := s.colourArgs(i+1, sub, n)
			if p == 38 && c != 0 {
				s.pen.fg = c
			} else if p == 48 && c != 0 {
				s.pen.bg = c
			}
			i = next - 1
			continue
		}
		i = sub - 1
	}
}

// colourArgs reads a colour at parameter i; sub is the end of its colon group, n of all. 0: not a colour.
func (s *Screen) colourArgs(i, sub, n int) (c int32, next int) {
	end, rgb := n, i+1
	if sub > i {
		end = sub
		if sub-i > 4 {
			rgb = i + 2 // a colour space id comes first
		}
	}
	switch kind := s.arg(i, 0); {
	case kind == 5 && i+1 < end:
		c, next = int32(min(s.arg(i+1, 0), 255)+1), i+2
	case kind == 2 && rgb+2 < end:
		c, next = 1<<24, rgb+3
		for k := range 3 {
			c |= int32(min(s.arg(rgb+k, 0), 255)) << (16 - 8*k)
		}
	default:
		next = i + 1
	}
	if sub > i {
		next = sub
	}
	return c, next
}

/* ----- grid ----- */

// printASCII prints a run of printable ASCII. This is the path that has to be fast.
func (s *Screen) printASCII(p []byte) {
	s.last = rune(p[len(p)-1])
	if s.insert || s.charset[s.shift] == '0' {
		for _, b := range p {
			s.print(rune(b))
		}
		return
	}
	for len(p) > 0 {
		if s.wrapNext && !s.noWrap {
			s.wrap()
		}
		s.tr.touch(s)
		l, n := s.grid[s.row], min(len(p), s.cols-s.col)
		if l.wide {
			s.splitWide(l, s.col, s.col+n)
		}
		c := s.pen
		dst := l.cells[s.col : s.col+n]
		for i := range dst {
			c.ch = rune(p[i])
			dst[i] = c
		}
		if p = p[n:]; s.noWrap && len(p) > 0 { // what does not fit overwrites the last column
			dst[n-1].ch = rune(p[len(p)-1])
			p = nil
		}
		l.used = max(l.used, s.col+n)
		s.advance(n)
	}
}

func (s *Screen) advance(n int) {
	s.col += n
	if s.col >= s.cols {
		s.col, s.wrapNext = s.cols-1, true
	}
}

func (s *Screen) wrap() {
	s.grid[s.row].wrapped = true
	s.index()
	s.col, s.wrapNext = 0, false
}

// decGraphics is what the line drawing set shows for '`' to '~': https://vt100.net/docs/vt220-rm/table2-4.html
var decGraphics = []rune("◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")

// print puts one character at the cursor.
func (s *Screen) print(r rune) {
	if r >= '`' && r <= '~' && s.charset[s.shift] == '0' {
		r = decGraphics[r-'`']
	}
	w := runeWidth(r)
	if s.combine(r, w) || w == 0 || w > s.cols {
		return
	}
	s.last = r
	if s.wrapNext && !s.noWrap {
		s.wrap()
	}
	if s.col+w > s.cols {
		if s.noWrap {
			return
		}
		s.wrap()
	}
	s.tr.touch(s)
	if s.insert {
		s.shiftCells(s.row, s.col, w)
	}
	l, c := s.grid[s.row], s.pen
	if l.wide || w == 2 {
		s.splitWide(l, s.col, s.col+w)
	}
	c.ch = r
	if w == 2 {
		l.wide = true
		c.flags |= flagWide
		tail := s.pen
		tail.flags |= flagTail
		l.cells[s.col+1] = tail
	}
	l.cells[s.col] = c
	l.used = max(l.used, s.col+w)
	s.advance(w)
}

// combine adds a mark, or what follows a joiner, to the character before the cursor, and tells whether r is
// done with. Without a character before it, a mark vanishes.
func (s *Screen) combine(r rune, w int) bool {
	if r < 0x300 || s.col == 0 && !s.wrapNext {
		return false
	}
	modifier := r >= 0x1f3fb && r <= 0x1f3ff // skin tones
	col := s.col
	if !s.wrapNext {
		col--
	}
	l := s.grid[s.row]
	if l.cells[col].flags&flagTail != 0 && col > 0 {
		col--
	}
	c := &l.cells[col]
	if c.ch == 0 {
		return false
	}
	text := string(c.ch)
	if c.ch < 0 {
		text = s.clusters[-1-c.ch]
	}
	if w > 0 && !(modifier && len(text) > 1) && !strings.HasSuffix(text, "\u200d") {
		return false
	}
	if text += string(r); len(text) > maxCluster {
		return true
	}
	id, known := s.clusterIDs[text]
	if !known {
		if len(s.clusters) >= maxClusters {
			return true
		}
		s.clusters = append(s.clusters, text)
		id = rune(-len(s.clusters))
		s.clusterIDs[text] = id
	}
	c.ch = id
	return true
}

// splitWide blanks the halves of wide characters that would be left over when from ≤ column < to is rewritten.
func (s *Screen) splitWide(l *line, from, to int) {
	if l.cells[from].flags&flagTail != 0 && from > 0 {
		l.cells[from-1] = cell{bg: l.cells[from-1].bg}
	}
	if to < s.cols && l.cells[to].flags&flagTail != 0 {
		l.cells[to] = cell{bg: l.cells[to].bg}
	}
}

// index moves the cursor down, and scrolls at the bottom of the region.
func (s *Screen) index() {
	if s.row == s.bottom {
		s.scrollUp(s.top, s.bottom, 1, true)
	} else if s.row < s.rows-1 {
		s.row++
	}
}

// scrollUp moves the rows top to bottom up by n. Rows that leave the top of the primary screen may be kept.
func (s *Screen) scrollUp(top, bottom, n int, keep bool) {
	g := s.grid
	for range min(n, bottom-top+1) {
		l := g[top]
		if keep && top == 0 && !s.AltScreen() {
			s.scrollOut(l)
		}
		copy(g[top:bottom], g[top+1:bottom+1])
		g[bottom] = l
		s.blank(l)
	}
}

func (s *Screen) scrollDown(top, bottom, n int) {
	g := s.grid
	for range min(n, bottom-top+1) {
		l := g[bottom]
		copy(g[top+1:bottom+1], g[top:bottom])
		g[top] = l
		s.blank(l)
	}
}

func (s *Screen) scrollOut(l *line) {
	s.tr.scrolledOut(s, l)
	s.scrolled++
}

// blank clears a whole row in the pen's background.
func (s *Screen) blank(l *line) {
	clear(l.cells[:l.used])
	l.used, l.wide, l.wrapped = 0, false, false
	if s.pen.bg != 0 {
		for i := range l.cells {
			l.cells[i] = cell{bg: s.pen.bg}
		}
		l.used = s.cols
	}
}

// erase blanks the columns from ≤ c < to of a row in the pen's background.
func (s *Screen) erase(row, from, to int) {
	l := s.grid[row]
	if l.wide {
		s.splitWide(l, from, to)
	}
	if to >= s.cols {
		l.wrapped = false
	}
	blank := cell{bg: s.pen.bg}
	if blank.bg == 0 {
		to = min(to, l.used)
		if to == l.used {
			l.used = min(l.used, from)
		}
	} else {
		l.used = max(l.used, to)
	}
	for c := from; c < to; c++ {
		l.cells[c] = blank
	}
}

func (s *Screen) eraseRows(from, to int) {
	for _, l := range s.grid[from:to] {
		s.blank(l)
	}
}

func (s *Screen) eraseDisplay(mode int) {
	switch mode {
	case 0:
		s.tr.touch(s)
		s.eraseLine(0)
		s.eraseRows(s.row+1, s.rows)
	case 1:
		s.eraseRows(0, s.row)
		s.eraseLine(1)
	case 2:
		s.tr.cleared(s)
		s.eraseRows(0, s.rows)
	}
}

func (s *Screen) eraseLine(mode int) {
	switch mode {
	case 0:
		s.erase(s.row, s.col, s.cols)
	case 1:
		s.erase(s.row, 0, s.col+1)
	case 2:
		s.erase(s.row, 0, s.cols)
	}
}

// shiftCells moves the rest of a row from col on by n columns, to the left when negative.
func (s *Screen) shiftCells(row, col, n int) {
	l := s.grid[row]
	n = max(min(n, s.cols-col), col-s.cols)
	if l.wide {
		s.splitWide(l, col, col)
		if n < 0 {
			s.splitWide(l, col, col-n)
		} else {
			s.splitWide(l, s.cols-n, s.cols)
		}
	}
	l.used, l.wrapped = s.cols, false
	if n > 0 {
		copy(l.cells[col+n:], l.cells[col:s.cols-n])
		s.erase(row, col, col+n)
	} else {
		copy(l.cells[col:], l.cells[col-n:])
		s.erase(row, s.cols+n, s.cols)
	}
}

func (s *Screen) alignmentTest() {
	s.pen, s.top, s.bottom, s.origin = cell{}, 0, s.rows-1, false
	for _, l := range s.grid {
		s.blank(l)
		for c := range l.cells {
			l.cells[c].ch = 'E'
		}
		l.used = s.cols
	}
	s.moveTo(0, 0)
}

// moveTo places the cursor, kept inside the screen.
func (s *Screen) moveTo(row, col int) {
	s.row, s.col = min(max(row, 0), s.rows-1), min(max(col, 0), s.cols-1)
	s.wrapNext = false
}

// moveOrigin places the cursor relative to the scroll region when DECOM is set.
func (s *Screen) moveOrigin(row, col int) {
	if s.origin {
		row = min(max(row+s.top, s.top), s.bottom)
	}
	s.moveTo(row, col)
}

// moveBy moves up or down, stopping at the margin that it does not start behind.
func (s *Screen) moveBy(n int) {
	row := s.row + n
	if s.row >= s.top {
		row = max(row, s.top)
	}
	if s.row <= s.bottom {
		row = min(row, s.bottom)
	}
	s.moveTo(row, s.col)
}

// tab moves n tab stops to the right, to the left when negative.
func (s *Screen) tab(n int) {
	step := 1
	if n < 0 {
		step, n = -1, -n
	}
	col := s.col
	for ; n > 0 && col+step >= 0 && col+step < s.cols; n-- {
		col += step
		for col > 0 && col < s.cols-1 && !s.tabs[col] {
			col += step
		}
	}
	if col != s.col {
		s.moveTo(s.row, col)
	}
}

/* ----- strings and replies ----- */

func (s *Screen) reply(format string, args ...any) {
	if len(s.replies) < maxReplies {
		s.replies = fmt.Appendf(s.replies, format, args...)
	}
}

func (s *Screen) reportStatus(intro string) {
	switch s.arg(0, 0) {
	case 5:
		s.reply("%s0n", intro)
	case 6:
		row := s.row
		if s.origin {
			row -= s.top
		}
		s.reply("%s%d;%dR", intro, row+1, s.col+1)
	}
}

// reportMode answers DECRQM: 1 set, 2 reset, 0 not known.
func (s *Screen) reportMode() {
	m, mark := s.arg(0, 0), ""
	if s.prefix != 0 {
		mark = "?"
	}
	known := map[string]bool{"4": s.insert, "20": s.newline, "?1": s.appKeys, "?6": s.origin, "?7": !s.noWrap,
		"?25": !s.hidden, "?47": s.AltScreen(), "?1047": s.AltScreen(), "?1049": s.AltScreen(), "?2004": s.paste}
	state := 0
	if on, ok := known[mark+strconv.Itoa(m)]; ok && on {
		state = 1
	} else if ok {
		state = 2
	}
	s.reply("\x1b[%s%d;%d$y", mark, m, state)
}

// windowOp is XTWINOPS: sizes, with cells of 8 × 16 pixels, and the title stack.
func (s *Screen) windowOp() {
	switch s.arg(0, 0) {
	case 14:
		s.reply("\x1b[4;%d;%dt", s.rows*16, s.cols*8)
	case 16:
		s.reply("\x1b[6;16;8t")
	case 18:
		s.reply("\x1b[8;%d;%dt", s.rows, s.cols)
	case 22:
		if len(s.titles) < maxTitles {
			s.titles = append(s.titles, s.title)
		}
	case 23:
		if n := len(s.titles); n > 0 {
			s.title, s.titles = s.titles[n-1], s.titles[:n-1]
		}
	}
}

// endString acts on a complete string; end is the byte that ended it.
func (s *Screen) endString(end byte) {
	if s.kind == 'P' {
		switch { // XTGETTCAP and DECRQSS: not known, not valid
		case bytes.HasPrefix(s.str, []byte("+q")):
			s.reply("\x1bP0+r\x1b\\")
		case bytes.HasPrefix(s.str, []byte("$q")):
			s.reply("\x1bP0$r\x1b\\")
		}
	}
	if s.kind != ']' {
		return
	}
	st := "\x1b\\"
	if end == '\a' {
		st = "\a"
	}
	code, rest, _ := strings.Cut(strings.ToValidUTF8(string(s.str), "\ufffd"), ";")
	switch code {
	case "0", "2":
		s.title = rest
	case "4":
		s.paletteQuery(rest, st)
	case "10", "11", "12":
		if rest == "?" {
			s.reply("\x1b]%s;%s%s", code, map[string]string{"10": "rgb:e5e5/e5e5/e5e5",
				"11": "rgb:0000/0000/0000", "12": "rgb:e5e5/e5e5/e5e5"}[code], st)
		}
	case "9", "99", "777":
		s.notice(code, rest)
	case "7501":
		s.programStatus(rest)
	}
}

// paletteQuery answers OSC 4 ; n ; ? … with xterm's colours; the grey ramp stands for those above 15.
func (s *Screen) paletteQuery(rest, st string) {
	basic := [16]int{0x000000, 0xcd0000, 0x00cd00, 0xcdcd00, 0x0000ee, 0xcd00cd, 0x00cdcd, 0xe5e5e5,
		0x7f7f7f, 0xff0000, 0x00ff00, 0xffff00, 0x5c5cff, 0xff00ff, 0x00ffff, 0xffffff}
	args := strings.Split(rest, ";")
	for i := 0; i+1 < len(args); i += 2 {
		n, err := strconv.Atoi(args[i])
		if err != nil || args[i+1] != "?" || n < 0 || n > 255 {
			continue
		}
		c := n * 0x010101
		if n < len(basic) {
			c = basic[n]
		}
		r, g, b := c>>16, c>>8&255, c&255
		s.reply("\x1b]4;%d;rgb:%02x%02x/%02x%02x/%02x%02x%s", n, r, r, g, g, b, b, st)
	}
}

// notice keeps the text of a notification: OSC 9 ; text (but not 9;4 progress), OSC 777 ; notify ; title ;
// text, OSC 99 ; metadata ; text (https://sw.kovidgoyal.net/kitty/desktop-notifications/).
func (s *Screen) notice(code, rest string) {
	switch code {
	case "9":
		if n, _, _ := strings.Cut(rest, ";"); n == "4" {
			return
		}
	case "777":
		verb, text, _ := strings.Cut(rest, ";")
		if verb != "notify" {
			return
		}
		rest = strings.ReplaceAll(text, ";", ": ")
	case "99":
		meta, text, _ := strings.Cut(rest, ";")
		keys := strings.Split(meta, ":")
		if slices.Contains(keys, "p=?") || text == "" {
			return
		}
		if slices.Contains(keys, "e=1") {
			if b, err := base64.StdEncoding.DecodeString(text); err == nil {
				text = strings.ToValidUTF8(string(b), "\ufffd")
			}
		}
		rest = text
	}
	if rest != "" {
		s.status.Notice = rest
		s.status.Seq++
	}
}

// programStatus takes an OSC 7501 report, and answers the query that a program begins with.
func (s *Screen) programStatus(rest string) {
	if rest == "?" {
		if len(s.own) < maxReplies {
			s.own = append(s.own, "\x1b]7501;?\x1b\\"...)
		}
		s.reply("\x1b]7501;?\x1b\\")
		return
	}
	st := ProgramStatus{Seq: s.status.Seq + 1, Notice: s.status.Notice}
	for _, field := range strings.Split(rest, ":") {
		switch key, value, _ := strings.Cut(field, "="); key {
		case "state":
			st.State = value
		case "app":
			st.App = value
		case "kind":
			st.Kind = value
		case "msg":
			b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "="))
			if err == nil {
				st.Msg = strings.ToValidUTF8(string(b), "\ufffd")
			}
		}
	}
	if st.State != "" {
		s.status = st
	}
}

/* ----- width of characters ----- */

// wideRanges are the characters of two columns: East Asian Wide and Fullwidth, and emoji; unassigned gaps
// are joined. From wcwidth of glibc 2.36 (Unicode 15), which tmux uses.
var wideRanges = [][2]rune{
	{0x1100, 0x115f}, {0x231a, 0x231b}, {0x2329, 0x232a}, {0x23e9, 0x23ec}, {0x23f0, 0x23f0}, {0x23f3, 0x23f3},
	{0x25fd, 0x25fe}, {0x2614, 0x2615}, {0x2648, 0x2653}, {0x267f, 0x267f}, {0x2693, 0x2693}, {0x26a1, 0x26a1},
	{0x26aa, 0x26ab}, {0x26bd, 0x26be}, {0x26c4, 0x26c5}, {0x26ce, 0x26ce}, {0x26d4, 0x26d4}, {0x26ea, 0x26ea},
	{0x26f2, 0x26f3}, {0x26f5, 0x26f5}, {0x26fa, 0x26fa}, {0x26fd, 0x26fd}, {0x2705, 0x2705}, {0x270a, 0x270b},
	{0x2728, 0x2728}, {0x274c, 0x274c}, {0x274e, 0x274e}, {0x2753, 0x2755}, {0x2757, 0x2757}, {0x2795, 0x2797},
	{0x27b0, 0x27b0}, {0x27bf, 0x27bf}, {0x2b1b, 0x2b1c}, {0x2b50, 0x2b50}, {0x2b55, 0x2b55}, {0x2e80, 0x3029},
	{0x302e, 0x303e}, {0x3041, 0x3096}, {0x309b, 0xa4c6}, {0xa960, 0xa97c}, {0xac00, 0xd7a3}, {0xf900, 0xfad9},
	{0xfe10, 0xfe19}, {0xfe30, 0xfe6b}, {0xff01, 0xff60}, {0xffe0, 0xffe6}, {0x16fe0, 0x16fe3}, {0x16ff0, 0x1b2fb},
	{0x1f004, 0x1f004}, {0x1f0cf, 0x1f0cf}, {0x1f18e, 0x1f18e}, {0x1f191, 0x1f19a}, {0x1f200, 0x1f320}, {0x1f32d,
		0x1f335}, {0x1f337, 0x1f37c}, {0x1f37e, 0x1f393}, {0x1f3a0, 0x1f3ca}, {0x1f3cf, 0x1f3d3}, {0x1f3e0, 0x1f3f0},
	{0x1f3f4, 0x1f3f4}, {0x1f3f8, 0x1f43e}, {0x1f440, 0x1f440}, {0x1f442, 0x1f4fc}, {0x1f4ff, 0x1f53d}, {0x1f54b,
		0x1f54e}, {0x1f550, 0x1f567}, {0x1f57a, 0x1f57a}, {0x1f595, 0x1f596}, {0x1f5a4, 0x1f5a4}, {0x1f5fb, 0x1f64f},
	{0x1f680, 0x1f6c5}, {0x1f6cc, 0x1f6cc}, {0x1f6d0, 0x1f6d2}, {0x1f6d5, 0x1f6df}, {0x1f6eb, 0x1f6ec}, {0x1f6f4,
		0x1f6fc}, {0x1f7e0, 0x1f7f0}, {0x1f90c, 0x1f93a}, {0x1f93c, 0x1f945}, {0x1f947, 0x1f9ff}, {0x1fa70, 0x1faf6},
	{0x20000, 0x3134a},
}

// runeWidth is the number of columns of r: 0, 1 or 2.
func runeWidth(r rune) int {
	switch {
	case r < 0x80:
		return 1
	case r < 0x300:
		if r < 0xa0 {
			return 0
		}
		return 1
	case r >= 0x1100:
		i, found := slices.BinarySearchFunc(wideRanges, r, func(x [2]rune, r rune) int {
			if r < x[0] {
				return 1
			} else if r > x[1] {
				return -1
			}
			return 0
		})
		if found && i >= 0 && !unicode.Is(unicode.Mn, r) {
			return 2
		}
	}
	if r >= 0x1160 && r <= 0x11ff || r >= 0xd7b0 && r <= 0xd7fb || // Hangul vowels and finals
		unicode.In(r, unicode.Mn, unicode.Me) ||
		unicode.Is(unicode.Cf, r) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r) {
		return 0
	}
	return 1
}

/* ----- transcript ----- */

// transcript is filled in below.
type transcript struct{}

func (t *transcript) touch(s *Screen)                {}
func (t *transcript) cleared(s *Screen)              {}
func (t *transcript) scrolledOut(s *Screen, l *line) {}

// Transcript returns the text that became final since the last call.
func (s *Screen) Transcript(settle bool) (final []string, live string) { return nil, "" }
