package session

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// A slot belongs to the save in the log only if plan, size and participants are
// equal. A save is complete only if every rank has a slot or is written.
func TestSlotsMatchTheLog(t *testing.T) {
	const world, id = 4, "step-9.a2"
	participants := []int{1, 3}
	items := []checkpoint.Item{
		{Value: true, Bytes: 100, Shard: tensor.Shard{FQN: "config"}},
		{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "rng"}},
	}
	slots := map[rankSave]*staging.Left{}
	prints := map[int]string{}
	for _, rank := range participants {
		local := checkpoint.Local{Rank: rank, Items: items}
		fingerprint := planner.Fingerprint(local, world, participants)
		slots[rankSave{id, rank}] = &staging.Left{
			Header: staging.Header{
				Part:  staging.Part{Attempt: 2, Rank: rank, Fingerprint: fingerprint, Checkpoint: id},
				Spans: []staging.Span{{Offset: 4096, Size: 100}, {Offset: 4096 + 128, Size: 7}},
			},
			Local: local,
		}
		prints[rank] = fingerprint.String()
	}
	for _, c := range []struct {
		name    string
		change  func(a *adopted, o *openSave)
		matches bool
	}{
		{"whole", func(*adopted, *openSave) {}, true},
		{"not in the log yet", func(_ *adopted, o *openSave) { clear(o.planned); clear(o.sealed) }, true},
		{"another plan in the log", func(_ *adopted, o *openSave) { o.planned[3] = prints[1] }, false},
		{"another size in the log", func(_ *adopted, o *openSave) { o.sealed[3]++ }, false},
		{"other participants", func(_ *adopted, o *openSave) { o.begun.Participants = []int{1, 2, 3} }, false},
		{"a rank without a slot", func(a *adopted, _ *openSave) { delete(a.slots, rankSave{id, 3}) }, false},
		{"a rank without a slot that is written", func(a *adopted, o *openSave) {
			delete(a.slots, rankSave{id, 3})
			o.written[3] = true
		}, true},
		{"the slot of another rank", func(a *adopted, _ *openSave) { a.slots[rankSave{id, 3}] = a.slots[rankSave{id, 1}] }, false},
	} {
		a := &adopted{slots: map[rankSave]*staging.Left{}, log: slog.New(slog.DiscardHandler)}
		o := &openSave{
			begun:   &events.CheckpointBegun{Checkpoint: id, Participants: participants},
			planned: map[int]string{}, sealed: map[int]int64{}, written: map[int]bool{},
		}
		for _, rank := range participants {
			a.slots[rankSave{id, rank}], o.planned[rank], o.sealed[rank] = slots[rankSave{id, rank}], prints[rank], 107
		}
		c.change(a, o)
		if got := o.matches(a, world); got != c.matches {
			t.Errorf("%s: matches %t", c.name, got)
		}
	}
}

// The begin of a save by all ranks lists none of them: each must have its slot.
func TestSlotsOfASaveByAllRanks(t *testing.T) {
	const world, id = 3, "step-9.a2"
	a := &adopted{slots: map[rankSave]*staging.Left{}, log: slog.New(slog.DiscardHandler)}
	o := &openSave{
		begun:   &events.CheckpointBegun{Checkpoint: id, WorldSize: world},
		planned: map[int]string{}, sealed: map[int]int64{}, written: map[int]bool{},
	}
	for rank := range world {
		if o.matches(a, world) {
			t.Errorf("the save matches with the slots of %d of %d ranks", rank, world)
		}
		local := checkpoint.Local{Rank: rank}
		fingerprint := planner.Fingerprint(local, world, []int{0, 1, 2})
		o.planned[rank] = fingerprint.String()
		a.slots[rankSave{id, rank}] = &staging.Left{
			Header: staging.Header{Part: staging.Part{Attempt: 2, Rank: rank, Fingerprint: fingerprint, Checkpoint: id}}, Local: local,
		}
	}
	if !o.matches(a, world) {
		t.Error("the save does not match the slots of all ranks")
	}
}

// What is left open does not keep saves that have ended: an attempt may have a million.
func TestLeftSavesForgetEndedOnes(t *testing.T) {
	l := newLeftSaves(1)
	for n := range 100 {
		id := fmt.Sprintf("step-%d.a1", n)
		l.fold(&events.LocalPlan{Attempt: 1, Checkpoint: id, Rank: 0, Fingerprint: "00"})
		l.fold(&events.CheckpointBegun{Attempt: 1, Checkpoint: id, Participants: []int{0}})
		l.fold(&events.WriteSealed{Attempt: 1, Checkpoint: id, Rank: 0, Bytes: 1})
		switch n % 3 {
		case 0:
			l.fold(&events.CheckpointAborted{Attempt: 1, Checkpoint: id})
		case 1:
			l.fold(&events.CheckpointCommitted{Attempt: 1, Checkpoint: id})
		}
	}
	if len(l.open) != 33 || len(l.saves) != 33 || l.open[0].begun.Checkpoint != "step-2.a1" {
		t.Errorf("%d open saves of %d that are known", len(l.open), len(l.saves))
	}
}
