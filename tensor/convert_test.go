package tensor_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// all is every dtype.
func all() (types []tensor.DType) {
	for d := tensor.DType(1); d.Valid(); d++ {
		types = append(types, d)
	}
	return types
}

var (
	floats   = []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Float8E4M3, tensor.Float8E5M2}
	integers = []tensor.DType{
		tensor.Uint8, tensor.Int8, tensor.Uint16, tensor.Int16, tensor.Uint32, tensor.Int32, tensor.Uint64, tensor.Int64,
	}
	// parts are the real types of the two numbers of a complex one.
	parts = map[tensor.DType]tensor.DType{
		tensor.Complex32: tensor.Float16, tensor.Complex64: tensor.Float32, tensor.Complex128: tensor.Float64,
	}
)

// TestConvertible checks the whole table.
func TestConvertible(t *testing.T) {
	for _, from := range all() {
		for _, to := range all() {
			_, fromComplex := parts[from]
			_, toComplex := parts[to]
			toNumber := toComplex || slices.Contains(floats, to) || slices.Contains(integers, to)
			want := "nil"
			switch {
			case from == to:
			case from == tensor.Float8E8M0 || to == tensor.Float8E8M0:
				want = "holds the scales of other elements"
			case max(from, to) > tensor.Float8E8M0:
				want = "fnuz are only loaded as they were saved"
			case to == tensor.Bool:
				want = "only whether each element is zero"
			case fromComplex && !toComplex:
				want = "imaginary parts would be lost"
			case !toNumber:
				t.Fatalf("%v to %v is not in the table", from, to)
			}
			err := tensor.Convertible(from, to)
			if err == nil && want == "nil" {
				continue
			}
			if err == nil || !strings.Contains(err.Error(), want) ||
				!strings.HasPrefix(err.Error(), fmt.Sprintf("%v cannot be converted to %v: ", from, to)) {
				t.Errorf("%v to %v: %v, want %s", from, to, err, want)
			}
			if got := tensor.Convert(nil, to, nil, from); fmt.Sprint(got) != fmt.Sprint(err) {
				t.Errorf("%v to %v: %v, and convertible reports %v", from, to, got, err)
			}
		}
	}
	wantError(t, tensor.Convertible(0, tensor.Int8), "dtype(0) cannot be converted to int8: there is no such dtype")
	wantError(t, tensor.Convertible(tensor.Int8, 99), "no such dtype")
	for _, c := range []struct{ dst, src int }{{2, 3}, {4, 4}, {3, 8}, {0, 4}} {
		wantError(t, tensor.Convert(make([]byte, c.dst), tensor.Float16, make([]byte, c.src), tensor.Float32),
			fmt.Sprintf("convert %d bytes of float32 to %d bytes of float16: not the same number of elements", c.src, c.dst))
	}
}

// converted converts all of src and compares each element with the slow way.
func converted(t interface{ Fatalf(string, ...any) }, src []byte, from, to tensor.DType) []byte {
	n := len(src) / from.Size()
	got := bytes.Repeat([]byte{0xee}, n*to.Size())
	if err := tensor.Convert(got, to, src, from); err != nil {
		t.Fatalf("%v to %v: %v", from, to, err)
	}
	for i := range n {
		in, out := src[i*from.Size():(i+1)*from.Size()], got[i*to.Size():(i+1)*to.Size()]
		want := in
		if from != to {
			want = encode(decode(in, from), to)
		}
		if bytes.Equal(out, want) {
			continue
		}
		if is, must := decode(out, to).float, decode(want, to).float; math.IsNaN(is) && math.IsNaN(must) && math.Signbit(is) == math.Signbit(must) {
			continue // which NaN it is, is seen elsewhere
		}
		t.Fatalf("%v %#x is %#x as %v, want %#x", from, code(in), code(out), to, code(want))
	}
	return got
}

// Every element of every type of up to 16 bits, to every real type.
func TestConvertEverySmallElement(t *testing.T) {
	for _, from := range slices.Concat([]tensor.DType{tensor.Bool}, integers, floats) {
		if from.Size() > 2 {
			continue
		}
		var src []byte
		for c := range uint64(1) << (8 * from.Size()) {
			src = append(src, bytesOf(c, from)...)
		}
		for _, to := range slices.Concat(integers, floats) {
			got := converted(t, src, from, to)
			wide := to == tensor.Float64 || to == tensor.Float32 || to == tensor.Float16 && from.Size() == 1
			if !slices.Contains(floats, from) || !wide {
				continue
			}
			// Widened values convert back unchanged, except the payload of a NaN.
			back := converted(t, got, to, from)
			for i := 0; i < len(src); i += from.Size() {
				in, out := src[i:i+from.Size()], back[i:i+from.Size()]
				if !math.IsNaN(decode(in, from).float) && !bytes.Equal(in, out) {
					t.Fatalf("%v %#x comes back from %v as %#x", from, code(in), to, code(out))
				}
			}
		}
	}
}

// The float32s where rounding changes: each number of a smaller type, the
// place half way to the next, and the float32s next to both.
func TestConvertAtEveryRoundingEdge(t *testing.T) {
	for to, f := range formats {
		var src []byte
		add := func(x float32) {
			for _, y := range []float32{x, math.Nextafter32(x, 0), math.Nextafter32(x, math.MaxFloat32)} {
				src = append(src, bytesOf(uint64(math.Float32bits(y)), tensor.Float32)...)
				src = append(src, bytesOf(uint64(math.Float32bits(-y)), tensor.Float32)...)
			}
		}
		for c := range f.infinity {
			add(float32(f.number(c)))
			add(float32((f.number(c) + f.number(c+1)) / 2))
		}
		for _, x := range []float32{0, math.SmallestNonzeroFloat32, math.MaxFloat32, float32(math.Inf(1)), float32(math.NaN())} {
			add(x)
		}
		converted(t, src, tensor.Float32, to)
		// Through float64, which is another way in the code.
		wide := make([]byte, 2*len(src))
		if err := tensor.Convert(wide, tensor.Float64, src, tensor.Float32); err != nil {
			t.Fatal(err)
		}
		converted(t, wide, tensor.Float64, to)
	}
}

// Large elements: all patterns of bits at random, and the edges of all types.
func TestConvertLargeElements(t *testing.T) {
	var edges []uint64
	for bit := range 64 {
		for _, d := range []int64{-1, 0, 1} {
			edges = append(edges, uint64(int64(1)<<bit+d), -uint64(int64(1)<<bit+d))
			// Half way between two float32s and two float64s.
			edges = append(edges, uint64(int64(1)<<bit+int64(1)<<max(bit-24, 0)+d), uint64(int64(1)<<bit+int64(1)<<max(bit-53, 0)+d))
		}
	}
	rng := rand.New(rand.NewPCG(7, 9))
	for range 500 {
		edges = append(edges, rng.Uint64(), rng.Uint64()>>rng.IntN(64))
	}
	for _, from := range slices.Concat(integers, floats) {
		if from.Size() < 4 {
			continue
		}
		var src []byte
		for _, e := range edges {
			src = append(src, bytesOf(e, from)...)
			if slices.Contains(floats, from) { // as a number too, with a fraction
				for _, d := range []float64{0.5, -0.5} {
					src = append(src, encode(value{float: float64(int64(e)) + d}, from)...)
				}
			}
		}
		for _, to := range slices.Concat(integers, floats) {
			converted(t, src, from, to)
		}
	}
}

func TestConvertComplex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		to := rapid.SampledFrom([]tensor.DType{tensor.Complex32, tensor.Complex64, tensor.Complex128}).Draw(t, "to")
		from := rapid.SampledFrom(slices.DeleteFunc(all(), func(d tensor.DType) bool { return tensor.Convertible(d, to) != nil })).Draw(t, "from")
		n := rapid.IntRange(0, 600).Draw(t, "elements")
		seed := rapid.Uint64().Draw(t, "seed")
		src, rng := make([]byte, n*from.Size()), rand.New(rand.NewPCG(seed, 0))
		for i := range src {
			src[i] = byte(rng.Uint32())
		}
		got := make([]byte, n*to.Size())
		if err := tensor.Convert(got, to, src, from); err != nil {
			t.Fatal(err)
		}
		part := parts[to]
		if own, ok := parts[from]; ok {
			if want := converted(t, src, own, part); !bytes.Equal(got, want) {
				t.Fatalf("%v to %v: %x is %x, want %x", from, to, src, got, want)
			}
			return
		}
		want := converted(t, src, from, part)
		for i := range n {
			re, im := got[2*i*part.Size():(2*i+1)*part.Size()], got[(2*i+1)*part.Size():(2*i+2)*part.Size()]
			if !bytes.Equal(re, want[i*part.Size():(i+1)*part.Size()]) || code(im) != 0 {
				t.Fatalf("%v to %v: element %d is %x + %xi", from, to, i, re, im)
			}
		}
	})
}

// A region is converted where it lies, and nothing else is touched.
func TestConvertRegion(t *testing.T) {
	pairs := [][2]tensor.DType{
		{tensor.Float32, tensor.BFloat16},
		{tensor.Float16, tensor.Float64},
		{tensor.Int64, tensor.Int8},
		{tensor.Float64, tensor.Complex64},
		{tensor.Bool, tensor.Float32},
		{tensor.Int32, tensor.Int32},
	}
	rapid.Check(t, func(t *rapid.T) {
		full := shapes().Draw(t, "shape").Full()
		region := boxIn(full).Draw(t, "region")
		srcBox, dstBox := around(full, region).Draw(t, "src"), around(full, region).Draw(t, "dst")
		pair := rapid.SampledFrom(pairs).Draw(t, "types")
		from, to := pair[0], pair[1]
		src := make([]byte, srcBox.Volume()*int64(from.Size()))
		for i := range src {
			src[i] = byte(i*7 + i/251)
		}
		// Converted first, then copied: the other order of the two steps.
		whole := make([]byte, srcBox.Volume()*int64(to.Size()))
		if err := tensor.Convert(whole, to, src, from); err != nil {
			t.Fatal(err)
		}
		got := bytes.Repeat([]byte{0xee}, int(dstBox.Volume())*to.Size())
		want := bytes.Clone(got)
		tensor.CopyRegion(want, dstBox, whole, srcBox, region, to.Size())
		if err := tensor.ConvertRegion(got, dstBox, to, src, srcBox, from, region); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("convert %v from %v to %v:\ngot  %x\nwant %x", region, srcBox, dstBox, got, want)
		}
	})
	one := tensor.Box{}
	wantError(t, tensor.ConvertRegion(make([]byte, 4), one, tensor.Float32, make([]byte, 8), one, tensor.Complex64, one), "imaginary")
}

// The conversion of a NaN's bits is a choice, and stays the same.
func TestConvertNaN(t *testing.T) {
	for _, c := range []struct {
		from, to tensor.DType
		in, out  uint64
	}{
		{tensor.Float32, tensor.BFloat16, 0x7f800001, 0x7fc0},
		{tensor.Float32, tensor.BFloat16, 0xffe10000, 0xffe1},
		{tensor.Float32, tensor.Float16, 0x7f800001, 0x7e00},
		{tensor.Float32, tensor.Float16, 0xffc02000, 0xfe01},
		{tensor.BFloat16, tensor.Float32, 0xffe1, 0xffe10000},
		{tensor.Float16, tensor.Float32, 0xfe01, 0xffc02000},
		{tensor.Float16, tensor.Float32, 0x7c01, 0x7fc02000},
		{tensor.Float32, tensor.Float8E4M3, 0xffc00000, 0xff},
		{tensor.Float32, tensor.Float8E5M2, 0x7f800001, 0x7f},
		{tensor.Float8E4M3, tensor.Float32, 0xff, 0xfff00000},
		{tensor.Float8E5M2, tensor.Float32, 0x7d, 0x7fe00000},
	} {
		got := make([]byte, c.to.Size())
		if err := tensor.Convert(got, c.to, bytesOf(c.in, c.from), c.from); err != nil || code(got) != c.out {
			t.Errorf("%v %#x is %#x as %v, %v, want %#x", c.from, c.in, code(got), c.to, err, c.out)
		}
	}
}

func BenchmarkConvert(b *testing.B) {
	src := make([]byte, 1<<22)
	for i := range src {
		src[i] = byte(i*7 + i/251)
	}
	for _, c := range [][2]tensor.DType{
		{tensor.Float32, tensor.Float32},
		{tensor.Float32, tensor.BFloat16},
		{tensor.BFloat16, tensor.Float32},
		{tensor.Float32, tensor.Float16},
		{tensor.Float16, tensor.Float32},
		{tensor.Float64, tensor.Float32},
		{tensor.Float32, tensor.Float8E4M3},
		{tensor.Float32, tensor.Int64},
		{tensor.Int64, tensor.Int32},
	} {
		b.Run(fmt.Sprintf("%v to %v", c[0], c[1]), func(b *testing.B) {
			dst := make([]byte, len(src)/c[0].Size()*c[1].Size())
			b.SetBytes(int64(len(src)))
			for b.Loop() {
				if err := tensor.Convert(dst, c[1], src, c[0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
