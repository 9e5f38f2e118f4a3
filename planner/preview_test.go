package planner_test

import (
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func TestPreview(t *testing.T) {
	// 8 rows of 6 bytes on two ranks, to 3 ranks: rows 3, 3, 2.
	shape := tensor.Shape{8, 3}
	layout := global(t, []checkpoint.Local{
		{Rank: 0, Items: []checkpoint.Item{
			item(shard("w", shape, rows(shape, 2)[0])), item(shard("step", nil, box(nil, nil))), value("config", 7, false), value("rng", 5, true),
		}},
		{Rank: 4, Items: []checkpoint.Item{item(shard("w", shape, rows(shape, 2)[1])), value("rng", 6, true)}},
	})
	p, err := planner.NewPreview(layout, 3, 8)
	if err != nil {
		t.Fatal(err)
	}
	want := []planner.RankPreview{
		{0, 18 + 2 + 7 + 5, 24 + 2 + 7 + 5, 4, 0, []string{}, []planner.FilePreview{{0, 18 + 14, 24 + 14}}},
		{1, 18 + 2 + 7, 8 + 2 + 7 + 16, 4, 0, []string{"rng"}, []planner.FilePreview{{0, 6 + 9, 8 + 9}, {4, 12, 16}}},
		{2, 12 + 2 + 7, 16 + 2 + 7, 3, 0, []string{"rng"}, []planner.FilePreview{{0, 9, 9}, {4, 12, 16}}},
	}
	got, err := json.Marshal(p.Ranks)
	must, mustErr := json.Marshal(want)
	if err != nil || mustErr != nil || string(got) != string(must) {
		t.Errorf("got  %s, %v\nwant %s", got, err, must)
	}
	if p.Bytes != 80 || p.Read != 96 || !slices.Equal(p.Unread, []planner.UnreadValue{{FQN: "rng", Rank: 4}}) {
		t.Errorf("%d bytes, %d read, unread %v", p.Bytes, p.Read, p.Unread)
	}
	// A lone rank has saved the first part: the rest is missing.
	p, err = planner.NewPreview(global(t, spread(tensor.Shape{16}, part(0, 6))), 2, 8)
	if err != nil || p.Ranks[0].Missing != 4 || p.Ranks[1].Missing != 16 || p.Bytes != 12 {
		t.Errorf("%+v, %v", p, err)
	}
	for ranks, want := range map[int]string{
		0:       "preview a load on 0 ranks: want 1 to 65536",
		-1:      "preview a load on -1 ranks: want 1 to 65536",
		1 << 17: "preview a load on 131072 ranks: want 1 to 65536",
	} {
		_, err := planner.NewPreview(layout, ranks, 8)
		problems(t, err, want)
	}
	_, err = planner.NewPreview(layout, 1, 0)
	problems(t, err, "preview a load: blocks of 0 bytes")
	// Numbers at the end of their range.
	huge := tensor.Shape{math.MaxInt64}
	s := shard("w", huge, huge.Full())
	s.DType = tensor.Int8
	p, err = planner.NewPreview(global(t, []checkpoint.Local{{Items: []checkpoint.Item{item(s)}}}), 3, 1<<16)
	if err != nil || p.Bytes != math.MaxInt64 || p.Ranks[2].Bytes != math.MaxInt64-2*p.Ranks[0].Bytes || p.Ranks[2].Missing != 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// The preview agrees with the planner of loads: the same bytes from the
// same files, and just the blocks that hold them.
func TestPreviewIsTheLoad(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 5).Draw(t, "world")
		locals := checkpoints(world).Draw(t, "locals")
		if world == 1 && rapid.Bool().Draw(t, "holes") { // a lone rank may save parts
			locals[0].Items = locals[0].Items[:rapid.IntRange(0, len(locals[0].Items)).Draw(t, "items")]
		}
		layout := global(t, locals)
		ranks, block := rapid.IntRange(1, 7).Draw(t, "ranks"), rapid.Int64Range(1, 20).Draw(t, "block")
		p, err := planner.NewPreview(layout, ranks, block)
		if err != nil {
			t.Fatal(err)
		}
		loader, bytes, read := planner.NewLoader(layout), int64(0), int64(0)
		for rank, got := range p.Ranks {
			files, missing := map[int]planner.FilePreview{}, int64(0)
			reads := 0
			add := func(r checkpoint.Read, size int64, blocks map[int64]bool, bytes int64) {
				f := files[r.Rank]
				f.Rank = r.Rank
				f.Bytes += bytes
				for b := range blocks {
					f.Read += min(block, size-b*block)
				}
				files[r.Rank] = f
				reads++
			}
			for _, saved := range layout.Tensors {
				b := saved.Shape.Full()
				if len(b.Sizes) > 0 {
					b = rows(saved.Shape, ranks)[rank]
				}
				w := shard(saved.FQN, saved.Shape, b)
				covered := int64(0)
				for _, c := range saved.Chunks { // as wants of their own, for what the whole want may lack
					region, ok := c.Box.Intersect(b)
					if !ok {
						continue
					}
					part := w
					part.Box = region
					rs, err := loader.Load([]checkpoint.Want{{Shard: part}})
					if err != nil || len(rs) != 1 {
						t.Fatal(rs, err)
					}
					blocks := map[int64]bool{}
					for at := range region.Volume() {
						pos, left := make([]int64, len(region.Sizes)), at
						for d := len(pos) - 1; d >= 0; d-- {
							pos[d] = region.Offsets[d] + left%region.Sizes[d]
							left /= region.Sizes[d]
						}
						first := 2 * position(c.Box, pos) // elements have two bytes
						blocks[first/block], blocks[(first+1)/block] = true, true
					}
					add(rs[0], 2*c.Box.Volume(), blocks, 2*region.Volume())
					covered += region.Volume()
				}
				missing += w.Bytes() - 2*covered
			}
			var lacks []string
			for _, v := range layout.Values {
				w := checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Rank: rank}
				if loader.Lacks(w) {
					lacks = append(lacks, v.FQN)
					continue
				}
				if v.PerRank && v.Rank != rank {
					continue
				}
				rs, err := loader.Load([]checkpoint.Want{w})
				if err != nil {
					t.Fatal(err)
				}
				blocks := map[int64]bool{}
				for b := range (v.Bytes + block - 1) / block {
					blocks[b] = true
				}
				add(rs[0], v.Bytes, blocks, v.Bytes)
			}
			slices.Sort(lacks)
			if got.Rank != rank || got.Reads != reads || got.Missing != missing || !slices.Equal(got.Lacks, slices.Compact(lacks)) || len(got.Files) != len(files) {
				t.Fatalf("rank %d: %+v, want %d reads, %d missing, lacks %q, files %+v", rank, got, reads, missing, lacks, files)
			}
			sum, sumRead := int64(0), int64(0)
			for _, f := range got.Files {
				if f != files[f.Rank] {
					t.Fatalf("rank %d reads %+v, want %+v", rank, f, files[f.Rank])
				}
				sum, sumRead = sum+f.Bytes, sumRead+f.Read
			}
			if got.Bytes != sum || got.Read != sumRead {
				t.Fatalf("rank %d: %+v is not the sum of its files", rank, got)
			}
			bytes, read = bytes+sum, read+sumRead
		}
		if p.Bytes != bytes || p.Read != read {
			t.Fatalf("%d and %d bytes, want %d and %d", p.Bytes, p.Read, bytes, read)
		}
	})
}
