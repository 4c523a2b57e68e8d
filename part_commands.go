package main

// The commands: one table, from which dispatch, flags, help, suggestions, shell completion and the README's
// table derive; and the commands that look at the installation itself.
//
// Rules: what was asked for goes to stdout, everything said about it to stderr; tables fit 80 columns;
// colour only on a terminal and without NO_COLOR; an error is one line and says what to do in the next.

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
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
				{"token-file", "FILE", "read the bot token from a file (- is standard input)"},
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
		{name: "debug", usage: "debug bundle [--output FILE] [--full]",
			summary: "pack what a bug report needs, without secrets", flags: []flagSpec{{"output", "FILE", "where (default atlasbridge-debug.tar.gz)"},
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

// duration is a flag whose row says DUR; 0 when it was not given.
func (o *options) duration(name string) time.Duration {
	return o.set.Lookup(name).Value.(flag.Getter).Get().(time.Duration)
}

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

// completion is the script for a shell. After `run <tool>` the shell's own completion of commands and files goes
// on. Zsh runs the script of bash.
func completion(shell string) string {
	names, fish := "", ""
	for _, s := range commands() {
		names += s.name + " "
	}
	cases := "  help) words='" + names + "' ;;\n"
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
	for _, s := range commands() {
		words, in := s.words, quote("__fish_seen_subcommand_from "+s.name)
		fish += fmt.Sprintf("complete -c atlasbridge -n __fish_use_subcommand -f -a %s -d %s\n", s.name, quote(s.summary))
		if s.words != "" {
			fish += fmt.Sprintf("complete -c atlasbridge -n %s -f -a %s\n", in, quote(s.words))
		}
		for _, f := range s.flags {
			words += " --" + f.name
			fish += fmt.Sprintf("complete -c atlasbridge -n %s -l %s -d %s\n", in, f.name, quote(f.summary))
		}
		if words != "" {
			cases += fmt.Sprintf("  %s) words=%s ;;\n", s.name, quote(words))
		}
	}
	if shell == "fish" {
		return fish
	}
	script := fmt.Sprintf(`_atlasbridge() {
  local cur="${COMP_WORDS[COMP_CWORD]}" words=
  case "$COMP_CWORD ${COMP_WORDS[1]}" in
  "1 "*) words=%s ;;
  *run) [[ $cur == -* ]] || { COMPREPLY=($(compgen -c -- "$cur")); return; } ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] || case "${COMP_WORDS[1]}" in
%s  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _atlasbridge atlasbridge
`, quote(names), cases)
	if shell == "zsh" {
		return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + script
	}
	return script
}

// check is one line of doctor. One that is ok but has a remedy is a warning.
type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy"`
}

// doctor tells each check as soon as it is known, with --json all at the end.
type doctor struct {
	*command
	asJSON bool
	checks []check
}

func cmdDoctor(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	d := &doctor{command: c, asJSON: o.on("json")}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	cfg, err := loadConfig(dir, c.getenv, nil)
	d.tell("config", err, "settings and defaults are valid", "")
	if cfg == nil {
		cfg = &Config{Dir: dir}
	}
	d.files(dir)
	var skew time.Duration
	if cfg.Channel == "telegram" {
		skew = d.telegram(cfg)
	}
	d.records(dir, cfg.Channel == "telegram", skew)
	if size, err := terminalSize(c.stdout); err != nil || !onTerminal(c.stdout) {
		d.tell("terminal", nil, "none here: a tool gets 100x30", "")
	} else {
		d.tell("terminal", nil, fmt.Sprintf("%s, %dx%d", c.getenv("TERM"), size.Cols, size.Rows), "")
	}
	d.wait("tools")
	for _, t := range knownTools(c.ctx, cfg) {
		switch {
		case !t.Found:
			d.tell(t.Name, nil, "not installed", "")
		case t.Warning != "":
			d.warn(t.Name, t.Version+" "+t.Path, t.Warning)
		default:
			d.tell(t.Name, nil, t.Version+" "+t.Path, "")
		}
	}
	ok := !slices.ContainsFunc(d.checks, func(k check) bool { return !k.OK })
	if d.asJSON {
		c.printJSON(map[string]any{"checks": d.checks, "ok": ok})
	}
	if !ok {
		return exitFailed
	}
	return 0
}

// wait shows on a terminal what takes its time; tell wipes it away.
func (d *doctor) wait(what string) {
	if !d.asJSON && onTerminal(d.stdout) {
		fmt.Fprintf(d.stdout, "… %s", what)
	}
}

// tell records a check: failed with err and then the remedy, or passed with what was found.
func (d *doctor) tell(name string, err error, found, remedy string) {
	if err != nil {
		d.print(check{name, false, redact(visible(err.Error())), cmp.Or(hintOf(err), remedy)}, d.colour("31", "FAIL"))
	} else {
		d.print(check{name, true, visible(found), ""}, d.colour("32", "ok  "))
	}
}

// warn records what may be right but wants a look.
func (d *doctor) warn(name, found, remedy string) {
	d.print(check{name, true, visible(found), remedy}, d.colour("33", "warn"))
}

func (d *doctor) print(k check, mark string) {
	d.checks = append(d.checks, k)
	if d.asJSON {
		return
	}
	if onTerminal(d.stdout) {
		fmt.Fprint(d.stdout, "\r\x1b[K")
	}
	fmt.Fprintf(d.stdout, "%s  %-11s  %s\n", mark, k.Name, k.Detail)
	if k.Remedy != "" {
		fmt.Fprintf(d.stdout, "%17s  %s\n", "→", visible(k.Remedy))
	}
}

// files checks who can reach the state folder and what it lies on.
func (d *doctor) files(dir string) {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		d.tell("permissions", nil, dir+" is made by the first run", "")
		return
	}
	err := ownedPrivate(dir)
	remedy := "chmod 700 " + dir
	for _, name := range []string{"config.toml", "state.jsonl", "audit.log", "atlasbridge.log"} {
		path := filepath.Join(dir, name)
		if bad := ownedPrivate(path); err == nil && bad != nil && !errors.Is(bad, fs.ErrNotExist) {
			err, remedy = bad, "chmod 600 "+path
		}
	}
	d.tell("permissions", err, dir+" and its files are yours alone", remedy)
	if fs := networkFS(dir); fs != "" {
		d.warn("file system", fs+": locks may not hold between machines", "set ATLASBRIDGE_HOME to a local disk")
	}
}

// telegram checks the token and the chat, and returns how far Telegram's clock is ahead of ours.
func (d *doctor) telegram(cfg *Config) time.Duration {
	ctx, stop := context.WithTimeout(d.ctx, 15*time.Second)
	defer stop()
	bot := newBot(cfg.Token, cfg.APIBase)
	defer bot.Close()
	var me struct{ Username string }
	d.wait("token")
	err := bot.call(ctx, "getMe", nil, &me)
	d.tell("token", err, "the bot is @"+me.Username, "check the network, or run `atlasbridge setup`")
	if err != nil {
		return 0
	}
	var chat struct{ Type, Title, Username string }
	d.wait("chat")
	err = bot.call(ctx, "getChat", map[string]any{"chat_id": cfg.ChatID}, &chat)
	if err == nil && chat.Type == "private" && !slices.Contains(cfg.Users, cfg.ChatID) {
		err = errors.New("whose private chat this is may not answer: not in telegram.allowed_users")
	}
	d.tell("chat", err, chat.Type+" "+cmp.Or(chat.Title, chat.Username), "run `atlasbridge setup` again")
	return bot.clockSkew()
}

// records checks the state, the clock by what is in it, who polls, and the audit chain.
func (d *doctor) records(dir string, polls bool, skew time.Duration) {
	if _, err := os.Lstat(filepath.Join(dir, "state.jsonl")); errors.Is(err, fs.ErrNotExist) {
		d.tell("state", nil, "nothing recorded yet", "")
		return
	}
	st, err := openStore(dir)
	v := &View{}
	if err == nil {
		defer st.Close()
		if v, err = st.View(); err != nil {
			v = &View{}
		}
	}
	d.tell("state", err, fmt.Sprintf("%d sessions, %d prompts", len(v.Sessions), len(v.Prompts)),
		"keep a copy (`atlasbridge debug bundle`), then move state.jsonl away")
	const slack = 30 * time.Second // further off, times of questions and answers cannot be compared
	now := time.Now()
	for _, p := range v.Prompts {
		skew = max(skew, p.At.Sub(now))
	}
	var off error
	if skew.Abs() > slack {
		off = fmt.Errorf("this clock is %s off", skew.Abs().Round(time.Second))
	}
	d.tell("clock", off, now.Format(time.RFC3339), "set the clock (timedatectl set-ntp true)")
	if polls && err == nil {
		d.tell("poller", nil, pollerName(st, v), "")
	}
	head, err := stateHead(dir)
	verdict := Verdict{}
	if err == nil {
		verdict, err = verifyFile(filepath.Join(dir, "audit.log"), []Anchor{head})
	}
	if err == nil && !verdict.OK {
		err = fmt.Errorf("audit.log:%d: %s", verdict.Line, verdict.Reason)
	}
	d.tell("audit", err, fmt.Sprintf("%d entries hold", verdict.Entries),
		"keep a copy of audit.log; `atlasbridge audit verify` says more")
}

// pollerName says who listens to Telegram for all sessions.
func pollerName(st *Store, v *View) string {
	release, held, err := st.TryPoll()
	switch {
	case err != nil:
		return "unknown: " + err.Error()
	case held: // the lock was free
		release()
		return "nobody, which is right while no session runs"
	case v.Meta["telegram"] != nil:
		return "process " + v.Meta["telegram"].Values["poller"]
	}
	return "another process"
}

// tool is an adapter and the program it stands for, as `adapters --json` shows them.
type tool struct {
	Name       string   `json:"name"`
	Names      []string `json:"names"`
	Found      bool     `json:"found"`
	Path       string   `json:"path"`
	Version    string   `json:"version"`
	MinVersion string   `json:"min_version"`
	MaxVersion string   `json:"max_version"`
	Warning    string   `json:"warning"`
}

// knownTools asks every installed tool for its version, all at once.
func knownTools(ctx context.Context, cfg *Config) []tool {
	if cfg == nil {
		cfg = &Config{}
	}
	env := childEnv(os.Environ(), cfg, "")
	list := []tool{}
	for _, a := range adapters {
		if len(a.Names) > 0 {
			list = append(list, tool{Name: a.Name, Names: a.Names, MinVersion: a.MinVer, MaxVersion: a.MaxVer})
		}
	}
	var all sync.WaitGroup
	for i := range list {
		all.Go(func() { list[i].probe(ctx, env) })
	}
	all.Wait()
	return list
}

// probe finds the tool and its version. A tool that does not answer within 10 s (cold starts of Node took
// up to 4 s, measured) counts as found, its version unknown.
func (t *tool) probe(ctx context.Context, env []string) {
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	for _, name := range t.Names {
		path, output, err := probeVersion(ctx, name, env)
		if path == "" {
			continue
		}
		t.Found, t.Path = true, path
		if t.Version = versionIn(output); t.Version == "" || err != nil {
			t.Warning = "its version could not be read"
		} else if t.MinVersion != "" && versionLess(t.Version, t.MinVersion) {
			t.Warning = "older than what was tried; update it if questions are missed"
		} else if t.MaxVersion != "" && versionLess(t.MaxVersion, t.Version) {
			t.Warning = "newer than what was tried; its own dialogs may have changed"
		}
		return
	}
}

// versionIn is the first dotted number in what a tool says of itself: "codex-cli 0.146.0".
func versionIn(text string) string { return regexp.MustCompile(`[0-9]+(\.[0-9]+)+`).FindString(text) }

// versionLess compares dotted numbers as far as the shorter one goes, so that a bound "2" or "2.1" means all of it.
func versionLess(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs)) {
		x, _ := strconv.Atoi(as[i])
		y, _ := strconv.Atoi(bs[i])
		if x != y {
			return x < y
		}
	}
	return false
}

func cmdAdapters(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	list := knownTools(c.ctx, cfg)
	if o.on("json") {
		return c.printJSON(list)
	}
	rows := [][]string{{"ADAPTER", "COMMANDS", "VERSION", "SUPPORTED", "FOUND"}}
	for _, t := range list {
		found := "not found"
		if t.Found {
			found = t.Path
		}
		supported := cmp.Or(t.MinVersion, "any") + " to " + cmp.Or(t.MaxVersion, "any")
		rows = append(rows, []string{t.Name, strings.Join(t.Names, " "), cmp.Or(t.Version, "-"), supported, found})
	}
	c.table(append(rows, []string{"generic", "any other", "-", "any", "questions by their shape only"}))
	for _, t := range list {
		if t.Warning != "" {
			fmt.Fprintf(c.stderr, "atlasbridge: warning: %s %s: %s\n", t.Name, t.Version, t.Warning)
		}
	}
	return 0
}

func cmdDebug(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	path := cmp.Or(o.text("output"), time.Now().Format("atlasbridge-debug-20060102-150405.tar.gz"))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return c.fail(hinted(fmt.Errorf("writing the bundle: %w", err), "choose another file with --output"))
	}
	err = c.writeBundle(f, dir, o.on("full"))
	if err = errors.Join(err, f.Close()); err != nil {
		os.Remove(path)
		return c.fail(fmt.Errorf("writing the bundle: %w", err))
	}
	what := "without answers and excerpts"
	if o.on("full") {
		what = "with answers and excerpts"
	}
	fmt.Fprintf(c.stdout, "%s\n%s; without token and known secrets. Look into it before you send it.\n", path, what)
	return 0
}

// writeBundle writes the tar.gz and lists what goes in.
func (c *command) writeBundle(w io.Writer, dir string, full bool) error {
	cfg, err := loadConfig(dir, c.getenv, nil)
	var settings any = map[string]string{"error": fmt.Sprint(err)}
	if err == nil {
		settings = cfg.describe()
	} else {
		cfg = &Config{Token: c.getenv("TELEGRAM_BOT_TOKEN")}
	}
	versions := struct {
		Atlasbridge buildVersion `json:"atlasbridge"`
		Tools       []tool       `json:"tools"`
	}{version(), knownTools(c.ctx, cfg)}
	zip := gzip.NewWriter(w)
	tape := tar.NewWriter(zip)
	add := func(name string, content []byte) error {
		text := redact(string(content))
		if cfg.Token != "" {
			text = strings.ReplaceAll(text, cfg.Token, "[token]")
		}
		fmt.Fprintf(c.stdout, "%9d  %s\n", len(text), name)
		head := &tar.Header{Name: "atlasbridge-debug/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()}
		if err := tape.WriteHeader(head); err != nil {
			return err
		}
		_, err := io.WriteString(tape, text)
		return err
	}
	pretty := func(v any) []byte {
		b, _ := json.MarshalIndent(v, "", "  ") // of strings, numbers and bools only: cannot fail
		return b
	}
	err = errors.Join(add("versions.json", pretty(versions)), add("config.json", pretty(settings)))
	for _, name := range []string{"state.jsonl", "audit.log", "atlasbridge.log", "atlasbridge.log.1"} {
		content, readErr := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(readErr, fs.ErrNotExist) {
			continue
		}
		if !full || strings.HasSuffix(name, ".jsonl") {
			content = withhold(content, full)
		}
		err = errors.Join(err, readErr, add(name, content))
	}
	return errors.Join(err, tape.Close(), zip.Close())
}

// withhold replaces in JSON Lines every text that is not known to be harmless by its length, so that a field
// added later is not shown by mistake; with full, nonces only.
func withhold(lines []byte, full bool) []byte {
	harmless := strings.Fields("rec id at type confidence safe_default status source fingerprint created_at expires_at " +
		"decided_at decided_by prompt_id session_id injected_at kind by tool activity started_at ended_at hash " +
		"prev_hash ts event crc time level msg err error signals")
	var out bytes.Buffer
	for line := range bytes.Lines(lines) {
		var record map[string]any
		d := json.NewDecoder(bytes.NewReader(line))
		d.UseNumber()
		if d.Decode(&record) != nil {
			fmt.Fprintf(&out, "(unreadable line, %d bytes)\n", len(line))
			continue
		}
		for key, v := range record {
			switch v.(type) {
			case string, []any, map[string]any:
				if key == "nonce" || !full && !slices.Contains(harmless, key) {
					text, _ := json.Marshal(v)
					record[key] = fmt.Sprintf("(%d bytes)", len(text))
				}
			}
		}
		text, _ := json.Marshal(record)
		out.Write(append(text, '\n'))
	}
	return out.Bytes()
}

// probeVersion finds the command and asks it for its version. path is "" when there is no such command.
func probeVersion(ctx context.Context, name string, env []string) (path, output string, err error) {
	if path, err = exec.LookPath(name); err != nil {
		return "", "", err
	}
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env, cmd.WaitDelay = env, time.Second
	out, err := cmd.Output()
	return path, string(out), err
}
