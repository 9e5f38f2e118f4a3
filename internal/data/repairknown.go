package data

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/object"
)

// knowledge combines what the indexes of all checkpoints record of one data file.
type knowledge struct {
	size    int64
	entries []*checkpoint.Entry // by offset, each place once
	header  []byte              // nil when the checkpoint that wrote the file is gone
}

// survey collects everything known of all damaged files: their names, their contents
// according to the indexes, and other places with the same contents. It reads every index
// twice, however many files there are, and keeps none.
func (p *repair) survey(ctx context.Context, damaged map[checkpoint.Ref][]string) (err error) {
	p.known, p.places = map[string]*knowledge{}, map[reuse.Content][]donorPlace{}
	for ref, names := range damaged {
		for _, name := range names {
			if checkpoint.HoldsData(name) {
				p.known[checkpoint.LinkName(ref, name)] = &knowledge{}
			}
		}
	}
	if len(p.known) == 0 {
		return nil
	}
	if p.holders, err = p.held(ctx, func(link string) bool { return p.known[link] != nil }); err != nil {
		return err
	}
	seen := map[string]map[int64]bool{}
	if err := p.indexes(ctx, func(ref checkpoint.Ref, x *checkpoint.Index) error {
		for n, f := range x.Files {
			if x.Adopted() {
				break
			}
			link := checkpoint.LinkName(f.In(ref), f.Name)
			k := p.known[link]
			if k == nil {
				continue
			}
			if seen[link] == nil {
				seen[link] = map[int64]bool{}
			}
			k.learn(x, n, seen[link])
		}
		return nil
	}); err != nil {
		return err
	}
	for _, k := range p.known {
		slices.SortFunc(k.entries, func(a, b *checkpoint.Entry) int { return cmp.Compare(a.Offset, b.Offset) })
		for _, e := range k.entries {
			p.places[reuse.ContentOf(e.Item, e.Digest)] = nil
		}
	}
	return p.indexes(ctx, func(ref checkpoint.Ref, x *checkpoint.Index) error {
		at := *x
		at.Entries = nil
		for i := range x.Entries {
			e := &x.Entries[i]
			if !e.Learned() || e.Strides != nil {
				continue
			}
			c := reuse.ContentOf(e.Item, e.Digest)
			if places, wanted := p.places[c]; wanted {
				p.places[c] = append(places, donorPlace{ref, &at, e.File, e.Offset})
			}
		}
		return nil
	})
}

// learn adds an index's record of its n-th file.
func (k *knowledge) learn(x *checkpoint.Index, n int, seen map[int64]bool) {
	k.size = x.Files[n].Size
	if n == 0 {
		k.header = indexHeader(x)
	}
	for _, e := range x.Entries {
		if e.File == n && e.Item.Bytes > 0 && !seen[e.Offset] {
			seen[e.Offset] = true
			e.Sums = nil // the digest is enough
			k.entries = append(k.entries, &e)
		}
	}
}

// indexHeader returns the header of a rank's own data file; nil if the index gives no header
// of this version.
func indexHeader(x *checkpoint.Index) []byte {
	var items []checkpoint.Item
	first := int64(-1)
	for _, i := range x.Own() {
		items = append(items, x.Entries[i].Item)
		if at := x.Entries[i].Offset; first < 0 || at < first {
			first = at
		}
	}
	_, _, header, err := layOut(x.Rank, items, reuse.Plan{})
	if err != nil || first >= 0 && first != int64(len(header)) {
		return nil
	}
	return header
}

// indexes visits every readable index of every committed checkpoint. A verification of its
// checkpoint reports a damaged index.
func (p *repair) indexes(ctx context.Context, visit func(checkpoint.Ref, *checkpoint.Index) error) error {
	for _, t := range p.all {
		m, err := p.root.readManifest(ctx, t.Ref, t.Manifest)
		if unreadable(err) {
			continue
		}
		if err != nil {
			return err
		}
		for _, rank := range m.Ranks {
			if err := ctx.Err(); err != nil {
				return err
			}
			x, err := p.root.readIndex(ctx, t.Ref, rank)
			if err == nil && x.Adopted() {
				_, err = p.root.readSums(ctx, t.Ref, &x, rank.Index)
			}
			if unreadable(err) {
				continue
			}
			if err != nil {
				return err
			}
			if err := visit(t.Ref, &x); err != nil {
				return err
			}
		}
	}
	return nil
}

// unreadable reports whether err is of a file that is damaged or gone.
func unreadable(err error) bool {
	var corrupt *CorruptError
	return errors.As(err, &corrupt) || errors.Is(err, fs.ErrNotExist)
}

// whole reports whether a file matches all indexes, except for some entries.
func (k *knowledge) whole(ctx context.Context, r *Root, name string, but ...*checkpoint.Entry) (bool, error) {
	f, err := r.b.Open(ctx, name)
	if err != nil {
		return false, ctx.Err()
	}
	defer func() { _ = f.Close() }() // nothing was written to it
	info, err := f.Stat()
	if err != nil || info.Size != k.size {
		return false, ctx.Err()
	}
	if ok, err := k.headed(f); !ok || err != nil {
		return false, err
	}
	for _, e := range k.entries {
		if slices.Contains(but, e) {
			continue
		}
		if ok, err := holds(ctx, f, e, e.Offset); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// headed reports whether a file's header is right. If its exact header is not known, the
// header must place the known chunks where they lie.
func (k *knowledge) headed(f object.Object) (bool, error) {
	if k.header != nil {
		got := make([]byte, len(k.header))
		n, _ := f.ReadAt(got, 0) // what cannot be read is not the header
		return n == len(got) && bytes.Equal(got, k.header), nil
	}
	h, err := safetensors.Parse(f, k.size)
	if err != nil {
		return false, nil //nolint:nilerr // a damaged header is an answer
	}
	at := map[string]safetensors.Tensor{}
	for _, t := range h.Tensors {
		at[t.Name] = t
	}
	for _, e := range k.entries {
		if t, ok := at[e.Key]; !ok || h.DataStart+t.Start != e.Offset || t.End-t.Start != e.Item.Bytes {
			return false, nil
		}
	}
	return true, nil
}

// holds reports whether the bytes of an entry, read from another offset, have its digest.
func holds(ctx context.Context, f io.ReaderAt, e *checkpoint.Entry, offset int64) (bool, error) {
	got, err := scan.Digest(ctx, f, offset, offset+e.Item.Bytes)
	if scan.ShortOf(err) != nil {
		return false, nil
	}
	return err == nil && got == e.Digest, err
}

// sound reports whether the size and header of a file are right.
func (k *knowledge) sound(f object.Object) (bool, error) {
	if f == nil {
		return false, nil
	}
	info, err := f.Stat()
	if err != nil || info.Size != k.size {
		return false, err
	}
	return k.headed(f)
}

// headerOf returns the header that the file must have: the one from its own index, or its
// current one if that agrees with all indexes; otherwise nil.
func (k *knowledge) headerOf(old object.Object) ([]byte, error) {
	if k.header != nil {
		return k.header, nil
	}
	if old == nil {
		return nil, nil
	}
	if ok, err := k.headed(old); !ok || err != nil {
		return nil, err
	}
	h, err := safetensors.Parse(old, k.size)
	if err != nil {
		return nil, err
	}
	header := make([]byte, h.DataStart)
	_, err = old.ReadAt(header, 0)
	return header, err
}

// damaged returns the chunks whose bytes in the file are wrong.
func (k *knowledge) damaged(ctx context.Context, old object.Object) (bad []*checkpoint.Entry, err error) {
	for _, e := range k.entries {
		ok := false
		if old != nil {
			if ok, err = holds(ctx, old, e, e.Offset); err != nil {
				return nil, err
			}
		}
		if !ok {
			bad = append(bad, e)
		}
	}
	return bad, nil
}

// donorPlace is a chunk in a file that should have the same bytes as another.
type donorPlace struct {
	ref    checkpoint.Ref
	index  *checkpoint.Index // without its entries
	file   int               // of the index
	offset int64
}

// donorAt is a place in a file and the contents that it should have.
type donorAt struct {
	offset int64
	digest checkpoint.Digest
}

// donor is a source of the bytes of a damaged chunk.
type donor struct {
	root   *Root
	place  donorPlace
	source ChunkSource // instead of a place
	from   string
}

// donor finds a place, or a source, with the bytes of a chunk. It also tries the damaged
// place, which has other bytes. It checks a place once, unless the place's file is repaired.
func (p *repair) donor(ctx context.Context, e *checkpoint.Entry) (donor, bool, error) {
	what := reuse.ContentOf(e.Item, e.Digest)
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
		err = fmt.Errorf("%s no longer has the bytes of %q; run the command again", d.from, e.Item.Shard.FQN)
	}
	if err != nil {
		return err
	}
	return copyChunk(ctx, to, bytes.NewReader(data), 0, e)
}
