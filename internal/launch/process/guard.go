package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
)

// GuardCommand is the hidden command under which a trainer's binary runs as a
// guard: its main must call [RunGuard] for it.
const GuardCommand = "guard"

// guardPatience bounds the wait for a guard that reads or ends too slowly. A slow
// guard must not delay the job.
const guardPatience = 5 * time.Second

// Guard is the process that outlives a killed trainer just long enough to kill
// the job's processes. It has its own session, so that a signal to the trainer's
// group does not reach it. It holds the read end of a pipe that the kernel closes
// when the trainer is gone; over the pipe it learns of each rank: see [RunGuard].
// If it dies, another replaces it.
//
// The guard also holds the deadline of a group whose node must not outlive its contact
// with the coordinating node: see [Guard.LiveUntil]. It holds it in place of the
// trainer, which may be stopped while its workers continue.
type Guard struct {
	job  string
	of   []string // variables of the job's processes on this node
	log  *slog.Logger
	quit chan struct{} // closed by stop
	done chan struct{} // closed when no guard runs any more

	mu      sync.Mutex
	cmd     *exec.Cmd
	pipe    *os.File
	answers *os.File      // what the guard writes
	kills   int           // that it and those before it have told
	ranks   map[int]Entry // alive, by PID
	until   time.Time     // of the group; zero: without a deadline
	ready   chan struct{} // closed when the guard ignores signals, has died, or does not answer
}

// StartGuard starts the guard of a job's processes, which have the variables of, as
// NAME=VALUE, in their environment.
func StartGuard(job string, log *slog.Logger, of ...string) (*Guard, error) {
	g := &Guard{job: job, of: of, log: log, quit: make(chan struct{}), done: make(chan struct{}), ranks: map[int]Entry{}}
	if err := g.start(); err != nil {
		return nil, err
	}
	go g.keep()
	return g, nil
}

// start starts a guard and sends it the live ranks.
func (g *Guard) start() error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start the guard: %w", err)
	}
	defer func() { _ = r.Close() }()
	answers, out, err := os.Pipe()
	if err != nil {
		_ = w.Close()
		return fmt.Errorf("start the guard: %w", err)
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command("/proc/self/exe", append([]string{GuardCommand, g.job}, g.of...)...)
	cmd.Args[0] = os.Args[0] // shown in the list of processes
	// A trainer may itself be a worker of another job. The end of that job must
	// not kill this trainer's guard first.
	cmd.Env = append(os.Environ(), client.EnvJob+"=")
	cmd.Stdin, cmd.Stdout = r, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := startDeaf(cmd); err != nil {
		_, _ = w.Close(), answers.Close()
		return fmt.Errorf("start the guard: %w", err)
	}
	ready := make(chan struct{})
	go func() {
		defer close(ready)
		err := answers.SetReadDeadline(time.Now().Add(guardPatience))
		if err == nil {
			_, err = answers.Read(make([]byte, 1))
		}
		if err != nil && !errors.Is(err, io.EOF) { // keep logs its end
			g.log.Warn("guard does not answer; a signal to all processes may end it", "error", err)
		}
	}()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.answers != nil {
		g.hear()
		_ = g.answers.Close()
	}
	g.cmd, g.pipe, g.answers, g.ready = cmd, w, answers, ready
	for _, p := range g.ranks {
		g.tell(rankLine(p))
	}
	if !g.until.IsZero() {
		g.tell(deadlineLine(g.until))
	}
	select {
	case <-g.quit: // stop has closed the pipe of the previous guard
		return w.Close()
	default:
		return nil
	}
}

// endings are the signals by which schedulers and terminals end programs.
var endings = []os.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}

// startDeaf starts a process that blocks these signals from its first
// instruction. Go's runtime unblocks all but SIGUSR1 and SIGUSR2 before main
// runs, so others can end it until it ignores them: see [Guard.Await].
func startDeaf(cmd *exec.Cmd) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var set, was unix.Sigset_t
	for _, sig := range endings {
		n := uint(sig.(syscall.Signal)) - 1
		set.Val[n/64] |= 1 << (n % 64)
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &set, &was); err != nil {
		return fmt.Errorf("block signals: %w", err)
	}
	defer func() {
		if rerr := unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil); rerr != nil {
			err = errors.Join(err, fmt.Errorf("unblock signals: %w", rerr))
		}
	}()
	return cmd.Start()
}

// keep waits for the guard's end, and starts another unless Stop was called.
func (g *Guard) keep() {
	defer close(g.done)
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		err := g.cmd.Wait()
		select {
		case <-g.quit:
			return
		default:
		}
		g.log.Warn("guard died; starting another", "state", g.cmd.ProcessState, "error", err)
		g.mu.Lock()
		_ = g.pipe.Close()
		g.mu.Unlock()
		for err := g.start(); err != nil; err = g.start() {
			g.log.Warn("no guard; processes of the job may outlive a killed trainer", "error", err)
			select {
			case <-time.After(wait):
			case <-g.quit:
				return
			}
		}
		g.log.Info("guard restarted")
		select { // do not start a guard that always dies in a busy loop
		case <-time.After(wait):
		case <-g.quit:
		}
	}
}

// deadlineLine rounds up: if a rank was killed by the guard, the deadline has passed.
func deadlineLine(until time.Time) string {
	return fmt.Sprintf("~%d\n", (max(0, time.Until(until)) + time.Millisecond - 1).Milliseconds())
}

func rankLine(p Entry) string { return fmt.Sprintf("+%d %d %d\n", p.pid, p.start, p.session) }

// tell writes a line to the guard. The caller holds g.mu. If the write fails, the
// guard is dead or stopped: keep notices a dead guard, and a stopped one still
// has the marker.
func (g *Guard) tell(line string) {
	_ = g.pipe.SetWriteDeadline(time.Now().Add(guardPatience))
	if _, err := io.WriteString(g.pipe, line); err != nil {
		g.log.Warn("guard does not read", "error", err)
	}
}

// Await waits until the guard ignores signals that end programs, or a few seconds. A
// scheduler signals a job when its ranks run: call Await before they start.
func (g *Guard) Await() {
	g.mu.Lock()
	ready := g.ready
	g.mu.Unlock()
	<-ready
}

// Watch tells the guard that a rank was started.
func (g *Guard) Watch(p Entry) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ranks[p.pid] = p
	g.tell(rankLine(p))
}

// LiveUntil sets the time at which the guard kills all ranks, unless it is set again
// before. It is measured with the monotonic clock.
func (g *Guard) LiveUntil(until time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.until = until
	g.tell(deadlineLine(until))
}

// Kills returns how often a guard has killed the ranks because their deadline had passed. The trainer may have
// extended it too late. A guard tells it before it kills: a rank that has ended by it counts.
func (g *Guard) Kills() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hear()
	return g.kills
}

// hear takes what the guard has written. The caller holds g.mu.
func (g *Guard) hear() {
	select {
	case <-g.ready:
	default:
		return // it has no ranks yet
	}
	raw, err := g.answers.SyscallConn()
	if err != nil || g.answers.SetReadDeadline(time.Time{}) != nil {
		return // it was stopped
	}
	text := make([]byte, 4096)
	_ = raw.Read(func(fd uintptr) bool {
		n, _ := unix.Read(int(fd), text) //nolint:gosec // a descriptor is small
		g.kills += bytes.Count(text[:max(n, 0)], []byte(killsMark))
		return true // it does not wait
	})
}

// Release tells the guard that no process of any rank is left.
func (g *Guard) Release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for pid := range g.ranks {
		g.tell(fmt.Sprintf("-%d\n", pid))
	}
	clear(g.ranks)
}

// Stop ends the guard in order: it makes one last pass.
func (g *Guard) Stop() {
	close(g.quit)
	g.mu.Lock()
	_ = g.pipe.Close()
	last := g.cmd.Process
	g.mu.Unlock()
	select {
	case <-g.done:
	case <-time.After(guardPatience):
		g.log.Warn("guard does not end; killing it", "pid", last.Pid)
		_ = last.Kill() // it may have ended meanwhile
		<-g.done
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.hear()
	_ = g.answers.Close()
}

// killsMark is what a guard writes before it kills ranks at their deadline.
const killsMark = "k"

// RunGuard waits until standard input ends, because the trainer of the job ended
// or was killed, and kills the remaining processes of the job. On standard input
// the trainer lists its ranks:
//
//	+PID START SESSION   a rank was started, the leader of its group; START,
//	                     from /proc/PID/stat, distinguishes it from a later
//	                     process with the same PID
//	-PID                 no process of that rank or its group is left
//	~MS                  the ranks may live for MS milliseconds from now
//
// The processes have the variables of, as NAME=VALUE, in their environment.
//
// A rank that the trainer had no time to list is found by its marker.
//
// The guard ignores signals that end programs: schedulers send them to every
// process of a job, and the guard must outlive its trainer. It writes a line to
// standard output when it ignores them, and a k before it kills ranks at their deadline.
func RunGuard(ctx context.Context, stdin io.Reader, stdout io.Writer, job string, of ...string) error {
	signal.Ignore(endings...)
	signal.Ignore(syscall.SIGPIPE) // the trainer may have ended
	_, _ = io.WriteString(stdout, "\n")
	ranks := map[int]Entry{}
	kill := func() error {
		h := NewHunt(job).Of(of...)
		for _, p := range ranks {
			h.Add(p)
		}
		if err := h.Kill(ctx); err != nil {
			return fmt.Errorf("guard: %w", err)
		}
		return nil
	}
	lines, ended := make(chan string), make(chan error, 1)
	go func() {
		in := bufio.NewScanner(stdin)
		for in.Scan() {
			lines <- in.Text()
		}
		ended <- in.Err()
	}()
	deadline := time.NewTimer(0)
	deadline.Stop()
	late := false // the deadline has passed: no rank may start
	for {
		select {
		case line := <-lines:
			var p Entry
			var left int64
			if n, _ := fmt.Sscanf(line, "+%d %d %d", &p.pid, &p.start, &p.session); n == 3 {
				p.group = p.pid
				ranks[p.pid] = p
				if late {
					deadline.Reset(0)
				}
			} else if n, _ := fmt.Sscanf(line, "-%d", &p.pid); n == 1 {
				delete(ranks, p.pid)
			} else if n, _ := fmt.Sscanf(line, "~%d", &left); n == 1 {
				late = false
				deadline.Reset(time.Duration(left) * time.Millisecond)
			}
		case <-deadline.C:
			late = true
			_, _ = io.WriteString(stdout, killsMark) // the trainer may have ended
			if err := kill(); err != nil {
				return err
			}
		case err := <-ended:
			if kerr := kill(); kerr != nil {
				return kerr
			}
			if err != nil {
				return fmt.Errorf("guard: %w", err)
			}
			return nil
		}
	}
}
