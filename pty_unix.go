//go:build linux || darwin

// pty_unix.go is all that differs between operating systems, for Linux and macOS (amd64, arm64). pty_windows.go has
// the same functions in the same order, but for those that are called in one of the two files alone:
//
//	the child's terminal     startPTY, findTool, the methods of PTY, actAs
//	what the child waits for foregroundReading (Linux alone tells)
//	the host's terminal      terminalSize, ownTerminal, openTerminal, inForeground, resumes, rawMode, muteEcho,
//	                         dropTyped, processOutput, waitReady, resizeSignals, endSignals, stopSelf
//	processes                parentOf
//	files                    mkdirPrivate, openPrivate, closeRemedy, fileRemedy,
//	                         lockFile, unlockFile, cutFile, replaceFile, syncDir
//
// Neither looks at what is read or typed. What x/sys names for one of Linux and macOS only has a name here, with the
// header that it comes from.
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	linux = runtime.GOOS == "linux"
	amd64 = runtime.GOARCH == "amd64"

	suspendSignal = syscall.SIGTSTP
	resumeSignal  = syscall.SIGCONT
	handsStreams  = true                   // a child can have streams of ours
	drainQuiet    = 100 * time.Millisecond // of silence after the child's end, then Read ends
	drainWait     = 500 * time.Millisecond // that Read waits after the child's end, in all
	killWait      = 3 * time.Second        // for the child to end well
)

// Requests to a terminal's driver.
const (
	linuxTCGETS     = 0x5401 // linux/include/uapi/asm-generic/ioctls.h
	linuxTCSETS     = 0x5402 // type-ahead stays
	linuxTCFLSH     = 0x540b // its argument is no pointer: 0, TCIFLUSH, is what was typed and not read
	linuxFIONREAD   = 0x541b
	linuxTIOCGPTN   = 0x80045430 // the slave's number
	linuxTIOCSPTLCK = 0x40045431

	darwinTIOCGETA     = 0x40487413 // macOS <sys/ttycom.h>
	darwinTIOCSETA     = 0x80487414 // type-ahead stays
	darwinTIOCFLUSH    = 0x80047410 // its argument:
	darwinFREAD        = 1          // what was typed and not read
	darwinFIONREAD     = 0x4004667f
	darwinTIOCPTYGRANT = 0x20007454
	darwinTIOCPTYUNLK  = 0x20007452
	darwinTIOCPTYGNAME = 0x40807453 // the slave's path, 128 bytes
	darwinTIOCOUTQ     = 0x40047473 // of the master too what the slave wrote; its FIONREAD is what the slave can read
)

// ---- the child's terminal ----
// A pseudo-terminal whose slave is the child's controlling terminal.

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

// unixPTY is the master side and the child. macOS throws away what the master has not read 0.6 s after the last close
// of the slave (ptsclose and ttyclose of xnu/bsd/kern/tty.c): there the slave stays open until Read ends.
type unixPTY struct {
	master   *os.File      // never by Fd: it would block, and neither Close nor a deadline ends a Read
	slave    *os.File      // closed on Linux, once the child has its own
	leader   int           // pid of what leads the session: the child, or the leader of ours
	report   *os.File      // of the leader, nil without one
	pid      int           // the child's
	stopped  chan struct{} // a value when the child was stopped
	exited   chan struct{} // closed when the child has been reaped
	code     int           // valid then
	signaled bool          // the same
	patience time.Duration // Read's: what is left of drainWait

	raw    syscall.RawConn // the master's
	taking sync.Mutex      // guards what follows
	taken  int64           // bytes of output that were read

	ran   string    // State's: how often and how long the sleeper had run when it last saw that it had, see naps
	ranAt time.Time // when that was
}

// startPTY starts argv on a new terminal of that size, in the folder that we are in, even where its name leads nobody
// there. Its errors wrap errNoTool or fs.ErrPermission.
func startPTY(argv, env []string, size Size, host Host) (PTY, error) {
	path, err := findTool(argv[0])
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	p, err := newPTY()
	if err != nil {
		return nil, fmt.Errorf("starting %s: a terminal for it: %w", argv[0], err)
	}
	err = prepare(p.slave, host)
	if err == nil {
		err = p.Resize(size)
	}
	if err == nil {
		err = p.start(path, argv, &syscall.ProcAttr{Env: env}, host)
	}
	if err != nil {
		p.Close() // nobody has written to it
		return nil, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	if linux {
		p.slave.Close() // the child has its own; macOS: see unixPTY
	}
	return p, nil
}

// newPTY makes the terminal.
func newPTY() (*unixPTY, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p := &unixPTY{master: master, stopped: make(chan struct{}, 1), exited: make(chan struct{}), patience: drainWait}
	p.raw, err = master.SyscallConn()
	if err == nil {
		p.slave, err = p.openSlave()
	}
	if err != nil {
		master.Close() // nobody has written to it
		return nil, err
	}
	return p, nil
}

// start starts the child: by itself where it leads its session, else see leader. A child that has no stream on its
// terminal, and no leader, has no controlling terminal: there was none for it.
func (p *unixPTY) start(path string, argv []string, attr *syscall.ProcAttr, host Host) error {
	ctty := -1
	for i, f := range host.Streams {
		if f == nil {
			f = p.slave
			ctty = i
		}
		attr.Files = append(attr.Files, f.Fd())
	}
	attr.Sys = &syscall.SysProcAttr{Setsid: true, Setctty: ctty >= 0, Ctty: max(0, ctty)}
	started := make(chan error)
	go func() {
		var err error
		if host.Resumes {
			err = p.startLed(path, argv, attr)
		} else {
			p.leader, err = begin(path, argv, attr)
			p.pid = p.leader
			if err != nil {
				err = notRun{err}
			}
		}
		started <- err
		if err == nil {
			p.live()
		}
	}()
	return <-started
}

// findTool is the path of the program that name runs, as a shell finds it: "." in PATH counts. The error is
// errNoTool, or os.ErrPermission for a folder and for what the user may not run.
func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil || errors.Is(err, exec.ErrDot):
		return path, nil
	case errors.Is(err, os.ErrPermission) || errors.Is(err, syscall.EISDIR):
		return "", hinted(os.ErrPermission, "if it is a program, let it be run: chmod u+x "+name)
	}
	return "", errNoTool
}

// openSlave opens the other side of the master, as it is.
func (p *unixPTY) openSlave() (*os.File, error) {
	path, err := p.slavePath()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) // os.OpenFile makes it non-blocking
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// slavePath is the path of the slave, which can be opened from then on.
func (p *unixPTY) slavePath() (string, error) {
	if linux {
		var locked, number int32
		if err := ioctl(p.master, linuxTIOCSPTLCK, &locked); err != nil {
			return "", err
		}
		if err := ioctl(p.master, linuxTIOCGPTN, &number); err != nil {
			return "", err
		}
		return fmt.Sprint("/dev/pts/", number), nil
	}
	var name [128]byte
	for _, step := range []uint{darwinTIOCPTYGRANT, darwinTIOCPTYUNLK, darwinTIOCPTYGNAME} {
		if err := ioctl(p.master, step, &name); err != nil {
			return "", err
		}
	}
	return unix.ByteSliceToString(name[:]), nil
}

// prepare gives the slave the modes of the host's terminal; where there is none, or a shell edits its next line there
// while we start in the background, its own stay, with IUTF8, all that the kernel's defaults lack of a terminal
// emulator's.
func prepare(slave *os.File, host Host) error {
	modes, err := getModes(host.TTY)
	if err != nil || !inForeground(host.TTY) {
		if modes, err = getModes(slave); err != nil {
			return err
		}
		modes.Iflag |= unix.IUTF8
	}
	if host.Plain {
		modes.Oflag &^= unix.OPOST
	}
	return setModes(slave, modes)
}

// getModes are the modes of a terminal; an error when f is none, or nil.
func getModes(f *os.File) (modes unix.Termios, err error) {
	err = ioctl(f, request(linuxTCGETS, darwinTIOCGETA), &modes)
	return modes, err
}

// setModes sets the modes of a terminal; type-ahead stays.
func setModes(f *os.File, modes unix.Termios) error {
	return ioctl(f, request(linuxTCSETS, darwinTIOCSETA), &modes)
}

// begin starts a program, which ends with the calling thread: Linux's Pdeathsig ends even one that ignores SIGHUP after
// kill -9 of ours, and is sent when the thread that forked ends (prctl(2)). So the caller keeps that thread.
func begin(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	runtime.LockOSThread()
	deathSignal := reflect.ValueOf(attr.Sys).Elem().FieldByName("Pdeathsig")
	if deathSignal.IsValid() {
		deathSignal.SetInt(int64(syscall.SIGTERM))
	}
	pid, err = syscall.ForkExec(path, argv, attr) // os.StartProcess forks once more, to see whether it can
	if errors.Is(err, syscall.ENOEXEC) {          // no #!: every shell runs it
		pid, err = syscall.ForkExec("/bin/sh", append([]string{"sh", path}, argv[1:]...), attr)
	}
	return pid, err
}

// live tells stopped of each stop of the child, until it has ended.
func (p *unixPTY) live() {
	status := p.change()
	for status.Stopped() {
		select {
		case p.stopped <- struct{}{}:
		default: // the last stop has not been heard of yet
		}
		status = p.change()
	}
	p.code = status.ExitStatus()
	p.signaled = status.Signaled()
	if p.signaled {
		p.code = 128 + int(status.Signal())
	}
	if p.report != nil {
		changeOf(p.leader) // the leader ends with the child
		p.report.Close()   // nothing more comes
	}
	close(p.exited)
	p.master.SetReadDeadline(time.Unix(1, 0)) // wakes Read; fails after Close, which has woken it
}

// change waits until the child was stopped, or has ended and was reaped.
func (p *unixPTY) change() unix.WaitStatus {
	if p.report != nil {
		status, err := p.heard()
		if err == nil {
			return unix.WaitStatus(status)
		} // else the leader was killed, and the child with it
	}
	return changeOf(p.leader)
}

// changeOf waits until a child of this process was stopped, or has ended: then it reaps it.
func changeOf(pid int) (status unix.WaitStatus) {
	err := error(unix.EINTR)
	for err == unix.EINTR {
		_, err = unix.Wait4(pid, &status, unix.WUNTRACED, nil)
	}
	return status
}

// Stopped gives a value when the child was stopped, as by ^Z.
func (p *unixPTY) Stopped() <-chan struct{} {
	return p.stopped
}

// Read gives io.EOF when nobody holds the terminal any more, or when the child is gone and what it wrote has been
// read. The bounds on that count reads, and waiting for nothing: nothing is lost to a host that is slow to take the
// output, nor when we are stopped, or get no processor.
func (p *unixPTY) Read(b []byte) (n int, err error) {
	read := func(fd uintptr) (done bool) {
		n, err = p.take(fd, b)
		return err != unix.EAGAIN
	}
	waited := p.raw.Read(read)
	if errors.Is(waited, os.ErrDeadlineExceeded) && p.patience > 0 { // the child is gone, see live
		p.patience -= drainWait / 1000 // Linux holds up to 640 KiB (tty_buffer.c): 2 KiB a read
		waited = p.raw.Control(func(fd uintptr) {
			if !read(fd) {
				_ = waitFor(fd, false, drainQuiet) // what has come is taken
				p.patience -= drainQuiet / 2
				read(fd)
			}
		})
	}
	if waited == nil && err == nil && n > 0 {
		return n, nil
	}
	p.slave.Close() // nobody has written to it
	return 0, io.EOF
}

// take reads what is there. It is counted in the same step, so that Came misses none.
func (p *unixPTY) take(fd uintptr, b []byte) (n int, err error) {
	p.taking.Lock()
	defer p.taking.Unlock()
	n, err = unix.Read(int(fd), b)
	p.taken += int64(max(n, 0))
	return n, err
}

// Write types b, and waits while the child's input is full.
func (p *unixPTY) Write(b []byte) (int, error) {
	return p.master.Write(b)
}

// Close closes our side: the foreground group gets SIGHUP, a Read that waits ends. Twice is fine.
func (p *unixPTY) Close() error {
	p.master.Close() // fails the second time alone
	p.slave.Close()  // the same
	return nil
}

// Wait is the exit status of the child, once it has one; 128+N when signal N ended it.
func (p *unixPTY) Wait() int {
	<-p.exited
	return p.code
}

// Signaled reports, after Wait, whether a signal ended the child.
func (p *unixPTY) Signaled() bool {
	return p.signaled
}

// PID is the child's.
func (p *unixPTY) PID() int {
	return p.pid
}

// Came is how many bytes of output there were so far: those that Read took, and those that wait for it, where that is
// known.
func (p *unixPTY) Came() int64 {
	p.taking.Lock()
	defer p.taking.Unlock()
	var n int32
	_ = ioctl(p.master, request(linuxFIONREAD, darwinTIOCOUTQ), &n) // where it fails none is known of
	return p.taken + int64(n)
}

// Waiting is how many bytes of input nobody has read, −1 where that is not known. In line mode those of a line without
// its end are not counted (n_tty_ioctl of linux/drivers/tty/n_tty.c, ttnread of xnu/bsd/kern/tty.c).
func (p *unixPTY) Waiting() int {
	var n int32
	err := p.withSlave(func(slave *os.File) error {
		return ioctl(slave, request(linuxFIONREAD, darwinFIONREAD), &n)
	})
	if err != nil {
		return -1
	}
	return int(n)
}

// TakeBack drops the input that nobody has read where it is that many bytes. False: it has dropped nothing.
func (p *unixPTY) TakeBack(n int) bool {
	return p.Waiting() == n && p.withSlave(dropTyped) == nil
}

// withSlave calls do with the slave. Linux alone does not keep it open: Read ends when nobody else has it.
func (p *unixPTY) withSlave(do func(slave *os.File) error) error {
	if !linux {
		return do(p.slave)
	}
	slave, err := p.openSlave()
	if err != nil {
		return err
	}
	defer slave.Close() // nobody has written to it
	return do(slave)
}

// Resize tells the child its terminal's new size, by SIGWINCH where there are signals.
func (p *unixPTY) Resize(s Size) error {
	return ioctl(p.master, unix.TIOCSWINSZ, &s)
}

// Signal sends sig to the foreground group, and SIGHUP and SIGCONT to the child's too: the end of a terminal does that,
// for a shell to pass it on to its jobs, and it is the child that was stopped. os.ErrProcessDone: the child is gone.
func (p *unixPTY) Signal(sig os.Signal) error {
	group := p.foreground()
	if sig != syscall.SIGHUP && sig != syscall.SIGCONT || group == p.pid {
		return p.kill(sig, group)
	}
	return p.kill(sig, group, p.pid)
}

// kill sends sig to process groups until the child has been reaped, then it gives os.ErrProcessDone: its number may be
// another's. A group that is gone keeps it from no other; the error is the last group's.
func (p *unixPTY) kill(sig os.Signal, groups ...int) (err error) {
	select {
	case <-p.exited:
		return os.ErrProcessDone
	default:
	}
	for _, group := range groups {
		err = unix.Kill(-group, sig.(syscall.Signal))
	}
	return err
}

// Terminate ends the child, if it has not ended by then: it is asked to, and after killWait made to. The child's group
// is told too: under job control another one has the terminal. SIGCONT is for what is stopped to see SIGTERM.
func (p *unixPTY) Terminate(grace time.Duration) {
	if p.ends(grace) {
		return
	}
	p.kill(syscall.SIGTERM, p.foreground(), p.pid) // fails when it has ended
	p.kill(syscall.SIGCONT, p.foreground(), p.pid) // the same
	if !p.ends(killWait) {
		p.kill(syscall.SIGKILL, p.foreground(), p.pid, p.leader) // the same
	}
}

// ends reports whether the child ends within that time.
func (p *unixPTY) ends(within time.Duration) bool {
	select {
	case <-p.exited:
		return true
	case <-time.After(within):
		return false
	}
}

// foreground is the process group that has the terminal, the child's own when there is none. It is never 1: kill(-1)
// reaches every process.
func (p *unixPTY) foreground() int {
	group, err := groupOf(p.master)
	if err != nil || group <= 1 {
		return p.pid
	}
	return group
}

// groupOf is the process group that has a terminal, as its number says.
func groupOf(f *os.File) (int, error) {
	var group int32
	err := ioctl(f, unix.TIOCGPGRP, &group)
	return int(group), err
}

// State is what the system says about the terminal; ReadingUnknown where it cannot tell. It costs more, the more
// processes and threads the child has.
func (p *unixPTY) State() TTYState {
	modes := p.Modes()
	now := TTYState{Reading: p.reading(), Canonical: modes.Canonical, Echo: modes.Echo}
	if now.Reading == ReadingBusy && !now.Canonical && p.naps() {
		now.Reading = ReadingUnknown
		now.Sleeps = true
	}
	return now
}

// Modes are those of the terminal now.
func (p *unixPTY) Modes() Modes {
	modes, _ := getModes(p.master) // none after Close
	return Modes{
		Processed: modes.Oflag&unix.OPOST != 0,
		Canonical: modes.Lflag&unix.ICANON != 0,
		Echo:      modes.Lflag&unix.ECHO != 0,
		Erase:     rune(modes.Cc[unix.VERASE]),
		UTF8:      modes.Iflag&unix.IUTF8 != 0,
	}
}

// reading asks the leader of the foreground group, which it mostly is that reads, then all that descend from the child;
// others, whose parents have ended, are not looked for. Where a process of that group may read that is not shown to us,
// the answer is ReadingUnknown.
func (p *unixPTY) reading() Reading {
	var number int32
	self, _ := os.Readlink("/proc/self") // another pid, or none: /proc is another container's, or missing
	if !linux || self != strconv.Itoa(os.Getpid()) || ioctl(p.master, linuxTIOCGPTN, &number) != nil {
		return ReadingUnknown
	}
	group, err := groupOf(p.master)
	if err != nil || group == 0 || !lives(-group) { // it is nobody's: the child, the session's leader, is gone
		return ReadingBusy
	}
	tty := slaveDevice(int(number))
	leader := foregroundReading(tty, []string{procDir(group)}, 0)
	if leader == ReadingYes {
		return leader
	}
	return familyReading(tty, p.pid, 0)
}

// ioctl makes a request of f's driver; f stays open and in the poller meanwhile, and may be nil. What was written to
// the other end of a pty may be on its way, in the hands of a thread of the kernel, where FIONREAD does not count it:
// poll waits for that (n_tty_poll of linux/drivers/tty/n_tty.c).
func ioctl[T any](f *os.File, number uint, arg *T) error {
	if f == nil {
		return unix.EBADF
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var errno unix.Errno
	err = raw.Control(func(fd uintptr) {
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) // else the number is that of before
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, uintptr(number), uintptr(unsafe.Pointer(arg)))
	})
	if err != nil {
		return err
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// request is the number of an ioctl on the system that we run on.
func request(onLinux, onDarwin uint) uint {
	if linux {
		return onLinux
	}
	return onDarwin
}

// ---- leader ----
// A child that a shell is to stop and resume is started as the shell would start it: by a leader, a process of ours
// that leads the session, in a group of its own that has the terminal. A child that leads its session itself is in an
// orphaned group (POSIX, "Orphaned Process Group": none in it has a parent in the same session and another group), for
// which the kernel drops SIGTSTP (linux/kernel/signal.c): that froze claude for good on ^Z.

// leaderRole is what argv[1] is of a leader; what follows: the tool's path, its argv.
const leaderRole = "(leader)"

// Descriptors of a leader, beside the child's streams.
const (
	slaveFD  = 3 // of the terminal
	reportFD = 4 // of a pipe: for its reports, which are numbers
)

// startLed starts the child by a leader, which reports the child's pid, or below 0 why there is none, then each of its
// wait statuses.
func (p *unixPTY) startLed(path string, argv []string, attr *syscall.ProcAttr) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	reports, end, err := os.Pipe()
	if err != nil {
		return err
	}
	attr.Sys.Setctty = true
	attr.Sys.Ctty = slaveFD
	attr.Files = append(attr.Files, p.slave.Fd(), end.Fd())
	p.report = reports
	p.leader, err = begin(exe, append([]string{os.Args[0], leaderRole, path}, argv...), attr)
	end.Close() // it has its own
	if err == nil {
		p.pid, err = p.heard()
	}
	if p.pid < 0 {
		return notRun{syscall.Errno(-p.pid)}
	}
	return err
}

// notRun is why the system does not run a program that is there: whatever that is, the user may not run it.
type notRun struct{ error }

// Is makes it an fs.ErrPermission.
func (notRun) Is(target error) bool { return target == os.ErrPermission }

// heard is the next report; an error: none comes any more.
func (p *unixPTY) heard() (int, error) {
	var number int32
	err := binary.Read(p.report, binary.NativeEndian, &number)
	return int(number), err
}

// actAs lives a leader's life where the arguments are a leader's; else it is false. Where its reports are not heard, it
// is about to be ended.
func actAs(args []string) bool {
	if len(args) < 4 || args[1] != leaderRole {
		return false
	}
	report := os.NewFile(reportFD, "report")
	unix.CloseOnExec(slaveFD)
	unix.CloseOnExec(reportFD)
	foreground := &syscall.SysProcAttr{Foreground: true, Ctty: slaveFD}
	attr := &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: foreground}
	number, err := begin(args[2], args[3:], attr)
	if failed, ok := errors.AsType[syscall.Errno](err); ok {
		number = -int(failed)
	}
	_ = binary.Write(report, binary.NativeEndian, int32(number))
	for fd := range reportFD {
		unix.Close(fd) // who has the other end is to see what the tool does, not us
	}
	for runs := err == nil; runs; {
		status := changeOf(number)
		runs = status.Stopped()
		_ = binary.Write(report, binary.NativeEndian, int32(status))
	}
	return true
}

// ---- what the child waits for ----
// Linux says in /proc which call a thread is blocked in. macOS does not: of a thread it reports whether it runs
// (PROC_PIDTHREADINFO), and no longer what it sleeps on (fill_user64_externproc of xnu/bsd/kern/kern_sysctl.c leaves
// p_wmesg and p_wchan empty); what is in the terminal's queues is the same whether or not somebody reads. What is not
// shown (another user's with hidepid, no /proc at all, a security module) is unknown: only what was seen to do
// something else is busy.

// Devices as stat(2) and proc_pid_stat(5) give them, from linux/Documentation/admin-guide/devices.txt.
const (
	deviceTTY  = "1280" // 5:0, /dev/tty
	devicePTMX = "1282" // 5:2, /dev/ptmx
	ptsMajor   = 136    // of the slaves

	maxRelays      = 3    // one inside the other that are followed
	maxDescriptors = 1024 // of one call
	procBytes      = 4096 // that one read of /proc gives at most
)

// procDir is what /proc tells of a process.
func procDir(pid int) string { return "/proc/" + strconv.Itoa(pid) }

// lives reports whether there is a process, thread or (below 0) group, whoever's it is and whether or not it is shown.
func lives(pid int) bool {
	return unix.Kill(pid, 0) != unix.ESRCH
}

// procLives is lives of a folder of /proc.
func procLives(proc string) bool {
	pid, err := strconv.Atoi(filepath.Base(proc))
	return err == nil && lives(pid)
}

// descendants are the process and all that descend from it, as folders of /proc; all is false where the system does
// not tell of all (CONFIG_PROC_CHILDREN).
func descendants(pid int) (family []string, all bool) {
	family = []string{procDir(pid)}
	all = true
	for i := 0; i < len(family); i++ {
		for _, task := range tasks(family[i], statFields(family[i])) {
			children, err := procFile(task + "/children")
			if err != nil && procLives(task) {
				all = false
			}
			for _, child := range strings.Fields(children) {
				family = append(family, "/proc/"+child)
			}
		}
	}
	return family, all
}

// tasks are the threads of a process with that stat, as folders of /proc. The only one is not searched for.
func tasks(proc string, stat [statThreads + 1]string) (all []string) {
	if stat[statThreads] == "1" {
		return []string{proc + "/task/" + filepath.Base(proc)}
	}
	threads, _ := os.ReadDir(proc + "/task") // those that were read before it was gone
	for _, thread := range threads {
		all = append(all, proc+"/task/"+thread.Name())
	}
	return all
}

// handsOver is the name of a program whose server, elsewhere, reads the terminal in its place: tmux sends it the
// descriptor (client.c), screen its path.
var handsOver = regexp.MustCompile(`^(tmux|screen)`)

// foregroundReading reports whether a thread of those processes (folders of /proc) that are in the foreground group of
// a terminal (device number), or in a session without one, which nothing stops (su -c, setsid), is blocked in read on
// it, or in poll, select or epoll to read; measured on 442 programs: recall .99, precision .98. It is unknown where one
// of that group is not shown, or (but inside a relay, whose child may not be there yet) none is among them.
func foregroundReading(tty string, procs []string, depth int) Reading {
	result := ReadingBusy
	seen := depth > 0
	for _, proc := range procs {
		stat := statFields(proc)
		shown := stat[statState] != ""
		apart := stat[statTTY] == "0"
		if shown && !apart && (stat[statTTY] != tty || stat[statGroup] != stat[statForeground]) {
			continue
		}
		threads := tasks(proc, stat)
		name, _ := procFile(proc + "/comm") // none of a process that is gone
		if !apart && (len(threads) == 0 && procLives(proc) || handsOver.MatchString(name)) {
			result = ReadingUnknown
		}
		for _, task := range threads {
			r := threadReading(tty, task, depth)
			switch {
			case r == ReadingYes:
				return r
			case !apart:
				seen = true
				result = min(result, r) // unknown is less than busy
			}
		}
	}
	if !seen {
		return ReadingUnknown
	}
	return result
}

// threadReading is foregroundReading of one thread. A relay (sudo, script) waits for its inner terminal too: what
// counts is who reads there.
func threadReading(tty, task string, depth int) Reading {
	found, inner, err := terminals(tty, task)
	if err != nil && procLives(task) { // another user's, or the system does not say
		return ReadingUnknown
	}
	// Gone, a zombie, or stopped: that still shows the call it will restart.
	if !found || strings.Contains("TtZX", statFields(task)[statState]) {
		return ReadingBusy
	}
	if inner == "" || depth > maxRelays {
		return ReadingYes
	}
	pid, _ := strconv.Atoi(filepath.Base(task)) // the relay, or a thread of it that starts what runs inside
	return familyReading(inner, pid, depth+1)
}

// familyReading is foregroundReading of a process and all that descend from it.
func familyReading(tty string, pid, depth int) Reading {
	family, all := descendants(pid)
	reading := foregroundReading(tty, family, depth)
	if reading == ReadingBusy && !all {
		return ReadingUnknown
	}
	return reading
}

// terminals reports whether a thread is blocked on the terminal's input, and on which one's master, "" none. An error
// means that the system does not say.
func terminals(tty, task string) (found bool, inner string, err error) {
	fds, err := waitsFor(task)
	if err != nil {
		return false, "", err
	}
	for _, fd := range fds {
		var st unix.Stat_t
		err := unix.Stat(fmt.Sprint(task, "/fd/", fd), &st)
		if errors.Is(err, os.ErrPermission) {
			return false, "", err
		}
		if err != nil || st.Rdev == 0 { // no device, even where tty is 0
			continue
		}
		switch fmt.Sprint(st.Rdev) {
		case tty, deviceTTY:
			found = true
		case devicePTMX:
			inner, err = innerDevice(fmt.Sprint(task, "/fdinfo/", fd))
			if err != nil {
				return false, "", err
			}
		}
	}
	return found, inner, nil
}

// innerDevice is the device number of the slave whose master's fdinfo that is (proc_pid_fdinfo(5)).
func innerDevice(fdinfo string) (string, error) {
	info, err := procFile(fdinfo)
	if err != nil {
		return "", err
	}
	_, index, _ := strings.Cut(info, "tty-index:")
	n, err := strconv.Atoi(strings.TrimSpace(index))
	return slaveDevice(n), err
}

// slaveDevice is the device number of that slave.
func slaveDevice(n int) string {
	return fmt.Sprint(unix.Mkdev(ptsMajor, uint32(n)))
}

// Fields of proc_pid_stat(5) that follow the program's name.
const (
	statState      = 0
	statParent     = 1
	statGroup      = 2
	statTTY        = 4
	statForeground = 5  // process group
	statThreads    = 17 // how many
)

// statFields are the fields of a process or thread that follow its program's name, all "" when it is gone.
func statFields(proc string) (fields [statThreads + 1]string) {
	line, _ := procFile(proc + "/stat")                // "" is gone
	after := line[strings.LastIndexByte(line, ')')+1:] // of the name, which may have any other character
	copy(fields[:], strings.Fields(after))
	return fields
}

// procFile is what a small file of /proc says: unlike os.ReadFile it does not ask whether that can be waited for.
func procFile(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	b := make([]byte, procBytes)
	n, err := unix.Read(fd, b)
	return string(b[:max(0, n)]), err
}

// System calls that wait for input, or for a time: linux/arch/x86/entry/syscalls/syscall_64.tbl.
var amd64Calls = map[int]string{
	0:   "read",
	7:   "poll",
	19:  "readv",
	23:  "select",
	35:  "nanosleep",
	230: "clock_nanosleep",
	232: "epoll_wait",
	270: "pselect6",
	271: "ppoll",
	281: "epoll_pwait",
	441: "epoll_pwait2",
}

// The same on arm64: linux/include/uapi/asm-generic/unistd.h.
var arm64Calls = map[int]string{
	22:  "epoll_pwait",
	63:  "read",
	65:  "readv",
	72:  "pselect6",
	73:  "ppoll",
	101: "nanosleep",
	115: "clock_nanosleep",
	441: "epoll_pwait2",
}

// callStack is the field of proc_pid_syscall(5) with the pointer to the stack; a thread in no call has fewer.
const callStack = 7

// naps reports whether the leader of the foreground group waits for a time, and has run a moment ago, as it has where
// it looks for keys between two short sleeps.
func (p *unixPTY) naps() bool {
	group, _ := groupOf(p.master) // it waits for nothing where there is none
	proc := procDir(group)
	call, _, _, _ := callOf(proc)
	ran, _ := procFile(proc + "/schedstat") // "" where the system does not say
	if ran != p.ran {
		p.ran = ran
		p.ranAt = time.Now()
	}
	return strings.HasSuffix(call, "nanosleep") && time.Since(p.ranAt) < napTime
}

// callOf is the system call that a thread is in, "" of another one, with its first arguments. Of a program of 32 bits,
// whose calls have other numbers and whose stack lies below 4 GiB, it is not known.
func callOf(task string) (name string, a0, a1 int, err error) {
	call, err := procFile(task + "/syscall")
	fields := strings.Fields(call)
	if len(fields) > callStack && len(fields[callStack]) <= len("0xffffffff") {
		return "", 0, 0, errors.ErrUnsupported
	}
	number := -1
	fmt.Sscanf(call, "%d 0x%x 0x%x", &number, &a0, &a1) // not in a call: "running", or number -1
	calls := arm64Calls
	if amd64 {
		calls = amd64Calls
	}
	return calls[number], a0, a1, err
}

// waitsFor lists the descriptors whose input a thread is blocked on; none when it runs or does anything else. An
// error means that the system does not say.
func waitsFor(task string) (fds []int, err error) {
	call, a0, a1, err := callOf(task)
	switch call {
	case "read", "readv": // (descriptor, …)
		fds = []int{a0}
	case "poll", "ppoll": // (array, count, …)
		waits := make([]unix.PollFd, min(a1, maxDescriptors))
		err = peek(task, a0, waits)
		for _, wait := range waits {
			if wait.Events&unix.POLLIN != 0 {
				fds = append(fds, int(wait.Fd))
			}
		}
	case "select", "pselect6": // (count, read set, …)
		set := make([]byte, (min(a0, maxDescriptors)+7)/8)
		err = peek(task, a1, set)
		for fd := range 8 * len(set) {
			if set[fd/8]>>(fd%8)&1 != 0 {
				fds = append(fds, fd)
			}
		}
	case "epoll_wait", "epoll_pwait", "epoll_pwait2": // (descriptor, …)
		return epollWaits(fmt.Sprint(task, "/fdinfo/", a0))
	}
	return fds, err
}

// epollWaits lists what is in an epoll set, by its fdinfo (proc_pid_fdinfo(5)): lines "tfd: 5 events: 19 data: …".
func epollWaits(fdinfo string) (fds []int, err error) {
	b, err := os.ReadFile(fdinfo)
	for _, line := range strings.Split(string(b), "tfd:")[1:] {
		var fd, events int
		fmt.Sscanf(line, "%d events: %x", &fd, &events) // any other line is descriptor 0 for nothing
		if events&unix.POLLIN != 0 {
			fds = append(fds, fd)
		}
	}
	return fds, err
}

// peek fills v with what stands at an address of the thread's memory; a null pointer leaves it as it is. An error means
// that the memory is not shown.
func peek(task string, address int, v any) error {
	f, err := os.Open(task + "/mem")
	if err != nil {
		return err
	}
	defer f.Close()
	r := io.NewSectionReader(f, int64(address), 1<<16)
	_ = binary.Read(r, binary.LittleEndian, v) // a null pointer
	return nil
}

// ---- the host's terminal ----
// The terminal that we run in ourselves.

// terminalSize is the size of the host's terminal; an error when f is none, or nil.
func terminalSize(f *os.File) (s Size, err error) {
	err = ioctl(f, unix.TIOCGWINSZ, &s)
	return s, err
}

// ownTerminal reports whether that is the controlling terminal of our session. It is nobody's when the session's leader
// has ended (disassociate_ctty of linux/drivers/tty/tty_jobctrl.c), though it may still be read and written.
func ownTerminal(f *os.File) bool {
	_, err := groupOf(f)
	return err == nil
}

// openTerminal opens the terminal of our session, whatever our standard streams are.
func openTerminal() (*os.File, error) {
	return os.OpenFile("/dev/tty", os.O_RDWR, 0)
}

// inForeground reports whether the host's terminal is ours to read and to set. Who does that from the background is
// stopped by SIGTTIN or SIGTTOU.
func inForeground(f *os.File) bool {
	group, err := groupOf(f)
	return err != nil || group == unix.Getpgrp()
}

// resumes reports whether a shell lets us go on when we have stopped: one that is in our session, which has a terminal,
// and has given us a group of our own.
func resumes() bool {
	session, _ := unix.Getsid(0)             // cannot fail
	parent, _ := unix.Getsid(unix.Getppid()) // −1: it has ended
	f, err := openTerminal()
	if err != nil {
		return false
	}
	f.Close() // nobody has written to it
	return session == parent && session != unix.Getpgrp()
}

// rawMode has every key of the host's terminal come as it is pressed; processed has its output begin a line at each
// line feed. restore undoes it (twice is fine) while the terminal is ours; type-ahead stays, both ways.
func rawMode(f *os.File, processed bool) (restore func() error, err error) {
	return changeModes(f, func(raw *unix.Termios) { // as cfmakeraw of termios(3) has it
		raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
		raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
		raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
		raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
		if !processed {
			raw.Oflag &^= unix.OPOST
		}
	})
}

// changeModes changes the modes of a terminal in one step, for others write there meanwhile. undo does nothing while
// the terminal is not ours to set.
func changeModes(f *os.File, change func(*unix.Termios)) (undo func() error, err error) {
	before, err := getModes(f)
	if err != nil {
		return nil, err
	}
	modes := before
	change(&modes)
	if err := setModes(f, modes); err != nil {
		return nil, err
	}
	return func() error {
		if !inForeground(f) {
			return nil
		}
		return setModes(f, before)
	}, nil
}

// muteEcho has a terminal not show what is typed, until undo. ^C is a signal all the same; ^Z is none: after that and
// fg a shell has the terminal show it.
func muteEcho(f *os.File) (undo func() error, err error) {
	return changeModes(f, func(mute *unix.Termios) {
		mute.Lflag = mute.Lflag&^unix.ECHO | unix.ICANON | unix.ISIG
		mute.Iflag |= unix.ICRNL
		mute.Cc[unix.VSUSP] = 0xff // _POSIX_VDISABLE of macOS; on Linux no key of a UTF-8 terminal gives it
	})
}

// dropTyped drops what was typed and not read yet: neither a question of ours nor a shell is to get it.
func dropTyped(f *os.File) error {
	if linux {
		return ioctl[int32](f, linuxTCFLSH, nil)
	}
	typed := int32(darwinFREAD)
	return ioctl(f, darwinTIOCFLUSH, &typed)
}

// processOutput has the host's terminal, which is raw, begin a line at each line feed, or not. Where it does already
// nothing is written: the modes may be on their way back.
func processOutput(f *os.File, on bool) error {
	modes, err := getModes(f)
	if err != nil || on == (modes.Oflag&unix.OPOST != 0) {
		return err
	}
	modes.Oflag ^= unix.OPOST
	return setModes(f, modes)
}

// waitReady waits until a standard stream of ours, which does not block, can be read or written.
func waitReady(f *os.File, write bool) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var waited error
	err = raw.Control(func(fd uintptr) { waited = waitFor(fd, write, 0) })
	return errors.Join(err, waited)
}

// waitFor waits until a descriptor can be read or written, where a limit is given no longer than that. It uses select:
// poll of macOS knows no terminals (poll(2), BUGS).
func waitFor(fd uintptr, write bool, limit time.Duration) error {
	var wait *unix.Timeval
	if limit > 0 {
		until := unix.NsecToTimeval(int64(limit))
		wait = &until
	}
	err := error(unix.EINTR)
	for err == unix.EINTR {
		var reads, writes unix.FdSet
		set := &reads
		if write {
			set = &writes
		}
		if fd < unix.FD_SETSIZE { // of others select does not know: then it waits as long as it may
			set.Set(int(fd))
		}
		_, err = unix.Select(unix.FD_SETSIZE, &reads, &writes, nil, wait)
	}
	return err
}

// resizeSignals gives a value for each change of the host terminal's size, as long as we live.
func resizeSignals(*os.File) <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	return c
}

// endSignals are those that end us, without those we were started to ignore (nohup): the child ignores them too.
// Signals of faults are among them for when somebody sends them; a fault of our own is a panic all the same.
func endSignals() []os.Signal {
	all := []os.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGILL,
		syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGSYS}
	other := syscall.Signal(7) // SIGEMT, of macOS
	if linux {
		other = 16 // SIGSTKFLT, linux/arch/x86/include/uapi/asm/signal.h
	}
	all = append(all, other)
	return slices.DeleteFunc(all, signal.Ignored)
}

// stopSelf stops this process, and whoever else is in its job, until a shell lets it go on: see resumes. The caller
// must ignore SIGTSTP meanwhile; what that does by itself Go never gives back: Linux is asked for it, elsewhere SIGSTOP
// does.
func stopSelf() {
	const (
		sigactionAMD64 = 13  // linux/arch/x86/entry/syscalls/syscall_64.tbl
		sigactionARM64 = 134 // linux/include/uapi/asm-generic/unistd.h
		maskBytes      = 8
	)
	resumed := make(chan os.Signal, 1)
	signal.Notify(resumed, resumeSignal)
	defer signal.Stop(resumed)
	_ = unix.Kill(0, suspendSignal) // cannot fail: we are in that group
	sig := syscall.SIGSTOP
	call := uintptr(sigactionARM64)
	if amd64 {
		call = sigactionAMD64
	}
	if linux {
		byItself := [4]uintptr{} // SIG_DFL, no flags, no mask
		_, _, errno := unix.RawSyscall6(call, uintptr(suspendSignal), uintptr(unsafe.Pointer(&byItself)), 0,
			maskBytes, 0, 0)
		if errno == 0 {
			sig = suspendSignal
		}
	}
	_ = unix.Kill(unix.Getpid(), sig) // cannot fail: it is us
	<-resumed
}

// ---- processes ----
// What the system tells of others.

// parentOf is the pid of the process's parent; 0: it has none, there is no such process, or the system does not tell
// (Linux without /proc). A process whose parent has ended gets another, on Linux process 1 or a subreaper. macOS has
// its own ps tell it, which no program can replace.
func parentOf(pid int) int {
	text := statFields(procDir(pid))[statParent]
	if !linux {
		line, _ := exec.Command("/bin/ps", "-o", "ppid=", "-p", strconv.Itoa(pid)).Output() // "" is gone
		text = strings.TrimSpace(string(line))
	}
	parent, _ := strconv.Atoi(text) // "" is 0
	return parent
}

// ---- files ----
// What is kept is for the user alone, may be used by several processes, and is on the disk when that is said.

// mkdirPrivate makes a folder for the user alone; fs.ErrExist if it is there.
func mkdirPrivate(path string) error {
	return os.Mkdir(path, 0o700)
}

// openPrivate opens or creates a file 0600, whatever the umask, or opens a folder. It must be the user's own, and no
// other can reach it. No symbolic link is followed (ELOOP), nothing refused is truncated, and O_NONBLOCK keeps a
// planted FIFO from hanging the open.
func openPrivate(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag&^os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	err = checkPrivate(f)
	if err == nil && flag&(os.O_CREATE|os.O_TRUNC) != 0 {
		err = f.Chmod(0o600)
	}
	if err == nil && flag&os.O_TRUNC != 0 {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close() // nothing was written
		return nil, err
	}
	return f, nil
}

// checkPrivate gives an error when an open file or folder is not the user's own, or others can reach it.
func checkPrivate(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	path := f.Name()
	switch {
	case kind != unix.S_IFREG && kind != unix.S_IFDIR:
		return hintedf("move it away", "%s is no file and no folder: %w", path, os.ErrPermission)
	case int(st.Uid) != os.Geteuid():
		err := fmt.Errorf("%s is not a file or folder of your own, but user %d's: %w", path, st.Uid, os.ErrPermission)
		return hinted(err, fmt.Sprintf("make it yours: sudo chown -R %d %s", os.Geteuid(), path))
	case st.Mode&0o077 != 0:
		return hintedf(closeRemedy(path), "%s %w (mode %04o)", path, errShared, st.Mode&0o777)
	}
	return nil
}

// closeRemedy is how to close a file, or a folder with all that is in it, to others.
func closeRemedy(path string) string { return othersUse + "chmod -R go= " + path }

// fileRemedy is what to do about a file or folder that cannot be made, opened or written; "" where that is not known.
func fileRemedy(err error) string {
	at, ok := errors.AsType[*os.PathError](err)
	switch {
	case ok && errors.Is(err, unix.EACCES) && at.Op != "fork/exec":
		both := filepath.Dir(at.Path) + " " + at.Path
		return "see whose they are: ls -ld " + both + "; what is yours opens with chmod u+rwX " + both
	case errors.Is(err, unix.ELOOP):
		return "a symbolic link is not followed: put what it leads to in its place, or name that with ATLASBRIDGE_HOME"
	case errors.Is(err, unix.EROFS):
		return "that disk is read-only: set ATLASBRIDGE_HOME to a folder on another"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "make room on that disk, or set ATLASBRIDGE_HOME to a folder on another"
	case errors.Is(err, unix.EMFILE):
		return "ulimit -n allows too few open files here: ulimit -n 256"
	case errors.Is(err, unix.ENOTDIR):
		return "a file stands where a folder is to be: move it away, or set ATLASBRIDGE_HOME to another folder"
	}
	return ""
}

// lockFile takes the lock of a file for as long as f lives: keep it reachable. errLocked: another has it.
func lockFile(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		return errLocked
	}
	return err
}

// unlockFile gives the lock back before f is closed.
func unlockFile(f *os.File) error {
	return unix.Flock(int(f.Fd()), unix.LOCK_UN)
}

// cutFile makes a file shorter.
func cutFile(f *os.File, size int64) error {
	return f.Truncate(size)
}

// replaceFile gives a file the name of another one in its folder, which may be open.
func replaceFile(from, to string) error {
	return os.Rename(from, to)
}

// syncDir makes what was created or renamed in a folder durable, where the file system can. Those that cannot say so in
// many ways: EINVAL (Linux, webdav and macFUSE), ENOTSUP (SMB, NTFS), ENOTTY (ZFS).
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOTTY) {
		return nil
	}
	return err
}
