package data_test

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// held is chunks in memory, by rank and item.
type held map[string]heldChunk

type heldChunk struct {
	data   []byte
	digest checkpoint.Digest
}

func heldKey(rank int, it checkpoint.Item) string {
	return fmt.Sprint(rank, it.Value, it.Shard.FQN, it.Shard.Box)
}

// Chunk implements data.Memory.
func (h held) Chunk(rank int, it checkpoint.Item) ([]byte, checkpoint.Digest) {
	c := h[heldKey(rank, it)]
	return c.data, c.digest
}

// Whatever the memory contains, only committed bytes are loaded from it. Reads of other
// chunks are returned, to be served by the files.
func TestReadMemory(t *testing.T) {
	m := small()
	m.tensor("rows", tensor.Float32, tensor.Shape{5, 3, 4},
		part{0, []int64{0, 0, 0}, []int64{2, 3, 4}}, part{1, []int64{2, 0, 0}, []int64{3, 3, 4}})
	root := open(t, memory(t))
	m.save(t, root)
	rapid.Check(t, func(rt *rapid.T) {
		h := held{}
		there, bytesThere, unfit := map[string]bool{}, int64(0), 0
		for _, rank := range m.ranks() {
			for i, it := range m.layout.Items(rank) {
				data, err := m.source(rank).Item(i)
				if err != nil {
					rt.Fatal(err)
				}
				c := heldChunk{slices.Clone(data), checkpoint.Sum(data)}
				if c.data == nil {
					c.data = []byte{}
				}
				damage := rapid.SampledFrom([]string{"", "", "unknown", "absent", "short", "digest", "byte", "unknown byte"}).Draw(rt, "damage")
				switch {
				case damage == "absent":
					continue
				case damage == "short":
					c.data = append(c.data, 0)
				case damage == "digest":
					c.digest[7] ^= 1
				case damage == "unknown":
					c.digest = checkpoint.Digest{}
				case len(data) == 0:
					damage = ""
				case damage == "byte", damage == "unknown byte":
					c.data[rapid.IntRange(0, len(data)-1).Draw(rt, "at")] ^= 0x40
					if damage != "byte" {
						c.digest = checkpoint.Digest{}
					}
				}
				h[heldKey(rank, it)] = c
				if damage == "" || damage == "unknown" {
					there[heldKey(rank, it)] = true
					bytesThere += int64(len(data))
				} else if it.Value || len(data) > 0 { // of an empty chunk nothing is read
					unfit++
				}
			}
		}
		r := root.Reader(ref)
		manifest, err := r.ReadMetadata(t.Context())
		if err != nil {
			rt.Fatal(err)
		}
		if err := r.SetUp(t.Context(), manifest, true); err != nil {
			rt.Fatal(err)
		}
		wants := m.wantAll()
		dst := make(destination, len(wants))
		for i, want := range wants {
			dst[i] = make([]byte, len(m.wanted(want)))
		}
		got, err := r.ReadMemory(t.Context(), wants, m.reads(wants), dst, h)
		if err != nil {
			rt.Fatal(err)
		}
		// Verification in place agrees with the copy.
		verified, err := r.VerifyMemory(t.Context(), wants, m.reads(wants), h, nil)
		if err != nil || !reflect.DeepEqual(verified.Rest, got.Rest) || len(verified.Unfit) != len(got.Unfit) {
			rt.Errorf("verified in place: %v, %v; copied: %v", verified, err, got)
		}
		proof, err := r.ProveMemory(t.Context(), h)
		if err != nil {
			rt.Fatal(err)
		}
		proven, err := r.VerifyMemory(t.Context(), wants, m.reads(wants), h, proof)
		if err != nil || !reflect.DeepEqual(proven.Rest, got.Rest) || proven.Bytes < bytesThere {
			rt.Errorf("proven before: %v, %v; copied: %v", proven, err, got)
		}
		left := map[int]bool{}
		for _, read := range got.Rest {
			left[read.Want] = true
		}
		for i, want := range wants {
			k := heldKey(want.Rank, checkpoint.Item{Value: want.Value, Shard: want.Shard})
			if left[i] == there[k] && len(dst[i]) > 0 {
				rt.Errorf("%q of rank %d: from memory %t, want %t", want.Shard.FQN, want.Rank, !left[i], there[k])
			}
			if !left[i] && !bytes.Equal(dst[i], m.wanted(want)) {
				rt.Errorf("%q of rank %d: other bytes", want.Shard.FQN, want.Rank)
			}
		}
		// Blocks of chunks that turn out to be damaged count too.
		if len(got.Unfit) != unfit || got.Bytes < bytesThere {
			rt.Errorf("%d unfit chunks, want %d; %d bytes, want %d: %v", len(got.Unfit), unfit, got.Bytes, bytesThere, got.Unfit)
		}
		if _, err := r.ReadData(t.Context(), wants, got.Rest, dst); err != nil {
			rt.Fatal(err)
		}
		for i, want := range wants {
			if !bytes.Equal(dst[i], m.wanted(want)) {
				rt.Errorf("%q of rank %d: other bytes at the end", want.Shard.FQN, want.Rank)
			}
		}
	})
}

// The digests that a rank has written are those of its items, from the index with the given
// digest.
func TestChunkDigests(t *testing.T) {
	m := small()
	root := open(t, memory(t))
	written, err := m.write(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	for rank, w := range written {
		got, err := root.ChunkDigests(t.Context(), ref, checkpoint.RankIndex{Rank: rank, Index: w.Index})
		if err != nil {
			t.Fatal(err)
		}
		items := m.layout.Items(rank)
		if len(got) != len(items) {
			t.Fatalf("%d digests of %d items", len(got), len(items))
		}
		for i, it := range items {
			data, err := m.source(rank).Item(i)
			if err != nil || got[i].Digest != checkpoint.Sum(data) || heldKey(rank, got[i].Item) != heldKey(rank, it) {
				t.Errorf("item %d: %+v, %v", i, got[i], err)
			}
		}
		if _, err := root.ChunkDigests(t.Context(), ref, checkpoint.RankIndex{Rank: rank, Index: checkpoint.Sum(nil)}); err == nil {
			t.Error("an index with another digest")
		}
	}
}

var _ data.Memory = held{}
