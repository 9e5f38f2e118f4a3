package planner

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Stored equals a count of the needed elements, each once.
func TestStored(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dims := rapid.IntRange(0, 3).Draw(t, "dims")
		shape := make(tensor.Shape, dims)
		for d := range shape {
			shape[d] = rapid.Int64Range(2, 7).Draw(t, "size")
		}
		layout := checkpoint.Layout{Values: []checkpoint.Value{{FQN: "v", Bytes: 100}, {FQN: "own", PerRank: true, Rank: 0, Bytes: 3}, {FQN: "own", PerRank: true, Rank: 1, Bytes: 4}}}
		whole := checkpoint.Tensor{FQN: "t", DType: tensor.Int16, Shape: shape, Chunks: []checkpoint.Chunk{{Box: shape.Full()}}}
		if dims > 0 && rapid.Bool().Draw(t, "two chunks") {
			whole.Chunks = nil
			for rank := range 2 {
				whole.Chunks = append(whole.Chunks, checkpoint.Chunk{Box: Rows(shape, 2, rank), Rank: rank})
			}
		}
		layout.Tensors = []checkpoint.Tensor{whole}
		var wants []checkpoint.Want
		seen := map[string]bool{}
		for range rapid.IntRange(0, 5).Draw(t, "wants") {
			box := shape.Full()
			for d, n := range shape {
				box.Offsets[d] = rapid.Int64Range(0, n-1).Draw(t, "offset")
				box.Sizes[d] = rapid.Int64Range(1, n-box.Offsets[d]).Draw(t, "part")
			}
			wants = append(wants, checkpoint.Want{Shard: tensor.Shard{FQN: "t", DType: tensor.Int16, Global: shape, Box: box}})
			eachElement(box, func(at string) { seen[at] = true })
		}
		want := int64(2 * len(seen))
		for range rapid.IntRange(0, 2).Draw(t, "values") {
			wants = append(wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: "v"}})
		}
		if len(wants) > 0 && wants[len(wants)-1].Value {
			want += 100
		}
		wants = append(wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: "own"}, Rank: 1})
		want += 4
		p := NewLoader(layout)
		reads, err := p.Load(wants)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Stored(reads); got != want {
			t.Fatalf("%d bytes, want %d, of %v", got, want, wants)
		}
	})
}

// eachElement visits the elements of a box by their place.
func eachElement(b tensor.Box, visit func(at string)) {
	at := append([]int64{}, b.Offsets...)
	var walk func(d int)
	walk = func(d int) {
		if d == len(at) {
			visit(fmt.Sprint(at))
			return
		}
		for i := range b.Sizes[d] {
			at[d] = b.Offsets[d] + i
			walk(d + 1)
		}
	}
	walk(0)
}
