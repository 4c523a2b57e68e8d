package main

import (
	"context"
	"errors"
	"time"
)

// State is a prompt's state, SPEC section 6.
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

// Record is one line of state.jsonl: *SessionRecord, *PromptRecord, *ReplyRecord, *InputRecord, *UpdateRecord, *MetaRecord.
type Record interface{ key() (rec, id string) }

// Head is what every record begins with.
type Head struct {
	V   int       `json:"v"`
	Rec string    `json:"rec"`
	ID  string    `json:"id"`
	At  time.Time `json:"at"` // RFC 3339 UTC, exactly six decimals: the store's own marshalling
}

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
}

type PromptRecord struct {
	Head
	SessionID   string     `json:"session_id"`
	Type        PromptType `json:"type"`
	Confidence  string     `json:"confidence"`
	Score       float64    `json:"score"`
	Excerpt     string     `json:"excerpt"`
	Question    string     `json:"question"`
	Full        string     `json:"full"`
	Recent      string     `json:"recent"`
	Cut         bool       `json:"cut"`
	Choices     []Choice   `json:"choices"`
	SafeDefault *string    `json:"safe_default"`
	Idle        bool       `json:"idle"`
	Secret      bool       `json:"secret"`
	Permission  bool       `json:"permission"`
	Multi       bool       `json:"multi"`
	MaxLength   int        `json:"max_length"` // of a text answer, bytes
	Signals     []string   `json:"signals"`
	Source      string     `json:"source"` // "screen" or "hook"
	Tool        string     `json:"tool"`   // hook: the tool's name for what it wants to use ("Bash"); else ""
	Cwd         string     `json:"cwd"`
	Key         string     `json:"idempotency_key"`
	Fingerprint string     `json:"fingerprint"`
	Status      State      `json:"status"`
	Nonce       string     `json:"nonce"` // 32 hex
	NonceUsed   bool       `json:"nonce_used"`
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   time.Time  `json:"expires_at"`
	DecidedAt   *time.Time `json:"decided_at"`
	DecidedBy   *string    `json:"decided_by"`
	Value       *string    `json:"value"`
	MsgID       int64      `json:"telegram_msg_id"`
	Reason      string     `json:"reason"` // why failed or canceled; the operator's reason for a refusal
}

type ReplyRecord struct {
	Head
	PromptID   string    `json:"prompt_id"`
	SessionID  string    `json:"session_id"`
	Value      string    `json:"value"`
	Source     string    `json:"source"` // operator, timeout_default
	InjectedAt time.Time `json:"injected_at"`
}

// InputRecord is what the phone asks of a session another process may own.
type InputRecord struct {
	Head
	SessionID string `json:"session_id"`
	Kind      string `json:"kind"` // text keys screen last cancel show_all show_recent
	By        string `json:"by"`
	Text      string `json:"text"`
	UpdateID  int64  `json:"update_id"`
	ReplyTo   int64  `json:"reply_to"` // the message to answer
	PromptID  string `json:"prompt_id"`
	Status    string `json:"status"` // queued done refused
	Reason    string `json:"reason"`
}

type UpdateRecord struct {
	Head
	Kind string `json:"kind"`
}

// MetaRecord holds single facts by id: "audit" (head of the chain), "telegram" (offset, claim, poller).
type MetaRecord struct {
	Head
	Seq    int64             `json:"seq"`
	Hash   string            `json:"hash"`
	Values map[string]string `json:"values"`
}

// View is the state as read: the last record of every id. Read only.
type View struct {
	Sessions map[string]*SessionRecord
	Prompts  map[string]*PromptRecord
	Inputs   map[string]*InputRecord
	Replies  map[string]*ReplyRecord
	Updates  map[string]*UpdateRecord
	Meta     map[string]*MetaRecord
}

// Decision is an answer on its way to a prompt.
type Decision struct {
	PromptID  string
	SessionID string
	Nonce     string
	Value     string // a choice's key, "enter", "esc", "default", or text; "deny:reason" for a refusal with a reason
	By        string // telegram:<id>, cli:local, cli:answer, auto:timeout, hook:<tool>
	UpdateID  int64
	Trusted   bool // by the keyboard, timeout or answer command: no nonce to show
}

// Refusal is why a decision changed nothing: "" accepted, else one of the sentences a person reads.
type Refusal string

type Store struct{ Dir string }

func openStore(dir string) (*Store, error) { return nil, errors.New("stub") }
func (s *Store) View() (*View, error)      { return nil, errors.New("stub") }

// Update runs fn on the current state under the lock and makes what it returns durable, all or nothing.
func (s *Store) Update(fn func(*View) ([]Record, error)) error { return errors.New("stub") }

// Move takes a prompt along one legal transition; change may fill in more fields. false: the guard failed, nothing changed.
func (s *Store) Move(id string, to State, change func(*PromptRecord)) (bool, error) {
	return false, errors.New("stub")
}
func (s *Store) Decide(d Decision, now time.Time) (PromptRecord, Refusal, error) {
	return PromptRecord{}, "", errors.New("stub")
}

// Follow sends prompt and input records of the session as they change, by whichever process. fast() says
// whether a question is open (20 Hz) or not (2 Hz) where the system cannot tell of changes by itself.
func (s *Store) Follow(ctx context.Context, sessionID string, fast func() bool) <-chan Record {
	return nil
}

// HoldSession takes sessions/<id>.lock for the life of the process.
func (s *Store) HoldSession(id string) (release func(), err error) { return nil, errors.New("stub") }

// TryPoll takes poll.lock if it is free.
func (s *Store) TryPoll() (release func(), held bool, err error) {
	return nil, false, errors.New("stub")
}

// Reap marks sessions whose lock can be taken as crashed and fails their prompts; it returns the prompts
// whose messages are to be edited.
func (s *Store) Reap(now time.Time) ([]*SessionRecord, []*PromptRecord, error) {
	return nil, nil, errors.New("stub")
}
func (s *Store) Audit() *Audit { return nil }

func newID() string    { return "" } // UUID v4
func newNonce() string { return "" } // 32 hex

// shortID is the first 8 hex digits, as shown to people and in callback data.
func shortID(id string) string { return "" }

func cmdStatus(c *command) int    { return 0 }
func cmdApprovals(c *command) int { return 0 }
func cmdAnswer(c *command) int    { return 0 }

func (s *Store) Touch(id string, now time.Time) {}
func (s *Store) Alive(id string) bool           { return true }
