// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering.
//
// One entry is one line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1):
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// It holds if its bytes are exactly what jq -c prints for it, seq and prev_hash follow from the entry before (1 and
// "genesis" at first), and hash is that of the line without its hash member: jq -cj 'del(.hash)' | sha256sum.
//
// A chain alone cannot show that its tail was cut or all of it written anew: the state and the phone keep heads to
// compare it with. The log is never rewritten, but for a torn last line, whose bytes are moved aside. Answers typed
// as text are in it as length and SHA-256 only, secrets not at all.
package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Layouts of UTC times: RFC 3339, and in names of files kept aside; prev_hash of the first entry.
const stampLayout, fileStamp, genesis = "2006-01-02T15:04:05.000000Z", "20060102T150405.000000", "genesis"

// The largest integer that jq 1.6 prints unchanged (measured); bytes of a value, and of a line: it has at most ten, whose
// bytes become at most six each.
const maxExact, maxAuditText, maxEntry = 1<<53 - 1, 4096, 1 << 18

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	mu   sync.Mutex // held from begin to end
	log  *journal
	note func(seq int64, hash string) // tells the state the new head
}

// Event is one entry before it is chained: Fields keep their order; values are string, bool, nil or integer.
type Event struct {
	Name, SessionID, PromptID string
	Fields                    []Field
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
	return a.commit(e)
}

// Head is the last entry's number and hash, 0 and "genesis" when there is none.
func (a *Audit) Head() (seq int64, hash string, err error) {
	if err := a.begin(); err != nil {
		return 0, "", err
	}
	defer a.end()
	return a.last()
}

// begin takes the log's lock; end gives it back.
func (a *Audit) begin() error {
	a.mu.Lock()
	_, err := a.log.acquire()
	if err != nil {
		a.mu.Unlock()
		err = fmt.Errorf("opening the audit log: %w", err)
	}
	return err
}

func (a *Audit) end() {
	a.log.release()
	a.mu.Unlock()
}

// commit appends the events in one write and one fsync, and ends what begin began. What they follow is read from
// the file each time, for another process may have written it. Ids and deciders that are not known are left out.
func (a *Audit) commit(events ...Event) error {
	seq, hash, err := a.last()
	var out []byte
	for i := 0; i < len(events) && err == nil; i++ {
		e, stamp, fields := events[i], time.Now().UTC().Format(stampLayout), []Field{}
		seq++
		for _, f := range append([]Field{{"seq", seq}, {"ts", stamp}, {"event", e.Name}, {"session_id", e.SessionID},
			{"prompt_id", e.PromptID}}, e.Fields...) {
			if text, ok := f.Value.(string); ok && !strings.HasSuffix(f.Name, "_sha256") {
				f.Value = clip(redact(text), maxAuditText)
			}
			if f.Value != "" || !strings.HasSuffix(f.Name, "_id") && f.Name != "decided_by" {
				fields = append(fields, f)
			}
		}
		fields = append(fields, Field{"prev_hash", hash})
		hash = digest(canonical(fields))
		line := canonical(append(fields, Field{"hash", hash}))
		_, err = parseEntry(line)
		out = append(append(out, line...), '\n')
	}
	if err == nil {
		err = a.log.append(out, true)
	}
	a.end()
	if err != nil {
		return fmt.Errorf("appending to the audit log: %w", err)
	}
	a.note(seq, hash)
	return nil
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: nobody was told
// that it succeeded, and they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	tail := make([]byte, min(a.log.end, maxEntry))
	_, err = a.log.f.ReadAt(tail, a.log.end-int64(len(tail)))
	lines := bytes.Split(tail, []byte("\n"))
	if torn := int64(len(lines[len(lines)-1])); err == nil && 0 < torn && torn < maxEntry {
		err = a.log.cut(a.log.end - torn)
	}
	if err != nil || len(lines) == 1 && len(tail) < maxEntry {
		return 0, genesis, err
	}
	fields, err := parseEntry(lines[max(0, len(lines)-2)])
	if err != nil {
		return 0, "", fmt.Errorf("its last line is damaged (%w): see atlasbridge audit verify, then move it away", err)
	}
	seq, _ = fields[0].Value.(int64)
	hash, _ = fields[len(fields)-1].Value.(string)
	return seq, hash, nil
}

// read is the log from a place on, in bytes.
func (a *Audit) read(at int64) ([]byte, error) {
	if err := a.begin(); err != nil {
		return nil, err
	}
	defer a.end()
	log := make([]byte, max(0, a.log.end-at))
	_, err := a.log.f.ReadAt(log, at)
	return log, err
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// asJQ turns what encoding/json writes into what jq 1.6 to 1.8 print (TestAuditEveryCodePoint), invalid UTF-8 into U+FFFD.
// An escaped backslash comes first, for what follows it is text.
var asJQ = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029", `\ufffd`, "\ufffd", "\x7f", `\u007f`)

// canonical is the object with these members as jq -c prints it; nothing stands for a value that JSON does not know.
func canonical(fields []Field) []byte {
	members := make([]string, len(fields))
	for i, f := range fields {
		name, _ := marshal(f.Name)
		value, _ := marshal(f.Value)
		members[i] = asJQ.Replace(string(name) + ":" + string(value))
	}
	return []byte("{" + strings.Join(members, ",") + "}")
}

// parseEntry accepts exactly what jq -c prints for an entry, with seq first, prev_hash and hash last. A member that is
// there twice, a float, a large integer is left out, so that what canonical makes of the others is not the line.
func parseEntry(line []byte) (fields []Field, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	for t, bad := d.Token(); bad == nil && t == json.Delim('{') && d.More(); {
		var f Field
		name, _ := d.Token()
		f.Name, _ = name.(string)
		f.Value, bad = d.Token()
		number, isNumber := f.Value.(json.Number)
		n, _ := number.Int64()
		if isNumber {
			f.Value = n
		}
		twice := slices.ContainsFunc(fields, func(g Field) bool { return g.Name == f.Name })
		if !twice && -maxExact <= n && n <= maxExact {
			fields = append(fields, f)
		}
	}
	last := len(fields) - 1
	if last < 2 || fields[0].Name != "seq" || fields[last-1].Name != "prev_hash" || fields[last].Name != "hash" ||
		!bytes.Equal(canonical(fields), line) {
		return nil, errors.New("its bytes are not what jq -c prints for an entry")
	}
	return fields, nil
}

var promptEvents = map[State]string{Created: "PROMPT_DETECTED", AwaitingReply: "PROMPT_ROUTED", Failed: "PROMPT_FAILED",
	ReplyReceived: "REPLY_RECEIVED", Injected: "REPLY_INJECTED", Resolved: "PROMPT_RESOLVED", Expired: "PROMPT_EXPIRED",
	Canceled: "PROMPT_CANCELED"}

// auditEvents is what the change from old (nil: none) to r means for the audit log. The store calls it for every
// record that it appends, so that no caller can forget an entry.
func auditEvents(old, r Record) []Event {
	if s, ok := r.(*SessionRecord); ok {
		if was, _ := old.(*SessionRecord); was == nil {
			return []Event{{"SESSION_START", s.ID, "", []Field{{"tool", s.Tool}, {"pid", s.PID}}}}
		} else if was.Status == "active" && s.Status != "active" {
			return []Event{{"SESSION_END", s.ID, "", []Field{{"status", s.Status}, {"exit_code", s.ExitCode}}}}
		}
	}
	p, ok := r.(*PromptRecord)
	was, _ := old.(*PromptRecord)
	if !ok || promptEvents[p.Status] == "" || was != nil && was.Status == p.Status {
		return nil
	}
	var fields []Field
	switch answered := p.Status == ReplyReceived || p.Status == Injected; {
	case p.Status == Created:
		fields = []Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source}, {"tool", p.Tool}}
	case p.Status == Failed:
		fields = []Field{{"reason", p.Reason}}
	case answered && p.Secret:
		fields = []Field{{"secret", true}}
	case !answered || p.Value == nil:
	case p.offered(*p.Value) || p.SafeDefault != nil && *p.Value == *p.SafeDefault:
		fields = []Field{{"value", *p.Value}}
	default:
		fields = hidden("value", *p.Value)
	}
	if p.Status == Injected {
		fields = append(fields, Field{"source", replySource(p)})
	} else if p.Status == ReplyReceived && p.Reason != "" { // the operator's
		fields = append(fields, hidden("reason", p.Reason)...)
	}
	fields = append(fields, Field{"decided_by", *cmp.Or(p.DecidedBy, ref(""))})
	return []Event{{promptEvents[p.Status], p.SessionID, p.ID, fields}}
}

// hidden are the members that stand for a text that is not to be told.
func hidden(what, text string) []Field {
	return []Field{{what + "_len", len(text)}, {what + "_sha256", digest([]byte(text))}}
}

// Verdict is what a verification found: what audit verify --json prints.
type Verdict struct {
	OK      bool     `json:"ok"`
	Entries int64    `json:"entries"` // that hold, from the first on
	Hash    string   `json:"hash"`    // of the last of them
	Line    int64    `json:"line"`    // the first bad one, 0 none
	Reason  string   `json:"reason"`
	Heads   []string `json:"heads"` // known from elsewhere, as SEQ:HASH
	Proves  string   `json:"proves"`
	Limits  string   `json:"does_not_prove"`
}

// verify recomputes the chain up to the first line that does not hold, and looks for the heads in it.
func verify(log []byte, heads ...string) Verdict {
	v, missing := Verdict{Hash: genesis, Heads: append([]string{}, heads...)}, slices.Clone(heads)
	for line := range bytes.Lines(log) {
		text, whole := bytes.CutSuffix(line, []byte("\n"))
		fields, bad := parseEntry(text)
		last := len(fields) - 1
		switch v.Line = v.Entries + 1; {
		case !whole:
			v.Reason = "the line is not complete: a write or the file was cut short"
		case bad != nil:
			v.Reason = bad.Error()
		case fields[0].Value != v.Line:
			v.Reason = fmt.Sprintf("seq is %v, not %d: entries removed, inserted or reordered", fields[0].Value, v.Line)
		case fields[last-1].Value != v.Hash:
			v.Reason = "prev_hash is not the hash of the entry before"
		case fields[last].Value != digest(canonical(fields[:last])):
			v.Reason = "hash does not match: the entry was changed"
		default:
			v.Entries, v.Hash = v.Line, fmt.Sprint(fields[last].Value)
			missing = slices.DeleteFunc(missing, func(h string) bool { return h == fmt.Sprintf("%d:%s", v.Line, v.Hash) })
			continue
		}
		break
	}
	if v.Reason == "" && len(missing) > 0 {
		fmt.Sscan(missing[0], &v.Line)
		v.Line = min(v.Line, v.Entries+1)
		v.Reason = "the entry " + missing[0] + " is known but not there: the tail was cut or the chain computed anew"
	}
	if v.OK = v.Reason == ""; !v.OK {
		v.Entries = v.Line - 1
		return v
	}
	v.Line, v.Limits = 0, "that the tail was not cut or all written anew: no head was given"
	v.Proves = "the entries form one chain: none was changed, inserted, removed or reordered on its own"
	if len(heads) > 0 {
		v.Proves += "; those up to " + strings.Join(heads, " and ") + " are the ones that stood there when it was noted"
		v.Limits = "that what was written is true, nor anything against one who rewrote what keeps the heads too: " +
			"state.jsonl, or your phone (--head)"
	}
	return v
}

// verifyAudit verifies the log as it is now against the head that the state keeps (noted after the entry was written:
// the log is never behind it) and those given.
func (s *Store) verifyAudit(view *View, heads ...string) (Verdict, error) {
	if m := view.Meta["audit"]; m != nil {
		heads = append(heads, fmt.Sprintf("%d:%s", m.Seq, m.Hash))
	}
	log, err := s.audit.read(0)
	return verify(log, heads...), err
}

func cmdAudit(c *command) int {
	return c.withState(func(s *Store) int {
		head := strings.Replace(c.opts.text("head"), " ", ":", 1)
		if !regexp.MustCompile(`^([1-9][0-9]{0,15}:sha256:[0-9a-f]{64})?$`).MatchString(head) {
			return c.usage("--head is SEQ:sha256:HEX, as the session-ended message has it")
		}
		v, err := s.verifyAudit(s.view, strings.Fields(head)...)
		switch {
		case err != nil:
			return c.fail(err)
		case c.opts.on("json"):
			c.printJSON(v)
		case v.OK:
			fmt.Fprintf(c.stdout, "audit.log holds: %d entries, head %d:%s\nproves: %s\ndoes not prove: %s\n",
				v.Entries, v.Entries, v.Hash, v.Proves, v.Limits)
		default:
			fmt.Fprintf(c.stdout, "audit.log:%d: %s\n%d entries before it hold\n", v.Line, v.Reason, v.Entries)
		}
		if !v.OK {
			return exitFailed
		}
		return 0
	})
}

func cmdLogs(c *command) int {
	return c.withState(func(s *Store) int {
		for at := int64(0); ; {
			added, err := s.audit.read(at)
			if err != nil {
				return c.fail(err)
			}
			for line := range bytes.Lines(added[:bytes.LastIndexByte(added, '\n')+1]) {
				c.printEntry(line[:len(line)-1])
				at += int64(len(line))
			}
			if !c.opts.on("tail") {
				return 0
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-c.ctx.Done():
				return 0
			}
		}
	})
}

// c1 are the control characters that JSON leaves as they are and some terminals obey.
var c1 = regexp.MustCompile(`[\x{80}-\x{9f}]`)

// printEntry prints an entry of the wanted session as text: time, session, event, the other members. Whatever a
// terminal could obey is escaped, in JSON too.
func (c *command) printEntry(line []byte) {
	fields, err := parseEntry(line)
	if err != nil {
		fmt.Fprintln(c.stdout, c.colour("31", fmt.Sprintf("damaged: %q", line)))
		return
	}
	member, rest := map[string]string{}, ""
	for _, f := range fields[1 : len(fields)-2] {
		member[f.Name] = fmt.Sprint(f.Value)
		if !slices.Contains([]string{"ts", "event", "session_id", "prompt_id"}, f.Name) {
			rest += " " + f.Name + "=" + member[f.Name]
		}
	}
	event, session := member["event"], member["session_id"]
	text := fmt.Sprintf("%.19s %-8s %-17s %s%s", member["ts"], shortID(session), event, shortID(member["prompt_id"]), rest)
	text = fmt.Sprintf("%q", text)
	text = strings.Replace(text[1:len(text)-1], event, c.colour("1", event), 1)
	if c.opts.on("json") {
		text = c1.ReplaceAllStringFunc(string(line), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
	}
	if strings.HasPrefix(session, c.opts.text("session")) {
		fmt.Fprintln(c.stdout, text)
	}
}
