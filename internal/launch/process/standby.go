package process

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// orderPatience bounds the wait for a standby that does not read its order.
const orderPatience = time.Second

// Standby is a process that was started before its rank is known. It waits for an order on its
// descriptor 3. The hunt spares it until then.
type Standby struct {
	process *Process
	order   *os.File
	root    Entry
	hunt    *Hunt
}

// StartStandby starts a standby with an environment.
func StartStandby(command, env []string, hunt *Hunt) (*Standby, error) {
	restore, err := Unblocked()
	if err != nil {
		return nil, err
	}
	s, err := startStandby(command, env, hunt)
	if rerr := restore(); rerr != nil && err == nil {
		s.Stop()
		return nil, rerr
	}
	return s, err
}

func startStandby(command, env []string, hunt *Hunt) (s *Standby, err error) {
	s = &Standby{process: Of(-1, exec.Command(command[0], command[1:]...)), hunt: hunt}
	s.process.cmd.Env = env
	s.process.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var ends []*os.File // of the child
	defer func() {
		for _, f := range ends {
			_ = f.Close()
		}
	}()
	for _, fd := range []*io.Writer{&s.process.cmd.Stdout, &s.process.cmd.Stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			s.close()
			return nil, fmt.Errorf("start a process in advance: %w", err)
		}
		s.process.pipes, ends = append(s.process.pipes, r), append(ends, w)
		*fd = w
	}
	r, w, err := os.Pipe()
	if err != nil {
		s.close()
		return nil, fmt.Errorf("start a process in advance: %w", err)
	}
	s.order, ends, s.process.cmd.ExtraFiles = w, append(ends, r), []*os.File{r}
	// The hunt must not find it before it is spared.
	hunt.starting.RLock()
	defer hunt.starting.RUnlock()
	if err := s.process.cmd.Start(); err != nil {
		s.close()
		return nil, fmt.Errorf("start a process in advance: %w", err)
	}
	if s.root, err = s.process.Root(); err != nil {
		s.Stop()
		return nil, err
	}
	hunt.wait(s.root)
	return s, nil
}

// close closes its descriptors here.
func (s *Standby) close() {
	for _, f := range s.process.pipes {
		_ = f.Close()
	}
	if s.order != nil {
		_ = s.order.Close()
	}
}

// Ended reports whether the process has ended, although it got no order.
func (s *Standby) Ended() bool {
	now, err := readEntry(s.root.pid)
	return err != nil || now.start != s.root.start || now.gone
}

// Begin gives the process its order and makes it a rank. Its output, with what it has printed
// since its start, goes to stdout and stderr as that of [Start]. After an error the caller calls Stop.
func (s *Standby) Begin(rank int, order []byte, stdout, stderr io.Writer) (*Process, error) {
	_ = s.order.SetWriteDeadline(time.Now().Add(orderPatience))
	if _, err := s.order.Write(order); err != nil {
		return nil, fmt.Errorf("give process %d the rank %d: %w", s.root.pid, rank, err)
	}
	_ = s.order.Close() // the order is complete
	p := s.process
	p.rank = rank
	for i, to := range []io.Writer{stdout, stderr} {
		p.copy.Go(func() { p.forward(p.pipes[i], to) })
	}
	s.hunt.ranked(s.root)
	return p, nil
}

// Stop kills the process, and returns the end of what it has printed.
func (s *Standby) Stop() (said string) {
	p := s.process
	var out pieceEnd
	for _, r := range p.pipes {
		p.copy.Go(func() { p.forward(r, &out) })
	}
	p.Signal(syscall.SIGKILL)
	ended := make(chan struct{})
	go func() {
		p.Wait()
		close(ended)
	}()
	limit := time.NewTimer(ReapTimeout)
	defer limit.Stop()
	select {
	case <-ended:
	case <-limit.C:
		return fmt.Sprintf("process %d does not die %v after SIGKILL; look for processes in state D, a driver or a disk hangs", s.root.pid, ReapTimeout)
	}
	CloseOutput(slog.New(slog.DiscardHandler), p)
	if s.order != nil {
		_ = s.order.Close() // Begin may have done so
	}
	s.hunt.forgo(s.root)
	return strings.TrimSpace(out.text)
}

// pieceEnd keeps the last piece of output.
type pieceEnd struct {
	mu   sync.Mutex
	text string
}

// Write implements io.Writer.
func (e *pieceEnd) Write(piece []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if strings.TrimSpace(string(piece)) != "" {
		e.text = string(piece)
	}
	return len(piece), nil
}

// wait spares a process that carries the marker and waits for its rank.
func (h *Hunt) wait(p Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting[p.pid] = p
}

// ranked makes a process that has waited one of the job's.
func (h *Hunt) ranked(p Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.waiting, p.pid)
	h.addLocked(p)
}

// forgo drops a process that is gone.
func (h *Hunt) forgo(p Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting[p.pid].start == p.start {
		delete(h.waiting, p.pid)
	}
}

// Unblocked makes this thread block no signal, until the caller calls restore: a
// process started by this thread inherits its signal mask. The parent of the
// trainer may have blocked some signals, and a worker that blocks SIGTERM neither
// saves nor ends on it.
func Unblocked() (restore func() error, err error) {
	runtime.LockOSThread()
	var was unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &unix.Sigset_t{}, &was); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("unblock the signals of the workers: %w", err)
	}
	return func() error {
		defer runtime.UnlockOSThread()
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil); err != nil {
			return errors.Join(errors.New("block the trainer's signals again"), err)
		}
		return nil
	}, nil
}
