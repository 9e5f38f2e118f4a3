package planner

import (
	"cmp"
	"errors"
	"runtime"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Global makes the layout of a checkpoint from the local plans of all its participants.
//
// Replicas (the same box of the same tensor offered by several ranks) are stored once. Chunks
// that only one rank has are counted first. Then each replica, largest first, goes to the
// rank of its holders with the fewest bytes so far, the lowest rank on ties. Then the busiest
// rank gives replicas away as long as that lowers the maximum of any rank. PyTorch's dedup
// counts whole tensors and breaks ties in set order; readers do not care. A value goes to the
// lowest rank that offers it, a per-rank value stays with every rank.
//
// The error joins every problem found: boxes out of bounds, ranks that disagree on dtype or
// shape, overlapping boxes, and holes, each with its FQN, boxes and ranks. Holes are allowed
// where there is one plan only, as in PyTorch: a lone rank may save the part of a tensor that
// it has. A load that wants more than that part fails.
//
// A tensor whose replicas differ according to their checks is not distributed over its
// holders: each box comes from the lowest rank that offers it, so that boxes of one copy of
// the model stay together. That is not an error here: see [Disagreements.Err].
func Global(locals []checkpoint.Local) (Result, error) {
	o := Dedup(locals)
	layout := o.Layout()
	return Result{layout, o.Disagreements()}, o.Validate(layout)
}

// Result is the result of [Global].
type Result struct {
	Layout        checkpoint.Layout
	Disagreements Disagreements
}

// Layout gives every box one holder and sorts everything.
func (o *Offers) Layout() checkpoint.Layout {
	o.balance()
	var l checkpoint.Layout
	order := make([]int, len(o.tensors))
	total := 0
	for i := range order {
		order[i] = i
		total += o.tensors[i].boxes()
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(o.tensors[a].shard.FQN, o.tensors[b].shard.FQN) })
	if len(order) > 0 {
		l.Tensors = make([]checkpoint.Tensor, len(order))
	}
	slab := make([]checkpoint.Chunk, total)
	for i, id := range order {
		t := o.tensors[id]
		l.Tensors[i] = checkpoint.Tensor{FQN: t.shard.FQN, Path: t.path, DType: t.shard.DType, Shape: t.shard.Global}
		if n := t.boxes(); n > 0 {
			l.Tensors[i].Chunks, slab = slab[:n:n], slab[n:]
		}
	}
	each(runtime.GOMAXPROCS(0), len(order), func(_, i int) { o.assign(o.tensors[order[i]], l.Tensors[i].Chunks) })

	values := slices.Clone(o.values)
	slices.SortStableFunc(values, func(a, b []checkpoint.Value) int { return cmp.Compare(a[0].FQN, b[0].FQN) })
	l.Values = slices.Concat(values...)
	return l
}

// assign makes the chunks of a tensor, in (rank, item) order.
func (o *Offers) assign(t *offered, chunks []checkpoint.Chunk) {
	if t.replicas == nil {
		for i, at := range t.sole {
			l := &o.locals[at.local]
			chunks[i] = checkpoint.Chunk{Box: l.Items[at.item].Shard.Box, Rank: l.Rank}
		}
		return
	}
	slices.SortFunc(t.replicas, func(a, b replica) int {
		return cmp.Or(cmp.Compare(a.holder, b.holder), cmp.Compare(a.first.local, b.first.local), cmp.Compare(a.first.item, b.first.item))
	})
	for i, r := range t.replicas {
		chunks[i] = checkpoint.Chunk{Box: o.locals[r.first.local].Items[r.first.item].Shard.Box, Rank: o.locals[r.holder].Rank}
	}
}

// Validate returns the problems of the offers, and of the layout that was made of them: see
// [Global]. It lists the first hundred problems, twenty per tensor, and the number of the
// others.
func (o *Offers) Validate(l checkpoint.Layout) error {
	return o.validate(l, len(o.locals) > 1)
}

// Overlaps is Validate without the parts that no rank saves: for an existing checkpoint,
// whose holes are [Holes].
func (o *Offers) Overlaps(l checkpoint.Layout) error { return o.validate(l, false) }

func (o *Offers) validate(l checkpoint.Layout, whole bool) error {
	slices.SortStableFunc(o.problems, func(a, b problem) int {
		return cmp.Or(cmp.Compare(a.at.local, b.at.local), cmp.Compare(a.at.item, b.at.item))
	})
	var all []error
	for _, p := range o.problems {
		all = append(all, p.err)
	}
	refused := map[string]bool{}
	for _, t := range o.tensors {
		if t.refused {
			refused[t.shard.FQN] = true
		}
	}
	found := make([][]error, len(l.Tensors))
	covers := make([]cover, runtime.GOMAXPROCS(0))
	each(len(covers), len(l.Tensors), func(worker, i int) {
		if !refused[l.Tensors[i].FQN] {
			found[i] = covers[worker].check(l.Tensors[i], whole)
		}
	})
	return errors.Join(capped(append(all, slices.Concat(found...)...))...)
}
