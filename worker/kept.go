package worker

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage"
)

// What a slot held stays in it until the slot is used again. As long as it
// does, a restore of that checkpoint reads it there instead of in the files.
// Who reads a slot holds it: it is neither used again nor unmapped before it is
// let go.

// kept is what an arena still holds of a checkpoint that was written from it.
type kept struct {
	checkpoint string
	rank       int
	order      int // of all that were ever kept
	at         map[string]span
	digests    map[string]plan.Digest // of items that this rank has written; nil: not known
}

// keep says what is in an arena, whose checkpoint is written by now.
func (a *arenas) keep(f *arena, k *kept) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.order++
	k.order = a.order
	f.kept = k
}

// forget says that a checkpoint does not exist.
func (a *arenas) forget(checkpoint string) {
	if a == nil {
		return // an import has no arenas
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for f := range a.live {
		if f.kept != nil && f.kept.checkpoint == checkpoint {
			f.kept = nil
		}
	}
}

// age is for the choice of an arena to overwrite: what was kept earlier is
// needed less, and an arena that keeps nothing is best.
func (a *arenas) age(f *arena) (order int, held bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.kept == nil {
		return 0, f.readers > 0
	}
	return f.kept.order, f.readers > 0
}

// overwrite gives an arena up for another use, unless somebody reads it.
func (a *arenas) overwrite(f *arena) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.readers > 0 {
		return false
	}
	f.kept = nil
	return true
}

// letGo is closed when an arena that was read is not read any more.
func (a *arenas) letGo() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.released
}

// copies is what the arenas have of one checkpoint, by rank.
type copies map[int]*copied

type copied struct {
	*kept
	data  []byte
	arena *arena
	idle  bool // no worker of this attempt was ever told to write to it
}

var _ storage.Memory = copies{}

// Chunk implements storage.Memory.
func (c copies) Chunk(rank int, it plan.Item) ([]byte, plan.Digest) {
	of := c[rank]
	if of == nil {
		return nil, plan.Digest{}
	}
	k := itemKey(it)
	at, ok := of.at[k]
	digest := of.digests[k]
	if !ok || of.digests != nil && digest == (plan.Digest{}) {
		return nil, plan.Digest{}
	}
	return of.data[at.off : at.off+at.size : at.off+at.size], digest
}

// hold returns what there is of a checkpoint. Nobody else uses or unmaps it
// before it is let go.
func (a *arenas) hold(checkpoint string) (c copies, release func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c = copies{}
	var held []*arena
	for f, free := range a.live {
		if f.kept == nil || f.kept.checkpoint != checkpoint || c[f.kept.rank] != nil {
			continue
		}
		f.readers++
		held = append(held, f)
		c[f.kept.rank] = &copied{f.kept, f.data, f, free}
	}
	return c, func() { a.release(held) }
}

func (a *arenas) release(held []*arena) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range held {
		if f.readers--; f.readers == 0 && f.dropped {
			_ = f.unmap() // its file is gone already
		}
	}
	close(a.released)
	a.released = make(chan struct{})
}

// spare frees arenas that nobody uses: all of them, or those of ranks from
// one on, which this job does not have. It reports whether there were any.
func (a *arenas) spare(from int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	some := false
	for f, free := range a.live {
		if free && f.readers == 0 && f.rank >= from {
			_ = a.remove(f) // a file that cannot be removed stays until the job ends
			some = true
		}
	}
	return some
}

// keepLeft takes over the slots of a dead trainer that hold a checkpoint, and
// frees all others.
func (j *job) keepLeft(checkpoint string) error {
	for _, path := range j.arenas.left {
		if checkpoint == "" || !strings.Contains(filepath.Base(path), ".save.") {
			continue
		}
		f, k, err := openLeft(path, checkpoint)
		if err != nil {
			j.log.Warn("a staging slot of a dead trainer cannot be read and is freed", "file", path, "error", err)
		}
		if f == nil {
			continue
		}
		f.room = j.arenas.room
		j.arenas.keep(f, k)
		j.arenas.mu.Lock()
		j.arenas.live[f] = true
		j.arenas.left = slices.DeleteFunc(slices.Clone(j.arenas.left), func(at string) bool { return at == path })
		j.arenas.mu.Unlock()
	}
	return j.arenas.freeLeft()
}

// openLeft opens the slot in a file, if it is complete and of a checkpoint.
func openLeft(path, checkpoint string) (f *arena, k *kept, err error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	f = &arena{path: path, use: "save", file: file}
	defer func() {
		if k == nil {
			err = errors.Join(err, f.unmap())
			f = nil
		}
	}()
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return f, nil, err
	}
	// The memory is there: to enter it page by page takes longer than to copy it.
	if f.data, err = unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return f, nil, err
	}
	f.size.Store(info.Size())
	h, complete, err := readSlotHeader(f.data)
	if err != nil || !complete || h.Checkpoint != checkpoint {
		if errors.Is(err, errNoSlot) {
			err = nil // who looked for saves to finish has said so
		}
		return f, nil, err
	}
	local, err := plan.DecodeLocal(h.Plan)
	if err != nil || len(local.Items) != len(h.Spans) {
		return f, nil, err
	}
	f.rank = h.Rank
	return f, keptOf(checkpoint, h.Rank, local.Items, h.Spans, h.Digests), nil
}

// keptOf is what a slot holds, by the description in its header.
func keptOf(checkpoint string, rank int, items []plan.Item, spans []span, digests []plan.Digest) *kept {
	k := &kept{checkpoint: checkpoint, rank: rank, at: make(map[string]span, len(items))}
	if digests != nil {
		k.digests = make(map[string]plan.Digest, len(items))
	}
	for i, it := range items {
		key := itemKey(it)
		k.at[key] = spans[i]
		if digests != nil {
			k.digests[key] = digests[i]
		}
	}
	return k
}

// noSpace reports whether shared memory is full.
func noSpace(err error) bool { return errors.Is(err, syscall.ENOSPC) }
