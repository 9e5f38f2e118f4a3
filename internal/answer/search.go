package answer

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
	"github.com/ckptstore/ckptstore/projections"
)

// ReplaySearch folds the search of a run from the log, and compares its decisions with those
// that follow from it. It reads all events since the search began, not those of the run
// alone: a selection does not detect a fact that is missing in a damaged block. It returns
// [tune.ErrNoSearch] if the run has no search.
func ReplaySearch(ctx context.Context, s *store.Store, run string) (none tune.Replayed, err error) {
	lane := events.Aggregate{Run: run}
	end, err := s.Log.LaneEnd(ctx, lane)
	if err != nil || end == 0 {
		return none, errors.Join(err, tune.ErrNoSearch)
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return none, err
	}
	for begun, err := range s.Log.ReadLane(ctx, lane, 1, end) {
		if err != nil {
			return none, err
		}
		return tune.Replay(run, s.Log.Read(ctx, begun.Sequence, last))
	}
	return none, tune.ErrNoSearch
}

// SearchOf returns the trials of the search of a run as they are now.
func SearchOf(ctx context.Context, s *store.Store, run string) (board tune.Board, err error) {
	if err := KnownRun(ctx, s.Views(), run); err != nil {
		return board, err
	}
	state, err := ReplaySearch(ctx, s, run)
	if errors.Is(err, tune.ErrNoSearch) {
		return board, &projections.NotFoundError{What: "search of run", Ref: run, Hint: fmt.Sprintf("trainer tune starts one; `ckptstore show %s` shows a run without", run)}
	}
	if err != nil {
		return board, err
	}
	var live []string
	holder, err := s.LiveJob(ctx, run)
	if err != nil {
		return board, err
	}
	if holder != nil {
		trials, err := query.Ask(ctx, s.Views(), query.Trials, query.Params{Run: run})
		if err != nil {
			return board, err
		}
		for _, t := range trials {
			if t.Job == holder.Job && (t.Status == projections.Running || t.Status == projections.Stopping) {
				live = append(live, t.Name)
			}
		}
	}
	unsaved, err := Unsaved(ctx, s, run, state.Search.Topped(), state.Search.MaxSteps)
	if err != nil {
		return board, err
	}
	return state.Board(run, live, unsaved), nil
}

// Unsaved returns those of the trials of [tune.Search.Topped] whose steps, or later ones, are in
// no checkpoint: their processes died after the report, or their last save was lost.
func Unsaved(ctx context.Context, s *store.Store, run string, topped []tune.Trial, steps int64) (names []string, err error) {
	for _, t := range topped {
		saved, err := saved(ctx, store.Queries{From: s.Views()}, run, t, steps)
		if err != nil {
			return nil, err
		}
		if !saved {
			names = append(names, t.Name)
		}
	}
	return names, nil
}

// saved reports whether the newest checkpoint of a trial's line is of some steps or later ones,
// by its step, or because it was begun after a report of them.
func saved(ctx context.Context, q store.Queries, run string, t tune.Trial, steps int64) (bool, error) {
	trial, err := q.Trial(ctx, run, t.Name)
	if errors.Is(err, projections.ErrNotFound) || err == nil && trial.Head == "" {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	c, err := q.Resolve(ctx, run+"/"+t.Name+"@"+trial.Head)
	if errors.Is(err, projections.ErrNotFound) {
		return false, nil
	}
	return err == nil && c.ID == trial.Head && (c.Step >= steps || c.Attempt == t.ToppedIn && c.BegunSeq > t.ToppedAt), err
}
