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
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// decidedLog keeps the decisions that it gets.
type decidedLog struct {
	notes
	aborted []*events.CheckpointAborted
}

func (l *decidedLog) Decide(_ context.Context, d events.Decision, _ uint64) (uint64, error) {
	body, err := d.Body()
	if b, ok := body.(*events.CheckpointAborted); ok {
		l.aborted = append(l.aborted, b)
	}
	return uint64(100 + len(l.aborted)), err
}

// lostNode is a job of four nodes with a rank each, whose node 1 has sealed a save, as the coordinating
// process of node 0 sees it.
type lostNode struct {
	*saver
	t      *testing.T
	log    *decidedLog
	clock  time.Time
	asked  []string // orders: a place, and the ranks
	seq    uint64
	limits time.Duration // of the partners together
}

func newLostNode(t *testing.T, partners ...int) *lostNode {
	n := &lostNode{t: t, log: &decidedLog{}, clock: time.Unix(1000, 0), limits: time.Minute}
	w := &eventWriter{log: n.log, run: "run", trial: "main", source: "test", node: events.Node(0), now: time.Now, newID: func() string { n.seq++; return fmt.Sprint("id", n.seq) }}
	coord := planner.NewCoordinator(planner.CoordinatorConfig{Run: "run", Trial: "main", Attempt: 1, WorldSize: 4, Timeout: time.Hour})
	n.saver = newSaver(&decisionLog{eventWriter: w, attempt: 1, agg: events.Aggregate{Run: "run", Trial: "main"}}, Store{}, coord, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	n.now, n.local = func() time.Time { return n.clock }, []int{0}
	n.held = replica.NewHeld(replica.NewKeeper(nil, staging.Memory{}, slog.New(slog.DiscardHandler)))
	n.saver.heirs = heirs.NewFinder(heirs.Config{
		Partners: [][]int{1: partners, 4: nil}, Index: func(place int) int { return place }, Limit: n.limits, Saves: coord, Now: n.now,
	})
	n.saver.replicas = &Replicas{Order: func(place int, o heirs.Order) {
		for _, p := range o.Parts {
			n.asked = append(n.asked, fmt.Sprintf("%d:%d", place, p.Rank))
		}
	}}
	n.hears(1, &events.LocalPlan{Attempt: 1, Checkpoint: "x.a1", Name: "x", Rank: 1, Fingerprint: strings.Repeat("00", 32)})
	n.decided(&events.CheckpointBegun{Attempt: 1, Checkpoint: "x.a1", Name: "x", WorldSize: 4})
	n.hears(1, &events.WriteSealed{Attempt: 1, Checkpoint: "x.a1", Rank: 1})
	n.coord.Tick(n.clock)
	return n
}

func (n *lostNode) apply(e events.Event) {
	n.t.Helper()
	n.seq++
	if err := n.saver.apply(n.t.Context(), events.Recorded{Event: e, Sequence: n.seq}); err != nil {
		n.t.Fatal(err)
	}
}

// hears folds a fact of a node.
func (n *lostNode) hears(node int, body events.Body) {
	n.t.Helper()
	f, err := events.NewFact(n.decisions.stamp(), events.Scope{Run: "run", Trial: "main", Actor: events.Node(node)}, body)
	if err != nil {
		n.t.Fatal(err)
	}
	n.apply(f.Event)
}

func (n *lostNode) decided(body events.Body) {
	n.t.Helper()
	d, err := events.NewDecision(n.decisions.stamp(), n.decisions.agg, body)
	if err != nil {
		n.t.Fatal(err)
	}
	n.apply(d.Event)
}

func (n *lostNode) lose(place int) {
	n.t.Helper()
	if err := n.adoptFrom(n.t.Context(), loss{node: place, ranks: []int{place}, why: fmt.Errorf("node %d is lost", place)}); err != nil {
		n.t.Error(err)
	}
}

// answers gives the answer of a node: whether it writes the part.
func (n *lostNode) answers(place int, writes bool) {
	n.t.Helper()
	reply := heirs.Reply{Checkpoint: "x.a1"}
	if reply.Without, reply.Why = []int{1}, fmt.Sprint("none on ", place); writes {
		reply.Writes, reply.Without = reply.Without, nil
	}
	if err := n.heedReply(n.t.Context(), placedReply{reply, place}); err != nil {
		n.t.Error(err)
	}
}

// passes lets time pass.
func (n *lostNode) passes(d time.Duration) (next time.Time) {
	n.t.Helper()
	n.clock = n.clock.Add(d)
	next, err := n.askLate(n.t.Context())
	if err != nil {
		n.t.Error(err)
	}
	return next
}

func (n *lostNode) wants(asked ...string) {
	n.t.Helper()
	if !slices.Equal(n.asked, asked) {
		n.t.Errorf("asked %q, want %q", n.asked, asked)
	}
	if len(n.log.aborted) > 0 {
		n.t.Errorf("the save is aborted: %s", n.log.aborted[0].Reason)
	}
}

// aborts checks that the save is aborted, once, because of the lost node's rank.
func (n *lostNode) aborts(says ...string) {
	n.t.Helper()
	if len(n.log.aborted) != 1 {
		n.t.Fatalf("the save is aborted %d times", len(n.log.aborted))
	}
	b := n.log.aborted[0]
	if !slices.Equal(b.Ranks, []int{1}) {
		n.t.Errorf("aborted because of the ranks %v", b.Ranks)
	}
	for _, text := range says {
		if !strings.Contains(b.Reason, text) {
			n.t.Errorf("aborted because %q, want %q", b.Reason, text)
		}
	}
}

// The coordinating process orders partners to write what a lost node has sealed, and aborts the save that none
// of them can write.
func TestLostNodeIsReplaced(t *testing.T) {
	t.Parallel()
	t.Run("a partner is late, the next one writes", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.wants("2:1")
		n.passes(n.limits / 2)
		n.wants("2:1", "3:1")
		n.answers(3, true)
		if next := n.passes(time.Hour); !next.IsZero() {
			t.Errorf("another node is asked at %v", next)
		}
	})
	t.Run("a copy is in the log", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.hears(1, &events.ReplicaNode{Attempt: 1, Checkpoint: "x.a1", Ranks: []events.RankRun{{First: 1, Count: 1}}, Node: 3})
		n.lose(1)
		n.wants("3:1")
	})
	t.Run("the part is written", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.hears(2, &events.WriteCompleted{Attempt: 1, Checkpoint: "x.a1", Rank: 1, IndexDigest: strings.Repeat("00", 32)})
		n.passes(n.limits)
		n.answers(2, false)
		n.wants("2:1")
	})
	t.Run("the save ends soon", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.clock = n.clock.Add(time.Hour - time.Second)
		n.lose(1)
		if next, want := n.passes(0), n.clock.Add(time.Second/2); !next.Equal(want) {
			t.Errorf("the next one is asked at %v, want %v", next, want)
		}
	})
	t.Run("the save is over", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.move("x.a1", client.WaitReply{State: client.Aborted})
		if next := n.passes(n.limits); !next.IsZero() {
			t.Errorf("another node is asked at %v", next)
		}
		n.wants("2:1")
	})
	t.Run("no node has a copy", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.answers(2, false)
		n.answers(3, false)
		n.aborts("node 1 is lost", "no other node has a whole replica of its slots", "node 2: none on 2", "node 3: none on 3")
	})
}

// A node whose write of a replica fails records no failure of the save: another node may write it.
func TestFailedWriteOfReplica(t *testing.T) {
	t.Parallel()
	n := newLostNode(t, 0, 2)
	n.lose(1)
	for _, reply := range n.replies.take() { // this node has no replica
		if err := n.heedReply(t.Context(), reply); err != nil {
			t.Error(err)
		}
	}
	n.wants("2:1")
	copies := copyOf{}
	n.held = replica.NewHeld(copies) // as if it had
	if begin, err := n.held.Hold(staging.Part{Attempt: 1, Checkpoint: "x.a1", Rank: 1}); !begin || err != nil {
		t.Fatal(begin, err)
	}
	n.put = func(context.Context, planner.Write) (w data.Written, err error) { return w, errors.New("a bad block") }
	if err := n.write(t.Context(), planner.Write{Checkpoint: "x.a1", Rank: 1}); err != nil {
		t.Fatal(err)
	}
	replies := n.replies.take()
	if got := replies[len(replies)-1]; got.place != 0 || !slices.Equal(got.Without, []int{1}) || !strings.Contains(got.Why, "a bad block") {
		t.Errorf("answered %+v", got)
	}
	if len(n.log.facts) > 0 || copies["x.a1"] != 1 || n.held.Writes("x.a1", 1) {
		t.Errorf("%d facts; the replica is released %d times", len(n.log.facts), copies["x.a1"])
	}
}

// A node does not obey an order whose time is over, unless it writes already. It answers the same order again and
// begins nothing.
func TestOrderToAdoptAgain(t *testing.T) {
	t.Parallel()
	n := newLostNode(t)
	adopts := func(late bool) heirs.Reply {
		a := adoption{heirs.Order{Checkpoint: "x.a1", Parts: []heirs.OrderedPart{{Rank: 1}}, Within: time.Second}, n.clock}
		if late {
			n.clock = n.clock.Add(time.Second)
		}
		n.adopt(a)
		replies := n.replies.take()
		if len(replies) != 1 {
			t.Fatalf("%d replies", len(replies))
		}
		return replies[0].Reply
	}
	if r := adopts(true); !slices.Equal(r.Without, []int{1}) || r.Why != errLate.Error() {
		t.Errorf("a late order: %+v", r)
	}
	copies := copyOf{}
	n.held = replica.NewHeld(copies)
	if begin, err := n.held.Hold(staging.Part{Attempt: 1, Checkpoint: "x.a1", Rank: 1}); !begin || err != nil {
		t.Fatal(begin, err)
	}
	for _, late := range []bool{false, true} {
		if r := adopts(late); !slices.Equal(r.Writes, []int{1}) {
			t.Errorf("the order again, late %v: %+v", late, r)
		}
	}
}
