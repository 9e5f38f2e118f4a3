package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

const (
	taskBlocks = 64             // read by one goroutine in one go: 4 MiB
	smallPart  = windowSize / 4 // bytes of a part that is read together with its neighbours
	gapShare   = 16             // of what is read together, at most one part in so many is not wanted
)

// run is what one goroutine reads of a file, in one go: some blocks of a large
// chunk, or some small chunks that lie beside each other.
//
//	file   │ a │ b │░░│ c │           large            │ d │
//	runs   └── one read ──┘└ 4 MiB ─┘└ 4 MiB ─┘└ rest ─┘└──┘
type run struct {
	file  *sharedFile
	parts []part
}

// part is some blocks of a chunk.
type part struct {
	chunk  *chunkRead
	blocks blockRange
}

// from and to are where a part lies in the file, in bytes.
func (p part) from() int64 { return p.chunk.entry.Offset + p.blocks.lo*checkpoint.BlockSize }

func (p part) to() int64 {
	return p.chunk.entry.Offset + min(p.blocks.hi*checkpoint.BlockSize, p.chunk.entry.Item.Bytes)
}

// coalesce says how chunks, in the order of their files, are read. It is a pure
// function. A block is in one part only, and what lies between two parts that
// are read together is at most one in [gapShare] of them.
func coalesce(chunks []*chunkRead) []run {
	var runs []run
	wanted := int64(0) // bytes of the last run
	for _, c := range chunks {
		if c.entry.Strides != nil {
			// Read as a whole, whatever is wanted of it.
			if len(c.blocks) > 0 {
				runs, wanted = append(runs, run{parts: []part{{c, c.blocks[0]}}}), windowSize
			}
			continue
		}
		for _, b := range c.blocks {
			for lo := b.lo; lo < b.hi; lo += taskBlocks {
				p := part{c, blockRange{lo, min(lo+taskBlocks, b.hi)}}
				size := p.to() - p.from()
				if n := len(runs) - 1; n >= 0 && runs[n].takes(p, size, wanted) {
					runs[n].parts = append(runs[n].parts, p)
					wanted += size
					continue
				}
				runs, wanted = append(runs, run{parts: []part{p}}), size
			}
		}
	}
	return runs
}

// takes reports whether a part is read together with those of a run, of which
// some bytes are wanted.
func (r *run) takes(p part, size, wanted int64) bool {
	first, last := r.parts[0], r.parts[len(r.parts)-1]
	if first.chunk.path != p.chunk.path || first.chunk.entry.Strides != nil || size > smallPart || last.to()-last.from() > smallPart {
		return false
	}
	all := p.to() - first.from()
	return p.from() >= last.to() && all <= windowSize && all-wanted-size <= (wanted+size)/gapShare
}

// read reads, verifies and copies, a window at a time. It returns how many
// bytes of the file were read.
func (r *run) read(ctx context.Context) (int64, error) {
	first := r.parts[0]
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	file, err := r.file.open(ctx)
	if err != nil {
		return 0, first.chunk.missing(r.file.path, err)
	}
	if first.chunk.entry.Strides != nil {
		return first.chunk.readStrided(ctx, r.file.path, file)
	}
	if len(r.parts) == 1 {
		return first.chunk.readBlocks(ctx, r.file.path, file, first.blocks)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	all := (*buf)[:r.parts[len(r.parts)-1].to()-first.from()]
	n, err := file.ReadAt(all, first.from())
	for _, p := range r.parts {
		lo, hi := p.from()-first.from(), p.to()-first.from()
		if int64(n) < hi {
			return int64(n), p.chunk.short(r.file.path, max(int64(n)-lo, 0)+p.blocks.lo*checkpoint.BlockSize, err)
		}
		if err := p.chunk.take(r.file.path, all[lo:hi], p.blocks.lo); err != nil {
			return int64(n), err
		}
	}
	return int64(n), nil
}

// readBlocks reads blocks of a chunk. To read them into their place would save a
// copy and no time: the kernel's copy into memory takes as long as its copy into
// the cache and ours from there, and damaged bytes would be in place.
func (c *chunkRead) readBlocks(ctx context.Context, path string, file io.ReaderAt, b blockRange) (int64, error) {
	p := part{c, b}
	n, err := scan(ctx, file, p.from(), p.to(), func(window []byte, at int64) error {
		return c.take(path, window, (at-c.entry.Offset)/checkpoint.BlockSize)
	})
	if short := shortOf(err); short != nil {
		err = c.short(path, short.at-c.entry.Offset, short.err)
	}
	return n, err
}

// take verifies a window, which begins with block first, and copies whatever is
// wanted of it.
func (c *chunkRead) take(path string, window []byte, first int64) error {
	if err := c.verify(path, first, window); err != nil {
		return err
	}
	if err := c.copyOut(window, first*checkpoint.BlockSize); err != nil {
		return fmt.Errorf("%q: %w", c.entry.Item.Shard.FQN, err)
	}
	return nil
}

// verify compares the checksum of each block of window, which begins with
// block first, if they are known.
func (c *chunkRead) verify(path string, first int64, window []byte) error {
	if !c.entry.Learned() {
		return nil
	}
	k, got := damagedBlock(window, c.entry.Sums[first:])
	if k < 0 {
		return nil
	}
	block := first + int64(k)
	return &CorruptError{
		File: path, FQN: c.entry.Item.Shard.FQN, Chunk: c.entry.BoxString(),
		Block: int(block), Offset: c.entry.Offset + block*checkpoint.BlockSize,
		Problem: "checksum of the block", Want: fmt.Sprintf("%08x", c.entry.Sums[block]), Got: fmt.Sprintf("%08x", got),
	}
}

// short is the error of a file that ends, or cannot be read, at a byte of the
// chunk.
func (c *chunkRead) short(path string, at int64, err error) error {
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("read %s at %d: %w", path, c.entry.Offset+at, err)
	}
	return &CorruptError{
		File: path, FQN: c.entry.Item.Shard.FQN, Chunk: c.entry.BoxString(),
		Block: int(at / checkpoint.BlockSize), Offset: c.entry.Offset + at, Problem: "the file ends here",
	}
}

func (c *chunkRead) missing(path string, err error) error {
	if changed := (*ChangedError)(nil); errors.As(err, &changed) {
		return fmt.Errorf("%q %s: %w", c.entry.Item.Shard.FQN, c.entry.BoxString(), err)
	}
	if errors.Is(err, fs.ErrNotExist) && c.index.Adopted() {
		return fmt.Errorf("%q %s: %w", c.entry.Item.Shard.FQN, c.entry.BoxString(), &ChangedError{File: path, Gone: true})
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%q %s: %w; load another checkpoint, and verify this one to see all damage",
			c.entry.Item.Shard.FQN, c.entry.BoxString(), err)
	}
	return fmt.Errorf("open %s: %w", path, err)
}

// copyOut copies from window, the chunk's bytes from start on, whatever is
// wanted of it.
func (c *chunkRead) copyOut(window []byte, start int64) error {
	size := int64(c.size)
	// Blocks are a multiple of every element's size.
	lo, hi := start/size, (start+int64(len(window)))/size
	var parts []slab
	for i := range c.copies {
		to := &c.copies[i]
		if to.hi <= lo || to.lo >= hi {
			continue
		}
		if parts == nil {
			parts = slabs(c.box, lo, hi)
		}
		for _, s := range parts {
			region, ok := s.box.Intersect(to.region)
			if !ok {
				continue
			}
			if err := c.copyRegion(to, window[(s.at-lo)*size:], s.box, region); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyRegion copies a region of src, which holds a box of the chunk.
func (c *chunkRead) copyRegion(to *copyTo, src []byte, box, region tensor.Box) error {
	if stored := c.entry.Item.Shard.DType; to.dtype != stored {
		return tensor.ConvertRegion(to.dst, to.box, to.dtype, src, box, stored, region)
	}
	tensor.CopyRegion(to.dst, to.box, src, box, region, c.size)
	return nil
}
