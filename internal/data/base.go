package data

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// MostBases is the number of checkpoints whose indexes a [Root] keeps, for the ranks that it
// was asked about. Ranks that are written in parallel then read these indexes once. A save
// with more bases reads them again for each rank.
const MostBases = 4

// base is a checkpoint whose chunks may be reused. Its indexes are read when they are first
// needed.
type base struct {
	root     *Root
	of       Base
	manifest checkpoint.Manifest

	mu      sync.Mutex
	holders map[key]int // whose index has an item, by its key with rank 0
	ranks   map[int]*baseRank
}

// baseRank is the contents of one rank of a base.
type baseRank struct {
	index checkpoint.Index
	keys  map[key]bool    // of the items, with rank 0
	by    map[probe][]int // entries that are large enough
}

// held is a chunk of a base.
type held struct {
	entry *checkpoint.Entry
	file  heldFile
}

// base returns a checkpoint to reuse, read now or kept from an earlier call.
func (r *Root) base(ctx context.Context, of Base) (*base, error) {
	if err := of.Ref.Validate(); err != nil {
		return nil, err
	}
	r.reuse.Lock()
	defer r.reuse.Unlock()
	if i := slices.IndexFunc(r.bases, func(b *base) bool { return b.of == of }); i >= 0 {
		b := r.bases[i]
		r.bases = append([]*base{b}, slices.Delete(r.bases, i, i+1)...)
		return b, nil
	}
	m, err := r.readManifest(ctx, of.Ref, of.Manifest)
	if err != nil {
		return nil, err
	}
	b := &base{root: r, of: of, manifest: m, ranks: map[int]*baseRank{}}
	r.bases = append([]*base{b}, r.bases[:min(len(r.bases), MostBases-1)]...)
	return b, nil
}

// anyRank returns the key of an item, the same for every rank that holds it.
func anyRank(it checkpoint.Item) key { return itemKey(0, it) }

// rank returns the contents of a rank. It returns nil if the rank's files belong to another
// program, which may change them.
func (b *base) rank(ctx context.Context, rank int) (*baseRank, error) {
	if of, ok := b.ranks[rank]; ok {
		return of, nil
	}
	i := slices.IndexFunc(b.manifest.Ranks, func(r checkpoint.RankIndex) bool { return r.Rank == rank })
	if i < 0 {
		return nil, nil
	}
	x, err := b.root.readIndex(ctx, b.of.Ref, b.manifest.Ranks[i])
	if err != nil {
		return nil, err
	}
	of := &baseRank{index: x, keys: map[key]bool{}, by: map[probe][]int{}}
	for i := range x.Entries {
		e := &of.index.Entries[i]
		of.keys[anyRank(e.Item)] = true
		if e.Item.Bytes >= MinReuse && !x.Adopted() && !x.Verbatim() {
			p := probeOf(e.Item, e.Sums[0])
			of.by[p] = append(of.by[p], i)
		}
	}
	b.ranks[rank] = of
	return of, nil
}

// holding returns the parts of the base to search for a rank's items: the same rank, and the
// ranks that held items which that rank lacks. It reports unreadable parts as problems and
// returns the rest.
func (b *base) holding(ctx context.Context, rank int, items []checkpoint.Item) (parts []*baseRank, problems []error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	wanted := []int{rank}
	same, err := b.rank(ctx, rank)
	if err == nil {
		for _, it := range items {
			if it.Bytes < MinReuse || same != nil && same.keys[anyRank(it)] {
				continue
			}
			if at, ok := b.holder(it); ok && !slices.Contains(wanted, at) {
				wanted = append(wanted, at)
			}
		}
	}
	for _, at := range wanted {
		of, err := b.rank(ctx, at)
		if err != nil {
			problems = append(problems, err)
		} else if of != nil {
			parts = append(parts, of)
		}
	}
	return parts, problems
}

func (b *base) holder(it checkpoint.Item) (rank int, ok bool) {
	if b.holders == nil {
		b.holders = map[key]int{}
		for rank, items := range itemsByRank(b.manifest.Layout) {
			for _, it := range items {
				b.holders[anyRank(it)] = rank
			}
		}
	}
	rank, ok = b.holders[anyRank(it)]
	return rank, ok
}

// openedBases are the parts of all bases to search for a rank's items.
type openedBases []openedBase

type openedBase struct {
	*base
	parts []*baseRank
}

// openBases reads the parts of the bases that concern a rank. It skips an unreadable base,
// whose chunks are then written again.
func (w *FileWriter) openBases(ctx context.Context, rank int, items []checkpoint.Item) openedBases {
	var out openedBases
	for _, of := range w.bases {
		if of.Ref == w.ref || ctx.Err() != nil || w.root.linkless.Load() {
			continue
		}
		b, err := w.root.base(ctx, of)
		if err != nil {
			w.unusable(fmt.Errorf("checkpoint %s is not reused: %w", of.Ref, err))
			continue
		}
		parts, problems := b.holding(ctx, rank, items)
		for _, err := range problems {
			w.unusable(fmt.Errorf("a rank of checkpoint %s is not reused: %w", of.Ref, err))
		}
		out = append(out, openedBase{b, parts})
	}
	return out
}

// file returns the place of a file of the base. A file that lies in the directory of another
// checkpoint is that checkpoint's: reused again, it is not the base's.
func (b *base) file(f checkpoint.File) heldFile {
	in := f.In(b.of.Ref)
	h := heldFile{name: checkpoint.LinkName(in, f.Name), from: nameOf(in, f.Name), size: f.Size}
	if !b.root.HasLinks() {
		h.name, h.in = f.Name, in
	}
	return h
}

// find returns the chunks that may equal a chunk with this probe.
func (bs openedBases) find(p probe) []held {
	var out []held
	for _, b := range bs {
		for _, part := range b.parts {
			for _, i := range part.by[p] {
				e := &part.index.Entries[i]
				out = append(out, held{e, b.file(part.index.Files[e.File])})
			}
		}
	}
	return out
}
