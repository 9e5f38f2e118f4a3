package planner_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
)

// spread is parts of a shape on as many ranks as there are boxes.
func spread(shape tensor.Shape, boxes ...tensor.Box) []plan.Local {
	var ranks [][]tensor.Box
	for _, b := range boxes {
		ranks = append(ranks, []tensor.Box{b})
	}
	return parts(shape, ranks...)
}

// rows is Shard(0) as PyTorch places it: equal parts rounded up, the last
// ones shorter or empty.
func rows(shape tensor.Shape, ranks int) []tensor.Box {
	var boxes []tensor.Box
	each := (shape[0] + int64(ranks) - 1) / int64(ranks)
	for rank := range int64(ranks) {
		b := shape.Full()
		b.Offsets[0] = min(rank*each, shape[0])
		b.Sizes[0] = min(each, shape[0]-b.Offsets[0])
		boxes = append(boxes, b)
	}
	return boxes
}

// showReads writes each read as destination←[chunk]@source, lengths; places
// are relative to the wanted box and to the chunk.
func showReads(reads []plan.Read, want tensor.Box) string {
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

func TestLoadReads(t *testing.T) {
	n := func(n int64) tensor.Shape { return tensor.Shape{n} }
	for name, c := range map[string]struct {
		shape tensor.Shape
		saved []tensor.Box
		want  tensor.Box
		reads string
	}{
		"8 to 4 ranks, rank 1":     {n(128), rows(n(128), 8), rows(n(128), 4)[1], "0←[32]@0,[16]; 16←[48]@0,[16]"},
		"4 to 8 ranks, rank 1":     {n(128), rows(n(128), 4), rows(n(128), 8)[1], "0←[0]@16,[16]"},
		"120, 4 to 3 ranks":        {n(120), rows(n(120), 4), rows(n(120), 3)[1], "0←[30]@10,[20]; 20←[60]@0,[20]"},
		"across a border":          {n(16), []tensor.Box{part(0, 8), part(8, 8)}, part(4, 7), "0←[0]@4,[4]; 4←[8]@0,[3]"},
		"the same":                 {n(16), []tensor.Box{part(0, 8), part(8, 8)}, part(8, 8), "0←[8]@0,[8]"},
		"columns":                  {tensor.Shape{4, 8}, []tensor.Box{box([]int64{0, 0}, []int64{4, 2}), box([]int64{0, 2}, []int64{4, 6})}, box([]int64{2, 1}, []int64{2, 6}), "0 0←[0 0]@2 1,[2 1]; 0 1←[0 2]@2 0,[2 5]"},
		"rows to columns":          {tensor.Shape{4, 4}, rows(tensor.Shape{4, 4}, 2), box([]int64{0, 1}, []int64{4, 1}), "0 0←[0 0]@0 1,[2 1]; 2 0←[2 0]@0 1,[2 1]"},
		"empty part":               {n(2), rows(n(2), 3), part(2, 0), ""},
		"empty part of the middle": {n(4), []tensor.Box{part(0, 4)}, part(2, 0), ""},
		"scalar":                   {nil, []tensor.Box{box(nil, nil)}, box(nil, nil), "←[]@,[]"},
	} {
		t.Run(name, func(t *testing.T) {
			layout := global(t, spread(c.shape, c.saved...))
			wants := []plan.Want{{Shard: shard("w", c.shape, c.want)}}
			reads, err := planner.NewLoader(layout).Load(wants)
			if got := showReads(reads, c.want); err != nil || got != c.reads {
				t.Errorf("reads %s, %v, want %s", got, err, c.reads)
			}
			write(t, layout, len(c.saved)).load(t, planner.NewLoader(layout), wants)
		})
	}
}

func TestShardZeroPlaces(t *testing.T) {
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
	}
}

// pairs loads every ordered pair of layouts of a shape, each a list of local
// plans that is also what its ranks want.
func pairs(t *testing.T, shape tensor.Shape, layouts map[string][]plan.Local) {
	for savedAs, saved := range layouts {
		layout := global(t, saved)
		stored := write(t, layout, len(saved))
		for wantedAs, wanted := range layouts {
			t.Run(fmt.Sprintf("%v %s to %s", shape, savedAs, wantedAs), func(t *testing.T) {
				for _, l := range wanted {
					var wants []plan.Want
					for _, it := range l.Items {
						wants = append(wants, plan.Want{Shard: it.Shard})
					}
					stored.load(t, planner.NewLoader(layout), wants)
				}
			})
		}
	}
}

func TestLoadEveryPairOfLayouts(t *testing.T) {
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
	pairs(t, shape, map[string][]plan.Local{
		"2 chunks":                 spread(shape, bands(5, 5)...),
		"4 chunks on r0,r1,r1,r0":  parts(shape, []tensor.Box{quarter(0, 0), quarter(1, 1)}, []tensor.Box{quarter(0, 1), quarter(1, 0)}),
		"rows 2,1,3,3,1":           parts(shape, []tensor.Box{five[0], five[2], five[4]}, []tensor.Box{five[1], five[3]}),
		"rows 8,2":                 spread(shape, bands(8, 2)...),
		"columns 7,13":             spread(shape, box([]int64{0, 0}, []int64{10, 7}), box([]int64{0, 7}, []int64{10, 13})),
		"whole on both":            spread(shape, shape.Full(), shape.Full()),
		"rows on one, none on two": spread(shape, shape.Full(), box([]int64{10, 0}, []int64{0, 20})),
	})
	pairs(t, tensor.Shape{32}, map[string][]plan.Local{
		"8,24": spread(tensor.Shape{32}, part(0, 8), part(8, 24)), "10,22": spread(tensor.Shape{32}, part(0, 10), part(10, 22)),
	})
}

// mesh places a 4×4 tensor on a mesh of ranks: along each dimension of the
// mesh, its dimension 0 is sharded or replicated.
func mesh(dims []int, sharded []bool) []plan.Local {
	shape := tensor.Shape{4, 4}
	places := []tensor.Box{shape.Full()}
	for d, n := range dims {
		var next []tensor.Box
		for _, b := range places {
			for rank := range n {
				cut := box(slices.Clone(b.Offsets), slices.Clone(b.Sizes))
				if sharded[d] {
					in := rows(b.Sizes, n)[rank]
					cut.Offsets[0], cut.Sizes[0] = b.Offsets[0]+in.Offsets[0], in.Sizes[0]
				}
				next = append(next, cut)
			}
		}
		places = next
	}
	return spread(shape, places...)
}

func TestLoadEveryPairOfMeshPlacements(t *testing.T) {
	layouts := map[string][]plan.Local{}
	for _, dims := range [][]int{{2}, {3}, {4}, {2, 2}, {3, 2}} {
		for choice := range 1 << len(dims) {
			name, sharded := fmt.Sprint(dims), make([]bool, len(dims))
			for d := range dims {
				sharded[d] = choice>>d&1 == 1
				name += map[bool]string{true: " Shard(0)", false: " Replicate"}[sharded[d]]
			}
			layouts[name] = mesh(dims, sharded)
		}
	}
	pairs(t, tensor.Shape{4, 4}, layouts)
}

func TestLoadValues(t *testing.T) {
	layout := global(t, []plan.Local{
		{Rank: 0, Items: []plan.Item{value("rng", 5, true), value("config", 3, false)}},
		{Rank: 1, Items: []plan.Item{value("rng", 6, true), value("config", 3, false), value("late", 9, false)}},
	})
	p := planner.NewLoader(layout)
	for _, c := range []struct {
		fqn      string
		rank     int
		holder   int
		size     int64
		problems string
	}{
		{"config", 0, 0, 3, ""},
		{"config", 7, 0, 3, ""},
		{"late", 0, 1, 9, ""},
		{"rng", 0, 0, 5, ""},
		{"rng", 1, 1, 6, ""},
		{"rng", 2, 0, 0, `value "rng" was saved by each rank for itself, and rank 2 saved none`},
		{"nothing", 0, 0, 0, `missing key "nothing": the checkpoint has no tensor or value of that name`},
	} {
		w := plan.Want{Value: true, Shard: tensor.Shard{FQN: c.fqn}, Rank: c.rank}
		reads, err := p.Load([]plan.Want{w})
		if c.problems != "" {
			problems(t, err, c.problems)
			continue
		}
		if err != nil || len(reads) != 1 || reads[0].FQN != c.fqn || reads[0].Rank != c.holder || p.Size(w) != c.size {
			t.Errorf("rank %d reads %s by %+v, %d bytes, %v; want it from rank %d, %d bytes", c.rank, c.fqn, reads, p.Size(w), err, c.holder, c.size)
		}
	}
	if got := p.Size(plan.Want{Shard: shard("w", tensor.Shape{8}, part(2, 3))}); got != 6 {
		t.Errorf("a want of 3 elements needs %d bytes", got)
	}
	want := []string{"config", "late"}
	if got := planner.Unread(layout, map[string]bool{"rng": true, "other": true}); !slices.Equal(got, want) {
		t.Errorf("unread %q, want %q", got, want)
	}
}

func TestLoadProblems(t *testing.T) {
	sixteen, square := tensor.Shape{16}, tensor.Shape{4, 4}
	hole := global(t, []plan.Local{{Items: []plan.Item{item(shard("w", sixteen, part(0, 4))), item(shard("s", square, box([]int64{1, 1}, []int64{2, 2}))), value("v", 3, false)}}})
	lapped := plan.Layout{Tensors: []plan.Tensor{{FQN: "w", DType: tensor.Int16, Shape: sixteen, Chunks: []plan.Chunk{{Box: part(0, 12)}, {Box: part(8, 8), Rank: 1}}}}}
	typed := shard("w", sixteen, part(0, 4))
	typed.DType = tensor.Float32
	for name, c := range map[string]struct {
		layout plan.Layout
		wants  []plan.Want
		want   []string
	}{
		"missing region": {hole, []plan.Want{{Shard: shard("w", sixteen, sixteen.Full())}}, []string{
			`tensor "w": the checkpoint does not cover [4]+[12] of the wanted [0]+[16]`,
		}},
		"every missing region": {hole, []plan.Want{{Shard: shard("s", square, box([]int64{0, 0}, []int64{2, 4}))}}, []string{
			`tensor "s": the checkpoint does not cover [0 0]+[1 4] of the wanted [0 0]+[2 4]`,
			`tensor "s": the checkpoint does not cover [1 0]+[1 1] of the wanted [0 0]+[2 4]`,
			`tensor "s": the checkpoint does not cover [1 3]+[1 1] of the wanted [0 0]+[2 4]`,
		}},
		"covered part of a hole": {hole, []plan.Want{{Shard: shard("w", sixteen, part(1, 2))}}, []string{"no error"}},
		"overlapping chunks":     {lapped, []plan.Want{{Shard: shard("w", sixteen, part(4, 8))}}, []string{`tensor "w": chunks of the checkpoint overlap in the wanted [4]+[8], its manifest is damaged`}},
		"all of them": {hole, []plan.Want{
			{Shard: shard("x", sixteen, part(0, 1))},
			{Shard: shard("w", tensor.Shape{8}, part(0, 1))},
			{Shard: typed},
			{Shard: shard("w", sixteen, part(15, 2))},
			{Shard: shard("v", sixteen, part(0, 1))},
			{Value: true, Shard: tensor.Shard{FQN: "w"}},
			{Value: true, Shard: tensor.Shard{FQN: "y"}},
			{Shard: shard("w", sixteen, part(2, 4))},
		}, []string{
			`missing key "x": the checkpoint has no tensor or value of that name`,
			`size mismatch for "w": the checkpoint has shape [16], the target [8]`,
			`dtype mismatch for "w": the checkpoint has int16, the target float32`,
			`tensor "w": box [15]+[2] is out of bounds of shape [16] in dimension 0`,
			`"v" is a value in the checkpoint and a tensor in the target`,
			`"w" is a tensor in the checkpoint and a value in the target`,
			`missing key "y": the checkpoint has no tensor or value of that name`,
			`tensor "w": the checkpoint does not cover [4]+[2] of the wanted [2]+[4]`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := planner.NewLoader(c.layout).Load(c.wants)
			problems(t, err, c.want...)
			var missing *planner.MissingError
			if got := errors.As(err, &missing); got != (name == "all of them") || got && missing.FQN != "x" {
				t.Errorf("missing key: %v, %+v", got, missing)
			}
		})
	}
}
