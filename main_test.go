// main_test.go holds the program to its promises, from outside: command lines, terminals, the Bot API, files, hooks, the lab.
// What the tests may name of the program stands in testdata/seam.txt; which guard which test misses in testdata/mutants.txt.
// Most cases are rows in testdata, played by one runner each; the runner's comment says how they are written:
//
//	command line, settings, README   testdata/cli/*.txt ask.txt refusals.txt toml.txt
//	screen, transcript, safe text    screens.txt transcript.txt redact.txt
//	detector, recordings, lab        tapes/*.txt lines.txt pictures.txt floods.txt mutes.txt examples.txt scenarios/ recordings/
//	terminal, files, Windows         terminal.txt reading.txt wine.txt
//	sessions                         scenes/*.txt typed.txt waiting.txt hungup.txt
//	hooks, ask, requests in trouble  hooks.txt dialogs.txt asks.txt requests.txt
//	programs that ask                programs.txt again.txt leftout.txt above.txt moving.txt unseen.txt
//	what the phone shows             pages.txt markdown.txt
//	what the phone sends, pacing     phone.txt updates.txt troubles.txt topics.txt pace.txt
//	state and audit log              answers.txt transitions.txt retention.txt tamper.txt shown.txt
//	simulation                       whole command lines in virtual time, against models of all around them
//	bench                            stand-ins for claude, a tool and the Bot API (botapi.txt); homes, terminals, readers of files
//	the suite itself                 seam.txt mutants.txt
//
// Environment: ATLASBRIDGE_SHARED names the folder of the shared recordings; ATLASBRIDGE_LONG=1 and ATLASBRIDGE_TEST_ROUNDS
// make what races run for longer; ATLASBRIDGE_TEST_SEEDS and ATLASBRIDGE_TEST_SEED choose what the simulation plays, which
// says its seed where it fails; ATLASBRIDGE_MUTANTS=all, or names, takes guards out of the program and runs their tests.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// ---- main.go: command line ----
// What a shell sees: arguments, exit codes, help and tables.

// TestScripts: a shell and a person at a terminal see what the scripts in testdata/cli say.
func TestScripts(t *testing.T) {
	needUnix(t)
	t.Parallel()
	for _, file := range inFolder("testdata/cli", "*.txt") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			for _, b := range blocks(t, "cli/"+filepath.Base(file)) {
				t.Run(b.name, func(t *testing.T) { newScene(t, b.at).plays(b.parts[""]) })
			}
		})
	}
}

// scene is where a script of testdata/cli is played: a folder of its own, DIR, with the state folder DIR/state, where
// $HOME is and `atlasbridge` is this program. These words stand for what is there when their line is played: DIR; URL and
// TOKEN of the bot; ID and SID, the first digits of the question that was last asked and its session; LINK and CODE, as
// setup shows them. In what is to be printed "…" stands for any characters, and a line of it alone for any lines.
//
//	| line          belongs to the line above
//	file NAME       makes a private file of the lines below it; executable in bin
//	bot             starts a Bot API, and makes a config.toml of the lines below and what reaches it; where "bare", none
//	always METHOD … it answers that method so from now on: an error code and words, or a result as JSON
//	once METHOD …   it answers the next such call so; well: no call is refused any more
//	phone ID TEXT   user ID writes that to the bot
//	tap LABEL       user 1001 taps a button of the message that has one
//	shown WORDS     waits until the phone shows them
//	calls N METHOD  it has been called so often; asks METHOD JSON: and so; sent N WORDS: so many messages had these words
//	$ LINE          a shell runs the line to its end; below it, what is to come: exit N (0), > standard output, ! standard error
//	% LINE          a terminal runs the line; sees WORDS (or lacks), types KEYS (Go's escapes) and ends N are about the last one,
//	                as are signal NAME and stop, which waits until it is stopped and holds no lock
//	asked WORDS     waits for an open question with these words
//	needs TOOL      the case is left out where it is missing; root may mount in a namespace
type scene struct {
	t     *testing.T
	at    string // file:line of the case
	dir   string
	env   []string
	words map[string]string
	bot   *botAPI   // nil: there is none
	term  *terminal // the last one

	line   string // that is checked when what is to come has been read
	code   int    // of it
	got    map[string]string
	want   map[string][]string
	awaits int // the exit code that is to come
}

// newScene makes an empty one.
func newScene(t *testing.T, at string) *scene {
	t.Helper()
	dir := filepath.Dir(home(t, ""))
	self, err := filepath.Abs(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	program := fmt.Sprintf("#!/bin/sh\nATLASBRIDGE_TEST_CHILD=main exec '%s' \"$@\"\n", self)
	writeProgram(t, filepath.Join(dir, "bin", "atlasbridge"), program)
	s := &scene{t: t, at: at, dir: dir, words: map[string]string{"DIR": dir, "TOKEN": fakeToken}}
	s.env = append(ptyEnv(""), "HOME="+dir, "ZDOTDIR="+dir, "INPUTRC="+os.DevNull, "ATLASBRIDGE_HOME="+s.state(),
		"PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	return s
}

// state is the state folder.
func (s *scene) state() string { return filepath.Join(s.dir, "state") }

var (
	reStandIn = regexp.MustCompile(`\b(DIR|URL|TOKEN|ID|SID|LINK|CODE)\b`)
	rePairing = regexp.MustCompile(`(?s)https://t\.me/my_bot\?start=([0-9a-f]+)\s.*this code: +([0-9a-f]{8})\s`)
)

// meant is a text with what its words stand for.
func (s *scene) meant(text string) string {
	return reStandIn.ReplaceAllStringFunc(text, func(word string) string { return cmp.Or(s.words[word], word) })
}

// plays plays a script.
func (s *scene) plays(script string) {
	s.t.Helper()
	lines := strings.Split(strings.TrimSpace(script), "\n")
	for i := 0; i < len(lines); i++ {
		verb, rest, _ := strings.Cut(lines[i], " ")
		below := ""
		for i+1 < len(lines) && strings.HasPrefix(lines[i+1], "|") {
			i++
			below += strings.TrimPrefix(strings.TrimPrefix(lines[i], "|"), " ") + "\n"
		}
		rest = s.meant(rest)
		switch verb {
		case ">", "!", "exit":
			s.expects(verb, rest)
			continue
		}
		s.check()
		s.step(verb, rest, below)
		if s.t.Failed() {
			s.t.FailNow() // what comes may wait in vain
		}
	}
	s.check()
}

// step does what a line says, which has those lines below it.
func (s *scene) step(verb, rest, below string) {
	s.t.Helper()
	first, more, _ := strings.Cut(rest, " ")
	switch verb {
	case "", "#":
	case "needs":
		if rest == "loopback" {
			needLoopback(s.t)
		} else if rest == "root" {
			needTool(s.t, "unshare")
			if err := exec.Command("unshare", "-m", "true").Run(); err != nil {
				s.t.Skip("needs root, and a mount namespace of its own:", err)
			}
		} else if _, err := os.Stat(rest); err != nil {
			needTool(s.t, rest)
		}
	case "file":
		writeProgram(s.t, filepath.Join(s.dir, rest), s.meant(below)) // private, and executable in vain
	case "bot":
		s.bot = newBotAPI(s.t)
		s.bot.pollWait = 100 * time.Millisecond
		s.words["URL"] = s.bot.URL
		config := s.meant(below)
		if rest != "bare" {
			config = s.bot.config(config)
		}
		writeProgram(s.t, filepath.Join(s.state(), "config.toml"), config)
	case "always", "once":
		s.answers(first, more, verb == "once")
	case "well":
		s.bot.change(func() { s.bot.fault = nil })
	case "phone":
		s.phone(first, more)
	case "tap":
		s.bot.press(s.bot.shows("", rest), rest)
	case "shown":
		s.bot.shows(rest, "")
	case "calls":
		if n := s.bot.count(more); strconv.Itoa(n) != first {
			s.t.Errorf("%s: %d calls of %s, not %s", s.at, n, more, first)
		}
	case "sent":
		if n := s.bot.came(more); strconv.Itoa(n) != first {
			s.t.Errorf("%s: %d messages with %q were sent, not %s", s.at, n, more, first)
		}
	case "asks":
		s.bot.until(s.t, first, "^"+strings.ReplaceAll(regexp.QuoteMeta(more), "…", ".*")+"$")
	case "$":
		s.runs(rest)
	case "%":
		needToolsOf(s.t, []string{rest})
		s.term = inTerminal(s.t, s.env, "sh", "-c", `cd "$0" && exec `+rest, s.dir)
	case "sees":
		s.term.sees(rest)
		if m := rePairing.FindStringSubmatch(s.term.shown()); m != nil {
			s.words["LINK"] = m[1]
			s.words["CODE"] = m[2]
		}
	case "lacks":
		if strings.Contains(s.term.shown(), rest) {
			s.t.Errorf("%s: the terminal shows %q:\n%s", s.at, rest, s.term.shown())
		}
	case "types":
		keys, err := strconv.Unquote(`"` + rest + `"`)
		if err != nil {
			s.t.Fatalf("%s: types %s: %v", s.at, rest, err)
		}
		s.term.types(keys)
	case "ends":
		s.term.exits(digits(rest))
	case "signal":
		s.term.signal(rest)
	case "stop":
		freezes(s.t, s.state(), s.term.pty.PID())
	case "asked":
		p := awaitPrompt(s.t, s.state(), rest, "awaiting_reply")
		s.words["ID"] = p.str("id")[:8]
		s.words["SID"] = p.str("session_id")
	default:
		s.t.Fatalf("%s: %q is not known", s.at, verb)
	}
}

// answers has the Bot API answer a method so.
func (s *scene) answers(method, answer string, once bool) {
	code, why, _ := strings.Cut(answer, " ")
	n, err := strconv.Atoi(code)
	s.bot.change(func() {
		if err != nil {
			s.bot.answers[method] = func(map[string]any) string { return answer }
			return
		}
		s.bot.fault = func(called string, w http.ResponseWriter) bool {
			if called == method {
				io.WriteString(w, apiCode(n, why))
			}
			if called == method && once {
				s.bot.change(func() { s.bot.fault = nil })
			}
			return called == method
		}
	})
}

// phone has a user write to the bot.
func (s *scene) phone(user, text string) {
	id := digits(user)
	s.bot.update(map[string]any{"message": map[string]any{"message_id": 1, "date": time.Now().Unix(), "text": text,
		"from": map[string]any{"id": id, "first_name": "Ada", "username": "ada_l"},
		"chat": map[string]any{"id": id, "type": "private"}}})
}

// runs has a shell run a line.
func (s *scene) runs(line string) {
	s.t.Helper()
	needToolsOf(s.t, []string{line})
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(s.t.Context(), "sh", "-c", line)
	cmd.Dir = s.dir
	cmd.Env = s.env
	cmd.Stdout = &out
	cmd.Stderr = &errs
	cmd.WaitDelay = time.Second
	late := time.AfterFunc(2*patience(), func() { _ = cmd.Process.Kill() }) // it may just have ended
	defer late.Stop()
	_ = cmd.Run() // the status tells
	s.line = line
	s.code = cmd.ProcessState.ExitCode()
	s.awaits = 0
	s.got = map[string]string{">": out.String(), "!": errs.String()}
	s.want = map[string][]string{}
}

// expects notes what is to come of the line that ran.
func (s *scene) expects(verb, text string) {
	if verb == "exit" {
		s.awaits = digits(text)
	} else {
		s.want[verb] = append(s.want[verb], text)
	}
}

// check compares what came of the line that ran.
func (s *scene) check() {
	s.t.Helper()
	if s.line == "" {
		return
	}
	if s.code != s.awaits {
		s.t.Errorf("%s: $ %s\nexit %d, not %d: %s", s.at, s.line, s.code, s.awaits, s.got["!"])
	}
	for verb, stream := range map[string]string{">": "standard output", "!": "standard error"} {
		if !describe(s.want[verb], s.got[verb]) {
			s.t.Errorf("%s: $ %s\n%s is\n%snot\n%s",
				s.at, s.line, stream, s.got[verb], strings.Join(s.want[verb], "\n"))
		}
	}
	s.line = ""
}

// describe reports whether these lines, with "…" for what may be anything, are a text's.
func describe(lines []string, text string) bool {
	pattern := "^"
	for _, line := range lines {
		if line == "…" {
			pattern += `(.*\n)*`
		} else {
			pattern += strings.ReplaceAll(regexp.QuoteMeta(line), "…", ".*") + `\n`
		}
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return regexp.MustCompile(pattern + "$").MatchString(text)
}

// TestHelp: the help of every command fits the screen, says what each flag is without it, and its examples are command
// lines that are taken.
func TestHelp(t *testing.T) {
	s := newScene(t, "help")
	if err := os.Remove(s.state()); err != nil {
		t.Fatal(err)
	}
	s.step("file", "state", "") // so that each command ends at once, where its line is taken
	names := commandsHelped(t)
	if len(names) < 15 {
		t.Errorf("help lists %q", names)
	}
	for _, name := range append(slices.Sorted(maps.Keys(names)), "") {
		_, text, _ := cli(t, s.dir, strings.Fields("help "+name)...)
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		if len(lines) > 24 && name != "config" && name != "audit" {
			t.Errorf("help %s has %d lines", name, len(lines))
		}
		examples := false
		for _, line := range lines {
			value := regexp.MustCompile(`^  --[a-z-]+ (\S*)  +\S`).FindStringSubmatch(line)
			if value != nil && value[1] != "" && !strings.Contains(line, "default: ") && !strings.Contains(line, "(by phone") {
				t.Errorf("help %s does not say what holds without it: %q", name, line)
			}
			if utf8.RuneCountInString(line) > 80 || strings.TrimRight(line, " ") != line {
				t.Errorf("help %s: too long, or blank at its end: %q", name, line)
			}
			examples = line != "" && examples || line == "Examples:"
			if !examples || line == "Examples:" {
				continue
			}
			s.runs(line)
			if said := s.got["!"]; !strings.Contains(line, "atlasbridge "+name) && !strings.Contains(line, "--record") ||
				strings.Contains(said, "; usage: atlasbridge") || strings.Contains(said, "unknown command") {
				t.Errorf("help %s: the example %q: %s", name, line, said)
			}
		}
	}
}

// commandsHelped are the commands that help lists, and what each is for.
func commandsHelped(t *testing.T) map[string]string {
	t.Helper()
	_, text, _ := cli(t, home(t, ""), "help")
	names := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^  ([a-z]+) {2,}(.*)$`).FindAllStringSubmatch(text, -1) {
		names[m[1]] = m[2]
	}
	return names
}

// settingHelped is a setting as `help config` explains it.
type settingHelped struct{ key, def, does, env string }

// settingsHelped are all of them, in order.
func settingsHelped(t *testing.T) (all []settingHelped) {
	t.Helper()
	_, text, _ := cli(t, home(t, ""), "help", "config")
	for _, m := range regexp.MustCompile(`(?m)^([a-z_.]+) = (.*)\n    (.*)(?:\n    environment: (\S+))?$`).FindAllStringSubmatch(text, -1) {
		all = append(all, settingHelped{m[1], m[2], m[3], m[4]})
	}
	return all
}

// TestHelpSettings: `help config` explains every setting, and each line of it would do in config.toml.
func TestHelpSettings(t *testing.T) {
	top, tables, keys := "", map[string]string{}, ""
	for _, s := range settingsHelped(t) {
		keys += s.key + "\n"
		table, key, dotted := strings.Cut(s.key, ".")
		if dotted {
			tables[table] += key + " = " + s.def + "\n"
		} else {
			top += s.key + " = " + s.def + "\n"
		}
	}
	for name, lines := range tables {
		top += "[" + name + "]\n" + lines
	}
	code, stdout, stderr := cli(t, home(t, top), "config")
	inForce := regexp.MustCompile(`(?m) .*$`).ReplaceAllString(strings.TrimPrefix(stdout[strings.Index(stdout, "\n"):], "\n"), "")
	if code != 0 || inForce != keys {
		t.Errorf("of the settings as they are explained\n%sconfig has\n%s%s", top, inForce, stderr)
	}
}

// TestAskedAndAnswered: a script's question stands as it was asked, with nothing in it hidden, secret or lost; whatever a
// choice is called, its number and its words choose it, and it is printed as it was given.
func TestAskedAndAnswered(t *testing.T) {
	needUnix(t)
	t.Parallel()
	s := newScene(t, "ask")
	for rows := range slices.Chunk(table(t, "ask.txt"), 6) { // all at once are too many for a busy machine
		asksAndGets(t, s.state(), rows)
	}
}

// asksAndGets has a script ask what each row says, all at once, and answers them.
func asksAndGets(t *testing.T, dir string, rows []row) {
	t.Helper()
	var scripts []*script
	for _, row := range rows {
		args := []string{"ask"}
		switch {
		case row["choices"] == "--text":
			args = append(args, "--text")
		case row["choices"] != "":
			args = append(args, "--choices", row["choices"])
		}
		args = append(args, cmp.Or(row["question"], "Go?"))
		if row["input"] != "" {
			args = append(args, "-")
		}
		scripts = append(scripts, begins(t, dir, row["input"], args...))
	}
	for i, row := range rows {
		of := awaitRecord(t, dir, "session", row["at"], func(r record) bool {
			return r.str("wrapper") == fmt.Sprint(scripts[i].Process.Pid)
		})
		p := awaitRecord(t, dir, "prompt", row["at"], func(r record) bool {
			return r.str("session_id") == of.str("id") && r.str("status") == "awaiting_reply"
		})
		if row["stands"] != "" && p.str("full") != row["stands"] {
			t.Errorf("%s: it asks %q, not %q", row["at"], p.str("full"), row["stands"])
		}
		if row["answer"] == "" {
			continue
		}
		if code, _, stderr := cli(t, dir, "answer", p.str("id"), row["answer"]); code != 0 {
			t.Errorf("%s: %q is not taken: %s", row["at"], row["answer"], stderr)
		}
		scripts[i].gets(digits(row["exit"]), row["prints"]+"\n", ".")
	}
}

// apiCode is a refusal of the Bot API with that code.
func apiCode(code int, why string) string {
	return fmt.Sprintf(`{"ok":false,"error_code":%d,"description":%q}`, code, why)
}

// ---- store.go: config.toml ----
// A setting is read from its place, or refused by its place.

// TestRefusedSettings: a setting that is unknown, twice there, out of bounds or incomplete is refused by its place, with
// a remedy and no secret, before anything is spawned.
func TestRefusedSettings(t *testing.T) {
	for _, row := range table(t, "refusals.txt") {
		t.Run(row["at"], func(t *testing.T) {
			token := strings.NewReplacer("TOKEN", fakeToken, " ⏎ ", "\n", "⏎ ", "\n")
			dir := home(t, token.Replace(row["config.toml"]))
			if name, value, given := strings.Cut(row["environment"], "="); given {
				if strings.HasSuffix(value, "TOKEN") {
					value = fakeToken
				}
				t.Setenv(name, value)
			}
			ran := filepath.Join(t.TempDir(), "ran")
			code, stdout, stderr := cli(t, dir, slices.Concat([]string{"run"},
				strings.Fields(row["flags"]), []string{"touch", ran})...)
			_, err := os.Stat(ran)
			if code != 125 || stdout != "" || err == nil || !strings.Contains(stderr, row["says"]) ||
				!matches(`(?s)^atlasbridge: .*\natlasbridge: hint: [^\n]+\n$`, stderr) || strings.Contains(stderr, "ecret") {
				t.Errorf("%v: exit %d, ran: %v, %s\nwant %s", row, code, err == nil, stderr, row["says"])
			}
			if strings.Contains(stderr, fakeToken) {
				t.Errorf("%v: it shows the token", row)
			}
		})
	}
}

// TestTOML: what is accepted is read in its order; what is not TOML, or outside of the subset, is refused with its line.
func TestTOML(t *testing.T) {
	for _, row := range table(t, "toml.txt") {
		entries, err := parseTOML("# first\n"+row["text"], nil)
		read := map[string]json.RawMessage{}
		for key, e := range entries {
			if e.Value != nil {
				read[key] = e.Value
			}
		}
		got, _ := json.Marshal(read)
		if err != nil {
			got = []byte(regexp.MustCompile(`^config\.toml:(\d+): .*$`).ReplaceAllString(err.Error(), "line $1"))
		}
		if string(got) != row["read as"] {
			t.Errorf("%s: %q is read as %s, not %s", row["at"], row["text"], got, row["read as"])
		}
	}
}

// FuzzConfig: no text panics the parser; what is accepted stays what it is with comments and blanks around it.
func FuzzConfig(f *testing.F) {
	for _, row := range table(f, "toml.txt") {
		f.Add(row["text"])
	}
	f.Fuzz(func(t *testing.T, text string) {
		entries, err := parseTOML(text, nil)
		if err != nil {
			return
		}
		bare := strings.ReplaceAll(text, "\r\n", "\n")
		again, err := parseTOML("# c\n\t\n"+strings.ReplaceAll(bare, "\n", "\t # c\n")+" # c", nil)
		if err != nil || len(again) != len(entries) {
			t.Fatalf("%q is accepted, with comments not: %v", text, err)
		}
		for key, e := range entries {
			if string(e.Value) != string(again[key].Value) {
				t.Errorf("%q: %s is %s and with comments %s", text, key, e.Value, again[key].Value)
			}
		}
	})
}

// ---- README ----
// What the README shows is what happens.

// TestREADME: the README's tables say what the program says itself, of commands and of settings, and its lines fit.
func TestREADME(t *testing.T) {
	readme := textOf(t, "README.md")
	for name, summary := range commandsHelped(t) {
		_, help, _ := cli(t, home(t, ""), "help", name)
		synopsis, _, _ := strings.Cut(strings.TrimPrefix(help, "atlasbridge "), "\n")
		row := fmt.Sprintf("| `%s` | %s |\n", strings.ReplaceAll(synopsis, "|", "\\|"), summary)
		if !strings.Contains(readme, row) {
			t.Errorf("README.md lacks the row %q", row)
		}
	}
	var want []settingHelped
	code := func(text string) string { return strings.Trim(text, "`") }
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| ([^|]*) \\| ([^|]*) \\| ([^|]*) \\|$").FindAllStringSubmatch(readme, -1) {
		want = append(want, settingHelped{m[1], code(m[2]), m[4], code(m[3])})
	}
	got := settingsHelped(t)
	for i, s := range got {
		got[i].def = strings.Trim(s.def, `"`)
		if s.def == "[]" || s.key == "telegram.chat_id" {
			got[i].def = ""
		}
	}
	if wrong := slices.DeleteFunc(want, func(s settingHelped) bool { return slices.Contains(got, s) }); len(wrong) > 0 {
		t.Errorf("README.md's settings are\n%q, the program's\n%q", wrong, got)
	}
	if long := regexp.MustCompile(`.{121,}`).FindString(readme); long != "" || strings.Count(readme, "\n") > 180 {
		t.Errorf("README.md has too many lines, or a long one: %q", long)
	}
}

// readmeBlocks are the fenced blocks of the README in that language.
func readmeBlocks(t *testing.T, language string, count int) (blocks []string) {
	t.Helper()
	for _, m := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(textOf(t, "README.md"), -1) {
		blocks = append(blocks, m[1])
	}
	if len(blocks) != count {
		t.Fatalf("README.md has %d blocks of %s, not %d", len(blocks), language, count)
	}
	return blocks
}

// TestREADMETranscripts: the README's transcripts are what happens.
func TestREADMETranscripts(t *testing.T) {
	needUnix(t)
	shown := readmeBlocks(t, "console", 2)
	s := newScene(t, "README.md")
	first, screen, _ := strings.Cut(strings.TrimPrefix(shown[0], "$ "), "\n")
	s.step("%", first, "")
	s.step("asked", "Continue?", "")
	script := regexp.MustCompile(`\b[0-9a-f]{8}\b`).ReplaceAllString(shown[1], "ID")
	s.plays(regexp.MustCompile(`(?m)^([^$])`).ReplaceAllString(script, "> $1") + "ends 0")
	if got := strings.ReplaceAll(s.term.shown(), "\n", ""); got != strings.ReplaceAll(screen, "\n", "") {
		t.Errorf("the screen shows\n%s, in the README\n%s", got, screen)
	}
}

// TestShellVerifiesTheLog: the README's shell lines accept a log as it is written, and nothing else; those of `help audit`
// find an answer that was typed at something else than was shown, and the text whose hash the log has.
func TestShellVerifiesTheLog(t *testing.T) {
	needUnix(t)
	needTool(t, "bash", "jq", "awk", "sha256sum")
	s := newScene(t, "README.md")
	_, text, _ := cli(t, s.dir, "help", "audit")
	lines := regexp.MustCompile(`(?m)(?:^ .*\n)*^  jq -.*\n(?:^ .*\n)*`).FindAllString(text, -1)
	if len(lines) != 2 {
		t.Fatalf("help audit has %d shell blocks: %s", len(lines), text)
	}
	for i, block := range append(readmeBlocks(t, "sh", 1), lines...) {
		s.step("file", fmt.Sprint("sh", i), strings.Replace(block, "id=…", "id=$1", 1))
	}
	s.plays(`
$ ln -s state .atlasbridge
% atlasbridge run --name "<é>\\n" sh -c 'printf "R\303\273n <this> & \\\\n \"that\"? (y/n) "; read a'
asked R
$ atlasbridge answer ID y
> answered ID: Yes
ends 0
$ bash sh0; bash sh1
> it holds: genesis to sha256:…
$ atlasbridge audit verify | head -n 1
> audit.log holds: …
$ full=$(grep -o '"ID-[^"]*"' state/audit.log | head -n 1 | tr -d '"'); bash sh2 $full | tr -d ' -' | sed 's/^sha256://' | sort -u | wc -l | tr -d ' '
> 1
$ sed -i.was 's/"screen_sha256":"sha256:./&0/' state/audit.log; bash sh0; bash sh1 | grep -c '"prompt_id":"ID'
> BAD: line …
> 1
$ mv state/audit.log.was state/audit.log; bash sh0; mv state/audit.log old; atlasbridge answer 12345678 y 2>err; bash sh0
> it holds: genesis to sha256:…
> it holds: sha256:… to sha256:…
`)
}

// ---- detect.go: screen ----
// Bytes become cells as in a terminal, wherever they are cut.

// TestScreens: what is written shows as in a terminal, whole or cut anywhere; each query is answered once, and only our own
// where the user's terminal answers too.
func TestScreens(t *testing.T) {
	const ours = "\x1b]7501;?\x1b\\"
	for _, r := range table(t, "screens.txt") {
		for cut := range len(r["written"]) {
			s := newScreen(5, 10)
			s.Write([]byte(r["written"][:cut]))
			s.Write([]byte(r["written"][cut:]))
			var rows, cols int
			if _, err := fmt.Sscanf(r["size"], "%dx%d", &cols, &rows); err == nil {
				s.Resize(rows, cols)
			}
			alone := cut%2 == 0
			replies := r["replies"]
			if !alone {
				replies = strings.Repeat(ours, strings.Count(replies, ours))
			}
			got := []string{strings.ReplaceAll(s.Text(), "\n", "¦"), string(s.TakeReplies(alone))}
			s.Write([]byte("\x1b[6n"))
			got = append(got, string(s.TakeReplies(true)))
			if want := []string{r["shown"], replies, "\x1b[" + r["cursor"] + "R"}; !slices.Equal(got, want) {
				t.Errorf("%s: %s, cut at %d: %q, want %q", r["at"], r["case"], cut, got, want)
				break
			}
		}
	}
}

// TestScreenAgainstTmux: the screen shows what tmux shows at the end of each recording.
func TestScreenAgainstTmux(t *testing.T) {
	needTool(t, "tmux", "cat", "stty", "sleep")
	t.Parallel()
	dir := t.TempDir()
	tmux := func(args ...string) string {
		cmd := exec.Command("tmux", append([]string{"-u", "-S", filepath.Join(dir, "tmux"), "-f", "/dev/null"}, args...)...)
		cmd.Env = append(os.Environ(), "TMUX=", "LC_ALL=C.UTF-8")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("tmux %q: %v: %s", args, err, out)
		}
		return string(out)
	}
	tmux("new-session", "-d", "exec sleep 600", ";", "set", "-g", "status", "off")
	defer tmux("kill-server")
	for _, file := range inFolder("testdata", "recordings/*.cast") {
		rows, cols, out := outputOf(t, file)
		if strings.Contains(out, "\x1b(0") {
			continue // tmux tells the letters, not the lines
		}
		text := filepath.Join(dir, "out")
		makeFile(t, out+"\x1b\\\x1b]2;all done\a", text)
		tmux("new-session", "-d", "-s", "x", "-x", fmt.Sprint(cols), "-y", fmt.Sprint(rows),
			"stty raw -echo; cat '"+text+"'; exec sleep 600")
		comesTrue(t, "tmux has shown "+file, func() bool { return tmux("display-message", "-p", "-t", "x", "#{pane_title}") == "all done\n" })
		s := newScreen(rows, cols)
		s.Write([]byte(out))
		got, want := s.Text(), strings.TrimRight(tmux("capture-pane", "-p", "-t", "x"), "\n")
		if got != want {
			t.Errorf("%s shows\n%s\nin tmux\n%s", file, got, want)
		}
		tmux("kill-session", "-t", "x")
	}
}

// castEvent is an event of a recording.
type castEvent struct {
	at         float64 // seconds
	kind, text string
}

// recorded is the size of a recording, and its events.
func recorded(t testing.TB, file string) (rows, cols int, events []castEvent) {
	t.Helper()
	head, body, _ := strings.Cut(textOf(t, file), "\n")
	var size struct{ Width, Height int }
	err := json.Unmarshal([]byte(head), &size)
	for line := range strings.Lines(body) {
		var e castEvent
		if err == nil {
			err = json.Unmarshal([]byte(line), &[]any{&e.at, &e.kind, &e.text})
		}
		events = append(events, e)
	}
	if err != nil {
		t.Fatal(file, err)
	}
	return size.Height, size.Width, events
}

// outputOf is the size of a recording, and its output up to the first resize.
func outputOf(t testing.TB, file string) (rows, cols int, out string) {
	t.Helper()
	rows, cols, events := recorded(t, file)
	for _, e := range events {
		switch e.kind {
		case "o":
			out += e.text
		case "r":
			return rows, cols, out
		}
	}
	return rows, cols, out
}

// TestHostileOutput: noise, and strings that never end, take no memory; then text shows again.
func TestHostileOutput(t *testing.T) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	s := newScreen(30, 100)
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	endless := strings.Repeat("0123456789abcdef", 1<<16)
	for _, start := range []string{string(noise), "\x1b]0;", "\x1b]7501;", "\x1bP", "\x1b_G", "\x1bk", "\x1b[", "\x1b[1;", "\x1b[;:", "\x1b("} {
		s.Write([]byte(start + endless))
	}
	s.Write(bytes.Repeat([]byte("\x1b[6n\x1b[c\x1b]11;?\a\x1b[22t\x1b]7501;?\a\x1b[99999b"), 100000))
	s.Write([]byte(strings.Repeat("\x1b[1;1H\u0301e"+strings.Repeat("\u0301\u0302\u0303", 99), 1000) + "\x1bcback"))
	noise = nil
	if got := s.Text(); got != "back" {
		t.Errorf("after all that it shows %q", got)
	}
	if grown := int64(heap()) - int64(before); grown > 4<<20 {
		t.Errorf("it keeps %d KiB", grown>>10)
	}
	runtime.KeepAlive(s)
}

// TestFloods: what scrolls through in a flood that is read at once leaves the screen, and what is asked below, as when it is
// read piece by piece.
func TestFloods(t *testing.T) {
	var tapes []*tapeText
	for _, r := range table(t, "floods.txt") {
		line, _, _ := strings.Cut(r["line"], "\n")
		flood := func(lines int) string {
			return r["first"] + strings.Repeat(line+"\n", lines) + r["line"] + r["behind"]
		}
		many := 1 + (3<<17)/(len(line)+1)
		pieces := ""
		for piece := range slices.Chunk([]rune(flood(400+many%400)), 999) { // more than is kept, and as many of any forty
			pieces += fmt.Sprintf("0s %q\n", string(piece))
		}
		for _, written := range []string{fmt.Sprintf("0s %q\n", flood(many)), pieces} {
			text := fmt.Sprintf("x reading canon echo 40x10\n0s %q\n", r["before"]) + written + "0s \"\\r\\n\\x1b[mGo? (y/n) \"\n3s\n"
			tapes = append(tapes, readTape(t, r["at"], r["line"], text))
		}
	}
	asked := labOf(t, tapes)
	for i := 0; i < len(tapes); i += 2 {
		once, pieces := fmt.Sprint(asked[i]), fmt.Sprint(asked[i+1])
		if len(asked[i]) == 0 {
			t.Errorf("%s: nothing is asked", tapes[i].at)
		}
		if once = strings.ReplaceAll(once, fmt.Sprint(i, ".json"), fmt.Sprint(i+1, ".json")); once != pieces {
			t.Errorf("%s: at once it asks\n%s\nin pieces\n%s", tapes[i].at, once, pieces)
		}
	}
}

// FuzzScreen: whatever the bytes, and wherever they are cut, the screen shows the same, and nothing panics.
func FuzzScreen(f *testing.F) {
	for _, r := range table(f, "screens.txt") {
		f.Add([]byte(r["written"]), uint16(len(r["written"])/2))
	}
	f.Fuzz(func(t *testing.T, in []byte, at uint16) {
		whole, cut, bytewise := newScreen(5, 10), newScreen(5, 10), newScreen(5, 10)
		whole.Write(in)
		n := min(int(at), len(in))
		cut.Write(in[:n])
		cut.Write(in[n:])
		for i := range in {
			bytewise.Write(in[i : i+1])
		}
		for _, s := range []*Screen{cut, bytewise} {
			if got := s.Text(); got != whole.Text() {
				t.Errorf("%q cut at %d, or everywhere: %q, whole %q", in, n, got, whole.Text())
			}
		}
		whole.Resize(3, 4)
		whole.Write(in)
	})
}

// BenchmarkScreen writes repaints as the agents' tools send them.
func BenchmarkScreen(b *testing.B) {
	_, _, text := outputOf(b, "testdata/recordings/claude-work_stream.cast")
	out := []byte(text)
	s := newScreen(40, 120)
	b.SetBytes(int64(len(out)))
	b.ReportAllocs()
	for b.Loop() {
		s.Write(out)
	}
}

// ---- detect.go: transcript ----
// What a program printed is told line by line, once.

// TestTranscript: each line is told once and in order when it is final, whatever is painted over, wrapped, cleared or
// scrolled.
func TestTranscript(t *testing.T) {
	for _, b := range blocks(t, "transcript.txt") {
		s := newScreen(5, 10)
		s.Transcript(false)
		told := ""
		for line := range strings.SplitSeq(b.parts[""], "\n") {
			if !strings.HasPrefix(line, `"`) {
				continue
			}
			written, settled := strings.CutSuffix(line, " settled")
			s.Write([]byte(unquoted(t, b.at, written)))
			final, live := s.Transcript(settled)
			told += strings.Join(append([]string{line}, final...), "\n|") + "\n"
			if live != "" {
				told += "live " + live + "\n"
			}
		}
		if told != b.parts[""] {
			t.Errorf("%s: %s: it tells\n%s", b.at, b.name, told)
		}
	}
}

// TestStreamOfRecordings: with --stream, what agents have painted in a window of 40 columns and 20 rows reaches the phone word
// by word, each once and in order, though no screen has shown all of it; frames, spinners and footers do not.
func TestStreamOfRecordings(t *testing.T) {
	needUnix(t)
	t.Parallel()
	for tool, words := range map[string]int{"claude": 110, "codex": 50} {
		t.Run(tool, func(t *testing.T) {
			t.Parallel()
			w, c, _, x := stageSession(t, "", "--stream", "--adapter", tool)
			c.order(order{Raw: true})
			x.pty.Resize(Size{Rows: 20, Cols: 40})
			_, _, events := recorded(t, "testdata/recordings/"+tool+"-stream_w40.cast")
			at := 0.0
			for _, e := range events {
				<-time.After(time.Duration(min(e.at-at, 0.05) * 1e9)) // as long as a frame stands, not as long as it did
				at = e.at
				switch e.kind {
				case "o":
					c.order(order{Write: e.text})
				case "i":
					x.types(e.text)
				}
			}
			var want []string
			for n := range words {
				if tool == "claude" || n%12 != 0 { // codex has items there
					want = append(want, fmt.Sprint("word", n))
				}
			}
			c.order(order{Exit: true})
			x.exits(0)
			text := ""
			for _, m := range w.history() {
				if now := w.message(m.id); m.method == "sendMessage" {
					text += now.text + "\n"
				}
			}
			got := regexp.MustCompile(`word\d+`).FindAllString(text, -1)
			if frame := regexp.MustCompile(`[─│╭╰]|to interrupt|shortcuts|Ask Codex`).FindString(text); frame != "" || !slices.Equal(got[:min(len(got), len(want))], want) {
				t.Errorf("the phone shows %q: %s", frame, text)
			}
		})
	}
}

// ---- detect.go: tapes ----
// What the lab finds in recordings that are written as text, by their times.

// TestTapes: what testdata/tapes shows is asked as it says there, when it says so, and nothing else is.
func TestTapes(t *testing.T) {
	var tapes []*tapeText
	for _, file := range inFolder("testdata", "tapes/*.txt") {
		for _, b := range blocks(t, strings.TrimPrefix(filepath.ToSlash(file), "testdata/")) {
			tapes = append(tapes, readTape(t, b.at, b.name, b.parts[""]))
		}
	}
	for _, r := range table(t, "lines.txt") { // of programs that print a line, and wait for three seconds
		text := fmt.Sprintf("%s\n3s %q\n= %s\n  choices %q\n  safe_default %s\n", r["terminal"],
			r["line"], r["asks"], r["choices"], r["safe_default"])
		tapes = append(tapes, readTape(t, r["at"], strconv.Quote(r["line"]), text))
	}
	asked := labOf(t, tapes)
	for i, tape := range tapes {
		if wrong := tape.differs(t, asked[i]); wrong != "" {
			t.Errorf("%s: %s: %s", tape.at, tape.name, wrong)
		}
	}
}

// tapeText is a case of testdata/tapes while it becomes a recording (see tapes/README.md), with what it expects.
type tapeText struct {
	at          string
	name        string
	defaults    map[string]string // safe_defaults
	cast        bytes.Buffer
	now         float64 // seconds
	tty         string
	mark        string   // of the rows that wait to be written: "|" or ">"
	rows        []string // they
	takes       float64
	picture     string // what an agent shows: its name in pictures.txt, its text, what stands in its box
	text, draft string
	expected    []expectation
}

// expectation is what is asked since the one before, until then.
type expectation struct {
	until float64
	lines []string // "= kind: question" of each question, then "  member words", which it has
}

var (
	reLoop  = regexp.MustCompile(`(?ms)^(\d+) times\n(.*?)^end\n`)
	rePick  = regexp.MustCompile(`\{[^{}]*\}`)
	reTakes = regexp.MustCompile(`^(\d+m?s)(?: |$)(.*)`)
	reTimes = regexp.MustCompile(`(\S)×(\d+)`)
	reHint  = regexp.MustCompile(`«(.*?)»`)
)

// controls are how the characters that nobody sees are written in a row.
var controls = strings.NewReplacer("␛", "\x1b", "␇", "\a", "␠", " ", "␍", "\r", "␊", "\n", "␈",
	"\b", "␉", "\t", "⍽", "\u00a0")

// readTape reads a case.
func readTape(t *testing.T, at, name, text string) *tapeText {
	t.Helper()
	c := &tapeText{at: at, name: name, defaults: map[string]string{}}
	head, body, _ := strings.Cut(text, "\n")
	var rows, cols = 30, 100
	words := strings.Fields(head)
	if _, err := fmt.Sscanf(words[len(words)-1], "%dx%d", &cols, &rows); err == nil {
		words = words[:len(words)-1]
	}
	c.picture = words[0]
	c.tty = strings.Join(words[1:], " ")
	c.write(map[string]any{"version": 2, "width": cols, "height": rows, "title": words[0]})
	body = reLoop.ReplaceAllStringFunc(body, func(all string) string {
		m := reLoop.FindStringSubmatch(all)
		var b strings.Builder
		for i := range digits(m[1]) {
			b.WriteString(rePick.ReplaceAllStringFunc(m[2], func(s string) string {
				each := strings.Split(strings.Trim(s, "{}"), "|")
				return strings.ReplaceAll(each[i%len(each)], "#", strconv.Itoa(i))
			}))
		}
		return b.String() + "\n" // what follows is another step
	})
	last := ""
	for line := range strings.SplitSeq(body, "\n") {
		c.step(t, line, last)
		last = line
	}
	c.flush(t)
	return c
}

// digits is a number that a pattern has found, or a row has; "" is 0.
func digits(text string) int {
	n, _ := strconv.Atoi(text)
	return n
}

// step does what a line says, a second before the next or as long as stands at its beginning.
func (c *tapeText) step(t *testing.T, line, last string) {
	t.Helper()
	takes := time.Second
	m := reTakes.FindStringSubmatch(line)
	if m != nil {
		takes, _ = time.ParseDuration(m[1]) // as the pattern has it
		line = m[2]
	}
	mark := line[:min(1, len(line))]
	if m != nil || mark != c.mark {
		c.flush(t)
	}
	word, rest, _ := strings.Cut(line, " ")
	switch {
	case mark == "|" || mark == ">":
		if c.mark != mark {
			c.takes = takes.Seconds()
		}
		c.mark = mark
		if mark == ">" {
			line = strings.Replace(line, " ", "", 1)
		}
		c.rows = append(c.rows, line[1:])
		return
	case line == "" && m == nil, word == "#":
		return
	case mark == "=" || mark == " ":
		if !strings.HasPrefix(last, "=") && !strings.HasPrefix(last, " ") {
			c.expected = append(c.expected, expectation{until: c.now})
			c.now += 0.001 // what comes at once comes later
		}
		now := &c.expected[len(c.expected)-1]
		now.lines = append(now.lines, line)
		return
	case word == "set":
		kind, value, _ := strings.Cut(rest, "=")
		c.defaults[kind] = value
		return
	case word == "shows":
		c.picture = rest
		return
	case word == "box":
		c.draft = rest
		c.paint(t)
	case word == "says":
		c.event("o", "\x1b]7501;state="+rest+"\x1b\\")
	case word == "title":
		c.event("o", "\x1b]0;"+rest+"\a")
	case word == "types":
		c.event("i", unquoted(t, c.at, rest))
	case word == "tty":
		c.tty = rest
	case word == "size":
		c.event("r", rest)
	case mark == `"`:
		c.event("o", unquoted(t, c.at, line))
	case line != "":
		t.Fatalf("%s: %s: no step %q", c.at, c.name, line)
	}
	c.pass(takes.Seconds())
}

// unquoted is a text in Go's quotation marks.
func unquoted(t *testing.T, at, quoted string) string {
	t.Helper()
	text, err := strconv.Unquote(quoted)
	if err != nil {
		t.Fatalf("%s: %s: %v", at, quoted, err)
	}
	return text
}

// flush writes the rows that wait.
func (c *tapeText) flush(t *testing.T) {
	text := strings.Join(c.rows, "\n")
	mark := c.mark
	c.mark = ""
	c.rows = nil
	switch mark {
	case "":
		return
	case ">":
		c.text = text
		c.paint(t)
	case "|":
		c.event("o", written(text))
	}
	c.pass(c.takes)
}

// paint shows the picture, with its text and what stands in its box.
func (c *tapeText) paint(t *testing.T) { c.event("o", picture(t, c.picture, written(c.text), c.draft)) }

// picture is what an agent paints, with that text above its box and that draft in it.
func picture(t *testing.T, name, text, draft string) string {
	t.Helper()
	all := blocks(t, "pictures.txt")
	i := slices.IndexFunc(all, func(b block) bool { return b.name == name })
	if i < 0 {
		t.Fatalf("no picture of %s", name)
	}
	before, after, _ := strings.Cut(written(strings.TrimSuffix(all[i].parts[""], "\n")), "TEXT")
	after = reHint.ReplaceAllStringFunc(after, func(hint string) string {
		if draft != "" {
			return draft + "\x1b7"
		}
		return "\x1b7" + strings.Trim(hint, "«»")
	})
	return "\x1b[H\x1b[2J" + before + text + after
}

// written is what rows say, with what stands for characters that nobody sees.
func written(rows string) string {
	rows = reTimes.ReplaceAllStringFunc(rows, func(s string) string {
		m := reTimes.FindStringSubmatch(s)
		return strings.Repeat(m[1], digits(m[2]))
	})
	return controls.Replace(strings.ReplaceAll(rows, "\n", "\r\n"))
}

// event writes an event.
func (c *tapeText) event(kind, text string) { c.write([]any{c.now, kind, text}) }

// write writes a line of the recording.
func (c *tapeText) write(v any) { json.NewEncoder(&c.cast).Encode(v) }

// pass lets time pass, and the system tell the state of the terminal.
func (c *tapeText) pass(seconds float64) {
	c.event("t", c.tty)
	c.now += seconds
	c.event("t", c.tty)
}

// labOf is what `lab --json` asks in each tape.
func labOf(t *testing.T, tapes []*tapeText) [][]record {
	t.Helper()
	dir := t.TempDir()
	asked := make([][]record, len(tapes))
	args := []string{}
	for i, c := range tapes {
		text, _ := json.Marshal(map[string]any{"recording": fmt.Sprint(i, ".cast"), "safe_defaults": c.defaults}) // only texts
		file := filepath.Join(dir, fmt.Sprint(i))
		makeFile(t, c.cast.String(), file+".cast")
		makeFile(t, string(text), file+".json")
		args = append(args, file+".json")
	}
	for _, e := range labEvents(t, args...) {
		i := digits(strings.TrimSuffix(e.str("file"), ".json"))
		asked[i] = append(asked[i], e)
		if len(tapes[i].defaults) == 0 {
			waitsSafely(t, e)
		}
	}
	return asked
}

// labEvents is what `lab --json` prints of files and folders.
func labEvents(t *testing.T, paths ...string) (all []record) {
	t.Helper()
	_, out, errs := cli(t, t.TempDir(), append([]string{"lab", "--json", "--explain"}, paths...)...)
	for dec := json.NewDecoder(strings.NewReader(out)); dec.More(); {
		var e record
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err, errs)
		}
		keepsPromises(t, e)
		all = append(all, e)
	}
	return all
}

// differs tells where what was asked is not as expected, "" nowhere.
func (c *tapeText) differs(t *testing.T, asked []record) string {
	t.Helper()
	if len(c.expected) == 0 {
		return "it expects nothing"
	}
	for _, want := range c.expected {
		n := slices.IndexFunc(asked, func(e record) bool { return e["t"].(float64) > want.until })
		if n < 0 {
			n = len(asked)
		}
		var now []record
		now, asked = asked[:n], asked[n:]
		i := -1
		for _, line := range want.lines {
			head, isHead := strings.CutPrefix(line, "=")
			if isHead {
				i++
			}
			switch {
			case isHead && strings.TrimSpace(head) == "nothing":
				i--
			case i >= len(now):
				return fmt.Sprintf("until %.1f s it asks %d questions, not %s", want.until, len(now), line)
			case isHead && !heads(t, c.at, now[i], strings.TrimSpace(head)), !isHead && !hasMember(t, c.at, now[i], line):
				return fmt.Sprintf("it expects %s; it asks\n%s", line, inWords(now[i]))
			}
		}
		if len(now) > i+1 {
			return fmt.Sprintf("until %.1f s it also asks\n%s", want.until, inWords(now[i+1]))
		}
	}
	if len(asked) > 0 {
		return "in the end it also asks\n" + inWords(asked[0])
	}
	return ""
}

// heads reports whether a question is "kind" or "kind: words".
func heads(t *testing.T, at string, e record, want string) bool {
	kind, words, more := strings.Cut(want, ": ")
	asks := "question"
	if e.str("idle") == "true" {
		asks = "full"
	}
	return kind == askedAs(e) && (!more || hasMember(t, at, e, "  "+asks+" "+words))
}

// askedAs is the type of a question, "secret", or of an input box "idle" or what the turn came to.
func askedAs(e record) string {
	switch {
	case e.str("turn") != "":
		return e.str("turn")
	case e.str("idle") == "true":
		return "idle"
	case e.str("secret") == "true":
		return "secret"
	}
	return e.str("type")
}

// hasMember reports whether a member is as a line wants it: "  member words", "  member ~ part of it", "  member ! not in
// it". Blanks and ends of lines do not count where the words stand in no quotation marks.
func hasMember(t *testing.T, at string, e record, line string) bool {
	t.Helper()
	name, want, _ := strings.Cut(strings.TrimSpace(line), " ")
	how, part, _ := strings.Cut(want, " ")
	if how == "~" || how == "!" {
		want = part
	}
	got := memberOf(e, name)
	if strings.HasPrefix(want, `"`) {
		want = unquoted(t, at, want)
	} else {
		got = strings.Join(strings.Fields(got), " ")
	}
	switch how {
	case "~":
		return strings.Contains(got, want)
	case "!":
		return !strings.Contains(got, want)
	}
	return got == want
}

// memberOf is a member as text: of each choice "key label=keys", "-" for what is not there.
func memberOf(e record, name string) string {
	choices, ok := e[name].([]any)
	if !ok || name != "choices" {
		if e[name] == nil {
			return "-"
		}
		return e.str(name)
	}
	var all []string
	for _, c := range choices {
		c := record(c.(map[string]any))
		keys := strconv.Quote(c.str("keys"))
		all = append(all, c.str("key")+" "+c.str("label")+"="+keys[1:len(keys)-1])
	}
	return strings.Join(all, ", ")
}

// inWords is a question for a person to read.
func inWords(e record) string {
	text := fmt.Sprintf("\t%.2f s: %s: %q\n", e["t"], askedAs(e), e["question"])
	for _, name := range []string{"choices", "safe_default", "signals", "cut", "above", "full", "why"} {
		text += fmt.Sprintf("\t%s %q\n", name, memberOf(e, name))
	}
	return text
}

// keepsPromises checks the limits of a question.
func keepsPromises(t *testing.T, e record) {
	t.Helper()
	excerpt, choices := e.str("excerpt"), e["choices"].([]any)
	score := e["score"].(float64)
	signals := e["signals"].([]any)
	if len(excerpt) > 200 || !utf8.ValidString(excerpt) || excerpt == "" && e.str("type") != "unknown" || len(choices) > 9 ||
		score < 0.60 || score > 1 || len(signals) == 0 || e.str("shown") == "" || len(e.str("full")) > 16<<10 {
		t.Errorf("%s passes a limit:\n%s", e.str("file"), inWords(e))
	}
	for _, c := range choices {
		c := record(c.(map[string]any))
		if utf8.RuneCountInString(c.str("label")) > 60 || c.str("key") == "" {
			t.Errorf("%s: a choice passes a limit: %v", e.str("file"), c)
		}
	}
}

// waitsSafely checks that waiting types nothing but what refuses, or Enter where nothing but Enter is asked for.
func waitsSafely(t *testing.T, e record) {
	t.Helper()
	label := ""
	for _, c := range e["choices"].([]any) {
		c := record(c.(map[string]any))
		if c["key"] == e["safe_default"] {
			label = c.str("label")
		}
	}
	kind := askedAs(e)
	switch {
	case e["safe_default"] == nil || e.str("safe_default") == "esc":
	case kind == "confirm_enter" && e.str("safe_default") == "enter" && !strings.Contains(e.str("question"), "?"):
	case kind != "yes_no" && kind != "multiple_choice" || affirming.MatchString(label) || !refusing.MatchString(label):
		t.Errorf("%s: waiting types %q (%q):\n%s", e.str("file"), e["safe_default"], label, inWords(e))
	}
}

// What says yes, and what refuses, in a dozen languages: what waiting may type is held against it.
var (
	affirming = regexp.MustCompile(`(?i)^[^\pL\pN]*(y|yes|yep|ok|okay|j|ja|o|oui|s|si|sí|sim|д|да|tak|t|是|好|确定|はい|예|네|` +
		`allow|always|approve|accept|trust|proceed|continue|confirm|grant|run|install|delete|remove|overwrite|deploy|agree|` +
		`i (agree|accept|understand))([^\pL\pN]|$)`)
	refusing = regexp.MustCompile(`(?i)^[^\pL\pN]*(n|no|nope|nein|nee|non|nao|não|н|нет|ні|nie|hayır|否|いいえ|아니요?|deny|reject|cancel|abort|abbrechen|` +
		`refuse|decline|disallow|don['’]?t|do not|取消|キャンセル)([^\pL\pN]|$)`)
)

// ---- detect.go: mutes ----
// Whatever is printed, the question below it is asked.

// TestNothingMutes: whatever was printed before, a question that is printed below it is asked within a minute, with and
// without a clear in between.
func TestNothingMutes(t *testing.T) {
	var tapes []*tapeText
	for _, r := range table(t, "mutes.txt") {
		for _, tool := range []string{"generic", "claude", "gemini"} {
			for _, end := range []string{"\x1b[2J\x1b[H", "\r\n"} {
				text := fmt.Sprintf("%s reading canon echo 80x24\n0s %q\n60s \"Continue? [y/n] \"\n", tool,
					r["printed"]+end)
				tapes = append(tapes, readTape(t, r["at"], tool, text))
			}
		}
	}
	for i, asked := range labOf(t, tapes) {
		if len(asked) == 0 || asked[len(asked)-1].str("idle") == "true" {
			t.Errorf("%s: %s asks nothing below that", tapes[i].at, tapes[i].name)
		}
	}
}

// ---- detect.go: safe text ----
// Tricks are made visible, secrets are left out.

// TestRedact: what is a secret by its shape, or by its name and its looks, is left out, and nothing else of the text; what
// was redacted is no secret.
func TestRedact(t *testing.T) {
	secret := regexp.MustCompile("«(.*)»")
	for text := range strings.Lines(textOf(t, "testdata/redact.txt")) {
		text = strings.TrimSuffix(text, "\n")
		if strings.HasPrefix(text, "#") {
			continue
		}
		if strings.HasPrefix(text, `"`) {
			text = unquoted(t, "redact.txt", text)
		}
		want := secret.ReplaceAllString(text, "[redacted]")
		got := redact(secret.ReplaceAllString(text, "$1"))
		if got != want || redact(got) != got {
			t.Errorf("of %q it leaves %q, and of that %q", text, got, redact(got))
		}
	}
}

// FuzzRedact: whatever the text, redacting it again changes nothing.
func FuzzRedact(f *testing.F) {
	for _, text := range []string{"password=hunter22", `{"a\":"token=x1x1x1x1x1"}`, "://a:b@://c:d@", "-u a:b1c2 --pass 'x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		once := redact(text)
		if twice := redact(once); twice != once {
			t.Errorf("%q becomes %q, then %q", text, once, twice)
		}
	})
}

// ---- detect.go: recordings and lab ----
// Recordings and scenarios are written, played again and judged.

// TestScenarios: every scenario asks what it expects, or nothing; waiting types nothing but refusals; and what the lab explains
// is sentences.
func TestScenarios(t *testing.T) {
	if code, _, errs := cli(t, t.TempDir(), "lab", "testdata/scenarios"); code != 0 {
		t.Error(errs)
	}
	internal := regexp.MustCompile(`\b(structure|pattern|tty|protocol|raw|canon|noecho)\b|[%!]|\w+\+\w+`)
	asked := labEvents(t, "testdata/scenarios", "testdata/recordings")
	for _, e := range asked {
		waitsSafely(t, e)
		if why := e.str("why"); !strings.HasPrefix(why, "found by the reader of ") || internal.MatchString(why) {
			t.Errorf("%s is explained as %q", e.str("file"), why)
		}
	}
	if len(asked) < 100 {
		t.Errorf("%d questions in all scenarios and recordings", len(asked))
	}
}

// copied is a copy of folders of recordings and scenarios in which another state of the terminal is told.
func copied(t *testing.T, told func(text string) string, dirs ...string) string {
	t.Helper()
	to := t.TempDir()
	for _, dir := range dirs {
		if err := os.CopyFS(filepath.Join(to, filepath.Base(dir)), os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range append(inFolder(to, "*/*.cast"), inFolder(to, "*/*.json")...) {
		makeFile(t, told(textOf(t, file)), file)
	}
	return to
}

// reTold is what the system tells of who reads, in a recording and in a scenario.
var reTold = regexp.MustCompile(`("t", "|"tty": ")(?:reading|busy)`)

// blind takes out what the system tells of who reads.
func blind(text string) string { return reTold.ReplaceAllString(text, "${1}unknown") }

// TestPrintedIsNotAsked: what a program of lines prints while it works is no question, whatever it looks like.
func TestPrintedIsNotAsked(t *testing.T) {
	dir := copied(t, func(text string) string {
		if !strings.Contains(text, `"tool": "generic"`) || !strings.Contains(text, `"tty": "reading canon echo"`) {
			return "{}"
		}
		return strings.Replace(text, `"reading canon echo"`, `"busy canon echo"`, 1)
	}, "testdata/scenarios")
	for _, e := range labEvents(t, dir) {
		t.Errorf("%s is asked although nobody reads:\n%s", e.str("file"), inWords(e))
	}
}

// TestBlind: where the system cannot tell who reads, the scenarios are asked as where it can, but for what is seen in nothing
// else: that an empty line is read, or that a line that looks like a question is only printed.
func TestBlind(t *testing.T) {
	last := func(dir string) map[string]string {
		kinds := map[string]string{}
		for _, e := range labEvents(t, dir) {
			if e.str("idle") == "false" {
				kinds[e.str("file")] = askedAs(e)
			}
		}
		return kinds
	}
	known := last("testdata/scenarios")
	unknown := last(filepath.Join(copied(t, blind, "testdata/scenarios", "testdata/recordings"),
		"scenarios"))
	wrong := 0
	for file, kind := range known {
		if unknown[file] != kind {
			wrong++
			t.Logf("%s: %q, where it is known %q", file, unknown[file], kind)
		}
		delete(unknown, file)
	}
	if len(known) < 60 || wrong > 3 || len(unknown) > 10 {
		t.Errorf("of %d questions %d are read otherwise, and %d are asked that are none: %q",
			len(known), wrong, len(unknown),
			slices.Sorted(maps.Keys(unknown)))
	}
}

// TestRecordings: over the shared recordings the figures of score.py are what they were: testdata/figures.txt.
func TestRecordings(t *testing.T) {
	needTool(t, "python3")
	t.Parallel()
	shared := filepath.Join(cmp.Or(os.Getenv("ATLASBRIDGE_SHARED"), "../shared"), "recordings")
	if _, err := os.Stat(shared); err != nil {
		t.Skip("no shared recordings (set ATLASBRIDGE_SHARED):", err)
	}
	if raceDetector() {
		t.Skip("without the race detector, which takes a minute for it")
	}
	got := map[string]map[string]map[string]any{}
	for what, dir := range map[string]string{"seen": shared, "blind": copied(t, blind, shared)} {
		_, out, _ := cli(t, t.TempDir(), "lab", "--json", dir)
		events := filepath.Join(t.TempDir(), "events")
		makeFile(t, out, events)
		scored, err := exec.Command("python3", filepath.Join(shared, "score.py"),
			filepath.Join(shared, "index.jsonl"), events).Output()
		t.Logf("%s: %s", what, scored)
		var figures map[string]map[string]any
		if err == nil {
			err = json.Unmarshal(scored, &figures)
		}
		if err != nil {
			t.Fatal(err)
		}
		got[what] = figures
	}
	for _, r := range table(t, "figures.txt") {
		share, ok := got[r["recordings"]][r["source"]][r["figure"]].(float64)
		least, leastErr := strconv.ParseFloat(r["least"], 64)
		most, mostErr := strconv.ParseFloat(r["most"], 64)
		if !ok || leastErr != nil || mostErr != nil || share < least || share > most {
			t.Errorf("%s: %v %%, it was %s to %s %%", r["at"], share, r["least"], r["most"])
		}
	}
}

// TestExamples: a scenario expects what it says, and of several expectations that fail the lab tells the first one.
func TestExamples(t *testing.T) {
	dir := t.TempDir()
	for _, b := range blocks(t, "examples.txt") {
		file := filepath.Join(dir, "example.json")
		makeFile(t, b.parts[""], file)
		code, _, errs := cli(t, dir, "lab", file)
		wrong, bad := b.parts["wrong"]
		if bad != (code == 1) || !strings.Contains(errs, strings.TrimSpace(wrong)) {
			t.Errorf("%s: %s: exit %d, %q, want %q", b.at, b.name, code, errs, wrong)
		}
	}
}

// TestLab: lab prints an event as documented, explains it, shows the screen, and fails for what it cannot read.
func TestLab(t *testing.T) {
	for _, r := range table(t, "lab.txt") {
		args := strings.ReplaceAll(r["args"], "CAST", "testdata/recordings/generic-tune2fs.cast")
		code, out, errs := cli(t, t.TempDir(), append([]string{"lab"}, strings.Fields(args)...)...)
		if code != digits(r["exit"]) || !matches(r["says"], out) {
			t.Errorf("%s: lab %s: exit %d: %s%s", r["at"], args, code, out, errs)
		}
	}
}

// FuzzTape: any recording or scenario is refused or replayed, and asks nothing that passes a limit.
func FuzzTape(f *testing.F) {
	f.Add(".cast", "{\"version\":2,\"width\":80,\"height\":24}\n[0.1,\"o\",\"Go? [y/N] \"]\n[0.2,\"t\",\"reading canon echo\"]\n[1,\"r\",\"40x10\"]\n")
	f.Add(".json", `{"tool":"claude","pty_output":"Go? (y/n) ","expected_type":"TYPE_YES_NO"}`)
	far := regexp.MustCompile(`\d{3}|\d[eE]|"r"`) // what takes long
	f.Fuzz(func(t *testing.T, ext, text string) {
		name := "tape"
		if ext == ".json" {
			name += ext
		}
		file := filepath.Join(t.TempDir(), name)
		if far.MatchString(text) {
			return
		}
		makeFile(t, text, file)
		for _, e := range labEvents(t, file) {
			waitsSafely(t, e)
		}
	})
}

// BenchmarkDetector replays the project's recordings.
func BenchmarkDetector(b *testing.B) {
	for b.Loop() {
		cli(b, b.TempDir(), "lab", "testdata/recordings")
	}
}

// ---- detect.go: turns ----
// What an agent's turn came to is told once.

// TestEndOfATurnIsTold: the end of a turn is told with what the tool's Stop hook gave for that turn, and for no other; it
// rings, unless somebody is at the keyboard and not at the phone; that a tool is ready is not told.
func TestEndOfATurnIsTold(t *testing.T) {
	needUnix(t)
	t.Parallel()
	w, c, dir, x := claudeSession(t, "away_after_seconds = 2\nnotify_idle = true",
		play{Asks: []ask{{Command: "touch x", Paint: -1}}})
	finished := regexp.MustCompile(`(?s)claude finished.*?(That is done\.|$)`)
	told := func(want string) {
		t.Helper()
		w.await(t, "the ends of all turns are told as "+want, func() bool {
			all := ""
			for _, r := range w.calls {
				said := finished.FindStringSubmatch(fmt.Sprint(r.p["text"]))
				if r.method == "sendMessage" && said != nil {
					all += fmt.Sprintf("%q, silent: %v; ", said[1], r.p["disable_notification"] == true)
				}
			}
			return all == want
		})
	}
	w.tap(w.find("touch x", yesButton), yesButton)
	first := `"That is done.", silent: false; `
	told(first)
	answer := awaitRecord(t, dir, "input", "the answer", func(r record) bool { return r.str("kind") == "answer" })
	if answer.str("text") != "" {
		t.Errorf("the answer is kept elsewhere than in its notice: %v", answer)
	}
	awaitRecord(t, dir, "prompt", "the answer", func(r record) bool { return r.str("full") == "That is done." })
	x.types("hello\r")
	c.until("message", -1)
	told(first + `"", silent: true; `)
	w.writes("more", 0)
	told(first + `"", silent: true; "", silent: false; `)
	if strings.Contains(w.texts(), "is ready") {
		t.Error("that it is ready is told")
	}
}

// TestEndOfAProgramRings: the end of a program rings, unless somebody is at the keyboard, where it has just been started.
func TestEndOfAProgramRings(t *testing.T) {
	needUnix(t)
	t.Parallel()
	for away, silent := range map[int]any{0: nil, 60: true} {
		w := newBotAPI(t)
		bridge(t, home(t, w.config(fmt.Sprint("away_after_seconds = ", away))), "run", "sh", "-c",
			"exit 3").exits(3)
		if end := w.until(t, "sendMessage", "exit 3|failed|✗"); end.p["disable_notification"] != silent {
			t.Errorf("away after %d s: %v", away, end.p)
		}
	}
}

// ---- the terminal ----
// Running a tool through atlasbridge is indistinguishable from running it directly.

// TestTerminal: what a tool shows, what it gets and how it ends are the same with us and without us; the rows say what.
func TestTerminal(t *testing.T) {
	t.Parallel()
	needUnix(t)
	beside(t, blocks(t, "terminal.txt"), func(t *testing.T, b block) {
		if need := b.parts["needs"]; strings.Contains(need, "linux") {
			needLinux(t)
		}
		needTool(t, strings.Fields("bash "+strings.ReplaceAll(b.parts["needs"], "linux", ""))...)
		want := strings.ReplaceAll(regexp.QuoteMeta(b.parts["shows"]), "…", "(?s:.*)")
		with := playTerminal(t, b, true)
		if got := strings.ReplaceAll(with, "\r", ""); !regexp.MustCompile(`^` + strings.TrimRight(want, "\n") + `\n*$`).MatchString(got) {
			t.Errorf("%s shows\n%s\nwant\n%s", b.at, got, b.parts["shows"])
		}
		if b.parts["alone"] == "" {
			if without := playTerminal(t, b, false); without != with {
				t.Errorf("%s: with us …%q, without us …%q",
					b.at, with[max(0, len(with)-900):], without[max(0, len(without)-900):])
			}
		}
	})
}

// reShellNotes are what bash says of a job that a signal ended.
var reShellNotes = regexp.MustCompile(`((?m)^\[1\][+ ].*|(\w+: line \d+: +\d+ )?(Terminated|Killed|Aborted|Quit|Hangup|Segmentation fault)( .*)?)\r?\n`)

// playTerminal runs a case of terminal.txt, with or without us, and returns what it shows and the exit status.
func playTerminal(t *testing.T, b block, with bool) (shown string) {
	t.Helper()
	dir, state := t.TempDir(), home(t, "")
	ab, begin := `exec "$@"`, "set -m; trap : INT\n"
	if with {
		ab = `ATLASBRIDGE_TEST_CHILD=main exec "$TEST_BINARY" run --quiet "$@"`
	}
	writeProgram(t, filepath.Join(dir, "ab"), "#!/bin/sh\necho $$ >'"+dir+"/pid'\n"+ab+"\n")
	env := append(ptyEnv(""), "ATLASBRIDGE_HOME="+state, "PATH="+dir+":"+os.Getenv("PATH"))
	reader := `$| = 1; open F, ">tool"; print F "$$\n"; close F; $SIG{CONT} = sub { print "back ", qx(stty size) };
		print "up\n"; vec($r, 0, 1) = 1; for (;;) { # it never waits for long: a signal may come before that
		if (select($v = $r, undef, undef, 0.05) > 0) { sysread(STDIN, $b, 99) or exit $ARGV[0]; chomp $b; print "[$b]\n" } }`
	writeProgram(t, filepath.Join(dir, "reader"), "#!/usr/bin/env perl\n"+reader+"\n")
	t.Cleanup(func() { endAll(processesOf(state)...) })
	var out io.Reader
	var p PTY
	var wait func() int
	if script := b.parts["no terminal"]; script != "" {
		cmd := exec.Command("dash", "-c", script)
		cmd.Dir, cmd.Env = dir, env
		pipe, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		out = pipe
		wait = func() int { cmd.Wait(); return cmd.ProcessState.ExitCode() } // its exit status says all
	} else {
		begin += "modes=$(stty -g); same() { [ \"$modes\" = \"$(stty -g)\" ] && echo same || stty -a; }\n"
		p = mustPTYIn(t, dir, env, "dash", "-c", begin+b.parts["script"])
		out, wait = p, p.Wait
	}
	at := 0
	for step := range strings.Lines(b.parts["keys"]) {
		after, does, _ := strings.Cut(strings.TrimSuffix(step, "\n"), " → ")
		after, does = keysOf(after), keysOf(does)
		for buf := make([]byte, 4096); !strings.Contains(shown[at:], after); {
			n, err := out.Read(buf)
			shown += string(buf[:n])
			if err != nil {
				t.Fatalf("%s: it never shows %q, but %q", b.at, after, shown)
			}
		}
		at += strings.Index(shown[at:], after) + len(after)
		word, special := strings.CutPrefix(does, "(")
		word = strings.TrimSuffix(word, ")")
		verb, rest, _ := strings.Cut(word, " ")
		value, text, _ := strings.Cut(rest, " ")
		var rows, cols uint16
		n, _ := fmt.Sscanf(word, "%dx%d", &rows, &cols)
		switch {
		case !special:
			typeIn(t, p, does)
		case n == 2:
			p.Resize(Size{Rows: rows, Cols: cols})
		case verb == "go":
			writeProgram(t, filepath.Join(dir, "go"), "")
		case verb == "asked":
			awaitPrompt(t, state, value, "awaiting_reply")
		case verb == "answer" && with:
			id := awaitPrompt(t, state, text, "awaiting_reply").str("id")
			if code, _, errs := cli(t, state, "answer", id, value); code != 0 {
				t.Fatalf("%s: %s", b.at, errs)
			}
		case verb == "answer":
			typeIn(t, p, value+"\r")
		default:
			pid, _ := os.ReadFile(filepath.Join(dir, "pid"))
			if out, err := exec.Command("kill", "-"+word, strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", b.at, err, out)
			}
		}
	}
	rest, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	return reShellNotes.ReplaceAllString(shown+string(rest), "") + fmt.Sprintf("exit %d", wait())
}

// keysOf is a text of terminal.txt as it is typed or shown.
func keysOf(text string) string {
	return strings.NewReplacer("⏎", "\r", `\n`, "\r\n", "^H", "\x08", "^Z", "\x1a", "^C", "\x03",
		"^D", "\x04", `^\`, "\x1c").Replace(text)
}

// endAll kills processes, which may have ended.
func endAll(pids ...int) {
	for _, pid := range pids {
		if p, err := os.FindProcess(pid); err == nil {
			p.Kill()
		}
	}
}

// TestEveryByteBothWays: 1 MiB, every byte after every other, comes back unchanged from a tool in raw mode, while as much is
// still typed.
func TestEveryByteBothWays(t *testing.T) {
	t.Parallel()
	var all []byte
	for i := range 8 * 256 * 256 {
		all = append(all, byte(i>>8), byte(i))
	}
	echo := fmt.Sprintf("stty raw -echo; echo ready; head -c %d", len(all))
	env := append(ptyEnv("main"), "ATLASBRIDGE_HOME="+home(t, ""))
	p := mustPTYIn(t, "", env, os.Args[0], "run", "--quiet", "sh", "-c", echo)
	readUntil(t, p, "ready\n")
	wrote := make(chan error, 1)
	go func() {
		_, err := p.Write(all)
		wrote <- err
	}()
	out, code := readAll(t, p)
	if err := <-wrote; err != nil || out != string(all) || code != 0 {
		t.Errorf("%d bytes came back of the %d that were typed; exit %d, %v",
			len(out), len(all), code, err)
	}
}

// TestDoesItRead: whether a program waits for its terminal is known, whatever call it waits in; what the system does not
// show is unknown, never busy.
func TestDoesItRead(t *testing.T) {
	t.Parallel()
	needLinux(t)
	beside(t, table(t, "reading.txt"), func(t *testing.T, r row) {
		needTool(t, strings.Fields(r["needs"])...)
		dir := home(t, "")
		argv, env := []string{os.Args[0]}, ptyEnv("main")
		if where := r["nobody, where"]; where != "" {
			argv, dir = asNobody(t, where)
			env = append(env, "SH="+filepath.Join(dir, "sh"))
			dir = filepath.Join(dir, "state")
		}
		cast := filepath.Join(dir, "cast")
		ask, program := "printf 'Continue? (y/n) '", r["program"]
		if !strings.Contains(program, "ASK") {
			program = "ASK; " + program
		}
		argv = append(argv, "run", "--quiet", "--record", cast, "sh", "-c", strings.Replace(program, "ASK", ask, 1))
		x := inTerminal(t, append(env, "ATLASBRIDGE_HOME="+dir), argv...)
		if reading, _, _ := strings.Cut(r["state"], " "); reading == "busy" {
			x.exits(0)
		} else {
			asked := awaitPrompt(t, dir, "Continue?", "awaiting_reply")
			if confirmed := strings.Contains(asked.str("signals"), "tty"); confirmed != (reading == "reading") {
				t.Errorf("%s: asked because of %s", r["at"], asked.str("signals"))
			}
			x.signal("TERM")
			x.exits(143)
		}
		text := textOf(t, cast)
		asks := len(records(t, dir, "prompt")) > 0
		if !strings.Contains(text, fmt.Sprintf("%q, %q", "t", r["state"])) || asks && strings.HasPrefix(r["state"], "busy canon") {
			t.Errorf("%s: %s is never the state, asked: %v\n%s", r["at"], r["state"], asks, text)
		}
	})
}

// TestWrittenCountsAtOnce: what a program wrote before it reads on counts as output, also while the kernel still has it
// on its way to us: a key must not be typed at a question behind that.
func TestWrittenCountsAtOnce(t *testing.T) {
	needUnix(t)
	written := filepath.Join(t.TempDir(), "written")
	p := mustPTYIn(t, "", append(ptyEnv(""), "WRITTEN="+written), "sh", "-c",
		`stty -echo; printf ready; while read a; do printf x; echo >>"$WRITTEN"; done`)
	came, late := int64(len(readUntil(t, p, "ready"))), 0
	for i := range int64(200) {
		typeIn(t, p, "\r")
		for size := int64(0); size <= i; {
			if info, err := os.Stat(written); err == nil {
				size = info.Size()
			}
		}
		if p.Came() != came+i+1 {
			late++
		}
		readUntil(t, p, "x")
	}
	if late > 0 {
		t.Errorf("%d of 200 letters did not count when they were written", late)
	}
}

// TestNeighbourSetsNonBlocking: another process that has the host's terminal may set it to O_NONBLOCK: every key typed
// after that still arrives, all of the output reaches the terminal, and the child ends by itself.
func TestNeighbourSetsNonBlocking(t *testing.T) {
	t.Parallel()
	needUnix(t)
	needTool(t, "python3")
	dir := t.TempDir()
	for _, fifo := range []string{"go", "done"} {
		out, err := exec.Command("mkfifo", filepath.Join(dir, fifo)).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	const (
		line      = "0123456789abcde"
		lines     = 1 << 20 / (len(line) + 1)
		neighbour = `import os
open("go").read()
os.set_blocking(1, False)
open("done", "w").write("set\n")`
		child = `echo ready; read a; echo x > go; cat done; read b; echo "[$a][$b]"
			yes "$LINE" | head -n "$LINES_WANTED"; echo "the end"; exit 7`
	)
	env := append(ptyEnv("main"), "ATLASBRIDGE_HOME="+home(t, ""), "LINE="+line,
		fmt.Sprint("LINES_WANTED=", lines), "NEIGHBOUR="+neighbour, "CHILD="+child)
	p := mustPTYIn(t, dir, env, "sh", "-c",
		`python3 -c "$NEIGHBOUR" & exec "$TEST_BINARY" run sh -c "$CHILD"`)
	readUntil(t, p, "ready")
	typeIn(t, p, "a\r")
	readUntil(t, p, "set")
	for _, key := range []string{"o", "n", "e"} {
		typeIn(t, p, key)
		readUntil(t, p, key)
	}
	typeIn(t, p, "\r")
	answer := readUntil(t, p, "[a][one]")
	begin := make([]byte, 16<<10)
	for i := range begin { // so slowly that the terminal is full
		if _, err := p.Read(begin[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	rest, code := readAll(t, p)
	all := answer + string(begin) + rest
	if n := strings.Count(all, line); n != lines || !strings.Contains(all, "the end") || code != 7 {
		t.Errorf("%d lines of %d, exit %d, at the end %q", n, lines, code,
			all[max(0, len(all)-200):])
	}
}

// ---- files and locks ----
// What is kept is for the user alone, may be used by several processes, and is on the disk when that is said.

// ---- pty: Windows ----
// The same promises on the other system.

// TestWindowsPTY: on Windows a program has a console of its own, in which it is typed to, sized and ended.
func TestWindowsPTY(t *testing.T) {
	needWindows(t)
	start := func(argv ...string) PTY {
		return mustPTYIn(t, "", append(os.Environ(), "FOO=bär 😀"), argv...)
	}
	out, code := readAll(t, start("cmd.exe", "/c", "echo hello %FOO%& exit 3"))
	if !strings.Contains(out, "hello bär") || code != 3 {
		t.Errorf("%q, exit %d", out, code)
	}
	p := start("cmd.exe", "/q", "/k", "echo up")
	readUntil(t, p, "up")
	typeIn(t, p, "echo 1%FOO:~0,0%2\r")
	readUntil(t, p, "12")
	if err := p.Resize(Size{Rows: 40, Cols: 120}); err != nil {
		t.Log("resizing (wine cannot):", err)
	}
	typeIn(t, p, "exit 7\r")
	if _, code := readAll(t, p); code != 7 {
		t.Errorf("exit %d, want 7", code)
	}
	p = start("cmd.exe", "/q", "/k", "echo up")
	readUntil(t, p, "up")
	go io.Copy(io.Discard, p)
	p.Signal(os.Kill)
	p.Wait()
	if err := p.Signal(os.Kill); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a signal after the end: %v", err)
	}
}

// TestWindowsPrivate: on Windows, too, what others can reach is refused; who may reach all files anyway is no other.
func TestWindowsPrivate(t *testing.T) {
	needWindows(t)
	if os.Getenv("WINEUSERNAME") != "" {
		t.Skip("wine's icacls does nothing: see TestWindowsUnderWine")
	}
	for args, code := range map[string]int{
		"/grant *S-1-5-32-544:F":        0, // administrators
		"/deny *S-1-1-0:(W)":            0, // everybody
		"/grant *S-1-3-0:(OI)(CI)(IO)F": 0, // CREATOR OWNER
		"/grant *S-1-1-0:(OI)(CI)(IO)R": 0, // what inherits is not ours
		"/grant *S-1-1-0:R":             1,
		"/grant *S-1-5-11:M":            1, // who has signed in
	} {
		dir := filepath.Join(t.TempDir(), "state")
		cli(t, dir, "ask", "--timeout", "1s", "Really?")
		out, err := exec.Command("icacls", append([]string{dir}, strings.Fields(args)...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if got, _, errs := cli(t, dir, "status"); got != code {
			t.Errorf("after icacls %s: exit %d, want %d; %s", args, got, code, errs)
		}
	}
}

// TestWindowsUnderWine: where wine is, the Windows program's own tests pass, and with the usual umask and a strict one
// no command refuses what another made. What others may read is refused.
func TestWindowsUnderWine(t *testing.T) {
	t.Parallel()
	needLinux(t)
	needTool(t, "wine")
	needTool(t, "go")
	library, _ := filepath.Glob("/usr/lib/*/wine/x86_64-windows") // the pattern is right
	if len(library) == 0 || runtime.GOARCH != "amd64" {
		t.Skip("needs a wine of 64 bits, as Debian has it")
	}
	program := filepath.Join(t.TempDir(), "test.exe")
	build := exec.Command("go", "test", "-c", "-vet=off", "-o", program, ".")
	build.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, umask := range []string{"022", "077"} {
		t.Run("umask "+umask, func(t *testing.T) {
			home, run := newWine(t, library[0], umask, program)
			for _, r := range table(t, "wine.txt") {
				t.Run(r["args"], func(t *testing.T) {
					out, code := run(t, "main", strings.Fields(r["args"])...)
					words := strings.Join(strings.Fields(out), "") // its console has 80 columns
					if code != digits(r["exit"]) || !strings.Contains(words, strings.ReplaceAll(r["says"], " ", "")) {
						t.Errorf("exit %d, %q; want %s, %q", code, out, r["exit"], r["says"])
					}
				})
			}
			for _, name := range []string{".", "state.lock"} {
				t.Run("others read "+name, func(t *testing.T) {
					path := filepath.Join(home, name)
					info, err := os.Stat(path)
					if err != nil {
						t.Fatal(err)
					}
					os.Chmod(path, info.Mode()|0o005)
					defer os.Chmod(path, info.Mode())
					out, code := run(t, "main", "status")
					words := strings.Join(strings.Fields(out), "") // its console has 80 columns
					if code == 0 || !strings.Contains(words, "canbereachedbyothers") {
						t.Errorf("exit %d, %q", code, out)
					}
				})
			}
			t.Run("tests", func(t *testing.T) {
				out, code := run(t, "", "-test.v", "-test.run=^TestWindows")
				if code != 0 || !strings.Contains(out, "PASS: TestWindowsPTY") {
					t.Errorf("exit %d, %s", code, out)
				}
			})
		})
	}
}

// ---- main.go: session ----
// What the loop does with bytes, questions and time, without a terminal.

// TestCleanText lets nothing through that a terminal, a line discipline or a paste would act on.
func TestCleanText(t *testing.T) {
	for text, want := range map[string]string{
		"hello":                      "hello",
		"two\r\nlines\n":             "two\nlines",
		"end\x1b[201~; rm -rf /":     "end[201~; rm -rf /",
		"a\x03b\x04c\x15d\x16e\x7ff": "abcdef",
		"c1\u0085\u009bx":            "c1x",
		"tab\tünï 日本 🎉":              "tab\tünï 日本 🎉",
		"bad\xff\xfeutf8":            "badutf8",
		strings.Repeat("ä", 5000):    strings.Repeat("ä", 2047),
	} {
		if got := cleanText(text); got != want {
			t.Errorf("cleanText(%.40q) = %.60q, want %.60q", text, got, want)
		}
	}
	for r := rune(0); r < 0x20; r++ {
		got := cleanText("x" + string(r) + "y")
		if r != '\n' && r != '\r' && r != '\t' && got != "xy" {
			t.Errorf("control character %#x gets through: %q", r, got)
		}
	}
}

// ---- the whole program: sessions ----
// A tap does what was read, and silence does nothing.

// TestKeysOfAnAnswer: each kind of question gets the keys that its program takes for that answer, and no others.
func TestKeysOfAnAnswer(t *testing.T) {
	playRows(t, "typed.txt", "paint a\nasked\nanswer ANSWER\ngets TYPED\nends resolved")
}

// TestWaitingDecidesNothing: what nobody answers gets a refusal where one is known, Enter where it is bare, else nothing.
func TestWaitingDecidesNothing(t *testing.T) {
	playRows(t, "waiting.txt", "config timeout_seconds = 3\nconfig permission_timeout_seconds = 3\n"+
		"paint a\nasked\ngets TYPED\nends expired no answer in 3 s")
}

// playRows plays the steps for each row of a table: its screen is "a", its mode comes first, and its other columns stand for
// their names in capitals.
func playRows(t *testing.T, file, steps string) {
	needUnix(t)
	t.Parallel()
	beside(t, table(t, file), func(t *testing.T, r row) {
		lines := strings.NewReplacer("paint a", r["mode"]+"\npaint a", "ANSWER", r["answer"],
			"TYPED", strconv.Quote(r["typed"])).Replace(steps)
		playScene(t, map[string]string{"": lines, "a": r["screen"]})
	})
}

// TestScenes: what is typed at a program is what somebody decided about what they saw.
func TestScenes(t *testing.T) {
	t.Parallel()
	for _, file := range inFolder("testdata/scenes", "*.txt") {
		name := filepath.Base(file)
		t.Run(name, func(t *testing.T) { playScenes(t, "scenes/"+name) })
	}
}

// TestHungUp: when the terminal has gone, or who gave it to us, or at SIGTERM, tool and wrapper end, whatever the tool
// ignores, whoever does not read and whoever writes on; nohup keeps both, and so does a SIGHUP while all is there.
func TestHungUp(t *testing.T) {
	t.Parallel()
	needUnix(t)
	for _, b := range blocks(t, "hungup.txt") {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			dir := home(t, b.parts["config"])
			env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir, "PS1=ready$ ",
				"HISTFILE=/dev/null")
			x := inTerminal(t, env, "bash", "--norc", "--noprofile", "-i")
			x.sees("ready$")
			needToolsOf(t, []string{b.parts[""]})
			x.types(strings.Replace(strings.TrimSpace(b.parts[""]), "RUN", `"$TEST_BINARY" run --quiet`,
				1) + "\r")
			wrapper, tool := sessionRuns(t, dir)
			t.Cleanup(func() { x.kill(wrapper, syscall.SIGKILL) })
			switch happens, _, _ := strings.Cut(b.name, ","); happens {
			case "shell killed":
				x.signal("KILL")
			case "closed":
				x.pty.Close()
			default:
				signals(t, wrapper, strings.TrimPrefix(happens, "SIG"))
			}
			if _, lives := b.parts["lives"]; lives {
				x.kill(wrapper, syscall.SIGHUP) // once more: the first has been dealt with
				comesTrue(t, "SIGHUP is dealt with", func() bool {
					return b.name == "closed, nohup" || len(entries(t, dir, "CONFIG_RELOADED")) > 0
				})
				if !running(tool) || !running(wrapper) {
					t.Error("it has ended")
				}
				return
			}
			comesTrue(t, "both end", func() bool { return !running(wrapper) && !running(tool) })
			if r := records(t, dir, "session")[0]; r.str("status") != "terminated" || r["exit_code"] == nil {
				t.Errorf("recorded as %q, exit %v; want terminated, and how", r["status"], r["exit_code"])
			}
		})
	}
}

// sessionRuns waits for the only session of a state folder, and returns its processes.
func sessionRuns(t *testing.T, dir string) (wrapper, tool int) {
	t.Helper()
	r := awaitRun(t, dir, "")
	return int(numberOf(r, "wrapper")), int(numberOf(r, "pid"))
}

// TestTerminated: SIGTERM ends tool and wrapper, though nobody reads what the terminal gets, and the tool ignores it.
func TestTerminated(t *testing.T) {
	t.Parallel()
	needUnix(t)
	needTool(t, "yes", "bash")
	dir := home(t, "")
	p := mustPTYIn(t, "", append(ptyEnv("main"), "ATLASBRIDGE_HOME="+dir), os.Args[0], "run", "--quiet", "bash",
		"-c", `trap "" TERM HUP; yes`)
	_, tool := sessionRuns(t, dir)
	if _, err := p.Read(make([]byte, 1)); err != nil { // bash has set its trap
		t.Fatal(err)
	}
	p.Signal(syscall.SIGTERM)
	if code := p.Wait(); code != 137 || running(tool) {
		t.Errorf("exit %d, or the tool runs", code)
	}
}

// TestOutputThatNobodyLookedAt: an answer is not typed while output that was read, but not looked at, may have changed the
// screen.
func TestOutputThatNobodyLookedAt(t *testing.T) {
	t.Parallel()
	needUnix(t)
	c := newPuppet(t, "tool", "puppet")
	dir := home(t, "")
	stall := filepath.Join(t.TempDir(), "stall")
	env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=stall "+stall, "ATLASBRIDGE_HOME="+dir)
	inTerminal(t, env, os.Args[0], "run", c.tool)
	c.show("a", "Delete a.txt? (y/n) ")
	id := awaitPrompt(t, dir, "Delete a.txt", "awaiting_reply").str("id")
	makeFile(t, "", stall)
	c.show("b", "\x1b[H\x1b[JDelete b.txt? (y/n) ")
	if code, _, says := cli(t, dir, "answer", id, "y"); code != 0 {
		t.Fatalf("the answer is refused: %s", says)
	}
	p := awaitRecord(t, dir, "prompt", "the end of the first question", func(r record) bool {
		return r.str("id") == id && r.str("status") != "awaiting_reply" && r.str("status") != "reply_received"
	})
	if keys := c.keysAt("b"); keys != "" || p.str("status") != "failed" {
		t.Errorf("the question that left became %s, and %q answered what was not shown",
			p.str("status"), keys)
	}
}

// TestPanics: a panic in whichever goroutine of a session puts the terminal back, ends a tool that ignores it, and says
// where it was.
func TestPanics(t *testing.T) {
	t.Parallel()
	needLinux(t)
	for _, where := range []string{"State", "Read", "getUpdates", "setMyCommands", "sendMessage"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			dir := home(t, newBotAPI(t).config(""))
			env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=panic "+where, "ATLASBRIDGE_HOME="+dir)
			x := inTerminal(t, env, os.Args[0], "run", "--stream", "bash", "-c",
				`trap "" TERM HUP; while :; do sleep 1; echo x; done`)
			x.exits(2) // Go's, of a panic
			if shown := x.shown(); !strings.Contains(shown, ".go:") {
				t.Errorf("it shows %s", shown)
			}
			if modes := x.pty.State(); !modes.Canonical || !modes.Echo {
				t.Errorf("the terminal is left as %+v", modes)
			}
			comesTrue(t, "nothing goes on", func() bool { return len(processesOf(dir)) == 0 })
		})
	}
}

// A terminal that is closed, or a SIGTERM that comes, at any moment of a start leaves no process, and no session that seems
// to live. ATLASBRIDGE_TEST_ROUNDS says how many are ended.
func TestClosedAtStart(t *testing.T) {
	t.Parallel()
	needLinux(t)
	tools := []string{"cat", "yes", `trap "" HUP; sleep 1000; :`, `trap "" HUP TERM; while :; do sleep 1000; done`,
		"read -p 'Go on? (y/n) ' a", "sleep 1000 & sleep 1000"}
	beside(t, make([]struct{}, rounds(t)), func(t *testing.T, _ struct{}) {
		chance := dice(t)
		dir := home(t, "")
		tool := tools[chance.IntN(len(tools))]
		x := bridge(t, dir, "run", "bash", "-c", tool)
		moment := time.Duration(chance.IntN(150)) * time.Millisecond
		<-time.After(moment)
		how := "closed"
		if chance.IntN(2) == 0 {
			how = "SIGTERM"
			x.kill(x.pty.PID(), syscall.SIGTERM)
		} else {
			x.pty.Close()
		}
		comesTrue(t, fmt.Sprintf("all end, %s %v after the start of %s", how, moment, tool), func() bool {
			return len(processesOf(dir)) == 0
		})
		for _, r := range records(t, dir, "session") {
			if r.str("status") == "active" || r["exit_code"] == nil {
				t.Errorf("%s %v after the start of %s, it is recorded as %q, exit %v",
					how, moment, tool, r["status"], r["exit_code"])
			}
		}
	})
}

// dice are those of ATLASBRIDGE_TEST_SEED, else of a seed that a failure tells.
func dice(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if given := os.Getenv("ATLASBRIDGE_TEST_SEED"); given != "" {
		fmt.Sscan(given, &seed)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("replay with ATLASBRIDGE_TEST_SEED=%d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// However early a terminal is resized while a session starts, the tool ends up with the last size, and the terminal as
// it was. ATLASBRIDGE_TEST_ROUNDS says how many are started.
func TestResizedAtStart(t *testing.T) {
	t.Parallel()
	needUnix(t)
	script := `until [ -e "$0" ]; do stty size; sleep 0.02; done; echo "end $(stty size) end"`
	beside(t, make([]struct{}, rounds(t)), func(t *testing.T, _ struct{}) {
		chance := dice(t)
		dir := home(t, "")
		end := filepath.Join(dir, "end")
		x := bridge(t, dir, "run", "bash", "-c", script, end)
		var last Size
		for range 3 {
			moment := time.Duration(chance.IntN(40)) * time.Millisecond
			<-time.After(moment)
			last = Size{Rows: uint16(10 + chance.IntN(10)), Cols: uint16(30 + chance.IntN(40))}
			if err := x.pty.Resize(last); err != nil {
				t.Fatal(err)
			}
		}
		size := fmt.Sprintf("%d %d", last.Rows, last.Cols)
		x.sees(size)
		makeFile(t, "", end)
		x.sees("end " + size + " end")
		x.exits(0)
		if modes := x.pty.State(); !modes.Canonical || !modes.Echo {
			t.Errorf("the terminal is left as %+v", modes)
		}
	})
}

// TestStreamOfAnAgent: with --stream what an agent says reaches the phone when its turn ends, each word once, though
// nothing more is printed; the picture above it, which may move, does not.
func TestStreamOfAnAgent(t *testing.T) {
	needUnix(t)
	t.Parallel()
	const given = "\n\n❯ hello\n\n"
	type row struct {
		name     string
		pictures []string
		bodies   []string // one after the other
	}
	beside(t, []row{
		{"a picture", []string{" ▐▛███▜█   Claude"}, []string{given + "● word0 word1", given + "● word0 word1\n  word2"}},
		{"one that moves", []string{" ▐▛███▜█   Claude", " ▐▂███▂█   Claude"},
			[]string{given + "● word0 word1", given + "● word0 word1\n  word2"}},
		{"what it was given stays above words that leave", []string{""}, []string{given + "● word0 word1\n  word2\n  word3",
			given + "  word2\n  word3", given + "  word3\n  word4"}},
	}, func(t *testing.T, row row) {
		w, c, _, x := stageSession(t, "", "--stream", "--adapter", "claude")
		paint := func(n int, text, state string) {
			screen := picture(t, "claude", strings.ReplaceAll(row.pictures[n%len(row.pictures)]+text, "\n",
				"\r\n"), "")
			screen = strings.ReplaceAll(screen, strings.Repeat("─", 100), strings.Repeat("─", 80))
			c.order(order{Write: screen + "\x1b]7501;state=" + state + ":app=claude-code\x1b\\", Raw: n == 0})
		}
		paint(0, " ", "idle")
		x.sees("manual mode")
		x.types("hello\r")
		comesTrue(t, "the tool reads it", func() bool { return strings.Contains(c.log(), `hello\r`) })
		for _, body := range row.bodies {
			for n := range 4 {
				paint(n, body, "working")
				<-time.After(150 * time.Millisecond) // of the program's work: not waited for by the test
			}
		}
		paint(0, row.bodies[len(row.bodies)-1]+"\n\n✻ Baked for 1s · done 4:02 PM\n", "done")
		m := w.shows("word2", "")
		text := w.message(m.id).text
		said := regexp.MustCompile(`hello|word\d|▐`).FindAllString(text, -1)
		if want := []string{"hello", "word0", "word1", "word2", "word3", "word4"}; !slices.Equal(said, want[:len(said)]) ||
			len(said) < 4 {
			t.Errorf("the phone shows %q: %q", said, text)
		}
	})
}

// rounds is how often a race is run: a few times, or as often as ATLASBRIDGE_TEST_ROUNDS says.
func rounds(t *testing.T) int {
	n := 12
	if text := os.Getenv("ATLASBRIDGE_TEST_ROUNDS"); text != "" {
		fmt.Sscan(text, &n)
	}
	return n
}

// TestTextAboveAQuestionCounts: when anything above a question changes after it was shown, the old message's Yes types
// nothing and says why; a message of its own, with its own buttons, shows the new text, and its Yes answers that.
func TestTextAboveAQuestionCounts(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, filled(table(t, "above.txt"), "asks", "changes"), func(t *testing.T, r row) {
		w, c, dir, x := stageSession(t, "")
		before, after := r["before"], r["after"]
		menu, late := r["when"] == "menu", r["when"] == "late"
		keys := "y\n"
		if menu {
			keys = "\r"
		}
		c.order(order{Name: "a", Write: strings.Replace(r["asks"], "%s", before, 1), Raw: menu})
		m := w.find("Proceed?", yesButton)
		if !strings.Contains(m.text, before) {
			t.Errorf("the message does not show %q: %s", before, m.text)
		}
		c.show("b", strings.Replace(r["changes"], "%s", after, 1))
		x.sees(after)
		fresh := func() seen {
			return w.where(after+" in a message of its own", func(n seen) bool {
				_, ok := n.choice(yesButton)
				return ok && n.id != m.id && strings.Contains(n.text, after)
			})
		}
		if late {
			fresh()
		}
		tap := w.tap(m, yesButton)
		if said := w.answer(tap); late && !saysNothing.MatchString(said) {
			t.Errorf("the old button says %q", said)
		}
		over := w.where("the old message's end", func(n seen) bool {
			return n.id == m.id && len(n.buttons) == 0 && !strings.Contains(n.text, "on its way")
		})
		if saysAnswered.MatchString(over.text) {
			t.Fatalf("the old message's Yes answered %q", after)
		}
		w.unanswered(m.id, saysReplaced, saysLost)
		n := fresh()
		for label, data := range m.buttons {
			if n.buttons[label] == data {
				t.Errorf("button %q is the same in both messages", label)
			}
		}
		if keys := c.keys(); keys != "" || len(entries(t, dir, "REPLY_INJECTED")) > 0 {
			t.Errorf("the old button typed %q", keys)
		}
		w.tap(n, yesButton)
		c.reads("b", keys)
		if typed := c.keys(); typed != keys {
			t.Errorf("typed in all: %q", typed)
		}
	})
}

// TestWhatIsSeenMovingIsTheSame: a spinner or a time that counts beside a question does not make another question of it,
// and keeps no answer from it for more than three seconds.
func TestWhatIsSeenMovingIsTheSame(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, filled(table(t, "moving.txt"), "asks"), func(t *testing.T, r row) {
		w, c, dir, _ := stageSession(t, "")
		menu := r["menu"] != ""
		every := 100 * time.Millisecond
		from, step := 0, 0
		if n, _ := fmt.Sscan(r["seconds"], &from, &step); n > 0 { // else it is a spinner
			every = time.Second
		}
		frame := func(n int) string {
			if every < time.Second {
				return string([]rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")[n%10])
			}
			return fmt.Sprintf("(%ds)", from+step*n)
		}
		want := "y\n"
		if menu {
			want = "\r"
		}
		name, write := "ask", r["asks"]
		var m seen
		asked := func(one seen) bool {
			_, ok := one.choice(yesButton)
			return ok && strings.Contains(one.text, "Proceed?")
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		for n := 0; c.keysAt("ask") != want; n++ { // it never stops moving, whatever else is waited for
			c.order(order{Name: name, Write: write + "\x1b7" + r["at"] + frame(n) + "\x1b8", Raw: menu && n == 0})
			name, write = "", ""
			all := w.history()
			i := slices.IndexFunc(all, asked)
			switch moved := time.Duration(n) * every; {
			case moved > 16*time.Second+patience():
				t.Fatal("the tap is never typed")
			case m.id == 0 && moved >= 6*time.Second && i >= 0:
				m = all[i]
				w.tap(m, yesButton)
			}
			<-tick.C
		}
		w.ended(m.id, saysAnswered)
		if n := w.came("Proceed?"); n != 1 {
			t.Errorf("%d messages show it, not 1", n)
		}
		if code, said, _ := cli(t, dir, "audit", "verify"); code != 0 {
			t.Errorf("the audit log does not hold: %s", said)
		}
	})
}

// TestNothingUnseenIsAllowed: an answer that grants comes with all of what it is about, or after "Show all" did.
func TestNothingUnseenIsAllowed(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, table(t, "unseen.txt"), func(t *testing.T, r row) {
		w, c, _, _ := stageSession(t, "")
		text := ""
		for i := range digits(r["times"]) {
			text += fmt.Sprintf(r["line"], i)
		}
		c.order(order{Raw: r["mode"] == "raw", Name: "ask", Write: text + r["asks"]})
		m := w.where("a question", func(m seen) bool { return len(m.buttons) > 0 })
		missing := func() (list []string) {
			all := strings.Join(strings.Fields(w.texts()), "")
			for i := range digits(r["times"]) {
				if word := fmt.Sprintf("w%03d", i); !strings.Contains(all, word) {
					list = append(list, word)
				}
			}
			return list
		}
		if _, grants := m.choice(grantButton); !grants {
			if _, ok := m.choice(noButton); !ok && r["keys"] != "\n" {
				t.Errorf("it cannot be refused: %v", m.buttons)
			}
			w.tap(m, showAllButton)
			m = w.where("a Yes with all of it", func(m seen) bool {
				_, ok := m.choice(grantButton)
				return ok
			})
		}
		if list := missing(); len(list) > 0 {
			t.Errorf("%v can be tapped, and %d of %s words were never shown: %v",
				m.buttons, len(list), r["times"], list)
		}
		w.tap(m, grantButton)
		c.reads("ask", r["keys"])
	})
}

// TestPasswordToWhatIsNotRecorded: who replies with a password to a message that nobody knows was sent is asked to
// delete it, too.
func TestPasswordToWhatIsNotRecorded(t *testing.T) {
	needUnix(t)
	t.Parallel()
	w := newBotAPI(t)
	defer w.loses("Password:")()
	dir := home(t, w.config("free_text_enabled = true"))
	x := bridge(t, dir, "run", "bash", "-c", `read -s -p "Password: " p; echo; echo "[${#p}]"`)
	id := w.writes("hunter2", w.shows("Password:", "").id)
	w.until(t, "sendMessage", fmt.Sprintf(`"message_id":%d\}.*"✗ .*delete it`, id))
	x.types("abc\r")
	x.sees("[3]")
}

// TestResumedAtItsEnd: a session that is stopped and resumed while it sends its last messages sends all of them.
func TestResumedAtItsEnd(t *testing.T) {
	needUnix(t)
	t.Parallel()
	w := newBotAPI(t)
	dir := home(t, w.config("away_after_seconds = 0"))
	var pid atomic.Int64
	w.fault = func(method string, _ http.ResponseWriter) bool {
		if method == "editMessageText" {
			out, err := exec.Command("sh", "-c", fmt.Sprintf("kill -CONT %d", pid.Load())).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v", out, err)
			}
		}
		return false
	}
	c := newPuppet(t, "tool", "puppet")
	pid.Store(int64(bridge(t, dir, "run", c.tool).pty.PID()))
	c.show("ask", "Go? (y/n) ")
	m := w.find("Go?", yesButton)
	c.order(order{Exit: true})
	w.unanswered(m.id, saysLost)
	w.where("the end", func(m seen) bool { return strings.Contains(m.text, "tool\nended") })
}

// unlocked tells whether no process of a state folder holds a lock of it.
func unlocked(t *testing.T, dir, name string) bool {
	t.Helper()
	path := filepath.Join(dir, name)
	if runtime.GOOS != "linux" {
		needTool(t, "perl")
		return exec.Command("perl", "-e", `open F, "<", shift or exit; exit !flock F, 6`,
			path).Run() == nil
	}
	file, _ := os.Stat(path) // not there yet: nobody holds it
	for _, pid := range processesOf(dir) {
		for _, fd := range inFolder(fmt.Sprintf("/proc/%d/fd", pid), "*") {
			open, _ := os.Stat(fd) // it may be closed by now
			info, _ := os.ReadFile(strings.Replace(fd, "/fd/", "/fdinfo/", 1))
			if os.SameFile(file, open) && bytes.Contains(info, []byte("lock:")) {
				return false
			}
		}
	}
	return true
}

// TestNoKeyIsLost: whatever is typed arrives, all of it and in order, a question on the phone or not.
func TestNoKeyIsLost(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, []string{"ready", "Go? (y/n) "}, func(t *testing.T, shown string) {
		chance := dice(t)
		_, c, dir, x := stageSession(t, "")
		c.order(order{Raw: true, Name: "ask", Write: shown})
		if shown != "ready" {
			awaitPrompt(t, dir, "", "awaiting_reply")
		}
		want := ""
		for i := 0; len(want) < 3000; i++ {
			piece := fmt.Sprintf("%d,", i)[chance.IntN(2):]
			x.types(piece)
			want += piece
			<-time.After(time.Duration(chance.IntN(1500)) * time.Microsecond) // as fast as a paste over a slow line
		}
		c.await(t, "it read all", func() bool { return c.read() == want })
	})
}

// ---- bench: scenes ----
// What a program, a phone and a keyboard do, one step a line, in testdata/scenes.

// staged is a session under way: of a puppet, or of a shell's script.
type staged struct {
	t      *testing.T
	w      *botAPI
	c      *puppet // nil: a script
	x      *terminal
	dir    string
	parts  map[string]string // screens by their names
	want   string            // what the puppet is to read in all
	prompt string            // the question that was asked last, "" it is over
	over   []string          // those before
	m      seen              // the message that was looked for last
	tap    string            // the tap that was made last
	input  string            // the operator's message that came last
	exited bool              // the wrapper has
}

// playScenes plays every scene of a file, in a subtest each.
func playScenes(t *testing.T, file string) {
	needUnix(t)
	t.Parallel()
	all := blocks(t, file)
	shared := map[string]string{}
	if all[0].name == "screens" {
		shared = all[0].parts
		all = all[1:]
	}
	beside(t, all, func(t *testing.T, b block) {
		parts := maps.Clone(shared)
		maps.Copy(parts, b.parts)
		playScene(t, parts)
	})
}

// playScene starts what the scene wraps and plays its steps. Lines that begin it say with what: "config", "flags", and
// "bash" for a script instead of a puppet; "beside" is a session before it, which polls. At the end it presses "%": what a puppet read before that is all there was.
func playScene(t *testing.T, parts map[string]string) {
	t.Helper()
	lines := strings.Split(strings.TrimRight(parts[""], "\n"), "\n")
	begin := map[string]string{}
	beginnings := []string{"config", "flags", "bash", "beside"}
	for verb, arg, _ := strings.Cut(lines[0], " "); slices.Contains(beginnings, verb); verb, arg, _ = strings.Cut(lines[0], " ") {
		begin[verb] += arg + "\n"
		lines = lines[1:]
	}
	for _, usual := range []string{"away_after_seconds = 0\n", "free_text_enabled = true\n"} {
		name, _, _ := strings.Cut(usual, " ")
		if !strings.Contains(begin["config"], name) {
			begin["config"] += usual
		}
	}
	s := &staged{t: t, w: newBotAPI(t), parts: parts}
	s.dir = home(t, s.w.config(begin["config"]))
	if begin["beside"] != "" {
		bridge(t, s.dir, "run", "sleep", "1000")
		awaitRun(t, s.dir, "")
	}
	args := append([]string{"run"}, strings.Fields(begin["flags"])...)
	if script := begin["bash"]; script != "" {
		needTool(t, "bash")
		args = append(args, "bash", "-c", script)
	} else {
		s.c = newPuppet(t, "tool", "puppet")
		args = append(args, s.c.tool)
	}
	s.x = bridge(t, s.dir, args...)
	s.play(lines)
	if s.c != nil && s.c.count("gone") == 0 {
		s.x.types("%\r")
		s.c.await(s.t, "it reads the last key", func() bool { return strings.Contains(s.c.read(), "%") })
		s.c.change(func() {
			if got, _, _ := strings.Cut(s.c.read(), "%"); got != s.want {
				t.Errorf("it read %q, want %q", got, s.want)
			}
		})
	}
}

// play does the steps. The wrapper is stopped while the lines below "while" are done.
func (s *staged) play(lines []string) {
	s.t.Helper()
	for i := 0; i < len(lines); i++ {
		verb, arg, _ := strings.Cut(lines[i], " ")
		if plain, err := strconv.Unquote(arg); err == nil {
			arg = plain
		}
		if verb != "while" {
			s.step(verb, arg)
			if s.t.Failed() {
				s.t.FailNow()
			}
			continue
		}
		var inside []string
		for i+1 < len(lines) && strings.HasPrefix(lines[i+1], "  ") {
			i++
			inside = append(inside, lines[i][2:])
		}
		s.x.while(s.dir, func() { s.play(inside) })
	}
}

// step is one thing that somebody does, or that must come.
func (s *staged) step(verb, arg string) {
	s.t.Helper()
	status, why, _ := strings.Cut(arg, " ")
	ends := []string{"resolved", "expired", "canceled", "failed"}
	switch verb {
	case "", "//":
	case "raw", "noecho": // the program changes its terminal
		s.c.order(order{Raw: verb == "raw", NoEcho: verb == "noecho"})
	case "paint": // it clears the terminal and shows a screen
		s.c.order(order{Name: arg, Write: s.screen(s.part(arg))})
	case "draft": // it shows its screen "box" with that in it
		s.c.order(order{Name: "box", Write: s.screen(strings.Replace(s.part("box"), "▮", arg+"▮", 1))})
	case "adds": // it writes on
		s.c.order(order{Write: arg})
	case "exit": // it ends
		s.c.order(order{Exit: true})
		s.c.until("gone", -1)
	case "gets": // it reads these keys next
		s.want += arg
		s.c.await(s.t, fmt.Sprintf("it read %q", s.want), func() bool {
			return s.strays() || len(s.c.read()) >= len(s.want)
		})
	case "type": // at the keyboard
		s.x.types(arg)
	case "second": // one passes, in which something else could be done
		<-time.After(time.Second)
	case "sees": // the terminal shows
		s.x.sees(arg)
	case "signal": // the wrapper gets
		s.x.signal(arg)
	case "exits": // the wrapper does, as a shell says it
		code, err := strconv.Atoi(arg)
		if err != nil {
			s.t.Fatal(err)
		}
		s.x.exits(code)
		s.exited = true
	case "reload": // the configuration becomes this
		awaitRun(s.t, s.dir, "")
		config := strings.ReplaceAll(s.parts[arg], "API\n", s.w.config(""))
		makeFile(s.t, config, s.dir, "config.toml")
		s.x.signal("HUP")
	case "asked": // a new question is open, or was, or is only created
		comesTrue(s.t, "a new question is open", func() bool {
			all := jsonLines(s.t, s.dir, "state.jsonl")
			i := slices.IndexFunc(all, func(r record) bool {
				return r.str("status") == cmp.Or(arg, "awaiting_reply") && !slices.Contains(s.over, r.str("id"))
			})
			if i >= 0 {
				s.prompt = all[i].str("id")
			}
			return i >= 0
		})
		s.over = append(s.over, s.prompt)
	case "answer": // by atlasbridge answer
		s.answer(arg)
	case "refuses": // atlasbridge answer does, with this reason
		code, _, said := cli(s.t, s.dir, "answer", s.prompt, status)
		if code != 1 || !matches(why, said) {
			s.t.Errorf("answer %s exits with %d: %q, want 1: %s", status, code, said, why)
		}
	case "ends": // the question does, so, with this reason
		r := awaitRecord(s.t, s.dir, "prompt", s.prompt+" is "+status, func(r record) bool {
			return r.str("id") == s.prompt && (s.exited || s.stray() || slices.Contains(append(ends,
				status), r.str("status")))
		})
		was := slices.ContainsFunc(jsonLines(s.t, s.dir, "state.jsonl"), func(r record) bool {
			return r.str("id") == s.prompt && r.str("status") == status
		})
		if said := r.str("reason") + r.str("decided_by"); !was || !regexp.MustCompile(why).MatchString(said) {
			s.t.Errorf("the question is %s (%s), want %s (%s)", r["status"], said, status, why)
		}
		s.prompt = ""
	case "dated": // what the operator writes from now on, so many seconds from now
		seconds, err := strconv.ParseInt(arg, 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		s.w.change(func() { s.w.dates = seconds })
	case "writes", "replies": // the operator does
		awaitRun(s.t, s.dir, "")
		to := int64(0)
		if verb == "replies" {
			to = s.m.id
		}
		s.input = fmt.Sprint(s.w.writes(arg, to))
	case "input": // what was written becomes that, with this reason
		r := awaitRecord(s.t, s.dir, "input", s.input+" is "+status, func(r record) bool {
			return fmt.Sprintf("%.0f", r["reply_to"]) == s.input && (status == "queued" || s.stray() || r.str("status") != "queued")
		})
		if !matches("^"+status, r.str("status")) || !regexp.MustCompile(why).MatchString(r.str("reason")) {
			s.t.Errorf("what was written is %s (%s), want %s (%s)", r["status"], r["reason"], status, why)
		}
	case "tells": // the phone gets an answer to what was written
		s.w.until(s.t, "sendMessage", `"message_id":`+s.input+`\}.*`+arg)
	case "about": // the message is one about the session with that tool
		s.m = s.w.message(s.w.about(awaitRun(s.t, s.dir, arg)))
	case "phone": // it has such a message; the buttons stand below its text, in brackets
		s.m = s.w.where("a message that is "+arg, func(m seen) bool { return matches("(?s)"+arg, m.words()) })
	case "outcome": // the message has no buttons any more, and says
		s.w.where(fmt.Sprintf("message %d without buttons that says %s", s.m.id, arg), func(m seen) bool {
			return s.stray() || m.id == s.m.id && len(m.buttons) == 0 && matches(arg, m.text)
		})
	case "tap": // the operator taps a button of the message
		data, ok := s.m.ending(arg)
		if !ok {
			s.t.Errorf("no button %s to tap: %s", arg, s.m.words())
		}
		s.tap = s.w.tapped(s.m.id, data)
	case "told": // who tapped is
		if said := s.w.answer(s.tap); !matches(arg, said) {
			s.t.Errorf("the tap is told %q, want %s", said, arg)
		}
	case "unasked": // no message ever had that
		if text := s.w.texts(); matches(arg, text) {
			s.t.Errorf("the phone shows %s:\n%s", arg, text)
		}
	case "lacks": // the terminal does not show
		if strings.Contains(s.x.shown(), arg) {
			s.t.Errorf("the terminal shows %q", arg)
		}
	case "session": // its record says
		r := records(s.t, s.dir, "session")[0]
		if r.str("status") != arg {
			s.t.Errorf("the session is recorded as %s, want %s", r["status"], arg)
		}
	case "audited": // the log gets such an event
		comesTrue(s.t, "the audit log has "+arg, func() bool { return len(entries(s.t, s.dir, arg)) > 0 })
	case "audit", "unaudited": // the log has such an entry, or none
		if log := textOf(s.t, s.dir, "audit.log"); matches(arg, log) != (verb == "audit") {
			s.t.Errorf("%s %s: in\n%s", verb, arg, log)
		}
	default:
		s.t.Fatalf("no such step: %s %s", verb, arg)
	}
}

// answer answers the question with atlasbridge answer, and waits until that is recorded: the wrapper may be stopped.
func (s *staged) answer(value string) {
	s.t.Helper()
	if s.prompt == "" {
		s.step("asked", "")
	}
	code, _, said := cli(s.t, s.dir, "answer", s.prompt, value)
	if code != 0 {
		s.t.Fatalf("answer %s exits with %d: %s", value, code, said)
	}
}

// part is the screen of that name.
func (s *staged) part(name string) string {
	s.t.Helper()
	if s.parts[name] == "" {
		s.t.Fatalf("no such screen: %s", name)
	}
	return s.parts[name]
}

// screen is what the program writes to show these rows: ␛ is Esc; the cursor stands at ▮, and is hidden where there is none.
func (s *staged) screen(text string) string {
	text = strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "␛", "\x1b")
	before, after, shown := strings.Cut(text, "▮")
	write := "\x1b[H\x1b[J" + strings.ReplaceAll(before+after, "\n", "\r\n")
	if !shown {
		return write + "\x1b[?25l"
	}
	row := strings.Count(before, "\n")
	column := utf8.RuneCountInString(before[strings.LastIndex(before, "\n")+1:])
	return write + fmt.Sprintf("\x1b[?25h\x1b[%d;%dH", row+1, column+1)
}

// read is all that the puppet has read; its lock is held.
func (c *puppet) read() (keys string) {
	for _, r := range c.reports {
		if r.What == "key" {
			keys += r.Text
		}
	}
	return keys
}

// strays reports whether the puppet read what it should not, which is an error; its lock is held.
func (s *staged) strays() bool {
	got := s.c.read()
	if strings.HasPrefix(s.want, got) || strings.HasPrefix(got, s.want) && strings.HasSuffix(got, "%") {
		return false
	}
	s.t.Errorf("it read %q, want %q", got, s.want)
	return true
}

// stray is strays without the lock.
func (s *staged) stray() (found bool) {
	if s.c != nil {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		found = s.strays()
	}
	return found
}

// words is the text of a message, with its buttons below.
func (m seen) words() string {
	return m.text + "\n[" + strings.Join(slices.Sorted(maps.Keys(m.buttons)), "] [") + "]"
}

// ---- main.go: hook ----
// A hook's question is answered by the hook alone, or by nobody.

// TestHooks: what a hook is given is asked with every word of it, whoever decides is named, and what was decided is printed
// to the letter: allow only where that was said, and nothing wherever the hook cannot know, so that the tool's dialog asks.
func TestHooks(t *testing.T) {
	needLinux(t) // for /dev/full
	t.Parallel()
	beside(t, blocks(t, "hooks.txt"), playCase)
}

// TestLongCall: a call that is too long to be shown is asked all the same, soon, and can only be refused.
func TestLongCall(t *testing.T) {
	t.Parallel()
	needUnix(t)
	lines := func(text string) string { return strings.Repeat(text+`\n`, 1<<20/len(text)) }
	beside(t, []string{
		`Write {"file_path":"a","content":"` + lines("one") + `"}`,
		`Edit {"file_path":"a","old_string":"` + lines(`a\nb`) + `","new_string":"` + lines(`a\nc`) + `"}`,
		`Bash {"command":"` + strings.Repeat("x", 1<<20) + `"}`,
		`Bash {"description":"` + strings.Repeat("Ω word ", 1<<17) + `"}`, // it is the question, too
	}, func(t *testing.T, call string) {
		c := newInquiry(t, block{parts: map[string]string{"call": call}}, "")
		m := c.shows("", "No")
		if data, more := m.ending("Show all"); more {
			c.answer(c.tapped(m.id, data))
			inParts := patience() + 30*time.Second // a message a second
			c.awaitFor(t, inParts, "what can be shown of it", func() bool {
				n := c.messages[slices.Max(slices.Collect(maps.Keys(c.messages)))]
				return n.id > m.id && len(n.buttons) > 0 && len(c.messages[m.id].buttons) == 0
			})
		}
		c.play("forge allow")
		c.play("tap No")
		c.ends()
		for _, m := range c.history() {
			if label, ok := m.choice(grantButton); ok {
				t.Errorf("%q can be tapped at what nobody can read", label)
			}
		}
		if printed := decisionOf(c.stdout.String()); !strings.Contains(printed, `"deny"`) {
			t.Errorf("the hook prints %s", printed)
		}
	})
}

// inquiry is a hook or a script that asks, from its start to its end, as testdata/hooks.txt and asks.txt have it.
type inquiry struct {
	block
	*botAPI
	*script
	t       *testing.T
	dir     string
	session *script // that a hook's tool runs in
	down    atomic.Bool
}

// playCase starts the hook or the script of a case, takes its steps, and compares what was seen.
func playCase(t *testing.T, b block) {
	steps := strings.Split(strings.TrimSpace(b.parts["answer"]), "\n")
	c := newInquiry(t, b, steps[0])
	for _, step := range steps {
		c.play(step)
	}
	c.ends()
	if got, want := c.seen(), strings.TrimSpace(b.parts["seen"]); got != want {
		t.Errorf("%s: what is seen is\n--- seen\n%s\n\nand not\n--- seen\n%s", b.at, got, want)
	}
}

// newInquiry starts it; way, the first step, may say how.
func newInquiry(t *testing.T, b block, way string) *inquiry {
	t.Helper()
	w := newBotAPI(t)
	config := w.config("away_after_seconds = 60\n" + b.parts["config"])
	if way == "no telegram" {
		config = ""
	}
	c := &inquiry{block: b, botAPI: w, t: t, dir: home(t, config)}
	w.change(func() {
		w.fault = func(_ string, h http.ResponseWriter) bool {
			if c.down.Load() {
				h.WriteHeader(http.StatusBadGateway)
			}
			return c.down.Load()
		}
	})
	if arguments, asks := b.parts["ask"]; asks {
		arguments := strings.Split(strings.TrimSpace(arguments), "\n")
		c.script = newScript(t, c.dir, b.parts["stdin"], append([]string{"ask"}, arguments...)...)
		c.script.Dir = filepath.Join(t.TempDir(), "box")
		if err := os.Mkdir(c.script.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
	} else {
		c.session = runs(t, c.dir, "--name", "box", "sleep", "1000")
		id := awaitRun(t, c.dir, "").str("id")
		c.script = newScript(t, c.dir, c.input(), "hook")
		if way == "nowhere" {
			id = "5e551011-0000-4000-8000-000000000000"
		}
		c.script.Env = append(c.script.Env, "ATLASBRIDGE_SESSION="+id)
	}
	switch way {
	case "down":
		c.down.Store(true)
	case "refused":
		w.change(func() {
			w.fault = func(_ string, h http.ResponseWriter) bool {
				h.WriteHeader(http.StatusUnauthorized)
				fmt.Fprint(h, `{"ok":false,"error_code":401,"description":"Unauthorized"}`)
				return true
			}
		})
	case "full":
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer full.Close()
		c.script.Stdout = full
	case "closed":
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Close() // nobody reads
		defer w.Close()
		c.script.Stdout = w
	}
	c.begin()
	return c
}

// input is what the tool gives the hook.
func (c *inquiry) input() string {
	if input, ok := c.parts["input"]; ok {
		return input
	}
	part := func(name, otherwise string) string { return strings.TrimSpace(cmp.Or(c.parts[name], otherwise)) }
	tool, arguments, _ := strings.Cut(part("call", ""), " ")
	return fmt.Sprintf(`{"session_id":"5e551011","hook_event_name":"PermissionRequest","cwd":"%s","tool_name":"%s",`+
		`"tool_input":%s,"permission_suggestions":%s}`, part("cwd", "/tmp"), tool, arguments, part("suggestions", "[]"))
}

// play takes one step.
func (c *inquiry) play(step string) {
	c.t.Helper()
	verb, words, _ := strings.Cut(step, " ")
	switch verb {
	case "nothing", "nowhere", "no", "down", "refused", "full", "closed", "wait":
		return
	case "back":
		awaitPrompt(c.t, c.dir, "", "routed")
		c.down.Store(false)
		return
	case "tap":
		c.press(c.shows("", words), words)
		return
	case "sees":
		c.where(words, func(m seen) bool {
			_, ok := m.ending(words)
			return ok || strings.Contains(m.text, words)
		})
		return
	}
	id := awaitPrompt(c.t, c.dir, "", "awaiting_reply").str("id")
	switch verb {
	case "write":
		c.writes(words, c.asks().id)
	case "answer":
		if code, out, errs := cli(c.t, c.dir, "answer", id, words); code != 0 {
			c.t.Errorf("%s: answer: exit %d, %s%s", c.at, code, out, errs)
		}
		if c.count("sendMessage") > 0 { // else there is no phone to be told
			c.shows("was answered with", "")
		}
	case "forge":
		m := c.asks()
		label, _ := m.choice(anyButton)
		prefix := m.buttons[label][:strings.LastIndex(m.buttons[label], ":")+1]
		if said := c.answer(c.tapped(m.id, prefix+words)); strings.HasPrefix(said, "✓") {
			c.t.Errorf("%s: a forged tap is told %q", c.at, said)
		}
	default:
		of := c.script
		if words == "session" {
			of = c.session
		}
		signals := map[string]os.Signal{"kill": os.Kill, "end": syscall.SIGTERM, "interrupt": os.Interrupt, "hangup": syscall.SIGHUP}
		if err := of.Process.Signal(signals[verb]); err != nil {
			c.t.Fatal(step, err)
		}
	}
}

// asks waits for a message that can be answered.
func (c *inquiry) asks() seen {
	c.t.Helper()
	return c.where("a question", func(m seen) bool { return len(m.buttons) > 0 })
}

// ends waits until it has ended, and every message says what became of its question.
func (c *inquiry) ends() {
	c.t.Helper()
	c.wait()
	if strings.Contains(c.parts["answer"], "kill s") { // who else would say it
		runs(c.t, c.dir, "true").wait()
	}
	if c.parts["seen"] != `prints: ""`+"\n\n" { // else nothing is asked
		c.allOver(c.dir)
	}
	if c.session == nil && len(inFolder(filepath.Join(c.dir, "sessions"), "*")) > 0 {
		c.t.Errorf("%s: its locks are left", c.at)
	}
}

// awaitOver waits until no question is open or on its way.
func awaitOver(t *testing.T, dir string) {
	t.Helper()
	over := []string{"resolved", "expired", "canceled", "failed"}
	comesTrue(t, "all questions are over", func() bool {
		all := records(t, dir, "prompt")
		return !slices.ContainsFunc(all, func(r record) bool { return !slices.Contains(over, r.str("status")) })
	})
}

// allOver waits until no question is open or on its way, in the state and in the messages.
func (s *botAPI) allOver(dir string) {
	s.t.Helper()
	awaitOver(s.t, dir)
	s.await(s.t, "every message without buttons and with its outcome", func() bool {
		for _, m := range s.messages {
			if len(m.buttons) > 0 || strings.Contains(m.text, "on its way") {
				return false
			}
		}
		return true
	})
}

// What is looked at: the events about decisions, without what is another at each run.
var (
	logged = regexp.MustCompile(`(PERMISSION_RESOLVE|REPLY_INJECTED|REPLY_REJECTED|TOOL_\w+) +(?:[0-9a-f]{8} )?(.*)`)
	varies = regexp.MustCompile(`\d\d:\d\d|\[SID:\w*[1-9a-f]\w*\]|in [234689] s|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|answer [0-9a-f]{8} `)
)

// seen is what a person, the tool or the script, and the files have seen of a case.
func (c *inquiry) seen() string {
	var b strings.Builder
	first, last := map[int64]seen{}, map[int64]seen{}
	var ids []int64
	for _, m := range c.history() {
		if _, ok := first[m.id]; !ok {
			first[m.id] = m
			ids = append(ids, m.id)
		}
		last[m.id] = m
	}
	only := func(mark string, lines, others []string) {
		for _, line := range lines {
			if !slices.Contains(others, line) {
				fmt.Fprintln(&b, mark, line)
			}
		}
	}
	for _, id := range ids {
		if len(first[id].buttons) == 0 && !strings.Contains(first[id].text, "answered with") {
			continue
		}
		was, is := strings.Split(first[id].text, "\n"), strings.Split(last[id].text, "\n")
		fmt.Fprintln(&b, first[id].text)
		for _, label := range slices.Sorted(maps.Keys(first[id].buttons)) {
			fmt.Fprintf(&b, "[%s] ", label)
		}
		fmt.Fprintln(&b)
		only("-", was, is)
		only("+", is, was)
	}
	if c.session != nil {
		fmt.Fprintf(&b, "prints: %s\n", decisionOf(c.stdout.String()))
	} else {
		fmt.Fprintf(&b, "exit %d\nstdout: %q\nstderr: %q\n", c.ProcessState.ExitCode(),
			c.stdout.String(), c.stderr.String())
		for _, r := range records(c.t, c.dir, "session") {
			if r.str("tool") == "ask" {
				fmt.Fprintf(&b, "session: %s %s\n", r.str("status"), r.str("exit_code"))
			}
		}
	}
	for _, r := range records(c.t, c.dir, "prompt") {
		fmt.Fprintf(&b, "%s by %s: %s\n", r.str("status"), cmp.Or(r.str("decided_by"), "nobody"),
			r.str("reason"))
	}
	_, logs, _ := cli(c.t, c.dir, "logs")
	for line := range strings.Lines(logs) {
		if found := logged.FindStringSubmatch(line); found != nil {
			fmt.Fprintln(&b, found[1], found[2])
		}
	}
	for _, call := range entries(c.t, c.dir, "TOOL_CALL") {
		fmt.Fprintln(&b, "all arguments:", call.str("arguments_sha256"))
	}
	return strings.TrimSpace(varies.ReplaceAllString(b.String(), "…"))
}

// decisionOf is what the tool takes from what a hook printed: a decision, or nothing else.
func decisionOf(printed string) string {
	before, begins := strings.CutPrefix(printed, `{"hookSpecificOutput":{"decision":`)
	decision, ends := strings.CutSuffix(before, `,"hookEventName":"PermissionRequest"}}`+"\n")
	if begins && ends {
		return decision
	}
	return fmt.Sprintf("%q", printed)
}

// TestHookDialogs: whatever stands on the screen, a tap decides the call that its message shows, and that alone, through
// its hook; not one byte is typed into a dialog. A key there ends the question of just that dialog, and a hook that has
// gone leaves its dialog to be asked from the screen.
func TestHookDialogs(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, table(t, "dialogs.txt"), playDialogs)
}

// parted returns what stands between separators.
func parted(text, separator string) (all []string) {
	for one := range strings.SplitSeq(text, separator) {
		if one = strings.TrimSpace(one); one != "" {
			all = append(all, one)
		}
	}
	return all
}

// playDialogs plays a row of dialogs.txt.
func playDialogs(t *testing.T, r row) {
	p := play{Together: strings.Contains(r["asks"], ",")}
	for _, one := range parted(r["asks"], ",") {
		command, paint, _ := strings.Cut(one, " @")
		ms, halves := strings.CutSuffix(paint, "/2")
		ms, withheld := strings.CutSuffix(ms, "/0")
		a := ask{Command: command, Paint: -1, Halves: halves, Withheld: withheld}
		fmt.Sscan(ms, &a.Paint) // "-": never
		p.Asks = append(p.Asks, a)
	}
	for _, n := range strings.Fields(r["order"]) {
		p.Order = append(p.Order, int(n[0]-'1'))
	}
	flags, mute := strings.CutPrefix(r["flags"], "mute")
	p.Mute = mute
	if flags == "" {
		flags = "--timeout 15s" // so that what never ends fails soon
	}
	w, c, dir, x := claudeSession(t, "", p, strings.Fields(flags)...)
	var asked seen
	var tapped int64 // the last message that is over
	for _, step := range parted(r["does"], ";") {
		verb, word, _ := strings.Cut(step, " ")
		n := strings.Index("1234567", cmp.Or(word, "x")) // of the ask
		switch verb {
		case "half":
			c.until("paint", n)
		case "dialog":
			c.until("paint", n)
			x.sees("Bash(" + p.Asks[n].Command)
			x.sees("proceed?")
		case "stood": // its mark has blinked once
			x.sees("  Bash(" + p.Asks[n].Command)
		case "key":
			keys, err := strconv.Unquote(word)
			if err != nil {
				t.Fatal(err)
			}
			x.types(keys)
			c.reads("", keys)
		case "over":
			awaitRecord(t, dir, "prompt", p.Asks[n].Command+" is over", func(q record) bool {
				return q.str("subject") == p.Asks[n].Command && q.str("status") == "resolved"
			})
		case "wait": // longer than a key and a tap cross
			<-time.After(1200 * time.Millisecond)
		case "alone":
		case "kill":
			c.order(order{Signal: "KILL"})
			tapped = asked.id
		case "stop":
			for held := true; held; held = !unlocked(t, dir, "state.lock") { // else it would stop everybody
				c.order(order{Signal: "CONT"})
				c.order(order{Signal: "STOP"})
			}
		case "asked":
			asked = w.find(p.Asks[n].Command, noButton)
		case "late":
			if said := w.ended(asked.id).text; !saysKeyboard.MatchString(said) {
				t.Fatalf("%s: answered at the keyboard, its message says %q", r["at"], said)
			}
			if said := w.answer(w.tap(asked, noButton)); !saysNothing.MatchString(said) {
				t.Errorf("%s: a late tap is told %q", r["at"], said)
			}
		default:
			m := w.where("the question of "+p.Asks[n].Command, func(m seen) bool {
				_, ok := m.ending(verb)
				return ok && m.id > tapped && strings.Contains(m.text, p.Asks[n].Command)
			})
			tapped = m.id
			w.press(m, verb)
			if strings.Contains(r["does"], "stop") {
				w.ended(m.id)
			}
		}
	}
	for i, want := range parted(r["decided"], ";") {
		if got := c.until("decided", i); got.Text+" by "+got.By != want {
			t.Errorf("%s: the tool was told %s by %s of %s, want %s",
				r["at"], got.Text, got.By, p.Asks[i].Command, want)
		}
	}
	c.until("done", -1)
	w.allOver(dir)
	if strings.Contains(r["does"], "alone") && saysKeyboard.MatchString(w.ended(tapped).text) {
		t.Errorf("%s: nobody answered at the keyboard, but its message says so", r["at"])
	}
	var ends []string
	for _, a := range p.Asks {
		var of []string
		for _, q := range records(t, dir, "prompt") {
			if strings.Contains(q.str("full")+q.str("question")+q.str("subject"), a.Command) {
				of = append(of, q.str("status")+" "+cmp.Or(q.str("decided_by"), "-"))
			}
		}
		ends = append(ends, fmt.Sprint(w.came(a.Command), " ", strings.Join(of, "; ")))
	}
	if got := strings.Join(ends, "; "); got != r["ends"] {
		t.Errorf("%s: its questions ended as %s, want %s", r["at"], got, r["ends"])
	}
	if keys := c.keys(); keys != r["keys"] {
		t.Errorf("%s: the dialogs read %q, want %q", r["at"], keys, r["keys"])
	}
	if n := w.came("proceed?"); n > strings.Count(r["does"], "kill") {
		t.Errorf("%s: a dialog whose hook lives was asked from the screen, too", r["at"])
	}
}

// TestBackgroundCallIsLeftToItsDialog: claude asks about a call of an agent in the background only once its hook has left
// that to the dialog. The message does not say that somebody has answered.
func TestBackgroundCallIsLeftToItsDialog(t *testing.T) {
	needUnix(t)
	t.Parallel()
	a := ask{Command: "touch /srv/x", Paint: -1}
	w, _, dir, _ := claudeSession(t, "", play{Asks: []ask{a}})
	m := w.find(a.Command, yesButton)
	awaitPrompt(t, dir, a.Command, "canceled")
	if said := w.ended(m.id).text; !strings.Contains(said, "asked there now") {
		t.Errorf("its dialog comes now, its message says %q", said)
	}
}

// TestLocalChannelOnlyWaits: with the local channel claude's hooks only audit, and nothing is typed by waiting: its dialog is
// the user's, as without us, or that of atlasbridge answer.
func TestLocalChannelOnlyWaits(t *testing.T) {
	needUnix(t)
	t.Parallel()
	a := ask{Command: "touch /srv/x", Paint: 100}
	_, c, dir, x := claudeSession(t, "", play{Asks: []ask{a}}, "--channel", "local", "--timeout", "2s")
	p := awaitPrompt(t, dir, a.Command, "expired")
	if p.str("source") != "screen" || p["value"] != nil || c.count("hookend") > 0 {
		t.Errorf("it is asked by the %s, and expires with %v", p.str("source"), p["value"])
	}
	x.types("1")
	if r := c.until("decided", 0); r.By != "keyboard" || r.Text != "Yes" || c.keys() != "1" {
		t.Errorf("%s by %s, %q was typed", r.Text, r.By, c.keys())
	}
	c.until("done", -1)
	if n := len(entries(t, dir, "TOOL_CALL")); n != 1 {
		t.Errorf("%d calls are audited", n)
	}
}

// ---- the whole program: ask ----
// A script gets the answer of a person, or none: waiting, dying and losing the network are never a yes.

// script is one run of atlasbridge, as a script starts it.
type script struct {
	*exec.Cmd
	t              *testing.T
	stdout, stderr bytes.Buffer
}

// asks starts `atlasbridge ask` with this on its standard input.
func asks(t *testing.T, dir, stdin string, args ...string) *script {
	t.Helper()
	return begins(t, dir, stdin, append([]string{"ask"}, args...)...)
}

// newScript is atlasbridge with this on its standard input, not started.
func newScript(t *testing.T, dir, stdin string, args ...string) *script {
	t.Helper()
	if len(args) > 0 && args[0] != "answer" { // its "yes" is no program
		needToolsOf(t, args)
	}
	s := &script{Cmd: exec.Command(os.Args[0], args...), t: t}
	s.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir)
	if stdin != "" { // else there is nothing to read, and no pipe that the tool would get
		s.Stdin = strings.NewReader(stdin)
	}
	s.Stdout = &s.stdout
	s.Stderr = &s.stderr
	return s
}

// begin starts it; it ends with the test.
func (s *script) begin() {
	s.t.Helper()
	if err := s.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = s.Process.Kill() }) // it has ended, or the test has failed
}

// signal sends a signal of that name.
func (s *script) signal(name string) {
	s.t.Helper()
	signals(s.t, s.Process.Pid, name)
}

// wait waits for the end.
func (s *script) wait() {
	s.t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- s.Wait() }()
	select {
	case err := <-ended:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			s.t.Log(err)
		}
	case <-time.After(patience()):
		s.t.Fatal("it does not end")
	}
}

// begins starts atlasbridge with this on its standard input.
func begins(t *testing.T, dir, stdin string, args ...string) *script {
	t.Helper()
	s := newScript(t, dir, stdin, args...)
	s.begin()
	return s
}

// gets waits for the end, with this status, this on standard output and something like that on standard error.
func (s *script) gets(code int, stdout, stderr string) {
	s.t.Helper()
	s.wait()
	got := s.ProcessState.ExitCode()
	if got != code || s.stdout.String() != stdout || !matches(stderr, s.stderr.String()) {
		s.t.Errorf("ask: exit %d, want %d\nstdout %q, want %q\nstderr %q, want %s",
			got, code, s.stdout.String(), stdout,
			s.stderr.String(), stderr)
	}
}

// TestAsks: a script gets the answer of a person, or learns by its exit status that there is none: 0, 1 refused, 124 nobody
// answered, 125 it could not ask; and whatever ends it, its message, its session and its locks are over.
func TestAsks(t *testing.T) {
	needLinux(t) // for /dev/full
	t.Parallel()
	beside(t, blocks(t, "asks.txt"), playCase)
}

// TestAskShowsAll: while not all of what it is about was shown nothing but a refusal is taken; then it can be answered. Where
// Telegram refuses a part of it, nothing is allowed, and the script learns of that.
func TestAskShowsAll(t *testing.T) {
	t.Parallel()
	var diff strings.Builder
	for i := range 600 {
		fmt.Fprintf(&diff, "+line %d\n", i)
	}
	beside(t, []string{"shown", "refused"}, func(t *testing.T, all string) {
		p := newBotAPI(t)
		p.decides(func(method string, params map[string]any) (todo fate) {
			if all == "refused" && method == "sendMessage" && strings.Contains(fmt.Sprint(params["text"]), "line 300\n") {
				todo.answer = apiRefusal("whatever")
			}
			return todo
		})
		s := asks(t, home(t, p.config("")), diff.String(), "--choices", "merge,no", "Merge?", "-")
		m := p.shows("Merge?", "Show all")
		if label, ok := m.choice(regexp.MustCompile("merge")); ok {
			t.Fatalf("%q can be tapped at what nobody has read", label)
		}
		data, _ := m.ending("no")
		if said := p.answer(p.tapped(m.id, strings.TrimSuffix(data, "2")+"1")); !strings.Contains(said, "Show all") {
			t.Fatalf("a forged tap is told %q", said)
		}
		p.press(m, "Show all")
		if all == "refused" {
			s.gets(125, "", "whatever")
			for _, m := range p.history() {
				if _, ok := m.ending("merge"); ok {
					t.Errorf("it can be allowed, and not all of it was shown: %q", m.text)
				}
			}
			return
		}
		m = p.shows("Merge?", "merge")
		shown := p.texts()
		for line := range strings.Lines(diff.String()) {
			if !strings.Contains(shown, line) {
				t.Fatalf("%q was not shown", line)
			}
		}
		p.press(m, "merge")
		s.gets(0, "merge\n", "")
	})
}

// ---- the whole program: debts ----
// Whatever dies, the next that runs has every message say what has become of its question.

// runs starts `atlasbridge run` without a terminal.
func runs(t *testing.T, dir string, argv ...string) *script {
	t.Helper()
	return begins(t, dir, "", append([]string{"run"}, argv...)...)
}

// TestTroubledRequest: whatever happens to a request, and to the process that made it, every message at last is without buttons and
// says what the state says of its question; a message whose number nobody learned does so once it is tapped. At most one
// edit is under way, and nothing is typed twice.
func TestTroubledRequest(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, table(t, "requests.txt"), playTrouble)
}

// troubledRequest is what becomes of one request.
type troubledRequest struct {
	row
	struck  chan struct{} // closed when it has come
	release chan struct{} // closed when what is held goes on
	victim  *script       // whose request it is; nil: it has come
}

// meet is the fate of a request.
func (x *troubledRequest) meet(method string, params map[string]any) fate {
	text := fmt.Sprint(params["text"])
	if x.victim == nil || method != x.row["request"] || method == "sendMessage" && !strings.Contains(text, "Continue?") {
		return fate{}
	}
	victim := x.victim
	x.victim = nil
	close(x.struck)
	switch x.row["fate"] {
	case "hold":
		return fate{hold: x.release}
	case "cut":
		return fate{cut: true}
	case "late":
		return fate{late: x.release}
	case "429":
		return fate{answer: `{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":1}}`}
	case "502":
		return fate{answer: `{"ok":false,"error_code":502,"description":"Bad Gateway"}`}
	}
	_ = victim.Process.Kill() // it lives: this is its request
	if x.row["fate"] == "kill-before" {
		return fate{late: make(chan struct{})}
	}
	return fate{}
}

// playTrouble plays a row of requests.txt.
func playTrouble(t *testing.T, r row) {
	several := r["asks"] == "several"
	x := &troubledRequest{row: r, struck: make(chan struct{}), release: make(chan struct{})}
	var c *inquiry
	if several {
		c = newInquiry(t, block{parts: map[string]string{"call": `AskUserQuestion {"questions":[{"question":"Continue?",` +
			`"multiSelect":true,"options":[{"label":"Logging"},{"label":"Metrics"},{"label":"Tracing"}]}]}`}}, "")
	} else {
		w := newBotAPI(t)
		c = &inquiry{botAPI: w, t: t, dir: home(t, w.config(""))}
	}
	c.decides(x.meet)
	var listener *script
	if r["asks"] == "beside" {
		listener = runs(t, c.dir, "sleep", "1000")
		c.await(t, "it listens", func() bool { return len(c.polls) > 0 })
	}
	c.change(func() {
		if !several {
			c.session = runs(t, c.dir, "sh", "-c", `printf "Continue? [y/n] "; read x; echo "$x" >> "$0"`,
				filepath.Join(c.dir, "got"))
		}
		x.victim = cmp.Or(listener, c.session)
	})
	c.isTroubled(x)
	<-x.struck
	killed := strings.HasPrefix(r["fate"], "kill")
	if !killed {
		awaitOver(t, c.dir)
	}
	close(x.release)
	if killed || !several {
		c.session.wait()
	}
	next := runs(t, c.dir, "sleep", "1000")    // whoever runs next pays
	defer func() { _ = next.Process.Kill() }() // it is not needed any more
	awaitOver(t, c.dir)
	if r["dead"] == "1" {
		dead := c.where("the message that nobody knows", func(m seen) bool { return m.buttons["Yes"] != "" })
		if said := c.answer(c.tap(dead, yesButton)); !saysNothing.MatchString(said) {
			t.Errorf("%s: a tap on the dead message is told %q", r["at"], said)
		}
	}
	c.allOver(c.dir)
	outcome, outcomes := regexp.MustCompile(`(?m)^(not |\S.* · (phone|atlasbridge answer|the session ended)).*`), []string{}
	for _, id := range slices.Sorted(maps.Keys(c.messages)) {
		if text := c.message(id).text; strings.Contains(text, "Continue?") {
			outcomes = append(outcomes, outcome.FindAllString(text, -1)...)
		}
	}
	want := strings.ReplaceAll(r["says"], " or ", "|")
	other := func(said string) bool { return !matches(want, said) }
	if slices.ContainsFunc(outcomes, other) || len(outcomes) == 0 && want != "" {
		t.Errorf("%s: its messages say %q, want %q", r["at"], outcomes, r["says"])
	}
	got, _ := os.ReadFile(filepath.Join(c.dir, "got")) // not there: nothing
	if want, perhaps := strings.CutSuffix(r["got"], "?"); strings.TrimSpace(string(got)) != want && !(perhaps && len(got) == 0) {
		t.Errorf("%s: the program got %q, want %q", r["at"], got, r["got"])
	}
	if c.maxFly > 1 && !killed {
		t.Errorf("%s: %d edits of a message at a time", r["at"], c.maxFly)
	}
}

// isTroubled ends the question while its request is in trouble.
func (c *inquiry) isTroubled(x *troubledRequest) {
	c.t.Helper()
	id := awaitPrompt(c.t, c.dir, "Continue?", "").str("id")
	asked := x.row["request"] != "sendMessage"
	if asked {
		awaitPrompt(c.t, c.dir, "", "awaiting_reply")
	} else {
		<-x.struck
	}
	if x.row["asks"] == "beside" {
		freezes(c.t, c.dir, c.session.Process.Pid)
		defer func() {
			if asked && x.row["request"] == "editMessageText" { // the listener's, for a session that has died
				awaitPrompt(c.t, c.dir, "", "reply_received")
				_ = c.session.Process.Kill()
			}
			<-x.struck
			if c.session.Process.Signal(syscall.Signal(0)) == nil {
				c.session.signal("CONT")
			}
		}()
	}
	switch {
	case x.row["asks"] == "several":
		c.press(c.shows("Continue?", "Metrics"), "Metrics")
		<-x.struck
		if strings.HasPrefix(x.row["fate"], "kill") {
			return
		}
		c.press(c.shows("Continue?", "Tracing"), "Tracing")
		cli(c.t, c.dir, "answer", id, "2,3")
	case x.row["ends"] == "answer":
		cli(c.t, c.dir, "answer", id, "y")
	case x.row["ends"] == "end":
		_ = c.session.Process.Signal(syscall.SIGTERM) // it lives: it asks
	case x.row["ends"] == "tap":
		if !asked {
			awaitPrompt(c.t, c.dir, "", "awaiting_reply")
		}
		m := c.shows("Continue?", "Yes")
		for _, one := range c.history() {
			if strings.Contains(one.text, "Continue?") {
				m = one // the last
			}
		}
		c.press(m, "Yes")
	}
}

// TestShortRunPays: a run that has nothing to do itself pays before it ends: the next may come days later. What an older
// atlasbridge has paid, which noted more of it, is not paid again.
func TestShortRunPays(t *testing.T) {
	t.Parallel()
	needUnix(t)
	p := newBotAPI(t)
	dir := home(t, p.config(""))
	first := runs(t, dir, "sh", "-c", `printf "Continue? [y/n] "; read x`)
	m := p.shows("Continue?", "Yes")
	awaitPrompt(t, dir, "", "awaiting_reply")
	first.Process.Kill()
	_ = first.Wait() // killed
	p.put(5, "paid")
	plant(t, dir, `"rec":"session","id":"old","status":"completed",`+ago(0), `"rec":"prompt","id":"paid","session_id":"old",`+
		`"status":"resolved","messages":[{"id":5,"shows":"resolved 0123456789abcdef"}],`+ago(0))
	second := runs(t, dir, "true")
	second.gets(0, "", "questions go to .*")
	if now := p.message(5); now.text != "paid" {
		t.Errorf("a message that says its outcome already says %q", now.text)
	}
	if now := p.message(m.id); len(now.buttons) > 0 || !strings.Contains(now.text, "not answered") {
		t.Errorf("it says %q with %d buttons", now.text, len(now.buttons))
	}
}

// TestSessionsEndTogether: when many sessions end in one moment, by themselves, by a signal or killed, answered or not, the
// next run has each message say its outcome.
func TestSessionsEndTogether(t *testing.T) {
	needUnix(t)
	t.Parallel()
	p := newBotAPI(t)
	dir := home(t, p.config(""))
	var all []*script
	for range 8 {
		all = append(all, runs(t, dir, "sh", "-c", `printf "Continue? [y/n] "; read x`))
	}
	p.awaitFor(t, patience()+8*2*time.Second, "all ask", func() bool {
		asking := 0
		for _, m := range p.messages {
			if len(m.buttons) > 0 {
				asking++
			}
		}
		return asking == len(all)
	})
	for i, q := range records(t, dir, "prompt") {
		if i < 2 {
			cli(t, dir, "answer", q.str("id"), "y")
		}
	}
	tools := map[string]string{} // by their wrappers
	for _, r := range records(t, dir, "session") {
		tools[r.str("wrapper")] = r.str("pid")
	}
	for i, one := range all {
		switch i % 3 {
		case 0:
			pid, _ := strconv.Atoi(tools[fmt.Sprint(one.Process.Pid)])
			tool, err := os.FindProcess(pid)
			if pid <= 0 || err != nil {
				t.Fatalf("session %d has no tool: %v", one.Process.Pid, tools)
			}
			_ = tool.Kill() // it may have had its answer, and ended
		case 1:
			_ = one.Process.Signal(syscall.SIGTERM) // likewise
		case 2:
			_ = one.Process.Kill() // likewise
		}
	}
	for _, one := range all {
		one.wait()
	}
	next := runs(t, dir, "sleep", "600")
	defer func() { _ = next.Process.Kill() }() // it is not needed any more
	p.allOver(dir)
	p.awaitFor(t, patience()+8*2*time.Second, "each session that was not killed says that it has ended", func() bool {
		ends := 0
		for _, m := range p.messages {
			if strings.Contains(m.text, "asked\naudit ") {
				ends++
			}
		}
		return ends == 6
	})
	for _, q := range records(t, dir, "prompt") {
		said := p.message(newestMessage(q)).text
		if !matches("not (delivered|answered)|is uncertain", said) && !(q.str("status") == "resolved" && strings.Contains(said, "Yes")) {
			t.Errorf("a question is %s, its message says %q", q.str("status"), said)
		}
	}
}

// ---- the whole program: programs that ask again, end, grow and hide ----
// What a person reads on the phone is all that is asked, as long as it is asked, as often as it is asked.

// quiz is a program in a session, of a shell, or of Python with what testdata/quiz.py begins with. Its files are in $F: it
// waits for the test by files there, and adds what it reads to "got", a line each.
type quiz struct {
	*botAPI
	*terminal
	t            *testing.T
	folder       string
	home         string
	last, before seen  // messages that asked
	written      int64 // the operator's message that replied to nothing
}

// newQuiz starts the program of a case in a terminal of so many rows, behind that relay, which always reads in raw mode.
func newQuiz(t *testing.T, b block) *quiz {
	t.Helper()
	a := &quiz{botAPI: newBotAPI(t), t: t, folder: t.TempDir()}
	a.home = home(t, a.config("away_after_seconds = 0\n"+b.parts["config"]))
	interpreter, program := "bash", b.parts["program"]
	if strings.Contains(program, "say(") {
		interpreter = "python3"
		program = textOf(t, "testdata", "quiz.py") + program
	}
	needTool(t, "bash", "stty", "sleep", "seq", interpreter)
	writeProgram(t, filepath.Join(a.folder, "p"), program)
	command := interpreter + ` "$F/p"`
	relay := strings.TrimSpace(b.parts["relay"])
	switch relay {
	case "script":
		command = `script -qec '` + command + `' /dev/null`
	case "tmux":
		command = `tmux -u -S "$F/s" -f /dev/null new-session '` + command + `' \; set status off`
		t.Cleanup(func() {
			_ = exec.Command("tmux", "-S", filepath.Join(a.folder, "s"),
				"kill-server").Run() // it may have ended
		})
	case "nested":
		command = `env ATLASBRIDGE_TEST_CHILD=main "$TEST_BINARY" run --name inner ` + command
	case "elsewhere": // as ssh: what asks is no process below us
		needTool(t, "cat")
		command = fmt.Sprintf(`bash -c 'stty raw -echo; exec 3<>/dev/tcp/%s; cat <&3 & exec cat >&3'`,
			strings.ReplaceAll(elsewhere(t, a.folder, interpreter, filepath.Join(a.folder, "p")), ":", "/"))
	}
	if relay == "script" || relay == "tmux" {
		needTool(t, relay)
	}
	rows, _ := strconv.Atoi(cmp.Or(strings.TrimSpace(b.parts["rows"]), "24"))
	script := fmt.Sprintf(`until [ "$(stty size)" = "%d 80" ]; do sleep 0.02; done; exec %s`, rows,
		command)
	env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "F="+a.folder, "TERM=xterm-256color",
		"ATLASBRIDGE_HOME="+a.home)
	argv := []string{os.Args[0], "run", "--name", "w", "bash", "-c", script}
	if tool := strings.TrimSpace(b.parts["tool"]); tool != "" { // it is taken for this one
		argv = append(argv[:4], filepath.Join(a.folder, tool))
		writeProgram(t, argv[4], "#!/bin/bash\n[ \"$1\" = --version ] || "+script+"\n")
	}
	a.terminal = inTerminal(t, env, argv...)
	if err := a.pty.Resize(Size{Rows: uint16(rows), Cols: 80}); err != nil {
		t.Fatal(err)
	}
	a.terminal.mu.Lock()
	defer a.terminal.mu.Unlock()
	a.scr.Resize(rows, 80)
	return a
}

// elsewhere runs a program in a terminal of its own for who connects to the address.
func elsewhere(t *testing.T, folder string, argv ...string) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	remote, err := startPTY(argv, append(os.Environ(), "F="+folder), Size{Rows: 24, Cols: 80},
		Host{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = listener.Close()
		_ = remote.Signal(os.Kill) // it may have ended
		_ = remote.Close()
	})
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return // the test is over
		}
		go io.Copy(remote, conn)
		io.Copy(conn, remote)
	}()
	return listener.Addr().String()
}

// got is what the program has read.
func (a *quiz) got() string {
	text, _ := os.ReadFile(filepath.Join(a.folder, "got")) // not there: nothing
	return strings.ReplaceAll(string(text), "\n", " ")
}

// reads waits until the program has read all of this and no more.
func (a *quiz) reads(want string) {
	a.t.Helper()
	comesTrue(a.t, fmt.Sprintf("the program has read %q", want),
		func() bool { return len(a.got()) >= len(want) })
	if got := a.got(); got != want {
		a.t.Fatalf("the program has read %q, want %q", got, want)
	}
}

// asks waits for a message after that one, with that text, and a button whose label ends so.
func (a *quiz) asks(after int64, text, label string) (found seen) {
	a.t.Helper()
	return a.where(fmt.Sprintf("%q with button %q after message %d", text, label, after), func(m seen) bool {
		_, ok := m.ending(label)
		return ok && m.id > after && strings.Contains(m.text, text)
	})
}

// TestPrograms: what a person reads on the phone is all that is asked, as long as it is asked, and what is tapped there is
// typed where it belongs: each program of testdata/programs.txt.
func TestPrograms(t *testing.T) {
	needUnix(t)
	t.Parallel()
	type behind struct {
		name string
		block
	}
	var all []behind
	for _, b := range blocks(t, "programs.txt") {
		for _, relay := range strings.Fields(cmp.Or(b.parts["relay"], "none")) {
			all = append(all, behind{b.name + " " + relay, b})
			all[len(all)-1].parts = maps.Clone(b.parts)
			all[len(all)-1].parts["relay"] = relay
		}
	}
	beside(t, all, func(t *testing.T, b behind) {
		if b.parts["needs"] != "" {
			needLinux(t)
		}
		a := newQuiz(t, b.block)
		for step := range strings.Lines(b.parts["steps"]) {
			if verb, words, _ := strings.Cut(strings.TrimSpace(step), " "); verb != "" && !t.Failed() {
				a.play(verb, words)
			}
		}
	})
}

// play takes one step.
func (a *quiz) play(verb, words string) {
	a.t.Helper()
	plain, err := strconv.Unquote(`"` + strings.ReplaceAll(words, `"`, `\"`) + `"`)
	if err != nil {
		plain = words // a pattern
	}
	switch verb {
	case "asks", "finds":
		after := a.last.id
		if verb == "finds" {
			after = 0
		}
		text, label, _ := strings.Cut(plain, "|")
		a.before, a.last = a.last, a.asks(after, strings.TrimSpace(text), strings.TrimSpace(label))
	case "tap":
		a.press(a.last, words)
	case "old":
		label, _ := a.before.choice(regexp.MustCompile(words))
		if said := a.answer(a.tapped(a.before.id, a.before.buttons[label])); !saysNothing.MatchString(said) {
			a.t.Errorf("a tap on the question before is told %q", said)
		}
	case "reply", "open":
		awaitPrompt(a.t, a.home, "", "awaiting_reply")
		if verb == "reply" {
			a.writes(words, a.last.id)
		}
	case "write":
		awaitRun(a.t, a.home, "")
		a.written = a.writes(words, 0)
		a.confirmed(a.t, a.written-5000+1)
	case "done":
		a.done(a.written)
	case "tells":
		a.until(a.t, "sendMessage", fmt.Sprintf(`"message_id":%d.*%s`, a.written, words))
	case "dated":
		a.botAPI.change(func() { a.dates = int64(digits(words)) })
	case "skew":
		a.botAPI.change(func() { a.skew = int64(digits(words)) })
	case "says", "lacks":
		if matches(words, a.message(a.last.id).text) != (verb == "says") {
			a.t.Errorf("it says %q, %s %s", a.message(a.last.id).text, verb, words)
		}
	case "ends":
		a.ended(a.last.id, regexp.MustCompile(words))
	case "stands":
		<-time.After(time.Second) // in which it must not be taken for gone
		if m := a.message(a.last.id); len(m.buttons) == 0 {
			a.t.Errorf("it is over before it was answered: %q", m.text)
		}
	case "where":
		a.shows(words, "")
	case "never":
		if said := a.texts(); strings.Contains(said, words) {
			a.t.Errorf("the phone was sent %q", said)
		}
	case "quiet":
		<-time.After(2 * time.Second) // longer than anything takes to be asked
		a.botAPI.change(func() {
			for _, m := range a.messages {
				if _, ok := m.choice(yesButton); ok {
					a.t.Errorf("what is over is asked: %q", m.text)
				}
			}
		})
	case "reads":
		a.reads(words + " ")
	case "types":
		a.types(plain)
	case "sees":
		a.sees(words)
	case "make":
		makeFile(a.t, "", a.folder, words)
	case "await":
		comesTrue(a.t, "the program marks "+words, func() bool { return len(inFolder(a.folder, words)) > 0 })
	default:
		a.t.Fatalf("no such step: %s %s", verb, words)
	}
}

// TestAskedAgain: a question that was answered from the phone and is asked again, in the same words at the same place,
// is in a new message, whose buttons answer it, once; those of the message before do nothing.
func TestAskedAgain(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, blocks(t, "again.txt"), func(t *testing.T, b block) {
		a := newQuiz(t, b)
		label, want := strings.TrimSpace(b.parts["button"]), strings.TrimSpace(b.parts["reads"])+" "
		var last seen
		for n := range 3 {
			m := a.asks(last.id, "", label)
			if n > 0 {
				data, _ := last.ending(label)
				for range 2 {
					a.answer(a.tapped(last.id, data))
				}
			}
			a.reads(strings.Repeat(want, n))
			var others sync.WaitGroup
			if id := awaitPrompt(t, a.home, "", "awaiting_reply").str("id"); n == 2 {
				data, _ := m.ending(label)
				others.Go(func() { cli(t, a.home, "answer", id, data[strings.LastIndex(data, ":")+1:]) })
			}
			a.press(m, label)
			a.press(m, label)
			others.Wait()
			a.reads(strings.Repeat(want, n+1))
			a.ended(m.id, regexp.MustCompile("(Yes|Enter) · (phone|atlasbridge answer)"))
			last = m
		}
	})
}

// TestNothingIsLeftOut: where a Yes can be tapped, all that the question is about stands in the message: what explains the
// choices, what is right of it and below, and whole rows above of at most context_chars; "Show all" has the rest. What has
// left the screen unread leaves no Yes before it is shown.
func TestNothingIsLeftOut(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, blocks(t, "leftout.txt"), func(t *testing.T, b block) {
		a := newQuiz(t, b)
		is := strings.TrimSpace(b.parts["is"])
		m := a.where("the question", func(m seen) bool { return strings.Contains(m.text, "Proceed?") && len(m.buttons) > 0 })
		shows := func(m seen) bool { return strings.Contains(fmt.Sprint(m.text, m.buttons), "SENTINEL") }
		_, more := m.choice(showAllButton)
		if is == "all" && !more || is == "shown" && !shows(m) {
			t.Errorf("%s: what it is about is not shown: %q %v", b.at, m.text, m.buttons)
		}
		if more && (is == "all" || is == "cut") {
			a.answer(a.tap(m, showAllButton))
		}
		if is == "all" {
			a.where("what stands above", shows)
		}
		if is != "cut" {
			a.tap(a.find("Proceed?", grantButton), grantButton)
			comesTrue(t, "the program has read it", func() bool { return a.got() != "" })
		}
		known := is == "never" || is == "all"
		for _, m := range a.history() {
			if shows(m) && is == "never" {
				t.Errorf("%s: what stands above the context is sent: %q", b.at, m.text)
			}
			known = known || shows(m)
			if _, ok := m.choice(grantButton); ok && !known {
				t.Errorf("%s: there is a Yes before all is shown: %q", b.at, m.text)
			}
		}
	})
}

// TestBusyToolTakesItLate: what a tool that has much to do shows seconds after a key (2.2 s measured on claude) has been answered,
// in one message, and no key is typed twice.
func TestBusyToolTakesItLate(t *testing.T) {
	needUnix(t)
	t.Parallel()
	const menu, over = "\x1b[2J\x1b[H\x1b[?25lTrust this folder?\r\n\r\n", "\x1b[2J\x1b[Hworking\r\n"
	type row struct{ tool, asks, key, shows, then string }
	beside(t, []row{
		{"claude", picture(t, "dialog", "touch x", ""), "3", over, ""},
		{"pointer", menu + "❯ Yes\r\n  No\r\n", "\x1b[B", menu + "  Yes\r\n❯ No\r\n", "\r"},
	}, func(t *testing.T, row row) {
		w := newBotAPI(t)
		c := newPuppet(t, row.tool, "puppet")
		bridge(t, home(t, w.config("away_after_seconds = 0\nnotify_idle = false\n")), "run", c.tool)
		c.order(order{Raw: true, Name: "ask", Write: row.asks})
		m := w.find("?", noButton)
		w.tap(m, noButton)
		c.reads("ask", row.key)
		<-time.After(1500 * time.Millisecond)
		c.show("", row.shows)
		c.reads("ask", row.key+row.then)
		c.show("", over)
		w.ended(m.id, regexp.MustCompile(`No · phone, [0-9:]+ · \[`))
		if n := w.came("?"); n != 1 {
			t.Errorf("%d messages show it, not 1", n)
		}
		if keys := c.keys(); keys != row.key+row.then {
			t.Errorf("typed in all: %q", keys)
		}
	})
}

// TestTextForWhoHasEnded: a text that was written while the session that it was for still ran goes to no other.
func TestTextForWhoHasEnded(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	soon := strings.Replace(ago(-time.Hour), `"at"`, `"ended_at"`, 1) // after the text was written
	plant(t, p.dir, `"rec":"session","id":"gone-for-good","status":"completed",`+ago(0)+","+soon,
		`"rec":"meta","id":"claim telegram:1001","value":"gone-for-good",`+ago(0))
	p.plays(row{"text": "delete it", "happens": "says ✗ Which session?"})
	p.plays(row{"text": "/keys ENTER", "happens": "says ✗ Which session?"})
	ahead := strings.Replace(ago(-time.Hour), `"at"`, `"decided_at"`, 1) // a clock that has been set back since
	plant(t, p.dir, `"rec":"prompt","id":"x",`+ago(0)+`,"session_id":"gone-for-good","status":"resolved",`+
		`"telegram_chat":"x","decided_by":"cli:local",`+ahead)
	p.plays(row{"text": "/send api go on", "happens": `text api "go on"`})
	id := awaitRun(t, p.dir, "api").str("id")
	plant(t, p.dir, `"rec":"session","id":"`+id+`",`+ago(0)+`,"tool":"tool","label":"api","status":"active",`+
		strings.Replace(ahead, "decided_at", "started_at", 1))
	p.plays(row{"text": "/send api and on", "happens": `text api "and on"`})
}

// TestWrittenBefore: what the phone wanted before a session was stopped for long, or keys that it wanted before somebody
// typed at the keyboard, are refused with words: nothing is typed.
func TestWrittenBefore(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	id := awaitRun(t, p.dir, "api").str("id")
	c := p.tools["api"]
	c.show("ready", "ready\n") // it reads: else that is why
	for i, r := range []struct {
		kind  string
		stood time.Duration // ago it was recorded
		why   string
	}{
		{"text", 2 * time.Minute, "the session was stopped"},
		{"keys", 2 * time.Minute, "the session was stopped"},
		{"keys", 0, "somebody typed at the keyboard"},
	} {
		if r.stood == 0 {
			p.terms["api"].types("typed\r")
			p.terms["api"].sees("typed")
		}
		written := strings.Replace(ago(time.Hour), `"at"`, `"written_at"`, 1)
		plant(t, p.dir, fmt.Sprintf(`"rec":"input","id":"9:%d","session_id":%q,"kind":%q,"by":"telegram:1001","text":"Y",`+
			`"reply_to":%d,"status":"queued",%s,%s`, 70+i, id, r.kind, 70+i, written, ago(r.stood)))
		p.w.writes("/sessions", 0) // it is looked for
		p.w.until(t, "sendMessage", fmt.Sprintf(`"message_id":%d\}.*✗ .*%s`, 70+i, r.why))
	}
	c.change(func() {
		if keys := c.read(); keys != "typed\n" {
			t.Errorf("%q was typed", keys)
		}
	})
}

// TestNumbersOfAnotherChat: when the bot's chat has been changed, the open question is asked there, too; a reply to a
// message there that has the number of the question's before answers nothing, and no outcome is written over that.
func TestNumbersOfAnotherChat(t *testing.T) {
	needUnix(t)
	t.Parallel()
	w, c, dir, x := stageSession(t, "")
	c.show("ask", "Delete production? (y/n) ")
	m := w.find("Delete production?", yesButton)
	awaitPrompt(t, dir, "", "awaiting_reply")
	moved := strings.NewReplacer("chat_id = 1001", "chat_id = 1002", "[1001]",
		"[1002]").Replace(w.config(""))
	makeFile(t, moved, dir, "config.toml")
	chat := map[string]any{"id": 1002, "type": "private"}
	list := map[string]any{"message_id": m.id, "date": 5, "chat": chat, "text": "Running: nothing",
		"from": map[string]any{"id": 123456789, "is_bot": true}}
	w.update(map[string]any{"message": map[string]any{"message_id": 7000, "date": time.Now().Unix() + 3, "text": "y",
		"from": map[string]any{"id": 1002}, "chat": chat, "reply_to_message": list}})
	w.until(t, "sendMessage", `"chat_id":1002.*"message_id":7000.*Which session`)
	w.until(t, "sendMessage", `"chat_id":1002.*Delete production`) // where it can be answered now
	if keys := c.keys(); keys != "" {
		t.Errorf("%q was typed", keys)
	}
	awaitRecord(t, dir, "prompt", "it waits there", func(r record) bool {
		return r.str("status") == "awaiting_reply" && strings.HasSuffix(r.str("telegram_chat"),
			"/1002") && r.str("send") == ""
	})
	w.update(map[string]any{"message": map[string]any{"message_id": 7001, "date": time.Now().Unix() + 5, "text": "n",
		"from": map[string]any{"id": 1002}, "chat": chat}})
	c.reads("ask", "n\n")
	c.order(order{Exit: true})
	x.exits(0)
	if now := w.message(m.id); now.method != m.method {
		t.Errorf("the other chat's message %d is written over: %v", m.id, now)
	}
}

// TestShownInAnotherChat: what was shown in one chat was not shown in another: there nothing but a refusal can be tapped.
func TestShownInAnotherChat(t *testing.T) {
	t.Parallel()
	w := newBotAPI(t)
	dir := home(t, w.config(""))
	asks(t, dir, strings.Repeat("a line that is deleted\n", 300), "Apply?", "-")
	w.press(w.shows("Apply?", "Show all"), "Show all")
	m := w.shows("Apply?", "Yes")
	moved := strings.NewReplacer("chat_id = 1001", "chat_id = 1002", "[1001]",
		"[1002]").Replace(w.config(""))
	makeFile(t, moved, dir, "config.toml")
	there := w.where("it is asked there", func(now seen) bool { return now.id > m.id && len(now.buttons) > 0 })
	if _, ok := there.ending("Yes"); ok {
		t.Errorf("it can be allowed: %v", there.buttons)
	}
}

// TestShownInPartInAnotherChat: what one chat was shown the other need not know: where the chat changes amid "Show all"
// the new one is shown every row before it may allow anything.
func TestShownInPartInAnotherChat(t *testing.T) {
	t.Parallel()
	w := newBotAPI(t)
	dir := home(t, w.config(""))
	about := ""
	for i := range 300 {
		about += fmt.Sprintf("line %d that is deleted\n", i)
	}
	moved := strings.Replace(w.config(""), "1001", "-1002", 1)
	shown := ""
	w.decides(func(method string, p map[string]any) (todo fate) {
		switch to := numberOf(p, "chat_id"); {
		case to == -1002:
			shown += fmt.Sprintln(p["text"])
		case method == "sendMessage" && strings.Contains(fmt.Sprint(p["text"]), "line 100 ") && buttonsOf(p)["No"] == "":
			makeFile(t, moved, dir, "config.toml")
		}
		return todo
	})
	asks(t, dir, about, "Apply?", "-")
	m := w.shows("Apply?", "Show all")
	w.press(m, "Show all")
	there := w.where("it is asked there", func(now seen) bool { return now.id > m.id && len(now.buttons) > 0 })
	w.change(func() { w.chat = -1002 })
	w.press(there, "Show all")
	w.shows("Apply?", "Yes")
	w.change(func() {
		for line := range strings.Lines(about) {
			if !strings.Contains(shown, line) {
				t.Fatalf("it can be allowed there, and this was not shown: %s", line)
			}
		}
	})
}

// TestTakenOutOfTheAllowlist: who is taken out of config.toml answers nothing from then on, also where nobody told the
// process that listens; while config.toml is wrong what it said before counts, and that is told.
func TestTakenOutOfTheAllowlist(t *testing.T) {
	needUnix(t)
	t.Parallel()
	p := newBotAPI(t)
	group := func(users string) string {
		config := strings.Replace(p.config(""), "chat_id = 1001", "chat_id = -1005", 1)
		return strings.Replace(config, "[1001]", users, 1)
	}
	dir := home(t, group("[1001, 1002]"))
	bridge(t, dir, "run", "sleep", "1000")
	p.await(t, "the session listens", func() bool { return len(p.polls) > 0 })
	taps := func(m seen, by int, label string) {
		data, _ := m.ending(label)
		p.update(map[string]any{"callback_query": map[string]any{"id": fmt.Sprint("by ", by), "data": data,
			"from": map[string]any{"id": by}, "message": map[string]any{"message_id": m.id, "date": time.Now().Unix(),
				"chat": map[string]any{"id": -1005, "type": "supergroup"}}}})
	}
	first := asks(t, dir, "", "--timeout", "50s", "First?")
	m := p.shows("First?", "Yes")
	makeFile(t, group("[1001]"), dir, "config.toml")
	taps(m, 1002, "Yes")
	comesTrue(t, "who was taken out is a stranger", func() bool { return len(entries(t, dir, "UNAUTHORIZED")) > 0 })
	makeFile(t, "nonsense", dir, "config.toml")
	taps(m, 1001, "No")
	first.gets(1, "no\n", "")
	p.shows("the settings stay as they were", "")
}

// TestInboxFull: however much strangers send at once, the operator's tap arrives.
func TestInboxFull(t *testing.T) {
	needUnix(t)
	t.Parallel()
	w, c, _, _ := stageSession(t, "")
	c.show("ask", "Continue? (y/n) ")
	m := w.find("Continue?", yesButton)
	var flood []string
	for i := range 101 {
		flood = append(flood, fmt.Sprintf(`{"update_id":%d,"message":{"message_id":1,"text":"%s","from":{"id":666},`+
			`"chat":{"id":666,"type":"private"}}}`, 8000+i, strings.Repeat("x", 200_000)))
	}
	w.change(func() { w.updates = append(w.updates, flood...) })
	w.tap(m, yesButton)
	c.reads("ask", "y\n")
}

// ---- what the phone shows ----
// A message says whose it is, what is asked, what about, what each button does, and at last until when, or what became of it.

// TestPages: each question has the message and the buttons that testdata/pages.txt draws, before and after it is answered.
func TestPages(t *testing.T) {
	t.Parallel()
	needUnix(t)
	beside(t, blocks(t, "pages.txt"), func(t *testing.T, b block) {
		b.parts["stdin"] = strings.ReplaceAll(b.parts["stdin"], "LONG", strings.Repeat("a word ", 800))
		c, x := pageOf(t, b)
		var first seen
		c.await(t, "a question", func() bool {
			i := slices.IndexFunc(c.past, func(m seen) bool { return reUntil.MatchString(m.text) })
			if i >= 0 {
				first = c.past[i]
			}
			return i >= 0
		})
		for step := range strings.Lines(strings.TrimSpace(b.parts["answer"])) {
			verb, keys, _ := strings.Cut(strings.TrimSpace(step), " ")
			switch verb {
			case "type":
				awaitPrompt(t, c.dir, "", "awaiting_reply")
				x.types(keys + "\r")
			case "wait":
				awaitOver(t, c.dir)
			default:
				c.play(strings.TrimSpace(step))
			}
		}
		c.where("what became of it", func(m seen) bool {
			return m.id == first.id && !reUntil.MatchString(m.text) && !strings.Contains(m.text,
				"on its way")
		})
		got := ""
		for _, call := range c.requests() {
			if call.method == "sendMessage" && reUntil.MatchString(fmt.Sprint(call.p["text"])) && got == "" {
				got = drawing(call.p)
			}
		}
		edits := slices.DeleteFunc(c.requests(), func(call apiCall) bool { return numberOf(call.p, "message_id") != first.id || call.p["text"] == nil })
		got += "\n---\n" + drawing(edits[len(edits)-1].p)
		if want := strings.TrimSpace(b.parts["shows"]); got != want {
			t.Errorf("%s: the phone shows\n--- shows\n%s\n\nand not\n--- shows\n%s", b.at, got, want)
		}
	})
}

// reUntil finds the last line of an open question.
var reUntil = regexp.MustCompile(`No answer by \d\d:\d\d`)

// pageOf has a question asked, by a program on a screen, a hook or a script.
func pageOf(t *testing.T, b block) (*inquiry, *terminal) {
	t.Helper()
	screen, painted := b.parts["screen"]
	if !painted {
		return newInquiry(t, b, ""), nil
	}
	w := newBotAPI(t)
	c := &inquiry{block: b, botAPI: w, t: t, dir: home(t, w.config("away_after_seconds = 0\n"+b.parts["config"]))}
	text, err := strconv.Unquote("\"" + strings.ReplaceAll(strings.ReplaceAll(strings.TrimSuffix(screen, "\n"), `"`, `\"`), "\n", "\\r\\n") + "\"")
	file := filepath.Join(t.TempDir(), "screen")
	if err != nil {
		t.Fatal(err)
	}
	makeFile(t, text, file)
	program := "stty " + cmp.Or(strings.TrimSpace(b.parts["modes"]),
		"sane") + "; cat \"$0\"; dd ibs=1 count=1 2>/dev/null >&2"
	return c, bridge(t, c.dir, "run", "--name", "api", "sh", "-c", program, file)
}

// reVaries is what differs from run to run: times and the session's number.
var reVaries = regexp.MustCompile(`\d\d:\d\d|\[(<code )?SID:\w+>?\]$`)

// drawing is a request as a phone draws it: entities as <type text>, <type:language text>, a row of buttons in a line.
func drawing(p map[string]any) string {
	all := utf16.Encode([]rune(fmt.Sprint(p["text"])))
	begins, ends := map[int]string{}, map[int]int{}
	entities, _ := p["entities"].([]any)
	for _, one := range entities {
		e, _ := one.(map[string]any)
		at := int(numberOf(e, "offset"))
		kind, _ := e["type"].(string)
		if language, ok := e["language"].(string); ok {
			kind += ":" + language
		}
		begins[at] += "<" + kind + " "
		ends[at+int(numberOf(e, "length"))]++
	}
	var text strings.Builder
	at := 0
	for _, r := range string(utf16.Decode(all)) {
		text.WriteString(strings.Repeat(">", ends[at]) + begins[at] + string(r))
		at += utf16.RuneLen(r)
	}
	lines := reVaries.ReplaceAllString(text.String()+strings.Repeat(">", ends[at]), "…")
	colours := map[any]string{"success": "green ", "danger": "red ", "primary": "blue "}
	markup, _ := p["reply_markup"].(map[string]any)
	rows, _ := markup["inline_keyboard"].([]any)
	for _, row := range rows {
		lines += "\n"
		for _, one := range row.([]any) {
			b, _ := one.(map[string]any)
			lines += fmt.Sprintf("[%s%s] ", colours[b["style"]], b["text"])
		}
	}
	return strings.TrimSpace(strings.ReplaceAll(lines+"\n", "] \n", "]\n"))
}

// TestAnswerOfATurn: the notice of a turn has the agent's answer, drawn as it was meant; of one that a message cannot hold it has
// both ends, and all of it comes at a tap, each word once.
func TestAnswerOfATurn(t *testing.T) {
	t.Parallel()
	needUnix(t)
	turn := func(said string) (*botAPI, seen) {
		w, _, _, _ := claudeSession(t, "away_after_seconds = 0",
			play{Asks: []ask{{Command: "true"}}, Said: said})
		w.tap(w.find("true", yesButton), yesButton)
		return w, w.shows("finished", "")
	}
	w, m := turn("I **fixed** it:\n- `a.go`\n- see x.dev")
	for _, call := range w.requests() {
		got := drawing(call.p)
		want := `^<bold [^>]* · claude> finished( · \d+s)?\nI <bold fixed> it:\n• <code a.go>\n• see <code x.dev>\nreply to go on · …$`
		if strings.HasPrefix(fmt.Sprint(call.p["text"]), m.text[:20]) && strings.Contains(got, "finished") && !matches(want, got) {
			t.Errorf("the notice is %s", got)
		}
	}
	var answer strings.Builder
	for i := range 900 {
		fmt.Fprintf(&answer, "word%d ", i)
	}
	w, m = turn("```go\n" + answer.String() + "\n```")
	if !strings.Contains(m.text, "word0 ") || !strings.Contains(m.text, "word899") || strings.Contains(m.text, "word450 ") {
		t.Errorf("the notice is %q", m.text)
	}
	label, _ := m.choice(anyButton)
	w.tapped(m.id, m.buttons[label])
	w.await(t, "all of the answer", func() bool {
		all := ""
		for _, now := range w.messages {
			if now.id > m.id {
				all += now.text
			}
		}
		for i := range 900 {
			if strings.Count(all+" ", fmt.Sprintf("word%d ", i))+strings.Count(all, fmt.Sprintf("word%d\n", i)) != 1 {
				return false
			}
		}
		return true
	})
}

// TestStream: with --stream the phone gets every line that a program prints, once and in order, in messages that fit; after
// another message it goes on in one of its own.
func TestStream(t *testing.T) {
	t.Parallel()
	needUnix(t)
	w := newBotAPI(t)
	x := bridge(t, home(t, w.config("away_after_seconds = 0\ncontext_chars = 0\n")), "run", "--stream", "sh", "-c",
		`seq 1 900; printf '\nGo? (y/n) '; read a; seq 901 1200`)
	w.tap(w.find("Go?", yesButton), yesButton)
	x.exits(0)
	var got []string
	asked := int64(0)
	for id := int64(101); w.message(id).id != 0; id++ {
		m := w.message(id)
		if strings.Contains(m.text, "Go?") && asked == 0 {
			asked = m.id
		}
		numbers := regexp.MustCompile(`(?m)^\d+$`).FindAllString(m.text, -1)
		if len(numbers) > 0 && numbers[0] == "901" && m.id < asked {
			t.Error("the stream goes on above the question")
		}
		got = append(got, numbers...)
	}
	for i := range 1200 {
		if len(got) != 1200 || got[i] != fmt.Sprint(i+1) {
			t.Fatalf("of 1200 lines the phone shows %d: %q", len(got), got)
		}
	}
}

// TestStreamAfterALostAnswer: each word comes once, also where Telegram's answer to a piece of it was lost.
func TestStreamAfterALostAnswer(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "")
	p.starts("api", "--stream")
	edits := 0
	p.w.decides(func(method string, params map[string]any) (todo fate) {
		if strings.Contains(fmt.Sprint(params["text"]), "two") {
			edits++
			todo.cut = edits == 1
		}
		return todo
	})
	for _, word := range []string{"one", "two", "three"} {
		p.tools["api"].show(word, word+"\r\n")
		p.w.shows(word, "")
		p.w.await(t, "the lost edit is made again", func() bool { return edits != 1 })
	}
	if n := p.w.came("one"); n != 1 {
		t.Errorf("the first word came %d times", n)
	}
}

// TestEveryWordIsShown: of random calls of hooks every word is in the message, or nothing but a refusal can be tapped.
func TestEveryWordIsShown(t *testing.T) {
	t.Parallel()
	needUnix(t)
	seed := time.Now().UnixNano()
	if given := os.Getenv("ATLASBRIDGE_TEST_SEED"); given != "" {
		fmt.Sscan(given, &seed)
	}
	rnd := rand.New(rand.NewPCG(uint64(seed), 0))
	calls := make([]string, 2+rounds(t))
	for i := range calls {
		calls[i] = randomCall(rnd)
	}
	beside(t, calls, func(t *testing.T, call string) {
		c := newInquiry(t, block{parts: map[string]string{"call": call, "answer": ""}}, "")
		m := c.shows("", "No")
		_, affirms := m.choice(grantButton)
		said := m.text
		for label := range m.buttons {
			said += "\n" + label
		}
		var input any
		_, arguments, _ := strings.Cut(call, " ")
		if err := json.Unmarshal([]byte(arguments), &input); err != nil {
			t.Fatal(err)
		}
		for _, word := range wordsIn(input) {
			if affirms && !strings.ContainsAny(word, "\"\\") && !strings.Contains(said, word) { // JSON writes those in other words
				t.Errorf("ATLASBRIDGE_TEST_SEED=%d: %q of %s can be allowed unseen: %s", seed, word, call, said)
			}
		}
		c.play("tap No")
		c.ends()
	})
}

// wordsIn are the words of all texts in a value of JSON.
func wordsIn(v any) (words []string) {
	switch v := v.(type) {
	case string:
		return strings.Fields(v)
	case []any:
		for _, one := range v {
			words = append(words, wordsIn(one)...)
		}
	case map[string]any:
		for _, one := range v {
			words = append(words, wordsIn(one)...)
		}
	}
	return words
}

// randomCall is a call of a hook: words, shell characters and bullets, a few or many.
func randomCall(rnd *rand.Rand) string {
	all := strings.Fields("rm -rf /home $(id) ; | && `ls` ○ ● ☐ * · … ... until No Yes then Lasting: a b word words Ωmega 日本 1. 2) -- > ❯ " +
		"/cancel @you 4111111111111111 +15551234567 1.2.3.4 (y/n) {} '\"' \\n ⏎ , . " + strings.Repeat("x", 300))
	sizes, blanks := []int{2, 9, 60, 900}, []string{" ", "  ", "\n"}
	text := func() string {
		var b strings.Builder
		for range rnd.IntN(sizes[rnd.IntN(4)]) {
			b.WriteString(all[rnd.IntN(len(all))] + blanks[rnd.IntN(3)])
		}
		return b.String()
	}
	input := map[string]any{}
	for _, name := range strings.Fields("description command file_path old_string new_string content url prompt plan replace_all X") {
		if rnd.IntN(3) == 0 {
			values := []any{text(), rnd.IntN(9), []string{text()}, map[string]string{"deep": text()}}
			input[name] = values[rnd.IntN(4)]
		}
	}
	var raw strings.Builder
	enc := json.NewEncoder(&raw)
	enc.SetEscapeHTML(false) // as tools write it
	_ = enc.Encode(input)    // of texts and numbers
	return strings.Fields("Bash Edit Write WebFetch mcp__s__do")[rnd.IntN(5)] + " " + strings.TrimSpace(raw.String())
}

// sent is an agent's text as it is sent.
func sent(t *testing.T, text string) (p map[string]any) {
	t.Helper()
	raw, err := json.Marshal(markdown(text).outgoing(0, nil))
	if err == nil {
		err = json.Unmarshal(raw, &p)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestMarkdown: an agent's answer is drawn as its author meant it, what is no Markdown stays, and nothing in it can be tapped.
func TestMarkdown(t *testing.T) {
	for _, b := range blocks(t, "markdown.txt") {
		p := sent(t, strings.TrimSuffix(b.parts["text"], "\n"))
		if got, want := drawing(p), strings.TrimSpace(b.parts["drawn"]); got != want {
			t.Errorf("%s: it is\n--- drawn\n%s\n\nand not\n--- drawn\n%s", b.at, got, want)
		}
		wellFormed(t, p)
	}
}

// wellFormed checks what Telegram asks of entities: at most 100, in the text, in order, one in another or apart, nothing in
// code; and that nothing outside of code is what Telegram acts on.
func wellFormed(t *testing.T, p map[string]any) {
	t.Helper()
	text, _ := p["text"].(string) // none of nothing
	units := utf16.Encode([]rune(text))
	entities, _ := p["entities"].([]any)
	if len(entities) > 100 {
		t.Errorf("%d entities", len(entities))
	}
	var outer []map[string]any
	last := int64(0)
	end := func(e map[string]any) int64 { return numberOf(e, "offset") + numberOf(e, "length") }
	plain := slices.Clone(units)
	for _, one := range entities {
		e := one.(map[string]any)
		from := numberOf(e, "offset")
		if numberOf(e, "length") <= 0 || from < last || end(e) > int64(len(units)) {
			t.Fatalf("%v in %d units of %q", entities, len(units), p["text"])
		}
		last = from
		outer = slices.DeleteFunc(outer, func(o map[string]any) bool { return end(o) <= from })
		for _, o := range outer {
			if end(e) > end(o) || o["type"] == "code" || o["type"] == "pre" {
				t.Fatalf("%v in %v of %q", e, o, p["text"])
			}
		}
		outer = append(outer, e)
		for i := from; (e["type"] == "code" || e["type"] == "pre") && i < end(e); i++ {
			plain[i] = ' '
		}
	}
	rest := string(utf16.Decode(plain))
	if found := regexp.MustCompile(`(^|\s)[/@][a-zA-Z]|\w://\w|\w\.(com|dev|md|ru)\b`).FindString(rest); found != "" {
		t.Errorf("%q can be tapped in %q", found, rest)
	}
}

// FuzzMarkdown: no text panics; its entities are well-formed; its words are all there, in their order; nothing in it can be
// tapped.
func FuzzMarkdown(f *testing.F) {
	for _, text := range []string{"# a\n**b** `c` [d](e)\n```go\nf\n```", "|a|b|\n|-|-:|\n|c|d|", "> a\n>> - *b _c_* ***d***", "/x @y https://z.dev",
		"```a b\n", "**a `b** c`", "[a `b](u) c` d", "|😀|\n|-|\n" + strings.Repeat("x", 40) + "|\xff"} {
		f.Add(text)
	}
	words := regexp.MustCompile(`[\pL\pN]+`)
	f.Fuzz(func(t *testing.T, text string) {
		text = strings.ReplaceAll(strings.ToValidUTF8(text, "?"), "\x00",
			"?") // as what a hook brings is cleaned
		p := sent(t, text)
		wellFormed(t, p)
		left := words.FindAllString(fmt.Sprint(p["text"]), -1)
		for _, word := range words.FindAllString(text, -1) {
			i := slices.IndexFunc(left, func(w string) bool { return strings.HasPrefix(w, word) })
			if strings.Contains(text, "```") || strings.Contains(text, "~~~") { // the language is no word
				continue
			}
			if i < 0 {
				t.Fatalf("%q of %q is not in %q", word, text, p["text"])
			}
			left[i] = strings.TrimPrefix(left[i], word)
			left = left[i:]
		}
	})
}

// ---- telegram.go: what arrives ----
// Of all that arrives only what the operator meant acts, once, where he meant it.

// TestPhone: what the operator writes or taps does what testdata/phone.txt says of it, and nothing else; what nobody has
// documented (updates.txt) does nothing.
func TestPhone(t *testing.T) {
	needUnix(t)
	t.Parallel()
	var plays [][]row
	for _, r := range slices.Concat(table(t, "phone.txt"), table(t, "updates.txt")) {
		if last := len(plays) - 1; last >= 0 && plays[last][0]["sessions"] == r["sessions"] {
			plays[last] = append(plays[last], r)
		} else {
			plays = append(plays, []row{r})
		}
	}
	for _, rows := range plays {
		t.Run(rows[0]["sessions"], func(t *testing.T) {
			t.Parallel()
			p := newPhonePlay(t, rows[0]["sessions"])
			p.w.change(func() { p.w.slack = 1000 }) // pacing is another test's: here it is switched off
			for _, r := range rows {
				p.plays(r)
			}
			p.w.writes("/last", 0)
			p.w.shows("There is no /last here", "") // replies are sent in order: all others have come
			files, _ := filepath.Glob(filepath.Join(p.dir, "files", "*", "*"))
			for _, file := range files {
				info, err := os.Stat(file)
				text, _ := os.ReadFile(file) // Stat tells
				if err != nil || info.Mode().Perm() != 0o600 || string(text) != "content" {
					t.Errorf("the file %s is %v, %v: %.20q", file, info.Mode(), err, text)
				}
			}
			p.w.change(func() {
				for id, at := range p.silent {
					if said := p.repliesLocked(id); said != "" {
						t.Errorf("%s: it is answered with %q", at, said)
					}
				}
			})
		})
	}
}

// phonePlay is a phone with sessions of these names behind it.
type phonePlay struct {
	t       *testing.T
	w       *botAPI
	dir     string
	tools   map[string]*puppet   // by the names of their sessions
	terms   map[string]*terminal // the same
	screens map[string]string    // what each shows, by its row
	asked   seen                 // the newest question
	before  int64                // the message of the one before it
	silent  map[int64]string     // messages that nothing may answer, and the row
}

// newPhonePlay begins sessions with these names, the first of which polls; "free", "group", "topics": see phone.txt.
func newPhonePlay(t *testing.T, sessions string, flags ...string) *phonePlay {
	needUnix(t)
	p := &phonePlay{
		t:       t,
		w:       newBotAPI(t),
		tools:   map[string]*puppet{},
		terms:   map[string]*terminal{},
		screens: map[string]string{},
		silent:  map[int64]string{},
	}
	p.w.dates = 10 // he reads first what he answers
	p.w.answers["getFile"] = func(params map[string]any) string {
		return fmt.Sprintf(`{"file_path":"files/%v.jpg"}`, params["file_id"])
	}
	p.w.files = func(w http.ResponseWriter, r *http.Request) {
		switch path.Base(r.URL.Path) {
		case "gone.jpg":
			http.NotFound(w, r)
		case "elsewhere.jpg":
			http.Redirect(w, r, "large.jpg", http.StatusFound)
		case "stalls.jpg":
			<-r.Context().Done()
		case "huge.jpg":
			_, _ = w.Write(make([]byte, 20<<20+1)) // the client may hang up
		default:
			fmt.Fprint(w, "content")
		}
	}
	p.w.put(50, "Running: nothing")
	p.w.put(7, "of an older question")
	config := "away_after_seconds = 0\nnotify_idle = false\nstuck_timeout_seconds = 600\n" // only what is shown asks
	for name := range strings.FieldsSeq(sessions) {
		switch name {
		case "free":
			config += "free_text_enabled = true\n"
		case "group":
			p.w.chat = -1001
		case "topics":
			p.w.topics = map[int64]string{40: "his own"}
		}
	}
	p.dir = home(t, p.w.config(config))
	for name := range strings.FieldsSeq(sessions) {
		ended, gone := strings.CutPrefix(name, "-")
		switch {
		case slices.Contains([]string{"free", "group", "topics", "hostile"}, name):
		case gone:
			bridge(t, p.dir, "run", "--name", ended, "true").exits(0)
		case name == "own":
			p.starts(name, "--channel", "local")
		default:
			p.starts(name, flags...)
			awaitRecord(t, p.dir, "session", name+" has its topic", func(r record) bool {
				return p.w.topics == nil || r.str("label") == name && r.str("thread_id") != "0"
			})
		}
	}
	return p
}

// starts begins a session with a puppet.
func (p *phonePlay) starts(name string, flags ...string) {
	p.t.Helper()
	p.tools[name] = newPuppet(p.t, "tool", "puppet")
	p.terms[name] = bridge(p.t, p.dir, slices.Concat([]string{"run", "--name", name}, flags,
		[]string{p.tools[name].tool})...)
	p.screens[name] = "start"
	p.tools[name].show("start", "")
	awaitRecord(p.t, p.dir, "session", name+" runs", func(r record) bool {
		return r.str("label") == name && r.str("status") == "active" && r["pid"] != nil && r.str("pid") != "0"
	})
}

// inputs are the texts that were sent to sessions, in order.
func (p *phonePlay) inputs() (texts []string) {
	for _, r := range records(p.t, p.dir, "input") {
		texts = append(texts, r.str("text"))
	}
	return texts
}

// unpaced has all processes forget what they sent: the next message leaves at once.
func (p *phonePlay) unpaced() {
	bot, _, _ := strings.Cut(fakeToken, ":")
	err := os.Remove(filepath.Join(p.dir, bot+".pace"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		p.t.Fatal(err)
	}
}

// plays has something arrive and checks what happens.
func (p *phonePlay) plays(r row) {
	p.t.Helper()
	p.unpaced()
	if r["shown"] != "" {
		p.shows(r["shown"])
	}
	before := p.state()
	update := map[string]any{}
	var m map[string]any
	var id int64
	button, tapped := strings.CutPrefix(r["arrives"], "tap ")
	if strings.HasPrefix(r["arrives"], `{"update_id":N`) {
		data, _ := p.asked.ending("Yes")
		raw := strings.ReplaceAll(strings.Replace(r["arrives"], "N", fmt.Sprint(p.w.lastUp+1), 1),
			"DATA", data)
		if err := json.Unmarshal([]byte(raw), &update); err != nil {
			p.t.Fatal(r["at"], err)
		}
		tapped = true // nothing tells what replies to it
	} else if tapped {
		m = p.tap(button)
		update["callback_query"] = m
	} else {
		m = p.letter(r["text"], r["arrives"])
		id, _ = m["message_id"].(int64)
		update["message"] = m
	}
	times := 1
	if strings.Contains(r["arrives"], "twice") {
		times = 2
	}
	number := p.w.update(update, times)
	p.w.confirmed(p.t, number)
	var did, want []string
	for key, what := range p.state() {
		if before[key] == "" {
			did = append(did, what)
		}
	}
	slices.Sort(did)
	silent := !tapped
	for what := range strings.SplitSeq(r["happens"], "; ") {
		if !regexp.MustCompile("^(-$|says|told|types|clears)").MatchString(what) {
			want = append(want, what)
		}
	}
	if !slices.Equal(did, want) {
		p.t.Fatalf("%s: %q %q does %q, not %q", r["at"], r["arrives"], r["text"], did, want)
	}
	for what := range strings.SplitSeq(r["happens"], "; ") {
		verb, rest, _ := strings.Cut(what, " ")
		switch verb {
		case "says":
			silent = false
			if number, words, ok := strings.Cut(rest, " "); ok && strings.Trim(number, "0123456789") == "" {
				id, _ = strconv.ParseInt(number, 10, 64) // digits
				rest = words
			}
			p.w.await(p.t, r["at"]+": "+what, func() bool { return strings.Contains(p.repliesLocked(id), rest) })
		case "clears":
			number, _ := strconv.ParseInt(rest, 10, 64) // digits
			p.w.ended(number)
		case "told":
			if said := p.w.answer(fmt.Sprint(m["id"])); !strings.Contains(said, rest) {
				p.t.Fatalf("%s: the tap is told %q, not %q", r["at"], said, rest)
			}
		case "types":
			name, keys, _ := strings.Cut(rest, " ")
			p.tools[name].reads(p.screens[name], keys)
		}
	}
	if silent && (len(want) == 0 || want[0] == "stranger") {
		p.silent[id] = r["at"]
	}
}

// shows has a session's program show something, and waits for what the phone says of it.
func (p *phonePlay) shows(what string) {
	p.t.Helper()
	what, hidden := strings.CutPrefix(what, "hidden ")
	name, text, _ := strings.Cut(what, " ")
	comesTrue(p.t, "what was sent to the sessions is done", func() bool {
		return !slices.ContainsFunc(records(p.t, p.dir, "input"),
			func(r record) bool { return r.str("status") == "queued" })
	})
	p.screens[name] = what + fmt.Sprint(p.asked.id)
	switch text {
	case "ends", "ended":
		if text == "ends" {
			p.tools[name].order(order{Exit: true})
		}
		awaitRecord(p.t, p.dir, "session", what, func(r record) bool {
			return r.str("label") == name && r.str("status") != "active"
		})
		return
	case "-":
		p.tools[name].show(p.screens[name], "\x1b[H\x1b[J")
		comesTrue(p.t, "nothing is asked any more", func() bool {
			return !slices.ContainsFunc(records(p.t, p.dir, "prompt"), func(r record) bool {
				return r.str("status") == "awaiting_reply"
			})
		})
		return
	}
	p.tools[name].order(order{Name: p.screens[name], Write: "\x1b[H\x1b[J" + text + " ", NoEcho: hidden})
	p.before = p.asked.id
	p.asked = p.w.where(what, func(m seen) bool { return m.id > p.before && strings.Contains(m.text, text) })
	awaitRecord(p.t, p.dir, "prompt", what, func(r record) bool {
		return r.str("status") == "awaiting_reply" && newestMessage(r) == p.asked.id
	})
}

// tap is a tap on a button of the newest question, as an update has it; other says what of it is other than it should be.
func (p *phonePlay) tap(button string) map[string]any {
	label, other, _ := strings.Cut(button, ", ")
	data, _ := p.asked.ending(label)
	part := strings.SplitN(data, ":", 5)
	tap := p.w.touch(p.asked.id, data)
	message := tap["message"].(map[string]any)
	what, value, _ := strings.Cut(other, " ")
	number, _ := strconv.ParseInt(value, 10, 64) // where it is none it is not used
	switch at := slices.Index([]string{"", "prompt", "session", "nonce", "value"}, what); {
	case at > 0:
		part[at] = value
		tap["data"] = strings.Join(part, ":")
	case what == "data":
		tap["data"] = value
	case what == "message":
		message["message_id"] = number
	case what == "before":
		message["message_id"] = p.before
	case what == "from":
		tap["from"] = map[string]any{"id": number, "username": "operator"}
	case what == "chat":
		message["chat"] = map[string]any{"id": number, "type": "group"}
	}
	return tap
}

// letter is a text of the operator's as an update has it, which arrives like that.
func (p *phonePlay) letter(text, arrives string) map[string]any {
	to, thread, early := int64(0), int64(0), false
	for how := range strings.SplitSeq(arrives, ", ") {
		place, name, _ := strings.Cut(how, " ")
		switch {
		case place == "in":
			number, _ := awaitRun(p.t, p.dir, name)["thread_id"].(float64)
			thread = int64(number)
		case how == "to opening":
			to = thread
		case how == "early":
			early = true
		case how == "to status":
			to = 50
		case strings.HasPrefix(how, "to one of "):
			to = p.w.about(awaitRun(p.t, p.dir, strings.TrimPrefix(how, "to one of ")))
		case place == "to":
			to = p.asked.id
		}
	}
	sessions := records(p.t, p.dir, "session")
	newest := sessions[len(sessions)-1].str("id")
	m := p.w.letter(thread, strings.NewReplacer("ID7", newest[:7], "ID8", newest[:8]).Replace(text),
		to)
	if early {
		m["date"] = p.asked.at.Unix()
	}
	for how := range strings.SplitSeq(arrives, ", ") {
		if id, ok := strings.CutPrefix(how, "from "); ok {
			m["reply_to_message"].(map[string]any)["from"] = map[string]any{"id": json.Number(id), "is_bot": id != "1001"}
		}
		if strings.HasPrefix(how, "{") {
			if err := json.Unmarshal([]byte(how), &m); err != nil {
				p.t.Fatal(how, err)
			}
		}
	}
	return m
}

// repliesLocked is what replies to a message, the lock of the Bot API is held.
func (p *phonePlay) repliesLocked(id int64) (said string) {
	for _, c := range p.w.calls {
		to, _ := c.p["reply_parameters"].(map[string]any)
		if c.method == "sendMessage" && numberOf(to, "message_id") == id {
			said += strings.Join(strings.Fields(fmt.Sprint(c.p["text"])), " ") + "\n"
		}
	}
	return said
}

// state is what the operator has brought about by now: inputs, answers, claims, and the audit log's strangers.
func (p *phonePlay) state() map[string]string {
	found, label, claimed := map[string]string{}, map[string]string{}, ""
	for _, r := range jsonLines(p.t, p.dir, "state.jsonl") {
		name := cmp.Or(label[r.str("session_id")], "?")
		switch key := r.str("rec") + r.str("id"); {
		case r.str("rec") == "session":
			label[r.str("id")] = r.str("label")
		case r.str("rec") == "input" && found[key] == "":
			found[key] = fmt.Sprintf("%s %s %q", r.str("kind"), name, r.str("text"))
		case r.str("rec") == "prompt" && r.str("decided_by") == "telegram:1001":
			found[key] = fmt.Sprintf("answers %s %s", name, r.str("value"))
		case key == "metaclaim telegram:1001":
			if now := r.str("value"); now != claimed {
				claimed = now
				found[r.str("at")] = "claims " + cmp.Or(label[now], "nobody")
			}
		}
	}
	for _, e := range entries(p.t, p.dir, "UNAUTHORIZED") {
		found["audit"+e.str("seq")] = "stranger"
	}
	return found
}

// TestPollerIsReplaced: when the process that polls is killed, ends or is stopped by ^Z another one polls, and what has
// been acted on but not confirmed does not act again.
func TestPollerIsReplaced(t *testing.T) {
	needTool(t, "bash")
	t.Parallel()
	for how, leave := range map[string]func(*phonePlay){
		"killed": func(p *phonePlay) { p.terms["api"].signal("KILL") },
		"ended":  func(p *phonePlay) { p.tools["api"].order(order{Exit: true}) },
		"stopped": func(p *phonePlay) {
			p.terms["api"].types("\x1a")
			p.terms["api"].sees("Stopped") // says bash: it no longer polls
		},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			p := newPhonePlay(t, "")
			var lost atomic.Bool
			p.w.fault = func(method string, _ http.ResponseWriter) bool {
				if method == "getUpdates" && lost.Load() {
					panic(http.ErrAbortHandler)
				}
				return false
			}
			if how == "stopped" {
				p.inShell("api")
			} else {
				p.starts("api")
			}
			p.w.await(t, "it polls", func() bool { return p.w.waiting == 1 })
			p.starts("web")
			p.w.await(t, "it polls again", func() bool { return p.w.waiting == 1 })
			lost.Store(true)
			p.w.writes("/send web one", 0)
			awaitRecord(t, p.dir, "input", "one", func(r record) bool { return r.str("text") == "one" })
			leave(p)
			p.w.change(func() { p.w.waiting = 0 }) // of who is stopped
			lost.Store(false)
			p.w.writes("/send web two", 0)
			p.tools["web"].reads("start", "two\n")
			if got := p.inputs(); !slices.Equal(got, []string{"one", "two"}) {
				t.Errorf("sent to the session: %q", got)
			}
		})
	}
}

// inShell is starts in a shell with job control.
func (p *phonePlay) inShell(name string) {
	p.t.Helper()
	p.tools[name] = newPuppet(p.t, "tool", "puppet")
	env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+p.dir,
		"HISTFILE=", "LC_ALL=C")
	p.terms[name] = inTerminal(p.t, env, "bash", "--norc", "--noprofile", "-i")
	p.terms[name].types(fmt.Sprintf("%q run --name %s %q\r", os.Args[0], name, p.tools[name].tool))
	p.screens[name] = "start"
	p.tools[name].show("start", "")
}

// TestTapTooLate: a tap after its question's time decides nothing, also while nobody has ended the question yet.
func TestTapTooLate(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	p.starts("web", "--timeout", "1s")
	p.shows("web Your name:")
	p.terms["web"].while(p.dir, func() {
		expires, err := time.Parse(time.RFC3339, records(t, p.dir, "prompt")[0].str("expires_at"))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Until(expires))
		if said := p.w.answer(p.w.tap(p.asked, enterButton)); !strings.Contains(said, "Nothing was done: ") {
			t.Fatalf("the tap is told %q", said)
		}
	})
	over := p.w.shows("Your name:", "Ask again")
	again, _ := over.ending("Ask again")
	part := strings.SplitN(again, ":", 5)
	for _, nonce := range []string{"0123456789abcdef", part[3][:8], part[3]} {
		part[3] = nonce
		p.w.answer(p.w.tapped(over.id, strings.Join(part, ":")))
	}
	awaitRecord(t, p.dir, "input", "again", func(r record) bool { return r.str("kind") == "again" })
	if n := len(records(t, p.dir, "input")); n != 1 || !saysExpired.MatchString(over.text) {
		t.Errorf("%q, which is asked again %d times", over.text, n)
	}
	if keys := p.tools["web"].keys(); keys != "" {
		t.Errorf("%q is typed", keys)
	}
}

// TestStrangersFillNoDisk: of a flood of strangers ten are recorded in a minute.
func TestStrangersFillNoDisk(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	var last int64
	for range 40 {
		m := p.w.letter(0, "hello", 0)
		m["from"] = map[string]any{"id": stranger}
		last = p.w.update(map[string]any{"message": m})
	}
	p.w.confirmed(t, last)
	if n := len(entries(t, p.dir, "UNAUTHORIZED")); n < 10 || n > 21 { // a minute may have ended meanwhile
		t.Errorf("%d are in the audit log", n)
	}
}

// ---- telegram.go: call and pacing ----

// TestMessagesArePaced: what several processes have to say at once leaves within the limits, which the Bot API watches.
func TestMessagesArePaced(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api web")
	p.unpaced()
	p.w.change(func() {
		p.w.slack = 1
		p.w.level = 0
	})
	for range 4 {
		p.w.writes("/screen api", 0)
		p.w.writes("/screen web", 0)
	}
	p.w.await(t, "seven screens", func() bool { return len(p.w.past) >= 7 })
}

// TestRetryAfterIsObeyed: after a 429 no process sends anything before the time that it tells; then all comes.
func TestRetryAfterIsObeyed(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api web")
	var refused time.Time
	p.w.decides(func(method string, _ map[string]any) fate {
		if method != "sendMessage" || !refused.IsZero() {
			return fate{}
		}
		refused = time.Now()
		return fate{answer: `{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":2}}`}
	})
	p.w.writes("/screen api", 0)
	p.w.await(t, "the 429", func() bool { return !refused.IsZero() })
	p.w.writes("/screen web", 0)
	p.w.await(t, "both screens", func() bool { return len(p.w.past) == 2 })
	for _, m := range p.w.history() {
		if wait := m.at.Sub(refused); wait < 2*time.Second {
			t.Errorf("%q came %v after the 429", m.text, wait)
		}
	}
}

// TestTroubles: what keeps the bot from working is told at the terminal, in one line, and in status, without the token;
// what is asked meanwhile comes when it is mended, can be answered, and another line tells that it is over.
func TestTroubles(t *testing.T) {
	t.Parallel()
	for _, r := range table(t, "troubles.txt") {
		t.Run(r["name"], func(t *testing.T) { trouble(t, r) })
	}
}

// trouble is a row of testdata/troubles.txt.
func trouble(t *testing.T, r row) {
	t.Parallel()
	p := newPhonePlay(t, "")
	var mended atomic.Bool
	p.w.fault = func(method string, w http.ResponseWriter) bool {
		if mended.Load() || !regexp.MustCompile(r["method"]).MatchString(method) {
			return false
		}
		switch r["code"] {
		case "":
			panic(http.ErrAbortHandler)
		case "no JSON":
			fmt.Fprint(w, r["description"])
			return true
		}
		fmt.Fprintf(w, `{"ok":false,"error_code":%s,"description":%q}`, r["code"], r["description"])
		return true
	}
	p.starts("api")
	x := p.terms["api"]
	said := func(text string) int {
		return strings.Count(strings.Join(strings.Fields(x.shown()), ""),
			strings.Join(strings.Fields(text), ""))
	}
	if r["told"] != "" {
		comesTrue(t, "the terminal tells: "+r["told"], func() bool { return said(r["told"]) == 1 })
		if r["code"] == "429" { // getMe, for a topic, is answered 5 s after the start: that changes nothing
			time.Sleep(6 * time.Second)
		}
		comesTrue(t, "status tells: "+r["told"], func() bool {
			_, out, _ := cli(t, p.dir, "status")
			_, _, errs := cli(t, p.dir, "status", "--json")
			return strings.Contains(out, r["told"]) && strings.Contains(errs, r["told"])
		})
	}
	p.tools["api"].show("ask", "\r\nContinue? (y/n) ")
	awaitPrompt(t, p.dir, "Continue?", "")
	mended.Store(true)
	x.signal("HUP") // ends the pauses
	p.w.tap(p.w.find("Continue?", yesButton), yesButton)
	p.tools["api"].reads("ask", "y\n")
	p.w.ended(p.w.shows("Continue?", "").id, saysAnswered)
	p.tools["api"].order(order{Exit: true})
	x.exits(0)
	if told := said("Telegram works again; for a time it did not: " + r["told"]); told != 1 && r["over"] != "" {
		t.Errorf("the terminal does not tell that it is over:\n%s", x.shown())
	}
	if _, out, _ := cli(t, p.dir, "status", "--all"); r["over"] != "" && strings.Contains(out, r["told"]) {
		t.Errorf("status says %q though it is over", out)
	}
	files, _ := filepath.Glob(filepath.Join(p.dir, "*"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && filepath.Base(file) != "config.toml" && bytes.Contains(text, []byte("AAFake")) {
			t.Errorf("%s has the token: %s", filepath.Base(file), text)
		}
	}
}

// TestOutage: after an outage in which Telegram may have forgotten a tap, a question that waits is
// sent again, also where the session was stopped meanwhile; the message before loses its buttons and answers nothing, and
// the answer counts once.
func TestOutage(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		t.Run(fmt.Sprint("stopped ", stopped), func(t *testing.T) { outage(t, stopped) })
	}
}

// outage plays TestOutage.
func outage(t *testing.T, stopped bool) {
	synctest.Test(t, func(t *testing.T) {
		s := bareBotAPI(t)
		s.free = true // from what was tapped the buttons are taken, even if they are gone
		var down atomic.Bool
		s.fault = func(string, http.ResponseWriter) bool {
			if down.Load() {
				panic(http.ErrAbortHandler)
			}
			return false
		}
		w, tool, screen := asksToGo(t, s)
		c := &command{world: w, manual: commands()[0], args: []string{"/nowhere/tool"}}
		x := must(newSession(c))
		done := make(chan error)
		go func() { done <- x.run(c.args) }()
		first := s.shows("Go?", "Yes")
		time.Sleep(time.Second)
		down.Store(true)
		time.Sleep(2 * time.Minute)
		if stopped {
			x.st.LeavePoll() // as ^Z does
		}
		time.Sleep(2 * time.Minute)
		down.Store(false)
		time.Sleep(90 * time.Second) // the longest pause of who polls is over
		again := s.where("it is asked again", func(m seen) bool { return m.id > first.id })
		comesTrue(t, "the first has no buttons", func() bool {
			return len(s.message(first.id).buttons) == 0
		})
		said := s.answer(s.tapped(first.id, first.buttons["Yes"]))
		if !strings.Contains(said, "out of date") {
			t.Errorf("a tap on the first is told %q", said)
		}
		s.press(again, "Yes")
		if typed := <-tool.typed; typed != "y\n" && typed != "y\r" || s.came("Go?") != 2 {
			t.Errorf("it is asked %d times, and %q is typed", s.came("Go?"), typed)
		}
		_ = screen.Close()
		close(tool.exited)
		<-done
	})
}

// must is v, which is there.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestSleptPastItsTime: a question whose time ends while the machine sleeps, in which timers stand still and clocks do
// not, is over as soon as it wakes.
func TestSleptPastItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := bareBotAPI(t)
		w, tool, screen := asksToGo(t, s)
		c := &command{world: w, manual: commands()[0], args: []string{"/nowhere/tool"}}
		x := must(newSession(c))
		done := make(chan error)
		go func() { done <- x.run(c.args) }()
		s.shows("Go?", "Yes")
		time.Sleep(time.Second)
		x.lock()
		x.desk.asked.rec.ExpiresAt = time.Now() // to set a clock is beyond a test
		err := x.st.keep(ref(x.desk.asked.rec))
		x.unlock()
		time.Sleep(time.Second)
		select {
		case typed := <-tool.typed:
			if typed != "n\r" && typed != "n\n" {
				t.Errorf("%q is typed", typed)
			}
		default:
			t.Errorf("it waits for a timer (%v)", err)
		}
		_ = screen.Close()
		close(tool.exited)
		<-done
	})
}

// asksToGo is a world in a bubble, whose only tool asks whether to go.
func asksToGo(t *testing.T, s *botAPI) (world, *askingPTY, io.Closer) {
	t.Helper()
	s.Server = &httptest.Server{URL: "http://127.0.0.1:1"} // its address alone
	dir := home(t, s.config("away_after_seconds = 0"))
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	keys := &simStream{more: make(chan struct{}, 1)}
	t.Cleanup(func() { keys.put("", true) })
	out, screen := io.Pipe()
	tool := &askingPTY{&simPTY{}, out, make(chan string, 1), make(chan struct{}), ""}
	go func() { _, _ = io.WriteString(screen, "Go? (y/n) ") }()
	env := map[string]string{"ATLASBRIDGE_HOME": dir}
	return world{ctx: context.Background(), stdin: null, stdout: null, stderr: null,
		network:  s,
		disk:     func(_ string, _ *os.File, call func() error) error { return call() },
		getenv:   func(name string) string { return env[name] },
		dice:     func() float64 { return 0.5 },
		keyboard: keys,
		catch:    func(chan<- os.Signal, ...os.Signal) {},
		start:    func(_, _ []string, _ Size, _ Host) (PTY, error) { return tool, nil },
	}, tool, screen
}

// askingPTY is a tool that reads one line.
type askingPTY struct {
	*simPTY
	out    io.Reader
	typed  chan string
	exited chan struct{}
	line   string
}

func (p *askingPTY) Read(b []byte) (int, error) { return p.out.Read(b) }
func (p *askingPTY) Write(b []byte) (int, error) {
	p.line += string(b)
	if strings.ContainsAny(p.line, "\r\n") {
		p.typed <- p.line
	}
	return len(b), nil
}
func (p *askingPTY) Came() int64  { return 0 }
func (p *askingPTY) Waiting() int { return 0 }
func (p *askingPTY) State() TTYState {
	return TTYState{Reading: ReadingYes, Canonical: true, Echo: true}
}
func (p *askingPTY) Modes() Modes {
	return Modes{Processed: true, Canonical: true, Echo: true, UTF8: true}
}
func (p *askingPTY) Resize(Size) error { return nil }
func (p *askingPTY) Close() error      { return nil }
func (p *askingPTY) Wait() int         { <-p.exited; return 0 }

// TestNoticesAreBounded: of what the operator is told in an outage fifty messages come when the network is back, and one says how
// many were left out.
func TestNoticesAreBounded(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "")
	p.w.slack = 1000
	var mended atomic.Bool
	p.w.fault = func(method string, _ http.ResponseWriter) bool {
		if method == "sendMessage" && !mended.Load() {
			panic(http.ErrAbortHandler)
		}
		return false
	}
	p.starts("api")
	file := filepath.Join(p.dir, "config.toml")
	config := string(must(os.ReadFile(file)))
	makeFile(t, "no settings", file)
	p.terms["api"].signal("HUP") // a notice of another kind: it does not count
	for range 60 {
		p.w.writes("/sessions nowhere", 0)
	}
	comesTrue(t, "all are acted on", func() bool { return len(records(t, p.dir, "update")) >= 60 })
	makeFile(t, config, file)
	mended.Store(true)
	p.terms["api"].signal("HUP") // ends the pause
	p.unpaced()
	p.w.shows("(10 messages before this one were left out)", "")
}

// TestTopics: a session has a topic of its own, made once, which ends with it; whatever is refused, its messages come
// once, in the plain chat where there is no topic (testdata/topics.txt).
func TestTopics(t *testing.T) {
	t.Parallel()
	for _, r := range table(t, "topics.txt") {
		t.Run(r["at"], func(t *testing.T) {
			t.Parallel()
			p := newPhonePlay(t, "topics "+r["group"])
			p.w.slack = 1000
			p.w.answers["getChat"] = func(map[string]any) string { return `{"type":"supergroup","is_forum":true}` }
			p.w.decides(func(method string, params map[string]any) (todo fate) {
				into := method == "createForumTopic" || params["message_thread_id"] != nil
				if method == r["method"] && into && r["answer"] == "cut" {
					todo.cut = true
				} else if method == r["method"] && into {
					todo.answer = fmt.Sprintf(`{"ok":false,"error_code":400,"description":%q}`, r["answer"])
				}
				return todo
			})
			p.starts(r["name"])
			p.w.until(t, "createForumTopic", "")
			p.tools[r["name"]].show("ask", "Continue? (y/n) ")
			m := p.w.find("Continue?", yesButton)
			if p.w.came("Continue?") != 1 || (m.thread != 0) != (r["in a topic"] == "yes") {
				t.Errorf("%s: the question came %d times, in topic %d",
					r["at"], p.w.came("Continue?"), m.thread)
			}
			p.unpaced()
			p.tools[r["name"]].order(order{Exit: true})
			end := p.w.shows("ended ·", "")
			if end.thread != m.thread {
				t.Errorf("%s: the end is told in topic %d", r["at"], end.thread)
			}
			comesTrue(t, "its topic is ended", func() bool {
				p.unpaced() // others want their turns, too
				closed := p.w.count("closeForumTopic") == 1
				p.w.mu.Lock()
				defer p.w.mu.Unlock()
				return r["in a topic"] == "no" || r["group"] != "" && closed || strings.HasPrefix(p.w.topics[m.thread], "✓ "+r["called"]+" ")
			})
			made := 0
			for _, c := range p.w.requests() {
				if name := fmt.Sprint(c.p["name"]); c.method == "createForumTopic" {
					made++
					if r["called"] != "" && !strings.HasPrefix(name, r["called"]+" ") {
						t.Errorf("%s: the topic is called %q", r["at"], name)
					}
				}
			}
			if made != 1 {
				t.Errorf("%s: a topic was tried %d times", r["at"], made)
			}
		})
	}
}

// TestTopicsOfTheDead: who polls ends the topics of sessions that were killed, in its own chat, and deletes none.
func TestTopicsOfTheDead(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "topics")
	p.w.topics[7], p.w.topics[8] = "killed", "of another chat"
	for thread, chat := range map[int]int{7: 1001, 8: 1002} {
		plant(t, p.dir, fmt.Sprintf(`"rec":"session","id":"%d1111111-0000-4000-8000-000000000000",%s,"tool":"tool","label":"api",`+
			`"status":"crashed","thread_id":%[1]d,"thread_chat_id":%[3]d,"thread_ended":false`, thread, ago(time.Hour), chat))
	}
	p.starts("poller")
	p.w.await(t, "the topic says it", func() bool { return p.w.topics[7] == "✗ api · tool 71111111" })
	p.w.writes("/last", 0)
	p.w.shows("There is no /last here", "")
	p.w.change(func() {
		if p.w.topics[8] != "of another chat" {
			t.Errorf("that of another chat is called %q", p.w.topics[8])
		}
	})
}

// TestCommandsFitAPhone: there is a menu of commands, and no line of /help is longer than the 36 characters of a phone.
func TestCommandsFitAPhone(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	if menu, _ := p.w.until(t, "setMyCommands", "").p["commands"].([]any); len(menu) < 5 {
		t.Error("the menu is too short")
	}
	p.w.writes("/help", 0)
	for line := range strings.SplitSeq(p.w.shows("/sessions", "").text, "\n") {
		if utf8.RuneCountInString(line) > 36 {
			t.Errorf("%q is too long", line)
		}
	}
}

// TestSentIsSent: a message whose description has an unknown shape was sent all the same, and is not sent twice.
func TestSentIsSent(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "")
	p.w.answers["sendMessage"] = func(map[string]any) string { return `{"message_id":5,"date":"today","chat":[]}` }
	p.starts("api")
	p.tools["api"].show("ask", "Continue? (y/n) ")
	awaitRecord(t, p.dir, "prompt", "Continue?", func(r record) bool { return newestMessage(r) == 5 })
	p.tools["api"].order(order{Exit: true})
	p.w.until(t, "sendMessage", "ended ·")
	asked := 0
	for _, c := range p.w.requests() {
		if c.method == "sendMessage" && strings.Contains(fmt.Sprint(c.p["text"]), "Continue?") {
			asked++
		}
	}
	if asked != 1 {
		t.Error("the question was not sent once")
	}
}

// TestRepliesInOrder: what is asked for in a row is answered in that order, however long the first answer takes.
func TestRepliesInOrder(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "api")
	p.unpaced()
	held := make(chan struct{})
	p.w.decides(func(method string, params map[string]any) (todo fate) {
		if method == "sendMessage" && strings.Contains(fmt.Sprint(params["text"]), "Questions arrive") {
			todo.hold = held
		}
		return todo
	})
	for _, text := range []string{"/help", "/sessions", "/nonsense", "/release"} {
		p.w.writes(text, 0)
	}
	p.w.until(t, "sendMessage", "Questions arrive")
	p.w.confirmed(t, p.w.lastUp)
	close(held)
	p.w.shows("Your text goes to", "")
	var got []string
	for _, m := range p.w.history() {
		got = append(got, strings.Fields(m.text)[0])
	}
	if want := []string{"Questions", "Running:", "✗", "✓"}; !slices.Equal(got, want) {
		t.Errorf("the answers begin with %q", got)
	}
}

// TestUpdatesByBot: the numbers of another bot's updates are others: with another token what has a known number acts. What
// the old bot may not send for long goes out at once.
func TestUpdatesByBot(t *testing.T) {
	t.Parallel()
	p := newPhonePlay(t, "")
	p.w.pollWait = 300 * time.Millisecond
	p.starts("api")
	p.w.writes("one", 0)
	p.tools["api"].reads("start", "one\n")
	p.w.confirmed(t, p.w.lastUp) // from now on the old bot's polls are no first ones
	var floods atomic.Int32
	p.w.decides(func(method string, _ map[string]any) (todo fate) {
		if method == "sendMessage" && floods.Add(1) == 1 {
			todo.answer = `{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":3600}}`
		}
		return todo
	})
	p.w.writes("/nosuch", 0)
	p.w.await(t, "the 429", func() bool { return floods.Load() == 1 })
	config := strings.Replace(p.w.config(""), fakeToken, "987654321"+fakeToken[9:], 1)
	makeFile(t, config, p.dir, "config.toml")
	p.terms["api"].signal("HUP")
	p.w.await(t, "it asks for those of the new bot", func() bool { return p.w.polls[len(p.w.polls)-1] == 0 && len(p.w.polls) > 1 })
	p.w.change(func() { p.w.lastUp-- })
	p.w.writes("two", 0)
	comesTrue(t, "it acts", func() bool { return len(p.inputs()) == 2 })
	p.w.shows("There is no /nosuch", "")
}

// TestPlainerLooks: an old Bot API, which refuses colours or newer looks of text, gets every question all the same; a method
// that it does not know is no trouble of the bot's.
func TestPlainerLooks(t *testing.T) {
	t.Parallel()
	beside(t, []string{`"style":`, `"expandable_blockquote"`, `"entities":`}, func(t *testing.T, refused string) {
		p := newPhonePlay(t, "api")
		p.w.decides(func(method string, params map[string]any) (todo fate) {
			body, _ := json.Marshal(params) // it was JSON: cannot fail
			switch {
			case method == "setMessageReaction":
				todo.answer = `{"ok":false,"error_code":404,"description":"Not Found"}`
			case method == "sendMessage" && bytes.Contains(body, []byte(refused)):
				todo.answer = apiRefusal("can't parse: no such thing")
			}
			return todo
		})
		p.tools["api"].show("ask", "Plan: 3 changes\r\n\r\nContinue? (y/n) ")
		m := p.w.find("Continue?", yesButton)
		if p.w.came("Continue?") != 1 || len(m.buttons) != 2 || !strings.Contains(m.text, "3 changes") {
			t.Errorf("the question came %d times: %q %v", p.w.came("Continue?"), m.text, m.buttons)
		}
		p.w.writes("/keys y", 0)
		p.w.until(t, "setMessageReaction", "")
		if _, out, _ := cli(t, p.dir, "status"); strings.Contains(out, "refuses") {
			t.Error(out)
		}
	})
}

// A call succeeds, is tried again or says why, within the rate.

// TestPace: each message has its turn (testdata/pace.txt); however messages come, a private chat gets at most 62 in a minute
// and a group 20. After failures the pause doubles from a second to a minute, less up to a quarter.
func TestPace(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	ranks := map[string]rank{"question": rankQuestion, "outcome": rankOutcome, "notice": rankNotice, "rest": rankRest}
	for _, r := range table(t, "pace.txt") {
		d := func(column string) time.Duration {
			d, err := time.ParseDuration(r[column])
			if err != nil {
				t.Fatal(r["at"], err)
			}
			return d
		}
		next, wait := reserve(now.Add(d("due")), now, d("every"), ranks[r["rank"]])
		if wait != d("wait") || next.Sub(now) != d("next") {
			t.Errorf("%s: it waits %v, and the next turn is in %v", r["at"], wait, next.Sub(now))
		}
	}
	for every, most := range map[time.Duration]int{paceChat: 62, paceGroup: 20} {
		seed := rand.Uint64()
		dice := rand.New(rand.NewPCG(seed, 0))
		var sent []time.Time
		var next time.Time
		for at := now; at.Before(now.Add(time.Hour)); at = at.Add(time.Duration(1 + dice.Int64N(int64(2*time.Second)))) {
			wait := time.Duration(0)
			next, wait = reserve(next, at, every, rank(dice.IntN(4)))
			if wait == 0 {
				sent = append(sent, at)
			}
		}
		for i := range len(sent) - most {
			if span := sent[i+most].Sub(sent[i]); span < time.Minute {
				t.Fatalf("seed %d: %d messages within %v, a turn is %v", seed, most+1, span, every)
			}
		}
		if len(sent) < 50*int(time.Minute/every) {
			t.Errorf("seed %d: only %d messages in an hour, a turn is %v", seed, len(sent), every)
		}
	}
	for n, seconds := range []float64{1, 2, 4, 8, 16, 32, 60, 60} {
		if high, low := backoff(n, 0).Seconds(), backoff(n, 1).Seconds(); high != seconds || low != seconds*3/4 {
			t.Errorf("after %d failures the pause is %v to %v s", n, low, high)
		}
	}
}

// TestUnknownMessage: a message whose number nobody learned, because an answer was lost, tells it by a reply or a tap: that
// counts as on any other, and a message that was tapped loses its buttons. A text that replies to nothing is refused with words.
func TestUnknownMessage(t *testing.T) {
	needUnix(t)
	t.Parallel()
	beside(t, []string{"reply", "tap", "tap when it is over"}, func(t *testing.T, how string) {
		w, c, dir, _ := stageSession(t, "")
		release := sync.OnceFunc(w.loses("Go on?"))
		defer release()
		c.show("ask", "Go on? (y/n) ")
		first := w.find("Go on?", yesButton)
		if how == "reply" {
			id := w.writes("y", 0)
			w.until(t, "sendMessage", fmt.Sprintf(`"message_id":%d.*Nothing was done: .*question's own message`, id))
			if keys := c.keys(); keys != "" {
				t.Errorf("%q was typed", keys)
			}
			w.writes("n", first.id)
			c.reads("ask", "n\n")
			return
		}
		told := "✓ Yes"
		if how != "tap" {
			release()
			second := w.where("it is sent again", func(m seen) bool { return m.id > first.id && len(m.buttons) > 0 })
			awaitPrompt(t, dir, "", "awaiting_reply")
			w.press(second, "No")
			w.ended(second.id)
			told = "question is over: No · phone, "
		}
		if said := w.answer(w.tapped(first.id, first.buttons["Yes"])); !strings.Contains(said, told) {
			t.Errorf("it is told %q, want %q", said, told)
		}
		if how == "tap" {
			c.reads("ask", "y\n")
			w.ended(first.id, saysAnswered)
		}
		w.ended(first.id)
	})
}

// ---- store.go and audit.go: a question's life on a disk that fails ----
// What was acknowledged is on the disk, whatever fails.

// TestLifeOnABadDisk: a question is asked and answered while its process is killed at, or the disk fails at, or the power
// fails after, each operation that changes a file. What was said to be done is in the state; what could not be recorded was
// not done; the next process sees what ended, asks anew, and the audit log holds.
func TestLifeOnABadDisk(t *testing.T) {
	t.Parallel()
	beside(t, []string{"kill", "fail", "full", "tear", "power 0", "power 1", "power 3", "power 4", "ruin"}, func(t *testing.T, kind string) {
		step := 1
		if kind == "full" || kind == "ruin" {
			step = 3
		}
		n := 1
		for livesThrough(t, fmt.Sprintf("%s %d", kind, n)) {
			n += step
		}
		if n < 12 {
			t.Errorf("a question's life has only %d operations", n-1)
		}
	})
}

// livesThrough plays one fault and judges what is left; struck: the life was long enough for it.
func livesThrough(t *testing.T, fault string) (struck bool) {
	t.Helper()
	dir := home(t, "")
	life := newScript(t, dir, "")
	life.Env = append(life.Env, "ATLASBRIDGE_TEST_CHILD=life", "ATLASBRIDGE_TEST_FAULT="+fault)
	life.Run() // it may have been killed
	said := life.stdout.String()
	wrong := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%s: %s\nit said %q, %q",
			fault, fmt.Sprintf(format, args...), said, life.stderr.String())
	}
	kind, _, _ := strings.Cut(fault, " ")
	if kind == "fail" && !strings.Contains(said, "lived\n") {
		wrong("one failure stopped everything")
	}
	acknowledged := strings.Count(said, "answered ")
	for _, p := range records(t, dir, "prompt") {
		told := strings.Contains(said, "answered "+p.str("id")[:8])
		answered := slices.Contains([]string{"reply_received", "injected", "resolved"}, p.str("status"))
		if told && answered && p.str("value") == "y" {
			acknowledged--
		}
		if p.str("status") == "injected" && !strings.Contains(said, "yes\n") {
			wrong("it is injected, and nobody got it")
		}
		if answered && !told && (kind == "full" || kind == "fail") {
			wrong("what was said to have failed is recorded")
		}
	}
	if acknowledged != 0 {
		wrong("what was acknowledged is not in the state")
	}
	next, again := poses(t, dir, "Again?")
	comesTrue(t, fault+": no question of the dead is open", func() bool { // it looks who has died
		return !slices.ContainsFunc(records(t, dir, "prompt"), func(p record) bool {
			return p.str("id") != again.str("id") && !slices.Contains([]string{"resolved", "failed"},
				p.str("status"))
		})
	})
	cli(t, dir, "answer", again.str("id"), "no")
	next.gets(1, "no\n", "answer from another terminal")
	for _, p := range records(t, dir, "prompt") {
		if n := len(slices.DeleteFunc(entries(t, dir, "REPLY_RECEIVED"), func(e record) bool { return e.str("prompt_id") != p.str("id") })); n > 1 {
			wrong("it was answered %d times", n)
		}
	}
	for _, command := range []string{"approvals --json", "status --json"} {
		if code, now, _ := cli(t, dir, strings.Fields(command)...); code != 0 || now != "[]\n" {
			wrong("%s: exit %d, %s", command, code, now)
		}
	}
	if code, now, _ := cli(t, dir, "audit", "verify"); code != 0 || strings.Contains(now, "the log before") {
		wrong("%s", now)
	}
	return strings.Contains(said, "struck")
}

// ---- store.go: the file ----
// A line is a record; what is damaged is kept, told, and costs nothing else.

// TestFilesOfALife: every line of the state has the schema's version, its kind and id, times in UTC with six decimals and the
// right checksum.
func TestFilesOfALife(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	s, p := poses(t, dir, "--text", "Name?")
	cli(t, dir, "answer", p.str("id"), "my private words")
	s.gets(0, "my private words\n", "answer")
	head := regexp.MustCompile(`^\{"v":2,"rec":"[a-z]+","id":"[^"]+","at":"[^"]+Z",`)
	loose := regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{0,5}|\.\d{7,})?(Z|[+-])`)
	for line := range strings.Lines(textOf(t, dir, "state.jsonl")) {
		object := line[:strings.LastIndex(line, `,"crc"`)] + "}"
		if line != withCRC(object) || !head.MatchString(line) || loose.MatchString(line) {
			t.Errorf("this is no line of state.jsonl: %s", line)
		}
	}
}

// poses has a script ask, and waits until it waits for its answer.
func poses(t *testing.T, dir string, args ...string) (*script, record) {
	t.Helper()
	s := asks(t, dir, "", args...)
	return s, awaitPrompt(t, dir, args[len(args)-1], "awaiting_reply")
}

// plant appends records to the state as a process does that has ended; of each the members behind its version.
func plant(t testing.TB, dir string, objects ...string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "state.jsonl"), os.O_WRONLY|os.O_APPEND|os.O_CREATE,
		0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, o := range objects {
		fmt.Fprint(f, withCRC(`{"v":2,`+o+`}`))
	}
}

// ago is the member "at" of a record that was written then.
func ago(d time.Duration) string {
	return time.Now().Add(-d).UTC().Format(`"at":"2006-01-02T15:04:05.000000Z"`)
}

// sessionsOf are the ids that status lists, and what it says besides.
func sessionsOf(t testing.TB, dir string) (ids, says string) {
	t.Helper()
	code, out, says := cli(t, dir, "status", "--all", "--json")
	var list []record
	if err := json.Unmarshal([]byte(out), &list); err != nil || code != 0 {
		t.Fatalf("status: exit %d, %v: %s%s", code, err, out, says)
	}
	for _, r := range list {
		ids = r.str("id") + ids
	}
	return ids, says
}

// TestCutAnywhere: cut at any byte, the state has every whole record and the audit log goes on; what was cut is kept aside,
// and that is said once. A bit that has changed anywhere is told, and costs its own record alone.
func TestCutAnywhere(t *testing.T) {
	t.Parallel()
	full := home(t, "")
	for i, id := range []string{"c", "b", "a"} {
		plant(t, full, fmt.Sprintf(`"rec":"session","id":%q,"status":"completed","started_at":"2026-01-02T03:04:0%d.000000Z",%s`, id, i, ago(0)))
	}
	state := textOf(t, full, "state.jsonl")
	dir := home(t, "")
	kept := func(name string) (all string, torn int) {
		all = textOf(t, dir, name)
		pieces := inFolder(dir, name+".torn-*")
		for _, piece := range pieces {
			all += textOf(t, piece)
			os.Remove(piece)
		}
		return all, len(pieces)
	}
	for cut := range len(state) + 1 {
		makeFile(t, state[:cut], dir, "state.jsonl")
		whole := strings.Count(state[:cut], "\n")
		torn := cut > 0 && state[cut-1] != '\n'
		ids, says := sessionsOf(t, dir)
		_, again := sessionsOf(t, dir)
		all, pieces := kept("state.jsonl")
		if ids != "cba"[:whole] || strings.Contains(says, "moved aside") != torn || again != "" ||
			all != state[:cut] || torn != (pieces == 1) {
			t.Fatalf("cut at %d: %d of the records %q, it says %q, then %q; kept in %d pieces: %s",
				cut, whole, ids, says, again, pieces, all)
		}
	}
	line := len(state) / 3
	for at := line; at < 2*line; at++ {
		bad := state[:at] + string(state[at]^1) + state[at+1:]
		makeFile(t, bad, dir, "state.jsonl")
		ids, says := sessionsOf(t, dir)
		all, _ := kept("state.jsonl")
		if strings.Contains(ids, "b") || ids[0] != 'c' || !strings.Contains(says, "damaged line") || all != bad {
			t.Fatalf("byte %d is damaged, the records are %q, and it says %q", at, ids, says)
		}
	}
	for range 2 {
		cli(t, full, "answer", "nobody", "y")
	}
	log := textOf(t, full, "audit.log")
	if n := len(entries(t, full, "REPLY_REJECTED")); n != 2 {
		t.Errorf("two answers were refused, %d are in the log", n)
	}
	for cut := range len(log) {
		os.Remove(filepath.Join(dir, "state.jsonl"))
		makeFile(t, log[:cut], dir, "audit.log")
		cli(t, dir, "answer", "nobody", "y")
		code, out, _ := cli(t, dir, "audit", "verify")
		all, _ := kept("audit.log")
		want := fmt.Sprintf("%d entries", strings.Count(log[:cut], "\n")+1)
		whole := strings.LastIndex(log[:cut], "\n") + 1
		if code != 0 || !strings.Contains(out, want) || !strings.HasPrefix(all, log[:whole]) || !strings.HasSuffix(all, log[whole:cut]) {
			t.Fatalf("the log is cut at %d: exit %d, %s", cut, code, out)
		}
	}
}

// TestDamage: a damaged line is told by all commands and by doctor, and kept; its question takes no answer, as it may have
// got one, nor does one that lacks a text; all others do. A compaction leaves it in a backup.
func TestDamage(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	path := filepath.Join(dir, "state.jsonl")
	makeFile(t, "not a record\n", path)
	good, p := poses(t, dir, "Good?")
	bad, q := poses(t, dir, "Bad?")
	mute, m := poses(t, dir, "Mute?")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text, _ := io.ReadAll(f)
	at := bytes.LastIndex(text, []byte(`"id":"`+q.str("id")))
	f.WriteAt([]byte("X"), int64(at+bytes.Index(text[at:], []byte("Bad?"))))
	at = bytes.Index(text, []byte(`"id":"`+m.str("about_sha256")))
	f.WriteAt([]byte("X"), int64(at+bytes.Index(text[at:], []byte("Mute?"))))
	_, out, _ := cli(t, dir, "doctor")
	if !matches(`FAIL +state .*damaged line.*not a record.*damaged line.*damaged line`, out) {
		t.Errorf("doctor does not tell of three damaged lines: %s", out)
	}
	for id, want := range map[string]string{p.str("id"): "", q.str("id"): "damaged", m.str("id"): "damaged"} {
		code, _, says := cli(t, dir, "answer", id, "yes")
		if (code == 0) != (want == "") || !strings.Contains(says, "damaged line") || !strings.Contains(says, want) {
			t.Errorf("answer: exit %d, %s", code, says)
		}
	}
	good.gets(0, "yes\n", "answer")
	for _, s := range []*script{bad, mute} {
		s.Process.Kill()
		s.Wait()
	}
	cli(t, dir, "ask", "--timeout", "1s", "The last?") // it finds the dead
	for _, id := range []string{q.str("id"), m.str("id")} {
		if now := textOf(t, path); !matches(`"id":"`+id+`".*"status":"failed".*"reason":"[^"]*damaged`, now) {
			t.Errorf("no line says that the question with a damaged record has failed: %s", now)
		}
	}
	plant(t, dir, `"rec":"session","id":"old","status":"completed",`+ago(40*24*time.Hour)) // the next who writes compacts
	cli(t, dir, "answer", "nobody", "y")
	now := textOf(t, path)
	backups := inFolder(dir, "state.jsonl.backup-*")
	if len(backups) != 1 || strings.Contains(now, "not a record") {
		t.Fatalf("backups %q of a file that was compacted: %s", backups, now)
	}
	if kept := textOf(t, backups[0]); !matches("(?s)not a record.*Xad[?].*Xute[?]", kept) {
		t.Errorf("the backup lacks what was damaged: %s", kept)
	}
	for _, id := range []string{q.str("id"), m.str("id")} {
		r := promptBy(t, dir, id)
		if r.str("status") != "failed" || r["nonce_used"] != true || !strings.Contains(r.str("reason"), "damaged") {
			t.Errorf("the question with a damaged record is %v", r)
		}
	}
	if _, out, _ := cli(t, dir, "doctor"); !matches(`ok +state`, out) {
		t.Errorf("doctor after the compaction: %s", out)
	}
}

// TestTexts: what is long is written once, in a record that the question names by its hash, and stays as long as that one;
// the state of before, with the texts in each line of the question, is read, and kept so.
func TestTexts(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	rows := strings.Repeat("a row of forty\n", 40)
	s := asks(t, dir, rows, "Which?", "-")
	p := awaitPrompt(t, dir, "Which?", "awaiting_reply")
	cli(t, dir, "answer", p.str("id"), "yes")
	s.gets(0, "yes\n", "answer")
	plant(t, dir, `"rec":"session","id":"s","status":"active",`+ago(0),
		`"rec":"prompt","id":"before","session_id":"s","status":"created","type":"yes_no","shown":"was shown","full":"was full",`+
			`"above":"was above","choices":[{"key":"y","label":"Yes"},{"key":"n","label":"No"}],`+ago(0))
	for _, compacts := range []bool{false, true} {
		if compacts {
			plant(t, dir, `"rec":"session","id":"old","status":"completed",`+ago(40*24*time.Hour))
		}
		cli(t, dir, "answer", "nobody", "y")
		cli(t, dir, "ask", "--timeout", "1s", fmt.Sprint("The next? ", compacts)) // it finds the dead
		texts := map[string]int{}
		beside := 0
		for line := range strings.Lines(textOf(t, dir, "state.jsonl")) {
			var r record
			if json.Unmarshal([]byte(line), &r); r.str("rec") != "text" {
				beside += len(line)
				continue
			}
			texts[r.str("id")]++
			if sum := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(r.str("text")))); r.str("id") != sum || texts[sum] > 1 {
				t.Errorf("a text has the id %s and the hash %s; it comes for the %d. time",
					r.str("id"), sum, texts[sum])
			}
		}
		now := promptBy(t, dir, p.str("id"))
		was := promptBy(t, dir, "before")
		named := texts[was.str("about_sha256")] == 1 && was["choices"] == nil
		if now.str("full") != "Which?\n"+strings.TrimSuffix(rows, "\n") || !strings.Contains(now.str("shown"), rows) || beside > 32<<10 ||
			was.str("shown")+was.str("full")+was.str("above") != "was shownwas fullwas above" || was.str("status") != "failed" || !named {
			t.Errorf("compacted: %v; %d bytes beside texts; the question is %v, that of before %v",
				compacts, beside, now, was)
		}
	}
}

// TestRetention: a compaction keeps what is alive or not old, as testdata/retention.txt says, and the file becomes small.
func TestRetention(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	plant(t, dir, `"rec":"session","id":"live","status":"active",`+ago(0),
		`"rec":"session","id":"over","status":"completed",`+ago(0))
	rows := table(t, "retention.txt")
	ages := map[string]time.Duration{"1 day": 24 * time.Hour, "10 days": 240 * time.Hour, "40 days": 960 * time.Hour}
	for _, r := range rows {
		for column, age := range ages {
			for range 100 {
				kind, members, _ := strings.Cut(r["record"], ",")
				plant(t, dir, fmt.Sprintf(`%s,"id":"%s %s",%s,%s`, kind, r["at"], column, ago(age), members))
			}
		}
	}
	cli(t, dir, "answer", "nobody", "y")
	there := map[string]string{}
	lines := jsonLines(t, dir, "state.jsonl")
	for _, r := range lines {
		there[r.str("id")] = "kept"
	}
	for _, r := range records(t, dir, "prompt") {
		if r.str("status") != "awaiting_reply" && r.str("full") == "" {
			t.Errorf("%s: its text is gone", r.str("id"))
		}
	}
	for _, r := range rows {
		for column := range ages {
			if got := cmp.Or(there[r["at"]+" "+column], "gone"); got != r[column] {
				t.Errorf("%s, %s old: %s, want %s", r["at"], column, got, r[column])
			}
		}
	}
	if len(lines) > 3*len(rows)+4 {
		t.Errorf("%d lines are left, of each record its last one is enough", len(lines))
	}
	longer := home(t, "retention_days = 41")
	plant(t, longer, `"rec":"session","id":"over","status":"completed",`+ago(960*time.Hour))
	cli(t, longer, "answer", "nobody", "y")
	if len(records(t, longer, "session")) == 0 {
		t.Error("a command forgets what is to be kept for longer")
	}
}

// TestTransitions: a question's state changes as testdata/transitions.txt says, and in no other way.
func TestTransitions(t *testing.T) {
	for _, r := range table(t, "transitions.txt") {
		var to []State
		for _, s := range strings.Fields(r["to"]) {
			to = append(to, State(s))
		}
		if got := next[State(r["from"])]; !slices.Equal(got, to) {
			t.Errorf("%s: %q can become %q, want %q", r["at"], r["from"], got, to)
		}
	}
	if n := len(next); n != 7 {
		t.Errorf("%d states can change, want 7", n)
	}
}

// FuzzStateLine: whatever stands in a line of the state, with the right checksum or not, commands go on or say what is wrong,
// and nothing of it is lost.
func FuzzStateLine(f *testing.F) {
	f.Add(`{"v":2,"rec":"prompt","id":"a","at":"2026-01-02T03:04:05.000000Z","session_id":"s","status":"created"}`)
	f.Add(`{"v":2,"rec":"session","id":7,"status":"active"}`)
	f.Add(`{"rec":"prompt","v":9e9,"id":"a\"b"`)
	f.Fuzz(func(t *testing.T, object string) {
		dir := home(t, "")
		line := withCRC(strings.ReplaceAll(object, "\n", "")) + object + "\n"
		makeFile(t, line, dir, "state.jsonl")
		for _, command := range []string{"status --json", "approvals --json", "answer --json a y"} {
			code, _, says := cli(t, dir, strings.Fields(command)...)
			if code != 0 && says == "" {
				t.Errorf("%s: exit %d, and nothing is said", command, code)
			}
		}
		if b := textOf(t, dir, "state.jsonl"); !strings.HasPrefix(b, line) {
			t.Errorf("it was %q and is %q", line, b)
		}
	})
}

// BenchmarkOpen opens 100,000 records: a history of questions of the last days that were answered, each a text and four
// lines; and lines of before, which have the text themselves, all of different ids, and four of each.
func BenchmarkOpen(b *testing.B) {
	life := ago(72*time.Hour) + `,"excerpt":"Delete it? (y/n)","session_id":"s","status":"resolved","nonce":"0123456789abcdef0123456789abcdef",` +
		`"nonce_used":true,"decided_by":"telegram:1001","value":"y","telegram_chat":"1:2","messages":[{"id":7,"shows":"resolved"}]`
	for _, each := range []int{0, 1, 4} {
		b.Run(fmt.Sprintf("%d-lines-each", each), func(b *testing.B) {
			dir := home(b, "")
			var text strings.Builder
			for i := range 100000 {
				line := fmt.Sprintf(`{"v":2,"rec":"prompt","id":"%08x",%s,"type":"yes_no","full":"%01000d"}`,
					i/max(1, each), life, 0)
				switch {
				case each > 0:
				case i%5 == 0:
					line = fmt.Sprintf(`{"v":2,"rec":"text","id":"%08x",%s,"text":"%01000d"}`, i/5, ago(0), 0)
				default:
					line = fmt.Sprintf(`{"v":2,"rec":"prompt","id":"%08x",%s,"about_sha256":"%08x"}`, i/5, life,
						i/5)
				}
				text.WriteString(withCRC(line))
			}
			makeFile(b, text.String(), dir, "state.jsonl")
			for b.Loop() {
				cli(b, dir, "status")
			}
		})
	}
}

// ---- store.go: answers ----
// One question has one answer, from one who may give it.

// TestAnswers: an answer counts only for its question, in time, with its nonce, once, as what the question offers, and for
// what was read; else nothing changes. testdata/answers.txt has the cases. From the phone ten in a minute count.
func TestAnswers(t *testing.T) {
	t.Parallel()
	bot := newBotAPI(t)
	dir := home(t, bot.config(""))
	keepsAlive(t, dir, "alive-session")
	rows := table(t, "answers.txt")
	for range 11 {
		rows = append(rows, row{"at": "the limit", "by": "tap", "given": "ans:ID:SESSION:NONCE:y", "recorded": "y"})
	}
	hour := strings.Replace(ago(-time.Hour), `"at"`, `"expires_at"`, 1)
	plant(t, dir, `"rec":"session","id":"alive-session","status":"active",`+ago(0),
		`"rec":"session","id":"dead","status":"active",`+ago(0))
	for i, r := range rows {
		plant(t, dir, fmt.Sprintf(`"rec":"prompt","id":"%08x-1",%s,"session_id":"alive-session","status":"awaiting_reply","confidence":"high",`+
			`"signals":["pattern"],"type":"yes_no","nonce":"%016x0000000000000000","shown_all":true,%s,%s`, i+1, ago(0), i+1, hour,
			cmp.Or(r["question"], `"source":"screen"`)))
	}
	before := records(t, dir, "prompt")
	phones := 0
	for i, r := range rows {
		of := before[i]
		id := of.str("id")
		said := ""
		if r["by"] == "answer" {
			_, _, said = cli(t, dir, "answer", id, r["given"])
		} else {
			if i == 0 || rows[i-1]["by"] == "answer" {
				asks(t, dir, "", "Hello?") // it polls
				bot.shows("Hello?", "Yes")
			}
			bot.put(int64(1000+i), id)
			of = promptBy(t, dir, id)
			session := of.str("session_id")
			data := strings.NewReplacer("ID", id[:8], "SESSION", session[:min(8, len(session))], "NONCE", of.str("nonce")[:16])
			said = bot.answer(bot.tapped(int64(1000+i), data.Replace(r["given"])))
		}
		p := promptBy(t, dir, id)
		refusal, refused := strings.CutPrefix(r["recorded"], "! ")
		if r["at"] == "the limit" && phones == 10 {
			refused, refusal = true, "10 answers in a minute"
		}
		switch {
		case refused && (!strings.Contains(said, refusal) || outcome(p) != outcome(of) && p.str("session_id") != "dead"):
			t.Errorf("%s: %q is refused with %q, want %q; the question is\n%v\nand was\n%v",
				r["at"], r["given"], said, refusal, p, of)
		case !refused && (p.str("value") != r["recorded"] || p["nonce_used"] != true || p.str("decided_by") == ""):
			t.Errorf("%s: %q is recorded as %q, want %q (%s); %v",
				r["at"], r["given"], p.str("value"), r["recorded"], said, p)
		case !refused && r["by"] == "tap":
			phones++
		}
	}
	code, _, said := cli(t, dir, "answer", before[len(rows)-1].str("id"), "y")
	if phones != 10 || code != 0 {
		t.Errorf("%d taps counted; the command is not held up by the phone's limit: exit %d, %s",
			phones, code, said)
	}
}

// outcome is what has become of a question.
func outcome(p record) string {
	return fmt.Sprint(p["status"], p["value"], p["nonce_used"] == true, p["decided_by"], p["decided_at"])
}

// keepsAlive lets a session of that id live: a script that asks somewhere else holds its lock.
func keepsAlive(t *testing.T, dir, id string) {
	t.Helper()
	elsewhere := home(t, "")
	_, p := poses(t, elsewhere, "How long?")
	lock := p.str("session_id") + ".lock"
	err := os.Mkdir(filepath.Join(dir, "sessions"), 0o700)
	if err == nil {
		err = os.Link(filepath.Join(elsewhere, "sessions", lock), filepath.Join(dir, "sessions", id+".lock"))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// promptBy is a question's record.
func promptBy(t testing.TB, dir, id string) record {
	t.Helper()
	return awaitRecord(t, dir, "prompt", id, func(r record) bool { return r.str("id") == id })
}

// TestCoarseTimes: who asks learns of an answer by the time of a file, also where that is in whole seconds, or in every
// other one: each record moves it on by so much.
func TestCoarseTimes(t *testing.T) {
	needUnix(t)
	t.Parallel()
	dir := home(t, "")
	x, q := poses(t, dir, "Go?")
	freezes(t, dir, x.Process.Pid)
	lock := filepath.Join(dir, "sessions", q.str("session_id")+".lock")
	before, err := os.Stat(lock)
	if err != nil {
		t.Fatal(err)
	}
	cli(t, dir, "answer", q.str("id"), "y")
	after, err := os.Stat(lock)
	if err != nil || after.ModTime().Sub(before.ModTime()) < 2*time.Second {
		t.Errorf("its time is %v, and was %v (%v)", after.ModTime(), before.ModTime(), err)
	}
	x.signal("CONT")
	x.gets(0, "yes\n", "answer from another terminal")
}

// TestUpdateComesAgain: an update of which a power cut lost only that it was acted on is not acted on again.
func TestUpdateComesAgain(t *testing.T) {
	t.Parallel()
	bot := newBotAPI(t)
	dir := home(t, bot.config(""))
	keepsAlive(t, dir, "alive-session")
	bot9, _, _ := strings.Cut(fakeToken, ":")
	plant(t, dir, `"rec":"session","id":"alive-session","status":"active",`+ago(0),
		`"rec":"input","id":"`+bot9+`:9001","session_id":"alive-session","kind":"text","text":"hello","status":"done",`+ago(0))
	asks(t, dir, "", "Hello?")
	bot.shows("Hello?", "Yes")
	bot.writes("/send alive-session hello", 0)
	bot.writes("/send alive-session the next", 0)
	awaitRecord(t, dir, "input", "the next", func(r record) bool { return r.str("text") == "the next" })
	if in := records(t, dir, "input"); len(in) != 2 || in[0].str("status") != "done" {
		t.Errorf("it was asked for once, and now there are %v", in)
	}
}

// TestCrowd: of processes that ask, answer and compact at once, some of which are killed, every question gets one answer,
// each history is one of the table, and the audit log holds.
func TestCrowd(t *testing.T) {
	dir := home(t, "")
	rounds := 2
	if os.Getenv("ATLASBRIDGE_LONG") != "" {
		rounds = 50
	}
	seed := time.Now().UnixNano()
	t.Log("seed", seed)
	dice := rand.New(rand.NewPCG(uint64(seed), 0))
	var given sync.Map // the prompts that were answered
	for range rounds {
		if t.Failed() {
			return // one failure is enough
		}
		plant(t, dir, `"rec":"session","id":"old","status":"completed",`+ago(40*24*time.Hour)) // each compacts as it first writes
		var rows []int
		for range 6 {
			rows = append(rows, dice.IntN(40))
		}
		beside(t, rows, func(t *testing.T, killed int) {
			text := fmt.Sprintf("Go %s?", t.Name())
			s, p := poses(t, dir, text)
			id := p.str("id")
			var answers []*script
			for _, value := range []string{"yes", "no", "yes"} {
				answers = append(answers, begins(t, dir, "", "answer", id, value))
			}
			if killed < 10 { // milliseconds
				time.Sleep(time.Duration(killed) * time.Millisecond)
				answers[0].Process.Kill()
				s.Process.Kill()
			}
			taken := 0
			for _, a := range answers {
				if a.Wait() == nil {
					taken++
					given.Store(id, true)
				}
			}
			if taken > 1 || taken == 0 && killed >= 10 {
				t.Errorf("%d of three answers were taken", taken)
			}
			if killed < 10 {
				s.Wait()
			} else if promptBy(t, dir, id).str("value") == "y" { // what was recorded is passed on
				s.gets(0, "yes\n", "answer")
			} else {
				s.gets(1, "no\n", "answer")
			}
		})
	}
	cli(t, dir, "ask", "--timeout", "1s", "The last?") // it finds the dead
	changes := regexp.MustCompile(`^(prompt_(detected|routed|resolved|expired|failed)|reply_(received|injected))$`)
	history := map[string]string{}
	for _, e := range jsonLines(t, dir, "audit.log") {
		if event := strings.ToLower(e.str("event")); changes.MatchString(event) {
			history[e.str("prompt_id")] += " " + event
		}
	}
	legal := regexp.MustCompile(`^ prompt_detected( prompt_routed)?( prompt_(expired|failed)|( reply_received( reply_injected)?( prompt_(resolved|failed))))$`)
	for _, p := range records(t, dir, "prompt") {
		id := p.str("id")
		was := history[id]
		_, answered := given.Load(id)
		if !legal.MatchString(was) || !strings.HasSuffix(was, p.str("status")) || answered && !strings.Contains(was, "reply_received") {
			t.Errorf("%s: answered: %v; its history is %q", p.str("question"), answered, was)
		}
	}
	code, out, _ := cli(t, dir, "audit", "verify")
	if _, says := sessionsOf(t, dir); code != 0 || says != "" || len(history) != 6*rounds+1 {
		t.Errorf("%d questions; %s%s", len(history), out, says)
	}
}

// BenchmarkAppend is a command that adds a durable entry, which the state notes.
func BenchmarkAppend(b *testing.B) {
	dir := home(b, "")
	for b.Loop() {
		cli(b, dir, "answer", "nobody", "y")
	}
}

// ---- audit.go: the chain ----
// What was changed, cut or typed elsewhere is found and named.

// chained makes lines of an audit log of the members of its entries, as anybody can who knows how.
func chained(entries string) (log string) {
	hash := "genesis"
	for i, members := range strings.Split(strings.TrimSpace(entries), "\n") {
		line := fmt.Sprintf(`{"seq":%d,"ts":"2026-01-02T03:04:05.000000Z",%s,"prev_hash":%q`, i+1, members, hash)
		hash = fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(line+"}")))
		log += fmt.Sprintf("%s,\"hash\":%q}\n", line, hash)
	}
	return log
}

// TestTampering: `audit verify` names the first line of a log that was edited, cut or replaced, and no later entry mends
// that, unless the state still has what was cut; a new log in the place of one that was moved away goes on behind that:
// testdata/tamper.txt.
func TestTampering(t *testing.T) {
	needTool(t, "sh", "sed", "head", "tail", "mv", "cp", "rm", "cat")
	t.Parallel()
	forged := chained(strings.Repeat("\"event\":\"UNAUTHORIZED\"\n", 8))
	beside(t, table(t, "tamper.txt"), func(t *testing.T, r row) {
		dir := home(t, "")
		s, p := poses(t, dir, "Go on?")
		cli(t, dir, "answer", p.str("id"), "yes")
		s.gets(0, "yes\n", "answer")
		script := `umask 077
edit() { sed "$1" audit.log > x && mv x audit.log; }
more() { "$TEST_BINARY" answer nobody y 2> x; rm x; }
` + r["edit"]
		sh := exec.Command("sh", "-c", script)
		sh.Dir = dir
		sh.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir)
		makeFile(t, forged, dir, "forged.log")
		if out, err := sh.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", r["at"], err, out)
		}
		for _, when := range []string{"says", "later", "later"} {
			if when == "later" {
				cli(t, dir, "answer", "nobody", "y")
				r["later"] = regexp.MustCompile(`holds: [0-9]+`).ReplaceAllString(r["later"], "holds: [0-9]+") // one more each time
			}
			code, out, _ := cli(t, dir, "audit", "verify")
			if (code == 0) != strings.Contains(r[when], "holds") || !matches("(?s)"+r[when], out) {
				t.Errorf("%s: %s: %s: exit %d, %s", r["at"], r["what"], when, code, out)
			}
		}
	})
}

// TestStatePutBack: a state that was put back from a copy, and notes an entry of long ago, breaks no chain.
func TestStatePutBack(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	log := chained(strings.Repeat("\"event\":\"UNAUTHORIZED\"\n", 1000))
	makeFile(t, log, dir, "audit.log")
	hash := regexp.MustCompile(`"hash":("sha256:[0-9a-f]+")`).FindStringSubmatch(log)[1]
	plant(t, dir, `"rec":"meta","id":"audit",`+ago(0)+`,"seq":1,"hash":`+hash)
	cli(t, dir, "answer", "nobody", "y")
	if code, out, _ := cli(t, dir, "audit", "verify"); code != 0 || !strings.Contains(out, "1001 entries") {
		t.Errorf("exit %d, %s", code, out)
	}
}

// TestEveryBit: a bit that was changed anywhere in the log is noticed, in its line or the next.
func TestEveryBit(t *testing.T) {
	t.Parallel()
	dir := home(t, "")
	log := []byte(chained("\"event\":\"TOOL_CALL\",\"text\":\"<&> é \\\"\\\\\"\n\"event\":\"X\",\"n\":-5,\"ok\":true,\"none\":null"))
	for i := -1; i < len(log); i++ {
		bad := bytes.Clone(log)
		if i >= 0 {
			bad[i] ^= 1 << (i % 8)
		}
		makeFile(t, string(bad), dir, "audit.log")
		code, out, _ := cli(t, dir, "audit", "verify", "--json")
		line := min(2, bytes.Count(log[:max(i, 0)], []byte("\n"))+1)
		named := matches(fmt.Sprintf(`"line": [1-%d],`, line), out)
		if (code == 0) != (i < 0) || !named && i >= 0 {
			t.Errorf("byte %d: exit %d, %s", i, code, out)
		}
	}
}

// TestShown: `audit verify` names the first answer that was typed at something else than was shown: testdata/shown.txt.
func TestShown(t *testing.T) {
	for _, b := range blocks(t, "shown.txt") {
		dir := home(t, "")
		makeFile(t, chained(b.parts["log"]), dir, "audit.log")
		code, out, _ := cli(t, dir, "audit", "verify")
		want := strings.TrimSpace(b.parts["says"])
		if (code == 0) != strings.HasPrefix(want, "holds") || !matches("(?s)"+want, out) {
			t.Errorf("%s: %s: exit %d, %s", b.at, b.name, code, out)
		}
	}
}

// TestCanonical: entries are what jq -c prints, for every code point, and sha256sum makes their hashes again.
func TestCanonical(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"a\"\\/":                 `"a\"\\/"`,
		"\b\f\n\r\t\x00\x1f\x7f": `"\b\f\n\r\t\u0000\u001f\u007f"`,
		"<>&\u2028\u2029é😀":      "\"<>&\u2028\u2029é😀\"",
		"\xffa\ufffd":            "\"\ufffda\ufffd\"",
	} {
		if got := string(canonical([]Field{{"a", in}})); got != `{"a":`+want+"}" {
			t.Errorf("canonical(%q) = %s, want %s", in, got, want)
		}
	}
	needTool(t, "jq", "sh", "sha256sum")
	var all []byte
	for first := rune(0); first <= utf8.MaxRune; first += 256 {
		var text strings.Builder
		for r := first; r < first+256; r++ {
			text.WriteRune(r) // what is none is U+FFFD
			text.WriteByte('x')
		}
		all = append(append(all, canonical([]Field{{"a", text.String()}})...), '\n')
	}
	jq := exec.Command("jq", "-c", ".")
	jq.Stdin = bytes.NewReader(all)
	if out, err := jq.Output(); err != nil || !bytes.Equal(out, all) {
		t.Errorf("jq prints other bytes: %v", err)
	}
	dir := home(t, "")
	cli(t, dir, "answer", "é😀<&>\"\\\x7f\u2028", "y")
	cli(t, dir, "ask", "--timeout", "1s", "é😀<&> \x01\x7f \u2028 \"\\?")
	for line := range strings.Lines(textOf(t, dir, "audit.log")) {
		sh := exec.Command("sh", "-c", `jq -cj 'del(.hash)' | sha256sum`)
		sh.Stdin = strings.NewReader(line)
		out, err := sh.Output()
		hash, _, _ := strings.Cut(string(out), " ")
		if err != nil || !strings.HasSuffix(line, `"hash":"sha256:`+hash+"\"}\n") {
			t.Errorf("%v: sha256sum says %s for %s", err, out, line)
		}
	}
}

// TestHeadOnThePhone: the message of a session's end has the log's head, which one who writes log and state anew has not.
func TestHeadOnThePhone(t *testing.T) {
	needTool(t, "false")
	t.Parallel()
	bot := newBotAPI(t)
	dir := home(t, bot.config(""))
	s := begins(t, dir, "", "run", "false")
	m := bot.shows("audit ", "")
	s.Wait()
	head := regexp.MustCompile(`\naudit (\d+ [0-9a-f]{24})\n`).FindStringSubmatch(m.text)
	if head == nil {
		t.Fatalf("no head in %q", m.text)
	}
	log := textOf(t, dir, "audit.log")
	if seq, hash, _ := strings.Cut(head[1], " "); !matches(`(?m)^\{"seq":`+seq+`,.*"hash":"sha256:`+hash+`[0-9a-f]{40}"\}$`, log) {
		t.Errorf("%q is not the head of an entry in\n%s", head[1], log)
	}
}

// ---- the whole program: simulation ----
// Whole command lines in virtual time, against models.
//
// Real: `atlasbridge run` with all that belongs to it, its settings from a config.toml, and `atlasbridge hook`, both by
// world.run, on files. Modelled, each with its own random numbers from the seed: the tool behind the terminal, the way to
// the Bot API (which is the bench's), a person with a phone and a keyboard. What the state holds is read as jq would. What
// the person types is told from what AtlasBridge types by its bytes: the model tool takes upper-case letters and ^J from
// the one where the other sends lower-case letters, digits and ^M.
//
// One allowance: to look and to type are two steps, so what changes less than simBlind before a byte is read cannot be
// seen by anybody. The tool ignores what it reads that soon after a change, as claude's dialogs do for longer.

const (
	simSeeds    = 100
	simBlind    = 20 * time.Millisecond
	simLimit    = 2 * time.Minute // of real time for one, which takes less than a second
	simFailures = 3               // are enough to look at
)

// TestSimulation plays a hundred scenarios, or ATLASBRIDGE_TEST_SEEDS. ATLASBRIDGE_TEST_SEED is the first: alone it is
// played and prints its timeline.
func TestSimulation(t *testing.T) {
	needUnix(t)
	first, last := 1, simSeeds
	one, err := strconv.Atoi(os.Getenv("ATLASBRIDGE_TEST_SEED"))
	if err == nil {
		first, last = one, one
	}
	n, err := strconv.Atoi(os.Getenv("ATLASBRIDGE_TEST_SEEDS"))
	if err == nil {
		last = n
	}
	replay := first == last
	var rows []int
	for seed := first; seed <= last; seed++ {
		rows = append(rows, seed)
	}
	if last == simSeeds {
		rows = append(rows, 4149, 5606, 8908, 52052, 84708, 8004137, 8015598) // that found what none of these finds
	}
	c := make(chan os.Signal, 1) // the goroutines of package signal start outside of every bubble
	signal.Notify(c, os.Interrupt)
	signal.Stop(c)
	var told sync.Mutex // guards total
	total := map[string]int{}
	began := time.Now()
	beside(t, rows, func(t *testing.T, seed int) {
		told.Lock()
		enough := total["failed"] >= simFailures
		told.Unlock()
		if enough {
			return
		}
		s := simulate(t, uint64(seed))
		told.Lock()
		defer told.Unlock()
		for what, n := range s.count {
			total[what] += n
		}
		total["played"]++
		timeline := strings.Join(s.log, "\n")
		if len(s.faults) > 0 {
			total["failed"]++
			t.Errorf("replay with ATLASBRIDGE_TEST_SEED=%d go test -run '^TestSimulation$' -v\n%s\n%s",
				seed, strings.Join(s.faults, "\n"), timeline)
		} else if replay {
			t.Log(timeline)
		}
	})
	t.Logf("%d seeds in %v: %v", len(rows), time.Since(began).Round(time.Millisecond), total)
}

// sim is one scenario. Its events take the lock and never wait with it.
type sim struct {
	mu    sync.Mutex
	seed  uint64
	dir   string
	start time.Time
	over  atomic.Bool
	count map[string]int
	id    string // of the session

	telling sync.Mutex // guards what follows; taken last
	log     []string
	faults  []string
	prompts map[string]*simPrompt
	read    int               // bytes of state.jsonl
	texts   map[string]string // of it, by id

	away        time.Duration
	asks, moves []row // of testdata

	simTool
	simPhone
	keys simStream
}

// simFate is what became of a question at the tool.
type simFate struct {
	took    []string   // meanings that the tool took
	by      *simDialog // that its answer answered
	dropped bool       // something of it was ignored, within the allowance
	outrun  bool       // its hook's answer came after the dialog was answered
	steered time.Time  // when its first arrow was read: what else is in the menu may change from then on
}

// simPrompt is a question as state.jsonl has it.
type simPrompt struct {
	*simFate
	Rec, ID, Type, Source, Status, Question, Shown, Full, Reason string
	Idle, Permission                                             bool

	Text      string // of a record of that kind
	AboutSHA  string `json:"about_sha256"`
	Answers   []simAnswer
	Value     *string
	By        string     `json:"decided_by"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt time.Time  `json:"expires_at"`
	DecidedAt *time.Time `json:"decided_at"`
	Messages  []struct {
		ID    int64
		Shows string
		Lost  int64 `json:"lost_at"` // when an edit was made that may be carried out on top of that
	}
}

// newest is the number of its own message, 0 of none, and what that was made to show.
func (p *simPrompt) newest() (id int64, shows string) {
	if len(p.Messages) == 0 {
		return 0, ""
	}
	m := p.Messages[len(p.Messages)-1]
	shows, _, _ = strings.Cut(m.Shows, " ")
	return m.ID, shows
}

// owes reports whether the message is an older one that is to lose its buttons.
func (p *simPrompt) owes(id int64) bool {
	for _, m := range p.Messages[:max(0, len(p.Messages)-1)] {
		if shows, _, _ := strings.Cut(m.Shows, " "); m.ID == id && slices.Contains([]string{"", "awaiting_reply", "buttons", "expired"}, shows) {
			return true
		}
	}
	return false
}

// simAnswer is one of its answers.
type simAnswer struct{ Key, Label, Keys string }

// simulate plays a seed and returns what happened.
func simulate(t *testing.T, seed uint64) *sim {
	t.Helper()
	s := &sim{seed: seed, count: map[string]int{}, prompts: map[string]*simPrompt{}, texts: map[string]string{}}
	tell := func(why any) {
		s.telling.Lock()
		panic(fmt.Sprintf("seed %d: %v\n%s", seed, why, strings.Join(s.log, "\n")))
	}
	defer time.AfterFunc(simLimit, func() { tell("it does not end") }).Stop()
	defer func() {
		if r := recover(); r != nil {
			tell(r)
		}
	}()
	synctest.Test(t, s.play)
	return s
}

// now is a number that two moments do not share: what is drawn by it does not depend on the order of goroutines.
func (s *sim) now() int { return int(time.Since(s.start)) }

// random is a stream of random numbers of its own for every purpose.
func (s *sim) random(purpose string, n int) *rand.Rand {
	h := s.seed
	for _, c := range []byte(fmt.Sprint(purpose, n)) {
		h = (h ^ uint64(c)) * 0x100000001b3
	}
	return rand.New(rand.NewPCG(s.seed, h))
}

// between is a time from min to max milliseconds, to the nanosecond: two events hardly ever meet.
func between(r *rand.Rand, min, max int) time.Duration {
	return time.Duration(min)*time.Millisecond + time.Duration(r.Int64N(int64(max-min)*1e6+1e6))
}

// oneIn is true once in n times.
func oneIn(r *rand.Rand, n int) bool { return r.IntN(n) == 0 }

// oneOf is any of these.
func oneOf[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// at does something after a time.
func (s *sim) at(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.over.Load() {
			f()
		}
	})
}

// note adds a line to the timeline.
func (s *sim) note(format string, args ...any) {
	s.telling.Lock()
	defer s.telling.Unlock()
	s.count[format]++
	s.log = append(s.log, fmt.Sprintf("%10.6f  ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

// fault adds what must not be.
func (s *sim) fault(format string, args ...any) {
	s.note("FAULT "+format, args...)
	s.telling.Lock()
	defer s.telling.Unlock()
	s.faults = append(s.faults, s.log[len(s.log)-1])
}

// questions are those of the state, by their ids.
func (s *sim) questions() map[string]*simPrompt {
	text, _ := os.ReadFile(filepath.Join(s.dir, "state.jsonl")) // not there yet: none
	s.telling.Lock()
	defer s.telling.Unlock()
	if len(text) < s.read { // it was written anew
		s.read = 0
	}
	end := bytes.LastIndexByte(text, '\n') + 1
	for line := range bytes.Lines(text[s.read:max(end, s.read)]) {
		p := &simPrompt{simFate: &simFate{}}
		err := json.Unmarshal(line, p)
		if err == nil && p.Rec == "text" {
			s.texts[p.ID] = p.Text
		}
		if err == nil && p.Rec == "prompt" {
			_ = json.Unmarshal([]byte(s.texts[p.AboutSHA]), p) // a prompt has some
			if was := s.prompts[p.ID]; was != nil {
				p.simFate = was.simFate
			}
			s.prompts[p.ID] = p
		}
	}
	s.read = max(end, s.read)
	return maps.Clone(s.prompts)
}

// world is that of a command line: args have no terminal but the keyboard's.
func (s *sim) world(ctx context.Context, start func() PTY, dead *atomic.Bool, files ...*os.File) world {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		s.fault("%v", err)
	}
	env := map[string]string{"ATLASBRIDGE_HOME": s.dir, "ATLASBRIDGE_SESSION": s.id}
	w := world{
		ctx: ctx, stdin: null, stdout: null, stderr: null,
		getenv:   func(name string) string { return env[name] },
		keyboard: &s.keys,
		start: func(_, env []string, _ Size, _ Host) (PTY, error) {
			for _, e := range env {
				if id, ok := strings.CutPrefix(e, "ATLASBRIDGE_SESSION="); ok {
					s.mu.Lock()
					s.id = id
					s.mu.Unlock()
				}
			}
			return start(), nil
		},
		catch:   func(chan<- os.Signal, ...os.Signal) {},
		network: s,
		dice:    func() float64 { return 0.5 },
		disk: func(op string, _ *os.File, call func() error) error { // nothing waits for it, or it is busy
			if dead.Load() {
				return errors.New("killed")
			}
			if strings.HasPrefix(op, "fsync") {
				if r := s.random("disk", s.now()); s.busy && oneIn(r, 3) {
					time.Sleep(between(r, 0, 30))
				}
				return nil
			}
			return call()
		},
	}
	if len(files) > 0 {
		w.stdin, w.stdout = files[0], files[1]
	}
	return w
}

// play is the whole scenario, inside of its bubble.
func (s *sim) play(t *testing.T) {
	s.start = time.Now()
	r := s.random("session", 0)
	if oneIn(r, 4) {
		s.away = time.Duration(1+r.IntN(4)) * time.Second
	}
	settings := fmt.Sprintf("timeout_seconds = %d\npermission_timeout_seconds = %d\naway_after_seconds = %.0f\n"+
		"free_text_enabled = %v\nnotify_idle = %v\n", 5+r.IntN(26), 5+r.IntN(26), s.away.Seconds(), r.IntN(5) > 0, oneIn(r, 3))
	s.dir = home(t, settings+"log_level = \"error\"\n[telegram]\nchat_id = 1001\nallowed_users = [1001]\n"+
		"api_base = \"http://127.0.0.1:1\"\nbot_token = \""+fakeToken+"\"\n")
	s.asks, s.moves = table(t, "simdialogs.txt"), table(t, "simmoves.txt")
	s.bot = bareBotAPI(t)
	s.bot.free = true // we ask it for its verdict
	s.bot.dates = 0
	s.bot.fate = s.fate
	s.keys.more = make(chan struct{}, 1)
	s.begin()
	name := "plain"
	if s.claude {
		name = "claude"
	}
	s.note("%s, rough %v, blind %v, busy %v, %q", name, s.rough, s.blind, s.busy, settings)
	s.at(between(r, 50, 300), s.next)
	done := make(chan struct{})
	go s.watch(done)
	s.runs(func() PTY { return &simPTY{sim: s} }, "run", "--quiet", "/nowhere/"+name)
	s.note("the session is over")
	for _, p := range s.questions() {
		if p.Source == "screen" && !p.ended() {
			s.fault("the session has left the question %q %s", p.Question, p.Status)
		}
	}
	s.mu.Lock()
	for _, h := range s.hooks {
		h.cancel()
	}
	s.mu.Unlock()
	s.payLater()
	s.over.Store(true)
	time.Sleep(16 * time.Second) // what is late has come
	close(done)
	s.runs(nil, "audit", "verify")
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.judgeAll()
}

// runs carries out a command line that must succeed.
func (s *sim) runs(start func() PTY, args ...string) {
	if code := s.world(context.Background(), start, &atomic.Bool{}).run(args); code != 0 {
		s.fault("%q exits with %d", args, code)
	}
}

// payLater lets the next session pay the edits that are owed.
func (s *sim) payLater() {
	owed := func() bool {
		for _, p := range s.questions() {
			own, shows := p.newest()
			if own != 0 && shows != p.Status {
				return true
			}
			for _, m := range p.Messages {
				if m.Lost != 0 || p.owes(m.ID) {
					return true
				}
			}
		}
		return false
	}
	time.Sleep(25 * time.Second) // what is late has come
	if !owed() {
		return
	}
	later := &sim{seed: s.seed, start: s.start, count: map[string]int{}}
	later.out.more, later.exited = make(chan struct{}, 1), make(chan struct{})
	go func() {
		for n := 0; n < 60 && owed(); n++ {
			time.Sleep(5 * time.Second)
		}
		later.mu.Lock()
		defer later.mu.Unlock()
		later.end()
		close(later.exited)
	}()
	s.runs(func() PTY { return &simPTY{sim: later} }, "run", "--quiet", "/nowhere/plain")
}

// ---- simulation: the keyboard ----
// Keys as a person presses them.

// simStream is what one writes and another reads.
type simStream struct {
	mu    sync.Mutex
	bytes []byte
	ended bool
	more  chan struct{}
	slow  func() // nil: it is read at once
}

func (k *simStream) Read(p []byte) (int, error) {
	for {
		k.mu.Lock()
		some, ended := len(k.bytes) > 0, k.ended
		k.mu.Unlock()
		switch {
		case some:
			if k.slow != nil {
				k.slow()
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			n := copy(p, k.bytes)
			k.bytes = k.bytes[n:]
			return n, nil
		case ended:
			return 0, io.EOF
		}
		<-k.more
	}
}

// put has bytes arrive, or the stream end.
func (k *simStream) put(text string, end bool) {
	k.mu.Lock()
	k.bytes = append(k.bytes, text...)
	k.ended = k.ended || end
	k.mu.Unlock()
	select {
	case k.more <- struct{}{}:
	default:
	}
}

// press has the person press keys.
func (s *sim) press(text string) {
	if s.ending {
		return
	}
	s.note("keyboard %q", text)
	if s.up != nil {
		s.up.touched = true
	}
	for _, c := range []byte(text) {
		s.pressed = append(s.pressed, &simKey{c: c, at: time.Now(), d: s.up})
	}
	s.keys.put(text, false)
}

// ---- simulation: the terminal ----
// A busy machine between the tool and the session.

// simPTY is the child's terminal.
type simPTY struct {
	*sim
	PTY // nil: nothing else of it is asked for
}

func (p *simPTY) Read(b []byte) (int, error) { return p.out.Read(b) }

// Write has the tool read the bytes a little later.
func (p *simPTY) Write(b []byte) (int, error) {
	answer := p.deciding()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return 0, io.ErrClosedPipe
	}
	text := statusAnswer.ReplaceAllString(string(b), "")
	if text != "" {
		due := time.Now().Add(between(p.random("reads", p.now()), 0, 4))
		if !due.After(p.readAt) {
			due = p.readAt.Add(time.Microsecond)
		}
		p.readAt = due
		p.plays("types")
		p.waiting += len(text)
		p.at(time.Until(due), func() {
			p.waiting -= len(text)
			p.takes(text, answer)
		})
	}
	return len(b), nil
}

func (p *simPTY) Came() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.came
}

func (p *simPTY) Waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.blind {
		return -1
	}
	return p.waiting
}

func (p *simPTY) TakeBack(int) bool { return false }

func (p *simPTY) State() TTYState {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := TTYState{Reading: ReadingYes}
	switch {
	case p.claude:
	case p.up == nil || p.up.over:
		state = TTYState{Reading: ReadingBusy, Canonical: true, Echo: true}
	case p.up.kind != "menu":
		state.Canonical, state.Echo = true, p.up.kind != "secret"
	}
	if p.blind {
		state.Reading = ReadingUnknown
	}
	return state
}

func (p *simPTY) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	return nil
}

func (p *simPTY) Wait() int {
	<-p.exited
	return 0
}

func (p *simPTY) Signaled() bool { return false }

func (p *simPTY) PID() int { return 0 }

func (p *simPTY) Stopped() <-chan struct{} { return nil }

func (p *simPTY) Modes() Modes {
	state := p.State()
	return Modes{Processed: true, Canonical: state.Canonical, Echo: state.Echo, Erase: 0x7f, UTF8: true}
}

func (p *simPTY) Terminate(time.Duration) {}

// end is the end of the tool's output.
func (s *sim) end() {
	s.ended = true
	s.out.put("", true)
}

// print is what the tool writes.
func (s *sim) print(format string, a ...any) {
	text := fmt.Sprintf(format, a...)
	s.came += int64(len(text))
	s.out.put(text, false)
}

// deciding is the question that is decided and not typed yet: what the gate types about.
func (s *sim) deciding() *simPrompt {
	for _, p := range s.questions() {
		if p.Source == "screen" && (p.Status == "reply_received" || p.Status == "expired" && p.Value != nil) {
			return p
		}
	}
	return nil
}

// ---- simulation: the tool ----
// A program that asks, changes its mind and takes what it reads for what it means.

// simTool is the model of the program behind the terminal.
type simTool struct {
	claude bool
	blind  bool // the system cannot tell who reads

	waiting int // bytes that were written and not read
	out     simStream
	came    int64 // bytes of output
	exited  chan struct{}
	ended   bool
	last    bool // no dialog will come
	ending  bool // nobody acts any more
	readAt  time.Time
	endAt   time.Time // since when nobody acts any more

	left      int // dialogs still to come
	made      int
	rested    int // dialogs that there had been when a turn last ended
	up        *simDialog
	changedAt time.Time // when what is on the screen last changed, or could be taken for something else
	pointer   int
	line      string // typed so far, in canonical mode
	lineBy    []*simPrompt
	box       string // the input box
	idle      bool
	ahead     bool // a text was typed where nothing asked
	speaks    bool
	hooks     []*simHook
	queue     []*simDialog // of claude: asked by hooks, not shown yet
	stands    []simStand
	byUs      map[int]*simDialog // dialogs that we answered, by number
	pastedAt  []time.Time        // when texts of the phone's came to the box
	pressed   []*simKey
	readTo    int            // so many of them; of these those that are not read are lost
	got       map[string]int // messages from the input box
}

// simDialog is a version of a dialog: what stands on the screen.
type simDialog struct {
	n, version int
	kind       string // yesno enter text secret list menu, of claude bash edit trust
	title      string // of claude
	above      []string
	body       []string
	full       string // of claude: the call, of which the dialog may show the beginning
	name       string // of claude: a word that no other call has
	ask        string
	choices    []string
	keys       []string // that answer it
	texts      []string // the same of the phone's
	notes      []string // below the question; of a menu the first is above the choices
	hooked     bool     // its hook is called
	shownAt    time.Time
	bornAt     time.Time // in this version, in this place
	touched    bool      // somebody typed or tapped while it stood
	over       bool      // answered, though it may still be painted
	ours       bool      // by us
	overAt     time.Time
	decidedAt  time.Time // when our answer to it was
}

// String is how the timeline names it.
func (d *simDialog) String() string { return fmt.Sprintf("dialog %d.%d", d.n, d.version) }

// simStand is a time in which a version stood and nobody touched it.
type simStand struct {
	*simDialog
	from, to time.Time
}

// simHook is a call of atlasbridge hook.
type simHook struct {
	d      *simDialog
	cancel func()
	dead   *atomic.Bool
	done   bool
	from   time.Time
	to     time.Time
}

// simKey is a key that the person pressed, and the dialog that stood then, nil: none.
type simKey struct {
	c    byte
	at   time.Time
	d    *simDialog
	read bool
}

// begin draws what tool, network and person are like, and starts the tool.
func (s *sim) begin() {
	r := s.random("tool", 0)
	s.claude, s.blind = oneIn(r, 2), oneIn(r, 10)
	s.out.more, s.exited = make(chan struct{}, 1), make(chan struct{})
	s.out.slow = func() {
		r := s.random("busy", s.now())
		delay := between(r, 0, 1)
		if oneIn(r, 12) {
			delay = between(r, 5, 80)
		}
		time.Sleep(delay)
	}
	s.left = 3 + r.IntN(5)
	if oneIn(r, 16) {
		s.left = 20 // quick ones
	}
	s.byUs, s.got = map[int]*simDialog{}, map[string]int{}
	net, person := s.random("net", 0), s.random("person", 0)
	s.rough, s.busy = oneIn(net, 2), oneIn(net, 3)
	s.present, s.swift = oneOf(person, 0, 5, 9, 9), s.left > 8
	if s.swift {
		s.present = 10
	}
	s.msgs, s.known, s.said = map[int64]*simMessage{}, map[int64]bool{}, map[string]int{}
	s.doubted = map[int64]bool{}
	if s.rough {
		s.bot.slack = 1 // what comes late comes with others
	}
	if s.rough && oneIn(net, 3) {
		from := s.start.Add(between(net, 1000, 30000))
		s.outage = [2]time.Time{from, from.Add(between(net, 2000, 40000))}
	}
	if s.claude {
		s.speaks = r.IntN(6) > 0
		s.print("\x1b[?2004h\x1b]0;✳ Claude Code\a\x1b[?1049h\x1b[2J\x1b[H\x1b[?25l\x1b]7501;?\a")
		s.is("idle")
	} else {
		s.print("starting\r\n")
	}
}

// is tells the terminal what claude does.
func (s *sim) is(state string) { s.print("%s", claudeIs(state, "", s.speaks)) }

var simWords = strings.Fields("alpha bravo carol delta eagle fjord gamma hotel igloo joker koala lemon mango north olive piano")

// next goes on to the next dialog, or to the end.
func (s *sim) next() {
	if s.ending || s.up != nil || s.idle {
		return
	}
	r := s.random("next", s.made)
	if s.left <= 0 && len(s.queue) == 0 && !slices.ContainsFunc(s.hooks, func(h *simHook) bool {
		return !h.done && !h.d.over
	}) {
		s.finale(r)
		return
	}
	if s.claude {
		s.nextOfClaude(r)
		return
	}
	s.left--
	s.show(s.dialog("plain", r))
	s.plays("plain")
}

// finale ends the program.
func (s *sim) finale(r *rand.Rand) {
	if s.last {
		return
	}
	s.last = true
	if s.claude {
		s.ends()
	}
	s.at(between(r, 500, 6000), func() {
		s.ending = true
		s.endAt = time.Now()
		s.note("nobody acts any more")
		s.keys.put("", true)
		s.at(between(r, 1500, 2500), func() {
			s.leave()
			s.note("tool exits")
			s.end()
			close(s.exited)
		})
	})
}

// simSecret is what may be left out of a message, and nothing else.
const simSecret = "a1b2c3d4e5"

// dialog makes a question of a program that is not known, or of claude, as testdata/simdialogs.txt has them.
func (s *sim) dialog(of string, r *rand.Rand) *simDialog {
	s.made++
	word := func() string { return simWords[r.IntN(len(simWords))] + strconv.Itoa(r.IntN(100)) }
	name := word()
	any := func(of string) row {
		return oneOf(r, slices.DeleteFunc(slices.Clone(s.asks), func(one row) bool { return one["of"] != of })...)
	}
	var fill func(string) string
	fill = func(text string) string {
		return os.Expand(text, func(what string) string {
			switch what {
			case "W":
				return word()
			case "N":
				return name
			case "S":
				return simSecret
			}
			return fill(any(what)["body"])
		})
	}
	parts := func(text string) []string {
		return slices.DeleteFunc(strings.Split(fill(text), " / "), func(part string) bool { return part == "" })
	}
	drawn := any(of)
	d := &simDialog{
		n:       s.made,
		kind:    drawn["kind"],
		title:   drawn["title"],
		name:    name,
		body:    parts(drawn["body"]),
		ask:     fill(drawn["ask"]),
		choices: parts(drawn["choices"]),
		keys:    strings.Split(drawn["keys"], " "),
		texts:   strings.Fields(drawn["texts"]),
	}
	if of == "claude" {
		d.full, d.hooked = d.body[0], d.kind != "trust" && r.IntN(3) > 0
		if d.kind == "bash" && oneIn(r, 5) { // its dialog shows the beginning
			for i := range 300 + r.IntN(700) {
				d.full += fmt.Sprint(" file-", i)
			}
			d.body[0] += " file-0…"
		}
		return d
	}
	for range r.IntN(3) {
		d.above = append(d.above, fill("$above"))
	}
	if oneIn(r, 2) && d.kind != "secret" {
		d.body = append(d.body, fill("$beside"))
	}
	if oneIn(r, 3) && len(d.choices) > 0 {
		d.notes = parts("$notes")
	}
	return d
}

// needs is all that a person has to have read before anything of d is affirmed.
func (d *simDialog) needs() []string {
	needs := slices.Concat(d.above, d.body, []string{d.ask}, d.notes)
	if d.kind != "yesno" {
		needs = append(needs, d.choices...)
	}
	return needs
}

// simUnshown is the first of these that a text does not have, "": it has all, but for secrets.
func simUnshown(text string, needs []string) string {
	for _, need := range needs {
		for _, piece := range strings.Split(strings.TrimSpace(need), simSecret) {
			if !strings.Contains(text, piece) {
				return need
			}
		}
	}
	return ""
}

// variant is another version of a dialog: one thing in it differs, or nothing.
func (s *sim) variant(d *simDialog, r *rand.Rand) *simDialog {
	v := *d
	v.version++
	v.touched, v.over, v.ours = s.blind && s.line != "", false, false // nobody can tell what a line that was begun waits for
	var rows []*string
	for _, list := range []*[]string{&v.above, &v.body, &v.notes, &v.choices} {
		*list = slices.Clone(*list)
		for i := range *list {
			if list != &v.choices || len(v.choices) > 2 {
				rows = append(rows, &(*list)[i])
			}
		}
	}
	if len(v.body) == 0 {
		rows = append(rows, &v.ask)
	}
	row := oneOf(r, rows...)
	was := *row
	change := r.IntN(6)
	switch {
	case change == 0 && len(v.body) > 0:
		v.body[0] = strings.Replace(v.body[0], " ", "  ", 1)
	case change == 1 && len(v.choices) > 2:
		v.choices[0], v.choices[1] = v.choices[1], v.choices[0]
	case change == 2 && strings.ContainsAny(was, "○●•"):
		*row = strings.NewReplacer("○", "●", "●", "○", "•", "·", "30s", "0s").Replace(was)
	default:
		*row = strings.Replace(was, " ", fmt.Sprintf(" %s%d ", oneOf(r, simWords...), 10+r.IntN(90)), 1)
	}
	if len(*row) > 70 { // no row is full
		*row = was
	}
	return &v
}

// lines are the rows of a plain dialog above the cursor's, and the text in that.
func (d *simDialog) lines(pointer int) (rows []string, line string) {
	rows = append(rows, d.above...)
	rows = append(rows, "")
	rows = append(rows, d.body...)
	switch d.kind {
	case "yesno":
		return rows, d.ask + " [y/n] "
	case "menu":
		above := min(1, len(d.notes))
		rows = append(append(rows, "? "+d.ask), d.notes[:above]...)
		for i, c := range d.choices {
			rows = append(rows, pointed(i == pointer, "%s", c))
		}
		return append(rows, d.notes[above:]...), ""
	}
	for i, c := range d.choices {
		rows = append(rows, fmt.Sprintf("  %d) %s", i+1, c))
	}
	return rows, d.ask + " "
}

// below writes what stands below a question, and puts the cursor back behind so much of the question's line.
func (d *simDialog) below(line string) string {
	if d.kind == "menu" || len(d.notes) == 0 {
		return ""
	}
	return fmt.Sprintf("\r\n%s\x1b[K\x1b[%dA\r\x1b[%dC", strings.Join(d.notes, "\x1b[K\r\n"), len(d.notes), len([]rune(line)))
}

// show puts a plain dialog on the screen, below what was there, or after another at once: there is nothing in between.
func (s *sim) show(d *simDialog) {
	s.pointer, s.line, s.lineBy = 0, "", nil
	rows, line := d.lines(0)
	if d.kind == "menu" {
		s.print("\x1b[?25l")
	}
	s.print("%s\r\n%s%s", strings.Join(rows, "\r\n"), line, d.below(line))
	s.stand(d)
}

// stand notes that this version stands from now on; what is decided of it is taken a little later.
func (s *sim) stand(d *simDialog) {
	s.leave()
	s.up, s.changedAt = d, time.Now()
	d.shownAt, d.bornAt = time.Now(), time.Now()
	s.note("tool shows %v, %s: %q %q %q %q %q", d, d.kind, d.above, d.body, d.ask, d.choices, d.notes)
}

// leave notes that what stood does not stand any more.
func (s *sim) leave() {
	if d := s.up; d != nil {
		s.stands = append(s.stands, simStand{d, d.shownAt, time.Now()})
	}
	s.changedAt = time.Now()
	s.up = nil
}

// acts does something with the dialog number n, if it still stands.
func (s *sim) acts(n int, r *rand.Rand) {
	d := s.up
	if d == nil || d.n != n || d.over || d.hooked || s.ending {
		return
	}
	v := s.variant(d, r)
	switch what := r.IntN(8); {
	case what == 0:
		s.vanish(n, r)
	case what < 3: // painted again as it is
		s.note("tool paints %d again", n)
		s.repaint()
	case what == 3 && s.claude: // away for a moment, then back as it was
		s.note("tool hides %d for a moment", n)
		s.turns(nil)
		s.at(between(r, 10, 900), func() {
			if s.up == nil && !d.over && !s.ending {
				d.shownAt = time.Now()
				s.turns(d)
			}
		})
	case what == 3 || what == 4 && !s.claude: // the same shape, below, at once
		s.note("tool swaps %d", n)
		if what == 3 { // in the same words
			*v = *d
			v.version++
		}
		s.clear()
		s.show(v)
	default:
		s.stand(v)
		s.repaint()
	}
}

// turns has claude's screen show this dialog, nil: none.
func (s *sim) turns(d *simDialog) {
	s.up, s.changedAt = d, time.Now()
	s.paintClaude()
}

// repaint writes what stands over what was there.
func (s *sim) repaint() {
	if s.claude {
		s.paintClaude()
		return
	}
	rows, line := s.up.lines(s.pointer)
	if s.up.kind == "menu" {
		s.print("\x1b[%dA\r%s\x1b[K", len(rows)-1, strings.Join(rows, "\x1b[K\r\n"))
		return
	}
	if s.up.kind != "secret" {
		line += simEcho(s.line)
	}
	s.print("\x1b[%dA\r%s\x1b[K\r\n%s\x1b[K%s", len(rows), strings.Join(rows, "\x1b[K\r\n"), line, s.up.below(line))
}

// simEcho is how a terminal in canonical mode shows what is typed.
func simEcho(typed string) (shown string) {
	for _, c := range typed {
		switch {
		case c == '\r' || c == '\n':
			shown += "\r\n"
		case c < ' ':
			shown += "^" + string(c+'@')
		default:
			shown += string(c)
		}
	}
	return shown
}

// clear takes a plain dialog away.
func (s *sim) clear() {
	if s.up.kind == "menu" {
		rows, _ := s.up.lines(0)
		s.print("\x1b[%dA\r\x1b[J? %s\r\n\x1b[?25h", len(rows)-1, s.up.ask)
		return
	}
	s.print("\r\n\x1b[J")
}

// vanish has the tool give the dialog number n up.
func (s *sim) vanish(n int, r *rand.Rand) {
	d := s.up
	if d == nil || d.n != n || d.over || s.ending {
		return
	}
	s.note("tool gives %d up", n)
	d.over, d.overAt = true, time.Now()
	if s.claude {
		s.leave()
		s.paintClaude()
	} else {
		s.clear()
		s.leave()
		s.print("never mind\r\n")
	}
	s.at(s.gap(r), s.next)
}

// gap is the time between two dialogs: often none.
func (s *sim) gap(r *rand.Rand) time.Duration {
	if oneIn(r, 3) {
		return between(r, 0, 25)
	}
	return between(r, 25, 1500)
}

// simOurs tells whether AtlasBridge has typed this: the person's keys are others.
func simOurs(text string) bool {
	return strings.ContainsFunc(strings.ReplaceAll(text, "\x1bO", ""), func(c rune) bool {
		return c == '\r' || c == 0x1b || c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
	})
}

// takes is the tool reading bytes; p is the decision of which they are, where they are ours.
func (s *sim) takes(text string, p *simPrompt) {
	if s.ended {
		return
	}
	by := "keyboard"
	if simOurs(text) {
		by = "us"
	} else {
		p = nil
		s.readsKeys(text)
	}
	if time.Since(s.changedAt) < simBlind {
		s.note("tool ignores %q of %s at %v: too soon after a change", text, by, s.up)
		if p != nil {
			p.dropped = true
		}
		s.ahead = s.ahead || by == "us" && s.said[text] > 0
		return
	}
	s.note("tool reads %q of %s at %v", text, by, s.up)
	if by == "us" && !s.allowed(text, p) {
		return
	}
	switch {
	case s.claude:
		s.takesClaude(text, p)
	case s.up == nil || s.up.over:
		s.print("%s", simEcho(text)) // what is typed ahead
	case s.up.kind == "menu":
		s.takesMenu(text, p)
	default:
		s.takesLine(text, p)
	}
}

// readsKeys checks that keys come in the order in which they were pressed, and that none which was pressed while a
// dialog stood that we had answered is read by a later one.
func (s *sim) readsKeys(text string) {
	late := func(k *simKey) bool {
		if s.up == nil || k.d == nil || k.d.n == s.up.n || s.byUs[k.d.n] == nil {
			return false
		}
		over := s.byUs[k.d.n]
		return k.at.Before(over.overAt) && k.at.After(over.decidedAt)
	}
	for _, c := range []byte(strings.ReplaceAll(text, "\x06", "")) { // which /keys presses
		read := -1 // of several keys alike the first that may be read: those before were dropped
		for i, k := range s.pressed[s.readTo:] {
			if k.c == c && (read < 0 || late(s.pressed[s.readTo+read])) {
				read = i
			}
		}
		if read < 0 {
			s.fault("the tool reads the key %q, which was not pressed, or not in this order", c)
			return
		}
		k := s.pressed[s.readTo+read]
		k.read = true
		s.readTo += read + 1
		if late(k) {
			s.fault("the key %q, pressed while dialog %d had our answer, is read by dialog %d", c, k.d.n, s.up.n)
		}
	}
}

// judgeKeys checks that no key was lost but those that were pressed while a question stood that we were answering, and
// no ^C.
func (s *sim) judgeKeys() {
	const answering = 6 * time.Second     // the longest that an answer takes
	const seeing = 200 * time.Millisecond // the longest that a change takes to be seen
	const reading = time.Second / 2       // nobody answers a question sooner: what is typed was not meant for it
	excused := func(k *simKey) bool {
		typing := func(at time.Time) bool { return k.at.Sub(at).Abs() < answering } // of a text: a question came meanwhile
		meant := func(p *simPrompt) bool {
			if p.Value == nil || p.By == "cli:local" || k.at.Before(*p.DecidedAt) {
				return false
			}
			d := p.by
			if d == nil { // nothing took it
				stood := k.d != nil || slices.ContainsFunc(s.stands, func(one simStand) bool {
					return k.at.After(one.bornAt) && k.at.Before(one.to.Add(seeing)) // also while it was hidden for a moment
				})
				return stood && k.at.Before(p.DecidedAt.Add(answering))
			}
			next := slices.IndexFunc(s.stands, func(one simStand) bool { return one.bornAt.After(d.overAt) })
			soon := next >= 0 && s.stands[next].bornAt.Sub(d.overAt) < time.Second
			unmeant := soon && k.at.Before(s.stands[next].bornAt.Add(reading))
			left := d.overAt
			for _, one := range s.stands {
				if one.n == d.n && one.to.After(left) {
					left = one.to
				}
			}
			return unmeant || k.d != nil && k.d.n == d.n || k.at.Before(left.Add(seeing)) // it may still have been seen
		}
		asked := slices.Collect(maps.Values(s.prompts))
		return k.c != 0x03 && (slices.ContainsFunc(s.pastedAt, typing) || slices.ContainsFunc(asked, meant))
	}
	lost := map[byte]int{}
	for i, k := range s.pressed {
		if k.read || i >= s.readTo && !k.at.Before(s.endAt.Add(-4*time.Second)) {
			continue // the tool may have ended before
		}
		lost[k.c]++
		may := 0 // which of several keys alike were dropped nobody can tell
		for _, other := range s.pressed {
			if other.c == k.c && excused(other) {
				may++
			}
		}
		if lost[k.c] > may {
			s.fault("the key %q is lost that was pressed at %v", k.c, k.at.Sub(s.start))
		}
	}
}

// allowed checks that bytes of ours belong to what stands.
func (s *sim) allowed(text string, p *simPrompt) bool {
	d := s.up
	said := s.said[pasteBrackets.Replace(strings.TrimSuffix(text, "\r"))] > 0
	if said && d == nil {
		s.ahead = true
	} else if text == "\r" && s.ahead && p == nil {
		s.ahead = false
		if d != nil {
			s.fault("Enter after a text of the phone's answers %v", d)
		}
		return d == nil
	}
	if said || text == "\r" && s.box != "" && s.said[s.box] > 0 || text == "\x05\x15" && s.box != "" {
		if d != nil && p == nil {
			s.fault("text %q of the phone's went into %v", text, d)
		}
		if d == nil {
			return true
		}
	}
	asking := func(h *simHook) bool { return h.d.n == d.n && !h.done && !h.dead.Load() }
	switch {
	case p == nil:
		s.fault("%q of ours, and nothing was decided", text)
	case d == nil && p.Type == "unknown" && s.stillShown(p): // what no reader knows was asked with its screen, which stands
	case d == nil:
		s.fault("%q of ours where nothing asks; it was for %q", text, p.Question)
	case d.over:
		s.fault("%q of ours at %v, which is answered already", text, d)
	case d.hooked && slices.ContainsFunc(s.hooks, asking):
		s.fault("%q of ours was typed into %v, whose hook waits", text, d)
	default:
		s.shown(d, p)
		return true
	}
	return false
}

// stillShown tells that the rows which stand are those that were shown for p.
func (s *sim) stillShown(p *simPrompt) bool {
	rows, _, _ := s.rows()
	return simUnshown(s.seenOf(p), rows) == ""
}

// shown checks that the person has seen all of d in the messages of the decision p, or what p would have shown them.
func (s *sim) shown(d *simDialog, p *simPrompt) {
	text := p.Shown
	if p.byPhone() {
		text = s.seenOf(p)
	} else if p.By != "auto:timeout" {
		s.fault("decided by %q", p.By)
	} else if d.kind != "enter" && !p.refuses() {
		s.fault("waiting has typed %q at %v", s.meaningOf(p), d)
	}
	if !p.steered.IsZero() && d.bornAt.After(p.steered) {
		return
	}
	before := slices.ContainsFunc(s.stands, func(one simStand) bool { // it stood before as it stands again
		same := slices.Equal(one.needs(), d.needs())
		return one.n == d.n && same && slices.Equal(one.choices, d.choices) && one.from.Before(p.CreatedAt)
	})
	if !s.claude && p.CreatedAt.Before(d.bornAt) && !before {
		s.fault("typed at %v what was asked of one that stood before", d)
	}
	needs := d.needs()
	if p.refuses() {
		needs = []string{d.ask}
	}
	if need := simUnshown(text, needs); need != "" {
		s.fault("typed at %v, but %q was not shown for it; shown was:\n%s", d, need, text)
		return
	}
	if len(d.choices) > 2 && p.Type != "unknown" {
		for i, c := range d.choices {
			if len(p.choices()) != len(d.choices) || p.choices()[i].Label != clip(c, 60) {
				s.fault("typed at %v with the choices %q, shown were %q", d, d.choices, p.choices())
				return
			}
		}
	}
}

// means checks that what the tool took is what was decided.
func (s *sim) means(d *simDialog, meaning string, p *simPrompt) {
	d.over, d.overAt = true, time.Now()
	if p == nil {
		s.note("%v: %q at the keyboard", d, meaning)
		return
	}
	if d.ours {
		s.fault("%v is answered twice", d)
	}
	d.ours = true
	s.byUs[d.n] = d
	p.by = d
	d.decidedAt = *p.DecidedAt
	want := s.meaningOf(p)
	s.note("%v: %q by %s", d, meaning, p.By)
	if p.Type == "unknown" && len(p.choices()) > 0 { // the person saw the screen's end and pressed a key at it
		p.took = append(p.took, meaning)
		if !slices.ContainsFunc(s.chosen, func(c simChoice) bool { return c.prompt == p.ID[:8] }) {
			s.fault("a key was pressed at %q, but nobody pressed one", p.Question)
		}
		return
	}
	took, isText := strings.CutPrefix(meaning, "text:")
	begun, ends := strings.CutSuffix(took, strings.TrimPrefix(want, "text:"))
	if want == "Enter" && p.Type == "unknown" {
		begun, ends = took, true
	}
	number := fmt.Sprint("text:", slices.Index(d.choices, meaning)+1)
	if p.Type == "unknown" && want == number { // a text at a screen that no rule reads
		meaning = want
	}
	if isText && ends && strings.HasSuffix(p.Question, simEcho(begun)) {
		meaning = want // what the question shows as typed already is part of the answer
	}
	if meaning != want && clip(meaning, 60) != want {
		s.fault("%v took %q, decided was %q", d, meaning, want)
	}
	p.took = append(p.took, meaning)
	if len(p.took) > 1 {
		s.fault("the answer to %q was taken twice", p.Question)
	}
	if p.byPhone() {
		s.wasChosen(p, want)
	}
}

// meaningOf is what was decided, in words.
func (s *sim) meaningOf(p *simPrompt) string {
	if p.Value == nil {
		return "nothing"
	}
	for _, c := range p.choices() {
		if c.Key == *p.Value {
			return c.Label
		}
	}
	switch *p.Value {
	case "enter", "\r", "":
		return "Enter"
	case "esc", "cancel":
		return "Esc"
	}
	return "text:" + *p.Value
}

// takesLine is a program that reads a line.
func (s *sim) takesLine(text string, p *simPrompt) {
	d := s.up
	for _, c := range text {
		if c == 0x1b || c == 0x03 {
			continue
		}
		if c != '\r' && c != '\n' {
			s.line += string(c)
			s.lineBy = append(s.lineBy, p)
			if d.kind != "secret" {
				s.print("%s", simEcho(string(c)))
			}
			continue
		}
		begun := ""
		for i, c := range s.line {
			if s.lineBy[i] != p {
				begun += string(c)
			}
		}
		begun = simEcho(begun)
		known := p != nil && (p.Type == "unknown" || strings.Contains(p.Shown, "] "+begun) || strings.Contains(p.Shown, ": "+begun))
		if begun != "" && d.kind != "enter" && !known {
			s.fault("a line of %v is typed by two: %q", d, s.line)
		}
		line := s.line
		if known && len(begun) == 1 { // the person has seen it, and added to it
			line = strings.TrimPrefix(line, begun)
		}
		s.line, s.lineBy = "", nil
		meaning := d.meaningOf(line)
		s.print("\r\n\x1b[J")
		if meaning == "" { // asked again below
			if p != nil {
				p.dropped = true
				if !known {
					s.fault("the program does not understand %q of ours", line)
				}
			}
			v := *d
			v.version++
			v.touched = true
			s.show(&v)
			return
		}
		s.means(d, meaning, p)
		s.answered(d)
		return
	}
}

// meaningOf is what a line says to the program, "" nothing.
func (d *simDialog) meaningOf(line string) string {
	keys := "ynYN"
	switch d.kind {
	case "list":
		keys = "123ABC"
	case "text", "secret", "enter":
		if line == "" || d.kind == "enter" {
			return "Enter"
		}
		return "text:" + line
	}
	if i := strings.Index(keys, line); len(line) == 1 && i >= 0 {
		return d.choices[i%len(d.choices)]
	}
	return ""
}

// answered goes on after an answer.
func (s *sim) answered(d *simDialog) {
	r := s.random("answered", d.n)
	s.leave()
	if !s.claude && oneIn(r, 2) {
		s.print("ok %d\r\n", d.n)
	}
	s.at(s.gap(r), s.next)
}

// simMenuKeys are the keys that a menu knows.
var simMenuKeys = regexp.MustCompile("\x1b[[O][AB]|[\r\n\x03\x1b]")

// takesMenu is a program with a pointer that takes no digits.
func (s *sim) takesMenu(text string, p *simPrompt) {
	d := s.up
	for _, key := range simMenuKeys.FindAllString(text, -1) {
		meaning, at := claudeKey(key, d.choices, s.pointer)
		if meaning != "" {
			s.means(d, meaning, p)
			s.clear()
			s.answered(d)
			return
		}
		s.pointer = at
		if p != nil && p.steered.IsZero() {
			p.steered = time.Now()
		}
		s.at(between(s.random("moves", d.n), 0, 120), func() {
			if s.up == d && s.pointer == at {
				s.repaint()
			}
		})
	}
}

// ---- simulation: claude ----
// Its dialogs, its hooks and its input box.

// nextOfClaude calls hooks, or shows the next dialog of those that were called for.
func (s *sim) nextOfClaude(r *rand.Rand) {
	for len(s.queue) > 0 {
		d := s.queue[0]
		s.queue = s.queue[1:]
		if !d.over {
			s.comes(d, r)
			return
		}
	}
	if s.left <= 0 {
		s.at(between(r, 300, 900), s.next)
		return
	}
	if s.rested < s.made && oneIn(r, 3) {
		s.rested = s.made
		s.ends()
		s.plays("rest") // the next dialog may come before a text that is in the box is sent
		return
	}
	s.is("working")
	s.paintClaude()
	together := 1
	if oneIn(r, 3) {
		together = min(s.left, 2+r.IntN(2))
	}
	for range together {
		s.left--
		d := s.dialog("claude", s.random("claude", s.made))
		for more := d.hooked; more; more = oneIn(r, 8) {
			s.callHook(d, between(r, 23, 900))
		}
		s.queue = slices.Insert(s.queue, r.IntN(len(s.queue)+1), d)
	}
	s.at(between(r, 30, 300), s.next)
}

// ends has a turn end.
func (s *sim) ends() {
	s.idle = true
	s.is("done")
	s.paintClaude()
}

// goes has claude go on by itself while nobody works, or a dialog come at once and without a hook.
func (s *sim) goes(interrupted bool) {
	if !s.idle || s.last || s.ending {
		return
	}
	s.idle, s.changedAt = false, time.Now()
	if !interrupted {
		s.next()
		return
	}
	d := s.dialog("claude", s.random("interrupts", s.made))
	d.hooked = false
	s.pointer = 0
	s.stand(d)
	s.paintClaude()
	s.plays("interrupt")
}

// comes tells that a dialog waits and paints it later, in one piece or two.
func (s *sim) comes(d *simDialog, r *rand.Rand) {
	words := "approve " + d.kind
	if d.kind == "bash" {
		words = "approve Bash: " + d.body[0]
	}
	s.print("%s", claudeBlocked(words, s.speaks))
	paint := between(r, 20, 400)
	if oneIn(r, 4) {
		paint = between(r, 400, 2000)
	}
	if !d.hooked {
		paint = between(r, 5, 200)
	}
	s.at(paint, func() {
		if d.over || s.up != nil || s.ending {
			s.next()
			return
		}
		s.pointer = 0
		s.print("%s", claudeBlocked(words, s.speaks)) // it may have gone on with another one meanwhile
		s.stand(d)
		if oneIn(r, 3) {
			rows, _, _ := s.rows()
			s.print("%s", claudePage(rows[:5+len(d.body)], 30, 30, 1))
			s.at(between(r, 20, 250), func() {
				if s.up == d {
					s.changedAt = time.Now()
					s.paintClaude()
				}
			})
		} else {
			s.paintClaude()
		}
		s.plays("claude")
	})
}

// rows are those of claude's screen.
func (s *sim) rows() (rows []string, row, col int) {
	rule := strings.Repeat("─", 100)
	rows = []string{"> go on", "", "● On it", ""}
	d := s.up
	switch {
	case d == nil && s.idle:
		rows = append(rows, rule, "❯\u00a0"+s.box, rule, "  ? for shortcuts")
		return rows, 6, 3 + len(s.box)
	case d == nil:
		return append(rows, "✶ Brewing…", ""), 30, 1
	}
	dialog, at := claudeDialog(d.title, d.body, d.ask, d.choices, s.pointer)
	rows = append(rows, rule)
	return append(rows, dialog...), len(rows) + at + 1, 2
}

// paintClaude paints its whole screen.
func (s *sim) paintClaude() {
	rows, row, col := s.rows()
	s.print("%s", claudePage(rows, 30, row, col))
}

// takesClaude is claude reading bytes.
func (s *sim) takesClaude(text string, p *simPrompt) {
	pasted := strings.HasPrefix(text, "\x1b[200~")
	if d := s.up; d != nil && !d.over && !pasted {
		meaning, pointer := claudeKey(text, d.choices, s.pointer)
		if meaning != "" {
			s.means(d, meaning, p)
			s.goesOn(d)
		} else if pointer != s.pointer {
			s.pointer = pointer
			s.paintClaude()
		}
	}
	if s.up != nil || !s.idle {
		return
	}
	switch {
	case pasted:
		s.pastedAt = append(s.pastedAt, time.Now())
		if s.box != "" {
			s.fault("the text %q is pasted behind the draft %q", text, s.box)
		}
		s.plays("paste")
		s.box += pasteBrackets.Replace(text)
	case strings.HasSuffix(text, "\x15"):
		s.box = ""
	case text == "\r" || text == "\n":
		s.note("tool gets the message %q", s.box)
		s.got[s.box]++
		if said := s.said[s.box]; said > 0 && s.got[s.box] > said {
			s.fault("the message %q came %d times", s.box, s.got[s.box])
		}
		s.box = ""
	case !simOurs(text):
		s.box += strings.Trim(text, "\x03\x06\x1b")
		s.changedAt = time.Now()
	}
	s.paintClaude()
}

// goesOn ends some of the hooks of a dialog that is over, and takes it from the screen.
func (s *sim) goesOn(d *simDialog) {
	r := s.random("goes on", d.n)
	for _, h := range s.hooks {
		if h.d.n == d.n && !h.done && oneIn(r, 2) {
			h.cancel()
		}
	}
	stays := between(r, 0, 400)
	if !d.ours && oneIn(r, 3) { // it is busy: claude 2.1 shows a key after up to 2.2 s
		stays = between(r, 400, 2200)
	}
	s.at(stays, func() {
		if s.up == d {
			s.leave()
			s.is("working")
			s.paintClaude()
		}
		s.at(s.gap(r), s.next)
	})
}

// callHook runs `atlasbridge hook` for a dialog.
func (s *sim) callHook(d *simDialog, delay time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	h := &simHook{d: d, cancel: cancel, dead: &atomic.Bool{}, from: time.Now()}
	s.hooks = append(s.hooks, h)
	n := len(s.hooks)
	r := s.random("hook", n)
	after := between(r, 0, 200)
	ended := &atomic.Bool{}
	if oneIn(r, 7) {
		kill9 := oneIn(r, 2)
		s.at(between(r, 100, 8000), func() {
			if !ended.Load() {
				s.note("hook %d of dialog %d is killed, by SIGKILL %v", n, d.n, kill9)
				h.dead.Store(kill9)
				cancel()
			}
		})
	}
	call := map[string]any{"cwd": "/srv/app", "tool_name": "Bash", "tool_input": map[string]string{"command": d.full}}
	if d.kind == "edit" {
		call["tool_name"] = "Edit"
		call["tool_input"] = map[string]string{
			"file_path":  "/srv/app/" + d.body[0],
			"old_string": d.body[1],
			"new_string": d.body[2],
		}
	}
	if oneIn(r, 2) {
		call["permission_suggestions"] = []any{map[string]string{"type": "setMode", "mode": "acceptEdits", "destination": "session"}}
	}
	go func() {
		time.Sleep(delay)
		text := s.runHook(ctx, hookInput("PermissionRequest", call), h, n)
		ended.Store(true)
		time.Sleep(after) // until claude takes what it printed
		s.mu.Lock()
		defer s.mu.Unlock()
		h.done, h.to = true, time.Now()
		s.hookSaid(h, n, text)
	}()
}

// runHook is what a hook prints.
func (s *sim) runHook(ctx context.Context, input []byte, h *simHook, n int) (text []byte) {
	name := fmt.Sprint(s.dir, "-hook-", n)
	wrote := os.WriteFile(name, input, 0o600)
	in, opened := os.Open(name)
	out, created := os.Create(name + "-says")
	if err := errors.Join(wrote, opened, created); err != nil {
		s.fault("%v", err)
		return nil
	}
	defer in.Close()
	defer out.Close()
	s.note("hook %d of dialog %d is called", n, h.d.n)
	s.world(ctx, nil, h.dead, in, out).run([]string{"hook"})
	text, _ = os.ReadFile(out.Name()) // what cannot be read says nothing
	return text
}

// askedBy is the question of a hook that said so with that reason, the latest where its twin asked, too: then the tool
// takes one answer for both.
func (s *sim) askedBy(h *simHook, meaning, reason string) (found *simPrompt) {
	for _, p := range s.questions() {
		gave := strings.HasPrefix(reason, "say-")
		said := p.Source == "hook" && strings.Contains(p.Full, h.d.name) && p.Value != nil && *p.Value == meaning &&
			!p.CreatedAt.Before(h.from) && (!gave || p.Reason == reason || strings.Contains(p.Reason, "same moment"))
		if said && found != nil {
			found.outrun, p.outrun = true, true
		}
		if said && (found == nil || found.DecidedAt.Before(*p.DecidedAt)) {
			found = p
		}
	}
	return found
}

// hookSaid is claude taking what a hook printed.
func (s *sim) hookSaid(h *simHook, n int, text []byte) {
	d := h.d
	var got struct {
		Behavior           string
		Message            string
		UpdatedPermissions []json.RawMessage
	}
	if err := json.Unmarshal([]byte(decisionOf(string(text))), &got); err != nil {
		s.note("hook %d of dialog %d says nothing", n, d.n)
		return
	}
	meaning := got.Behavior
	if len(got.UpdatedPermissions) > 0 {
		meaning = "always"
	}
	p := s.askedBy(h, meaning, got.Message)
	if p == nil {
		s.fault("the hook said %q, and no question was decided so", meaning)
		return
	}
	if h.dead.Load() { // claude does not care for it, and nobody is told that
		p.dropped = true
		return
	}
	s.note("hook %d of dialog %d says %s, too late %v", n, d.n, meaning, d.over)
	if now := s.up; now != nil && now.n == d.n {
		d = now
	}
	if d.over {
		soon := p.DecidedAt.Sub(d.overAt) < 6*time.Second ||
			d.overAt.Sub(d.shownAt) < 2*time.Second
		refused := p.By == "auto:timeout" // by time: nobody was told that it counts
		p.outrun = soon || refused || slices.ContainsFunc(s.hooks, func(twin *simHook) bool {
			return twin != h && twin.d.n == d.n
		})
		return
	}
	d.over = true
	d.ours = true
	d.overAt = time.Now()
	p.took = append(p.took, meaning)
	if p.byPhone() {
		s.wasChosen(p, s.meaningOf(p))
		needs := append(strings.Fields(d.full), d.body[1:]...)
		if need := simUnshown(s.seenOf(p), needs); need != "" && meaning != "deny" {
			s.fault("the hook said %q, but %q was never shown:\n%s", meaning, need, s.seenOf(p))
		}
	} else if meaning != "deny" {
		s.fault("the hook said %q, and nobody decided it: %v", meaning, p.By)
	}
	s.goesOn(d)
	if s.up == nil {
		s.changedAt = time.Now()
	}
}

// ---- simulation: the way to the Bot API, and the person with the phone ----
// A network that loses and delays, and somebody who reads and taps.

// simPhone is the Bot API, the way to it, and who reads it.
type simPhone struct {
	bot     *botAPI
	rough   bool
	busy    bool // the disk
	present int  // of ten messages, how many are answered
	swift   bool // the person answers within a second
	outage  [2]time.Time
	again   []byte // the last updates, to come again
	msgs    map[int64]*simMessage
	known   map[int64]bool // messages whose sender has been told their ids
	doubted map[int64]bool // the sender cannot know what they say: an edit may come again; guarded by bot.mu
	said    map[string]int // texts that were written, how often
	written int
	chosen  []simChoice
}

// simMessage is a message and all that it ever said.
type simMessage struct {
	id     int64
	seen   []seen
	prompt string // first 8 digits of the prompt's id
	forged bool   // another question's button was tapped there: it may be taken for one of that
}

// simChoice is something the person did to answer.
type simChoice struct {
	at     time.Time
	prompt string
	label  string
	data   string
	text   string // of a reply
	plain  bool   // it was no reply
}

// RoundTrip is the way to the Bot API and back: it delays, and loses requests and answers; some updates come twice.
func (s *sim) RoundTrip(req *http.Request) (*http.Response, error) {
	method := path.Base(req.URL.Path)
	r := s.random(method, s.now())
	there, back := between(r, 3, 120), between(r, 3, 120)
	lost := 99
	if s.rough && !s.over.Load() {
		lost = r.IntN(100)
		if oneIn(r, 12) {
			there = between(r, 1000, 4000)
		}
		if now := time.Now(); now.After(s.outage[0]) && now.Before(s.outage[1]) {
			lost = 0
		}
	}
	if err := waits(req.Context(), there); err != nil {
		return nil, err
	}
	if there > 900*time.Millisecond { // it has set out before a 429 was told
		s.bot.change(func() { s.bot.quiet = [2]time.Time{} })
	}
	asked, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	var of struct {
		ID     int64 `json:"message_id"`
		Result struct {
			ID int64 `json:"message_id"`
		}
	}
	_ = json.Unmarshal(asked, &of) // what is about no message has none
	fails := func(err error) (*http.Response, error) {
		s.note("network: %s: %v", method, err)
		s.bot.change(func() {
			s.doubted[cmp.Or(of.Result.ID, of.ID)] = true
			s.bot.quiet = [2]time.Time{} // what a 429 wanted may not be known
		})
		return nil, err
	}
	if lost < 5 {
		return fails(io.ErrUnexpectedEOF)
	}
	req.Body = io.NopCloser(bytes.NewReader(asked))
	answer, err := s.bot.RoundTrip(req)
	if err != nil {
		return fails(err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, err
	}
	if method == "getUpdates" && s.again != nil && oneIn(r, 8) {
		body, s.again = s.again, nil
	} else if bytes.Contains(body, []byte("update_id")) {
		s.again = body
	}
	_ = json.Unmarshal(body, &of) // what has no such result has no message
	if err := waits(req.Context(), back); err != nil || lost < 10 {
		return fails(cmp.Or(err, io.ErrUnexpectedEOF))
	}
	s.mu.Lock()
	s.known[of.Result.ID] = true
	s.mu.Unlock()
	answer.Body = io.NopCloser(bytes.NewReader(body))
	return answer, nil
}

// waits returns after d, or with the error of ctx when that ends first.
func waits(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fate is what becomes of a request that arrives.
func (s *sim) fate(method string, p map[string]any) (todo fate) {
	r := s.random("fate"+method, s.now())
	n, later := r.IntN(100), between(r, 500, 15000)
	id := numberOf(p, "message_id")
	s.bot.unsure[id] = s.bot.unsure[id] || s.doubted[id]
	if !s.rough || s.over.Load() {
		return todo
	}
	s.doubted[id] = s.doubted[id] || n < 10
	switch {
	case n < 3:
		late := make(chan struct{})
		time.AfterFunc(later, func() { close(late) })
		todo.late = late
		s.note("network: %s %d will come %v later", method, id, later.Round(time.Millisecond))
	case n < 7:
		s.note("network: 429 for %s", method)
		todo.answer = fmt.Sprintf(`{"ok":false,"error_code":429,"description":"Too Many Requests","parameters":{"retry_after":%d}}`,
			1+r.IntN(3))
	case n < 10:
		todo.answer = `{"ok":false,"error_code":502,"description":"Bad Gateway"}`
	}
	return todo
}

// watch shows the person what a message becomes, until done.
func (s *sim) watch(done <-chan struct{}) {
	for n := 0; ; {
		s.bot.mu.Lock()
		fresh, changed := slices.Clone(s.bot.past[n:]), s.bot.changed
		s.bot.mu.Unlock()
		n += len(fresh)
		s.mu.Lock()
		for _, m := range fresh {
			s.becomes(m)
		}
		s.mu.Unlock()
		select {
		case <-changed:
		case <-done:
			return
		}
	}
}

// becomes gives a message a new text, and the person something to do.
func (s *sim) becomes(now seen) {
	m := s.msgs[now.id]
	if m == nil {
		m = &simMessage{id: now.id}
		s.msgs[now.id] = m
	}
	m.seen = append(m.seen, now)
	labels := slices.Sorted(maps.Keys(now.buttons))
	for _, label := range labels {
		f := strings.SplitN(now.buttons[label], ":", 5)
		if len(f) < 5 || m.prompt != "" && m.prompt != f[1] {
			s.fault("message %d of question %q has the button %q", m.id, m.prompt, now.buttons[label])
			continue
		}
		m.prompt = f[1]
	}
	s.note("phone: message %d, %s: %q %q", m.id, now.method, now.text, labels)
	r := s.random("reads", s.now())
	switch {
	case s.ending || r.IntN(10) >= s.present:
	case len(labels) > 0 && s.up != nil:
		s.reacts(m)
	case len(labels) == 0 && s.claude && s.idle:
		s.playsAt("idle", 0, m)
	}
}

// words are a text that nobody has written yet.
func (s *sim) words() string {
	s.written++
	return fmt.Sprintf("say-%d", s.written)
}

// reacts is the person who reads a message with buttons.
func (s *sim) reacts(m *simMessage) {
	r := s.random("reacts", s.now())
	when := between(r, 150, 4000)
	switch {
	case s.swift:
		when = between(r, 150, 900)
	case oneIn(r, 5):
		when = between(r, 4000, 25000)
	case oneIn(r, 6): // in the moment in which its time is over
		for _, p := range s.questions() {
			if p.ID[:8] == m.prompt {
				when = max(0, time.Until(p.ExpiresAt)-between(r, 0, 160))
			}
		}
	}
	s.playsAt(oneOf(r, "replies", "reads", "reads", "reads", "reads", "reads", "reads", "reads"), when, m)
}

// plays is playsAt of no message, from now on.
func (s *sim) plays(on string) { s.playsAt(on, 0, nil) }

// playsAt has the person and the tool do what testdata/simmoves.txt says for an occasion, of this message or of what stands.
func (s *sim) playsAt(on string, when time.Duration, m *simMessage) {
	r := s.random(on, s.now())
	var labels []string
	if m != nil && on == "reads" {
		labels = slices.Sorted(maps.Keys(m.seen[len(m.seen)-1].buttons))
		r.Shuffle(len(labels), func(i, k int) { labels[i], labels[k] = labels[k], labels[i] })
	}
	n := s.made
	if s.up != nil {
		n = s.up.n
	}
	does := func(move string) {
		switch move {
		case "tap":
			s.taps(m, labels[0])
		case "tap another":
			s.taps(m, labels[len(labels)-1])
		case "show all", "forge at a part":
			switch partly := slices.Contains(labels, "Show all"); {
			case partly && move == "show all":
				s.taps(m, "Show all")
			case partly:
				s.forges(m, r)
			}
		case "forge":
			s.forges(m, r)
		case "write":
			if d := s.up; d != nil && len(d.texts) > 0 {
				text := oneOf(r, d.texts...)
				writes := func() { // who sees that it is still open
					if len(m.seen[len(m.seen)-1].buttons) > 0 {
						s.sends(simChoice{text: text, plain: true}, text, 0)
					}
				}
				writes()
				s.at(between(r, 0, 4000), writes)
			}
		case "say":
			words := s.words()
			s.sends(simChoice{prompt: m.prompt, text: words}, words, m.id)
		case "send":
			if s.present > 0 {
				words := s.words()
				s.sends(simChoice{text: words}, "/send "+s.id[:8]+" "+words, 0)
			}
		case "keys":
			s.sends(simChoice{text: "CTRL_F"}, "/keys CTRL_F", 0)
		case "mistype": // a key that answers nothing, each time another one
			s.press("FGHIJLMPSTUVWZ"[len(s.pressed)%14:][:1])
		case "slip":
			s.press(oneOf(r, "X", "\x1bOB", "Q", "\x03"))
		case "press":
			keys := []string{"\n"}
			if s.up != nil {
				keys = s.up.keys
			}
			s.press(oneOf(r, keys...))
		case "change":
			s.acts(n, r)
		case "vanish":
			s.vanish(n, r)
		case "work", "interrupt":
			s.goes(move == "interrupt")
		default:
			s.fault("nobody can %q", move)
		}
	}
	for _, one := range s.moves {
		if !slices.Contains(strings.Fields(one["on"]), on) {
			continue
		}
		var often, from, to int
		if _, err := fmt.Sscanf(one["when"], "one in %d, %d to %d ms", &often, &from, &to); err != nil {
			s.fault("%s: %v", one["at"], err)
		} else if oneIn(r, often) {
			s.at(max(0, when+between(r, from, to)), func() { does(one["does"]) })
		}
	}
}

// acted notes that the person did something.
func (s *sim) acted(c simChoice, format string, args ...any) bool {
	if s.ending {
		return false
	}
	s.note("person "+format, args...)
	if s.up != nil {
		s.up.touched = true
	}
	c.at = time.Now()
	s.chosen = append(s.chosen, c)
	return true
}

// taps presses a button, whether it is still there or not.
func (s *sim) taps(m *simMessage, label string) {
	data := ""
	for _, before := range m.seen {
		data = cmp.Or(before.buttons[label], data)
	}
	if s.acted(simChoice{prompt: m.prompt, label: label, data: data}, "taps %q of message %d", label, m.id) {
		s.arrives(func() { s.tapped(m.id, data) })
	}
}

// tapped has a tap arrive. One of a button that is gone says that it is not, and one that
// shows more has the message replaced, maybe as its question ends: then the edit may come again.
func (s *sim) tapped(id int64, data string) {
	s.bot.change(func() {
		shown := slices.Collect(maps.Values(s.bot.messages[id].buttons))
		s.doubted[id] = s.doubted[id] || s.rough || strings.Contains(data, ":~") || !slices.Contains(shown, data)
	})
	s.bot.tapped(id, data)
}

// forges taps what was never below a message: with another nonce, a part cut off, another's data, what could be affirmed.
func (s *sim) forges(m *simMessage, r *rand.Rand) {
	labels := slices.Sorted(maps.Keys(m.seen[0].buttons))
	if s.ending || len(labels) == 0 {
		return
	}
	data := m.seen[0].buttons[labels[0]]
	f := strings.SplitN(data, ":", 5)
	at, whole, label := []int64{m.id}, strings.Join(f[:4], ":")+":", "forged"
	switch kind := r.IntN(5); {
	case kind < 3 || m.seen[0].buttons["Show all"] != "": // of a message that may not show all
		f[3] = oneOf(r, f[3], f[3], "", "0123456789abcdef")
		f[4] = oneOf(r, "y", "1", "2", "n", "allow", "always")
		data = strings.Join(f, ":")
	case kind == 3:
		data = data[:r.IntN(len(data))]
	default: // another's data at this message, and this one's at another
		at, label = nil, labels[0]
		for _, id := range slices.Sorted(maps.Keys(s.msgs)) {
			if other := s.msgs[id]; id < m.id && other.prompt != "" {
				other.forged = true
				at = append(at, id)
			}
		}
	}
	s.note("person forges a tap of the messages %v: %q", at, data)
	if strings.HasPrefix(data, whole) { // with the nonce it counts
		s.chosen = append(s.chosen, simChoice{at: time.Now(), prompt: m.prompt, label: label, data: data})
	}
	for _, id := range at {
		s.arrives(func() { s.tapped(id, data) })
	}
}

// sends is a text of the person's, a reply where to is not 0.
func (s *sim) sends(c simChoice, text string, to int64) {
	if s.acted(c, "writes %q to message %d", text, to) {
		if !c.plain {
			s.said[c.text]++
		}
		n := len(s.chosen) - 1
		s.arrives(func() {
			s.chosen[n].at = time.Now() // when Telegram says that it was written
			s.bot.writes(text, to)
		})
	}
}

// arrives has an update reach the server, which may take a while.
func (s *sim) arrives(update func()) {
	r := s.random("update", s.now())
	delay := between(r, 5, 150)
	if s.rough && oneIn(r, 5) {
		delay = between(r, 150, 5000)
	}
	s.at(delay, update)
}

// seenOf is all that the phone has shown of a question, up to its decision, with what has no buttons: "Show all" sends it.
func (s *sim) seenOf(p *simPrompt) string {
	var b strings.Builder
	for _, m := range s.msgs {
		for _, t := range m.seen {
			if (m.prompt == p.ID[:8] || m.prompt == "") && (p.DecidedAt == nil || !t.at.After(*p.DecidedAt)) {
				fmt.Fprintln(&b, t.text, t.buttons)
			}
		}
	}
	return b.String()
}

// wasChosen checks that the person chose that, for this question, with this button or in words.
func (s *sim) wasChosen(p *simPrompt, meaning string) {
	for _, c := range s.chosen {
		if c.plain {
			asked := slices.ContainsFunc(slices.Collect(maps.Values(s.msgs)), func(m *simMessage) bool {
				return m.prompt == p.ID[:8] && c.at.Sub(m.seen[0].at) > time.Second // Telegram counts seconds
			})
			if asked && p.Value != nil && *p.Value == c.text {
				return
			}
			continue
		}
		if c.prompt != p.ID[:8] && (c.prompt != "" || c.at.Before(p.CreatedAt.Add(-time.Second))) { // Telegram counts seconds
			continue
		}
		label := strings.TrimLeft(c.label, "✓▫️ 0123456789")
		switch {
		case label == meaning, label == clip(meaning, 60),
			meaning == "Enter" && (label == "Press Enter" || label == "Send Enter"),
			meaning == "Esc" && strings.Contains(label, "Esc"),
			label == "forged", // with what was shown: what it affirms must have been, too
			c.text != "" && (meaning == "text:"+c.text ||
				p.Permission && (strings.HasPrefix(meaning, "No") || meaning == "Esc")):
			return
		}
	}
	s.fault("%q was decided for %q, but nobody chose that: %+v", meaning, p.Question, s.chosen)
}

// ---- simulation: the verdict ----
// What must hold at the end, whatever happened.

// ended reports whether all that is to become of the question has.
func (p *simPrompt) ended() bool {
	return !slices.Contains([]string{"created", "routed", "awaiting_reply", "reply_received", "injected"}, p.Status)
}

// refuses reports whether the value is an answer that refuses.
func (p *simPrompt) refuses() bool {
	if p.Value == nil {
		return false
	}
	for _, c := range p.choices() {
		if c.Key == *p.Value && (c.Label == "No" || strings.HasPrefix(c.Label, "No,")) {
			return true
		}
	}
	return slices.Contains([]string{"\x1b", "esc", "cancel", "deny"}, *p.Value)
}

// byPhone reports whether it was decided there.
func (p *simPrompt) byPhone() bool { return strings.HasPrefix(p.By, "telegram:") }

// choices are the answers that it names; the others have keys, or leave it.
func (p *simPrompt) choices() []simAnswer {
	return slices.DeleteFunc(slices.Clone(p.Answers), func(a simAnswer) bool { return a.Keys != "" || a.Key == "\x1b" })
}

// judgeAll holds the end of the scenario against what was promised.
func (s *sim) judgeAll() {
	s.questions()
	for _, broken := range s.bot.verdict() {
		if s.rough && strings.Contains(broken, "refused twice") { // "Show all" was tapped so often
			continue
		}
		s.fault("the Bot API was told what it must not be: %s", broken)
	}
	for _, p := range s.prompts {
		if !p.ended() {
			s.fault("the question %q is left %s", p.Question, p.Status)
		}
		if len(p.took) > 0 && p.Status != "resolved" {
			s.fault("the tool took %q, the record of %q says %s (%s)", p.took, p.Question, p.Status, p.Reason)
		}
		for _, m := range s.msgs {
			if m.prompt == p.ID[:8] {
				s.judgeMessage(m, p)
			}
		}
	}
	s.judgeLimits()
	s.judgeRepeats()
	s.judgeKeys()
	if !s.rough {
		s.judgeStands()
	}
}

// judgeLimits checks that the phone decides ten times a minute at most, and nothing whose time is over.
func (s *sim) judgeLimits() {
	var times []time.Time
	for _, p := range s.prompts {
		if p.DecidedAt != nil && p.Value != nil && p.byPhone() {
			times = append(times, *p.DecidedAt)
			if !p.DecidedAt.Before(p.ExpiresAt) {
				s.fault("%q was decided at %v, %v after its time", p.Question, p.DecidedAt.Sub(s.start), p.DecidedAt.Sub(p.ExpiresAt))
			}
		}
	}
	slices.SortFunc(times, time.Time.Compare)
	for i := 10; i < len(times); i++ {
		if times[i].Sub(times[i-10]) < time.Minute {
			s.fault("the phone has decided eleven times within %v", times[i].Sub(times[i-10]))
		}
	}
}

// judgeRepeats checks that what expired, or was left to the terminal, is not asked again by itself.
func (s *sim) judgeRepeats() {
	for _, p := range s.prompts {
		if p.Value != nil || p.DecidedAt == nil || p.Source != "screen" {
			continue
		}
		again := slices.ContainsFunc(s.chosen, func(c simChoice) bool {
			return c.prompt == p.ID[:8] && strings.HasSuffix(c.data, ":~again")
		})
		waited := p.By == "auto:timeout" ||
			strings.HasPrefix(p.Reason, "left as it is")
		for _, q := range s.prompts {
			after := q.CreatedAt.Sub(*p.DecidedAt)
			if waited && !again && q != p && q.Shown == p.Shown && after >= 0 &&
				after < 20*time.Millisecond {
				s.fault("%q was over and is asked again by itself", p.Question)
			}
		}
	}
}

// judgeAccount checks that a message had a Yes only when all of what stood had been shown.
func (s *sim) judgeAccount(m *simMessage, p *simPrompt) {
	settles := 100 * time.Millisecond // a question, before it is asked
	lag := 250 * time.Millisecond     // of who reads the terminal
	if s.claude {
		lag += 2 * time.Second // in which its hook may call
	}
	var stood []simStand
	for _, one := range s.stands {
		switch after := p.CreatedAt.Sub(one.to); {
		case after > -time.Microsecond && after < lag: // records have microseconds
			return // what came of it may not have been seen, or half of it
		case after <= 0 && p.CreatedAt.Sub(one.from) > settles: // what was asked sooner stood there before
			stood = append(stood, one)
		}
	}
	if len(stood) == 0 || p.Source != "screen" || p.Idle || p.Type == "unknown" {
		return
	}
	shown := ""
	for _, t := range m.seen {
		yes := false
		shown += fmt.Sprintln(t.text, t.buttons)
		for label := range t.buttons {
			yes = yes || strings.HasPrefix(strings.TrimLeft(label, "✓▫️ 0123456789."), "Yes")
		}
		if !yes {
			continue
		}
		if !slices.ContainsFunc(stood, func(one simStand) bool { return simUnshown(shown, one.needs()) == "" }) {
			d := stood[len(stood)-1]
			s.fault("message %d has a Yes and not %q of %v:\n%s", m.id, simUnshown(shown, d.needs()), d, shown)
			return
		}
	}
}

// judgeMessage checks that a message tells the truth at last.
func (s *sim) judgeMessage(m *simMessage, p *simPrompt) {
	last := m.seen[len(m.seen)-1]
	s.judgeAccount(m, p)
	if !s.known[m.id] || m.forged || p.owes(m.id) {
		return
	}
	if len(last.buttons) > 0 {
		s.fault("message %d of %q (%s) still has buttons", m.id, p.Question, p.Status)
	}
	if own, _ := p.newest(); m.id != own || p.Idle {
		return
	}
	says := ""
	for line := range strings.SplitSeq(last.text, "\n") {
		if strings.HasSuffix(line, "]") {
			says = line
		}
	}
	left := strings.HasPrefix(says, "left as it is")
	byKeys := strings.HasPrefix(says, "answered · phone, ") // of /keys
	byUs := !left && !byKeys && (strings.Contains(says, " · phone, ") || strings.Contains(says, " · nobody answered, "))
	switch {
	case says == "":
		s.fault("message %d of %q says nothing of its end: %s", m.id, p.Question, last.text)
	case p.Type == "unknown" && strings.HasPrefix(says, "Esc · "): // who reads a line does not care for that key
	case byUs && len(p.took) == 0 && !p.dropped && !p.outrun:
		s.fault("message %d says %q, but the tool took nothing", m.id, says)
	case !byUs && len(p.took) > 0 && !strings.Contains(says, "in the same moment"):
		s.fault("message %d says %q, but the tool took %q", m.id, says, p.took)
	}
}

// judgeStands checks that what stood was asked.
func (s *sim) judgeStands() {
	const enough = 5 * time.Second
	for _, one := range s.stands {
		d := one.simDialog
		long := one.to.Sub(one.from) - s.away
		asked := func(h *simHook) bool {
			return h.from.Before(one.to) && (h.to.IsZero() || h.to.After(one.from))
		}
		lately := func(at time.Time) bool {
			return at.After(one.from.Add(-time.Minute)) && at.Before(one.to)
		}
		many, stood := 0, 0 // questions in the minute before: that are recorded; that may have been seen
		for _, p := range s.prompts {
			if lately(p.CreatedAt) {
				many++
			}
			if lately(p.CreatedAt) && p.Idle {
				stood++
			}
		}
		for _, other := range s.stands {
			if other != one && lately(other.from) {
				stood++
			}
		}
		waits := stood >= 6 && long < enough+time.Minute
		if d.touched || long < enough || d.hooked || many >= 6 || waits || s.blind && d.kind == "menu" ||
			slices.ContainsFunc(s.hooks, asked) {
			continue
		}
		n := 0
		for _, p := range s.prompts {
			if len(p.Messages) > 0 && strings.Contains(p.Shown, strings.TrimSpace(d.ask)) &&
				simUnshown(p.Shown, d.body[:min(1, len(d.body))]) == "" {
				n++
			}
		}
		if n == 0 {
			s.fault("%v stood for %v and was never asked", d, long)
		}
	}
}

// ---- bench: the actor ----
// A stand-in for claude: its terminal, hooks and dialogs as measured.

// play is what claude is to ask.
type play struct {
	Asks     []ask
	Together bool   // all hooks are called at once
	Order    []int  // of the dialogs; nil: of the hooks
	Said     string // its answer when the turn ends, "" a short one
	Mute     bool   // it does not say what it does (OSC 7501)
}

// ask is a command that claude wants to run, and how its dialog comes.
type ask struct {
	Command  string
	Paint    int  // ms from the hook's call to the dialog; -1: there is none, as with -p
	Halves   bool // it is painted in two steps, 150 ms apart
	Withheld bool // it is painted without the command, as claude 2.1.332 does with a long one
}

// actor is the stand-in for claude. One goroutine owns all of it and takes what happened from a
// channel.
type actor struct {
	*wire
	play     play
	hooks    map[string][]string // commands by event
	asked    []bool              // the hooks were called
	decided  []bool
	running  map[int]*exec.Cmd // permission hooks
	mute     bool              // it does not ask whether the terminal knows OSC 7501
	speaks   bool              // the terminal knows it
	up       int               // the dialog that stands, -1 none
	coming   int               // the one that will be painted, -1 none
	pointer  int
	paintAt  time.Time
	idle     bool
	box      string // what stands in the input box
	blink    bool
	happened chan func() // for the one goroutine that owns all this
}

// newActor has nothing to do yet.
func newActor(l *wire) *actor {
	return &actor{
		wire:     l,
		hooks:    map[string][]string{},
		running:  map[int]*exec.Cmd{},
		up:       -1,
		coming:   -1,
		happened: make(chan func(), 100),
	}
}

// act never returns: the tool ends with its terminal or with the test.
func (a *actor) act() {
	a.readSettings(os.Args[1:])
	stty("raw", "-echo")
	go a.readKeys()
	go a.readOrders()
	fmt.Print("\x1b[?2004h\x1b]0;✳ Claude Code\a\x1b[?1049h\x1b[2J\x1b[H\x1b[?25l")
	if !a.mute {
		fmt.Print("\x1b]7501;?\a")
	}
	for tick := time.NewTicker(600 * time.Millisecond); ; {
		select {
		case f := <-a.happened:
			f()
		case <-tick.C:
			a.blink = !a.blink
			if a.up >= 0 && time.Since(a.paintAt) > time.Second {
				mark := " "
				if a.blink {
					mark = "●"
				}
				fmt.Print("\x1b[H\x1b[2B\r" + mark + "\x1b[24;1H")
			}
		}
	}
}

// readSettings takes the hooks from the last --settings.
func (a *actor) readSettings(args []string) {
	var settings struct {
		Hooks map[string][]struct{ Hooks []struct{ Command string } }
	}
	args = strings.Split(strings.ReplaceAll(strings.Join(args, "\x00"), "--settings=", "--settings\x00"), "\x00")
	for i, arg := range args[1:] {
		if args[i] == "--settings" {
			if err := json.Unmarshal([]byte(arg), &settings); err != nil {
				a.tell(report{What: "settings", Text: err.Error()})
			}
		}
	}
	for event, groups := range settings.Hooks {
		for _, group := range groups {
			for _, hook := range group.Hooks {
				a.hooks[event] = append(a.hooks[event], hook.Command)
			}
		}
	}
}

// readKeys hands over what comes from the terminal, until its end.
func (a *actor) readKeys() {
	buf := make([]byte, 4096)
	for {
		n, err := os.Stdin.Read(buf)
		if err != nil {
			os.Exit(0)
		}
		chunk := string(buf[:n])
		a.happened <- func() { a.keys(chunk) }
	}
}

// readOrders hands over what the test wants, until its end.
func (a *actor) readOrders() {
	for {
		var o order
		if err := a.orders.Decode(&o); err != nil || o.Exit {
			os.Exit(0)
		}
		a.happened <- func() {
			if o.Play != nil {
				a.play = *o.Play
				a.asked = make([]bool, len(a.play.Asks))
				a.decided = make([]bool, len(a.play.Asks))
				a.paintBox()
				a.later(150*time.Millisecond, a.work)
			}
			for _, cmd := range a.running {
				if o.Signal != "" {
					a.signal(cmd, o.Signal)
				}
			}
			a.tell(report{What: "obeyed", Seq: o.Seq})
		}
	}
}

// signal reaches the hook's whole process group.
func (a *actor) signal(cmd *exec.Cmd, name string) {
	kill := fmt.Sprintf("kill -%s -%d", name, cmd.Process.Pid)
	if out, err := exec.Command("sh", "-c", kill).CombinedOutput(); err != nil {
		a.tell(report{What: "signal", Text: string(out)})
	}
}

// later does something after a time.
func (a *actor) later(d time.Duration, f func()) {
	time.AfterFunc(d, func() { a.happened <- f })
}

// is tells the terminal what is done, where it wants to know.
func (a *actor) is(state string) { fmt.Print(claudeIs(state, "", a.speaks)) }

// work goes on with what is not asked yet, or shows the next dialog, or ends the turn.
func (a *actor) work() {
	if a.up >= 0 || a.coming >= 0 {
		return
	}
	waiting := slices.IndexFunc(a.asked, func(asked bool) bool { return !asked })
	next := a.nextDialog()
	switch {
	case next >= 0 && a.play.Asks[next].Paint >= 0:
		a.comes(next)
	case next >= 0: // there is no dialog: the hook alone decides
	case waiting >= 0:
		a.is("working")
		a.paint("✶ Brewing…")
		now := []int{waiting}
		for i := waiting + 1; a.play.Together && i < len(a.asked); i++ {
			now = append(now, i)
		}
		for _, i := range now {
			a.asked[i] = true
		}
		go func() {
			for _, i := range now {
				a.runHooks(i, "PreToolUse", nil)
			}
			a.happened <- func() { a.request(now) }
		}()
	case !a.idle && !slices.Contains(a.decided, false):
		a.idle = true
		go func() {
			a.runHooks(0, "Stop", nil)
			a.happened <- func() {
				a.is("done")
				a.paintBox()
				a.tell(report{What: "done", Dialog: -1})
			}
		}()
	}
}

// nextDialog is the first in order that was asked and is not decided, -1 none.
func (a *actor) nextDialog() int {
	for n := range a.play.Asks {
		i := n
		if a.play.Order != nil {
			i = a.play.Order[n]
		}
		if a.asked[i] && !a.decided[i] {
			return i
		}
	}
	return -1
}

// request calls the permission hooks of these.
func (a *actor) request(asks []int) {
	for _, i := range asks {
		ready := make(chan struct{})
		go a.runHooks(i, "PermissionRequest", ready)
		<-ready
		for begun := time.Now(); a.play.Together && a.hooksAsk() <= i && time.Since(begun) < 5*time.Second; {
			<-time.After(5 * time.Millisecond) // so that they ask in this order
		}
	}
	a.work()
}

// hooksAsk is how many hooks have asked.
func (a *actor) hooksAsk() int {
	state, _ := os.ReadFile(filepath.Join(os.Getenv("ATLASBRIDGE_HOME"), "state.jsonl")) // not there: none
	return strings.Count(string(state), `"status":"created"`)
}

// comes tells that this dialog waits, and paints it when its time has come.
func (a *actor) comes(i int) {
	a.coming = i
	words := "approve Bash: " + a.play.Asks[i].Command
	if a.play.Asks[i].Withheld {
		words = "permission prompt"
	}
	fmt.Print(claudeBlocked(words, a.speaks))
	a.later(time.Duration(a.play.Asks[i].Paint)*time.Millisecond, func() {
		a.coming = -1
		if a.decided[i] {
			a.work()
			return
		}
		a.up = i
		a.pointer = 0
		a.paintAt = time.Now()
		if a.play.Asks[i].Halves {
			a.paintDialog(true)
			a.later(150*time.Millisecond, func() {
				if a.up == i {
					a.paintDialog(false)
				}
			})
		} else {
			a.paintDialog(false)
		}
		a.tell(report{What: "paint", Dialog: i})
	})
}

// paint shows rows from the top, with the cursor in the last one.
func (a *actor) paint(rows ...string) { fmt.Print(claudePage(rows, 24, 24, 1)) }

// paintBox paints the input box with what stands in it.
func (a *actor) paintBox() {
	rule := strings.Repeat("─", 80)
	a.paint("● Hello", "", rule, "❯\u00a0"+a.box, rule, "  ? for shortcuts")
	fmt.Printf("\x1b[4;%dH", 3+len(a.box))
	if !a.idle {
		a.is("idle")
	}
}

// paintDialog paints the dialog that stands, or its upper half.
func (a *actor) paintDialog(half bool) {
	command := a.play.Asks[a.up].Command
	rows := []string{"> go on", "", "● Bash(" + command + ")", "  ⎿  Running…", "", strings.Repeat("─", 80)}
	body := []string{command, "Do it"}
	if a.play.Asks[a.up].Withheld {
		body = []string{"Do it", "(value cannot be shown in full — approval withheld; one-time options only)"}
	}
	dialog, _ := claudeDialog("Bash command", body, "Do you want to proceed?", dialogOptions, a.pointer)
	if half {
		dialog = dialog[:5]
	}
	a.paint(append(rows, dialog...)...)
}

// claudeDialog are the rows of a dialog below its rule, and which of them the pointer stands in.
func claudeDialog(title string, body []string, ask string, choices []string, pointer int) (rows []string, at int) {
	rows = []string{" " + title, ""}
	for _, row := range body {
		rows = append(rows, "   "+row)
	}
	rows = append(rows, "", " "+ask)
	for i, choice := range choices {
		rows = append(rows, " "+pointed(i == pointer, "%d. %s", i+1, choice))
	}
	return append(rows, "", " Esc to cancel · Tab to amend"), len(rows) - len(choices) + pointer
}

// pointed is a row of a menu.
func pointed(here bool, format string, args ...any) string {
	if here {
		return "❯ " + fmt.Sprintf(format, args...)
	}
	return "  " + fmt.Sprintf(format, args...)
}

// claudePage paints a screen of so many rows, and puts the cursor there.
func claudePage(rows []string, height, row, col int) string {
	for len(rows) < height {
		rows = append(rows, "")
	}
	return fmt.Sprintf("\x1b[H%s\x1b[K\x1b[%d;%dH", strings.Join(rows[:height], "\x1b[K\r\n"), row, col)
}

// claudeKey is what a dialog does with a key: what is chosen, "" nothing, and where the pointer is then.
func claudeKey(key string, choices []string, pointer int) (chosen string, now int) {
	switch key {
	case "\x1b", "\x03":
		return "Esc", pointer
	case "\r", "\n":
		return choices[pointer], pointer
	case "\x1b[A", "\x1bOA":
		return "", max(0, pointer-1)
	case "\x1b[B", "\x1bOB":
		return "", min(len(choices)-1, pointer+1)
	}
	for i, choice := range choices {
		if key == string(rune('1'+i)) || key == string(rune('A'+i)) {
			return choice, pointer
		}
	}
	return "", pointer
}

// claudeIs is how claude tells what it does: by its title, and by OSC 7501 where the terminal knows that.
func claudeIs(state, more string, speaks bool) (output string) {
	output = "\x1b]0;✳ Claude Code\a"
	if state == "working" {
		output = "\x1b]0;◐ Claude Code\a"
	}
	if speaks {
		output += "\x1b]7501;state=" + state + ":app=claude-code" + more + "\a"
	}
	return output
}

// claudeBlocked is what it tells of a dialog.
func claudeBlocked(words string, speaks bool) (output string) {
	return claudeIs("blocked", ":kind=permission:msg="+base64.StdEncoding.EncodeToString([]byte(words)), speaks)
}

// hookInput is what it tells a hook.
func hookInput(event string, more map[string]any) []byte {
	input := map[string]any{
		"session_id":      "5e551011",
		"transcript_path": "",
		"cwd":             "/",
		"prompt_id":       "p",
		"permission_mode": "default",
		"hook_event_name": event,
	}
	maps.Copy(input, more)
	text, _ := json.Marshal(input) // of texts: cannot fail
	return text
}

// keys does what a chunk of input does: as measured, one with more than a key in it is ignored by a dialog.
func (a *actor) keys(chunk string) {
	rest := statusAnswer.ReplaceAllString(chunk, "")
	if rest != chunk {
		a.speaks = true
		a.is("idle")
	}
	if rest == "" {
		return
	}
	a.tell(report{What: "key", Dialog: a.up, Text: rest})
	switch {
	case a.up >= 0:
		chosen, pointer := claudeKey(rest, dialogOptions, a.pointer)
		if chosen != "" {
			a.decide(a.up, "keyboard", chosen)
		} else if pointer != a.pointer {
			a.pointer = pointer
			a.paintDialog(false)
		}
	case a.idle && strings.HasPrefix(rest, "\x1b[200~"):
		a.box += pasteBrackets.Replace(rest)
		a.paintBox()
	case a.idle && rest == "\r":
		a.tell(report{What: "message", Text: a.box})
		a.box = ""
		a.paintBox()
		a.is("working")
		a.later(300*time.Millisecond, func() {
			a.is("done")
		})
	case a.idle && rest >= " ":
		a.box += strings.TrimSuffix(rest, "\r")
		a.paintBox()
		if strings.HasSuffix(rest, "\r") && len(rest) < 64 {
			a.keys("\r")
		}
	}
}

// decide ends a question, once, and goes on a moment later.
func (a *actor) decide(i int, by, text string) {
	if a.decided[i] {
		a.tell(report{What: "late", Dialog: i, By: by, Text: text})
		return
	}
	a.decided[i] = true
	a.tell(report{What: "decided", Dialog: i, By: by, Text: text})
	if a.up == i {
		a.up = -1
		stays := time.Duration(0)
		switch {
		case by == "hook":
			a.is("working")
			stays = 400 * time.Millisecond // to 500 (claude 2.1)
		case text == "Esc" && !a.play.Together: // it ends the turn, and its hook
			a.signal(a.running[i], "TERM")
			a.is("idle")
			stays = 700 * time.Millisecond // 170 (claude 2.1): the session looks once a second whether the hook lives
		default:
			a.is("working")
		}
		a.coming = i // nothing else is painted meanwhile
		a.later(stays, func() {
			a.coming = -1
			a.paint("✶ Brewing…")
			a.work()
		})
	}
	go func() {
		if text == "allow" || strings.HasPrefix(text, "Yes") {
			a.runHooks(i, "PostToolUse", nil)
		}
		a.later(150*time.Millisecond, a.work)
	}()
}

// runHooks calls an event's hooks and waits for them; ready is closed when the first has started, or there is none.
func (a *actor) runHooks(i int, event string, ready chan struct{}) {
	input := map[string]any{}
	if event == "Stop" {
		input["stop_hook_active"], input["last_assistant_message"] = false, cmp.Or(a.play.Said, "That is done.")
	} else {
		command := a.play.Asks[i].Command
		input["tool_name"] = "Bash"
		input["tool_input"] = map[string]string{"command": command, "description": "Do it"}
		if tool, _, other := strings.Cut(command, ": "); other {
			input["tool_name"] = tool
			input["tool_input"] = map[string]string{"about": command}
		}
	}
	if event == "PermissionRequest" {
		input["permission_suggestions"] = []any{}
	} else {
		input["tool_use_id"] = fmt.Sprint("toolu_", i)
	}
	for _, command := range a.hooks[event] {
		out, err := a.runHook(i, command, hookInput(event, input), ready)
		ready = nil
		if event == "PermissionRequest" {
			a.happened <- func() {
				delete(a.running, i)
				a.tell(report{What: "hookend", Dialog: i, Text: out, By: fmt.Sprint(err)})
				var decision struct{ Behavior string }
				if err := json.Unmarshal([]byte(decisionOf(out)), &decision); err == nil { // else the dialog stays
					a.decide(i, "hook", decision.Behavior)
				}
			}
		}
	}
	if ready != nil {
		close(ready)
	}
}

// runHook is one hook as claude runs it: by sh, in a session of its own, without a terminal.
func (a *actor) runHook(i int, command string, input []byte, ready chan struct{}) (string, error) {
	var out bytes.Buffer
	cmd := exec.Command("sh", "-c", command)
	cmd.Env = append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "CLAUDECODE=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if session := reflect.ValueOf(cmd.SysProcAttr).Elem().FieldByName("Setsid"); session.IsValid() {
		session.SetBool(true)
	}
	cmd.Stdin, cmd.Stdout = bytes.NewReader(input), &out
	err := cmd.Start()
	if err == nil && ready != nil {
		a.running[i] = cmd // the owner waits for ready
	}
	if ready != nil {
		close(ready)
	}
	if err != nil {
		return "", err
	}
	err = cmd.Wait()
	return out.String(), err
}

var (
	statusAnswer  = regexp.MustCompile("\x1b\\]7501;\\?(\x1b\\\\|\a)")
	pasteBrackets = strings.NewReplacer("\x1b[200~", "", "\x1b[201~", "")
	dialogOptions = []string{"Yes", "Yes, and always allow access to out/ from this project",
		"Yes, and switch to auto mode", "No"}
)

// claudeSession runs a stand-in for claude under atlasbridge.
func claudeSession(t *testing.T, config string, p play, flags ...string) (*botAPI, *puppet, string, *terminal) {
	t.Helper()
	w := newBotAPI(t)
	mode := "claude"
	if p.Mute {
		mode = "mute"
	}
	c := newPuppet(t, "claude", mode)
	if config == "" {
		config = "away_after_seconds = 0\nnotify_idle = false"
	}
	dir := home(t, w.config(config))
	x := bridge(t, dir, slices.Concat([]string{"run"}, flags, []string{c.tool})...)
	c.order(order{Play: &p})
	return w, c, dir, x
}

// ---- bench: the Bot API ----
// One server that knows what its messages say, remembers all, and misbehaves on command.

// TestBotAPIIsStrict: the stand-in for the Bot API notes each rule that a request breaks, and none where none is broken.
func TestBotAPIIsStrict(t *testing.T) {
	for _, row := range table(t, "botapi.txt") {
		synctest.Test(t, func(t *testing.T) {
			s := bareBotAPI(t)
			s.free = true
			if strings.Contains(row["requests"], `"chat_id":-`) {
				s.chat = -1001
			}
			s.lastID = 101
			s.past = []seen{{id: 101, text: "Go?", buttons: map[string]string{"Yes": "a"}}}
			s.messages[101] = &s.past[0]
			for i, from := range []int{1001, stranger} {
				s.note(fmt.Sprintf(`{"update_id":%d,"callback_query":{"id":"t%[1]d","from":{"id":%d}}}`, 7+i, from))
			}
			s.fate = func(_ string, p map[string]any) (todo fate) {
				if p["text"] == "429" || p["refused"] != nil {
					todo.answer = `{"ok":false,"error_code":429,"parameters":{"retry_after":5}}`
				}
				return todo
			}
			times, steps, more := strings.Cut(row["requests"], "* ")
			if !more {
				times, steps = "1", times
			}
			for range digits(times) {
				s.play(steps)
			}
			if broken := fmt.Sprint(s.verdict()); broken != "[]" && row["broken"] == "" || !strings.Contains(broken, row["broken"]) {
				t.Errorf("%s: %s breaks %q, not %q", row["at"], row["requests"], broken, row["broken"])
			}
		})
	}
}

// play makes requests, one after another; one that ends with "&" is not waited for.
func (s *botAPI) play(steps string) {
	for step := range strings.SplitSeq(steps, ";") {
		method, params, _ := strings.Cut(strings.TrimSpace(step), " ")
		if pause, err := time.ParseDuration(params); err == nil {
			time.Sleep(pause)
			continue
		}
		params, beside := strings.CutSuffix(strings.ReplaceAll(params, "LONG", strings.Repeat("x", 4097)), "&")
		r := httptest.NewRequest("POST", "/bot"+fakeToken+"/"+method, strings.NewReader(params))
		r.Header.Set("Content-Type", "application/json")
		if beside {
			go s.RoundTrip(r)
			continue
		}
		if _, err := s.RoundTrip(r); err != nil {
			s.breaks(method, "%v", err)
		}
	}
}

// botAPI is a Bot API server for one operator, 1001. It knows what its messages say, remembers what they said at any
// time, does to a request what the test wants, and notes every rule of the Bot API that a request breaks.
type botAPI struct {
	*httptest.Server // nil: it is used as an http.RoundTripper, with no network
	t                *testing.T
	chat             int64         // the only one that may be written to; a group is below 0
	pollWait         time.Duration // the longest that a poll waits; 0: as long as it asks
	slack            float64       // messages too many that may come at once: a loaded machine brings them together

	watched                   // what follows is
	calls    []apiCall        // all but getUpdates
	polls    []int64          // offsets asked for
	waiting  int              // polls that wait
	given    int64            // the greatest update that was given out
	authors  map[string]int64 // who wrote a message, or made a tap, by its number
	messages map[int64]*seen
	past     []seen            // what was sent or edited, in order
	skew     int64             // seconds that its clock is ahead
	dates    int64             // seconds after which what is written is dated: a person reads first
	told     map[string]string // what a tap was told, by its id
	taps     int
	lastID   int64
	updates  []string // as JSON, in order of their ids, until they are confirmed
	lastUp   int64
	topics   map[int64]string       // their names, nil: the chat has none
	flying   map[int64]int          // edits under way by message
	turns    []time.Time            // when messages and edits came
	level    float64                // how many have come, less one a second
	quiet    [2]time.Time           // between these no message may come: a 429 said so
	failed   map[string][]time.Time // when a request was refused, by what it was
	unsure   map[int64]bool         // the answer to the last change of a message was lost: it may be made again
	lastBy   map[int64]string       // the connection over which a message was changed last
	closed   map[string]bool        // connections whose process may have ended before it read the answer
	broken   []string               // rules that a request broke
	free     bool                   // rules are not looked at: the test breaks them itself
	shuffled bool                   // a request was carried out late: after what was sent behind it
	maxFly   int                    // the most there were at a time

	files   http.HandlerFunc                                  // gives out files, nil: there are none
	fault   func(method string, w http.ResponseWriter) bool   // true: it has answered, and nothing is done
	fate    func(method string, p map[string]any) fate        // what becomes of a request; nil: it is carried out
	answers map[string]func(p map[string]any) (result string) // instead of the usual ones
}

// newBotAPI starts a server, at which a test fails whose program breaks a rule; the log of a failed test shows what it has.
func newBotAPI(t *testing.T) *botAPI {
	t.Helper()
	needLoopback(t)
	s := bareBotAPI(t)
	s.slack = 3
	s.Server = httptest.NewUnstartedServer(s)
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			s.change(func() { s.closed[c.RemoteAddr().String()] = true })
		}
	}
	s.Start()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// bareBotAPI is newBotAPI without a network: an http.RoundTripper whose only time is that of the package time.
func bareBotAPI(t *testing.T) *botAPI {
	s := &botAPI{
		t:        t,
		chat:     1001,
		watched:  watched{changed: make(chan struct{})},
		messages: map[int64]*seen{},
		told:     map[string]string{},
		authors:  map[string]int64{},
		failed:   map[string][]time.Time{},
		unsure:   map[int64]bool{},
		lastBy:   map[int64]string{},
		closed:   map[string]bool{},
		lastID:   100,
		dates:    3,
		lastUp:   9000,
		flying:   map[int64]int{},
		answers:  map[string]func(map[string]any) string{},
	}
	t.Cleanup(func() {
		if broken := s.verdict(); len(broken) > 0 && !s.free {
			t.Errorf("the Bot API was told what it must not be:\n%s", strings.Join(broken, "\n"))
		}
		if t.Failed() {
			t.Logf("the phone shows:\n%s\ncalls: %v", s.dump(), s.requests())
		}
	})
	return s
}

// config is a configuration that reaches this server.
func (s *botAPI) config(more string) string {
	return fmt.Sprintf("%s\n[telegram]\nbot_token = %q\nchat_id = %d\nallowed_users = [1001]\n"+
		"api_base = %q\n", more, fakeToken, s.chat, s.URL)
}

// RoundTrip serves a request without a network. As there, a request whose caller has gone is carried out all the same.
func (s *botAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	served := make(chan error, 1)
	go func() {
		defer func() {
			if cut := recover(); cut == http.ErrAbortHandler {
				served <- io.ErrUnexpectedEOF
			} else if cut != nil {
				panic(cut)
			}
		}()
		s.ServeHTTP(w, r)
		served <- nil
	}()
	select {
	case err := <-served:
		if err != nil {
			return nil, err
		}
		return w.Result(), nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// ServeHTTP answers what the client sends as JSON.
func (s *botAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method := path.Base(r.URL.Path)
	if s.files != nil && r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/file/bot"+fakeToken+"/") {
		s.files(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller has gone
	}
	var p map[string]any
	s.mu.Lock()
	if err := json.Unmarshal(body, &p); err != nil || r.Header.Get("Content-Type") != "application/json" || p == nil {
		s.breaks(method, "what is not JSON: %q", body)
	}
	s.judge(r, method, body, p)
	fault := s.fault
	s.mu.Unlock()
	switch {
	case fault != nil && fault(method, w):
		s.change(func() { s.fails(method, p) })
	case method == "getUpdates":
		s.serveUpdates(w, r, p)
	default:
		s.serveCall(w, r, method, p)
	}
}

// breaks notes that a request broke a rule; the lock is held.
func (s *botAPI) breaks(method, format string, args ...any) {
	s.broken = append(s.broken, fmt.Sprintf("%s %s: ", time.Now().Format("04:05.000"), method)+fmt.Sprintf(format, args...))
}

// stranger is a user, and his chat, whom nobody has allowed anything.
const stranger = 2002

// apiMethods are what a bot of ours may call.
var apiMethods = regexp.MustCompile(`^(getMe|getChat|getUpdates|getFile|sendMessage|sendChatAction|setMessageReaction` +
	`|editMessage(Text|ReplyMarkup)|answerCallbackQuery|setMyCommands|(get|delete)Webhook(Info)?|(create|edit|close)ForumTopic)$`)

// reHides finds what a person does not see, or what turns text around.
var reHides = regexp.MustCompile(`[\x00-\x08\x0b-\x1f\x7f-\x9f\x{200b}-\x{200f}\x{2028}-\x{202e}\x{2060}-\x{206f}\x{feff}]`)

// judge notes which rules a request breaks by itself; the lock is held.
func (s *botAPI) judge(r *http.Request, method string, body []byte, p map[string]any) {
	breaks := func(wrong bool, format string, args ...any) {
		if wrong {
			s.breaks(method, format, args...)
		}
	}
	breaks(!apiMethods.MatchString(method), "there is no such method")
	breaks(r.URL.RawQuery != "" || bytes.Contains(body, []byte(fakeToken)) || strings.Contains(fmt.Sprint(r.Header), fakeToken),
		"the token elsewhere than in the path: %s %s", r.URL, body)
	text, _ := p["text"].(string)
	units := utf16.Encode([]rune(text))
	limit := 4096
	if method == "answerCallbackQuery" {
		limit = 200
	}
	breaks(len(units) > limit, "%d UTF-16 units", len(units))
	breaks((method == "sendMessage" || method == "editMessageText") && strings.TrimSpace(text) == "", "a message without text")
	within := func(i int64) bool { // of the text, and of no character
		return i >= 0 && i <= int64(len(units)) && (i == int64(len(units)) || units[i]&0xfc00 != 0xdc00)
	}
	entities, _ := p["entities"].([]any)
	breaks(len(entities) > 100, "%d entities", len(entities))
	for _, one := range entities {
		e, _ := one.(map[string]any)
		from, n := numberOf(e, "offset"), numberOf(e, "length")
		breaks(n <= 0 || !within(from) || !within(from+n), "entity %v in a text of %d units", e, len(units))
	}
	read := text
	for label, data := range buttonsOf(p) {
		breaks(label == "" || data == "" || len(data) > 64, "button %q with data %q", label, data)
		read += "\n" + label
	}
	read = strings.ReplaceAll(read, "-----", "") // of a key that came in pieces the frame is shown, and nothing in it
	breaks(redact(read) != read || reHides.MatchString(read), "a secret, or what cannot be seen, in %q", read)
	reply, _ := p["reply_parameters"].(map[string]any)
	to := numberOf(p, "chat_id")
	for _, whose := range []any{numberOf(reply, "message_id"), p["callback_query_id"]} {
		breaks(s.authors[fmt.Sprint(whose)] == stranger || to == stranger || to == -stranger, "a stranger is answered")
	}
	if method == "answerCallbackQuery" {
		tap := fmt.Sprint(p["callback_query_id"])
		said, again := s.told[tap]
		breaks(s.authors[tap] == 0, "tap %s was never given out", tap)
		breaks(again && !strings.Contains(said, "tried again"), "tap %s was told %q, and is told %q", tap, said, text)
	}
	body, _ = json.Marshal(p) // it was JSON: cannot fail
	request := method + string(body)
	s.failed[request] = slices.DeleteFunc(s.failed[request], func(at time.Time) bool {
		return time.Since(at) > 700*time.Millisecond
	})
	breaks(len(s.failed[request]) > 1, "it was refused twice, and comes again without a pause: %s", body)
}

// fails notes that a request was refused, or lost; the lock is held.
func (s *botAPI) fails(method string, p map[string]any) {
	body, _ := json.Marshal(p) // it was JSON: cannot fail
	request := method + string(body)
	s.failed[request] = append(s.failed[request], time.Now())
}

// countTurn counts a message or an edit against the limits of the chat; the lock is held.
func (s *botAPI) countTurn(method string) {
	now := time.Now()
	if n := len(s.turns); n > 0 {
		s.level = max(0, s.level-now.Sub(s.turns[n-1]).Seconds())
	}
	s.level++
	s.turns = append(s.turns, now)
	minute := 0
	for i := len(s.turns) - 1; i >= 0 && now.Sub(s.turns[i]) < time.Minute; i-- {
		minute++
	}
	switch {
	case s.level > 5+s.slack:
		s.breaks(method, "%.1f messages too many in a second", s.level-1)
	case s.chat < 0 && minute > 20+int(s.slack):
		s.breaks(method, "%d messages a minute in a group", minute)
	case now.After(s.quiet[0]) && now.Before(s.quiet[1]):
		s.breaks(method, "%v before the time that a 429 told", s.quiet[1].Sub(now))
	}
}

// verdict returns the rules that were broken: those by a request, and where the buttons of a message came back after they
// went, or one of them changed its meaning, or its label.
func (s *botAPI) verdict() []string {
	s.mu.Lock() // what is carried out late may still be
	defer s.mu.Unlock()
	broken := slices.Clone(s.broken)
	meant, named, over := map[string]string{}, map[string]string{}, map[int64]bool{}
	for _, m := range s.past {
		_, again := m.ending("Ask again")
		if over[m.id] && len(m.buttons) > 0 && !again && !s.shuffled {
			broken = append(broken, fmt.Sprintf("buttons of message %d come back: %v", m.id, m.buttons))
		}
		over[m.id] = over[m.id] || again || len(m.buttons) == 0
		for label, data := range m.buttons {
			if strings.Contains(data, ":~t:") || strings.Contains(data, ":~s:") {
				continue // they carry the ticks that are there
			}
			here := fmt.Sprint(m.id, label)
			if was := cmp.Or(meant[here], data); was != data {
				broken = append(broken, fmt.Sprintf("button %q meant %s and means %s", label, was, data))
			}
			if was := cmp.Or(named[data], label); was != label {
				broken = append(broken, fmt.Sprintf("%s was called %q and is called %q", data, was, label))
			}
			meant[here], named[data] = data, label
		}
	}
	return broken
}

// reRetryAfter is how long a 429 asks to wait, in seconds.
var reRetryAfter = regexp.MustCompile(`"retry_after":(\d+)`)

// serveCall lets a request meet its fate.
func (s *botAPI) serveCall(w http.ResponseWriter, r *http.Request, method string, p map[string]any) {
	id := numberOf(p, "message_id")
	edit := strings.HasPrefix(method, "editMessage")
	message := edit || method == "sendMessage"
	todo := fate{}
	s.change(func() {
		s.calls = append(s.calls, apiCall{method, p, time.Now()})
		if edit {
			s.flying[id]++
			s.maxFly = max(s.maxFly, s.flying[id])
		}
		if s.fate != nil {
			todo = s.fate(method, p)
		}
		if message && todo.answer == "" {
			s.countTurn(method)
		}
		s.shuffled = s.shuffled || todo.hold != nil || todo.late != nil
	})
	if todo.hold != nil {
		<-todo.hold
	}
	if todo.late != nil {
		go func() {
			<-todo.late
			s.change(func() {
				s.unsure[id] = true // nobody can know that it says so by now
				s.carryOut(method, p)
			})
		}()
	}
	answer := todo.answer
	s.change(func() {
		if answer == "" && todo.late == nil {
			answer = s.carryOut(method, p)
		}
		if edit {
			s.flying[id]--
		}
		if todo != (fate{}) {
			s.fails(method, p)
		}
		if message {
			s.lastBy[cmp.Or(id, s.lastID)] = r.RemoteAddr
			s.unsure[cmp.Or(id, s.lastID)] = s.unsure[id] || todo.cut || todo.late != nil || r.Context().Err() != nil
		}
		if wait := reRetryAfter.FindStringSubmatch(answer); message && wait != nil {
			seconds, _ := strconv.Atoi(wait[1])
			s.quiet[0] = time.Now().Add(time.Second) // what is on its way may come
			s.quiet[1] = time.Now().Add(time.Duration(seconds)*time.Second - 50*time.Millisecond)
		}
	})
	if todo.cut || todo.late != nil {
		panic(http.ErrAbortHandler)
	}
	fmt.Fprint(w, answer)
}

// carryOut does what a request asks for, and returns the answer; the lock is held.
func (s *botAPI) carryOut(method string, p map[string]any) (answer string) {
	text, _ := p["text"].(string)
	id := numberOf(p, "message_id")
	thread := numberOf(p, "message_thread_id")
	was := s.messages[id]
	if answer := s.answers[method]; answer != nil {
		return apiResult(answer(p))
	}
	switch method {
	case "getMe":
		return apiResult(fmt.Sprintf(`{"id":123456789,"is_bot":true,"first_name":"Bot","username":"my_bot",`+
			`"has_topics_enabled":%v}`, s.topics != nil))
	case "createForumTopic", "editForumTopic", "closeForumTopic":
		return s.topicDone(method, p)
	case "getWebhookInfo":
		return apiResult(`{"url":""}`)
	case "getMyCommands":
		return apiResult("[]")
	case "getChat":
		return apiResult(`{"id":1001,"type":"private","username":"op"}`)
	case "answerCallbackQuery":
		s.told[fmt.Sprint(p["callback_query_id"])] = text
		return apiResult("true")
	case "sendMessage":
		if thread != 0 && s.topics[thread] == "" {
			return apiRefusal("message thread not found")
		}
		s.lastID++
		id = s.lastID
	case "editMessageText", "editMessageReplyMarkup":
		if was == nil {
			return apiRefusal("message to edit not found")
		}
		same := maps.Equal(was.buttons, buttonsOf(p))
		if method == "editMessageReplyMarkup" {
			text = was.text
		}
		if text == was.text && same {
			if !s.unsure[id] && !s.closed[s.lastBy[id]] {
				s.breaks(method, "message %d says that already: %q %v", id, text, was.buttons)
			}
			return apiRefusal("message is not modified")
		}
	default:
		return apiResult("true")
	}
	if was != nil {
		thread = was.thread
	}
	now := seen{id, text, buttonsOf(p), time.Now(), method, thread}
	s.messages[id] = &now
	s.past = append(s.past, now)
	words, _ := json.Marshal(text)
	return apiResult(fmt.Sprintf(`{"message_id":%d,"date":%d,"chat":{"id":1001,"type":"private"},"text":%s}`,
		id, time.Now().Unix()+s.skew, words))
}

// topicDone does with a topic what a request asks for, and returns the answer.
func (s *botAPI) topicDone(method string, p map[string]any) (answer string) {
	id := numberOf(p, "message_thread_id")
	name, _ := p["name"].(string)
	switch {
	case s.topics == nil:
		s.breaks(method, "the chat has no topics")
		return apiRefusal("the chat is not a forum")
	case method == "createForumTopic":
		s.lastID++
		s.topics[s.lastID] = name
		return apiResult(fmt.Sprintf(`{"message_thread_id":%d,"name":"x","icon_color":7322096}`, s.lastID))
	case s.topics[id] == "":
		return apiRefusal("TOPIC_ID_INVALID")
	case method == "editForumTopic":
		s.topics[id] = name
	}
	return apiResult("true")
}

// serveUpdates answers a poll: updates from its offset on, or none when its time is over.
func (s *botAPI) serveUpdates(w http.ResponseWriter, r *http.Request, p map[string]any) {
	offset := numberOf(p, "offset")
	wait := time.Duration(numberOf(p, "timeout")) * time.Second
	if s.pollWait > 0 {
		wait = min(wait, s.pollWait)
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	number := 0
	s.change(func() {
		s.polls = append(s.polls, offset)
		number = len(s.polls)
		s.waiting++
		if offset > s.given+1 {
			s.breaks("getUpdates", "offset %d confirms what it never got; the last was %d", offset, s.given)
		}
	})
	defer s.change(func() { s.waiting-- })
	answer, replaced := apiResult("[]"), false
	s.comes(ctx, func() bool {
		s.updates = slices.DeleteFunc(s.updates, func(u string) bool {
			return updateID(u) < offset
		})
		limit := cmp.Or(numberOf(p, "limit"), 100)
		given := s.updates[:min(int(limit), len(s.updates))]
		for _, u := range given {
			if id := updateID(u); id == 0 || id > s.given {
				s.note(u)
			}
		}
		replaced = number != len(s.polls)
		if len(given) > 0 {
			answer = apiResult("[" + strings.Join(given, ",") + "]")
		}
		return replaced || len(given) > 0
	})
	if replaced {
		select {
		case <-r.Context().Done(): // who polled was killed, which is not known at once
			return
		case <-time.After(time.Second):
		}
		s.change(func() { s.breaks("getUpdates", "two at once") })
		answer = `{"ok":false,"error_code":409,"description":"Conflict: terminated by other getUpdates request"}`
	}
	fmt.Fprint(w, answer)
}

// note remembers whose update is given out; the lock is held.
func (s *botAPI) note(text string) {
	type written struct {
		From struct{ ID int64 }
	}
	var u struct {
		ID      int64 `json:"update_id"`
		Message struct {
			written
			ID int64 `json:"message_id"`
		}
		Tap struct {
			written
			ID string
		} `json:"callback_query"`
	}
	_ = json.Unmarshal([]byte(text), &u) // of what is broken the rest
	s.given = max(s.given, u.ID)
	if u.Message.ID != 0 {
		s.authors[fmt.Sprint(u.Message.ID)] = u.Message.From.ID
	}
	s.authors[u.Tap.ID] = u.Tap.From.ID
}

// until waits for a call of the method whose parameters match, and returns it.
func (s *botAPI) until(t *testing.T, method, pattern string) (found apiCall) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	s.await(t, fmt.Sprintf("%s matching %q", method, pattern), func() bool {
		for _, c := range s.calls {
			if b, _ := json.Marshal(c.p); c.method == method && re.Match(b) {
				found = c
				return true
			}
		}
		return false
	})
	return found
}

// confirmed waits until an update has been confirmed by a greater offset.
func (s *botAPI) confirmed(t *testing.T, id int64) {
	t.Helper()
	s.await(t, fmt.Sprintf("update %d is confirmed", id), func() bool {
		return slices.ContainsFunc(s.polls, func(o int64) bool { return o > id })
	})
}

// count is how often a method was called.
func (s *botAPI) count(method string) (n int) {
	for _, c := range s.requests() {
		if c.method == method {
			n++
		}
	}
	return n
}

// decides sets what becomes of the requests to come.
func (s *botAPI) decides(f func(method string, p map[string]any) fate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fate = f
}

// loses has the answer to a message that holds text get lost; it is held when it is sent again, until release is called.
func (s *botAPI) loses(text string) (release func()) {
	held := make(chan struct{})
	sent := 0
	s.decides(func(method string, p map[string]any) (todo fate) {
		if method == "sendMessage" && strings.Contains(fmt.Sprint(p["text"]), text) {
			sent++
			todo.cut = sent == 1
			if sent > 1 {
				todo.hold = held
			}
		}
		return todo
	})
	return func() { close(held) }
}

// history is what was sent or edited so far, in order.
func (s *botAPI) history() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.past)
}

// requests are all calls so far but getUpdates.
func (s *botAPI) requests() []apiCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// message is a message as it is, the zero value where it is not known.
func (s *botAPI) message(id int64) seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.messages[id] == nil {
		return seen{}
	}
	return *s.messages[id]
}

// about is a message about a session.
func (s *botAPI) about(session record) int64 {
	s.put(60, "something\n[SID:"+session.str("id")[:8]+"]")
	return 60
}

// put makes a message with two buttons that say nothing.
func (s *botAPI) put(id int64, text string) {
	s.change(func() {
		s.messages[id] = &seen{
			id:      id,
			text:    text,
			buttons: map[string]string{"one": "1", "two": "2"},
		}
	})
}

// update has one arrive, with the next id, which it returns, as often as said.
func (s *botAPI) update(u map[string]any, times ...int) (id int64) {
	s.change(func() {
		s.lastUp++
		id = s.lastUp
		u["update_id"] = id
		text, err := json.Marshal(u)
		if err != nil {
			s.t.Error(err)
		}
		for range append(times, 1)[0] {
			s.updates = append(s.updates, string(text))
		}
	})
	return id
}

// tapped has the operator tap a button, and returns the tap's id.
func (s *botAPI) tapped(message int64, data string) (id string) {
	tap := s.touch(message, data)
	s.update(map[string]any{"callback_query": tap})
	return fmt.Sprint(tap["id"])
}

// touch is a tap of the operator's as an update has it.
func (s *botAPI) touch(message int64, data string) (tap map[string]any) {
	s.change(func() { s.taps++ })
	return map[string]any{
		"id":      fmt.Sprint("tap", s.taps),
		"data":    data,
		"from":    map[string]any{"id": 1001, "first_name": "Operator"},
		"message": map[string]any{"message_id": message, "date": time.Now().Unix(), "chat": s.chatObject()},
	}
}

// chatObject is the chat as an update has it.
func (s *botAPI) chatObject() map[string]any {
	kind := "private"
	if s.chat < 0 {
		kind = "supergroup"
	}
	return map[string]any{"id": s.chat, "type": kind}
}

// writes has the operator send a text, as a reply where to is not 0.
func (s *botAPI) writes(text string, to int64) (id int64) {
	m := s.letter(0, text, to)
	s.update(map[string]any{"message": m})
	return m["message_id"].(int64)
}

// done waits until a message of the operator's is marked as done.
func (s *botAPI) done(id int64) {
	s.t.Helper()
	s.until(s.t, "setMessageReaction", fmt.Sprintf(`"message_id":%d,"reaction":\[\{"emoji":"👍","type":"emoji"\}\]`, id))
}

// letter is a text of the operator's as an update has it, in a topic where thread is not 0.
func (s *botAPI) letter(thread int64, text string, to int64) map[string]any {
	s.mu.Lock()
	m := map[string]any{
		"message_id": 5000 + s.lastUp,
		"date":       time.Now().Unix() + s.skew + s.dates,
		"text":       text,
		"from":       map[string]any{"id": 1001, "first_name": "Operator"},
		"chat":       s.chatObject(),
	}
	s.mu.Unlock()
	if thread != 0 {
		m["message_thread_id"] = thread
		m["is_topic_message"] = true
	}
	if to != 0 {
		of := s.message(to)
		m["reply_to_message"] = map[string]any{
			"message_id":   to,
			"date":         time.Now().Unix(),
			"chat":         s.chatObject(),
			"from":         map[string]any{"id": 123456789, "is_bot": true, "first_name": "Bot"},
			"text":         of.text,
			"reply_markup": map[string]any{"inline_keyboard": of.keyboard()},
		}
	}
	return m
}

// dump is what the phone shows.
func (s *botAPI) dump() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(s.messages)) {
		fmt.Fprintf(&b, "%d %q %v\n", id, s.messages[id].text, s.messages[id].buttons)
	}
	return b.String() + fmt.Sprint(s.told)
}

// shows waits for a message that holds text and, where named, has a button whose label ends so.
func (s *botAPI) shows(text, button string) seen {
	s.t.Helper()
	return s.where(fmt.Sprintf("%q with button %q", text, button), func(m seen) bool {
		_, ok := m.ending(button)
		return strings.Contains(m.text, text) && (button == "" || ok)
	})
}

// press taps the button whose label ends so.
func (s *botAPI) press(m seen, label string) {
	data, _ := m.ending(label)
	s.tapped(m.id, data)
}

// where waits for a message as it is now that fits.
func (s *botAPI) where(what string, fits func(seen) bool) (found seen) {
	s.t.Helper()
	s.await(s.t, what, func() bool {
		for _, id := range slices.Sorted(maps.Keys(s.messages)) {
			if fits(*s.messages[id]) {
				found = *s.messages[id]
				return true
			}
		}
		return false
	})
	return found
}

// find waits for a message that holds text and has a button for that purpose.
func (s *botAPI) find(text string, purpose *regexp.Regexp) seen {
	s.t.Helper()
	return s.where(fmt.Sprintf("%q with a button %v", text, purpose), func(m seen) bool {
		_, ok := m.choice(purpose)
		return ok && strings.Contains(m.text, text)
	})
}

// ended waits until a message has no buttons any more and says one of these, where there are any; what is on its way is not
// over.
func (s *botAPI) ended(id int64, words ...*regexp.Regexp) seen {
	s.t.Helper()
	return s.where(fmt.Sprintf("message %d with its outcome, one of %v", id, words), func(m seen) bool {
		says := func(one *regexp.Regexp) bool { return one.MatchString(m.text) }
		return m.id == id && len(m.buttons) == 0 && (len(words) == 0 || slices.ContainsFunc(words, says))
	})
}

// unanswered is ended of a message that does not say that it was answered.
func (s *botAPI) unanswered(id int64, words ...*regexp.Regexp) {
	s.t.Helper()
	if m := s.ended(id, words...); saysAnswered.MatchString(m.text) {
		s.t.Errorf("message %d says that it was answered: %q", id, m.text)
	}
}

// texts is all that was ever shown.
func (s *botAPI) texts() string {
	var b strings.Builder
	for _, m := range s.history() {
		b.WriteString(m.text + "\n")
	}
	return b.String()
}

// came is how many messages came that hold text.
func (s *botAPI) came(text string) (n int) {
	for _, m := range s.history() {
		if strings.HasPrefix(m.method, "send") && strings.Contains(m.text, text) {
			n++
		}
	}
	return n
}

// tap presses a button of a message as it was seen, and returns the tap's id.
func (s *botAPI) tap(m seen, purpose *regexp.Regexp) (id string) {
	s.t.Helper()
	label, ok := m.choice(purpose)
	if !ok {
		s.t.Errorf("no button %v to tap; there are %v", purpose, m.buttons)
	}
	return s.tapped(m.id, m.buttons[label])
}

// answer waits for what a tap is told.
func (s *botAPI) answer(id string) (said string) {
	s.t.Helper()
	s.await(s.t, "an answer to "+id, func() (told bool) {
		said, told = s.told[id]
		return told
	})
	return said
}

// apiCall is a request with its parameters.
type apiCall struct {
	method string
	p      map[string]any
	at     time.Time
}

// seen is a message at one time.
type seen struct {
	id      int64
	text    string
	buttons map[string]string // label → callback data
	at      time.Time
	method  string // that made it so
	thread  int64  // the topic that it is in, 0: none
}

// keyboard are its buttons as the Bot API gives them back, one in a row.
func (m seen) keyboard() (rows [][]map[string]string) {
	for label, data := range m.buttons {
		rows = append(rows, []map[string]string{{"text": label, "callback_data": data}})
	}
	return rows
}

// ending is the data of the button whose label ends so.
func (m seen) ending(label string) (data string, ok bool) {
	for text, data := range m.buttons {
		if strings.HasSuffix(text, label) {
			return data, true
		}
	}
	return "", false
}

// choice is the label of a button for that purpose.
func (m seen) choice(purpose *regexp.Regexp) (label string, ok bool) {
	for _, label := range slices.Sorted(maps.Keys(m.buttons)) {
		if purpose.MatchString(label) {
			return label, true
		}
	}
	return "", false
}

// fate is what becomes of a request. The zero value: it is carried out and answered.
type fate struct {
	hold   <-chan struct{} // it is held until this is closed
	answer string          // it is not carried out, and answered so
	cut    bool            // the connection is closed instead of an answer
	late   <-chan struct{} // cut at once, and carried out when this is closed
}

// apiResult is an answer that carries this.
func apiResult(result string) string { return `{"ok":true,"result":` + result + `}` }

// apiRefusal is the answer to a request that cannot be done.
func apiRefusal(why string) string {
	return `{"ok":false,"error_code":400,"description":"Bad Request: ` + why + `"}`
}

// numberOf is a number among parameters, 0 when it is not there.
func numberOf(p map[string]any, name string) int64 {
	n, _ := p[name].(float64)
	return int64(n)
}

// buttonsOf are the buttons of a message that is to be sent.
func buttonsOf(p map[string]any) map[string]string {
	buttons := map[string]string{}
	markup, _ := p["reply_markup"].(map[string]any)
	rows, _ := markup["inline_keyboard"].([]any)
	for _, row := range rows {
		list, _ := row.([]any)
		for _, one := range list {
			b, _ := one.(map[string]any)
			buttons[fmt.Sprint(b["text"])] = fmt.Sprint(b["callback_data"])
		}
	}
	return buttons
}

// updateID is the id of an update.
func updateID(u string) int64 {
	var v struct {
		ID int64 `json:"update_id"`
	}
	_, err := fmt.Sscanf(u, `{"update_id":%d`, &v.ID) // a large one is not to be read each time
	if err != nil {
		_ = json.Unmarshal([]byte(u), &v) // what has no number is confirmed by the next one
	}
	return v.ID
}

// ---- bench: what a phone says ----
// In no particular words: what a message tells, and what a button is for.

// What a phone may say, in no particular words.
var (
	saysKeyboard = regexp.MustCompile(`(?i)keyboard`)
	saysReplaced = regexp.MustCompile(`(?i)replaced|changed|another question|no longer|out of date|left the screen`)
	saysExpired  = regexp.MustCompile(`(?i)expired|nobody|no answer`)
	saysLost     = regexp.MustCompile(`(?i)not (delivered|answered)|ended before|did not reach|not taken|gave up|given up|gone`)
	saysNothing  = regexp.MustCompile(`(?i)nothing|no longer|already|out of date|over|replaced|expired|too late|answered`)
	saysAnswered = regexp.MustCompile(`(?i)✅|answered .*phone|(yes|no)\b.* · phone`)
)

// What is a button for. Each is looked for with or without a number and a picture in front of its word.
var (
	yesButton     = regexp.MustCompile(`(?i)^[^\pL\d]*(\d+[.:)]?\s*)?(yes|allow|continue)[^\pL]*$`)
	noButton      = regexp.MustCompile(`(?i)^[^\pL\d]*(\d+[.:)]?\s*)?(no|deny)[^\pL]*$`)
	showAllButton = regexp.MustCompile(`(?i)show all`)
	enterButton   = regexp.MustCompile(`(?i)enter|continue`)
	grantButton   = regexp.MustCompile(`(?i)\b(yes|enter|allow|approve|continue|execute)\b`)
	anyButton     = regexp.MustCompile(`.`)
)

// ---- bench ----
// One way each to make a home, to run a command, to be a phone.

// ---- bench: the test binary ----
// It is the tests, atlasbridge itself, or a child that one of them needs.

// patience returns how long to wait for what must come: 15 s, for the program itself waits up to 10 s before it asks what it
// cannot read; and longer where the machine is slow: with the race detector, or when it does much else.
func patience() time.Duration {
	load, _ := os.ReadFile("/proc/loadavg") // not there: nobody knows
	var busy float64
	fmt.Sscan(string(load), &busy)
	switch {
	case raceDetector():
		return 2 * time.Minute
	case busy > 2*float64(runtime.NumCPU()):
		return time.Minute
	}
	return 15 * time.Second
}

// raceDetector reports whether the race detector is on: everything takes up to ten times as long.
var raceDetector = sync.OnceValue(func() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(b debug.BuildSetting) bool {
		return b.Key == "-race" && b.Value == "true"
	})
})

// TestMain runs the tests, or is what one of them has started: atlasbridge itself, or a child of
// theirs.
func TestMain(m *testing.M) {
	if actAs(os.Args) {
		return
	}
	mode := os.Getenv("ATLASBRIDGE_TEST_CHILD")
	os.Unsetenv("ATLASBRIDGE_TEST_CHILD") // what a child starts is no test child
	exe, _ := os.Executable()             // it runs
	os.Args[0] = exe                      // wherever a child is started
	os.Setenv("TEST_BINARY", exe)         // for scripts, which must quote it: TMPDIR may have blanks
	if mode == "" {
		leaveTestersBridge()
	}
	here := theWorld()
	if fault := os.Getenv("ATLASBRIDGE_TEST_FAULT"); mode != "" && fault != "" {
		here.disk = faultsOf(fault)
	}
	switch {
	case mode == "life":
		childLife(here)
		return
	case mode == "main":
		os.Exit(here.run(os.Args[1:]))
	case strings.HasPrefix(mode, "stall "):
		os.Exit(stalling(here, strings.TrimPrefix(mode, "stall ")).run(os.Args[1:]))
	case strings.HasPrefix(mode, "panic "):
		os.Exit(panicking(here, strings.TrimPrefix(mode, "panic ")).run(os.Args[1:]))
	case mode != "" && childTool(mode):
		return
	}
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} { // under nohup, or behind an &
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig) // a child of a program that catches it gets the default again
		}
	}
	manyAtATime()
	os.Setenv("GOGC", "400") // a session would set it to its own 25, which doubles the simulation's time
	os.Exit(m.Run())
}

// manyAtATime lets four tests per processor run at a time, two with the race detector, unless the tester says how many:
// they mostly wait.
func manyAtATime() {
	flag.Parse()
	told := false
	flag.Visit(func(f *flag.Flag) { told = told || f.Name == "test.parallel" })
	many := 4 * runtime.GOMAXPROCS(0)
	if raceDetector() {
		many /= 2
	}
	if !told {
		flag.Set("test.parallel", strconv.Itoa(many))
	}
}

// leaveTestersBridge takes the tester's own settings out of the environment.
func leaveTestersBridge() {
	for _, name := range strings.Fields("ATLASBRIDGE_HOME ATLASBRIDGE_SESSION STORAGE_PATH NO_COLOR LOG_LEVEL PERMISSION_TIMEOUT_SEC " +
		"TELEGRAM_BOT_TOKEN TELEGRAM_CHAT_ID ALLOWED_USER_IDS TELEGRAM_API_BASE OUTPUT_MAX_CHARS OUTPUT_FLUSH_MS") {
		os.Unsetenv(name)
	}
}

// beside runs f for every row in a subtest of its own, three at a time: they mostly wait.
func beside[T any](t *testing.T, rows []T, f func(*testing.T, T)) {
	t.Helper()
	var all sync.WaitGroup
	room := make(chan struct{}, 3)
	for i, row := range rows {
		name := fmt.Sprintf("%d %.30q", i, fmt.Sprint(row))
		if r, ok := any(row).(interface{ title() string }); ok {
			name = fmt.Sprint(i, " ", r.title())
		}
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			t.Run(name, func(t *testing.T) { f(t, row) })
		})
	}
	all.Wait()
}

// comesTrue waits until something holds that another process does, or a goroutine that tells nobody.
func comesTrue(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience()); !holds(); {
		if time.Now().After(end) {
			t.Fatalf("it never came that %s", what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

// watched is what others wait for.
type watched struct {
	mu      sync.Mutex    // guards what it is
	changed chan struct{} // closed at the next change
}

// change does something to it and wakes who waits.
func (w *watched) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

// comes waits until something holds, or until the context ends: false.
func (w *watched) comes(ctx context.Context, holds func() bool) bool {
	for {
		w.mu.Lock()
		ok, changed := holds(), w.changed
		w.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// await waits until something holds, and says what it was where it never does.
func (w *watched) await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	w.awaitFor(t, patience(), what, holds)
}

// awaitFor is await with another patience.
func (w *watched) awaitFor(t *testing.T, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !w.comes(ctx, holds) {
		t.Fatal("it never came: ", what)
	}
}

// inFolder are the files of a folder that match a pattern; the folder's own name may look like one.
func inFolder(folder, pattern string) (paths []string) {
	names, _ := fs.Glob(os.DirFS(folder), pattern) // the pattern is right
	for _, name := range names {
		paths = append(paths, filepath.Join(folder, filepath.FromSlash(name)))
	}
	return paths
}

// matches tells whether a pattern is found in a text, "" only in none.
func matches(pattern, text string) bool {
	return pattern == "" && text == "" ||
		pattern != "" && regexp.MustCompile(pattern).MatchString(text)
}

// needUnix skips the test where there is no Unix.
func needUnix(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("needs Linux or macOS")
	}
}

// needWindows skips the test anywhere but on Windows.
func needWindows(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "windows" {
		t.Skip("needs Windows")
	}
}

// needLinux skips the test where /proc does not tell.
func needLinux(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells (/proc)")
	}
}

// needTool skips the test where one of these programs is missing.
func needTool(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("needs %s: %v", name, err)
		}
	}
}

// reTools are the programs that the tests start by a command line or by a script in one.
var reTools = regexp.MustCompile(
	`\b(awk|bash|cat|chmod|cp|cut|dd|env|find|grep|head|id|ln|ls|mkdir|mkfifo|mv|nohup|ps|rm|rmdir|sed|seq|setsid|sleep|sort|` +
		`stat|stty|su|tail|tee|touch|tr|true|uniq|wc|yes)\b`)

// reached tells whether a program here can reach another one by 127.0.0.1.
var reached = sync.OnceValue(func() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	return c.Close()
})

// needLoopback skips the test where no server of its own can be reached.
func needLoopback(t testing.TB) {
	t.Helper()
	if err := reached(); err != nil {
		t.Skip("needs the loopback network:", err)
	}
}

// needToolsOf skips the test where a program is missing that a command line names.
func needToolsOf(t testing.TB, argv []string) {
	t.Helper()
	needTool(t, reTools.FindAllString(strings.Join(argv, " "), -1)...)
}

// asNobody is a command line that runs this binary as nobody, in a mount namespace of its own, where hide has been done
// before. The binary is in dir, beside "sh", a shell that is root's whoever runs it, and "state", nobody's folder. The test is
// skipped where that cannot be.
func asNobody(t *testing.T, hide string) (argv []string, dir string) {
	t.Helper()
	needTool(t, "bash", "setpriv", "unshare")
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skip("needs root on Linux")
	}
	dir = t.TempDir()
	script := `cd "$0" && cp "$(command -v bash)" sh && cp "$1" test && chmod 4755 sh && chmod 755 . .. test &&
		mkdir -m 700 state && chown 65534:65534 state && unshare -m sh -c "$2"`
	if out, err := exec.Command("sh", "-c", script, dir, os.Args[0], hide).CombinedOutput(); err != nil {
		t.Skipf("%s: %v: %s", hide, err, out)
	}
	hide += ` && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0/test" "$@"`
	return []string{"unshare", "-m", "sh", "-c", hide, dir}, dir
}

// processesOf are the processes that have that state folder in their environment, this one apart.
func processesOf(dir string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, file := range files {
		env, _ := os.ReadFile(file) // gone, or another user's: not ours
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if pid != os.Getpid() && slices.Contains(strings.Split(string(env), "\x00"), "ATLASBRIDGE_HOME="+dir) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// faultsOf makes the calls to the file system as ATLASBRIDGE_TEST_FAULT says: "KIND N", at the N-th operation that changes
// a file, or "KIND PATH", at all of them while that file is there.
//
//	kill     the process is killed before the operation
//	tear     it is killed after half of the N-th write
//	fail     this operation fails
//	full     from this one on all fail that take room on the disk
//	ruin     from this one on all fail
//	power V  the power fails after the N-th write or rename: what was not fsynced may be lost; V from 0 to 5 says what is
func faultsOf(fault string) files {
	words := strings.SplitN(fault, " ", 3)
	kind, at := words[0], words[len(words)-1]
	n, err := strconv.ParseInt(at, 10, 64)
	var count atomic.Int64
	lost := disk{synced: map[string]int64{}, named: map[string]bool{}}
	countsOf := map[string]string{"tear": "write", "power": "write rename"}
	me, _ := os.FindProcess(os.Getpid()) // which is there
	return func(op string, f *os.File, call func() error) error {
		counts := countsOf[kind]
		if slices.Contains(readingOps, op) || !strings.Contains(counts, op) && counts != "" {
			done := call()
			lost.learns(op, f)
			return done
		}
		i := count.Add(1)
		now := i == n
		if err != nil {
			_, gone := os.Stat(at)
			now = gone == nil
		}
		if now && err == nil {
			fmt.Println("struck", op)
		}
		done, half := error(nil), false
		switch {
		case kind == "ruin" && (now || err == nil && i > n), kind == "full" && (now || err == nil && i > n) && op != "ftruncate":
			done, half = syscall.ENOSPC, true
		case kind == "fail" && now:
			done, half = syscall.EIO, true
		case kind == "tear" && now:
			half = true
		case kind == "kill" && now:
			me.Kill()
			select {}
		}
		if half && op == "write" {
			info, _ := f.Stat()
			call()
			after, _ := f.Stat()
			f.Truncate((info.Size() + after.Size()) / 2)
		} else if done == nil {
			done = call()
			lost.learns(op, f)
		}
		if now && kind == "power" {
			lost.loses(words[1])
		}
		if now && (kind == "tear" || kind == "power") {
			me.Kill()
			select {}
		}
		return done
	}
}

// readingOps are the operations that change no file.
var readingOps = []string{"open", "flock", "fstat", "pread"}

// disk knows what a power loss leaves of the state folder: of each file what was fsynced, under the name that it had when
// the folder was; and, as the system writes back on its own, perhaps more of both.
type disk struct {
	sync.Mutex
	synced map[string]int64 // bytes, by path
	named  map[string]bool  // the folder was fsynced since there is a file of that name
	before []byte           // what was fsynced of the state that a compaction replaces
}

// files are those that a power loss may harm.
func (d *disk) files() (state, log string) {
	dir := os.Getenv("ATLASBRIDGE_HOME")
	return filepath.Join(dir, "state.jsonl"), filepath.Join(dir, "audit.log")
}

// learns notes an operation that was done.
func (d *disk) learns(op string, f *os.File) {
	d.Lock()
	defer d.Unlock()
	state, log := d.files()
	switch op {
	case "fsync":
		info, _ := f.Stat()
		d.synced[f.Name()] = info.Size()
		if f.Name() == state+".new" {
			d.before, _ = os.ReadFile(state)
			d.before = d.before[:min(d.synced[state], int64(len(d.before)))]
		}
	case "rename":
		d.synced[state] = d.synced[state+".new"]
		d.named[state] = false
	case "fsync folder":
		for _, path := range []string{state, log} {
			_, err := os.Stat(path)
			d.named[path] = err == nil
		}
	}
}

// loses takes away what was not fsynced: where variant is 3 or more the names too; and none, half or all of what was
// written since.
func (d *disk) loses(variant string) {
	d.Lock() // for good: nothing is written any more
	v, _ := strconv.ParseInt(variant, 10, 64)
	state, log := d.files()
	for _, path := range []string{state, log} {
		info, err := os.Stat(path)
		switch {
		case err == nil && v >= 3 && !d.named[path]:
			os.Remove(path)
			if path == state && d.before != nil {
				os.WriteFile(path, d.before, 0o600)
			}
		case err == nil:
			os.Truncate(path, d.synced[path]+(info.Size()-d.synced[path])*(v%3)/2)
		}
	}
}

// childLife is a question's life in one process, which ATLASBRIDGE_TEST_FAULT meets. What fails is done once more, as a
// person would. "lived" is said at the end.
func childLife(here world) {
	path := filepath.Join(os.Getenv("ATLASBRIDGE_HOME"), "state.jsonl")
	asked := regexp.MustCompile(`"rec":"prompt","id":"([^"]+)".*"status":"awaiting_reply"`)
	time.AfterFunc(2*patience(), func() { os.Exit(9) }) // whatever happens
	for range 2 {
		old := time.Now().Add(50*time.Millisecond - 30*24*time.Hour) // soon too old: then the next who writes compacts
		f, _ := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		fmt.Fprint(f, withCRC(`{"v":2,"rec":"session","id":"old","at":"`+old.UTC().Format("2006-01-02T15:04:05.000000Z")+
			`","status":"completed"}`))
		f.Close()
		before, _ := os.ReadFile(path)
		ended := make(chan int, 1)
		go func() { ended <- here.run([]string{"ask", "Go on?"}) }()
		var found [][]byte
		for len(ended) == 0 && found == nil || time.Since(old) < 30*24*time.Hour {
			time.Sleep(time.Millisecond)
			state, _ := os.ReadFile(path)
			found = asked.FindSubmatch(bytes.TrimPrefix(state, before))
		}
		for tries := 0; len(ended) == 0 && here.run([]string{"answer", string(found[1]), "yes"}) != 0; tries++ {
			if tries > 0 {
				return // it cannot be answered
			}
		}
		select {
		case code := <-ended:
			if code == 0 {
				fmt.Println("lived")
				return
			}
		case <-time.After(patience()): // of a question that cannot be answered
			return
		}
	}
}

// childTool is such a tool until it ends; false: mode is none.
func childTool(mode string) bool {
	name, addr, _ := strings.Cut(mode, " ")
	if name != "puppet" && name != "claude" && name != "mute" {
		return false
	}
	os.Unsetenv("ATLASBRIDGE_TEST_CHILD")
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		fmt.Println("calling the test:", err)
		os.Exit(9)
	}
	l := &wire{reports: json.NewEncoder(conn), orders: json.NewDecoder(conn)}
	if name == "puppet" {
		l.obey()
	} else {
		a := newActor(l)
		a.mute = name == "mute"
		a.act()
	}
	return true
}

// panicking is the world in which the child's terminal, or the way to the Bot API, panics: at State or Read of the one, at
// a method of the other.
func panicking(here world, where string) world {
	boom := func(at string) {
		if at == where {
			panic("boom at " + where)
		}
	}
	start := here.start
	here.start = func(argv, env []string, size Size, host Host) (PTY, error) {
		p, err := start(argv, env, size, host)
		return bomb{p, boom}, err
	}
	here.dice = rand.Float64
	here.network = bomb{boom: boom}
	return here
}

// bomb tells boom where it is called.
type bomb struct {
	PTY
	boom func(at string)
}

func (b bomb) Read(buf []byte) (int, error) {
	b.boom("Read")
	return b.PTY.Read(buf)
}

func (b bomb) State() TTYState {
	b.boom("State")
	return b.PTY.State()
}

func (b bomb) RoundTrip(r *http.Request) (*http.Response, error) {
	b.boom(path.Base(r.URL.Path))
	return http.DefaultTransport.RoundTrip(r)
}

// stalling is the world of a busy machine: while that file is there, what was read from the child's terminal stays with the
// reader until somebody has asked ten times how much came.
func stalling(here world, file string) world {
	start := here.start
	here.start = func(argv, env []string, size Size, host Host) (PTY, error) {
		p, err := start(argv, env, size, host)
		return &stalledPTY{PTY: p, file: file}, err
	}
	return here
}

// stalledPTY is the child's terminal on such a machine.
type stalledPTY struct {
	PTY
	file  string
	asked atomic.Int64
}

func (p *stalledPTY) stalls() bool {
	_, err := os.Stat(p.file)
	return err == nil
}

func (p *stalledPTY) Read(b []byte) (int, error) {
	n, err := p.PTY.Read(b)
	for p.stalls() && p.asked.Load() < 10 {
		<-time.After(time.Millisecond)
	}
	return n, err
}

func (p *stalledPTY) Came() int64 {
	if p.stalls() {
		p.asked.Add(1)
	}
	return p.PTY.Came()
}

// ---- bench: homes and commands ----
// One way to make a state folder and one to run a command on it.

// home makes a private state folder, with this as its config.toml where it is not empty.
func home(t testing.TB, config string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // again and again: a process that was just killed may have made a file meanwhile
		for end := time.Now().Add(patience()); os.RemoveAll(dir) != nil && time.Now().Before(end); {
			runtime.Gosched()
		}
	})
	if config != "" {
		makeFile(t, config, dir, "config.toml")
	}
	return dir
}

// makeFile writes a text to a file that is the user's alone; its path is in parts.
func makeFile(t testing.TB, text string, path ...string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(path...), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// textOf is what stands in a file, which must be there.
func textOf(t testing.TB, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// writeProgram makes a script that can be run at once: no child that another test starts meanwhile has it open for
// writing, which is "text file busy".
func writeProgram(t testing.TB, path, script string) {
	t.Helper()
	syscall.ForkLock.RLock()
	err := os.WriteFile(path, []byte(script), 0o700)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
}

// fakeToken has the shape of a bot token and belongs to no bot.
const fakeToken = "123456789:AAFakeTokenForLoopbackTestsOnly0123"

// cli runs a command on a state folder and returns what a shell would see.
func cli(t testing.TB, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	w := theWorld()
	w.ctx = t.Context()
	w.getenv = func(name string) string {
		if name == "ATLASBRIDGE_HOME" {
			return dir
		}
		return os.Getenv(name)
	}
	base := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(base, name))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	w.stdin, w.stdout, w.stderr = open("stdin"), open("stdout"), open("stderr")
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1)) // which a command that reads much lowers, for its process
	code = w.run(args)
	for _, f := range []*os.File{w.stdin, w.stdout, w.stderr} { // a test may call thousands of times
		f.Close()
	}
	return code, textOf(t, w.stdout.Name()), textOf(t, w.stderr.Name())
}

// ---- bench: terminals ----
// Programs in real pseudo-terminals.

// ptyEnv is an environment without ours, for a child of that mode where it is not empty.
func ptyEnv(mode string) []string {
	if os.Getenv("ATLASBRIDGE_TEST_CHILD") != "" {
		panic("TestMain did not ask for the mode: this would start children for ever")
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, "ATLASBRIDGE_")
	})
	env = append(env, "PS1=$ ", "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	if mode != "" {
		env = append(env, "ATLASBRIDGE_TEST_CHILD="+mode)
	}
	return env
}

// mustPTYIn starts argv there, and ends it with the test or when it hangs.
func mustPTYIn(t testing.TB, dir string, env []string, argv ...string) PTY {
	t.Helper()
	if argv[0] != "cmd.exe" {
		needUnix(t)
		needToolsOf(t, argv)
	}
	if dir != "" {
		argv = append([]string{"sh", "-c", `cd "$0" && exec "$@"`, dir}, argv...)
	}
	p, err := startPTY(argv, env, Size{Rows: 30, Cols: 100, XPixel: 700, YPixel: 480}, Host{})
	if err != nil {
		t.Fatal(err)
	}
	noHang(t, p)
	t.Cleanup(func() {
		p.Signal(os.Kill) // it may have ended
		p.Close()
	})
	return p
}

// noHang turns a hang into a failure: first the terminal is closed, then everything panics with its stacks.
func noHang(t testing.TB, p PTY) {
	if _, ok := t.(*testing.B); ok {
		return
	}
	first := time.AfterFunc(2*patience(), func() { // of all that is done there
		t.Error("hangs: closing the terminal")
		p.Close()
	})
	second := time.AfterFunc(3*patience(), func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() {
		first.Stop()
		second.Stop()
	})
}

// readUntil reads until want has come and returns all of it.
func readUntil(t testing.TB, p PTY, want string) string {
	t.Helper()
	var got []byte
	for b := make([]byte, 4096); !bytes.Contains(got, []byte(want)); {
		n, err := p.Read(b)
		got = append(got, b[:n]...)
		if err != nil {
			t.Fatalf("waiting for %q: %v after %q", want, err, got)
		}
	}
	return string(got)
}

// readAll is everything up to the end, and the exit code.
func readAll(t testing.TB, p PTY) (string, int) {
	t.Helper()
	b, err := io.ReadAll(p)
	if err != nil {
		t.Fatalf("Read = %v, want io.EOF", err)
	}
	return string(b), p.Wait()
}

// typeIn writes to the terminal.
func typeIn(t testing.TB, p PTY, s string) {
	t.Helper()
	if _, err := io.WriteString(p, s); err != nil {
		t.Fatal(err)
	}
}

// newWine makes a Windows of links to wine's libraries: wineboot would copy them, 700 MB. run runs a Windows program there on
// a terminal, and gives what it says, and its exit code.
func newWine(t *testing.T, library, umask, program string) (home string, run func(t *testing.T, mode string, args ...string) (string, int)) {
	t.Helper()
	prefix := t.TempDir()
	home = filepath.Join(t.TempDir(), "home")
	system := filepath.Join(prefix, "drive_c", "windows", "system32")
	script := `mkdir -p "$0" dosdevices && ln -s "$1"/* "$0" && ln -s ../drive_c dosdevices/c: && ln -s / dosdevices/z: && echo disable > .update-timestamp`
	sh := exec.Command("sh", "-c", script, system, library)
	sh.Dir = prefix
	if out, err := sh.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	random := filepath.Join(system, "bcryptprimitives.dll")
	if _, err := os.Stat(random); err != nil {
		makeFile(t, randomDLL(t), random)
	}
	env := append(ptyEnv(""), "WINEPREFIX="+prefix, "WINEDEBUG=-all", `WINEPATH=C:\windows\system32`,
		"WINEDLLOVERRIDES=explorer.exe=d", // which a console starts, and which then holds it
		"ATLASBRIDGE_HOME=Z:"+strings.ReplaceAll(home, "/", `\`))
	t.Cleanup(func() {
		server := exec.Command("wineserver", "--kill", "--wait")
		server.Env = env
		server.Run() // it may have ended
	})
	return home, func(t *testing.T, mode string, args ...string) (string, int) {
		t.Helper()
		shell := []string{"sh", "-c", "umask " + umask + `; exec wine "$@"`, "sh", program}
		out, code := readAll(t, mustPTYIn(t, "", append(env, "ATLASBRIDGE_TEST_CHILD="+mode), append(shell, args...)...))
		return strings.ReplaceAll(out, "\r\r\n", ""), code // the console breaks lines, where depends on TMPDIR
	}
}

// randomDLL is the library of testdata/bcryptprimitives.txt.
func randomDLL(t *testing.T) string {
	t.Helper()
	dll := make([]byte, 1024)
	for _, r := range table(t, "bcryptprimitives.txt") {
		at, err := strconv.ParseInt(r["offset"], 0, 0)
		if err != nil {
			t.Fatal(r["at"], err)
		}
		copy(dll[at:], r["bytes"])
	}
	return string(dll)
}

// psState is a process's state as ps tells it, "" of one that is not there.
func psState(pid int) string {
	out, _ := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output() // it fails of one that is not there
	return string(out)
}

// running tells whether there is a process of that number that has not ended.
func running(pid int) bool {
	state := psState(pid)
	return state != "" && state[0] != 'Z'
}

// signals sends a process a signal of that name.
func signals(t *testing.T, pid int, name string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", fmt.Sprintf("kill -%s %d", name, pid)).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

// freezes stops a process, but not while it holds a lock of the state folder, which would stop everybody else, too.
func freezes(t *testing.T, dir string, pid int) {
	t.Helper()
	needTool(t, "ps")
	for held := true; held; held = !unlocked(t, dir, "state.lock") {
		signals(t, pid, "CONT")
		signals(t, pid, "STOP")
		comesTrue(t, "it is stopped", func() bool { return strings.HasPrefix(psState(pid), "T") })
	}
}

// terminal is a program in a real pseudo-terminal of 24 × 80 and the screen it paints.
type terminal struct {
	t   *testing.T
	pty PTY
	watched
	scr  *Screen
	code chan int
}

// shown is the screen's text now.
func (x *terminal) shown() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.scr.Text()
}

// sees waits until the screen holds text.
func (x *terminal) sees(text string) {
	x.t.Helper()
	x.await(x.t, fmt.Sprintf("%q in the terminal", text), func() bool { return strings.Contains(x.scr.Text(), text) })
}

// types presses keys.
func (x *terminal) types(keys string) { x.pty.Write([]byte(keys)) }

// kill sends a signal to a process, which may have ended.
func (x *terminal) kill(pid int, sig syscall.Signal) {
	p, err := os.FindProcess(pid)
	if err == nil {
		p.Signal(sig)
	}
}

// while stops the program, not while it holds a lock, has the test do something, and lets the program go on: all that was
// done reaches it at once.
func (x *terminal) while(dir string, do func()) {
	x.t.Helper()
	freezes(x.t, dir, x.pty.PID())
	do()
	// To ask takes longer than the kernel's worker that hands on what a program has written.
	if state := psState(x.pty.PID()); !strings.HasPrefix(state, "T") {
		x.t.Errorf("the wrapper, which was stopped, is %q", state)
	}
	x.signal("CONT")
}

// signal sends a signal of that name to the program.
func (x *terminal) signal(name string) {
	x.t.Helper()
	signals(x.t, x.pty.PID(), name)
}

// exits waits for the end and checks the exit code.
func (x *terminal) exits(want int) {
	x.t.Helper()
	select {
	case got := <-x.code:
		if got != want {
			x.t.Errorf("exit code %d, want %d", got, want)
		}
	case <-time.After(patience()):
		x.t.Fatal("it does not end")
	}
}

// bridge starts atlasbridge with these arguments in a terminal.
func bridge(t *testing.T, dir string, args ...string) *terminal {
	t.Helper()
	env := append(os.Environ(), "ATLASBRIDGE_TEST_CHILD=main", "ATLASBRIDGE_HOME="+dir,
		"TERM=xterm-256color", "PS1=$ ")
	return inTerminal(t, env, append([]string{os.Args[0]}, args...)...)
}

// inTerminal starts a program in a terminal of 24 × 80 and ends it with the test, whose log shows the screen where it failed.
func inTerminal(t *testing.T, env []string, argv ...string) *terminal {
	t.Helper()
	needToolsOf(t, argv)
	pty, err := startPTY(argv, env, Size{Rows: 24, Cols: 80}, Host{})
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{
		t:       t,
		pty:     pty,
		watched: watched{changed: make(chan struct{})},
		scr:     newScreen(24, 80),
		code:    make(chan int, 1),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := pty.Read(buf)
			term.change(func() { term.scr.Write(buf[:n]) })
			if err != nil {
				term.code <- pty.Wait()
				return
			}
		}
	}()
	t.Cleanup(func() {
		pty.Signal(os.Kill)
		pty.Close()
		<-done
		if t.Failed() {
			t.Logf("the terminal shows:\n%s", term.shown())
		}
	})
	return term
}

// ---- bench: the puppet ----
// A tool in a terminal that does what the test says, and tells what it read while which screen
// stood.

// order is what the test has a tool do.
type order struct {
	Seq    int
	Name   string // of the screen from now on
	Write  string
	Raw    bool   // the terminal is made raw before
	NoEcho bool   // it no longer echoes
	Exit   bool   // the tool ends
	Signal string // what claude's hooks get
	Play   *play  // what claude does
}

// report is what a tool tells.
type report struct {
	At     time.Time
	What   string // done key shown hook hookend paint decided ran message done
	Seq    int
	Dialog int
	By     string
	Text   string
	Screen string // that stood when a key was read
	Early  bool   // in its first 20 ms: nobody can look and type in one step
}

// puppet is such a tool, seen from the test.
type puppet struct {
	t       *testing.T
	tool    string        // the path of the script that starts it
	watched               // what follows is
	orders  *json.Encoder // nil until it has called
	reports []report
	seq     int
}

// newPuppet makes a tool of that name; mode is what the test binary becomes.
func newPuppet(t *testing.T, name, mode string) *puppet {
	t.Helper()
	needLoopback(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &puppet{t: t, tool: filepath.Join(t.TempDir(), name), watched: watched{changed: make(chan struct{})}}
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in --version) echo '2.1.330 (Claude Code)'; exit;; esac\n"+
		"ATLASBRIDGE_TEST_CHILD=%q exec %q \"$@\"\n",
		mode+" "+listener.Addr().String(), os.Args[0])
	writeProgram(t, c.tool, script)
	go c.listen(listener)
	t.Cleanup(func() {
		_ = listener.Close() // it may be closed
		if t.Failed() {
			t.Logf("the tool tells:\n%s", c.log())
		}
	})
	return c
}

// listen gathers the reports until the tool is gone.
func (c *puppet) listen(listener net.Listener) {
	conn, err := listener.Accept()
	if err != nil {
		return // the test is over
	}
	defer conn.Close()
	c.change(func() { c.orders = json.NewEncoder(conn) })
	reports := json.NewDecoder(conn)
	for {
		var r report
		if err := reports.Decode(&r); err != nil {
			c.change(func() { c.reports = append(c.reports, report{At: time.Now(), What: "gone"}) })
			return
		}
		c.change(func() { c.reports = append(c.reports, r) })
	}
}

// log is all that was told.
func (c *puppet) log() (all string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reports {
		all += fmt.Sprintf("%s %s dialog %d by %q %q screen %q early %v\n",
			r.At.Format("05.000"), r.What, r.Dialog, r.By, r.Text, r.Screen, r.Early)
	}
	return all
}

// until waits for such a report; dialog -1: of any.
func (c *puppet) until(what string, dialog int) (found report) {
	c.t.Helper()
	c.await(c.t, fmt.Sprintf("%s of dialog %d", what, dialog), func() bool {
		i := slices.IndexFunc(c.reports, func(r report) bool {
			return r.What == what && (dialog < 0 || r.Dialog == dialog)
		})
		if i >= 0 {
			found = c.reports[i]
		}
		return i >= 0
	})
	return found
}

// count is how many reports of that kind came.
func (c *puppet) count(what string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reports {
		if r.What == what {
			n++
		}
	}
	return n
}

// keys is all it read, but for what came too early.
func (c *puppet) keys() string { return c.keysAt("") }

// keysAt is what it read while that screen stood, "" any.
func (c *puppet) keysAt(screen string) (keys string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.taken(screen)
}

// taken is keysAt; the lock is held.
func (c *puppet) taken(screen string) (keys string) {
	for _, r := range c.reports {
		if r.What == "key" && !r.Early && (screen == "" || r.Screen == screen) {
			keys += r.Text
		}
	}
	return keys
}

// reads waits until it has read want, while that screen stood.
func (c *puppet) reads(screen, want string) {
	c.t.Helper()
	stalls := time.Minute / 2 // so long a download may, before what waits behind it is done
	c.awaitFor(c.t, patience()+stalls, fmt.Sprintf("it read %q at %q", want, screen), func() bool {
		return strings.Contains(c.taken(screen), want)
	})
}

// order waits until the tool is there and has done it.
func (c *puppet) order(o order) {
	c.t.Helper()
	c.await(c.t, "hello", func() bool { return c.orders != nil })
	c.mu.Lock()
	c.seq++
	o.Seq = c.seq
	err := c.orders.Encode(o)
	c.mu.Unlock()
	if err != nil {
		c.t.Fatal(err)
	}
	if !o.Exit {
		c.await(c.t, fmt.Sprint("order ", o.Seq, " done"), func() bool {
			return slices.ContainsFunc(c.reports, func(r report) bool {
				return r.What == "obeyed" && r.Seq == o.Seq
			})
		})
	}
}

// show has it write text, after which the screen has that name.
func (c *puppet) show(name, text string) {
	c.t.Helper()
	c.order(order{Name: name, Write: text})
}

// stageSession runs a puppet under atlasbridge.
func stageSession(t *testing.T, config string, flags ...string) (*botAPI, *puppet, string, *terminal) {
	t.Helper()
	w := newBotAPI(t)
	c := newPuppet(t, "tool", "puppet")
	dir := home(t, w.config("away_after_seconds = 0\n"+config))
	return w, c, dir, bridge(t, dir, slices.Concat([]string{"run"}, flags, []string{c.tool})...)
}

// wire is a tool's connection to its test.
type wire struct {
	mu      sync.Mutex // guards reports, screen and changed
	reports *json.Encoder
	orders  *json.Decoder
	screen  string
	changed time.Time
}

// tell ends the tool when nobody listens any more.
func (l *wire) tell(r report) {
	r.At = time.Now()
	if err := l.reports.Encode(r); err != nil {
		os.Exit(0)
	}
}

// obey does what the test says and tells every key with the screen that stood when it was read.
func (l *wire) obey() {
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := os.Stdin.Read(buf)
			l.mu.Lock()
			l.tell(report{What: "key", Text: string(buf[:n]), Screen: l.screen,
				Early: time.Since(l.changed) < 20*time.Millisecond})
			l.mu.Unlock()
			if err != nil && err != io.EOF { // which is no more than a ^D
				os.Exit(0)
			}
		}
	}()
	for {
		var o order
		if err := l.orders.Decode(&o); err != nil || o.Exit {
			os.Exit(0)
		}
		if o.Raw {
			stty("raw", "-echo")
		}
		if o.NoEcho {
			stty("-echo")
		}
		l.mu.Lock()
		if o.Name != "" {
			l.screen, l.changed = o.Name, time.Now()
		}
		fmt.Print(o.Write)
		l.tell(report{What: "obeyed", Seq: o.Seq})
		l.mu.Unlock()
	}
}

// stty changes the terminal, for good.
func stty(modes ...string) {
	cmd := exec.Command("stty", modes...)
	cmd.Stdin = os.Stdin
	if err := cmd.Run(); err != nil {
		fmt.Println("stty:", err)
		os.Exit(9)
	}
}

// ---- bench: files as jq reads them ----
// The state and the audit log, read by nothing of the program's.

// record is a line of state.jsonl or audit.log.
type record map[string]any

// str returns the member as text, "" where it is null or missing.
func (r record) str(name string) string {
	if r[name] == nil {
		return ""
	}
	return fmt.Sprint(r[name])
}

// jsonLines returns the lines of a file in the state folder, none where there is no file. A torn last line is left out.
func jsonLines(t testing.TB, dir, name string) (lines []record) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r record
		if err := json.Unmarshal(line, &r); err == nil {
			lines = append(lines, r)
		}
	}
	return lines
}

// records returns the last line of each id of a kind (session, prompt, input …), in the order in which they first came. A
// prompt has its texts, too.
func records(t testing.TB, dir, kind string) (all []record) {
	t.Helper()
	at := map[string]int{}
	texts := map[string]string{}
	for _, r := range jsonLines(t, dir, "state.jsonl") {
		i, known := at[r.str("id")]
		switch {
		case r.str("rec") != kind:
		case known:
			all[i] = r
		default:
			at[r.str("id")] = len(all)
			all = append(all, r)
		}
		if r.str("rec") == "text" {
			texts[r.str("id")] = r.str("text")
		}
	}
	for _, r := range all {
		_ = json.Unmarshal([]byte(texts[r.str("about_sha256")]), &r) // "" of other kinds
	}
	return all
}

// entries returns the entries of the audit log with that event.
func entries(t testing.TB, dir, event string) (all []record) {
	t.Helper()
	for _, e := range jsonLines(t, dir, "audit.log") {
		if e.str("event") == event {
			all = append(all, e)
		}
	}
	return all
}

// awaitRun waits until a session runs, with that label or a tool whose name ends so, and returns it.
func awaitRun(t testing.TB, dir, name string) record {
	t.Helper()
	return awaitRecord(t, dir, "session", name+" runs", func(r record) bool {
		named := strings.HasSuffix(r.str("tool"), name) || r.str("label") == name
		return named && r["pid"] != nil && r.str("pid") != "0"
	})
}

// awaitRecord waits for a record of that kind that fits, and returns it.
func awaitRecord(t testing.TB, dir, kind, what string, fits func(record) bool) (found record) {
	t.Helper()
	comesTrue(t, fmt.Sprintf("a %s in the state: %s", kind, what), func() bool {
		for _, r := range records(t, dir, kind) {
			if fits(r) {
				found = r
				return true
			}
		}
		return false
	})
	return found
}

// newestMessage is the number of a question's own message, 0 of none.
func newestMessage(q record) int64 {
	all, _ := q["messages"].([]any)
	if len(all) == 0 {
		return 0
	}
	id, _ := all[len(all)-1].(map[string]any)["id"].(float64)
	return int64(id)
}

// awaitPrompt waits for a question that says text and has that status, "" any, and returns its record.
func awaitPrompt(t testing.TB, dir, text, status string) record {
	t.Helper()
	return awaitRecord(t, dir, "prompt", fmt.Sprintf("%q %s", text, status), func(r record) bool {
		says := strings.Contains(r.str("question")+r.str("excerpt")+r.str("full"), text)
		return says && (status == "" || r.str("status") == status)
	})
}

// withCRC is the line of state.jsonl for an object: with its checksum, a CRC-32C of all else of it.
func withCRC(object string) string {
	sum := crc32.Checksum([]byte(object), crc32.MakeTable(crc32.Castagnoli))
	return fmt.Sprintf("%s,\"crc\":\"%08x\"}\n", strings.TrimSuffix(object, "}"), sum)
}

// ---- bench: rows in testdata ----
// Cases that a person can read and add to.

// row is a line of a table: its columns by their names, and where it stands.
type row map[string]string

// title is the first column of a row that says what it is, or where it stands.
func (r row) title() string { return cmp.Or(r["what"], r["name"], r["at"]) }

// table returns the rows of a file in testdata: columns between "|", the first row names them. Blank lines and lines that
// begin with "#" are left out. A column in Go's quotation marks is unquoted. row["at"] is file:line.
func table(t testing.TB, file string) (rows []row) {
	t.Helper()
	var names []string
	for i, line := range strings.Split(textOf(t, "testdata", file), "\n") {
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		r := row{"at": fmt.Sprintf("%s:%d", file, i+1)}
		columns := strings.Split(line, "|")
		if names != nil && len(columns) > len(names) {
			t.Fatalf("%s has more columns than its head; a bar is \\x7c", r["at"])
		}
		for k, column := range columns {
			column = strings.TrimSpace(column)
			plain, err := strconv.Unquote(column)
			switch {
			case len(rows) == 0 && len(names) <= k:
				names = append(names, column)
			case err == nil && strings.HasPrefix(column, `"`):
				r[names[k]] = plain
			default:
				r[names[k]] = column
			}
		}
		rows = append(rows, r)
	}
	return rows[1:]
}

// filled is the rows, in which these columns are as in the row above where they are empty.
func filled(rows []row, columns ...string) []row {
	for i, r := range rows {
		for _, column := range columns {
			if r[column] == "" {
				r[column] = rows[i-1][column]
			}
		}
	}
	return rows
}

// block is a case with texts of several lines.
type block struct {
	at, name string
	parts    map[string]string
}

// title is its name.
func (b block) title() string { return b.name }

// blocks returns the cases of a file in testdata: "=== name" begins a case, "--- part" a part of it, which ends with a
// newline. What stands before the first case is a comment.
func blocks(t testing.TB, file string) (all []block) {
	t.Helper()
	part := ""
	for i, line := range strings.SplitAfter(textOf(t, "testdata", file), "\n") {
		name, begins := strings.CutPrefix(line, "=== ")
		next, goesOn := strings.CutPrefix(line, "--- ")
		switch {
		case begins:
			all = append(all, block{fmt.Sprintf("%s:%d", file, i+1), strings.TrimSpace(name), map[string]string{}})
			part = ""
		case len(all) == 0:
		case goesOn:
			part = strings.TrimSpace(next)
			all[len(all)-1].parts[part] = ""
		default:
			all[len(all)-1].parts[part] += line
		}
	}
	return all
}

// ---- the suite itself ----
// What the tests may name of the program, and that they notice when a guard of it is gone.

// TestSeam: the tests name nothing of the program but what testdata/seam.txt lists, so that its inside can be built anew
// without a change here. Members of types begin with a dot.
func TestSeam(t *testing.T) {
	listed := map[string]bool{}
	for _, r := range table(t, "seam.txt") {
		for _, name := range strings.Fields(r["names"]) {
			listed[name] = true
		}
	}
	used := namesOfProgram(t)
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if !listed[name] {
			t.Errorf("%s: the tests name %s, which is not in testdata/seam.txt", used[name], name)
		}
	}
	for name := range listed {
		if used[name] == "" {
			t.Errorf("no test names %s, which is in testdata/seam.txt", name)
		}
	}
}

// namesOfProgram returns what the tests name of the program, and where one of them does.
func namesOfProgram(t *testing.T) map[string]string {
	t.Helper()
	fset := token.NewFileSet()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	tests := map[*token.File]bool{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_windows.go") {
			continue
		}
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
		tests[fset.File(file.Pos())] = strings.HasSuffix(path, "_test.go")
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	check := types.Config{Importer: emptyPackages{}, Error: func(error) {}} // all that other packages have is unknown
	check.Check("main", fset, files, info)
	used := map[string]string{}
	for id, object := range info.Uses {
		if !object.Pos().IsValid() || !tests[fset.File(id.Pos())] || tests[fset.File(object.Pos())] {
			continue
		}
		name := object.Name()
		if object.Parent() == nil { // a field or method
			name = "." + name
		}
		used[name] = fset.Position(id.Pos()).String()
	}
	return used
}

// emptyPackages imports every package as an empty one.
type emptyPackages struct{}

func (emptyPackages) Import(path string) (*types.Package, error) {
	name := filepath.Base(strings.TrimSuffix(path, "/v2"))
	p := types.NewPackage(path, name)
	p.MarkComplete()
	return p, nil
}

// guard is a guard of the program that can be taken out, as testdata/mutants.txt describes it.
type guard struct {
	name, test, promise string
	edits               []swap
}

// swap replaces lines of a file.
type swap struct{ file, from, to string }

// readMutants returns the mutants in testdata/mutants.txt.
func readMutants(t *testing.T) (all []guard) {
	t.Helper()
	head := regexp.MustCompile(`^= (\S+) (\S+) (\S+): (.+)$`)
	for line := range strings.Lines(textOf(t, "testdata", "mutants.txt")) {
		kind, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if h := head.FindStringSubmatch(strings.TrimSpace(line)); h != nil {
			all = append(all, guard{name: h[1], test: h[3], promise: h[4], edits: []swap{{file: h[2]}}})
			continue
		}
		if len(all) == 0 || kind == "" || kind == "#" {
			continue
		}
		m := &all[len(all)-1]
		last := &m.edits[len(m.edits)-1]
		switch kind {
		case "~":
			m.edits = append(m.edits, swap{file: rest})
		case "-":
			last.from = strings.TrimPrefix(last.from+"\n"+rest, "\n")
		case "+":
			last.to = strings.TrimPrefix(last.to+"\n"+rest, "\n")
		default:
			t.Fatalf("mutants.txt: %q is no line of a mutant", line)
		}
	}
	return all
}

// TestMutants: every guard in testdata/mutants.txt stands once in the program. With ATLASBRIDGE_MUTANTS=all, or the names
// of some, each is taken out in turn, and the test named there must fail, and pass while all stand.
func TestMutants(t *testing.T) {
	mutants := readMutants(t)
	program := map[string]string{}
	for _, m := range mutants {
		for _, e := range m.edits {
			if program[e.file] == "" {
				program[e.file] = textOf(t, e.file)
			}
			if n := strings.Count(program[e.file], e.from); n != 1 {
				t.Errorf("mutant %s: its lines stand %d times in %s:\n%s", m.name, n, e.file, e.from)
			}
			program[e.file] = strings.Replace(program[e.file], e.from, e.to, 1)
		}
	}
	wanted := os.Getenv("ATLASBRIDGE_MUTANTS")
	if wanted == "" || t.Failed() {
		return
	}
	suite := buildMutants(t, program)
	for _, m := range mutants {
		if wanted != "all" && !slices.Contains(strings.Fields(wanted), m.name) {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			for _, switched := range []string{"", m.name} {
				cmd := exec.Command(suite, "-test.run", m.test, "-test.timeout=3m")
				cmd.Env = append(os.Environ(), "TEST_MUTANT="+switched, "ATLASBRIDGE_MUTANTS=")
				out, err := cmd.CombinedOutput()
				wantFail := switched != ""
				if (err != nil) != wantFail || matches(`no tests to run|--- SKIP`, string(out)) {
					t.Errorf("%s, with mutant %q (%s): %v\n%.2000s", m.test, switched, m.promise, err, out)
				}
			}
		})
	}
}

// buildMutants builds the tests with this program, and returns their path.
func buildMutants(t *testing.T, program map[string]string) (suite string) {
	t.Helper()
	needTool(t, "go")
	dir := t.TempDir()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	program["mutants.go"] = "package main\n\nimport \"os\"\n\nvar switchedOn = os.Getenv(\"TEST_MUTANT\")\n\n" +
		"func mutant(name string) bool { return name == switchedOn }\n"
	replace := map[string]string{}
	for file, text := range program {
		replace[filepath.Join(here, file)] = filepath.Join(dir, file)
		makeFile(t, text, dir, file)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	makeFile(t, string(overlay), dir, "overlay.json")
	suite = filepath.Join(dir, "suite")
	build := exec.Command("go", "test", "-c", "-overlay", filepath.Join(dir, "overlay.json"), "-o", suite, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the mutants: %v\n%.2000s", err, out)
	}
	return suite
}
