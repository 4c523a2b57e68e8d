package main

// The commands: one table, from which dispatch, flags, help, suggestions, shell completion and the README's
// table derive; and the commands that look at the installation itself.
//
// Rules: what was asked for goes to stdout, everything said about it to stderr; tables fit 80 columns;
// colour only on a terminal and without NO_COLOR; an error is one line and says what to do in the next.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// Exit codes of our own; a child's are passed through.
const (
	exitFailed   = 1   // a check or command failed
	exitUsage    = 2   // as the shell's builtins
	exitInternal = 125 // before the child ran; 125 to 127 as env(1) and docker run have them
)

// errLocked is returned by lockFile when another process holds the lock and waiting was not asked for.
var errLocked = errors.New("locked by another process")

// errNoTool is returned by findTool and startPTY for a command that PATH does not have.
var errNoTool = errors.New("command not found")

// PTY is the child's terminal. Read gives io.EOF when the last process that held it is gone. Methods may be
// called from different goroutines; Close is idempotent and ends a blocked Read.
type PTY interface {
	Read(p []byte) (int, error)
	Write(p []byte) (int, error)
	Close() error
	Resize(Size) error
	State() TTYState  // signal 2; ReadingUnknown where the system cannot tell
	Wait() (code int) // exit status, 128+N when a signal killed it; once
	PID() int
	Signal(sig os.Signal) error     // to the child's foreground process group
	Terminate(done <-chan struct{}) // SIGTERM, 3 s, SIGKILL to its process group; returns early when done closes
}

// Size of a terminal in cells and pixels (struct winsize).
type Size struct{ Rows, Cols, XPixel, YPixel uint16 }

// command is what every command gets: its arguments and surroundings.
type command struct {
	ctx                   context.Context
	name                  string
	args                  []string // after the command's name
	stdin, stdout, stderr *os.File
	getenv                func(string) string
}

// commandSpec is one row of the command table.
type commandSpec struct {
	name, usage, summary string
	flags                []flagSpec
	min, max             int    // how many arguments besides flags; max −1: any number
	foreign              bool   // the first argument that is no flag ends the flags: the rest is another program's
	words                string // what the first argument can be, for completion
	about                string // explanation and examples
	do                   func(*command) int
}

// flagSpec is one flag; value names its argument, "" for a switch, "DUR" for a duration.
type flagSpec struct{ name, value, summary string }

// commands is the command table.
func commands() []commandSpec {
	asJSON := flagSpec{"json", "", "print JSON, with the field names of the files"}
	return []commandSpec{
		{name: "run", usage: "run [flags] <tool> [args…]", summary: "run a tool; its questions reach your phone",
			flags: []flagSpec{
				{"channel", "telegram|local", "who is asked (default: telegram once it is set up)"},
				{"stream", "", "send all visible output to the phone too"},
				{"record", "FILE", "keep the session as an asciicast recording"},
				{"timeout", "DUR", "how long a question waits (default 10m)"},
				{"name", "LABEL", "the session's name in messages"},
				{"adapter", "NAME", "treat the tool as this one (see `atlasbridge adapters`)"},
				{"quiet", "", "not a byte of our own on the terminal"},
			}, min: 1, max: -1, foreign: true, do: cmdRun, about: `
Everything after <tool> is the tool's own. Keyboard, colours, resizing and exit
status are as without atlasbridge. Exit: the tool's; 125 atlasbridge failed, 126
not executable, 127 not found.

  atlasbridge run claude
  atlasbridge run --name api --timeout 30m claude --model opus
  atlasbridge run --channel local -- bash -c 'read -p "Continue? (y/n) " a'`},
		{name: "setup", usage: "setup [flags]", summary: "connect your Telegram bot; writes config.toml",
			flags: []flagSpec{
				{"token-file", "FILE", "read the bot token from a file"},
				{"token-stdin", "", "read the bot token from standard input"},
				{"chat-id", "ID", "the chat; found by itself otherwise"},
				{"user-id", "ID", "who may answer; found by itself otherwise"},
				{"api-base", "URL", "another Bot API server"},
				{"no-test", "", "send no test message"},
				{"yes", "", "remove a webhook without asking"},
			}, do: cmdSetup, about: `
Asks for the bot token (from @BotFather), waits until you send the bot a message,
confirms it is you with a short code, and sends a test message.

  atlasbridge setup`},
		{name: "doctor", usage: "doctor [--json]", summary: "check everything; says what to do about each failure",
			flags: []flagSpec{asJSON}, do: cmdDoctor, about: `
Checks configuration, permissions, token, chat, clock, poller, state, audit log,
terminal, and each tool. Exit: 1 when a check failed.

  atlasbridge doctor
  atlasbridge doctor --json | jq '.checks[] | select(.ok | not)'`},
		{name: "status", usage: "status [--all] [--json]", summary: "sessions: what runs, what waits, who polls Telegram",
			flags: []flagSpec{{"all", "", "ended sessions too"}, asJSON}, do: cmdStatus, about: `
  atlasbridge status
  atlasbridge status --json | jq -r '.[].id'`},
		{name: "approvals", usage: "approvals [--json]", summary: "open questions of all sessions, with the time left",
			flags: []flagSpec{asJSON}, do: cmdApprovals, about: `
  atlasbridge approvals`},
		{name: "answer", usage: "answer <prompt-id> <value>", summary: "answer a question from any terminal",
			min: 2, max: 2, foreign: true, do: cmdAnswer, about: `
The id's first 8 digits will do. The value is what a button would send: y, n, a
choice's number or letter, enter, esc, default, or the text itself.

  atlasbridge answer 3f2a91c4 y`},
		{name: "logs", usage: "logs [--tail] [--json] [--session ID]", summary: "what happened, readable; --tail follows",
			flags: []flagSpec{{"tail", "", "follow"}, asJSON, {"session", "ID", "one session only"}},
			do:    cmdLogs, about: `
  atlasbridge logs --tail
  atlasbridge logs --json | jq -c 'select(.event == "PROMPT_RESOLVED")'`},
		{name: "audit", usage: "audit verify [--json]", summary: "recompute the audit chain, name the first bad line",
			flags: []flagSpec{asJSON, {"head", "HASH", "the last hash you know, from the phone"}},
			min:   1, max: 1, words: "verify", do: cmdAudit, about: `
Compares with the head kept in the state file; --head takes the one that the
session-ended message carries. Exit: 1 when the log is not what was written.

  atlasbridge audit verify
  atlasbridge audit verify --head sha256:2c26b46b…`},
		{name: "debug", usage: "debug bundle [--output FILE] [--full]", summary: "pack what a bug report needs, without secrets",
			flags: []flagSpec{{"output", "FILE", "where (default atlasbridge-debug.tar.gz)"},
				{"full", "", "with answers and excerpts; never the token"}},
			min: 1, max: 1, words: "bundle", do: cmdDebug, about: `
Holds state, audit log, log, versions and the configuration. Without --full there
are no answers and no excerpts in it. Look into it before you send it.

  atlasbridge debug bundle --output /tmp/bundle.tar.gz`},
		{name: "lab", usage: "lab [flags] [FILE|DIR…]", summary: "replay recordings through the detector",
			flags: []flagSpec{asJSON, {"screen", "", "print the screen each recording ends with"},
				{"explain", "", "say why, for each event"}},
			max: -1, do: cmdLab, about: `
Prints what would have been asked, and whether that was expected. Takes the
recordings of run --record, scenarios (JSON), and folders of both.

  atlasbridge lab session.cast
  atlasbridge lab --screen session.cast`},
		{name: "hook", usage: "hook", summary: "called by a tool's own hook system, not by you",
			max: -1, do: cmdHook, about: `
Reads the tool's JSON on standard input and prints the tool's own reply. Whatever
goes wrong means "ask": the tool shows its dialog.`},
		{name: "adapters", usage: "adapters [--json]", summary: "known tools: found or not, version, supported range",
			flags: []flagSpec{asJSON}, do: cmdAdapters, about: `
  atlasbridge adapters`},
		{name: "config", usage: "config [--json]", summary: "settings in force and where each came from",
			flags: []flagSpec{asJSON}, do: cmdConfig, about: `
Flags win over the environment, that over config.toml, that over the default.
The file is TOML; sections are telegram, stream and safe_defaults:

  timeout_seconds = 900
  [telegram]
  allowed_users = [1001, 1002]`},
		{name: "version", usage: "version [--json]", summary: "this program's version", flags: []flagSpec{asJSON},
			do: cmdVersion},
		{name: "help", usage: "help [command]", summary: "explain a command", max: 1, do: cmdHelp},
		{name: "completion", usage: "completion bash|zsh|fish", summary: "shell completion", min: 1, max: 1,
			words: "bash zsh fish", do: cmdCompletion, about: `
  echo 'source <(atlasbridge completion bash)' >> ~/.bashrc
  echo 'source <(atlasbridge completion zsh)' >> ~/.zshrc
  atlasbridge completion fish > ~/.config/fish/completions/atlasbridge.fish`},
	}
}

// spec is the row of the command's name, nil when there is none.
func (c *command) spec() *commandSpec {
	for _, s := range commands() {
		if s.name == c.name {
			return &s
		}
	}
	return nil
}

// writeHelp is the short help.
func writeHelp(w io.Writer) {
	fmt.Fprint(w, "atlasbridge runs an AI command line and carries its questions to your phone.\n\n")
	for _, s := range commands() {
		fmt.Fprintf(w, "  %-11s %s\n", s.name, s.summary)
	}
	fmt.Fprint(w, "\nFirst:  atlasbridge run bash -c 'read -p \"Continue? (y/n) \" a; echo got $a'\n"+
		"Then:   atlasbridge setup, atlasbridge run claude.  More: atlasbridge help COMMAND\n")
}

// writeHelp is what `help COMMAND` and `COMMAND -h` say.
func (s *commandSpec) writeHelp(w io.Writer) {
	fmt.Fprintf(w, "atlasbridge %s\n  %s\n", s.usage, s.summary)
	if len(s.flags) > 0 {
		fmt.Fprintln(w)
	}
	for _, f := range s.flags {
		fmt.Fprintf(w, "  %-24s %s\n", strings.TrimSpace("--"+f.name+" "+f.value), f.summary)
	}
	if s.about != "" {
		fmt.Fprintln(w, "\n"+strings.TrimPrefix(s.about, "\n"))
	}
}

// options are a command's flags and arguments as given. Asking for a flag its row does not list panics.
type options struct {
	set  *flag.FlagSet
	args []string
}

func (o *options) text(name string) string { return o.set.Lookup(name).Value.String() }
func (o *options) on(name string) bool     { return o.text(name) == "true" }

// given tells whether the flag stood on the command line.
func (o *options) given(name string) (yes bool) {
	o.set.Visit(func(f *flag.Flag) { yes = yes || f.Name == name })
	return yes
}

// options reads the arguments as the command's row says. When that fails, or help was asked for, it has said
// so and returns nil and the exit code.
func (c *command) options() (*options, int) {
	s := c.spec()
	o := &options{set: flag.NewFlagSet(c.name, flag.ContinueOnError)}
	o.set.SetOutput(io.Discard)
	var names []string
	for _, f := range s.flags {
		names = append(names, f.name)
		switch f.value {
		case "":
			o.set.Bool(f.name, false, "")
		case "DUR":
			o.set.Duration(f.name, 0, "")
		default:
			o.set.String(f.name, "", "")
		}
	}
	for rest := c.args; ; {
		err := o.set.Parse(rest)
		if errors.Is(err, flag.ErrHelp) {
			s.writeHelp(c.stdout)
			return nil, 0
		}
		if err != nil {
			text := err.Error()
			if name, unknown := strings.CutPrefix(text, "flag provided but not defined: -"); unknown {
				text = "unknown flag --" + strings.TrimLeft(name, "-")
				if n := nearest(name, names); n != "" {
					text += "; did you mean --" + n + "?"
				}
			}
			return nil, c.usage("%s", text)
		}
		ended := len(rest) > o.set.NArg() && rest[len(rest)-o.set.NArg()-1] == "--"
		if rest = o.set.Args(); len(rest) == 0 || s.foreign || ended {
			o.args = append(o.args, rest...)
			break
		}
		o.args, rest = append(o.args, rest[0]), rest[1:]
	}
	if len(o.args) < s.min || s.max >= 0 && len(o.args) > s.max {
		return nil, c.usage("%s takes %s", s.name, strings.TrimPrefix(s.usage, s.name+" "))
	}
	if s.words != "" && !strings.Contains(" "+s.words+" ", " "+o.args[0]+" ") {
		return nil, c.usage("%s %s: only %s", s.name, clip(visible(o.args[0]), 40), strings.ReplaceAll(s.words, " ", ", "))
	}
	return o, 0
}

// usage prints one line about a wrong command line, with the nearest command or the right usage, and returns 2.
func (c *command) usage(format string, args ...any) int {
	fmt.Fprintf(c.stderr, "atlasbridge: %s", visible(fmt.Sprintf(format, args...)))
	if s := c.spec(); s != nil {
		fmt.Fprintf(c.stderr, " (usage: atlasbridge %s)\n", s.usage)
		return exitUsage
	}
	var names []string
	for _, s := range commands() {
		names = append(names, s.name)
	}
	if n := nearest(c.name, names); n != "" {
		fmt.Fprintf(c.stderr, "; did you mean `atlasbridge %s`?\n", n)
	} else {
		fmt.Fprintf(c.stderr, "; to run it as a tool: atlasbridge run %s\n", clip(visible(c.name), 40))
	}
	return exitUsage
}

// fail prints an error and its remedy, and returns 1.
func (c *command) fail(err error) int {
	fmt.Fprintf(c.stderr, "atlasbridge: %s\n", redact(visible(err.Error())))
	if h := hintOf(err); h != "" {
		fmt.Fprintf(c.stderr, "atlasbridge: hint: %s\n", visible(h))
	}
	return exitFailed
}

// printJSON prints v indented, and returns 0.
func (c *command) printJSON(v any) int {
	e := json.NewEncoder(c.stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return c.fail(fmt.Errorf("writing the output: %w", err))
	}
	return 0
}

// hint is an error together with what to do about it.
type hint struct {
	error
	remedy string
}

func (h hint) Unwrap() error { return h.error }

// hinted adds a remedy to an error, for the line after it.
func hinted(err error, remedy string) error { return hint{err, remedy} }

func hintOf(err error) string {
	var h hint
	errors.As(err, &h)
	return h.remedy
}

// nearest is the word with the smallest edit distance to s when it is near enough to be meant, else "".
func nearest(s string, words []string) string {
	best, least := "", max(1, len(s)/3)+1
	for _, w := range words {
		if d := distance(s, w); d < least || strings.HasPrefix(w, s) && len(s) > 1 && best == "" {
			best, least = w, min(d, least)
		}
	}
	return best
}

// distance counts the insertions, deletions, replacements and swaps of neighbours that turn a into b
// (optimal string alignment).
func distance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}

// onTerminal tells whether f is a terminal.
func onTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// colour wraps text in the SGR code ("31" red, "32" green, "33" yellow, "1" bold, "2" dim) on a terminal,
// unless NO_COLOR is set (https://no-color.org) or the terminal is dumb.
func (c *command) colour(code, text string) string {
	if text == "" || c.getenv("NO_COLOR") != "" || c.getenv("TERM") == "dumb" || !onTerminal(c.stdout) {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// table prints rows in columns, the first row as headings; the last column is cut so that a line has at most
// 80 characters. Cells are plain text, shown with their control characters visible.
func (c *command) table(rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(visible(cell)))
		}
	}
	for n, row := range rows {
		line := ""
		for i, cell := range row {
			cell = visible(cell)
			if i < len(row)-1 {
				cell += strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+2)
			}
			line += cell
		}
		if r := []rune(line); len(r) > 80 {
			line = string(r[:79]) + "…"
		}
		if line = strings.TrimRight(line, " "); n == 0 {
			line = c.colour("1", line)
		}
		fmt.Fprintln(c.stdout, line)
	}
}

func cmdHelp(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	if len(o.args) == 0 {
		writeHelp(c.stdout)
		return 0
	}
	about := *c
	about.name = o.args[0]
	s := about.spec()
	if s == nil {
		return about.usage("unknown command %q", about.name)
	}
	s.writeHelp(c.stdout)
	return 0
}

// config reads the settings in force; flags as for loadConfig.
func (c *command) config(flags map[string]string) (*Config, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return nil, err
	}
	return loadConfig(dir, c.getenv, flags)
}

func cmdConfig(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	if o.on("json") {
		return c.printJSON(cfg.describe())
	}
	rows := [][]string{{"SETTING", "VALUE", "FROM"}}
	for _, s := range cfg.describe() {
		value, _ := json.Marshal(s.Value) // of a string, number, bool or list of integers: cannot fail
		rows = append(rows, []string{s.Key, string(value), s.Origin})
	}
	c.table(rows)
	return 0
}

func cmdVersion(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	v := version()
	if o.on("json") {
		return c.printJSON(v)
	}
	fmt.Fprintf(c.stdout, "atlasbridge %s %s %s\n", v.Version, v.Go, v.Platform)
	return 0
}

// buildVersion is what the Go tool wrote into the binary.
type buildVersion struct {
	Version  string `json:"version"` // of the module, from the version control tag; "(devel)" without one
	Revision string `json:"revision"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func version() buildVersion {
	v := buildVersion{Version: "(devel)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = cmp.Or(info.Main.Version, v.Version)
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	return v
}

func cmdCompletion(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	fmt.Fprint(c.stdout, completion(o.args[0]))
	return 0
}

// completion is the script for a shell. After `run <tool>` the shell's own completion goes on.
func completion(shell string) string {
	var names []string
	for _, s := range commands() {
		names = append(names, s.name)
	}
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
	var described, cases, fish strings.Builder
	for _, s := range commands() {
		words := strings.Fields(s.words)
		if s.name == "help" {
			words = names
		}
		fmt.Fprintf(&described, " %s", quote(s.name+":"+s.summary))
		fmt.Fprintf(&fish, "complete -c atlasbridge -n __fish_use_subcommand -f -a %s -d %s\n", s.name, quote(s.summary))
		in := quote("__fish_seen_subcommand_from " + s.name)
		if len(words) > 0 {
			fmt.Fprintf(&fish, "complete -c atlasbridge -n %s -f -a %s\n", in, quote(strings.Join(words, " ")))
		}
		for _, f := range s.flags {
			words = append(words, "--"+f.name)
			needs := map[bool]string{true: "", false: " -r"}[f.value == ""]
			fmt.Fprintf(&fish, "complete -c atlasbridge -n %s -l %s%s -d %s\n", in, f.name, needs, quote(f.summary))
		}
		if len(words) > 0 {
			fmt.Fprintf(&cases, "  %s) words=%s ;;\n", s.name, quote(strings.Join(words, " ")))
		}
	}
	switch shell {
	case "fish":
		return fish.String()
	case "zsh":
		return fmt.Sprintf(`#compdef atlasbridge
_atlasbridge() {
  local words_of=$words[2] words=""
  if (( CURRENT == 2 )); then
    local -a names=(%s)
    _describe command names
    return
  fi
  case $words_of in
%s  esac
  [[ $words_of == run && $PREFIX != -* ]] && { _normal -p atlasbridge || _command_names -e; return }
  [[ -n $words ]] && compadd -- ${=words}
  [[ $PREFIX != -* ]] && _files
}
compdef _atlasbridge atlasbridge
`, strings.TrimSpace(described.String()), cases.String())
	}
	return fmt.Sprintf(`_atlasbridge() {
  local cur=${COMP_WORDS[COMP_CWORD]} words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W %s -- "$cur"))
    return
  fi
  case ${COMP_WORDS[1]} in
%s  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case ${COMP_WORDS[1]}$cur in
  run-*) ;;
  run*) COMPREPLY+=($(compgen -c -- "$cur")) ;;
  esac
}
complete -o default -F _atlasbridge atlasbridge
`, quote(strings.Join(names, " ")), cases.String())
}

func cmdDoctor(c *command) int   { return 0 }
func cmdAdapters(c *command) int { return 0 }
func cmdDebug(c *command) int    { return 0 }

var _ context.Context
var _ = time.Second
