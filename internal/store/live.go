package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// LiveJob is the job that runs a run now, nil if none does: the one whose lease
// is held by a process of this machine that lives, or by one of another that
// has renewed it. A job that was killed on another machine is live until its
// lease expires.
func (s *Store) LiveJob(ctx context.Context, run string) (*RunningError, error) {
	held, err := s.Log.LeaseHolder(ctx, jetlog.RunLease(run))
	if err != nil || held == nil {
		return nil, err
	}
	var other holder
	if err := json.Unmarshal(held.Holder, &other); err != nil {
		return nil, fmt.Errorf("holder of run %q: %w", run, err)
	}
	me, err := thisProcess("")
	if err != nil {
		return nil, err
	}
	if dead(other, me) || held.Expired() && !other.near(me) {
		return nil, nil
	}
	return &RunningError{Run: run, Job: other.Job, Host: other.Host, PID: other.PID}, nil
}

// NotRunningError says that a run has no live job.
type NotRunningError struct{ Run string }

func (e *NotRunningError) Error() string {
	return fmt.Sprintf("run %q has no live job: see `ckptstore jobs %s`; `ckptstore continue %s` starts one", e.Run, e.Run, e.Run)
}

// ProblemKind returns [problem.Conflict].
func (*NotRunningError) ProblemKind() problem.Kind { return problem.Conflict }

// Stop asks the live job of a run to end. With preempt, it saves first. The
// decision is durable on return; the job obeys in its own time.
func (s *Store) Stop(ctx context.Context, run, trial, reason string, preempt bool) (*RunningError, error) {
	q := Queries{s.Views()}
	for range collectTries {
		live, err := s.LiveJob(ctx, run)
		if err != nil {
			return nil, err
		}
		if live == nil {
			return nil, &NotRunningError{run}
		}
		t, err := q.Trial(ctx, run, trial)
		if err != nil {
			return nil, err
		}
		_, err = s.decideAfter(ctx, projections.Checkpoint{Run: run, Trial: trial}, t.LaneSeq,
			&events.TrialStopRequested{Reason: reason, Preempt: preempt, Job: live.Job})
		if errors.Is(err, jetlog.ErrConflict) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask job %s of run %q to stop: %w", live.Job, run, err)
		}
		return live, nil
	}
	return nil, fmt.Errorf("ask run %q to stop: other decisions came first %d times; try again", run, collectTries)
}
