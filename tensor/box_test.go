package tensor_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func box(offsets, sizes []int64) tensor.Box { return tensor.Box{Offsets: offsets, Sizes: sizes} }

// shapes draws up to five dimensions, often of size 1 and sometimes of 0.
func shapes() *rapid.Generator[tensor.Shape] {
	dim := rapid.OneOf(rapid.Int64Range(1, 5), rapid.SampledFrom([]int64{0, 1, 1, 2, 7}))
	return rapid.Map(rapid.SliceOfN(dim, 0, 5), func(s []int64) tensor.Shape { return s })
}

// boxIn draws a box in outer, in the same coordinates; often a whole
// dimension, sometimes an empty one.
func boxIn(outer tensor.Box) *rapid.Generator[tensor.Box] {
	return rapid.Custom(func(t *rapid.T) tensor.Box {
		b := box(slices.Clone(outer.Offsets), slices.Clone(outer.Sizes))
		whole := rapid.Uint8().Draw(t, "whole dimensions")
		for d, n := range outer.Sizes {
			if whole>>d&1 == 1 {
				continue
			}
			lo := rapid.Int64Range(0, n).Draw(t, "lo")
			b.Offsets[d] += lo
			b.Sizes[d] = rapid.Int64Range(0, n-lo).Draw(t, "size")
		}
		return b
	})
}

// around draws a box in full that holds inner; often no larger in a dimension.
func around(full, inner tensor.Box) *rapid.Generator[tensor.Box] {
	return rapid.Custom(func(t *rapid.T) tensor.Box {
		b := box(slices.Clone(inner.Offsets), slices.Clone(inner.Sizes))
		tight := rapid.Uint8().Draw(t, "tight dimensions")
		for d, n := range full.Sizes {
			if tight>>d&1 == 0 {
				end := inner.Offsets[d] + inner.Sizes[d]
				b.Offsets[d] = rapid.Int64Range(0, inner.Offsets[d]).Draw(t, "lo")
				b.Sizes[d] = rapid.Int64Range(end, n).Draw(t, "end") - b.Offsets[d]
			}
		}
		return b
	})
}

// elements lists the coordinates in b, in row-major order.
func elements(b tensor.Box) [][]int64 {
	all := [][]int64{{}}
	for d, n := range b.Sizes {
		var next [][]int64
		for _, at := range all {
			for i := range n {
				next = append(next, append(slices.Clone(at), b.Offsets[d]+i))
			}
		}
		all = next
	}
	return all
}

// positions is the place of each element of b in row-major order, by its
// coordinates.
func positions(b tensor.Box) map[string]int64 {
	at := map[string]int64{}
	for i, e := range elements(b) {
		at[key(e)] = int64(i)
	}
	return at
}

func key(e []int64) string { return box(e, nil).Key() }

func TestIntersect(t *testing.T) {
	for name, c := range map[string]struct {
		a, b, want tensor.Box
		ok         bool
	}{
		"inside":        {box([]int64{0, 0}, []int64{4, 8}), box([]int64{1, 2}, []int64{2, 3}), box([]int64{1, 2}, []int64{2, 3}), true},
		"corner":        {box([]int64{0, 0}, []int64{4, 4}), box([]int64{3, 2}, []int64{4, 4}), box([]int64{3, 2}, []int64{1, 2}), true},
		"touching":      {box([]int64{0}, []int64{4}), box([]int64{4}, []int64{4}), tensor.Box{}, false},
		"apart":         {box([]int64{0, 0}, []int64{4, 4}), box([]int64{0, 9}, []int64{4, 1}), tensor.Box{}, false},
		"scalar":        {box(nil, nil), box(nil, nil), box([]int64{}, []int64{}), true},
		"empty inside":  {box([]int64{0}, []int64{4}), box([]int64{2}, []int64{0}), tensor.Box{}, false},
		"near overflow": {box([]int64{1<<62 - 1}, []int64{1 << 62}), box([]int64{1<<63 - 2}, []int64{1}), box([]int64{1<<63 - 2}, []int64{1}), true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, pair := range [][2]tensor.Box{{c.a, c.b}, {c.b, c.a}} {
				got, ok := pair[0].Intersect(pair[1])
				if ok != c.ok || !got.Equal(c.want) {
					t.Errorf("%v and %v meet in %v, %v, want %v, %v", pair[0], pair[1], got, ok, c.want, c.ok)
				}
			}
		})
	}
}

func TestIntersectIsTheCommonElements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full := shapes().Draw(t, "shape").Full()
		a, b := boxIn(full).Draw(t, "a"), boxIn(full).Draw(t, "b")
		inB := positions(b)
		var want []string
		for _, e := range elements(a) {
			if _, ok := inB[key(e)]; ok {
				want = append(want, key(e))
			}
		}
		both, ok := a.Intersect(b)
		if ok != (len(want) > 0) {
			t.Fatalf("%v and %v: %v, and %d common elements", a, b, ok, len(want))
		}
		if !ok {
			return
		}
		var got []string
		for _, e := range elements(both) {
			got = append(got, key(e))
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%v and %v meet in %v, which has not their common elements", a, b, both)
		}
		if both.Volume() != int64(len(want)) || both.Empty() {
			t.Fatalf("%v has volume %d and empty %v, it has %d elements", both, both.Volume(), both.Empty(), len(want))
		}
	})
}

// The cases are written as start, end and full size, as PyTorch's are.
func TestRun(t *testing.T) {
	for _, c := range []struct {
		start, end, full []int64
		want             int64
	}{
		{[]int64{2}, []int64{5}, []int64{10}, 3},
		{[]int64{1, 0}, []int64{3, 4}, []int64{6, 4}, 8},
		{[]int64{1, 2}, []int64{3, 4}, []int64{6, 8}, 2},
		{[]int64{1, 0, 0}, []int64{3, 2, 4}, []int64{5, 2, 4}, 16},
		{[]int64{2, 3}, []int64{3, 4}, []int64{6, 8}, 1},
		{[]int64{1, 0}, []int64{3, 2}, []int64{4, 8}, 2},
		{[]int64{0, 0}, []int64{2, 3}, []int64{6, 10}, 3},
		{nil, nil, nil, 1},
		{[]int64{0, 0}, []int64{4, 8}, []int64{4, 8}, 32},
		{[]int64{1, 0, 0}, []int64{2, 1, 4}, []int64{3, 5, 4}, 4},
		{[]int64{1, 3}, []int64{1, 5}, []int64{6, 8}, 0},
		{[]int64{0, 3}, []int64{6, 3}, []int64{6, 8}, 0},
	} {
		region := box(c.start, make([]int64, len(c.start)))
		for d := range c.start {
			region.Sizes[d] = c.end[d] - c.start[d]
		}
		if got := tensor.Run(tensor.Shape(c.full).Full(), region); got != c.want {
			t.Errorf("%v of %v: %d contiguous elements, want %d", region, c.full, got, c.want)
		}
	}
}

// A run is contiguous: consecutive elements of the region are
// consecutive in the box, within each piece of that many. And a span has the
// first and the last of them.
func TestRunAndSpanAgreeWithTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full := shapes().Draw(t, "shape").Full()
		region := boxIn(full).Draw(t, "region")
		outer := around(full, region).Draw(t, "outer")
		at, in := positions(outer), elements(region)
		run := tensor.Run(outer, region)
		lo, hi := tensor.Span(outer, region)
		if len(in) == 0 {
			if run != 0 || lo != 0 || hi != 0 {
				t.Fatalf("empty region %v of %v: run %d, span %d to %d", region, outer, run, lo, hi)
			}
			return
		}
		if first, last := at[key(in[0])], at[key(in[len(in)-1])]; lo != first || hi != last+1 {
			t.Fatalf("region %v of %v has the span %d to %d, want %d to %d", region, outer, lo, hi, first, last+1)
		}
		if run < 1 || int64(len(in))%run != 0 {
			t.Fatalf("region %v of %v has %d elements in runs of %d", region, outer, len(in), run)
		}
		for i := 1; i < len(in); i++ {
			if next := at[key(in[i])] == at[key(in[i-1])]+1; !next && int64(i)%run != 0 {
				t.Fatalf("region %v of %v: element %d does not follow its predecessor, runs have %d", region, outer, i, run)
			}
		}
	})
}

// CopyRegion does what copying one element after the other does, and touches
// nothing else.
func TestCopyRegion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full := shapes().Draw(t, "shape").Full()
		region := boxIn(full).Draw(t, "region")
		srcBox, dstBox := around(full, region).Draw(t, "src"), around(full, region).Draw(t, "dst")
		size := rapid.SampledFrom([]int{1, 2, 3, 8, 16}).Draw(t, "size")

		src := make([]byte, srcBox.Volume()*int64(size))
		for i := range src {
			src[i] = byte(i*7 + i/251)
		}
		got := bytes.Repeat([]byte{0xee}, int(dstBox.Volume())*size)
		want := bytes.Clone(got)
		from, to := positions(srcBox), positions(dstBox)
		for _, e := range elements(region) {
			for b := range int64(size) {
				want[to[key(e)]*int64(size)+b] = src[from[key(e)]*int64(size)+b]
			}
		}
		tensor.CopyRegion(got, dstBox, src, srcBox, region, size)
		if !bytes.Equal(got, want) {
			t.Fatalf("copy %v from %v to %v, %d bytes an element:\ngot  %x\nwant %x", region, srcBox, dstBox, size, got, want)
		}
	})
}

func TestBoxKeyIsUnique(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		full := shapes().Draw(t, "shape").Full()
		a, b := boxIn(full).Draw(t, "a"), boxIn(full).Draw(t, "b")
		if (a.Key() == b.Key()) != a.Equal(b) {
			t.Fatalf("%v and %v have the keys %s and %s", a, b, a.Key(), b.Key())
		}
	})
	if got := box([]int64{0, 8}, []int64{4, 8}).Key(); got != "0,8+4,8" {
		t.Errorf("key %q", got)
	}
	if got := box([]int64{0, 8}, []int64{4, 8}).String(); got != "[0 8]+[4 8]" {
		t.Errorf("string %q", got)
	}
}
