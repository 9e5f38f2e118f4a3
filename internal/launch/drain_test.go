package launch_test

import (
	"context"
	"errors"
	"iter"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
)

var savesAndEnds = workerRole("saves and ends", func(ctx context.Context, c *client.Client) error {
	_, err := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{})
	return err
})

// slowLog is a log whose followers learn of a run's saves only after its last
// worker has ended, and then only after a while or at the attempt's end.
type slowLog struct {
	session.Log
	workers int
	mu      sync.Mutex
	free    chan struct{}
}

// Append implements session.Log.
func (l *slowLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	seqs, err := l.Log.Append(ctx, facts...)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range facts {
		if f.Kind == (events.WorkerExited{}).Kind() {
			if l.workers--; l.workers == 0 {
				time.AfterFunc(shortly, sync.OnceFunc(func() { close(l.free) }))
			}
		}
	}
	return seqs, err
}

// ReadTrial implements session.Log.
func (l *slowLog) ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	if until != 0 {
		return l.Log.ReadTrial(ctx, of, from, until)
	}
	return func(yield func(events.Recorded, error) bool) {
		for r, err := range l.Log.ReadTrial(ctx, of, from, until) {
			if r.Kind.Family() == "plan" || r.Kind.Family() == "write" {
				select {
				case <-l.free:
				case <-ctx.Done():
				}
			}
			if !yield(r, err) {
				return
			}
		}
	}
}

// Saves that all ranks had sealed when they ended are committed before the job
// ends, however late the coordinator learns of them.
func TestSaveBeforeTheEnd(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesAndEnds...)
	j.store.Log = &slowLog{Log: home.Log, workers: 2, free: make(chan struct{})}
	j.must()
	wantEnded(t, []string{"step-1.a1"}, nil)
	if trial := trialOf(t); trial.Head != "step-1.a1" || trial.Status != "completed" {
		t.Errorf("trial %+v", trial)
	}
}

// A save that cannot be written before the drain's deadline is aborted, and the
// job reports that it is lost.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, savesAndEnds...)
	j.cfg.DrainTimeout = saveEnds
	g := j.gated("r00000.safetensors")
	j.start()
	g.await(t)
	awaitText(t, j.log, "staged saves abandoned")
	close(g.open)
	j.lost(j.wait(), "step-1.a1")
	wantEnded(t, nil, []string{"step-1.a1"})
}

var diesInSave = workerRole("dies in a save", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		return load(ctx, c, "", 1)
	}
	// The first save is sealed by all; the second by rank 0 alone.
	if _, err := c.Save(ctx, 1, state(1, c.Rank, 2), client.SaveOptions{}); err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	s, err := c.Begin(ctx, 2, state(2, c.Rank, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := s.Wait(ctx, client.Begun); err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if c.Rank == 1 {
		return errors.New("a bug")
	}
	return errors.Join(s.Seal(ctx), untilTerm(ctx))
})

// When a rank dies, saves that all ranks had sealed are committed, the rest is
// aborted with that rank's name, and the next attempt resumes from the former.
func TestDeathInSave(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, diesInSave...)
	j.cfg.MaxRestarts = 1
	j.must()
	wantEnded(t, []string{"step-1.a1"}, []string{"step-2.a1"})
	wantText(t, j.out, "[rank0] resumes step-1.a1", "[rank1] resumes step-1.a1")
	if got := one[events.CheckpointAborted](t, runOf(t)); len(got.Ranks) != 1 || got.Ranks[0] != 1 {
		t.Errorf("checkpoint.aborted: %+v", got)
	}
}
