package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
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
	blocks []blockRange
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

// readers returns the number of runs read at a time where that is a matter of cores: some
// wait for the disk.
func readers() int { return runtime.GOMAXPROCS(0) + 2 }

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
		c.blocks = merge(c.blocks)
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
	c.blocks = append(c.blocks, touched(c.box, to.region, int64(c.size))...)
	return nil
}

// contains reports whether inner, which is not empty, lies in outer.
func contains(outer, inner tensor.Box) bool {
	both, ok := outer.Intersect(inner)
	return ok && both.Equal(inner)
}

const (
	taskBlocks = 64             // read by one goroutine in one go: 4 MiB
	smallPart  = windowSize / 4 // bytes of a part that is read together with its neighbours
	gapShare   = 16             // at most 1/gapShare of a combined read is unwanted
)

// run is one read of a goroutine: some blocks of a large chunk, or several small chunks next
// to each other in a file.
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

// from and to return the range of a part in the file, in bytes.
func (p part) from() int64 { return p.chunk.entry.Offset + p.blocks.lo*checkpoint.BlockSize }

func (p part) to() int64 {
	return p.chunk.entry.Offset + min(p.blocks.hi*checkpoint.BlockSize, p.chunk.entry.Item.Bytes)
}

// coalesce plans the reads of chunks, in the order of their files. It is a pure function. A
// block is in one part only. The gaps between parts that are read together are at most
// 1/[gapShare] of them.
func coalesce(chunks []*chunkRead, by reach) []run {
	var runs []run
	wanted := int64(0) // bytes of the last run
	for _, c := range chunks {
		if c.entry.Strides != nil {
			// Strided chunks are read as a whole.
			if len(c.blocks) > 0 {
				runs, wanted = append(runs, run{parts: []part{{c, c.blocks[0]}}}), windowSize
			}
			continue
		}
		for _, b := range c.blocks {
			for lo := b.lo; lo < b.hi; {
				p := part{c, blockRange{lo, min(lo+by.task, b.hi)}}
				n := len(runs) - 1
				if n >= 0 && by.fill {
					p.blocks.hi = runs[n].fill(p, by)
				}
				size := p.to() - p.from()
				if n >= 0 && runs[n].takes(p, size, wanted, by) {
					runs[n].parts = append(runs[n].parts, p)
					wanted += size
				} else {
					p.blocks.hi = min(lo+by.task, b.hi)
					runs, wanted = append(runs, run{parts: []part{p}}), p.to()-p.from()
				}
				lo = p.blocks.hi
			}
		}
	}
	return runs
}

// takes reports whether a part is read together with the parts of a run, of which wanted
// bytes are wanted.
func (r *run) takes(p part, size, wanted int64, by reach) bool {
	first, last := r.parts[0], r.parts[len(r.parts)-1]
	if first.chunk.path != p.chunk.path || first.chunk.entry.Strides != nil || size > by.small || last.to()-last.from() > by.small {
		return false
	}
	all := p.to() - first.from()
	return p.from() >= last.to() && all <= by.most && all-wanted-size <= (wanted+size)/gapShare
}

// fill returns the end of as many blocks of a part as the run has space for; that of the
// part, if it has none.
func (r *run) fill(p part, by reach) int64 {
	end := r.parts[0].from() + by.most
	if blocks := (end - p.from()) / checkpoint.BlockSize; p.to() > end && blocks > 0 {
		return p.blocks.lo + blocks
	}
	return p.blocks.hi
}

// read reads, verifies and copies, a window at a time. It returns the number of bytes read
// from the file.
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
	if _, far := file.(object.Ranger); far {
		return r.readStream(ctx, file)
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

// readStream reads the parts from one stream.
func (r *run) readStream(ctx context.Context, file object.Object) (total int64, err error) {
	first, last := r.parts[0], r.parts[len(r.parts)-1]
	src, stop, err := play(file, first.from(), last.to())
	if err != nil {
		return 0, first.chunk.missing(r.file.path, err)
	}
	defer stop()
	for _, p := range r.parts {
		n, err := p.chunk.readBlocks(ctx, r.file.path, src, p.blocks)
		total += n
		if err != nil {
			return total, err
		}
	}
	return last.to() - first.from(), nil
}

// readBlocks reads blocks of a chunk. Reading them directly into their destination would save
// a copy and no time: the kernel's copy into memory takes as long as its copy into the cache
// and ours from there. It would also put damaged bytes in place.
func (c *chunkRead) readBlocks(ctx context.Context, path string, file io.ReaderAt, b blockRange) (int64, error) {
	p := part{c, b}
	n, err := scan(ctx, file, p.from(), p.to(), func(window []byte, at int64) error {
		first := (at - c.entry.Offset) / checkpoint.BlockSize
		err := c.verify(path, first, window)
		for range rereads {
			if err == nil || !reread(file, window, at) {
				break
			}
			err = c.verify(path, first, window)
		}
		if err != nil {
			return err
		}
		return c.place(window, first)
	})
	if short := shortOf(err); short != nil {
		err = c.short(path, short.at-c.entry.Offset, short.err)
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

// sharedFile is a file that is open from its first user to its last. Since users come in the
// order of the files, few are open at a time.
type sharedFile struct {
	path   string
	opener func(context.Context) (object.Object, error)
	check  func(object.Info) error // of the open file; nil: none

	mu    sync.Mutex
	users int
	file  object.Object
}

func (f *sharedFile) open(ctx context.Context) (object.Object, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		file, err := f.opener(ctx)
		if err != nil {
			return nil, err
		}
		if f.check != nil {
			info, err := file.Stat()
			if err == nil {
				err = f.check(info)
			}
			if err != nil {
				_ = file.Close() // nothing was written to it
				return nil, err
			}
		}
		f.file = file
	}
	return f.file, nil
}

// again adds a user, possibly after the file was closed.
func (f *sharedFile) again() *sharedFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.users++
	return f
}

// done closes the file after its last user. Nothing was written to it, so an error of Close
// does not matter.
func (f *sharedFile) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users == 0 && f.file != nil {
		_ = f.file.Close()
		f.file = nil
	}
}

// readStrided reads all of a chunk whose elements are not in order.
func (c *chunkRead) readStrided(ctx context.Context, path string, file object.Object) (int64, error) {
	span, err := readSpan(c.entry, file)
	if err != nil {
		return 0, c.short(path, 0, err)
	}
	for _, b := range c.blocks {
		if _, err := c.readBlocks(ctx, path, gathered{c.entry, span}, b); err != nil {
			return 0, err
		}
	}
	return int64(len(span)), nil
}
