package planner_test

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func box(offsets, sizes []int64) tensor.Box { return tensor.Box{Offsets: offsets, Sizes: sizes} }

// part is the box of a 1-D tensor.
func part(lo, size int64) tensor.Box { return box([]int64{lo}, []int64{size}) }

func shard(fqn string, shape tensor.Shape, b tensor.Box) tensor.Shard {
	return tensor.Shard{FQN: fqn, DType: tensor.Int16, Global: shape, Box: b}
}

func item(s tensor.Shard) checkpoint.Item { return checkpoint.Item{Shard: s, Bytes: s.Bytes()} }

func value(fqn string, bytes int64, perRank bool) checkpoint.Item {
	return checkpoint.Item{Value: true, Shard: tensor.Shard{FQN: fqn}, Bytes: bytes, PerRank: perRank}
}

// parts is one local plan a rank, each with some boxes of one tensor.
func parts(shape tensor.Shape, ranks ...[]tensor.Box) []checkpoint.Local {
	var locals []checkpoint.Local
	for rank, boxes := range ranks {
		l := checkpoint.Local{Rank: rank}
		for _, b := range boxes {
			l.Items = append(l.Items, item(shard("w", shape, b)))
		}
		locals = append(locals, l)
	}
	return locals
}

// spread is parts of a shape on as many ranks as there are boxes.
func spread(shape tensor.Shape, boxes ...tensor.Box) []checkpoint.Local {
	var ranks [][]tensor.Box
	for _, b := range boxes {
		ranks = append(ranks, []tensor.Box{b})
	}
	return parts(shape, ranks...)
}

// split is Shard(dim) as PyTorch places it: equal parts rounded up, the last
// ones shorter or empty.
func split(b tensor.Box, dim, ranks int) (boxes []tensor.Box) {
	n := b.Sizes[dim]
	each := (n + int64(ranks) - 1) / int64(ranks)
	for rank := range int64(ranks) {
		lo := min(rank*each, n)
		cut := box(slices.Clone(b.Offsets), slices.Clone(b.Sizes))
		cut.Offsets[dim], cut.Sizes[dim] = b.Offsets[dim]+lo, min(each, n-lo)
		boxes = append(boxes, cut)
	}
	return boxes
}

func rows(shape tensor.Shape, ranks int) []tensor.Box { return split(shape.Full(), 0, ranks) }

// show is a layout as text, one line a rank.
func show(l checkpoint.Layout) string {
	lines := map[int]string{}
	for _, t := range l.Tensors {
		for _, c := range t.Chunks {
			lines[c.Rank] += fmt.Sprintf(" %s%v", t.FQN, c.Box)
		}
	}
	for _, v := range l.Values {
		lines[v.Rank] += fmt.Sprintf(" %s(%d)", v.FQN, v.Bytes)
	}
	var all []string
	for _, rank := range slices.Sorted(maps.Keys(lines)) {
		all = append(all, fmt.Sprintf("r%d:%s", rank, lines[rank]))
	}
	return strings.Join(all, "\n")
}

// global is the layout of plans that must fit together.
func global(t interface{ Fatal(...any) }, locals []checkpoint.Local) checkpoint.Layout {
	made, err := planner.Global(locals)
	if err != nil {
		t.Fatal(err)
	}
	return made.Layout
}

// problems checks that err is exactly these lines.
func problems(t *testing.T, err error, want ...string) {
	t.Helper()
	got := "no error"
	if err != nil {
		got = err.Error()
	}
	if got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

// position is the place of an element among those of a shape, in row-major
// order; the element's number in a whole tensor.
func position(b tensor.Box, at []int64) int64 {
	pos, stride := int64(0), int64(1)
	for d := len(at) - 1; d >= 0; d-- {
		pos += (at[d] - b.Offsets[d]) * stride
		stride *= b.Sizes[d]
	}
	return pos
}

// cut returns the contents of box b of a whole tensor: each element is two bytes with
// its position in the tensor.
func cut(shape tensor.Shape, b tensor.Box) []byte {
	out := make([]byte, 2*b.Volume())
	if b.Empty() {
		return out
	}
	at := slices.Clone(b.Offsets)
	for {
		n, to := position(shape.Full(), at)+1, position(b, at)
		out[2*to], out[2*to+1] = byte(n), byte(n>>8)
		d := len(at) - 1
		for ; d >= 0; d-- {
			if at[d]++; at[d] < b.Offsets[d]+b.Sizes[d] {
				break
			}
			at[d] = b.Offsets[d]
		}
		if d < 0 {
			return out
		}
	}
}

// disk holds the files that the ranks have written under a layout.
type disk map[string][]byte

func place(rank int, fqn string, b tensor.Box) string { return fmt.Sprintf("r%d/%s/%v", rank, fqn, b) }

// write stores every rank's items, each once.
func write(t interface{ Fatalf(string, ...any) }, l checkpoint.Layout, world int) disk {
	stored, sum := disk{}, int64(0)
	for rank := range world {
		for _, it := range l.Items(rank) {
			at := place(rank, it.Shard.FQN, it.Shard.Box)
			if _, twice := stored[at]; twice {
				t.Fatalf("%s is written twice", at)
			}
			stored[at] = cut(it.Shard.Global, it.Shard.Box)
			sum += it.Bytes
		}
	}
	if sum != l.Bytes() {
		t.Fatalf("the ranks write %d bytes of %d", sum, l.Bytes())
	}
	return stored
}

// load reads each wanted box through the planner and compares it with the
// same box cut from the whole tensor.
func (stored disk) load(t interface{ Fatalf(string, ...any) }, p *planner.Loader, wants []checkpoint.Want) {
	reads, err := p.Load(wants)
	if err != nil {
		t.Fatalf("load %+v: %v", wants, err)
	}
	got := make([][]byte, len(wants))
	for i, w := range wants {
		got[i] = bytes.Repeat([]byte{0xff}, int(w.Shard.Bytes()))
	}
	for _, r := range reads {
		src, ok := stored[place(r.Rank, r.FQN, r.Chunk)]
		if !ok {
			t.Fatalf("read %+v of a chunk that no rank wrote", r)
		}
		w := wants[r.Want].Shard
		tensor.CopyRegion(got[r.Want], w.Box, src, r.Chunk, r.Region, w.DType.Size())
	}
	for i, w := range wants {
		if want := cut(w.Shard.Global, w.Shard.Box); !bytes.Equal(got[i], want) {
			t.Fatalf("%v of %v was read as %x, want %x", w.Shard.Box, w.Shard.Global, got[i], want)
		}
	}
}

// shapes draws up to four dimensions, some of size 1 or 0.
func shapes() *rapid.Generator[tensor.Shape] {
	dim := rapid.OneOf(rapid.Int64Range(1, 6), rapid.SampledFrom([]int64{1, 1, 2, 8, 0}))
	return rapid.Map(rapid.SliceOfN(dim, 0, 4), func(s []int64) tensor.Shape { return s })
}

// splits cuts a shape into boxes that cover it once: each cut halves one box
// somewhere, so that no grid need come out.
func splits(t *rapid.T, shape tensor.Shape) []tensor.Box {
	boxes := []tensor.Box{shape.Full()}
	for range rapid.IntRange(0, 9).Draw(t, "cuts") {
		i := rapid.IntRange(0, len(boxes)-1).Draw(t, "box")
		b := boxes[i]
		if b.Empty() || len(shape) == 0 {
			continue
		}
		d := rapid.IntRange(0, len(shape)-1).Draw(t, "dimension")
		at := rapid.Int64Range(0, b.Sizes[d]).Draw(t, "at")
		low := box(slices.Clone(b.Offsets), slices.Clone(b.Sizes))
		high := box(slices.Clone(b.Offsets), slices.Clone(b.Sizes))
		low.Sizes[d] = at
		high.Offsets[d], high.Sizes[d] = b.Offsets[d]+at, b.Sizes[d]-at
		boxes[i] = low
		boxes = append(boxes, high)
	}
	return boxes
}
