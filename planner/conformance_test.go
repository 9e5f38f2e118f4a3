package planner_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// The cases of PyTorch's own tests of torch.distributed.checkpoint. Where this
// package differs on purpose, the case is marked "ours".
//
// A box is offset+size, or offsets+sizes as (0,2)+(4,6). A read is
// target ← [chunk]@place, lengths; places count from the wanted box and from
// the chunk.

// Rank 1 of 4 saves a tensor that all have, a list, and its part of a sharded
// tensor of 4 × 8.
func TestConformanceLocalPlan(t *testing.T) {
	locals := fourRanks()
	got, err := checkpoint.DecodeLocal(checkpoint.EncodeLocal(locals[1]))
	if err != nil {
		t.Fatal(err)
	}
	var items []string
	for _, it := range got.Items {
		if it.Value {
			items = append(items, fmt.Sprintf("%s: value", it.Shard.FQN))
		} else {
			items = append(items, fmt.Sprintf("%s: %v of %v", it.Shard.FQN, it.Shard.Box, it.Shard.Global))
		}
	}
	want := []string{"tensor: [0]+[10] of [10]", "list: value", "sharded: [8]+[8] of [32]"}
	if got.Rank != 1 || !slices.Equal(items, want) {
		t.Errorf("rank %d plans %q, want rank 1 and %q", got.Rank, items, want)
	}
}

func fourRanks() (locals []checkpoint.Local) {
	whole := tensor.Shape{10}
	for rank := range 4 {
		locals = append(locals, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{
			item(shard("tensor", whole, whole.Full())), value("list", 20, false),
			item(shard("sharded", tensor.Shape{32}, part(8*int64(rank), 8))),
		}})
	}
	return locals
}

// Four plans come out of four, each shorter than it was, and what a rank
// writes is found in the layout: chunks lie there in (rank, item) order.
func TestConformanceGlobalPlan(t *testing.T) {
	locals := fourRanks()
	layout := global(t, locals)
	shares := layout.Shares()
	next := map[string]int{} // place of the next item in the chunks of its tensor
	for _, l := range locals {
		items := layout.Items(l.Rank)
		if len(items) == 0 || len(items) >= len(l.Items) || fmt.Sprint(items) != fmt.Sprint(shares.Items(l.Rank)) {
			t.Errorf("rank %d writes %v of %v", l.Rank, items, l.Items)
		}
		for _, it := range items {
			if it.Value {
				continue
			}
			at := slices.IndexFunc(layout.Tensors, func(t checkpoint.Tensor) bool { return t.FQN == it.Shard.FQN })
			c := layout.Tensors[at].Chunks[next[it.Shard.FQN]]
			if c.Rank != l.Rank || !c.Box.Equal(it.Shard.Box) {
				t.Errorf("rank %d writes %v, the layout has %v there", l.Rank, it.Shard.Box, c)
			}
			next[it.Shard.FQN]++
		}
	}
	if want := map[string]int{"tensor": 1, "sharded": 4}; !maps.Equal(next, want) {
		t.Errorf("chunks are found %v, want %v", next, want)
	}
}

// A tensor of 4 elements, and what is right or wrong with a plan for it.
func TestConformanceValidation(t *testing.T) {
	four := tensor.Shape{4}
	typed := func(d tensor.DType, shape tensor.Shape, b tensor.Box) checkpoint.Item {
		s := shard("w", shape, b)
		s.DType = d
		return item(s)
	}
	ranks := func(items ...checkpoint.Item) (locals []checkpoint.Local) {
		for rank, it := range items {
			locals = append(locals, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{it}})
		}
		return locals
	}
	for name, c := range map[string]struct {
		locals []checkpoint.Local
		want   string
	}{
		"0+1, 1+1, 2+1, 3+1":        {spread(four, part(0, 1), part(1, 1), part(2, 1), part(3, 1)), "no error"},
		"0+2, 1+2 overlap":          {spread(four, part(0, 2), part(1, 2)), `tensor "w": box [0]+[2] of rank 0 and box [1]+[2] of rank 1 overlap in [1]+[1]` + "\n" + `tensor "w": no rank saves [3]+[1] of shape [4]`},
		"0+2 of two plans":          {parts(four, []tensor.Box{part(0, 2)}, nil), `tensor "w": no rank saves [2]+[2] of shape [4]`},
		"0+2 of one plan":           {spread(four, part(0, 2)), "no error"},
		"2+4 is out of bounds":      {spread(four, part(0, 2), part(2, 4)), `rank 1: tensor "w": box [2]+[4] is out of bounds of shape [4] in dimension 0`},
		"ours: empty in another":    {spread(four, part(0, 4), part(2, 0)), "no error"},
		"ours: dtypes disagree":     {ranks(typed(tensor.Float32, four, part(0, 2)), typed(tensor.BFloat16, four, part(2, 2))), `tensor "w" has dtype float32 on rank 0 and bfloat16 on rank 1`},
		"ours: shapes disagree":     {ranks(typed(tensor.Int8, four, part(0, 4)), typed(tensor.Int8, tensor.Shape{5}, part(4, 1))), `tensor "w" has shape [4] on rank 0 and [5] on rank 1`},
		"0 dimensions, on 3 ranks":  {spread(nil, box(nil, nil), box(nil, nil), box(nil, nil)), "no error"},
		"ours: 0 and 1 dimensions":  {ranks(typed(tensor.Int8, nil, box(nil, nil)), typed(tensor.Int8, tensor.Shape{1}, part(0, 1))), `tensor "w" has shape [] on rank 0 and [1] on rank 1`},
		"ours: replicas of a shard": {spread(four, part(0, 2), part(2, 2), part(0, 2), part(2, 2)), "no error"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := planner.Global(c.locals)
			problems(t, err, c.want)
		})
	}
}

// showReads writes reads as the cases are written.
func showReads(reads []checkpoint.Read, want tensor.Box) string {
	var all []string
	for _, r := range reads {
		var dest, from []string
		for d, at := range r.Region.Offsets {
			dest = append(dest, fmt.Sprint(at-want.Offsets[d]))
			from = append(from, fmt.Sprint(at-r.Chunk.Offsets[d]))
		}
		all = append(all, fmt.Sprintf("%s←%v@%s,%v", strings.Join(dest, " "), r.Chunk.Offsets, strings.Join(from, " "), r.Region.Sizes))
	}
	return strings.Join(all, "; ")
}

func TestConformanceReads(t *testing.T) {
	n := func(n int64) tensor.Shape { return tensor.Shape{n} }
	columns := []tensor.Box{box([]int64{0, 0}, []int64{4, 2}), box([]int64{0, 2}, []int64{4, 6})}
	for name, c := range map[string]struct {
		shape tensor.Shape
		saved []tensor.Box
		want  tensor.Box
		reads string
	}{
		"128, 8 to 4 ranks, rank 1":   {n(128), rows(n(128), 8), rows(n(128), 4)[1], "0←[32]@0,[16]; 16←[48]@0,[16]"},
		"128, 4 to 8 ranks, rank 1":   {n(128), rows(n(128), 4), rows(n(128), 8)[1], "0←[0]@16,[16]"},
		"120, 4 to 3 ranks, rank 1":   {n(120), rows(n(120), 4), rows(n(120), 3)[1], "0←[30]@10,[20]; 20←[60]@0,[20]"},
		"0+8 and 8+8, want 4+7":       {n(16), []tensor.Box{part(0, 8), part(8, 8)}, part(4, 7), "0←[0]@4,[4]; 4←[8]@0,[3]"},
		"0+8 and 8+8, want 8+8":       {n(16), []tensor.Box{part(0, 8), part(8, 8)}, part(8, 8), "0←[8]@0,[8]"},
		"columns, want (2,1)+(2,6)":   {tensor.Shape{4, 8}, columns, box([]int64{2, 1}, []int64{2, 6}), "0 0←[0 0]@2 1,[2 1]; 0 1←[0 2]@2 0,[2 5]"},
		"rows, want a column":         {tensor.Shape{4, 4}, rows(tensor.Shape{4, 4}, 2), box([]int64{0, 1}, []int64{4, 1}), "0 0←[0 0]@0 1,[2 1]; 2 0←[2 0]@0 1,[2 1]"},
		"rows 2,2,1 to 3,2, rank 1":   {tensor.Shape{5, 6}, rows(tensor.Shape{5, 6}, 3), rows(tensor.Shape{5, 6}, 2)[1], "0 0←[2 0]@1 0,[1 6]; 1 0←[4 0]@0 0,[1 6]"},
		"empty part at the end, 2+0":  {n(2), rows(n(2), 3), part(2, 0), ""},
		"empty part in the middle":    {n(4), []tensor.Box{part(0, 4)}, part(2, 0), ""},
		"empty tensor":                {n(0), []tensor.Box{part(0, 0)}, part(0, 0), ""},
		"0 dimensions, empty offset":  {nil, []tensor.Box{box(nil, nil)}, box(nil, nil), "←[]@,[]"},
		"16 with 0+4 only, want 1+2":  {n(16), []tensor.Box{part(0, 4)}, part(1, 2), "0←[0]@1,[2]"},
		"ours: 0+4 only, want 0+16":   {n(16), []tensor.Box{part(0, 4)}, part(0, 16), `tensor "w": the checkpoint does not cover [4]+[12] of the wanted [0]+[16]`},
		"ours: 0+4 only, want 8+4":    {n(16), []tensor.Box{part(0, 4)}, part(8, 4), `tensor "w": the checkpoint does not cover [8]+[4] of the wanted [8]+[4]`},
		"ours: want beyond the shape": {n(16), []tensor.Box{part(0, 16)}, part(12, 8), `tensor "w": box [12]+[8] is out of bounds of shape [16] in dimension 0`},
	} {
		t.Run(name, func(t *testing.T) {
			layout := global(t, spread(c.shape, c.saved...))
			wants := []checkpoint.Want{{Shard: shard("w", c.shape, c.want)}}
			reads, err := planner.NewLoader(layout).Load(wants)
			if strings.HasPrefix(c.reads, "tensor") {
				problems(t, err, c.reads)
				return
			}
			if got := showReads(reads, c.want); err != nil || got != c.reads {
				t.Errorf("reads %s, %v, want %s", got, err, c.reads)
			}
			write(t, layout, len(c.saved)).load(t, planner.NewLoader(layout), wants)
		})
	}
}

func TestConformanceShardZero(t *testing.T) {
	for _, c := range []struct {
		shape tensor.Shape
		want  string
	}{
		{tensor.Shape{5, 6}, "[[0 0]+[2 6] [2 0]+[2 6] [4 0]+[1 6]]"},
		{tensor.Shape{2}, "[[0]+[1] [1]+[1] [2]+[0]]"},
	} {
		if got := fmt.Sprint(rows(c.shape, 3)); got != c.want {
			t.Errorf("%v is placed as %s, want %s", c.shape, got, c.want)
		}
		for rank, b := range rows(c.shape, 3) {
			if got := planner.Rows(c.shape, 3, rank); !got.Equal(b) {
				t.Errorf("rank %d of %v has %v, want %v", rank, c.shape, got, b)
			}
		}
	}
}

// pairs loads every ordered pair of layouts of a shape, each a list of local
// plans that is also what its ranks want.
func pairs(t *testing.T, shape tensor.Shape, layouts map[string][]checkpoint.Local) {
	for savedAs, saved := range layouts {
		layout := global(t, saved)
		stored, p := write(t, layout, len(saved)), planner.NewLoader(layout)
		for wantedAs, wanted := range layouts {
			t.Run(fmt.Sprintf("%v %s to %s", shape, savedAs, wantedAs), func(t *testing.T) {
				for _, l := range wanted {
					var wants []checkpoint.Want
					for _, it := range l.Items {
						wants = append(wants, checkpoint.Want{Shard: it.Shard})
					}
					stored.load(t, p, wants)
				}
			})
		}
	}
}

func TestConformanceLayouts(t *testing.T) {
	shape := tensor.Shape{10, 20}
	quarter := func(i, j int64) tensor.Box { return box([]int64{5 * i, 10 * j}, []int64{5, 10}) }
	bands := func(heights ...int64) (boxes []tensor.Box) {
		at := int64(0)
		for _, h := range heights {
			boxes = append(boxes, box([]int64{at, 0}, []int64{h, 20}))
			at += h
		}
		return boxes
	}
	five := bands(2, 1, 3, 3, 1)
	pairs(t, shape, map[string][]checkpoint.Local{
		"2 chunks":                 spread(shape, bands(5, 5)...),
		"4 chunks on r0,r1,r1,r0":  parts(shape, []tensor.Box{quarter(0, 0), quarter(1, 1)}, []tensor.Box{quarter(0, 1), quarter(1, 0)}),
		"rows 2,1,3,3,1":           parts(shape, []tensor.Box{five[0], five[2], five[4]}, []tensor.Box{five[1], five[3]}),
		"rows 8,2":                 spread(shape, bands(8, 2)...),
		"columns 7,13":             spread(shape, box([]int64{0, 0}, []int64{10, 7}), box([]int64{0, 7}, []int64{10, 13})),
		"whole on both":            spread(shape, shape.Full(), shape.Full()),
		"rows on one, none on two": spread(shape, shape.Full(), box([]int64{10, 0}, []int64{0, 20})),
	})
	pairs(t, tensor.Shape{32}, map[string][]checkpoint.Local{
		"8,24": spread(tensor.Shape{32}, part(0, 8), part(8, 24)), "10,22": spread(tensor.Shape{32}, part(0, 10), part(10, 22)),
	})
}

// mesh places a tensor on a mesh of ranks: along each dimension of the mesh it
// is sharded in a dimension of its own, or, for -1, replicated.
func mesh(shape tensor.Shape, dims, placement []int) []checkpoint.Local {
	places := []tensor.Box{shape.Full()}
	for d, n := range dims {
		var next []tensor.Box
		for _, b := range places {
			if placement[d] < 0 {
				next = append(next, slices.Repeat([]tensor.Box{b}, n)...)
			} else {
				next = append(next, split(b, placement[d], n)...)
			}
		}
		places = next
	}
	return spread(shape, places...)
}

func TestConformanceMeshes(t *testing.T) {
	shape, layouts := tensor.Shape{4, 4}, map[string][]checkpoint.Local{}
	for _, dims := range [][]int{{2}, {3}, {4}, {2, 2}, {3, 2}} {
		choices := 1
		for range dims {
			choices *= 3
		}
		for choice := range choices {
			name, placement := fmt.Sprint(dims), make([]int, len(dims))
			for d := range dims {
				placement[d] = choice%3 - 1
				choice /= 3
				name += []string{" Replicate", " Shard(0)", " Shard(1)"}[placement[d]+1]
			}
			layouts[name] = mesh(shape, dims, placement)
		}
	}
	pairs(t, shape, layouts)
}

// A block of a tensor is contiguous in pieces of so many elements.
func TestConformanceContiguity(t *testing.T) {
	for _, c := range []struct {
		index, sub, full []int64
		want             int64
	}{
		{[]int64{2}, []int64{5}, []int64{10}, 3},
		{[]int64{1, 0}, []int64{3, 4}, []int64{6, 4}, 8},
		{[]int64{1, 2}, []int64{3, 4}, []int64{6, 8}, 2},
		{[]int64{1, 0, 0}, []int64{3, 2, 4}, []int64{5, 2, 4}, 16},
		{[]int64{2, 3}, []int64{3, 4}, []int64{6, 8}, 1},
		{[]int64{1, 0}, []int64{3, 2}, []int64{4, 8}, 2},
		{[]int64{0, 0}, []int64{2, 3}, []int64{6, 10}, 3},
	} {
		region := box(c.index, make([]int64, len(c.sub)))
		for d := range c.sub {
			region.Sizes[d] = c.sub[d] - c.index[d] // the second list is where the block ends
		}
		if got := tensor.Run(tensor.Shape(c.full).Full(), region); got != c.want {
			t.Errorf("%v to %v of %v is contiguous in pieces of %d, want %d", c.index, c.sub, c.full, got, c.want)
		}
	}
}
