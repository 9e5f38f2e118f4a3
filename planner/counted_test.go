package planner_test

import (
	"bytes"
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

// For any sequence of events the coordinator returns the same commands as the reference, which
// scans all ranks of all saves. The reference's log lists the participants of every save, so
// the test also covers saves by all ranks with and without their list. It has events of ranks
// where the other log may have one of a node.
func TestCoordinatorEqualsTheReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { newTwins(t).play(t) })
}

// twins are two coordinators of one log.
type twins struct {
	world     int
	log       [2][]events.Recorded // omitted and listed participants
	tested    *planner.Coordinator
	reference *planner.Coordinator
	now       time.Time
	held      []events.Body // commanded, not in the log yet

	listed map[int]*events.NodePlan // by first rank: the last that listed fingerprints
}

func newTwins(t *rapid.T) *twins {
	w := &twins{world: rapid.IntRange(1, 4).Draw(t, "world"), now: start, listed: map[int]*events.NodePlan{}}
	w.tested, w.reference = w.coordinator(), w.coordinator()
	return w
}

func (w *twins) coordinator() *planner.Coordinator {
	cfg := config(w.world)
	cfg.Strict = w.world == 3
	return planner.NewCoordinator(cfg)
}

func (w *twins) play(t *rapid.T) {
	ids := []string{"x.a2", "y.a2", "z.a2"}
	id := func() string { return rapid.SampledFrom(ids).Draw(t, "id") }
	rank := func() int { return rapid.IntRange(0, w.world).Draw(t, "rank") } // one of them does not exist
	say := func(body events.Body) { w.append(t, body) }
	steps := map[string]func(){
		"plan":        func() { say(w.plan(t, id(), rank())) },
		"plans":       func() { w.all(t, id(), func(id string, rank int) { say(w.plan(t, id, rank)) }) },
		"good":        func() { w.all(t, id(), func(id string, rank int) { say(w.local(id, rank, true)) }) },
		"steady":      func() { w.all(t, id(), func(id string, rank int) { say(w.local(id, rank, false)) }) },
		"node":        func() { w.node(t, id(), "plans"); w.node(t, id(), "seals"); w.node(t, id(), "writes") },
		"node plans":  func() { w.node(t, id(), "plans") },
		"node seals":  func() { w.node(t, id(), "seals") },
		"node writes": func() { w.node(t, id(), "writes") },
		"some": func() { // the plans list the same ranks, perhaps unordered or twice
			id, participants := id(), w.participants(t)
			for _, rank := range events.Participants(participants, w.world) {
				p := w.local(id, min(rank, w.world-1), true)
				p.Rank, p.Participants = rank, participants
				say(p)
				if rapid.Bool().Draw(t, "sealed") {
					say(sealed(id, rank))
				}
			}
		},
		"seal":    func() { say(sealed(id(), rank())) },
		"seals":   func() { w.all(t, id(), func(id string, rank int) { say(sealed(id, rank)) }) },
		"written": func() { say(written(id(), rank())) },
		"rewritten": func() { // as a taken-over save may be
			id, rank := id(), rank()
			say(written(id, rank))
			say(written(id, rank))
		},
		"writes":   func() { w.all(t, id(), func(id string, rank int) { say(written(id, rank)) }) },
		"no index": func() { say(&events.WriteCompleted{Attempt: 2, Checkpoint: id(), Rank: rank(), IndexDigest: "?"}) },
		"failed":   func() { say(&events.WriteFailed{Attempt: 2, Checkpoint: id(), Rank: rank(), Error: "disk full"}) },
		"exit": func() {
			say(&events.WorkerExited{Attempt: 2, Rank: rank(), Code: rapid.IntRange(0, 2).Draw(t, "code")})
		},
		"begun": func() {
			say(&events.CheckpointBegun{Attempt: 2, Checkpoint: id(), Name: "x", Step: 5, WorldSize: w.world, Participants: w.participants(t)})
		},
		"staged":    func() { say(&events.CheckpointStaged{Attempt: 2, Checkpoint: id()}) },
		"aborted":   func() { say(&events.CheckpointAborted{Attempt: 2, Checkpoint: id()}) },
		"committed": func() { say(&events.CheckpointCommitted{Attempt: 2, Checkpoint: id()}) },
		"new group": func() {
			say(&events.GroupStarted{Attempt: 2 + rapid.IntRange(0, 9).Draw(t, "newer")/9, WorldSize: w.world})
		},
		"new name": func() { ids = append(ids, fmt.Sprintf("n%d.a2", len(ids))) },
		"execute": func() {
			for _, body := range w.held {
				say(body)
			}
			w.held = nil
		},
		"time": func() { w.now = w.now.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second) },
		"drain": func() {
			w.tested.Drain("the group restarts")
			w.reference.Drain("the group restarts")
		},
		"abandon": func() {
			kept := rapid.SliceOfDistinct(rapid.SampledFrom(ids), rapid.ID[string]).Draw(t, "kept")
			w.tested.Abandon("the trainer died", kept...)
			w.reference.Abandon("the trainer died", kept...)
		},
		"take over": func() { w.takeOver(t) },
	}
	// Steps that advance a save are frequent, steps that end all saves rare.
	var names []string
	for name := range steps {
		weight := 4
		switch name {
		case "good", "steady", "seals", "writes", "execute", "time", "node plans", "node seals", "node writes":
			weight = 12
		case "abandon":
			weight = 2
		case "drain", "new group", "take over", "no index", "aborted", "committed", "exit", "failed":
			weight = 1
		}
		names = append(names, slices.Repeat([]string{name}, weight)...)
	}
	slices.Sort(names)
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		steps[rapid.SampledFrom(names).Draw(t, "step")]()
		if rapid.IntRange(0, 3).Draw(t, "tick") > 0 {
			w.tick(t)
		}
	}
	w.tick(t)
	w.now = w.now.Add(2 * time.Minute)
	w.tick(t)
}

// all draws some of the ranks, usually all, in any order.
func (w *twins) all(t *rapid.T, id string, each func(id string, rank int)) {
	ranks := make([]int, w.world)
	for rank := range ranks {
		ranks[rank] = rank
	}
	ranks = rapid.Permutation(ranks).Draw(t, "order")
	for _, rank := range ranks[rapid.IntRange(0, 5).Draw(t, "missing")/5:] {
		each(id, rank)
	}
}

// participants draws participants: usually all ranks, listed or not.
func (w *twins) participants(t *rapid.T) []int {
	all := events.Participants(nil, w.world)
	switch rapid.IntRange(0, 6).Draw(t, "participants") {
	case 0:
		return rapid.SliceOfNDistinct(rapid.IntRange(0, w.world), 1, -1, rapid.ID[int]).Draw(t, "listed") // not always ascending
	case 1:
		return rapid.SliceOfN(rapid.IntRange(0, w.world), 1, 3).Draw(t, "repeated")
	case 2, 3:
		return all
	}
	return nil
}

// local is the plan of a rank in a save by all.
func (w *twins) local(id string, rank int, full bool) *events.LocalPlan {
	c := cluster{world: w.world}
	p := c.plan(id, rank)
	p.Participants = nil
	local, err := checkpoint.DecodeLocal(p.Plan.Inline)
	if err != nil {
		panic(err)
	}
	p.Fingerprint = planner.Fingerprint(local, w.world, nil).String()
	if !full {
		p.Plan = events.Blob{}
	}
	return p
}

// plan draws a plan with which something may be wrong.
func (w *twins) plan(t *rapid.T, id string, rank int) *events.LocalPlan {
	p := w.local(id, min(rank, w.world-1), rapid.Bool().Draw(t, "full"))
	p.Participants = w.participants(t)
	p.Rank = rank
	switch rapid.IntRange(0, 9).Draw(t, "wrong") {
	case 0:
		p.Step++
	case 1:
		p.Fingerprint = "?"
	case 2:
		p.Fingerprint = checkpoint.Sum([]byte("unknown")).String()
	case 3:
		p.Plan = events.InlineBlob([]byte("CKLP?"))
	case 4:
		p.Plan = events.Blob{Digest: strings.Repeat("ab", 32), Size: 300 << 10}
	case 5:
		p.Attempt = 1
	}
	return p
}

// node appends the events of some ranks, usually of all: as events of nodes to the tested
// log, and as events of ranks to the other.
func (w *twins) node(t *rapid.T, id, phase string) {
	for first := 0; first < w.world; {
		count := rapid.IntRange(1, w.world-first).Draw(t, "ranks")
		ranks := make([]int, count)
		for i := range ranks {
			ranks[i] = first + i
		}
		first += count
		if rapid.IntRange(0, 9).Draw(t, "absent") == 0 {
			continue
		}
		switch phase {
		case "plans":
			w.nodePlan(t, id, ranks)
		case "seals":
			var each []*events.WriteSealed
			for _, rank := range ranks {
				each = append(each, sealed(id, rank))
			}
			w.both(t, events.JoinSeals(each), bodies(each)...)
		case "writes":
			var each []*events.WriteCompleted
			for _, rank := range ranks {
				each = append(each, written(id, rank))
			}
			w.both(t, events.JoinWrites(each)[0], bodies(each)...)
		}
	}
}

func (w *twins) nodePlan(t *rapid.T, id string, ranks []int) {
	var each []*events.LocalPlan
	participants, unknown := w.participants(t), rapid.IntRange(0, 9).Draw(t, "unknown digest") == 0
	step := int64(5 + rapid.IntRange(0, 9).Draw(t, "step")/9)
	for _, rank := range ranks {
		p := w.local(id, rank, false)
		p.Participants, p.Step = participants, step
		if unknown {
			p.Fingerprint = checkpoint.Sum([]byte("unknown")).String()
		}
		each = append(each, p)
	}
	joined, err := events.JoinPlans(each)
	if err != nil {
		t.Fatal(err)
	}
	last := w.listed[ranks[0]]
	switch {
	case unknown:
		joined.Fingerprints, joined.Digest = nil, checkpoint.Sum([]byte("unknown")).String()
	case last != nil && slices.Equal(last.Ranks, joined.Ranks) && bytes.Equal(last.Fingerprints, joined.Fingerprints):
		joined.Fingerprints, joined.Digest = nil, checkpoint.Sum(joined.Fingerprints).String()
	default:
		w.listed[ranks[0]] = joined
	}
	w.both(t, joined, bodies(each)...)
}

func bodies[B events.Body](of []B) (out []events.Body) {
	for _, b := range of {
		out = append(out, b)
	}
	return out
}

// both appends an event to the tested log, and to the other log the events of ranks that it
// stands for.
func (w *twins) both(t *rapid.T, joined events.Body, each ...events.Body) {
	w.appendTo(t, 0, joined)
	for _, body := range each {
		w.appendTo(t, 1, w.listing(body))
	}
}

// append appends an event to both logs and applies it.
func (w *twins) append(t *rapid.T, body events.Body) {
	w.appendTo(t, 0, body)
	w.appendTo(t, 1, w.listing(body))
}

// listing returns the body with its participants listed.
func (w *twins) listing(body events.Body) events.Body {
	listed := body
	switch b := body.(type) {
	case *events.LocalPlan:
		all := *b
		all.Participants = events.Participants(b.Participants, w.world)
		listed = &all
	case *events.CheckpointBegun:
		all := *b
		all.Participants = b.All()
		listed = &all
	}
	return listed
}

func (w *twins) appendTo(t *rapid.T, i int, body events.Body) {
	r, err := recorded(body, uint64(len(w.log[i])+1), events.Scope{Run: "run", Trial: "t0"})
	if err != nil {
		t.Fatal(err)
	}
	w.log[i] = append(w.log[i], r)
	if err := []*planner.Coordinator{w.tested, w.reference}[i].Apply(r); err != nil {
		t.Fatal(err)
	}
}

// takeOver replaces both coordinators by new ones that replay the log.
func (w *twins) takeOver(t *rapid.T) {
	w.tested, w.reference, w.held = w.coordinator(), w.coordinator(), nil
	for i, coord := range []*planner.Coordinator{w.tested, w.reference} {
		for _, r := range w.log[i] {
			if err := coord.Apply(r); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// tick compares the commands of both.
func (w *twins) tick(t *rapid.T) {
	due, next := w.tested.Tick(w.now)
	want, until := w.reference.ReferenceTick(w.now)
	if got, want := commands(due), commands(want); got != want {
		t.Fatalf("commands\n%s\nwant\n%s", got, want)
	}
	if !next.Equal(until) {
		t.Fatalf("next tick at %v, want %v", next, until)
	}
	if got, want := w.tested.Open(), w.reference.Open(); !slices.Equal(got, want) {
		t.Fatalf("open %v, want %v", got, want)
	}
	for _, command := range due {
		switch command := command.(type) {
		case planner.Decide:
			w.held = append(w.held, command.Body)
		case planner.Publish:
			w.held = append(w.held, command.Body)
		case planner.Commit:
			w.held = append(w.held, committed(command))
		}
	}
}

// commands returns commands as text.
func commands(due []planner.Command) string {
	var out strings.Builder
	for _, command := range due {
		switch c := command.(type) {
		case planner.Decide:
			fmt.Fprintf(&out, "decide %s %+v\n", c.Body.Kind(), c.Body)
		case planner.Publish:
			fmt.Fprintf(&out, "publish %s %+v\n", c.Body.Kind(), c.Body)
		case planner.Commit:
			fmt.Fprintf(&out, "commit %x, %d bytes\n", checkpoint.EncodeManifest(c.Manifest), c.Bytes)
		default:
			fmt.Fprintf(&out, "%T %+v\n", c, c)
		}
	}
	return out.String()
}
