package main

import "errors"

// Audit is the append-only hash chain audit.log.
type Audit struct{}

// Event is one entry before it is chained: Fields keep their order; values are string, bool, nil or integer.
type Event struct {
	Name      string
	SessionID string
	PromptID  string
	Fields    []Field
}

type Field struct {
	Name  string
	Value any
}

// Append chains and writes one entry durably.
func (a *Audit) Append(e Event) error { return errors.New("stub") }

// Head is the last entry's number and hash.
func (a *Audit) Head() (seq int64, hash string, err error) { return 0, "", errors.New("stub") }

func cmdLogs(c *command) int  { return 0 }
func cmdAudit(c *command) int { return 0 }
