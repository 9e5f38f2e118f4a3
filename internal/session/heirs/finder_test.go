package heirs

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// lostNode is a job of five nodes with a rank each, whose node 1 has sealed its part of a save.
type lostNode struct {
	*Finder
	t        *testing.T
	clock    time.Time
	deadline time.Time
	written  bool
	asked    []string // orders: a place, and the ranks
	aborted  []Unwritten
}

const limit = time.Minute

func newLostNode(t *testing.T, partners ...int) *lostNode {
	n := &lostNode{t: t, clock: time.Unix(1000, 0)}
	n.deadline = n.clock.Add(time.Hour)
	n.Finder = NewFinder(Config{Partners: [][]int{1: partners, 4: nil}, Index: func(place int) int { return place }, Limit: limit, Saves: n, Now: func() time.Time { return n.clock }})
	return n
}

func (n *lostNode) Sealed(checkpoint string, rank int) (fingerprint checkpoint.Digest, ok bool) {
	return fingerprint, checkpoint == "x.a1" && rank == 1 && !n.written
}

func (n *lostNode) Deadline(string) time.Time { return n.deadline }

func (n *lostNode) take(step Step) {
	for _, o := range step.Orders {
		for _, p := range o.Parts {
			n.asked = append(n.asked, fmt.Sprintf("%d:%d", o.To, p.Rank))
		}
	}
	n.aborted = append(n.aborted, step.Without...)
}

func (n *lostNode) lose(place int) {
	n.t.Helper()
	step, failed := n.Lose(place, fmt.Errorf("node %d is lost", place), []Part{{"x.a1", place}}, func(string) bool { return false })
	n.take(step)
	if place == 1 && len(failed) > 0 {
		n.t.Errorf("failed: %v", failed)
	}
}

// answers gives the answer of a node: whether it writes the part.
func (n *lostNode) answers(place int, writes bool) {
	if writes {
		n.take(n.Heed(place, Reply{Checkpoint: "x.a1", Writes: []int{1}}))
		return
	}
	n.take(n.Heed(place, Reply{Checkpoint: "x.a1", Without: []int{1}, Why: fmt.Sprint("none on ", place)}))
}

// passes lets time pass.
func (n *lostNode) passes(d time.Duration) (next time.Time) {
	n.clock = n.clock.Add(d)
	step, next := n.Late()
	n.take(step)
	return next
}

func (n *lostNode) copied(rank, node int) {
	n.Copied(&events.ReplicaNode{Attempt: 1, Checkpoint: "x.a1", Ranks: []events.RankRun{{First: rank, Count: 1}}, Node: node})
}

func (n *lostNode) wants(asked ...string) {
	n.t.Helper()
	if !slices.Equal(n.asked, asked) {
		n.t.Errorf("asked %q, want %q", n.asked, asked)
	}
	if len(n.aborted) > 0 {
		n.t.Errorf("the save is aborted: %s", n.aborted[0].Why)
	}
}

// aborts checks that the save is aborted, once, because of the lost node's rank.
func (n *lostNode) aborts(reasons ...string) {
	n.t.Helper()
	if len(n.aborted) != 1 {
		n.t.Fatalf("the save is aborted %d times", len(n.aborted))
	}
	b := n.aborted[0]
	if b.Checkpoint != "x.a1" || !slices.Equal(b.Ranks, []int{1}) {
		n.t.Errorf("%s is aborted because of the ranks %v", b.Checkpoint, b.Ranks)
	}
	for _, text := range reasons {
		if !strings.Contains(b.Why, text) {
			n.t.Errorf("aborted because %q, want %q", b.Why, text)
		}
	}
}

// The partners of a lost node are asked one after the other, until one of them writes its part.
func TestNextPartnerIsAsked(t *testing.T) {
	t.Parallel()
	t.Run("the first has no copy", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.wants("2:1")
		n.answers(2, false)
		n.wants("2:1", "3:1")
		n.answers(3, true)
		if next := n.passes(time.Hour); !next.IsZero() {
			t.Errorf("another node is asked at %v", next)
		}
		n.wants("2:1", "3:1")
	})
	t.Run("a copy is in the log", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.copied(1, 3)
		n.lose(1)
		n.wants("3:1")
		n.answers(3, false)
		n.wants("3:1", "2:1")
	})
	t.Run("no node has a copy", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.answers(2, false)
		n.answers(3, false)
		n.aborts("node 1 is lost", "no other node has a whole replica of its slots", "node 2: none on 2", "node 3: none on 3")
	})
	t.Run("the first does not answer", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		if next, want := n.passes(0), n.clock.Add(limit/2); !next.Equal(want) {
			t.Errorf("the next one is asked at %v, want %v", next, want)
		}
		n.passes(limit / 2)
		n.wants("2:1", "3:1")
		n.answers(3, false)
		n.wants("2:1", "3:1") // the first may still write
		n.answers(2, false)
		n.aborts()
	})
	t.Run("the first writes for long", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.answers(2, true)
		n.passes(limit)
		n.wants("2:1")
		n.answers(2, false) // its write fails
		n.wants("2:1", "3:1")
	})
	t.Run("the first writes after the second was asked", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3, 4)
		n.lose(1)
		n.passes(limit / 3)
		n.wants("2:1", "3:1")
		n.answers(2, true)
		n.answers(3, false)
		n.wants("2:1", "3:1")
	})
	t.Run("the pairs are others after a takeover", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t)
		n.copied(1, 3)
		n.lose(1)
		n.wants("3:1")
	})
	t.Run("the first is lost", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.lose(2)
		n.wants("2:1", "3:1")
		n.lose(3)
		n.aborts("no other node")
	})
	t.Run("the first, which has not answered, is lost after the second has none", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.passes(limit)
		n.answers(3, false)
		n.wants("2:1", "3:1")
		n.lose(2)
		n.aborts("node 3: none on 3")
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
	t.Run("the part is written", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.written = true
		n.passes(limit)
		n.answers(2, false)
		n.wants("2:1")
	})
	t.Run("a node that was not asked", func(t *testing.T) {
		t.Parallel()
		n := newLostNode(t, 2, 3)
		n.lose(1)
		n.answers(3, false)
		n.answers(0, true)
		n.wants("2:1")
		n.passes(limit)
		n.wants("2:1", "3:1")
	})
}

// A part that a lost node had not sealed, or that no other node can have, fails at once.
func TestPartWithoutHeir(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		partners []int
		change   func(n *lostNode)
		whole    bool
		failed   bool
	}{
		"sealed":         {partners: []int{2}},
		"not sealed":     {partners: []int{2}, change: func(n *lostNode) { n.written = true }, failed: true},
		"a whole save":   {partners: []int{2}, whole: true, failed: true},
		"no partner":     {failed: true},
		"a copy":         {change: func(n *lostNode) { n.copied(1, 3) }},
		"another's copy": {change: func(n *lostNode) { n.copied(0, 3) }, failed: true},
		"a lost partner": {partners: []int{2}, change: func(n *lostNode) { n.lose(2) }, failed: true},
		"a copy of a save that is over": {change: func(n *lostNode) {
			n.copied(1, 3)
			n.End("x.a1")
		}, failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newLostNode(t, c.partners...)
			if c.change != nil {
				c.change(n)
			}
			step, failed := n.Lose(1, fmt.Errorf("node 1 is lost"), []Part{{"x.a1", 1}}, func(string) bool { return c.whole })
			if (len(failed) == 1) != c.failed || (len(step.Orders) == 1) == c.failed || len(step.Without) > 0 {
				t.Errorf("%+v, failed %v", step, failed)
			}
		})
	}
}

// The order of a loss that comes after the end of its save is not valid without end.
func TestOrderAfterDeadline(t *testing.T) {
	t.Parallel()
	n := newLostNode(t, 2, 3)
	n.clock = n.deadline.Add(time.Second)
	step, _ := n.Lose(1, fmt.Errorf("node 1 is lost"), []Part{{"x.a1", 1}}, func(string) bool { return false })
	if len(step.Orders) != 1 || step.Orders[0].Within != 1 {
		t.Errorf("%+v", step)
	}
}

// An order is valid until the next partner is asked; the last partner's is valid as long as the save is open.
func TestOrderWithin(t *testing.T) {
	t.Parallel()
	n := newLostNode(t, 2, 3)
	step, _ := n.Lose(1, fmt.Errorf("node 1 is lost"), []Part{{"x.a1", 1}}, func(string) bool { return false })
	if len(step.Orders) != 1 || step.Orders[0].Within != limit/2 {
		t.Errorf("%+v", step)
	}
	n.clock = n.clock.Add(limit / 2)
	if step, _ = n.Late(); len(step.Orders) != 1 || step.Orders[0].To != 3 || step.Orders[0].Within != 0 {
		t.Errorf("%+v", step)
	}
}
