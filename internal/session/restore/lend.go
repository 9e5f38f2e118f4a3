package restore

import (
	"context"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/tensor"
)

// A rank that wants just what lies in a staging slot, its own of before or that
// of another, copies it from there: no memory has to be made for the load, which
// takes ten times as long as the copy, and nothing is copied twice.
//
// A rank that verifies what it copies, in one pass, is lent any slot. For others what
// is lent is verified where it lies. So nobody may be able to write there: they are lent
// only slots that no worker of this attempt was ever told of, and an attempt begins
// when all processes of those before it have ended. What they may have written there,
// and when, the checksums tell. What is lent is held, so it is neither used again nor
// removed until the rank has given it back, or the attempt is over.

// spot is where a want lies in a slot, or in a file of the checkpoint; the zero
// spot is of one that is read into the rank's arena.
type spot struct {
	arena *staging.Arena
	file  string // its path; empty: it is in none
	off   int64
	check *data.Check // the rank verifies it by that; nil: it was verified
}

// lent reports whether a rank copies from there.
func (s spot) lent() bool { return s.arena != nil || s.file != "" }

// spot is where a want of a rank lies in a slot that is lent to it.
func (of *restoreRank) spot(want int) spot {
	if of.spots == nil {
		return spot{}
	}
	return of.spots[want]
}

// target is where a want is to be read to.
func (of *restoreRank) target(want int) []byte {
	if of.arena == nil || of.spot(want).lent() {
		return nil
	}
	at := of.offsets[want]
	return of.arena.Data()[at : at+of.sizes[want]]
}

// lent are the slots that are lent to a rank, each once.
func (of *restoreRank) lent() (slots []*staging.Arena) {
	seen := map[*staging.Arena]bool{}
	for _, s := range of.spots {
		if s.arena != nil && !seen[s.arena] {
			seen[s.arena] = true
			slots = append(slots, s.arena)
		}
	}
	return slots
}

// allLent reports whether a rank needs no arena.
func (of *restoreRank) allLent() bool {
	for i := range of.wants {
		if !of.spot(i).lent() && !of.absent(i) {
			return false
		}
	}
	return true
}

// lend finds what ranks can copy out of slots, verifies what they do not, and leaves
// room in their arenas for all else alone. It returns how much there is.
func (r *restore) lend(ctx context.Context, held staging.Copies) (bytes int64, err error) {
	files, ok := r.reader.(*data.FileReader)
	idle := held.Idle()
	if !ok || len(held) == 0 {
		return 0, nil
	}
	var wants []checkpoint.Want
	var reads []checkpoint.Read
	type lending struct {
		rank, want int
		at         spot
	}
	var verified, checked []lending // by us, and by the ranks
	for rank := range r.ranks {
		of := &r.ranks[rank]
		if !of.slots {
			continue
		}
		for _, read := range of.alone() {
			s := spotIn(held, of.wants[read.Want], read)
			if s.arena == nil {
				continue
			}
			if of.checks(read.Want) {
				check, known, err := files.Check(ctx, of.wants[read.Want], read)
				if err != nil {
					return 0, err
				}
				if known {
					s.check = &check
					checked = append(checked, lending{rank, read.Want, s})
					bytes += of.sizes[read.Want]
					continue
				}
			}
			if idle[read.Rank] == nil {
				continue
			}
			verified = append(verified, lending{rank, read.Want, s})
			wants = append(wants, of.wants[read.Want])
			read.Want = len(wants) - 1
			reads = append(reads, read)
		}
	}
	proof, err := r.l.proven(ctx, r.ckpt.ID, idle)
	if err != nil {
		return 0, err
	}
	// What is not what was committed is said of when its other blocks are read.
	got, err := files.VerifyMemory(ctx, wants, reads, idle, proof)
	if err != nil {
		return 0, err
	}
	for _, read := range got.Rest {
		verified[read.Want].at = spot{}
	}
	for _, of := range append(verified, checked...) {
		r.ranks[of.rank].lendAt(of.want, of.at)
	}
	for rank := range r.ranks {
		of := &r.ranks[rank]
		r.l.cfg.Arenas.Lend(of.lent())
		of.replace()
	}
	return bytes + got.Bytes, nil
}

// checks reports whether a rank verifies a want, where it is lent.
func (of *restoreRank) checks(want int) bool {
	return of.verifies && of.sizes[want] >= client.SmallestChecked
}

// lendAt says where a rank finds a want.
func (of *restoreRank) lendAt(want int, at spot) {
	if of.spots == nil {
		of.spots = make([]spot, len(of.wants))
	}
	of.spots[want] = at
}

// replace leaves room in the arena of a rank for what is not lent to it alone.
func (of *restoreRank) replace() {
	sizes := make([]int64, len(of.sizes))
	for i, n := range of.sizes {
		if !of.spot(i).lent() {
			sizes[i] = n
		}
	}
	of.offsets, of.size = staging.Place(sizes)
}

// takeBack is the end of lending before any rank was told of it: all that ranks
// want goes into their arenas.
func (r *restore) takeBack() {
	for rank := range r.ranks {
		of := &r.ranks[rank]
		if slots := of.lent(); len(slots) > 0 {
			r.l.cfg.Arenas.Release(slots)
		}
		of.spots = nil
		of.offsets, of.size = staging.Place(of.sizes)
		if of.arena != nil && int64(len(of.arena.Data())) < of.size {
			_ = r.l.cfg.Arenas.Drop(of.arena) // what cannot be removed stays until the job ends
			of.arena = nil
		}
	}
}

// alone are the reads of wants that have no other.
func (of *restoreRank) alone() (reads []checkpoint.Read) {
	count := make([]int, len(of.wants))
	for _, read := range of.reads {
		count[read.Want]++
	}
	for _, read := range of.reads {
		if count[read.Want] == 1 {
			reads = append(reads, read)
		}
	}
	return reads
}

// spotIn is where a want lies in slots that one read fills, if its bytes lie there
// as they are wanted: one after the other, in the same dtype.
func spotIn(slots staging.Copies, want checkpoint.Want, read checkpoint.Read) spot {
	f, at, ok := slots.Find(read.Rank, itemOf(want, read))
	if !ok {
		return spot{}
	}
	if want.Value {
		return spot{arena: f, off: at.Offset}
	}
	lo, hi := tensor.Span(read.Chunk, read.Region)
	size := int64(read.DType.Size())
	if want.Shard.DType != read.DType || !read.Region.Equal(want.Shard.Box) || hi-lo != read.Region.Volume() || hi == lo || hi*size > at.Size {
		return spot{}
	}
	return spot{arena: f, off: at.Offset + lo*size}
}

// itemOf is the item that a read is of.
func itemOf(want checkpoint.Want, read checkpoint.Read) checkpoint.Item {
	return checkpoint.Item{Value: want.Value, Shard: tensor.Shard{FQN: read.FQN, Box: read.Chunk}}
}
