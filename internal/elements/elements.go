// Package elements shows elements of a tensor: as a .npy file, as text, and the parts of it that
// numpy's basic slicing names. It is pure.
package elements

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/tensor"
)

// npyTypes are numpy's names of the element types that it supports.
var npyTypes = map[tensor.DType]string{
	tensor.Bool: "|b1", tensor.Uint8: "|u1", tensor.Int8: "|i1",
	tensor.Uint16: "<u2", tensor.Int16: "<i2", tensor.Uint32: "<u4", tensor.Int32: "<i4", tensor.Uint64: "<u8", tensor.Int64: "<i8",
	tensor.Float16: "<f2", tensor.Float32: "<f4", tensor.Float64: "<f8", tensor.Complex64: "<c8", tensor.Complex128: "<c16",
}

// NPYHeader returns the header of a .npy file of version 1.0:
//
//	┌──────────────┬───────────┬────────┬──────────────────────────────┐
//	│ "\x93NUMPY"  │ 0x01 0x00 │ length │ dict, padded with spaces to  │
//	│ 6 B          │ 2 B       │ u16 LE │ a multiple of 64 B, "\n"     │
//	└──────────────┴───────────┴────────┴──────────────────────────────┘
func NPYHeader(dtype tensor.DType, shape tensor.Shape) ([]byte, error) {
	name, ok := npyTypes[dtype]
	if !ok {
		as := fmt.Sprintf(", or --dtype %v to convert it", Wider(dtype))
		if Wider(dtype) == dtype {
			as = ""
		}
		return nil, fmt.Errorf("numpy has no type for %v; use --format raw for its bytes%s", dtype, as)
	}
	dims := make([]string, len(shape))
	for d, n := range shape {
		dims[d] = strconv.FormatInt(n, 10)
	}
	tuple := "(" + strings.Join(dims, ", ") + ")"
	if len(dims) == 1 {
		tuple = "(" + dims[0] + ",)"
	}
	const fixed = 10 // bytes before the dict
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", name, tuple)
	dict += strings.Repeat(" ", (64-(fixed+len(dict)+1)%64)%64) + "\n"
	if len(dict) > math.MaxUint16 {
		return nil, fmt.Errorf("a .npy file of version 1.0 cannot have %d dimensions; use --format raw", len(shape))
	}
	head := append([]byte("\x93NUMPY\x01\x00"), 0, 0)
	binary.LittleEndian.PutUint16(head[8:], uint16(len(dict)))
	return append(head, dict...), nil
}

// Wider returns the numpy type that can hold all elements of a type that numpy lacks,
// or the type itself if there is none.
func Wider(dtype tensor.DType) tensor.DType {
	if tensor.Convertible(dtype, tensor.Float32) == nil {
		return tensor.Float32
	}
	if tensor.Convertible(dtype, tensor.Complex64) == nil {
		return tensor.Complex64
	}
	return dtype
}

// HasText reports whether elements of a type can be written as text without a loss of precision.
func HasText(dtype tensor.DType) bool { return npyTypes[dtype] != "" && dtype != tensor.Float16 }

// Text writes elements as text: one line per row of the last dimension, and an empty
// line between matrices. Tensors with one dimension get one line per element.
type Text struct {
	w     *bufio.Writer
	dtype tensor.DType
	row   int64 // elements on a line
	plane int64 // elements before an empty line; 0: there is none
	at    int64
	text  []byte
}

// NewText returns a writer of the elements of a tensor as text. It returns an error if the type
// has none.
func NewText(w io.Writer, dtype tensor.DType, shape tensor.Shape) (*Text, error) {
	if _, ok := npyTypes[dtype]; !ok {
		return nil, fmt.Errorf("elements of %v cannot be written as text; use --format raw", dtype)
	}
	t := &Text{w: bufio.NewWriterSize(w, 1<<20), dtype: dtype, row: 1}
	if n := len(shape); n > 1 {
		t.row = shape[n-1]
		if n > 2 {
			t.plane = t.row * shape[n-2]
		}
	}
	return t, nil
}

// Write implements io.Writer for whole elements.
func (t *Text) Write(p []byte) (int, error) {
	size := t.dtype.Size()
	for rest := p; len(rest) >= size; rest = rest[size:] {
		t.text = t.text[:0]
		switch {
		case t.at == 0:
		case t.plane > 0 && t.at%t.plane == 0:
			t.text = append(t.text, "\n\n"...)
		case t.at%t.row == 0:
			t.text = append(t.text, '\n')
		default:
			t.text = append(t.text, ' ')
		}
		t.text = appendElement(t.text, t.dtype, rest)
		t.at++
		if _, err := t.w.Write(t.text); err != nil {
			return len(p) - len(rest), err
		}
	}
	return len(p), nil
}

// Reset continues on another writer.
func (t *Text) Reset(w io.Writer) { t.w.Reset(w) }

// End ends the last line.
func (t *Text) End() error {
	if t.at > 0 {
		_ = t.w.WriteByte('\n') // the writer keeps its error for Flush
	}
	return t.w.Flush()
}

// appendElement appends the shortest text that identifies the element among those of
// its type.
func appendElement(b []byte, dtype tensor.DType, p []byte) []byte {
	le := binary.LittleEndian
	float := func(v float64, bits int) { b = strconv.AppendFloat(b, v, 'g', -1, bits) }
	imaginary := func(re, im float64, bits int) {
		float(re, bits)
		text := strconv.FormatFloat(im, 'g', -1, bits)
		if text[0] != '-' && text[0] != '+' { // an infinity has its sign
			b = append(b, '+')
		}
		b = append(append(b, text...), 'j')
	}
	switch dtype {
	case tensor.Bool:
		return strconv.AppendBool(b, p[0] != 0)
	case tensor.Uint8:
		return strconv.AppendUint(b, uint64(p[0]), 10)
	case tensor.Int8:
		return strconv.AppendInt(b, int64(int8(p[0])), 10)
	case tensor.Uint16:
		return strconv.AppendUint(b, uint64(le.Uint16(p)), 10)
	case tensor.Int16:
		return strconv.AppendInt(b, int64(int16(le.Uint16(p))), 10)
	case tensor.Uint32:
		return strconv.AppendUint(b, uint64(le.Uint32(p)), 10)
	case tensor.Int32:
		return strconv.AppendInt(b, int64(int32(le.Uint32(p))), 10)
	case tensor.Uint64:
		return strconv.AppendUint(b, le.Uint64(p), 10)
	case tensor.Int64:
		return strconv.AppendInt(b, int64(le.Uint64(p)), 10)
	case tensor.Float32:
		float(float64(math.Float32frombits(le.Uint32(p))), 32)
	case tensor.Float64:
		float(math.Float64frombits(le.Uint64(p)), 64)
	case tensor.Complex64:
		imaginary(float64(math.Float32frombits(le.Uint32(p))), float64(math.Float32frombits(le.Uint32(p[4:]))), 32)
	case tensor.Complex128:
		imaginary(math.Float64frombits(le.Uint64(p)), math.Float64frombits(le.Uint64(p[8:])), 64)
	}
	return b
}

// Slice is a part of a tensor, and the shape of the result, which lacks the dimensions
// that were given by an index.
type Slice struct {
	Box   tensor.Box
	Shape tensor.Shape
}

// ParseSlice parses numpy's basic slicing of a tensor: for each dimension START:STOP, an
// index, or a colon, and "..." for the remaining dimensions. Negative numbers count from
// the end, and ranges are cut at the end of the tensor.
func ParseSlice(spec string, shape tensor.Shape) (Slice, error) {
	parts := strings.Split(spec, ",")
	if strings.TrimSpace(spec) == "" {
		return Slice{}, fmt.Errorf("empty; give a range for each dimension, such as 0:10,:,5")
	}
	if last := len(parts) - 1; last > 0 && strings.TrimSpace(parts[last]) == "" {
		parts = parts[:last] // as in a tuple of Python
	}
	named, dots := 0, false
	for _, part := range parts {
		if strings.TrimSpace(part) != "..." {
			named++
			continue
		}
		if dots {
			return Slice{}, fmt.Errorf(`it has "..." twice`)
		}
		dots = true
	}
	if named > len(shape) {
		return Slice{}, fmt.Errorf("names %d dimensions, the tensor has %d: its shape is %v", named, len(shape), []int64(shape))
	}
	if !dots {
		parts = append(parts, "...")
	}
	out := Slice{Shape: tensor.Shape{}}
	add := func(off, size int64, keep bool) {
		out.Box.Offsets, out.Box.Sizes = append(out.Box.Offsets, off), append(out.Box.Sizes, size)
		if keep {
			out.Shape = append(out.Shape, size)
		}
	}
	for _, part := range parts {
		d := len(out.Box.Sizes)
		if part = strings.TrimSpace(part); part == "..." {
			for range len(shape) - named {
				add(0, shape[len(out.Box.Sizes)], true)
			}
			continue
		}
		off, size, keep, err := parseRange(part, shape[d])
		if err != nil {
			return Slice{}, fmt.Errorf("dimension %d, %q: %w", d, part, err)
		}
		add(off, size, keep)
	}
	return out, nil
}

// parseRange parses the part of one dimension of n elements.
func parseRange(text string, n int64) (off, size int64, keep bool, err error) {
	ends := strings.Split(text, ":")
	number := func(i int, absent int64) (int64, error) {
		if i >= len(ends) || strings.TrimSpace(ends[i]) == "" {
			return absent, nil
		}
		v, err := strconv.ParseInt(strings.TrimSpace(ends[i]), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a whole number", ends[i])
		}
		return v, nil
	}
	if len(ends) == 1 {
		if strings.TrimSpace(text) == "" {
			return 0, 0, false, fmt.Errorf("empty; write : for the whole dimension")
		}
		i, err := number(0, 0)
		if err != nil {
			return 0, 0, false, err
		}
		if i < -n || i >= n {
			return 0, 0, false, fmt.Errorf("index %d is out of bounds of %d elements", i, n)
		}
		if i < 0 {
			i += n
		}
		return i, 1, false, nil
	}
	if len(ends) > 3 {
		return 0, 0, false, fmt.Errorf("want START:STOP, an index, or a colon")
	}
	step, err := number(2, 1)
	if err != nil {
		return 0, 0, false, err
	}
	if step != 1 {
		return 0, 0, false, fmt.Errorf("a step of %d is not supported; omit it, and take one in %d of the output", step, step)
	}
	start, err := number(0, 0)
	if err != nil {
		return 0, 0, false, err
	}
	stop, err := number(1, n)
	if err != nil {
		return 0, 0, false, err
	}
	within := func(v int64) int64 {
		if v < 0 {
			v = max(v, -n) + n
		}
		return min(v, n)
	}
	start, stop = within(start), within(stop)
	return min(start, n), max(stop-start, 0), true, nil
}
