package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// maxPasses is how often a backup looks for what was committed meanwhile. Each pass
// copies what the one before took to copy.
const maxPasses = 100

// checkpoints copies those that are committed, and returns the cut.
func (b *backup) checkpoints(ctx context.Context) (cut uint64, err error) {
	s := b.store
	begun, err := s.Log.Last(ctx)
	if err != nil {
		return 0, err
	}
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return 0, err
	}
	if err := b.expect(ctx, runs); err != nil {
		return 0, err
	}
	for _, r := range runs {
		rows, err := b.rows(ctx, r.Name)
		if err != nil {
			return 0, err
		}
		rows = pick(rows, func(c projections.Checkpoint) bool {
			return c.State == projections.Committed && c.CommittedSeq <= begun
		})
		if err := b.clear(r.Name, rows); err != nil {
			return 0, err
		}
		if err := b.files.each(ctx, rows, b.receipt); err != nil {
			return 0, err
		}
		if err := b.opts.step("copied run " + r.Name); err != nil {
			return 0, err
		}
	}
	for cut = begun; b.report.Passes < maxPasses; {
		to, err := s.Log.Last(ctx)
		if err != nil {
			return 0, err
		}
		if err := b.opts.step("looked"); err != nil {
			return 0, err
		}
		again, err := b.since(ctx, cut, to)
		if err != nil {
			return 0, err
		}
		cut = to
		b.report.Passes++
		if err := b.opts.step("pass"); err != nil {
			return 0, err
		}
		if !again {
			return cut, b.files.syncDirs()
		}
	}
	return 0, fmt.Errorf("checkpoints were deleted faster than they were copied, %d times: run it again when less is deleted", maxPasses)
}

func (b *backup) rows(ctx context.Context, run string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, b.store.Views(), query.Checkpoints, query.Params{Run: run, All: true})
}

// expect finds out how many bytes there will be to copy, if that is to be told.
func (b *backup) expect(ctx context.Context, runs []projections.Run) error {
	if b.opts.Progress == nil {
		return nil
	}
	for _, r := range runs {
		rows, err := b.rows(ctx, r.Name)
		if err != nil {
			return err
		}
		for _, c := range rows {
			if c.State == projections.Committed {
				b.files.total.Add(c.Bytes)
			}
		}
	}
	return nil
}

// since brings the copy from the state as of one event to that of a later one. It
// reports true if that state cannot be copied any more, because files went since.
func (b *backup) since(ctx context.Context, from, to uint64) (again bool, err error) {
	changed := map[string]map[checkpoint.Ref]bool{} // by run
	if from < to {
		for e, err := range b.store.Log.Read(ctx, from+1, to) {
			if err != nil {
				return false, err
			}
			id, gone, err := touched(e)
			if err != nil {
				return false, err
			}
			if id == "" {
				continue
			}
			ref := checkpoint.RefOf(e.Scope.Run, e.Scope.Trial, id)
			if gone {
				if err := b.files.remove(ref); err != nil {
					return false, err
				}
				continue
			}
			if changed[e.Scope.Run] == nil {
				changed[e.Scope.Run] = map[checkpoint.Ref]bool{}
			}
			changed[e.Scope.Run][ref] = true
		}
	}
	lacked := b.files.lacked()
	for run, refs := range changed {
		rows, err := b.rows(ctx, run)
		if err != nil {
			return false, err
		}
		rows = pick(rows, func(c projections.Checkpoint) bool { return refs[RefOf(c)] })
		for _, c := range rows {
			again = again || c.State == projections.Deleted && c.DeletedSeq > to
		}
		rows = pick(rows, func(c projections.Checkpoint) bool { return c.State == projections.Committed })
		if err := b.files.each(ctx, rows, b.receipt); err != nil {
			return false, err
		}
	}
	return again || b.files.lacked() > lacked, nil
}

// touched is the checkpoint whose files an event is about, and whether they go.
func touched(e events.Recorded) (id string, gone bool, err error) {
	switch e.Kind {
	case events.CheckpointCommitted{}.Kind(), events.CheckpointAttached{}.Kind(), events.CheckpointDeleted{}.Kind():
	default:
		return "", false, nil
	}
	body, err := e.Body()
	if err != nil {
		return "", false, fmt.Errorf("event %d: %w", e.Sequence, err)
	}
	switch body := body.(type) {
	case *events.CheckpointCommitted:
		return body.Checkpoint, false, nil
	case *events.CheckpointAttached:
		return body.Checkpoint, false, nil
	case *events.CheckpointDeleted:
		return body.Checkpoint, true, nil
	case *events.Void:
		return "", false, nil
	}
	return "", false, fmt.Errorf("event %d: %s has a body of type %T", e.Sequence, e.Kind, body)
}

// clear removes the copies that an earlier, cut call made of checkpoints of a run that
// were deleted since.
func (b *backup) clear(run string, live []projections.Checkpoint) error {
	refs := map[checkpoint.Ref]bool{}
	for _, c := range live {
		refs[RefOf(c)] = true
	}
	name := checkpoint.RefOf(run, "", "").Run
	trials, err := b.copier.to.ReadDir(filepath.Join(b.to.dir, "data", name))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, trial := range trials {
		there, err := b.copier.to.ReadDir(filepath.Join(b.to.dir, "data", name, trial.Name()))
		if err != nil {
			return err
		}
		for _, e := range there {
			if ref := (checkpoint.Ref{Run: name, Trial: trial.Name(), Checkpoint: e.Name()}); !refs[ref] {
				if err := b.files.remove(ref); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// receipt writes the receipt of a copied checkpoint that has none: a crash has left it
// out, or it is being written.
func (b *backup) receipt(ctx context.Context, c projections.Checkpoint) error {
	r, err := receiptOf(ctx, b.store.ID, b.store.Log, c)
	if err != nil {
		return err
	}
	return b.files.data.WriteReceipt(ctx, RefOf(c), r)
}

func pick(rows []projections.Checkpoint, is func(projections.Checkpoint) bool) (some []projections.Checkpoint) {
	for _, c := range rows {
		if is(c) {
			some = append(some, c)
		}
	}
	return some
}
