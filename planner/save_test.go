package planner_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

func TestGlobal(t *testing.T) {
	whole := tensor.Shape{10}
	scalar := item(shard("step", nil, box(nil, nil)))
	var four []checkpoint.Local
	for rank := range 4 {
		four = append(four, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{
			item(shard("tensor", whole, whole.Full())), value("list", 20, false), item(shard("sharded", tensor.Shape{32}, part(8*int64(rank), 8))),
		}})
	}
	replicated := func(bytes ...int64) (locals []checkpoint.Local) {
		for rank := range 3 {
			l := checkpoint.Local{Rank: rank}
			for i, n := range bytes {
				l.Items = append(l.Items, item(shard(fmt.Sprint("w", i), tensor.Shape{n}, part(0, n))))
			}
			locals = append(locals, l)
		}
		return locals
	}
	for name, c := range map[string]struct {
		locals []checkpoint.Local
		want   string
	}{
		"nothing": {nil, ""},
		"four ranks": {four, `
r0: sharded[0]+[8] list(20)
r1: sharded[8]+[8] tensor[0]+[10]
r2: sharded[16]+[8]
r3: sharded[24]+[8]`},
		"one rank": {four[2:3], `
r2: sharded[16]+[8] tensor[0]+[10] list(20)`},
		"equal replicas go round": {replicated(4, 4, 4, 4, 4, 4), `
r0: w0[0]+[4] w3[0]+[4]
r1: w1[0]+[4] w4[0]+[4]
r2: w2[0]+[4] w5[0]+[4]`},
		"largest replica first": {replicated(1, 2, 9, 3), `
r0: w2[0]+[9]
r1: w3[0]+[3]
r2: w0[0]+[1] w1[0]+[2]`},
		"own chunks count before replicas": {append(replicated(4, 4), checkpoint.Local{Rank: 3, Items: []checkpoint.Item{
			item(shard("w0", tensor.Shape{4}, part(0, 4))), item(shard("own", tensor.Shape{100}, part(0, 100))),
		}}), `
r0: w0[0]+[4]
r1: w1[0]+[4]
r3: own[0]+[100]`},
		"per-rank values stay with their ranks": {[]checkpoint.Local{
			{Rank: 0, Items: []checkpoint.Item{value("rng", 5, true), value("config", 3, false)}},
			{Rank: 1, Items: []checkpoint.Item{value("rng", 6, true), value("config", 4, false)}},
		}, `
r0: config(3) rng(5)
r1: rng(6)`},
		"stages with disjoint keys": {[]checkpoint.Local{
			{Rank: 4, Items: []checkpoint.Item{item(shard("b", whole, whole.Full()))}},
			{Rank: 2, Items: []checkpoint.Item{item(shard("a", whole, whole.Full())), value("only2", 1, false)}},
			{Rank: 9},
		}, `
r2: a[0]+[10] only2(1)
r4: b[0]+[10]`},
		"scalars": {[]checkpoint.Local{{Rank: 0, Items: []checkpoint.Item{scalar}}, {Rank: 1, Items: []checkpoint.Item{scalar}}}, `
r0: step[]+[]`},
		"columns": {parts(tensor.Shape{4, 8}, []tensor.Box{box([]int64{0, 0}, []int64{4, 2})}, []tensor.Box{box([]int64{0, 2}, []int64{4, 6})}), `
r0: w[0 0]+[4 2]
r1: w[0 2]+[4 6]`},
		"empty local part":        {parts(tensor.Shape{2}, []tensor.Box{part(0, 1)}, []tensor.Box{part(1, 1)}, []tensor.Box{part(2, 0)}), "\nr0: w[0]+[1]\nr1: w[1]+[1]"},
		"4 chunks on r0,r1,r1,r0": {parts(tensor.Shape{4}, []tensor.Box{part(3, 1), part(0, 1)}, []tensor.Box{part(2, 1), part(1, 1)}), "\nr0: w[3]+[1] w[0]+[1]\nr1: w[2]+[1] w[1]+[1]"},
	} {
		t.Run(name, func(t *testing.T) {
			layout := global(t, c.locals)
			if got := show(layout); got != strings.TrimPrefix(c.want, "\n") {
				t.Errorf("got\n%s\nwant%s", got, c.want)
			}
			for _, l := range c.locals {
				if got := layout.Items(l.Rank); len(got) > len(l.Items) {
					t.Errorf("rank %d writes %d items and offered %d", l.Rank, len(got), len(l.Items))
				}
			}
		})
	}
}

// A tensor without elements is stored as such, not left out.
func TestGlobalKeepsEmptyTensors(t *testing.T) {
	shape := tensor.Shape{0, 6}
	l := global(t, parts(shape, []tensor.Box{shape.Full()}, []tensor.Box{shape.Full()}))
	if len(l.Tensors) != 1 || len(l.Tensors[0].Chunks) != 0 || !l.Tensors[0].Shape.Equal(shape) {
		t.Errorf("got %+v", l)
	}
	reads, err := planner.NewLoader(l).Load([]checkpoint.Want{{Shard: shard("w", shape, shape.Full())}})
	if err != nil || len(reads) != 0 {
		t.Errorf("loaded with %v, %v", reads, err)
	}
}

func TestGlobalProblems(t *testing.T) {
	four := tensor.Shape{4}
	typed := func(rank int, dtype tensor.DType, shape tensor.Shape) checkpoint.Local {
		s := shard("w", shape, shape.Full())
		s.DType = dtype
		return checkpoint.Local{Rank: rank, Items: []checkpoint.Item{item(s)}}
	}
	with := func(rank int, items ...checkpoint.Item) checkpoint.Local {
		return checkpoint.Local{Rank: rank, Items: items}
	}
	w := item(shard("w", four, four.Full()))
	perRank := w
	perRank.PerRank = true
	for name, c := range map[string]struct {
		locals []checkpoint.Local
		want   []string
	}{
		"overlap on one rank": {parts(four, []tensor.Box{part(0, 4), part(0, 2)}), []string{
			`tensor "w": box [0]+[4] of rank 0 and box [0]+[2] of rank 0 overlap in [0]+[2]`,
		}},
		"every overlap": {parts(four, []tensor.Box{part(0, 3)}, []tensor.Box{part(1, 3)}, []tensor.Box{part(2, 2)}), []string{
			`tensor "w": box [0]+[3] of rank 0 and box [1]+[3] of rank 1 overlap in [1]+[2]`,
			`tensor "w": box [0]+[3] of rank 0 and box [2]+[2] of rank 2 overlap in [2]+[1]`,
			`tensor "w": box [1]+[3] of rank 1 and box [2]+[2] of rank 2 overlap in [2]+[2]`,
		}},
		"holes around the middle": {parts(tensor.Shape{4, 4}, []tensor.Box{box([]int64{1, 1}, []int64{2, 2})}, nil), []string{
			`tensor "w": no rank saves [0 0]+[1 4] of shape [4 4]`, `tensor "w": no rank saves [3 0]+[1 4] of shape [4 4]`,
			`tensor "w": no rank saves [1 0]+[2 1] of shape [4 4]`, `tensor "w": no rank saves [1 3]+[2 1] of shape [4 4]`,
		}},
		"only an empty part": {parts(four, []tensor.Box{part(4, 0)}, nil), []string{`tensor "w": no rank saves [0]+[4] of shape [4]`}},
		"dtype and shape": {[]checkpoint.Local{typed(3, tensor.Float32, four), typed(1, tensor.Float16, four), typed(2, tensor.Float16, tensor.Shape{4, 1})}, []string{
			`tensor "w" has shape [4] on rank 1 and [4 1] on rank 2`,
			`tensor "w" has dtype float16 on rank 1 and float32 on rank 3`,
		}},
		"both at once": {[]checkpoint.Local{typed(0, tensor.Int8, four), typed(1, tensor.Int16, tensor.Shape{8})}, []string{
			`tensor "w" has dtype int8 on rank 0 and int16 on rank 1`, `tensor "w" has shape [4] on rank 0 and [8] on rank 1`,
		}},
		"same box twice":      {parts(four, []tensor.Box{part(0, 4), part(0, 4)}), []string{`tensor "w": rank 0 offers the box [0]+[4] twice`}},
		"tensor, then value":  {[]checkpoint.Local{with(0, w), with(1, value("w", 1, false))}, []string{`"w" is a tensor on rank 0 and a value on rank 1`}},
		"value, then tensor":  {[]checkpoint.Local{with(0, value("w", 1, false)), with(1, w)}, []string{`"w" is a value on rank 0 and a tensor on rank 1`}},
		"value twice":         {[]checkpoint.Local{with(0, value("v", 1, false), value("v", 1, false))}, []string{`value "v" is offered twice by rank 0`}},
		"replica twice":       {[]checkpoint.Local{with(0, value("v", 1, false)), with(1, value("v", 1, false), value("v", 1, false))}, []string{`value "v" is offered twice by rank 1`}},
		"per-rank twice":      {[]checkpoint.Local{with(0, value("v", 1, true), value("v", 1, true))}, []string{`value "v" is offered twice by rank 0`}},
		"per rank and shared": {[]checkpoint.Local{with(2, value("v", 1, true)), with(5, value("v", 1, false))}, []string{`value "v" is per rank on one of the ranks 2 and 5 and shared on the other`}},
		"per-rank tensor":     {[]checkpoint.Local{with(0, perRank), with(1, w)}, []string{`tensor "w" is marked per rank by rank 0: only values can be, give each rank's tensor its own name`}},
		"two plans of a rank": {[]checkpoint.Local{with(1, w), with(1)}, []string{"rank 1 sent two plans"}},
		"one bad tensor hides no other": {[]checkpoint.Local{
			with(0, w, item(shard("a", four, part(0, 1))), value("v", 1, false)), with(1, typed(1, tensor.Int8, four).Items[0], value("v", 1, true), item(shard("z", four, part(0, 3))), item(shard("z", four, part(2, 2)))),
		}, []string{
			`tensor "w" has dtype int16 on rank 0 and int8 on rank 1`,
			`value "v" is per rank on one of the ranks 0 and 1 and shared on the other`,
			`tensor "a": no rank saves [1]+[3] of shape [4]`,
			`tensor "z": box [0]+[3] of rank 1 and box [2]+[2] of rank 1 overlap in [2]+[1]`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := planner.Global(c.locals)
			problems(t, err, c.want...)
			backwards := slices.Clone(c.locals)
			slices.Reverse(backwards)
			if name != "two plans of a rank" {
				_, err = planner.Global(backwards)
				problems(t, err, c.want...)
			}
		})
	}
}

func TestCheckpointIDs(t *testing.T) {
	for _, c := range []struct {
		name       string
		attempt, n int
		want       string
	}{
		{"step-100", 1, 1, "step-100.a1"}, {"step-100", 2, 2, "step-100.a2.2"}, {"step-100", 12, 30, "step-100.a12.30"}, {planner.DefaultName(7), 1, 1, "step-7.a1"},
	} {
		if got := planner.CheckpointID(c.name, c.attempt, c.n); got != c.want {
			t.Errorf("%s of attempt %d, save %d is %s, want %s", c.name, c.attempt, c.n, got, c.want)
		}
	}
	// Names that look like IDs do not collide with the IDs of others.
	seen := map[string]string{}
	for _, name := range []string{"x", "x.a1", "x.a1.2", "x.a2", "x.2", "x.a1.a1"} {
		for attempt := 1; attempt < 4; attempt++ {
			for n := 1; n < 4; n++ {
				id, who := planner.CheckpointID(name, attempt, n), fmt.Sprint(name, attempt, n)
				if seen[id] != "" {
					t.Errorf("%s names both %s and %s", id, seen[id], who)
				}
				seen[id] = who
			}
		}
	}
}

func TestValidName(t *testing.T) {
	for _, good := range []string{"step-100", "x", "a b", "latest-2", "模型", "x.a1", strings.Repeat("x", planner.MaxName)} {
		if err := planner.ValidName(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for bad, want := range map[string]string{
		"": "is empty", strings.Repeat("x", planner.MaxName+1): "65 bytes, at most 64", "a\nb": "control characters", "a\x7f": "control characters", "\xff": "control characters",
		"run@x": "@ / :", "../x": "@ / :", "best:loss": "@ / :", "latest": "run@latest",
	} {
		if err := planner.ValidName(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", bad, err, want)
		}
	}
}

// The lowest rank's path stands for all, and a layout brings it back.
func TestLayoutKeepsPaths(t *testing.T) {
	nested := checkpoint.Path{checkpoint.PathKey("w"), checkpoint.PathIndex(0)}
	at := func(it checkpoint.Item, p checkpoint.Path) checkpoint.Item { it.Path = p; return it }
	w := item(shard("w.0", []int64{4}, part(0, 4)))
	l := global(t, []checkpoint.Local{
		{Rank: 1, Items: []checkpoint.Item{w, value("v.0", 1, true), at(value("v", 1, false), checkpoint.Path{checkpoint.PathKey("v")})}},
		{Rank: 0, Items: []checkpoint.Item{at(w, nested), at(value("v.0", 1, true), checkpoint.Path{checkpoint.PathKey("v"), checkpoint.PathKey("0")})}},
	})
	got, err := checkpoint.DecodeLayout(checkpoint.EncodeLayout(l))
	if err != nil || !reflect.DeepEqual(got, l) {
		t.Fatalf("%+v came back as %+v, %v", l, got, err)
	}
	if p := l.Tensors[0].Path; !reflect.DeepEqual(p, nested) {
		t.Errorf("tensor w.0 has the path %v, want %v", p, nested)
	}
	for i, want := range []string{"[]", `["v" "0"]`, `["v" "0"]`} {
		if got := l.Values[i].Path.String(); got != want {
			t.Errorf("%s of rank %d has the path %v, want %v", l.Values[i].FQN, l.Values[i].Rank, got, want)
		}
	}
	_, err = planner.Global([]checkpoint.Local{{Rank: 3, Items: []checkpoint.Item{at(w, checkpoint.Path{checkpoint.PathKey("x")}), at(value("v", 1, false), checkpoint.Path{checkpoint.PathKey("x")})}}})
	problems(t, err, `rank 3: "w.0" has the path ["x"], which is that of "x"`, `rank 3: "v" has the path ["x"], which is that of "x"`)
}
