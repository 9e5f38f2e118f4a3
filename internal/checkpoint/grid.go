package checkpoint

import (
	"slices"

	"github.com/ckptstore/ckptstore/tensor"
)

// grid is the rule of a tensor that is cut into equal cells, smaller at the far ends only,
// and whose chunks go to ranks in an arithmetic run: see the drawing in the package comment.
type grid struct {
	cells      []int64
	count      int
	rank, step int
	interleave int
}

// A rule of a few bytes stands for many chunks. The memory that the rules of a form may
// demand is limited in words of 8 bytes, for each tensor and for all together. Chunks beyond
// that are listed, which takes bytes in proportion.
const (
	maxTensorWords = 1 << 20 // 8 MiB: 95,325 chunks of two dimensions
	maxFormWords   = 1 << 27 // 1 GiB: 12 million
)

// budget is the memory that the rules of a form have demanded so far.
type budget int

// allows reports whether a rule may stand for count chunks, and counts them.
func (b *budget) allows(count, ndim int) bool {
	words := count * (7 + 2*ndim)
	if words > maxTensorWords || int(*b)+words > maxFormWords {
		return false
	}
	*b += budget(words)
	return true
}

// cells returns the number of cells of a shape, or 0 if there are none or more than a rule
// may have.
func cells(shape tensor.Shape, cell []int64) int {
	count := int64(1)
	for d, n := range shape {
		if n < 1 || cell[d] < 1 || cell[d] > n {
			return 0
		}
		if g := (n-1)/cell[d] + 1; g > maxTensorWords/count {
			return 0
		} else {
			count *= g
		}
	}
	return int(count)
}

// ruleOf finds the rule that stands for exactly t.Chunks. There is at most one.
func ruleOf(t Tensor) (g grid, ok bool) {
	if len(t.Chunks) == 0 {
		return g, false
	}
	first := t.Chunks[0]
	if len(first.Box.Sizes) != len(t.Shape) {
		return g, false
	}
	g = grid{cells: first.Box.Sizes, count: len(t.Chunks), rank: first.Rank, interleave: 1}
	if cells(t.Shape, g.cells) != g.count {
		return g, false
	}
	if g.count > 1 {
		second := t.Chunks[1]
		if len(second.Box.Offsets) != len(t.Shape) {
			return g, false
		}
		cell := int64(0)
		for d, n := range t.Shape {
			cell = cell*((n-1)/g.cells[d]+1) + second.Box.Offsets[d]/g.cells[d]
		}
		if cell < 1 || cell >= int64(g.count) || int64(g.count)%cell != 0 {
			return g, false
		}
		if cell > 1 {
			g.interleave = g.count / int(cell)
		}
		g.step = second.Rank - first.Rank
	}
	if !g.validRanks() {
		return g, false
	}
	at := make([]int64, 2*len(t.Shape))
	offsets, sizes := at[:len(t.Shape)], at[len(t.Shape):]
	for i, c := range t.Chunks {
		g.cell(i, t.Shape, offsets, sizes)
		if c.Rank != g.rank+i*g.step || !slices.Equal(c.Box.Offsets, offsets) || !slices.Equal(c.Box.Sizes, sizes) {
			return g, false
		}
	}
	return g, true
}

func (g grid) validRanks() bool {
	return g.rank >= 0 && g.step >= 0 && g.rank <= maxRank && g.step <= maxRank && g.rank+(g.count-1)*g.step <= maxRank
}

// cell returns the box of chunk i.
func (g grid) cell(i int, shape tensor.Shape, offsets, sizes []int64) {
	left := int64(i%g.interleave*(g.count/g.interleave) + i/g.interleave)
	for d := len(shape) - 1; d >= 0; d-- {
		n, size := shape[d], g.cells[d]
		if size == n { // most dimensions are whole: spare them the divisions
			offsets[d], sizes[d] = 0, n
			continue
		}
		parts := (n-1)/size + 1
		at := left % parts * size
		left /= parts
		offsets[d], sizes[d] = at, min(size, n-at)
	}
}

// expand returns the chunks that the rule stands for.
func (g grid) expand(shape tensor.Shape) []Chunk {
	ndim := len(shape)
	chunks, slab := make([]Chunk, g.count), make([]int64, 2*ndim*g.count)
	for i := range chunks {
		b := tensor.Box{Offsets: slab[:ndim:ndim], Sizes: slab[ndim : 2*ndim : 2*ndim]}
		slab = slab[2*ndim:]
		g.cell(i, shape, b.Offsets, b.Sizes)
		chunks[i] = Chunk{Box: b, Rank: g.rank + i*g.step}
	}
	return chunks
}

func (e *encoder) grid(g grid, shape tensor.Shape) {
	for d, n := range shape {
		e.int64(g.cells[d] % n) // 0 is the whole dimension
	}
	e.int(g.rank)
	if g.count > 1 {
		e.int(g.step)
		e.int(g.interleave)
	}
}

// grid reads a rule, and keeps its cells in the memory of cell.
func (d *decoder) grid(fqn string, shape tensor.Shape, cell []int64, spent *budget) grid {
	g := grid{cells: cell, interleave: 1}
	for dim, n := range shape {
		if g.cells[dim] = d.int64(); g.cells[dim] == 0 {
			g.cells[dim] = n
		} else if g.cells[dim] >= n {
			d.fail("tensor %q: cells of %d are out of bounds of shape %v", fqn, g.cells[dim], shape)
		}
	}
	g.rank = d.int()
	if d.err == nil {
		if g.count = cells(shape, g.cells); g.count == 0 {
			d.fail("tensor %q: no rule cuts shape %v into cells %v", fqn, shape, g.cells)
		}
	}
	if g.count > 1 {
		g.step, g.interleave = d.int(), d.int()
	}
	switch {
	case d.err != nil:
	case g.interleave < 1 || g.interleave > 1 && (g.interleave >= g.count || g.count%g.interleave != 0):
		d.fail("tensor %q: %d chunks cannot be interleaved by %d", fqn, g.count, g.interleave)
	case !g.validRanks():
		d.fail("tensor %q: rank %d and %d steps of %d are too large", fqn, g.rank, g.count-1, g.step)
	case !spent.allows(g.count, len(shape)):
		d.fail("tensor %q: the rule stands for %d chunks, which is more than a rule may", fqn, g.count)
	}
	return g
}
