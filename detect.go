// detect.go turns a child's bytes into questions: Screen is what the terminal shows, Detector looks at it over time,
// the adapters say what is known of each tool, the Prompt Lab replays recordings. What the screen shows decides, near
// the cursor and once the output has settled; never the raw bytes. What the tool says of itself (OSC 7501, its title)
// comes first: nothing is asked while it works. The terminal's state confirms a pattern, and refutes it where nobody
// reads. Silence, with spinners masked, makes no more than a guess. A choice that grants something is never a default.
// Nothing here types, sends or reads a clock: time is an argument. Only the lab touches files.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// A worked example: claude, which reads keys with its cursor hidden, has painted this.
//
//	6  ────────────────────────────────────────────
//	7   Bash command
//	8
//	9     touch a
//	10
//	11  Do you want to proceed?
//	12  ❯ 1. Yes
//	13    2. No
//	14
//	15  Esc to cancel
//
// The parser has put the bytes into the cells of a Screen. readRow makes of each row a viewRow: 6 is a rule over all
// of the width, where a dialog begins (top); 12 has the pointer "❯", the number "1", the label "Yes"; 13 no pointer.
// The readers are asked in their order. readIdle: the cursor is in no empty input box. readGroup goes up from the last
// row: column(13) is no group, for nothing marks that row; column(12) grows over 13, whose number is the next one, and
// has its pointer at the first option. Of the reasons "a row says how to choose" holds: row 15 names Escape. menu makes
// the two choices, whose keys are their digits, for claude's row in the table of adapters says that a digit chooses at
// once. describe finds the dialog's top, takes rows 7 to 15 as the region, "Do you want to proceed?" as the question;
// finish finds that "Yes" grants and "No" is all of a refusal: that may be chosen when nobody answers. Once the masked
// screen has been still for settle, Tick returns the Prompt, and then looks only for its end.
//
// How it decides stands in the table readers, in reason (lists), ruleOf and ruleOfWords (lines), and in finish.

// ---- screen ----
// What the terminal shows, in bounded memory: a parser over a grid of cells.

// Limits of what output can make us keep. Real strings have up to 1 KiB (measured).
const (
	maxRows       = 500     // of the model: a terminal on a 4K screen has 180; all that it shows is in the last of them
	maxCols       = 1000    // such a terminal has 640; what a larger one shows beyond is not looked at
	maxParam      = 65535   // value of a parameter
	maxString     = 16384   // bytes of a string or sequence; number of parameters
	maxReplies    = 4096    // bytes of answers that wait for TakeReplies
	maxMarks      = 28      // bytes combined with a character; tmux has 32 together with it
	maxMarkSets   = 1000    // different combinations of marks
	maxStatuses   = 16      // reports and titles of one piece of output
	maxScrollback = 120     // rows that have left the screen: about 12 KiB
	leastFlood    = 1 << 16 // bytes written at once, from which on lines may scroll through unread
	maxFlood      = 1 << 18 // bytes of which that is decided together
	maxLine       = 1 << 14 // bytes told as one line
	maxRecent     = 1000    // lines told that a new one is compared with
	maxPending    = 4 << 20 // bytes of lines kept for the next Transcript
	lineCost      = 64      // bytes that each of them costs besides its text
)

// States of the parser. In a string it is the byte that began it: ] P X ^ _ or k.
const (
	inText     = 0
	inEscape   = 0x1b // an ESC came
	inSequence = '['  // a control sequence
)

// Modes of DECSET: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
const (
	modeAppCursor = 1    // DECCKM: arrows are ESC O A, not ESC [ A
	modeAutowrap  = 7    // DECAWM
	modeCursor    = 25   // DECTCEM: it shows
	modePaste     = 2004 // a paste is bracketed

	modeOther = 2027 // stands for all above
)

// anyRow is the row in which an answer is typed to a dialog: whichever the next line feed ends.
var anyRow = &line{}

// Screen is what the terminal shows, fed with the child's bytes cut anywhere. The parser is that of
// https://vt100.net/emu/dec_ansi_parser as today's terminals are: text is UTF-8; no 8-bit C1
// controls (0x9C is part of ✳, not ST); an OSC also ends on BEL; any ESC, and a line feed, ends a string. The text
// is what tmux shows. One goroutine at a time uses it.
type Screen struct {
	rows, cols  int
	top, bottom int // the scroll region, inclusive
	*page           // the one in use
	primary     page
	alternate   page
	saved       cursor              // by DECSC
	base        *cell               // the character just written, for marks and REP; else nil
	marks       []string            // the combinations of them so far, none first
	markSets    map[string]int      // where each of them is there
	modes       [modeOther + 1]bool // by number
	insert      bool                // IRM: what is printed moves the rest of its row

	state  byte   // of the parser
	params []int  // of the last control sequence, 0 where empty
	seq    []byte // a string, or a sequence without its parameters
	input  []byte // the beginning of a character

	replies []byte // that wait for TakeReplies
	title   string
	status  ProgramStatus   // the last report of OSC 7501
	reports []ProgramStatus // of the program and its title, that a detector has not taken yet
	tr      transcript

	scrolled       int                  // rows that left the primary screen at its top
	scrollback     [maxScrollback]*line // the last of them, row n at n % maxScrollback
	scrollbackFrom int                  // the first that still belongs to what stands on the screen
	lost           bool                 // rows of what stands on the alternate screen left it at its top
	answering      *line                // row in which an answer is typed; anyRow; nil none

	changes uint // writes, and rows that were left since: so many so far
	sizes   int  // it has had so far

	widths [512]rune // characters printed lately, each with its width in two bits below it
	moved  []*line   // by scroll: kept for the next time
	built  []byte    // a row's text: kept for the next row
}

// page is one of the two screens.
type page struct {
	cursor
	grid []*line
}

// cursor is what DECSC saves.
type cursor struct {
	row, col int
	charset  [2]byte // G0 and G1: '0' is line drawing
	shift    int     // the one in use
	wrapNext bool    // it stands behind the last column
	pen      Attr
}

// line is one row. What is erased to its end is not written before somebody looks, so that no sequence costs more than
// the row that it is in.
type line struct {
	cells  []cell
	end    int   // cells from here on are not written yet: blanks
	ground int32 // in that background
	cut    bool  // what stood at its end is lost: the screen became narrower
	asked  int   // cells from its left that showed a question when that was answered, not written since: see anew
	history

	stale bool     // shown is not what it shows any more
	shown string   // see text
	lit   bool     // a cell has a background, is reversed or a cursor's block
	row   *viewRow // as it was read when it last showed that
}

// history is what has become of a row since it was blank.
type history struct {
	wrapped  bool // it goes on in the next row
	told     bool // it is in the transcript
	again    bool // it was, before it was written anew
	answered bool // it was answered, or left: what stands above belongs to earlier questions (see lineBefore)
}

// cell is one place of the grid.
type cell struct {
	ch    rune   // 0 blank
	marks uint16 // index of what combines with it: no pointer, so that the collector skips the grid
	wide  bool   // it covers the next cell, which is blank
	Attr
}

// Attr is how a cell is drawn, enough to tell a highlighted choice from the others. A colour is 0 for the default, 1 to
// 256 of the palette, else 1<<24|rgb: the zero value is a blank in the default ones.
type Attr struct {
	Bold      bool
	Dim       bool
	Underline bool
	Reverse   bool
	FG        int32
	BG        int32
}

// ProgramStatus is a report of OSC 7501, as tools send it (measured), or a title.
type ProgramStatus struct {
	Title string
	State string // idle, working, blocked, done, error, clear; "" none came
	Kind  string // permission, question or auth, when blocked
	Msg   string
}

// newScreen returns a blank screen, of one row and column at least.
func newScreen(rows, cols int) *Screen {
	s := &Screen{marks: []string{""}, markSets: map[string]int{}}
	s.Resize(rows, cols)
	s.reset()
	return s
}

// Resize lets rows come and go below the cursor; what does not fit then scrolls out.
func (s *Screen) Resize(rows, cols int) {
	rows = min(max(rows, 1), maxRows)
	cols = min(max(cols, 1), maxCols)
	s.sizes++
	inUse := s.page
	for _, p := range []*page{&s.primary, &s.alternate} {
		s.page = p
		s.resizePage(rows, cols)
	}
	s.page = inUse
	s.saved.clamp(rows, cols, cols == s.cols)
	if cols != s.cols { // its rows have another width
		s.scrollback = [maxScrollback]*line{}
	}
	s.rows, s.cols = rows, cols
	s.bottom = rows - 1
}

// resizePage makes the page in use that large. The region is all of it then.
func (s *Screen) resizePage(rows, cols int) {
	s.top, s.bottom = 0, s.rows-1
	s.scroll(0, max(s.row-rows+1, 0))
	for len(s.grid) < rows {
		s.grid = append(s.grid, &line{})
	}
	s.grid = s.grid[:rows]
	for _, l := range s.grid {
		l.writeTo(len(l.cells))
		l.cut = l.cut || len(l.cells) > cols && s.part(l.cells[cols:]) != ""
		l.cells = append(l.cells, make([]cell, cols)...)[:cols]
		l.end = cols
		l.stale = true
		l.row = nil
		l.wrapped = l.wrapped && cols == s.cols
		l.mend(cols)
	}
	s.clamp(rows, cols, cols == s.cols)
}

// clamp moves the cursor into a screen of that size. It wraps no more where the width is another.
func (c *cursor) clamp(rows, cols int, sameWidth bool) {
	c.row = min(c.row, rows-1)
	c.col = min(c.col, cols-1)
	c.wrapNext = c.wrapNext && sameWidth
}

// reset is RIS: everything is as at the start, but what was counted or reported so far.
func (s *Screen) reset() {
	s.page = &s.primary
	s.insert = false
	s.modes = [modeOther + 1]bool{modeAutowrap: true, modeCursor: true}
	s.top, s.bottom = 0, s.rows-1
	s.cursor = cursor{}
	s.saved = cursor{}
	s.erase(0, s.rows*s.cols)
}

// Row is the text of row r from 0 as tmux capture-pane -p prints it.
func (s *Screen) Row(r int) string { return s.trimmed(s.grid[r]) }

// Text is that of all rows, without the empty ones at the end.
func (s *Screen) Text() string {
	rows := make([]string, len(s.grid))
	for r := range rows {
		rows[r] = s.Row(r)
	}
	return strings.TrimRight(strings.Join(rows, "\n"), "\n")
}

// trimmed is what the row shows, without the spaces at its end.
func (s *Screen) trimmed(l *line) string { return strings.TrimRight(s.text(l), " ") }

// text is what the row shows, up to the last character written.
func (s *Screen) text(l *line) string {
	if !l.stale {
		return l.shown
	}
	s.built = s.appendText(s.built[:0], l.cells[:l.end])
	if string(s.built) != l.shown {
		l.shown = string(s.built)
		l.row = nil
	}
	l.stale = false
	l.lit = l.ground != 0 && l.end < len(l.cells) || anyLit(l.cells[:l.end])
	return l.shown
}

// part is what these cells of a row show.
func (s *Screen) part(cells []cell) string { return string(s.appendText(nil, cells)) }

// appendText appends what the cells show, up to the last character written.
func (s *Screen) appendText(text []byte, cells []cell) []byte {
	end := len(cells)
	for end > 0 && cells[end-1].ch == 0 {
		end--
	}
	for i := range end {
		c := &cells[i]
		switch {
		case i > 0 && cells[i-1].wide:
		case c.ch < utf8.RuneSelf:
			text = append(text, byte(max(c.ch, ' ')))
		default:
			text = utf8.AppendRune(text, c.ch)
		}
		if c.marks != 0 {
			text = append(text, s.marks[c.marks]...)
		}
	}
	return text
}

// anyLit reports whether a cell has a background, is reversed or a cursor's block.
func anyLit(cells []cell) bool {
	for i := range cells {
		c := &cells[i]
		if c.BG != 0 || c.Reverse || c.ch > 0x2500 && strings.ContainsRune(cursorBlocks, c.ch) {
			return true
		}
	}
	return false
}

// writeTo writes the cells of the row that are not written yet, up to before column col.
func (l *line) writeTo(col int) {
	if col <= l.end {
		return
	}
	blank(l.cells[l.end:col], l.ground)
	l.end = col
}

// blank makes the cells blanks in that background.
func blank(cells []cell, ground int32) {
	clear(cells)
	for c := range cells {
		cells[c].BG = ground
	}
}

// attr is how a cell is drawn; outside of the screen as a blank.
func (s *Screen) attr(row, col int) Attr {
	if row < 0 || row >= s.rows || col < 0 || col >= s.cols {
		return Attr{}
	}
	return s.grid[row].cells[col].Attr
}

// AltScreen reports whether the alternate screen is in use.
func (s *Screen) AltScreen() bool { return s.page == &s.alternate }

// ---- parser ----
// Bytes become characters, control characters and sequences. None of it can fail.

// Write takes the child's next bytes.
func (s *Screen) Write(b []byte) {
	s.changes++
	p := b
	if len(s.input) > 0 { // a character was cut
		p = append(s.input, b...)
	}
	n := s.take(p)
	s.input = bytes.Clone(p[n:])
}

// WriteFlood is Write. Where p is more lines of text than are kept, and there is no transcript, those of which nothing
// is left in the end are not read.
func (s *Screen) WriteFlood(p []byte) {
	for len(p) >= leastFlood {
		n := 1 + bytes.LastIndexByte(p[:min(len(p), maxFlood)], '\n')
		if n == 0 {
			break // one long line
		}
		s.Write(p[s.scrollThrough(p[:n]):n])
		p = p[n:]
	}
	s.Write(p)
}

// scrollThrough takes the lines at the beginning of p of which nothing is left when all of p is written, unread, and
// returns their length: all but as many as are kept, if p is plain text and all of the screen scrolls.
func (s *Screen) scrollThrough(p []byte) int {
	whole := s.top == 0 && s.bottom == s.rows-1
	has := func(b byte) bool { return bytes.IndexByte(p, b) >= 0 } // ten times as fast as ContainsAny
	if s.tr.on || s.state != inText || !whole || slices.ContainsFunc([]byte("\x1b\x0e\x0f"), has) {
		return 0
	}
	end := len(p)
	for n := 0; n <= s.rows+maxScrollback && end > 0; n++ {
		end = bytes.LastIndexByte(p[:end], '\n')
	}
	if end < 1 || p[end-1] != '\r' {
		return 0
	}
	s.moveTo(s.row, 0)
	return end + 1
}

// take takes bytes, and returns how many: not the beginning of a character that they end with.
func (s *Screen) take(b []byte) int {
	p := b
	for len(p) > 0 {
		n := 1
		switch {
		case s.state == inText && p[0] >= 0x20:
			n = s.print(p)
		case s.state == inSequence && p[0] >= 0x20:
			n = s.sequence(p)
		case s.state == inText && p[0] < 0x18:
			s.controlCharacter(p[0])
		case s.state == inText && len(p) > 1 && p[0] == 0x1b && p[1] == inSequence:
			s.seq = s.seq[:0]
			s.beginString(inSequence)
			n = 2
		default:
			s.control(p[0])
		}
		if n == 0 {
			break // the rest of the character is still to come
		}
		p = p[n:]
	}
	return len(b) - len(p)
}

// control takes a control character, or one byte of a string or of another sequence than a control sequence.
func (s *Screen) control(b byte) {
	inString := s.state > inEscape && s.state != inSequence
	switch {
	case b == 0x18, b == 0x1a: // CAN, SUB
		s.state = inText
	case b == 0x1b:
		s.endString(b)
		s.state = inEscape
		s.seq = s.seq[:0]
	case b == '\a' && s.state == ']':
		s.endString(b)
		s.state = inText
	case b == '\n' && inString: // it never ended
		s.state = inText
		s.controlCharacter(b)
	case b < 0x20 && !inString:
		s.controlCharacter(b)
	case b < 0x20, b >= 0x7f && !inString:
	case inString, b < 0x30:
		if len(s.seq) < maxString {
			s.seq = append(s.seq, b)
		}
	case len(s.seq) == 0 && (b == inSequence || strings.IndexByte("]PX^_k", b) >= 0):
		s.beginString(b)
	default:
		s.state = inText
		s.escapeSequence(append(s.seq, b))
		s.base = nil
	}
}

// beginString begins a string, or a control sequence.
func (s *Screen) beginString(b byte) {
	s.state = b
	s.params = append(s.params[:0], 0)
}

// sequence takes what p begins with of a control sequence, no control character, and returns how much that is.
func (s *Screen) sequence(p []byte) int {
	n := s.parameters(p)
	if n == len(p) || p[n] < 0x20 {
		return n
	}
	b := p[n]
	switch {
	case b >= 0x7f:
	case b < 0x40:
		if len(s.seq) < maxString {
			s.seq = append(s.seq, b)
		}
	default:
		s.state = inText
		s.controlSequence(append(s.seq, b))
		s.base = nil
	}
	return n + 1
}

// parameters takes the digits and semicolons that p begins with, and returns how many those are.
func (s *Screen) parameters(p []byte) int {
	last := len(s.params) - 1
	value := s.params[last]
	n := 0
	for n < len(p) {
		b := p[n]
		if b == ';' && last < maxString-1 {
			s.params[last] = value
			s.params = append(s.params, 0)
			value = 0
			last++
		} else if b >= '0' && b <= '9' {
			value = min(value*10+int(b-'0'), maxParam)
		} else {
			break
		}
		n++
	}
	s.params[last] = value
	return n
}

// controlCharacter acts on a character below 0x20.
func (s *Screen) controlCharacter(b byte) {
	s.base = nil
	switch b {
	case '\b':
		s.moveTo(s.row, s.col-1)
	case '\t':
		s.moveTo(s.row, (s.col/8+1)*8)
	case '\n', '\v', '\f':
		s.lineFeed()
	case '\r':
		s.moveTo(s.row, 0)
	case 0x0e: // SO
		s.shift = 1
	case 0x0f: // SI
		s.shift = 0
	}
}

// escapeSequence acts on a sequence that is not a control sequence, given without its ESC.
func (s *Screen) escapeSequence(seq []byte) {
	if seq[0] == '(' || seq[0] == ')' { // SCS
		s.charset[seq[0]-'('] = seq[1]
	}
	switch string(seq) {
	case "7": // DECSC
		s.saved = s.cursor
	case "8": // DECRC
		s.cursor = s.saved
	case "D": // IND
		s.lineFeed()
	case "E": // NEL
		s.lineFeed()
		s.moveTo(s.row, 0)
	case "M": // RI
		s.step(-1)
	case "c": // RIS
		s.reset()
	}
}

// controlSequence acts on a control sequence, given without CSI and parameters.
func (s *Screen) controlSequence(seq []byte) {
	n := s.arg(0, 1)
	switch string(seq) {
	case "A": // CUU
		s.moveBy(-n, s.col)
	case "B": // CUD
		s.moveBy(n, s.col)
	case "C": // CUF
		s.moveTo(s.row, s.col+n)
	case "D": // CUB
		s.moveTo(s.row, s.col-n)
	case "E": // CNL
		s.moveBy(n, 0)
	case "F": // CPL
		s.moveBy(-n, 0)
	case "G": // CHA
		s.moveTo(s.row, n-1)
	case "d": // VPA
		s.moveTo(n-1, s.col)
	case "H", "f": // CUP, HVP
		s.moveTo(n-1, s.arg(1, 1)-1)
	case "I": // CHT
		s.moveTo(s.row, (s.col/8+n)*8)
	case "Z": // CBT
		s.moveTo(s.row, ((s.col+7)/8-n)*8)
	case "@": // ICH
		s.shiftCells(n)
	case "P": // DCH
		s.shiftCells(-n)
	case "J": // ED
		s.eraseIn(0, s.rows)
	case "K": // EL
		s.eraseIn(s.row, s.row+1)
	case "X": // ECH
		s.erase(s.offset(), min(s.offset()+n, (s.row+1)*s.cols))
	case "L": // IL
		s.scroll(s.row, -n)
	case "M": // DL
		s.scroll(s.row, n)
	case "S": // SU
		s.scroll(s.top, n)
	case "T": // SD
		s.scroll(s.top, -n)
	case "b": // REP
		s.repeat(n)
	case "r": // DECSTBM
		bottom := min(s.arg(1, s.rows), s.rows)
		if n < bottom {
			s.top, s.bottom = n-1, bottom-1
			s.moveTo(0, 0)
		}
	case "s": // SCOSC
		s.saved = s.cursor
	case "u": // SCORC
		s.cursor = s.saved
	case "m": // SGR
		s.pen.set(s.params)
	case "h", "l": // SM, RM
		if slices.Contains(s.params, 4) {
			s.insert = seq[0] == 'h'
		}
	case "?h": // DECSET
		s.setModes(true)
	case "?l": // DECRST
		s.setModes(false)
	default:
		s.query(string(seq), n)
	}
}

// arg is parameter i, or what stands for it when it is absent or 0.
func (s *Screen) arg(i, absent int) int {
	if i < len(s.params) && s.params[i] != 0 {
		return s.params[i]
	}
	return absent
}

// repeat prints the character just written n times more, as far as the row goes: so does tmux.
func (s *Screen) repeat(n int) {
	if s.base == nil || s.wrapNext {
		return
	}
	room := (s.cols - s.col) / runeWidth(s.base.ch)
	again := strings.Repeat(string(s.base.ch), min(n, room))
	s.base = nil
	s.take([]byte(again))
}

// setModes sets the modes that the parameters name. The alternate screen is blank each time it comes up, as in tmux.
func (s *Screen) setModes(on bool) {
	for _, mode := range s.params {
		s.modes[min(mode, modeOther)] = on
		screen := mode == 47 || mode == 1047 || mode == 1049 // xterm's names for it, old and new
		switch {
		case screen && !on:
			s.page = &s.primary
		case screen && !s.AltScreen():
			s.tellAbove(s.row, false)
			s.alternate.cursor = s.cursor
			s.page = &s.alternate
			s.erase(0, s.rows*s.cols)
		}
	}
}

// set sets what the parameters of SGR say.
func (a *Attr) set(params []int) {
	for len(params) > 0 {
		params = params[a.sgr(params):]
	}
}

// sgr sets what the first of the parameters of SGR says, and returns how many belong to it.
func (a *Attr) sgr(params []int) int {
	code := params[0]
	tens, digit := code/10, int32(code%10)
	ground := &a.FG
	if tens == 4 || tens == 10 {
		ground = &a.BG
	}
	switch code {
	case 0:
		*a = Attr{}
	case 1:
		a.Bold = true
	case 2:
		a.Dim = true
	case 22:
		a.Bold = false
		a.Dim = false
	case 4, 24:
		a.Underline = code == 4
	case 7, 27:
		a.Reverse = code == 7
	case 38, 48:
		return setColour(ground, params)
	case 39, 49:
		*ground = 0
	case 58: // of underlines
		return setColour(new(int32), params)
	}
	switch {
	case digit > 7:
	case tens == 3, tens == 4:
		*ground = digit + 1
	case tens == 9, tens == 10:
		*ground = digit + 9
	}
	return 1
}

// setColour reads 38;5;n and 38;2;r;g;b, and returns how many parameters that takes: all of them where it is neither.
func setColour(colour *int32, params []int) int {
	if len(params) > 2 && params[1] == 5 {
		*colour = int32(params[2]&255) + 1
		return 3
	}
	if len(params) > 4 && params[1] == 2 {
		rgb := params[2]&255<<16 | params[3]&255<<8 | params[4]&255
		*colour = int32(1<<24 | rgb)
		return 5
	}
	return len(params)
}

// ---- grid ----
// Characters are written, moved and erased as tmux does it.

// decGraphics is what the line drawing set shows for '`' to '~': https://vt100.net/docs/vt220-rm/table2-4.html
var decGraphics = []rune("◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")

// print writes the character that p begins with at the cursor, and what follows of ASCII. It returns how many bytes
// that is, 0 for the beginning of a character. Marks, and what follows a joiner, join the character before.
func (s *Screen) print(p []byte) int {
	r, n := utf8.DecodeRune(p)
	if r == utf8.RuneError && !utf8.FullRune(p) {
		return 0
	}
	graphics := s.charset[s.shift] == '0'
	if graphics && r >= '`' && r <= '~' {
		r = decGraphics[r-'`']
	}
	width := s.columnsOf(r)
	if r >= 0x300 && s.base != nil && (width == 0 || strings.HasSuffix(s.marks[s.base.marks], "\u200d")) {
		s.combine(r)
		return n
	}
	if width == 0 || !s.makeRoom(width) {
		return n
	}
	if s.insert {
		s.shiftCells(width)
	}
	end := s.col + width
	l := s.begin()
	l.cells[s.col].set(r, &s.pen)
	if width == 2 {
		l.cells[s.col].wide = true
		l.cells[s.col+1].set(0, &s.pen)
	} else if !graphics && !s.insert && r != utf8.RuneError {
		columns, written := printPlain(l.cells[end:], p, n, r, &s.pen)
		end += columns
		n = written
	}
	s.base = &l.cells[end-width]
	s.wrote(l, end)
	return n
}

// begin is the row at the cursor, in which something is to be written now.
func (s *Screen) begin() *line {
	l := s.grid[s.row]
	l.touch(s.col)
	l.history = history{wrapped: l.wrapped, again: l.told || l.again}
	return l
}

// touch makes the row ready for cells from column col on to be written, moved or erased.
func (l *line) touch(col int) {
	l.writeTo(col)
	l.mend(col)
	l.stale = true
	if col < l.asked {
		l.asked = 0
	}
}

// markAsked notes that the rows from the first to the last show a question that is being answered: onLine, up to the
// cursor.
func (s *Screen) markAsked(rows [2]int, onLine bool) {
	for r := rows[0]; r <= rows[1]; r++ {
		s.grid[r].asked = s.cols
	}
	if onLine {
		s.grid[rows[1]].asked = s.col
	}
}

// anew reports whether the rows from the first to the last were all written anew since a question in them was answered.
func (s *Screen) anew(rows [2]int) bool {
	shows := func(l *line) bool { return l.asked > 0 }
	return !slices.ContainsFunc(s.grid[rows[0]:rows[1]+1], shows)
}

// wrote puts the cursor behind what was written in that row, up to before column end.
func (s *Screen) wrote(l *line, end int) {
	l.end = max(l.end, end)
	s.col = min(end, s.cols-1)
	s.wrapNext = end >= s.cols && s.modes[modeAutowrap]
}

// makeRoom wraps where a character of that width does not fit into the row, and returns whether it fits now.
func (s *Screen) makeRoom(width int) bool {
	if s.modes[modeAutowrap] && (s.wrapNext || s.col+width > s.cols) {
		s.grid[s.row].wrapped = true
		s.step(1)
		s.moveTo(s.row, 0)
	}
	return s.col+width <= s.cols
}

// printPlain is the fast path: behind the character r, n bytes that the text begins with, it writes what follows of
// ASCII and of r again, as in the frame of a box, as far as the cells go. It returns how many columns, and n and their
// bytes.
func printPlain(cells []cell, text []byte, n int, r rune, pen *Attr) (columns, written int) {
	again := text[:n]
	for i := range cells {
		switch {
		case n < len(text) && text[n] >= ' ' && text[n] < 0x7f:
			cells[i].set(rune(text[n]), pen)
			n++
		case bytes.HasPrefix(text[n:], again):
			cells[i].set(r, pen)
			n += len(again)
		default:
			return i, n
		}
	}
	return len(cells), n
}

// set makes it a character of one column.
func (c *cell) set(r rune, pen *Attr) {
	c.ch = r
	c.marks = 0
	c.wide = false
	c.Attr = *pen
}

// combine adds a mark to the character just written. A character with a combination for which there is no room shows
// as a broken one: it must not be the same as without that.
func (s *Screen) combine(r rune) {
	marks := s.marks[s.base.marks] + string(r)
	i, known := s.markSets[marks]
	switch {
	case known:
	case len(marks) > maxMarks:
		return
	case len(s.marks) >= maxMarkSets:
		s.base.ch = utf8.RuneError
	default:
		i = len(s.marks)
		s.marks = append(s.marks, marks)
		s.markSets[marks] = i
	}
	s.base.marks = uint16(i)
	s.grid[s.row].stale = true
}

// mend blanks a wide character left of column col, which has lost its right half.
func (l *line) mend(col int) {
	if col > 0 && l.cells[col-1].wide {
		l.cells[col-1] = cell{}
	}
}

// Answered notes that an answer is typed. The next line feed ends the row that was answered: on a line that is where
// the cursor stands now; a dialog may be replaced by a row further up.
func (s *Screen) Answered(onLine bool) {
	switch {
	case s.AltScreen():
		s.answering = nil
	case onLine:
		s.answering = s.grid[s.row]
	default:
		s.answering = anyRow
	}
}

// lineFeed ends the row, and with it an answer, in whatever row: a page may be painted over that one.
func (s *Screen) lineFeed() {
	l := s.grid[s.row]
	l.wrapped = false
	if s.answering == anyRow {
		s.answering = l
	}
	if s.answering != nil {
		s.answering.answered = true
		s.answering = nil
	}
	s.step(1)
}

// step goes one row down (1) or up (−1), and scrolls at the margin.
func (s *Screen) step(n int) {
	if n > 0 && s.row == s.bottom || n < 0 && s.row == s.top {
		s.scroll(s.top, n)
	} else {
		s.row = min(max(s.row+n, 0), s.rows-1)
	}
}

// scroll moves the rows from top to the bottom of the region n up, or down when negative.
func (s *Screen) scroll(top, n int) {
	if top < s.top || top > s.bottom {
		return
	}
	region := s.grid[top : s.bottom+1]
	count := min(max(n, -n), len(region))
	at, first := len(region)-count, top // where the region is turned; the first of the rows that come back blank
	if n > 0 {
		at, first = count, top+at
	}
	s.moved = append(append(s.moved[:0], region[at:]...), region[:at]...)
	copy(region, s.moved)
	leaves := n > 0 && top == 0
	for r := first; r < first+count; r++ {
		switch {
		case leaves && s.AltScreen():
			s.lost = s.lost || s.trimmed(s.grid[r]) != ""
		case leaves:
			s.tell(s.grid[r])
			s.grid[r] = s.keepRow(s.grid[r])
		}
		s.grid[r].history = history{}
		s.erase(r*s.cols, (r+1)*s.cols)
	}
}

// cutIn reports whether a part of one of these rows is lost.
func (s *Screen) cutIn(first, last int) bool {
	return slices.ContainsFunc(s.grid[first:last+1], func(l *line) bool { return l.cut })
}

// keepRow takes a row that leaves the primary screen at its top, and gives back one whose cells may be written anew.
func (s *Screen) keepRow(l *line) *line {
	slot := &s.scrollback[s.scrolled%maxScrollback]
	s.scrolled++
	l, *slot = *slot, l
	if l == nil {
		return &line{cells: make([]cell, s.cols)}
	}
	return l
}

// above is the row n rows above the top of the primary screen, 1 the nearest. False when it is not
// known any more, or does not belong to what stands there, because the screen was cleared since.
func (s *Screen) above(n int) (*line, bool) {
	at := s.scrolled - n
	if s.AltScreen() || n > maxScrollback || at < s.scrollbackFrom {
		return nil, false
	}
	l := s.scrollback[at%maxScrollback]
	return l, l != nil
}

// erase blanks the places from one to before another, counted row by row, in the pen's background.
func (s *Screen) erase(from, to int) {
	whole := to-from == s.rows*s.cols
	switch {
	case s.rows == 1: // its line has scrolled out, or is written anew
	case s.AltScreen():
		s.lost = s.lost && !whole
	case whole:
		s.scrollbackFrom = s.scrolled
		s.answering = nil
		if s.tr.on {
			s.tellAll()
		}
	}
	for from < to {
		l := s.grid[from/s.cols]
		col := from % s.cols
		end := min(col+to-from, s.cols)
		l.erase(col, end, s.pen.BG)
		from += end - col
	}
}

// erase blanks the cells from column col to before column end.
func (l *line) erase(col, end int, background int32) {
	l.touch(col)
	if end < len(l.cells) {
		l.writeTo(end)
		blank(l.cells[col:end], background)
	} else {
		l.end = col
		l.ground = background
		l.wrapped = false
		l.cut = false
		l.answered = l.answered && col > 0
	}
}

// eraseIn erases in these rows: from the cursor on (0), up to it (1), or all of them (2).
func (s *Screen) eraseIn(first, end int) {
	from, to := first*s.cols, end*s.cols
	switch s.params[0] {
	case 0:
		s.erase(s.offset(), to)
	case 1:
		s.erase(from, s.offset()+1)
	case 2:
		s.erase(from, to)
	}
}

// shiftCells moves the rest of the row n columns to the right, or to the left when negative.
func (s *Screen) shiftCells(n int) {
	l := s.grid[s.row]
	l.writeTo(s.cols)
	l.touch(s.col)
	l.wrapped = false
	rest := l.cells[s.col:]
	n = min(max(n, -len(rest)), len(rest))
	if n > 0 {
		copy(rest[n:], rest)
		clear(rest[:n])
	} else {
		copy(rest, rest[-n:])
		clear(rest[len(rest)+n:])
	}
	l.mend(s.cols)
}

// offset is the cursor's place, counted row by row.
func (s *Screen) offset() int { return s.row*s.cols + s.col }

// moveTo moves the cursor there, or to the edge that is nearest.
func (s *Screen) moveTo(row, col int) {
	s.row = min(max(row, 0), s.rows-1)
	s.col = min(max(col, 0), s.cols-1)
	s.wrapNext = false
}

// moveBy moves the cursor n rows down, or up when negative, to that column. It stops at a margin
// that it does not start behind.
func (s *Screen) moveBy(n, col int) {
	first, last := 0, s.rows-1
	if s.row >= s.top {
		first = s.top
	}
	if s.row <= s.bottom {
		last = s.bottom
	}
	s.moveTo(min(max(s.row+n, first), last), col)
}

// wideRanges are the characters of two columns (East Asian Wide and Fullwidth, emoji; unassigned gaps joined): the
// first and the one behind the last, in hexadecimal. From wcwidth of glibc 2.36 (Unicode 15), which tmux uses.
const wideRanges = `
1100-1160 231A-231C 2329-232B 23E9-23ED 23F0-23F1 23F3-23F4 25FD-25FF 2614-2616 2648-2654 267F-2680 2693-2694
26A1-26A2 26AA-26AC 26BD-26BF 26C4-26C6 26CE-26CF 26D4-26D5 26EA-26EB 26F2-26F4 26F5-26F6 26FA-26FB 26FD-26FE
2705-2706 270A-270C 2728-2729 274C-274D 274E-274F 2753-2756 2757-2758 2795-2798 27B0-27B1 27BF-27C0 2B1B-2B1D
2B50-2B51 2B55-2B56 2E80-302A 302E-303F 3041-3097 309B-A4C7 A960-A97D AC00-D7A4 F900-FADA FE10-FE1A FE30-FE6C
FF01-FF61 FFE0-FFE7 16FE0-16FE4 16FF0-1B2FC 1F004-1F005 1F0CF-1F0D0 1F18E-1F18F 1F191-1F19B 1F200-1F321 1F32D-1F336
1F337-1F37D 1F37E-1F394 1F3A0-1F3CB 1F3CF-1F3D4 1F3E0-1F3F1 1F3F4-1F3F5 1F3F8-1F43F 1F440-1F441 1F442-1F4FD
1F4FF-1F53E 1F54B-1F54F 1F550-1F568 1F57A-1F57B 1F595-1F597 1F5A4-1F5A5 1F5FB-1F650 1F680-1F6C6 1F6CC-1F6CD
1F6D0-1F6D3 1F6D5-1F6E0 1F6EB-1F6ED 1F6F4-1F6FD 1F7E0-1F7F1 1F90C-1F93B 1F93C-1F946 1F947-1FA00 1FA70-1FAF7
20000-3134B
`

// wideEdges are where these ranges begin and, in turn, end.
var wideEdges = sync.OnceValue(func() (edges []rune) {
	for _, edge := range strings.FieldsFunc(wideRanges, func(r rune) bool { return r == '-' || r <= ' ' }) {
		r, _ := strconv.ParseInt(edge, 16, 32) // all are numbers
		edges = append(edges, rune(r))
	}
	return edges
})

// columnsOf is runeWidth, which takes its time, for a character that is printed.
func (s *Screen) columnsOf(r rune) int {
	if r < 0x7f {
		return 1
	}
	known := &s.widths[int(r)%len(s.widths)]
	if *known>>2 != r {
		*known = r<<2 | rune(runeWidth(r))
	}
	return int(*known & 3)
}

// runeWidth is the number of columns of r: 0, 1 or 2. DEL, C1 controls and marks have none.
func runeWidth(r rune) int {
	switch {
	case r < 0x7f, r >= 0xa0 && r < 0x300:
		return 1
	case r < 0xa0, r >= 0x1160 && r <= 0x11ff, r >= 0xd7b0 && r <= 0xd7fb: // Hangul vowels, finals
		return 0
	}
	marks := unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf)
	if marks && !unicode.Is(unicode.Prepended_Concatenation_Mark, r) {
		return 0
	}
	i, begins := slices.BinarySearch(wideEdges(), r)
	if begins {
		i++
	}
	return 1 + i%2
}

// ---- replies ----
// What the terminal answers, and the strings that a program sends to it.

const (
	statusReply = "\x1b]7501;?\x1b\\"        // to OSC 7501: it is understood here
	nameReply   = "\x1bP>|atlasbridge\x1b\\" // to XTVERSION
)

// TakeReplies are the answers since the last call that the child is to get: all of them where no
// host terminal answers it, else those to OSC 7501, which no terminal knows.
func (s *Screen) TakeReplies(answerAll bool) []byte {
	taken := s.replies
	s.replies = nil
	if answerAll {
		return taken
	}
	return bytes.Repeat([]byte(statusReply), bytes.Count(taken, []byte(statusReply)))
}

// reply answers, unless too many answers wait already.
func (s *Screen) reply(text string) {
	if len(s.replies) < maxReplies {
		s.replies = append(s.replies, text...)
	}
}

// query answers a control sequence that asks; n is its first parameter, 1 where absent.
func (s *Screen) query(seq string, n int) {
	switch seq {
	case "n": // DSR: status, cursor
		if n == 5 {
			s.reply("\x1b[0n")
		}
		if n == 6 {
			s.reply(fmt.Sprintf("\x1b[%d;%dR", s.row+1, s.col+1))
		}
	case "c": // DA1
		s.reply("\x1b[?62;22c")
	case ">c": // DA2
		s.reply("\x1b[>0;10;1c")
	case "?u": // kitty's keys: not in use
		s.reply("\x1b[?0u")
	case ">q":
		s.reply(nameReply)
	case "t": // XTWINOPS: the size in pixels, a cell has 8 × 16
		if n == 14 {
			s.reply(fmt.Sprintf("\x1b[4;%d;%dt", s.rows*16, s.cols*8))
		}
	case "?$p": // DECRQM: not known
		s.reply(fmt.Sprintf("\x1b[?%d;0$y", n))
	}
}

// endString acts on a complete string, if there is one; end is the byte that ended it.
func (s *Screen) endString(end byte) {
	if s.state != 'P' && s.state != ']' {
		return
	}
	text := strings.ToValidUTF8(string(s.seq), "\ufffd")
	code, rest, _ := strings.Cut(text, ";")
	if s.state == 'P' {
		if strings.HasPrefix(code, "+q") || strings.HasPrefix(code, "$q") {
			s.reply("\x1bP0" + code[:1] + "r\x1b\\") // XTGETTCAP, DECRQSS: not known
		}
		return
	}
	switch code {
	case "0", "2":
		if rest != s.title {
			s.reports = append(s.reports, ProgramStatus{Title: rest})
		}
		s.title = rest
	case "4", "10", "12":
		s.replyColour(text, "cdcd", end)
	case "11":
		s.replyColour(text, "0000", end)
	case "7501":
		if rest == "?" {
			s.reply(statusReply)
		} else {
			s.noteStatus(rest)
		}
	}
}

// replyColour answers an OSC that asks for a colour, in a string that ends as the OSC did. The
// colours are light on black.
func (s *Screen) replyColour(osc, level string, end byte) {
	asked, asks := strings.CutSuffix(osc, "?")
	if !asks || len(osc) > 8 { // "4;255;?" is the longest
		return
	}
	terminator := "\a"
	if end == 0x1b {
		terminator = "\x1b\\"
	}
	s.reply("\x1b]" + asked + "rgb:" + level + "/" + level + "/" + level + terminator)
}

// noteStatus takes a report of OSC 7501: key=value:key=value, msg in base64, padded or not.
func (s *Screen) noteStatus(report string) {
	status := ProgramStatus{}
	for field := range strings.SplitSeq(report, ":") {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "state":
			status.State = value
		case "kind":
			status.Kind = value
		case "msg":
			msg, _ := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "=")) // as far as it is
			status.Msg = strings.ToValidUTF8(string(msg), "\ufffd")
		}
	}
	if status.State != "" {
		s.status = status
		s.reports = append(s.reports, status)
	}
}

// ---- key bytes ----
// What a terminal sends for a key: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html

// namedKeys are what the keys send that have a name.
var namedKeys = map[string]string{
	"ENTER":     "\r",
	"ESC":       "\x1b",
	"TAB":       "\t",
	"SHIFT_TAB": "\x1b[Z",
	"SPACE":     " ",
	"BACKSPACE": "\x7f",
	"DELETE":    "\x1b[3~",
	"PGUP":      "\x1b[5~",
	"PGDN":      "\x1b[6~",
	"UP":        "\x1b[A",
	"DOWN":      "\x1b[B",
	"RIGHT":     "\x1b[C",
	"LEFT":      "\x1b[D",
	"HOME":      "\x1b[H",
	"END":       "\x1b[F",
	"Y":         "y",
	"N":         "n",
	"1":         "1",
	"2":         "2",
	"3":         "3",
}

// reCursorKey is a key that sends SS3 where the program has set DECCKM.
var reCursorKey = re(`^\x1b\[([A-H])$`)

// reReport is what terminals send by themselves, without a key.
var reReport = re(`(?s)^\x1b(\[[IO<M?>]|\[[0-9;]+[Rnt](\x1b|$)|[\]P_])`)

// keyBytes is what the key of that name, in upper or lower case, sends; "" for an unknown one.
func keyBytes(name string, appCursor bool) string {
	name = strings.ToUpper(name)
	c, ctrl := strings.CutPrefix(name, "CTRL_")
	if ctrl && len(c) == 1 && c[0] >= '@' && c[0] <= '_' {
		return string(rune(c[0] & 0x1f))
	}
	keys := namedKeys[name]
	if appCursor {
		keys = reCursorKey.ReplaceAllString(keys, "\x1bO$1")
	}
	return keys
}

// ---- transcript ----
// The output as lines of text, each told once.

// transcript turns the screen into lines of text. A row is final when it has scrolled out, or when the cursor's
// paragraph is below it, unless the program has gone back to write in it: from there on rows are final only by
// scrolling out or settling. Of lines told again (repainted, after a clear, on the alternate screen) those are left out
// that have neither letter nor digit or were told before.
type transcript struct {
	on      bool
	window  bool     // ReadWindow tells its rows
	part    string   // the beginning of a wrapped line that has scrolled out
	pending []string // lines that wait for Transcript
	bytes   int      // in them
	dropped int      // lines that did not fit there
	recent  []string // lines told, the newest of them
}

// tellAbove takes the rows above a paragraph as final, as far as they are not being repainted.
func (s *Screen) tellAbove(row int, repainted bool) {
	for row > 0 && s.grid[row-1].wrapped {
		row--
	}
	for _, l := range s.grid[:row] {
		if l.again && !l.told && !repainted && s.tr.part == "" {
			return
		}
		s.tell(l)
	}
}

// tellAll takes all that the screen shows as final: it is about to be erased.
func (s *Screen) tellAll() {
	text := s.Text()
	s.tellAbove(min(len(text), 1+strings.Count(text, "\n")), false)
	for i := range s.grid {
		s.grid[i].told = false
		s.grid[i].again = true
	}
}

// tell takes a row of the primary screen as final. The rest of a wrapped line that begins anew is told again.
func (s *Screen) tell(l *line) {
	t := &s.tr
	if !t.on || t.window || l.told && t.part == "" {
		return
	}
	again := l.again || l.told
	l.told = true
	t.part += s.text(l)
	if !l.wrapped || len(t.part) >= maxLine {
		t.add(strings.TrimRight(t.part, " "), again)
		t.part = ""
	}
}

// add tells a line, unless it is painted again and says nothing, or was told lately. The oldest lines are left out
// where too much waits.
func (t *transcript) add(text string, again bool) {
	if again && (!strings.ContainsFunc(text, isWordRune) || slices.Contains(t.recent, text)) {
		return
	}
	t.recent = append(t.recent[max(0, len(t.recent)-maxRecent):], text)
	t.pending = append(t.pending, text)
	t.bytes += len(text) + lineCost
	for t.bytes > maxPending {
		t.bytes -= len(t.pending[0]) + lineCost
		t.pending = t.pending[1:]
		t.dropped++
	}
}

// Transcript returns the lines that became final since the last call, and the text that may still change. On the
// alternate screen nothing is final until settle (the tool's turn is over): then it is what is new there. The first
// call turns it on. Of more than 4 MiB between two calls the oldest lines are left out, and a line says how many.
func (s *Screen) Transcript(settle bool) (final []string, live string) {
	t := &s.tr
	t.on = true
	if !s.AltScreen() {
		s.tellAbove(s.row, settle)
		live = s.live()
	} else if settle {
		for r := range s.rows {
			t.add(s.Row(r), true)
		}
	}
	return s.takeLines(), live
}

// takeLines returns the lines that became final since the last call.
func (s *Screen) takeLines() []string {
	t := &s.tr
	final := t.pending
	if t.dropped > 0 {
		final = slices.Insert(final, 0, fmt.Sprintf("[… %d lines left out …]", t.dropped))
	}
	t.pending = nil
	t.bytes = 0
	t.dropped = 0
	return final
}

// live is the text that is not told yet.
func (s *Screen) live() string {
	var b strings.Builder
	text := s.tr.part
	for _, l := range s.grid {
		if l.told {
			continue
		}
		text += s.text(l)
		if !l.wrapped {
			b.WriteString(strings.TrimRight(text, " ") + "\n")
			text = ""
		}
	}
	b.WriteString(text)
	return strings.TrimRight(b.String(), "\n ")
}

// ---- prompts ----
// A question as a value: made once, from one look at the screen or one call of a hook.

// PromptType is one of the five kinds of question.
type PromptType string

const (
	YesNo          PromptType = "yes_no"
	ConfirmEnter   PromptType = "confirm_enter"
	MultipleChoice PromptType = "multiple_choice"
	FreeText       PromptType = "free_text"
	Unknown        PromptType = "unknown" // no rule reads it; with Choices: a still screen, which may ask nothing
)

// Reading reports whether one of the foreground processes waits to read the terminal.
type Reading int

const (
	ReadingUnasked Reading = iota
	ReadingUnknown         // the system cannot tell
	ReadingYes
	ReadingBusy
)

// readings are the words for what is known of who reads, in the order of Reading.
var readings = []string{"", "unknown", "reading", "busy"}

// TTYState is the terminal's own state as the system sees it. The zero value: not asked.
type TTYState struct {
	Reading   Reading
	Canonical bool
	Echo      bool
	Sleeps    bool // why Reading is unknown: it works, or looks for its keys between two sleeps
}

// Choice is one answer a question offers.
type Choice struct {
	Key    string `json:"key"`              // names it in an answer: "y", "n", "1", "2" …, the letter shown
	Label  string `json:"label"`            // as on the screen, made safe, ≤ 60 bytes
	Keys   string `json:"keys,omitempty"`   // the exact bytes that choose it; "" where a pointer must be moved
	Grants bool   `json:"grants,omitempty"` // lets the agent do something (Yes, Allow, Trust…)
}

// Prompt is a question (or an idle input box) found on the screen. Identifiers, times and the nonce are the store's.
// All text that has a JSON name is safe and redacted, but for the labels of its choices: the typist finds them on the
// screen. What is stored and sent of these are the labels of the answers.
type Prompt struct {
	Type        PromptType `json:"type"`
	Score       float64    `json:"score"`            // 0.60 … 1.0
	Excerpt     string     `json:"excerpt"`          // ≤ 200 bytes, ends in "…" when cut
	Choices     []Choice   `json:"choices"`          // ≤ 9
	SafeDefault *string    `json:"safe_default"`     // a key, "enter", "esc", "" (Enter alone); nil: nothing
	Idle        bool       `json:"idle"`             // an agent's input box, no turn going on
	Turn        TurnState  `json:"turn,omitempty"`   // Idle: what the last turn came to
	Took        int        `json:"took,omitempty"`   // Idle: seconds that it took, 0 unknown
	Secret      bool       `json:"secret"`           // a password or its like: to be typed at the keyboard alone
	Signals     []string   `json:"signals"`          // protocol title pattern structure tty silence; else hook, or ask
	Question    string     `json:"question"`         // the sentence a person would read out
	Full        string     `json:"full,omitempty"`   // the whole dialog, ≤ maxFull; Idle: an answer, in Markdown
	Above       string     `json:"above,omitempty"`  // the context: whole rows above it
	Far         string     `json:"far,omitempty"`    // what is further up, ≤ maxFar; only "Show all" sends it
	Recent      string     `json:"recent,omitempty"` // the last 500 characters of the screen
	Cut         bool       `json:"cut"`              // part of it is not in Full: it can only be refused
	Permission  bool       `json:"permission"`       // grants something: no affirmative default
	Multi       bool       `json:"multi"`            // several choices may be ticked
	Turned      bool       `json:"turned,omitempty"` // what refuses lets it happen: "Keep it?", "Cancel it?"

	// Shown is all that a person can base an answer on, as one canonical text: the kind of
	// question, the rows of its region as they stand on the screen, the question, the answers in their
	// order, whether a part is left out. Where the pointer stands and what is ticked is not in it.
	Shown string `json:"shown,omitempty"`

	Ticked  []bool `json:"-"` // Multi: which are ticked now
	Across  bool   `json:"-"` // the arrows to the left and right move the pointer
	Pointer int    `json:"-"` // index of the choice highlighted, −1 none
	drafted bool   // a text stands in the box, or in the field: another would be added to it

	// lead is Shown without the choices and what stands among them, all is with them; both as they are on
	// the screen, secrets included: they never leave the process.
	lead   string
	all    string
	since  time.Time // Idle: when the turn began, zero unknown
	parts  shown     // what both are made of
	place  place     // where a question on a line begins
	motion *motion   // what the detector sees moving
}

// shown is a question's region: whole rows, exactly as they stand on the screen.
type shown struct {
	above []string // the context: above the paragraph, or the dialog
	body  []string // of the dialog, above its first choice; of a question on a line, the paragraph before
	among []string // of the dialog, from its first choice on; of a line, what stands right of the cursor and below
}

// place is a row of the session; the zero value is anywhere.
type place struct {
	row   int // from 1
	sizes int // of the screen so far: in another size the rows are others
}

// differs reports whether two places are known not to be the same.
func (p place) differs(other place) bool {
	return p.row != 0 && other.row != 0 && p.sizes == other.sizes && p.row != other.row
}

// seal makes lead and all from the parts, the question and the choices.
func (p *Prompt) seal() {
	kind := string(p.Type)
	if p.Secret {
		kind += " secret"
	}
	if p.Multi {
		kind += " several"
	}
	rows := append([]string{kind}, p.parts.above...)
	rows = append(rows, p.parts.body...)
	rows = append(rows, "? "+p.Question)
	p.lead = strings.Join(rows, "\n")
	rows = append(rows, p.parts.among...)
	for _, c := range p.Choices {
		rows = append(rows, "- "+c.Key+" "+c.Label)
	}
	if p.Cut {
		rows = append(rows, "…")
	}
	p.all = strings.Join(rows, "\n")
}

// unhinted is lead without how to choose, and without what is ticked: tty-prompt repeats that behind its question. It
// is left until a pointer moves: the pattern costs as much as all else of a look.
func (p *Prompt) unhinted() string {
	text := reKeysHint.ReplaceAllString(p.lead, "") + "\n"
	var names []string
	for i, ticked := range p.Ticked {
		if ticked {
			names = append(names, p.Choices[i].Label)
		}
	}
	if len(names) > 0 {
		text = strings.ReplaceAll(text, " "+strings.Join(names, ", ")+"\n", "\n")
	}
	return text
}

// publish makes of all what may leave the process: Shown, redacted and with nothing hidden. It is left
// until a prompt is given out, for most looks at a screen that moves give none.
func (p *Prompt) publish() {
	p.Shown = safeText(p.all)
}

// sameness is how what stands on the screen compares with what was asked.
type sameness int

const (
	another sameness = iota
	unsure           // it differs in nothing but what may be seen moving soon
	theSame
)

// moveTime is how long what moves is watched: within it a cell that is seen moving has changed leastMoves times.
const (
	moveTime   = 3 * time.Second
	leastMoves = 3
)

// motion is what was seen moving in the text of a question, look by look. A unit is a time in the text, or a spinner.
type motion struct {
	text  string            // as it was at the last look
	since time.Time         // since when nothing has changed in it but what may move
	now   time.Time         // of the last look
	units map[unit]movement // those that have changed since
}

// movement is what one unit has done.
type movement struct {
	at   [leastMoves]time.Time // of its last changes, the newest last
	down bool                  // it is a time that counts down
}

// see takes in what the text is now.
func (m *motion) see(text string) {
	changes, ok := differences(m.text, text)
	m.text = text
	if !ok {
		m.restart(m.now)
		return
	}
	for u, down := range changes {
		moves := m.units[u]
		if moves.down != down { // it counts the other way
			moves = movement{down: down}
		}
		copy(moves.at[:], moves.at[1:])
		moves.at[leastMoves-1] = m.now
		m.units[u] = moves
	}
}

// restart forgets what was seen moving.
func (m *motion) restart(now time.Time) {
	m.since = now
	m.units = map[unit]movement{}
}

// of compares a unit that differs from what was asked: the same where it is seen moving, unsure while it still may be.
func (m *motion) of(u unit) sameness {
	at := m.units[u].at
	last := at[leastMoves-1]
	switch {
	case !at[0].IsZero() && last.Sub(at[0]) <= moveTime && m.now.Sub(last) <= moveTime:
		return theSame
	case m.now.Sub(later(last, m.since)) <= moveTime:
		return unsure
	}
	return another
}

// compare compares two texts cell for cell, but for what is seen moving.
func (m *motion) compare(asked, now string) sameness {
	changes, ok := differences(asked, now)
	if !ok {
		return another
	}
	verdict := theSame
	for u := range changes {
		verdict = min(verdict, m.of(u))
	}
	return verdict
}

// unit is the place of what may move in a text: its row, and which of the row's it is.
type unit struct{ row, n int }

// spinners are the characters that programs show one after the other, in the same place, while they work; blank, where
// such a mark blinks.
const spinners = `\x{2800}-\x{28ff}` + movingMarks + `|/\\ -`

// reMoves is what may move: a time, "1m 12s", "02:15", with the blanks behind it, which give way to its digits; a
// spinner, or those at the end of a row, where blanks are left out.
var reMoves = re(`\b(?:(?:\d+h ?)?(?:\d+m ?)?\d+s|\d+:\d\d(?::\d\d)?)\b *|[` + spinners + `]*\n|[` +
	spinners + `]`)

// differences are the units in which two texts differ where they may move, and whether each is a time that counts down.
// ok is false where they differ in anything else.
func differences(a, b string) (down map[unit]bool, ok bool) {
	down = map[unit]bool{}
	before, after := strings.Split(a, "\n"), strings.Split(b, "\n")
	if len(before) != len(after) {
		return nil, false
	}
	for row, text := range before {
		if text == after[row] {
			continue
		}
		around, was := unitsOf(text)
		beside, is := unitsOf(after[row])
		if around != beside {
			return nil, false
		}
		for n := range was {
			if was[n] != is[n] {
				down[unit{row, n}] = seconds(is[n]) < seconds(was[n])
			}
		}
	}
	return down, true
}

// unitsOf are the units of a row that may move, and what stands around them.
func unitsOf(row string) (around string, units []string) {
	around = reMoves.expr().ReplaceAllStringFunc(row+"\n", func(unit string) string {
		units = append(units, unit)
		return "\x00"
	})
	return around, units
}

// alike reports whether two texts differ in nothing but what may move.
func alike(a, b string) bool {
	_, ok := differences(a, b)
	return ok
}

// seconds is a time as reMoves finds it in seconds, 0 of what is none.
func seconds(text string) int {
	total := 0
	for _, part := range strings.FieldsFunc(text, func(r rune) bool { return r < '0' || r > '9' }) {
		n, _ := strconv.Atoi(part) // digits alone
		total = total*60 + n
	}
	return total
}

// same reports whether now, seen on the screen, is the question p as it was shown: what "still there"
// and "may be typed" mean. now may be nil.
func (p *Prompt) same(now *Prompt) bool { return p.compare(now) == theSame }

// compare is same, or says that it is too early to tell.
func (p *Prompt) compare(now *Prompt) sameness {
	if now == nil || p.place.differs(now.place) {
		return another
	}
	return now.motion.compare(p.all, now.all)
}

// follows reports whether now is p after a key moved its pointer: a long list may show other choices then, in another
// place each, but not the same in another order, nor something else beside them, unless that may count what is ticked.
// now may be nil.
func (p *Prompt) follows(now *Prompt) bool {
	if now == nil || now.motion.compare(p.unhinted(), now.unhinted()) != theSame {
		return false
	}
	was, is := labels(p.Choices), labels(now.Choices)
	if slices.Equal(was, is) {
		return p.Multi || alike(strings.Join(p.parts.among, "\n"), strings.Join(now.parts.among, "\n"))
	}
	stay, kept := 0, 0
	for i, c := range p.Choices[:min(len(was), len(is))] {
		stay += number(alike(p.bare(c), now.bare(now.Choices[i])))
		kept += number(slices.Contains(was, is[i]))
	}
	return stay == max(len(was), len(is)) || stay == 0 && kept < len(is)
}

// isQuestion reports whether p asks something, and is no input box, nor a screen that may ask only if
// it stays still. p may be nil.
func (p *Prompt) isQuestion() bool {
	return p != nil && !p.Idle && (p.Type != Unknown || len(p.Choices) == 0)
}

// labels are those of the choices.
func labels(of []Choice) []string {
	var all []string
	for _, c := range of {
		all = append(all, c.Label)
	}
	return all
}

// Confidence is the band of Score.
func (p *Prompt) Confidence() string {
	switch {
	case p.Score >= 0.85:
		return "high"
	case p.Score >= 0.65:
		return "medium"
	}
	return "low"
}

// reHidden are the places in a stored text that show something else than what was there: see redact and visible.
var reHidden = re(`\[redacted\]|\\u\{[0-9A-F]+\}`)

// showsCall reports whether the dialog shows a call of this tool with these arguments: a command or
// an address stands in rows of its own, in all of its length or cut; of a file its name, of a question its
// words, of another tool its name at a row's beginning; of a call too long for the dialog, claude's words for that.
// Blanks and wrapping do not count. subject is as it is stored, made safe.
func (p *Prompt) showsCall(tool, subject string) bool {
	rows := slices.Concat(p.parts.body, p.parts.among)
	for i, row := range rows {
		rows[i] = squeezed(row)
	}
	all := strings.Join(rows, "") + squeezed(p.Question)
	if strings.Contains(all, "(valuecannotbeshowninfull—approvalwithheld") { // claude 2.1.332
		return true
	}
	switch tool {
	case "Bash", "WebFetch":
		return showsRows(rows, squeezed(subject))
	case "ExitPlanMode":
		return strings.Contains(strings.ToLower(all), "plan")
	case "Edit", "Write", "MultiEdit", "NotebookEdit":
		return strings.Contains(all, squeezed(filepath.Base(subject)))
	case subject:
		return slices.ContainsFunc(rows, func(row string) bool { return strings.HasPrefix(row, tool) })
	}
	return subject != "" && strings.Contains(all, squeezed(subject))
}

// squeezed is a text without its blanks.
func squeezed(text string) string { return strings.Join(strings.Fields(text), "") }

// showsRows reports whether some rows, one after the other and nothing left over, are the text, or its beginning, which
// the tool has cut.
func showsRows(rows []string, text string) bool {
	pieces := reHidden.expr().Split(text, -1)
	for from := range rows {
		run := ""
		for _, row := range rows[from:] {
			run += row
			if len(run) > 2*len(text)+maxString {
				break
			}
			if row != "" && isShown(run, pieces) {
				return true
			}
		}
	}
	return false
}

// isShown reports whether run is the pieces of a text with anything between two of them, or its beginning and an "…".
func isShown(run string, pieces []string) bool {
	run, cut := strings.CutSuffix(run, "…")
	for i, piece := range pieces {
		at := 0
		switch {
		case i > 0 && i == len(pieces)-1:
			at = max(0, len(run)-len(piece))
		case i > 0:
			at = max(0, strings.Index(run, piece))
		}
		rest, whole := strings.CutPrefix(run[at:], piece)
		if whole {
			run = rest
			continue
		}
		for at := range run {
			if (at == 0 || i > 0) && strings.HasPrefix(piece, run[at:]) {
				return cut
			}
		}
		return false
	}
	return run == ""
}

// reTip is what explains a choice behind its label.
var reTip = re(` (\(.*\)|- .*)$`)

// bare is the label of a choice, at the pointer without a hint, which some programs show there alone (clack, prompts).
func (p *Prompt) bare(c Choice) string {
	if p.Pointer < 0 || p.Choices[p.Pointer] != c {
		return c.Label
	}
	return reTip.ReplaceAllString(c.Label, "")
}

// ---- patterns ----
// Regular expressions, compiled when they are first needed: a start must not wait for all of them.

// pattern is a regular expression of ours.
type pattern struct {
	source string
	once   sync.Once
	re     *regexp.Regexp
}

// re is the pattern of that source.
func re(source string) *pattern { return &pattern{source: source} }

// expr is the compiled pattern.
func (p *pattern) expr() *regexp.Regexp {
	p.once.Do(func() { p.re = regexp.MustCompile(p.source) })
	return p.re
}

// MatchString reports whether the pattern matches the text. There may be no pattern.
func (p *pattern) MatchString(text string) bool { return p != nil && p.expr().MatchString(text) }

// FindStringSubmatch are the groups of the first match, nil without one, or without a pattern.
func (p *pattern) FindStringSubmatch(text string) []string {
	if p == nil {
		return nil
	}
	return p.expr().FindStringSubmatch(text)
}

// ReplaceAllString is the text with the replacement in place of every match.
func (p *pattern) ReplaceAllString(text, replacement string) string {
	return p.expr().ReplaceAllString(text, replacement)
}

// ---- words ----
// What decides in a question, in the languages that programs were seen to ask in.

// wordTable is the words by which a question is understood, in every language: the language, what its words mean, and
// whole words in lower case. They stand in the catalogues (glibc, gettext) of coreutils, apt, dpkg, debconf, gnupg,
// git, shadow, PAM, sudo, newt, dialog, nano, mc. What is not here is neither a refusal nor harmless.
//
//	yes, no  say that and nothing else
//	y, n     the letters that are typed for them: yesexpr and noexpr of glibc
//	deny     refuses, and does nothing else
//	allow    grants something
//	quit     leaves or goes back, which may lose something
//	keep     "no" to it means that something goes on, or is lost
//	press    before, or behind, a word of key: asks for a key
//	secret   is what should be typed unseen
//	choose   asks for one of a list that is printed
//	what     begins a question that yes and no do not answer
//	capital  says that an answer is typed in capitals
//	dont     refuses in more than a word, or in a letter
//	agree    consents, and grants nothing by itself
//	way      is another way out than Enter
//	amount   asks how many, not for one of a list
//	english  stands in an English question: "old or new? [o/n]"
//
// Of keep, press, secret, choose and capital the beginning of a word is enough, if it has four bytes.
const wordTable = `
en yes     yes
en no      no|nope
en y       y
en n       n
en deny    cancel|abort|deny|reject|refuse|decline|disallow
en allow   allow|always|approve|accept|confirm|trust|grant|run|proceed|authorize|permit|agree|i trust|i agree
en allow   i accept|i understand
en quit    exit|quit|back|skip|never|go back|close
en keep    keep|skip|save|ignore|leave|preserve|retain|prevent|disable|exclude|block|stop|terminate|interrupt
en keep    postpone|delay|defer|hold|wait for|wait until|pause|undo|protect|reuse|dry run|dry-run|back up|make a backup
en keep    kept|left|held|backup|restor|revert|roll back|rollback|instead of|rather than|refrain|object|before
en keep    spare|rescue|avoid|review the|simulat|sandbox|safe mode|read-only mode|rather|confirm each|confirm every
en keep    verify|limit|restrict|append|resume|recover|take a snapshot|create a snapshot|quarantine|halt|suspend|stay
en keep    unless|forbid|opt out
en press   press|hit|strike|push|tap
en key     any key|a key|the any key|any button|space|space bar|enter|return
en secret  password|passphrase|pass phrase|passcode|pin|secret|secret value|token|access token|api key|api-key
en secret  api_key|apikey|otp|verification code|2fa code
en secret  recovery code|security code|authentication code|seed phrase|recovery phrase|mnemonic
en secret  encryption key|master key|unseal key|recovery key|private key|access key|passwd|mfa code|auth code|cvv|cvc
en choose  choice|choose|select|selection|option|number|which|pick|what
en what    what|which|where|who|whom|how|why|when|name|enter|in which|may i have|may i ask|may i know
en capital capital|uppercase
en dont    n|don't|dont|do not|continue without
en agree   ok|okay|sure|go ahead|y|yep|yeah|all
en way     ctrl|control|esc|escape|interrupt|quit|q to|stop|^c|^d|^g|^q|^x|^z
en amount  how many|how much|how long|how often|number of|count
en english the|or|this|you|your|and|with|for|are|does|what|which|it
de yes     ja
de no      nein
de y       j
de n       n
de deny    abbrechen|abbruch|verweigern|ablehnen|zurückweisen|nicht vertrauen|verbieten
de allow   immer|erlauben|zulassen|akzeptieren|annehmen|genehmigen|vertrauen|bestätigen|gestatten|zustimmen
de allow   immer erlauben
de quit    verwerfen|beenden|verlassen|ende|schließen|aufhören|zurück
de keep    behalt|beibehalt|überspring|speicher|ignorier|lassen|verschieb|warten|pausier|rückgängig|schütz
de keep    gespeicher|gesicher|übersprung|erhalten|aufbewahr|bleiben|wiederherstell|anstatt|geschütz|verschoben
de keep    anhäng|anhalt|unterbrech|sicherung|sichern|simul
de press   drücke|betätigen
de key     taste|eingabetaste
de secret  passwort|passwörter|kennwort|mantra|paßwort|geheimnis|geheimzahl
de choose  auswahl|auswählen|wähle|wahl|ihre wahl|nummer|zahl
de what    welche|welcher|welches|welchen|wo|wohin|wer|wie|wieviel|warum|wann
de capital großbuchst
fr yes     oui
fr no      non
fr y       o
fr n       n
fr deny    annuler|refuser|rejeter|rejet|interdire
fr allow   toujours|autoriser|accepter|permettre|approuver|confirmer|faire confiance|toujours autoriser|confiance
fr quit    abandonner|abandon|interrompre|quitter|sortir|fermer|terminer|retour|précédent
fr keep    gard|conserv|ignor|enregistr|sauvegard|laiss|reporter|reporté|attend|pause|protég|restaur|rétabl|arrêt
fr press   appuyez|appuyer|pressez|tapez|enfoncez
fr key     touche|entrée|retour chariot
fr secret  mot de passe|phrase de passe|phrase secrète|mots de passe|code personnel
fr choose  choisir|choisissez|sélection|choix|votre choix|numéro|nombre
fr what    quel|quelle|quels|quelles|quoi|où|qui|comment|combien|pourquoi|quand
fr capital majuscul
es yes     sí|si
es no      no
es y       s
es n       n
es deny    cancelar|cancela|abortar|denegar|rechazar|rechazo|negar|prohibir|no confiar
es allow   siempre|permitir|aceptar|confiar|confirmar|confirme|confianza
es quit    interrumpir|salir|abandonar|finalizar|terminar|cerrar|fin|atrás|anterior|volver
es keep    manten|conserv|omit|guard|ignor|dejar|aplaz|pospon|esper|pausa|deshac|proteg|restaur|respald|deten|copia de
es press   pulse|presione|pulsar|teclee
es key     tecla|intro
es secret  contraseña|clave|frase de paso
es choose  elegir|elija|seleccionar|seleccione|selección|elección|su elección|escoja|número|opción
es what    qué|cuál|cuáles|dónde|quién|cómo|cuánto|cuántos|cuándo
es capital mayúsc
it yes     sì|si
it no      no
it y       s
it n       n
it deny    annulla|annullare|rifiuta|rifiutare|negare|nega
it allow   sempre|consentire|consenti|permettere|permetti|accetta|accettare|approva|autorizza|autorizzare|confermare
it allow   conferma|fidarsi|fiducia
it quit    interrompere|interrompi|uscire|esci|uscita|chiudere|abbandona|chiudi|indietro
it keep    manten|conserv|ignor|salva|lasci|rimand|posticip|attend|aspett|pausa|protegg|protett|ripristin|ferma
it keep    sospend|copia di
it press   premere|premi|premete
it key     tasto|invio
it secret  codice segreto|parola d'ordine|frase segreta|chiave segreta
it choose  scegli|seleziona|selezione|scelta|numero|opzione
it what    quale|quali|qual|dove|chi|quanto|quanti|perché|quando|che cosa
it capital maiusc
pt yes     sim
pt no      não
pt y       s
pt n       n
pt deny    cancelar|abortar|negar|rejeitar|recusar|não confiar
pt allow   sempre|permitir|aceitar|aprovar|autorizar|confiar|confirmar|confiança|conceder
pt quit    interromper|sair|sai|fechar|terminar|encerrar|voltar|recuar|anterior|atrás
pt keep    manter|mantid|conserv|ignor|salv|guard|deixa|adia|esper|pausa|desfaz|proteg|restaur|parar|cópia de
pt press   pressione|prima|carregue|tecle|pressionar|aperte
pt key     tecla
pt secret  senha|palavra-passe|palavra-chave|frase secreta|palavra passe
pt choose  escolher|escolha|selecionar|selecione|seleccione|seleção|selecção|sua escolha|número|opção
pt what    qual|quais|onde|quem|como|quanto|quantos|quando
pt capital maiúsc
nl yes     ja
nl no      nee
nl y       j
nl n       n
nl deny    annuleren|annuleer|afbreken|breek af|weigeren|verbieden
nl allow   altijd|toestaan|accepteer|accepteren|vertrouwen|vertrouw|bevestigen|bevestig|toelaten|sta toe
nl quit    verwerpen|verwerp|afsluiten|stoppen|verlaten|einde|stop|sluiten|beëindigen|terug|vorige
nl keep    behoud|bewaar|bewaren|overslaan|opslaan|opgeslagen|overgeslagen|negeer|uitstel|wacht|pauz|ongedaan|bescherm
nl keep    onderbreek|reservekopie
nl press   druk|toets|typ
nl key     toets
nl secret  wachtwoord|paswoord
nl choose  kies|kiezen|selecteer|selecteren|keuze|nummer|getal|optie
nl what    wat|welk|welke|waar|wie|hoe|hoeveel|waarom|wanneer
nl capital hoofdletter
pl yes     tak
pl no      nie
pl y       t
pl n       n
pl deny    anuluj|przerwij|poniechaj|przerwać|anulować|odmów|odmowa|zabroń
pl allow   zawsze|zezwól|pozwól|zgoda|akceptuj|zaakceptować|akceptacja|zatwierdź|zaufaj|potwierdź|zezwolić
pl quit    odrzuć|odrzucić|odrzucenie|wyjdź|wyjście|zakończ|koniec|zamknij|opuść|wstecz|powrót|wróć
pl keep    zachowa|pomiń|pominąć|zapisa|zostaw|odłoż|odrocz|poczek|wstrzym|cofn|chroni|zatrzym|kopię
pl press   naciśnij|nacisnąć|wciśnij|wcisnąć|wciśnięcie
pl key     klawisz|klawisza
pl secret  hasło|hasła|frazę
pl choose  wybierz|wybrać|wybór|wyboru|numer|liczba|opcja|liczbę
pl what    jaki|jaka|jakie|jaką|który|która|które|którą|gdzie|kto|jak|ile|dlaczego|kiedy
pl capital wielkimi
ru yes     да
ru no      нет
ru y       д
ru n       н
ru deny    отмена|отменить|прервать|прерывание|запретить|отказать|отклонить|отвергнуть|отказаться|не доверять|отказ
ru allow   всегда|разрешить|позволить|принять|одобрить|доверять|подтвердить|доверие|принимать|подтвердите
ru quit    выход|выйти|закрыть|завершить|покинуть|назад|вернуться
ru keep    сохран|остав|пропуст|отлож|подожд|приостан|защит|останов|резервн
ru press   нажмите|нажать|нажатие
ru key     клавишу|клавиша|ввод
ru secret  пароль|пароля
ru choose  выберите|выбрать|выбор|ваш выбор|номер|число|вариант|введите номер
ru what    что|какой|какая|какое|какие|какую|который|где|куда|кто|как|сколько|почему|когда
ru capital заглавн|прописн
uk yes     так
uk no      ні
uk y       т
uk n       н
uk deny    скасувати|відміна|перервати|відмінити|скасування|заборонити|відхилити|відмовити|відмова
uk allow   завжди|дозволити|надати|прийняти|довіряти|підтвердити|погодитися|довіра
uk quit    відкинути|вийти|вихід|закрити|завершити|закінчити|назад|повернутися
uk keep    зберег|збереж|залиш|пропуст|відклад|зачек|призупин|захист|зупин|резервн
uk press   натисніть|натиснути|натискання
uk key     клавішу|клавіша
uk secret  пароль|пароля|кодову фразу|ключову фразу|пінкод
uk choose  виберіть|вибрати|вибір|ваш вибір|оберіть|номер|число|варіант|веберіть
uk what    що|який|яка|яке|які|яку|котрий|де|куди|хто|як|скільки|чому|коли
uk capital великими
tr yes     evet
tr no      hayır
tr y       e
tr n       h
tr deny    iptal|vazgeç|reddet|reddedildi|reddetme|izin verme
tr allow   her zaman|izin ver|onayla|kabul et|güven|kabul
tr quit    durdur|çık|çıkış|kapat|çıkmak|sonlandır|bitir|geri|önceki
tr keep    kaydet|kayded|koru|atla|sakla|ertele|bekle|duraklat|geri al|durdur|yedek
tr press   basın|bas
tr key     tuşa|tuş|düğmeye|düğme
tr secret  parola|şifre
tr choose  seç|numara|sayı
tr what    hangi|hangisi|nerede|nereye|nasıl|kaç|neden|niçin
tr capital büyük harf
ja yes     はい|ハイ
ja no      いいえ|イイエ
ja y       y
ja n       n
ja deny    キャンセル|取消|中止|取り消し|中断|拒否|拒否する|拒絶|信頼しない|禁止|拒否します
ja allow   常に|許可|承認|受け入れる|許可する|信頼|同意|受諾|常に許可|確認|受入|信用
ja quit    終了|閉じる|抜ける|戻る|前へ
ja keep    保存|保持|残|スキップ|維持|延期|待つ|待ち|待機|停止|元に戻|バックアップ
ja press   押す|押して|押せば
ja key     キー|リターン|エンター|改行|リターンキー
ja secret  パスワード|パスフレーズ
ja choose  選択|選んでください|選ぶ|番号
ja what    何|どの|どれ|どこ|誰|いくつ|いつ|なぜ|どちら
ja capital 大文字
zh yes     是|是的
zh no      否|不是|不
zh y       y
zh n       n
zh deny    取消|中止|中断|中斷|拒绝|拒絕|不信任|禁止|否决|不接受|不允许
zh allow   总是|總是|允许|允許|接受|同意|批准|信任|确认|確認|总是允许|授权|許可
zh quit    放弃|放棄|退出|离开|離開|结束|結束|关闭|關閉|返回|后退|上一步|向后
zh keep    保存|保留|跳过|跳過|儲存|储存|推迟|延迟|延期|等待|暂停|暫停|撤销|撤銷|停止|备份|備份
zh press   按|请按|請按|敲
zh key     任意键|任意鍵|一个键|任何鍵|按键|任何键|回车|回车键|確認鍵|輸入鍵|回車
zh secret  密码|密碼|口令|密語
zh choose  选择|選擇|请选择|請選擇|编号|編號|选项|選項|您的选择|数字
zh what    什么|什麼|哪|谁|誰|多少|几个|为何|如何|怎么|多久
zh capital 大写
ko yes     예|네
ko no      아니요|아니오|아니
ko y       y
ko n       n
ko deny    취소|중단|거부|거절|금지
ko allow   항상|허용|승인|수락|신뢰|동의|확인|허가
ko quit    중지|종료|끝내기|나가기|닫기|끝냄|마침|뒤로|이전
ko keep    저장|보관|유지|건너|보존|연기|기다|대기|일시|되돌|멈추|멈출|정지|백업
ko press   누르십시오|누르세요|치세요|누르면|누르기|눌러
ko key     아무 키|아무키나|엔터|리턴
ko secret  암호|비밀번호|패스워드
ko choose  선택|번호|숫자
ko what    무엇|어느|어디|누구|어떻게|몇|언제|왜|어떤
ko capital 대문자
`

// word is a word of the table. joined: it may follow letters, as Han, Kana and Hangul are written; begun: letters may
// follow it.
type word struct {
	text          string
	joined, begun bool
}

// lexicon is the word table as it is used: the words of each meaning, and the words for yes and for no, and their
// letters, of each language in turn. It is made when the first question is read.
var lexicon = sync.OnceValues(func() (words map[string][]word, of map[string][]string) {
	words, of = map[string][]word{}, map[string][]string{}
	for line := range strings.Lines(strings.TrimSpace(wordTable)) {
		meaning := strings.Fields(line)[1]
		list := strings.Split(strings.TrimSpace(line[11:]), "|") // the words stand in one column
		of[meaning] = append(of[meaning], list[0])
		stem := strings.Contains("keep press secret choose capital", meaning)
		for _, text := range list {
			first, size := utf8.DecodeRuneInString(text)
			eastern := unicode.In(first, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Hangul)
			joined := eastern && (stem || size < len(text)) // one character alone is a word where it stands alone
			words[meaning] = append(words[meaning], word{text, joined, joined || stem && len(text) >= 4})
		}
	}
	return words, of
})

// findWord is where the first word of those meanings stands in a text that is plain and in lower case, and of two the
// longer one; −1 none.
func findWord(meanings, text string) (from, to int) {
	words, _ := lexicon()
	from, to = -1, -1
	for meaning := range strings.FieldsSeq(meanings) {
		for _, w := range words[meaning] {
			for end := 0; ; {
				next := strings.Index(text[end:], w.text)
				if next < 0 {
					break
				}
				at := end + next
				end = at + len(w.text)
				before, _ := utf8.DecodeLastRuneInString(text[:at])
				after, _ := utf8.DecodeRuneInString(text[end:])
				if !w.joined && isWordRune(before) || !w.begun && isWordRune(after) {
					continue
				}
				if from < 0 || at < from || at == from && end > to {
					from, to = at, end
				}
				break
			}
		}
	}
	return from, to
}

// afterWord returns what follows the word of that meaning that a label begins with, a mark before it left out.
func afterWord(meaning, label string) (rest string, ok bool) {
	text := strings.TrimLeftFunc(strings.ToLower(plain(label)), func(r rune) bool { return !isWordRune(r) })
	from, to := findWord(meaning, text)
	return text[max(to, 0):], from == 0
}

// startsWith reports whether a label begins with a word of that meaning.
func startsWith(meaning, label string) bool {
	_, ok := afterWord(meaning, label)
	return ok
}

// isAll reports whether a label is a word of that meaning and nothing else.
func isAll(meaning, label string) bool {
	rest, ok := afterWord(meaning, label)
	return ok && rest == ""
}

// hasWord reports whether a word of that meaning stands in the text.
func hasWord(meaning, text string) bool {
	from, _ := findWord(meaning, strings.ToLower(plain(text)))
	return from >= 0
}

// isWordRune reports whether r is part of a word.
func isWordRune(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }

// plain is text as the patterns read it: full-width forms as their ASCII ones, every blank a space, one rune for one.
func plain(text string) string {
	if isASCII(text) {
		return text
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= '！' && r <= '～':
			return r - '！' + '!'
		case r == '、':
			return ','
		case r == '。':
			return '.'
		case r == '’', r == '‘':
			return '\''
		case unicode.Is(unicode.Zs, r):
			return ' '
		}
		return r
	}, text)
}

// isASCII reports whether the text, which is valid UTF-8, has nothing but ASCII.
func isASCII(text string) bool { return len(text) == utf8.RuneCountInString(text) }

// ---- adapters ----
// What is known of each tool.

// Adapter is what atlasbridge knows of one tool: one table row.
type Adapter struct {
	Name        string
	MinVer      string        // the oldest version supported, "" any
	MaxVer      string        // the newest one, with which the row was measured
	Hooks       string        // how hooks are installed: "claude-settings" or ""
	SubmitDelay time.Duration // between a text and its Enter
	Digits      bool          // a digit chooses at once, without Enter
	Submit      string        // goes on from a list with ticks to the review
	Mark        string        // what an input box begins with
	Stop        string        // the key that interrupts a turn (measured)
	StopAgain   *pattern      // a row that asks for that key a second time
	Box         *pattern      // the row of the empty input box, the turn over
	Head        *pattern      // the first row of a dialog without a frame
	Works       *pattern      // a row, or ESC and the title, while it works
	Asks        *pattern      // the title while a dialog is open
	Said        *pattern      // the row, with its margin, in which a message of the user's begins
	Says        *pattern      // the margin and mark of the row in which one of the tool's own begins
	Closes      *pattern      // the row below a turn's words that says that it is over
	Hints       *pattern      // the first row of what else stands there and is none of its words
	Stopped     *pattern      // the row that says that the turn was interrupted
	Fails       *pattern      // the row in which the error that ended a turn begins: its words
	Speaks      bool          // the Program Status Protocol: OSC 7501
	Batch       []string      // arguments with which it prints and ends, and needs no terminal
}

// adapters is the registry, measured with the versions named as MaxVer; the last row stands for every other tool. To
// add a tool: record it (run --record) with its box empty, at work, asking, and a turn over, interrupted and failed;
// add a row whose patterns fit these rows of its screen and no others (lab --screen, --explain); name it in runPage.
var adapters = []*Adapter{
	{
		Name:        "claude",
		MinVer:      "2.1.0",
		MaxVer:      "2.1.332",
		Hooks:       "claude-settings",
		Batch:       []string{"-p", "--print"},
		SubmitDelay: 100 * time.Millisecond,
		Digits:      true,
		Submit:      "\x1b[C",
		Mark:        "❯",
		Stop:        "\x1b",
		Box:         re(`^❯(\x{a0}|$)`),
		Works: re(`^\x1b[◐◑◒◓]|esc to interrupt|^[·✻✽✳✶✢*] .*… \(|` +
			`\(running \w+ hook|^✻ .* · retrying in \d`),
		Said:    re(`^❯[ \x{a0}]\S`),
		Says:    re(`^● `),
		Closes:  re(`^✻ \pL+ for \d`),
		Hints:   re(`^◐ \pL+ · /effort|^ctrl\+y to paste|^Waiting for permission…`),
		Stopped: re(`^⎿[ \x{a0}]+Interrupted\b`),
		Speaks:  true,
		Fails: re(`^[●⎿][ \x{a0}]+` +
			`((?:API Error|Credit balance|Not logged in)\b.*)`),
	},
	{
		Name:        "codex",
		MinVer:      "0.160.0",
		MaxVer:      "0.169.0",
		Batch:       []string{"exec", "e"},
		SubmitDelay: 100 * time.Millisecond,
		Mark:        "›",
		Stop:        "\x1b",
		Box:         re(`^›( Ask Codex to do anything)?$`),
		Head:        re(`^(Would you like to|Folder access|Hooks need review|Question \d)`),
		Works:       re(`^\x1b[⠁-⣿]|\(\d+[hms][^)]* • esc to interrupt\)`),
		Asks:        re(`^\[ [!.] \] Action Required`),
		Said:        re(`^› \S`),
		Says:        re(`^• `),
		Closes:      re(`^Worked for `),
		Hints:       re(`^Tip: `),
		Stopped:     re(`^■ Conversation interrupted`),
		Fails:       re(`^■ (.*)`),
		Speaks:      true,
	},
	{
		Name:        "gemini",
		MinVer:      "0.50.0",
		MaxVer:      "0.61.0",
		Batch:       []string{"-p", "--prompt"},
		SubmitDelay: 1500 * time.Millisecond,
		Digits:      true,
		Mark:        ">",
		Stop:        "\x1b",
		Box:         re(`^>(\s+Type your message.*)?$`),
		Works:       re(`^\x1b\s*✦|\(esc to cancel, \d+[hms]`),
		Asks:        re(`^\s*✋`),
		Said:        re(`^ > \S`),
		Says:        re(`^✦ ?`),
		Hints:       re(`^ℹ This request failed|^\? for shortcuts|^Shift\+Tab to `),
		Stopped:     re(`^ℹ Request cancelled`),
		Fails:       re(`^✕ (.*)`),
	},
	{
		Name:        "opencode",
		MinVer:      "1.0.0",
		MaxVer:      "1.18.33",
		Batch:       []string{"run"},
		SubmitDelay: 300 * time.Millisecond,
		Stop:        "\x1b",
		StopAgain:   re(`esc again to interrupt`),
		Box:         re(`^┃(\s+Ask anything….*)?$`),
		Head:        re(`^△ `),
		Works:       re(`^[⬝■]+\s+esc (again to )?interrupt|^[⬝■].*\[retrying `),
		Said:        re(`^  ┃  \S`),
		Closes:      re(`^▣ `),
		Stopped:     re(`^▣ .* · interrupted$`),
	},
	{
		Name:        "qwen",
		MinVer:      "0.20.0",
		MaxVer:      "0.24.4",
		Batch:       []string{"-p", "--prompt"},
		SubmitDelay: 100 * time.Millisecond,
		Digits:      true,
		Mark:        ">",
		Stop:        "\x1b",
		Box:         re(`^>(\s+Type your message.*)?$`),
		Head:        re(`^\? `),
		Works:       re(`^\x1b[◐◑◒◓]|\(\d+[hms][^)]*esc to cancel\)`),
		Asks:        re(`^✳`),
		Said:        re(`^  > \S`),
		Says:        re(`^  ◆\x{fe0e}? +`),
		Stopped:     re(`^●\x{fe0e}? Request cancelled`),
		Fails:       re(`^✕ (.*?)(?: \(Press Ctrl\+Y to retry\))?$`),
	},
	{
		Name:        "generic",
		SubmitDelay: 50 * time.Millisecond,
		Stop:        "\x03",
	},
}

// needsNoTerminal reports whether the tool prints and ends with these arguments.
func (a *Adapter) needsNoTerminal(args []string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		name, _, _ := strings.Cut(arg, "=")
		return slices.Contains(a.Batch, name)
	})
}

// reStreamJSON are arguments, with a NUL between two, that ask for each message as a line of JSON.
var reStreamJSON = re(`(^|\x00)(--output-format|-o)[=\x00]stream-json(\x00|$)`)

// streamsJSON reports whether the tool prints each message as a line of JSON. Known tools do that only where they print
// and end.
func (a *Adapter) streamsJSON(args []string) bool {
	asked := reStreamJSON.MatchString(strings.Join(args, "\x00"))
	return asked && (a.Batch == nil || a.needsNoTerminal(args))
}

// adapterFor is the row of a command, by its base name without extension; else the last one.
func adapterFor(name string) *Adapter {
	name = strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
	name = strings.ToLower(name)
	for _, a := range adapters {
		if a.Name == name {
			return a
		}
	}
	return adapters[len(adapters)-1]
}

// ---- detector ----
// The screen judged over time: when what it asks is a question, and when that is over.

// settleQuiet is how long no output has come before the screen is looked at: it may be a frame of ten a second. A
// repaint comes in pieces ≤ 30 ms apart, and 97 of 100 programs that wait are seen reading within 50 ms of their last
// output (measured on 442 recordings).
const settleQuiet = 110 * time.Millisecond

// How long the masked screen must have been still before a candidate is believed.
const (
	settle     = 100 * time.Millisecond // a question
	settleIdle = 500 * time.Millisecond // an empty box
)

const (
	lookEvery  = 250 * time.Millisecond  // between two looks while output comes
	pollTTY    = 10 * time.Second        // between two looks at the state of a terminal that is still, at most
	goneAfter  = 200 * time.Millisecond  // out of sight: the question is gone
	anewWait   = 500 * time.Millisecond  // after an answer: what was painted anew since is another question
	againWait  = 1500 * time.Millisecond // the same where nothing was painted, and the program reads
	againKnown = 3 * time.Second         // the same of an agent: busy it shows a key after 2.2 s (claude 2.1)
	maxAsked   = 6                       // questions a minute while nothing is typed
	maxFull    = 16 << 10                // bytes of a dialog
	maxFar     = 4 << 10                 // characters of what stands above a question's context
)

// DetectOptions are the settings of a Detector: a part of Config, by the names of config.toml.
type DetectOptions struct {
	Threshold    float64               `json:"detection_threshold"`   // lowest Score of a pattern
	Stuck        time.Duration         `json:"stuck_timeout_seconds"` // no byte for so long: a line may be a question
	Context      int                   `json:"context_chars"`         // characters at most of what stands above a question
	BufferBytes  int                   `json:"buffer_size_bytes"`     // of raw output kept
	SafeDefaults map[PromptType]string `json:"safe_defaults"`         // with what stands there of each type
}

// Detector looks at a Screen over time. It is deterministic: the same calls give the same prompts.
// One goroutine at a time uses it.
type Detector struct {
	Screen  *Screen
	adapter *Adapter
	o       DetectOptions
	raw     []byte // the last BufferBytes of output
	mask    string // the screen without what moves on it
	tty     TTYState
	turn    turnSigns
	view    *view // the last look

	window   []string // the rows of a known tool's window in the last look
	told     int      // of these rows, from the top, were told
	windowAt int      // rows that had scrolled out by then
	begun    bool     // the tool was given something to do

	found  *candidate // what it finds: by its readers, or cur with what is typed there, or a box with a draft; nil nothing
	cur    *candidate // the question in force, the last one returned; nil none
	motion motion     // in the text of found
	typed  bool       // something was typed while it was in force

	outAt     time.Time // when output last came
	changedAt time.Time // when it last changed the mask
	movedAt   time.Time // when it last showed something else, but for what blinks
	shown     [3]string // the last screens and cursors, the newest first: what blinks alternates between two
	lookedAt  time.Time // when the screen was last looked at
	enterAt   time.Time // when Enter was typed; of an injection the end of its echo: asleep until then

	lookDue time.Time // zero, or when the output that has come is looked at

	ttyDue  time.Time // when the terminal's state is worth a look
	askDue  time.Time // zero, or when found is asked
	goneDue time.Time // zero, or when cur, which is out of sight, is forgotten

	askedAt []time.Time // when questions were asked in the last minute, with nothing typed since
}

// candidate is what one look takes for a question: a prompt, where it stands, and what it needs to be believed.
type candidate struct {
	Prompt
	esc     bool          // the dialog names Escape as the way out
	guess   bool          // its answers are guessed, or the screen says more of them than their labels
	line    string        // of a question on the cursor's line: the text up to the cursor; "" for dialogs
	heading string        // of a printed list: what stands above it
	ended   bool          // the line that asks has ended, the cursor is in the blank row below it
	left    *string       // it is answered in a field: what stands left of the cursor there; else nil
	rows    [2]int        // the first and the last in which it asks: of its line, or of its dialog
	why     string        // what finds it, in words
	wait    time.Duration // how long the masked screen must have been still
	silent  bool          // it is a guess from silence: wait counts from when anything last moved
}

// onLine reports whether the answer is typed in the cursor's line, where it shows.
func (c *candidate) onLine() bool { return c.line != "" || c.ended }

// newCandidate is a question of that kind in which nothing is pointed at.
func newCandidate(kind PromptType, score float64) *candidate {
	return &candidate{Prompt: Prompt{Type: kind, Score: score, Pointer: -1, Signals: []string{"structure"}}}
}

// newDetector returns a detector with a blank screen of that size.
func newDetector(a *Adapter, rows, cols int, o DetectOptions) *Detector {
	// The first look finds another screen than "\x00".
	return &Detector{Screen: newScreen(rows, cols), adapter: a, o: o, mask: "\x00", shown: [3]string{"\x00"}}
}

// Feed takes output of the child, and returns the reports of OSC 7501 in it. Next asks for a Tick at lookDue, which
// looks at it; an earlier one does, too.
func (d *Detector) Feed(p []byte, now time.Time) []ProgramStatus {
	d.Screen.WriteFlood(p)
	d.raw = append(d.raw, p[max(0, len(p)-d.o.BufferBytes):]...)
	d.raw = d.raw[max(0, len(d.raw)-d.o.BufferBytes):]
	d.outAt = now
	d.lookDue = now
	if now.Sub(d.lookedAt) < lookEvery {
		d.lookDue = now.Add(settleQuiet)
	}
	return d.takeReports(now)
}

// takeReports takes what the tool has said of itself, the newest maxStatuses of it: it may have worked between two
// looks. It returns what is none of its titles.
func (d *Detector) takeReports(now time.Time) (reports []ProgramStatus) {
	all := d.Screen.reports
	d.Screen.reports = nil
	for _, status := range all[max(0, len(all)-maxStatuses):] {
		titled := status.State == ""
		switch {
		case titled && d.turn.report == "" && d.adapter.Works.MatchString("\x1b"+status.Title):
			d.turn.noteWork(false, now)
		case !titled && d.adapter.Speaks:
			d.turn.noteReport(status, now)
		}
		if !titled {
			reports = append(reports, status)
		}
	}
	return reports
}

// Resize gives the screen another size.
func (d *Detector) Resize(rows, cols int, now time.Time) {
	d.Screen.Resize(rows, cols)
	d.Feed(nil, now)
}

// Typed notes what goes to the child: any key may have answered the question in force. The first Enter, or a character
// typed behind its line, begins an answer.
func (d *Detector) Typed(p []byte, now time.Time) {
	enter := bytes.ContainsAny(p, "\r\n")
	d.askedAt = nil
	d.turn.noteKeys(p, d.Working(), now)
	if d.cur != nil {
		d.typed = true
		begun := d.cur.onLine() && len(p) > 0 && p[0] >= ' '
		// An Enter after the first one is typed somewhere else.
		if d.enterAt.IsZero() && (enter || begun) {
			d.Answering()
		}
	}
	if enter && now.After(d.enterAt) {
		d.enterAt = now
		d.ttyDue = now.Add(settleQuiet / 2)
	}
}

// Working reports whether the tool is in a turn, at work or with a question of its own, as far as it tells.
func (d *Detector) Working() bool {
	if d.turn.report == "" {
		return d.view != nil && (d.view.working || d.view.reported)
	}
	return d.turn.report == "working" || d.turn.report == "blocked"
}

// Answering notes that an answer to the question in force is about to be typed, if that still stands: what is painted
// in its rows from now on is another question.
func (d *Detector) Answering() {
	view, found := d.view, d.found
	d.view = d.newView()
	d.found = d.view.read()
	if d.cur != nil && d.compare() != another {
		d.Screen.Answered(d.cur.onLine())
		if d.found != nil {
			d.Screen.markAsked(d.found.rows, d.found.onLine())
		}
	}
	d.view, d.found = view, found // as before: the next look is to see what has changed since the last one
}

// Sleep lets the echo of an answer pass: nothing is asked until then.
func (d *Detector) Sleep(until time.Time) {
	d.enterAt = until
	d.askDue = until
	d.typed = true
}

// Again forgets the question in force, so that what stands there is asked anew.
func (d *Detector) Again() {
	d.forget()
	d.enterAt = time.Time{}
}

// forget leaves no question in force.
func (d *Detector) forget() {
	d.cur = nil
	d.goneDue = time.Time{}
}

// Tick returns a question that is seen for the first time, else nil.
func (d *Detector) Tick(tty TTYState, now time.Time) *Prompt {
	d.look(tty, now)
	if !d.ttyAt().After(now) {
		quiet := min(now.Sub(d.changedAt), now.Sub(d.enterAt))
		d.ttyDue = now.Add(min(max(quiet, settleQuiet/2), pollTTY))
	}
	d.track(now)
	f, due := d.found, d.schedule(now)
	d.askDue = due
	left := !d.lookDue.IsZero() // a question above f, just now: what f tells is no longer what stands there
	if due.IsZero() || due.After(now) || left {
		return nil
	}
	d.askedAt = append(d.askedAt[max(0, len(d.askedAt)-maxAsked+1):], now)
	d.Again()
	d.cur = f
	d.typed = false
	d.askDue = time.Time{}
	p := f.copied()
	screen := []rune(safeText(d.Screen.Text()))
	p.Recent = string(screen[max(0, len(screen)-500):])
	p.Full = safely(p.Full, maxFull)
	p.Above = safeText(strings.Trim(strings.Join(p.parts.above, "\n"), "\n"))
	p.Far = safeText(p.Far)
	p.publish()
	if p.Idle {
		d.tellTurn(p)
	}
	return p
}

// Look returns what the screen asks this instant, nil nothing: the typist's eye. It is compared, and nothing of it
// leaves the process: it is not redacted, and has no Shown before publish.
func (d *Detector) Look(tty TTYState, now time.Time) *Prompt {
	d.look(tty, now)
	if d.found == nil {
		return nil
	}
	return d.found.copied()
}

// copied is its prompt, which keeps what it is when the detector looks again.
func (c *candidate) copied() *Prompt {
	p := c.Prompt
	p.Choices = append([]Choice{}, p.Choices...)
	return &p
}

// movingMarks are spinners and marks that blink, besides the Braille patterns.
const movingMarks = "●○◎◐◑◒◓✻✽✳✶✢·◇◆✦⏺⬝■▪•∙"

// masked is r, or −1 for what may move on a screen that stands still: spinners, marks that blink, digits, blanks.
func masked(r rune) rune {
	digit := r >= '0' && r <= '9'
	if digit || r == ' ' || r >= 0x2800 && r <= 0x28ff || strings.ContainsRune(movingMarks, r) {
		return -1
	}
	return r
}

// look brings the mask, the view and what is found in it up to date.
func (d *Detector) look(tty TTYState, now time.Time) {
	if d.view == nil || !d.lookDue.IsZero() {
		d.foldOutput(now)
	}
	if tty.Reading != ReadingUnasked {
		d.tty = tty
	}
	d.motion.now = now
	view := d.newView()
	if view == d.view {
		return
	}
	d.view = view
	d.found = nil
	unwanted := d.cur == nil && d.adapter.Box == nil && tty.Reading == ReadingUnasked
	if unwanted && now.Sub(d.changedAt) < settle/2 { // text that comes cannot be asked yet
		view.changes--
		return
	}
	d.found = view.read()
	if d.cur != nil && d.cur.left != nil && d.typed {
		d.lookInField()
	}
	d.lookAtTurn(now)
	if d.found == nil {
		return
	}
	d.motion.see(d.found.all)
}

// lookInField finds the question in force where nothing has changed but what is typed in its field.
func (d *Detector) lookInField() {
	v := d.view
	v.typed = strings.TrimPrefix(v.left(), *d.cur.left)
	f := v.read()
	if f != nil {
		f.Question = d.cur.Question // it may be the hint that gave way to the text
		f.seal()
		if d.cur.compare(&f.Prompt) != another {
			d.found = f
			return
		}
	}
	v.typed = ""
}

// lookAtTurn notes what the screen tells of the turn, and finds the box of one that is over although
// a text stands in it.
func (d *Detector) lookAtTurn(now time.Time) {
	t, v := &d.turn, d.view
	switch {
	case v.working:
		t.noteWork(false, now)
	case t.worked && d.found == nil:
		d.found = v.readLeft()
	case t.worked:
	case t.sent && t.report == "" && v.known && d.found != nil && d.found.Idle:
		on := v.answer()
		if on.end != "" && on.all != t.told { // a turn too short to be seen, of a tool that tells nothing
			t.noteWork(true, now)
		}
	}
}

// foldOutput takes the output since the last look into the mask. What was known of the terminal holds no more where
// that changes.
func (d *Detector) foldOutput(now time.Time) {
	d.lookDue = time.Time{}
	d.lookedAt = now
	if d.outAt.IsZero() {
		d.outAt = now
	}
	s := d.Screen
	shown := fmt.Sprint(s.Text(), s.scrolled) // the rows of text that scrolls may all be the same
	mask := strings.Map(masked, shown)
	if s.modes[modeCursor] {
		at := fmt.Sprint(s.row, s.col)
		mask += at
		shown += at
	}
	if shown != d.shown[0] {
		if shown != d.shown[1] || d.shown[0] != d.shown[2] { // else it blinks
			d.movedAt = d.outAt
		}
		d.shown = [3]string{shown, d.shown[0], d.shown[1]}
	}
	if mask != d.mask {
		d.mask = mask
		d.changedAt = d.outAt
		d.tty = TTYState{}
		d.ttyDue = d.outAt.Add(settleQuiet / 2)
	}
}

// track forgets the question in force once it has been out of sight for a while, and an input box of a tool that has
// worked since: that is told again.
func (d *Detector) track(now time.Time) {
	if d.cur == nil {
		return
	}
	worked := d.turn.worked && (d.turn.typed || d.turn.ended != "")
	if worked && d.cur.Idle {
		d.forget()
		return
	}
	switch d.compare() {
	case theSame:
		d.goneDue = time.Time{}
		return
	case unsure:
		d.goneDue = now.Add(lookEvery)
		return
	}
	if d.goneDue.IsZero() {
		d.goneDue = now.Add(goneAfter)
		if d.ttyDue.After(d.goneDue) { // it may have been between two calls
			d.ttyDue = d.goneDue
		}
	}
	// That the line was left is noted as soon as the system says who reads, else once the question has gone.
	gone := !now.Before(d.goneDue)
	if gone || d.tty.Reading != ReadingUnasked {
		d.leave(now)
	}
	if gone {
		d.forget()
	}
}

// leave notes that the cursor has left the line of the question in force, if that stands there yet: no reader finds it
// from now on. Where a program reads lines, it asks still, whatever was printed below.
func (d *Detector) leave(now time.Time) {
	r := d.cur.place.row - 1 - d.Screen.scrolled
	here := d.cur.place.sizes == d.Screen.sizes && r >= 0 && r < d.view.row
	if here && !(d.tty.Canonical && d.tty.Reading == ReadingYes) && !d.Screen.grid[r].answered &&
		strings.HasPrefix(d.Screen.Row(r), clipBytes(d.cur.line, d.Screen.cols)) {
		d.Screen.grid[r].answered = true
		d.Screen.changes++
		d.lookDue = now
	}
}

// compare compares what is on the screen with the question in force. An answer that is being typed behind it, or in an
// idle input box, does not count.
func (d *Detector) compare() sameness {
	c := d.cur
	left := c.onLine() && d.tty.Reading == ReadingBusy && slices.Contains(c.Signals, "tty") && // what asked reads no
		(d.typed || d.motion.now.Sub(d.outAt) > lookEvery) // more, nor does it paint
	verdict := another
	switch {
	case left:
	case d.found == nil && c.Idle && d.enterAt.IsZero() && d.view.known && !d.view.working:
		return theSame
	case c.onLine() && (d.typed || c.ended && d.found == nil):
		typed, stands := d.behindLine()
		if len(answersOf(plain(typed))) == 0 { // else another question stands behind what was typed
			verdict = stands
		}
	}
	if verdict == another && d.found != nil {
		verdict = c.compare(&d.found.Prompt)
	}
	return verdict
}

// behindLine is what was typed behind the line of the question in force, and how what stands around that line compares
// with what was asked: another where it begins no more where and as it did.
func (d *Detector) behindLine() (typed string, verdict sameness) {
	c := d.cur
	line, top := d.view.cursorLine()
	line += d.view.after()
	typed, begins := strings.CutPrefix(line, strings.TrimRight(c.line, " "))
	if !begins && c.Type == FreeText { // Inquirer's default gives way to what is typed
		typed, begins = strings.CutPrefix(line, reDefault.ReplaceAllString(c.line, ""))
	}
	typed = strings.TrimSpace(typed)
	switch {
	case !begins || c.place.differs(d.view.place(top)):
		return typed, another
	case c.Idle:
		return typed, theSame
	case c.ended:
		top = d.view.belowText(top)
	}
	now := c.Prompt
	now.parts.body, _ = d.view.linesAbove(&now, top)
	if typed == "" { // below a key the program may say what that chooses, or how the word could go on
		now.parts.among = append(c.parts.among[:1:1], d.view.linesBelow(d.view.row)...)
	}
	now.seal()
	return typed, d.motion.compare(c.all, now.all)
}

// schedule is when the question found is to be asked, zero where it is not: once it has been still. While nothing is
// typed at most six are asked in a minute.
func (d *Detector) schedule(now time.Time) time.Time {
	f := d.found
	switch {
	case now.Before(d.enterAt):
		return d.enterAt
	case f == nil:
		return time.Time{}
	case d.cur != nil && d.compare() != another:
		if d.enterAt.IsZero() || f.Idle || d.view.typed != "" {
			return time.Time{}
		}
		return d.againAt(f)
	}
	due := d.changedAt.Add(f.wait)
	if f.silent {
		due = d.movedAt.Add(f.wait)
	}
	if f.Idle {
		due = later(due, d.turn.ending())
	}
	if f.silent && d.view.reported { // the report comes before the dialog is painted
		due = later(due, d.motion.since.Add(f.wait))
	}
	if len(d.askedAt) >= maxAsked {
		due = later(due, d.askedAt[0].Add(time.Minute))
	}
	return due
}

// againAt is when what stands where a question was answered is another one, although it looks the same: once its rows
// were written anew, or what reads the terminal has read on for a while and nothing has changed. An agent may be busy.
// Zero: not as far as can be seen.
func (d *Detector) againAt(f *candidate) time.Time {
	answered := later(d.enterAt, d.outAt)
	switch {
	case d.view.known && d.view.reads() && d.outAt.After(d.enterAt):
		return answered.Add(againKnown)
	case d.view.known:
	case d.Screen.anew(f.rows):
		return later(d.enterAt.Add(anewWait), d.changedAt.Add(f.wait))
	case d.view.reads():
		return answered.Add(againWait)
	}
	return time.Time{}
}

// Next is when Tick is next worth calling, now at the earliest.
func (d *Detector) Next(now time.Time) time.Time {
	next := d.lookDue
	if next.IsZero() {
		next = d.ttyAt()
	}
	for _, due := range []time.Time{d.askDue, d.goneDue} {
		if !due.IsZero() && due.Before(next) {
			next = due
		}
	}
	return later(next, now)
}

// WantTTY reports whether a TTYState may change what Tick says. Full-screen agents always read, their own dialogs at
// least.
func (d *Detector) WantTTY(now time.Time) bool {
	agent := d.Screen.AltScreen() || d.Screen.status.State != ""
	sure := d.found != nil && !d.found.silent
	if d.adapter.Box != nil && agent && sure {
		return false
	}
	return !d.ttyAt().After(now)
}

// ttyAt is when the terminal's state is worth a look: right after its output a program is not back at its keyboard.
func (d *Detector) ttyAt() time.Time { return later(d.ttyDue, d.outAt.Add(settleQuiet/2)) }

// Behind is what the last look saw where the answer was typed: behind the line of the question in force, else key,
// where that stands at the cursor; and whether the question still stands.
func (d *Detector) Behind(key string) (typed string, stands bool) {
	if d.cur == nil {
		return "", false
	}
	if d.cur.onLine() {
		typed, verdict := d.behindLine()
		return typed, verdict == theSame
	}
	line, _ := d.view.cursorLine()
	if strings.HasSuffix(line, key) {
		typed = key
	}
	return typed, d.found != nil && d.cur.follows(&d.found.Prompt)
}

// Explain says in words which reader has found something at the last look, and what tells it.
func (d *Detector) Explain() string {
	f := d.found
	if f == nil {
		return "no reader finds anything"
	}
	return fmt.Sprintf("found by the reader of %s, in rows %d to %d", f.why, f.rows[0]+1, f.rows[1]+1)
}

// Activity is what the status command shows.
func (d *Detector) Activity() string {
	switch {
	case d.cur == nil && len(d.raw) == 0:
		return "starting"
	case d.cur == nil:
		return "running"
	case d.cur.Idle:
		return "idle"
	case d.cur.Permission:
		return "waiting_permission"
	}
	return "waiting"
}

// Transcript returns the lines that became final since the last call, and the text that may still change. end: all is
// final.
func (d *Detector) Transcript(end bool) (final []string, live string) {
	settled := end || d.cur != nil
	if !d.ReadWindow() {
		return d.Screen.Transcript(settled)
	}
	if settled {
		d.tellWindow(len(d.window))
	}
	return d.Screen.takeLines(), ""
}

// tellWindow tells the window's rows before row end, each once.
func (d *Detector) tellWindow(end int) {
	for ; d.told < end; d.told++ {
		d.Screen.tr.add(d.window[d.told], false)
	}
}

// ReadWindow tells the rows that have left a known tool's window since the last look. It reports whether there is
// a window; while a dialog stands in it nothing leaves. What it shows before it was given something to do is no text.
func (d *Detector) ReadWindow() bool {
	v := d.newView()
	t := &v.s.tr
	t.window = t.window || v.known && (v.s.AltScreen() || v.up(v.last+1, v.inBox) >= 0)
	end := v.textEnd()
	if !t.window || end == 0 {
		return t.window
	}
	var rows []viewRow
	for n := min(v.s.scrolled-d.windowAt, maxScrollback); n > 0 && d.window != nil; n-- {
		l, ok := v.s.above(n)
		if ok {
			rows = append(rows, readRow(v.s.trimmed(l), v.s.cols))
		}
	}
	d.windowAt = v.s.scrolled
	now := []string{""}
	message := 0 // the row in which the user's last one begins
	for _, w := range append(rows, v.rows[:end]...) {
		if v.ofUser(w) {
			message = len(now)
		}
		text := w.raw
		if w.text == "" {
			text = ""
		}
		ends := v.ends(w)
		if text+now[len(now)-1] != "" && ends != TurnFinished && ends != TurnReady && !v.spins(w) {
			now = append(now, text)
		}
	}
	if d.begun {
		d.tellLeaving(now)
		return true
	}
	v.s.takeLines()
	d.window, d.told = now, len(now)
	if d.turn.worked && (d.turn.sent || message > 0) {
		d.begun = true
		d.told = max(1, message)
	}
	return true
}

// tellLeaving tells the rows of the last look that have gone from above one that still stands, with all above them. now
// are the rows that stand there. Where none of the last look's does, what was told lately is not told again.
func (d *Detector) tellLeaving(now []string) {
	stands := make([]int, len(d.window)) // where each of them stands, in the same order, the lowest first; −1 nowhere
	last, told := 0, len(now)
	for i, row := range slices.Backward(d.window) {
		k := told - 1
		for k >= 0 && (row == "" || now[k] != row) {
			k--
		}
		stands[i] = k
		if k >= 0 {
			told = k // what stands above has scrolled back
			last = max(last, i+1)
		}
	}
	if last == 0 {
		last = len(stands)
		told = 0
		for told < len(now) && slices.Contains(d.Screen.tr.recent, now[told]) {
			told++
		}
	}
	leaves := d.told
	for i, to := range stands[:last] {
		if to < 0 && d.window[i] != "" {
			leaves = max(leaves, i+1)
		}
	}
	d.tellWindow(leaves)
	for _, to := range stands[:leaves] {
		told = max(told, to+1) // what has changed above it was told, too
	}
	d.window, d.told = now, told
}

// reSpinner is a spinner before it shows any seconds.
var reSpinner = re(`^[^\pL\pN\s] \pL+…$|^[⠁-⣿] `)

// textEnd is the row where a program's text ends: the cursor's; in a known tool that of the input box, whether or not
// something stands in it, or of a spinner above it with what hangs on that; 0 while there is no box, for that is a
// dialog.
func (v *view) textEnd() int {
	if !v.known {
		return 1 + v.up(v.row, hasText)
	}
	box := v.box().row
	if !v.s.modes[modeCursor] && box > 0 && !v.rows[box-1].rule {
		box = -1 // the pointer of a dialog
	}
	if v.a.Mark == "" {
		box = v.row
		for box > 0 && v.rows[box-1].depth > 0 {
			box--
		}
		dialog := func(w viewRow) bool { return w.depth > 0 && w.fits(v.a.Head) }
		if v.rows[box].depth == 0 || v.up(v.last+1, dialog) >= 0 {
			return 0
		}
	}
	end := max(0, box, v.up(v.last+1, v.inBox))
	low := max(0, end-8)
	spinner := slices.IndexFunc(v.rows[low:end], v.spins)
	if spinner >= 0 {
		end = low + spinner
	}
	return 1 + v.up(end, hasText)
}

// spins reports whether the row says that the tool works.
func (v *view) spins(w viewRow) bool {
	return w.fits(v.a.Works) || w.fits(reSpinner)
}

// later is the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// ---- one look ----
// The screen as rows to be read, and what stands where.

// view is one look at the screen.
type view struct {
	s        *Screen
	a        *Adapter
	tty      TTYState
	o        DetectOptions
	motion   *motion
	changes  uint // of the screen: with tty all that a look depends on
	rows     []viewRow
	row, col int    // of the cursor
	last     int    // the last row that shows anything, −1 none
	hidden   bool   // no cursor is to be seen
	drawn    bool   // the program draws it itself
	before   string // then: what stands left of it
	typed    string // in the field at the cursor, to be left out
	reported bool   // the tool says that it asks
	known    bool   // the tool is one of ours, and no lines are read: its own screen stands there
	buttons  int    // the row of a framed dialog's buttons, in angle brackets as those of whiptail are; −1 none
	busy     bool   // nobody reads; of a tool of ours that tells nothing
	working  bool   // a known tool is at work: see atWork
}

// viewRow is a row freed of its frame, and read as a choice: pointer, box to tick, number, words.
type viewRow struct {
	row   int
	raw   string
	text  string // without the frame
	at    int    // column where it begins
	depth int    // upright lines crossed on the way there
	rule  bool   // nothing but lines
	top   bool   // a full-width rule: a dialog begins
	edge  bool   // the upper edge of a frame

	pointer  string
	num      string
	label    string
	optionAt int  // column of all behind the pointer
	tickAt   int  // of the box
	labelAt  int  // of the words
	tick     int  // −1 no box, 0 empty, 1 ticked
	look     Attr // how its first words are drawn
}

// fits reports whether the pattern, if there is one, matches the row's text.
func (w *viewRow) fits(p *pattern) bool { return p.MatchString(w.text) }

// fitsAny reports whether the pattern, if there is one, matches the text of one of the rows.
func fitsAny(rows []viewRow, p *pattern) bool {
	return slices.ContainsFunc(rows, func(w viewRow) bool { return w.fits(p) })
}

// heads reports whether the row asks, as one above a list does.
func (w *viewRow) heads() bool { return reHeading.MatchString(plain(w.text)) }

const (
	uprights = "│┃║▌▎▏┆╎"
	lines    = "─━═╌┄┈▔▁▀▄‾╴╶╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝╠╣╹╻╷╵◆◇"
	tickBox  = `((?:(?:\[[ xX*✔✓]\]|\([ xX*•]\)|[◯◉◻◼☐☑☒□■])\s*)?)`
)

// newView looks at the screen and reads its rows, unless the last look still shows it.
func (d *Detector) newView() *view {
	s, a := d.Screen, d.adapter
	if d.view != nil && d.view.tty == d.tty && d.view.changes == s.changes {
		return d.view
	}
	v := &view{s: s, a: a, tty: d.tty, o: d.o, motion: &d.motion, changes: s.changes, row: s.row, col: s.col}
	v.known = a.Box != nil && !v.readsLine()
	v.busy = v.tty.Reading == ReadingBusy && !v.known
	v.reported = v.known && (a.Asks.MatchString(s.title) || s.status.asks())
	v.readRows()
	v.last = v.up(s.rows, showsAny)
	v.buttons = v.up(s.rows, func(w viewRow) bool { return w.depth > 0 && w.fits(reButtons) })
	echoes := (v.tty.Canonical || v.tty.Echo) && strings.ContainsFunc(v.left(), isWordRune)
	v.hidden = !s.modes[modeCursor] && !echoes // who lets the terminal echo asks where its cursor is
	if v.hidden {
		v.drawnCursor(d.view)
	}
	v.working = v.known && v.atWork()
	return v
}

// readRows reads the screen's rows, those that it shows as before from what is known of them.
func (v *view) readRows() {
	s := v.s
	v.rows = make([]viewRow, s.rows)
	for r, l := range s.grid {
		s.text(l)
		l.writeTo(s.cols)
		if l.row == nil {
			l.row = ref(readRow(s.trimmed(l), s.cols))
		}
		v.rows[r] = *l.row
		v.rows[r].row = r
		v.rows[r].look = v.lookOf(v.rows[r]) // it may have changed without the text
	}
}

// drawnCursor finds the cursor that a program draws itself while the terminal's is hidden: the
// lowest cell that is drawn as one, alone, with nothing behind it but a hint. One that blinks is where it was.
func (v *view) drawnCursor(was *view) {
	for r := v.last; r >= 0; r-- {
		for c := 0; c < v.s.cols-2 && v.s.grid[r].lit; c++ {
			if v.cursorLike(r, c) && v.hintFrom(r, c+1) {
				v.putCursor(r, c)
				return
			}
		}
	}
	same := was != nil && was.drawn && was.row < v.s.rows && was.col < v.s.cols
	if same && v.s.part(v.s.grid[was.row].cells[:was.col]) == was.before && v.hintFrom(was.row, was.col) {
		v.putCursor(was.row, was.col)
	}
}

// putCursor takes a cell for the cursor.
func (v *view) putCursor(row, col int) {
	v.row, v.col = row, col
	v.hidden = false
	v.drawn = true
	v.before = v.left()
}

// cursorLike reports whether a cell is drawn as a cursor, and its neighbours are not: reversed, a
// block, or on a background of its own. It is not in the last columns, where a scroll bar is.
func (v *view) cursorLike(r, c int) bool {
	cells := v.s.grid[r].cells
	left, right := cell{}, cells[c+1]
	if c > 0 {
		left = cells[c-1]
	}
	marked := func(c cell) bool { return c.Reverse || strings.ContainsRune(cursorBlocks, c.ch) }
	lit := cells[c].BG != 0 && cells[c].BG != left.BG
	return (marked(cells[c]) || lit) && !marked(left) && !marked(right) && left.BG == right.BG
}

// cursorBlocks are the characters that programs draw a cursor with.
const cursorBlocks = "█▋"

// hintFrom reports whether the row shows nothing from column c on but what is faint, and its frame.
func (v *view) hintFrom(r, c int) bool {
	for ; c < v.s.cols; c++ {
		ch := v.s.grid[r].cells[c].ch
		if ch != 0 && !strings.ContainsRune(" "+uprights+lines, ch) && !v.faintAt(r, c) {
			return false
		}
	}
	return true
}

// widthOf is how many columns a text takes.
func widthOf(text string) int {
	n := 0
	for _, r := range text {
		n += runeWidth(r)
	}
	return n
}

// number is 1 for true.
func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// readRow reads a row of a screen with that many columns.
func readRow(raw string, cols int) viewRow {
	text := strings.TrimLeft(raw, " "+uprights+lines)
	frame := strings.TrimSuffix(raw, text)
	w := viewRow{
		raw:  raw,
		text: strings.TrimRight(text, " █▐"+uprights+lines),
		at:   widthOf(frame),
		tick: -1,
	}
	for _, r := range frame {
		w.depth += number(isUpright(r))
	}
	w.rule = w.text == "" && strings.ContainsAny(raw, lines)
	w.edge = w.rule && w.depth == 0 && strings.ContainsAny(raw, "╭┌╔")
	w.top = w.at >= cols-1 && strings.IndexAny(raw, "─▔━") == 0
	m := reOption.FindStringSubmatch(w.text)
	w.pointer = strings.Trim(m[1], "↑↓ ○")
	w.num = strings.Trim(m[3], "(). :")
	w.label = m[5]
	w.optionAt = w.at + widthOf(m[1])
	w.tickAt = w.optionAt + widthOf(m[2]+m[3])
	w.labelAt = w.tickAt + widthOf(m[4])
	mark := m[2] + m[4]
	if mark != "" {
		w.tick = number(strings.ContainsAny(mark, "xX*✔✓•◉◼☑☒■"))
	}
	return w
}

// indented is the row's text in its column, without the frame.
func (w viewRow) indented() string {
	return strings.TrimRight(strings.Repeat(" ", w.at)+w.text, " ")
}

// showsAny reports whether there is anything in the row.
func showsAny(w viewRow) bool { return w.raw != "" }

// hasText reports whether there is anything in the row besides a frame.
func hasText(w viewRow) bool { return w.text != "" }

// cursorLine is the text up to the cursor, all of its row where that is hidden, and the row where its line begins.
func (v *view) cursorLine() (string, int) {
	return v.whole(strings.TrimSuffix(v.rows[v.row].raw, v.after()), v.row)
}

// after is what stands behind the cursor.
func (v *view) after() string {
	cells := v.s.grid[v.row].cells
	if v.hidden {
		return ""
	}
	return strings.TrimRight(v.s.part(cells[v.col:]), " ")
}

// left is what stands left of the cursor.
func (v *view) left() string {
	return strings.TrimSuffix(v.s.part(v.s.grid[v.row].cells[:v.col]), v.typed)
}

// behind reports whether something stands behind the cursor that is no hint of what may be typed.
func (v *view) behind() bool { return v.after() != "" && !v.drawn && !v.faintAt(v.row, v.col) }

// whole is the text of row r with that of the rows that run over into it, and the first of them.
func (v *view) whole(text string, r int) (string, int) {
	for r > 0 && v.s.grid[r-1].wrapped && len(text) <= maxFull {
		r--
		text = v.s.text(v.s.grid[r]) + text
	}
	return text, r
}

// up is the nearest row above row r that is such, −1 without one.
func (v *view) up(r int, such func(w viewRow) bool) int {
	r--
	for r >= 0 && !such(v.rows[r]) {
		r--
	}
	return r
}

// place is where row r is in the session.
func (v *view) place(r int) place { return place{v.s.scrolled + r + 1, v.s.sizes} }

// belowText is the row below the nearest one above row r that shows anything: r itself but for blank rows between.
func (v *view) belowText(r int) int { return v.up(r, showsAny) + 1 }

// lineAbove is the nearest line above row r that is not blank, and its first row, −1 without one.
func (v *view) lineAbove(r int) (string, int) {
	r = v.up(r, showsAny)
	if r < 0 {
		return "", r
	}
	return v.whole(v.rows[r].raw, r)
}

// linesAbove are the lines above row top of a prompt: the paragraph that ends there, in all of its length. It gives the
// prompt the context, whole lines of what stands above that, as many as context_chars allows, and what is further up.
// All begin with the row in which an earlier question was answered, if there is one. cut: the beginning of the
// paragraph or the context is not known any more.
func (v *view) linesAbove(p *Prompt, top int) (paragraph []string, cut bool) {
	var context, far []string
	part, left := &paragraph, maxFull // the one that is being read, and how many characters it may still have
	for answered := false; !answered; {
		var text string
		var known bool
		text, top, answered, known = v.lineBefore(top)
		size := utf8.RuneCountInString(text)
		blank := isBlank(text)
		if part == &paragraph && blank {
			part, left = &context, v.o.Context
		}
		if part == &context && size > left {
			part, left = &far, maxFar
		}
		if !known || size > left {
			cut = part == &paragraph && known || top < 0 && part != &far
			break
		}
		if !blank || len(*part) > 0 {
			*part = append(*part, text)
			left -= size
		}
	}
	slices.Reverse(paragraph)
	slices.Reverse(context)
	slices.Reverse(far)
	p.parts.above = context
	p.Far = strings.Join(far, "\n")
	return paragraph, cut
}

// isBlank reports whether a row shows nothing but a frame.
func isBlank(text string) bool { return strings.Trim(text, " "+uprights+lines) == "" }

// linesBelow are the rows below row r down to a blank one, or a frame.
func (v *view) linesBelow(r int) (below []string) {
	for r++; r <= v.last && v.rows[r].text != ""; r++ {
		below = append(below, v.rows[r].raw)
	}
	return below
}

// lineBefore is the line that ends in the row above row r, those above the screen are negative: its
// text, its first row, whether an answer was typed in it. Not known: there is none; first is then
// negative where one has been forgotten.
func (v *view) lineBefore(r int) (text string, first int, answered, known bool) {
	l, known := v.rowBefore(r)
	if !known || l.cut {
		return "", -number(known || v.forgotten(r)), false, false
	}
	first = r
	for more := true; more && len(text) <= maxFull; more = more && l.wrapped {
		text = v.s.text(l) + text
		answered = answered || l.answered
		first--
		l, more = v.rowBefore(first)
	}
	return strings.TrimRight(text, " "), first, answered, true
}

// rowBefore is the row above row r, on the screen or above it.
func (v *view) rowBefore(r int) (*line, bool) {
	if r > 0 {
		return v.s.grid[r-1], true
	}
	return v.s.above(1 - r)
}

// forgotten reports whether there was a row above row r that belongs to what stands on the screen.
func (v *view) forgotten(r int) bool {
	if v.s.AltScreen() {
		return v.s.lost
	}
	return v.s.scrolled+r > v.s.scrollbackFrom
}

// faintAt reports whether the text there is faint.
func (v *view) faintAt(row, col int) bool { return v.s.attr(row, col).faint() }

// faint reports whether text drawn like that is dim or grey: it explains rather than offers.
func (a Attr) faint() bool { return a.Dim || isGrey(a.FG) }

// atWork reports whether a known tool is at work: its screen or its title shows it, and the protocol, where it speaks
// that, does not say otherwise. The protocol alone silences nothing, for a file that is shown may hold its bytes.
func (v *view) atWork() bool {
	state := v.s.status.State
	if v.a.Speaks && state != "" && state != "clear" && state != "working" {
		return false
	}
	if v.a.Works.MatchString("\x1b" + v.s.title) {
		return true
	}
	says := v.up(v.last+1, func(w viewRow) bool { return w.row >= v.last-12 && w.fits(v.a.Works) })
	if says < 0 {
		return false
	}
	dialog := v.readGroup() // above its choices stands what it asks, in which a command may say so
	return dialog == nil || dialog.rows[0] < says
}

// readsLine reports whether lines are read, as no agent's own screen does: somebody else asks.
func (v *view) readsLine() bool {
	return v.tty.Reading != ReadingBusy && v.tty.Canonical && v.tty.Echo
}

// reads reports whether the program reads the terminal, or may: where the system cannot tell, raw mode without echo is
// that of one that reads (measured on 442 programs: precision .95).
func (v *view) reads() bool {
	return v.tty.Reading == ReadingYes || v.tty.Reading == ReadingUnknown && !v.tty.Canonical && !v.tty.Echo
}

// readers find what the screen asks, the first of them that finds anything.
var readers = []struct {
	of   string
	read func(v *view) *candidate
}{
	{"input boxes", (*view).readIdle},
	{"lists and buttons", (*view).readGroup},
	{"empty fields", (*view).readField},
	{"questions on a line", (*view).readLine},
	{"rows of keys", (*view).readKeys},
	{"screens that keep still", (*view).readStill},
}

// read finds what the screen asks, nil nothing.
func (v *view) read() *candidate {
	if v.working || v.last < 0 && !v.reads() {
		return nil
	}
	for _, reader := range readers {
		f := reader.read(v)
		if f != nil {
			f.why = strings.TrimSuffix(reader.of+": "+f.why, ": ")
			v.finish(f)
			return f
		}
	}
	return nil
}

// ---- input boxes ----
// Where an agent takes its next message, and what stands there already.

// maxBoxRows is how far above the cursor an input box may begin.
const maxBoxRows = 20

// inputBox is what stands in the input box, or on the input line, of the program: a text may be
// typed only where that is nothing.
type inputBox struct {
	found bool // there is one
	row   int  // in which it begins, −1 none
	draft string
	whole bool // the draft is all that it holds, in one row
}

// reMark is what stands before the cursor in an empty input line: a prompt's mark, and what frames it.
var reMark = re(`^[^\pL\pN]*$`)

// reFolded is what tools show for a long paste, for a picture's path, or at the end of what they hide.
var reFolded = re(`\[(Pasted|Image)|[*•]$`)

// Box looks at the input box. Of a tool that is not known it is the cursor's line, if that is idle
// or shows nothing but a mark: what else stands there may be a draft.
func (d *Detector) Box(tty TTYState, now time.Time) inputBox {
	d.look(tty, now)
	v := d.view
	switch {
	case d.found != nil && d.found.Idle && !d.found.drafted:
		return inputBox{found: true, whole: true}
	case v.known:
		return v.box()
	case v.hidden && v.tty.Reading != ReadingYes:
		return inputBox{} // it may be a menu that is not taken for one: Enter would choose
	}
	line, _ := v.cursorLine()
	return inputBox{found: true, draft: strings.TrimSpace(line), whole: reMark.MatchString(line)}
}

// box is the input box of a known tool around the cursor: the tool's mark begins it or, where it has none (opencode),
// its frame.
func (v *view) box() inputBox {
	row := v.row
	if v.a.Mark != "" {
		row = v.up(row+1, func(w viewRow) bool { return w.rule || strings.HasPrefix(w.text, v.a.Mark) })
	}
	if row < max(0, v.row-maxBoxRows) || v.rows[row].rule || v.a.Mark == "" && v.rows[row].depth == 0 {
		return inputBox{row: -1}
	}
	w := v.rows[row]
	text := strings.Trim(strings.TrimPrefix(w.text, v.a.Mark), " \u00a0")
	if v.hintAt(row, w.at+widthOf(w.text)-widthOf(text)) {
		text = ""
	}
	if text == "" && v.row > row { // a draft that begins with an empty row
		text = "⏎" + v.rows[v.row].text
	}
	alone := row == v.row && v.textRows(row+1, min(row+1, v.last)) == 0
	return inputBox{found: true, row: row, draft: text, whole: alone && !reFolded.MatchString(text)}
}

// readIdle finds the empty input box of a known tool, the cursor in it.
func (v *view) readIdle() *candidate {
	w := v.rows[v.row]
	if !v.known || v.reported || w.text == "" && v.hidden || !v.inBox(w) {
		return nil
	}
	// Claude shows a hint there in grey, and what was typed in white.
	_, draft, _ := strings.Cut(w.text, "\u00a0")
	if draft != "" && !v.hintAt(v.row, w.at+2) {
		return nil
	}
	return v.idle()
}

// inBox reports whether the row is that of an empty input box. A frame may be part of it.
func (v *view) inBox(w viewRow) bool {
	return w.fits(v.a.Box) || v.a.Box.MatchString(strings.TrimSpace(w.raw))
}

// readLeft finds the input box of a known tool in which a text stands: somebody types there, or the
// tool has put back the message of a turn that was interrupted.
func (v *view) readLeft() *candidate {
	if v.a.Mark == "" || !v.box().found {
		return nil
	}
	f := v.idle()
	f.why = "input boxes: a text stands in it"
	f.drafted = true
	v.finish(f)
	return f
}

// idle is the candidate of an input box.
func (v *view) idle() *candidate {
	f := newCandidate(FreeText, 0.90)
	f.rows = [2]int{v.row, v.row}
	f.wait = settleIdle
	f.Idle = true
	f.Question = v.a.Name + " waits for your next message"
	return f
}

// hintAt reports whether the text there is a hint, the drawn cursor on its first character or not.
func (v *view) hintAt(row, col int) bool {
	return v.faintAt(row, col) || v.s.attr(row, col).Reverse && v.faintAt(row, col+1)
}

// ---- menus ----
// Lists with a pointer, choices side by side, and dialogs in a frame.

// keysHint is a hint in parentheses at a row's end, or at that of the row below: which keys choose.
const keysHint = `(?im)[ \t]*[\[(](use|press|move)[^\])\n]*(arrow|space|enter|up|down)[^\](\)\n]*` +
	`(\(\S*\)[^\])\n]*)?(\n[^\])\n]*)?[\])][ \t]*$`

var (
	reOption = re(`^((?:[↑↓ ]*[❯›▸▶►➤‣→»>●○]\s*|[↑↓]\s{3})?)` + tickBox +
		`((?:\(?\d{1,2}[.):]\)?\s+)?)` + tickBox + `(.*)$`)
	reHinted = re(keysHint + `|\s*(› ?-? ?use arrow-.*|[›‣…·])\s*$`)
	// reKeysHint is what stands behind a question until the first key (inquirer 9, tty-prompt).
	reKeysHint = re(keysHint)
	// reChoosing is what a row says that tells how to choose.
	reChoosing = re(`(?i)↑ ?[/|,]? ?↓|↓ ?[/|,]? ?↑|← ?[/|,]? ?[↑↓→]|⏎|⇆|\b(arrows?|navigate)\b|` +
		`\btab\b.{0,12}\b(select|toggle)|` +
		`\b(enter|return|space ?bar|space)\b.{0,12}\b(select|confirm|submit|choose|toggle|` +
		`accept|apply|pick|open|change)|` +
		`\b(select|confirm|submit|choose|toggle|pick)\b.{0,14}\b(enter|return|space)\b|` +
		`\buse .{0,12}keys|^\(?\d+/\d+\b|^\(.*\b(move|reveal|use|press)\b.*\)$`)
	// reMoving is what says that a pointer moves, or that Enter takes what it is at.
	reMoving = re(`(?i)↑|↓|\bnavigate\b|\bto select\b|\benter select\b`)
	// reHeading is the row above a list that asks.
	reHeading = re(`^[?◆◇] |[?:…]\s*$|^[?]`)
	reCount   = re(`^\(?\d+/\d+\b`)
	reGap     = re(` {3,}`)
	reSubmits = re(`(?i)\b(enter|return|ctrl.?[a-z])\b.{0,14}\b(submit|send|save|finish|confirm|done|` +
		`continue|next|accept)`)
	reAsked = re(`^[^:]*\?\W*([\[(][^\])]*[\])]\W*)?$`)
	// reRadio are options that no pointer chooses: Enter takes the one ticked, or ticks (pterm), or each has a key
	// (reKeyed; above buttons it is a name). column begins with none of them: beside "●" an empty circle is an option, and
	// among its like it has a tick.
	reButtons = re(`^((?:<\s*[^<>]{1,20}\s*>\s*)+)$`) // those in angle brackets
	reRadio   = re(`^([^\pL\[]*(?:\([ xX*•]\)|\[✗\])|❯[○●]|○)`)
	reKeyed   = re(`^[a-z]  +\pL`)
	reLead    = re(`^[?◆◇✔●■]\s+`)
	reVacant  = re(`(^|[:?*` + uprights + `])\s*$`) // left of the cursor in a field with nothing in it, or a secret
	reAside   = re(`^$|____|^[→●•-] `)              // no part of a paragraph: an empty field, an answer, a list
)

// reEscOut is the hint of a dialog that Escape is the way out: of nothing else, as "Esc to cancel the order" is.
var reEscOut = re(`(?i)\besc(ape)?\b[ :)\]]{1,3}(to |= ?)?` +
	`(cancel|reject|exit|deny|decline|abort|dismiss|go back)(\s*$|\s*[^\pL\s(,:;=→–—-]|\s\s| or\b)`)

// group is what may be a menu: options in one column, or side by side in one row.
type group struct {
	opts   []viewRow
	first  int    // the row of the first of them
	end    int    // that of the last
	at     int    // the option pointed at, −1 unknown
	marked bool   // by a mark, or by the cursor
	weak   bool   // by no more than a colour or bold print
	shape  string // side by side: see sides; "" in one column
	why    string // the reason for which it is believed
}

// focusBar stands left of the one field of a form that has the keyboard (huh).
const focusBar = "┃"

// reason is what makes a group one to choose from, "" where nothing does; each with the recordings, of 688, whose last
// question it finds. One option alone needs a row below it that says how the pointer moves, or what Enter takes.
func (v *view) reason(g *group) string {
	if g.shape != "" {
		return v.reasonAcross(g)
	}
	o := g.opts[0]
	inside := v.hidden || v.row <= g.end && (g.marked || v.row+2 >= g.first)
	w := v.rows[v.row]
	draft := !v.hidden && inside && v.row >= g.first && v.col > w.labelAt &&
		!v.s.attr(v.row, w.labelAt).Reverse // the cursor stands behind a text in an option
	sure := g.at >= 0 && !g.weak
	alone := len(g.opts) == 1
	hint := v.choosingRow(g)
	pointed := sure || o.tick >= 0 || g.at >= 0 && inside && v.reads()
	switch {
	case alone && (g.at < 0 || hint < g.end || !v.rows[hint].fits(reMoving)):
		return ""
	case hint >= 0 && pointed && (!draft || o.num != ""):
		return "a row says how to choose" // 71
	case v.buttons > g.end:
		return "its buttons stand below it in a frame" // 5
	case !sure, draft:
		return ""
	}
	return v.reasonRead(g, inside)
}

// reasonRead is the same where nothing says how to choose: the program reads keys, with the cursor at the list
// (inside), or where it was printed.
func (v *view) reasonRead(g *group, inside bool) string {
	near := inside || v.col == 0 && v.row <= g.end+2
	whole := v.textRows(g.first, g.end) > g.end-g.first // no blank rows in it
	switch {
	case inside && g.opts[0].num != "":
		return "its options are numbered" // 16
	case !v.reads(), !g.marked && g.end == v.s.rows-1: // a status line, and what is said below it
	case v.hidden && g.opts[0].depth > 0:
		return "it stands in a frame" // 8
	case near && v.last-g.end <= 2 && whole:
		return "the program reads keys at it" // 10
	}
	return ""
}

// reasonAcross is the same of choices side by side.
func (v *view) reasonAcross(g *group) string {
	w := v.rows[g.end]
	bare := g.shape == apart || g.shape == slash && g.at < 0
	other := func(o viewRow) bool { return !grants(o.label) && !declines(o.label) }
	switch {
	case len(g.opts) == 1 && g.opts[0].look == v.s.attr(w.row, g.opts[0].at-1): // something else has the keyboard
	case !bare && (w.row >= v.last-4 || w.depth > 0):
		return "they are drawn as buttons" // 17
	case g.at >= 0 && !slices.ContainsFunc(g.opts, other):
		return "one is lit, and all of them decide" // 2
	}
	return ""
}

// maxBelow is how many rows of text may stand below a group: a status line, a footer.
const maxBelow = 12

// readGroup finds what single keys choose, the lowest on the screen: what stands above may have been answered before. A
// pointer beats a colour, several options beat one, and the list in a frame beats the buttons below it. With the cursor
// in a field of a framed dialog, that is to be filled in.
func (v *view) readGroup() *candidate {
	if v.tty.Canonical {
		return nil // nothing is chosen with single keys
	}
	w := v.rows[v.row]
	if !v.hidden && v.row < v.buttons && (w.depth > 1 || strings.Contains(w.raw, "_")) {
		f := newCandidate(FreeText, 0.90)
		f.why = "the cursor is in a field of it"
		f.drafted = !reVacant.MatchString(v.left())
		v.describeField(f, v.buttons)
		return f
	}
	var second *candidate
	for r := v.last; r >= 0; r-- {
		for _, g := range []*group{v.sideBySide(r), v.column(r)} {
			if g == nil || v.textRows(g.end+1, v.last) > maxBelow {
				continue
			}
			g.why = v.reason(g)
			if g.why == "" || v.asksElsewhere(g) {
				continue
			}
			if !g.weak && g.shape != angles && len(g.opts) > 1 {
				if !v.known && v.pointedAbove(g) {
					return nil
				}
				return v.menu(g)
			}
			if second == nil {
				second = v.menu(g)
			}
		}
	}
	return second
}

// asksElsewhere reports whether the keys go to what stands below the group, or over it: a row that asks, and names its
// answers, or the cursor is at a line below the group's frame, which whiptail leaves on a console; or to another field
// of a form, the one that has the bar beside it.
func (v *view) asksElsewhere(g *group) bool {
	barred := func(w viewRow) bool { return strings.HasPrefix(w.raw, focusBar) }
	if !barred(v.rows[g.first]) && slices.ContainsFunc(v.rows, barred) {
		return true
	}
	for _, w := range v.rows[max(0, g.first-1) : v.last+1] {
		parts := strings.FieldsFunc(w.text, isUpright)
		if w.row >= g.first && w.row <= g.end {
			parts = parts[min(1, len(parts)):] // an option says what it likes
		}
		for _, part := range parts {
			kind, _ := answersNamed(part)
			if kind != "" && reAskedAbove.MatchString(plain(part)) {
				return true
			}
		}
	}
	return v.rows[g.end].depth > 0 && !reMark.MatchString(v.promptBelow(g.end))
}

// isUpright reports whether r is of a frame's side.
func isUpright(r rune) bool { return strings.ContainsRune(uprights, r) }

// pointedAbove reports whether a list above has a pointer, too: nobody can tell which of the two gets the keys.
func (v *view) pointedAbove(g *group) bool {
	return v.up(g.first, func(w viewRow) bool {
		above := v.column(w.row)
		return w.pointer != "" && above != nil && len(above.opts) > 1 && above.end < g.first // no heading with a mark
	}) >= 0
}

// aspects are in what an option may be drawn unlike the others. The last three, bold print, a colour, and not to be
// dim, may mean something else.
func aspects(a Attr) [6]any {
	return [...]any{a.Reverse, a.BG, a.Underline, a.Bold, a.FG, !a.Dim}
}

// column is the group of options in one column around the one in row r: marked with a pointer, with boxes to tick, or
// drawn unlike the others; nil where there is none.
func (v *view) column(r int) *group {
	head := v.rows[r]
	boxes := head.tick >= 0 && (v.hidden || v.row <= r)
	unmarked := head.pointer == "" && !boxes
	keyed := head.fits(reRadio) || head.fits(reKeyed) && v.buttons < r
	if head.label == "" || unmarked && head.look == (Attr{}) || v.inBox(head) || keyed {
		return nil
	}
	above := v.grow(head, head, -1)
	g := v.newGroup("", v.grow(above[len(above)-1], head, 1))
	if g == nil || unmarked && g.at != len(above)-1 { // another one has the focus
		return nil
	}
	return g
}

// newGroup is the group of these options, nil where several are marked, as in a list that is only printed. The one that
// is marked has the focus, unless another one is lit and it is not, for the mark may be that of the default, or the
// cursor left there. Without a mark the one that is lit has it, or the one whose box is lit inside (whiptail).
func (v *view) newGroup(shape string, opts []viewRow) *group {
	g := &group{opts: opts, first: opts[0].row, end: opts[len(opts)-1].row, at: -1, shape: shape}
	for i, o := range opts {
		if o.pointer == "" {
			continue
		}
		if g.marked {
			return nil
		}
		g.at, g.marked = i, true
	}
	odd, weak := v.unlike(opts)
	if !g.marked {
		if odd < 0 && opts[0].tick >= 0 {
			insides := slices.Clone(opts)
			for i, o := range opts {
				insides[i].look = v.s.attr(o.row, o.optionAt+1)
			}
			odd, weak = v.unlike(insides)
		}
		g.at, g.weak = odd, weak
		return g
	}
	if odd < 0 || odd == g.at {
		return g
	}
	look := opts[g.at].look
	lit := weak && look != Attr{}
	if shape == "" { // a background may be that of all buttons
		lit = lit || look.BG != 0 || look.Reverse || opts[odd].look.faint()
	}
	if !lit {
		g.at = -1
	}
	return g
}

// grow finds the options from one on, up (step −1) or down (1), that stand beside the one in row head. Blank rows may
// stand between them, where a pointer or numbers show that they belong together, and what explains an option. On the
// way down each label takes what it goes on with in the rows below it: only all of a label refuses.
func (v *view) grow(from, head viewRow, step int) []viewRow {
	num, _ := strconv.Atoi(from.num) // it has two digits at most, or there is none
	// Bullets have no blank rows between them.
	spaced := head.num != "" || head.tick >= 0 || head.pointer != "" && head.pointer != "●"
	found := []viewRow{from}
	gap := 0
	for r := from.row + step; r >= 0 && r <= v.last && gap <= number(spaced) && len(found) < 80; r += step {
		o := v.rows[r]
		last := &found[len(found)-1]
		switch {
		case o.text == "" && reAmong.MatchString(o.raw): // the list goes on
		case o.text == "" && (head.num != "" || !o.rule):
			gap++
		case o.text == "" || gap > 0 && head.num == "" && o.dimmer(head):
			return found // a hint
		case v.isOption(o, head, strconv.Itoa(num+step)):
			found = append(found, o)
			gap = 0
			if o.num != "" {
				num += step
			}
		case gap > 0 || !v.explains(o, head):
			return found
		case step > 0 && v.faintAt(r, o.optionAt) == v.faintAt(last.row, last.labelAt) && !reAmong.MatchString(o.raw):
			last.label += " " + o.text
		}
	}
	return found
}

// isOption reports whether row o is an option beside the one in row head, with the number num where those have numbers.
func (v *view) isOption(o, head viewRow, num string) bool {
	if head.num != "" {
		// "10." may begin further left, or its label further right.
		inLine := o.optionAt == head.optionAt || o.labelAt == head.labelAt
		return o.num == num && inLine || o.num == "" && head.tick >= 0 && o.optionAt == head.tickAt // claude's "Submit"
	}
	asks := head.pointer == "" && o.heads()
	marked := o.pointer != "" && head.pointer != "" && o.pointer != head.pointer // as a heading is
	tree := head.tick >= 0 && head.look.FG != 0                                  // of boxes, one of them lit
	inLine := tree || o.optionAt == head.optionAt
	like := o.num == "" && inLine && o.depth == head.depth && (o.tick < 0) == (head.tick < 0)
	described := v.rows[min(head.row+1, v.s.rows-1)].dimmer(head)
	return like && !asks && !marked && !reCount.MatchString(o.label) && !(described && o.dimmer(head))
}

// dimmer reports whether row o, which is no option by its mark, is faint and the pointer's row is not.
func (o *viewRow) dimmer(head viewRow) bool {
	return o.labelAt == o.at && o.look.faint() && !head.look.faint()
}

// explains reports whether row o belongs to an option above it.
func (v *view) explains(o, head viewRow) bool {
	above := v.rows[max(0, o.row-1)]
	long := above.at+widthOf(above.text) > v.s.cols-20
	return o.optionAt > head.optionAt || o.dimmer(head) || long && head.pointer != ""
}

// unlike is the only option that is drawn unlike the others, −1 without one; weak: by no more than a colour or bold
// print. Of two with a background each it is the one whose background is no grey; of two buttons, which have another
// one between them, it is not black either, or their colours do not tell. Else two are compared with what is around
// them as the third: the end of the row above, or of options side by side the cell left of the first.
func (v *view) unlike(opts []viewRow) (at int, weak bool) {
	count := len(opts)
	if count < 2 {
		return -1, false
	}
	row := opts[0].row
	around := v.s.attr(row-1, v.s.cols-1)
	var between []cell
	if row == opts[1].row {
		around = v.s.attr(row, opts[0].at-1)
		between = v.s.grid[row].cells[opts[0].labelAt:opts[1].labelAt]
	}
	if count == 2 {
		first, second := opts[0].look.BG, opts[1].look.BG
		other := func(c cell) bool { return c.BG != first && c.BG != second }
		buttons := slices.ContainsFunc(between, other)
		dull := func(background int32) bool {
			return isGrey(background) || background > 232 && background <= 240 || buttons && background == 1
		}
		switch {
		case first == 0, between != nil && second == 0: // in a column one grey bar alone is a status line's
		case dull(first) != dull(second):
			return number(dull(first)), false
		case buttons:
			return -1, false
		}
		around.Dim = true
		opts = append(slices.Clip(opts), viewRow{look: around})
	}
	for k := range aspects(around) {
		drawn := func(i int) any { return aspects(opts[i].look)[k] }
		common := drawn(0)
		if drawn(1) == drawn(2) {
			common = drawn(1)
		}
		odd := 0
		for i := range opts {
			if drawn(i) != common {
				odd++
				at = i
			}
		}
		if odd == 1 && at < count && (k < 5 || drawn(at) == true) {
			return at, k > 2
		}
	}
	return -1, false
}

// isGrey reports whether a colour is a shade of grey: what is drawn so explains, or is not pointed at.
func isGrey(colour int32) bool {
	if colour < 1<<24 {
		return colour == 9 || colour > 240 && colour <= 251
	}
	red, green, blue := colour>>16&0xff, colour>>8&0xff, colour&0xff
	brightest := max(red, green, blue)
	return brightest-min(red, green, blue) <= 32 && brightest < 0xc0
}

// lookOf is how the end of an option's first words is drawn: before them may be a mark of its own, behind them a hint.
func (v *view) lookOf(o viewRow) Attr {
	words, _, _ := strings.Cut(strings.ReplaceAll(o.label, " (", "  "), "  ")
	last, _ := utf8.DecodeLastRuneInString(words)
	return v.s.attr(o.row, o.labelAt+max(0, widthOf(words)-runeWidth(last)))
}

// textRows is how many of the rows show text.
func (v *view) textRows(from, to int) int {
	n := 0
	for r := from; r <= to; r++ {
		n += number(v.rows[r].text != "")
	}
	return n
}

// choosingRow is the row near the group that says how to choose, −1 none: it is within six rows of text below, or three
// above, and names arrows, or a key and what that does to a choice. Escape as the way out counts where a pointer is
// shown.
func (v *view) choosingRow(g *group) int {
	tells := func(w viewRow) bool { return w.fits(reChoosing) || g.marked && w.fits(reEscOut) }
	for r := g.end + 1; r <= v.last && v.textRows(g.end+1, r-1) < 6; r++ {
		if tells(v.rows[r]) {
			return r
		}
	}
	return v.up(g.first, func(w viewRow) bool { return w.row >= g.first-3 && tells(w) })
}

// The shapes of choices side by side.
const (
	angles = "angle brackets"
	slash  = "a slash"
	apart  = "words apart"
)

// sides are these shapes: the pattern of a row, whose group is all the choices, and that of one choice.
var sides = []struct {
	shape  string
	row    *pattern
	choice *pattern
}{
	// whiptail, dialog
	{angles, reButtons, re(`<\s*([^<>]*?)\s*>`)},
	// clack
	{"circles", re(`^([●○]\s*\S.* / [●○]\s*\S.*)$`), re(`[●○]\s*(\S.*?)(?: /|$)`)},
	// prompts, enquirer
	{slash, re(`[?›‣] (\pL+ ?/ ?\pL+)$`), re(`(\pL+)`)},
	// opencode
	{"⇆", re(`^(.*?)\s+(?:(?:ctrl|enter|esc|tab)\b.*)?⇆`), re(`(\S+(?: \S+)*)`)},
	// mc, gum
	{apart, re(`^([^<]*(?:  |[\[\]|/])[^<]*)$`),
		re(`\[? ?([^\s\[\]]+(?: [^\s/|\[\]][^\s\[\]]*)*)`)},
}

// sideBySide is the group of choices side by side in row r, nil where there is none.
func (v *view) sideBySide(r int) *group {
	w := v.rows[r]
	for _, s := range sides {
		part := s.row.expr().FindStringSubmatchIndex(w.text)
		if part == nil {
			continue
		}
		in := w.text[part[2]:part[3]]
		var opts []viewRow
		for _, m := range s.choice.expr().FindAllStringSubmatchIndex(in, 10) {
			o := viewRow{row: r, tick: -1, label: in[m[2]:m[3]]}
			o.at = w.at + widthOf(w.text[:part[2]+m[0]])
			o.labelAt = o.at + widthOf(in[m[0]:m[2]])
			o.look = v.lookOf(o)
			cursor := !v.hidden && v.row == r && v.col >= o.at && v.col < o.labelAt+widthOf(o.label)
			if cursor || strings.HasPrefix(in[m[0]:], "●") { // it is marked
				o.pointer = "●"
			}
			opts = append(opts, o)
		}
		if len(opts) < 2 && s.shape != angles || s.shape == apart && !v.reads() {
			return nil
		}
		return v.newGroup(s.shape, opts)
	}
	return nil
}

// reTickMark is a mark that tells by its colour whether the option behind it is ticked (enquirer, gum).
var reTickMark = re(`^[✔✓•⬡⬢]\s+`)

// menu makes the prompt of a group. Of more than nine options it has those around the pointer.
func (v *view) menu(g *group) *candidate {
	f := newCandidate(MultipleChoice, 0.90)
	f.why = g.why
	f.Across = g.shape != ""
	from := max(0, g.at-8)
	f.Pointer = g.at - from
	rows := map[int]string{}
	unmarked := func(o viewRow) bool { return !reTickMark.MatchString(o.label) }
	marks := !slices.ContainsFunc(g.opts, unmarked)
	for i, o := range g.opts {
		if marks { // their colour tells what is ticked
			mark, _ := utf8.DecodeRuneInString(o.label)
			o.tick = number(mark != '•' && mark != '⬡' && !v.faintAt(o.row, o.labelAt))
			o.label = reTickMark.ReplaceAllString(o.label, "")
		}
		rows[o.row] = strings.TrimSpace(rows[o.row] + " " + o.num + " " + o.label)
		if i < from || i >= from+9 {
			f.Cut = f.Cut || o.tick == 1 // nobody could untick it
			continue
		}
		c := Choice{Key: o.num, Label: reGap.ReplaceAllString(o.label, "  ")}
		if len(o.num) == 1 && v.a.Digits { // of two the first one would choose
			c.Keys = o.num
		}
		if o.num == "" && g.opts[0].num != "" { // it is named by its label, as Submit
			c.Key = strings.ToLower(o.label)
		}
		f.Choices = append(f.Choices, c)
		f.Ticked = append(f.Ticked, o.tick == 1)
		f.Multi = f.Multi || o.tick >= 0
	}
	if g.opts[0].num == "" {
		numbered(f.Choices, from+1)
	}
	if v.busy && v.buttons < 0 { // of gpg, which is, pinentry reads
		f.silent = true
		f.wait = stillBlind * v.o.Stuck
	}
	if f.Across && len(g.opts) == 1 {
		f.Type = ConfirmEnter
		f.Choices = nil
	}
	if g.shape == slash { // its question stands in the same row
		f.Question = sentence(v.s.part(v.s.grid[g.end].cells[:g.opts[0].at]))
	}
	v.describe(f, g.first, g.end, rows)
	if !f.Multi && v.buttons > g.end && len(f.Choices) < 9 {
		for _, o := range v.sideBySide(v.buttons).opts {
			if declines(o.label) { // Escape stands for it in whiptail and dialog
				f.Choices = append(f.Choices, Choice{Key: "esc", Label: o.label, Keys: "\x1b"})
			}
		}
	}
	return f
}

// numbered names choices, the first of which stands in that place of its list: by the number that is all of a label,
// else by its place, or, where that names another, by a number beyond.
func numbered(choices []Choice, first int) {
	names := labels(choices)
	for i, c := range choices {
		choices[i].Key = c.Label
		if !reDigits.MatchString(c.Label) {
			place := first + i
			for slices.Contains(names, strconv.Itoa(place)) {
				place += len(choices)
			}
			choices[i].Key = strconv.Itoa(place)
		}
	}
}

// sentence is a line without its mark and without the keys it explains.
func sentence(line string) string {
	return reHinted.ReplaceAllString(reLead.ReplaceAllString(line, ""), "")
}

// describe completes a dialog whose choices are in rows first to end: its kind, question, text, excerpt, and what of it
// is shown. options are its rows that hold choices, as they read whatever is pointed at or ticked.
func (v *view) describe(f *candidate, first, end int, options map[int]string) {
	if len(f.Choices) == 2 && !v.known && !f.Multi {
		asYesNo(f)
	}
	top, above := v.dialogTop(first)
	first = v.up(first, func(w viewRow) bool { return !reAmong.MatchString(w.raw) }) + 1
	f.rows = [2]int{first, end}
	bottom := end + len(v.linesBelow(end))
	f.Cut = f.Cut || above || v.s.cutIn(top, bottom)
	about := ""
	for _, w := range v.rows[top : bottom+1] {
		f.Cut = f.Cut || (f.Multi || w.row <= end) && w.fits(reScrolls) || w.fits(reElided) ||
			reEmptied.MatchString(v.rows[max(w.row-1, 0)].raw+w.raw)
		f.Full += strings.TrimRight(strings.Repeat(" ", min(w.at, 8))+w.text, " ") + "\n"
		row, ok := options[w.row]
		if !ok {
			row = w.indented()
		}
		if f.Multi {
			row = reTicked.ReplaceAllString(row, " ")
		}
		if w.row < first {
			about = strings.TrimSpace(about + "\n" + w.text)
			f.parts.body = append(f.parts.body, row)
		} else {
			f.parts.among = append(f.parts.among, row)
		}
	}
	if row := v.promptBelow(bottom); row != "" {
		f.guess = true
		f.Full += row + "\n"
		f.parts.among = append(f.parts.among, row)
	}
	f.esc = fitsAny(v.rows[top:max(end, v.last)+1], reEscOut)
	head := top
	if !v.known {
		// A paragraph that has scrolled out belongs to it, what is further up is shown too.
		paragraph, cut := v.linesAbove(&f.Prompt, top)
		if top == 0 {
			f.parts.body = append(paragraph, f.parts.body...)
			f.Full = strings.Join(append(paragraph, f.Full), "\n")
			f.Cut = f.Cut || cut
		}
		// What stands above a blank row may be earlier output.
		head = max(top, v.up(v.belowText(first), func(w viewRow) bool { return w.raw == "" })+1)
	}
	if f.Question == "" {
		f.Question = v.question(head, first)
	}
	if f.Type == MultipleChoice && slices.ContainsFunc(labels(f.Choices), grants) {
		f.Excerpt = headAndTail(safeText(about), 200)
	}
}

// reTicked are marks of what is ticked: they may change while their question stands.
var reTicked = re(`[☐☒☑✔✓◯◉◻◼]`)

// reKeyBehind is what may stand behind a label: a mark, and its key.
var reKeyBehind = re(`[.!]?\s*(\(\w\))?\s*$`)

// asYesNo makes a choice of two labels that say no more than yes and no a question of these.
func asYesNo(f *candidate) {
	says := func(i int, meaning string) bool {
		return isAll(meaning, reKeyBehind.ReplaceAllString(f.Choices[i].Label, ""))
	}
	for i := range f.Choices {
		if says(i, "yes") && says(1-i, "no") {
			f.Type = YesNo
			f.Choices[i].Key = "y"
			f.Choices[1-i].Key = "n"
		}
	}
}

// promptBelow is the row at a cursor that stands below a dialog's last row and is none of its own: what is typed goes
// there. "" where there is none.
func (v *view) promptBelow(last int) string {
	typed := v.rows[v.row]
	above := v.row <= last || v.row == v.buttons
	if v.known || v.hidden || above || typed.fits(reChoosing) {
		return ""
	}
	return typed.indented()
}

// reScrolls is a row that says that its list goes on there; "↑/↓: move" explains keys.
var reScrolls = re(`^[↑↓]([^/↑↓]|$)|\breveal more`)

// reAmong is a row of a list that is no option: Inquirer's separator, or what says that more of the list is there.
var reAmong = re(`^[\s│]*(\.\.\.|─{14}|[↑↓]([^/↑↓].*)?|.*\breveal more.*)$`)

// reElided is a row that says that the tool itself leaves out a part of what it asks about: "46%" in a frame, of a text
// that scrolls (dialog).
var reElided = re(`(?i)(?:…|\.\.\.)\s*[+(]?\d+ (?:more )?(?:lines|hidden)|` +
	`\d (?:more )?lines? (?:hidden|truncated|omitted|not shown)|\boutput clipped\b|^\d+%$`)

// reEmptied is two rows, the top and the bottom of a frame: what it frames had no room (gemini 0.61 in twelve rows).
var reEmptied = re(`╮[ │]*╰`)

// dialogTop is the first row of the dialog whose choices begin in that row; above tells that it began above the top of
// the screen. A framed one begins at its frame. Any other begins neither at an edge nor at a heading further right
// than its choices, for both may stand in what it asks about.
func (v *view) dialogTop(first int) (top int, above bool) {
	framed := v.rows[first].depth > 0
	headed := func(w viewRow) bool { return !framed && w.fits(v.a.Head) && w.at <= v.rows[first].optionAt }
	top = v.up(first, func(w viewRow) bool {
		gap := w.raw == "" && (framed && v.known || !v.known && v.rows[max(w.row-1, 0)].raw == "")
		return w.top || w.edge && framed || gap
	})
	head := slices.IndexFunc(v.rows[top+1:first], headed) // the topmost: what is asked may have others in it
	if head >= 0 {
		return top + 1 + head, false
	}
	open := top < 0 && v.known && v.rows[0].raw != ""
	return top + 1, open && (v.s.AltScreen() || v.forgotten(0))
}

// question picks what is asked from rows top to first of a dialog: the last paragraph that is a
// question, else contains one, else of all; "" without any. Rows are joined that go on with the one above.
func (v *view) question(top, first int) string {
	asked, paragraph := "", ""
	best := 0
	led := false // the paragraph begins with the mark of a step
	for r := top; r < first; r++ {
		w := v.rows[r]
		aside := w.fits(reAside)
		lead := reLead.MatchString(strings.TrimLeft(w.raw, " "+uprights))
		above := v.rows[max(r-1, 0)]
		off := w.at - above.at + (widthOf(w.text)-widthOf(above.text))/2 // of its middle
		moved := w.at != above.at && off*off > 1 && !v.s.grid[above.row].wrapped
		if aside || moved || lead {
			paragraph = ""
			led = lead
		}
		if lead {
			best = 0 // those above are answered
		}
		if aside {
			continue
		}
		paragraph = strings.TrimSpace(paragraph + " " + w.text)
		kind := number(led || strings.Contains(paragraph+" ", "? "))
		if reAsked.MatchString(paragraph) {
			kind = 2
		}
		if kind >= best {
			best = kind
			asked = sentence(paragraph)
		}
	}
	return asked
}

// ---- empty fields ----
// What is to be filled in, with nothing typed yet.

// readField finds a field to fill in, with the cursor in it and nothing typed yet: between two lines, or with a cursor
// that the program draws below a question, or above a row that says what Enter does. Between two lines it is an idle
// program's input box, unless an order above it names the key that ends the text: an agent's last words stand there.
func (v *view) readField() *candidate {
	after := v.after()
	if v.hidden || v.tty.Canonical || v.busy || v.behind() {
		return nil
	}
	fence := v.fence()
	fenced := fence < v.row
	hint := fenced && v.faintAt(v.row, v.col-1) // behind which grok draws its cursor
	if !hint && !reMark.MatchString(v.left()) {
		return nil
	}
	asked := viewRow{}
	r := v.up(fence, hasText)
	if r >= 0 {
		asked = v.rows[r]
	}
	question := plain(strings.TrimLeft(asked.raw, " "+uprights)) // with the mark that it may begin with
	_, rest, _ := strings.Cut(question, " ")
	asks := reOrder.MatchString(question) && reEnds.MatchString(rest)
	if !fenced { // an empty one without a drawn cursor is readLine's
		asks = (v.drawn || after+v.typed != "") && (reHeading.MatchString(question) || hasWord("secret", question))
	}
	f := newCandidate(FreeText, 0.80)
	switch {
	case asks:
		f.Question = sentence(asked.text)
	case fenced && !v.known:
		f = v.idle()
		f.Score = 0.80
		f.Question = "the program waits for your next message"
		f.silent = true // a box may stand there while the program works
		f.wait = v.o.Stuck
		return f
	case v.drawn && fitsAny(v.rows[min(v.row+1, v.last+1):min(v.row+9, v.last+1)], reSubmits):
		f.Question = cmp.Or(strings.TrimSpace(after), asked.text)
	default:
		return nil
	}
	v.describeField(f, v.row)
	return f
}

// describeField completes a dialog with a field at the cursor, in whose row it does not depend on what is typed there.
func (v *view) describeField(f *candidate, last int) {
	f.left = ref(v.left())
	v.describe(f, v.row, last, map[int]string{v.row: *f.left})
	f.rows = [2]int{v.row, v.row}
	f.Secret = hasWord("secret", f.Question)
}

// fence is the row from which on the rows around the cursor are set off, by a line above and one below; the cursor's
// own where they are not.
func (v *view) fence() int {
	top := v.up(v.row, func(w viewRow) bool { return w.rule || w.text != "" })
	if top < 0 || !v.rows[top].rule {
		return v.row
	}
	for r := v.row + 1; r <= min(v.last, v.row+8); r++ {
		if v.rows[r].rule {
			return top
		}
		if v.rows[r].text != "" && v.rows[r].depth == 0 {
			break
		}
	}
	return v.row
}

// reEnds are the keys that end a text, or leave it.
var reEnds = re(`(?i)\b(enter|return|esc|escape)\b`)

// ---- questions on the cursor's line ----
// What a program printed, and waits behind or below.

var (
	// reMarked is where a line may name its answers: brackets, "yes/no", "type yes". readMarker says whether it does.
	reMarked = re(`[\[(<{]([^()<>\[\]{}]+|` +
		`[^()<>\[\]]*\[[^\]]+\][^()<>\[\]]*)[\])>}]|` +
		`\b(?i:yes ?(?:/|or) ?no|y ?[/-] ?n|y or n|(?:type|press|enter) (?:the word )?['"]?(?:yes|y)\b['"]?)|` +
		`\b(?i:only ['"«“‘]yes['"»”’])|` +
		`\pL+/\pL+[ ?:]*$|\b\w ?= ?\pL+(?:(?:,| and| or) \w ?= ?\pL+)+`)
	// reLone is a line of nothing but answers: "Fix/Ignore?", "Abort, Retry, Fail?"
	reLone = re(`^(?:.*[:.!] )?(\pL+(?:(?:/\pL+)+|, \pL+(?:,|,? or) \pL+)) ?\?$`)
	// rePlain is what a question for yes or no may offer besides.
	rePlain    = re(`(?i)^(y|n|yes|no|-|\?|q|quit|h|help|fingerprint|esc|\^c)$`)
	rePress    = re(`(?i)\[(press )?(enter|return|more)\b[^\]]{0,40}\]\s*$|^\W*(any key|enter|return)\W+to continue`)
	reNotPress = re(`\+ ?enter|press [a-z]\b|\bdefault\b|(enter|return) (to use|for [^m])|` +
		`^(please,? )?(enter (t[^o]|[a-su-z])|(type|select|choose|provide) [a-z]).*:$|` + // it ends a text
		`to (skip|select|choose|submit)\b|` +
		`selection|s[eé]lection|number|num[eé]ro|nummer|choice|keep|path`)
	// reGoesOn ends a sentence that waits for a key.
	reGoesOn = re(`(?i)(:|…|\.\.\.)\s*$|\bcontinue\b`)
	rePager  = re(`(?i)^-+ ?\(?more\b|^\(END\)|^:$|^lines \d+-\d+|\(press h for help|^Manual page `)
	// reYn are letters of which each is an answer: "Yn", "ynaq?", "yadH" or "yAdh" of Inquirer.
	reYn = re(`^((?i:yn|ny|y-n)[A-Za-z?]{0,7}|[^ ,/|?]{0,8}\?[^ ,/|]{0,8}|[a-z]{2,8}H|[Yy][A-Za-z]{2,7}h)$`)
	// reHotkeys is a key with its label, in four forms, and what goes on with that: hotKeys joins the groups.
	reHotkeys = re(`(?:(\pL*)[\[(<]([A-Za-z])[\])>](\p{Ll}[\pL\pN'-]*(?: \pL[\pL\pN'-]*){0,3})|` +
		`[\[(](\w{1,2})[\])] (\pL(?:[\pL'-]| [\pL'-])*)|(?:^|[\s,])([A-Za-z])\)(\pL[\pL\pN_-]+)|` +
		`\b([a-z\d])['"]? (?:to|for) ([a-z]{2,})(?:\s*(?:[^\s\w]|$)|\s+or\b))` +
		`( *[^\s\pL\pN.?!([<'"] *(?:\pL{3,}|\pL+ \pL)[\pL' -]*\b| \([^()]{2,}\))?`)
	// reLabelled is a key behind its label, which it may touch, as the plural "(s)" does a word.
	reLabelled = re(`(\pL(?:[\pL' -]*?\pL)?)(?: +[\[(](\w)|[\[(]([^\Ws]|\?))[\])](?:[^A-Za-z]|$)`)
	reLastKey  = re(`[\[(][\w?][\])]\W*(?:default\W+)?\w{0,2}\W*$`) // it, or the default behind it, ends the line
	reOr       = re(`^or |(\s+or)?\s*$`)
	// reWord is an answer that a marker may name without a list.
	reWord = re(`(?i)^(.|C-.|esc|\^c|yes|no|always|never|once|all|none|quit|cancel|retry|abort|ignore|` +
		`skip|edit|help|fingerprint)$`)
	reChoose = re(`^(#\?|\?#)$|[:>?\]#)]$`)
	reCounts = re(`\d ?- ?\d`)
	// reREPL is the prompt of a shell, or of another reader of commands.
	reREPL = re(`^(\s*[\w@~:.,/\\()\[\]<>+=-]*(\s[\w@~:./\\()\[\]-]{1,40}){0,2}\s?(>|\$|#|%|»|❯|λ|➜)\s?|` +
		`\(%?\w[\w-]*\)|\.\.\.|In \[\d+\]:|\S+:\d+[*"']|\*|(\d+ )?\?-|` +
		`(?i:(cmd|command)\b[^:]*:))$`)
	// reOpen is answered by a text: it ends without "?", a program marks it so, or it is no more than "this or that?".
	reOpen = re(`^\? |[^?]$|\] ?\?$|\(\S+ or \S+\) ?\?$|^(?i:your( \S+){1,2} ?\?)$|` +
		`^[\[(][A-Za-z][\])]\pL|^(?i:\S+ (or|oder|ou|o|of|lub|или|або|veya) \S+|` +
		`(\S+ )?(number|nummer|num[eé]ro|número|номер)) ?\?$`)
	// reSure asks for yes or no also without its mark, unless it names something else, or two of them: " or ".
	reSure  = re(`(?i)^(are you sure|do you (really )?(want|wish|agree)|would you like)\b(?:[^?\[(o]|\Bo|o[^r]|or\B)*$`)
	reOrder = re(`(?i)^(?:please,? )?(enter|choose|type|select|provide|specify|option)\b\s*[a-z]`)
	reItem  = re(`^(?:\s*[*>]?\s*[\[(]? ?(\d{1,2})(?:\s?[.):/=\]]\)?\s| - |、|\s{2,})|` +
		`\s*[\[(]?([A-Za-z?])(?:[\])]| =| -)\s|\s*(?:([a-z]):|([A-Za-z])\.) |\s{2,}([A-Za-z])\s{2,})\s*(\S.*)$`)
	reColumns = re(`(?:^\s?|\s\s)(?:\d{1,2}[.:)]|[A-Za-z]\))\s+\S`)
	reListed  = re(`^(#\?|[\pL\pN_ /()]{0,30}(?:\[\d\] ?)?=*[:>?])$`) // the list above it tells what is asked
	reText    = re(`[:?›‣>…]$|^\? |(:|\?(\s*\([^)]*\))?)\s*[\[(|][^\])|]*[\])|]$`)
	reDrafted = re(`^\? .*[^:?›‣>…)\]]$`) // Inquirer's field, with what it refused
	// reGoesWith is a line and the one below, a part of it: a remark, more keys, or the field for the "yes" it names.
	reGoesWith = re(`.\n\(.* .*\)$|[\[(]\w{1,2}[\])] ?\pL.*,\n.*[\[(]\w{1,2}[\])] ?\pL|` +
		`^[^?:]*\w[\])]\pL[^?:\n]*\n.*\w[\])]\pL.*\w[\])]\pL|` +
		`(?i:^(type|type the word|enter|only) ['"«“‘]yes['"»”’].*[.!]\n.*[:?])$`)
	reSays       = re(`\pL[\pL\pN]`) // has a word at all
	reSplits     = []*pattern{re(`\s*,\s*(?:or\s+)?|\s+(?:or|and)\s+`), re(`\s*\|\s*`), re(`\s*/\s*`)}
	reChoiceWord = re(`^[\pL\pN][\pL\pN_+-]*$`)
	reDigits     = re(`^\d+$`)
	reRange      = re(`^(\d{1,2}) ?(?:-|–|to|\.\.) ?(\d{1,2})$`)
	// reBelow is the mark behind which a question in the line above is answered: Symfony, click, yay, conda.
	reBelow      = re(`[:?\])]\s*\n=*[>›❯»]$|(?i:press (enter|return) to continue|[\[(]yes ?[/|] ?no[\])])\W*\n>+$`)
	reAskedAbove = re(`[?:](.*([\])]|\b[Yy]/[Nn]))?\s*$`)
	reDefault    = re(`\([^()]*\) *$`)
	reCounted    = re(`^\d+\W+\d+$`)
	reMeaning    = re(`^(\w) ?=.*| - .*|^(?i:default)\W+`) // "1=easy", "y - да", "default: y"
	rePathIn     = re(`\s/\S`)
	rePrefilled  = re(`^(.*[:?]) ?(\d{1,2})$`)
	reBehind     = re(`^[^\pL\pN\p{Cf}\[(‣›»▸]*`) // a marker: a mark may show the answer that is taken
	reRemark     = re(`(?i), *(default|enter)\b.*`)
	reQuoted     = re(`(?i)^[\[(]?(?:type|press|enter) (?:the word )?['"]?(yes|y)\b|['"«“‘] ?(yes) ?['"»”’]`)
)

// readLine reads the line the cursor stands on; with the cursor in column 0, what stands above it. Where a remark
// stands on the cursor's line, or but a mark, the line above asks.
func (v *view) readLine() *candidate {
	busy := v.tty.Reading == ReadingBusy
	if busy && v.tty.Canonical && v.tty.Echo || v.known && (v.s.AltScreen() || v.box().found) {
		return nil
	}
	line, top := v.cursorLine()
	f := newCandidate("", 0.85) // the kind is still to be found
	f.line = line
	f.Signals[0] = "pattern"
	f.place = v.place(top)
	text := strings.TrimSpace(line)
	if text == "" {
		return v.readAbove(f)
	}
	f.Question = text
	above, first := v.lineAbove(top)
	above = strings.TrimSpace(above)
	both := above + "\n" + text
	switch {
	case reGoesWith.MatchString(both):
		text = above + " " + text
		f.Question = text
		top = first
	case reBelow.MatchString(plain(both)):
		f.Question = both
		text = above
		top = first
	}
	kind, _ := answersNamed(text)
	elsewhere := v.behind() && kind == ""
	if v.s.AltScreen() {
		elsewhere = v.row < v.last-2
	}
	switch {
	case v.asksUnseen(text, kind):
		f.why = "what is typed is not shown"
		f.Type = FreeText
		f.Secret = true
	case elsewhere && !(v.readsLine() && v.reads()):
		return nil
	case elsewhere:
		v.bySilence(f)
	default:
		f.why = v.ruleOf(f, text, top)
		if f.why == "" && (busy || v.known) {
			return nil
		}
		if f.why == "" {
			return v.readWords(f, text, top)
		}
	}
	return v.paragraph(f, top)
}

// asksUnseen reports whether the line asks for a text that the terminal does not show. Neither a question for
// yes or no does, nor what waits for a key to go on: read -sp "Press Enter to continue..."
func (v *view) asksUnseen(text string, kind PromptType) bool {
	goesOn := presses(text) && reGoesOn.MatchString(text) && text[len(text)-1] != ':'
	return v.tty.Canonical && !v.tty.Echo && (kind != YesNo && !goesOn || hasWord("secret", text))
}

// ruleOf is the rule that makes a question of a line, "" none, the surest first, each with the recordings, of 688,
// whose last question it finds.
func (v *view) ruleOf(f *candidate, text string, top int) string {
	kind, answers := answersNamed(text)
	switch {
	case v.row >= v.last && !v.tty.Canonical && v.rows[v.row].fits(rePager):
		f.Type = ConfirmEnter
		return "it is the last line of a pager" // 4
	case v.readPrinted(f, text, top):
		return "a list is printed above it" // 22
	case kind != "":
		f.Type, f.Choices = kind, answers
		return "it names its answers" // 76
	case presses(text):
		f.Type = ConfirmEnter
		return "it asks for a key" // 11
	}
	return ""
}

// ruleOfWords is the rule that makes a question of a line by its words alone, "" none: it needs a program that reads,
// or silence.
func (v *view) ruleOfWords(f *candidate, text string, top int) string {
	f.Type = FreeText
	f.Score = 0.75
	line := plain(text)
	above, _ := v.lineAbove(top) // "Enter name for new remote.", "name> "
	field := strings.Contains(above, strings.TrimRight(text, "> ")) && reOrder.MatchString(above)
	command := reREPL.MatchString(text)
	ending := strings.ToLower(strings.TrimRight(line, " :›‣>…»"))
	begins, secret := findWord("secret", ending)
	open := reOpen.MatchString(strings.TrimRight(line, " .…:")) && !reSure.MatchString(text) || asksWhat(text)
	switch {
	case !v.tty.Echo && secret >= 0 && (begins == 0 || !strings.Contains(ending[secret:], "?") || asksWhat(ending)):
		f.Secret = true
		f.Score = 0.85
		return "it asks for a secret" // 11
	case command && !v.drawn && !field:
		f.Idle = true
		return "it is a prompt for commands" // 31
	case !open && reSays.MatchString(text):
		f.Type = YesNo
		f.guess = true
		f.Choices = []Choice{typedChoice("y", "Yes"), typedChoice("n", "No")}
		return "it is a question for yes or no" // 18
	case reText.MatchString(line) && !(v.drawn && command):
		written := v.s.grid[v.row].cells[max(0, v.col-1)].ch > ' ' // up to the cursor
		f.drafted = !v.tty.Canonical && reDrafted.MatchString(text) && written
		return "it ends as a question does" // 54
	}
	return ""
}

// readWords reads a line that asks by its words alone, a question above it in which it is answered, or silence.
func (v *view) readWords(f *candidate, text string, top int) *candidate {
	if v.hidden && v.s.AltScreen() {
		return nil
	}
	if !v.reads() {
		f.wait = v.o.Stuck
		f.silent = true
	}
	f.why = v.ruleOfWords(f, text, top)
	if f.why != "" {
		return v.paragraph(f, top)
	}
	asked := -1
	if v.readsLine() { // where keys are read raw, what stands on the cursor's line has followed the question
		asked = v.readMarkAbove(f, top)
	}
	switch {
	case asked >= 0:
		top = asked
	case v.s.AltScreen() && !v.readsLine() || v.hidden:
		return nil
	default:
		v.bySilence(f)
		if !v.reads() {
			f.wait *= stillBlind
		}
	}
	return v.paragraph(f, top)
}

// hotKeys are the keys that a plain line names: "(N)ame", "e(x)it", "(p) Postpone", "a)utorename". What goes on behind
// a comma, or in brackets, is part of a label: "(n)o, install anyway". Where the line ends in a key without a label,
// all labels stand before their keys: "Yes[y] No[n]", "Retry (r), skip (s) or abort (a)?"
func hotKeys(line string) []Choice {
	read := func(form *pattern, key, label string) (keys []Choice) {
		for _, part := range form.expr().FindAllString(line, -1) {
			label := reOr.ReplaceAllString(form.ReplaceAllString(part, label), "")
			keys = append(keys, typedChoice(form.ReplaceAllString(part, key), label))
		}
		return keys
	}
	keys := read(reHotkeys, "$2$4$6$8", "$1$2$3$5$6$7$9${10}")
	behind := read(reLabelled, "$2$3", "$1")
	named := func(c Choice) bool { return strings.EqualFold(c.Key, behind[len(behind)-1].Key) }
	if len(behind) < 2 || !reLastKey.MatchString(line) || slices.ContainsFunc(keys, named) {
		return keys
	}
	return behind
}

// presses reports whether the text asks for a key to go on.
func presses(text string) bool {
	text = strings.ToLower(plain(text))
	from, to := findWord("press", text)
	return !reNotPress.MatchString(text) && (rePress.MatchString(text) ||
		from >= 0 && hasWord("key", text[max(0, from-nearKey):from]+" "+text[to:min(len(text), to+nearKey)]))
}

// nearKey is how many bytes a key may stand away from the word that says to press it.
const nearKey = 40

// means reports whether an answer is that letter, or a word for what it means: "y" yes, "n" no.
func means(meaning, answer string) bool {
	return strings.EqualFold(answer, meaning[:1]) || isAll(meaning, answer)
}

// asksWhat reports whether one of the first three words of a question is one that yes and no do not answer.
func asksWhat(text string) bool {
	fields := strings.Fields(text)
	return hasWord("what", strings.Join(fields[:min(3, len(fields))], " "))
}

// answersNamed are the answers that text names, by "[Y/n]" in its forms, a letter menu or hot keys, and the kind of
// question that they make; "" without them.
func answersNamed(text string) (kind PromptType, choices []Choice) {
	choices = answersOf(plain(text))
	if len(choices) == 1 {
		choices = spelledOut(withOther(choices[0].Label))
	}
	if len(choices) == 0 || !distinct(choices) {
		return "", nil
	}
	choices = choices[:min(len(choices), 9)]
	yes, no := -1, -1
	others := false
	for i, c := range choices {
		switch {
		case means("yes", c.Label):
			yes = i
		case means("no", c.Label):
			no = i
		default:
			others = others || !rePlain.MatchString(c.Label)
		}
	}
	abbreviated := func(k Choice) bool {
		return regexp.MustCompile(`(?i)(?:^|\PL)` + regexp.QuoteMeta(k.Label) + `\pL\pL`).MatchString(text)
	}
	foreign := !hasWord("english", text) && !(abbreviated(choices[0]) && abbreviated(choices[len(choices)-1]))
	if len(choices) == 2 && yes < 0 && foreign {
		yes, no = pairIn(choices)
		others = false
	}
	if yes < 0 || no < 0 || others {
		return MultipleChoice, choices
	}
	both := choices[yes].Keys + choices[no].Keys
	marked := both != strings.ToUpper(both) // a capital beside a small letter only marks the default
	return YesNo, []Choice{choices[yes].spelled("y", "Yes", marked), choices[no].spelled("n", "No", marked)}
}

// distinct reports whether no two of the choices have the same key.
func distinct(of []Choice) bool {
	keys := map[string]bool{}
	for _, c := range of {
		keys[c.Key] = true
	}
	return len(keys) == len(of)
}

// spelled is an answer as the button for yes or no has it: with what the program calls it where that is another word or
// letter. In small letters where one of the two is marked as the default by a capital.
func (c Choice) spelled(letter, word string, marked bool) Choice {
	if !strings.EqualFold(c.Label, letter) && !strings.EqualFold(c.Label, word) {
		word += " (" + c.Label + ")"
	}
	if marked && c.Key == c.Label && utf8.RuneCountInString(c.Keys) == 1 {
		c.Keys = strings.ToLower(c.Keys)
	}
	return Choice{Key: letter, Label: word, Keys: c.Keys}
}

// pairIn are the places of the letters for yes and for no, −1 where the two are none in any language.
func pairIn(two []Choice) (yes, no int) {
	for i := range 2 {
		pair := withOther(strings.ToLower(two[i].Label))
		if pair[0]+pair[1] == strings.ToLower(two[i].Label+two[1-i].Label) {
			return i, 1 - i
		}
	}
	return -1, -1
}

// answersOf are the answers that text names: hot keys, or those of the last marker. Behind that stands no answer yet,
// and nothing that makes numbers a mere count.
func answersOf(text string) []Choice {
	keys := hotKeys(text)
	if len(keys) > 1 {
		return keys
	}
	keys = nil
	text = reLone.ReplaceAllString(text, "{$1}")
	for _, at := range slices.Backward(reMarked.expr().FindAllStringIndex(text, -1)) {
		marker := text[at[0]:at[1]]
		rest := reBehind.ReplaceAllString(text[at[1]:], "")
		answers := readMarker(marker, strings.Trim(rest, "[(?:>)] "))
		named := func(answer string) bool { return strings.EqualFold(answer, keys[0].Label) }
		if answers == nil || keys != nil && !slices.ContainsFunc(answers, named) {
			continue
		}
		few := len(strings.Fields(rest)) < 3 || reDigits.MatchString(answers[0])
		if rest != "" && strings.IndexAny(rest, "[(‣›»▸") != 0 && few && !reQuoted.MatchString(marker) {
			continue
		}
		keys = spelledOut(answers)
		if len(keys) > 1 { // one alone may be the default of those before it
			break
		}
	}
	return keys
}

// withOther are the two answers of a marker that names one: a word, or a letter.
func withOther(answer string) []string {
	_, of := lexicon()
	for i, yes := range of["yes"] {
		switch {
		case strings.EqualFold(answer, yes):
			return []string{answer, of["no"][i]}
		case strings.EqualFold(answer, of["no"][i]):
			return []string{yes, answer}
		case strings.EqualFold(answer, of["y"][i]):
			return []string{answer, of["n"][i]}
		}
	}
	return []string{"y", "n"}
}

// readMarker gives the answers a marker names, nil when it is none: "[Y/n]", "(yes)", "Type 'yes'",
// "<y>", "[Ynq]", "[red, green]", "1-4", "[1 or 2]". Two numbers are else a count, as in "(1/2)", and two
// words a path, but where the rest of the line is one of them: "[tea/milk] (tea)".
func readMarker(marker, rest string) []string {
	inner := strings.Trim(marker, "[](){}<> .")
	if inner == marker {
		inner = strings.TrimRight(inner, "?: ")
	}
	quoted := reQuoted.FindStringSubmatch(inner)
	if quoted != nil {
		yes := quoted[1] + quoted[2]
		if hasWord("capital", inner) {
			yes = strings.ToUpper(yes)
		}
		return []string{yes}
	}
	limits := reRange.FindStringSubmatch(inner)
	if limits != nil {
		return numbers(limits[1], limits[2])
	}
	if reYn.MatchString(inner) { // nothing stands between the letters
		return strings.Split(inner, "")
	}
	answers := splitMost(reRemark.ReplaceAllString(inner, ""))
	decides := func(answer string) bool { return means("yes", answer) || means("no", answer) }
	strange := false
	list := len(answers) > 2 || strings.ContainsAny(marker, ",|{") || slices.Contains(answers, rest)
	list = list && !rePathIn.MatchString(inner)
	for i, p := range answers {
		p = strings.Trim(p, "[]'\" ")
		list = list && reChoiceWord.MatchString(p)
		p = reMeaning.ReplaceAllString(p, "$1")
		answers[i] = p
		strange = strange || !reWord.MatchString(p) && !decides(p)
	}
	alone := len(answers) == 1
	angled := marker[0] == '<'
	odd := (alone || angled) && !decides(answers[0])
	if odd && alone && angled { // e2fsck: "<s>"
		odd = withOther(answers[0])[0] != answers[0]
	}
	if strange && !list || odd || reCounted.MatchString(inner) {
		return nil
	}
	return answers
}

// splitMost splits a list by the separator that stands in it most often.
func splitMost(list string) []string {
	most := []string{list}
	for _, separator := range reSplits {
		parts := separator.expr().Split(list, -1)
		if len(parts) > len(most) {
			most = parts
		}
	}
	return most
}

// numbers are those from the first to the last, two to nine of them; else nil.
func numbers(first, last string) (all []string) {
	n, _ := strconv.Atoi(first) // two digits at most
	end, _ := strconv.Atoi(last)
	for ; n <= end; n++ {
		all = append(all, strconv.Itoa(n))
	}
	if len(all) < 2 || len(all) > 9 {
		return nil
	}
	return all
}

// spelledOut are the choices of answers that are typed as they stand.
func spelledOut(answers []string) (keys []Choice) {
	for _, answer := range answers {
		keys = append(keys, typedChoice(answer, answer))
	}
	return keys
}

// typedChoice is a choice that is typed. Whether Enter follows is found when that is done: the terminal may have
// changed.
func typedChoice(key, label string) Choice {
	c := Choice{Key: key, Label: label, Keys: key}
	if strings.EqualFold(key, "esc") {
		c.Keys = "\x1b"
	}
	if strings.HasPrefix(key, "C-") && len(key) == 3 {
		c.Keys = string(rune(key[2] & 0x1f))
	}
	return c
}

// readPrinted finds the list printed over a line that asks for one of it; if that says nothing, its heading asks.
func (v *view) readPrinted(f *candidate, text string, top int) bool {
	text = plain(text)
	list, heading, more := v.listAbove(text, top)
	if len(list) == 0 && hasWord("choose", text) {
		for _, w := range v.rows[v.row+1 : max(v.row, v.last)+1] { // of Inquirer's rawlist it stands below, and nothing else
			list = append(list, itemsOf(w.raw)...)
		}
	}
	answers := answersOf(text)
	if len(list) < 2 || len(answers) > 0 && !reDigits.MatchString(answers[0].Label) { // it was answered before
		return false
	}
	f.Full = text
	f.Type = MultipleChoice
	f.guess = more || hasWord("amount", text)
	if heading >= 0 && !reSays.MatchString(text) {
		f.Question = v.rows[heading].text
	}
	for r := v.up(heading+1, hasText); r >= 0 && v.rows[r].text != ""; r-- {
		f.heading = v.rows[r].text + "\n" + f.heading
	}
	first := list[0].Key
	f.Cut = first > "1" && first <= "9" // the beginning has left the screen
	if !f.Cut {
		f.Choices = list[:min(len(list), 9)]
	}
	return true
}

// listAbove are the items printed over the line in row top, and the row above them, −1 without one.
// A line that asks for a choice may stand a remark below them: more, which may belong to the last label.
func (v *view) listAbove(text string, top int) (list []Choice, heading int, more bool) {
	asks := reChoose.MatchString(text) && (len(text) == 2 || reCounts.MatchString(text) || hasWord("choose", text))
	r := top - 1
	if !asks && (!reListed.MatchString(text) || reOrder.MatchString(text)) {
		return nil, r, false
	}
	for extra := 1; r >= 0; r-- {
		var raw string
		raw, r = v.whole(v.rows[r].raw, r)
		items := itemsOf(raw)
		if !distinct(slices.Concat(items, list)) {
			return list, -1, more // another list, further up
		}
		list = append(items, list...)
		if len(items) > 0 {
			extra = 1
			continue
		}
		row := strings.TrimSpace(raw)
		question := rePrefilled.FindStringSubmatch(row)
		remark := len(list) > 0 && strings.HasPrefix(raw, "   ") ||
			asks && len(list) == 0 && (question == nil || question[1] == text) // else another one asked for one of it
		more = more || remark && row != ""
		if row != "" && row[0] != '\\' && !remark || extra > 2 {
			break
		}
		extra++
	}
	return list, r, more
}

// itemsOf are the options in a row of a printed list: one, or several in columns.
func itemsOf(raw string) (items []Choice) {
	columns := reColumns.expr().FindAllStringIndex(raw, -1)
	for i := 1; i < len(columns); i++ { // all up to the next one is its label
		items = append(items, itemsOf(raw[columns[i-1][0]:columns[i][0]])...)
	}
	if len(items) > 0 {
		raw = raw[columns[len(items)][0]:]
	}
	m := reItem.FindStringSubmatch(raw)
	if m != nil {
		label := len(m) - 1
		items = append(items, typedChoice(strings.Join(m[1:label], ""), strings.TrimSpace(m[label])))
	}
	return items
}

// readAbove reads what stands above a cursor in an empty line: the program ended its question with a newline, printed
// more below it, never said anything, or hides the cursor.
func (v *view) readAbove(f *candidate) *candidate {
	line, top := v.lineAbove(v.row)
	text := strings.TrimSpace(line)
	top = max(top, 0)
	f.line = ""
	f.place = v.place(top)
	f.Question = cmp.Or(text, "the program waits for input")
	raw := !v.tty.Canonical
	if raw && presses(text) && (text[0] == '[' || reGoesOn.MatchString(text) || v.hidden && v.reads()) {
		f.Type = ConfirmEnter
		return v.paragraph(f, top)
	}
	if v.known || !v.reads() || v.s.AltScreen() {
		return nil
	}
	end := v.belowText(v.row)
	_, _, answered, _ := v.lineBefore(end)
	if !raw {
		f.why = v.ruleOf(f, text, top)
	}
	if f.why != "" {
		return v.paragraph(f, top)
	}
	asked := v.readMarkAbove(f, end)
	switch {
	case asked >= 0:
		f.ended = true
		f.place = v.place(v.row)
		top = asked
	case !answered && (reAsked.MatchString(text) || !raw && reOrder.MatchString(text)):
		f.wait = v.o.Stuck
		f.why = v.ruleOfWords(f, text, top)
	case raw:
		return nil
	default:
		v.bySilence(f)
		f.Type = FreeText
		f.Idle = text != ""
		f.Secret = !v.tty.Echo
	}
	return v.paragraph(f, top)
}

// readMarkAbove finds a question for yes or no that a program which reads has printed more below: it ends in its mark,
// in one of the five lines above row end, all of one paragraph. In raw mode it is the line above alone. It returns its
// row; −1: there is none.
func (v *view) readMarkAbove(f *candidate, end int) int {
	for range 1 + 4*number(v.tty.Canonical) {
		text, first, answered, _ := v.lineBefore(end)
		if v.tty.Canonical && !v.readsLine() || !v.reads() || answered || first < 0 || isBlank(text) {
			return -1
		}
		text = strings.TrimSpace(text)
		kind, answers := answersNamed(text)
		if kind == YesNo && reAskedAbove.MatchString(plain(text)) {
			f.Type, f.Choices = kind, answers
			f.Question = text
			f.Score = 0.85
			return first
		}
		end = first
	}
	return -1
}

// paragraph adds the region of a question on a line that begins in row top: the lines before it, what stands right of
// the cursor and below, and the context above. Where the question says nothing it takes the line before.
func (v *view) paragraph(f *candidate, top int) *candidate {
	enough := f.Full != "" || f.Idle || f.Type == ConfirmEnter ||
		reSays.MatchString(reMarked.ReplaceAllString(f.Question, ""))
	f.Full = cmp.Or(f.Full, f.Question)
	first, end, right := top, max(top, v.belowText(v.row)-1), ""
	if f.onLine() {
		first, end, right = f.place.row-1-v.s.scrolled, v.row, v.after()
	}
	if f.ended || !enough { // a blank row does not part the answers from what they answer
		first = v.belowText(first)
	}
	if first > top { // what asks stands above the cursor's line
		f.Full = strings.TrimSpace(f.line)
	}
	before, cut := v.linesAbove(&f.Prompt, first)
	if f.Idle {
		before = before[max(0, len(before)-12):]
		f.parts.above = nil
		f.Far = ""
		cut = false
	}
	for n := len(before) - 1; n >= max(0, len(before)-3) && !enough; n-- {
		enough = len(itemsOf(before[n])) > 0
		if !enough {
			f.Question = strings.TrimSpace(before[n]) + "\n" + f.Question
		}
	}
	f.rows = [2]int{top, end}
	below := v.linesBelow(end)
	rows := append(slices.Clone(before), strings.TrimRight(f.Full+" "+right, " "))
	f.Full = strings.Join(append(rows, below...), "\n")
	f.Cut = f.Cut || cut || v.s.cutIn(top, end+len(below))
	f.parts.body = before
	f.parts.among = append([]string{right}, below...)
	return f
}

// ---- rows of keys ----
// Dialogs of full-screen programs that take one key.

// readKeys finds a row that names nothing but the keys of choices, of which one grants and one refuses: "[y] Approve
// [n] Deny".
func (v *view) readKeys() *candidate {
	if v.tty.Canonical || v.known || !v.hidden || !v.reads() { // where a cursor shows a text may be edited
		return nil
	}
	for r := v.last; r >= max(0, v.last-maxBelow); r-- {
		row := plain(v.rows[r].text)
		keys := hotKeys(row)
		names := labels(keys)
		alone := !reSays.MatchString(reHotkeys.ReplaceAllString(row, ""))
		if alone && slices.ContainsFunc(names, grants) && slices.ContainsFunc(names, declines) {
			f := newCandidate(MultipleChoice, 0.90)
			f.Choices = keys
			v.describe(f, r, r, nil)
			return f
		}
	}
	return nil
}

// ---- screens that keep still ----
// What no rule reads may be a question all the same: after silence, with keys to press.

// The silence after which a screen that no rule reads may be a question. Programs that work paint
// more often: known agents every 2.5 s at least (measured on 63 recordings), which the adapters'
// longer time allows for. It is longer still where nobody can tell whether the program reads, and
// where the cursor stands below finished lines: a relay (ssh -t, script) reads while a build works.
const (
	stillKnown = 2 // times Stuck: a known tool
	stillBlind = 5 // nobody can tell, or finished lines
)

// readStill takes a screen for what may be a question that no rule reads: the program takes single
// keys and reads, and it is no draft that stands there.
func (v *view) readStill() *candidate {
	draft := v.last < 0 || v.known && v.box().found
	if v.tty.Canonical || v.busy || draft && !v.reported {
		return nil
	}
	f := newCandidate(Unknown, 0.60)
	v.bySilence(f)
	f.rows = [2]int{0, v.last}
	f.Full = v.s.Text()
	f.Choices = v.pressable()
	printed := !v.s.AltScreen() && !v.hidden && v.col == 0 && v.row >= v.last
	switch {
	case v.reported:
		f.Question = v.s.status.Msg
		f.Cut = v.s.status.asks() && !fitsAny(v.rows, reEscOut) // the window is too small to show the end of the dialog
	case !v.reads(), printed:
		f.wait *= stillBlind
	case v.known:
		f.wait *= stillKnown
	}
	for _, w := range v.rows[:v.last+1] {
		f.parts.body = append(f.parts.body, w.indented())
		if w.heads() && w.row >= v.last-14 {
			f.Question = sentence(w.text)
		}
	}
	return f
}

// bySilence makes it a guess, from silence alone.
func (v *view) bySilence(f *candidate) {
	f.Type = Unknown
	f.Score = 0.60
	f.wait = v.o.Stuck
	f.silent = true
	f.Signals[0] = "silence"
	f.why = "it keeps still"
	f.Choices = nil
	f.drafted = !v.tty.Canonical && !v.hidden && v.col > 0 && // a line that its editor may have filled in
		isWordRune(v.s.grid[v.row].cells[v.col-1].ch)
}

// pressable are the keys that can be pressed from afar at a screen that no rule reads. Enter and Escape are offered
// with every screen that may ask.
func (v *view) pressable() (keys []Choice) {
	for _, name := range strings.Fields("1 2 3 y n up/↑ down/↓ tab/Tab space/Space") {
		key, label, _ := strings.Cut(name, "/")
		sent := keyBytes(key, v.s.modes[modeAppCursor]) // knows them all
		keys = append(keys, Choice{Key: key, Label: cmp.Or(label, key), Keys: sent})
	}
	return keys
}

// ---- what an answer means ----
// Every prompt is finished here: what each choice grants or refuses, how sure it is, what waiting may type.

// finish adds what all prompts share: how sure it is, permission, safe default, what is shown.
func (v *view) finish(f *candidate) {
	v.score(f)
	granting := f.Type == MultipleChoice && !f.Multi && slices.ContainsFunc(labels(f.Choices), grants)
	f.Permission = granting || v.reported && v.s.status.Kind == "permission"
	for i := range f.Choices {
		c := &f.Choices[i]
		allowed := f.Permission && f.Type == MultipleChoice && !declines(c.Label)
		c.Grants = f.Type != Unknown && (allowed || grants(c.Label))
		c.Label = clip(visible(c.Label), 60)
	}
	f.Question = strings.TrimSpace(cmp.Or(f.Question, "which one?"))
	f.Excerpt = safely(cmp.Or(f.Excerpt, f.Question), 200)
	f.Full = cmp.Or(f.Full, f.Question)
	f.Cut = f.Cut || len(f.Full) > maxFull
	safe := v.safeDefault(f)
	if safe != "" {
		f.SafeDefault = &safe
	}
	f.motion = v.motion
	f.seal()
	f.Question = safeText(f.Question)
}

// score sets the signals, the score, and how long the screen must have been still. A pattern below the threshold
// becomes a guess from silence: by default none is.
func (v *view) score(f *candidate) {
	agrees := 0.0
	if v.tty.Reading == ReadingYes {
		f.Signals = append(f.Signals, "tty")
		agrees = 0.05
	}
	if f.Signals[0] == "pattern" && f.Score+agrees < v.o.Threshold && !f.Idle && !f.Secret {
		v.bySilence(f)
	}
	f.Score = math.Round(100*min(f.Score+agrees, 0.99)) / 100
	f.wait = cmp.Or(f.wait, settle)
	state := v.s.status.State
	told := f.Idle && (state == "idle" || state == "done")
	if v.known && (told || v.reported) {
		f.Score = 1
		signal := "title"
		if told || state == "blocked" {
			signal = "protocol"
		}
		f.Signals = append(f.Signals, signal)
	}
}

var (
	// reDont are the English refusals of several words.
	reDont = re(`^(don't|dont|do not) (trust|allow|run|proceed|continue|accept|apply|install|overwrite|delete|approve|` +
		`grant|execute)( (it|this))?$`)
	// reAfterNo is what may follow a refusal in a label that does no more than refuse, as agents have it, or its key.
	reAfterNo = re(`^(exit|quit|thanks|thank you|suggest changes|with feedback|recommended|default|esc|escape|\w|` +
		`(and )?tell \S+ (why|what to do( differently)?))$`)
)

// isRefusal reports whether all of a label refuses, so that it may be chosen while nobody answers, and unread: it
// neither ends, skips nor changes anything, as "Quit", "Skip", "Cancel the order", "Don't ask again" and "No, install
// anyway" do.
func isRefusal(label string) bool {
	refuses := false
	between := func(r rune) bool { return strings.ContainsRune(",;:()-–—", r) }
	for part := range strings.FieldsFuncSeq(strings.ToLower(plain(label)), between) {
		part = strings.TrimFunc(part, func(r rune) bool { return !isWordRune(r) && r != '…' }) // what is cut may go on
		switch {
		case isAll("no deny", part), reDont.MatchString(part):
			refuses = true
		case part != "" && !(refuses && reAfterNo.MatchString(part)):
			return false
		}
	}
	return refuses
}

// grants reports whether a label begins as one that lets the agent do something.
func grants(label string) bool {
	return startsWith("yes allow", label) || strings.EqualFold(label, "y")
}

// declines reports whether a label begins as one that refuses, ends or leaves something: nothing is granted with that.
func declines(label string) bool {
	return startsWith("no deny quit dont", label)
}

// withoutLabels returns what is asked, without the choices that a line names at its end.
func (f *candidate) withoutLabels() string {
	asks := f.heading + "\n" + f.Question
	if f.heading != "" || !f.onLine() {
		return asks
	}
	for _, c := range f.Choices {
		at := strings.LastIndex(asks, c.Label)
		if len(c.Label) > len("yes") && at >= 0 {
			asks = asks[:at] + asks[at+len(c.Label):]
		}
	}
	return asks
}

// safeDefault is what may be typed while nobody answers, "" when nothing may: only what is known
// to refuse, Escape where the dialog names it as the way out, Enter at a bare "Press Enter", or
// what the configuration names for lists and texts in which nothing refuses, grants or is secret.
func (v *view) safeDefault(f *candidate) string {
	refusal, decides := refusalIn(f)
	asks := f.withoutLabels()
	// "No" may mean that something goes on, or is lost; but not what a known tool wants to be allowed.
	turned := hasWord("keep deny quit", asks) || reNot.MatchString(plain(asks))
	turned = turned && !(f.Permission && v.known)
	f.Turned = turned && len(f.Choices) > 0
	set := v.o.SafeDefaults[f.Type]
	switch {
	case f.Type == ConfirmEnter:
		return v.defaultOfPress(f)
	case f.Idle, f.Secret, f.Type == Unknown, f.Multi, f.guess:
		return ""
	case turned, f.onLine() && f.tellsMore():
		return ""
	case refusal != "":
		return refusal
	case f.esc && len(f.Choices) > 0:
		return "esc"
	case f.Permission, decides, f.Cut:
		return ""
	case f.Type == FreeText && !consents(set):
		return set
	}
	key := ""
	for _, c := range f.Choices {
		if !isASCII(c.Label) || consents(c.Label) { // who knows what it does
			return ""
		}
		if c.Key == set || strings.EqualFold(c.Label, set) {
			key = c.Key
		}
	}
	return key
}

// refusalIn is the key of the last choice that is known to refuse, "" without one; and whether any grants or refuses.
func refusalIn(f *candidate) (key string, decides bool) {
	yes := slices.ContainsFunc(f.Choices, func(c Choice) bool { return strings.EqualFold(c.Label, "y") })
	for _, c := range f.Choices {
		ours := f.Type == YesNo && c.Key == "n" // that it is "no" was known when it was made
		if ours || yes && strings.EqualFold(c.Label, "n") || isRefusal(c.Label) {
			key = c.Key
		}
		decides = decides || c.Grants || declines(c.Label)
	}
	return key, decides
}

// consents reports whether a text grants something in one of its words.
func consents(text string) bool {
	return hasWord("yes allow agree", text)
}

// tellsMore reports whether the text of a question on a line does not name the answer that would refuse, or says more
// of its key: "n: delete all".
func (f *candidate) tellsMore() bool {
	named := answersOf(plain(f.Question))
	if f.Type == YesNo && len(named) == 1 && !means("no", named[0].Label) {
		return true
	}
	for _, c := range f.Choices {
		if !declines(c.Label) {
			continue
		}
		key := regexp.QuoteMeta(c.Keys)
		more := regexp.MustCompile(`(?im)(?:^|[^\pL\pN'])(?:` + key + `|no)(?:['"\])}>]* *[:=–>-]+ *|` +
			`['"\])}>]+ +| +(?:to|means|will) +|  +)((?:[^\x00-\x7F\PL]|[a-z]\pL).*?)(?:  +\d|$)|` + // "[y/n] n" is an answer
			`(?:[(,;.!?]\s*` + key + `|\b(?:answer|say|type|press|choose|enter)(?:ing)? (?:` + key + `|no),) +(\pL.*)|` +
			`(\pL+) [[(]` + key + `[])]`)
		for _, m := range more.FindAllStringSubmatch(plain(f.Full), -1) {
			if !isRefusal(m[1] + m[2] + m[3]) {
				return true
			}
		}
	}
	return false
}

// reNot turns a question around: "no" to "Do not delete it?" deletes it.
var reNot = re(`(?i)((\b(not|without)|n't)\b|(^|[^\pL])(nicht|ohne|keine?|ne|sans|sin|non|senza|não|sem|niet|` +
	`zonder|geen|nie|bez|не|без) \pL|¿(\pL+ )?no |m[ae]s[iı]n|ません|しない|(^|\n|否)不|않)[^.;:!\n]*\?`)

// reBarePress is "Press Enter to continue" in its forms: it names nothing that Enter does but to go
// on, and no other key.
var reBarePress = re(`(?i)^[^\pL\pN]*(please )?(press|hit|strike|push)?\s*(the\s+)?` +
	`[\[<("']?(enter|return|(any|a)\s+key)[\])>"']?(\s+key)?` +
	`(\s+to\s+(continue|go on|return|go back|close( this window)?|exit|finish))?[^\pL\pN]*$`)

// judged is how many bytes of what stands above a question's context are judged with it, however short that is set.
const judged = 600

// defaultOfPress is "enter" for a question that only waits for Enter: all of it is known, it ends there, nothing in it
// names another way out, and nothing is asked. The configuration can make it "esc", or nothing.
func (v *view) defaultOfPress(f *candidate) string {
	text := strings.Join(slices.Concat(f.parts.above, f.parts.body, f.parts.among), "\n")
	text += "\n" + f.Question + "\n" + f.Far[max(0, len(f.Far)-judged):]
	asks := f.onLine() && !isBlank(strings.Join(f.parts.among, "")) || hasWord("deny way", text) ||
		strings.Contains(text, "?")
	set, given := v.o.SafeDefaults[ConfirmEnter]
	switch {
	case f.Cut || asks || !reBarePress.MatchString(f.Question):
		return ""
	case given:
		return set
	}
	return "enter"
}

// ---- turns ----
// What an agent's turn has come to: by the protocol, its title, its screen, and what was typed.

// TurnState is how it stands with an agent's turn.
type TurnState string

const (
	TurnReady       TurnState = "ready"       // it waits, and nothing was asked of it
	TurnFinished    TurnState = "finished"    // the turn is over
	TurnAsks        TurnState = "asks"        // the turn is over, and its last words are a question
	TurnInterrupted TurnState = "interrupted" // somebody broke the turn off
	TurnFailed      TurnState = "failed"      // an error ended the turn
)

// turnSigns is what was noticed of a turn while it went on, between two looks too.
type turnSigns struct {
	typed    bool      // something was typed since the start
	sent     bool      // Enter was, since an end was told
	worked   bool      // it has worked, and what came of that was not told yet
	since    time.Time // when it began to
	workedAt time.Time // when it was last seen to
	brokeAt  time.Time // when Esc or ^C was typed meanwhile, zero never
	report   string    // the protocol's last, "" none
	ended    string    // the report that ended the turn: done, error; "" none
	why      string    // the tool's own words for an error
	told     string    // the turn on the screen when an end was told
}

const (
	breakTime = time.Second     // from the key that interrupts a turn to its end, at most
	unseen    = 5 * time.Second // without a sign of work but the protocol's: it is over
)

// reBreak is a key that interrupts a turn, or what a typist does: Esc or ^C, also as xterm's modifyOtherKeys and
// kitty's keyboard protocol have them, that with the locks that are on, and of a keyboard of other letters.
var reBreak = re(`^\x1b(\[27(;\d+(:1)?)?u)?$|\x03|\x1b\[((\d+::)?99;(5|69|133|197)(:1)?u|27;5;99~)`)

// asks reports whether the tool says that a dialog of its own is open. A missing or wrong API key is none: it ends the
// turn (measured on claude 2.1).
func (p ProgramStatus) asks() bool { return p.State == "blocked" && p.Kind != "auth" }

// noteWork notes that it works, in a turn that is a new one or goes on.
func (t *turnSigns) noteWork(fresh bool, now time.Time) {
	if fresh || !t.worked {
		t.since = now
		t.brokeAt = time.Time{}
		t.ended = ""
	}
	t.worked = true
	t.workedAt = now
}

// noteReport notes a report of the protocol. Work before anybody typed that ends in idle is no
// turn: codex starts with it.
func (t *turnSigns) noteReport(status ProgramStatus, now time.Time) {
	before := t.report
	t.report = status.State
	if status.State == "blocked" && !status.asks() {
		t.report = "error"
	}
	switch t.report {
	case "working":
		t.noteWork(before != "working" && before != "blocked", now)
	case "done", "error":
		t.noteWork(false, now)
		t.ended = t.report
		t.why = status.Msg
	case "idle":
		if !t.typed {
			t.worked = false
		}
	}
}

// ending is when the turn may be taken for over at the earliest: an input box that was empty all the
// time says nothing of a turn that has just begun.
func (t *turnSigns) ending() time.Time {
	if t.report == "working" {
		return t.workedAt.Add(unseen)
	}
	return t.workedAt.Add(settleIdle)
}

// noteKeys notes what was typed while it worked or not; what terminals send by themselves does not count.
func (t *turnSigns) noteKeys(p []byte, working bool, now time.Time) {
	if len(p) == 0 || reReport.MatchString(string(p)) {
		return
	}
	t.typed = true
	t.sent = t.sent || bytes.ContainsAny(p, "\r\n")
	if working && reBreak.expr().Match(p) {
		t.brokeAt = now
	}
}

// answer is what a turn has left on the screen.
type answer struct {
	all    string    // all of it, the message that began it too
	rows   []viewRow // of the last message of the tool's own
	headed bool      // it begins there
	end    TurnState // that rows below it tell: finished, interrupted, failed; "" none
	why    string    // failed: the words of the error
}

// answer reads the program's text from the user's last message on, or from the end of the turn before on: never the
// words of an earlier turn.
func (v *view) answer() answer {
	end := v.textEnd()
	message := v.up(end, v.ofUser)
	t := answer{headed: message > 0 || v.s.scrolled == 0 && !v.s.AltScreen()} // codex keeps it in the first row

	var aside TurnState // what tells the end, or the message, that the row belongs to
	if message >= 0 {
		aside = TurnReady
	}
	for _, w := range v.rows[max(0, message):end] {
		t.all += w.text + "\n"
		ends := v.ends(w)
		if ends != "" || w.text == "" {
			aside = ends
		}
		if ends == TurnFailed || ends == TurnInterrupted || ends == TurnFinished && t.end == "" {
			t.end = ends
			t.why = ""
		}
		text := v.words(w.text)
		if aside == TurnFailed {
			t.why = strings.TrimSpace(t.why + " " + text)
		}
		if aside != "" {
			continue
		}
		mark := strings.Join(v.a.Says.FindStringSubmatch(w.raw), "")
		if mark != "" || text != "" && t.end != "" { // words below an end are of another turn
			t = answer{all: t.all, headed: true}
			w = readRow(strings.Repeat(" ", widthOf(mark))+w.raw[len(mark):], v.s.cols)
		}
		w.text = v.words(w.text)
		t.rows = append(t.rows, w)
	}
	return t
}

// words is a row's text without the mark of an error before it and without selectors that choose
// how a character is drawn.
func (v *view) words(text string) string {
	text = strings.NewReplacer("\ufe0e", "", "\ufe0f", "").Replace(text)
	failed := v.a.Fails.FindStringSubmatch(text)
	if failed != nil {
		text = failed[1]
	}
	return strings.TrimSpace(text)
}

// ends is the end of a turn that begins in that row; TurnReady for what stands below it and is none of its words, ""
// for none. Opencode frames errors with another colour at their edge than the input box has.
func (v *view) ends(w viewRow) TurnState {
	edge := strings.IndexAny(w.raw, uprights)
	framed := v.a.Mark == "" && v.s.attr(w.row, edge).FG != v.s.attr(v.row, edge).FG
	switch {
	case w.fits(v.a.Stopped):
		return TurnInterrupted
	case w.fits(v.a.Fails), framed:
		return TurnFailed
	case w.fits(v.a.Closes):
		return TurnFinished
	case w.fits(v.a.Hints):
		return TurnReady
	}
	return ""
}

// ofUser reports whether a message of the user's begins in that row.
func (v *view) ofUser(w viewRow) bool { return v.a.Said.MatchString(w.raw) }

// turn is what has become of the agent's turn that left that on the screen, and the line that tells it. What the
// protocol says of the end counts more than the screen. An end that it calls idle is an interruption where the screen
// says so, or where somebody pressed the key for it just before: the tool's own commands end like that too.
func (t *turnSigns) turn(on answer, words string) (state TurnState, line string) {
	line = words[strings.LastIndexByte(words, '\n')+1:]
	switch {
	case !t.worked:
		return TurnReady, ""
	case t.ended == "error":
		return TurnFailed, cmp.Or(t.why, on.why, line, "it shows no reason")
	case t.ended == "done":
	case on.end == TurnInterrupted, t.workedAt.Sub(t.brokeAt) < breakTime:
		return TurnInterrupted, line
	case on.end == TurnFailed:
		return TurnFailed, cmp.Or(on.why, "it shows no reason")
	}
	if asksInWords(words) {
		return TurnAsks, line
	}
	return TurnFinished, line
}

// tellTurn says in an idle prompt what the turn came to, with its words. There are none where its
// message was taken back into the box: what stands above that was told before.
func (d *Detector) tellTurn(p *Prompt) {
	v, t := d.view, &d.turn
	on := v.answer()
	if on.all == t.told {
		on = answer{all: on.all}
	}
	words := v.message(on)
	if v.known {
		state, line := t.turn(on, words)
		if state == TurnReady || p.drafted && state == TurnInterrupted {
			words = ""
		}
		p.Turn = state
		p.since = t.since
		p.Took = int(t.workedAt.Sub(t.since).Round(time.Second).Seconds())
		p.Question = turnSentence(v.a.Name, state, line)
		p.Excerpt = safely(p.Question, 200)
		if state != TurnReady {
			t.sent, t.worked = false, false
			t.told = on.all
		}
	}
	p.Full = safely(words, maxFull)
}

// turnSentence says how it stands with a turn of the tool of that name.
func turnSentence(name string, state TurnState, line string) string {
	switch state {
	case TurnReady:
		return name + " is ready and waits for your next message"
	case TurnAsks:
		return name + " asks you: " + safely(line, 300)
	case TurnInterrupted:
		return name + " was interrupted and waits for your next message"
	case TurnFailed:
		return name + " failed: " + safely(line, 400)
	}
	return name + " has finished and waits for your next message"
}

// ---- a turn's words ----
// What a tool says on the screen, as Markdown: its marks taken away, what was wrapped joined, tables as they are drawn.

// listItem is the mark of an item of a list.
const listItem = `(?:[-*+•]|\d{1,3}[.)]|\pL[.)])`

// wrapMargin is how many columns at the right a tool may leave free where it wraps its words: opencode leaves 5.
const wrapMargin = 6

var (
	reListItem = re(`^` + listItem + `\s+`)                       // the mark of an item of a list
	reColumn   = re(`[─━═]+`)                                     // the line above or below a column of a table
	reCode     = re("(?ms)^ *```.*?(^ *```|\\z)")                 // a block of code
	reOffers   = re(`(?m)^(?:[ |>#]|` + listItem + `[^\S\n]).*$`) // what may follow a question in words

	// reAsks is the end of a sentence that is a question.
	reAsks = re(`(?:[?？؟\x{37e}]|[か吗嗎][。.])["'”’»)\]*_` + "`" + `]*(\s*\([^()]*\))?$`)
)

// asksInWords reports whether a text ends in a question; what it offers may follow: a list, code, a table.
func asksInWords(text string) bool {
	text = reCode.ReplaceAllString(text, "")
	asks := func(text string) bool { return reAsks.MatchString(strings.TrimSpace(text)) }
	return asks(text) || asks(reOffers.ReplaceAllString(text, ""))
}

// message is what the tool has said last, as Markdown. One whose beginning is not on the screen any more begins with
// "…".
func (v *view) message(on answer) string {
	margin := v.s.cols
	for _, w := range on.rows {
		if w.text != "" {
			margin = min(margin, w.at)
		}
	}
	var b strings.Builder
	hang, table := 0, false
	before := viewRow{}
	for i, w := range append(slices.Clip(on.rows), before) { // a blank row ends a table
		fenced := table
		table = i < len(on.rows) && drawnTable(on.rows[i:]) || table && !w.gap()
		if table != fenced {
			b.WriteString("\n```")
		}
		switch {
		case table:
			b.WriteString("\n" + w.raw)
		case v.goesOn(before, w, hang):
			b.WriteString(joint(before.text, w.text) + w.text)
		default:
			hang = w.at + widthOf(reListItem.expr().FindString(w.text))
			b.WriteString(strings.TrimRight("\n"+strings.Repeat(" ", max(0, w.at-margin))+w.text, " "))
		}
		before = w
	}
	text := strings.Trim(b.String(), "\n")
	if !on.headed && text != "" {
		text = "…\n" + text
	}
	return text
}

// gap reports whether the row shows nothing.
func (w *viewRow) gap() bool { return w.text == "" && !w.rule }

// goesOn reports whether a row goes on with the one before it: its first word had no room there, and it begins where
// the words of that line do.
func (v *view) goesOn(before, w viewRow, hang int) bool {
	word, _, _ := strings.Cut(w.text, " ")
	first, size := utf8.DecodeRuneInString(word)
	if runeWidth(first) == 2 {
		word = word[:size]
	}
	room := before.at+widthOf(before.text)+1+widthOf(word) <= v.s.cols-wrapMargin
	return !room && w.text != "" && w.at == hang && !reListItem.MatchString(w.text)
}

// joint is what stands between two words that a tool has wrapped: nothing between two wide characters.
func joint(before, after string) string {
	left, _ := utf8.DecodeLastRuneInString(before)
	right, _ := utf8.DecodeRuneInString(after)
	if runeWidth(left) == 2 && runeWidth(right) == 2 {
		return ""
	}
	return " "
}

// drawnTable reports whether the rows begin with a table that is drawn with lines.
func drawnTable(rows []viewRow) bool {
	for _, w := range rows {
		if w.gap() {
			break
		}
		if w.rule && len(reColumn.expr().FindAllStringIndex(w.raw, 2)) == 2 {
			return true
		}
	}
	return false
}

// ---- safe text ----
// What the child wrote, as it may leave the machine, and what an operator wrote, as it may be typed.

// passwordIn is a password's name in other languages than English.
const passwordIn = `passwort|kennwort|mot de passe|contraseña|senha|wachtwoord|hasło|пароль|parola|şifre|密码|パスワード|` +
	`비밀번호|암호`

// secretName ends the name of a secret; PASS and _KEY alone are names of the environment.
const secretName = `(?:pass(?:word|wd|phrase|code)(?: is(?: generated for \S+)?)?|` +
	passwordIn + `|_pass|_auth|\bauth\\*["']|(?-i:\bPASS|_KEY|_PW)|\bpsk|cookie|pwd|secret|token|credential|` +
	`(?:api|access|secret|private|account|auth|signing|encryption|master)[_-]?key)`

// secretToken is a run without blanks, quotes, and what a shell or JSON acts on: no command can hide in it. What
// visible spells out may stand in it.
const secretToken = "((?:[^\\s\"'`$;|&()<>{}\\[\\]\\\\,]|\\\\u\\{\\w+\\})+)"

// secrets are what may be a secret, in three groups: its name, what stands between, the token. A name is no part of a
// path. Without a name it is a key by its shape (of AWS, GitHub, GitLab, Slack, Stripe, Google, OpenAI, Anthropic,
// npm, Hugging Face, SendGrid, Vault and others, a JWT, the token of a bot of Telegram's), or, in a text with a key in
// PEM, or as PGP and PuTTY write theirs, a line of base64 or a long run of it, which is hardly a path. A key that is
// broken at the end of its row goes on in the next. There is none in a text without any of the hints, in small letters.
var secrets = []struct {
	hints string
	at    *pattern
}{
	{secretHints, re(`(?i)(?:^|[^\w./\\~-])([\w.-]*` + secretName + `(?:\\*["'])?)` +
		`((?:[ \t]+[:=!]?=+>?[ \t]+|[:=!]?=+>?|[ \t]*[:：][ \t]*)\\*["']?)` + secretToken)},
	{secretHints, re(`(?i)(?:^|\s)(--?[\w-]*(?:` + secretName + `|\bpass)|sshpass -p)((?:[ \t]+|=)\\*["']?)` +
		secretToken)},
	{"-p", re(`\b((?:mysql|mariadb|sshpass)[\w-]*(?: [^\n;|&]*)? -p)()` + secretToken)},
	{"login redis", re(`\b((?:docker|podman) login[^\n;|&]* -p|redis-cli[^\n;|&]* -a)( )` + secretToken)},
	{"-u --user --proxy-user", re(`(?i)(?:^|\s)((?:-u|--user|--proxy-user)[ =]["']?[^\s:"'/]+)(:)` + secretToken)},
	{secretHints, re(`(?i)\b(login[ \t]+\S+\s+password)([ \t]+)` + secretToken)}, // .netrc
	{"bearer authorization", re(`(?i)\b(authorization\\*["']?:[ \t]*\\*["']?(?:bearer|basic|token)|bearer)( )` +
		secretToken)},
	{"://", re("(://[^\\s/:@]*)(:)((?:[^\\s\"'`$;|&()<>{}\\[\\]\\\\,/@]|\\\\u\\{\\w+\\})+)@")},
	{blockHints, re(`()(\n[ \t│]*|\\n)([A-Za-z0-9+/]{20,}={0,2})[ \t│]*(?:\n|\\|$)`)},
	{blockHints, re(`()(\\n|^|[^A-Za-z0-9+/])([A-Za-z0-9+][A-Za-z0-9+/]{39,}={0,2}|[A-Za-z0-9+/]{60,}={0,2})`)},
	{keyHints, re(`()()(\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bLS0tLS1CRUdJTi[\w+/]+={0,2}|` + // kubectl's: PEM in base64
		`\b(?:` + keyBegin + `)(?:[\w-]*(?:\\u\{\w+\}[\w-]+)+|[\w-]{16,}(?:=[0-9A-F]{8}\b)?)|` +
		`\bhooks\.slack\.com/services/[\w/]+|\bsig=[\w%+/-]{16,}={0,2}|` +
		`\bsk-(?:[a-z]+\d*-)*[a-z_]*[A-Z0-9][\w-]{15,}|\b(?:npm|hf)_[A-Za-z0-9]{30,}|` +
		`\bSG\.[\w-]{16,}\.[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\d{6,}:AA[\w-]{28,})`)},
	{keyHints, re(`()()(\b(?:` + keyBegin + `|sk-\w*[A-Z]|eyJ|npm_|hf_|A[KS]IA)[\w.-]*)` + rowBreak +
		`[\w.+=-]*\d[\w.+=-]{15,}`)},
	{"[redacted]", re(`()(\[redacted\]` + rowBreak + `)([\w+=][\w+=.-]{15,})`)}, // no path, no command
}

// keyBegin begins the keys of many makers, rowBreak is where a program has broken one that is too long for its row.
const (
	keyBegin = `gh[pousr]_|github_pat_|gl[a-z]{2,4}-|xox[a-eoprs]-|xapp-|[sr]k_(?:live|test)_|whsec_|AIza|ya29\.|` +
		`dckr_pat_|pypi-|GOCSPX-|hv[bs]\.|lin_api_|gsk_|xai-|AGE-SECRET-KEY-|do[opr]_v1_|tskey-|shpat_|glsa_|ATATT3|` +
		`ntn_|rubygems_|sbp_|figd_|nfp_|sntry[su]_|pscale_\w+_|r8_|pplx-|nvapi-|shpss_|PMAK-|NRAK-|ATBB|` +
		`sk-ant-|sk-proj-|\d{6,}:AA`
	rowBreak = `[ \t│┃←]*\n[ \t│┃]*`
)

// secretHints are in every name that secretName ends, keyHints in every key, blockHints around one of several lines.
const (
	secretHints = "pass pwd _pw psk cookie secret token credential key auth wort senha contraseña woord hasło пароль " +
		"parola şifre 密码 パスワード 비밀번호 암호"
	blockHints = "key----- block----- private-lines:"
	keyHints   = "akia asia ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ gl xox xapp- k_live_ k_test_ whsec_ aiza ya29. " +
		"dckr_pat_ pypi- gocspx- hvs. lin_api_ gsk_ xai- sk- npm_ hf_ sg. eyj :aa age-secret dop_v1_ tskey- shpat_ glsa_ " +
		"ls0tls1crudjti hvb. doo_v1_ dor_v1_ atatt3 ntn_ rubygems_ sbp_ figd_ nfp_ sntrys_ sntryu_ pscale_ slack.com/ sig= " +
		"r8_ pplx- nvapi- shpss_ pmak- nrak- atbb"
)

// maxJudged is how long a token may be, in bytes, in which another name is looked for, so that the work is bounded.
const maxJudged = 512

var (
	// reSecretFlag is a flag whose value is the next argument.
	reSecretFlag = re(`(?i)^--?[\w-]*(?:` + secretName + `|\bpass) $`)
	// rePlaceholder stands for a value: a variable, a path, a member, a type, a word about it.
	rePlaceholder = re(`^[%*@/~.!…]|^[A-Za-z_]\w{0,15}(?:(?:\.|->|::|\?\.)[A-Za-z_]\w{0,15})+$|` +
		`(?i)^(?:true|false|null|nil|none|undefined|string|required|optional|hidden|x+|your[-_ ].*|.*\.\.\.)$`)
	reWords      = re(`^(?:[A-Za-z]+|\d{1,4})(?:[-_.:/ ]+(?:[A-Za-z]+|\d{1,4}))*$`) // and short numbers
	reMixed      = re(`[A-Za-z].*\d|\d.*[A-Za-z]`)
	rePassMark   = re(`[\d!@#$^&*+?~]`)                                    // what a password has and a word has not
	rePassName   = re(`(?i)pass|pwd|` + passwordIn + `|-u|--user|://|-p$`) // names a password
	reEnvName    = re(`^[A-Z][A-Z0-9_]*$`)                                 // of a variable of the environment
	reMemberName = re(`(?i)[a-z_-](?:key|word|secret|token)\\*["']$`)      // of JSON
)

// isSecret reports whether the token at such a place is one, and not a word, a placeholder, code, or a path.
func isSecret(name, between, token string) bool {
	if name == "" {
		upper := strings.ToUpper(token) != token
		return between == "" || upper && strings.ToLower(token) != token && reMixed.MatchString(token)
	}
	mark := strings.TrimRight(between, `\"'`)
	sure := strings.HasSuffix(name, " -p") || strings.Contains(name, "://")
	ofItself := strings.EqualFold(token, strings.Trim(name, `\"'-`))
	if len(token) < 4 && !sure || rePlaceholder.MatchString(token) || ofItself {
		return false
	}
	pass := rePassName.MatchString(name)
	flag := name[0] == '-'
	switch {
	case strings.Trim(token, "0123456789") == "":
		return pass && !flag
	case mark == "=" && (reEnvName.MatchString(name) || pass && flag), sure:
		return true
	case mark != between && reMemberName.MatchString(name):
		return true
	case pass:
		return rePassMark.MatchString(token)
	}
	return len(token) >= 8 && reMixed.MatchString(token) && !reWords.MatchString(token)
}

// redact takes out what is a secret by its shape, or by its name and its looks: single tokens in which no command can
// hide, never more. Every sink uses it.
func redact(s string) string {
	for before := ""; s != before; { // behind what was taken out may stand the rest of it
		before = s
		small := strings.ToLower(s)
		for _, kind := range secrets {
			has := func(hint string) bool { return strings.Contains(small, hint) }
			if slices.ContainsFunc(strings.Fields(kind.hints), has) {
				s = redactBy(kind.at.expr(), s)
			}
		}
	}
	return s
}

var (
	// reNamedSecret is a secret that was taken out, with the word before it.
	reNamedSecret = re(`(\w+)\W*\[redacted\]`)
	// reBareSecret is one that stands where a shell has the name of a program, in no folder or in one that is shown.
	reBareSecret = re(`(?m)(?:^|[;&|(])[^\w\n\[+-]*(?:\S*/)?\[redacted\]`)
)

// usesSecret reports whether what was taken out of a redacted text may be a command: it stands where one does, or the
// text uses a variable to which it gives a secret, by that word.
func usesSecret(text string) bool {
	named := reNamedSecret.expr().FindAllStringSubmatch(text, -1)
	return reBareSecret.MatchString(text) || slices.ContainsFunc(named, func(found []string) bool {
		return re(`\$\W?` + found[1] + `\b`).MatchString(text)
	})
}

// keyBegins is how a key in PEM begins.
const keyBegins = "-----BEGIN PRIVATE KEY-----\n"

// openKey is how a key in PEM begins that does not end in the text, "" where there is none: what follows the text is
// known for a secret by that alone.
func openKey(text string) string {
	begin := strings.LastIndex(text, "-----BEGIN ")
	if begin < 0 || strings.LastIndex(text, "-----END ") > begin || !strings.Contains(text[begin:], "KEY") {
		return ""
	}
	return keyBegins
}

// redactBy takes out the secrets that one of the patterns finds. What a call or an index follows is code.
func redactBy(expr *regexp.Regexp, s string) string {
	var kept strings.Builder
	for {
		at := expr.FindStringSubmatchIndex(s)
		if at == nil {
			kept.WriteString(s)
			return kept.String()
		}
		name, between, token := s[at[2]:at[3]], s[at[4]:at[5]], s[at[6]:at[7]]
		code := strings.HasPrefix(s[at[7]:], "(") || strings.HasPrefix(s[at[7]:], "[")
		end := at[6]
		kept.WriteString(s[:end])
		switch {
		case !code && isSecret(name, between, token):
			kept.WriteString("[redacted]")
			end = at[7]
		case len(token) > maxJudged || name == "":
			kept.WriteString(token)
			end = at[7]
		}
		s = s[end:]
	}
}

// redactArgs is the arguments of a program as they may be kept: what follows a flag for a secret is one.
func redactArgs(args []string) []string {
	safe := []string{}
	before := ""
	for _, arg := range args {
		kept, alone := strings.CutPrefix(redact(before+arg), before)
		switch {
		case reSecretFlag.MatchString(before) && !strings.HasPrefix(arg, "-"):
			kept = "[redacted]"
		case !alone:
			kept = redact(arg)
		}
		safe = append(safe, kept)
		before = arg + " "
	}
	return safe
}

// safeText is text as it may leave the machine: what hides is shown, secrets are taken out.
func safeText(text string) string { return redact(visible(text)) }

// safely is at most n bytes of that.
func safely(text string, n int) string { return clip(safeText(text), n) }

// hides reports whether a character is not shown, or turns text around: a control character, zero width, bidi, a tag, a
// variation selector, what Unicode lets a font ignore.
func hides(r rune) bool {
	return r != '\n' && r != '\t' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp,
		unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// visible writes what hides as \u{200B}; newline and tab stay.
func visible(s string) string {
	var b strings.Builder
	for _, r := range s {
		if hides(r) {
			fmt.Fprintf(&b, `\u{%04X}`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// clip cuts to at most n bytes, on a rune boundary; what is cut ends in "…".
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return clipBytes(s, max(n-len("…"), 0)) + "…"
}

// headAndTail is a text of at most that many bytes: what is dangerous can stand at either end.
func headAndTail(text string, most int) string {
	if len(text) <= most {
		return text
	}
	half := (most - len(" …(12345678 bytes)… ")) / 2
	head := clipBytes(text, half)
	tail := strings.ToValidUTF8(text[len(text)-half:], "")
	return fmt.Sprintf("%s …(%d bytes)… %s", head, len(text)-len(head)-len(tail), tail)
}

// before is s behind a mark, "" where there is none.
func before(mark, s string) string {
	if s == "" {
		return ""
	}
	return mark + s
}

// oneLine returns s as one row, with a visible mark for each line end.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", " ⏎ ") }

// maxMessage is how much of an operator's text is typed, in bytes: a line of a terminal has no more before its Enter.
const maxMessage = 4095

// reControl is what a terminal acts on.
var reControl = re(`[^\n\t\P{Cc}]`)

// cleanText is an operator's text as it may be typed: what a terminal would act on is left out, and what is beyond
// maxMessage.
func cleanText(text string) string {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(strings.ToValidUTF8(text, ""))
	return clipBytes(strings.TrimRight(reControl.ReplaceAllString(text, ""), "\n"), maxMessage)
}

// clipBytes is the beginning of text, at most n bytes, cut between runes.
func clipBytes(text string, n int) string {
	return strings.ToValidUTF8(text[:min(n, len(text))], "")
}

// marshal is JSON on one line in which <, > and & stand for themselves.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// inJSON is a value on one line of JSON; what JSON does not know is told instead.
func inJSON(value any) string {
	text, err := marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// ref is a pointer to a copy of v.
func ref[T any](v T) *T { return &v }

// ---- recordings ----
// Asciicast v2, both ways: https://docs.asciinema.org/manual/asciicast/v2/. A header line, then
// [seconds, kind, text] with the kinds o, i, r and, of our own, t: the system's view of the terminal.

// castHeader is the first line of a recording.
type castHeader struct {
	Version int            `json:"version"`
	Width   int            `json:"width"`
	Height  int            `json:"height"`
	Title   string         `json:"title"` // the tool
	Env     map[string]any `json:"env"`
}

// castWriter writes a recording; a nil one writes nothing. What cannot be written is told by close.
type castWriter struct {
	file  io.Closer     // close closes it
	w     *bufio.Writer // keeps the first error
	start time.Time
	tail  []byte // the beginning of a rune whose end is still to come
	state string // of the terminal, as last written; "" not yet
}

// event writes one line.
func (c *castWriter) event(kind, text string, now time.Time) {
	if c == nil {
		return
	}
	quoted, _ := json.Marshal(text) // a string is never refused
	fmt.Fprintf(c.w, "[%.4f, %q, %s]\n", now.Sub(c.start).Seconds(), kind, quoted)
}

// output writes what the child wrote, but for the beginning of a rune at its end.
func (c *castWriter) output(p []byte, now time.Time) {
	if c == nil {
		return
	}
	p = append(c.tail, p...)
	tail := p[max(0, len(p)-utf8.UTFMax+1):]
	for len(tail) > 0 && utf8.FullRune(tail) {
		tail = tail[1:]
	}
	c.tail = bytes.Clone(tail)
	c.event("o", string(p[:len(p)-len(tail)]), now)
}

// tty writes the state of the terminal where it is another than before.
func (c *castWriter) tty(t TTYState, now time.Time) {
	state := t.words()
	if c != nil && state != c.state {
		c.state = state
		c.event("t", state, now)
	}
}

// close repeats the last state, for a replay's clock stops there, and returns the first error of all that was written.
func (c *castWriter) close(now time.Time) error {
	if c == nil {
		return nil
	}
	unknown := TTYState{}.words()
	c.event("t", cmp.Or(c.state, unknown), now)
	return errors.Join(c.w.Flush(), c.file.Close())
}

// words is the state as a "t" event has it; parseTTY reads it.
func (t TTYState) words() string {
	words := []string{readings[max(t.Reading, ReadingUnknown)], "raw", "noecho"}
	if t.Canonical {
		words[1] = "canon"
	}
	if t.Echo {
		words[2] = "echo"
	}
	return strings.Join(words, " ")
}

// parseTTY reads the words of a "t" event; what it does not know is not set.
func parseTTY(text string) TTYState {
	words := append(strings.Fields(text), "", "", "")
	reading := Reading(max(0, slices.Index(readings, words[0])))
	return TTYState{Reading: reading, Canonical: words[1] == "canon", Echo: words[2] == "echo"}
}

// tape is a recording or a scenario, to be replayed.
type tape struct {
	castHeader
	name     string // of the file
	events   []tapeEvent
	defaults map[PromptType]string
	want     map[string]any // of a scenario
}

// tapeEvent is one line of a recording.
type tapeEvent struct {
	t    float64 // seconds
	kind string
	data string
}

// decode reads a recording. After an error the last event is the one that could not be read.
func (tp *tape) decode(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&tp.castHeader); err != nil {
		return err
	}
	if tp.Version != 2 {
		return fmt.Errorf("not an asciicast of version 2")
	}
	for dec.More() {
		e := tapeEvent{}
		err := dec.Decode(&[]any{&e.t, &e.kind, &e.data})
		tp.events = append(tp.events, e)
		if err != nil {
			return err
		}
	}
	return nil
}

// replay has a detector see a tape as in a session, up to its last event. each gets every prompt.
func replay(tp *tape, each func(labEvent)) *Detector {
	d := newDetector(adapterFor(tp.Title), tp.Height, tp.Width, DetectOptions{ // the defaults of config.toml
		Threshold: 0.65, Stuck: 2 * time.Second, Context: 600, SafeDefaults: tp.defaults})
	start := time.Unix(0, 0)
	tty := TTYState{}
	tick := func(now time.Time) {
		p := d.Tick(tty, now)
		if p != nil {
			each(labEvent{
				File:       tp.name,
				T:          now.Sub(start).Seconds(),
				Confidence: p.Confidence(),
				Prompt:     p,
				Ticked:     p.Ticked,
				Why:        d.Explain(),
				delay:      now.Sub(d.outAt),
			})
		}
	}
	for _, e := range tp.events {
		now := start.Add(time.Duration(e.t * float64(time.Second)))
		for next := d.Next(start); next.Before(now); next = d.Next(next.Add(time.Millisecond)) {
			tick(next)
		}
		switch e.kind {
		case "o":
			d.Feed([]byte(e.data), now)
		case "i":
			d.Typed([]byte(e.data), now)
		case "r":
			cols, rows := tp.Width, tp.Height
			fmt.Sscanf(e.data, "%dx%d", &cols, &rows) // what is not there stays as it was
			d.Resize(rows, cols, now)
		case "t":
			tty = parseTTY(e.data)
			tick(now)
		}
	}
	return d
}

// ---- lab ----
// The Prompt Lab says what would have been asked, and compares that with what is expected.

// scenario is a file of the Prompt Lab: tool, what is shown or a recording, tty (as in a "t" event), safe_defaults (as
// in config.toml), and what is expected of the last prompt. Without an expected type, nothing but an idle box may be
// found; any other member that is missing is not checked.
type scenario struct {
	Tool         string                `json:"tool"`
	Output       string                `json:"pty_output"`
	Recording    string                `json:"recording"`
	TTY          string                `json:"tty"`
	SafeDefaults map[PromptType]string `json:"safe_defaults"`
}

// The size of the terminal in which a scenario's output is shown.
const (
	scenarioRows = 30
	scenarioCols = 100
)

// load reads a recording, or a scenario: the recording it names, or its output at once and then five seconds.
func (tp *tape) load(path string) error {
	if filepath.Ext(path) != ".json" {
		return tp.decode(path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var s scenario
	if err := json.Unmarshal(data, &s); err != nil {
		return err
	}
	if err := json.Unmarshal(data, &tp.want); err != nil {
		return err
	}
	tp.defaults = s.SafeDefaults
	if s.Recording != "" {
		if err := tp.decode(filepath.Join(filepath.Dir(path), s.Recording)); err != nil {
			return err
		}
	} else {
		tp.events = []tapeEvent{{0, "o", s.Output}}
		for t := 0.05; t < 5; t += 0.25 {
			tp.events = append(tp.events, tapeEvent{t, "t", s.TTY})
		}
	}
	tp.Title = cmp.Or(s.Tool, tp.Title)
	return nil
}

// labEvent is what the lab prints of one prompt.
type labEvent struct {
	File       string  `json:"file"`
	T          float64 `json:"t"` // seconds
	Confidence string  `json:"confidence"`
	*Prompt
	Ticked []bool        `json:"ticked,omitempty"`
	Why    string        `json:"why,omitempty"` // which reader found it
	delay  time.Duration // since the last byte
}

// check compares the last prompt that is idle as expected with what a scenario expects. A recording expects nothing. No
// choices are expected of a question for yes or no, too; null expects nothing of an excerpt.
func (tp *tape) check(seen []labEvent) error {
	if tp.want == nil {
		return nil
	}
	want := map[string]any{"expected_type": nil, "expected_idle": false, "expected_secret": false}
	got := maps.Clone(want)
	got["expected_choices"] = []string{}
	maps.Copy(want, tp.want)
	for _, e := range seen {
		if e.Idle == want["expected_idle"] {
			got = map[string]any{
				"expected_type":            "TYPE_" + strings.ToUpper(string(e.Type)),
				"expected_excerpt":         e.Excerpt,
				"expected_confidence_band": strings.ToUpper(strings.TrimSuffix(e.Confidence, "ium")),
				"expected_idle":            e.Idle,
				"expected_secret":          e.Secret,
				"expected_choices":         append([]string{}, labels(e.Choices)...),
				"expected_safe_default":    e.SafeDefault,
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(want)) {
		whole, partly := strings.CutSuffix(key, "_contains")
		found, expected := inJSON(got[whole]), inJSON(want[key])
		part := strings.Trim(strings.TrimPrefix(expected, "null"), `"`)
		implied := key == "expected_choices" && expected == "[]" && got["expected_type"] == "TYPE_YES_NO"
		same := found == expected || implied || partly && strings.Contains(found, part)
		if strings.HasPrefix(key, "expected_") && !same {
			return fmt.Errorf("%s: want %s, got %s", key, expected, found)
		}
	}
	return nil
}

// lab is one run of the command: what it prints, and how many files it has seen.
type lab struct {
	c     *command
	enc   *json.Encoder
	files int
	bad   int // unreadable, or not as expected
}

// cmdLab is `atlasbridge lab`. Exit 1 when a file is unreadable or not as expected.
func cmdLab(c *command) int {
	l := &lab{c: c, enc: json.NewEncoder(c)}
	l.enc.SetEscapeHTML(false)
	for _, root := range c.args {
		l.walk(root)
	}
	if l.talks() {
		fmt.Fprintf(c, "files: %d, not as expected: %d\n", l.files, l.bad)
	}
	return min(l.bad, 1)
}

// talks reports whether the output is for a person to read.
func (l *lab) talks() bool {
	return !l.c.on("json") && !l.c.on("screen")
}

// walk plays a file, whatever its name, or the recordings and scenarios in a folder.
func (l *lab) walk(root string) {
	visit := func(path string, entry os.DirEntry, err error) error {
		ext := filepath.Ext(path)
		ours := path == root || ext == ".cast" || ext == ".json"
		if err == nil && (entry.IsDir() || !ours) {
			return nil
		}
		l.files++
		if err == nil {
			err = l.play(path)
		}
		if err != nil {
			l.bad++
			l.c.complain(path + ": " + err.Error())
		}
		return nil
	}
	_ = filepath.WalkDir(root, visit) // visit has told every error
}

// play replays one file, prints what is asked, and returns what is not as expected.
func (l *lab) play(path string) error {
	tp := &tape{name: filepath.Base(path), castHeader: castHeader{Height: scenarioRows, Width: scenarioCols}}
	if err := tp.load(path); err != nil {
		return fmt.Errorf("reading event %d of %s: %w", len(tp.events), tp.name, err)
	}
	var seen []labEvent
	d := replay(tp, func(e labEvent) {
		seen = append(seen, e)
		l.print(e)
	})
	if l.c.on("screen") {
		fmt.Fprintln(l.c, d.Screen.Text())
	}
	if l.c.on("explain") && l.talks() {
		fmt.Fprintf(l.c, "    the screen at the end: %s\n", d.Explain())
	}
	return tp.check(seen)
}

// print prints one prompt.
func (l *lab) print(e labEvent) {
	if l.c.on("json") {
		e.Recent = ""
		if !l.c.on("explain") {
			e.Why = ""
		}
		_ = l.enc.Encode(e) // told when the command ends
		return
	}
	if !l.talks() {
		return
	}
	fmt.Fprintf(l.c, "%-40s %8.2f s  %-15s %-6s %q\n", e.File, e.T, e.Type, e.Confidence,
		e.Excerpt)
	if l.c.on("explain") {
		fmt.Fprintf(l.c, "    found %.2f s after the last output: %s\n", e.delay.Seconds(), e.Why)
	}
}
