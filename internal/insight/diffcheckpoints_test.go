package insight

import (
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// chunk is a stored part of a tensor: rows from, of n.
func chunk(rank int, fqn string, dtype tensor.DType, shape tensor.Shape, from, n int64, content string) Content {
	box := tensor.Box{Offsets: make([]int64, len(shape)), Sizes: slices.Clone(shape)}
	box.Offsets[0], box.Sizes[0] = from, n
	it := checkpoint.Item{Shard: tensor.Shard{FQN: fqn, DType: dtype, Global: shape, Box: box}}
	it.Bytes = it.Shard.Bytes()
	return Content{Rank: rank, Item: it, Digest: digestOf(content)}
}

func digestOf(content string) checkpoint.Digest {
	if content == "" {
		return checkpoint.Digest{} // not known
	}
	return checkpoint.Sum([]byte(content))
}

func TestPartsOfCheckpoints(t *testing.T) {
	f32, whole := tensor.Float32, tensor.Shape{4, 2}
	halves := []Content{chunk(0, "w", f32, whole, 0, 2, "top"), chunk(1, "w", f32, whole, 2, 2, "bottom")}
	for name, c := range map[string]struct {
		a, b []Content
		want []string
	}{
		"the same":               {halves, halves, nil},
		"on other ranks":         {halves, []Content{chunk(0, "w", f32, whole, 2, 2, "bottom"), chunk(1, "w", f32, whole, 0, 2, "top")}, nil},
		"another content":        {halves, []Content{halves[0], chunk(1, "w", f32, whole, 2, 2, "other")}, []string{ContentDiffers}},
		"halves exchanged":       {halves, []Content{chunk(0, "w", f32, whole, 0, 2, "bottom"), chunk(1, "w", f32, whole, 2, 2, "top")}, []string{ContentDiffers}},
		"other chunks":           {halves, []Content{chunk(0, "w", f32, whole, 0, 4, "all")}, []string{ChunksDiffer}},
		"other cuts":             {halves, []Content{chunk(0, "w", f32, whole, 0, 1, "top"), chunk(1, "w", f32, whole, 1, 3, "bottom")}, []string{ChunksDiffer}},
		"never read":             {halves, []Content{halves[0], chunk(1, "w", f32, whole, 2, 2, "")}, []string{UnknownContent}},
		"another dtype":          {halves, []Content{chunk(0, "w", tensor.Int32, whole, 0, 2, "top"), chunk(1, "w", tensor.Int32, whole, 2, 2, "bottom")}, []string{DTypeDiffers}},
		"another shape":          {halves, []Content{chunk(0, "w", f32, tensor.Shape{2, 4}, 0, 2, "top")}, []string{ShapeDiffers}},
		"another dtype and form": {halves, []Content{chunk(0, "w", tensor.Int8, tensor.Shape{8}, 0, 8, "top")}, []string{DTypeDiffers, ShapeDiffers}},
		"added":                  {nil, halves, []string{Added}},
		"removed":                {halves, nil, []string{Removed}},
	} {
		t.Run(name, func(t *testing.T) {
			key := partKey{"tensor", "w"}
			if got := partsFrom(c.a)[key].changes(partsFrom(c.b)[key]); !slices.Equal(got, c.want) {
				t.Errorf("it differs in %q, want %q", got, c.want)
			}
		})
	}
	value := func(rank int, perRank bool, bytes int64, content string) Content {
		it := checkpoint.Item{Shard: tensor.Shard{FQN: "v"}, Value: true, PerRank: perRank, Bytes: bytes}
		return Content{Rank: rank, Item: it, Digest: digestOf(content)}
	}
	// A shared value may be in the file of any rank; a per-rank one is its own.
	a := partsFrom([]Content{value(0, false, 3, "abc"), value(0, true, 3, "abc"), value(1, true, 3, "abd")})
	b := partsFrom([]Content{value(1, false, 3, "abc"), value(0, true, 4, "abcd"), value(1, true, 3, "xyz")})
	for name, want := range map[string][]string{"v": nil, "v of rank 0": {SizeDiffers}, "v of rank 1": {ContentDiffers}} {
		key := partKey{"value", name}
		if got := a[key].changes(b[key]); !slices.Equal(got, want) {
			t.Errorf("%s differs in %q, want %q", name, got, want)
		}
	}
}
