package main

// The commands: one table, from which dispatch, flags, help, suggestions, completion and the README's table derive; and
// those that look at the installation itself. What was asked for goes to stdout, everything said about it to stderr;
// tables fit 80 columns; colour only on a terminal and without NO_COLOR.

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
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
)

// Exit codes of our own, as the shell and env(1) have them; a child's are passed through.
const exitFailed, exitUsage, exitInternal = 1, 2, 125 // a check or command failed; usage; before the child ran

// What lockFile returns when another process holds the lock, and findTool and startPTY when PATH lacks the command.
var errLocked, errNoTool = errors.New("locked by another process"), errors.New("command not found")

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

// commandSpec is one row of the command table. Its flags are those that usage and help show.
type commandSpec struct {
	name, usage, summary string
	min, max             int // how many arguments besides flags; max −1: any number
	do                   func(*command) int
	words, help          string // what the first argument can be; flags, explanation, examples
}

// flagShape is a flag in a usage or help text: its name and, unless it is a switch, that of its value.
var flagShape = regexp.MustCompile(`(?:\[|\n  )--([a-z-]+)(?: ([A-Z:]+|[a-z]+\|[a-z]+))?`)

// commands is the command table.
func commands() []commandSpec {
	return []commandSpec{
		{"run", "run [flags] <tool> [args…]", "run a tool; its questions reach your phone", 1, -1, cmdRun, "", `
  --channel telegram|local  who is asked (default: telegram once it is set up)
  --stream                  send all visible output to the phone too
  --record FILE             keep the session as an asciicast recording
  --timeout DUR             how long a question waits, as 90s or 10m
  --name LABEL              the session's name in messages
  --adapter NAME            treat the tool as this one, whatever its name
  --quiet                   not a byte of our own on the terminal
Everything after <tool> is the tool's own, as its exit status is.
  atlasbridge run --name api --timeout 30m claude --model opus
  atlasbridge run --channel local -- bash -c 'read -p "Continue? (y/n) " a'`},
		{"setup", "setup [flags]", "connect your Telegram bot; writes config.toml", 0, 0, cmdSetup, "", `
  --token-file FILE  read the bot token from a file, or /dev/stdin
  --chat-id ID       the chat; found by itself otherwise
  --user-id ID       who may answer; found by itself otherwise
  --api-base URL     another Bot API server
  --no-test          send no test message
  --yes              remove a webhook without asking
Asks for the bot token (from @BotFather), waits until you send the bot any
message, confirms by a short code that it is you, and sends a test message.`},
		{"doctor", "doctor [--json]", "check everything; says what to do about each failure", 0, 0, cmdDoctor, "",
			"\n  atlasbridge doctor --json | jq '.checks[] | select(.ok | not)'"},
		{"status", "status [--all] [--json]", "sessions: what runs, what waits, who polls Telegram", 0, 0, cmdStatus, "", `
With --all ended sessions too.`},
		{"approvals", "approvals [--json]", "open questions of all sessions, with the time left", 0, 0, cmdApprovals, "", ""},
		{"answer", "answer <prompt-id> <value>", "answer a question from any terminal", 2, 2, cmdAnswer, "", `
The id's first 8 digits will do. The value is what a button would send: y, n, a
choice's number or letter, enter, esc, default, or the text itself.
  atlasbridge answer 3f2a91c4 y`},
		{"logs", "logs [--tail] [--json] [--session ID]", "what happened, readable; --tail follows", 0, 0, cmdLogs, "", `
  atlasbridge logs --json | jq -c 'select(.event == "PROMPT_RESOLVED")'`},
		{"audit", "audit verify [--json]", "recompute the audit chain, name the first bad line", 1, 1, cmdAudit, "verify", `
  --head SEQ:HASH  the head a session-ended message showed
Compares with the head in the state file too. Exit: 1 when it does not hold.`},
		{"debug", "debug bundle [--output FILE] [--full]", "pack what a bug report needs, no secrets", 1, 1, cmdDebug,
			"bundle", "\nState, audit log, log, versions, settings; --full adds answers and excerpts."},
		{"lab", "lab [flags] [FILE|DIR…]", "replay recordings through the detector", 0, -1, cmdLab, "", `
  --json     one object per line
  --screen   print the screen each recording ends with
  --explain  say why, for each event
Takes the recordings of run --record, scenarios (JSON), and folders of both.`},
		{"hook", "hook", "called by a tool's own hook system, not by you", 0, -1, cmdHook, "", ""},
		{"adapters", "adapters [--json]", "known tools: found or not, version, supported range", 0, 0, cmdAdapters, "", ""},
		{"config", "config [--json]", "settings in force and where each came from", 0, 0, cmdConfig, "", `
Flags win over the environment, that over config.toml, that over the default.`},
		{"version", "version", "this program's version", 0, 0, cmdVersion, "", ""},
		{"help", "help [command]", "explain a command", 0, 0, cmdHelp, "", ""},
		{"completion", "completion bash|zsh|fish", "shell completion", 1, 1, cmdCompletion, "bash zsh fish", `
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
	fmt.Fprint(w, "\nTry:   atlasbridge run bash -c 'read -p \"Continue? (y/n) \" a; echo got $a'\n"+
		"Then:  atlasbridge setup; atlasbridge run claude. More: atlasbridge help COMMAND\n")
}

func cmdHelp(c *command) int    { writeHelp(c.stdout); return 0 }
func cmdVersion(c *command) int { fmt.Fprintln(c.stdout, version()); return 0 }

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

// options reads the arguments; flags may follow arguments, but not those of run and answer. When that fails, or help
// was asked for, it has said so and returns nil and the exit code.
func (c *command) options() (*options, int) {
	s, names := c.spec(), []string{}
	o := &options{set: flag.NewFlagSet(c.name, flag.ContinueOnError)}
	o.set.SetOutput(io.Discard)
	for _, m := range flagShape.FindAllStringSubmatch(s.usage+s.help, -1) {
		names = append(names, m[1])
		switch m[2] {
		case "":
			o.set.Bool(m[1], false, "")
		case "DUR":
			o.set.Duration(m[1], 0, "")
		default:
			o.set.String(m[1], "", "")
		}
	}
	for rest := c.args; ; rest = rest[1:] {
		if err := o.set.Parse(rest); err == flag.ErrHelp {
			fmt.Fprintf(c.stdout, "atlasbridge %s\n  %s\n%s", s.usage, s.summary, strings.TrimPrefix(s.help+"\n", "\n"))
			return nil, 0
		} else if err != nil {
			text := strings.Replace(err.Error(), "flag provided but not defined: -", "unknown flag --", 1)
			_, name, _ := strings.Cut(text, "unknown flag --")
			return nil, c.usage("%s", text+meant("--", nearest(name, names)))
		}
		read := len(rest) - o.set.NArg()
		whole := c.name == "run" || c.name == "answer" || read > 0 && rest[read-1] == "--"
		if rest = rest[read:]; whole || len(rest) == 0 {
			o.args = append(o.args, rest...)
			break
		}
		o.args = append(o.args, rest[0])
	}
	if n := len(o.args); n < s.min || s.max >= 0 && n > s.max ||
		s.words != "" && !slices.Contains(strings.Fields(s.words), o.args[0]) {
		return nil, c.usage("wrong arguments %q", o.args)
	}
	return o, 0
}

// usage prints one line about a wrong command line, with the right usage or the nearest command, and returns 2.
func (c *command) usage(format string, args ...any) int {
	more := cmp.Or(meant("atlasbridge ", nearest(c.name, commandNames())), "; to run a tool: atlasbridge run TOOL")
	if s := c.spec(); s != nil {
		more = "; usage: atlasbridge " + s.usage
	}
	fmt.Fprintf(c.stderr, "atlasbridge: %s\n", visible(fmt.Sprintf(format, args...)+more))
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

// nearest is the word that s begins, or with the fewest edits from s, when these are few enough.
func nearest(s string, words []string) string {
	for edits := range min(max(2, len(s)/3), 3) + 1 {
		for _, w := range words {
			if within(edits, s, w) || edits == 1 && len(s) > 1 && strings.HasPrefix(w, s) {
				return w
			}
		}
	}
	return ""
}

// within tells whether that many letters to insert, delete, replace or swap with the next one turn a into b.
func within(edits int, a, b string) bool {
	if a == "" || b == "" {
		return len(a)+len(b) <= edits
	}
	if a[0] == b[0] {
		return within(edits, a[1:], b[1:])
	}
	swapped := len(a) > 1 && len(b) > 1 && a[0] == b[1] && a[1] == b[0]
	return edits > 0 && (within(edits-1, a[1:], b[1:]) || within(edits-1, a[1:], b) || within(edits-1, a, b[1:]) ||
		swapped && within(edits-1, a[2:], b[2:]))
}

// onTerminal tells whether f is a terminal.
func onTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// colour wraps text in an SGR code ("31" red, "1" bold …) on a terminal, unless NO_COLOR is set (https://no-color.org).
func (c *command) colour(code, text string) string {
	if c.getenv("NO_COLOR") != "" || c.getenv("TERM") == "dumb" || !onTerminal(c.stdout) {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// table prints rows of plain text in columns, the first row as headings, lines cut at 80 characters.
func (c *command) table(rows [][]string) {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(w, visible(strings.Join(row, "\t")))
	}
	w.Flush()
	for i, line := range strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n") {
		if text := []rune(line); len(text) > 80 {
			line = string(text[:79]) + "…"
		}
		if i == 0 {
			line = c.colour("1", line)
		}
		fmt.Fprintln(c.stdout, line)
	}
}

// show prints JSON where --json was given, and else the table.
func (c *command) show(v any, rows [][]string) int {
	if c.opts.on("json") {
		return c.printJSON(v)
	}
	c.table(rows)
	return 0
}

func (c *command) printJSON(v any) int {
	e := json.NewEncoder(c.stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // nobody is left to be told that standard output is closed
	return 0
}

// config is loadConfig for a command.
func (c *command) config(flags map[string]string) (*Config, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return &Config{}, err
	}
	return loadConfig(dir, c.getenv, flags)
}

func cmdConfig(c *command) int {
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	rows := [][]string{{"SETTING", "VALUE", "FROM"}}
	for _, s := range cfg.inForce {
		rows = append(rows, []string{s.Key, string(s.Value), s.Origin})
	}
	return c.show(cfg.inForce, rows)
}

// version is the version control tag that the Go tool wrote into the binary, "(devel)" without one, and for what.
func version() string {
	tag := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok {
		tag = cmp.Or(info.Main.Version, tag)
	}
	return fmt.Sprintf("atlasbridge %s %s %s/%s", tag, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// cmdCompletion prints the script for a shell; zsh runs that of bash. After `run` the shell completes as ever.
func cmdCompletion(c *command) int {
	names := strings.Join(commandNames(), " ")
	cases := "  '1 '* | '2 help') words='" + names + "' ;;\n"
	fish := "complete -c atlasbridge -n __fish_use_subcommand -f -a '" + names + "'\n"
	for _, s := range commands() {
		words := s.words
		for _, m := range flagShape.FindAllStringSubmatch(s.usage+s.help, -1) {
			words += " --" + m[1]
		}
		cases += fmt.Sprintf("  *' %s') words='%s' ;;\n", s.name, words)
		fish += fmt.Sprintf("complete -c atlasbridge -n '__fish_seen_subcommand_from %s' -a '%s'\n", s.name, words)
	}
	bash := `_atlasbridge() {
  local cur="${COMP_WORDS[COMP_CWORD]}" words=
  case "$COMP_CWORD ${COMP_WORDS[1]}" in
` + cases + `  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${COMP_WORDS[1]} != run || $COMP_CWORD -eq 1 || $cur == -* ]] || COMPREPLY=($(compgen -c -- "$cur"))
}
complete -o default -F _atlasbridge atlasbridge
`
	zsh := "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + bash
	fmt.Fprint(c.stdout, map[string]string{"bash": bash, "zsh": zsh, "fish": fish}[c.opts.args[0]])
	return 0
}

// doctor tells each check as soon as it is known, with --json all at the end.
type doctor struct {
	*command
	checks []map[string]any
	failed bool
}

func cmdDoctor(c *command) int {
	d := &doctor{command: c}
	cfg, err := c.config(nil)
	d.tell("config", err, "settings and defaults are valid", "")
	d.files(cfg.Dir)
	if cfg.Channel == "telegram" {
		d.telegram(cfg)
	}
	d.records(cfg.Dir)
	size, err := terminalSize(c.stdout)
	terminal := map[bool]string{true: "none here: a tool gets 100x30"}[err != nil]
	d.tell("terminal", nil, cmp.Or(terminal, fmt.Sprintf("%s, %dx%d", c.getenv("TERM"), size.Cols, size.Rows)), "")
	for _, t := range knownTools(c.ctx, cfg) {
		d.tell(t.Name, nil, cmp.Or(strings.TrimSpace(t.Version+" "+t.Path), "not installed"), t.Warning)
	}
	if c.opts.on("json") {
		c.printJSON(map[string]any{"checks": d.checks, "ok": !d.failed})
	}
	return map[bool]int{true: exitFailed}[d.failed]
}

// tell records a check: failed with err (remedy: what to do), or passed with what was found (remedy: a warning).
func (d *doctor) tell(name string, err error, found, remedy string) {
	mark := d.colour("32", "ok  ")
	if err != nil {
		d.failed, mark, found, remedy = true, d.colour("31", "FAIL"), redact(err.Error()), hintOf(err)
	} else if remedy != "" {
		mark = d.colour("33", "warn")
	}
	d.checks = append(d.checks, map[string]any{"name": name, "ok": err == nil, "detail": found, "remedy": remedy})
	if d.opts.on("json") {
		return
	}
	fmt.Fprintf(d.stdout, "%s  %-11s  %s\n", mark, name, visible(found))
	if remedy != "" {
		fmt.Fprintf(d.stdout, "%17s  %s\n", "→", visible(remedy))
	}
}

// files checks who can reach the state folder and what it lies on.
func (d *doctor) files(dir string) {
	var err error
	for _, name := range []string{"", "config.toml", "state.jsonl", "audit.log", "atlasbridge.log"} {
		if bad := ownedPrivate(filepath.Join(dir, name)); !errors.Is(bad, fs.ErrNotExist) {
			err = cmp.Or(err, bad)
		}
	}
	d.tell("permissions", hinted(err, "make it yours alone: chmod -R go= "+dir), dir+" is yours alone", "")
	if fs := networkFS(dir); fs != "" {
		d.tell("file system", nil, fs+": locks may not hold between machines", "set ATLASBRIDGE_HOME to a local disk")
	}
}

// telegram checks the token, the chat and, against Telegram's, the clock.
func (d *doctor) telegram(cfg *Config) {
	ctx, stop := context.WithTimeout(d.ctx, 15*time.Second)
	defer stop()
	bot := newBot(cfg.Token, cfg.APIBase)
	defer bot.Close()
	var me, chat struct{ Type, Title, Username string }
	err := bot.call(ctx, "getMe", map[string]any{}, &me)
	d.tell("token", hinted(err, "check the network, or run `atlasbridge setup`"), "the bot is @"+me.Username, "")
	err = bot.call(ctx, "getChat", map[string]any{"chat_id": cfg.ChatID}, &chat)
	d.tell("chat", hinted(err, "run `atlasbridge setup` again"), chat.Type+" "+cmp.Or(chat.Title, chat.Username), "")
	if err != nil {
		return
	}
	skew, err := bot.clockSkew().Round(time.Second), error(nil)
	if skew.Abs() > 30*time.Second { // then times of questions and answers cannot be compared
		err = hinted(fmt.Errorf("Telegram's clock is %s ahead", skew), "set the clock (timedatectl set-ntp true)")
	}
	d.tell("clock", err, "as Telegram's", "")
}

// records checks the state, who polls, and the audit chain.
func (d *doctor) records(dir string) {
	st, err := openStore(dir)
	var v *View
	if err == nil {
		defer st.Close()
		v, err = st.View()
	}
	if err != nil {
		d.tell("state", hinted(err, "keep a copy (`atlasbridge debug bundle`), then move state.jsonl away"), "", "")
		return
	}
	d.tell("state", nil, fmt.Sprintf("%d sessions, %d prompts", len(v.Sessions), len(v.Prompts)), "")
	poller := map[bool]string{true: "nobody, which is right while no session runs"}[st.holder("poll.lock") == 0]
	d.tell("poller", nil, cmp.Or(poller, fmt.Sprint("process ", st.holder("poll.lock"))), "")
	verdict, err := st.verifyAudit(v)
	if err == nil && !verdict.OK {
		err = fmt.Errorf("audit.log:%d: %s", verdict.Line, verdict.Reason)
	}
	d.tell("audit", hinted(err, "keep a copy of audit.log; `atlasbridge audit verify` says more"),
		fmt.Sprintf("%d entries hold", verdict.Entries), "")
}

// tool is an adapter and the program it stands for, as `adapters --json` shows them.
type tool struct {
	Name      string `json:"name"`
	Commands  string `json:"commands"`
	Version   string `json:"version"`
	Supported string `json:"supported"`
	Path      string `json:"path"` // "" when it was not found
	Warning   string `json:"warning"`
}

// knownTools asks every installed tool for its version, all at once. One that does not answer within 10 s
// (a cold start of Node takes up to 4 s, measured) counts as found, its version unknown.
func knownTools(ctx context.Context, cfg *Config) []tool {
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	list, env := make([]tool, len(adapters)), childEnv(os.Environ(), cfg, "")
	var all sync.WaitGroup
	for i, a := range adapters {
		all.Go(func() { list[i] = probe(ctx, a, env) })
	}
	all.Wait()
	return slices.DeleteFunc(list, func(t tool) bool { return t.Commands == "" }) // the generic one stands for none
}

// probe finds the tool and reads what it says of its version, in a terminal of its own as under run.
func probe(ctx context.Context, a *Adapter, env []string) tool {
	t := tool{Name: a.Name, Commands: strings.Join(a.Names, " "), Supported: a.MinVer + " to " + a.MaxVer}
	for _, name := range a.Names {
		if path, err := findTool(name); err == nil {
			t.Path = cmp.Or(t.Path, path)
		}
	}
	if t.Path == "" {
		return t
	} else if p, err := startPTY([]string{t.Path, "--version"}, env, "", Size{Rows: 24, Cols: 80}, nil); err == nil {
		stop := context.AfterFunc(ctx, func() { p.Terminate(nil); p.Close() })
		output, _ := io.ReadAll(io.LimitReader(p, 4096))
		stop()
		p.Close()
		t.Version = regexp.MustCompile(`[0-9]+(\.[0-9]+)+`).FindString(string(output)) // as in "codex-cli 0.146.0"
	}
	if t.Version == "" || versionLess(t.Version, a.MinVer) || versionLess(a.MaxVer, t.Version) {
		t.Warning = "not a version that was tried: if questions are missed, use one of " + t.Supported
	}
	return t
}

// versionLess compares dotted numbers as far as the shorter one goes: the bound "2.1" means all of 2.1, "" anything.
func versionLess(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	n := min(len(as), len(bs))
	return a != "" && b != "" && slices.CompareFunc(as[:n], bs[:n], func(x, y string) int {
		return cmp.Or(len(x)-len(y), strings.Compare(x, y)) // numbers without leading zeros
	}) < 0
}

func cmdAdapters(c *command) int {
	rows, list := [][]string{{"ADAPTER", "COMMANDS", "VERSION", "SUPPORTED", "FOUND"}}, knownTools(c.ctx, &Config{})
	for _, t := range list {
		rows = append(rows, []string{t.Name, t.Commands, t.Version, t.Supported, cmp.Or(t.Path, "not found")})
		if t.Warning != "" {
			fmt.Fprintf(c.stderr, "atlasbridge: %s %s: %s\n", t.Name, t.Version, t.Warning)
		}
	}
	return c.show(list, rows)
}

// cmdDebug writes the bundle, a new file, and lists what goes in.
func cmdDebug(c *command) int {
	path := cmp.Or(c.opts.text("output"), time.Now().Format("atlasbridge-debug-20060102-150405.tar.gz"))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return c.fail(hinted(fmt.Errorf("writing the bundle: %w", err), "choose another file with --output"))
	}
	cfg, err := c.config(nil)
	about := map[string]any{"version": version(), "tools": knownTools(c.ctx, cfg), "config": cfg.inForce}
	if err != nil {
		about["config"] = err.Error()
	}
	zip := gzip.NewWriter(f)
	tape := tar.NewWriter(zip) // an error stays with it until it is closed
	add := func(name string, content []byte) {
		text := redact(string(content))
		if cfg.Token != "" {
			text = strings.ReplaceAll(text, cfg.Token, "[token]")
		}
		fmt.Fprintf(c.stdout, "%9d  %s\n", len(text), name)
		tape.WriteHeader(&tar.Header{Name: "atlasbridge/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()})
		io.WriteString(tape, text)
	}
	text, _ := json.MarshalIndent(about, "", "  ") // of texts and numbers: cannot fail
	add("about.json", text)
	for _, name := range []string{"state.jsonl", "audit.log", "atlasbridge.log", "atlasbridge.log.1"} {
		content, err := os.ReadFile(filepath.Join(cfg.Dir, name))
		if name == "state.jsonl" || !c.opts.on("full") { // the audit log keeps its bytes: they are hashed
			content = withhold(content, c.opts.on("full"))
		}
		if err == nil {
			add(name, content)
		}
	}
	if err := errors.Join(tape.Close(), zip.Close(), f.Close()); err != nil {
		return c.fail(fmt.Errorf("writing the bundle: %w", err))
	}
	fmt.Fprintf(c.stdout, "%s: no token; answers and excerpts with --full only; look into it before you send it\n", path)
	return 0
}

// withhold replaces in JSON Lines every text that is not known to be harmless by its length, so that a field
// added later is not shown by mistake; with full, nonces only.
func withhold(lines []byte, full bool) (out []byte) {
	harmless := strings.Fields(`rec id at type confidence safe_default status source fingerprint created_at expires_at
		decided_at decided_by prompt_id session_id injected_at kind by tool activity started_at ended_at hash prev_hash
		ts event crc time level msg err error signals`)
	for line := range bytes.Lines(lines) {
		var record map[string]json.RawMessage
		if json.Unmarshal(line, &record) != nil {
			record = map[string]json.RawMessage{"unreadable_bytes": fmt.Append(nil, len(line))}
		}
		for key, v := range record {
			if key == "nonce" || !full && strings.ContainsAny(string(v[:1]), `"[{`) && !slices.Contains(harmless, key) {
				record[key] = fmt.Appendf(nil, `"(%d bytes)"`, len(v))
			}
		}
		text, _ := json.Marshal(record) // of valid JSON: cannot fail
		out = append(append(out, text...), '\n')
	}
	return out
}
