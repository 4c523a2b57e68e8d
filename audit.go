// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering. One entry is one
// line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1), as jq -c prints it:
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// The hash is that of the line without its hash member: jq -cj 'del(.hash)' | sha256sum. The heads that state and phone
// keep show that no tail was cut, nor all written anew. Answers typed as text are in it as length and SHA-256.
package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	stampLayout, fileStamp, genesis  = "2006-01-02T15:04:05.000000Z", "20060102T150405.000000", "genesis"
	maxExact, maxAuditText, maxEntry = 1<<53 - 1, 4096, 1 << 18 // jq 1.6 changes larger ones; bytes of a value, a line
)

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	log  *journal
	note func(seq int64, hash string, err error) // tells the state the new head, or why an entry is missing
}
type Event struct { // one entry before it is chained; values are string, bool, nil or integer
	Name, SessionID, PromptID string
	Fields                    []Field
}
type Field struct {
	Name  string
	Value any
}

// Append chains and writes one entry durably. Head is the last entry's number and hash, 0 and "genesis" without one.
func (a *Audit) Append(e Event) error { return a.commit(a.log.acquire(), e) }
func (a *Audit) Head() (seq int64, hash string, err error) {
	defer a.log.release()
	if err = a.log.acquire(); err == nil {
		seq, hash, err = a.last()
	}
	return seq, hash, err
}

// commit appends the events in one write, without ids not known, and releases the log; err is its acquire's.
func (a *Audit) commit(err error, events ...Event) error {
	seq, hash, out := int64(0), "", []byte(nil)
	if err == nil {
		seq, hash, err = a.last()
	}
	for _, e := range events {
		seq++
		fields := append([]Field{{"seq", seq}, {"ts", time.Now().UTC().Format(stampLayout)}, {"event", e.Name},
			{"session_id", e.SessionID}, {"prompt_id", e.PromptID}}, e.Fields...)
		fields = slices.DeleteFunc(fields, func(f Field) bool {
			return f.Value == "" && (strings.HasSuffix(f.Name, "_id") || f.Name == "decided_by")
		})
		for i, f := range fields {
			if text, ok := f.Value.(string); ok {
				fields[i].Value = clip(redact(text), maxAuditText)
			}
		}
		fields = append(fields, Field{"prev_hash", hash})
		hash = digest(canonical(fields))
		line := append(canonical(append(fields, Field{"hash", hash})), '\n')
		_, bad := parseEntry(line)
		err, out = cmp.Or(err, bad), append(out, line...)
	}
	if err == nil {
		err = a.log.append(out, true)
	}
	a.log.release()
	a.note(seq, hash, err)
	return err
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	tail := make([]byte, min(a.log.end, maxEntry))
	_, err = a.log.f.ReadAt(tail, a.log.end-int64(len(tail)))
	lines := bytes.SplitAfter(tail, []byte("\n"))
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

// asJQ turns what encoding/json writes into what jq 1.6 to 1.8 print. What follows an escaped backslash is text.
var asJQ = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029", `\ufffd`, "\ufffd", "\x7f", `\u007f`)

// canonical is the object with these members as jq -c prints it; nothing stands for a value that JSON does not know.
func canonical(fields []Field) []byte {
	members := mapped(fields, func(f Field) string {
		member, _ := marshal(map[string]any{f.Name: f.Value})
		return strings.Trim(string(member), "{}")
	})
	return []byte(asJQ.Replace("{" + strings.Join(members, ",") + "}"))
}

// digest is the hash of an entry without its hash, or of a text; hidden are the members that stand for a text.
func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
func hidden(name, s string) []Field {
	return []Field{{name + "_len", len(s)}, {name + "_sha256", digest([]byte(s))}}
}

// parseEntry accepts exactly what jq -c prints for an entry, with seq first, prev_hash and hash last. Members that come
// again, fractions and large integers are not taken over, so that what canonical makes of the others is not the line.
func parseEntry(line []byte) (fields []Field, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	for t, bad := d.Token(); bad == nil && t == json.Delim('{') && d.More(); {
		name, _ := d.Token()
		f := Field{Name: fmt.Sprint(name)}
		f.Value, bad = d.Token()
		if n, ok := f.Value.(float64); ok {
			f.Value = int64(max(-maxExact, min(n, maxExact)))
		}
		if !slices.ContainsFunc(fields, func(g Field) bool { return g.Name == f.Name }) {
			fields = append(fields, f)
		}
	}
	last := len(fields) - 1
	if last < 2 || fields[0].Name != "seq" || fields[last-1].Name != "prev_hash" || fields[last].Name != "hash" ||
		!bytes.Equal(append(canonical(fields), '\n'), line) {
		return nil, errors.New("its bytes are not what jq -c prints for an entry, or were cut short")
	}
	return fields, nil
}

var promptEvents = map[State]string{Created: "PROMPT_DETECTED", AwaitingReply: "PROMPT_ROUTED", Failed: "PROMPT_FAILED",
	ReplyReceived: "REPLY_RECEIVED", Injected: "REPLY_INJECTED", Resolved: "PROMPT_RESOLVED", Expired: "PROMPT_EXPIRED",
	Canceled: "PROMPT_CANCELED"}

// auditEvents is what the change from old (nil: none) to r, any that the store appends, means for the audit log.
func auditEvents(old, r Record) []Event {
	s, ok := r.(*SessionRecord)
	before, _ := old.(*SessionRecord)
	p, _ := r.(*PromptRecord)
	was, _ := old.(*PromptRecord)
	switch {
	case ok && before == nil:
		return []Event{{"SESSION_START", s.ID, "", []Field{{"tool", s.Tool}, {"pid", s.PID}}}}
	case ok && before.Status == "active" && s.Status != "active":
		return []Event{{"SESSION_END", s.ID, "", []Field{{"status", s.Status}, {"exit_code", s.ExitCode}}}}
	case p == nil || promptEvents[p.Status] == "" || was != nil && was.Status == p.Status:
		return nil
	}
	value, typed := *cmp.Or(p.Value, ref("")), p.Status == ReplyReceived || p.Status == Injected
	told := typed && !p.Secret && p.Value != nil
	plain := p.offered(value) || p.SafeDefault != nil && value == *p.SafeDefault
	return []Event{{promptEvents[p.Status], p.SessionID, p.ID, slices.Concat(
		when(p.Status == Created, []Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source},
			{"tool", p.Tool}}),
		when(p.Status == Failed, []Field{{"reason", p.Reason}}), when(typed && p.Secret, []Field{{"secret", true}}),
		when(told && plain, []Field{{"value", value}}), when(told && !plain, hidden("value", value)),
		when(p.Status == Injected, []Field{{"source", replySource(p)}}),
		when(p.Status == ReplyReceived && p.Reason != "", hidden("reason", p.Reason)), // the operator's
		[]Field{{"decided_by", *cmp.Or(p.DecidedBy, ref(""))}})}}
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
		fields, bad := parseEntry(line)
		last := len(fields) - 1
		switch v.Line = v.Entries + 1; {
		case bad != nil:
			v.Reason = bad.Error()
		case fields[0].Value != v.Line:
			v.Reason = fmt.Sprintf("seq is %v, not %d: entries removed, inserted or reordered", fields[0].Value, v.Line)
		case fields[last-1].Value != v.Hash, fields[last].Value != digest(canonical(fields[:last])):
			v.Reason = "a hash does not match: this entry was changed, or the one before"
		default:
			v.Entries, v.Hash = v.Line, fmt.Sprint(fields[last].Value)
			missing = slices.DeleteFunc(missing, func(h string) bool { return h == fmt.Sprintf("%d:%s", v.Line, v.Hash) })
			continue
		}
		break
	}
	switch v.OK = v.Reason == "" && len(missing) == 0; {
	case v.OK:
		v.Line, v.Limits = 0, "that the tail was not cut or all written anew: no head was given"
		v.Proves = "the entries form one chain: none was changed, inserted, removed or reordered on its own"
	case v.Reason == "":
		fmt.Sscan(missing[0], &v.Line)
		v.Line = min(v.Line, v.Entries+1)
		v.Entries = v.Line - 1
		v.Reason = "the entry " + missing[0] + " is known but not there: the tail was cut or the chain computed anew"
	}
	if v.OK && len(heads) > 0 {
		v.Proves += "; those up to " + strings.Join(heads, " and ") + " are the ones that stood there when it was noted"
		v.Limits = "that what was written is true, nor anything against one who rewrote what keeps the heads too: " +
			"state.jsonl, or your phone (--head)"
	}
	return v
}

// verifyAudit verifies the log as it is now against the head that the state noted after writing it, and those given.
func (s *Store) verifyAudit(view *View, heads ...string) (Verdict, error) {
	if m := view.Meta["audit"]; m != nil {
		heads = append(heads, fmt.Sprintf("%d:%s", m.Seq, m.Hash))
	}
	err := s.audit.log.acquire()
	defer s.audit.log.release()
	log, unread := os.ReadFile(s.audit.log.path)
	return verify(log, heads...), cmp.Or(err, unread)
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
		return when(!v.OK, exitFailed)
	})
}

func cmdLogs(c *command) int {
	dir, err := stateDir(c.getenv)
	for at, on := int64(0), true; on && err == nil; on = c.opts.on("tail") && sleep(c.ctx, 200*time.Millisecond) == nil {
		f, missing := os.Open(filepath.Join(dir, "audit.log"))
		err = when(!os.IsNotExist(missing), missing) // else nothing has happened yet
		fresh, _ := io.ReadAll(io.NewSectionReader(f, at, 1<<62))
		f.Close()
		for line := range bytes.Lines(fresh[:bytes.LastIndexByte(fresh, '\n')+1]) {
			at += int64(len(line))
			c.printEntry(line)
		}
	}
	if err != nil {
		return c.fail(err)
	}
	return 0
}

var c1 = regexp.MustCompile(`[\x{80}-\x{9f}]`) // controls that JSON leaves as they are and some terminals obey

// printEntry prints an entry of the wanted session; whatever a terminal could obey is escaped, in JSON too.
func (c *command) printEntry(line []byte) {
	fields, err := parseEntry(line)
	if err != nil {
		fmt.Fprintln(c.stdout, c.colour("31", fmt.Sprintf("damaged: %q", bytes.TrimSpace(line))))
		return
	}
	member, rest := map[string]string{}, ""
	for _, f := range fields[1 : len(fields)-2] {
		member[f.Name] = fmt.Sprint(f.Value)
		alone := slices.Contains([]string{"ts", "event", "session_id", "prompt_id"}, f.Name)
		rest += when(!alone, " "+f.Name+"="+member[f.Name])
	}
	text := fmt.Sprintf("%q", fmt.Sprintf("%.19s %-8s %-17s %s%s", member["ts"], shortID(member["session_id"]),
		member["event"], shortID(member["prompt_id"]), rest))
	text = text[1:len(text)-1] + "\n"
	if c.opts.on("json") {
		text = c1.ReplaceAllStringFunc(string(line), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
	}
	if strings.HasPrefix(member["session_id"], c.opts.text("session")) {
		fmt.Fprint(c.stdout, text)
	}
}
