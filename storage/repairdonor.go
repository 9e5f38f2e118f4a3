package storage

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/backend"
)

// donorPlace is a chunk in a file that should have the bytes of another.
type donorPlace struct {
	ref   Ref
	index *index
	entry *entry
}

// donor has the bytes of a damaged chunk.
type donor struct {
	root   *Root
	place  donorPlace
	source ChunkSource // instead of a place
	from   string
}

// donors are the places of all chunks that are equal to damaged ones, by what
// they have in common.
func (p *repair) donors(ctx context.Context, bad []*entry, k *knowledge) (map[content][]donorPlace, error) {
	if len(bad) == 0 {
		return nil, nil
	}
	wanted := map[content]bool{}
	for _, e := range bad {
		wanted[contentOf(e.item, e.digest)] = true
	}
	places := map[content][]donorPlace{}
	err := p.indexes(ctx, func(ref Ref, x *index) error {
		for i := range x.entries {
			e := &x.entries[i]
			c := contentOf(e.item, e.digest)
			if !wanted[c] || !e.learned() || e.strides != nil {
				continue
			}
			places[c] = append(places[c], donorPlace{ref, x, e})
		}
		return nil
	})
	return places, err
}

// donor finds a place, or a source, that has the bytes of a chunk. The damaged
// place is among those that are tried, and has others.
func (p *repair) donor(ctx context.Context, e *entry, places []donorPlace) (donor, bool, error) {
	tried := map[string]bool{}
	for _, at := range places {
		path := checkpointFiles{p.root, at.ref}.path(at.index, at.entry.file)
		key := fmt.Sprint(path, " ", at.entry.offset)
		if tried[key] {
			continue
		}
		tried[key] = true
		f, err := p.root.openDonor(ctx, at)
		if err != nil {
			continue // it is damaged too, and a finding of its checkpoint
		}
		ok, err := holds(ctx, f, e, at.entry.offset)
		_ = f.Close() // nothing was written to it
		if err != nil {
			return donor{}, false, err
		}
		if ok {
			return donor{root: p.root, place: at, from: path}, true, nil
		}
	}
	for _, s := range p.sources {
		data, from, err := s.Chunk(ctx, e.item, e.digest)
		if err != nil {
			return donor{}, false, err
		}
		if data != nil && int64(len(data)) == e.item.Bytes && plan.Sum(data) == e.digest {
			return donor{source: s, from: from}, true, nil
		}
	}
	return donor{}, false, nil
}

func (r *Root) openDonor(ctx context.Context, at donorPlace) (backend.Object, error) {
	f, err := checkpointFiles{r, at.ref}.open(ctx, at.index, at.entry.file)
	if err != nil || !at.index.adopted() {
		return f, err
	}
	info, err := f.Stat()
	if err == nil {
		err = at.index.unchanged(at.entry.file, info)
	}
	if err != nil {
		_ = f.Close() // nothing was written to it
		return nil, err
	}
	return f, nil
}

// copyTo writes the bytes to the place of a chunk, and compares them.
func (d donor) copyTo(ctx context.Context, to io.WriterAt, e *entry) error {
	if d.source == nil {
		from, err := d.root.openDonor(ctx, d.place)
		if err != nil {
			return err
		}
		defer func() { _ = from.Close() }() // nothing was written to it
		return copyChunk(ctx, to, e.offset, io.NewSectionReader(from, d.place.entry.offset, e.item.Bytes), e)
	}
	data, _, err := d.source.Chunk(ctx, e.item, e.digest)
	if err == nil && int64(len(data)) != e.item.Bytes {
		err = fmt.Errorf("%s has the bytes of %q no more: run the command again", d.from, e.item.Shard.FQN)
	}
	if err != nil {
		return err
	}
	return copyChunk(ctx, to, e.offset, bytes.NewReader(data), e)
}
