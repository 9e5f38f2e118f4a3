package tensor

import "fmt"

// DType is the element type of a tensor. The zero value is invalid. The
// numbers are part of the binary formats: they are never reused.
type DType uint8

// The element types that PyTorch can save.
const (
	Bool       DType = 1
	Uint8      DType = 2
	Int8       DType = 3
	Uint16     DType = 4
	Int16      DType = 5
	Uint32     DType = 6
	Int32      DType = 7
	Uint64     DType = 8
	Int64      DType = 9
	Float16    DType = 10
	BFloat16   DType = 11
	Float32    DType = 12
	Float64    DType = 13
	Complex32  DType = 14
	Complex64  DType = 15
	Complex128 DType = 16
	Float8E4M3 DType = 17 // e4m3fn: no infinities
	Float8E5M2 DType = 18
	Float8E8M0 DType = 19 // e8m0fnu: exponent only

	Float8E4M3FNUZ DType = 20 // of AMD: no infinities, no negative zero
	Float8E5M2FNUZ DType = 21
)

var dtypes = [...]struct {
	name string
	size int
}{
	Bool: {"bool", 1}, Uint8: {"uint8", 1}, Int8: {"int8", 1},
	Uint16: {"uint16", 2}, Int16: {"int16", 2},
	Uint32: {"uint32", 4}, Int32: {"int32", 4},
	Uint64: {"uint64", 8}, Int64: {"int64", 8},
	Float16: {"float16", 2}, BFloat16: {"bfloat16", 2},
	Float32: {"float32", 4}, Float64: {"float64", 8},
	Complex32: {"complex32", 4}, Complex64: {"complex64", 8}, Complex128: {"complex128", 16},
	Float8E4M3: {"float8_e4m3fn", 1}, Float8E5M2: {"float8_e5m2", 1}, Float8E8M0: {"float8_e8m0fnu", 1},
	Float8E4M3FNUZ: {"float8_e4m3fnuz", 1}, Float8E5M2FNUZ: {"float8_e5m2fnuz", 1},
}

// Valid reports whether d is one of the declared types.
func (d DType) Valid() bool { return d > 0 && int(d) < len(dtypes) }

// Size returns the number of bytes of one element; 0 for an invalid type.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// String returns PyTorch's name of the type, without the leading "torch.".
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypes[d].name
}

// ParseDType is the inverse of [DType.String].
func ParseDType(name string) (DType, error) {
	for d := range dtypes {
		if d > 0 && dtypes[d].name == name {
			return DType(d), nil
		}
	}
	return 0, fmt.Errorf("unknown dtype %q", name)
}

// MarshalText writes PyTorch's name, so that JSON shows "float32".
func (d DType) MarshalText() ([]byte, error) {
	if !d.Valid() {
		return nil, fmt.Errorf("invalid dtype %d", uint8(d))
	}
	return []byte(d.String()), nil
}

// UnmarshalText reads what [DType.MarshalText] wrote.
func (d *DType) UnmarshalText(text []byte) error {
	v, err := ParseDType(string(text))
	*d = v
	return err
}
