package checkpoint

import (
	"encoding/binary"
	"reflect"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/tensor"
)

// adoptedSample has every kind of entry.
func adoptedSample() Index {
	shard := func(fqn string, sizes ...int64) Item {
		s := tensor.Shard{FQN: fqn, DType: tensor.Float32, Global: append(tensor.Shape{}, sizes...), Box: tensor.Shape(append([]int64{}, sizes...)).Full()}
		return Item{Shard: s, Bytes: s.Bytes()}
	}
	return Index{
		Rank: 3, Files: []File{{Name: "/a/__3_0.distcp", Size: 5000}, {Name: "/a/__3_1.distcp", Size: 1 << 40}}, Modified: []int64{1, 1700000000123456789},
		Entries: []Entry{
			{Item: Item{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "v"}}, Offset: 3},
			{Item: shard("w", 3, 4), File: 1, Offset: 64, Record: &Record{64, 48, 0xdeadbeef}},
			{Item: shard("t", 3, 4), Offset: 128, Strides: []int64{1, 3}, Record: &Record{128, 48, 1}},
			{Item: shard("empty", 0, 4), Offset: 0},
			{Item: shard("scalar"), Offset: 4996},
		},
	}
}

func TestAdoptedIndex(t *testing.T) {
	x := adoptedSample()
	data := x.Encode()
	back, err := DecodeIndex(data)
	if err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if _, err := DecodeIndex(broken); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if _, err := DecodeIndex(data[:at]); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
	for name, change := range map[string]func(*Index){
		"relative path":     func(x *Index) { x.Files[0].Name = "a/b" },
		"path that climbs":  func(x *Index) { x.Files[0].Name = "/a/../b" },
		"beyond the file":   func(x *Index) { x.Entries[4].Offset++ },
		"strides too large": func(x *Index) { x.Entries[2].Strides[0] = 1 << 40 },
		"strides overflow":  func(x *Index) { x.Entries[2].Strides = []int64{1 << 62, 1 << 62} },
		"record beyond":     func(x *Index) { x.Entries[2].Record.Size = 4873 },
		"no such file":      func(x *Index) { x.Entries[0].File = 2 },
	} {
		x := adoptedSample()
		change(&x)
		if _, err := DecodeIndex(x.Encode()); err == nil {
			t.Errorf("%s: not noticed", name)
		}
	}
}

func FuzzAdoptedIndex(f *testing.F) {
	data := adoptedSample().Encode()
	f.Add(data[:len(data)-4])
	f.Add([]byte("CKIX\x02\x00\x01\x02/a\x05\x00\x01\x04\x01w\x00\x00\x00\x0c\x40"))
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32c.Checksum(body))
		x, err := DecodeIndex(data)
		if err != nil {
			return
		}
		again, err := DecodeIndex(x.Encode())
		if err != nil || !reflect.DeepEqual(x, again) {
			t.Errorf("decoded %+v, then %+v, %v", x, again, err)
		}
	})
}

// learnedSample is adoptedSample with sums.
func learnedSample() (Index, Digest) {
	x := adoptedSample()
	of := Sum(x.Encode())
	for i := range x.Entries {
		e := &x.Entries[i]
		e.Digest = Sum([]byte{byte(i)})
		e.Sums = make([]uint32, Blocks(e.Item.Bytes))
		for k := range e.Sums {
			e.Sums[k] = uint32(i + k)
		}
	}
	return x, of
}

func TestSums(t *testing.T) {
	x, of := learnedSample()
	data := EncodeSums(&x, of)
	back := adoptedSample()
	if err := DecodeSums(data, &back, of); err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	if err := DecodeSums(data, &back, Sum(nil)); err == nil {
		t.Error("sums of another index are taken")
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if err := DecodeSums(broken, &back, of); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if err := DecodeSums(data[:at], &back, of); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
}

func FuzzSums(f *testing.F) {
	x, of := learnedSample()
	data := EncodeSums(&x, of)
	f.Add(data[:len(data)-4])
	f.Add(data[:40])
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32c.Checksum(body))
		x := adoptedSample()
		if err := DecodeSums(data, &x, of); err != nil {
			if !reflect.DeepEqual(x, adoptedSample()) {
				t.Errorf("the index is half filled after %v", err)
			}
		}
	})
}

// TestStrided compares every window of strided chunks with an element by
// element walk.
func TestStrided(t *testing.T) {
	for _, c := range []struct{ sizes, strides []int64 }{
		{[]int64{3, 4}, []int64{1, 3}},
		{[]int64{3, 4}, []int64{9, 2}},
		{[]int64{2, 3, 4}, []int64{1, 8, 2}},
		{[]int64{5, 2}, []int64{0, 1}},
		{[]int64{4}, []int64{3}},
		{[]int64{2, 1, 2}, []int64{2, 1 << 50, 1}},
	} {
		s := tensor.Shard{FQN: "w", DType: tensor.Int16, Global: c.sizes, Box: tensor.Shape(c.sizes).Full()}
		e := Entry{Item: Item{Shard: s, Bytes: s.Bytes()}, Strides: c.strides}
		size, ok := e.Span(1 << 20)
		if !ok {
			t.Fatalf("%v: no span", c)
		}
		span := make([]byte, size)
		for i := range span {
			span[i] = byte(i + 1)
		}
		var want []byte
		var walk func(d int, pos int64)
		walk = func(d int, pos int64) {
			if d == len(c.sizes) {
				want = append(want, span[2*pos:2*pos+2]...)
				return
			}
			for i := range c.sizes[d] {
				walk(d+1, pos+i*c.strides[d])
			}
		}
		walk(0, 0)
		for from := int64(0); from < s.Bytes(); from += 2 {
			for to := from + 2; to <= s.Bytes(); to += 2 {
				got := make([]byte, to-from)
				e.Gather(got, span, from)
				if !slices.Equal(got, want[from:to]) {
					t.Fatalf("%v: bytes %d to %d are %v, want %v", c, from, to, got, want[from:to])
				}
			}
		}
		if _, ok := e.Span(size - 2); ok {
			t.Errorf("%v: fits in less than its span", c)
		}
	}
}
