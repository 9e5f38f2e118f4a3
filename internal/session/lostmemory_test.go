package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// notes is a log that keeps the facts it gets.
type notes struct {
	Log
	facts []events.Fact
}

func (n *notes) Append(_ context.Context, facts ...events.Fact) ([]uint64, error) {
	n.facts = append(n.facts, facts...)
	return make([]uint64, len(facts)), nil
}

// The memory of a rank is lost before the saver reads that rank's plans: a save that is open then
// fails as one whose plan was read earlier, because no process will write it.
func TestMemoryLostBeforeThePlan(t *testing.T) {
	t.Parallel()
	log := &notes{}
	w := &eventWriter{log: log, run: "run", trial: "main", source: "test", node: events.Node(0), now: time.Now, newID: func() string { return fmt.Sprint("id", len(log.facts)) }}
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 2, Timeout: time.Hour})
	s := newSaver(&decisionLog{eventWriter: w, attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	reads := func(id string, rank, attempt int) {
		t.Helper()
		f, err := events.NewFact(events.Stamp{ID: id, Source: "test", Time: time.Unix(1, 0)}, events.Scope{Run: "run", Trial: "main", Actor: events.Rank(rank)},
			&events.LocalPlan{Attempt: attempt, Checkpoint: id, Name: "x", Rank: rank, Fingerprint: "00"})
		if err == nil {
			err = s.apply(t.Context(), events.Recorded{Event: f.Event, Sequence: uint64(11 + len(id))})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	reads("early.a1", 1, 1)
	if err := s.lose(t.Context(), []int{1}, errors.New("node 1 is lost")); err != nil {
		t.Fatal(err)
	}
	s.move("over.a1", client.WaitReply{State: client.Aborted})
	reads("late.a1", 0, 1) // of another node
	reads("late.a1", 1, 1)
	reads("over.a1", 1, 1)
	reads("other.a2", 1, 2)
	var failed []string
	for _, f := range log.facts {
		body, err := f.Body()
		if err != nil {
			t.Fatal(err)
		}
		if b, ok := body.(*events.WriteFailed); ok && b.Rank == 1 && strings.Contains(b.Error, "node 1 is lost") {
			failed = append(failed, b.Checkpoint)
		} else {
			t.Errorf("recorded %+v", body)
		}
	}
	if want := []string{"early.a1", "late.a1"}; !slices.Equal(failed, want) {
		t.Errorf("failed saves %q, want %q", failed, want)
	}
}
