package data

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/tensor"
)

func shardItem(fqn string, dtype tensor.DType, shape tensor.Shape, box tensor.Box) checkpoint.Item {
	s := tensor.Shard{FQN: fqn, DType: dtype, Global: shape, Box: box}
	return checkpoint.Item{Shard: s, Bytes: s.Bytes()}
}

func valueItem(fqn string, size int64) checkpoint.Item {
	return checkpoint.Item{Value: true, Shard: tensor.Shard{FQN: fqn}, Bytes: size, PerRank: true}
}

// hostileItems have names that collide as keys.
func hostileItems() []checkpoint.Item {
	shape := tensor.Shape{4, 4}
	upper := tensor.Box{Offsets: []int64{0, 0}, Sizes: []int64{2, 4}}
	lower := tensor.Box{Offsets: []int64{2, 0}, Sizes: []int64{2, 4}}
	none := tensor.Box{Offsets: []int64{2, 0}, Sizes: []int64{0, 4}}
	return []checkpoint.Item{
		shardItem("w", tensor.Float32, shape, lower),
		shardItem("w", tensor.Float32, shape, none),
		shardItem("w@2,0", tensor.Int8, shape, shape.Full()),
		shardItem("w@2,0#2", tensor.Complex128, shape, shape.Full()),
		shardItem("w", tensor.Float32, shape, upper),
		shardItem("__metadata__", tensor.Bool, shape, shape.Full()),
		shardItem("w", tensor.Float32, shape, shape.Full()),
		shardItem("a\xffb", tensor.BFloat16, nil, tensor.Box{}),
		shardItem("a\xfeb", tensor.BFloat16, nil, tensor.Box{}),
		shardItem("a\x00/../b\"\\", tensor.Float8E8M0, shape, upper),
		shardItem(strings.Repeat("long", 16<<10), tensor.Uint16, nil, tensor.Box{}),
		valueItem("w", 5),
		valueItem("w#2", 0),
	}
}

// TestLayOut holds the data file to the rules of the format: unique keys, no
// holes, aligned chunks, and the reference's limits.
func TestLayOut(t *testing.T) {
	items := hostileItems()
	x, order, header, err := layOut(3, items, reuse.Plan{})
	if err != nil {
		t.Fatal(err)
	}
	if len(header)%safetensors.Align != 0 || binary.LittleEndian.Uint64(header) != uint64(len(header)-8) {
		t.Errorf("header of %d bytes", len(header))
	}
	h, err := safetensors.Parse(bytes.NewReader(append(header, make([]byte, x.Files[0].Size-int64(len(header)))...)), x.Files[0].Size)
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Tensors) != len(items) || h.Metadata["format"] != "pt" {
		t.Fatalf("%d tensors, metadata %v", len(h.Tensors), h.Metadata)
	}
	for n, i := range order {
		e, stored := x.Entries[i], h.Tensors[n]
		if e.Key != stored.Name || e.Offset != h.DataStart+stored.Start || e.Item.Bytes != stored.End-stored.Start {
			t.Errorf("%q: entry at %d, header %+v", e.Key, e.Offset, stored)
		}
		if size := int64(e.Item.Shard.DType.Size()); size > 0 && e.Offset%size != 0 {
			t.Errorf("%q is not aligned at %d", e.Key, e.Offset)
		}
	}
	var got []string
	for _, e := range x.Entries {
		if len(e.Key) < 100 {
			got = append(got, e.Key)
		}
	}
	want := []string{
		"w@2,0", "w@2,0#2", "w@2,0#3", "w@2,0#2#2", "w@0,0", "__metadata__#2", "w",
		"a\uFFFDb", "a\uFFFDb#2", "a\x00/../b\"\\@0,0", "w#2", "w#2#2",
	}
	if !slices.Equal(got, want) {
		t.Errorf("keys %q", got)
	}
}

// TestPartialName refuses files of another format the names of files that a backend
// is still writing: internal/checkpoint knows that suffix without the backend.
func TestPartialName(t *testing.T) {
	var taken *checkpoint.NameError
	if err := checkpoint.ValidatePlainName("model" + object.Partial); !errors.As(err, &taken) {
		t.Errorf("the name was allowed: %v", err)
	}
}

// laidOut is an index with digests and sums.
func laidOut(t testing.TB) checkpoint.Index {
	t.Helper()
	box := tensor.Box{Offsets: []int64{0, 1}, Sizes: []int64{300, 100}}
	x, _, _, err := layOut(3, []checkpoint.Item{
		shardItem("layers.0.weight", tensor.Float32, tensor.Shape{300, 200}, box),
		shardItem("scale", tensor.Float64, nil, tensor.Box{}),
		shardItem("empty", tensor.Complex32, tensor.Shape{0}, tensor.Shape{0}.Full()),
		valueItem("rng", 9),
	}, reuse.Plan{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range x.Entries {
		e := &x.Entries[i]
		e.Digest = checkpoint.Sum([]byte(e.Key))
		for b := range checkpoint.Blocks(e.Item.Bytes) {
			e.Sums = append(e.Sums, uint32(i)<<16+uint32(b))
		}
	}
	return x
}

// TestLayOutGolden lays out the index whose bytes of version 1 are golden.
func TestLayOutGolden(t *testing.T) {
	golden, err := os.ReadFile("../checkpoint/testdata/index.v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	x := laidOut(t)
	got := x.Encode()
	if text := hex.Dump(got); text != string(golden) {
		t.Errorf("encoding differs; got:\n%s", text)
	}
	back, err := checkpoint.DecodeIndex(got)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(back.Encode(), got) || len(back.Entries) != len(x.Entries) {
		t.Errorf("decoded %+v", back)
	}
	if missing, extra := compareItems(&back, []checkpoint.Item{x.Entries[0].Item, x.Entries[1].Item, x.Entries[2].Item, x.Entries[3].Item}); len(missing)+len(extra) > 0 {
		t.Errorf("missing %v, extra %v", missing, extra)
	}
}
