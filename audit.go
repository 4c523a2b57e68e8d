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
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	stampLayout  = "2006-01-02T15:04:05.000000Z" // of UTC times, RFC 3339
	fileStamp    = "20060102T150405.000000"      // in names of files kept aside
	genesis      = "genesis"                     // prev_hash of the first entry
	maxExact     = 1<<53 - 1                     // largest integer that jq 1.6 prints unchanged (measured)
	maxAuditText = 4096                          // bytes of one value
	maxEntry     = 1 << 18                       // bytes of one line: at most 10 values, each byte may become \u00xx
)

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
// the file each time, for another process may have written it.
func (a *Audit) commit(events ...Event) error {
	seq, hash, err := a.last()
	var out []byte
	for i := 0; i < len(events) && err == nil; i++ {
		seq++
		fields := append(events[i].fields(seq), Field{"prev_hash", hash})
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

// fields are the members of the event's entry, before those of the chain.
func (e Event) fields(seq int64) (out []Field) {
	all := []Field{{"seq", seq}, {"ts", time.Now().UTC().Format(stampLayout)}, {"event", e.Name},
		{"session_id", e.SessionID}, {"prompt_id", e.PromptID}}
	for _, f := range append(all, e.Fields...) {
		if text, ok := f.Value.(string); ok && !strings.HasSuffix(f.Name, "_sha256") {
			f.Value = clip(redact(text), maxAuditText)
		}
		if f.Value != "" || !strings.HasSuffix(f.Name, "_id") {
			out = append(out, f)
		}
	}
	return out
}

// last reads the last entry. Bytes after the last newline are a write that a crash cut short: nobody was told
// that it succeeded, and they are moved aside.
func (a *Audit) last() (seq int64, hash string, err error) {
	tail := make([]byte, min(a.log.end, maxEntry))
	_, err = a.log.f.ReadAt(tail, a.log.end-int64(len(tail)))
	end := bytes.LastIndexByte(tail, '\n')
	if torn := len(tail) - end - 1; err == nil && 0 < torn && torn < maxEntry {
		err = a.log.cut(a.log.end - int64(torn))
	}
	if err != nil || end < 0 && len(tail) < maxEntry {
		return 0, genesis, err
	}
	whole := tail[:max(end, 0)]
	e, err := parseEntry(whole[bytes.LastIndexByte(whole, '\n')+1:])
	if err != nil {
		err = fmt.Errorf("its last line is damaged (%w): see atlasbridge audit verify, then move it away", err)
	}
	return e.seq, e.hash, err
}

// digest is the hash of a line without its hash member, or of a text.
func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// likeJQ turns what encoding/json writes into what jq 1.6 to 1.8 print (TestAuditEveryCodePoint); invalid UTF-8 becomes
// U+FFFD. An escaped backslash comes first, for what follows it is text.
var likeJQ = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029", `\ufffd`, "\ufffd",
	"\x7f", `\u007f`)

// jq is a string, boolean, null or integer as jq -c prints it.
func jq(v any) string {
	text, _ := marshal(v) // what has no JSON is no entry either: see parseEntry
	return likeJQ.Replace(string(text))
}

// canonical is the object with these members as jq -c prints it.
func canonical(fields []Field) []byte {
	members := make([]string, len(fields))
	for i, f := range fields {
		members[i] = jq(f.Name) + ":" + jq(f.Value)
	}
	return []byte("{" + strings.Join(members, ",") + "}")
}

// entry is a line as it was read; fields are all its members.
type entry struct {
	seq        int64
	prev, hash string
	fields     []Field
}

// parseEntry accepts exactly what jq -c prints for an entry: a member twice, a float, a large integer is left out, so
// that what canonical makes of the others is not the line.
func parseEntry(line []byte) (e entry, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	for t, bad := d.Token(); bad == nil && t == json.Delim('{') && d.More(); {
		var value json.Token
		name, _ := d.Token()
		value, bad = d.Token()
		number, isNumber := value.(json.Number)
		n, _ := number.Int64()
		if isNumber {
			value = n
		}
		twice := slices.ContainsFunc(e.fields, func(f Field) bool { return f.Name == name })
		if !twice && n == max(-maxExact, min(n, maxExact)) {
			e.fields = append(e.fields, Field{fmt.Sprint(name), value})
		}
	}
	n := len(e.fields) - 2
	if !bytes.Equal(canonical(e.fields), line) {
		return entry{}, errors.New("its bytes are not what jq -c prints for an entry")
	} else if n < 1 || e.fields[0].Name != "seq" || e.fields[n].Name != "prev_hash" || e.fields[n+1].Name != "hash" {
		return entry{}, errors.New("seq, prev_hash or hash is not in its place")
	}
	e.seq, _ = e.fields[0].Value.(int64)
	e.prev, _ = e.fields[n].Value.(string)
	e.hash, _ = e.fields[n+1].Value.(string)
	return e, nil
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
	if !ok || was != nil && was.Status == p.Status || promptEvents[p.Status] == "" {
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
	case !answered || p.Value == nil:
	case p.offered(*p.Value) || p.SafeDefault != nil && *p.Value == *p.SafeDefault:
		fields = []Field{{"value", *p.Value}}
	default:
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
	return []Event{{promptEvents[p.Status], p.SessionID, p.ID, fields}}
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
		e, bad := parseEntry(text)
		switch v.Line = v.Entries + 1; {
		case !whole:
			v.Reason = "the line is not complete: a write or the file was cut short"
		case bad != nil:
			v.Reason = bad.Error()
		case e.seq != v.Line:
			v.Reason = fmt.Sprintf("seq is %d, not %d: entries removed, inserted or reordered", e.seq, v.Line)
		case e.prev != v.Hash:
			v.Reason = "prev_hash is not the hash of the entry before"
		case e.hash != digest(canonical(e.fields[:len(e.fields)-1])):
			v.Reason = "hash does not match: the entry was changed"
		default:
			v.Entries, v.Hash = e.seq, e.hash
			missing = slices.DeleteFunc(missing, func(h string) bool { return h == fmt.Sprintf("%d:%s", e.seq, e.hash) })
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
	if err := s.audit.begin(); err != nil {
		return Verdict{}, err
	}
	defer s.audit.end()
	log := make([]byte, s.audit.log.end)
	_, err := s.audit.log.f.ReadAt(log, 0)
	return verify(log, heads...), err
}

// headShape is a head as the session-ended message has it, or none.
var headShape = regexp.MustCompile(`^([1-9][0-9]{0,15}:sha256:[0-9a-f]{64})?$`)

func cmdAudit(c *command) int {
	return c.withState(func(s *Store) int {
		head := strings.Replace(c.opts.text("head"), " ", ":", 1)
		if !headShape.MatchString(head) {
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
	dir, err := stateDir(c.getenv)
	if err != nil {
		return c.fail(err)
	}
	for at := int64(0); ; {
		f, err := os.Open(filepath.Join(dir, "audit.log"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return c.fail(err)
		}
		added, _ := io.ReadAll(io.NewSectionReader(f, at, 1<<62)) // nothing while there is no file
		f.Close()
		for line := range bytes.Lines(added[:bytes.LastIndexByte(added, '\n')+1]) {
			at += int64(len(line))
			c.printEntry(line[:len(line)-1])
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
}

// printEntry prints an entry of the wanted session as text: time, session, event, the other members. Whatever a
// terminal could obey is escaped, in JSON too.
func (c *command) printEntry(line []byte) {
	e, err := parseEntry(line)
	if err != nil {
		fmt.Fprintln(c.stdout, c.colour("31", "damaged: "+strconv.Quote(string(line))))
		return
	}
	shown, rest, inHead := map[string]string{}, "", strings.Fields("seq ts event session_id prompt_id prev_hash hash")
	for _, f := range e.fields {
		text := strings.Trim(strconv.Quote(fmt.Sprint(f.Value)), `"`)
		if shown[f.Name] = text; !slices.Contains(inHead, f.Name) {
			rest += fmt.Sprintf(" %s=%s", visible(f.Name), text)
		}
	}
	text := fmt.Sprintf("%.19s %-8s %s %s%s", shown["ts"], shortID(shown["session_id"]),
		c.colour("1", fmt.Sprintf("%-17s", shown["event"])), shortID(shown["prompt_id"]), rest)
	if c.opts.on("json") {
		text = c1.ReplaceAllStringFunc(string(line), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
	}
	if strings.HasPrefix(shown["session_id"], c.opts.text("session")) {
		fmt.Fprintln(c.stdout, text)
	}
}

// c1 are the control characters that JSON leaves as they are and some terminals obey.
var c1 = regexp.MustCompile(`[\x{80}-\x{9f}]`)
