package planner

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
)

// Global makes the layout of a checkpoint from the local plans of all its
// participants.
//
// Replicas (the same box of the same tensor offered by several ranks) are
// stored once. Chunks that only one rank has are counted first; then each
// replica, largest first, goes to the rank of its holders with the fewest
// bytes so far, the lowest rank on ties. PyTorch's dedup counts whole tensors
// and breaks ties in set order; readers do not care. A value goes to the
// lowest rank that offers it, a per-rank value stays with every rank.
//
// The error joins every problem found: boxes out of bounds, ranks that
// disagree on dtype or shape, overlapping boxes, and holes, each with its FQN,
// boxes and ranks. Holes are allowed where there is one plan only, as in
// PyTorch: a lone rank may save the part of a tensor that it has, and who
// wants more than that part is told when it loads.
func Global(locals []plan.Local) (plan.Layout, error) {
	locals = slices.SortedFunc(slices.Values(locals), func(a, b plan.Local) int { return cmp.Compare(a.Rank, b.Rank) })
	g := &globalPlan{tensors: map[string]*offers{}, values: map[string][]plan.Value{}, offered: map[string]int{}, load: map[int]int64{}}
	for i, l := range locals {
		if i > 0 && locals[i-1].Rank == l.Rank {
			g.problem("rank %d sent two plans", l.Rank)
			continue
		}
		for _, it := range l.Items {
			if it.Value {
				g.addValue(l.Rank, it)
			} else {
				g.addShard(l.Rank, it)
			}
		}
	}
	layout := g.layout()
	for _, t := range layout.Tensors {
		if !g.tensors[t.FQN].refused {
			g.problems = append(g.problems, checkCover(t, len(locals) > 1)...)
		}
	}
	return layout, errors.Join(g.problems...)
}

// offer is one box of a tensor and the ranks that have it.
type offer struct {
	box   tensor.Box
	bytes int64
	ranks []int // ascending
	first int   // position in (rank, item) order
}

// offers is everything that the ranks offer of one tensor.
type offers struct {
	shard   tensor.Shard // as the first rank described it
	rank    int          // that rank
	boxes   map[string]*offer
	refused bool // a shard was left out for a problem: holes mean nothing
}

type globalPlan struct {
	tensors  map[string]*offers
	values   map[string][]plan.Value
	offered  map[string]int // the last rank that offered a value
	load     map[int]int64  // bytes a rank writes so far
	problems []error
	seen     int
}

func (g *globalPlan) problem(format string, args ...any) {
	g.problems = append(g.problems, fmt.Errorf(format, args...))
}

func (g *globalPlan) addShard(rank int, it plan.Item) {
	s := it.Shard
	if v, ok := g.values[s.FQN]; ok {
		g.problem("%q is a value on rank %d and a tensor on rank %d", s.FQN, v[0].Rank, rank)
		return
	}
	t, ok := g.tensors[s.FQN]
	if !ok {
		t = &offers{shard: s, rank: rank, boxes: map[string]*offer{}}
		g.tensors[s.FQN] = t
	}
	before := len(g.problems)
	if it.PerRank {
		g.problem("tensor %q is marked per rank by rank %d: only values can be, give each rank's tensor its own name", s.FQN, rank)
	}
	if t.shard.DType != s.DType {
		g.problem("tensor %q has dtype %v on rank %d and %v on rank %d", s.FQN, t.shard.DType, t.rank, s.DType, rank)
	}
	if !t.shard.Global.Equal(s.Global) {
		g.problem("tensor %q has shape %v on rank %d and %v on rank %d", s.FQN, t.shard.Global, t.rank, s.Global, rank)
	}
	if err := s.Validate(); err != nil {
		g.problem("rank %d: %w", rank, err)
	}
	if len(g.problems) > before {
		t.refused = true
		return
	}
	if s.Box.Empty() {
		return // nothing to store, and nothing to overlap with
	}
	o, ok := t.boxes[s.Box.Key()]
	if !ok {
		g.seen++
		o = &offer{box: s.Box, bytes: s.Bytes(), first: g.seen}
		t.boxes[s.Box.Key()] = o
	}
	if n := len(o.ranks); n > 0 && o.ranks[n-1] == rank {
		g.problem("tensor %q: rank %d offers the box %v twice", s.FQN, rank, s.Box)
		return
	}
	o.ranks = append(o.ranks, rank)
}

func (g *globalPlan) addValue(rank int, it plan.Item) {
	fqn := it.Shard.FQN
	if t, ok := g.tensors[fqn]; ok {
		g.problem("%q is a tensor on rank %d and a value on rank %d", fqn, t.rank, rank)
		t.refused = true
		return
	}
	if last, ok := g.offered[fqn]; ok && last == rank {
		g.problem("value %q is offered twice by rank %d", fqn, rank)
		return
	}
	g.offered[fqn] = rank
	have := g.values[fqn]
	if len(have) > 0 {
		last := have[len(have)-1]
		switch {
		case last.PerRank != it.PerRank:
			g.problem("value %q is per rank on one of the ranks %d and %d and shared on the other", fqn, last.Rank, rank)
			return
		case !it.PerRank:
			return // the lowest rank's stands for all
		}
	}
	g.load[rank] += it.Bytes
	g.values[fqn] = append(have, plan.Value{FQN: fqn, Rank: rank, Bytes: it.Bytes, PerRank: it.PerRank})
}

// layout gives every box one holder and sorts everything.
func (g *globalPlan) layout() plan.Layout {
	var replicas []*offer
	holder := map[*offer]int{}
	for _, t := range g.tensors {
		for _, o := range t.boxes {
			if len(o.ranks) > 1 {
				replicas = append(replicas, o)
				continue
			}
			holder[o] = o.ranks[0]
			g.load[o.ranks[0]] += o.bytes
		}
	}
	slices.SortFunc(replicas, func(a, b *offer) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.first, b.first))
	})
	for _, o := range replicas {
		least := slices.MinFunc(o.ranks, func(a, b int) int { return cmp.Compare(g.load[a], g.load[b]) })
		holder[o] = least
		g.load[least] += o.bytes
	}

	var l plan.Layout
	for _, fqn := range slices.Sorted(maps.Keys(g.tensors)) {
		t := g.tensors[fqn]
		out := plan.Tensor{FQN: fqn, DType: t.shard.DType, Shape: t.shard.Global}
		boxes := slices.SortedFunc(maps.Values(t.boxes), func(a, b *offer) int {
			return cmp.Or(cmp.Compare(holder[a], holder[b]), cmp.Compare(a.first, b.first))
		})
		for _, o := range boxes {
			out.Chunks = append(out.Chunks, plan.Chunk{Box: o.box, Rank: holder[o]})
		}
		l.Tensors = append(l.Tensors, out)
	}
	for _, fqn := range slices.Sorted(maps.Keys(g.values)) {
		l.Values = append(l.Values, g.values[fqn]...)
	}
	return l
}

// checkCover reports chunks of t that overlap and, if it must be whole, parts
// that none covers.
func checkCover(t plan.Tensor, whole bool) (problems []error) {
	volume := int64(0)
	// Chunks sorted by their start in one dimension can only overlap with
	// those that have not ended there yet.
	chunks, dim := slices.Clone(t.Chunks), divided(t)
	if dim >= 0 {
		slices.SortStableFunc(chunks, func(a, b plan.Chunk) int {
			return cmp.Compare(a.Box.Offsets[dim], b.Box.Offsets[dim])
		})
	}
	var active []plan.Chunk
	for _, c := range chunks {
		volume += c.Box.Volume()
		active = slices.DeleteFunc(active, func(a plan.Chunk) bool {
			return dim >= 0 && a.Box.Offsets[dim]+a.Box.Sizes[dim] <= c.Box.Offsets[dim]
		})
		for _, a := range active {
			if both, ok := a.Box.Intersect(c.Box); ok {
				problems = append(problems, fmt.Errorf("tensor %q: box %v of rank %d and box %v of rank %d overlap in %v",
					t.FQN, a.Box, a.Rank, c.Box, c.Rank, both))
			}
		}
		active = append(active, c)
	}
	if whole && (len(problems) > 0 || volume != t.Shape.Volume()) {
		for _, hole := range missing(t.Shape.Full(), t.Chunks) {
			problems = append(problems, fmt.Errorf("tensor %q: no rank saves %v of shape %v", t.FQN, hole, t.Shape))
		}
	}
	return problems
}

// divided is the dimension that the first chunk of t takes the least of, or
// -1 where there is none: few chunks of a regular layout share a place in it.
func divided(t plan.Tensor) int {
	dim, least := -1, 2.0
	for d, n := range t.Shape {
		if len(t.Chunks) > 0 && n > 0 {
			if part := float64(t.Chunks[0].Box.Sizes[d]) / float64(n); part < least {
				dim, least = d, part
			}
		}
	}
	return dim
}

// missing is the part of box that no chunk covers, as disjoint boxes.
func missing(box tensor.Box, chunks []plan.Chunk) []tensor.Box {
	if box.Empty() {
		return nil
	}
	left := []tensor.Box{box}
	for _, c := range chunks {
		var next []tensor.Box
		for _, b := range left {
			next = append(next, subtract(b, c.Box)...)
		}
		left = next
	}
	return left
}

// subtract is b without cut, as disjoint boxes: two slabs a dimension at
// most, each cut off before the next dimension is looked at.
func subtract(b, cut tensor.Box) []tensor.Box {
	in, ok := b.Intersect(cut)
	if !ok {
		return []tensor.Box{b}
	}
	var out []tensor.Box
	rest := tensor.Box{Offsets: slices.Clone(b.Offsets), Sizes: slices.Clone(b.Sizes)}
	slab := func(d int, lo, hi int64) {
		if hi > lo {
			s := tensor.Box{Offsets: slices.Clone(rest.Offsets), Sizes: slices.Clone(rest.Sizes)}
			s.Offsets[d], s.Sizes[d] = lo, hi-lo
			out = append(out, s)
		}
	}
	for d := range b.Sizes {
		inEnd := in.Offsets[d] + in.Sizes[d]
		slab(d, rest.Offsets[d], in.Offsets[d])
		slab(d, inEnd, rest.Offsets[d]+rest.Sizes[d])
		rest.Offsets[d], rest.Sizes[d] = in.Offsets[d], in.Sizes[d]
	}
	return out
}
