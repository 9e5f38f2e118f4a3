package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Queries are a job's queries of the views.
type Queries struct{ From query.Source }

// Trial returns the row of a trial.
func (q Queries) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trial, query.Params{Run: run, Trial: trial})
}

// Trials returns the trials of a run.
func (q Queries) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trials, query.Params{Run: run})
}

// Attempts returns the attempts of a trial.
func (q Queries) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return query.Ask(ctx, q.From, query.Attempts, query.Params{Run: run, Trial: trial})
}

// OpenCheckpoints returns the saves of a trial that have not ended.
func (q Queries) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.OpenCheckpoints, query.Params{Run: run, Trial: trial})
}

// Resolve returns the checkpoint that a reference means.
func (q Queries) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.Resolve, query.Params{Ref: ref})
}

// StateError reports a checkpoint that is not committed, so that it cannot be read.
type StateError struct{ Checkpoint projections.Checkpoint }

// Error implements error.
func (e *StateError) Error() string {
	c := e.Checkpoint
	return fmt.Sprintf("checkpoint %s@%s is %s: %s", c.Run, c.ID, c.State, c.Reason)
}

// ProblemKind returns [problem.NotCommitted].
func (*StateError) ProblemKind() problem.Kind { return problem.NotCommitted }

// Committed returns the committed checkpoint that a reference means. It returns a
// [StateError] for a checkpoint that is open, aborted or deleted.
func Committed(ctx context.Context, views query.Source, ref string) (projections.Checkpoint, error) {
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
	if err == nil && c.State != projections.Committed {
		err = &StateError{c}
	}
	if strings.Contains(ref, "/") && errors.Is(err, projections.ErrNotFound) {
		err = fmt.Errorf("%w (and there is no checkpoint at the path %s)", err, ref)
	}
	return c, err
}

// ReaderOf opens a committed checkpoint, with the manifest that the log names.
func (s *Store) ReaderOf(c projections.Checkpoint) (*data.FileReader, error) {
	return readerOf(s.Data, c)
}

func readerOf(data *data.Root, c projections.Checkpoint) (*data.FileReader, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s@%s: %w", c.Run, c.ID, err)
	}
	return data.Reader(RefOf(c)).WithManifest(digest), nil
}

// ValidRun returns an error for a name that no run can have.
func ValidRun(name string) error {
	switch {
	case name == "":
		return errors.New("it is empty")
	case strings.ContainsFunc(name, unicode.IsControl):
		return errors.New("it has a control character")
	}
	return events.Scope{Run: name, Actor: events.Server}.Validate()
}
