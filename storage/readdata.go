package storage

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"runtime"
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
	rank   *rankIndex // of the index
	at     int        // of the entry in it
	path   string
	box    tensor.Box // of a value, its bytes in one dimension
	size   int        // of an element
	copies []copyTo
	blocks []blockRange
}

// copyTo is one region of a chunk and where it goes.
type copyTo struct {
	region tensor.Box
	box    tensor.Box   // of the buffer
	dtype  tensor.DType // of the buffer; that of the chunk, unless it is converted
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
	outer := ctx
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
	if err := g.Wait(); err != nil {
		return total.Load(), err
	}
	return total.Load(), checkRecords(outer, chunks, files)
}

// checkRecords compares the chunks that have no sums, and of which everything
// is read by now, with the checksums of their records.
func checkRecords(ctx context.Context, chunks []*chunkRead, files map[string]*sharedFile) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0) + 2)
	for _, c := range chunks {
		if c.checkable() && c.rank.cover(c.at, c.blocks) {
			f := files[c.path].again()
			g.Go(func() error {
				defer f.done()
				return c.checkRecord(ctx, f)
			})
		}
	}
	return g.Wait()
}

// read reads, verifies and copies some blocks, a window at a time.
func (c *chunkRead) read(ctx context.Context, f *sharedFile, b blockRange) (int64, error) {
	return c.readBlocks(ctx, f, nil, b)
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
		if err := c.copyOut(window, start); err != nil {
			return total, fmt.Errorf("%q: %w", c.entry.item.Shard.FQN, err)
		}
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
func (c *chunkRead) copyOut(window []byte, start int64) error {
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
func (c *chunkRead) copyRegion(to copyTo, src []byte, box, region tensor.Box) error {
	if stored := c.entry.item.Shard.DType; to.dtype != stored {
		return tensor.ConvertRegion(to.dst, to.box, to.dtype, src, box, stored, region)
	}
	tensor.CopyRegion(to.dst, to.box, src, box, region, c.size)
	return nil
}
