package trainer

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/backstop"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// stopSignals turns signals into the end of the program's context. While a job
// can be preempted, the first SIGTERM or SIGUSR1 preempts it instead.
type stopSignals struct {
	caught chan os.Signal

	mu      sync.Mutex
	preempt chan<- launch.StopRequest // nil: the program can only be stopped
	sent    bool                      // a preemption
	termed  bool                      // by a SIGTERM
	ends    endTimes
}

// untilSignal ends the context at the first signal that requests it, with the
// signal as its cause. A second signal has its default effect and kills.
func untilSignal(ctx context.Context) (context.Context, *stopSignals, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	s := &stopSignals{caught: make(chan os.Signal, 4)}
	s.ends.defaults()
	signal.Notify(s.caught, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(s.caught, syscall.SIGHUP)
	}
	go func() {
		for {
			select {
			case sig := <-s.caught:
				if s.preempts(sig.(syscall.Signal)) {
					continue
				}
				signal.Stop(s.caught)
				s.mu.Lock()
				s.ends.arm(sig.(syscall.Signal), s.ends.stop)
				s.mu.Unlock()
				cancel(signaled{sig.(syscall.Signal)})
			case <-ctx.Done():
			}
			return
		}
	}()
	return ctx, s, func() {
		signal.Stop(s.caught)
		cancel(nil)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ends.disarm()
	}
}

// preempts reports whether sig preempts the running job. Schedulers repeat
// SIGUSR1, and send SIGTERM after it, while the workers may still save: only a
// second SIGTERM stops them.
func (s *stopSignals) preempts(sig syscall.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.preempt == nil || sig != syscall.SIGTERM && sig != syscall.SIGUSR1 {
		return false
	}
	again := s.termed
	s.termed = s.termed || sig == syscall.SIGTERM
	if s.sent {
		return sig == syscall.SIGUSR1 || !again
	}
	s.sent = true
	s.ends.arm(sig, s.ends.preempt)
	s.preempt <- launch.StopRequest{Preempt: true, Reason: signaled{sig}.Error(), Signal: unix.SignalName(sig)} // the channel has room for the only request
	return true
}

// leave stops catching signals: they have their default effect again.
func (s *stopSignals) leave() { signal.Stop(s.caught) }

// preemptible makes signals preempt a job, which receives the requests.
func (s *stopSignals) preemptible() <-chan launch.StopRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	requests := make(chan launch.StopRequest, 1)
	s.preempt = requests
	return requests
}

// signaled is the cause of a context that a signal ended.
type signaled struct{ sig syscall.Signal }

func (s signaled) Error() string { return "told to stop by " + unix.SignalName(s.sig) }

// windUp is how long a job may take to record its end and to close the store,
// after its workers have ended and its staged saves are finished.
const windUp = 30 * time.Second

// endTimes bound how long the program may take to end after a signal. After that
// it exits: a disk or a log that does not answer must not occupy a node. The
// guard of a job kills the workers, and the next job recovers what was staged. A
// program without a job has no limit: a guard ends with its trainer.
type endTimes struct {
	stderr  io.Writer
	preempt time.Duration // from the first SIGTERM or SIGUSR1 to a job
	stop    time.Duration // from any other signal
	disarm  func() bool
}

func (e *endTimes) defaults() {
	e.stderr, e.disarm = os.Stderr, func() bool { return false }
}

// ofJob sets the times that a job may need.
func (s *stopSignals) ofJob(cfg launch.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends.stderr = io.MultiWriter(os.Stderr, causeWriter{})
	s.ends.stop = cfg.Grace + cfg.DrainTimeout + windUp
	s.ends.preempt = s.ends.stop + cfg.PreemptGrace
}

// arm starts the countdown. The caller holds s.mu.
func (e *endTimes) arm(sig unix.Signal, limit time.Duration) {
	if limit == 0 {
		return
	}
	e.disarm()
	e.disarm = backstop.After(limit, e.stderr, "trainer", fmt.Sprint("told to stop by ", unix.SignalName(sig)), 128+int(sig))
}
