package dcp

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// The opcodes of Python's pickle that PyTorch's files have.
const (
	opProto           = 0x80
	opFrame           = 0x95
	opStop            = '.'
	opMark            = '('
	opNone            = 'N'
	opNewTrue         = 0x88
	opNewFalse        = 0x89
	opBinInt          = 'J'
	opBinInt1         = 'K'
	opBinInt2         = 'M'
	opLong1           = 0x8a
	opLong4           = 0x8b
	opBinFloat        = 'G'
	opShortBinUnicode = 0x8c
	opBinUnicode      = 'X'
	opBinUnicode8     = 0x8d
	opShortBinBytes   = 'C'
	opBinBytes        = 'B'
	opBinBytes8       = 0x8e
	opEmptyTuple      = ')'
	opTuple           = 't'
	opTuple1          = 0x85
	opTuple2          = 0x86
	opTuple3          = 0x87
	opEmptyList       = ']'
	opAppend          = 'a'
	opAppends         = 'e'
	opEmptyDict       = '}'
	opSetItem         = 's'
	opSetItems        = 'u'
	opMemoize         = 0x94
	opBinPut          = 'q'
	opLongBinPut      = 'r'
	opBinGet          = 'h'
	opLongBinGet      = 'j'
	opGlobal          = 'c'
	opStackGlobal     = 0x93
	opReduce          = 'R'
	opNewObj          = 0x81
	opBuild           = 'b'
	opBinPersID       = 'Q'
)

// The opcodes of .metadata (protocols 4 and 5), of a tensor's data.pkl
// (protocol 2), and of plain values (any protocol from 2).
const (
	metadataOps = "\x80\x95.(N\x88\x89JKM\x8a\x8cX)t\x85\x86\x87]ae}su\x94hj\x93R\x81b"
	tensorOps   = "\x80.(N\x88\x89JKM\x8aX)t\x85\x86\x87]ae}suqrhjcRQ"
	valueOps    = "\x80\x95.(N\x88\x89JKM\x8a\x8bG\x8cX\x8dCB\x8e)t\x85\x86\x87]ae}su\x94qrhjc\x93R"
)

// argSize is the width in bytes of an opcode's number: a length, an integer
// or a place in the memo.
var argSize = [256]int{
	opBinInt: 4, opBinInt1: 1, opBinInt2: 2, opLong1: 1, opLong4: 4,
	opShortBinUnicode: 1, opBinUnicode: 4, opBinUnicode8: 8,
	opShortBinBytes: 1, opBinBytes: 4, opBinBytes8: 8,
	opBinPut: 1, opLongBinPut: 4, opBinGet: 1, opLongBinGet: 4,
}

// opaqueOps are those that make objects of kinds that are not decoded.
var opaqueOps = map[byte]string{
	opBinPersID: "torch.storage", opNewObj: "an object", opBuild: "an object",
	0x8f: "builtins.set", 0x90: "builtins.set", 0x91: "builtins.frozenset",
	0x92: "an object", 0x96: "builtins.bytearray",
}

// opNames is for messages, so it also has opcodes that are never allowed.
var opNames = map[byte]string{
	opProto: "PROTO", opFrame: "FRAME", opStop: "STOP", opMark: "MARK", opNone: "NONE",
	opNewTrue: "NEWTRUE", opNewFalse: "NEWFALSE", opBinInt: "BININT", opBinInt1: "BININT1",
	opBinInt2: "BININT2", opLong1: "LONG1", opLong4: "LONG4", opBinFloat: "BINFLOAT",
	opShortBinUnicode: "SHORT_BINUNICODE", opBinUnicode: "BINUNICODE", opBinUnicode8: "BINUNICODE8",
	opShortBinBytes: "SHORT_BINBYTES", opBinBytes: "BINBYTES", opBinBytes8: "BINBYTES8",
	opEmptyTuple: "EMPTY_TUPLE", opTuple: "TUPLE", opTuple1: "TUPLE1", opTuple2: "TUPLE2",
	opTuple3: "TUPLE3", opEmptyList: "EMPTY_LIST", opAppend: "APPEND", opAppends: "APPENDS",
	opEmptyDict: "EMPTY_DICT", opSetItem: "SETITEM", opSetItems: "SETITEMS", opMemoize: "MEMOIZE",
	opBinPut: "BINPUT", opLongBinPut: "LONG_BINPUT", opBinGet: "BINGET", opLongBinGet: "LONG_BINGET",
	opGlobal: "GLOBAL", opStackGlobal: "STACK_GLOBAL", opReduce: "REDUCE", opNewObj: "NEWOBJ",
	opBuild: "BUILD", opBinPersID: "BINPERSID",
	'0': "POP", '1': "POP_MARK", '2': "DUP", 'F': "FLOAT", 'I': "INT", 'L': "LONG", 'P': "PERSID",
	'S': "STRING", 'T': "BINSTRING", 'U': "SHORT_BINSTRING", 'V': "UNICODE", 'd': "DICT", 'g': "GET",
	'i': "INST", 'l': "LIST", 'o': "OBJ", 'p': "PUT", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
	0x8f: "EMPTY_SET", 0x90: "ADDITEMS", 0x91: "FROZENSET", 0x92: "NEWOBJ_EX", 0x96: "BYTEARRAY8",
	0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}

func opName(op byte) string {
	if name, ok := opNames[op]; ok {
		return name
	}
	return fmt.Sprintf("0x%02x", op)
}

// step runs one opcode that the dialect allows.
func (m *machine) step(op byte) error {
	switch op {
	case opProto:
		n, err := m.number(1)
		if err == nil && (n < 2 || n > 5) {
			err = fmt.Errorf("protocol %d, those from 2 to 5 are read", n)
		}
		return err
	case opFrame:
		n, err := m.number(8)
		if left := uint64(len(m.data) - m.pos); err == nil && n > left {
			err = fmt.Errorf("frame of %d bytes, the pickle has %d left", n, left)
		}
		return err
	case opMark:
		m.marks = append(m.marks, len(m.stack))
	case opNone:
		m.push(nil)
	case opNewTrue, opNewFalse:
		m.push(op == opNewTrue)
	case opBinInt, opBinInt1, opBinInt2, opLong1, opLong4:
		return m.stepInteger(op)
	case opBinFloat:
		b, err := m.take(8)
		if err == nil {
			m.float(b)
		}
		return err
	case opShortBinUnicode, opBinUnicode, opBinUnicode8:
		b, err := m.counted(argSize[op])
		if err != nil {
			return err
		}
		return m.text(b)
	case opShortBinBytes, opBinBytes, opBinBytes8:
		b, err := m.counted(argSize[op])
		if err == nil {
			m.push(bytes.Clone(b))
		}
		return err
	case opMemoize:
		return m.put(uint64(len(m.memo)))
	case opBinPut, opLongBinPut, opBinGet, opLongBinGet:
		return m.stepMemo(op)
	case opGlobal, opStackGlobal:
		return m.stepGlobal(op)
	case opReduce, opNewObj, opBuild, opBinPersID:
		return m.stepObject(op)
	default:
		return m.stepContainer(op)
	}
	return nil
}

func (m *machine) stepInteger(op byte) error {
	switch op {
	case opLong1, opLong4:
		b, err := m.counted(argSize[op])
		if err != nil {
			return err
		}
		return m.integer(b)
	case opBinInt:
		n, err := m.number(argSize[op])
		m.push(int64(int32(n)))
		return err
	default:
		n, err := m.number(argSize[op])
		m.push(int64(n))
		return err
	}
}

func (m *machine) stepMemo(op byte) error {
	n, err := m.number(argSize[op])
	if err != nil {
		return err
	}
	if op == opBinPut || op == opLongBinPut {
		return m.put(n)
	}
	return m.get(n)
}

func (m *machine) stepGlobal(op byte) error {
	if op == opGlobal {
		var names [2]string
		for i := range names {
			n := bytes.IndexByte(m.data[m.pos:], '\n')
			if n < 0 {
				return errors.New("a name without its end")
			}
			names[i] = string(m.data[m.pos : m.pos+n])
			m.pos += n + 1
		}
		return m.find(global{names[0], names[1]})
	}
	v, err := m.pop(2)
	if err != nil {
		return err
	}
	module, ok := v[0].(string)
	name, ok2 := v[1].(string)
	if !ok || !ok2 {
		return errors.New("module and name are not strings")
	}
	return m.find(global{module, name})
}

func (m *machine) stepObject(op byte) error {
	if op == opBinPersID {
		v, err := m.pop(1)
		if err == nil {
			m.push(persistent{v[0]})
		}
		return err
	}
	v, err := m.pop(2)
	if err != nil {
		return err
	}
	if op == opBuild {
		object, ok := v[0].(*call)
		if !ok || object.built {
			return fmt.Errorf("%s can be given no state", kind(v[0]))
		}
		object.state, object.built = v[1], true
		m.push(object)
		return nil
	}
	fn, ok := v[0].(global)
	args, ok2 := v[1].(tuple)
	if !ok || !ok2 {
		return fmt.Errorf("want a global and a tuple, got %s and %s", kind(v[0]), kind(v[1]))
	}
	m.push(&call{fn: fn, args: args, new: op == opNewObj, pos: m.op})
	return nil
}

func (m *machine) stepContainer(op byte) error {
	switch op {
	case opEmptyTuple:
		m.push(tuple{})
	case opEmptyList:
		m.push(&list{})
	case opEmptyDict:
		m.push(&dict{})
	case opTuple, opAppends, opSetItems:
		items, err := m.popMark()
		if err != nil {
			return err
		}
		if op == opTuple {
			m.push(tuple(slices.Clone(items)))
			return nil
		}
		return m.extend(op, items)
	case opTuple1, opTuple2, opTuple3:
		items, err := m.pop(int(op-opTuple1) + 1)
		if err == nil {
			m.push(tuple(slices.Clone(items)))
		}
		return err
	case opAppend, opSetItem:
		n := 1
		if op == opSetItem {
			n = 2
		}
		items, err := m.pop(n)
		if err != nil {
			return err
		}
		return m.extend(op, items)
	default:
		return errors.New("is not known")
	}
	return nil
}

// extend adds items to the list or dict on top of the stack.
func (m *machine) extend(op byte, items []any) error {
	v, err := m.top()
	if err != nil {
		return err
	}
	switch c := v.(type) {
	case *list:
		if op == opAppend || op == opAppends {
			c.items = append(c.items, items...)
			return nil
		}
	case *dict:
		if op == opSetItem || op == opSetItems {
			if len(items)%2 != 0 {
				return errors.New("a key without its value")
			}
			c.pairs = append(c.pairs, items...)
			return nil
		}
	}
	return fmt.Errorf("cannot be done to %s", kind(v))
}

// kind names the kind of v in Python's words.
func kind(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "a bool"
	case int64:
		return "an int"
	case float64:
		return "a float"
	case string:
		return "a str"
	case []byte:
		return "bytes"
	case tuple:
		return "a tuple"
	case *list:
		return "a list"
	case *dict:
		return "a dict"
	case global:
		return "the global " + clip(v.String())
	case *call:
		return "an object of " + clip(v.fn.String())
	case persistent:
		return "a storage"
	default:
		return "a large int"
	}
}
