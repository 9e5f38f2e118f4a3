package tensor

import "fmt"

// Convertible returns the reason why elements of type from cannot be loaded as type to, or
// nil if [Convert] can convert them.
//
//	from \ to      bool   integer   float   complex   e8m0
//	bool           same   yes       yes     yes       no
//	integer        no     yes       yes     yes       no
//	float          no     yes       yes     yes       no
//	complex        no     no        no      yes       no
//	float8_e8m0    no     no        no      no        same
//
// AMD's float8 types, whose names end with fnuz, are only loaded unchanged.
func Convertible(from, to DType) error {
	switch {
	case !from.Valid() || !to.Valid():
		return fmt.Errorf("%v cannot be converted to %v: there is no such dtype", from, to)
	case from == to:
		return nil
	case from == Float8E8M0 || to == Float8E8M0:
		return fmt.Errorf("%v cannot be converted to %v: %v holds the scales of other elements, which mean nothing without them",
			from, to, Float8E8M0)
	case from.opaque() || to.opaque():
		return fmt.Errorf("%v cannot be converted to %v: elements that end with fnuz are only loaded as they were saved", from, to)
	case to == Bool:
		return fmt.Errorf("%v cannot be converted to bool: only whether each element is zero would be left", from)
	case from.part() != 0 && to.part() == 0:
		return fmt.Errorf("%v cannot be converted to %v: the imaginary parts would be lost", from, to)
	}
	return nil
}

// LosesFractions reports whether elements of type from are floats, or pairs of them, that
// [Convert] converts to integers of type to.
func LosesFractions(from, to DType) bool {
	return from.float() && to.Valid() && !to.float() && to.part() == 0
}

// opaque reports whether elements of d are moved and never read.
func (d DType) opaque() bool { return d == Float8E4M3FNUZ || d == Float8E5M2FNUZ }

// part returns the type of the two parts of a complex type, 0 for other types.
func (d DType) part() DType {
	switch d {
	case Complex32:
		return Float16
	case Complex64:
		return Float32
	case Complex128:
		return Float64
	}
	return 0
}

// float reports whether elements of d are read as floats.
func (d DType) float() bool {
	switch d {
	case Float16, BFloat16, Float32, Float64, Float8E4M3, Float8E5M2:
		return true
	}
	return false
}

// Convert writes the elements of src, which are of type from, to dst as elements of type to,
// both little-endian, as PyTorch's copy_ does:
//
//   - A float is rounded to the nearest, ties to even. Too large values become
//     infinite, except in float8_e4m3fn, which has no infinities: there they
//     become 448 or -448. NaN stays NaN and keeps its sign.
//   - Types below float32 are reached through float32, so a float64 is
//     rounded twice on the way.
//   - A float loses its fraction on the way to an integer. Where C++ leaves the
//     result open, it is that of PyTorch on x86-64, in its vectorized loops: uint8
//     and the types of 64 bits are reached through int64, the others through
//     int32. NaN and values out of its range become its lowest number; but
//     uint32 and uint64 have all their range, and values above it become 0.
//   - An integer is cut to the width of a narrower one.
//   - A true is 1. A real number gets an imaginary part of 0.
//
// Any byte of a bool except 0 is true. dst and src must not overlap and must hold the same
// number of elements.
func Convert(dst []byte, to DType, src []byte, from DType) error {
	if err := Convertible(from, to); err != nil {
		return err
	}
	n := len(src) / from.Size()
	if n*from.Size() != len(src) || n*to.Size() != len(dst) {
		return fmt.Errorf("convert %d bytes of %v to %d bytes of %v: not the same number of elements", len(src), from, len(dst), to)
	}
	convert(dst, to, src, from)
	return nil
}

// ConvertRegion is [CopyRegion] between elements of different types: src holds
// the box srcBox as type from, dst the box dstBox as type to. region must lie
// in both boxes. The types must be [Convertible].
func ConvertRegion(dst []byte, dstBox Box, to DType, src []byte, srcBox Box, from DType, region Box) error {
	if err := Convertible(from, to); err != nil {
		return err
	}
	in, out := int64(from.Size()), int64(to.Size())
	pieces(dstBox, srcBox, region, func(dstAt, srcAt, n int64) {
		convert(dst[dstAt*out:(dstAt+n)*out], to, src[srcAt*in:(srcAt+n)*in], from)
	})
	return nil
}

// convert is Convert for checked arguments.
func convert(dst []byte, to DType, src []byte, from DType) {
	switch {
	case from == to:
		copy(dst, src)
	case from.part() != 0:
		convert(dst, to.part(), src, from.part())
	case to.part() != 0:
		toComplex(dst, to, src, from)
	case from == Float32 && to == BFloat16:
		toBFloat16s(dst, src)
	case from == Float32 && to == Float16:
		toFloat16s(dst, src)
	case from == BFloat16 && to == Float32:
		fromBFloat16s(dst, src)
	case from == Float16 && to == Float32:
		fromFloat16s(dst, src)
	default:
		throughWide(dst, to, src, from)
	}
}

// blockLen is the number of elements converted at a time: few enough that the intermediate
// values stay in the nearest cache.
const blockLen = 256

// toComplex converts real numbers to the real parts of complex ones.
func toComplex(dst []byte, to DType, src []byte, from DType) {
	var buf [blockLen * 8]byte
	part, in := to.part(), from.Size()
	size := part.Size()
	for len(src) > 0 {
		n := min(blockLen, len(src)/in)
		convert(buf[:n*size], part, src[:n*in], from)
		for i := range n {
			copy(dst[2*i*size:], buf[i*size:(i+1)*size])
			clear(dst[(2*i+1)*size : (2*i+2)*size])
		}
		dst, src = dst[2*n*size:], src[n*in:]
	}
}
