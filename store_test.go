package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// storeAt opens the state in dir and closes it with the test.
func storeAt(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := openStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// storeSession adds an active session and returns its id.
func storeSession(t testing.TB, s *Store) string {
	t.Helper()
	id := newID()
	storeUpdate(t, s, &SessionRecord{Head: Head{ID: id}, Tool: "claude", Args: []string{}, Status: "active", StartedAt: time.Now()})
	return id
}

func storeUpdate(t testing.TB, s *Store, recs ...Record) {
	t.Helper()
	if err := s.Update(func(*View) ([]Record, error) { return recs, nil }); err != nil {
		t.Fatal(err)
	}
}

// storePrompt adds a question that awaits its reply.
func storePrompt(t testing.TB, s *Store, session string, change func(*PromptRecord)) *PromptRecord {
	t.Helper()
	p := &PromptRecord{Head: Head{ID: newID()}, SessionID: session, Type: YesNo, Confidence: "high", Excerpt: "Continue? (y/n)",
		SafeDefault: ref("n"), Signals: []string{"pattern"}, Status: Created, Nonce: newNonce(), CreatedAt: time.Now(),
		ExpiresAt: time.Now().Add(time.Hour)}
	if change != nil {
		change(p)
	}
	storeUpdate(t, s, p)
	for _, to := range []State{Routed, AwaitingReply} {
		if ok, err := s.Move(p.ID, to, nil); !ok || err != nil {
			t.Fatalf("move to %s: %v %v", to, ok, err)
		}
	}
	v, _ := s.View()
	return v.Prompts[p.ID]
}

func TestStoreLife(t *testing.T) {
	dir := t.TempDir()
	s := storeAt(t, dir)
	sid := storeSession(t, s)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	other := storeAt(t, dir)
	near, far := s.Follow(ctx, sid, nil), other.Follow(ctx, sid, nil)
	p := storePrompt(t, s, sid, nil)
	d := Decision{PromptID: shortID(p.ID), SessionID: shortID(sid), Nonce: p.Nonce[:16], Value: "y", By: "telegram:1", UpdateID: 7}
	got, why, err := other.Decide(d, time.Now())
	if err != nil || why != "" || got.Status != ReplyReceived || *got.Value != "y" {
		t.Fatalf("decide: %+v %q %v", got, why, err)
	}
	for _, ch := range []<-chan Record{near, far} {
		for r := range ch {
			if r.(*PromptRecord).Status == ReplyReceived {
				break
			}
		}
	}
	if _, why, _ = s.Decide(d, time.Now()); !strings.Contains(string(why), "already answered") {
		t.Fatal(why)
	}
	for _, to := range []State{Injected, Resolved} {
		if ok, err := s.Move(p.ID, to, nil); !ok || err != nil {
			t.Fatal(to, ok, err)
		}
	}
	if err := s.Trouble(); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(filepath.Join(dir, "state.jsonl"))
	fmt.Printf("%s", b)
	b, _ = os.ReadFile(filepath.Join(dir, "audit.log"))
	fmt.Printf("%s", b)
	out, _ := exec.Command("sh", "-c", "head -3 "+dir+"/audit.log | tail -1 | jq -c 'del(.hash)' | tr -d '\n' | sha256sum").Output()
	fmt.Printf("%s", out)
	for _, args := range [][]string{{"status"}, {"approvals"}, {"logs"}, {"audit", "verify"}, {"audit", "verify", "--json"}, {"status", "--json"}} {
		c := &command{ctx: t.Context(), name: args[0], args: args[1:], stdout: os.Stdout, stderr: os.Stderr,
			getenv: func(k string) string { return map[string]string{"ATLASBRIDGE_HOME": dir}[k] }}
		fmt.Println(c.spec().do(c))
	}
}
