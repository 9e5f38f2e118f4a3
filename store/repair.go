package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
)

// repair writes the receipts that a crash between a commit and its receipt has
// left out, and removes what aborted saves have left. The receipts were listed
// before the log was known to its end, and a directory that the log does not
// know is left as it is: it may be somebody's copy.
func repair(ctx context.Context, s *Store, log *jetlog.Log, views *follower, receipts []storage.Receipt) error {
	have := map[storage.Ref]bool{}
	for _, r := range receipts {
		have[r.Ref] = true
	}
	all, err := everyCheckpoint(views)
	if err != nil {
		return err
	}
	for _, c := range all {
		ref := RefOf(c)
		switch {
		case c.State == projections.Committed && !have[ref]:
			err = repairReceipt(ctx, s, log, c)
		case c.State == projections.Aborted || c.State == projections.Deleted:
			// Most of these were removed long ago.
			if _, gone := os.Lstat(filepath.Join(s.DataDir, ref.String())); gone != nil {
				continue
			}
			if c.State == projections.Deleted {
				err = s.Data.RemoveCommitted(ctx, ref)
			} else {
				err = s.Data.Remove(ctx, ref)
			}
		default:
			continue
		}
		if err != nil {
			// One damaged checkpoint must not close the store.
			s.opts.Logger.Warn("a checkpoint could not be repaired; run `ckptstore verify`", "checkpoint", c.Run+"@"+c.ID, "error", err)
		}
	}
	return nil
}

func everyCheckpoint(f *follower) (all []projections.Checkpoint, err error) {
	err = f.db.View(func(r projections.Reader) error {
		runs, err := projections.Runs(r)
		if err != nil {
			return err
		}
		for _, run := range runs {
			list, err := projections.Checkpoints(r, run.Name, true)
			if err != nil {
				return err
			}
			all = append(all, list...)
		}
		return nil
	})
	return all, err
}

// repairReceipt writes the receipt that the log's event calls for.
func repairReceipt(ctx context.Context, s *Store, log *jetlog.Log, c projections.Checkpoint) error {
	receipt, err := receiptOf(ctx, s.ID, log, c)
	if err != nil {
		return err
	}
	return s.Data.WriteReceipt(ctx, RefOf(c), receipt)
}

// receiptOf is the receipt of a committed checkpoint, as the log says.
func receiptOf(ctx context.Context, store string, log *jetlog.Log, c projections.Checkpoint) (storage.Receipt, error) {
	digest, err := plan.ParseDigest(c.Manifest)
	if err != nil {
		return storage.Receipt{}, err
	}
	for r, err := range log.Read(ctx, c.CommittedSeq, c.CommittedSeq) {
		if err != nil {
			return storage.Receipt{}, err
		}
		return storage.Receipt{
			Store: store, Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, Name: c.Name, Step: c.Step, Attempt: c.Attempt,
			Sequence: r.Sequence, Event: r.ID, Manifest: digest, CommittedAt: r.Time,
		}, nil
	}
	return storage.Receipt{}, fmt.Errorf("the log has no event %d", c.CommittedSeq)
}
