package main

import (
	"context"
	"errors"
	"os"
)

// errLocked is returned by lockFile when another process holds the lock and waiting was not asked for.
var errLocked = errors.New("locked by another process")

// PTY is the child's terminal. Read gives io.EOF when the last process that held it is gone. Methods may be
// called from different goroutines; Close is idempotent and ends a blocked Read.
type PTY interface {
	Read(p []byte) (int, error)
	Write(p []byte) (int, error)
	Close() error
	Resize(Size) error
	State() TTYState  // signal 2; ReadingUnknown where the system cannot tell
	Wait() (code int) // exit status, 128+N when a signal killed it; once
	PID() int
	Signal(sig os.Signal) error     // to the child's foreground process group
	Terminate(done <-chan struct{}) // SIGTERM, 3 s, SIGKILL to its process group; returns early when done closes
}

// Size of a terminal in cells and pixels (struct winsize).
type Size struct{ Rows, Cols, XPixel, YPixel uint16 }

// command is what every command gets: its arguments and surroundings.
type command struct {
	ctx                   context.Context
	name                  string
	args                  []string // after the command's name
	stdin, stdout, stderr *os.File
	getenv                func(string) string
}
