//go:build linux || darwin

// Everything that differs between operating systems, for Linux and macOS; pty_windows.go has the same functions in
// the same order. What x/sys names for one of the two only goes out by number, right for amd64 and arm64. The master
// is reached through SyscallConn, never Fd: that makes it blocking, and neither Close nor a deadline ends a Read then.
package main

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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
	"golang.org/x/term"
)

const (
	linux, amd64  = runtime.GOOS == "linux", runtime.GOARCH == "amd64"
	suspendSignal = syscall.SIGTSTP // asks this process to stop (kill -TSTP; in raw mode Ctrl-Z is the child's)
	// When the child is gone what it wrote is still read, but a grandchild that holds the terminal gets only this.
	drainQuiet = 100 * time.Millisecond // the end, when so long nothing came
	drainWait  = 500 * time.Millisecond // waiting in all
	drainReads = 1000                   // in all; Linux buffers up to 640 KiB (tty_buffer.c) and gives some 2 KiB each
)

// unixPTY is the master side and the child. Read belongs to one goroutine; all else may be called from any.
type unixPTY struct {
	master   *os.File
	proc     *os.Process
	exited   chan struct{} // closed when the child has been reaped
	code     int           // valid then
	patience time.Duration // Read's: what is left of drainWait
}

// startPTY starts argv as leader of a new pseudo-terminal with the host's modes (not raw yet; host may be nil). Signals
// are at their defaults, but nohup's choice for HUP and INT stays. Errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p := &unixPTY{exited: make(chan struct{}), patience: drainWait}
	path, err := findTool(argv[0])
	slave, openErr := p.open(size, host)
	if err = cmp.Or(err, openErr); err == nil {
		attr := &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{slave, slave, slave},
			Sys: &syscall.SysProcAttr{Setsid: true, Setctty: true}}
		// Linux only: an agent that ignores the SIGHUP of its closing terminal still ends after kill -9 of ours.
		if f := reflect.ValueOf(attr.Sys).Elem().FieldByName("Pdeathsig"); f.IsValid() {
			f.SetInt(int64(syscall.SIGTERM))
		}
		started := make(chan error)
		go p.live(path, argv, attr, started)
		err = <-started
	}
	slave.Close()
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
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist):
		return "", errNoTool
	case errors.Is(err, syscall.EISDIR):
		return "", fmt.Errorf("is a folder: %w", os.ErrPermission)
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

// open sets p.master and gives the slave, its size and modes as the child is to find them.
func (p *unixPTY) open(size Size, host *os.File) (slave *os.File, err error) {
	p.master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	name, nameErr := ioctl(p.master, unlockSlave, 0)
	fd, openErr := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err = cmp.Or(err, nameErr, openErr); err != nil {
		return nil, err
	}
	get, set := termiosRequests()
	modes, err := ioctl(host, unix.IoctlGetTermios, get)
	if err != nil {
		if modes, err = unix.IoctlGetTermios(fd, get); err == nil {
			modes.Iflag |= unix.IUTF8 // all that the kernel's defaults lack of a terminal emulator's
		}
	}
	err = cmp.Or(err, unix.IoctlSetTermios(fd, set, modes), p.Resize(size))
	return os.NewFile(uintptr(fd), name), err
}

// unlockSlave lets the other side of a new master be opened and gives its name.
func unlockSlave(master int, _ uint) (name string, err error) {
	if linux { // TIOCSPTLCK, TIOCGPTN: linux/include/uapi/asm-generic/ioctls.h
		err = unix.IoctlSetPointerInt(master, 0x40045431, 0)
		n, getErr := unix.IoctlGetInt(master, 0x80045430)
		return "/dev/pts/" + strconv.Itoa(n), cmp.Or(err, getErr)
	}
	var b [128]byte // TIOCPTYGRANT, TIOCPTYUNLK, TIOCPTYGNAME: macOS <sys/ttycom.h>
	for _, req := range []uintptr{0x20007454, 0x20007452, 0x40807453} {
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(master), req, uintptr(unsafe.Pointer(&b[0]))); e != 0 {
			err = e
		}
	}
	return unix.ByteSliceToString(b[:]), err
}

// live starts and reaps the child on a thread of its own: Pdeathsig comes when the thread that forked ends (prctl(2)).
func (p *unixPTY) live(path string, argv []string, attr *os.ProcAttr, started chan<- error) {
	runtime.LockOSThread()
	proc, err := os.StartProcess(path, argv, attr)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, which every shell runs
		proc, err = os.StartProcess("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}
	p.proc = proc
	if started <- err; err != nil {
		return
	}
	state, err := proc.Wait()
	if p.code = state.ExitCode(); p.code < 0 && err == nil {
		p.code = 128 + int(state.Sys().(syscall.WaitStatus).Signal())
	}
	close(p.exited)
	p.master.SetReadDeadline(time.Unix(1, 0)) // wakes Read
}

// Read gives io.EOF when nobody holds the terminal any more, or when the child is gone and what it wrote has been
// read. The bounds on that count waiting and reads, not passing time: a host slow to take the output loses nothing.
func (p *unixPTY) Read(b []byte) (int, error) {
	n, err := p.master.Read(b)
	if errors.Is(err, os.ErrDeadlineExceeded) && p.patience > 0 { // the child is gone, see live
		begun := time.Now()
		p.master.SetReadDeadline(begun.Add(drainQuiet))
		n, err = p.master.Read(b)
		p.master.SetReadDeadline(begun)
		p.patience -= max(time.Since(begun), drainWait/drainReads)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.EIO) { // EIO: Linux, the last slave was closed
		err = io.EOF
	}
	return n, err
}

// Close hangs the terminal up: the foreground group gets SIGHUP.
func (p *unixPTY) Close() error                { p.master.Close(); return nil }
func (p *unixPTY) Write(b []byte) (int, error) { return p.master.Write(b) }

// Resize sends SIGWINCH to the foreground group when the size is another one.
func (p *unixPTY) Resize(s Size) error {
	ws := &unix.Winsize{Row: s.Rows, Col: s.Cols, Xpixel: s.XPixel, Ypixel: s.YPixel}
	set := func(fd int, req uint) (*unix.Winsize, error) { return ws, unix.IoctlSetWinsize(fd, req, ws) }
	_, err := ioctl(p.master, set, unix.TIOCSWINSZ)
	return err
}

func (p *unixPTY) Wait() int { <-p.exited; return p.code }
func (p *unixPTY) PID() int  { return p.proc.Pid }

// Signal says os.ErrProcessDone when the child is gone.
func (p *unixPTY) Signal(sig os.Signal) error { return p.signal(sig, p.foreground()) }
func (p *unixPTY) signal(sig os.Signal, groups ...int) (err error) {
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
	}
	for _, pgrp := range groups {
		err = unix.Kill(-pgrp, sig.(syscall.Signal))
	}
	return err
}

// Terminate tells the leader's group too: under job control another one. SIGCONT, so that what is stopped sees SIGTERM.
func (p *unixPTY) Terminate(done <-chan struct{}) {
	p.signal(syscall.SIGTERM, p.foreground(), p.PID())
	p.signal(syscall.SIGCONT, p.foreground(), p.PID())
	select {
	case <-done:
	case <-p.exited:
	case <-time.After(3 * time.Second):
		p.signal(syscall.SIGKILL, p.foreground(), p.PID())
	}
}

// foreground is the terminal's foreground process group, the leader's own when there is none.
func (p *unixPTY) foreground() int {
	if pgrp, err := ioctl(p.master, unix.IoctlGetInt, unix.TIOCGPGRP); err == nil && pgrp > 1 {
		return pgrp
	}
	return p.PID()
}

// State costs 20 to 100 µs, more with many processes on the machine or threads in the group: BenchmarkPTYState.
func (p *unixPTY) State() (s TTYState) {
	get, _ := termiosRequests()
	if t, err := ioctl(p.master, unix.IoctlGetTermios, get); err == nil {
		s.Canonical, s.Echo = t.Lflag&unix.ICANON != 0, t.Lflag&unix.ECHO != 0
	}
	if linux {
		s.Reading = foregroundReading(statFields("/proc/"+strconv.Itoa(p.PID())), 0)
	}
	return s
}

// foregroundReading tells whether a thread of the foreground group of that process's terminal is blocked in read on it,
// or in poll, select or epoll with it in the read set; measured on 442 programs: recall .99, precision .98.
func foregroundReading(stat []string, depth int) Reading {
	if len(stat) < 6 {
		return ReadingUnknown
	}
	tty, _ := strconv.ParseUint(stat[4], 10, 64)
	pgrp, _ := strconv.Atoi(stat[5])
	result := ReadingBusy
	found := func(pid string) bool {
		tasks, _ := os.ReadDir("/proc/" + pid + "/task")
		for i := 0; i < len(tasks) && result != ReadingYes; i++ {
			if r := threadReading(tty, "/proc/"+pid+"/task/"+tasks[i].Name(), depth); r != ReadingBusy {
				result = r
			}
		}
		return result == ReadingYes
	}
	if found(stat[5]) { // it mostly is the leader, and to look at all processes costs more
		return result
	}
	all, _ := os.ReadDir("/proc")
	for _, p := range all {
		pid, _ := strconv.Atoi(p.Name())
		if id, err := unix.Getpgid(pid); err == nil && id == pgrp && id != pid && found(p.Name()) {
			break
		}
	}
	return result
}

// threadReading sees that a relay (sudo, script) waits for its inner terminal too: what counts is who reads there.
func threadReading(tty uint64, task string, depth int) Reading {
	fds, err := waitsFor(task)
	if _, gone := os.Lstat(task); err != nil && gone == nil { // another user's, or the system does not say
		return ReadingUnknown
	}
	found, inner := false, -1
	for _, fd := range fds {
		var st unix.Stat_t
		unix.Stat(task+"/fd/"+strconv.Itoa(fd), &st)
		switch uint64(st.Rdev) { // linux/Documentation/admin-guide/devices.txt; 0 for all but devices
		case tty, unix.Mkdev(5, 0): // /dev/tty
			found = true
		case unix.Mkdev(5, 2): // /dev/ptmx
			info, _ := os.ReadFile(task + "/fdinfo/" + strconv.Itoa(fd))
			_, index, _ := strings.Cut(string(info), "tty-index:")
			fmt.Sscan(index, &inner)
		}
	}
	// A stopped thread still shows the call that it will restart.
	if stat := statFields(task); !found || len(stat) == 0 || strings.ContainsAny(stat[0], "TtZX") {
		return ReadingBusy
	}
	if inner < 0 || depth > 3 {
		return ReadingYes
	}
	all, _ := os.ReadDir("/proc")
	for _, p := range all {
		stat := statFields("/proc/" + p.Name())
		if len(stat) > 5 && stat[4] == strconv.FormatUint(unix.Mkdev(136, uint32(inner)), 10) {
			return foregroundReading(stat, depth+1)
		}
	}
	return ReadingUnknown
}

// statFields is /proc/…/stat after the name: state, ppid, pgrp, session, tty_nr, tpgid, … (proc_pid_stat(5)).
func statFields(proc string) []string {
	b, _ := os.ReadFile(proc + "/stat")
	return strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
}

// waitsFor lists the descriptors whose input the thread is blocked on; none when it runs or does anything else. Numbers
// from linux/arch/x86/entry/syscalls/syscall_64.tbl and, for arm64, linux/include/uapi/asm-generic/unistd.h.
func waitsFor(task string) (fds []int, err error) {
	b, err := os.ReadFile(task + "/syscall")
	var nr, a0, a1 uint64
	if n, _ := fmt.Sscanf(string(b), "%d 0x%x 0x%x", &nr, &a0, &a1); n < 3 {
		return nil, err // "running", or not in a call
	}
	peek := func(addr, n uint64) []byte { // of the other process's memory
		b := make([]byte, n)
		f, _ := os.Open(task + "/mem")
		defer f.Close()
		got, _ := f.ReadAt(b, int64(addr))
		return b[:got]
	}
	switch {
	case amd64 && (nr == 0 || nr == 19), !amd64 && (nr == 63 || nr == 65): // read, readv (descriptor, …)
		fds = []int{int(a0)}
	case amd64 && (nr == 7 || nr == 271), !amd64 && nr == 73: // poll, ppoll (array, count, …)
		for set := peek(a0, 8*min(a1, 1024)); len(set) >= 8; set = set[8:] { // {int fd; short events, revents}
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
		b, err = os.ReadFile(task + "/fdinfo/" + strconv.FormatUint(a0, 10)) // lines "tfd: 5 events: 19 data: …"
		for line := range strings.Lines(string(b)) {
			var fd, events int
			if n, _ := fmt.Sscanf(line, "tfd: %d events: %x", &fd, &events); n == 2 && events&unix.POLLIN != 0 {
				fds = append(fds, fd)
			}
		}
	}
	return fds, err
}

// ioctl calls fn with f's descriptor, which stays open and in the poller meanwhile, and req; f may be nil.
func ioctl[T any](f *os.File, fn func(fd int, req uint) (T, error), req uint) (v T, err error) {
	raw, inner := f.SyscallConn()
	if inner == nil {
		err = raw.Control(func(fd uintptr) { v, inner = fn(int(fd), req) })
	}
	return v, cmp.Or(err, inner)
}

// termiosRequests get and set a terminal's modes, at once and without flushing type-ahead.
func termiosRequests() (get, set uint) {
	if linux {
		return 0x5401, 0x5402 // TCGETS, TCSETS
	}
	return 0x40487413, 0x80487414 // TIOCGETA, TIOCSETA
}

// terminalSize asks the host's terminal; an error when f is none.
func terminalSize(f *os.File) (Size, error) {
	ws, err := ioctl(f, unix.IoctlGetWinsize, unix.TIOCGWINSZ)
	if err != nil {
		return Size{}, err
	}
	return Size{ws.Row, ws.Col, ws.Xpixel, ws.Ypixel}, nil
}

// rawMode sets the host terminal, restore undoes it, any number of times, unless another job has the terminal by then.
// Neither flushes type-ahead.
func rawMode(f *os.File) (restore func() error, err error) {
	fd := int(f.Fd())
	before, err := term.MakeRaw(fd)
	return func() error {
		if pgrp, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); before == nil || err == nil && pgrp != unix.Getpgrp() {
			return nil
		}
		return term.Restore(fd, before)
	}, err
}

// resizeSignals delivers a value per change of the host terminal's size; stop ends it.
func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}

// endSignals end a session. Those this process was started to ignore (nohup) are not asked for: the child ignores them.
func endSignals() []os.Signal {
	return slices.DeleteFunc([]os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT}, signal.Ignored)
}

// stopSelf stops this process as suspendSignal would by default and returns when it goes on; at once where no shell
// could ever resume us. It has to be SIGSTOP: Go's handler of SIGTSTP stays installed even after signal.Reset.
func stopSelf() {
	session, _ := unix.Getsid(0)
	if parent, _ := unix.Getsid(unix.Getppid()); session != parent || session == unix.Getpgrp() {
		return
	}
	resumed := make(chan os.Signal, 1)
	signal.Notify(resumed, syscall.SIGCONT)
	defer signal.Stop(resumed)
	unix.Kill(unix.Getpid(), unix.SIGSTOP)
	<-resumed
}

// lockFile takes an exclusive flock for as long as f lives: keep it reachable. wait false: errLocked if another has it.
func lockFile(f *os.File, wait bool) error {
	how := map[bool]int{true: unix.LOCK_EX, false: unix.LOCK_EX | unix.LOCK_NB}
	err := error(unix.EINTR)
	for err == unix.EINTR {
		err = unix.Flock(int(f.Fd()), how[wait])
	}
	if err == unix.EWOULDBLOCK {
		return errLocked
	}
	return err
}
func unlockFile(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }

// syncDir makes a rename or creation in dir durable; file systems that cannot (EINVAL) are taken as they are.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	defer d.Close()
	if err = cmp.Or(err, d.Sync()); errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) (n int64) {
	if f := statFields("/proc/" + strconv.Itoa(pid)); linux && len(f) > 19 && f[0] != "Z" {
		n, _ = strconv.ParseInt(f[19], 10, 64) // clock ticks since boot
	} else if !linux {
		ps := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid))
		ps.Env = []string{"LC_ALL=C"}
		out, _ := ps.Output()
		if t, err := time.Parse(time.ANSIC, strings.TrimSpace(string(out))); err == nil {
			n = t.Unix()
		}
	}
	return n
}

// ownedPrivate is nil for a regular file without a second name, or a folder, of the user's own and no other's to touch.
func ownedPrivate(path string) error {
	info, err := os.Lstat(path)
	return private(path, info, err)
}

func private(path string, info os.FileInfo, err error) error {
	if err != nil {
		return err
	}
	switch mode, st := info.Mode(), info.Sys().(*syscall.Stat_t); {
	case !mode.IsRegular() && !mode.IsDir(), int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s is not a file or folder of your own: %w", path, os.ErrPermission)
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

// openPrivate opens or creates a file 0600, whatever the umask, never following a symbolic link (ELOOP). One that is
// not ownedPrivate is refused and not truncated.
func openPrivate(path string, flag int) (*os.File, error) {
	// O_NONBLOCK: a planted FIFO must not hang the open; it means nothing to a regular file.
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err = private(path, info, err); err == nil && flag&os.O_CREATE != 0 && info.Mode().Perm() != 0o600 {
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

// networkFS names the file system when flock may not hold between machines, else "" (always on macOS): statfs(2).
func networkFS(dir string) string {
	var st unix.Statfs_t
	unix.Statfs(dir, &st)
	return map[uint32]string{0x6969: "nfs", 0xff534d42: "cifs", 0xfe534d42: "cifs", 0x517b: "smb", 0x01021997: "9p",
		0x65735546: "fuse", 0x00c36400: "ceph"}[uint32(st.Type)]
}

// watchFolder delivers a value when a file in dir changes; nil where inotify is missing or used up (often 128 a user).
func watchFolder(dir string) (ch <-chan struct{}, stop func()) {
	if !linux {
		return nil, func() {}
	}
	start, add := uintptr(26), uintptr(27) // inotify_init1, inotify_add_watch; tables as for waitsFor
	if amd64 {
		start, add = 294, 254
	}
	fd, _, _ := unix.Syscall(start, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	f, name := os.NewFile(fd, "inotify"), append([]byte(dir), 0)
	const mask = 0x2 | 0x80 | 0x100 // IN_MODIFY, IN_MOVED_TO, IN_CREATE: <linux/inotify.h>
	if _, _, e := unix.Syscall(add, fd, uintptr(unsafe.Pointer(&name[0])), mask); e != 0 {
		f.Close()
		return nil, func() {}
	}
	c := make(chan struct{}, 1)
	go func() {
		defer close(c)
		b := make([]byte, 4096)
		for _, err := f.Read(b); err == nil; _, err = f.Read(b) { // until f is closed
			if len(c) == 0 { // nobody else fills it
				c <- struct{}{}
			}
		}
	}()
	return c, func() { f.Close() }
}
