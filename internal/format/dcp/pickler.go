package dcp

import (
	"encoding/binary"
	"slices"

	"github.com/ckptstore/ckptstore/tensor"
)

// pickler writes opcodes. Strings that may come again are memoized.
type pickler struct {
	b     []byte
	proto byte
	memo  map[any]uint32 // string, global or memoKey → place
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

// get writes a reference to a memoized object, or reports that there is none.
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

// once writes a string that will not be repeated.
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

// tensorPickle returns data.pkl of a contiguous tensor with the storage "0".
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

// strides returns the strides of a row-major tensor. As in PyTorch, a dimension of 0 counts
// as 1.
func strides(sizes []int64) []int64 {
	out := make([]int64, len(sizes))
	run := int64(1)
	for d, n := range slices.Backward(sizes) {
		out[d] = run
		run *= max(n, 1)
	}
	return out
}
