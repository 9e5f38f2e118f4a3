package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
)

// writes reports whether this process writes a rank in a save. The coordinating process
// writes all ranks of a save whose bytes are in files.
func (s *saver) writes(checkpoint string, rank int) bool {
	switch {
	case s.whole(checkpoint) != nil, s.held.Writes(checkpoint, rank):
		return true
	case !s.serves(rank):
		return false
	}
	return s.peer == nil || s.slots.Holds(checkpoint, rank)
}

// serves reports whether a rank is on this node.
func (s *saver) serves(rank int) bool { return s.local == nil || slices.Contains(s.local, rank) }

// execute runs a command of the coordinator, if it concerns this process: one process
// decides, and each writes and answers for its own ranks.
func (s *saver) execute(ctx context.Context, c planner.Command) error {
	switch c := c.(type) {
	case planner.Ask:
		if !s.serves(c.Rank) {
			if s.forward != nil {
				s.forward.Ask(c.Checkpoint, c.Rank)
			}
			return nil
		}
	case planner.Write:
		if !s.writes(c.Checkpoint, c.Rank) {
			return nil
		}
	case planner.Decide, planner.Publish, planner.Commit:
		if s.peer != nil {
			return s.askToAbort(ctx, c)
		}
	}
	switch c := c.(type) {
	case planner.Decide:
		if b, ok := c.Body.(*events.CheckpointBegun); ok {
			b.Bases = s.named(ctx, b.Checkpoint)
		}
		_, err := s.decisions.decide(ctx, c.Body)
		if errors.Is(err, errEnded) {
			return nil // the log holds the outcome; follow reads it
		}
		return err
	case planner.Publish:
		return s.publish(ctx, c.Body)
	case planner.Ask:
		return s.unsaid(ctx, s.decisions.attempt, c.Checkpoint, s.answer(ctx, c))
	case planner.Write:
		s.writing++
		s.fly(c.Checkpoint, 1)
		go func() {
			err := s.write(ctx, c)
			s.fly(c.Checkpoint, -1)
			s.written <- err
		}()
		return nil
	case planner.Commit:
		return s.commit(ctx, c)
	}
	return fmt.Errorf("unknown command %T", c)
}

func (s *saver) publish(ctx context.Context, body events.Body) error {
	if g, ok := body.(*events.GlobalPlan); ok {
		layout, err := checkpoint.DecodeLayout(g.Layout.Inline)
		if err != nil {
			return err
		}
		w := s.writer(s.store.Data.Writer(s.ref(g.Checkpoint)))
		if layout, err = w.PrepareGlobalPlan(ctx, layout); err != nil {
			if errors.Is(err, syscall.ENOSPC) {
				s.full(g.Checkpoint)
			}
			return s.abort(ctx, g.Attempt, g.Checkpoint, "commit: "+err.Error())
		}
		b, err := s.store.Blobs.Put(ctx, checkpoint.EncodeLayout(layout))
		if err != nil {
			return s.unsaid(ctx, g.Attempt, g.Checkpoint, err)
		}
		g.Layout = b
		return s.unsaid(ctx, g.Attempt, g.Checkpoint, s.decisions.record(ctx, g))
	}
	return s.decisions.record(ctx, body)
}

// keep stores the plan of a rank in full, until its save has ended.
func (s *saver) keep(p *events.LocalPlan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plans[rankSave{p.Checkpoint, p.Rank}] = p
}

// answer appends the full plan of a rank that was appended by its fingerprint
// only.
func (s *saver) answer(ctx context.Context, c planner.Ask) error {
	s.mu.Lock()
	p := s.plans[rankSave{c.Checkpoint, c.Rank}]
	s.mu.Unlock()
	if p == nil {
		return nil // the save has ended meanwhile, or belongs to another trainer and runs into its deadline
	}
	return s.recordPlan(ctx, p)
}

// recordPlan appends a rank's plan to the log.
func (s *saver) recordPlan(ctx context.Context, p *events.LocalPlan) error {
	said, err := s.claim(ctx, p)
	if err != nil {
		return err
	}
	return s.decisions.recordAs(ctx, s.decisions.trial, events.Rank(p.Rank), said)
}

// claim returns a rank's plan, with a claim check if the plan is too large for
// the log.
func (s *saver) claim(ctx context.Context, p *events.LocalPlan) (*events.LocalPlan, error) {
	if p.Plan.Size == 0 {
		return p, nil
	}
	said := *p
	var err error
	said.Plan, err = s.store.Blobs.Put(ctx, p.Plan.Inline)
	return &said, err
}

func (s *saver) ref(id string) checkpoint.Ref {
	return checkpoint.RefOf(s.decisions.run, s.decisions.trial, id)
}
