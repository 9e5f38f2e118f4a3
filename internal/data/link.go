package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// link gives a file of a base a name in this checkpoint's directory. From then
// on nobody takes its bytes away, whatever becomes of the base; only then it is
// looked at, because what lay at the path may have been removed, and something
// else put there, since the base was read. The name becomes durable with the
// directory. A file that does not fit may keep its name: another rank may use
// it.
func (w *FileWriter) link(ctx context.Context, f heldFile, u reuse, n int) error {
	to := nameOf(w.ref, f.name)
	err := w.root.b.Link(ctx, f.from, to, object.Exclusive)
	if errors.Is(err, fs.ErrExist) {
		// Of another rank, or of a call that was cut off. The base may be gone
		// since.
		if err = sameFile(ctx, w.root.b, f.from, w.root.b, to); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	file, err := w.root.b.Open(ctx, to)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && info.Size != f.size {
		err = fmt.Errorf("it has %d bytes, %d were written", info.Size, f.size)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for _, s := range u.of {
		if s.file != n || err != nil {
			continue
		}
		block := (*buf)[:checkpoint.BlockSize]
		if _, err = file.ReadAt(block, s.entry.Offset); err == nil {
			if k, got := damagedBlock(block, s.entry.Sums); k >= 0 {
				err = fmt.Errorf("%q: checksum of its first block is %08x, want %08x", s.entry.Item.Shard.FQN, got, s.entry.Sums[0])
			}
		}
	}
	return errors.Join(err, file.Close())
}
