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
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/replica"
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

// A node whose slots have a copy, and which gets no answer, ends its writes and records nothing
// of them: its partner may write in its place soon.
func TestFenceEndsWrites(t *testing.T) {
	t.Parallel()
	log := &notes{}
	w := &eventWriter{log: log, run: "run", trial: "main", source: "test", node: events.Node(1), now: time.Now, newID: func() string { return "id" }}
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 2, Timeout: time.Hour, Part: true})
	s := newSaver(&decisionLog{eventWriter: w, attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	s.peer, s.local = nopPeer{}, []int{1}
	g := &Group{saver: s}
	if g.Fence() || s.fenced.Load() {
		t.Error("a node without a partner ends its writes")
	}
	s.replicas = &replicas{Replicas: &Replicas{To: []replica.Partner{{}}}}
	writing := make(chan struct{})
	s.put = func(ctx context.Context, _ planner.Write) (data.Written, error) {
		close(writing)
		<-ctx.Done()
		return data.Written{}, ctx.Err()
	}
	done := make(chan error)
	go func() { done <- s.write(t.Context(), planner.Write{Checkpoint: "x.a1", Rank: 1}) }()
	<-writing
	if !g.Fence() {
		t.Error("a node with a partner does not end its writes")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if s.whileOpen(t.Context(), "y.a1").Err() == nil {
		t.Error("another save can be written")
	}
	if len(log.facts) > 0 {
		t.Errorf("%d facts are recorded, such as %s", len(log.facts), log.facts[0].Kind)
	}
}

// Replicas that are held for a save are released when it ends without their write, and once.
func TestHeldReplicasAreReleased(t *testing.T) {
	t.Parallel()
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 2, Timeout: time.Hour, Part: true})
	s := newSaver(&decisionLog{attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	s.replicas = &replicas{adopted: map[rankSave]bool{}, held: map[rankSave]heldReplica{}}
	released := map[rankSave]int{}
	for _, of := range []rankSave{{"x.a1", 0}, {"x.a1", 1}, {"y.a1", 0}, {"z.a1", 0}} {
		s.replicas.adopted[of] = true
		s.replicas.held[of] = heldReplica{release: func() { released[of]++ }}
	}
	if begin, err := s.replicas.hold(1, "y.a1", AdoptedPart{}); begin || err != nil { // the order again
		t.Error(begin, err)
	}
	held, ok := s.replicas.take(rankSave{"x.a1", 0})
	if _, again := s.replicas.take(rankSave{"x.a1", 0}); !ok || again {
		t.Error("a replica is written", ok, again)
	}
	s.move("x.a1", client.WaitReply{State: client.Aborted})
	held.release()
	s.move("y.a1", client.WaitReply{State: client.Committed})
	for of, n := range map[rankSave]int{{"x.a1", 0}: 1, {"x.a1", 1}: 1, {"y.a1", 0}: 1, {"z.a1", 0}: 0} {
		if released[of] != n {
			t.Errorf("rank %d of %s is released %d times, want %d", of.rank, of.checkpoint, released[of], n)
		}
	}
	s.replicas.letGo("")
	if released[rankSave{"z.a1", 0}] != 1 {
		t.Error("the end of the group releases nothing")
	}
}

// Nodes are lost while the saver is busy: nothing waits for it, and it sees all of them.
func TestLossesDoNotWait(t *testing.T) {
	t.Parallel()
	l := newInbox[loss]()
	for node := range 3 {
		l.put(loss{node: node})
	}
	<-l.came
	if got := l.take(); len(got) != 3 || got[2].node != 2 {
		t.Errorf("%d nodes are lost: %v", len(got), got)
	}
	select {
	case <-l.came:
		t.Error("the saver wakes again")
	default:
	}
}
