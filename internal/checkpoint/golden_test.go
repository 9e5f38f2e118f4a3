package checkpoint_test

import (
	"encoding/hex"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

var update = flag.Bool("update", false, "write golden files that are missing; existing ones are never changed")

func box(offsets, sizes []int64) tensor.Box { return tensor.Box{Offsets: offsets, Sizes: sizes} }

// The samples have every field set, a scalar, an empty tensor and both kinds
// of values.
var (
	sampleLocal = checkpoint.Local{Rank: 300, Items: []checkpoint.Item{
		{Shard: tensor.Shard{FQN: "layers.0.weight", DType: tensor.BFloat16, Global: tensor.Shape{4096, 512}, Box: box([]int64{1024, 0}, []int64{1024, 512})}, Bytes: 1 << 20, Path: checkpoint.Path{checkpoint.PathKey("layers"), checkpoint.PathIndex(0), checkpoint.PathKey("weight")}},
		{Shard: tensor.Shard{FQN: "step", DType: tensor.Int64, Global: tensor.Shape{}, Box: box([]int64{}, []int64{})}, Bytes: 8, Check: checkpoint.Check{0: 1, 15: 2}},
		{Shard: tensor.Shard{FQN: "empty", DType: tensor.Bool, Global: tensor.Shape{2, 3}, Box: box([]int64{2, 0}, []int64{0, 3})}},
		{Value: true, Shard: tensor.Shard{FQN: "config"}, Bytes: 1234, Check: checkpoint.Check{7: 3}},
		{Value: true, PerRank: true, Shard: tensor.Shard{FQN: "rng"}, Bytes: 5000},
		{Value: true, Shard: tensor.Shard{FQN: "optim.param_groups.12"}, Bytes: 10, Path: checkpoint.Path{checkpoint.PathKey("optim"), checkpoint.PathKey("param_groups"), checkpoint.PathIndex(12)}},
	}}
	sampleLayout = checkpoint.Layout{
		Tensors: []checkpoint.Tensor{
			{FQN: "empty", DType: tensor.Bool, Shape: tensor.Shape{0, 3}},
			{FQN: "layers.0.weight", Path: checkpoint.Path{checkpoint.PathKey("layers.0"), checkpoint.PathKey("weight")}, DType: tensor.Float32, Shape: tensor.Shape{4, 4}, Chunks: []checkpoint.Chunk{
				{Rank: 0, Box: box([]int64{0, 0}, []int64{2, 4})}, {Rank: 1, Box: box([]int64{2, 0}, []int64{2, 4})},
			}},
			{FQN: "step", DType: tensor.Int64, Shape: tensor.Shape{}, Chunks: []checkpoint.Chunk{{Rank: 0, Box: box([]int64{}, []int64{})}}},
		},
		Values: []checkpoint.Value{
			{FQN: "config", Rank: 0, Bytes: 100},
			{FQN: "optim.lr.0", Rank: 1, Bytes: 8, Path: checkpoint.Path{checkpoint.PathKey("optim"), checkpoint.PathKey("lr"), checkpoint.PathIndex(0)}},
			{FQN: "rng", Rank: 0, Bytes: 1, PerRank: true},
			{FQN: "rng", Rank: 1, Bytes: 2, PerRank: true},
		},
	}
	sampleManifest = checkpoint.Manifest{
		Store: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Run: "gpt.small", Trial: "main", Checkpoint: "step-200.a2", Name: "step-200",
		Step: 200, Attempt: 2, WorldSize: 3,
		Ranks:  []checkpoint.RankIndex{{Rank: 0, Index: checkpoint.Sum([]byte("r0"))}, {Rank: 1, Index: checkpoint.Sum([]byte("r1"))}},
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
