package crc32c

import (
	"hash/crc32"
	"math/bits"
)

// one is the polynomial 1: its bits are reflected, so that the highest is the coefficient of
// x^0.
const one = uint32(1) << 31

// squares are x^(2^n) modulo the polynomial, for the bits of a number of bytes.
var squares = func() (list [64 + 3]uint32) {
	list[0] = one >> 1
	for n := 1; n < len(list); n++ {
		list[n] = multiply(list[n-1], list[n-1])
	}
	return list
}()

// Combine returns the CRC-32C of data whose beginning has the checksum a, and whose rest, of
// lenB bytes, has the checksum b. It reads none of the data: it takes under a microsecond for
// any length.
//
// A checksum is the remainder of a polynomial. Data that follows multiplies what is before it
// by x^8 a byte. The initial value and the final complement cancel, since both sums have them.
func Combine(a, b uint32, lenB int64) uint32 {
	return multiply(a, byteShift(uint64(max(lenB, 0)))) ^ b
}

// byteShift returns x^(8·n) modulo the polynomial.
func byteShift(n uint64) uint32 {
	shift := one
	for n != 0 {
		bit := bits.TrailingZeros64(n)
		shift = multiply(shift, squares[bit+3])
		n &= n - 1
	}
	return shift
}

// multiply returns the product of two polynomials modulo that of the checksum.
func multiply(a, b uint32) uint32 {
	product := uint32(0)
	for bit := one; a != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
			a &^= bit
		}
		b = b>>1 ^ crc32.Castagnoli*(b&1)
	}
	return product
}
