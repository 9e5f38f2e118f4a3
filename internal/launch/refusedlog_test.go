package launch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// onceLog refuses one fact of a kind for good, and does not answer the decision
// after it a few times.
type onceLog struct {
	session.Log
	kind    events.Kind
	refused atomic.Bool
	silent  atomic.Int32
}

var (
	errRefused = errors.New("the server refuses it")
	errSilent  = errors.New("no answer")
)

// Append implements session.Log.
func (l *onceLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		if f.Kind == l.kind && l.refused.CompareAndSwap(false, true) {
			return nil, errRefused
		}
	}
	return l.Log.Append(ctx, facts...)
}

// Decide implements session.Log.
func (l *onceLog) Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error) {
	if l.refused.Load() && l.silent.Add(-1) >= 0 {
		return 0, fmt.Errorf("decide: %w", errSilent)
	}
	return l.Log.Decide(ctx, d, after)
}

var savesTwoSteps = workerRole("saves twice, whatever becomes of it", func(ctx context.Context, c *client.Client) error {
	for step := range int64(2) {
		s, err := c.Save(ctx, step+1, state(step, c.Rank, c.WorldSize), client.SaveOptions{})
		if err == nil {
			err = s.Wait(ctx, client.Committed)
		}
		if err != nil {
			return err
		}
	}
	return nil
})

// A log that refuses an attempt's events is no fault of the workers, and no
// reason to end the job: the next attempt continues from the last checkpoint, out
// of the infrastructure's budget. No save of the previous attempt stays open.
func TestLogRefusesAttempt(t *testing.T) {
	t.Parallel()
	for _, kind := range []events.Kind{(events.GlobalPlan{}).Kind(), (events.WriteCompleted{}).Kind(), (events.TrainingStarted{}).Kind()} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, savesTwoSteps...)
			log := &onceLog{Log: home.Log, kind: kind}
			log.silent.Store(3)
			j.store.Log, j.store.Unserved = log, func(err error) bool { return errors.Is(err, errSilent) }
			j.cfg.MaxRestarts, j.cfg.MaxInfraRestarts = 0, 1
			j.must()
			if !log.refused.Load() || log.silent.Load() >= 0 {
				t.Fatal("the log has refused nothing, or was always served")
			}
			stopped := bodiesOf[events.GroupStopped](t, runOf(t))
			if len(stopped) != 2 || stopped[0].Failure != "infrastructure" || !strings.Contains(stopped[0].Reason, errRefused.Error()) || stopped[1].Failure != "" {
				t.Errorf("group.stopped: %+v", stopped)
			}
			if trial := trialOf(t); trial.Status != projections.Completed || trial.Attempt != 2 {
				t.Errorf("trial %+v", trial)
			}
			committed, aborted := ended(t, runOf(t))
			begun := bodiesOf[events.CheckpointBegun](t, runOf(t))
			if len(committed) < 2 || len(committed)+len(aborted) != len(begun) {
				t.Errorf("%d saves begun, committed %q, aborted %q", len(begun), committed, aborted)
			}
		})
	}
}
