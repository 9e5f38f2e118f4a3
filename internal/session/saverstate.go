package session

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// The saves' states in the log, and the callers that wait for them.

// asked marks a save as the attempt's newest: the save that the log began last,
// or that a rank was allowed to copy.
func (s *saver) asked(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.states[id].State == "" && !s.known[id] {
		s.known[id], s.newest = true, id
	}
}

// last returns the newest save of the attempt.
func (s *saver) last() (l LastSave) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.Checkpoint = s.newest
	if _, begun := s.states[s.newest]; begun {
		return l
	}
	least := -1
	for who, why := range s.refused {
		if who.checkpoint == s.newest && (least < 0 || who.rank < least) {
			least, l.Unbegun = who.rank, fmt.Sprintf("rank %d could not save: %s", who.rank, why)
		}
	}
	return l
}

// take records that the log has the plans of ranks. It refuses a plan for a save that has
// ended without it: the checkpoint with that ID is not that rank's. It wakes only callers
// that wait for these ranks, and returns those whose memory is lost.
func (s *saver) take(attempt int, id string, ranks ...int) (lost []rankSave) {
	if attempt != s.decisions.attempt {
		return nil
	}
	s.mu.Lock()
	over := order(s.states[id].State) >= order(client.Committed)
	part := s.part[id]
	if part == nil {
		part = map[int]bool{}
		s.part[id] = part
	}
	wake := false
	var late []int
	for _, rank := range ranks {
		who := rankSave{id, rank}
		if over && !s.serves(rank) {
			continue // its own process refuses it
		}
		if over && !part[rank] {
			late = append(late, rank)
			if s.refused[who] == "" {
				s.refused[who] = s.tooLate(id, rank)
			}
		}
		if !over && s.lostRanks[rank] != nil {
			lost = append(lost, who)
		}
		part[rank] = true
		wake = wake || s.waits[who] > 0 || over
	}
	if wake && s.moved != nil {
		close(s.moved)
		s.moved = make(chan struct{})
	}
	s.mu.Unlock()
	for _, rank := range late {
		s.slots.Abort(id, rank)
	}
	return lost
}

// tooLate returns why a plan has no part in a save that has ended. The caller holds the
// lock.
func (s *saver) tooLate(id string, rank int) string {
	if now := s.states[id]; now.State != client.Committed {
		return now.Reason
	}
	return fmt.Sprintf("rank %d was late: other ranks had committed it; ranks that save one name must all name the same participants", rank)
}

// has reports whether the log has the plan of a rank for a save.
func (s *saver) has(id string, rank int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.part[id][rank]
}

// disagree warns of replicas that differ.
func (s *saver) disagree(b *events.GlobalPlan) {
	for _, d := range b.Disagreements {
		s.log.Warn("replicas differ between ranks; one rank's bytes are saved", "checkpoint", b.Checkpoint,
			"fqn", d.FQN, "offsets", d.Offsets, "sizes", d.Sizes, "saved", d.Kept, "differ", d.Ranks)
	}
	if b.MoreDisagreements > 0 {
		s.log.Warn("more replicas differ", "checkpoint", b.Checkpoint, "count", b.MoreDisagreements)
	}
}

func (s *saver) move(id string, state client.WaitReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if order(s.states[id].State) >= order(client.Committed) {
		return
	}
	state.NoRoom = state.State == client.Aborted && s.noRoom[id]
	s.states[id] = state
	if order(state.State) >= order(client.Committed) {
		delete(s.known, id)
		if w, ok := s.underWay[id]; ok {
			w.stop()
			delete(s.underWay, id)
		}
		maps.DeleteFunc(s.plans, func(p rankSave, _ *events.LocalPlan) bool { return p.checkpoint == id })
		if u := s.uses[id]; u != nil {
			u.Stop()
			delete(s.uses, id)
		}
		s.joined.Forget(id)
		s.held.End(id)
		s.heirs.End(id)
		s.part[id] = s.localPart(id)
	}
	close(s.moved)
	s.moved = make(chan struct{})
}

// localPart returns the local ranks whose plan of a save has been read. The caller holds the
// lock.
func (s *saver) localPart(id string) map[int]bool {
	if s.local == nil {
		return s.part[id]
	}
	own := map[int]bool{}
	for _, rank := range s.local {
		if s.part[id][rank] {
			own[rank] = true
		}
	}
	return own
}

// state returns the state of a rank's save in the log so far.
func (s *saver) state(id string, rank int) client.WaitReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why, ok := s.refused[rankSave{id, rank}]; ok {
		return client.WaitReply{State: client.Aborted, Reason: why, NoRoom: s.noRoom[id]}
	}
	return s.states[id]
}

func order(state string) int {
	return slices.Index([]string{"", client.Begun, client.Staged, client.Committed, client.Aborted}, state)
}

// wait blocks until a rank's save has reached a state or was aborted.
func (s *saver) wait(ctx context.Context, id string, rank int, state string) (client.WaitReply, error) {
	who := rankSave{id, rank}
	s.mu.Lock()
	s.waits[who]++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.waits[who]--; s.waits[who] == 0 {
			delete(s.waits, who)
		}
	}()
	for {
		s.mu.Lock()
		moved, err := s.moved, s.err
		s.mu.Unlock()
		// Until the rank's own plan is in the log, a checkpoint of that name may
		// be the other ranks' alone.
		now, own := s.state(id, rank), s.has(id, rank)
		if own && order(now.State) >= order(state) || now.State == client.Aborted {
			return now, nil
		}
		if err != nil {
			return client.WaitReply{}, err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return client.WaitReply{}, fmt.Errorf("wait for %s to be %s: %w", id, state, ctx.Err())
		}
	}
}
