package data

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// An adopted or foreign chunk has no sums of ours until they are learned, but
// its file may have a checksum of the whole record that holds it. It says
// nothing of a part, so it is compared as soon as reads have covered all of
// the chunk, in one go or window by window: who copies a checkpoint does not
// give damaged bytes a fresh checksum.

// cover notes that blocks of the i-th entry were read, and reports whether all
// of it is covered now. Then it begins anew.
func (x *rankIndex) cover(i int, blocks []blockRange) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	seen := merge(append(append([]blockRange(nil), x.seen[i]...), blocks...))
	all := (x.index.Entries[i].Item.Bytes + checkpoint.BlockSize - 1) / checkpoint.BlockSize
	if len(seen) == 1 && seen[0] == (blockRange{0, all}) {
		delete(x.seen, i)
		return true
	}
	if x.seen == nil {
		x.seen = map[int][]blockRange{}
	}
	x.seen[i] = seen
	return false
}

// checkable reports a chunk whose bytes have no sums but those that the
// program which wrote them left.
func (c *chunkRead) checkable() bool {
	e := c.entry
	return c.index.Adopted() && !e.Learned() && len(c.blocks) > 0 && (e.Record != nil || e.Item.Value)
}

// checkRecord compares the whole record of a chunk with its checksum, or all
// records of a value's archive.
func (c *chunkRead) checkRecord(ctx context.Context, f *sharedFile) error {
	file, err := f.open(ctx)
	if err != nil {
		return c.missing(f.path, err)
	}
	problem, err := recordProblem(ctx, file, c.entry)
	if err == nil && problem != "" {
		err = &CorruptError{File: f.path, FQN: c.entry.Item.Shard.FQN, Chunk: c.entry.BoxString(), Block: -1, Offset: c.entry.Offset, Problem: problem}
	}
	return err
}

func recordProblem(ctx context.Context, file object.Object, e *checkpoint.Entry) (string, error) {
	if e.Item.Value {
		problem, _ := archiveProblem(file, e)
		return problem, ctx.Err()
	}
	sum := recordSum{Record: e.Record}
	return sum.problem(ctx, file)
}
