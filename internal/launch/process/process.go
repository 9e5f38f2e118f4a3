// Package process manages the processes of one attempt: it starts them, forwards
// their output, and finds and kills everything that they leave behind.
//
//	Process   one rank's process, the leader of its own process group
//	Exit      how a process ended
//	Entry     a line of the system's table of processes
//	Hunt      finds the processes of jobs, by their marker and their descent; those whose
//	          trainer is dead are orphans
//	Guard     a process that kills the job's processes when the trainer dies
//
// A process belongs to a job if its environment carries the job's marker,
// [client.EnvJob], or if it descends from such a process: see [Hunt].
package process

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is one rank's process, the leader of its own process group.
type Process struct {
	rank  int
	cmd   *exec.Cmd
	pipes []*os.File // read ends of its output
	copy  sync.WaitGroup
	ended atomic.Bool
	tail  tail
}

// Exit is how a process ended.
type Exit struct {
	Rank   int
	Code   int
	Signal string // name, such as SIGKILL, or empty
}

// Failed reports whether the code is not 0, or a signal ended the process.
func (e Exit) Failed() bool { return e.Code != 0 || e.Signal != "" }

func (e Exit) String() string {
	if e.Signal != "" {
		return fmt.Sprintf("rank %d was killed by %s", e.Rank, e.Signal)
	}
	return fmt.Sprintf("rank %d exited with code %d", e.Rank, e.Code)
}

// Of returns the process of a command that already runs and whose output is not
// ours.
func Of(rank int, cmd *exec.Cmd) *Process { return &Process{rank: rank, cmd: cmd} }

// Start starts one rank. Its output goes piece by piece to stdout and stderr.
// Each write is a line, a part of a line longer than 64 KiB, or a state of a
// redrawn line, such as a progress bar, which ends with "\r".
func Start(rank int, command, env []string, stdout, stderr io.Writer) (*Process, error) {
	p := Of(rank, exec.Command(command[0], command[1:]...))
	p.cmd.Env = env
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var ends []*os.File
	defer func() {
		for _, f := range ends {
			_ = f.Close()
		}
	}()
	// Use our own pipes instead of the exec package's: a grandchild that holds
	// one open must not delay the report that the worker itself has ended.
	for _, out := range []struct {
		fd *io.Writer
		to io.Writer
	}{{&p.cmd.Stdout, stdout}, {&p.cmd.Stderr, stderr}} {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, notStarted(rank, err)
		}
		p.pipes, ends = append(p.pipes, r), append(ends, w)
		*out.fd = w
		p.copy.Go(func() { p.forward(r, out.to) })
	}
	if err := p.cmd.Start(); err != nil {
		for _, w := range ends {
			_ = w.Close()
		}
		ends = nil
		CloseOutput(slog.New(slog.DiscardHandler), p)
		return nil, notStarted(rank, err)
	}
	return p, nil
}

func notStarted(rank int, err error) error {
	hint := ""
	switch {
	case errors.Is(err, syscall.EMFILE):
		hint = "; raise the limit of open files (ulimit -n), or start fewer ranks"
	case errors.Is(err, syscall.EAGAIN):
		hint = "; raise the limit of processes (ulimit -u), or start fewer ranks"
	}
	return fmt.Errorf("start rank %d: %w%s", rank, err, hint)
}

// Root returns the process's entry in the system's table, as the leader of its
// own group. The entry exists until [Process.Wait] returns, even if the process
// has ended.
func (p *Process) Root() (Entry, error) {
	root, err := readEntry(p.cmd.Process.Pid)
	if err != nil {
		return root, fmt.Errorf("inspect rank %d: %w", p.rank, err)
	}
	root.group = root.pid // set by the kernel before the program ran
	return root, nil
}

// Ended reports whether the process itself has ended.
func (p *Process) Ended() bool { return p.ended.Load() }

// PID returns the process's number, also after its end.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Tail returns the last lines of its output.
func (p *Process) Tail() []string { return p.tail.get() }

// Wait blocks until the process itself has ended; its output may continue.
func (p *Process) Wait() Exit {
	_ = p.cmd.Wait() // the state is more precise than the error
	p.ended.Store(true)
	e := Exit{Rank: p.rank, Code: p.cmd.ProcessState.ExitCode()}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		e.Code = 128 + int(ws.Signal())
		e.Signal = unix.SignalName(ws.Signal())
	}
	return e
}

// Signal sends sig to the whole process group, unless its leader has ended: then
// another group may have its number, and the hunt finds what is left of the
// group.
func (p *Process) Signal(sig syscall.Signal) {
	if p.ended.Load() {
		return
	}
	// ESRCH means that the group is empty, which is the purpose of the signal.
	_ = syscall.Kill(-p.cmd.Process.Pid, sig)
}

// outputGrace is how long output from before a process's end may take to arrive.
// A process that left the job may hold a pipe open forever.
const outputGrace = 2 * time.Second

// outputSlack lets copiers that the grace ends come to an end.
const outputSlack = 500 * time.Millisecond

// CloseOutput ends the forwarding of output, after what has been written so far.
// The deadline ends a copier that reads. A copier that writes to a pipe without a
// reader cannot be ended: it is abandoned.
func CloseOutput(log *slog.Logger, procs ...*Process) {
	for _, p := range procs {
		for _, r := range p.pipes {
			_ = r.SetReadDeadline(time.Now().Add(outputGrace))
		}
	}
	copied := make(chan struct{})
	go func() {
		for _, p := range procs {
			p.copy.Wait()
		}
		close(copied)
	}()
	timer := time.NewTimer(outputGrace + outputSlack)
	defer timer.Stop()
	select {
	case <-copied:
	case <-timer.C:
		log.Warn("last output of the workers lost: the trainer's output has no reader", "after", outputGrace)
	}
	for _, p := range procs {
		for _, r := range p.pipes {
			_ = r.Close()
		}
	}
}
