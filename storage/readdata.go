package storage

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"
)

const (
	windowBlocks = 16 // read and verified at once: 1 MiB, which stays in cache
	taskBlocks   = 64 // read by one goroutine in one go: 4 MiB
)

// chunkReader reads the chunks that indexes describe, wherever their files
// lie.
type chunkReader struct {
	fs   vfs.FS
	load func(rank int) (*rankIndex, error)
	path func(x *index, n int) string // of the n-th file of an index
}

// chunkRead is all that is wanted of one stored chunk.
type chunkRead struct {
	entry  *entry
	index  *index
	path   string
	box    tensor.Box // of a value, its bytes in one dimension
	size   int        // of an element
	copies []copyTo
	blocks []blockRange
}

// copyTo is one region of a chunk and where it goes.
type copyTo struct {
	region tensor.Box
	box    tensor.Box // of the buffer
	dst    []byte
	lo, hi int64 // elements of the chunk that hold the region
}

// ReadData implements [Reader]. It holds a few files open and uses 1 MiB for
// each of its goroutines.
func (r *FileReader) ReadData(ctx context.Context, wants []plan.Want, reads []plan.Read, dst Destination) (int64, error) {
	n, err := r.readData(ctx, wants, reads, dst)
	return n, r.wrap("load", err)
}

func (r *FileReader) readData(ctx context.Context, wants []plan.Want, reads []plan.Read, dst Destination) (int64, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return 0, err
	}
	if r.ranks == nil {
		return 0, errors.New("SetUp was not called")
	}
	return r.chunks().read(ctx, wants, reads, dst)
}

// chunks reads what the indexes name.
func (r *FileReader) chunks() chunkReader {
	return chunkReader{fs: r.root.fs, load: r.load, path: func(x *index, n int) string { return r.root.filePath(r.ref, x, n) }}
}

func (r chunkReader) read(ctx context.Context, wants []plan.Want, reads []plan.Read, dst Destination) (int64, error) {
	chunks, err := r.resolve(ctx, wants, reads, dst)
	if err != nil {
		return 0, err
	}
	files := map[string]*sharedFile{}
	for _, c := range chunks {
		f := files[c.path]
		if f == nil {
			f = &sharedFile{fs: r.fs, path: c.path}
			if c.index.adopted() {
				f.check = func(info vfs.FileInfo) error { return c.index.unchanged(c.entry.file, info) }
			}
			files[c.path] = f
		}
		for _, b := range c.tasks() {
			f.users += int((b.hi - b.lo + taskBlocks - 1) / taskBlocks)
		}
	}
	var total atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0) + 2) // some wait for the disk
	for _, c := range chunks {
		f := files[c.path]
		if c.entry.strides != nil {
			for range c.tasks() {
				g.Go(func() error {
					defer f.done()
					n, err := c.readStrided(ctx, f)
					total.Add(n)
					return err
				})
			}
			continue
		}
		for _, b := range c.blocks {
			for lo := b.lo; lo < b.hi; lo += taskBlocks {
				g.Go(func() error {
					defer f.done()
					n, err := c.read(ctx, f, blockRange{lo, min(lo+taskBlocks, b.hi)})
					total.Add(n)
					return err
				})
			}
		}
	}
	err = g.Wait()
	return total.Load(), err
}

// resolve finds the stored chunk of every read, checks that all boxes fit, and
// groups the reads by chunk, in the order of the files.
func (r chunkReader) resolve(ctx context.Context, wants []plan.Want, reads []plan.Read, dst Destination) ([]*chunkRead, error) {
	byKey := map[key]*chunkRead{}
	var chunks []*chunkRead
	for _, read := range reads {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if read.Want < 0 || read.Want >= len(wants) {
			return nil, fmt.Errorf("%q: a read is for want %d of %d", read.FQN, read.Want, len(wants))
		}
		want := wants[read.Want]
		k := key{value: want.Value, rank: read.Rank, fqn: read.FQN}
		if !want.Value {
			k.box = read.Chunk.Key()
		}
		c := byKey[k]
		if c == nil {
			x, err := r.load(read.Rank)
			if err != nil {
				return nil, err
			}
			i, ok := x.at[k]
			if !ok {
				return nil, fmt.Errorf("%q %s is not among the chunks of rank %d", read.FQN, k.box, read.Rank)
			}
			c = newChunkRead(x.index, i)
			c.path = r.path(x.index, c.entry.file)
			byKey[k] = c
			chunks = append(chunks, c)
		}
		if err := c.add(want, read, dst.Want(read.Want)); err != nil {
			return nil, fmt.Errorf("%q: %w", read.FQN, err)
		}
	}
	for _, c := range chunks {
		c.blocks = merge(c.blocks)
	}
	slices.SortStableFunc(chunks, func(a, b *chunkRead) int {
		switch {
		case a.path < b.path:
			return -1
		case a.path > b.path:
			return 1
		case a.entry.offset < b.entry.offset:
			return -1
		case a.entry.offset > b.entry.offset:
			return 1
		}
		return 0
	})
	return chunks, nil
}

func newChunkRead(x *index, i int) *chunkRead {
	e := &x.entries[i]
	c := &chunkRead{entry: e, index: x, box: e.item.Shard.Box, size: e.item.Shard.DType.Size()}
	if e.item.Value {
		c.box, c.size = tensor.Shape{e.item.Bytes}.Full(), 1
	}
	return c
}

// add checks one read and plans it.
func (c *chunkRead) add(want plan.Want, read plan.Read, dst []byte) error {
	to := copyTo{region: read.Region, box: want.Shard.Box, dst: dst}
	if want.Value {
		to.region, to.box = c.box, c.box
	} else {
		stored := c.entry.item.Shard
		if want.Shard.DType != stored.DType {
			return fmt.Errorf("stored as %s, wanted as %s", stored.DType, want.Shard.DType)
		}
		if !want.Shard.Global.Equal(stored.Global) {
			return fmt.Errorf("stored with shape %v, wanted with shape %v", stored.Global, want.Shard.Global)
		}
		if err := want.Shard.Validate(); err != nil {
			return err
		}
		if err := to.region.Validate(stored.Global); err != nil {
			return err
		}
		if !to.region.Empty() && (!contains(c.box, to.region) || !contains(to.box, to.region)) {
			return fmt.Errorf("region %v does not lie in chunk %v and want %v", to.region, c.box, to.box)
		}
	}
	if need := to.box.Volume() * int64(c.size); int64(len(dst)) != need {
		return fmt.Errorf("the buffer has %d bytes, %v needs %d", len(dst), to.box, need)
	}
	if to.lo, to.hi = tensor.Span(c.box, to.region); to.lo == to.hi {
		return nil
	}
	c.copies = append(c.copies, to)
	c.blocks = append(c.blocks, touched(c.box, to.region, int64(c.size))...)
	return nil
}

// contains reports whether inner, which is not empty, lies in outer.
func contains(outer, inner tensor.Box) bool {
	both, ok := outer.Intersect(inner)
	return ok && both.Equal(inner)
}

// read reads, verifies and copies some blocks, a window at a time.
func (c *chunkRead) read(ctx context.Context, f *sharedFile, b blockRange) (int64, error) {
	return c.readBlocks(ctx, f, nil, b)
}

// tasks are the ranges of blocks that are read at a time, whatever their size:
// a strided chunk is read as a whole.
func (c *chunkRead) tasks() []blockRange {
	if c.entry.strides != nil && len(c.blocks) > 0 {
		return []blockRange{{0, 1}}
	}
	return c.blocks
}

// readStrided reads all of a chunk whose elements are not in order.
func (c *chunkRead) readStrided(ctx context.Context, f *sharedFile) (int64, error) {
	file, err := f.open()
	if err != nil {
		return 0, c.missing(f.path, err)
	}
	span, err := c.entry.readSpan(file)
	if err != nil {
		return 0, c.short(f.path, 0, err)
	}
	for _, b := range c.blocks {
		if _, err := c.readBlocks(ctx, f, span, b); err != nil {
			return 0, err
		}
	}
	return int64(len(span)), nil
}

func (c *chunkRead) readBlocks(ctx context.Context, f *sharedFile, span []byte, b blockRange) (int64, error) {
	file, err := f.open()
	if err != nil {
		return 0, c.missing(f.path, err)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	total := int64(0)
	for lo := b.lo; lo < b.hi; lo += windowBlocks {
		if err := ctx.Err(); err != nil {
			return total, err
		}
		start := lo * BlockSize
		end := min(min(lo+windowBlocks, b.hi)*BlockSize, c.entry.item.Bytes)
		window := (*buf)[:end-start]
		n, err := c.entry.window(file, span, window, start)
		total += int64(n)
		if n < len(window) {
			return total, c.short(f.path, start+int64(n), err)
		}
		if err := c.verify(f.path, lo, window); err != nil {
			return total, err
		}
		c.copyOut(window, start)
	}
	return total, nil
}

// verify compares the checksum of each block of window, which begins with
// block first, if they are known.
func (c *chunkRead) verify(path string, first int64, window []byte) error {
	if !c.entry.learned() {
		return nil
	}
	for block := first; len(window) > 0; block++ {
		n := min(BlockSize, len(window))
		if got, want := crc32.Checksum(window[:n], castagnoli), c.entry.sums[block]; got != want {
			return &CorruptError{
				File: path, FQN: c.entry.item.Shard.FQN, Chunk: c.entry.box(),
				Block: int(block), Offset: c.entry.offset + block*BlockSize,
				Problem: "checksum of the block", Want: fmt.Sprintf("%08x", want), Got: fmt.Sprintf("%08x", got),
			}
		}
		window = window[n:]
	}
	return nil
}

// short is the error of a file that ends, or cannot be read, at a byte of the
// chunk.
func (c *chunkRead) short(path string, at int64, err error) error {
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("read %s at %d: %w", path, c.entry.offset+at, err)
	}
	return &CorruptError{
		File: path, FQN: c.entry.item.Shard.FQN, Chunk: c.entry.box(),
		Block: int(at / BlockSize), Offset: c.entry.offset + at, Problem: "the file ends here",
	}
}

func (c *chunkRead) missing(path string, err error) error {
	if changed := (*ChangedError)(nil); errors.As(err, &changed) {
		return fmt.Errorf("%q %s: %w", c.entry.item.Shard.FQN, c.entry.box(), err)
	}
	if errors.Is(err, fs.ErrNotExist) && c.index.adopted() {
		return fmt.Errorf("%q %s: %w", c.entry.item.Shard.FQN, c.entry.box(), &ChangedError{File: path, Gone: true})
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%q %s: %w; load another checkpoint, and verify this one to see all damage",
			c.entry.item.Shard.FQN, c.entry.box(), err)
	}
	return fmt.Errorf("open %s: %w", path, err)
}

// copyOut copies from window, the chunk's bytes from start on, whatever is
// wanted of it.
func (c *chunkRead) copyOut(window []byte, start int64) {
	size := int64(c.size)
	// Blocks are a multiple of every element's size.
	lo, hi := start/size, (start+int64(len(window)))/size
	var parts []slab
	for _, to := range c.copies {
		if to.hi <= lo || to.lo >= hi {
			continue
		}
		if parts == nil {
			parts = slabs(c.box, lo, hi)
		}
		for _, s := range parts {
			region, ok := s.box.Intersect(to.region)
			if ok {
				tensor.CopyRegion(to.dst, to.box, window[(s.at-lo)*size:], s.box, region, c.size)
			}
		}
	}
}
