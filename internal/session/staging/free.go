package staging

import (
	"log/slog"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// verdict is what was decided for all participants of a save.
type verdict struct {
	skip  bool
	ranks map[int]bool // that have not asked
}

// unreserve frees what is kept for a rank's part of a save. The caller holds
// the lock.
func (s *Slots) unreserve(rank int, checkpoint string) {
	for _, sl := range s.ranks[rank] {
		if sl.checkpoint == checkpoint && sl.phase == reserved {
			sl.phase, sl.checkpoint = free, ""
			s.trim(sl)
		}
	}
}

// judge decides once for all participants of a save whether it finds its
// slots, and if so keeps one for each. The caller holds the lock.
func (s *Slots) judge(rank int, checkpoint string, participants []int) (skip bool) {
	v := s.verdicts[checkpoint]
	if v == nil {
		v = &verdict{ranks: map[int]bool{}}
		var kept []*slot
		for _, r := range participants {
			v.ranks[r] = true
			// One that a restore reads is free soon, and waited for.
			if sl := s.oldest(s.of(r), func(sl *slot) bool { return sl.phase == free }); sl != nil {
				kept = append(kept, sl)
			}
		}
		v.skip = len(kept) < len(participants)
		if !v.skip {
			for _, sl := range kept {
				sl.phase, sl.checkpoint = reserved, checkpoint
			}
		}
		s.verdicts[checkpoint] = v
	}
	delete(v.ranks, rank)
	if len(v.ranks) == 0 {
		delete(s.verdicts, checkpoint)
	}
	return v.skip
}

// Free removes the staging directories of this user and one store in shared, such
// as /dev/shm, whose lock no living trainer holds. It returns their paths and the
// bytes of memory that they held. A save that a dead trainer had staged in one
// of them can then no longer be finished. A directory that cannot be removed is
// in the error; the others are freed all the same.
func Free(shared, store string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories(storeName(store)+"-*"))
}

// FreeAll is [Free] for every store. It also removes what dead agents left:
// their directories carry no store's name.
func FreeAll(shared string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories("*"))
}

// sayFormer logs what dead trainers of a former version have left of a store: its layout
// is another, so that nothing is taken over from it.
func sayFormer(shared, store string, log *slog.Logger) {
	left, bytes, err := shm.Former(shared, directories(storeName(store)+"-*"))
	if len(left) > 0 {
		log.Warn("shared memory of a former version is not used: free it by `ckptstore gc --staging` of this store", "bytes", bytes, "directories", left)
	}
	if err != nil {
		log.Warn("shared memory of former versions not looked at: `ckptstore gc --staging` frees what is there", "directory", shared, "error", err)
	}
}

// directories is the pattern of the names of staging directories.
func directories(of string) string { return "ckptstore-" + of + "-n[0-9]*" }

// Spare frees the memory of slots that are free and that nobody reads. It
// reports whether there were any.
func (s *Slots) Spare() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	some := false
	for _, slots := range s.ranks {
		for _, sl := range slots {
			some = s.empty(sl) || some
		}
	}
	return some
}

// trim frees a slot's memory if there is no memory for so many slots any more.
// The caller holds the lock.
func (s *Slots) trim(sl *slot) {
	if s.limit > 0 && sl.index >= s.limit {
		s.empty(sl)
	}
}

// trimRank is trim for all slots of a rank. The caller holds the lock.
func (s *Slots) trimRank(rank int) {
	for _, sl := range s.ranks[rank] {
		s.trim(sl)
	}
}

// empty frees a slot's memory, if the slot is free and nobody reads it. The
// caller holds the lock.
func (s *Slots) empty(sl *slot) bool {
	if sl.phase != free || sl.making || sl.arena == nil || !s.arenas.overwrite(sl.arena) {
		return false
	}
	_ = s.arenas.empty(sl.arena) // a file that cannot be removed stays until the job ends
	sl.arena = nil
	s.tell()
	return true
}
