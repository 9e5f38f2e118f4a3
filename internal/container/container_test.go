package container_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/container"
)

// envRole chooses what this test binary does as the program of a container.
const envRole = "CKPTSTORE_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(envRole) == "" {
		os.Exit(m.Run())
	}
	if code, first := container.First(os.Stderr); first {
		os.Exit(code)
	}
	os.Exit(role(os.Getenv(envRole)))
}

// role is a program that runs as the child of the first process.
func role(name string) int {
	switch name {
	case "code":
		return 42
	case "orphan":
		return orphan()
	case "killed":
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
	// Print the first signal.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR2)
	fmt.Println("ready")
	fmt.Println(<-caught)
	return 7
}

// orphan leaves a process without its parent, and reports whether it is reaped.
func orphan() int {
	out, err := exec.Command("sh", "-c", "sleep 0.1 >/dev/null & echo $!").Output()
	pid, perr := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || perr != nil {
		fmt.Println(err, perr)
		return 1
	}
	for range time.Tick(10 * time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0 // reaped
		}
		fmt.Println(string(stat)) // the test ends a program whose orphan stays
	}
	return 1
}

// contained starts this test binary with a role, as the first process of a PID namespace.
func contained(t *testing.T, role string, env ...string) (cmd *exec.Cmd, out io.Reader, stderr *bytes.Buffer) {
	t.Helper()
	// The shell mounts the namespace's own /proc and becomes the program.
	cmd = exec.CommandContext(t.Context(), "sh", "-c", `mount -t proc proc /proc && exec "$0"`, os.Args[0])
	cmd.Env = append(append(os.Environ(), envRole+"="+role), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{Size: 1, HostID: os.Getuid()}}, GidMappings: []syscall.SysProcIDMap{{Size: 1, HostID: os.Getgid()}},
	}
	stderr = &bytes.Buffer{}
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	limit := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { limit.Stop() })
	return cmd, out, stderr
}

// The first process has the exit code of the program, also if a signal has killed it. Then
// it leaves the cause, which the program could not.
func TestFirstExits(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]struct {
		code  int
		cause string
	}{"code": {42, ""}, "killed": {137, "was killed by SIGKILL: the container may have reached its memory limit"}} {
		log := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(log, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd, out, stderr := contained(t, role, container.EnvCause+"="+log)
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != want.code {
			t.Errorf("%s: exit code %d, want %d\n%s", role, code, want.code, stderr)
		}
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		if (len(text) > 0) != (want.cause != "") || !strings.Contains(string(text), want.cause) || !strings.Contains(stderr.String(), want.cause) {
			t.Errorf("%s: cause %q, stderr %q; want %q", role, text, stderr, want.cause)
		}
	}
}

// The first process reaps orphans, and the program runs as another process.
func TestFirstReaps(t *testing.T) {
	t.Parallel()
	cmd, out, stderr := contained(t, "orphan")
	seen, _ := io.ReadAll(out)
	if err := cmd.Wait(); err != nil {
		t.Errorf("the orphan is not reaped: %v\n%s%s", err, seen[max(0, len(seen)-300):], stderr)
	}
}

// The program receives each signal that is sent to the first process.
func TestFirstForwards(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR2} {
		cmd, out, stderr := contained(t, "wait")
		ready := make([]byte, len("ready\n"))
		if _, err := io.ReadFull(out, ready); err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(out)
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 7 || strings.TrimSpace(string(got)) != sig.String() {
			t.Errorf("%v: the program received %q, exit code %d, want 7\n%s", sig, got, code, stderr)
		}
	}
}

// A process that is not the first does nothing.
func TestNotFirst(t *testing.T) {
	t.Parallel()
	if code, first := container.First(t.Output()); first || code != 0 {
		t.Errorf("First() = %d, %v in process %d", code, first, os.Getpid())
	}
}

// The cause is written in Kubernetes or where the variable names a file, into a file that
// exists, in place of what the file has.
func TestLeaveCause(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	there, missing, pipe := filepath.Join(dir, "there"), filepath.Join(dir, "missing"), filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		file, service string
		want, fails   string
	}{
		"named":                        {there, "", "why\nlast", ""},
		"named, in Kubernetes":         {there, "10.96.0.1", "why\nlast", ""},
		"switched off":                 {container.None, "10.96.0.1", "before, which is longer", ""},
		"neither":                      {"", "", "before, which is longer", ""},
		"in Kubernetes without a file": {"", "10.96.0.1", "before, which is longer", ""},
		"missing":                      {missing, "", "before, which is longer", "no such file"},
		"a pipe":                       {pipe, "", "before, which is longer", "leave the cause of the end for Kubernetes: "},
		"a directory":                  {dir, "", "before, which is longer", "is a directory"},
	} {
		if err := os.WriteFile(there, []byte("before, which is longer"), 0o600); err != nil {
			t.Fatal(err)
		}
		getenv := func(name string) string {
			return map[string]string{container.EnvCause: c.file, container.EnvService: c.service}[name]
		}
		err := container.LeaveCause(getenv, "why\n", "last\n")
		if got := fmt.Sprint(err); (err != nil) != (c.fails != "") || !strings.Contains(got, c.fails) {
			t.Errorf("%s: error %v, want %q", name, err, c.fails)
		}
		if got, err := os.ReadFile(there); err != nil || string(got) != c.want {
			t.Errorf("%s: the file has %q (%v), want %q", name, got, err, c.want)
		}
	}
	if _, err := os.Stat(missing); err == nil {
		t.Error("a file was made")
	}
}

// Kubernetes shows 4096 bytes. The file has not more, and is text: the beginning of the
// cause, and the end of the output.
func TestCauseBounded(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.SampledFrom([]string{"a", "ü", "猫", "\n", "\xff"})
		text := "begins" + strings.Repeat(part.Draw(t, "text"), rapid.IntRange(0, 6000).Draw(t, "length"))
		output := strings.Repeat(part.Draw(t, "output"), rapid.IntRange(0, 6000).Draw(t, "output length")) + "ends"
		if rapid.Bool().Draw(t, "no output") {
			output = ""
		}
		getenv := func(name string) string { return map[string]string{container.EnvCause: log}[name] }
		if err := container.LeaveCause(getenv, text, output); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) > 4096 || !utf8.Valid(got) || !strings.HasPrefix(string(got), "begins") || output != "" && !strings.HasSuffix(string(got), "ends") {
			t.Fatalf("the file has %d bytes: %.20q … %.20q", len(got), got, got[max(0, len(got)-20):])
		}
		if want := strings.ToValidUTF8(strings.TrimSpace(text), "�"); output == "" && len(want) <= 4096 && string(got) != strings.TrimSpace(want) {
			t.Fatalf("a short cause is changed: %q", got)
		}
	})
}
