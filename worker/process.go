package worker

import (
	"bufio"
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

// process is one rank's process, the leader of its own process group.
type process struct {
	rank  int
	cmd   *exec.Cmd
	pipes []*os.File // read ends of its output
	copy  sync.WaitGroup
	ended atomic.Bool
	tail  tail
}

// exit says how a process ended.
type exit struct {
	rank   int
	code   int
	signal string // name, such as SIGKILL, or empty
}

func (e exit) failed() bool { return e.code != 0 || e.signal != "" }

func (e exit) String() string {
	if e.signal != "" {
		return fmt.Sprintf("rank %d was killed by %s", e.rank, e.signal)
	}
	return fmt.Sprintf("rank %d exited with code %d", e.rank, e.code)
}

// startProcess starts one rank. Its output goes line by line to out and err,
// with a prefix when there are several ranks.
func startProcess(rank int, command, env []string, prefix string, stdout, stderr io.Writer) (*process, error) {
	p := &process{rank: rank, cmd: exec.Command(command[0], command[1:]...)}
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
		p.copy.Go(func() { p.forward(r, out.to, prefix) })
	}
	if err := p.cmd.Start(); err != nil {
		for _, w := range ends {
			_ = w.Close()
		}
		ends = nil
		closeOutput(slog.New(slog.DiscardHandler), p)
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

// maxLine is the longest piece of output that is kept together, in bytes.
const maxLine = 64 << 10

func (p *process) forward(r io.Reader, to io.Writer, prefix string) {
	in := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := in.ReadSlice('\n')
		if len(line) > 0 {
			text := append([]byte(prefix), line...)
			if text[len(text)-1] != '\n' {
				text = append(text, '\n')
			}
			p.tail.add(string(line))
			// A terminal that is gone must not stop the training.
			_, _ = to.Write(text)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// wait blocks until the process itself has ended; its output may go on.
func (p *process) wait() exit {
	_ = p.cmd.Wait() // the state says more than the error
	p.ended.Store(true)
	e := exit{rank: p.rank, code: p.cmd.ProcessState.ExitCode()}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		e.code = 128 + int(ws.Signal())
		e.signal = unix.SignalName(ws.Signal())
	}
	return e
}

// signal sends sig to the whole process group, unless its leader has ended:
// then its number may be somebody else's, and what is left of the group is
// found by the hunt.
func (p *process) signal(sig syscall.Signal) {
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

// closeOutput ends the forwarding of output, after what was written so far.
// The deadline ends a copier that reads. One that writes to a pipe that
// nobody empties cannot be ended: it is left to itself.
func closeOutput(log *slog.Logger, procs ...*process) {
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

// tail keeps the last lines of a process's output, for the report of why it
// failed.
type tail struct {
	mu    sync.Mutex
	lines []string
}

const tailLines = 20

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.lines) == tailLines {
		t.lines = t.lines[1:]
	}
	t.lines = append(t.lines, line)
}

func (t *tail) get() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.lines...)
}
