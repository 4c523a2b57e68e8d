// Atlasbridge runs an AI command line unchanged in a pseudo-terminal and carries every question it asks to your phone:
// you tap, it types, exactly once. `atlasbridge help` lists the commands, `help COMMAND` explains one.
//
// Every `atlasbridge run` is a whole bridge for its own session: no daemon, no server, no open port. Sessions share
// files in ~/.atlasbridge: config.toml; state.jsonl with sessions, prompts and replies; audit.log, each line with the
// hash of the one before; atlasbridge.log. Anyone with an allowed account can type into your terminal. Waiting never
// approves anything.
//
// Exit status: the child's own; 128+N when signal N killed it; 1 a check or command failed, or ask was refused; 2
// usage; 124 nobody answered ask in time; 125 atlasbridge failed before the child ran, or could not ask; 126 the tool
// cannot be executed; 127 not found.
//
// This file has the commands and the session, which moves the bytes. It never decides
// what a screen asks (detect.go), who may answer (telegram.go) or whether an answer holds (store.go).
package main

import (
	"bufio"
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
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"
)

func main() {
	if actAs(os.Args) {
		return
	}
	os.Exit(theWorld().run(os.Args[1:]))
}

// world is everything outside that a command touches; the simulation has its own. It has no clock, for time in a bubble
// of testing/synctest is virtual.
type world struct {
	ctx      context.Context
	getenv   func(string) string
	stdin    *os.File
	stdout   *os.File
	stderr   *os.File
	keyboard io.Reader // nil: whatever of these is a terminal
	disk     files
	start    func(argv, env []string, size Size, host Host) (PTY, error)
	catch    func(c chan<- os.Signal, of ...os.Signal)
	network  transport      // to the Bot API; nil: the system's
	dice     func() float64 // with network: for the length of a pause
}

// theWorld is the real one.
func theWorld() world {
	return world{ctx: context.Background(), getenv: os.Getenv, stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		disk: directly, start: startPTY, catch: signal.Notify}
}

// run carries out one command line and gives the exit status.
func (w world) run(args []string) (code int) {
	c := &command{world: w}
	if len(args) == 0 {
		c.stdout = w.stderr
		cmdHelp(c)
		return exitUsage
	}
	name, args := args[0], args[1:]
	switch name {
	case "-h", "--help":
		name = "help"
	case "-v", "--version":
		name = "version"
	}
	if name == "help" && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		name, args = args[0], []string{"-h"}
	}
	for _, m := range commands() {
		if m.name() == name {
			c.manual = m
		}
	}
	if c.do == nil {
		c.complain(unknown(name))
		return exitUsage
	}
	err := c.parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintln(c, "atlasbridge "+reForCheck.ReplaceAllString(c.page, ""))
	case err != nil:
		return c.fail(usageError{err})
	default:
		code = c.do(c)
	}
	if c.lost != nil {
		c.fail(&hintedError{fmt.Errorf("writing the output: %w", c.lost), "redirect standard output elsewhere"})
		code = max(code, exitFailed)
	}
	return code
}

// Exit statuses, as the shell and env(1) have them.
const (
	exitFailed     = 1   // a check or a command failed, a question was refused
	exitUsage      = 2   // the command line is wrong
	exitUnanswered = 124 // nobody answered in time, as timeout(1) has it
	exitInternal   = 125 // before the child ran, or the question could be answered
)

var (
	errLocked = errors.New("locked by another process") // of a lock that is not waited for
	errShared = errors.New("can be reached by others")  // of a file or folder that must be the user's alone
	errNoTool = hintedf("install it, add its folder to PATH, or give tool and arguments as separate words",
		"command not found") // of a tool that is in no folder of PATH
)

// PTY is the child's terminal. Read belongs to one goroutine, State to one at a time, all else to any. Read gives
// io.EOF when the last process that held the terminal is gone. Close is idempotent and ends a blocked Read.
type PTY interface {
	io.ReadWriteCloser
	Resize(Size) error
	State() TTYState // ReadingUnknown where the system cannot tell
	Modes() Modes    // what is quick to know
	Wait() int       // exit status, 128+N when a signal killed it; once
	Signaled() bool  // after Wait: it was a signal that killed it, no status of its own
	PID() int
	Came() int64                   // bytes of output so far: those that Read took, and those that wait for it
	Waiting() int                  // bytes of input that nobody has read, −1 unknown; of whole lines alone in line mode
	TakeBack(n int) bool           // drops those where they are n; false: it has dropped nothing
	Signal(os.Signal) error        // to the child's foreground process group; SIGHUP and SIGCONT to its own too
	Stopped() <-chan struct{}      // a value when the child was stopped, as by ^Z
	Terminate(grace time.Duration) // if it has not ended by then: SIGTERM, 3 s, SIGKILL to its groups
}

// ---- the manual ----
// A page for each command: how it is written, what it is for, then the rest.

const (
	runPage = `run [flags] <tool> [args…]
run a tool; its questions reach your phone

Runs the tool unchanged in a terminal of its own. When it waits for a person,
the question goes to your phone; the answer is typed only while the question
is still there as you saw it. Everything after <tool> is passed to the tool.
Silence never approves anything.

Flags:
  --channel telegram|local  who is asked (default: telegram once set up)
  --stream                  send all output to the phone as text
  --timeout DUR             answer within 90s or 10m (default: timeout_seconds)
  --name LABEL              its name in messages (default: the folder's name)
  --adapter claude|codex|gemini|opencode|qwen|generic  (default: by its name)
  --record FILE             record the session, for lab (default: no recording)
  --quiet                   write nothing of our own to this terminal

Examples:
  atlasbridge run claude
  atlasbridge run --name api --timeout 30m claude --model opus
  atlasbridge run --channel local bash -c 'read -p "Continue? (y/n) " a'

Exit status: the tool's; 128+N when signal N ended it; 125 atlasbridge failed
before the tool ran; 126 the tool cannot be executed; 127 no such tool`

	setupPage = `setup [flags]
connect your Telegram bot; writes config.toml

Asks for the token of your bot (from @BotFather) and links your Telegram
account: open a link, or send the bot a code, and confirm that here; without a
terminal give --user-id. Then it sends a test message. Run it again any time: it
asks only for what no longer works. Settings from the environment are used but
not stored; everything else in config.toml stays as it is.

Flags:
  --token-file FILE  read the bot token from here (default: ask for it)
  --chat-id ID       where the bot asks (default: the private chat of --user-id,
                     else the chat in which you send the code)
  --user-id ID       who may answer (default: who sends the code)
  --api-base URL     a Bot API server (default: Telegram's)
  --no-test          send no test message

Examples:
  atlasbridge setup
  atlasbridge setup --token-file token.txt --user-id 1001 --no-test`

	doctorPage = `doctor [--json]
check everything; says what to do about each failure

Checks settings, files, audit log, terminal, tools, bot and chat, and says how
to fix each failure. It sends no message. The last check takes seven seconds: it
waits for another program that polls the same bot.

Flags:
  --json  print one object

Examples:
  atlasbridge doctor
  atlasbridge doctor --json | jq '.checks[] | select(.ok | not)'

Exit status: 0; 1 if a check failed (a warning is not a failure)`

	statusPage = `status [--all] [--json]
sessions: what runs, what waits, who listens to Telegram

Lists your sessions on this machine, which process listens to Telegram for all
of them, and what keeps questions from the phone, if anything does.

Flags:
  --all   include sessions that have ended
  --json  print one array

Examples:
  atlasbridge status
  atlasbridge status --json | jq -r '.[] | .id, .activity'`

	approvalsPage = `approvals [--json]
open questions of all sessions, with the time left

Lists the questions that wait for an answer: the id for atlasbridge answer, the
session, the time left, the question with the command or file it is about, and
the possible answers with what each one means and grants.

Flags:
  --json  print one array`

	answerPage = `answer <prompt-id> <value>
answer a question from any terminal

Does what a tap on the phone does, with the same checks. The first eight digits
of the id are enough. The value is what a button says: y, n, a choice's number,
letter or words, enter, esc, default; or the text that the question asks for.
Programs that run inside a session cannot answer any question.

Examples:
  atlasbridge answer 3f2a91c4 y
  atlasbridge answer 3f2a91c4 "deny:use the test database"

Exit status: 0; 1 if the answer was not accepted: then nothing is typed`

	askPage = `ask [flags] QUESTION [-]
ask your phone from a script; prints the answer

Sends the question to your phone, waits, and prints the answer: yes, no, one of
your choices as you wrote it, or a text. With - it reads what the question is
about from standard input, up to 64 KiB. It needs no session.

Flags:
  --choices A,B,…  up to 9, of up to 60 characters (default: yes, no)
  --text           ask for a text (by phone only if free_text_enabled)
  --timeout DUR    answer within 90s or 10m (default: timeout_seconds)
  --json           print one object

Examples:
  atlasbridge ask "Deploy 1.4 to prod?" && ./deploy
  git diff | atlasbridge ask --choices merge,wait "Merge this?" -

Exit status: 0 answered, 1 refused, 124 nobody answered, 125 could not ask`

	logsPage = `logs [--tail] [--json] [--session ID]
what happened, readable; --tail follows

Prints the audit log: what was asked, who answered what, which keys were pressed
and which tool calls were made, without secrets. Of a text that was typed the
log has the length and hash; hashes are only shown with --json.

Flags:
  --tail        the last ten entries, then new ones as they come, until ^C
  --json        print one object per line, exactly as in the log
  --session ID  only this session (default: all)

Examples:
  atlasbridge logs --tail
  atlasbridge logs --json | jq -c 'select(.event == "PERMISSION_RESOLVE")'`

	auditPage = `audit verify [--json]
recompute the audit chain, name the first bad line

Each line of audit.log has the hash of the line before, so that a line that was
changed, inserted, moved or removed is found. The state keeps the hash of the
last line, so that a tail that was cut is found, too. The message that ends a
session has the number of that line and the first 24 digits of its hash: only
that finds who rewrote the state as well. If you move audit.log away, the next
one says which entry it follows.

An entry has seq, ts, event, the session and the question it is about, and the
details of the event. prev_hash is the hash of the line before; hash is
"sha256:" and the SHA-256 of the line as jq -c prints it without hash.
shown_sha256 is the hash of what the person was shown, screen_sha256 of what was
on the screen when the answer was typed, with what moves (a spinner, seconds) as
it was shown. This prints each answer that was typed at anything else, and
nothing if all is well:

  jq -cn 'foreach inputs as $e ({}; if $e.shown_sha256
    then .[$e.prompt_id] = $e.shown_sha256 else . end;
    select($e.screen_sha256 and $e.screen_sha256 != .[$e.prompt_id]) | $e
    )' ~/.atlasbridge/audit.log

What was shown is in state.jsonl, in a text that the question names by its hash.
Both of these print that hash, for the question with this (full) id:

  id=…
  jq -nj --arg id "$id" 'reduce inputs as $r ({};
    if $r.rec == "text" then .text[$r.id] = $r.text
    elif $r.rec == "prompt" and $r.id == $id then .sha = $r.about_sha256
    else . end) | .text[.sha] | fromjson.shown
    ' ~/.atlasbridge/state.jsonl | sha256sum
  jq -nr --arg id "$id" '[inputs | select(.prompt_id == $id).shown_sha256 //
    empty] | last' ~/.atlasbridge/audit.log

Flags:
  --json  print one object

Examples:
  atlasbridge audit verify

Exit status: 0 if the chain holds; 1 if it does not`

	debugPage = `debug bundle [--output FILE] [--full]
pack what a bug report needs, no secrets

Packs state, audit log, program log, version and settings for a bug report:
never the token, and without --full no words of a question or an answer. Look
into it before you send it.

Flags:
  --output FILE  a new file (default: atlasbridge-debug-TIME.tar.gz)
  --full         include questions, answers and the arguments of tool calls

Examples:
  atlasbridge debug bundle --output report.tar.gz`

	labPage = `lab [flags] PATH…
replay recordings through the detector

Replays recordings (of run --record or asciinema), scenarios in JSON, and
folders of both, and prints what would have been asked. If a scenario says what
it expects, the two are compared.

Flags:
  --json     print one object per question
  --screen   print the screen at the end of each
  --explain  say why something was taken for a question, or not

Examples:
  atlasbridge run --record session.cast bash
  atlasbridge lab --explain session.cast

Exit status: 0; 1 if something is not as expected, or cannot be read`

	hookPage = `hook [--timeout SECONDS]
called by a tool's own hook system, not by you

Claude calls this in a session: at each tool call, for the audit log; when it
needs a permission; when its turn ends. It reads claude's JSON, asks your phone,
and prints the answer for claude. If anything goes wrong, claude itself asks.

Flags:
  --timeout SECONDS  how long to wait (default: permission_timeout_seconds)

Exit status: always 0; what it cannot decide is left to the tool`

	adaptersPage = `adapters [--json]
known tools: found or not, version, supported range

Lists the tools that are known by name. Every other tool is "generic": its
questions are read from the screen by the same rules. A version outside the
supported range runs all the same.

Flags:
  --json  print one array`

	configPage = `config [--json]
settings in force and where each came from

Shows each setting and where it comes from. A flag beats the environment, which
beats config.toml, which beats the default. The token is masked.

Flags:
  --json  print one array

config.toml is in ~/.atlasbridge, or in the folder that ATLASBRIDGE_HOME (else
STORAGE_PATH) names. A name with a dot belongs in a table: [telegram], then
bot_token = "…". kill -HUP PID, with the PID of atlasbridge, makes a session
read it again. A wrong value of TELEGRAM_* in the environment is an error; of
other variables, which may be meant for another program, it is only reported.
` + settingsText + `
With ATLASBRIDGE_CAPTURE_PROMPTS=1 a recording of each question is kept in the
folder captured_scenarios: the last output, with all that the screen showed.

A tool sees no variable TELEGRAM_* or ATLASBRIDGE_* except ATLASBRIDGE_SESSION,
the id of the session it runs in, and ATLASBRIDGE_HOME.`

	versionPage = `version
this program's version

Prints the version, compiler, system and processor.`

	helpPage = `help [command]
explain a command

Explains a command; without one it lists them all. atlasbridge help config
explains the settings, in config.toml and in the environment.`

	completionPage = `completion bash|zsh|fish
shell completion

Prints a script with which the shell completes the commands of atlasbridge,
their flags, and the words that these take.

Examples:
  echo 'eval "$(atlasbridge completion bash)"' >> ~/.bashrc
  echo 'eval "$(atlasbridge completion zsh)"' >> ~/.zshrc
  atlasbridge completion fish > ~/.config/fish/completions/atlasbridge.fish`

	// What help says; %s are the commands.
	overviewPage = `atlasbridge runs an AI command line and carries its questions to your phone.

%s
Try:   atlasbridge run bash -c 'read -p "Continue? (y/n) " a; echo got $a'
Then:  atlasbridge setup; atlasbridge run claude
More:  atlasbridge help COMMAND. Unless that says otherwise, a command exits
       with 0, with 1 if it failed, or with 2 if the command line is wrong
`
)

// ---- the command table ----
// Dispatch, flags, help and completion are made from it.

// manual is a command: what it does, and its page. The first line of the page is how the command is written, the second
// what it is for; what is checked and completed is read off it.
type manual struct {
	do   func(*command) int
	page string
}

// commands is the table, in the order of the help.
func commands() []manual {
	return []manual{
		{cmdRun, runPage},
		{cmdSetup, setupPage},
		{cmdDoctor, doctorPage},
		{withState(cmdStatus), statusPage},
		{withState(cmdApprovals), approvalsPage},
		{withState(cmdAnswer), answerPage},
		{cmdAsk, askPage},
		{cmdLogs, logsPage},
		{withState(cmdAudit), auditPage},
		{cmdDebug, debugPage},
		{cmdLab, labPage},
		{cmdHook, hookPage},
		{cmdAdapters, adaptersPage},
		{cmdConfig, configPage},
		{cmdVersion, versionPage},
		{cmdHelp, helpPage},
		{cmdCompletion, completionPage},
	}
}

// synopsis returns how the command is written.
func (m manual) synopsis() string { return strings.Split(m.page, "\n")[0] }

// name returns the command's name.
func (m manual) name() string { return strings.Fields(m.page)[0] }

var (
	// reFlag is the line of a flag in a page.
	reFlag = re(`(?m)^  --([a-z-]+)(?: (\S+))? {2,}`)
	// reForCheck is a line of a setting that only its check reads.
	reForCheck = re(`(?m)^    (is|must) .*\n`)
	// reOptions are the flags in a synopsis.
	reOptions = re(`\[(flags|--[^]]+)\]`)
	// reLiteral is a word of a synopsis that is written as it stands there, or one of several.
	reLiteral = re(`^[a-z|]+$`)
)

// checked returns the value of a flag, in seconds where that is a time, or why it cannot have that value. kind is what
// the page calls it, "" for a switch.
func checked(kind, value string) (string, error) {
	words := strings.Split(kind, "|")
	switch {
	case kind == "" && value != "true":
		return "", errors.New("it takes no value")
	case kind == "DUR":
		life, err := time.ParseDuration(value)
		if err != nil || life < time.Second || life > 24*time.Hour {
			return "", errors.New("it must be from 1s to 24h, such as 90s or 10m")
		}
		return strconv.Itoa(inSeconds(life)), nil
	case len(words) > 1 && !slices.Contains(words, value):
		return "", errors.New("it is one of " + kind)
	}
	return value, nil
}

// checkArguments returns what is wrong with the arguments. In a synopsis brackets hold what can be left out, and "…"
// stands for any number of arguments.
func (m manual) checkArguments(args []string) error {
	words := strings.Fields(reOptions.expr().ReplaceAllString(m.synopsis(), ""))[1:]
	wrong := len(args) > len(words) && !strings.Contains(m.synopsis(), "…")
	for i, word := range words {
		if i < len(args) {
			wrong = wrong || reLiteral.MatchString(word) && !slices.Contains(strings.Split(word, "|"), args[i])
		} else if word[0] != '[' {
			return misuse("an argument is missing")
		}
	}
	if wrong {
		return misuse("wrong arguments %q", args)
	}
	return nil
}

// ---- a command line ----
// What a command is given, and what it can say.

// command is what every command gets: the world, and its arguments.
type command struct {
	world
	manual
	flags map[string]string // those that were given; a switch is "true"
	args  []string          // without flags
	lost  error             // why something could not be written to standard output
}

// on reports whether a flag was given, also as "".
func (c *command) on(name string) bool {
	_, given := c.flags[name]
	return given
}

// parse separates flags from arguments; flag.ErrHelp means that help is asked for. All after -- is arguments, as is all
// after the first one of a command that has arguments in <>.
func (c *command) parse(args []string) error {
	c.flags = map[string]string{}
	set := flag.NewFlagSet("", flag.ContinueOnError)
	set.SetOutput(io.Discard) // the caller tells the error
	for _, match := range reFlag.expr().FindAllStringSubmatch(c.page, -1) {
		name, kind := match[1], match[2]
		define := set.Func
		if kind == "" {
			define = set.BoolFunc
		}
		define(name, "", func(value string) (err error) {
			c.flags[name], err = checked(kind, value)
			return err
		})
	}
	verbatim := strings.Contains(c.synopsis(), "<")
	for {
		if err := set.Parse(args); err != nil {
			return err
		}
		rest := set.Args()
		read := args[:len(args)-len(rest)]
		if len(rest) == 0 || verbatim || len(read) > 0 && read[len(read)-1] == "--" {
			c.args = append(c.args, rest...)
			return c.checkArguments(c.args)
		}
		c.args = append(c.args, rest[0])
		args = rest[1:]
	}
}

// unknown returns the remedy for a name that is no command.
func unknown(name string) string {
	near := "`atlasbridge help` lists the commands"
	for n := 2; n <= len(name); n++ { // the command that begins like name for longest
		for _, m := range commands() {
			if strings.HasPrefix(m.name(), strings.ToLower(name[:n])) {
				near = "did you mean `atlasbridge " + m.name() + "`?"
				break
			}
		}
	}
	return fmt.Sprintf("unknown command %q; `atlasbridge run TOOL` runs a tool, %s", name, near)
}

// config reads the settings; flags win over the file and the environment. With an error none is set. What is ignored
// stops nothing: it is not told in a quiet run, nor in a hook, whose words the tool reads.
func (c *command) config(flags map[string]string) (*Config, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return &Config{}, err
	}
	cfg, err := loadConfig(dir, c.getenv, flags)
	if !c.on("quiet") && c.name() != "hook" {
		for _, ignored := range cfg.ignored {
			c.complain(ignored)
		}
	}
	return cfg, err
}

// complain writes a line for the person to standard error. If that fails, nobody can be told.
func (c *command) complain(text string) {
	fmt.Fprintln(c.stderr, "atlasbridge: "+safeText(text))
}

// usageError is what is wrong with a command line.
type usageError struct{ error }

// misuse returns a usageError.
func misuse(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// fail reports an error, with its hint if it has one, and returns the exit status.
func (c *command) fail(err error) int {
	if _, wrong := errors.AsType[usageError](err); wrong {
		c.complain(err.Error() + "; usage: atlasbridge " + c.synopsis())
		return exitUsage
	}
	c.complain(err.Error())
	todo := hintOf(err)
	if todo != "" {
		c.complain("hint: " + todo)
	}
	return exitFailed
}

// hintedError is an error, and what to do about it.
type hintedError struct {
	error
	todo string
}

// Unwrap returns the error alone.
func (e *hintedError) Unwrap() error { return e.error }

// hinted adds what to do about an error; nil stays nil, and an older hint stays.
func hinted(err error, todo string) error {
	if err == nil || hintOf(err) != "" {
		return err
	}
	return &hintedError{err, todo}
}

// hintedf returns an error in these words, with what to do about it.
func hintedf(todo, format string, args ...any) error {
	return hinted(fmt.Errorf(format, args...), todo)
}

// hintOf returns what to do about an error, "" if that is not known.
func hintOf(err error) string {
	hint, ok := errors.AsType[*hintedError](err)
	if !ok {
		return fileRemedy(err)
	}
	return hint.todo
}

// Write writes to standard output. After an error nothing more is written, and the command fails in the end.
func (c *command) Write(p []byte) (int, error) {
	if c.lost == nil {
		_, c.lost = c.stdout.Write(p)
	}
	return len(p), c.lost
}

// printJSON prints v, with times as the files have them.
func (c *command) printJSON(v any) int {
	text, err := stamped(v)
	if err != nil {
		return c.fail(err)
	}
	var b bytes.Buffer
	_ = json.Indent(&b, text, "", "  ") // it is JSON
	fmt.Fprintln(c, b.String())
	return 0
}

// show prints a list, with --json as it is, else as a table: the headings, then the cells of each element. For an empty
// one it says none, too.
func show[T any](c *command, list []T, none, headings string, cells func(T) []any) int {
	if c.on("json") {
		return c.printJSON(list)
	}
	if len(list) == 0 {
		fmt.Fprintln(c.stderr, none)
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, headings)
	for _, one := range list {
		var row []string
		for _, cell := range cells(one) {
			row = append(row, strings.Join(strings.Fields(visible(fmt.Sprint(cell))), " "))
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	w.Flush() // cannot fail
	fmt.Fprint(c, table.String())
	return 0
}

// onTerminal reports whether a person may be at the other end of f.
func onTerminal(f *os.File) bool {
	_, err := terminalSize(f)
	return err == nil
}

// ---- help, version, completion ----
// What the program says of itself.

func cmdHelp(c *command) int {
	var list strings.Builder
	for _, m := range commands() {
		fmt.Fprintf(&list, "  %-11s %s\n", m.name(), strings.Split(m.page, "\n")[1])
	}
	fmt.Fprintf(c, overviewPage, list.String())
	return 0
}

func cmdVersion(c *command) int {
	fmt.Fprintln(c, version())
	return 0
}

// version is that of the version control tag, where it was built from one, and what it was built with and for.
func version() string {
	tag := "(devel)"
	info, ok := debug.ReadBuildInfo()
	if ok && info.Main.Version != "" {
		tag = info.Main.Version
	}
	return fmt.Sprintf("atlasbridge %s %s %s/%s", tag, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// bashCompletion reads commands, flags and their fixed values off the help. It is for zsh, too: bash begins a word
// behind =, zsh does not.
const bashCompletion = `_atlasbridge() {
  local line=${COMP_LINE:0:$COMP_POINT} command=${COMP_WORDS[1]} list=
  local cur=${line##*[ =]}
  local flag=${line%"$cur"}
  flag=${flag%[ =]}
  flag=${flag##* }
  case $COMP_CWORD:$command:$cur:$flag in
  1:*|2:help:*) list=$(atlasbridge help | sed -n 's/^  \([a-z]*\)  *.*/\1/p') ;;
  *:-*:*) list=$(atlasbridge help "$command" 2>/dev/null | sed -n 's/^  \(--[a-z-]*\) .*/\1/p') ;;
  *:--*) list=$(atlasbridge help "$command" 2>/dev/null | sed -n "s/^  $flag \([a-z]*|[a-z|]*\) .*/\1/p") ;;
  2:*) list=$(atlasbridge help "$command" 2>/dev/null | sed -n '1s/^[a-z]* [a-z]* \([a-z|][a-z|]*\).*/\1/p') ;;
  esac
  local head=${2%%"$cur"}
  COMPREPLY=($(compgen -P "${head#=}" -W "${list//|/ }" -- "$cur"))
}
complete -o default -F _atlasbridge atlasbridge
`

// zshCompletion stands before bashCompletion.
const zshCompletion = `autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit -i
bashcompinit
`

// fishCompletion reads the help, too.
const fishCompletion = `for line in (atlasbridge help | string match -r '^  [a-z]+ .*')
    set -l command (string match -rg '^  ([a-z]+) +(.*)' -- $line)
    complete -c atlasbridge -n '__fish_use_subcommand; or __fish_seen_subcommand_from help' \
        -fa $command[1] -d $command[2]
    set -l words (atlasbridge help $command[1] | string match -rg '^atlasbridge \S+ ([a-z|]+)')
    set words (string replace -a '|' ' ' -- $words)
    test -n "$words"; and complete -c atlasbridge -fa $words \
        -n "__fish_seen_subcommand_from $command[1]; and test (count (commandline -opc)) = 2"
    for line in (atlasbridge help $command[1] | string match -r '^  --.*')
        set -l flag (string match -rg '^  --([a-z-]+) ?(\S*)  +(.*)' -- $line)
        set -l value
        test -n "$flag[2]"; and set value -r
        string match -q '*|*' -- $flag[2]; and set value -r -fa (string replace -a '|' ' ' -- $flag[2])
        complete -c atlasbridge -n "__fish_seen_subcommand_from $command[1]" -l $flag[1] $value -d $flag[3]
    end
end
`

// cmdCompletion prints a script.
func cmdCompletion(c *command) int {
	scripts := map[string]string{"bash": bashCompletion, "zsh": zshCompletion + bashCompletion, "fish": fishCompletion}
	fmt.Fprint(c, scripts[c.args[0]])
	return 0
}

// ---- doctor ----
// Every check is made, whatever the others found, unless it depends on one that failed. The network, which takes long,
// comes last.

// doctorListens is how long doctor polls to notice another program: each poll ends the other's.
const doctorListens = 7 // seconds: longer than another atlasbridge pauses

// check is what doctor found out about one thing.
type check struct {
	Detail string `json:"detail"` // what was found, or what is wrong
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Remedy string `json:"remedy"` // what to do about it; where it is OK, a warning
}

// doctor is a report that is being made.
type doctor struct {
	*command
	checks []check
	code   int
}

// cmdDoctor prints each check as soon as it is made, with --json all of them at the end.
func cmdDoctor(c *command) int {
	d := &doctor{command: c}
	cfg, err := d.config(nil)
	if cfg.Channel == "local" {
		d.found("token", nil, cfg.whyLocal()+waitsHere, "")
	}
	d.found("config", err, "settings and defaults are valid", "")
	var st *Store // nil where it cannot be opened
	if cfg.Dir != "" {
		st = d.checkState(cfg.Dir)
		d.checkPrivacy(cfg.Dir)
	}
	if st != nil {
		verdict, err := st.VerifyAudit()
		if err == nil && !verdict.OK {
			err = hintedf(verdict.Remedy, "audit.log:%d: %s", verdict.Line, verdict.Reason)
		}
		d.found("audit", err, fmt.Sprintf("%d entries hold", verdict.Entries), "")
	}
	terminal := "none here: a tool gets 100x30"
	size, err := terminalSize(d.stdout)
	if err == nil {
		terminal = fmt.Sprintf("%s, %dx%d", d.getenv("TERM"), size.Cols, size.Rows)
	}
	d.found("terminal", nil, terminal, "")
	for _, t := range knownTools(c.ctx, cfg) {
		if t.Path != "" {
			d.found(t.Name, nil, strings.TrimSpace(t.Version+" "+t.Path), t.Warning)
		}
	}
	if cfg.Channel == "telegram" {
		d.checkTelegram(newTelegram(cfg, st, nil))
	}
	if c.on("json") {
		c.printJSON(map[string]any{"checks": d.checks, "ok": d.code == 0})
	}
	return d.code
}

// found adds a check: it failed with err, or passed with what was found and perhaps a warning.
func (d *doctor) found(name string, err error, detail, warning string) {
	k := check{detail, name, err == nil, warning}
	mark := "ok"
	switch {
	case err != nil:
		d.code = exitFailed
		k.Detail = redact(err.Error())
		k.Remedy = hintOf(err)
		mark = "FAIL"
	case warning != "":
		mark = "warn"
	}
	d.checks = append(d.checks, k)
	if d.on("json") {
		return
	}
	fmt.Fprintf(d, "%-4s  %-11s  %s\n", mark, name, visible(k.Detail))
	if k.Remedy != "" {
		fmt.Fprintf(d, "%17s  %s\n", "→", visible(k.Remedy))
	}
}

// checkState opens the state, nil where that cannot be done, and tries whether it can be written.
func (d *doctor) checkState(dir string) *Store {
	st, err := openState(dir, d.disk, keepLonger)
	if err != nil {
		d.found("state", hinted(err, "keep a copy (`atlasbridge debug bundle`), then move state.jsonl away"), "", "")
		return nil
	}
	err = hinted(st.NoteFact("doctor", time.Now().UTC().Format(stampLayout)),
		"make "+dir+" a folder that you can write to, or set ATLASBRIDGE_HOME to another")
	notes := strings.Join(st.Notes(), "; ")
	if err == nil && strings.Contains(notes, damagedLine) {
		err = hinted(errors.New(notes),
			"all else counts; keep a copy (`atlasbridge debug bundle`), then delete the damaged line")
	}
	d.found("state", err, "can be used: a record was written for a test", notes)
	return st
}

// checkPrivacy looks who can read the state folder and what is in it.
func (d *doctor) checkPrivacy(dir string) {
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = ownedPrivate(path)
		}
		if errors.Is(err, fs.ErrNotExist) && path != dir { // what has gone meanwhile nobody can reach
			return nil
		}
		return err
	})
	if errors.Is(err, errShared) { // the first of perhaps many
		err = &hintedError{err, closeRemedy(dir)}
	}
	d.found("permissions", err, dir+" is yours alone", "")
}

// checkTelegram asks about the bot and its chat, and whether updates would come here. Where no session polls, it does
// that for as long as it takes to meet another program; no update is confirmed by that.
func (d *doctor) checkTelegram(bot *Telegram) {
	var me user
	err := bot.call(d.ctx, "getMe", struct{}{}, &me)
	d.found("token", explained(err), "the bot is @"+me.Username, "")
	if err != nil {
		return
	}
	err = bot.reach(d.ctx)
	d.found("chat", explained(err), fmt.Sprintf("the bot can write to chat %d", bot.chat()), "")
	if bot.store == nil {
		return
	}
	poller := "nobody, which is right while no session runs"
	held, err := bot.store.TryPoll()
	switch {
	case held:
		err = bot.call(d.ctx, "getUpdates", &pollParams{Timeout: doctorListens}, nil)
		bot.store.LeavePoll()
	case err == nil:
		poller = fmt.Sprint("process ", bot.store.holder("poll.lock"))
		trouble := bot.store.ChannelTrouble()
		if trouble != "" {
			err = errors.New(trouble)
		}
	}
	d.found("poller", explained(err), poller, "")
}

// ---- tools ----
// Which of the tools that have an adapter are there, and in which version.

// tool is what was found out about the tool of an adapter.
type tool struct {
	Name      string `json:"name"`
	Path      string `json:"path"` // "" where it was not found
	Supported string `json:"supported"`
	Version   string `json:"version"` // "" where it is not known
	Warning   string `json:"warning"` // "" where it was tried with this version
}

func cmdAdapters(c *command) int {
	cfg, _ := c.config(nil) // where it is wrong there is no token to keep from the tools
	return show(c, knownTools(c.ctx, cfg), "", "ADAPTER\tVERSION\tSUPPORTED\tFOUND", func(t tool) []any {
		return []any{t.Name, t.Version, t.Supported, cmp.Or(t.Path, "not found")}
	})
}

// knownTools asks each tool that has an adapter for its version.
func knownTools(ctx context.Context, cfg *Config) []tool {
	var list []tool
	for _, a := range adapters[:len(adapters)-1] { // the last one stands for all others
		list = append(list, a.probe(ctx, a.Name, cfg))
	}
	return list
}

// reVersion is a version among other words, as in "codex-cli 0.146.0".
var reVersion = re(`[0-9]+(\.[0-9]+)+`)

// probe asks the adapter's tool, of which that is the command, for its version, and warns of one that was not tried. It
// ends with ctx, or after ten seconds: Node takes up to 4 s to start (measured). The tool gets no secret of ours.
func (a *Adapter) probe(ctx context.Context, command string, cfg *Config) tool {
	path, _ := findTool(command) // "" where it is not there
	t := tool{Name: a.Name, Path: path, Supported: a.MinVer + " to " + a.MaxVer}
	if path == "" {
		return t
	}
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	p, err := startPTY([]string{path, "--version"}, childEnv(os.Environ(), cfg, ""), Size{Rows: 24, Cols: 80}, Host{})
	if err == nil {
		defer p.Close()
		defer context.AfterFunc(ctx, func() {
			p.Terminate(0)
			p.Close()
		})()
		output, _ := io.ReadAll(io.LimitReader(p, 4096)) // what it said before an error counts
		t.Version = reVersion.expr().FindString(string(output))
	}
	version := versionNumbers(t.Version)
	tooOld := slices.Compare(version, versionNumbers(a.MinVer)) < 0
	if tooOld || slices.Compare(version, versionNumbers(a.MaxVer)) > 0 {
		t.Warning = strings.TrimSpace(t.Name+" "+t.Version) +
			" is untested: if questions are missed, use " + t.Supported
	}
	return t
}

// versionNumbers returns the first three numbers of a version, 0 for one that it lacks.
func versionNumbers(version string) []int {
	var n [3]int
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &n[0], &n[1], &n[2]) // it may have two
	return n[:]
}

// ---- commands: config, status, approvals, answer ----
// They show what is here, and give an answer from another terminal.

func cmdConfig(c *command) int {
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	return show(c, cfg.inForce, "", "SETTING\tVALUE\tFROM", func(s setting) []any {
		return []any{s.Key, string(s.Value), s.Origin}
	})
}

// openState opens the state for a command, and reports what is damaged.
func (c *command) openState() (*Store, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return nil, err
	}
	cfg, err := loadConfig(dir, c.getenv, nil)
	if err != nil {
		cfg.RetentionDays = keepLonger
	}
	s, err := openState(dir, c.disk, cfg.RetentionDays)
	if err != nil {
		return nil, err
	}
	for _, note := range s.notes {
		c.complain(note + " (see `atlasbridge doctor`)")
	}
	return s, nil
}

// withState returns a command that opens the state, and does something with it.
func withState(do func(*command, *Store) int) func(*command) int {
	return func(c *command) int {
		s, err := c.openState()
		if err != nil {
			return c.fail(err)
		}
		return do(c, s)
	}
}

// statusRow is a session as status shows it.
type statusRow struct {
	*SessionRecord
	Open  int  `json:"open_prompts"`
	Polls bool `json:"polls"` // listens to Telegram for all sessions
}

// cmdStatus lists sessions, and who listens to Telegram.
func cmdStatus(c *command, s *Store) int {
	_ = s.Reap() // where a death cannot be written, status shows what is there
	list := []statusRow{}
	poller := s.holder("poll.lock")
	for id, r := range s.view.Sessions {
		row := statusRow{SessionRecord: r, Polls: poller > 0 && r.Wrapper == poller}
		if r.Status != "active" && !c.on("all") {
			continue
		}
		row.Open = len(s.view.which(func(p *PromptRecord) bool { return p.SessionID == id && s.waits(p) }))
		list = append(list, row)
	}
	slices.SortFunc(list, func(a, b statusRow) int { // "active" sorts first
		if a.Status != b.Status {
			return strings.Compare(a.Status, b.Status)
		}
		return b.StartedAt.Compare(a.StartedAt)
	})
	now := time.Now()
	headings := "SESSION\tPID\tSTATE\tUP\tOPEN\tTOOL"
	code := show(c, list, "no sessions; start one: atlasbridge run <tool>", headings, func(r statusRow) []any {
		state := cmp.Or(r.Activity, r.Status)
		if r.ExitCode != nil && *r.ExitCode != 0 {
			state += fmt.Sprintf(", exit %d", *r.ExitCode)
		}
		up := span(cmp.Or(r.EndedAt, &now).Sub(r.StartedAt))
		return []any{shortID(r.ID), r.PID, state, up, r.Open, strings.TrimSpace(r.Tool + " " + r.Label)}
	})
	trouble := s.ChannelTrouble()
	if c.on("json") {
		if trouble != "" {
			c.complain(trouble)
		}
		return code
	}
	if poller != 0 {
		fmt.Fprintf(c, "process %d listens to Telegram\n", poller)
	}
	if trouble != "" {
		fmt.Fprintln(c, visible(trouble))
	}
	return code
}

// maxListed is how much approvals says of a question, in bytes: a screenful.
const maxListed = 2000

// cmdApprovals lists the questions that wait for an answer, the oldest first.
func cmdApprovals(c *command, s *Store) int {
	headings := "PROMPT\tSESSION\tLEFT\tQUESTION · ANSWERS"
	return show(c, s.view.which(s.waits), "no open questions", headings, func(p *PromptRecord) []any {
		r := s.view.Sessions[p.SessionID]
		about := p.words(maxListed) + " · " + p.takes()
		return []any{shortID(p.ID), clip(cmp.Or(r.Label, r.Tool), 16), span(time.Until(p.ExpiresAt)), about}
	})
}

// cmdAnswer answers a question from this terminal, but never from inside a session. An answer that was given is a
// success, even if the audit log could not be written: that is reported.
func cmdAnswer(c *command, s *Store) int {
	inside := s.inside()
	var p PromptRecord
	why := "programs that run inside a session cannot answer: use another terminal, or the phone"
	err := s.Update(func(v *View) ([]Record, error) {
		named := v.which(func(p *PromptRecord) bool { return isShort(c.args[0], p.ID) })
		if len(named) == 1 {
			p = *named[0]
		}
		if !inside {
			why = s.Decide(v, &p, c.args[1], "cli:answer", "")
		}
		if why != "" {
			return nil, nil
		}
		return []Record{&p}, nil
	})
	if err != nil {
		return c.fail(err)
	}
	if why == sessionOver {
		_ = s.Reap() // else the next process does it
	}
	if why != "" {
		// An error is Trouble; the answer is not taken all the same.
		_ = s.Audit(Event{"REPLY_REJECTED", p.SessionID, p.ID, []Field{{"reason", why}, {"by", "cli:answer"}}})
		return c.fail(hintedf("`atlasbridge approvals` lists the open questions",
			"nothing was typed: %s", explain(why, &p)))
	}
	said := before(": ", p.labels(*p.Value)) + before(": ", p.granted())
	fmt.Fprintln(c, "answered "+shortID(p.ID)+visible(said))
	if err := s.Trouble(); err != nil {
		c.fail(err) // says it: the answer counts all the same
	}
	return 0
}

// maxAncestors is deeper than any tree of processes, should the system name a circle.
const maxAncestors = 1000

// inside reports whether this process was started in a session, whichever: an agent that answers for another one is no
// person either. Two marks tell:
//
//   - the environment has ATLASBRIDGE_SESSION, whatever its value: outlives setsid and a parent that has ended
//   - a parent, or parent's parent …, is a session's wrapper: outlives setsid and a changed environment
//
// A program that takes it out of its environment and has left its parents is not found; one that goes that far can as
// well write state.jsonl.
func (s *Store) inside() bool {
	_, marked := os.LookupEnv("ATLASBRIDGE_SESSION")
	if marked {
		return true
	}
	wrappers := map[int]bool{0: true}                        // where there is no parent any more
	locks, _ := os.ReadDir(filepath.Join(s.Dir, "sessions")) // without it there are no sessions
	for _, lock := range locks {
		wrappers[s.holder("sessions/"+lock.Name())] = true
	}
	pid := os.Getpid()
	for range maxAncestors {
		pid = parentOf(pid)
		if wrappers[pid] {
			return pid != 0
		}
	}
	return false
}

// ---- commands: audit verify, logs ----
// They only read.

// cmdAudit says whether the chain of the audit log holds.
func cmdAudit(c *command, s *Store) int {
	v, err := s.VerifyAudit()
	switch {
	case err != nil:
		return c.fail(err)
	case c.on("json"):
		c.printJSON(v)
	case v.OK:
		fmt.Fprintf(c, "audit.log holds: %d entries, head %s\ndoes not prove: %s\n", v.Entries, v, v.Limits)
	default:
		fmt.Fprintf(c, "audit.log:%d: %s\n%d entries form one chain\nwhat to do: %s\n",
			v.Line, visible(v.Reason), v.Entries, v.Remedy)
	}
	if !v.OK {
		return exitFailed
	}
	return 0
}

// lastEntries is how many entries --tail begins with.
const lastEntries = 10

// cmdLogs prints the entries there are, and with --tail the last ten and those that come, until it is interrupted: also
// those of a log that begins only then, or after the user has moved this one away.
func cmdLogs(c *command) int {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	path := filepath.Join(dir, "audit.log")
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		f, err = os.Open(os.DevNull) // nothing has happened yet
	}
	if err != nil {
		return c.fail(err)
	}
	defer func() { _ = f.Close() }() // nothing was written to it

	var last []string // entries that --tail begins with
	tail := c.on("tail")
	for following := !tail; ; following = true {
		moved := !isNamed(f, path) // what comes after that is in a new log: this one is read to its end
		torn := 0                  // bytes of a last line that is being written
		err = eachLine(f, func(line []byte) (more bool) {
			torn = 0
			if line[len(line)-1] != '\n' {
				torn = len(line)
				return true
			}
			text := c.entry(line)
			if following {
				fmt.Fprint(c, text)
			} else if text != "" {
				last = append(last, text)
				last = last[max(0, len(last)-lastEntries):]
			}
			return c.lost == nil
		})
		if err != nil {
			return c.fail(err)
		}
		fmt.Fprint(c, strings.Join(last, ""))
		last = nil
		if !tail || c.lost != nil || sleep(c.ctx, 200*time.Millisecond) != nil {
			return 0
		}
		_, _ = f.Seek(int64(-torn), io.SeekCurrent) // it is a file
		if !moved {
			continue
		}
		if begun, err := os.Open(path); err == nil {
			_ = f.Close() // nothing was written to it
			f = begun
		}
	}
}

// c1 are the controls that JSON leaves as they are and some terminals obey.
var c1 = re(`[\x{80}-\x{9f}]`)

// columned are the members of an entry that logs shows in front.
var columned = strings.Fields("ts event session_id prompt_id")

// entry returns what logs prints for a line, "" if --session excludes it, which a damaged line never is. Whatever a
// terminal could obey is escaped, in JSON too.
func (c *command) entry(line []byte) string {
	fields, err := parseEntry(line)
	if err != nil {
		return fmt.Sprintf("damaged: %.300q\n", bytes.TrimSpace(line))
	}
	member := map[string]string{}
	rest := "" // what else it says
	for _, f := range fields[1 : len(fields)-2] {
		text := "-"
		if f.Value != nil {
			text = legibly(fmt.Sprint(f.Value))
		}
		member[f.Name] = text
		if !slices.Contains(columned, f.Name) && text != "" && !strings.HasSuffix(f.Name, "_sha256") {
			rest += " " + legibly(f.Name) + "=" + text
		}
	}
	if !strings.HasPrefix(member["session_id"], c.flags["session"]) {
		return ""
	}
	if c.on("json") {
		escape := func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) }
		return c1.expr().ReplaceAllStringFunc(string(line), escape)
	}
	when := member["ts"]
	if at, err := time.Parse(stampLayout, when); err == nil {
		when = at.Local().Format(time.DateTime)
	}
	return fmt.Sprintf("%s %-8s %-17s %s%s\n", when, shortID(member["session_id"]), member["event"],
		shortID(member["prompt_id"]), rest)
}

// reUnquoted is a value that logs shows without quotes.
var reUnquoted = re(`^[\w:./@+,-]*$`)

// legibly returns text on one line, with nothing that a terminal obeys, and quoted unless it is a plain word.
func legibly(text string) string {
	if reUnquoted.MatchString(text) {
		return text
	}
	return strconv.Quote(text)
}

// ---- the session: one run of a tool ----
//
// Each goroutine is a short story of one of the pieces, and whoever looks or decides has the turn:
//
//	child ─► relay.copyOutput ─► host terminal      relay.readKeys ─► child, or, while a typist works, held
//	               └────► backlog ◄──────────────────────┘
//	                         ▼
//	         watcher.detector: screen, what is asked ─► desk.carry, one for each question ─► typist ─► child
//	books.keepBooks: records of others ─► desk.carryHook and watchHook, for each hook's question
//	                                  └─► phone.doInputs: what the phone wants, in order ─► typist, or:
//	relay.writeTyping: the phone's keys, those that were held, replies to the child's queries ─► child
//	watchdog.watchSignals;  relay.copyTap, for each pipe of the child's output;  books.sendStream
//
// A sequence gives the turn away in await, and while it writes to the child; in between nobody else changes anything.
// Output goes to the host before we inspect it; keys go to the child before we inspect them. The turn guards the fields
// of all pieces, unless a field's comment says otherwise.

// Times of a session. A measured one names the tool that it was measured on.
const (
	keyGrace     = 300 * time.Millisecond // after a key at the keyboard, for the screen to show it
	dialogGrace  = 300 * time.Millisecond // claude 2.1 ignores keys in a dialog's first 0.1 to 0.2 s
	hookWait     = 2 * time.Second        // for a dialog's hook to call: 0.44 s, busy 1.4 (claude 2.1)
	hookCheck    = time.Second            // between looks whether a hook lives
	dialogGone   = time.Second            // a dialog left for good: a repaint takes 0.3 s (claude 2.1)
	hookUnasked  = 5 * time.Second        // the tool says that it asks nothing, although its hook waits
	sameMoment   = time.Second            // before a decision: a key and a tap may cross
	recordAfter  = time.Second / 50       // the start of the tool: before that only its end is recorded
	retryEvery   = time.Second            // between attempts to record a question
	lookTime     = time.Second            // for a typist to see its question
	frameTime    = 30 * time.Millisecond  // for a frame to be painted, with --stream: pieces ≤ 30 ms apart
	typistLook   = time.Second / 40       // between looks of a typist
	napTime      = time.Second / 4        // between two looks for keys, at most, of a program that sleeps meanwhile
	keyboardLook = time.Second / 4        // between looks whether the keyboard is ours, and the tool reads it
	tapQuiet     = 100 * time.Millisecond // of silence after the child's end, then a tap ends
	busyTime     = 3 * time.Second        // beyond its time: a typist waits for a pause of the output
	followTime   = time.Second            // for a program that may take one key to show it
	readTime     = 5 * time.Second        // to read it: until then it is only busy
	submitTime   = 5 * time.Second        // for a text to be taken: a machine under load paints it after 3.2
	inputTime    = time.Minute            // that what the phone wants waits for what is under way
	inputLook    = time.Second / 20       // between looks whether that is over
	stopTime     = 5 * time.Second        // for a turn to end: up to 1.6 s (qwen 0.24)
	sendTime     = 3 * time.Second        // for a tool to show a key, typed here or by us: busy 2.2 (claude 2.1)
	lookNotice   = time.Second            // between looks for what others record, at a tool's empty box
	lookIdle     = 5 * time.Second        // the same, where nothing is asked: each wakes the Go runtime six times
	ownSignal    = time.Second / 10       // for a signal that dumps core to be acted on: Linux has a SIGTERM overtake it
	endWait      = 5 * time.Second        // for our output to be read, once we are told to end
	drainSend    = 3 * time.Second        // for the last messages, where there is trouble with Telegram
	drainTurns   = 10 * time.Second       // for them, where they only wait for their turn: one a second
	drainStream  = 10 * time.Minute       // for all output, with --stream
	doingEvery   = time.Second            // between records of what is done
)

// Sizes of a session, in bytes unless said otherwise.
const (
	maxHeld     = 1000      // pieces of keys that wait for the typist, each of up to 4096 bytes
	maxTyping   = 64 << 10  // of keys that wait for the child
	maxUnread   = 256 << 10 // of output that the screen may lag behind the host
	maxMenuKeys = 100       // keys: nine choices, each reached past eight others, and its tick
	maxTapReads = 1000      // of a tap after the child's end
	tapBytes    = 64 << 10  // of one read of a tap: a pipe holds as much
	readBytes   = 8 << 10   // of one read
)

// suspendKey is ^Z: where a shell resumes us it stops the tool, and answers nothing.
const suspendKey = "\x1a"

// Reasons that are given in several places.
const (
	questionOpen = "a question is open: answer it, or press ESC with /keys" // refuses text
	programEnded = "the program ended"
	leftScreen   = "the question left the screen"
	worksAgain   = "the tool works again"
	waitsHere    = ": questions wait for the keyboard or `atlasbridge answer`"
)

var (
	// reArrow is a key that moves and decides nothing, once or, held down, several times; or one that is let go (kitty).
	reArrow = re(`^(\x1b[\[O][0-9;:]*[A-Z~]|\x1b\[[0-9;:]+:3u)+$`)
	// reHooksAsk is what claude says of the dialogs that its hooks may answer.
	reHooksAsk = re(`^(approve|answer:|permission)`)
	// reFirstWord is the beginning of a text up to the first blank.
	reFirstWord = re(`^\S*`)
	// reOpensList is a text behind which Enter may do more than send it.
	reOpensList = re(`^/\S*$|(^|\s)[@$]\S*$|\\$`)
)

// session is one run of a tool: what its pieces share, and the pieces. Each piece has the fields that are its business.
type session struct {
	world
	turnOrder
	// Set before the goroutines start; any of them may read them.
	st       *Store
	tg       *Telegram
	log      *slog.Logger
	adapter  *Adapter
	pty      PTY
	settings string          // the file with the tool's, "" none
	ctx      context.Context // of what goes on beside the child, until stop
	stop     func()

	// The turn guards these, and the fields of the pieces.
	cfg *Config
	rec SessionRecord
	det *Detector

	relay    *relay
	watcher  *watcher
	desk     *desk
	phone    *phone
	typist   *typist // who types, nil nobody
	watchdog *watchdog
	books    *books
}

// turnOrder is whose turn it is. Only the goroutine that has it may touch what it guards.
type turnOrder struct {
	turn      turn
	waiting   []waiter // who gave the turn away in await
	going     int      // goroutines that beside started
	childGone bool     // the child has ended: nothing is begun any more
}

// ended reports whether the child has, to those who await that.
func (s *turnOrder) ended() bool { return s.childGone }

// waiter is somebody in await.
type waiter struct {
	holds func() bool
	woken chan struct{} // closed when it holds
}

// lock waits for the turn.
func (s *turnOrder) lock() { s.turn.Lock() }

// unlock ends the turn, after those who await what holds now have been woken.
func (s *turnOrder) unlock() {
	s.wakeWaiting()
	s.turn.Unlock()
}

// wakeWaiting wakes the waiters whose condition holds now. Checking costs less than waking them in vain: each frame of
// a spinner would wake all.
func (s *turnOrder) wakeWaiting() {
	s.waiting = slices.DeleteFunc(s.waiting, func(w waiter) bool {
		woken := w.holds()
		if woken {
			close(w.woken)
		}
		return woken
	})
}

// until gives the turn away until holds is true. Whoever has the turn calls holds, too: one call more must do no harm.
func (s *turnOrder) until(holds func() bool) { s.await(time.Time{}, holds) }

// comes is until that ends with the child, too. It reports whether that lives.
func (s *turnOrder) comes(holds func() bool) bool {
	s.until(func() bool { return s.childGone || holds() })
	return !s.childGone
}

// await is until with an end at that time (zero: none). It reports whether holds is true.
func (s *turnOrder) await(until time.Time, holds func() bool) bool {
	s.wakeWaiting()
	for !holds() {
		var late <-chan time.Time
		if !until.IsZero() {
			left := time.Until(until)
			if left <= 0 {
				return false
			}
			late = time.After(left)
		}
		w := waiter{holds, make(chan struct{})}
		s.waiting = append(s.waiting, w)
		s.turn.Unlock()
		select {
		case <-w.woken:
			s.turn.Lock()
		case <-late:
			s.turn.Lock()
			s.waiting = slices.DeleteFunc(s.waiting, func(other waiter) bool { return other.woken == w.woken })
		}
	}
	return true
}

// awaitFor is await with an end after so long.
func (s *turnOrder) awaitFor(limit time.Duration, holds func() bool) bool {
	return s.await(time.Now().Add(limit), holds)
}

// beside starts a goroutine that has the turn except in await, and ends soon after the child; the end of the session
// waits for it. Who calls it has the turn. Its panic leaves no raw terminal behind.
func (s *session) beside(f func()) {
	s.going++
	s.spawn(func() {
		s.lock()
		defer s.unlock()
		f()
		s.going--
	})
}

// ---- start ----
//
// What can fail comes before the tool runs; if it fails, all before it is undone.

// cmdRun runs a tool and returns its exit status, a shell's if the tool cannot run.
func cmdRun(c *command) int {
	s, err := newSession(c)
	if err == nil {
		err = s.run(c.args)
	}
	if err == nil {
		return *s.rec.ExitCode
	}
	c.fail(err)
	switch {
	case errors.Is(err, errNoTool):
		return 127
	case errors.Is(err, fs.ErrPermission) && strings.HasPrefix(err.Error(), "starting "):
		return 126
	}
	return exitInternal
}

// newSession does what can fail before anything is spawned.
func newSession(c *command) (*session, error) {
	tool := filepath.Base(c.args[0])
	flags := c.timeout()
	flags["channel"] = c.flags["channel"]
	if c.on("stream") {
		flags["stream.enabled"] = "true"
	}
	cfg, err := c.config(flags)
	if err != nil {
		return nil, err
	}
	st, err := newStore(cfg.Dir, c.disk, cfg.RetentionDays)
	if err != nil {
		return nil, err
	}
	log := openLog(cfg.Dir, cfg.LogLevel)
	s := &session{
		world:     c.world,
		turnOrder: turnOrder{turn: make(turn, 1)},
		cfg:       cfg,
		st:        st,
		tg:        newTelegram(cfg, st, log),
		log:       log,
		adapter:   adapterFor(cmp.Or(c.flags["adapter"], tool)),
		rec:       sessionRecord(tool, c.args[1:], c.flags["name"]),
	}
	s.relay = &relay{
		session:      s,
		hostTerminal: hostTerminal{back: make(chan struct{}, 1)},
		output:       &backlog{wake: make(chan struct{}, 1), look: time.NewTimer(settleQuiet)},
	}
	s.watcher = &watcher{session: s}
	s.desk = &desk{session: s}
	s.phone = &phone{session: s}
	s.watchdog = &watchdog{session: s, signals: make(chan os.Signal, 8)}
	s.books = &books{session: s, ch: localChannel{}, notes: hostStream{c.stderr}, looks: make(chan time.Time, 1)}
	s.books.openChannel()
	if c.on("quiet") {
		s.books.notes = io.Discard
	}
	if s.adapter.streamsJSON(c.args[1:]) {
		s.relay.calls = map[string]string{}
	}
	if err := s.relay.findTerminal(c); err != nil {
		return nil, err
	}
	_, missing := findTool(c.args[0]) // then run says so, and an old recording stays as it was
	if c.on("record") && missing == nil {
		s.watcher.cast, err = startRecording(c.flags["record"], tool, s.relay.size(), time.Now())
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}

// timeout is what --timeout says about settings, "" where it was not given.
func (c *command) timeout() map[string]string {
	seconds := c.flags["timeout"]
	return map[string]string{"timeout_seconds": seconds, "permission_timeout_seconds": seconds}
}

// sessionRecord is the record of a run that begins now.
func sessionRecord(tool string, args []string, label string) SessionRecord {
	cwd, _ := os.Getwd() // a folder that is gone has no name
	return SessionRecord{
		Head:      Head{ID: newID()},
		Tool:      tool,
		Args:      redactArgs(args),
		Cwd:       cwd,
		Wrapper:   os.Getpid(),
		Label:     label,
		Status:    "active",
		Activity:  "starting",
		StartedAt: time.Now(),
	}
}

// findTerminal decides which of our streams the child gets. If one of them is a terminal, or the tool needs none, a
// stream that is no terminal is handed on as it is, but for a pipe of output or errors, which we copy: its reader may
// show a question to a person, as tee does. Nobody reads a file now, and what a full-screen tool logs there is not on
// its screen. Else the child gets a terminal to ask in, as output and errors, and as input if that brings nothing
// (/dev/null); our streams get its output without added carriage returns, errors apart.
func (r *relay) findTerminal(c *command) error {
	ours := [3]*os.File{c.stdin, c.stdout, c.stderr}
	for _, f := range slices.Backward(ours[:]) {
		if onTerminal(f) {
			r.TTY = f
		}
	}
	r.ttyOurs = ownTerminal(r.TTY)
	r.Resumes = resumes()
	r.in = hostStream{c.stdin}
	r.out = hostStream{c.stdout}
	if handsStreams {
		err := r.handOver(ours, r.adapter.needsNoTerminal(c.args[1:]))
		if err != nil {
			return err
		}
	}
	r.findKeyboard(ours)
	if c.keyboard != nil {
		r.in = c.keyboard
		r.interactive = true
	}
	r.fed = r.in != nil && !r.interactive
	return nil
}

// handOver is findTerminal for streams that a child can be given; batch is a tool that needs no terminal.
func (r *relay) handOver(ours [3]*os.File, batch bool) error {
	made := r.TTY == nil && !batch // a terminal that we have not
	r.Plain = made
	fed := kindOf(ours[0])&os.ModeCharDevice == 0 // a file, a pipe or a socket
	if !onTerminal(ours[0]) && (fed || !made) {
		r.Streams[0] = ours[0]
		r.in = nil
	}
	for i := 1; i <= 2; i++ {
		var err error
		switch {
		case onTerminal(ours[i]) || made && i == 1: // it gets its terminal
		case i == 2 && sameFile(ours[1], ours[2]):
			r.Streams[2] = r.Streams[1]
		case batch && i == 1 && r.calls != nil:
			err = r.tapStream(i, ours[i], r.auditTapped)
		case made || !batch && kindOf(ours[i])&os.ModeNamedPipe != 0:
			err = r.tapStream(i, ours[i], r.showTapped)
		default:
			r.Streams[i] = ours[i]
		}
		if err != nil {
			return err
		}
	}
	switch {
	case r.Streams[1] == nil:
	case r.Streams[2] == nil:
		r.out = hostStream{ours[2]}
	case r.TTY != nil:
		r.out = hostStream{r.TTY}
	default:
		r.out = io.Discard
	}
	return nil
}

// findKeyboard finds where somebody types. A tool that is the last of a pipeline reads its keys from the terminal, not
// from its input: less, fzf. One that is followed by others may share it with them: see readKeyboard.
func (h *hostTerminal) findKeyboard(ours [3]*os.File) {
	handed := h.Streams
	switch {
	case h.TTY != nil && h.TTY == ours[0]:
		h.keys = h.TTY
	case handed[0] != nil && handed[1] == nil && h.ttyOurs:
		h.keys, _ = openTerminal() // without one nobody can type
	}
	h.interactive = h.keys != nil
	h.wanted = handed[1] == nil
	if handsStreams && h.interactive {
		h.in = hostKeys{h.keys, &h.raw, h.back}
	}
}

// sameFile reports whether both are one file, or stream, or neither says.
func sameFile(a, b *os.File) bool {
	is, err := a.Stat()
	if err != nil {
		return true
	}
	other, err := b.Stat()
	return err != nil || os.SameFile(is, other)
}

// kindOf is what f is, as /dev/null where it does not say.
func kindOf(f *os.File) fs.FileMode {
	info, err := f.Stat()
	if err != nil {
		return os.ModeCharDevice
	}
	return info.Mode()
}

// tapStream has the child write its stream i to us, on the way to where it goes. seen is called by a goroutine of the
// tap's own.
func (r *relay) tapStream(i int, out *os.File, seen func(p []byte)) error {
	end, childs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("a pipe for the tool: %w", err)
	}
	r.Streams[i] = childs
	r.taps = append(r.taps, tap{r: end, w: childs, out: hostStream{out}, seen: seen})
	r.tapped++
	return nil
}

// size is that of the host's terminal, or 30 × 100 without one.
func (h *hostTerminal) size() Size {
	if h.TTY != nil {
		size, err := terminalSize(h.TTY)
		if err == nil && size.Rows > 0 && size.Cols > 0 {
			return size
		}
	}
	return Size{Rows: 30, Cols: 100}
}

// run runs the tool, and returns when all about it is reported. An error means that it did not run.
func (s *session) run(argv []string) error {
	release, err := s.st.HoldSession(s.rec.ID)
	if err != nil {
		return err
	}
	defer release()
	// None may end us with the terminal raw. SIGPIPE is caught, not ignored: the child would inherit that.
	s.catch(s.watchdog.signals, append(endSignals(), suspendSignal, resumeSignal)...)
	s.catch(make(chan os.Signal), syscall.SIGPIPE)
	s.ctx, s.stop = context.WithCancel(s.world.ctx)
	defer s.stop()
	env := childEnv(os.Environ(), s.cfg, s.rec.ID)
	if s.relay.TTY != nil {
		s.relay.resized = resizeSignals(s.relay.TTY) // before the size is read
	}
	size := s.relay.size()
	s.pty, err = s.start(s.installHooks(argv), env, size, s.relay.Host)
	defer os.Remove(s.settings) // they may hold keys; without any it fails
	for _, t := range s.relay.taps {
		t.w.Close() // the child has its own
	}
	if err != nil {
		return err
	}
	s.st.crashing = s.crashing
	defer s.st.catchPanic()
	s.books.tellDestination()
	if s.adapter.Name == "generic" {
		s.log.Warn("no adapter of its own: tool calls are not intercepted", "tool", s.rec.Tool)
	} else if adapterFor(argv[0]) == s.adapter { // --adapter may be another's
		s.checkVersion(argv[0])
	}
	if err := s.relay.makeRaw(); err != nil { // the terminal has gone
		s.pty.Terminate(0)
		s.pty.Close() // what counts is why
		return err
	}
	defer s.relay.restore()
	hangUp := s.st.connect(s.ctx, s.books.ch)
	s.watcher.startDetector(size)
	s.rec.PID = s.pty.PID()
	s.lock()
	s.attend()
	s.finish(hangUp)
	return nil
}

// attend starts what runs beside the child. It returns when the child is gone and its output drained, or when we are
// told to end and nobody reads it.
func (s *session) attend() {
	s.relay.output.hurry = s.watcher.cast != nil || s.cfg.Stream // from the first piece on
	s.spawn(s.relay.copyOutput)
	for _, t := range s.relay.taps {
		s.spawn(func() { s.relay.copyTap(t) })
	}
	if s.relay.in != nil {
		s.spawn(s.relay.readKeys)
	}
	s.spawn(func() {
		code := s.pty.Wait()
		for _, t := range s.relay.taps {
			t.r.SetReadDeadline(time.Unix(1, 0)) // wakes copyTap; fails after its end
		}
		s.lock()
		s.rec.ExitCode = &code
		s.unlock()
	})
	s.spawn(s.watcher.detector)
	s.spawn(s.books.keepBooks)
	s.spawn(s.watchdog.watchSignals)
	s.beside(s.relay.writeTyping)
	s.beside(s.phone.doInputs)
	if s.cfg.Stream {
		s.beside(s.books.sendStream)
	}
	drained := func() bool { return s.relay.drained && s.relay.tapped == 0 }
	s.until(func() bool { return s.rec.ExitCode != nil && (drained() || !s.watchdog.toldToEnd.IsZero()) })
	s.await(s.watchdog.toldToEnd.Add(endWait), drained) // nobody may read our output, or a grandchild write on and on
}

// checkVersion asks the tool of that name for its version beside the child, and warns of one that was not tried.
func (s *session) checkVersion(name string) {
	cfg := s.cfg // SIGHUP replaces it
	s.spawn(func() {
		t := s.adapter.probe(s.ctx, name, cfg)
		if s.ctx.Err() != nil || t.Warning == "" { // it was not let finish
			return
		}
		if !s.books.tellFirst(t.Warning) {
			s.lock()
			s.books.warning = t.Warning
			s.unlock()
		}
		s.log.Warn(t.Warning)
	})
}

// startDetector makes the detector that looks at the child's output from now on.
func (v *watcher) startDetector(size Size) {
	v.det = newDetector(v.adapter, int(size.Rows), int(size.Cols), v.cfg.DetectOptions)
	if v.cfg.Stream {
		v.det.Screen.Transcript(false) // from now on it is kept
	}
}

// spawn starts a goroutine whose panic leaves no terminal raw.
func (s *session) spawn(f func()) {
	go func() {
		defer s.st.catchPanic()
		f()
	}()
}

// crashing puts the host's terminal back and ends the child: a goroutine of ours panics. The others still run.
func (s *session) crashing() {
	s.stop()
	s.relay.restore()
	s.pty.Terminate(0)
	s.relay.restore() // it may just have been at readKeyboard
}

// ---- signals ----
//
// What the system tells us: signals, another size, a terminal that has gone.

// watchdog does what signals want. What is due by the clock is done at the detector's turns.
type watchdog struct {
	*session
	signals   chan os.Signal
	toldToEnd time.Time // when it was told to end, or saw that the terminal has gone; zero: neither
}

// checkHost ends the child as the end of its own terminal would, which ends the session, where the host's terminal has
// gone.
func (w *watchdog) checkHost() {
	if !w.childGone && w.toldToEnd.IsZero() && w.relay.hostGone() {
		_ = w.pty.Signal(syscall.SIGHUP) // a child that is gone needs none
		w.terminate(0)
	}
}

// watchSignals does what signals want, follows the size of the host's terminal, and stops with the tool.
func (w *watchdog) watchSignals() {
	for {
		var act func()
		select {
		case <-w.relay.resized:
			act = func() {
				w.relay.readKeyboard() // we are in the foreground: no other gets that signal
				w.relay.resize()
			}
		case sig := <-w.signals:
			act = func() { w.handleSignal(sig) }
		case <-w.pty.Stopped():
			act = w.stopWithTool
		case <-w.ctx.Done():
			return
		}
		w.lock()
		act()
		w.unlock()
	}
}

// handleSignal stops or continues the tool, or reloads the configuration on SIGHUP. A SIGHUP because the terminal is
// lost, or at a terminal where there is nothing to reload, ends the session, as every other signal does; but ^C and ^\
// at a terminal that is not raw are for the tool. Once the child has ended a signal cuts short what is left to send.
func (w *watchdog) handleSignal(sig os.Signal) {
	switch {
	case sig == suspendSignal && !w.relay.Resumes: // nobody would resume us
	case w.childGone && sig == suspendSignal:
		w.suspend()
	case w.childGone && sig == resumeSignal:
	case w.childGone:
		w.stop()
	case sig == resumeSignal:
		w.resume()
	case sig == syscall.SIGHUP && !w.relay.hostGone() && w.reloads(): // it may go yet: see checkHost
		w.tg.refresh(true)
		w.cfg = w.tg.cfg.Load()
	case sig == suspendSignal,
		(sig == os.Interrupt || sig == syscall.SIGQUIT) && w.relay.TTY != nil && !w.relay.raw.Load():
		_ = w.pty.Signal(sig) // a child that is gone needs none; when it stops, so do we
	default:
		_ = w.pty.Signal(sig) // the same
		grace := ownSignal
		if sig == syscall.SIGTERM {
			grace = 0
		}
		w.terminate(grace)
	}
}

// reloads reports whether there is something to reload. Without a terminal nothing else can be meant.
func (w *watchdog) reloads() bool {
	_, err := os.Stat(filepath.Join(w.cfg.Dir, "config.toml"))
	return err == nil || w.relay.TTY == nil
}

// hostGone reports whether the host's terminal has been closed, or belongs to nobody since the leader of our session
// ended.
func (h *hostTerminal) hostGone() bool {
	if h.TTY == nil || signal.Ignored(syscall.SIGHUP) { // nohup
		return false
	}
	_, err := terminalSize(h.TTY)
	return err != nil || h.ttyOurs && !ownTerminal(h.TTY)
}

// stopWithTool stops us with the tool, where a shell resumes us, when what it wrote before is on the host's terminal.
func (w *watchdog) stopWithTool() {
	if !w.relay.Resumes {
		return
	}
	w.awaitFor(2*typistLook, func() bool { return false }) // what is on its way through is counted by then
	ring(w.relay.output.wake)
	w.awaitFor(lookTime, func() bool { return w.relay.came() <= w.relay.taken })
	w.det.goneDue = time.Time{} // the question, which nobody reads now, may be looked at before the tool goes on
	w.suspend()
}

// suspend stops this process, with the host's terminal as it was, until the shell continues it: see resume.
func (w *watchdog) suspend() {
	w.relay.restore()
	w.st.standStill(w.signals)
}

// standStill stops this process, while it has nothing that others wait for, until a shell continues it; signals then
// gets the next ^Z.
func (s *Store) standStill(signals chan os.Signal) {
	s.LeavePoll()
	signal.Ignore(suspendSignal) // stopSelf's
	s.log.mu.Lock()              // no goroutine of ours has the lock between processes
	stopSelf()
	s.log.mu.Unlock()
	signal.Notify(signals, suspendSignal)
}

// resume continues the tool, even if we were stopped ourselves. In the background the host's terminal stays the
// shell's. Keys are passed on only then: SIGCONT would take back a ^Z among them. The terminal has shown the ^Z that
// stopped the tool behind its question, but no program gets that key: the question is the same.
func (w *watchdog) resume() {
	w.relay.takeOutput()
	screen := w.det.Screen
	line := screen.Row(screen.row)
	if strings.HasSuffix(line, "^Z") && screen.col == widthOf(line) {
		w.det.Feed([]byte("\b\b\x1b[K"), time.Now())
	}
	w.relay.output.hold()
	if w.relay.keys != nil && !inForeground(w.relay.keys) {
		w.relay.raw.Store(false) // whatever it was when we were stopped
	}
	w.tg.warn(w.relay.makeRaw())
	w.relay.resize()
	_ = w.pty.Signal(resumeSignal) // a child that is gone needs none
	ring(w.relay.output.wake)      // the keyboard may pass again
}

// terminate ends the child, if it has not ended by then, which ends the session.
func (w *watchdog) terminate(grace time.Duration) {
	if w.toldToEnd.IsZero() {
		w.toldToEnd = time.Now()
	}
	w.spawn(func() { w.pty.Terminate(grace) })
}

// ---- relay ----
//
// What the child writes goes to the host first, and what somebody types here to the child. While a typist works the
// keyboard waits.

// relay copies bytes both ways.
type relay struct {
	*session
	hostTerminal
	output *backlog     // what the host has got and the screen has not
	piped  atomic.Int64 // bytes of output so far from the child's pipes, as the screen gets them
	first  sync.Once    // what is written to the terminal first: the child's output, or a line of ours

	unshown error             // why output could not be written to the host, nil: all was
	taken   int64             // bytes of output that the screen has got
	drained bool              // that is all from the terminal
	tapped  int               // taps that have not ended
	calls   map[string]string // names of tools, by the ids of calls without a result; nil: the output is no stream-json
	line    []byte            // of that, unfinished

	lastKey time.Time   // when somebody last typed here
	begun   int         // characters of a line that was begun and not ended, in line mode
	quoted  bool        // the last of them was ^V
	fed     bool        // standard input is a pipe that has not ended: who feeds it answers
	held    []typedKeys // at the keyboard while a typist works
	typing  []byte      // for writeTyping, until it is written
}

// hostTerminal is the terminal, or the streams, that we were started with. All is set before the child starts, but for
// wanted, which the turn guards, and the marks.
type hostTerminal struct {
	Host // what the child has of it

	in          io.Reader // what is typed to the child, nil: nothing
	out         io.Writer
	taps        []tap    // streams of the child that are read along
	ttyOurs     bool     // the terminal is that of our session, see ownTerminal
	keys        *os.File // the terminal that somebody may type at, nil none
	interactive bool     // somebody may type
	wanted      bool     // the keyboard is to be read
	resized     <-chan os.Signal
	back        chan struct{} // a value when raw has become true

	raw     atomic.Bool                  // the terminal is raw, or is being changed: its keys are read
	undoRaw atomic.Pointer[func() error] // puts the terminal back, nil: it is not raw
}

// backlog is what the screen has not got yet: output that the host has, and keys that the child has. It gathers until
// it pauses for settleQuiet, for lookEvery at most, unless it is wanted at once.
type backlog struct {
	wake chan struct{} // the detector is to take it now
	look *time.Timer   // or when this fires, even if another has taken it: only the detector looks for questions
	mu   sync.Mutex    // guards what follows

	bytes []byte
	spare []byte    // what was taken last, to be used again
	at    time.Time // when the last output came
	since time.Time // when the first of it all came, zero: there is nothing
	hurry bool      // each piece is wanted at once
	ended bool      // no more comes

	keys    []typedKeys // those that the child has got
	held    bool        // no more go straight to the child: somebody else types
	passing bool        // some are being written to it
}

// typedKeys are keys for the child: typed here or by us, or what a pipe brought, nil at its end.
type typedKeys struct {
	keys   []byte
	at     time.Time
	behind int   // bytes of output that were there before
	modes  Modes // of the child's terminal before it got them
	unread bool  // nobody had read the answer that was being typed: they belong to its question
}

// toolUse is a call of a tool in stream-json output, or its result: among the content of a message (claude, qwen), or
// on a line of its own, with other names for the same (gemini).
type toolUse struct {
	Type    string
	ID      string
	Name    string
	Input   json.RawMessage
	UseID   string `json:"tool_use_id"` // the call of a result
	IsError bool   `json:"is_error"`

	ToolID     string          `json:"tool_id"`
	ToolName   string          `json:"tool_name"`
	Parameters json.RawMessage `json:"parameters"`
	Status     string          `json:"status"`
}

// hostStream is a standard stream of ours. Another process that has the same terminal may set it to
// O_NONBLOCK at any time: Read and Write wait all the same.
type hostStream struct {
	f *os.File
}

// hostKeys is the terminal that somebody types at. It is read while it is raw, which it is in the foreground alone: the
// kernel stops who reads it from the background.
type hostKeys struct {
	f    *os.File
	raw  *atomic.Bool
	back <-chan struct{} // a value when raw has become true
}

// tap is a pipe between the child and a stream of ours that is read along.
type tap struct {
	r    *os.File
	w    *os.File // the child's
	out  io.Writer
	seen func(p []byte) // is told of all of it
}

// Read waits for input.
func (h hostStream) Read(p []byte) (int, error) {
	for {
		n, err := h.f.Read(p)
		if !errors.Is(err, syscall.EAGAIN) {
			return n, err
		}
		if err := waitReady(h.f, false); err != nil {
			return 0, err
		}
	}
}

// Write writes all of p, or tells how much of it and why no more.
func (h hostStream) Write(p []byte) (int, error) {
	done := 0
	for {
		n, err := h.f.Write(p[done:])
		done += n
		if !errors.Is(err, syscall.EAGAIN) {
			return done, err
		}
		if err := waitReady(h.f, true); err != nil {
			return done, err
		}
	}
}

// Read waits until somebody types while the terminal is raw.
func (k hostKeys) Read(p []byte) (int, error) {
	for {
		for !k.raw.Load() {
			<-k.back
		}
		if err := waitReady(k.f, false); err != nil {
			return 0, err
		}
		if k.raw.Load() { // else we were stopped meanwhile
			return hostStream{k.f}.Read(p)
		}
	}
}

// add appends output, and reports whether that is too much. hurry: it is wanted at once.
func (b *backlog) add(p []byte, hurry, end bool) (full bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.bytes)+len(p) > cap(b.bytes) {
		b.bytes = slices.Grow(b.bytes, max(len(p), min(4*len(b.bytes)+readBytes, maxUnread+readBytes-len(b.bytes))))
	}
	b.bytes = append(b.bytes, p...)
	b.at = time.Now()
	b.ended = b.ended || end
	b.arm(hurry || end, b.at)
	return len(b.bytes) > maxUnread
}

// arm wakes the detector, at once or when it has all that gathers. The lock is held.
func (b *backlog) arm(atOnce bool, now time.Time) {
	if b.since.IsZero() {
		b.since = now
	}
	if atOnce || b.hurry || now.Sub(b.since) >= lookEvery {
		ring(b.wake)
	} else {
		b.look.Reset(settleQuiet)
	}
}

// take gives what is there, and when the last output came; drained: no more of that comes. The output is valid until
// the next call.
func (b *backlog) take() (p []byte, keys []typedKeys, at time.Time, drained bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p = b.bytes
	b.bytes = b.spare[:0]
	b.spare = p
	b.since = time.Time{}
	keys = b.keys
	b.keys = nil
	return p, keys, b.at, b.ended
}

// takeEach turns gathering off (hurry), or on. Who calls it has looked at what was taken, or will.
func (b *backlog) takeEach(hurry bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hurry = hurry
	b.look.Stop()
	if len(b.bytes) > 0 {
		b.arm(false, b.at)
	}
}

// typed notes keys about to go to the child, whose terminal has these modes, or reports false: they must not, a typist
// works.
func (b *backlog) typed(p []byte, modes Modes) (pass bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.passing = !b.held
	if b.passing {
		now := time.Now()
		b.keys = append(b.keys, typedKeys{keys: bytes.Clone(p), at: now, behind: len(b.bytes), modes: modes})
		b.arm(false, now)
	}
	return b.passing
}

// wrote notes that the keys are written.
func (b *backlog) wrote() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.passing = false
	if b.held {
		ring(b.wake) // who holds them waits for that
	}
}

// hold lets no more keys pass. It reports whether all before are written and known, else the detector is woken when
// they are.
func (b *backlog) hold() (alone bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = true
	if len(b.keys) > 0 {
		ring(b.wake)
	}
	return !b.passing && len(b.keys) == 0
}

// letPass ends a hold. It does nothing while a key is being written.
func (b *backlog) letPass() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = b.held && b.passing
}

// makeRaw sets the host's terminal to raw mode and has its keys read, where somebody types there and it is ours to set.
func (r *relay) makeRaw() error {
	if r.keys == nil || !r.wanted || !inForeground(r.keys) {
		return nil
	}
	r.raw.Store(true)
	undo, err := rawMode(r.keys, r.Streams[1] != nil && r.pty.Modes().Processed)
	if err != nil {
		r.raw.Store(false)
		return fmt.Errorf("setting the terminal to raw mode: %w", err)
	}
	r.undoRaw.CompareAndSwap(nil, &undo) // while it is raw, what it was at first counts
	ring(r.back)
	return nil
}

// readKeyboard reads the keyboard once it is ours and the tool's. The detector calls it again and again, because bash
// sends no signal to a process that it continues in the background and later brings to the foreground. And a program
// that reads the tool's output, such as less, may read the keyboard and need a terminal that is not raw, until the tool
// reads its own.
func (r *relay) readKeyboard() {
	if !r.mayListen() {
		return
	}
	if !r.wanted && r.pty.State().Reading == ReadingBusy || !inForeground(r.keys) {
		return
	}
	r.wanted = true
	r.tg.warn(r.makeRaw())
	r.resize()
}

// mayListen reports whether the keyboard is not read although it may be one day.
func (r *relay) mayListen() bool { return r.keys != nil && !r.raw.Load() && r.ctx.Err() == nil }

// restore puts the host's terminal back as it was. Any goroutine may call it, more than once.
func (h *hostTerminal) restore() {
	undo := h.undoRaw.Swap(nil)
	if undo != nil {
		_ = (*undo)() // whoever has the terminal next sees it; there is nothing else to try
		h.raw.Store(false)
	}
}

// copyOutput copies the child's output to the host, then hands it to the detector, until the end of both. A query to
// the terminal, or a report of a dialog, does not gather.
func (r *relay) copyOutput() {
	asks := []byte("]7501") // without its Esc, which is everywhere
	if r.TTY == nil {
		asks = []byte("\x1b")
	}
	buf := make([]byte, readBytes)
	for {
		n, err := r.pty.Read(buf)
		p := buf[:n]
		r.first.Do(func() {})
		_, lost := r.out.Write(r.forHost(p))
		if errors.Is(lost, syscall.EPIPE) { // the child is to learn what it would without us
			_ = r.pty.Signal(syscall.SIGPIPE) // one that is gone needs none
			r.pty.Close()                     // no signal may end it
		}
		if lost != nil && n > 0 { // perhaps the terminal has closed
			r.lock()
			r.unshown = lost
			r.unlock()
		}
		r.gather(p, bytes.Contains(p, asks), err != nil)
		if err != nil {
			return
		}
	}
}

// gather leaves output to the detector. In a flood the screen gets it here: a second goroutine at work beside us would
// take the processor from who writes (measured: a fifth of the bytes per second).
func (r *relay) gather(p []byte, hurry, end bool) {
	if r.output.add(p, hurry, end) {
		r.lock()
		defer r.unlock()
		r.takeOutput()
	}
}

// forHost returns output as the host's terminal needs it. While that is not raw, in the background or for others of a
// pipeline, its driver adds the carriage returns.
func (r *relay) forHost(p []byte) []byte {
	raw := r.raw.Load()
	shared := r.Streams[1] != nil
	if !handsStreams || r.TTY == nil || raw && !shared {
		return p
	}
	if raw {
		processed := r.pty.Modes().Processed
		_ = processOutput(r.keys, processed) // where it fails nobody sees the output
		if !processed {
			return p
		}
	}
	return bytes.ReplaceAll(p, []byte("\r\n"), []byte("\n"))
}

// copyTap copies what comes from a tap, until its end. It reads what a child that is gone left there, but waits for
// nobody else who holds it open.
func (r *relay) copyTap(t tap) {
	buf := make([]byte, tapBytes)
	var err error
	for patience := maxTapReads; err == nil; {
		var n int
		n, err = t.r.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) && patience > 0 { // the child is gone, see attend
			patience--
			t.r.SetReadDeadline(time.Now().Add(tapQuiet)) // where it fails Read does, too
			n, err = t.r.Read(buf)
		}
		if _, lost := t.out.Write(buf[:n]); lost != nil {
			err = lost // the tool learns it when the pipe is closed
		}
		t.seen(buf[:n])
	}
	t.r.Close() // nobody has written to it
	r.lock()
	r.tapped--
	r.unlock()
}

// showTapped hands the screen what the child wrote into a pipe, as a terminal shows it.
func (r *relay) showTapped(p []byte) {
	p = newlines(p)
	r.piped.Add(int64(len(p)))
	r.gather(p, false, false)
}

// auditTapped audits the tool calls in it.
func (r *relay) auditTapped(p []byte) {
	r.lock()
	defer r.unlock()
	r.auditToolCalls(p)
}

// newlines is p as a terminal shows it: a line feed begins a line.
func newlines(p []byte) []byte {
	return bytes.ReplaceAll(p, []byte("\n"), []byte("\r\n"))
}

// takeOutput hands the screen the output that the host has, and notes at their places in it the keys that the child
// has.
func (r *relay) takeOutput() {
	p, keys, at, drained := r.output.take()
	seen := 0
	for _, k := range keys {
		r.handleOutput(p[seen:k.behind], k.at)
		r.noteKeys(k, "cli:local")
		seen = k.behind
	}
	r.handleOutput(p[seen:], at)
	r.drained = drained
}

// handleOutput hands the screen output that the host has already, takes up what it says and answers what it asks.
func (r *relay) handleOutput(p []byte, now time.Time) {
	if len(p) == 0 {
		return
	}
	r.taken += int64(len(p))
	if r.Plain {
		modes := r.pty.Modes()
		if modes.Canonical && !modes.Processed {
			p = newlines(p)
		}
	}
	r.watcher.cast.output(p, now)
	for _, status := range r.det.Feed(p, now) {
		r.desk.handleStatus(status)
	}
	if r.calls != nil {
		r.auditToolCalls(p)
	}
	if len(r.typing) < maxTyping { // else the child asks and does not read
		r.typing = append(r.typing, r.det.Screen.TakeReplies(r.TTY == nil)...)
	}
}

// auditToolCalls reads more of stream-json output, a message a line, and audits the calls of tools in it and what they
// came to.
func (r *relay) auditToolCalls(p []byte) {
	var events []Event
	for line := range bytes.Lines(p) {
		r.line = append(r.line, line[:min(len(line), maxHookInput-len(r.line))]...)
		if line[len(line)-1] != '\n' {
			break
		}
		var m struct {
			toolUse
			Message struct{ Content []toolUse }
		}
		_ = json.Unmarshal(r.line, &m) // what is of another shape holds no calls
		r.line = nil
		for _, use := range append(m.Message.Content, m.toolUse) {
			id := cmp.Or(use.ID, use.UseID, use.ToolID)
			switch use.Type {
			case "tool_use":
				r.calls[id] = cmp.Or(use.Name, use.ToolName)
				input := use.Input
				if input == nil {
					input = use.Parameters
				}
				events = append(events, toolCall(r.rec.ID, r.calls[id], id, input))
			case "tool_result":
				failed := use.IsError || use.Status == "error"
				events = append(events, toolResult(r.rec.ID, r.calls[id], id, !failed))
				delete(r.calls, id)
			}
		}
	}
	if len(events) > 0 {
		r.books.audit(events...)
	}
}

// came are the bytes of output so far, from the child's terminal and its pipes.
func (r *relay) came() int64 {
	return r.pty.Came() + r.piped.Load()
}

// writeTyping writes queued keys that are no typist's.
func (r *relay) writeTyping() {
	for r.comes(func() bool { return len(r.typing) > 0 }) {
		keys := r.typing
		r.turn.Unlock()
		_, err := r.pty.Write(keys)
		r.lock()
		r.typing = r.typing[len(keys):]
		r.tg.warn(err)
		ring(r.output.wake) // the keyboard may pass again
	}
}

// resize gives the child the size of the host's terminal.
func (r *relay) resize() {
	size := r.size()
	if err := r.pty.Resize(size); err != nil {
		return // the child is gone
	}
	r.det.Resize(int(size.Rows), int(size.Cols), time.Now())
	changed := fmt.Sprintf("%dx%d", size.Cols, size.Rows)
	r.watcher.cast.event("r", changed, time.Now())
}

// readKeys passes on what is typed. An empty chunk is the end of a pipe that brought something: one without a byte
// (systemd, ssh without a terminal) must not answer the first question with an end of file.
func (r *relay) readKeys() {
	buf := make([]byte, 4096)
	some := false
	for n, _ := r.in.Read(buf); n > 0; n, _ = r.in.Read(buf) { // whatever ends it, no more is typed
		some = true
		modes := r.pty.Modes() // before the program has the keys: it may change them then
		if r.output.typed(buf[:n], modes) {
			_, err := r.pty.Write(buf[:n])
			r.output.wrote()
			r.tg.warn(err)
			continue
		}
		r.lock()
		r.takeOutput()
		r.handleKeys(typedKeys{keys: bytes.Clone(buf[:n]), at: time.Now()})
		r.until(func() bool { return r.childGone || len(r.held) < maxHeld && len(r.typing) < maxTyping })
		r.unlock()
	}
	r.lock()
	defer r.unlock()
	if some && !r.interactive {
		r.takeOutput()
		r.handleKeys(typedKeys{at: time.Now()})
	}
	r.fed = false
	ring(r.output.wake) // the terminal may have gone: see checkHost
}

// handleKeys passes on what could not pass by itself. While a typist works it is held.
func (r *relay) handleKeys(k typedKeys) {
	if r.typist != nil {
		k.unread = r.typist.stands()
		r.held = append(r.held, k)
		r.typist.stopped = r.typist.stopped || reBreak.MatchString(string(k.keys))
		return
	}
	keys := string(k.keys)
	if keys == "" {
		if !r.pty.State().Canonical {
			return
		}
		keys = "\x04\x04" // the line discipline makes the end from ^D; the first may only end a line
	}
	r.output.hold() // until these are written
	r.inject(keys, "cli:local")
}

// noteLine notes how much of an unfinished line the terminal holds after keys, typed in these modes: the system does
// not count it. A reader in raw mode gets what is there. ^D hands that over but ends no line; the key behind ^V is a
// character like others.
func (r *relay) noteLine(keys string, modes Modes) {
	for _, key := range keys {
		literal := r.quoted
		r.quoted = key == 0x16 && !literal
		size := 1
		if !modes.UTF8 { // its bytes are taken back one by one
			size = utf8.RuneLen(key)
		}
		switch {
		case !modes.Canonical || !literal && strings.ContainsRune("\r\n\x03\x15\x1a\x1c", key): // ^C ^U ^Z ^\
			r.begun = 0
		case !literal && key == modes.Erase:
			r.begun = max(0, r.begun-1)
		case literal || key != 0x04:
			r.begun += size
		}
	}
}

// inject queues keys for the child. by tells who pressed them.
func (r *relay) inject(keys, by string) {
	r.typing = append(r.typing, keys...)
	r.noteKeys(typedKeys{keys: []byte(keys), at: time.Now(), modes: r.pty.Modes()}, by)
}

// noteKeys notes keys that go to the child, and records them, but none of a secret. by tells who pressed them where
// they may answer what stands on the screen, else "".
func (r *relay) noteKeys(k typedKeys, by string) {
	keys := string(k.keys)
	r.noteLine(keys, k.modes)
	report := reReport.MatchString(keys)
	if by == "cli:local" && !report {
		r.lastKey = k.at
		r.det.motion.restart(k.at) // what a key moves does not move by itself
	}
	stops := keys == suspendKey && r.Resumes
	if by != "" && !report && !stops && !reArrow.MatchString(keys) {
		r.noteTyped(by)
	}
	r.det.Typed(k.keys, k.at)
	asked := r.desk.asked
	hidden := k.modes.Canonical && !k.modes.Echo // as when a password is read
	if !hidden && (asked == nil || !asked.screen.Secret) {
		r.watcher.cast.event("i", keys, k.at)
	}
}

// noteTyped notes who pressed a key that may answer what stands on the screen, which may not have settled yet.
func (r *relay) noteTyped(by string) {
	if r.desk.asked != nil {
		r.desk.asked.typedBy = by
	}
	if len(r.desk.hooks) == 0 {
		return
	}
	p := r.look()
	if p == nil {
		p = r.watcher.seen
	}
	if p != nil {
		for _, h := range r.desk.hooksOf(p) {
			h.typedBy = by
		}
	}
}

// ---- watcher ----
//
// The screen gets the output, and the detector says what it asks.

// watcher looks at the screen.
type watcher struct {
	*session
	seen   *Prompt     // what the detector last found, until it is gone
	seenAs string      // what the tool named then, see hooksOf
	cast   *castWriter // nil without --record
}

// detector has the screen take what has gathered and looks for questions, until the child has ended. What else is to be
// done again and again is done at its turns: it has keepBooks look for records of others, looks at the host's terminal,
// and records what the tool does.
func (v *watcher) detector() {
	turn := time.NewTimer(lookEvery) // there is nothing to look at yet
	for {
		select {
		case <-v.relay.output.wake:
		case <-v.relay.output.look.C:
		case <-turn.C:
		}
		v.lock()
		if v.childGone {
			v.unlock()
			return
		}
		v.books.noteActivity() // before the screen is read: a question that is found then is stored first
		v.relay.takeOutput()
		v.detect()
		v.watchdog.checkHost()
		v.relay.readKeyboard()
		select {
		case v.books.looks <- time.Now(): // a hook may call when its dialog is painted
		default:
		}
		reported := v.det.Screen.status.State == "blocked" // a dialog: it is wanted at once
		v.relay.output.takeEach(v.typist != nil || v.cast != nil || v.cfg.Stream || reported)
		if v.typist == nil && len(v.relay.typing) == 0 {
			v.relay.output.letPass()
		}
		turn.Reset(min(time.Until(v.detectAt(time.Now())), v.pause()))
		v.unlock()
	}
}

// pause is how long the detector may wait while the screen shows nothing new: others may record something, such as an
// answer, and a shell may bring us to the foreground.
func (v *watcher) pause() time.Duration {
	q := v.desk.inForce()
	switch {
	case q != nil && !q.rec.Idle:
		return lookOften
	case v.relay.mayListen():
		return keyboardLook
	case q != nil:
		return lookNotice
	}
	return lookIdle
}

// detectAt is when the detector has something to look for: nothing while a typist works, nor once nobody holds the
// child's terminal any more.
func (v *watcher) detectAt(now time.Time) time.Time {
	if v.typist != nil || v.relay.drained {
		return now.Add(lookIdle)
	}
	return v.det.Next(now)
}

// detect looks whether a question has come or gone.
func (v *watcher) detect() {
	now := time.Now()
	if v.detectAt(now).After(now) {
		return
	}
	tty := TTYState{}
	if v.det.WantTTY(now) {
		tty = v.terminalState(now)
	}
	p := v.det.Tick(tty, now)
	// The screen may have gone straight on to another question.
	if (v.seen != nil || v.desk.lapsed) && (p != nil || v.det.cur == nil) {
		v.desk.endSeen(p)
	}
	if p != nil {
		v.seen = p
		v.seenAs = v.desk.named
		v.desk.takeUp()
	}
}

// look returns what the screen asks this instant, nil nothing.
func (s *session) look() *Prompt { return s.det.Look(s.pty.State(), time.Now()) }

// terminalState looks at the child's terminal. In raw mode no line is begun: the system counts all that was typed.
func (v *watcher) terminalState(now time.Time) TTYState {
	tty := v.pty.State()
	if !tty.Canonical {
		v.relay.begun = 0
	}
	v.cast.tty(tty, now)
	return tty
}

// ---- desk ----
//
// A goroutine of its own carries each question, of the screen or a hook, to its end. One question is in force at a
// time: one that was already asked from the screen, then the hooks', in the order they came.

// desk is what is asked, and what is known of the dialogs of hooks that the screen may show.
type desk struct {
	*session
	asked  *question   // of the screen
	lapsed bool        // what stands on the screen expired: it may be asked again
	answer InputRecord // the tool's last, by its hook; no Text: none came

	hooked bool        // the tool's hooks ask
	hooks  []*question // of hooks, in the order they came
	named  string      // what a known tool says that it asks: the protocol's words, "" nothing
	calm   time.Time   // since when a known tool says that it asks nothing; zero: it asks
}

// question is a prompt that waits for an answer, and what is known of it beyond its record.
type question struct {
	rec     PromptRecord // Status "" until it is stored
	screen  *Prompt      // as the detector saw it; nil: a hook asks
	seenAt  time.Time    // when that was
	typedBy string       // who pressed a key that may have answered it, "" nobody
	end     *ending      // why it ends, nil: it stands

	stoodAt time.Time // a hook's: when its dialog was last known to stand; zero: it was not seen
}

// endSeen ends what was seen and has left the screen; p stands there instead, nil nothing that asks.
func (d *desk) endSeen(p *Prompt) {
	d.noteDialogs()
	d.watcher.seen = nil
	if d.lapsed {
		d.endExpired(leftScreen)
	}
	q := d.asked
	switch {
	case q == nil:
	case q.rec.Idle:
		q.leave(Canceled, worksAgain)
	case p != nil && !p.Idle:
		q.leave(Canceled, "replaced: the question changed")
	default:
		q.leave(Canceled, leftScreen)
	}
}

// takeUp carries what the screen asks, once what is carried now is over. The dialog of a hook's question tells only
// that it stands.
func (d *desk) takeUp() {
	p := d.watcher.seen
	if p == nil || d.childGone {
		return
	}
	d.noteDialogs()
	hooks := d.hooksOf(p)
	if len(hooks) > 0 {
		d.det.askedAt = nil // a hook's questions are no flood of the screen's
	}
	news := !p.Idle || p.Turn != TurnReady && d.cfg.NotifyIdle // an idle box is at the end of a turn
	if len(hooks) > 0 || d.asked != nil || !news {
		return
	}
	q := &question{screen: p, seenAt: time.Now()}
	d.asked = q
	d.watcher.capture(p)
	d.beside(func() { d.carry(q) })
	ring(d.relay.output.wake) // the next look for its answer is sooner
}

// leave makes q end as to, because of why, unless it is ending or was decided.
func (q *question) leave(to State, why string) {
	if q.end == nil && (q.rec.Status == "" || q.rec.Open()) {
		q.end = &ending{to: to, why: why}
	}
}

// closed reports whether nobody can answer q any more, or somebody has.
func (q *question) closed() bool { return q.end != nil || !q.rec.Open() }

// carry takes one question of the screen to its end: it waits for a hook that may ask the same, has the question
// stored, sent and answered, and types the answer.
func (d *desk) carry(q *question) {
	gone := func() bool { return q.end != nil }
	if d.expectsHook(q.screen) {
		d.await(q.seenAt.Add(hookWait), gone)
	}
	d.until(func() bool { return gone() || d.books.recorded && len(d.hooks) == 0 && d.typist == nil })
	for !gone() && !d.create(q) {
		d.awaitFor(retryEvery, gone)
	}
	if q.rec.Status != "" {
		d.ask(q)
		expired := q.rec.Status == Expired
		answered := q.rec.Status == ReplyReceived || expired && q.rec.Value != nil
		switch {
		case answered && gone():
			d.record(func() error {
				return d.st.end(&q.rec, &ending{to: Failed, why: q.end.why + " before the answer was typed"})
			})
		case answered:
			d.typeAnswer(q)
		case expired:
			d.lapsed = true
		}
		if d.watcher.seen == q.screen { // else another was seen before the answer came, and is asked now
			d.watcher.seen = nil // what expired, failed or was left to the terminal is not asked again by itself
		}
	}
	d.asked = nil
	d.carryNext(q)
}

// carryNext ends the carrying of q.
func (d *desk) carryNext(q *question) {
	if q.rec.Status == Resolved && q.rec.DecidedBy == "cli:answer" { // one that was not typed was not answered
		d.books.notify(answeredNotice(&q.rec))
	}
	d.takeUp()
}

// expectsHook reports whether a hook may still call about the dialog p. A tool that speaks the protocol must say that
// it asks for an approval or an answer (measured on claude 2.1: of a long command "permission prompt").
func (d *desk) expectsHook(p *Prompt) bool {
	mayAsk := reHooksAsk.MatchString(d.named) || d.det.Screen.status.State == ""
	return d.hooked && !p.Idle && p.Type == MultipleChoice && mayAsk
}

// inForce is the question that is asked now, nil none.
func (d *desk) inForce() *question {
	if d.asked != nil && d.asked.rec.Status != "" || len(d.hooks) == 0 {
		return d.asked
	}
	open := func(h *question) bool { return h.rec.Open() }
	return d.hooks[max(0, slices.IndexFunc(d.hooks, open))]
}

// create stores what the screen asks. False means that it failed: try again later.
func (d *desk) create(q *question) bool {
	life := d.cfg.Timeout
	if q.screen.Permission {
		life = d.cfg.PermissionTimeout
	}
	rec := PromptRecord{Asked: Asked{Prompt: *q.screen}}
	for i, ticked := range q.screen.Ticked {
		if ticked {
			rec.Ticked = append(rec.Ticked, q.screen.Choices[i].Key)
		}
	}
	if rec.Idle {
		rec.Constraints.MaxLength = maxMessage
		d.dressNotice(&rec)
	}
	rec.begin(fromScreen, d.rec.ID, life)
	// Waiting types nothing while somebody may still feed standard input, nor where only somebody here can answer.
	if d.relay.fed || d.cfg.Channel == "local" {
		rec.SafeDefault = nil
	}
	if !d.books.save(ref(rec)) {
		return false
	}
	q.rec = rec
	return true
}

// dressNotice gives a turn's end the tool's own answer, if its hook gave one in this turn, and notes whether somebody
// was at the keyboard.
func (d *desk) dressNotice(r *PromptRecord) {
	ended := r.Turn == TurnFinished || r.Turn == TurnAsks
	if ended && d.answer.Text != "" && d.answer.At.After(r.since) {
		r.Full = d.answer.Text
		r.Turn = TurnFinished
		if asksInWords(d.answer.Text) {
			r.Turn = TurnAsks
		}
	}
	if d.cfg.Stream && r.Turn == TurnFinished {
		r.Full = "" // it has been sent
	}
	r.Watched = d.phone.watched(d.relay.lastKey)
}

// ask sends q, which is stored and in force, once nobody has typed here for a while: who is here may answer it here. It
// returns when q is answered, expired or over, and that is recorded.
func (d *desk) ask(q *question) {
	for d.relay.interactive && !q.closed() && time.Since(d.relay.lastKey) < d.cfg.Away {
		d.await(d.relay.lastKey.Add(d.cfg.Away), q.closed)
	}
	d.record(func() error { return d.route(q) })
	d.record(func() error {
		return d.st.ask(&q.rec, func() *ending {
			// By the clock, which goes on while the machine sleeps.
			d.until(func() bool { return q.closed() || !time.Now().Before(q.rec.ExpiresAt) })
			if q.end != nil && q.typedBy != "" { // the keys that somebody pressed for it are its answer
				return &ending{to: Resolved, by: q.typedBy}
			}
			return q.end
		})
	})
}

// record tries to record something, again and again while the child lives.
func (d *desk) record(try func() error) {
	for {
		err := try()
		d.books.tellTrouble(err)
		if err == nil || d.awaitFor(retryEvery, d.ended) {
			return
		}
	}
}

// route has q go out, unless it is closed.
func (d *desk) route(q *question) error {
	if q.closed() {
		return nil
	}
	d.books.breakStream()
	return d.st.route(&q.rec, d.cfg.Channel)
}

// byID is the question with this id, nil when we have none.
func (d *desk) byID(id string) *question {
	for _, q := range append(d.hooks, d.asked) {
		if q != nil && q.rec.ID == id {
			return q
		}
	}
	return nil
}

// answeredNotice tells the phone that it was not the one to answer.
func answeredNotice(p *PromptRecord) Notice {
	return Notice{SessionID: p.SessionID, Ring: true,
		Text: "was answered with `atlasbridge answer`: " + valueName(p, *p.Value)}
}

// ---- hook dialogs ----
//
// A tool's hook asks in a process of its own, which gives the tool the answer. The dialog stands on the screen
// meanwhile, and may be answered there.

// hooksOf returns the waiting hooks' questions whose dialog p is: all of the first call whose arguments p shows, or
// that the tool names. A name that is reported while the dialog named before stands means the next one.
func (d *desk) hooksOf(p *Prompt) (all []*question) {
	shown := func(h *question) bool { return p.showsCall(h.rec.Tool, h.rec.Subject) }
	named := func(h *question) bool {
		return !p.Idle && (d.watcher.seenAs == "" || d.watcher.seenAs == d.named) && h.namedIn(d.named)
	}
	i := slices.IndexFunc(d.hooks, shown)
	if i < 0 {
		i = slices.IndexFunc(d.hooks, named)
	}
	if i < 0 {
		return nil
	}
	for _, h := range d.hooks {
		if h.rec.Call == d.hooks[i].rec.Call {
			all = append(all, h)
		}
	}
	return all
}

// namedIn reports whether the tool's words name the call that h asks about.
func (h *question) namedIn(words string) bool {
	return h.rec.Subject != "" && strings.HasSuffix(words, ":"+squeezed(h.rec.Subject))
}

// standsSeen reports whether the dialog of h stands on the screen.
func (d *desk) standsSeen(h *question) bool {
	return d.watcher.seen != nil && slices.Contains(d.hooksOf(d.watcher.seen), h)
}

// dialogStands reports whether the dialog of h stands on the screen, or the tool says that it does.
func (d *desk) dialogStands(h *question) bool { return d.standsSeen(h) || h.namedIn(d.named) }

// dialogLeft reports whether the dialog of h was there and is gone for good, or the tool has long said that it asks
// nothing.
func (d *desk) dialogLeft(h *question) bool {
	switch {
	case d.dialogStands(h):
		return false
	case !d.calm.IsZero() && time.Since(later(d.calm, h.rec.CreatedAt)) >= hookUnasked:
		return true
	}
	return !h.stoodAt.IsZero() && time.Since(h.stoodAt) >= dialogGone
}

// handleStatus notes what a known tool says of itself, and so which hook's dialog stands.
func (d *desk) handleStatus(status ProgramStatus) {
	if d.adapter.Box == nil {
		return
	}
	named := ""
	switch {
	case status.State == "blocked":
		named = squeezed(safely(status.Msg, maxFull))
		d.calm = time.Time{}
	case d.calm.IsZero():
		d.calm = time.Now()
	}
	d.noteDialogs()
	d.named = named
	d.noteDialogs()
}

// noteDialogs notes which hooks' dialogs stand: before that changes, and after.
func (d *desk) noteDialogs() {
	for _, h := range d.hooks {
		if d.dialogStands(h) {
			h.stoodAt = time.Now()
		}
	}
}

// addHook takes a question that `atlasbridge hook` has stored. If the screen has asked the same but sent nothing yet,
// that is dropped; else it stays, and the hook leaves it to the dialog.
func (d *desk) addHook(rec PromptRecord) {
	h := &question{rec: rec}
	q := d.asked
	switch {
	case q == nil:
	case q.screen.Idle:
		q.leave(Canceled, worksAgain)
	case !q.screen.showsCall(rec.Tool, rec.Subject):
	case q.rec.Status == "":
		q.leave(Canceled, "")
	default:
		d.books.tellTrouble(d.st.end(&h.rec, &ending{to: Canceled, why: "asked from the screen already"}))
		return
	}
	d.hooks = append(d.hooks, h)
	d.noteDialogs()
	d.beside(func() { d.carryHook(h) })
	d.beside(func() { d.watchHook(h) })
	ring(d.relay.output.wake) // see takeUp
}

// carryHook carries a hook's question to its end. The hook gives the tool its answer; watchHook notices if the dialog
// is answered here, or the hook ends.
func (d *desk) carryHook(h *question) {
	turn := func() bool { return h.closed() || d.inForce() == h }
	life := h.rec.ExpiresAt.Sub(h.rec.CreatedAt)
	if !d.await(h.rec.ExpiresAt.Add(-life/4), turn) {
		h.leave(Canceled, "its time was over before it could be asked: the dialog asks")
	}
	d.ask(h)
	d.until(func() bool { return h.rec.settled() || h.rec.Status == Injected || d.childGone }) // the hook passes it on
	if h.rec.Status == Injected {
		d.resolveHook(h)
	}
	d.awaitFor(dialogGone, func() bool { return d.childGone || !d.standsSeen(h) }) // it is painted over a moment later
	d.hooks = slices.DeleteFunc(d.hooks, func(other *question) bool { return other == h })
	d.carryNext(h)
}

// watchHook ends a hook's question that is over without us: its dialog has gone, or the hook itself, which lives until
// it has passed its answer on.
func (d *desk) watchHook(h *question) {
	done := func() bool { return !slices.Contains(d.hooks, h) }
	for next := time.Now(); !d.await(next, done); {
		next = time.Now().Add(hookCheck)
		if d.dialogLeft(h) {
			h.leave(Canceled, "answered or given up in the terminal, or asked there now")
		}
		if !d.st.Alive(h.rec.Call) {
			h.leave(Canceled, "the program that asked has ended")
			d.books.tellTrouble(d.st.Reap()) // it may have passed on its answer, and not have been able to record that
		}
	}
}

// resolveHook ends a question whose hook has given the tool its answer, once the dialog is gone, or at once without
// one. If a key was pressed here in the same moment, or the dialog had left by then, the key may have been faster: the
// reason says so.
func (d *desk) resolveHook(h *question) {
	passed := time.Now()
	d.await(passed.Add(d.cfg.EchoWindow), d.ended) // a key on its way may be there first
	d.await(passed.Add(dialogGone), func() bool { return d.childGone || !d.dialogStands(h) })
	d.record(func() error {
		return d.st.Move(&h.rec, Resolved, func(r *PromptRecord) {
			crossed := d.relay.lastKey.After(r.DecidedAt.Add(-sameMoment)) || h.stoodAt.Before(*r.DecidedAt) // it had left
			if h.typedBy == "cli:local" && crossed {
				r.Reason = bothAnswered
			}
		})
	})
	if d.standsSeen(h) {
		d.det.Sleep(time.Now().Add(d.cfg.EchoWindow))
		d.watcher.seen = nil
	}
}

// ---- inputs from the phone ----
//
// Inputs from the phone are done in order, one after the other. None is refused because something else is under way: it
// waits, for a while.

// phone is what the phone wants of the session.
type phone struct {
	*session
	inputs    []*InputRecord // in order
	fetching  int            // files that have not come
	phoneAt   time.Time      // when it last answered or sent something
	phoneEnds bool           // it has ended the program
}

// doInputs does what the phone asks for, in order; only what types nothing passes an input that waits.
func (p *phone) doInputs() {
	for p.comes(func() bool { return len(p.inputs) > 0 && p.typist == nil }) {
		r, why := p.nextInput()
		if r == nil {
			p.awaitFor(inputLook, p.ended)
			continue
		}
		p.inputs = slices.DeleteFunc(p.inputs, func(other *InputRecord) bool { return other == r })
		var reply Notice
		if why == "" {
			reply, why = p.handleInput(r)
		} else {
			why = fmt.Sprintf("it waited %s, and %s", span(inputTime), why)
		}
		p.inputDone(r, why, reply)
	}
}

// nextInput is the first input that can be done, or has waited too long, which why says; nil: all wait.
func (p *phone) nextInput() (r *InputRecord, why string) {
	waits := false
	for _, r := range p.inputs {
		if waits && r.types() {
			continue
		}
		late := !time.Now().Before(r.At.Add(inputTime))
		why := p.inputWaits(r)
		switch {
		case why == "" && late:
			why = "the session was stopped or busy"
		case why == "" && r.isText() && !p.relay.output.hold():
			why = "somebody types at the keyboard"
		}
		if why == "" || late {
			return r, why
		}
		waits = true
	}
	return nil, ""
}

// inputWaits returns why the input has to wait, although not for long, "" if it need not.
func (p *phone) inputWaits(r *InputRecord) (why string) {
	switch {
	case r.Kind == "stop" && p.adapter.Box != nil && p.relay.came() > p.relay.taken &&
		!p.inTurn(): // the output may say that it works
		return p.rec.Tool + " keeps writing"
	case !r.types(), r.Reason != "":
		return ""
	}
	q := p.desk.inForce()
	switch {
	case q != nil && q.rec.Status != "" && !q.rec.Open():
		return "an answer is still on its way to the tool"
	case r.File != nil:
		return "its file did not come"
	case p.asks().ID != "", !r.isText():
		return ""
	}
	tty := p.pty.State()
	now := time.Now()
	look := p.det.Look(tty, now)
	switch {
	case look.isQuestion() && now.After(r.At.Add(submitTime)): // nobody asks it: the typist tells
		return ""
	case p.adapter.Name == "generic" && tty.Reading == ReadingBusy:
		return "the program does not read its keyboard"
	}
	return p.boxWaits(look, p.det.Box(tty, now))
}

// boxWaits returns what keeps a text from the input box for now, "" for nothing. A program that reads and has shown
// nothing asks nothing.
func (p *phone) boxWaits(look *Prompt, box inputBox) (why string) {
	silent := look != nil && !look.Secret && slices.Contains(look.Signals, "silence") && box.found && box.draft == ""
	switch {
	case look.isQuestion() && !silent:
		return questionOpen
	case !box.found:
		return "there is no input box on the screen"
	case time.Since(p.relay.lastKey) < sendTime:
		return "somebody types at the keyboard, and the input box does not show it yet"
	}
	return ""
}

// handleInput does one thing: text, keys, a look at the screen, the question again, the end. It returns what to reply,
// or why it is refused.
func (p *phone) handleInput(r *InputRecord) (reply Notice, why string) {
	if fromPhone(r.By) {
		p.phoneAt = time.Now()
	}
	switch r.Kind {
	case "answer": // the tool's own Stop hook
		p.desk.answer = *r
	case "screen":
		reply.Mono = cmp.Or(dense(safeText(p.det.Screen.Text())), "(the screen is empty)")
	case "cancel":
		p.phoneEnds = true
		p.watchdog.terminate(0)
		reply.Text = "⏹ ending the program"
	case "stop":
		why = p.stopTurn(r)
	case "again":
		why = p.askAgain()
	case "keys": // the child sees them as typed: ^C becomes SIGINT where its terminal is set so
		asked := p.asks()
		switch {
		case r.PromptID != "" && (asked.ID != r.PromptID ||
			p.watcher.seen != nil && !p.watcher.seen.same(p.look())):
			return reply, "the question that you replied to does not stand here"
		case r.WrittenAt.Before(asked.CreatedAt.Add(textAfter * time.Second)): // nobody can have read it
			return reply, "you wrote that before this was asked"
		case r.WrittenAt.Before(p.relay.lastKey):
			return reply, "somebody typed at the keyboard since you wrote that: look at /screen"
		}
		sent := 0
		for _, name := range strings.Fields(r.Text) {
			keys := keyBytes(name, p.det.Screen.modes[modeAppCursor]) // only names that are known get here
			p.relay.inject(keys, r.By)
			sent += len(keys)
		}
		p.auditInput(r, Field{"keys", r.Text}, Field{"bytes_len", sent})
	case "text", "file":
		reply.Text, why = p.inputText(r)
	default:
		why = "this session does not know how to do that"
	}
	return reply, why
}

// asks is the question that is open now, empty where there is none.
func (p *phone) asks() (open PromptRecord) {
	q := p.desk.inForce()
	if q != nil && !q.closed() && !q.rec.Idle {
		open = q.rec
	}
	return open
}

// watched reports whether somebody is at the keyboard, and not at the phone; last is when they did something here.
func (p *phone) watched(last time.Time) bool {
	return p.relay.interactive && time.Since(last) < p.cfg.Away && last.After(p.phoneAt)
}

// askAgain has what stands on the screen asked anew, after a question that expired or could not be answered.
func (p *phone) askAgain() (why string) {
	if p.desk.inForce() != nil {
		return "a question is open already"
	}
	look := p.look()
	if look == nil || look.Idle {
		return "the question is no longer on the screen"
	}
	p.watcher.seen = nil
	p.desk.endExpired("it was asked again")
	p.det.Again()
	ring(p.relay.output.wake)
	return ""
}

// stopTurn presses the key that interrupts a turn, again where the tool asks for it, and waits for the turn's end.
func (p *phone) stopTurn(r *InputRecord) (why string) {
	known := p.adapter.Box != nil
	switch {
	case known && !p.inTurn():
		return p.rec.Tool + " is not working: there is nothing to stop"
	case known && p.det.turn.since.After(r.WrittenAt.Add(textAfter*time.Second)):
		return "you wrote that before this turn began: /stop again stops it"
	}
	p.relay.inject(p.adapter.Stop, r.By)
	p.auditInput(r, Field{"command", r.Kind}, Field{"bytes_len", len(p.adapter.Stop)})
	twice := false
	for late := time.Now().Add(stopTime); known && p.inTurn() && !p.childGone; {
		if again := p.adapter.StopAgain.MatchString(p.det.Screen.Text()); again && !twice {
			twice = true
			p.relay.inject(p.adapter.Stop, r.By)
		}
		if !time.Now().Before(late) {
			return "the key was pressed, but " + p.rec.Tool + " still works: look at /screen"
		}
		p.awaitFor(inputLook, p.ended)
	}
	return ""
}

// inTurn looks, and reports whether the tool works, or asks something meanwhile.
func (p *phone) inTurn() bool {
	p.look()
	q := p.desk.inForce()
	return p.det.Working() || q != nil && !q.rec.Idle
}

// inputText types into an input box or a REPL, and audits what was typed, even if no Enter followed. note is what else
// is to be told of that.
func (p *phone) inputText(r *InputRecord) (note, why string) {
	asked := p.asks()
	switch {
	case r.Reason != "":
		return "", r.Reason
	case asked.Secret:
		return "", typedHere
	case asked.ID != "":
		return "", questionOpen
	}
	t := &typist{session: p.session, boxed: true, text: cleanText(r.Text)}
	t.command = reOwnCommand.MatchString(t.text)
	if t.command {
		t.text = t.text[1:]
	}
	why = t.work()
	t.passHeld()
	if t.sent > 0 {
		text := []byte(cleanText(r.Text))
		sum := fmt.Sprintf("%x", sha256.Sum256(text))
		p.auditInput(r, Field{"bytes_len", len(text)}, Field{"text_sha256", sum})
	}
	return t.note, why
}

// fetch gets the file of an input, which then types where that was put, and what was written below it, or has the
// reason why it cannot.
func (p *phone) fetch(r *InputRecord) {
	ctx, cancel := context.WithDeadline(p.ctx, r.At.Add(inputTime/2)) // others wait behind it
	p.fetching++
	p.spawn(func() {
		defer cancel()
		path, body, err := p.tg.fetch(ctx, p.rec.ID, r.File)
		p.lock()
		defer p.unlock()
		p.fetching--
		r.File = nil
		switch {
		case p.childGone:
		case err != nil:
			r.Reason = "the file could not be fetched: " + err.Error()
		default:
			p.auditInput(r, hidden("file", string(body))...)
			// qwen sends no picture's path alone, others make something else of it.
			r.Text = path + " " + cmp.Or(r.Text, "(from the phone)")
		}
	})
}

// inputDone records that r was done, or why it was refused, and replies, if only with a mark at the message. A text
// that was typed answers a tool that was idle.
func (p *phone) inputDone(r *InputRecord, why string, reply Notice) {
	typed := r.isText() && why == ""
	after := *r
	after.Status = "done"
	after.Reason = why
	switch {
	case why != "":
		after.Status = "refused"
		reply = Notice{Text: "✗ " + why, Ring: true}
	case r.Kind == "answer":
		after.Text = "" // it is in the notice's record from then on
	}
	p.books.save(&after)
	reply.ReplyTo = r.ReplyTo
	reply.ThreadID = r.ThreadID
	reply.Done = reply.Text+reply.Mono == "" && r.Kind != "again" && r.ReplyTo != 0 // else it is no message of theirs
	if r.Kind != "answer" {
		p.books.notify(reply)
	}
	notice := p.desk.asked
	if typed && notice != nil && notice.rec.Idle {
		notice.typedBy = r.By
		notice.leave(Canceled, "")
	}
}

// auditInput audits what the phone has the tool get: keys by their names, texts and files by length and hash.
func (p *phone) auditInput(r *InputRecord, about ...Field) {
	fields := append(person(r.By, r.User), about...)
	p.books.audit(Event{"INPUT_FORWARDED", p.rec.ID, "", fields})
}

// ---- books ----
//
// What is recorded, and who learns of it.

// books keeps the session's records and reports.
type books struct {
	*session
	ch    Channel
	notes io.Writer // for our own words to the person at the terminal

	looks    chan time.Time // a value when others may have recorded something: see keepBooks
	recorded bool           // the session is in the state, as far as that can be written
	notedAt  time.Time      // when noteActivity last recorded something
	trouble  string         // with the state or the audit log, as it was told; "" none
	warning  string         // of the tool's version, to be told at the end
}

// openChannel readies what asks on the phone, if anything does.
func (b *books) openChannel() {
	b.rec.Local = b.cfg.Channel == "local"
	b.tg.session = b.rec.ID
	b.tg.tell = b.tellFirst
	if b.network != nil {
		b.tg.http.Transport = b.network
		b.tg.jitter = b.dice
	}
	if b.rec.Local {
		return
	}
	b.ch = b.tg
	if b.cfg.Stream {
		b.tg.stream = &stream{}
	}
}

// connect has the channel show what it is to show, and Telegram listened to while no other process does, until ctx
// ends. hangUp ends that when the channel has said what there is to say, or after the limit: then the rest is owed.
func (s *Store) connect(ctx context.Context, ch Channel) (hangUp func(limit time.Duration)) {
	ctx, cut := context.WithCancel(ctx)
	lastWords := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() {
		defer s.catchPanic()
		ch.Show(ctx, lastWords)
		cut()
	})
	if phone, ok := ch.(*Telegram); ok {
		beside.Go(func() {
			defer s.catchPanic()
			phone.Poll(ctx)
		})
	}
	return func(limit time.Duration) {
		close(lastWords)
		time.AfterFunc(limit, cut)
		beside.Wait()
	}
}

// keepBooks reads the state beside the child, so that a long history does not delay it. It records the session, and
// follows what others record of it. A child that ends first is recorded once, with its end.
func (b *books) keepBooks() {
	err := b.st.open()
	b.lock()
	b.tellTrouble(err)
	if b.await(b.rec.StartedAt.Add(recordAfter), func() bool { return b.rec.ExitCode != nil }) {
		b.unlock()
		return
	}
	if os.Getenv("GOGC") == "" { // 12 MB instead of 16, less than 1 % more time at full output (measured)
		time.AfterFunc(time.Second, func() { debug.SetGCPercent(25) }) // the first collection would delay the first keys
	}
	b.save(ref(b.rec))
	b.recorded = true
	b.unlock()
	for r := range b.st.Follow(b.ctx, b.rec.ID, b.looks) {
		b.lock()
		b.relay.takeOutput() // and keys: they were first
		if !b.childGone {
			b.handleRecord(r)
		}
		b.unlock()
	}
}

// handleRecord takes up a record that somebody else wrote: a decision, a hook's question, the phone's wish.
func (b *books) handleRecord(rec Record) {
	switch r := rec.(type) {
	case *InputRecord:
		if r.Status != "queued" {
			return
		}
		in := ref(*r)
		b.phone.inputs = append(b.phone.inputs, in)
		if in.File != nil {
			b.phone.fetch(in)
		}
	case *PromptRecord:
		q := b.desk.byID(r.ID)
		switch {
		case q == nil && r.Source == fromHook && r.Status == Created:
			b.desk.addHook(*r)
		case q == nil || r.Status == q.rec.Status || b.typist != nil && b.typist.q == q:
		default:
			news := q.rec.Open()
			q.rec = *r
			if news && !r.Open() && fromPhone(r.DecidedBy) {
				b.phone.phoneAt = time.Now()
			}
		}
	}
}

// noteActivity records what the tool does, but not each short change of that.
func (b *books) noteActivity() {
	activity := b.det.Activity()
	if b.recorded && activity != b.rec.Activity && time.Since(b.notedAt) >= doingEvery {
		b.notedAt = time.Now()
		b.rec.Activity = activity
		b.save(ref(b.rec))
	}
}

// save stores records, or tells the operator and returns false. What is not in the state is not typed.
func (b *books) save(recs ...Record) bool {
	err := b.st.keep(recs...)
	b.tellTrouble(err)
	return err == nil
}

// audit enters events, and what the audit log lacks. That it could not is told.
func (b *books) audit(events ...Event) {
	_ = b.st.Audit(events...) // is trouble
	b.tellTrouble(nil)
}

// tellTrouble tells the operator of trouble with the state or the audit log, err or else what the store noted: once,
// and once when it is over.
func (b *books) tellTrouble(err error) {
	held := "the state cannot be written, so nothing is asked or typed: "
	if err == nil {
		held = ""
		err = b.st.Trouble()
	}
	switch {
	case err == nil && b.trouble != "":
		b.trouble = ""
		b.log.Info("what happens is recorded again")
		b.notify(Notice{Text: "✓ what happens here is recorded again"})
	case err != nil && b.trouble == "":
		b.trouble = err.Error()
		b.log.Error("what happens is not recorded", "error", b.trouble)
		b.notify(Notice{Text: "⚠ " + held + redact(b.trouble), Ring: true})
	}
}

// tellDestination tells the person at the terminal where questions go, before anything of the child's is copied.
func (b *books) tellDestination() {
	where := b.cfg.whyLocal() + waitsHere
	if b.cfg.Channel == "telegram" {
		where = "questions go to Telegram, bot " + b.tg.botID()
		if b.relay.interactive && b.cfg.Away > 0 {
			where += ", " + span(b.cfg.Away) + " after your last key"
		}
		users := b.cfg.row("telegram.allowed_users")
		if variable, ok := strings.CutPrefix(users.Origin, "environment "); ok { // perhaps another program's
			where += "; " + variable + " lets " + string(users.Value) + " answer"
		}
	}
	b.tell(where)
}

// tell says something to the person at the terminal. Any goroutine may call it.
func (b *books) tell(text string) {
	text = "atlasbridge: " + text + "\n"
	if b.relay.raw.Load() {
		text = strings.ReplaceAll(text, "\n", "\r\n")
	}
	fmt.Fprint(b.notes, text)
}

// tellFirst reports trouble at the terminal, once, and only before the child prints; else told is false. Any goroutine
// may call it.
func (b *books) tellFirst(trouble string) (told bool) {
	b.relay.first.Do(func() {
		b.tell(trouble)
		told = true
	})
	return told
}

// localChannel is the channel where there is no Telegram. It reaches nobody: questions wait.
type localChannel struct{}

// Show has nobody to show anything.
func (localChannel) Show(context.Context, <-chan struct{}) {}

// Notify tells nobody.
func (localChannel) Notify(Notice) {}

// Close has nothing to close.
func (localChannel) Close() error { return nil }

// notify sends a message that asks nothing, after those before.
func (b *books) notify(n Notice) {
	n.SessionID = b.rec.ID
	if !n.Done { // that is no message
		b.breakStream()
	}
	b.ch.Notify(n)
}

// ---- stream ----
//
// With --stream the phone gets all output, in messages that grow.

// sendStream looks at each frame of output, and gathers it for flush_ms.
func (b *books) sendStream() {
	sent := int64(0)
	for b.comes(func() bool { return b.relay.taken > sent }) {
		flush := time.Now().Add(b.cfg.Flush)
		for time.Now().Before(flush) && !b.childGone {
			b.awaitFor(min(frameTime, time.Until(flush)), b.ended)
			b.det.ReadWindow()
		}
		if b.childGone {
			return
		}
		sent = b.relay.taken
		b.gatherStream(false)
	}
}

// gatherStream takes over the output since the last time. end: the program is gone.
func (b *books) gatherStream(end bool) {
	if b.tg.stream != nil {
		lines, live := b.det.Transcript(end)
		b.tg.stream.add(lines, live)
		ring(b.tg.bell)
	}
}

// breakStream has the stream go on in a message of its own: another one is about to be sent.
func (b *books) breakStream() {
	if b.tg.stream != nil {
		b.gatherStream(false)
		b.tg.stream.breakHere()
	}
}

// ---- the typist ----
// It is the only way for an answer, or a text from the phone, to become bytes that the child reads.

// typist types one answer, or one text, closed loop. While it works the keyboard is held and nobody looks for
// questions. Before its first key the question must stand on the screen as it was shown, all of it; before Enter is
// pressed in a menu the choice under the pointer must be the one that was chosen, by its label. A text goes into an
// empty input box alone. If the screen does not follow in time it stops and tells the operator. It never types at what
// it has not just seen, and counts nothing as typed that was not written.
type typist struct {
	*session
	q       *question // whose answer it is; nil: the phone's text
	boxed   bool      // what is typed goes into the tool's input box, else it answers a question
	text    string
	command bool   // that is a command of the tool's own
	note    string // what else is to be told of the answer, "" nothing

	began     time.Time // the work
	unsure    time.Time // since when what changed in the question may be seen moving, zero: nothing may
	steer     bool      // the next keys choose nothing: they move a pointer, or write into a box
	given     bool      // bytes of the answer have reached the child, or a text's Enter
	partly    bool      // some had before the last were written
	done      bool      // all is typed
	sent      int       // bytes that were written last, 0: none yet
	sentAt    time.Time // when
	screenSHA string    // SHA-256 of what stood on the screen when the first key went
	stopped   bool      // at the keyboard, or a write has failed
	word      string    // an answer of which the first key was typed alone
}

// sight is what stands on the screen this instant.
type sight struct {
	look    *Prompt // what it asks, nil nothing
	tty     TTYState
	waiting int  // bytes of input that nobody has read, see PTY
	late    bool // the time is over
}

// Reasons of a typist: it looks again, however late it is; or the rest is not typed.
const (
	whyWait    = "not yet"
	textStays  = "the text is in the input box but was not taken; look at the terminal"
	whyStopped = "it was stopped at the keyboard"
	whyEnded   = "the program ended before the answer was typed"

	notFollowed = "the menu did not follow the keys; look at the terminal"
)

// work types when nobody else does and the keyboard is held, and returns why not all is typed, "" it is.
func (t *typist) work() (why string) {
	t.until(func() bool { return t.childGone || t.session.typist == nil && t.relay.output.hold() })
	t.session.typist = t
	t.relay.output.takeEach(true)
	t.began = time.Now()
	do := t.reply
	if t.boxed {
		do = t.send
	}
	why = do()
	if why == "" {
		t.done = true
		why = t.echo()
	}
	switch {
	case why == "" || t.q == nil || t.sent == 0:
	case t.pty.TakeBack(t.sent): // it must not answer the next question
		t.given = t.partly
	case !t.given:
		why += "; its pointer may have moved"
	}
	if t.given && (why == whyStopped || why == whyEnded) {
		why = ""
	}
	if why == "" {
		t.dropHeld()
	}
	return why
}

// press types the keys that find returns for the screen as it is this instant. While find returns why there are none,
// or output comes before they are written, it looks again, until the time is over. The first key waits for mayBegin,
// too.
func (t *typist) press(within time.Duration, find func(v sight) (keys, why string)) (why string) {
	until := time.Now().Add(within)
	for ; ; t.awaitFor(typistLook, func() bool { return t.childGone || t.stopped }) {
		now := time.Now()
		switch {
		case t.stopped:
			return whyStopped
		case t.childGone:
			return whyEnded
		case len(t.relay.typing) > 0:
			continue
		case t.relay.came() > t.relay.taken: // it may take the question away
			if !t.done && now.After(until.Add(busyTime)) {
				return "the program keeps writing"
			}
			t.relay.takeOutput()
			continue
		}
		waiting := t.pty.Waiting() // first: a program that reads after it took the key reads on
		tty := t.watcher.terminalState(now)
		v := sight{t.det.Look(tty, now), tty, waiting, !now.Before(until)}
		keys, why := "", ""
		if t.sent == 0 {
			why = t.mayBegin(v, until)
		}
		if why == "" {
			keys, why = find(v)
		}
		if why == "" && keys != "" {
			why = t.write(keys)
		}
		asked := why == questionOpen // it is to be asked, which waits for us
		if why == "" || asked || v.late && why != whyWait {
			return why
		}
	}
}

// write writes keys, unless output is waiting to be read, which may take the question away: then it tells to wait.
func (t *typist) write(keys string) (why string) {
	if t.q != nil && !t.steer {
		t.det.Answering()
	}
	at := time.Now()
	modes := t.pty.Modes()              // the program that has taken the key may set others
	if t.relay.came() > t.relay.taken { // immediately before the key goes
		return whyWait
	}
	t.turn.Unlock()
	_, err := t.pty.Write([]byte(keys))
	t.lock()
	if err != nil {
		t.stopped = true
		return "it could not be typed: " + err.Error()
	}
	t.sent = len(keys)
	t.sentAt = at
	t.partly = t.given
	t.given = t.given || !t.steer
	t.relay.noteKeys(typedKeys{keys: []byte(keys), at: time.Now(), modes: modes}, "")
	return ""
}

// mayBegin returns why the first key must not be typed, "" if it may: the program would not read it, or not by itself,
// or its question, or the empty box, does not stand. A program that does not read may be busy for a moment beyond that
// time.
func (t *typist) mayBegin(v sight, until time.Time) (why string) {
	switch {
	case t.q != nil && (v.tty.Reading == ReadingBusy || v.tty.Sleeps && time.Since(t.began) < napTime):
		why = "the program does not read its keyboard; look at the terminal"
	case v.waiting > 0:
		why = "keys were typed that the program has not read; look at the terminal"
	case t.relay.begun > 0:
		why = "a line was begun at the keyboard: end it there, or empty it"
	case t.boxed:
		return t.boxIsEmpty(v)
	default:
		return t.stillAsked(v)
	}
	if time.Since(until) < followTime {
		return whyWait
	}
	return why
}

// stands reports whether the answer is unread or, where that is unknown, its question still stands.
func (t *typist) stands() bool {
	waiting := t.pty.Waiting()
	return t.q != nil && (waiting > 0 || waiting < 0 && t.q.screen.same(t.look()))
}

// overtaken reports whether look is another question than the one that is answered; a text answers none.
func (t *typist) overtaken(look *Prompt) bool {
	asks := look != nil && !look.Idle && look.Type != Unknown
	return asks && (t.q == nil || !t.q.screen.same(look))
}

// typeAnswer types the decision about q, and records what became of that.
func (d *desk) typeAnswer(q *question) {
	d.await(q.seenAt.Add(dialogGrace), func() bool { return d.childGone || d.adapter.Box == nil })
	t := &typist{session: d.session, q: q, boxed: q.rec.Idle, text: cleanText(*q.rec.Value)}
	expired := q.rec.Status == Expired
	why := t.work()
	end := &ending{to: Resolved}
	if why != "" {
		if expired && !t.given {
			why = q.rec.Reason + "; no answer was typed: " + why
		}
		end = &ending{to: Failed, why: why}
		if !expired && !q.rec.Idle && q.screen.same(d.look()) {
			d.det.Again() // it is asked anew
		}
	}
	t.passHeld()
	d.record(func() error {
		if t.given && q.rec.Status != Injected {
			err := d.st.Move(&q.rec, Injected, func(r *PromptRecord) {
				r.ScreenSHA = t.screenSHA
				r.Note = t.note
			})
			if err != nil {
				return err
			}
		}
		return d.st.end(&q.rec, end)
	})
	if why == "" {
		d.typeReason(&q.rec)
	}
}

// typeReason types the words of a refusal that no hook took: they are the tool's next message.
func (d *desk) typeReason(p *PromptRecord) {
	if p.DecidedBy == "auto:timeout" || !p.Permission || p.Reason == "" || d.adapter.Box == nil {
		return
	}
	d.books.save(&InputRecord{Head: Head{ID: d.tg.botID() + ":" + newID()}, SessionID: d.rec.ID,
		Kind: "text", By: p.DecidedBy, User: p.DecidedUser, Text: p.Reason, Status: "queued"})
}

// dropHeld drops the held keys that were typed while the question answered now stood; all, if the next one stands
// already: nobody answers that so soon.
func (t *typist) dropHeld() {
	if len(t.relay.held) == 0 || t.q != nil && t.q.rec.Idle {
		return
	}
	asked := t.overtaken(t.look())
	all := len(t.relay.held)
	t.relay.held = slices.DeleteFunc(t.relay.held, func(k typedKeys) bool {
		passes := len(k.keys) == 0 || reReport.MatchString(string(k.keys)) || reBreak.MatchString(string(k.keys))
		stood := k.unread || t.q != nil && k.at.Before(t.sentAt)
		return (stood || asked) && !passes
	})
	if len(t.relay.held) < all {
		t.note = "keys typed at the keyboard meanwhile were dropped"
	}
}

// passHeld lets the keyboard in again.
func (t *typist) passHeld() {
	held := t.relay.held
	t.relay.held = nil
	t.session.typist = nil
	for _, k := range held {
		t.relay.handleKeys(k)
	}
	ring(t.relay.output.wake)
}

// reply types what was decided about a question of the screen: choices of a menu, a key alone, or a text and Enter.
func (t *typist) reply() (why string) {
	value := *t.q.rec.Value
	named := t.q.rec.answers(value) // none: it is a text
	var want []int
	for _, a := range named {
		i := slices.IndexFunc(t.q.screen.Choices, func(c Choice) bool { return c.Key == a.Key })
		if i >= 0 {
			want = append(want, i)
		}
	}
	kind := t.q.rec.Type
	switch {
	case len(want) > 0:
		return t.choose(want)
	case named != nil && named[0].Keys != "":
		return t.press(keyGrace+lookTime, just(named[0].Keys))
	case t.q.screen.drafted:
		return "a text stands in its field already"
	case kind != FreeText && kind != Unknown:
		return "there is no choice " + value
	}
	text := strings.TrimLeft(t.text, "\n\t")
	_, size := utf8.DecodeRuneInString(text)
	rest := t.pasted(text[size:]) + "\r"
	why = t.press(keyGrace+lookTime, func(sight) (keys, why string) { return t.opening(text[:size], rest, true), "" })
	if t.word != "" && why == "" {
		return t.spell(t.q.rec.takesKeys())
	}
	return why
}

// stillAsked returns why the answer is not to be typed: the question does not stand as it was shown, or somebody else
// may have answered it.
func (t *typist) stillAsked(v sight) (why string) {
	shown := t.q.screen
	verdict := shown.compare(v.look)
	if verdict == unsure && t.unsure.IsZero() {
		t.unsure = time.Now()
	}
	grace := keyGrace
	if t.q.typedBy == "" && t.relay.lastKey.After(t.det.movedAt) { // the screen does not show what the key did
		grace = sendTime
	}
	switch {
	case time.Since(t.relay.lastKey) < grace, verdict == unsure && time.Since(t.unsure) < moveTime:
		return whyWait
	case verdict != theSame:
		return "the question had changed"
	case t.q.typedBy != "":
		return "somebody pressed a key for it since: look at the terminal"
	}
	v.look.publish()
	t.screenSHA = digest([]byte(v.look.Shown))
	if alike(shown.Shown, v.look.Shown) { // what moves stands in it as it was shown
		t.screenSHA = digest([]byte(shown.Shown))
	}
	return ""
}

// opening returns what is typed first. Whether Enter ends it depends on the terminal as it is now, not as it was when
// it asked: in line mode it does. In raw mode the program may take one key, and the rest would answer the next question
// (e2fsck, mutt): so the first key goes alone, and the rest is spelled once the program has shown that.
func (t *typist) opening(first, rest string, ends bool) (keys string) {
	t.word = ""
	key, _ := utf8.DecodeRuneInString(first)
	switch {
	case !unicode.IsPrint(key):
	case t.pty.Modes().Canonical:
		rest = strings.TrimSuffix(rest, "\r") + "\r"
	case rest != "" || ends:
		t.word = first + rest
		return first
	}
	return first + rest
}

// spell types the rest of an answer while the question stands, and the program reads and has shown the first key behind
// it: it edits a line. Else the key was all it took, or no more of the answer is typed. Enter goes alone, for the
// program may take so many keys and no more, and Enter would answer the next question. An echo by the terminal itself
// proves nothing (bash's read -n 4): there each key goes alone, and Enter once the question has stood for a while. A
// screen that no rule reads (text) stands while it is still one, with the key, or a mark that hides it, at the cursor.
func (t *typist) spell(text bool) (why string) {
	for typed := t.word[:t.sent]; ; {
		keys := ""
		why := t.press(followTime, func(v sight) (_, why string) {
			keys, why = t.spellOn(v, typed, text)
			return keys, why
		})
		switch {
		case why != "" || keys == "" || keys == "\r":
			return why
		case text && t.adapter.Box != nil:
			return t.enter()
		}
		typed += keys
	}
}

// spellOn returns what comes behind what was typed of an answer, "" nothing: see spell.
func (t *typist) spellOn(v sight, typed string, text bool) (keys, why string) {
	more := strings.TrimSuffix(t.word[len(typed):], "\r")
	typed = strings.NewReplacer("\x1b[200~", "", "\x1b[201~", "").Replace(typed) // see pasted
	stands, edits, short := t.shows(v, typed, text)
	asks := t.overtaken(v.look)
	count := utf8.RuneCountInString(typed)
	word := text || count > 1
	switch {
	case edits && !v.tty.Echo && more == "":
		return "\r", ""
	case edits && !v.tty.Canonical && more != "":
		_, size := utf8.DecodeRuneInString(more)
		if !v.tty.Echo {
			size = len(more)
		}
		return more[:size], ""
	case edits && !v.tty.Canonical && v.late && (word || t.q.rec.Type == FreeText):
		return "\r", ""
	case !v.late && (stands || !asks): // it may only be painted anew
		return "", whyWait
	case !v.tty.Echo && count > 1 && !asks && !short:
		return "\r", ""
	case more != "" || stands && word:
		return "", fmt.Sprintf("only its first %d keys were typed: look at the terminal", count)
	}
	return "", ""
}

// shows reports whether the question stands, and whether the program reads, and shows what was typed of its answer
// behind it, and no other question behind that, or only the beginning of it. Of a screen that no rule reads (text) see
// spell.
func (t *typist) shows(v sight, first string, text bool) (stands, edits, short bool) {
	reads := v.tty.Reading != ReadingBusy && !v.tty.Sleeps && v.waiting <= 0
	typed, stands := t.det.Behind(first)
	first = strings.TrimSpace(first)
	if text {
		shown := slices.ContainsFunc([]string{first, "*", "•"}, func(mark string) bool {
			typed, _ := t.det.Behind(mark)
			return typed == mark
		})
		stands = v.look != nil && v.look.Type == Unknown
		return stands, stands && shown && reads, false
	}
	after, shown := strings.CutPrefix(strings.ToLower(typed), strings.ToLower(first))
	another := t.q.rec.Type != FreeText && strings.Contains(typed, " ") || v.tty.Echo && after != ""
	short = typed != "" && typed != first && strings.HasPrefix(first, typed)
	return stands, stands && shown && reads && !another, short
}

// choose makes these choices of a menu: each by its own key, or by arrows and a key once the pointer is there. Each key
// must show in the menu before the next.
func (t *typist) choose(want []int) (why string) {
	var menu, before *Prompt // as it is, and as it was before the last key
	within := keyGrace + lookTime
	for range maxMenuKeys {
		why := t.press(within, func(v sight) (keys, why string) {
			menu = v.look
			return t.menuKey(v, want, before)
		})
		switch {
		case why != "":
			return why
		case t.word != "":
			return t.spell(false)
		case !t.steer:
			return t.leaves()
		}
		before = menu
		within = sendTime
	}
	return notFollowed // a row that no arrow reaches, or ticks that exclude each other
}

// menuKey returns the next key for these choices of a menu, which stood so before the last key, or why there is none.
func (t *typist) menuKey(v sight, want []int, before *Prompt) (keys, why string) {
	now, asked := v.look, t.q.screen
	if v.tty.Reading == ReadingBusy || !asked.follows(now) || before != nil && now.unmoved(before) {
		return "", notFollowed
	}
	turned := before != nil && !slices.Equal(now.Choices, before.Choices)
	painting := turned && time.Since(t.det.changedAt) < settle      // the rest of its rows
	if painting || v.tty.Sleeps && time.Since(t.sentAt) < napTime { // or what it paints when it wakes
		return "", notFollowed
	}
	var chosen []int
	for _, w := range want {
		chosen = append(chosen, t.locate(now, w))
	}
	if slices.Contains(chosen, -1) {
		return "", "the choice is no longer on the screen"
	}
	target := chosen[0]
	key := "\r"
	if now.Multi {
		target = now.wrongTick(chosen)
		key = " "
	}
	t.steer = now.Multi && target >= 0
	if target < 0 { // all are ticked that were chosen
		return cmp.Or(t.adapter.Submit, "\r"), ""
	}
	own := now.Choices[target].Keys
	switch {
	case own != "" && now.Multi:
		return own, ""
	case own != "":
		_, size := utf8.DecodeRuneInString(own)
		return t.opening(own[:size], own[size:], t.adapter.Box == nil || asked.Pointer < 0), ""
	case now.Pointer < 0:
		return "", "the menu shows no pointer to move"
	case now.Pointer == target:
		return key, ""
	}
	t.steer = true
	return now.arrow(target, t.det.Screen.modes[modeAppCursor]), ""
}

// locate returns the index in now of the choice shown as number i, by its label; −1 if none has it. Of several of the
// same words, and of what is cut, it is the one in the same place, while the rows are those that were shown; of what
// counts seconds, or has a hint at the pointer, it is that one, too.
func (t *typist) locate(now *Prompt, i int) int {
	asked := t.q.screen
	want := asked.Choices[i]
	named := func(c Choice) bool { return c.Label == want.Label }
	at := slices.IndexFunc(now.Choices, named)
	vague := strings.HasSuffix(want.Label, "…") || slices.ContainsFunc(now.Choices[at+1:], named)
	if at >= 0 && !vague {
		return at
	}
	unchanged := slices.Equal(now.parts.among, asked.parts.among)
	return slices.IndexFunc(now.Choices, func(c Choice) bool {
		return c.Key == want.Key && (unchanged || !vague && alike(now.bare(c), asked.bare(want)))
	})
}

// unmoved reports whether the menu stands as it did before: pointer, ticks, choices. What else of it has changed may
// not be what the key did, which then is still to come.
func (p *Prompt) unmoved(before *Prompt) bool {
	return p.Pointer == before.Pointer && slices.Equal(p.Ticked, before.Ticked) &&
		slices.Equal(p.Choices, before.Choices)
}

// wrongTick is the first choice that is ticked and not wanted, or wanted and not ticked, −1 none.
func (p *Prompt) wrongTick(wanted []int) int {
	for i, ticked := range p.Ticked {
		if ticked != slices.Contains(wanted, i) {
			return i
		}
	}
	return -1
}

// arrow is the key that moves the pointer of a menu one step towards target.
func (p *Prompt) arrow(target int, appCursor bool) string {
	forward := target > p.Pointer
	name := "UP"
	switch {
	case p.Across && forward:
		name = "RIGHT"
	case p.Across:
		name = "LEFT"
	case forward:
		name = "DOWN"
	}
	return keyBytes(name, appCursor) // knows them all
}

// leaves waits until a known tool's dialog, or a menu with ticks, has gone: what still stands did not take the key.
func (t *typist) leaves() (why string) {
	asked := t.q.screen
	if (t.adapter.Box == nil || asked.Pointer < 0) && !asked.Multi {
		return ""
	}
	return t.press(sendTime, func(v sight) (keys, why string) {
		if asked.same(v.look) || asked.Multi && asked.follows(v.look) {
			return "", "the dialog did not take the answer; look at the terminal"
		}
		return "", ""
	})
}

// echo waits until the program has read the answer and the echo is over. It returns why that failed: not read in time,
// or still unread when the question had gone.
func (t *typist) echo() (why string) {
	until := time.Now().Add(t.cfg.EchoWindow)
	t.det.Sleep(until)
	t.watcher.seen = nil
	goneAt := time.Time{} // since when the question has gone: half painted it seems to be
	lost := false
	first, _ := utf8.DecodeRuneInString(t.word)
	why = t.press(t.cfg.EchoWindow, func(v sight) (keys, why string) {
		unread := !t.boxed && v.waiting > 0
		if unread && v.tty.Reading == ReadingBusy { // a key woke it: that it is busy says nothing of what stands
			v.tty.Reading = ReadingYes
			v.look = t.det.Look(v.tty, time.Now())
		}
		typed, stands := t.det.Behind(string(first))
		echoed := stands && typed != "" && strings.HasPrefix(strings.ToLower(t.word), strings.ToLower(typed))
		gone := unread && !v.tty.Canonical && !echoed && t.q.screen.compare(v.look) == another
		if !gone || goneAt.IsZero() {
			goneAt = time.Now()
		}
		lost = unread && (gone && time.Since(goneAt) >= typistLook || time.Since(until) > readTime)
		if lost || v.late && !unread {
			return "", ""
		}
		return "", whyWait
	})
	if lost {
		return "the program did not read it in time; look at the terminal"
	}
	return why
}

// pasted returns text as it is typed: no line end in it presses Enter, and no tab completes a word.
func (s *session) pasted(text string) string {
	if s.det.Screen.modes[modePaste] && !s.pty.Modes().Canonical { // who reads lines may know nothing of it
		return "\x1b[200~" + text + "\x1b[201~"
	}
	return strings.NewReplacer("\n", " ", "\t", " ").Replace(text)
}

// boxIsEmpty returns why the text is not typed into the input box, "" it may be. A draft is left alone.
func (t *typist) boxIsEmpty(v sight) (why string) {
	box := t.det.Box(v.tty, time.Now())
	why = t.phone.boxWaits(v.look, box)
	switch {
	case time.Since(t.began) < inputLook, time.Since(t.relay.lastKey) < keyGrace:
		return whyWait // what the program asks may be on its way, although it reads already
	case why != "" || box.draft == "" || t.adapter.Box == nil && box.whole:
		return why
	}
	return "there is a draft in the input box, nothing was typed: “" + safely(box.draft, 200) +
		"”. Send it, or empty the box (/keys CTRL_U), then send yours again"
}

// send types the text into the input box, and Enter.
func (t *typist) send() (why string) {
	text := t.text
	if t.adapter.Box != nil && !t.command {
		text = plainText(text)
	}
	t.steer = t.q == nil
	why = t.press(submitTime, just(t.pasted(text)))
	if why != "" {
		return why
	}
	why = t.enter()
	if why == questionOpen {
		why = "it was typed without Enter: " + why
	}
	return why
}

// just finds keys whatever stands on the screen.
func just(keys string) func(sight) (keys, why string) {
	return func(sight) (string, string) { return keys, "" }
}

// plainText is the text so that the known tools take it for nothing else (measured on all of them): ! runs a command,
// and so does a word behind a /; a path alone, and a last word behind @ or $, opens a list, of which Enter takes a row;
// a blank closes it; a backslash at the end keeps Enter from sending.
func plainText(text string) string {
	word := reFirstWord.expr().FindString(text)
	switch {
	case strings.HasPrefix(word, "!"), strings.HasPrefix(word, "#"):
		text = " " + text
	case strings.LastIndex(word, "/") == 0:
		text = "\\" + text
	case reOpensList.MatchString(text):
		text += " "
	}
	return text
}

// enter presses Enter, again where the text stays in the box, and waits until it has left.
func (t *typist) enter() (why string) {
	t.steer = false
	for _, again := range []bool{false, true} {
		why = t.press(t.adapter.SubmitDelay+submitTime, func(v sight) (keys, why string) {
			if again && !t.holdsText() { // it has left
				return "", ""
			}
			return t.enterKey(v)
		})
		if why == "" {
			why = t.press(submitTime, t.left)
		}
		if why != textStays {
			return why
		}
	}
	return why
}

// enterKey returns Enter once the text is in the box, or why not yet. Enter would also answer a question that has come
// up; a line that only looks like one, for it ends in the text, is none.
func (t *typist) enterKey(v sight) (keys, why string) {
	held := t.holdsText()
	asks := v.look.isQuestion()
	takesText := v.look != nil && (v.look.Type == FreeText || v.look.Type == Unknown)
	line := t.adapter.Box == nil && v.tty.Canonical // in raw mode it may not be a line that is edited
	switch {
	case time.Since(t.sentAt) < t.adapter.SubmitDelay:
		return "", whyWait
	case asks && (!takesText || !held && v.late):
		return "", questionOpen
	case held || !asks && line && t.det.Box(v.tty, time.Now()).found: // else it may be a menu
		return "\r", ""
	}
	return "", "the text does not show in the input box: look at the terminal"
}

// left waits until the text has left the box. A tool may have made another command of one it does not know (opencode).
func (t *typist) left(v sight) (keys, why string) {
	stays := t.holdsText() || t.command && t.det.Box(v.tty, time.Now()).draft != ""
	asks := t.command && v.look.isQuestion() // what the command is for
	if t.adapter.Box == nil || !stays || asks {
		return "", ""
	}
	return "", textStays
}

// boxFrame is what may stand at the ends of an input box's rows.
const boxFrame = " " + uprights

// holdsText reports whether the end of the text is at the cursor, or the tool shows it folded, as a paste or a picture.
// A tool without a box of its own shows nothing behind it.
func (t *typist) holdsText() bool {
	end := t.text[strings.LastIndex(t.text, "\n")+1:]
	end = strings.TrimSpace(strings.ToValidUTF8(end[max(0, len(end)-16):], ""))
	row := t.det.Screen.row
	above := strings.Trim(t.det.Screen.Row(max(0, row-1)), boxFrame)
	box := above + strings.Trim(t.det.Screen.Row(row), boxFrame)
	if t.adapter.Box == nil {
		return strings.HasSuffix(squeezed(box), squeezed(end))
	}
	return strings.Contains(squeezed(box), squeezed(end)) || reFolded.MatchString(box)
}

// ---- recordings ----
// castWriter writes those of --record and captured scenarios.

// startRecording creates or empties the file, which only its owner can read, where its file system knows of owners.
func startRecording(path, tool string, size Size, now time.Time) (*castWriter, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("creating the recording: %w", err)
	}
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() {
		_ = file.Chmod(0o600) // as said above
	}
	c := &castWriter{file: file, w: bufio.NewWriter(file), start: now}
	head := castHeader{
		Version: 2,
		Width:   int(size.Cols),
		Height:  int(size.Rows),
		Title:   tool,
		Env:     map[string]any{"TERM": os.Getenv("TERM")},
	}
	_ = json.NewEncoder(c.w).Encode(head) // c.w keeps the error
	return c, nil
}

// capture keeps what led to a question, where the environment asks for that: the output still kept, which a replay
// looks at until it has settled.
func (v *watcher) capture(p *Prompt) {
	if os.Getenv("ATLASBRIDGE_CAPTURE_PROMPTS") != "1" || p.Secret {
		return
	}
	now := time.Now()
	dir := filepath.Join(v.cfg.Dir, "captured_scenarios")
	name := fmt.Sprintf("%s-%s-%s.cast", v.rec.Tool, p.Type, now.UTC().Format("20060102T150405.000"))
	var cast *castWriter
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		cast, err = startRecording(filepath.Join(dir, name), v.rec.Tool, v.relay.size(), now)
	}
	if err == nil {
		cast.output(v.det.raw, now)
		cast.tty(v.pty.State(), now)
		err = cast.close(now.Add(v.cfg.Stuck + time.Second))
	}
	if err != nil {
		v.log.Warn("capturing a scenario", "error", err.Error())
	}
}

// ---- end ----
//
// The session's last records and messages.

// finish closes the books and sends the last messages, and all of the output with --stream; for hangUp see connect. It
// begins with the turn.
func (s *session) finish(hangUp func(limit time.Duration)) {
	s.pty.Close() // the child is gone
	s.childGone = true
	ring(s.relay.output.wake)
	s.relay.restore()
	s.endQuestions()
	how := s.books.recordExit()
	s.books.tellTrouble(s.st.Reap()) // the next run may come days later
	s.books.gatherStream(true)
	s.books.tellEnd(how)
	limit := drainSend
	switch {
	case s.tg.Trouble() != "":
	case s.cfg.Stream:
		limit = drainStream
	default:
		limit = drainTurns
	}
	s.unlock()
	hangUp(limit) // a signal cuts it short: see handleSignal
	s.stop()
	s.lock()
	defer s.unlock()
	s.until(func() bool { return s.phone.fetching == 0 })
	signal.Stop(s.watchdog.signals) // the books are closed: a signal ends us as it does any program
	var late <-chan time.Time       // nil: what we say is waited for
	if !s.watchdog.toldToEnd.IsZero() {
		late = time.After(endWait)
	}
	told := make(chan struct{})
	s.spawn(func() {
		s.books.ch.Close() // nothing is to be sent any more
		s.books.tellAtTerminal()
		close(told)
	})
	select {
	case <-told:
	case <-late: // nobody reads what we say
	}
}

// endQuestions ends what is still asked or being typed: a write to a closed terminal returns, and its result decides
// whether an answer was typed.
func (s *session) endQuestions() {
	for _, q := range append(s.desk.hooks, s.desk.asked) {
		if q != nil {
			q.leave(Failed, programEnded)
		}
	}
	s.until(func() bool { return s.going == 0 })
}

// endExpired withdraws each offer to ask again, the oldest first: nothing is left to ask, because of why.
func (d *desk) endExpired(why string) {
	d.lapsed = false
	var offers []*PromptRecord
	_ = d.st.Look(func(v *View) { // as it was, where it cannot be read
		offers = v.which(func(p *PromptRecord) bool { return p.SessionID == d.rec.ID && p.mayBeAsked() })
	})
	for _, p := range offers {
		d.books.tellTrouble(d.st.end(ref(*p), &ending{to: Failed, why: p.Reason + ", and " + why}))
	}
}

// recordExit records how the program ended, and returns that in words.
func (b *books) recordExit() (how string) {
	code := *b.rec.ExitCode
	began := b.rec // it may have ended before it was recorded
	began.ExitCode = nil
	sig := syscall.Signal(code - 128)
	killed := code > 128 && b.pty.Signaled()
	typed := sig == syscall.SIGINT || sig == syscall.SIGQUIT // ^C and ^\, whoever pressed it
	switch {
	case !b.watchdog.toldToEnd.IsZero(), killed && typed:
		b.rec.end("terminated")
		how = "was ended"
	case killed:
		b.rec.end("crashed")
		how = "crashed: " + sig.String()
	default:
		b.rec.end("completed")
		how = "ended"
		if code != 0 {
			how = fmt.Sprintf("ended with exit %d", code)
		}
	}
	if b.phone.phoneEnds {
		how = "ended from the phone"
	}
	b.save(&began, ref(b.rec))
	return how
}

// tellEnd sends the message that the program has ended, and how, below all of its output.
func (b *books) tellEnd(how string) {
	b.audit()
	var head MetaRecord
	asked := 0                    // notices apart
	_ = b.st.Look(func(v *View) { // as it was, where it cannot be read
		head = v.fact("audit")
		asked = len(v.which(func(p *PromptRecord) bool { return p.SessionID == b.rec.ID && !p.Idle }))
	})
	if b.rec.Local || asked == 0 && how == "ended" { // nothing that a person needs to know
		return
	}
	text := fmt.Sprintf("%s · %s · %d asked\naudit %d %.24s", how, span(b.rec.EndedAt.Sub(b.rec.StartedAt)), asked,
		head.Seq, strings.TrimPrefix(head.Hash, "sha256:")) // fits into one row
	watched := b.phone.watched(later(b.relay.lastKey, b.rec.StartedAt))
	rings := b.watchdog.toldToEnd.IsZero() && !watched // it ended by itself, and nobody was here since it was started
	b.rec.Farewell = &Farewell{text, rings}
	if !b.save(ref(b.rec)) {
		b.notify(Notice{Text: text, Ring: rings})
	}
}

// tellAtTerminal tells the person at the terminal what they should know of this session.
func (b *books) tellAtTerminal() {
	if b.warning != "" {
		b.tell(b.warning)
	}
	if b.relay.unshown != nil && !errors.Is(b.relay.unshown, syscall.EPIPE) { // who closes a pipe wants no more
		b.tell("the output could not be written: " + b.relay.unshown.Error())
	}
	if err := b.watcher.cast.close(time.Now()); err != nil {
		b.tell("writing the recording: " + err.Error())
	}
	if b.trouble != "" {
		b.tell(redact(b.trouble) + " (see `atlasbridge doctor`)")
	}
	for _, what := range b.st.Notes() {
		b.tell(what + " (see `atlasbridge doctor`)")
	}
	trouble := b.tg.Trouble()
	if trouble == "" && b.cfg.Channel == "telegram" {
		trouble = b.st.ChannelTrouble() // of who tried last
	}
	told, wasTold := b.tg.troubles.Load("told")
	switch {
	case trouble != "":
		b.tell(trouble)
	case wasTold:
		b.tell(fmt.Sprint("Telegram works again; for a time it did not: ", told))
	}
}

// ---- asking ----
// Screen, hook and script ask in one way: a stored prompt in, what became of it out. Whoever asks ends it, too: ask.

// ending is how a question ends, if nobody answers it first. As the cause of a context it takes the question back: a
// signal, or the phone's /cancel, which counts as SIGTERM.
type ending struct {
	to  State          // "": it is left as it is
	why string         // as its message says
	by  string         // whose keys have answered it, "" nobody's
	sig syscall.Signal // as it is told to a script, 0 none
}

func (e *ending) Error() string { return e.why }

// begin completes a prompt that is to be asked now.
func (p *PromptRecord) begin(source, session string, life time.Duration) {
	now := time.Now().Round(0) // the wall clock, which goes on while the machine sleeps
	p.ID = newID()
	p.SessionID = session
	p.Source = source
	p.Nonce = newNonce()
	p.Status = Created
	p.CreatedAt = now
	p.ExpiresAt = now.Add(life)
	whole := source != fromScreen // Full is all that it is about
	if whole {
		p.Score = 1
		p.Signals = []string{source}
	}
	p.Confidence = p.Prompt.Confidence()
	p.Cut = p.Cut || usesSecret(p.region())
	p.listAnswers()
	if whole {
		p.parts.body = strings.Split(p.Full, "\n")
		p.seal()
		p.publish()
	}
}

// ask is how all questions are asked: it brings p, a copy of a stored prompt, to its end. wait returns when p, which it
// keeps up to date, may have changed, or its time may be over; with how it ends, nil: it goes on. When its time is over
// it expires, with its safe default as its value, or is canceled if it was never sent to anybody. An answer that came
// first counts.
func (s *Store) ask(p *PromptRecord, wait func() *ending) error {
	for p.Open() {
		end := wait()
		switch {
		case !p.Open() || end != nil && end.to == "":
			return nil
		case end != nil:
		case time.Now().Before(p.ExpiresAt):
			continue
		case p.Status == Created:
			end = &ending{to: Canceled, why: "its time was over before it could be asked"}
		default:
			end = &ending{to: Expired}
		}
		if err := s.end(p, end); err != nil {
			return err
		}
	}
	return nil
}

// route has p sent by Show; with the local channel it waits for `atlasbridge answer`. The time of a question of the
// screen begins only now: while somebody is at the keyboard it runs for nobody.
func (s *Store) route(p *PromptRecord, channel string) error {
	err := s.Move(p, Routed, func(p *PromptRecord) {
		p.Send = sendQuestion
		if p.Source == fromScreen {
			p.ExpiresAt = p.ExpiresAt.Add(time.Since(p.CreatedAt))
		}
	})
	if channel == "local" {
		err = errors.Join(err, s.end(p, &ending{to: AwaitingReply}))
	}
	return err
}

// end ends p so, unless it has ended in another way, and makes it what is stored then.
func (s *Store) end(p *PromptRecord, e *ending) error {
	return s.Move(p, e.to, func(p *PromptRecord) {
		p.DecidedBy = cmp.Or(e.by, p.DecidedBy)
		if e.why != "" {
			p.Reason = e.why
		}
	})
}

// await asks p as ask does, in a process that follows its session for it. obey gets what the phone wants of the session
// meanwhile. A cause of ctx ends the question. Where ctx ends without one, with this process, and where the session has
// died, the question is left as it is: others find that nobody holds its lock.
func (p *PromptRecord) await(ctx context.Context, st *Store, obey func(*InputRecord)) error {
	following, stop := context.WithCancel(ctx)
	defer stop()
	news := st.Follow(following, p.SessionID, time.Tick(lookOften))
	return st.ask(p, func() *ending {
		var rec Record
		select {
		case rec = <-news: // nil once ctx has ended
		case <-time.After(lookSlowly): // its time may be over, or the session
		}
		if !st.Alive(p.SessionID) { // a session that was killed tells nobody
			return &ending{}
		}
		switch r := rec.(type) {
		case *InputRecord:
			obey(r)
		case *PromptRecord:
			if r.ID == p.ID {
				*p = *r
			}
		}
		cause := context.Cause(ctx)
		end, _ := errors.AsType[*ending](cause)
		switch {
		case cause == nil || end != nil:
			return end
		case cause == ctx.Err():
			return &ending{}
		}
		return &ending{to: Failed, why: redact(cause.Error())}
	})
}

// keep stores records as they are.
func (s *Store) keep(recs ...Record) error {
	return s.Update(func(*View) ([]Record, error) { return recs, nil })
}

// ---- hook: what a tool's own hook system asks ----
// The second kind of session: it owns one prompt at a time, and holds a lock for as long as it lives.

// hook is one run of `atlasbridge hook`: the tool's JSON (measured on claude 2.1, codex has the same) becomes a prompt
// of the session, and the decision about it the tool's own answer. If anything fails or is late it prints nothing: the
// tool's dialog asks. An answer that was not written was not given.
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
	folder  string          // where the session was started, and paths are seen from; "" not known (yet)
	ends    time.Time       // when the call's questions expire
	args    object          // the members of Input that were not told yet
	asked   []*PromptRecord // its questions that were answered or expired
	call    string          // names this run, and its lock
}

// maxHookFull is how much of a call's arguments is shown, in bytes: twenty messages. A longer one is not allowed from
// the phone.
const maxHookFull = 64 << 10

// maxHookDepth is how many levels of objects and arrays a call may have.
const maxHookDepth = 100

// maxLastWords is how much of an answer is kept for its notice, in UTF-16 units: three messages.
const maxLastWords = 12 << 10

// decision is what the tool is told; nil leaves the question to its dialog.
type decision map[string]any

// cmdHook exits with 0 whatever happens: claude takes anything else for a failing hook and says so in the dialog.
func cmdHook(c *command) int {
	h := &hook{session: c.getenv("ATLASBRIDGE_SESSION")}
	var raw json.RawMessage
	err := json.NewDecoder(io.LimitReader(c.stdin, maxHookInput)).Decode(&raw)
	if err == nil {
		err = json.Unmarshal(raw, h)
	}
	asks := h.Event == "PermissionRequest"
	if err != nil || asks && (h.Tool == "" || isAmbiguous(json.NewDecoder(bytes.NewReader(raw)), maxHookDepth)) {
		return 0 // the tool's dialog asks
	}
	c.catch(make(chan os.Signal, 1), syscall.SIGPIPE) // a tool that is gone makes the write fail, and no more
	h.st, err = c.openState()
	if err == nil && h.st.Alive(h.session) { // the session's record may come later than its tool's first hook
		err = h.handle(c)
	}
	if err != nil {
		c.fail(err)
	}
	return 0
}

// isAmbiguous reports whether an object in the next JSON value has two members of one name, or of names that differ in
// case alone: encoding/json takes the last of them for either, and merges them; the tool may read another. It also
// reports true for more levels than depth, which cost too much to show.
func isAmbiguous(d *json.Decoder, depth int) bool {
	d.UseNumber()
	open, err := d.Token()
	if err != nil || depth == 0 {
		return true
	}
	if open != json.Delim('{') && open != json.Delim('[') {
		return false
	}
	seen := map[string]bool{}
	for d.More() {
		if open == json.Delim('{') {
			name, _ := d.Token()                                         // the JSON is valid: it was decoded before
			folded := strings.ToLower(strings.ToUpper(fmt.Sprint(name))) // ſ is an s to encoding/json
			if seen[folded] {
				return true
			}
			seen[folded] = true
		}
		if isAmbiguous(d, depth-1) {
			return true
		}
	}
	_, err = d.Token()
	return err != nil
}

// handle does what the event asks for.
func (h *hook) handle(c *command) error {
	switch h.Event {
	case "PreToolUse":
		return h.st.Audit(toolCall(h.session, h.Tool, h.UseID, h.Input))
	case "PostToolUse", "PostToolUseFailure":
		return h.st.Audit(toolResult(h.session, h.Tool, h.UseID, h.Event == "PostToolUse"))
	case "Stop": // the tool's answer, for the session's idle notice: of a long one the beginning and the end
		plain := strings.NewReplacer("\ufe0e", "", "\ufe0f", "", "\u200d", "") // of how an emoji is drawn
		answer := abridge(safeText(plain.Replace(h.LastWords)), maxLastWords)
		return h.st.keep(&InputRecord{Head: Head{ID: newID()}, SessionID: h.session, Kind: "answer", By: "hook:Stop",
			Text: answer, Status: "queued"})
	case "PermissionRequest":
		flags := c.timeout()
		flags["channel"] = "local" // what Telegram needs may be in our environment alone
		cfg, err := c.config(flags)
		if err != nil {
			return err
		}
		h.ends = time.Now().Add(cfg.PermissionTimeout)
		h.Input = unescaped(h.Input)
		if around := h.st.view.Sessions[h.session]; around != nil {
			h.folder = around.Cwd
		}
		_ = json.Unmarshal(h.Input, &h.args) // what is no object has no members
		return h.decide(c)
	}
	return nil
}

// toolCall is the audit entry of one tool call: the arguments by their beginning, redacted, and the hash of them all.
func toolCall(session, tool, id string, input json.RawMessage) Event {
	arguments := safely(string(unescaped(input)), 500)
	return Event{"TOOL_CALL", session, "", []Field{{"tool", tool}, {"tool_use_id", id}, {"arguments", arguments},
		{"arguments_sha256", digest(input)}}}
}

// unescaped returns the same JSON without needless escapes, which would hide words, and what is a secret by its shape.
func unescaped(input json.RawMessage) json.RawMessage {
	var value any
	d := json.NewDecoder(bytes.NewReader(input))
	d.UseNumber()
	_ = d.Decode(&value) // it is valid: it was decoded before
	return json.RawMessage(inJSON(value))
}

// toolResult is the audit entry of what a call came to: not its output.
func toolResult(session, tool, id string, success bool) Event {
	return Event{"TOOL_RESULT", session, "", []Field{{"tool", tool}, {"tool_use_id", id}, {"success", success}}}
}

// decide asks, and passes the decision on to the tool. The answers are injected when it has been written.
func (h *hook) decide(c *command) error {
	h.call = newID()
	release, err := h.st.HoldSession(h.call)
	if err != nil {
		return err
	}
	defer release()
	ask := h.permission
	if h.Tool == "AskUserQuestion" {
		ask = h.questions
	}
	what, err := ask(c.ctx)
	if what == nil {
		return err
	}
	end := &ending{to: Injected}
	_, lost := fmt.Fprintf(c.stdout, `{"hookSpecificOutput":{"decision":%s,"hookEventName":"PermissionRequest"}}`+"\n",
		inJSON(what))
	if lost != nil {
		end = &ending{to: Failed, why: "the tool did not take the answer: " + lost.Error()}
	}
	for _, p := range h.asked {
		err = errors.Join(err, h.st.end(p, end))
	}
	return err
}

// wait asks one question of the call, and returns it answered or expired; nil, as for a nil p, lets the tool's dialog
// ask.
func (h *hook) wait(ctx context.Context, p *PromptRecord) (*PromptRecord, error) {
	if p == nil {
		return nil, nil
	}
	h.complete(p)
	err := h.st.keep(ref(*p))
	if err == nil {
		err = p.await(ctx, h.st, func(*InputRecord) {}) // they are the session's
	}
	if p.Status != ReplyReceived && p.Status != Expired {
		return nil, err
	}
	h.asked = append(h.asked, p)
	return p, nil
}

// refused is the decision about a call whose question was refused, or expired.
func refused(end *PromptRecord) decision {
	return decision{"behavior": "deny", "message": cmp.Or(end.Reason, "The operator refused this.")}
}

// complete adds who asks and where, so that Full begins with the question. What is too long to be shown is cut.
func (h *hook) complete(p *PromptRecord) {
	p.Tool = h.Tool
	if h.Cwd != h.folder {
		p.Cwd = shortPath(h.Cwd, h.folder)
	}
	if h.Agent != "" {
		p.Question += " (from the " + h.Agent + " agent)"
	}
	for _, text := range []*string{&p.Question, &p.Full, &p.Lasting, &p.Cwd} {
		*text = safely(*text, maxHookFull)
	}
	p.Question = oneLine(p.Question)
	p.Excerpt = headAndTail(p.Full, maxExcerpt)
	if !p.Permission {
		p.Excerpt = clip(p.Question, maxExcerpt)
	}
	p.Full = p.Question + "\n" + p.Full
	p.Call = h.call
	p.Constraints.MaxLength = maxMessage
	p.Cut = len(p.region()) > maxHookFull
	p.begin(fromHook, h.session, time.Until(h.ends))
}

// shortPath is a path as it is seen from the folder, where it lies in there.
func shortPath(path, folder string) string {
	short, err := filepath.Rel(folder, path)
	if err != nil || !filepath.IsAbs(path) || !filepath.IsLocal(short) {
		return path
	}
	return short
}

// object is a JSON object. Reading a member removes it: the rest was not shown yet.
type object map[string]json.RawMessage

// take reads a member where v can hold it.
func (o object) take(name string, v any) bool {
	err := json.Unmarshal(o[name], v)
	if err == nil {
		delete(o, name)
	}
	return err == nil
}

// text is a member that is a text, else "".
func (o object) text(name string) (text string) {
	o.take(name, &text)
	return text
}

// rows are the members that are left, a row each, in their order, such as Bash's dangerouslyDisableSandbox.
func (o object) rows() (rows []string) {
	for _, name := range slices.Sorted(maps.Keys(o)) {
		rows = append(rows, name+": "+string(o[name]))
	}
	return rows
}

// questions asks claude's own questions and returns the answers to all of them in one decision.
func (h *hook) questions(ctx context.Context) (decision, error) {
	var all []object
	updated := maps.Clone(h.args)
	if !h.args.take("questions", &all) || len(all) == 0 {
		return nil, nil
	}
	words := map[string]bool{}
	for _, one := range all {
		words[string(one["question"])] = true
	}
	if len(words) < len(all) { // claude is told an answer by the words of its question
		return nil, nil
	}
	answers := map[string]string{}
	for i, one := range all {
		words := one.text("question")
		p, labels := ownQuestion(one, words, h.args.rows())
		if p != nil && len(all) > 1 {
			p.Question = fmt.Sprintf("(%d of %d) %s", i+1, len(all), words)
		}
		end, err := h.wait(ctx, p)
		if end == nil || end.Status == Expired {
			for _, p := range h.asked[:i] {
				err = errors.Join(err, h.st.end(p, &ending{to: Failed, why: "not all of its questions were answered"}))
			}
			h.asked = h.asked[i:]
			if end == nil {
				return nil, err
			}
			return refused(end), err
		}
		answers[words] = answerWords(*end.Value, labels, p.Multi)
	}
	updated["answers"] = json.RawMessage(inJSON(answers))
	return decision{"behavior": "allow", "updatedInput": updated}, nil
}

// ownQuestion is the prompt of a question that claude asks in those words, with the labels of its options by their
// numbers; nil where it does not have the shape of one. others are rows that belong to all questions of the call.
func ownQuestion(o object, words string, others []string) (p *PromptRecord, labels map[string]string) {
	var options []object
	if words == "" || !o.take("options", &options) {
		return nil, nil
	}
	asked := Prompt{Type: MultipleChoice, Question: words}
	p = &PromptRecord{Asked: Asked{Prompt: asked, Subject: safely(words, maxFull)}}
	o.take("multiSelect", &p.Multi) // what is no bool is a row
	var said, rows []string
	for _, option := range options {
		label := option.text("label")
		if label == "" {
			return nil, nil
		}
		said = append(said, label)
		p.Choices = append(p.Choices, Choice{Label: clip(oneLine(safeText(label)), 60)})
	}
	numbered(p.Choices, 1)
	labels = map[string]string{}
	for i, option := range options {
		key := p.Choices[i].Key
		labels[key] = said[i]
		row := key + ". " + said[i] + before(": ", option.text("description"))
		rows = append(append(rows, oneLine(row)), option.rows()...)
	}
	p.Choices = p.Choices[:min(len(p.Choices), maxChoices)] // those beyond can be written
	p.Full = strings.Join(slices.Concat(rows, o.rows(), others), "\n")
	return p, labels
}

// answerWords returns the labels that were chosen by their numbers, one or several, or the operator's own words.
func answerWords(value string, labels map[string]string, several bool) string {
	chosen := []string{value}
	if several {
		chosen = strings.Split(strings.ReplaceAll(value, " ", ""), ",")
	}
	for i, key := range chosen {
		chosen[i] = labels[key]
		if chosen[i] == "" {
			return value
		}
	}
	return strings.Join(chosen, ", ")
}

// permission asks whether a call is allowed, and for how long.
func (h *hook) permission(ctx context.Context) (decision, error) {
	p := &PromptRecord{Asked: Asked{Prompt: Prompt{Type: MultipleChoice, Permission: true, SafeDefault: ref(hookDeny)}}}
	h.describe(p)
	allow := "Yes"
	if h.Tool == "ExitPlanMode" {
		allow = "Yes, and manually approve edits" // the mode that claude is in then (measured)
	}
	p.Choices = []Choice{{Key: hookAllow, Label: allow, Grants: true}, {Key: hookDeny, Label: "No"}}
	words, widest := lastingWords(h.Suggestions, h.folder)
	words = visible(words)
	if words != "" && redact(words) == words { // what is granted for longer is known to its last letter
		p.Choices = slices.Insert(p.Choices, 1, Choice{Key: hookAlways, Label: visible("Yes, and " + widest), Grants: true})
		p.Lasting = words
		p.parts.among = []string{"lasting: " + words}
	}
	end, err := h.wait(ctx, p)
	if end == nil {
		return nil, err
	}
	what := decision{"behavior": "allow"}
	if h.Tool == "ExitPlanMode" { // a plain allow is ignored here (measured)
		what["updatedInput"] = map[string]any{}
	}
	switch *end.Value {
	case hookDeny:
		return refused(end), nil
	case hookAlways: // all of them: one alone does not do what they do together (measured)
		what["updatedPermissions"] = h.Suggestions
	}
	return what, nil
}

// langMarkdown is the Lang of a plan.
const langMarkdown = "markdown"

// describe says what the tool wants to do: in Question in words, in Full all of its arguments, in Subject what the
// tool's dialog shows of them.
func (h *hook) describe(p *PromptRecord) {
	in := h.args
	p.Question = "Allow " + h.Tool + "?"
	p.Subject = h.Tool
	switch h.Tool {
	case "Bash":
		p.Question = strings.TrimSpace("Run this? " + in.text("description"))
		p.Subject = in.text("command")
		p.Full = p.Subject
		p.Lang = "bash"
	case "Edit", "Write":
		p.Subject = in.text("file_path")
		p.Question = h.Tool + " " + shortPath(p.Subject, h.folder) + "?"
		if h.Tool == "Write" {
			p.Full = lineDiff("", in.text("content"))
		} else {
			p.Full = lineDiff(in.text("old_string"), in.text("new_string"))
		}
		p.Lang = "diff"
	case "WebFetch":
		p.Question = "Fetch this address?"
		p.Subject = in.text("url")
		p.Full = p.Subject
	case "ExitPlanMode":
		p.Question = "Carry out this plan?"
		p.Full = in.text("plan")
		p.Lang = langMarkdown
	}
	p.Full = strings.Trim(p.Full+"\n"+strings.Join(in.rows(), "\n"), "\n")
	if p.Full == "" {
		p.Full = string(h.Input)
	}
	p.Subject = safely(p.Subject, maxFull)
}

// suggestion is one of claude's permission_suggestions.
type suggestion struct {
	Type        string
	Directories []string
	Mode        string
	Behavior    string
	Destination string
	Rules       []struct {
		ToolName    string
		RuleContent string
	}
}

// How much a suggestion grants, the least first. Between two is room for how long it is kept, and one for a wildcard.
const (
	grantsFolder = 10 * iota // access to it
	grantsCalls              // some of a tool's
	grantsMode
	grantsTool // whatever it is called with
	grantsAll  // or what nobody knows here
)

// maxWidest is how long the name of the widest grant may be, in bytes: a label has 60 with "Yes, and ".
const maxWidest = 51

// destinations say how long what a suggestion grants is kept, the shortest first.
var destinations = [][2]string{
	{"session", "this session"},
	{"localSettings", "for this project"},
	{"projectSettings", "for everyone on this project"},
	{"userSettings", "for all projects"},
}

// lastingWords say what the suggestions grant together, and for how long, and which grant is the widest, as its button
// has it. Both are "" when there are no suggestions. One that is not understood is shown as it is.
func lastingWords(suggestions []json.RawMessage, folder string) (words, widest string) {
	most := -1
	for _, raw := range suggestions {
		var s suggestion
		known := json.NewDecoder(bytes.NewReader(raw))
		known.DisallowUnknownFields() // what they grant besides is not known
		err := known.Decode(&s)
		grant, width := s.grant(folder)
		long := ""
		for i, d := range destinations {
			if d[0] == s.Destination {
				long = d[1]
				width += 2 * i
			}
		}
		short := strings.TrimSuffix(grant, filesToo)
		if err != nil || grant == "" || long == "" {
			grant, width = string(unescaped(raw)), grantsAll
			short, long = "all that is listed above", ""
		}
		if width > most {
			most = width
			widest = strings.TrimSpace(clip(short, maxWidest-len(" "+long)) + " " + long)
		}
		long = before(", ", long)
		if words != "" { // how long is told once, behind the last that is kept as long
			words = strings.TrimSuffix(words, long) + ", "
		}
		words += grant + long
	}
	return words, widest
}

// filesToo is what accepting edits grants beside edits, in claude's words.
const filesToo = " and common file commands"

// grant says what s grants, "" if that is not known, and how much that is.
func (s suggestion) grant(folder string) (words string, width int) {
	var all []string
	switch s.Type + " " + s.Mode + s.Behavior {
	case "setMode acceptEdits":
		return "accept all edits" + filesToo, grantsMode
	case "setMode bypassPermissions":
		return "allow everything without asking", grantsAll
	case "setMode " + s.Mode:
		words, width = "switch to mode ", grantsMode
		all = strings.Fields(s.Mode)
	case "addDirectories ":
		words, width = "access to ", grantsFolder
		for _, directory := range s.Directories {
			short := shortPath(directory, folder)
			switch {
			case short == ".":
				short = "this folder"
			case strings.HasPrefix(folder, directory): // and what else is beside it
				width = grantsCalls + 2
			}
			all = append(all, short)
		}
	case "addRules allow":
		words = "allow "
		for _, r := range s.Rules {
			rule := r.ToolName + "(" + r.RuleContent + ")"
			wide := grantsCalls
			switch {
			case r.RuleContent == "":
				rule, wide = "all of "+r.ToolName, grantsTool
			case strings.Trim(r.RuleContent, "*:/") == "": // the same, in other words
				wide = grantsTool
			case strings.Contains(r.RuleContent, "*"):
				wide++
			}
			at := len(all)
			if wide > width { // it comes first, for a button may have no room for all
				at, width = 0, wide
			}
			all = slices.Insert(all, at, rule)
		}
	}
	if len(all) == 0 {
		return "", 0
	}
	return words + strings.Join(all, " and "), width
}

// lineDiff returns the removed and the added lines, without those that both texts begin or end with. Secrets are taken
// out before that: without the lines around them some are none, such as the middle of a key in PEM.
func lineDiff(before, after string) string {
	a := slices.Collect(strings.Lines(before))
	b := slices.Collect(strings.Lines(after))
	fewer := min(len(a), len(b))
	head, tail := 0, 0
	for head < fewer && a[head] == b[head] {
		head++
	}
	for tail < fewer-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	var rows []string
	for i, text := range []string{before, after} {
		lines := slices.Collect(strings.Lines(safeText(text))) // as many: no secret has a line end
		for _, line := range lines[head : len(lines)-tail] {
			rows = append(rows, "-+"[i:i+1]+strings.TrimSuffix(line, "\n"))
		}
	}
	return strings.Join(rows, "\n")
}

// installHooks adds to the tool's command line what makes it call us, merged into the last --settings there, which
// counts (measured on claude 2.1). Where that cannot be done the tool is run as it was to be, without hooks.
func (s *session) installHooks(argv []string) []string {
	if s.adapter.Hooks != "claude-settings" {
		return argv
	}
	s.desk.hooked = s.cfg.Channel != "local" // else the dialog is the user's
	given, rest := settingsArgument(argv[1:])
	merged, err := s.withHooks(given)
	if err != nil {
		s.log.Warn("the tool's hooks are not used", "why", err.Error())
		s.desk.hooked = false
		return argv
	}
	return slices.Concat([]string{argv[0], "--settings", merged}, rest)
}

// settingsArgument removes the values of --settings from the arguments, and returns the last. After -- there are no
// options.
func settingsArgument(args []string) (settings string, rest []string) {
	settings = "{}"
	for len(args) > 0 && args[0] != "--" {
		name, value, joined := strings.Cut(args[0], "=")
		switch {
		case name == "--settings" && joined:
			settings = value
		case name == "--settings" && len(args) > 1:
			settings = args[1]
			args = args[1:]
		default:
			rest = append(rest, args[0])
		}
		args = args[1:]
	}
	return settings, append(rest, args...)
}

// Hooks that call us: %[1]s is how, %[2]d for how many seconds the tool waits for a permission.
const (
	stopHook       = `{"Stop": [{"matcher": "*", "hooks": [{"type": "command", "command": %[1]s, "timeout": 10}]}]`
	permissionHook = `, "PermissionRequest":
		[{"matcher": "*", "hooks": [{"type": "command", "command": %[1]s, "timeout": %[2]d}]}]`
	callHooks = `, "PreToolUse": [{"matcher": "*", "hooks": [{"type": "command", "command": %[1]s, "timeout": 10}]}],
	"PostToolUse": [{"matcher": "*", "hooks": [{"type": "command", "command": %[1]s, "timeout": 10, "async": true}]}],
	"PostToolUseFailure": [{"matcher": "*",
		"hooks": [{"type": "command", "command": %[1]s, "timeout": 10, "async": true}]}]`
)

// withHooks is the tool's settings, given as JSON or as the name of a file, with hooks that call us beside the user's
// own; it gives them in the same way, for all can read what is on a command line.
func (s *session) withHooks(given string) (_ string, err error) {
	text := []byte(given)
	named := !strings.HasPrefix(strings.TrimSpace(given), "{")
	if named {
		text, err = os.ReadFile(given)
	}
	settings := map[string]any{}
	var theirs struct{ Hooks map[string][]any }
	if err == nil {
		err = errors.Join(json.Unmarshal(text, &settings), json.Unmarshal(text, &theirs))
	}
	if err != nil {
		return "", fmt.Errorf("reading --settings: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	call := "'" + strings.ReplaceAll(exe, "'", `'\''`) + "' hook"
	if runtime.GOOS == "windows" {
		call = `"` + exe + `" hook`
	}
	call += before(" --timeout ", s.cfg.flags["permission_timeout_seconds"])
	hooks := stopHook
	if s.desk.hooked {
		hooks += permissionHook
	}
	if s.relay.calls == nil { // else its output tells of every call
		hooks += callHooks
	}
	// The tool waits longer than a question lives.
	text = fmt.Appendf(nil, hooks+"}", inJSON(call), inSeconds(s.cfg.PermissionTimeout+time.Minute))
	var ours map[string][]any
	_ = json.Unmarshal(text, &ours) // it is ours, and valid
	for event, groups := range theirs.Hooks {
		ours[event] = append(groups, ours[event]...)
	}
	settings["hooks"] = ours
	if named {
		s.settings, err = s.st.saveFile(s.rec.ID, "settings", []byte(inJSON(settings)))
		return s.settings, err
	}
	return inJSON(settings), nil
}

// childEnv removes our variables from env, and what has the token in it, and adds what `atlasbridge hook` needs.
func childEnv(env []string, c *Config, sessionID string) []string {
	clean := slices.DeleteFunc(env, func(entry string) bool {
		return reOurs.MatchString(entry) || c.Token != "" && strings.Contains(entry, c.Token)
	})
	return append(clean, "ATLASBRIDGE_SESSION="+sessionID, "ATLASBRIDGE_HOME="+c.Dir)
}

// ---- ask: what a script asks ----
// The third kind of session: a bridge of its own, for one question, also where it was started in another session, whose
// own questions it does not keep waiting. It prints an answer only when that is on the disk, and nothing is a yes by
// waiting.

const (
	maxQuestion = 400 // UTF-16 units of a question: what its message shows
	maxChoices  = 9   // each has a digit as its key
	maxLabel    = 60  // UTF-16 units of a choice: what its button shows

	maxShown = 1 << 20 // UTF-16 units that are made safe: more than is taken
)

// reHunk is the head of a hunk, which only a diff has.
var reHunk = re(`(?m)^@@ -\d+(,\d+)? \+\d+(,\d+)? @@`)

// asking is one run of `atlasbridge ask`.
type asking struct {
	*command
	*Config
	*Store
	tg     *Telegram
	prompt PromptRecord
	code   int // the exit status: exitInternal until there is an answer, or none can come
}

// cmdAsk exits with what the answer says, or with that there is none.
func cmdAsk(c *command) int {
	a := &asking{command: c, code: exitInternal}
	err := a.compose()
	if err == nil {
		err = a.run()
	}
	if err != nil && c.fail(err) == exitUsage {
		return exitUsage
	}
	return a.code
}

// compose makes the prompt of the command line, and of standard input.
func (a *asking) compose() error {
	about := len(a.args) > 1
	p := &a.prompt
	p.Question = clean(strings.Join(strings.Fields(a.args[0]), " "), maxShown)
	n := units(p.Question)
	switch {
	case about && a.args[1] != "-":
		return misuse("the question is one argument: put it in quotation marks")
	case n == 0 || p.Question == "-":
		return misuse("the question is missing")
	case n > maxQuestion:
		return misuse("the question has %d characters, %d are shown: give what it is about on standard input, with -",
			n, maxQuestion)
	}
	if err := a.addAnswers(); err != nil {
		return err
	}
	p.Excerpt = clip(p.Question, maxExcerpt)
	p.Full = p.Question
	if about { // too much of it nobody would read
		b, err := io.ReadAll(io.LimitReader(hostStream{a.stdin}, maxHookFull+1))
		if err != nil {
			return fmt.Errorf("reading standard input: %w", err)
		}
		text := clean(string(b), maxShown)
		if max(len(b), len(text)) > maxHookFull {
			return misuse("standard input has more than %d KiB as it is shown: give less of it", maxHookFull>>10)
		}
		p.Full += "\n" + cmp.Or(text, "(standard input was empty)")
	}
	for _, c := range p.Choices {
		if utf8.RuneCountInString(c.Label) > wideLabel {
			p.Full += "\n" + c.Label
		}
	}
	if reHunk.MatchString(p.Full) {
		p.Lang = "diff"
	}
	return nil
}

// addAnswers adds the kind of the question and its answers.
func (a *asking) addAnswers() error {
	p := &a.prompt
	text, listed := a.on("text"), a.on("choices")
	switch {
	case text && listed:
		return misuse("--choices and --text exclude each other")
	case listed:
		p.Type = MultipleChoice
		return a.addChoices(strings.Split(a.command.flags["choices"], ","))
	case text:
		p.Type = FreeText
	default:
		p.Type = YesNo
		p.Permission = true
	}
	p.Constraints.MaxLength = maxMessage // of the text, or of the reason for a refusal
	return nil
}

// addChoices adds choices. One that is a digit has it as its key, so that "2" is never the second one when another is
// called 2.
func (a *asking) addChoices(words []string) error {
	for _, word := range words {
		word = strings.TrimSpace(word)
		label := oneLine(clean(word, maxLabel)) // what cannot be shown is another
		same := func(c Choice) bool { return strings.EqualFold(c.Label, label) }
		known := slices.ContainsFunc(a.prompt.Choices, same)
		if word == "" || label != word || known || len(words) > maxChoices {
			return misuse("%q in --choices: up to %d different choices are possible, each of 1 to %d characters that "+
				"can be shown", word, maxChoices, maxLabel)
		}
		a.prompt.Choices = append(a.prompt.Choices, Choice{Label: label})
	}
	numbered(a.prompt.Choices, 1)
	return nil
}

// run asks, and passes the answer on. An error is why there is none.
func (a *asking) run() (err error) {
	a.Config, err = a.config(a.timeout())
	if err != nil {
		return err
	}
	if a.prompt.Type == FreeText && a.Channel == "telegram" && !a.FreeText {
		return hintedf("set free_text_enabled = true in config.toml, or ask with --choices",
			"the phone cannot answer with a text: free_text_enabled is false")
	}
	a.Store, err = a.openState()
	if err != nil {
		return err
	}
	if err := a.Reap(); err != nil {
		return err
	}
	a.tg = newTelegram(a.Config, a.Store, openLog(a.Store.Dir, a.LogLevel))
	return a.bridge()
}

// catchSignals quits at the first signal that ends us; the next one kills, as ever. While a shell has stopped us, as by
// ^Z, another process listens to Telegram, where st is given.
func catchSignals(quit context.CancelCauseFunc, st *Store) {
	signals := make(chan os.Signal, 8) // none is lost behind a ^Z
	signal.Notify(signals, endSignals()...)
	if st != nil && resumes() {
		signal.Notify(signals, suspendSignal)
	}
	go func() { // ends with the process
		for sig := range signals {
			if sig == suspendSignal {
				go st.standStill(signals) // what ends us does not wait for a shell
				continue
			}
			signal.Reset(endSignals()...)
			quit(&ending{to: Canceled, why: "the script was ended (" + sig.String() + ")", sig: sig.(syscall.Signal)})
		}
	}()
}

// bridge asks in a session of its own: it listens to Telegram while nobody else does, and in the end makes the message
// say what became of the question.
func (a *asking) bridge() error {
	a.catch(make(chan os.Signal, 1), syscall.SIGPIPE) // a reader that is gone makes the write fail, and no more
	ctx, quit := context.WithCancelCause(a.ctx)
	defer quit(nil)
	catchSignals(quit, a.Store)
	own := sessionRecord("ask", []string{}, "")
	own.PID = own.Wrapper
	own.ThreadID = noTopic // for one question
	own.Activity = "waiting"
	release, err := a.HoldSession(own.ID)
	if err != nil {
		return err
	}
	defer release()
	p := &a.prompt
	p.begin(fromAsk, own.ID, a.Timeout)
	if err := a.keep(ref(own), ref(*p)); err != nil {
		return err
	}
	if err := a.send(); err != nil {
		return err
	}
	a.tg.session = own.ID
	a.tg.giveUp = quit
	var ch Channel = localChannel{}
	if a.Channel == "telegram" {
		ch = a.tg
	}
	hangUp := a.connect(a.ctx, ch)
	err = p.await(ctx, a.Store, func(in *InputRecord) { a.obey(*in, quit) })
	if !p.Open() {
		err = a.conclude(context.Cause(ctx))
	}
	own.end("completed")
	if a.code > 128 {
		own.end("terminated")
	}
	own.ExitCode = &a.code
	unsaid := a.keep(&own)
	if p.DecidedBy == "cli:answer" {
		ch.Notify(answeredNotice(p))
	}
	hangUp(drainSend)
	return errors.Join(err, unsaid)
}

// send sends the question. At a terminal, and wherever there is no Telegram, it says how to answer without a phone.
func (a *asking) send() error {
	if err := a.route(&a.prompt, a.Channel); err != nil {
		return err
	}
	how := "asked on the phone; from another terminal"
	phone := a.Channel == "telegram"
	if !phone {
		how = a.whyLocal() + "; answer from another terminal"
	}
	if !phone || onTerminal(a.stderr) {
		a.complain(how + ": atlasbridge answer " + shortID(a.prompt.ID) + " VALUE; it takes " + a.prompt.takes())
	}
	return nil
}

// obey does what the phone wants of the session: it can only be ended.
func (a *asking) obey(in InputRecord, quit context.CancelCauseFunc) {
	if in.Status != "queued" {
		return
	}
	in.Status = "done"
	if in.Kind == "cancel" {
		quit(&ending{to: Canceled, why: "ended from the phone", sig: syscall.SIGTERM})
	} else {
		in.Status = "failed" // who polls tells its sender
		in.Reason = "a script asks here: it takes an answer, and has no screen and no keyboard"
	}
	if err := a.keep(&in); err != nil {
		quit(err)
	}
}

// conclude passes on and records what became of the question; cause ended it, if not an answer. An error is why there
// is no answer. An answer that cannot be passed on was not given.
func (a *asking) conclude(cause error) (err error) {
	end := &a.prompt
	stop, ended := errors.AsType[*ending](cause)
	var answer *string
	status := "refused"
	code := exitFailed
	switch {
	case end.Status == Expired:
		status = "expired"
		code = exitUnanswered
		err = errors.New(strings.Replace(end.Reason, "no answer", "nobody answered", 1) + before(": ", a.tg.Trouble()))
	case end.Status == ReplyReceived:
		said := cmp.Or(end.labels(*end.Value), *end.Value)
		if end.Type == YesNo {
			said = strings.ToLower(said)
		}
		answer = &said
		if !end.refuses(*end.Value) {
			status = "answered"
			code = 0
		}
	case end.Status == Canceled && end.Value != nil: // left as it is
	case ended:
		a.code = 128 + int(stop.sig)
		return nil
	case cause != nil:
		return cause
	default:
		return fmt.Errorf("the question was not answered: %s", end.Reason)
	}
	if a.on("json") {
		a.printJSON(struct {
			Answer *string `json:"answer"`
			Status string  `json:"status"` // answered refused expired
			By     string  `json:"by"`
			ID     string  `json:"id"`
			Reason string  `json:"reason"` // the operator's, for a refusal
		}{answer, status, end.DecidedBy, end.ID, end.Reason})
	} else if answer != nil {
		fmt.Fprintln(a, *answer)
	}
	switch {
	case a.lost != nil && answer != nil:
		return a.end(end, &ending{to: Failed, why: "the script did not take the answer"})
	case a.lost != nil: // the command says so
		return nil
	case answer != nil:
		err = errors.Join(a.end(end, &ending{to: Injected}), a.end(end, &ending{to: Resolved}))
	}
	a.code = code
	if status == "refused" && end.Reason != "" {
		a.complain("refused: " + end.Reason)
	}
	return err
}
