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
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
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
	"unicode/utf8"
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

type Config struct { // everything a person can set, validated; settings names the key of each field
	Dir, Channel, Token, APIBase, LogLevel                     string // Dir: the state folder
	Timeout, PermissionTimeout, Stuck, EchoWindow, Away, Flush time.Duration
	Threshold                                                  float64
	BufferBytes, MaxChars, RetentionDays                       int
	FreeText, NotifyIdle, Stream, StripANSI                    bool
	ChatID                                                     int64
	Users                                                      []int64
	SafeDefaults                                               map[PromptType]string
	inForce                                                    []setting
}
type setting struct { // a row of the configuration: what `config --json` shows (the token masked), and what it can be
	Key                   string          `json:"key"`
	Value                 json.RawMessage `json:"value"`  // empty: not given
	Origin                string          `json:"origin"` // "flag", "environment NAME", "config.toml:LINE" or "default"
	to                    any             // a field of Config; its type decides what a value must look like
	min, max              float64         // of numbers, in the unit of the key
	env, def, shape, must string          // shape: regular expression of a text; must: said of one that does not match
}

// settings is every key there is, in the order `config` shows them, bound to the fields of c. The bounds keep a slip of
// the finger from disabling a guard; 4096: length of a message, 2^52: of an id, https://core.telegram.org/bots/api.
func settings(c *Config) []setting {
	return []setting{
		{Key: "channel", to: &c.Channel, shape: "telegram|local|", must: "must be telegram or local"},
		{Key: "timeout_seconds", def: "600", to: &c.Timeout, min: 1, max: 86400},
		{Key: "permission_timeout_seconds", env: "PERMISSION_TIMEOUT_SEC", def: "300", to: &c.PermissionTimeout,
			min: 1, max: 86400},
		{Key: "detection_threshold", def: "0.65", to: &c.Threshold, min: 0.60, max: 0.99},
		{Key: "stuck_timeout_seconds", def: "2.0", to: &c.Stuck, min: 0.2, max: 600},
		{Key: "buffer_size_bytes", def: "4096", to: &c.BufferBytes, min: 512, max: 1 << 20},
		{Key: "echo_suppression_ms", def: "150", to: &c.EchoWindow, max: 10000},
		{Key: "free_text_enabled", def: "false", to: &c.FreeText},
		{Key: "notify_idle", def: "true", to: &c.NotifyIdle},
		{Key: "away_after_seconds", def: "20", to: &c.Away, max: 86400},
		{Key: "telegram.bot_token", env: "TELEGRAM_BOT_TOKEN", to: &c.Token, shape: `([0-9]{1,20}:[A-Za-z0-9_-]{1,128})?`,
			must: "must be a bot token as BotFather gives it"},
		{Key: "telegram.chat_id", env: "TELEGRAM_CHAT_ID", def: "0", to: &c.ChatID, min: -1 << 52, max: 1 << 52},
		{Key: "telegram.allowed_users", env: "ALLOWED_USER_IDS", to: &c.Users, min: 1, max: 1 << 52},
		{Key: "telegram.api_base", env: "TELEGRAM_API_BASE", def: "https://api.telegram.org", to: &c.APIBase,
			shape: `(https://[^/@?#\s]+|http://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?)(/[^@?#\s]*)?`,
			must:  "must be a URL that begins with https:// (http only for this machine itself)"}, // the token is in it
		{Key: "stream.enabled", def: "false", to: &c.Stream},
		{Key: "stream.max_chars", env: "OUTPUT_MAX_CHARS", def: "3500", to: &c.MaxChars, min: 100, max: 4096},
		{Key: "stream.flush_ms", env: "OUTPUT_FLUSH_MS", def: "200", to: &c.Flush, min: 50, max: 10000},
		{Key: "stream.strip_ansi", env: "STRIP_ANSI", def: "true", to: &c.StripANSI},
		{Key: "safe_defaults.yes_no", def: "n", to: new(string), shape: "n",
			must: `can only be "n": nothing is approved by waiting`},
		{Key: "safe_defaults.confirm_enter", def: "enter", to: new(string), shape: "enter|esc", must: "must be enter or esc"},
		{Key: "safe_defaults.multiple_choice", def: "1", to: new(string), shape: "[1-9]|esc",
			must: "must be a number from 1 to 9, in quotes, or esc"},
		{Key: "safe_defaults.free_text", to: new(string), shape: `[^\pC\p{Zl}\p{Zp}]{0,200}`,
			must: "must be one line of at most 200 characters, none of them a control character"},
		{Key: "retention_days", def: "30", to: &c.RetentionDays, min: 1, max: 36500},
		{Key: "log_level", env: "LOG_LEVEL", def: "info", to: &c.LogLevel, shape: "(?i:debug|info|warn|error)",
			must: "must be debug, info, warn or error"},
	}
}

// loadConfig reads dir/config.toml (absent: all defaults), then the environment (getenv), then flags, which win: key →
// text as it would stand in the environment. With an error, only Dir is set.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	c, path := &Config{Dir: dir, SafeDefaults: map[PromptType]string{}}, filepath.Join(dir, "config.toml")
	f, openErr := openPrivate(path, os.O_RDONLY)
	text, readErr := io.ReadAll(f) // of no file: nothing, and an error
	f.Close()
	file, err := parseTOML(string(text), mapped(settings(c), func(s setting) string { return s.Key }))
	if unread := cmp.Or(openErr, readErr); unread != nil && !errors.Is(unread, fs.ErrNotExist) {
		err = hinted(fmt.Errorf("config.toml: %w", unread), "make it your own and private: chmod 600 "+path)
	}
	for _, s := range settings(c) {
		for _, given := range []setting{{Value: s.read(s.def + " "), Origin: "default"}, file[s.Key], // " ": never none
			{Value: s.read(getenv(s.env)), Origin: "environment " + s.env}, {Value: s.read(flags[s.Key]), Origin: "flag"}} {
			if len(given.Value) > 0 {
				s.Value, s.Origin = given.Value, given.Origin
				err = cmp.Or(err, s.put(c))
			}
		}
		if number, _, ok := strings.Cut(c.Token, ":"); ok && s.to == &c.Token {
			s.Value = quoted(number + ":…") // the bot's number is public
		}
		c.inForce = append(c.inForce, s)
	}
	c.Channel = cmp.Or(c.Channel, when(c.Token == "", "local"), "telegram")
	c.inForce[0].Value = quoted(c.Channel)
	lacks := cmp.Or(when(c.Token == "", "channel telegram needs telegram.bot_token"),
		when(c.ChatID == 0, "a bot token needs telegram.chat_id too"),
		when(len(c.Users) == 0, "telegram.allowed_users is empty: nobody could answer")) // never taken for "everyone"
	where := cmp.Or(file["telegram.bot_token"].Origin, file["channel"].Origin, "config.toml")
	err = cmp.Or(err, hinted(when(c.Channel != "local" && lacks != "", fmt.Errorf("%s: %s", where, lacks)),
		"run `atlasbridge setup`, or set channel = \"local\""))
	return cmp.Or(when(err != nil, &Config{Dir: dir}), c), err
}

func (s setting) put(c *Config) error { // the error never shows the value: it may be the bot's token
	number, numbers := 0.0, []float64{} // numbers: those of a list, or one
	_, timed := s.to.(*time.Duration)
	wrong := json.Unmarshal(s.Value, map[bool]any{true: &number, false: s.to}[timed])
	json.Unmarshal([]byte("["+strings.Trim(string(s.Value), "[]")+"]"), &numbers)
	outside := s.max > s.min && slices.ContainsFunc(numbers, func(n float64) bool { return n < s.min || n > s.max })
	problem := cmp.Or(when(wrong != nil, "must be "+cmp.Or(map[string]string{"*string": "a string in quotes",
		"*[]int64": "a list of numeric ids like [1001, 1002], without names and quotes", "*bool": "true or false",
	}[fmt.Sprintf("%T", s.to)], "a number, and a whole one where a fraction makes no sense")),
		when(outside, fmt.Sprintf("must be between %.15g and %.15g", s.min, s.max)))
	switch p := s.to.(type) {
	case *time.Duration:
		*p = time.Duration(number * map[bool]float64{true: 1e6, false: 1e9}[strings.HasSuffix(s.Key, "_ms")]) // ns
	case *string:
		if typ, ok := strings.CutPrefix(s.Key, "safe_defaults."); ok {
			c.SafeDefaults[PromptType(typ)] = *p
		}
		problem = cmp.Or(problem, when(*p != s.def && !regexp.MustCompile("^("+s.shape+")$").MatchString(*p), s.must))
	}
	return hinted(when(problem != "", fmt.Errorf("%s: %s %s", s.Origin, s.Key, problem)),
		"correct or remove it; default: "+cmp.Or(s.def, "none"))
}

func (s setting) read(text string) json.RawMessage { // as JSON, none as none; a list needs no brackets
	_, isText := s.to.(*string)
	_, isList := s.to.(*[]int64)
	value := strings.TrimSpace(text)
	value = cmp.Or(when(isList, "["+strings.Trim(value, ", ")+"]"), value)
	value = cmp.Or(when(isText || !tomlLine.MatchString("k="+value), string(quoted(value))), value)
	return json.RawMessage(when(text != "", value))
}
func quoted(text string) json.RawMessage { v, _ := json.Marshal(text); return v } // a text cannot fail

// The lines of https://toml.io/en/v1.0.0 that are accepted: a table's header, a key and its value, or blank, and then a
// comment. Values are those JSON understands in the same way, and literal strings; lists are of integers. All without
// control characters and in UTF-8 (Go reads another byte as U+FFFD).
const tomlOdd, tomlInt = `\x00-\x08\x0a-\x1f\x7f\x{fffd}`, `-?(?:0|[1-9][0-9]*)`

var tomlLine = regexp.MustCompile(`^[ \t]*(?:\[[ \t]*([A-Za-z0-9_-]+)[ \t]*\]|([A-Za-z0-9_-]+)[ \t]*=[ \t]*(true|` +
	`false|` + tomlInt + `(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|"(?:[^"\\\t` + tomlOdd + `]|\\[btnfr"\\])*"|'[^'` + tomlOdd +
	`]*'|\[[ \t]*(?:` + tomlInt + `(?:[ \t]*,[ \t]*` + tomlInt + `)*)?[ \t]*\]))?[ \t]*(?:#[^` + tomlOdd + `]*)?$`)

// parseTOML returns the settings by full name, and tables, without a value, in brackets; known nil: any key will do.
func parseTOML(text string, known []string) (map[string]setting, error) {
	entries, prefix := map[string]setting{}, ""
	for i, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		s, problem := setting{Origin: fmt.Sprint("config.toml:", i+1)}, ""
		switch m := tomlLine.FindStringSubmatch(line); {
		case m == nil:
			problem = "not  name = value  with text in quotes, a number, true, false or a [list] of whole numbers"
		case m[1] != "":
			prefix, s.Key = m[1]+".", "["+m[1]+"]"
		case m[2] == "":
			continue
		default:
			literal := when(m[3][0] == '\'', string(quoted(strings.Trim(m[3], "'"))))
			s.Key, s.Value = prefix+m[2], json.RawMessage(cmp.Or(literal, m[3]))
			problem = when(known != nil && !slices.Contains(known, s.Key), "unknown key "+s.Key+meant("", s.Key, known))
		}
		if problem = cmp.Or(problem, when(entries[s.Key].Key != "", s.Key+" is there twice")); problem != "" {
			return nil, hinted(fmt.Errorf("%s: %s", s.Origin, problem),
				"lines look like  key = \"text\"  or  key = 42  under an optional  [table]; the README lists all keys")
		}
		entries[s.Key] = s
	}
	return entries, nil
}

func stateDir(getenv func(string) string) (string, error) { // where everything is kept
	if dir := cmp.Or(getenv("ATLASBRIDGE_HOME"), getenv("STORAGE_PATH")); dir != "" {
		return filepath.Abs(dir)
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".atlasbridge"), hinted(err, "set ATLASBRIDGE_HOME to a folder of your own")
}
func secureDir(dir string) error { // makes it when it is missing, refuses one that is not the user's alone, or a link
	parents, made := os.MkdirAll(filepath.Dir(dir), 0o700), mkdirPrivate(dir)
	return hinted(cmp.Or(parents, when(!errors.Is(made, fs.ErrExist), made), ownedPrivate(dir)),
		"chmod 700 "+dir+" if it is yours, or set ATLASBRIDGE_HOME to another folder")
}
func childEnv(env []string, c *Config, sessionID string) []string { // nothing of ours but what `atlasbridge hook` needs
	ours := regexp.MustCompile(`(?i)^(ATLASBRIDGE|TELEGRAM)_`) // in any case, as Windows has it
	return append(slices.DeleteFunc(slices.Clone(env), func(entry string) bool {
		return ours.MatchString(entry) || c.Token != "" && strings.Contains(entry, c.Token)
	}), "ATLASBRIDGE_SESSION="+sessionID, "ATLASBRIDGE_HOME="+c.Dir)
}

const logLimit = 1 << 20 // bytes from which the next session starts another log
// openLog is the log file (0600): JSON Lines, every text through redact. A line that cannot be written is lost.
func openLog(dir, level string) (*slog.Logger, error) {
	var least slog.Level
	if err := errors.Join(least.UnmarshalText([]byte(level)), secureDir(dir)); err != nil {
		return nil, fmt.Errorf("opening the log: %w", err)
	}
	path := filepath.Join(dir, "atlasbridge.log")
	if info, err := os.Stat(path); err == nil && info.Size() >= logLimit {
		os.Rename(path, path+".1")
	}
	file, _ := openPrivate(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	hide := func(_ []string, a slog.Attr) slog.Attr {
		if k := a.Value.Kind(); k == slog.KindString || k == slog.KindAny && a.Key != slog.LevelKey {
			a.Value = slog.StringValue(redact(a.Value.String()))
		}
		return a
	}
	return slog.New(slog.NewJSONHandler(file, &slog.HandlerOptions{Level: least, ReplaceAttr: hide})), nil
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
  --json, --screen, --explain  one object per line; the last screen; why
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
func cmdConfig(c *command) int {
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	rows := mapped(cfg.inForce, func(s setting) []string { return []string{s.Key, string(s.Value), s.Origin} })
	return c.show(cfg.inForce, append([][]string{{"SETTING", "VALUE", "FROM"}}, rows...))
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
		tell("audit", hinted(cmp.Or(err, bad), "keep a copy of audit.log; `atlasbridge audit verify` says more"),
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

func cmdDebug(c *command) int {
	path := cmp.Or(c.opts.text("output"), time.Now().Format("atlasbridge-debug-20060102-150405.tar.gz"))
	f, opened := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	cfg, err := c.config(nil)
	about, _ := json.MarshalIndent(map[string]any{"version": version(), "tools": knownTools(c.ctx, cfg),
		"config": cfg.inForce, "config_error": fmt.Sprint(err)}, "", "  ")
	zip, full := gzip.NewWriter(f), c.opts.on("full")
	tape := tar.NewWriter(zip) // an error stays with it until it is closed
	for _, name := range []string{"about.json", "state.jsonl", "audit.log", "atlasbridge.log", "atlasbridge.log.1"} {
		content, _ := os.ReadFile(filepath.Join(cfg.Dir, name))
		text := cmp.Or(when(name == "about.json", string(about)), // the audit log keeps its bytes: they are hashed
			when(full && name != "state.jsonl", string(content)), string(withhold(content, full)))
		if text = strings.ReplaceAll(redact(text), cmp.Or(cfg.Token, "\x00"), "[token]"); text != "" && opened == nil {
			fmt.Fprintf(c.stdout, "%9d  %s\n", len(text), name)
			tape.WriteHeader(&tar.Header{Name: "atlasbridge/" + name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()})
			io.WriteString(tape, text)
		}
	}
	if err := cmp.Or(opened, errors.Join(tape.Close(), zip.Close(), f.Close())); err != nil {
		return c.fail(hinted(fmt.Errorf("writing the bundle: %w", err), "choose another file with --output"))
	}
	fmt.Fprint(c.stdout, path, ": no token; answers and excerpts with --full only; look into it before you send it\n")
	return 0
}

// withhold takes every text not known to be harmless out of JSON Lines, so that a field added later is not shown by
// mistake; with full, nonces only. Of a damaged line nothing is left.
func withhold(lines []byte, full bool) (out []byte) {
	harmless := strings.Fields(`rec id at type confidence safe_default status source fingerprint created_at expires_at ts
		decided_at decided_by prompt_id session_id injected_at kind by tool activity started_at ended_at hash prev_hash
		event crc time level msg err error signals`)
	for line := range bytes.Lines(lines) {
		var record map[string]json.RawMessage
		json.Unmarshal(line, &record)
		maps.DeleteFunc(record, func(key string, v json.RawMessage) bool {
			return key == "nonce" || !full && strings.ContainsAny(string(v[:1]), `"[{`) && !slices.Contains(harmless, key)
		})
		text, _ := json.Marshal(record) // of valid JSON: cannot fail
		out = append(append(out, text...), '\n')
	}
	return out
}

/* ===== The session: one run of a tool ===== */
// All data has one owner. The loop: Screen, Detector, question, gate, queues; it only selects and appends to the store.
// Beside it: read, readKeys, a writer and a waiter of the PTY, the store's follower, the poller, one sender per call of
// the channel; they end with the PTY, the context or the process. Output reaches the host before anything looks at it.
const (
	joinWindow              = 400 * time.Millisecond            // hook and dialog are 0.2 s apart (measured on claude 2.1)
	hookGrace, retryEvery   = 2 * time.Second, 5 * time.Second  // for a hook to act before the gate; to record a question
	keyGrace                = 300 * time.Millisecond            // after a key at the keyboard, for the screen to show it
	dialogGrace             = 300 * time.Millisecond            // claude 2.1 ignores keys in a dialog's first 0.1 to 0.2 s
	lookTime, gatePoll      = time.Second, time.Second / 40     // for the gate to see its question; between its looks
	judgeEvery, reapEvery   = time.Second / 100, time.Minute    // between looks of the detector; for sessions that died
	maxBacklog, maxMessage  = 4 << 20, 4096                     // bytes of --stream text that waits; of an operator's text
	followTime, submitTime  = time.Second, 3 * time.Second      // for one key of the gate to show; for a text to be taken
	drainSend, drainStream  = 3 * time.Second, 10 * time.Minute // for the last messages; with --stream, all output
	doingEvery, outputEvery = time.Second, 30 * time.Second     // between records of what is done; of the last output
	maxUnread, readBytes    = 64, 8 << 10                       // reads the screen may lag behind the host; bytes of one
	questionOpen            = "a question is open: answer it, or press ESC with /keys"
)

var (
	reReport    = regexp.MustCompile(`(?s)^\x1b(\[[IO<M?>]|\[.*R$|[\]P_])`)  // sent by terminals themselves (ctlseqs)
	reControl   = regexp.MustCompile(`[^\n\t\P{Cc}]`)                        // what a terminal acts on
	reSimpleYes = regexp.MustCompile(`(?i)^yes(, manually approve|[^,;]*$)`) // a yes to nothing more (" and " as a comma)
)

type session struct { // what the loop owns
	cfg                                    *Config
	st                                     *Store
	ch                                     Channel
	tg                                     *Telegram // ch, unless that is local
	log                                    *slog.Logger
	adapter                                *Adapter
	pty                                    PTY
	det                                    *Detector
	cast                                   *castWriter // nil without --record
	rec                                    SessionRecord
	in, out, notes, tty                    *os.File // notes: nil with --quiet; tty: the host's terminal, nil without one
	restore                                func() error
	hooked, interactive, hungUp, inFlight  bool // hooks call us; somebody may type; told to end; a write is under way
	signals                                chan os.Signal
	ctx                                    context.Context // of what goes on beside the loop, until stop
	stop                                   func()
	polling                                sync.WaitGroup
	events                                 chan func() // of the goroutines, for the loop to run
	sending                                int         // calls that have not reported
	next, judged, lastKey, doingAt, reapAt time.Time   // turn of the loop at the latest; last look, key here, record; reap
	seen                                   *Prompt     // what the detector last found, until it is gone
	q                                      *question   // in force
	gate                                   *gate
	typing, jsonLine                       []byte // for the writer; unfinished line of stream-json, nil for other tools
	stream                                 stream
	answer, trouble, warning               string       // beginning of its last answer; of the state file; of its version
	open                                   atomic.Bool  // a question is open: the follower looks more often
	unseen                                 atomic.Int64 // bytes that Read has returned and the screen has not got
}
type question struct { // the prompt in force, and what is known of it beyond its record
	rec                    PromptRecord // Status "" until it is stored
	screen                 *Prompt      // nil: only a hook asked
	joinBy, typeAt, remind time.Time    // it waits for hook or screen until; the gate types it from; time left is shown at
	shown                  time.Time    // when the dialog of a known tool was seen
	typed, unasked         bool         // keys went to the child since it appeared; free text is off: it is not sent
	unsend                 func()       // ends a delivery that is no longer wanted
}
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
	cfg, err := c.config(map[string]string{"channel": o.text("channel"), "stream.enabled": when(o.on("stream"), "true"),
		"timeout_seconds": seconds, "permission_timeout_seconds": seconds})
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
	s := &session{cfg: cfg, st: st, ch: localChannel{}, tg: newTelegram(cfg, st, log), log: log, adapter: adapter,
		in: c.stdin, out: c.stdout, notes: when(!o.on("quiet"), c.stderr), interactive: onTerminal(c.stdin),
		tty: cmp.Or(terminal(c.stdin), terminal(c.stdout), terminal(c.stderr)), restore: func() error { return nil },
		signals: make(chan os.Signal, 8), events: make(chan func()),
		rec: SessionRecord{Head: Head{ID: newID()}, Tool: tool, Args: o.args[1:], Cwd: cwd, Wrapper: os.Getpid(),
			Label: o.text("name"), Status: "active", Activity: "starting", StartedAt: time.Now().UTC()}}
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
	if s.interactive {
		if s.restore, err = rawMode(s.in); err != nil {
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
	s.det = newDetector(s.adapter, int(size.Rows), int(size.Cols), DetectOptions{Threshold: s.cfg.Threshold,
		Stuck: s.cfg.Stuck, BufferBytes: s.cfg.BufferBytes, SafeDefaults: s.cfg.SafeDefaults})
	if s.cfg.Stream {
		s.det.Screen.Transcript(false) // from now on it is kept
	}
	s.rec.PID, s.rec.PIDStart = s.pty.PID(), processStart(s.pty.PID())
	s.loop()
	s.finish()
	return nil
}

func (s *session) loop() { // until the child is gone and its output drained
	output, keyboard, writes := make(chan []byte, maxUnread), make(chan []byte), make(chan []byte)
	defer close(writes)
	resized, _ := resizeSignals(s.tty)
	records := s.st.Follow(s.ctx, s.rec.ID, s.open.Load)
	s.spawn(func() { s.read(output) })
	s.spawn(func() { s.readKeys(keyboard) })
	s.spawn(func() {
		for p := range writes {
			s.pty.Write(p)
			s.events <- func() { s.inFlight = false }
		}
	})
	s.spawn(func() {
		code := s.pty.Wait()
		s.events <- func() { s.rec.ExitCode = &code }
	})
	s.put("recording the session", ref(s.rec))
	s.notify(Notice{Text: "▶ started: " + s.rec.Tool + " in " + s.rec.Cwd})
	for turn := time.NewTimer(0); s.rec.ExitCode == nil || output != nil; {
		waiting := len(s.typing) > 0 // a nil channel never becomes ready
		turn.Reset(time.Until(s.next))
		select {
		case p, more := <-output:
			if output = when(more, output); more {
				s.output(p)
			}
		case p := <-when(s.gate == nil && !waiting, keyboard):
			s.keyboard(p)
		case when(waiting && !s.inFlight, writes) <- s.typing:
			s.typing, s.inFlight = nil, true
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
}
func (s *session) reap() { // fails the prompts of sessions whose process is gone, and has their messages edited
	if !s.due(s.reapAt) {
		return
	}
	s.reapAt = time.Now().Add(reapEvery)
	dead, failed, err := s.st.Reap(time.Now())
	s.stored("closing dead sessions", err)
	for _, p := range failed {
		if i := slices.IndexFunc(dead, func(d *SessionRecord) bool { return d.ID == p.SessionID }); i >= 0 {
			s.settle(*p, *dead[i])
		}
	}
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

func (s *session) finish() { // closes the books and sends the last messages, and all of the output with --stream
	s.pty.Close()
	s.restore()
	if s.gate != nil {
		s.gateEnd("the program ended")
	}
	if s.q != nil {
		s.end(s.q, Failed)
	}
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

/* ===== Bytes ===== */
func (s *session) output(p []byte) { // which the host has already
	now, t := time.Now(), &s.stream
	s.det.Feed(p, now)
	s.unseen.Add(-int64(len(p)))
	s.cast.output(p, now)
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
func (s *session) keyboard(p []byte) { // empty: the end of a pipe, which the line discipline makes from ^D
	if len(p) == 0 && !s.pty.State().Canonical {
		return
	}
	keys := cmp.Or(string(p), "\x04\x04") // the first may only end an unfinished line
	byHand := !reReport.MatchString(keys)
	s.lastKey = cmp.Or(when(byHand, time.Now()), s.lastKey)
	s.inject(keys, byHand)
}
func (s *session) inject(keys string, byHand bool) { // queues them for the child; by hand: may answer the question
	if s.typing = append(s.typing, keys...); s.q != nil {
		s.q.typed = s.q.typed || byHand
	}
	s.det.Typed([]byte(keys), time.Now())
	s.cast.event("i", keys, time.Now())
}
func (s *session) resize() {
	size := s.size()
	if s.pty.Resize(size) == nil {
		s.det.Resize(int(size.Rows), int(size.Cols), time.Now())
		s.cast.event("r", fmt.Sprintf("%dx%d", size.Cols, size.Rows), time.Now())
	}
}
func (s *session) signaled(sig os.Signal) { // SIGHUP of a closed terminal ends the session, any other reloads
	_, gone := terminalSize(s.tty)
	switch {
	case sig == suspendSignal:
		s.restore()
		if stopSelf(); s.interactive {
			s.restore, _ = rawMode(s.in)
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
	cfg, err := loadConfig(s.cfg.Dir, os.Getenv, nil)
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
	for _, step := range []func(){s.judge, s.questionStep, s.gateStep, s.streamStep, s.activityStep, s.reap} {
		step()
	}
	s.open.Store(s.q != nil)
}
func (s *session) due(at time.Time) bool { // if it has not come yet, the loop turns then
	now := time.Now()
	if at.After(now) && at.Before(s.next) {
		s.next = at
	}
	return !at.After(now)
}

func (s *session) judge() { // asks the detector whether a question has come or gone
	tty, now := TTYState{}, time.Now()
	if s.gate != nil || !s.due(s.judged.Add(judgeEvery)) {
		return
	}
	if s.judged = now; s.det.WantTTY(now) {
		tty = s.pty.State()
		s.cast.tty(tty, now)
	}
	p := s.det.Tick(tty, now)
	if p != nil || s.seen != nil && s.det.Gone(tty, now) { // the screen may have gone straight on to another question
		if s.seen = nil; s.q != nil && s.q.screen != nil && s.q.typeAt.IsZero() {
			s.end(s.q, Canceled)
		}
	}
	s.seen = cmp.Or(p, s.seen)
	switch q := s.q; {
	case p == nil || p.Idle && (q != nil || !s.cfg.NotifyIdle): // nothing to say
	case q != nil && q.screen == nil:
		s.join(q, p)
	default:
		byHook := s.hooked && !p.Idle && p.Type == MultipleChoice
		s.q = &question{screen: p, joinBy: when(byHook, now.Add(joinWindow)), shown: when(s.adapter.Box != nil, now)}
		s.capture(p)
	}
	s.due(slices.MaxFunc([]time.Time{now.Add(judgeEvery), s.det.Next(now)}, time.Time.Compare))
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

// hookAsked takes a question that `atlasbridge hook` has stored, if none is in force: end comes back for the others. A
// permission waits a moment for its dialog, which has more choices; with -p there is none.
func (s *session) hookAsked(rec PromptRecord) {
	dialog := rec.Permission && !slices.Contains(s.rec.Args, "-p") && !slices.Contains(s.rec.Args, "--print")
	switch q := s.q; {
	case q != nil && q.rec.Idle:
		s.end(q, Canceled)
	case q == nil || q.rec.Status == "":
		s.q = &question{rec: rec, joinBy: when(dialog, time.Now().Add(joinWindow))}
		if s.seen != nil && !s.seen.Idle {
			s.join(s.q, s.seen)
		}
	case q.rec.Source == "screen" && q.rec.Permission:
		s.move(rec.ID, Canceled, func(r *PromptRecord) { r.Reason = "asked from the screen already" })
	}
}

func (s *session) join(q *question, p *Prompt) { // a hook's with the screen's choices; what the hook can say is marked
	q.screen, q.joinBy, q.shown = p, time.Time{}, time.Now()
	choices, last := slices.Clone(p.Choices), len(p.Choices)-1
	if q.rec.Tool == "AskUserQuestion" || last < 0 || choices[last].Grants {
		return // the hook knows the questions and answers them all at once
	}
	yes := func(c Choice) bool {
		return c.Grants && reSimpleYes.MatchString(strings.ReplaceAll(c.Label, " and ", ","))
	}
	if i := slices.IndexFunc(choices, yes); i >= 0 {
		choices[i].Hook = "allow"
	}
	choices[last].Hook = "deny"
	s.stored("joining hook and screen", s.st.Update(func(v *View) ([]Record, error) {
		r := *cmp.Or(v.Prompts[q.rec.ID], &PromptRecord{NonceUsed: true})
		if r.NonceUsed {
			return nil, nil
		}
		r.Choices, r.SafeDefault, r.Fingerprint = choices, &choices[last].Key, p.Fingerprint
		r.Signals = slices.Concat(r.Signals, p.Signals)
		q.rec, q.remind = r, time.Time{} // where it is shown already, anew
		return []Record{&r}, nil
	}))
}

// end takes the question out of force: as answered at the keyboard if keys went to the child since it appeared, else
// Canceled or Failed; "" when it has ended already. Its message is edited, and a hook's next one let in.
func (s *session) end(q *question, to State) {
	why := map[State]string{Canceled: "the question left the screen", Failed: "the program ended"}[to]
	if to != "" && q.typed {
		s.move(q.rec.ID, Resolved, func(r *PromptRecord) { r.DecidedBy = ref("cli:local") })
	} else if to != "" {
		s.move(q.rec.ID, to, func(r *PromptRecord) { r.Reason = why })
	}
	if q.unsend != nil {
		q.unsend()
	}
	s.q = nil
	v, _ := s.st.View() // as it was, where it cannot be read
	if p := v.Prompts[q.rec.ID]; p != nil {
		shown := *p
		if q.typed && p.Status == Canceled && p.DecidedBy == nil { // its hook was quicker to say that it is over
			shown.Status, shown.DecidedBy, shown.Reason = Resolved, ref("cli:local"), ""
		}
		s.settle(shown, s.rec)
	}
	for _, p := range v.Prompts {
		if s.q == nil && s.rec.ExitCode == nil && p.SessionID == s.rec.ID && p.Source == "hook" && p.Status == Created {
			s.hookAsked(*p)
		}
	}
}

func (s *session) move(id string, to State, change func(*PromptRecord)) bool { // one transition; keeps our copy true
	var after PromptRecord
	moved, err := s.st.Move(id, to, func(r *PromptRecord) {
		change(r)
		after = *r
	})
	if after.Status = to; moved && s.q != nil && s.q.rec.ID == id {
		s.q.rec = after
	}
	return s.stored("recording a prompt", err) && moved
}
func asIs(*PromptRecord) {}

func (s *session) questionStep() { // stores, types, expires, sends the question, reminds of it, when it is time
	q := s.q
	if s.gate != nil || q == nil || !s.due(q.joinBy) || q.rec.Status == "" && !s.create(q) {
		return
	}
	switch status := q.rec.Status; {
	case !q.typeAt.IsZero() && s.due(q.typeAt) && s.due(q.shown.Add(dialogGrace)):
		s.gate = &gate{q: q, text: cleanText(*cmp.Or(q.rec.Value, ref(""))), until: time.Now().Add(keyGrace + lookTime)}
	case !q.typeAt.IsZero() || status == Created && s.interactive && !s.due(s.lastKey.Add(s.cfg.Away)):
		// its hook may say it, or somebody types here
	case s.due(q.rec.ExpiresAt):
		s.expire(q)
	case status == Created && !q.unasked && s.move(q.rec.ID, Routed, asIs):
		s.askPhone(q)
	case status == AwaitingReply && s.due(q.remind):
		s.settle(q.rec, s.rec)
		q.remind = remindAt(&q.rec)
		s.due(q.remind)
	}
}
func remindAt(p *PromptRecord) time.Time { // a message shows the time left as it was for half of it: it is no clock
	return time.Now().Add(max(time.Until(p.ExpiresAt)/2, time.Minute))
}

// expire has the safe default typed, if the question is still there. One without a default ends here, and so does one
// that vanished from the state.
func (s *session) expire(q *question) {
	why := cmp.Or(when(q.unasked, "free text is switched off"),
		fmt.Sprintf("no answer in %d s", int(q.rec.ExpiresAt.Sub(q.rec.CreatedAt).Seconds())))
	expired := s.move(q.rec.ID, Expired, func(r *PromptRecord) { r.Reason, r.Value = why, r.SafeDefault })
	v, err := s.st.View()
	switch s.next = time.Now(); {
	case expired && q.rec.SafeDefault == nil || err == nil && v.Prompts[q.rec.ID] == nil:
		s.end(q, "")
	case expired:
		q.typeAt = time.Now().Add(when(q.rec.Source == "hook", hookGrace))
	default: // somebody decided in this very moment, or the state is in trouble
		s.next = s.next.Add(judgeEvery)
	}
}

// create stores what the screen asks, or tries again later. Free text that may not be sent lives until whoever is here
// has had time to type.
func (s *session) create(q *question) bool {
	p, now := q.screen, time.Now()
	q.unasked = p.Type == FreeText && !p.Idle && !p.Secret && !s.cfg.FreeText
	life := cmp.Or(when(p.Permission, s.cfg.PermissionTimeout), s.cfg.Timeout)
	if q.unasked {
		life = when(s.interactive, s.cfg.Away)
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
		q.rec, q.joinBy = PromptRecord{}, now.Add(retryEvery)
	}
	return s.due(q.joinBy)
}

func (s *session) followed(rec Record) { // as somebody else changed it: a decision, a hook's question, the phone's wish
	if in, ok := rec.(*InputRecord); ok && in.Status == "queued" {
		s.input(in)
	}
	r, ok := rec.(*PromptRecord)
	switch q := s.q; {
	case !ok:
	case (q == nil || q.rec.ID != r.ID) && r.Source == "hook" && r.Status == Created:
		s.hookAsked(*r)
	case q == nil || q.rec.ID != r.ID || s.gate != nil && s.gate.q == q || r.Status == q.rec.Status || r.Status == Expired:
	case r.Status == ReplyReceived:
		c := choiceOf(r)
		byHook := r.Source == "hook" && (r.Tool == "AskUserQuestion" || c != nil && c.Hook != "")
		q.rec, q.typeAt = *r, time.Now().Add(when(byHook, hookGrace))
	case r.Status == Injected: // by its hook
		s.move(r.ID, Resolved, asIs)
		s.det.Sleep(time.Now().Add(s.cfg.EchoWindow))
		s.seen = nil
		s.end(q, "")
	case !r.Open():
		s.end(q, "")
	}
}

func choiceOf(r *PromptRecord) *Choice { // that a decided prompt's value names, nil when it is text
	named := func(c Choice) *Choice { return when(r.Value != nil && c.Key == *r.Value, &c) }
	return cmp.Or(mapped(r.Choices, named)...)
}

func (s *session) input(r *InputRecord) { // does what an operator asked for: text, keys, a look at the screen, the end
	why, reply, screen := "", Notice{}, []rune(visible(redact(s.det.Screen.Text())))
	switch {
	case r.Kind == "answer": // the tool's own Stop hook: the beginning of its last answer
		s.answer = r.Text
	case r.Kind == "screen" || r.Kind == "last" || r.Kind == "show_recent":
		reply.Mono = string(screen[when(r.Kind != "screen", max(0, len(screen)-500)):])
	case r.Kind == "cancel":
		reply.Text = "⏹ ending the session"
		s.terminate()
	case s.gate != nil:
		why = "an answer is being typed just now; try again"
	case r.Kind == "keys": // the child sees them as typed: ^C becomes SIGINT where its terminal is set so, else a byte
		for _, name := range strings.Fields(r.Text) {
			keys, _ := keyBytes(name, s.det.Screen.AppCursorKeys())
			s.inject(keys, true)
		}
		reply.Text = "⌨ pressed " + r.Text
	case r.Kind != "text":
		why = "this session does not know how to do that"
	case s.q != nil && !s.q.rec.Idle && s.q.rec.Status != "":
		why = questionOpen
	case s.adapter.Name == "generic" && s.pty.State().Reading == ReadingBusy:
		why = "the program is not reading its keyboard just now"
	default: // into an input box or a REPL: the gate answers when it has typed
		s.gate = &gate{input: r, text: cleanText(r.Text), until: time.Now().Add(submitTime)}
		return
	}
	s.inputDone(r, why, reply)
}

func (s *session) inputDone(r *InputRecord, why string, reply Notice) { // tells; an idle tool has then been answered
	after, text := *r, cleanText(r.Text)
	if after.Status, after.Reason = "done", why; why != "" {
		after.Status, reply = "refused", Notice{Text: "✗ " + why, Ring: true}
	} else if r.Kind == "text" {
		s.stored("auditing an input", s.st.Audit().Append(Event{"INPUT_FORWARDED", s.rec.ID, "",
			[]Field{{"by", r.By}, {"bytes_len", len(text)}, {"text_sha256", fmt.Sprintf("%x", sha256.Sum256([]byte(text)))}}}))
		reply.Text = "✓ sent"
	}
	s.put("recording an input", &after)
	if reply.ReplyTo = r.ReplyTo; r.Kind != "answer" {
		s.notify(reply)
	}
	if s.q != nil && s.q.rec.Idle && reply.Text == "✓ sent" {
		s.q.typed = true
		s.end(s.q, Resolved)
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
func (s *session) askPhone(q *question) { // while it is worth it; one that could not be sent stays routed
	p, of := q.rec, s.rec
	ctx, cancel := context.WithDeadline(s.ctx, p.ExpiresAt)
	q.unsend, q.remind = cancel, remindAt(&p)
	s.send(func() (int64, error) { return s.ch.Ask(ctx, &p, &of) }, func(msg int64, err error) {
		if err == nil && !s.move(p.ID, AwaitingReply, func(r *PromptRecord) { r.MsgID = msg }) {
			v, _ := s.st.View() // it was answered meanwhile
			s.settle(*cmp.Or(v.Prompts[p.ID], &p), s.rec)
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
// gate types one answer, closed loop. While it exists the keyboard waits and no question is looked for. It looks before
// its first key and after every key of a menu, and never presses Enter blind; if the screen does not follow in time it
// stops and tells the operator. A step is one look, and keys or the reason why there are none yet: no step waits.
type gate struct {
	q     *question    // nil: free input
	input *InputRecord // then this
	text  string       // what is typed into an input box
	want  []int        // the choices to make, several only in a Multi menu
	phase int
	until time.Time // the screen must have followed by then
	last  *Prompt   // the menu before the last key
}

// Nothing is typed; a menu moves, its review page comes; text is in the box, Enter or a second one takes it; all typed.
const gateLook, gateMenu, gateReview, gateEnter, gateLeft, gateAgain, gateEcho = 0, 1, 2, 3, 4, 5, 6

func (s *session) gateStep() { // not before the writer has reported
	g := s.gate
	if g == nil || len(s.typing) > 0 || s.inFlight || g.phase == gateLook && !s.due(s.lastKey.Add(keyGrace)) ||
		(g.phase == gateEnter || g.phase == gateEcho) && !s.due(g.until) {
		return
	}
	step, tty := s.menuStep, s.pty.State()
	switch s.cast.tty(tty, time.Now()); {
	case g.phase == gateEcho:
		s.gateEnd("")
		return
	case g.input != nil || g.q.rec.Idle:
		step = s.textStep
	case g.phase == gateLook:
		step = s.firstStep
	}
	s.due(time.Now().Add(gatePoll)) // a repaint may be half done
	p, late := s.det.Look(tty, time.Now()), !time.Now().Before(g.until)
	if unseen := s.unseen.Load() + int64(s.pty.Unread()); unseen > 0 && !late {
		return // what comes may take the question away
	}
	if why := step(p); why != "" && late {
		s.gateEnd(why)
	}
}

func (s *session) press(keys string, then int, within time.Duration) (why string) { // within: for the screen to follow
	s.inject(keys, false)
	if s.gate.phase, s.gate.until = then, time.Now().Add(within); then == gateEcho {
		s.det.Sleep(s.gate.until)
		s.seen = nil
	}
	return ""
}

func (s *session) firstStep(p *Prompt) (why string) { // only where it stands as it was asked and nobody began to answer
	g, rec := s.gate, &s.gate.q.rec
	value := *cmp.Or(rec.Value, ref(""))
	keys := map[string]string{"enter": "\r", "esc": "\x1b", "cancel": "\x1b", "deny": "\x1b"}[value]
	switch {
	case p == nil || p.Fingerprint != rec.Fingerprint:
		return "the question is no longer on the screen"
	case g.q.typed && p.Pointer < 0 && g.q.screen != nil && p.Recent != g.q.screen.Recent:
		return "somebody began to answer at the keyboard"
	case rec.Secret:
		value, _ = s.st.TakeSecret(rec.ID)
	}
	for key := range strings.SplitSeq(value, ",") {
		if i := slices.IndexFunc(p.Choices, func(c Choice) bool { return c.Key == key }); i >= 0 {
			g.want = append(g.want, i)
		}
	}
	switch {
	case len(g.want) > 0:
		g.phase = gateMenu
		return s.menuStep(p)
	case keys == "" && (rec.Type == FreeText || rec.Type == Unknown):
		keys = s.pasted(cleanText(value)) + "\r"
	case keys == "":
		return "there is no choice " + value
	}
	return s.press(keys, gateEcho, s.cfg.EchoWindow)
}

func (s *session) menuStep(p *Prompt) (why string) { // the next key once the last shows: pointer, tick or review page
	g, keys := s.gate, ""
	switch asked := p != nil && p.Fingerprint == g.q.rec.Fingerprint; {
	case asked && g.phase == gateReview:
		return "the menu did not take the answer; look at the terminal"
	case g.phase == gateReview && p == nil && g.q.rec.Multi && time.Now().Before(g.until): // its review page may come yet
		return ""
	case g.phase == gateReview:
		for _, c := range cmp.Or(p, &Prompt{}).Choices {
			keys += when(g.q.rec.Multi && strings.HasPrefix(strings.ToLower(c.Label), "submit"), c.Keys)
		}
		return s.press(keys, gateEcho, s.cfg.EchoWindow)
	case !asked || g.last != nil && p.Pointer == g.last.Pointer && slices.Equal(p.Ticked, g.last.Ticked):
		return "the menu did not follow the keys; look at the terminal"
	}
	target := g.want[0]
	if p.Multi { // the first whose tick is not as wanted
		for target = 0; target < len(p.Ticked) && p.Ticked[target] == slices.Contains(g.want, target); {
			target++
		}
		if target == len(p.Ticked) {
			return s.press(cmp.Or(p.Submit, "\r"), gateReview, followTime)
		}
	}
	switch keys = p.Choices[target].Keys; {
	case !p.Multi && s.adapter.Box != nil && p.Pointer >= 0 && (keys != "" || p.Pointer == target): // it must go then
		return s.press(cmp.Or(keys, "\r"), gateReview, followTime)
	case !p.Multi && (keys != "" || p.Pointer == target):
		return s.press(cmp.Or(keys, "\r"), gateEcho, s.cfg.EchoWindow)
	case keys == "" && p.Pointer < 0:
		return "the menu shows no pointer to move"
	case keys == "" && p.Pointer == target:
		keys = " "
	case keys == "":
		arrows := cmp.Or(when(p.Axis == "horizontal", [2]string{"LEFT", "RIGHT"}), [2]string{"UP", "DOWN"})
		keys, _ = keyBytes(cmp.Or(when(target < p.Pointer, arrows[0]), arrows[1]), s.det.Screen.AppCursorKeys())
	}
	g.last = p
	return s.press(keys, gateMenu, followTime)
}

func (s *session) pasted(text string) string { // no line end in it presses Enter
	if s.det.Screen.BracketedPaste() {
		return "\x1b[200~" + text + "\x1b[201~"
	}
	return strings.ReplaceAll(text, "\n", " ")
}

func (s *session) textStep(p *Prompt) (why string) { // and Enter, twice if need be, until the text has left the box
	g := s.gate
	row, _, _ := s.det.Screen.Cursor()
	end := g.text[strings.LastIndex(g.text, "\n")+1:]
	end = strings.TrimSpace(strings.ToValidUTF8(end[max(0, len(end)-16):], ""))
	box := s.det.Screen.Row(max(0, row-1)) + "\n" + s.det.Screen.Row(row) // holds the text, or folds it as a paste
	held := strings.Contains(box, end) || strings.Contains(box, "[Pasted text")
	dialog := s.adapter.Box != nil && p != nil && !p.Idle // takes no text, and Enter would answer it
	switch {
	case g.phase == gateLook && g.q != nil && (p == nil || !p.Idle):
		return "the input box is no longer there"
	case dialog && (g.phase == gateLook || g.phase == gateEnter && !held):
		return questionOpen
	case g.phase == gateLook: // ! runs a command, / opens a dialog (measured on claude 2.1)
		escape := map[string]string{"/": "\\", "!": " ", "#": " "}[g.text[:min(1, len(g.text))]]
		return s.press(s.pasted(when(s.adapter.EscapeBang, escape)+g.text), gateEnter, s.adapter.SubmitDelay)
	case g.phase == gateEnter:
		return s.press("\r", gateLeft, submitTime)
	case s.adapter.Name == "generic" || !held:
		return s.press("", gateEcho, s.cfg.EchoWindow)
	case g.phase == gateLeft && !time.Now().Before(g.until):
		return s.press("\r", gateAgain, submitTime)
	}
	return "the text is in the input box but was not taken; look at the terminal"
}

// gateEnd lets the keyboard in again and records that everything was typed, or why nothing more is. The words of a
// refusal that no hook took are the tool's next message.
func (s *session) gateEnd(why string) {
	g := s.gate
	s.gate, s.next, why = nil, time.Now(), when(g.phase != gateEcho, why)
	if g.input != nil {
		s.inputDone(g.input, why, Notice{})
		return
	}
	switch rec := g.q.rec; {
	case why == "":
		s.move(rec.ID, Injected, asIs)
		s.move(rec.ID, Resolved, asIs)
		if rec.Status == ReplyReceived && rec.Permission && rec.Reason != "" && s.adapter.Box != nil {
			s.put("recording an input", &InputRecord{Head: Head{ID: newID()}, SessionID: s.rec.ID, Kind: "text",
				By: *rec.DecidedBy, Text: rec.Reason, ReplyTo: rec.MsgID, PromptID: rec.ID, Status: "queued"})
		}
	case rec.Status != Expired: // then nothing was asked for
		s.move(rec.ID, Failed, func(r *PromptRecord) { r.Reason = why })
	}
	s.end(g.q, "")
}
func cleanText(text string) string { // of an operator, safe to type
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(strings.ToValidUTF8(text, ""))
	return clipBytes(strings.TrimRight(reControl.ReplaceAllString(text, ""), "\n"), maxMessage)
}
func clipBytes(text string, n int) string { return strings.ToValidUTF8(text[:min(n, len(text))], "") } // between runes
func idempotencyKey(session, excerpt string, now time.Time) string { // the same for the same words within 5 s
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s:%s:%d", session, excerpt, now.Unix()/5)))
}

/* ===== --stream ===== */
// stream turns the transcript into messages: finished text fills a message, which is edited as it grows and followed by
// another when it is full; the live part stands at its end.
type stream struct {
	flushAt           time.Time
	text, live, shown string // finished lines, from the current message's first on; what may still change; what it says
	raw               []byte // with strip_ansi = false: output not in text yet
	msg               int64  // the current message, 0 when the next text starts one
	cut               int    // bytes of text in the current message, which is full; 0 while it is not
	busy              bool   // a job is with the sender
}

func (t *stream) message(limit int) string { // of at most limit UTF-16 units; it is full when text goes on
	part, rest := cutText(t.text, limit)
	if t.cut = when(rest != "", len(t.text)-len(rest)); t.cut == 0 {
		part, _ = cutText(part+t.live, limit)
	}
	return strings.TrimRight(part, " \n")
}
func (t *stream) delivered(msg int64, _ error) { // the next text goes into the same message, or starts another
	if t.busy, t.msg = false, cmp.Or(msg, t.msg); t.cut > 0 {
		t.text, t.cut, t.msg, t.shown = t.text[t.cut:], 0, 0, ""
	}
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

/* ===== Recordings ===== */
// castWriter writes an asciicast v2 file: a header line, then [seconds, kind, text] with kinds o, i, r and t
// (https://docs.asciinema.org/manual/asciicast/v2/; t is ours: the system's view of the terminal). A nil one takes all.
type castWriter struct {
	file  *os.File
	w     *bufio.Writer
	start time.Time
	tail  []byte // of a rune that was cut
	state string
}

func newCast(path, title string, size Size) (*castWriter, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("creating the recording: %w", err)
	}
	c := &castWriter{file: file, w: bufio.NewWriter(file), start: time.Now(), state: "unknown raw noecho"}
	return c, json.NewEncoder(c.w).Encode(map[string]any{"version": 2, "width": size.Cols, "height": size.Rows,
		"title": title, "env": map[string]string{"TERM": os.Getenv("TERM")}})
}
func (c *castWriter) event(kind, text string, now time.Time) {
	if c != nil {
		quoted, _ := json.Marshal(text)
		fmt.Fprintf(c.w, "[%.4f, %q, %s]\n", now.Sub(c.start).Seconds(), kind, quoted)
	}
}
func (c *castWriter) output(p []byte, now time.Time) { // but for the beginning of a rune whose end is still to come
	if c == nil {
		return
	}
	p = append(c.tail, p...)
	cut := len(p)
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if !utf8.FullRune(p[len(p)-n:]) {
			cut = len(p) - n
		}
	}
	c.tail = bytes.Clone(p[cut:])
	c.event("o", string(p[:cut]), now)
}
func (c *castWriter) tty(t TTYState, now time.Time) {
	state := []string{"unknown", "reading", "busy"}[t.Reading] + cmp.Or(when(t.Canonical, " canon"), " raw") +
		cmp.Or(when(t.Echo, " echo"), " noecho")
	if c != nil && state != c.state {
		c.state = state
		c.event("t", state, now)
	}
}
func (c *castWriter) close(now time.Time) error { // repeats the last state: a replay's clock stops there
	if c == nil {
		return nil
	}
	c.event("t", c.state, now)
	return errors.Join(c.w.Flush(), c.file.Close())
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
