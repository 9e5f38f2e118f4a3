package staging

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// holding returns the slot of a rank that holds a checkpoint, or nil. The caller
// holds the lock.
func (s *Slots) holding(rank int, checkpoint string) *slot {
	for _, sl := range s.ranks[rank] {
		if sl.checkpoint == checkpoint && sl.phase >= copying && !sl.making {
			return sl
		}
	}
	return nil
}

// Holds reports whether a slot of a rank holds a checkpoint.
func (s *Slots) Holds(checkpoint string, rank int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holding(rank, checkpoint) != nil
}

// Seal ends the copying of a rank's part of a save and returns its size. ok is
// false if there is no slot to seal.
func (s *Slots) Seal(rank int, checkpoint string) (size int64, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.holding(rank, checkpoint)
	if sl == nil || sl.phase != copying {
		return 0, false, nil
	}
	if got := loadSealed(sl.arena.data); got != sl.generation {
		return 0, true, misuse("the slot of rank %d for %s is not sealed: bytes 8 to 16 of %s are %d, want the generation %d", rank, checkpoint, sl.arena.path, got, sl.generation)
	}
	sl.phase = sealed
	sl.times.Sealed = time.Now()
	sl.times.Copied = sl.times.Sealed.Sub(sl.granted)
	return sl.plan.bytes, true, nil
}

// Times returns the durations of a rank's part of a save. ok is false if no slot holds it
// sealed, or if another process sealed it.
func (s *Slots) Times(checkpoint string, rank int) (t Times, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.holding(rank, checkpoint)
	if sl == nil || sl.times.Sealed.IsZero() {
		return t, false
	}
	return sl.times, true
}

// Open gives the bytes of a sealed rank to the writer. release frees the slot. If
// the writer passes it the digests it has written, the slot keeps its content.
func (s *Slots) Open(checkpoint string, rank int, items []checkpoint.Item) (src data.Source, release func([]data.ChunkDigest), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.holding(rank, checkpoint)
	if sl == nil || sl.phase != sealed {
		return nil, nil, fmt.Errorf("the staged bytes of rank %d for %s are gone", rank, checkpoint)
	}
	if src, err = source(sl.arena.data, sl.plan.at, rank, items); err != nil {
		return nil, nil, err
	}
	sl.phase = writing
	return src, func(digests []data.ChunkDigest) {
		if digests != nil {
			s.keep(sl, rank, digests)
		}
		s.written(sl)
	}, nil
}

// keep records the written content in a slot and for restores. The writer still
// owns the slot.
func (s *Slots) keep(sl *slot, rank int, digests []data.ChunkDigest) {
	k := &kept{checkpoint: sl.checkpoint, rank: rank, at: sl.plan.at, digests: make(map[string]checkpoint.Digest, len(digests))}
	for _, d := range digests {
		k.digests[Key(d.Item)] = d.Digest
	}
	all := make([]checkpoint.Digest, len(sl.plan.keys))
	for i, key := range sl.plan.keys {
		all[i] = k.digests[key]
	}
	writeDigests(sl.arena.data, sl.plan, sl.generation, all)
	s.arenas.keep(sl.arena, k)
}

// source returns the bytes of items in an arena.
func source(data []byte, at map[string]Span, rank int, items []checkpoint.Item) (src slotSource, err error) {
	for _, it := range items {
		at, ok := at[Key(it)]
		if !ok || at.Size != it.Bytes {
			return nil, fmt.Errorf("rank %d has not staged %q %v, which the global plan wants of it", rank, it.Shard.FQN, it.Shard.Box)
		}
		src = append(src, data[at.Offset:at.Offset+at.Size])
	}
	return src, nil
}

// written frees a slot whose writer is done.
func (s *Slots) written(sl *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release(sl)
	if s.closed {
		s.arenas.Give(sl.arena)
		sl.arena = nil
	}
}

// release frees a slot whose worker is done with it. The caller holds the lock.
func (s *Slots) release(sl *slot) {
	sl.phase, sl.checkpoint, sl.plan, sl.doomed = free, "", nil, false
	s.trim(sl)
	s.tell()
}

// drop frees a slot into which a worker may still be copying. Its memory is not
// used again. The caller holds the lock.
func (s *Slots) drop(sl *slot) {
	if sl.arena != nil {
		_ = s.arenas.Drop(sl.arena) // a file that cannot be removed stays until the job ends
		sl.arena = nil
	}
	s.release(sl)
}

// Abort frees the slots of a save that will not be written, for all or some
// ranks. A slot that is being written is freed by its writer.
func (s *Slots) Abort(checkpoint string, ranks ...int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(ranks) == 0 {
		s.arenas.forget(checkpoint)
	}
	for rank, slots := range s.ranks {
		if len(ranks) > 0 && !slices.Contains(ranks, rank) {
			continue
		}
		for _, sl := range slots {
			switch {
			case sl.checkpoint != checkpoint || sl.phase == free || sl.phase == writing:
			case sl.phase == copying && sl.making:
				sl.doomed = true // the goroutine that makes it drops it
			case sl.phase == copying:
				size := int64(len(sl.arena.data))
				s.drop(sl)
				s.makeAhead(rank, size)
			default: // reserved, or sealed: the worker's copy is complete
				s.release(sl)
			}
		}
	}
}

// slotSource holds the bytes of a rank's items, in the order of its write plan.
type slotSource [][]byte

// Item implements data.Source.
func (s slotSource) Item(i int) ([]byte, error) { return s[i], nil }

// Lasts implements [data.Lasting]: a slot stays sealed until it is written.
func (slotSource) Lasts() {}

var _ data.Lasting = slotSource{}

const digestsFixed = 16 // bytes before the digests of a slot

// digestsSize returns the space in bytes for the digests of that many items.
func digestsSize(items int) int64 { return digestsFixed + int64(items)*int64(len(checkpoint.Digest{})) }

// digests returns the offset of the digests of a slot.
func (p *Layout) digests() int64 { return p.data - digestsSize(len(p.offsets)) }

// writeDigests writes the digests of a slot's items, in order. A slot whose write
// is interrupted has none.
func writeDigests(data []byte, p *Layout, generation uint64, digests []checkpoint.Digest) {
	b := data[p.digests():p.data]
	le := binary.LittleEndian
	le.PutUint64(b, 0)
	le.PutUint32(b[12:], uint32(len(digests)))
	for i, d := range digests {
		copy(b[digestsFixed+i*len(d):], d[:])
	}
	le.PutUint32(b[8:], digestsSum(b, generation))
	le.PutUint64(b, generation)
}

func digestsSum(b []byte, generation uint64) uint32 {
	var g [8]byte
	binary.LittleEndian.PutUint64(g[:], generation)
	return crc32.Update(crc32.Checksum(g[:], castagnoli), castagnoli, b[12:])
}

// readDigests returns the digests of a generation, which are at the end of
// between, the bytes between the description and the data. It returns nil if
// there are none; the reader then computes them from the bytes.
func readDigests(between []byte, generation uint64, items int) []checkpoint.Digest {
	at := int64(len(between)) - digestsSize(items)
	if at < 0 {
		return nil
	}
	b, le := between[at:], binary.LittleEndian
	if generation == 0 || le.Uint64(b) != generation || le.Uint32(b[12:]) != uint32(items) || le.Uint32(b[8:]) != digestsSum(b, generation) {
		return nil
	}
	out := make([]checkpoint.Digest, items)
	for i := range out {
		copy(out[i][:], b[digestsFixed+i*len(out[i]):])
	}
	return out
}
