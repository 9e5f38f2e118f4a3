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
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/tensor"
)

// MinReuse is the size in bytes of the smallest chunk that is reused: smaller
// ones are written again, so that few files are kept for little.
const MinReuse = 1 << 20

// Base is a committed checkpoint whose chunks a save may reuse.
type Base struct {
	Ref      checkpoint.Ref
	Manifest checkpoint.Digest // as the log says
}

// Reusing makes WriteData write only what none of the bases holds, nor the
// rank's own file already, as with tied weights. A chunk is the same if digest,
// dtype and size are. The file that holds it is linked into the checkpoint's
// directory, which so stays whole when the base is removed, at whatever moment.
// A chunk is written all the same if it is smaller than [MinReuse], if the link
// cannot be made, or if this rank, or all that [FileWriter.Together] was told
// of, would use less than half of the file. Of a
// base that has chunks of many ranks, those are looked at that held the rank's
// items, so a chunk that moved to another name and rank may be written again.
//
// say is told why a base or a file of it could not be used; it may be nil, and
// must not block. Reusing is called before WriteData, whose Source must then
// give every item as often as it is asked.
func (w *FileWriter) Reusing(say func(error), bases ...Base) *FileWriter {
	w.reusing, w.bases, w.say = true, bases, say
	return w
}

// Together has the ranks of a save judged together, where files of bases are
// used in part. It is called before WriteData, with the same uses for each rank.
func (w *FileWriter) Together(uses *Uses) *FileWriter {
	w.uses = uses
	return w
}

func (w *FileWriter) unusable(err error) {
	if w.say != nil {
		w.say(err)
	}
}

// content is what two chunks must have in common to be one.
type content struct {
	digest checkpoint.Digest
	dtype  tensor.DType
	value  bool
	size   int64
}

func contentOf(it checkpoint.Item, digest checkpoint.Digest) content {
	return content{digest: digest, dtype: it.Shard.DType, value: it.Value, size: it.Bytes}
}

// probe is what is cheap to know of a chunk, and differs for most of those
// that are not the same: most tensors change in their first block.
type probe struct {
	size  int64
	dtype tensor.DType
	value bool
	crc   uint32 // of the first block
}

func probeOf(it checkpoint.Item, crc uint32) probe {
	return probe{size: it.Bytes, dtype: it.Shard.DType, value: it.Value, crc: crc}
}

// reuse is what of a rank's items need not be written.
type reuse struct {
	files []heldFile   // to be linked in
	of    map[int]spot // by item
}

// heldFile is a file of a base.
type heldFile struct {
	name string // in the directory of this checkpoint
	from string // where it lies now, in the backend
	size int64
}

// spot is where the bytes of an item are.
type spot struct {
	digest checkpoint.Digest
	file   int               // of the files; -1: this rank's own
	entry  *checkpoint.Entry // of the base, if in one of the files
	tied   int               // the item whose bytes they are, if in the rank's own
}

// match is an item whose digest is known, and the chunk of a base that is the
// same, if any.
type match struct {
	content content
	held    *held
}

// reuse finds the items that need no writing, and links in the files that hold
// them. It reads no more of an item than its first block, unless something may
// be the same.
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
	unfit := map[string]bool{}
	for {
		u := settle(items, matches, live, unfit)
		again := false
		for n, f := range u.files {
			if err := ctx.Err(); err != nil {
				return reuse{}, err
			}
			if err := w.link(ctx, f, u, n); err != nil {
				if errors.Is(err, errors.ErrUnsupported) {
					w.root.linkless.Store(true)
				}
				w.unusable(fmt.Errorf("%s is not reused, its chunks are written again: %w", w.root.b.Path(f.from), err))
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
		data, err := itemBytes(ctx, src, i, it)
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
		data, err := itemBytes(ctx, src, i, it)
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

// errAlone ends a digest that no candidate can have.
var errAlone = errors.New("no candidate has these bytes")

// digestAmong digests data, as long as one of the candidates may be the same or
// the digest is wanted in any case.
func digestAmong(ctx context.Context, data []byte, candidates []held, always bool) (digest checkpoint.Digest, known bool, err error) {
	alive := slices.Clone(candidates)
	hash := newHasher()
	defer hash.free()
	err = scanBytes(ctx, data, func(window []byte, at int64) error {
		first := int(at / checkpoint.BlockSize)
		for lo := 0; lo < len(window) && len(alive) > 0; lo += checkpoint.BlockSize {
			crc, block := crc32c.Checksum(window[lo:min(lo+checkpoint.BlockSize, len(window))]), first+lo/checkpoint.BlockSize
			alive = slices.DeleteFunc(alive, func(h held) bool { return h.entry.Sums[block] != crc })
		}
		if len(alive) == 0 && !always {
			return errAlone
		}
		hash.add(window)
		return nil
	})
	if errors.Is(err, errAlone) {
		return digest, false, nil
	}
	return hash.digest(), err == nil, err
}

// settle decides what is reused: of the files that are not unfit, those of
// which at least half is live; and of equal items that are written, all but the
// first. It is a pure function.
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

// itemBytes are the bytes of an item, as many as the plan says.
func itemBytes(ctx context.Context, src Source, i int, it checkpoint.Item) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	data, err := src.Item(i)
	if err != nil {
		return nil, fmt.Errorf("bytes of %q: %w", it.Shard.FQN, err)
	}
	if int64(len(data)) != it.Bytes {
		return nil, fmt.Errorf("bytes of %q: got %d, the plan says %d", it.Shard.FQN, len(data), it.Bytes)
	}
	return data, nil
}

// Uses is what the ranks of one save would use of the files of its bases. With
// it, whether half of a file would be live is judged for all of them together:
// where a save is shared out to other ranks than the one before, each uses only
// a part of every file. A rank that uses half of its files by itself waits for
// nobody.
type Uses struct {
	pause, resume func()

	mu      sync.Mutex
	open    map[int]bool // ranks that have not told what they use
	used    map[use]int64
	decided chan struct{} // closed when nobody is waited for
	closed  bool
}

// use is a chunk in a file of a base.
type use struct {
	from   string // the file, as [heldFile] has it
	offset int64
}

// NewUses is for a save of these ranks, which one process writes. A rank that
// waits for the others calls pause first, and resume before it goes on: in
// between it uses neither processor nor disk.
func NewUses(ranks []int, pause, resume func()) *Uses {
	u := &Uses{pause: pause, resume: resume, open: map[int]bool{}, used: map[use]int64{}, decided: make(chan struct{})}
	for _, rank := range ranks {
		u.open[rank] = true
	}
	return u
}

// Done says that a rank will tell nothing more: it is written, or will not be.
func (u *Uses) Done(rank int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.done(rank)
}

// Stop says that ranks which have told nothing never will. Who waits for them
// goes by what is known.
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

// live tells what a rank would use, and is the bytes of each file that all
// ranks would. It waits for the others only where that can change anything for
// this rank.
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

// usesOf are the chunks of bases that a rank's items match, with their sizes.
func usesOf(matches map[int]match) map[use]int64 {
	out := map[use]int64{}
	for _, m := range matches {
		if m.held != nil {
			out[use{m.held.file.from, m.held.entry.Offset}] = m.content.size
		}
	}
	return out
}

// liveOf is how many bytes of each file are used, each once.
func liveOf(uses map[use]int64) map[string]int64 {
	out := map[string]int64{}
	for at, size := range uses {
		out[at.from] += size
	}
	return out
}

// half reports whether enough of a file is live for it to be linked in.
func half(live map[string]int64, f heldFile) bool { return 2*live[f.from] >= f.size }

// undecided reports whether a file is matched of which less than half is live.
func undecided(live map[string]int64, matches map[int]match) bool {
	for _, m := range matches {
		if m.held != nil && !half(live, m.held.file) {
			return true
		}
	}
	return false
}

// link gives a file of a base a name in this checkpoint's directory. From then
// on nobody takes its bytes away, whatever becomes of the base; only then it is
// looked at, because what lay at the path may have been removed, and something
// else put there, since the base was read. The name becomes durable with the
// directory. A file that does not fit may keep its name: another rank may use
// it.
func (w *FileWriter) link(ctx context.Context, f heldFile, u reuse, n int) error {
	to := nameOf(w.ref, f.name)
	err := w.root.b.Link(ctx, f.from, to, object.Exclusive)
	if errors.Is(err, fs.ErrExist) {
		// Of another rank, or of a call that was cut off. The base may be gone
		// since.
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
		err = fmt.Errorf("it has %d bytes, %d were written", info.Size, f.size)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for _, s := range u.of {
		if s.file != n || err != nil {
			continue
		}
		block := (*buf)[:checkpoint.BlockSize]
		if _, err = file.ReadAt(block, s.entry.Offset); err == nil {
			if k, got := damagedBlock(block, s.entry.Sums); k >= 0 {
				err = fmt.Errorf("%q: checksum of its first block is %08x, want %08x", s.entry.Item.Shard.FQN, got, s.entry.Sums[0])
			}
		}
	}
	return errors.Join(err, file.Close())
}
