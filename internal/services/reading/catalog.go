package reading

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// logged are the checkpoints that the log of an open store knows.
type logged struct{ *store.Store }

var _ Catalog = logged{}

func (l logged) List(ctx context.Context, run string, all bool) ([]projections.Checkpoint, error) {
	runs := []string{run}
	if run != "" {
		if _, err := query.Ask(ctx, l.Views(), query.Run, query.Params{Run: run}); err != nil {
			return nil, err
		}
	} else {
		rows, err := query.Ask(ctx, l.Views(), query.Runs, query.Params{})
		if err != nil {
			return nil, err
		}
		runs = nil
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	var out []projections.Checkpoint
	for _, run := range runs {
		rows, err := query.Ask(ctx, l.Views(), query.Checkpoints, query.Params{Run: run, All: all})
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

func (l logged) Committed(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return store.Committed(ctx, l.Views(), ref)
}
