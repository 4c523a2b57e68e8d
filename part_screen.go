package main

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Screen is what the terminal shows: a parser over a grid of cells, fed with the child's bytes cut anywhere.
// Pure: no I/O, no clock. One goroutine uses it. Whatever comes in, its memory stays within fixed limits.
//
// The parser is the state machine of https://vt100.net/emu/dec_ansi_parser, simplified as today's terminals are:
// text is UTF-8; the 8-bit C1 controls do not exist (0x9C is part of ✳, not ST); an OSC also ends on BEL; any
// ESC ends a string and begins a sequence; ESC k (screen's title) is a string. What sequences do is in
// https://invisible-island.net/xterm/ctlseqs/ctlseqs.html; the text is what tmux shows.
// There is no scrollback, no reflow, no 132 columns and no graphics.
type Screen struct {
	rows, cols      int
	state           uint8
	utf             [utf8.UTFMax]byte // the beginning of a character whose end is not here yet
	utfLen          int
	prefix, inter   byte // of a control sequence: one of < = > ?, and the intermediate byte
	params          [maxParams]int32
	nparam          int
	colons          uint32 // bit i: parameter i came after a colon
	kind            byte   // of a string: ] P X ^ _ k
	str             []byte
	cursor                 // the one in use
	saved, savedAlt cursor // by DECSC; by mode 1049
	screens         [2][]*line
	grid            []*line // the one in use
	alt             bool    // it is the second, the alternate screen
	top, bottom     int     // scroll region, inclusive
	last            rune    // for REP
	insert, newline bool    // IRM, LNM
	noWrap, hidden  bool    // DECAWM and DECTCEM off
	appKeys, paste  bool
	tabs            []bool
	clusters        []string // what cells with a negative rune show
	clusterIDs      map[string]rune
	scrolled, bells int
	title           string
	titles          []string // pushed by XTWINOPS 22
	status          ProgramStatus
	replies, own    []byte // what a terminal would have answered; the part that the host terminal will not answer
	tr              transcript
}

// cursor is where and how the next character is written: what DECSC saves.
type cursor struct {
	row, col int
	wrapNext bool // it stands behind the last column
	pen      cell
	charset  [2]byte // what G0 and G1 are: '0' is line drawing
	shift    int     // which of them is in use
	origin   bool    // rows count from the top of the scroll region
}

// Attr is how the cell is drawn: enough to tell a highlighted choice from the others.
type Attr struct {
	Bold, Dim, Reverse, Underline bool
	FG, BG                        int32 // −1 default, 0–255 palette, else 1<<24|rgb
}

// ProgramStatus is what a program last reported of itself: OSC 7501 (the Program Status Protocol, measured with Claude
// Code and Codex), and the last notification (OSC 9, 99, 777). Seq rises with every report: a repeat is seen as one.
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

// The flags of a cell; flagTail is the right half of a wide character.
const flagBold, flagDim, flagReverse, flagUnderline, flagTail uint8 = 1, 2, 4, 8, 16

// line is a row of the grid. Cells from used on are blank, so that clearing costs what was written.
type line struct {
	cells   []cell
	used    int
	wrapped bool // the text goes on in the next row
	wide    bool // may hold wide characters
}

// The limits of what output can make us keep. Real sequences have up to 20 parameters, strings 1 KiB (measured).
const (
	maxSize     = 2000  // rows and columns
	maxParams   = 32    // of a control sequence; the rest is ignored, as in xterm (30)
	maxParam    = 65535 // value of one
	maxString   = 16384 // bytes of a string; of a longer one the rest is ignored
	maxReplies  = 4096  // bytes waiting for TakeReplies; what comes after is not answered
	maxTitles   = 10    // xterm's depth of the title stack
	maxCluster  = 32    // bytes of one character with all its marks (tmux: UTF8_SIZE)
	maxClusters = 16384 // different ones
)

// newScreen is an empty screen of rows × cols, both at least 1.
func newScreen(rows, cols int) *Screen {
	s := &Screen{clusterIDs: map[string]rune{}}
	s.Resize(rows, cols)
	s.reset()
	return s
}

// Resize changes the size without reflow: rows are added at the bottom; they are taken from below the cursor, then
// from the top, which scrolls out.
func (s *Screen) Resize(rows, cols int) {
	rows, cols = min(max(rows, 1), maxSize), min(max(cols, 1), maxSize)
	for i, g := range s.screens {
		c := &s.cursor
		if s.alt && i == 0 {
			c = &s.savedAlt
		}
		up := min(max(0, c.row-rows+1), len(g))
		for r := range up * (1 - i) {
			s.scrollOut(g[r])
		}
		c.row, c.col = min(c.row-up, rows-1), min(c.col, cols-1)
		s.screens[i] = make([]*line, rows)
		for r := range s.screens[i] {
			l := &line{cells: make([]cell, cols)}
			if s.screens[i][r] = l; r+up < len(g) {
				from := g[r+up]
				l.used, l.wide = min(copy(l.cells, from.cells), from.used), from.wide
				l.wrapped = from.wrapped && cols == s.cols
				if cols < s.cols && from.cells[cols].flags&flagTail != 0 {
					l.cells[cols-1] = cell{}
				}
			}
		}
	}
	for c := len(s.tabs); c < cols; c++ {
		s.tabs = append(s.tabs, c%8 == 0)
	}
	s.tabs, s.wrapNext = s.tabs[:cols], s.wrapNext && cols == s.cols
	s.rows, s.cols, s.top, s.bottom = rows, cols, 0, rows-1
	s.show(s.alt)
}

func (s *Screen) show(alt bool) {
	if s.alt, s.grid = alt, s.screens[0]; alt {
		s.grid = s.screens[1]
	}
}

// reset is RIS: everything as at the start, but what was counted or reported so far.
func (s *Screen) reset() {
	s.softReset()
	s.restore(s.saved)
	for _, alt := range []bool{true, false} {
		s.show(alt)
		s.eraseRows(0, s.rows)
	}
	for c := range s.tabs {
		s.tabs[c] = c > 0 && c%8 == 0
	}
}

// softReset is DECSTR.
func (s *Screen) softReset() {
	s.top, s.bottom, s.saved = 0, s.rows-1, cursor{}
	s.pen, s.charset, s.shift, s.origin = cell{}, [2]byte{}, 0, false
	s.insert, s.newline, s.noWrap, s.hidden, s.appKeys, s.paste = false, false, false, false, false, false
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
	return string(bytes.TrimRight(s.text(nil, s.grid[r]), " "))
}

// text appends what a row shows to b.
func (s *Screen) text(b []byte, l *line) []byte {
	b = slices.Grow(b, l.used+l.used/2)
	for i := range l.cells[:l.used] {
		switch c := &l.cells[i]; {
		case c.flags&flagTail != 0:
		case c.ch < 0:
			b = append(b, s.clusters[-1-c.ch]...)
		default:
			b = utf8.AppendRune(b, max(c.ch, ' '))
		}
	}
	return b
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
	on := func(f uint8) bool { return x.flags&f != 0 }
	a := Attr{on(flagBold), on(flagDim), on(flagReverse), on(flagUnderline), x.fg, x.bg}
	for _, colour := range []*int32{&a.FG, &a.BG} {
		if *colour < 1<<24 {
			*colour--
		}
	}
	switch {
	case on(flagTail):
		return 0, a
	case x.ch < 0:
		x.ch, _ = utf8.DecodeRuneInString(s.clusters[-1-x.ch])
	}
	return max(x.ch, ' '), a
}

// Text is all rows joined with "\n", trailing empty rows removed.
func (s *Screen) Text() string {
	var all []byte
	for _, l := range s.grid {
		all = append(bytes.TrimRight(s.text(all, l), " "), '\n')
	}
	return string(bytes.TrimRight(all, "\n"))
}

// Scrolled counts the lines that left the top of the primary screen, so that Scrolled()+row names a line for good.
func (s *Screen) Scrolled() int         { return s.scrolled }
func (s *Screen) Title() string         { return s.title } // OSC 0 / 2
func (s *Screen) AltScreen() bool       { return s.alt }
func (s *Screen) BracketedPaste() bool  { return s.paste }   // DECSET 2004
func (s *Screen) AppCursorKeys() bool   { return s.appKeys } // DECCKM: arrows are ESC O A, not ESC [ A
func (s *Screen) Status() ProgramStatus { return s.status }
func (s *Screen) Bell() int             { return s.bells } // BELs seen outside of strings

// TakeReplies returns and forgets what a terminal would have answered to the queries seen so far. answerAll (no host
// terminal): DSR, DA, colours, XTVERSION, DECRQM, sizes…; otherwise only OSC 7501, which no host is expected to know.
func (s *Screen) TakeReplies(answerAll bool) []byte {
	out := s.own
	if answerAll {
		out = s.replies
	}
	s.own, s.replies = nil, nil
	return out
}

/* ----- parser ----- */

const stGround, stEscape, stEscapeInter, stCSI, stOSC, stString, nStates uint8 = 0, 1, 2, 3, 4, 5, 6

type transition struct {
	do   func(*Screen, byte)
	next uint8
}

// parseTable gives what each byte does in each state, and the next state. A malformed control sequence ends up with a
// prefix or an intermediate byte that no sequence has.
var parseTable = buildParseTable()

func buildParseTable() (t [nStates][256]transition) {
	on := func(st uint8, lo, hi int, do func(*Screen, byte), next uint8) {
		for b := lo; b <= hi; b++ {
			t[st][b] = transition{do, next}
		}
	}
	for st := stGround; st < nStates; st++ {
		on(st, 0x00, 0xff, nil, st)
		if st < stOSC {
			on(st, 0x00, 0x1f, (*Screen).execute, st)
		} else {
			on(st, 0x20, 0xff, (*Screen).put, st)
		}
		on(st, 0x18, 0x18, nil, stGround) // CAN
		on(st, 0x1a, 0x1a, nil, stGround) // SUB
		on(st, 0x1b, 0x1b, (*Screen).begin, stEscape)
	}
	on(stEscape, 0x20, 0x2f, (*Screen).collect, stEscapeInter)
	on(stEscape, 0x30, 0x7e, (*Screen).escape, stGround)
	on(stEscape, '[', '[', nil, stCSI)
	on(stEscape, ']', ']', (*Screen).begin, stOSC)
	for _, b := range "PX^_k" {
		on(stEscape, int(b), int(b), (*Screen).begin, stString)
	}
	on(stEscapeInter, 0x20, 0x2f, (*Screen).collect, stEscapeInter)
	on(stEscapeInter, 0x30, 0x7e, (*Screen).escape, stGround)
	on(stCSI, 0x20, 0x2f, (*Screen).collect, stCSI)
	on(stCSI, 0x30, 0x3b, (*Screen).param, stCSI)
	on(stCSI, 0x3c, 0x3f, (*Screen).collect, stCSI)
	on(stCSI, 0x40, 0x7e, (*Screen).csi, stGround)
	on(stOSC, 0x07, 0x07, (*Screen).begin, stGround)
	return t
}

// Write feeds bytes of the child. It never fails.
func (s *Screen) Write(p []byte) (int, error) {
	for i := 0; i < len(p); {
		switch b := p[i]; {
		case s.state == stGround && (s.utfLen > 0 || b >= 0x80):
			i += s.decode(p[i:])
		case s.state == stGround && b >= 0x20 && b < 0x7f:
			n := i + 1
			for n < len(p) && p[n] >= 0x20 && p[n] < 0x7f {
				n++
			}
			s.printASCII(p[i:n])
			i = n
		default:
			t := &parseTable[s.state][b]
			if s.state = t.next; t.do != nil {
				t.do(s, b)
			}
			i++
		}
	}
	return len(p), nil
}

// decode prints the character that p goes on with, or keeps the beginning of one, and returns how many bytes it used.
// What is broken shows as one U+FFFD, up to the byte that breaks it.
func (s *Screen) decode(p []byte) int {
	if r, n := utf8.DecodeRune(p); s.utfLen == 0 && n > 1 {
		s.print(r)
		return n
	}
	s.utf[s.utfLen] = p[0]
	part, used := s.utf[:s.utfLen+1], 0
	if p[0] >= 0x80 && !utf8.FullRune(part) {
		s.utfLen++
		return 1
	}
	r, n := utf8.DecodeRune(part)
	if n == len(part) {
		used = 1
	} else {
		r = utf8.RuneError
	}
	s.utfLen = 0
	s.print(r)
	return used
}

// begin ends a string, if b does, and begins a sequence or a string, if b does.
func (s *Screen) begin(b byte) {
	if s.kind != 0 && (b == 0x1b || b == '\a') {
		s.endString(b)
	}
	s.prefix, s.inter, s.nparam, s.colons, s.params[0] = 0, 0, 0, 0, -1
	if s.kind, s.str = 0, s.str[:0]; b != 0x1b && b != '\a' {
		s.kind = b
	}
}

func (s *Screen) put(b byte) {
	if len(s.str) < maxString {
		s.str = append(s.str, b)
	}
}

func (s *Screen) collect(b byte) {
	if b >= 0x3c {
		s.prefix = b
	} else {
		s.inter = b
	}
}

// param adds one byte of a parameter list. An empty parameter is −1.
func (s *Screen) param(b byte) {
	s.nparam = max(s.nparam, 1)
	switch {
	case s.nparam > maxParams:
	case b >= ':':
		if s.nparam++; s.nparam <= maxParams {
			s.params[s.nparam-1] = -1
			s.colons |= uint32(';'-b) << (s.nparam - 1)
		}
	default:
		p := &s.params[s.nparam-1]
		*p = min(max(*p, 0)*10+int32(b-'0'), maxParam)
	}
}

// arg is parameter i, or def when it is absent; an explicit 0 counts as absent unless def is 0.
func (s *Screen) arg(i, def int) int {
	if i >= min(s.nparam, maxParams) || s.params[i] < int32(min(def, 1)) {
		return def
	}
	return int(s.params[i])
}

func (s *Screen) execute(b byte) {
	s.last = 0
	switch b {
	case '\a':
		s.bells++
	case '\b':
		s.moveTo(s.row, s.col-1)
	case '\t':
		s.tab(1)
	case '\n', '\v', '\f':
		s.grid[s.row].wrapped = false
		if s.index(1); s.newline {
			s.moveTo(s.row, 0)
		}
	case '\r':
		s.moveTo(s.row, 0)
	case 0x0e, 0x0f: // SO, SI
		s.shift = int(0x0f - b)
	}
}

// escape acts on a complete escape sequence. The names, here and below, are those of xterm's list.
func (s *Screen) escape(b byte) {
	s.last = 0
	if f := markedSequences[[3]byte{0x1b, s.inter, b}]; f != nil {
		f(s)
	} else if s.inter == '(' || s.inter == ')' { // SCS
		s.charset[s.inter-'('] = b
	}
}

// alignmentTest fills the screen with E.
func (s *Screen) alignmentTest() {
	s.top, s.bottom, s.origin, s.pen = 0, s.rows-1, false, cell{}
	for r, l := range s.grid {
		s.blank(l)
		s.moveTo(r, 0)
		s.printASCII(bytes.Repeat([]byte("E"), s.cols))
	}
	s.moveTo(0, 0)
}

// csi acts on a complete control sequence.
func (s *Screen) csi(final byte) {
	n := s.arg(0, 1)
	if s.prefix != 0 || s.inter != 0 {
		if f := markedSequences[[3]byte{s.prefix, s.inter, final}]; f != nil {
			f(s)
		}
	} else if f := sequences[final]; f != nil {
		f(s, n)
	}
	for n = min(n, s.rows*s.cols); final == 'b' && n > 0 && s.last != 0; n-- { // REP
		s.print(s.last)
	}
	s.last = 0
}

// sequences are the control sequences without a mark. n is the first parameter, 1 when it is absent or 0.
var sequences = [128]func(s *Screen, n int){
	'@': func(s *Screen, n int) { s.shiftCells(n) },                                     // ICH
	'A': func(s *Screen, n int) { s.moveBy(-n, s.col) },                                 // CUU
	'B': func(s *Screen, n int) { s.moveBy(n, s.col) },                                  // CUD
	'C': func(s *Screen, n int) { s.moveTo(s.row, s.col+n) },                            // CUF
	'D': func(s *Screen, n int) { s.moveTo(s.row, s.col-n) },                            // CUB
	'E': func(s *Screen, n int) { s.moveBy(n, 0) },                                      // CNL
	'F': func(s *Screen, n int) { s.moveBy(-n, 0) },                                     // CPL
	'G': func(s *Screen, n int) { s.moveTo(s.row, n-1) },                                // CHA
	'H': func(s *Screen, n int) { s.moveOrigin(n-1, s.arg(1, 1)-1) },                    // CUP
	'I': func(s *Screen, n int) { s.tab(n) },                                            // CHT
	'J': func(s *Screen, n int) { s.eraseDisplay(s.arg(0, 0)) },                         // ED
	'K': func(s *Screen, n int) { s.eraseLine(s.arg(0, 0)) },                            // EL
	'L': func(s *Screen, n int) { s.scrollFromCursor(-n) },                              // IL
	'M': func(s *Screen, n int) { s.scrollFromCursor(n) },                               // DL
	'P': func(s *Screen, n int) { s.shiftCells(-n) },                                    // DCH
	'S': func(s *Screen, n int) { s.scroll(s.top, n) },                                  // SU
	'T': func(s *Screen, n int) { s.scroll(s.top, -n) },                                 // SD
	'X': func(s *Screen, n int) { s.erase(s.grid[s.row], s.col, min(s.col+n, s.cols)) }, // ECH
	'Z': func(s *Screen, n int) { s.tab(-n) },                                           // CBT
	'`': func(s *Screen, n int) { s.moveTo(s.row, n-1) },                                // HPA
	'a': func(s *Screen, n int) { s.moveTo(s.row, s.col+n) },                            // HPR
	'c': func(s *Screen, n int) { s.reply("\x1b[?62;22c") },                             // DA1: a VT220 with colours
	'd': func(s *Screen, n int) { s.moveOrigin(n-1, s.col) },                            // VPA
	'e': func(s *Screen, n int) { s.moveBy(n, s.col) },                                  // VPR
	'f': func(s *Screen, n int) { s.moveOrigin(n-1, s.arg(1, 1)-1) },                    // HVP
	'g': func(s *Screen, n int) { s.clearTabs(s.arg(0, 0)) },                            // TBC
	'h': func(s *Screen, n int) { s.setModes(true) },                                    // SM
	'l': func(s *Screen, n int) { s.setModes(false) },                                   // RM
	'm': func(s *Screen, n int) { s.sgr() },                                             // SGR
	'n': func(s *Screen, n int) { s.reportStatus("\x1b[") },                             // DSR
	'r': func(s *Screen, n int) { s.setRegion(n-1, min(s.arg(1, s.rows), s.rows)-1) },   // DECSTBM
	's': func(s *Screen, n int) { s.saved = s.cursor },                                  // SCOSC
	't': func(s *Screen, n int) { s.windowOp() },                                        // XTWINOPS
	'u': func(s *Screen, n int) { s.restore(s.saved) },                                  // SCORC
}

// markedSequences are those with a private prefix, an intermediate byte, or both, and those of ESC without a CSI.
var markedSequences = map[[3]byte]func(*Screen){
	{0x1b, 0, '7'}:   func(s *Screen) { s.saved = s.cursor },                   // DECSC
	{0x1b, 0, '8'}:   func(s *Screen) { s.restore(s.saved) },                   // DECRC
	{0x1b, 0, 'c'}:   (*Screen).reset,                                          // RIS
	{0x1b, 0, 'D'}:   func(s *Screen) { s.index(1) },                           // IND
	{0x1b, 0, 'E'}:   func(s *Screen) { s.index(1); s.moveTo(s.row, 0) },       // NEL
	{0x1b, 0, 'H'}:   func(s *Screen) { s.tabs[s.col] = true },                 // HTS
	{0x1b, 0, 'M'}:   func(s *Screen) { s.index(-1); s.wrapNext = false },      // RI
	{0x1b, '#', '8'}: (*Screen).alignmentTest,                                  // DECALN
	{'?', 0, 'h'}:    func(s *Screen) { s.setModes(true) },                     // DECSET
	{'?', 0, 'l'}:    func(s *Screen) { s.setModes(false) },                    // DECRST
	{'?', 0, 'J'}:    func(s *Screen) { s.eraseDisplay(s.arg(0, 0)) },          // DECSED
	{'?', 0, 'K'}:    func(s *Screen) { s.eraseLine(s.arg(0, 0)) },             // DECSEL
	{'?', 0, 'n'}:    func(s *Screen) { s.reportStatus("\x1b[?") },             // DECXCPR
	{'?', 0, 'u'}:    func(s *Screen) { s.reply("\x1b[?0u") },                  // kitty's keyboard flags: none
	{'>', 0, 'c'}:    func(s *Screen) { s.reply("\x1b[>0;10;1c") },             // DA2
	{'=', 0, 'c'}:    func(s *Screen) { s.reply("\x1bP!|00000000\x1b\\") },     // DA3
	{'>', 0, 'q'}:    func(s *Screen) { s.reply("\x1bP>|atlasbridge\x1b\\") },  // XTVERSION
	{0, '!', 'p'}:    (*Screen).softReset,                                      // DECSTR
	{'?', '$', 'p'}:  func(s *Screen) { s.reply("\x1b[?%d;0$y", s.arg(0, 0)) }, // DECRQM: not known
}

// screenModes are what SM and RM switch; those of DECSET and DECRST have '?'.
var screenModes = map[[2]int]func(s *Screen, on bool){
	{0, 4}:      func(s *Screen, on bool) { s.insert = on },
	{0, 20}:     func(s *Screen, on bool) { s.newline = on },
	{'?', 1}:    func(s *Screen, on bool) { s.appKeys = on },
	{'?', 3}:    func(s *Screen, _ bool) { s.setRegion(0, s.rows-1); s.eraseRows(0, s.rows) }, // not the size
	{'?', 6}:    func(s *Screen, on bool) { s.origin = on; s.moveOrigin(0, 0) },
	{'?', 7}:    func(s *Screen, on bool) { s.noWrap, s.wrapNext = !on, s.wrapNext && on },
	{'?', 25}:   func(s *Screen, on bool) { s.hidden = !on },
	{'?', 47}:   func(s *Screen, on bool) { s.useAlternate(on, false) },
	{'?', 1047}: func(s *Screen, on bool) { s.useAlternate(on, false) },
	{'?', 1049}: func(s *Screen, on bool) { s.useAlternate(on, true) },
	{'?', 2004}: func(s *Screen, on bool) { s.paste = on },
}

func (s *Screen) setModes(on bool) {
	for i := range min(s.nparam, maxParams) {
		if f := screenModes[[2]int{int(s.prefix), s.arg(i, 0)}]; f != nil {
			f(s, on)
		}
	}
}

// useAlternate switches between the screens. The alternate one is blank each time it comes up, as in tmux.
func (s *Screen) useAlternate(on, keepCursor bool) {
	switch {
	case on && !s.alt:
		s.savedAlt = s.cursor
		s.tr.tell(s, s.paragraph())
		s.show(true)
		s.eraseRows(0, s.rows)
	case !on && s.alt:
		s.show(false)
		if keepCursor {
			s.restore(s.savedAlt)
		}
	}
}

func (s *Screen) restore(c cursor) {
	s.cursor = c
	s.moveTo(c.row, c.col)
	s.wrapNext = c.wrapNext && s.col == s.cols-1
}

// sgrFlags are the attributes that SGR 1 … 27 turn on and off.
var sgrFlags = [28]struct{ on, off uint8 }{
	1: {flagBold, 0}, 2: {flagDim, 0}, 4: {flagUnderline, 0}, 7: {flagReverse, 0},
	21: {flagUnderline, 0}, 22: {0, flagBold | flagDim}, 24: {0, flagUnderline}, 27: {0, flagReverse},
}

// sgr sets the pen. What colons join is one attribute.
func (s *Screen) sgr() {
	list := s.params[:min(max(s.nparam, 1), maxParams)]
	for i, next := 0, 0; i < len(list); i = next {
		for next = i + 1; next < len(list) && s.colons>>next&1 != 0; next++ {
		}
		p, c := max(list[i], 0), &s.pen.fg
		if p/10 == 4 || p/10 == 10 {
			c = &s.pen.bg
		}
		switch {
		case p == 0:
			s.pen = cell{}
		case p == 4 && next > i+1 && list[i+1] == 0: // 4:0
			s.pen.flags &^= flagUnderline
		case int(p) < len(sgrFlags):
			s.pen.flags = s.pen.flags&^sgrFlags[p].off | sgrFlags[p].on
		case p == 38 || p == 48 || p == 58:
			args, colons := list[i+1:], next > i+1
			if colons {
				args = list[i+1 : next]
			}
			colour, used := extendedColour(args, colons)
			if next = max(next, i+1+used); p != 58 && colour != 0 {
				*c = colour
			}
		case p == 39 || p == 49:
			*c = 0
		case p >= 30 && p <= 47 && p%10 < 8:
			*c = p%10 + 1
		case p >= 90 && p <= 107 && p%10 < 8:
			*c = p%10 + 8 + 1
		}
	}
}

// extendedColour reads 5;n or 2;r;g;b, with colons also 2:space:r:g:b, and tells how many parameters it used. What
// is not a colour is 0, and uses up the rest.
func extendedColour(p []int32, colons bool) (colour int32, used int) {
	if colons && len(p) > 4 {
		p = slices.Delete(slices.Clone(p), 1, 2)
	}
	at := func(i int) int32 { return min(max(p[i], 0), 255) }
	switch {
	case len(p) >= 2 && p[0] == 5:
		return at(1) + 1, 2
	case len(p) >= 4 && p[0] == 2:
		return 1<<24 | at(1)<<16 | at(2)<<8 | at(3), 4
	}
	return 0, len(p)
}

/* ----- grid ----- */

// printASCII prints a run of printable ASCII. This is the path that has to be fast.
func (s *Screen) printASCII(p []byte) {
	if s.insert || s.charset[s.shift] == '0' {
		for _, b := range p {
			s.print(rune(b))
		}
		return
	}
	s.last = rune(p[len(p)-1])
	for len(p) > 0 {
		l := s.writable(1)
		n := min(len(p), s.cols-s.col)
		if l.wide {
			s.splitWide(l, s.col, s.col+n)
		}
		c, dst := s.pen, l.cells[s.col:s.col+n]
		for i := range dst {
			c.ch = rune(p[i])
			dst[i] = c
		}
		if p = p[n:]; s.noWrap && len(p) > 0 { // what does not fit overwrites the last column
			dst[n-1].ch = s.last
			p = nil
		}
		s.advance(l, n)
	}
}

// decGraphics is what the line drawing set shows for '`' to '~': https://vt100.net/docs/vt220-rm/table2-4.html
var decGraphics = []rune("◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")

// print puts one character at the cursor.
func (s *Screen) print(r rune) {
	if r >= '`' && r <= '~' && s.charset[s.shift] == '0' {
		r = decGraphics[r-'`']
	}
	w := runeWidth(r)
	if r >= 0x300 && s.combine(r, w) || w == 0 || w > s.cols {
		return
	}
	l := s.writable(w)
	if s.last = r; s.col+w > s.cols {
		return
	}
	if s.insert {
		s.shiftCells(w)
	}
	if l.wide = l.wide || w == 2; l.wide {
		s.splitWide(l, s.col, s.col+w)
	}
	c := s.pen
	c.ch = r
	if l.cells[s.col] = c; w == 2 {
		c.flags |= flagTail
		l.cells[s.col+1] = c
	}
	s.advance(l, w)
}

// writable is the cursor's row, after wrapping when w columns do not fit.
func (s *Screen) writable(w int) *line {
	if s.wrapNext || s.col+w > s.cols && !s.noWrap {
		s.grid[s.row].wrapped = true
		s.index(1)
		s.moveTo(s.row, 0)
	}
	s.tr.touch(s, s.row)
	return s.grid[s.row]
}

func (s *Screen) advance(l *line, n int) {
	s.col += n
	if l.used = max(l.used, s.col); s.col >= s.cols {
		s.col, s.wrapNext = s.cols-1, !s.noWrap
	}
}

// combine adds a mark, or what follows a joiner, to the character before the cursor, and tells whether it did.
func (s *Screen) combine(r rune, w int) bool {
	l, col := s.grid[s.row], s.col
	if !s.wrapNext {
		col--
	}
	if col > 0 && l.cells[col].flags&flagTail != 0 {
		col--
	}
	if col < 0 || w > 0 && l.cells[col].ch >= 0 {
		return false
	}
	c := &l.cells[col]
	text := string(max(c.ch, ' '))
	if c.ch < 0 {
		text = s.clusters[-1-c.ch]
	}
	if w > 0 && !strings.HasSuffix(text, "\u200d") {
		return false
	}
	text += string(r)
	if s.clusterIDs[text] == 0 && len(text) <= maxCluster && len(s.clusters) < maxClusters {
		s.clusters = append(s.clusters, text)
		s.clusterIDs[text] = rune(-len(s.clusters))
	}
	if id := s.clusterIDs[text]; id != 0 {
		c.ch, l.used = id, max(l.used, col+1)
	}
	return true
}

// splitWide blanks the halves of wide characters that would be left over when from ≤ column < to is rewritten.
func (s *Screen) splitWide(l *line, from, to int) {
	if from > 0 && l.cells[from].flags&flagTail != 0 {
		l.cells[from-1] = cell{bg: l.cells[from-1].bg}
	}
	if to < s.cols && l.cells[to].flags&flagTail != 0 {
		l.cells[to] = cell{bg: l.cells[to].bg}
	}
}

// index moves the cursor down (1) or up (−1), and scrolls at the edge of the region.
func (s *Screen) index(n int) {
	if n > 0 && s.row == s.bottom || n < 0 && s.row == s.top {
		s.scroll(s.top, n)
	} else {
		s.row = min(max(s.row+n, 0), s.rows-1)
	}
}

// scrollFromCursor deletes n rows at the cursor, or inserts them when negative.
func (s *Screen) scrollFromCursor(n int) {
	if s.row >= s.top && s.row <= s.bottom {
		s.tr.touch(s, s.row)
		s.scroll(s.row, n)
		s.moveTo(s.row, 0)
	}
}

// scroll moves the rows from top to the bottom of the region up by n, or down when negative.
func (s *Screen) scroll(top, n int) {
	region := s.grid[top : s.bottom+1]
	out := n > 0 && top == 0 && !s.alt
	if !out {
		s.tr.touch(s, top)
	} else if s.bottom < s.rows-1 { // the rows below stay, so their numbers change
		s.tr.touch(s, s.bottom+1)
	}
	for range min(max(n, -n), len(region)) {
		l := region[0]
		if out {
			s.scrollOut(l)
		}
		if n > 0 {
			copy(region, region[1:])
			region[len(region)-1] = l
		} else {
			l = region[len(region)-1]
			copy(region[1:], region)
			region[0] = l
		}
		s.blank(l)
	}
}

// scrollOut counts a row that leaves the top of the primary screen.
func (s *Screen) scrollOut(l *line) {
	s.tr.add(s, l, s.scrolled)
	s.scrolled++
}

// blank clears a whole row in the pen's background.
func (s *Screen) blank(l *line) {
	l.wide = false
	s.erase(l, 0, s.cols)
}

func (s *Screen) eraseRows(from, to int) {
	for _, l := range s.grid[from:to] {
		s.blank(l)
	}
}

// erase blanks the columns from ≤ c < to of a row in the pen's background.
func (s *Screen) erase(l *line, from, to int) {
	if l.wide {
		s.splitWide(l, from, to)
	}
	l.wrapped = l.wrapped && to < s.cols
	if s.pen.bg == 0 && to >= l.used {
		to, l.used = max(l.used, from), min(l.used, from)
	}
	clear(l.cells[from:to])
	for c := from; c < to && s.pen.bg != 0; c++ {
		l.cells[c].bg, l.used = s.pen.bg, max(l.used, to)
	}
}

func (s *Screen) eraseLine(mode int) {
	if spans := [][2]int{{s.col, s.cols}, {0, s.col + 1}, {0, s.cols}}; mode < len(spans) {
		s.erase(s.grid[s.row], spans[mode][0], spans[mode][1])
	}
}

func (s *Screen) eraseDisplay(mode int) {
	if mode == 2 || mode == 0 && s.row == 0 && s.col == 0 {
		s.tr.cleared(s)
	}
	if spans := [][2]int{{s.row + 1, s.rows}, {0, s.row}, {0, s.rows}}; mode < len(spans) {
		s.eraseRows(spans[mode][0], spans[mode][1])
	}
	s.eraseLine(mode)
}

// shiftCells moves the rest of the row, from the cursor on, by n columns; to the left when negative.
func (s *Screen) shiftCells(n int) {
	l, col := s.grid[s.row], s.col
	n = max(min(n, s.cols-col), col-s.cols)
	s.splitWide(l, col, col+max(-n, 0))
	l.used, l.wrapped = s.cols, false
	from, to := col, col+n // what becomes free
	if n > 0 {
		s.splitWide(l, s.cols-n, s.cols)
		copy(l.cells[to:], l.cells[col:s.cols-n])
	} else {
		from, to = s.cols+n, s.cols
		copy(l.cells[col:], l.cells[col-n:])
	}
	clear(l.cells[from:to])
	s.erase(l, from, to)
}

// moveTo places the cursor, kept inside the screen.
func (s *Screen) moveTo(row, col int) {
	s.row, s.col, s.wrapNext = min(max(row, 0), s.rows-1), min(max(col, 0), s.cols-1), false
}

// moveOrigin places the cursor relative to the scroll region when DECOM is set.
func (s *Screen) moveOrigin(row, col int) {
	if s.origin {
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

func (s *Screen) setRegion(top, bottom int) {
	if top < bottom {
		s.top, s.bottom = top, bottom
		s.moveOrigin(0, 0)
	}
}

// tab moves n tab stops to the right, to the left when negative.
func (s *Screen) tab(n int) {
	step := max(min(n, 1), -1)
	for ; n != 0; n -= step {
		for c := s.col + step; c >= 0 && c < s.cols; c += step {
			if s.moveTo(s.row, c); s.tabs[c] {
				break
			}
		}
	}
}

func (s *Screen) clearTabs(what int) {
	if what == 3 {
		clear(s.tabs)
	} else if what == 0 {
		s.tabs[s.col] = false
	}
}

/* ----- strings and replies ----- */

func (s *Screen) reply(format string, args ...any) {
	if len(s.replies) < maxReplies {
		s.replies = fmt.Appendf(s.replies, format, args...)
	}
}

func (s *Screen) reportStatus(intro string) {
	switch row := s.row + 1; s.arg(0, 0) {
	case 5:
		s.reply("%s0n", intro)
	case 6:
		if s.origin {
			row -= s.top
		}
		s.reply("%s%d;%dR", intro, row, s.col+1)
	}
}

// windowOp is XTWINOPS: sizes, with cells of 8 × 16 pixels, and the title stack.
func (s *Screen) windowOp() {
	switch n := len(s.titles); s.arg(0, 0) {
	case 14:
		s.reply("\x1b[4;%d;%dt", s.rows*16, s.cols*8)
	case 16:
		s.reply("\x1b[6;16;8t")
	case 18:
		s.reply("\x1b[8;%d;%dt", s.rows, s.cols)
	case 22:
		s.titles = append(s.titles, s.title)[:min(n+1, maxTitles)]
	case 23:
		if n > 0 {
			s.title, s.titles = s.titles[n-1], s.titles[:n-1]
		}
	}
}

// endString acts on a complete string; end is the byte that ended it.
func (s *Screen) endString(end byte) {
	code, rest, _ := strings.Cut(strings.ToValidUTF8(string(s.str), "\ufffd"), ";")
	if s.kind == 'P' && len(code) > 1 && (code[:2] == "+q" || code[:2] == "$q") { // XTGETTCAP, DECRQSS: not known
		s.reply("\x1bP0%cr\x1b\\", code[0])
	}
	if s.kind != ']' {
		return
	}
	switch code {
	case "0", "2":
		s.title = rest
	case "4", "10", "11", "12":
		s.reportColours(code, rest, end)
	case "9", "99", "777":
		s.notice(code, rest)
	case "7501":
		s.programStatus(rest)
	}
}

// reportColours answers OSC 10, 11, 12 (text, background, cursor) and 4 ; n ; ? …: light on black, and a palette
// in which the bits of n are red, green and blue.
func (s *Screen) reportColours(code, rest string, end byte) {
	args, st := strings.Split(rest, ";"), "\x1b\\"
	if end == '\a' {
		st = "\a"
	}
	if code != "4" {
		args = []string{map[string]string{"10": "7", "11": "0", "12": "7"}[code], rest}
	}
	for i := 1; i < len(args); i += 2 {
		n, err := strconv.Atoi(args[i-1])
		if err != nil || args[i] != "?" {
			continue
		}
		if s.reply("\x1b]%s;", code); code == "4" {
			s.reply("%d;", n)
		}
		s.reply("rgb:%04x/%04x/%04x%s", n&1*0xcdcd, n>>1&1*0xcdcd, n>>2&1*0xcdcd, st)
	}
}

// notice keeps the text of a notification: OSC 9 ; text (9 ; 4 is progress), OSC 777 ; notify ; title ; text,
// OSC 99 ; metadata ; text (https://sw.kovidgoyal.net/kitty/desktop-notifications/).
func (s *Screen) notice(code, text string) {
	head, tail, _ := strings.Cut(text, ";")
	switch meta := ":" + head + ":"; {
	case code == "9" && head == "4", code == "777" && head != "notify", strings.Contains(meta, ":p=?:"):
		return
	case code == "777":
		text = strings.ReplaceAll(tail, ";", ": ")
	case code == "99":
		if text = tail; strings.Contains(meta, ":e=1:") {
			text = fromBase64(tail)
		}
	}
	if text != "" {
		s.status.Notice, s.status.Seq = text, s.status.Seq+1
	}
}

// programStatus takes an OSC 7501 report, and answers the query that a program begins with.
func (s *Screen) programStatus(rest string) {
	if rest == "?" {
		s.reply("\x1b]7501;?\x1b\\")
		if len(s.own) < maxReplies {
			s.own = append(s.own, "\x1b]7501;?\x1b\\"...)
		}
	}
	f := map[string]string{}
	for _, field := range strings.Split(rest, ":") {
		key, value, _ := strings.Cut(field, "=")
		f[key] = value
	}
	if f["state"] != "" {
		msg := fromBase64(f["msg"])
		s.status = ProgramStatus{f["state"], f["app"], f["kind"], msg, s.status.Seq + 1, s.status.Notice}
	}
}

// fromBase64 is what text encodes, padded or not, or nothing.
func fromBase64(text string) string {
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(text, "="))
	if err != nil {
		return ""
	}
	return strings.ToValidUTF8(string(b), "\ufffd")
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

// runeWidth is the number of columns of r: 0, 1 or 2. C1 controls and marks have none.
func runeWidth(r rune) int {
	switch {
	case r >= 0x80 && r < 0xa0:
		return 0
	case r < 0x300 || r >= 0x2500 && r < 0x25fd: // the latter are frames and blocks, the most frequent by far
		return 1
	case r >= 0x1160 && r <= 0x11ff || r >= 0xd7b0 && r <= 0xd7fb, // Hangul vowels and finals
		unicode.In(r, unicode.Mn, unicode.Me),
		unicode.Is(unicode.Cf, r) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r):
		return 0
	}
	i := sort.Search(len(wideRanges), func(i int) bool { return wideRanges[i][1] >= r })
	if i < len(wideRanges) && wideRanges[i][0] <= r {
		return 2
	}
	return 1
}

/* ----- transcript ----- */

// transcript turns the screen into lines of text, each told once. Rows of the primary screen have numbers that never
// change: Scrolled()+row. A row is final when it has scrolled out, or when the cursor's paragraph is below it, unless
// the program has gone back to write above: from there on it repaints, and rows are final only by scrolling out or by
// settling. What is written where something was told before, after the screen was cleared, or on the alternate
// screen, is compared with the lines last told, and only what is new counts.
type transcript struct {
	on          bool
	next        int // number of the first row that is not told
	high        int // below this number something was told before
	floor       int // the program repaints from this row on
	replay      bool
	part        []byte // the beginning of a wrapped line that has scrolled out
	pending     []string
	bytes, left int  // in pending; lines that did not fit there
	again       bool // some of pending may have been told before
	recent      []string
}

const (
	noFloor      = 1 << 62
	maxPending   = 20000   // lines kept for the next call; of more, the oldest are left out, and counted in a line
	maxPendBytes = 4 << 20 // bytes of them
	maxLine      = 1 << 16 // bytes of one line; a longer one is told in pieces
	maxRecent    = 1000    // lines compared: some screens
	maxCompared  = 200     // lines compared with those in one step
)

// touch notes that the program writes to a row.
func (t *transcript) touch(s *Screen, row int) {
	if n := s.scrolled + row; t.on && n < t.next && !s.alt {
		for ; row > 0 && s.grid[row-1].wrapped; row-- {
			n--
		}
		t.next, t.floor = n, min(t.floor, n)
	}
}

// cleared takes what an erased primary screen showed as final.
func (t *transcript) cleared(s *Screen) {
	if t.on && !s.alt {
		end := s.rows
		for end > 0 && s.Row(end-1) == "" {
			end--
		}
		t.tell(s, end)
		t.next, t.floor, t.part, t.replay = s.scrolled, s.scrolled, nil, true
	}
}

// tell takes the rows above end as final, as far as they are not being repainted.
func (t *transcript) tell(s *Screen, end int) {
	for row := max(t.next-s.scrolled, 0); row < min(end, t.floor-s.scrolled); row++ {
		t.add(s, s.grid[row], s.scrolled+row)
	}
}

// add takes row number n as final.
func (t *transcript) add(s *Screen, l *line, n int) {
	if !t.on || n < t.next {
		return
	}
	t.part, t.next = s.text(t.part, l), n+1
	if l.wrapped && len(t.part) < maxLine {
		return
	}
	text := strings.TrimRight(string(t.part), " ")
	t.pending, t.bytes, t.part = append(t.pending, text), t.bytes+len(text), t.part[:0]
	t.again, t.high = t.again || t.replay || n < t.high, max(t.high, t.next)
	for len(t.pending) > maxPending || t.bytes > maxPendBytes {
		t.bytes -= len(t.pending[0])
		t.pending, t.left = t.pending[1:], t.left+1
	}
}

// paragraph is the row where the text under the cursor begins.
func (s *Screen) paragraph() int {
	row := s.row
	for row > 0 && s.grid[row-1].wrapped {
		row--
	}
	return row
}

// Transcript returns the text that became final since the last call, in lines and each once, and the part that may
// still change (the live part). Lines that left the screen, and lines above the cursor's paragraph on the primary
// screen, are final; on the alternate screen nothing is final until settle (the tool's turn is over), when what is new
// on it since the last settle is returned. The first call turns it on: what has scrolled out before is not kept. Of
// more than 20,000 lines or 4 MiB between two calls the oldest are left out, and a line says how many.
func (s *Screen) Transcript(settle bool) (final []string, live string) {
	t := &s.tr
	if !t.on {
		t.on, t.next, t.floor = true, s.scrolled, noFloor
	}
	if settle || t.floor+s.rows <= s.scrolled { // it has gone on for a whole screen
		t.floor = noFloor
	}
	if !s.alt {
		t.tell(s, s.paragraph())
		rest := slices.Clone(t.part)
		for row := max(t.next-s.scrolled, 0); row < s.rows; row++ {
			if rest = s.text(rest, s.grid[row]); !s.grid[row].wrapped {
				rest = append(bytes.TrimRight(rest, " "), '\n')
			}
		}
		live = strings.TrimRight(string(rest), "\n ")
	} else if settle {
		t.again, t.pending = true, append(t.pending, strings.Split(s.Text(), "\n")...)
	}
	if t.left > 0 {
		final = append(final, fmt.Sprintf("[… %d lines left out …]", t.left))
	}
	final = append(final, t.take()...)
	t.pending, t.bytes, t.left, t.again = nil, 0, 0, false
	return final, live
}

// take is what of pending is new. Compared, rules and blanks are never new.
func (t *transcript) take() (lines []string) {
	told := t.pending
	if t.again {
		told = slices.DeleteFunc(told, func(l string) bool {
			return strings.IndexFunc(l, func(r rune) bool { return unicode.In(r, unicode.L, unicode.N) }) < 0
		})
	}
	for batch := range slices.Chunk(told, maxCompared) {
		fresh := batch
		if t.again {
			fresh = unseen(t.recent, batch)
		}
		lines, t.recent = append(lines, fresh...), append(t.recent, batch...)
		t.recent = t.recent[max(0, len(t.recent)-maxRecent):]
	}
	t.replay = t.replay && len(lines) < len(told)
	return lines
}

// unseen is what is left of b without its longest common subsequence with a.
func unseen(a, b []string) (left []string) {
	w := len(b) + 1
	common := make([]uint16, (len(a)+1)*w) // of a[i:] and b[j:], at i*w+j
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if common[i*w+j] = max(common[(i+1)*w+j], common[i*w+j+1]); a[i] == b[j] {
				common[i*w+j] = common[(i+1)*w+j+1] + 1
			}
		}
	}
	for i, j := 0, 0; j < len(b); {
		switch {
		case i < len(a) && a[i] == b[j]:
			i, j = i+1, j+1
		case i < len(a) && common[(i+1)*w+j] >= common[i*w+j+1]:
			i++
		default:
			left = append(left, b[j])
			j++
		}
	}
	return left
}
