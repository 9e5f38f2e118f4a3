package planner_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// checkpoints draws the local plans of a world that fit together: tensors cut
// anywhere, each box on one rank or several, in any order of items and ranks.
func checkpoints(world int) *rapid.Generator[[]checkpoint.Local] {
	return rapid.Custom(func(t *rapid.T) []checkpoint.Local {
		locals := make([]checkpoint.Local, world)
		for rank := range locals {
			locals[rank].Rank = rank
		}
		for n := range rapid.IntRange(1, 3).Draw(t, "tensors") {
			shape := shapes().Draw(t, "shape")
			offered := map[string]bool{}
			for _, b := range splits(t, shape) {
				for rank := range holders(t, world) {
					at := place(rank, fmt.Sprint(n), b)
					if b.Empty() && offered[at] {
						continue
					}
					offered[at] = true
					locals[rank].Items = append(locals[rank].Items, item(shard(fmt.Sprintf("w%d", n), shape, b)))
				}
			}
		}
		for n := range rapid.IntRange(0, 2).Draw(t, "values") {
			perRank := rapid.Bool().Draw(t, "per rank")
			for rank := range holders(t, world) {
				size := rapid.Int64Range(0, 99).Draw(t, "size")
				locals[rank].Items = append(locals[rank].Items, value(fmt.Sprintf("v%d", n), size, perRank))
			}
		}
		for rank := range locals {
			locals[rank].Items = rapid.Permutation(locals[rank].Items).Draw(t, "items")
		}
		return locals
	})
}

// holders draws which ranks have something: at least one.
func holders(t *rapid.T, world int) map[int]bool {
	ranks := map[int]bool{rapid.IntRange(0, world-1).Draw(t, "holder"): true}
	for _, rank := range rapid.SliceOfN(rapid.IntRange(0, world-1), 0, 3).Draw(t, "more holders") {
		ranks[rank] = true
	}
	return ranks
}

// Whatever was saved in any layout is read bitwise equal into any other, and
// every element is written once.
func TestAnyLayoutToAnyLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 5).Draw(t, "world")
		layout := global(t, checkpoints(world).Draw(t, "locals"))
		encoded, err := checkpoint.DecodeLayout(checkpoint.EncodeLayout(layout))
		if err != nil {
			t.Fatal(err)
		}
		stored, p := write(t, layout, world), planner.NewLoader(encoded)
		for _, saved := range layout.Tensors {
			volume := int64(0)
			for i, c := range saved.Chunks {
				volume += c.Box.Volume()
				for _, other := range saved.Chunks[:i] {
					if both, ok := c.Box.Intersect(other.Box); ok {
						t.Fatalf("%v is stored twice", both)
					}
				}
			}
			if volume != saved.Shape.Volume() {
				t.Fatalf("%d of %d elements are stored", volume, saved.Shape.Volume())
			}
			var wants []checkpoint.Want
			for _, b := range splits(t, saved.Shape) {
				wants = append(wants, checkpoint.Want{Shard: shard(saved.FQN, saved.Shape, b)})
			}
			stored.load(t, p, wants)
		}
	})
}

// Every rank writes only what it offered, each thing on offer is written by
// exactly one, and the result does not depend on who was heard first.
func TestDedupCoversOnceInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 6).Draw(t, "world")
		locals := checkpoints(world).Draw(t, "locals")
		layout := global(t, locals)
		left := map[string]bool{}
		offered := func(rank int, it checkpoint.Item) string {
			at := it.Shard.FQN + it.Shard.Box.Key()
			if it.PerRank {
				at = place(rank, at, it.Shard.Box)
			}
			return at
		}
		for _, l := range locals {
			for _, it := range l.Items {
				if it.Value || !it.Shard.Box.Empty() {
					left[offered(l.Rank, it)] = true
				}
			}
		}
		for _, l := range locals {
			for _, it := range layout.Items(l.Rank) {
				if at := offered(l.Rank, it); !left[at] {
					t.Fatalf("rank %d writes %s, which is not on offer or is written already", l.Rank, at)
				} else {
					delete(left, at)
				}
				if !slices.ContainsFunc(l.Items, func(own checkpoint.Item) bool {
					return own.Value == it.Value && own.Shard.FQN == it.Shard.FQN && own.Shard.Box.Equal(it.Shard.Box)
				}) {
					t.Fatalf("rank %d writes %+v without having it", l.Rank, it)
				}
			}
		}
		if len(left) > 0 {
			t.Fatalf("no rank writes %v", left)
		}
		want := checkpoint.EncodeLayout(layout)
		again := global(t, rapid.Permutation(locals).Draw(t, "order"))
		if !bytes.Equal(checkpoint.EncodeLayout(again), want) {
			t.Fatalf("another order of the plans gives\n%s\nnot\n%s", show(again), show(layout))
		}
	})
}

// Replicas of equal size are spread so that no rank writes more than one
// chunk more than another.
func TestReplicasAreBalanced(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world, n := rapid.IntRange(1, 9).Draw(t, "world"), rapid.IntRange(0, 40).Draw(t, "tensors")
		locals := make([]checkpoint.Local, world)
		shape := tensor.Shape{rapid.Int64Range(1, 1<<40).Draw(t, "size")}
		for rank := range locals {
			locals[rank].Rank = rank
			for i := range n {
				locals[rank].Items = append(locals[rank].Items, item(shard(fmt.Sprint(i), shape, shape.Full())))
			}
		}
		layout := global(t, locals)
		least, most := n, 0
		for rank := range world {
			chunks := len(layout.Items(rank))
			least, most = min(least, chunks), max(most, chunks)
		}
		if most-least > 1 {
			t.Fatalf("%d replicas over %d ranks: one writes %d, another %d", n, world, least, most)
		}
	})
}
