// The store keeps state.jsonl: every session, question and answer, for all atlasbridge processes. A line is one record
// after a change, the last with a rec and id is the truth; crc is the CRC-32C of the line without its crc member and
// newline. state.lock (never renamed) is held from reading what others appended to the fsync of what follows from it.
// One Update is one write; when it fails the file is cut back, when that fails too, this process never writes again.
// A power cut can keep just the start of a write: a torn line is moved to state.jsonl.torn-TIME, those before it do no
// harm: a Telegram update is written after what it led to, and what comes again is done once. A damaged line stays, is
// reported, and fails its question. Compaction renames a new file into place; one with damage, or of an earlier schema,
// is first copied to state.jsonl.backup-TIME.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
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
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	schemaVersion, compactMin = 1, 1 << 20             // bytes: a smaller file opens within 3 ms (measured)
	compactFactor, retention  = 3, 30 * 24 * time.Hour // times what would be kept; default of retention_days
	pollSilence               = 3 * time.Minute        // of the poller, which then is stopped: a poll takes 65 s at most
	updateLife                = 48 * time.Hour         // twice that of https://core.telegram.org/bots/api#getting-updates
	decisionsLimit, maxText   = 10, 200                // answers by phone per session and minute; bytes of a text answer
	crcMember, damaged        = len(`,"crc":"00000000"}` + "\n"), "its record in the state file is damaged"
	maxHookInput, maxExcerpt  = 8 << 20, 200 // bytes of JSON from a tool, with the file it writes; of an excerpt (SPEC 5)
)

// ---- privacy, settings and config.toml ----

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
		{Key: "safe_defaults.confirm_enter", def: "enter", to: new(string), shape: "enter|esc|",
			must: `must be "enter", "esc" or "" for nothing`},
		{Key: "safe_defaults.multiple_choice", to: new(string), shape: `[^\pC\p{Zl}\p{Zp}]{0,60}`,
			must: "must be a choice's number or its words, at most 60 characters on one line"},
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

// ---- records ----

// State is a prompt's state, SPEC section 6.
type State string

const (
	Created, Routed, AwaitingReply, ReplyReceived State = "created", "routed", "awaiting_reply", "reply_received"
	Injected, Resolved, Expired, Canceled, Failed State = "injected", "resolved", "expired", "canceled", "failed"
)

// next is the whole life of a prompt: Update accepts nothing else. A question answered at the keyboard or gone from
// the screen is resolved without a reply; a tap can be faster than the record that its message was delivered.
var next = map[State][]State{
	"":            {Created},
	Created:       {Routed, ReplyReceived, Resolved, Expired, Canceled, Failed},
	Routed:        {AwaitingReply, ReplyReceived, Resolved, Expired, Canceled, Failed},
	AwaitingReply: {ReplyReceived, Resolved, Expired, Canceled, Failed},
	ReplyReceived: {Injected, Resolved, Failed}, Expired: {Injected, Resolved, Failed}, Injected: {Resolved, Failed},
}

// Open: the prompt waits for an answer. over: nothing has to happen to it any more.
func (p *PromptRecord) Open() bool { return slices.Contains(next[p.Status], Canceled) }
func (p *PromptRecord) over() bool { return next[p.Status] == nil || p.Status == Expired }

// Record is one line of state.jsonl: a pointer to one of the structs below.
type Record interface {
	head() *Head
	put(*View)
}
type Head struct {
	V   int       `json:"v"`
	Rec string    `json:"rec"`
	ID  string    `json:"id"`
	At  time.Time `json:"at"` // of this change; later than that of the record's line before
}

func (h *Head) head() *Head          { return h }
func (h *Head) key() string          { return h.Rec + " " + h.ID }
func byTime(a, b Record) int         { return a.head().At.Compare(b.head().At) }
func (r *SessionRecord) put(v *View) { v.Sessions[r.ID] = r }
func (r *PromptRecord) put(v *View)  { v.Prompts[r.ID] = r }
func (r *InputRecord) put(v *View)   { v.Inputs[r.ID] = r }
func (r *UpdateRecord) put(v *View)  { v.Updates[r.ID] = r }
func (r *MetaRecord) put(v *View)    { v.Meta[r.ID] = r }
func (r *ReplyRecord) put(*View)     {}

var kinds = map[string]func() Record{
	"session": func() Record { return new(SessionRecord) }, "prompt": func() Record { return new(PromptRecord) },
	"reply": func() Record { return new(ReplyRecord) }, "input": func() Record { return new(InputRecord) },
	"update": func() Record { return new(UpdateRecord) }, "meta": func() Record { return new(MetaRecord) }}

type SessionRecord struct {
	Head
	Tool      string     `json:"tool"`
	Args      []string   `json:"args"`
	Cwd       string     `json:"cwd"`
	PID       int        `json:"pid"`       // the child's
	PIDStart  int64      `json:"pid_start"` // its start time as processStart gives it: tells a reused pid
	Wrapper   int        `json:"wrapper"`   // atlasbridge's own pid
	Label     string     `json:"label"`
	Status    string     `json:"status"`   // active completed crashed terminated
	Activity  string     `json:"activity"` // starting running waiting waiting_permission idle
	StartedAt time.Time  `json:"started_at"`
	EndedAt   *time.Time `json:"ended_at"`
	ExitCode  *int       `json:"exit_code"`
	Prompts   int        `json:"prompts"`
	LastSeen  *time.Time `json:"last_output_at"` // when the child last wrote, as of this line
}
type PromptRecord struct {
	Head
	Prompt                 // as the screen, or the hook, asked
	SessionID   string     `json:"session_id"`
	Confidence  string     `json:"confidence"`
	MaxLength   int        `json:"max_length"` // of a text answer, bytes
	Source      string     `json:"source"`     // "screen" or "hook"
	Tool        string     `json:"tool"`       // hook: the tool's name for what it wants to use ("Bash"); else ""
	Subject     string     `json:"subject"`    // hook: what the tool's dialog shows of it: the command, file, address
	Lasting     string     `json:"lasting"`    // hook: what the lasting permission allows, and for how long
	Cwd         string     `json:"cwd"`
	Key         string     `json:"idempotency_key"`
	Status      State      `json:"status"`
	Nonce       string     `json:"nonce"` // 32 hex
	NonceUsed   bool       `json:"nonce_used"`
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   time.Time  `json:"expires_at"`
	DecidedAt   *time.Time `json:"decided_at"`
	DecidedBy   *string    `json:"decided_by"`
	Value       *string    `json:"value"`
	ValueHidden bool       `json:"value_hidden"` // a secret was given: Store.TakeSecret has it, no file does
	MsgID       int64      `json:"telegram_msg_id"`
	// MsgStatus is the status that the message MsgID was last known to show; where it is not Status although the prompt is
	// over, an edit is owed, and whoever polls next pays it.
	MsgStatus State `json:"telegram_msg_status"`
	// OldMsgIDs are messages that MsgID has replaced and that may still have buttons: their removal is owed, too.
	OldMsgIDs []int64 `json:"telegram_old_msg_ids"`
	// ShownAll tells that all of Shown has been on the phone. Until then only an answer that refuses is taken from there.
	ShownAll bool `json:"shown_all"`
	// ScreenSHA is the SHA-256 ("sha256:…") of the Shown that stood on the screen when the answer was typed.
	ScreenSHA string `json:"screen_sha256"`
	Reason    string `json:"reason"` // why failed or canceled; the operator's reason for a refusal
}
type ReplyRecord struct {
	Head
	PromptID   string    `json:"prompt_id"`
	SessionID  string    `json:"session_id"`
	Value      string    `json:"value"`
	Source     string    `json:"source"` // operator, timeout_default
	InjectedAt time.Time `json:"injected_at"`
}
type InputRecord struct { // what the phone asks of a session another process may own
	Head
	SessionID string `json:"session_id"`
	Kind      string `json:"kind"` // text keys screen last cancel show_all show_recent answer
	By        string `json:"by"`
	Text      string `json:"text"`
	UpdateID  int64  `json:"update_id"`
	ReplyTo   int64  `json:"reply_to"` // the message to answer
	PromptID  string `json:"prompt_id"`
	Status    string `json:"status"` // queued done refused
	Reason    string `json:"reason"`
}
type UpdateRecord struct { // of Telegram: it was acted on
	Head
	Kind string `json:"kind"`
}
type MetaRecord struct { // single facts by id: "audit" (head of the chain), "telegram" (offset, claim, poller)
	Head
	Seq    int64             `json:"seq"`
	Hash   string            `json:"hash"`
	Values map[string]string `json:"values"`
}

// View is the state as read: the last record of every id. Read only: a change is a changed copy, given to Update.
type View struct {
	Sessions map[string]*SessionRecord
	Prompts  map[string]*PromptRecord
	Inputs   map[string]*InputRecord
	Updates  map[string]*UpdateRecord
	Meta     map[string]*MetaRecord
	records  map[string]Record // all of them, by kind and id
}

func viewOf(records map[string]Record) *View {
	v := &View{map[string]*SessionRecord{}, map[string]*PromptRecord{}, map[string]*InputRecord{},
		map[string]*UpdateRecord{}, map[string]*MetaRecord{}, map[string]Record{}}
	for _, r := range records {
		v.put(r)
	}
	return v
}

func (v *View) put(r Record) {
	v.records[r.head().key()] = r
	r.put(v)
}
func (v *View) active(id string) bool {
	return v.Sessions[id] != nil && v.Sessions[id].Status == "active"
}

// which are the prompts that want holds for, never nil.
func (v *View) which(want func(*PromptRecord) bool) []*PromptRecord {
	all := slices.AppendSeq([]*PromptRecord{}, maps.Values(v.Prompts))
	return slices.DeleteFunc(all, func(p *PromptRecord) bool { return !want(p) })
}

// illegal tells why r cannot follow old, which is now the truth about its id.
func (v *View) illegal(old, r Record) error {
	was, _ := old.(*SessionRecord)
	from, _ := old.(*PromptRecord)
	p, ok := r.(*PromptRecord)
	rival := func(q *PromptRecord) bool { return q.Status == AwaitingReply && q.SessionID == p.SessionID }
	switch from = cmp.Or(from, &PromptRecord{}); {
	case was != nil && was.Status != "active" && r.(*SessionRecord).Status == "active",
		ok && from.NonceUsed && (!p.NonceUsed || p.Nonce != from.Nonce):
		return errors.New("an ended session stays ended, a used nonce used")
	case !ok || p.Status == from.Status:
		return nil
	case !slices.Contains(next[from.Status], p.Status), p.Status == AwaitingReply && len(v.which(rival)) > 0,
		slices.Contains([]State{Routed, AwaitingReply, ReplyReceived}, p.Status) && !v.active(p.SessionID):
		return fmt.Errorf("%q cannot become %q", from.Status, p.Status)
	}
	return nil
}

/* ----- a file that several processes append to ----- */
// journal is a file of lines that several processes append to, files makes a call that a test lets fail or kill us.
type files func(op string, f *os.File, call func() error) error
type journal struct {
	do          files
	path        string
	mu          sync.Mutex // held from acquire to release, before the lock between processes
	lock, f     *os.File   // f is nil after a failed write: that descriptor is never written or fsynced again
	end         int64      // bytes of the file
	anew, known bool       // acquire has opened another file than before; the folder's entry of it is on the disk
	poison      error      // not nil: what the file ends with is unknown, nothing is written any more
}

// acquire waits for the lock and opens the file that the path names. release follows, after an error, too.
func (j *journal) acquire() (err error) {
	if j.mu.Lock(); j.lock == nil {
		j.lock, err = openPrivate(strings.TrimSuffix(j.path, filepath.Ext(j.path))+".lock", os.O_RDWR|os.O_CREATE)
	}
	if err = cmp.Or(err, lockFile(j.lock, true)); err != nil {
		return fmt.Errorf("locking %s: %w", j.path, err)
	}
	named, _ := os.Lstat(j.path)
	open, _ := j.f.Stat()
	if j.anew = !os.SameFile(named, open); j.anew {
		j.f.Close()
		j.known = false
		j.f, err = openPrivate(j.path, os.O_RDWR|os.O_APPEND|os.O_CREATE)
	}
	j.end, _ = j.f.Seek(0, io.SeekEnd) // cannot fail with a regular file
	return err
}
func (j *journal) release() {
	unlockFile(j.lock)
	j.mu.Unlock()
}

// append adds b at the end. After an error the file is as it was before, or poison is set.
func (j *journal) append(b []byte, durable bool) (err error) {
	if err = j.poison; err == nil && !j.known {
		err = j.do("fsync folder", nil, func() error { return syncDir(filepath.Dir(j.path)) })
	}
	if j.known = err == nil; !j.known {
		return err
	}
	if err = j.do("write", j.f, func() error { return second(j.f.Write(b)) }); err == nil && durable {
		err = j.do("fsync", j.f, j.f.Sync)
	}
	if err == nil {
		j.end += int64(len(b))
		return nil
	}
	if cut := j.do("ftruncate", j.f, func() error { return j.f.Truncate(j.end) }); cut != nil {
		j.poison = fmt.Errorf("%w; cutting it off again: %w; nothing is recorded any more", err, cut)
	}
	j.f.Close()
	j.f = nil
	return cmp.Or(j.poison, err)
}

func second(_ int, err error) error { return err }

// create writes a file beside the journal, aside copies the bytes from at on to one, cut moves them there.
func (j *journal) create(suffix string, b []byte) error {
	f, err := openPrivate(j.path+suffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
	defer f.Close()
	return cmp.Or(err, (&journal{do: j.do, path: j.path, f: f}).append(b, true))
}
func (j *journal) aside(why string, at int64) error {
	b, err := io.ReadAll(io.NewSectionReader(j.f, at, j.end-at))
	return cmp.Or(err, j.create("."+why+"-"+time.Now().UTC().Format(fileStamp), b))
}
func (j *journal) cut(at int64) (err error) {
	if err = j.aside("torn", at); err == nil {
		err, j.end = j.do("ftruncate", j.f, func() error { return j.f.Truncate(at) }), at
	}
	return err
}

/* ----- opening and reading ----- */
// Store is the shared state. Its methods may be called from any goroutine.
type Store struct {
	Dir       string
	Retention time.Duration // how long ended sessions and their questions are kept
	now       func() time.Time
	audit     *Audit   // its log is acquired after ours
	log       *journal // its mutex guards what follows
	view      *View
	// read are the bytes of the file that view holds, compactAt those that are worth a compaction.
	read, compactAt int64
	wake            chan struct{}                              // closed when view changes
	older           bool                                       // a record has an earlier schema version
	notes           []string                                   // what was found damaged in the file
	trouble         error                                      // what keeps the audit log or the compaction from working
	watch           func(dir string) (<-chan struct{}, func()) // watchFolder, or a test's own
	// held are our locks by name (*os.File), secrets what was given and not yet taken by prompt (string).
	held, secrets sync.Map
}

func openStore(dir string) (*Store, error) {
	return openStoreWith(dir, func(_ string, _ *os.File, call func() error) error { return call() })
}
func openStoreWith(dir string, do files) (*Store, error) {
	s := &Store{Dir: dir, Retention: retention, now: time.Now, view: viewOf(nil), wake: make(chan struct{}),
		watch: watchFolder,
		log:   &journal{do: do, path: filepath.Join(dir, "state.jsonl")}}
	s.audit = &Audit{log: &journal{do: do, path: filepath.Join(dir, "audit.log")}, lock: s.lockAudit, note: s.noteHead}
	err := cmp.Or(secureDir(dir), secureDir(filepath.Join(dir, "sessions")))
	if err == nil {
		err = s.begin()
		defer s.log.release()
	}
	if err == nil && s.older {
		err = s.compact()
	}
	return s, err
}

// Audit is the log that every change goes to. Trouble is what keeps the store from its duties at present. View is the
// state as it is now; where it cannot be read any more, as it was, with an error. Close gives back files and locks.
func (s *Store) Audit() *Audit { return s.audit }
func (s *Store) Trouble() error {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	return cmp.Or(s.log.poison, s.trouble)
}
func (s *Store) View() (*View, error) {
	defer s.log.release()
	err := s.begin()
	return viewOf(s.view.records), err
}
func (s *Store) Close() {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.held.Range(func(_, lock any) bool { return lock.(*os.File).Close() == nil })
	_ = errors.Join(s.log.f.Close(), s.log.lock.Close(), s.audit.log.f.Close(), s.audit.log.lock.Close())
}

// begin acquires the log and reads what others appended, not when it is poisoned: then its last line failed.
func (s *Store) begin() error {
	err := s.log.acquire()
	if err != nil || s.log.poison != nil || !s.log.anew && s.log.end == s.read {
		return err
	}
	if s.log.anew || s.log.end < s.read {
		s.view, s.read, s.compactAt, s.older, s.notes = viewOf(nil), 0, compactMin, false, nil
	}
	b := make([]byte, s.log.end-s.read)
	if _, err = s.log.f.ReadAt(b, s.read); err != nil {
		return err
	}
	return s.take(b)
}

// take brings the view up to the last complete line in b, and s.read behind it. Every line is checked, the last sound
// one of an id decoded, on all processors. A question whose newest line is damaged has failed: what it said is unknown.
func (s *Store) take(b []byte) (err error) {
	texts, first, live := bytes.SplitAfter(b, []byte("\n")), s.read == 0, 0
	lines, last := make([]stateLine, len(texts)-1), map[string]int{}
	for i := range lines {
		if lines[i] = parse(texts[i]); lines[i].V > schemaVersion && lines[i].err == nil {
			return fmt.Errorf("state.jsonl was written by a newer atlasbridge (schema %d): update this one", lines[i].V)
		} else if lines[i].err == nil {
			last[lines[i].key()] = i
		}
	}
	all, newest := sync.WaitGroup{}, slices.Collect(maps.Values(last))
	decode := func(share []int) {
		for _, i := range share {
			lines[i].decode(texts[i])
		}
	}
	for n := len(newest)/runtime.GOMAXPROCS(0) + 100; len(newest) > n; newest = newest[n:] { // a few are done here
		share := newest[:n]
		all.Go(func() { decode(share) })
	}
	decode(newest)
	all.Wait()
	for i, l := range lines {
		s.read += int64(len(texts[i]))
		if l.err != nil {
			s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a damaged line (%v): %.60q…", l.err, texts[i]))
		}
		p, ok := l.record.(*PromptRecord)
		if was := s.view.Prompts[l.ID]; l.err != nil && l.Rec == "prompt" && was != nil {
			q := *was
			q.Status, q.NonceUsed, q.Reason, q.At = Failed, true, damaged, s.now().UTC()
			l.record = &q
		} else if ok && p.over() && s.now().Sub(p.At) > updateLife {
			p.Full, p.Recent = "", "" // nobody asks for them any more; the next compaction leaves them out
		}
		if l.record != nil {
			s.view.put(l.record)
			s.older, live = s.older || l.V < schemaVersion, live+len(texts[i])
		}
	}
	close(s.wake)
	s.wake = make(chan struct{})
	if torn := s.log.end - s.read; torn > 0 {
		s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a torn end of %d bytes was moved aside", torn))
		err = s.log.cut(s.read)
	}
	if first { // what is to be forgotten goes with the next write
		old := func(r Record) bool { return s.now().Sub(r.head().At) > s.Retention && !s.keep(r) }
		stale := slices.ContainsFunc(slices.Collect(maps.Values(s.view.records)), old)
		s.compactAt = when(!stale, max(compactMin, int64(compactFactor*live)))
	}
	return err
}

// stamps finds the times that encoding/json wrote, without the zeros at their end; marshal gives them six decimals.
var stamps = regexp.MustCompile(`at":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return stamps.ReplaceAllFunc(bytes.TrimSuffix(b.Bytes(), []byte("\n")), func(m []byte) []byte {
		whole, decimals, _ := strings.Cut(strings.TrimSuffix(string(m), `Z"`), ".")
		return []byte(whole + "." + (decimals + "000000")[:6] + `Z"`)
	}), err
}

// encode is the line of a record, seal the checksum at its end. A stateLine is one of the file, as far as it is known.
func encode(r Record) ([]byte, error) {
	b, err := marshal(r)
	b = bytes.TrimSuffix(b, []byte("}"))
	return append(b, seal(b)...), err
}
func seal(open []byte) string {
	return fmt.Sprintf(`,"crc":"%08x"}`+"\n", crc32.Update(crc32.Checksum(open, castagnoli), castagnoli, []byte("}")))
}

type stateLine struct {
	Head          // as it can be read, even of a damaged line
	record Record // once decoded
	err    error  // what is wrong with it
}

// parse checks a line and reads its beginning: {"v":1,"rec":"prompt","id":"…","at":"…
func parse(text []byte) (l stateLine) {
	open := text[:max(0, len(text)-crcMember)]
	f := append(strings.SplitN(string(text[:min(len(text), 200)]), `"`, 11), make([]string, 10)...)
	l.V, _ = strconv.Atoi(strings.Trim(f[2], ":,"))
	if l.Rec, l.ID = f[5], f[9]; string(text[len(open):]) != seal(open) || l.V <= schemaVersion && kinds[l.Rec] == nil {
		l.err = errors.New("its checksum does not match")
	}
	return l
}
func (l *stateLine) decode(text []byte) {
	r := kinds[l.Rec]()
	l.err = json.Unmarshal(text, r)
	*r.head() = Head{schemaVersion, l.Rec, l.ID, r.head().At}
	l.record = when(l.err == nil, r)
}

// Update runs fn, which must not call the Store, on the current state under the lock and makes what it returns durable,
// in that order (an UpdateRecord comes last), all or nothing. Audit entries that cannot be written are only Trouble.
func (s *Store) Update(fn func(*View) ([]Record, error)) error {
	var events []Event
	err := s.begin()
	if err == nil {
		events, err = s.write(fn(s.view))
	}
	if len(events) == 0 {
		s.log.release()
		return err
	}
	noted, err := s.handOver(nil)
	s.audit.commit(noted, err, events...)
	return nil
}

// lockAudit acquires the audit log, by way of the state's lock. An error is the audit log's: losing the state never
// costs an entry.
func (s *Store) lockAudit() (noted *MetaRecord, err error) {
	return s.handOver(s.begin())
}

// handOver acquires the audit log and then releases the state, so that both files have the same order, and nobody puts
// the log aside between. It gives the head that the state notes now, nil when there is none or the state is not known.
// What is noted was in the log before, so that a log that does not continue it has lost something.
func (s *Store) handOver(unread error) (noted *MetaRecord, err error) {
	if unread == nil && s.log.poison == nil {
		noted = s.view.Meta["audit"]
	}
	err = s.audit.log.acquire()
	s.log.release()
	return noted, err
}

// write appends recs, but for what an update asks for again: a power cut lost its record. events go to the audit log.
func (s *Store) write(recs []Record, err error) (events []Event, _ error) {
	recs = slices.DeleteFunc(recs, func(r Record) bool {
		in, ok := r.(*InputRecord)
		same := func(was *InputRecord) bool { return was.UpdateID == in.UpdateID && was.ID != in.ID }
		return ok && in.UpdateID != 0 && slices.ContainsFunc(slices.Collect(maps.Values(s.view.Inputs)), same)
	})
	if err != nil || len(recs) == 0 {
		return nil, err
	}
	var lines []byte
	for _, r := range recs {
		kind := strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", r), "*main.")) // such as "sessionrecord"
		h := r.head()
		*h = Head{schemaVersion, strings.TrimSuffix(kind, "record"), h.ID, s.now().UTC().Truncate(time.Microsecond)}
		old := s.view.records[h.key()]
		if old != nil && !h.At.After(old.head().At) {
			h.At = old.head().At.Add(time.Microsecond)
		}
		line, bad := encode(r)
		if err = cmp.Or(s.view.illegal(old, r), bad); err != nil {
			return nil, fmt.Errorf("recording %s: %w", h.key(), err)
		}
		lines, events = append(lines, line...), append(events, auditEvents(old, r)...)
	}
	if err = s.log.append(lines, recs[0].head().key() != "meta audit"); err != nil { // if lost, the next will do
		return nil, fmt.Errorf("recording: %w", err)
	}
	for _, r := range recs {
		s.view.put(r)
	}
	close(s.wake)
	if s.read, s.wake = s.log.end, make(chan struct{}); s.read >= s.compactAt {
		s.compact() // what fails of it is Trouble
	}
	return events, nil
}

// noteHead keeps the audit chain's head in the state; failed is why an entry is not in the chain. A head takes the
// place only of the one that the log was seen to continue: of the one it was compared with before the append, or, when
// other processes have noted theirs since, of what the state notes now. Else the state keeps what it has, and the next
// append finds that the log does not continue it. That a gap was found stays noted, whatever heads follow.
func (s *Store) noteHead(done appended, failed error) {
	defer s.log.release()
	unread := s.begin()
	s.trouble = nil
	if failed != nil {
		s.trouble = fmt.Errorf("the audit log lacks an entry: %w", failed)
		return
	}
	if unread != nil {
		return
	}
	now := s.view.Meta["audit"]
	if headOf(now) != done.noted {
		if done.last.Seq <= headOf(now).Seq {
			return
		}
		last, yes, err := s.audit.continues(headOf(now))
		if err != nil || !yes {
			return
		}
		done = appended{noted: headOf(now), last: last}
	}
	r := &MetaRecord{Head: Head{ID: "audit"}, Seq: done.last.Seq, Hash: done.last.Hash}
	if now != nil {
		r.Values = now.Values
	}
	if done.gap && r.Values["broken"] == "" {
		r.Values = map[string]string{"broken": done.noted.String()}
	}
	_, _ = s.write([]Record{r}, nil) // if lost, the next will do
}

// Move takes a prompt along one legal transition; change may fill in more. If it cannot, a late message id is kept.
func (s *Store) Move(id string, to State, change func(*PromptRecord)) (moved bool, err error) {
	now := s.now().UTC()
	err = s.Update(func(v *View) ([]Record, error) {
		old := cmp.Or(v.Prompts[id], &PromptRecord{})
		p, late := *old, *old // late: it cannot move any more, but a message has come
		if change != nil {
			change(&p)
		}
		p.Status = to
		msg := p.MsgID
		if msg != old.MsgID {
			p.MsgID = old.MsgID
			p.offeredIn(msg)
			late.offeredIn(msg)
			late.ShownAll = p.ShownAll
		}
		if moved = old.Status != to && v.illegal(old, &p) == nil && (to != Expired || !now.Before(old.ExpiresAt)); !moved {
			return when(to == AwaitingReply && msg != old.MsgID && old.ID != "", []Record{&late}), nil
		}
		p.DecidedBy = cmp.Or(when(to == Expired, ref("auto:timeout")), p.DecidedBy)
		if old.Open() && !p.Open() {
			p.NonceUsed, p.DecidedAt = true, cmp.Or(p.DecidedAt, &now)
		}
		reply := &ReplyRecord{Head{ID: id}, id, p.SessionID, *cmp.Or(p.Value, ref("")), replySource(&p), now}
		return append(when(to == Injected, []Record{reply}), &p), nil
	})
	return moved && err == nil, err
}

// offeredIn notes that the message msg, if it is not 0, shows the prompt with buttons. The newest such message becomes
// the prompt's own; the others owe their buttons' removal.
func (p *PromptRecord) offeredIn(msg int64) {
	if msg == 0 {
		return
	}
	replaced := msg
	if msg > p.MsgID {
		replaced = p.MsgID
	}
	asksAgain := p.MsgStatus == Expired
	hasButtons := replaced == msg || p.MsgID != 0 && (p.shownOpen() || asksAgain)
	if msg >= p.MsgID {
		p.MsgID = msg
		p.MsgStatus = ""
	}
	if replaced != p.MsgID && hasButtons && !slices.Contains(p.OldMsgIDs, replaced) {
		p.OldMsgIDs = append(slices.Clone(p.OldMsgIDs), replaced)
	}
}

// shownOpen tells that the prompt's message may have buttons: no outcome has been shown there yet.
func (p *PromptRecord) shownOpen() bool {
	return p.MsgStatus == "" || slices.Contains(next[p.MsgStatus], Canceled)
}

// mayBeAsked tells that the prompt expired with nothing typed, and that its message offers to ask again.
func (p *PromptRecord) mayBeAsked() bool { return p.MsgID != 0 && len(keyboardAfter(p)) > 0 }

// owes tells that a message of the prompt may show what is not so any more.
func (p *PromptRecord) owes() bool {
	unsaid := !p.Open() && p.MsgStatus != p.Status
	return p.MsgID != 0 && (unsaid || len(p.OldMsgIDs) > 0)
}

// Offered records that the message msg has been seen with buttons of the prompt, whatever was known of it.
func (s *Store) Offered(id string, msg int64) error {
	return s.changePrompt(id, func(p *PromptRecord) { p.offeredIn(msg) })
}

// Edited records what an edit has made of the message msg: it has no buttons, and if it is still the prompt's own it
// shows the prompt as it is in that status. After the status "" it may have buttons.
func (s *Store) Edited(id string, msg int64, status State) error {
	return s.changePrompt(id, func(p *PromptRecord) {
		if p.MsgID == msg {
			p.MsgStatus = status
		}
		if status == "" {
			return
		}
		others := []int64{}
		for _, old := range p.OldMsgIDs {
			if old != msg {
				others = append(others, old)
			}
		}
		p.OldMsgIDs = others
	})
}

// changePrompt changes what is known of a prompt's messages; nothing is written where nothing changes.
func (s *Store) changePrompt(id string, change func(*PromptRecord)) error {
	return s.Update(func(v *View) ([]Record, error) {
		old := v.Prompts[id]
		if old == nil {
			return nil, nil
		}
		p := *old
		change(&p)
		if p.MsgID == old.MsgID && p.MsgStatus == old.MsgStatus && slices.Equal(p.OldMsgIDs, old.OldMsgIDs) {
			return nil, nil
		}
		return []Record{&p}, nil
	})
}

// Prompt is one prompt with its session, as they are now; nil where there is none. Both are read only. Where the state
// cannot be read any more they are as they were, with an error.
func (s *Store) Prompt(id string) (*PromptRecord, *SessionRecord, error) {
	defer s.log.release()
	err := s.begin()
	p := s.view.Prompts[id]
	if p == nil {
		return nil, nil, err
	}
	return p, s.view.Sessions[p.SessionID], err
}

// Owed are the prompts that owe an edit, in the order in which that came about. changed is closed by the next change of
// the state that this process reads. With the same changed as before nothing is new, and nothing is looked for.
func (s *Store) Owed(before <-chan struct{}) (owed []*PromptRecord, changed <-chan struct{}, err error) {
	defer s.log.release()
	if err := s.begin(); err != nil {
		return nil, before, err
	}
	if s.wake == before {
		return nil, before, nil
	}
	for _, p := range s.view.Prompts {
		if p.owes() {
			owed = append(owed, p)
		}
	}
	slices.SortFunc(owed, func(a, b *PromptRecord) int { return byTime(a, b) })
	return owed, s.wake, nil
}

// byWhom says who decided, in a message; replySource whose answer was typed, in a record.
func byWhom(by *string) string {
	who := *cmp.Or(by, ref(""))
	return cmp.Or(when(strings.HasPrefix(who, "telegram:"), "on the phone by "+who),
		map[string]string{"": "in the terminal", "cli:local": "at the keyboard", "cli:answer": "with atlasbridge answer",
			"auto:timeout": "by its timeout"}[who], "by "+who)
}
func replySource(p *PromptRecord) string {
	return cmp.Or(when(strings.HasPrefix(*cmp.Or(p.DecidedBy, ref("")), "auto:"), "timeout_default"), "operator")
}

// Decision is an answer on its way to a prompt.
type Decision struct {
	PromptID, SessionID, Nonce string // from the first 8 digits on, the nonce 16; Trusted may leave the session out
	Value                      string // a choice's key, "1,3", "enter" "esc" "cancel" "default", "deny:reason", or text
	By                         string // telegram:<id>, cli:local, cli:answer, auto:timeout, hook:<tool>
	UpdateID                   int64
	Trusted                    bool // by the keyboard, timeout or answer command: no nonce to show
}
type Refusal string // why a decision changed nothing: "" accepted, else one of the sentences a person reads

// Decide gives a prompt its answer, durably, if it is the first and all guards hold; TakeSecret gives a secret, once.
func (s *Store) Decide(d Decision, now time.Time) (p PromptRecord, why Refusal, err error) {
	err = s.Update(func(v *View) ([]Record, error) {
		p = *cmp.Or(v.find(d), &PromptRecord{})
		why = s.guard(v, &p, d, now)
		if why != "" {
			return nil, nil
		}
		value, bad := p.judge(d.Value)
		if bad != "" {
			why = bad
			return nil, nil
		}
		if why = p.unread(*value, d.By); why != "" {
			return nil, nil
		}
		p.Value, p.Status, p.NonceUsed, p.DecidedAt, p.DecidedBy = value, ReplyReceived, true, ref(now.UTC()), &d.By
		if p.Secret {
			s.secrets.Store(p.ID, *p.Value)
			p.Value, p.ValueHidden = nil, true
		} else if *p.Value == leaveIt {
			p.Status, p.Reason = Canceled, "left as it is"
		}
		update := &UpdateRecord{Head{ID: fmt.Sprint(d.UpdateID)}, "decision"}
		return append([]Record{&p}, when(d.UpdateID != 0, []Record{update})...), nil
	})
	if err != nil {
		s.TakeSecret(p.ID)
	}
	return p, why, err
}

func (s *Store) TakeSecret(promptID string) (value string, ok bool) {
	secret, ok := s.secrets.LoadAndDelete(promptID)
	value, _ = secret.(string)
	return value, ok
}

// find is the prompt that the decision names, nil when it names none, or two.
func (v *View) find(d Decision) *PromptRecord {
	names := func(short, id string) bool { return short == id || len(short) >= 8 && strings.HasPrefix(id, short) }
	found := v.which(func(p *PromptRecord) bool {
		return names(d.PromptID, p.ID) && (d.Trusted && d.SessionID == "" || names(d.SessionID, p.SessionID))
	})
	return when(len(found) == 1, append(found, nil)[0])
}

func (s *Store) guard(v *View, p *PromptRecord, d Decision, now time.Time) Refusal {
	nonce := []byte(clipBytes(p.Nonce, len(d.Nonce)))
	shown := len(nonce) >= 16 && subtle.ConstantTimeCompare([]byte(d.Nonce), nonce) == 1
	phone := func(by *string) bool { return by != nil && strings.HasPrefix(*by, "telegram:") }
	clock := func(t time.Time) string { return " at " + t.Local().Format(time.TimeOnly) }
	_, mine := s.held.Load(lockName(p.SessionID))
	recent := len(v.which(func(q *PromptRecord) bool {
		return q.SessionID == p.SessionID && phone(q.DecidedBy) && now.Sub(*q.DecidedAt).Abs() < time.Minute
	}))
	return Refusal(cmp.Or(
		when(p.ID == "", "there is no question "+clip(strconv.Quote(d.PromptID), 40)+" in that session"),
		when(!d.Trusted && !shown, "the answer does not belong to this question"),
		when(p.Reason == damaged, "the question's record is damaged, so it takes no answer any more"),
		when(p.Status == Expired || p.Open() && d.By != "cli:local" && !now.Before(p.ExpiresAt),
			"the question expired"+clock(p.ExpiresAt)),
		when(!p.Open() && p.DecidedBy != nil, "already answered "+byWhom(p.DecidedBy)+clock(*cmp.Or(p.DecidedAt, &now))),
		when(p.Status == Failed || !v.active(p.SessionID), "the question's session has ended"),
		when(!p.Open(), "the question has left the screen"),
		when(p.Status == Created && !d.Trusted, "the question has not been asked yet"),
		when(p.Secret && !mine, "a secret can only be answered at its session's own keyboard"),
		when(phone(&d.By) && recent >= decisionsLimit,
			fmt.Sprintf("%d answers in a minute for this session: wait a little, then answer again", recent))))
}

// Answers that are no choice's key: Enter alone at a question for text, and nothing: the question stays to the
// terminal. No text that is typed can be one of them: both have a control character.
const (
	enterAlone = "\r"
	leaveIt    = "\x1b"
)

// judge says what an answer means for the question: the value to record, or why it is none. A reason given becomes its.
func (p *PromptRecord) judge(given string) (*string, Refusal) {
	word := strings.ToLower(given)
	switch word {
	case "yes":
		word = "y"
	case "no":
		word = "n"
	case "":
		word = "enter"
	}
	hookWords := map[string]string{"y": hookAllow, "n": hookDeny}
	if same, ok := hookWords[word]; ok && p.Source == "hook" && p.Permission {
		word = same
	}
	reason, refused := strings.CutPrefix(given, "deny:")
	leave := leaveIt
	switch {
	case p.Secret:
		return &given, p.text(given)
	case given == "default":
		if p.SafeDefault == nil {
			return nil, "this question has no safe default"
		}
		return p.SafeDefault, ""
	case refused && p.Permission:
		p.Reason = cmp.Or(reason, p.Reason)
		deny := p.denial()
		return &deny, p.text(reason)
	case given == leaveIt && p.canBeLeft(), given == "cancel" && p.ambiguous():
		return &leave, ""
	case given == enterAlone && (p.Type == FreeText && !p.Idle || p.ambiguous()):
		return &given, ""
	case p.offered(given):
		return &given, ""
	case p.Type != FreeText && p.offered(word):
		return &word, ""
	case p.byLabel(given) != "":
		key := p.byLabel(given)
		return &key, ""
	case p.Type == FreeText || p.Type == Unknown || p.MaxLength > 0 && !p.Permission:
		return &given, p.text(given)
	}
	return nil, Refusal("not an answer to this question: " + clip(strconv.Quote(given), 40) + "; it takes " + p.takes())
}

// denial is the value that refuses a permission: a hook's own, the choice that is known to refuse, else Escape.
func (p *PromptRecord) denial() string {
	if p.Source == "hook" {
		return hookDeny
	}
	for _, c := range p.Choices {
		if reRefuses.MatchString(c.Label) {
			return c.Key
		}
	}
	return "esc"
}

// byLabel is the key of the choice with these words, "" without one.
func (p *PromptRecord) byLabel(words string) string {
	for _, c := range p.Choices {
		if strings.EqualFold(c.Label, words) {
			return c.Key
		}
	}
	return ""
}

// refuses tells whether a value, as judge gives it, refuses or leaves the question as it is: it may be chosen though
// not all was shown.
func (p *PromptRecord) refuses(value string) bool {
	switch value {
	case leaveIt, "esc", "cancel", hookDeny:
		return true
	case "n":
		return p.Type == YesNo || reRefuses.MatchString(p.label("n"))
	}
	label := p.label(value)
	return label != "" && !p.Multi && reRefuses.MatchString(label)
}

// unread refuses an answer to what the one who gives it cannot have read: from the phone all must have been shown
// there; what is not known here at all can only be answered at the session's own keyboard. An answer that refuses is
// taken.
func (p *PromptRecord) unread(value, by string) Refusal {
	if p.Idle || p.Secret || p.refuses(value) || by == "cli:local" {
		return ""
	}
	if p.Cut {
		return "part of what it asks is not known here: it can only be answered at the keyboard, or refused"
	}
	if strings.HasPrefix(by, "telegram:") && !p.ShownAll {
		return "not all of it was shown: tap Show all, then answer there"
	}
	return ""
}

// takes names the answers for a person, answers those that one button could send, the choices' keys first; offered also
// takes several choices. ambiguous: the ambiguity protocol (SPEC 6) asks: Send Enter, Cancel, or show more. text checks
// an answer that is typed as it is: control characters would be keys.
func (p *PromptRecord) takes() string { return cmp.Or(strings.Join(p.answers(), " "), "text") }
func (p *PromptRecord) answers() []string {
	var all []string
	for _, c := range p.Choices {
		all = append(all, c.Key)
	}
	if p.Type == YesNo && len(p.Choices) == 0 {
		all = append(all, "y", "n")
	}
	if p.ambiguous() || p.Type == ConfirmEnter {
		all = append(all, "enter")
	}
	esc := p.Permission && p.Source != "hook" || p.SafeDefault != nil && *p.SafeDefault == "esc"
	if p.ambiguous() || esc {
		all = append(all, "esc")
	}
	if p.ambiguous() {
		all = append(all, "cancel")
	}
	return slices.Compact(all)
}

// canBeLeft tells whether the operator can leave the question to the terminal: where nothing refuses it.
func (p *PromptRecord) canBeLeft() bool {
	return p.ambiguous() || p.Type == FreeText && !p.Idle && !p.Secret
}
func (p *PromptRecord) offered(value string) bool {
	all, keys := p.answers(), strings.Split(value, ",")
	for i, k := range keys {
		if n := slices.Index(all, k); n < 0 || n >= len(p.Choices) && len(keys) > 1 || slices.Contains(keys[:i], k) {
			return false
		}
	}
	return len(keys) == 1 || p.Multi
}
func (p *PromptRecord) ambiguous() bool {
	return p.Type == Unknown || p.Confidence == "low" || p.Confidence == "medium" && !slices.Contains(p.Signals, "pattern")
}
func (p *PromptRecord) text(s string) Refusal {
	control := func(r rune) bool { return r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 || r == '\uFFFD' }
	limit := cmp.Or(p.MaxLength, maxText)
	return Refusal(cmp.Or(when(len(s) > limit, fmt.Sprintf("the answer has %d bytes, %d are allowed", len(s), limit)),
		when(strings.ContainsFunc(s, control), "the answer has control characters in it")))
}

// Follow sends the session's prompts and inputs as they are, for a tool's first hook may be faster than us, and as they
// change. Where the system does not tell of changes, it looks at 20 Hz when fast() (a question is open), else at 2 Hz.
func (s *Store) Follow(ctx context.Context, sessionID string, fast func() bool) <-chan Record {
	out, seen := make(chan Record), map[string]time.Time{}
	look := func() (recs []Record, wake <-chan struct{}) { // wake: closed by the next change
		defer s.log.release()
		s.begin() // it fails for everybody, and others tell of it
		for key, r := range s.view.records {
			p, _ := r.(*PromptRecord)
			in, _ := r.(*InputRecord)
			ours := p != nil && p.SessionID == sessionID || in != nil && in.SessionID == sessionID
			if at := r.head().At; ours && at.After(seen[key]) {
				recs, seen[key] = append(recs, r), at
			}
		}
		return slices.SortedFunc(slices.Values(recs), byTime), s.wake
	}
	go func() {
		defer close(out)
		var changed <-chan struct{}
		start, stop := time.Now(), func() {}
		for ctx.Err() == nil {
			if changed == nil && time.Since(start) > time.Second { // ending a watch costs Linux 18 ms
				changed, stop = s.watch(s.Dir)
			}
			recs, wake := look()
			for _, r := range recs {
				select {
				case out <- r:
				case <-ctx.Done():
				}
			}
			often := when(fast != nil && fast(), 50*time.Millisecond)
			select {
			case <-wake:
			case <-changed:
			case <-time.After(cmp.Or(when(changed != nil, 5*time.Second), often, 500*time.Millisecond)):
			case <-ctx.Done():
			}
		}
		stop()
	}()
	return out
}

// keep tells whether a compaction keeps the record: it is alive, or not old. compact puts the new file in place; after
// an error the old one is still the state.
func (s *Store) keep(r Record) bool {
	h, v, p := r.head(), s.view, cmp.Or(s.view.Prompts[r.head().ID], &PromptRecord{})
	alive := map[string]bool{"meta": true, "session": v.active(h.ID), "prompt": !p.over() && v.active(p.SessionID)}
	life := map[string]time.Duration{"update": updateLife, "input": updateLife}
	return alive[h.Rec] || s.now().Sub(h.At) < cmp.Or(life[h.Rec], s.Retention)
}
func (s *Store) compact() (err error) {
	var out []byte
	for _, r := range slices.SortedFunc(maps.Values(s.view.records), byTime) {
		line, bad := encode(r)
		out, err = append(out, when(s.keep(r), line)...), cmp.Or(err, bad)
	}
	if err == nil && (s.older || len(s.notes) > 0) {
		err = s.log.aside("backup", 0)
	}
	if err = cmp.Or(err, s.log.create(".new", out)); err == nil {
		err = s.log.do("rename", nil, func() error { return os.Rename(s.log.path+".new", s.log.path) })
	}
	if err != nil {
		s.trouble, s.compactAt = fmt.Errorf("compacting the state: %w", err), 2*s.read
	}
	return err
}

// HoldSession comes before the session's record: an active one whose lock is free is dead. TryPoll takes a free lock;
// Polled says that its holder listens. stalled is trouble with one that does not: it is stopped, or hangs.
func (s *Store) HoldSession(id string) (release func(), err error) { return s.hold(lockName(id)) }
func (s *Store) Polled() error {
	return os.Chtimes(filepath.Join(s.Dir, "poll.lock"), s.now(), s.now())
}
func (s *Store) TryPoll() (release func(), held bool, err error) {
	release, err = s.hold("poll.lock")
	return release, err == nil, cmp.Or(when(!errors.Is(err, errLocked), err), s.stalled())
}
func (s *Store) stalled() error {
	info, err := os.Stat(filepath.Join(s.Dir, "poll.lock"))
	if err != nil || s.now().Sub(info.ModTime()) < pollSilence || s.holder("poll.lock") == 0 {
		return nil
	}
	pid := s.holder("poll.lock")
	return hinted(fmt.Errorf("process %d does not listen to Telegram, though it is its turn", pid),
		fmt.Sprintf("is it stopped? kill -CONT %d, or end it", pid))
}
func (s *Store) hold(name string) (release func(), err error) {
	f, err := openPrivate(filepath.Join(s.Dir, name), os.O_RDWR|os.O_CREATE)
	if err = cmp.Or(err, lockFile(f, false)); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", name, err)
	}
	f.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0)
	s.held.Store(name, f)
	return func() {
		s.held.Delete(name)
		if f.Close(); name != "poll.lock" { // nobody takes the lock of a session that has ended
			os.Remove(f.Name())
		}
	}, nil
}

// holder is the pid in a lock file, −1 when it cannot be read; 0 only when the lock is surely free.
func (s *Store) holder(name string) int {
	pid := -1
	f, err := os.OpenFile(filepath.Join(s.Dir, name), os.O_RDWR, 0)
	defer f.Close()
	fmt.Fscan(f, &pid)
	free := errors.Is(err, os.ErrNotExist) || cmp.Or(err, lockFile(f, false)) == nil
	return when(!free, pid)
}
func (s *Store) Alive(id string) bool { return s.holder(lockName(id)) != 0 }
func lockName(session string) string  { return "sessions/" + session + ".lock" }

// Reap marks dead sessions as crashed and fails their prompts; it returns those whose messages are to be edited.
func (s *Store) Reap(now time.Time) (sessions []*SessionRecord, prompts []*PromptRecord, err error) {
	err = s.Update(func(v *View) (recs []Record, _ error) {
		dead := map[string]bool{}
		for id, r := range v.Sessions {
			q := *r
			if dead[id] = q.Status != "active" || !s.Alive(id); dead[id] && q.Status == "active" {
				q.Status, q.Activity, q.EndedAt = "crashed", "", ref(now.UTC())
				sessions, recs = append(sessions, &q), append(recs, &q)
				os.Remove(filepath.Join(s.Dir, lockName(id)))
			}
		}
		for _, p := range v.which(func(p *PromptRecord) bool { return dead[p.SessionID] && (!p.over() || p.mayBeAsked()) }) {
			q := *p
			q.Status, q.NonceUsed, q.Reason = Failed, true, "the session ended: whether the answer was typed is uncertain"
			switch {
			case p.Open():
				q.Reason = "the session ended before it was answered"
			case p.mayBeAsked():
				q.Reason = p.Reason + ", and the session has ended"
			}
			prompts, recs = append(prompts, &q), append(recs, &q)
		}
		return recs, nil
	})
	return sessions, prompts, err
}

// newID is a random UUID (version 4, RFC 9562 section 5.4), newNonce 32 hex digits that nobody can guess.
func newID() string {
	x := newNonce()
	return fmt.Sprintf("%s-%s-4%s-%c%s-%s", x[:8], x[8:12], x[13:16], "89ab"[x[16]&3], x[17:20], x[20:])
}
func newNonce() string         { return digest([]byte(rand.Text()))[len("sha256:"):][:32] }
func shortID(id string) string { return id[:min(8, len(id))] } // as people and callback data have it
func ref[T any](v T) *T        { return &v }

/* ----- status, approvals, answer ----- */
// withState opens the state for a command, and reports what is damaged.
func (c *command) withState(do func(*Store) int) int {
	var s *Store
	dir, err := stateDir(c.getenv)
	if err == nil {
		s, err = openStore(dir)
	}
	if err != nil {
		return c.fail(err)
	}
	defer s.Close()
	fmt.Fprint(c.stderr, strings.Join(mapped(s.notes, func(n string) string { return "atlasbridge: " + n + "\n" }), ""))
	return do(s)
}

// list prints records as a table, or as one array with the files' time format; none says that there are none.
func (c *command) list(records any, table [][]string, none string) int {
	array, _ := marshal(records) // plain data: cannot fail
	fmt.Fprint(c.stderr, when(len(table) == 1 && !c.opts.on("json"), none+"\n"))
	return c.show(json.RawMessage(array), table)
}
func span(d time.Duration) string {
	return regexp.MustCompile(`m\d+s$`).ReplaceAllString(max(d, 0).Truncate(time.Second).String(), "m")
}

func cmdConfig(c *command) int {
	cfg, err := c.config(nil)
	if err != nil {
		return c.fail(err)
	}
	rows := mapped(cfg.inForce, func(s setting) []string { return []string{s.Key, string(s.Value), s.Origin} })
	return c.show(cfg.inForce, append([][]string{{"SETTING", "VALUE", "FROM"}}, rows...))
}

// status lists sessions, and orphans: children that run on though their session is over, by pid and start time.
func cmdStatus(c *command) int { return c.withState(c.status) }

func (c *command) status(s *Store) int {
	type row struct {
		*SessionRecord
		Open  int  `json:"open_prompts"`
		Polls bool `json:"polls"` // listens to Telegram for all sessions
	}
	poller, now, rows := s.holder("poll.lock"), time.Now(), []row{}
	about := when(poller != 0, [][]string{{fmt.Sprintf("process %d listens to Telegram", poller)}})
	for id, r := range s.view.Sessions {
		q := *r
		if q.Status == "active" && !s.Alive(id) {
			q.Status, q.Activity = "crashed", ""
		}
		if q.Status == "active" || c.opts.on("all") {
			open := s.view.which(func(p *PromptRecord) bool { return p.Open() && p.SessionID == id })
			rows = append(rows, row{&q, len(open), poller > 0 && q.Wrapper == poller})
		}
		if q.Status != "active" && q.PIDStart != 0 && processStart(q.PID) == q.PIDStart {
			orphan := fmt.Sprintf("session %s is over but its process still runs: kill %d", shortID(id), q.PID)
			about = append(about, []string{orphan})
		}
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(strings.Compare(a.Status, b.Status), b.StartedAt.Compare(a.StartedAt)) // "active" sorts first
	})
	table := append([][]string{{"SESSION", "PID", "STATE", "UP", "OPEN", "ASKED", "OUTPUT", "TOOL"}},
		mapped(rows, func(r row) []string {
			up, seen := cmp.Or(r.EndedAt, &now).Sub(r.StartedAt), now.Sub(*cmp.Or(r.LastSeen, &r.StartedAt))
			return []string{shortID(r.ID), fmt.Sprint(r.PID), cmp.Or(r.Activity, r.Status), span(up), fmt.Sprint(r.Open),
				fmt.Sprint(r.Prompts), span(seen) + " ago", r.Tool + " " + r.Label}
		})...)
	return c.list(rows, append(table, about...), "no sessions; start one: atlasbridge run <tool>")
}

func cmdApprovals(c *command) int {
	return c.withState(func(s *Store) int {
		open := s.view.which(func(p *PromptRecord) bool {
			return p.Open() && s.view.active(p.SessionID) && time.Until(p.ExpiresAt) > 0
		})
		slices.SortFunc(open, func(a, b *PromptRecord) int { return a.ExpiresAt.Compare(b.ExpiresAt) })
		head := [][]string{{"PROMPT", "SESSION", "LEFT", "ANSWERS", "QUESTION"}}
		table := append(head, mapped(open, func(p *PromptRecord) []string {
			r, question := s.view.Sessions[p.SessionID], strings.ReplaceAll(cmp.Or(p.Question, p.Excerpt), "\n", " ")
			return []string{shortID(p.ID), clip(cmp.Or(r.Label, r.Tool), 16), span(time.Until(p.ExpiresAt)),
				clip(p.takes(), 24), question}
		})...)
		return c.list(open, table, "no open questions")
	})
}

func cmdAnswer(c *command) int { return c.withState(c.answer) }

// answer gives a question its answer from this terminal. What runs inside a session gives none.
func (c *command) answer(s *Store) int {
	d := Decision{PromptID: c.opts.args[0], Value: c.opts.args[1], By: "cli:answer", Trusted: true}
	if session := s.inside(c.getenv("ATLASBRIDGE_SESSION")); session != "" {
		asked := PromptRecord{SessionID: session}
		if p := s.view.find(d); p != nil {
			asked = *p
		}
		err := insideError(session, asked.SessionID)
		s.rejected(asked, err.Error(), d.By)
		return c.fail(err)
	}
	if _, _, err := s.Reap(time.Now()); err != nil { // who is dead takes no answer
		return c.fail(err)
	}
	p, why, err := s.Decide(d, time.Now())
	if err != nil {
		return c.fail(err)
	}
	if why != "" {
		s.rejected(p, string(why), d.By)
		return c.fail(hinted(errors.New(string(why)), "atlasbridge approvals lists the open questions"))
	}
	if err := s.Trouble(); err != nil {
		return c.fail(err)
	}
	fmt.Fprintln(c.stdout, "answered", shortID(p.ID))
	return 0
}

// rejected audits an answer that was not taken; that this fails is Trouble, and the answer is not taken all the same.
func (s *Store) rejected(p PromptRecord, why, by string) {
	fields := []Field{{"reason", why}, {"by", by}}
	_ = s.audit.Append(Event{"REPLY_REJECTED", p.SessionID, p.ID, fields})
}

// insideError says that a program of that session is not the one to answer, when asked is the session of the question.
func insideError(session, asked string) error {
	err := fmt.Errorf("this runs inside the session %s: what runs there does not answer, nor touch the log",
		shortID(session))
	if session == asked {
		err = errors.New("this runs inside the session that is asked about: the one who is asked does not answer")
	}
	return hinted(err, "use a terminal that was not started there, the session's own keyboard, or the phone")
}

// inside is the session in whose process tree this process runs, "" for none. Any session counts, not only the one that
// is asked about: an agent that answers for another is no person either. Three marks tell, each of which alone outlives
// something that a program does to get away from the others:
//
//   - a parent, or parent's parent …, is the session's tool or its wrapper: outlives setsid and a changed environment
//   - the environment, of which env is ATLASBRIDGE_SESSION, names it: outlives setsid and a parent that has ended
//   - it is in the tool's session of the system, and so on its terminal: outlives a changed environment, and a parent
//     that has ended (not on Windows, which has no such sessions)
//
// A program that undoes all three is not found; one that goes that far can as well write state.jsonl. A wrapper counts
// while it lives, the tool for as long as it runs, even where its wrapper was killed.
func (s *Store) inside(env string) string {
	ancestors := ancestorsOf(os.Getpid())
	system := systemSession()
	for id, r := range s.view.Sessions {
		toolAbove := slices.Contains(ancestors, r.PID)
		wrapperAbove := slices.Contains(ancestors, r.Wrapper)
		together := env == id || system != 0 && system == r.PID
		if !toolAbove && !wrapperAbove && !together {
			continue
		}
		toolRuns := r.PIDStart != 0 && processStart(r.PID) == r.PIDStart
		if toolRuns && (toolAbove || together) {
			return id
		}
		bridged := r.Status == "active" && s.Alive(id)
		if bridged && (wrapperAbove || together) {
			return id
		}
	}
	return ""
}

// ancestorsOf are the pids of a process's parent, that one's parent and so on, as far as the system tells.
func ancestorsOf(pid int) (pids []int) {
	const enough = 1000 // deeper than any tree, should the system name a circle
	for len(pids) < enough {
		pid = parentOf(pid)
		if pid == 0 {
			break
		}
		pids = append(pids, pid)
	}
	return pids
}
