package planner_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// whole is a tensor as it is in memory before it is cut.
type whole struct {
	fqn   string
	dtype tensor.DType
	shape tensor.Shape
	data  []byte
}

func wholes(n int) *rapid.Generator[whole] {
	return rapid.Custom(func(t *rapid.T) whole {
		w := whole{fqn: fmt.Sprintf("w%d", n), shape: shapes().Draw(t, "shape")}
		w.dtype = tensor.DType(rapid.Uint8Range(1, uint8(tensor.Float8E5M2FNUZ)).Draw(t, "dtype"))
		seed := rapid.Uint64().Draw(t, "seed")
		rng := rand.New(rand.NewPCG(seed, 1))
		w.data = make([]byte, w.shape.Volume()*int64(w.dtype.Size()))
		for i := range w.data {
			w.data[i] = byte(rng.Uint32())
		}
		return w
	})
}

func (w whole) shard(b tensor.Box) tensor.Shard {
	return tensor.Shard{FQN: w.fqn, DType: w.dtype, Global: w.shape, Box: b}
}

// cut copies one element after the other.
func (w whole) cut(b tensor.Box) (out []byte) {
	size := int64(w.dtype.Size())
	for i := range b.Volume() {
		at, left := slices.Clone(b.Offsets), i
		for d := len(at) - 1; d >= 0; d-- {
			at[d] += left % b.Sizes[d]
			left /= b.Sizes[d]
		}
		from := position(w.shape.Full(), at) * size
		out = append(out, w.data[from:from+size]...)
	}
	return out
}

// as is the tensor in another dtype, all of it converted at once.
func (w whole) as(t *rapid.T, d tensor.DType) whole {
	out := w
	out.dtype, out.data = d, make([]byte, w.shape.Volume()*int64(d.Size()))
	if err := tensor.Convert(out.data, d, w.data, w.dtype); err != nil {
		t.Fatal(err)
	}
	return out
}

// boxIn draws any box of a shape, often empty or all of a dimension.
func boxIn(t *rapid.T, shape tensor.Shape) tensor.Box {
	b := shape.Full()
	for d, n := range shape {
		if rapid.Bool().Draw(t, "cut") {
			b.Offsets[d] = rapid.Int64Range(0, n).Draw(t, "offset")
			b.Sizes[d] = rapid.Int64Range(0, n-b.Offsets[d]).Draw(t, "size")
		}
	}
	return b
}

// Whatever dtype and layout a tensor was saved in, in several boxes a rank and
// with replicas, each rank gets each of its boxes, which may overlap, be empty
// or have no dimensions, as the dtype that it wants: bitwise what a cut of the
// whole converted tensor is.
func TestAnyLayoutToAnyLayoutAndDType(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 5).Draw(t, "world")
		locals := make([]checkpoint.Local, world)
		for rank := range locals {
			locals[rank].Rank = rank
		}
		var tensors []whole
		for n := range rapid.IntRange(1, 3).Draw(t, "tensors") {
			w := wholes(n).Draw(t, "tensor")
			tensors = append(tensors, w)
			offered := map[string]bool{}
			for _, b := range splits(t, w.shape) {
				for rank := range holders(t, world) {
					if at := place(rank, w.fqn, b); !offered[at] {
						offered[at] = true
						locals[rank].Items = append(locals[rank].Items, item(w.shard(b)))
					}
				}
			}
		}
		layout := global(t, locals)
		stored := map[string][]byte{}
		for _, l := range locals {
			for _, it := range layout.Items(l.Rank) {
				w := tensors[slices.IndexFunc(tensors, func(w whole) bool { return w.fqn == it.Shard.FQN })]
				stored[place(l.Rank, w.fqn, it.Shard.Box)] = w.cut(it.Shard.Box)
			}
		}
		var wants []checkpoint.Want
		var must [][]byte
		for range rapid.IntRange(1, 6).Draw(t, "wants") {
			w := rapid.SampledFrom(tensors).Draw(t, "of")
			targets := []tensor.DType{}
			for d := tensor.DType(1); d.Valid(); d++ {
				if tensor.Convertible(w.dtype, d) == nil {
					targets = append(targets, d)
				}
			}
			want := w.as(t, rapid.SampledFrom(targets).Draw(t, "as"))
			b := boxIn(t, w.shape)
			wants, must = append(wants, checkpoint.Want{Shard: want.shard(b)}), append(must, want.cut(b))
		}
		reads, err := planner.NewLoader(layout).Load(wants)
		if err != nil {
			t.Fatal(err)
		}
		got := make([][]byte, len(wants))
		for i, w := range wants {
			got[i] = bytes.Repeat([]byte{0xee}, int(w.Shard.Bytes()))
		}
		for _, r := range reads {
			src, ok := stored[place(r.Rank, r.FQN, r.Chunk)]
			if !ok {
				t.Fatalf("read %+v of a chunk that no rank wrote", r)
			}
			w := wants[r.Want].Shard
			if err := tensor.ConvertRegion(got[r.Want], w.Box, w.DType, src, r.Chunk, r.DType, r.Region); err != nil {
				t.Fatal(err)
			}
		}
		for i, w := range wants {
			if !bytes.Equal(got[i], must[i]) {
				t.Fatalf("%+v was read as %x, want %x", w.Shard, got[i], must[i])
			}
		}
	})
}
