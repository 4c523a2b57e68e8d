// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering.
//
// One entry is one line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1):
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// It holds if and only if (1) its bytes are exactly what jq -c prints for it, (2) seq is that of the entry before
// plus one, 1 on the first line, (3) prev_hash is the hash of the entry before, "genesis" on the first line,
// (4) hash is the SHA-256 of the line without its hash member and newline: jq -cj 'del(.hash)' | sha256sum.
//
// A chain alone cannot show that its tail was cut or that all of it was written anew: the state and the phone
// keep heads, with which it is compared. The log is apart from the state, so that losing one never costs the
// other, and is never rewritten, but for a torn last line, whose bytes are moved aside. Answers typed as text
// are in it as length and SHA-256 only, secrets not at all.
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
	maxExact     = 1<<53 - 1                     // largest integer that jq 1.6 prints unchanged (measured)
	maxAuditText = 4096                          // bytes of one value
	hashMember   = len(`,"hash":"sha256:"}`) + 2*sha256.Size
)

// Audit is the append-only hash chain audit.log. Its methods may be called from any goroutine.
type Audit struct {
	mu   sync.Mutex // held from begin to commit
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
	_, err := a.log.acquire()
	if err != nil {
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
	var out []byte
	for _, e := range events {
		if err == nil {
			seq++
			hash, out, err = e.chain(out, seq, hash)
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

// chain appends the event's line to out.
func (e Event) chain(out []byte, seq int64, prev string) (string, []byte, error) {
	fields := []Field{{"seq", seq}, {"ts", time.Now().UTC().Format(stampLayout)}, {"event", e.Name}}
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
	line, err := canonical(append(fields, Field{"prev_hash", prev}))
	if err != nil {
		return "", nil, fmt.Errorf("event %s: %w", e.Name, err)
	}
	hash := digest(line)
	return hash, fmt.Appendf(append(out, line[:len(line)-1]...), ",\"hash\":\"%s\"}\n", hash), nil
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: nobody was told
// that it succeeded, and they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	for n := int64(4 << 10); ; n *= 4 {
		tail := make([]byte, min(n, a.log.end))
		if _, err := a.log.f.ReadAt(tail, a.log.end-int64(len(tail))); err != nil && len(tail) > 0 {
			return 0, "", err
		}
		end := bytes.LastIndexByte(tail, '\n')
		start := bytes.LastIndexByte(tail[:max(end, 0)], '\n')
		if start < 0 && int64(len(tail)) < a.log.end {
			continue
		}
		if torn := len(tail) - end - 1; torn > 0 {
			if err := a.log.cut(a.log.end - int64(torn)); err != nil {
				return 0, "", err
			}
		}
		if end < 0 {
			return 0, "genesis", nil
		}
		seq, _, hash, _, err = parseEntry(tail[start+1 : end])
		if err != nil {
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
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, f.Name), ':')
		if n, ok := f.Value.(int); ok {
			f.Value = int64(n)
		}
		switch v := f.Value.(type) {
		case nil:
			b = append(b, "null"...)
		case bool:
			b = strconv.AppendBool(b, v)
		case string:
			b = appendString(b, v)
		case int64:
			if v > maxExact || v < -maxExact {
				return nil, fmt.Errorf("member %q: jq would change %d", f.Name, v)
			}
			b = strconv.AppendInt(b, v, 10)
		default:
			return nil, fmt.Errorf("member %q is not a string, boolean, null or integer", f.Name)
		}
	}
	return append(b, '}'), nil
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
	for t, _ := d.Token(); t == json.Delim('{') && d.More(); {
		name, _ := d.Token()
		value, err := d.Token()
		if err != nil {
			return 0, "", "", nil, errors.New("it is not JSON")
		}
		if n, ok := value.(json.Number); ok {
			value, _ = n.Int64()
		}
		key, _ := name.(string)
		fields = append(fields, Field{key, value})
	}
	if again, err := canonical(fields); err != nil || !bytes.Equal(again, line) {
		return 0, "", "", nil, errors.New("its bytes are not what jq -c prints for an entry")
	}
	n := len(fields) - 2
	if n < 1 || fields[0].Name != "seq" || fields[n].Name != "prev_hash" || fields[n+1].Name != "hash" {
		return 0, "", "", nil, errors.New("seq, prev_hash or hash is not in its place")
	}
	seq, _ = fields[0].Value.(int64)
	prev, _ = fields[n].Value.(string)
	if hash, _ = fields[n+1].Value.(string); len(hash)+len(`,"hash":""}`) != hashMember {
		return 0, "", "", nil, errors.New("its hash is not a SHA-256")
	}
	return seq, prev, hash, fields[1:n], nil
}

// auditEvents is what the change from old (nil: none) to r means for the audit log. The store calls it for every
// record that it appends, so that no caller can forget an entry.
func auditEvents(old, r Record) []Event {
	if s, ok := r.(*SessionRecord); ok {
		was, _ := old.(*SessionRecord)
		switch {
		case was == nil:
			return []Event{{"SESSION_START", s.ID, "", []Field{{"tool", s.Tool}, {"pid", s.PID}}}}
		case was.Status == "active" && s.Status != "active":
			var code any
			if s.ExitCode != nil {
				code = *s.ExitCode
			}
			return []Event{{"SESSION_END", s.ID, "", []Field{{"status", s.Status}, {"exit_code", code}}}}
		}
	}
	p, ok := r.(*PromptRecord)
	was, _ := old.(*PromptRecord)
	name := map[State]string{Created: "PROMPT_DETECTED", AwaitingReply: "PROMPT_ROUTED",
		ReplyReceived: "REPLY_RECEIVED", Injected: "REPLY_INJECTED", Resolved: "PROMPT_RESOLVED",
		Expired: "PROMPT_EXPIRED", Canceled: "PROMPT_CANCELED", Failed: "PROMPT_FAILED"}
	if !ok || was != nil && was.Status == p.Status || name[p.Status] == "" {
		return nil
	}
	var fields []Field
	switch p.Status {
	case Created:
		fields = []Field{{"type", string(p.Type)}, {"confidence", p.Confidence}, {"source", p.Source}, {"tool", p.Tool}}
	case ReplyReceived, Injected:
		if p.Secret {
			fields = append(fields, Field{"secret", true})
		} else if p.Value != nil && (p.offered(*p.Value) || p.SafeDefault != nil && *p.Value == *p.SafeDefault) {
			fields = append(fields, Field{"value", *p.Value})
		} else if p.Value != nil {
			fields = append(fields, Field{"value_len", len(*p.Value)}, Field{"value_sha256", digest([]byte(*p.Value))})
		}
		if p.Status == Injected {
			fields = append(fields, Field{"source", replySource(p)})
		} else if p.Reason != "" { // the operator's
			sum := digest([]byte(p.Reason))
			fields = append(fields, Field{"reason_len", len(p.Reason)}, Field{"reason_sha256", sum})
		}
	case Failed:
		fields = append(fields, Field{"reason", p.Reason})
	}
	if p.DecidedBy != nil {
		fields = append(fields, Field{"decided_by", *p.DecidedBy})
	}
	return []Event{{name[p.Status], p.SessionID, p.ID, fields}}
}

// Anchor is a head of the chain that is known from outside the file.
type Anchor struct {
	Seq  int64  `json:"seq"` // 0: anywhere
	Hash string `json:"hash"`
	From string `json:"from"` // "state.jsonl" or "--head"
}

// Verdict is what a verification found: what audit verify --json prints.
type Verdict struct {
	OK      bool     `json:"ok"`
	Entries int64    `json:"entries"` // that hold, from the first on
	Hash    string   `json:"hash"`    // of the last of them
	Line    int64    `json:"line"`    // the first bad one, 0 none
	Reason  string   `json:"reason"`
	Anchors []Anchor `json:"anchors"` // heads that it was compared with
	Proves  string   `json:"proves"`
	Limits  string   `json:"does_not_prove"`
}

// verify recomputes the chain up to the first line that does not hold.
func verify(r io.Reader, anchors []Anchor) Verdict {
	v := Verdict{Hash: "genesis", Anchors: anchors}
	in := bufio.NewReader(r)
	for v.Reason == "" {
		line, err := in.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			break
		}
		seq, prev, hash, _, bad := parseEntry(bytes.TrimSuffix(line, []byte("\n")))
		switch {
		case err == io.EOF:
			v.Reason = "the line is not complete: a write or the file was cut short"
		case err != nil:
			v.Reason = err.Error()
		case bad != nil:
			v.Reason = bad.Error()
		case seq != v.Entries+1:
			v.Reason = fmt.Sprintf("seq is %d, not %d: entries removed, inserted or reordered", seq, v.Entries+1)
		case prev != v.Hash:
			v.Reason = "prev_hash is not the hash of the entry before"
		case hash != digest(append(line[:len(line)-1-hashMember], '}')):
			v.Reason = "hash does not match: the entry was changed"
		}
		for i, a := range anchors {
			if a.Seq == 0 && a.Hash == hash {
				anchors[i].Seq = seq
			} else if a.Seq == seq && a.Hash != hash && v.Reason == "" {
				v.Reason = "it is not the entry that " + a.From + " knows: the chain was computed anew"
			}
		}
		if v.Reason == "" {
			v.Entries, v.Hash = seq, hash
		}
	}
	for _, a := range anchors {
		if (a.Seq == 0 || a.Seq > v.Entries) && v.Reason == "" {
			v.Reason = "the entry that " + a.From + " knows is not there: the tail was cut or the chain computed anew"
		}
	}
	if v.OK = v.Reason == ""; !v.OK {
		v.Line = v.Entries + 1
		return v
	}
	v.Proves = "the entries form one chain: none was changed, inserted, removed or reordered on its own"
	v.Limits = "that the tail was not cut or all written anew: there was no head to compare with"
	for _, a := range anchors {
		v.Proves += fmt.Sprintf("; entries 1 to %d are those behind the head in %s", a.Seq, a.From)
		v.Limits = "anything against one who rewrote audit.log and state.jsonl alike (compare: --head from your phone)"
		if a.From == "--head" {
			v.Limits = "that nothing was cut off after the head given, nor that what was written is true"
			break
		}
	}
	return v
}

// verifyAudit verifies the log as it is now against the head that the state keeps and the anchors. The head is noted
// after the entry was written: the log is never behind it.
func (s *Store) verifyAudit(view *View, anchors ...Anchor) (Verdict, error) {
	if m := view.Meta["audit"]; m != nil {
		anchors = append(anchors, Anchor{m.Seq, m.Hash, "state.jsonl"})
	}
	if err := s.audit.begin(); err != nil {
		return Verdict{}, err
	}
	s.audit.end()
	return verify(io.NewSectionReader(s.audit.log.f, 0, s.audit.log.end), anchors), nil
}

// cmdAudit is `atlasbridge audit verify [--json] [--head [SEQ:]HASH]`.
func cmdAudit(c *command) int {
	return c.withState(func(o *options, s *Store, view *View) int {
		var anchors []Anchor
		if head := o.text("head"); head != "" {
			a := Anchor{Hash: head, From: "--head"}
			if seq, hash, ok := strings.Cut(head, ":sha256:"); ok {
				a.Seq, _ = strconv.ParseInt(seq, 10, 64)
				a.Hash = "sha256:" + hash
			}
			if len(a.Hash)+len(`,"hash":""}`) != hashMember || a.Seq < 1 && a.Hash != head {
				return c.usage("--head is SEQ:sha256:HEX, as the session-ended message has it")
			}
			anchors = append(anchors, a)
		}
		v, err := s.verifyAudit(view, anchors...)
		if err != nil {
			return c.fail(err)
		}
		if o.on("json") {
			c.printJSON(v)
		} else if v.OK {
			fmt.Fprintf(c.stdout, "audit.log holds: %d entries, head %d:%s\nproves: %s\ndoes not prove: %s\n",
				v.Entries, v.Entries, v.Hash, v.Proves, v.Limits)
		} else {
			fmt.Fprintf(c.stdout, "audit.log:%d: %s\n%d entries before it hold\n", v.Line, v.Reason, v.Entries)
		}
		if !v.OK {
			return exitFailed
		}
		return 0
	})
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
				c.printEntry(line[:len(line)-1], o.text("session"), o.on("json"))
			}
		}
		if f.Close(); !o.on("tail") {
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

// printEntry prints an entry of the session (the first digits of its id, "" any) as text: time, event, session,
// the other members. Whatever a terminal could obey is escaped, in JSON too.
func (c *command) printEntry(line []byte, session string, asJSON bool) {
	_, _, _, fields, err := parseEntry(line)
	if err != nil {
		fmt.Fprintln(c.stdout, c.colour("31", "damaged: "+strconv.Quote(string(line))))
		return
	}
	head, rest := map[string]string{}, ""
	for _, f := range fields {
		text := fmt.Sprint(f.Value)
		if q := strconv.Quote(text); q != `"`+text+`"` {
			text = q
		}
		if head[f.Name] = text; f.Name == "prompt_id" {
			rest += " " + shortID(text)
		} else if f.Name != "ts" && f.Name != "event" && f.Name != "session_id" {
			rest += " " + visible(f.Name) + "=" + text
		}
	}
	if !strings.HasPrefix(head["session_id"], session) {
		return
	}
	text := fmt.Sprintf("%s %-8s %s%s", strings.Replace(head["ts"][:min(19, len(head["ts"]))], "T", " ", 1),
		shortID(head["session_id"]), c.colour("1", fmt.Sprintf("%-17s", head["event"])), rest)
	if asJSON {
		text = c1.ReplaceAllStringFunc(string(line), func(s string) string {
			return fmt.Sprintf(`\u%04x`, []rune(s)[0])
		})
	}
	fmt.Fprintln(c.stdout, text)
}

// c1 are the control characters that JSON leaves as they are and some terminals obey.
var c1 = regexp.MustCompile(`[\x{80}-\x{9f}]`)
