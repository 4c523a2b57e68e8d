//go:build linux || darwin

// Everything that differs between operating systems, for Linux and macOS (amd64, arm64); pty_windows.go has the same
// functions in the same order. What x/sys names for one of the two only goes out by number.
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
	"path/filepath"
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

const linux, amd64, suspendSignal = runtime.GOOS == "linux", runtime.GOARCH == "amd64", syscall.SIGTSTP
const drainQuiet, drainWait = 100 * time.Millisecond, 500 * time.Millisecond // Read after the child: of silence, in all
var getModes = map[bool]uint{true: 0x5401, false: 0x40487413}[linux]         // TCGETS, on macOS TIOCGETA
var setModes = map[bool]uint{true: 0x5402, false: 0x80487414}[linux]         // TCSETS, TIOCSETA: type-ahead stays
var unreadBytes = map[bool]uint{true: 0x541b, false: 0x4004667f}[linux]      // FIONREAD

// unixPTY is the master side and the child. Read belongs to one goroutine; all else may be called from any.
type unixPTY struct {
	master   *os.File // by SyscallConn, never Fd: that makes it blocking, and neither Close nor a deadline ends a Read
	proc     *os.Process
	exited   chan struct{} // closed when the child has been reaped
	code     int           // valid then
	patience time.Duration // Read's: what is left of drainWait
}

// startPTY starts argv on a new terminal with host's modes (nil: defaults). Errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, dir string, size Size, host *os.File) (PTY, error) {
	p, started := &unixPTY{exited: make(chan struct{}), patience: drainWait}, make(chan error)
	path, err := findTool(argv[0])
	slave, openErr := p.open(size, host)
	if err = cmp.Or(err, openErr); err == nil {
		go p.live(path, argv, &os.ProcAttr{Dir: dir, Env: env, Files: []*os.File{slave, slave, slave},
			Sys: &syscall.SysProcAttr{Setsid: true, Setctty: true}}, started)
		err = <-started
	}
	slave.Close()
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	return p, nil
}

func findTool(name string) (string, error) { // as a shell does it: "." in PATH counts, a folder gives os.ErrPermission
	path, err := exec.LookPath(name)
	denied := errors.Is(err, os.ErrPermission) || errors.Is(err, syscall.EISDIR)
	return path, cmp.Or(when(denied, os.ErrPermission), when(err != nil && !errors.Is(err, exec.ErrDot), errNoTool))
}

// open sets p.master and gives the slave, its size and modes as the child is to find them.
func (p *unixPTY) open(size Size, host *os.File) (slave *os.File, err error) {
	locked, number, name, modes := int32(0), int32(-1), [128]byte{}, unix.Termios{} // no terminal is number -1
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	p.master = m
	if linux { // TIOCSPTLCK, TIOCGPTN: linux/include/uapi/asm-generic/ioctls.h
		err = cmp.Or(err, ioctl(m, 0x40045431, &locked), ioctl(m, 0x80045430, &number))
		copy(name[:], fmt.Sprint("/dev/pts/", number))
	} else { // TIOCPTYGRANT, TIOCPTYUNLK, TIOCPTYGNAME: macOS <sys/ttycom.h>
		err = cmp.Or(err, ioctl(m, 0x20007454, &name), ioctl(m, 0x20007452, &name), ioctl(m, 0x40807453, &name))
	}
	path := unix.ByteSliceToString(name[:])
	fd, openErr := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) // os.OpenFile makes it non-blocking
	slave = os.NewFile(uintptr(fd), path)
	if ioctl(host, getModes, &modes) != nil && ioctl(slave, getModes, &modes) == nil {
		modes.Iflag |= unix.IUTF8 // all that the kernel's defaults lack of a terminal emulator's
	}
	return slave, cmp.Or(err, openErr, ioctl(slave, setModes, &modes), p.Resize(size))
}

// live starts and reaps the child. Linux's Pdeathsig ends even one that ignores SIGHUP after kill -9 of ours; it is
// sent when the thread that forked ends (prctl(2)), so that thread is kept.
func (p *unixPTY) live(path string, argv []string, attr *os.ProcAttr, started chan<- error) {
	runtime.LockOSThread()
	if f := reflect.ValueOf(attr.Sys).Elem().FieldByName("Pdeathsig"); f.IsValid() {
		f.SetInt(int64(syscall.SIGTERM))
	}
	var err error
	if p.proc, err = os.StartProcess(path, argv, attr); errors.Is(err, syscall.ENOEXEC) { // no #!: every shell runs it
		p.proc, err = os.StartProcess("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}
	if started <- err; err != nil {
		return
	}
	state, _ := p.proc.Wait()
	if p.code = state.ExitCode(); p.code < 0 {
		p.code = 128 + int(state.Sys().(syscall.WaitStatus).Signal())
	}
	close(p.exited)
	p.master.SetReadDeadline(time.Unix(1, 0)) // wakes Read
}

// Read gives io.EOF when nobody holds the terminal any more, or when the child is gone and what it wrote has been
// read. The bounds on that count waiting and reads, not passing time: a host slow to take the output loses nothing.
func (p *unixPTY) Read(b []byte) (int, error) {
	n, err := p.master.Read(b)
	if begun := time.Now(); p.patience > 0 && errors.Is(err, os.ErrDeadlineExceeded) { // the child is gone, see live
		p.master.SetReadDeadline(begun.Add(drainQuiet))
		n, err = p.master.Read(b)
		p.master.SetReadDeadline(begun)
		p.patience -= max(time.Since(begun), drainWait/1000) // Linux holds up to 640 KiB (tty_buffer.c): 2 KiB a read
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.EIO) { // EIO: Linux, the last slave was closed
		err = io.EOF
	}
	return n, err
}
func (p *unixPTY) Write(b []byte) (int, error) { return p.master.Write(b) }
func (p *unixPTY) Close() error                { p.master.Close(); return nil } // the foreground group gets SIGHUP
func (p *unixPTY) Wait() int                   { <-p.exited; return p.code }
func (p *unixPTY) PID() int                    { return p.proc.Pid }
func (p *unixPTY) Unread() int {
	var n int32
	ioctl(p.master, unreadBytes, &n)
	return int(n)
}
func (p *unixPTY) Resize(s Size) error        { return ioctl(p.master, unix.TIOCSWINSZ, &s) } // sends SIGWINCH
func (p *unixPTY) Signal(sig os.Signal) error { return p.signal(sig, p.foreground()) }
func (p *unixPTY) signal(sig os.Signal, groups ...int) error { // os.ErrProcessDone: the child is gone
	err := p.proc.Signal(syscall.Signal(0))
	for i := 0; i < len(groups) && !errors.Is(err, os.ErrProcessDone); i++ {
		err = unix.Kill(-groups[i], sig.(syscall.Signal))
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
func (p *unixPTY) foreground() int { // process group of the terminal, the leader's own when there is none
	var pgrp int32
	ioctl(p.master, unix.TIOCGPGRP, &pgrp)
	return cmp.Or(when(pgrp > 1, int(pgrp)), p.PID()) // never 1: kill(-1) reaches every process
}
func (p *unixPTY) State() TTYState { // costs 0.1 to 1 ms, by the number of processes and threads: BenchmarkPTYState
	var modes unix.Termios
	ioctl(p.master, getModes, &modes)
	tty := statFields(fmt.Sprint("/proc/", p.PID()))[4]
	return TTYState{foregroundReading(tty, p.PID(), 0), modes.Lflag&unix.ICANON != 0, modes.Lflag&unix.ECHO != 0}
}

// foregroundReading tells whether a thread of the foreground group of a terminal (device number) and session (0: any)
// is blocked in read on it, or in poll, select or epoll to read; measured on 442 programs: recall .99, precision .98.
func foregroundReading(tty string, session, depth int) Reading {
	procs, _ := filepath.Glob("/proc/[1-9]*")
	result := when(linux, ReadingBusy)
	for _, proc := range procs {
		pid, _ := strconv.Atoi(filepath.Base(proc))
		id, _ := unix.Getsid(pid) // asked first, at a tenth of the cost: most are in other sessions
		if session > 0 && id != session || !inForeground(statFields(proc), tty) {
			continue
		}
		tasks, _ := filepath.Glob(proc + "/task/*")
		for _, task := range tasks {
			r := threadReading(tty, task, depth)
			if result = min(result, r); r == ReadingYes { // unknown is less than busy
				return r
			}
		}
	}
	return result
}

// threadReading sees that a relay (sudo, script) waits for its inner terminal too: what counts is who reads there.
func threadReading(tty, task string, depth int) Reading {
	waits, err := waitsFor(task)
	found, inner := false, ""
	for _, wait := range waits {
		var st unix.Stat_t
		unix.Stat(fmt.Sprint(task, "/fd/", wait.Fd), &st)
		switch fmt.Sprint(st.Rdev) { // linux/Documentation/admin-guide/devices.txt
		case tty, "1280": // 5:0, /dev/tty; 0 is no device, or no answer, even where tty_nr is 0
			found = found || st.Rdev != 0
		case "1282": // 5:2, /dev/ptmx
			info, _ := os.ReadFile(fmt.Sprint(task, "/fdinfo/", wait.Fd))
			_, index, _ := strings.Cut(string(info), "tty-index:")
			n, _ := strconv.Atoi(strings.TrimSpace(index))
			inner = fmt.Sprint(unix.Mkdev(136, uint32(n)))
		}
	}
	switch {
	case err != nil && statFields(task)[0] != "": // another user's, or the system does not say; "": it is gone
		return ReadingUnknown
	case !found || strings.Contains("TtZX", statFields(task)[0]): // stopped: it still shows the call it will restart
		return ReadingBusy
	case inner == "" || depth > 3:
		return ReadingYes
	}
	return foregroundReading(inner, 0, depth+1)
}

func statFields(proc string) (f [20]string) { // proc_pid_stat(5): state, ppid, pgrp, session, tty_nr, tpgid, …
	b, _ := os.ReadFile(proc + "/stat")
	copy(f[:], strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:])))
	return f
}
func inForeground(stat [20]string, tty string) bool { return stat[4] == tty && stat[2] == stat[5] }

// waitsFor lists the descriptors whose input the thread is blocked on; none when it runs or does anything else. Numbers
// from linux/arch/x86/entry/syscalls/syscall_64.tbl and, for arm64, linux/include/uapi/asm-generic/unistd.h.
func waitsFor(task string) (waits []unix.PollFd, err error) {
	b, err := os.ReadFile(task + "/syscall")
	nr, a0, a1 := -1, 0, 0 // as they stay when it is in no call
	fmt.Sscanf(string(b), "%d 0x%x 0x%x", &nr, &a0, &a1)
	peek := func(addr int, v any) {
		f, _ := os.Open(task + "/mem")
		defer f.Close()
		binary.Read(io.NewSectionReader(f, int64(addr), 1<<16), binary.LittleEndian, v)
	}
	switch {
	case amd64 && (nr == 0 || nr == 19), !amd64 && (nr == 63 || nr == 65): // read, readv (descriptor, …)
		waits = []unix.PollFd{{Fd: int32(a0), Events: unix.POLLIN}}
	case amd64 && (nr == 7 || nr == 271), !amd64 && nr == 73: // poll, ppoll (array, count, …)
		waits = make([]unix.PollFd, min(a1, 1024))
		peek(a0, waits)
	case amd64 && (nr == 23 || nr == 270), !amd64 && nr == 72: // select, pselect6 (count, read set, …)
		set := make([]byte, (min(a0, 1024)+7)/8)
		peek(a1, set)
		for fd := range 8 * len(set) { // POLLIN is bit 0
			waits = append(waits, unix.PollFd{Fd: int32(fd), Events: int16(set[fd/8] >> (fd % 8))})
		}
	case amd64 && (nr == 232 || nr == 281), !amd64 && nr == 22, nr == 441: // epoll_wait, _pwait, _pwait2 (descriptor, …)
		b, err = os.ReadFile(task + "/fdinfo/" + strconv.Itoa(a0)) // lines "tfd: 5 events: 19 data: …"
		for _, line := range strings.Split(string(b), "tfd:")[1:] {
			var fd, events int
			fmt.Sscanf(line, "%d events: %x", &fd, &events)
			waits = append(waits, unix.PollFd{Fd: int32(fd), Events: int16(events)})
		}
	}
	return slices.DeleteFunc(waits, func(w unix.PollFd) bool { return w.Events&unix.POLLIN == 0 }), err
}

// ioctl makes a request of f's driver; f stays open and in the poller meanwhile, and may be nil.
func ioctl[T any](f *os.File, req uint, arg *T) error {
	errno := unix.EBADF
	if raw, err := f.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, uintptr(req), uintptr(unsafe.Pointer(arg)))
		})
	}
	return when[error](errno != 0, errno)
}
func terminalSize(f *os.File) (s Size, err error) { // of the host's terminal; an error when f is none
	err = ioctl(f, unix.TIOCGWINSZ, &s)
	return s, err
}

// rawMode sets the host terminal, restore undoes it (twice is fine) while it is ours. Neither flushes type-ahead.
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

// waitReady waits until a standard stream of ours, which does not block, can be read or written.
// It uses select: poll of macOS knows no terminals (poll(2), BUGS).
func waitReady(f *os.File, write bool) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	waited := error(unix.EINTR)
	err = raw.Control(func(fd uintptr) {
		for waited == unix.EINTR {
			set := &unix.FdSet{}
			set.Set(int(fd))
			if write {
				_, waited = unix.Select(int(fd)+1, nil, set, nil, nil)
			} else {
				_, waited = unix.Select(int(fd)+1, set, nil, nil, nil)
			}
		}
	})
	if err != nil {
		return err
	}
	return waited
}

func resizeSignals(f *os.File) (ch <-chan os.Signal, stop func()) { // a value per change of the host terminal's size
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c, func() { signal.Stop(c) }
}
func endSignals() []os.Signal { // without those we were started to ignore (nohup): the child ignores them too
	return slices.DeleteFunc([]os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT}, signal.Ignored)
}

// stopSelf stops this process until it goes on, where a shell can resume it. SIGSTOP, as Go never lets go of SIGTSTP.
func stopSelf() {
	session, _ := unix.Getsid(0)
	if parent, _ := unix.Getsid(unix.Getppid()); session == parent && session != unix.Getpgrp() {
		resumed := make(chan os.Signal, 1)
		signal.Notify(resumed, syscall.SIGCONT)
		unix.Kill(unix.Getpid(), unix.SIGSTOP)
		<-resumed
	}
}

// lockFile takes an exclusive flock for as long as f lives: keep it reachable. wait false: errLocked if another has it.
func lockFile(f *os.File, wait bool) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|when(!wait, unix.LOCK_NB))
	if err == unix.EINTR {
		return lockFile(f, wait)
	}
	return cmp.Or(when(err == unix.EWOULDBLOCK, errLocked), err)
}
func unlockFile(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }
func syncDir(dir string) error { // a rename or creation in it is durable then, but where the file system cannot: EINVAL
	d, err := os.Open(dir)
	defer d.Close()
	err = cmp.Or(err, d.Sync())
	return when(!errors.Is(err, unix.EINVAL), err)
}
func processStart(pid int) (n int64) { // tells two processes of the same pid apart; 0: no such process
	if !linux {
		out, _ := exec.Command("env", "LC_ALL=C", "ps", "-o", "lstart=", "-p", strconv.Itoa(pid)).Output()
		t, _ := time.Parse(time.ANSIC, strings.TrimSpace(string(out)))
		return max(t.Unix(), 0)
	}
	if stat := statFields(fmt.Sprint("/proc/", pid)); stat[0] != "Z" {
		n, _ = strconv.ParseInt(stat[19], 10, 64) // clock ticks since boot
	}
	return n
}

// parentOf is the pid of the process's parent; 0: it has none, there is no such process, or the system does not tell
// (Linux without /proc). A process whose parent has ended gets another, on Linux process 1 or a subreaper.
func parentOf(pid int) int {
	if !linux {
		return darwinParent(pid)
	}
	ppid, _ := strconv.Atoi(statFields(fmt.Sprint("/proc/", pid))[1]) // "" is no number
	return ppid
}

// darwinParent asks the kernel, not ps, which a program could replace by one of its own.
func darwinParent(pid int) int {
	const (
		darwinSysctl = 202 // xnu bsd/kern/syscalls.master
		ctlKern      = 1   // CTL_KERN, KERN_PROC, KERN_PROC_PID: macOS <sys/sysctl.h>
		kernProc     = 14
		kernProcPID  = 1
		kinfoSize    = 648 // struct kinfo_proc, macOS <sys/sysctl.h>: unix.KinfoProc
		ppidAt       = 560 // offset of kp_eproc.e_ppid in it
	)
	mib := [4]int32{ctlKern, kernProc, kernProcPID, int32(pid)}
	var info [kinfoSize]byte
	size := uintptr(len(info))
	_, _, errno := unix.Syscall6(darwinSysctl, uintptr(unsafe.Pointer(&mib[0])), uintptr(len(mib)),
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&size)), 0, 0)
	if errno != 0 || size != kinfoSize {
		return 0
	}
	return int(binary.LittleEndian.Uint32(info[ppidAt:]))
}

// systemSession is the session that this process is in, by the pid of its leader, which a wrapped tool is. A terminal
// belongs to one session, so that who has the tool's terminal is in it. 0: the system does not tell.
func systemSession() int {
	id, err := unix.Getsid(0)
	if err != nil {
		return 0
	}
	return id
}

func ownedPrivate(path string) error { // nil: a file of one name, or a folder, the user's own and no other's to touch
	f, err := openPrivate(path, os.O_RDONLY)
	f.Close()
	return err
}
func mkdirPrivate(path string) error { return os.Mkdir(path, 0o700) } // fs.ErrExist when it is there

// openPrivate opens or creates a file 0600, whatever the umask, that must be ownedPrivate. No symbolic link is followed
// (ELOOP), nothing refused is truncated, and O_NONBLOCK keeps a planted FIFO from hanging the open.
func openPrivate(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	var st unix.Stat_t // stays zero when that fails, which is no regular file
	unix.Fstat(int(f.Fd()), &st)
	regular := st.Mode&unix.S_IFMT == unix.S_IFREG
	switch {
	case err != nil:
	case !regular && st.Mode&unix.S_IFMT != unix.S_IFDIR, int(st.Uid) != os.Geteuid():
		err = fmt.Errorf("%s is not a file or folder of your own: %w", path, os.ErrPermission)
	case st.Mode&0o077 != 0:
		err = fmt.Errorf("%s can be reached by others (mode %04o); run: chmod go= %s", path, st.Mode&0o777, path)
	case regular && st.Nlink > 1:
		err = fmt.Errorf("%s has a second name (%d hard links)", path, st.Nlink)
	case flag&os.O_TRUNC != 0:
		err = errors.Join(f.Chmod(0o600), f.Truncate(0))
	case flag&os.O_CREATE != 0:
		err = f.Chmod(0o600)
	}
	if err != nil {
		f.Close()
	}
	return f, err
}

func networkFS(dir string) string { // the file system where flock may not hold between machines, else ""
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
	calls := map[bool][2]uintptr{true: {294, 254}, false: {26, 27}}[amd64] // inotify_init1, _add_watch; as for waitsFor
	fd, _, _ := unix.Syscall(calls[0], unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	name, f, c := append([]byte(dir), 0), os.NewFile(fd, "inotify"), make(chan struct{}, 1)
	stop = func() { f.Close() }
	const changes = 0x2 | 0x80 | 0x100 // IN_MODIFY, IN_MOVED_TO, IN_CREATE: <linux/inotify.h>
	if _, _, e := unix.Syscall(calls[1], fd, uintptr(unsafe.Pointer(&name[0])), changes); e != 0 {
		stop()
		return nil, stop
	}
	go func() {
		defer close(c)
		b := make([]byte, 4096)
		for _, err := f.Read(b); err == nil; _, err = f.Read(b) { // until f is closed
			if len(c) == 0 { // nobody else fills it
				c <- struct{}{}
			}
		}
	}()
	return c, stop
}
