package data

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Stored is one chunk or value of a checkpoint, as an index tells of it.
type Stored struct {
	Rank   int // whose index has it
	Item   checkpoint.Item
	Digest checkpoint.Digest // of its bytes; zero of an adopted chunk that nobody has read yet
}

// Contents lists what is stored, in the order of ranks and of each rank's
// items. It reads indexes, which are proven by the manifest, and no data. The
// reader was set up.
func (r *FileReader) Contents(ctx context.Context) ([]Stored, error) {
	var all []Stored
	for _, rank := range slices.Sorted(maps.Keys(r.ranks)) {
		x, err := r.load(ctx, rank)
		if err != nil {
			return nil, r.wrap("list the contents", err)
		}
		for _, e := range x.index.Entries {
			all = append(all, Stored{Rank: rank, Item: e.Item, Digest: e.Digest})
		}
	}
	return all, nil
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
