package plan_test

import (
	"encoding/hex"
	"errors"
	"flag"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write golden files that are missing; existing ones are never changed")

func box(offsets, sizes []int64) tensor.Box { return tensor.Box{Offsets: offsets, Sizes: sizes} }

// The samples have every field set, a scalar, an empty tensor and both kinds
// of values.
var (
	sampleLocal = plan.Local{Rank: 300, Items: []plan.Item{
		{Shard: tensor.Shard{FQN: "layers.0.weight", DType: tensor.BFloat16, Global: tensor.Shape{4096, 512}, Box: box([]int64{1024, 0}, []int64{1024, 512})}, Bytes: 1 << 20},
		{Shard: tensor.Shard{FQN: "step", DType: tensor.Int64, Global: tensor.Shape{}, Box: box([]int64{}, []int64{})}, Bytes: 8},
		{Shard: tensor.Shard{FQN: "empty", DType: tensor.Bool, Global: tensor.Shape{2, 3}, Box: box([]int64{2, 0}, []int64{0, 3})}},
		{Value: true, Shard: tensor.Shard{FQN: "config"}, Bytes: 1234},
		{Value: true, PerRank: true, Shard: tensor.Shard{FQN: "rng"}, Bytes: 5000},
	}}
	sampleLayout = plan.Layout{
		Tensors: []plan.Tensor{
			{FQN: "empty", DType: tensor.Bool, Shape: tensor.Shape{0, 3}},
			{FQN: "layers.0.weight", DType: tensor.Float32, Shape: tensor.Shape{4, 4}, Chunks: []plan.Chunk{
				{Rank: 0, Box: box([]int64{0, 0}, []int64{2, 4})}, {Rank: 1, Box: box([]int64{2, 0}, []int64{2, 4})},
			}},
			{FQN: "step", DType: tensor.Int64, Shape: tensor.Shape{}, Chunks: []plan.Chunk{{Rank: 0, Box: box([]int64{}, []int64{})}}},
		},
		Values: []plan.Value{
			{FQN: "config", Rank: 0, Bytes: 100},
			{FQN: "rng", Rank: 0, Bytes: 1, PerRank: true},
			{FQN: "rng", Rank: 1, Bytes: 2, PerRank: true},
		},
	}
	sampleManifest = plan.Manifest{
		Store: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Run: "gpt.small", Trial: "main", Checkpoint: "step-200.a2", Name: "step-200",
		Step: 200, Attempt: 2, WorldSize: 3,
		Ranks:  []plan.RankIndex{{Rank: 0, Index: plan.Sum([]byte("r0"))}, {Rank: 1, Index: plan.Sum([]byte("r1"))}},
		Layout: sampleLayout,
	}
)

// The bytes of version 1 are in files that exist and their digests name
// files: they never change.
func TestGoldenForms(t *testing.T) {
	eachForm(t, func(t *testing.T, f form) {
		path := filepath.Join("testdata", f.name+".v1.hex")
		want, err := os.ReadFile(path)
		if *update && errors.Is(err, fs.ErrNotExist) {
			want = []byte(hex.Dump(f.sample))
			if err = os.MkdirAll("testdata", 0o777); err == nil {
				err = os.WriteFile(path, want, 0o666)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.Dump(f.sample); got != string(want) {
			t.Errorf("%s is encoded as\n%swant\n%s", f.name, got, want)
		}
	})
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one with %q", parts)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q lacks %q", err, part)
		}
	}
}

func names() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringN(1, 8, 32),
		rapid.SampledFrom([]string{"w", "layers.0.w", "a/b@0", "\x00", "\xff", "../x", "模型", strings.Repeat("x", 300)}),
	)
}

func sizes() *rapid.Generator[int64] {
	return rapid.OneOf(rapid.Int64Range(0, 300), rapid.Int64Range(0, math.MaxInt64), rapid.Just(int64(math.MaxInt64)))
}

func ranks() *rapid.Generator[int] {
	return rapid.OneOf(rapid.IntRange(0, 8), rapid.IntRange(0, 1<<31))
}

// shards draws a valid shard of any size.
func shards() *rapid.Generator[tensor.Shard] {
	return rapid.Custom(func(t *rapid.T) tensor.Shard {
		s := tensor.Shard{FQN: names().Draw(t, "name"), DType: tensor.DType(rapid.Uint8Range(1, 19).Draw(t, "dtype"))}
		left := int64(math.MaxInt64 / s.DType.Size())
		s.Global = tensor.Shape{}
		for range rapid.IntRange(0, 4).Draw(t, "dimensions") {
			n := rapid.OneOf(rapid.Int64Range(0, min(9, left)), rapid.Int64Range(0, left)).Draw(t, "dimension")
			s.Global = append(s.Global, n)
			left /= max(n, 1)
		}
		s.Box = boxIn(t, s.Global)
		return s
	})
}

func boxIn(t *rapid.T, shape tensor.Shape) tensor.Box {
	b := box([]int64{}, []int64{})
	for _, n := range shape {
		lo := rapid.Int64Range(0, n).Draw(t, "lo")
		b.Offsets = append(b.Offsets, lo)
		b.Sizes = append(b.Sizes, rapid.Int64Range(0, n-lo).Draw(t, "size"))
	}
	return b
}

func locals() *rapid.Generator[plan.Local] {
	item := rapid.Custom(func(t *rapid.T) plan.Item {
		if rapid.Bool().Draw(t, "value") {
			return plan.Item{
				Value: true, Shard: tensor.Shard{FQN: names().Draw(t, "name")},
				Bytes: sizes().Draw(t, "bytes"), PerRank: rapid.Bool().Draw(t, "per rank"),
			}
		}
		s := shards().Draw(t, "shard")
		return plan.Item{Shard: s, Bytes: s.Bytes()}
	})
	return rapid.Custom(func(t *rapid.T) plan.Local {
		return plan.Local{Rank: ranks().Draw(t, "rank"), Items: some(t, item)}
	})
}

func layouts() *rapid.Generator[plan.Layout] {
	value := rapid.Custom(func(t *rapid.T) plan.Value {
		return plan.Value{
			FQN: names().Draw(t, "name"), Rank: ranks().Draw(t, "rank"),
			Bytes: sizes().Draw(t, "bytes"), PerRank: rapid.Bool().Draw(t, "per rank"),
		}
	})
	whole := rapid.Custom(func(t *rapid.T) plan.Tensor {
		s := shards().Draw(t, "tensor")
		chunk := rapid.Custom(func(t *rapid.T) plan.Chunk {
			return plan.Chunk{Rank: ranks().Draw(t, "rank"), Box: boxIn(t, s.Global)}
		})
		return plan.Tensor{FQN: s.FQN, DType: s.DType, Shape: s.Global, Chunks: some(t, chunk)}
	})
	return rapid.Custom(func(t *rapid.T) plan.Layout {
		return plan.Layout{Tensors: some(t, whole), Values: some(t, value)}
	})
}

func manifests() *rapid.Generator[plan.Manifest] {
	index := rapid.Custom(func(t *rapid.T) plan.RankIndex {
		return plan.RankIndex{Rank: ranks().Draw(t, "rank"), Index: plan.Sum(rapid.SliceOf(rapid.Byte()).Draw(t, "index"))}
	})
	return rapid.Custom(func(t *rapid.T) plan.Manifest {
		text := rapid.String()
		return plan.Manifest{
			Store: text.Draw(t, "store"), Run: text.Draw(t, "run"), Trial: text.Draw(t, "trial"),
			Checkpoint: text.Draw(t, "checkpoint"), Name: text.Draw(t, "name"),
			Step: sizes().Draw(t, "step"), Attempt: ranks().Draw(t, "attempt"), WorldSize: ranks().Draw(t, "world"),
			Ranks: some(t, index), Layout: layouts().Draw(t, "layout"),
		}
	})
}

// some draws a short list, nil when it is empty, as decoding makes it.
func some[T any](t *rapid.T, of *rapid.Generator[T]) []T {
	if list := rapid.SliceOfN(of, 0, 4).Draw(t, "list"); len(list) > 0 {
		return list
	}
	return nil
}
