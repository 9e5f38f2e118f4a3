package checkpoint_test

import (
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// cut is a tensor that a mesh of ranks cuts: rank by rank, cell(rank) returns
// the position of its box in the grid of parts.
func cut(shape tensor.Shape, parts []int64, cell func(rank int64) []int64) checkpoint.Tensor {
	t := checkpoint.Tensor{FQN: "w", DType: tensor.BFloat16, Shape: shape}
	ranks := int64(1)
	for _, n := range parts {
		ranks *= n
	}
	for rank := range ranks {
		at, b := cell(rank), box(make([]int64, len(shape)), make([]int64, len(shape)))
		for d, n := range shape {
			size := (n + parts[d] - 1) / parts[d]
			b.Offsets[d] = at[d] * size
			b.Sizes[d] = min(size, n-b.Offsets[d])
		}
		t.Chunks = append(t.Chunks, checkpoint.Chunk{Rank: int(rank), Box: b})
	}
	return t
}

// Layouts of meshes cost the bytes of a rule however many ranks there are;
// anything else is listed within 20 bytes a chunk. Both come back.
func TestSizeOfATensorInALayout(t *testing.T) {
	const ranks = 1024
	rows := func(n int64) checkpoint.Tensor {
		return cut(tensor.Shape{n, 4096}, []int64{ranks, 1}, func(r int64) []int64 { return []int64{r, 0} })
	}
	backwards := rows(1 << 20)
	for i := range backwards.Chunks {
		backwards.Chunks[i].Rank = ranks - 1 - i
	}
	odd := rows(1 << 20)
	odd.Chunks[7].Rank = 3
	uneven := checkpoint.Tensor{FQN: "w", DType: tensor.Int8, Shape: tensor.Shape{1 << 40, 1 << 20}}
	at := int64(0)
	for i := range int64(ranks) {
		size := 1<<29 + i*i*i%(1<<20)
		uneven.Chunks = append(uneven.Chunks, checkpoint.Chunk{Rank: int(i), Box: box([]int64{at, 0}, []int64{size, 1 << 20})})
		at += size
	}
	many := checkpoint.Tensor{FQN: "w", DType: tensor.Int8, Shape: tensor.Shape{1 << 17}}
	for i := range int64(1 << 17) {
		many.Chunks = append(many.Chunks, checkpoint.Chunk{Rank: int(i), Box: box([]int64{i}, []int64{1})})
	}
	for name, c := range map[string]struct {
		tensor checkpoint.Tensor
		most   int
	}{
		"one chunk":                 {cut(tensor.Shape{8, 8}, []int64{1, 1}, func(int64) []int64 { return []int64{0, 0} }), 30},
		"scalar":                    {checkpoint.Tensor{FQN: "w", DType: tensor.Int8, Shape: tensor.Shape{}, Chunks: []checkpoint.Chunk{{Rank: 9, Box: box([]int64{}, []int64{})}}}, 30},
		"rows":                      {rows(1 << 20), 30},
		"rows and a tail":           {rows(1<<20 - 5), 30},
		"columns":                   {cut(tensor.Shape{64, 1 << 20}, []int64{1, ranks}, func(r int64) []int64 { return []int64{0, r} }), 30},
		"blocks":                    {cut(tensor.Shape{4096, 4096}, []int64{128, 8}, func(r int64) []int64 { return []int64{r / 8, r % 8} }), 30},
		"blocks by columns":         {cut(tensor.Shape{4096, 4096}, []int64{8, 128}, func(r int64) []int64 { return []int64{r % 8, r / 8} }), 30},
		"two meshes, one dimension": {cut(tensor.Shape{1 << 20, 4}, []int64{ranks, 1}, func(r int64) []int64 { return []int64{r%8*128 + r/8, 0} }), 30},
		"ranks run backwards":       {backwards, 20 * ranks},
		"one rank is out of line":   {odd, 20 * ranks},
		"uneven rows":               {uneven, 20 * ranks},
		"too many for a rule":       {many, 20 << 17},
	} {
		t.Run(name, func(t *testing.T) {
			want := checkpoint.Layout{Tensors: []checkpoint.Tensor{c.tensor}}
			data := checkpoint.EncodeLayout(want)
			if len(data) > c.most {
				t.Errorf("%d chunks take %d bytes, want at most %d", len(c.tensor.Chunks), len(data), c.most)
			}
			got, err := checkpoint.DecodeLayout(data)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%d chunks came back as %d, %v", len(c.tensor.Chunks), len(got.Tensors[0].Chunks), err)
			}
		})
	}
}

// A decoder gives the same plans whatever it has decoded before.
func TestLocalDecoderKeepsNothingOfOtherPlans(t *testing.T) {
	other := checkpoint.Local{Rank: 1, Items: sampleLocal.Items[1:4]}
	twin := checkpoint.Local{Rank: 2, Items: append([]checkpoint.Item(nil), sampleLocal.Items...)}
	twin.Items[0].Shard.Box = box([]int64{0, 1}, []int64{4096, 511})
	twin.Items[0].Bytes = 4096 * 511 * 2
	twin.Items[3].Bytes = 7
	var data [][]byte
	var want []checkpoint.Local
	for i := range 50 {
		l := []checkpoint.Local{sampleLocal, twin, twin, {Rank: 3}, other}[i*7%5]
		want, data = append(want, l), append(data, checkpoint.EncodeLocal(l))
	}
	var c checkpoint.LocalDecoder
	for i := range data {
		if got, err := c.Decode(data[i]); err != nil || !reflect.DeepEqual(got, want[i]) {
			t.Errorf("plan %d came back as %+v, %v", i, got, err)
		}
		if _, err := c.Decode(data[i][:len(data[i])-1]); err == nil {
			t.Errorf("plan %d was accepted without its last byte", i)
		}
	}
	got, err := checkpoint.DecodeLocals(data)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("together they came back as %+v, %v", got, err)
	}
	if got, err := checkpoint.DecodeLocals(nil); err != nil || len(got) != 0 {
		t.Errorf("no plans came back as %+v, %v", got, err)
	}
	data[3], data[40] = data[3][:9], []byte("nothing")
	_, err = checkpoint.DecodeLocals(data)
	wantError(t, err, "decode local plan: offset", "not a CKLP")
}

// The reader refuses a layout without a form instead of reading another layout.
func TestABoxOfOtherDimensionsHasNoForm(t *testing.T) {
	it := checkpoint.Item{Shard: tensor.Shard{FQN: "w", DType: tensor.Int8, Global: tensor.Shape{}, Box: box([]int64{0}, []int64{4})}}
	_, err := checkpoint.DecodeLocal(checkpoint.EncodeLocal(checkpoint.Local{Items: []checkpoint.Item{it}}))
	wantError(t, err, "unknown dtype 0")
	l := checkpoint.Tensor{FQN: "w", DType: tensor.Int8, Shape: tensor.Shape{4}, Chunks: []checkpoint.Chunk{{Box: box(nil, nil)}}}
	_, err = checkpoint.DecodeLayout(checkpoint.EncodeLayout(checkpoint.Layout{Tensors: []checkpoint.Tensor{l}}))
	wantError(t, err, "unknown dtype 0")
}
