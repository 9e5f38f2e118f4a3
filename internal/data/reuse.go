package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/data/stream"
	"github.com/ckptstore/ckptstore/internal/object"
)

// MinReuse is the size in bytes of the smallest chunk that is reused. Smaller ones are
// rewritten, so that few files are kept for little data.
const MinReuse = 1 << 20

// Base is a committed checkpoint whose chunks a save may reuse.
type Base struct {
	Ref      checkpoint.Ref
	Manifest checkpoint.Digest // as recorded in the log
}

// Reusing makes WriteData skip chunks that a base holds, and chunks that the rank's own file
// already holds, as with tied weights. Two chunks are equal if digest, dtype and size are.
// The file that holds the chunk is hard-linked into the checkpoint's directory, which
// therefore stays complete whenever the base is removed. Where files have no links, the index
// names the file in the directory of the checkpoint that wrote it: the caller makes sure that
// it stays, see [Root.HasLinks].
//
// A chunk is nevertheless written if it is smaller than [MinReuse], if the link cannot be
// made, or if less than half of the file would be used by this rank, or by all ranks of
// [FileWriter.Together]. Of a base with chunks of many ranks, only the ranks that held this
// rank's items are searched, so a chunk that moved to another name and rank may be written
// again.
//
// Reusing calls warn with the reason why a base or one of its files could not be used; warn may
// be nil, and must not block. Reusing is called before WriteData, whose Source must then
// return any item repeatedly.
func (w *FileWriter) Reusing(warn func(error), bases ...Base) *FileWriter {
	w.reusing, w.bases, w.warn = true, bases, warn
	return w
}

// Together judges the partial use of bases' files for all ranks of a save combined. It is
// called before WriteData, with the same uses for each rank.
func (w *FileWriter) Together(uses *reuse.Uses) *FileWriter {
	w.uses = uses
	return w
}

func (w *FileWriter) unusable(err error) {
	if w.warn != nil {
		w.warn(err)
	}
}

// reuse finds the items that need no writing, and links in or names the files that hold them.
// It reads only the first block of an item, unless another chunk may be equal.
func (w *FileWriter) reuse(ctx context.Context, rank int, items []checkpoint.Item, src Source) (reuse.Plan, error) {
	if !w.reusing {
		return reuse.Plan{}, nil
	}
	matches, err := w.matches(ctx, rank, items, src)
	if err != nil {
		return reuse.Plan{}, err
	}
	live := reuse.Live(matches)
	if w.uses != nil {
		if live, err = w.uses.Live(ctx, rank, matches); err != nil {
			return reuse.Plan{}, err
		}
	}
	place := w.link
	if !w.root.HasLinks() {
		place = w.refer
	}
	unfit := map[string]bool{}
	for {
		u := reuse.Settle(items, matches, live, unfit)
		again := false
		for n, f := range u.Files {
			if err := ctx.Err(); err != nil {
				return reuse.Plan{}, err
			}
			if err := place(ctx, f, u, n); err != nil {
				if errors.Is(err, errors.ErrUnsupported) {
					w.root.linkless.Store(true)
				}
				w.unusable(fmt.Errorf("%s is not reused, its chunks are rewritten: %w", w.root.b.Path(f.From), err))
				unfit[f.From], again = true, true
			}
		}
		if !again {
			return u, nil
		}
	}
}

// matches finds the digest of each item that may be stored already.
func (w *FileWriter) matches(ctx context.Context, rank int, items []checkpoint.Item, src Source) (map[int]reuse.Match, error) {
	bases := w.openBases(ctx, rank, items)
	probes := make(map[int]reuse.Probe)
	alike := map[reuse.Probe]int{}
	for i, it := range items {
		if it.Bytes < MinReuse {
			continue
		}
		data, err := stream.Item(ctx, src, i, it)
		if err != nil {
			return nil, err
		}
		probes[i] = reuse.ProbeOf(it, crc32c.Checksum(data[:checkpoint.BlockSize]))
		alike[probes[i]]++
	}
	out := map[int]reuse.Match{}
	for i, it := range items {
		p, ok := probes[i]
		if !ok {
			continue
		}
		candidates := bases.find(p)
		if len(candidates) == 0 && alike[p] == 1 {
			continue
		}
		data, err := stream.Item(ctx, src, i, it)
		if err != nil {
			return nil, err
		}
		digest, known, err := reuse.DigestAmong(ctx, data, candidates, alike[p] > 1)
		if err != nil {
			return nil, err
		}
		if !known {
			continue
		}
		m := reuse.Match{Content: reuse.ContentOf(it, digest)}
		for n := range candidates {
			if candidates[n].Entry.Digest == digest {
				m.Held = &candidates[n]
				break
			}
		}
		out[i] = m
	}
	return out, nil
}

// refer checks a file of a base that is named where it lies. It changes nothing there.
func (w *FileWriter) refer(ctx context.Context, f reuse.File, _ reuse.Plan, _ int) error {
	info, err := w.root.b.Stat(ctx, f.From)
	if err == nil && info.Size != f.Size {
		err = fmt.Errorf("size is %d bytes, %d were written", info.Size, f.Size)
	}
	return err
}

// link gives a file of a base a name in this checkpoint's directory. From then on its bytes
// stay, whatever happens to the base. link checks the file only after that, because the file
// at the path may have been replaced since the base was read. The name becomes durable with
// the directory. An unsuitable file may keep its name: another rank may use it.
func (w *FileWriter) link(ctx context.Context, f reuse.File, u reuse.Plan, n int) error {
	to := nameOf(w.ref, f.Name)
	err := w.root.b.Link(ctx, f.From, to, object.Exclusive)
	if errors.Is(err, fs.ErrExist) {
		// The link is of another rank, or of an interrupted call. The base may be gone since.
		if err = sameFile(ctx, w.root.b, f.From, w.root.b, to); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	file, err := w.root.b.Open(ctx, to)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && info.Size != f.Size {
		err = fmt.Errorf("size is %d bytes, %d were written", info.Size, f.Size)
	}
	buf := scan.Buffers.Get().(*[]byte)
	defer scan.Buffers.Put(buf)
	for _, s := range u.Of {
		if s.File != n || err != nil {
			continue
		}
		block := (*buf)[:checkpoint.BlockSize]
		if _, err = file.ReadAt(block, s.Entry.Offset); err == nil {
			if k, got := scan.DamagedBlock(block, s.Entry.Sums); k >= 0 {
				err = fmt.Errorf("%q: checksum of its first block is %08x, want %08x", s.Entry.Item.Shard.FQN, got, s.Entry.Sums[0])
			}
		}
	}
	return errors.Join(err, file.Close())
}

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
	keys  map[key]bool          // of the items, with rank 0
	by    map[reuse.Probe][]int // entries that are large enough
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
	of := &baseRank{index: x, keys: map[key]bool{}, by: map[reuse.Probe][]int{}}
	for i := range x.Entries {
		e := &of.index.Entries[i]
		of.keys[anyRank(e.Item)] = true
		if e.Item.Bytes >= MinReuse && !x.Adopted() && !x.Verbatim() {
			p := reuse.ProbeOf(e.Item, e.Sums[0])
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
func (b *base) file(f checkpoint.File) reuse.File {
	in := f.In(b.of.Ref)
	h := reuse.File{Name: checkpoint.LinkName(in, f.Name), From: nameOf(in, f.Name), Size: f.Size}
	if !b.root.HasLinks() {
		h.Name, h.In = f.Name, in
	}
	return h
}

// find returns the chunks that may equal a chunk with this probe.
func (bs openedBases) find(p reuse.Probe) []reuse.Chunk {
	var out []reuse.Chunk
	for _, b := range bs {
		for _, part := range b.parts {
			for _, i := range part.by[p] {
				e := &part.index.Entries[i]
				out = append(out, reuse.Chunk{Entry: e, File: b.file(part.index.Files[e.File])})
			}
		}
	}
	return out
}
