package restore

import (
	"context"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/tensor"
)

// A rank that wants exactly the content of a staging slot, its own former one or
// another rank's, copies it from there: the load then needs no memory, which
// would take ten times as long as the copy, and nothing is copied twice.
//
// A rank that verifies while it copies, in one pass, is lent any slot. For other
// ranks, the lent data is verified in place, so no process may be able to write
// there. They are lent only slots whose paths no worker of this attempt has
// received; an attempt begins when all processes of the attempts before it have
// ended. The checksums detect what those processes wrote there, and when. A lent
// slot is held: it is neither reused nor removed until the rank has given it back
// or the attempt is over.

// spot is the place of a want in a slot or in a file of the checkpoint. The zero
// spot is that of a want that is read into the rank's arena.
type spot struct {
	arena *staging.Arena
	file  string // path of the file; empty: none
	off   int64
	check *data.Check // the rank verifies the bytes by it; nil: they are verified already
}

// lent reports whether a rank copies from the spot.
func (s spot) lent() bool { return s.arena != nil || s.file != "" }

// spot returns the place of a rank's want in a slot or file that is lent to it.
func (of *restoreRank) spot(want int) spot {
	if of.spots == nil {
		return spot{}
	}
	return of.spots[want]
}

// target returns the buffer for a want.
func (of *restoreRank) target(want int) []byte {
	if of.arena == nil || of.spot(want).lent() {
		return nil
	}
	at := of.offsets[want]
	return of.arena.Data()[at : at+of.sizes[want]]
}

// lent returns the slots that are lent to a rank, without duplicates.
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

// lendSlots finds the wants that ranks can copy out of slots and replicas. The arenas then
// need room only for the rest. It returns the lent bytes.
func (r *restore) lendSlots(ctx context.Context, held staging.Copies) (lent Report, err error) {
	own, peers := held.BySource()
	if lent.Slots, err = r.lendFrom(ctx, own); err == nil {
		lent.Peers, err = r.lendFrom(ctx, peers)
	}
	if err != nil {
		return Report{}, err
	}
	if len(held) == 0 {
		return lent, nil
	}
	for rank := range r.ranks {
		of := &r.ranks[rank]
		r.l.cfg.Arenas.Retain(of.lent())
		of.replace()
	}
	return lent, nil
}

// lendFrom is lendSlots for copies of one source. It verifies those that the ranks do not
// verify themselves.
func (r *restore) lendFrom(ctx context.Context, held staging.Copies) (bytes int64, err error) {
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
	var verified, checked []lending // by this process, and by the ranks
	for rank := range r.ranks {
		of := &r.ranks[rank]
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
				if known && !fits(held, of.wants[read.Want], read, check.Chunk) {
					continue // see [restore.fromSlots]
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
	// Differences from the committed bytes are reported when the other blocks are
	// read.
	got, err := files.VerifyMemory(ctx, wants, reads, idle, proof)
	if err != nil {
		return 0, err
	}
	for _, read := range got.Rest {
		verified[read.Want].at = spot{}
	}
	for _, of := range append(verified, checked...) {
		if of.at.arena != nil { // otherwise it may be lent from another source
			r.ranks[of.rank].lendAt(of.want, of.at)
		}
	}
	return bytes + got.Bytes, nil
}

// fits reports whether a chunk in a slot may have the committed digest: its own is the same or unknown. The
// ranks compare checksums only, and what they find fails the load.
func fits(held staging.Copies, want checkpoint.Want, read checkpoint.Read, committed checkpoint.Digest) bool {
	_, has := held.Chunk(read.Rank, itemOf(want, read))
	none := checkpoint.Digest{}
	return has == none || committed == none || has == committed
}

// checks reports whether a rank verifies a want itself if it is lent.
func (of *restoreRank) checks(want int) bool {
	return of.verifies && of.sizes[want] >= client.SmallestChecked
}

// lendAt sets the spot of a rank's want.
func (of *restoreRank) lendAt(want int, at spot) {
	if of.spots == nil {
		of.spots = make([]spot, len(of.wants))
	}
	of.spots[want] = at
}

// replace shrinks the arena of a rank to the wants that are not lent.
func (of *restoreRank) replace() {
	sizes := make([]int64, len(of.sizes))
	for i, n := range of.sizes {
		if !of.spot(i).lent() {
			sizes[i] = n
		}
	}
	of.offsets, of.size = staging.Place(sizes)
}

// takeBack ends the lending before any rank knows of it: all wants go into the
// ranks' arenas.
func (r *restore) takeBack() {
	for rank := range r.ranks {
		of := &r.ranks[rank]
		if slots := of.lent(); len(slots) > 0 {
			r.l.cfg.Arenas.Release(slots)
		}
		of.spots = nil
		of.offsets, of.size = staging.Place(of.sizes)
		if of.arena != nil && int64(len(of.arena.Data())) < of.size {
			_ = r.l.cfg.Arenas.Drop(of.arena) // a file that cannot be removed stays until the job ends
			of.arena = nil
		}
	}
}

// alone returns the reads that are the only one of their want.
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

// spotIn returns the place of a want in slots that one read fills, if its bytes
// lie there as wanted: contiguous and in the same dtype.
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

// itemOf returns the item of a read.
func itemOf(want checkpoint.Want, read checkpoint.Read) checkpoint.Item {
	return checkpoint.Item{Value: want.Value, Shard: tensor.Shard{FQN: read.FQN, Box: read.Chunk}}
}
