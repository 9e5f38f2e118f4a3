package stacks_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/stacks"
)

const patience = 60 * time.Second

// output collects what a process prints.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String is everything so far.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// started is a process that has printed "ready".
func started(t *testing.T, name string, args ...string) (*exec.Cmd, *output) {
	t.Helper()
	c := exec.Command(name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	problems := &output{}
	c.Stderr = problems
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		_ = c.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		t.Fatalf("%q, %v, %s", line, err, problems)
	}
	return c, problems
}

func collect(t *testing.T, target stacks.Target) (text, how string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, how, err := stacks.Collect(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	return text, how
}

// withoutPySpy hides a py-spy of this machine.
func withoutPySpy(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", t.TempDir())
}

const sleeps = "\nimport time\ndef stuck_in_here():\n    print('ready', flush=True)\n    time.sleep(600)\nstuck_in_here()\n"

func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Fatalf("this test needs python3: %v", err)
	}
	return path
}

// A Python process that registered a handler prints its stacks, and lives on.
func TestSignalToHandler(t *testing.T) {
	p, out := started(t, python(t), "-c", "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)"+sleeps)
	withoutPySpy(t)
	text, how := collect(t, stacks.Target{PID: p.Process.Pid})
	if how != stacks.BySignal || !strings.Contains(text, "was sent it") || !strings.Contains(text, "state S") {
		t.Errorf("%s: %s", how, text)
	}
	for limit := time.Now().Add(patience); !strings.Contains(out.String(), "stuck_in_here"); {
		if time.Now().After(limit) {
			t.Fatalf("the stack did not come: %q", out)
		}
		runtime.Gosched()
	}
	if err := p.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process has ended: %v", err)
	}
}

// A process without a handler gets no signal: SIGUSR1 would kill it.
func TestNoSignalWithoutHandler(t *testing.T) {
	p, _ := started(t, python(t), "-c", sleeps)
	withoutPySpy(t)
	text, how := collect(t, stacks.Target{PID: p.Process.Pid})
	for limit := time.Now().Add(patience); !strings.Contains(text, "state S (sleeping)") && time.Now().Before(limit); {
		text, how = collect(t, stacks.Target{PID: p.Process.Pid}) // it was on its way to sleep
	}
	if how != stacks.ByKernel || strings.Contains(text, "SIGUSR1") || !strings.Contains(text, "state S (sleeping)") {
		t.Errorf("%s: %s", how, text)
	}
	// It would have died of the signal by now, or have it pending.
	status, err := os.ReadFile(filepath.Join("/proc", strings.Fields(text)[1], "status"))
	if err != nil || strings.Contains(string(status), "State:\tZ") {
		t.Errorf("the process has died: %v\n%s", err, status)
	}
	if handles, err := stacks.Handles(p.Process.Pid, syscall.SIGUSR1); handles || err != nil {
		t.Errorf("handles %v, %v", handles, err)
	}
}

// A stopped process cannot answer, but the kernel reports that it is stopped.
func TestStoppedProcess(t *testing.T) {
	p, _ := started(t, "/bin/sh", "-c", "echo ready; exec sleep 600")
	withoutPySpy(t)
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for limit := time.Now().Add(patience); ; {
		text, how := collect(t, stacks.Target{PID: p.Process.Pid})
		if how != stacks.ByKernel {
			t.Fatalf("%s: %s", how, text)
		}
		if strings.Contains(text, "state T (stopped)") {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("it does not stop: %s", text)
		}
	}
}

// The process's own account comes first; the reasons of failed ways are included.
func TestOwnAccountComesFirst(t *testing.T) {
	p, _ := started(t, "/bin/sh", "-c", "echo ready; sleep 600 & wait")
	withoutPySpy(t)
	text, how := collect(t, stacks.Target{PID: p.Process.Pid, Ask: func(context.Context) (string, error) { return "here", nil }})
	if text != "here" || how != stacks.ByRPC {
		t.Errorf("%s: %s", how, text)
	}
	silent := stacks.Target{PID: p.Process.Pid, Ask: func(context.Context) (string, error) { return "", errors.New("no listener") }}
	for limit := time.Now().Add(patience); ; { // until its child sleeps
		text, how = collect(t, silent)
		if how != stacks.ByKernel || !strings.Contains(text, "not by rpc: no listener") {
			t.Fatalf("%s: %s", how, text)
		}
		if strings.Contains(text, "(sleep): state S") {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("the child does not show: %s", text)
		}
	}
	long := strings.Repeat("x", stacks.MaxText+7)
	if text, _ = collect(t, stacks.Target{PID: p.Process.Pid, Ask: func(context.Context) (string, error) { return long, nil }}); !strings.HasSuffix(text, "x\n(7 bytes more were cut off)\n") {
		t.Errorf("%d bytes end with %q", len(text), text[len(text)-50:])
	}
}

// py-spy is called with the process's number, and its failure is reported.
func TestPySpy(t *testing.T) {
	p, _ := started(t, "/bin/sh", "-c", "echo ready; exec sleep 600")
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	spy := func(script string) {
		if err := os.WriteFile(filepath.Join(dir, "py-spy"), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	spy(`echo "asked to $*"`)
	text, how := collect(t, stacks.Target{PID: p.Process.Pid})
	if how != stacks.ByPySpy || !strings.HasPrefix(text, "asked to dump --pid ") {
		t.Errorf("%s: %s", how, text)
	}
	spy("echo no permission >&2; exit 3")
	text, how = collect(t, stacks.Target{PID: p.Process.Pid})
	if how != stacks.ByKernel || !strings.Contains(text, "not by py-spy: exit status 3: no permission") {
		t.Errorf("%s: %s", how, text)
	}
}

func TestNoProcess(t *testing.T) {
	c := exec.Command("/bin/true")
	c.Stdout = io.Discard
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := stacks.Collect(t.Context(), stacks.Target{PID: c.Process.Pid}); err == nil || !strings.Contains(err.Error(), "it has ended") {
		t.Errorf("error %v", err)
	}
}
