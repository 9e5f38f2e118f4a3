package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/tensor"
)

// Parse reads and checks the header of a file of size bytes. It allocates no
// more than a small multiple of the header, and reads none of the data.
func Parse(r io.ReaderAt, size int64) (Header, error) {
	h, err := parse(r, size)
	if err != nil {
		return Header{}, fmt.Errorf("parse safetensors header: %w", err)
	}
	return h, nil
}

func parse(r io.ReaderAt, size int64) (Header, error) {
	if size < prefix {
		return Header{}, fmt.Errorf("file of %d bytes is too short for the length of the header", size)
	}
	var length [prefix]byte
	if err := readFull(r, length[:], 0); err != nil {
		return Header{}, fmt.Errorf("read the length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > MaxHeader {
		return Header{}, fmt.Errorf("length %d is above the limit of %d bytes", n, MaxHeader)
	}
	if int64(n) > size-prefix {
		return Header{}, fmt.Errorf("length %d is more than the %d bytes that follow it", n, size-prefix)
	}
	text := make([]byte, n)
	if err := readFull(r, text, prefix); err != nil {
		return Header{}, fmt.Errorf("read %d bytes of JSON: %w", n, err)
	}
	if len(text) == 0 || text[0] != '{' {
		return Header{}, errors.New(`offset 8: the JSON does not begin with "{"`)
	}
	if !utf8.Valid(text) {
		return Header{}, errors.New("the JSON is not valid UTF-8")
	}
	d := &decoder{json: json.NewDecoder(bytes.NewReader(text))}
	d.json.UseNumber()
	h := d.header()
	if d.err != nil {
		return Header{}, fmt.Errorf("offset %d: %w", prefix+d.json.InputOffset(), d.err)
	}
	h.DataStart = prefix + int64(n)
	slices.SortStableFunc(h.Tensors, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End))
	})
	if err := h.validate(); err != nil {
		return Header{}, err
	}
	if have := size - h.DataStart; h.DataSize() > have {
		last := h.Tensors[len(h.Tensors)-1]
		return Header{}, fmt.Errorf("tensor %q ends at %d, the file has only %d bytes of data", last.Name, last.End, have)
	} else if h.DataSize() < have {
		return Header{}, fmt.Errorf("%d trailing bytes after the last tensor", have-h.DataSize())
	}
	return h, nil
}

// readFull fills b from off. Readers may report the end of the file together
// with the last bytes.
func readFull(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// decoder walks the JSON token by token, since decoding into a map would hide
// duplicate keys. The first error sticks, and every loop ends with it.
type decoder struct {
	json *json.Decoder
	err  error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

func (d *decoder) token() json.Token {
	if d.err != nil {
		return nil
	}
	token, err := d.json.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		d.fail("%w", err)
	}
	return token
}

func (d *decoder) delim(want json.Delim, where string) {
	if token := d.token(); token != want {
		d.fail("%s: got %v, want %q", where, token, want.String())
	}
}

func (d *decoder) text(where string) string {
	token := d.token()
	s, ok := token.(string)
	if !ok {
		d.fail("%s: got %v, want a string", where, token)
	}
	return s
}

// object calls field for each key, which must consume the value. A repeated key is an error.
func (d *decoder) object(where string, field func(key string)) {
	d.delim('{', where)
	seen := map[string]struct{}{}
	for d.err == nil && d.json.More() {
		key := d.text(where)
		if _, twice := seen[key]; twice {
			d.fail("%s: key %q occurs twice", where, key)
		}
		seen[key] = struct{}{}
		if d.err == nil {
			field(key)
		}
	}
	d.delim('}', where)
}

// integers reads a list of at most limit numbers that are not negative.
func (d *decoder) integers(where string, limit int) []int64 {
	d.delim('[', where)
	list := []int64{}
	for d.err == nil && d.json.More() {
		if len(list) == limit {
			d.fail("%s has more than %d numbers", where, limit)
			break
		}
		token := d.token()
		number, ok := token.(json.Number)
		if !ok {
			d.fail("%s: got %v, want a number", where, token)
			break
		}
		n, err := strconv.ParseInt(number.String(), 10, 64)
		if err != nil || n < 0 {
			d.fail("%s: %s is not a whole number from 0 to 2^63", where, number)
		}
		list = append(list, n)
	}
	d.delim(']', where)
	return list
}

func (d *decoder) header() Header {
	var h Header
	d.object("header", func(key string) {
		if key != MetadataKey {
			h.Tensors = append(h.Tensors, d.tensor(key))
			return
		}
		h.Metadata = map[string]string{}
		d.object(MetadataKey, func(name string) {
			h.Metadata[name] = d.text(fmt.Sprintf("%s %q", MetadataKey, name))
		})
	})
	if d.err == nil {
		if token, err := d.json.Token(); !errors.Is(err, io.EOF) {
			d.fail("after the header: got %v, want padding by spaces", token)
		}
	}
	return h
}

func (d *decoder) tensor(name string) Tensor {
	t := Tensor{Name: name}
	fields := 0
	d.object(fmt.Sprintf("tensor %q", name), func(key string) {
		fields++
		where := fmt.Sprintf("tensor %q: %s", name, key)
		switch key {
		case "dtype":
			t.Type = Type(d.text(where))
		case "shape":
			t.Shape = d.integers(where, tensor.MaxDims)
		case "data_offsets":
			offsets := d.integers(where, 2)
			if len(offsets) != 2 {
				d.fail("%s has %d numbers, want 2", where, len(offsets))
				return
			}
			t.Start, t.End = offsets[0], offsets[1]
		default:
			d.fail("tensor %q: unknown key %q", name, key)
		}
	})
	if fields != 3 {
		d.fail("tensor %q: dtype, shape and data_offsets are all needed", name)
	}
	return t
}
