package session

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// partSaver is the saver of a node that does not coordinate.
func partSaver(local ...int) *saver {
	w := &eventWriter{run: "run", trial: "main", source: "test", node: events.Node(1), now: time.Now, newID: func() string { return "id" }}
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 2, Timeout: time.Hour, Part: true})
	s := newSaver(&decisionLog{eventWriter: w, attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	s.peer, s.local, s.feed = nopPeer{}, local, newFeed("main")
	return s
}

type nopPeer struct{ Peer }

func (nopPeer) Settled(string) {}

func (s *saver) hears(seq uint64, actor events.Actor, body events.Body) {
	f, err := events.NewFact(events.Stamp{ID: fmt.Sprint(seq), Source: "test", Time: time.Unix(1, 0)}, events.Scope{Run: "run", Trial: "main", Actor: actor}, body)
	if err != nil {
		panic(err)
	}
	s.feed.put(fed{event: events.Recorded{Event: f.Event, Sequence: seq}})
}

func (s *saver) decided(seq uint64, body events.Body) {
	d, err := events.NewDecision(events.Stamp{ID: fmt.Sprint(seq), Source: "test", Time: time.Unix(1, 0)}, events.Aggregate{Run: "run", Trial: "main"}, body)
	if err != nil {
		panic(err)
	}
	s.feed.put(fed{event: events.Recorded{Event: d.Event, Sequence: seq}})
}

// A part that drains does not end before it has folded what it has heard.
func TestPartDrainsWhatItHeard(t *testing.T) {
	early := 0
	const n = 300
	synctest.Test(t, func(t *testing.T) {
		for range n {
			s := partSaver(1)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- s.run(ctx, 10, 10) }()
			synctest.Wait()
			s.hears(11, events.Rank(1), &events.LocalPlan{Attempt: 1, Checkpoint: "x.a1", Name: "x", Rank: 1, Fingerprint: "00"})
			s.hears(12, events.Rank(1), &events.WriteSealed{Attempt: 1, Checkpoint: "x.a1", Rank: 1})
			g := &Group{Attempt: Attempt{Peer: nopPeer{}, Started: 10}, saver: s, saved: make(chan error), log: s.log, cfg: Config{DrainTimeout: time.Millisecond}}
			_, _ = g.Drain(ctx, "drained")
			synctest.Wait()
			select {
			case err := <-done:
				if err == nil {
					early++
				}
			default:
			}
			stop()
		}
	})
	if early > 0 {
		t.Errorf("in %d of %d drains the saver ended before it had folded the plan and the seal of its rank", early, n)
	}
}

// A rank that waits for a commit hears of it, although the part is closed right after it.
func TestCommitThenClose(t *testing.T) {
	failed := 0
	const n = 200
	for range n {
		s := partSaver(1)
		g := &Group{saver: s}
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = s.run(ctx, 10, 10) }()
		s.hears(11, events.Rank(1), &events.LocalPlan{Attempt: 1, Checkpoint: "x.a1", Name: "x", Rank: 1, Fingerprint: "00"})
		s.decided(12, &events.CheckpointBegun{Attempt: 1, Checkpoint: "x.a1", Name: "x", WorldSize: 2})
		got := make(chan error, 1)
		go func() {
			now, err := s.wait(t.Context(), "x.a1", 1, client.Committed)
			if err == nil && now.State != client.Committed {
				err = fmt.Errorf("state %s", now.State)
			}
			got <- err
		}()
		<-time.After(2 * time.Millisecond)
		s.decided(13, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "x.a1"}) // Heard
		g.Fold(ctx)                                                                // the part is closed
		stop()
		if err := <-got; err != nil {
			failed++
		}
	}
	if failed > 0 {
		t.Errorf("in %d of %d sessions a rank got an error for a save whose commit its node had heard", failed, n)
	}
}

// A part whose save the coordinating process has dropped without an event drains until it is
// closed.
func TestPartDrainsUntilClosed(t *testing.T) {
	s := partSaver(1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() { _ = s.run(ctx, 10, 10) }()
	s.hears(11, events.Rank(1), &events.LocalPlan{Attempt: 1, Checkpoint: "x.a1", Name: "x", Rank: 1, Fingerprint: "00"})
	<-time.After(50 * time.Millisecond)
	closed := make(chan struct{})
	g := &Group{Attempt: Attempt{Peer: nopPeer{}, Closed: closed}, saver: s, saved: make(chan error), log: s.log, cfg: Config{DrainTimeout: time.Hour}}
	time.AfterFunc(50*time.Millisecond, func() { close(closed) })
	if ended, err := g.Drain(ctx, "drained"); ended || err != nil {
		t.Errorf("drained: %t, %v", ended, err)
	}
}

// A node that settles saves that the coordinating process does not know adds nothing, and the files of a save
// that it knows are removed once all nodes have settled it.
func TestUnknownSaveSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group{saver: partSaver(0)}
		swept := map[string]int{}
		abort := func(checkpoint string) {
			g.saver.states[checkpoint] = client.WaitReply{State: client.Aborted}
			g.writers.Abort(checkpoint, func() { swept[checkpoint]++ })
			synctest.Wait()
		}
		g.writers.Expect(1, 2)
		g.Settled(1, "made-up")
		g.saver.states["x.a1"] = client.WaitReply{State: client.Begun}
		g.Settled(1, "x.a1") // before the abort is known here
		abort("x.a1")
		if swept["x.a1"] > 0 {
			t.Error("files are removed under a writer")
		}
		g.Settled(2, "x.a1")
		synctest.Wait()
		if swept["x.a1"] != 1 {
			t.Errorf("removed %d times", swept["x.a1"])
		}
		abort("made-up")
		g.Settled(2, "made-up")
		synctest.Wait()
		if swept["made-up"] > 0 {
			t.Error("node 1 counts as settled, for a save that was not known then")
		}
		g.writers.Close()
	})
}
