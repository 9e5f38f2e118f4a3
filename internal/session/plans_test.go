package session

import (
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// A plan that the log has, in a save by all ranks, is an event of the same size in a group of
// ten thousand ranks as in one of eight.
func TestSteadyPlanIsSmallInALargeGroup(t *testing.T) {
	const large = 10_000
	size := func(world int, asked []int) int {
		s := &rankServer{
			Group: &Group{Attempt: Attempt{Number: 2}, cfg: Config{Nodes: OneNode(world)}},
			rank:  world - 1, plans: localPlans{said: map[string]bool{}},
		}
		participants, err := s.participants(asked)
		if err != nil {
			t.Fatal(err)
		}
		p := &localPlan{bare: checkpoint.Local{Rank: s.rank, Items: []checkpoint.Item{{Value: true, Bytes: 100, Shard: tensor.Shard{FQN: "config"}}}}}
		p.encoded = checkpoint.EncodeLocal(p.bare)
		say := func(step int64, name string) *events.LocalPlan {
			return s.says(name+".a2", client.SaveRequest{Step: step, Name: name}, participants, p, nil).said
		}
		first, steady := say(1_000_000, "step-1000000"), say(1_001_000, "step-1001000")
		if first.Plan.Size == 0 || steady.Plan.Size > 0 || steady.Fingerprint != first.Fingerprint {
			t.Errorf("first %+v, then %+v; want the plan once, then its fingerprint", first, steady)
		}
		if got := events.Participants(steady.Participants, world); !slices.Equal(got, participants) {
			t.Errorf("of %v, %v take part", participants, got)
		}
		f, err := events.NewFact(events.Stamp{ID: "id", Source: "test", Time: time.Unix(1, 0)}, events.Scope{Run: "run", Trial: "main", Actor: events.Rank(s.rank)}, steady)
		if err != nil {
			t.Fatal(err)
		}
		return len(f.Data)
	}
	small := size(8, nil)
	got := size(large, nil)
	t.Logf("%d bytes of %d ranks, %d of 8", got, large, small)
	if got > 400 || got > small+len("9999") {
		t.Errorf("a steady plan has %d bytes of %d ranks and %d of 8, want the same and at most 400", got, large, small)
	}
	all := make([]int, large)
	for rank := range all {
		all[rank] = rank
	}
	if listed := size(large, all); listed != got {
		t.Errorf("a worker that names all ranks makes a plan of %d bytes, want %d", listed, got)
	}
	if some := size(large, all[1:]); some < large {
		t.Errorf("the participants of a save by some ranks are missing: %d bytes", some)
	}
}
