package worker_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/worker"
	"github.com/ckptstore/ckptstore/worker/client"
)

// fullLog is the log of a disk that is nearly full: it refuses facts of some
// kinds, and takes decisions.
type fullLog struct {
	worker.Log
	refuses []events.Body
}

var errFull = fmt.Errorf("the disk of the store has no room: %w", syscall.ENOSPC)

// Append implements worker.Log.
func (l fullLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		for _, b := range l.refuses {
			if f.Kind == b.Kind() {
				return nil, errFull
			}
		}
	}
	return l.Log.Append(ctx, facts...)
}

// A worker's end that the log has no room for is not restarted; the trial's
// end is in the log, and the error names the worker and the disk.
func TestFullAtWorkersEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		script string
		status projections.Status
		says   string
	}{
		{"exit 3", projections.Errored, "exited with code 3; the disk of the store has no room"},
		{"exit 0", projections.Paused, "the disk of the store has no room"},
	} {
		t.Run(c.script, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, shell(c.script)...)
			j.cfg.MaxRestarts = 3
			j.store.Log = fullLog{home.Log, []events.Body{events.WorkerExited{}, events.GroupStopped{}}}
			err := j.run()
			if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), c.says) || strings.Count(err.Error(), "no room") != 1 {
				t.Errorf("error %v", err)
			}
			if trial := trialOf(t); trial.Status != c.status || trial.Attempt != 1 || !strings.Contains(trial.Message, c.says) {
				t.Errorf("trial %+v", trial)
			}
		})
	}
}

var goesOn = workerRole("goes on ahead of its metrics", func(ctx context.Context, c *client.Client) error {
	for step := range int64(5) {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
	}
	say("five steps are done")
	return nil
})

// roomyLog is a fullLog that has room when the workers have got so far.
type roomyLog struct {
	fullLog
	far func() bool
}

// Append implements worker.Log.
func (l roomyLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if l.far() {
		return l.Log.Append(ctx, facts...)
	}
	return l.fullLog.Append(ctx, facts...)
}

// Metrics that the log has no room for wait for it, and the training goes on.
// Those for which there is none at its end are lost, which is said.
func TestFullForMetrics(t *testing.T) {
	t.Parallel()
	full := fullLog{home.Log, []events.Body{events.Metrics{}}}
	for name, c := range map[string]struct {
		room       bool
		iterations int
	}{"and there is room": {true, 5}, "and there is none": {false, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, goesOn...)
			j.store.Log = roomyLog{full, func() bool {
				return c.room && strings.Count(j.out.String(), "five steps are done") > 0
			}}
			j.must()
			wantText(t, j.log, "no room for metrics; they wait for it")
			if trial := trialOf(t); trial.Status != projections.Completed || trial.Iterations != c.iterations {
				t.Errorf("trial %+v", trial)
			}
			if said := strings.Contains(j.log.String(), "metrics refused by the log after their ranks went on"); said == c.room {
				t.Errorf("that metrics are lost was said: %v", said)
			}
		})
	}
}

var saveAborts = workerRole("save aborts", func(ctx context.Context, c *client.Client) error {
	err := save(ctx, c, 1)
	if err == nil || !strings.Contains(err.Error(), "no room") {
		return fmt.Errorf("error %w, want no room", err)
	}
	return meet(ctx, c)
})

// A save of which the log has no room for a fact is aborted at once, whichever
// fact it is, and the training goes on.
func TestFullForSaves(t *testing.T) {
	t.Parallel()
	for _, refused := range []events.Body{events.LocalPlan{}, events.GlobalPlan{}, events.WriteCompleted{}} {
		t.Run(string(refused.Kind()), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, saveAborts...)
			j.store.Log = fullLog{home.Log, []events.Body{refused, events.WriteFailed{}}}
			if refused.Kind() == (events.LocalPlan{}).Kind() {
				j.must() // the save had not begun, and said so
			} else {
				j.loses("step-1.a1")
			}
			if committed, _ := ended(t, runOf(t)); len(committed) > 0 {
				t.Errorf("committed %q", committed)
			}
		})
	}
}
