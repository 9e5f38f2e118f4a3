package cmd_test

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestClosedPipe: a training continues after the reader of its output is gone, and its
// workers have the default disposition of every signal.
func TestClosedPipe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script := `grep SigIgn /proc/self/status; touch first; while [ ! -e closed ]; do sleep 0.01; done; i=0; while [ $i -lt 50 ]; do echo line; i=$((i+1)); done; touch done`
	cmd := exec.CommandContext(t.Context(), "trainer", "run", "-q", "--store", "ckpts", "--name", "a", "--", "sh", "-c", script)
	cmd.Dir = dir
	// A pipe of our own, so that closing the read end leaves no other reader.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = w, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	if fields := strings.Fields(line); len(fields) != 2 || strings.Trim(fields[1], "0") != "" {
		t.Errorf("a worker ignores signals: %q", line)
	}
	_ = r.Close()
	if err := os.WriteFile(filepath.Join(dir, "closed"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
	if _, err := os.Stat(filepath.Join(dir, "done")); err != nil {
		t.Error("the worker did not get to its end")
	}
}

// TestStopSignals: each signal ends the job cleanly, with its own exit code.
func TestStopSignals(t *testing.T) {
	t.Parallel()
	for sig, name := range map[syscall.Signal]string{syscall.SIGHUP: "SIGHUP", syscall.SIGTERM: "SIGTERM", syscall.SIGINT: "SIGINT", syscall.SIGQUIT: "SIGQUIT"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, stderr := started(t, "trainer", "run", "--store", "ckpts", "--name", "a", "--", "sh", "-c",
				`trap 'touch told; exit 0' TERM; echo started; while :; do sleep 0.01; done`)
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if got, want := cmd.ProcessState.ExitCode(), 128+int(sig); got != want || !strings.Contains(stderr.String(), "told to stop by "+name) {
				t.Errorf("exit code %d, want %d\n%s", got, want, stderr.String())
			}
			if _, err := os.Stat(filepath.Join(cmd.Dir, "told")); err != nil {
				t.Error("the worker got no request")
			}
		})
	}
}

// TestNohup: a trainer started with SIGHUP ignored outlives its terminal.
func TestNohup(t *testing.T) {
	t.Parallel()
	cmd, stderr := started(t, "sh", "-c", `trap '' HUP; exec "$@"`, "sh",
		"trainer", "run", "-q", "--store", "ckpts", "--name", "a", "--", "sh", "-c",
		`echo started; while [ ! -e hung-up ]; do sleep 0.01; done; touch done`)
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cmd.Dir, "hung-up"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, stderr.String())
	}
	if _, err := os.Stat(filepath.Join(cmd.Dir, "done")); err != nil {
		t.Error("the worker did not get to its end")
	}
}

// started starts a command in a directory of its own and waits for its first line.
func started(t *testing.T, name string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd, stderr := exec.CommandContext(t.Context(), name, args...), &bytes.Buffer{}
	cmd.Dir, cmd.Stderr = t.TempDir(), stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	return cmd, stderr
}

// TestStopWhileOpening: a command that waits for the store's owner ends with
// the signal's code.
func TestStopWhileOpening(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ckpts")
	output(t, 0, "ckptstore", "init", "--store", dir)
	// The lock of an owner that never answers.
	lock, err := os.OpenFile(filepath.Join(dir, "LOCK"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(filepath.Dir(dir), "s")
	owner, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = owner.Close() }()
	card := fmt.Sprintf(`{"host": "here", "pid": 1, "log": %q, "api": %q}`, socket, socket)
	if err := os.WriteFile(filepath.Join(dir, "owner.json"), []byte(card), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		sig  syscall.Signal
		code int
		args []string
	}{
		{syscall.SIGINT, 130, []string{"ckptstore", "ls", "--store", dir, "--wait=1m"}},
		{syscall.SIGINT, 130, []string{"trainer", "run", "--store", dir, "--wait=1m", "--", "true"}},
		{syscall.SIGTERM, 143, []string{"trainer", "run", "--store", dir, "--wait=1m", "--", "true"}},
	} {
		cmd := exec.CommandContext(t.Context(), c.args[0], c.args[1:]...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		conn, err := owner.Accept() // so it waits for an answer
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(c.sig); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		_ = conn.Close()
		if got := cmd.ProcessState.ExitCode(); got != c.code {
			t.Errorf("%v: exit code %d, want %d\n%s", c.args, got, c.code, stderr.String())
		}
	}
}
