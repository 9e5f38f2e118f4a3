package tensor

import (
	"encoding/binary"
	"math"
)

// throughWide converts real numbers through the widest type of their kind, a
// block at a time:
//
//	bool, integers ──▶ int64 ──▶ integers
//	                     └────▶ float64 ──▶ floats
//	floats ──▶ float64 ──┴────▶ int64 ──▶ integers
//
// An int64 holds the bits of a uint64.
func throughWide(dst []byte, to DType, src []byte, from DType) {
	var floats [blockLen]float64
	var ints [blockLen]int64
	in, out := from.Size(), to.Size()
	for len(src) > 0 {
		n := min(blockLen, len(src)/in)
		f, i := floats[:n], ints[:n]
		switch {
		case from.float() && to.float():
			readFloats(f, src, from)
			writeFloats(dst, f, to)
		case from.float():
			readFloats(f, src, from)
			truncate(i, f, to)
			writeInts(dst, i, to)
		case to.float():
			readInts(i, src, from)
			widen(f, i, from, to)
			writeFloats(dst, f, to)
		default:
			readInts(i, src, from)
			writeInts(dst, i, to)
		}
		dst, src = dst[n*out:], src[n*in:]
	}
}

func readFloats(f []float64, src []byte, from DType) {
	single := func(b uint32) float64 { return float64(math.Float32frombits(b)) }
	switch from {
	case Float64:
		for i := range f {
			f[i] = math.Float64frombits(binary.LittleEndian.Uint64(src[8*i:]))
		}
	case Float32:
		for i := range f {
			f[i] = single(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case Float16:
		for i := range f {
			f[i] = single(fromFloat16(binary.LittleEndian.Uint16(src[2*i:])))
		}
	case BFloat16:
		for i := range f {
			f[i] = single(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	case Float8E5M2:
		for i := range f {
			f[i] = single(fromFloat8E5M2(src[i]))
		}
	case Float8E4M3:
		for i := range f {
			f[i] = single(fromFloat8E4M3(src[i]))
		}
	}
}

func writeFloats(dst []byte, f []float64, to DType) {
	single := func(f float64) uint32 { return math.Float32bits(float32(f)) }
	switch to {
	case Float64:
		for i := range f {
			binary.LittleEndian.PutUint64(dst[8*i:], math.Float64bits(f[i]))
		}
	case Float32:
		for i := range f {
			binary.LittleEndian.PutUint32(dst[4*i:], single(f[i]))
		}
	case Float16:
		for i := range f {
			binary.LittleEndian.PutUint16(dst[2*i:], toFloat16(single(f[i])))
		}
	case BFloat16:
		for i := range f {
			binary.LittleEndian.PutUint16(dst[2*i:], toBFloat16(single(f[i])))
		}
	case Float8E5M2:
		for i := range f {
			dst[i] = float8E5M2.of(single(f[i]))
		}
	case Float8E4M3:
		for i := range f {
			dst[i] = float8E4M3.of(single(f[i]))
		}
	}
}

func readInts(n []int64, src []byte, from DType) {
	switch from {
	case Bool:
		for i := range n {
			if n[i] = 0; src[i] != 0 {
				n[i] = 1
			}
		}
	case Uint8:
		for i := range n {
			n[i] = int64(src[i])
		}
	case Int8:
		for i := range n {
			n[i] = int64(int8(src[i]))
		}
	case Uint16:
		for i := range n {
			n[i] = int64(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case Int16:
		for i := range n {
			n[i] = int64(int16(binary.LittleEndian.Uint16(src[2*i:])))
		}
	case Uint32:
		for i := range n {
			n[i] = int64(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case Int32:
		for i := range n {
			n[i] = int64(int32(binary.LittleEndian.Uint32(src[4*i:])))
		}
	case Uint64, Int64:
		for i := range n {
			n[i] = int64(binary.LittleEndian.Uint64(src[8*i:]))
		}
	}
}

func writeInts(dst []byte, n []int64, to DType) {
	switch to.Size() {
	case 1:
		for i := range n {
			dst[i] = byte(n[i])
		}
	case 2:
		for i := range n {
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(n[i]))
		}
	case 4:
		for i := range n {
			binary.LittleEndian.PutUint32(dst[4*i:], uint32(n[i]))
		}
	case 8:
		for i := range n {
			binary.LittleEndian.PutUint64(dst[8*i:], uint64(n[i]))
		}
	}
}

// widen rounds each integer once, to a float64 or to a float32.
func widen(f []float64, n []int64, from, to DType) {
	switch {
	case from == Uint64 && to == Float64:
		for i := range f {
			f[i] = float64(uint64(n[i]))
		}
	case from == Uint64:
		for i := range f {
			f[i] = float64(float32(uint64(n[i])))
		}
	case to == Float64:
		for i := range f {
			f[i] = float64(n[i])
		}
	default:
		for i := range f {
			f[i] = float64(float32(n[i]))
		}
	}
}

// truncate cuts off fractions. Where C++ leaves the result open, it is that of PyTorch on
// x86-64: see [Convert].
func truncate(n []int64, f []float64, to DType) {
	lowest, end := int64(math.MinInt32), 0x1p31
	if to == Uint8 || to.Size() == 8 {
		lowest, end = math.MinInt64, 0x1p63
	}
	whole := to == Uint32 || to == Uint64
	for i, x := range f {
		x = math.Trunc(x)
		switch {
		case x >= -end && x < end:
			n[i] = int64(x)
		case !whole || !(x >= end): // or NaN
			n[i] = lowest
		case x < 2*end:
			n[i] = int64(uint64(x))
		default:
			n[i] = 0
		}
	}
}
