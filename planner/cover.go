package planner

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// cover checks one tensor after the other; its buffers are reused.
type cover struct {
	edges [][]int64 // of the cells, in each dimension
	taken []uint64  // a bit for each cell
}

// check returns errors for chunks of t that overlap and, if t must be whole, for parts that
// no chunk covers.
func (v *cover) check(t checkpoint.Tensor, whole bool) []error {
	volume := int64(0)
	for _, c := range t.Chunks {
		volume += c.Box.Volume()
	}
	if whole && volume != t.Shape.Volume() || !v.cellular(t) {
		return sweep(t, whole)
	}
	return nil
}

// cellular reports whether every chunk is exactly one cell of the grid made by the starts of
// all chunks, and no two are the same: then none overlap. Every layout of a mesh is such a
// grid, cut in any order of dimensions, and costs one sort per dimension; other layouts have
// to be swept.
func (v *cover) cellular(t checkpoint.Tensor) bool {
	for len(v.edges) < len(t.Shape) {
		v.edges = append(v.edges, nil)
	}
	edges, total := v.edges[:len(t.Shape)], 1
	for d, n := range t.Shape {
		starts, last := edges[d][:0], int64(-1)
		for i := range t.Chunks {
			// Neighbours mostly start at the same place in all dimensions but one: skipping
			// repeated starts leaves little to sort.
			if at := t.Chunks[i].Box.Offsets[d]; at != last {
				starts = append(starts, at)
				last = at
			}
		}
		slices.Sort(starts)
		edges[d] = append(slices.Compact(starts), n)
		if total *= len(edges[d]) - 1; total > 8*len(t.Chunks)+64 {
			return false // the bits are bounded by the chunks
		}
	}
	v.taken = append(v.taken[:0], make([]uint64, total/64+1)...)
	for i := range t.Chunks {
		b, at := t.Chunks[i].Box, 0
		for d, edges := range edges {
			k := 0
			if len(edges) > 2 {
				k = cellAt(edges, b.Offsets[d])
			}
			if b.Offsets[d]+b.Sizes[d] > edges[k+1] {
				return false
			}
			at = at*(len(edges)-1) + k
		}
		if v.taken[at/64]&(1<<(at%64)) != 0 {
			return false
		}
		v.taken[at/64] |= 1 << (at % 64)
	}
	return true
}

// cellAt returns the index of an edge. Where all cells but the last are equal, it is one
// division.
func cellAt(edges []int64, at int64) int {
	if width := edges[1] - edges[0]; edges[0] == 0 {
		if k := at / width; k < int64(len(edges)) && edges[k] == at {
			return int(k)
		}
	}
	k, _ := slices.BinarySearch(edges, at)
	return k
}

// These limits bound the problems reported of one tensor and of all, and the boxes in a
// search for holes. A plan in which everything overlaps has more overlaps than memory, and a
// user cannot read them all.
const (
	maxPerTensor = 20
	maxProblems  = 100
	maxBoxes     = 2000
)

// sweep finds the overlaps and the holes of a tensor that is not a grid, up to the number
// that is reported.
func sweep(t checkpoint.Tensor, whole bool) (problems []error) {
	volume := int64(0)
	// Chunks sorted by their start in one dimension can only overlap with those that have not
	// ended there yet.
	chunks, dim := slices.Clone(t.Chunks), divided(t)
	if dim >= 0 {
		slices.SortStableFunc(chunks, func(a, b checkpoint.Chunk) int {
			return cmp.Compare(a.Box.Offsets[dim], b.Box.Offsets[dim])
		})
	}
	var active []checkpoint.Chunk
	for _, c := range chunks {
		volume += c.Box.Volume()
		active = slices.DeleteFunc(active, func(a checkpoint.Chunk) bool {
			return dim >= 0 && a.Box.Offsets[dim]+a.Box.Sizes[dim] <= c.Box.Offsets[dim]
		})
		for _, a := range active {
			if both, ok := a.Box.Intersect(c.Box); ok {
				if len(problems) >= maxPerTensor {
					// With so many overlaps, holes add nothing.
					return append(problems, fmt.Errorf("tensor %q: more of its %d boxes overlap", t.FQN, len(chunks)))
				}
				problems = append(problems, fmt.Errorf("tensor %q: box %v of rank %d and box %v of rank %d overlap in %v",
					t.FQN, a.Box, a.Rank, c.Box, c.Rank, both))
			}
		}
		active = append(active, c)
	}
	if whole && (len(problems) > 0 || volume != t.Shape.Volume()) {
		boxes, all := missing(t.Shape.Full(), t.Chunks)
		for i, hole := range boxes {
			if all = all && i < maxPerTensor; !all {
				break
			}
			problems = append(problems, fmt.Errorf("tensor %q: no rank saves %v of shape %v", t.FQN, hole, t.Shape))
		}
		if !all {
			problems = append(problems, fmt.Errorf("tensor %q: its %d boxes leave more holes in shape %v than are listed", t.FQN, len(t.Chunks), t.Shape))
		}
	}
	return problems
}

// capped keeps the first errors, and adds the number of the others.
func capped(problems []error) []error {
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems:maxProblems], fmt.Errorf("and %d more problems", more))
	}
	return problems
}

// divided returns the dimension in which the first chunk of t takes the smallest share, or -1
// without one: few chunks of a regular layout share a place in it.
func divided(t checkpoint.Tensor) int {
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

// missing returns the part of box that no chunk covers, as disjoint boxes. all is false if
// chunks cut it into more than maxBoxes: then the rest proves nothing.
func missing(box tensor.Box, chunks []checkpoint.Chunk) (left []tensor.Box, all bool) {
	if box.Empty() {
		return nil, true
	}
	left = []tensor.Box{box}
	for _, c := range chunks {
		var next []tensor.Box
		for _, b := range left {
			next = append(next, subtract(b, c.Box)...)
		}
		if left = next; len(left) > maxBoxes {
			return nil, false
		}
	}
	return left, true
}

// subtract returns b without cut, as disjoint boxes: at most two slabs per dimension, each
// cut off before the next dimension.
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

// span is a box as two numbers: the row-major positions of its first and its last element.
// Non-empty boxes of one tensor are equal if both numbers are. That is cheaper to compare
// than any key made of the dimensions.
type span struct {
	first, last int64
	bytes       int64
	place
}

// spanOf returns the span of a valid shard, and whether it is empty.
func spanOf(s *tensor.Shard) (at span, empty bool) {
	at.bytes = int64(s.DType.Size())
	for d, n := range s.Global {
		offset, size := s.Box.Offsets[d], s.Box.Sizes[d]
		if size == 0 {
			return span{}, true
		}
		at.first = at.first*n + offset
		at.last = at.last*n + offset + size - 1
		at.bytes *= size
	}
	return at, false
}

func compareSpans(a, b span) int {
	if a.first == b.first {
		return cmp.Compare(a.last, b.last)
	}
	return cmp.Compare(a.first, b.first)
}

// each calls do with 0 to n-1 on a number of workers, and passes each worker's number.
func each(workers, n int, do func(worker, i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for w := range min(workers, n) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(w, i)
			}
		})
	}
	wg.Wait()
}
