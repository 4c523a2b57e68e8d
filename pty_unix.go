//go:build linux || darwin

package main

import (
	"errors"
	"os"
)

// startPTY opens a pseudo-terminal of that size with the host's termios (host may be nil) and starts argv in
// it as session leader with the terminal as its controlling one. Errors wrap exec.ErrNotFound or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	return nil, errors.New("stub")
}

// terminalSize asks the host's terminal.
func terminalSize(f *os.File) (Size, error) { return Size{}, errors.New("stub") }

// rawMode puts the host terminal in raw mode; restore undoes it, any number of times, without flushing type-ahead.
func rawMode(f *os.File) (restore func() error, err error) { return nil, errors.New("stub") }

// resizeSignals delivers a value per change of the host terminal's size; stop ends it.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) { return nil, nil }

// endSignals are the signals that end a session (TERM HUP INT QUIT), and suspend ones (TSTP, CONT), reload (HUP has two lives: see session).
// lockFile takes an exclusive advisory lock on the open file (flock); wait false: errLocked at once if another has it.
func lockFile(f *os.File, wait bool) error { return errors.New("stub") }
func unlockFile(f *os.File) error          { return errors.New("stub") }

// syncDir makes a rename or creation in dir durable.
func syncDir(dir string) error { return errors.New("stub") }

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) int64 { return 0 }

// ownedPrivate tells whether the file or folder is a regular one of the user's own that group and others cannot touch.
func ownedPrivate(path string) error { return errors.New("stub") }

// openPrivate opens or creates a file 0600, never following a symbolic link; it must be the user's own, regular, with one link.
func openPrivate(path string, flag int) (*os.File, error) { return nil, errors.New("stub") }

// networkFS names the file system when flock may not hold between machines (nfs, cifs, 9p, fuse), else "".
func networkFS(dir string) string { return "" }

// watchFolder delivers a value when a file in dir changes, nil where the system has no such thing.
func watchFolder(dir string) (ch <-chan struct{}, stop func()) { return nil, func() {} }
