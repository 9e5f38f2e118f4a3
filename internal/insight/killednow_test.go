package insight

import (
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// TestIfKilled checks what a kill costs, by who dies: saves that all ranks have sealed survive
// their trainer on one node only, written ones survive it on any.
func TestIfKilled(t *testing.T) {
	head := func(trained float64) *projections.Checkpoint {
		return &projections.Checkpoint{ID: "step-10.a1", Run: "r", Trial: "main", Step: 10, Trained: trained, BegunSeq: 5}
	}
	save := func(step int64, sealed, written int) projections.Checkpoint {
		return projections.Checkpoint{
			ID: fmt.Sprintf("step-%d.a1", step), Run: "r", Trial: "main", Step: step, Attempt: 1, WorldSize: 4,
			Sealed: sealed, Writes: written, Trained: float64(step), BegunSeq: uint64(step),
		}
	}
	at := func(step int64) *int64 { return &step }
	for name, c := range map[string]struct {
		s       projections.Standing
		trial   projections.Trial
		resume  string
		steps   int64 // -1: unknown
		seconds float64
		fates   []string
		without string // what the death of the trainer leaves; empty: the same
		text    string
	}{
		"no checkpoint": {
			s: projections.Standing{Step: at(30)}, resume: "", steps: 30, seconds: 40,
			text: "killed now: the next attempt starts afresh and repeats 30 steps and 40s of training",
		},
		"nothing reported": {
			s: projections.Standing{Head: head(10)}, trial: projections.Trial{Head: "step-10.a1"}, resume: "step-10.a1", steps: -1, seconds: 30,
			text: "killed now: the next attempt resumes from step-10.a1 and repeats 30s of training",
		},
		"partly sealed": {
			s:     projections.Standing{Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(20, 3, 2)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-10.a1", steps: 20, seconds: 30, fates: []string{"lost []"},
		},
		"sealed on one node": {
			s:     projections.Standing{Nodes: 1, Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(20, 4, 3)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-20.a1", steps: 10, seconds: 20, fates: []string{"finished [workers trainer]"},
		},
		"sealed on two nodes": {
			s:     projections.Standing{Nodes: 2, Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(20, 4, 3)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-20.a1", steps: 10, seconds: 20, fates: []string{"finished [workers]"}, without: "step-10.a1",
			text: "killed now: the next attempt resumes from step-20.a1 and repeats 10 steps and 20s of training; the save of step-20.a1, sealed by 4 of 4 ranks, is finished unless its machine fails; " +
				"killed with its trainer: the next attempt resumes from step-10.a1 and repeats 20 steps and 30s of training; the save of step-20.a1, sealed by 4 of 4 ranks, is lost",
		},
		"written on two nodes": {
			s:     projections.Standing{Nodes: 2, Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(20, 4, 4)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-20.a1", steps: 10, seconds: 20, fates: []string{"finished [workers trainer node]"},
		},
		"two saves in flight, the older one sealed": {
			s:     projections.Standing{Nodes: 1, Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(25, 1, 0), save(20, 4, 0)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-20.a1", steps: 10, seconds: 20, fates: []string{"lost []", "finished [workers trainer]"},
		},
		"a sealed save that began before the head": {
			s:     projections.Standing{Nodes: 1, Head: head(10), Step: at(30), Open: []projections.Checkpoint{save(4, 4, 0)}},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-10.a1", steps: 20, seconds: 30, fates: []string{"finished [workers trainer]"},
		},
		"the head is of another run": {
			s: projections.Standing{
				Step: at(30), Head: &projections.Checkpoint{ID: "step-7.a2", Run: "parent", Trial: "main", Step: 7, Trained: 1000},
			},
			trial:  projections.Trial{Head: "parent@step-7.a2", Parent: &events.TrialParent{Run: "parent", Trial: "main", Checkpoint: "step-7.a2"}},
			resume: "parent@step-7.a2", steps: 23, seconds: 40,
		},
		"reports behind the checkpoint": {
			s:     projections.Standing{Head: head(50), Step: at(9)},
			trial: projections.Trial{Head: "step-10.a1"}, resume: "step-10.a1", steps: 0, seconds: 0,
		},
	} {
		c.s.Trial, c.s.Usage = c.trial, projections.Usage{Kept: 40}
		c.s.Trial.Run, c.s.Trial.Name, c.s.Trial.Attempt = "r", "main", 1
		got := IfKilled(c.s)
		steps := int64(-1)
		if got.Steps != nil {
			steps = *got.Steps
		}
		var fates []string
		for _, s := range got.Saves {
			fates = append(fates, fmt.Sprint(s.Fate, " ", s.Survives))
		}
		without := ""
		if got.Without != nil {
			without = got.Without.Resume
		}
		if got.Resume != c.resume || steps != c.steps || got.Seconds != c.seconds || !slices.Equal(fates, c.fates) || without != c.without {
			t.Errorf("%s: %+v, fates %q, without the trainer %q", name, got, fates, without)
		}
		if c.text != "" && got.Text != c.text {
			t.Errorf("%s:\n%s, want\n%s", name, got.Text, c.text)
		}
	}
}
