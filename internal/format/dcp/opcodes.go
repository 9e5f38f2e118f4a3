package dcp

import (
	"fmt"
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

// opaqueOps are the opcodes that make objects of kinds that are not decoded.
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
