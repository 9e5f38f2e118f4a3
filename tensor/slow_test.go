package tensor_test

import (
	"encoding/binary"
	"math"
	"math/big"

	"github.com/ckptstore/ckptstore/tensor"
)

// A second way to convert, made for reading: numbers are decoded by the
// definition of their type, and rounded by looking at both neighbours in the
// list of all numbers that the target has.

// format is a float type by its definition. A number has the code
// exponent<<significand | fraction.
type format struct {
	exponent, significand, bias int
	infinity, nan               uint64 // codes; infinity is the one behind the largest number
	saturates                   bool   // to the largest number
}

var formats = map[tensor.DType]format{
	tensor.Float16:    {5, 10, 15, 0x7c00, 0x7e00, false},
	tensor.BFloat16:   {8, 7, 127, 0x7f80, 0x7fc0, false},
	tensor.Float8E5M2: {5, 2, 15, 0x7c, 0x7f, false},
	tensor.Float8E4M3: {4, 3, 7, 0x7f, 0x7f, true},
}

// number is the number that a code stands for, as if there were no infinity.
func (f format) number(code uint64) float64 {
	exponent, fraction := int(code>>f.significand), float64(code&(1<<f.significand-1))
	if exponent == 0 {
		return math.Ldexp(fraction, 1-f.bias-f.significand)
	}
	return math.Ldexp(fraction+float64(int(1)<<f.significand), exponent-f.bias-f.significand)
}

func (f format) decode(code uint64) float64 {
	sign := uint64(1) << (f.exponent + f.significand)
	x := 1.0
	if code&sign != 0 {
		x, code = -1, code-sign
	}
	switch {
	case code == f.infinity && !f.saturates:
		return x * math.Inf(1)
	case code >= f.infinity:
		return math.Copysign(math.NaN(), x)
	}
	return x * f.number(code)
}

func (f format) encode(x float64) uint64 {
	sign := uint64(0)
	if math.Signbit(x) {
		sign, x = 1<<(f.exponent+f.significand), -x
	}
	if math.IsNaN(x) {
		return sign | f.nan
	}
	low, above := uint64(0), f.infinity // x is at or above low, and below above
	for above-low > 1 {
		if mid := (low + above) / 2; f.number(mid) <= x {
			low = mid
		} else {
			above = mid
		}
	}
	switch half := (f.number(low) + f.number(above)) / 2; {
	case x < half, x == half && low%2 == 0:
		return sign | low
	case f.saturates && above == f.infinity:
		return sign | low
	}
	return sign | above
}

// value is an element: an integer, or a float where there is none.
type value struct {
	whole *big.Int
	float float64
}

func code(b []byte) uint64 {
	var wide [8]byte
	copy(wide[:], b)
	return binary.LittleEndian.Uint64(wide[:])
}

func bytesOf(code uint64, d tensor.DType) []byte {
	return binary.LittleEndian.AppendUint64(nil, code)[:d.Size()]
}

func signed(d tensor.DType) bool {
	return d == tensor.Int8 || d == tensor.Int16 || d == tensor.Int32 || d == tensor.Int64
}

func decode(b []byte, d tensor.DType) value {
	switch c := code(b); d {
	case tensor.Bool:
		return value{whole: big.NewInt(int64(min(c, 1)))}
	case tensor.Float64:
		return value{float: math.Float64frombits(c)}
	case tensor.Float32:
		return value{float: float64(math.Float32frombits(uint32(c)))}
	case tensor.Float16, tensor.BFloat16, tensor.Float8E4M3, tensor.Float8E5M2:
		return value{float: formats[d].decode(c)}
	default:
		whole := new(big.Int).SetUint64(c)
		if bits := 8 * d.Size(); signed(d) && c>>(bits-1) == 1 {
			whole.Sub(whole, new(big.Int).Lsh(big.NewInt(1), uint(bits)))
		}
		return value{whole: whole}
	}
}

// rounded is the float32 or float64 nearest to a whole number.
func rounded(whole *big.Int, precision uint) float64 {
	x, _ := new(big.Float).SetPrec(precision).SetMode(big.ToNearestEven).SetInt(whole).Float64()
	return x
}

func encode(v value, d tensor.DType) []byte {
	switch d {
	case tensor.Float64:
		if v.whole != nil {
			v.float = rounded(v.whole, 53)
		}
		return bytesOf(math.Float64bits(v.float), d)
	case tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Float8E4M3, tensor.Float8E5M2:
		if v.whole != nil {
			v.float = rounded(v.whole, 24)
		}
		if d == tensor.Float32 {
			return bytesOf(uint64(math.Float32bits(float32(v.float))), d)
		}
		return bytesOf(formats[d].encode(float64(float32(v.float))), d)
	}
	if v.whole == nil {
		v.whole = chopped(v.float, d)
	}
	mask := new(big.Int).SetUint64(math.MaxUint64)
	return bytesOf(new(big.Int).And(v.whole, mask).Uint64(), d)
}

// chopped is x without its fraction, or what stands for it where that does
// not fit.
func chopped(x float64, to tensor.DType) *big.Int {
	through := uint(32)
	if to == tensor.Uint8 || to.Size() == 8 {
		through = 64
	}
	least := new(big.Int).Lsh(big.NewInt(-1), through-1)
	end := new(big.Int).Neg(least)
	full := to == tensor.Uint32 || to == tensor.Uint64
	switch {
	case full && math.IsInf(x, 1):
		return new(big.Int)
	case math.IsNaN(x) || math.IsInf(x, 0):
		return least
	}
	whole, _ := big.NewFloat(x).Int(nil)
	switch {
	case whole.Cmp(least) < 0:
		return least
	case full && whole.BitLen() > int(through):
		return new(big.Int)
	case !full && whole.Cmp(end) >= 0:
		return least
	}
	return whole
}
