package data

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// WriteData implements [Writer]. It opens one file at a time and uses a fixed
// amount of memory.
func (w *FileWriter) WriteData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (Written, error) {
	written, err := w.writeData(ctx, rank, items, src)
	if err != nil {
		return Written{}, w.wrap(fmt.Sprintf("write rank %d", rank), err)
	}
	return written, nil
}

func (w *FileWriter) writeData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (Written, error) {
	if err := w.check(ctx); err != nil {
		return Written{}, err
	}
	if rank < 0 {
		return Written{}, errors.New("the rank is negative")
	}
	there, sealed, err := w.there(ctx)
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
	indexSize := x.EncodedSize()
	claim := &claim{root: w.root, left: x.Files[0].Size + indexSize}
	if err := w.root.reserve(ctx, claim.left); err != nil {
		return Written{}, err
	}
	defer claim.give()
	if err := w.clear(ctx, rank, there); err != nil {
		return Written{}, err
	}

	if err := w.writeFile(ctx, x, order, header, src, claim, u); err != nil {
		return Written{}, err
	}
	data := x.Encode()
	if err := w.root.writeFile(ctx, w.ref, checkpoint.IndexFile(rank), data, object.Replace); err != nil {
		return Written{}, err
	}
	if err := w.root.sync(ctx, w.ref); err != nil {
		return Written{}, err
	}
	return writtenOf(&x, data), nil
}

// writtenOf is the result for an index whose file is data.
func writtenOf(x *checkpoint.Index, data []byte) Written {
	out := Written{Index: checkpoint.Sum(data)}
	out.Files = append(append(out.Files, x.Files...), checkpoint.File{Name: checkpoint.IndexFile(x.Rank), Size: int64(len(data))})
	for _, e := range x.Entries {
		out.BytesReused += e.Item.Bytes
	}
	for _, i := range x.Own() {
		out.BytesWritten += x.Entries[i].Item.Bytes
	}
	out.BytesReused -= out.BytesWritten
	return out
}

// writeFile writes a data file, the header after the data: a file that was cut
// off has none. It fills in the digests and sums of x, whose index vouches for
// the file from then on.
func (w *FileWriter) writeFile(ctx context.Context, x checkpoint.Index, order []int, header []byte, src Source, c *claim, u reuse) error {
	up, open, err := w.root.begin(ctx, nameOf(w.ref, x.Files[0].Name), x.Files[0].Size, c)
	if err != nil {
		return err
	}
	defer up.Abort()
	if err := newStream(up, header, open).run(ctx, x, order, src); err != nil {
		return fmt.Errorf("write %s: %w", w.root.path(w.ref, x.Files[0].Name), err)
	}
	if err := tieReused(&x, u); err != nil {
		return err
	}
	return up.Commit(ctx)
}

// begin creates a file for which room is claimed. Where the disk counts the file
// as used from now on, that part of the claim is given back; open is what of the
// claim the writes give back, nil if nothing is left. In between, both count it:
// whoever finds too little room then looks again when this has ended.
func (r *Root) begin(ctx context.Context, name string, size int64, c *claim) (up object.Upload, open *claim, err error) {
	r.space.Lock()
	r.creating++
	r.space.Unlock()
	up, err = r.b.Create(ctx, name, size, object.Replace)
	open = c
	if err == nil && up.Reserved() {
		c.use(size)
		open = nil
	}
	r.space.Lock()
	defer r.space.Unlock()
	r.creating--
	close(r.created)
	r.created = make(chan struct{})
	return up, open, err
}

// claim is what a write has yet to use of the space reserved for it.
type claim struct {
	root *Root
	mu   sync.Mutex
	left int64
}

// use gives back what the disk counts itself from now on.
func (c *claim) use(bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	bytes = min(bytes, c.left)
	c.left -= bytes
	c.root.release(bytes)
}

func (c *claim) give() { c.use(math.MaxInt64) }
