package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// ---- detect.go: turns ----
// What an agent's turn came to is told once, with words of its own.

// agentBoxes are the rows below an agent's text as they were seen (claude 2.1.330, codex 0.169, gemini 0.61, opencode 1.18,
// qwen 0.24), what an empty box shows between « and ».
var agentBoxes = map[string]string{
	"claude": strings.Repeat("─", 100) + "\n❯\u00a0«»\n" + strings.Repeat("─", 100) +
		"\n  ⏸ manual mode on · ? for shortcuts",
	"codex": "\n› «\x1b[2mAsk Codex to do anything\x1b[m»\n\n  gpt-5.1-codex default · /w",
	"gemini": "\n\n" + strings.Repeat(" ", 84) + "? for shortcuts\n" + strings.Repeat("─", 100) +
		"\n Shift+Tab to accept edits\n" + strings.Repeat("▄", 100) +
		"\n > «  Type your message or @path/to/file»\n" + strings.Repeat("▀", 100) + "\n workspace (/directory)",
	"opencode": "\n  \x1b[38;2;92;156;245m┃\n  ┃«»\n  ┃\n  ┃  Build · Fake Fake\n  ╹\x1b[m" + strings.Repeat("▀", 95) +
		"\n   /w",
	"qwen": strings.Repeat("─", 100) + "\n> «  Type your message or @path/to/file»\n" + strings.Repeat("─", 100) +
		"\n  ➜ w · fake-model",
}

// agentScreen is a screen of the agent's with that text and draft, the cursor in its box.
func agentScreen(tool, text, draft string) string {
	before, rest, _ := strings.Cut(agentBoxes[tool], "«")
	hint, after, _ := strings.Cut(rest, "»")
	if draft != "" {
		hint = draft
	}
	above := text + "\n" + before
	row := strings.Count(above, "\n") + 1
	column := 3 + len(draft)
	switch tool {
	case "gemini":
		column++
	case "opencode":
		column += 3
	}
	screen := strings.ReplaceAll(above+hint+after, "\n", "\r\n")
	return fmt.Sprintf("\x1b[H\x1b[2J%s\x1b[%d;%dH", screen, row, column)
}

// playTurns does one step after the other, each a second before the next, with "quick" a tenth: what the tool says by the
// protocol and by its title, what somebody types, what it shows above its box, what stands in that. It returns what was
// told.
func playTurns(s *stage, tool string, steps []string) (told []string) {
	text, draft := "", ""
	for _, step := range steps {
		pause := time.Second
		if quick, ok := strings.CutPrefix(step, "quick "); ok {
			step = quick
			pause = 100 * time.Millisecond
		}
		kind, what, _ := strings.Cut(step, ":")
		output := ""
		switch kind {
		case "typed":
			s.d.Typed([]byte(what), s.now)
		case "says":
			output = "\x1b]7501;state=" + what + "\x1b\\"
		case "title":
			output = "\x1b]0;" + what + "\a"
		case "shows":
			text = what
			output = agentScreen(tool, text, draft)
		case "box":
			draft = what
			output = agentScreen(tool, text, draft)
		case "raw":
			output = what
		default:
			s.t.Fatalf("no step %q", step)
		}
		if output != "" {
			s.d.Feed([]byte(output), s.now)
		}
		for _, p := range s.wait(pause) {
			_, why, _ := strings.Cut(p.Question, " failed: ")
			told = append(told, strings.TrimSpace(string(p.Turn)+" "+why)+": "+strings.Join(strings.Fields(p.Full), " "))
		}
	}
	return told
}

// TestTurns: ready, finished, asked in words, interrupted, failed are told apart, each once and with the words of that
// turn alone, however short it was; what was no turn is not told as one.
func TestTurns(t *testing.T) {
	edge := strings.Repeat("▀", 100)
	const (
		start       = "says:idle:app=claude-code"
		works       = "says:working:app=claude-code"
		hello       = "shows:❯ hello\n\n● Hi.\n\n✻ Baked for 1s · done 4:02 PM\n"
		stopped     = "\n  ⎿ \u00a0Interrupted · What should Claude do instead?\n"
		geminiReady = "title:◇  Ready (w)"
		geminiWorks = "title:✦  Working… (w)"
		said        = "\x1b[38;2;92;156;245m┃\x1b[38;2;238;238;238m"
		wrong       = "\x1b[38;2;224;108;117m┃\x1b[38;2;128;128;128m"
		plain       = "\x1b[m"
	)
	for _, c := range []struct {
		name, tool string
		steps      []string
		want       []string
	}{
		{"claude's start", "claude", []string{"shows:Welcome", start, "says:done:app=x"}, []string{"ready: ", "finished: Welcome"}},
		{"a trust dialog before it", "claude", []string{"says:blocked:app=claude-code:kind=permission", "typed:\r",
			"says:clear", "shows:Welcome\n\n" + strings.Repeat(" ", 80) + "◐ medium · /effort", start}, []string{"ready: "}},
		{"a turn", "claude", []string{"shows:", start, "typed:hello\r", works, hello, "says:done:app=claude-code"},
			[]string{"ready: ", "finished: ● Hi."}},
		{"a turn of a tenth of a second", "claude", []string{"shows:", start, "typed:hello\r", "quick " + works, "quick " + hello,
			"says:done:app=claude-code"}, []string{"ready: ", "finished: ● Hi."}},
		{"a turn within one write", "claude", []string{"shows:", start, "typed:hello\r",
			"raw:\x1b]7501;state=working\a" + agentScreen("claude", hello[6:], "") + "\x1b]7501;state=done\a"},
			[]string{"ready: ", "finished: ● Hi."}},
		{"the second turn like the first", "claude", []string{hello, "typed:hello\r", "quick " + works,
			"quick " + hello + "\n❯ more\n\n● And so on.\n\n✻ Baked for 1s · done 4:03 PM\n", "says:done:app=claude-code"},
			[]string{"ready: ", "finished: ● And so on."}},
		{"a question in words", "claude", []string{"shows:", start, "typed:hello\r", works,
			"shows:❯ hello\n\n● Two ways.\n\n  Which one? (y/n)\n\n✻ Baked for 1s · done 4:02 PM\n", "says:done:app=claude-code"},
			[]string{"ready: ", "asks: ● Two ways. Which one? (y/n)"}},
		{"it works and shows nothing yet", "claude", []string{hello, "typed:more\r", works, "shows:❯ hello\n\n● Hi.\n",
			"quick title:◐ Claude Code"}, []string{"ready: "}},
		{"Esc", "claude", []string{"shows:", start, "typed:hello\r", works, "quick typed:\x1b",
			"shows:❯ hello\n\n● Once upon" + stopped, "says:idle:app=claude-code"}, []string{"ready: ", "interrupted: ● Once upon"}},
		{"Esc before an answer: the message is back in the box", "claude", []string{"shows:", start, "typed:hello\r", works, hello,
			"says:done:app=claude-code", "typed:more\r", works, "quick typed:\x1b", "box:more", "says:idle:app=claude-code"},
			[]string{"ready: ", "finished: ● Hi.", "interrupted: "}},
		{"No at a dialog", "claude", []string{"shows:", start, "typed:hello\r", works, "says:blocked:app=x:kind=permission",
			"quick typed:4", "shows:❯ hello\n\n● I will." + stopped + "ctrl+y to paste deleted text", "says:idle:app=x"},
			[]string{"ready: ", "interrupted: ● I will."}},
		{"a command of its own", "claude", []string{"shows:", start, "typed:/context\r", works,
			"shows:❯ /context\n\n  96 % free", "says:idle:app=claude-code"}, []string{"ready: ", "finished: 96 % free"}},
		{"help and out again", "claude", []string{hello, start, "typed:/help\r", "raw:\x1b[H\x1b[2JHelp", "typed:\x1b", hello},
			[]string{"ready: ", "ready: "}},
		{"no credit, a hint in the box", "claude", []string{"shows:", start, "typed:hello\r", works,
			"quick raw:" + strings.Replace(agentScreen("claude", "❯ hello\n  ⎿ \u00a0Credit balance too low · Add funds", ""),
				"❯\u00a0", "❯\u00a0\x1b[7mO\x1b[;2mnce fixed, resend\x1b[m", 1),
			"says:error:app=claude-code:msg=Q3JlZGl0IGJhbGFuY2UgaXMgdG9vIGxvdw=="},
			[]string{"ready: ", "failed Credit balance is too low: "}},
		{"a wrong key, and what is typed then", "claude", []string{"shows:", start, "typed:hello\r", works,
			"quick shows:❯ hello\n  ⎿ \u00a0Invalid API key · Fix external API key",
			"says:blocked:app=claude-code:kind=auth:msg=SW52YWxpZCBBUEkga2V5", "typed:m", "box:more", "raw:", "raw:", "raw:"},
			[]string{"ready: ", "failed Invalid API key: "}},
		{"an error of a claude without the protocol", "claude", []string{"shows:", "title:✳ Claude Code", "typed:hello\r",
			"title:◐ Claude Code", "shows:❯ hello\n\n● API Error: Repeated 529 Overloaded", "title:✳ Claude Code"},
			[]string{"ready: ", "failed API Error: Repeated 529 Overloaded: "}},
		{"an error while it goes on trying", "claude", []string{"shows:", start, "typed:hello\r", works,
			"shows:❯ hello\n\n✻ 529 Overloaded · retrying in 5s · attempt 6/10", "raw:"}, []string{"ready: "}},

		{"codex works a moment at its start", "codex", []string{"shows:", "says:idle:app=codex", "quick says:working:app=codex",
			"quick title:⠋ w", "quick title:w", "says:idle:app=codex"}, []string{"ready: "}},
		{"codex, a turn", "codex", []string{"shows:", "says:idle:app=codex", "typed:\r", "says:working:app=codex",
			"shows:› hello\n\n• Hi.\n  └ Tip: Use /copy\n\n  Worked for <1s • 16:03\n", "says:done:app=codex"},
			[]string{"ready: ", "finished: • Hi."}},
		{"codex, Esc", "codex", []string{"shows:", "says:idle:app=codex", "typed:\r", "says:working:app=codex", "quick typed:\x1b",
			"shows:› hello\n\n• Hi.\n\n■ Conversation interrupted - use /feedback\n", "says:idle:app=codex"},
			[]string{"ready: ", "interrupted: • Hi."}},
		{"codex, 401", "codex", []string{"shows:", "says:idle:app=codex", "typed:\r", "says:working:app=codex",
			"shows:› hello\n\n\n■ unexpected status 401 Unauthorized: Incorrect API key\nprovided: sk-x\n", "says:error:app=codex"},
			[]string{"ready: ", "failed unexpected status 401 Unauthorized: Incorrect API key provided: sk-x: "}},

		{"gemini, turns between two looks", "gemini", []string{geminiReady, "shows:", "typed:\r", "quick " + geminiWorks,
			"quick shows: > hello\n" + edge + "\n✦ Hi.\n", geminiReady,
			"typed:\r", "raw:\x1b]0;✦  Working… (w)\a" + agentScreen("gemini", " > hello\n"+edge+"\n✦ Hi.\n\n > more\n"+edge+
				"\n✦ Ho.\n", "") + "\x1b]0;◇  Ready (w)\a"}, []string{"ready: ", "finished: ✦ Hi.", "finished: ✦ Ho."}},
		{"gemini, Esc", "gemini", []string{geminiReady, "shows:", "typed:\r", geminiWorks, "quick typed:\x1b",
			"shows: > hello\n" + edge + "\n✦ Once\n\nℹ Request cancelled.\n", geminiReady}, []string{"ready: ", "interrupted: ✦ Once"}},
		{"gemini, 401", "gemini", []string{geminiReady, "shows:", "typed:\r", geminiWorks, "shows: > hello\n" + edge +
			"\n✕ [API Error: {\"error\":{\"code\":401,\"message\":\"Incorrect\n  key\"}}]\n\nℹ This request failed. Press F12 or\n  run it\n",
			geminiReady}, []string{"ready: ", `failed [API Error: {"error":{"code":401,"message":"Incorrect key"}}]: `}},

		{"gemini, a file that it shows says that it is done", "gemini", []string{geminiReady, "shows:", "typed:\r", geminiWorks,
			"says:done:app=x", "shows: > hello\n" + edge + "\n✦ Hi.\n", geminiReady}, []string{"ready: ", "finished: ✦ Hi."}},

		{"opencode, a turn that no look has seen", "opencode", []string{"shows:", "typed:\r", "shows:  " + said + "  hello" + plain +
			"\n\n     Hi.\n\n     ▣  Build · Fake · 257ms\n"}, []string{"ready: ", "finished: Hi."}},
		{"opencode, Esc", "opencode", []string{"shows:", "typed:\r", "shows:  " + said + "  hello" + plain +
			"\n\n     Once\n\n     ▣  Build · Fake · interrupted\n"}, []string{"ready: ", "interrupted: Once"}},
		{"opencode, 401", "opencode", []string{"shows:", "typed:\r", "shows:  " + said + "  hello" + plain + "\n\n  " + wrong + "\n  " +
			wrong + "  Incorrect API key" + plain + "\n\n     ▣  Build · Fake\n"}, []string{"ready: ", "failed Incorrect API key: "}},
		{"opencode, No at a dialog", "opencode", []string{"shows:", "typed:\r", "shows:  " + said + "  hello" + plain +
			"\n\n     $ touch x\n\n     ▣  Build · Fake\n"}, []string{"ready: ", "finished: $ touch x"}},
		{"opencode tries again", "opencode", []string{"shows:", "typed:\r", "raw:" + strings.Replace(agentScreen("opencode",
			"  "+said+"  hello"+plain+"\n\n     ▣  Build · Fake\n", ""), "   /w", "  ■■⬝Quota exceeded [retrying in 8s", 1), "raw:"},
			[]string{"ready: "}},

		{"qwen, a turn", "qwen", []string{"title:Qwen - w", "shows:", "typed:\r", "title:◐︎ Qwen - w",
			"shows:  > hello\n\n  ◆︎ Hi.\n", "title:Qwen - w"}, []string{"ready: ", "finished: Hi."}},
		{"qwen, Esc: it says so late, and the message is back", "qwen", []string{"title:Qwen - w", "shows:", "typed:\r",
			"title:◐︎ Qwen - w", "quick typed:\x1b", "quick title:Qwen - w", "box:hello",
			"shows:  > hello\n\n  ◆︎ Hi.\n  ●︎ Request cancelled.\n"}, []string{"ready: ", "interrupted: "}},
		{"qwen, 401", "qwen", []string{"title:Qwen - w", "shows:", "typed:\r", "title:◐︎ Qwen - w",
			"shows:  > hello\n  ✕ [API Error: 401 Incorrect API key] (Press Ctrl+Y to retry)\n", "title:Qwen - w"},
			[]string{"ready: ", "failed [API Error: 401 Incorrect API key]: "}},
	} {
		t.Run(c.name, func(t *testing.T) {
			told := playTurns(newStage(t, c.tool, ""), c.tool, c.steps)
			if !slices.Equal(told, c.want) {
				t.Errorf("it tells %q, want %q", told, c.want)
			}
		})
	}
}

// TestBlinkingDialogThatIsNotShown: a dialog that the tool reports and no reader knows is asked although a mark blinks.
func TestBlinkingDialogThatIsNotShown(t *testing.T) {
	s := newStage(t, "claude", "reading raw noecho")
	told := s.show(agentScreen("claude", "● I will.", "")+"\x1b[H\x1b[JAuto mode can't check actions\r\n\r\n● Doing it\r\n"+
		"\x1b]7501;state=blocked:app=claude-code:msg=ZGlhbG9nIG9wZW4=\a", 0)
	for i := range 8 {
		told = append(told, s.show([]string{"\x1b[3;1H ", "\x1b[3;1H●"}[i%2], 600*time.Millisecond)...)
	}
	if len(told) != 1 || told[0].Question != "dialog open" {
		t.Errorf("%+v", told)
	}
}

// TestReadyIsNews: that a tool is ready is told once, of one whose box comes long after its start; ends of turns always.
func TestReadyIsNews(t *testing.T) {
	for _, c := range []struct {
		tool   string
		notify bool
		turns  []TurnState
		want   []bool
	}{
		{"claude", true, []TurnState{TurnReady, TurnFinished, TurnReady}, []bool{false, true, false}},
		{"codex", true, []TurnState{TurnReady, TurnReady, TurnFailed}, []bool{true, false, true}},
		{"codex", true, []TurnState{TurnInterrupted, TurnReady}, []bool{true, false}},
		{"codex", false, []TurnState{TurnReady, TurnAsks}, []bool{false, false}},
		{"generic", true, []TurnState{"", ""}, []bool{true, true}},
	} {
		s := &session{adapter: adapterFor(c.tool), cfg: &Config{NotifyIdle: c.notify}}
		var told []bool
		for _, turn := range c.turns {
			told = append(told, s.tellsIdle(&Prompt{Idle: true, Turn: turn}))
		}
		if !slices.Equal(told, c.want) {
			t.Errorf("%s, notify_idle %v: %q is told %v, want %v", c.tool, c.notify, c.turns, told, c.want)
		}
	}
}

// TestAnswerOfItsTurn: what the Stop hook gave is shown for the turn that it ended, not for a later one nor for one that
// was broken off.
func TestAnswerOfItsTurn(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		turn  TurnState
		since time.Time
		want  string
	}{
		{TurnFinished, now.Add(-time.Second), "The answer"},
		{TurnAsks, time.Time{}, "The answer"},
		{TurnFinished, now.Add(time.Second), "on the screen"},
		{TurnInterrupted, now.Add(-time.Second), "on the screen"},
		{TurnFailed, now.Add(-time.Second), "on the screen"},
	} {
		s, _, _ := hookBench(t)
		s.answer, s.answeredAt = "The answer", now
		p := &Prompt{Type: FreeText, Idle: true, Turn: c.turn, since: c.since, Full: "on the screen"}
		q := &question{screen: p}
		s.q = q
		if !s.create(q) || q.rec.Full != c.want {
			t.Errorf("%s: %q, want %q", c.turn, q.rec.Full, c.want)
		}
	}
}

// TestTurnHeadlines: a message tells what the turn came to, and, when the tool works again, what it had come to.
func TestTurnHeadlines(t *testing.T) {
	for _, c := range []struct {
		turn       TurnState
		open, over string
	}{
		{TurnReady, "💤 claude is ready and waits for your next message", "claude was ready"},
		{TurnFinished, "✅ claude has finished", "claude had finished"},
		{TurnAsks, "💬 claude asks", "claude had asked"},
		{TurnInterrupted, "⏹ claude was interrupted", "⏹ claude was interrupted"},
		{TurnFailed, "⚠️ claude failed: API Error: 529", "⚠️ claude failed: API Error: 529"},
		{"", "💤 claude waits for your next message", "claude waited"},
	} {
		p := &PromptRecord{Prompt: Prompt{Idle: true, Turn: c.turn, Question: turnSentence("claude", c.turn, "API Error: 529")}}
		p.Status = AwaitingReply
		if got := turnHeadline(p, "claude"); got != c.open {
			t.Errorf("%q, want %q", got, c.open)
		}
		p.Status = Canceled
		if got := turnHeadline(p, "claude"); got != c.over {
			t.Errorf("%q, want %q", got, c.over)
		}
	}
}
