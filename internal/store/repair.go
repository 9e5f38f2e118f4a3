package store

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// repairAlways is how many events at the end of the log are always looked at
// for decisions that were not carried out, also if they were seen to be.
const repairAlways = 10_000

// repair carries out in the data what the log has decided about checkpoints and
// a crash has left undone: it writes missing receipts and removes what aborted
// and deleted checkpoints have left. It looks at the decisions behind settled,
// up to which all are known to be carried out, and returns the log's end, up to
// which they are now. What could not be done was said, and is tried again by
// [repairAll].
//
// Directories that the log does not know are left as they are: they may be
// somebody's copies.
func repair(ctx context.Context, s *Store, log *jetlog.Log, views *follower, settled uint64) (uint64, error) {
	last, err := log.Last(ctx)
	if err != nil {
		return 0, err
	}
	from := uint64(1)
	if last > repairAlways {
		from = last - repairAlways
	}
	if settled > 0 {
		from = min(from, settled+1)
	}
	type id struct{ run, trial, checkpoint string }
	seen := map[id]bool{}
	for e, err := range log.ReadCheckpoints(ctx, from, last) {
		if err != nil {
			return 0, err
		}
		checkpoint, err := endedBy(e)
		if err != nil {
			return 0, err
		}
		key := id{e.Scope.Run, e.Scope.Trial, checkpoint}
		if checkpoint == "" || seen[key] {
			continue
		}
		seen[key] = true
		var row projections.Checkpoint
		if err := views.db.View(func(r projections.Reader) (err error) {
			row, err = ended(r, key.run, key.trial, key.checkpoint)
			return err
		}); err != nil {
			return 0, err
		}
		repairOne(ctx, s, log, row)
	}
	return last, ctx.Err()
}

// repairOne carries out what was decided about one checkpoint. One that cannot
// be repaired must not close the store.
func repairOne(ctx context.Context, s *Store, log *jetlog.Log, c projections.Checkpoint) {
	done, err := settledInData(ctx, s, c)
	if !done && err == nil {
		ref := RefOf(c)
		switch c.State {
		case projections.Committed:
			err = repairReceipt(ctx, s, log, c)
		case projections.Deleted:
			err = s.Data.RemoveCommitted(ctx, ref)
		case projections.Aborted:
			err = s.Data.Remove(ctx, ref)
		}
	}
	if err != nil {
		s.opts.Logger.Warn("a checkpoint could not be repaired; run `ckptstore verify`", "checkpoint", c.Run+"@"+c.ID, "error", err)
	}
}

// settledInData reports whether what was decided about a checkpoint is carried
// out: its receipt can be read, or its directory is gone.
func settledInData(ctx context.Context, s *Store, c projections.Checkpoint) (bool, error) {
	switch c.State {
	case projections.Committed:
		_, err := s.Data.Receipt(ctx, RefOf(c))
		if errors.Is(err, data.ErrNotCommitted) || errors.As(err, new(*data.CorruptError)) {
			return false, nil
		}
		return err == nil, err
	case projections.Aborted, projections.Deleted:
		// Most of these were removed long ago.
		_, err := s.insideData().Lstat(filepath.Join(s.DataDir, RefOf(c).String()))
		if errors.As(err, new(*beneath.TypeError)) {
			return false, err // what is behind a link is not removed
		}
		return err != nil, nil
	}
	return true, nil
}

// repairAll is repair for every checkpoint of the log, run by run. With an age it
// leaves what was ended less than that ago to those who are at it, and what was
// deleted to the next collection: a restore may be reading it.
func repairAll(ctx context.Context, s *Store, log *jetlog.Log, read func(func(projections.Reader) error) error, age time.Duration, pace func(context.Context, int64) error) error {
	const each = 1 << 10 // bytes that looking at one costs about
	var runs []projections.Run
	if err := read(func(r projections.Reader) (err error) {
		runs, err = projections.Runs(r)
		return err
	}); err != nil {
		return err
	}
	for _, run := range runs {
		var list []projections.Checkpoint
		err := read(func(r projections.Reader) (err error) {
			if err = projections.Understood(r, run.Name); err == nil {
				list, err = projections.Checkpoints(r, run.Name, true)
			}
			return err
		})
		if errors.Is(err, events.ErrNewer) {
			s.opts.Logger.Warn("checkpoints of a run are left as they are", "run", run.Name, "error", err)
			continue
		}
		if err != nil {
			return err
		}
		for _, c := range list {
			if age > 0 && (c.State == projections.Deleted || time.Since(c.EndedAt) < age) {
				continue
			}
			repairOne(ctx, s, log, c)
			if err := pace(ctx, each); err != nil {
				return err
			}
		}
	}
	return nil
}

// unpaced takes no time.
func unpaced(ctx context.Context, _ int64) error { return ctx.Err() }

// repairReceipt writes the receipt that the log's event calls for.
func repairReceipt(ctx context.Context, s *Store, log *jetlog.Log, c projections.Checkpoint) error {
	receipt, err := receiptOf(ctx, s.ID, log, c)
	if err != nil {
		return err
	}
	return s.Data.WriteReceipt(ctx, RefOf(c), receipt)
}

// receiptOf is the receipt of a committed checkpoint, as the log says.
func receiptOf(ctx context.Context, store string, log *jetlog.Log, c projections.Checkpoint) (checkpoint.Receipt, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return checkpoint.Receipt{}, err
	}
	r, err := log.At(ctx, c.CommittedSeq)
	if err != nil {
		return checkpoint.Receipt{}, fmt.Errorf("the event that commits it: %w", err)
	}
	return checkpoint.Receipt{
		Store: store, Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, Name: c.Name, Step: c.Step, Attempt: c.Attempt,
		Sequence: r.Sequence, Event: r.ID, Manifest: digest, CommittedAt: r.Time,
	}, nil
}
