// pty_windows.go is all that differs between operating systems, for Windows (10 1809 and later, which has ConPTY).
// pty_unix.go has the same functions in the same order, but for those that are called in one of the two files alone:
//
//	the child's terminal startPTY, findTool, the methods of PTY
//	the host's terminal  terminalSize, ownTerminal, rawMode, waitReady, resizeSignals, endSignals, stopSelf
//	processes            processStart, parentOf, systemSession
//	files                mkdirPrivate, ownedPrivate, openPrivate, lockFile, unlockFile, syncDir, networkFS,
//	                     watchFile
//
// Neither looks at what is read or typed.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf16"
	"unsafe"

	"golang.org/x/sys/windows"
	"golang.org/x/term"
)

const (
	suspendSignal = syscall.Signal(-1)     // never comes: there is no job control
	drainWait     = 250 * time.Millisecond // from the child's end to the console's: see live
	killWait      = 3 * time.Second        // for the child to end well
	resizeEvery   = 500 * time.Millisecond // between looks at the console's size

	interrupted = 130                // exit code of what Ctrl-C ended: SIGINT's elsewhere
	sigwinch    = syscall.Signal(28) // SIGWINCH elsewhere
)

// The host's console, wherever our output goes; screenErr: there is none.
var screen, screenErr = os.OpenFile("CONOUT$", os.O_RDWR, 0)

var me, _ = windows.GetCurrentProcessToken().GetTokenUser() // cannot fail

// ---- the child's terminal ----
// A pseudo-console, whose host paints its screen into a pipe as escape codes.

// winPTY is the pseudo-console and the child. Read belongs to one goroutine; all else may be called from any.
type winPTY struct {
	in      *os.File       // our end of the pipe that the console reads
	out     *os.File       // and of the one that it writes
	console windows.Handle // closed by hangUp alone
	process windows.Handle
	hangUp  func()        // closes the console, once: its programs get CTRL_CLOSE_EVENT, Read its end
	exited  chan struct{} // closed when the child is gone
	pid     uint32
	code    uint32 // valid when it is gone
}

// startPTY starts argv in dir on a new console of that size, which ends with us, and its programs with it. Each
// program has its own modes, not host's. Its errors wrap errNoTool.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p := &winPTY{exited: make(chan struct{})}
	p.hangUp = sync.OnceFunc(func() { windows.ClosePseudoConsole(p.console) })
	if err := p.start(argv, env, dir, size); err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	go p.live()
	return p, nil
}

// start makes the console and the child in it; after an error neither is there.
func (p *winPTY) start(argv, env []string, dir string, size Size) error {
	path, err := findTool(argv[0])
	if err != nil {
		return err
	}
	input, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer input.Close() // the console has its own
	out, output, err := os.Pipe()
	if err != nil {
		in.Close() // nobody has written to it
		return err
	}
	defer output.Close() // the console has its own
	p.in, p.out = in, out
	r, w := windows.Handle(input.Fd()), windows.Handle(output.Fd())
	if err := windows.CreatePseudoConsole(coord(size), r, w, 0, &p.console); err != nil {
		return errors.Join(err, in.Close(), out.Close())
	}
	if err := p.createProcess(path, argv, env, dir); err != nil {
		return errors.Join(err, p.Close())
	}
	return nil
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
func (p *winPTY) createProcess(path string, argv, env []string, dir string) error {
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
	if dir == "" {
		dir = "."
	}
	const flags = windows.EXTENDED_STARTUPINFO_PRESENT | windows.CREATE_UNICODE_ENVIRONMENT
	line := wide(windows.ComposeCommandLine(argv))
	block := wide(strings.Join(env, "\x00") + "\x00")
	var pi windows.ProcessInformation
	err = windows.CreateProcess(wide(path), line, nil, nil, false, flags, block, wide(dir), &si.StartupInfo, &pi)
	if err != nil {
		return err
	}
	p.process, p.pid = pi.Process, pi.ProcessId
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
	windows.WaitForSingleObject(p.process, windows.INFINITE) // cannot fail: the handle is ours
	windows.GetExitCodeProcess(p.process, &p.code)           // the same
	if windows.NTStatus(p.code) == windows.STATUS_CONTROL_C_EXIT {
		p.code = interrupted
	}
	close(p.exited)
	time.AfterFunc(drainWait, p.hangUp)
}

// Read gives io.EOF when the console is closed and all it has painted has been read.
func (p *winPTY) Read(b []byte) (int, error) {
	return p.out.Read(b)
}

// Write types b, and waits while the child's input is full.
func (p *winPTY) Write(b []byte) (int, error) {
	return p.in.Write(b)
}

// Close closes our side: the programs get CTRL_CLOSE_EVENT, a Read that waits ends. ClosePseudoConsole waits, before
// Windows 11 24H2, until all output is read (its documentation), and Close does not.
func (p *winPTY) Close() error {
	go p.hangUp()
	return errors.Join(p.out.Close(), p.in.Close())
}

// Wait is the exit status of the child, once it has one.
func (p *winPTY) Wait() int {
	<-p.exited
	return int(p.code)
}

// PID is the child's.
func (p *winPTY) PID() int {
	return int(p.pid)
}

// Unread is how many bytes of output wait for Read; 0 where that is not known.
func (p *winPTY) Unread() int {
	return 0
}

// Resize tells the child its terminal's new size, by SIGWINCH where there are signals.
func (p *winPTY) Resize(s Size) error {
	return windows.ResizePseudoConsole(p.console, coord(s))
}

// coord is a size as the console has it.
func coord(s Size) windows.Coord {
	return windows.Coord{X: int16(s.Cols), Y: int16(s.Rows)}
}

// Signal types Ctrl-C for os.Interrupt; any other ends the child, which is all there is.
func (p *winPTY) Signal(sig os.Signal) error {
	if sig == os.Interrupt {
		_, err := p.in.Write([]byte{3})
		return err
	}
	return windows.TerminateProcess(p.process, 128+uint32(sig.(syscall.Signal)))
}

// Terminate ends the child: it is asked to, and after killWait made to. It returns early when done is closed.
// Programs may use the console's end to end well.
func (p *winPTY) Terminate(done <-chan struct{}) {
	go p.hangUp()
	select {
	case <-done:
	case <-p.exited:
	case <-time.After(killWait):
		p.Signal(syscall.SIGKILL) // fails when it has ended
	}
}

// State is what the system says about the terminal; ReadingUnknown where it cannot tell. The console host does not
// tell.
func (p *winPTY) State() TTYState {
	return TTYState{Canonical: true, Echo: true}
}

// ---- the host's terminal ----
// The console that we run in ourselves.

// terminalSize is the size of the host's terminal; an error when f is none of its input and output, or nil.
func terminalSize(f *os.File) (s Size, err error) {
	if f == nil {
		return s, os.ErrInvalid
	}
	if _, err := term.GetState(int(f.Fd())); err != nil {
		return s, err
	}
	if screenErr != nil {
		return s, screenErr
	}
	cols, rows, err := term.GetSize(int(screen.Fd()))
	if err != nil {
		return s, err
	}
	return Size{Rows: uint16(rows), Cols: uint16(cols)}, nil
}

// ownTerminal is false: a console that is closed sends a signal.
func ownTerminal(f *os.File) bool { return false }

// rawMode has every key of the host's terminal come as it is pressed, and escape sequences go both ways; the os
// package gives UTF-8. restore undoes it (twice is fine).
func rawMode(f *os.File) (restore func() error, err error) {
	if screenErr != nil {
		return nil, screenErr
	}
	in, out := int(f.Fd()), windows.Handle(screen.Fd())
	var mode uint32
	if err := windows.GetConsoleMode(out, &mode); err != nil {
		return nil, err
	}
	keys, err := term.MakeRaw(in)
	if err != nil {
		return nil, err
	}
	const codes = windows.ENABLE_PROCESSED_OUTPUT | windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING |
		windows.DISABLE_NEWLINE_AUTO_RETURN
	if err := windows.SetConsoleMode(out, mode|codes); err != nil {
		return nil, errors.Join(err, term.Restore(in, keys))
	}
	return func() error {
		return errors.Join(term.Restore(in, keys), windows.SetConsoleMode(out, mode))
	}, nil
}

// waitReady is not needed here: no stream of ours says that it would block.
func waitReady(*os.File, bool) error { return errors.ErrUnsupported }

// resizeSignals gives a value for each change of the host terminal's size, until stop. There is no signal: it looks.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	tick := time.NewTicker(resizeEvery)
	go func() {
		last, _ := terminalSize(f) // without a size the first one is a change
		for range tick.C {
			now, err := terminalSize(f)
			if err == nil && now != last && len(c) == 0 {
				last = now
				c <- sigwinch
			}
		}
	}()
	return c, tick.Stop
}

// endSignals are those that end us. SIGTERM: the window was closed, or the system shuts down.
func endSignals() []os.Signal {
	return []os.Signal{os.Interrupt, syscall.SIGTERM}
}

// stopSelf does nothing: see suspendSignal.
func stopSelf() {}

// ---- processes ----
// A pid alone is nobody's for ever: with the start of its process it is.

// processStart tells two processes of the same pid apart; 0: there is no such process, or it has ended.
func processStart(pid int) int64 {
	const access = windows.PROCESS_QUERY_LIMITED_INFORMATION | windows.SYNCHRONIZE
	h, err := windows.OpenProcess(access, false, uint32(pid))
	if err != nil {
		return 0
	}
	defer windows.CloseHandle(h)
	ended, _ := windows.WaitForSingleObject(h, 0) // cannot fail: the handle is ours
	if ended == windows.WAIT_OBJECT_0 {
		return 0
	}
	var created, exit, kernel, user windows.Filetime
	if err := windows.GetProcessTimes(h, &created, &exit, &kernel, &user); err != nil {
		return 0
	}
	return created.Nanoseconds()
}

// parentOf is the pid of the process's parent; 0: it has none, there is no such process, or the system does not tell.
// Windows keeps the pid of a parent that has ended, which another process may have by now: a parent is older.
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
	parent := int(entry.ParentProcessID)
	began := processStart(parent)
	if began == 0 || began > processStart(pid) {
		return 0
	}
	return parent
}

// systemSession is 0: there are no such sessions here.
func systemSession() int {
	return 0
}

// ---- files ----
// What is kept is for the user alone, may be used by several processes, and is on the disk when that is said.

// mkdirPrivate makes a folder for the user (and the system) alone, and all that will be in it; fs.ErrExist if it is
// there.
func mkdirPrivate(path string) error {
	sddl := "D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;" + me.User.Sid.String() + ")"
	sd, err := windows.SecurityDescriptorFromString(sddl)
	if err != nil {
		return err
	}
	attr := windows.SecurityAttributes{SecurityDescriptor: sd}
	attr.Length = uint32(unsafe.Sizeof(attr))
	return windows.CreateDirectory(wide(path), &attr)
}

// ownedPrivate is nil for a regular file or folder whose owner and access list name only the user, system and admins.
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() && !info.IsDir() {
		return fmt.Errorf("%s is not a file or folder of your own: %w", path, os.ErrPermission)
	}
	const facts = windows.OWNER_SECURITY_INFORMATION | windows.DACL_SECURITY_INFORMATION
	sd, err := windows.GetNamedSecurityInfo(path, windows.SE_FILE_OBJECT, facts)
	if err != nil {
		return err
	}
	if !namesNoOther(sd) {
		return fmt.Errorf("%s can be reached by others; run: icacls %s /inheritance:r /grant:r %%USERNAME%%:F", path, path)
	}
	return nil
}

// namesNoOther tells whether an owner and an access list are there and name nobody but the user, system and admins.
func namesNoOther(sd *windows.SECURITY_DESCRIPTOR) bool {
	if sd == nil {
		return false
	}
	owner, _, err := sd.Owner()
	if err != nil || owner == nil || !trusted(owner) {
		return false
	}
	list, _, err := sd.DACL()
	if err != nil || list == nil { // without a list everybody may do everything
		return false
	}
	for i := range uint32(list.AceCount) {
		var entry *windows.ACCESS_ALLOWED_ACE
		if err := windows.GetAce(list, i, &entry); err != nil {
			return false
		}
		kind := entry.Header.AceType
		plain := kind == windows.ACCESS_ALLOWED_ACE_TYPE || kind == windows.ACCESS_DENIED_ACE_TYPE
		if !plain || !trusted((*windows.SID)(unsafe.Pointer(&entry.SidStart))) { // in others the SID stands elsewhere
			return false
		}
	}
	return true
}

// trusted tells whether it is the user, the system, or one of its administrators, who can reach everything anyway.
func trusted(sid *windows.SID) bool {
	return sid.Equals(me.User.Sid) || sid.IsWellKnown(windows.WinLocalSystemSid) ||
		sid.IsWellKnown(windows.WinBuiltinAdministratorsSid)
}

// openPrivate opens or creates a file that must be ownedPrivate, which it is in a folder by mkdirPrivate; nothing
// refused is truncated. os.Root opens it so that Root.Rename can replace it meanwhile. With O_APPEND it cannot be
// truncated later.
func openPrivate(path string, flag int) (*os.File, error) {
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(filepath.Base(path), flag&^os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	err = ownedPrivate(path)
	if err == nil && flag&os.O_TRUNC != 0 {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close() // nothing was written
		return nil, err
	}
	return f, nil
}

// A byte far beyond the end is what is locked, for others cannot read what is.
const (
	lockedBytes = 1
	lockedHigh  = 1 << 30 // upper half of its offset
)

// lockFile takes the lock of a file for as long as f lives: keep it reachable. wait false: errLocked if another has
// it.
func lockFile(f *os.File, wait bool) error {
	how := uint32(windows.LOCKFILE_EXCLUSIVE_LOCK)
	if !wait {
		how |= windows.LOCKFILE_FAIL_IMMEDIATELY
	}
	at := windows.Overlapped{OffsetHigh: lockedHigh}
	err := windows.LockFileEx(windows.Handle(f.Fd()), how, 0, lockedBytes, 0, &at)
	if err == windows.ERROR_LOCK_VIOLATION {
		return errLocked
	}
	return err
}

// unlockFile gives the lock back before f is closed.
func unlockFile(f *os.File) error {
	at := windows.Overlapped{OffsetHigh: lockedHigh}
	return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, lockedBytes, 0, &at)
}

// syncDir does nothing: a folder cannot be flushed here, and NTFS logs names in its journal.
func syncDir(dir string) error {
	return nil
}

// networkFS is "": shares keep locks.
func networkFS(dir string) string {
	return ""
}

// watchFile delivers nothing: NTFS tells of files when they are closed.
func watchFile(path string) (ch <-chan struct{}, stop func()) {
	return nil, func() {}
}
