// Package tensor defines the types that all packages share: data types, shapes, boxes and
// shards.
//
//	tensor   an N-dimensional array with a name (its FQN), a dtype and a
//	         global shape
//	box      an axis-aligned part of a tensor: offsets and sizes, one pair per
//	         dimension, half open
//	shard    one rank's box of a tensor
//	chunk    the stored bytes of one shard: contiguous, row-major,
//	         little-endian
//
// A 0-dimensional tensor (a scalar) has an empty shape, an empty box and one element. A box
// with a zero size in any dimension is empty and has none. All arithmetic that could overflow
// is checked where untrusted numbers enter: in [Shape.Validate] and [Box.Validate].
package tensor

import (
	"fmt"
	"math"
	"slices"
)

// MaxDims bounds the number of dimensions that a shape may have.
const MaxDims = 64

// Shape is the extent of a tensor in each dimension, in elements.
type Shape []int64

// Validate returns an error for a negative extent, too many dimensions, or a number of
// elements that does not fit in an int64.
func (s Shape) Validate() error {
	if len(s) > MaxDims {
		return fmt.Errorf("shape has %d dimensions, at most %d are allowed", len(s), MaxDims)
	}
	volume := int64(1)
	for dim, n := range s {
		if n < 0 {
			return fmt.Errorf("shape %v: dimension %d is negative", s, dim)
		}
		if n > 0 && volume > math.MaxInt64/n {
			return fmt.Errorf("shape %v: more than 2^63 elements", s)
		}
		volume *= max(n, 1)
	}
	return nil
}

// Volume returns the number of elements; 1 for a scalar.
func (s Shape) Volume() int64 {
	volume := int64(1)
	for _, n := range s {
		volume *= n
	}
	return volume
}

// Equal reports whether both shapes have the same dimensions.
func (s Shape) Equal(t Shape) bool { return slices.Equal(s, t) }

// Full returns the box that covers the whole shape.
func (s Shape) Full() Box {
	return Box{Offsets: make([]int64, len(s)), Sizes: slices.Clone([]int64(s))}
}

// Shard is one rank's box of a tensor.
type Shard struct {
	FQN    string // fully qualified name, such as "model.layers.0.weight"
	DType  DType
	Global Shape // shape of the whole tensor
	Box    Box   // this shard's part of it
}

// Validate checks the dtype, the shape, and that the box lies in the shape.
func (s Shard) Validate() error {
	if s.FQN == "" {
		return fmt.Errorf("tensor without a name")
	}
	if !s.DType.Valid() {
		return fmt.Errorf("tensor %q: invalid dtype %d", s.FQN, s.DType)
	}
	if err := s.Global.Validate(); err != nil {
		return fmt.Errorf("tensor %q: %w", s.FQN, err)
	}
	if s.Global.Volume() > math.MaxInt64/int64(s.DType.Size()) {
		return fmt.Errorf("tensor %q: shape %v needs more than 2^63 bytes", s.FQN, s.Global)
	}
	if err := s.Box.Validate(s.Global); err != nil {
		return fmt.Errorf("tensor %q: %w", s.FQN, err)
	}
	return nil
}

// Bytes returns the size of the shard's chunk.
func (s Shard) Bytes() int64 { return s.Box.Volume() * int64(s.DType.Size()) }
