package main

import "time"

// Screen is what the terminal shows: a table-driven parser over a grid of cells. It is fed with the
// child's bytes cut anywhere. Pure: no I/O, no clock.
type Screen struct{}

// newScreen is an empty screen of rows × cols, both at least 1.
func newScreen(rows, cols int) *Screen { return &Screen{} }

// Write feeds bytes of the child. It never fails.
func (s *Screen) Write(p []byte) (int, error) { return len(p), nil }

// Resize changes the size as xterm does (no reflow).
func (s *Screen) Resize(rows, cols int) {}

func (s *Screen) Size() (rows, cols int) { return 0, 0 }

// Cursor is the position from 0; hidden tells DECTCEM.
func (s *Screen) Cursor() (row, col int, hidden bool) { return 0, 0, false }

// Row is the text of row r from 0, trailing blanks removed, as tmux capture-pane -p prints it.
func (s *Screen) Row(r int) string { return "" }

// Wrapped tells whether row r continues on row r+1 because the text ran over the right margin.
func (s *Screen) Wrapped(r int) bool { return false }

// Attr is how the cell is drawn: enough to tell a highlighted choice from the others.
type Attr struct {
	Bold, Dim, Reverse, Underline bool
	FG, BG                        int32 // −1 default, 0–255 palette, else 1<<24|rgb
}

// Cell is the rune at (r, c), 0 for the right half of a wide one, with its attributes.
func (s *Screen) Cell(r, c int) (rune, Attr) { return 0, Attr{} }

// Text is all rows joined with "\n", trailing empty rows removed.
func (s *Screen) Text() string { return "" }

// Scrolled counts the lines that left the top of the primary screen, so that Scrolled()+row names a
// line for good.
func (s *Screen) Scrolled() int { return 0 }

func (s *Screen) Title() string         { return "" } // OSC 0 / 2
func (s *Screen) AltScreen() bool       { return false }
func (s *Screen) BracketedPaste() bool  { return false } // DECSET 2004
func (s *Screen) AppCursorKeys() bool   { return false } // DECCKM: arrows are ESC O A, not ESC [ A
func (s *Screen) Status() ProgramStatus { return ProgramStatus{} }
func (s *Screen) Bell() int             { return 0 } // BELs seen outside of strings

// ProgramStatus is what a program last reported of itself: OSC 7501 (facts/claude-code.md 3a), and the
// last notification (OSC 9, 99, 777). Seq rises with every report, so that a repeat is seen as one.
type ProgramStatus struct {
	State  string // "", idle, working, blocked, done, clear
	App    string
	Kind   string // permission, question
	Msg    string // decoded from base64
	Seq    int
	Notice string
}

// TakeReplies returns and forgets what a terminal would have answered to the queries seen so far.
// answerAll (no host terminal): DSR, DA, colours, XTVERSION, DECRQM, sizes…; otherwise only OSC 7501,
// which the host is not expected to know.
func (s *Screen) TakeReplies(answerAll bool) []byte { return nil }

// Transcript returns the text that became final since the last call, in lines and each once, and the
// part that may still change (the live part). Lines that left the screen, and lines above the cursor's
// paragraph on the primary screen, are final; on the alternate screen nothing is final until settle
// (the tool's turn is over), when what is new on it since the last settle is returned.
func (s *Screen) Transcript(settle bool) (final []string, live string) { return nil, "" }

var _ = time.Second
