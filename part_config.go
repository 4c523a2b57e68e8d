package main

// Configuration: one table of settings, a strict subset of TOML 1.0, the state folder, the log file and
// the environment a child gets.
//
// Rules: a setting comes from the command line, else the environment, else config.toml, else its default,
// and remembers which. What the file may contain means exactly what TOML says it means; everything else is
// an error with its line. A value never appears in an error: it may be the bot's token.

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net/netip"
	"net/url"
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
	Dir     string // state folder
	Channel string // "telegram" or "local"

	Timeout           time.Duration // timeout_seconds: an ordinary question's life
	PermissionTimeout time.Duration // permission_timeout_seconds: a permission question's life
	Stuck             time.Duration // stuck_timeout_seconds
	EchoWindow        time.Duration // echo_suppression_ms
	Away              time.Duration // away_after_seconds
	Threshold         float64       // detection_threshold
	BufferBytes       int           // buffer_size_bytes
	FreeText          bool          // free_text_enabled
	NotifyIdle        bool          // notify_idle

	Token   string  // telegram.bot_token
	ChatID  int64   // telegram.chat_id
	Users   []int64 // telegram.allowed_users
	APIBase string  // telegram.api_base

	Stream    bool          // stream.enabled
	MaxChars  int           // stream.max_chars
	Flush     time.Duration // stream.flush_ms
	StripANSI bool          // stream.strip_ansi

	SafeDefaults  map[PromptType]string // safe_defaults.*, per type
	RetentionDays int
	LogLevel      string

	origin map[string]string // key → "flag", "environment NAME", "file" or "default"
}

// setting is one row of the configuration. The type field points to decides what a value must look like.
type setting struct {
	key, env, def string
	min, max      float64            // of numbers, in the unit of the key
	unit          time.Duration      // of durations
	field         func(*Config) any  // where it is kept
	check         func(string) error // of texts; nil: any text
}

// safeDefault is the field of a safe_defaults key.
type safeDefault struct {
	m map[PromptType]string
	t PromptType
}

// settings is every key there is, in the order `config` shows them. The bounds keep a slip of the finger
// from disabling a guard; 4096 is the length of a Telegram message, https://core.telegram.org/bots/api#sendmessage.
func settings() []setting {
	safe := func(t PromptType) func(*Config) any {
		return func(c *Config) any { return safeDefault{c.SafeDefaults, t} }
	}
	return []setting{
		{key: "channel", field: func(c *Config) any { return &c.Channel }, check: oneOf("", "telegram", "local")},
		{key: "timeout_seconds", def: "600", min: 1, max: 86400, unit: time.Second,
			field: func(c *Config) any { return &c.Timeout }},
		{key: "permission_timeout_seconds", env: "PERMISSION_TIMEOUT_SEC", def: "300", min: 1, max: 86400,
			unit: time.Second, field: func(c *Config) any { return &c.PermissionTimeout }},
		{key: "detection_threshold", def: "0.65", min: 0.60, max: 0.99,
			field: func(c *Config) any { return &c.Threshold }},
		{key: "stuck_timeout_seconds", def: "2.0", min: 0.2, max: 600, unit: time.Second,
			field: func(c *Config) any { return &c.Stuck }},
		{key: "buffer_size_bytes", def: "4096", min: 512, max: 1 << 20,
			field: func(c *Config) any { return &c.BufferBytes }},
		{key: "echo_suppression_ms", def: "150", min: 0, max: 10000, unit: time.Millisecond,
			field: func(c *Config) any { return &c.EchoWindow }},
		{key: "free_text_enabled", def: "false", field: func(c *Config) any { return &c.FreeText }},
		{key: "notify_idle", def: "true", field: func(c *Config) any { return &c.NotifyIdle }},
		{key: "away_after_seconds", def: "20", min: 0, max: 86400, unit: time.Second,
			field: func(c *Config) any { return &c.Away }},
		{key: "telegram.bot_token", env: "TELEGRAM_BOT_TOKEN",
			field: func(c *Config) any { return &c.Token }, check: checkToken},
		{key: "telegram.chat_id", env: "TELEGRAM_CHAT_ID", def: "0", min: -1 << 52, max: 1 << 52,
			field: func(c *Config) any { return &c.ChatID }},
		{key: "telegram.allowed_users", env: "ALLOWED_USER_IDS", min: 1, max: 1 << 52,
			field: func(c *Config) any { return &c.Users }},
		{key: "telegram.api_base", env: "TELEGRAM_API_BASE", def: "https://api.telegram.org",
			field: func(c *Config) any { return &c.APIBase }, check: checkAPIBase},
		{key: "stream.enabled", def: "false", field: func(c *Config) any { return &c.Stream }},
		{key: "stream.max_chars", env: "OUTPUT_MAX_CHARS", def: "3500", min: 100, max: 4096,
			field: func(c *Config) any { return &c.MaxChars }},
		{key: "stream.flush_ms", env: "OUTPUT_FLUSH_MS", def: "200", min: 50, max: 10000, unit: time.Millisecond,
			field: func(c *Config) any { return &c.Flush }},
		{key: "stream.strip_ansi", env: "STRIP_ANSI", def: "true", field: func(c *Config) any { return &c.StripANSI }},
		{key: "safe_defaults.yes_no", def: "n", field: safe(YesNo), check: checkNo},
		{key: "safe_defaults.confirm_enter", def: "enter", field: safe(ConfirmEnter), check: oneOf("enter", "esc")},
		{key: "safe_defaults.multiple_choice", def: "1", field: safe(MultipleChoice),
			check: oneOf("1", "2", "3", "4", "5", "6", "7", "8", "9", "esc")},
		{key: "safe_defaults.free_text", field: safe(FreeText), check: checkLine},
		{key: "retention_days", def: "30", min: 1, max: 36500, field: func(c *Config) any { return &c.RetentionDays }},
		{key: "log_level", env: "LOG_LEVEL", def: "info",
			field: func(c *Config) any { return &c.LogLevel }, check: oneOf("debug", "info", "warn", "error")},
	}
}

// loadConfig reads dir/config.toml (absent: all defaults), then the environment (getenv), then flags, which
// win: key → text as it would stand in the environment. Nothing is returned unless everything is valid.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	c := &Config{Dir: dir, SafeDefaults: map[PromptType]string{}, origin: map[string]string{}}
	file, err := readConfigFile(filepath.Join(dir, "config.toml"))
	if err != nil {
		return nil, err
	}
	for _, s := range settings() {
		if err := s.putText(c, s.def); err != nil {
			panic("config: default of " + s.key + ": " + err.Error())
		}
		c.origin[s.key] = "default"
		if e, ok := file[s.key]; ok {
			if err := s.put(c, e.value); err != nil {
				return nil, hinted(fmt.Errorf("config.toml:%d: %s %w", e.line, s.key, err), s.remedy())
			}
			c.origin[s.key] = "file"
		}
		if text := getenv(s.env); s.env != "" && text != "" {
			if err := s.putText(c, text); err != nil {
				return nil, hinted(fmt.Errorf("environment %s: %w", s.env, err), s.remedy())
			}
			c.origin[s.key] = "environment " + s.env
		}
		if text, ok := flags[s.key]; ok {
			if err := s.putText(c, text); err != nil {
				return nil, hinted(fmt.Errorf("flag for %s: %w", s.key, err), s.remedy())
			}
			c.origin[s.key] = "flag"
		}
	}
	return c, c.complete(file)
}

// complete checks what no single setting can know, and fills in the channel. An empty allowlist is refused,
// never taken for "everyone".
func (c *Config) complete(file map[string]tomlEntry) error {
	c.Channel = cmp.Or(c.Channel, map[bool]string{true: "telegram", false: "local"}[c.Token != ""])
	if c.Channel == "local" {
		return nil
	}
	at := func(key string) string {
		if e, ok := file[key]; ok && c.origin[key] == "file" {
			return fmt.Sprintf("config.toml:%d: ", e.line)
		}
		return "config.toml: "
	}
	const setup = "run `atlasbridge setup`, or "
	switch {
	case c.Token == "":
		return hinted(errors.New(at("channel")+"channel telegram needs telegram.bot_token"),
			setup+"set TELEGRAM_BOT_TOKEN, or use channel = \"local\"")
	case c.ChatID == 0:
		return hinted(errors.New(at("telegram.bot_token")+"a bot token needs telegram.chat_id too"),
			setup+"set telegram.chat_id (or TELEGRAM_CHAT_ID)")
	case len(c.Users) == 0:
		return hinted(errors.New(at("telegram.allowed_users")+"telegram.allowed_users is empty: nobody could answer"),
			setup+"list the numeric ids of those who may answer")
	}
	return nil
}

// put stores a value as TOML gave it: string, bool, int64, float64 or []any.
func (s setting) put(c *Config, v any) error {
	number := func() (float64, error) {
		f, ok := v.(float64)
		if n, whole := v.(int64); whole {
			f, ok = float64(n), true
		}
		if !ok {
			return 0, errors.New("must be a number")
		}
		if !(f >= s.min && f <= s.max) { // also refuses nan
			return 0, fmt.Errorf("must be between %.15g and %.15g", s.min, s.max)
		}
		return f, nil
	}
	text := func() (string, error) {
		t, ok := v.(string)
		if !ok {
			return "", errors.New("must be a string in quotes")
		}
		if s.check != nil {
			return t, s.check(t)
		}
		return t, nil
	}
	var err error
	switch p := s.field(c).(type) {
	case *string:
		*p, err = text()
	case safeDefault:
		p.m[p.t], err = text()
	case *bool:
		b, ok := v.(bool)
		if !ok {
			return errors.New("must be true or false")
		}
		*p = b
	case *time.Duration:
		f, bad := number()
		*p, err = time.Duration(f*float64(s.unit)), bad
	case *float64:
		*p, err = number()
	case *int:
		f, bad := number()
		*p, err = int(f), cmp.Or(bad, wholeNumber(v))
	case *int64:
		f, bad := number()
		*p, err = int64(f), cmp.Or(bad, wholeNumber(v))
	case *[]int64:
		*p, err = s.userIDs(v)
	}
	return err
}

func wholeNumber(v any) error {
	if _, ok := v.(int64); !ok {
		return errors.New("must be a whole number")
	}
	return nil
}

// userIDs accepts numeric ids only: a user name can be given up and taken by someone else.
func (s setting) userIDs(v any) ([]int64, error) {
	list, ok := v.([]any)
	if !ok {
		return nil, errors.New("must be a list of numbers, like [1001, 1002]")
	}
	var ids []int64
	for _, item := range list {
		id, ok := item.(int64)
		if !ok || float64(id) < s.min || float64(id) > s.max {
			return nil, errors.New("takes numeric user ids only, no names and no quotes")
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// putText stores a value of the environment, the command line or the default column.
func (s setting) putText(c *Config, text string) error {
	text = strings.TrimSpace(text)
	var v any = text
	switch s.field(c).(type) {
	case *bool:
		if b, err := strconv.ParseBool(strings.ToLower(text)); err == nil {
			v = b
		}
	case *int, *int64, *float64, *time.Duration:
		v = textNumber(text, s.unit)
	case *[]int64:
		ids := []any{}
		for word := range strings.SplitSeq(text, ",") {
			if word = strings.TrimSpace(word); word != "" {
				ids = append(ids, textNumber(word, 0))
			}
		}
		v = ids
	}
	return s.put(c, v)
}

// textNumber reads "600", "2.5" or, where unit is set, "90s" or "10m"; text that is none of them stays text.
func textNumber(text string, unit time.Duration) any {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil {
		return f
	}
	if d, err := time.ParseDuration(text); err == nil && unit > 0 {
		return float64(d) / float64(unit)
	}
	return text
}

// value is the setting in force as it would stand in JSON; the token is masked.
func (s setting) value(c *Config) any {
	switch p := s.field(c).(type) {
	case *string:
		if s.key == "telegram.bot_token" && *p != "" {
			id, _, _ := strings.Cut(*p, ":")
			return id + ":…"
		}
		return *p
	case safeDefault:
		return p.m[p.t]
	case *bool:
		return *p
	case *time.Duration:
		return float64(*p) / float64(s.unit)
	case *float64:
		return *p
	case *int:
		return *p
	case *int64:
		return *p
	case *[]int64:
		return append([]int64{}, *p...)
	}
	panic("config: unknown kind of field for " + s.key)
}

// settingInForce is a setting as `config --json` shows it.
type settingInForce struct {
	Key    string `json:"key"`
	Value  any    `json:"value"`
	Origin string `json:"origin"`
}

// describe is every setting in force, the token masked.
func (c *Config) describe() []settingInForce {
	var all []settingInForce
	for _, s := range settings() {
		all = append(all, settingInForce{s.key, s.value(c), c.origin[s.key]})
	}
	return all
}

func (s setting) remedy() string {
	if s.key == "telegram.allowed_users" || s.key == "telegram.chat_id" {
		return "`atlasbridge setup` finds the numeric ids by itself"
	}
	if s.def == "" {
		return "`atlasbridge help config` lists the settings"
	}
	return fmt.Sprintf("remove it for the default, %s", s.def)
}

func oneOf(words ...string) func(string) error {
	return func(text string) error {
		if slices.Contains(words, text) {
			return nil
		}
		shown := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "" })
		return errors.New("must be one of " + strings.Join(shown, ", "))
	}
}

func checkNo(text string) error {
	if text != "n" {
		return errors.New("can only be \"n\": nothing is ever approved by waiting")
	}
	return nil
}

// checkLine bounds a text that may be typed into a program: 200 bytes, as a free-text answer.
func checkLine(text string) error {
	if len(text) > 200 || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 }) {
		return errors.New("must be one line of at most 200 bytes without control characters")
	}
	return nil
}

// checkToken accepts the form BotFather gives: the bot's number, a colon, letters and digits.
func checkToken(text string) error {
	if text != "" && !regexp.MustCompile(`^[0-9]{1,20}:[A-Za-z0-9_-]{1,128}$`).MatchString(text) {
		return errors.New("does not look like a bot token (NUMBER:LETTERS, as BotFather gives it)")
	}
	return nil
}

// checkAPIBase lets the token travel encrypted only, or not leave the machine.
func checkAPIBase(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errors.New("must be a URL like https://api.telegram.org")
	}
	ip, err := netip.ParseAddr(u.Hostname())
	loopback := u.Hostname() == "localhost" || err == nil && ip.IsLoopback()
	if u.Scheme != "https" && !(u.Scheme == "http" && loopback) {
		return errors.New("must begin with https:// (http only for this machine itself)")
	}
	return nil
}

// readConfigFile returns the keys of the file by their full names; none when there is no file.
func readConfigFile(path string) (map[string]tomlEntry, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err := ownedPrivate(path); err != nil {
		return nil, hinted(fmt.Errorf("config.toml: %w", err), "make it your own and private: chmod 600 "+path)
	}
	f, err := openPrivate(path, os.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("config.toml: %w", err)
	}
	defer f.Close()
	const most = 64 << 10 // bytes; a full configuration is under 2 KiB
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("config.toml: %w", err)
	}
	if len(text) > most {
		return nil, errors.New("config.toml: larger than 64 KiB")
	}
	return parseConfig(string(text))
}

// parseConfig is readConfigFile without the file: syntax, known keys, no key twice.
func parseConfig(text string) (map[string]tomlEntry, error) {
	entries, err := parseTOML(text)
	if err != nil {
		return nil, err
	}
	var known []string
	for _, s := range settings() {
		known = append(known, s.key)
	}
	file := map[string]tomlEntry{}
	for _, e := range entries {
		if !slices.Contains(known, e.key) {
			return nil, hinted(fmt.Errorf("config.toml:%d: unknown key %s", e.line, clip(e.key, 60)),
				"did you mean "+nearest(e.key, known)+"?")
		}
		file[e.key] = e
	}
	return file, nil
}

// tomlEntry is one key of a file: its full name, value (string, bool, int64, float64, []any) and line from 1.
type tomlEntry struct {
	key   string
	value any
	line  int
}

// The shapes of https://toml.io/en/v1.0.0 that are accepted. Decimal integers have no leading zero, an
// underscore stands between digits, and a fraction has digits on both sides.
var (
	tomlKey  = regexp.MustCompile(`^[A-Za-z0-9_-]+`)
	tomlWord = regexp.MustCompile(`^[^\s,\]#]+`)
	tomlInt  = regexp.MustCompile(
		`^([+-]?(0|[1-9](_?[0-9])*)|0x[0-9A-Fa-f](_?[0-9A-Fa-f])*|0o[0-7](_?[0-7])*|0b[01](_?[01])*)$`)
	tomlFloat = regexp.MustCompile(
		`^[+-]?((0|[1-9](_?[0-9])*)(\.[0-9](_?[0-9])*)?([eE][+-]?[0-9](_?[0-9])*)?|inf|nan)$`)
)

// parseTOML reads the subset: comments, [table] headers, bare keys, and on one line each strings, integers,
// floats, booleans and arrays.
func parseTOML(text string) ([]tomlEntry, error) {
	var entries []tomlEntry
	seen, prefix := map[string]bool{}, ""
	for i, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		name, value, err := parseLine(line)
		switch {
		case err == nil && name == "":
			continue
		case err != nil:
		case value == nil && seen["["+name]:
			err = fmt.Errorf("table [%s] is there twice", clip(name, 60))
		case value == nil:
			seen["["+name], prefix = true, name+"."
			continue
		case seen[prefix+name]:
			err = fmt.Errorf("%s is there twice", clip(prefix+name, 60))
		}
		if err != nil {
			return nil, hinted(fmt.Errorf("config.toml:%d: %w", i+1, err),
				"lines look like  key = \"text\"  or  key = 42  under an optional  [table]")
		}
		seen[prefix+name] = true
		entries = append(entries, tomlEntry{prefix + name, value, i + 1})
	}
	return entries, nil
}

// parseLine returns a key and its value, a table's name and nil, or "" for a blank line.
func parseLine(line string) (name string, value any, err error) {
	control := func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }
	if !utf8.ValidString(line) || strings.ContainsFunc(line, control) {
		return "", nil, errors.New("control characters or text that is not UTF-8")
	}
	rest := blank(line)
	table := strings.HasPrefix(rest, "[")
	if table {
		rest = blank(rest[1:])
	}
	if rest == "" || rest[0] == '#' {
		if table {
			err = errors.New("a table's name is missing")
		}
		return "", nil, err
	}
	if name = tomlKey.FindString(rest); name == "" {
		return "", nil, errors.New("names consist of letters, digits, - and _ only")
	}
	rest = blank(rest[len(name):])
	mark := map[bool]string{true: "]", false: "="}[table]
	if !strings.HasPrefix(rest, mark) {
		return "", nil, fmt.Errorf("%q is expected after %s", mark, clip(name, 60))
	}
	rest = blank(rest[1:])
	if !table {
		if value, rest, err = parseValue(rest); err != nil {
			return "", nil, err
		}
	}
	if rest = blank(rest); rest != "" && rest[0] != '#' {
		return "", nil, errors.New("only a comment may follow here")
	}
	return name, value, nil
}

func blank(s string) string { return strings.TrimLeft(s, " \t") }

// parseValue reads one value at the start of s and returns what follows it.
func parseValue(s string) (value any, rest string, err error) {
	switch {
	case s == "" || s[0] == '#':
		return nil, "", errors.New("a value is missing")
	case strings.HasPrefix(s, `"""`) || strings.HasPrefix(s, "'''"):
		return nil, "", errors.New("a string must be on one line, in single quotes or double ones")
	case s[0] == '"':
		return parseBasic(s[1:])
	case s[0] == '\'':
		text, rest, ok := strings.Cut(s[1:], "'")
		if !ok {
			return nil, "", errors.New("a quote is missing at the end of the string")
		}
		return text, rest, nil
	case s[0] == '[':
		return parseArray(blank(s[1:]))
	}
	word := tomlWord.FindString(s)
	rest = s[len(word):]
	digits := strings.ReplaceAll(word, "_", "")
	switch {
	case word == "true" || word == "false":
		return word == "true", rest, nil
	case tomlInt.MatchString(word):
		n, err := strconv.ParseInt(digits, 0, 64)
		if err != nil {
			return nil, "", errors.New("an integer is out of range")
		}
		return n, rest, nil
	case tomlFloat.MatchString(word):
		f, err := strconv.ParseFloat(digits, 64)
		if err != nil && !math.IsInf(f, 0) { // beyond the range of a float: infinite, and then out of any bounds
			return nil, "", errors.New("a number is malformed")
		}
		return f, rest, nil
	}
	return nil, "", errors.New("not a string in quotes, a number, true, false or a list on one line")
}

// parseArray reads after the opening bracket; a comma may stand before the closing one.
func parseArray(s string) (value any, rest string, err error) {
	list := []any{}
	for {
		if strings.HasPrefix(s, "]") {
			return list, s[1:], nil
		}
		item, after, err := parseValue(s)
		if err != nil {
			return nil, "", err
		}
		list = append(list, item)
		if s = blank(after); strings.HasPrefix(s, ",") {
			s = blank(s[1:])
		} else if !strings.HasPrefix(s, "]") {
			return nil, "", errors.New("a list must end with ] on the same line, with commas between its values")
		}
	}
}

// parseBasic reads a double-quoted string after its opening quote.
func parseBasic(s string) (value any, rest string, err error) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '"' {
			return b.String(), s[i+1:], nil
		}
		if s[i] != '\\' {
			b.WriteByte(s[i])
			continue
		}
		if i++; i == len(s) {
			break
		}
		if at := strings.IndexByte(`btnfr"\`, s[i]); at >= 0 {
			b.WriteByte("\b\t\n\f\r\"\\"[at])
			continue
		}
		width := map[byte]int{'u': 4, 'U': 8}[s[i]]
		if width == 0 || len(s) <= i+width {
			return nil, "", errors.New(`unknown escape: only \b \t \n \f \r \" \\ \uXXXX \UXXXXXXXX exist`)
		}
		n, err := strconv.ParseUint(s[i+1:i+1+width], 16, 32)
		if err != nil || n > utf8.MaxRune || !utf8.ValidRune(rune(n)) {
			return nil, "", errors.New(`\u and \U need the hexadecimal number of a character`)
		}
		b.WriteRune(rune(n))
		i += width
	}
	return nil, "", errors.New("a quote is missing at the end of the string")
}

// stateDir is where everything is kept: ATLASBRIDGE_HOME, else STORAGE_PATH, else ~/.atlasbridge.
func stateDir(getenv func(string) string) (string, error) {
	if dir := cmp.Or(getenv("ATLASBRIDGE_HOME"), getenv("STORAGE_PATH")); dir != "" {
		return filepath.Abs(dir)
	}
	home := getenv("HOME")
	if home == "" || !filepath.IsAbs(home) {
		var err error
		if home, err = os.UserHomeDir(); err != nil {
			return "", hinted(fmt.Errorf("finding the home folder: %w", err), "set ATLASBRIDGE_HOME to a folder of your own")
		}
	}
	return filepath.Join(home, ".atlasbridge"), nil
}

// secureDir makes dir (0700) when it is missing, and refuses one that is not the user's own, is a
// symbolic link, or that group or others can enter.
func secureDir(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o700)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil {
		err = os.Chmod(dir, 0o700) // whatever the umask took away
	} else if errors.Is(err, fs.ErrExist) {
		err = ownedPrivate(dir)
	}
	if err != nil {
		return hinted(fmt.Errorf("state folder: %w", err), "chmod 700 it if it is yours, or set ATLASBRIDGE_HOME to another")
	}
	return nil
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
// text through redact. Writing never waits for the disk; lines the disk cannot keep up with are dropped.
// The function returned writes what is left, for at most a second.
func openLog(dir, level string) (*slog.Logger, func() error, error) {
	path := filepath.Join(dir, "atlasbridge.log")
	f, err := openPrivate(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return nil, nil, fmt.Errorf("opening the log: %w", err)
	}
	var least slog.Level
	if err := least.UnmarshalText([]byte(level)); err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("opening the log: %w", err)
	}
	l := &logFile{path: path, file: f, lines: make(chan []byte, 256), quit: make(chan struct{}), done: make(chan struct{})}
	go l.write()
	hide := func(_ []string, a slog.Attr) slog.Attr {
		if k := a.Value.Kind(); k == slog.KindString || k == slog.KindAny && a.Key != slog.LevelKey {
			a.Value = slog.StringValue(redact(a.Value.String()))
		}
		return a
	}
	log := slog.New(slog.NewJSONHandler(l, &slog.HandlerOptions{Level: least, ReplaceAttr: hide}))
	return log, l.close, nil
}

// logFile hands lines to a goroutine of its own, which alone touches the file.
type logFile struct {
	path       string
	file       *os.File
	lines      chan []byte
	quit, done chan struct{}
}

func (l *logFile) Write(p []byte) (int, error) {
	select {
	case l.lines <- slices.Clone(p):
	default:
	}
	return len(p), nil
}

func (l *logFile) close() error {
	close(l.quit)
	select {
	case <-l.done:
		return nil
	case <-time.After(time.Second):
		return errors.New("closing the log: the disk does not answer")
	}
}

func (l *logFile) write() {
	defer close(l.done)
	defer func() { l.file.Close() }()
	for {
		select {
		case line := <-l.lines:
			l.rotate()
			l.file.Write(line) // a log that cannot be written has nowhere to say so
		case <-l.quit:
			for len(l.lines) > 0 {
				l.file.Write(<-l.lines)
			}
			return
		}
	}
}

// rotate makes room when the file is full, and follows when another process did. The lock is on the full
// file itself: whoever gets it second finds that the name stands for another file already.
func (l *logFile) rotate() {
	mine, err := l.file.Stat()
	if err != nil || mine.Size() < logLimit || lockFile(l.file, false) != nil {
		return
	}
	defer func(full *os.File) { unlockFile(full) }(l.file)
	if now, err := os.Lstat(l.path); err == nil && os.SameFile(mine, now) {
		if os.Rename(l.path, l.path+".1") != nil {
			l.file.Truncate(0) // an open file cannot be renamed on Windows
			return
		}
	}
	if next, err := openPrivate(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE); err == nil {
		l.file.Close()
		l.file = next
	}
}
