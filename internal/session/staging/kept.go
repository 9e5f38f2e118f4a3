package staging

import (
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// A slot keeps its content until it is used again. Until then a restore of that
// checkpoint reads the slot instead of the files. A reader holds its slot: it is
// neither reused nor unmapped before the reader releases it.

// kept describes the data of a checkpoint that an arena still holds after it was
// written.
type kept struct {
	checkpoint string
	rank       int
	order      int // among all that were ever kept
	at         map[string]Span
	digests    map[string]checkpoint.Digest // of items that this rank has written; nil: unknown
}

// keep records the content of an arena whose checkpoint is written.
func (a *Arenas) keep(f *Arena, k *kept) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.order++
	k.order = a.order
	f.kept = k
}

// Doubt records that the kept data of a checkpoint differs from the committed
// bytes: it is not lent again.
func (a *Arenas) Doubt(checkpoint string) { a.forget(checkpoint) }

// forget drops the kept data of a checkpoint, for example because it does not
// exist.
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

// age orders arenas for overwriting: older content is needed less, and an arena
// without content comes first.
func (a *Arenas) age(f *Arena) (order int, held bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.kept == nil {
		return 0, f.readers > 0
	}
	return f.kept.order, f.readers > 0
}

// overwrite releases an arena for another use, unless it has readers.
func (a *Arenas) overwrite(f *Arena) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f.readers > 0 {
		return false
	}
	f.kept = nil
	return true
}

// letGo returns a channel that is closed when an arena's last reader has
// finished.
func (a *Arenas) letGo() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.released
}

// Copies is the data of one checkpoint in the slots, by rank.
type Copies map[int]*Copy

// Copy is the data of a checkpoint in one slot.
type Copy struct {
	*kept
	data  []byte
	arena *Arena
	idle  bool // no worker of this group has received its path
	peer  bool // it is a replica of another node's slot
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

// Find returns the place of a rank's item: an arena, and a range of its bytes.
func (c Copies) Find(rank int, it checkpoint.Item) (f *Arena, at Span, ok bool) {
	of := c[rank]
	if of == nil {
		return nil, Span{}, false
	}
	at, ok = of.at[Key(it)]
	return of.arena, at, ok
}

// Idle returns the copies that no worker of the group can write to: no worker has
// received the paths of their slots.
func (c Copies) Idle() Copies {
	out := Copies{}
	for rank, of := range c {
		if of.idle {
			out[rank] = of
		}
	}
	return out
}

// BySource returns the copies in slots of this node, and the replicas of other nodes' slots.
func (c Copies) BySource() (own, peers Copies) {
	own, peers = Copies{}, Copies{}
	for rank, of := range c {
		if of.peer {
			peers[rank] = of
		} else {
			own[rank] = of
		}
	}
	return own, peers
}

// Uses identifies the content of each slot, by rank: a number for a checkpoint in
// one use of a slot, never 0 and never given twice.
func (c Copies) Uses() map[int]int {
	out := make(map[int]int, len(c))
	for rank, of := range c {
		out[rank] = of.order
	}
	return out
}

// Hold returns the copies of a checkpoint. No other use overwrites or unmaps them
// until release, which is called once.
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
		c[f.kept.rank] = &Copy{f.kept, f.data, f, free || f.use == replicaUse, f.use == replicaUse}
	}
	return c, func() { a.Release(held) }
}

// Retain adds a hold to slots that are held already.
func (a *Arenas) Retain(slots []*Arena) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range slots {
		f.readers++
	}
}

// Release removes a hold from slots.
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

// spare frees unused arenas: all of them, or those of ranks at or above from,
// which this job does not have. It reports whether there were any.
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
