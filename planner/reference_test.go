package planner

import (
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// ReferenceTick is [Coordinator.Tick] without counters and without a list of changed saves: it
// scans all ranks of all open saves.
func (c *Coordinator) ReferenceTick(now time.Time) (due []Command, next time.Time) {
	if c.fenced > 0 {
		return nil, time.Time{}
	}
	for _, s := range c.ordered() {
		if c.draining != "" && !s.begun && !s.asked["begin"] {
			c.end(s.id)
			continue
		}
		if s.asked["commit"] {
			continue
		}
		if s.deadline.IsZero() {
			s.deadline = now.Add(c.cfg.Timeout)
		}
		c.referenceJudge(s, now)
		due = append(due, c.referenceCommands(s)...)
		if s.failure == nil && !s.asked["commit"] && now.Before(s.deadline) && (next.IsZero() || s.deadline.Before(next)) {
			next = s.deadline
		}
	}
	return due, next
}

func (c *Coordinator) referenceJudge(s *save, now time.Time) {
	var unsealed, unwritten []int
	for _, rank := range s.participants.all() {
		if !s.sealed[rank] {
			unsealed = append(unsealed, rank)
		}
		if _, ok := s.writes[rank]; !ok {
			unwritten = append(unwritten, rank)
		}
	}
	for _, rank := range unsealed {
		if how, ok := c.exited[rank]; ok {
			s.fail(how, rank)
		}
	}
	n := len(s.participants.all())
	complete := s.shared != nil && len(s.sealed) == n && len(s.writes) == n
	switch {
	case s.failure != nil:
	case c.draining != "" && len(unsealed) > 0:
		s.fail(c.draining, unsealed...)
	case c.lost && len(unwritten) > 0 && !slices.Contains(c.kept, s.id):
		s.fail(c.draining, unwritten...)
	case !now.Before(s.deadline) && len(unsealed) > 0:
		s.fail("these ranks did not call save, or did not finish copying, within "+c.cfg.Timeout.String(), unsealed...)
	case !now.Before(s.deadline) && !complete:
		s.fail("the files of these ranks were not written within "+c.cfg.Timeout.String(), unwritten...)
	}
}

func (c *Coordinator) referenceCommands(s *save) (due []Command) {
	participants := s.participants.all()
	if !s.begun {
		if s.ask("begin") {
			due = append(due, Decide{&events.CheckpointBegun{
				Attempt: c.cfg.Attempt, Checkpoint: s.id, Name: s.name, Step: s.step, WorldSize: c.cfg.WorldSize,
				Participants: events.Listed(participants, c.cfg.WorldSize),
			}})
		}
		return due
	}
	if s.shared == nil && s.failure == nil && len(s.offers) == len(participants) && s.ask("global") {
		due = append(due, c.global(s)...)
	}
	if s.failure != nil {
		if s.ask("abort") {
			s.failure.Attempt = c.cfg.Attempt
			due = append(due, Decide{s.failure})
		}
		return due
	}
	due = append(due, c.ask(s)...)
	if s.shared != nil {
		for _, rank := range participants {
			_, done := s.writes[rank]
			if s.sealed[rank] && !done && !s.written[rank] {
				s.written[rank] = true
				due = append(due, Write{Checkpoint: s.id, Rank: rank, Items: s.shared.Shares.Items(rank)})
			}
		}
	}
	if len(s.sealed) == len(participants) && !s.staged && s.ask("stage") {
		due = append(due, Decide{&events.CheckpointStaged{Attempt: c.cfg.Attempt, Checkpoint: s.id}})
	}
	if s.staged && len(s.writes) == len(participants) && s.shared != nil && len(s.sealed) == len(participants) && s.ask("commit") {
		due = append(due, Commit{Manifest: c.manifest(s), Bytes: s.shared.Layout.Bytes()})
	}
	return due
}
