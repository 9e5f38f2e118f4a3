package dcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// pickled is a script of opcodes: strings and bytes behind each other.
func pickled(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			b = append(b, p...)
		case int:
			b = append(b, byte(p))
		case uint64:
			b = binary.LittleEndian.AppendUint64(b, p)
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

func str(s string) []byte { return pickled(0x8c, len(s), s) }

// spent runs f and gives the bytes that it allocated.
func spent(t *testing.T, f func()) uint64 {
	t.Helper()
	var before, after runtime.MemStats
	begun := time.Now()
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
	return after.TotalAlloc - before.TotalAlloc
}

func wantFormatError(t *testing.T, err error, part string) {
	t.Helper()
	var format *FormatError
	var opaque *OpaqueError
	if !errors.As(err, &format) && !errors.As(err, &opaque) {
		t.Fatalf("got %v, want a FormatError or OpaqueError", err)
	}
	if !strings.Contains(err.Error(), part) || len(err.Error()) > 600 {
		t.Errorf("error %q lacks %q, or is long", err, part)
	}
}

func laughs(levels int) []byte {
	b := pickled(0x80, 4, "(]\x94")
	for i := range levels {
		b = append(b, pickled("](", strings.Repeat(string([]byte{opBinGet, byte(i)}), 10), "e\x94")...)
	}
	return append(b, "t."...)
}

func TestHostilePickles(t *testing.T) {
	huge := strings.Repeat("x", 1<<16)
	for name, c := range map[string]struct {
		pickle                  []byte
		metadata, tensor, value string // parts of the error of each reader
	}{
		"os.system by STACK_GLOBAL": {
			pickled(0x80, 4, str("os"), str("system"), "\x93", str("id"), "\x85R."),
			"offset 14: opcode STACK_GLOBAL: global os.system is not allowed", "opcode SHORT_BINUNICODE is not allowed", "os.system",
		},
		"posix system by GLOBAL": {
			pickled(0x80, 2, "cposix\nsystem\nX\x02\x00\x00\x00id\x85R."),
			"offset 2: opcode GLOBAL is not allowed", "global posix.system is not allowed", "posix.system",
		},
		"eval": {
			pickled(0x80, 2, "c__builtin__\neval\n)R."),
			"GLOBAL", "global __builtin__.eval is not allowed", "builtins.eval",
		},
		"global with a dotted path":   {pickled(0x80, 4, str("torch"), str("os.system"), "\x93."), "global torch.os.system is not allowed", "", "torch.os.system"},
		"global of a long name":       {pickled(0x80, 4, "X\x00\x00\x01\x00", huge, str("x"), "\x93."), "xxx… is not allowed", "", "xxx… of Python"},
		"INST":                        {pickled(0x80, 2, "(ios\nsystem\n."), "opcode INST is not allowed", "opcode INST is not allowed", "opcode INST is not allowed"},
		"extension registry":          {pickled(0x80, 2, 0x82, 1, "."), "opcode EXT1 is not allowed", "EXT1", "EXT1"},
		"out-of-band buffer":          {pickled(0x80, 5, 0x97, "."), "opcode NEXT_BUFFER is not allowed", "NEXT_BUFFER", "NEXT_BUFFER"},
		"byte that is no opcode":      {pickled(0x80, 4, 0xff), "opcode 0xff is not allowed", "opcode 0xff", "opcode 0xff"},
		"LONG4 of 2^31 bytes":         {pickled(0x80, 2, 0x8b, "\xff\xff\xff\x7f"), "opcode LONG4 is not allowed", "LONG4 is not allowed", "2147483647 bytes wanted"},
		"LONG4 of a negative length":  {pickled(0x80, 2, 0x8b, "\xff\xff\xff\xff"), "LONG4", "LONG4", "4294967295 bytes wanted"},
		"LONG1 cut off":               {pickled(0x80, 2, 0x8a, 200, 1), "LONG1: 200 bytes wanted, the pickle has 1 left", "200 bytes", "200 bytes"},
		"long integer":                {pickled(0x80, 2, 0x8b, "\x00\xf0\x00\x00", huge[:0xf000], "."), "LONG4", "LONG4", "an integer has 61440 bytes"},
		"BINUNICODE8 of 2^60 bytes":   {pickled(0x80, 4, 0x8d, uint64(1<<60)), "opcode BINUNICODE8 is not allowed", "BINUNICODE8", "1152921504606846976 bytes wanted"},
		"BINBYTES8 of 2^63 bytes":     {pickled(0x80, 4, 0x8e, uint64(1<<63)), "BINBYTES8 is not allowed", "BINBYTES8", "9223372036854775808 bytes wanted"},
		"BINUNICODE of 4 GiB":         {pickled(0x80, 2, "X\xff\xff\xff\xff"), "4294967295 bytes wanted", "4294967295 bytes wanted", "4294967295 bytes wanted"},
		"frame beyond the end":        {pickled(0x80, 4, 0x95, uint64(1<<62), "N."), "frame of 4611686018427387904 bytes", "FRAME", "frame of"},
		"memo entry 2^31":             {pickled(0x80, 2, "Nr\xff\xff\xff\x7f."), "LONG_BINPUT", "memo entry 2147483647 is out of sequence", "out of sequence"},
		"memo entry not set":          {pickled(0x80, 4, "h\x05."), "memo entry 5 is not set", "memo entry 5", "memo entry 5"},
		"memoize nothing":             {pickled(0x80, 4, "\x94."), "0 above the mark", "", "0 above the mark"},
		"stack underflow":             {pickled(0x80, 4, "N\x86."), "2 objects wanted, the stack has 1", "2 objects wanted", "2 objects wanted"},
		"APPEND without a list":       {pickled(0x80, 4, "NNa."), "opcode APPEND: cannot be done to None", "APPEND: cannot", "APPEND: cannot"},
		"SETITEMS to a list":          {pickled(0x80, 4, "](NNu."), "SETITEMS: cannot be done to a list", "SETITEMS", "SETITEMS"},
		"SETITEMS of three":           {pickled(0x80, 4, "}(NNNu."), "a key without its value", "a key without", "a key without"},
		"TUPLE without a mark":        {pickled(0x80, 4, "NNt."), "no mark", "no mark", "no mark"},
		"reach below the mark":        {pickled(0x80, 4, "N(\x85."), "0 above the mark", "0 above", "0 above"},
		"mark left":                   {pickled(0x80, 4, "(N."), "1 marks on the stack", "1 marks", "1 marks"},
		"two objects left":            {pickled(0x80, 4, "NN."), "2 objects", "2 objects", "2 objects"},
		"no object":                   {pickled(0x80, 4, "."), "0 objects", "0 objects", "0 objects"},
		"no STOP":                     {pickled(0x80, 4, "N"), "1 bytes wanted, the pickle has 0 left", "", ""},
		"bytes behind STOP":           {pickled(0x80, 4, "N.N"), "1 bytes follow the end", "1 bytes follow", "1 bytes follow"},
		"no PROTO":                    {pickled("N."), "want PROTO there", "want PROTO", "want PROTO"},
		"protocol 9":                  {pickled(0x80, 9, "N."), "protocol 9", "protocol 9", "protocol 9"},
		"REDUCE of a string":          {pickled(0x80, 4, str("f"), ")R."), "REDUCE: want a global and a tuple, got a str and a tuple", "", "want a global"},
		"state for a global":          {pickled(0x80, 4, str("torch"), str("Size"), "\x93}b."), "the global torch.Size can be given no state", "", "torch.Size"},
		"object that is no Metadata":  {pickled(0x80, 4, "}."), "want an object of Metadata, got a dict", "want a tensor, got a dict", ""},
		"lone surrogate":              {pickled(0x80, 4, 0x8c, 3, "\xed\xa0\x80."), "is not UTF-8", "", "lone surrogates"},
		"deep nesting":                {pickled(0x80, 2, strings.Repeat("]", 30000), strings.Repeat("a", 29999), "."), "got a list", "got a list", "more than 200 containers"},
		"list that contains itself":   {pickled(0x80, 4, "]\x94h\x00a."), "got a list", "", "or one contains itself"},
		"dict that contains itself":   {pickled(0x80, 4, "}\x94Nh\x00s."), "got a dict", "", "or one contains itself"},
		"billion laughs":              {laughs(12), "got a tuple", "", "too many places"},
		"a list as a key":             {pickled(0x80, 4, "}]Ns."), "", "", "as a key"},
		"a key twice":                 {pickled(0x80, 4, "}K\x01NsM\x01\x00Ns."), "", "", `has the key "1" twice`},
		"True and 1 are one key":      {pickled(0x80, 4, "}K\x01Ns\x88Ns."), "", "", "twice"},
		"encode with another codec":   {pickled(0x80, 2, "c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00utf8\x86R."), "", "", "_codecs.encode"},
		"encode of a wide character":  {pickled(0x80, 2, "c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1\x86R."), "", "", "bytes have the character"},
		"a long key in many places":   {pickled(0x80, 4, "X\x00\x00\x01\x00", huge, "\x94\x85](", strings.Repeat("}h\x00Ns", 5000), "e\x86."), "", "", "too many places"},
		"a long tuple in many places": {pickled(0x80, 4, "(", strings.Repeat("N", 10000), "t\x94](", strings.Repeat("h\x00", 10000), "e\x86."), "", "", "too many places"},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			for reader, part := range map[string]string{"metadata": c.metadata, "tensor": c.tensor, "value": c.value} {
				a := wholeArchive(c.pickle)
				size := uint64(len(c.pickle))
				used := spent(t, func() {
					switch reader {
					case "metadata":
						_, err = ReadMetadata(c.pickle)
					case "tensor":
						_, err = ReadArchive(bytes.NewReader(a), Location{File: "f", Length: int64(len(a))})
					case "value":
						_, err = DecodeValue(a)
					}
				})
				if reader != "value" || part != "" {
					wantFormatError(t, err, part)
				}
				if used > 400*size+64<<10 {
					t.Errorf("%s: a pickle of %d bytes took %d", reader, size, used)
				}
			}
		})
	}
}

// Many of each opcode that makes something need memory in proportion.
func TestMemoryIsInProportion(t *testing.T) {
	const n = 1 << 17
	for _, op := range []string{"]", "}", ")", "(", "N", "K\x07", "M\xff\xff", ")\x94", "}\x94", "]N\x86\x94"} {
		b := pickled(0x80, 4, strings.Repeat(op, n/len(op)), ".")
		used := spent(t, func() {
			if _, err := ReadMetadata(b); err == nil {
				t.Error("no error")
			}
		})
		if used > 300*n {
			t.Errorf("opcodes %q: %d bytes a byte", op, used/n)
		}
	}
}

// A reader that cannot read a byte reports its place: in the file, not in
// the archive.
func TestErrorsNameThePlace(t *testing.T) {
	b, err := os.ReadFile("testdata/torch-2.14/single_nested/__0_0.distcp")
	if err != nil {
		t.Fatal(err)
	}
	where := Location{File: "__0_0.distcp", Offset: 3783, Length: 2089}
	b[3783+64+100] ^= 1
	_, err = ReadArchive(bytes.NewReader(b), where)
	var format *FormatError
	if !errors.As(err, &format) || format.File != where.File || format.Offset != 3783+64 {
		t.Errorf("got %v", err)
	}
	if want := fmt.Sprintf("read archive: __0_0.distcp: offset %d: record data.pkl has the CRC-32", 3783+64); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}
