package main

import (
	"context"
	"errors"
	"log/slog"
)

// Channel carries questions to the operator and outcomes back; receiving is the poller's. Methods block,
// obey the pacing and retry what can be retried until ctx ends; an error is final.
type Channel interface {
	// Ask sends the question with its buttons and returns the message's id (0: the channel has none).
	Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error)
	// Settle edits the question's message to what p now says: still waiting (time left), or who answered what and when.
	Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error
	// Notify sends a message that asks nothing, or edits one.
	Notify(ctx context.Context, n Notice) (int64, error)
	Close() error
}

// Notice is a message that asks nothing.
type Notice struct {
	Text      string
	Mono      string // follows Text as a monospace block
	SessionID string // adds the session's label and [SID:…]
	ReplyTo   int64  // message id, 0 none
	Edit      int64  // message to edit instead of sending, 0 none
	Ring      bool   // with sound; notices are silent otherwise
}

// Telegram is the Bot API channel and its poller.
type Telegram struct{}

func newTelegram(cfg *Config, st *Store, log *slog.Logger) (*Telegram, error) {
	return nil, errors.New("stub")
}

func (t *Telegram) Ask(ctx context.Context, p *PromptRecord, s *SessionRecord) (int64, error) {
	return 0, nil
}
func (t *Telegram) Settle(ctx context.Context, p *PromptRecord, s *SessionRecord) error { return nil }
func (t *Telegram) Notify(ctx context.Context, n Notice) (int64, error)                 { return 0, nil }
func (t *Telegram) Close() error                                                        { return nil }

// Poll receives for all sessions as long as this process holds the poll lock, and otherwise waits for it.
// Decisions go to Store.Decide, everything else for a session becomes an InputRecord. It returns when ctx ends.
func (t *Telegram) Poll(ctx context.Context) {}

// Trouble is a sentence about what keeps Telegram from working (wrong token, blocked bot), "" when it works.
func (t *Telegram) Trouble() string { return "" }

// Reload takes over the allowlist and limits of a new configuration.
func (t *Telegram) Reload(cfg *Config) {}

func cmdSetup(c *command) int { return 0 }

func keyBytes(name string, appCursor bool) (string, bool) { return "", false }
