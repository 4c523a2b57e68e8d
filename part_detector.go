package main

import "time"

// PromptType is one of the five kinds of question.
type PromptType string

const (
	YesNo          PromptType = "yes_no"
	ConfirmEnter   PromptType = "confirm_enter"
	MultipleChoice PromptType = "multiple_choice"
	FreeText       PromptType = "free_text"
	Unknown        PromptType = "unknown"
)

// Reading is what the system says of the foreground processes: whether one of them waits to read the terminal.
type Reading int

const (
	ReadingUnknown Reading = iota
	ReadingYes
	ReadingBusy
)

// TTYState is signal 2, the terminal's own state as the system sees it (facts/terminal-signals.md).
type TTYState struct {
	Reading         Reading
	Canonical, Echo bool
}

// Choice is one answer a question offers.
type Choice struct {
	Key    string `json:"key"`              // names it in a Decision: "y", "n", "1" … "9", or the letter shown
	Label  string `json:"label"`            // as on the screen, made safe, ≤ 60 characters
	Keys   string `json:"keys,omitempty"`   // the exact bytes that choose it; "" when a pointer must be moved to it
	Grants bool   `json:"grants,omitempty"` // lets the agent do something (Yes, Allow, Trust…)
	Hook   string `json:"hook,omitempty"`   // "allow" or "deny" where the tool's hook can say the same; set by the session
}

// Prompt is a question (or an idle input box) found on the screen. Identifiers, times and the nonce are
// the store's business, not the detector's.
type Prompt struct {
	Type        PromptType
	Score       float64  // 0.60 … 1.0
	Excerpt     string   // safe and redacted, ≤ 200 bytes, ends in "…" when cut
	Question    string   // the sentence a person would read out, safe
	Full        string   // the whole dialog as text, safe and redacted, ≤ 16 KiB: "Show all"
	Cut         bool     // the excerpt hides part of what is being allowed: no quick affirmative buttons
	Choices     []Choice // ≤ 9
	SafeDefault *string  // a choice's key, "enter", "esc" or "" (Enter with no text); nil: never type anything
	Idle        bool     // an agent's empty input box: finished, waits for the next message
	Secret      bool     // echo is off
	Permission  bool     // grants something: no affirmative default
	Multi       bool     // several choices may be ticked
	Pointer     int      // index of the choice highlighted now, −1 when there is no pointer
	Ticked      []bool   // Multi: which are ticked now
	Axis        string   // "vertical" or "horizontal": which arrows move the pointer; "" none
	Submit      string   // Multi: the bytes that end the choosing and submit (after verification), "" unknown
	Signals     []string // what agreed: "hook", "protocol", "title", "pattern", "structure", "tty", "silence"
	Fingerprint string   // same question ⇔ same fingerprint; pointer position, ticks and spinners do not count
	Recent      string   // last 500 characters of the screen, safe and redacted: "Show last 500 characters"
}

// Confidence is the band of Score: "high", "medium" or "low".
func (p *Prompt) Confidence() string { return "" }

// DetectOptions are the settings of a Detector.
type DetectOptions struct {
	Threshold    float64
	Stuck        time.Duration
	BufferBytes  int
	SafeDefaults map[PromptType]string
}

// Detector judges a Screen over time. Deterministic: the same calls give the same prompts.
type Detector struct{ Screen *Screen }

func newDetector(a *Adapter, rows, cols int, o DetectOptions) *Detector {
	return &Detector{Screen: newScreen(rows, cols)}
}

// Feed takes the child's bytes as they came.
func (d *Detector) Feed(p []byte, now time.Time)             {}
func (d *Detector) Resize(rows, cols int, now time.Time)     {}
func (d *Detector) Typed(p []byte, now time.Time)            {}                     // bytes went to the child, by keyboard or gate
func (d *Detector) Tick(tty TTYState, now time.Time) *Prompt { return nil }         // a question first seen; else nil
func (d *Detector) Next(now time.Time) time.Time             { return time.Time{} } // when Tick is next worth calling without new bytes; zero: not before
func (d *Detector) WantTTY(now time.Time) bool               { return false }       // whether TTYState can change what Tick says now
// Look is what the screen asks this instant, judged without waiting: the gate's eye. nil: nothing.
func (d *Detector) Look(tty TTYState, now time.Time) *Prompt { return nil }

// Gone tells that the question Tick last returned has left the screen for good (answered, or the program went on).
func (d *Detector) Gone(tty TTYState, now time.Time) bool { return false }

// Sleep ignores everything until the echo window has passed and forgets the question in force, so that
// the same words asked again are a new prompt.
func (d *Detector) Sleep(until time.Time) {}

// Activity is "starting", "running", "waiting_permission", "waiting" or "idle", for status.
func (d *Detector) Activity() string { return "" }

// LastOutput is when bytes last came.
func (d *Detector) LastOutput() time.Time { return time.Time{} }

// Raw is the rolling buffer: the last BufferBytes bytes of the child.
func (d *Detector) Raw() []byte { return nil }

// Adapter is what atlasbridge knows of one tool: one table row.
type Adapter struct {
	Name           string
	Names          []string      // command names it stands for
	MinVer, MaxVer string        // supported versions, inclusive; "" no bound
	PasteSubmit    bool          // bracketed paste then Enter submits
	SubmitDelay    time.Duration // between the text and its Enter
	ClearInput     string        // bytes that empty the input box
	Hooks          string        // how hooks are installed: "claude-settings" or ""
	EscapeBang     bool          // a leading ! / # must be defused with a space
}

// adapterFor finds the row for a command name (base name, no extension), or the generic one.
func adapterFor(name string) *Adapter { return nil }

// redact replaces known shapes of secrets (keys, tokens, passwords in URLs, bot tokens). Every sink uses it.
func redact(s string) string { return s }

// visible shows control, zero-width and bidi characters as \u{200B}; newline and tab stay.
func visible(s string) string { return s }

// clip cuts s to at most n bytes on a rune boundary, ending in "…".
func clip(s string, n int) string { return s }

// cmdLab is `atlasbridge lab`.
func cmdLab(c *command) int { return 0 }
