package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRefusedThenMended: a file that was refused because others could reach it is used as soon as the user has done
// what the error says, by the same process.
func TestRefusedThenMended(t *testing.T) {
	needUnix(t)
	for _, row := range []struct {
		name string
		use  func(*Store) error
	}{
		{"audit.lock", func(st *Store) error { return st.Audit().Append(Event{Name: "TEST"}) }},
		{"audit.log", func(st *Store) error { return st.Audit().Append(Event{Name: "TEST"}) }},
		{"poll.lock", func(st *Store) error { _, _, err := st.TryPoll(); return err }},
	} {
		t.Run(row.name, func(t *testing.T) {
			st, err := openStore(filepath.Join(t.TempDir(), "state"))
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(st.Dir, row.name)
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, 0o644); err != nil {
				t.Fatal(err)
			}
			if err := row.use(st); err == nil {
				t.Fatal("not refused while others can reach it")
			}
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := row.use(st); err != nil {
				t.Errorf("mended, and still refused: %v", err)
			}
		})
	}
}

// TestOpenPrivateNoFileWithError: what is refused is no file: nobody can take a closed one for an open one.
func TestOpenPrivateNoFileWithError(t *testing.T) {
	needUnix(t)
	dir := t.TempDir()
	wide := filepath.Join(dir, "wide")
	if err := os.WriteFile(wide, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(wide, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{wide, filepath.Join(dir, "no", "such")} {
		if f, err := openPrivate(path, os.O_RDWR); f != nil || err == nil {
			t.Errorf("openPrivate(%s) = %v, %v; want no file and an error", path, f, err)
		}
	}
}

// TestTextMeetsAQuestion: Enter follows a text only while nothing is asked: a question that comes between the two is not
// answered by it, wherever the text stands.
func TestTextMeetsAQuestion(t *testing.T) {
	line := TTYState{ReadingYes, true, true}
	raw := TTYState{ReadingYes, false, false}
	unknown := TTYState{ReadingUnknown, false, false}
	menu := "Allow access?\r\n❯ 1. Yes\r\n  2. No\r\n"
	for _, row := range []struct {
		name  string
		tty   TTYState
		shows string
		want  string
	}{
		{"echo", line, "$ go on", "\r"},
		{"no echo", line, "$ ", "\r"},
		{"menu below the text", raw, "go on\r\n" + menu + "\x1b[?25l", ""},
		{"menu with the cursor at the text", raw, "go on\r\n" + menu + "\x1b[1;6H", ""},
		{"menu that is not known for one", unknown, "go on\r\n" + strings.ReplaceAll(menu, "1. ", "") + "\x1b[?25l", ""},
		{"yes or no", line, "$ go on\r\nDelete it? (y/n) ", ""},
		{"yes or no in the same line", line, "$ go onDelete it? (y/n) ", ""},
		{"name in the same line", line, "$ go onEnter the name of the branch: ", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := gateBench(t, "x", line, "Go? (y/n) ", "y")
			s.q = nil
			s.det = newDetector(s.adapter, 24, 80, DetectOptions{})
			s.shows("$ ")
			s.gate = newInputGate(&InputRecord{Head: Head{ID: newID()}, SessionID: s.rec.ID, Kind: "text",
				By: "telegram:1001", Text: "go on", Status: "queued"})
			if keys := s.typed(false); keys != "go on" {
				t.Fatalf("types %q", keys)
			}
			s.pty = ptyState{state: row.tty}
			s.shows(row.shows)
			if keys := s.typed(true); keys != row.want {
				t.Errorf("then types %q", keys)
			}
		})
	}
}
