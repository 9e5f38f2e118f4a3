package staging

import (
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
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
	at         map[string]Span
	digests    map[string]checkpoint.Digest // of items that this rank has written; nil: not known
}

// keep says what is in an arena, whose checkpoint is written by now.
func (a *Arenas) keep(f *Arena, k *kept) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.order++
	k.order = a.order
	f.kept = k
}

// Doubt says that what is kept of a checkpoint is not what was committed: nobody is lent
// it again.
func (a *Arenas) Doubt(checkpoint string) { a.forget(checkpoint) }

// forget drops what is kept of a checkpoint, such as one that does not exist.
func (a *Arenas) forget(checkpoint string) {
	if a == nil {
		return // nothing is staged
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
func (a *Arenas) age(f *Arena) (order int, held bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.kept == nil {
		return 0, f.readers > 0
	}
	return f.kept.order, f.readers > 0
}

// overwrite gives an arena up for another use, unless somebody reads it.
func (a *Arenas) overwrite(f *Arena) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.readers > 0 {
		return false
	}
	f.kept = nil
	return true
}

// letGo is closed when an arena that was read is not read any more.
func (a *Arenas) letGo() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.released
}

// Copies is what the slots have of one checkpoint, by rank.
type Copies map[int]*Copy

// Copy is what one slot has of a checkpoint.
type Copy struct {
	*kept
	data  []byte
	arena *Arena
	idle  bool // no worker of this group was ever told to write to it
}

var _ data.Memory = Copies{}

// Chunk implements [data.Memory].
func (c Copies) Chunk(rank int, it checkpoint.Item) ([]byte, checkpoint.Digest) {
	of := c[rank]
	if of == nil {
		return nil, checkpoint.Digest{}
	}
	k := Key(it)
	at, ok := of.at[k]
	digest := of.digests[k]
	if !ok || of.digests != nil && digest == (checkpoint.Digest{}) {
		return nil, checkpoint.Digest{}
	}
	return of.data[at.Offset : at.Offset+at.Size : at.Offset+at.Size], digest
}

// Find is where an item of a rank lies: in an arena, at a range of its bytes.
func (c Copies) Find(rank int, it checkpoint.Item) (f *Arena, at Span, ok bool) {
	of := c[rank]
	if of == nil {
		return nil, Span{}, false
	}
	at, ok = of.at[Key(it)]
	return of.arena, at, ok
}

// Idle are the copies that no worker of the group can write to: they are of
// slots that none was told of.
func (c Copies) Idle() Copies {
	out := Copies{}
	for rank, of := range c {
		if of.idle {
			out[rank] = of
		}
	}
	return out
}

// Uses names what each slot holds, by rank: a number that stands for a
// checkpoint in one use of a slot, and is never 0 nor given twice.
func (c Copies) Uses() map[int]int {
	out := make(map[int]int, len(c))
	for rank, of := range c {
		out[rank] = of.order
	}
	return out
}

// Hold returns what there is of a checkpoint. Nobody else uses or unmaps it
// before it is let go, once.
func (a *Arenas) Hold(checkpoint string) (c Copies, release func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c = Copies{}
	var held []*Arena
	for f, free := range a.live {
		if f.kept == nil || f.kept.checkpoint != checkpoint || c[f.kept.rank] != nil {
			continue
		}
		f.readers++
		held = append(held, f)
		c[f.kept.rank] = &Copy{f.kept, f.data, f, free}
	}
	return c, func() { a.Release(held) }
}

// Lend holds slots that are held already once more.
func (a *Arenas) Lend(slots []*Arena) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range slots {
		f.readers++
	}
}

// Release lets go of slots that were lent.
func (a *Arenas) Release(held []*Arena) {
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
func (a *Arenas) spare(from int) bool {
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
