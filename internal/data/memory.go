package data

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/zeebo/blake3"
	"golang.org/x/sync/errgroup"
)

// Memory gives out chunks that are in memory beside their files. It is called
// by several goroutines, and what it gives out stays mapped until the call that
// was given the Memory returns.
type Memory interface {
	// Chunk is what may be the bytes of an item that a rank has saved, and
	// their digest, zero where it is not known; nil if there is nothing.
	Chunk(rank int, it checkpoint.Item) (data []byte, digest checkpoint.Digest)
}

// FromMemory says what of a load came from memory.
type FromMemory struct {
	Bytes int64             // of the blocks that were copied
	Rest  []checkpoint.Read // what is not there, or is not what was committed
	Unfit []error           // of chunks that are there: why they were not used
}

// ReadMemory is [FileReader.ReadData] for chunks that are in memory. A chunk is
// taken from there if it has the digest that the committed index has; where its
// digest is not known it is taken. And the checksum of every block is compared,
// of a copy that nobody else can change. What cannot be taken is to be read by
// ReadData, and undefined in dst before. After an error all of dst is undefined.
func (r *FileReader) ReadMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, m Memory) (FromMemory, error) {
	out, err := r.readMemory(ctx, wants, reads, dst, m)
	return out, r.wrap("load from memory", err)
}

// tiny is the size of a chunk, in bytes, that is copied at once: a goroutine takes longer.
const tiny = 16 << 10

// inMemory is a chunk that may be taken from memory.
type inMemory struct {
	*chunkRead
	data   []byte
	digest checkpoint.Digest
	proven bool // all of it

	mu    sync.Mutex
	unfit error
}

func (r *FileReader) readMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, m Memory) (FromMemory, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return FromMemory{}, err
	}
	if r.ranks == nil {
		return FromMemory{}, errors.New("SetUp was not called")
	}
	chunks, of, err := r.chunks().resolve(ctx, wants, reads, dst)
	if err != nil {
		return FromMemory{}, err
	}
	there := make(map[*chunkRead]*inMemory, len(chunks))
	var total atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, c := range chunks {
		if c.index.Adopted() || !c.entry.Learned() {
			continue // they have no digest to be compared with
		}
		data, digest := m.Chunk(c.index.Rank, c.entry.Item)
		if data == nil {
			continue
		}
		in := &inMemory{chunkRead: c, data: data, digest: digest}
		there[c] = in
		if in.digest == (checkpoint.Digest{}) {
			g.Go(func() error { return in.all(ctx, &total) })
			continue
		}
		if err := in.same(); err != nil {
			in.fail(err)
			continue
		}
		if len(data) <= tiny {
			for _, b := range c.blocks {
				if err := in.copy(ctx, b, &total); err != nil {
					return FromMemory{}, errors.Join(err, g.Wait())
				}
			}
			continue
		}
		for _, b := range c.blocks {
			for lo := b.lo; lo < b.hi; lo += taskBlocks {
				g.Go(func() error { return in.copy(ctx, blockRange{lo, min(lo+taskBlocks, b.hi)}, &total) })
			}
		}
	}
	if err := g.Wait(); err != nil {
		return FromMemory{}, err
	}
	out := FromMemory{Bytes: total.Load()}
	for n, read := range reads {
		if in := there[of[n]]; in == nil || in.unfit != nil {
			out.Rest = append(out.Rest, read)
		}
	}
	for _, c := range chunks {
		if in := there[c]; in != nil && in.unfit != nil {
			out.Unfit = append(out.Unfit, in.why())
		}
	}
	return out, nil
}

// readKey is the key of the chunk that a read is of.
func readKey(want checkpoint.Want, read checkpoint.Read) key {
	k := key{value: want.Value, rank: read.Rank, fqn: read.FQN}
	if !want.Value {
		k.box = read.Chunk.Key()
	}
	return k
}

// why says of which chunk it is that it was not used.
func (in *inMemory) why() error {
	return fmt.Errorf("%q %s of rank %d: %w", in.entry.Item.Shard.FQN, in.entry.BoxString(), in.index.Rank, in.unfit)
}

// fail says why a chunk is not used.
func (in *inMemory) fail(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.unfit == nil {
		in.unfit = err
	}
}

func (in *inMemory) failed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.unfit != nil
}

// same compares what is known of the chunk in memory with the index.
func (in *inMemory) same() error {
	if got, want := int64(len(in.data)), in.entry.Item.Bytes; got != want {
		return fmt.Errorf("it has %d bytes in memory, %d were committed", got, want)
	}
	if in.digest != in.entry.Digest {
		return fmt.Errorf("its digest in memory is %s, %s was committed", in.digest, in.entry.Digest)
	}
	return nil
}

// all takes the digest of a chunk of which it is not known, and then what is
// wanted of it.
func (in *inMemory) all(ctx context.Context, total *atomic.Int64) error {
	if err := in.digestAll(ctx); err != nil || in.failed() {
		return err
	}
	for _, b := range in.blocks {
		if err := in.copy(ctx, b, total); err != nil {
			return err
		}
	}
	return nil
}

// digestAll takes the digest of a chunk of which it is not known.
func (in *inMemory) digestAll(ctx context.Context) error {
	hash := blake3.New()
	for data := in.data; len(data) > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, _ := hash.Write(data[:min(windowSize, len(data))]) // never fails
		data = data[n:]
	}
	hash.Sum(in.digest[:0])
	if err := in.same(); err != nil {
		in.fail(err)
	}
	return nil
}

// copyBlocks is verified and copied at once: what of a core's cache is left
// beside source and destination.
const copyBlocks = 4

// copy verifies some blocks and copies what is wanted of them.
func (in *inMemory) copy(ctx context.Context, b blockRange, total *atomic.Int64) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for lo := b.lo; lo < b.hi && !in.failed(); lo += copyBlocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		start := lo * checkpoint.BlockSize
		end := min(min(lo+copyBlocks, b.hi)*checkpoint.BlockSize, in.entry.Item.Bytes)
		window, at := in.direct(start, end)
		if at < 0 {
			window = (*buf)[:end-start]
		}
		copy(window, in.data[start:end])
		if !in.intact(lo, window) {
			return nil
		}
		if at >= 0 && len(in.copies) == 1 {
			total.Add(int64(len(window)))
			continue // it is there
		}
		if err := in.others(at).copyOut(window, start); err != nil {
			return fmt.Errorf("%q: %w", in.entry.Item.Shard.FQN, err)
		}
		total.Add(int64(len(window)))
	}
	return nil
}

// intact verifies a window, which begins with block first.
func (in *inMemory) intact(first int64, window []byte) bool {
	err := in.verify("memory", first, window)
	if damage := (*CorruptError)(nil); errors.As(err, &damage) { // of no file
		err = fmt.Errorf("%s %d in memory is %s, %s was committed", damage.Problem, damage.Block, damage.Got, damage.Want)
	}
	if err != nil {
		in.fail(err)
	}
	return err == nil
}

// direct is the part of a buffer that is to have just the bytes of the chunk
// from start to end, and which of the copies it belongs to, or -1: then they are
// verified where they go. What is found wrong there is read again from the file.
func (in *inMemory) direct(start, end int64) (part []byte, at int) {
	size := int64(in.size)
	for i, to := range in.copies {
		if start < to.lo*size || end > to.hi*size || to.dtype != in.entry.Item.Shard.DType {
			continue
		}
		lo, hi := tensor.Span(to.box, to.region)
		if volume := to.region.Volume(); hi-lo == volume && to.hi-to.lo == volume {
			from := (lo - to.lo) * size
			return to.dst[from+start : from+end], i
		}
	}
	return nil, -1
}

// others is the chunk without one of its copies.
func (in *inMemory) others(at int) *chunkRead {
	if at < 0 {
		return in.chunkRead
	}
	c := *in.chunkRead
	c.copies = slices.Delete(slices.Clone(c.copies), at, at+1)
	return &c
}

// ChunkDigest is the digest of a chunk or value that a rank has written.
type ChunkDigest struct {
	Item   checkpoint.Item
	Digest checkpoint.Digest
}

// ChunkDigests are the digests of all that a rank has written of a checkpoint,
// in the order of its items, by the index that the digest names. One that is not
// in place or is another is an error.
func (r *Root) ChunkDigests(ctx context.Context, ref checkpoint.Ref, of checkpoint.RankIndex) ([]ChunkDigest, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var x checkpoint.Index
	if err == nil {
		x, err = r.readIndex(ctx, ref, of)
	}
	if err != nil {
		return nil, fmt.Errorf("digests of rank %d of checkpoint %s: %w", of.Rank, ref, err)
	}
	out := make([]ChunkDigest, len(x.Entries))
	for i, e := range x.Entries {
		out[i] = ChunkDigest{e.Item, e.Digest}
	}
	return out, nil
}
