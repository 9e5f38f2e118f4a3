package dcp_test

import (
	"math/big"
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func values() *rapid.Generator[any] {
	scalar := rapid.OneOf(
		rapid.Just[any](nil), rapid.Bool().AsAny(), rapid.Int64().AsAny(), rapid.Int64Range(-300, 70000).AsAny(),
		rapid.Float64().AsAny(), rapid.String().AsAny(), rapid.SliceOf(rapid.Byte()).AsAny(),
		rapid.Custom(func(t *rapid.T) any {
			n := new(big.Int).SetBytes(rapid.SliceOfN(rapid.Byte(), 9, 300).Draw(t, "big"))
			if n.SetBit(n, 64, 1); rapid.Bool().Draw(t, "negative") {
				n.Neg(n)
			}
			return n
		}))
	return rapid.Custom(func(t *rapid.T) any { return nested(t, scalar, 3) })
}

func nested(t *rapid.T, scalar *rapid.Generator[any], depth int) any {
	if depth == 0 {
		return scalar.Draw(t, "scalar")
	}
	n := rapid.IntRange(0, 5).Draw(t, "items")
	items := make([]any, n)
	for i := range items {
		items[i] = nested(t, scalar, depth-1)
	}
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		return items
	case 1:
		return dcp.Tuple(items)
	case 2:
		d := dcp.Dict{}
		for i, item := range items {
			d = append(d, dcp.Entry{Key: dcp.Tuple{int64(i), "key"}, Value: item})
		}
		return d
	}
	return scalar.Draw(t, "scalar")
}

func TestValuesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := values().Draw(t, "value")
		b, err := dcp.ValueArchive(v)
		if err != nil {
			t.Fatal(err)
		}
		got, err := dcp.DecodeValue(b)
		if err != nil || !reflect.DeepEqual(got, v) {
			t.Fatalf("got %#v, %v, want %#v", got, err, v)
		}
	})
}

func TestMetadataRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := metadata().Draw(t, "metadata")
		b, err := dcp.WriteMetadata(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := dcp.ReadMetadata(b)
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Fatalf("got %+v, %v, want %+v", got, err, m)
		}
	})
}

func metadata() *rapid.Generator[dcp.Metadata] {
	return rapid.Custom(func(t *rapid.T) dcp.Metadata {
		path := func() []any {
			if rapid.Bool().Draw(t, "no path") {
				return nil
			}
			return rapid.SliceOfN(rapid.OneOf(rapid.String().AsAny(), rapid.IntRange(0, 1<<40).AsAny()), 1, 6).Draw(t, "path")
		}
		where := func() dcp.Location {
			return dcp.Location{
				File:   dcp.DataFile(rapid.IntRange(0, 5).Draw(t, "rank"), 0),
				Offset: rapid.Int64Range(0, 1<<50).Draw(t, "offset"), Length: rapid.Int64Range(0, 1<<50).Draw(t, "length"),
			}
		}
		m := dcp.Metadata{Version: rapid.SampledFrom([]string{"", "1.0.0"}).Draw(t, "version"), SaveID: rapid.String().Draw(t, "save ID")}
		names := rapid.SliceOfNDistinct(rapid.StringN(1, 400, 1<<16), 0, 40, rapid.ID).Draw(t, "names")
		for _, fqn := range names {
			if rapid.Bool().Draw(t, "value") {
				m.Values = append(m.Values, dcp.Value{FQN: fqn, Path: path(), Where: where()})
				continue
			}
			x := dcp.Tensor{FQN: fqn, Path: path(), DType: tensor.DType(rapid.Uint8Range(1, 19).Draw(t, "dtype")), RequiresGrad: rapid.Bool().Draw(t, "grad")}
			rows, step := rapid.Int64Range(0, 1<<33).Draw(t, "rows"), rapid.Int64Range(1, 1<<33).Draw(t, "step")
			x.Shape = tensor.Shape{rows, rapid.Int64Range(0, 1<<20).Draw(t, "columns")}
			for lo := int64(0); lo < rows && len(x.Chunks) < 20; lo += step {
				x.Chunks = append(x.Chunks, dcp.Chunk{
					Box:   tensor.Box{Offsets: []int64{lo, 0}, Sizes: []int64{min(step, rows-lo), x.Shape[1]}},
					Where: where(),
				})
			}
			m.Tensors = append(m.Tensors, x)
		}
		return m
	})
}
