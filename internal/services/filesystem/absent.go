package filesystem

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// missing is about a path to nothing; have are the names that there are instead of its
// last one.
func missing(path string, have ...string) error {
	err := fmt.Errorf("%s%s: %w", scheme, path, fs.ErrNotExist)
	if near := projections.Near(path[strings.LastIndexByte(path, '/')+1:], have); near != "" {
		err = fmt.Errorf("%w: %s", err, near)
	}
	return problem.Wrap(problem.NotFound, err)
}

// absent is about a checkpoint, part or run that is not there: all are those of the run.
func (h *Handler) absent(ctx context.Context, text string, all []projections.Checkpoint) error {
	var names []string
	for _, c := range slices.Backward(all) { // the newest first
		if !slices.Contains(names, dirOf(c.Name)) {
			names = append(names, dirOf(c.Name))
		}
	}
	if len(names) > 0 {
		return missing(text, names...)
	}
	runs, err := query.Ask(ctx, h.store.Views(), query.Runs, query.Params{})
	if err != nil {
		return err
	}
	for _, r := range runs {
		names = append(names, r.Name)
	}
	run, _, _ := strings.Cut(text, "/")
	near := projections.Near(run, names)
	if near == "" {
		near = "the store has none yet"
	}
	return problem.Errorf(problem.NotFound, "%s%s: %w: no checkpoint is in a run %q: %s", scheme, text, fs.ErrNotExist, run, near)
}
