package data

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// The chunks of a verification. Parallel verifications share a [Together] and read each chunk once.

// uncheckable counts a chunk that could not be compared.
func (v *verifier) uncheckable() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Unknown++
}

// chunkOnce checks a chunk, unless a parallel verification came to the same bytes first: then
// it takes over the findings of that verification.
func (v *verifier) chunkOnce(ctx context.Context, x *checkpoint.Index, name string, file object.Object, e *checkpoint.Entry, at chunkPlace) error {
	seen, mine := v.together.claim(at)
	if mine {
		err := v.chunk(ctx, x, name, file, e, seen)
		seen.read = err == nil
		close(seen.done)
		return err
	}
	select {
	case <-seen.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if !seen.read {
		return v.chunk(ctx, x, name, file, e, nil)
	}
	for _, f := range seen.findings {
		v.breaks(x)
		f.File, f.FQN, f.Chunk = name, e.Item.Shard.FQN, e.BoxString()
		v.add(f)
	}
	v.reused(e.Item.Bytes)
	return nil
}

// chunk checks the checksum of every block of a chunk, and its digest. It fills in unknown
// ones, if the chunk matches its record. It also stores its findings in seen, if that is not
// nil.
func (v *verifier) chunk(ctx context.Context, x *checkpoint.Index, name string, file object.Object, e *checkpoint.Entry, seen *seenChunk) error {
	if err := v.together.acquire(ctx); err != nil {
		return err
	}
	defer v.together.release()
	found := func(kind Kind, block, offset int64, problem string) {
		f := Finding{
			Kind: kind, File: name, FQN: e.Item.Shard.FQN, Chunk: e.BoxString(),
			Block: int(block), Offset: offset, Problem: problem,
		}
		v.breaks(x)
		v.add(f)
		if seen != nil {
			seen.findings = append(seen.findings, f)
		}
	}
	src, err := scan.InOrder(e, file)
	if err != nil {
		found(Unreadable, -1, e.Offset, err.Error())
		return nil
	}
	if !e.Learned() {
		return v.learnChunk(ctx, file, src, e, found)
	}
	hash, damaged := scan.NewHasher(), false
	defer hash.Free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		hash.Add(window)
		first := at / checkpoint.BlockSize
		scan.DamagedBlocks(window, e.Sums[first:], func(k int, got uint32) {
			damaged = true
			block := first + int64(k)
			found(Corrupt, block, e.Offset+block*checkpoint.BlockSize,
				fmt.Sprintf("checksum of the block is %08x, want %08x", got, e.Sums[block]))
		})
	}); !ok {
		return err
	}
	if got := hash.Digest(); got != e.Digest && !damaged {
		found(Corrupt, -1, e.Offset, fmt.Sprintf("digest of the chunk is %s, want %s", got, e.Digest))
	}
	return nil
}

// learnChunk computes the unknown digest and checksums of a chunk, if the chunk matches its
// record.
func (v *verifier) learnChunk(ctx context.Context, file object.Object, src io.ReaderAt, e *checkpoint.Entry, found foundFunc) error {
	d, rec := scan.NewDigester(e.Item.Bytes), recordSum{Record: e.Record}
	defer d.Free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		d.Add(window)
		if e.Strides == nil {
			rec.add(window, e.Offset+at)
		}
	}); !ok {
		return err
	}
	problem, checked, err := "", e.Record != nil, error(nil)
	if e.Item.Value {
		problem, checked = archiveProblem(file, e)
	} else {
		problem, err = rec.problem(ctx, file)
	}
	if !checked {
		v.uncheckable()
	}
	if err != nil {
		return err
	}
	if problem != "" {
		found(Corrupt, -1, e.Offset, problem)
		return nil
	}
	e.Digest, e.Sums = d.End()
	return nil
}

// scanChunk scans a chunk at the pace of the verification and counts it. ok is false if the
// chunk is incomplete, which is a finding, or if err is set.
func (v *verifier) scanChunk(ctx context.Context, src io.ReaderAt, e *checkpoint.Entry, found foundFunc, visit func(window []byte, at int64)) (ok bool, err error) {
	_, err = scan.Windows(ctx, src, e.Offset, e.Offset+e.Item.Bytes, func(window []byte, at int64) error {
		visit(window, at-e.Offset)
		v.count(0, 0, int64(len(window)))
		if v.pace == nil {
			return nil
		}
		return v.pace(ctx, int64(len(window)))
	})
	if short := scan.ShortOf(err); short != nil {
		kind, problem := Truncated, "the file ends here"
		if !short.Ends() {
			kind, problem = Unreadable, short.Err.Error()
		}
		found(kind, (short.At-e.Offset)/checkpoint.BlockSize, short.At, problem)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	v.count(0, 1, 0)
	return true, nil
}

// foundFunc adds a finding about a chunk; offset is that in the file.
type foundFunc func(kind Kind, block, offset int64, problem string)

// Together is the shared state of parallel verifications: the number of chunks read at a
// time, and the chunks that were read already. A file that is linked into several checkpoints
// is then read once, and its damage is a finding of each. A Together is for one round: it
// reads nothing twice.
type Together struct {
	reading chan struct{} // its capacity is the number of chunks read at a time

	mu   sync.Mutex
	seen map[chunkPlace]*seenChunk
}

// NewTogether begins a round of verifications of a root's checkpoints.
func (r *Root) NewTogether() *Together { return newTogether(r.readers()) }

func newTogether(reading int) *Together {
	return &Together{reading: make(chan struct{}, reading), seen: map[chunkPlace]*seenChunk{}}
}

// Each calls do for 0 to n-1, a few at a time, until a call fails.
func (t *Together) Each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers())
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}

// acquire waits until another chunk may be read.
func (t *Together) acquire(ctx context.Context) error {
	select {
	case t.reading <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *Together) release() { <-t.reading }

// chunkPlace is a range of bytes in a file and their expected digest.
type chunkPlace struct {
	file         string
	offset, size int64
	digest       checkpoint.Digest
}

// seenChunk holds the findings of the first verification that read a place.
type seenChunk struct {
	done     chan struct{} // closed when the rest is set
	read     bool          // to the end; otherwise nothing is known
	findings []Finding
}

// claim returns the state of a place. mine is true for the first caller, which must read the
// place and close done.
func (t *Together) claim(at chunkPlace) (c *seenChunk, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c = t.seen[at]; c != nil {
		return c, false
	}
	c = &seenChunk{done: make(chan struct{})}
	t.seen[at] = c
	return c, true
}
