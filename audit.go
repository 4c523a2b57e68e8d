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
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	stampLayout  = "2006-01-02T15:04:05.000000Z" // of UTC times, RFC 3339
	fileStamp    = "20060102T150405.000000"      // in names of files kept aside
	genesis      = "genesis"                     // prev_hash of the first entry
	maxExact     = 1<<53 - 1                     // largest integer that jq 1.6 prints unchanged (measured)
	maxAuditText = 4096                          // bytes of one value
	hashLen      = len("sha256:") + 2*sha256.Size
)

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	mu   sync.Mutex // held from begin to end
	log  *journal
	note func(seq int64, hash string) // tells the state the new head
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
	if _, err := a.log.acquire(); err != nil {
		a.mu.Unlock()
		return fmt.Errorf("opening the audit log: %w", err)
	}
	return nil
}

func (a *Audit) end() {
	a.log.release()
	a.mu.Unlock()
}

// commit appends the events in one write and one fsync, and ends what begin began. What they follow is read from
// the file each time, for another process may have written it.
func (a *Audit) commit(events ...Event) error {
	seq, hash, err := a.last()
	var out, line []byte
	for _, e := range events {
		if err == nil {
			seq++
			line, err = canonical(append(e.fields(seq), Field{"prev_hash", hash}))
			hash = digest(line)
			out = fmt.Appendf(append(out, line[:max(0, len(line)-1)]...), ",\"hash\":\"%s\"}\n", hash)
		}
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

// fields are the members of the event's entry, before those of the chain.
func (e Event) fields(seq int64) []Field {
	out := []Field{{"seq", seq}, {"ts", time.Now().UTC().Format(stampLayout)}, {"event", e.Name}}
	for _, f := range append([]Field{{"session_id", e.SessionID}, {"prompt_id", e.PromptID}}, e.Fields...) {
		if s, ok := f.Value.(string); ok && s == "" && strings.HasSuffix(f.Name, "_id") {
			continue
		} else if ok && !strings.HasSuffix(f.Name, "_sha256") {
			f.Value = clip(redact(s), maxAuditText)
		}
		out = append(out, f)
	}
	return out
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: nobody was told
// that it succeeded, and they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	for n := int64(4 << 10); ; n *= 4 {
		tail := make([]byte, min(n, a.log.end))
		if _, err := a.log.f.ReadAt(tail, a.log.end-int64(len(tail))); err != nil {
			return 0, "", err
		}
		end := bytes.LastIndexByte(tail, '\n')
		start := bytes.LastIndexByte(tail[:max(end, 0)], '\n')
		if start < 0 && int64(len(tail)) < a.log.end {
			continue
		}
		if torn := len(tail) - end - 1; torn > 0 {
			err = a.log.cut(a.log.end - int64(torn))
		}
		if err != nil || end < 0 {
			return 0, genesis, err
		}
		if seq, _, hash, _, err = parseEntry(tail[start+1 : end]); err != nil {
			err = fmt.Errorf("its last line is damaged (%w): see atlasbridge audit verify, then move it away", err)
		}
		return seq, hash, err
	}
}

// digest is the hash of a line without its hash member, or of a text.
func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// canonical is the object with these members as jq -c prints it.
func canonical(fields []Field) ([]byte, error) {
	b := []byte{'{'}
	for i, f := range fields {
		if slices.ContainsFunc(fields[:i], func(g Field) bool { return g.Name == f.Name }) {
			return nil, fmt.Errorf("member %q is there twice", f.Name)
		}
		if n, ok := f.Value.(int); ok {
			f.Value = int64(n)
		}
		b = append(appendString(b, f.Name), ':')
		switch v := f.Value.(type) {
		case nil:
			b = append(b, "null"...)
		case bool:
			b = strconv.AppendBool(b, v)
		case string:
			b = appendString(b, v)
		case int64:
			if b = strconv.AppendInt(b, v, 10); v > maxExact || v < -maxExact {
				return nil, fmt.Errorf("member %q: jq would change %d", f.Name, v)
			}
		default:
			return nil, fmt.Errorf("member %q is not a string, boolean, null or integer", f.Name)
		}
		b = append(b, ',')
	}
	return append(b[:max(1, len(b)-1)], '}'), nil
}

// appendString appends s as a JSON string exactly as jq 1.6 to 1.8 print it: encoding/json differs at U+007F,
// U+2028 and U+2029 whatever its options. Invalid UTF-8 becomes U+FFFD. See TestAuditEveryCodePoint.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, r := range s {
		if i := strings.IndexRune("\"\\\b\f\n\r\t", r); i >= 0 && r != utf8.RuneError {
			b = append(b, '\\', `"\bfnrt`[i])
		} else if r < 0x20 || r == 0x7f {
			b = fmt.Appendf(b, `\u%04x`, r)
		} else {
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

// parseEntry accepts only lines that canonical wrote, with seq first, prev_hash and hash last; fields are the
// members between them.
func parseEntry(line []byte) (seq int64, prev, hash string, fields []Field, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	for t, _ := d.Token(); err == nil && t == json.Delim('{') && d.More(); {
		var name, value any
		name, _ = d.Token()
		value, err = d.Token()
		if n, ok := value.(json.Number); ok {
			value, _ = n.Int64()
		}
		key, _ := name.(string)
		fields = append(fields, Field{key, value})
	}
	if again, bad := canonical(fields); err != nil || bad != nil || !bytes.Equal(again, line) {
		return 0, "", "", nil, errors.New("its bytes are not what jq -c prints for an entry")
	}
	n := len(fields) - 2
	if n < 1 || fields[0].Name != "seq" || fields[n].Name != "prev_hash" || fields[n+1].Name != "hash" {
		return 0, "", "", nil, errors.New("seq, prev_hash or hash is not in its place")
	}
	seq, _ = fields[0].Value.(int64)
	prev, _ = fields[n].Value.(string)
	if hash, _ = fields[n+1].Value.(string); len(hash) != hashLen {
		err = errors.New("its hash is not a SHA-256")
	}
	return seq, prev, hash, fields[1:n], err
}

// auditEvents is what the change from old (nil: none) to r means for the audit log. The store calls it for every
// record that it appends, so that no caller can forget an entry.
func auditEvents(old, r Record) []Event {
	if s, ok := r.(*SessionRecord); ok {
		was, _ := old.(*SessionRecord)
		if was == nil {
			return []Event{{"SESSION_START", s.ID, "", []Field{{"tool", s.Tool}, {"pid", s.PID}}}}
		} else if was.Status == "active" && s.Status != "active" {
			end := Event{"SESSION_END", s.ID, "", []Field{{"status", s.Status}, {"exit_code", nil}}}
			if s.ExitCode != nil {
				end.Fields[1].Value = *s.ExitCode
			}
			return []Event{end}
		}
	}
	name := map[State]string{Created: "PROMPT_DETECTED", AwaitingReply: "PROMPT_ROUTED", ReplyReceived: "REPLY_RECEIVED",
		Injected: "REPLY_INJECTED", Resolved: "PROMPT_RESOLVED", Expired: "PROMPT_EXPIRED", Canceled: "PROMPT_CANCELED",
		Failed: "PROMPT_FAILED"}
	p, ok := r.(*PromptRecord)
	was, _ := old.(*PromptRecord)
	if !ok || was != nil && was.Status == p.Status || name[p.Status] == "" {
		return nil
	}
	var fields []Field
	hidden := func(what, text string) {
		fields = append(fields, Field{what + "_len", len(text)}, Field{what + "_sha256", digest([]byte(text))})
	}
	switch answered := p.Status == ReplyReceived || p.Status == Injected; {
	case p.Status == Created:
		fields = []Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source}, {"tool", p.Tool}}
	case p.Status == Failed:
		fields = []Field{{"reason", p.Reason}}
	case answered && p.Secret:
		fields = []Field{{"secret", true}}
	case answered && p.Value != nil && (p.offered(*p.Value) || p.SafeDefault != nil && *p.Value == *p.SafeDefault):
		fields = []Field{{"value", *p.Value}}
	case answered && p.Value != nil:
		hidden("value", *p.Value)
	}
	if p.Status == Injected {
		fields = append(fields, Field{"source", replySource(p)})
	} else if p.Status == ReplyReceived && p.Reason != "" { // the operator's
		hidden("reason", p.Reason)
	}
	if p.DecidedBy != nil {
		fields = append(fields, Field{"decided_by", *p.DecidedBy})
	}
	return []Event{{name[p.Status], p.SessionID, p.ID, fields}}
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
func verify(r io.Reader, heads ...string) Verdict {
	v := Verdict{Hash: genesis, Heads: append([]string{}, heads...),
		Limits: "that the tail was not cut or all written anew: no head was given",
		Proves: "the entries form one chain: none was changed, inserted, removed or reordered on its own"}
	missing := slices.Clone(heads)
	for in := bufio.NewReader(r); v.Reason == ""; {
		line, err := in.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			break
		}
		seq, prev, hash, _, bad := parseEntry(bytes.TrimSuffix(line, []byte("\n")))
		switch v.Line = v.Entries + 1; {
		case err == io.EOF:
			v.Reason = "the line is not complete: a write or the file was cut short"
		case err != nil || bad != nil:
			v.Reason = errors.Join(err, bad).Error()
		case seq != v.Line:
			v.Reason = fmt.Sprintf("seq is %d, not %d: entries removed, inserted or reordered", seq, v.Line)
		case prev != v.Hash:
			v.Reason = "prev_hash is not the hash of the entry before"
		case hash != digest(append(line[:len(line)-len(`,"hash":""}`+"\n")-hashLen], '}')):
			v.Reason = "hash does not match: the entry was changed"
		default:
			v.Entries, v.Hash = seq, hash
			missing = slices.DeleteFunc(missing, func(h string) bool { return h == fmt.Sprintf("%d:%s", seq, hash) })
		}
	}
	for _, h := range missing {
		if at := int64(0); v.Reason == "" {
			fmt.Sscan(h, &at)
			v.Line = min(at, v.Entries+1)
			v.Reason = "the entry " + h + " is known but not there: the tail was cut or the chain computed anew"
		}
	}
	if v.OK = v.Reason == ""; !v.OK {
		v.Entries, v.Proves, v.Limits = v.Line-1, "", ""
	} else if v.Line = 0; len(heads) > 0 {
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
	if err := s.audit.begin(); err != nil {
		return Verdict{}, err
	}
	defer s.audit.end()
	return verify(io.NewSectionReader(s.audit.log.f, 0, s.audit.log.end), heads...), nil
}

// headShape is a head as the session-ended message has it.
var headShape = regexp.MustCompile(`^[1-9][0-9]{0,15}:sha256:[0-9a-f]{64}$`)

func cmdAudit(c *command) int {
	return c.withState(func(s *Store, view *View) int {
		var heads []string
		if head := strings.Replace(c.opts.text("head"), " ", ":", 1); headShape.MatchString(head) {
			heads = []string{head}
		} else if head != "" {
			return c.usage("--head is SEQ:sha256:HEX, as the session-ended message has it")
		}
		v, err := s.verifyAudit(view, heads...)
		if err != nil {
			return c.fail(err)
		}
		text := fmt.Sprintf("audit.log holds: %d entries, head %d:%s\nproves: %s\ndoes not prove: %s\n",
			v.Entries, v.Entries, v.Hash, v.Proves, v.Limits)
		if !v.OK {
			text = fmt.Sprintf("audit.log:%d: %s\n%d entries before it hold\n", v.Line, v.Reason, v.Entries)
		}
		if c.opts.on("json") {
			c.printJSON(v)
		} else {
			fmt.Fprint(c.stdout, text)
		}
		return map[bool]int{false: exitFailed}[v.OK]
	})
}

func cmdLogs(c *command) int {
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	changed, stop := watchFolder(dir)
	defer stop()
	for at := int64(0); ; {
		f, err := os.Open(filepath.Join(dir, "audit.log"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return c.fail(err)
		}
		in := bufio.NewReader(io.NewSectionReader(f, at, 1<<62))
		for err == nil {
			var line []byte
			if line, err = in.ReadBytes('\n'); err == nil {
				at += int64(len(line))
				c.printEntry(line[:len(line)-1])
			}
		}
		if f.Close(); !c.opts.on("tail") {
			return 0
		}
		select {
		case <-changed:
		case <-time.After(500 * time.Millisecond):
		case <-c.ctx.Done():
			return 0
		}
	}
}

// printEntry prints an entry of the wanted session as text: time, session, event, the other members. Whatever a
// terminal could obey is escaped, in JSON too.
func (c *command) printEntry(line []byte) {
	_, _, _, fields, err := parseEntry(line)
	if err != nil {
		fmt.Fprintln(c.stdout, c.colour("31", "damaged: "+strconv.Quote(string(line))))
		return
	}
	head, rest := map[string]string{}, ""
	for _, f := range fields {
		text := strings.Trim(fmt.Sprintf("%q", fmt.Sprint(f.Value)), `"`)
		if head[f.Name] = text; !slices.Contains([]string{"ts", "event", "session_id", "prompt_id"}, f.Name) {
			rest += fmt.Sprintf(" %s=%s", visible(f.Name), text)
		}
	}
	text := fmt.Sprintf("%.19s %-8s %s %s%s", head["ts"], shortID(head["session_id"]),
		c.colour("1", fmt.Sprintf("%-17s", head["event"])), shortID(head["prompt_id"]), rest)
	if c.opts.on("json") {
		text = c1.ReplaceAllStringFunc(string(line), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
	}
	if strings.HasPrefix(head["session_id"], c.opts.text("session")) {
		fmt.Fprintln(c.stdout, text)
	}
}

// c1 are the control characters that JSON leaves as they are and some terminals obey.
var c1 = regexp.MustCompile(`[\x{80}-\x{9f}]`)
