package dcp

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/tensor"
)

// Payload is the storage of a tensor inside its archive, and the layout of the tensor's
// elements in it. The Payload that [ReadArchive] returns is within its bounds.
type Payload struct {
	DType          tensor.DType
	Offset, Length int64 // of the storage, in bytes, absolute in the file
	First          int64 // the first element's place in the storage, in elements
	// Sizes and Strides have one number per dimension, in elements. Strides are not negative.
	// A stride of 0 repeats elements, so the tensor may be larger than its storage.
	Sizes, Strides []int64
	CRC32          uint32 // of the whole storage, as recorded in the archive
	BigEndian      bool   // byte order of the elements in the storage
	Altered        bool   // PyTorch conjugates or negates the elements when it reads them
}

// Volume returns the number of elements of the tensor.
func (p Payload) Volume() int64 { return tensor.Shape(p.Sizes).Volume() }

// Contiguous reports whether the tensor's bytes, row-major and little-endian, are exactly the
// bytes of [Payload.Range].
func (p Payload) Contiguous() bool {
	if p.BigEndian && word(p.DType) > 1 {
		return false
	}
	if slices.Contains(p.Sizes, 0) {
		return true
	}
	run := int64(1)
	for d := len(p.Sizes) - 1; d >= 0; d-- {
		if p.Sizes[d] != 1 && p.Strides[d] != run {
			return false
		}
		run *= p.Sizes[d]
	}
	return true
}

// Range returns the smallest range of bytes, absolute in the file, that holds all elements of
// the tensor.
func (p Payload) Range() (offset, length int64) {
	lo, hi := p.span()
	size := int64(p.DType.Size())
	return p.Offset + lo*size, (hi - lo) * size
}

// span returns the half-open range of elements in the storage.
func (p Payload) span() (lo, hi int64) {
	if slices.Contains(p.Sizes, 0) {
		return 0, 0
	}
	last := p.First
	for d, n := range p.Sizes {
		last += (n - 1) * p.Strides[d]
	}
	return p.First, last + 1
}

// Gather copies the tensor's elements from storage, all Length bytes of it, to dst in
// row-major order and little-endian. It panics if dst does not have the tensor's size, Volume
// times the dtype's size: callers compare Sizes with their expectation before they allocate.
func (p Payload) Gather(dst []byte, storage []byte) {
	size := int64(p.DType.Size())
	if int64(len(dst)) != p.Volume()*size || int64(len(storage)) != p.Length {
		panic(fmt.Sprintf("gather a tensor of %d bytes from a storage of %d: got %d and %d", p.Volume()*size, p.Length, len(dst), len(storage)))
	}
	if len(dst) == 0 {
		return
	}
	// The inner dimensions without gaps are copied together.
	run, inner := int64(1), len(p.Sizes)
	for inner > 0 && (p.Sizes[inner-1] == 1 || p.Strides[inner-1] == run) {
		inner--
		run *= p.Sizes[inner]
	}
	piece := run * size
	index := make([]int64, inner)
	from := p.First
	for to := int64(0); to < int64(len(dst)); to += piece {
		copy(dst[to:to+piece], storage[from*size:])
		for d := inner - 1; d >= 0; d-- {
			index[d]++
			from += p.Strides[d]
			if index[d] < p.Sizes[d] {
				break
			}
			from -= p.Sizes[d] * p.Strides[d]
			index[d] = 0
		}
	}
	if p.BigEndian {
		swap(dst, word(p.DType))
	}
}

// word returns the number of bytes that the byte order reverses: half an element of a complex
// type.
func word(d tensor.DType) int {
	switch d {
	case tensor.Complex32, tensor.Complex64, tensor.Complex128:
		return d.Size() / 2
	}
	return d.Size()
}

func swap(b []byte, word int) {
	switch word {
	case 2:
		for ; len(b) >= 2; b = b[2:] {
			binary.LittleEndian.PutUint16(b, binary.BigEndian.Uint16(b))
		}
	case 4:
		for ; len(b) >= 4; b = b[4:] {
			binary.LittleEndian.PutUint32(b, binary.BigEndian.Uint32(b))
		}
	case 8:
		for ; len(b) >= 8; b = b[8:] {
			binary.LittleEndian.PutUint64(b, binary.BigEndian.Uint64(b))
		}
	}
}
