package blocks

import (
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// TestTouched compares the blocks that a region touches with those of its
// elements one by one.
func TestTouched(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outer, region := drawBoxes(t)
		// Large elements make rows of many blocks from few elements.
		size := rapid.SampledFrom([]int64{1, 8, 1000, 30_000, checkpoint.BlockSize, checkpoint.BlockSize + 1, 200_000}).Draw(t, "size")
		want := map[int64]bool{}
		each(outer, region, func(pos int64) {
			for b := pos * size / checkpoint.BlockSize; b <= ((pos+1)*size-1)/checkpoint.BlockSize; b++ {
				want[b] = true
			}
		})
		got := Touched(outer, region, size)
		n := 0
		for i, r := range got {
			if r.Lo >= r.Hi || i > 0 && got[i-1].Hi >= r.Lo {
				t.Fatalf("ranges %v", got)
			}
			for b := r.Lo; b < r.Hi; b++ {
				if n++; !want[b] {
					t.Fatalf("%v of %v × %d: block %d is not touched, ranges %v", region, outer, size, b, got)
				}
			}
		}
		if n != len(want) {
			t.Fatalf("%v of %v × %d: ranges %v, want blocks %v", region, outer, size, got, want)
		}
	})
}

// TestSlabs compares the boxes of a range of elements with the elements.
func TestSlabs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outer, _ := drawBoxes(t)
		volume := outer.Volume()
		lo := rapid.Int64Range(0, volume).Draw(t, "lo")
		hi := rapid.Int64Range(lo, volume).Draw(t, "hi")
		next := lo
		got := Slabs(outer, lo, hi)
		for _, s := range got {
			if s.At != next {
				t.Fatalf("[%d, %d) of %v: slab %v at %d, want it at %d", lo, hi, outer, s.Box, s.At, next)
			}
			each(outer, s.Box, func(pos int64) {
				if pos != next {
					t.Fatalf("[%d, %d) of %v: slab %v has element %d, want %d", lo, hi, outer, s.Box, pos, next)
				}
				next++
			})
		}
		if next != hi || len(got) > 2*len(outer.Sizes)+1 {
			t.Fatalf("[%d, %d) of %v: %d slabs end at %d", lo, hi, outer, len(got), next)
		}
	})
}

func drawBoxes(t *rapid.T) (outer, region tensor.Box) {
	for d := range rapid.IntRange(0, 4).Draw(t, "dimensions") {
		n := rapid.Int64Range(1, 7).Draw(t, fmt.Sprint("size ", d))
		off := rapid.Int64Range(0, n-1).Draw(t, fmt.Sprint("region offset ", d))
		size := rapid.Int64Range(1, n-off).Draw(t, fmt.Sprint("region size ", d))
		base := rapid.Int64Range(0, 5).Draw(t, fmt.Sprint("offset ", d))
		outer.Offsets, outer.Sizes = append(outer.Offsets, base), append(outer.Sizes, n)
		region.Offsets, region.Sizes = append(region.Offsets, base+off), append(region.Sizes, size)
	}
	return outer, region
}

// each visits the elements of region, by their position in outer.
func each(outer, region tensor.Box, visit func(pos int64)) {
	at := slices.Clone(region.Offsets)
	for range region.Volume() {
		pos := int64(0)
		for d := range at {
			pos = pos*outer.Sizes[d] + at[d] - outer.Offsets[d]
		}
		visit(pos)
		for d := len(at) - 1; d >= 0; d-- {
			if at[d]++; at[d] < region.Offsets[d]+region.Sizes[d] {
				break
			}
			at[d] = region.Offsets[d]
		}
	}
}
