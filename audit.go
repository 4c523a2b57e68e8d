// audit.go keeps audit.log: who asked, who answered, what was typed, in a chain that shows tampering. One entry is one
// line, a flat JSON object of strings, booleans, null and integers within ±(2^53−1), as jq -c prints it:
//
//	{"seq":1,"ts":"…Z","event":"…","session_id":"…","prompt_id":"…", …,"prev_hash":"genesis","hash":"sha256:…"}
//
// The hash is that of the line without its hash member: jq -cj 'del(.hash)' | sha256sum. The heads that state and phone
// keep show that no tail was cut, nor all written anew. The chain goes on behind the head that the state notes,
// whatever the file ends with: what is missing in between no later entry can close, and verify finds it for ever. A log
// that the user moved away is followed by one whose first entry has the next number, and the hash of the last.
// shown_sha256 is that of what a person was shown, screen_sha256 that of what stood there when the answer was typed.
// Answers typed as text are in it as length and SHA-256.
//
// Nothing here locks or writes the log: store.go does, under the lock of the state. At the end stands what may leave
// the machine, debug bundle.
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
	"slices"
	"strings"
	"time"
)

const (
	stampLayout = "2006-01-02T15:04:05.000000Z"
	fileStamp   = "20060102T150405.000000" // in names of files
	genesis     = "genesis"                // prev_hash of the first entry

	maxExact     = 1<<53 - 1 // jq 1.6 changes larger integers
	maxAuditText = 4096      // bytes of a value
	maxEntry     = 1 << 16   // bytes of a line
)

// ---- the chain ----
// Where it goes on, and what follows.

// chainHead is how far a chain goes: number and hash of its last entry, the zero value without one.
type chainHead struct {
	Seq  int64  `json:"seq"`
	Hash string `json:"hash"`
}

func (h chainHead) String() string { return fmt.Sprintf("%d:%s", h.Seq, h.Hash) }

// isIn reports whether the last entry is among these lines, or there is none.
func (h chainHead) isIn(lines []byte) bool {
	return h.Seq == 0 || bytes.Contains(lines, fmt.Appendf(nil, `,"hash":"%s"}`, h.Hash))
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

// goOn returns behind which entry a log goes on that ends with tail: behind its last. A log that lacks the entry that
// the state notes goes on behind that one, so that what is missing between them is missing for ever. Of the entries
// that the state has, the last of the chain, those that the log lacks are returned, too: they come first.
func goOn(tail []byte, noted chainHead, entries []json.RawMessage) (chainHead, []json.RawMessage) {
	if !noted.isIn(tail) {
		there := func(entry json.RawMessage) bool { return bytes.Contains(tail, entry) }
		for len(entries) > 0 && slices.ContainsFunc(entries, there) {
			entries = entries[1:]
		}
		return noted, entries
	}
	lines := bytes.SplitAfter(tail, []byte("\n"))
	fields, err := parseEntry(lines[max(0, len(lines)-2)])
	if err != nil { // there is none, or verify will find it
		return noted, nil
	}
	seq, _ := fields[0].Value.(int64)
	hash, _ := fields[len(fields)-1].Value.(string)
	return chainHead{seq, hash}, nil
}

// chain makes entries of the events, behind the entry last, and gives the last of them. An event that cannot be written
// as it is says so instead.
func chain(last chainHead, events []Event) (entries []json.RawMessage, _ chainHead) {
	for _, e := range events {
		entry, head, err := e.behind(last)
		if err != nil {
			e = Event{Name: e.Name, Fields: []Field{{"lacks", err.Error()}}}
			entry, head, _ = e.behind(last) // of ours alone, which can be written
		}
		entries = append(entries, entry)
		last = head
	}
	return entries, last
}

// behind is the event's entry behind the entry last. Ids that are not known are left out, texts redacted and bounded.
func (e Event) behind(last chainHead) (entry []byte, head chainHead, err error) {
	if last.Seq == 0 {
		last.Hash = genesis
	}
	head.Seq = last.Seq + 1
	fields := []Field{
		{"seq", head.Seq},
		{"ts", time.Now().UTC().Format(stampLayout)},
		{"event", e.Name},
		{"session_id", e.SessionID},
		{"prompt_id", e.PromptID},
	}
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
	entry = canonical(append(fields, Field{"hash", head.Hash}))
	if _, err := parseEntry(append(entry, '\n')); err != nil {
		return nil, chainHead{}, fmt.Errorf("the entry %s: %w", e.Name, err)
	}
	return entry, head, nil
}

// lined is the lines of entries.
func lined(entries []json.RawMessage) (lines []byte) {
	for _, e := range entries {
		lines = append(append(lines, e...), '\n')
	}
	return lines
}

// asJQ turns what encoding/json writes into what jq 1.6 to 1.8 print. What follows an escaped backslash is text.
var asJQ = strings.NewReplacer(`\\`, `\\`, `\u2028`, "\u2028", `\u2029`, "\u2029", `\ufffd`, "\ufffd", "\x7f", `\u007f`)

// canonical is the object with these members as jq -c prints it.
func canonical(fields []Field) []byte {
	var members []string
	for _, f := range fields {
		members = append(members, strings.Trim(inJSON(map[string]any{f.Name: f.Value}), "{}"))
	}
	return []byte(asJQ.Replace("{" + strings.Join(members, ",") + "}"))
}

// digest is the hash of an entry without its hash, or of a text.
func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// hidden is the members that stand for a text.
func hidden(name, s string) []Field {
	return []Field{{name + "_len", len(s)}, {name + "_sha256", digest([]byte(s))}}
}

// said is a member that is left out where there is nothing to say.
func said(name, text string) []Field {
	if text == "" {
		return nil
	}
	return []Field{{name, text}}
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

// ---- verify ----
// What the log proves, and what it does not.

// Verdict is what a verification found: what audit verify --json prints.
type Verdict struct {
	OK        bool   `json:"ok"`
	Entries   int64  `json:"entries"` // that form one chain, from the first on
	Behind    string `json:"behind"`  // the entry that the first one follows, as SEQ:HASH; "" it is the very first
	chainHead        // the last of them
	Line      int64  `json:"line"` // the first bad one, 0 none
	Reason    string `json:"reason"`
	Remedy    string `json:"remedy"`
	Noted     string `json:"noted"` // the last entry that the state knows, as SEQ:HASH; "" none
	Limits    string `json:"does_not_prove"`

	begins int64 // behind which entry the log may begin, −1 any
}

// fault notes what is wrong with a line; only the first line that has something wrong is named.
func (v *Verdict) fault(line int64, why string) {
	if v.Reason == "" {
		v.Line = line
		v.Reason = why
	}
}

// verify recomputes the chain up to the first line that does not hold, looks for the noted entry in it, and compares
// what was shown with what stood there when the answer was typed. Of those it names the first. The log may begin behind
// the entry of that number, −1: of any, as where none is noted. An error is one of reading.
func verify(log io.Reader, noted chainHead, begins int64) (Verdict, error) {
	v := Verdict{begins: -1, chainHead: chainHead{Hash: genesis}}
	found := noted.Seq == 0
	if !found {
		v.Noted = noted.String()
		v.begins = begins
	}
	asked := questions{}
	err := eachLine(log, func(line []byte) (more bool) {
		fields, why := v.next(line)
		if why != "" {
			v.fault(v.Entries+1, why)
			return false
		}
		found = found || v.chainHead == noted
		if why := asked.judge(fields, v.Behind == ""); why != "" {
			v.fault(v.Entries, why)
		}
		return true
	})
	if err != nil {
		return Verdict{}, err
	}
	if !found && v.Behind != v.Noted {
		line := max(1, min(noted.Seq-v.Seq+v.Entries, v.Entries+1))
		v.fault(line, "the entry "+v.Noted+" is known but not there: the tail was cut or the chain computed anew")
	}
	v.conclude()
	return v, nil
}

// eachLine gives do the lines of r, with their newlines, until it wants no more. The last one may have none.
func eachLine(r io.Reader, do func(line []byte) (more bool)) error {
	in := bufio.NewReader(r)
	for {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 && !do(line) || err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// next checks one more line of the chain and counts it, or says why it does not hold. The first of a log may follow an
// entry in another log.
func (v *Verdict) next(line []byte) (fields []Field, why string) {
	fields, err := parseEntry(line)
	if err != nil {
		return nil, err.Error()
	}
	last := len(fields) - 1
	seq, _ := fields[0].Value.(int64)
	prev, _ := fields[last-1].Value.(string)
	if v.Entries == 0 && seq > 1 && (v.begins < 0 || seq <= v.begins+1) {
		v.chainHead = chainHead{seq - 1, prev}
		v.Behind = v.String()
	}
	if seq != v.Seq+1 {
		return nil, fmt.Sprintf("seq is %d, not %d: entries removed, inserted or reordered", seq, v.Seq+1)
	}
	hash := digest(canonical(fields[:last]))
	if prev != v.Hash || fields[last].Value != hash {
		return nil, "a hash does not match: this entry was changed, or the one before"
	}
	v.Entries++
	v.chainHead = chainHead{seq, hash}
	return fields, ""
}

// conclude says what the verdict does not prove, or what to do.
func (v *Verdict) conclude() {
	v.OK = v.Reason == ""
	if !v.OK {
		v.Remedy = "keep a copy; what a crash kept out is added with the next entry; else move audit.log away, " +
			"and a new one begins"
		return
	}
	v.Limits = "that nobody rewrote state.jsonl as well: for that, compare the head with the one on your phone"
	if v.Noted == "" {
		v.Limits = "that the end was not cut off, or all of it rewritten: state.jsonl knows no entry"
	}
	if v.Noted != "" && v.String() != v.Noted { // a state that was put back from a copy knows less
		v.Limits += "; nor who wrote what is behind " + v.Noted + ", which state.jsonl does not know"
	}
	if v.Behind != "" {
		v.Limits += "; nor anything about the entries up to " + v.Behind + ", which are in the log before"
	}
}

// questions is what was shown of each question that can still be answered, by its id.
type questions map[string]shownTo

// shownTo is what was shown, by its hash, and by which session.
type shownTo struct {
	session string
	sha     string
}

// judge takes one more entry, and says what is wrong though the chain holds: that the log is not the one it was, or
// that an answer was typed at something else than was shown. A question is forgotten when it or its session is over.
// whole reports whether the log has all entries before, too.
func (q questions) judge(fields []Field, whole bool) (why string) {
	member := map[string]string{}
	for _, f := range fields {
		if text, ok := f.Value.(string); ok {
			member[f.Name] = text
		}
	}
	prompt, session := member["prompt_id"], member["session_id"]
	switch member["event"] {
	case "PROMPT_RESOLVED", "PROMPT_CANCELED", "PROMPT_FAILED":
		// PROMPT_EXPIRED is not among them: its default may still be typed
		delete(q, prompt)
	case "SESSION_END":
		maps.DeleteFunc(q, func(_ string, s shownTo) bool { return s.session == session })
	}
	if sha := member["shown_sha256"]; sha != "" {
		q[prompt] = shownTo{session, sha}
	}
	screen := member["screen_sha256"]
	shown := q[prompt].sha
	if screen == "" || screen == shown || shown == "" && !whole {
		return ""
	}
	why = "an answer was typed at something else than was shown (prompt " + prompt + ")"
	if shown == "" {
		why += ": no entry before says what was shown"
	}
	return why
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
	path := c.flags["output"]
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
		return c.fail(hintedf("choose another file with --output", "writing the bundle: %w", err))
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
	about := map[string]any{
		"version":      version(),
		"config":       cfg.inForce,
		"config_error": problem,
	}
	err := b.add("about.json", []byte(inJSON(about)), true)
	if err != nil {
		return err
	}
	for _, name := range bundled {
		text, err := os.ReadFile(filepath.Join(cfg.Dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			c.complain("left out: " + err.Error())
			continue
		}
		if err := b.add(name, text, c.on("full")); err != nil {
			return err
		}
	}
	return errors.Join(b.tar.Close(), zip.Close())
}

// add puts the lines of the text into the archive, less what is withheld, if that leaves anything.
func (b *bundle) add(name string, text []byte, full bool) error {
	var kept bytes.Buffer // the archive has the length before the text
	for line := range bytes.Lines(text) {
		safe := redact(string(withhold(line, full)))
		if b.token != "" {
			safe = strings.ReplaceAll(safe, b.token, "[token]")
		}
		kept.WriteString(safe)
	}
	if kept.Len() == 0 {
		return nil
	}
	fmt.Fprintf(b, "%9d  %s\n", kept.Len(), name)
	err := b.tar.WriteHeader(&tar.Header{
		Name:    "atlasbridge/" + name,
		Mode:    0o600,
		Size:    int64(kept.Len()),
		ModTime: time.Now(),
	})
	if err == nil {
		_, err = kept.WriteTo(b.tar)
	}
	return err
}

// withhold takes every text that is not known to be harmless out of a line of JSON, so that a member added later is not
// shown by mistake; with full, nonces only. Of a damaged line nothing is left.
func withhold(line []byte, full bool) []byte {
	var record map[string]json.RawMessage
	if err := json.Unmarshal(line, &record); err != nil {
		record = nil
	}
	if full && record["nonce"] == nil && record != nil { // the bytes of the audit log are hashed
		return line
	}
	maps.DeleteFunc(record, func(name string, value json.RawMessage) bool {
		telling := strings.ContainsAny(string(value[:1]), `"[{`) && !slices.Contains(harmless, name)
		return name == "nonce" || telling && !full
	})
	text, _ := json.Marshal(record) // cannot fail: the values were read as JSON
	return append(text, '\n')
}
