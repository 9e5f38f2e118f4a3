package launch_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"

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
