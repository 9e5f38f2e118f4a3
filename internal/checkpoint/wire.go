package checkpoint

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/tensor"
)

const (
	magicLocal    = "CKLP"
	magicLayout   = "CKLY"
	magicManifest = "CKMF"
	version       = 1

	flagValue   = 1
	flagPerRank = 2
	flagPath    = 4
	flagCheck   = 8

	dtypePath = 1 << 7 // in a column of dtypes, where a path follows

	maxRank   = 1 << 31
	maxIndex  = 1 << 31 // of a list
	maxShared = 127     // bytes that a name may share with the name before
)

type encoder struct{ b []byte }

func (e *encoder) uint(v uint64)       { e.b = binary.AppendUvarint(e.b, v) }
func (e *encoder) int(v int)           { e.uint(uint64(v)) }
func (e *encoder) int64(v int64)       { e.uint(uint64(v)) }
func (e *encoder) delta(v, from int64) { e.uint(zigzag(v - from)) }
func (e *encoder) string(s string)     { e.int(len(s)); e.b = append(e.b, s...) }
func (e *encoder) begin(magic string)  { e.b = append(append(e.b, magic...), version) }

// zigzag maps small numbers of either sign to small unsigned ones.
func zigzag(v int64) uint64   { return uint64(v)<<1 ^ uint64(v>>63) }
func unzigzag(v uint64) int64 { return int64(v>>1) ^ -int64(v&1) }

// names front-codes the names at(0) to at(n-1).
func (e *encoder) names(n int, at func(i int) string) {
	last := ""
	for i := range n {
		name := at(i)
		shared := 0
		for shared < min(len(last), len(name), maxShared) && last[shared] == name[shared] {
			shared++
		}
		e.int(shared)
		e.string(name[shared:])
		last = name
	}
}

// decoder reads an encoded form. The first error sticks; counts are checked against the
// remaining bytes before anything is allocated.
type decoder struct {
	b   []byte
	at  int
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("offset %d: %s", d.at, fmt.Sprintf(format, args...))
		d.at = len(d.b)
	}
}

func (d *decoder) left() int { return len(d.b) - d.at }

func (d *decoder) begin(magic string) {
	if d.left() < 5 || string(d.b[d.at:d.at+4]) != magic {
		d.fail("not a %s: bad magic", magic)
		return
	}
	if v := d.b[d.at+4]; v != version {
		d.fail("version %d of %s is not known, upgrade to read it", v, magic)
		return
	}
	d.at += 5
}

func (d *decoder) uint() uint64 {
	if d.at < len(d.b) && d.b[d.at] < 0x80 {
		d.at++
		return uint64(d.b[d.at-1])
	}
	return d.longUint()
}

func (d *decoder) longUint() uint64 {
	v, n := binary.Uvarint(d.b[d.at:])
	if n <= 0 || n > 1 && d.b[d.at+n-1] == 0 { // truncated, too long, or padded
		d.fail("bad number")
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) int64() int64 {
	v := d.uint()
	if v > math.MaxInt64 {
		d.fail("number %d is too large", v)
		return 0
	}
	return int64(v)
}

func (d *decoder) int() int {
	v := d.uint()
	if v > maxRank {
		d.fail("number %d is too large", v)
		return 0
	}
	return int(v)
}

// rank reads a rank as the difference from the one before.
func (d *decoder) rank(last int) int {
	v := int64(last) + unzigzag(d.uint())
	if v < 0 || v > maxRank {
		d.fail("rank %d is out of range", v)
		return 0
	}
	return int(v)
}

// count reads the length of a list whose entries have at least size bytes.
func (d *decoder) count(size int) int { return d.fits(d.uint(), size) }

func (d *decoder) fits(v uint64, size int) int {
	if v > uint64(d.left()/size) {
		d.fail("a list of %d entries does not fit in the %d bytes that are left", v, d.left())
		return 0
	}
	return int(v)
}

func (d *decoder) bytes() []byte {
	n := d.count(1)
	d.at += n
	return d.b[d.at-n : d.at]
}

// flags reads a column of n bytes, which may set only the bits of allowed.
func (d *decoder) flags(n int, allowed byte) []byte {
	if n > d.left() {
		d.fail("truncated flags")
		return nil
	}
	column := d.b[d.at : d.at+n]
	for _, f := range column {
		if f&^allowed != 0 {
			d.fail("unknown flags %d", f)
			return nil
		}
		d.at++
	}
	return column
}

// names reads n front-coded names. They share one allocation, whose size maxShared bounds to
// a multiple of the bytes read.
func (d *decoder) names(n int, of string) []string {
	if n == 0 || d.err != nil {
		return nil
	}
	text := make([]byte, 0, min(n*32, 4*d.left())) // most names need no more
	ends := make([]int, 0, n)
	begin := 0 // of the name before
	for range n {
		last := text[begin:]
		shared, suffix := d.uint(), d.bytes()
		switch {
		case d.err != nil:
			return nil
		case shared > uint64(min(len(last), maxShared)):
			d.fail("%s: %d bytes of the name before are not there to share", of, shared)
			return nil
		case shared == 0 && len(suffix) == 0:
			d.fail("%s without a name", of)
			return nil
		case shared < maxShared && int(shared) < len(last) && len(suffix) > 0 && last[shared] == suffix[0]:
			d.fail("%s shares more of the name before than it declares", of)
			return nil
		}
		next := len(text)
		text = append(append(text, last[:shared]...), suffix...)
		begin = next
		ends = append(ends, len(text))
	}
	whole, names := string(text), make([]string, n)
	begin = 0
	for i, end := range ends {
		names[i], begin = whole[begin:end], end
	}
	return names
}

func (d *decoder) digest() (out Digest) {
	if d.left() < len(out) {
		d.fail("truncated digest")
		return out
	}
	d.at += copy(out[:], d.b[d.at:])
	return out
}

// dtypes reads a column of n dtypes, a byte each, in which the bits of allowed may be set
// too.
func (d *decoder) dtypes(n int, allowed byte) []byte {
	if n > d.left() {
		d.fail("truncated dtypes")
		return nil
	}
	column := d.b[d.at : d.at+n]
	for _, v := range column {
		if !tensor.DType(v &^ allowed).Valid() {
			d.fail("unknown dtype %d", v)
			return nil
		}
		d.at++
	}
	return column
}

// shapes reads n shapes, which share one allocation: a column of their
// numbers of dimensions, then one of the dimensions.
func (d *decoder) shapes(n int) []tensor.Shape {
	if n == 0 || d.err != nil {
		return nil
	}
	start, sum := d.at, 0
	for range n {
		k := d.uint()
		if k > tensor.MaxDims {
			d.fail("shape has %d dimensions, at most %d are allowed", k, tensor.MaxDims)
		}
		sum += int(k)
	}
	if d.fits(uint64(sum), 1); d.err != nil {
		return nil
	}
	slab, shapes := make([]int64, sum), make([]tensor.Shape, n)
	for i := range slab {
		slab[i] = d.int64()
	}
	for i := range shapes {
		k := int(d.b[start+i]) // at most MaxDims: one byte each
		shapes[i], slab = slab[:k:k], slab[k:]
	}
	return shapes
}

func (d *decoder) end(what string) error {
	if d.err == nil && d.left() > 0 {
		d.fail("%d bytes after the end", d.left())
	}
	if d.err != nil {
		return fmt.Errorf("decode %s: %w", what, d.err)
	}
	return nil
}
