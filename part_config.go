package main

// Configuration: one table of settings, a strict subset of TOML 1.0, the state folder, the log file and the
// environment a child gets. A setting comes from the command line, else the environment, else config.toml, else its
// default, and remembers which. What the file may contain means exactly what TOML says; everything else is an error
// with its line. A value never appears in an error: it may be the bot's token.

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Config is everything a person can set, validated; settings names the key of each field.
type Config struct {
	Dir                                                        string // state folder
	Channel, Token, APIBase, LogLevel                          string
	Timeout, PermissionTimeout, Stuck, EchoWindow, Away, Flush time.Duration
	Threshold                                                  float64
	BufferBytes, MaxChars, RetentionDays                       int
	FreeText, NotifyIdle, Stream, StripANSI                    bool
	ChatID                                                     int64
	Users                                                      []int64
	SafeDefaults                                               map[PromptType]string
	inForce                                                    []settingInForce // in the order of settings
}

// settingInForce is a setting as `config --json` shows it, the token masked.
type settingInForce struct {
	Key    string          `json:"key"`
	Value  json.RawMessage `json:"value"`
	Origin string          `json:"origin"` // "flag", "environment NAME", "config.toml:LINE" or "default"
}

// setting is one row of the configuration. The type of to decides what a value must look like.
type setting struct {
	key, env, def string
	to            any                // a field of Config
	min, max      float64            // of numbers, in the unit of the key
	unit          time.Duration      // of durations
	check         func(string) error // of texts
}

// settings is every key there is, in the order `config` shows them, bound to the fields of c. The bounds keep a
// slip of the finger from disabling a guard; 4096 is the length of a Telegram message and 52 bits that of an id,
// https://core.telegram.org/bots/api.
func settings(c *Config) []setting {
	const sec, ms = time.Second, time.Millisecond
	level := shaped(`^(?i:debug|info|warn|error)$`, "must be debug, info, warn or error")
	key := shaped(`^(enter|esc)$`, "must be enter or esc")
	no := shaped(`^n$`, `can only be "n": nothing is approved by waiting`)
	choice := shaped(`^([1-9]|esc)$`, "must be a number from 1 to 9, in quotes, or esc")
	line := shaped(`^[^\pC]{0,200}$`, "must be one line of at most 200 characters, none of them a control character")
	return []setting{
		{key: "channel", to: &c.Channel, check: shaped(`^(telegram|local|)$`, "must be telegram or local")},
		{key: "timeout_seconds", def: "600", to: &c.Timeout, min: 1, max: 86400, unit: sec},
		{key: "permission_timeout_seconds", env: "PERMISSION_TIMEOUT_SEC", def: "300", to: &c.PermissionTimeout,
			min: 1, max: 86400, unit: sec},
		{key: "detection_threshold", def: "0.65", to: &c.Threshold, min: 0.60, max: 0.99},
		{key: "stuck_timeout_seconds", def: "2.0", to: &c.Stuck, min: 0.2, max: 600, unit: sec},
		{key: "buffer_size_bytes", def: "4096", to: &c.BufferBytes, min: 512, max: 1 << 20},
		{key: "echo_suppression_ms", def: "150", to: &c.EchoWindow, max: 10000, unit: ms},
		{key: "free_text_enabled", def: "false", to: &c.FreeText},
		{key: "notify_idle", def: "true", to: &c.NotifyIdle},
		{key: "away_after_seconds", def: "20", to: &c.Away, max: 86400, unit: sec},
		{key: "telegram.bot_token", env: "TELEGRAM_BOT_TOKEN", to: &c.Token, check: checkToken},
		{key: "telegram.chat_id", env: "TELEGRAM_CHAT_ID", def: "0", to: &c.ChatID, min: -1 << 52, max: 1 << 52},
		{key: "telegram.allowed_users", env: "ALLOWED_USER_IDS", to: &c.Users, min: 1, max: 1 << 52},
		{key: "telegram.api_base", env: "TELEGRAM_API_BASE", def: "https://api.telegram.org", to: &c.APIBase,
			check: checkBaseURL},
		{key: "stream.enabled", def: "false", to: &c.Stream},
		{key: "stream.max_chars", env: "OUTPUT_MAX_CHARS", def: "3500", to: &c.MaxChars, min: 100, max: 4096},
		{key: "stream.flush_ms", env: "OUTPUT_FLUSH_MS", def: "200", to: &c.Flush, min: 50, max: 10000, unit: ms},
		{key: "stream.strip_ansi", env: "STRIP_ANSI", def: "true", to: &c.StripANSI},
		{key: "safe_defaults.yes_no", def: "n", to: new(string), check: no},
		{key: "safe_defaults.confirm_enter", def: "enter", to: new(string), check: key},
		{key: "safe_defaults.multiple_choice", def: "1", to: new(string), check: choice},
		{key: "safe_defaults.free_text", to: new(string), check: line},
		{key: "retention_days", def: "30", to: &c.RetentionDays, min: 1, max: 36500},
		{key: "log_level", env: "LOG_LEVEL", def: "info", to: &c.LogLevel, check: level},
	}
}

// shaped makes a check of a regular expression and what to say when it does not match.
func shaped(pattern, otherwise string) func(string) error {
	return func(text string) error {
		if regexp.MustCompile(pattern).MatchString(text) {
			return nil
		}
		return errors.New(otherwise)
	}
}

// checkToken accepts the form BotFather gives, and none. checkBaseURL lets the token travel encrypted only, or not
// leave the machine.
var (
	checkToken   = shaped(`^([0-9]{1,20}:[A-Za-z0-9_-]{1,128})?$`, "must be a bot token as BotFather gives it")
	checkBaseURL = shaped(
		`^(https://[^/@?#\s]+|http://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?)(/[^@?#\s]*)?$`,
		"must be a URL that begins with https:// (http only for this machine itself)")
)

// loadConfig reads dir/config.toml (absent: all defaults), then the environment (getenv), then flags, which
// win: key → text as it would stand in the environment. With an error, only Dir is set.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	c := &Config{Dir: dir, SafeDefaults: map[PromptType]string{}}
	file, err := readConfigFile(filepath.Join(dir, "config.toml"))
	for i, s := range settings(c) {
		c.inForce = append(c.inForce, settingInForce{Key: s.key})
		put := func(origin string, v json.RawMessage) {
			if bad := s.put(c, v); bad != nil && err == nil {
				err = hinted(fmt.Errorf("%s: %s %w", origin, s.key, bad), "correct or remove it; default: "+cmp.Or(s.def, "none"))
			}
			if number, _, ok := strings.Cut(c.Token, ":"); ok && s.key == "telegram.bot_token" {
				v = asJSON(number + ":…") // the bot's number is public
			}
			c.inForce[i].Value, c.inForce[i].Origin = v, origin
		}
		put("default", s.read(s.def))
		if e, ok := file[s.key]; ok {
			put(fmt.Sprint("config.toml:", e.line), e.value)
		}
		if text := getenv(s.env); s.env != "" && text != "" {
			put("environment "+s.env, s.read(text))
		}
		if text, ok := flags[s.key]; ok {
			put("flag", s.read(text))
		}
	}
	if err = cmp.Or(err, c.complete(cmp.Or(file["telegram.bot_token"].line, file["channel"].line))); err != nil {
		return &Config{Dir: dir}, err
	}
	return c, nil
}

// complete checks what no single setting can know, and fills in the channel; line is where Telegram was chosen, 0
// outside of the file. An empty allowlist is refused, never taken for "everyone".
func (c *Config) complete(line int) (err error) {
	if c.Channel == "" {
		c.Channel = map[bool]string{true: "local", false: "telegram"}[c.Token == ""]
		c.inForce[0].Value = asJSON(c.Channel)
	}
	where := strings.TrimSuffix(fmt.Sprint("config.toml:", line), ":0")
	switch {
	case c.Channel == "local":
	case c.Token == "":
		err = fmt.Errorf("%s: channel telegram needs telegram.bot_token", where)
	case c.ChatID == 0:
		err = fmt.Errorf("%s: a bot token needs telegram.chat_id too", where)
	case len(c.Users) == 0:
		err = fmt.Errorf("%s: telegram.allowed_users is empty: nobody could answer", where)
	}
	return hinted(err, "run `atlasbridge setup`, or set channel = \"local\"")
}

// put stores a value, written as JSON. An error never shows it.
func (s setting) put(c *Config, v json.RawMessage) error {
	for item := range strings.FieldsFuncSeq(string(v), func(r rune) bool { return strings.ContainsRune("[], \t", r) }) {
		n, err := strconv.ParseFloat(item, 64)
		if err == nil && s.max > s.min && (n < s.min || n > s.max) {
			return fmt.Errorf("must be between %.15g and %.15g", s.min, s.max)
		}
	}
	number, target := 0.0, s.to
	if s.unit > 0 {
		target = &number
	}
	if json.Unmarshal(v, target) != nil {
		return errors.New("must be " + cmp.Or(map[string]string{"*string": "a string in quotes", "*bool": "true or false",
			"*[]int64": "a list of numeric ids like [1001, 1002], without names and quotes", // a name can change hands
		}[fmt.Sprintf("%T", s.to)], "a number, and a whole one where a fraction makes no sense"))
	}
	switch p := s.to.(type) {
	case *time.Duration:
		*p = time.Duration(number * float64(s.unit))
	case *string:
		if typ, ok := strings.CutPrefix(s.key, "safe_defaults."); ok {
			c.SafeDefaults[PromptType(typ)] = *p
		}
		return s.check(*p)
	}
	return nil
}

// read turns text of the environment, the command line or the default column into JSON; a list needs no brackets.
func (s setting) read(text string) json.RawMessage {
	text = strings.TrimSpace(text)
	if _, ok := s.to.(*[]int64); ok {
		text = "[" + strings.Trim(text, ", ") + "]"
	}
	if _, ok := s.to.(*string); ok || !tomlValue.MatchString(text) {
		return asJSON(text)
	}
	return json.RawMessage(text)
}

func asJSON(text string) json.RawMessage {
	v, _ := json.Marshal(text) // a text cannot fail
	return v
}

// tomlEntry is one key of a file: its value as JSON (nil of a table) and line from 1.
type tomlEntry struct {
	value json.RawMessage
	line  int
}

// readConfigFile returns the keys of the file by their full names; none when there is no file.
func readConfigFile(path string) (map[string]tomlEntry, error) {
	f, err := openPrivate(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	defer f.Close()
	var text []byte
	if err == nil {
		text, err = io.ReadAll(f)
	}
	if err != nil {
		return nil, hinted(fmt.Errorf("config.toml: %w", err), "make it your own and private: chmod 600 "+path)
	}
	return parseConfig(string(text))
}

// parseConfig reads a configuration and refuses keys that there are not.
func parseConfig(text string) (map[string]tomlEntry, error) {
	var known []string
	for _, s := range settings(&Config{}) {
		known = append(known, s.key)
	}
	return parseTOML(text, known)
}

// The lines of https://toml.io/en/v1.0.0 that are accepted: those whose values JSON understands in the same way, and
// literal strings; in UTF-8 (Go reads another byte as U+FFFD), without control characters. A list is one of integers.
const (
	tomlOdd = `\x00-\x08\x0a-\x1f\x7f\x{fffd}`
	tomlEnd = `[ \t]*(?:#[^` + tomlOdd + `]*)?$`
	tomlInt = `-?(?:0|[1-9][0-9]*)`
	tomlAny = `(true|false|` + tomlInt + `(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|"(?:[^"\\\t` + tomlOdd + `]|\\[btnfr"\\])*"|` +
		`'[^'` + tomlOdd + `]*'|\[[ \t]*(?:` + tomlInt + `(?:[ \t]*,[ \t]*` + tomlInt + `)*)?[ \t]*\])`
)

var (
	tomlBlank = regexp.MustCompile(`^` + tomlEnd)
	tomlTable = regexp.MustCompile(`^[ \t]*\[[ \t]*([A-Za-z0-9_-]+)[ \t]*\]` + tomlEnd)
	tomlKey   = regexp.MustCompile(`^[ \t]*([A-Za-z0-9_-]+)[ \t]*=[ \t]*` + tomlAny + tomlEnd)
	tomlValue = regexp.MustCompile(`^` + tomlAny + `$`)
)

// parseTOML reads the subset: comments, [table] headers, bare keys, and on one line each strings, numbers, booleans
// and lists. Entries are by full name, tables in brackets; without known any key will do.
func parseTOML(text string, known []string) (map[string]tomlEntry, error) {
	entries, prefix := map[string]tomlEntry{}, ""
	for i, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		key, value, problem := "", json.RawMessage(nil), ""
		if tomlBlank.MatchString(line) {
			continue
		} else if m := tomlTable.FindStringSubmatch(line); m != nil {
			prefix, key = m[1]+".", "["+m[1]+"]"
		} else if m := tomlKey.FindStringSubmatch(line); m == nil {
			problem = "not  name = value  with text in quotes, a number, true, false or a [list] of whole numbers"
		} else if key, value = prefix+m[1], json.RawMessage(m[2]); known != nil && !slices.Contains(known, key) {
			problem = "unknown key " + key + meant("", nearest(key, known))
		} else if value[0] == '\'' {
			value = asJSON(strings.Trim(m[2], "'"))
		}
		if problem == "" && entries[key].line > 0 {
			problem = key + " is there twice"
		}
		if problem != "" {
			return nil, hinted(fmt.Errorf("config.toml:%d: %s", i+1, problem),
				"lines look like  key = \"text\"  or  key = 42  under an optional  [table]; the README lists all keys")
		}
		entries[key] = tomlEntry{value, i + 1}
	}
	return entries, nil
}

// stateDir is where everything is kept: ATLASBRIDGE_HOME, else STORAGE_PATH, else ~/.atlasbridge.
func stateDir(getenv func(string) string) (string, error) {
	if dir := cmp.Or(getenv("ATLASBRIDGE_HOME"), getenv("STORAGE_PATH")); dir != "" {
		return filepath.Abs(dir)
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".atlasbridge"), hinted(err, "set ATLASBRIDGE_HOME to a folder of your own")
}

// secureDir makes dir when it is missing, and refuses one that is not the user's alone, or a symbolic link.
func secureDir(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o700)
	if err == nil {
		err = mkdirPrivate(dir)
	}
	if errors.Is(err, fs.ErrExist) {
		err = ownedPrivate(dir)
	}
	return hinted(err, "chmod 700 "+dir+" if it is yours, or set ATLASBRIDGE_HOME to another folder")
}

// childEnv is the environment a wrapped tool gets: no setting and no secret of atlasbridge, only what
// `atlasbridge hook` needs to find its session.
func childEnv(env []string, c *Config, sessionID string) []string {
	kept := slices.DeleteFunc(slices.Clone(env), func(entry string) bool {
		name, value, _ := strings.Cut(entry, "=")
		name = strings.ToUpper(name) // Windows does not tell them apart
		return strings.HasPrefix(name, "ATLASBRIDGE_") || strings.HasPrefix(name, "TELEGRAM_") ||
			c.Token != "" && strings.Contains(value, c.Token)
	})
	return append(kept, "ATLASBRIDGE_SESSION="+sessionID, "ATLASBRIDGE_HOME="+c.Dir)
}

// logLimit is the size in bytes from which atlasbridge.log is renamed to atlasbridge.log.1.
const logLimit = 1 << 20

// openLog is the log file dir/atlasbridge.log (0600): JSON Lines from the level up, rotated by size, every
// text through redact. A line that cannot be written is lost: the log has nowhere to say so.
func openLog(dir, level string) (*slog.Logger, error) {
	var least slog.Level
	if err := errors.Join(least.UnmarshalText([]byte(level)), secureDir(dir)); err != nil {
		return nil, fmt.Errorf("opening the log: %w", err)
	}
	hide := func(_ []string, a slog.Attr) slog.Attr {
		if k := a.Value.Kind(); k == slog.KindString || k == slog.KindAny && a.Key != slog.LevelKey {
			a.Value = slog.StringValue(redact(a.Value.String()))
		}
		return a
	}
	handler := slog.NewJSONHandler(logFile(dir), &slog.HandlerOptions{Level: least, ReplaceAttr: hide})
	return slog.New(handler), nil
}

// logFile is the log in that folder, opened for each line: there are few.
type logFile string

// Write locks a full file before it renames it: the process that gets the lock second finds that the name stands for
// another file already. Only os.Root renames an open file on Windows.
func (dir logFile) Write(line []byte) (int, error) {
	const name = "atlasbridge.log"
	f, err := openPrivate(filepath.Join(string(dir), name), os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := f.Write(line)
	if full, bad := f.Stat(); bad == nil && full.Size() >= logLimit && lockFile(f, false) == nil {
		if root, bad := os.OpenRoot(string(dir)); bad == nil {
			if now, bad := root.Lstat(name); bad == nil && os.SameFile(full, now) {
				root.Rename(name, name+".1")
			}
			root.Close()
		}
	}
	return n, err
}
