// Package blocks computes with the blocks of one chunk, of [checkpoint.BlockSize] bytes each but
// the last: which of them a region needs, and which boxes some of its elements are. Lists of
// ranges are rising, and their ranges do not overlap.
package blocks

import (
	"slices"
	"sort"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Range is a half-open range of blocks of a chunk.
type Range struct{ Lo, Hi int64 }

// Touched returns the blocks of a chunk that hold any byte of region, as rising ranges with a
// gap between any two. The chunk is box outer, row-major, with elements of size bytes; region
// must lie in it.
func Touched(outer, region tensor.Box, size int64) []Range {
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
	var out []Range
	at := make([]int64, inner)
	start := lo * size
	for {
		pos := start
		for d := range at {
			pos += at[d] * strides[d]
		}
		r := Range{pos / checkpoint.BlockSize, (pos + piece + checkpoint.BlockSize - 1) / checkpoint.BlockSize}
		if last := len(out) - 1; last >= 0 && r.Lo <= out[last].Hi {
			out[last].Hi = max(out[last].Hi, r.Hi)
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

// Merge returns the union of ranges, rising and with a gap between any two.
func Merge(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int {
		if a.Lo != b.Lo {
			return int(a.Lo - b.Lo)
		}
		return int(a.Hi - b.Hi)
	})
	out := ranges[:0]
	for _, r := range ranges {
		if last := len(out) - 1; last >= 0 && r.Lo <= out[last].Hi {
			out[last].Hi = max(out[last].Hi, r.Hi)
		} else {
			out = append(out, r)
		}
	}
	return out
}

// Slab is a box whose elements are contiguous in the chunk.
type Slab struct {
	Box tensor.Box
	At  int64 // first element, counted from the start of the chunk
}

// Slabs cuts the elements [lo, hi) of box outer, in row-major order, into
// boxes, at most two for each dimension and one more.
func Slabs(outer tensor.Box, lo, hi int64) []Slab {
	var out []Slab
	// cut handles dimension d of the sub-box at prefix, whose elements begin
	// at base and have volume row in each step of d.
	var cut func(d int, prefix tensor.Box, base, lo, hi int64)
	cut = func(d int, prefix tensor.Box, base, lo, hi int64) {
		if lo >= hi {
			return
		}
		if d == len(outer.Sizes) {
			out = append(out, Slab{Box: prefix, At: base})
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
			out = append(out, Slab{Box: within(first, whole), At: base + first*row})
		}
		if start := base + whole*row; hi > start {
			cut(d+1, within(whole, whole+1), start, start, hi)
		}
	}
	full := tensor.Box{Offsets: slices.Clone(outer.Offsets), Sizes: slices.Clone(outer.Sizes)}
	cut(0, full, 0, lo, hi)
	return out
}

// Clip returns the parts of rising ranges that lie between lo and hi, counted from lo.
func Clip(ranges []Range, lo, hi int64) (out []Range) {
	at := sort.Search(len(ranges), func(i int) bool { return ranges[i].Hi > lo })
	for ; at < len(ranges) && ranges[at].Lo < hi; at++ {
		out = append(out, Range{max(ranges[at].Lo, lo) - lo, min(ranges[at].Hi, hi) - lo})
	}
	return out
}

// Intersect returns what two lists of rising ranges share.
func Intersect(a, b []Range) (out []Range) {
	for len(a) > 0 && len(b) > 0 {
		if lo, hi := max(a[0].Lo, b[0].Lo), min(a[0].Hi, b[0].Hi); lo < hi {
			out = append(out, Range{lo, hi})
		}
		if a[0].Hi < b[0].Hi {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// Subtract returns what rising ranges have and others have not.
func Subtract(from, without []Range) (out []Range) {
	for _, r := range from {
		for _, w := range without {
			if w.Hi <= r.Lo || w.Lo >= r.Hi {
				continue
			}
			if r.Lo < w.Lo {
				out = append(out, Range{r.Lo, w.Lo})
			}
			r.Lo = w.Hi
			if r.Lo >= r.Hi {
				break
			}
		}
		if r.Lo < r.Hi {
			out = append(out, r)
		}
	}
	return out
}
