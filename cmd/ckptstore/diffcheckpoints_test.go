package main

import (
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// chunk is a stored part of a tensor: rows from, of n.
func chunk(rank int, fqn string, dtype tensor.DType, shape tensor.Shape, from, n int64, content string) stored {
	box := tensor.Box{Offsets: make([]int64, len(shape)), Sizes: slices.Clone(shape)}
	box.Offsets[0], box.Sizes[0] = from, n
	it := checkpoint.Item{Shard: tensor.Shard{FQN: fqn, DType: dtype, Global: shape, Box: box}}
	it.Bytes = it.Shard.Bytes()
	return stored{rank: rank, item: it, digest: digestOf(content)}
}

func digestOf(content string) checkpoint.Digest {
	if content == "" {
		return checkpoint.Digest{} // not known
	}
	return checkpoint.Sum([]byte(content))
}

func TestPartsOfCheckpoints(t *testing.T) {
	f32, whole := tensor.Float32, tensor.Shape{4, 2}
	halves := []stored{chunk(0, "w", f32, whole, 0, 2, "top"), chunk(1, "w", f32, whole, 2, 2, "bottom")}
	for name, c := range map[string]struct {
		a, b []stored
		want []string
	}{
		"the same":               {halves, halves, nil},
		"on other ranks":         {halves, []stored{chunk(0, "w", f32, whole, 2, 2, "bottom"), chunk(1, "w", f32, whole, 0, 2, "top")}, nil},
		"another content":        {halves, []stored{halves[0], chunk(1, "w", f32, whole, 2, 2, "other")}, []string{isContent}},
		"halves exchanged":       {halves, []stored{chunk(0, "w", f32, whole, 0, 2, "bottom"), chunk(1, "w", f32, whole, 2, 2, "top")}, []string{isContent}},
		"other chunks":           {halves, []stored{chunk(0, "w", f32, whole, 0, 4, "all")}, []string{isChunks}},
		"other cuts":             {halves, []stored{chunk(0, "w", f32, whole, 0, 1, "top"), chunk(1, "w", f32, whole, 1, 3, "bottom")}, []string{isChunks}},
		"never read":             {halves, []stored{halves[0], chunk(1, "w", f32, whole, 2, 2, "")}, []string{isUnknown}},
		"another dtype":          {halves, []stored{chunk(0, "w", tensor.Int32, whole, 0, 2, "top"), chunk(1, "w", tensor.Int32, whole, 2, 2, "bottom")}, []string{isDType}},
		"another shape":          {halves, []stored{chunk(0, "w", f32, tensor.Shape{2, 4}, 0, 2, "top")}, []string{isShape}},
		"another dtype and form": {halves, []stored{chunk(0, "w", tensor.Int8, tensor.Shape{8}, 0, 8, "top")}, []string{isDType, isShape}},
		"added":                  {nil, halves, []string{isAdded}},
		"removed":                {halves, nil, []string{isRemoved}},
	} {
		t.Run(name, func(t *testing.T) {
			key := partKey{"tensor", "w"}
			if got := partsFrom(c.a)[key].changes(partsFrom(c.b)[key]); !slices.Equal(got, c.want) {
				t.Errorf("it differs in %q, want %q", got, c.want)
			}
		})
	}
	value := func(rank int, perRank bool, bytes int64, content string) stored {
		it := checkpoint.Item{Shard: tensor.Shard{FQN: "v"}, Value: true, PerRank: perRank, Bytes: bytes}
		return stored{rank: rank, item: it, digest: digestOf(content)}
	}
	// A shared value may be in the file of any rank; a per-rank one is its own.
	a := partsFrom([]stored{value(0, false, 3, "abc"), value(0, true, 3, "abc"), value(1, true, 3, "abd")})
	b := partsFrom([]stored{value(1, false, 3, "abc"), value(0, true, 4, "abcd"), value(1, true, 3, "xyz")})
	for name, want := range map[string][]string{"v": nil, "v of rank 0": {isSize}, "v of rank 1": {isContent}} {
		key := partKey{"value", name}
		if got := a[key].changes(b[key]); !slices.Equal(got, want) {
			t.Errorf("%s differs in %q, want %q", name, got, want)
		}
	}
}
