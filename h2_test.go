package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A call of megabytes is read in a moment, whatever its lines and arguments are.
func TestLongCall(t *testing.T) {
	const size = 3 << 20
	lines := strings.Repeat("a line of the file that is written\n", size/35)
	others := strings.Repeat("a line that differs from the other\n", size/35)
	many := map[string]string{"command": "ls"}
	for i := range size / 15 {
		many[strconv.Itoa(i)] = "x"
	}
	for _, test := range []struct {
		name, tool string
		arguments  map[string]string
	}{
		{"written", "Write", map[string]string{"content": lines}},
		{"one line", "Write", map[string]string{"content": strings.Repeat("x", size)}},
		{"empty lines", "Write", map[string]string{"content": strings.Repeat("\n", size)}},
		{"all changed", "Edit", map[string]string{"old_string": others, "new_string": lines}},
		{"end changed", "Edit", map[string]string{"old_string": lines, "new_string": lines + "x"}},
		{"every other line changed", "Edit", map[string]string{"old_string": strings.Repeat("a\nb\n", size/4),
			"new_string": strings.Repeat("a\nc\n", size/4)}},
		{"many arguments", "Bash", many},
	} {
		t.Run(test.name, func(t *testing.T) {
			input, err := json.Marshal(test.arguments)
			if err != nil {
				t.Fatal(err)
			}
			h := &hook{Tool: test.tool, Input: input}
			begun := time.Now()
			call := h.call()
			if took := time.Since(begun); took > 20*time.Second {
				t.Errorf("reading it took %s", took)
			}
			if call.full == "" {
				t.Error("nothing is told of it")
			}
		})
	}
}

// What follows -- is an argument, never a flag, for every command.
func TestDashes(t *testing.T) {
	for _, s := range commands() {
		t.Run(s.name, func(t *testing.T) {
			errs, err := os.Create(filepath.Join(t.TempDir(), "errs"))
			if err != nil {
				t.Fatal(err)
			}
			defer errs.Close()
			want := []string{"-x", "--json", "--", "-h"}
			c := &command{name: s.name, args: append([]string{"--"}, want...), stdout: errs, stderr: errs}
			o, code := c.options()
			if o != nil {
				if !slices.Equal(o.args, want) {
					t.Errorf("arguments %q, want %q", o.args, want)
				}
				return
			}
			said, err := os.ReadFile(errs.Name())
			if err != nil {
				t.Fatal(err)
			}
			if code != exitUsage || !strings.Contains(string(said), `wrong arguments ["-x" "--json" "--" "-h"]`) {
				t.Errorf("exit %d, %s", code, said)
			}
		})
	}
}

// A program that cannot write its output says so and fails.
func TestOutputLost(t *testing.T) {
	t.Setenv("ATLASBRIDGE_HOME", home(t, ""))
	t.Setenv("PATH", t.TempDir()) // no tools
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full here")
	}
	defer full.Close()
	for _, line := range []string{"status --json", "approvals --json", "config --json", "config", "adapters --json",
		"audit verify --json", "doctor --json"} {
		t.Run(line, func(t *testing.T) {
			errs, err := os.Create(filepath.Join(t.TempDir(), "errs"))
			if err != nil {
				t.Fatal(err)
			}
			defer errs.Close()
			if code := run(t.Context(), strings.Fields(line), os.Stdin, full, errs); code != exitFailed {
				t.Errorf("exit %d", code)
			}
			said, err := os.ReadFile(errs.Name())
			if err != nil || !strings.Contains(string(said), "no space left") {
				t.Errorf("it says %q, %v", said, err)
			}
		})
	}
}

// Doctor makes nothing in the current folder when there is no state folder, and still tells what it found.
func TestDoctorWithoutHome(t *testing.T) {
	t.Setenv("ATLASBRIDGE_HOME", home(t, ""))
	t.Setenv("PATH", t.TempDir()) // no tools
	for _, name := range []string{"HOME", "ATLASBRIDGE_HOME", "STORAGE_PATH"} {
		t.Setenv(name, "")
	}
	t.Chdir(t.TempDir())
	code, stdout, _ := cli(t, os.Getenv("ATLASBRIDGE_HOME"), "doctor", "--json")
	if code != exitFailed || !strings.Contains(stdout, "set ATLASBRIDGE_HOME") || !strings.Contains(stdout, "claude") {
		t.Errorf("exit %d, %s", code, stdout)
	}
	if left, err := os.ReadDir("."); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}
