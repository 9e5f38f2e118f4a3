package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Remove removes the leftovers of a save that was not committed. A directory with a receipt,
// or with a manifest of another checkpoint or store, is a [*TakenError] and stays unchanged,
// so a manifest is removed only if its commit was never decided. A symbolic link in or in
// place of the directory is removed itself. A directory that is gone, or partly gone, is
// success. The removal is durable on return. Files that the server keeps until a time are an
// [*object.LockedError], once all others are removed.
func (r *Root) Remove(ctx context.Context, ref checkpoint.Ref) error {
	return r.removeDir(ctx, ref, false, nil)
}

// RemoveCommitted removes a checkpoint that was committed and then deleted according to the
// log. It removes the receipt first, durably, so that a crash never leaves a receipt without
// its data; then the other files, then the directory. It refuses a checkpoint of another
// store as [Root.Remove] does.
func (r *Root) RemoveCommitted(ctx context.Context, ref checkpoint.Ref) error {
	return r.removeDir(ctx, ref, true, nil)
}

// RemoveExcept is [Root.RemoveCommitted] for a checkpoint with data files that others name: it
// leaves the data files for which keeps returns true, and the directory. Another call removes
// the rest.
func (r *Root) RemoveExcept(ctx context.Context, ref checkpoint.Ref, keeps func(name string) bool) error {
	return r.removeDir(ctx, ref, true, keeps)
}

func (r *Root) removeDir(ctx context.Context, ref checkpoint.Ref, committed bool, keeps func(name string) bool) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.remove(ctx, ref, committed, keeps)
	}
	if err != nil {
		return fmt.Errorf("remove checkpoint %s: %w", ref, err)
	}
	return nil
}

func (r *Root) remove(ctx context.Context, ref checkpoint.Ref, committed bool, keeps func(name string) bool) error {
	r.wrote.forget(ref)
	dir := nameOf(ref)
	entries, err := r.listAll(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		// An interrupted call may have removed it before it made this durable.
		return disk.Gone(r.b.Sync(ctx, path.Dir(dir)))
	}
	if stray(err, r.b.Path(dir)) {
		if err := r.b.Remove(ctx, dir); err != nil {
			return err
		}
		return r.b.Sync(ctx, path.Dir(dir))
	}
	if err != nil {
		return err
	}
	names := object.Names(entries)
	receipt, err := r.ownOrStray(ctx, ref, names)
	if err != nil {
		return err
	}
	if receipt && !committed {
		return &TakenError{Ref: ref, File: r.path(ref, checkpoint.ReceiptFile), What: "the receipt of a committed checkpoint"}
	}
	held := &object.LockedError{}
	if i := slices.Index(names, checkpoint.ReceiptFile); i >= 0 { // also if only versions of it are left
		locked, err := r.vacate(ctx, nameOf(ref, checkpoint.ReceiptFile))
		if err != nil {
			return err
		}
		held.Add(locked)
		names = slices.Delete(names, i, i+1)
	}
	if err := disk.Gone(r.sync(ctx, ref)); err != nil {
		return err
	}
	unkept := slices.DeleteFunc(slices.Clone(names), func(n string) bool {
		return keeps != nil && checkpoint.HoldsData(n) && keeps(n)
	})
	if len(unkept) < len(names) {
		for i, name := range unkept {
			unkept[i] = path.Join(dir, name)
		}
		err = errors.Join(r.b.Remove(ctx, unkept...), r.sync(ctx, ref))
	} else if err = r.removeAll(ctx, dir, names); err == nil {
		err = r.b.Sync(ctx, path.Dir(dir))
	}
	var locked *object.LockedError
	if errors.As(err, &locked) {
		held.Add(locked)
	} else if err != nil {
		return err
	}
	if held.Versions > 0 {
		return held
	}
	return nil
}

// vacate removes a file whose name must be free. If the server keeps its bytes, it returns them.
func (r *Root) vacate(ctx context.Context, name string) (locked *object.LockedError, err error) {
	err = r.b.Remove(ctx, name)
	if !errors.As(err, &locked) {
		return &object.LockedError{}, err
	}
	if _, err := r.b.Stat(ctx, name); errors.Is(err, fs.ErrNotExist) {
		return locked, nil // another marker would not change that
	}
	return locked, r.b.(object.Versioned).Hide(ctx, name)
}

// ownOrStray is like own, and also removes links and pipes that have the name of a receipt or
// manifest.
func (r *Root) ownOrStray(ctx context.Context, ref checkpoint.Ref, names []string) (receipt bool, err error) {
	for range len(names) + 1 {
		receipt, _, err = r.own(ctx, ref, names)
		i := slices.IndexFunc(names, func(name string) bool { return stray(err, r.path(ref, name)) })
		if i < 0 {
			break
		}
		if err := r.b.Remove(ctx, nameOf(ref, names[i])); err != nil {
			return false, err
		}
	}
	return receipt, err
}

// removeAll removes a directory and its contents. Directories that remain after its files are
// removed were not made by the store.
func (r *Root) removeAll(ctx context.Context, dir string, names []string) error {
	files := make([]string, len(names))
	for i, name := range names {
		files[i] = path.Join(dir, name)
	}
	refused := r.b.Remove(ctx, files...)
	if errors.As(refused, new(*object.LockedError)) {
		return refused
	}
	left, err := r.names(ctx, dir)
	if err != nil {
		return errors.Join(refused, disk.Gone(err))
	}
	for _, sub := range left {
		inner, err := r.names(ctx, path.Join(dir, sub))
		if stray(err, r.b.Path(path.Join(dir, sub))) {
			err = r.b.Remove(ctx, path.Join(dir, sub)) // it was made meanwhile
			if err == nil {
				continue
			}
		}
		if err != nil {
			return errors.Join(refused, err)
		}
		if err := r.removeAll(ctx, path.Join(dir, sub), inner); err != nil {
			return err
		}
	}
	if r.far() { // a directory is gone with its files
		return refused
	}
	return r.b.Remove(ctx, dir)
}
