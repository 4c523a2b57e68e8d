// Atlasbridge runs an AI command line unchanged in a pseudo-terminal and carries every question it asks to your phone:
// you tap, it types, exactly once. `atlasbridge help` lists the commands, `help COMMAND` explains one.
//
// Every `atlasbridge run` is a whole bridge for its own session: no daemon, no server, no open port. Sessions share
// files in ~/.atlasbridge: config.toml; state.jsonl with sessions, prompts and replies; audit.log, each line with the
// hash of the one before; atlasbridge.log. Who holds the bot token and an allowed account can type into your terminal.
// Nothing is ever approved by waiting.
//
// Exit status: the child's own; 128+N when signal N killed it; 1 a check or command failed; 2 usage; 125 atlasbridge
// failed before the child ran; 126 the tool cannot be executed; 127 not found.
//
// This file has the settings, the command table and the session, which moves the bytes. It never decides what a screen
// asks (detect.go), who may answer (telegram.go) or whether an answer holds (store.go).
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }
func run(ctx context.Context, args []string, stdin, stdout, stderr *os.File) (code int) {
	c := &command{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr, getenv: os.Getenv}
	if len(args) == 0 {
		cmdHelp(&command{stdout: stderr})
		return exitUsage
	}
	alias := map[string]string{"-h": "help", "-help": "help", "--help": "help", "-v": "version", "--version": "version"}
	c.name, c.args = cmp.Or(alias[args[0]], args[0]), args[1:]
	if c.name == "help" && len(c.args) > 0 {
		c.name, c.args = c.args[0], []string{"-h"}
	}
	if c.opts, code = c.options(); c.opts != nil {
		code = c.spec().do(c)
	}
	return code
}

const exitFailed, exitUsage, exitInternal = 1, 2, 125 // as the shell and env(1) have them
var errLocked, errNoTool = errors.New("locked by another process"), errors.New("command not found")

// PTY is the child's terminal, for any goroutine. Read gives io.EOF when the last process that held it is gone. Close
// is idempotent and ends a blocked Read.
type PTY interface {
	io.ReadWriteCloser
	Resize(Size) error
	State() TTYState // signal 2; ReadingUnknown where the system cannot tell
	Wait() int       // exit status, 128+N when a signal killed it; once
	PID() int
	Unread() int                    // bytes of output that are waiting for Read
	Signal(os.Signal) error         // to the child's foreground process group
	Terminate(done <-chan struct{}) // SIGTERM, 3 s, SIGKILL to its process group; returns early when done closes
}
type command struct { // what every command gets: its surroundings, and its arguments before and after parsing
	ctx                   context.Context
	name                  string
	args                  []string // after the name
	stdin, stdout, stderr *os.File
	getenv                func(string) string
	opts                  *options
}
type options struct {
	set  *flag.FlagSet
	args []string // without flags
}
type commandSpec struct { // a row of the command table: dispatch, flags, help, suggestions, completion derive from it
	name, usage, summary string
	min, max             int // how many arguments besides flags; max −1: any number
	do                   func(*command) int
	words, help          string // what the first argument can be; flags, explanation, examples
}
type tool struct{ Name, Commands, Version, Supported, Path, Warning string } // of an adapter; Path "": not found
type Size struct{ Rows, Cols, XPixel, YPixel uint16 }                        // in cells and pixels (struct winsize)
type hint string                                                             // what to do about an error

func (s commandSpec) flags() [][]string { // each with its name and, unless it is a switch, that of its value
	shape := regexp.MustCompile(`(?:\[|\n  |, )--([a-z-]+)(?: ([A-Z:]+|[a-z]+\|[a-z]+))?`)
	return shape.FindAllStringSubmatch(s.usage+s.help, -1)
}

func commands() []commandSpec {
	return []commandSpec{
		{"run", "run [flags] <tool> [args…]", "run a tool; its questions reach your phone", 1, -1, cmdRun, "", `
  --channel telegram|local      who is asked (default: telegram once set up)
  --record FILE, --stream       keep a recording; send the output to the phone
  --timeout DUR, --quiet        wait 90s or 10m; not a byte of our own here
  --name LABEL, --adapter NAME  its name in messages; treat it as this tool
Everything after <tool> is the tool's own, as its exit status is.
  atlasbridge run --name api --timeout 30m claude --model opus
  atlasbridge run --channel local -- bash -c 'read -p "Continue? (y/n) " a'`},
		{"setup", "setup [flags]", "connect your Telegram bot; writes config.toml", 0, 0, cmdSetup, "", `
  --token-file FILE           read the bot token from a file, or /dev/stdin
  --chat-id ID, --user-id ID  the chat; who may answer; found otherwise
  --api-base URL, --no-test   another Bot API server; send no test message
Asks for the bot token (from @BotFather), waits until you send the bot any
message, confirms by a short code that it is you, and sends a test message.`},
		{"doctor", "doctor [--json]", "check everything; says what to do about each failure", 0, 0, cmdDoctor, "",
			"\n  atlasbridge doctor --json | jq '.checks[] | select(.ok | not)'"},
		{"status", "status [--all] [--json]", "sessions: what runs, what waits, who polls Telegram", 0, 0, cmdStatus, "", `
With --all ended sessions too.`},
		{"approvals", "approvals [--json]", "open questions of all sessions, with the time left", 0, 0, cmdApprovals, "", ""},
		{"answer", "answer <prompt-id> <value>", "answer a question from any terminal", 2, 2, cmdAnswer, "", `
The id's first 8 digits will do. The value is what a button would send: y, n, a
choice's number, letter or words, enter, esc, default, or the text itself.
  atlasbridge answer 3f2a91c4 y`},
		{"logs", "logs [--tail] [--json] [--session ID]", "what happened, readable; --tail follows", 0, 0, cmdLogs, "", `
  atlasbridge logs --json | jq -c 'select(.event == "PROMPT_RESOLVED")'`},
		{"audit", "audit verify [--json]", "recompute the audit chain, name the first bad line", 1, 1, cmdAudit, "verify", `
  --head SEQ:HASH  the head a session-ended message showed
  --aside          keep the log under another name and begin a new one
Compares with the head in the state file too. Exit: 1 when it does not hold.`},
		{"debug", "debug bundle [--output FILE] [--full]", "pack what a bug report needs, no secrets", 1, 1, cmdDebug,
			"bundle", "\nState, audit log, log, versions, settings; --full adds answers and excerpts."},
		{"lab", "lab [flags] [FILE|DIR…]", "replay recordings through the detector", 0, -1, cmdLab, "", `
  --json, --screen, --explain  one object per line; the last screen; why
Takes the recordings of run --record, scenarios (JSON), and folders of both.`},
		{"hook", "hook [--timeout SECONDS]", "called by a tool's own hook system, not by you", 0, -1, cmdHook, "", ""},
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

func commandNames() []string { return mapped(commands(), func(s commandSpec) string { return s.name }) }
func mapped[T, U any](list []T, to func(T) U) (images []U) {
	for _, one := range list {
		images = append(images, to(one))
	}
	return images
}
func (c *command) spec() commandSpec { // the row of its name, and without one a row that does nothing
	all := append(commands(), commandSpec{name: c.name})
	return all[slices.IndexFunc(all, func(s commandSpec) bool { return s.name == c.name })]
}
func cmdHelp(c *command) int {
	list := mapped(commands(), func(s commandSpec) string { return fmt.Sprintf("  %-11s %s\n", s.name, s.summary) })
	fmt.Fprint(c.stdout, "atlasbridge runs an AI command line and carries its questions to your phone.\n\n",
		strings.Join(list, ""), "\nTry:   atlasbridge run bash -c 'read -p \"Continue? (y/n) \" a; echo got $a'\n",
		"Then:  atlasbridge setup; atlasbridge run claude. More: atlasbridge help COMMAND\n")
	return 0
}

func (o *options) text(name string) string { return o.set.Lookup(name).Value.String() }
func (o *options) on(name string) bool     { return o.text(name) == "true" }
func (o *options) given(name string) bool  { return o.text(name) != o.set.Lookup(name).DefValue }

func (c *command) options() (*options, int) { // nil and the exit code when it has said what is wrong, or helped
	s, o := c.spec(), &options{set: flag.NewFlagSet(c.name, flag.ContinueOnError)}
	o.set.SetOutput(io.Discard)
	for _, f := range s.flags() {
		if f[2] == "" {
			o.set.Bool(f[1], false, "")
		} else if f[2] == "DUR" {
			o.set.Duration(f[1], -1, "") // so that 0 counts as given
		} else {
			o.set.String(f[1], "", "")
		}
	}
	err := o.set.Parse(c.args)
	for ; err == nil && o.set.NArg() > 0 && c.name != "run" && c.name != "answer"; err = o.set.Parse(o.set.Args()[1:]) {
		o.args = append(o.args, o.set.Arg(0)) // flags may follow arguments here
	}
	o.args = append(o.args, o.set.Args()...)
	switch n, words := len(o.args), strings.Fields(s.words); {
	case s.do == nil:
		return nil, c.usage("unknown command %q", c.name)
	case err == flag.ErrHelp:
		fmt.Fprintf(c.stdout, "atlasbridge %s\n  %s\n%s", s.usage, s.summary, strings.TrimPrefix(s.help+"\n", "\n"))
		return nil, 0
	case err != nil:
		return nil, c.usage("%s", strings.Replace(err.Error(), "flag provided but not defined: -", "unknown flag --", 1))
	case n < s.min || s.max >= 0 && n > s.max || len(words) > 0 && !slices.Contains(words, o.args[0]):
		return nil, c.usage("wrong arguments %q", o.args)
	}
	return o, 0
}

func (c *command) usage(format string, args ...any) int {
	right := c.spec().usage
	more := cmp.Or(when(right != "", "; usage: atlasbridge "+right), meant("atlasbridge ", c.name, commandNames()),
		"; to run a tool: atlasbridge run TOOL")
	fmt.Fprintf(c.stderr, "atlasbridge: %s\n", visible(fmt.Sprintf(format, args...)+more))
	return exitUsage
}
func meant(before, word string, words []string) string {
	near := nearest(word, words)
	return when(near != "", "; did you mean `"+before+near+"`?")
}
func nearest(s string, words []string) string { // the first that s begins, or that differs in two letters side by side
	for _, w := range words {
		both := min(len(s), len(w))
		head := sort.Search(both, func(n int) bool { return s[:n+1] != w[:n+1] }) // letters both begin with
		tail := sort.Search(both-head, func(n int) bool { return s[len(s)-n-1:] != w[len(w)-n-1:] })
		if head > 1 && head == len(s) || max(len(s), len(w))-head-tail <= 2 {
			return w
		}
	}
	return ""
}

func (c *command) fail(err error) int {
	remedy := when(hintOf(err) != "", "atlasbridge: hint: "+visible(hintOf(err))+"\n")
	fmt.Fprintf(c.stderr, "atlasbridge: %s\n%s", redact(visible(err.Error())), remedy)
	return exitFailed
}
func (hint) Error() string    { return "" }
func hintOf(err error) string { h, _ := errors.AsType[hint](err); return string(h) }
func hinted(err error, todo string) error { // nil stays nil, and an older hint wins
	return cmp.Or(when(err != nil && hintOf(err) == "", fmt.Errorf("%w%w", err, hint(todo))), err)
}
func onTerminal(f *os.File) bool { _, err := terminalSize(f); return err == nil }
func (c *command) colour(code, text string) string { // code: of SGR, "31" red, "1" bold …; https://no-color.org
	plain := c.getenv("NO_COLOR") != "" || c.getenv("TERM") == "dumb" || !onTerminal(c.stdout)
	return cmp.Or(when(!plain, "\x1b["+code+"m"+text+"\x1b[0m"), text)
}

func (c *command) show(v any, rows [][]string) int { // --json: v; else a table, headings first, cut at 80 characters
	if c.opts.on("json") {
		return c.printJSON(v)
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	lines := mapped(rows, func(row []string) string { return visible(strings.Join(row, "\t")) + "\n" })
	fmt.Fprint(w, strings.Join(lines, ""))
	w.Flush()
	head, rest, _ := strings.Cut(regexp.MustCompile("(?m)^(.{79})..+$").ReplaceAllString(b.String(), "$1…"), "\n")
	fmt.Fprint(c.stdout, c.colour("1", head), "\n", rest)
	return 0
}
func (c *command) printJSON(v any) int {
	e := json.NewEncoder(c.stdout)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // nobody is left to be told that standard output is closed
	return 0
}

func (c *command) config(flags map[string]string) (*Config, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return &Config{}, err
	}
	return loadConfig(dir, c.getenv, flags)
}
func version() string {
	info, _ := debug.ReadBuildInfo() // with the version control tag; in every program built from modules
	return fmt.Sprintf("atlasbridge %s %s %s/%s", cmp.Or(info.Main.Version, "(devel)"), runtime.Version(),
		runtime.GOOS, runtime.GOARCH)
}
func cmdVersion(c *command) int { fmt.Fprintln(c.stdout, version()); return 0 }

func cmdCompletion(c *command) int { // zsh runs the script of bash; after `run` the shell completes as ever
	names, cases := strings.Join(commandNames(), " "), ""
	for _, s := range commands() {
		flags := mapped(s.flags(), func(f []string) string { return " --" + f[1] })
		cases += fmt.Sprintf("  *' %s') words='%s%s' ;;\n", s.name, s.words, strings.Join(flags, ""))
	}
	bash := `_atlasbridge() {
  local cur="${COMP_WORDS[COMP_CWORD]}" words=
  case "$COMP_CWORD ${COMP_WORDS[1]}" in
  '1 '* | '2 help') words='` + names + "' ;;\n" + cases + `  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${COMP_WORDS[1]} != run || $COMP_CWORD -eq 1 || $cur == -* ]] || COMPREPLY=($(compgen -c -- "$cur"))
}
complete -o default -F _atlasbridge atlasbridge
`
	fmt.Fprint(c.stdout, map[string]string{"bash": bash, "fish": "complete -c atlasbridge -f -a '" + names + "'\n",
		"zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + bash}[c.opts.args[0]])
	return 0
}

func cmdDoctor(c *command) (code int) { // tells each check as soon as it is known, with --json all at the end
	var checks []map[string]any
	// A check failed with err (remedy: what to do), or passed with what was found (remedy: a warning).
	out := cmp.Or(when[io.Writer](c.opts.on("json"), io.Discard), io.Writer(c.stdout))
	tell := func(name string, err error, found, remedy string) {
		mark := cmp.Or(when(remedy != "", c.colour("33", "warn")), c.colour("32", "ok  "))
		if err != nil {
			code, mark, found, remedy = exitFailed, c.colour("31", "FAIL"), redact(err.Error()), hintOf(err)
		}
		checks = append(checks, map[string]any{"name": name, "ok": err == nil, "detail": found, "remedy": remedy})
		fmt.Fprintf(out, "%s  %-11s  %s\n%s", mark, name, visible(found),
			when(remedy != "", fmt.Sprintf("%17s  %s\n", "→", visible(remedy))))
	}
	cfg, err := c.config(nil)
	tell("config", err, "settings and defaults are valid", "")
	if cfg.Channel == "telegram" {
		ctx, stop := context.WithTimeout(c.ctx, 15*time.Second)
		defer stop()
		var me, chat struct{ Type, Title, Username string }
		bot := newTelegram(cfg, nil, nil)
		err = hinted(bot.call(ctx, "getMe", map[string]any{}, &me), "check the network, or run `atlasbridge setup`")
		tell("token", err, "the bot is @"+me.Username, "")
		skew := bot.clockSkew().Round(time.Second)
		wrong := when(skew.Abs() > 30*time.Second, fmt.Errorf("Telegram's clock is %s ahead", skew))
		tell("clock", cmp.Or(hinted(wrong, "set the clock (timedatectl set-ntp true)"), err), "as Telegram's", "")
		err = bot.call(ctx, "getChat", map[string]any{"chat_id": cfg.ChatID}, &chat)
		tell("chat", hinted(err, "run `atlasbridge setup` again"), chat.Type+" "+cmp.Or(chat.Title, chat.Username), "")
	}
	st, err := openStore(cfg.Dir)
	tell("state", hinted(err, "keep a copy (`atlasbridge debug bundle`), then move state.jsonl away"), "can be used", "")
	if err == nil {
		defer st.Close()
		pid, nobody := st.holder("poll.lock"), "nobody, which is right while no session runs"
		tell("poller", st.stalled(), cmp.Or(when(pid == 0, nobody), fmt.Sprint("process ", pid)), "")
		view, _ := st.View()
		verdict, err := st.verifyAudit(view)
		bad := when(!verdict.OK, fmt.Errorf("audit.log:%d: %s", verdict.Line, verdict.Reason))
		remedy := cmp.Or(verdict.Remedy, "keep a copy of audit.log; `atlasbridge audit verify` says more")
		tell("audit", hinted(cmp.Or(err, bad), remedy),
			fmt.Sprintf("%d entries hold", verdict.Entries), "")
	}
	files, _ := os.ReadDir(cfg.Dir)
	private := mapped(files, func(f fs.DirEntry) error { return ownedPrivate(filepath.Join(cfg.Dir, f.Name())) })
	err, remote := cmp.Or(append(private, ownedPrivate(cfg.Dir))...), networkFS(cfg.Dir)
	tell("permissions", hinted(err, "make it yours alone: chmod -R go= "+cfg.Dir), cfg.Dir+" is yours alone",
		when(remote != "", "on "+remote+" locks may not hold between machines: set ATLASBRIDGE_HOME to a local disk"))
	size, err := terminalSize(c.stdout)
	shown := fmt.Sprintf("%s, %dx%d", c.getenv("TERM"), size.Cols, size.Rows)
	tell("terminal", nil, cmp.Or(when(err != nil, "none here: a tool gets 100x30"), shown), "")
	for _, t := range knownTools(c.ctx, cfg) {
		tell(t.Name, nil, cmp.Or(strings.TrimSpace(t.Version+" "+t.Path), "not installed"), t.Warning)
	}
	if c.opts.on("json") {
		c.printJSON(map[string]any{"checks": checks, "ok": code == 0})
	}
	return code
}

func knownTools(ctx context.Context, cfg *Config) []tool { // asks all at once; Node takes up to 4 s to start (measured)
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	list, env := make([]tool, len(adapters)-1), childEnv(os.Environ(), cfg, "") // the last one stands for all others
	var all sync.WaitGroup
	for i := range list {
		all.Go(func() { list[i] = probe(ctx, adapters[i], env) })
	}
	all.Wait()
	return list
}
func probe(ctx context.Context, a *Adapter, env []string) tool { // in a terminal of its own, as under run
	path := func(name string) string { path, _ := findTool(name); return path } // "" when it is not there
	t := tool{Name: a.Name, Commands: strings.Join(a.Names, " "), Supported: a.MinVer + " to " + a.MaxVer,
		Path: cmp.Or(mapped(a.Names, path)...)}
	if p, err := startPTY([]string{t.Path, "--version"}, env, "", Size{Rows: 24, Cols: 80}, nil); err == nil {
		defer p.Close()
		defer context.AfterFunc(ctx, func() { p.Terminate(nil); p.Close() })()
		output, _ := io.ReadAll(io.LimitReader(p, 4096))
		t.Version = regexp.MustCompile(`[0-9]+(\.[0-9]+)+`).FindString(string(output)) // as in "codex-cli 0.146.0"
	}
	odd := t.Version == "" || versionLess(t.Version, a.MinVer) || versionLess(a.MaxVer, t.Version)
	t.Warning = when(t.Path != "" && odd, "not a version that was tried: if questions are missed, use one of "+t.Supported)
	return t
}
func versionLess(a, b string) bool { // as far as the shorter one goes: the bound "2.1" means all of 2.1, "" anything
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	n := min(len(as), len(bs))
	byNumber := func(x, y string) int { return cmp.Or(len(x)-len(y), strings.Compare(x, y)) } // without leading zeros
	return a != "" && b != "" && slices.CompareFunc(as[:n], bs[:n], byNumber) < 0
}

func cmdAdapters(c *command) int {
	list, rows := []map[string]string{}, [][]string{{"ADAPTER", "COMMANDS", "VERSION", "SUPPORTED", "FOUND"}}
	for _, t := range knownTools(c.ctx, &Config{}) {
		rows = append(rows, []string{t.Name, t.Commands, t.Version, t.Supported, cmp.Or(t.Path, "not found")})
		list = append(list, map[string]string{"name": t.Name, "commands": t.Commands, "version": t.Version,
			"supported": t.Supported, "path": t.Path, "warning": t.Warning})
	}
	return c.show(list, rows)
}

/* ===== The session: one run of a tool ===== */
// All data has one owner. The loop: Screen, Detector, questions, gate, queues; it only selects and appends to the
// store. Beside it: read, readKeys, a writer and a waiter of the PTY, the store's follower, the poller, one sender per
// call of the channel; they end with the PTY, the context or the process. Output reaches the host before anything looks
// at it.

// Times of a session. What is measured is in the facts about the tool that is named.
const (
	keyGrace    = 300 * time.Millisecond // after a key at the keyboard, for the screen to show it
	dialogGrace = 300 * time.Millisecond // claude 2.1 ignores keys in a dialog's first 0.1 to 0.2 s
	hookWait    = 2 * time.Second        // for the hook of a dialog to call: up to 0.44 s, 1.4 s when busy (claude 2.1)
	hookCheck   = time.Second            // between looks whether a hook lives
	dialogGone  = time.Second            // a hook's dialog is out of sight for good: a repaint takes 0.3 s (claude 2.1)
	hookUnasked = 5 * time.Second        // the tool says that it asks nothing, although its hook waits
	sameMoment  = time.Second            // before a decision: a key and a tap may cross
	retryEvery  = 5 * time.Second        // between attempts to record a question
	lookTime    = time.Second            // for the gate to see its question
	gatePoll    = time.Second / 40       // between looks of the gate
	busyTime    = 3 * time.Second        // beyond its time that the gate waits for a moment without output
	followTime  = time.Second            // for one key of the gate to show
	submitTime  = 3 * time.Second        // for a text to be taken
	sendTime    = 3 * time.Second        // for a tool to show a key at the keyboard: 2.2 s on a busy machine (claude 2.1)
	draftTime   = 30 * time.Second       // for what was typed at the keyboard to show in the box
	judgeEvery  = time.Second / 100      // between looks of the detector
	reapEvery   = time.Minute            // between looks for sessions that died
	drainSend   = 3 * time.Second        // for the last messages
	drainStream = 10 * time.Minute       // for all output, with --stream
	doingEvery  = time.Second            // between records of what is done
	outputEvery = 30 * time.Second       // between records of the last output
)

// Sizes of a session, in bytes unless said otherwise.
const (
	maxBacklog = 4 << 20  // of --stream text that waits
	maxMessage = 4096     // of an operator's text
	maxHeld    = 64 << 10 // of keys that wait for the gate
	maxUnread  = 64       // reads that the screen may lag behind the host
	readBytes  = 8 << 10  // of one read
)

// questionOpen refuses text while something else is asked.
const questionOpen = "a question is open: answer it, or press ESC with /keys"

// bothAnswered is the reason of a question that was answered here and on the phone in the same moment.
const bothAnswered = "a key was pressed at the keyboard in the same moment: the terminal shows which of the two counted"

var (
	reReport  = regexp.MustCompile(`(?s)^\x1b(\[[IO<M?>]|\[.*R$|[\]P_])`) // sent by terminals themselves (ctlseqs)
	reControl = regexp.MustCompile(`[^\n\t\P{Cc}]`)                       // what a terminal acts on
	reSends   = regexp.MustCompile(`[\r\n]$|^(\x1b|\x03|\x15)$`)          // empties the input box: Enter, Esc, ^C, ^U
	reArrow   = regexp.MustCompile(`^\x1b[\[O][0-9;]*[A-Z~]$`)            // a key that moves and decides nothing
)

// session is one run of a tool. All of it belongs to the loop.
type session struct {
	cfg         *Config
	flags       map[string]string // of the command line, by setting: a reload keeps them
	st          *Store
	ch          Channel
	tg          *Telegram // ch, unless that is local
	log         *slog.Logger
	adapter     *Adapter
	pty         PTY
	det         *Detector
	cast        *castWriter // nil without --record
	rec         SessionRecord
	in          io.Reader
	out         io.Writer
	notes       io.Writer // for our own words to the person at the terminal
	tty         *os.File  // the host's terminal, nil without one
	restore     func() error
	hooked      bool // hooks call us
	interactive bool // somebody may type
	fed         bool // standard input is a pipe that has not ended: who feeds it answers
	hungUp      bool // told to end
	signals     chan os.Signal
	ctx         context.Context // of what goes on beside the loop, until stop
	stop        func()
	polling     sync.WaitGroup
	events      chan func() // of the goroutines, for the loop to run
	sending     int         // calls that have not reported

	next     time.Time // when the loop turns at the latest
	judgedAt time.Time // when the detector last looked
	lastKey  time.Time // when somebody last typed here
	doingAt  time.Time // when what is done was last recorded
	reapAt   time.Time // when to look for dead sessions

	seen     *Prompt        // what the detector last found, until it is gone
	spent    *Prompt        // seen, when the tool has said that it is over
	spentAt  time.Time      // when that was
	q        *question      // in force
	hooks    []*question    // of hooks, in the order they came; q may be one of them
	namedBy  string         // who pressed keys since, "" nobody
	named    string         // what a known tool says that it asks: the protocol's words, "" nothing
	over     []overDialog   // dialogs that the tool has named, and that are over
	calm     time.Time      // since when a tool that speaks the protocol says that it asks nothing; zero: it asks
	inputs   []*InputRecord // what the phone wants of us, in order
	gate     *gate
	draft    draftHere
	held     []heldKeys // typed at the keyboard while the gate types
	typing   []byte     // for the writer, but for the gate's keys
	inFlight bool       // a write is under way
	jsonLine []byte     // unfinished line of stream-json, nil for other tools
	stream   stream
	answer   string       // beginning of the tool's last answer
	trouble  string       // of the state file
	warning  string       // of the tool's version
	open     atomic.Bool  // a question is open: the follower looks more often
	unseen   atomic.Int64 // bytes that Read has returned and the screen has not got
}

// question is a prompt that waits for an answer, and what is known of it beyond its record.
type question struct {
	rec     PromptRecord // Status "" until it is stored
	screen  *Prompt      // as the detector saw it; nil: a hook asks
	dialog  *Prompt      // of a hook's: its dialog as it stands on the screen, nil when it does not
	goneAt  time.Time    // of a hook's: when its dialog left the screen
	checkAt time.Time    // of a hook's: when to look whether the hook still lives
	askAt   time.Time    // it is not stored before: a hook may come that asks the same
	decided bool         // the gate is to type what the record says
	shownAt time.Time    // when the dialog of a known tool was seen
	remind  time.Time    // when its message shows the time left anew
	passed  time.Time    // of a hook's: when the hook had given its answer to the tool
	typedBy string       // who pressed a key that may have answered it, "" nobody
	typedAt time.Time    // when that was
	unsend  func()       // ends a delivery that is no longer wanted
}

// overDialog is a dialog that the tool has named by the protocol and that is over.
type overDialog struct {
	named string
	at    time.Time
	by    string // who pressed keys while it stood, "" nobody
}

// draftHere is what was typed at the keyboard since the input box was last emptied.
type draftHere struct {
	keys   string
	edited bool // by keys that move or delete, or as a paste: keys are not what stands in the box
}

// heldKeys are keys that were typed while the gate was typing.
type heldKeys struct {
	keys []byte
	at   time.Time
}

// write is what the writer writes, in one piece. An answer of ours is not written when output is waiting to be read: it
// may take the question away.
type write struct {
	p      []byte
	answer bool
}

// errUnread is a write that was not made because output was waiting.
var errUnread = errors.New("output is waiting")

type toolUse struct { // in stream-json output
	Type, ID, Name string
	Input          json.RawMessage
}

func cmdRun(c *command) int { // where the tool cannot be run it exits as a shell would
	s, err := newSession(c)
	if err == nil {
		err = s.run(c.ctx, c.opts.args)
	}
	if err == nil {
		return *s.rec.ExitCode
	}
	c.fail(err)
	denied := errors.Is(err, fs.ErrPermission) && strings.HasPrefix(err.Error(), "starting ")
	return cmp.Or(when(errors.Is(err, errNoTool), 127), when(denied, 126), exitInternal)
}

func newSession(c *command) (*session, error) { // what can fail before anything is spawned
	o, tool, name := c.opts, filepath.Base(c.opts.args[0]), c.opts.text("adapter")
	life, _ := time.ParseDuration(o.text("timeout"))
	seconds := when(o.given("timeout"), strconv.Itoa(int(life/time.Second)))
	flags := map[string]string{"channel": o.text("channel"), "stream.enabled": when(o.on("stream"), "true"),
		"timeout_seconds": seconds, "permission_timeout_seconds": seconds}
	cfg, err := c.config(flags)
	adapter := adapterFor(cmp.Or(name, tool))
	unknown := hinted(fmt.Errorf("no adapter is called %q", name), "`atlasbridge adapters` lists them")
	if err = cmp.Or(err, when(name != "" && name != "generic" && adapter.Name == "generic", unknown)); err != nil {
		return nil, err
	}
	log, logErr := openLog(cfg.Dir, cfg.LogLevel)
	st, err := openStore(cfg.Dir)
	if err = cmp.Or(logErr, err); err != nil {
		return nil, err
	}
	st.Retention = time.Duration(cfg.RetentionDays) * 24 * time.Hour
	cwd, _ := os.Getwd()
	terminal := func(f *os.File) *os.File { return when(onTerminal(f), f) }
	s := &session{cfg: cfg, flags: flags, st: st, ch: localChannel{}, tg: newTelegram(cfg, st, log), log: log,
		adapter: adapter, in: c.stdin, out: c.stdout, notes: c.stderr, interactive: onTerminal(c.stdin),
		tty: cmp.Or(terminal(c.stdin), terminal(c.stdout), terminal(c.stderr)), restore: func() error { return nil },
		signals: make(chan os.Signal, 8), events: make(chan func()),
		rec: SessionRecord{Head: Head{ID: newID()}, Tool: tool, Args: o.args[1:], Cwd: cwd, Wrapper: os.Getpid(),
			Label: o.text("name"), Status: "active", Activity: "starting", StartedAt: time.Now().UTC()}}
	if o.on("quiet") {
		s.notes = io.Discard
	}
	s.fed = !s.interactive
	for _, what := range st.notes {
		fmt.Fprintf(s.notes, "atlasbridge: %s (see `atlasbridge doctor`)\n", what)
	}
	if cfg.Channel == "telegram" {
		s.ch = s.tg
	}
	if o.given("record") {
		s.cast, err = newCast(o.text("record"), tool, s.size())
	}
	return s, err
}

func (s *session) size() Size { // the host's, or 30 × 100 without one
	size, err := terminalSize(s.tty)
	return cmp.Or(when(err == nil && size.Rows > 0 && size.Cols > 0, size), Size{Rows: 30, Cols: 100})
}

func (s *session) run(ctx context.Context, argv []string) error { // spawns it; stays until everything about it is told
	release, err := s.st.HoldSession(s.rec.ID)
	if err != nil {
		return err
	}
	defer release()
	signal.Notify(s.signals, append(endSignals(), suspendSignal)...) // none may end us with the terminal raw
	signal.Notify(make(chan os.Signal), syscall.SIGPIPE)             // caught, not ignored: the child does not inherit it
	s.ctx, s.stop = context.WithCancel(ctx)
	s.jsonLine = when(slices.Contains(argv, "stream-json"), []byte{})
	env, size := childEnv(os.Environ(), s.cfg, s.rec.ID), s.size()
	if s.pty, err = startPTY(s.installHooks(argv), env, s.rec.Cwd, size, s.tty); err != nil {
		return err
	}
	if s.cfg.Channel == "telegram" {
		s.polling.Go(func() { s.tg.Poll(s.ctx) })
	} else { // nothing of the child's has been copied yet
		fmt.Fprintln(s.notes, "atlasbridge: no Telegram here: questions wait for the keyboard or `atlasbridge answer` "+
			"(see `atlasbridge setup`)")
	}
	if host, ok := s.in.(*os.File); ok && s.interactive {
		if s.restore, err = rawMode(host); err != nil {
			return fmt.Errorf("setting the terminal to raw mode: %w", err)
		}
	}
	defer func() { s.restore() }()
	if s.adapter.Name == "generic" {
		s.log.Info("no adapter of its own: tool calls are not intercepted", "tool", s.rec.Tool)
	} else {
		s.spawn(func() {
			warning := probe(s.ctx, s.adapter, childEnv(os.Environ(), s.cfg, "")).Warning
			s.events <- func() { s.warning = warning }
		})
	}
	debug.SetGCPercent(25) // 12 MB resident instead of 16, for less than 1 % more time at full output (measured)
	s.watch(size)
	s.rec.PID, s.rec.PIDStart = s.pty.PID(), processStart(s.pty.PID())
	s.loop()
	s.finish()
	return nil
}

// watch makes the detector that looks at the child's output from now on.
func (s *session) watch(size Size) {
	s.det = newDetector(s.adapter, int(size.Rows), int(size.Cols), DetectOptions{Threshold: s.cfg.Threshold,
		Stuck: s.cfg.Stuck, BufferBytes: s.cfg.BufferBytes, SafeDefaults: s.cfg.SafeDefaults})
	if s.cfg.Stream {
		s.det.Screen.Transcript(false) // from now on it is kept
	}
}

// loop runs until the child is gone and its output drained.
func (s *session) loop() {
	output, keyboard, writes := make(chan []byte, maxUnread), make(chan []byte), make(chan write)
	defer close(writes)
	resized, _ := resizeSignals(s.tty)
	records := s.st.Follow(s.ctx, s.rec.ID, s.open.Load)
	s.spawn(func() { s.read(output) })
	s.spawn(func() { s.readKeys(keyboard) })
	s.spawn(func() { s.writePTY(writes) })
	s.spawn(func() {
		code := s.pty.Wait()
		s.events <- func() { s.rec.ExitCode = &code }
	})
	s.put("recording the session", ref(s.rec))
	s.notify(Notice{Text: "▶ started: " + s.rec.Tool + " in " + s.rec.Cwd})
	for turn := time.NewTimer(0); s.rec.ExitCode == nil || output != nil; {
		turn.Reset(time.Until(s.next))
		next, ready := s.nextWrite()
		var toWriter chan<- write // a nil channel never becomes ready
		if ready {
			toWriter = writes
		}
		var typed <-chan []byte
		if len(s.typing) == 0 && s.heldBytes() < maxHeld {
			typed = keyboard
		}
		select {
		case p, more := <-output:
			if output = when(more, output); more {
				s.output(p)
			}
		case p := <-typed:
			s.keyboard(p)
		case toWriter <- next:
			s.handedOver(next)
		case happened := <-s.events:
			happened()
		case rec := <-records:
			s.followed(rec)
		case <-resized:
			s.resize()
		case sig := <-s.signals:
			s.signaled(sig)
		case <-turn.C:
		}
		s.tick()
	}
}

// nextWrite is what the writer is to write now, if anything: the gate's keys go alone.
func (s *session) nextWrite() (w write, ready bool) {
	switch {
	case s.inFlight:
		return write{}, false
	case len(s.typing) > 0:
		return write{p: s.typing}, true
	case s.gate != nil && len(s.gate.keys) > 0:
		return write{p: s.gate.keys, answer: true}, true
	}
	return write{}, false
}

// handedOver notes that the writer has taken w: it reports later.
func (s *session) handedOver(w write) {
	s.inFlight = true
	if !w.answer {
		s.typing = nil
	}
}

// writePTY writes what the loop hands over, and reports each write.
func (s *session) writePTY(writes <-chan write) {
	for w := range writes {
		var err error
		if w.answer && s.unread() > 0 {
			err = errUnread
		} else {
			_, err = s.pty.Write(w.p)
		}
		s.events <- func() {
			s.inFlight = false
			if w.answer {
				s.gateWrote(w.p, err)
			} else if err != nil {
				s.log.Warn("writing to the program", "error", err.Error())
			}
		}
	}
}

// unread are the bytes of output that the screen has not got yet: those that Read has returned, and those that wait for
// it. Any goroutine may ask.
func (s *session) unread() int64 {
	return s.unseen.Load() + int64(s.pty.Unread())
}

func (s *session) spawn(f func()) { // a goroutine whose panic does not leave the terminal raw
	go func() {
		defer func() {
			if r := recover(); r != nil {
				s.restore()
				panic(r)
			}
		}()
		f()
	}()
}

func (s *session) read(output chan<- []byte) { // copies it to the host, then hands it to the loop
	defer close(output)
	ring := make([]byte, (maxUnread+2)*readBytes) // more than output holds: a buffer is free when its turn comes
	for at, n, err := 0, 0, error(nil); err == nil; at = (at + readBytes) % len(ring) {
		n, err = s.pty.Read(ring[at : at+readBytes])
		s.unseen.Add(int64(n))
		if _, lost := s.out.Write(ring[at : at+n]); lost != nil && n > 0 {
			s.pty.Signal(syscall.SIGHUP) // nobody can see the output any more, as when a terminal closes
		}
		output <- ring[at : at+n]
	}
}

// readKeys hands over what is typed. An empty chunk is the end of a pipe that brought something: one without a byte
// (systemd, ssh without a terminal) must not answer the first question with an end of file.
func (s *session) readKeys(keys chan<- []byte) {
	buf, some := make([]byte, 4096), false
	for n := 1; n > 0; some = true {
		if n, _ = s.in.Read(buf); n > 0 || some && !s.interactive {
			keys <- bytes.Clone(buf[:n])
		}
	}
	select {
	case s.events <- func() { s.fed = false }:
	case <-s.ctx.Done():
	}
}

// reap fails the prompts of sessions whose process is gone; whoever polls edits their messages.
func (s *session) reap() {
	if !s.due(s.reapAt) {
		return
	}
	s.reapAt = time.Now().Add(reapEvery)
	err := s.st.Reap(time.Now())
	s.stored("closing dead sessions", err)
}

func (s *session) put(doing string, recs ...Record) bool { // what is not in the state is not typed
	return s.stored(doing, s.st.Update(func(*View) ([]Record, error) { return recs, nil }))
}

func (s *session) stored(doing string, err error) bool { // tells once of trouble with the state or the audit log
	if trouble := cmp.Or(err, s.st.Trouble()); trouble != nil && s.trouble != trouble.Error() {
		s.trouble = trouble.Error()
		s.log.Error(doing, "error", s.trouble)
		held := when(err != nil, "the state cannot be written, so nothing is typed: ")
		s.notify(Notice{Text: "⚠ " + held + redact(s.trouble), Ring: true})
	}
	return err == nil
}

// finish closes the books and sends the last messages, and all of the output with --stream.
func (s *session) finish() {
	s.pty.Close()
	for s.inFlight { // a write to a closed terminal returns: what it says decides whether an answer was typed
		(<-s.events)()
	}
	s.restore()
	if s.gate != nil {
		s.gateOver()
	}
	for len(s.hooks) > 0 {
		s.endHook(s.hooks[0])
	}
	if s.q != nil {
		s.end(s.q, Failed, "the program ended")
	}
	s.endExpired()
	s.rec.Status = cmp.Or(when(s.hungUp, "terminated"), when(*s.rec.ExitCode > 128, "crashed"), "completed")
	s.rec.EndedAt, s.rec.Activity = ref(time.Now().UTC()), ""
	s.put("recording the end", ref(s.rec))
	seq, hash, _ := s.st.Audit().Head()
	text := fmt.Sprintf("⏹ ended: %s, exit code %d\naudit %d %s", s.rec.Tool, *s.rec.ExitCode, seq, hash)
	s.notify(Notice{Urgent: true, Text: text})
	limit := drainSend
	if s.cfg.Stream && s.tg.Trouble() == "" {
		limit = drainStream
		s.streamTake(true)
	}
	time.AfterFunc(limit, s.stop)
	for s.streamStep(); s.sending > 0; s.streamStep() {
		select {
		case happened := <-s.events:
			happened()
		case <-s.signals:
			s.stop() // cuts calls short
		}
	}
	s.stop()
	s.polling.Wait()
	s.ch.Close()
	warn := func(text string) { fmt.Fprint(s.notes, when(text != "", "atlasbridge: "+text+"\n")) }
	warn(when(s.warning != "", s.rec.Tool+": "+s.warning))
	if err := s.cast.close(time.Now()); err != nil {
		warn("writing the recording: " + err.Error())
	}
	warn(s.tg.Trouble())
}

// endHook ends a hook's question with the program: what the hook has passed on was answered, though we may not have
// heard of it yet.
func (s *session) endHook(h *question) {
	if v, err := s.st.View(); err == nil && v.Prompts[h.rec.ID] != nil {
		h.rec = *v.Prompts[h.rec.ID]
	}
	switch h.rec.Status {
	case Injected:
		s.passedOn(h)
	case Resolved, Failed, Canceled:
		s.end(h, "", "")
	default:
		s.end(h, Failed, "the program ended")
	}
}

// endExpired takes back the offer to ask again what expired: there is nothing to ask any more.
func (s *session) endExpired() {
	v, err := s.st.View()
	if err != nil {
		return
	}
	ours := v.which(func(p *PromptRecord) bool { return p.SessionID == s.rec.ID && p.mayBeAsked() })
	for _, p := range ours {
		if s.move(p.ID, Failed, func(r *PromptRecord) { r.Reason += ", and the program has ended" }) {
			s.settle(*p, s.rec)
		}
	}
}

/* ===== Bytes ===== */

func (s *session) output(p []byte) { // which the host has already
	now, t := time.Now(), &s.stream
	if s.gate != nil && !s.inFlight {
		s.gate.keys = nil // it looks again, at what this brings
	}
	s.det.Feed(p, now)
	s.unseen.Add(-int64(len(p)))
	s.cast.output(p, now)
	for _, report := range s.det.Screen.TakeStatuses() {
		s.reported(report)
	}
	if s.jsonLine != nil {
		s.toolCalls(p)
	}
	s.typing = append(s.typing, s.det.Screen.TakeReplies(s.tty == nil)...)
	t.flushAt = cmp.Or(t.flushAt, when(s.cfg.Stream, now.Add(s.cfg.Flush)))
	t.raw = append(t.raw, when(s.cfg.Stream && !s.cfg.StripANSI && len(t.raw) < maxBacklog, p)...)
}

func (s *session) toolCalls(p []byte) { // audits the tool calls in a tool's stream-json output, a message a line
	lines := bytes.Split(append(s.jsonLine, p...), []byte("\n"))
	for _, line := range lines[:len(lines)-1] {
		var m struct{ Message struct{ Content []toolUse } }
		json.Unmarshal(line, &m) // of another shape: no calls
		for _, c := range m.Message.Content {
			if c.Type == "tool_use" {
				s.stored("auditing a tool call", s.st.Audit().Append(toolCall(s.rec.ID, c.Name, c.ID, c.Input)))
			}
		}
	}
	rest := lines[len(lines)-1]
	s.jsonLine = bytes.Clone(rest[:min(len(rest), maxHookInput)])
}

// keyboard passes on what is typed here, or what a pipe brings, empty at its end. While the gate types it is held back.
func (s *session) keyboard(p []byte) {
	if s.gate != nil {
		s.held = append(s.held, heldKeys{keys: p, at: time.Now()})
		return
	}
	if len(p) == 0 && !s.pty.State().Canonical {
		return
	}
	keys := cmp.Or(string(p), "\x04\x04") // the line discipline makes the end from ^D; the first may only end a line
	if reReport.MatchString(keys) {
		s.inject(keys, "")
		return
	}
	s.lastKey = time.Now()
	s.noteDraft(keys)
	s.inject(keys, "cli:local")
}

// noteDraft keeps what somebody has typed here into the input box and not sent: a slow tool may not show it yet.
func (s *session) noteDraft(keys string) {
	if s.q != nil && !s.q.rec.Idle {
		return // they are for the question
	}
	switch {
	case reSends.MatchString(keys):
		s.draft = draftHere{}
		return
	case strings.HasPrefix(keys, "\x1b"), strings.ContainsAny(keys, "\x7f\x08"):
		s.draft.edited = true
	}
	s.draft.keys += keys
	s.draft.keys = s.draft.keys[max(0, len(s.draft.keys)-maxMessage):]
}

// draftDoesNotShow tells that the input box may not hold yet what somebody has typed into it here, or may still hold
// what they have sent: a busy tool shows keys late. After a while that is not waited for any more: the keys were for
// something else.
func (s *session) draftDoesNotShow(box inputBox) bool {
	since := time.Since(s.lastKey)
	switch {
	case since < sendTime:
		return true
	case s.draft.keys == "" || since > draftTime:
		return false
	case s.draft.edited:
		return box.draft == ""
	}
	return !strings.Contains(squeezed(box.draft), squeezed(s.draft.keys))
}

func (s *session) heldBytes() (n int) {
	for _, h := range s.held {
		n += len(h.keys)
	}
	return n
}

// release passes on what was typed while the gate g was typing. Keys that were typed at the question that g answered
// are dropped, and where another question has come, those of a moment after: they must not answer that.
func (s *session) release(g *gate) {
	held := s.held
	s.held = nil
	if len(held) == 0 {
		return
	}
	answered := g.q != nil && !g.q.rec.Idle && g.wrote
	next := s.det.Look(s.pty.State(), time.Now())
	asked := next != nil && !next.Idle && next.Type != Unknown
	for _, h := range held {
		before := g.leftAt.IsZero() || h.at.Before(g.leftAt)
		justAfter := asked && h.at.Before(g.leftAt.Add(keyGrace))
		if answered && (before || justAfter) && len(h.keys) > 0 && !reReport.Match(h.keys) {
			s.log.Info("keys typed while an answer was being typed are not passed on", "bytes", len(h.keys))
			continue
		}
		s.keyboard(h.keys)
	}
}

// inject queues keys for the child. by tells who pressed them where they may answer what stands on the screen, else "".
func (s *session) inject(keys, by string) {
	s.typing = append(s.typing, keys...)
	if by != "" && !reArrow.MatchString(keys) {
		if s.q != nil {
			s.q.typedBy, s.q.typedAt = by, time.Now()
		}
		for _, h := range s.hooks {
			if h.dialog != nil {
				h.typedBy, h.typedAt = by, time.Now()
			}
		}
		s.namedBy = by
	}
	s.det.Typed([]byte(keys), time.Now())
	s.cast.event("i", keys, time.Now())
}

func (s *session) resize() {
	size := s.size()
	if s.pty.Resize(size) != nil {
		return
	}
	s.det.Resize(int(size.Rows), int(size.Cols), time.Now())
	if s.q != nil && s.q.screen != nil {
		s.q.screen.place = 0 // it may stand in another row now
	}
	s.cast.event("r", fmt.Sprintf("%dx%d", size.Cols, size.Rows), time.Now())
}

func (s *session) signaled(sig os.Signal) { // SIGHUP of a closed terminal ends the session, any other reloads
	_, gone := terminalSize(s.tty)
	switch {
	case sig == suspendSignal:
		s.restore()
		stopSelf()
		if host, ok := s.in.(*os.File); ok && s.interactive {
			s.restore, _ = rawMode(host)
		}
		s.resize()
	case sig == syscall.SIGHUP && (s.tty == nil || gone == nil):
		s.reload()
	default:
		s.pty.Signal(sig)
		s.terminate()
	}
}

func (s *session) terminate() {
	s.hungUp = true
	s.spawn(func() { s.pty.Terminate(nil) })
}

func (s *session) reload() { // takes over the allowlist and limits of the file, or keeps the old and says so
	cfg, err := loadConfig(s.cfg.Dir, os.Getenv, s.flags)
	if err != nil {
		s.notify(Notice{Text: "⚠ configuration kept as it was: " + err.Error()})
		return
	}
	next := *s.cfg
	next.Timeout, next.PermissionTimeout, next.Away = cfg.Timeout, cfg.PermissionTimeout, cfg.Away
	next.FreeText, next.NotifyIdle, next.Users = cfg.FreeText, cfg.NotifyIdle, cfg.Users
	s.cfg = &next
	s.tg.cfg.Store(&next)
	s.stored("auditing the reload", s.st.Audit().Append(Event{Name: "CONFIG_RELOADED", SessionID: s.rec.ID}))
}

/* ===== Questions ===== */

func (s *session) tick() { // judges the screen and does what waits for a time
	s.next = time.Now().Add(reapEvery)
	s.judge()
	s.hookStep()
	s.spentStep()
	s.questionStep()
	s.inputStep()
	s.gateStep()
	s.streamStep()
	s.activityStep()
	s.reap()
	s.open.Store(s.q != nil)
}

func (s *session) due(at time.Time) bool { // if it has not come yet, the loop turns then
	now := time.Now()
	if at.After(now) && at.Before(s.next) {
		s.next = at
	}
	return !at.After(now)
}

// judge asks the detector whether a question has come or gone.
func (s *session) judge() {
	if s.gate != nil || !s.due(s.judgedAt.Add(judgeEvery)) {
		return
	}
	tty, now := TTYState{}, time.Now()
	s.judgedAt = now
	if s.det.WantTTY(now) {
		tty = s.pty.State()
		s.cast.tty(tty, now)
	}
	p := s.det.Tick(tty, now)
	if s.seen != nil && (p != nil || s.det.Gone(tty, now)) { // the screen may have gone straight on to another question
		s.left(p)
	}
	if p != nil {
		s.seen = p
		s.found(p)
	}
	s.due(slices.MaxFunc([]time.Time{now.Add(judgeEvery), s.det.Next(now)}, time.Time.Compare))
}

// left ends what was seen and has left the screen; now stands there instead, nil nothing that asks.
func (s *session) left(now *Prompt) {
	s.seen, s.spent = nil, nil
	for _, h := range s.hooks {
		if h.dialog != nil {
			h.dialog, h.goneAt = nil, time.Now()
		}
	}
	if s.q == nil || s.q.screen == nil || s.q.decided {
		return
	}
	why := "the question left the screen"
	if now != nil && !now.Idle && !s.q.rec.Idle {
		why = "replaced: the question changed"
	}
	s.end(s.q, Canceled, why)
}

// found takes up what the screen asks: the dialog of a hook's question tells only that it stands; anything else becomes
// the question in force, or waits until that is over.
func (s *session) found(p *Prompt) {
	if h := s.hookOf(p); h != nil {
		h.dialog, h.goneAt = p, time.Time{}
		return
	}
	if s.q != nil || p.Idle && !s.cfg.NotifyIdle {
		return
	}
	q := &question{screen: p}
	if s.expectsHook(p) {
		q.askAt = time.Now().Add(hookWait)
	}
	if s.adapter.Box != nil {
		q.shownAt = time.Now()
	}
	s.q = q
	s.capture(p)
}

// expectsHook tells whether a hook may still call about the dialog p: of a tool that speaks the protocol only where it
// says that it asks for an approval or an answer (measured on claude 2.1).
func (s *session) expectsHook(p *Prompt) bool {
	if !s.hooked || p.Idle || p.Type != MultipleChoice {
		return false
	}
	if s.det.Screen.Status().State == "" {
		return true
	}
	return strings.HasPrefix(s.named, "approve") || strings.HasPrefix(s.named, "answer:")
}

// hookOf is the waiting hook's question whose dialog p is, nil when it is none's: it shows that tool and those
// arguments, or the tool names them while p stands.
func (s *session) hookOf(p *Prompt) *question {
	for _, h := range s.hooks {
		if p.showsCall(h.rec.Tool, h.rec.Subject) {
			return h
		}
	}
	for _, h := range s.hooks {
		if !p.Idle && s.named != "" && h.namedIn(s.named) {
			return h
		}
	}
	return nil
}

// hookAsked takes a question that `atlasbridge hook` has stored. What the screen asked of the same, and nobody was
// told, is forgotten; what was told already stays, and the hook leaves it to the dialog.
func (s *session) hookAsked(rec PromptRecord) {
	if v, err := s.st.View(); err != nil || v.Prompts[rec.ID] == nil || v.Prompts[rec.ID].Status != Created {
		return // it was over before we heard of it
	}
	h := &question{rec: rec, checkAt: time.Now().Add(hookCheck)}
	if s.q != nil && s.q.screen != nil && !s.q.rec.Idle && s.q.screen.showsCall(rec.Tool, rec.Subject) {
		if s.q.rec.Status != "" {
			s.move(rec.ID, Canceled, func(r *PromptRecord) { r.Reason = "asked from the screen already" })
			return
		}
		s.q = nil
	}
	s.hooks = append(s.hooks, h)
	slices.SortStableFunc(s.hooks, func(a, b *question) int { return a.rec.CreatedAt.Compare(b.rec.CreatedAt) })
	if s.seen != nil && !s.seen.Idle && s.hookOf(s.seen) == h {
		h.dialog = s.seen
	}
	switch {
	case s.q != nil && s.q.rec.Idle && !s.q.decided:
		s.end(s.q, Canceled, "the tool works again")
	case s.q != nil && s.q.screen != nil && s.q.rec.Status == "":
		s.q = nil // it comes back when the hooks' questions are over, if it stands then
		s.advance()
	case s.q == nil:
		s.advance()
	}
}

// advance puts the next question in force: the hooks' in the order they came, then what the screen asks.
func (s *session) advance() {
	if s.q != nil || s.rec.ExitCode != nil {
		return
	}
	if len(s.hooks) > 0 {
		s.q = s.hooks[0]
		return
	}
	if s.seen != nil && s.seen != s.spent && s.hookOf(s.seen) == nil {
		s.found(s.seen)
	}
}

// spentStep asks about a dialog that the tool has said is over, and that stands all the same.
func (s *session) spentStep() {
	if s.spent != nil && s.due(s.spentAt.Add(dialogGone)) {
		s.spent = nil
		s.advance()
	}
}

// reported takes what a known tool says of itself: a dialog that it has named is over when it says something else.
func (s *session) reported(now ProgramStatus) {
	if s.adapter.Box == nil {
		return
	}
	if now.State == "working" {
		s.det.Worked()
	}
	named := ""
	if now.State == "blocked" {
		named = squeezed(safely(now.Msg, maxFull))
	}
	if s.named != "" && s.named != named {
		s.over = append(s.over[max(0, len(s.over)-maxStatuses):], overDialog{named: s.named, at: time.Now(), by: s.namedBy})
	}
	if s.named != named {
		s.named, s.namedBy = named, ""
	}
}

// namedIn tells whether the tool's words name the call that h asks about.
func (h *question) namedIn(words string) bool {
	return h.rec.Subject != "" && strings.HasSuffix(words, ":"+squeezed(h.rec.Subject))
}

// endOver marks the hooks' questions whose dialogs the tool has named and which are over: each ends the first of the
// same words.
func (s *session) endOver() {
	s.over = slices.DeleteFunc(s.over, func(o overDialog) bool {
		for _, h := range s.hooks {
			if h.goneAt.IsZero() && h.namedIn(o.named) && o.at.After(h.rec.CreatedAt) {
				if h.dialog != nil && h.dialog == s.seen {
					s.spent, s.spentAt = s.seen, time.Now()
				}
				h.dialog, h.goneAt = nil, o.at.Add(-dialogGone) // the tool says so: no repaint
				if o.by != "" {
					h.typedBy, h.typedAt = o.by, o.at
				}
				return true
			}
		}
		return time.Since(o.at) > hookUnasked
	})
}

// hookStep ends hooks' questions that are over without us: their dialog is gone, the tool says that it asks nothing any
// more, or the hook itself is gone.
func (s *session) hookStep() {
	if len(s.hooks) == 0 {
		return
	}
	s.watchCalm()
	s.endOver()
	for _, h := range slices.Clone(s.hooks) {
		gone := !h.goneAt.IsZero() && s.due(h.goneAt.Add(dialogGone))
		quiet := !s.calm.IsZero() && s.due(later(s.calm, h.rec.CreatedAt).Add(hookUnasked))
		switch {
		case h.rec.Status == Injected:
			if s.taken(h) {
				s.passedOn(h)
			}
		case h.rec.Open() && (gone || quiet && h.dialog == nil):
			s.end(h, Canceled, "answered in the terminal, or given up by the tool")
		case h.rec.Status == Created && h != s.q && s.due(h.rec.ExpiresAt):
			s.end(h, Canceled, "its time was over before it could be asked: the dialog asks")
		case s.due(h.checkAt):
			h.checkAt = time.Now().Add(hookCheck)
			s.checkHook(h)
		}
		s.due(h.checkAt)
	}
}

// later is the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// watchCalm keeps since when a tool that speaks the protocol says that it does not ask.
func (s *session) watchCalm() {
	state := s.det.Screen.Status().State
	if s.adapter.Box == nil || state == "" || state == "blocked" {
		s.calm = time.Time{}
	} else if s.calm.IsZero() {
		s.calm = time.Now()
	}
}

// checkHook ends a question whose hook does not live any more. It lives until it has passed its answer on.
func (s *session) checkHook(h *question) {
	if s.st.Alive(h.rec.ID) {
		return
	}
	v, err := s.st.View()
	if err != nil || v.Prompts[h.rec.ID] == nil {
		return
	}
	now := v.Prompts[h.rec.ID]
	switch {
	case now.Open():
		s.end(h, Canceled, "the tool gave up its question")
	case now.Status == ReplyReceived || now.Status == Expired:
		s.end(h, Failed, "the tool's hook ended before it passed the answer on")
	}
}

// end takes a question out: as to says and why, or, where it was Canceled or Failed and somebody pressed keys for it,
// as answered by them. "" when the record says it already. Its message is edited, and the next question comes.
func (s *session) end(q *question, to State, why string) {
	if to == Canceled && s.decidedMeanwhile(q, why) {
		return
	}
	switch {
	case to == "":
	case q.rec.Status == "":
	case q.typedBy != "" && q.rec.Open():
		s.move(q.rec.ID, Resolved, func(r *PromptRecord) { r.DecidedBy, r.Value = ref(q.typedBy), nil })
	case q.rec.Open() || to != Canceled:
		moved := s.move(q.rec.ID, to, func(r *PromptRecord) { r.Reason = why })
		if !moved && to == Canceled && s.decidedMeanwhile(q, why) {
			return
		}
	}
	if q.unsend != nil {
		q.unsend()
	}
	s.hooks = slices.DeleteFunc(s.hooks, func(h *question) bool { return h == q })
	if s.q == q {
		s.q = nil
	}
	if q.screen != nil && s.seen == q.screen {
		s.seen = nil // what expired, failed or was left to the terminal is not asked again by itself
	}
	if v, err := s.st.View(); err == nil && v.Prompts[q.rec.ID] != nil {
		s.settle(*v.Prompts[q.rec.ID], s.rec)
	}
	s.advance()
}

// decidedMeanwhile takes notice of a decision that came in the moment in which q was to be canceled: a hook goes on and
// passes it on, which true tells; what would have to be typed fails, for the question is gone.
func (s *session) decidedMeanwhile(q *question, why string) (goesOn bool) {
	v, err := s.st.View()
	if err != nil || v.Prompts[q.rec.ID] == nil || v.Prompts[q.rec.ID].Status != ReplyReceived {
		return false
	}
	q.rec = *v.Prompts[q.rec.ID]
	if q.screen == nil {
		return true
	}
	s.move(q.rec.ID, Failed, func(r *PromptRecord) { r.Reason = why + " before the answer was typed" })
	return false
}

// byID is the question with this id, nil when we have none.
func (s *session) byID(id string) *question {
	if s.q != nil && s.q.rec.ID == id {
		return s.q
	}
	for _, h := range s.hooks {
		if h.rec.ID == id {
			return h
		}
	}
	return nil
}

// move makes one transition, and keeps our copy true.
func (s *session) move(id string, to State, change func(*PromptRecord)) bool {
	var after PromptRecord
	moved, err := s.st.Move(id, to, func(r *PromptRecord) {
		change(r)
		after = *r
	})
	after.Status = to
	if q := s.byID(id); moved && q != nil {
		q.rec = after
	}
	return s.stored("recording a prompt", err) && moved
}

func asIs(*PromptRecord) {}

// questionStep stores the question in force, sends it, lets it be typed, or expires it, when it is time.
func (s *session) questionStep() {
	q := s.q
	if s.gate != nil || q == nil || !s.due(q.askAt) {
		return
	}
	if q.rec.Status == "" && !s.create(q) {
		return
	}
	switch {
	case q.decided:
		if s.due(q.shownAt.Add(dialogGrace)) {
			s.gate = newGate(q)
		}
	case !q.rec.Open(): // its hook passes the answer on
	case q.rec.Status == Created && s.interactive && !s.due(s.lastKey.Add(s.cfg.Away)): // somebody types here
	case s.due(q.rec.ExpiresAt):
		s.expire(q)
	case q.rec.Status == Created:
		fits := func(r *PromptRecord) { r.ShownAll = !r.Cut && fitsMessage(r) }
		if s.move(q.rec.ID, Routed, fits) {
			s.askPhone(q)
		}
	case q.rec.Status == AwaitingReply && s.due(q.remind):
		s.settle(q.rec, s.rec)
		q.remind = remindAt(&q.rec)
		s.due(q.remind)
	}
}

func remindAt(p *PromptRecord) time.Time { // a message shows the time left as it was for half of it: it is no clock
	return time.Now().Add(max(time.Until(p.ExpiresAt)/2, time.Minute))
}

// expire ends a question that nobody answered. A hook refuses then. For any other, only what is known to refuse is
// typed, and nothing at all while somebody may still feed standard input.
func (s *session) expire(q *question) {
	why := fmt.Sprintf("no answer in %d s", int(q.rec.ExpiresAt.Sub(q.rec.CreatedAt).Seconds()))
	byHook := q.screen == nil
	expired := s.move(q.rec.ID, Expired, func(r *PromptRecord) {
		r.Reason, r.Value = why, r.SafeDefault
		if s.fed && !byHook {
			r.Value = nil
		}
	})
	v, err := s.st.View()
	switch {
	case !expired && err == nil && v.Prompts[q.rec.ID] == nil: // it vanished from the state
		s.end(q, "", "")
	case !expired: // somebody decided in this very moment, or the state is in trouble
		s.next = time.Now().Add(judgeEvery)
	case byHook:
		q.checkAt = time.Now()
	case q.rec.Value == nil:
		s.end(q, "", "")
	default:
		q.decided, s.next = true, time.Now()
	}
}

// create stores what the screen asks, or tries again later.
func (s *session) create(q *question) bool {
	p, now := q.screen, time.Now()
	life := s.cfg.Timeout
	if p.Permission {
		life = s.cfg.PermissionTimeout
	}
	q.rec = PromptRecord{Head: Head{ID: newID()}, Prompt: *p, SessionID: s.rec.ID, Confidence: p.Confidence(),
		Source: "screen", Cwd: s.rec.Cwd, Status: Created, Nonce: newNonce(), CreatedAt: now.UTC(),
		ExpiresAt: now.Add(life).UTC(), Key: idempotencyKey(s.rec.ID, p.Excerpt, now)}
	if p.Idle {
		q.rec.Full, q.rec.MaxLength = cmp.Or(s.answer, s.det.Words()), maxMessage
	}
	s.rec.Prompts++
	if !s.put("recording a question", ref(q.rec), ref(s.rec)) {
		s.rec.Prompts--
		q.rec, q.askAt = PromptRecord{}, now.Add(retryEvery)
		return s.due(q.askAt)
	}
	return true
}

// followed is a record as somebody else changed it: a decision, a hook's question, the phone's wish.
func (s *session) followed(rec Record) {
	switch r := rec.(type) {
	case *InputRecord:
		if r.Status == "queued" {
			s.inputs = append(s.inputs, r)
		}
	case *PromptRecord:
		q := s.byID(r.ID)
		if q == nil {
			if r.Source == "hook" && r.Status == Created {
				s.hookAsked(*r)
			}
			return
		}
		typing := s.gate != nil && s.gate.q == q
		if typing || r.Status == q.rec.Status {
			return
		}
		s.changed(q, r)
	}
}

// changed takes over what has become of a question.
func (s *session) changed(q *question, r *PromptRecord) {
	switch {
	case r.Status == ReplyReceived:
		q.rec = *r
		q.decided = q.screen != nil
		if *cmp.Or(r.DecidedBy, ref("")) == "cli:answer" {
			s.notify(Notice{Ring: true, Text: "⌨ answered with `atlasbridge answer`: " + valueName(r, r.Value)})
		}
	case r.Status == Injected: // by its hook
		q.rec = *r
		q.passed = time.Now()
	case r.Status == Failed || r.Status == Canceled || r.Status == Resolved:
		q.rec = *r
		s.end(q, "", "")
	}
}

// taken tells whether the tool has taken the answer that its hook gave it: the dialog is gone, or there was none.
func (s *session) taken(h *question) bool {
	if !s.due(h.passed.Add(s.cfg.EchoWindow)) {
		return false // a key on its way may be there first
	}
	none := h.dialog == nil && !h.namedIn(s.named)
	return none || !h.goneAt.IsZero() || s.due(h.passed.Add(dialogGone))
}

// passedOn ends a question whose hook has given its answer to the tool. A key that was pressed here in the same moment
// may have been faster: that is said.
func (s *session) passedOn(q *question) {
	s.move(q.rec.ID, Resolved, func(r *PromptRecord) {
		since := q.passed
		if r.DecidedAt != nil {
			since = *r.DecidedAt
		}
		if q.typedBy == "cli:local" && q.typedAt.After(since.Add(-sameMoment)) {
			r.Reason = bothAnswered
		}
	})
	if q.dialog != nil {
		s.det.Sleep(time.Now().Add(s.cfg.EchoWindow))
		s.seen = nil
	}
	s.end(q, "", "")
}

func (s *session) activityStep() { // records what is done when that has changed, and now and then when output last came
	doing, last := s.det.Activity(), s.det.LastOutput().UTC()
	changed := doing != s.rec.Activity
	wait := cmp.Or(when(changed, doingEvery), outputEvery)
	if (changed || last.After(*cmp.Or(s.rec.LastSeen, &time.Time{}))) && s.due(s.doingAt.Add(wait)) {
		s.doingAt, s.rec.Activity, s.rec.LastSeen = time.Now(), doing, &last
		s.put("recording the session", ref(s.rec))
	}
}

/* ===== What the phone wants of a session ===== */

// inputStep does what the phone asked for, one after the other.
func (s *session) inputStep() {
	for len(s.inputs) > 0 && s.gate == nil {
		next := s.inputs[0]
		s.inputs = s.inputs[1:]
		s.input(next)
	}
}

// input does one thing: text, keys, a look at the screen, the question again, the end.
func (s *session) input(r *InputRecord) {
	switch r.Kind {
	case "answer": // the tool's own Stop hook: the beginning of its last answer
		s.answer = r.Text
		s.inputDone(r, "", Notice{})
	case "screen", "last", "show_recent":
		screen := []rune(visible(redact(s.det.Screen.Text())))
		if r.Kind != "screen" {
			screen = screen[max(0, len(screen)-500):]
		}
		s.inputDone(r, "", Notice{Mono: string(screen)})
	case "cancel":
		s.terminate()
		s.inputDone(r, "", Notice{Text: "⏹ ending the session"})
	case "again":
		s.askAgain(r)
	case "keys": // the child sees them as typed: ^C becomes SIGINT where its terminal is set so, else a byte
		for _, name := range strings.Fields(r.Text) {
			keys, _ := keyBytes(name, s.det.Screen.AppCursorKeys())
			s.inject(keys, r.By)
		}
		s.inputDone(r, "", Notice{Text: "⌨ pressed " + r.Text})
	case "text":
		s.inputText(r)
	default:
		s.inputDone(r, "this session does not know how to do that", Notice{})
	}
}

// inputText lets the gate type into an input box or a REPL; it answers when it has typed.
func (s *session) inputText(r *InputRecord) {
	switch {
	case s.q != nil && !s.q.rec.Idle && s.q.rec.Status != "":
		s.inputDone(r, questionOpen, Notice{})
	case s.adapter.Name == "generic" && s.pty.State().Reading == ReadingBusy:
		s.inputDone(r, "the program is not reading its keyboard just now", Notice{})
	default:
		s.gate = newInputGate(r)
		s.gate.until = later(s.gate.until, s.lastKey.Add(sendTime+submitTime))
	}
}

// askAgain makes a new prompt of what stands on the screen, after one that expired or could not be answered.
func (s *session) askAgain(r *InputRecord) {
	if s.q != nil {
		s.inputDone(r, "a question is open already", Notice{})
		return
	}
	p := s.det.Look(s.pty.State(), time.Now())
	if p == nil || p.Idle {
		s.inputDone(r, "the question is no longer on the screen", Notice{})
		return
	}
	s.seen = nil
	s.det.Again()
	s.inputDone(r, "", Notice{})
}

func (s *session) inputDone(r *InputRecord, why string, reply Notice) { // tells; an idle tool has then been answered
	after, text := *r, cleanText(r.Text)
	if after.Status, after.Reason = "done", why; why != "" {
		after.Status, reply = "refused", Notice{Text: "✗ " + why, Ring: true}
	} else if r.Kind == "text" {
		s.stored("auditing an input", s.st.Audit().Append(Event{"INPUT_FORWARDED", s.rec.ID, "",
			[]Field{{"by", r.By}, {"bytes_len", len(text)}, {"text_sha256", fmt.Sprintf("%x", sha256.Sum256([]byte(text)))}}}))
		reply.Text = "✓ sent" + reply.Text
	}
	s.put("recording an input", &after)
	if reply.ReplyTo = r.ReplyTo; r.Kind != "answer" {
		s.notify(reply)
	}
	if s.q != nil && s.q.rec.Idle && why == "" && r.Kind == "text" {
		s.q.typedBy = r.By
		s.end(s.q, Canceled, "")
	}
}

type localChannel struct{}                                                             // reaches nobody: questions wait
func (localChannel) Ask(context.Context, *PromptRecord, *SessionRecord) (int64, error) { return 0, nil }
func (localChannel) Settle(context.Context, *PromptRecord, *SessionRecord) error       { return nil }
func (localChannel) Notify(context.Context, Notice) (int64, error)                     { return 0, nil }
func (localChannel) Close() error                                                      { return nil }

// send makes one blocking call of the channel beside the loop, which runs done then; pacing and retries are its own.
func (s *session) send(call func() (int64, error), done func(msg int64, err error)) {
	s.sending++
	s.spawn(func() {
		msg, err := call()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
			s.log.Error("sending to the channel", "error", err.Error())
		}
		s.events <- func() { s.sending--; done(msg, err) }
	})
}

// askPhone sends a question while it is worth it; one that could not be sent stays routed.
func (s *session) askPhone(q *question) {
	p, of := q.rec, s.rec
	ctx, cancel := context.WithDeadline(s.ctx, p.ExpiresAt)
	q.unsend, q.remind = cancel, remindAt(&p)
	s.send(func() (int64, error) { return s.ch.Ask(ctx, &p, &of) }, func(msg int64, err error) {
		if err != nil || s.move(p.ID, AwaitingReply, func(r *PromptRecord) { r.MsgID = msg }) {
			return
		}
		if v, err := s.st.View(); err == nil && v.Prompts[p.ID] != nil { // it was answered meanwhile
			s.settle(*v.Prompts[p.ID], s.rec)
		}
	})
}

func (s *session) settle(p PromptRecord, of SessionRecord) { // has its message say what has become of it
	s.send(func() (int64, error) { return 0, s.ch.Settle(s.ctx, &p, &of) }, func(int64, error) {})
}

func (s *session) notify(n Notice) {
	n.SessionID = s.rec.ID
	s.send(func() (int64, error) { return s.ch.Notify(s.ctx, n) }, func(int64, error) {})
}

/* ===== The gate: the only way an answer becomes bytes ===== */

// gate types one answer, or one text, closed loop. While it exists the keyboard is held back and no question is looked
// for. Before its first key the question must stand on the screen as it was shown, all of it; before Enter is pressed
// in a menu the choice under the pointer must be the one that was chosen, by its label. A text goes into an empty input
// box alone. If the screen does not follow in time it stops and tells the operator. It never types at what it has not
// just seen, and counts nothing as typed that was not written. A step is one look, and one key or the reason why there
// is none.
type gate struct {
	q     *question    // nil: free input
	input *InputRecord // then this
	text  string       // what is typed into an input box
	draft string       // what stood in the box: it is put back

	phase gatePhase
	until time.Time // the screen must have followed by then
	keys  []byte    // for the writer, until it reports
	after gateMove  // what follows when they are written

	value  string    // what was decided
	secret *string   // what was given for a secret, nil while it is not known
	want   []int     // the choices to make, as indexes into those that were shown; several only in a Multi menu
	last   *Prompt   // the menu before the last key
	stood  string    // SHA-256 of what stood on the screen when the first key went
	wrote  bool      // something of ours has reached the child
	whole  bool      // the last of it has
	leftAt time.Time // when the question was seen to have left the screen
}

// gateMove is where the gate goes when its keys are written, and how long the screen has then to follow.
type gateMove struct {
	to     gatePhase
	within time.Duration
	last   bool    // these keys are the last
	menu   *Prompt // the menu as it was before these keys
	draft  bool    // these keys are the draft that was put aside
}

// gatePhase is how far the gate is.
type gatePhase int

const (
	gateLook    gatePhase = iota // nothing is typed
	gateMenu                     // a key moved the pointer or a tick of a menu
	gateTaken                    // the choice is typed: the dialog must go
	gateReview                   // the ticks are made: the review page must come, or the menu go
	gateCleared                  // the keys that empty the input box are typed
	gateText                     // the text is typed: it must stand in the box, then Enter follows
	gateSent                     // Enter is typed: the text must leave the box
	gateAgain                    // Enter is typed a second time
	gateRestore                  // the box is empty again: the draft is put back
	gateEcho                     // all is typed: what the child echoes passes
)

// newGate types the decision about q.
func newGate(q *question) *gate {
	g := &gate{q: q, until: time.Now().Add(keyGrace + lookTime)}
	if q.rec.Value != nil {
		g.value, g.text = *q.rec.Value, cleanText(*q.rec.Value)
	}
	return g
}

// newInputGate types an operator's text into the input box.
func newInputGate(r *InputRecord) *gate {
	return &gate{input: r, text: cleanText(r.Text), until: time.Now().Add(submitTime)}
}

// gateStep looks once, and types one key or finds why it may not. Past its time that ends the gate.
func (s *session) gateStep() {
	g := s.gate
	if g == nil || s.inFlight || len(s.typing) > 0 || len(g.keys) > 0 {
		return // the writer reports first
	}
	if g.phase == gateLook && !s.due(s.lastKey.Add(keyGrace)) {
		return
	}
	tty, now := s.pty.State(), time.Now()
	s.cast.tty(tty, now)
	s.due(now.Add(gatePoll)) // a repaint may be half done
	late := !now.Before(g.until)
	if s.unread() > 0 { // what comes may take the question away
		if g.phase != gateEcho && now.After(g.until.Add(busyTime)) {
			s.gateFail("the program keeps writing")
		}
		return
	}
	look := s.det.Look(tty, now)
	why := s.gatePhaseStep(look, late)
	if why != "" && late && s.gate == g {
		s.gateFail(why)
	}
}

// gatePhaseStep does the step of the phase the gate is in.
func (s *session) gatePhaseStep(look *Prompt, late bool) (why string) {
	g := s.gate
	switch g.phase {
	case gateLook:
		if g.input != nil || g.q.rec.Idle {
			return s.boxStep(look)
		}
		return s.firstStep(look)
	case gateMenu:
		return s.menuStep(look)
	case gateTaken:
		return s.takenStep(look)
	case gateReview:
		return s.reviewStep(look)
	case gateCleared:
		return s.clearedStep()
	case gateText, gateSent, gateAgain:
		return s.textStep(look, late)
	case gateRestore:
		return s.restoreStep(late)
	}
	s.noteLeft(look) // gateEcho
	if late {
		s.gateOver()
	}
	return ""
}

// noteLeft keeps when the question was first seen to have gone after it was answered.
func (s *session) noteLeft(look *Prompt) {
	g := s.gate
	if g.q != nil && g.q.screen != nil && g.leftAt.IsZero() && !g.q.screen.same(look) {
		g.leftAt = time.Now()
	}
}

// press hands keys to the writer; when they are written the gate moves on. Without keys it moves at once.
func (s *session) press(keys string, then gateMove) string {
	g := s.gate
	g.keys, g.after = []byte(keys), then
	if keys == "" {
		s.gateMoves()
	}
	return ""
}

// gateWrote takes the writer's report. Keys that were held back because output was waiting are not lost: the gate looks
// again. An error ends it: what was not written was not typed.
func (s *session) gateWrote(keys []byte, err error) {
	g := s.gate
	if g == nil {
		return
	}
	g.keys = nil
	if errors.Is(err, errUnread) {
		return
	}
	if err != nil {
		s.gateFail("it could not be typed: " + err.Error())
		return
	}
	g.wrote = true
	s.det.Typed(keys, time.Now())
	s.cast.event("i", string(keys), time.Now())
	s.gateMoves()
}

// gateMoves goes where the keys that are written lead.
func (s *session) gateMoves() {
	g := s.gate
	g.phase, g.until = g.after.to, time.Now().Add(g.after.within)
	g.whole = g.whole || g.after.last
	g.last = g.after.menu
	if g.after.draft {
		g.draft = ""
	}
	if g.phase == gateEcho {
		s.det.Sleep(g.until)
		s.seen = nil
	}
}

// echo is the last move of the gate.
func (s *session) echo() gateMove {
	return gateMove{to: gateEcho, within: s.cfg.EchoWindow, last: true}
}

// firstStep types the answer only where the question stands as it was shown and nobody else may have answered it.
func (s *session) firstStep(now *Prompt) (why string) {
	g := s.gate
	shown, rec := g.q.screen, &g.q.rec
	if shown == nil {
		return "a question of the tool's hook is answered by the hook alone"
	}
	if !shown.same(now) {
		return "the question is no longer on the screen as it was shown"
	}
	if g.q.typedBy != "" {
		return "somebody pressed a key for it since: look at the terminal"
	}
	g.stood = digest([]byte(shown.standing(now).Shown))
	if rec.Secret {
		if secret, given := s.st.TakeSecret(rec.ID); given {
			g.secret = &secret
		}
		if g.secret == nil {
			return "the password is not known any more"
		}
		return s.press(s.pasted(cleanText(*g.secret))+"\r", s.echo())
	}
	g.want = nil
	for key := range strings.SplitSeq(g.value, ",") {
		if i := slices.IndexFunc(shown.Choices, func(c Choice) bool { return c.Key == key }); i >= 0 {
			g.want = append(g.want, i)
		}
	}
	if len(g.want) > 0 {
		return s.menuStep(now)
	}
	switch {
	case g.value == "esc" || g.value == "cancel":
		return s.press("\x1b", s.echo())
	case g.value == "enter" && (rec.Type == ConfirmEnter || rec.Type == Unknown), g.value == enterAlone:
		return s.press("\r", s.echo())
	case rec.Type == FreeText || rec.Type == Unknown:
		return s.press(s.pasted(cleanText(g.value))+"\r", s.echo())
	}
	return "there is no choice " + g.value
}

// standing is now in the form in which p was shown.
func (p *Prompt) standing(now *Prompt) *Prompt {
	if p.bare && !now.bare {
		now = now.withoutAbove()
		now.publish()
	}
	return now
}

// place is the index in now of the choice that was shown as number i, by its label; −1 when it is not there, or not
// alone.
func (g *gate) place(now *Prompt, i int) int {
	label, at, found := g.q.screen.Choices[i].Label, -1, 0
	for k, c := range now.Choices {
		if c.Label == label {
			at, found = k, found+1
		}
	}
	if found > 1 && i < len(now.Choices) && now.Choices[i].Label == label && len(now.Choices) == len(g.q.screen.Choices) {
		return i // two of the same words, in the same places
	}
	if found != 1 {
		return -1
	}
	return at
}

// menuStep presses the next key once the last one shows in the menu: the choice's own, an arrow towards it, a tick,
// Enter.
func (s *session) menuStep(now *Prompt) (why string) {
	g := s.gate
	shown := g.q.screen
	if !shown.follows(now) {
		return "the menu did not follow the keys; look at the terminal"
	}
	if g.last != nil && now.Pointer == g.last.Pointer && slices.Equal(now.Ticked, g.last.Ticked) && now.all == g.last.all {
		return "the menu did not follow the keys; look at the terminal"
	}
	target := g.place(now, g.want[0])
	if now.Multi {
		var done bool
		if target, done = g.nextTick(now); done {
			return s.press(cmp.Or(now.Submit, "\r"), gateMove{to: gateReview, within: followTime, last: true, menu: now})
		}
	}
	if target < 0 {
		return "the choice is no longer on the screen"
	}
	chosen, moved := s.echo(), gateMove{to: gateMenu, within: followTime, menu: now}
	if s.adapter.Box != nil && now.Pointer >= 0 {
		chosen = gateMove{to: gateTaken, within: followTime, last: true}
	}
	keys := now.Choices[target].Keys
	switch {
	case keys != "" && now.Multi:
		return s.press(keys, moved)
	case keys != "":
		return s.press(keys, chosen)
	case now.Pointer < 0:
		return "the menu shows no pointer to move"
	case now.Pointer == target && now.Multi:
		return s.press(" ", moved)
	case now.Pointer == target:
		return s.press("\r", chosen)
	}
	return s.press(s.arrow(now, target), moved)
}

// nextTick is the first choice in now whose tick is not as wanted; done: all are.
func (g *gate) nextTick(now *Prompt) (target int, done bool) {
	for i, ticked := range now.Ticked {
		wanted := slices.ContainsFunc(g.want, func(w int) bool { return g.place(now, w) == i })
		if ticked != wanted {
			return i, false
		}
	}
	return -1, true
}

// arrow is the key that moves the pointer of a menu one step towards target.
func (s *session) arrow(now *Prompt, target int) string {
	forward := target > now.Pointer
	name := "UP"
	switch {
	case now.Axis == "horizontal" && forward:
		name = "RIGHT"
	case now.Axis == "horizontal":
		name = "LEFT"
	case forward:
		name = "DOWN"
	}
	keys, _ := keyBytes(name, s.det.Screen.AppCursorKeys())
	return keys
}

// takenStep waits until a known tool's dialog has gone: what still stands did not take the key.
func (s *session) takenStep(now *Prompt) (why string) {
	s.noteLeft(now)
	if s.gate.q.screen.same(now) {
		s.gate.whole = false
		return "the dialog did not take the answer; look at the terminal"
	}
	return s.press("", s.echo())
}

// reviewStep confirms the review page that some menus with ticks show before they are done.
func (s *session) reviewStep(now *Prompt) (why string) {
	g := s.gate
	if g.q.screen.follows(now) {
		g.whole = false
		return "the menu did not take the answer; look at the terminal"
	}
	if now == nil && time.Now().Before(g.until) { // its review page may come yet
		return ""
	}
	keys := ""
	if now != nil {
		for _, c := range now.Choices {
			if strings.HasPrefix(strings.ToLower(c.Label), "submit") {
				keys = c.Keys
			}
		}
	}
	return s.press(keys, s.echo())
}

// pasted is text as it is typed: no line end in it presses Enter.
func (s *session) pasted(text string) string {
	if s.det.Screen.BracketedPaste() {
		return "\x1b[200~" + text + "\x1b[201~"
	}
	return strings.ReplaceAll(text, "\n", " ")
}

// boxStep types the text into an input box that is empty. A draft of one row is taken out first, where the tool has
// keys for it; any other is left alone, and the operator is told.
func (s *session) boxStep(look *Prompt) (why string) {
	g := s.gate
	if look != nil && !look.Idle {
		return questionOpen
	}
	box := s.det.Box(s.pty.State(), time.Now())
	switch {
	case !box.found:
		return "there is no input box on the screen"
	case s.draftDoesNotShow(box):
		return "somebody types at the keyboard, and the input box does not show it yet"
	case box.draft == "" || s.adapter.Box == nil && box.whole:
		return s.typeText()
	case box.whole && s.adapter.Clear != "":
		g.draft = box.draft
		return s.press(s.adapter.Clear, gateMove{to: gateCleared, within: submitTime})
	}
	return "there is a draft in the input box, nothing was typed: “" + safely(box.draft, 200) +
		"”. Send it, or empty the box (/keys CTRL_U), then send yours again"
}

// clearedStep types the text when the box is empty.
func (s *session) clearedStep() (why string) {
	if box := s.det.Box(s.pty.State(), time.Now()); !box.found || box.draft != "" {
		return "the draft in the input box could not be put aside: look at the terminal"
	}
	return s.typeText()
}

// typeText types the text without Enter. ! runs a command, / opens a dialog, a backslash at the end keeps Enter from
// sending (measured on claude 2.1): none of them may.
func (s *session) typeText() string {
	text := s.gate.text
	if s.adapter.EscapeBang && text != "" {
		switch text[0] {
		case '/':
			text = "\\" + text
		case '!', '#':
			text = " " + text
		}
		if strings.HasSuffix(text, "\\") {
			text += " "
		}
	}
	return s.press(s.pasted(text), gateMove{to: gateText, within: s.adapter.SubmitDelay})
}

// textStep presses Enter once the text stands in the box, twice if need be, until it has left.
func (s *session) textStep(look *Prompt, late bool) (why string) {
	g := s.gate
	held := s.holdsText()
	dialog := look != nil && !look.Idle // takes no text, and Enter would answer it
	sent := gateMove{to: gateSent, within: submitTime}
	switch {
	case g.phase == gateText && dialog && !held:
		return questionOpen
	case g.phase == gateText && !late:
		return ""
	case g.phase == gateText && s.adapter.Box != nil && !held && time.Now().Before(g.until.Add(submitTime)):
		return ""
	case g.phase == gateText && s.adapter.Box != nil && !held:
		return "the text does not show in the input box: look at the terminal"
	case g.phase == gateText:
		return s.press("\r", sent)
	case s.adapter.Box == nil || !held:
		g.whole = true
		if g.draft != "" {
			return s.press("", gateMove{to: gateRestore, within: submitTime})
		}
		return s.press("", s.echo())
	case g.phase == gateSent && late:
		sent.to = gateAgain
		return s.press("\r", sent)
	case g.phase == gateSent:
		return ""
	}
	return "the text is in the input box but was not taken; look at the terminal"
}

// holdsText tells whether the end of the text stands where the cursor is, or a tool shows it folded as a paste.
func (s *session) holdsText() bool {
	row, _, _ := s.det.Screen.Cursor()
	end := s.gate.text[strings.LastIndex(s.gate.text, "\n")+1:]
	end = strings.TrimSpace(strings.ToValidUTF8(end[max(0, len(end)-16):], ""))
	above, here := strings.Trim(s.det.Screen.Row(max(0, row-1)), boxFrame), strings.Trim(s.det.Screen.Row(row), boxFrame)
	box := above + here
	return strings.Contains(squeezed(box), squeezed(end)) || strings.Contains(box, "[Pasted")
}

// boxFrame is what may stand at the ends of an input box's rows.
const boxFrame = " " + uprights

// restoreStep puts the draft back into the box, which is empty again; where it does not become so, the operator is told
// what it was.
func (s *session) restoreStep(late bool) string {
	g := s.gate
	box := s.det.Box(s.pty.State(), time.Now())
	if box.found && box.draft == "" {
		back := s.echo()
		back.draft = true
		return s.press(s.pasted(g.draft), back)
	}
	if late {
		return s.press("", s.echo())
	}
	return ""
}

// gateFail ends the gate before all was typed.
func (s *session) gateFail(why string) {
	s.gate.whole = false
	s.gateEnds(why)
}

// gateOver ends the gate after its echo window, or when the program has ended.
func (s *session) gateOver() {
	why := ""
	if !s.gate.whole {
		why = "the program ended before the answer was typed"
	}
	s.gateEnds(why)
}

// gateEnds lets the keyboard in again and records that everything was typed, or why not. The words of a refusal that no
// hook took are the tool's next message.
func (s *session) gateEnds(why string) {
	g := s.gate
	s.gate, s.next = nil, time.Now()
	defer s.release(g)
	if g.input != nil {
		var more Notice
		if why == "" && g.draft != "" {
			more.Text = "; a draft stood in the box and could not be put back: “" + safely(g.draft, 200) + "”"
		}
		s.inputDone(g.input, why, more)
		return
	}
	rec := g.q.rec
	if why != "" {
		if rec.Status == Expired {
			why = rec.Reason + "; nothing was typed: " + why
		}
		s.end(g.q, Failed, why)
		if rec.Status != Expired && !rec.Idle {
			s.askAnew(g.q.screen)
		}
		return
	}
	s.move(rec.ID, Injected, func(r *PromptRecord) { r.ScreenSHA = g.stood })
	s.move(rec.ID, Resolved, asIs)
	if rec.Status == ReplyReceived && rec.Permission && rec.Reason != "" && s.adapter.Box != nil {
		s.put("recording an input", &InputRecord{Head: Head{ID: newID()}, SessionID: s.rec.ID, Kind: "text",
			By: *rec.DecidedBy, Text: rec.Reason, ReplyTo: rec.MsgID, PromptID: rec.ID, Status: "queued"})
	}
	s.end(g.q, "", "")
}

// askAnew asks again what could not be answered, if it still stands.
func (s *session) askAnew(shown *Prompt) {
	if shown == nil || s.q != nil || s.rec.ExitCode != nil || !shown.same(s.det.Look(s.pty.State(), time.Now())) {
		return
	}
	s.seen = nil
	s.det.Again()
}

func cleanText(text string) string { // of an operator, safe to type
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(strings.ToValidUTF8(text, ""))
	return clipBytes(strings.TrimRight(reControl.ReplaceAllString(text, ""), "\n"), maxMessage)
}
func clipBytes(text string, n int) string { return strings.ToValidUTF8(text[:min(n, len(text))], "") } // between runes
func idempotencyKey(session, excerpt string, now time.Time) string { // the same for the same words within 5 s
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s:%s:%d", session, excerpt, now.Unix()/5)))
}

func (s *session) streamStep() { // gathers output for flush_ms and keeps one message at a time with the sender
	t := &s.stream
	if !t.flushAt.IsZero() && s.due(t.flushAt) {
		t.flushAt = time.Time{}
		s.streamTake(s.rec.Activity == "idle" || strings.HasPrefix(s.rec.Activity, "waiting"))
	}
	if t.busy || s.ctx.Err() != nil {
		return
	}
	text := t.message(min(s.cfg.MaxChars, partUnits))
	if t.cut > 0 && text == t.shown { // the message says it all already: the next one begins
		t.delivered(t.msg, nil)
		text = t.message(min(s.cfg.MaxChars, partUnits))
	}
	if text != t.shown {
		n := Notice{SessionID: s.rec.ID, Mono: text, Edit: t.msg}
		t.shown, t.busy = text, true
		s.send(func() (int64, error) { return s.ch.Notify(s.ctx, n) }, t.delivered)
	}
}

func (s *session) streamTake(settle bool) { // of more than the phone can keep up with the oldest is left out
	t := &s.stream
	lines, live := s.det.Transcript(settle)
	if !s.cfg.StripANSI { // the bytes as they came, escape sequences shown
		lines = strings.Split(string(t.raw), "\r\n")
		live = lines[len(lines)-1]
		lines, t.raw = lines[:len(lines)-1], []byte(live)
	}
	t.live = redact(visible(live))
	t.text += redact(visible(strings.Join(append(lines, ""), "\n")))
	if len(t.text) > maxBacklog {
		head, rest := cutText(t.text, min(s.cfg.MaxChars, partUnits))
		half := len(rest) - maxBacklog/2
		half += strings.IndexByte(rest[half:], '\n') + 1
		t.text = fmt.Sprintf("%s\n… (%d lines left out)\n%s", head, strings.Count(rest[:half], "\n"), rest[half:])
	}
}

func (s *session) capture(p *Prompt) { // a recording of what led to a question
	if os.Getenv("ATLASBRIDGE_CAPTURE_PROMPTS") != "1" || p.Secret {
		return
	}
	dir, now := filepath.Join(s.cfg.Dir, "captured_scenarios"), time.Now()
	os.MkdirAll(dir, 0o700)
	name := fmt.Sprintf("%s-%s-%s.cast", s.rec.Tool, p.Type, now.UTC().Format("20060102T150405.000"))
	c, _ := newCast(filepath.Join(dir, name), s.rec.Tool, s.size())
	c.output(s.det.Raw(), now)
	c.tty(s.pty.State(), now)
	c.close(now.Add(s.cfg.Stuck + time.Second))
}

/* ===== hook: what a tool's own hook system asks ===== */

// hook is one run of `atlasbridge hook`: the tool's JSON (measured on claude 2.1, codex has the same) becomes a prompt
// of the session, and the decision about it the tool's own answer. It is the second kind of session: it owns one prompt
// at a time, and holds a lock with its id for as long as it lives. What is unparsable, lost, late or killed prints
// nothing: the tool's dialog asks. An answer that could not be written was not given.
type hook struct {
	Event       string            `json:"hook_event_name"`
	Cwd         string            `json:"cwd"`
	Tool        string            `json:"tool_name"`
	Input       json.RawMessage   `json:"tool_input"`
	Suggestions []json.RawMessage `json:"permission_suggestions"`
	UseID       string            `json:"tool_use_id"`
	Agent       string            `json:"agent_type"`
	LastWords   string            `json:"last_assistant_message"`

	st      *Store
	session string
	last    string // id of the prompt that was asked last
	life    time.Duration
	release func() // of the lock of the last prompt
}

// maxHookFull is how much of a call's arguments is shown, in bytes: twenty messages. A longer one is not allowed from
// the phone.
const maxHookFull = 64 << 10

// cmdHook exits with 0 whatever happens: claude takes anything else for a failing hook and says so in the dialog.
func cmdHook(c *command) int {
	h := &hook{session: c.getenv("ATLASBRIDGE_SESSION"), release: func() {}}
	unparsable := json.NewDecoder(io.LimitReader(c.stdin, maxHookInput)).Decode(h)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a tool that is gone makes the write fail, and no more
	c.withState(func(s *Store) int {
		h.st = s
		if unparsable != nil || !s.Alive(h.session) { // the session's record may come later than its tool's first hook
			return 0
		}
		h.handle(c)
		return 0
	})
	return 0
}

// handle does what the event asks for.
func (h *hook) handle(c *command) {
	switch h.Event {
	case "PreToolUse":
		if err := h.st.Audit().Append(toolCall(h.session, h.Tool, h.UseID, h.Input)); err != nil {
			c.fail(err)
		}
	case "Stop": // the beginning of the tool's answer, for the session's idle notice
		words := &InputRecord{Head: Head{ID: newID()}, SessionID: h.session, Kind: "answer", By: "hook:Stop",
			Text: clip(visible(redact(h.LastWords)), 1000), Status: "queued"}
		if err := h.st.Update(func(*View) ([]Record, error) { return []Record{words}, nil }); err != nil {
			c.fail(err)
		}
	case "PermissionRequest":
		cfg, err := c.config(map[string]string{"permission_timeout_seconds": c.opts.text("timeout")})
		if err != nil {
			c.fail(err)
			return
		}
		h.life = cfg.PermissionTimeout
		h.decide(c)
	}
}

// decide asks, and passes the decision on to the tool. It is injected when it has been written.
func (h *hook) decide(c *command) {
	decision := h.ask(c.ctx)
	defer func() { h.release() }()
	if decision == nil {
		return
	}
	answer := map[string]any{"hookEventName": h.Event, "decision": decision}
	err := json.NewEncoder(c.stdout).Encode(map[string]any{"hookSpecificOutput": answer})
	if err != nil {
		why := "the tool did not take the answer: " + err.Error()
		_, err = h.st.Move(h.last, Failed, func(p *PromptRecord) { p.Reason = why })
	} else {
		_, err = h.st.Move(h.last, Injected, nil)
	}
	if err != nil {
		c.fail(err)
	}
}

// toolCall is the audit entry of one tool call: the arguments by their beginning, redacted.
func toolCall(session, tool, id string, input json.RawMessage) Event {
	arguments := clip(visible(redact(string(input))), 500)
	return Event{"TOOL_CALL", session, "", []Field{{"tool", tool}, {"tool_use_id", id}, {"arguments", arguments}}}
}

// hookQuestion is AskUserQuestion's input, one of its questions, or an option.
type hookQuestion struct {
	Question, Label, Description string
	MultiSelect                  bool
	Questions, Options           []hookQuestion
}

// ask returns the decision in claude's form, nil: the dialog has to make it. Claude's own questions get one together.
func (h *hook) ask(ctx context.Context) map[string]any {
	if h.Tool != "AskUserQuestion" {
		return h.permission(ctx)
	}
	var input hookQuestion
	var updated map[string]any
	if err := json.Unmarshal(h.Input, &input); err != nil || len(input.Questions) == 0 {
		return nil
	}
	if err := json.Unmarshal(h.Input, &updated); err != nil {
		return nil
	}
	answers := map[string]string{}
	for i, q := range input.Questions {
		p := questionPrompt(q, i+1, len(input.Questions))
		end := h.wait(ctx, p)
		if end == nil {
			return nil
		}
		if refused(end) {
			return denial(end)
		}
		answers[q.Question] = answerWords(&p, q, *end.Value)
	}
	updated["answers"] = answers
	return map[string]any{"behavior": "allow", "updatedInput": updated}
}

// questionPrompt is question i of n that claude asks with choices of its own.
func questionPrompt(q hookQuestion, i, n int) PromptRecord {
	p := PromptRecord{Prompt: Prompt{Type: MultipleChoice, Multi: q.MultiSelect}, MaxLength: maxMessage,
		Subject: safely(q.Question, maxFull)}
	p.Question = visible(redact(q.Question))
	if n > 1 {
		p.Question = fmt.Sprintf("(%d of %d) ", i, n) + p.Question
	}
	p.Full, p.Excerpt = p.Question, clip(p.Question, maxExcerpt)
	for k, o := range q.Options[:min(9, len(q.Options))] {
		key := strconv.Itoa(k + 1)
		p.Choices = append(p.Choices, Choice{Key: key, Label: clip(visible(redact(o.Label)), 60)})
		line := key + ". " + o.Label
		if o.Description != "" {
			line += ": " + o.Description
		}
		p.parts.among = append(p.parts.among, visible(redact(line)))
	}
	p.Full = strings.Join(append([]string{p.Question}, p.parts.among...), "\n")
	p.seal()
	p.publish()
	return p
}

// answerWords are the labels of the choices that were made, or the operator's own words.
func answerWords(p *PromptRecord, q hookQuestion, value string) string {
	keys := strings.ReplaceAll(value, " ", "")
	if !p.offered(keys) {
		return value
	}
	var chosen []string
	for key := range strings.SplitSeq(keys, ",") {
		if n, err := strconv.Atoi(key); err == nil && n >= 1 && n <= len(q.Options) {
			chosen = append(chosen, q.Options[n-1].Label)
		}
	}
	return strings.Join(chosen, ", ")
}

// refused tells whether the question ended in a refusal: by the operator, or because nobody answered.
func refused(end *PromptRecord) bool {
	return end.Status == Expired || end.Permission && *end.Value == hookDeny
}

// denial refuses with the operator's reason, or with why nobody answered.
func denial(end *PromptRecord) map[string]any {
	return map[string]any{"behavior": "deny", "message": cmp.Or(end.Reason, "The operator refused this.")}
}

// permission asks whether a call is allowed, and for how long.
func (h *hook) permission(ctx context.Context) map[string]any {
	end := h.wait(ctx, h.permissionPrompt())
	if end == nil {
		return nil
	}
	if refused(end) {
		return denial(end)
	}
	decision := map[string]any{"behavior": "allow"}
	if h.Tool == "ExitPlanMode" { // a plain allow is ignored here (measured)
		decision["updatedInput"] = map[string]any{}
	}
	switch *end.Value {
	case hookAllow:
		return decision
	case hookAlways: // all of them: one alone does not do what they do together (measured)
		decision["updatedPermissions"] = h.Suggestions
		return decision
	}
	return nil
}

// wait stores p and returns it as it was decided, nil when it was not, or no longer matters: at a signal, when the
// session has died or has ended it. The prompt's lock tells the session that its hook lives.
func (h *hook) wait(ctx context.Context, p PromptRecord) *PromptRecord {
	ctx, enough := context.WithTimeout(ctx, h.life+time.Minute)
	defer enough()
	ctx, stop := signal.NotifyContext(ctx, endSignals()...)
	defer stop()
	if h.last != "" { // of several questions, the one before
		if _, err := h.st.Move(h.last, Injected, nil); err != nil {
			return nil
		}
		h.release()
	}
	now := time.Now()
	p.ID, p.SessionID, p.Source, p.Cwd, p.Nonce, p.Status = newID(), h.session, "hook", h.Cwd, newNonce(), Created
	p.Confidence, p.Score, p.Signals, p.Tool, p.MaxLength = "high", 1, []string{"hook"}, h.Tool, maxMessage
	p.CreatedAt, p.ExpiresAt, p.Key = now.UTC(), now.Add(h.life).UTC(), idempotencyKey(h.session, p.Excerpt, now)
	if h.Agent != "" {
		p.Question += " (from the " + visible(redact(h.Agent)) + " agent)"
	}
	release, err := h.st.HoldSession(p.ID)
	if err != nil {
		return nil
	}
	h.last, h.release = p.ID, release
	records := h.st.Follow(ctx, h.session, func() bool { return true })
	if err := h.st.Update(func(*View) ([]Record, error) { return []Record{&p}, nil }); err != nil {
		return nil
	}
	for rec := range records {
		r, ok := rec.(*PromptRecord)
		if !ok || r.ID != p.ID || r.Open() {
			continue
		}
		answered := r.Status == Expired || r.Status == ReplyReceived && r.Value != nil
		if !answered || !h.st.Alive(h.session) {
			return nil
		}
		return r
	}
	return nil // our time is over: the session notices by the lock
}

// What can be decided about a tool's call.
const (
	hookAllow  = "allow"
	hookAlways = "always"
	hookDeny   = "deny"
)

// permissionPrompt is what the operator is asked about the call: what it is, all of its arguments, and the answers.
func (h *hook) permissionPrompt() PromptRecord {
	question, full, subject := h.call()
	p := PromptRecord{Prompt: Prompt{Type: MultipleChoice, Question: safely(question, maxFull), Permission: true,
		SafeDefault: ref(hookDeny)}, Subject: safely(subject, maxFull)}
	full = visible(redact(full))
	if len(full) > maxHookFull {
		p.Cut = true
	}
	p.Full = clip(full, maxHookFull)
	allow := "Yes"
	if h.Tool == "ExitPlanMode" {
		allow = "Yes, and manually approve edits" // the mode that claude is in then (measured)
	}
	p.Choices = []Choice{{Key: hookAllow, Label: allow, Grants: true}}
	if words := lastingWords(h.Suggestions); words != "" {
		label := clip("Yes, and don't ask again: "+words, 60)
		p.Choices = append(p.Choices, Choice{Key: hookAlways, Label: label, Grants: true})
		p.Lasting = safely(words, maxFull)
	}
	p.Choices = append(p.Choices, Choice{Key: hookDeny, Label: "No"})
	p.Excerpt = headAndTail(p.Full)
	p.parts = shown{body: strings.Split(p.Full, "\n")}
	if p.Lasting != "" {
		p.parts.among = []string{"lasting: " + p.Lasting}
	}
	p.seal()
	p.publish()
	return p
}

// headAndTail is a text of at most maxExcerpt bytes: what is dangerous can stand at either end.
func headAndTail(text string) string {
	if len(text) <= maxExcerpt {
		return text
	}
	half := (maxExcerpt - len(" …(12345678 bytes)… ")) / 2
	head, tail := clipBytes(text, half), strings.ToValidUTF8(text[len(text)-half:], "")
	return fmt.Sprintf("%s …(%d bytes)… %s", head, len(text)-len(head)-len(tail), tail)
}

// call is what the tool wants to do: a question in words, all that it is about, and what its dialog shows of it.
func (h *hook) call() (question, full, subject string) {
	arg, all := map[string]string{}, map[string]json.RawMessage{}
	if err := json.Unmarshal(h.Input, &all); err != nil {
		return "Allow " + h.Tool + "?", string(h.Input), ""
	}
	for name, raw := range all {
		var text string
		if err := json.Unmarshal(raw, &text); err == nil {
			arg[name] = text
		}
	}
	told := []string{"command", "description"}
	switch h.Tool {
	case "Bash":
		question, full, subject = "Run this command?", arg["command"], arg["command"]
		if arg["description"] != "" {
			question += " (" + clip(arg["description"], 80) + ")"
		}
	case "Edit", "Write":
		diff, plus, minus := lineDiff(arg["old_string"], arg["new_string"]+arg["content"])
		question = fmt.Sprintf("Edit %s? (+%d −%d)", arg["file_path"], plus, minus)
		if h.Tool == "Write" {
			question = fmt.Sprintf("Write %s? (+%d)", arg["file_path"], plus)
		}
		full, subject, told = diff, arg["file_path"], []string{"file_path", "old_string", "new_string", "content"}
	case "WebFetch":
		question, full, subject = "Fetch this address?", strings.TrimSpace(arg["url"]+"\n"+arg["prompt"]), arg["url"]
		told = []string{"url", "prompt"}
	case "ExitPlanMode":
		question, full, told = "Carry out this plan?", arg["plan"], []string{"plan"}
	}
	if full == "" {
		var raw bytes.Buffer
		if err := json.Indent(&raw, h.Input, "", "  "); err != nil {
			raw.Write(h.Input)
		}
		return cmp.Or(question, "Allow "+h.Tool+"?"), raw.String(), cmp.Or(subject, h.Tool)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) { // such as Bash's dangerouslyDisableSandbox
		if !slices.Contains(told, name) && string(all[name]) != "false" {
			full += "\n" + name + ": " + string(all[name])
		}
	}
	return question, full, subject
}

// suggestion is one of claude's permission_suggestions.
type suggestion struct {
	Type        string
	Directories []string
	Mode        string
	Behavior    string
	Destination string
	Rules       []struct{ ToolName, RuleContent string }
}

// lastingWords say what the suggestions allow together, and for how long; "" when there are none. One that is not
// understood is shown as it is.
func lastingWords(suggestions []json.RawMessage) string {
	var words []string
	for _, raw := range suggestions {
		var s suggestion
		what := ""
		if err := json.Unmarshal(raw, &s); err == nil {
			what = s.words()
		}
		if what == "" {
			what = string(raw)
		}
		words = append(words, what)
	}
	return strings.Join(words, ", ")
}

// words say what s allows, "" when that is not known.
func (s suggestion) words() string {
	what := ""
	switch {
	case s.Type == "addDirectories" && len(s.Directories) > 0:
		what = "access to " + strings.Join(s.Directories, " and ")
	case s.Type == "setMode" && s.Mode == "acceptEdits":
		what = "accept edits"
	case s.Type == "setMode" && s.Mode != "":
		what = "mode " + s.Mode
	case s.Type == "addRules" && s.Behavior == "allow" && len(s.Rules) > 0:
		var rules []string
		for _, r := range s.Rules {
			rule := r.ToolName
			if r.RuleContent != "" {
				rule += "(" + r.RuleContent + ")"
			}
			rules = append(rules, rule)
		}
		what = strings.Join(rules, " and ")
	}
	how := ""
	switch s.Destination {
	case "session":
		how = "this session"
	case "localSettings":
		how = "kept for this project"
	case "projectSettings":
		how = "kept for this project and all who work on it"
	case "userSettings":
		how = "kept for all projects"
	}
	if what == "" || how == "" {
		return ""
	}
	return what + " (" + how + ")"
}

// lineDiff is a readable diff of two texts: what differs, between up to two lines that they have in common.
func lineDiff(before, after string) (diff string, plus, minus int) {
	a, b, head, tail := slices.Collect(strings.Lines(before)), slices.Collect(strings.Lines(after)), 0, 0
	for both := min(len(a), len(b)); head < both && a[head] == b[head]; head++ {
	}
	for both := min(len(a), len(b)) - head; tail < both && a[len(a)-1-tail] == b[len(b)-1-tail]; tail++ {
	}
	gone, came, rest := a[head:len(a)-tail], b[head:len(b)-tail], a[len(a)-tail:]
	var out strings.Builder
	for i, lines := range [][]string{a[max(0, head-2):head], gone, came, rest[:min(tail, 2)]} {
		for _, line := range lines {
			out.WriteString(" -+ "[i:i+1] + strings.TrimSuffix(line, "\n") + "\n")
		}
	}
	return strings.TrimSuffix(out.String(), "\n"), len(came), len(gone)
}

// installHooks adds what makes the tool call us, on its command line only, merged into the last --settings (a file or
// JSON) there, which counts (measured on claude 2.1). NUL joins the arguments: none contains it.
var reSettings = regexp.MustCompile("\x00--settings[=\x00]([^\x00]*)")

func childEnv(env []string, c *Config, sessionID string) []string { // nothing of ours but what `atlasbridge hook` needs
	ours := regexp.MustCompile(`(?i)^(ATLASBRIDGE|TELEGRAM)_`) // in any case, as Windows has it
	return append(slices.DeleteFunc(slices.Clone(env), func(entry string) bool {
		return ours.MatchString(entry) || c.Token != "" && strings.Contains(entry, c.Token)
	}), "ATLASBRIDGE_SESSION="+sessionID, "ATLASBRIDGE_HOME="+c.Dir)
}

func (s *session) installHooks(argv []string) []string {
	exe, err := os.Executable()
	if s.adapter.Hooks != "claude-settings" || err != nil {
		return argv
	}
	end := slices.Index(append(slices.Clip(argv), "--"), "--") // what follows is no option
	options := strings.Join(argv[:end], "\x00")
	found := append([][]string{{"", "{}"}}, reSettings.FindAllStringSubmatch(options, -1)...)
	given := []byte(found[len(found)-1][1])
	if !bytes.HasPrefix(bytes.TrimSpace(given), []byte("{")) {
		given, err = os.ReadFile(string(given))
	}
	settings := map[string]any{"hooks": map[string]any{}}
	err = cmp.Or(err, json.Unmarshal(given, &settings))
	hooks, ok := settings["hooks"].(map[string]any)
	if err != nil || !ok {
		s.log.Warn("the tool's hooks are not used", "why", fmt.Sprint("reading --settings: ", err))
		return argv
	}
	quote := map[bool]string{true: `"`, false: "'"}[runtime.GOOS == "windows"]
	ours := " hook"
	if seconds := s.flags["permission_timeout_seconds"]; seconds != "" {
		ours += " --timeout " + seconds
	}
	patience := int((s.cfg.PermissionTimeout + time.Minute).Seconds()) // the tool waits longer than a question lives
	for event, seconds := range map[string]int{"PermissionRequest": patience, "PreToolUse": 10, "Stop": 10} {
		if event != "PreToolUse" || s.jsonLine == nil { // else its output tells of every call
			run := map[string]any{"type": "command", "command": quote + exe + quote + ours, "timeout": seconds}
			theirs, _ := hooks[event].([]any)
			hooks[event] = append(theirs, map[string]any{"matcher": "*", "hooks": []any{run}})
		}
	}
	merged, _ := json.Marshal(settings) // of what was JSON: cannot fail
	s.hooked = true
	rest := strings.Split(reSettings.ReplaceAllString(options, ""), "\x00")[1:]
	return slices.Concat([]string{argv[0], "--settings", string(merged)}, rest, argv[end:])
}
