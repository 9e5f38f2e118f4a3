package tensor

import (
	"encoding/binary"
	"math"
)

// The float types as bits: s sign, e exponent, m significand.
//
//	float32         s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
//	bfloat16        s eeeeeeee mmmmmmm                   a float32 cut short
//	float16         s eeeee mmmmmmmmmm
//	float8_e5m2     s eeeee mm                           a float16 cut short
//	float8_e4m3fn   s eeee mmm                           all ones is NaN
//
// All functions here take and return bits. A float32 is rounded to the nearest by adding
// almost half of the dropped part, or exactly half where the last remaining bit is odd. A
// carry into the exponent is correct as it is.

const (
	signBit32 = 1 << 31
	infBits32 = 0xff << 23
)

// toBFloat16 keeps the bits of a NaN that fit, and sets a bit so that it stays a NaN.
func toBFloat16(b uint32) uint16 {
	if b&^signBit32 > infBits32 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// toFloat16 keeps the bits of a NaN that fit, and sets a bit so that it stays a NaN.
func toFloat16(b uint32) uint16 {
	sign := uint16(b >> 16 & 0x8000)
	b &^= signBit32
	switch {
	case b > infBits32:
		return sign | 0x7e00 | uint16(b>>13&0x3ff)
	case b >= 0x477ff000: // 65520, half way to the first power of two out of range
		return sign | 0x7c00
	case b < 113<<23:
		return sign | uint16(subnormal(b, 126<<23))
	}
	return sign | uint16((b-112<<23+0xfff+b>>13&1)>>13)
}

// subnormal returns b in units of a type's smallest number, rounded. That unit is the last
// bit of a float32 as large as magic, so the addition rounds.
func subnormal(b, magic uint32) uint32 {
	return math.Float32bits(math.Float32frombits(b)+math.Float32frombits(magic)) - magic
}

// float8 describes a type of 8 bits and its conversion from float32.
type float8 struct {
	over     uint32 // the first magnitude that becomes above
	above    byte
	normal   uint32 // the smallest magnitude that is not subnormal
	magic    uint32 // of subnormal
	bias     uint32 // of the exponents' difference
	mantissa int    // bits that are dropped
}

var (
	float8E5M2 = float8{over: 0x47700000 /* 61440, half way to the first power of two that there is not */, above: 0x7c, normal: 113 << 23, magic: 134 << 23, bias: 112 << 23, mantissa: 21}
	float8E4M3 = float8{over: 0x43e00000 /* 448, the largest */, above: 0x7e, normal: 121 << 23, magic: 141 << 23, bias: 120 << 23, mantissa: 20}
)

// of rounds the float32 with the bits b to the nearest, ties to even.
func (f *float8) of(b uint32) byte {
	sign := byte(b >> 24 & 0x80)
	b &^= signBit32
	switch {
	case b > infBits32:
		return sign | 0x7f
	case b >= f.over:
		return sign | f.above
	case b < f.normal:
		return sign | byte(subnormal(b, f.magic))
	}
	return sign | byte((b-f.bias+(1<<(f.mantissa-1)-1)+b>>f.mantissa&1)>>f.mantissa)
}

// fromFloat16 makes a NaN quiet, as processors do.
func fromFloat16(h uint16) uint32 {
	sign, b := uint32(h&0x8000)<<16, uint32(h&0x7fff)
	switch {
	case b > 0x7c00:
		return sign | infBits32 | 1<<22 | b<<13
	case b == 0x7c00:
		return sign | infBits32
	case b < 0x400:
		return sign | math.Float32bits(float32(b)*0x1p-24)
	}
	return sign | (b<<13 + 112<<23)
}

func fromFloat8E5M2(x byte) uint32 { return fromFloat16(uint16(x) << 8) }

func fromFloat8E4M3(x byte) uint32 {
	sign, b := uint32(x&0x80)<<24, uint32(x&0x7f)
	switch {
	case b == 0x7f:
		return sign | infBits32 | 7<<20
	case b < 8:
		return sign | math.Float32bits(float32(b)*0x1p-9)
	}
	return sign | (b<<20 + 120<<23)
}

// The most frequent conversions, between float32 and the types of 16 bits that models are
// trained in, have loops of their own.

func toBFloat16s(dst, src []byte) {
	for i := range len(src) / 4 {
		binary.LittleEndian.PutUint16(dst[2*i:2*i+2], toBFloat16(binary.LittleEndian.Uint32(src[4*i:4*i+4])))
	}
}

// fromBFloat16s converts each half of 8 bytes to two float32s.
func fromBFloat16s(dst, src []byte) {
	for ; len(src) >= 8 && len(dst) >= 16; dst, src = dst[16:], src[8:] {
		x := binary.LittleEndian.Uint64(src)
		binary.LittleEndian.PutUint64(dst, x&0xffff<<16|x>>16<<48)
		binary.LittleEndian.PutUint64(dst[8:], x>>32&0xffff<<16|x>>48<<48)
	}
	for i := range len(src) / 2 {
		binary.LittleEndian.PutUint32(dst[4*i:4*i+4], uint32(binary.LittleEndian.Uint16(src[2*i:2*i+2]))<<16)
	}
}

func toFloat16s(dst, src []byte) {
	for i := range len(src) / 4 {
		binary.LittleEndian.PutUint16(dst[2*i:2*i+2], toFloat16(binary.LittleEndian.Uint32(src[4*i:4*i+4])))
	}
}

// fromFloat16s converts ordinary numbers inline: calls would take most of the time.
func fromFloat16s(dst, src []byte) {
	for i := range len(src) / 2 {
		h := binary.LittleEndian.Uint16(src[2*i : 2*i+2])
		x := uint32(h & 0x7fff)
		b := uint32(h&0x8000)<<16 | (x<<13 + 112<<23)
		if x-0x400 >= 0x7c00-0x400 {
			b = fromFloat16(h)
		}
		binary.LittleEndian.PutUint32(dst[4*i:4*i+4], b)
	}
}
