package staging

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
