package main

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

/* ===== Commands and configuration ===== */

// cli calls run with a state folder of its own and returns what a shell would see.
func cli(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	in, out, errs := open("stdin"), open("stdout"), open("stderr")
	code = run(t.Context(), args, in, out, errs)
	read := func(f *os.File) string {
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	return code, read(out), read(errs)
}

// configHome points ATLASBRIDGE_HOME at a fresh private folder, clears the settings of the environment and writes
// config.toml when text is not empty.
func configHome(t *testing.T, text string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "home")
	for _, s := range settings(&Config{}) {
		if s.env != "" {
			t.Setenv(s.env, "")
		}
	}
	t.Setenv("ATLASBRIDGE_HOME", dir)
	t.Setenv("NO_COLOR", "1")
	if err := secureDir(dir); err != nil {
		t.Fatal(err)
	}
	if text != "" {
		if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const fakeToken = "123456789:AAFakeTokenForLoopbackTestsOnly0123"

func TestCommandLine(t *testing.T) {
	configHome(t, "")
	for _, test := range []struct {
		args           string
		code           int
		stdout, stderr string // regular expressions; "" nothing at all
	}{
		{"", 2, "", `(?s)atlasbridge runs .* run .* completion `},
		{"help", 0, `(?s)^atlasbridge runs .*atlasbridge help COMMAND\n$`, ""},
		{"-h", 0, "^atlasbridge runs ", ""},
		{"--help", 0, "^atlasbridge runs ", ""},
		{"help run", 0, `(?s)^atlasbridge run \[flags\] <tool>.*--record FILE`, ""},
		{"run -h", 0, `^atlasbridge run \[flags\]`, ""},
		{"status --help", 0, "^atlasbridge status", ""},
		{"config --json -h", 0, "^atlasbridge config", ""},
		{"help help", 0, "^atlasbridge help", ""},
		{"help nothing", 2, "", `^atlasbridge: unknown command "nothing"`},
		{"statsu", 2, "", "^atlasbridge: unknown command \"statsu\"; did you mean `atlasbridge status`\\?\n$"},
		{"docter", 2, "", "`atlasbridge doctor`"},
		{"claude --model opus", 2, "", "to run a tool: atlasbridge run TOOL\n$"},
		{"--frob", 2, "", `unknown command "--frob"`},
		{"stat\x1b[2J", 2, "", `^atlasbridge: unknown command "stat[^\x1b]*\n$`},
		{"config --a\x1b[2J", 2, "", `^atlasbridge: unknown flag --a[^\x1b]*\n$`},
		{"version", 0, `^atlasbridge \S+ go1\S* \w+/\w+\n$`, ""},
		{"--version", 0, `^atlasbridge `, ""},
		{"version now", 2, "", `^atlasbridge: wrong arguments \["now"\]; usage: atlasbridge version`},
		{"run", 2, "", `^atlasbridge: wrong arguments \[\]; usage: atlasbridge run \[flags\] <tool>`},
		{"config --jsn", 2, "", "^atlasbridge: unknown flag --jsn; did you mean `--json`\\?; usage: .*config.*\n$"},
		{"config --json=perhaps", 2, "", `^atlasbridge: .*invalid boolean value`},
		{"config", 0, `(?m)^timeout_seconds +600 +default$`, ""},
		{"completion", 2, "", `usage: atlasbridge completion bash\|zsh\|fish`},
		{"completion tcsh", 2, "", `usage: atlasbridge completion bash\|zsh\|fish`},
		{"completion fish", 0, `complete -c atlasbridge .* -a '.*status`, ""},
		{"debug", 2, "", `usage: atlasbridge debug bundle`},
		{"debug bundel", 2, "", `usage: atlasbridge debug bundle`},
	} {
		code, stdout, stderr := cli(t, strings.Fields(test.args)...)
		if code != test.code || !matches(test.stdout, stdout) || !matches(test.stderr, stderr) {
			t.Errorf("atlasbridge %q: exit %d, want %d\nstdout %q, want %s\nstderr %q, want %s",
				test.args, code, test.code, stdout, test.stdout, stderr, test.stderr)
		}
	}
}

func matches(pattern, text string) bool {
	return pattern == "" && text == "" || pattern != "" && regexp.MustCompile(pattern).MatchString(text)
}

// A terminal has 24 lines of 80 columns.
func TestHelpFitsTheScreen(t *testing.T) {
	configHome(t, "")
	for _, name := range append(commandNames(), "") {
		code, text, stderr := cli(t, strings.Fields("help "+name)...)
		if s := (&command{name: name}).spec(); code != 0 || stderr != "" || name != "" && !strings.Contains(text, s.usage) {
			t.Errorf("help %s: exit %d, %s", name, code, stderr)
		}
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		if len(lines) > 24 {
			t.Errorf("help %s has %d lines", name, len(lines))
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > 80 || strings.TrimRight(line, " ") != line {
				t.Errorf("help %s: too long or blank at its end: %q", name, line)
			}
		}
	}
}

func TestOptions(t *testing.T) {
	for _, test := range []struct {
		args string
		want string // positional arguments
		on   []string
	}{
		{"run --quiet claude --quiet -p x", "claude --quiet -p x", []string{"quiet"}},
		{"run --name a -- claude --stream", "claude --stream", []string{"name=a"}},
		{"run -timeout 90s claude", "claude", []string{"timeout=1m30s"}},
		{"logs --session 12 --tail", "", []string{"session=12", "tail"}},
		{"lab a.cast --json b.cast", "a.cast b.cast", []string{"json"}},
		{"lab a.cast -- --json", "a.cast --json", nil},
		{"audit verify --json", "verify", []string{"json"}},
		{"answer 12345678 -- -x", "12345678 -- -x", nil},
	} {
		words := strings.Fields(test.args)
		c := &command{name: words[0], args: words[1:], stdout: os.Stdout, stderr: os.Stderr}
		if words[0] == "answer" { // takes exactly two arguments, whatever they look like
			c.args = []string{"12345678", "-x"}
			test.want = "12345678 -x"
		}
		o, code := c.options()
		if o == nil {
			t.Errorf("%s: exit %d", test.args, code)
			continue
		}
		if got := strings.Join(o.args, " "); got != test.want {
			t.Errorf("%s: arguments %q, want %q", test.args, got, test.want)
		}
		for _, f := range test.on {
			name, value, _ := strings.Cut(f, "=")
			if value == "" && !o.on(name) || value != "" && o.text(name) != value {
				t.Errorf("%s: --%s is %q", test.args, name, o.text(name))
			}
		}
	}
}

func TestNearest(t *testing.T) {
	words := []string{"run", "setup", "doctor", "status", "approvals", "answer", "logs", "audit"}
	for in, want := range map[string]string{"rnu": "run", "stats": "status", "app": "approvals", "log": "logs",
		"Audit": "audit", "anwser": "answer", "stauts": "status", "kubernetes": "", "x": "", "": ""} {
		if got := nearest(in, words); got != want {
			t.Errorf("nearest(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestTableFits(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := &command{stdout: f, getenv: os.Getenv}
	c.table([][]string{{"ID", "TEXT"}, {"é", "short"}, {"22", strings.Repeat("x", 100)}})
	text, _ := os.ReadFile(f.Name())
	want := "ID  TEXT\né   short\n22  " + strings.Repeat("x", 75) + "…\n"
	if string(text) != want {
		t.Errorf("table printed\n%s, want\n%s", text, want)
	}
}

// The left column of the README's tables is what the program knows.
func TestREADME(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	readme := string(text)
	for _, s := range commands() {
		row := fmt.Sprintf("| `%s` | %s |\n", strings.ReplaceAll(s.usage, "|", "\\|"), s.summary)
		if !strings.Contains(readme, row) {
			t.Errorf("README.md lacks the row %q", row)
		}
	}
	rows := regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| ([^|]*) \\| ([^|]*) \\|$").FindAllStringSubmatch(readme, -1)
	var got, want []string
	for _, r := range rows {
		got = append(got, strings.Join(r[1:], " "))
	}
	for _, s := range settings(&Config{}) {
		def, env := "", ""
		if s.def != "" && s.key != "telegram.chat_id" {
			def = "`" + s.def + "`"
		}
		if s.env != "" {
			env = "`" + s.env + "`"
		}
		want = append(want, strings.Join([]string{s.key, def, env}, " "))
	}
	if !slices.Equal(got, want) {
		t.Errorf("README.md's settings are\n%q, the code's\n%q", got, want)
	}
	if n := strings.Count(readme, "\n"); n > 200 {
		t.Errorf("README.md has %d lines", n)
	}
}

// readmeBlocks are the fenced blocks of the README in that language.
func readmeBlocks(t *testing.T, language string) []string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for _, m := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// The README's transcripts are what happens.
func TestREADMETranscripts(t *testing.T) {
	blocks := readmeBlocks(t, "console")
	if len(blocks) != 2 {
		t.Fatalf("README.md has %d transcripts", len(blocks))
	}
	dir := configHome(t, "")
	shown := strings.Split(strings.TrimSpace(blocks[0]), "\n")
	x := bridge(t, dir, "run", "bash", "-c", `read -p "Continue? (y/n) " a; echo got $a`)
	x.sees("Continue?")
	var id string
	for deadline := time.Now().Add(patience); id == "" && time.Now().Before(deadline); {
		_, stdout, _ := cli(t, "approvals", "--json")
		var open []PromptRecord
		if json.Unmarshal([]byte(stdout), &open) == nil && len(open) == 1 {
			id = shortID(open[0].ID)
		}
	}
	blank := regexp.MustCompile(`[0-9a-f]{8}`)
	var got string
	for _, args := range [][]string{{"approvals"}, {"answer", id, "y"}} {
		code, stdout, stderr := cli(t, args...)
		if code != 0 {
			t.Errorf("%q: exit %d, %s", args, code, stderr)
		}
		got += "$ atlasbridge " + strings.Join(args, " ") + "\n" + stdout + stderr
	}
	if want := blank.ReplaceAllString(blocks[1], "#"); blank.ReplaceAllString(got, "#") != want {
		t.Errorf("what happens is\n%s, in the README\n%s", got, blocks[1])
	}
	x.sees("got y")
	x.exits(0)
	screen := strings.ReplaceAll(x.scr.Text(), "\n", "")
	if want := strings.Join(shown[1:], ""); screen != want {
		t.Errorf("the screen shows\n%s, in the README\n%s", screen, want)
	}
}

// The README's shell lines accept a log as it is written, and nothing else.
func TestREADMEVerifiesTheLog(t *testing.T) {
	for _, need := range []string{"bash", "jq", "sha256sum"} {
		if _, err := exec.LookPath(need); err != nil {
			t.Skip(need + " is not installed")
		}
	}
	blocks := readmeBlocks(t, "sh")
	if len(blocks) != 1 {
		t.Fatalf("README.md has %d shell blocks", len(blocks))
	}
	configHome(t, "")
	user := t.TempDir()
	t.Setenv("HOME", user)
	t.Setenv("ATLASBRIDGE_HOME", "")
	st, err := openStore(filepath.Join(user, ".atlasbridge"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for i := range 3 {
		e := Event{Name: "TOOL_CALL", SessionID: "s", Fields: []Field{{"text", "<é>\u2028\x7f\\n \" \n"}, {"n", int64(i)}}}
		if err := st.Audit().Append(e); err != nil {
			t.Fatal(err)
		}
	}
	_, head, err := st.Audit().Head()
	if err != nil {
		t.Fatal(err)
	}
	check := func() string {
		out, err := exec.Command("bash", "-c", blocks[0]).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if out := check(); out != "up to here: "+head+"\n" {
		t.Errorf("the untouched log: %s, want head %s", out, head)
	}
	path := filepath.Join(user, ".atlasbridge", "audit.log")
	text, _ := os.ReadFile(path)
	os.WriteFile(path, []byte(strings.Replace(string(text), `"n":1`, `"n":7`, 1)), 0o600)
	if out := check(); !strings.HasPrefix(out, "BAD: ") {
		t.Errorf("the changed log: %s", out)
	}
}

func TestTOMLAccepted(t *testing.T) {
	for text, want := range map[string]string{ // keys and values as JSON
		"":                               "",
		"# only a comment\n\t \n":        "",
		"a = 1":                          "a 1",
		"a=1000 # c":                     "a 1000",
		"a = -0\r\nb = 2\r\n":            "a -0 b 2",
		"a = 9223372036854775807":        "a 9223372036854775807",
		"a = 0.65":                       "a 0.65",
		"a = 5e3#c":                      "a 5e3",
		"a = true\nb = false":            "a true b false",
		`a = ""`:                         `a ""`,
		`a = "x # y"`:                    `a "x # y"`,
		`a = "\b\t\n\f\r\"\\é"`:          `a "\b\t\n\f\r\"\\é"`,
		`a = 'C:\x "y"'`:                 `a "C:\\x \"y\""`,
		"a = ''":                         `a ""`,
		"a = []":                         "a []",
		"a = [ 1 , 2 ] # c":              "a [ 1 , 2 ]",
		"[t]\na = 1\n[ u-2 ] # c\na = 2": "t.a 1 u-2.a 2",
		"1234 = 1\n-_ = 2":               "1234 1 -_ 2",
		"a = 1\n[a-]\na = 2":             "a 1 a-.a 2",
	} {
		entries, err := parseTOML(text, nil)
		var got []string
		inOrder := func(a, b string) int { return entries[a].line - entries[b].line }
		for _, key := range slices.SortedFunc(maps.Keys(entries), inOrder) {
			if entries[key].value != nil {
				got = append(got, key, string(entries[key].value))
			}
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("parseTOML(%q) = %q, %v, want %q", text, got, err, want)
		}
	}
}

// rejected is TOML outside of the subset, and what is no TOML at all.
var rejected = []string{
	"a", "a =", "= 1", "a = # 1", "a 1", "a : 1", "a = 1 2", "a = 1 b = 2", "a = 1,", "[a", "[]", "a]", "[a] b = 1",
	"[[a]]", "[a.b]", "a.b = 1", `"a" = 1`, "'a' = 1", "é = 1", "a = {b = 1}", "a = 1\na = 2", "[t]\n[t]",
	"[t]\na = 1\n[u]\n[t]\nb = 1", "a = 01", "a = +0x1", "a = 0X1", "a = 0xg", "a = 1_", "a = _1", "a = 1__0", "a = 0x_1",
	"a = 1.", "a = .5", "a = 1._5", "a = 1.5_", "a = 01.5", "a = 1e", "a = 1e1.5",
	"a = Inf", "a = NaN", "a = infinity", "a = True", "a = yes", "a = truefalse", "a = 1979-05-27", "a = 07:32:00",
	`a = "x`, `a = 'x`, `a = "x\"`, `a = "\x41"`, `a = "\e"`, `a = "\a"`, `a = "\'"`, `a = "\101"`, `a = "\uD800"`,
	`a = "\U00110000"`, `a = "\u12"`, `a = "\ "`, `a = """x"""`, `a = '''x'''`, "a = \"\"\"\nx\"\"\"", "a = \"x\ty\x01\"",
	"a = \"x\x7f\"", "a = 'x\x00'", "# \x01", "a = \"\xff\"", "a = 1\rb = 2", "a = 1\r", "\ufeffa = 1", "a = [1, 2",
	"a = [1 2]", "a = [,]", "a = [1,,2]", "a = [\n1]", "a = [1]]", "a = [1.5]", "a = [[1]]", `a = ["x", 'y']`,
	`a = "x" "y"`, `a = "x"y`, "a = 'x''y'", "a\u00a0= 1",
	"a = 1\v", "[t] [u]", "a = \\", "a = 0x", "a = -", "a = +", "a = 1 # \x7f", "a = 0b2", "a = 0o8",
	"a = 0xff", "a = +1", "a = 1_000",
	"a = nan", "a = -inf", `a = "\u00e9"`, `a = "\/"`, "a = \"x\ty\"", "a = [1,]", "a = null",
}

func TestTOMLRejected(t *testing.T) {
	for _, text := range rejected {
		_, err := parseTOML("# first\n"+text, nil)
		if err == nil {
			t.Errorf("parseTOML(%q) accepted it", text)
		} else if m := regexp.MustCompile(`^config\.toml:([0-9]+): [^\n]+$`).FindStringSubmatch(err.Error()); m == nil ||
			m[1] == "1" || hintOf(err) == "" {
			t.Errorf("parseTOML(%q): %q without its line or a remedy", text, err)
		}
	}
}

// What is accepted means what another implementation of TOML says it means.
func TestTOMLAgainstPython(t *testing.T) {
	if exec.Command("python3", "-c", "import tomllib").Run() != nil {
		t.Skip("python3 with tomllib is not installed")
	}
	texts := slices.Clone(rejected)
	for a := range strings.FieldsSeq(`1 +1 -0 0 00 1_0 0x1F 1.5 1. .5 1e3 1E-3 1.5e+03 inf nan true tru
		"" "a" "\u0041\t" "\t\"" "\x41" '' '\' [] [1,] [1,2] [-1] [[1],[]] 1979-05-27 {} "a a`) {
		for _, b := range []string{"", " ", "# c", ",", "]", "1", `"`, "'", "\r", "\t#"} {
			for _, key := range []string{"k = ", "[t]\nk=", "k.j = ", "k=1\nk = "} {
				texts = append(texts, key+a+b)
			}
		}
	}
	in, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", "-c", `
import json, sys, tomllib
def read(text):
    try: return tomllib.loads(text)
    except Exception: return None
print(json.dumps([read(t) for t in json.load(sys.stdin)], default=str))`)
	cmd.Stdin = strings.NewReader(string(in))
	out, err := cmd.Output()
	var answers []map[string]any
	out = regexp.MustCompile(`-?\b(NaN|Infinity)\b`).ReplaceAll(out, []byte(`"$0"`))
	if err := cmp.Or(err, json.Unmarshal(out, &answers)); err != nil {
		t.Fatalf("python3: %v", err)
	}
	accepted := 0
	for i, text := range texts {
		entries, err := parseTOML(text, nil)
		if err != nil {
			continue
		}
		accepted++
		for key, e := range entries {
			want, got := any(answers[i]), any(nil)
			for name := range strings.SplitSeq(strings.Trim(key, "[]"), ".") {
				m, _ := want.(map[string]any)
				want = m[name]
			}
			if e.value != nil && (json.Unmarshal(e.value, &got) != nil || !reflect.DeepEqual(got, want)) {
				t.Errorf("%q: %s is %s here, %v in tomllib", text, key, e.value, want)
			}
		}
	}
	if accepted < 80 {
		t.Errorf("only %d of %d texts were accepted", accepted, len(texts))
	}
}

func TestConfig(t *testing.T) {
	telegram := "[telegram]\nbot_token = '" + fakeToken + "'\nchat_id = 1001\nallowed_users = [1001, 1002]\n"
	env := func(pairs ...string) func(string) string {
		return func(name string) string {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i] == name {
					return pairs[i+1]
				}
			}
			return ""
		}
	}
	for _, test := range []struct {
		file  string
		env   []string
		flags map[string]string
		want  map[string]string // key → value and origin
	}{
		{"", nil, nil, map[string]string{"channel": `"local" default`, "timeout_seconds": "600 default",
			"detection_threshold": "0.65 default", "telegram.allowed_users": "[] default", "notify_idle": "true default"}},
		{telegram, nil, nil, map[string]string{"channel": `"telegram" default`, "telegram.chat_id": "1001 config.toml:3",
			"telegram.allowed_users": "[1001, 1002] config.toml:4", "telegram.bot_token": `"123456789:…" config.toml:2`}},
		{"timeout_seconds = 90\n" + telegram, []string{"PERMISSION_TIMEOUT_SEC", "60", "ALLOWED_USER_IDS", " 7, 8 ,"},
			map[string]string{"timeout_seconds": "120"}, map[string]string{"timeout_seconds": "120 flag",
				"permission_timeout_seconds": "60 environment PERMISSION_TIMEOUT_SEC",
				"telegram.allowed_users":     "[7, 8] environment ALLOWED_USER_IDS"}},
		{"[stream]\nmax_chars = 1000", []string{"OUTPUT_MAX_CHARS", "2000", "STRIP_ANSI", "false", "LOG_LEVEL", "DEBUG"}, nil,
			map[string]string{"stream.max_chars": "2000 environment OUTPUT_MAX_CHARS",
				"stream.strip_ansi": "false environment STRIP_ANSI", "log_level": `"DEBUG" environment LOG_LEVEL`}},
		{"", []string{"TELEGRAM_BOT_TOKEN", fakeToken, "TELEGRAM_CHAT_ID", "-1005", "ALLOWED_USER_IDS", "1"},
			map[string]string{"channel": "local"}, map[string]string{"channel": `"local" flag`,
				"telegram.chat_id": "-1005 environment TELEGRAM_CHAT_ID"}},
		{"stuck_timeout_seconds = 3", nil, nil, map[string]string{"stuck_timeout_seconds": "3 config.toml:1"}},
		{"[telegram]\napi_base = 'http://127.0.0.1:8090'", nil, nil,
			map[string]string{"telegram.api_base": `"http://127.0.0.1:8090" config.toml:2`}},
		{"", []string{"TELEGRAM_API_BASE", "http://[::1]:1/x"}, nil,
			map[string]string{"telegram.api_base": `"http://[::1]:1/x" environment TELEGRAM_API_BASE`}},
	} {
		cfg, err := loadConfig(configHome(t, test.file), env(test.env...), test.flags)
		if err != nil {
			t.Errorf("%q %q: %v", test.file, test.env, err)
			continue
		}
		for _, s := range cfg.inForce {
			if want, ok := test.want[s.Key]; ok && want != string(s.Value)+" "+s.Origin {
				t.Errorf("%q %q: %s is %s %s, want %s", test.file, test.env, s.Key, s.Value, s.Origin, want)
			}
		}
	}
	cfg, err := loadConfig(configHome(t, "echo_suppression_ms = 250.5\n"+telegram), env(), nil)
	if err != nil || cfg.EchoWindow != 250500*time.Microsecond || cfg.Token != fakeToken || cfg.ChatID != 1001 ||
		cfg.SafeDefaults[YesNo] != "n" || cfg.Stuck != 2*time.Second || !slices.Equal(cfg.Users, []int64{1001, 1002}) {
		t.Errorf("loadConfig = %+v, %v", cfg, err)
	}
}

func TestConfigRejected(t *testing.T) {
	token := "[telegram]\nbot_token = '" + fakeToken + "'\n"
	for _, test := range []struct{ file, env, want string }{
		{"timeout_secnds = 1", "", "config.toml:1: unknown key timeout_secnds; did you mean `timeout_seconds`?"},
		{"\n[telegrm]\nchat_id = 1", "", "config.toml:3: unknown key telegrm.chat_id"},
		{"[stream]\nenabled = 1", "", "config.toml:2: stream.enabled must be true or false"},
		{"timeout_seconds = 0", "", "config.toml:1: timeout_seconds must be between 1 and 86400"},
		{"timeout_seconds = nan", "", "config.toml:1: not  name = value"},
		{"timeout_seconds = 1e999", "", "must be a number"},
		{"timeout_seconds = '600'", "", "must be a number"},
		{"buffer_size_bytes = 4096.5", "", "must be a number, and a whole one"},
		{"detection_threshold = 0.5", "", "between 0.6 and 0.99"},
		{"[stream]\nmax_chars = 5000", "", "between 100 and 4096"},
		{"channel = 'slack'", "", "must be telegram or local"},
		{"channel = 'telegram'", "", "config.toml:1: channel telegram needs telegram.bot_token"},
		{"log_level = 'loud'", "", "must be debug, info, warn or error"},
		{"[safe_defaults]\nyes_no = 'y'", "", "config.toml:2: safe_defaults.yes_no can only be \"n\""},
		{"[safe_defaults]\nyes_no = 'Y'", "", "can only be"},
		{"[safe_defaults]\nfree_text = \"a\\rb\"", "", "none of them a control character"},
		{"[safe_defaults]\nmultiple_choice = 'y'", "", "number from 1 to 9"},
		{token, "", "config.toml:2: a bot token needs telegram.chat_id"},
		{token + "chat_id = 5", "", "telegram.allowed_users is empty"},
		{token + "chat_id = 5\nallowed_users = []", "", "telegram.allowed_users is empty"},
		{token + "chat_id = 5\nallowed_users = ['bob']", "", "config.toml:4: not  name = value"},
		{token + "chat_id = 5\nallowed_users = [1.5]", "", "a [list] of whole numbers"},
		{token + "chat_id = 5\nallowed_users = [-1]", "", "must be between 1"},
		{token + "chat_id = 5\nallowed_users = 5", "", "numeric ids"},
		{token + "chat_id = '@bob'", "", "config.toml:3: telegram.chat_id must be a number"},
		{"[telegram]\nbot_token = 'secretsecret'", "", "must be a bot token"},
		{"[telegram]\napi_base = 'http://example.com'", "", "that begins with https://"},
		{"[telegram]\napi_base = 'http://127.0.0.1.example.com'", "", "that begins with https://"},
		{"[telegram]\napi_base = 'https://user:pw@api.telegram.org'", "", "must be a URL that begins"},
		{"[telegram]\napi_base = 'ftp://127.0.0.1'", "", "that begins with https://"},
		{"", "ALLOWED_USER_IDS=@bob", "environment ALLOWED_USER_IDS: telegram.allowed_users"},
		{"", "PERMISSION_TIMEOUT_SEC=soon", "environment PERMISSION_TIMEOUT_SEC: permission_timeout_seconds must be"},
		{"", "TELEGRAM_BOT_TOKEN=" + fakeToken, "config.toml: a bot token needs telegram.chat_id"},
	} {
		dir := configHome(t, test.file)
		name, value, _ := strings.Cut(test.env, "=")
		if name != "" {
			t.Setenv(name, value)
		}
		_, err := loadConfig(dir, os.Getenv, nil)
		if err == nil || !strings.Contains(err.Error(), test.want) || hintOf(err) == "" ||
			strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), fakeToken) {
			t.Errorf("%q %q: %v (hint %q), want %q", test.file, test.env, err, hintOf(err), test.want)
		}
		if code, _, stderr := cli(t, "config"); code != 1 || !strings.HasPrefix(stderr, "atlasbridge: ") ||
			!strings.Contains(stderr, "\natlasbridge: hint: ") {
			t.Errorf("%q %q: config exits with %d, %q", test.file, test.env, code, stderr)
		}
	}
	_, err := loadConfig(configHome(t, ""), func(string) string { return "" }, map[string]string{"timeout_seconds": "0"})
	if err == nil || !strings.HasPrefix(err.Error(), "flag: timeout_seconds must be between") {
		t.Errorf("timeout_seconds 0 as flag: %v", err)
	}
}

func TestConfigFileIsPrivate(t *testing.T) {
	dir := configHome(t, "timeout_seconds = 60\n")
	path := filepath.Join(dir, "config.toml")
	load := func() error {
		_, err := loadConfig(dir, func(string) string { return "" }, nil)
		return err
	}
	for mode, ok := range map[fs.FileMode]bool{0o600: true, 0o400: true, 0o640: false, 0o604: false, 0o620: false} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		if err := load(); (err == nil) != ok || err != nil && !strings.Contains(hintOf(err), "chmod 600 ") {
			t.Errorf("mode %o: %v, hint %q", mode, err, hintOf(err))
		}
	}
	os.Chmod(path, 0o600)
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if load() == nil {
		t.Error("a symbolic link was followed")
	}
	os.Remove(path)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if load() == nil {
		t.Error("a folder was read")
	}
	os.Remove(path)
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	os.WriteFile(path, nil, 0o600)
	os.Chown(path, 65534, 65534)
	if load() == nil {
		t.Error("another user's file was read")
	}
}

func TestSecureDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := secureDir(dir); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("made as %v, %v", info.Mode(), err)
	}
	if err := secureDir(dir); err != nil {
		t.Errorf("the second time: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	file := filepath.Join(t.TempDir(), "file")
	os.Symlink(dir, link)
	os.WriteFile(file, nil, 0o600)
	for _, bad := range []string{link, filepath.Join(file, "x")} {
		if err := secureDir(bad); err == nil || hintOf(err) == "" {
			t.Errorf("secureDir(%s) = %v", bad, err)
		}
	}
	os.Chmod(dir, 0o750)
	if err := secureDir(dir); err == nil {
		t.Error("a folder that the group can enter was accepted")
	}
}

func TestStateDir(t *testing.T) {
	here, _ := os.Getwd()
	for _, test := range []struct{ home, atlas, storage, want string }{
		{"/home/u", "", "", "/home/u/.atlasbridge"},
		{"/home/u", "", "/data", "/data"},
		{"/home/u", "/x/../y", "/data", "/y"},
		{"/home/u", "", "./claude_data", filepath.Join(here, "claude_data")},
	} {
		t.Setenv("HOME", test.home)
		got, err := stateDir(func(name string) string {
			return map[string]string{"ATLASBRIDGE_HOME": test.atlas, "STORAGE_PATH": test.storage}[name]
		})
		if err != nil || got != test.want {
			t.Errorf("stateDir(%+v) = %s, %v", test, got, err)
		}
	}
}

func TestChildEnv(t *testing.T) {
	cfg := &Config{Dir: "/state", Token: fakeToken}
	env := []string{"PATH=/bin", "ATLASBRIDGE_TOKEN=x", "ATLASBRIDGE_HOME=/old", "ATLASBRIDGE_SESSION=outer",
		"TELEGRAM_BOT_TOKEN=" + fakeToken, "TELEGRAM_CHAT_ID=5", "telegram_x=1", "COPY=a" + fakeToken + "b",
		"ATLAS=1", "EMPTY=", "A=b=c"}
	want := []string{"PATH=/bin", "ATLAS=1", "EMPTY=", "A=b=c", "ATLASBRIDGE_SESSION=s1", "ATLASBRIDGE_HOME=/state"}
	before := slices.Clone(env)
	if got := childEnv(env, cfg, "s1"); !slices.Equal(got, want) || !slices.Equal(env, before) {
		t.Errorf("childEnv = %q, want %q", got, want)
	}
	if got := childEnv([]string{"A=", "B=x"}, &Config{Dir: "/s"}, "1"); len(got) != 4 {
		t.Errorf("without a token childEnv = %q", got)
	}
}

func TestLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "fresh")
	log, err := openLog(dir, "warn")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("too low")
	log.Warn("sending "+fakeToken, "err", errors.New("POST /bot"+fakeToken), "n", 3, "line", "a\nb\x1b",
		slog.Group("g", "token", fakeToken))
	text, _ := os.ReadFile(filepath.Join(dir, "atlasbridge.log"))
	if strings.Contains(string(text), "AAFake") || !matches(`^{[^\n]*"level":"WARN"[^\n]*}\n$`, string(text)) {
		t.Errorf("log holds %q", text)
	}
	if _, err := openLog(dir, "loud"); err == nil {
		t.Error("level loud was accepted")
	}
}

// A full log is put aside, and nothing is lost but what the second rotation takes away.
func TestLogRotation(t *testing.T) {
	dir := configHome(t, "")
	path := filepath.Join(dir, "atlasbridge.log")
	line := strings.Repeat("x", 1<<10-1) + "\n"
	for range 2*logLimit/len(line) - 10 {
		if n, err := logFile(dir).Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	total := 0
	for _, name := range []string{path, path + ".1"} {
		info, err := os.Stat(name)
		if err != nil || info.Size() > logLimit+1024 || info.Size()%1024 != 0 || info.Mode().Perm() != 0o600 {
			t.Fatalf("%s: %v, %v", name, info, err)
		}
		total += int(info.Size()) / len(line)
	}
	if want := 2*logLimit/len(line) - 10; total != want {
		t.Errorf("%d lines kept, want %d", total, want)
	}
}

func TestDoctor(t *testing.T) {
	configHome(t, "timeout_seconds = 0")
	code, stdout, _ := cli(t, "doctor", "--json")
	var report struct {
		Checks []struct {
			Name, Detail, Remedy string
			OK                   bool
		}
		OK bool
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 1 || report.OK || len(report.Checks) < 4 {
		t.Fatalf("doctor --json: exit %d, %v, %s", code, err, stdout)
	}
	k := report.Checks[0]
	if k.Name != "config" || k.OK || !strings.Contains(k.Detail, "config.toml:1") || k.Remedy == "" {
		t.Errorf("the config check is %+v", k)
	}
	dir := configHome(t, "")
	if code, stdout, _ = cli(t, "doctor"); code != 0 || strings.Contains(stdout, "FAIL") {
		t.Errorf("doctor on a fresh folder: exit %d\n%s", code, stdout)
	}
	os.WriteFile(filepath.Join(dir, "audit.log"), nil, 0o644)
	os.Chmod(filepath.Join(dir, "audit.log"), 0o644)
	code, stdout, _ = cli(t, "doctor")
	if code != 1 || !matches(`(?s)FAIL +permissions .*audit.log.*→ .*chmod -R go= /`, stdout) {
		t.Errorf("doctor with a file that others can read: exit %d\n%s", code, stdout)
	}
}

func TestVersions(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{{"1.9.0", "1.10.0", true}, {"1.10.0", "1.9.0", false}, {"2.1.300", "2.1", false}, {"2.0.9", "2.1", true},
		{"2", "2", false}, {"2", "", false}, {"", "2", false}} {
		if got := versionLess(test.a, test.b); got != test.want {
			t.Errorf("versionLess(%s, %s) = %v", test.a, test.b, got)
		}
	}
}

func TestAdapters(t *testing.T) {
	configHome(t, "")
	bin := t.TempDir()
	t.Setenv("PATH", bin+":/bin:/usr/bin")
	t.Setenv("TELEGRAM_CHAT_ID", "")
	script := "#!/bin/sh\n[ -z \"$TELEGRAM_BOT_TOKEN\" ] && echo '9999.1.2 (Claude Code)'\n"
	if err := os.WriteFile(filepath.Join(bin, "claude"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	code, stdout, _ := cli(t, "adapters", "--json")
	var list []tool
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || code != 0 {
		t.Fatalf("adapters --json: %d, %v, %s", code, err, stdout)
	}
	i := slices.IndexFunc(list, func(x tool) bool { return x.Name == "claude" })
	if i < 0 || list[i].Version != "9999.1.2" || list[i].Path != filepath.Join(bin, "claude") || list[i].Warning == "" {
		t.Errorf("claude is %+v", list)
	}
}

func TestBundle(t *testing.T) {
	dir := configHome(t, "[telegram]\nbot_token = '"+fakeToken+"'\nchat_id = 7\nallowed_users = [7]\n")
	t.Setenv("PATH", t.TempDir()) // no tools
	write := func(name, text string) { os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600) }
	write("state.jsonl", `{"v":1,"rec":"prompt","id":"p1","excerpt":"rm the-excerpt","value":"the-answer",`+
		`"choices":[{"label":"the-choice"}],"nonce":"the-nonce","status":"resolved","telegram_msg_id":17}`+"\nthe-torn")
	write("audit.log", `{"seq":1,"event":"PROMPT_RESOLVED","excerpt":"the-excerpt","value":"the-answer"}`+"\n")
	write("atlasbridge.log", `{"level":"ERROR","msg":"calling `+fakeToken+`"}`+"\n")
	write("other.txt", "the-stranger")
	for _, full := range []bool{false, true} {
		out := filepath.Join(t.TempDir(), "b.tar.gz")
		args := []string{"debug", "bundle", "--output", out}
		if full {
			args = append(args, "--full")
		}
		code, stdout, stderr := cli(t, args...)
		info, err := os.Stat(out)
		if code != 0 || err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("%q: exit %d, %v, %v, %s", args, code, info, err, stderr)
		}
		files := untar(t, out)
		names := slices.Sorted(maps.Keys(files))
		want := []string{"about.json", "atlasbridge.log", "audit.log", "state.jsonl"}
		if !slices.Equal(names, want) || !strings.Contains(stdout, "state.jsonl") {
			t.Errorf("the bundle holds %q, want %q", names, want)
		}
		all := strings.Join(slices.Collect(maps.Values(files)), "\n")
		for _, never := range []string{"AAFake", "the-nonce", "the-torn", "the-stranger"} {
			if strings.Contains(all, never) {
				t.Errorf("full %v: the bundle holds %s:\n%s", full, never, all)
			}
		}
		for _, sometimes := range []string{"the-excerpt", "the-answer", "the-choice"} {
			if strings.Contains(all, sometimes) != full {
				t.Errorf("full %v: %s is wrongly there or not", full, sometimes)
			}
		}
		for _, always := range []string{`"status":"resolved"`, `"telegram_msg_id":17`, "PROMPT_RESOLVED", `"123456789:…"`} {
			if !strings.Contains(all, always) {
				t.Errorf("full %v: the bundle lacks %s:\n%s", full, always, all)
			}
		}
		if code, _, stderr := cli(t, args...); code != 1 || !strings.Contains(stderr, "--output") {
			t.Errorf("over an existing file: exit %d, %s", code, stderr)
		}
	}
}

func untar(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for tape := tar.NewReader(zip); ; {
		head, err := tape.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(tape)
		if err != nil || head.Mode != 0o600 {
			t.Errorf("%s: mode %o, %v", head.Name, head.Mode, err)
		}
		files[filepath.Base(head.Name)] = string(text)
	}
}

// The scripts are run by the shells they are for.
func TestCompletion(t *testing.T) {
	for _, test := range []struct{ words, want string }{
		{"st", "status"}, {"completion ", "bash zsh fish"}, {"status --a", "--all"}, {"help do", "doctor"},
		{"run --ad", "--adapter"}, {"audit v", "verify"}, {"debug --f", "--full"}, {"hook x", ""},
	} {
		if _, err := exec.LookPath("bash"); err != nil {
			t.Skip("bash is not installed")
		}
		words := strings.Split("atlasbridge "+test.words, " ")
		_, script, _ := cli(t, "completion", "bash")
		script += `COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _atlasbridge; echo "${COMPREPLY[*]}"`
		out, err := exec.Command("bash", append([]string{"--norc", "-c", script, "-"}, words...)...).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != test.want {
			t.Errorf("%q completes to %q, %v, want %q", test.words, out, err, test.want)
		}
	}
	for _, shell := range []string{"zsh", "fish"} {
		if _, err := exec.LookPath(shell); err != nil {
			t.Logf("%s is not installed", shell)
			continue
		}
		file := filepath.Join(t.TempDir(), "script")
		_, script, _ := cli(t, "completion", shell)
		os.WriteFile(file, []byte(script), 0o600)
		if out, err := exec.Command(shell, "-n", file).CombinedOutput(); err != nil {
			t.Errorf("%s -n: %v\n%s", shell, err, out)
		}
	}
}

// FuzzConfig: no text panics the parser; what is accepted stays what it is with comments and blanks around it.
func FuzzConfig(f *testing.F) {
	for _, text := range rejected {
		f.Add(text)
	}
	f.Add("timeout_seconds = 90\n[telegram]\nallowed_users = [1, 2]\napi_base = \"https://x\"")
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
			e.line += 2
			if fmt.Sprint(e) != fmt.Sprint(again[key]) {
				t.Errorf("%q: %v and with comments %v", text, e, again[key])
			}
		}
		c := &Config{SafeDefaults: map[PromptType]string{}}
		for _, s := range settings(c) {
			e, ok := entries[s.key]
			if ok && s.put(c, e.value) == nil && (c.SafeDefaults[YesNo] == "y" || c.Threshold > 1) {
				t.Errorf("%q: %+v", text, c)
			}
		}
	})
}
