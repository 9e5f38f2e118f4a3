// Package safetensors reads and writes the headers of safetensors files. It is
// a pure codec: it never opens a file.
//
//	header   what a file holds: metadata and tensors
//	tensor   a name, an element type, a shape and a range of the data
//	data     everything after the header; ranges count from its start
//
// The bytes of a file:
//
//	0        8                8+n                     size
//	┌────────┬─────────────────┬────────────────────────┐
//	│ n      │ JSON, n bytes   │ data                   │
//	│ u64 LE │ padded by 0x20  │ no holes, no overlaps  │
//	└────────┴─────────────────┴────────────────────────┘
//
//	{"__metadata__":{"format":"pt"},
//	 "w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}
//
// [Encode] pads the JSON so that the data begins at a multiple of 4096 bytes.
// [Parse] trusts nothing: every number is checked against the size of the file
// before it is used, and every error names the tensor or the place.
package safetensors

import (
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/tensor"
)

// Limits and names of the format.
const (
	// Align is the alignment, in bytes, of the data's start in encoded headers. In parsed
	// files the data may begin anywhere.
	Align = 4096
	// MaxHeader bounds the JSON of a header, in bytes, as in the reference
	// implementation.
	MaxHeader = 100_000_000
	// MetadataKey is the only key of a header that does not name a tensor.
	MetadataKey = "__metadata__"

	prefix = 8 // bytes of the length in front of the JSON
)

// Type is the name of an element type in a header, such as "BF16".
type Type string

// Raw is the type of bytes without a more specific type.
const Raw Type = "U8"

var types = [...]struct {
	name  Type
	dtype tensor.DType
}{
	{"BOOL", tensor.Bool},
	{"U8", tensor.Uint8},
	{"I8", tensor.Int8},
	{"U16", tensor.Uint16},
	{"I16", tensor.Int16},
	{"U32", tensor.Uint32},
	{"I32", tensor.Int32},
	{"U64", tensor.Uint64},
	{"I64", tensor.Int64},
	{"F16", tensor.Float16},
	{"BF16", tensor.BFloat16},
	{"F32", tensor.Float32},
	{"F64", tensor.Float64},
	{"F8_E4M3", tensor.Float8E4M3},
	{"F8_E5M2", tensor.Float8E5M2},
}

// TypeOf returns the name of d, and whether the format has one. It has no name that every
// reader knows for complex numbers, float8_e8m0fnu and AMD's types: store those as [Raw].
func TypeOf(d tensor.DType) (Type, bool) {
	for _, t := range types {
		if t.dtype == d {
			return t.name, true
		}
	}
	return "", false
}

// DType returns the element type that t names, and whether it is known.
func (t Type) DType() (tensor.DType, bool) {
	for _, known := range types {
		if known.name == t {
			return known.dtype, true
		}
	}
	return 0, false
}

// Tensor is one entry of a header.
type Tensor struct {
	Name  string
	Type  Type
	Shape tensor.Shape
	Start int64 // in bytes from the start of the data
	End   int64 // first byte after the tensor
}

// validate checks everything about t that does not depend on other tensors.
func (t Tensor) validate() error {
	dtype, ok := t.Type.DType()
	if !ok {
		return fmt.Errorf("tensor %q: unknown dtype %q", t.Name, string(t.Type))
	}
	if err := t.Shape.Validate(); err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	if t.Start < 0 || t.End < t.Start {
		return fmt.Errorf("tensor %q: data_offsets [%d, %d] are not a range", t.Name, t.Start, t.End)
	}
	volume, size := t.Shape.Volume(), int64(dtype.Size())
	if volume > math.MaxInt64/size {
		return fmt.Errorf("tensor %q: shape %v needs more than 2^63 bytes", t.Name, t.Shape)
	}
	if need := volume * size; need != t.End-t.Start {
		return fmt.Errorf("tensor %q: data_offsets [%d, %d] hold %d bytes, %s of shape %v needs %d",
			t.Name, t.Start, t.End, t.End-t.Start, t.Type, t.Shape, need)
	}
	return nil
}

// Header lists the contents of a file.
type Header struct {
	Metadata  map[string]string // under "__metadata__"; nil when absent
	Tensors   []Tensor          // in the order of their data
	DataStart int64             // where the data begins in the file, in bytes
}

// DataSize returns the size of the data in bytes.
func (h Header) DataSize() int64 {
	if len(h.Tensors) == 0 {
		return 0
	}
	return h.Tensors[len(h.Tensors)-1].End
}

// validate checks that the tensors, in order, fill the data exactly.
func (h Header) validate() error {
	at := int64(0)
	for i, t := range h.Tensors {
		if err := t.validate(); err != nil {
			return err
		}
		if t.Start == at {
			at = t.End
			continue
		}
		after := "the start of the data"
		if i > 0 {
			after = fmt.Sprintf("tensor %q", h.Tensors[i-1].Name)
		}
		if t.Start < at {
			return fmt.Errorf("tensor %q begins at %d and overlaps %s, which ends at %d", t.Name, t.Start, after, at)
		}
		return fmt.Errorf("hole of %d bytes at %d between %s and tensor %q", t.Start-at, at, after, t.Name)
	}
	return nil
}
