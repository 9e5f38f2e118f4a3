package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"github.com/ckptstore/ckptstore/storage/disk"
)

// Damaged is a receipt that could not be read. Its checkpoint is not listed.
type Damaged struct {
	Ref  Ref
	File string // path
	Err  error  // a [*CorruptError], or why the file could not be read
}

// Checkpoints lists what is committed, by receipts alone: it needs no log and
// opens no other file. A directory without a receipt is no checkpoint and is
// not listed; a receipt that is damaged is reported beside the list. Both are
// sorted by run, trial and checkpoint. A root that was never made has none.
func (r *Root) Checkpoints(ctx context.Context) ([]Receipt, []Damaged, error) {
	var receipts []Receipt
	var damaged []Damaged
	err := r.walk(ctx, func(ref Ref) {
		receipt, err := r.readReceipt(ctx, ref)
		switch {
		case err == nil:
			receipts = append(receipts, receipt)
		case !errors.Is(err, ErrNotCommitted):
			damaged = append(damaged, Damaged{Ref: ref, File: r.path(ref, ReceiptFile), Err: err})
		}
	})
	if err != nil {
		return nil, nil, fmt.Errorf("list checkpoints in %s: %w", r.Dir(), err)
	}
	return receipts, damaged, nil
}

// Receipt is the receipt of a checkpoint. Without one, the error has
// [ErrNotCommitted] in its chain.
func (r *Root) Receipt(ctx context.Context, ref Ref) (Receipt, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var receipt Receipt
	if err == nil {
		receipt, err = r.readReceipt(ctx, ref)
	}
	if err != nil {
		return Receipt{}, fmt.Errorf("read the receipt of checkpoint %s: %w", ref, err)
	}
	return receipt, nil
}

// walk calls visit for each directory of a checkpoint, committed or not.
func (r *Root) walk(ctx context.Context, visit func(Ref)) error {
	runs, err := r.subdirs(ctx, "")
	if err != nil {
		return err
	}
	for _, run := range runs {
		if run == pendingDir {
			continue
		}
		trials, err := r.subdirs(ctx, run)
		if err != nil {
			return err
		}
		for _, trial := range trials {
			checkpoints, err := r.subdirs(ctx, path.Join(run, trial))
			if err != nil {
				return err
			}
			for _, checkpoint := range checkpoints {
				visit(Ref{Run: run, Trial: trial, Checkpoint: checkpoint})
			}
		}
	}
	return nil
}

// subdirs is the sorted names of the directories in dir. One that went away
// while it was listed has none.
func (r *Root) subdirs(ctx context.Context, dir string) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	names, err := r.b.List(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	dirs := names[:0]
	for _, sub := range names {
		info, err := r.b.Stat(ctx, path.Join(dir, sub))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if info.Dir {
			dirs = append(dirs, sub)
		}
	}
	slices.Sort(dirs)
	return dirs, nil
}

// Remove removes what a save that was not committed has left. A directory with
// a receipt, or with a manifest of another checkpoint or store, is a
// [*TakenError] and stays as it is; so only a manifest whose decision was never
// made goes. One that is gone, or half gone, is success. It is durable on
// return.
func (r *Root) Remove(ctx context.Context, ref Ref) error {
	return r.removeDir(ctx, ref, false)
}

// RemoveCommitted removes a checkpoint that the log says was committed and
// then deleted: the receipt first, durably, so that a crash never leaves a
// receipt without its data; then the rest, then the directory. What is not this
// store's checkpoint is refused as in [Root.Remove].
func (r *Root) RemoveCommitted(ctx context.Context, ref Ref) error {
	return r.removeDir(ctx, ref, true)
}

func (r *Root) removeDir(ctx context.Context, ref Ref, committed bool) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.remove(ctx, ref, committed)
	}
	if err != nil {
		return fmt.Errorf("remove checkpoint %s: %w", ref, err)
	}
	return nil
}

func (r *Root) remove(ctx context.Context, ref Ref, committed bool) error {
	dir := nameOf(ref)
	names, err := r.b.List(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		// Perhaps by a call that was cut off before it made this durable.
		return disk.Gone(r.b.Sync(ctx, path.Dir(dir)))
	}
	if err != nil {
		return err
	}
	receipt, _, err := r.own(ctx, ref, names)
	if err != nil {
		return err
	}
	if receipt && !committed {
		return &TakenError{Ref: ref, File: r.path(ref, ReceiptFile), What: "the receipt of a committed checkpoint"}
	}
	if receipt {
		if err := r.b.Remove(ctx, nameOf(ref, ReceiptFile)); err != nil {
			return err
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == ReceiptFile })
	}
	if err := disk.Gone(r.sync(ctx, ref)); err != nil {
		return err
	}
	if err := r.removeAll(ctx, dir, names); err != nil {
		return err
	}
	return r.b.Sync(ctx, path.Dir(dir))
}

// removeAll removes a directory with what is in it. What is still there after
// its files are gone are directories, which somebody has put there.
func (r *Root) removeAll(ctx context.Context, dir string, names []string) error {
	var refused error
	for _, file := range names {
		refused = errors.Join(refused, r.b.Remove(ctx, path.Join(dir, file)))
	}
	left, err := r.b.List(ctx, dir)
	if err != nil {
		return errors.Join(refused, disk.Gone(err))
	}
	for _, sub := range left {
		inner, err := r.b.List(ctx, path.Join(dir, sub))
		if err != nil {
			return errors.Join(refused, err)
		}
		if err := r.removeAll(ctx, path.Join(dir, sub), inner); err != nil {
			return err
		}
	}
	return r.b.Remove(ctx, dir)
}
