// pty_windows.go is all that differs between operating systems, for Windows (10 1809 and later, which has ConPTY).
// pty_unix.go has the same functions in the same order, but for those that are called in one of the two files alone:
//
//	the child's terminal startPTY, findTool, the methods of PTY, actAs
//	the host's terminal  terminalSize, ownTerminal, openTerminal, inForeground, resumes, rawMode, muteEcho,
//	                     dropTyped, processOutput, waitReady, resizeSignals, endSignals, stopSelf
//	processes            parentOf
//	files                mkdirPrivate, openPrivate, closeRemedy, fileRemedy,
//	                     lockFile, unlockFile, cutFile, replaceFile, syncDir
//
// Neither looks at what is read or typed.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf16"
	"unsafe"

	"golang.org/x/sys/windows"
	"golang.org/x/term"
)

const (
	suspendSignal = syscall.Signal(-1)     // never comes: there is no job control
	resumeSignal  = suspendSignal          // the same
	handsStreams  = false                  // a child in a pseudo-console has its streams alone
	drainWait     = 250 * time.Millisecond // from the child's end to the console's: see live
	killWait      = 3 * time.Second        // for the child to end well
	resizeEvery   = 500 * time.Millisecond // between looks at the console's size

	interrupted = 130                // exit code of what Ctrl-C ended: SIGINT's elsewhere
	sigwinch    = syscall.Signal(28) // SIGWINCH elsewhere
)

// The host's console, wherever our output goes; nil: there is none, and what is asked of it fails.
var screen, _ = os.OpenFile("CONOUT$", os.O_RDWR, 0)

var me, _ = windows.GetCurrentProcessToken().GetTokenUser() // cannot fail

// ---- the child's terminal ----
// A pseudo-console, whose host paints its screen into a pipe as escape codes.

// Host is what a child has of ours.
type Host struct {
	TTY     *os.File    // a terminal whose modes its own gets, nil: the defaults
	Streams [3]*os.File // standard input, output and error that it gets as they are; nil: its terminal
	Plain   bool        // its terminal adds no carriage return to a line feed
	Resumes bool        // a shell stops and resumes us: the child is to stop with us, and we with it
}

// Modes are of a terminal's modes those that are asked for with every key, or every piece of output.
type Modes struct {
	Processed bool // a line feed begins a line
	Canonical bool // nobody has set it to be drawn on
	Echo      bool // it shows what is typed
	Erase     rune // the key that takes back the last character of a line
	UTF8      bool // all bytes of it
}

// Size is that of a terminal, laid out as struct winsize of the system.
type Size struct {
	Rows, Cols     uint16 // in cells
	XPixel, YPixel uint16
}

// winPTY is the pseudo-console and the child.
type winPTY struct {
	in     *os.File      // our end of the pipe that the console reads
	out    *os.File      // and of the one that it writes
	taken  atomic.Int64  // bytes of output that were read
	exited chan struct{} // closed when the child is gone
	pid    uint32
	code   uint32         // valid when it is gone
	child  windows.Handle // it has one for as long as we live

	handles sync.Mutex     // guards what follows
	console windows.Handle // 0 when hangUp has closed it
}

// startPTY starts argv on a new console of that size, which ends with us, and its programs with it. Each
// program has its own modes, and none of the host's streams. Its errors wrap errNoTool.
func startPTY(argv, env []string, size Size, _ Host) (PTY, error) {
	p := &winPTY{exited: make(chan struct{})}
	if err := p.start(argv, env, size); err != nil {
		p.Close() // what counts is why
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	go p.live()
	return p, nil
}

// start makes the console and the child in it.
func (p *winPTY) start(argv, env []string, size Size) error {
	path, err := findTool(argv[0])
	if err != nil {
		return err
	}
	input, in, err := os.Pipe()
	if err != nil {
		return err
	}
	p.in = in
	defer input.Close() // the console has its own
	out, output, err := os.Pipe()
	if err != nil {
		return err
	}
	p.out = out
	defer output.Close() // the same
	r, w := windows.Handle(input.Fd()), windows.Handle(output.Fd())
	if err := windows.CreatePseudoConsole(coord(size), r, w, 0, &p.console); err != nil {
		return err
	}
	return p.createProcess(path, argv, env)
}

// findTool is the path of the program that name runs, as cmd.exe finds it: the current folder counts. The error is
// errNoTool.
func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return "", errNoTool
	}
	return path, nil
}

// createProcess starts the child in the console.
func (p *winPTY) createProcess(path string, argv, env []string) error {
	attrs, err := windows.NewProcThreadAttributeList(1)
	if err != nil {
		return err
	}
	defer attrs.Delete()
	console := *(*unsafe.Pointer)(unsafe.Pointer(&p.console)) // the value, not its address, is the attribute
	const attribute = windows.PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE
	if err := attrs.Update(attribute, console, unsafe.Sizeof(p.console)); err != nil {
		return err
	}
	si := windows.StartupInfoEx{ProcThreadAttributeList: attrs.List()}
	si.Cb = uint32(unsafe.Sizeof(si))
	// No standard handles, or the child gets ours (github.com/microsoft/terminal/issues/11276); else as wine needs it.
	if !onTerminal(os.Stdin) || !onTerminal(os.Stdout) || !onTerminal(os.Stderr) {
		si.Flags = windows.STARTF_USESTDHANDLES
	}
	const flags = windows.EXTENDED_STARTUPINFO_PRESENT | windows.CREATE_UNICODE_ENVIRONMENT
	line := wide(windows.ComposeCommandLine(argv))
	block := wide(strings.Join(env, "\x00") + "\x00")
	var pi windows.ProcessInformation
	err = windows.CreateProcess(wide(path), line, nil, nil, false, flags, block, wide("."), &si.StartupInfo, &pi)
	if err != nil {
		return err
	}
	p.child, p.pid = pi.Process, pi.ProcessId
	windows.CloseHandle(pi.Thread) // cannot fail: it is ours
	return nil
}

// wide is s in UTF-16, with a zero at its end.
func wide(s string) *uint16 {
	return &utf16.Encode([]rune(s + "\x00"))[0]
}

// live waits for the child's end, and closes the console a little later: it paints the last words late
// (github.com/microsoft/terminal/issues/18552).
func (p *winPTY) live() {
	windows.WaitForSingleObject(p.child, windows.INFINITE) // cannot fail: the handle is ours
	windows.GetExitCodeProcess(p.child, &p.code)           // the same
	if windows.NTStatus(p.code) == windows.STATUS_CONTROL_C_EXIT {
		p.code = interrupted
	}
	close(p.exited)
	time.AfterFunc(drainWait, p.hangUp)
}

// hangUp closes the console: its programs get CTRL_CLOSE_EVENT, Read its end. Twice is fine. It waits, before Windows
// 11 24H2, until all output is read (the documentation of ClosePseudoConsole).
func (p *winPTY) hangUp() {
	p.handles.Lock()
	console := p.console
	p.console = 0
	p.handles.Unlock()
	if console != 0 {
		windows.ClosePseudoConsole(console)
	}
}

// Stopped gives nothing: there is no job control.
func (p *winPTY) Stopped() <-chan struct{} { return nil }

// Read gives io.EOF when the console is closed and all it has painted has been read.
func (p *winPTY) Read(b []byte) (int, error) {
	n, err := p.out.Read(b)
	p.taken.Add(int64(n))
	return n, err
}

// Write types b, and waits while the child's input is full.
func (p *winPTY) Write(b []byte) (int, error) {
	return p.in.Write(b)
}

// Close closes our side: the programs get CTRL_CLOSE_EVENT, a Read that waits ends. It does not wait for hangUp.
func (p *winPTY) Close() error {
	go p.hangUp()
	return errors.Join(p.out.Close(), p.in.Close())
}

// Wait is the exit status of the child, once it has one.
func (p *winPTY) Wait() int {
	<-p.exited
	return int(p.code)
}

// Signaled is false: there are no signals.
func (p *winPTY) Signaled() bool { return false }

// PID is the child's.
func (p *winPTY) PID() int {
	return int(p.pid)
}

// Came is how many bytes of output Read took so far; what waits for it is not known.
func (p *winPTY) Came() int64 {
	return p.taken.Load()
}

// Waiting is not known: the input is conhost's.
func (p *winPTY) Waiting() int {
	return -1
}

// TakeBack cannot.
func (p *winPTY) TakeBack(int) bool {
	return false
}

// Resize gives the console another size.
func (p *winPTY) Resize(s Size) error {
	p.handles.Lock()
	defer p.handles.Unlock()
	if p.console == 0 {
		return os.ErrClosed
	}
	return windows.ResizePseudoConsole(p.console, coord(s))
}

// coord is a size as the console has it.
func coord(s Size) windows.Coord {
	return windows.Coord{X: int16(s.Cols), Y: int16(s.Rows)}
}

// Signal types Ctrl-C for os.Interrupt; any other ends the child, which is all there is. os.ErrProcessDone: it is gone.
func (p *winPTY) Signal(sig os.Signal) error {
	if sig == os.Interrupt {
		_, err := p.in.Write([]byte{3})
		return err
	}
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
		return windows.TerminateProcess(p.child, 128+uint32(sig.(syscall.Signal)))
	}
}

// Terminate ends the child at once: it is asked to, and after killWait made to. Programs may use the console's end to
// end well.
func (p *winPTY) Terminate(time.Duration) {
	go p.hangUp()
	select {
	case <-p.exited:
	case <-time.After(killWait):
		p.Signal(syscall.SIGKILL) // fails when it has ended
	}
}

// State is what the system says about the terminal; ReadingUnknown where it cannot tell. The console host does not
// tell.
func (p *winPTY) State() TTYState {
	return TTYState{Reading: ReadingUnknown, Canonical: true, Echo: true}
}

// Modes are those of every console.
func (p *winPTY) Modes() Modes {
	return Modes{Processed: true, Canonical: true, Echo: true, Erase: 0x7f, UTF8: true}
}

// actAs is false: here no process of ours is anything but a command.
func actAs([]string) bool { return false }

// ---- the host's terminal ----
// The console that we run in ourselves.

// terminalSize is the size of the host's terminal; an error when f is none of its input and output, or nil.
func terminalSize(f *os.File) (s Size, err error) {
	if _, err := term.GetState(int(f.Fd())); err != nil {
		return s, err
	}
	cols, rows, err := term.GetSize(int(screen.Fd()))
	return Size{Rows: uint16(rows), Cols: uint16(cols)}, err
}

// ownTerminal is false: a console that is closed sends a signal.
func ownTerminal(f *os.File) bool { return false }

// openTerminal fails: what is no console of our standard streams goes to the child's all the same.
func openTerminal() (*os.File, error) { return nil, errors.ErrUnsupported }

// inForeground is true: there is no background.
func inForeground(*os.File) bool { return true }

// resumes is false: there is no job control.
func resumes() bool { return false }

// rawMode has every key of the host's terminal come as it is pressed, and escape sequences go both ways; the os
// package gives UTF-8. restore undoes it (twice is fine).
func rawMode(f *os.File, _ bool) (restore func() error, err error) {
	const (
		codes = windows.ENABLE_PROCESSED_OUTPUT | windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING |
			windows.DISABLE_NEWLINE_AUTO_RETURN
		lines = windows.ENABLE_ECHO_INPUT | windows.ENABLE_PROCESSED_INPUT | windows.ENABLE_LINE_INPUT
	)
	undoCodes, err := changeMode(screen, codes, 0)
	if err != nil {
		return nil, err
	}
	undoKeys, err := changeMode(f, windows.ENABLE_VIRTUAL_TERMINAL_INPUT, lines)
	if err != nil {
		return nil, errors.Join(err, undoCodes())
	}
	return func() error { return errors.Join(undoKeys(), undoCodes()) }, nil
}

// changeMode sets and clears bits of a console's mode, until undo.
func changeMode(f *os.File, set, clear uint32) (undo func() error, err error) {
	h := windows.Handle(f.Fd())
	var before uint32
	if err := windows.GetConsoleMode(h, &before); err != nil {
		return nil, err
	}
	return func() error { return windows.SetConsoleMode(h, before) }, windows.SetConsoleMode(h, before&^clear|set)
}

// muteEcho has a console not show what is typed, until undo. Ctrl-C is a signal all the same.
func muteEcho(f *os.File) (undo func() error, err error) {
	return changeMode(f, windows.ENABLE_LINE_INPUT|windows.ENABLE_PROCESSED_INPUT, windows.ENABLE_ECHO_INPUT)
}

// dropTyped drops what was typed and not read yet: neither a question of ours nor a shell is to get it.
func dropTyped(f *os.File) error { return windows.FlushConsoleInputBuffer(windows.Handle(f.Fd())) }

// processOutput does nothing: no child has streams of ours.
func processOutput(*os.File, bool) error { return nil }

// waitReady is not needed here: no stream of ours says that it would block.
func waitReady(*os.File, bool) error { return errors.ErrUnsupported }

// resizeSignals gives a value for each change of the host terminal's size, as long as we live. There is no signal: it
// looks.
func resizeSignals(f *os.File) <-chan os.Signal {
	c := make(chan os.Signal, 1)
	last, _ := terminalSize(f) // without a size the first one is a change
	go func() {
		for range time.Tick(resizeEvery) {
			now, err := terminalSize(f)
			if err == nil && now != last && len(c) == 0 {
				last = now
				c <- sigwinch
			}
		}
	}()
	return c
}

// endSignals are those that end us. SIGTERM: the window was closed, or the system shuts down.
func endSignals() []os.Signal {
	return []os.Signal{os.Interrupt, syscall.SIGTERM}
}

// stopSelf does nothing: see suspendSignal.
func stopSelf() {}

// ---- processes ----
// What the system tells of others.

// parentOf is the pid of the process's parent; 0: it has none, there is no such process, or the system does not tell.
// Windows keeps the pid of a parent that has ended, which another process may have by now.
func parentOf(pid int) int {
	snapshot, err := windows.CreateToolhelp32Snapshot(windows.TH32CS_SNAPPROCESS, 0)
	if err != nil {
		return 0
	}
	defer windows.CloseHandle(snapshot)
	entry := windows.ProcessEntry32{}
	entry.Size = uint32(unsafe.Sizeof(entry))
	err = windows.Process32First(snapshot, &entry)
	for err == nil && entry.ProcessID != uint32(pid) {
		err = windows.Process32Next(snapshot, &entry)
	}
	if err != nil {
		return 0
	}
	return int(entry.ParentProcessID)
}

// ---- files ----
// What is kept is for the user alone, may be used by several processes, and is on the disk when that is said.

// mkdirPrivate makes a folder for the user (and the system) alone, and all that will be in it; fs.ErrExist if it is
// there.
func mkdirPrivate(path string) error {
	attr, err := private("OICI")
	if err != nil {
		return err
	}
	return windows.CreateDirectory(wide(path), attr)
}

// private gives what is created to the user, and the system, alone, whatever its folder gives to others. inherit are
// the flags, as in SDDL, that say what a new folder gives to what will be in it.
func private(inherit string) (*windows.SecurityAttributes, error) {
	sddl := fmt.Sprintf("D:P(A;%[1]s;FA;;;SY)(A;%[1]s;FA;;;%[2]s)", inherit, me.User.Sid)
	sd, err := windows.SecurityDescriptorFromString(sddl)
	if err != nil {
		return nil, err
	}
	attr := &windows.SecurityAttributes{SecurityDescriptor: sd}
	attr.Length = uint32(unsafe.Sizeof(*attr))
	return attr, nil
}

// openPrivate opens or creates a file, or opens a folder. It must be the user's (or an administrator's) own, and no
// other can reach it; nothing refused is truncated. It can be renamed, replaced and removed meanwhile.
func openPrivate(path string, flag int) (*os.File, error) {
	info, err := os.Lstat(path)
	if err == nil && !info.Mode().IsRegular() && !info.IsDir() {
		err := fmt.Errorf("%s is a link, or no file: %w", path, os.ErrPermission)
		return nil, hinted(err, "put the file or folder itself in its place, or set ATLASBRIDGE_HOME to another folder")
	}
	h, err := create(path, flag)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(h), path)
	err = checkPrivate(f)
	if err == nil && flag&os.O_TRUNC != 0 {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close() // nothing was written
		return nil, err
	}
	return f, nil
}

// create opens a file, for reading a folder too, or makes it with a list of its own.
func create(path string, flag int) (windows.Handle, error) {
	attr, err := private("")
	if err != nil {
		return 0, err
	}
	const share = windows.FILE_SHARE_READ | windows.FILE_SHARE_WRITE | windows.FILE_SHARE_DELETE
	access, options := uint32(windows.GENERIC_READ), uint32(windows.FILE_ATTRIBUTE_NORMAL)
	switch {
	case flag&os.O_APPEND != 0:
		access |= windows.FILE_APPEND_DATA
	case flag&(os.O_WRONLY|os.O_RDWR) != 0:
		access |= windows.GENERIC_WRITE
	default:
		options |= windows.FILE_FLAG_BACKUP_SEMANTICS // a folder
	}
	how := uint32(windows.OPEN_EXISTING)
	switch {
	case flag&os.O_EXCL != 0:
		how = windows.CREATE_NEW
	case flag&os.O_CREATE != 0:
		how = windows.OPEN_ALWAYS
	}
	return windows.CreateFile(wide(path), access, share, attr, how, options, 0)
}

// checkPrivate gives an error when others can reach an open file or folder.
func checkPrivate(f *os.File) error {
	const facts = windows.OWNER_SECURITY_INFORMATION | windows.DACL_SECURITY_INFORMATION
	sd, err := windows.GetSecurityInfo(windows.Handle(f.Fd()), windows.SE_FILE_OBJECT, facts)
	if err != nil {
		return err
	}
	if !namesNoOther(sd) {
		path := f.Name()
		return hintedf(closeRemedy(path), "%s %w", path, errShared)
	}
	return nil
}

// namesNoOther reports whether an owner and an access list are there and let nobody in but the user, system and admins.
// It asks who is let in, not where an entry comes from: wine makes entries of the Unix mode. An entry that denies lets
// nobody in, nor does one that is only inherited by what is made in a folder: our files do not inherit.
func namesNoOther(sd *windows.SECURITY_DESCRIPTOR) bool {
	mine, err := windows.SecurityDescriptorFromString("O:" + me.User.Sid.String()) // some users have a short name
	if err != nil {
		return false
	}
	trusted := "(SY|BA|" + strings.TrimPrefix(mine.String(), "O:") + ")"
	entry := `\((D;[^)]*|A;([A-Z]{2})*IO([A-Z]{2})*;[^)]*|A;\w*;\w*;;;(CO|OW|` + trusted + `))\)`
	list := regexp.MustCompile(`^O:` + trusted + `(G:[\w-]+)?D:[A-Z]*(` + entry + `)*$`)
	return list.MatchString(sd.String())
}

// closeRemedy is how to close a file, or a folder with all that is in it, to others.
func closeRemedy(path string) string {
	return othersUse + "icacls \"" + path + "\" /inheritance:r /grant:r %USERNAME%:F /T"
}

// fileRemedy is what to do about a file or folder that cannot be made, opened or written; "" where that is not known.
func fileRemedy(err error) string {
	switch {
	case errors.Is(err, windows.ERROR_WRITE_PROTECT):
		return "that disk is read-only: set ATLASBRIDGE_HOME to a folder on another"
	case errors.Is(err, windows.ERROR_DISK_FULL), errors.Is(err, windows.ERROR_HANDLE_DISK_FULL):
		return "make room on that disk, or set ATLASBRIDGE_HOME to a folder on another"
	case errors.Is(err, windows.ERROR_ACCESS_DENIED):
		return "see its Properties, Security: you must own it and have full control, and it must not be read-only"
	}
	return ""
}

// A byte far beyond the end is what is locked, for others cannot read what is.
const (
	lockedBytes = 1
	lockedHigh  = 1 << 30 // upper half of its offset
)

// lockFile takes the lock of a file for as long as f lives: keep it reachable. errLocked: another has it.
func lockFile(f *os.File) error {
	const how = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	at := &windows.Overlapped{OffsetHigh: lockedHigh}
	err := windows.LockFileEx(windows.Handle(f.Fd()), how, 0, lockedBytes, 0, at)
	if err == windows.ERROR_LOCK_VIOLATION {
		return errLocked
	}
	return err
}

// unlockFile gives the lock back before f is closed.
func unlockFile(f *os.File) error {
	at := &windows.Overlapped{OffsetHigh: lockedHigh}
	return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, lockedBytes, 0, at)
}

// cutFile makes a file shorter. One that was opened with O_APPEND may not do that (it lacks FILE_WRITE_DATA), another
// of its name may.
func cutFile(f *os.File, size int64) error {
	return os.Truncate(f.Name(), size)
}

// replaceFile gives a file the name of another one in its folder, which may be open: Root has NTFS do that
// (FILE_RENAME_POSIX_SEMANTICS). Where that is not known, as to wine 8, nobody else may have it open.
func replaceFile(from, to string) error {
	root, err := os.OpenRoot(filepath.Dir(to))
	if err != nil {
		return err
	}
	defer root.Close()
	return root.Rename(filepath.Base(from), filepath.Base(to))
}

// syncDir does nothing: a folder cannot be flushed here, and NTFS logs names in its journal.
func syncDir(dir string) error {
	return nil
}
