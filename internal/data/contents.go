package data

import (
	"context"
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
