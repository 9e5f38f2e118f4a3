package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// long is how long a test of hangs waits: a hang has to be detected, recorded and
// ended first.
const long = 2 * time.Minute

// hangs runs a job until it ends, with a hang timeout.
func (j *job) hangs(restarts int) error {
	j.t.Helper()
	j.cfg.MaxRestarts, j.cfg.HangTimeout = restarts, 3*time.Second
	j.start()
	select {
	case err := <-j.done:
		j.ended = true
		j.cancel(nil)
		return err
	case <-time.After(long):
		j.t.Fatal("the job does not end")
		return nil
	}
}

// failedOf is the failure that used up a job's budget.
func failedOf(t *testing.T, err error) *launch.FailedError {
	t.Helper()
	var failed *launch.FailedError
	if !errors.As(err, &failed) {
		t.Fatalf("error %v, want a FailedError", err)
	}
	return failed
}

// stuckInALock never returns.
func stuckInALock() {
	var mu sync.Mutex
	mu.Lock()
	mu.Lock()
}

var locks = workerRole("locks", func(ctx context.Context, c *client.Client) error {
	if err := c.Report(ctx, 1, nil); err != nil {
		return err
	}
	if c.Attempt == 1 && c.Rank == 1 {
		stuckInALock()
	}
	return c.Report(ctx, 2, nil)
})

// A hanging rank is named, with the ranks that wait for it. The stacks of all
// show where, and the group restarts out of the budget.
func TestHangIsRestarted(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, locks...)
	if err := j.hangs(1); err != nil {
		t.Fatal(err)
	}
	wantText(t, j.out, "[rank1] stacks of rank 1, which is silent:\n[rank1] by rpc:\n", "launch_test.stuckInALock", "[rank0] stacks of rank 0, which is not silent:\n[rank0] by rpc:\n", "client.(*Client).Report")
	stopped := bodiesOf[events.GroupStopped](t, runOf(t))
	if len(stopped) != 2 {
		t.Fatalf("group.stopped: %+v", stopped)
	}
	for _, part := range []string{"rank 1 silent for ", "last request report; rank 0 waits for it\nby rpc:\n", "stuckInALock"} {
		if !strings.Contains(stopped[0].Reason, part) {
			t.Errorf("%q is not in %q", part, stopped[0].Reason)
		}
	}
	wantNobody(t, j.cfg.Job)
}

var stops = workerRole("stops", func(ctx context.Context, c *client.Client) error {
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGSTOP); err != nil {
		return err
	}
	<-ctx.Done() // the other threads may run for a moment longer
	return ctx.Err()
})

// A stopped rank cannot answer: the kernel reports its state, and SIGKILL ends
// it.
func TestHangOfStoppedRank(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, stops...)
	j.cfg.Grace = time.Second
	failed := failedOf(t, j.hangs(0))
	if !strings.HasPrefix(failed.Cause, "rank 0 silent for ") || !strings.Contains(failed.Cause, "last request hello\n") {
		t.Errorf("cause %q", failed.Cause)
	}
	wantText(t, j.out, "not by rpc: ", "state T (stopped)")
	if e := one[events.WorkerExited](t, runOf(t)); e.Signal != "SIGKILL" {
		t.Errorf("group.worker_exited: %+v", e)
	}
	wantNobody(t, j.cfg.Job)
}

// pythonHangs is a worker in Python that sends hello and then sleeps.
func pythonHangs(t *testing.T, before string) []string {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatalf("this test needs python3: %v", err)
	}
	return []string{python, "-c", before + `
import os, socket, time
body = b'{"protocols": [3], "pid": %d}' % os.getpid()
s = socket.socket(socket.AF_UNIX)
s.connect(os.environ["CKPTSTORE_SOCKET"])
s.sendall(b"POST /v1/hello HTTP/1.1\r\nHost: t\r\nConnection: close\r\nAuthorization: Bearer "
          + os.environ["CKPTSTORE_TOKEN"].encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
while s.recv(4096): pass
def stuck_in_here(): time.sleep(600)
stuck_in_here()
`}
}

// A Python worker that registered faulthandler for SIGUSR1 prints its stacks.
func TestHangOfPythonWithHandler(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, pythonHangs(t, "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)")...)
	if failed := failedOf(t, j.hangs(0)); !strings.Contains(failed.Cause, "last request hello") {
		t.Errorf("cause %q", failed.Cause)
	}
	wantText(t, j.out, "stacks of rank 0", "stuck_in_here")
}

// Without a handler SIGUSR1 would kill it: it is ended as any other, by SIGTERM.
func TestHangOfPythonWithoutHandler(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, pythonHangs(t, "")...)
	if failed := failedOf(t, j.hangs(0)); !strings.Contains(failed.Cause, "last request hello") {
		t.Errorf("cause %q", failed.Cause)
	}
	wantText(t, j.out, "stacks of rank 0")
	if strings.Contains(j.out.String(), "was sent it") {
		t.Errorf("it was sent a signal:\n%s", j.out)
	}
	if e := one[events.WorkerExited](t, runOf(t)); e.Signal != "SIGTERM" {
		t.Errorf("group.worker_exited: %+v", e)
	}
}

// A program that never contacted the trainer does not hang, however long it is
// silent.
func TestNoHangWithoutTrainer(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, shell("sleep 5; echo done")...)
	if err := j.hangs(0); err != nil {
		t.Fatal(err)
	}
	wantText(t, j.out, "done")
}

var beats = workerRole("beats", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 0 {
		return meet(ctx, c) // waits for longer than the hang timeout
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for range 50 {
		if err := c.Heartbeat(ctx); err != nil {
			return err
		}
		<-ticker.C
	}
	return meet(ctx, c)
})

// A rank that waits for others in the trainer does not hang, nor does a rank with
// heartbeats.
func TestNoHangWhileWaiting(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, beats...)
	if err := j.hangs(0); err != nil {
		t.Fatal(fmt.Errorf("hang: %w", err))
	}
}
