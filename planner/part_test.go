package planner_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"pgregory.net/rapid"
)

// The coordinator of a part gets the decisions and the global plans in order, and the facts of
// its own ranks in order, but not the one before the other. However these are delayed, it
// requests the writes of its ranks with the items that the coordinating node gives them, and
// nothing else: every save in which nothing fails is committed.
func TestPartWritesItsRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &parted{
			twins: twins{world: 4, now: start}, full: planner.NewCoordinator(config(4)),
			phase: map[string]int{}, want: map[string]string{}, got: map[string]string{}, ended: map[string]string{},
		}
		cfg := config(4)
		cfg.Part = true
		w.part = planner.NewCoordinator(cfg)
		steps := map[string]func(){
			"rank":    func() { w.advance(t, rapid.SampledFrom(w.ids()).Draw(t, "save"), rapid.IntRange(0, 3).Draw(t, "rank")) },
			"node":    func() { w.node(t, rapid.SampledFrom(w.ids()).Draw(t, "save")) },
			"decide":  func() { w.decide(t) },
			"forward": func() { w.deliver(t, &w.forwarded) },
			"own":     func() { w.deliver(t, &w.own) },
			"fail": func() {
				if id := rapid.SampledFrom(w.ids()).Draw(t, "save"); w.fails == "" && rapid.IntRange(0, 9).Draw(t, "fails") == 0 {
					w.fails = id
					w.append(t, &events.WriteFailed{Attempt: 2, Checkpoint: id, Rank: rapid.IntRange(0, 3).Draw(t, "rank"), Error: "disk"})
				}
			},
		}
		names := []string{"rank", "rank", "node", "decide", "forward", "own", "fail"}
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			steps[rapid.SampledFrom(names).Draw(t, "step")]()
		}
		for range 100 { // nothing is delayed any more
			for _, id := range w.ids() {
				for rank := range 4 {
					w.advance(t, id, rank)
				}
			}
			w.decide(t)
			for len(w.forwarded)+len(w.own) > 0 {
				w.deliver(t, &w.forwarded)
				w.deliver(t, &w.own)
			}
		}
		if open := append(w.full.Open(), w.part.Open()...); len(open) > 0 {
			t.Fatalf("open: %v", open)
		}
		for _, id := range w.ids() {
			if w.ended[id] != "committed" && id != w.fails {
				t.Errorf("%s: %q", id, w.ended[id])
			}
		}
		for what, items := range w.got {
			if want := w.want[what]; want != "" && items != want {
				t.Errorf("write of %s: %s, want %s", what, items, want)
			}
		}
	})
}

// parted is a save of two nodes with two ranks each.
type parted struct {
	twins
	full, part     *planner.Coordinator
	sequence       uint64
	forwarded, own []events.Recorded // on their way to the part
	phase          map[string]int    // of a rank in a save: planned, sealed, may write, written
	want, got      map[string]string // items of writes
	ended          map[string]string
	known          [4]bool // ranks whose plan the log has
	fails          string  // the save in which a rank fails
}

func (w *parted) ids() []string { return []string{"x.a2", "y.a2", "z.a2"} }

func about(id string, rank int) string { return fmt.Sprint(id, " ", rank) }

// append appends an event to the log, from which the coordinating node reads all.
func (w *parted) append(t *rapid.T, body events.Body) {
	w.sequence++
	r, err := recorded(body, w.sequence, events.Scope{Run: "run", Trial: "t0"})
	if err == nil {
		err = w.full.Apply(r)
	}
	if err != nil {
		t.Fatal(err)
	}
	owns := func(rank int) bool { return rank >= 2 }
	switch b := body.(type) {
	case *events.LocalPlan:
		if !owns(b.Rank) {
			return
		}
	case *events.WriteSealed:
		if !owns(b.Rank) {
			return
		}
	case *events.WriteCompleted:
		if !owns(b.Rank) {
			return
		}
	case *events.WriteFailed:
		if !owns(b.Rank) {
			return
		}
	case *events.NodePlan, *events.NodeSeal:
	default:
		w.forwarded = append(w.forwarded, r)
		return
	}
	w.own = append(w.own, r)
}

// Phases of a rank in a save.
const (
	planned = iota + 1
	isSealed
	mayWrite
	isWritten
)

// plan returns a rank's plan: in full in its first save, later by its fingerprint.
func (w *parted) plan(id string, rank int) *events.LocalPlan {
	first := !w.known[rank]
	w.known[rank] = true
	return w.local(id, rank, first)
}

// advance lets a rank do what it does next in a save.
func (w *parted) advance(t *rapid.T, id string, rank int) {
	what := about(id, rank)
	if w.ended[id] != "" {
		return
	}
	switch w.phase[what] {
	case 0:
		w.phase[what] = planned
		w.append(t, w.plan(id, rank))
	case planned:
		w.phase[what] = isSealed
		w.append(t, sealed(id, rank))
	case mayWrite:
		w.phase[what] = isWritten
		w.append(t, written(id, rank))
	}
}

// node lets both ranks of the part's node do the same at once.
func (w *parted) node(t *rapid.T, id string) {
	a, b := about(id, 2), about(id, 3)
	if w.ended[id] != "" || w.phase[a] != w.phase[b] || !w.known[2] || !w.known[3] {
		return
	}
	switch w.phase[a] {
	case 0:
		joined, err := events.JoinPlans([]*events.LocalPlan{w.plan(id, 2), w.plan(id, 3)})
		if err != nil {
			t.Fatal(err)
		}
		w.append(t, joined)
	case planned:
		w.append(t, events.JoinSeals([]*events.WriteSealed{sealed(id, 2), sealed(id, 3)}))
	default:
		return
	}
	w.phase[a]++
	w.phase[b]++
}

// decide lets the coordinating node execute what is due.
func (w *parted) decide(t *rapid.T) {
	due, _ := w.full.Tick(w.now)
	for _, command := range due {
		switch c := command.(type) {
		case planner.Decide:
			w.append(t, c.Body)
			if b, ok := c.Body.(*events.CheckpointAborted); ok {
				w.ended[b.Checkpoint] = "aborted: " + b.Reason
			}
		case planner.Publish:
			w.append(t, c.Body)
		case planner.Commit:
			w.append(t, committed(c))
			w.ended[c.Manifest.Checkpoint] = "committed"
		case planner.Ask:
			w.append(t, w.local(c.Checkpoint, c.Rank, true))
		case planner.Write:
			what := about(c.Checkpoint, c.Rank)
			w.want[what] = fmt.Sprint(c.Items)
			if c.Rank < 2 {
				w.phase[what] = mayWrite
			}
		}
	}
}

// deliver gives the part the first of some events.
func (w *parted) deliver(t *rapid.T, from *[]events.Recorded) {
	if len(*from) == 0 {
		return
	}
	if err := w.part.Apply((*from)[0]); err != nil {
		t.Fatal(err)
	}
	*from = slices.Delete(*from, 0, 1)
	due, next := w.part.Tick(w.now)
	if !next.IsZero() {
		t.Fatalf("the part waits for the clock, until %v", next)
	}
	for _, command := range due {
		c, ok := command.(planner.Write)
		what := about(c.Checkpoint, c.Rank)
		if !ok || c.Rank < 2 || w.got[what] != "" {
			t.Fatalf("the part requests %T %+v", command, command)
		}
		w.got[what] = fmt.Sprint(c.Items)
		w.phase[what] = mayWrite
	}
}

// A part that cannot read the global plan requests the abort of the save, once.
func TestPartCannotReadGlobalPlan(t *testing.T) {
	cfg := config(2)
	cfg.Part = true
	c := planner.NewCoordinator(cfg)
	for i, body := range []events.Body{
		&events.CheckpointBegun{Attempt: 2, Checkpoint: "x.a2", Name: "x", WorldSize: 2},
		&events.WriteSealed{Attempt: 2, Checkpoint: "x.a2", Rank: 1},
		&events.GlobalPlan{Attempt: 2, Checkpoint: "x.a2", Layout: events.Blob{Digest: "00", Size: 300_000}}, // ErrNoBlob
	} {
		r, err := recorded(body, uint64(i+1), events.Scope{Run: "run", Trial: "t0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Apply(r); err != nil {
			t.Fatal(err)
		}
	}
	due, _ := c.Tick(start)
	again, _ := c.Tick(start.Add(time.Hour))
	if got := commands(append(due, again...)); strings.Count(got, "\n") != 1 || !strings.Contains(got, "decide checkpoint.aborted") || !strings.Contains(got, "cannot be read") {
		t.Errorf("requested: %s", got)
	}
}

// A part gets the order to write a lost node's rank before the event that the save has begun. If none of its ranks
// takes part, it knows nothing of the save until that event.
func TestPartAdoptsBeforeBegin(t *testing.T) {
	t.Parallel()
	cfg := config(2)
	cfg.Part = true
	c := planner.NewCoordinator(cfg)
	c.Adopt("x.a2", 1)
	c.Adopt("aborted.a2", 1)
	layout := checkpoint.EncodeLayout(checkpoint.Layout{Values: []checkpoint.Value{{FQN: "v", Rank: 1, Bytes: 1}}})
	for i, body := range []events.Body{
		&events.CheckpointAborted{Attempt: 2, Checkpoint: "aborted.a2"},
		&events.CheckpointBegun{Attempt: 2, Checkpoint: "x.a2", Name: "x", WorldSize: 2, Participants: []int{1}},
		&events.GlobalPlan{Attempt: 2, Checkpoint: "x.a2", Layout: events.InlineBlob(layout)},
	} {
		r, err := recorded(body, uint64(i+1), events.Scope{Run: "run", Trial: "t0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Apply(r); err != nil {
			t.Fatal(err)
		}
	}
	c.Adopt("aborted.a2", 1)
	due, _ := c.Tick(start)
	if len(due) != 1 {
		t.Fatalf("requested: %s", commands(due))
	}
	if w, ok := due[0].(planner.Write); !ok || w.Checkpoint != "x.a2" || w.Rank != 1 || len(w.Items) != 1 {
		t.Errorf("requested: %+v", due[0])
	}
}
