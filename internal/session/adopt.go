package session

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// adopted holds the open saves of a dead trainer that this trainer finishes:
// every participant had sealed its slot. Slots are matched with the log by
// checkpoint, rank and the fingerprint of the rank's plan; the slot holds the
// plan in full.
type adopted struct {
	saves []string // IDs
	slots map[rankSave]*staging.Left
	plans []*events.LocalPlan // in full
	log   *slog.Logger
}

// adopt finds the saves of an attempt with a dead trainer that can be finished.
// It appends the plans and seals that the dead trainer had accepted but not yet
// appended.
func (j *Job) adopt(ctx context.Context, attempt, world int, from uint64) (*adopted, error) {
	a := &adopted{slots: map[rankSave]*staging.Left{}, log: j.log}
	if j.arenas == nil {
		return a, nil
	}
	for _, s := range j.arenas.Sealed(attempt, j.log) {
		a.slots[rankSave{s.Checkpoint, s.Rank}] = s
	}
	if len(a.slots) == 0 {
		return a, nil
	}
	found, err := j.leftOpen(ctx, attempt, from)
	if err != nil {
		a.close()
		return nil, err
	}
	for _, open := range found {
		if !open.matches(a, world) {
			continue
		}
		if err := j.recordLeft(ctx, a, open); err != nil {
			a.close()
			return nil, err
		}
		a.saves = append(a.saves, open.begun.Checkpoint)
		j.log.Warn("adopted staged save of a dead trainer", "checkpoint", open.begun.Checkpoint)
	}
	return a, nil
}

// openSave is the log's record of a save that has not ended.
type openSave struct {
	begun   *events.CheckpointBegun
	planned map[int]string // fingerprints of the ranks
	sealed  map[int]int64  // bytes
	written map[int]bool
}

// leftOpen reads the open saves of an attempt that have begun, in order.
func (j *Job) leftOpen(ctx context.Context, attempt int, from uint64) (open []*openSave, err error) {
	end, err := j.store.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	left := newLeftSaves(attempt)
	for r, err := range j.store.Log.ReadTrial(ctx, events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}, from, end) {
		if err != nil {
			return nil, err
		}
		body, err := r.Body()
		if err != nil {
			return nil, err
		}
		left.fold(body)
	}
	return left.open, nil
}

// leftSaves folds the events of an attempt. It keeps nothing of a save that has ended: a long attempt has many.
type leftSaves struct {
	attempt int
	saves   map[string]*openSave // by ID, also those that have not begun
	sets    map[string][]byte    // fingerprints, by digest
	open    []*openSave          // that have begun, in order
}

func newLeftSaves(attempt int) *leftSaves {
	return &leftSaves{attempt: attempt, saves: map[string]*openSave{}, sets: map[string][]byte{}}
}

// of returns what is known of a save.
func (l *leftSaves) of(id string) *openSave {
	if l.saves[id] == nil {
		l.saves[id] = &openSave{planned: map[int]string{}, sealed: map[int]int64{}, written: map[int]bool{}}
	}
	return l.saves[id]
}

func (l *leftSaves) fold(body events.Body) {
	switch b := body.(type) {
	case *events.LocalPlan:
		l.of(b.Checkpoint).planned[b.Rank] = b.Fingerprint
	case *events.NodePlan:
		all := b.Fingerprints
		if b.Digest == "" {
			l.sets[checkpoint.Sum(all).String()] = all
		} else if all = l.sets[b.Digest]; len(all) != len(events.RanksIn(b.Ranks))*len(checkpoint.Digest{}) {
			return // as if these had no plan
		}
		for p := range b.Each(all) {
			l.of(p.Checkpoint).planned[p.Rank] = p.Fingerprint
		}
	case *events.CheckpointBegun:
		if b.Attempt == l.attempt {
			l.of(b.Checkpoint).begun = b
			l.open = append(l.open, l.of(b.Checkpoint))
		}
	case *events.WriteSealed:
		l.of(b.Checkpoint).sealed[b.Rank] = b.Bytes
	case *events.NodeSeal:
		for sealed := range b.Each() {
			l.of(b.Checkpoint).sealed[sealed.Rank] = sealed.Bytes
		}
	case *events.WriteCompleted:
		l.of(b.Checkpoint).written[b.Rank] = true
	case *events.NodeWrite:
		for _, rank := range events.RanksIn(b.Ranks) {
			l.of(b.Checkpoint).written[rank] = true
		}
	}
	if id := ends(body); id != "" {
		l.open = slices.DeleteFunc(l.open, func(o *openSave) bool { return o == l.saves[id] })
		delete(l.saves, id)
	}
}

// matches reports whether the bytes of all participants are available: in files,
// or in a slot that agrees with the plan and the seal in the log, if the log has
// them.
func (o *openSave) matches(a *adopted, world int) bool {
	participants := o.begun.All()
	prints := planner.Fingerprints(world, participants)
	for _, rank := range participants {
		if _, sealed := o.sealed[rank]; sealed && o.written[rank] {
			continue
		}
		s, ok := a.slots[rankSave{o.begun.Checkpoint, rank}]
		if !ok || s.Local.Rank != rank {
			return false
		}
		own := prints(s.Local)
		said, planned := o.planned[rank]
		bytes, sealed := o.sealed[rank]
		if own != s.Fingerprint || planned && said != own.String() || sealed && bytes != s.Bytes() {
			a.log.Warn("staging slot of a dead trainer does not match the log; freed", "checkpoint", o.begun.Checkpoint, "rank", rank)
			return false
		}
	}
	return true
}

// recordLeft appends the plans and seals that did not reach the log.
func (j *Job) recordLeft(ctx context.Context, a *adopted, o *openSave) error {
	for _, rank := range o.begun.All() {
		s, ok := a.slots[rankSave{o.begun.Checkpoint, rank}]
		if !ok {
			continue
		}
		full := &events.LocalPlan{
			Attempt: s.Attempt, Checkpoint: s.Checkpoint, Name: o.begun.Name, Step: o.begun.Step, Rank: rank,
			Participants: o.begun.Participants, Fingerprint: s.Fingerprint.String(), Plan: events.InlineBlob(s.Plan),
		}
		a.plans = append(a.plans, full)
		var facts []events.Body
		if _, planned := o.planned[rank]; !planned {
			said := *full
			var err error
			if said.Plan, err = j.store.Blobs.Put(ctx, s.Plan); err != nil {
				return err
			}
			facts = append(facts, &said)
		}
		if _, sealed := o.sealed[rank]; !sealed {
			facts = append(facts, &events.WriteSealed{Attempt: s.Attempt, Checkpoint: s.Checkpoint, Rank: rank, Bytes: s.Bytes()})
		}
		if len(facts) == 0 {
			continue
		}
		if err := j.writer.recordAs(ctx, j.cfg.Trial, events.Rank(rank), facts...); err != nil {
			return fmt.Errorf("record the seal of rank %d for %s: %w", rank, s.Checkpoint, err)
		}
	}
	return nil
}

// serve lets a saver write from the slots and look up their plans.
func (a *adopted) serve(s *saver) {
	for _, p := range a.plans {
		s.keep(p)
	}
	s.put = func(ctx context.Context, c planner.Write) (data.Written, error) {
		slot, ok := a.slots[rankSave{c.Checkpoint, c.Rank}]
		if !ok {
			return data.Written{}, fmt.Errorf("the staged bytes of rank %d for %s are gone", c.Rank, c.Checkpoint)
		}
		src, err := slot.Source(c.Items)
		if err != nil {
			return data.Written{}, err
		}
		return s.writeFrom(ctx, c, src)
	}
}

// close unmaps the slots.
func (a *adopted) close() {
	for _, s := range a.slots {
		s.Close()
	}
	a.slots = nil
}
