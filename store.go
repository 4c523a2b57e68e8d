// The store keeps state.jsonl: every session, question and answer, shared by all atlasbridge processes.
//
// One line is one record as it is after a change, {"v":1,"rec":…,"id":…,"at":…, …,"crc":"8 hex"}; the last line
// with a rec and id is the truth. A line counts if and only if (1) it ends in a newline, (2) crc is the CRC-32C
// of the line without its crc member and newline, (3) the lines that its member "more" promises follow. Times
// are RFC 3339 in UTC with microseconds.
//
// Writing: the lock on state.lock (never renamed) is held from reading what others appended to the fsync of
// what follows from it. One Update is one write. When it or its fsync fails the file is cut back; when that
// fails too, this process never writes again. So whoever holds the lock sees complete lines, and after a crash
// an Update is there as a whole or not at all.
//
// A crash can leave a torn tail: bytes after the last newline, or an Update whose last lines are missing. It is
// moved to state.jsonl.torn-TIME. A damaged line elsewhere stays and is reported; compaction moves it to
// state.jsonl.damaged. A question whose newest line it was is not answered any more.
//
// Compaction writes what is worth keeping to a new file, fsyncs it, renames it and fsyncs the folder; other
// processes notice that the path is another file and read it from its start. Answered questions stay for days
// after they expire, so that their nonces are known for as long as Telegram can repeat a tap.
//
// Every change of a status is followed by its entry in audit.log, in the same order. The chain's head is kept
// here without an fsync of its own: the next change carries it to the disk, and a head some entries old still
// shows any tampering with those before it.
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
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	schemaVersion  = 1
	compactMin     = 1 << 20             // bytes: a smaller file opens within 3 ms (measured)
	compactFactor  = 3                   // times what would be kept: a byte is rewritten once per two appended
	updateLife     = 48 * time.Hour      // twice the 24 h of https://core.telegram.org/bots/api#getting-updates
	retention      = 30 * 24 * time.Hour // default of retention_days
	decisionsLimit = 10                  // answers by phone per session and minute (SPEC section 8)
	maxText        = 200                 // bytes of a text answer when the prompt does not say (source 2, 3.3)
	maxIdleText    = 4096                // bytes of a message for an idle agent: one Telegram message
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
// keyboard or left the screen is resolved without a reply. A tap can be faster than the record that its
// message was delivered, so Routed takes replies too.
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

// Open tells whether the prompt waits for an answer.
func (p *PromptRecord) Open() bool {
	return p.Status == Created || p.Status == Routed || p.Status == AwaitingReply
}

// Record is one line of state.jsonl: a pointer to one of the structs below.
type Record interface {
	head() *Head
	kind() string
}

// Head is what every record begins with.
type Head struct {
	V   int       `json:"v"`
	Rec string    `json:"rec"`
	ID  string    `json:"id"`
	At  time.Time `json:"at"` // of this change; later than that of the record's line before

	size int // bytes of the line when it was read or appended
}

func (h *Head) head() *Head { return h }
func (h *Head) key() string { return h.Rec + " " + h.ID }

func (*SessionRecord) kind() string { return "session" }
func (*PromptRecord) kind() string  { return "prompt" }
func (*ReplyRecord) kind() string   { return "reply" }
func (*InputRecord) kind() string   { return "input" }
func (*UpdateRecord) kind() string  { return "update" }
func (*MetaRecord) kind() string    { return "meta" }

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

	records map[string]Record // all of them, by kind and id
}

// viewOf is the view of these records.
func viewOf(records map[string]Record) *View {
	v := &View{map[string]*SessionRecord{}, map[string]*PromptRecord{}, map[string]*InputRecord{},
		map[string]*ReplyRecord{}, map[string]*UpdateRecord{}, map[string]*MetaRecord{}, map[string]Record{}}
	for _, r := range records {
		v.put(r)
	}
	return v
}

// put makes r the truth about its id.
func (v *View) put(r Record) {
	v.records[r.head().key()] = r
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

// active tells whether the session runs, as far as the state says.
func (v *View) active(session string) bool {
	s := v.Sessions[session]
	return s != nil && s.Status == "active"
}

// illegal tells why r cannot follow old, which is now the truth about its id, "" when it can.
func (v *View) illegal(old, r Record) string {
	if s, ok := old.(*SessionRecord); ok && s.Status != "active" && r.(*SessionRecord).Status == "active" {
		return "an ended session cannot be active again"
	}
	from, _ := old.(*PromptRecord)
	p, ok := r.(*PromptRecord)
	if from == nil {
		from = &PromptRecord{}
	}
	switch {
	case old == r:
		return "it was changed in place"
	case ok && from.NonceUsed && (!p.NonceUsed || p.Nonce != from.Nonce):
		return "a used nonce stays used"
	case !ok || p.Status == from.Status:
		return ""
	case !slices.Contains(next[from.Status], p.Status):
		return fmt.Sprintf("%q cannot become %q", from.Status, p.Status)
	case (p.Status == Routed || p.Status == AwaitingReply || p.Status == ReplyReceived) && !v.active(p.SessionID):
		return "its session is not active"
	}
	for _, q := range v.Prompts {
		if p.Status == AwaitingReply && q.Status == AwaitingReply && q.SessionID == p.SessionID {
			return "another question of its session awaits a reply"
		}
	}
	return ""
}

// files are the calls that can fail, or be the last of a killed process, so that a test can make them.
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

// journal is a file of lines that several processes append to. Within the process its owner's mutex guards it.
type journal struct {
	files
	path   string
	lock   *os.File // kept reachable, for a collected file drops its lock
	f      *os.File // nil after a failed write: that descriptor is never written or fsynced again
	info   fs.FileInfo
	end    int64 // bytes of the file
	known  bool  // the folder's entry of the file is on the disk
	poison error // not nil: what the file ends with is unknown, nothing is written any more
}

func openJournal(path string, sys files) (*journal, error) {
	lock, err := openPrivate(strings.TrimSuffix(path, filepath.Ext(path))+".lock", os.O_RDWR|os.O_CREATE)
	return &journal{files: sys, path: path, lock: lock}, err
}

// acquire waits for the lock and makes sure that f is the file that the path names: another process may have
// compacted it. anew tells that it is not the one of the last time.
func (j *journal) acquire() (anew bool, err error) {
	if err := lockFile(j.lock, true); err != nil {
		return false, fmt.Errorf("locking %s: %w", j.lock.Name(), err)
	}
	fi, err := os.Lstat(j.path)
	if err == nil && j.f != nil && os.SameFile(fi, j.info) {
		j.end = fi.Size()
		return false, nil
	}
	f, err := openPrivate(j.path, os.O_RDWR|os.O_APPEND|os.O_CREATE)
	if err == nil {
		fi, err = f.Stat()
	}
	if err != nil {
		j.release()
		return false, err
	}
	anew = j.info == nil || !os.SameFile(fi, j.info)
	j.f.Close()
	j.f, j.info, j.end, j.known = f, fi, fi.Size(), false
	return anew, nil
}

func (j *journal) release() { unlockFile(j.lock) }

// writeTo is one write that is complete or failed, and durable when asked to.
func (j *journal) writeTo(f *os.File, b []byte, durable bool) error {
	n, err := j.write(f, b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err == nil && durable {
		err = j.sync(f)
	}
	return err
}

// append adds b at the end. After an error the file is as it was before, or poison is set.
func (j *journal) append(b []byte, durable bool) error {
	if j.poison != nil {
		return j.poison
	}
	if !j.known {
		if err := j.syncDir(filepath.Dir(j.path)); err != nil {
			return err
		}
		j.known = true
	}
	err := j.writeTo(j.f, b, durable)
	if err == nil {
		j.end += int64(len(b))
		return nil
	}
	if cut := j.truncate(j.f, j.end); cut != nil {
		j.poison = fmt.Errorf("%w; cutting the unfinished record off: %w; nothing is recorded any more", err, cut)
		return j.poison
	}
	j.f.Close()
	j.f = nil
	return err
}

// keep writes b durably at the end of the file that is named like the journal plus suffix; the caller closes it.
func (j *journal) keep(suffix string, b []byte) (*os.File, error) {
	f, err := openPrivate(j.path+suffix, os.O_RDWR|os.O_APPEND|os.O_CREATE)
	if err == nil {
		err = j.writeTo(f, b, true)
	}
	if err == nil {
		err = j.syncDir(filepath.Dir(j.path))
	}
	return f, err
}

// cut moves the bytes from at on to a file of their own, and then cuts them off.
func (j *journal) cut(at int64) error {
	tail := make([]byte, j.end-at)
	_, err := j.f.ReadAt(tail, at)
	if err == nil {
		var f *os.File
		f, err = j.keep(".torn-"+time.Now().UTC().Format(fileStamp), tail)
		f.Close()
	}
	if err == nil {
		err = j.truncate(j.f, at)
	}
	if err != nil {
		return fmt.Errorf("repairing the torn end of %s: %w", j.path, err)
	}
	j.end = at
	return nil
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
	older     bool  // a line has an earlier schema version
	trouble   error // what keeps the audit log or the compaction from working
	notes     []string
	damaged   []byte          // lines that do not count, as they stand in the file
	doubtful  map[string]bool // records whose newest line may be a damaged one
	followers map[*follower]bool
	held      map[string]*os.File // locks of this process's sessions and of the poller, by file name
	secrets   map[string]string   // given and not yet taken, by prompt
}

// openStore opens or creates the state in dir, which is made private to the user when it is missing.
func openStore(dir string) (*Store, error) { return openStoreWith(dir, systemFiles()) }

func openStoreWith(dir string, sys files) (*Store, error) {
	s := &Store{Dir: dir, Retention: retention, now: time.Now, view: viewOf(nil), doubtful: map[string]bool{},
		followers: map[*follower]bool{}, held: map[string]*os.File{}, secrets: map[string]string{}}
	err := secureDir(dir)
	if err == nil {
		err = secureDir(filepath.Join(dir, "sessions"))
	}
	if err == nil {
		s.log, err = openJournal(filepath.Join(dir, "state.jsonl"), sys)
	}
	if err == nil {
		s.audit = &Audit{note: s.noteHead}
		s.audit.log, err = openJournal(filepath.Join(dir, "audit.log"), sys)
	}
	if err == nil {
		err = s.begin()
	}
	if err != nil {
		return nil, fmt.Errorf("opening the state: %w", err)
	}
	defer s.end()
	if s.older && s.newer == nil {
		err = s.upgrade()
	}
	return s, err
}

// Close gives back files and locks; nothing is left to be written.
func (s *Store) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.held {
		f.Close()
	}
	for _, j := range []*journal{s.log, s.audit.log} {
		j.f.Close()
		j.lock.Close()
	}
}

func (s *Store) Audit() *Audit { return s.audit }

// begin takes the process's and the shared lock and reads what others appended; end gives both back.
func (s *Store) begin() error {
	s.mu.Lock()
	anew, err := s.log.acquire()
	if err == nil {
		if err = s.refresh(anew); err == nil {
			return nil
		}
		s.log.release()
	}
	s.mu.Unlock()
	return err
}

func (s *Store) end() {
	s.log.release()
	s.mu.Unlock()
}

// View is the state as it is now. Where it cannot be read any more, it is as it was, with an error.
func (s *Store) View() (*View, error) {
	err := s.begin()
	if err == nil {
		defer s.end()
		return viewOf(s.view.records), nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return viewOf(s.view.records), fmt.Errorf("reading the state: %w", err)
}

// Damage says what was found wrong in the state file, a sentence each; nothing of it was dropped.
func (s *Store) Damage() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := slices.Clone(s.notes)
	if fi, err := os.Lstat(s.log.path + ".damaged"); err == nil {
		out = append(out, fmt.Sprintf("state.jsonl.damaged holds %d bytes of damaged lines", fi.Size()))
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
func (s *Store) refresh(anew bool) error {
	if s.log.poison != nil {
		return nil
	}
	before := s.view.records
	if anew || s.log.end < s.read {
		s.view, s.read, s.notes, s.damaged, s.doubtful = viewOf(nil), 0, nil, nil, map[string]bool{}
		defer s.plan()
	}
	if s.log.end == s.read {
		return nil
	}
	added := make([]byte, s.log.end-s.read)
	if _, err := s.log.f.ReadAt(added, s.read); err != nil {
		return fmt.Errorf("reading %s: %w", s.log.path, err)
	}
	lines := s.scan(added)
	for i, r := range decode(lines) {
		if r == nil {
			s.damage(lines[i], "not a record of its kind")
			continue
		}
		old := before[r.head().key()]
		s.view.put(r)
		if old == nil || !old.head().At.Equal(r.head().At) {
			s.publish(r)
		}
	}
	s.torn = nil
	if torn := s.log.end - s.read; torn > 0 {
		if s.torn = s.log.cut(s.read); s.torn == nil {
			s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a torn end of %d bytes was moved aside", torn))
		}
	}
	return nil
}

// scan returns the last line of each record in b, moves s.read behind the last complete Update, and sorts out
// what does not count.
func (s *Store) scan(b []byte) [][]byte {
	var lines [][]byte // nil: damaged
	var keys []string
	latest := map[string]int{}
	whole, owed, start := 0, 0, s.read
	for line := range bytes.Lines(b) {
		if start += int64(len(line)); line[len(line)-1] != '\n' {
			break
		}
		h, more, err := parseHead(line)
		if owed = max(0, owed-1); err != nil {
			s.damage(line, err.Error())
			line = nil
		} else if owed = more; h.V > schemaVersion {
			s.newer = fmt.Errorf("state.jsonl was written by a newer atlasbridge (schema %d): update this one", h.V)
		}
		s.older = s.older || err == nil && h.V < schemaVersion
		if lines, keys = append(lines, line), append(keys, h.key()); owed == 0 {
			whole, s.read = len(lines), start
		}
	}
	for i, k := range keys[:whole] {
		if lines[i] == nil {
			s.doubtful[k] = true
			continue
		}
		if j, ok := latest[k]; ok {
			lines[j] = nil
		}
		latest[k] = i
		delete(s.doubtful, k)
	}
	return slices.DeleteFunc(lines[:whole], func(line []byte) bool { return line == nil })
}

func (s *Store) damage(line []byte, why string) {
	if s.damaged = append(s.damaged, line...); len(s.notes) < 20 {
		s.notes = append(s.notes, fmt.Sprintf("state.jsonl: a line of %d bytes, %s…, is damaged: %s", len(line),
			strconv.Quote(string(line[:min(len(line), 60)])), why))
	}
}

// castagnoli is CRC-32C's table; crcMember the length of the member that holds it, with what ends the line.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const crcMember = len(`,"crc":"00000000"}` + "\n")

// stamps finds the times that encoding/json wrote, without the zeros at their end.
var stamps = regexp.MustCompile(`at":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)

// marshal is v as JSON on one line, times with six decimals.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return stamps.ReplaceAllFunc(bytes.TrimSuffix(b.Bytes(), []byte("\n")), func(m []byte) []byte {
		t, err := time.Parse(time.RFC3339Nano, string(m[5:len(m)-1]))
		if err != nil {
			return m
		}
		return t.AppendFormat(slices.Clone(m[:5]), stampLayout+`"`)
	}), nil
}

// encode is the line of a record; more lines of the same Update follow it.
func encode(r Record, more int) ([]byte, error) {
	b, err := marshal(r)
	if err != nil {
		return nil, err
	}
	if more > 0 {
		b = fmt.Appendf(b[:len(b)-1], `,"more":%d}`, more)
	}
	return fmt.Appendf(b[:len(b)-1], `,"crc":"%08x"}`+"\n", crc32.Checksum(b, castagnoli)), nil
}

// parseHead checks a line's checksum and reads what every line begins with, and how many lines of its Update
// follow. With an error, the head is what the line says all the same.
func parseHead(line []byte) (h Head, more int, err error) {
	v, rest, _ := bytes.Cut(bytes.TrimPrefix(line, []byte(`{"v":`)), []byte(`,"rec":"`))
	rec, rest, _ := bytes.Cut(rest, []byte(`","id":"`))
	id, _, ok := bytes.Cut(rest, []byte(`","at":"`))
	if h.V, err = strconv.Atoi(string(v)); err == nil && ok && !bytes.ContainsAny(id, `"\`) {
		h.Rec, h.ID = string(rec), string(id)
	} else if json.Unmarshal(line, &h) != nil {
		return Head{}, 0, errors.New("it is not a record")
	}
	n := len(line) - crcMember
	if n < 0 || string(line[n:n+8]) != `,"crc":"` || string(line[n+16:]) != "\"}\n" {
		return h, 0, errors.New("it has no checksum")
	}
	sum := crc32.Update(crc32.Checksum(line[:n], castagnoli), castagnoli, []byte("}"))
	if string(line[n+8:n+16]) != fmt.Sprintf("%08x", sum) {
		return h, 0, errors.New("its checksum does not match")
	}
	if i := bytes.LastIndexByte(line[:n], ','); i > 0 && bytes.HasPrefix(line[i:], []byte(`,"more":`)) {
		more, _ = strconv.Atoi(string(line[i+len(`,"more":`) : n]))
	}
	return h, more, nil
}

// kinds makes an empty record of each kind.
var kinds = map[string]func() Record{
	"session": func() Record { return new(SessionRecord) }, "prompt": func() Record { return new(PromptRecord) },
	"reply": func() Record { return new(ReplyRecord) }, "input": func() Record { return new(InputRecord) },
	"update": func() Record { return new(UpdateRecord) }, "meta": func() Record { return new(MetaRecord) },
}

// decode reads the records of checked lines, on all processors; nil for a line that is none.
func decode(lines [][]byte) []Record {
	out := make([]Record, len(lines))
	var wg sync.WaitGroup
	workers := min(runtime.GOMAXPROCS(0), 1+len(lines)/64)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < len(lines); i += workers {
				h, _, _ := parseHead(lines[i])
				if kinds[h.Rec] == nil {
					continue
				}
				if r := kinds[h.Rec](); json.Unmarshal(lines[i], r) == nil {
					r.head().size = len(lines[i])
					out[i] = r
				}
			}
		})
	}
	wg.Wait()
	return out
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
	unaudited := s.audit.begin() // before the state is released, so that both files have the same order
	s.end()
	if unaudited == nil {
		unaudited = s.audit.commit(events...)
	}
	if unaudited != nil {
		s.mu.Lock()
		s.trouble = fmt.Errorf("the audit log lacks an entry: %w", unaudited)
		s.mu.Unlock()
	}
	return err
}

// change is Update under the lock. When it returns without error, the records are on the disk.
func (s *Store) change(fn func(*View) ([]Record, error)) (events []Event, err error) {
	recs, err := fn(s.view)
	if err != nil || len(recs) == 0 {
		return nil, err
	}
	var lines []byte
	for i, r := range recs {
		h := r.head()
		h.V, h.Rec = schemaVersion, r.kind()
		h.At = s.now().UTC().Truncate(time.Microsecond)
		old := s.view.records[h.key()]
		if old != nil && !h.At.After(old.head().At) {
			h.At = old.head().At.Add(time.Microsecond)
		}
		if why := s.view.illegal(old, r); why != "" {
			return nil, fmt.Errorf("recording %s: %s", h.key(), why)
		}
		line, err := encode(r, len(recs)-1-i)
		if err != nil {
			return nil, fmt.Errorf("recording %s: %w", h.key(), err)
		}
		h.size = len(line)
		lines = append(lines, line...)
		events = append(events, auditEvents(old, r)...)
	}
	if err := s.append(lines, true); err != nil {
		return nil, err
	}
	for _, r := range recs {
		s.view.put(r)
		s.publish(r)
	}
	if s.read >= s.compactAt {
		if err := s.compact(); err != nil {
			s.trouble, s.compactAt = err, 2*s.read
		}
	}
	return events, nil
}

func (s *Store) append(lines []byte, durable bool) error {
	err := cmp.Or(s.newer, s.torn)
	if err == nil {
		err = s.log.append(lines, durable)
	}
	if err == nil {
		s.read = s.log.end
		return nil
	}
	return fmt.Errorf("recording: %w", err)
}

// noteHead keeps the audit chain's head in the state, without an fsync.
func (s *Store) noteHead(seq int64, hash string) {
	if s.begin() != nil {
		return // the next head will do
	}
	defer s.end()
	s.trouble = nil
	if m := s.view.Meta["audit"]; m == nil || m.Seq < seq {
		m = &MetaRecord{Head: Head{V: schemaVersion, Rec: "meta", ID: "audit", At: s.now().UTC()}, Seq: seq, Hash: hash}
		line, err := encode(m, 0)
		if s.trouble = cmp.Or(err, s.append(line, false)); s.trouble == nil {
			s.view.put(m)
		}
	}
}

// Move takes a prompt along one legal transition; change may fill in more fields. false: the guard failed and
// nothing changed, except that the message id of a question answered before its delivery was recorded is kept.
// Moving to Injected records the reply too.
func (s *Store) Move(id string, to State, change func(*PromptRecord)) (bool, error) {
	return s.move(id, to, s.now(), change)
}

// Expire moves a prompt to Expired if now is not before its expires_at. A caller whose clock may be set back
// passes the prompt's creation time plus the monotonic time since.
func (s *Store) Expire(id string, now time.Time) (bool, error) { return s.move(id, Expired, now, nil) }

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
		if p.Status = to; old.Status == to || v.illegal(old, &p) != "" {
			if to != AwaitingReply || p.MsgID == old.MsgID {
				return nil, nil
			}
			late := *old
			late.MsgID = p.MsgID
			return []Record{&late}, nil
		}
		moved = true
		at := now.UTC()
		if old.Open() && !p.Open() {
			p.NonceUsed, p.DecidedAt = true, cmp.Or(p.DecidedAt, &at)
			if to == Expired {
				p.DecidedBy = ref("auto:timeout")
			}
		}
		if to != Injected {
			return []Record{&p}, nil
		}
		reply := &ReplyRecord{Head{ID: id}, id, p.SessionID, *cmp.Or(p.Value, ref("")), replySource(&p), at}
		return []Record{&p, reply}, nil
	})
	return moved && err == nil, err
}

func ref[T any](v T) *T { return &v }

// byWhom says who decided, in a message.
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
	p := &PromptRecord{}
	var why Refusal
	err := s.Update(func(v *View) ([]Record, error) {
		old, refusal := v.find(d)
		if why = refusal; why != "" {
			return nil, nil
		}
		var value, reason string
		p, why = old, s.guard(v, old, d, now)
		if why == "" {
			value, reason, why = old.judge(d.Value)
		}
		if why != "" {
			return nil, nil
		}
		q := *old
		p = &q
		q.Status, q.NonceUsed, q.DecidedAt, q.DecidedBy, q.Value = ReplyReceived, true, ref(now.UTC()), &d.By, &value
		q.Reason = cmp.Or(reason, q.Reason)
		if q.Secret {
			q.Value, q.ValueHidden = nil, true
			s.secrets[q.ID] = value
		} else if value == "cancel" && q.ambiguous() {
			q.Status = Canceled
		}
		if d.UpdateID == 0 {
			return []Record{p}, nil
		}
		return []Record{p, &UpdateRecord{Head{ID: strconv.FormatInt(d.UpdateID, 10)}, "decision"}}, nil
	})
	if err != nil {
		s.TakeSecret(p.ID)
		return PromptRecord{}, "", err
	}
	return *p, why, nil
}

// TakeSecret is the answer to a secret prompt, once. It exists in the memory of this process only.
func (s *Store) TakeSecret(promptID string) (value string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok = s.secrets[promptID]
	delete(s.secrets, promptID)
	return value, ok
}

// find is the prompt that the decision names. Of several with the same short id, the one that is open.
func (v *View) find(d Decision) (*PromptRecord, Refusal) {
	names := func(short, id string) bool { return short == id || len(short) >= 8 && strings.HasPrefix(id, short) }
	var hits []*PromptRecord
	for id, p := range v.Prompts {
		if names(d.PromptID, id) && (d.Trusted && d.SessionID == "" || names(d.SessionID, p.SessionID)) {
			hits = append(hits, p)
		}
	}
	if len(hits) > 1 {
		hits = slices.DeleteFunc(hits, func(p *PromptRecord) bool { return !p.Open() })
	}
	switch len(hits) {
	case 0:
		return nil, Refusal("there is no question " + clip(strconv.Quote(d.PromptID), 40) + " in that session")
	case 1:
		return hits[0], ""
	}
	return nil, "several questions have that short id: give the whole id"
}

// guard checks everything about a decision but its value.
func (s *Store) guard(v *View, p *PromptRecord, d Decision, now time.Time) Refusal {
	n := len(d.Nonce)
	shown := (n == 16 || n == 32) && len(p.Nonce) == 32 &&
		subtle.ConstantTimeCompare([]byte(d.Nonce), []byte(p.Nonce[:n])) == 1
	switch {
	case !d.Trusted && !shown:
		return "the answer does not belong to this question"
	case s.doubtful[p.key()]:
		return "the question's record is damaged, so it takes no answer any more"
	case p.Status == Expired || p.Open() && d.By != "cli:local" && !now.Before(p.ExpiresAt):
		return Refusal("the question expired at " + p.ExpiresAt.Local().Format(time.TimeOnly))
	case !p.Open() && p.DecidedBy != nil:
		at := p.DecidedAt.Local().Format(time.TimeOnly)
		return Refusal(fmt.Sprintf("already answered %s at %s", byWhom(p.DecidedBy), at))
	case p.Status == Failed || !v.active(p.SessionID):
		return "the question's session has ended"
	case !p.Open():
		return "the question has left the screen"
	case p.Status == Created && !d.Trusted:
		return "the question has not been asked yet"
	case p.Secret && s.held["sessions/"+p.SessionID+".lock"] == nil:
		return "a secret can only be answered at its session's own keyboard"
	}
	phone := func(by *string) bool { return by != nil && strings.HasPrefix(*by, "telegram:") }
	recent := 0
	for _, q := range v.Prompts {
		if q.SessionID == p.SessionID && phone(q.DecidedBy) && now.Sub(*q.DecidedAt).Abs() < time.Minute {
			recent++
		}
	}
	if phone(&d.By) && recent >= decisionsLimit {
		return Refusal(fmt.Sprintf("%d answers in a minute for this session: wait a little, then answer again", recent))
	}
	return ""
}

// textChoice is how agents label the choice that opens a field for text (measured).
var textChoice = regexp.MustCompile(`(?i)^(type something|other)|tell claude`)

// judge says what an answer means for the question: the value to record, the operator's reason, or why not.
func (p *PromptRecord) judge(given string) (value, reason string, why Refusal) {
	word := strings.ToLower(given)
	word = cmp.Or(map[string]string{"yes": "y", "no": "n", "": "enter"}[word], word)
	deny, isDeny := strings.CutPrefix(given, "deny:")
	takesText := p.Type == FreeText || p.Type == Unknown || p.MaxLength > 0 && !p.Permission ||
		slices.ContainsFunc(p.Choices, func(c Choice) bool { return textChoice.MatchString(c.Label) })
	switch {
	case p.Secret:
		return given, "", p.text(given)
	case given == "default" && p.SafeDefault != nil:
		return *p.SafeDefault, "", ""
	case given == "default":
		return "", "", "this question has no safe default"
	case isDeny && p.Permission:
		if i := slices.IndexFunc(p.Choices, func(c Choice) bool { return c.Hook == "deny" }); i >= 0 {
			return p.Choices[i].Key, deny, p.text(deny)
		}
		return *cmp.Or(p.SafeDefault, ref("deny")), deny, p.text(deny)
	case p.offered(given):
		return given, "", ""
	case p.Type != FreeText && p.offered(word):
		return word, "", ""
	case takesText:
		return given, "", p.text(given)
	}
	given = clip(strconv.Quote(given), 40)
	return "", "", Refusal("not an answer to this question: " + given + "; it takes " + p.takes())
}

// offered tells whether the value is one that a button could have sent.
func (p *PromptRecord) offered(value string) bool {
	keys := strings.Split(value, ",")
	chosen := 0
	for i, k := range keys {
		if slices.ContainsFunc(p.Choices, func(c Choice) bool { return c.Key == k }) && !slices.Contains(keys[:i], k) {
			chosen++
		}
	}
	switch value {
	case "y", "n":
		return chosen == 1 || p.Type == YesNo && len(p.Choices) == 0
	case "enter":
		return chosen == 1 || p.Type == ConfirmEnter || p.ambiguous()
	case "esc":
		return chosen == 1 || p.ambiguous() || p.Permission || p.SafeDefault != nil && *p.SafeDefault == "esc"
	case "cancel":
		return chosen == 1 || p.ambiguous()
	}
	return chosen == len(keys) && (chosen == 1 || p.Multi)
}

// ambiguous tells whether the ambiguity protocol (SPEC section 6) asks: Send Enter, Cancel, or show more.
func (p *PromptRecord) ambiguous() bool {
	unsure := p.Confidence == "low" || p.Confidence == "medium" && !slices.Contains(p.Signals, "pattern")
	return unsure || p.Type == Unknown
}

// text checks an answer that is typed as it is. Control characters would be keys, not text.
func (p *PromptRecord) text(s string) Refusal {
	limit := cmp.Or(p.MaxLength, map[bool]int{false: maxText, true: maxIdleText}[p.Idle])
	control := func(r rune) bool { return r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 }
	if len(s) > limit {
		return Refusal(fmt.Sprintf("the answer has %d bytes, %d are allowed", len(s), limit))
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, control) {
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
	for _, word := range strings.Fields("y n enter esc cancel") {
		if p.offered(word) && !slices.Contains(out, word) {
			out = append(out, word)
		}
	}
	return cmp.Or(strings.Join(out, " "), "text")
}

// follower is one Follow call.
type follower struct {
	session string
	queue   []Record      // guarded by Store.mu
	wake    chan struct{} // has room for one
}

func (s *Store) publish(r Record) {
	p, _ := r.(*PromptRecord)
	in, _ := r.(*InputRecord)
	for f := range s.followers {
		if p != nil && p.SessionID == f.session || in != nil && in.SessionID == f.session {
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
		for ctx.Err() == nil {
			for _, r := range s.changed(f) {
				select {
				case out <- r:
				case <-ctx.Done():
				}
			}
			wait := 500 * time.Millisecond
			if changed != nil {
				wait = 5 * time.Second // in case the system lost a change
			} else if fast != nil && fast() {
				wait = 50 * time.Millisecond
			}
			select {
			case <-f.wake:
			case <-changed:
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		s.mu.Lock()
		delete(s.followers, f)
		s.mu.Unlock()
	}()
	return out
}

// changed is what is new for the follower. When no process changed the file, that costs one stat and no lock.
func (s *Store) changed(f *follower) (queue []Record) {
	s.mu.Lock()
	fi, err := os.Lstat(s.log.path)
	same := err == nil && os.SameFile(fi, s.log.info) && fi.Size() == s.read
	s.mu.Unlock()
	if !same && s.begin() == nil {
		s.end()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	queue, f.queue = f.queue, nil
	return queue
}

// keep is the record as compaction writes it, nil when its time has passed.
func (s *Store) keep(r Record, now time.Time) Record {
	age := now.Sub(r.head().At)
	keep := age < s.Retention
	switch r := r.(type) {
	case *SessionRecord:
		keep = keep || r.Status == "active"
	case *PromptRecord:
		final := len(next[r.Status]) == 0 || r.Status == Expired
		keep = keep || now.Sub(r.ExpiresAt) < updateLife || !final && s.view.active(r.SessionID)
		if keep && final && age > updateLife {
			p := *r
			p.Full, p.Recent = "", ""
			return &p
		}
	case *InputRecord:
		keep = age < updateLife || r.Status == "queued" && s.view.active(r.SessionID)
	case *UpdateRecord:
		keep = age < updateLife
	}
	if !keep && r.kind() != "meta" {
		return nil
	}
	return r
}

// plan sets the size at which a compaction is worth it: at once when a session or question is too old.
func (s *Store) plan() {
	live, old := 0, false
	for _, r := range s.view.records {
		if s.keep(r, s.now()) != nil {
			live += r.head().size
		} else if k := r.kind(); k == "session" || k == "prompt" {
			old = true
		}
	}
	if s.compactAt = int64(max(compactMin, compactFactor*live)); old {
		s.compactAt = 0
	}
}

// compact puts a file in place that holds only what is worth keeping. The lock is held. After an error the old
// file is still the state, or the new one is and its name is made durable before the next append.
func (s *Store) compact() error {
	records := map[string]Record{}
	for k, r := range s.view.records {
		if p, ok := r.(*PromptRecord); ok && s.doubtful[k] && p.Open() {
			return nil // its older line would look like the truth: Reap ends it first
		}
		if r = s.keep(r, s.now()); r != nil {
			records[k] = r
		}
	}
	var out []byte
	for _, r := range slices.SortedFunc(maps.Values(records), func(a, b Record) int {
		return cmp.Or(a.head().At.Compare(b.head().At), strings.Compare(a.head().key(), b.head().key()))
	}) {
		line, err := encode(r, 0)
		if err != nil {
			return err
		}
		out = append(out, line...)
	}
	if len(s.damaged) > 0 {
		f, err := s.log.keep(".damaged", s.damaged)
		if f.Close(); err != nil {
			return fmt.Errorf("keeping damaged lines: %w", err)
		}
	}
	if err := s.log.replace(out); err != nil {
		return fmt.Errorf("compacting the state: %w", err)
	}
	s.view, s.read, s.damaged, s.notes, s.doubtful = viewOf(records), int64(len(out)), nil, nil, map[string]bool{}
	s.plan()
	return nil
}

// replace makes b the whole content, by a rename.
func (j *journal) replace(b []byte) error {
	os.Remove(j.path + ".new") // of a process that died while writing it: the lock is ours
	f, err := j.keep(".new", b)
	var fi fs.FileInfo
	if err == nil {
		fi, err = f.Stat()
	}
	if err == nil {
		err = j.rename(f.Name(), j.path)
	}
	if err != nil {
		f.Close()
		os.Remove(j.path + ".new")
		return err
	}
	j.f.Close()
	j.f, j.info, j.end = f, fi, int64(len(b))
	j.known = j.syncDir(filepath.Dir(j.path)) == nil
	return nil
}

// upgrade rewrites lines of an earlier schema, whose file is kept as a backup.
func (s *Store) upgrade() error {
	old := make([]byte, s.log.end)
	_, err := s.log.f.ReadAt(old, 0)
	if err == nil {
		var f *os.File
		f, err = s.log.keep(".backup-"+s.now().UTC().Format(fileStamp), old)
		f.Close()
	}
	if err != nil {
		return fmt.Errorf("backing up before the upgrade: %w", err)
	}
	for _, r := range s.view.records {
		r.head().V = schemaVersion
	}
	s.older = false
	return s.compact()
}

// HoldSession takes sessions/<id>.lock for the life of the process, before the session's record is written:
// an active session whose lock can be taken is dead.
func (s *Store) HoldSession(id string) (release func(), err error) {
	return s.hold("sessions/" + id + ".lock")
}

// TryPoll takes poll.lock if it is free.
func (s *Store) TryPoll() (release func(), held bool, err error) {
	if release, err = s.hold("poll.lock"); errors.Is(err, errLocked) {
		return nil, false, nil
	}
	return release, err == nil, err
}

// hold takes the lock of that name in the state folder. The pid in the file is for people and status only.
func (s *Store) hold(name string) (release func(), err error) {
	f, err := openPrivate(filepath.Join(s.Dir, name), os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	if err = lockFile(f, false); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", name, err)
	}
	f.Truncate(0)
	fmt.Fprintf(f, "%d %d\n", os.Getpid(), processStart(os.Getpid()))
	s.mu.Lock()
	s.held[name] = f
	s.mu.Unlock()
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.held, name)
		f.Close()
	}), nil
}

// holder is the pid in a lock file, −1 when it cannot be read; 0 only when the lock is surely free.
func (s *Store) holder(name string) int {
	pid := -1
	f, err := os.OpenFile(filepath.Join(s.Dir, name), os.O_RDWR, 0)
	if err == nil {
		defer f.Close()
		fmt.Fscan(f, &pid)
		err = lockFile(f, false)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	return pid
}

// Reap marks sessions whose lock can be taken as crashed and fails their prompts; it returns the sessions and
// the prompts whose messages are to be edited.
func (s *Store) Reap(now time.Time) (sessions []*SessionRecord, prompts []*PromptRecord, err error) {
	view, err := s.View()
	if err != nil {
		return nil, nil, err
	}
	dead := map[string]bool{}
	for id, r := range view.Sessions {
		if dead[id] = r.Status != "active" || s.holder("sessions/"+id+".lock") == 0; dead[id] {
			os.Remove(filepath.Join(s.Dir, "sessions", id+".lock"))
		}
	}
	err = s.Update(func(v *View) (recs []Record, _ error) {
		s.plan()
		for id, r := range v.Sessions {
			if q := *r; dead[id] && r.Status == "active" {
				q.Status, q.Activity, q.EndedAt = "crashed", "", ref(now.UTC())
				sessions, recs = append(sessions, &q), append(recs, &q)
			}
		}
		for _, p := range v.Prompts {
			q := *p
			q.Status, q.NonceUsed, q.Reason = Failed, true, "the session ended before it was answered"
			if s.doubtful[p.key()] && p.Open() {
				q.Reason = "its record in the state file is damaged"
			} else if !dead[p.SessionID] || len(next[p.Status]) == 0 || p.Status == Expired {
				continue
			} else if !p.Open() {
				q.Reason = "the session ended: whether the answer was typed is uncertain"
			}
			prompts, recs = append(prompts, &q), append(recs, &q)
		}
		for _, in := range v.Inputs {
			if q := *in; dead[in.SessionID] && in.Status == "queued" {
				q.Status, q.Reason = "refused", "the session has ended"
				recs = append(recs, &q)
			}
		}
		return recs, nil
	})
	return sessions, prompts, err
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
	return fmt.Sprintf("%x", b)
}

// shortID is the first 8 hex digits, as shown to people and in callback data.
func shortID(id string) string { return id[:min(8, len(id))] }

// withState opens the state for a command, and reports what is damaged.
func (c *command) withState(do func(*options, *Store, *View) int) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	s, err := openStore(dir)
	if err != nil {
		return c.fail(err)
	}
	defer s.Close()
	for _, note := range s.Damage() {
		fmt.Fprintln(c.stderr, "atlasbridge:", note)
	}
	v, err := s.View()
	if err != nil {
		return c.fail(err)
	}
	return do(o, s, v)
}

// printRows prints records as one array, with the field names and time format of the files.
func printRows[T any](c *command, rows []T) int {
	b, err := marshal(append([]T{}, rows...))
	if err != nil {
		return c.fail(err)
	}
	return c.printJSON(json.RawMessage(b))
}

// sessionRow is a line of status.
type sessionRow struct {
	*SessionRecord
	Open  int  `json:"open_prompts"`
	Polls bool `json:"polls"` // listens to Telegram for all sessions
}

// cmdStatus is `atlasbridge status [--all] [--json]`.
func cmdStatus(c *command) int { return c.withState(c.status) }

func (c *command) status(o *options, s *Store, v *View) int {
	poller := s.holder("poll.lock")
	rows := map[string]*sessionRow{}
	for id, r := range v.Sessions {
		q := *r
		if q.Prompts = 0; q.Status == "active" && s.holder("sessions/"+id+".lock") == 0 {
			q.Status = "crashed"
		}
		if q.Status == "active" || o.on("all") {
			rows[id] = &sessionRow{&q, 0, poller > 0 && r.Wrapper == poller}
		}
	}
	for _, p := range v.Prompts {
		if r := rows[p.SessionID]; r != nil {
			r.Prompts++
			r.Open += map[bool]int{true: 1}[p.Open()]
		}
	}
	list := slices.SortedFunc(maps.Values(rows), func(a, b *sessionRow) int {
		return cmp.Or(strings.Compare(a.Status, b.Status), b.StartedAt.Compare(a.StartedAt)) // "active" sorts first
	})
	if o.on("json") {
		return printRows(c, list)
	}
	table := [][]string{{"SESSION", "PID", "STATE", "UP", "OPEN", "ASKED", "OUTPUT", "TOOL"}}
	for _, r := range list {
		now, state, seen := time.Now(), r.Status, "-"
		if state == "active" {
			state = cmp.Or(r.Activity, state)
		}
		if r.LastSeen != nil {
			seen = span(now.Sub(*r.LastSeen)) + " ago"
		}
		up := span(cmp.Or(r.EndedAt, &now).Sub(r.StartedAt))
		table = append(table, []string{shortID(r.ID), fmt.Sprint(r.PID), state, up, fmt.Sprint(r.Open),
			fmt.Sprint(r.Prompts), seen, r.Tool + " " + r.Label})
	}
	if c.table(table); len(list) == 0 {
		fmt.Fprintln(c.stderr, "no sessions; start one: atlasbridge run <tool>")
	}
	for _, r := range v.Orphans() {
		fmt.Fprintf(c.stdout, "session %s is over but its process still runs: kill %d\n", shortID(r.ID), r.PID)
	}
	if poller != 0 {
		fmt.Fprintf(c.stdout, "process %d listens to Telegram\n", poller)
	}
	return 0
}

// span is a duration as people say it, without its seconds from a minute on.
func span(d time.Duration) string {
	if d < time.Minute {
		return max(d, 0).Truncate(time.Second).String()
	}
	return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
}

// cmdApprovals is `atlasbridge approvals [--json]`.
func cmdApprovals(c *command) int {
	return c.withState(func(o *options, _ *Store, v *View) int {
		open := slices.SortedFunc(maps.Values(v.Prompts), func(a, b *PromptRecord) int {
			return a.ExpiresAt.Compare(b.ExpiresAt)
		})
		open = slices.DeleteFunc(open, func(p *PromptRecord) bool {
			return !p.Open() || !v.active(p.SessionID) || !time.Now().Before(p.ExpiresAt)
		})
		if o.on("json") {
			return printRows(c, open)
		}
		table := [][]string{{"PROMPT", "SESSION", "LEFT", "ANSWERS", "QUESTION"}}
		for _, p := range open {
			r := v.Sessions[p.SessionID]
			table = append(table, []string{shortID(p.ID), clip(cmp.Or(r.Label, r.Tool), 16),
				span(time.Until(p.ExpiresAt)), clip(p.takes(), 24),
				strings.ReplaceAll(cmp.Or(p.Question, p.Excerpt), "\n", " ")})
		}
		if c.table(table); len(open) == 0 {
			fmt.Fprintln(c.stderr, "no open questions")
		}
		return 0
	})
}

// cmdAnswer is `atlasbridge answer <prompt-id> <value>`.
func cmdAnswer(c *command) int {
	return c.withState(func(o *options, s *Store, _ *View) int {
		d := Decision{PromptID: o.args[0], Value: o.args[1], By: "cli:answer", Trusted: true}
		p, why, err := s.Decide(d, time.Now())
		if err == nil && why != "" {
			s.audit.Append(Event{"REPLY_REJECTED", p.SessionID, p.ID, []Field{{"reason", string(why)}, {"by", d.By}}})
			err = hinted(errors.New(string(why)), "atlasbridge approvals lists the open questions")
		}
		if err = cmp.Or(err, s.Trouble()); err != nil {
			return c.fail(err)
		}
		fmt.Fprintln(c.stdout, "answered", shortID(p.ID))
		return 0
	})
}

/* ===== hook: what a tool's own hook system asks ===== */

// The hook's part of the bridge: `atlasbridge hook` is started by the tool, reads its JSON, stores a prompt for
// the session that runs the tool, waits for the decision and prints the tool's reply. It fails safe: whatever
// is unparsable, lost, late or killed prints nothing, which leaves the question to the tool's own dialog.

const (
	maxHookInput = 8 << 20         // bytes of JSON from the tool: a written file is in it
	aliveEvery   = 5 * time.Second // between looks whether the session still lives
	hookSlack    = time.Minute     // the tool waits this much longer for the hook than a question lives
)

// hookInput is what claude writes to a hook's stdin (measured on 2.1; codex uses the same form).
type hookInput struct {
	Event     string          `json:"hook_event_name"`
	Cwd       string          `json:"cwd"`
	Tool      string          `json:"tool_name"`
	Input     json.RawMessage `json:"tool_input"`
	UseID     string          `json:"tool_use_id"`
	Agent     string          `json:"agent_type"`
	LastWords string          `json:"last_assistant_message"`
}

// hookReply is the decision in claude's form.
type hookReply struct {
	Output struct {
		Event    string `json:"hookEventName"`
		Decision struct {
			Behavior string          `json:"behavior"`
			Message  string          `json:"message,omitempty"`
			Updated  json.RawMessage `json:"updatedInput,omitempty"`
		} `json:"decision"`
	} `json:"hookSpecificOutput"`
}

// cmdHook is `atlasbridge hook`. Its exit code is always 0 and its output either a decision or nothing: claude
// takes anything else for a failing hook and says so in the dialog.
func cmdHook(c *command) int {
	data, err := io.ReadAll(io.LimitReader(c.stdin, maxHookInput))
	var in hookInput
	if err != nil || json.Unmarshal(data, &in) != nil {
		return 0
	}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return 0
	}
	st, err := openStore(dir)
	if err != nil {
		return 0
	}
	h := &hook{in: in, st: st, session: c.getenv("ATLASBRIDGE_SESSION")}
	if h.session == "" || !st.Alive(h.session) { // the session's record may come later than its tool's first hook
		return 0
	}
	switch in.Event {
	case "PreToolUse":
		st.Audit().Append(toolCallEvent(h.session, in.Tool, in.UseID, in.Input))
	case "Stop":
		h.lastWords()
	case "PermissionRequest":
		cfg, err := loadConfig(dir, c.getenv, nil)
		if err != nil {
			return 0
		}
		h.life = cfg.PermissionTimeout
		if reply := h.ask(c.ctx); reply != nil {
			json.NewEncoder(c.stdout).Encode(reply)
			st.Move(h.last, Injected, nil)
		}
	}
	return 0
}

// toolCallEvent is the audit's entry for one tool call: the arguments by their hash and their beginning, redacted.
func toolCallEvent(session, tool, id string, input json.RawMessage) Event {
	return Event{Name: "TOOL_CALL", SessionID: session, Fields: []Field{
		{"tool", tool}, {"tool_use_id", id}, {"arguments", clip(visible(redact(string(input))), 500)}}}
}

// hook is one run of the hook command that has to decide something.
type hook struct {
	in      hookInput
	st      *Store
	session string
	life    time.Duration
	last    string // id of the prompt answered last
}

// lastWords hands the beginning of the tool's answer to the session, for its idle notice.
func (h *hook) lastWords() {
	words := clip(visible(redact(h.in.LastWords)), 1000)
	h.st.Update(func(*View) ([]Record, error) {
		return []Record{&InputRecord{Head: Head{Rec: "input", ID: newID()}, SessionID: h.session, Kind: "answer",
			By: "hook:" + h.in.Event, Text: words, Status: "queued"}}, nil
	})
}

// ask stores the question, or one after the other, and returns the reply for the tool; nil leaves it to the dialog.
func (h *hook) ask(ctx context.Context) *hookReply {
	if h.in.Tool == "AskUserQuestion" {
		return h.askUser(ctx)
	}
	p := permissionPrompt(h.in)
	value, reason, ok := h.wait(ctx, p)
	if !ok {
		return nil
	}
	switch value {
	case "allow":
		r := reply("allow", "", nil)
		if h.in.Tool == "ExitPlanMode" {
			r.Output.Decision.Updated = json.RawMessage("{}") // a plain allow is ignored here (measured)
		}
		return r
	case "deny":
		if reason == "" {
			reason = "The operator refused this."
		}
		return reply("deny", reason, nil)
	}
	return nil
}

func reply(behavior, message string, updated json.RawMessage) *hookReply {
	r := new(hookReply)
	r.Output.Event = "PermissionRequest"
	r.Output.Decision.Behavior, r.Output.Decision.Message, r.Output.Decision.Updated = behavior, message, updated
	return r
}

// askUser asks claude's own questions one by one and answers all of them at once.
func (h *hook) askUser(ctx context.Context) *hookReply {
	var input struct {
		Questions []struct {
			Question, Header string
			Options          []struct{ Label, Description string }
			MultiSelect      bool
		}
	}
	if json.Unmarshal(h.in.Input, &input) != nil || len(input.Questions) == 0 {
		return nil
	}
	answers := map[string]string{}
	for i, q := range input.Questions {
		p := PromptRecord{Type: MultipleChoice, Question: visible(redact(q.Question)), Multi: q.MultiSelect, MaxLength: maxMessage,
			Tool: h.in.Tool}
		if n := len(input.Questions); n > 1 {
			p.Question = fmt.Sprintf("(%d of %d) %s", i+1, n, p.Question)
		}
		text := p.Question
		for k, o := range q.Options[:min(9, len(q.Options))] {
			p.Choices = append(p.Choices, Choice{Key: fmt.Sprint(k + 1), Label: clip(visible(o.Label), 60), Hook: "allow"})
			text += fmt.Sprintf("\n%d. %s", k+1, o.Label)
			if o.Description != "" {
				text += ": " + o.Description
			}
		}
		p.Full = visible(redact(text))
		p.Excerpt = clip(p.Question, maxExcerpt)
		value, reason, ok := h.wait(ctx, p)
		switch {
		case !ok:
			return nil
		case value == "deny":
			return reply("deny", reason, nil)
		}
		labels := strings.Split(value, ",")
		for k, key := range labels {
			if n := slices.IndexFunc(p.Choices, func(c Choice) bool { return c.Key == strings.TrimSpace(key) }); n >= 0 {
				labels[k] = q.Options[n].Label
			} else {
				labels = []string{value} // the operator's own words
				break
			}
		}
		answers[q.Question] = strings.Join(labels, ", ")
	}
	updated := map[string]any{}
	if json.Unmarshal(h.in.Input, &updated) != nil {
		return nil
	}
	updated["answers"] = answers
	data, err := json.Marshal(updated)
	if err != nil {
		return nil
	}
	return reply("allow", "", data)
}

// wait stores p for the session and follows it to its end. It returns what to say ("allow", "deny", or for a
// question its value) and why; ok is false where the dialog has to do it.
func (h *hook) wait(ctx context.Context, p PromptRecord) (value, reason string, ok bool) {
	ctx, stop := signal.NotifyContext(ctx, endSignals()...)
	defer stop()
	now := time.Now()
	p.Head, p.SessionID, p.Source, p.Cwd = Head{Rec: "prompt", ID: newID()}, h.session, "hook", h.in.Cwd
	p.Confidence, p.Score, p.Signals = "high", 1, []string{"hook"}
	p.Status, p.Nonce, p.CreatedAt, p.ExpiresAt = Created, newNonce(), now.UTC(), now.Add(h.life).UTC()
	p.Key = idempotencyKey(h.session, p.Excerpt, now)
	if h.in.Agent != "" {
		p.Question += " (from the " + h.in.Agent + " agent)"
	}
	records := h.st.Follow(ctx, h.session, func() bool { return true })
	if h.st.Update(func(*View) ([]Record, error) { return []Record{&p}, nil }) != nil {
		return "", "", false
	}
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	for {
		select {
		case rec, open := <-records:
			r, isPrompt := rec.(*PromptRecord)
			switch {
			case !open:
				h.st.Move(p.ID, Canceled, func(r *PromptRecord) { r.Reason = "answered in the terminal, or given up by the tool" })
				return "", "", false
			case isPrompt && r.ID == p.ID && r.Status != Created && r.Status != Routed && r.Status != AwaitingReply:
				h.last = p.ID
				return decisionFor(r)
			}
		case <-alive.C:
			if !h.st.Alive(h.session) {
				return "", "", false
			}
		}
	}
}

// decisionFor is what a decided prompt tells the tool.
func decisionFor(r *PromptRecord) (value, reason string, ok bool) {
	switch {
	case r.Status == Expired:
		return "deny", r.Reason, true // never affirmative; the tool is told why
	case r.Status != ReplyReceived || r.Value == nil || r.DecidedBy != nil && *r.DecidedBy == "cli:local":
		return "", "", false
	case *r.Value == "deny":
		return "deny", r.Reason, true
	case r.Tool == "AskUserQuestion":
		return *r.Value, "", true
	}
	if c := choiceOf(r); c != nil && c.Hook != "" {
		return c.Hook, r.Reason, true
	}
	return "", "", false // a choice only the dialog has: the session types it
}

// maxExcerpt bounds a prompt's excerpt, in bytes (SPEC section 5).
const maxExcerpt = 200

// permissionPrompt describes what the tool wants to do, with its exact arguments.
func permissionPrompt(in hookInput) PromptRecord {
	var a struct {
		Command, Description, URL, Prompt, Plan, Content, Pattern string
		FilePath                                                  string `json:"file_path"`
		Old                                                       string `json:"old_string"`
		New                                                       string `json:"new_string"`
	}
	json.Unmarshal(in.Input, &a) // what is missing stays empty, and the raw arguments are shown
	question, full := "Allow "+in.Tool+"?", ""
	switch in.Tool {
	case "Bash":
		question, full = "Run this command?", a.Command
		if a.Description != "" {
			question = "Run this command? (" + clip(a.Description, 80) + ")"
		}
	case "Edit":
		diff, plus, minus := lineDiff(a.Old, a.New)
		question, full = fmt.Sprintf("Edit %s? (+%d −%d)", a.FilePath, plus, minus), diff
	case "Write":
		diff, plus, _ := lineDiff("", a.Content)
		question, full = fmt.Sprintf("Write %s? (+%d)", a.FilePath, plus), diff
	case "WebFetch":
		question, full = "Fetch this address?", a.URL+"\n"+a.Prompt
	case "ExitPlanMode":
		question, full = "Carry out this plan?", a.Plan
	}
	if strings.TrimSpace(full) == "" {
		var pretty bytes.Buffer
		json.Indent(&pretty, in.Input, "", "  ")
		full = pretty.String()
	}
	full = visible(redact(full))
	p := PromptRecord{Type: MultipleChoice, Question: visible(redact(question)), Full: full, Permission: true, Tool: in.Tool,
		Excerpt: headTail(full, maxExcerpt), Cut: len(full) > maxExcerpt, SafeDefault: new("2"), MaxLength: maxMessage,
		Choices: []Choice{{Key: "1", Label: "Yes", Grants: true, Hook: "allow"}, {Key: "2", Label: "No", Hook: "deny"}}}
	return p
}

// headTail keeps the beginning and the end of text and says how much is missing between.
func headTail(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	room := (limit - len(" …(12345678 bytes)… ")) / 2
	head, tail := clipBytes(text, room), text[len(text)-room:]
	for tail != "" && tail[0]&0xc0 == 0x80 {
		tail = tail[1:]
	}
	return fmt.Sprintf("%s …(%d bytes)… %s", head, len(text)-len(head)-len(tail), tail)
}

// lineDiff is a readable diff of two texts: the common lines at both ends give two lines of context each.
func lineDiff(before, after string) (diff string, plus, minus int) {
	a, b := diffLines(before), diffLines(after)
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	var out strings.Builder
	for _, line := range a[max(0, head-2):head] {
		fmt.Fprintln(&out, " "+line)
	}
	for _, line := range a[head : len(a)-tail] {
		fmt.Fprintln(&out, "-"+line)
	}
	for _, line := range b[head : len(b)-tail] {
		fmt.Fprintln(&out, "+"+line)
	}
	for _, line := range a[len(a)-tail : min(len(a), len(a)-tail+2)] {
		fmt.Fprintln(&out, " "+line)
	}
	return strings.TrimSuffix(out.String(), "\n"), len(b) - tail - head, len(a) - tail - head
}

func diffLines(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}

/* ===== Installing the hooks for one run ===== */

// installHooks adds what makes the tool call us, on its command line only. A --settings of the user's (a file
// or JSON; the last one counts, measured on claude 2.1) is merged with ours.
func (s *session) installHooks(argv []string) []string {
	exe, err := os.Executable()
	if s.adapter.Hooks != "claude-settings" || err != nil {
		return argv
	}
	quote := "'"
	if runtime.GOOS == "windows" {
		quote = `"`
	}
	command := quote + exe + quote + " hook"
	rest, theirs, err := takeSettings(argv[1:])
	if err != nil {
		s.log.Warn("the tool's hooks are not used", "why", err.Error())
		return argv
	}
	hooks, _ := theirs["hooks"].(map[string]any)
	if hooks == nil {
		hooks = map[string]any{}
	}
	timeout := int((s.cfg.PermissionTimeout + hookSlack).Seconds())
	for event, seconds := range map[string]int{"PermissionRequest": timeout, "PreToolUse": 10, "Stop": 10} {
		own := map[string]any{"matcher": "*", "hooks": []any{map[string]any{"type": "command", "command": command, "timeout": seconds}}}
		if event == "PreToolUse" && s.jsonLine != nil {
			continue // its output tells of every call
		}
		list, _ := hooks[event].([]any)
		hooks[event] = append(list, own)
	}
	theirs["hooks"] = hooks
	settings, err := json.Marshal(theirs)
	s.hooked = err == nil
	return append([]string{argv[0], "--settings", string(settings)}, rest...)
}

// takeSettings takes the last --settings out of args and returns what it says.
func takeSettings(args []string) (rest []string, settings map[string]any, err error) {
	settings = map[string]any{}
	value := ""
	for i := 0; i < len(args); i++ {
		v, joined := strings.CutPrefix(args[i], "--settings=")
		switch {
		case args[i] == "--":
			rest = append(rest, args[i:]...)
			i = len(args)
		case joined:
			value = v
		case args[i] == "--settings" && i+1 < len(args):
			i++
			value = args[i]
		default:
			rest = append(rest, args[i])
		}
	}
	if value == "" {
		return rest, settings, nil
	}
	data := []byte(value)
	if !strings.HasPrefix(strings.TrimSpace(value), "{") {
		if data, err = os.ReadFile(value); err != nil {
			return nil, nil, fmt.Errorf("reading --settings: %w", err)
		}
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&settings); err != nil {
		return nil, nil, fmt.Errorf("reading --settings: %w", err)
	}
	return rest, settings, nil
}

// Alive tells whether a process holds the session.
func (s *Store) Alive(id string) bool { return s.holder("sessions/"+id+".lock") != 0 }
