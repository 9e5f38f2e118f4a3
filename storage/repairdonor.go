package storage

import (
	"context"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// donorPlace is a chunk in a file that should have the bytes of another.
type donorPlace struct {
	path  string
	entry *entry
	check func(vfs.FileInfo) error // of an adopted file; else nil
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
			at := donorPlace{path: p.root.filePath(ref, x, e.file), entry: e}
			if x.adopted() {
				at.check = func(info vfs.FileInfo) error { return x.unchanged(e.file, info) }
			}
			places[c] = append(places[c], at)
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
		key := fmt.Sprint(at.path, " ", at.entry.offset)
		if tried[key] {
			continue
		}
		tried[key] = true
		f, err := p.root.openDonor(at)
		if err != nil {
			continue // it is damaged too, and a finding of its checkpoint
		}
		ok, err := holds(ctx, f, e, at.entry.offset)
		_ = f.Close() // nothing was written to it
		if err != nil {
			return donor{}, false, err
		}
		if ok {
			return donor{root: p.root, place: at, from: at.path}, true, nil
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

func (r *Root) openDonor(at donorPlace) (vfs.File, error) {
	f, err := openRegular(r.fs, at.path)
	if err != nil || at.check == nil {
		return f, err
	}
	info, err := f.Stat()
	if err == nil {
		err = at.check(info)
	}
	if err != nil {
		_ = f.Close() // nothing was written to it
		return nil, err
	}
	return f, nil
}

// copyTo writes the bytes to the place of a chunk. They are compared when the
// whole file is.
func (d donor) copyTo(ctx context.Context, f vfs.File, e *entry) error {
	if d.source != nil {
		data, _, err := d.source.Chunk(ctx, e.item, e.digest)
		if err == nil && int64(len(data)) != e.item.Bytes {
			err = fmt.Errorf("%s has the bytes of %q no more: run the command again", d.from, e.item.Shard.FQN)
		}
		if err == nil {
			_, err = f.WriteAt(data, e.offset)
		}
		return err
	}
	from, err := d.root.openDonor(d.place)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }() // nothing was written to it
	return copyAt(ctx, f, from, e.offset, d.place.entry.offset, e.item.Bytes, false)
}
