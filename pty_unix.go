//go:build linux || darwin

// Everything that differs between operating systems, for Linux and macOS; pty_windows.go has the same functions in
// the same order. What x/sys names for one of the two only goes out by number, right for amd64 and arm64. The master
// is reached through SyscallConn, never Fd: that makes it blocking, and neither Close nor a deadline ends a Read then.
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
	"golang.org/x/term"
)

const linux, amd64 = runtime.GOOS == "linux", runtime.GOARCH == "amd64"

// When the child is gone what it wrote is still read, but a grandchild that holds the terminal gets only this.
const (
	drainQuiet = 100 * time.Millisecond // the end, when so long nothing came
	drainWait  = 500 * time.Millisecond // waiting in all
	drainReads = 1000                   // in all; Linux buffers up to 640 KiB (tty_buffer.c) and gives some 2 KiB each
)

// unixPTY is the master side and the child. Read belongs to one goroutine; all else may be called from any.
type unixPTY struct {
	master   *os.File
	tty      uint64 // device number of the slave
	proc     *os.Process
	exited   chan struct{} // closed when the child has been reaped
	code     int           // valid then
	patience time.Duration // Read's: what is left of drainWait
}

// startPTY opens a pseudo-terminal of that size with the host's modes (host may be nil; it must not be raw yet) and
// starts argv in it as session leader. Signals start at their defaults, except HUP and INT, which stay ignored when
// this process was started so (nohup). Errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p := &unixPTY{exited: make(chan struct{}), patience: drainWait}
	path, err := findTool(argv[0])
	if err == nil {
		var slave *os.File
		slave, err = p.open(size, host)
		defer slave.Close()
		attr := &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{slave, slave, slave},
			Sys: &syscall.SysProcAttr{Setsid: true, Setctty: true}}
		// Linux only: an agent that ignores the SIGHUP of its closing terminal still ends after kill -9 of ours.
		if f := reflect.ValueOf(attr.Sys).Elem().FieldByName("Pdeathsig"); f.IsValid() {
			f.SetInt(int64(syscall.SIGTERM))
		}
		if err == nil {
			started := make(chan error)
			go p.live(path, argv, attr, started)
			err = <-started
		}
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
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist):
		return "", errNoTool
	case errors.Is(err, syscall.EISDIR):
		return "", fmt.Errorf("is a folder: %w", fs.ErrPermission)
	}
	return "", errors.Unwrap(err) // exec.Error would say the name again
}

// open sets p.master and p.tty and gives the slave, its size and modes as the child is to find them.
func (p *unixPTY) open(size Size, host *os.File) (slave *os.File, err error) {
	p.master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var name string
	if err := control(p.master, func(fd int) (err error) { name, err = unlockSlave(fd); return err }); err != nil {
		return nil, err
	}
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	slave = os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	p.tty = uint64(st.Rdev)
	modes, hostErr := termios(host, nil)
	if hostErr != nil {
		if modes, hostErr = termios(slave, nil); hostErr == nil {
			modes.Iflag |= unix.IUTF8 // all that the kernel's defaults lack of a terminal emulator's
		}
	}
	_, setErr := termios(slave, modes)
	return slave, errors.Join(err, hostErr, setErr, p.Resize(size))
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

// live starts the child and reaps it, both on one thread that lives as long as the child: Linux sends Pdeathsig
// when the thread that forked ends, not the process (prctl(2)).
func (p *unixPTY) live(path string, argv []string, attr *os.ProcAttr, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	proc, err := os.StartProcess(path, argv, attr)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, which every shell runs
		proc, err = os.StartProcess("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}
	p.proc = proc
	if started <- err; err != nil {
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

func (p *unixPTY) Write(b []byte) (int, error) { return p.master.Write(b) }

// Close hangs the terminal up: the foreground group gets SIGHUP.
func (p *unixPTY) Close() error { p.master.Close(); return nil }

// Resize sends SIGWINCH to the foreground group when the size is another one.
func (p *unixPTY) Resize(s Size) error {
	ws := &unix.Winsize{Row: s.Rows, Col: s.Cols, Xpixel: s.XPixel, Ypixel: s.YPixel}
	return control(p.master, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, ws) })
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

// Terminate also wakes what is stopped, so that SIGTERM is seen. Under a job-control shell the foreground group and
// the leader's own differ.
func (p *unixPTY) Terminate(done <-chan struct{}) {
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGCONT, syscall.SIGKILL} {
		if sig == syscall.SIGKILL {
			select {
			case <-done:
				return
			case <-p.exited:
			case <-time.After(3 * time.Second):
			}
		}
		p.Signal(sig)
		p.signal(p.proc.Pid, sig)
	}
}

// foreground is the terminal's foreground process group, the leader's own when there is none.
func (p *unixPTY) foreground() (pgrp int) {
	err := control(p.master, func(fd int) (err error) { pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP); return err })
	if err != nil || pgrp < 2 {
		return p.proc.Pid
	}
	return pgrp
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

// groupReading tells whether any thread of the process group is blocked in read on the terminal with that device
// number, or in poll, select or epoll with the terminal in its read set; measured on 442 programs: recall .99,
// precision .98. A relay (sudo, script) waits for its inner terminal too and is judged by that.
func groupReading(tty uint64, pgrp, depth int) Reading {
	result := ReadingBusy
	found := func(pid string) bool {
		tasks, _ := os.ReadDir("/proc/" + pid + "/task")
		for _, tid := range tasks {
			if r := threadReading(tty, "/proc/"+pid, "/proc/"+pid+"/task/"+tid.Name(), depth); r != ReadingBusy {
				result = r
			}
			if result == ReadingYes {
				break
			}
		}
		return result == ReadingYes
	}
	if found(strconv.Itoa(pgrp)) { // it mostly is the leader, and to look at all processes costs more
		return result
	}
	all, _ := os.ReadDir("/proc")
	for _, p := range all {
		if pid, err := strconv.Atoi(p.Name()); err == nil && pid != pgrp {
			if id, err := unix.Getpgid(pid); err == nil && id == pgrp && found(p.Name()) {
				break
			}
		}
	}
	return result
}

func threadReading(tty uint64, proc, task string, depth int) Reading {
	fds, err := waitsFor(proc, task)
	if _, alive := os.Lstat(task); err != nil && alive == nil { // another user's, or the system does not say
		return ReadingUnknown
	}
	found, inner := false, ""
	for _, fd := range fds {
		var st unix.Stat_t
		unix.Stat(proc+"/fd/"+strconv.Itoa(fd), &st)
		switch uint64(st.Rdev) { // linux/Documentation/admin-guide/devices.txt; 0 for all but devices
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
	if _, err := fmt.Sscan(inner, &n); err != nil || depth > 3 {
		return ReadingYes
	}
	innerTTY := strconv.FormatUint(unix.Mkdev(136, n), 10)
	all, _ := os.ReadDir("/proc")
	for _, p := range all { // any process on the inner terminal knows its foreground group
		if f := statFields("/proc/" + p.Name()); len(f) > 5 && f[4] == innerTTY {
			pgrp, _ := strconv.Atoi(f[5])
			return groupReading(unix.Mkdev(136, n), pgrp, depth+1)
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
func waitsFor(proc, task string) (fds []int, err error) {
	b, err := os.ReadFile(task + "/syscall")
	var nr int
	var a0, a1 uint64
	if n, _ := fmt.Sscanf(string(b), "%d 0x%x 0x%x", &nr, &a0, &a1); n < 3 {
		return nil, err // "running", or not in a call
	}
	peek := func(addr, n uint64) []byte { // of the other process's memory
		b, got := make([]byte, n), 0
		if f, err := os.Open(proc + "/mem"); err == nil {
			got, _ = f.ReadAt(b, int64(addr))
			f.Close()
		}
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

// control calls fn with f's descriptor, which stays open and in the poller meanwhile; f may be nil.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
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

// terminalSize asks the host's terminal; an error when f is none.
func terminalSize(f *os.File) (s Size, err error) {
	var ws *unix.Winsize
	err = control(f, func(fd int) (err error) { ws, err = unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); return err })
	if err == nil {
		s = Size{ws.Row, ws.Col, ws.Xpixel, ws.Ypixel}
	}
	return s, err
}

// rawMode puts the host terminal in raw mode; restore undoes it, any number of times. Neither flushes type-ahead.
// A terminal that belongs to another job by then is left alone.
func rawMode(f *os.File) (restore func() error, err error) {
	fd := int(f.Fd())
	before, err := term.MakeRaw(fd)
	if err != nil {
		return nil, err
	}
	return func() error {
		if pgrp, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err == nil && pgrp != unix.Getpgrp() {
			return nil
		}
		return term.Restore(fd, before)
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

// endSignals are those that end a session, without the ones this process was started to ignore (nohup): asking for
// these would un-ignore them in the child too.
func endSignals() []os.Signal {
	list := []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT}
	return slices.DeleteFunc(list, signal.Ignored)
}

// stopSelf stops this process as suspendSignal would by default and returns when it goes on; at once where no shell
// could ever resume us. It has to be SIGSTOP: Go's handler of SIGTSTP stays installed even after signal.Reset.
func stopSelf() error {
	session, err := unix.Getsid(0)
	if parent, _ := unix.Getsid(unix.Getppid()); err != nil || session != parent || session == unix.Getpgrp() {
		return err
	}
	resumed := make(chan os.Signal, 1)
	signal.Notify(resumed, resumeSignal)
	defer signal.Stop(resumed)
	if err = unix.Kill(unix.Getpid(), unix.SIGSTOP); err == nil {
		<-resumed
	}
	return err
}

// lockFile takes an exclusive advisory lock on the open file (flock); wait false: errLocked at once if another has
// it. The lock lives as long as f: keep it reachable.
func lockFile(f *os.File, wait bool) error {
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err == unix.EWOULDBLOCK {
			return errLocked
		}
		if err != unix.EINTR {
			return err
		}
	}
}

func unlockFile(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }

// syncDir makes a rename or creation in dir durable; file systems that cannot (EINVAL) are taken as they are.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err = d.Sync(); errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// processStart is a number that tells two processes of the same pid apart; 0: no such process.
func processStart(pid int) (n int64) {
	if !linux {
		ps := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid))
		ps.Env = []string{"LC_ALL=C"}
		out, _ := ps.Output()
		if t, err := time.Parse(time.ANSIC, strings.TrimSpace(string(out))); err == nil {
			n = t.Unix()
		}
	} else if f := statFields("/proc/" + strconv.Itoa(pid)); len(f) > 19 && f[0] != "Z" {
		n, _ = strconv.ParseInt(f[19], 10, 64) // clock ticks since boot
	}
	return n
}

// ownedPrivate says what is wrong when path is not a regular file or folder of the user's own that group and others
// cannot touch, or is a file with a second name (hard link).
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

// openPrivate opens or creates a file 0600, whatever the umask, never following a symbolic link (ELOOP); it must be
// ownedPrivate. One that is not is not truncated.
func openPrivate(path string, flag int) (*os.File, error) {
	// O_NONBLOCK: a planted FIFO must not hang the open; it means nothing to a regular file.
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
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

// networkFS names the file system when flock may not hold between machines, else "" (always on macOS): statfs(2).
func networkFS(dir string) string {
	var st unix.Statfs_t
	unix.Statfs(dir, &st)
	return map[uint32]string{0x6969: "nfs", 0xff534d42: "cifs", 0xfe534d42: "cifs", 0x517b: "smb", 0x01021997: "9p",
		0x65735546: "fuse", 0x00c36400: "ceph"}[uint32(st.Type)]
}

// watchFolder delivers a value when a file in dir changes, nil where the system has no such thing or has run out of
// it (fs.inotify.max_user_instances, often 128).
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
	f := os.NewFile(fd, "inotify")
	if errno == 0 {
		const mask = 0x2 | 0x80 | 0x100 // IN_MODIFY, IN_MOVED_TO, IN_CREATE: <linux/inotify.h>
		_, _, errno = unix.Syscall(add, fd, uintptr(unsafe.Pointer(name)), mask)
	}
	if errno != 0 {
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
