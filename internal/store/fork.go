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

// RunExistsError reports that a run cannot be made because it exists.
type RunExistsError struct{ Run string }

func (e *RunExistsError) Error() string {
	return fmt.Sprintf("run %q exists: choose another name, or continue it with `ckptstore continue %s`", e.Run, e.Run)
}

// ProblemKind returns [problem.Conflict].
func (*RunExistsError) ProblemKind() problem.Kind { return problem.Conflict }

// Fork makes a run that begins with a committed checkpoint of another run. Its trial has
// that trial's configuration, overridden by set and without secrets; one decision records
// both. Fork pins the checkpoint first, so that no policy deletes it in between; an
// existing pin stays as it is. Fork returns the new trial.
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
	terms := termsOf(ctx)
	its := terms.origin() // the ID is that of the new trial
	its.After = terms.After
	c, err := s.mark(WithTerms(ctx, its), ref, func(c projections.Checkpoint) (events.Body, error) {
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
	// On the condition that the new lane is empty: of two forks to the same name, and of
	// a fork and a job, one comes first.
	_, err = s.decideAfter(ctx, projections.Checkpoint{Run: run, Trial: projections.DefaultTrial}, 0, &events.TrialCreated{
		Config: config, Parent: &events.TrialParent{Run: c.Run, Trial: c.Trial, Checkpoint: c.ID},
	})
	if errors.Is(err, jetlog.ErrConflict) {
		err = &RunExistsError{run}
	}
	if err != nil && pinned {
		_, uerr := s.Unpin(WithTerms(ctx, terms.origin()), c.Run+"/"+c.Trial+"@"+c.ID)
		err = errors.Join(err, uerr)
	}
	if err != nil {
		return none, fmt.Errorf("fork %s to run %q: %w", ref, run, err)
	}
	return q.Trial(ctx, run, projections.DefaultTrial)
}

// PinFork pins a committed checkpoint that a trial is about to be forked from, so that no policy
// deletes it before [Store.ForkTrial] has forked it. An existing pin stays as it is.
func (s *Store) PinFork(ctx context.Context, from events.TrialParent, run, trial string) error {
	_, err := s.mark(ctx, refTo(from), func(c projections.Checkpoint) (events.Body, error) {
		switch {
		case c.ID != from.Checkpoint: // a reference may be the beginning of an ID
			return nil, &projections.NotFoundError{What: "checkpoint", Ref: refTo(from), Hint: "it was deleted, and " + c.ID + " is another one"}
		case c.Pinned:
			return nil, nil
		}
		return &events.CheckpointPinned{Checkpoint: c.ID, Reason: forkReason(run, trial)}, nil
	})
	return err
}

// ForkTrial makes a trial that begins with a committed checkpoint of another trial, with a
// configuration that loses its secrets. From then on the fork keeps the checkpoint, and ForkTrial
// removes the pin of [Store.PinFork]. A repetition changes nothing, so a process that does not
// know how far a killed one came repeats it. A trial of that name with another origin is a
// [problem.Conflict].
func (s *Store) ForkTrial(ctx context.Context, from events.TrialParent, run, trial string, config map[string]any) error {
	q := Queries{s.Views()}
	had, err := q.Trial(ctx, run, trial)
	if errors.Is(err, projections.ErrNotFound) {
		if err = s.PinFork(ctx, from, run, trial); err == nil {
			_, err = s.decideAfter(ctx, projections.Checkpoint{Run: run, Trial: trial}, 0, &events.TrialCreated{Config: redact.Names{}.Config(config), Parent: &from})
		}
		if err == nil || errors.Is(err, jetlog.ErrConflict) {
			had, err = q.Trial(ctx, run, trial)
		}
	}
	if err == nil && (had.Parent == nil || *had.Parent != from) {
		err = problem.Errorf(problem.Conflict, "the trial exists, and was not forked from that checkpoint")
	}
	if err != nil {
		return fmt.Errorf("fork %s to trial %s of run %q: %w", refTo(from), trial, run, err)
	}
	_, err = s.mark(ctx, refTo(from), func(c projections.Checkpoint) (events.Body, error) {
		if !c.Pinned || c.ID != from.Checkpoint || c.PinReason != forkReason(run, trial) {
			return nil, nil
		}
		return &events.CheckpointUnpinned{Checkpoint: c.ID}, nil
	})
	if errors.Is(err, projections.ErrNotFound) {
		return nil // a user has deleted it since
	}
	return err
}

func refTo(from events.TrialParent) string {
	return from.Run + "/" + from.Trial + "@" + from.Checkpoint
}

// forkReason is the reason of the pin of a checkpoint that a trial is forked from.
func forkReason(run, trial string) string { return "fork " + run + "/" + trial }
