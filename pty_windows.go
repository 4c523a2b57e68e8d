// Everything that differs between operating systems, for Windows (10 1809 and later, which has ConPTY). pty_unix.go has
// the same functions in the same order and says what they do; here stands what is different.
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

const suspendSignal = syscall.Signal(-1)                    // never comes: there is no job control
const drainWait = 250 * time.Millisecond                    // from the child's end to the console's: see live
var screen, _ = os.OpenFile("CONOUT$", os.O_RDWR, 0)        // the host's console, wherever our output goes; nil: none
var me, _ = windows.GetCurrentProcessToken().GetTokenUser() // cannot fail

// winPTY is a pseudo-console and the child. The console host paints its screen into a pipe as escape codes.
type winPTY struct {
	in, out          *os.File // our ends of the console's pipes
	console, process windows.Handle
	hangUp           func()        // closes the console, once: its programs get CTRL_CLOSE_EVENT, Read its end
	exited           chan struct{} // closed when the child is gone
	pid, code        uint32        // code is valid then
}

// startPTY: the pseudo-console ends with us, and its programs with it. Each program has its own modes, not host's.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p := &winPTY{exited: make(chan struct{})}
	p.hangUp = sync.OnceFunc(func() { windows.ClosePseudoConsole(p.console) })
	if err := p.start(argv, env, dir, size); err != nil {
		p.Close()
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	go p.live()
	return p, nil
}

func findTool(name string) (string, error) { // as cmd.exe does it: the current folder counts
	path, err := exec.LookPath(name)
	return path, when(err != nil && !errors.Is(err, exec.ErrDot), errNoTool)
}

func (p *winPTY) start(argv, env []string, dir string, size Size) error {
	path, toolErr := findTool(argv[0])
	theirIn, in, inErr := os.Pipe()
	out, theirOut, outErr := os.Pipe()
	defer theirIn.Close()
	defer theirOut.Close()
	p.in, p.out = in, out
	r, w := windows.Handle(theirIn.Fd()), windows.Handle(theirOut.Fd())
	attrs, attrErr := windows.NewProcThreadAttributeList(1)
	err := windows.CreatePseudoConsole(coord(size), r, w, 0, &p.console)
	if err = cmp.Or(toolErr, inErr, outErr, attrErr, err); err != nil {
		return err
	}
	defer attrs.Delete()
	console := *(*unsafe.Pointer)(unsafe.Pointer(&p.console)) // the value, not its address, is the attribute
	attrs.Update(windows.PROC_THREAD_ATTRIBUTE_PSEUDOCONSOLE, console, unsafe.Sizeof(p.console))
	si := windows.StartupInfoEx{ProcThreadAttributeList: attrs.List()}
	si.Cb = uint32(unsafe.Sizeof(si))
	// No standard handles, or the child gets ours (github.com/microsoft/terminal/issues/11276); else as wine needs it.
	if !onTerminal(os.Stdin) || !onTerminal(os.Stdout) || !onTerminal(os.Stderr) {
		si.Flags = windows.STARTF_USESTDHANDLES
	}
	var pi windows.ProcessInformation
	err = windows.CreateProcess(wide(path), wide(windows.ComposeCommandLine(argv)), nil, nil, false,
		windows.EXTENDED_STARTUPINFO_PRESENT|windows.CREATE_UNICODE_ENVIRONMENT, wide(strings.Join(env, "\x00")+"\x00"),
		wide(cmp.Or(dir, ".")), &si.StartupInfo, &pi)
	p.process, p.pid = pi.Process, pi.ProcessId
	windows.CloseHandle(pi.Thread)
	return err
}

func wide(s string) *uint16 { return &utf16.Encode([]rune(s + "\x00"))[0] }
func (p *winPTY) live() { // the console paints the last words late: github.com/microsoft/terminal/issues/18552
	windows.WaitForSingleObject(p.process, windows.INFINITE)
	windows.GetExitCodeProcess(p.process, &p.code)
	if windows.NTStatus(p.code) == windows.STATUS_CONTROL_C_EXIT {
		p.code = 130 // SIGINT's elsewhere
	}
	close(p.exited)
	time.AfterFunc(drainWait, p.hangUp)
}

func (p *winPTY) Read(b []byte) (int, error)  { return p.out.Read(b) }
func (p *winPTY) Write(b []byte) (int, error) { return p.in.Write(b) }
func (p *winPTY) Wait() int                   { <-p.exited; return int(p.code) }
func (p *winPTY) PID() int                    { return int(p.pid) }
func (p *winPTY) Unread() int                 { return 0 } // not known
func (p *winPTY) Resize(s Size) error         { return windows.ResizePseudoConsole(p.console, coord(s)) }
func coord(s Size) windows.Coord              { return windows.Coord{X: int16(s.Cols), Y: int16(s.Rows)} }
func (p *winPTY) Close() error {
	go p.hangUp() // ClosePseudoConsole waits, before Windows 11 24H2, until all output is read (its documentation)
	return errors.Join(p.out.Close(), p.in.Close())
}
func (p *winPTY) Signal(sig os.Signal) error { // Ctrl-C is typed; any other ends the child, which is all there is
	if sig == os.Interrupt {
		_, err := p.in.Write([]byte{3})
		return err
	}
	return windows.TerminateProcess(p.process, 128+uint32(sig.(syscall.Signal)))
}
func (p *winPTY) Terminate(done <-chan struct{}) {
	go p.hangUp() // which programs may use to end well
	select {
	case <-done:
	case <-p.exited:
	case <-time.After(3 * time.Second):
		p.Signal(syscall.SIGKILL)
	}
}
func (p *winPTY) State() TTYState { return TTYState{Canonical: true, Echo: true} } // the console host does not tell
func terminalSize(f *os.File) (Size, error) { // of the host's console, of which f is the input or output
	_, err := term.GetState(int(f.Fd()))
	cols, rows, sizeErr := term.GetSize(int(screen.Fd()))
	return Size{Rows: uint16(rows), Cols: uint16(cols)}, cmp.Or(err, sizeErr)
}
func rawMode(f *os.File) (restore func() error, err error) { // escape sequences both ways; the os package gives UTF-8
	in, out, mode := int(f.Fd()), windows.Handle(screen.Fd()), uint32(0)
	keys, err := term.MakeRaw(in)
	if err = cmp.Or(err, windows.GetConsoleMode(out, &mode)); err != nil {
		return nil, err
	}
	const codes = windows.ENABLE_PROCESSED_OUTPUT | windows.ENABLE_VIRTUAL_TERMINAL_PROCESSING
	err = windows.SetConsoleMode(out, mode|codes|windows.DISABLE_NEWLINE_AUTO_RETURN)
	return func() error { return cmp.Or(term.Restore(in, keys), windows.SetConsoleMode(out, mode)) }, err
}

// waitReady is not needed here: no stream of ours says that it would block.
func waitReady(*os.File, bool) error { return errors.ErrUnsupported }

func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) { // looks twice a second: there is no signal
	c, tick := make(chan os.Signal, 1), time.NewTicker(500*time.Millisecond)
	go func() {
		last, _ := terminalSize(f)
		for range tick.C {
			if now, err := terminalSize(f); err == nil && now != last && len(c) == 0 {
				last = now
				c <- syscall.Signal(28) // SIGWINCH elsewhere
			}
		}
	}()
	return c, tick.Stop
}
func endSignals() []os.Signal { return []os.Signal{os.Interrupt, syscall.SIGTERM} } // SIGTERM: window closed, shutdown
func stopSelf()               {}                                                    // see suspendSignal
func lockFile(f *os.File, wait bool) error { // a byte far beyond the end, for others cannot read what is locked
	how := windows.LOCKFILE_EXCLUSIVE_LOCK | when(!wait, uint32(windows.LOCKFILE_FAIL_IMMEDIATELY))
	err := windows.LockFileEx(windows.Handle(f.Fd()), how, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
	return cmp.Or(when(err == windows.ERROR_LOCK_VIOLATION, errLocked), err)
}
func unlockFile(f *os.File) error {
	return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, 1, 0, &windows.Overlapped{OffsetHigh: 1 << 30})
}
func syncDir(dir string) error { return nil } // a folder cannot be flushed here; NTFS logs names in its journal
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

// parentOf: Windows keeps the pid of a parent that has ended, which another process may have by now: a parent is older.
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

func systemSession() int { return 0 } // there are no such sessions here

// ownedPrivate is nil for a regular file or folder whose owner and access list name only the user, system and admins.
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	sd, aclErr := windows.GetNamedSecurityInfo(path, windows.SE_FILE_OBJECT,
		windows.OWNER_SECURITY_INFORMATION|windows.DACL_SECURITY_INFORMATION)
	if err = cmp.Or(err, aclErr); err != nil || !info.Mode().IsRegular() && !info.IsDir() {
		return cmp.Or(err, fmt.Errorf("%s is not a file or folder of your own: %w", path, os.ErrPermission))
	}
	// SDDL: O:owner D:(type;flags;rights;;;who)…; nothing at all is refused too
	who := regexp.MustCompile(`^$|O:(S-[-\d]+|[A-Z]{2})|;([^;()]*)\)|NO_ACCESS_CONTROL`)
	for _, m := range who.FindAllStringSubmatch(sd.String(), -1) {
		sid, err := windows.StringToSid(m[1] + m[2])
		if err != nil || !sid.Equals(me.User.Sid) && !sid.IsWellKnown(windows.WinLocalSystemSid) &&
			!sid.IsWellKnown(windows.WinBuiltinAdministratorsSid) {
			return fmt.Errorf("%s can be reached by others; run: icacls %s /inheritance:r /grant:r %%USERNAME%%:F", path, path)
		}
	}
	return nil
}

// mkdirPrivate makes a folder only for the user and the system, and all that will be in it; fs.ErrExist if it is there.
func mkdirPrivate(path string) error {
	sd, err := windows.SecurityDescriptorFromString("D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;" + me.User.Sid.String() + ")")
	attr := windows.SecurityAttributes{SecurityDescriptor: sd}
	if attr.Length = uint32(unsafe.Sizeof(attr)); err != nil {
		return err
	}
	return windows.CreateDirectory(wide(path), &attr)
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
	}
	return f, err
}

func networkFS(dir string) string                              { return "" }             // shares keep locks
func watchFolder(dir string) (ch <-chan struct{}, stop func()) { return nil, func() {} } // NTFS tells of closed files
