//go:build linux || darwin

// Everything that differs between operating systems, for Linux and macOS; pty_windows.go has the same
// functions in the same order. Ioctls and system calls that x/sys names for one system only go out by number
// (right for amd64 and arm64). A descriptor is reached through SyscallConn, never through Fd: Fd makes the
// file blocking, and neither Close nor a deadline ends a blocked Read then. Nothing here looks at a byte of
// what passes through.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	linux = runtime.GOOS == "linux"
	amd64 = runtime.GOARCH == "amd64"
)

// When the child is gone, what it wrote is still read; a grandchild that holds the terminal gets only this.
const (
	drainQuiet = 100 * time.Millisecond // the end, when so long nothing came
	drainWait  = 500 * time.Millisecond // waiting in all
	drainBytes = 1 << 20                // read in all; above what Linux buffers for a pty, 640 KiB (tty_buffer.c)
)

// unixPTY is the master side and the child. Read belongs to one goroutine; all else may be called from any.
type unixPTY struct {
	master *os.File
	tty    uint64 // device number of the slave
	proc   *os.Process
	exited chan struct{} // closed when the child has been reaped
	code   int           // valid then

	draining bool          // Read's: the child is gone
	patience time.Duration // Read's: what is left of drainWait
	ration   int           // Read's: what is left of drainBytes
}

// startPTY opens a pseudo-terminal of that size with the host's termios (host may be nil; it must not be in
// raw mode yet) and starts argv in it as session leader with the terminal as its controlling one. Signals
// start at their defaults, except HUP and INT, which stay ignored when this process was started so (nohup)
// and has not asked for them. Errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	path, err := findTool(argv[0])
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	p := &unixPTY{exited: make(chan struct{}), patience: drainWait, ration: drainBytes}
	slave, err := p.open(size, host)
	if err != nil {
		return nil, fmt.Errorf("opening a pseudo-terminal: %w", err)
	}
	defer slave.Close()
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: true}
	// Linux only: an agent that ignores the SIGHUP of its closing terminal still ends after kill -9 of ours.
	if f := reflect.ValueOf(sys).Elem().FieldByName("Pdeathsig"); f.IsValid() {
		f.SetInt(int64(syscall.SIGTERM))
	}
	started := make(chan error)
	go p.live(path, argv, &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{slave, slave, slave}, Sys: sys}, started)
	if err := <-started; err != nil {
		p.Close()
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	return p, nil
}

// findTool is exec.LookPath as a shell does it: "." in PATH counts, and what is missing is not found.
func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil || errors.Is(err, exec.ErrDot):
		return path, nil
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist):
		return "", errNoTool
	case errors.Is(err, syscall.EISDIR):
		return "", fmt.Errorf("is a folder: %w", fs.ErrPermission)
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

// open sets p.master and p.tty and gives the slave, its size and modes as the child is to find them.
func (p *unixPTY) open(size Size, host *os.File) (*os.File, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p.master = os.NewFile(uintptr(fd), "/dev/ptmx") // non-blocking: in the poller, so that Close ends a Read
	name, err := unlockSlave(fd)
	if err == nil {
		fd, err = unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	slave := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	unix.Fstat(fd, &st)
	p.tty = uint64(st.Rdev)
	modes, err := termios(slave, nil)
	if err == nil {
		modes.Iflag |= unix.IUTF8 // all that the kernel's defaults lack of a terminal emulator's
		if h, hostErr := termios(host, nil); hostErr == nil {
			modes = h
		}
		_, err = termios(slave, modes)
	}
	if err = errors.Join(err, p.Resize(size)); err != nil {
		slave.Close()
		p.Close()
	}
	return slave, err
}

// unlockSlave lets the other side of a new master be opened and gives its name.
func unlockSlave(master int) (string, error) {
	if linux { // TIOCSPTLCK, TIOCGPTN: linux/include/uapi/asm-generic/ioctls.h
		if err := unix.IoctlSetPointerInt(master, 0x40045431, 0); err != nil {
			return "", err
		}
		n, err := unix.IoctlGetInt(master, 0x80045430)
		return "/dev/pts/" + strconv.Itoa(n), err
	}
	var name [128]byte // TIOCPTYGRANT, TIOCPTYUNLK, TIOCPTYGNAME: macOS <sys/ttycom.h>
	for _, req := range []uintptr{0x20007454, 0x20007452, 0x40807453} {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), req, uintptr(unsafe.Pointer(&name[0])))
		if errno != 0 {
			return "", errno
		}
	}
	return unix.ByteSliceToString(name[:]), nil
}

// live starts the child and reaps it. Both happen on one thread that lives as long as the child: Linux
// sends Pdeathsig when the thread that forked ends, not the process (prctl(2)).
func (p *unixPTY) live(path string, argv []string, attr *os.ProcAttr, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	proc, err := os.StartProcess(path, argv, attr)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, which every shell runs
		proc, err = os.StartProcess("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}
	p.proc = proc
	started <- err
	if err != nil {
		return
	}
	if state, err := proc.Wait(); err != nil {
		p.code = 1
	} else if ws := state.Sys().(syscall.WaitStatus); ws.Signaled() {
		p.code = 128 + int(ws.Signal())
	} else {
		p.code = ws.ExitStatus()
	}
	close(p.exited)
	p.master.SetReadDeadline(time.Unix(1, 0)) // wakes Read, which begins to drain
}

// Read gives io.EOF when nobody holds the terminal any more, or when the child is gone and what it wrote has
// been read. The bounds on that count what is waited for and read, not the time that passes: a host that is
// slow to take the output loses none of it.
func (p *unixPTY) Read(b []byte) (n int, err error) {
	if !p.draining {
		n, err = p.master.Read(b)
		p.draining = errors.Is(err, os.ErrDeadlineExceeded)
	}
	if p.draining && (p.patience <= 0 || p.ration <= 0) {
		return 0, io.EOF
	}
	if p.draining {
		now := time.Now()
		if err := p.master.SetReadDeadline(now.Add(min(drainQuiet, p.patience))); err != nil {
			return 0, err
		}
		n, err = p.master.Read(b)
		p.patience -= time.Since(now)
		p.ration -= n
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.EIO) { // EIO: Linux, the last slave was closed
		err = io.EOF
	}
	return n, err
}

func (p *unixPTY) Write(b []byte) (int, error) { return p.master.Write(b) }

// Close hangs the terminal up: the foreground group gets SIGHUP.
func (p *unixPTY) Close() error { p.master.Close(); return nil }

// Resize sends SIGWINCH to the foreground group when the size is another one.
func (p *unixPTY) Resize(s Size) error {
	return control(p.master, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ,
			&unix.Winsize{Row: s.Rows, Col: s.Cols, Xpixel: s.XPixel, Ypixel: s.YPixel})
	})
}

func (p *unixPTY) Wait() int { <-p.exited; return p.code }
func (p *unixPTY) PID() int  { return p.proc.Pid }

// Signal says os.ErrProcessDone when the child is gone.
func (p *unixPTY) Signal(sig os.Signal) error { return p.signal(p.foreground(), sig) }

func (p *unixPTY) signal(pgrp int, sig os.Signal) error {
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
		return unix.Kill(-pgrp, sig.(syscall.Signal))
	}
}

// Terminate also wakes what is stopped, so that SIGTERM is seen. The foreground group and the leader's own
// differ under a job-control shell.
func (p *unixPTY) Terminate(done <-chan struct{}) {
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGCONT} {
		p.Signal(sig)
		p.signal(p.proc.Pid, sig)
	}
	select {
	case <-done:
	case <-p.exited:
	case <-time.After(3 * time.Second):
		p.Signal(syscall.SIGKILL)
		p.signal(p.proc.Pid, syscall.SIGKILL)
	}
}

// foreground is the terminal's foreground process group, the leader's own when there is none.
func (p *unixPTY) foreground() int {
	if pgrp := terminalGroup(p.master); pgrp > 1 {
		return pgrp
	}
	return p.proc.Pid
}

// State costs 20 to 100 µs, more with many processes on the machine or threads in the group: BenchmarkPTYState.
func (p *unixPTY) State() (s TTYState) {
	if t, err := termios(p.master, nil); err == nil {
		s.Canonical, s.Echo = t.Lflag&unix.ICANON != 0, t.Lflag&unix.ECHO != 0
	}
	if linux {
		s.Reading = groupReading(p.tty, p.foreground(), 0)
	}
	return s
}

// groupReading tells whether any thread of the process group is blocked in read on the terminal with that
// device number, or in poll, select or epoll with the terminal in its read set; measured on 442 programs:
// recall .99, precision .98. A relay (sudo, script) waits for its inner terminal too and is judged by that.
func groupReading(tty uint64, pgrp, depth int) Reading {
	result := ReadingBusy
	found := func(pid string) bool {
		for _, tid := range names("/proc/" + pid + "/task") {
			if r := threadReading(tty, "/proc/"+pid, "/proc/"+pid+"/task/"+tid, depth); r != ReadingBusy {
				result = r
			}
			if result == ReadingYes {
				break
			}
		}
		return result == ReadingYes
	}
	if found(strconv.Itoa(pgrp)) { // it mostly is the leader, and looking at all processes costs more
		return result
	}
	for _, name := range names("/proc") {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == pgrp {
			continue
		}
		if id, err := unix.Getpgid(pid); err == nil && id == pgrp && found(name) {
			break
		}
	}
	return result
}

// names lists a folder, nothing when it is gone.
func names(path string) []string {
	dir, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer dir.Close()
	list, _ := dir.Readdirnames(-1)
	return list
}

func threadReading(tty uint64, proc, task string, depth int) Reading {
	fds, err := waitsFor(proc, task)
	if _, alive := os.Lstat(task); err != nil && alive == nil { // another user's, or the system does not say
		return ReadingUnknown
	}
	found, inner := false, ""
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Stat(proc+"/fd/"+strconv.Itoa(fd), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		switch uint64(st.Rdev) { // linux/Documentation/admin-guide/devices.txt
		case tty, unix.Mkdev(5, 0): // /dev/tty
			found = true
		case unix.Mkdev(5, 2): // /dev/ptmx
			info, _ := os.ReadFile(proc + "/fdinfo/" + strconv.Itoa(fd))
			_, inner, _ = strings.Cut(string(info), "tty-index:")
		}
	}
	// A stopped thread still shows the call that it will restart.
	if stat := statFields(task); !found || len(stat) == 0 || strings.ContainsAny(stat[0], "TtZX") {
		return ReadingBusy
	}
	var n uint32
	if _, err := fmt.Sscan(inner, &n); err == nil && depth < 4 {
		return sessionReading(unix.Mkdev(136, n), depth+1)
	}
	return ReadingYes
}

// sessionReading judges an inner terminal by its own foreground group, which any process on it knows.
func sessionReading(tty uint64, depth int) Reading {
	for _, name := range names("/proc") {
		f := statFields("/proc/" + name)
		if len(f) > 5 && f[4] == strconv.FormatUint(tty, 10) {
			pgrp, _ := strconv.Atoi(f[5])
			return groupReading(tty, pgrp, depth)
		}
	}
	return ReadingUnknown
}

// statFields is /proc/…/stat from field 3 on: state, ppid, pgrp, session, tty_nr, tpgid, … (proc_pid_stat(5)).
// The name before it ends at the last parenthesis.
func statFields(proc string) []string {
	b, _ := os.ReadFile(proc + "/stat")
	return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
}

// waitsFor lists the descriptors whose input the thread is blocked on; none when it runs or does anything
// else. The numbers are those of linux/arch/x86/entry/syscalls/syscall_64.tbl and, for arm64,
// linux/include/uapi/asm-generic/unistd.h.
func waitsFor(proc, task string) (fds []int, err error) {
	b, err := os.ReadFile(task + "/syscall")
	if err != nil {
		return nil, err
	}
	var nr int
	var a0, a1 uint64
	if n, _ := fmt.Sscanf(string(b), "%d 0x%x 0x%x", &nr, &a0, &a1); n < 3 {
		return nil, nil // "running", or not in a call
	}
	peek := func(addr, n uint64) []byte { // of the other process's memory
		b := make([]byte, n)
		f, err := os.Open(proc + "/mem")
		if err != nil {
			return nil
		}
		defer f.Close()
		got, _ := f.ReadAt(b, int64(addr))
		return b[:got]
	}
	switch {
	case amd64 && (nr == 0 || nr == 19), !amd64 && (nr == 63 || nr == 65): // read, readv (descriptor, …)
		fds = []int{int(a0)}
	case amd64 && (nr == 7 || nr == 271), !amd64 && nr == 73: // poll, ppoll (array, count, …)
		// struct pollfd {int fd; short events, revents}
		for set := peek(a0, 8*min(a1, 1024)); len(set) >= 8; set = set[8:] {
			if binary.LittleEndian.Uint16(set[4:])&unix.POLLIN != 0 {
				fds = append(fds, int(int32(binary.LittleEndian.Uint32(set))))
			}
		}
	case amd64 && (nr == 23 || nr == 270), !amd64 && nr == 72: // select, pselect6 (count, read set, …)
		for i, set := 0, peek(a1, (min(a0, 1024)+7)/8); i < 8*len(set); i++ {
			if set[i/8]>>(i%8)&1 != 0 {
				fds = append(fds, i)
			}
		}
	case amd64 && (nr == 232 || nr == 281), !amd64 && nr == 22, nr == 441: // epoll_wait, _pwait, _pwait2 (descriptor, …)
		b, err = os.ReadFile(proc + "/fdinfo/" + strconv.FormatUint(a0, 10)) // lines "tfd: 5 events: 19 data: …"
		for line := range strings.Lines(string(b)) {
			var fd, events int
			if n, _ := fmt.Sscanf(line, "tfd: %d events: %x", &fd, &events); n == 2 && events&unix.POLLIN != 0 {
				fds = append(fds, fd)
			}
		}
	}
	return fds, err
}

// control calls fn with f's descriptor, which stays open and in the poller meanwhile.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn() // f may be nil: os.ErrInvalid
	if err != nil {
		return err
	}
	var inner error
	return errors.Join(raw.Control(func(fd uintptr) { inner = fn(int(fd)) }), inner)
}

// termios gives f's modes, or sets them, at once and without flushing type-ahead.
func termios(f *os.File, set *unix.Termios) (t *unix.Termios, err error) {
	get, put := uint(0x5401), uint(0x5402) // TCGETS, TCSETS
	if !linux {
		get, put = 0x40487413, 0x80487414 // TIOCGETA, TIOCSETA
	}
	err = control(f, func(fd int) (err error) {
		if set != nil {
			return unix.IoctlSetTermios(fd, put, set)
		}
		t, err = unix.IoctlGetTermios(fd, get)
		return err
	})
	return t, err
}

// terminalGroup is the terminal's foreground process group, 0 when that cannot be told.
func terminalGroup(f *os.File) (pgrp int) {
	control(f, func(fd int) (err error) { pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP); return err })
	return pgrp
}

// terminalSize asks the host's terminal; an error when f is none.
func terminalSize(f *os.File) (Size, error) {
	ws := &unix.Winsize{}
	err := control(f, func(fd int) (err error) { ws, err = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); return err })
	if err != nil {
		return Size{}, err
	}
	return Size{ws.Row, ws.Col, ws.Xpixel, ws.Ypixel}, nil
}

// rawMode puts the host terminal in raw mode; restore undoes it, any number of times, without flushing
// type-ahead. It leaves a terminal alone that belongs to another job by then.
func rawMode(f *os.File) (restore func() error, err error) {
	before, err := termios(f, nil)
	if err != nil {
		return nil, err
	}
	raw := *before // as cfmakeraw(3)
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if _, err := termios(f, &raw); err != nil {
		return nil, err
	}
	return func() error {
		if pgrp := terminalGroup(f); pgrp > 0 && pgrp != unix.Getpgrp() {
			return nil
		}
		_, err := termios(f, before)
		return err
	}, nil
}

// resizeSignals delivers a value per change of the host terminal's size; stop ends it.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}

// Asks this process to stop (kill -TSTP; in raw mode Ctrl-Z is the child's), and says that it goes on.
const suspendSignal, resumeSignal = syscall.SIGTSTP, syscall.SIGCONT

// endSignals are those that end a session, without the ones this process was started to ignore (nohup):
// asking for these would un-ignore them in the child too.
func endSignals() []os.Signal {
	list := []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT}
	return slices.DeleteFunc(list, signal.Ignored)
}

// stopSelf stops this process as suspendSignal would by default and returns when it goes on; at once where
// the system would ignore the signal because no shell could ever resume us (orphaned process group). It has
// to be SIGSTOP: Go's handler of SIGTSTP stays installed even after signal.Reset.
func stopSelf() error {
	session, err := unix.Getsid(0)
	if parent, _ := unix.Getsid(unix.Getppid()); err != nil || session != parent || session == unix.Getpgrp() {
		return err
	}
	resumed := make(chan os.Signal, 1)
	signal.Notify(resumed, resumeSignal)
	defer signal.Stop(resumed)
	if err := unix.Kill(unix.Getpid(), unix.SIGSTOP); err != nil {
		return err
	}
	<-resumed
	return nil
}

// lockFile takes an exclusive advisory lock on the open file (flock); wait false: errLocked at once if another
// has it. The lock lives as long as f: keep it reachable.
func lockFile(f *os.File, wait bool) error {
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	err := flock(f, how)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errLocked
	}
	return err
}

func unlockFile(f *os.File) error { return flock(f, unix.LOCK_UN) }

func flock(f *os.File, how int) error {
	err := control(f, func(fd int) (err error) {
		for err = unix.EINTR; err == unix.EINTR; {
			err = unix.Flock(fd, how)
		}
		return err
	})
	if err != nil {
		return &fs.PathError{Op: "lock", Path: f.Name(), Err: err}
	}
	return nil
}

// syncDir makes a rename or creation in dir durable; file systems that cannot are taken as they are.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTSUP) {
		return err
	}
	return nil
}

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) int64 {
	if linux {
		f := statFields("/proc/" + strconv.Itoa(pid))
		if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
			return 0
		}
		ticks, _ := strconv.ParseInt(f[19], 10, 64) // clock ticks since boot
		return ticks
	}
	// sysctl kern.proc.pid.PID gives a struct kinfo_proc, which begins with the start time, a struct timeval.
	mib := [4]int32{1, 14, 1, int32(pid)} // CTL_KERN, KERN_PROC, KERN_PROC_PID: <sys/sysctl.h>
	var info [1024]byte
	n := uintptr(len(info))
	_, _, errno := unix.Syscall6(202, uintptr(unsafe.Pointer(&mib[0])), 4, // SYS_sysctl: <sys/syscall.h>
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&n)), 0, 0)
	if errno != 0 || n < 16 {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(info[:]))*1e6 + int64(binary.LittleEndian.Uint32(info[8:]))
}

// ownedPrivate says what is wrong when path is not a regular file or folder of the user's own that group and
// others cannot touch, or is a file with a second name (hard link).
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return private(path, info)
}

func private(path string, info fs.FileInfo) error {
	mode, st := info.Mode(), info.Sys().(*syscall.Stat_t)
	switch {
	case !mode.IsRegular() && !mode.IsDir():
		return fmt.Errorf("%s is neither a regular file nor a folder: %w", path, fs.ErrPermission)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user: %w", path, fs.ErrPermission)
	case mode.Perm()&0o077 != 0:
		return fmt.Errorf("%s can be reached by others (mode %04o); run: chmod go= %s", path, mode.Perm(), path)
	case mode.IsRegular() && st.Nlink > 1:
		return fmt.Errorf("%s has a second name (%d hard links)", path, st.Nlink)
	}
	return nil
}

// mkdirPrivate makes a folder that only the user can enter; an error wraps fs.ErrExist when it is there.
func mkdirPrivate(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return os.Chmod(path, 0o700) // whatever the umask took away
}

// openPrivate opens or creates a file 0600, whatever the umask, never following a symbolic link; it must be
// ownedPrivate. One that is not is not truncated.
func openPrivate(path string, flag int) (*os.File, error) {
	// O_NONBLOCK: a planted FIFO must not hang the open; it means nothing to a regular file.
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err // ELOOP for a symbolic link
	}
	info, err := f.Stat()
	if err == nil {
		err = private(path, info)
	}
	if err == nil && flag&os.O_CREATE != 0 && info.Mode().Perm() != 0o600 {
		err = f.Chmod(0o600)
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

// renameOver is os.Rename, which replaces a file that others have open.
func renameOver(from, to string) error { return os.Rename(from, to) }

// networkFS names the file system when flock may not hold between machines, else "".
func networkFS(dir string) string {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return ""
	}
	if !linux && uint64(st.Flags)&0x1000 == 0 { // no MNT_LOCAL: macOS <sys/mount.h>
		return "network"
	}
	// Magic numbers of statfs(2); macOS's types are small numbers and none of these.
	return map[uint32]string{0x6969: "nfs", 0xff534d42: "cifs", 0xfe534d42: "cifs", 0x517b: "smb", 0x01021997: "9p",
		0x65735546: "fuse", 0x00c36400: "ceph"}[uint32(st.Type)]
}

// watchFolder delivers a value when a file in dir changes, nil where the system has no such thing or has
// run out of it (fs.inotify.max_user_instances, often 128).
func watchFolder(dir string) (ch <-chan struct{}, stop func()) {
	start, add := uintptr(26), uintptr(27) // inotify_init1, inotify_add_watch; tables as for waitsFor
	if amd64 {
		start, add = 294, 254
	}
	name, err := unix.BytePtrFromString(dir)
	if !linux || err != nil {
		return nil, func() {}
	}
	fd, _, errno := unix.Syscall(start, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return nil, func() {}
	}
	f := os.NewFile(fd, "inotify")
	const mask = 0x2 | 0x80 | 0x100 // IN_MODIFY, IN_MOVED_TO, IN_CREATE: <linux/inotify.h>
	if _, _, errno := unix.Syscall(add, fd, uintptr(unsafe.Pointer(name)), mask); errno != 0 {
		f.Close()
		return nil, func() {}
	}
	c := make(chan struct{}, 1)
	go func() { // ends when f is closed
		defer close(c)
		for events := make([]byte, 4096); ; {
			if _, err := f.Read(events); err != nil {
				return
			}
			select {
			case c <- struct{}{}:
			default:
			}
		}
	}()
	return c, func() { f.Close() }
}
