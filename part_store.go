// The store keeps state.jsonl: every session, question and answer, shared by all atlasbridge processes.
//
// One line is one record as it is after a change, {"v":1,"rec":…,"id":…,"at":…, …,"crc":"8 hex"}; the last line
// with a rec and id is the truth. A line counts if and only if (1) it ends in a newline, (2) crc is the CRC-32C
// of the line without its crc member and newline, (3) the lines that its member "more" promises follow. Fields
// have the order of the structs below; times are RFC 3339 in UTC with microseconds.
//
// Writing: the lock on state.lock (never renamed) is held from reading what others appended to the fsync of
// what follows from it. One Update is one write. When it or its fsync fails, the file is cut back to what it
// was; when that fails too, this process never writes again. So whoever holds the lock sees complete lines,
// and after a crash an Update is there as a whole or not at all.
//
// A crash can leave a torn tail: bytes after the last newline, or an Update whose last lines are missing. Its
// bytes are moved to state.jsonl.torn-TIME. A damaged line elsewhere stays where it is and is reported by
// Damage; compaction moves it to state.jsonl.damaged. The prompt that it names is not answered any more.
//
// Compaction writes the records worth keeping to a new file, fsyncs it, renames it and fsyncs the folder. Other
// processes notice that the path is another file and read it from its start. What is kept: what is alive, and
// what ended less than the retention time ago; answered questions stay for at least a day after they expire, so that
// their nonces are known for as long as Telegram can repeat a tap.
//
// Every change of a prompt's or session's status is followed by its entry in audit.log, in the same order. The
// chain's head is kept here without an fsync of its own: the next change carries it to the disk, and a head
// that is some entries old still shows any tampering before it.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	schemaVersion  = 1
	compactMin     = 256 << 10           // bytes: a smaller file opens in a few milliseconds anyway (measured)
	compactFactor  = 3                   // times what compaction would keep: each byte is rewritten once per two appended
	updateLife     = 48 * time.Hour      // the Bot API keeps updates for 24 h: https://core.telegram.org/bots/api#getting-updates
	retention      = 30 * 24 * time.Hour // default of retention_days
	decisionsLimit = 10                  // answers by phone per session and decisionsSpan (SPEC section 8)
	decisionsSpan  = time.Minute
	maxText        = 200  // bytes of a text answer when the prompt does not say (source 2, 3.3)
	maxIdleText    = 4096 // bytes of a message for an idle agent: one Telegram message
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

// next is the whole life of a prompt: Update accepts nothing else. An open question that was answered at the
// keyboard, or left the screen, is resolved without a reply; a phone's tap can be faster than the record that
// its message was delivered.
var next = map[State][]State{
	"":            {Created},
	Created:       {Routed, ReplyReceived, Resolved, Expired, Canceled, Failed},
	Routed:        {AwaitingReply, ReplyReceived, Resolved, Expired, Canceled, Failed},
	AwaitingReply: {ReplyReceived, Resolved, Expired, Canceled, Failed},
	ReplyReceived: {Injected, Resolved, Failed},
	Injected:      {Resolved, Failed},
	Expired:       {Injected, Resolved, Failed},
	Canceled:      {},
	Failed:        {},
	Resolved:      {},
}

// open tells whether the prompt waits for an answer.
func (p *PromptRecord) open() bool {
	return p.Status == Created || p.Status == Routed || p.Status == AwaitingReply
}

// Record is one line of state.jsonl: *SessionRecord, *PromptRecord, *ReplyRecord, *InputRecord, *UpdateRecord, *MetaRecord.
type Record interface {
	key() (rec, id string)
	head() *Head
}

// Head is what every record begins with.
type Head struct {
	V   int       `json:"v"`
	Rec string    `json:"rec"`
	ID  string    `json:"id"`
	At  time.Time `json:"at"` // of this change; later than that of the record's line before

	More int `json:"more,omitempty"` // how many lines of the same Update follow this one

	size int // bytes of the line, newline included
}

func (h *Head) head() *Head           { return h }
func (h *Head) key() (rec, id string) { return h.Rec, h.ID }

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
	ValueHidden bool       `json:"value_hidden"` // a secret was given: Store.TakeSecret has it, no file does
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

// View is the state as read: the last record of every id. Read only: a change is a changed copy, given to Update.
type View struct {
	Sessions map[string]*SessionRecord
	Prompts  map[string]*PromptRecord
	Inputs   map[string]*InputRecord
	Replies  map[string]*ReplyRecord
	Updates  map[string]*UpdateRecord
	Meta     map[string]*MetaRecord

	records  map[string]Record // all of them, by kind and id
	doubtful map[string]bool   // records whose newest line may be a damaged one
}

func newView() *View {
	return &View{map[string]*SessionRecord{}, map[string]*PromptRecord{}, map[string]*InputRecord{},
		map[string]*ReplyRecord{}, map[string]*UpdateRecord{}, map[string]*MetaRecord{}, map[string]Record{},
		map[string]bool{}}
}

// clone is a view of its own: the maps are copied, the records shared.
func (v *View) clone() *View {
	return &View{maps.Clone(v.Sessions), maps.Clone(v.Prompts), maps.Clone(v.Inputs), maps.Clone(v.Replies),
		maps.Clone(v.Updates), maps.Clone(v.Meta), maps.Clone(v.records), maps.Clone(v.doubtful)}
}

// put makes r the truth about its id.
func (v *View) put(r Record) {
	k := keyOf(r)
	v.records[k] = r
	delete(v.doubtful, k)
	switch r := r.(type) {
	case *SessionRecord:
		v.Sessions[r.ID] = r
	case *PromptRecord:
		v.Prompts[r.ID] = r
	case *InputRecord:
		v.Inputs[r.ID] = r
	case *ReplyRecord:
		v.Replies[r.ID] = r
	case *UpdateRecord:
		v.Updates[r.ID] = r
	case *MetaRecord:
		v.Meta[r.ID] = r
	}
}

func keyOf(r Record) string {
	rec, id := r.key()
	return rec + " " + id
}

// blank is an empty record of a kind, nil when the kind is unknown.
func blank(rec string) Record {
	switch rec {
	case "session":
		return &SessionRecord{}
	case "prompt":
		return &PromptRecord{}
	case "reply":
		return &ReplyRecord{}
	case "input":
		return &InputRecord{}
	case "update":
		return &UpdateRecord{}
	case "meta":
		return &MetaRecord{}
	}
	return nil
}

func kindOf(r Record) string {
	switch r.(type) {
	case *SessionRecord:
		return "session"
	case *PromptRecord:
		return "prompt"
	case *ReplyRecord:
		return "reply"
	case *InputRecord:
		return "input"
	case *UpdateRecord:
		return "update"
	}
	return "meta"
}

// active tells whether the session runs, as far as the state says.
func (v *View) active(session string) bool {
	s := v.Sessions[session]
	return s != nil && s.Status == "active"
}

// legal tells why r cannot follow what is now the truth about its id, nil when it can.
func (v *View) legal(r Record) error {
	switch r := r.(type) {
	case *SessionRecord:
		if old := v.Sessions[r.ID]; old == r {
			return errors.New("a record was changed in place")
		} else if old != nil && old.Status != "active" && r.Status == "active" {
			return fmt.Errorf("session %s has ended and cannot be active again", r.ID)
		}
	case *PromptRecord:
		old := v.Prompts[r.ID]
		if old == nil {
			old = &PromptRecord{}
		}
		if old == r {
			return errors.New("a record was changed in place")
		}
		if old.NonceUsed && (!r.NonceUsed || old.Nonce != r.Nonce) {
			return fmt.Errorf("prompt %s: a used nonce stays used", r.ID)
		}
		if old.Status == r.Status {
			return nil
		}
		if !slices.Contains(next[old.Status], r.Status) {
			return fmt.Errorf("prompt %s cannot go from %q to %q", r.ID, old.Status, r.Status)
		}
		needsSession := r.Status == Routed || r.Status == AwaitingReply || r.Status == ReplyReceived
		if needsSession && !v.active(r.SessionID) {
			return fmt.Errorf("prompt %s: its session is not active", r.ID)
		}
		if r.Status == AwaitingReply {
			for _, p := range v.Prompts {
				if p.SessionID == r.SessionID && p.Status == AwaitingReply {
					return fmt.Errorf("prompt %s: another of its session awaits a reply", r.ID)
				}
			}
		}
	}
	return nil
}

// files are the calls that can fail or be the last of a killed process, so that a test can make them.
type files struct {
	write    func(*os.File, []byte) (int, error)
	sync     func(*os.File) error
	truncate func(*os.File, int64) error
	rename   func(from, to string) error
	syncDir  func(dir string) error
}

func systemFiles() files {
	return files{(*os.File).Write, (*os.File).Sync, (*os.File).Truncate, os.Rename, syncDir}
}

// journal is a file of lines that several processes append to. It does no locking within the process.
type journal struct {
	path   string
	sys    files
	lock   *os.File // never renamed; kept reachable, for a collected file drops its lock
	f      *os.File // nil after a failed write: never write or fsync on that descriptor again
	info   fs.FileInfo
	known  bool  // the folder's entry of the file is on the disk
	end    int64 // its size as of the last size or append
	poison error // not nil: what the file ends with is unknown, nothing is written any more
}

func lockPath(path string) string { return strings.TrimSuffix(path, filepath.Ext(path)) + ".lock" }

func openJournal(path string, sys files) (*journal, error) {
	lock, err := openPrivate(lockPath(path), os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	return &journal{path: path, sys: sys, lock: lock}, nil
}

// acquire waits for the lock and makes sure that f is the file that the path names: another process may have
// compacted it. replaced tells that it is not the one of the last time.
func (j *journal) acquire() (replaced bool, err error) {
	if err := lockFile(j.lock, true); err != nil {
		return false, &fs.PathError{Op: "lock", Path: j.lock.Name(), Err: err}
	}
	defer func() {
		if err != nil {
			j.release()
		}
	}()
	fi, err := os.Lstat(j.path)
	if err == nil && j.f != nil && os.SameFile(fi, j.info) {
		return false, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	f, err := openPrivate(j.path, os.O_RDWR|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return false, err
	}
	if fi, err = f.Stat(); err != nil {
		f.Close()
		return false, err
	}
	replaced = j.info == nil || !os.SameFile(fi, j.info)
	j.close()
	j.f, j.info, j.known = f, fi, false
	return replaced, nil
}

func (j *journal) release() { unlockFile(j.lock) }

func (j *journal) close() {
	if j.f != nil {
		j.f.Close()
		j.f = nil
	}
}

func (j *journal) size() (int64, error) {
	fi, err := j.f.Stat()
	if err != nil {
		return 0, err
	}
	j.end = fi.Size()
	return j.end, nil
}

// append writes b with one write at the end, j.end, and makes it durable when asked to. After an error the
// file is as it was before, or poison is set.
func (j *journal) append(b []byte, durable bool) error {
	if j.poison != nil {
		return j.poison
	}
	if !j.known {
		if err := j.sys.syncDir(filepath.Dir(j.path)); err != nil {
			return err
		}
		j.known = true
	}
	n, err := j.sys.write(j.f, b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err == nil && durable {
		err = j.sys.sync(j.f)
	}
	if err == nil {
		j.end += int64(len(b))
		return nil
	}
	if cut := j.sys.truncate(j.f, j.end); cut != nil {
		j.poison = fmt.Errorf("%s: %w; cutting the unfinished record off: %w; nothing is recorded any more", j.path, err, cut)
		return j.poison
	}
	j.close()
	return err
}

// cut moves the bytes from at on to a file of their own, durably, and then cuts them off.
func (j *journal) cut(at int64) error {
	tail, err := io.ReadAll(io.NewSectionReader(j.f, at, j.end-at))
	if err == nil {
		err = j.keep(".torn-"+time.Now().UTC().Format("20060102T150405.000000"), tail)
	}
	if err == nil {
		err = j.sys.truncate(j.f, at)
	}
	if err != nil {
		return fmt.Errorf("repairing the torn end of %s: %w", j.path, err)
	}
	j.end = at
	return nil
}

// keep appends b to the file named like the journal plus suffix, durably.
func (j *journal) keep(suffix string, b []byte) error {
	f, err := openPrivate(j.path+suffix, os.O_WRONLY|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return err
	}
	defer f.Close()
	if n, err := j.sys.write(f, b); err != nil || n < len(b) {
		return cmp.Or(err, io.ErrShortWrite)
	}
	if err := j.sys.sync(f); err != nil {
		return err
	}
	return j.sys.syncDir(filepath.Dir(j.path))
}

// Store is the shared state. Its methods may be called from any goroutine, but not from a function given to Update.
type Store struct {
	Dir       string
	Retention time.Duration // how long ended sessions and their questions are kept

	now   func() time.Time
	audit *Audit

	mu        sync.Mutex // guards what follows; taken before state.lock
	log       *journal
	view      *View
	read      int64 // bytes of the file that view holds
	compactAt int64 // bytes of the file that are worth a compaction
	torn      error // not nil: the torn end could not be repaired, so nothing can be appended
	newer     error // not nil: a line has a later schema version, so nothing may be written
	upgrade   bool  // a line has an earlier schema version
	notes     []string
	damaged   [][]byte // lines that are not valid, as they stand in the file
	trouble   error    // what keeps the audit log or the compaction from working
	followers map[*follower]bool
	held      map[string]*os.File // locks of this process's sessions and of the poller, by file name
	secrets   map[string]string   // given and not yet taken, by prompt
}

// openStore opens or creates the state in dir, which is made private to the user when it is missing.
func openStore(dir string) (*Store, error) { return openStoreWith(dir, systemFiles()) }

func openStoreWith(dir string, sys files) (*Store, error) {
	s := &Store{Dir: dir, Retention: retention, now: time.Now, view: newView(), followers: map[*follower]bool{},
		held: map[string]*os.File{}, secrets: map[string]string{}}
	err := secureDir(dir)
	if err == nil {
		err = secureDir(filepath.Join(dir, "sessions"))
	}
	if err == nil {
		s.log, err = openJournal(filepath.Join(dir, "state.jsonl"), sys)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the state: %w", err)
	}
	audit, err := openJournal(filepath.Join(dir, "audit.log"), sys)
	if err == nil {
		s.audit = &Audit{log: audit, now: func() time.Time { return s.now() }, note: s.noteHead}
		err = s.begin()
	}
	if err == nil {
		if s.upgrade && s.newer == nil {
			err = s.upgradeSchema()
		}
		s.end()
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("opening the state: %w", err)
	}
	return s, nil
}

// Close releases the files and locks; nothing is left to be written.
func (s *Store) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, f := range s.held {
		f.Close()
		delete(s.held, name)
	}
	s.log.close()
	s.log.lock.Close()
	if s.audit != nil {
		s.audit.log.close()
		s.audit.log.lock.Close()
	}
}

func (s *Store) Audit() *Audit { return s.audit }

// begin takes the process's and the shared lock and reads what others appended.
func (s *Store) begin() error {
	s.mu.Lock()
	replaced, err := s.log.acquire()
	if err == nil {
		if err = s.refresh(replaced); err != nil {
			s.log.release()
		}
	}
	if err != nil {
		s.mu.Unlock()
	}
	return err
}

func (s *Store) end() {
	s.log.release()
	s.mu.Unlock()
}

// View is the state as it is now. Where it cannot be read any more, it is as it was, with an error.
func (s *Store) View() (*View, error) {
	if err := s.begin(); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.view.clone(), fmt.Errorf("reading the state: %w", err)
	}
	defer s.end()
	return s.view.clone(), nil
}

// Damage says what was found wrong in the state file, a sentence each; nothing of it was dropped.
func (s *Store) Damage() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := slices.Clone(s.notes)
	if fi, err := os.Lstat(s.log.path + ".damaged"); err == nil {
		out = append(out, fmt.Sprintf("state.jsonl.damaged holds %d bytes of damaged lines", fi.Size()))
	}
	if s.torn != nil {
		out = append(out, s.torn.Error())
	}
	return out
}

// Trouble is what keeps the store from its duties at present, nil when nothing does.
func (s *Store) Trouble() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return cmp.Or(s.log.poison, s.newer, s.torn, s.trouble)
}

// refresh reads the lines after s.read. Of several lines with one id only the last is decoded. Nothing is read
// from a poisoned file: its last line is one that failed.
func (s *Store) refresh(replaced bool) error {
	size, err := s.log.size()
	if err != nil || s.log.poison != nil {
		return err
	}
	before := s.view
	if anew := replaced || size < s.read; anew {
		s.view, s.read, s.notes, s.damaged = newView(), 0, nil, nil
		defer s.plan()
	}
	if size == s.read {
		return nil
	}
	in := bufio.NewReaderSize(io.NewSectionReader(s.log.f, s.read, size-s.read), int(min(size-s.read+16, 1<<20)))
	scan := scanner{latest: map[string]int{}, doubtful: map[string]bool{}, at: s.read, good: s.read}
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			break
		} else if err != nil {
			return fmt.Errorf("reading %s: %w", s.log.path, err)
		}
		scan.line(s, line)
	}
	for i, line := range scan.lines {
		if line == nil {
			continue
		}
		r, err := decode(line)
		if err != nil {
			s.damage(scan.starts[i], line, err.Error())
			continue
		}
		old := before.records[keyOf(r)]
		s.view.put(r)
		if old == nil || !old.head().At.Equal(r.head().At) {
			s.publish(r)
		}
	}
	maps.Copy(s.view.doubtful, scan.doubtful)
	s.torn = nil
	if s.read = scan.good; s.read < size {
		if s.torn = s.log.cut(s.read); s.torn == nil {
			s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a torn end of %d bytes was moved aside", size-s.read))
		}
	}
	return nil
}

// scanner sorts the lines of a file before they are decoded.
type scanner struct {
	lines    [][]byte // nil where a later line has the same id
	starts   []int64
	latest   map[string]int  // index of a record's last line
	doubtful map[string]bool // records whose last line is a damaged one
	pending  [][]byte        // of an Update whose end has not been seen
	owed     int             // how many lines it lacks
	at       int64           // where the next line begins
	good     int64           // the end of the last complete Update
}

func (c *scanner) line(s *Store, line []byte) {
	start := c.at
	c.at += int64(len(line))
	h, err := parseHead(line)
	switch {
	case err != nil:
		s.damage(start, line, err.Error())
		if h.ID != "" {
			c.doubtful[h.Rec+" "+h.ID] = true
		}
		c.owed = max(0, c.owed-1)
	case h.V > schemaVersion:
		s.newer = fmt.Errorf("state.jsonl was written by a newer atlasbridge (schema %d): update this one", h.V)
	case h.V < schemaVersion:
		s.upgrade = true
	}
	if err == nil {
		if len(c.pending) > 0 && h.More != c.owed-1 {
			c.flush()
		}
		c.pending, c.owed = append(c.pending, line), h.More
	}
	if c.owed == 0 {
		c.flush()
		c.good = c.at
	}
}

func (c *scanner) flush() {
	start := c.good
	for _, line := range c.pending {
		h, _ := parseHead(line)
		k := h.Rec + " " + h.ID
		if i, ok := c.latest[k]; ok {
			c.lines[i] = nil
		}
		c.latest[k] = len(c.lines)
		delete(c.doubtful, k)
		c.lines, c.starts = append(c.lines, line), append(c.starts, start)
		start += int64(len(line))
	}
	c.pending, c.owed = c.pending[:0], 0
}

func (s *Store) damage(at int64, line []byte, why string) {
	s.damaged = append(s.damaged, line)
	s.notes = append(s.notes, fmt.Sprintf("state.jsonl: the line at byte %d is damaged: %s", at, why))
}

// castagnoli is CRC-32C's table; crcMember the length of the member that holds it, with what ends the line.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const crcMember = len(`,"crc":"00000000"}` + "\n")

// checksum is the CRC of an object given without its closing brace.
func checksum(open []byte) string {
	return fmt.Sprintf("%08x", crc32.Update(crc32.Checksum(open, castagnoli), castagnoli, []byte("}")))
}

// parseHead reads what every line begins with and checks its checksum. With an error, the head is filled as far
// as the line can be believed to name its record.
func parseHead(line []byte) (h Head, err error) {
	rest, ok := bytes.CutPrefix(line, []byte(`{"v":`))
	var v, id, at []byte
	if ok {
		v, rest, _ = bytes.Cut(rest, []byte(`,"rec":"`))
		h.V, err = strconv.Atoi(string(v))
		v, rest, _ = bytes.Cut(rest, []byte(`","id":"`))
		id, rest, _ = bytes.Cut(rest, []byte(`","at":"`))
		at, rest, ok = bytes.Cut(rest, []byte(`"`))
		h.Rec, h.ID = string(v), string(id)
		if more, found := bytes.CutPrefix(rest, []byte(`,"more":`)); found {
			digits, _, _ := bytes.Cut(more, []byte(`,`))
			h.More, _ = strconv.Atoi(string(digits))
		}
	}
	if !ok || err != nil || len(at) != len(stampLayout)-len("07:00") || bytes.ContainsAny(id, `\"`) {
		h = Head{}
		if err := json.Unmarshal(line, &h); err != nil {
			return Head{}, errors.New("not a record")
		}
	}
	n := len(line) - crcMember
	if n < 0 || string(line[n:n+8]) != `,"crc":"` || string(line[n+16:]) != "\"}\n" ||
		string(line[n+8:n+16]) != checksum(line[:n]) {
		return h, errors.New("its checksum does not match")
	}
	return h, nil
}

// decode is the record of a line whose head and checksum are good.
func decode(line []byte) (Record, error) {
	h, _ := parseHead(line)
	r := blank(h.Rec)
	if r == nil {
		return nil, fmt.Errorf("unknown kind of record %q", h.Rec)
	}
	if !fill(reflect.ValueOf(r).Elem(), layouts[h.Rec], line) {
		r = blank(h.Rec)
		if err := json.Unmarshal(line, r); err != nil {
			return nil, errors.New("not a record of its kind")
		}
	}
	r.head().size = len(line)
	return r, nil
}

// encode is the line of a record. Its members are in the order of the struct, its strings as jq prints them.
func encode(r Record) []byte {
	b := appendObject(nil, reflect.ValueOf(r).Elem(), layouts[kindOf(r)])
	b = b[:len(b)-1]
	return append(b, `,"crc":"`+checksum(b)+"\"}\n"...)
}

// layout is a record kind's members in the order of the file.
type layout []struct {
	name  string
	index []int
	omit  bool // when empty
}

// layouts never changes; fill needs it 100,000 times when a large state is opened.
var layouts = map[string]layout{"session": layoutOf(SessionRecord{}), "prompt": layoutOf(PromptRecord{}),
	"reply": layoutOf(ReplyRecord{}), "input": layoutOf(InputRecord{}), "update": layoutOf(UpdateRecord{}),
	"meta": layoutOf(MetaRecord{})}

func layoutOf(record any) (out layout) {
	for _, f := range reflect.VisibleFields(reflect.TypeOf(record)) {
		if name, option, tagged := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			out = append(out, struct {
				name  string
				index []int
				omit  bool
			}{name, f.Index, tagged && option == "omitempty"})
		}
	}
	return out
}

func appendValue(b []byte, v reflect.Value) []byte {
	if t, ok := v.Interface().(time.Time); ok {
		return append(t.UTC().AppendFormat(append(b, '"'), stampLayout), '"')
	}
	switch v.Kind() {
	case reflect.String:
		return appendString(b, v.String())
	case reflect.Bool:
		return strconv.AppendBool(b, v.Bool())
	case reflect.Int, reflect.Int64:
		return strconv.AppendInt(b, v.Int(), 10)
	case reflect.Float64:
		return strconv.AppendFloat(b, v.Float(), 'f', -1, 64)
	case reflect.Pointer:
		if v.IsNil() {
			return append(b, "null"...)
		}
		return appendValue(b, v.Elem())
	case reflect.Slice:
		b = append(b, '[')
		for i := range v.Len() {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, v.Index(i))
		}
		return append(b, ']')
	case reflect.Struct:
		return appendObject(b, v, layoutOf(v.Interface()))
	}
	text, _ := json.Marshal(v.Interface())
	return append(b, text...)
}

func appendObject(b []byte, v reflect.Value, fields layout) []byte {
	b = append(b, '{')
	for _, f := range fields {
		if field := v.FieldByIndex(f.index); !f.omit || !field.IsZero() {
			b = append(appendString(b, f.name), ':')
			b = append(appendValue(b, field), ',')
		}
	}
	return append(b[:len(b)-1], '}')
}

// fill decodes a line that encode wrote, some five times faster than encoding/json; false when it is anything else.
func fill(v reflect.Value, fields layout, line []byte) bool {
	for rest, sep := line, byte('{'); ; sep = ',' {
		if len(rest) < 2 || rest[0] != sep || rest[1] != '"' {
			return false
		}
		n := bytes.IndexByte(rest[2:], '"') + 2
		if n < 2 || n+1 >= len(rest) || rest[n+1] != ':' {
			return false
		}
		name := string(rest[2:n])
		rest = rest[n+2:]
		if name == "crc" {
			return true
		}
		for len(fields) > 0 && fields[0].name != name {
			fields = fields[1:]
		}
		n = valueEnd(rest)
		if n < 0 || len(fields) == 0 || !set(v.FieldByIndex(fields[0].index), rest[:n]) {
			return false
		}
		rest = rest[n:]
	}
}

// valueEnd is the length of the JSON value that b begins with, −1 when it does not end.
func valueEnd(b []byte) int {
	depth, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			if quoted = !quoted; !quoted && depth == 0 {
				return i + 1
			}
		case quoted:
		case c == '[' || c == '{':
			depth++
		case depth > 0 && (c == ']' || c == '}'):
			if depth--; depth == 0 {
				return i + 1
			}
		case depth == 0 && (c == ',' || c == '}'):
			return i
		}
	}
	return -1
}

func set(v reflect.Value, raw []byte) bool {
	switch v.Kind() {
	case reflect.String:
		if len(raw) >= 2 && raw[0] == '"' && bytes.IndexByte(raw, '\\') < 0 {
			v.SetString(string(raw[1 : len(raw)-1]))
			return true
		}
	case reflect.Int, reflect.Int64:
		n, err := strconv.ParseInt(string(raw), 10, 64)
		v.SetInt(n)
		return err == nil
	case reflect.Bool:
		v.SetBool(string(raw) == "true")
		return v.Bool() || string(raw) == "false"
	case reflect.Pointer:
		if string(raw) == "null" {
			return true
		}
		v.Set(reflect.New(v.Type().Elem()))
		return set(v.Elem(), raw)
	case reflect.Struct:
		if t, ok := v.Addr().Interface().(*time.Time); ok {
			return t.UnmarshalJSON(raw) == nil
		}
	}
	return json.Unmarshal(raw, v.Addr().Interface()) == nil
}

// Update runs fn on the current state under the lock and makes what it returns durable, all or nothing. It
// fills in the records' kind and time, wakes followers and writes the audit entries; that these could not be
// written is no error of the Update but Trouble. fn must not call the Store.
func (s *Store) Update(fn func(*View) ([]Record, error)) error {
	if err := s.begin(); err != nil {
		return fmt.Errorf("locking the state: %w", err)
	}
	events, err := s.change(fn)
	if len(events) == 0 {
		s.end()
		return err
	}
	locked := s.audit.begin() // before the state is released, so that both files have the same order
	s.end()
	var seq int64
	var hash string
	if locked == nil {
		seq, hash, locked = s.audit.write(events...)
		s.audit.end()
	}
	if locked == nil {
		s.noteHead(seq, hash)
	} else {
		s.setTrouble(fmt.Errorf("the audit log lacks an entry: %w", locked))
	}
	return err
}

// change is Update under the lock. When it returns without error, the records are on the disk.
func (s *Store) change(fn func(*View) ([]Record, error)) ([]Event, error) {
	recs, err := fn(s.view)
	if err != nil || len(recs) == 0 {
		return nil, err
	}
	var events []Event
	var lines []byte
	seen := map[string]bool{}
	for i, r := range recs {
		h := r.head()
		h.V, h.Rec, h.More = schemaVersion, kindOf(r), len(recs)-1-i
		key := keyOf(r)
		if h.ID == "" || seen[key] {
			return nil, fmt.Errorf("recording %s: no id, or twice in one update", key)
		}
		seen[key] = true
		if err := s.view.legal(r); err != nil {
			return nil, fmt.Errorf("recording: %w", err)
		}
		h.At = s.now().UTC().Truncate(time.Microsecond)
		old := s.view.records[key]
		if old != nil && !h.At.After(old.head().At) {
			h.At = old.head().At.Add(time.Microsecond)
		}
		line := encode(r)
		h.size = len(line)
		lines = append(lines, line...)
		events = append(events, auditEvents(old, r)...)
	}
	if err := s.write(lines, true); err != nil {
		return nil, err
	}
	for _, r := range recs {
		s.view.put(r)
		s.publish(r)
	}
	if s.read >= s.compactAt {
		if err := s.compact(); err != nil {
			s.trouble = err
			s.compactAt = 2 * s.read
		}
	}
	return events, nil
}

func (s *Store) write(lines []byte, durable bool) error {
	if err := cmp.Or(s.newer, s.torn); err != nil {
		return err
	}
	if err := s.log.append(lines, durable); err != nil {
		return fmt.Errorf("recording: %w", err)
	}
	s.read = s.log.end
	return nil
}

// noteHead keeps the audit chain's head in the state, without an fsync.
func (s *Store) noteHead(seq int64, hash string) {
	err := s.begin()
	if err == nil {
		if m := s.view.Meta["audit"]; m == nil || m.Seq < seq {
			m = &MetaRecord{Head: Head{V: schemaVersion, Rec: "meta", ID: "audit", At: s.now().UTC()}, Seq: seq, Hash: hash}
			if err = s.write(encode(m), false); err == nil {
				s.view.put(m)
			}
		}
		s.end()
	}
	s.setTrouble(err)
}

func (s *Store) setTrouble(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble = err
}

// Move takes a prompt along one legal transition; change may fill in more fields. false: the guard failed,
// nothing changed; but the message id of a question that was answered before its delivery was recorded is kept.
// Moving to Injected records the reply too.
func (s *Store) Move(id string, to State, change func(*PromptRecord)) (bool, error) {
	return s.move(id, to, s.now(), change)
}

// Expire moves a prompt to Expired if now is not before its expires_at. A caller whose clock may be set back
// passes the prompt's creation time plus the monotonic time since.
func (s *Store) Expire(id string, now time.Time) (bool, error) {
	return s.move(id, Expired, now, nil)
}

func (s *Store) move(id string, to State, now time.Time, change func(*PromptRecord)) (moved bool, err error) {
	err = s.Update(func(v *View) ([]Record, error) {
		old := v.Prompts[id]
		if old == nil || to == Expired && now.Before(old.ExpiresAt) {
			return nil, nil
		}
		p := *old
		if change != nil {
			change(&p)
		}
		p.ID, p.Status, p.Nonce, p.NonceUsed = old.ID, to, old.Nonce, old.NonceUsed
		if old.Status == to || v.legal(&p) != nil {
			if to == AwaitingReply && p.MsgID != old.MsgID {
				late := *old
				late.MsgID = p.MsgID
				return []Record{&late}, nil
			}
			return nil, nil
		}
		moved = true
		at := now.UTC()
		if old.open() && !p.open() {
			p.NonceUsed = true
			if p.DecidedAt == nil {
				p.DecidedAt = &at
			}
			if p.DecidedBy == nil && to == Expired {
				p.DecidedBy = ref("auto:timeout")
			}
		}
		if to != Injected {
			return []Record{&p}, nil
		}
		reply := &ReplyRecord{Head: Head{ID: p.ID}, PromptID: p.ID, SessionID: p.SessionID, Source: replySource(&p), InjectedAt: at}
		if p.Value != nil {
			reply.Value = *p.Value
		}
		return []Record{&p, reply}, nil
	})
	return moved && err == nil, err
}

func ref[T any](v T) *T { return &v }

// replySource says whose answer was typed.
func replySource(p *PromptRecord) string {
	if p.DecidedBy != nil && strings.HasPrefix(*p.DecidedBy, "auto:") {
		return "timeout_default"
	}
	return "operator"
}

// Decision is an answer on its way to a prompt.
type Decision struct {
	PromptID  string // in full, or its first 8 digits
	SessionID string // likewise; Trusted may leave it out
	Nonce     string // 32 hex, or the first 16 as callback data carries them
	Value     string // a choice's key, "1,3" for several, "enter", "esc", "cancel", "default", "deny:reason", or text
	By        string // telegram:<id>, cli:local, cli:answer, auto:timeout, hook:<tool>
	UpdateID  int64
	Trusted   bool // by the keyboard, timeout or answer command: no nonce to show
}

// Refusal is why a decision changed nothing: "" accepted, else one of the sentences a person reads.
type Refusal string

// Decide gives a prompt its answer, if it is the first and all guards hold: then the answer is on the disk. It
// returns the prompt as it is afterwards.
func (s *Store) Decide(d Decision, now time.Time) (PromptRecord, Refusal, error) {
	var p *PromptRecord
	var why Refusal
	var secret string
	err := s.Update(func(v *View) ([]Record, error) {
		old, refusal := v.find(d)
		if why, p = refusal, old; why == "" {
			why = v.guard(old, d, now)
		}
		if why == "" && old.Secret && s.held["sessions/"+old.SessionID+".lock"] == nil {
			why = "a secret can only be answered at its session's own keyboard"
		}
		if why != "" {
			return nil, nil
		}
		value, reason, refusal := old.judge(d.Value)
		if why = refusal; why != "" {
			return nil, nil
		}
		q := *old
		q.Status, q.NonceUsed, q.DecidedAt, q.DecidedBy, q.Value = ReplyReceived, true, ref(now.UTC()), ref(d.By), &value
		if value == "cancel" {
			q.Status = Canceled
		}
		if reason != "" {
			q.Reason = reason
		}
		if old.Secret {
			secret, q.Value, q.ValueHidden, q.Status = value, nil, true, ReplyReceived
		}
		p = &q
		recs := []Record{p}
		if d.UpdateID != 0 {
			recs = append(recs, &UpdateRecord{Head: Head{ID: strconv.FormatInt(d.UpdateID, 10)}, Kind: "decision"})
		}
		if old.Secret {
			s.secrets[p.ID] = secret
		}
		return recs, nil
	})
	if err != nil {
		s.TakeSecret(d.PromptID)
		return PromptRecord{}, "", err
	}
	if p == nil {
		p = &PromptRecord{}
	}
	return *p, why, nil
}

// TakeSecret is the answer to a secret prompt, once. It exists in this process's memory only.
func (s *Store) TakeSecret(promptID string) (value string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok = s.secrets[promptID]
	delete(s.secrets, promptID)
	return value, ok
}

// find is the prompt that the decision names. Of several with the same short id, the one that is open.
func (v *View) find(d Decision) (*PromptRecord, Refusal) {
	const shortest = 8
	var hits []*PromptRecord
	if p := v.Prompts[d.PromptID]; p != nil {
		hits = []*PromptRecord{p}
	} else if len(d.PromptID) >= shortest {
		for id, p := range v.Prompts {
			if strings.HasPrefix(id, d.PromptID) && strings.HasPrefix(p.SessionID, d.SessionID) {
				hits = append(hits, p)
			}
		}
	}
	if len(hits) > 1 {
		hits = slices.DeleteFunc(hits, func(p *PromptRecord) bool { return !p.open() })
	}
	switch {
	case len(hits) == 0:
		return nil, Refusal(fmt.Sprintf("there is no open question %s", clip(strconv.Quote(d.PromptID), 40)))
	case len(hits) > 1:
		return nil, "several open questions have that short id: give the whole id"
	}
	named := d.SessionID == hits[0].SessionID || len(d.SessionID) >= shortest && strings.HasPrefix(hits[0].SessionID, d.SessionID)
	if !named && !(d.Trusted && d.SessionID == "") {
		return nil, "the answer belongs to another session"
	}
	return hits[0], ""
}

// guard checks everything about a decision but its value.
func (v *View) guard(p *PromptRecord, d Decision, now time.Time) Refusal {
	n := len(d.Nonce)
	shown := (n == 16 || n == 32) && len(p.Nonce) >= n && subtle.ConstantTimeCompare([]byte(d.Nonce), []byte(p.Nonce[:n])) == 1
	switch {
	case !d.Trusted && !shown:
		return "the answer does not belong to this question"
	case v.doubtful["prompt "+p.ID]:
		return "the question's record is damaged, so it takes no answer any more"
	case p.Status == Expired, p.open() && d.By != "cli:local" && !now.Before(p.ExpiresAt):
		return Refusal("the question expired at " + p.ExpiresAt.Local().Format(time.TimeOnly))
	case p.Status == Failed || !v.active(p.SessionID):
		return "the question's session has ended"
	case !p.open() && p.DecidedAt != nil:
		return Refusal(fmt.Sprintf("already %s at %s %s", settled(p), p.DecidedAt.Local().Format(time.TimeOnly), byWhom(p.DecidedBy)))
	case !p.open() || p.NonceUsed:
		return "the question is already answered"
	case p.Status == Created && !d.Trusted:
		return "the question has not been asked yet"
	}
	if !strings.HasPrefix(d.By, "telegram:") {
		return ""
	}
	recent := 0
	for _, q := range v.Prompts {
		if q.SessionID == p.SessionID && q.DecidedAt != nil && q.DecidedBy != nil && strings.HasPrefix(*q.DecidedBy, "telegram:") &&
			now.Sub(*q.DecidedAt).Abs() < decisionsSpan {
			recent++
		}
	}
	if recent >= decisionsLimit {
		return Refusal(fmt.Sprintf("more than %d answers in a minute for this session: wait, then answer again", decisionsLimit))
	}
	return ""
}

func settled(p *PromptRecord) string {
	if p.Status == Canceled {
		return "canceled"
	}
	return "answered"
}

// byWhom says decided_by to a person.
func byWhom(by *string) string {
	switch {
	case by == nil:
		return "in the terminal"
	case *by == "cli:local":
		return "at the keyboard"
	case *by == "cli:answer":
		return "with atlasbridge answer"
	case *by == "auto:timeout":
		return "by its timeout"
	case strings.HasPrefix(*by, "telegram:"):
		return "on the phone (" + *by + ")"
	}
	return "by " + *by
}

// judge says what an answer means for the question: the value to record, the operator's reason, or why not.
func (p *PromptRecord) judge(given string) (value, reason string, why Refusal) {
	deny, isDeny := strings.CutPrefix(given, "deny:")
	lower := strings.ToLower(given)
	switch {
	case p.Secret:
		return given, "", p.text(given)
	case given == "default" && p.SafeDefault != nil:
		return *p.SafeDefault, "", ""
	case isDeny && p.Permission:
		return p.refusing(), deny, p.text(deny)
	case p.offered(given):
		return given, "", ""
	case p.Type != FreeText && p.offered(lower):
		return lower, "", ""
	}
	if short := map[string]string{"yes": "y", "no": "n", "": "enter"}[lower]; p.Type != FreeText && p.offered(short) {
		return short, "", ""
	}
	takesText := p.Type == FreeText || p.Type == Unknown || p.MaxLength > 0 && !p.Permission || slices.ContainsFunc(p.Choices, Choice.takesText)
	if takesText && given != "default" {
		return given, "", p.text(given)
	}
	return "", "", Refusal("not an answer to this question: " + clip(strconv.Quote(given), 40) + " (it takes " + p.takes() + ")")
}

// offered tells whether the value is one that a button could have sent, "default" apart.
func (p *PromptRecord) offered(value string) bool {
	keys := strings.Split(value, ",")
	if len(keys) == 1 || p.Multi {
		all := true
		for i, k := range keys {
			isKey := slices.ContainsFunc(p.Choices, func(c Choice) bool { return c.Key == k })
			all = all && isKey && !slices.Contains(keys[:i], k)
		}
		if all {
			return true
		}
	}
	switch value {
	case "y", "n":
		return p.Type == YesNo && len(p.Choices) == 0
	case "enter":
		return p.Type == ConfirmEnter || p.ambiguous()
	case "esc":
		return p.ambiguous() || p.Permission || p.SafeDefault != nil && *p.SafeDefault == "esc"
	case "cancel":
		return p.ambiguous()
	case "deny":
		return p.Permission
	}
	return p.Type != FreeText && p.SafeDefault != nil && value == *p.SafeDefault
}

// ambiguous tells whether the ambiguity protocol (SPEC section 6) asks: Send Enter, Cancel, or show more.
func (p *PromptRecord) ambiguous() bool {
	return p.Type == Unknown || p.Confidence == "low" || p.Confidence == "medium" && !slices.Contains(p.Signals, "pattern")
}

// takesText tells whether choosing c opens a field for text, as agents label such choices (measured).
func (c Choice) takesText() bool {
	l := strings.ToLower(c.Label)
	return strings.HasPrefix(l, "type something") || strings.HasPrefix(l, "other") || strings.Contains(l, "tell claude")
}

// refusing is the answer that refuses a permission.
func (p *PromptRecord) refusing() string {
	for _, c := range p.Choices {
		if c.Hook == "deny" || c.Key == "n" && !c.Grants {
			return c.Key
		}
	}
	if p.SafeDefault != nil {
		return *p.SafeDefault
	}
	return "deny"
}

// text checks an answer that is typed as it is. Control characters would be keys, not text.
func (p *PromptRecord) text(s string) Refusal {
	limit := maxText
	if p.Idle {
		limit = maxIdleText
	}
	if p.MaxLength > 0 {
		limit = p.MaxLength
	}
	control := func(r rune) bool { return r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 }
	switch {
	case len(s) > limit:
		return Refusal(fmt.Sprintf("the answer has %d bytes, %d are allowed", len(s), limit))
	case !utf8.ValidString(s) || strings.ContainsFunc(s, control):
		return "the answer has control characters in it"
	}
	return ""
}

// takes names the answers for a person.
func (p *PromptRecord) takes() string {
	var out []string
	for _, c := range p.Choices {
		out = append(out, c.Key)
	}
	for _, word := range []string{"y", "n", "enter", "esc", "cancel"} {
		if p.offered(word) && !slices.Contains(out, word) {
			out = append(out, word)
		}
	}
	if p.Type == FreeText || p.Type == Unknown {
		out = append(out, "text")
	}
	return strings.Join(out, ", ")
}

// follower is one Follow call.
type follower struct {
	session string
	queue   []Record      // guarded by Store.mu
	wake    chan struct{} // has room for one
}

func (s *Store) publish(r Record) {
	session := ""
	switch r := r.(type) {
	case *PromptRecord:
		session = r.SessionID
	case *InputRecord:
		session = r.SessionID
	}
	for f := range s.followers {
		if session != "" && f.session == session {
			f.queue = append(f.queue, r)
			select {
			case f.wake <- struct{}{}:
			default:
			}
		}
	}
}

// Follow sends prompt and input records of the session as they change after this call, by whichever process,
// each as it is when it is looked at. fast() says whether a question is open (20 Hz) or not (2 Hz) where the
// system cannot tell of changes by itself. The channel is closed when ctx ends.
func (s *Store) Follow(ctx context.Context, sessionID string, fast func() bool) <-chan Record {
	f := &follower{session: sessionID, wake: make(chan struct{}, 1)}
	out := make(chan Record)
	s.mu.Lock()
	s.followers[f] = true
	s.mu.Unlock()
	changed, stop := watchFolder(s.Dir)
	go func() {
		defer close(out)
		defer stop()
		defer s.unfollow(f)
		for s.forward(ctx, f, out) {
			wait := 500 * time.Millisecond
			if changed != nil {
				wait = 5 * time.Second // in case the system lost a change
			} else if fast != nil && fast() {
				wait = 50 * time.Millisecond
			}
			t := time.NewTimer(wait)
			select {
			case <-f.wake:
			case <-changed:
				s.poll()
			case <-t.C:
				s.poll()
			case <-ctx.Done():
			}
			t.Stop()
		}
	}()
	return out
}

// forward sends what is queued; false when ctx ended.
func (s *Store) forward(ctx context.Context, f *follower, out chan<- Record) bool {
	s.mu.Lock()
	queue := f.queue
	f.queue = nil
	s.mu.Unlock()
	for _, r := range queue {
		select {
		case out <- r:
		case <-ctx.Done():
			return false
		}
	}
	return ctx.Err() == nil
}

func (s *Store) unfollow(f *follower) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.followers, f)
}

// poll reads what others appended. Without a change it costs one stat and no lock.
func (s *Store) poll() {
	s.mu.Lock()
	fi, err := os.Lstat(s.log.path)
	same := err == nil && s.log.info != nil && os.SameFile(fi, s.log.info) && fi.Size() == s.read
	s.mu.Unlock()
	if !same && s.begin() == nil {
		s.end()
	}
}

// keep is the record as compaction writes it, nil when its time has passed.
func (s *Store) keep(r Record, now time.Time) Record {
	age := now.Sub(r.head().At)
	alive := false
	switch r := r.(type) {
	case *SessionRecord:
		alive = r.Status == "active" || age < s.Retention
	case *PromptRecord:
		final := len(next[r.Status]) == 0 || r.Status == Expired
		alive = age < s.Retention || now.Sub(r.ExpiresAt) < updateLife || !final && s.view.active(r.SessionID)
		if final && alive && age > updateLife {
			p := *r
			p.Full, p.Recent = "", ""
			return &p
		}
	case *ReplyRecord:
		alive = age < s.Retention
	case *InputRecord:
		alive = age < updateLife || r.Status == "queued" && s.view.active(r.SessionID)
	case *UpdateRecord:
		alive = age < updateLife
	case *MetaRecord:
		alive = true
	}
	if !alive {
		return nil
	}
	return r
}

// plan sets the size at which a compaction is worth it, after the whole file was read.
func (s *Store) plan() {
	live := 0
	for _, r := range s.view.records {
		if s.keep(r, s.now()) != nil {
			live += r.head().size
		}
	}
	s.compactAt = int64(max(compactMin, compactFactor*live))
}

// compact puts a file in place that holds only what is worth keeping. The lock is held. After an error the old
// file is still the state, or the new one is and its name will be made durable before the next append.
func (s *Store) compact() error {
	for k := range s.view.doubtful {
		if p, ok := s.view.records[k].(*PromptRecord); ok && p.open() {
			return nil // its older line would look like the truth; Reap ends it first
		}
	}
	view := newView()
	for _, r := range s.view.records {
		if r = s.keep(r, s.now()); r != nil {
			view.put(r)
		}
	}
	kept := slices.SortedFunc(maps.Values(view.records), func(a, b Record) int {
		return cmp.Or(a.head().At.Compare(b.head().At), strings.Compare(keyOf(a), keyOf(b)))
	})
	var out []byte
	for _, r := range kept {
		r.head().More = 0
		line := encode(r)
		r.head().size = len(line)
		out = append(out, line...)
	}
	if err := s.replace(out); err != nil {
		return fmt.Errorf("compacting %s: %w", s.log.path, err)
	}
	s.view, s.read, s.damaged, s.notes = view, int64(len(out)), nil, nil
	s.plan()
	return nil
}

// replace makes the file's content out. Damaged lines are kept first.
func (s *Store) replace(out []byte) error {
	j := s.log
	if len(s.damaged) > 0 {
		if err := j.keep(".damaged", bytes.Join(s.damaged, nil)); err != nil {
			return err
		}
		s.damaged = nil
	}
	name := j.path + ".new"
	os.Remove(name) // of a process that died while writing it; the lock is ours
	f, err := openPrivate(name, os.O_RDWR|os.O_APPEND|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	n, err := j.sys.write(f, out)
	if err == nil && n < len(out) {
		err = io.ErrShortWrite
	}
	if err == nil {
		err = j.sys.sync(f)
	}
	var fi fs.FileInfo
	if err == nil {
		fi, err = f.Stat()
	}
	if err == nil {
		err = j.sys.rename(name, j.path)
	}
	if err != nil {
		f.Close()
		os.Remove(name)
		return err
	}
	j.close()
	j.f, j.info, j.end = f, fi, int64(len(out))
	err = j.sys.syncDir(filepath.Dir(j.path))
	j.known = err == nil
	return nil
}

// upgradeSchema rewrites lines of an earlier schema. What they were stays in a backup beside the file.
func (s *Store) upgradeSchema() error {
	old, err := os.ReadFile(s.log.path)
	if err == nil {
		err = s.log.keep(".schema-backup-"+s.now().UTC().Format("20060102T150405.000000"), old)
	}
	if err != nil {
		return fmt.Errorf("backing up before the upgrade: %w", err)
	}
	for _, r := range s.view.records {
		r.head().V = schemaVersion
	}
	s.upgrade = false
	return s.compact()
}

// HoldSession takes sessions/<id>.lock for the life of the process, before the session's record is written:
// an active session whose lock can be taken is dead.
func (s *Store) HoldSession(id string) (release func(), err error) {
	release, err = s.hold("sessions/" + id + ".lock")
	if err != nil {
		return nil, fmt.Errorf("locking session %s: %w", id, err)
	}
	return release, nil
}

// TryPoll takes poll.lock if it is free.
func (s *Store) TryPoll() (release func(), held bool, err error) {
	release, err = s.hold("poll.lock")
	if errors.Is(err, errLocked) {
		return nil, false, nil
	} else if err != nil {
		return nil, false, fmt.Errorf("locking the poller: %w", err)
	}
	return release, true, nil
}

// hold takes the lock of that name in the state folder. The file says who has it, for people and status only.
func (s *Store) hold(name string) (release func(), err error) {
	f, err := openPrivate(filepath.Join(s.Dir, name), os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	if err = lockFile(f, false); err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "%d %d\n", os.Getpid(), processStart(os.Getpid()))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	s.mu.Lock()
	s.held[name] = f
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held[name] != f {
			return
		}
		delete(s.held, name)
		if name != "poll.lock" {
			os.Remove(f.Name()) // nobody asks for an ended session's lock again
		}
		f.Close()
	}, nil
}

// holder is the pid in a lock file when somebody holds it, else 0.
func (s *Store) holder(name string) (pid int) {
	f, err := os.OpenFile(filepath.Join(s.Dir, name), os.O_RDWR, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	if lockFile(f, false) == nil {
		return 0
	}
	pid = -1
	fmt.Fscan(f, &pid)
	return pid
}

// Reap marks sessions whose lock can be taken as crashed and fails their prompts; it returns the sessions and
// the prompts whose messages are to be edited. It also drops what is older than the retention time.
func (s *Store) Reap(now time.Time) (sessions []*SessionRecord, prompts []*PromptRecord, err error) {
	view, err := s.View()
	if err != nil {
		return nil, nil, err
	}
	dead := map[string]bool{}
	for id, r := range view.Sessions {
		dead[id] = r.Status != "active" || s.holder("sessions/"+id+".lock") == 0
	}
	err = s.Update(func(v *View) ([]Record, error) {
		var recs []Record
		for id, r := range v.Sessions {
			if dead[id] && r.Status == "active" {
				q := *r
				q.Status, q.Activity, q.EndedAt = "crashed", "", ref(now.UTC())
				sessions, recs = append(sessions, &q), append(recs, &q)
			}
		}
		for k, p := range v.Prompts {
			reason := "the session ended before it was answered"
			switch {
			case v.doubtful["prompt "+k] && p.open():
				reason = "its record in the state file is damaged"
			case !dead[p.SessionID] || len(next[p.Status]) == 0 || p.Status == Expired:
				continue
			case p.Status == ReplyReceived:
				reason = "the session ended: whether the answer was typed is uncertain"
			case p.Status == Injected:
				reason = "the session ended right after the answer was typed"
			}
			q := *p
			q.Status, q.Reason, q.NonceUsed = Failed, reason, true
			prompts, recs = append(prompts, &q), append(recs, &q)
		}
		for _, in := range v.Inputs {
			if dead[in.SessionID] && in.Status == "queued" {
				q := *in
				q.Status, q.Reason = "refused", "the session has ended"
				recs = append(recs, &q)
			}
		}
		return recs, nil
	})
	if err != nil {
		return nil, nil, err
	}
	return sessions, prompts, s.dropOld(now)
}

// dropOld compacts when a session or prompt is older than the retention time.
func (s *Store) dropOld(now time.Time) error {
	if err := s.begin(); err != nil {
		return err
	}
	defer s.end()
	for _, r := range s.view.records {
		if kind := kindOf(r); (kind == "session" || kind == "prompt") && s.keep(r, now) == nil {
			return s.compact()
		}
	}
	return nil
}

// Orphans are ended sessions whose child still runs, known by pid and start time.
func (v *View) Orphans() (out []*SessionRecord) {
	for _, r := range v.Sessions {
		if r.Status != "active" && r.PID > 0 && r.PIDStart != 0 && processStart(r.PID) == r.PIDStart {
			out = append(out, r)
		}
	}
	return out
}

// newID is a random UUID (version 4, RFC 9562 section 5.4).
func newID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// newNonce is 32 hex digits that nobody can guess.
func newNonce() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// shortID is the first 8 hex digits, as shown to people and in callback data.
func shortID(id string) string { return id[:min(8, len(id))] }

// openState opens the state for a command.
func (c *command) openState() (*Store, *View, error) {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return nil, nil, err
	}
	s, err := openStore(dir)
	if err != nil {
		return nil, nil, err
	}
	v, err := s.View()
	if err != nil {
		s.Close()
		return nil, nil, err
	}
	for _, note := range s.Damage() {
		fmt.Fprintf(c.stderr, "atlasbridge: %s\n", visible(note))
	}
	return s, v, nil
}

// asJSON prints structs as one array, with the field names and time format of the files.
func asJSON[T any](c *command, rows []T) int {
	out := make([]json.RawMessage, 0, len(rows))
	for _, r := range rows {
		out = append(out, appendValue(nil, reflect.ValueOf(r)))
	}
	return c.printJSON(out)
}

// sessionRow is a line of status.
type sessionRow struct {
	SessionRecord
	OpenPrompts int  `json:"open_prompts"`
	Polls       bool `json:"polls"` // listens to Telegram for all sessions
}

// cmdStatus is `atlasbridge status [--all] [--json]`.
func cmdStatus(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s, v, err := c.openState()
	if err != nil {
		return c.fail(err)
	}
	defer s.Close()
	poller := s.holder("poll.lock")
	rows := map[string]*sessionRow{}
	for id, r := range v.Sessions {
		row := &sessionRow{SessionRecord: *r, Polls: poller > 0 && r.Wrapper == poller && r.Status == "active"}
		if row.Status == "active" && s.holder("sessions/"+id+".lock") == 0 {
			row.Status = "crashed"
		}
		if row.Prompts = 0; row.Status == "active" || o.on("all") {
			rows[id] = row
		}
	}
	for _, p := range v.Prompts {
		if row := rows[p.SessionID]; row != nil {
			row.Prompts++
			if p.open() {
				row.OpenPrompts++
			}
		}
	}
	list := slices.SortedFunc(maps.Values(rows), func(a, b *sessionRow) int {
		return cmp.Or(strings.Compare(live(a), live(b)), b.StartedAt.Compare(a.StartedAt), strings.Compare(a.ID, b.ID))
	})
	if o.on("json") {
		return asJSON(c, list)
	}
	return c.printStatus(list, v, poller)
}

// live sorts active sessions first.
func live(r *sessionRow) string {
	if r.Status == "active" {
		return "0"
	}
	return "1"
}

func (c *command) printStatus(list []*sessionRow, v *View, poller int) int {
	now := time.Now()
	table := [][]string{{"SESSION", "PID", "STATE", "UP", "ASKED", "OUTPUT", "TOOL"}}
	for _, r := range list {
		state, end := r.Status, now
		if r.Status == "active" {
			state = cmp.Or(r.Activity, "running")
		}
		if r.EndedAt != nil {
			end = *r.EndedAt
		}
		seen := "-"
		if r.LastSeen != nil {
			seen = span(now.Sub(*r.LastSeen)) + " ago"
		}
		table = append(table, []string{shortID(r.ID), strconv.Itoa(r.PID), state, span(end.Sub(r.StartedAt)),
			fmt.Sprintf("%d/%d", r.OpenPrompts, r.Prompts), seen, strings.TrimSpace(r.Tool + " " + r.Label)})
	}
	if len(list) == 0 {
		fmt.Fprintln(c.stderr, "no sessions; start one with: atlasbridge run <tool>")
	} else {
		c.table(table)
	}
	for _, r := range v.Orphans() {
		fmt.Fprintf(c.stdout, "session %s ended, but its process %d still runs: kill %d\n", shortID(r.ID), r.PID, r.PID)
	}
	if poller != 0 {
		fmt.Fprintf(c.stdout, "Telegram is polled by process %d\n", poller)
	}
	return 0
}

// span is a duration in at most two units.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// cmdApprovals is `atlasbridge approvals [--json]`.
func cmdApprovals(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s, v, err := c.openState()
	if err != nil {
		return c.fail(err)
	}
	defer s.Close()
	now := time.Now()
	var open []*PromptRecord
	for _, p := range v.Prompts {
		if p.open() && v.active(p.SessionID) && now.Before(p.ExpiresAt) {
			open = append(open, p)
		}
	}
	slices.SortFunc(open, func(a, b *PromptRecord) int { return a.ExpiresAt.Compare(b.ExpiresAt) })
	if o.on("json") {
		return asJSON(c, open)
	}
	if len(open) == 0 {
		fmt.Fprintln(c.stderr, "no open questions")
		return 0
	}
	table := [][]string{{"PROMPT", "SESSION", "LEFT", "ANSWERS", "QUESTION"}}
	for _, p := range open {
		r := v.Sessions[p.SessionID]
		table = append(table, []string{shortID(p.ID), clip(cmp.Or(r.Label, r.Tool), 16), span(p.ExpiresAt.Sub(now)),
			clip(p.takes(), 24), strings.ReplaceAll(cmp.Or(p.Question, p.Excerpt), "\n", " ")})
	}
	c.table(table)
	return 0
}

// cmdAnswer is `atlasbridge answer <prompt-id> <value>`.
func cmdAnswer(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	s, _, err := c.openState()
	if err != nil {
		return c.fail(err)
	}
	defer s.Close()
	p, why, err := s.Decide(Decision{PromptID: o.args[0], Value: o.args[1], By: "cli:answer", Trusted: true}, time.Now())
	if err != nil {
		return c.fail(err)
	}
	if why != "" {
		if p.ID != "" {
			s.Audit().Append(Event{"REPLY_REJECTED", p.SessionID, p.ID, []Field{{"reason", string(why)}, {"by", "cli:answer"}}})
		}
		return c.fail(hinted(errors.New(string(why)), "atlasbridge approvals lists the open questions"))
	}
	fmt.Fprintf(c.stdout, "answered %s\n", shortID(p.ID))
	if err := s.Trouble(); err != nil {
		return c.fail(err)
	}
	return 0
}
