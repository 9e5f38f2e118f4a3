package collection

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/refs"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// leftovers returns the checkpoints that ended before and still have files. all has
// those of this collection.
func (c *collector) leftovers(ctx context.Context, t retention.Trial, all []Collected) (more []Collected, err error) {
	var dirs map[string]bool
	if c.refs != nil {
		if dirs, err = c.store.Data.Directories(ctx, checkpoint.RefOf(t.Run, t.Name, "")); err != nil {
			return nil, err
		}
	}
	now := map[string]bool{}
	for _, x := range all {
		now[x.ID] = now[x.ID] || x.Trial == t.Name && x.Action == Delete
	}
	for _, row := range t.Checkpoints {
		if row.State != projections.Aborted && row.State != projections.Deleted || now[row.ID] {
			continue
		}
		if c.opts.Apply && c.store.Memory.locked.has(refOf(row)) {
			continue
		}
		// Most of these were removed long ago.
		has := dirs[refOf(row).Checkpoint]
		if c.refs == nil {
			files, err := c.store.HasFiles(ctx, refOf(row))
			has = files || err != nil
		}
		if has || len(c.uploads[refOf(row)]) > 0 {
			more = append(more, collected(row, Sweep, leftBy(row.State)))
		}
	}
	return more, nil
}

// leftBy returns the reason to sweep the files of a checkpoint that ended before.
func leftBy(was projections.State) string {
	if was == projections.Aborted {
		return "left by an aborted checkpoint"
	}
	return "left by a deleted checkpoint"
}

// discard removes the uploads of a checkpoint that has ended.
func (c *collector) discard(ctx context.Context, ref checkpoint.Ref) (err error) {
	for _, u := range c.uploads[ref] {
		err = errors.Join(err, c.store.Data.Discard(ctx, ref, u))
	}
	return err
}

// free removes the files of a checkpoint chosen for removal, and computes the bytes
// freed; without Apply it only computes them. trials were read after the decisions.
func (c *collector) free(ctx context.Context, x *Collected, trials []retention.Trial) error {
	freed, left, kept, err := c.measure(ctx, x.row)
	if err != nil {
		return err
	}
	if !c.opts.Apply || kept.All {
		x.Left = left
		c.freed(ctx, x, freed)
		return nil
	}
	for _, t := range trials {
		if t.Name == x.Trial && slices.Contains(t.Loading, x.ID) {
			x.Left = "a restore that began meanwhile reads it"
			return nil
		}
	}
	if err := c.opts.At("remove " + x.ID); err != nil {
		return err
	}
	uploads := c.discard(ctx, refOf(x.row))
	if x.State == projections.Aborted {
		err = c.store.Data.Remove(ctx, refOf(x.row))
	} else {
		err = c.store.Data.RemoveExcept(ctx, refOf(x.row), kept.Keeps)
	}
	var taken *data.TakenError
	var locked *object.LockedError
	switch {
	case errors.As(err, &taken):
		x.Left = taken.Error()
		return uploads
	case errors.As(err, &locked):
		x.Left = whyLeft(locked, kept)
		if uploads == nil {
			c.store.Memory.locked.add(refOf(x.row), locked)
		}
		c.freed(ctx, x, max(freed-locked.Bytes, 0))
		return uploads
	case errors.Join(uploads, err) != nil:
		err = errors.Join(uploads, err)
		x.Left = err.Error()
		return err
	}
	x.Left = left
	c.freed(ctx, x, freed)
	return nil
}

// freed notes the bytes that the removal of a checkpoint's files frees, or will free. If the bucket
// does not tell which, the caller of Collect learns that from Unfreed too.
func (c *collector) freed(ctx context.Context, x *Collected, bytes int64) {
	x.Freed = bytes
	if why, _ := c.store.Data.Unfreed(ctx); why != nil {
		x.Waits = bytes
	}
}

// measure returns the bytes that the removal of a checkpoint's files frees, why others stay, and
// those that must stay for others. A dry run asks for locks; otherwise the removal meets them.
func (c *collector) measure(ctx context.Context, row projections.Checkpoint) (freed int64, left string, kept refs.Kept, err error) {
	if c.refs == nil {
		freed, err = c.exclusive(refOf(row))
		return freed, "", kept, err
	}
	var locked *object.LockedError
	kept = c.refs.kept(row)
	if !kept.All {
		freed, locked, err = c.store.Data.Frees(ctx, refOf(row), kept.Keeps, !c.opts.Apply)
	}
	return freed, whyLeft(locked, kept), kept, err
}

// exclusive returns the size in bytes of a checkpoint's files whose links are all in its
// directory and in directories removed before it. A missing directory has none.
func (c *collector) exclusive(ref checkpoint.Ref) (bytes int64, err error) {
	dir, _ := c.store.Data.Local()
	files, err := linkedFiles(dir, filepath.Join(dir, ref.String()))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	for id, f := range files {
		if f.links+c.gone[id] >= f.all {
			bytes += f.size
		}
		if !c.opts.Apply && f.all > f.links {
			c.gone[id] += f.links
		}
	}
	return bytes, nil
}
