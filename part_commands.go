package main

// The commands: one table, from which dispatch, flags, help, suggestions, completion and the README's table
// derive; and those that look at the installation itself. What was asked for goes to stdout, everything said
// about it to stderr; tables fit 80 columns; colour only on a terminal and without NO_COLOR.

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
	exitInternal = 125 // before the child ran; 125 to 127 as env(1) has them
)

// errLocked is returned by lockFile when another process holds the lock and waiting was not asked for.
var errLocked = errors.New("locked by another process")

// errNoTool is returned by findTool and startPTY for a command that PATH does not have.
var errNoTool = errors.New("command not found")

// PTY is the child's terminal. Read gives io.EOF when the last process that held it is gone. Methods may be
// called from different goroutines; Close is idempotent and ends a blocked Read.
type PTY interface {
	io.ReadWriteCloser
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
	opts                  *options // as parsed by run
}

// commandSpec is one row of the command table.
type commandSpec struct {
	name, usage, summary string
	min, max             int // how many arguments besides flags; max −1: any number
	do                   func(*command) int
	words                string // what the first argument can be
	flags                []flagSpec
	about                string // explanation and examples
}

// flagSpec is one flag; value names its argument, "" for a switch.
type flagSpec struct{ name, value, summary string }

// commands is the command table.
func commands() []commandSpec {
	asJSON := flagSpec{"json", "", "print JSON, with the field names of the files"}
	return []commandSpec{
		{"run", "run [flags] <tool> [args…]", "run a tool; its questions reach your phone", 1, -1, cmdRun, "", []flagSpec{
			{"channel", "telegram|local", "who is asked (default: telegram once it is set up)"},
			{"stream", "", "send all visible output to the phone too"},
			{"record", "FILE", "keep the session as an asciicast recording"},
			{"timeout", "DUR", "how long a question waits, as 90s or 10m"},
			{"name", "LABEL", "the session's name in messages"},
			{"adapter", "NAME", "treat the tool as this one, whatever its name"},
			{"quiet", "", "not a byte of our own on the terminal"}}, `
Everything after <tool> is the tool's own. Keyboard, colours, resizing and exit
status are as without atlasbridge. Exit: the tool's; 125 atlasbridge failed, 126
not executable, 127 not found.

  atlasbridge run --name api --timeout 30m claude --model opus
  atlasbridge run --channel local -- bash -c 'read -p "Continue? (y/n) " a'`},
		{"setup", "setup [flags]", "connect your Telegram bot; writes config.toml", 0, 0, cmdSetup, "", []flagSpec{
			{"token-file", "FILE", "read the bot token from a file, or /dev/stdin"},
			{"chat-id", "ID", "the chat; found by itself otherwise"},
			{"user-id", "ID", "who may answer; found by itself otherwise"},
			{"api-base", "URL", "another Bot API server"},
			{"no-test", "", "send no test message"},
			{"yes", "", "remove a webhook without asking"}}, `
Asks for the bot token (from @BotFather), waits until you send the bot any
message, confirms by a short code that it is you, and sends a test message.`},
		{"doctor", "doctor [--json]", "check everything; says what to do about each failure", 0, 0, cmdDoctor, "",
			[]flagSpec{asJSON}, "\n  atlasbridge doctor --json | jq '.checks[] | select(.ok | not)'"},
		{"status", "status [--all] [--json]", "sessions: what runs, what waits, who polls Telegram", 0, 0, cmdStatus, "",
			[]flagSpec{{"all", "", "ended sessions too"}, asJSON}, ""},
		{"approvals", "approvals [--json]", "open questions of all sessions, with the time left", 0, 0, cmdApprovals, "",
			[]flagSpec{asJSON}, ""},
		{"answer", "answer <prompt-id> <value>", "answer a question from any terminal", 2, 2, cmdAnswer, "", nil, `
The id's first 8 digits will do. The value is what a button would send: y, n, a
choice's number or letter, enter, esc, default, or the text itself.

  atlasbridge answer 3f2a91c4 y`},
		{"logs", "logs [--tail] [--json] [--session ID]", "what happened, readable; --tail follows", 0, 0, cmdLogs, "",
			[]flagSpec{{"tail", "", "follow"}, asJSON, {"session", "ID", "one session only"}},
			"\n  atlasbridge logs --json | jq -c 'select(.event == \"PROMPT_RESOLVED\")'"},
		{"audit", "audit verify [--json]", "recompute the audit chain, name the first bad line", 1, 1, cmdAudit, "verify",
			[]flagSpec{asJSON, {"head", "SEQ:HASH", "the head a session-ended message showed"}},
			"\nCompares with the head in the state file too. Exit: 1 when it does not hold."},
		{"debug", "debug bundle [--output FILE] [--full]", "pack what a bug report needs, no secrets", 1, 1, cmdDebug,
			"bundle", []flagSpec{{"output", "FILE", "where to"}, {"full", "", "with answers and excerpts; never the token"}},
			"\nState, audit log, log, versions and configuration. Look into it before sending."},
		{"lab", "lab [flags] [FILE|DIR…]", "replay recordings through the detector", 0, -1, cmdLab, "", []flagSpec{asJSON,
			{"screen", "", "print the screen each recording ends with"}, {"explain", "", "say why, for each event"}},
			"\nTakes the recordings of run --record, scenarios (JSON), and folders of both."},
		{"hook", "hook", "called by a tool's own hook system, not by you", 0, -1, cmdHook, "", nil, ""},
		{"adapters", "adapters [--json]", "known tools: found or not, version, supported range", 0, 0, cmdAdapters, "",
			[]flagSpec{asJSON}, ""},
		{"config", "config [--json]", "settings in force and where each came from", 0, 0, cmdConfig, "", []flagSpec{asJSON}, `
Flags win over the environment, that over config.toml, that over the default.
The file is TOML with the tables telegram, stream and safe_defaults:

  timeout_seconds = 900
  [telegram]
  allowed_users = [1001, 1002]`},
		{"version", "version [--json]", "this program's version", 0, 0, cmdVersion, "", []flagSpec{asJSON}, ""},
		{"help", "help [command]", "explain a command", 0, 1, cmdHelp, "", nil, ""},
		{"completion", "completion bash|zsh|fish", "shell completion", 1, 1, cmdCompletion, "bash zsh fish", nil, `
  echo 'source <(atlasbridge completion bash)' >> ~/.bashrc
  echo 'source <(atlasbridge completion zsh)' >> ~/.zshrc
  atlasbridge completion fish > ~/.config/fish/completions/atlasbridge.fish`},
	}
}

func commandNames() (names []string) {
	for _, s := range commands() {
		names = append(names, s.name)
	}
	return names
}

// spec is the row of the command's name, nil when there is none.
func (c *command) spec() *commandSpec {
	if i := slices.Index(commandNames(), c.name); i >= 0 {
		return &commands()[i]
	}
	return nil
}

// writeHelp is the short help.
func writeHelp(w io.Writer) {
	fmt.Fprint(w, "atlasbridge runs an AI command line and carries its questions to your phone.\n\n")
	for _, s := range commands() {
		fmt.Fprintf(w, "  %-11s %s\n", s.name, s.summary)
	}
	fmt.Fprint(w, "\nTry:   atlasbridge run bash -c 'read -p \"Continue? (y/n) \" a; echo got $a'\n"+
		"Then:  atlasbridge setup; atlasbridge run claude. More: atlasbridge help COMMAND\n")
}

// writeHelp is what `help COMMAND` and `COMMAND -h` say.
func (s *commandSpec) writeHelp(w io.Writer) {
	fmt.Fprintf(w, "atlasbridge %s\n  %s\n\n", s.usage, s.summary)
	for _, f := range s.flags {
		fmt.Fprintf(w, "  %-24s %s\n", strings.TrimSpace("--"+f.name+" "+f.value), f.summary)
	}
	if s.about != "" {
		fmt.Fprintln(w, s.about)
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

// options reads the arguments as the command's row says; flags may follow arguments, but not those of run and
// answer. When that fails, or help was asked for, it has said so and returns nil and the exit code.
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
	for rest, more := c.args, true; more; {
		err := o.set.Parse(rest)
		if errors.Is(err, flag.ErrHelp) {
			s.writeHelp(c.stdout)
			return nil, 0
		}
		if err != nil {
			name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
			if unknown {
				err = errors.New("unknown flag --" + name + meant("--", nearest(name, names)))
			}
			return nil, c.usage("%v", err)
		}
		given := rest[:len(rest)-o.set.NArg()]
		rest = o.set.Args()
		more = len(rest) > 0 && c.name != "run" && c.name != "answer" && !(len(given) > 0 && given[len(given)-1] == "--")
		if !more {
			o.args = append(o.args, rest...)
		} else {
			o.args, rest = append(o.args, rest[0]), rest[1:]
		}
	}
	if len(o.args) < s.min {
		return nil, c.usage("%s needs more than that", s.name)
	}
	if s.max >= 0 && len(o.args) > s.max ||
		s.words != "" && !slices.Contains(strings.Fields(s.words), o.args[0]) {
		return nil, c.usage("%s does not take %q", s.name, strings.Join(o.args, " "))
	}
	return o, 0
}

// usage prints one line about a wrong command line, with the right usage or the nearest command, and returns 2.
func (c *command) usage(format string, args ...any) int {
	text := fmt.Sprintf(format, args...)
	if s := c.spec(); s != nil {
		text += "; usage: atlasbridge " + s.usage
	} else {
		text += cmp.Or(meant("atlasbridge ", nearest(c.name, commandNames())), "; to run a tool: atlasbridge run TOOL")
	}
	fmt.Fprintf(c.stderr, "atlasbridge: %s\n", visible(text))
	return exitUsage
}

func meant(before, word string) string {
	if word == "" {
		return ""
	}
	return "; did you mean `" + before + word + "`?"
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

// hinted adds a remedy to an error, for the line after it; nil stays nil, and an older remedy wins.
func hinted(err error, remedy string) error {
	if err == nil || hintOf(err) != "" {
		return err
	}
	return hint{err, remedy}
}

func hintOf(err error) string {
	var h hint
	errors.As(err, &h)
	return h.remedy
}

// nearest is the word that s begins, or with the smallest edit distance to s (Levenshtein), when it is near
// enough to be meant.
func nearest(s string, words []string) string {
	best, least := "", max(2, len(s)/3)+1
	for _, w := range words {
		row := make([]int, len(w)+1) // row[j]: from the part of s seen so far to w[:j]
		for j := range row {
			row[j] = j
		}
		for i := range len(s) {
			corner := row[0]
			row[0] = i + 1
			for j := range len(w) {
				if s[i] != w[j] {
					corner++
				}
				corner, row[j+1] = row[j+1], min(corner, row[j+1]+1, row[j]+1)
			}
		}
		d := row[len(w)]
		if len(s) > 1 && strings.HasPrefix(w, s) {
			d = min(d, 1)
		}
		if d < least {
			best, least = w, d
		}
	}
	return best
}

// onTerminal tells whether f is a terminal.
func onTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// colour wraps text in the SGR code ("31" red, "32" green, "33" yellow, "1" bold, "2" dim) on a terminal,
// unless NO_COLOR is set (https://no-color.org) or the terminal is dumb.
func (c *command) colour(code, text string) string {
	if c.getenv("NO_COLOR") != "" || c.getenv("TERM") == "dumb" || !onTerminal(c.stdout) {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// table prints rows of plain text in columns, the first row as headings, lines cut at 80 characters.
func (c *command) table(rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = visible(cell)
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	for n, row := range rows {
		line := ""
		for i, cell := range row {
			line += fmt.Sprintf("%-*s  ", widths[i], cell)
		}
		if line = strings.TrimRight(line, " "); utf8.RuneCountInString(line) > 80 {
			line = string([]rune(line)[:79]) + "…"
		}
		if n == 0 {
			line = c.colour("1", line)
		}
		fmt.Fprintln(c.stdout, line)
	}
}

func cmdHelp(c *command) int {
	c.name = strings.Join(c.opts.args, "")
	if s := c.spec(); s != nil {
		s.writeHelp(c.stdout)
	} else if c.name != "" {
		return c.usage("unknown command %q", c.name)
	} else {
		writeHelp(c.stdout)
	}
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
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	rows := [][]string{{"SETTING", "VALUE", "FROM"}}
	for _, s := range cfg.describe() {
		value, _ := json.Marshal(s.Value) // of a string, number, bool or list of integers: cannot fail
		rows = append(rows, []string{s.Key, string(value), s.Origin})
	}
	return c.show(cfg.describe(), rows)
}

// show prints JSON where --json was given, and else the table.
func (c *command) show(v any, rows [][]string) int {
	if c.opts.on("json") {
		return c.printJSON(v)
	}
	c.table(rows)
	return 0
}

func cmdVersion(c *command) int {
	v := version()
	if c.opts.on("json") {
		return c.printJSON(v)
	}
	fmt.Fprintln(c.stdout, "atlasbridge", v["version"], v["go"], v["platform"])
	return 0
}

// version is what the Go tool wrote into the binary: the version control tag, "(devel)" without one.
func version() map[string]string {
	v := map[string]string{"version": "(devel)", "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		v["version"] = cmp.Or(info.Main.Version, v["version"])
	}
	return v
}

// cmdCompletion prints the script for a shell. After `run` the shell's own completion of commands and files goes
// on. Zsh runs the script of bash.
func cmdCompletion(c *command) int {
	names := strings.Join(commandNames(), " ")
	cases := "  help) words='" + names + "' ;;\n"
	fish := "complete -c atlasbridge -n __fish_use_subcommand -f -a '" + names + "'\n"
	for _, s := range commands() {
		words := s.words
		for _, f := range s.flags {
			words += " --" + f.name
		}
		cases += fmt.Sprintf("  %s) words='%s' ;;\n", s.name, words)
		fish += fmt.Sprintf("complete -c atlasbridge -n '__fish_seen_subcommand_from %s' -a '%s'\n", s.name, words)
	}
	script := fmt.Sprintf(`_atlasbridge() {
  local cur="${COMP_WORDS[COMP_CWORD]}" words=
  case "$COMP_CWORD ${COMP_WORDS[1]}" in
  "1 "*) words='%s' ;;
  *run) [[ $cur == -* ]] || { COMPREPLY=($(compgen -c -- "$cur")); return; } ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] || case "${COMP_WORDS[1]}" in
%s  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _atlasbridge atlasbridge
`, names, cases)
	zsh := "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + script
	fmt.Fprint(c.stdout, map[string]string{"bash": script, "zsh": zsh, "fish": fish}[c.opts.args[0]])
	return 0
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
	checks []check
}

func cmdDoctor(c *command) int {
	d := &doctor{command: c}
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
	if _, err := os.Lstat(filepath.Join(dir, "state.jsonl")); err == nil {
		d.records(dir, cfg.Channel, skew)
	}
	terminal := "none here: a tool gets 100x30"
	if size, err := terminalSize(c.stdout); err == nil {
		terminal = fmt.Sprintf("%s, %dx%d", c.getenv("TERM"), size.Cols, size.Rows)
	}
	d.tell("terminal", nil, terminal, "")
	for _, t := range knownTools(c.ctx, cfg) {
		found := "not installed"
		if t.Found {
			found = t.Version + " " + t.Path
		}
		d.tell(t.Name, nil, found, t.Warning)
	}
	ok := !slices.ContainsFunc(d.checks, func(k check) bool { return !k.OK })
	if c.opts.on("json") {
		c.printJSON(map[string]any{"checks": d.checks, "ok": ok})
	}
	if !ok {
		return exitFailed
	}
	return 0
}

// tell records a check: failed with err, or passed with what was found and perhaps what should be done.
func (d *doctor) tell(name string, err error, found, advice string) {
	k, mark := check{name, true, visible(found), visible(advice)}, d.colour("32", "ok  ")
	if err != nil {
		k, mark = check{name, false, redact(visible(err.Error())), visible(hintOf(err))}, d.colour("31", "FAIL")
	} else if advice != "" {
		mark = d.colour("33", "warn")
	}
	d.checks = append(d.checks, k)
	if d.opts.on("json") {
		return
	}
	fmt.Fprintf(d.stdout, "%s  %-11s  %s\n", mark, k.Name, k.Detail)
	if k.Remedy != "" {
		fmt.Fprintf(d.stdout, "%17s  %s\n", "→", k.Remedy)
	}
}

// files checks who can reach the state folder and what it lies on.
func (d *doctor) files(dir string) {
	err := hinted(ownedPrivate(dir), "chmod 700 "+dir)
	if errors.Is(err, fs.ErrNotExist) {
		d.tell("permissions", nil, dir+" is made by the first run", "")
		return
	}
	for _, name := range []string{"config.toml", "state.jsonl", "audit.log", "atlasbridge.log"} {
		path := filepath.Join(dir, name)
		if bad := ownedPrivate(path); err == nil && !errors.Is(bad, fs.ErrNotExist) {
			err = hinted(bad, "chmod 600 "+path)
		}
	}
	d.tell("permissions", err, dir+" and its files are yours alone", "")
	if fs := networkFS(dir); fs != "" {
		d.tell("file system", nil, fs+": locks may not hold between machines", "set ATLASBRIDGE_HOME to a local disk")
	}
}

// telegram checks the token and the chat, and returns how far Telegram's clock is ahead of ours.
func (d *doctor) telegram(cfg *Config) time.Duration {
	ctx, stop := context.WithTimeout(d.ctx, 15*time.Second)
	defer stop()
	bot := newBot(cfg.Token, cfg.APIBase)
	defer bot.Close()
	var me struct{ Username string }
	err := bot.call(ctx, "getMe", map[string]any{}, &me)
	d.tell("token", hinted(err, "check the network, or run `atlasbridge setup`"), "the bot is @"+me.Username, "")
	if err != nil {
		return 0
	}
	var chat struct{ Type, Title, Username string }
	err = bot.call(ctx, "getChat", map[string]any{"chat_id": cfg.ChatID}, &chat)
	if err == nil && chat.Type == "private" && !slices.Contains(cfg.Users, cfg.ChatID) {
		err = errors.New("whose private chat this is may not answer: not in telegram.allowed_users")
	}
	d.tell("chat", hinted(err, "run `atlasbridge setup` again"), chat.Type+" "+cmp.Or(chat.Title, chat.Username), "")
	return bot.clockSkew()
}

// records checks the state, the clock against it, who polls, and the audit chain.
func (d *doctor) records(dir, channel string, skew time.Duration) {
	v := &View{}
	st, err := openStore(dir)
	if err == nil {
		defer st.Close()
		v, err = st.View()
	}
	if err != nil {
		d.tell("state", hinted(err, "keep a copy (`atlasbridge debug bundle`), then move state.jsonl away"), "", "")
		return
	}
	d.tell("state", nil, fmt.Sprintf("%d sessions, %d prompts", len(v.Sessions), len(v.Prompts)), "")
	if channel == "telegram" {
		poller := "nobody, which is right while no session runs"
		if pid := st.holder("poll.lock"); pid != 0 {
			poller = fmt.Sprint("process ", pid)
		}
		d.tell("poller", nil, poller, "")
	}
	const slack = 30 * time.Second // further off, times of questions and answers cannot be compared
	for _, p := range v.Prompts {
		if ahead := time.Until(p.At); ahead > slack {
			skew = ahead
		}
	}
	if skew.Abs() > slack {
		err = fmt.Errorf("this clock is %s off", skew.Abs().Round(time.Second))
	}
	d.tell("clock", hinted(err, "set the clock (timedatectl set-ntp true)"), time.Now().Format(time.RFC3339), "")
	verdict, err := st.verifyAudit(v)
	if err == nil && !verdict.OK {
		err = fmt.Errorf("audit.log:%d: %s", verdict.Line, verdict.Reason)
	}
	d.tell("audit", hinted(err, "keep a copy of audit.log; `atlasbridge audit verify` says more"),
		fmt.Sprintf("%d entries hold", verdict.Entries), "")
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

// knownTools asks every installed tool for its version, all at once. One that does not answer within 10 s
// (a cold start of Node takes up to 4 s, measured) counts as found, its version unknown.
func knownTools(ctx context.Context, cfg *Config) []tool {
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	list, env := []tool{}, childEnv(os.Environ(), cfg, "")
	var all sync.WaitGroup
	for _, a := range adapters {
		if len(a.Names) > 0 { // the generic one stands for no tool
			list = append(list, tool{Name: a.Name, Names: a.Names, MinVersion: a.MinVer, MaxVersion: a.MaxVer})
		}
	}
	for i := range list {
		all.Go(func() { list[i].probe(ctx, env) })
	}
	all.Wait()
	return list
}

// probe finds the tool and reads what it says of its version, in a terminal of its own as under run.
func (t *tool) probe(ctx context.Context, env []string) {
	for _, name := range t.Names {
		if path, err := findTool(name); err == nil && t.Path == "" {
			t.Path, t.Found = path, true
		}
	}
	if !t.Found {
		return
	}
	if p, err := startPTY([]string{t.Path, "--version"}, env, "", Size{Rows: 24, Cols: 80}, nil); err == nil {
		stop := context.AfterFunc(ctx, func() { p.Terminate(nil); p.Close() })
		output, _ := io.ReadAll(io.LimitReader(p, 4096))
		stop()
		p.Close()
		t.Version = regexp.MustCompile(`[0-9]+(\.[0-9]+)+`).FindString(string(output)) // as in "codex-cli 0.146.0"
	}
	if t.Version == "" {
		t.Warning = "its version could not be read"
	} else if versionLess(t.Version, t.MinVersion) {
		t.Warning = "older than what was tried; update it if questions are missed"
	} else if versionLess(t.MaxVersion, t.Version) {
		t.Warning = "newer than what was tried; its own dialogs may have changed"
	}
}

// versionLess compares dotted numbers as far as the shorter one goes: the bound "2.1" means all of 2.1, "" anything.
func versionLess(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs)) {
		x, errX := strconv.Atoi(as[i])
		y, errY := strconv.Atoi(bs[i])
		if errX != nil || errY != nil || x != y {
			return errX == nil && errY == nil && x < y
		}
	}
	return false
}

func cmdAdapters(c *command) int {
	rows, list := [][]string{{"ADAPTER", "COMMANDS", "VERSION", "SUPPORTED", "FOUND"}}, knownTools(c.ctx, &Config{})
	for _, t := range list {
		rows = append(rows, []string{t.Name, strings.Join(t.Names, " "), cmp.Or(t.Version, "-"),
			cmp.Or(t.MinVersion, "any") + " to " + cmp.Or(t.MaxVersion, "any"), cmp.Or(t.Path, "not found")})
		if t.Warning != "" {
			fmt.Fprintf(c.stderr, "atlasbridge: warning: %s %s: %s\n", t.Name, t.Version, t.Warning)
		}
	}
	return c.show(list, rows)
}

func cmdDebug(c *command) int {
	path := cmp.Or(c.opts.text("output"), time.Now().Format("atlasbridge-debug-20060102-150405.tar.gz"))
	dir, err := stateDir(c.getenv)
	if err == nil {
		err = c.writeBundle(path, dir, c.opts.on("full"))
	}
	if err != nil {
		return c.fail(hinted(fmt.Errorf("writing the bundle: %w", err), "choose another file with --output"))
	}
	fmt.Fprintf(c.stdout, "%s: no token, no known secrets%s; look into it before you send it\n", path,
		map[bool]string{false: ", no answers, no excerpts"}[c.opts.on("full")])
	return 0
}

// writeBundle writes the tar.gz, a new file, and lists what goes in.
func (c *command) writeBundle(path, dir string, full bool) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	zip := gzip.NewWriter(f)
	tape := tar.NewWriter(zip)
	cfg, cfgErr := loadConfig(dir, c.getenv, nil)
	if cfgErr != nil {
		cfg = &Config{Dir: dir}
	}
	add := func(name string, content []byte) {
		text := redact(string(content))
		if cfg.Token != "" {
			text = strings.ReplaceAll(text, cfg.Token, "[token]")
		}
		fmt.Fprintf(c.stdout, "%9d  %s\n", len(text), name)
		head := &tar.Header{Name: "atlasbridge-debug/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()}
		err = errors.Join(err, tape.WriteHeader(head))
		io.WriteString(tape, text) // an error stays with the tape until it is closed
	}
	addJSON := func(name string, v any) {
		content, _ := json.MarshalIndent(v, "", "  ") // of texts and numbers: cannot fail
		add(name, content)
	}
	addJSON("versions.json", map[string]any{"atlasbridge": version(), "tools": knownTools(c.ctx, cfg)})
	if cfgErr == nil {
		addJSON("config.json", cfg.describe())
	} else {
		addJSON("config.json", map[string]string{"error": cfgErr.Error()})
	}
	for _, name := range []string{"state.jsonl", "audit.log", "atlasbridge.log", "atlasbridge.log.1"} {
		content, readErr := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(readErr, fs.ErrNotExist) {
			continue
		}
		if !full || name == "state.jsonl" {
			content = withhold(content, full)
		}
		add(name, content)
		err = errors.Join(err, readErr)
	}
	return errors.Join(err, tape.Close(), zip.Close(), f.Close())
}

// withhold replaces in JSON Lines every text that is not known to be harmless by its length, so that a field
// added later is not shown by mistake; with full, nonces only.
func withhold(lines []byte, full bool) []byte {
	harmless := strings.Fields("rec id at type confidence safe_default status source fingerprint created_at expires_at " +
		"decided_at decided_by prompt_id session_id injected_at kind by tool activity started_at ended_at hash " +
		"prev_hash ts event crc time level msg err error signals")
	var out []byte
	for line := range bytes.Lines(lines) {
		var record map[string]json.RawMessage
		if json.Unmarshal(line, &record) != nil {
			record = map[string]json.RawMessage{"unreadable_bytes": fmt.Append(nil, len(line))}
		}
		for key, v := range record {
			if key == "nonce" || !full && strings.ContainsAny(string(v[:1]), `"[{`) && !slices.Contains(harmless, key) {
				record[key], _ = json.Marshal(fmt.Sprintf("(%d bytes)", len(v)))
			}
		}
		text, _ := json.Marshal(record) // of valid JSON: cannot fail
		out = append(append(out, text...), '\n')
	}
	return out
}
