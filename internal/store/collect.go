package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// collectTries is how often a trial is decided anew because another decision
// came first. Each time somebody else got on.
const collectTries = 100

// CollectOptions say what [Store.Collect] looks at.
type CollectOptions struct {
	Runs   []string // none: all
	Policy retention.Policy
	Apply  bool // otherwise nothing is decided and nothing removed

	// at is told of each step that is about to be taken; an error ends the
	// collection there, as a crash would.
	at func(step string) error
}

// Action is what a collection does with a checkpoint.
type Action string

// Actions. What is swept was aborted or deleted before, and has left files.
const (
	Keep   Action = "keep"
	Delete Action = "delete"
	Sweep  Action = "sweep"
)

// Collected is what a collection did, or would do, with one checkpoint. Freed
// counts each file once, and only if no checkpoint that stays has a link to it.
type Collected struct {
	Run    string            `json:"run"`
	Trial  string            `json:"trial"`
	ID     string            `json:"id"`
	Step   int64             `json:"step"`
	State  projections.State `json:"state"` // before the collection
	Action Action            `json:"action"`
	Reason string            `json:"reason"`
	Bytes  int64             `json:"bytes"` // of tensors and values
	Freed  int64             `json:"freed"` // bytes of files
	// Left says why the files of what is deleted or swept stay for now.
	Left string `json:"left,omitempty"`

	row projections.Checkpoint
}

// Collection is the outcome of [Store.Collect].
type Collection struct {
	Store       string      `json:"store"`
	Policy      string      `json:"policy"`
	Applied     bool        `json:"applied"`
	Checkpoints []Collected `json:"checkpoints"`
	Freed       int64       `json:"freed"` // sum
}

// Collect deletes the checkpoints that a policy does not keep, and sweeps what
// aborted saves and cut collections have left. For each trial the order is:
//
//  1. the newest checkpoint is looked at: all its files must be there
//  2. the decision to delete each of the others, the oldest first, on the
//     condition that nothing else was decided for the trial since it was made;
//     otherwise it is made anew
//  3. the log is read again for restores that began meanwhile; what they read
//     is left for the next collection
//  4. the files
//
// After a crash at any point, the next collection or the next process that
// opens the store goes on. A file that is gone is removed. A directory that
// the log does not know, or that has another checkpoint's files, is left.
//
// With an error the collection says how far it got; what failed for one
// checkpoint keeps it from none of the others.
func (s *Store) Collect(ctx context.Context, o CollectOptions) (Collection, error) {
	out := Collection{Store: s.ID, Policy: o.Policy.String(), Applied: o.Apply, Checkpoints: []Collected{}}
	runs := o.Runs
	if len(runs) == 0 {
		rows, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
		if err != nil {
			return out, fmt.Errorf("collect: %w", err)
		}
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	c := &collector{store: s, opts: o, gone: map[inode]uint64{}}
	if o.at == nil {
		c.opts.at = func(string) error { return nil }
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

// collectRuns is how many runs are decided before the files of what goes are
// removed. What other runs need is asked for twice for each so many: before the
// decisions, and after them for restores that began meanwhile.
const collectRuns = 32

// collector is the state of one Collect.
type collector struct {
	store  *Store
	opts   CollectOptions
	others []retention.Need // of runs, when they were asked for last
	gone   map[inode]uint64 // links that would be removed of files that have others, of a collection that removes nothing
}

// collectedRun is what became of one run.
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
	trials, err := query.Ask(ctx, c.store.Views(), query.OwnRetention, query.Params{Run: run, Metrics: c.opts.Policy.Metrics()})
	retention.Hold(trials, c.others)
	return trials, err
}

func (c *collector) needs(ctx context.Context) (err error) {
	c.others, err = query.Ask(ctx, c.store.Views(), query.Needs, query.Params{})
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
	// What is deleted stays so, whatever happens from here on.
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

// ahead reads the rows of each run. Those of the next one are read while the files
// of one are looked at, unless there are decisions to be made: they are to be made
// from rows that are new.
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

// finish removes the files of what goes, or says what that would free.
func (c *collector) finish(ctx context.Context, r *collectedRun) {
	for _, t := range r.trials {
		r.all = append(r.all, c.leftovers(t, r.all)...)
	}
	for _, i := range oldestFirst(r.all) {
		r.fail(c.free(ctx, &r.all[i], r.trials))
		if ctx.Err() != nil {
			break
		}
	}
	slices.SortFunc(r.all, func(a, b Collected) int { return cmp.Compare(b.row.BegunSeq, a.row.BegunSeq) })
}

// oldestFirst are the places of what goes, in the order in which it goes.
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

// verdicts is what the policy says of a trial, the newest first.
func (c *collector) verdicts(t retention.Trial) (all []Collected) {
	for _, v := range retention.Decide(c.opts.Policy, t) {
		action := Delete
		if v.Keep {
			action = Keep
		}
		all = append(all, collected(v.Checkpoint, action, v.Reason))
	}
	return all
}

// decide appends a trial's decisions. It returns what was decided, also with
// an error.
func (c *collector) decide(ctx context.Context, t retention.Trial) (done []Collected, err error) {
	for range collectTries {
		all := c.verdicts(t)
		victims := oldestFirst(all)
		if len(victims) > 0 {
			if err := c.successor(ctx, t); err != nil {
				return slices.DeleteFunc(all, func(x Collected) bool { return x.Action == Delete }), err
			}
		}
		lane := t.LaneSeq
		for n, i := range victims {
			row := all[i].row
			if err = c.opts.at("decide " + row.ID); err != nil {
				return done, err
			}
			lane, err = c.store.decideAfter(ctx, row, lane, &events.CheckpointDeleted{
				Checkpoint: row.ID, Reason: fmt.Sprintf("retention %s: %s", c.opts.Policy, all[i].Reason),
			})
			if err != nil {
				victims = victims[:n]
				break
			}
		}
		for _, i := range victims {
			done = append(done, all[i])
		}
		switch {
		case err == nil:
			return append(slices.DeleteFunc(all, func(x Collected) bool { return x.Action == Delete }), done...), nil
		case !errors.Is(err, jetlog.ErrConflict):
			return done, fmt.Errorf("decide to delete checkpoints of trial %s: %w", t.Name, err)
		}
		if t, err = c.again(ctx, t); err != nil {
			return done, err
		}
	}
	return done, fmt.Errorf("trial %s: other decisions came first %d times; collect again when the run is quieter", t.Name, collectTries)
}

// again is the trial as it is now.
func (c *collector) again(ctx context.Context, t retention.Trial) (retention.Trial, error) {
	if err := c.needs(ctx); err != nil {
		return t, err
	}
	trials, err := c.read(ctx, t.Run)
	if err != nil {
		return t, err
	}
	i := slices.IndexFunc(trials, func(now retention.Trial) bool { return now.Name == t.Name })
	if i < 0 {
		return t, fmt.Errorf("trial %s is gone from the views", t.Name)
	}
	return trials[i], nil
}
