package staging

import (
	"log/slog"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// verdict is the decision for all participants of a save.
type verdict struct {
	skip  bool
	ranks map[int]bool // that have not asked
}

// unreserve frees the slot reserved for a rank's part of a save. The caller holds
// the lock.
func (s *Slots) unreserve(rank int, checkpoint string) {
	for _, sl := range s.ranks[rank] {
		if sl.checkpoint == checkpoint && sl.phase == reserved {
			sl.phase, sl.checkpoint = free, ""
			s.trim(sl)
		}
	}
}

// judge decides once for all participants of a save whether it gets its slots,
// and if so reserves one for each. The caller holds the lock.
func (s *Slots) judge(rank int, checkpoint string, participants []int) (skip bool) {
	v := s.verdicts[checkpoint]
	if v == nil {
		v = &verdict{ranks: map[int]bool{}}
		var kept []*slot
		for _, r := range participants {
			v.ranks[r] = true
			// A slot that a restore reads is free soon; the save waits for it.
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
// as /dev/shm, whose lock no live trainer holds. It returns their paths and total
// size in bytes. A save that a dead trainer had staged in one of them can then no
// longer be finished. The error names the directories that cannot be removed; the
// others are freed anyway.
func Free(shared, store string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories(storeName(store)+"-*"))
}

// FreeAll is [Free] for every store. It also removes the directories of dead
// agents, which carry no store's name.
func FreeAll(shared string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories("*"))
}

// sayFormer logs shared memory of a store that dead trainers of a former version
// left: their layout differs, so it cannot be taken over.
func sayFormer(shared, store string, log *slog.Logger) {
	left, bytes, err := shm.Former(shared, directories(storeName(store)+"-*"))
	if len(left) > 0 {
		log.Warn("shared memory of a former version not used; free it with `ckptstore gc --staging` of this store", "bytes", bytes, "directories", left)
	}
	if err != nil {
		log.Warn("scan for shared memory of former versions failed; `ckptstore gc --staging` frees it", "directory", shared, "error", err)
	}
}

// sayLeft logs shared memory of the same run that dead trainers left here as other nodes. The trainer of such a node
// may start again and use it, if nodes share a machine, so it is not freed.
func sayLeft(shared, run string, log *slog.Logger) {
	left, bytes, err := shm.Left(shared, run+"-n")
	if len(left) > 0 {
		log.Warn("shared memory of this run is left by trainers that were killed here as other nodes; if none of them starts here again, free it with `ckptstore gc --staging` of this store",
			"bytes", bytes, "directories", left)
	}
	if err != nil {
		log.Warn("scan for shared memory of killed trainers failed; `ckptstore gc --staging` frees it", "directory", shared, "error", err)
	}
}

// directories is the pattern of the names of staging directories.
func directories(of string) string { return "ckptstore-" + of + "-n[0-9]*" }

// Spare frees the memory of free slots without readers, and reports whether there
// were any.
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

// trim frees a slot's memory if there is no longer memory for so many slots. The
// caller holds the lock.
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

// empty frees a slot's memory, if the slot is free and has no reader. The caller
// holds the lock.
func (s *Slots) empty(sl *slot) bool {
	if sl.phase != free || sl.making || sl.arena == nil || !s.arenas.overwrite(sl.arena) {
		return false
	}
	_ = s.arenas.empty(sl.arena) // a file that cannot be removed stays until the job ends
	sl.arena = nil
	s.tell()
	return true
}
