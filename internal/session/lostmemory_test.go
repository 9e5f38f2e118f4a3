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
	s.replicas = &Replicas{To: []replica.Partner{{}}}
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

// A save that ends releases the replicas that are held for it.
func TestEndReleasesReplicas(t *testing.T) {
	t.Parallel()
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 2, Timeout: time.Hour, Part: true})
	s := newSaver(&decisionLog{attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	copies := copyOf{}
	s.held = replica.NewHeld(copies)
	for _, id := range []string{"x.a1", "y.a1", "z.a1"} {
		if begin, err := s.held.Hold(staging.Part{Attempt: 1, Checkpoint: id}); !begin || err != nil {
			t.Error(begin, err)
		}
	}
	s.move("x.a1", client.WaitReply{State: client.Aborted})
	s.move("y.a1", client.WaitReply{State: client.Committed})
	s.move("z.a1", client.WaitReply{State: client.Staged})
	if copies["x.a1"] != 1 || copies["y.a1"] != 1 || copies["z.a1"] != 0 {
		t.Errorf("released %v", copies)
	}
}

// copyOf has a replica of each part of attempt 1, and counts by save how often it is released.
type copyOf map[string]int

func (c copyOf) Hold(checkpoint string, rank int) (*staging.Replica, func(), error) {
	return &staging.Replica{Header: staging.Header{Part: staging.Part{Attempt: 1, Checkpoint: checkpoint, Rank: rank}}}, func() { c[checkpoint]++ }, nil
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
