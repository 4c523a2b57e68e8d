// Everything that differs between operating systems, for Windows (10 1809 and later, which has ConPTY); pty_unix.go
// has the same functions in the same order. Where Windows has no such thing the comment says so.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	suspendSignal = syscall.Signal(-1) // never comes: there is no job control
	// Older console hosts paint late (https://github.com/microsoft/terminal/issues/18552). When the child is gone:
	drainQuiet = 100 * time.Millisecond // the end, when so long nothing came
	drainWait  = 500 * time.Millisecond // waiting in all
)

// winPTY is a pseudo-console and the child. The console host paints its screen into a pipe as escape codes.
type winPTY struct {
	in, out               *os.File // our ends of the console's pipes
	console, process, job windows.Handle
	pid                   int
	hangUp                func()        // closes the console, once: its programs get CTRL_CLOSE_EVENT, Read its end
	exited                chan struct{} // closed when the child is gone
	code                  int           // valid then
	quiet                 *time.Timer   // valid then; hangs up
}

// startPTY starts argv in a new pseudo-console; what it starts ends with us. host is not used: each program has its own
// modes here. Errors wrap errNoTool or os.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p := &winPTY{exited: make(chan struct{})}
	p.hangUp = sync.OnceFunc(func() { windows.ClosePseudoConsole(p.console) })
	path, err := findTool(argv[0])
	if err = cmp.Or(err, p.open(size)); err == nil {
		err = p.start(path, argv, env, dir)
	}
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	go p.live()
	return p, nil
}

// findTool is exec.LookPath as cmd.exe does it: the current folder counts.
func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil || errors.Is(err, exec.ErrDot):
		return filepath.Abs(path)
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist):
		return "", errNoTool
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

func (p *winPTY) open(size Size) error {
	theirIn, in, err := os.Pipe()
	out, theirOut, outErr := os.Pipe()
	p.in, p.out = in, out
	if err = cmp.Or(err, outErr); err == nil {
		r, w := windows.Handle(theirIn.Fd()), windows.Handle(theirOut.Fd())
		err = windows.CreatePseudoConsole(coord(size), r, w, 0, &p.console)
	}
	theirIn.Close()
	theirOut.Close()
	return err
}

// start creates the process suspended, so that it has no children before it is in the job.
func (p *winPTY) start(path string, argv, env []string, dir string) error {
	attrs, err := windows.NewProcThreadAttributeList(1)
	if err != nil {
		return err
	}
	defer attrs.Delete()
	console := *(*unsafe.Pointer)(unsafe.Pointer(&p.console)) // the value, not its address, is the attribute
	err = attrs.Update(windows.PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE, console, unsafe.Sizeof(p.console))
	si := windows.StartupInfoEx{ProcThreadAttributeList: attrs.List()}
	si.Cb = uint32(unsafe.Sizeof(si))
	// A child gets our own standard handles where they are redirected, unless it is given some; none will do
	// (https://github.com/microsoft/terminal/issues/11276). Not always: wine would start it without a console.
	redirected := func(f *os.File) bool { return !term.IsTerminal(int(f.Fd())) }
	if redirected(os.Stdin) || redirected(os.Stdout) || redirected(os.Stderr) {
		si.Flags = windows.STARTF_USESTDHANDLES
	}
	app, err1 := windows.UTF16PtrFromString(path)
	line, err2 := windows.UTF16PtrFromString(windows.ComposeCommandLine(argv))
	cwd, err3 := windows.UTF16PtrFromString(cmp.Or(dir, "."))
	job, err4 := windows.CreateJobObject(nil, nil)
	if err = cmp.Or(err, err1, err2, err3, err4); err != nil {
		return err
	}
	block := utf16.Encode([]rune(strings.Join(env, "\x00") + "\x00\x00"))
	var pi windows.ProcessInformation
	const flags = windows.EXTENDED_STARTUPINFO_PRESENT | windows.CREATE_UNICODE_ENVIRONMENT | windows.CREATE_SUSPENDED
	if err = windows.CreateProcess(app, line, nil, nil, false, flags, &block[0], cwd, &si.StartupInfo, &pi); err != nil {
		return err
	}
	p.process, p.pid, p.job = pi.Process, int(pi.ProcessId), job
	err = p.limitJob(windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE)
	if err = cmp.Or(err, windows.AssignProcessToJobObject(job, p.process)); err != nil {
		windows.TerminateProcess(p.process, 1)
	}
	_, resumeErr := windows.ResumeThread(pi.Thread)
	return cmp.Or(err, resumeErr, windows.CloseHandle(pi.Thread))
}

// limitJob says what becomes of the job's processes when its last handle, ours, is closed.
func (p *winPTY) limitJob(flags uint32) error {
	limits := windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION{}
	limits.BasicLimitInformation.LimitFlags = flags
	_, err := windows.SetInformationJobObject(p.job, windows.JobObjectExtendedLimitInformation,
		uintptr(unsafe.Pointer(&limits)), uint32(unsafe.Sizeof(limits)))
	return err
}

// live waits for the child. A program that it left behind without a console lives on, as it would without us.
func (p *winPTY) live() {
	windows.WaitForSingleObject(p.process, windows.INFINITE)
	var code uint32
	if windows.GetExitCodeProcess(p.process, &code); code == uint32(windows.STATUS_CONTROL_C_EXIT) {
		code = 130 // as elsewhere
	}
	p.limitJob(0)
	p.code, p.quiet = int(code), time.AfterFunc(drainQuiet, p.hangUp)
	close(p.exited)
	time.AfterFunc(drainWait, p.hangUp)
}

// Read gives io.EOF when the console host is gone and all it painted has been read.
func (p *winPTY) Read(b []byte) (int, error) {
	n, err := p.out.Read(b)
	select {
	case <-p.exited:
		p.quiet.Reset(drainQuiet)
	default:
	}
	return n, err
}

// Close hangs up on a goroutine of its own: before Windows 11 24H2 that waits until all output is read
// (https://learn.microsoft.com/windows/console/closepseudoconsole).
func (p *winPTY) Close() error {
	if p.console != 0 {
		go p.hangUp()
	}
	p.out.Close()
	p.in.Close()
	return nil
}
func (p *winPTY) Write(b []byte) (int, error) { return p.in.Write(b) }
func (p *winPTY) Wait() int                   { <-p.exited; return p.code }
func (p *winPTY) PID() int                    { return p.pid }

// Resize repaints; there are no pixels here.
func (p *winPTY) Resize(s Size) error { return windows.ResizePseudoConsole(p.console, coord(s)) }
func coord(s Size) windows.Coord      { return windows.Coord{X: int16(s.Cols), Y: int16(s.Rows)} }

// Signal types Ctrl-C for os.Interrupt; any other signal ends everything in the job, which is all there is.
func (p *winPTY) Signal(sig os.Signal) error {
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
	}
	if sig == os.Interrupt {
		_, err := p.in.Write([]byte{3})
		return err
	}
	return windows.TerminateJobObject(p.job, 128+uint32(sig.(syscall.Signal)))
}

// Terminate closes the console, which programs may use to end well, and after 3 s ends them.
func (p *winPTY) Terminate(done <-chan struct{}) {
	go p.hangUp()
	select {
	case <-done:
	case <-p.exited:
	case <-time.After(3 * time.Second):
		p.Signal(os.Kill)
	}
}

// State says nothing: the console host knows who reads and whether it echoes, but does not tell.
func (p *winPTY) State() TTYState { return TTYState{Canonical: true, Echo: true} }

// terminalSize asks the host's console, of which f is the input or output.
func terminalSize(f *os.File) (Size, error) {
	out, err := os.OpenFile("CONOUT$", os.O_RDWR, 0)
	if err != nil || !term.IsTerminal(int(f.Fd())) {
		return Size{}, cmp.Or(err, os.ErrInvalid)
	}
	defer out.Close()
	cols, rows, err := term.GetSize(int(out.Fd()))
	return Size{Rows: uint16(rows), Cols: uint16(cols)}, err
}

// rawMode gives every key as bytes, escape sequences both ways; restore undoes it, any number of times. The os package
// turns what goes to and from a console into UTF-8.
func rawMode(f *os.File) (restore func() error, err error) {
	out, err := os.OpenFile("CONOUT$", os.O_RDWR, 0) // stays open for restore
	before, rawErr := term.MakeRaw(int(f.Fd()))
	if err = cmp.Or(err, rawErr); err != nil {
		return nil, err
	}
	var mode uint32
	screen := windows.Handle(out.Fd())
	windows.GetConsoleMode(screen, &mode)
	restore = func() error { return cmp.Or(term.Restore(int(f.Fd()), before), windows.SetConsoleMode(screen, mode)) }
	if err = windows.SetConsoleMode(screen, mode|windows.ENABLE_PROCESSED_OUTPUT|
		windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING|windows.DISABLE_NEWLINE_AUTO_RETURN); err != nil {
		restore()
	}
	return restore, err
}

// resizeSignals delivers a value per change of the console's size, looked at twice a second: Windows tells only among
// the key events, which are read as bytes. stop ends it.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c, done, tick := make(chan os.Signal, 1), make(chan struct{}), time.Tick(500*time.Millisecond)
	go func() {
		for last, _ := terminalSize(f); ; {
			select {
			case <-done:
				return
			case <-tick:
			}
			if now, err := terminalSize(f); err == nil && now != last && len(c) == 0 {
				last = now
				c <- syscall.Signal(28) // SIGWINCH elsewhere
			}
		}
	}()
	return c, func() { close(done) }
}

// endSignals end a session; closing the window, logging off and shutting down come as SIGTERM.
func endSignals() []os.Signal { return []os.Signal{os.Interrupt, syscall.SIGTERM} }
func stopSelf()               {} // see suspendSignal

// lockFile locks a byte far beyond the end, for others cannot read what is locked; wait false: errLocked if one has it.
func lockFile(f *os.File, wait bool) error {
	how := map[bool]uint32{true: windows.LOCKFILE_EXCLUSIVE_LOCK,
		false: windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY}
	err := windows.LockFileEx(windows.Handle(f.Fd()), how[wait], 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errLocked
	}
	return err
}
func unlockFile(f *os.File) error {
	return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
}

func syncDir(dir string) error { return nil } // a folder cannot be flushed here; NTFS logs names in its journal

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) int64 {
	h, _ := windows.OpenProcess(windows.PROCESS_QUERY_LIMITED_INFORMATION|windows.SYNCHRONIZE, false, uint32(pid))
	defer windows.CloseHandle(h)
	var created, exit, kernel, user windows.Filetime
	ended, _ := windows.WaitForSingleObject(h, 0)
	if ended == windows.WAIT_OBJECT_0 || windows.GetProcessTimes(h, &created, &exit, &kernel, &user) != nil {
		return 0
	}
	return created.Nanoseconds()
}

// ownedPrivate is nil for a regular file or folder whose owner and access list name nobody but the user, the system
// and the administrators.
func ownedPrivate(path string) error {
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() && !info.IsDir() {
		return cmp.Or(err, fmt.Errorf("%s is not a file or folder of your own: %w", path, os.ErrPermission))
	}
	sd, err := windows.GetNamedSecurityInfo(path, windows.SE_FILE_OBJECT,
		windows.OWNER_SECURITY_INFORMATION|windows.DACL_SECURITY_INFORMATION)
	user, userErr := windows.GetCurrentProcessToken().GetTokenUser()
	if err = cmp.Or(err, userErr); err != nil {
		return fmt.Errorf("reading who may open %s: %w", path, err)
	}
	// SDDL: O:owner D:(type;flags;rights;;;who)…
	who := regexp.MustCompile(`O:(S-[-\d]+|[A-Z]{2})|;([^;()]*)\)|NO_ACCESS_CONTROL`)
	for _, m := range who.FindAllStringSubmatch(sd.String(), -1) {
		sid, err := windows.StringToSid(m[1] + m[2])
		if err != nil || !sid.Equals(user.User.Sid) && !sid.IsWellKnown(windows.WinLocalSystemSid) &&
			!sid.IsWellKnown(windows.WinBuiltinAdministratorsSid) {
			return fmt.Errorf("%s can be reached by others; run: icacls %s /inheritance:r /grant:r %%USERNAME%%:F", path, path)
		}
	}
	return nil
}

// mkdirPrivate makes a folder only for the user and the system, and all that will be in it; fs.ErrExist if it is there.
func mkdirPrivate(path string) error {
	user, err := windows.GetCurrentProcessToken().GetTokenUser()
	if err != nil {
		return err
	}
	sd, err := windows.SecurityDescriptorFromString("D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;" + user.User.Sid.String() + ")")
	name, nameErr := windows.UTF16PtrFromString(path)
	attr := &windows.SecurityAttributes{SecurityDescriptor: sd}
	if attr.Length = uint32(unsafe.Sizeof(*attr)); err != nil || nameErr != nil {
		return cmp.Or(err, nameErr)
	}
	return windows.CreateDirectory(name, attr)
}

// openPrivate opens or creates a file that must be ownedPrivate, which it is in a folder by mkdirPrivate. os.Root opens
// it so that Root.Rename can replace it meanwhile. With O_APPEND it cannot be truncated later.
func openPrivate(path string, flag int) (*os.File, error) {
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(filepath.Base(path), flag&^os.O_TRUNC, 0o600)
	if err = cmp.Or(err, ownedPrivate(path)); err == nil && flag&os.O_TRUNC != 0 {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func networkFS(dir string) string { return "" } // shares keep locks between machines: nothing to warn of

// watchFolder: NTFS tells of a growing file only when it is closed or flushed, so the caller has to look.
func watchFolder(dir string) (ch <-chan struct{}, stop func()) { return nil, func() {} }
