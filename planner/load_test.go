package planner_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

func TestLoadValues(t *testing.T) {
	layout := global(t, []checkpoint.Local{
		{Rank: 0, Items: []checkpoint.Item{value("rng", 5, true), value("config", 3, false)}},
		{Rank: 1, Items: []checkpoint.Item{value("rng", 6, true), value("config", 3, false), value("late", 9, false)}},
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
		w := checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: c.fqn}, Rank: c.rank}
		reads, err := p.Load([]checkpoint.Want{w})
		if c.problems != "" {
			problems(t, err, c.problems)
			continue
		}
		if err != nil || len(reads) != 1 || reads[0].FQN != c.fqn || reads[0].Rank != c.holder || p.Size(w) != c.size {
			t.Errorf("rank %d reads %s by %+v, %d bytes, %v; want it from rank %d, %d bytes", c.rank, c.fqn, reads, p.Size(w), err, c.holder, c.size)
		}
	}
	if got := p.Size(checkpoint.Want{Shard: shard("w", tensor.Shape{8}, part(2, 3))}); got != 6 {
		t.Errorf("a want of 3 elements needs %d bytes", got)
	}
	want := []string{"config", "late"}
	if got := planner.Unread(layout, map[string]bool{"rng": true, "other": true}); !slices.Equal(got, want) {
		t.Errorf("unread %q, want %q", got, want)
	}
}

func TestLoadProblems(t *testing.T) {
	sixteen, square := tensor.Shape{16}, tensor.Shape{4, 4}
	hole := global(t, []checkpoint.Local{{Items: []checkpoint.Item{item(shard("w", sixteen, part(0, 4))), item(shard("s", square, box([]int64{1, 1}, []int64{2, 2}))), value("v", 3, false)}}})
	lapped := checkpoint.Layout{Tensors: []checkpoint.Tensor{{FQN: "w", DType: tensor.Int16, Shape: sixteen, Chunks: []checkpoint.Chunk{{Box: part(0, 12)}, {Box: part(8, 8), Rank: 1}}}}}
	typed := shard("w", sixteen, part(0, 6))
	typed.DType = tensor.Bool
	for name, c := range map[string]struct {
		layout checkpoint.Layout
		wants  []checkpoint.Want
		want   []string
	}{
		"missing region": {hole, []checkpoint.Want{{Shard: shard("w", sixteen, sixteen.Full())}}, []string{
			`tensor "w": the checkpoint does not cover [4]+[12] of the wanted [0]+[16]`,
		}},
		"every missing region": {hole, []checkpoint.Want{{Shard: shard("s", square, box([]int64{0, 0}, []int64{2, 4}))}}, []string{
			`tensor "s": the checkpoint does not cover [0 0]+[1 4] of the wanted [0 0]+[2 4]`,
			`tensor "s": the checkpoint does not cover [1 0]+[1 1] of the wanted [0 0]+[2 4]`,
			`tensor "s": the checkpoint does not cover [1 3]+[1 1] of the wanted [0 0]+[2 4]`,
		}},
		"covered part of a hole": {hole, []checkpoint.Want{{Shard: shard("w", sixteen, part(1, 2))}}, []string{"no error"}},
		"overlapping chunks":     {lapped, []checkpoint.Want{{Shard: shard("w", sixteen, part(4, 8))}}, []string{`tensor "w": chunks of the checkpoint overlap in the wanted [4]+[8], its manifest is damaged`}},
		"all of them": {hole, []checkpoint.Want{
			{Shard: shard("x", sixteen, part(0, 1))},
			{Shard: shard("w", tensor.Shape{8}, part(0, 1))},
			{Shard: typed},
			{Shard: shard("w", sixteen, part(15, 2))},
			{Shard: shard("v", sixteen, part(0, 1))},
			{Value: true, Shard: tensor.Shard{FQN: "w"}},
			{Value: true, Shard: tensor.Shard{FQN: "y"}},
			{Shard: shard("w", sixteen, part(2, 4))},
			{Shard: shard("x", sixteen, part(1, 1))}, // a key is missing once
			{Shard: shard("w", sixteen, part(2, 4))},
		}, []string{
			`missing key "x": the checkpoint has no tensor or value of that name`,
			`size mismatch for "w": the checkpoint has shape [16], the target [8]`,
			`dtype mismatch for "w": int16 cannot be converted to bool: only whether each element is zero would be left; load it as int16`,
			`tensor "w": the checkpoint does not cover [4]+[2] of the wanted [0]+[6]`,
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

// typed is a want of part of w as another dtype.
func typed(d tensor.DType, shape tensor.Shape, b tensor.Box) checkpoint.Want {
	s := shard("w", shape, b)
	s.DType = d
	return checkpoint.Want{Shard: s}
}

func TestLoadOptions(t *testing.T) {
	eight := tensor.Shape{8}
	layout := global(t, []checkpoint.Local{
		{Rank: 0, Items: []checkpoint.Item{item(shard("w", eight, part(0, 4))), value("rng", 5, true), value("epoch", 1, false)}},
		{Rank: 1, Items: []checkpoint.Item{item(shard("w", eight, part(4, 4))), item(shard("b", eight, eight.Full()))}},
	})
	value := func(fqn string, rank int) checkpoint.Want {
		return checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: fqn}, Rank: rank}
	}
	lost := checkpoint.Want{Shard: shard("lost", eight, part(0, 1))}
	p := planner.NewLoader(layout)
	for name, c := range map[string]struct {
		wants  []checkpoint.Want
		o      planner.LoadOptions
		reads  int
		absent []int
		unread []string
		want   string
	}{
		"all of it": {[]checkpoint.Want{typed(tensor.Int16, eight, eight.Full())}, planner.LoadOptions{}, 2, nil, []string{"b", "epoch", "rng"}, "no error"},
		"converted": {[]checkpoint.Want{typed(tensor.Float8E4M3, eight, part(3, 2))}, planner.LoadOptions{}, 2, nil, []string{"b", "epoch", "rng"}, "no error"},
		"strict dtype": {
			[]checkpoint.Want{typed(tensor.Int32, eight, part(0, 1)), typed(tensor.Int16, eight, part(0, 1))},
			planner.LoadOptions{StrictDType: true},
			1, nil,
			[]string{"b", "epoch", "rng"},
			`dtype mismatch for "w": the checkpoint has int16, the target int32`,
		},
		"dtype and shape": {
			[]checkpoint.Want{typed(tensor.Bool, tensor.Shape{9}, part(0, 1))},
			planner.LoadOptions{StrictDType: true},
			0, nil,
			[]string{"b", "epoch", "rng"},
			`dtype mismatch for "w": the checkpoint has int16, the target bool` + "\n" + `size mismatch for "w": the checkpoint has shape [8], the target [9]`,
		},
		"missing keys": {
			[]checkpoint.Want{lost, value("rng", 1), value("gone", 0), lost},
			planner.LoadOptions{},
			0, nil,
			[]string{"b", "epoch", "w"},
			`missing key "lost": the checkpoint has no tensor or value of that name` + "\n" + `value "rng" was saved by each rank for itself, and rank 1 saved none` + "\n" + `missing key "gone": the checkpoint has no tensor or value of that name`,
		},
		"partial": {[]checkpoint.Want{lost, value("rng", 1), value("gone", 0), value("rng", 0), lost}, planner.LoadOptions{Partial: true}, 1, []int{0, 1, 2, 4}, []string{"b", "epoch", "w"}, "no error"},
		"partial, and still wrong": {
			[]checkpoint.Want{lost, typed(tensor.Int16, tensor.Shape{2}, part(0, 1)), value("w", 0)},
			planner.LoadOptions{Partial: true},
			0,
			[]int{0},
			[]string{"b", "epoch", "rng"},
			`size mismatch for "w": the checkpoint has shape [8], the target [2]` + "\n" + `"w" is a tensor in the checkpoint and a value in the target`,
		},
		"strict": {
			[]checkpoint.Want{value("rng", 0), lost},
			planner.LoadOptions{Strict: true},
			1, nil,
			[]string{"b", "epoch", "w"},
			`missing key "lost": the checkpoint has no tensor or value of that name` + "\n" + `saved keys that no rank asks for: ["b" "epoch" "w"]; ask for them, or load without strict`,
		},
		"strict, others ask": {[]checkpoint.Want{value("rng", 0)}, planner.LoadOptions{Strict: true, Asked: map[string]bool{"w": true, "b": true, "epoch": true}}, 1, nil, nil, "no error"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := p.LoadWith(c.wants, c.o)
			problems(t, err, c.want)
			if len(got.Reads) != c.reads || !slices.Equal(got.Absent, c.absent) || !slices.Equal(got.Unread, c.unread) {
				t.Errorf("%d reads, absent %v, unread %q; want %d, %v, %q", len(got.Reads), got.Absent, got.Unread, c.reads, c.absent, c.unread)
			}
			var unread *planner.UnreadError
			if errors.As(err, &unread) != (name == "strict") {
				t.Errorf("%v", err)
			}
			for _, r := range got.Reads {
				if want := map[string]tensor.DType{"w": tensor.Int16}[r.FQN]; r.DType != want {
					t.Errorf("%s is read as %v, it was saved as %v", r.FQN, r.DType, want)
				}
			}
		})
	}
	_, err := planner.NewLoader(global(t, spread(eight, part(0, 4)))).Load([]checkpoint.Want{typed(tensor.Int16, eight, part(2, 6))})
	var hole *planner.MissingRegionError
	if !errors.As(err, &hole) || hole.FQN != "w" || !hole.Region.Equal(part(4, 4)) || !hole.Want.Equal(part(2, 6)) {
		t.Errorf("%v is %+v", err, hole)
	}
}

func TestLoadOfTheSameKind(t *testing.T) {
	for _, c := range []struct {
		from, to tensor.DType
		lost     bool
	}{
		{tensor.Float32, tensor.Int64, true},
		{tensor.BFloat16, tensor.Uint8, true},
		{tensor.Float8E4M3, tensor.Int8, true},
		{tensor.Float64, tensor.Float16, false},
		{tensor.Float32, tensor.Complex64, false},
		{tensor.Int64, tensor.Float32, false},
		{tensor.Int64, tensor.Int8, false},
		{tensor.Bool, tensor.Uint8, false},
	} {
		saved := tensor.Shard{FQN: "m.w", DType: c.from, Global: tensor.Shape{4}, Box: tensor.Shape{4}.Full()}
		wanted := saved
		wanted.DType = c.to
		p := planner.NewLoader(global(t, []checkpoint.Local{{Items: []checkpoint.Item{item(saved)}}}))
		want := "no error"
		if c.lost {
			want = fmt.Sprintf(`dtype mismatch for "m.w": the checkpoint has %v, the target %v, and fractions would be lost: load it as %v, or ask for any conversion (in Python strict_dtype=False)`, c.from, c.to, c.from)
		}
		_, err := p.LoadWith([]checkpoint.Want{{Shard: wanted}}, planner.LoadOptions{SameKind: true})
		problems(t, err, want)
		_, err = p.LoadWith([]checkpoint.Want{{Shard: wanted}}, planner.LoadOptions{})
		problems(t, err, "no error")
	}
}
