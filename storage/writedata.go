package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/zeebo/blake3"
)

// WriteData implements [Writer]. It opens one file at a time and uses a fixed
// amount of memory.
func (w *FileWriter) WriteData(ctx context.Context, rank int, items []plan.Item, src Source) (Written, error) {
	written, err := w.writeData(ctx, rank, items, src)
	if err != nil {
		return Written{}, w.wrap(fmt.Sprintf("write rank %d", rank), err)
	}
	return written, nil
}

func (w *FileWriter) writeData(ctx context.Context, rank int, items []plan.Item, src Source) (Written, error) {
	if err := w.check(ctx); err != nil {
		return Written{}, err
	}
	if rank < 0 {
		return Written{}, errors.New("the rank is negative")
	}
	there, sealed, err := w.there()
	if err != nil {
		return Written{}, err
	}
	if written, done, err := w.repeated(ctx, rank, items, src, there, sealed); done || err != nil {
		return written, err
	}
	u, err := w.reuse(ctx, rank, items, src)
	if err != nil {
		return Written{}, err
	}
	x, order, header, err := layOut(rank, items, u)
	if err != nil {
		return Written{}, err
	}
	indexSize := x.encodedSize()
	claim := &claim{root: w.root, left: x.files[0].Size + indexSize}
	if err := w.root.reserve(claim.left); err != nil {
		return Written{}, err
	}
	defer claim.give()
	if err := w.clear(rank, there); err != nil {
		return Written{}, err
	}

	path := w.root.path(w.ref, x.files[0].Name)
	temp, err := w.writeFile(ctx, path, x, order, header, src, claim)
	if err != nil {
		return Written{}, err
	}
	if err := x.tie(u); err != nil {
		w.root.discard(temp)
		return Written{}, err
	}
	if err := w.root.rename(temp, path); err != nil {
		return Written{}, err
	}
	data := x.encode()
	path = w.root.path(w.ref, indexFile(rank))
	if temp, err = w.root.writeTemp(path, data); err != nil {
		return Written{}, err
	}
	if err := w.root.rename(temp, path); err != nil {
		return Written{}, err
	}
	if err := w.root.syncDirs(w.ref); err != nil {
		return Written{}, err
	}
	return x.written(data), nil
}

// rename gives a synced temporary file its name.
func (r *Root) rename(temp, path string) error {
	if err := r.fs.Rename(temp, path); err != nil {
		r.discard(temp)
		return fmt.Errorf("rename %s: %w", temp, disk.NoSpace(err))
	}
	return nil
}

// written is the result for an index whose file is data.
func (x index) written(data []byte) Written {
	out := Written{Index: plan.Sum(data)}
	out.Files = append(append(out.Files, x.files...), File{Name: indexFile(x.rank), Size: int64(len(data))})
	for _, e := range x.entries {
		out.BytesReused += e.item.Bytes
	}
	for _, i := range x.own() {
		out.BytesWritten += x.entries[i].item.Bytes
	}
	out.BytesReused -= out.BytesWritten
	return out
}

// encodedSize is the size of the index's file, before the sums are known.
func (x index) encodedSize() int64 {
	size := int64(len(x.encode()))
	for _, e := range x.entries {
		size += 4 * (blocks(e.item.Bytes) - int64(len(e.sums)))
	}
	return size
}

// writeFile writes a data file under a temporary name and syncs it, the header
// after the data: a file that was cut off has none. It fills in the digests
// and sums of x.
func (w *FileWriter) writeFile(ctx context.Context, path string, x index, order []int, header []byte, src Source, c *claim) (temp string, err error) {
	temp = path + tempSuffix
	if err := w.root.fs.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("remove the leftover %s: %w", temp, err)
	}
	f, err := w.root.fs.OpenReadWrite(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return "", fmt.Errorf("create %s: %w", temp, disk.NoSpace(err))
	}
	s := newStream(f, int64(len(header)), c)
	err = s.run(ctx, x, order, src)
	if err == nil {
		_, err = f.WriteAt(header, 0)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		w.root.discard(temp)
		return "", fmt.Errorf("write %s: %w", temp, disk.NoSpace(err))
	}
	return temp, nil
}

// run streams every item and ends the stream. A failed write is the error to
// report, whatever it made fail.
func (s *stream) run(ctx context.Context, x index, order []int, src Source) error {
	err := s.items(ctx, x, order, src)
	if failed := s.close(); failed != nil {
		return failed
	}
	return err
}

// items streams every item in the order of the file.
func (s *stream) items(ctx context.Context, x index, order []int, src Source) error {
	hash := blake3.New()
	for _, i := range order {
		e := &x.entries[i]
		data, err := itemBytes(ctx, src, i, e.item)
		if err != nil {
			return err
		}
		hash.Reset()
		sums := blockSums{sums: make([]uint32, 0, blocks(e.item.Bytes))}
		for len(data) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			piece, err := s.take(data)
			if err != nil {
				return err
			}
			// Both are taken of the copy that is written, so they hold even if
			// the source changes under us.
			_, _ = hash.Write(piece) // never fails
			sums.add(piece)
			data = data[len(piece):]
		}
		hash.Sum(e.digest[:0])
		e.sums = sums.end()
	}
	return nil
}

// claim is what a write has yet to use of the space reserved for it.
type claim struct {
	root *Root
	left int64
}

func (c *claim) use(bytes int64) {
	if c != nil {
		c.left -= bytes
		c.root.release(bytes)
	}
}

func (c *claim) give() { c.use(c.left) }
