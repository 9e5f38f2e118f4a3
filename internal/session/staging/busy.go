package staging

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
