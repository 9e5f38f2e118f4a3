package launch_test

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// sleeper starts a process of a job's node, and returns its pidfd.
func sleeper(t *testing.T, env ...string) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	cmd.Env = append(os.Environ(), env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-done; _ = unix.Close(fd) })
	return fd
}

// The guard kills the ranks of its node at the deadline, while its trainer is
// silent, and spares those of another node. A rank that starts after the deadline is
// killed too.
func TestGuardHoldsTheDeadline(t *testing.T) {
	t.Parallel()
	job, node := runOf(t), "NODE_OF_THE_TEST=1"
	guard := exec.CommandContext(t.Context(), "/proc/self/exe", process.GuardCommand, job, node)
	in, err := guard.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := guard.Start(); err != nil {
		t.Fatal(err)
	}
	mine, other := sleeper(t, client.EnvJob+"="+job, node), sleeper(t, client.EnvJob+"="+job, "NODE_OF_THE_TEST=2")
	tell := func(line string) {
		if _, err := io.WriteString(in, line); err != nil {
			t.Fatal(err)
		}
	}
	tell("~3600000\n")
	tell("~1\n") // the last one counts
	if err := gone(mine); err != nil {
		t.Errorf("the rank outlives the deadline: %v", err)
	}
	if err := unix.PidfdSendSignal(other, 0, nil, 0); err != nil {
		t.Errorf("the rank of another node: %v", err)
	}
	late := sleeper(t, client.EnvJob+"="+job, node)
	tell(fmt.Sprintf("+%d 0 0\n", os.Getpid()+1<<22)) // no such process: the marker finds the rank
	if err := gone(late); err != nil {
		t.Errorf("a rank that started after the deadline: %v", err)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := guard.Wait(); err != nil {
		t.Error(err)
	}
}

// An answer to a beat comes in the last moment, and the guard has killed the ranks before it hears of it. The trainer knows
// that its ranks were killed for lack of contact.
func TestGuardTellsItsKills(t *testing.T) {
	t.Parallel()
	job, node := runOf(t), "NODE_OF_THE_TEST=1"
	g, err := process.StartGuard(job, slog.New(slog.DiscardHandler), node)
	if err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(g.Stop)
	defer stop()
	g.Await()
	c := &process.Contact{}
	c.GuardedBy(g)
	c.Answered(time.Now(), time.Hour)
	rank := sleeper(t, client.EnvJob+"="+job, node)
	if n := c.Lapsed(); n != 0 {
		t.Errorf("%d lapses before the deadline", n)
	}
	g.LiveUntil(time.Now()) // the deadline before the answer
	if err := gone(rank); err != nil {
		t.Errorf("the rank outlives the deadline: %v", err)
	}
	if n := c.Lapsed(); n != 1 {
		t.Errorf("%d lapses after the guard has killed a rank", n)
	}
	stop()
	if n := c.Lapsed(); n != 1 {
		t.Errorf("%d lapses after the end of the guard", n)
	}
}
