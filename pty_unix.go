//go:build linux || darwin

// Everything that differs between operating systems, for Linux and macOS; pty_windows.go has the same
// functions in the same order:
//
//	startPTY, and the methods of PTY   the child's terminal
//	terminalSize, rawMode              the host's terminal
//	resizeSignals, endSignals, suspendSignal, resumeSignal, stopSelf
//	lockFile, unlockFile, syncDir      what the store's durability rests on
//	processStart                       whether a recorded process still lives
//	ownedPrivate, openPrivate          files nobody else can read or plant
//	networkFS, watchFolder
//
// Rules: no cgo, so ioctls go out raw, their numbers written here because x/sys names only those of the
// system it is built for (they hold for amd64 and arm64). A descriptor is reached through SyscallConn, never
// through Fd: Fd makes the file blocking, and neither Close nor a deadline ends a blocked Read then. Nothing
// here reads the environment or interprets a byte of what passes through.
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
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/include/uapi/asm-generic/ioctls.h.
const (
	linuxTCGETS      = 0x5401
	linuxTCSETS      = 0x5402 // at once, without TCSETSF's flush of type-ahead
	linuxTIOCGPTN    = 0x80045430
	linuxTIOCSPTLCK  = 0x40045431
	linuxTIOCGPTPEER = 0x5441
)

// From macOS <sys/ttycom.h>.
const (
	darwinTIOCGETA     = 0x40487413
	darwinTIOCSETA     = 0x80487414
	darwinTIOCPTYGRANT = 0x20007454
	darwinTIOCPTYUNLK  = 0x20007452
	darwinTIOCPTYGNAME = 0x40807453
)

// When the child is gone, what it wrote is still read; a grandchild that holds the terminal gets only this.
const (
	drainQuiet = 100 * time.Millisecond // the end, when so long nothing came
	drainWait  = 500 * time.Millisecond // waiting in all
	drainBytes = 1 << 20                // read in all; above what Linux buffers for a pty, 640 KiB (tty_buffer.c)
)

const killAfter = 3 * time.Second // between SIGTERM and SIGKILL

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
// and has not asked for them. Errors wrap exec.ErrNotFound or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	path, err := findTool(argv[0])
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	p := &unixPTY{exited: make(chan struct{}), patience: drainWait, ration: drainBytes}
	slave, err := p.open()
	if err != nil {
		return nil, fmt.Errorf("opening a pseudo-terminal: %w", err)
	}
	defer slave.Close()
	if err = p.prepare(slave, size, host); err == nil {
		started := make(chan error)
		attr := &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{slave, slave, slave}, Sys: leaderAttr()}
		go p.live(path, argv, attr, started)
		err = <-started
	}
	if err != nil {
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
	case errors.Is(err, fs.ErrNotExist):
		return "", exec.ErrNotFound
	case errors.Is(err, syscall.EISDIR):
		return "", fmt.Errorf("is a folder: %w", fs.ErrPermission)
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

// leaderAttr makes the child a session leader whose controlling terminal is its descriptor 0. On Linux the
// child gets SIGTERM when this process dies of kill -9, after the SIGHUP of the closing terminal, which some
// agents ignore. The field is missing in macOS's struct, hence reflect.
func leaderAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if f := reflect.ValueOf(attr).Elem().FieldByName("Pdeathsig"); f.IsValid() {
		f.SetInt(int64(syscall.SIGTERM))
	}
	return attr
}

// open sets p.master and p.tty and gives the slave.
func (p *unixPTY) open() (*os.File, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p.master = os.NewFile(uintptr(fd), "/dev/ptmx") // non-blocking: in the poller, so that Close ends a Read
	slave, err := openSlave(fd)
	if err == nil {
		var st unix.Stat_t
		err = unix.Fstat(slave, &st)
		p.tty = uint64(st.Rdev)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return os.NewFile(uintptr(slave), "tty"), nil
}

func openSlave(master int) (int, error) {
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	if runtime.GOOS == "linux" {
		if err := unix.IoctlSetPointerInt(master, linuxTIOCSPTLCK, 0); err != nil {
			return -1, err
		}
		// The kernel's own way to the other end, right even where /dev/pts is another container's.
		if fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), linuxTIOCGPTPEER, flags); errno == 0 {
			return int(fd), nil
		}
		n, err := unix.IoctlGetInt(master, linuxTIOCGPTN)
		if err != nil {
			return -1, err
		}
		return unix.Open("/dev/pts/"+strconv.Itoa(n), flags, 0)
	}
	var name [128]byte // the size is part of TIOCPTYGNAME's number
	for _, step := range []struct{ req, arg uintptr }{
		{darwinTIOCPTYGRANT, 0}, {darwinTIOCPTYUNLK, 0}, {darwinTIOCPTYGNAME, uintptr(unsafe.Pointer(&name[0]))},
	} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), step.req, step.arg); errno != 0 {
			return -1, errno
		}
	}
	return unix.Open(unix.ByteSliceToString(name[:]), flags, 0)
}

// prepare gives the terminal its size and modes before the child can look at them.
func (p *unixPTY) prepare(slave *os.File, size Size, host *os.File) error {
	t, err := termios(slave)
	if err != nil {
		return err
	}
	// What a terminal emulator sets; the special characters are the kernel's defaults.
	t.Iflag |= unix.BRKINT | unix.ICRNL | unix.IXON | unix.IMAXBEL | unix.IUTF8
	t.Oflag |= unix.OPOST | unix.ONLCR
	t.Cflag |= unix.CREAD | unix.CS8
	t.Lflag |= unix.ISIG | unix.ICANON | unix.IEXTEN | unix.ECHO | unix.ECHOE | unix.ECHOK | unix.ECHOCTL | unix.ECHOKE
	if host != nil {
		if h, err := termios(host); err == nil {
			t = h
		}
	}
	if err := setTermios(slave, t); err != nil {
		return err
	}
	return p.Resize(size)
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
	p.code = 1
	if state, err := proc.Wait(); err == nil {
		p.code = state.ExitCode()
		if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			p.code = 128 + int(ws.Signal())
		}
	}
	close(p.exited)
	p.master.SetReadDeadline(time.Unix(1, 0)) // wakes Read, which goes on in drain
}

// Read gives io.EOF when nobody holds the terminal any more, or when the child is gone and what it wrote
// has been read.
func (p *unixPTY) Read(b []byte) (n int, err error) {
	if !p.draining {
		n, err = p.master.Read(b)
		p.draining = errors.Is(err, os.ErrDeadlineExceeded)
	}
	if p.draining {
		n, err = p.drain(b)
	}
	if errors.Is(err, syscall.EIO) { // Linux: the last slave was closed
		err = io.EOF
	}
	return n, err
}

// drain reads on after the child's end. The bounds count what is waited for and read, not the time that
// passes: a host that is slow to take the output loses none of it.
func (p *unixPTY) drain(b []byte) (int, error) {
	if p.patience <= 0 || p.ration <= 0 {
		return 0, io.EOF
	}
	now := time.Now()
	if err := p.master.SetReadDeadline(now.Add(min(drainQuiet, p.patience))); err != nil {
		return 0, err
	}
	n, err := p.master.Read(b)
	p.patience -= time.Since(now)
	p.ration -= n
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = io.EOF
	}
	return n, err
}

func (p *unixPTY) Write(b []byte) (int, error) { return p.master.Write(b) }

// Close hangs the terminal up: the foreground group gets SIGHUP.
func (p *unixPTY) Close() error {
	if err := p.master.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Resize tells the foreground group with SIGWINCH when the size is another one.
func (p *unixPTY) Resize(s Size) error {
	return control(p.master, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ,
			&unix.Winsize{Row: s.Rows, Col: s.Cols, Xpixel: s.XPixel, Ypixel: s.YPixel})
	})
}

func (p *unixPTY) Wait() int { <-p.exited; return p.code }
func (p *unixPTY) PID() int  { return p.proc.Pid }

// Signal says os.ErrProcessDone when the child is gone.
func (p *unixPTY) Signal(sig os.Signal) error {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("sending signal %v: %w", sig, errors.ErrUnsupported)
	}
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
		return unix.Kill(-p.foreground(), s)
	}
}

// Terminate also wakes what is stopped, so that SIGTERM is seen.
func (p *unixPTY) Terminate(done <-chan struct{}) {
	p.killGroups(syscall.SIGTERM, syscall.SIGCONT)
	timer := time.NewTimer(killAfter)
	defer timer.Stop()
	select {
	case <-done:
	case <-p.exited:
	case <-timer.C:
		p.killGroups(syscall.SIGKILL)
	}
}

// killGroups signals the foreground group and the leader's own, which differ under a job-control shell.
func (p *unixPTY) killGroups(sigs ...syscall.Signal) {
	for _, sig := range sigs {
		p.Signal(sig)
		select {
		case <-p.exited:
		default:
			if p.foreground() != p.proc.Pid {
				unix.Kill(-p.proc.Pid, sig)
			}
		}
	}
}

// foreground is the terminal's foreground process group, the leader's own when there is none.
func (p *unixPTY) foreground() (pgrp int) {
	control(p.master, func(fd int) (err error) {
		pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	})
	if pgrp <= 1 {
		return p.proc.Pid
	}
	return pgrp
}

// State costs some 50 µs, more with many processes on the machine or threads in the group; see BenchmarkPTYState.
func (p *unixPTY) State() TTYState {
	var s TTYState
	if t, err := termios(p.master); err == nil {
		s.Canonical, s.Echo = t.Lflag&unix.ICANON != 0, t.Lflag&unix.ECHO != 0
	}
	if runtime.GOOS == "linux" {
		s.Reading = groupReading(p.tty, p.foreground(), 0)
	}
	return s
}

// groupReading tells whether any thread of the process group is blocked in read on the terminal with that
// device number, or in poll, select or epoll with the terminal in its read set; measured on 442 programs:
// recall .99, precision .98. A relay (sudo, script) waits for its inner terminal too and is judged by that.
func groupReading(tty uint64, pgrp, depth int) Reading {
	result := ReadingBusy
	for _, pid := range processes(pgrp) {
		if id, err := unix.Getpgid(pid); err != nil || id != pgrp {
			continue
		}
		switch r := processReading(tty, "/proc/"+strconv.Itoa(pid), depth); r {
		case ReadingYes:
			return r
		case ReadingUnknown:
			result = r
		}
	}
	return result
}

// processes lists all there are, the likeliest to read first.
func processes(first int) []int {
	pids := []int{first}
	dir, err := os.Open("/proc")
	if err != nil {
		return pids
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid != first {
			pids = append(pids, pid)
		}
	}
	return pids
}

// processReading judges one process of the foreground group by its folder in /proc.
func processReading(tty uint64, proc string, depth int) Reading {
	dir, err := os.Open(proc + "/task")
	if err != nil {
		return ReadingBusy // gone
	}
	defer dir.Close()
	threads, _ := dir.Readdirnames(-1)
	result := ReadingBusy
	for _, tid := range threads {
		task := proc + "/task/" + tid
		fds, err := waitsFor(proc, task)
		if err != nil {
			if _, gone := os.Lstat(task); gone == nil { // another user's, or the system does not say
				result = ReadingUnknown
			}
			continue
		}
		onTTY, inner := false, uint64(0)
		for _, fd := range fds {
			switch dev := deviceOf(proc, fd); dev {
			case tty, unix.Mkdev(5, 0): // /dev/tty
				onTTY = true
			case unix.Mkdev(5, 2): // /dev/ptmx
				inner = innerTTY(proc, fd)
			}
		}
		switch {
		case !onTTY || stopped(task):
		case inner != 0 && depth < 4:
			if r := sessionReading(inner, depth+1); r != ReadingBusy {
				return r
			}
		default:
			return ReadingYes
		}
	}
	return result
}

// sessionReading judges an inner terminal by its own foreground group, which any process on it knows.
func sessionReading(tty uint64, depth int) Reading {
	for _, pid := range processes(0) {
		f := statFields("/proc/" + strconv.Itoa(pid))
		if len(f) > 5 && f[4] == strconv.FormatUint(tty, 10) {
			if pgrp, err := strconv.Atoi(f[5]); err == nil && pgrp > 0 {
				return groupReading(tty, pgrp, depth)
			}
		}
	}
	return ReadingUnknown
}

// statFields is /proc/…/stat from field 3 on (proc_pid_stat(5)): state, ppid, pgrp, session, tty_nr, tpgid, …
// A name may hold blanks and parentheses, but not after its last one.
func statFields(proc string) []string {
	b, _ := os.ReadFile(proc + "/stat")
	return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
}

// stopped: /proc still shows the call a stopped thread will restart.
func stopped(task string) bool {
	f := statFields(task)
	return len(f) == 0 || strings.ContainsAny(f[0], "TtZX")
}

func deviceOf(proc string, fd int) uint64 {
	var st unix.Stat_t
	if unix.Stat(proc+"/fd/"+strconv.Itoa(fd), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0
	}
	return uint64(st.Rdev)
}

// innerTTY is the device number of the slave that belongs to a process's descriptor of /dev/ptmx, 0 unknown.
func innerTTY(proc string, fd int) uint64 {
	b, _ := os.ReadFile(proc + "/fdinfo/" + strconv.Itoa(fd))
	_, rest, _ := strings.Cut(string(b), "tty-index:")
	var n uint32
	if _, err := fmt.Sscan(rest, &n); err != nil {
		return 0
	}
	return unix.Mkdev(136, n) // Documentation/admin-guide/devices.txt
}

// The calls a thread can wait for input in.
const (
	callRead   = iota + 1
	callPoll   // fds, count
	callSelect // count, read set
	callEpoll  // descriptor
)

// callKind names system call numbers of linux/arch/x86/entry/syscalls/syscall_64.tbl and
// linux/include/uapi/asm-generic/unistd.h; 0: any other.
func callKind(nr int) int {
	amd64 := runtime.GOARCH == "amd64"
	switch {
	case amd64 && (nr == 0 || nr == 19), !amd64 && (nr == 63 || nr == 65): // read, readv
		return callRead
	case amd64 && (nr == 7 || nr == 271), !amd64 && nr == 73: // poll, ppoll
		return callPoll
	case amd64 && (nr == 23 || nr == 270), !amd64 && nr == 72: // select, pselect6
		return callSelect
	case amd64 && (nr == 232 || nr == 281), !amd64 && nr == 22, nr == 441: // epoll_wait, epoll_pwait, epoll_pwait2
		return callEpoll
	}
	return 0
}

// waitsFor lists the descriptors whose input the thread is blocked on; none when it runs or does anything else.
func waitsFor(proc, task string) ([]int, error) {
	b, err := os.ReadFile(task + "/syscall")
	if err != nil {
		return nil, err
	}
	var nr int
	var a, c uint64
	if n, _ := fmt.Sscanf(string(b), "%d 0x%x 0x%x", &nr, &a, &c); n < 3 {
		return nil, nil // "running", or not in a call
	}
	switch callKind(nr) {
	case callRead:
		return []int{int(a)}, nil
	case callPoll:
		return pollSet(peek(proc, a, 8*min(c, 1024))), nil
	case callSelect:
		return selectSet(peek(proc, c, (min(a, 1024)+7)/8)), nil
	case callEpoll:
		return epollSet(proc, int(a))
	}
	return nil, nil
}

// peek reads the memory of another process, nothing when that fails.
func peek(proc string, addr, n uint64) []byte {
	f, err := os.Open(proc + "/mem")
	if err != nil || addr == 0 {
		return nil
	}
	defer f.Close()
	b := make([]byte, n)
	got, _ := f.ReadAt(b, int64(addr))
	return b[:got]
}

// pollSet decodes an array of struct pollfd {int fd; short events, revents}.
func pollSet(b []byte) (fds []int) {
	for ; len(b) >= 8; b = b[8:] {
		if binary.LittleEndian.Uint16(b[4:])&unix.POLLIN != 0 {
			fds = append(fds, int(int32(binary.LittleEndian.Uint32(b))))
		}
	}
	return fds
}

// selectSet decodes an fd_set: little-endian, so bit n is bit n%8 of byte n/8.
func selectSet(b []byte) (fds []int) {
	for n := range 8 * len(b) {
		if b[n/8]>>(n%8)&1 != 0 {
			fds = append(fds, n)
		}
	}
	return fds
}

// epollSet reads the lines "tfd: 5 events: 19 data: …" of an epoll descriptor's fdinfo (proc_pid_fdinfo(5)).
func epollSet(proc string, fd int) (fds []int, err error) {
	b, err := os.ReadFile(proc + "/fdinfo/" + strconv.Itoa(fd))
	for line := range strings.Lines(string(b)) {
		var n, events int
		if k, _ := fmt.Sscanf(line, "tfd: %d events: %x", &n, &events); k == 2 && events&unix.POLLIN != 0 {
			fds = append(fds, n)
		}
	}
	return fds, err
}

// control calls fn with f's descriptor, which stays open and in the poller meanwhile; see the rules above.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		return err
	}
	return inner
}

func termios(f *os.File) (t *unix.Termios, err error) {
	req := uint(linuxTCGETS)
	if runtime.GOOS == "darwin" {
		req = darwinTIOCGETA
	}
	err = control(f, func(fd int) (err error) { t, err = unix.IoctlGetTermios(fd, req); return err })
	return t, err
}

func setTermios(f *os.File, t *unix.Termios) error {
	req := uint(linuxTCSETS)
	if runtime.GOOS == "darwin" {
		req = darwinTIOCSETA
	}
	return control(f, func(fd int) error { return unix.IoctlSetTermios(fd, req, t) })
}

// terminalSize asks the host's terminal; an error when f is none.
func terminalSize(f *os.File) (s Size, err error) {
	err = control(f, func(fd int) error {
		ws, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		if err == nil {
			s = Size{ws.Row, ws.Col, ws.Xpixel, ws.Ypixel}
		}
		return err
	})
	return s, err
}

// rawMode puts the host terminal in raw mode; restore undoes it, any number of times, without flushing
// type-ahead. In the background both stop the process (SIGTTOU), as they would any other program, but
// restore leaves a terminal alone that belongs to another job by then.
func rawMode(f *os.File) (restore func() error, err error) {
	before, err := termios(f)
	if err != nil {
		return nil, fmt.Errorf("reading the terminal's modes: %w", err)
	}
	raw := *before // as cfmakeraw(3)
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag &^= unix.CSIZE | unix.PARENB
	raw.Cflag |= unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := setTermios(f, &raw); err != nil {
		return nil, fmt.Errorf("setting the terminal's modes: %w", err)
	}
	return func() error {
		pgrp := 0
		control(f, func(fd int) (err error) { pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP); return err })
		if pgrp > 0 && pgrp != unix.Getpgrp() {
			return nil
		}
		return setTermios(f, before)
	}, nil
}

// resizeSignals delivers a value per change of the host terminal's size; stop ends it.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}

// Asks this process to stop (kill -TSTP; in raw mode Ctrl-Z is the child's), and says that it goes on.
const (
	suspendSignal = syscall.SIGTSTP
	resumeSignal  = syscall.SIGCONT
)

// endSignals are those that end a session, without the ones this process was started to ignore (nohup):
// asking for these would un-ignore them in the child too.
func endSignals() (list []os.Signal) {
	for _, s := range []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if !signal.Ignored(s) {
			list = append(list, s)
		}
	}
	return list
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
	err := control(f, func(fd int) error {
		for {
			if err := unix.Flock(fd, how); err != unix.EINTR {
				return err
			}
		}
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
	if runtime.GOOS == "linux" {
		f := statFields("/proc/" + strconv.Itoa(pid))
		if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
			return 0
		}
		ticks, _ := strconv.ParseInt(f[19], 10, 64) // field 22, clock ticks since boot
		return ticks
	}
	// sysctl kern.proc.pid.PID gives a struct kinfo_proc, which begins with the start time, a struct timeval.
	mib := [4]int32{1, 14, 1, int32(pid)} // CTL_KERN, KERN_PROC, KERN_PROC_PID: <sys/sysctl.h>
	var info [1024]byte
	n := uintptr(len(info))
	_, _, errno := unix.Syscall6(202, uintptr(unsafe.Pointer(&mib[0])), 4, // SYS_sysctl
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&n)), 0, 0)
	if errno != 0 || n < 16 {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(info[:]))*1e6 + int64(binary.LittleEndian.Uint32(info[8:]))
}

// ownedPrivate says what is wrong when the file or folder is not a regular one of the user's own that group
// and others cannot touch.
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return private(path, info)
}

func private(path string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular() && !info.IsDir():
		return fmt.Errorf("%s is neither a regular file nor a folder (%v)", path, info.Mode().Type())
	case !ok || int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user: %w", path, fs.ErrPermission)
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s can be reached by others (mode %04o); run: chmod go= %s", path, info.Mode().Perm(), path)
	case info.Mode().IsRegular() && st.Nlink > 1:
		return fmt.Errorf("%s has a second name (%d hard links)", path, st.Nlink)
	}
	return nil
}

// openPrivate opens or creates a file 0600, whatever the umask, never following a symbolic link; it must be the
// user's own, regular, with one link, and closed to others. A file that fails these is not truncated.
func openPrivate(path string, flag int) (*os.File, error) {
	// O_NONBLOCK: a planted FIFO must not hang the open; it means nothing to a regular file.
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link: %w", path, fs.ErrPermission)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = private(path, info)
	}
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is a folder", path)
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

// networkFS names the file system when flock may not hold between machines, else "". Linux tells by magic
// numbers (statfs(2)), macOS by the lack of MNT_LOCAL.
func networkFS(dir string) string {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return ""
	}
	if runtime.GOOS == "darwin" {
		if uint64(st.Flags)&0x1000 == 0 { // MNT_LOCAL: <sys/mount.h>
			return "network"
		}
		return ""
	}
	switch uint32(st.Type) {
	case 0x6969:
		return "nfs"
	case 0xff534d42, 0xfe534d42, 0x517b:
		return "cifs"
	case 0x01021997:
		return "9p"
	case 0x65735546:
		return "fuse"
	case 0x00c36400:
		return "ceph"
	}
	return ""
}

// watchFolder delivers a value when a file in dir changes, nil where the system has no such thing or has
// run out of it (fs.inotify.max_user_instances, often 128).
func watchFolder(dir string) (ch <-chan struct{}, stop func()) {
	if runtime.GOOS != "linux" {
		return nil, func() {}
	}
	initCall, addCall := uintptr(26), uintptr(27) // inotify_init1, inotify_add_watch; tables as for callKind
	if runtime.GOARCH == "amd64" {
		initCall, addCall = 294, 254
	}
	fd, _, errno := unix.Syscall(initCall, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		return nil, func() {}
	}
	f := os.NewFile(fd, "inotify")
	name, err := unix.BytePtrFromString(dir)
	if err == nil {
		const mask = 0x2 | 0x80 | 0x100 // IN_MODIFY, IN_MOVED_TO, IN_CREATE: <linux/inotify.h>
		_, _, errno = unix.Syscall(addCall, fd, uintptr(unsafe.Pointer(name)), mask)
	}
	if err != nil || errno != 0 {
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
