package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/ckptstore/ckptstore/tensor"
	"golang.org/x/sync/errgroup"
)

// chunkReader reads the chunks that indexes describe, wherever their files lie.
type chunkReader struct {
	load func(ctx context.Context, rank int) (*rankIndex, error)
	opener
	reach   reach
	readers int // runs read at a time
}

// opener opens the files that indexes describe.
type opener interface {
	path(x *checkpoint.Index, n int) string // of the n-th file of an index
	open(ctx context.Context, x *checkpoint.Index, n int) (object.Object, error)
}

// checkpointFiles are the files that a checkpoint has, names or adopts.
type checkpointFiles struct {
	root *Root
	ref  checkpoint.Ref
}

func (f checkpointFiles) path(x *checkpoint.Index, n int) string {
	if x.Adopted() {
		return x.Files[n].Name
	}
	return f.root.path(x.Files[n].In(f.ref), x.Files[n].Name)
}

func (f checkpointFiles) open(ctx context.Context, x *checkpoint.Index, n int) (object.Object, error) {
	if x.Adopted() {
		return local.Open(f.root.outside, x.Files[n].Name)
	}
	return f.root.b.Open(ctx, nameOf(x.Files[n].In(f.ref), x.Files[n].Name))
}

// chunkRead holds all reads of one stored chunk.
type chunkRead struct {
	entry  *checkpoint.Entry
	index  *checkpoint.Index
	rank   *rankIndex // of the index
	at     int        // of the entry in it
	path   string
	box    tensor.Box // of a value, its bytes in one dimension
	size   int        // of an element
	copies []copyTo
	blocks []blocks.Range
	passOn func(window []byte, first int64) error // of blocks that are read for other nodes too; nil: none
}

// copyTo is one region of a chunk and its destination.
type copyTo struct {
	region tensor.Box
	box    tensor.Box   // of the buffer
	dtype  tensor.DType // of the buffer; that of the chunk, unless it is converted
	dst    []byte
	lo, hi int64 // elements of the chunk that hold the region
}

// ReadData implements [Reader]. It holds a few files open and uses 1 MiB for each of its
// goroutines, of which there are a few, or as many as the backend is best read by.
func (r *FileReader) ReadData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (int64, error) {
	n, err := r.readData(ctx, wants, reads, dst)
	return n, r.wrap("load", err)
}

func (r *FileReader) readData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (int64, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return 0, err
	}
	if r.ranks == nil {
		return 0, errors.New("SetUp was not called")
	}
	return r.chunks().read(ctx, wants, reads, dst)
}

// chunks returns a reader of the chunks that the indexes name.
func (r *FileReader) chunks() chunkReader {
	return chunkReader{r.load, checkpointFiles{r.root, r.ref}, reachOf(r.root.b.Reading()), r.root.readers()}
}

func (r chunkReader) read(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (int64, error) {
	r.loadAhead(ctx, reads)
	chunks, _, err := r.resolve(ctx, wants, reads, dst)
	if err != nil {
		return 0, err
	}
	return r.readChunks(ctx, chunks)
}

// readChunks reads the wanted blocks of chunks, which are in the order of their files.
func (r chunkReader) readChunks(ctx context.Context, chunks []*chunkRead) (int64, error) {
	files := map[string]*sharedFile{}
	runs := coalesce(chunks, r.reach)
	for i := range runs {
		c := runs[i].parts[0].chunk
		f := files[c.path]
		if f == nil {
			f = &sharedFile{path: c.path, opener: func(ctx context.Context) (object.Object, error) { return r.open(ctx, c.index, c.entry.File) }}
			if c.index.Adopted() {
				f.check = func(info object.Info) error { return unchanged(c.index, c.entry.File, info) }
			}
			files[c.path] = f
		}
		f.users++
		runs[i].file = f
	}
	var total atomic.Int64
	g, inner := errgroup.WithContext(ctx)
	g.SetLimit(r.readers)
	for _, run := range runs {
		g.Go(func() error {
			defer run.file.done()
			n, err := run.read(inner)
			total.Add(n)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return total.Load(), err
	}
	return total.Load(), checkRecords(ctx, chunks, files)
}

// indexesAtATime is how many indexes are read at a time where each is a request.
const indexesAtATime = 16

// loadAhead reads the indexes that some reads need, several at a time, where each is a
// request. Its errors are found again by the reads.
func (r chunkReader) loadAhead(ctx context.Context, reads []checkpoint.Read) {
	if !r.reach.fill {
		return
	}
	ranks := map[int]bool{}
	for _, read := range reads {
		ranks[read.Rank] = true
	}
	var g errgroup.Group
	g.SetLimit(indexesAtATime)
	for rank := range ranks {
		g.Go(func() error {
			_, err := r.load(ctx, rank)
			return err
		})
	}
	_ = g.Wait() // the reads load what is missing, and report why it is
}

// checkRecords compares the chunks without sums, once all of their bytes are read, with the
// checksums of their records.
func checkRecords(ctx context.Context, chunks []*chunkRead, files map[string]*sharedFile) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers())
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

// resolve finds the stored chunk of every read, checks that all boxes fit, and groups the
// reads by chunk, in the order of the files. of has the chunk of each read.
//
// With 40,000 values, each costs 2 µs here. Maps by their names would double that, so the
// only map is the index's own.
func (r chunkReader) resolve(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (chunks, of []*chunkRead, err error) {
	of = make([]*chunkRead, len(reads))
	byEntry := make(map[*checkpoint.Entry]*chunkRead, len(reads))
	bySpot := map[readSpot]*chunkRead{}
	paths := map[*checkpoint.File]string{}
	for n, read := range reads {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if read.Want < 0 || read.Want >= len(wants) {
			return nil, nil, fmt.Errorf("%q: invalid want %d of %d", read.FQN, read.Want, len(wants))
		}
		want := wants[read.Want]
		x, i, err := r.find(ctx, readKey(want, read), read)
		if err != nil {
			return nil, nil, err
		}
		c := byEntry[&x.index.Entries[i]]
		if c == nil {
			c = newChunkRead(x.index, i)
			c.rank, c.at = x, i
			file := &x.index.Files[c.entry.File]
			if c.path = paths[file]; c.path == "" {
				c.path = r.path(x.index, c.entry.File)
				paths[file] = c.path
			}
			if tied := c.tied(bySpot); tied != c {
				c = tied
			} else {
				chunks = append(chunks, c)
			}
			byEntry[&x.index.Entries[i]] = c
		}
		if err := c.add(want, read, dst.Want(read.Want)); err != nil {
			return nil, nil, fmt.Errorf("%q: %w", read.FQN, err)
		}
		of[n] = c
	}
	for _, c := range chunks {
		c.blocks = blocks.Merge(c.blocks)
	}
	sortByPlace(chunks)
	return chunks, of, nil
}

// sortByPlace sorts chunks by their places in the files.
func sortByPlace(chunks []*chunkRead) {
	slices.SortStableFunc(chunks, func(a, b *chunkRead) int {
		switch {
		case a.path < b.path:
			return -1
		case a.path > b.path:
			return 1
		case a.entry.Offset < b.entry.Offset:
			return -1
		case a.entry.Offset > b.entry.Offset:
			return 1
		}
		return 0
	})
}

// find returns a chunk's index and its entry there.
func (r chunkReader) find(ctx context.Context, k key, read checkpoint.Read) (*rankIndex, int, error) {
	x, err := r.load(ctx, read.Rank)
	if err != nil {
		return nil, 0, err
	}
	i, ok := x.at[k]
	if !ok {
		return nil, 0, fmt.Errorf("%q %s is not among the chunks of rank %d", read.FQN, k.box, read.Rank)
	}
	return x, i, nil
}

// readSpot is the place that equal chunks share if they are stored once in a file, as tied
// weights are: they are read once.
type readSpot struct {
	path, box string
	offset    int64
	dtype     tensor.DType
}

// tied returns the first chunk at the same spot. Values, and chunks whose blocks are counted
// as they are read, are never tied.
func (c *chunkRead) tied(first map[readSpot]*chunkRead) *chunkRead {
	if c.index.Adopted() || c.entry.Item.Value || c.entry.Item.Bytes == 0 {
		return c
	}
	at := readSpot{path: c.path, box: c.box.Key(), offset: c.entry.Offset, dtype: c.entry.Item.Shard.DType}
	if first[at] == nil {
		first[at] = c
	}
	return first[at]
}

func newChunkRead(x *checkpoint.Index, i int) *chunkRead {
	e := &x.Entries[i]
	c := &chunkRead{entry: e, index: x, box: e.Item.Shard.Box, size: e.Item.Shard.DType.Size()}
	if e.Item.Value {
		c.box, c.size = tensor.Shape{e.Item.Bytes}.Full(), 1
	}
	return c
}

// add checks one read and plans it.
func (c *chunkRead) add(want checkpoint.Want, read checkpoint.Read, dst []byte) error {
	stored := c.entry.Item.Shard
	to := copyTo{region: read.Region, box: want.Shard.Box, dtype: want.Shard.DType, dst: dst}
	size := to.dtype.Size()
	if want.Value {
		to.region, to.box, to.dtype, size = c.box, c.box, stored.DType, 1
	} else {
		if err := tensor.Convertible(stored.DType, to.dtype); err != nil {
			return err
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
	if need := to.box.Volume() * int64(size); dst != nil && int64(len(dst)) != need {
		return fmt.Errorf("the buffer has %d bytes, %v needs %d", len(dst), to.box, need)
	}
	if to.lo, to.hi = tensor.Span(c.box, to.region); to.lo == to.hi {
		return nil
	}
	if dst != nil {
		c.copies = append(c.copies, to)
	}
	c.blocks = append(c.blocks, blocks.Touched(c.box, to.region, int64(c.size))...)
	return nil
}

// contains reports whether inner, which is not empty, lies in outer.
func contains(outer, inner tensor.Box) bool {
	both, ok := outer.Intersect(inner)
	return ok && both.Equal(inner)
}

// readBlocks reads blocks of a chunk. Reading them directly into their destination would save
// a copy and no time: the kernel's copy into memory takes as long as its copy into the cache
// and ours from there. It would also put damaged bytes in place.
func (c *chunkRead) readBlocks(ctx context.Context, path string, file io.ReaderAt, b blocks.Range) (int64, error) {
	p := part{c, b}
	n, err := scan.Windows(ctx, file, p.from(), p.to(), func(window []byte, at int64) error {
		first := (at - c.entry.Offset) / checkpoint.BlockSize
		err := c.verify(path, first, window)
		for range scan.Rereads {
			if err == nil || !scan.Reread(file, window, at) {
				break
			}
			err = c.verify(path, first, window)
		}
		if err != nil {
			return err
		}
		return c.place(window, first)
	})
	if short := scan.ShortOf(err); short != nil {
		err = c.short(path, short.At-c.entry.Offset, short.Err)
	}
	return n, err
}

// take verifies a window, which begins with block first, and copies its wanted parts.
func (c *chunkRead) take(path string, window []byte, first int64) error {
	if err := c.verify(path, first, window); err != nil {
		return err
	}
	return c.place(window, first)
}

// place copies the wanted parts of a window, which is verified, and passes it on.
func (c *chunkRead) place(window []byte, first int64) error {
	if err := c.copyOut(window, first*checkpoint.BlockSize); err != nil {
		return fmt.Errorf("%q: %w", c.entry.Item.Shard.FQN, err)
	}
	if c.passOn != nil {
		return c.passOn(window, first)
	}
	return nil
}

// verify compares the checksum of each block of window, which begins with block first, if
// they are known.
func (c *chunkRead) verify(path string, first int64, window []byte) error {
	if !c.entry.Learned() {
		return nil
	}
	k, got := scan.DamagedBlock(window, c.entry.Sums[first:])
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

// short returns the error for a file that ends, or cannot be read, at a byte of the chunk.
func (c *chunkRead) short(path string, at int64, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return c.missing(path, err)
	}
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

// copyOut copies the wanted parts of window, which holds the chunk's bytes from start on.
func (c *chunkRead) copyOut(window []byte, start int64) error {
	size := int64(c.size)
	// Blocks are a multiple of every element's size.
	lo, hi := start/size, (start+int64(len(window)))/size
	var parts []blocks.Slab
	for i := range c.copies {
		to := &c.copies[i]
		if to.hi <= lo || to.lo >= hi {
			continue
		}
		if parts == nil {
			parts = blocks.Slabs(c.box, lo, hi)
		}
		for _, s := range parts {
			region, ok := s.Box.Intersect(to.region)
			if !ok {
				continue
			}
			if err := c.copyRegion(to, window[(s.At-lo)*size:], s.Box, region); err != nil {
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

// readStrided reads all of a chunk whose elements are not in order.
func (c *chunkRead) readStrided(ctx context.Context, path string, file object.Object) (int64, error) {
	span, err := scan.ReadSpan(c.entry, file)
	if err != nil {
		return 0, c.short(path, 0, err)
	}
	for _, b := range c.blocks {
		if _, err := c.readBlocks(ctx, path, scan.Gathered{Entry: c.entry, Elements: span}, b); err != nil {
			return 0, err
		}
	}
	return int64(len(span)), nil
}
