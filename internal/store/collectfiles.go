package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// successor checks that the checkpoint which the training would resume from is
// there, before others go: the log says that it is, but somebody may have
// removed it, or a part.
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
		_, err = c.store.Data.Reader(RefOf(x)).WithManifest(digest).ReadMetadata(ctx)
	}
	for _, f := range t.Files {
		if err != nil {
			break
		}
		err = c.present(x, f.Name, f.Size)
	}
	if err != nil {
		return fmt.Errorf("trial %s: nothing is deleted, because the newest checkpoint is not whole: %w: run `ckptstore verify %s@%s`", t.Name, err, x.Run, x.ID)
	}
	return nil
}

// present checks that a checkpoint has a file of that size.
func (c *collector) present(x projections.Checkpoint, name string, size int64) error {
	if !filepath.IsLocal(name) {
		return fmt.Errorf("the log names a file %q, which is not in its directory", name)
	}
	path := filepath.Join(c.store.DataDir, RefOf(x).String(), name)
	info, err := c.store.insideData().Stat(path)
	if err == nil && info.Size() != size {
		err = &data.CorruptError{File: path, Block: -1, Problem: "size of the file", Want: fmt.Sprint(size), Got: fmt.Sprint(info.Size())}
	}
	return err
}

// leftovers are what was ended before and still has files. all has those of
// this collection.
func (c *collector) leftovers(t retention.Trial, all []Collected) (more []Collected) {
	now := map[string]bool{}
	for _, x := range all {
		now[x.ID] = now[x.ID] || x.Trial == t.Name && x.Action == Delete
	}
	for _, row := range t.Checkpoints {
		if row.State != projections.Aborted && row.State != projections.Deleted || now[row.ID] {
			continue
		}
		// Most of these were removed long ago.
		if _, err := c.store.insideData().Lstat(c.dir(row)); err == nil {
			more = append(more, collected(row, Sweep, fmt.Sprintf("left by a %s checkpoint", row.State)))
		}
	}
	return more
}

func (c *collector) dir(row projections.Checkpoint) string {
	return filepath.Join(c.store.DataDir, RefOf(row).String())
}

// free removes the files of what was decided to go, and says how many bytes
// that frees; of a collection that is not applied it only says that. trials
// were read after the decisions.
func (c *collector) free(ctx context.Context, x *Collected, trials []retention.Trial) error {
	freed, err := c.exclusive(c.dir(x.row))
	if err != nil {
		return err
	}
	if !c.opts.Apply {
		x.Freed = freed
		return nil
	}
	for _, t := range trials {
		if t.Name == x.Trial && slices.Contains(t.Loading, x.ID) {
			x.Left = "a restore that began meanwhile reads it"
			return nil
		}
	}
	if err := c.opts.at("remove " + x.ID); err != nil {
		return err
	}
	if x.State == projections.Aborted {
		err = c.store.Data.Remove(ctx, RefOf(x.row))
	} else {
		err = c.store.Data.RemoveCommitted(ctx, RefOf(x.row))
	}
	var taken *data.TakenError
	switch {
	case errors.As(err, &taken):
		x.Left = taken.Error()
		return nil
	case err != nil:
		x.Left = err.Error()
		return err
	}
	x.Freed = freed
	return nil
}

// exclusive is the size in bytes of the files that only have links in dir and
// in what would go before it. A directory that is gone has none.
func (c *collector) exclusive(dir string) (bytes int64, err error) {
	files, err := linkedFiles(c.store.DataDir, dir)
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
