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
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/data/stream"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/tensor"
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
func (w *FileWriter) Together(uses *Uses) *FileWriter {
	w.uses = uses
	return w
}

func (w *FileWriter) unusable(err error) {
	if w.warn != nil {
		w.warn(err)
	}
}

// content identifies equal chunks.
type content struct {
	digest checkpoint.Digest
	dtype  tensor.DType
	value  bool
	size   int64
}

func contentOf(it checkpoint.Item, digest checkpoint.Digest) content {
	return content{digest: digest, dtype: it.Shard.DType, value: it.Value, size: it.Bytes}
}

// probe is a cheap fingerprint of a chunk. It differs for most unequal chunks: most tensors
// change in their first block.
type probe struct {
	size  int64
	dtype tensor.DType
	value bool
	crc   uint32 // of the first block
}

func probeOf(it checkpoint.Item, crc uint32) probe {
	return probe{size: it.Bytes, dtype: it.Shard.DType, value: it.Value, crc: crc}
}

// reuse lists the items of a rank that need no writing.
type reuse struct {
	files []heldFile   // to be linked in, or named
	of    map[int]spot // by item
}

// heldFile is a file of a base.
type heldFile struct {
	name string // in the directory of this checkpoint, or where it lies
	from string // where it lies now, in the backend
	size int64
	in   checkpoint.Ref // the directory where it stays; zero if it is linked in
}

// spot is the place of an item's bytes.
type spot struct {
	digest checkpoint.Digest
	file   int               // of the files; -1: this rank's own
	entry  *checkpoint.Entry // of the base, if in one of the files
	tied   int               // the item that is written, if in the rank's own
}

// match is an item whose digest is known, and the equal chunk of a base, if any.
type match struct {
	content content
	held    *held
}

// reuse finds the items that need no writing, and links in or names the files that hold them.
// It reads only the first block of an item, unless another chunk may be equal.
func (w *FileWriter) reuse(ctx context.Context, rank int, items []checkpoint.Item, src Source) (reuse, error) {
	if !w.reusing {
		return reuse{}, nil
	}
	matches, err := w.matches(ctx, rank, items, src)
	if err != nil {
		return reuse{}, err
	}
	live := liveOf(usesOf(matches))
	if w.uses != nil {
		if live, err = w.uses.live(ctx, rank, matches); err != nil {
			return reuse{}, err
		}
	}
	place := w.link
	if !w.root.HasLinks() {
		place = w.refer
	}
	unfit := map[string]bool{}
	for {
		u := settle(items, matches, live, unfit)
		again := false
		for n, f := range u.files {
			if err := ctx.Err(); err != nil {
				return reuse{}, err
			}
			if err := place(ctx, f, u, n); err != nil {
				if errors.Is(err, errors.ErrUnsupported) {
					w.root.linkless.Store(true)
				}
				w.unusable(fmt.Errorf("%s is not reused, its chunks are rewritten: %w", w.root.b.Path(f.from), err))
				unfit[f.from], again = true, true
			}
		}
		if !again {
			return u, nil
		}
	}
}

// matches finds the digest of each item that may be stored already.
func (w *FileWriter) matches(ctx context.Context, rank int, items []checkpoint.Item, src Source) (map[int]match, error) {
	bases := w.openBases(ctx, rank, items)
	probes := make(map[int]probe)
	alike := map[probe]int{}
	for i, it := range items {
		if it.Bytes < MinReuse {
			continue
		}
		data, err := stream.Item(ctx, src, i, it)
		if err != nil {
			return nil, err
		}
		probes[i] = probeOf(it, crc32c.Checksum(data[:checkpoint.BlockSize]))
		alike[probes[i]]++
	}
	out := map[int]match{}
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
		digest, known, err := digestAmong(ctx, data, candidates, alike[p] > 1)
		if err != nil {
			return nil, err
		}
		if !known {
			continue
		}
		m := match{content: contentOf(it, digest)}
		for n := range candidates {
			if candidates[n].entry.Digest == digest {
				m.held = &candidates[n]
				break
			}
		}
		out[i] = m
	}
	return out, nil
}

// errAlone ends the digest of an item that matches no candidate.
var errAlone = errors.New("no candidate has these bytes")

// digestAmong digests data, as long as one of the candidates may be equal or always is set.
func digestAmong(ctx context.Context, data []byte, candidates []held, always bool) (digest checkpoint.Digest, known bool, err error) {
	alive := slices.Clone(candidates)
	hash := scan.NewHasher()
	defer hash.Free()
	err = scan.Bytes(ctx, data, func(window []byte, at int64) error {
		first := int(at / checkpoint.BlockSize)
		for lo := 0; lo < len(window) && len(alive) > 0; lo += checkpoint.BlockSize {
			crc, block := crc32c.Checksum(window[lo:min(lo+checkpoint.BlockSize, len(window))]), first+lo/checkpoint.BlockSize
			alive = slices.DeleteFunc(alive, func(h held) bool { return h.entry.Sums[block] != crc })
		}
		if len(alive) == 0 && !always {
			return errAlone
		}
		hash.Add(window)
		return nil
	})
	if errors.Is(err, errAlone) {
		return digest, false, nil
	}
	return hash.Digest(), err == nil, err
}

// settle decides what is reused. Of files it takes those that are not unfit and at least half
// live; of equal items that are written, it keeps the first. It is a pure function.
func settle(items []checkpoint.Item, matches map[int]match, live map[string]int64, unfit map[string]bool) reuse {
	u := reuse{of: map[int]spot{}}
	at := map[string]int{}
	first := map[content]int{}
	for i := range items {
		m, ok := matches[i]
		if !ok {
			continue
		}
		if h := m.held; h != nil && !unfit[h.file.from] && half(live, h.file) {
			n, ok := at[h.file.from]
			if !ok {
				n = len(u.files)
				at[h.file.from] = n
				u.files = append(u.files, h.file)
			}
			u.of[i] = spot{digest: m.content.digest, file: n, entry: h.entry}
			continue
		}
		if tied, ok := first[m.content]; ok {
			u.of[i] = spot{digest: m.content.digest, file: -1, tied: tied}
			continue
		}
		first[m.content] = i
	}
	return u
}

// Uses records which chunks of its bases' files the ranks of one save would use, so that a
// file counts as half live for all ranks together. If a save is distributed to other ranks
// than the one before, each rank uses only a part of every file. A rank that uses half of its
// files by itself does not wait for others.
type Uses struct {
	pause, resume func()

	mu      sync.Mutex
	open    map[int]bool // ranks that have not reported their uses
	used    map[use]int64
	decided chan struct{} // closed when all ranks have reported
	closed  bool
}

// use is a chunk in a file of a base.
type use struct {
	from   string // the file, as in [heldFile]
	offset int64
}

// NewUses returns the Uses for a save of these ranks, which one process writes. A rank that
// waits for the others calls pause first, and resume before it continues: in between it uses
// neither processor nor disk.
func NewUses(ranks []int, pause, resume func()) *Uses {
	u := &Uses{pause: pause, resume: resume, open: map[int]bool{}, used: map[use]int64{}, decided: make(chan struct{})}
	for _, rank := range ranks {
		u.open[rank] = true
	}
	return u
}

// Done records that a rank will report nothing more: it is written, or will not be.
func (u *Uses) Done(rank int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.done(rank)
}

// Stop records that the remaining ranks will never report. Ranks that wait for them decide by
// the reports so far.
func (u *Uses) Stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.open)
	u.done(-1)
}

func (u *Uses) done(rank int) {
	delete(u.open, rank)
	if len(u.open) == 0 && !u.closed {
		u.closed = true
		close(u.decided)
	}
}

// live reports the uses of a rank, and returns the bytes of each file that all ranks would
// use. It waits for the others only if their uses can change the decision for this rank.
func (u *Uses) live(ctx context.Context, rank int, matches map[int]match) (map[string]int64, error) {
	own := usesOf(matches)
	u.mu.Lock()
	for at, size := range own {
		u.used[at] = size
	}
	u.done(rank)
	u.mu.Unlock()
	if !undecided(liveOf(own), matches) {
		return liveOf(own), ctx.Err()
	}
	u.pause()
	defer u.resume()
	select {
	case <-u.decided:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return liveOf(u.used), nil
}

// usesOf returns the chunks of bases that a rank's items match, with their sizes.
func usesOf(matches map[int]match) map[use]int64 {
	out := map[use]int64{}
	for _, m := range matches {
		if m.held != nil {
			out[use{m.held.file.from, m.held.entry.Offset}] = m.content.size
		}
	}
	return out
}

// liveOf returns the number of used bytes of each file, counting each chunk once.
func liveOf(uses map[use]int64) map[string]int64 {
	out := map[string]int64{}
	for at, size := range uses {
		out[at.from] += size
	}
	return out
}

// half reports whether enough of a file is live for it to be linked in.
func half(live map[string]int64, f heldFile) bool { return 2*live[f.from] >= f.size }

// undecided reports whether less than half of a matched file is live.
func undecided(live map[string]int64, matches map[int]match) bool {
	for _, m := range matches {
		if m.held != nil && !half(live, m.held.file) {
			return true
		}
	}
	return false
}

// refer checks a file of a base that is named where it lies. It changes nothing there.
func (w *FileWriter) refer(ctx context.Context, f heldFile, _ reuse, _ int) error {
	info, err := w.root.b.Stat(ctx, f.from)
	if err == nil && info.Size != f.size {
		err = fmt.Errorf("size is %d bytes, %d were written", info.Size, f.size)
	}
	return err
}

// link gives a file of a base a name in this checkpoint's directory. From then on its bytes
// stay, whatever happens to the base. link checks the file only after that, because the file
// at the path may have been replaced since the base was read. The name becomes durable with
// the directory. An unsuitable file may keep its name: another rank may use it.
func (w *FileWriter) link(ctx context.Context, f heldFile, u reuse, n int) error {
	to := nameOf(w.ref, f.name)
	err := w.root.b.Link(ctx, f.from, to, object.Exclusive)
	if errors.Is(err, fs.ErrExist) {
		// The link is of another rank, or of an interrupted call. The base may be gone since.
		if err = sameFile(ctx, w.root.b, f.from, w.root.b, to); errors.Is(err, fs.ErrNotExist) {
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
	if err == nil && info.Size != f.size {
		err = fmt.Errorf("size is %d bytes, %d were written", info.Size, f.size)
	}
	buf := scan.Buffers.Get().(*[]byte)
	defer scan.Buffers.Put(buf)
	for _, s := range u.of {
		if s.file != n || err != nil {
			continue
		}
		block := (*buf)[:checkpoint.BlockSize]
		if _, err = file.ReadAt(block, s.entry.Offset); err == nil {
			if k, got := scan.DamagedBlock(block, s.entry.Sums); k >= 0 {
				err = fmt.Errorf("%q: checksum of its first block is %08x, want %08x", s.entry.Item.Shard.FQN, got, s.entry.Sums[0])
			}
		}
	}
	return errors.Join(err, file.Close())
}
