package dcp

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"unicode/utf8"
)

// ValueArchive returns the archive of a plain value, as torch.save writes it: nil, bool, int,
// int64, *big.Int, float64, string in UTF-8, []byte, []any, [Tuple], [Dict], or these nested.
// For other kinds it returns an error that names them.
func ValueArchive(v any) ([]byte, error) {
	p := newPickler(2)
	if err := p.value(v, 0); err != nil {
		return nil, fmt.Errorf("write value: %w", err)
	}
	p.op(opStop)
	return wholeArchive(p.b), nil
}

func (p *pickler) value(v any, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("more than %d containers are nested, or one contains itself", maxDepth)
	}
	switch v := v.(type) {
	case nil:
		p.op(opNone)
	case bool:
		p.bool(v)
	case int:
		p.int(int64(v))
	case int64:
		p.int(v)
	case *big.Int:
		return p.big(v)
	case float64:
		p.b = binary.BigEndian.AppendUint64(append(p.b, opBinFloat), math.Float64bits(v))
	case string:
		return p.checked(v)
	case []byte:
		return p.bytes(v)
	case []any:
		p.op(opEmptyList, opMark)
		for _, item := range v {
			if err := p.value(item, depth+1); err != nil {
				return err
			}
		}
		p.op(opAppends)
	case Tuple:
		p.tuple(len(v))
		for _, item := range v {
			if err := p.value(item, depth+1); err != nil {
				return err
			}
		}
		p.tupleOf(len(v))
	case Dict:
		return p.dict(v, depth)
	default:
		return fmt.Errorf("%T is not a plain value", v)
	}
	return nil
}

func (p *pickler) dict(v Dict, depth int) error {
	p.op(opEmptyDict, opMark)
	seen := make(map[string]struct{}, len(v))
	ids := &valueDecoder{left: math.MaxInt}
	for _, e := range v {
		id, err := ids.identity(nil, e.Key)
		if err != nil {
			return err
		}
		if _, twice := seen[string(id)]; twice {
			return fmt.Errorf("a dict has the key %s twice", quote(fmt.Sprint(e.Key)))
		}
		seen[string(id)] = struct{}{}
		if err := p.value(e.Key, depth+1); err != nil {
			return err
		}
		if err := p.value(e.Value, depth+1); err != nil {
			return err
		}
	}
	p.op(opSetItems)
	return nil
}

func (p *pickler) checked(s string) error {
	if !utf8.ValidString(s) {
		return fmt.Errorf("string %s is not UTF-8", quote(s))
	}
	if len(s) > math.MaxInt32 {
		return fmt.Errorf("string of %d bytes", len(s))
	}
	p.text(s)
	return nil
}

// bytes writes b in the form of protocol 2, see [latin1].
func (p *pickler) bytes(b []byte) error {
	if len(b) == 0 {
		p.global(emptyBytes)
		p.op(opEmptyTuple, opReduce)
		return nil
	}
	if len(b) > math.MaxInt32/2 {
		return fmt.Errorf("%d bytes in one value", len(b))
	}
	text := make([]byte, 0, len(b)+len(b)/2)
	for _, c := range b {
		text = utf8.AppendRune(text, rune(c))
	}
	p.global(encodeBytes)
	p.once(string(text))
	p.text("latin1")
	p.op(opTuple2, opReduce)
	return nil
}

func (p *pickler) big(n *big.Int) error {
	if n.IsInt64() {
		p.int(n.Int64())
		return nil
	}
	size := n.BitLen()/8 + 1 // with room for the sign
	if size > maxInteger {
		return fmt.Errorf("integer of %s bits", strconv.Itoa(n.BitLen()))
	}
	rest := new(big.Int).Set(n)
	if n.Sign() < 0 {
		rest.Add(rest, new(big.Int).Lsh(big.NewInt(1), uint(8*size)))
	}
	raw := rest.FillBytes(make([]byte, size))
	slices.Reverse(raw)
	if size < 256 {
		p.op(opLong1, byte(size))
	} else {
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opLong4), uint32(size))
	}
	p.op(raw...)
	return nil
}
