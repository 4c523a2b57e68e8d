package main

// Configuration: one table of settings, a strict subset of TOML 1.0, the state folder, the log file and
// the environment a child gets.
//
// A setting comes from the command line, else the environment, else config.toml, else its default, and
// remembers which. What the file may contain means exactly what TOML says it means; everything else is an error
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
	"unicode/utf8"
)

// Config is everything a person can set, validated.
type Config struct {
	Dir               string                // state folder
	Channel           string                // "telegram" or "local"
	Timeout           time.Duration         // timeout_seconds: an ordinary question's life
	PermissionTimeout time.Duration         // permission_timeout_seconds: a permission question's life
	Stuck             time.Duration         // stuck_timeout_seconds
	EchoWindow        time.Duration         // echo_suppression_ms
	Away              time.Duration         // away_after_seconds
	Threshold         float64               // detection_threshold
	BufferBytes       int                   // buffer_size_bytes
	FreeText          bool                  // free_text_enabled
	NotifyIdle        bool                  // notify_idle
	Token             string                // telegram.bot_token
	ChatID            int64                 // telegram.chat_id
	Users             []int64               // telegram.allowed_users
	APIBase           string                // telegram.api_base
	Stream            bool                  // stream.enabled
	MaxChars          int                   // stream.max_chars
	Flush             time.Duration         // stream.flush_ms
	StripANSI         bool                  // stream.strip_ansi
	SafeDefaults      map[PromptType]string // safe_defaults.*, per type
	RetentionDays     int
	LogLevel          string
	given             map[string]settingInForce // by key, as it was written
}

// setting is one row of the configuration. The type of to decides what a value must look like.
type setting struct {
	key, env, def string
	to            any
	min, max      float64            // of numbers, in the unit of the key
	unit          time.Duration      // of durations
	check         func(string) error // of texts
	safe          PromptType         // of safe_defaults
}

// settings is every key there is, in the order `config` shows them, bound to the fields of c. The bounds keep a
// slip of the finger from disabling a guard; 4096 is the length of a Telegram message and 52 bits that of an id,
// https://core.telegram.org/bots/api.
func settings(c *Config) []setting {
	const sec, ms = time.Second, time.Millisecond
	no := shaped(`^n$`, `can only be "n": nothing is approved by waiting`)
	choice := shaped(`^([1-9]|esc)$`, "must be a number from 1 to 9, in quotes, or esc")
	line := shaped(`^[^\pC]{0,200}$`, "must be one line of at most 200 characters, none of them a control character")
	levels := oneOf("debug", "info", "warn", "error")
	return []setting{
		{key: "channel", to: &c.Channel, check: oneOf("telegram", "local", "")},
		{key: "timeout_seconds", def: "600", to: &c.Timeout, min: 1, max: 86400, unit: sec},
		{key: "permission_timeout_seconds", env: "PERMISSION_TIMEOUT_SEC", def: "300", to: &c.PermissionTimeout,
			min: 1, max: 86400, unit: sec},
		{key: "detection_threshold", def: "0.65", to: &c.Threshold, min: 0.60, max: 0.99},
		{key: "stuck_timeout_seconds", def: "2.0", to: &c.Stuck, min: 0.2, max: 600, unit: sec},
		{key: "buffer_size_bytes", def: "4096", to: &c.BufferBytes, min: 512, max: 1 << 20},
		{key: "echo_suppression_ms", def: "150", to: &c.EchoWindow, min: 0, max: 10000, unit: ms},
		{key: "free_text_enabled", def: "false", to: &c.FreeText},
		{key: "notify_idle", def: "true", to: &c.NotifyIdle},
		{key: "away_after_seconds", def: "20", to: &c.Away, min: 0, max: 86400, unit: sec},
		{key: "telegram.bot_token", env: "TELEGRAM_BOT_TOKEN", to: &c.Token, check: checkToken},
		{key: "telegram.chat_id", env: "TELEGRAM_CHAT_ID", def: "0", to: &c.ChatID, min: -1 << 52, max: 1 << 52},
		{key: "telegram.allowed_users", env: "ALLOWED_USER_IDS", to: &c.Users, min: 1, max: 1 << 52},
		{key: "telegram.api_base", env: "TELEGRAM_API_BASE", def: "https://api.telegram.org", to: &c.APIBase,
			check: checkBaseURL},
		{key: "stream.enabled", def: "false", to: &c.Stream},
		{key: "stream.max_chars", env: "OUTPUT_MAX_CHARS", def: "3500", to: &c.MaxChars, min: 100, max: 4096},
		{key: "stream.flush_ms", env: "OUTPUT_FLUSH_MS", def: "200", to: &c.Flush, min: 50, max: 10000, unit: ms},
		{key: "stream.strip_ansi", env: "STRIP_ANSI", def: "true", to: &c.StripANSI},
		{key: "safe_defaults.yes_no", def: "n", safe: YesNo, to: new(string), check: no},
		{key: "safe_defaults.confirm_enter", def: "enter", safe: ConfirmEnter, to: new(string), check: oneOf("enter", "esc")},
		{key: "safe_defaults.multiple_choice", def: "1", safe: MultipleChoice, to: new(string), check: choice},
		{key: "safe_defaults.free_text", safe: FreeText, to: new(string), check: line},
		{key: "retention_days", def: "30", to: &c.RetentionDays, min: 1, max: 36500},
		{key: "log_level", env: "LOG_LEVEL", def: "info", to: &c.LogLevel, check: levels},
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

func oneOf(words ...string) func(string) error {
	return shaped("^("+strings.Join(words, "|")+")$", "must be one of "+strings.Trim(strings.Join(words, ", "), ", "))
}

// checkToken accepts the form BotFather gives, and none.
func checkToken(text string) error {
	return shaped(`^([0-9]{1,20}:[A-Za-z0-9_-]{1,128})?$`, "must be a bot token as BotFather gives it")(text)
}

// checkBaseURL lets the token travel encrypted only, or not leave the machine.
func checkBaseURL(text string) error {
	return shaped(`^(https://[^/@?#\s]+|http://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?)(/[^@?#\s]*)?$`,
		"must be a URL that begins with https:// (http only for this machine itself)")(text)
}

// loadConfig reads dir/config.toml (absent: all defaults), then the environment (getenv), then flags, which
// win: key → text as it would stand in the environment. Nothing is returned unless everything is valid.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	c := &Config{Dir: dir, SafeDefaults: map[PromptType]string{}, given: map[string]settingInForce{}}
	file, err := readConfigFile(filepath.Join(dir, "config.toml"))
	for _, s := range settings(c) {
		put := func(origin, where string, v any) {
			if bad := s.put(c, v); bad != nil && err == nil {
				remedy := "remove it for the default, " + s.def
				if strings.HasPrefix(s.key, "telegram.") {
					remedy = "`atlasbridge setup` writes it"
				}
				err = hinted(fmt.Errorf("%s: %s %w", where, s.key, bad), remedy)
			}
			c.given[s.key] = settingInForce{s.key, v, origin}
		}
		put("default", "default", s.read(s.def))
		if e, ok := file[s.key]; ok {
			put("file", fmt.Sprintf("config.toml:%d", e.line), e.value)
		}
		if text := getenv(s.env); s.env != "" && text != "" {
			put("environment "+s.env, "environment "+s.env, s.read(text))
		}
		if text, ok := flags[s.key]; ok {
			put("flag", "flag", s.read(text))
		}
	}
	if err == nil {
		err = c.complete(file)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// complete checks what no single setting can know, and fills in the channel. An empty allowlist is refused,
// never taken for "everyone".
func (c *Config) complete(file map[string]tomlEntry) error {
	if c.Channel == "" {
		c.Channel = map[bool]string{true: "local", false: "telegram"}[c.Token == ""]
		c.given["channel"] = settingInForce{"channel", c.Channel, "default"}
	}
	what := ""
	switch {
	case c.Channel == "local":
		return nil
	case c.Token == "":
		what = "channel telegram needs telegram.bot_token"
	case c.ChatID == 0:
		what = "a bot token needs telegram.chat_id too"
	case len(c.Users) == 0:
		what = "telegram.allowed_users is empty: nobody could answer"
	default:
		return nil
	}
	where := "config.toml"
	if line := cmp.Or(file["telegram.bot_token"].line, file["channel"].line); line > 0 {
		where = fmt.Sprintf("config.toml:%d", line)
	}
	return hinted(fmt.Errorf("%s: %s", where, what), "run `atlasbridge setup`, or set channel = \"local\"")
}

// put stores a value as TOML has it: string, bool, int64, float64 or []any. An error never shows the value.
func (s setting) put(c *Config, v any) error {
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	for _, item := range list {
		n, err := strconv.ParseFloat(fmt.Sprint(item), 64)
		if err == nil && s.max > s.min && !(n >= s.min && n <= s.max) { // also refuses nan
			return fmt.Errorf("must be between %.15g and %.15g", s.min, s.max)
		}
	}
	number, target := 0.0, s.to
	if s.unit > 0 {
		target = &number
	}
	encoded, err := json.Marshal(v)
	if err != nil || json.Unmarshal(encoded, target) != nil {
		switch s.to.(type) {
		case *string:
			return errors.New("must be a string in quotes")
		case *bool:
			return errors.New("must be true or false")
		case *[]int64: // a user name can be given up and taken by someone else
			return errors.New("must be a list of numeric ids like [1001, 1002], without names and quotes")
		}
		return errors.New("must be a number, and a whole one where a fraction makes no sense")
	}
	switch p := s.to.(type) {
	case *time.Duration:
		*p = time.Duration(number * float64(s.unit))
	case *string:
		if s.safe != "" {
			c.SafeDefaults[s.safe] = *p
		}
		return s.check(*p)
	}
	return nil
}

// read turns text of the environment, the command line or the default column into the value TOML would have;
// a duration may have a unit (90s, 10m), a list needs no brackets, a switch may be 1 or 0.
func (s setting) read(text string) any {
	text = strings.TrimSpace(text)
	written := text
	switch s.to.(type) {
	case *string:
		if s.key == "log_level" {
			return strings.ToLower(text) // LOG_LEVEL=INFO is usual
		}
		return text
	case *bool:
		if on, err := strconv.ParseBool(text); err == nil {
			return on
		}
	case *time.Duration:
		if d, err := time.ParseDuration(text); err == nil {
			return float64(d) / float64(s.unit)
		}
	case *[]int64:
		written = "[" + text + "]"
	}
	if v, rest, err := parseValue(written); err == nil && rest == "" {
		return v
	}
	return text
}

// settingInForce is a setting as `config --json` shows it.
type settingInForce struct {
	Key    string `json:"key"`
	Value  any    `json:"value"`
	Origin string `json:"origin"` // "flag", "environment NAME", "file" or "default"
}

// describe is every setting in force, the token masked.
func (c *Config) describe() (all []settingInForce) {
	for _, s := range settings(&Config{}) {
		v := c.given[s.key]
		if s.key == "telegram.bot_token" && c.Token != "" {
			v.Value = strings.Split(c.Token, ":")[0] + ":…" // the bot's number is public
		}
		all = append(all, v)
	}
	return all
}

// readConfigFile returns the keys of the file by their full names; none when there is no file.
func readConfigFile(path string) (map[string]tomlEntry, error) {
	f, err := openPrivate(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, hinted(fmt.Errorf("config.toml: %w", err), "make it your own and private: chmod 600 "+path)
	}
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("config.toml: %w", err)
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

// tomlEntry is one key of a file: its value (string, bool, int64, float64, []any; nil of a table) and line from 1.
type tomlEntry struct {
	value any
	line  int
}

// The shapes of https://toml.io/en/v1.0.0 that are accepted. What is matched, Go's own unquoting and strconv
// read as TOML does.
var (
	tomlBlank  = regexp.MustCompile(`^[ \t]*(#.*)?$`)
	tomlTable  = regexp.MustCompile(`^[ \t]*\[[ \t]*([A-Za-z0-9_-]+)[ \t]*\][ \t]*(#.*)?$`)
	tomlKey    = regexp.MustCompile(`^[ \t]*([A-Za-z0-9_-]+)[ \t]*=[ \t]*(.*)$`)
	tomlString = regexp.MustCompile(`^("([^"\\]|\\([btnfr"\\]|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}))*"|'[^']*')`)
	tomlWord   = regexp.MustCompile(`^[^ \t,\]#]+`)
	tomlComma  = regexp.MustCompile(`^[ \t]*,?[ \t]*`)
	tomlInt    = regexp.MustCompile(
		`^([+-]?(0|[1-9](_?[0-9])*)|0x[0-9A-Fa-f](_?[0-9A-Fa-f])*|0o[0-7](_?[0-7])*|0b[01](_?[01])*)$`)
	tomlFloat = regexp.MustCompile(
		`^[+-]?((0|[1-9](_?[0-9])*)(\.[0-9](_?[0-9])*)?([eE][+-]?[0-9](_?[0-9])*)?|inf|nan)$`)
)

// parseTOML reads the subset: comments, [table] headers, bare keys, and on one line each strings, integers, floats,
// booleans and arrays. Entries are by full name, tables in brackets; without known any key will do.
func parseTOML(text string, known []string) (map[string]tomlEntry, error) {
	control := func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }
	entries, prefix := map[string]tomlEntry{}, ""
	for i, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		var key, rest string
		var value any
		var err error
		remedy := "lines look like  key = \"text\"  or  key = 42  under an optional  [table]"
		if !utf8.ValidString(line) || strings.ContainsFunc(line, control) {
			err = errors.New("control characters or text that is not UTF-8")
		} else if tomlBlank.MatchString(line) {
			continue
		} else if m := tomlTable.FindStringSubmatch(line); m != nil {
			prefix, key = m[1]+".", "["+m[1]+"]"
		} else if m := tomlKey.FindStringSubmatch(line); m == nil {
			err = errors.New("neither  key = value  nor  [table]  with names of letters, digits, - and _")
		} else if value, rest, err = parseValue(m[2]); err == nil && !tomlBlank.MatchString(rest) {
			err = errors.New("only a comment may follow the value")
		} else if key = prefix + m[1]; err == nil && known != nil && !slices.Contains(known, key) {
			err = fmt.Errorf("unknown key %s%s", key, meant("", nearest(key, known)))
			remedy = "the README lists all keys"
		}
		if err == nil && entries[key].line > 0 {
			err = fmt.Errorf("%s is there twice", key)
		}
		if err != nil {
			return nil, hinted(fmt.Errorf("config.toml:%d: %w", i+1, err), remedy)
		}
		entries[key] = tomlEntry{value, i + 1}
	}
	return entries, nil
}

// parseValue reads one value at the start of s and returns what follows it. The value is nil only with an error.
func parseValue(s string) (value any, rest string, err error) {
	if quoted := tomlString.FindString(s); quoted != "" {
		text := quoted[1 : len(quoted)-1]
		if quoted[0] == '"' {
			if text, err = strconv.Unquote(quoted); err != nil {
				return nil, "", errors.New("an escape names no character")
			}
		}
		return text, s[len(quoted):], nil
	}
	if strings.HasPrefix(s, "[") {
		return parseArray(strings.TrimLeft(s[1:], " \t"))
	}
	word := tomlWord.FindString(s)
	switch rest = s[len(word):]; {
	case word == "true" || word == "false":
		return word == "true", rest, nil
	case tomlInt.MatchString(word):
		n, err := strconv.ParseInt(word, 0, 64)
		if err != nil {
			return nil, "", errors.New("an integer is out of range")
		}
		return n, rest, nil
	case tomlFloat.MatchString(word): // beyond its range a float is infinite, and then out of any bounds
		f, _ := strconv.ParseFloat(strings.ReplaceAll(word, "_", ""), 64)
		return f, rest, nil
	}
	return nil, "", errors.New("the value is no string in quotes, number, true, false or list on this line")
}

// parseArray reads after the opening bracket; a comma may stand before the closing one.
func parseArray(s string) (value any, rest string, err error) {
	list := []any{}
	for !strings.HasPrefix(s, "]") {
		item, after, err := parseValue(s)
		if err != nil {
			return nil, "", err
		}
		list = append(list, item)
		gap := tomlComma.FindString(after)
		if s = after[len(gap):]; !strings.Contains(gap, ",") && !strings.HasPrefix(s, "]") {
			return nil, "", errors.New("a list ends with ] on its line and has commas between its values")
		}
	}
	return list, s[1:], nil
}

// stateDir is where everything is kept: ATLASBRIDGE_HOME, else STORAGE_PATH, else ~/.atlasbridge.
func stateDir(getenv func(string) string) (string, error) {
	if dir := cmp.Or(getenv("ATLASBRIDGE_HOME"), getenv("STORAGE_PATH")); dir != "" {
		return filepath.Abs(dir)
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".atlasbridge"), hinted(err, "set ATLASBRIDGE_HOME to a folder of your own")
}

// secureDir makes dir (0700, whatever the umask) when it is missing, and refuses one that is not the user's
// own, is a symbolic link, or that group or others can enter.
func secureDir(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o700)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil {
		err = os.Chmod(dir, 0o700)
	} else if errors.Is(err, fs.ErrExist) {
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
func openLog(dir, level string) (*slog.Logger, func() error, error) {
	var least slog.Level
	l := &logFile{path: filepath.Join(dir, "atlasbridge.log")}
	err := errors.Join(least.UnmarshalText([]byte(level)), secureDir(dir))
	if err == nil {
		err = l.open()
	}
	if err != nil {
		return nil, nil, fmt.Errorf("opening the log: %w", err)
	}
	hide := func(_ []string, a slog.Attr) slog.Attr {
		if k := a.Value.Kind(); k == slog.KindString || k == slog.KindAny && a.Key != slog.LevelKey {
			a.Value = slog.StringValue(redact(a.Value.String()))
		}
		return a
	}
	handler := slog.NewJSONHandler(l, &slog.HandlerOptions{Level: least, ReplaceAttr: hide})
	return slog.New(handler), func() error { return l.file.Close() }, nil
}

// logFile is an io.Writer that starts a new file when the old one is full. slog calls it one line at a time.
type logFile struct {
	path string
	file *os.File
}

func (l *logFile) open() error {
	f, err := openPrivate(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	if err == nil {
		l.file = f
	}
	return err
}

// Write locks a full file before it renames it: the process that gets the lock second finds that the path
// stands for another file already, and only follows.
func (l *logFile) Write(line []byte) (int, error) {
	full := l.file
	if mine, err := full.Stat(); err == nil && mine.Size() >= logLimit && lockFile(full, false) == nil {
		now, err := os.Lstat(l.path)
		if err == nil && os.SameFile(mine, now) && os.Rename(l.path, l.path+".1") != nil {
			full.Truncate(0) // an open file cannot be renamed on Windows
		}
		if l.open() == nil {
			full.Close()
		}
	}
	return l.file.Write(line)
}
