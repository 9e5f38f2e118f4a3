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
	"github.com/ckptstore/ckptstore/tensor"
)

// A fault on rank k, at each of its steps, is a failure of exactly rank k.
func TestFaultsNameTheirRank(t *testing.T) {
	const world, id = 4, "x.a2"
	for k := range world {
		for name, fault := range map[string]events.Body{
			"killed before its plan": &events.WorkerExited{Attempt: 2, Rank: k, Code: -9, Signal: "SIGKILL"},
			"exited after its plan":  &events.WorkerExited{Attempt: 2, Rank: k, Code: 1},
			"write failed":           &events.WriteFailed{Attempt: 2, Checkpoint: id, Rank: k, Error: "disk full"},
			"never saved":            nil,
			"never sealed":           nil,
			"never written":          nil,
		} {
			t.Run(fmt.Sprint(name, k), func(t *testing.T) {
				c := &cluster{t: t, world: world}
				coord := planner.NewCoordinator(config(world))
				say := func(body events.Body) {
					if err := coord.Apply(c.append(body)); err != nil {
						t.Fatal(err)
					}
					c.settle(coord, start)
				}
				for rank := range world {
					if rank == k && (name == "killed before its plan" || name == "never saved") {
						continue
					}
					say(c.plan(id, rank))
				}
				for rank := range world {
					if rank != k || name == "write failed" || name == "never written" {
						say(sealed(id, rank))
					}
				}
				for rank := range world {
					if rank != k {
						say(written(id, rank))
					}
				}
				if _, ends := outcome(c.log, id); ends != "" {
					t.Fatalf("ended as%s before the fault", ends)
				}
				if fault != nil {
					say(fault)
				} else {
					c.settle(coord, start.Add(time.Hour))
				}
				last, err := c.log[len(c.log)-1].Body()
				if aborted, ok := last.(*events.CheckpointAborted); !ok || err != nil || !slices.Equal(aborted.Ranks, []int{k}) {
					t.Errorf("the log ends with %+v, %v; want an abort that names rank %d", last, err, k)
				}
			})
		}
	}
}

// The reason of an abort fits the log, however much is wrong.
func TestReasonIsBounded(t *testing.T) {
	c := &cluster{t: t, world: 2}
	coord := planner.NewCoordinator(config(2))
	for rank := range 2 {
		l := checkpoint.Local{Rank: rank}
		for i := range 2000 {
			l.Items = append(l.Items, item(shard(fmt.Sprint("w", i), tensor.Shape{4}, part(int64(rank), 3))))
		}
		p := c.plan("x.a2", rank)
		p.Plan = events.InlineBlob(checkpoint.EncodeLocal(l))
		if err := coord.Apply(c.append(p)); err != nil {
			t.Fatal(err)
		}
	}
	c.settle(coord, start)
	last, err := c.log[len(c.log)-1].Body()
	aborted, ok := last.(*events.CheckpointAborted)
	if !ok || err != nil {
		t.Fatalf("the log ends with %+v, %v", last, err)
	}
	if len(aborted.Reason) > 20<<10 || !strings.HasSuffix(aborted.Reason, " more problems") || !strings.Contains(aborted.Reason, `tensor "w0": box [0]+[3] of rank 0 and box [1]+[3] of rank 1 overlap`) {
		t.Errorf("the reason has %d bytes and ends in %q", len(aborted.Reason), aborted.Reason[len(aborted.Reason)-80:])
	}
}
