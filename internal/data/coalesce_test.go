package data

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestCoalesce holds the plan of a reading to its law: each block that is
// wanted is read once, at the place where it is; what is read together lies in
// one file, is no more than a window, and little of it is not wanted.
func TestCoalesce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type spot struct {
			path  string
			chunk int
			block int64
		}
		want := map[spot]int{}
		var chunks []*chunkRead
		for f := range rapid.IntRange(1, 3).Draw(t, "files") {
			path := fmt.Sprintf("f%d", f)
			at := int64(4096)
			for range rapid.IntRange(1, 8).Draw(t, "chunks") {
				size := rapid.OneOf(rapid.Int64Range(1, 9000), rapid.Int64Range(1, 10<<20)).Draw(t, "bytes")
				e := &checkpoint.Entry{Offset: at}
				e.Item.Bytes = size
				e.Item.Shard.Box = tensor.Shape{size}.Full()
				c := &chunkRead{entry: e, path: path, size: 1}
				for b := range checkpoint.Blocks(size) {
					if rapid.IntRange(0, 4).Draw(t, "wanted") > 0 {
						c.blocks = append(c.blocks, blocks.Range{Lo: b, Hi: b + 1})
						want[spot{path, len(chunks), b}]++
					}
				}
				c.blocks = blocks.Merge(c.blocks)
				chunks = append(chunks, c)
				at += size + rapid.Int64Range(0, 5000).Draw(t, "gap")
			}
		}
		got := map[spot]int{}
		by := reachOf(object.Reading{Span: rapid.SampledFrom([]int64{0, 1, 1 << 20, 16 << 20}).Draw(t, "span")})
		for _, r := range coalesce(chunks, by) {
			wanted := int64(0)
			for i, p := range r.parts {
				if p.chunk.path != r.parts[0].chunk.path || i > 0 && p.from() < r.parts[i-1].to() {
					t.Fatalf("a run reads %s at %d after %d", p.chunk.path, p.from(), r.parts[i-1].to())
				}
				for b := p.blocks.Lo; b < p.blocks.Hi; b++ {
					got[spot{p.chunk.path, slices.Index(chunks, p.chunk), b}]++
				}
				wanted += p.to() - p.from()
			}
			all := r.parts[len(r.parts)-1].to() - r.parts[0].from()
			if len(r.parts) > 1 && (all > by.most || all-wanted > wanted/gapShare) || all > by.task*checkpoint.BlockSize {
				t.Fatalf("a run of %d parts reads %d bytes for %d", len(r.parts), all, wanted)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d blocks are read, %d are wanted", len(got), len(want))
		}
		for s, n := range got {
			if n != 1 || want[s] != 1 {
				t.Fatalf("block %v is read %d times", s, n)
			}
		}
	})
}
