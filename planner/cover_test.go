package planner_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// The result does not depend on the method of search: a tensor is refused if and only if some
// element has no chunk, or two.
func TestCoverIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shape := shapes().Draw(t, "shape")
		boxes := splits(t, shape)
		switch n := len(boxes); rapid.IntRange(0, 3).Draw(t, "change") {
		case 0:
			boxes = slices.Delete(boxes, n-1, n)
		case 1:
			b := boxes[rapid.IntRange(0, n-1).Draw(t, "moved")]
			for d := range b.Offsets {
				b.Offsets[d] = rapid.Int64Range(0, shape[d]-b.Sizes[d]).Draw(t, "to")
			}
		}
		seen := map[string]bool{}
		counts := make([]int, max(shape.Volume(), 1))
		var locals []checkpoint.Local
		for rank, b := range boxes {
			locals = append(locals, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{item(shard("w", shape, b))}})
			if seen[fmt.Sprint(b)] || b.Empty() {
				continue
			}
			seen[fmt.Sprint(b)] = true
			for at := range counts {
				left, in := int64(at), true
				for d := len(shape) - 1; d >= 0; d-- {
					x := left % shape[d]
					left /= shape[d]
					in = in && x >= b.Offsets[d] && x < b.Offsets[d]+b.Sizes[d]
				}
				if in {
					counts[at]++
				}
			}
		}
		locals = append(locals, checkpoint.Local{Rank: len(boxes)}, checkpoint.Local{Rank: len(boxes) + 1})
		bad := len(boxes) > 0 && shape.Volume() > 0 && slices.ContainsFunc(counts, func(n int) bool { return n != 1 })
		if _, err := planner.Global(locals); (err != nil) != bad {
			t.Fatalf("boxes %v of shape %v: %v, and elements are covered %v times", boxes, shape, err, counts)
		}
	})
}

// Grids in any order of dimensions, with and without equal cells, and what
// has replicas, are found whole; one box that is moved is found out.
func TestCoverOfLargeGrids(t *testing.T) {
	edges := func(n, parts int64, even bool) []int64 {
		out := []int64{0}
		for i := int64(1); i < parts; i++ {
			at := i * n / parts
			if !even {
				at += i % 3
			}
			out = append(out, at)
		}
		return append(out, n)
	}
	for name, c := range map[string]struct {
		parts []int64
		even  bool
	}{
		"rows": {[]int64{900, 1, 1}, true}, "uneven rows": {[]int64{900, 1, 1}, false},
		"columns": {[]int64{1, 1, 900}, true}, "blocks": {[]int64{30, 1, 30}, true},
		"uneven blocks": {[]int64{30, 1, 30}, false}, "cubes": {[]int64{9, 10, 10}, false},
	} {
		t.Run(name, func(t *testing.T) {
			shape := tensor.Shape{9000, 9000, 9000}
			x, y, z := edges(9000, c.parts[0], c.even), edges(9000, c.parts[1], c.even), edges(9000, c.parts[2], c.even)
			var locals []checkpoint.Local
			for k := range len(z) - 1 {
				for j := range len(y) - 1 {
					for i := range len(x) - 1 {
						b := box([]int64{x[i], y[j], z[k]}, []int64{x[i+1] - x[i], y[j+1] - y[j], z[k+1] - z[k]})
						locals = append(locals, checkpoint.Local{Rank: len(locals), Items: []checkpoint.Item{item(shard("w", shape, b))}})
					}
				}
			}
			count := len(locals)
			for _, l := range locals[:count:count] {
				locals = append(locals, checkpoint.Local{Rank: len(locals), Items: l.Items})
			}
			if got := global(t, locals); len(got.Tensors[0].Chunks) != count {
				t.Errorf("%d boxes of %d are stored", len(got.Tensors[0].Chunks), count)
			}
			locals = locals[:count]
			locals[500].Items = locals[501].Items
			if _, err := planner.Global(locals); err == nil {
				t.Error("a hole was not found")
			}
		})
	}
}

// The problems of a plan in which all boxes overlap, or in which every other box is missing,
// are reported in a few lines.
func TestCoverFindsFew(t *testing.T) {
	const n = 3000
	shape := tensor.Shape{3*n + 2, 2}
	for name, c := range map[string]struct {
		step, size int64
		tensors    int
		want       string
		most       int
	}{
		"overlaps":           {1, n, 1, "more of its 3000 boxes overlap", 30},
		"holes":              {3, 2, 1, "more holes", 30},
		"overlaps of many":   {1, 30, 200, "more problems", 110},
		"holes in many":      {3, 2, 200, "more problems", 110},
		"overlaps and holes": {3, 4, 1, "more of its 3000 boxes overlap", 30},
	} {
		t.Run(name, func(t *testing.T) {
			locals := []checkpoint.Local{{Rank: 0}, {Rank: 1}}
			for k := range c.tensors {
				for i := range int64(n / c.tensors) {
					b := box([]int64{i * c.step, 0}, []int64{c.size, 2})
					locals[0].Items = append(locals[0].Items, item(shard(fmt.Sprint("w", k), shape, b)))
				}
			}
			made, err := planner.Global(locals)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want %q", err, c.want)
			}
			if lines := strings.Count(err.Error(), "\n") + 1; lines > c.most {
				t.Errorf("%d lines", lines)
			}
			if found := planner.Holes(made.Layout); c.step == 3 && (len(found) == 0 || len(found) > 101) && c.size == 2 {
				t.Errorf("%d holes", len(found))
			}
			if err := planner.Dedup(locals).Overlaps(made.Layout); (err != nil) != (c.size > c.step) {
				t.Errorf("overlaps: %v", err)
			}
		})
	}
}
