// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering. One entry is one
// line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1), as jq -c prints it:
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// The hash is that of the line without its hash member: jq -cj 'del(.hash)' | sha256sum. The heads that state and phone
// keep show that no tail was cut, nor all written anew: a log that does not continue the head that the state noted gets
// an entry that says so, and does not verify until the user has put it aside. shown_sha256 is that of what a person was
// shown, screen_sha256 that of what stood there when the answer was typed. Answers typed as text are in it as length
// and SHA-256.
package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sort"
	"strings"
	"time"
)

const (
	stampLayout = "2006-01-02T15:04:05.000000Z"
	fileStamp   = "20060102T150405.000000" // in names of files
	genesis     = "genesis"                // prev_hash of the first entry

	maxExact     = 1<<53 - 1 // jq 1.6 changes larger integers
	maxAuditText = 4096      // bytes of a value
	maxEntry     = 1 << 18   // bytes of a line
	maxRead      = 4 << 20   // bytes of a line of any file that is read; no process writes a longer one

	maxUnsaid  = 1000     // entries that wait for a log that can be written
	readMemory = 32 << 20 // bytes that reading a log may take, whatever its size

	discontinued = "AUDIT_DISCONTINUED" // the log did not continue the head that the state had noted
	putAside     = "AUDIT_PUT_ASIDE"    // first of a log that the user began anew
	carriedOver  = "PROMPT_CARRIED"     // a question from the log put aside that can still be answered
)

// ---- the log ----
// Entries are appended under a lock; what the state notes of their head tells a log that was cut or replaced.

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	log *journal
	// lock acquires the log and gives the head that the state has noted for it, nil when it is not known.
	lock func() (noted *MetaRecord, err error)
	// note tells the state the new head, or why an entry is missing.
	note func(a appended, err error)
	// unsaid are entries that could not be written: they come before the next. The log's mutex guards them.
	unsaid []Event
}

// chainHead is how far a chain goes: number and hash of its last entry, the zero value without one.
type chainHead struct {
	Seq  int64
	Hash string
}

func (h chainHead) String() string { return fmt.Sprintf("%d:%s", h.Seq, h.Hash) }

// headOf is the head that a record of the state notes; the record may be nil.
func headOf(m *MetaRecord) chainHead {
	if m == nil {
		return chainHead{}
	}
	return chainHead{m.Seq, m.Hash}
}

// appended is what an append found and did.
type appended struct {
	noted chainHead // that the log was compared with
	gap   bool      // the log did not continue it
	last  chainHead // of the log now
}

// Event is one entry before it is chained; values are string, bool, nil or integer.
type Event struct {
	Name, SessionID, PromptID string
	Fields                    []Field
}

// Field is one member of an entry.
type Field struct {
	Name  string
	Value any
}

// Append chains and writes one entry durably.
func (a *Audit) Append(e Event) error {
	noted, err := a.lock()
	return a.commit(noted, err, e)
}

// Retry writes what could not be written before, if anything.
func (a *Audit) Retry() error {
	noted, err := a.lock()
	if len(a.unsaid) == 0 {
		a.log.release()
		return nil
	}
	return a.commit(noted, err)
}

// Head is the last entry's number and hash, 0 and "genesis" without one.
func (a *Audit) Head() (seq int64, hash string, err error) {
	defer a.log.release()
	if err := a.log.acquire(); err != nil {
		return 0, "", err
	}
	last, err := a.last()
	if err != nil {
		return 0, "", err
	}
	if last.Seq == 0 {
		return 0, genesis, nil
	}
	return last.Seq, last.Hash, nil
}

// commit appends the events, releases the log and has the state note the new head; noted and err are what lock gave.
// After an error they are tried again with the next ones.
func (a *Audit) commit(noted *MetaRecord, err error, events ...Event) error {
	done := appended{}
	a.unsaid = append(a.unsaid, events...)
	if err == nil {
		done, err = a.write(headOf(noted), a.unsaid)
	}
	if err == nil {
		a.unsaid = nil
	}
	a.unsaid = a.unsaid[:min(len(a.unsaid), maxUnsaid)]
	a.log.release()
	a.note(done, err)
	return err
}

// write appends the events in one write; before them, where the log does not continue the noted head, the entry that
// says so. That stands once for each head, though several processes, or the next after a crash, find the same gap.
func (a *Audit) write(noted chainHead, events []Event) (appended, error) {
	last, err := a.last()
	if err != nil {
		return appended{}, err
	}
	done := appended{noted: noted}
	if done.gap, err = a.lacks(noted, last); err != nil {
		return appended{}, err
	}
	if done.gap {
		said, err := a.contains(gapAt(noted).text())
		if err != nil {
			return appended{}, err
		}
		if !said {
			events = slices.Concat([]Event{gapAt(noted)}, events)
		}
	}
	lines, last, err := chain(last, events)
	if err != nil {
		return appended{}, err
	}
	if err := a.log.append(lines, true); err != nil {
		return appended{}, err
	}
	done.last = last
	return done, nil
}

// gapAt is the entry of a log that should continue that head and does not.
func gapAt(noted chainHead) Event {
	return Event{Name: discontinued, Fields: []Field{{"noted_seq", noted.Seq}, {"noted_hash", noted.Hash}}}
}

// text is what stands for the event's name and fields in its entry, with nothing between them.
func (e Event) text() []byte {
	return bytes.Trim(canonical(append([]Field{{"event", e.Name}}, e.Fields...)), "{}")
}

// lacks tells whether the log, whose last entry is given, does not continue that head: a cut tail, another log. The
// entry of the head need not be the last: a crash, or a power cut, may have lost what was noted after it.
func (a *Audit) lacks(noted, last chainHead) (bool, error) {
	if noted == last || noted.Seq == 0 {
		return false, nil
	}
	begin := fmt.Appendf(nil, `{"seq":%d,`, noted.Seq)
	end := fmt.Appendf(nil, `,"hash":"%s"}`+"\n", noted.Hash)
	is := func(line []byte) bool { return bytes.HasPrefix(line, begin) && bytes.HasSuffix(line, end) }
	found, err := a.search(a.log.end-maxEntry, is)
	if err == nil && !found {
		found, err = a.search(0, is)
	}
	return !found, err
}

// contains tells whether some entry has this text in it, which no value can have.
func (a *Audit) contains(text []byte) (bool, error) {
	return a.search(0, func(line []byte) bool { return bytes.Contains(line, text) })
}

// search tells whether a line is what is looked for, from that byte on, which may be in the middle of a line. Lines
// longer than an entry can be come in pieces, so that memory is bounded whatever the file holds.
func (a *Audit) search(from int64, is func(line []byte) bool) (bool, error) {
	from = max(0, from)
	r := bufio.NewReaderSize(io.NewSectionReader(a.log.f, from, a.log.end-from), maxEntry)
	for {
		line, err := r.ReadSlice('\n')
		if is(line) {
			return true, nil
		}
		if err == io.EOF {
			return false, nil
		}
		if err != nil && err != bufio.ErrBufferFull {
			return false, err
		}
	}
}

// continues tells whether the log continues that head, and what its last entry is.
func (a *Audit) continues(noted chainHead) (last chainHead, yes bool, err error) {
	defer a.log.release()
	if err := a.log.acquire(); err != nil {
		return chainHead{}, false, err
	}
	if last, err = a.last(); err != nil {
		return chainHead{}, false, err
	}
	gap, err := a.lacks(noted, last)
	return last, !gap, err
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: they are moved aside.
func (a *Audit) last() (chainHead, error) {
	tail := make([]byte, min(a.log.end, maxEntry))
	if err := a.log.readAt(tail, a.log.end-int64(len(tail))); err != nil {
		return chainHead{}, err
	}
	lines := bytes.SplitAfter(tail, []byte("\n"))
	torn := int64(len(lines[len(lines)-1]))
	if 0 < torn && torn < maxEntry {
		if err := a.log.cut(a.log.end - torn); err != nil {
			return chainHead{}, err
		}
	}
	if len(lines) == 1 && len(tail) < maxEntry {
		return chainHead{}, nil
	}
	fields, err := parseEntry(lines[max(0, len(lines)-2)])
	if err != nil {
		return chainHead{}, fmt.Errorf("its last line is damaged (%w): see atlasbridge audit verify", err)
	}
	seq, _ := fields[0].Value.(int64)
	hash, _ := fields[len(fields)-1].Value.(string)
	return chainHead{seq, hash}, nil
}

// ---- entries ----
// One line each, in one form, so that its hash can be made again by anybody.

// chain makes entries of the events, behind the entry last, and gives the last of them. Where what an event says cannot
// be written the entry says so instead: it would keep all others out.
func chain(last chainHead, events []Event) (lines []byte, _ chainHead, err error) {
	for _, e := range events {
		line, head, err := entry(last, e)
		if err != nil {
			e.Fields = []Field{{"lacks", err.Error()}}
			line, head, err = entry(last, e)
		}
		if err != nil {
			return nil, chainHead{}, err
		}
		lines = append(lines, line...)
		last = head
	}
	return lines, last, nil
}

// entry is the line of an event behind the entry last. Ids that are not known are left out, texts redacted and bounded.
func entry(last chainHead, e Event) (line []byte, head chainHead, err error) {
	if last.Seq == 0 {
		last.Hash = genesis
	}
	head.Seq = last.Seq + 1
	fields := []Field{{"seq", head.Seq}, {"ts", time.Now().UTC().Format(stampLayout)}, {"event", e.Name},
		{"session_id", e.SessionID}, {"prompt_id", e.PromptID}}
	fields = slices.DeleteFunc(append(fields, e.Fields...), func(f Field) bool {
		return f.Value == "" && strings.HasSuffix(f.Name, "_id")
	})
	for i, f := range fields {
		if text, ok := f.Value.(string); ok {
			fields[i].Value = clip(redact(text), maxAuditText)
		}
	}
	fields = append(fields, Field{"prev_hash", last.Hash})
	head.Hash = digest(canonical(fields))
	line = append(canonical(append(fields, Field{"hash", head.Hash})), '\n')
	if _, err := parseEntry(line); err != nil {
		return nil, chainHead{}, fmt.Errorf("the entry %s: %w", e.Name, err)
	}
	return line, head, nil
}

// asJQ turns what encoding/json writes into what jq 1.6 to 1.8 print. What follows an escaped backslash is text.
var asJQ = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029", `\ufffd`, "\ufffd", "\x7f", `\u007f`)

// canonical is the object with these members as jq -c prints it; nothing stands for a value that JSON does not know.
func canonical(fields []Field) []byte {
	var members []string
	for _, f := range fields {
		member, err := marshal(map[string]any{f.Name: f.Value})
		if err != nil {
			member = nil
		}
		members = append(members, strings.Trim(string(member), "{}"))
	}
	return []byte(asJQ.Replace("{" + strings.Join(members, ",") + "}"))
}

// digest is the hash of an entry without its hash, or of a text.
func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// hidden is the members that stand for a text.
func hidden(name, s string) []Field {
	return []Field{{name + "_len", len(s)}, {name + "_sha256", digest([]byte(s))}}
}

// parseEntry accepts exactly what jq -c prints for an entry, with seq first, prev_hash and hash last.
func parseEntry(line []byte) ([]Field, error) {
	fields := members(line)
	last := len(fields) - 1
	framed := last >= 2 && fields[0].Name == "seq" &&
		fields[last-1].Name == "prev_hash" && fields[last].Name == "hash"
	if !framed || !bytes.Equal(append(canonical(fields), '\n'), line) {
		return nil, errors.New("its bytes are not what jq -c prints for an entry, or were cut short")
	}
	return fields, nil
}

// members is what can be read of a flat JSON object. Members that come again, fractions and large integers are not
// taken over, so that what canonical makes of the others is not the line.
func members(line []byte) (fields []Field) {
	d := json.NewDecoder(bytes.NewReader(line))
	open, err := d.Token()
	if err != nil || open != json.Delim('{') {
		return nil
	}
	for d.More() {
		name, _ := d.Token() // what is no name is none that canonical gives back
		value, err := d.Token()
		if err != nil {
			return fields
		}
		if n, ok := value.(float64); ok {
			value = int64(max(-maxExact, min(n, maxExact)))
		}
		f := Field{fmt.Sprint(name), value}
		if !slices.ContainsFunc(fields, func(g Field) bool { return g.Name == f.Name }) {
			fields = append(fields, f)
		}
	}
	return fields
}

// ---- what is entered ----
// Every change of a session or a question in the state is an event.

var promptEvents = map[State]string{
	Created:       "PROMPT_DETECTED",
	AwaitingReply: "PROMPT_ROUTED",
	ReplyReceived: "REPLY_RECEIVED",
	Injected:      "REPLY_INJECTED",
	Resolved:      "PROMPT_RESOLVED",
	Expired:       "PROMPT_EXPIRED",
	Canceled:      "PROMPT_CANCELED",
	Failed:        "PROMPT_FAILED",
}

// auditEvents is what the change from old (nil: none) to r, any that the store appends, means for the audit log.
func auditEvents(old, r Record) []Event {
	switch r := r.(type) {
	case *SessionRecord:
		before, _ := old.(*SessionRecord)
		return sessionEvents(before, r)
	case *PromptRecord:
		before, _ := old.(*PromptRecord)
		if promptEvents[r.Status] == "" || before != nil && before.Status == r.Status {
			return nil
		}
		events := []Event{{promptEvents[r.Status], r.SessionID, r.ID, promptFields(r)}}
		if r.Permission && r.DecidedBy != nil && (before == nil || before.DecidedBy == nil) {
			events = append(events, Event{"PERMISSION_RESOLVE", r.SessionID, r.ID, resolveFields(r)})
		}
		return events
	}
	return nil
}

// resolveFields is who decided about a permission, and what: nil where only the tool knows, or nobody answered.
func resolveFields(p *PromptRecord) []Field {
	fields := person(*p.DecidedBy, p.DecidedUser)
	if p.Value == nil {
		fields = append(fields, Field{"decision", nil})
	} else {
		fields = append(fields, Field{"decision", *p.Value})
		fields = append(fields, said("label", p.labels(*p.Value))...)
	}
	fields = append(fields, said("grants", p.granted())...)
	return append(fields, said("words", p.words(maxExcerpt))...)
}

// person is who did something: of who did it by phone the number, and the name, which is not checked.
func person(by, user string) []Field {
	fields := []Field{{"by", by}}
	var id int64
	if _, err := fmt.Sscanf(by, "telegram:%d", &id); err == nil {
		fields = append(fields, Field{"user_id", id})
	}
	return append(fields, said("username", user)...)
}

// said is a member that is left out where there is nothing to say.
func said(name, text string) []Field {
	if text == "" {
		return nil
	}
	return []Field{{name, text}}
}

func sessionEvents(before, s *SessionRecord) []Event {
	switch {
	case before == nil:
		return []Event{{"SESSION_START", s.ID, "", []Field{{"tool", s.Tool}, {"pid", s.PID}}}}
	case before.Status == "active" && s.Status != "active":
		return []Event{{"SESSION_END", s.ID, "", []Field{{"status", s.Status}, {"exit_code", s.ExitCode}}}}
	}
	return nil
}

// promptFields is what the entry of a prompt that has come to its status tells about it.
func promptFields(p *PromptRecord) (fields []Field) {
	switch p.Status {
	case Created:
		fields = []Field{
			{"type", string(p.Type)},
			{"confidence", p.Confidence},
			{"source", p.Source},
			{"tool", p.Tool},
		}
		fields = append(fields, said("words", p.words(maxExcerpt))...)
		fields = append(fields, shownField(p)...) // some are answered before they go out
	case AwaitingReply:
		fields = shownField(p)
	case Failed:
		fields = []Field{{"reason", p.Reason}}
	case ReplyReceived:
		fields = answerFields(p)
		if p.Reason != "" { // the operator's
			fields = append(fields, hidden("reason", p.Reason)...)
		}
	case Injected:
		fields = append(answerFields(p), Field{"source", replySource(p)})
		if p.ScreenSHA != "" {
			fields = append(fields, Field{"screen_sha256", p.ScreenSHA})
		}
	}
	if p.DecidedBy != nil && *p.DecidedBy != "" {
		fields = append(fields, Field{"decided_by", *p.DecidedBy})
		fields = append(fields, said("username", p.DecidedUser)...)
	}
	return fields
}

// shownField is the hash of all that a person can base the answer on.
func shownField(p *PromptRecord) []Field {
	if p.Shown == "" {
		return nil
	}
	return []Field{{"shown_sha256", digest([]byte(p.Shown))}}
}

// answerFields is the answer: as it is, with its label, when it is one of those offered, else its length and hash.
func answerFields(p *PromptRecord) []Field {
	switch {
	case p.Value == nil:
		return nil
	case *p.Value == "", p.answers(*p.Value) != nil, p.SafeDefault != nil && *p.Value == *p.SafeDefault:
		return append([]Field{{"value", *p.Value}}, said("label", p.labels(*p.Value))...)
	}
	return hidden("value", *p.Value)
}

// ---- verify ----
// What the log proves, and what it does not.

// Verdict is what a verification found: what audit verify --json prints.
type Verdict struct {
	OK      bool     `json:"ok"`
	Entries int64    `json:"entries"` // that form one chain, from the first on
	Hash    string   `json:"hash"`    // of the last of them
	Line    int64    `json:"line"`    // the first bad one, 0 none
	Reason  string   `json:"reason"`
	Remedy  string   `json:"remedy"`
	Heads   []string `json:"heads"` // known from elsewhere, as SEQ:HASH
	Proves  string   `json:"proves"`
	Limits  string   `json:"does_not_prove"`
}

// remedyAside is what can be done about a log that does not verify; nothing else makes it verify again.
const remedyAside = "keep a copy; `atlasbridge audit verify --aside` puts it aside and begins a new one"

// fault adds what is wrong with a line; the first line that has something wrong is the one that is named.
func (v *Verdict) fault(line int64, why string) {
	if v.Reason == "" {
		v.Line, v.Reason = line, why
		return
	}
	v.Reason += fmt.Sprintf("; line %d: %s", line, why)
}

// verify recomputes the chain up to the first line that does not hold, looks for the heads in it, and compares what was
// shown with what stood there when the answer was typed. Of those it names the first. An error is one of reading.
func verify(log io.Reader, heads ...string) (Verdict, error) {
	v := Verdict{Hash: genesis, Heads: append([]string{}, heads...)}
	missing := slices.Clone(heads)
	asked := questions{}
	whole := true // the chain
	err := eachLine(log, func(line []byte) (more bool) {
		fields, why := v.next(line)
		if why != "" {
			v.fault(v.Entries+1, why)
			whole = false
			return false
		}
		if head := (chainHead{v.Entries, v.Hash}).String(); slices.Contains(missing, head) {
			missing = slices.DeleteFunc(missing, func(known string) bool { return known == head })
		}
		if why := asked.judge(fields); why != "" && v.Reason == "" {
			v.fault(v.Entries, why)
		}
		return true
	})
	if err != nil {
		return Verdict{}, err
	}
	if whole && len(missing) > 0 {
		var seq int64
		fmt.Sscan(missing[0], &seq) // what is no number stays 0
		line := max(1, min(seq, v.Entries+1))
		v.fault(line, "the entry "+missing[0]+" is known but not there: the tail was cut or the chain computed anew")
	}
	v.conclude()
	return v, nil
}

// eachLine gives do the lines of r, with their newlines, until it wants no more; a line is good until do returns. Of
// one longer than maxRead do gets pieces that end in none: memory is bounded, whatever the file holds.
func eachLine(r io.Reader, do func(line []byte) (more bool)) error {
	in := bufio.NewReaderSize(r, 1<<16)
	var long []byte // the beginning of a line that the reader cannot hold
	for {
		line, err := in.ReadSlice('\n')
		if err == bufio.ErrBufferFull && len(long) < maxRead {
			long = append(long, line...)
			continue
		}
		if len(long) > 0 {
			line = append(long, line...)
			long = line[:0]
		}
		if len(line) > 0 && !do(line) || err == io.EOF {
			return nil
		}
		if err != nil && err != bufio.ErrBufferFull {
			return err
		}
	}
}

// next checks one more line of the chain and counts it, or says why it does not hold.
func (v *Verdict) next(line []byte) (fields []Field, why string) {
	fields, err := parseEntry(line)
	if err != nil {
		return nil, err.Error()
	}
	last := len(fields) - 1
	if fields[0].Value != v.Entries+1 {
		return nil, fmt.Sprintf("seq is %v, not %d: entries removed, inserted or reordered", fields[0].Value, v.Entries+1)
	}
	hash := digest(canonical(fields[:last]))
	if fields[last-1].Value != v.Hash || fields[last].Value != hash {
		return nil, "a hash does not match: this entry was changed, or the one before"
	}
	v.Entries++
	v.Hash = hash
	return fields, ""
}

// conclude says what the verdict proves, or what to do.
func (v *Verdict) conclude() {
	v.OK = v.Reason == ""
	if !v.OK {
		v.Remedy = remedyAside
		return
	}
	v.Proves = "the entries form one chain: none was changed, inserted, removed or reordered on its own"
	v.Limits = "that the tail was not cut or all written anew: no head was given"
	if len(v.Heads) > 0 {
		v.Proves += "; those up to " + strings.Join(v.Heads, " and ") + " are the ones that stood there when it was noted"
		v.Limits = "that what was written is true, nor anything against one who rewrote what keeps the heads too: " +
			"state.jsonl, or your phone (--head)"
	}
}

// questions is what was shown of each question that can still be answered, by its id.
type questions map[string]shownTo
type shownTo struct {
	session string
	sha     string
}

// judge takes one more entry, and says what is wrong though the chain holds: that the log is not the one it was, or
// that an answer was typed at something else than was shown. A question is forgotten when it or its session is over.
func (q questions) judge(fields []Field) (why string) {
	member := map[string]string{}
	for _, f := range fields {
		if text, ok := f.Value.(string); ok {
			member[f.Name] = text
		}
	}
	prompt, session := member["prompt_id"], member["session_id"]
	switch member["event"] {
	case discontinued:
		return fmt.Sprintf("the log did not continue the entry %v:%s, which was noted: its tail was cut, it was removed, or "+
			"computed anew", valueOf(fields, "noted_seq"), member["noted_hash"])
	case promptEvents[Resolved], promptEvents[Canceled], promptEvents[Failed]:
		// PROMPT_EXPIRED is not among them: its default may still be typed
		delete(q, prompt)
	case "SESSION_END":
		maps.DeleteFunc(q, func(_ string, s shownTo) bool { return s.session == session })
	}
	if sha := member["shown_sha256"]; sha != "" {
		q[prompt] = shownTo{session, sha}
	}
	screen := member["screen_sha256"]
	if screen == "" || screen == q[prompt].sha {
		return ""
	}
	why = "an answer was typed at something else than was shown (prompt " + prompt + ")"
	if q[prompt].sha == "" {
		why += ": no entry before says what was shown"
	}
	return why
}

// valueOf is the value of the member of that name, nil without one.
func valueOf(fields []Field, name string) any {
	i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return fields[i].Value
}

// verifyAudit verifies the log as it is now against the head that the state noted after writing it, and those given. A
// log that once did not continue the noted head does not verify, whatever it holds now.
func (s *Store) verifyAudit(view *View, heads ...string) (Verdict, error) {
	broken := ""
	if m := view.Meta["audit"]; m != nil {
		heads = append(heads, headOf(m).String())
		broken = m.Values["broken"]
	}
	log, err := s.audit.read()
	if err != nil {
		return Verdict{}, err
	}
	defer log.Close()
	debug.SetMemoryLimit(readMemory)
	v, err := verify(log, heads...)
	if err != nil {
		return Verdict{}, err
	}
	if broken != "" && v.OK {
		v.Proves, v.Limits = "", ""
		v.fault(v.Entries+1, "the state notes that the log once did not continue the entry "+broken+", which was noted")
		v.conclude()
	}
	return v, nil
}

// read is the log as it is now, without a line that is just being written.
func (a *Audit) read() (io.ReadCloser, error) {
	defer a.log.release()
	if err := a.log.acquire(); err != nil {
		return nil, err
	}
	f, err := os.Open(a.log.path)
	if err != nil {
		return nil, err
	}
	return upTo{io.NewSectionReader(f, 0, a.log.end), f}, nil
}

// upTo is the beginning of a file.
type upTo struct {
	io.Reader
	io.Closer
}

// ---- a new log ----
// A log that does not verify is kept under another name.

// putAuditAside renames the log, which stays as it is, and begins a new one: its first entry says what became of the
// old one, then come the questions that can still be answered. The state notes the new head, and forgets that the old
// log was broken. It holds both locks all the time. Killed in the middle it is done again: the state still notes the
// old head.
func (s *Store) putAuditAside() (aside string, head chainHead, err error) {
	defer s.log.release()
	if err := s.begin(); err != nil {
		return "", chainHead{}, err
	}
	defer s.audit.log.release()
	if err := s.audit.log.acquire(); err != nil {
		return "", chainHead{}, err
	}
	aside = s.audit.log.path + ".aside-" + time.Now().UTC().Format(fileStamp)
	lines, head, err := chain(chainHead{}, s.firstEvents(filepath.Base(aside)))
	if err != nil {
		return "", chainHead{}, err
	}
	if err := s.audit.replace(aside, lines); err != nil {
		return "", chainHead{}, err
	}
	note := &MetaRecord{Head: Head{ID: "audit"}, Seq: head.Seq, Hash: head.Hash}
	if _, err := s.write([]Record{note}); err != nil {
		return "", chainHead{}, err
	}
	return aside, head, s.log.do("fsync", s.log.f, func() error { return syncFile(s.log.f) })
}

// replace renames the log's file to aside and begins another with these lines. The log is acquired.
func (a *Audit) replace(aside string, lines []byte) error {
	j := a.log
	_ = j.f.Close() // nothing was written by it that is not on the disk; Windows renames no open file
	j.f = nil
	if err := os.Rename(j.path, aside); err != nil {
		return err
	}
	f, err := openPrivate(j.path, os.O_RDWR|os.O_APPEND|os.O_CREATE)
	if err != nil {
		return err
	}
	j.f, j.end, j.known = f, 0, false
	return j.append(lines, true)
}

// firstEvents is what a log begins with when the one before was put aside under that name.
func (s *Store) firstEvents(aside string) []Event {
	old := s.view.Meta["audit"]
	var broken any
	if old != nil && old.Values["broken"] != "" {
		broken = old.Values["broken"]
	}
	noted := headOf(old)
	events := []Event{{Name: putAside, Fields: []Field{{"aside", aside}, {"noted_seq", noted.Seq},
		{"noted_hash", noted.Hash}, {"broken", broken}}}}
	open := s.view.which(func(p *PromptRecord) bool { return next[p.Status] != nil && s.view.active(p.SessionID) })
	sort.Slice(open, func(i, j int) bool { return open[i].CreatedAt.Before(open[j].CreatedAt) })
	for _, p := range open {
		events = append(events, Event{carriedOver, p.SessionID, p.ID, shownField(p)})
	}
	return events
}

// ---- debug bundle ----
// What may leave the machine: an archive to look into and to send with a bug report.

// bundled are the files of the state folder that go into the bundle, below about.json.
var bundled = []string{"state.jsonl", "audit.log", "atlasbridge.log", "atlasbridge.log.1"}

// harmless are the members of records and entries whose texts say nothing about what was asked or answered.
var harmless = strings.Fields(`
	rec id at type confidence safe_default status source created_at expires_at
	ts decided_at decided_by prompt_id session_id injected_at kind by tool activity started_at
	ended_at hash prev_hash event crc time level msg err error signals`)

// cmdDebug writes the bundle to a file that was not there before. One that was begun and failed is removed.
func cmdDebug(c *command) int {
	path := c.opts.text("output")
	if path == "" {
		path = time.Now().Format("atlasbridge-debug-20060102-150405.tar.gz")
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		err = errors.Join(c.writeBundle(f), f.Close())
		if err != nil {
			_ = os.Remove(path) // the error to tell is the one that came first
		}
	}
	if err != nil {
		return c.fail(hinted(fmt.Errorf("writing the bundle: %w", err), "choose another file with --output"))
	}
	fmt.Fprint(c, path,
		": without the token; words of questions and answers with --full only; look into it before you send it\n")
	return 0
}

// bundle is an archive that is being written.
type bundle struct {
	*command
	tar   *tar.Writer
	token string // is left out, "" none
}

// writeBundle writes the archive: about.json, then each file that there is; it lists them on standard output, and says
// which of them could not be read. An error is one of writing.
func (c *command) writeBundle(w io.Writer) error {
	cfg, invalid := c.config(nil)
	zip := gzip.NewWriter(w)
	b := bundle{c, tar.NewWriter(zip), cfg.Token}
	problem := ""
	if invalid != nil {
		problem = invalid.Error()
	}
	var tools []tool
	for _, a := range adapters[:len(adapters)-1] { // the last one stands for all others
		tools = append(tools, findAdapted(a, a.Names)) // without a version: to ask for it would run the tool
	}
	about, err := json.MarshalIndent(map[string]any{
		"version":      version(),
		"tools":        tools,
		"config":       cfg.inForce,
		"config_error": problem,
	}, "", "  ")
	if err != nil {
		return err
	}
	if _, err := b.add("about.json", bytes.NewReader(about), bytes.Clone); err != nil {
		return err
	}
	full := c.opts.on("full")
	for _, name := range bundled {
		f, unread := os.Open(filepath.Join(cfg.Dir, name))
		if unread == nil {
			keep := bytes.Clone
			if !full || name == "state.jsonl" { // the logs have no nonces, and the audit log's bytes are hashed
				keep = func(line []byte) []byte { return withhold(line, full) }
			}
			unread, err = b.add(name, f, keep)
			_ = f.Close() // nothing was written to it
		}
		if err != nil {
			return err
		}
		if unread != nil && !errors.Is(unread, os.ErrNotExist) {
			fmt.Fprintf(c.stderr, "atlasbridge: left out: %s\n", visible(unread.Error()))
		}
	}
	return errors.Join(b.tar.Close(), zip.Close())
}

// add puts what is kept of the lines of r into the archive, if that is anything. unread is why r could not be read:
// then it is left out.
func (b *bundle) add(name string, r io.Reader, keep func(line []byte) []byte) (unread, err error) {
	var kept bytes.Buffer // the archive has the length before the text
	unread = eachLine(r, func(line []byte) (more bool) {
		text := redact(string(keep(line)))
		if b.token != "" {
			text = strings.ReplaceAll(text, b.token, "[token]")
		}
		kept.WriteString(text)
		return true
	})
	if unread != nil || kept.Len() == 0 {
		return unread, nil
	}
	fmt.Fprintf(b, "%9d  %s\n", kept.Len(), name)
	err = b.tar.WriteHeader(&tar.Header{
		Name:    "atlasbridge/" + name,
		Mode:    0o600,
		Size:    int64(kept.Len()),
		ModTime: time.Now(),
	})
	if err == nil {
		_, err = kept.WriteTo(b.tar)
	}
	return nil, err
}

// withhold takes every text that is not known to be harmless out of JSON Lines, so that a member added later is not
// shown by mistake; with full, nonces only. Of a damaged line nothing is left.
func withhold(lines []byte, full bool) []byte {
	var kept bytes.Buffer
	for line := range bytes.Lines(lines) {
		var record map[string]json.RawMessage
		if err := json.Unmarshal(line, &record); err != nil {
			record = nil
		}
		maps.DeleteFunc(record, func(name string, value json.RawMessage) bool {
			telling := strings.ContainsAny(string(value[:1]), `"[{`) && !slices.Contains(harmless, name)
			return name == "nonce" || telling && !full
		})
		text, _ := json.Marshal(record) // cannot fail: the values were read as JSON
		kept.Write(append(text, '\n'))
	}
	return kept.Bytes()
}
