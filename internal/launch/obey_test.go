package launch_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
)

// spreadOver is spread(1, 1) with another log for node 1.
func (j *job) spreadOver(change func(*session.Store), configure func(*launch.Config)) *follower {
	t := j.t
	t.Helper()
	j.coordinate(1, 1)
	endpoint := j.cfg.Endpoint
	f := &follower{out: newTranscript(), log: newTranscript(), done: make(chan error, 1)}
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	contact := &process.Contact{}
	cfg := config(j.cfg.Run, 1, j.cfg.Command, f.out, f.log)
	cfg.Job, cfg.Contact, cfg.Port = j.cfg.Job, contact, port
	cfg.Logger = slog.New(slog.NewTextHandler(f.log, nil))
	configure(&cfg)
	f.link = j.join(1, cfg, contact)
	memory, err := os.MkdirTemp("/dev/shm", "ckptstore-test-")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	f.stop = stop
	own := storeOf(home, memory)
	change(&own)
	go func() { f.done <- launch.Follow(ctx, cfg, own, f.link) }()
	t.Cleanup(func() {
		_ = endpoint.Close()
		stop()
		err := <-f.done
		f.link.Close()
		_ = os.RemoveAll(memory)
		if t.Failed() {
			t.Logf("node 1 ended: %v; its workers:\n%strainer:\n%s", err, f.out, f.log)
		}
	})
	return f
}

// What holds for a log that refuses an attempt holds for the log of another node too.
func TestLogRefusesAttemptOfAnotherNode(t *testing.T) {
	t.Parallel()
	for _, kind := range []events.Kind{(events.WriteCompleted{}).Kind()} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, savesTwoSteps...)
			log := &onceLog{Log: home.Log, kind: kind}
			j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts = 0, 1
			j.cfg.Grace, j.cfg.DrainTimeout = 2*time.Second, 30*time.Second
			j.spreadOver(func(s *session.Store) { s.Log = log }, func(c *launch.Config) { c.Grace = 2 * time.Second })
			j.start()
			err := j.wait()
			if !log.refused.Load() {
				t.Fatal("the log has refused nothing")
			}
			stopped := bodiesOf[events.GroupStopped](t, runOf(t))
			t.Logf("group.stopped: %+v, error %v", stopped, err)
			if err != nil || len(stopped) != 2 || stopped[0].Failure != "infrastructure" {
				t.Errorf("error %v, group.stopped: %+v; want an infrastructure failure and a second attempt", err, stopped)
			}
		})
	}
}

// muteLog does not answer while it is mute.
type muteLog struct {
	session.Log
	mute *atomic.Bool
}

func (l muteLog) silent(ctx context.Context) error {
	if !l.mute.Load() {
		return nil
	}
	select {
	case <-time.After(300 * time.Millisecond):
		return errSilent
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Append implements session.Log.
func (l muteLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if err := l.silent(ctx); err != nil {
		return nil, fmt.Errorf("append: %w", err)
	}
	return l.Log.Append(ctx, facts...)
}

// Decide implements session.Log.
func (l muteLog) Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error) {
	if err := l.silent(ctx); err != nil {
		return 0, fmt.Errorf("decide: %w", err)
	}
	return l.Log.Decide(ctx, d, after)
}

var rank0FailsLate = workerRole("rank 0 fails after a while, rank 1 obeys", func(ctx context.Context, c *client.Client) error {
	if c.Resume != "" || c.Attempt > 1 {
		return nil
	}
	emit("ready")
	if c.Rank == 0 {
		<-time.After(2 * time.Second)
		return errors.New("fails")
	}
	<-time.After(patience)
	return nil
})

// A log that does not answer for a while does not cost a node its membership.
func TestSilentLogExpelsNobody(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, rank0FailsLate...)
	var mute atomic.Bool
	unserved := func(err error) bool { return errors.Is(err, errSilent) }
	j.store.Log, j.store.Unserved = muteLog{home.Log, &mute}, unserved
	j.cfg.MaxRestarts, j.cfg.Grace, j.cfg.DrainTimeout = 1, 2*time.Second, 2*time.Second
	other := j.spreadOver(func(s *session.Store) { s.Log, s.Unserved = muteLog{home.Log, &mute}, unserved },
		func(c *launch.Config) { c.Grace, c.DrainTimeout = 2*time.Second, 2*time.Second })
	j.start()
	other.out.await(t, 1, "[rank1] ready")
	mute.Store(true) // before rank 0 fails
	time.AfterFunc(10*time.Second, func() { mute.Store(false) })
	select {
	case <-other.link.Done():
		t.Errorf("node 1, which had ended its processes in time, was expelled: %v", other.link.Err())
	case <-time.After(13 * time.Second):
	}
	j.cancel(errors.New("the test is over"))
	_ = j.wait()
}

// slowLeave takes a while to append that a node has left.
type slowLeave struct{ session.Log }

// Append implements [session.Log].
func (l slowLeave) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		if f.Kind == (events.NodeLeft{}).Kind() {
			<-time.After(time.Second)
			break
		}
	}
	return l.Log.Append(ctx, facts...)
}

var rank0SavesAlone = workerRole("rank 0 saves alone", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		emit("ready")
		<-ctx.Done()
		return ctx.Err()
	}
	for step := int64(1); ctx.Err() == nil; step++ {
		s, err := c.Save(ctx, step, state(step, 0, 1), client.SaveOptions{Participants: []int{0}})
		if err != nil {
			return err
		}
		if err := s.Wait(ctx, client.Committed); err != nil {
			return err
		}
	}
	return ctx.Err()
})

// A node that leaves is recorded once, and not as lost.
func TestNodeLeavesOnce(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, rank0SavesAlone...)
	j.cfg.MaxInfraRestarts = 0
	j.store.Log = slowLeave{home.Log}
	other := j.spread(1, 1)[0]
	j.start()
	other.out.await(t, 1, "[rank1] ready")
	<-time.After(500 * time.Millisecond)
	if err := other.link.Leave(t.Context(), "the test"); err != nil {
		t.Fatal(err)
	}
	err := j.wait()
	left := 0
	for _, r := range logOf(t, runOf(t)) {
		body, berr := r.Body()
		if berr != nil {
			t.Fatal(berr)
		}
		if b, ok := body.(*events.NodeLeft); ok && b.Node == 1 {
			left++
			t.Logf("%+v", *b)
		}
	}
	exited := bodiesOf[events.WorkerExited](t, runOf(t))
	t.Logf("job: %v; %d exits in the log", err, len(exited))
	if left != 1 || len(exited) != 2 {
		t.Errorf("%d departures and %d exits, want 1 and 2", left, len(exited))
	}
}

// A node that has ended its processes, and has reported it, is not expelled while the
// coordinating process waits for its own log.
func TestNodeThatHasObeyedStays(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, rank0FailsLate...)
	var mute atomic.Bool
	unserved := func(err error) bool { return errors.Is(err, errSilent) }
	j.store.Log, j.store.Unserved = muteLog{home.Log, &mute}, unserved
	j.cfg.MaxRestarts, j.cfg.Grace, j.cfg.DrainTimeout = 1, time.Second, time.Second
	other := j.spreadOver(func(*session.Store) {}, func(c *launch.Config) { c.Grace, c.DrainTimeout = time.Second, time.Second })
	j.start()
	other.out.await(t, 1, "[rank1] ready")
	mute.Store(true) // before rank 0 fails
	time.AfterFunc(9*time.Second, func() { mute.Store(false) })
	if err := j.wait(); err != nil {
		t.Errorf("the job: %v", err)
	}
	if n := len(bodiesOf[events.NodeLeft](t, runOf(t))); n > 1 { // node 0 leaves at the end
		t.Errorf("%d nodes have left", n-1)
	}
}

// The loss of a node ends the ranks of the others at once, also if the log does not answer: they may be
// cut off with this process, and the others may start another group.
func TestLossEndsGroupWithoutLog(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, waitsForEnd...)
	j.cfg.MaxInfraRestarts = 0
	var mute atomic.Bool
	j.store.Log, j.store.Unserved = muteLog{home.Log, &mute}, func(err error) bool { return errors.Is(err, errSilent) }
	others := j.spread(1, 1, 1)
	j.start()
	others[0].out.await(t, 1, "[rank1] ready")
	others[1].out.await(t, 1, "[rank2] ready")
	mute.Store(true)
	if err := others[0].link.Leave(t.Context(), "the test"); err != nil {
		t.Fatal(err)
	}
	awaitText(t, others[1].log, "stopping workers")
	mute.Store(false)
	var failed *launch.FailedError
	if err := j.wait(); !errors.As(err, &failed) || failed.Kind != blame.Infrastructure {
		t.Errorf("the job: %v", err)
	}
}

var waitsForEnd = workerRole("waits to be ended, on three nodes", func(ctx context.Context, _ *client.Client) error {
	emit("ready")
	<-ctx.Done()
	return ctx.Err()
})

// A node whose ranks have all ended well, and that then hangs, does not keep the job for ever.
func TestNodeHangsAfterGoodEnd(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, endsWell...)
	j.cfg.MaxRestarts, j.cfg.Grace, j.cfg.DrainTimeout = 0, time.Second, time.Second
	link := j.beatsOnly()
	j.start()
	<-link.Commands() // start
	if err := errors.Join(link.Tell("hello", map[string]int{"attempt": 1}), link.Tell("exited", map[string]any{"attempt": 1, "rank": 1, "how": "rank 1 ended"})); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-j.done:
		j.ended = true
		if err == nil {
			t.Error("the job has ended well")
		}
	case <-time.After(20 * time.Second):
		t.Error("20 s after all ranks have ended the job still waits for node 1; a node that obeys takes 2 s at most")
	}
}

var endsWell = workerRole("ends well", func(context.Context, *client.Client) error { return nil })
