package plan

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"

	"github.com/ckptstore/ckptstore/tensor"
)

// All binary forms of this package begin with four magic bytes and a version
// byte. Numbers are unsigned varints, strings and lists begin with their
// length. Encoding is canonical: equal values give equal bytes, so the digest
// of an encoded plan is the plan's fingerprint.
//
//	local     "CKLP" 1 rank count item*
//	layout    "CKLY" 1 count tensor* count value*
//	manifest  "CKMF" 1 store run trial checkpoint name step attempt world
//	          count (rank digest)* layout
//	item      flags fqn bytes [dtype ndim dim* (offset size)*]
//	tensor    fqn dtype ndim dim* count (rank (offset size)*)*
//	value     fqn rank bytes flags
const (
	magicLocal    = "CKLP"
	magicLayout   = "CKLY"
	magicManifest = "CKMF"
	version       = 1

	flagValue   = 1
	flagPerRank = 2
)

type encoder struct{ b []byte }

func (e *encoder) uint(v uint64)      { e.b = binary.AppendUvarint(e.b, v) }
func (e *encoder) int(v int)          { e.uint(uint64(v)) }
func (e *encoder) int64(v int64)      { e.uint(uint64(v)) }
func (e *encoder) string(s string)    { e.int(len(s)); e.b = append(e.b, s...) }
func (e *encoder) begin(magic string) { e.b = append(append(e.b, magic...), version) }

func (e *encoder) dims(s tensor.Shape) {
	e.int(len(s))
	for _, n := range s {
		e.int64(n)
	}
}

func (e *encoder) box(b tensor.Box) {
	for d := range b.Offsets {
		e.int64(b.Offsets[d])
		e.int64(b.Sizes[d])
	}
}

// decoder reads an encoded form. The first error sticks; counts are checked
// against the bytes that are left before anything is allocated.
type decoder struct {
	b    []byte
	size int
	err  error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("offset %d: %s", d.size-len(d.b), fmt.Sprintf(format, args...))
		d.b = nil
	}
}

func (d *decoder) begin(magic string) {
	if len(d.b) < 5 || string(d.b[:4]) != magic {
		d.fail("not a %s: bad magic", magic)
		return
	}
	if d.b[4] != version {
		d.fail("version %d of %s is not known, upgrade to read it", d.b[4], magic)
		return
	}
	d.b = d.b[5:]
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || n > 1 && d.b[n-1] == 0 { // truncated, too long, or padded
		d.fail("bad number")
		return 0
	}
	d.b = d.b[n:]
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
	if v > 1<<31 {
		d.fail("number %d is too large", v)
		return 0
	}
	return int(v)
}

// count reads the length of a list whose entries have at least size bytes.
func (d *decoder) count(size int) int {
	v := d.uint()
	if v > uint64(len(d.b)/size) {
		d.fail("a list of %d entries does not fit in the %d bytes that are left", v, len(d.b))
		return 0
	}
	return int(v)
}

// entries yields once for each entry of a list, and stops at the first error:
// what is made of broken bytes stays small.
func (d *decoder) entries(size int) iter.Seq[int] {
	n := d.count(size)
	return func(yield func(int) bool) {
		for i := 0; i < n && d.err == nil && yield(i); i++ {
		}
	}
}

func (d *decoder) string() string {
	n := d.count(1)
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

// name is a string that is not empty.
func (d *decoder) name(of string) string {
	s := d.string()
	if s == "" {
		d.fail("%s without a name", of)
	}
	return s
}

func (d *decoder) digest() (out Digest) {
	if len(d.b) < len(out) {
		d.fail("truncated digest")
		return out
	}
	d.b = d.b[copy(out[:], d.b):]
	return out
}

func (d *decoder) dtype() tensor.DType {
	v := d.uint()
	if v > 255 || !tensor.DType(v).Valid() {
		d.fail("unknown dtype %d", v)
		return 0
	}
	return tensor.DType(v)
}

func (d *decoder) dims() tensor.Shape {
	s := make(tensor.Shape, d.count(1))
	for i := range s {
		s[i] = d.int64()
	}
	return s
}

func (d *decoder) box(ndim int) tensor.Box {
	if ndim > len(d.b) {
		d.fail("truncated box")
		return tensor.Box{}
	}
	b := tensor.Box{Offsets: make([]int64, ndim), Sizes: make([]int64, ndim)}
	for i := range ndim {
		b.Offsets[i], b.Sizes[i] = d.int64(), d.int64()
	}
	return b
}

func (d *decoder) end(what string) error {
	if d.err == nil && len(d.b) > 0 {
		d.fail("%d bytes after the end", len(d.b))
	}
	if d.err != nil {
		return fmt.Errorf("decode %s: %w", what, d.err)
	}
	return nil
}
