package data

import (
	"encoding/binary"
	"reflect"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/tensor"
)

// adoptedSample has every kind of entry.
func adoptedSample() index {
	shard := func(fqn string, sizes ...int64) checkpoint.Item {
		s := tensor.Shard{FQN: fqn, DType: tensor.Float32, Global: append(tensor.Shape{}, sizes...), Box: tensor.Shape(append([]int64{}, sizes...)).Full()}
		return checkpoint.Item{Shard: s, Bytes: s.Bytes()}
	}
	return index{
		rank: 3, files: []File{{"/a/__3_0.distcp", 5000}, {"/a/__3_1.distcp", 1 << 40}}, modified: []int64{1, 1700000000123456789},
		entries: []entry{
			{item: checkpoint.Item{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "v"}}, offset: 3},
			{item: shard("w", 3, 4), file: 1, offset: 64, record: &Record{64, 48, 0xdeadbeef}},
			{item: shard("t", 3, 4), offset: 128, strides: []int64{1, 3}, record: &Record{128, 48, 1}},
			{item: shard("empty", 0, 4), offset: 0},
			{item: shard("scalar"), offset: 4996},
		},
	}
}

func TestAdoptedIndex(t *testing.T) {
	x := adoptedSample()
	data := x.encode()
	back, err := decodeIndex(data)
	if err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if _, err := decodeIndex(broken); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if _, err := decodeIndex(data[:at]); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
	for name, change := range map[string]func(*index){
		"relative path":     func(x *index) { x.files[0].Name = "a/b" },
		"path that climbs":  func(x *index) { x.files[0].Name = "/a/../b" },
		"beyond the file":   func(x *index) { x.entries[4].offset++ },
		"strides too large": func(x *index) { x.entries[2].strides[0] = 1 << 40 },
		"strides overflow":  func(x *index) { x.entries[2].strides = []int64{1 << 62, 1 << 62} },
		"record beyond":     func(x *index) { x.entries[2].record.Size = 4873 },
		"no such file":      func(x *index) { x.entries[0].file = 2 },
	} {
		x := adoptedSample()
		change(&x)
		if _, err := decodeIndex(x.encode()); err == nil {
			t.Errorf("%s: not noticed", name)
		}
	}
}

func FuzzAdoptedIndex(f *testing.F) {
	data := adoptedSample().encode()
	f.Add(data[:len(data)-4])
	f.Add([]byte("CKIX\x02\x00\x01\x02/a\x05\x00\x01\x04\x01w\x00\x00\x00\x0c\x40"))
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32c.Checksum(body))
		x, err := decodeIndex(data)
		if err != nil {
			return
		}
		again, err := decodeIndex(x.encode())
		if err != nil || !reflect.DeepEqual(x, again) {
			t.Errorf("decoded %+v, then %+v, %v", x, again, err)
		}
	})
}

// learnedSample is adoptedSample with sums.
func learnedSample() (index, checkpoint.Digest) {
	x := adoptedSample()
	of := checkpoint.Sum(x.encode())
	for i := range x.entries {
		e := &x.entries[i]
		e.digest = checkpoint.Sum([]byte{byte(i)})
		e.sums = make([]uint32, blocks(e.item.Bytes))
		for k := range e.sums {
			e.sums[k] = uint32(i + k)
		}
	}
	return x, of
}

func TestSums(t *testing.T) {
	x, of := learnedSample()
	data := encodeSums(&x, of)
	back := adoptedSample()
	if err := decodeSums(data, &back, of); err != nil || !reflect.DeepEqual(back, x) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	if err := decodeSums(data, &back, checkpoint.Sum(nil)); err == nil {
		t.Error("sums of another index are taken")
	}
	for at := range data {
		broken := slices.Clone(data)
		broken[at] ^= 1
		if err := decodeSums(broken, &back, of); err == nil {
			t.Errorf("a flip at %d is not noticed", at)
		}
		if err := decodeSums(data[:at], &back, of); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
}

func FuzzSums(f *testing.F) {
	x, of := learnedSample()
	data := encodeSums(&x, of)
	f.Add(data[:len(data)-4])
	f.Add(data[:40])
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32c.Checksum(body))
		x := adoptedSample()
		if err := decodeSums(data, &x, of); err != nil {
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
		e := entry{item: checkpoint.Item{Shard: s, Bytes: s.Bytes()}, strides: c.strides}
		size, ok := e.span(1 << 20)
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
				e.gather(got, span, from)
				if !slices.Equal(got, want[from:to]) {
					t.Fatalf("%v: bytes %d to %d are %v, want %v", c, from, to, got, want[from:to])
				}
			}
		}
		if _, ok := e.span(size - 2); ok {
			t.Errorf("%v: fits in less than its span", c)
		}
	}
}
