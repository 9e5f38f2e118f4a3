package tensor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Box is an axis-aligned part of a tensor. In dimension d it covers the half-open range
// [Offsets[d], Offsets[d]+Sizes[d]), in elements. Both slices have one number per dimension.
type Box struct {
	Offsets []int64 `json:"offsets"`
	Sizes   []int64 `json:"sizes"`
}

// Validate returns an error for a box outside shape.
func (b Box) Validate(shape Shape) error {
	if len(b.Offsets) != len(shape) || len(b.Sizes) != len(shape) {
		return fmt.Errorf("box %v has not the %d dimensions of shape %v", b, len(shape), shape)
	}
	for d, size := range b.Sizes {
		off := b.Offsets[d]
		if off < 0 || size < 0 || off > shape[d] || size > shape[d]-off {
			return fmt.Errorf("box %v is out of bounds of shape %v in dimension %d", b, shape, d)
		}
	}
	return nil
}

// Volume returns the number of elements; 1 for the box of a scalar.
func (b Box) Volume() int64 { return Shape(b.Sizes).Volume() }

// Empty reports whether the box has no elements.
func (b Box) Empty() bool { return slices.Contains(b.Sizes, 0) }

// Equal reports whether both boxes cover the same range in each dimension.
func (b Box) Equal(c Box) bool {
	return slices.Equal(b.Offsets, c.Offsets) && slices.Equal(b.Sizes, c.Sizes)
}

// Intersect returns the box that lies in both, and whether it has any element. The boxes must
// have the same number of dimensions.
func (b Box) Intersect(c Box) (Box, bool) {
	for d := range b.Sizes { // most boxes of a tensor do not overlap: allocate nothing for them
		if min(b.Offsets[d]+b.Sizes[d], c.Offsets[d]+c.Sizes[d]) <= max(b.Offsets[d], c.Offsets[d]) {
			return Box{}, false
		}
	}
	out := Box{Offsets: make([]int64, len(b.Sizes)), Sizes: make([]int64, len(b.Sizes))}
	for d := range b.Sizes {
		lo := max(b.Offsets[d], c.Offsets[d])
		hi := min(b.Offsets[d]+b.Sizes[d], c.Offsets[d]+c.Sizes[d])
		out.Offsets[d], out.Sizes[d] = lo, hi-lo
	}
	return out, true
}

// String formats the box as offsets+sizes, such as "[0 8]+[4 8]".
func (b Box) String() string {
	return fmt.Sprintf("%v+%v", b.Offsets, b.Sizes)
}

// Key returns a compact unique form, usable as a map key: "0,8+4,8".
func (b Box) Key() string {
	var s strings.Builder
	list := func(ns []int64) {
		for i, n := range ns {
			if i > 0 {
				s.WriteByte(',')
			}
			s.WriteString(strconv.FormatInt(n, 10))
		}
	}
	list(b.Offsets)
	s.WriteByte('+')
	list(b.Sizes)
	return s.String()
}

// Run returns the number of elements of region that are contiguous in row-major order of box
// outer: the largest piece that one copy can move. region must lie in outer. An empty region
// has 0.
func Run(outer, region Box) int64 {
	run := int64(1)
	for d := len(region.Sizes) - 1; d >= 0; d-- {
		run *= region.Sizes[d]
		if region.Sizes[d] != outer.Sizes[d] {
			break
		}
	}
	if region.Empty() {
		return 0
	}
	return run
}

// index returns the position of the element at global coordinates at, counted in elements
// from the start of box b in row-major order.
func (b Box) index(at []int64) int64 {
	pos := int64(0)
	for d := range at {
		pos = pos*b.Sizes[d] + at[d] - b.Offsets[d]
	}
	return pos
}

// Span returns the smallest half-open range of elements, in row-major order of box outer,
// that holds all of region. An empty region gives 0, 0.
func Span(outer, region Box) (lo, hi int64) {
	if region.Empty() {
		return 0, 0
	}
	last := make([]int64, len(region.Sizes))
	for d := range last {
		last[d] = region.Offsets[d] + region.Sizes[d] - 1
	}
	return outer.index(region.Offsets), outer.index(last) + 1
}

// CopyRegion copies the elements of region from src to dst. src holds the
// box srcBox and dst the box dstBox, both row-major with elements of size
// bytes. region must lie in both boxes; boxes and region are in coordinates
// of the same tensor.
func CopyRegion(dst []byte, dstBox Box, src []byte, srcBox, region Box, size int) {
	n := int64(size)
	pieces(dstBox, srcBox, region, func(to, from, run int64) {
		copy(dst[to*n:(to+run)*n], src[from*n:(from+run)*n])
	})
}

// pieces calls do for each part of region that is contiguous in both boxes, with its
// beginning in each and its length, in elements. The boxes and region are in coordinates of
// the same tensor.
func pieces(a, b, region Box, do func(inA, inB, n int64)) {
	if region.Empty() {
		return
	}
	// The inner piece is contiguous on both sides; the outer dimensions advance like an
	// odometer.
	run := min(Run(a, region), Run(b, region))
	inner := len(region.Sizes) // first dimension that lies wholly in the piece
	for volume := int64(1); inner > 0 && volume*region.Sizes[inner-1] <= run; inner-- {
		volume *= region.Sizes[inner-1]
	}
	at := slices.Clone(region.Offsets)
	for {
		do(a.index(at), b.index(at), run)
		d := inner - 1
		for ; d >= 0; d-- {
			at[d]++
			if at[d] < region.Offsets[d]+region.Sizes[d] {
				break
			}
			at[d] = region.Offsets[d]
		}
		if d < 0 {
			return
		}
	}
}
