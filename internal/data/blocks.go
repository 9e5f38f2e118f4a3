package data

import (
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// blockRange is a half-open range of blocks of a chunk.
type blockRange struct{ lo, hi int64 }

// touched returns the blocks of a chunk that hold any byte of region, as rising ranges with a
// gap between any two. The chunk is box outer, row-major, with elements of size bytes; region
// must lie in it.
func touched(outer, region tensor.Box, size int64) []blockRange {
	lo, hi := tensor.Span(outer, region)
	if lo == hi {
		return nil
	}
	// The region is rows of piece bytes. From the inside out, rows with less
	// than a block between them touch every block from the first row to the
	// last, so they count as one; what remains are rows with gaps worth
	// looking at.
	strides := make([]int64, len(outer.Sizes))
	stride := size
	for d := len(strides) - 1; d >= 0; d-- {
		strides[d] = stride
		stride *= outer.Sizes[d]
	}
	piece := size
	inner := len(strides)
	for inner > 0 {
		d := inner - 1
		if n := region.Sizes[d]; n > 1 {
			if strides[d]-piece >= checkpoint.BlockSize {
				break
			}
			piece += strides[d] * (n - 1)
		}
		inner--
	}
	var out []blockRange
	at := make([]int64, inner)
	start := lo * size
	for {
		pos := start
		for d := range at {
			pos += at[d] * strides[d]
		}
		r := blockRange{pos / checkpoint.BlockSize, (pos + piece + checkpoint.BlockSize - 1) / checkpoint.BlockSize}
		if last := len(out) - 1; last >= 0 && r.lo <= out[last].hi {
			out[last].hi = max(out[last].hi, r.hi)
		} else {
			out = append(out, r)
		}
		d := inner - 1
		for ; d >= 0; d-- {
			if at[d]++; at[d] < region.Sizes[d] {
				break
			}
			at[d] = 0
		}
		if d < 0 {
			return out
		}
	}
}

// merge returns the union of ranges, rising and with a gap between any two.
func merge(ranges []blockRange) []blockRange {
	slices.SortFunc(ranges, func(a, b blockRange) int {
		if a.lo != b.lo {
			return int(a.lo - b.lo)
		}
		return int(a.hi - b.hi)
	})
	out := ranges[:0]
	for _, r := range ranges {
		if last := len(out) - 1; last >= 0 && r.lo <= out[last].hi {
			out[last].hi = max(out[last].hi, r.hi)
		} else {
			out = append(out, r)
		}
	}
	return out
}

// slab is a box whose elements are contiguous in the chunk.
type slab struct {
	box tensor.Box
	at  int64 // first element, counted from the start of the chunk
}

// slabs cuts the elements [lo, hi) of box outer, in row-major order, into
// boxes, at most two for each dimension and one more.
func slabs(outer tensor.Box, lo, hi int64) []slab {
	var out []slab
	// cut handles dimension d of the sub-box at prefix, whose elements begin
	// at base and have volume row in each step of d.
	var cut func(d int, prefix tensor.Box, base, lo, hi int64)
	cut = func(d int, prefix tensor.Box, base, lo, hi int64) {
		if lo >= hi {
			return
		}
		if d == len(outer.Sizes) {
			out = append(out, slab{box: prefix, at: base})
			return
		}
		row := int64(1)
		for _, n := range outer.Sizes[d+1:] {
			row *= n
		}
		within := func(from, to int64) tensor.Box {
			b := tensor.Box{Offsets: slices.Clone(prefix.Offsets), Sizes: slices.Clone(prefix.Sizes)}
			b.Offsets[d], b.Sizes[d] = outer.Offsets[d]+from, to-from
			return b
		}
		first, last := (lo-base)/row, (hi-1-base)/row // rows of the ends
		if first == last && (lo > base+first*row || hi < base+(first+1)*row) {
			cut(d+1, within(first, first+1), base+first*row, lo, hi)
			return
		}
		if start := base + first*row; lo > start {
			cut(d+1, within(first, first+1), start, lo, start+row)
			first++
		}
		whole := (hi - base) / row
		if whole > first {
			out = append(out, slab{box: within(first, whole), at: base + first*row})
		}
		if start := base + whole*row; hi > start {
			cut(d+1, within(whole, whole+1), start, start, hi)
		}
	}
	full := tensor.Box{Offsets: slices.Clone(outer.Offsets), Sizes: slices.Clone(outer.Sizes)}
	cut(0, full, 0, lo, hi)
	return out
}
