package checkpoint_test

import (
	"math"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func names() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringN(1, 8, 32),
		rapid.SampledFrom([]string{"w", "layers.0.w", "0.10.007.-1", "..", "5", "a/b@0", "\x00", "\xff", "../x", "模型", strings.Repeat("x", 300)}),
	)
}

// paths draws one of the paths that a name may have: cut at some of its dots.
func paths(t *rapid.T, fqn string) checkpoint.Path {
	var p checkpoint.Path
	for part := range strings.SplitSeq(fqn, ".") {
		n, err := strconv.Atoi(part)
		switch last := len(p) - 1; {
		case last >= 0 && !p[last].List && p[last].Key != "" && rapid.Bool().Draw(t, "joined"):
			p[last].Key += "." + part
		case err == nil && strconv.Itoa(n) == part && n >= 0 && n < 1<<31 && rapid.Bool().Draw(t, "index"):
			p = append(p, checkpoint.PathIndex(n))
		case part != "" && rapid.Bool().Draw(t, "literal"):
			p = append(p, checkpoint.PathLiteral(part))
		default:
			p = append(p, checkpoint.PathKey(part))
		}
	}
	if p.Plain(fqn) {
		return nil
	}
	return p
}

func checks() *rapid.Generator[checkpoint.Check] {
	return rapid.Custom(func(t *rapid.T) (c checkpoint.Check) {
		c[rapid.IntRange(0, 15).Draw(t, "at")] = rapid.SampledFrom([]byte{0, 0, 1, 255}).Draw(t, "check")
		return c
	})
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

func locals() *rapid.Generator[checkpoint.Local] {
	item := rapid.Custom(func(t *rapid.T) checkpoint.Item {
		if rapid.Bool().Draw(t, "value") {
			it := checkpoint.Item{
				Value: true, Shard: tensor.Shard{FQN: names().Draw(t, "name")}, Check: checks().Draw(t, "check"),
				Bytes: sizes().Draw(t, "bytes"), PerRank: rapid.Bool().Draw(t, "per rank"),
			}
			it.Path = paths(t, it.Shard.FQN)
			return it
		}
		s := shards().Draw(t, "shard")
		return checkpoint.Item{Shard: s, Bytes: s.Bytes(), Path: paths(t, s.FQN), Check: checks().Draw(t, "check")}
	})
	return rapid.Custom(func(t *rapid.T) checkpoint.Local {
		return checkpoint.Local{Rank: ranks().Draw(t, "rank"), Items: some(t, item)}
	})
}

func layouts() *rapid.Generator[checkpoint.Layout] {
	value := rapid.Custom(func(t *rapid.T) checkpoint.Value {
		v := checkpoint.Value{
			FQN: names().Draw(t, "name"), Rank: ranks().Draw(t, "rank"),
			Bytes: sizes().Draw(t, "bytes"), PerRank: rapid.Bool().Draw(t, "per rank"),
		}
		v.Path = paths(t, v.FQN)
		return v
	})
	whole := rapid.Custom(func(t *rapid.T) checkpoint.Tensor {
		s := shards().Draw(t, "tensor")
		chunk := rapid.Custom(func(t *rapid.T) checkpoint.Chunk {
			return checkpoint.Chunk{Rank: ranks().Draw(t, "rank"), Box: boxIn(t, s.Global)}
		})
		return checkpoint.Tensor{FQN: s.FQN, Path: paths(t, s.FQN), DType: s.DType, Shape: s.Global, Chunks: some(t, chunk)}
	})
	return rapid.Custom(func(t *rapid.T) checkpoint.Layout {
		return checkpoint.Layout{Tensors: some(t, rapid.OneOf(whole, meshes())), Values: some(t, value)}
	})
}

// meshes draws a layout of a tensor as a mesh makes it, now and then with a
// chunk that is out of line.
func meshes() *rapid.Generator[checkpoint.Tensor] {
	return rapid.Custom(func(t *rapid.T) checkpoint.Tensor {
		out := checkpoint.Tensor{FQN: "mesh", DType: tensor.Int8, Shape: tensor.Shape{}}
		dims := rapid.SliceOfN(rapid.Int64Range(1, 7), 0, 3).Draw(t, "shape")
		count := int64(1)
		var cells, parts []int64
		for _, n := range dims {
			out.Shape = append(out.Shape, n)
			cells = append(cells, rapid.Int64Range(1, n).Draw(t, "cell"))
			parts = append(parts, (n-1)/cells[len(cells)-1]+1)
			count *= parts[len(parts)-1]
		}
		rank, step := rapid.IntRange(0, 5).Draw(t, "rank"), rapid.IntRange(0, 2).Draw(t, "step")
		outer := rapid.Int64Range(1, count).Draw(t, "outer")
		for i := range count {
			at := i
			if count%outer == 0 {
				at = i%outer*(count/outer) + i/outer
			}
			b := box(make([]int64, len(dims)), make([]int64, len(dims)))
			for d := len(dims) - 1; d >= 0; d-- {
				b.Offsets[d] = at % parts[d] * cells[d]
				b.Sizes[d] = min(cells[d], dims[d]-b.Offsets[d])
				at /= parts[d]
			}
			out.Chunks = append(out.Chunks, checkpoint.Chunk{Rank: rank + int(i)*step, Box: b})
		}
		odd := rapid.IntRange(0, 4*int(count)).Draw(t, "odd")
		switch c := out.Chunks; {
		case odd < int(count) && rapid.Bool().Draw(t, "box"):
			c[odd].Box = boxIn(t, out.Shape)
		case odd < int(count):
			c[odd].Rank = rapid.IntRange(0, 9).Draw(t, "other rank")
		case odd == int(count):
			out.Chunks = append(c, c[0])
		}
		return out
	})
}

func manifests() *rapid.Generator[checkpoint.Manifest] {
	index := rapid.Custom(func(t *rapid.T) checkpoint.RankIndex {
		return checkpoint.RankIndex{Rank: ranks().Draw(t, "rank"), Index: checkpoint.Sum(rapid.SliceOf(rapid.Byte()).Draw(t, "index"))}
	})
	return rapid.Custom(func(t *rapid.T) checkpoint.Manifest {
		text := rapid.String()
		return checkpoint.Manifest{
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
