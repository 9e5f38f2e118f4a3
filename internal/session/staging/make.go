package staging

import (
	"context"
	"fmt"
	"math"
)

// oldest returns the best fitting slot to take. It prefers slots without readers, then
// slots with memory, then slots without content, then the slot written first.
// So the newest checkpoint stays in memory as long as there is another slot. A slot
// whose memory is being allocated counts as having none: the allocation runs
// without the lock. The caller holds the lock.
func (s *Slots) oldest(slots []*slot, fit func(*slot) bool) (best *slot) {
	const read, unmade = 1 << 61, 1 << 60
	least := math.MaxInt
	for _, sl := range slots {
		if !fit(sl) {
			continue
		}
		age := unmade
		if !sl.making && sl.arena != nil {
			order, held := s.arenas.age(sl.arena)
			if age = order; held {
				age += read
			}
		}
		if age < least {
			best, least = sl, age
		}
	}
	return best
}

// make gives a slot that is marked as making an arena of the given size. The
// caller has released the slot's content.
func (s *Slots) make(ctx context.Context, rank int, sl *slot, size int64) (err error) {
	if sl.arena == nil {
		sl.arena, err = s.arenas.Take(ctx, rank, slotUse, size)
		return err
	}
	return sl.arena.grow(ctx, size, false)
}

// makeLater is make ahead of the slot's use: it keeps the slot's content, unless
// the memory has to grow.
func (s *Slots) makeLater(ctx context.Context, rank int, sl *slot, size int64) (err error) {
	if sl.arena == nil {
		sl.arena, err = s.arenas.takeAhead(ctx, rank, slotUse, size)
		return err
	}
	if !s.arenas.overwrite(sl.arena) {
		return nil // the save that takes the slot waits for the reader and grows it
	}
	return sl.arena.grow(ctx, size, true)
}

// makeAhead allocates the memory of a rank's free slots before they are needed:
// the first touch of memory takes several times as long as a copy. The caller
// holds the lock.
func (s *Slots) makeAhead(rank int, size int64) {
	for _, sl := range s.of(rank) {
		if s.closed || sl.making || sl.phase != free && sl.phase != reserved || sl.arena != nil && int64(len(sl.arena.data)) >= size {
			continue
		}
		sl.making = true
		s.making.Go(func() {
			err := s.makeLater(s.ahead, rank, sl, size)
			s.mu.Lock()
			defer s.mu.Unlock()
			sl.making = false
			if err != nil && s.ahead.Err() == nil {
				// The save that needs the slot gets its own error.
				s.cfg.Log.Warn("memory of a staging slot not allocated ahead", "rank", rank, "slot", sl.index, "error", err)
			}
			if err != nil && sl.arena != nil {
				_ = s.arenas.Drop(sl.arena) // a file that cannot be removed stays until the job ends
				sl.arena = nil
			}
			s.trim(sl)
			s.tell()
		})
	}
}

// Made waits until the memory of a rank's slots is allocated, as far as that can
// be done ahead, and returns the slots that have memory.
func (s *Slots) Made(ctx context.Context, rank int) ([]Grant, error) {
	for {
		s.mu.Lock()
		moved, making := s.moved, false
		var out []Grant
		for _, sl := range s.of(rank) {
			making = making || sl.making
			if !sl.making && sl.arena != nil {
				out = append(out, Grant{Index: sl.index, Path: sl.arena.path, Size: int64(len(sl.arena.data))})
			}
		}
		s.mu.Unlock()
		if !making {
			return out, nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the memory of rank %d's staging slots: %w", rank, ctx.Err())
		}
	}
}
