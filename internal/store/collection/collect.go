package collection

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// Collect deletes the checkpoints that a policy does not keep, and sweeps the leftovers
// of aborted saves and interrupted collections. For each trial the order is:
//
//  1. check that the newest checkpoint has all its files
//  2. decide to delete each of the others, the oldest first, on the condition that
//     nothing else was decided for the trial meanwhile; on a conflict, retry
//  3. read the log again for restores that began meanwhile; leave the checkpoints that
//     they read to the next collection
//  4. remove the files
//
// Unfinished uploads to an object store of checkpoints that were aborted or deleted are removed
// with the files. Those of committed checkpoints stay: a repair may be under way.
//
// After a crash at any point, the next collection, or the next process that opens the
// store, continues. A missing file counts as removed. Collect leaves directories that
// the log does not know or that hold another checkpoint's files.
//
// With an error, the returned Collection holds the progress so far. A failure for one
// checkpoint does not affect the others.
func Collect(ctx context.Context, s Store, o Options) (Collection, error) {
	out := Collection{Store: s.ID, Policy: o.Policy.String(), Applied: o.Apply, Checkpoints: []Collected{}}
	runs := o.Runs
	if len(runs) == 0 {
		rows, err := query.Ask(ctx, s.Views, query.Runs, query.Params{})
		if err != nil {
			return out, fmt.Errorf("collect: %w", err)
		}
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	c := &collector{store: s, opts: o, gone: map[inode]uint64{}, refs: s.references(!o.Apply)}
	if o.At == nil {
		c.opts.At = func(string) error { return nil }
	}
	s.Data.Refresh()
	var err error
	if c.uploads, err = s.Data.Uploads(ctx); err != nil {
		// Their space is little, and a rule of the bucket removes them.
		s.Logger.Warn("unfinished uploads are left", "error", err)
	}
	seen := map[string]bool{}
	runs = slices.DeleteFunc(slices.Clone(runs), func(run string) bool {
		again := seen[run]
		seen[run] = true
		return again
	})
	var errs []error
	for some := range slices.Chunk(runs, collectRuns) {
		for _, r := range c.group(ctx, some) {
			for i := range r.all {
				out.Freed += r.all[i].Freed
				out.Waits += r.all[i].Waits
				r.all[i].row = projections.Checkpoint{} // they are many
			}
			out.Checkpoints = append(out.Checkpoints, r.all...)
			if r.err != nil {
				errs = append(errs, fmt.Errorf("collect run %s: %w", r.run, r.err))
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return out, errors.Join(errs...)
}

// collectRuns is how many runs are decided before their files are removed. The needs of
// other runs are read twice for each such group: before the decisions, and after them
// for restores that began meanwhile.
const collectRuns = 32

// collector is the state of one Collect.
type collector struct {
	store  Store
	opts   Options
	others []retention.Need // needs of runs, as last read
	gone   map[inode]uint64 // in a dry run: links that would be removed, by file with several links
	refs   *references      // nil where files have links

	uploads map[checkpoint.Ref][]data.Upload // unfinished ones
}

// collectedRun is the outcome of one run.
type collectedRun struct {
	run    string
	trials []retention.Trial
	all    []Collected
	err    error
}

func (r *collectedRun) fail(err error) {
	if err != nil {
		r.err = errors.Join(r.err, err)
	}
}

func (c *collector) read(ctx context.Context, run string) ([]retention.Trial, error) {
	trials, err := query.Ask(ctx, c.store.Views, query.OwnRetention, query.Params{Run: run, Metrics: c.opts.Policy.Metrics()})
	retention.Hold(trials, c.others)
	return trials, err
}

func (c *collector) needs(ctx context.Context) (err error) {
	c.others, err = query.Ask(ctx, c.store.Views, query.Needs, query.Params{})
	return err
}

// group collects some runs.
func (c *collector) group(ctx context.Context, runs []string) []collectedRun {
	out := make([]collectedRun, 0, len(runs))
	err := error(nil)
	if c.opts.Apply || c.others == nil {
		err = c.needs(ctx)
	}
	for r := range c.ahead(ctx, runs, err) {
		switch {
		case r.err != nil:
		case c.opts.Apply:
			for i := range r.trials {
				list, err := c.decide(ctx, r.trials[i])
				r.fail(err)
				r.all = append(r.all, list...)
			}
		default:
			for _, t := range r.trials {
				r.all = append(r.all, c.verdicts(t)...)
			}
			c.finish(ctx, &r)
		}
		out = append(out, r)
		if ctx.Err() != nil {
			return out
		}
	}
	if !c.opts.Apply || err != nil {
		return out
	}
	// Deletions stand, whatever happens from here on.
	err = c.needs(ctx)
	for i := range out {
		r := &out[i]
		if r.trials == nil {
			continue
		}
		trials, readErr := r.trials, err
		if err == nil {
			trials, readErr = c.read(ctx, r.run)
		}
		if r.trials = trials; readErr != nil {
			r.fail(readErr)
			continue
		}
		c.finish(ctx, r)
		if ctx.Err() != nil {
			break
		}
	}
	return out
}

// ahead reads the rows of each run. It reads the next run while the files of the current
// one are checked, except when Apply is set: decisions need fresh rows.
func (c *collector) ahead(ctx context.Context, runs []string, err error) iter.Seq[collectedRun] {
	read := func(run string) collectedRun {
		r := collectedRun{run: run, err: err}
		if err == nil {
			r.trials, r.err = c.read(ctx, run)
		}
		return r
	}
	return func(yield func(collectedRun) bool) {
		if c.opts.Apply {
			for _, run := range runs {
				if !yield(read(run)) {
					return
				}
			}
			return
		}
		next := make(chan collectedRun)
		enough := make(chan struct{})
		var reading sync.WaitGroup
		defer reading.Wait()
		defer close(enough)
		reading.Go(func() {
			defer close(next)
			for _, run := range runs {
				select {
				case next <- read(run):
				case <-enough:
					return
				}
			}
		})
		for r := range next {
			if !yield(r) {
				return
			}
		}
	}
}

// finish removes the files of the chosen checkpoints, or computes what that would free.
func (c *collector) finish(ctx context.Context, r *collectedRun) {
	for _, t := range r.trials {
		more, err := c.leftovers(ctx, t, r.all)
		r.all = append(r.all, more...)
		r.fail(err)
	}
	if err := c.refer(ctx, r.all); err != nil {
		r.fail(err)
		return
	}
	for _, i := range oldestFirst(r.all) {
		r.fail(c.free(ctx, &r.all[i], r.trials))
		if ctx.Err() != nil {
			break
		}
	}
	slices.SortFunc(r.all, func(a, b Collected) int { return cmp.Compare(b.row.BegunSeq, a.row.BegunSeq) })
}

// refer reads which files of the chosen checkpoints others name, after the decisions.
func (c *collector) refer(ctx context.Context, all []Collected) error {
	if c.refs == nil || len(oldestFirst(all)) == 0 {
		return nil
	}
	if err := c.refs.fold(ctx, c.store.Log); err != nil {
		return err
	}
	if !c.opts.Apply {
		c.refs.suppose(slices.DeleteFunc(slices.Clone(all), func(x Collected) bool { return x.Action == Keep }))
	}
	return nil
}

// oldestFirst returns the indexes of the checkpoints to remove, in order of removal.
func oldestFirst(all []Collected) (places []int) {
	for i, x := range all {
		if x.Action != Keep {
			places = append(places, i)
		}
	}
	slices.SortFunc(places, func(a, b int) int { return cmp.Compare(all[a].row.BegunSeq, all[b].row.BegunSeq) })
	return places
}

func collected(row projections.Checkpoint, action Action, reason string) Collected {
	return Collected{
		Run: row.Run, Trial: row.Trial, ID: row.ID, Step: row.Step, State: row.State, Bytes: row.Bytes,
		Action: action, Reason: reason, row: row,
	}
}

// refOf returns where a checkpoint's files are.
func refOf(c projections.Checkpoint) checkpoint.Ref {
	return checkpoint.RefOf(c.Run, c.Trial, c.ID)
}
