// store.go keeps everything in the state folder: who may touch it, config.toml, and state.jsonl with every session,
// question and answer, which all atlasbridge processes share. It writes audit.log too, whose chain audit.go makes. It
// shows nobody anything and never reaches the network.
//
// A record is one line of state.jsonl, a JSON object:
//
//	{"v":2,"rec":"prompt","id":"…","at":"2026-01-02T03:04:05.000000Z", …,"crc":"1a2b3c4d"}
//
// It is valid if and only if it ends in a newline, its crc is the CRC-32C of the line without its crc member and
// newline, and its rec is a kind that is known. It carries the whole record as it is after a change: the last valid
// line with a rec and id is the truth. A line whose v is later than schemaVersion stops the reader.
//
// What a question asks never changes. It is written once, before the first line of the question, in a record of kind
// "text" whose id is its SHA-256: a JSON object of what was shown, the question, its context, its answers. Every line
// of the question names it in about_sha256 and says what became of the question; a compaction keeps it with that.
//
// Writing: state.lock, which is never renamed, is held from reading what others appended until what follows from it is
// on the disk, in both files. One Update is one write to each: to state.jsonl the records and, in the record "audit",
// the audit entries that they mean; then to audit.log these entries. When a write fails the file is cut back; when that
// fails too, this process never writes it again.
//
// A crash can leave the beginning of a write. Its whole lines do no harm: an update of Telegram is written after what
// it led to, so that it is done once if it comes again. Its torn line is moved to state.jsonl.torn-TIME. Entries that
// the audit log lacks, after a crash or a failed write, are entered from the state before the next. A damaged line
// before the end stays, is reported, and fails its question; so does a text that is missing.
//
// Compaction keeps the last line of every record that is alive or not old, in a new file that is renamed into place;
// other processes follow. A file with damage, or of an earlier schema, is first copied to state.jsonl.backup-TIME.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
)

const (
	maxHookInput = 64 << 20 // bytes of JSON from a tool, with the file it writes, or what it has read
	maxExcerpt   = 200      // bytes of an excerpt
)

// othersUse stands before the command with which closeRemedy takes a file or folder from others.
const othersUse = "if others need it, set ATLASBRIDGE_HOME to another folder; else make it yours alone: "

// ---- privacy of files ----
//
// Everything is in one folder, which is the user's alone.

// stateDir is where everything is kept: ATLASBRIDGE_HOME, else STORAGE_PATH, else a folder in the user's home.
func stateDir(getenv func(string) string) (dir string, err error) {
	for _, name := range []string{"ATLASBRIDGE_HOME", "STORAGE_PATH"} {
		dir = getenv(name)
		if dir != "" {
			return filepath.Abs(dir)
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", hinted(err, "set ATLASBRIDGE_HOME to a folder of your own")
	}
	return filepath.Join(home, ".atlasbridge"), nil
}

// secureDir makes the folder, private, and those above it, where they are missing. It refuses one that is not the
// user's alone, and a link.
func secureDir(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o700)
	if err == nil {
		err = mkdirPrivate(dir)
	}
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = ownedPrivate(dir)
	}
	if err != nil {
		return hinted(err, "see whose it is, and what it stands in; or set ATLASBRIDGE_HOME to another folder")
	}
	return nil
}

// ownedPrivate is nil for a regular file, or a folder, that openPrivate opens.
func ownedPrivate(path string) error {
	f, err := openPrivate(path, os.O_RDONLY)
	if err != nil {
		return err
	}
	return f.Close()
}

// readPrivate reads a file that must be the user's alone.
func readPrivate(path string) ([]byte, error) {
	f, err := openPrivate(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// replacePrivate gives the file other contents, durably. After an error it has the old ones, and no copy of the new
// ones is left beside it.
func replacePrivate(path string, b []byte) error {
	file := journal{stateLock: &stateLock{do: directly}, path: path}
	if err := file.replace(b); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// ---- config.toml ----
//
// A setting has a value from each of four sources at most, of which the last wins: default, file, environment, flag.

// Config is everything a person can set, validated, each with its key in settingsText.
type Config struct {
	Dir      string // the state folder
	Channel  string `json:"channel"`
	LogLevel string `json:"log_level"`

	DetectOptions
	Timeout           time.Duration `json:"timeout_seconds"`
	PermissionTimeout time.Duration `json:"permission_timeout_seconds"`
	EchoWindow        time.Duration `json:"echo_suppression_ms"`
	Away              time.Duration `json:"away_after_seconds"`
	FreeText          bool          `json:"free_text_enabled"`
	NotifyIdle        bool          `json:"notify_idle"`
	RetentionDays     int           `json:"retention_days"`

	Token   string  `json:"telegram.bot_token"`
	APIBase string  `json:"telegram.api_base"`
	ChatID  int64   `json:"telegram.chat_id"`
	Users   []int64 `json:"telegram.allowed_users"`

	Stream   bool          `json:"stream.enabled"`
	MaxChars int           `json:"stream.max_chars"`
	Flush    time.Duration `json:"stream.flush_ms"`

	inForce []setting // all of them, with value and origin
	ignored []string  // what the environment says, or the file, that is not used, and why
	stamp   time.Time // when the file that was read had been written
	getenv  func(string) string
	flags   map[string]string // of the command line, by setting
}

// Keys of what setup finds out.
const (
	tokenKey = "telegram.bot_token"
	chatKey  = "telegram.chat_id"
	usersKey = "telegram.allowed_users"
	baseKey  = "telegram.api_base"
)

// setting is a row of the configuration: what `config --json` shows (the token masked), and what it can be.
type setting struct {
	Key    string          `json:"key"`
	Value  json.RawMessage `json:"value"`
	Origin string          `json:"origin"` // "flag", "environment NAME", "config.toml:LINE" or "default"

	def    string // the default, as it would stand in config.toml
	env    string // name of the variable in the environment, "" none
	shape  string // regular expression of a text
	must   string // said of a value that does not fit
	bounds string // of numbers, in the unit of the key, as "1 to 600"; "": it has none
}

// settingsText is every key there is, in the order `config` shows them, with its default as it would stand in
// config.toml. Then: what it does; what a text matches; what is said where a value does not fit, with the bounds of
// numbers. These keep a slip of the finger from disabling a guard. Those of Telegram:
// https://core.telegram.org/bots/api (a message's length, 2^52 for ids). No server gets the token but by https.
const settingsText = `
channel = ""
    telegram or local; "": telegram once a bot is set up
    is telegram|local|
    must be telegram or local
timeout_seconds = 600
    seconds that a question waits for its answer
    must be a number from 1 to 86400
permission_timeout_seconds = 300
    the same for a permission
    environment: PERMISSION_TIMEOUT_SEC
    must be a number from 1 to 86400
detection_threshold = 0.65
    confidence needed, 0.60 to 0.99; below it: "possibly a question"
    must be a number from 0.6 to 0.99
stuck_timeout_seconds = 2.0
    seconds of silence that make an unfinished line a question
    must be a number from 0.2 to 600
buffer_size_bytes = 4096
    output kept for ATLASBRIDGE_CAPTURE_PROMPTS
    must be a whole number from 512 to 1048576
echo_suppression_ms = 150
    time after an answer in which an echo is no question
    must be a number from 0 to 10000
free_text_enabled = false
    questions for a text can be answered by phone
    must be true or false
notify_idle = true
    tell the phone when a turn is over
    must be true or false
away_after_seconds = 20
    seconds without your keys before a question goes out
    must be a number from 0 to 86400
context_chars = 600
    characters above a question that are sent with it, whole rows
    must be a whole number from 0 to 3000
telegram.bot_token = ""
    the bot, as @BotFather gave it; a secret
    environment: TELEGRAM_BOT_TOKEN
    is ([0-9]{1,20}:[A-Za-z0-9_-]{1,128})?
    must be a bot token as BotFather gives it
telegram.chat_id = 0
    the chat that gets the questions
    environment: TELEGRAM_CHAT_ID
    must be a whole number from -4503599627370496 to 4503599627370496
telegram.allowed_users = []
    who may answer: user ids, like [1001, 1002]
    environment: ALLOWED_USER_IDS
    must be a list of numeric ids from 1 to 4503599627370496, like [1001, 1002], without names and quotes
telegram.api_base = "https://api.telegram.org"
    the Bot API server that gets the token
    environment: TELEGRAM_API_BASE
    is (https://[^/@?#\s]+|http://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?)(/[^@?#\s]*)?
    must be a URL that begins with https:// (http only for this machine itself)
stream.enabled = false
    send the text of the screen as it comes, as --stream does
    must be true or false
stream.max_chars = 3500
    longest message of the stream
    environment: OUTPUT_MAX_CHARS
    must be a whole number from 100 to 4096
stream.flush_ms = 200
    time that output is gathered for one message
    environment: OUTPUT_FLUSH_MS
    must be a number from 50 to 10000
safe_defaults.yes_no = "n"
    typed when nobody answers a yes/no: only n is possible
    is n
    must be "n": nothing is approved by waiting
safe_defaults.confirm_enter = "enter"
    typed when nobody answers "Press Enter": enter, esc or ""
    is enter|esc|
    must be "enter", "esc" or "" for nothing
safe_defaults.multiple_choice = ""
    chosen when nobody answers, if no choice refuses or grants
    is [^\pC\p{Zl}\p{Zp}]{0,60}
    must be a choice's number or its words, at most 60 characters on one line
safe_defaults.free_text = ""
    typed when nobody answers a question for a text, not a secret
    is [^\pC\p{Zl}\p{Zp}]{0,200}
    must be one line of at most 200 characters, none of them a control character
retention_days = 30
    days that ended sessions stay in state.jsonl
    must be a whole number from 1 to 36500
log_level = "info"
    what goes to atlasbridge.log: debug, info, warn, error
    environment: LOG_LEVEL
    is (?i:debug|info|warn|error)
    must be debug, info, warn or error
`

// reSetting is a key in settingsText, with all that is said of it.
var reSetting = re(`(?m)^([a-z_.]+) = (.*)\n    .*(?:\n    environment: (.*))?` +
	`(?:\n    is (.*))?\n    (must (?:.* from (\S+ to [^\s,]+))?.*)$`)

// settings is the rows of settingsText.
func settings() (rows []setting) {
	for _, m := range reSetting.expr().FindAllStringSubmatch(settingsText, -1) {
		rows = append(rows, setting{
			Key:    m[1],
			def:    m[2],
			env:    m[3],
			shape:  m[4],
			must:   m[5],
			bounds: m[6],
		})
	}
	return rows
}

// reOurs are the names of our settings in an environment, in any case, as Windows has them.
var reOurs = re(`(?i)^(ATLASBRIDGE|TELEGRAM)_`)

// loadConfig reads dir/config.toml (absent: all defaults), the environment (getenv) and the flags: key → text as it
// would stand in the environment. With an error, only Dir, ignored and stamp are set.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	c := &Config{Dir: dir}
	if err := c.load(getenv, flags); err != nil {
		return &Config{Dir: dir, ignored: c.ignored, stamp: c.stamp}, err
	}
	return c, nil
}

// load gives every setting its value. Each source is checked, even if another one wins. A wrong value is left out if it
// may be meant for another program, and one of the bot's in the file if the flags have its token, as setup's have: that
// finds it anew.
func (c *Config) load(getenv func(string) string, flags map[string]string) error {
	c.getenv = getenv
	c.flags = flags
	c.stamp = configTime(c.Dir)
	rows := settings()
	path := filepath.Join(c.Dir, "config.toml")
	text, err := readPrivate(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return hintedf("it must be a file of your own that you can read: "+path, "config.toml: %w", err)
	}
	file, err := parseTOML(string(text), rows)
	if err != nil {
		return err
	}
	_, mends := flags[tokenKey]
	for _, s := range rows {
		sources := []setting{
			{Value: json.RawMessage(s.def), Origin: "default"},
			file[s.Key],
			s.given(getenv(s.env), "environment "+s.env),
			s.given(flags[s.Key], "flag"),
		}
		for _, source := range sources {
			if source.Origin == "" {
				continue
			}
			next := s
			next.Value = source.Value
			next.Origin = source.Origin
			err := next.assign(c)
			shared := source.Origin == "environment "+s.env && !reOurs.MatchString(s.env) // as LOG_LEVEL is
			anew := mends && source.Origin == file[s.Key].Origin &&
				strings.HasPrefix(s.Key, "telegram.") && s.Key != baseKey
			switch {
			case err == nil:
				s = next
			case anew, shared:
				c.ignored = append(c.ignored, err.Error()+"; it is not used")
			default:
				return err
			}
		}
		c.inForce = append(c.inForce, s)
	}
	if number, _, ok := strings.Cut(c.Token, ":"); ok { // that is public
		c.row("telegram.bot_token").Value = quoted(number + ":…")
	}
	return c.chooseChannel()
}

// modTime is when a file was last written, the zero time of none.
func modTime(path string) time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// configTime is when config.toml was last written, the zero time without one.
func configTime(dir string) time.Time { return modTime(filepath.Join(dir, "config.toml")) }

// reloaded returns the settings as they are now, except those that a session keeps: its channel, and whether there is a
// stream. c, which others may be reading, stays as it is. After an error nothing but the stamp has changed.
func (c *Config) reloaded() (*Config, error) {
	now, err := loadConfig(c.Dir, c.getenv, c.flags)
	if c.Channel == "telegram" && now.Channel == "local" {
		err = errors.New("the new ones leave out Telegram, where this session asks")
	}
	if err != nil {
		same := *c
		same.stamp = now.stamp
		return &same, fmt.Errorf("the settings stay as they were: %w", err)
	}
	now.Channel = c.Channel
	now.Stream = c.Stream
	return now, nil
}

// given returns the setting with the value that text stands for, or the zero setting for no text; a list needs no
// brackets. assign refuses what is no value of it.
func (s setting) given(text, origin string) setting {
	if text == "" {
		return setting{}
	}
	value := json.RawMessage(strings.TrimSpace(text))
	switch s.def[0] {
	case '"':
		value = quoted(string(value))
	case '[':
		value = json.RawMessage("[" + strings.Trim(string(value), ", ") + "]")
	}
	return setting{Value: value, Origin: origin}
}

// quoted is the text as a JSON string.
func quoted(text string) json.RawMessage { return json.RawMessage(inJSON(text)) }

// assign sets the field of c to the value, if that fits. The error never shows the value: it may be the bot's token.
func (s setting) assign(c *Config) error {
	value := s.Value
	unit := 0.0 // in nanoseconds, 0: it is no time
	switch {
	case strings.HasSuffix(s.Key, "_seconds"):
		unit = 1e9
	case strings.HasSuffix(s.Key, "_ms"):
		unit = 1e6
	}
	var amount float64
	if unit > 0 && json.Unmarshal(value, &amount) == nil { // else it does not fit
		value = fmt.Appendf(nil, "%.0f", amount*unit)
	}
	object := fmt.Sprintf("{%q: %s}", s.Key, value)
	if kind, ok := strings.CutPrefix(s.Key, "safe_defaults."); ok {
		object = fmt.Sprintf(`{"safe_defaults": {%q: %s}}`, kind, value)
	}
	if !s.fits() || json.Unmarshal([]byte(object), c) != nil {
		return hintedf("correct or remove it; default: "+s.def, "%s: %s %s", s.Origin, s.Key, s.must)
	}
	return nil
}

// fits reports whether a text has the setting's shape, and numbers are within its bounds. The default does.
func (s setting) fits() bool {
	if string(s.Value) == s.def || s.shape+s.bounds == "" {
		return true
	}
	if s.shape != "" {
		var text string
		err := json.Unmarshal(s.Value, &text)
		return err == nil && regexp.MustCompile("^("+s.shape+")$").MatchString(text)
	}
	var least, most float64
	_, _ = fmt.Sscanf(s.bounds, "%g to %g", &least, &most) // they are ours
	var numbers []float64
	err := json.Unmarshal(fmt.Appendf(nil, "[%s]", bytes.Trim(s.Value, "[]")), &numbers)
	beyond := func(n float64) bool { return n < least || n > most }
	return err == nil && !slices.ContainsFunc(numbers, beyond)
}

// row is the row of inForce with that key.
func (c *Config) row(key string) *setting {
	return &c.inForce[slices.IndexFunc(c.inForce, func(s setting) bool { return s.Key == key })]
}

// whyLocal is why nothing goes to Telegram.
func (c *Config) whyLocal() string {
	if c.row("channel").Origin != "default" {
		return "the channel is local, as chosen"
	}
	return "no Telegram (see `atlasbridge setup`)"
}

// chooseChannel chooses telegram if a token was given and no channel. The error says what telegram lacks, and which
// source of a setting needs that. No users never means everyone.
func (c *Config) chooseChannel() error {
	if c.Channel == "" {
		c.Channel = "telegram"
		if c.Token == "" {
			c.Channel = "local"
		}
		c.row("channel").Value = quoted(c.Channel)
	}
	if c.Channel == "local" {
		return nil
	}
	asks := "telegram.bot_token"
	lacks := ""
	switch {
	case c.Token == "":
		asks = "channel"
		lacks = "channel telegram needs telegram.bot_token"
	case c.ChatID == 0:
		lacks = "a bot token needs telegram.chat_id too"
	case len(c.Users) == 0:
		lacks = "telegram.allowed_users is empty: nobody could answer"
	case c.ChatID > 0 && !slices.Contains(c.Users, c.ChatID):
		asks = chatKey
		lacks = fmt.Sprintf("telegram.chat_id %d is the private chat of none of telegram.allowed_users: nobody could answer",
			c.ChatID)
	default:
		return nil
	}
	return hintedf("run `atlasbridge setup`, or set channel = \"local\"",
		"%s: %s", c.row(asks).Origin, lacks)
}

// The lines of https://toml.io/en/v1.0.0 that are accepted: a table's header, a key and its value, or blank, and then a
// comment. Values are those that JSON understands in the same way, and literal strings; lists are of integers. Nothing
// in it isOdd.
const (
	tomlForm  = "not  name = value  with text in quotes, a number, true, false or a [list] of whole numbers"
	tomlName  = `[ \t]*([A-Za-z0-9_-]+)[ \t]*`
	tomlValue = `(true|false|[-+.0-9eE]+|"(?:[^"\\\t]|\\[btnfr"\\])*"|'[^']*'|\[[-0-9, \t]*\])`
)

// tomlLine gives the name in a header, or key and value of a pair.
var tomlLine = re(`^(?:[ \t]*\[` + tomlName + `\]|` + tomlName + `=[ \t]*` + tomlValue + `)?[ \t]*(?:#.*)?$`)

// parseTOML returns the settings by full name, and tables, without a value, in brackets; known nil: any key will do.
func parseTOML(text string, known []setting) (map[string]setting, error) {
	entries := map[string]setting{}
	table := "" // that the next keys are in, with a point behind it
	for i, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		s := setting{Origin: fmt.Sprint("config.toml:", i+1)}
		problem := ""
		m := tomlLine.FindStringSubmatch(line)
		switch {
		case m == nil, strings.ContainsFunc(line, isOdd):
			problem = tomlForm
		case m[1] != "":
			table = m[1] + "."
			s.Key = "[" + m[1] + "]"
		case m[2] == "":
			continue
		default:
			s.Key = table + m[2]
			s.Value = json.RawMessage(m[3])
			if m[3][0] == '\'' {
				s.Value = quoted(strings.Trim(m[3], "'"))
			}
			listed := slices.ContainsFunc(known, func(row setting) bool { return row.Key == s.Key })
			if known != nil && !listed {
				problem = "unknown key " + s.Key
			}
			if !json.Valid(s.Value) {
				problem = tomlForm
			}
		}
		if problem == "" && entries[s.Key].Key+entries[m[1]].Key != "" { // of a pair m[1] is ""
			problem = s.Key + " is set twice"
		}
		if problem != "" {
			return nil, hintedf("lines look like  key = \"text\"  or  key = 42; a name with a dot goes under its [table]; "+
				"see `atlasbridge help config`", "%s: %s", s.Origin, problem)
		}
		entries[s.Key] = s
	}
	return entries, nil
}

// ---- the log ----
//
// atlasbridge.log is for whoever looks for a fault: what went wrong, never what was said.

const logLimit = 1 << 20 // bytes from which the next session starts another log

// openLog opens the log file (0600) of a state folder that is there: JSON Lines, every text through redact. A line that
// cannot be written is lost, and a session does not need its log.
func openLog(dir, level string) *slog.Logger {
	var least slog.Level
	_ = least.UnmarshalText([]byte(level)) // the settings have no other: what is none leaves info
	path := filepath.Join(dir, "atlasbridge.log")
	info, err := os.Stat(path)
	if err == nil && info.Size() >= logLimit {
		_ = os.Rename(path, path+".1") // else it grows on
	}
	file, err := openPrivate(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return slog.New(slog.DiscardHandler)
	}
	redacted := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key != slog.TimeKey {
			a.Value = slog.StringValue(redact(a.Value.String()))
		}
		return a
	}
	return slog.New(slog.NewJSONHandler(file, &slog.HandlerOptions{Level: least, ReplaceAttr: redacted}))
}

// ---- the journal ----
//
// A journal is a file of lines that several processes append to: state.jsonl and audit.log, both under one lock.

// files makes a call; a test's may fail it, or kill us before it.
type files func(op string, f *os.File, call func() error) error

// directly makes the call, as it is.
func directly(_ string, _ *os.File, call func() error) error { return call() }

// lockWait is how long we wait for a lock between processes. Each holds it for one append, two fsyncs: a hundred at
// once need four seconds.
const lockWait = 10 * time.Second

// lockVain is how long we wait for it after that was in vain.
const lockVain = 100 * time.Millisecond

// lockPause is the first pause between tries, lockPauses the longest: an fsync takes as long.
const (
	lockPause  = time.Millisecond / 2
	lockPauses = 16 * time.Millisecond
)

// stateLock is state.lock, the lock of the journals.
type stateLock struct {
	do    files
	name  string
	mu    turn          // held from acquire to release, before the lock between processes
	lock  *os.File      // nil while it is not held
	wait  time.Duration // for the lock, at most; lockVain once that was in vain
	named bool          // the entries of the files in their folder are on the disk
}

// turn is a lock between goroutines. It is not a sync.Mutex because a goroutine that waits for one stops the virtual
// clock of testing/synctest, and with it those that sleep until a file's lock is free.
type turn chan struct{}

// Lock waits for the turn.
func (t turn) Lock() { t <- struct{}{} }

// Unlock ends it.
func (t turn) Unlock() { <-t }

// acquire waits for the lock, for a time: a process that is stopped while it holds it must not stop all others. Call
// release after an error, too.
func (l *stateLock) acquire() error {
	l.mu.Lock()
	err := l.do("flock", nil, func() (err error) {
		l.lock, err = holdLock(l.name, l.wait)
		return err
	})
	l.wait = lockWait
	if errors.Is(err, errLocked) {
		l.wait = lockVain
	}
	return err
}

// holdLock locks the file of that name, which it makes if it is missing; errLocked if another process holds it for
// longer than wait. If the file was replaced meanwhile it locks the new one, as others do.
func holdLock(name string, wait time.Duration) (*os.File, error) {
	for {
		f, err := openPrivate(name, os.O_RDWR|os.O_CREATE)
		if err == nil {
			err = awaitLock(f, wait)
			if err == nil && isNamed(f, name) {
				return f, nil
			}
			_ = f.Close() // nothing was written to it
		}
		if err != nil {
			return nil, fmt.Errorf("locking %s: %w", name, err)
		}
	}
}

// awaitLock takes the lock of a file. It tries again and again, with pauses that grow, until limit has passed.
func awaitLock(f *os.File, limit time.Duration) error {
	end := time.Now().Add(limit)
	for pause := lockPause; ; pause = min(2*pause, lockPauses) {
		err := lockFile(f)
		if !errors.Is(err, errLocked) {
			return err
		}
		if !time.Now().Before(end) {
			return hinted(err, "`fuser "+f.Name()+"` names that process: continue it, if it is stopped, or end it")
		}
		time.Sleep(pause)
	}
}

// release lets other goroutines and processes have the files.
func (l *stateLock) release() {
	if l.lock != nil {
		_ = errors.Join(unlockFile(l.lock), l.lock.Close()) // what cannot be given back ends with the process
		l.lock = nil
	}
	l.mu.Unlock()
}

// journal is one such file. What look finds holds until the lock is released.
type journal struct {
	*stateLock
	path string
	f    *os.File // nil after a failed write: that descriptor is never written or fsynced again
	end  int64    // bytes of the file
	anew bool     // look has opened another file than before: a compaction, or the user, puts another one there
	// poison, if not nil, is why the end of the file is unknown: nothing more is written.
	poison error
}

// look opens the file that the path names, and makes one where there is none. The lock is held.
func (j *journal) look() error {
	j.anew = j.f == nil || !isNamed(j.f, j.path)
	if j.anew {
		j.drop()
		f, err := openPrivate(j.path, os.O_RDWR|os.O_APPEND|os.O_CREATE)
		if err != nil {
			return err
		}
		j.f = f
		j.named = false
	}
	info, err := j.f.Stat()
	if err != nil {
		j.drop()
		return err
	}
	j.end = info.Size()
	return nil
}

// isNamed reports whether f is the file that the path names.
func isNamed(f *os.File, path string) bool {
	named, err := os.Lstat(path)
	if err != nil {
		return false
	}
	open, err := f.Stat()
	return err == nil && os.SameFile(named, open)
}

// read reads size bytes that begin at at.
func (j *journal) read(at int64, size int) ([]byte, error) {
	b := make([]byte, size)
	_, err := j.f.ReadAt(b, at)
	return b, err
}

// drop closes the file.
func (j *journal) drop() {
	if j.f != nil {
		_ = j.f.Close() // what counts was fsynced
		j.f = nil
	}
}

// append adds b at the end, durably. After an error the file is as it was before, or poison is set.
func (j *journal) append(b []byte) error {
	if j.poison != nil {
		return j.poison
	}
	if !j.named {
		if err := j.do("fsync folder", nil, func() error { return syncDir(filepath.Dir(j.path)) }); err != nil {
			return err
		}
		j.named = true
	}
	err := j.do("write", j.f, func() error {
		_, err := j.f.Write(b)
		return err
	})
	if err == nil {
		err = j.do("fsync", j.f, j.f.Sync)
	}
	if err == nil {
		j.end += int64(len(b))
		return nil
	}
	cut := j.truncate(j.end)
	j.drop()
	if cut != nil {
		j.poison = fmt.Errorf("%w; cutting it off again: %w; nothing is recorded any more", err, cut)
		return j.poison
	}
	return err
}

// truncate cuts the file off behind that many bytes.
func (j *journal) truncate(end int64) error {
	return j.do("ftruncate", j.f, func() error { return cutFile(j.f, end) })
}

// create writes a file beside the journal, durably; one of that name is overwritten.
func (j *journal) create(path string, b []byte) error {
	f, err := openPrivate(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	j.named = false
	beside := journal{stateLock: j.stateLock, path: path, f: f}
	err = beside.append(b)
	beside.drop()
	if err != nil {
		_ = os.Remove(path) // it is not whole
	}
	return err
}

// replace puts a file with b in the place of the journal's. After an error that is as it was, and no copy of b is left
// beside it.
func (j *journal) replace(b []byte) error {
	path := j.path + ".new"
	if err := j.create(path, b); err != nil {
		return err
	}
	err := j.do("rename", nil, func() error { return replaceFile(path, j.path) })
	if err != nil {
		_ = os.Remove(path) // why it failed is what matters
	}
	return err
}

// aside copies the bytes from at on to a new file, and gives its name.
func (j *journal) aside(why string, at int64) (path string, err error) {
	b, err := j.read(at, int(j.end-at))
	if err != nil {
		return "", err
	}
	path = j.path + "." + why + "-" + time.Now().UTC().Format(fileStamp)
	return path, j.create(path, b)
}

// cut moves the bytes from at on to a new file. After an error they are still where they were.
func (j *journal) cut(at int64) error {
	path, err := j.aside("torn", at)
	if err != nil {
		return err
	}
	if err := j.truncate(at); err != nil {
		_ = os.Remove(path) // it will be copied again
		return err
	}
	j.end = at
	return nil
}

// ---- lines of state.jsonl ----
//
// A record becomes a line, and a line a record again.

const (
	schemaVersion = 2
	crcMember     = len(`,"crc":"00000000"}` + "\n") // bytes at the end of a line
	lineHead      = 200                              // bytes in which its version, kind and id stand
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// reStamp finds times in JSON: their members end in "at", and no text has a quotation mark behind that which is not
// escaped.
var reStamp = re(`at":"[0-9][^"]*`)

// stamped is the JSON of a record, or another struct. Its times are in UTC, with six decimals.
func stamped(record any) (json.RawMessage, error) {
	text, err := marshal(record)
	return reStamp.expr().ReplaceAllFunc(text, func(found []byte) []byte {
		member, value, _ := strings.Cut(string(found), `:"`)
		at, err := time.Parse(time.RFC3339Nano, value)
		if err != nil {
			return found
		}
		return []byte(member + `:"` + at.UTC().Format(stampLayout))
	}), err
}

// sealed returns the line of a record: of a prompt only what may change, for its texts have the rest.
func sealed(r Record) ([]byte, error) {
	var members any = r
	if p, ok := r.(*PromptRecord); ok {
		members = promptLine{p.Head, p.Excerpt, p.Idle, p.Life}
	}
	b, err := stamped(members)
	if err != nil {
		return nil, err
	}
	b = bytes.TrimSuffix(b, []byte("}"))
	return append(b, seal(b)...), nil
}

// promptLine is the line of a prompt. Its first words are in it for whoever reads the file.
type promptLine struct {
	Head
	Excerpt string `json:"excerpt"`
	Idle    bool   `json:"idle,omitempty"`
	Life
}

// stored is a record of which mostly only the head is read, and where its line is in the file.
type stored struct {
	Head
	at   int64
	size int
}

// encode returns the lines of records; one that is stored is copied.
func (s *Store) encode(records []Record) (lines []byte, err error) {
	for _, r := range records {
		var line []byte
		if old, ok := r.(*stored); ok {
			line, err = s.log.read(old.at, old.size)
		} else {
			line, err = sealed(r)
		}
		if err != nil {
			return nil, err
		}
		lines = append(lines, line...)
	}
	return lines, nil
}

// nameText makes p name its text, which it returns if the state lacks it. p must have its head; if p's text was not
// read, p stays as it is.
func (s *Store) nameText(p *PromptRecord) (missing []Record) {
	if p.AboutSHA != "" && p.Answers == nil {
		return nil
	}
	about := p.Asked
	about.Choices = nil // they are among the answers, without secrets
	text := inJSON(about)
	p.AboutSHA = digest([]byte(text))
	t := &TextRecord{Head{schemaVersion, "text", p.AboutSHA, p.At}, text}
	if s.view.records[t.key()] == nil {
		missing = append(missing, t)
	}
	return missing
}

// join gives the prompt the text that its line names. If that is missing the question fails, as with a damaged line. A
// question that has been over for a minute does without: only its outcome is still needed.
func (s *Store) join(p *PromptRecord) {
	over := p.settled() && !p.owes()
	switch {
	case over && (p.AboutSHA == "" || time.Since(p.At) > time.Minute):
		return
	case p.AboutSHA != "":
		var t TextRecord
		line, ok := s.view.records["text "+p.AboutSHA].(*stored)
		if ok {
			b, err := s.log.read(line.at, line.size)
			ok = err == nil && json.Unmarshal(b, &t) == nil && json.Unmarshal([]byte(t.Text), &p.Asked) == nil
		}
		if !ok && !p.settled() {
			p.damage()
		}
	case p.Answers == nil: // an older atlasbridge wrote it
		p.listAnswers()
	}
	if p.Choices == nil {
		for _, a := range p.Answers {
			if a.Keys == "" && a.Key != leaveIt {
				p.Choices = append(p.Choices, Choice{Key: a.Key, Label: a.Label, Grants: a.Grants})
			}
		}
	}
}

// damage fails a question whose record is partly lost: it may have been answered.
func (p *PromptRecord) damage() {
	p.Status = Failed
	p.Reason = "its record in the state file is damaged"
	p.At = time.Now()
	p.unsaid = true
}

// seal is the end of a line, with its checksum; open is what comes before.
func seal(open []byte) string {
	sum := crc32.Update(crc32.Checksum(open, castagnoli), castagnoli, []byte("}"))
	return `,"crc":"` + hex.EncodeToString(binary.BigEndian.AppendUint32(nil, sum)) + "\"}\n"
}

// readHead reads the beginning of a line, {"v":2,"rec":"prompt","id":"…", as far as that can be read. An error says
// that the line is damaged.
func readHead(line []byte) (h Head, err error) {
	parts := strings.SplitN(string(line[:min(len(line), lineHead)]), `"`, 15)
	if len(parts) == 15 { // else it is damaged
		h.V, _ = strconv.Atoi(strings.Trim(parts[2], ":,")) // 0 of a damaged line
		h.Rec = parts[5]
		h.ID = parts[9]
		h.At, _ = time.Parse(stampLayout, parts[13]) // long ago, where there is none
	}
	open := line[:max(0, len(line)-crcMember)]
	known := h.V > schemaVersion || newRecord(h.Rec) != nil
	if string(line[len(open):]) != seal(open) || !known {
		return h, errors.New("its checksum does not match")
	}
	return h, nil
}

// isStored reports whether hardly anybody reads the record: it stays where it is.
func (h *Head) isStored() bool {
	return h.V == schemaVersion && (h.Rec == "reply" || h.Rec == "text" || h.Rec == "update")
}

// decode reads a whole line, whose head is sound; a stored one is in the view.
func (s *Store) decode(line []byte, kind string) (Record, error) {
	r := newRecord(kind)
	if err := json.Unmarshal(line, r); err != nil {
		return nil, err
	}
	r.head().V = schemaVersion
	if p, ok := r.(*PromptRecord); ok {
		s.join(p)
	}
	return r, nil
}

// ---- records and the one transition table ----
//
// What a record holds, and how one may follow another of the same id.

// State is a prompt's state.
type State string

const (
	Created       State = "created"
	Routed        State = "routed"
	AwaitingReply State = "awaiting_reply"
	ReplyReceived State = "reply_received"
	Injected      State = "injected"
	Resolved      State = "resolved"
	Expired       State = "expired"
	Canceled      State = "canceled"
	Failed        State = "failed"
)

// next is the whole life of a prompt: Update accepts nothing else. A question answered at the keyboard is resolved
// without a reply; a tap can be faster than the record that its message was delivered.
var next = map[State][]State{
	"":            {Created},
	Created:       {Routed, ReplyReceived, Resolved, Expired, Canceled, Failed},
	Routed:        {AwaitingReply, ReplyReceived, Resolved, Expired, Canceled, Failed},
	AwaitingReply: {ReplyReceived, Resolved, Expired, Canceled, Failed},
	ReplyReceived: {Injected, Failed},
	Expired:       {Injected, Failed},
	Injected:      {Resolved, Failed},
}

// Record is a pointer to one of the structs below.
type Record interface{ head() *Head }

// Head is what every record begins with.
type Head struct {
	V   int       `json:"v"`
	Rec string    `json:"rec"`
	ID  string    `json:"id"`
	At  time.Time `json:"at"` // of this change; later than that of the record's line before
}

func (h *Head) head() *Head { return h }

func (h *Head) key() string { return h.Rec + " " + h.ID }

// sortByTime puts records in the order in which they were written.
func sortByTime(records []Record) {
	slices.SortFunc(records, func(a, b Record) int { return a.head().At.Compare(b.head().At) })
}

// newRecord is an empty record of that kind, the value of rec; nil where there is none.
func newRecord(kind string) Record {
	switch kind {
	case "session":
		return new(SessionRecord)
	case "prompt":
		return new(PromptRecord)
	case "reply":
		return new(ReplyRecord)
	case "input":
		return new(InputRecord)
	case "update":
		return new(UpdateRecord)
	case "meta":
		return new(MetaRecord)
	case "text":
		return new(TextRecord)
	}
	return nil
}

// SessionRecord is one run of a tool.
type SessionRecord struct {
	Head
	Tool      string     `json:"tool"`
	Args      []string   `json:"args"`
	Cwd       string     `json:"cwd"`
	PID       int        `json:"pid"`     // the child's
	Wrapper   int        `json:"wrapper"` // atlasbridge's own pid
	Label     string     `json:"label"`
	Local     bool       `json:"local,omitempty"` // it asks nobody by phone
	Status    string     `json:"status"`          // active completed crashed terminated
	Activity  string     `json:"activity"`        // starting running waiting waiting_permission idle
	StartedAt time.Time  `json:"started_at"`
	EndedAt   *time.Time `json:"ended_at"`
	ExitCode  *int       `json:"exit_code"`
	Farewell  *Farewell  `json:"farewell,omitempty"` // the message that it has ended, until that is sent
	Topic
}

// end notes that the session has ended now, and how.
func (r *SessionRecord) end(status string) {
	r.Status = status
	r.Activity = ""
	r.EndedAt = ref(time.Now())
}

// Farewell is the last message about a session.
type Farewell struct {
	Text string `json:"text"`
	Ring bool   `json:"ring"` // with sound
}

// Topic is where in the chat a session's messages go. It is chosen once: a record of the session that says nothing of
// it leaves it as it is.
type Topic struct {
	ThreadID    int64 `json:"thread_id"`      // its number in the chat; 0: none yet, noTopic: none any more
	ThreadChat  int64 `json:"thread_chat_id"` // the chat it is in
	ThreadEnded bool  `json:"thread_ended"`   // it was closed, or renamed, with the session
}

// noTopic is the ThreadID of a session that stays in the plain chat.
const noTopic = -1

// PromptRecord is a question, with all that became of it.
type PromptRecord struct {
	Head
	Asked
	Life
	unsaid bool // a part of its record is, and no line says yet that it failed
}

// Where a question comes from, in its record.
const (
	fromScreen = "screen"
	fromHook   = "hook"
	fromAsk    = "ask"
)

// What can be decided about a tool's call.
const (
	hookAllow  = "allow"
	hookAlways = "always"
	hookDeny   = "deny"
)

// Asked is what was asked, and never changes. It is written once, in the text that AboutSHA names.
type Asked struct {
	Prompt             // as the screen, or the hook, asked
	Confidence  string `json:"confidence"`
	Constraints Limits `json:"constraints,omitzero"`
	Source      string `json:"source"`            // "screen", "hook" or "ask"
	Tool        string `json:"tool,omitempty"`    // hook: the tool's name for what it wants to use ("Bash"); else ""
	Subject     string `json:"subject,omitempty"` // hook: what the tool's dialog shows: the command, file, address
	Lasting     string `json:"lasting,omitempty"` // hook: what the lasting permission allows, and for how long
	Lang        string `json:"lang,omitempty"`    // not of a screen: what Full is in: bash, diff, markdown; else ""
	Cwd         string `json:"cwd,omitempty"`     // hook: as it is seen from the session's folder, "" the same
	Watched     bool   `json:"watched,omitempty"` // Idle: somebody was at the keyboard when it came
	// Answers are those that it takes: the choices in their order, then what else can be said to it.
	Answers []Answer `json:"answers"`
	// Call names the run of the hook that asks, which holds a lock of that name: one call's questions share it.
	Call string `json:"call,omitempty"`
}

// Life is what a prompt's line has: of what session it is, and what became of it.
type Life struct {
	SessionID   string     `json:"session_id"`
	Status      State      `json:"status"`
	Nonce       string     `json:"nonce"`      // 32 hex
	NonceUsed   bool       `json:"nonce_used"` // it is open no more: Update sees to that
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   time.Time  `json:"expires_at"`
	DecidedAt   *time.Time `json:"decided_at,omitempty"`
	DecidedBy   string     `json:"decided_by,omitempty"`
	DecidedUser string     `json:"decided_user,omitempty"` // by phone: the name, which anyone can take
	Value       *string    `json:"value,omitempty"`
	// Messages are those about the prompt in Chat, the oldest first. Only the newest is the prompt's own; the others
	// are to lose their buttons. One whose sending was never answered is not among them, until one of its buttons is
	// tapped.
	Messages []Message `json:"messages,omitempty"`
	// Send is what of the open question is to be sent, "" nothing; Ticked are the choices that are ticked on its newest
	// message.
	Send   string   `json:"send,omitempty"`
	Ticked []string `json:"ticked,omitempty"`
	// Chat is whose numbers these are: the bot's and its chat's, "" until a message is about to leave.
	Chat string `json:"telegram_chat,omitempty"`
	// ShownAll tells that all of Shown has been on the phone, and that no part of it is missing. Until then only an
	// answer that refuses is taken from there.
	ShownAll bool `json:"shown_all,omitempty"`
	// ScreenSHA is the SHA-256 ("sha256:…") of the Shown that stood on the screen when the answer was typed, with what
	// was seen moving as it was shown.
	ScreenSHA string `json:"screen_sha256,omitempty"`
	AboutSHA  string `json:"about_sha256,omitempty"` // names the text Asked, a JSON object
	Reason    string `json:"reason,omitempty"`       // why failed or canceled; the operator's reason for a refusal
	Note      string `json:"note,omitempty"`         // what else became of the answer
}

// Message is a message about a prompt, as it stands in the chat.
type Message struct {
	ID    int64  `json:"id"`
	Date  int64  `json:"date,omitempty"` // when it was sent, in Unix seconds by Telegram's clock, 0: that is not known
	Shows string `json:"shows"`          // what it was made to show last, as wants names it
	// LostAt is when an edit of it had no answer, in Unix seconds: it may still be carried out. 0: none.
	LostAt int64 `json:"lost_at,omitempty"`
}

// Values of Send: what of a question to send.
const (
	sendQuestion = "question"
	sendAll      = "all"    // all of it, then the question
	sendRecent   = "recent" // the end of the screen, then the question
)

// replaced is what a message shows that has lost its buttons to a newer one.
const replaced = "replaced"

// shows names what the newest message of an open question shows: its choices that are ticked.
func (p *PromptRecord) shows() string {
	return strings.TrimSpace(string(AwaitingReply) + " " + strings.Join(p.Ticked, ","))
}

// wants names what a message of the prompt is to show: a status, of an open question with the choices that are ticked.
// Equal names mean equal looks. An older atlasbridge wrote more behind a status.
func (p *PromptRecord) wants(m Message) string {
	shown, _, _ := strings.Cut(m.Shows, " ")
	hasButtons := shown == "" || shown == string(Expired) || isOpen(State(shown))
	older := m.ID != p.newest().ID
	status := string(p.Status)
	switch {
	case older && !hasButtons:
		return m.Shows
	case older, p.Open() && p.before() != "":
		return replaced
	case p.Open():
		return p.shows()
	case p.Status == Expired && p.Idle && !p.isLong(): // it says so already
		return m.Shows
	case p.onItsWay():
		status = string(ReplyReceived)
	case p.Status == Resolved && p.Value == nil && p.DecidedBy == "auto:timeout": // its hook has told the tool
		status = string(Expired)
	}
	if shown == status {
		return m.Shows
	}
	return status
}

// onItsWay reports whether the answer was taken, and is on its way to the tool.
func (p *PromptRecord) onItsWay() bool {
	return p.Status == ReplyReceived || p.Status == Injected || p.Status == Expired && p.Value != nil
}

// Limits are what an answer must keep to, besides being one of the choices.
type Limits struct {
	MaxLength int `json:"max_length,omitempty"` // bytes of a text, or of why a permission is refused; 0: it takes none
}

// region is what a question asks, in rows: nothing but a refusal is taken before every word of it has been shown.
func (p *PromptRecord) region() string {
	rows := []string{p.Above, cmp.Or(p.Full, p.Excerpt), p.Lasting, p.Cwd}
	return strings.Trim(strings.Join(rows, "\n"), "\n")
}

const (
	columnGap = ` {2,}`                              // between buttons side by side
	itemMark  = `(?:[^\pL\pN\s]\s*)?(?:\d+[.)]\s+)?` // a pointer, a number
)

var (
	reColumnGap = re(columnGap)
	reItemMark  = re("^" + itemMark)
)

// accountedIn reports whether the message says all of the region: each row needs all its words, in order, where no
// other row has its own. Blanks and frames do not count. For a choice's row its label is enough.
func (p *PromptRecord) accountedIn(message string) bool {
	var lines strings.Builder
	for line := range strings.SplitSeq(message, "\n") {
		lines.WriteString("\n " + withoutFrames(line) + " ")
	}
	rest := lines.String() + "\n"
	take := func(text, around string) bool {
		before, after, found := strings.Cut(rest, around+" "+withoutFrames(text)+" "+around)
		if found {
			rest = before + around + " \n " + around + after
		}
		return found
	}
	rows := slices.DeleteFunc(strings.Split(p.region(), "\n"), func(row string) bool {
		return withoutFrames(row) == "" || take(row, "\n")
	})
	takeLabel := func(cell string) bool {
		label := reItemMark.ReplaceAllString(strings.TrimSpace(cell), "")
		return slices.Contains(labels(p.Choices), label) && take(label, "")
	}
	rows = slices.DeleteFunc(rows, func(row string) bool { return take(row, "") || takeLabel(row) })
	return !slices.ContainsFunc(rows, func(row string) bool {
		cells := slices.DeleteFunc(reColumnGap.expr().Split(strings.TrimSpace(row), -1), takeLabel)
		return len(cells) > 0 && !take(strings.Join(cells, " "), "")
	})
}

// withoutFrames returns a row with one blank between its words, frames left out.
func withoutFrames(row string) string {
	return strings.Join(strings.FieldsFunc(row, func(r rune) bool {
		return unicode.IsSpace(r) || r >= '─' && r <= '╿'
	}), " ")
}

// words returns what the question is about, in at most that many bytes: a call's arguments, else the question with what
// is beside it. A notice asks nothing.
func (p *PromptRecord) words(most int) string {
	words := strings.TrimSpace(p.Question + "\n" + p.Excerpt)
	switch {
	case p.Idle:
		return ""
	case p.Source == fromHook && p.Permission:
		words = strings.TrimPrefix(p.Full, p.Question+"\n")
		if p.Lang == "diff" { // of a file
			words = p.Subject + "\n" + words
		}
	case strings.Contains(p.Excerpt, p.Question):
		words = p.Excerpt
	}
	return headAndTail(words, most)
}

// Open reports whether the prompt waits for an answer.
func (p *PromptRecord) Open() bool { return isOpen(p.Status) }

func isOpen(status State) bool { return slices.Contains(next[status], Canceled) }

// settled reports whether nothing can happen to the prompt any more.
func (p *PromptRecord) settled() bool { return next[p.Status] == nil }

// over reports whether nothing has to happen to the prompt any more.
func (p *PromptRecord) over() bool { return p.settled() || p.Status == Expired }

// ReplyRecord is an answer that was typed, or passed on by a hook.
type ReplyRecord struct {
	Head
	PromptID   string    `json:"prompt_id"`
	SessionID  string    `json:"session_id"`
	Value      string    `json:"value"`
	Source     string    `json:"source"` // operator, timeout_default
	InjectedAt time.Time `json:"injected_at"`
}

// InputRecord is what the phone asks of a session, which another process may own. Its id is that of the update.
type InputRecord struct {
	Head
	SessionID string `json:"session_id"`
	Kind      string `json:"kind"` // text file keys screen stop cancel again; answer: of the tool's own hook
	By        string `json:"by"`
	User      string `json:"user,omitempty"` // by phone: the name, which anyone can take
	Text      string `json:"text"`           // of a file: its caption, then what is typed
	ReplyTo   int64  `json:"reply_to"`       // the message to answer
	ThreadID  int64  `json:"thread_id"`      // the topic it was written in, 0: none
	// WrittenAt is when it was written, or a tap arrived: no message acts on a question that is newer.
	WrittenAt time.Time `json:"written_at"`
	PromptID  string    `json:"prompt_id"` // of a command that replies to a question: keys are for that alone
	Status    string    `json:"status"`    // queued done refused; failed: its session ended, which nobody has told yet
	Reason    string    `json:"reason"`

	File *FileRef `json:"file,omitempty"`
}

// types reports whether something is typed for the input: that has to wait its turn.
func (r *InputRecord) types() bool { return r.isText() || r.Kind == "keys" }

// isText reports whether a text is typed for the input.
func (r *InputRecord) isText() bool { return r.Kind == "text" || r.Kind == "file" }

// FileRef is a photo or a document of the operator's as a message has it. The session fetches it.
type FileRef struct {
	ID   string `json:"file_id"`
	Name string `json:"file_name"` // as the sender calls it, "" of a photo: never a path
}

// UpdateRecord says that an update of Telegram was acted on. Its id is the bot's number, a colon and the update's: each
// bot counts its own.
type UpdateRecord struct{ Head }

// MetaRecord is a single fact by id: "audit" (how far the chain goes), "claim telegram:USER" (the session that text of
// that operator goes to), "trouble poll" and "trouble send" (what keeps Telegram from working), "doctor" (a test).
type MetaRecord struct {
	Head
	chainHead
	Begins  int64             `json:"begins,omitempty"`  // the entry that the first of the audit log follows; −1 unknown
	Entries []json.RawMessage `json:"entries,omitempty"` // the last ones, which a crash may have kept out of it
	Value   string            `json:"value,omitempty"`
}

// TextRecord is a long text of a prompt, whose record names it by its id: "sha256:…", the text's SHA-256. It is written
// once, with the first record of the prompt, and stays as long as the prompt's record does.
type TextRecord struct {
	Head
	Text string `json:"text"`
}

// View is the state as read: the last record of every id. Read only: a change is a changed copy, given to Update.
type View struct {
	Sessions map[string]*SessionRecord
	Prompts  map[string]*PromptRecord
	Inputs   map[string]*InputRecord
	records  map[string]Record // all of them, by kind and id: the Store's
}

// emptyView is the view of an empty file.
func emptyView() *View {
	return &View{map[string]*SessionRecord{}, map[string]*PromptRecord{}, map[string]*InputRecord{}, map[string]Record{}}
}

// apply makes r the truth about its id.
func (v *View) apply(r Record) {
	h := r.head()
	v.records[h.key()] = r
	switch r := r.(type) {
	case *SessionRecord:
		v.Sessions[h.ID] = r
	case *PromptRecord:
		v.Prompts[h.ID] = r
	case *InputRecord:
		v.Inputs[h.ID] = r
	}
}

// acted reports whether the update of that number was acted on.
func (v *View) acted(update string) bool {
	return v.records["update "+update] != nil ||
		v.Inputs[update] != nil // a power cut may have lost the update's own
}

func (v *View) active(id string) bool {
	return v.Sessions[id] != nil && v.Sessions[id].Status == "active"
}

// fact is what was noted last under that name, the zero value for nothing.
func (v *View) fact(name string) MetaRecord {
	m, ok := v.records["meta "+name].(*MetaRecord)
	if !ok {
		return MetaRecord{}
	}
	return *m
}

// which are the prompts that want holds for, in the order in which they were asked; never nil.
func (v *View) which(want func(*PromptRecord) bool) []*PromptRecord {
	found := []*PromptRecord{}
	for _, p := range v.Prompts {
		if want(p) {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b *PromptRecord) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return found
}

// transition returns why r cannot follow old, which is now the truth about its id, empty without one. At most one
// prompt of a session awaits a reply; only an active session's is sent or answered. Who decided stays.
func (v *View) transition(old, r Record) error {
	switch r := r.(type) {
	case *SessionRecord:
		was := old.(*SessionRecord).Status
		if was != "" && was != "active" && r.Status == "active" {
			return errors.New("an ended session stays ended")
		}
	case *PromptRecord:
		was := old.(*PromptRecord)
		decided := was.DecidedBy != "" && r.DecidedBy != was.DecidedBy // by somebody else
		legal := slices.Contains(next[was.Status], r.Status) && !decided
		switch r.Status {
		case was.Status:
			return nil
		case AwaitingReply:
			waits := v.which(func(p *PromptRecord) bool { return p.Status == r.Status && p.SessionID == r.SessionID })
			legal = legal && v.active(r.SessionID) && len(waits) == 0
		case Routed, ReplyReceived:
			legal = legal && v.active(r.SessionID)
		}
		if !legal {
			return fmt.Errorf("%q cannot become %q", was.Status, r.Status)
		}
	}
	return nil
}

// ---- open and replay ----
//
// Lines of the file, and those that others append, are read into a View.

const (
	compactMin    = 1 << 20        // bytes: a smaller file opens within 3 ms (measured)
	compactFactor = 3              // lines of each record
	keepLonger    = 36500          // days: where nobody knows what is set
	updateLife    = 48 * time.Hour // twice that of https://core.telegram.org/bots/api#getting-updates

	damagedLine = "a damaged line" // among the notes
)

// Store is the shared state, as long as the process lives. Its methods may be called from any goroutine.
type Store struct {
	Dir       string
	retention time.Duration // how long ended sessions and their questions are kept
	crashing  func()        // before a panic of ours ends the process; nil: nothing is
	log       *journal      // state.jsonl; its mutex guards what follows
	audit     *journal      // audit.log, under the same lock

	contents
	stale        bool          // a record is to be forgotten with the next write, or brought up to this schema
	wake         chan struct{} // closed when view changes
	unsaid       []Event       // neither file could take them: they come before the next
	writeTrouble error         // why the last change was not recorded
	auditTrouble error         // why the audit log lacks an entry
	vanished     error         // that the file did, until it is told

	poll atomic.Pointer[os.File] // the lock of the polling; nil: another process has it
	own  atomic.Pointer[os.File] // the lock of the session, or of the call, that this process is
}

// contents is what was read of state.jsonl.
type contents struct {
	view           *View
	read           int64    // bytes of the file that view holds
	lines          int      // in them, since a compaction was tried
	older          bool     // a record has an earlier schema version
	notes          []string // what was found damaged in the file
	compactTrouble error    // why the last compaction of it failed
}

// openState opens the state in dir, which it makes when it is missing, and reads it. Ended sessions stay for days.
func openState(dir string, do files, days int) (*Store, error) {
	s, err := newStore(dir, do, days)
	if err != nil {
		return nil, err
	}
	if err := s.open(); err != nil {
		return nil, err
	}
	return s, nil
}

// newStore is the state in dir, not read yet: whoever first needs it reads it. A folder that is not the user's alone
// is an error.
func newStore(dir string, do files, days int) (*Store, error) {
	lock := &stateLock{do: do, name: filepath.Join(dir, "state.lock"), mu: make(turn, 1), wait: lockWait}
	s := &Store{
		Dir:       dir,
		retention: time.Duration(days) * 24 * time.Hour,
		log:       &journal{stateLock: lock, path: filepath.Join(dir, "state.jsonl")},
		audit:     &journal{stateLock: lock, path: filepath.Join(dir, "audit.log")},
		contents:  contents{view: emptyView()},
		wake:      make(chan struct{}),
	}
	for _, folder := range []string{dir, filepath.Join(dir, "sessions")} {
		if err := secureDir(folder); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// open reads the state.
func (s *Store) open() error { return s.Look(func(*View) {}) }

// Notes is what was found damaged in the file.
func (s *Store) Notes() []string {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	return slices.Clone(s.notes)
}

// Trouble returns what keeps the store from its work now. That the file vanished it says once.
func (s *Store) Trouble() error {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	err := cmp.Or(s.writeTrouble, s.auditTrouble, s.compactTrouble, s.vanished)
	s.vanished = nil
	return err
}

// Look runs fn, which must not call the Store, on the current state; with an error, on the last state that could be
// read.
func (s *Store) Look(fn func(*View)) error {
	defer s.log.release()
	err := s.begin()
	fn(s.view)
	return err
}

// catchPanic is deferred by every goroutine that works beside a session's terminal: it calls crashing when that panics.
func (s *Store) catchPanic() {
	r := recover()
	if r == nil {
		return
	}
	if s.crashing != nil {
		s.crashing()
	}
	panic(r)
}

// begin takes the lock and reads what others appended. release follows, after an error, too.
func (s *Store) begin() error {
	if err := s.log.acquire(); err != nil {
		return err
	}
	return s.catchUp()
}

// catchUp reads what others appended, unless the file is poisoned: its last line failed.
func (s *Store) catchUp() error {
	if s.log.poison != nil {
		return nil
	}
	if err := s.log.look(); err != nil {
		return err
	}
	if !s.log.anew && s.log.end == s.read {
		return nil
	}
	other := s.log.anew || s.log.end < s.read
	from := s.read
	if other {
		from = 0
	}
	b, err := s.log.read(from, int(s.log.end-from))
	if err != nil {
		s.log.drop() // else it would pass for the file that was read
		return err
	}
	old := s.view
	if other { // it was compacted, by us or by another process
		s.contents = contents{view: emptyView()}
	}
	if err := s.replay(b); err != nil || !other {
		return err
	}
	return s.restore(old)
}

// restore rewrites the file with those live records of this process's sessions and questions that it lacks, or has
// older than old. No compaction loses them: somebody has removed the file, or put an older one in its place.
func (s *Store) restore(old *View) error {
	whole := true
	for key, r := range old.records {
		now := s.view.records[key]
		lost := now == nil && old.alive(r) || now != nil && now.head().At.Before(r.head().At)
		if lost && (s.owns(r.head().ID) || s.owns(concerns(r))) {
			s.view.apply(r)
			whole = false
		}
	}
	if whole {
		return nil
	}
	err := s.rewrite()
	s.log.drop() // the next look reads what was written
	if err != nil {
		return err
	}
	s.vanished = errors.New("state.jsonl was removed, or an older one put there: what is open was recorded anew")
	return s.catchUp()
}

// replay brings the view up to the last complete line in b, and s.read behind it. Every line is checked, the last sound
// one of an id decoded. A question whose newest line is damaged has failed: what that said is unknown. A torn end is
// moved aside: an error is that of moving it, or that a later atlasbridge wrote.
func (s *Store) replay(b []byte) error {
	at := s.read
	lines := 0
	newest := map[string]*stored{}
	lost := map[string]bool{} // keys of which the newest line is damaged
	var notes []string
	text := func(l *stored) []byte { return b[l.at-s.read:][:l.size] }
	damaged := func(l *stored, err error) {
		notes = append(notes, fmt.Sprintf("state.jsonl: %s (%v): %.60q…", damagedLine, err, text(l)))
		lost[l.key()] = true
	}
	for line := range bytes.Lines(b[:bytes.LastIndexByte(b, '\n')+1]) {
		head, err := readHead(line)
		l := &stored{head, at, len(line)}
		at += int64(len(line))
		lines++
		switch {
		case err != nil:
			damaged(l, err)
		case l.V > schemaVersion:
			return fmt.Errorf("state.jsonl was written by a newer atlasbridge (schema %d): update this one", l.V)
		case l.isStored():
			s.view.apply(l)
		default:
			newest[l.key()] = l
			delete(lost, l.key())
		}
	}
	for _, l := range newest {
		r, err := s.decode(text(l), l.Rec)
		if err != nil {
			damaged(l, err)
			continue
		}
		s.view.apply(r)
		s.older = s.older || l.V < schemaVersion
	}
	for key := range lost {
		if p, ok := s.view.records[key].(*PromptRecord); ok {
			failed := *p
			failed.damage()
			s.view.apply(&failed)
		}
	}
	if s.read == 0 {
		s.stale = s.older || s.isStale()
	}
	s.read = at
	s.lines += lines
	s.notes = append(s.notes, notes...)
	close(s.wake)
	s.wake = make(chan struct{})
	return s.dropTorn()
}

// dropTorn moves what stands behind the last line aside: the beginning of one that was never finished.
func (s *Store) dropTorn() error {
	torn := s.log.end - s.read
	if torn == 0 {
		return nil
	}
	if err := s.log.cut(s.read); err != nil {
		return fmt.Errorf("moving a torn end of state.jsonl aside: %w", err)
	}
	s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a torn end of %d bytes was moved aside", torn))
	return nil
}

// isStale reports whether some record is to be forgotten.
func (s *Store) isStale() bool {
	for _, r := range s.view.records {
		if time.Since(r.head().At) > s.retention && !s.retained(r) {
			return true
		}
	}
	return false
}

// ---- update ----
//
// Every change goes through Update: on the disk together with its audit entries, in the view, then in the audit log.

// maxOwed is how many entries the state keeps for an audit log that cannot be written. Later ones are lost to that.
const maxOwed = 500

// Update runs fn, which must not call the Store, on the current state under the lock and makes what it returns durable,
// in that order (an UpdateRecord comes last), all or nothing. Audit entries that cannot be written are only Trouble.
func (s *Store) Update(fn func(*View) ([]Record, error)) error {
	defer s.log.release()
	if err := s.begin(); err != nil {
		s.writeTrouble = err
		return err
	}
	recs, err := fn(s.view)
	if err != nil {
		return err
	}
	return s.write(recs, nil)
}

// Audit enters events that are no change of the state, though that cannot be written, and whatever the audit log lacks.
// An error, which is Trouble too, is why it still lacks an entry.
func (s *Store) Audit(events ...Event) error {
	defer s.log.release()
	err := s.log.acquire() // after an error, too, no other goroutine is here
	s.unsaid = append(s.unsaid, events...)
	s.unsaid = s.unsaid[:min(len(s.unsaid), maxOwed)]
	if err != nil {
		s.lack(err)
		return s.auditTrouble
	}
	err = s.catchUp()
	if err == nil {
		err = s.log.poison
	}
	_ = s.write(nil, err) // what fails of the state costs no entry
	return s.auditTrouble
}

// write makes records durable, and enters what they mean and what is unsaid. The state comes first, with the entries: a
// crash between the two costs none, for whoever enters the next finds them there. An error is that of the state, where
// nothing was recorded. unread is why that can be neither read nor written, nil: it can.
func (s *Store) write(recs []Record, unread error) error {
	recs, meant, err := s.check(recs)
	if err != nil {
		return err
	}
	events := slices.Concat(s.unsaid, meant)
	if len(events) == 0 && s.auditTrouble == nil {
		return s.record(recs)
	}
	noted := s.view.fact("audit")
	if unread != nil {
		noted = MetaRecord{} // others may have gone on
	}
	head, lacks := s.enter(noted, events)
	err = unread
	if err == nil {
		err = s.record(slices.Concat([]Record{head}, recs))
	}
	if err != nil && len(recs) > 0 {
		return err
	}
	if lacks == nil {
		lacks = s.audit.append(lined(head.Entries))
	}
	s.lack(lacks)
	if err == nil || lacks == nil {
		s.unsaid = nil
	}
	return err
}

// lack notes why the audit log lacks an entry, nil: it lacks none.
func (s *Store) lack(why error) {
	s.auditTrouble = nil
	if why != nil {
		s.auditTrouble = fmt.Errorf("the audit log lacks an entry: %w", why)
	}
}

// check gives records their heads, and returns them with the texts that the state lacks, and their audit entries. An
// error is why a record cannot be written.
func (s *Store) check(recs []Record) (whole []Record, events []Event, err error) {
	newest := map[string]Record{}
	for _, r := range recs {
		h := r.head()
		h.Rec = strings.ToLower(strings.TrimSuffix(reflect.TypeOf(r).Elem().Name(), "Record"))
		old := newest[h.key()]
		if old == nil {
			old = s.view.records[h.key()]
		}
		if old == nil {
			old = newRecord(h.Rec)
		}
		s.date(h, old)
		if own, ok := r.(*SessionRecord); ok && own.Topic == (Topic{}) {
			own.Topic = old.(*SessionRecord).Topic // a session's own record says nothing of it
		}
		if p, ok := r.(*PromptRecord); ok {
			p.NonceUsed = !p.Open()
			whole = append(whole, s.nameText(p)...)
		}
		if err := s.view.transition(old, r); err != nil {
			return nil, nil, fmt.Errorf("recording %s: %w", h.key(), err)
		}
		newest[h.key()] = r
		whole = append(whole, r)
		events = append(events, auditEvents(old, r)...)
	}
	return whole, events, nil
}

// date completes the head of a record that follows old, nil none.
func (s *Store) date(h *Head, old Record) {
	h.V = schemaVersion
	h.At = time.Now().Truncate(time.Microsecond)
	if old != nil && !h.At.After(old.head().At) {
		h.At = old.head().At.Add(time.Microsecond)
	}
}

// record appends checked records to the state, in one write.
func (s *Store) record(recs []Record) error {
	if len(recs) == 0 {
		return nil
	}
	lines, err := s.encode(recs)
	if err == nil {
		err = s.log.append(lines)
	}
	s.writeTrouble = nil
	if err != nil {
		s.writeTrouble = fmt.Errorf("recording: %w", err)
		return s.writeTrouble
	}
	if err := s.replay(lines); err != nil {
		return err
	}
	for _, r := range recs {
		if session := concerns(r); session != "" { // those who follow it look at the time of its file
			lock := s.lockPath(session)
			next := modTime(lock).Add(2 * time.Second) // some file systems know no smaller step
			_ = os.Chtimes(lock, next, next)           // without one it has ended
		}
	}
	if s.stale || s.read >= compactMin && s.lines > compactFactor*len(s.view.records) {
		s.compact()
	}
	return nil
}

// enter chains events to the audit log, whose head is noted, and returns the record of the new head, with all entries
// that the log lacks. If the log cannot be read, the error, these are all it may lack.
func (s *Store) enter(noted MetaRecord, events []Event) (*MetaRecord, error) {
	tail, err := s.auditTail(noted.chainHead)
	last, lacking := goOn(tail, noted.chainHead, noted.Entries)
	events = events[:min(len(events), max(0, maxOwed-len(lacking)))]
	entries, last := chain(last, events)
	head := noted
	head.Head = Head{Rec: "meta", ID: "audit"}
	head.chainHead = last
	head.Entries = slices.Concat(lacking, entries)
	switch {
	case err == nil && len(tail) == 0: // the first log, or the user moved the last one away
		head.Begins = last.Seq - int64(len(head.Entries))
	case noted.Seq == 0:
		head.Begins = -1
	}
	s.date(&head.Head, s.view.records[head.key()])
	return &head, err
}

// auditTail reads the end of the audit log, or all of it if the entry that the state notes is not there: a state put
// back from a copy knows less. Bytes after the last newline, a write that a crash cut short, are moved aside.
func (s *Store) auditTail(noted chainHead) ([]byte, error) {
	log := s.audit
	if err := log.look(); err != nil {
		return nil, err
	}
	size := min(log.end, maxEntry)
	tail, err := log.read(log.end-size, int(size))
	if err == nil && !noted.isIn(tail) {
		tail, err = log.read(0, int(log.end))
	}
	if err != nil {
		return nil, err
	}
	whole := bytes.LastIndexByte(tail, '\n') + 1
	torn := len(tail) - whole
	if torn > 0 {
		err = log.cut(log.end - int64(torn))
	}
	return tail[:whole], err
}

// VerifyAudit verifies the audit log as it is now, without a line that is just being written, against the head that the
// state notes.
func (s *Store) VerifyAudit() (Verdict, error) {
	err := s.begin()
	if err == nil {
		err = s.audit.look()
	}
	noted := s.view.fact("audit")
	s.log.release()
	if err != nil {
		return Verdict{}, err
	}
	return verify(io.NewSectionReader(s.audit.f, 0, s.audit.end), noted.chainHead, noted.Begins)
}

// Move takes a prompt along one transition, if that is legal, and makes p, a copy, what is stored then. change may fill
// in more.
func (s *Store) Move(p *PromptRecord, to State, change func(*PromptRecord)) error {
	now := time.Now()
	var stored *PromptRecord
	err := s.Update(func(v *View) ([]Record, error) {
		stored = v.Prompts[p.ID]
		old := stored
		if old == nil || old.Status == to || to == Expired && now.Before(old.ExpiresAt) {
			return nil, nil
		}
		moved := *old
		if to == Expired { // waiting comes to the answer that is known to refuse, if there is one
			moved.Reason = fmt.Sprintf("no answer in %d s", inSeconds(old.ExpiresAt.Sub(old.CreatedAt)))
			moved.Value = old.SafeDefault
			moved.DecidedBy = "auto:timeout"
		}
		change(&moved)
		moved.Status = to
		if old.Open() && !moved.Open() && moved.DecidedAt == nil {
			moved.DecidedAt = &now
		}
		if v.transition(old, &moved) != nil {
			return nil, nil
		}
		stored = &moved
		if to == Injected {
			reply := &ReplyRecord{Head{ID: p.ID}, p.ID, old.SessionID, maybe(moved.Value), replySource(stored), now}
			return []Record{reply, stored}, nil
		}
		return []Record{stored}, nil
	})
	switch {
	case err != nil:
	case stored == nil:
		p.Status = Failed // it is not in the state any more
	default:
		*p = *stored
	}
	return err
}

// inSeconds is a time in whole seconds.
func inSeconds(d time.Duration) int { return int(d.Round(time.Second).Seconds()) }

// maybe is the text, "" of none.
func maybe(text *string) string {
	if text == nil {
		return ""
	}
	return *text
}

// replySource says whose answer was typed, in a record.
func replySource(p *PromptRecord) string {
	if p.DecidedBy == "auto:timeout" {
		return "timeout_default"
	}
	return "operator"
}

// newest is the prompt's own message, without number where it has none.
func (p *PromptRecord) newest() Message {
	if len(p.Messages) == 0 {
		return Message{}
	}
	return p.Messages[len(p.Messages)-1]
}

// expiredOpen reports whether the prompt expired with nothing typed: it may still stand, and be asked again.
func (p *PromptRecord) expiredOpen() bool {
	return p.Status == Expired && p.Value == nil && !p.Idle && p.Source == fromScreen
}

// mayBeAsked reports whether its message offers to ask it again.
func (p *PromptRecord) mayBeAsked() bool { return len(p.Messages) > 0 && p.expiredOpen() }

// elsewhere reports whether the numbers of the prompt's messages are another bot's or chat's: here they say nothing.
func (p *PromptRecord) elsewhere(here string) bool { return p.Chat != "" && p.Chat != here }

// owes reports whether a message of the prompt may not show what it is to show.
func (p *PromptRecord) owes() bool {
	return p.Open() || slices.ContainsFunc(p.Messages, func(m Message) bool {
		return m.LostAt != 0 || m.Shows != p.wants(m)
	})
}

// amends returns what records a change of the record with that key, unless there is none (any more).
func amends[T any, R interface {
	*T
	Record
}](s *Store, key string, change func(R)) func() error {
	return func() error {
		return s.Update(func(v *View) ([]Record, error) {
			old, ok := v.records[key].(R)
			if !ok {
				return nil, nil
			}
			r := *old
			change(&r)
			return []Record{R(&r)}, nil
		})
	}
}

// NoteFact records a value under a name, unless it is there.
func (s *Store) NoteFact(name, value string) error {
	return s.Update(func(v *View) ([]Record, error) {
		if v.fact(name).Value == value {
			return nil, nil
		}
		return []Record{&MetaRecord{Head: Head{ID: name}, Value: value}}, nil
	})
}

// ChannelTrouble is a sentence about what keeps Telegram from working, by whoever tried last, and since when; ""
// without trouble, and when the settings have changed since.
func (s *Store) ChannelTrouble() string {
	defer s.log.release()
	_ = s.begin() // as it was, where it cannot be read
	for _, name := range []string{"trouble poll", "trouble send"} {
		noted := s.view.fact(name)
		if noted.Value != "" && !noted.At.Before(configTime(s.Dir)) {
			return noted.Value + " (" + noted.At.Local().Format("Jan 2, 15:04") + ")"
		}
	}
	return ""
}

// Unsettled are the prompts of which messages may not show what they are to show, the oldest first, and a view of the
// sessions and inputs there are. changed is closed by the next change of the state that this process reads.
func (s *Store) Unsettled() (owed []*PromptRecord, v *View, changed <-chan struct{}) {
	defer s.log.release()
	_ = s.begin() // as it was, where it cannot be read
	v = &View{Sessions: maps.Clone(s.view.Sessions), Inputs: maps.Clone(s.view.Inputs)}
	return s.view.which((*PromptRecord).owes), v, s.wake
}

// ---- what is entered ----
//
// Which changes of a session, a question or an input are entries in the audit log.

// auditEvents is what the change from old (empty: none) to r, any that the store appends, means for the audit log.
func auditEvents(old, r Record) (events []Event) {
	switch r := r.(type) {
	case *SessionRecord:
		was := old.(*SessionRecord).Status
		if was == "" {
			return []Event{{"SESSION_START", r.ID, "", []Field{{"tool", r.Tool}, {"pid", r.PID}}}}
		}
		if was == "active" && r.Status != "active" {
			return []Event{{"SESSION_END", r.ID, "", []Field{{"status", r.Status}, {"exit_code", r.ExitCode}}}}
		}
	case *PromptRecord:
		was := old.(*PromptRecord)
		if was.Status == r.Status || r.Status == Routed { // it has not gone out yet
			return nil
		}
		events = []Event{promptEvent(r)}
		if r.Permission && r.DecidedBy != "" && was.DecidedBy == "" {
			events = append(events, Event{"PERMISSION_RESOLVE", r.SessionID, r.ID, slices.Concat(
				person(r.DecidedBy, r.DecidedUser),
				[]Field{{"decision", r.Value}}, // null where only the tool knows, or nobody answered
				said("label", r.labels(maybe(r.Value))),
				said("grants", r.granted()),
				said("words", r.words(maxExcerpt)),
			)})
		}
	case *InputRecord:
		asked := old.(*InputRecord).Status == "" && fromPhone(r.By)
		if asked && !r.isText() {
			events = []Event{{"SESSION_COMMAND", r.SessionID, "",
				slices.Concat([]Field{{"command", r.Kind}}, said("keys", r.Text), person(r.By, r.User))}}
		}
	}
	return events
}

// promptEvent is the entry of a prompt that has come to its status.
func promptEvent(p *PromptRecord) Event {
	name := "PROMPT_" + strings.ToUpper(string(p.Status))
	var fields []Field
	switch p.Status {
	case Created:
		name = "PROMPT_DETECTED"
		fields = slices.Concat(
			[]Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source}, {"tool", p.Tool}},
			said("words", p.words(maxExcerpt)),
			p.shownSHA(), // some are answered before they go out
		)
	case AwaitingReply:
		name = "PROMPT_ROUTED"
		fields = p.shownSHA()
	case Failed:
		fields = []Field{{"reason", p.Reason}}
	case ReplyReceived:
		name = "REPLY_RECEIVED"
		fields = answerFields(p)
		if p.Reason != "" { // the operator's
			fields = append(fields, hidden("reason", p.Reason)...)
		}
	case Injected:
		name = "REPLY_INJECTED"
		fields = slices.Concat(answerFields(p), []Field{{"source", replySource(p)}}, said("screen_sha256", p.ScreenSHA))
	}
	fields = slices.Concat(fields, said("decided_by", p.DecidedBy), said("username", p.DecidedUser))
	return Event{name, p.SessionID, p.ID, fields}
}

// shownSHA is the hash of what a person is shown, that with which the screen is compared when the answer is typed.
func (p *PromptRecord) shownSHA() []Field {
	if p.Shown == "" {
		return nil
	}
	return said("shown_sha256", digest([]byte(p.Shown)))
}

// answerFields is the answer: as it is, with its label, when it is one of those offered, else its length and hash.
func answerFields(p *PromptRecord) []Field {
	switch {
	case p.Value == nil:
		return nil
	case *p.Value == "", p.answers(*p.Value) != nil, *p.Value == maybe(p.SafeDefault):
		return append([]Field{{"value", *p.Value}}, said("label", p.labels(*p.Value))...)
	}
	return hidden("value", *p.Value)
}

// ---- decide ----
//
// Which answer is taken, from whom, and what it means.

const (
	decisionsLimit = 10  // answers by phone per session and minute; tooFast says so
	maxText        = 200 // bytes of a text answer, unless the prompt has another limit
)

// Keys of answers that no text can be, for they are control characters: Enter alone at a question for text, and
// nothing, for the question is left to the terminal.
const (
	enterAlone = "\r"
	leaveIt    = "\x1b"
)

// Answer is one of the answers that a question takes, and what it means.
type Answer struct {
	Key     string `json:"key"` // names it, and is recorded
	Label   string `json:"label"`
	Keys    string `json:"keys,omitempty"`    // the bytes that give it; "" of a choice, which a menu may want moved to
	Refuses bool   `json:"refuses,omitempty"` // refuses, or leaves the question as it is
	Grants  bool   `json:"grants,omitempty"`  // allows what is asked
	Always  bool   `json:"always,omitempty"`  // for longer than once
}

// Why a decision changes nothing is a sentence that a person reads, "" where it is accepted.
const (
	sessionOver  = "the question's session has ended" // nobody is left to type it
	questionOver = "the question is over"             // or its time is
)

// Decide gives the prompt the answer, if it is the first and all guards hold, or says why it does not. In an Update,
// whose record the prompt becomes, that is durable. given is a choice's key, "1,3", "enter" "esc" "cancel" "default",
// "deny:reason", or text; by is telegram:<id>, with the user's name, or cli:answer.
func (s *Store) Decide(v *View, p *PromptRecord, given, by, user string) (why string) {
	why = s.guard(v, p, by)
	if why != "" {
		return why
	}
	value, reason, why := p.interpret(given)
	if why == "" {
		why = p.unread(value, by)
	}
	if why != "" {
		return why
	}
	p.Status = ReplyReceived
	p.Reason = reason
	if value == leaveIt {
		p.Status = Canceled
		p.Reason = "left as it is"
	}
	p.DecidedAt = ref(time.Now())
	p.DecidedBy = by
	p.DecidedUser = user
	p.Value = &value
	return ""
}

// guard returns why the prompt takes no answer at all, or none from this sender.
func (s *Store) guard(v *View, p *PromptRecord, by string) (why string) {
	switch {
	case p.ID == "":
		return "there is no question with this id"
	case !p.Open() || p.Status != Created && !time.Now().Before(p.ExpiresAt):
		return questionOver
	case !v.active(p.SessionID) || !s.Alive(p.SessionID):
		return sessionOver
	case p.Source == fromHook && !s.Alive(p.Call):
		return "the program that asked has ended"
	case p.Status == Created && fromPhone(by):
		return "the question has not been asked yet"
	case fromPhone(by):
		return v.tooFast(p.SessionID)
	}
	return ""
}

// tooFast refuses what comes after too many answers by phone to this session.
func (v *View) tooFast(session string) (why string) {
	recent := v.which(func(p *PromptRecord) bool {
		byPhone := p.SessionID == session && fromPhone(p.DecidedBy)
		return byPhone && time.Since(*p.DecidedAt).Abs() < time.Minute
	})
	if len(recent) < decisionsLimit {
		return ""
	}
	return "10 answers in a minute for this session: wait a little, then answer again"
}

func fromPhone(by string) bool { return strings.HasPrefix(by, "telegram:") }

// listAnswers computes which answers the question takes and what they mean, and the limit of a text. Whoever makes a
// prompt calls it once; after that nothing asks again what an answer means.
func (p *PromptRecord) listAnswers() {
	if p.Constraints.MaxLength == 0 && (p.takesText() || p.Permission) {
		p.Constraints.MaxLength = maxText
	}
	if p.Type == YesNo && len(p.Choices) == 0 {
		p.Choices = []Choice{{Key: "y", Label: "Yes"}, {Key: "n", Label: "No"}}
	}
	p.Answers = []Answer{}
	for _, c := range p.Choices {
		p.Answers = append(p.Answers, p.meaning(c))
	}
	if p.Idle || p.Secret {
		return
	}
	enter := Answer{Key: "enter", Label: "Send Enter", Keys: "\r"}
	text := p.Type == FreeText
	guessed := p.ambiguous()
	switch p.Type {
	case FreeText:
		enter.Key = enterAlone
	case ConfirmEnter:
		enter.Label = "Press Enter"
	}
	if guessed || p.Type == ConfirmEnter || text && p.Source != fromAsk {
		p.Answers = append(p.Answers, enter)
	}
	dialog := p.place.row == 0 // who reads a line does not care for Esc
	escapes := !text && (guessed || maybe(p.SafeDefault) == "esc") || p.Permission && p.refusal() == "" && dialog
	if escapes && p.answers("esc") == nil {
		p.Answers = append(p.Answers, Answer{Key: "esc", Label: "Esc", Keys: "\x1b", Refuses: true})
	}
	if guessed || text {
		p.Answers = append(p.Answers, Answer{Key: leaveIt, Label: "Leave it", Refuses: true})
	}
}

// reLasting is what a choice says that allows more than what is asked.
var reLasting = re(
	`(?i)\b(always|again|session|auto|stop asking|all (edits|future)|every|forever|permanent)`)

// meaning is the answer that the choice c gives. One of several ticks, or a key at a screen that no rule reads, neither
// refuses nor grants.
func (p *PromptRecord) meaning(c Choice) Answer {
	a := Answer{Key: c.Key, Label: oneLine(redact(c.Label))}
	if p.Multi || p.Type == Unknown {
		return a
	}
	no := -1
	if p.Source == fromAsk && len(p.Choices) == 2 { // a script may call them y and n, or j and N
		_, no = pairIn(p.Choices)
	}
	plainNo := p.Type == YesNo && c.Key == "n" || no >= 0 && p.Choices[no] == c
	a.Refuses = plainNo || c.Key == "esc" || isRefusal(c.Label) || p.Permission && c.Key == maybe(p.SafeDefault)
	a.Grants = (p.Permission || p.Type == YesNo) && (c.Grants || c.Key == "y")
	a.Always = a.Grants && (c.Key == hookAlways || reLasting.MatchString(c.Label))
	return a
}

// refusal is the key of the first answer that refuses, "" without one.
func (p *PromptRecord) refusal() string {
	for _, a := range p.Answers {
		if a.Refuses {
			return a.Key
		}
	}
	return ""
}

// answers returns the answers that a value names by their keys: one, or several of the choices where several may be
// ticked; nil for a text.
func (p *PromptRecord) answers(value string) (named []Answer) {
	keys := strings.Split(value, ",")
	for i, a := range p.Answers {
		counts := len(keys) == 1 || p.Multi && i < len(p.Choices)
		if counts && slices.Contains(keys, a.Key) {
			named = append(named, a)
		}
	}
	if len(named) != len(keys) {
		return nil
	}
	return named
}

// otherWords are what a person may say instead of some keys.
var otherWords = map[string][]string{
	"y":       {"yes"},
	"n":       {"no"},
	hookAllow: {"y", "yes"},
	hookDeny:  {"n", "no"},
	"enter":   {""},
	leaveIt:   {"cancel"},
}

// named returns the value of the answer that words name, "" for none. Words are a key or a label, in any case, what
// people say instead, or the keys of several choices. Where a text is asked for, they are that text.
func (p *PromptRecord) named(words string) (value string) {
	keys := words
	if p.Multi {
		keys = strings.Join(strings.Fields(strings.ReplaceAll(words, ",", " ")), ",")
	}
	switch {
	case p.answers(keys) != nil:
		return keys
	case p.Type == FreeText:
		return ""
	}
	for _, a := range p.Answers {
		same := strings.EqualFold(words, a.Key) || strings.EqualFold(words, a.Label)
		called := p.Type != MultipleChoice || p.Source == fromHook || a.Label == a.Key || a.Refuses // else "nuke it" is no
		if same || called && slices.Contains(otherWords[a.Key], strings.ToLower(words)) {
			return a.Key
		}
	}
	return ""
}

// interpret returns the value to record for an answer and the reason of a refusal, or why it is none.
func (p *PromptRecord) interpret(given string) (value, reason, why string) {
	value = p.named(given)
	reason, refused := strings.CutPrefix(given, "deny:")
	isDefault := given == "default" && p.Type != FreeText
	switch {
	case p.Secret:
		return "", "", "a password is typed at the keyboard alone"
	case value != "":
		return value, "", ""
	case isDefault && p.SafeDefault == nil:
		return "", "", "this question has no safe default"
	case isDefault:
		return *p.SafeDefault, "", ""
	case refused && p.Permission && p.refusal() != "":
		return p.refusal(), reason, p.checkText(reason)
	case p.takesText() && (given != "" || !p.Multi): // who ticks nothing has said nothing
		return given, "", p.checkText(given)
	}
	return "", "", "not an answer to this question: " + clip(strconv.Quote(reason), 40) +
		"; it takes " + p.takes()
}

// labels are what the answers are called that a value names, "" of a text.
func (p *PromptRecord) labels(value string) string {
	var all []string
	for _, a := range p.answers(value) {
		all = append(all, a.Label)
	}
	return strings.Join(all, ", ")
}

// granted is what the answer allows for longer than once, "" nothing.
func (p *PromptRecord) granted() string {
	if maybe(p.Value) != hookAlways || p.Status == Failed {
		return ""
	}
	return p.Lasting
}

// takesText reports whether an answer may be any text.
func (p *PromptRecord) takesText() bool {
	asksForIt := p.Type == FreeText || p.Type == Unknown
	return asksForIt || p.Constraints.MaxLength > 0 && !p.Permission
}

// takesKeys reports whether it is a screen that no rule reads: single keys may be pressed at it.
func (p *PromptRecord) takesKeys() bool { return p.Type == Unknown && len(p.Choices) > 0 }

// takesReply reports whether it is possibly a question: a text that replies to it is typed, whatever free_text_enabled
// says, for whoever replies has seen the screen.
func (p *PromptRecord) takesReply() bool {
	return p.ambiguous() && p.takesText()
}

// checkText is why a text cannot be typed as it is: too long, or with control characters, which would be keys.
func (p *PromptRecord) checkText(s string) (why string) {
	limit := p.Constraints.MaxLength
	if len(s) > limit {
		return fmt.Sprintf("the answer has %d bytes, %d are allowed", len(s), limit)
	}
	if strings.ContainsFunc(s, isOdd) {
		return "the answer has control characters in it"
	}
	return ""
}

// isOdd reports whether r may be in no text: a control character other than a tab and a newline, or what stands for
// invalid UTF-8.
func isOdd(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' || r == '\uFFFD' }

// refuses reports whether a value refuses, or leaves the question as it is: it counts though not all was shown.
func (p *PromptRecord) refuses(value string) bool {
	return slices.ContainsFunc(p.answers(value), func(a Answer) bool { return a.Refuses })
}

// unread refuses an answer from somebody who cannot have read the question: the phone must have been shown all of it,
// and a question of which a part is not known here is for the session's own keyboard. An answer that refuses is taken,
// where it lets nothing happen.
func (p *PromptRecord) unread(value, by string) (why string) {
	switch {
	case p.Idle, p.refuses(value) && !p.Turned:
	case p.Cut:
		return "part of what it asks is not known here: it can only be answered at the keyboard, or refused"
	case fromPhone(by) && !p.ShownAll:
		return "not all of it was shown: tap Show all, then answer there"
	}
	return ""
}

// takes names the answers for a person, and what the choices are called.
func (p *PromptRecord) takes() string {
	if p.Type == FreeText {
		return "text"
	}
	var all []string
	gap := " "
	for _, a := range p.Answers {
		name := a.Key
		switch {
		case a.Key == leaveIt:
			name = "cancel"
		case a.Keys == "" && a.Label != a.Key && p.Type != YesNo:
			label := a.Label
			if a.Always {
				label += before(": ", p.Lasting)
			}
			name += " (" + label + ")"
			gap = ", "
		}
		all = append(all, name)
	}
	return strings.Join(all, gap)
}

// ambiguous reports whether it was guessed that this is a question: Enter, Esc, keys, or leaving it are offered, and
// nothing is typed unless somebody chooses that.
func (p *PromptRecord) ambiguous() bool {
	guessed := p.Confidence == "medium" && !slices.Contains(p.Signals, "pattern")
	return p.Type == Unknown || p.Confidence == "low" || guessed
}

// ---- follow ----
//
// Whoever asks learns of the answer from the state. A record that concerns a session changes the time of its lock's
// file: who follows the session watches only that, so records of others cost it nothing.

const (
	lookOften  = 80 * time.Millisecond  // at that time, with a question open: each look wakes the Go runtime eight times
	lookSlowly = 500 * time.Millisecond // whether the time of who asks is over; at a state that could not be read
)

// concerns is the session that a record may wake, "" none.
func concerns(r Record) string {
	switch r := r.(type) {
	case *PromptRecord:
		return r.SessionID
	case *InputRecord:
		return r.SessionID
	}
	return ""
}

// sleep returns after d, or with the error of ctx when that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-timer.Done()
	return ctx.Err()
}

// Follow sends the session's prompts and inputs as they are, for a tool's first hook may be faster than us, and as they
// change: at once when this process writes them, else when the caller has it look. The channel is closed after ctx has
// ended.
func (s *Store) Follow(ctx context.Context, session string, look <-chan time.Time) <-chan Record {
	out := make(chan Record)
	go func() {
		defer s.catchPanic()
		defer close(out)
		seen := map[string]time.Time{} // the newest change that was sent, by key
		for ctx.Err() == nil {
			s.owns(session)
			touched := modTime(s.lockPath(session))
			recs, wake, err := s.news(session, seen)
			for _, r := range recs {
				select {
				case out <- r:
				case <-ctx.Done():
				}
			}
			if err != nil { // not at once again
				_ = sleep(ctx, lookSlowly) // the loop ends with it
				continue
			}
			for same := true; same; {
				select {
				case <-look:
					same = modTime(s.lockPath(session)).Equal(touched)
					continue
				case <-wake:
				case <-ctx.Done():
				}
				same = false
			}
		}
	}()
	return out
}

// news returns the session's records that have changed, in order, and a channel that the next change read here closes.
// Its error need not be reported: it fails for all, and others do.
func (s *Store) news(session string, seen map[string]time.Time) (recs []Record, wake <-chan struct{}, err error) {
	defer s.log.release()
	err = s.begin()
	for key, r := range s.view.records {
		at := r.head().At
		if concerns(r) == session && at.After(seen[key]) {
			seen[key] = at
			recs = append(recs, r)
		}
	}
	sortByTime(recs)
	return recs, s.wake, err
}

// ---- compaction ----
//
// The file is written anew with what is still wanted of it.

// compact puts the new file in place. Where that fails, which is Trouble, the old one is still the state.
func (s *Store) compact() {
	err := s.rewrite()
	s.compactTrouble = nil
	s.lines = 0 // else it is tried again at once
	s.stale = false
	if err != nil {
		s.compactTrouble = fmt.Errorf("compacting the state: %w", err)
	}
}

// rewrite puts a file with the last lines of the records that are retained in the place of the old one. With a session
// go the files that were sent to it.
func (s *Store) rewrite() error {
	var kept []Record
	named := map[string]bool{}
	for _, r := range s.view.records {
		if !s.retained(r) {
			if ended, ok := r.(*SessionRecord); ok {
				if err := os.RemoveAll(s.filesDir(ended.ID)); err != nil {
					return err
				}
			}
			continue
		}
		if p, ok := r.(*PromptRecord); ok {
			own := *p // others may be reading p
			r = &own
			kept = append(kept, s.nameText(&own)...)
			named[own.AboutSHA] = true
		}
		kept = append(kept, r)
	}
	kept = slices.DeleteFunc(kept, func(r Record) bool { return r.head().Rec == "text" && !named[r.head().ID] })
	sortByTime(kept)
	lines, err := s.encode(kept)
	if err != nil {
		return err
	}
	if s.older || len(s.notes) > 0 {
		if _, err := s.log.aside("backup", 0); err != nil {
			return err
		}
	}
	return s.log.replace(lines)
}

// retained reports whether a compaction keeps the record: it is alive, or not old.
func (s *Store) retained(r Record) bool {
	life := s.retention
	if kind := r.head().Rec; kind == "input" || kind == "update" {
		life = updateLife
	}
	return s.view.alive(r) || time.Since(r.head().At) < life
}

// alive reports whether no compaction drops the record.
func (v *View) alive(r Record) bool {
	switch r := r.(type) {
	case *SessionRecord:
		return v.active(r.ID)
	case *PromptRecord:
		return !r.Open() && r.owes() || !r.over() && v.active(r.SessionID)
	}
	return r.head().Rec == "meta" || r.head().Rec == "text" // a text lives as long as its prompt
}

// ---- files of sessions ----
//
// Files sent to a session are kept in a folder of its own as long as its record, and its tool's settings while it runs.

// fileNameMax is how much of the end of a name from outside is kept, in bytes.
const fileNameMax = 60

// reNotInName are runs of characters that no name of ours has.
var reNotInName = re(`[^A-Za-z0-9.-]+`)

// filesDir is the folder of a session's files.
func (s *Store) filesDir(session string) string { return filepath.Join(s.Dir, "files", session) }

// saveFile puts a file into the folder of a session's files. Its name is a number and what is harmless of that name.
func (s *Store) saveFile(session, name string, body []byte) (path string, err error) {
	if err := secureDir(s.filesDir(session)); err != nil {
		return "", err
	}
	name = reNotInName.ReplaceAllString(strings.Trim(name, "./"), "_")
	name = shortID(newNonce()) + "-" + name[max(0, len(name)-fileNameMax):]
	path = filepath.Join(s.filesDir(session), name)
	return path, replacePrivate(path, body)
}

// ---- locks and reap ----
//
// A live process holds locks: of its session, of a hook's call, of the polling. A free lock means that it has ended.

func lockName(session string) string { return "sessions/" + session + ".lock" }

func (s *Store) lockPath(session string) string { return filepath.Join(s.Dir, lockName(session)) }

// HoldSession locks a session, or a hook's call, before it is recorded: an active one whose lock is free is dead.
// release removes the lock's file, for nobody locks one that has ended.
func (s *Store) HoldSession(id string) (release func(), err error) {
	f, err := s.hold(lockName(id), lockVain)
	if err != nil {
		return nil, err
	}
	s.own.Store(f)
	return func() {
		f := s.own.Swap(nil)
		_ = errors.Join(f.Close(), os.Remove(f.Name())) // a free lock says the same
	}, nil
}

// owns reports whether this process is that session, or call. The lock of a session whose file somebody has removed is
// taken again: without it we would pass for dead.
func (s *Store) owns(id string) bool {
	f := s.own.Load()
	if f == nil || f.Name() != s.lockPath(id) {
		return false
	}
	if !isNamed(f, f.Name()) {
		_ = mkdirPrivate(filepath.Dir(f.Name())) // else the lock says it
		again, err := s.hold(lockName(id), 0)
		if err == nil && s.own.CompareAndSwap(f, again) {
			_ = f.Close() // nobody finds it any more
		}
	}
	return true
}

// TryPoll makes this process the poller, unless another is.
func (s *Store) TryPoll() (held bool, err error) {
	f, err := s.hold("poll.lock", 0)
	if errors.Is(err, errLocked) {
		return false, nil
	}
	if err == nil {
		s.poll.Store(f)
	}
	return err == nil, err
}

// Polls reports whether this process is the poller.
func (s *Store) Polls() bool { return s.poll.Load() != nil }

// LeavePoll lets another process be the poller, where this one is.
func (s *Store) LeavePoll() {
	if f := s.poll.Swap(nil); f != nil {
		_ = f.Close() // of what is in it nobody depends
	}
}

// hold takes a lock for as long as this process, or what it is about, lives, and writes our pid into its file. A
// process that tests it has it for a moment.
func (s *Store) hold(name string, wait time.Duration) (*os.File, error) {
	f, err := holdLock(filepath.Join(s.Dir, name), wait)
	if err == nil {
		_, _ = f.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0) // for people: the lock is what counts
	}
	return f, err
}

// holder is the pid in a lock file, −1 when it cannot be read; 0 only when the lock is surely free.
func (s *Store) holder(name string) int {
	f, err := os.OpenFile(filepath.Join(s.Dir, name), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	if err != nil {
		return -1
	}
	defer f.Close()
	if lockFile(f) == nil {
		return 0
	}
	pid := -1
	_, _ = fmt.Fscan(f, &pid) // what is no number leaves −1
	return pid
}

// Alive reports whether the lock of the session, or of the hook's call, is held, or that this cannot be known.
func (s *Store) Alive(id string) bool { return s.holder(lockName(id)) != 0 }

// waits reports whether the prompt is a question to which an answer can still be taken, and who asked it lives.
func (s *Store) waits(p *PromptRecord) bool {
	return !p.Idle && s.guard(s.view, p, "") == ""
}

// Reap records dead sessions as crashed, and their prompts and inputs as failed, and prompts that were decided after
// their hook had died. It removes locks of sessions and calls that are over.
func (s *Store) Reap() error {
	dead := map[string]bool{} // sessions and calls whose locks nobody takes any more
	err := s.Update(func(v *View) (recs []Record, _ error) {
		for id, r := range v.Sessions {
			dead[id] = r.Status != "active" || !s.Alive(id)
			if dead[id] && r.Status == "active" {
				q := *r
				q.end("crashed")
				recs = append(recs, &q)
			}
		}
		for _, p := range v.Prompts {
			dead[p.Call] = p.over() || dead[p.SessionID]
			// It was decided, and its hook may not have passed that on.
			lost := p.Call != "" && slices.Contains(next[p.Status], Injected) && !s.Alive(p.Call)
			if lost || dead[p.SessionID] && (!p.over() || p.mayBeAsked() || p.unsaid) {
				recs = append(recs, p.orphaned())
			}
		}
		for _, in := range v.Inputs {
			if dead[in.SessionID] && in.Status == "queued" {
				failed := *in
				failed.Status = "failed"
				failed.Reason = endedFirst
				recs = append(recs, &failed)
			}
		}
		return recs, nil
	})
	if err != nil {
		return err
	}
	locks, _ := os.ReadDir(filepath.Join(s.Dir, "sessions")) // without it there are none
	for _, lock := range locks {
		id := strings.TrimSuffix(lock.Name(), ".lock")
		if dead[id] && !s.Alive(id) {
			_ = os.Remove(s.lockPath(id)) // a free lock says the same
		}
	}
	return nil
}

const (
	endedFirst  = "the program ended first" // why an input was not done
	isUncertain = " is uncertain"           // ends why an answer failed that may have been typed

	bothAnswered = "a key was pressed at the keyboard in the same moment: " +
		"the terminal shows which of the two counted"
)

// orphaned is the prompt after its session has ended, or its hook.
func (p *PromptRecord) orphaned() *PromptRecord {
	q := *p
	q.Status = Failed
	switch {
	case p.unsaid: // its reason stays
	case p.Open():
		q.Reason = "the session ended"
	case p.Status == Injected:
		q.Status = Resolved
	case p.mayBeAsked():
		q.Reason = p.Reason + ", and the session has ended"
	case p.Call != "":
		q.Reason = "what asked has ended: whether it got the answer" + isUncertain
	default:
		q.Reason = "the session ended: whether the answer was typed" + isUncertain
	}
	return &q
}

// ---- ids ----
//
// What names a record, whole and for people.

// newID is a random UUID (version 4, RFC 9562 section 5.4).
func newID() string {
	x := newNonce()
	return fmt.Sprintf("%s-%s-4%s-%c%s-%s", x[:8], x[8:12], x[13:16], "89ab"[x[16]&3], x[17:20], x[20:])
}

// newNonce is 32 hex digits that nobody can guess.
func newNonce() string { return digest([]byte(rand.Text()))[len("sha256:"):][:32] }

// shortID is an id as people and callback data have it.
func shortID(id string) string { return id[:min(8, len(id))] }

// isShort reports whether that is the id, or as much of its beginning as shortID is.
func isShort(short, id string) bool {
	return short == id || len(short) >= 8 && strings.HasPrefix(id, short)
}
