package dcp

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// payloads draws a tensor in a storage: any strides, also 0.
func payloads() *rapid.Generator[Payload] {
	return rapid.Custom(func(t *rapid.T) Payload {
		p := Payload{
			DType:     tensor.DType(rapid.Uint8Range(1, 19).Draw(t, "dtype")),
			First:     rapid.Int64Range(0, 5).Draw(t, "first"),
			BigEndian: rapid.Bool().Draw(t, "big-endian"),
			Sizes:     rapid.SliceOfN(rapid.Int64Range(0, 4), 0, 4).Draw(t, "sizes"),
		}
		p.Strides = strides(p.Sizes)
		if rapid.Bool().Draw(t, "strided") {
			n := len(p.Sizes)
			p.Strides = rapid.SliceOfN(rapid.Int64Range(0, 9), n, n).Draw(t, "strides")
		}
		_, hi := p.span()
		p.Length = (max(hi, p.First) + rapid.Int64Range(0, 3).Draw(t, "more")) * int64(p.DType.Size())
		return p
	})
}

// Gather does what taking one element after the other does.
func TestGather(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := payloads().Draw(t, "payload")
		if err := p.bounds(); err != nil {
			t.Fatal(err)
		}
		storage := make([]byte, p.Length)
		for i := range storage {
			storage[i] = byte(i*7 + i/251)
		}
		size := int64(p.DType.Size())
		var want []byte
		var walk func(d int, at int64)
		walk = func(d int, at int64) {
			if d == len(p.Sizes) {
				e := slices.Clone(storage[at*size : (at+1)*size])
				if p.BigEndian {
					for half := range slices.Chunk(e, word(p.DType)) {
						slices.Reverse(half)
					}
				}
				want = append(want, e...)
				return
			}
			for i := range p.Sizes[d] {
				walk(d+1, at+i*p.Strides[d])
			}
		}
		walk(0, p.First)
		got := make([]byte, p.Volume()*size)
		p.Gather(got, storage)
		if !bytes.Equal(got, want) {
			t.Fatalf("%+v:\ngot  %x\nwant %x", p, got, want)
		}
		lo, n := p.Range()
		if lo < 0 || lo+n > p.Length || int64(len(got)) > n && p.Contiguous() {
			t.Fatalf("%+v has the range %d at %d", p, n, lo)
		}
		if p.Contiguous() && !bytes.Equal(got, storage[lo:lo+n]) {
			t.Fatalf("%+v is not contiguous", p)
		}
	})
}

func TestBigEndianArchive(t *testing.T) {
	data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, math.Float32bits(1)), math.Float32bits(-2))
	b := forged(forge{"data.pkl", tensorPickle(tensor.Complex64, []int64{1})}, forge{"byteorder", []byte("big")}, forge{"data/0", data}, forge{"version", []byte("3\n")})
	p, err := ReadArchive(bytes.NewReader(b), Location{File: "f", Length: int64(len(b))})
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 8)
	p.Gather(got, b[p.Offset:p.Offset+p.Length])
	want := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, math.Float32bits(1)), math.Float32bits(-2))
	if !p.BigEndian || p.Contiguous() || !bytes.Equal(got, want) {
		t.Errorf("%+v gives %x, want %x", p, got, want)
	}
}

func TestGatherRefusesOtherSizes(t *testing.T) {
	p := Payload{DType: tensor.Int8, Length: 4, Sizes: []int64{4}, Strides: []int64{1}}
	for _, n := range [][2]int{{3, 4}, {4, 3}, {5, 4}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v bytes: no panic", n)
				}
			}()
			p.Gather(make([]byte, n[0]), make([]byte, n[1]))
		}()
	}
}
