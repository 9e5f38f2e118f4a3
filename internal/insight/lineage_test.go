package insight

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// TestLineage: the tree of forks around a trial, from its root, and what of a large one is listed.
func TestLineage(t *testing.T) {
	trial := func(run string, from string) projections.Trial {
		out := projections.Trial{Run: run, Name: "main", Status: projections.Completed}
		if from != "" {
			out.Parent = &events.TrialParent{Run: from, Trial: "main", Checkpoint: "step-1.a1"}
		}
		return out
	}
	text := func(l Lineage) string {
		var out []string
		for _, r := range l.Trials {
			out = append(out, fmt.Sprint(r.Depth, r.Run))
		}
		return strings.Join(out, " ")
	}
	tree := []projections.Trial{trial("c", "a"), trial("root", ""), trial("b", "root"), trial("a", "root"), trial("d", "c"), trial("alone", ""), trial("orphan", "gone")}
	for of, want := range map[string]string{
		"root": "0root 1a 2c 3d 1b", "d": "0root 1a 2c 3d 1b", "alone": "0alone", "orphan": "0gone 1orphan", "gone": "0gone 1orphan", "nothing": "0nothing",
	} {
		got := LineageOf(tree, of, "main")
		if text(got) != want || got.Omitted != 0 || got.Run != of {
			t.Errorf("%s: %s, want %s; %+v", of, text(got), want, got)
		}
	}
	got := LineageOf(tree, "a", "main").Trials
	if got[1].Parent != "root@step-1.a1" || got[1].Status != "completed" || got[0].Parent != "" {
		t.Errorf("%+v", got)
	}
	if got := LineageOf(tree, "orphan", "main").Trials; got[0].Status != "" || got[1].Status == "" {
		t.Errorf("a parent that the store does not have: %+v", got)
	}

	// Of many forks, the trial and those it descends from are among the listed ones.
	many := []projections.Trial{trial("root", ""), trial("z", "root"), trial("zz", "z")}
	for i := range 1000 {
		many = append(many, trial(fmt.Sprintf("fork-%04d", i), "root"))
	}
	large := LineageOf(many, "zz", "main")
	if n := len(large.Trials); n != mostRelatives || large.Omitted != 1003-mostRelatives || !strings.HasSuffix(text(large), " 1z 2zz") {
		t.Errorf("%d listed, %d omitted: %s", n, large.Omitted, text(large))
	}

	// Whatever a log has, the answer ends.
	ring := LineageOf([]projections.Trial{trial("x", "y"), trial("y", "x")}, "x", "main")
	if len(ring.Trials) != 2 {
		t.Errorf("a ring: %s", text(ring))
	}
}
