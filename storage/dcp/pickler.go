package dcp

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/tensor"
)

// pickler writes opcodes. Strings that may come again are memoized.
type pickler struct {
	b     []byte
	proto byte
	memo  map[any]uint32 // string or global → place
	count uint32
}

func newPickler(proto byte) *pickler {
	return &pickler{b: []byte{opProto, proto}, proto: proto, memo: map[any]uint32{}}
}

func (p *pickler) op(ops ...byte) { p.b = append(p.b, ops...) }

// put memoizes the object that was just written.
func (p *pickler) put(key any) {
	p.memo[key] = p.count
	switch {
	case p.proto >= 4:
		p.op(opMemoize)
	case p.count < 256:
		p.op(opBinPut, byte(p.count))
	default:
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opLongBinPut), p.count)
	}
	p.count++
}

// get writes what was memoized, or reports that nothing was.
func (p *pickler) get(key any) bool {
	at, ok := p.memo[key]
	switch {
	case !ok:
	case at < 256:
		p.op(opBinGet, byte(at))
	default:
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opLongBinGet), at)
	}
	return ok
}

// text writes a string, once.
func (p *pickler) text(s string) {
	if p.get(s) {
		return
	}
	p.once(s)
	p.put(s)
}

// once writes a string that will not come again.
func (p *pickler) once(s string) {
	if p.proto >= 4 && len(s) < 256 {
		p.op(opShortBinUnicode, byte(len(s)))
	} else {
		p.b = binary.LittleEndian.AppendUint32(append(p.b, opBinUnicode), uint32(len(s)))
	}
	p.b = append(p.b, s...)
}

func (p *pickler) global(g global) {
	if p.get(g) {
		return
	}
	if p.proto >= 4 {
		p.text(g.module)
		p.text(g.name)
		p.op(opStackGlobal)
	} else {
		p.op(opGlobal)
		p.b = append(p.b, g.module+"\n"+g.name+"\n"...)
	}
	p.put(g)
}

func (p *pickler) bool(v bool) {
	if v {
		p.op(opNewTrue)
	} else {
		p.op(opNewFalse)
	}
}

func (p *pickler) int(n int64) {
	le := binary.LittleEndian
	switch {
	case n >= 0 && n < 1<<8:
		p.op(opBinInt1, byte(n))
	case n >= 0 && n < 1<<16:
		p.b = le.AppendUint16(append(p.b, opBinInt2), uint16(n))
	case n == int64(int32(n)):
		p.b = le.AppendUint32(append(p.b, opBinInt), uint32(n))
	default:
		p.b = le.AppendUint64(append(p.b, opLong1, 8), uint64(n))
	}
}

// tupleOf closes a tuple of n items; begin it with [pickler.tuple].
func (p *pickler) tupleOf(n int) {
	switch n {
	case 0:
		p.op(opEmptyTuple)
	case 1, 2, 3:
		p.op(opTuple1 + byte(n-1))
	default:
		p.op(opTuple)
	}
}

func (p *pickler) tuple(n int) {
	if n > 3 {
		p.op(opMark)
	}
}

func (p *pickler) ints(ns []int64) {
	p.tuple(len(ns))
	for _, n := range ns {
		p.int(n)
	}
	p.tupleOf(len(ns))
}

// tensorPickle is data.pkl of a contiguous tensor with the storage "0".
func tensorPickle(dtype tensor.DType, sizes []int64) []byte {
	p := newPickler(2)
	fn, class, numel := rebuildV3, untypedStorage, tensor.Shape(sizes).Volume()*int64(dtype.Size())
	for name, d := range storageTypes {
		if d == dtype {
			fn, class, numel = rebuildV2, global{"torch", name}, tensor.Shape(sizes).Volume()
		}
	}
	p.global(fn)
	p.op(opMark, opMark)
	p.text("storage")
	p.global(class)
	p.text("0")
	p.text("cpu")
	p.int(numel)
	p.op(opTuple, opBinPersID)
	p.int(0)
	p.ints(sizes)
	p.ints(strides(sizes))
	p.op(opNewFalse)
	p.global(orderedDict)
	p.op(opEmptyTuple, opReduce)
	if fn == rebuildV3 {
		p.global(global{"torch", dtype.String()})
	}
	p.op(opTuple, opReduce, opStop)
	return p.b
}

// strides of a row-major tensor. As in PyTorch a dimension of 0 counts as 1.
func strides(sizes []int64) []int64 {
	out := make([]int64, len(sizes))
	run := int64(1)
	for d, n := range slices.Backward(sizes) {
		out[d] = run
		run *= max(n, 1)
	}
	return out
}

// ValueArchive is the archive of a plain value, as torch.save writes it: nil,
// bool, int, int64, *big.Int, float64, string in UTF-8, []byte, []any,
// [Tuple], [Dict], or of these nested. Other kinds are an error that names
// them.
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

// bytes writes them as protocol 2 can, see [latin1].
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
