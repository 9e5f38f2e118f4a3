package planner

import (
	"fmt"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// save is one open save. The fields up to writes are folded from the log; the rest records
// the commands that were already issued.
type save struct {
	id           string
	name         string
	step         int64
	participants ranks
	first        int    // the rank whose plan opened it
	seq          uint64 // of its first event: saves are served in this order
	begun        bool
	staged       bool
	offers       map[int]offer // by rank
	unknown      []int         // ranks whose fingerprint was unknown on arrival
	shared       *Shared       // the layout, once it is in the log
	sealed       map[int]bool
	writes       map[int]checkpoint.Digest
	failure      *events.CheckpointAborted // why it must be aborted
	unreadable   string                    // why its global plan cannot be read
	over         bool                      // it is committed, aborted or forgotten

	// Derived from the fields above and from the exits.
	unsealed  int   // participants that are not in sealed
	unwritten int   // participants that are not in writes
	ready     []int // sealed participants that the last Tick with a layout had not seen
	judged    int   // number of exits that were checked: see [Coordinator.dead]
	changed   bool  // it is in [Coordinator.changed]

	deadline time.Time
	asked    map[string]bool
	written  map[int]bool // ranks for which Write was issued
}

// involve sets the participants.
func (s *save) involve(participants ranks) {
	s.participants, s.judged, s.ready = participants, 0, nil
	s.unsealed, s.unwritten = participants.distinct(), participants.distinct()
	for rank := range s.sealed {
		if participants.has(rank) {
			s.unsealed--
			s.ready = append(s.ready, rank)
		}
	}
	for rank := range s.writes {
		if participants.has(rank) {
			s.unwritten--
		}
	}
}

// seal records that a rank's bytes are complete, if it is a participant.
func (s *save) seal(rank int) {
	if s.participants.has(rank) && !s.sealed[rank] {
		s.sealed[rank] = true
		s.unsealed--
		s.ready = append(s.ready, rank)
	}
}

// completed folds a rank's write, if it is a participant.
func (s *save) completed(b *events.WriteCompleted) {
	if !s.participants.has(b.Rank) {
		return
	}
	index, err := checkpoint.ParseDigest(b.IndexDigest)
	if err != nil {
		s.fail(fmt.Sprintf("the write of rank %d has no index: %v", b.Rank, err), b.Rank)
		return
	}
	s.wrote(b.Rank, index)
}

// wrote records the index of a participant's file.
func (s *save) wrote(rank int, index checkpoint.Digest) {
	if _, again := s.writes[rank]; !again {
		s.unwritten--
	}
	s.writes[rank] = index
}

// judge finds a reason to abort: a rank that died unsealed (a sealed one may die, its bytes
// are in shared memory), a drain, or the clock.
func (c *Coordinator) judge(s *save, now time.Time) {
	if rank, dead := c.dead(s); dead {
		s.fail(c.exited[rank], rank)
	}
	late := !now.Before(s.deadline)
	switch {
	case s.failure != nil:
	case c.draining != "" && s.unsealed > 0:
		s.fail(c.draining, s.withoutSeal()...)
	case c.lost && s.unwritten > 0 && !slices.Contains(c.kept, s.id):
		s.fail(c.draining, s.withoutWrite()...)
	case late && s.unsealed > 0:
		s.fail("these ranks did not call save, or did not finish copying, within "+c.cfg.Timeout.String(), s.withoutSeal()...)
	case late && !s.complete():
		s.fail("the files of these ranks were not written within "+c.cfg.Timeout.String(), s.withoutWrite()...)
	}
}

// dead returns the first participant that died unsealed. It checks each exit once, because a
// rank that is sealed stays sealed, and a save with an unsealed dead rank fails.
func (c *Coordinator) dead(s *save) (rank int, dead bool) {
	var unsealed []int
	for _, rank := range c.exits[s.judged:] {
		if s.participants.has(rank) && !s.sealed[rank] {
			unsealed = append(unsealed, rank)
		}
	}
	s.judged = len(c.exits)
	if len(unsealed) == 0 {
		return 0, false
	}
	return s.participants.ordered(unsealed)[0], true
}

func (s *save) withoutSeal() (missing []int) {
	for _, rank := range s.participants.all() {
		if !s.sealed[rank] {
			missing = append(missing, rank)
		}
	}
	return missing
}

func (s *save) withoutWrite() (missing []int) {
	for _, rank := range s.participants.all() {
		if _, written := s.writes[rank]; !written {
			missing = append(missing, rank)
		}
	}
	return missing
}

// complete reports whether only decisions are missing.
func (s *save) complete() bool {
	n := s.participants.n
	return s.shared != nil && len(s.sealed) == n && len(s.writes) == n
}

// Sealed returns the fingerprint of a rank's plan in an open save if the log has the rank's
// seal and not its write: the rank's bytes are in memory only. The other participants may
// still be copying.
func (c *Coordinator) Sealed(id string, rank int) (fingerprint checkpoint.Digest, ok bool) {
	s := c.saves[id]
	if s == nil || !s.sealed[rank] || s.failure != nil {
		return fingerprint, false
	}
	if _, written := s.writes[rank]; written {
		return fingerprint, false
	}
	return s.offers[rank].known.Fingerprint, true
}

// Deadline returns when an open save is aborted unless it is complete; zero if it is not open, or has
// not been seen by [Coordinator.Tick].
func (c *Coordinator) Deadline(id string) (at time.Time) {
	if s := c.saves[id]; s != nil {
		at = s.deadline
	}
	return at
}

// Adopt makes this node write a rank's part of an open save, from a copy of its sealed bytes:
// the node of the rank is lost. In a part, which knows no seals of other nodes, the copy is the
// seal.
func (c *Coordinator) Adopt(id string, rank int) {
	s := c.change(id)
	switch {
	case s == nil:
		if c.cfg.Part && !c.ended[id] { // its begin is on the way, and no rank of this node takes part
			c.adopted[id] = append(c.adopted[id], rank)
		}
	case c.cfg.Part && !s.sealed[rank]:
		s.seal(rank)
	case s.sealed[rank]:
		delete(s.written, rank)
		s.ready = append(s.ready, rank)
	}
}

func (s *save) fail(reason string, ranks ...int) {
	if s.failure == nil {
		s.failure = &events.CheckpointAborted{Checkpoint: s.id, Reason: reason, Ranks: ranks}
	}
}

// wait inserts a save with a new deadline, which is the latest unless the clock went back.
func (c *Coordinator) wait(s *save) {
	at := len(c.waiting)
	for at > 0 && s.deadline.Before(c.waiting[at-1].deadline) {
		at--
	}
	c.waiting = slices.Insert(c.waiting, at, s)
}

// awaited removes the save with the earliest deadline from those that wait for it.
func (c *Coordinator) awaited() {
	c.waiting[0] = nil // frees the save
	c.waiting = c.waiting[1:]
}

// next returns the earliest deadline after now that can still end a save.
func (c *Coordinator) next(now time.Time) time.Time {
	for len(c.waiting) > 0 {
		s := c.waiting[0]
		if !s.over && s.failure == nil && !s.asked["commit"] && now.Before(s.deadline) {
			return s.deadline
		}
		c.awaited()
	}
	return time.Time{}
}
