// Everything that differs between operating systems, for Windows (10 1809 and later, which has ConPTY);
// pty_unix.go has the same functions in the same order. Where Windows has no such thing the comment says so.
// A child ends with us: it runs in a job object that the system closes when this process is gone.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
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
)

// winPTY is a pseudo-console and the child. The console host paints its screen into a pipe as escape codes.
type winPTY struct {
	in, out *os.File // our ends of the console's pipes
	console windows.Handle
	process windows.Handle
	job     windows.Handle
	pid     int
	closing sync.Once
	heard   chan struct{} // something has been read
	exited  chan struct{} // closed when the child is gone
	code    int           // valid then
}

// startPTY opens a pseudo-console of that size and starts argv in it. host is not used: what Unix keeps in the
// terminal's modes is each program's own business here. Errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	path, err := findTool(argv[0])
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	p := &winPTY{exited: make(chan struct{}), heard: make(chan struct{}, 1)}
	if err := p.open(size); err != nil {
		return nil, fmt.Errorf("opening a pseudo-console: %w", err)
	}
	if err := p.start(path, argv, env, dir); err != nil {
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
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist):
		return "", errNoTool
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

func (p *winPTY) open(size Size) error {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		in.Close()
		return err
	}
	defer theirOut.Close()
	p.in, p.out = in, out
	err = windows.CreatePseudoConsole(coord(size), windows.Handle(theirIn.Fd()), windows.Handle(theirOut.Fd()), 0, &p.console)
	if err != nil {
		in.Close()
		out.Close()
	}
	return err
}

// start creates the process suspended, so that it cannot have children before it is in the job.
func (p *winPTY) start(path string, argv, env []string, dir string) error {
	attrs, err := windows.NewProcThreadAttributeList(1)
	if err != nil {
		return err
	}
	defer attrs.Delete()
	console := *(*unsafe.Pointer)(unsafe.Pointer(&p.console)) // the value, not its address, is the attribute
	err = attrs.Update(windows.PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE, console, unsafe.Sizeof(p.console))
	if err != nil {
		return err
	}
	si := windows.StartupInfoEx{ProcThreadAttributeList: attrs.List()}
	si.Cb = uint32(unsafe.Sizeof(si))
	// A child gets our own standard handles where they are redirected, unless it is given some; none will do
	// (https://github.com/microsoft/terminal/issues/11276). Not always: wine would start it without a console.
	for _, f := range []*os.File{os.Stdin, os.Stdout, os.Stderr} {
		var mode uint32
		if windows.GetConsoleMode(windows.Handle(f.Fd()), &mode) != nil {
			si.Flags = windows.STARTF_USESTDHANDLES
		}
	}
	app, err1 := windows.UTF16PtrFromString(path)
	line, err2 := windows.UTF16PtrFromString(windows.ComposeCommandLine(argv))
	cwd, err3 := windows.UTF16PtrFromString(cmp.Or(dir, "."))
	p.job, err = windows.CreateJobObject(nil, nil)
	if err := errors.Join(err, err1, err2, err3); err != nil {
		return err
	}
	block := utf16.Encode([]rune(strings.Join(env, "\x00") + "\x00\x00"))
	var pi windows.ProcessInformation
	const flags = windows.EXTENDED_STARTUPINFO_PRESENT | windows.CREATE_UNICODE_ENVIRONMENT | windows.CREATE_SUSPENDED
	if err := windows.CreateProcess(app, line, nil, nil, false, flags, &block[0], cwd, &si.StartupInfo, &pi); err != nil {
		return err
	}
	defer windows.CloseHandle(pi.Thread)
	p.process, p.pid = pi.Process, int(pi.ProcessId)
	err = errors.Join(p.limitJob(windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE), windows.AssignProcessToJobObject(p.job, p.process))
	if err == nil {
		_, err = windows.ResumeThread(pi.Thread)
	}
	if err != nil {
		windows.TerminateProcess(p.process, 1)
	}
	return err
}

// limitJob says what becomes of the job's processes when its last handle, ours, is closed.
func (p *winPTY) limitJob(flags uint32) error {
	var limits windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	limits.BasicLimitInformation.LimitFlags = flags
	_, err := windows.SetInformationJobObject(p.job, windows.JobObjectExtendedLimitInformation,
		uintptr(unsafe.Pointer(&limits)), uint32(unsafe.Sizeof(limits)))
	return err
}

// live waits for the child, then for its last output, and closes the console. Older console hosts paint late
// and lose what is not painted then (https://github.com/microsoft/terminal/issues/18552). A program that the
// child left behind without a console lives on, as it would without us.
func (p *winPTY) live() {
	windows.WaitForSingleObject(p.process, windows.INFINITE)
	var code uint32
	if windows.GetExitCodeProcess(p.process, &code); code == uint32(windows.STATUS_CONTROL_C_EXIT) {
		code = 130 // as the shells of other systems say it
	}
	p.code = int(code)
	p.limitJob(0)
	close(p.exited)
	for enough, quiet := time.Now().Add(500*time.Millisecond), false; !quiet && time.Now().Before(enough); {
		select {
		case <-p.heard:
		case <-time.After(100 * time.Millisecond):
			quiet = true
		}
	}
	p.hangUp()
}

// Read gives io.EOF when the console host is gone and all it painted has been read.
func (p *winPTY) Read(b []byte) (int, error) {
	n, err := p.out.Read(b) // Go makes ERROR_BROKEN_PIPE io.EOF
	select {
	case p.heard <- struct{}{}:
	default:
	}
	return n, err
}

func (p *winPTY) Write(b []byte) (int, error) { return p.in.Write(b) }

// hangUp closes the console: its programs get CTRL_CLOSE_EVENT, and Read comes to its end.
func (p *winPTY) hangUp() {
	p.closing.Do(func() { windows.ClosePseudoConsole(p.console) })
}

// Close hangs up on a goroutine of its own: before Windows 11 24H2 that waits until all output is read
// (https://learn.microsoft.com/windows/console/closepseudoconsole).
func (p *winPTY) Close() error {
	go p.hangUp()
	p.out.Close()
	if err := p.in.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Resize repaints; pixels are unknown here.
func (p *winPTY) Resize(s Size) error { return windows.ResizePseudoConsole(p.console, coord(s)) }

func coord(s Size) windows.Coord { return windows.Coord{X: int16(s.Cols), Y: int16(s.Rows)} }

func (p *winPTY) Wait() int { <-p.exited; return p.code }
func (p *winPTY) PID() int  { return p.pid }

// Signal types Ctrl-C for os.Interrupt; any other signal ends everything in the job, which is all there is.
func (p *winPTY) Signal(sig os.Signal) (err error) {
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
	}
	if sig == os.Interrupt {
		_, err = p.in.Write([]byte{3})
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

// terminalSize asks the host's console; f is its input or output.
func terminalSize(f *os.File) (Size, error) {
	out, err := consoleOutput()
	if err != nil {
		return Size{}, err
	}
	defer out.Close()
	var info windows.ConsoleScreenBufferInfo
	err = windows.GetConsoleScreenBufferInfo(windows.Handle(out.Fd()), &info)
	w := info.Window
	return Size{Rows: uint16(w.Bottom - w.Top + 1), Cols: uint16(w.Right - w.Left + 1)}, err
}

func consoleOutput() (*os.File, error) { return os.OpenFile("CONOUT$", os.O_RDWR, 0) }

// rawMode gives every key as bytes, escape sequences both ways, in UTF-8; restore undoes it, any number of times.
func rawMode(f *os.File) (restore func() error, err error) {
	out, err := consoleOutput()
	if err != nil {
		return nil, err
	}
	hin, hout := windows.Handle(f.Fd()), windows.Handle(out.Fd())
	var in0, out0 uint32
	if err := errors.Join(windows.GetConsoleMode(hin, &in0), windows.GetConsoleMode(hout, &out0)); err != nil {
		out.Close()
		return nil, err
	}
	inCP, _ := windows.GetConsoleCP()
	outCP, _ := windows.GetConsoleOutputCP()
	set := func(inMode, outMode, inCP, outCP uint32) error {
		return errors.Join(windows.SetConsoleMode(hin, inMode), windows.SetConsoleMode(hout, outMode),
			windows.SetConsoleCP(inCP), windows.SetConsoleOutputCP(outCP))
	}
	restore = func() error { return set(in0, out0, inCP, outCP) } // keeps out open, to be called again
	const cooked = windows.ENABLE_PROCESSED_INPUT | windows.ENABLE_LINE_INPUT | windows.ENABLE_ECHO_INPUT
	const utf8 = 65001
	err = set(in0&^cooked|windows.ENABLE_VIRTUAL_TERMINAL_INPUT, out0|windows.ENABLE_PROCESSED_OUTPUT|
		windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING|windows.DISABLE_NEWLINE_AUTO_RETURN, utf8, utf8)
	if err != nil {
		return nil, errors.Join(err, restore())
	}
	return restore, nil
}

// resizeSignals delivers a value per change of the host console's size; stop ends it. Windows tells of that
// only among the key events, which are read as bytes, so the size is looked at twice a second.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c, done := make(chan os.Signal, 1), make(chan struct{})
	go func() {
		ticker := time.NewTicker(500 * time.Millisecond)
		defer ticker.Stop()
		for last, _ := terminalSize(f); ; {
			select {
			case <-done:
				return
			case <-ticker.C:
			}
			if now, err := terminalSize(f); err == nil && now != last {
				last = now
				select {
				case c <- syscall.Signal(28): // SIGWINCH elsewhere
				default:
				}
			}
		}
	}()
	return c, sync.OnceFunc(func() { close(done) })
}

// There is no job control: these never come.
const suspendSignal, resumeSignal = syscall.Signal(-1), syscall.Signal(-2)

// endSignals are those that end a session; closing the window, logging off and shutting down come as SIGTERM.
func endSignals() []os.Signal { return []os.Signal{os.Interrupt, syscall.SIGTERM} }

func stopSelf() error { return errors.ErrUnsupported }

// lockFile takes an exclusive lock on the open file; wait false: errLocked at once if another has it. Locks
// keep others from reading here, so it is on a byte far beyond the end.
func lockFile(f *os.File, wait bool) error {
	flags := uint32(windows.LOCKFILE_EXCLUSIVE_LOCK)
	if !wait {
		flags |= windows.LOCKFILE_FAIL_IMMEDIATELY
	}
	err := windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errLocked
	}
	if err != nil {
		return &fs.PathError{Op: "lock", Path: f.Name(), Err: err}
	}
	return nil
}

func unlockFile(f *os.File) error {
	return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
}

// syncDir does nothing: a folder cannot be flushed here, and NTFS logs names in its journal.
func syncDir(dir string) error { return nil }

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) int64 {
	const access = windows.PROCESS_QUERY_LIMITED_INFORMATION | windows.SYNCHRONIZE
	h, err := windows.OpenProcess(access, false, uint32(pid))
	if err != nil {
		return 0
	}
	defer windows.CloseHandle(h)
	var created, exit, kernel, user windows.Filetime
	ended, _ := windows.WaitForSingleObject(h, 0)
	if ended == windows.WAIT_OBJECT_0 || windows.GetProcessTimes(h, &created, &exit, &kernel, &user) != nil {
		return 0
	}
	return created.Nanoseconds()
}

// ownedPrivate says what is wrong when path is not the user's own, or when anybody but the user, the system
// and the administrators is allowed something.
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() && !info.IsDir() {
		return fmt.Errorf("%s is neither a regular file nor a folder: %w", path, fs.ErrPermission)
	}
	sd, err := windows.GetNamedSecurityInfo(path, windows.SE_FILE_OBJECT,
		windows.OWNER_SECURITY_INFORMATION|windows.DACL_SECURITY_INFORMATION)
	if err != nil {
		return fmt.Errorf("reading who may open %s: %w", path, err)
	}
	user, err := windows.GetCurrentProcessToken().GetTokenUser()
	if err != nil {
		return err
	}
	ours := func(sid *windows.SID) bool {
		return sid.Equals(user.User.Sid) || sid.IsWellKnown(windows.WinLocalSystemSid) ||
			sid.IsWellKnown(windows.WinBuiltinAdministratorsSid) || sid.IsWellKnown(windows.WinCreatorOwnerRightsSid)
	}
	if owner, _, err := sd.Owner(); err != nil || !ours(owner) {
		return fmt.Errorf("%s belongs to another user: %w", path, fs.ErrPermission)
	}
	acl, _, err := sd.DACL()
	if err != nil || acl == nil {
		return fmt.Errorf("%s can be reached by everybody: %w", path, fs.ErrPermission)
	}
	for i := range uint32(acl.AceCount) {
		var ace *windows.ACCESS_ALLOWED_ACE
		if err := windows.GetAce(acl, i, &ace); err != nil {
			return err
		}
		if ace.Header.AceType == windows.ACCESS_ALLOWED_ACE_TYPE && !ours((*windows.SID)(unsafe.Pointer(&ace.SidStart))) {
			return fmt.Errorf("%s can be reached by others; run: icacls %s /inheritance:r /grant:r %%USERNAME%%:F", path, path)
		}
	}
	return nil
}

// onlyOurs is a security descriptor that lets in the user and the system, whatever the folder above says.
func onlyOurs() (*windows.SecurityAttributes, error) {
	user, err := windows.GetCurrentProcessToken().GetTokenUser()
	if err != nil {
		return nil, err
	}
	sd, err := windows.SecurityDescriptorFromString("D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;" + user.User.Sid.String() + ")")
	return &windows.SecurityAttributes{Length: uint32(unsafe.Sizeof(windows.SecurityAttributes{})), SecurityDescriptor: sd}, err
}

// mkdirPrivate makes a folder that only the user can enter; an error wraps fs.ErrExist when it is there.
func mkdirPrivate(path string) error {
	sa, err := onlyOurs()
	name, nameErr := windows.UTF16PtrFromString(path)
	if err = errors.Join(err, nameErr); err == nil {
		err = windows.CreateDirectory(name, sa)
	}
	if err != nil {
		return &fs.PathError{Op: "mkdir", Path: path, Err: err}
	}
	return nil
}

// openPrivate opens or creates a file that only the user can open, never following a link; it must be
// ownedPrivate and regular, with one name. With O_APPEND it cannot be truncated. Others may rename over it.
func openPrivate(path string, flag int) (*os.File, error) {
	access, create := uint32(windows.GENERIC_READ), uint32(windows.OPEN_EXISTING)
	switch {
	case flag&os.O_APPEND != 0:
		access |= windows.FILE_APPEND_DATA | windows.FILE_WRITE_ATTRIBUTES
	case flag&(os.O_WRONLY|os.O_RDWR) != 0:
		access |= windows.GENERIC_WRITE
	}
	switch {
	case flag&os.O_EXCL != 0:
		create = windows.CREATE_NEW
	case flag&os.O_CREATE != 0:
		create = windows.OPEN_ALWAYS
	}
	sa, err := onlyOurs()
	name, nameErr := windows.UTF16PtrFromString(path)
	if err := errors.Join(err, nameErr); err != nil {
		return nil, err
	}
	h, err := windows.CreateFile(name, access, shareAll, sa, create, windows.FILE_FLAG_OPEN_REPARSE_POINT, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(h), path)
	var info windows.ByHandleFileInformation
	if err = windows.GetFileInformationByHandle(h, &info); err == nil && info.NumberOfLinks > 1 {
		err = fmt.Errorf("%s has a second name (%d hard links)", path, info.NumberOfLinks)
	}
	if err == nil {
		err = ownedPrivate(path)
	}
	if err == nil && flag&os.O_TRUNC != 0 {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

const shareAll = windows.FILE_SHARE_READ | windows.FILE_SHARE_WRITE | windows.FILE_SHARE_DELETE

// renameOver is os.Rename that also replaces a file others have open (by openPrivate), as on other systems:
// https://learn.microsoft.com/windows-hardware/drivers/ddi/ntifs/ns-ntifs-_file_rename_information
func renameOver(from, to string) error {
	to, err := filepath.Abs(to)
	name, err1 := windows.UTF16PtrFromString(from)
	target, err2 := windows.UTF16FromString(to)
	if err := errors.Join(err, err1, err2); err != nil {
		return err
	}
	h, err := windows.CreateFile(name, windows.DELETE|windows.SYNCHRONIZE, shareAll, nil, windows.OPEN_EXISTING, 0, 0)
	if err != nil {
		return &fs.PathError{Op: "rename", Path: from, Err: err}
	}
	defer windows.CloseHandle(h)
	info := struct {
		flags  uint32 // FILE_RENAME_REPLACE_IF_EXISTS, FILE_RENAME_POSIX_SEMANTICS
		root   windows.Handle
		length uint32 // of the name, in bytes
		name   [1024]uint16
	}{flags: 1 | 2, length: uint32(2 * (len(target) - 1))}
	copy(info.name[:], target)
	err = windows.SetFileInformationByHandle(h, windows.FileRenameInfoEx, (*byte)(unsafe.Pointer(&info)), uint32(unsafe.Sizeof(info)))
	if err != nil { // a file system without it
		return os.Rename(from, to)
	}
	return nil
}

// networkFS says "network" where locks may not hold between machines, else "".
func networkFS(dir string) string {
	root, err := windows.UTF16PtrFromString(filepath.VolumeName(dir) + `\`)
	if err == nil && windows.GetDriveType(root) == windows.DRIVE_REMOTE {
		return "network"
	}
	return ""
}

// watchFolder: NTFS tells of a growing file only when it is closed or flushed, so the caller has to look.
func watchFolder(dir string) (ch <-chan struct{}, stop func()) { return nil, func() {} }
