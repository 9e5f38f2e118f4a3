package data

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// linkSuffix ends the name of a file of an earlier checkpoint that is linked
// in.
const linkSuffix = ".link"

func IsLink(name string) bool { return strings.HasSuffix(name, linkSuffix) }

// linkName is the name of a file of a checkpoint where it is linked in. One
// that is a link already keeps its name, so that a file has one name wherever
// it is, and no two files have the same.
func LinkName(ref Ref, name string) string {
	if IsLink(name) {
		return name
	}
	const most = 200 // with the rest, less than the longest name
	sum := checkpoint.Sum([]byte(ref.String() + "/" + name))
	return ref.Checkpoint[:min(len(ref.Checkpoint), most)] + "-" + hex.EncodeToString(sum[:8]) + linkSuffix
}

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
		block := (*buf)[:BlockSize]
		if _, err = file.ReadAt(block, s.entry.Offset); err == nil {
			if got := crc32c.Checksum(block); got != s.entry.Sums[0] {
				err = fmt.Errorf("%q: checksum of its first block is %08x, want %08x", s.entry.Item.Shard.FQN, got, s.entry.Sums[0])
			}
		}
	}
	return errors.Join(err, file.Close())
}
