package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"time"
)

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
