// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering.
//
// One entry is one line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1):
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// An entry is valid if and only if (1) its bytes are exactly what jq -c prints for it, (2) seq is the entry
// before plus one, 1 on the first line, (3) prev_hash is the hash of the entry before, "genesis" on the first
// line, (4) hash is the SHA-256 of the line without its hash member and without the newline. So this checks
// one line without atlasbridge: jq -c 'del(.hash)' | tr -d '\n' | sha256sum.
//
// The chain alone cannot show that its tail was cut or that all of it was written anew. The state keeps the
// head for that, and the operator's phone has one: Verify compares with both.
//
// The log is apart from the state: losing one never costs the other. It is never rewritten, compacted or
// repaired, but for a torn last line, whose bytes are kept aside. Answers typed as text are in it as length
// and SHA-256 only, secrets not at all.
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	genesis      = "genesis"
	stampLayout  = "2006-01-02T15:04:05.000000Z07:00" // RFC 3339, UTC, microseconds
	maxExact     = 1<<53 - 1                          // largest integer that jq 1.6 prints unchanged (measured)
	maxAuditText = 4096                               // bytes of one value: an entry stays readable
	hashMember   = len(`,"hash":"sha256:"}`) + 2*sha256.Size
)

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	mu   sync.Mutex // held from begin to end
	log  *journal
	now  func() time.Time
	note func(seq int64, hash string) // tells the state the new head; called without mu
}

// Event is one entry before it is chained: Fields keep their order; values are string, bool, nil or integer.
type Event struct {
	Name      string
	SessionID string
	PromptID  string
	Fields    []Field
}

type Field struct {
	Name  string
	Value any
}

// Append chains and writes one entry durably.
func (a *Audit) Append(e Event) error {
	if err := a.begin(); err != nil {
		return err
	}
	seq, hash, err := a.write(e)
	a.end()
	if err == nil && a.note != nil {
		a.note(seq, hash)
	}
	return err
}

// Head is the last entry's number and hash; 0 and "genesis" when there is none.
func (a *Audit) Head() (seq int64, hash string, err error) {
	if err := a.begin(); err != nil {
		return 0, "", err
	}
	defer a.end()
	return a.last()
}

func (a *Audit) begin() error {
	a.mu.Lock()
	if _, err := a.log.acquire(); err != nil {
		a.mu.Unlock()
		return fmt.Errorf("locking %s: %w", a.log.path, err)
	}
	return nil
}

func (a *Audit) end() {
	a.log.release()
	a.mu.Unlock()
}

// write appends the events in one write and one fsync, between begin and end. Number and hash of the entry
// before are read from the file each time: another process may have written it.
func (a *Audit) write(events ...Event) (seq int64, hash string, err error) {
	if seq, hash, err = a.last(); err != nil {
		return 0, "", err
	}
	var out []byte
	for _, e := range events {
		seq++
		fields := []Field{{"seq", seq}, {"ts", a.now().UTC().Format(stampLayout)}, {"event", e.Name}}
		if e.SessionID != "" {
			fields = append(fields, Field{"session_id", e.SessionID})
		}
		if e.PromptID != "" {
			fields = append(fields, Field{"prompt_id", e.PromptID})
		}
		for _, f := range e.Fields {
			if s, ok := f.Value.(string); ok && !strings.HasSuffix(f.Name, "_sha256") {
				f.Value = clip(redact(s), maxAuditText)
			}
			fields = append(fields, f)
		}
		line, err := canonical(append(fields, Field{"prev_hash", hash}))
		if err != nil {
			return 0, "", fmt.Errorf("writing %s event %s: %w", a.log.path, e.Name, err)
		}
		hash = digest(line)
		out = append(out, line[:len(line)-1]...)
		out = append(out, `,"hash":"`+hash+"\"}\n"...)
	}
	return seq, hash, a.log.append(out, true)
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: nobody was told
// that it succeeded, and they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	size, err := a.log.size()
	if err != nil || size == 0 {
		return 0, genesis, err
	}
	for n := int64(4 << 10); ; n *= 4 {
		tail := make([]byte, min(n, size))
		if _, err := a.log.f.ReadAt(tail, size-int64(len(tail))); err != nil {
			return 0, "", fmt.Errorf("reading %s: %w", a.log.path, err)
		}
		end := bytes.LastIndexByte(tail, '\n')
		start := bytes.LastIndexByte(tail[:max(end, 0)], '\n')
		if whole := int64(len(tail)) == size; start < 0 && !whole {
			continue
		}
		if end+1 < len(tail) {
			if err := a.log.cut(size - int64(len(tail)-end-1)); err != nil {
				return 0, "", err
			}
		}
		if end < 0 {
			return 0, genesis, nil
		}
		fields, err := parseEntry(tail[start+1 : end])
		if err != nil {
			return 0, "", fmt.Errorf("%s: last line: %w: run atlasbridge audit verify, then move the file away", a.log.path, err)
		}
		return fields[0].Value.(int64), fields[len(fields)-1].Value.(string), nil
	}
}

// digest is the hash of a line without its hash member.
func digest(line []byte) string {
	sum := sha256.Sum256(line)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// canonical is the object with these members as jq -c prints it.
func canonical(fields []Field) ([]byte, error) {
	b := []byte{'{'}
	for i, f := range fields {
		if slices.ContainsFunc(fields[:i], func(g Field) bool { return g.Name == f.Name }) {
			return nil, fmt.Errorf("member %q is there twice", f.Name)
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, f.Name), ':')
		switch v := f.Value.(type) {
		case nil:
			b = append(b, "null"...)
		case bool:
			b = strconv.AppendBool(b, v)
		case string:
			b = appendString(b, v)
		case int:
			b = appendInt(b, int64(v))
		case int64:
			b = appendInt(b, v)
		default:
			return nil, fmt.Errorf("member %q: %T is not a string, boolean, null or integer", f.Name, v)
		}
	}
	return append(b, '}'), nil
}

// appendInt writes a number that jq would change as a string.
func appendInt(b []byte, n int64) []byte {
	if n > maxExact || n < -maxExact {
		return appendString(b, strconv.FormatInt(n, 10))
	}
	return strconv.AppendInt(b, n, 10)
}

// appendString appends s as a JSON string exactly as jq 1.6 to 1.8 print it: encoding/json differs at & < >,
// U+007F, U+2028 and U+2029. Invalid UTF-8 becomes U+FFFD. See TestCanonicalStrings.
func appendString(b []byte, s string) []byte {
	const short, names, digits = "\"\\\b\f\n\r\t", `"\bfnrt`, "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s {
		if r >= 0x20 && r != '"' && r != '\\' && r != 0x7f {
			b = utf8.AppendRune(b, r)
		} else if i := strings.IndexRune(short, r); i >= 0 {
			b = append(b, '\\', names[i])
		} else {
			b = append(b, '\\', 'u', '0', '0', digits[r>>4], digits[r&15])
		}
	}
	return append(b, '"')
}

// parseEntry accepts exactly the lines that canonical writes, and of them those that begin with seq and end
// with prev_hash and hash.
func parseEntry(line []byte) ([]Field, error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	var fields []Field
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, errors.New("not JSON")
		}
		value, err := d.Token()
		if err != nil {
			return nil, errors.New("not JSON")
		}
		if n, ok := value.(json.Number); ok {
			i, err := strconv.ParseInt(n.String(), 10, 64)
			if err != nil {
				return nil, fmt.Errorf("member %q is not an integer", name)
			}
			value = i
		}
		fields = append(fields, Field{name.(string), value})
	}
	again, err := canonical(fields)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, line) {
		return nil, errors.New("its bytes are not what jq -c prints")
	}
	n := len(fields)
	if n < 3 || fields[0].Name != "seq" || fields[n-2].Name != "prev_hash" || fields[n-1].Name != "hash" {
		return nil, errors.New("seq, prev_hash or hash is missing or not in its place")
	}
	_, isInt := fields[0].Value.(int64)
	_, isText := fields[n-2].Value.(string)
	if h, ok := fields[n-1].Value.(string); !isInt || !isText || !ok || len(h) != len("sha256:")+2*sha256.Size {
		return nil, errors.New("seq, prev_hash or hash is not of its type")
	}
	return fields, nil
}

// auditEvents is what one change of a record means for the audit log. It is called by the store for every
// record that it appends, so that no caller can forget an entry.
func auditEvents(old, new Record) []Event {
	switch r := new.(type) {
	case *SessionRecord:
		was, _ := old.(*SessionRecord)
		if was == nil {
			return []Event{{"SESSION_START", r.ID, "", []Field{{"tool", r.Tool}, {"pid", r.PID}}}}
		}
		if was.Status == "active" && r.Status != "active" {
			e := Event{"SESSION_END", r.ID, "", []Field{{"status", r.Status}}}
			if r.ExitCode != nil {
				e.Fields = append(e.Fields, Field{"exit_code", *r.ExitCode})
			}
			return []Event{e}
		}
	case *PromptRecord:
		if was, _ := old.(*PromptRecord); was == nil || was.Status != r.Status {
			return promptEvents(was, r)
		}
	}
	return nil
}

func promptEvents(was, p *PromptRecord) []Event {
	e := Event{SessionID: p.SessionID, PromptID: p.ID}
	by := Field{"decided_by", nil}
	if p.DecidedBy != nil {
		by.Value = *p.DecidedBy
	}
	switch p.Status {
	case Created:
		e.Name = "PROMPT_DETECTED"
		e.Fields = []Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source}, {"tool", p.Tool}}
	case AwaitingReply:
		e.Name = "PROMPT_ROUTED"
	case ReplyReceived:
		e.Name, e.Fields = "REPLY_RECEIVED", append(valueFields(p), by)
		if p.Reason != "" {
			e.Fields = append(e.Fields, hidden("reason", p.Reason)...)
		}
	case Injected:
		e.Name, e.Fields = "REPLY_INJECTED", append(valueFields(p), Field{"source", replySource(p)}, by)
	case Resolved:
		e.Name, e.Fields = "PROMPT_RESOLVED", []Field{by}
	case Expired:
		e.Name = "PROMPT_EXPIRED"
	case Canceled:
		e.Name, e.Fields = "PROMPT_CANCELED", []Field{by}
	case Failed:
		e.Name = "PROMPT_FAILED"
		if was == nil || was.Reason != p.Reason {
			e.Fields = []Field{{"reason", p.Reason}}
		}
	default:
		return nil
	}
	return []Event{e}
}

// valueFields shows an answer that was one of those offered; of text only its length and hash, of a secret
// nothing.
func valueFields(p *PromptRecord) []Field {
	switch {
	case p.Secret || p.ValueHidden:
		return []Field{{"secret", true}}
	case p.Value == nil:
		return []Field{{"value", nil}}
	case p.offered(*p.Value):
		return []Field{{"value", *p.Value}}
	}
	return hidden("value", *p.Value)
}

func hidden(name, text string) []Field {
	return []Field{{name + "_len", len(text)}, {name + "_sha256", digest([]byte(text))}}
}

// Anchor is a head of the chain known from outside the file.
type Anchor struct {
	Seq  int64  `json:"seq"`
	Hash string `json:"hash"`
	From string `json:"from"` // whose word it is: "state.jsonl", "--head"
}

// Verdict is what a verification found. Field names are those of audit verify --json.
type Verdict struct {
	OK       bool     `json:"ok"`
	Entries  int64    `json:"entries"` // that hold, from the first on
	Hash     string   `json:"hash"`    // of the last of them
	Line     int64    `json:"line"`    // the first bad one, 0 none
	Reason   string   `json:"reason"`
	Anchors  []Anchor `json:"anchors"` // heads that the chain was compared with
	Notes    []string `json:"notes"`
	Proves   string   `json:"proves"`
	NoProof  string   `json:"does_not_prove"`
	LastTime string   `json:"last_ts"`
}

// verify recomputes the chain of r. It stops at the first line that does not hold.
func verify(r io.Reader, anchors []Anchor) Verdict {
	v := Verdict{Hash: genesis, Anchors: anchors}
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return v.bad("reading: " + err.Error())
		}
		if err == io.EOF {
			if len(line) > 0 {
				return v.bad("the last line is not complete (a write cut short, or a cut file)")
			}
			break
		}
		line = line[:len(line)-1]
		fields, err := parseEntry(line)
		if err != nil {
			return v.bad(err.Error())
		}
		n := len(fields)
		hash := fields[n-1].Value.(string)
		switch {
		case fields[0].Value != v.Entries+1:
			return v.bad(fmt.Sprintf("seq is %d where %d belongs: entries removed, inserted or reordered",
				fields[0].Value, v.Entries+1))
		case fields[n-2].Value != v.Hash:
			return v.bad("prev_hash is not the hash of the entry before")
		case hash != digest(append(slices.Clone(line[:len(line)-hashMember]), '}')):
			return v.bad("hash does not match the entry: it was changed")
		}
		for _, a := range anchors {
			if a.Seq == v.Entries+1 && a.Hash != hash {
				return v.bad(fmt.Sprintf("entry %d is not the one %s knows: the chain was computed anew", a.Seq, a.From))
			}
		}
		for i := range anchors {
			if anchors[i].Seq == 0 && anchors[i].Hash == hash {
				anchors[i].Seq = v.Entries + 1
			}
		}
		v.Entries, v.Hash = v.Entries+1, hash
		v.LastTime, _ = fields[1].Value.(string)
	}
	for _, a := range anchors {
		if a.Seq == 0 {
			return v.bad(fmt.Sprintf("no entry has the hash that %s gives: cut, or computed anew", a.From))
		}
		if a.Seq > v.Entries {
			return v.bad(fmt.Sprintf("the file ends before entry %d, which %s knows: its tail was cut", a.Seq, a.From))
		}
	}
	v.OK = true
	v.Proves, v.NoProof = v.meaning()
	return v
}

func (v Verdict) bad(reason string) Verdict {
	v.Line, v.Reason = v.Entries+1, reason
	return v
}

// meaning says what an intact chain is worth with the heads it was compared with.
func (v Verdict) meaning() (proves, not string) {
	if len(v.Anchors) == 0 {
		return "the entries form one unbroken chain",
			"that none were cut off the end or that the whole was not written anew: there was no head to compare with"
	}
	a := slices.MaxFunc(v.Anchors, func(a, b Anchor) int { return int(a.Seq - b.Seq) })
	proves = fmt.Sprintf("entries 1 to %d are those that led to the head known from %s: none changed, added or missing",
		a.Seq, a.From)
	not = "anything against somebody who can write both audit.log and state.jsonl: compare with a head on the phone, --head SEQ:HASH"
	if slices.ContainsFunc(v.Anchors, func(a Anchor) bool { return a.From == "--head" }) {
		not = "that entries after the head given were not cut off, or that what was written was true"
	}
	return proves, not
}

// cmdAudit is `atlasbridge audit verify [--json] [--head [SEQ:]HASH]`.
func cmdAudit(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	var anchors []Anchor
	var notes []string
	if head := o.text("head"); head != "" {
		a, err := parseHeadFlag(head)
		if err != nil {
			return c.usage("--head %s: %v", head, err)
		}
		anchors = append(anchors, a)
	}
	if a, err := stateHead(dir); err != nil {
		notes = append(notes, "the head in state.jsonl was not compared: "+err.Error())
	} else if a.Seq > 0 {
		anchors = append(anchors, a)
	}
	v, err := verifyFile(filepath.Join(dir, "audit.log"), anchors)
	if err != nil {
		return c.fail(err)
	}
	v.Notes = notes
	return v.print(c, o.on("json"))
}

// parseHeadFlag reads SEQ:sha256:HEX, or only sha256:HEX.
func parseHeadFlag(s string) (Anchor, error) {
	a := Anchor{Hash: s, From: "--head"}
	if seq, hash, ok := strings.Cut(s, ":"); ok && seq != "sha256" {
		n, err := strconv.ParseInt(seq, 10, 64)
		if err != nil || n < 1 {
			return a, errors.New("want SEQ:sha256:HEX as the session-ended message has it")
		}
		a.Seq, a.Hash = n, hash
	}
	if digits, ok := strings.CutPrefix(a.Hash, "sha256:"); !ok || len(digits) != 2*sha256.Size {
		return a, errors.New("want SEQ:sha256:HEX as the session-ended message has it")
	}
	return a, nil
}

// stateHead is the head that the state knows. It is read before the log's size is: the log is always ahead.
func stateHead(dir string) (Anchor, error) {
	st, err := openStore(dir)
	if err != nil {
		return Anchor{}, err
	}
	defer st.Close()
	view, err := st.View()
	if err != nil || view.Meta["audit"] == nil {
		return Anchor{}, err
	}
	return Anchor{view.Meta["audit"].Seq, view.Meta["audit"].Hash, "state.jsonl"}, nil
}

// verifyFile verifies what the file holds now; entries appended meanwhile are not looked at.
func verifyFile(path string, anchors []Anchor) (Verdict, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return verify(strings.NewReader(""), anchors), nil
	} else if err != nil {
		return Verdict{}, err
	}
	defer f.Close()
	if lock, err := openPrivate(lockPath(path), os.O_RDWR|os.O_CREATE); err == nil {
		defer lock.Close()
		if lockFile(lock, true) == nil {
			defer unlockFile(lock)
		}
	}
	fi, err := f.Stat()
	if err != nil {
		return Verdict{}, err
	}
	return verify(io.NewSectionReader(f, 0, fi.Size()), anchors), nil
}

func (v Verdict) print(c *command, asJSON bool) int {
	code := 1
	if v.OK {
		code = 0
	}
	if asJSON {
		b, _ := json.Marshal(v)
		fmt.Fprintf(c.stdout, "%s\n", b)
		return code
	}
	for _, n := range v.Notes {
		fmt.Fprintln(c.stdout, "note:", n)
	}
	if !v.OK {
		fmt.Fprintf(c.stdout, "audit.log:%d: %s\n%d entries before it hold, head %d:%s\n", v.Line, v.Reason, v.Entries,
			v.Entries, v.Hash)
		return code
	}
	fmt.Fprintf(c.stdout, "audit.log: %d entries, chain intact\nhead %d:%s\nproves: %s\ndoes not prove: %s\n",
		v.Entries, v.Entries, v.Hash, v.Proves, v.NoProof)
	return code
}

// cmdLogs is `atlasbridge logs [--tail] [--json] [--session ID]`.
func cmdLogs(c *command) int {
	o, code := c.options()
	if o == nil {
		return code
	}
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	r := &logReader{c: c, path: filepath.Join(dir, "audit.log"), session: o.text("session"), json: o.on("json")}
	lines, err := r.more()
	if o.on("tail") {
		lines = lines[max(0, len(lines)-20):]
	}
	changed, stop := watchFolder(dir)
	defer stop()
	for err == nil {
		io.WriteString(c.stdout, strings.Join(lines, ""))
		if !o.on("tail") {
			return 0
		}
		t := time.NewTimer(500 * time.Millisecond)
		select {
		case <-changed:
		case <-t.C:
		case <-c.ctx.Done():
			return 0
		}
		t.Stop()
		lines, err = r.more()
	}
	return c.fail(err)
}

// logReader prints audit.log for people, from where it was read last.
type logReader struct {
	c       *command
	path    string
	session string // the first digits of an id, "" all
	json    bool
	at      int64
}

// more is what was appended since the last call, a line each. No file is no lines.
func (r *logReader) more() (out []string, err error) {
	f, err := os.Open(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(r.at, io.SeekStart); err != nil {
		return nil, err
	}
	in := bufio.NewReader(f)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			return out, nil
		} else if err != nil {
			return out, err
		}
		r.at += int64(len(line))
		if text, ok := r.format(line[:len(line)-1]); ok {
			out = append(out, text+"\n")
		}
	}
}

// format is one entry as text: time, event, session, then the other members. Whatever a terminal could take
// for a command is escaped, in JSON too.
func (r *logReader) format(line []byte) (text string, ok bool) {
	fields, err := parseEntry(line)
	if err != nil {
		return r.c.colour("31", "damaged: "+plain(string(line))), r.session == ""
	}
	var ts, event, session, rest string
	for _, f := range fields {
		value := plain(fmt.Sprint(f.Value))
		switch f.Name {
		case "ts":
			ts = strings.Replace(value[:min(19, len(value))], "T", " ", 1)
		case "event":
			event = value
		case "session_id":
			session = value
		case "prompt_id":
			rest = " prompt=" + shortID(value) + rest
		case "seq", "prev_hash", "hash":
		default:
			rest += " " + plain(f.Name) + "=" + value
		}
	}
	if !strings.HasPrefix(session, r.session) {
		return "", false
	}
	if r.json {
		return escapeC1(string(line)), true
	}
	code := map[string]string{"UNAUTHORIZED": "31", "REPLY_REJECTED": "31", "PROMPT_FAILED": "31", "PROMPT_EXPIRED": "33",
		"REPLY_RECEIVED": "32", "REPLY_INJECTED": "32"}[event]
	text = fmt.Sprintf("%s  %-8s  %s%s%s", ts, shortID(session), r.c.colour(code, event), strings.Repeat(" ", max(0, 17-len(event))), rest)
	return text, true
}

// plain is s, quoted like a Go string when it holds anything that is not printable.
func plain(s string) string {
	if q := strconv.Quote(s); q[1:len(q)-1] != strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) {
		return q
	}
	return s
}

// escapeC1 replaces U+0080 to U+009F, which some terminals obey, by their JSON escapes.
func escapeC1(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r >= 0x80 && r < 0xa0 {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}
