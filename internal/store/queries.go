package store

import (
	"context"
	"errors"
	"strings"
	"unicode"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Queries are the questions that a job puts to the views.
type Queries struct{ From query.Source }

// Trial is the row of a trial.
func (q Queries) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trial, query.Params{Run: run, Trial: trial})
}

// Trials are those of a run.
func (q Queries) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trials, query.Params{Run: run})
}

// Attempts are those of a trial.
func (q Queries) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return query.Ask(ctx, q.From, query.Attempts, query.Params{Run: run, Trial: trial})
}

// OpenCheckpoints are the saves of a trial that have not ended.
func (q Queries) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.OpenCheckpoints, query.Params{Run: run, Trial: trial})
}

// Resolve is the checkpoint that a reference stands for.
func (q Queries) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.Resolve, query.Params{Ref: ref})
}

// ValidRun reports a name that no run can have.
func ValidRun(name string) error {
	switch {
	case name == "":
		return errors.New("it is empty")
	case strings.ContainsFunc(name, unicode.IsControl):
		return errors.New("it has a control character")
	}
	return events.Scope{Run: name, Actor: events.Server}.Validate()
}
