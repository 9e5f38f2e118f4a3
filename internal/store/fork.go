package store

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/projections"
)

// RunExistsError says that a run cannot be made, because there is one.
type RunExistsError struct{ Run string }

func (e *RunExistsError) Error() string {
	return fmt.Sprintf("run %q exists: choose another name, or continue it with `ckptstore continue %s`", e.Run, e.Run)
}

// ProblemKind returns [problem.Conflict].
func (*RunExistsError) ProblemKind() problem.Kind { return problem.Conflict }

// Fork makes a run that begins with a committed checkpoint of another one. Its
// trial has that trial's configuration, with what set says in its place and
// without secrets, and both are one decision. The checkpoint is pinned before, so that no policy
// deletes it in between; a pin that it has already stays as it is. The result
// is the new trial.
func (s *Store) Fork(ctx context.Context, ref, run string, set map[string]any) (projections.Trial, error) {
	var none projections.Trial
	if err := ValidRun(run); err != nil {
		return none, fmt.Errorf("%w: fork to run %q: %w", projections.ErrReference, run, err)
	}
	exists := func() error {
		_, err := query.Ask(ctx, s.Views(), query.Run, query.Params{Run: run})
		switch {
		case err == nil:
			return &RunExistsError{run}
		case errors.Is(err, projections.ErrNotFound):
			return nil
		}
		return err
	}
	if err := exists(); err != nil {
		return none, err
	}
	pinned := false
	c, err := s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if pinned = !c.Pinned; !pinned {
			return nil, nil
		}
		return &events.CheckpointPinned{Checkpoint: c.ID, Reason: "fork " + run}, nil
	})
	if err != nil {
		return none, err
	}
	q := Queries{s.Views()}
	source, err := q.Trial(ctx, c.Run, c.Trial)
	if err != nil {
		return none, err
	}
	config := map[string]any{}
	maps.Copy(config, source.Config)
	maps.Copy(config, set)
	config = redact.Names{}.Config(config)
	// On the condition that the new lane is empty: of two forks to the same
	// name, and of a fork and a job, one is first.
	_, err = s.decideAfter(ctx, projections.Checkpoint{Run: run, Trial: projections.DefaultTrial}, 0, &events.TrialCreated{
		Config: config, Parent: &events.TrialParent{Run: c.Run, Trial: c.Trial, Checkpoint: c.ID},
	})
	if errors.Is(err, jetlog.ErrConflict) {
		err = &RunExistsError{run}
	}
	if err != nil && pinned {
		_, uerr := s.Unpin(ctx, c.Run+"/"+c.Trial+"@"+c.ID)
		err = errors.Join(err, uerr)
	}
	if err != nil {
		return none, fmt.Errorf("fork %s to run %q: %w", ref, run, err)
	}
	return q.Trial(ctx, run, projections.DefaultTrial)
}
