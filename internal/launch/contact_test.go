package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// silence holds the beats of a node from begin to end.
type silence struct{ sync.Mutex }

// begin returns when the node takes its coordinator for silent.
func (s *silence) begin(link *nodes.Link) {
	s.Lock()
	<-link.Silent()
}

// end returns when the node's beats are answered again.
func (s *silence) end(link *nodes.Link) {
	s.Unlock()
	<-link.Contact()
}

// An order that comes in the last moments of a silence, as the answer to a request that a short cut has delayed,
// is obeyed once beats are answered.
func TestOrderInSilence(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, endsWell...)
	j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts = 0, 0
	var s silence
	j.beaten = func() { s.Lock(); s.Unlock() } //nolint:staticcheck // it waits
	other := j.spread(1, 1)[0]
	s.begin(other.link)
	j.start()
	awaitText(t, j.log, "attempt started")
	<-time.After(500 * time.Millisecond) // the order is there
	s.end(other.link)
	if err := j.wait(); err != nil {
		t.Error(err)
	}
}

// A hook that the silence of the coordinator ends is no failure of the workers.
func TestSilenceDuringHook(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, endsWell...)
	j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts = 0, 1
	var s silence
	j.beaten = func() { s.Lock(); s.Unlock() } //nolint:staticcheck // it waits
	begun := make(chan struct{})
	j.differs = func(index int, cfg *launch.Config, _ *session.Store) {
		if index != 1 {
			return
		}
		cfg.InitHook = func(ctx context.Context, g *backend.Group) error {
			if g.Attempt > 1 {
				return nil
			}
			close(begun)
			<-ctx.Done()
			return context.Cause(ctx)
		}
	}
	other := j.spread(1, 1)[0]
	j.start()
	<-begun
	s.begin(other.link)
	s.end(other.link)
	if err := j.wait(); err != nil {
		t.Error(err)
	}
	wantText(t, j.log, "init hook: the coordinating node does not answer")
}

// Answers to beats come, and the guard hears of them too late: it kills the ranks. That is no failure of the workers.
func TestAnswersTooLateForTheGuard(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, waitsOnce...)
	j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts = 0, 1
	var runs atomic.Bool
	j.unheard = func(c *process.Contact) bool { return runs.Load() && c.Lapsed() < 2 } // the deadline has passed, and the guard has killed
	j.spread(1, 1)
	j.start()
	awaitText(t, j.out, "ready")
	runs.Store(true)
	if err := j.wait(); err != nil {
		t.Error(err)
	}
	wantText(t, j.log, "the coordinating node does not answer")
}

// slowStart takes its time to append that a training has started.
type slowStart struct {
	session.Log
	appending chan struct{} // closed when it begins
	until     chan struct{} // closed when it may end
}

// Append implements [session.Log].
func (l slowStart) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if len(facts) > 0 && facts[0].Kind == (events.TrainingStarted{}).Kind() {
		close(l.appending)
		<-l.until
	}
	return l.Log.Append(ctx, facts...)
}

var waitsForKill = workerRole("waits to be killed", func(ctx context.Context, _ *client.Client) error {
	emit("process %d.", os.Getpid())
	<-ctx.Done()
	return ctx.Err()
})

// A rank of one node ends because another node has lost its contact, while the log is slow: the lost contact is the
// cause, and no worker is at fault.
func TestLostContactBeforeFailedRank(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, waitsForKill...)
	j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts, j.cfg.DrainTimeout, j.cfg.Grace = 0, 0, time.Second, time.Second
	log := slowStart{home.Log, make(chan struct{}), make(chan struct{})}
	j.store.Log = log
	link := j.beatsOnly()
	j.start()
	<-link.Commands() // start
	if err := link.Tell("hello", map[string]int{"attempt": 1}); err != nil {
		t.Fatal(err)
	}
	<-log.appending
	end := map[string]any{"attempt": 1, "failed": true, "rank": -1, "kind": "infrastructure", "cause": "the coordinating node does not answer"}
	if err := link.Tell("failed", end); err != nil {
		t.Fatal(err)
	}
	awaitText(t, j.out, ".\n")
	var pid int
	_, said, _ := strings.Cut(j.out.String(), "process ")
	if _, err := fmt.Sscanf(said, "%d.", &pid); err != nil {
		t.Fatalf("%q: %v", j.out, err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-time.After(500 * time.Millisecond) // both ends are there
	close(log.until)
	if err := errors.Join(link.Tell("stopped", end), link.Tell("closed", map[string]int{"attempt": 1})); err != nil {
		t.Fatal(err)
	}
	var failed *launch.FailedError
	if err := j.wait(); !errors.As(err, &failed) || failed.Kind != blame.Infrastructure {
		t.Errorf("the job: %v", err)
	}
}
