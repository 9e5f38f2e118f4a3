package data

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// donorPlace is a chunk in a file that should have the bytes of another.
type donorPlace struct {
	ref    checkpoint.Ref
	index  *checkpoint.Index // without its entries
	file   int               // of the index
	offset int64
}

// donorAt is a place in a file, and what should be there.
type donorAt struct {
	offset int64
	digest checkpoint.Digest
}

// donor has the bytes of a damaged chunk.
type donor struct {
	root   *Root
	place  donorPlace
	source ChunkSource // instead of a place
	from   string
}

// donor finds a place, or a source, that has the bytes of a chunk. The damaged
// place is among those that are tried, and has others. What a place has is
// looked at once, unless its file is repaired.
func (p *repair) donor(ctx context.Context, e *checkpoint.Entry) (donor, bool, error) {
	what := contentOf(e.Item, e.Digest)
	for _, at := range p.places[what] {
		path := checkpointFiles{p.root, at.ref}.path(at.index, at.file)
		key := donorAt{at.offset, e.Digest}
		if p.poor[path][key] {
			continue
		}
		ok, err := p.has(ctx, at, e)
		if err != nil {
			return donor{}, false, err
		}
		if ok {
			return donor{root: p.root, place: at, from: path}, true, nil
		}
		if p.poor[path] == nil {
			p.poor[path] = map[donorAt]bool{}
		}
		p.poor[path][key] = true
	}
	for _, s := range p.sources {
		data, from, err := s.Chunk(ctx, e.Item, e.Digest)
		if err != nil {
			return donor{}, false, err
		}
		if data != nil && int64(len(data)) == e.Item.Bytes && checkpoint.Sum(data) == e.Digest {
			return donor{source: s, from: from}, true, nil
		}
	}
	return donor{}, false, nil
}

// has reports whether a place has the bytes that it should have.
func (p *repair) has(ctx context.Context, at donorPlace, e *checkpoint.Entry) (bool, error) {
	f, err := p.root.openDonor(ctx, at)
	if err != nil {
		return false, ctx.Err() // it is damaged too, and a finding of its checkpoint
	}
	ok, err := holds(ctx, f, e, at.offset)
	_ = f.Close() // nothing was written to it
	return ok, err
}

func (r *Root) openDonor(ctx context.Context, at donorPlace) (object.Object, error) {
	f, err := checkpointFiles{r, at.ref}.open(ctx, at.index, at.file)
	if err != nil || !at.index.Adopted() {
		return f, err
	}
	info, err := f.Stat()
	if err == nil {
		err = unchanged(at.index, at.file, info)
	}
	if err != nil {
		_ = f.Close() // nothing was written to it
		return nil, err
	}
	return f, nil
}

// copyTo writes the bytes to the place of a chunk, and compares them.
func (d donor) copyTo(ctx context.Context, to io.WriterAt, e *checkpoint.Entry) error {
	if d.source == nil {
		from, err := d.root.openDonor(ctx, d.place)
		if err != nil {
			return err
		}
		defer func() { _ = from.Close() }() // nothing was written to it
		return copyChunk(ctx, to, from, d.place.offset, e)
	}
	data, _, err := d.source.Chunk(ctx, e.Item, e.Digest)
	if err == nil && int64(len(data)) != e.Item.Bytes {
		err = fmt.Errorf("%s has the bytes of %q no more: run the command again", d.from, e.Item.Shard.FQN)
	}
	if err != nil {
		return err
	}
	return copyChunk(ctx, to, bytes.NewReader(data), 0, e)
}
