package collection

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/refs"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// tries is how often a trial's decision is retried after a conflict. With each conflict
// another process made progress.
const tries = 100

// verdicts applies the policy to a trial and returns its verdicts, the newest first.
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

// decide appends a trial's decisions. It returns the decisions made, also with an
// error.
func (c *collector) decide(ctx context.Context, t retention.Trial) (done []Collected, err error) {
	for range tries {
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
			if err = c.opts.At("decide " + row.ID); err != nil {
				return done, err
			}
			lane, err = c.store.Decide(ctx, row, lane, &events.CheckpointDeleted{
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
	return done, fmt.Errorf("trial %s: other decisions came first %d times; collect again when the run is quieter", t.Name, tries)
}

// again reads the trial again.
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

// successor checks the checkpoint that the training would resume from, before others
// are deleted: its files may be gone although the log commits it.
func (c *collector) successor(ctx context.Context, t retention.Trial) error {
	if t.Newest == "" {
		return nil // all of them were removed by name
	}
	i := slices.IndexFunc(t.Checkpoints, func(x projections.Checkpoint) bool { return x.ID == t.Newest })
	if i < 0 {
		return fmt.Errorf("trial %s: nothing is deleted: it has no newest checkpoint", t.Name)
	}
	x := t.Checkpoints[i]
	digest, err := checkpoint.ParseDigest(x.Manifest)
	if err == nil {
		_, err = c.store.Data.Reader(refOf(x)).WithManifest(digest).ReadMetadata(ctx)
	}
	for _, f := range t.Files {
		if err != nil {
			break
		}
		err = c.present(ctx, x, f)
	}
	if err != nil {
		return fmt.Errorf("trial %s: nothing is deleted, because the newest checkpoint is incomplete: %w: run `ckptstore verify %s@%s`", t.Name, err, x.Run, x.ID)
	}
	return nil
}

// present checks that a file of a checkpoint is in its place with its size.
func (c *collector) present(ctx context.Context, x projections.Checkpoint, f events.File) error {
	if !filepath.IsLocal(f.Name) {
		return fmt.Errorf("the log names a file %q, which is not in its directory", f.Name)
	}
	in := refOf(x)
	if f.From != (refs.Ref{}) {
		in = checkpoint.RefOf(f.From.Run, f.From.Trial, f.From.Checkpoint)
	}
	got, err := c.store.Data.FileSize(ctx, in, f.Name)
	if err == nil && got != f.Size {
		err = &data.CorruptError{File: c.store.Data.Path(in, f.Name), Block: -1, Problem: "size of the file", Want: fmt.Sprint(f.Size), Got: fmt.Sprint(got)}
	}
	return err
}
