package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

/* ===== PTY: the child's terminal ===== */

// childPTY is the test binary started again as a child.
func childPTY(mode string) bool {
	fd := func(err error) {
		if err != nil {
			fmt.Println("child:", err)
			os.Exit(9)
		}
	}
	name, arg, _ := strings.Cut(mode, " ")
	switch name {
	case "pty-raw-echo": // everything back, raw, until the count is reached
		_, err := rawMode(os.Stdin)
		fd(err)
		fmt.Print("ready\n")
		n, _ := strconv.ParseInt(arg, 10, 64)
		_, err = io.CopyN(os.Stdout, os.Stdin, n)
		fd(err)
	case "pty-flood": // n bytes, then gone at once
		n, _ := strconv.Atoi(arg)
		os.Stdout.Write(bytes.Repeat([]byte("0123456789abcde\n"), n/16))
	case "pty-zeros": // bytes until there are no more: the reference for throughput
		b := bytes.Repeat([]byte("0123456789abcde\n"), 4096)
		for n, _ := strconv.Atoi(arg); n > 0; n -= len(b) {
			os.Stdout.Write(b)
		}
	case "pty-epoll": // Go's poller waits for a terminal that was opened, and reads one that was inherited
		f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
		fd(err)
		fmt.Print("up\n")
		io.ReadFull(f, make([]byte, 1))
	case "pty-thread": // a thread that is not the first reads
		fmt.Print("up\n")
		go func() {
			runtime.LockOSThread()
			io.ReadFull(os.Stdin, make([]byte, 1))
			os.Exit(0)
		}()
		select {}
	case "pty-size": // says its size, pixels too, at every change
		ch, stop := resizeSignals(os.Stdin)
		defer stop()
		for range 2 {
			s, err := terminalSize(os.Stdin)
			fd(err)
			fmt.Printf("%v\n", s)
			<-ch
		}
	case "pty-host": // its terminal is another one's host
		exec.Command("stty").Run()
		stty := exec.Command("stty", strings.Fields(arg)...)
		stty.Stdin = os.Stdin
		fd(stty.Run())
		p, err := startPTY([]string{"stty", "-a"}, os.Environ(), "", Size{Rows: 9, Cols: 99}, os.Stdin)
		fd(err)
		io.Copy(os.Stdout, p)
	case "pty-lock": // takes the lock, says so, and forgets everything but the lock's file
		f, err := openPrivate(arg, os.O_RDWR|os.O_CREATE)
		fd(err)
		fd(lockFile(f, false))
		fmt.Println("locked")
		io.Copy(io.Discard, os.Stdin)
		runtime.KeepAlive(f)
	case "pty-stop": // a wrapper's life around a suspend signal, on its own terminal
		restore, err := rawMode(os.Stdin)
		fd(err)
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, suspendSignal)
		fmt.Print("raw\r\n")
		<-ch
		fd(restore())
		fmt.Print("suspended\n")
		stopSelf()
		_, err = rawMode(os.Stdin)
		fd(err)
		fmt.Print("raw again\r\n")
		io.ReadFull(os.Stdin, make([]byte, 1))
		fd(restore())
		fd(restore())
	case "pty-state": // what it can see of its own child, and of one that became another user's
		p, err := startPTY([]string{"sh", "-c", "echo up; exec cat"}, os.Environ(), "/", Size{}, nil)
		fd(err)
		io.ReadFull(p, make([]byte, 4))
		for range 1000 {
			if p.State().Reading == ReadingYes {
				break
			}
		}
		fmt.Printf("own %v\n", p.State().Reading)
		p.Terminate(nil)
		p, err = startPTY([]string{"su"}, os.Environ(), "/", Size{}, nil)
		fd(err)
		for b := make([]byte, 1); b[0] != ':'; { // Password:
			_, err := p.Read(b)
			fd(err)
		}
		fmt.Printf("root's %v %v\n", p.State().Reading, p.State().Echo)
	case "pty-wrap": // starts a child as the session does and prints what it says
		p, err := startPTY([]string{"sh", "-c", arg}, os.Environ(), "", Size{Rows: 24, Cols: 80}, nil)
		fd(err)
		signal.Notify(make(chan os.Signal, 1), endSignals()...)
		io.Copy(os.Stdout, p)
		os.Exit(p.Wait())
	default:
		return false
	}
	return true
}

// watchdog turns a hang into a failure: first the terminal is closed, then everything panics with its stacks.
func watchdog(t testing.TB, p PTY) {
	if _, ok := t.(*testing.B); ok {
		return
	}
	first := time.AfterFunc(15*time.Second, func() { t.Error("hangs: closing the terminal"); p.Close() })
	second := time.AfterFunc(20*time.Second, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { first.Stop(); second.Stop() })
}

func mustPTY(t testing.TB, argv ...string) PTY {
	t.Helper()
	needUnix(t)
	p, err := startPTY(argv, ptyEnv(""), t.TempDir(), Size{Rows: 30, Cols: 100, XPixel: 700, YPixel: 480}, nil)
	if err != nil {
		t.Fatal(err)
	}
	watchdog(t, p)
	t.Cleanup(func() {
		p.Close()
		p.Terminate(nil)
	})
	return p
}

func mustPTYChild(t testing.TB, mode string) PTY {
	t.Helper()
	needUnix(t)
	p, err := startPTY([]string{os.Args[0]}, ptyEnv(mode), "", Size{Rows: 24, Cols: 80, XPixel: 800, YPixel: 480}, nil)
	if err != nil {
		t.Fatal(err)
	}
	watchdog(t, p)
	t.Cleanup(func() { p.Close(); p.Terminate(nil) })
	return p
}

func ptyEnv(mode string) []string {
	if os.Getenv("ATLASBRIDGE_TEST_CHILD") != "" {
		panic("TestMain did not ask childPTY: this would start children for ever")
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "ATLASBRIDGE_") })
	env = append(env, "PS1=$ ", "LC_ALL=C.UTF-8")
	if mode != "" {
		env = append(env, "ATLASBRIDGE_TEST_CHILD="+mode)
	}
	return env
}

func needUnix(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("needs Linux or macOS")
	}
}

func needTool(t testing.TB, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("needs %s: %v", name, err)
	}
}

// readUntil reads until want has come and returns all of it.
func readUntil(t testing.TB, p PTY, want string) string {
	t.Helper()
	var got []byte
	for b := make([]byte, 4096); !bytes.Contains(got, []byte(want)); {
		n, err := p.Read(b)
		got = append(got, b[:n]...)
		if err != nil {
			t.Fatalf("waiting for %q: %v after %q", want, err, got)
		}
	}
	return string(got)
}

// readAll is everything up to the end, and the exit code.
func readAll(t testing.TB, p PTY) (string, int) {
	t.Helper()
	b, err := io.ReadAll(p)
	if err != nil {
		t.Fatalf("Read = %v, want io.EOF", err)
	}
	return string(b), p.Wait()
}

func typeIn(t testing.TB, p PTY, s string) {
	t.Helper()
	if _, err := io.WriteString(p, s); err != nil {
		t.Fatal(err)
	}
}

func TestPTYExit(t *testing.T) {
	needUnix(t)
	for _, test := range []struct {
		script, out string
		code        int
	}{
		{"stty size", "30 100\r\n", 0},
		{"exit 3", "", 3},
		{"exit 255", "", 255},
		{"kill -9 $$", "", 137},
		{"kill -TERM $$", "", 143},
		{"kill -INT $$", "", 130},
		{"test -t 0 && test -t 1 && test -t 2 && echo yes", "yes\r\n", 0},
		{"echo $FOO", "bar baz\r\n", 0},
		{"pwd", "/\r\n", 0},
		{"ps -o pid=,sid=,pgid=,tpgid= -p $$ | awk '{print $1==$2, $2==$3}'; echo x >/dev/tty", "1 1\r\nx\r\n", 0},
		{"read a; echo got:$?", "got:1\r\n", 0}, // see the Write below
	} {
		p, err := startPTY([]string{"sh", "-c", test.script}, append(ptyEnv(""), "FOO=bar baz"), "/",
			Size{Rows: 30, Cols: 100}, nil)
		if err != nil {
			t.Fatal(err)
		}
		watchdog(t, p)
		if strings.HasPrefix(test.script, "read") {
			typeIn(t, p, "\x04") // end of file
		}
		out, code := readAll(t, p)
		if out = strings.ReplaceAll(out, "^D\b\b", ""); out != test.out || code != test.code {
			t.Errorf("%s: %q, %d, want %q, %d", test.script, out, code, test.out, test.code)
		}
		if again := p.Wait(); again != code {
			t.Errorf("%s: second Wait = %d", test.script, again)
		}
		if err := p.Signal(syscall.SIGINT); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("%s: Signal after the end = %v", test.script, err)
		}
		if err := errors.Join(p.Close(), p.Close()); err != nil {
			t.Errorf("closing twice: %v", err)
		}
	}
}

func TestPTYCannotStart(t *testing.T) {
	needUnix(t)
	dir := t.TempDir()
	plain, script := filepath.Join(dir, "plain"), filepath.Join(dir, "script")
	os.WriteFile(plain, []byte("x"), 0o600)
	os.WriteFile(script, []byte("echo ran $1\n"), 0o700) // no #!
	for name, want := range map[string]error{
		"no-such-tool-at-all": errNoTool, dir + "/missing": errNoTool, "./missing": errNoTool,
		plain: fs.ErrPermission, dir: fs.ErrPermission,
	} {
		p, err := startPTY([]string{name}, nil, "", Size{}, nil)
		if !errors.Is(err, want) || p != nil {
			t.Errorf("startPTY(%s) = %v, %v, want %v", name, p, err, want)
		}
		if err != nil && strings.Count(err.Error(), name) != 1 {
			t.Errorf("error names the tool not once: %v", err)
		}
	}
	if out, code := readAll(t, mustPTY(t, script, "it")); out != "ran it\r\n" || code != 0 {
		t.Errorf("script without #!: %q, %d", out, code)
	}
}

func TestPTYSizeWithPixels(t *testing.T) {
	p := mustPTYChild(t, "pty-size")
	readUntil(t, p, "{24 80 800 480}\r\n") // in the first byte's time
	if err := p.Resize(Size{Rows: 51, Cols: 133, XPixel: 1330, YPixel: 1020}); err != nil {
		t.Fatal(err)
	}
	readUntil(t, p, "{51 133 1330 1020}\r\n")
}

// The host's VERASE, IUTF8 and IXON are what line editing in the child depends on.
func TestPTYModes(t *testing.T) {
	needTool(t, "stty")
	out, _ := readAll(t, mustPTYChild(t, "pty-host erase ^H -ixon -iutf8 intr ^G"))
	for _, want := range []string{"erase = ^H", " -ixon", "-iutf8", "intr = ^G", " icanon", " echo "} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in %s", want, out)
		}
	}
	out, _ = readAll(t, mustPTY(t, "stty", "-a"))
	for _, want := range []string{"erase = ^?", " ixon", "\niutf8", "intr = ^C", "\nisig icanon", " echo ", "\nopost"} {
		if !strings.Contains(out, want) {
			t.Errorf("without host: %q is missing in %s", want, out)
		}
	}
}

func TestPTYEveryByteBothWays(t *testing.T) {
	var all []byte
	for i := range 256 * 256 {
		all = append(all, byte(i>>8), byte(i))
	}
	p := mustPTYChild(t, "pty-raw-echo "+strconv.Itoa(len(all)))
	readUntil(t, p, "ready\n")
	go p.Write(all)
	if out, _ := readAll(t, p); out != string(all) {
		t.Errorf("%d bytes came back, want the %d sent", len(out), len(all))
	}
}

// 1 MiB is pasted while as much comes back: whoever waits for one before the other is stuck.
func TestPTYNoDeadlock(t *testing.T) {
	const n = 1 << 20
	p := mustPTYChild(t, "pty-raw-echo "+strconv.Itoa(n))
	readUntil(t, p, "ready\n")
	wrote := make(chan error, 1)
	go func() { _, err := p.Write(make([]byte, n)); wrote <- err }()
	out, code := readAll(t, p)
	if err := <-wrote; err != nil || len(out) != n || code != 0 {
		t.Errorf("%d bytes, exit %d, Write %v", len(out), code, err)
	}
}

// What is written just before the end is the answer people wait for.
func TestPTYNothingLostAtExit(t *testing.T) {
	const size = 256 << 10
	want := strings.Repeat("0123456789abcde\r\n", size/16)
	runs, _ := strconv.Atoi(cmp.Or(os.Getenv("ATLASBRIDGE_TEST_RUNS"), "40"))
	for range runs {
		t.Run("", func(t *testing.T) {
			out, code := readAll(t, mustPTYChild(t, "pty-flood "+strconv.Itoa(size)))
			if out != want || code != 0 {
				t.Fatalf("%d bytes, want %d; exit %d", len(out), len(want), code)
			}
		})
	}
}

// A slow reader must not lose what still lies in the kernel when the child is gone.
func TestPTYSlowReaderAfterExit(t *testing.T) {
	p := mustPTY(t, "sh", "-c", "sleep 3 & i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done")
	p.Wait()
	var out []byte
	for b := make([]byte, 7); ; {
		n, err := p.Read(b)
		if out = append(out, b[:n]...); err != nil {
			break
		}
	}
	if !strings.HasSuffix(string(out), "line 98\r\nline 99\r\n") {
		t.Errorf("lost the end: %q", out[max(0, len(out)-40):])
	}
}

func TestPTYGrandchildHoldsTerminal(t *testing.T) {
	for _, script := range []string{
		"sleep 20",                         // silent
		"while echo y; do :; done",         // floods
		"while echo y; do sleep .01; done", // trickles
	} {
		script := "trap '' HUP; (" + script + ") & echo out" // the leader's end sends SIGHUP
		p := mustPTY(t, "sh", "-c", script)
		p.Wait()
		begun := time.Now()
		out, code := readAll(t, p)
		if took := time.Since(begun); !strings.Contains(out, "out") || code != 0 || took > 2*time.Second {
			t.Errorf("%s: exit %d after %v", script, code, took)
		}
		p.Close()
	}
}

func TestPTYCloseEndsRead(t *testing.T) {
	p := mustPTY(t, "sh", "-c", "echo up; exec sleep 30")
	readUntil(t, p, "up\r\n")
	ended := make(chan error)
	go func() { _, err := p.Read(make([]byte, 1)); ended <- err }()
	p.State() // ioctls must not have made the master blocking
	p.Resize(Size{Rows: 1, Cols: 1})
	p.Close()
	if err := <-ended; err == nil {
		t.Error("Read of a closed terminal gave no error")
	}
	if code := p.Wait(); code != 129 {
		t.Errorf("child of a closed terminal: exit %d, want 129 (SIGHUP)", code)
	}
}

func TestPTYTerminate(t *testing.T) {
	for script, want := range map[string]int{
		"echo up; exec sleep 30":                               143,
		"echo up; kill -STOP $$; exec sleep 30":                143, // stopped
		"trap 'exit 7' TERM; echo up; while :; do :; done":     7,
		"trap '' TERM HUP; echo up; while :; do sleep 1; done": 137,
	} {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			p := mustPTY(t, "sh", "-c", script)
			readUntil(t, p, "up\r\n")
			if strings.Contains(script, "STOP") {
				awaitStopped(t, p.PID())
			}
			begun := time.Now()
			p.Terminate(nil)
			code, took := p.Wait(), time.Since(begun)
			if code != want || (want == 137) != (took > 2900*time.Millisecond) {
				t.Errorf("%s: exit %d after %v, want %d", script, code, took, want)
			}
		})
	}
}

func awaitStopped(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		out, _ := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
		if bytes.HasPrefix(out, []byte("T")) {
			return
		}
	}
	t.Fatal("did not stop")
}

func TestPTYJobControl(t *testing.T) {
	needTool(t, "bash")
	p := mustPTY(t, "bash", "--norc", "--noprofile", "-i")
	readUntil(t, p, "$ ")
	const job = "sh -c 'echo u''p; exec sleep 40'"
	typeIn(t, p, job+"\r")
	readUntil(t, p, "up\r\n")
	typeIn(t, p, "\x1a") // Ctrl-Z
	readUntil(t, p, "Stopped")
	typeIn(t, p, "fg\r")
	readUntil(t, p, job+"\r\n")
	awaitForeground(t, p)
	typeIn(t, p, "\x03") // Ctrl-C
	readUntil(t, p, "^C")
	typeIn(t, p, job+"\r")
	readUntil(t, p, "up\r\n")
	if err := p.Signal(syscall.SIGQUIT); err != nil { // to the job, not to bash
		t.Error(err)
	}
	readUntil(t, p, "Quit")
	typeIn(t, p, "echo $((40+2)); exit 5\r")
	if out, code := readAll(t, p); !strings.Contains(out, "42") || code != 5 {
		t.Errorf("%q, exit %d", out, code)
	}
}

// awaitForeground waits until the shell's job has the terminal.
func awaitForeground(t *testing.T, p PTY) {
	t.Helper()
	for p.(interface{ foreground() int }).foreground() == p.PID() {
		runtime.Gosched()
	}
}

func TestPTYNoDescriptorLeaks(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	dir := t.TempDir()
	f, err := openPrivate(filepath.Join(dir, "secret"), os.O_RDWR|os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, stop := watchFolder(dir)
	defer stop()
	mustPTY(t, "sleep", "10") // another session in the same process
	out, _ := readAll(t, mustPTY(t, "ls", "-l", "/proc/self/fd"))
	for line := range strings.Lines(out) {
		if name, target, ok := strings.Cut(line, " -> "); ok && !strings.Contains(target, "/proc/") {
			if !inheritedDescriptor(name) && !strings.HasPrefix(target, "/dev/pts/") {
				t.Errorf("leaked: %s", line)
			}
		}
	}
	if strings.Contains(out, "ptmx") || strings.Contains(out, "secret") || strings.Contains(out, "inotify") {
		t.Errorf("leaked: %s", out)
	}
	want, _ := exec.Command("sh", "-c", "ulimit -n").Output()
	out, _ = readAll(t, mustPTY(t, "sh", "-c", "ulimit -n"))
	if strings.TrimSpace(out) != strings.TrimSpace(string(want)) {
		t.Errorf("limit of open files %q, want %q", out, want)
	}
}

// inheritedDescriptor tells whether this process itself has the descriptor without close-on-exec.
func inheritedDescriptor(ls string) bool {
	b, _ := os.ReadFile("/proc/self/fdinfo/" + ls[strings.LastIndexByte(ls, ' ')+1:])
	_, flags, ok := strings.Cut(string(b), "flags:")
	n, err := strconv.ParseInt(strings.TrimSpace(strings.SplitN(flags, "\n", 2)[0]), 8, 64)
	return ok && err == nil && n&0o2000000 == 0 // O_CLOEXEC
}

// nohup's choice holds for what runs inside; nothing else of ours does.
func TestPTYSignalDispositions(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	for trap, want := range map[string]string{
		"":                 "0000000000000000 0000000000000000",
		"trap '' HUP":      "0000000000000000 0000000000000001",
		"trap '' INT PIPE": "0000000000000000 0000000000000002",
	} {
		cmd := exec.Command("sh", "-c", trap+"\nexec "+os.Args[0])
		cmd.Env = ptyEnv(`pty-wrap awk '/SigBlk|SigIgn/ { print $2 }' /proc/self/status`)
		out, err := cmd.CombinedOutput()
		if got := strings.Join(strings.Fields(string(out)), " "); got != want || err != nil {
			t.Errorf("%q: %q, %v, want %q", trap, got, err, want)
		}
	}
}

// After kill -9 of the wrapper even a child that ignores the hang-up goes.
func TestPTYWrapperKilled(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs prctl(PR_SET_PDEATHSIG)")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = ptyEnv(`pty-wrap trap '' HUP; echo $$; while :; do sleep .1; done`)
	out, err := cmd.StdoutPipe()
	if err = errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	start := processStart(pid)
	if start == 0 || start != processStart(pid) {
		t.Errorf("processStart(%d) = %d", pid, start)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for deadline := time.Now().Add(5 * time.Second); processStart(pid) == start; runtime.Gosched() {
		if time.Now().After(deadline) {
			if proc, err := os.FindProcess(pid); err == nil {
				proc.Kill()
			}
			t.Fatal("the child lives on")
		}
	}
}

/* ===== PTY: does it read? ===== */

// awaitReading polls as the session does, until the answer is want; it must then stay so.
func awaitReading(t *testing.T, p PTY, want Reading) {
	t.Helper()
	last := TTYState{}
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); runtime.Gosched() {
		if last = p.State(); last.Reading == want {
			return
		}
	}
	t.Errorf("State() = %+v, want Reading %v", last, want)
}

func TestPTYStateReading(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells")
	}
	const yes, busy = ReadingYes, ReadingBusy
	for _, test := range []struct {
		tool, script string
		want         Reading
	}{
		{"cat", "echo up; exec cat", yes},
		{"sleep", "echo up; exec sleep 30", busy},
		{"sh", "echo up; read x", yes},
		{"sh", "echo up; sleep 30 | cat", busy}, // the reader reads a pipe
		{"bash", "echo up; bash -c 'read -p \"Name? \" x'; true", yes},
		{"bash", "echo up; bash -c 'read -t 30 x'; true", yes},
		{"bash", "echo up; bash -c 'read -e x'; true", yes},
		{"python3", "python3 -c 'print(\"up\"); input()'", yes},
		{"python3", "python3 -c 'print(\"up\"); import select; select.select([0],[],[],30)'", yes},
		{"python3", "python3 -c 'print(\"up\"); import select; select.select([],[0],[],30); input()'", yes},
		{"python3", "python3 -c 'print(\"up\"); import select as s; p = s.poll(); p.register(0, s.POLLIN); p.poll()'", yes},
		{"python3", "python3 -c 'print(\"up\"); import select as s; p = s.poll(); p.register(0, 0); p.poll()'", busy},
		{"python3", "python3 -c 'print(\"up\"); import select as s; p = s.epoll(); p.register(0, 1); p.poll()'", yes},
		{"python3", "python3 -c 'print(\"up\"); import select as s; p = s.epoll(); p.register(0, 0); p.poll()'", busy},
		{"perl", "perl -e '$|=1; print \"up\n\"; vec($r,0,1)=1; select($r,undef,undef,30)'", yes},
		{"script", "echo up; script -qc 'sleep 30' /dev/null", busy}, // a relay, judged by what runs inside
		{"script", "echo up; script -qc 'sh -c \"read x\"' /dev/null", yes},
		{"script", "echo up; script -qc \"script -qc 'sleep 30' /dev/null\" /dev/null", busy},
		{"sh", "echo up; sh -c 'kill -STOP $$; read x'; true", busy},
		{"setsid", "echo up; setsid sh -c 'read x' & sleep 30", busy}, // in another session
	} {
		t.Run(test.tool, func(t *testing.T) {
			needTool(t, test.tool)
			t.Parallel()
			p := mustPTY(t, "sh", "-c", test.script)
			readUntil(t, p, "up\r\n")
			if awaitReading(t, p, test.want); t.Failed() {
				t.Log(test.script)
			}
		})
	}
	for _, mode := range []string{"pty-epoll", "pty-thread"} {
		p := mustPTYChild(t, mode)
		readUntil(t, p, "up\r\n")
		awaitReading(t, p, yes)
	}
}

// A program that was reading when it was stopped still looks so in /proc.
func TestPTYStateStopped(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells")
	}
	p := mustPTY(t, "sh", "-c", "echo up; exec cat")
	readUntil(t, p, "up\r\n")
	awaitReading(t, p, ReadingYes)
	exec.Command("kill", "-STOP", strconv.Itoa(p.PID())).Run()
	awaitStopped(t, p.PID())
	if s := p.State(); s.Reading != ReadingBusy {
		t.Errorf("stopped: %+v", s)
	}
	exec.Command("kill", "-CONT", strconv.Itoa(p.PID())).Run()
	awaitReading(t, p, ReadingYes)
}

func TestPTYStateModes(t *testing.T) {
	for modes, want := range map[string]TTYState{
		"sane":         {Canonical: true, Echo: true},
		"-echo":        {Canonical: true},
		"-icanon":      {Echo: true},
		"raw -echo":    {},
		"-echo icanon": {Canonical: true},
	} {
		p := mustPTY(t, "sh", "-c", "stty "+modes+"; echo up; exec sleep 30")
		readUntil(t, p, "up")
		got := p.State()
		if got.Reading = 0; got != want {
			t.Errorf("stty %s: %+v, want %+v", modes, got, want)
		}
	}
}

// Another user's program (sudo, su) does not tell: that is unknown, never busy.
func TestPTYStateOfAnotherUser(t *testing.T) {
	needTool(t, "setpriv")
	needTool(t, "su")
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		t.Skip("needs root on Linux")
	}
	exe := filepath.Join(t.TempDir(), "test")
	if out, err := exec.Command("sh", "-c", "cp "+os.Args[0]+" "+exe+"; chmod 755 "+exe+" "+filepath.Dir(exe)+
		" "+filepath.Dir(filepath.Dir(exe))).CombinedOutput(); err != nil {
		t.Skipf("%v: %s", err, out)
	}
	cmd := exec.Command("setpriv", "--reuid=65534", "--clear-groups", exe)
	cmd.Env = ptyEnv("pty-state")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "own 1\nroot's 0 false\n") {
		t.Errorf("as nobody: %s%v", out, err)
	}
}

/* ===== PTY: the host's terminal ===== */

func TestRawModeAndSuspend(t *testing.T) {
	needTool(t, "bash")
	// The child is a job of an interactive shell, as the wrapper is.
	p, err := startPTY([]string{"bash", "--norc", "--noprofile", "-i"}, append(ptyEnv(""), "EXE="+os.Args[0]), "",
		Size{Rows: 24, Cols: 80}, nil)
	if err != nil {
		t.Fatal(err)
	}
	watchdog(t, p)
	defer p.Terminate(nil)
	readUntil(t, p, "$ ")
	typeIn(t, p, "stty erase ^H -ixany; ATLASBRIDGE_TEST_CHILD=pty-stop $EXE\r")
	readUntil(t, p, "raw\r\n")
	if s := p.State(); s.Canonical || s.Echo {
		t.Errorf("raw mode: %+v", s)
	}
	typeIn(t, p, "echo type''ahead\r") // for whoever reads next
	if err := p.Signal(suspendSignal); err != nil {
		t.Fatal(err)
	}
	out := readUntil(t, p, "\rtypeahead\r\n")
	if !strings.Contains(out, "suspended\r\n") || !strings.Contains(out, "Stopped") {
		t.Errorf("not cooked and stopped when suspended: %q", out)
	}
	typeIn(t, p, "stty -a; fg\r")
	if out = readUntil(t, p, "raw again\r\n"); !strings.Contains(out, "erase = ^H") {
		t.Errorf("not restored when suspended: %q", out)
	}
	if s := p.State(); s.Canonical || s.Echo {
		t.Errorf("raw mode again: %+v", s)
	}
	typeIn(t, p, "x")
	typeIn(t, p, "stty -a; exit 4\r")
	out, code := readAll(t, p)
	if !strings.Contains(out, "erase = ^H") || !strings.Contains(out, "isig icanon") || code != 4 {
		t.Errorf("not restored at the end: %q, exit %d", out, code)
	}
}

func TestRawModeNeedsATerminal(t *testing.T) {
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := rawMode(f); err == nil {
		t.Error("rawMode of the null device succeeded")
	}
	if _, err := terminalSize(f); err == nil {
		t.Error("terminalSize of the null device succeeded")
	}
}

// The same promises on Windows, where programs are others; runs under wine too, from a terminal.
func TestWindowsPTY(t *testing.T) {
	if runtime.GOOS != "windows" {
		t.Skip("needs Windows")
	}
	start := func(argv ...string) PTY {
		p, err := startPTY(argv, append(os.Environ(), "FOO=bär 😀"), "", Size{Rows: 30, Cols: 100}, nil)
		if err != nil {
			t.Fatal(err)
		}
		watchdog(t, p)
		t.Cleanup(func() { p.Close() })
		return p
	}
	out, code := readAll(t, start("cmd.exe", "/c", "echo hello %FOO%& exit 3"))
	if !strings.Contains(out, "hello bär") || code != 3 {
		t.Errorf("%q, exit %d", out, code)
	}
	p := start("cmd.exe", "/q", "/k", "echo up")
	readUntil(t, p, "up")
	typeIn(t, p, "echo 1%FOO:~0,0%2\r")
	readUntil(t, p, "12")
	if err := p.Resize(Size{Rows: 40, Cols: 120}); err != nil {
		t.Log("resizing (wine cannot):", err)
	}
	if s := p.State(); s.Reading != ReadingUnknown {
		t.Errorf("State() = %+v", s)
	}
	typeIn(t, p, "exit 7\r")
	if _, code := readAll(t, p); code != 7 {
		t.Errorf("exit %d, want 7", code)
	}
	p = start("cmd.exe", "/q", "/k", "echo up")
	readUntil(t, p, "up")
	if id := processStart(p.PID()); id == 0 {
		t.Error("processStart of a live child is 0")
	}
	go io.Copy(io.Discard, p)
	p.Terminate(nil)
	if p.Wait(); processStart(p.PID()) != 0 {
		t.Error("lives after Terminate")
	}
	if _, err := startPTY([]string{"no-such-tool-at-all"}, nil, "", Size{Rows: 1}, nil); !errors.Is(err, errNoTool) {
		t.Errorf("startPTY(missing) = %v", err)
	}
}

func TestWindowsPrivate(t *testing.T) {
	if runtime.GOOS != "windows" {
		t.Skip("needs Windows")
	}
	dir := filepath.Join(t.TempDir(), "state")
	if err := secureDir(dir); err != nil {
		t.Fatal(err)
	}
	if err := ownedPrivate(dir); err != nil {
		t.Error(err)
	}
	if os.Getenv("WINEUSERNAME") != "" {
		t.Skip("wine's files do not take over the folder's access list, and cannot be replaced while open")
	}
	path := filepath.Join(dir, "state.jsonl")
	f, err := openPrivate(path, os.O_RDWR|os.O_CREATE|os.O_APPEND)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	io.WriteString(f, "one\n")
	io.WriteString(f, "two\n")
	if b, err := os.ReadFile(path); string(b) != "one\ntwo\n" {
		t.Errorf("%q, %v", b, err)
	}
	next, err := openPrivate(path+".tmp", os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		t.Fatal(err)
	}
	next.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := root.Rename("state.jsonl.tmp", "state.jsonl"); err != nil {
		t.Errorf("renaming over an open file: %v", err)
	}
}

/* ===== Files and locks ===== */

func TestLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.lock")
	cmd := exec.Command(os.Args[0])
	// Only the *os.File keeps the lock: a collected one is a lost lock, and with two pollers the phone goes mad.
	cmd.Env = append(ptyEnv("pty-lock "+path), "GOGC=1")
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 7)
	if io.ReadFull(out, said); string(said) != "locked\n" {
		t.Fatalf("the other process says %q", said)
	}
	f, err := openPrivate(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := lockFile(f, false); !errors.Is(err, errLocked) {
		t.Errorf("lockFile(held by another) = %v, want errLocked", err)
	}
	got := make(chan error)
	go func() { got <- lockFile(f, true) }()
	select {
	case err := <-got:
		t.Errorf("lockFile did not wait: %v", err)
	case <-time.After(50 * time.Millisecond): // nothing to wait for: it must go on waiting
	}
	in.Close() // the process ends, and the lock with it
	if err := <-got; err != nil {
		t.Error(err)
	}
	cmd.Wait()
	second, err := openPrivate(path, os.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := lockFile(second, false); !errors.Is(err, errLocked) {
		t.Errorf("lockFile(held by ourselves, another open) = %v, want errLocked", err)
	}
	if err := errors.Join(unlockFile(f), lockFile(second, false)); err != nil {
		t.Errorf("after unlockFile: %v", err)
	}
}

func TestOpenPrivate(t *testing.T) {
	needUnix(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, mode fs.FileMode) {
		os.WriteFile(at(name), []byte("keep"), mode)
		os.Chmod(at(name), mode)
	}
	write("mine", 0o600)
	write("wide", 0o644)
	write("two", 0o600)
	os.Link(at("two"), at("names"))
	os.Symlink(at("mine"), at("symlink"))
	os.Symlink(at("nowhere"), at("dangling"))
	os.Mkdir(at("folder"), 0o700)
	exec.Command("mkfifo", "-m", "600", at("fifo")).Run()
	for name, want := range map[string]string{
		"mine": "", "new": "", "wide": "chmod go=", "two": "hard links", "symlink": "symbolic link",
		"dangling": "symbolic link", "folder": "is a", "fifo": "", "no/such": "no such file",
	} {
		f, err := openPrivate(at(name), os.O_RDWR|os.O_CREATE|os.O_TRUNC)
		if name == "fifo" && err == nil || want == "" && name != "fifo" && err != nil {
			t.Errorf("openPrivate(%s) = %v", name, err)
		}
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("openPrivate(%s) = %v, want %q", name, err, want)
		}
		if f != nil {
			info, _ := f.Stat()
			if info.Mode() != 0o600 || info.Size() != 0 {
				t.Errorf("openPrivate(%s): mode %v, size %d", name, info.Mode(), info.Size())
			}
			f.Close()
		}
	}
	for _, name := range []string{"wide", "two"} { // refused is not emptied
		if b, _ := os.ReadFile(at(name)); string(b) != "keep" {
			t.Errorf("%s: %q", name, b)
		}
	}
	if _, err := os.Lstat(at("nowhere")); err == nil {
		t.Error("a dangling symbolic link was followed")
	}
	if _, err := openPrivate(at("missing"), os.O_RDONLY); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("openPrivate(missing) = %v", err)
	}
	for name, ok := range map[string]bool{"mine": true, "wide": false, "folder": true, "symlink": false, "two": false} {
		if err := ownedPrivate(at(name)); (err == nil) != ok {
			t.Errorf("ownedPrivate(%s) = %v", name, err)
		}
	}
	if os.Geteuid() == 0 {
		os.Chown(at("mine"), 65534, 65534)
		if _, err := openPrivate(at("mine"), os.O_RDWR); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("another user's file: %v", err)
		}
	}
	cmd := exec.Command("sh", "-c", "umask 0777; exec "+os.Args[0]+" </dev/null")
	cmd.Env = ptyEnv("pty-lock " + at("umask"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v", out, err)
	}
	if info, err := os.Stat(at("umask")); err != nil || info.Mode() != 0o600 {
		t.Errorf("created under umask 0777: %v, %v", info.Mode(), err)
	}
}

func TestWatchFolder(t *testing.T) {
	dir := t.TempDir()
	ch, stop := watchFolder(dir)
	if ch == nil {
		t.Skip("this system does not tell")
	}
	defer stop()
	path := filepath.Join(dir, "state.jsonl")
	change := func(what string, fn func() error) {
		t.Helper()
		if err := fn(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ch:
		case <-time.After(5 * time.Second):
			t.Fatalf("%s was not noticed", what)
		}
		for more := true; more; { // what is left of this change
			select {
			case <-ch:
			case <-time.After(20 * time.Millisecond):
				more = false
			}
		}
	}
	change("creation", func() error { return os.WriteFile(path, nil, 0o600) })
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	change("append", func() error { _, err := f.WriteString("{}\n"); return err })
	os.WriteFile(path+".tmp", nil, 0o600)
	change("rename", func() error { return os.Rename(path+".tmp", path) })
	stop()
	for range ch { // ends
	}
}

func TestProcessStart(t *testing.T) {
	own := processStart(os.Getpid())
	if own == 0 || own != processStart(os.Getpid()) {
		t.Errorf("processStart(own) = %d", own)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if got := processStart(cmd.Process.Pid); got != 0 {
		t.Errorf("processStart(ended) = %d", got)
	}
	if err := syncDir(t.TempDir()); err != nil {
		t.Error(err)
	}
	if name := networkFS("/proc/self"); name != "" {
		t.Errorf("networkFS(/proc) = %q", name)
	}
}

/* ===== Benchmarks ===== */

func BenchmarkPTYState(b *testing.B) {
	for _, script := range []string{"exec cat", "exec sleep 100", "sh -c 'sh -c \"sleep 100; true\"; true'; true"} {
		b.Run(strings.Fields(script)[0]+strings.Fields(script)[1], func(b *testing.B) {
			p := mustPTY(b, "sh", "-c", "echo up; "+script)
			readUntil(b, p, "up\r\n")
			for b.Loop() {
				p.State()
			}
		})
	}
}

// BenchmarkPTYCopy is the reference for throughput: 64 KiB reads and writes, and nothing looks at the bytes.
func BenchmarkPTYCopy(b *testing.B) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer null.Close()
	const total = 64 << 20
	buf, reads := make([]byte, 64<<10), 0
	for b.Loop() {
		p := mustPTYChild(b, "pty-zeros "+strconv.Itoa(total))
		for {
			n, err := p.Read(buf)
			if err != nil {
				break
			}
			reads++
			null.Write(buf[:n])
		}
		p.Close()
	}
	b.SetBytes(total / 16 * 17) // every newline becomes two bytes
	b.ReportMetric(float64(total/16*17)*float64(b.N)/float64(reads), "B/read")
}
