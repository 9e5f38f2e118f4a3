package launch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
)

// deafUntil is a log that takes no facts of some kinds, from the n-th on, until
// allowed.
type deafUntil struct {
	session.Log
	kinds []events.Kind
	after int64
	seen  *atomic.Int64
	open  chan struct{}
}

// Append implements session.Log.
func (l deafUntil) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		if slices.Contains(l.kinds, f.Kind) && l.seen.Add(1) > l.after {
			select {
			case <-l.open:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	return l.Log.Append(ctx, facts...)
}

var trainsOn = workerRole("trains on", func(ctx context.Context, c *client.Client) error {
	if err := save(ctx, c, 0); err != nil {
		return err
	}
	for step := int64(1); step < 3; step++ {
		if _, err := c.Save(ctx, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{}); err != nil {
			return err
		}
	}
	emit("trained on")
	return nil
})

// A later save by the same plan waits neither for the log nor for another rank;
// sealed saves are committed nevertheless.
func TestSteadySaveWaitsForNothing(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, trainsOn...)
	open := make(chan struct{})
	j.store.Log = deafUntil{
		j.store.Log,
		[]events.Kind{events.LocalPlan{}.Kind(), events.WriteSealed{}.Kind(), events.GlobalPlan{}.Kind(), events.WriteCompleted{}.Kind()},
		7, new(atomic.Int64), open, // the first save is two plans, two seals, a global plan, two writes
	}
	j.start()
	j.out.await(t, 1, "[rank0] trained on")
	j.out.await(t, 1, "[rank1] trained on")
	wantEnded(t, []string{"step-0.a1"}, nil)
	close(open)
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	wantCommitted(t, "step-0.a1", "step-1.a1", "step-2.a1")
	if trial := trialOf(t); trial.Head != "step-2.a1" {
		t.Errorf("trial %+v", trial)
	}
}

// lateSeals takes its time with seals.
type lateSeals struct{ session.Log }

// Append implements session.Log.
func (l lateSeals) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if slices.ContainsFunc(facts, func(f events.Fact) bool { return f.Kind == (events.WriteSealed{}).Kind() }) {
		select {
		case <-time.After(shortly):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A worker that knows that its bytes are sealed may end at once: the log records
// its end after its seal.
func TestSealBeforeTheEnd(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesAndEnds...)
	j.store.Log = lateSeals{j.store.Log}
	j.must()
	wantEnded(t, []string{"step-1.a1"}, nil)
}

// refusesSecond refuses the facts of a kind about the second save until room.
type refusesSecond struct {
	session.Log
	kind events.Kind
	why  error
	room func() bool // nil: there is never any
}

// Append implements session.Log.
func (l refusesSecond) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		if f.Kind == l.kind && strings.Contains(string(f.Data), `"step-2.a1"`) && (l.room == nil || !l.room()) {
			return nil, l.why
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A fact of a steady save that the log has no room for waits, in its place: later
// facts of the rank come after it.
func TestFullForSteadySaves(t *testing.T) {
	t.Parallel()
	for _, kind := range []events.Kind{events.LocalPlan{}.Kind(), events.WriteSealed{}.Kind()} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, savesThrice...)
			j.cfg.StagingSlots = 1
			j.store.Log = refusesSecond{j.store.Log, kind, errFull, func() bool {
				return strings.Contains(j.log.String(), "log has no room; retrying")
			}}
			j.must()
			wantText(t, j.log, "log has room again")
			wantEnded(t, []string{"step-1.a1", "step-2.a1", "step-3.a1"}, nil)
		})
	}
}

var sealsLate = workerRole("seals late", func(ctx context.Context, c *client.Client) error {
	if err := save(ctx, c, 0); err != nil {
		return err
	}
	if c.Rank == 1 { // and never saves step 1
		return errors.Join(meet(ctx, c), save(ctx, c, 2))
	}
	late, err := c.Begin(ctx, 1, state(1, 0, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := late.Wait(ctx, client.Committed); err == nil {
		return errors.New("a save without rank 1 was committed")
	}
	s, err := c.Save(ctx, 2, state(2, 0, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	// The slot of the next save is sealed, and not written yet.
	if err := late.Seal(ctx); err == nil || !strings.Contains(err.Error(), "aborted") {
		return fmt.Errorf("a seal after the abort: %w", err)
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if err := s.Wait(ctx, client.Committed); err != nil {
		return err
	}
	emit("done")
	return nil
})

var checksLate = workerRole("checks what was sealed late", func(ctx context.Context, c *client.Client) error {
	return load(ctx, c, "step-2", 2)
})

// A worker that copies after its save was aborted does not change what the
// next save has sealed in the same slot.
func TestLateCopy(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, sealsLate...)
	j.cfg.StagingSlots, j.cfg.SaveTimeout = 1, 2*saveEnds
	j.must()
	wantEnded(t, []string{"step-0.a1", "step-2.a1"}, []string{"step-1.a1"})
	newJob(t, 2, checksLate...).must()
}
