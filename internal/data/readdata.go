package data

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/ckptstore/ckptstore/tensor"
	"golang.org/x/sync/errgroup"
)

// chunkReader reads the chunks that indexes describe, wherever their files
// lie.
type chunkReader struct {
	load func(ctx context.Context, rank int) (*rankIndex, error)
	opener
}

// opener opens the files that indexes describe.
type opener interface {
	path(x *checkpoint.Index, n int) string // of the n-th file of an index
	open(ctx context.Context, x *checkpoint.Index, n int) (object.Object, error)
}

// checkpointFiles are those of a checkpoint, and those that it adopts.
type checkpointFiles struct {
	root *Root
	ref  checkpoint.Ref
}

func (f checkpointFiles) path(x *checkpoint.Index, n int) string {
	if x.Adopted() {
		return x.Files[n].Name
	}
	return f.root.path(f.ref, x.Files[n].Name)
}

func (f checkpointFiles) open(ctx context.Context, x *checkpoint.Index, n int) (object.Object, error) {
	if x.Adopted() {
		return local.Open(f.root.outside, x.Files[n].Name)
	}
	return f.root.b.Open(ctx, nameOf(f.ref, x.Files[n].Name))
}

// chunkRead is all that is wanted of one stored chunk.
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

// chunks reads what the indexes name.
func (r *FileReader) chunks() chunkReader {
	return chunkReader{load: r.load, opener: checkpointFiles{r.root, r.ref}}
}

func (r chunkReader) read(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (int64, error) {
	chunks, _, err := r.resolve(ctx, wants, reads, dst)
	if err != nil {
		return 0, err
	}
	files := map[string]*sharedFile{}
	runs := coalesce(chunks)
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
	g.SetLimit(readers())
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

// readers is how many runs are read at a time: some wait for the disk.
func readers() int { return runtime.GOMAXPROCS(0) + 2 }

// checkRecords compares the chunks that have no sums, and of which everything
// is read by now, with the checksums of their records.
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
