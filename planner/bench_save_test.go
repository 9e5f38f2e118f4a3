package planner_test

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// BenchmarkSave measures one save of one tensor per rank, with a Tick after every event, as
// the saver calls it. A first save has full plans, a steady save has fingerprints. In a listed
// save, which is steady as well, every plan lists all ranks, as in logs of earlier versions.
func BenchmarkSave(b *testing.B) {
	for _, ranks := range []int{1000, 10_000} {
		for _, form := range []string{"first", "steady", "listed"} {
			b.Run(fmt.Sprintf("%s/%d", form, ranks), func(b *testing.B) { benchmarkSave(b, ranks, form) })
		}
	}
}

func benchmarkSave(b *testing.B, ranks int, form string) {
	first := rankFacts(b, ranks, "one.a2", true, form == "listed")
	var steady []events.Recorded
	if form != "first" {
		steady = rankFacts(b, ranks, "two.a2", false, form == "listed")
	}
	for b.Loop() {
		b.StopTimer()
		coord := planner.NewCoordinator(config(ranks))
		if form != "first" {
			playSave(b, coord, first)
			b.StartTimer()
			playSave(b, coord, steady)
			continue
		}
		b.StartTimer()
		playSave(b, coord, first)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(first)), "ns/event")
}

// rankFacts returns what the ranks of one save append: plans, then seals, then writes.
func rankFacts(b *testing.B, ranks int, id string, full, listed bool) []events.Recorded {
	all := make([]int, ranks)
	for rank := range all {
		all[rank] = rank
	}
	c := cluster{t: b, world: ranks}
	for rank := range ranks {
		l := checkpoint.Local{Rank: rank, Items: []checkpoint.Item{
			item(shard("w", tensor.Shape{int64(8 * ranks), 1024}, box([]int64{int64(8 * rank), 0}, []int64{8, 1024}))),
		}}
		p := &events.LocalPlan{Attempt: 2, Checkpoint: id, Name: id[:3], Step: 5, Rank: rank, Fingerprint: planner.Fingerprint(l, ranks, all).String()}
		if listed {
			p.Participants = all
		}
		if full {
			p.Plan = events.InlineBlob(checkpoint.EncodeLocal(l))
		}
		c.append(p)
	}
	for rank := range ranks {
		c.append(sealed(id, rank))
	}
	for rank := range ranks {
		c.append(written(id, rank))
	}
	return c.log
}

// playSave applies the facts of a save to a coordinator until the save is committed.
func playSave(b *testing.B, coord *planner.Coordinator, facts []events.Recorded) {
	ended, writes := false, 0
	c := cluster{t: b, world: 1}
	for _, r := range facts {
		if err := coord.Apply(r); err != nil {
			b.Fatal(err)
		}
		for {
			due, _ := coord.Tick(start)
			if len(due) == 0 {
				break
			}
			for _, command := range due {
				var body events.Body
				switch command := command.(type) {
				case planner.Decide:
					body = command.Body
				case planner.Publish:
					body = command.Body
				case planner.Write:
					writes++
					continue
				case planner.Commit:
					ended, body = true, committed(command)
				}
				if err := coord.Apply(c.append(body)); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	if !ended || 3*writes != len(facts) {
		b.Fatalf("committed %v after %d writes", ended, writes)
	}
}
