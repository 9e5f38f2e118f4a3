package worker

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
)

// GuardCommand is the hidden command under which a trainer's binary runs as a
// guard: its main must call [Guard] for it.
const GuardCommand = "guard"

// guard is the process that outlives a killed trainer for the moment it takes
// to kill the job's processes. It has its own session, so that a signal to
// the trainer's group does not reach it, and holds the read end of a pipe
// that the kernel closes when the trainer is gone.
type guard struct {
	cmd  *exec.Cmd
	pipe *os.File
}

func startGuard(job string) (*guard, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command("/proc/self/exe", GuardCommand, job)
	cmd.Args[0] = os.Args[0] // what a person sees in the list of processes
	cmd.Stdin = r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	return &guard{cmd, w}, nil
}

// stop ends the guard in order: it makes one last pass.
func (g *guard) stop() error {
	if err := g.pipe.Close(); err != nil {
		return err
	}
	return g.cmd.Wait()
}

// Guard waits until standard input ends, which is when the trainer of the job
// ended or was killed, and kills what is left of the job.
func Guard(ctx context.Context, stdin io.Reader, job string) error {
	if _, err := io.Copy(io.Discard, stdin); err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	return Reap(ctx, job)
}
