package planner_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// known are local plans as a cache takes them.
func known(locals []checkpoint.Local, world int) (plans []planner.Known) {
	var ranks []int
	for _, l := range locals {
		ranks = append(ranks, l.Rank)
	}
	for _, l := range locals {
		plans = append(plans, planner.Known{Fingerprint: planner.Fingerprint(l, world, ranks), Rank: l.Rank, Plan: checkpoint.EncodeLocal(l)})
	}
	return plans
}

func shared(l checkpoint.Layout) planner.Shared {
	return planner.Shared{Layout: l, Shares: l.Shares(), Encoded: checkpoint.EncodeLayout(l)}
}

// changes are ways in which a plan may differ from the one before.
var changes = map[string]func(l *checkpoint.Local){
	"dtype": func(l *checkpoint.Local) { l.Items[0].Shard.DType = tensor.Float64 },
	"shape": func(l *checkpoint.Local) { l.Items[0].Shard.Global = tensor.Shape{20} },
	"box":   func(l *checkpoint.Local) { l.Items[0].Shard.Box = part(4, 4) },
	"name":  func(l *checkpoint.Local) { l.Items[0].Shard.FQN = "v" },
	"path": func(l *checkpoint.Local) {
		l.Items[1].Path = checkpoint.Path{checkpoint.PathKey("a"), checkpoint.PathKey("b")}
	},
	"size":           func(l *checkpoint.Local) { l.Items[1].Bytes++ },
	"per rank":       func(l *checkpoint.Local) { l.Items[1].PerRank = true },
	"kind":           func(l *checkpoint.Local) { l.Items[0] = value("w", 8, false) },
	"one item more":  func(l *checkpoint.Local) { l.Items = append(l.Items, value("more", 1, true)) },
	"one item fewer": func(l *checkpoint.Local) { l.Items = l.Items[1:] },
	"order":          func(l *checkpoint.Local) { slices.Reverse(l.Items) },
	"rank":           func(l *checkpoint.Local) { l.Rank++ },
}

func somePlan(rank int) checkpoint.Local {
	return checkpoint.Local{Rank: rank, Items: []checkpoint.Item{item(shard("w", tensor.Shape{10}, part(0, 10))), value("a.b", 3, false)}}
}

func TestFingerprint(t *testing.T) {
	of := func(l checkpoint.Local, world int, ranks ...int) checkpoint.Digest {
		return planner.Fingerprint(l, world, ranks)
	}
	same := of(somePlan(0), 4, 0, 1)
	for name, change := range changes {
		l := somePlan(0)
		if change(&l); of(l, 4, 0, 1) == same {
			t.Errorf("another %s has the same fingerprint", name)
		}
	}
	for _, other := range []checkpoint.Digest{of(somePlan(0), 5, 0, 1), of(somePlan(0), 4, 0, 2), of(somePlan(0), 4, 0), of(somePlan(0), 4, 0, 1, 2)} {
		if other == same {
			t.Error("another world or other participants have the same fingerprint")
		}
	}
	l := somePlan(0)
	l.Items[0] = checked(l.Items[0], "a")
	if of(l, 4, 0, 1) != same || l.Items[0].Check == (checkpoint.Check{}) {
		t.Error("a check changes the fingerprint, or is lost by making it")
	}
	// A fingerprint outlives the program that made it: it may change with
	// planner.Version only.
	const want = "92c824fd2168e4ada84f3a68d00efaa39c13c989415e42bd5fde6a59c416060e"
	if same.String() != want {
		t.Errorf("fingerprint %s, want %s", same, want)
	}
}

// Whatever changes between saves, the layout from the cache equals a new one. A set is found
// if and only if it is among the last added sets. Invalid sets are never found.
func TestCacheEqualsPlanningAgain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 3).Draw(t, "size")
		cache := planner.NewCache(size)
		var recent []string // model of the cache: what was added, oldest first
		names := slices.Sorted(func(yield func(string) bool) {
			for name := range changes {
				if name != "rank" && !yield(name) {
					return
				}
			}
		})
		for range rapid.IntRange(1, 12).Draw(t, "saves") {
			world := rapid.IntRange(1, 3).Draw(t, "world")
			var locals []checkpoint.Local
			for rank := range world {
				l := somePlan(rank)
				if name := rapid.SampledFrom(append([]string{"", "", ""}, names...)).Draw(t, "change"); name != "" {
					changes[name](&l)
				}
				locals = append(locals, l)
			}
			made, err := planner.Global(locals)
			plans := known(locals, world)
			what := fmt.Sprint(locals)
			got, hit := cache.Layout(plans)
			if want := slices.Contains(recent, what); hit != want {
				t.Fatalf("found is %v, want %v", hit, want)
			}
			for _, p := range plans {
				if have, ok := cache.Plan(p.Fingerprint); hit && !ok || ok && !bytes.Equal(have.Plan, p.Plan) {
					t.Fatalf("rank %d: plan %v, %x, want %x", p.Rank, ok, have.Plan, p.Plan)
				}
			}
			if err != nil {
				if hit {
					t.Fatalf("plans that do not fit together (%v) were found", err)
				}
				continue
			}
			if hit && !bytes.Equal(got.Encoded, checkpoint.EncodeLayout(made.Layout)) {
				t.Fatalf("the cache has\n%s\nwant\n%s", show(got.Layout), show(made.Layout))
			}
			slices.Reverse(plans)
			cache.Add(plans, shared(made.Layout))
			recent = append(slices.DeleteFunc(recent, func(s string) bool { return s == what }), what)
			recent = recent[max(0, len(recent)-size):]
		}
	})
}

// saver plays the ranks of a cluster, which send a plan or its fingerprint.
type saver struct {
	cluster
	coord *planner.Coordinator
	due   []planner.Command // what was requested, not recorded in the log
}

func newSaver(t *testing.T, world int) *saver {
	return &saver{cluster: cluster{t: t, world: world}, coord: planner.NewCoordinator(config(world))}
}

// send sends local plans of a checkpoint: in full, or the fingerprint alone.
func (s *saver) send(id string, full bool, locals ...checkpoint.Local) {
	for _, l := range locals {
		p := &events.LocalPlan{Attempt: 2, Checkpoint: id, Name: strings.TrimSuffix(id, ".a2"), Step: 5, Rank: l.Rank}
		for rank := range s.world {
			p.Participants = append(p.Participants, rank)
		}
		p.Fingerprint = planner.Fingerprint(l, s.world, p.Participants).String()
		if full {
			p.Plan = events.InlineBlob(checkpoint.EncodeLocal(l))
		}
		s.tell(p)
	}
}

func (s *saver) tell(body events.Body) {
	if err := s.coord.Apply(s.append(body)); err != nil {
		s.t.Fatal(err)
	}
	s.run()
}

// run executes what is due; Ask and Write are only noted.
func (s *saver) run() {
	for {
		due, _ := s.coord.Tick(start)
		if len(due) == 0 {
			return
		}
		for _, command := range due {
			switch c := command.(type) {
			case planner.Decide:
				s.tell(c.Body)
			case planner.Publish:
				s.tell(c.Body)
			case planner.Commit:
				s.tell(committed(c))
			}
			s.due = append(s.due, command)
		}
	}
}

// finish seals and writes a checkpoint; it must be committed by that.
func (s *saver) finish(id string) {
	for rank := range s.world {
		s.tell(sealed(id, rank))
		s.tell(written(id, rank))
	}
	if _, ends := outcome(s.log, id); ends != " committed" {
		s.t.Fatal(id, "ended as", ends)
	}
}

// layout returns the layout of a checkpoint in the log, or nothing.
func (s *saver) layout(id string) (text string) {
	for _, r := range s.log {
		body, err := r.Body()
		if err != nil {
			s.t.Fatal(err)
		}
		if g, ok := body.(*events.GlobalPlan); ok && g.Checkpoint == id {
			l, err := checkpoint.DecodeLayout(g.Layout.Inline)
			if err != nil {
				s.t.Fatal(err)
			}
			text += show(l)
		}
	}
	return text
}

func (s *saver) asked() (asks []planner.Ask) {
	for _, c := range s.due {
		if a, ok := c.(planner.Ask); ok {
			asks = append(asks, a)
		}
	}
	return asks
}

func TestUnchangedPlansAreNotSentAgain(t *testing.T) {
	s := newSaver(t, 3)
	locals := halves("abcd", "abcd", "axcd")
	s.send("one.a2", true, locals...)
	s.finish("one.a2")
	s.send("two.a2", false, locals...)
	s.finish("two.a2")
	if one, two := s.layout("one.a2"), s.layout("two.a2"); one != two || !strings.Contains(one, "r0: w[0]+[4] w[4]+[4]") {
		t.Errorf("the first layout is\n%s\nthe second\n%s", one, two)
	}
	if asks := s.asked(); asks != nil {
		t.Errorf("known plans were asked for: %v", asks)
	}
	// A coordinator that takes over from the log knows as much.
	s.coord = replay(t, 3, s.log)
	changed := locals[1]
	changed.Items = append(slices.Clone(changed.Items), checked(value("more", 1, true), "z"))
	s.send("three.a2", false, locals[0], locals[2])
	s.send("three.a2", true, changed)
	s.finish("three.a2")
	if got := s.layout("three.a2"); strings.Count(got, "more(1)") != 1 || s.asked() != nil {
		t.Errorf("one plan changed, the layout is\n%s\nasked for %v", got, s.asked())
	}
	// Checks of another save do not count for this one.
	if body, _ := s.log[len(s.log)-1].Body(); strings.Contains(fmt.Sprint(body), "differ") {
		t.Errorf("%v", body)
	}
	for _, r := range s.log {
		if body, _ := r.Body(); body.Kind() == "plan.global" {
			g := body.(*events.GlobalPlan)
			if (g.Checkpoint == "one.a2") != (g.Disagreements != nil) {
				t.Errorf("%s lists the disagreements %v", g.Checkpoint, g.Disagreements)
			}
		}
	}
}

func TestUnknownFingerprintIsAskedAbout(t *testing.T) {
	s := newSaver(t, 2)
	locals := halves("----", "----")
	s.send("one.a2", false, locals...)
	want := []planner.Ask{{Checkpoint: "one.a2", Rank: 0}, {Checkpoint: "one.a2", Rank: 1}}
	if !slices.Equal(s.asked(), want) || s.layout("one.a2") != "" {
		t.Fatalf("asked for %v, want %v", s.asked(), want)
	}
	s.run()
	if len(s.asked()) != 2 {
		t.Errorf("asked again: %v", s.asked())
	}
	// A save that is still open knows the plan too.
	s.send("one.a2", true, locals[0])
	s.send("two.a2", false, locals[0])
	s.send("one.a2", true, locals[1])
	s.finish("one.a2")
	s.send("two.a2", false, locals[1])
	s.finish("two.a2")
	if len(s.asked()) != 2 || s.layout("two.a2") != s.layout("one.a2") {
		t.Errorf("asked for %v; the layouts are\n%s\nand\n%s", s.asked(), s.layout("one.a2"), s.layout("two.a2"))
	}
	// Another rank's fingerprint, or one of other participants, is not known.
	other := planner.Fingerprint(locals[0], 2, []int{0, 1}).String()
	s.tell(&events.LocalPlan{Attempt: 2, Checkpoint: "x.a2", Name: "x", Step: 5, Rank: 1, Participants: []int{0, 1}, Fingerprint: other})
	s.tell(&events.LocalPlan{Attempt: 2, Checkpoint: "y.a2", Name: "y", Step: 5, Rank: 0, Participants: []int{0}, Fingerprint: other})
	if asks := s.asked()[2:]; !slices.Equal(asks, []planner.Ask{{Checkpoint: "x.a2", Rank: 1}, {Checkpoint: "y.a2", Rank: 0}}) {
		t.Errorf("asked for %v", asks)
	}
}

// A fact that no rank can have sent fails its save and no other, and never the training.
func TestFactsThatCannotBe(t *testing.T) {
	locals := parts(tensor.Shape{8}, []tensor.Box{part(0, 4)}, []tensor.Box{part(4, 4)})
	gone := events.Blob{Digest: strings.Repeat("ab", 32), Size: 300 << 10}
	for reasonPrefix, bad := range map[string]events.Body{
		"the plan of rank 0 cannot be read: neither a plan nor its fingerprint": &events.LocalPlan{Attempt: 2, Checkpoint: "z.a2", Name: "z", Step: 5, Rank: 0, Participants: []int{0, 1}, Fingerprint: "xyz"},
		"the plan of rank 0 cannot be read: no such blob":                       &events.LocalPlan{Attempt: 2, Checkpoint: "z.a2", Name: "z", Step: 5, Rank: 0, Participants: []int{0, 1}, Plan: gone},
		"the plan of rank 0 cannot be read: decode local plan":                  &events.LocalPlan{Attempt: 2, Checkpoint: "z.a2", Name: "z", Step: 5, Rank: 0, Participants: []int{0, 1}, Plan: events.InlineBlob([]byte("CKLP?"))},
		"the plan of all ranks cannot be read: no such blob":                    &events.GlobalPlan{Attempt: 2, Checkpoint: "z.a2", Layout: gone},
		"the write of rank 0 has no index":                                      &events.WriteCompleted{Attempt: 2, Checkpoint: "z.a2", Rank: 0, IndexDigest: "x"},
	} {
		s := newSaver(t, 2)
		if _, local := bad.(*events.LocalPlan); !local {
			s.send("z.a2", true, locals[0])
		}
		s.tell(bad)
		s.run()
		reason := ""
		for _, r := range s.log {
			if body, err := r.Body(); err == nil {
				if b, is := body.(*events.CheckpointAborted); is && b.Checkpoint == "z.a2" {
					reason = b.Reason
				}
			}
		}
		if !strings.HasPrefix(reason, reasonPrefix) {
			t.Errorf("aborted for %q, want %q", reason, reasonPrefix)
		}
		s.send("one.a2", true, locals...)
		s.finish("one.a2")
		if _, ends := outcome(s.log, "one.a2"); ends != " committed" {
			t.Errorf("%s: another save ends as%s", reasonPrefix, ends)
		}
	}
}

// Plans that do not fit together are not remembered, nor is their layout.
func TestInvalidPlansAreNotRemembered(t *testing.T) {
	s := newSaver(t, 2)
	locals := parts(tensor.Shape{8}, []tensor.Box{part(0, 4)}, []tensor.Box{part(2, 4)})
	s.send("one.a2", true, locals...)
	if _, ends := outcome(s.log, "one.a2"); ends != " aborted" {
		t.Fatalf("ended as%s", ends)
	}
	s.send("two.a2", false, locals...)
	if len(s.asked()) != 2 || s.layout("two.a2") != "" {
		t.Errorf("asked for %v, the layout is %s", s.asked(), s.layout("two.a2"))
	}
}

// Plans that come with checks are compared even if their layout is known.
func TestKnownPlansAreStillCompared(t *testing.T) {
	s := newSaver(t, 2)
	s.send("one.a2", true, halves("abcd", "abcd")...)
	s.finish("one.a2")
	s.send("two.a2", true, halves("abcd", "abxd")...)
	s.finish("two.a2")
	if one, two := s.layout("one.a2"), s.layout("two.a2"); one == two || !strings.Contains(two, "r0: other[0]+[8]") {
		t.Errorf("the first layout is\n%s\nthe second\n%s", one, two)
	}
}
