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
	"github.com/ckptstore/ckptstore/internal/data/blocks"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/tensor"
	"golang.org/x/sync/errgroup"
)

// Three operations use chunks in memory. They differ in what they do with the blocks of a
// chunk, and share the rest, in memoryScan:
//
//	ReadMemory    copies blocks, and verifies the copy, which no other process can change
//	VerifyMemory  verifies blocks in place, for a caller that shares the memory
//	ProveMemory   verifies all blocks of all chunks before they are requested

// Memory provides chunks that are in memory as well as in files. Several goroutines call it.
// Its memory stays mapped until the call that it was passed to returns.
type Memory interface {
	// Chunk returns bytes that may be those of an item that a rank has saved, and their
	// digest, zero if unknown. It returns nil if it has none.
	Chunk(rank int, it checkpoint.Item) (data []byte, digest checkpoint.Digest)
}

// FromMemory reports the part of a load that came from memory.
type FromMemory struct {
	Bytes int64             // of the blocks that were copied
	Rest  []checkpoint.Read // reads of chunks that are not in memory, or differ from the committed ones
	Unfit []error           // reasons why chunks in memory were not used
}

// ReadMemory is [FileReader.ReadData] for chunks in memory. It uses a chunk if its digest is
// the one in the committed index; if the digest is unknown, it computes it. It then compares
// the checksum of every block, of a copy that no other process can change. Reads that it
// cannot serve from memory must go through ReadData; their part of dst is undefined before.
// After an error all of dst is undefined.
func (r *FileReader) ReadMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, m Memory) (FromMemory, error) {
	out, err := r.readMemory(ctx, wants, reads, dst, m)
	return out, r.wrap("load from memory", err)
}

// VerifyMemory is [FileReader.ReadMemory] without the copy, for a caller that shares the
// memory itself with a reader. For reads that are not in Rest, the chunk has the digest of
// the committed index, and every block that is read has its checksum in that index, unless p
// proves the chunk. Later writes to the memory are not detected: the caller must prevent
// them.
func (r *FileReader) VerifyMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, m Memory, p *Proof) (FromMemory, error) {
	out, err := r.verifyMemory(ctx, wants, reads, m, p)
	return out, r.wrap("verify memory", err)
}

// Proof records which chunks in memory equal the committed ones. A nil Proof proves nothing.
type Proof struct{ chunks map[key]bool }

// ProveMemory verifies all chunks in memory, before they are requested. Chunks that differ
// from the committed ones are not proven, and cause no error.
func (r *FileReader) ProveMemory(ctx context.Context, m Memory) (*Proof, error) {
	p, err := r.proveMemory(ctx, m)
	return p, r.wrap("verify memory", err)
}

func (r *FileReader) readMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, m Memory) (FromMemory, error) {
	if err := r.readable(ctx); err != nil {
		return FromMemory{}, err
	}
	chunks, of, err := r.chunks().resolve(ctx, wants, reads, dst)
	if err != nil {
		return FromMemory{}, err
	}
	there := make(map[*chunkRead]*inMemory, len(chunks))
	s := newMemoryScan(ctx, (*inMemory).copy)
	for _, c := range chunks {
		if in := inMemoryOf(c, m); in != nil {
			there[c] = in
			if err := s.start(in); err != nil {
				break
			}
		}
	}
	return s.result(reads, func(n int) *inMemory { return there[of[n]] })
}

func (r *FileReader) verifyMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, m Memory, p *Proof) (FromMemory, error) {
	if err := r.readable(ctx); err != nil {
		return FromMemory{}, err
	}
	// Equal chunks that are stored once in a file are two chunks here: their memory differs.
	there := map[key]*inMemory{} // nil: not in memory
	var order []*inMemory
	for _, read := range reads {
		k := readKey(wants[read.Want], read)
		in, known := there[k]
		if !known {
			var err error
			if in, err = r.inMemory(ctx, k, m); err != nil {
				return FromMemory{}, err
			}
			if there[k] = in; in != nil {
				in.proven = p != nil && p.chunks[k]
				order = append(order, in)
			}
		}
		if in == nil {
			continue
		}
		region := read.Region
		if wants[read.Want].Value {
			region = in.box
		}
		if !region.Empty() && !contains(in.box, region) {
			return FromMemory{}, fmt.Errorf("%q: region %v does not lie in chunk %v", read.FQN, region, in.box)
		}
		in.blocks = append(in.blocks, blocks.Touched(in.box, region, int64(in.size))...)
	}
	s := newMemoryScan(ctx, (*inMemory).check)
	for _, in := range order {
		in.blocks = blocks.Merge(in.blocks)
		if err := s.start(in); err != nil {
			break
		}
	}
	return s.result(reads, func(n int) *inMemory { return there[readKey(wants[reads[n].Want], reads[n])] })
}

func (r *FileReader) proveMemory(ctx context.Context, m Memory) (*Proof, error) {
	p := &Proof{map[key]bool{}}
	if err := r.readable(ctx); err != nil {
		return p, err
	}
	there := map[key]*inMemory{}
	s := newMemoryScan(ctx, (*inMemory).check)
	err := func() error {
		for rank := range r.ranks {
			x, err := r.load(ctx, rank)
			if err != nil {
				return err
			}
			for k := range x.at {
				in, err := r.inMemory(ctx, k, m)
				if err != nil {
					return err
				}
				if in == nil {
					continue
				}
				in.blocks = []blocks.Range{{Lo: 0, Hi: checkpoint.Blocks(in.entry.Item.Bytes)}}
				there[k] = in
				if err := s.start(in); err != nil {
					return err
				}
			}
		}
		return nil
	}()
	if err := errors.Join(err, s.group.Wait()); err != nil {
		return p, err
	}
	for k, in := range there {
		if in.unfit == nil {
			p.chunks[k] = true
		}
	}
	return p, nil
}

// readable returns an error if SetUp was not called.
func (r *FileReader) readable(ctx context.Context) error {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return err
	}
	if r.ranks == nil {
		return errors.New("SetUp was not called")
	}
	return nil
}

// readKey returns the key of the chunk that a read is of.
func readKey(want checkpoint.Want, read checkpoint.Read) key {
	k := key{value: want.Value, rank: read.Rank, fqn: read.FQN}
	if !want.Value {
		k.box = read.Chunk.Key()
	}
	return k
}

// inMemory is a chunk that may be taken from memory.
type inMemory struct {
	*chunkRead
	data   []byte
	digest checkpoint.Digest
	proven bool // all of it

	mu    sync.Mutex
	unfit error
}

// inMemory returns the chunk of a key, or nil: see inMemoryOf.
func (r *FileReader) inMemory(ctx context.Context, k key, m Memory) (*inMemory, error) {
	x, err := r.load(ctx, k.rank)
	if err != nil {
		return nil, err
	}
	i, ok := x.at[k]
	if !ok {
		return nil, fmt.Errorf("%q %s is not among the chunks of rank %d", k.fqn, k.box, k.rank)
	}
	return inMemoryOf(newChunkRead(x.index, i), m), nil
}

// inMemoryOf returns a chunk if it is in memory and can be compared with the committed one,
// or nil.
func inMemoryOf(c *chunkRead, m Memory) *inMemory {
	if c.index.Adopted() || !c.entry.Learned() {
		return nil // they have no digest to be compared with
	}
	data, digest := m.Chunk(c.index.Rank, c.entry.Item)
	if data == nil {
		return nil
	}
	return &inMemory{chunkRead: c, data: data, digest: digest}
}

// tiny is the size, in bytes, of a chunk that is visited synchronously: a goroutine takes
// longer.
const tiny = 16 << 10

// memoryScan visits the wanted blocks of chunks in memory on all processors.
type memoryScan struct {
	group  *errgroup.Group
	ctx    context.Context // of the group
	visit  func(*inMemory, context.Context, blocks.Range, *atomic.Int64) error
	total  atomic.Int64 // bytes of the visited blocks
	chunks []*inMemory  // all that were started, in their order
	err    error        // of a synchronous visit
}

func newMemoryScan(ctx context.Context, visit func(*inMemory, context.Context, blocks.Range, *atomic.Int64) error) *memoryScan {
	s := &memoryScan{visit: visit}
	s.group, s.ctx = errgroup.WithContext(ctx)
	s.group.SetLimit(runtime.GOMAXPROCS(0))
	return s
}

// start compares the known facts of a chunk with the index, computes its digest if unknown,
// and visits its wanted blocks.
func (s *memoryScan) start(in *inMemory) error {
	s.chunks = append(s.chunks, in)
	switch {
	case in.proven:
		s.total.Add(in.wanted())
	case in.digest == (checkpoint.Digest{}):
		s.group.Go(func() error {
			if err := in.digestAll(s.ctx); err != nil || in.failed() {
				return err
			}
			return s.blocks(in)
		})
	default:
		if err := in.same(); err != nil {
			in.fail(err)
			return nil
		}
		if len(in.data) <= tiny {
			s.err = s.blocks(in)
			return s.err
		}
		for _, b := range in.blocks {
			for lo := b.Lo; lo < b.Hi; lo += taskBlocks {
				s.group.Go(func() error {
					return s.visit(in, s.ctx, blocks.Range{Lo: lo, Hi: min(lo+taskBlocks, b.Hi)}, &s.total)
				})
			}
		}
	}
	return nil
}

// blocks visits all wanted blocks of a chunk.
func (s *memoryScan) blocks(in *inMemory) error {
	for _, b := range in.blocks {
		if err := s.visit(in, s.ctx, b, &s.total); err != nil {
			return err
		}
	}
	return nil
}

// result waits for all visits. of returns the chunk of the n-th read; nil if it is not in
// memory.
func (s *memoryScan) result(reads []checkpoint.Read, of func(n int) *inMemory) (FromMemory, error) {
	if err := errors.Join(s.err, s.group.Wait()); err != nil {
		return FromMemory{}, err
	}
	out := FromMemory{Bytes: s.total.Load()}
	for n, read := range reads {
		if in := of(n); in == nil || in.unfit != nil {
			out.Rest = append(out.Rest, read)
		}
	}
	for _, in := range s.chunks {
		if in.unfit != nil {
			out.Unfit = append(out.Unfit, in.why())
		}
	}
	return out, nil
}

// why returns the reason why the chunk was not used, with the chunk's name.
func (in *inMemory) why() error {
	return fmt.Errorf("%q %s of rank %d: %w", in.entry.Item.Shard.FQN, in.entry.BoxString(), in.index.Rank, in.unfit)
}

// fail records why a chunk is not used.
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

// same compares the known size and digest of the chunk in memory with the index.
func (in *inMemory) same() error {
	if got, want := int64(len(in.data)), in.entry.Item.Bytes; got != want {
		return fmt.Errorf("size in memory is %d bytes, %d were committed", got, want)
	}
	if in.digest != in.entry.Digest {
		return fmt.Errorf("digest in memory is %s, %s was committed", in.digest, in.entry.Digest)
	}
	return nil
}

// digestAll computes the digest of a chunk whose digest is unknown.
func (in *inMemory) digestAll(ctx context.Context) (err error) {
	if in.digest, err = scan.DigestBytes(ctx, in.data); err != nil {
		return err
	}
	if err := in.same(); err != nil {
		in.fail(err)
	}
	return nil
}

// copyBlocks is the number of blocks verified and copied together: the part of a core's cache
// that remains next to source and destination.
const copyBlocks = 4

// copy verifies some blocks and copies their wanted parts.
func (in *inMemory) copy(ctx context.Context, b blocks.Range, total *atomic.Int64) error {
	buf := scan.Buffers.Get().(*[]byte)
	defer scan.Buffers.Put(buf)
	for lo := b.Lo; lo < b.Hi && !in.failed(); lo += copyBlocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		start := lo * checkpoint.BlockSize
		end := min(min(lo+copyBlocks, b.Hi)*checkpoint.BlockSize, in.entry.Item.Bytes)
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
			continue // already in place
		}
		if err := in.others(at).copyOut(window, start); err != nil {
			return fmt.Errorf("%q: %w", in.entry.Item.Shard.FQN, err)
		}
		total.Add(int64(len(window)))
	}
	return nil
}

// check verifies some blocks in place.
func (in *inMemory) check(ctx context.Context, b blocks.Range, total *atomic.Int64) error {
	for lo := b.Lo; lo < b.Hi && !in.failed(); lo += copyBlocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		window := in.data[lo*checkpoint.BlockSize : min(min(lo+copyBlocks, b.Hi)*checkpoint.BlockSize, in.entry.Item.Bytes)]
		if !in.intact(lo, window) {
			return nil
		}
		total.Add(int64(len(window)))
	}
	return nil
}

// wanted returns the size of the wanted blocks.
func (in *inMemory) wanted() (bytes int64) {
	for _, b := range in.blocks {
		bytes += min(b.Hi*checkpoint.BlockSize, in.entry.Item.Bytes) - b.Lo*checkpoint.BlockSize
	}
	return bytes
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

// direct returns the part of a buffer that receives exactly the bytes of the chunk from start
// to end, and the index of its copy, or -1. Such bytes are verified in their destination. If
// they are damaged, they are read again from the file.
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

// others returns the chunk without one of its copies.
func (in *inMemory) others(at int) *chunkRead {
	if at < 0 {
		return in.chunkRead
	}
	c := *in.chunkRead
	c.copies = slices.Delete(slices.Clone(c.copies), at, at+1)
	return &c
}
