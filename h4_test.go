package main

import (
	"os"
	"path/filepath"
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
