package data

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"golang.org/x/sync/errgroup"
)

// VerifyMemory is [FileReader.ReadMemory] without the copy, for one who gives
// the memory itself away to be read. Reads that are not in Rest are of chunks
// that have the digest of the committed index, and of which every block that is
// read has the checksum that it has there, unless that was proven before. It says
// nothing of what is written to the memory later: that nobody does is up to the
// caller.
func (r *FileReader) VerifyMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, m Memory, p *Proof) (FromMemory, error) {
	out, err := r.verifyMemory(ctx, wants, reads, m, p)
	return out, r.wrap("verify memory", err)
}

// Proof is which chunks in memory are what was committed. A nil Proof proves
// nothing.
type Proof struct{ chunks map[key]bool }

// ProveMemory verifies all chunks that are in memory, before anybody asks for
// them. Those that are not what was committed are not proven, and no error.
func (r *FileReader) ProveMemory(ctx context.Context, m Memory) (*Proof, error) {
	p := &Proof{map[key]bool{}}
	err := ctx.Err()
	if err == nil && r.ranks == nil {
		err = errors.New("SetUp was not called")
	}
	var total atomic.Int64
	there := map[key]*inMemory{}
	g, inner := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for rank := range r.ranks {
		if err != nil {
			break
		}
		var x *rankIndex
		if x, err = r.load(ctx, rank); err != nil {
			break
		}
		for k := range x.at {
			var in *inMemory
			if in, err = r.inMemory(ctx, k, m); in == nil {
				continue
			}
			in.blocks = []blockRange{{0, (in.entry.Item.Bytes + checkpoint.BlockSize - 1) / checkpoint.BlockSize}}
			there[k] = in
			in.check(inner, g, &total)
		}
	}
	err = errors.Join(err, g.Wait())
	for k, in := range there {
		if in.unfit == nil && err == nil {
			p.chunks[k] = true
		}
	}
	return p, r.wrap("verify memory", err)
}

func (r *FileReader) verifyMemory(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, m Memory, p *Proof) (FromMemory, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return FromMemory{}, err
	}
	if r.ranks == nil {
		return FromMemory{}, errors.New("SetUp was not called")
	}
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
		in.blocks = append(in.blocks, touched(in.box, region, int64(in.size))...)
	}
	var total atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, in := range order {
		if in.blocks = merge(in.blocks); in.proven {
			total.Add(in.wanted())
			continue
		}
		in.check(ctx, g, &total)
	}
	if err := g.Wait(); err != nil {
		return FromMemory{}, err
	}
	out := FromMemory{Bytes: total.Load()}
	for _, read := range reads {
		if in := there[readKey(wants[read.Want], read)]; in == nil || in.unfit != nil {
			out.Rest = append(out.Rest, read)
		}
	}
	for _, in := range order {
		if in.unfit != nil {
			out.Unfit = append(out.Unfit, in.why())
		}
	}
	return out, nil
}

// inMemory is the chunk of a key, if it is in memory and can be compared with
// what was committed, or nil.
func (r *FileReader) inMemory(ctx context.Context, k key, m Memory) (*inMemory, error) {
	x, err := r.load(ctx, k.rank)
	if err != nil {
		return nil, err
	}
	i, ok := x.at[k]
	if !ok {
		return nil, fmt.Errorf("%q %s is not among the chunks of rank %d", k.fqn, k.box, k.rank)
	}
	c := newChunkRead(x.index, i)
	if c.index.Adopted() || !c.entry.Learned() {
		return nil, nil // they have no digest to be compared with
	}
	data, digest := m.Chunk(c.index.Rank, c.entry.Item)
	if data == nil {
		return nil, nil
	}
	return &inMemory{chunkRead: c, data: data, digest: digest}, nil
}

// wanted is how many bytes the wanted blocks have.
func (in *inMemory) wanted() (bytes int64) {
	for _, b := range in.blocks {
		bytes += min(b.hi*checkpoint.BlockSize, in.entry.Item.Bytes) - b.lo*checkpoint.BlockSize
	}
	return bytes
}

// check verifies the wanted blocks of a chunk where they are.
func (in *inMemory) check(ctx context.Context, g *errgroup.Group, total *atomic.Int64) {
	if in.digest == (checkpoint.Digest{}) {
		g.Go(func() error {
			if err := in.digestAll(ctx); err != nil || in.failed() {
				return err
			}
			for _, b := range in.blocks {
				if err := in.checkBlocks(ctx, b, total); err != nil {
					return err
				}
			}
			return nil
		})
		return
	}
	if err := in.same(); err != nil {
		in.fail(err)
		return
	}
	for _, b := range in.blocks {
		for lo := b.lo; lo < b.hi; lo += taskBlocks {
			g.Go(func() error { return in.checkBlocks(ctx, blockRange{lo, min(lo+taskBlocks, b.hi)}, total) })
		}
	}
}

func (in *inMemory) checkBlocks(ctx context.Context, b blockRange, total *atomic.Int64) error {
	for block := b.lo; block < b.hi && !in.failed(); block++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		data := in.data[block*checkpoint.BlockSize : min((block+1)*checkpoint.BlockSize, in.entry.Item.Bytes)]
		if !in.intact(block, data) {
			return nil
		}
		total.Add(int64(len(data)))
	}
	return nil
}
