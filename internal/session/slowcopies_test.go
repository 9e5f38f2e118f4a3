package session

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/stragglers"
	"github.com/ckptstore/ckptstore/planner"
)

// keptLog keeps the facts that are appended.
type keptLog struct {
	Log
	facts []events.Fact
}

// Append implements Log.
func (l *keptLog) Append(_ context.Context, facts ...events.Fact) ([]uint64, error) {
	l.facts = append(l.facts, facts...)
	return make([]uint64, len(facts)), nil
}

// A node whose ranks copy slowly in twenty saves is named in the log. An aborted save does not count.
func TestSlowCopies(t *testing.T) {
	t.Parallel()
	facts := slowCopies(t, 0)
	if len(facts) != 1 {
		t.Fatalf("%d facts after 20 saves", len(facts))
	}
	body, err := facts[0].Event.Body()
	if err != nil {
		t.Fatal(err)
	}
	if b := body.(*events.NodeSlow); b.Node != 6 || b.By != "copy" || b.Over || b.Of != 20 {
		t.Errorf("%+v", b)
	}
}

// A coordinator that takes a living group over does not name the node again.
func TestSlowCopiesReplayed(t *testing.T) {
	t.Parallel()
	if facts := slowCopies(t, math.MaxUint64); len(facts) > 0 {
		t.Errorf("%d facts about saves of an earlier coordinator", len(facts))
	}
}

// slowCopies folds saves in which a node copies slowly, and returns the facts that follow. An earlier
// coordinator has recorded those up to the sequence replayed.
func slowCopies(t *testing.T, replayed uint64) []events.Fact {
	t.Helper()
	log := &keptLog{}
	agg := events.Aggregate{Run: "run", Trial: "main"}
	w := &eventWriter{log: log, run: agg.Run, trial: agg.Trial, source: "test", node: events.Node(0), now: time.Now, newID: func() string { return "id" }}
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 4, Timeout: time.Hour})
	s := newSaver(&decisionLog{eventWriter: w, attempt: 1, agg: agg}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	s.settled, s.replayed = func(string, func()) {}, replayed // there are no files
	s.slow = stragglers.New("job", 1, [][]int{{0, 1}, {2, 3}}, func(place int) int { return 5 + place })
	seq := uint64(0)
	hear := func(e events.Event) {
		seq++
		if err := s.apply(t.Context(), events.Recorded{Event: e, Sequence: seq}); err != nil {
			t.Fatal(err)
		}
	}
	seals := func(id string, node, first int, seconds float64) {
		body := &events.NodeSeal{Attempt: 1, Checkpoint: id, Ranks: []events.RankRun{{First: first, Count: 2}}, Bytes: []int64{1 << 30}, Copied: []float64{seconds}}
		f, err := events.NewFact(w.stamp(), events.Scope{Run: "run", Trial: "main", Actor: events.Node(node)}, body)
		if err != nil {
			t.Fatal(err)
		}
		hear(f.Event)
	}
	decides := func(body events.Body) {
		d, err := events.NewDecision(w.stamp(), agg, body)
		if err != nil {
			t.Fatal(err)
		}
		hear(d.Event)
	}
	for n := range 25 {
		id := fmt.Sprintf("step-%d.a1", n)
		seals(id, 0, 0, 0.5)
		seals(id, 1, 2, 1)
		if n%5 == 4 {
			decides(&events.CheckpointAborted{Attempt: 1, Checkpoint: id, Reason: "the test"})
			continue
		}
		if n == 23 && len(log.facts) > 0 {
			t.Errorf("%d facts after 19 saves", len(log.facts))
		}
		decides(&events.CheckpointStaged{Attempt: 1, Checkpoint: id})
	}
	return log.facts
}
