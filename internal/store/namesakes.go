package store

import (
	"cmp"
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Namesake is a run of a name that was derived, such as train or train-2, which has
// checkpoints to go on with.
type Namesake struct {
	Run  string
	Step int64 // of the newest checkpoint
	n    int
}

// RunNames are the names of all runs.
func (s *Store) RunNames(ctx context.Context) (map[string]bool, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	known := make(map[string]bool, len(runs))
	for _, run := range runs {
		known[run.Name] = true
	}
	return known, err
}

// Namesakes are the runs NAME, NAME-2, NAME-3 and so on that have checkpoints in their
// line, in this order. A run whose script is called like the run itself is none of
// another's: exp-2.py is no second process of exp.py.
func (s *Store) Namesakes(ctx context.Context, name string) ([]Namesake, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return nil, err
	}
	var all []Namesake
	for _, run := range runs {
		n, of := namesake(run.Name, name)
		if !of {
			continue
		}
		if n > 1 {
			jobs, err := query.Ask(ctx, s.Views(), query.Jobs, query.Params{Run: run.Name})
			if err != nil {
				return nil, err
			}
			if slices.ContainsFunc(jobs, func(j projections.Job) bool { return slices.ContainsFunc(j.Command, scriptOf(run.Name)) }) {
				continue
			}
		}
		rows, err := query.Ask(ctx, s.Views(), query.Checkpoints, query.Params{Run: run.Name})
		if err != nil {
			return nil, err
		}
		newest, has := projections.Checkpoint{}, false
		for _, c := range rows {
			if c.Visible() && !c.IsFile() && c.CommittedSeq >= newest.CommittedSeq {
				newest, has = c, true
			}
		}
		if has {
			all = append(all, Namesake{run.Name, newest.Step, n})
		}
	}
	slices.SortFunc(all, func(a, b Namesake) int { return cmp.Compare(a.n, b.n) })
	return all, nil
}

// scriptOf reports whether an argument of a command is a script that a run has its
// name from.
func scriptOf(run string) func(string) bool {
	return func(argument string) bool { return strings.TrimSuffix(filepath.Base(argument), ".py") == run }
}

// namesake is the number of a run of a derived name: 1 is that name itself.
func namesake(run, name string) (n int, ok bool) {
	if run == name {
		return 1, true
	}
	rest, ok := strings.CutPrefix(run, name+"-")
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil && n > 1 && strconv.Itoa(n) == rest
}
