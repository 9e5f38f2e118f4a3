package dcp

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
)

// Tuple is a Python tuple.
type Tuple []any

// Dict is a Python dict, in its order. Keys differ as Python compares them.
type Dict []Entry

// Entry is a key of a [Dict] and its value.
type Entry struct{ Key, Value any }

var (
	encodeBytes = global{"_codecs", "encode"} // bytes, up to protocol 2
	emptyBytes  = global{"__builtin__", "bytes"}
	emptyBytes3 = global{"builtins", "bytes"}
)

var valueDialect = dialect{ops: valueOps, opaque: true, globals: func(g global) bool {
	return g == encodeBytes || g == emptyBytes || g == emptyBytes3
}}

const (
	maxDepth = 200 // of nested containers
	// Objects that occur in several places are counted, and returned, in each of them. This
	// is the number of places decoded for each byte of the pickle; the bytes of a key and of
	// encoded bytes count as places.
	placesPerByte = 16
	somePlaces    = 1024 // for those of a few bytes
)

// DecodeValue decodes an archive of plain Python objects: nil for None, bool, int64 or
// *big.Int, float64, string, []byte, []any for a list, [Tuple] and [Dict]. Other objects give
// an [*OpaqueError], a damaged archive a [*FormatError] with offsets from its start.
func DecodeValue(archive []byte) (any, error) {
	v, err := decodeValue(archive)
	if err != nil {
		return nil, fmt.Errorf("decode value: %w", err)
	}
	return v, nil
}

func decodeValue(b []byte) (any, error) {
	a, err := openArchive(bytes.NewReader(b), Location{File: "archive", Length: int64(len(b))})
	if err != nil {
		return nil, err
	}
	if _, err := a.header(); err != nil {
		return nil, err
	}
	rec, ok := a.find("data.pkl")
	if !ok {
		return nil, a.problem(0, "no record data.pkl")
	}
	data, err := a.content(rec, a.where.Length)
	if err != nil {
		return nil, err
	}
	root, err := unpickle(valueDialect, data, a.where.File, rec.data)
	if err != nil {
		return nil, err
	}
	d := &valueDecoder{left: somePlaces + placesPerByte*len(data)}
	v, err := d.value(root, 0)
	return v, at(a.where.File, rec.data, err)
}

// valueDecoder converts the machine's objects to plain values.
type valueDecoder struct{ left int }

func (d *valueDecoder) spend(n int) error {
	if d.left -= n; d.left < 0 {
		return &OpaqueError{Reason: "its objects occur in too many places"}
	}
	return nil
}

func (d *valueDecoder) value(v any, depth int) (any, error) {
	if err := d.spend(1); err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, &OpaqueError{Reason: fmt.Sprintf("more than %d containers are nested, or one contains itself", maxDepth)}
	}
	switch v := v.(type) {
	case tuple:
		items, err := d.values(v, depth)
		return Tuple(items), err
	case *list:
		return d.valuesAny(v.items, depth)
	case *dict:
		return d.dict(v, depth)
	case *call:
		return d.latin1(v)
	case global:
		return nil, &OpaqueError{Global: v.String()}
	case persistent:
		return nil, &OpaqueError{Global: "torch.storage"}
	default:
		return v, nil
	}
}

func (d *valueDecoder) valuesAny(items []any, depth int) (any, error) {
	return d.values(items, depth)
}

func (d *valueDecoder) values(items []any, depth int) ([]any, error) {
	if err := d.spend(len(items)); err != nil {
		return nil, err
	}
	out := make([]any, len(items))
	for i, item := range items {
		v, err := d.value(item, depth+1)
		if err != nil {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}

func (d *valueDecoder) dict(v *dict, depth int) (any, error) {
	if err := d.spend(len(v.pairs)); err != nil {
		return nil, err
	}
	out := make(Dict, 0, len(v.pairs)/2)
	seen := make(map[string]struct{}, len(v.pairs)/2)
	for i := 0; i < len(v.pairs); i += 2 {
		key, err := d.value(v.pairs[i], depth+1)
		if err != nil {
			return nil, err
		}
		item, err := d.value(v.pairs[i+1], depth+1)
		if err != nil {
			return nil, err
		}
		text, err := d.identity(nil, key)
		if err != nil {
			return nil, err
		}
		if _, twice := seen[string(text)]; twice {
			return nil, fmt.Errorf("a dict has the key %s twice", quote(fmt.Sprint(key)))
		}
		seen[string(text)] = struct{}{}
		out = append(out, Entry{key, item})
	}
	return out, nil
}

// identity appends a text that is equal for keys that are equal in Python, where 1, 1.0 and
// True are one key. It costs its length: a long key may occur in many places.
func (d *valueDecoder) identity(b []byte, key any) ([]byte, error) {
	start := len(b)
	switch key := key.(type) {
	case nil:
		b = append(b, 'n')
	case bool:
		b = append(b, "i0"...)
		if key {
			b[len(b)-1] = '1'
		}
	case int64:
		b = strconv.AppendInt(append(b, 'i'), key, 10)
	case *big.Int:
		b = key.Append(append(b, 'i'), 10)
	case float64:
		if exact := new(big.Float); !math.IsNaN(key) && !math.IsInf(key, 0) && exact.SetFloat64(key).IsInt() {
			n, _ := exact.Int(nil)
			b = n.Append(append(b, 'i'), 10)
		} else {
			b = strconv.AppendFloat(append(b, 'f'), key, 'g', -1, 64)
		}
	case string:
		b = append(strconv.AppendInt(append(b, 's'), int64(len(key)), 10), ':')
		b = append(b, key...)
	case []byte:
		b = append(strconv.AppendInt(append(b, 'b'), int64(len(key)), 10), ':')
		b = append(b, key...)
	case Tuple:
		b = append(b, '(')
		for _, k := range key {
			var err error
			if b, err = d.identity(b, k); err != nil {
				return nil, err
			}
		}
		return append(b, ')'), d.spend(2)
	default:
		return nil, errors.New("a dict has a list or a dict as a key")
	}
	return append(b, ','), d.spend(len(b) - start)
}

// latin1 returns bytes in the form of protocol 2: a string whose characters are the bytes, or
// nothing for empty bytes. They are made in each place.
func (d *valueDecoder) latin1(c *call) (any, error) {
	if c.fn != encodeBytes {
		if len(c.args) == 0 {
			return []byte{}, nil
		}
		return nil, &OpaqueError{Global: c.fn.String()}
	}
	if len(c.args) != 2 || c.args[1] != "latin1" {
		return nil, &OpaqueError{Global: c.fn.String()}
	}
	s, ok := c.args[0].(string)
	if !ok {
		return nil, fmt.Errorf("bytes are given as %s", kind(c.args[0]))
	}
	if err := d.spend(len(s)); err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(s))
	for _, r := range s {
		if r > 255 {
			return nil, fmt.Errorf("bytes have the character %q", r)
		}
		out = append(out, byte(r))
	}
	return out, nil
}
