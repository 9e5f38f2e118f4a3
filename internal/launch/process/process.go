// Package process has the processes of one attempt: it starts them, passes on
// their output, and finds and kills whatever they leave behind.
//
//	Process   one rank's process, the leader of its own process group
//	Exit      how it ended
//	Entry     a line of the system's table of processes
//	Hunt      finds the processes of jobs, by their marker and their descent; those whose
//	          trainer is dead are orphans
//	Guard     a process that kills the job's processes when the trainer dies
//
// A process belongs to a job if its environment carries the job's marker,
// [client.EnvJob], or if it descends from one that does: see [Hunt].
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

// Exit says how a process ended.
type Exit struct {
	Rank   int
	Code   int
	Signal string // name, such as SIGKILL, or empty
}

// Failed reports a code other than 0, or a signal.
func (e Exit) Failed() bool { return e.Code != 0 || e.Signal != "" }

func (e Exit) String() string {
	if e.Signal != "" {
		return fmt.Sprintf("rank %d was killed by %s", e.Rank, e.Signal)
	}
	return fmt.Sprintf("rank %d exited with code %d", e.Rank, e.Code)
}

// Of is the process of a command that runs already, whose output is not ours.
func Of(rank int, cmd *exec.Cmd) *Process { return &Process{rank: rank, cmd: cmd} }

// Start starts one rank. Its output goes piece by piece to stdout and stderr:
// each write is a line, a part of one that is longer than 64 KiB, or a state of
// one that is written anew, as by a progress bar, which ends with "\r".
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
	// Pipes of our own instead of the exec package's: a grandchild that holds
	// one open must not delay the news that the worker itself has ended.
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

// Root is the process's line in the system's table, as the leader of its own
// group. It is there until [Process.Wait] has been called, even if the process
// has ended.
func (p *Process) Root() (Entry, error) {
	root, err := readEntry(p.cmd.Process.Pid)
	if err != nil {
		return root, fmt.Errorf("look at rank %d: %w", p.rank, err)
	}
	root.group = root.pid // the kernel has made it so before the program ran
	return root, nil
}

// Ended reports whether the process itself has ended.
func (p *Process) Ended() bool { return p.ended.Load() }

// PID is the process's number, also after its end.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Tail is the last lines of its output.
func (p *Process) Tail() []string { return p.tail.get() }

// Wait blocks until the process itself has ended; its output may go on.
func (p *Process) Wait() Exit {
	_ = p.cmd.Wait() // the state says more than the error
	p.ended.Store(true)
	e := Exit{Rank: p.rank, Code: p.cmd.ProcessState.ExitCode()}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		e.Code = 128 + int(ws.Signal())
		e.Signal = unix.SignalName(ws.Signal())
	}
	return e
}

// Signal sends sig to the whole process group, unless its leader has ended:
// then its number may be somebody else's, and what is left of the group is
// found by the hunt.
func (p *Process) Signal(sig syscall.Signal) {
	if p.ended.Load() {
		return
	}
	// ESRCH: nobody is left in the group, which is what a signal is for.
	_ = syscall.Kill(-p.cmd.Process.Pid, sig)
}

// outputGrace is how long output that was written before a process ended may
// take to arrive. A process that left the job holds a pipe open for ever.
const outputGrace = 2 * time.Second

// outputSlack lets copiers that the grace ends come to an end.
const outputSlack = 500 * time.Millisecond

// CloseOutput ends the forwarding of output, after what was written so far.
// The deadline ends a copier that reads. One that writes to a pipe that
// nobody empties cannot be ended: it is left to itself.
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
		log.Warn("the last output of the workers is lost: nobody reads what the trainer writes to", "after", outputGrace)
	}
	for _, p := range procs {
		for _, r := range p.pipes {
			_ = r.Close()
		}
	}
}
