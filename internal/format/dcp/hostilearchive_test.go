package dcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
)

// forge is a record that a test changes before it is written.
type forge struct {
	name string
	data []byte
}

func forged(records ...forge) []byte {
	var w zipWriter
	for _, r := range records {
		w.record(r.name, r.data)
	}
	return w.finish()
}

func TestHostileArchives(t *testing.T) {
	le := binary.LittleEndian
	f, err := TensorArchive(tensor.Float32, []int64{2, 3})
	if err != nil {
		t.Fatal(err)
	}
	good := append(append(bytes.Clone(f.Prefix), make([]byte, 24)...), f.Suffix(0)...)
	end := len(good) - endSize
	locator, end64 := end-locatorSize, end-locatorSize-end64Size
	central := int(le.Uint64(good[end64+48:]))
	pickle := tensorPickle(tensor.Float32, []int64{2, 3})
	rest := []forge{{"byteorder", []byte("little")}, {"data/0", make([]byte, 24)}, {"version", []byte("3\n")}}
	made := func(r ...forge) func([]byte) []byte {
		return func([]byte) []byte { return forged(append([]forge{{"data.pkl", pickle}}, r...)...) }
	}
	put16 := func(pos int, n uint16) func([]byte) []byte {
		return func(b []byte) []byte { le.PutUint16(b[pos:], n); return b }
	}
	put32 := func(pos int, n uint32) func([]byte) []byte {
		return func(b []byte) []byte { le.PutUint32(b[pos:], n); return b }
	}
	put64 := func(pos int, n uint64) func([]byte) []byte {
		return func(b []byte) []byte { le.PutUint64(b[pos:], n); return b }
	}
	for name, c := range map[string]struct {
		change func([]byte) []byte
		want   string
	}{
		"compressed record":      {put16(central+10, 8), "compression method 8: only stored records are read"},
		"encrypted record":       {put16(central+8, 0x809), "flags 0x0809"},
		"central directory 2^40": {put64(end64+40, 1<<40), "do not agree"},
		"directory at 2^62":      {put64(end64+48, 1<<62), "do not agree"},
		"both ends lie":          {func(b []byte) []byte { le.PutUint32(b[end+12:], 1<<31); return put64(end64+40, 1<<31)(b) }, "does not end where its end begins"},
		"marked, and 2^63":       {func(b []byte) []byte { le.PutUint32(b[end+16:], 1<<32-1); return put64(end64+48, 1<<63)(b) }, "does not end where"},
		"marked, and too many": {func(b []byte) []byte {
			le.PutUint16(b[end+8:], 0xffff)
			le.PutUint16(b[end+10:], 0xffff)
			le.PutUint64(b[end64+24:], 1<<40)
			return put64(end64+32, 1<<40)(b)
		}, "at most 4096"},
		"one record more": {func(b []byte) []byte {
			le.PutUint16(b[end+8:], 7)
			le.PutUint16(b[end+10:], 7)
			le.PutUint64(b[end64+24:], 7)
			return put64(end64+32, 7)(b)
		}, "directory of 6 records, its end has 7"},
		"two disks":         {put16(end+4, 1), "in several parts"},
		"locator elsewhere": {put64(locator+8, 0), "do not fit"},
		"comment":           {put16(end+20, 5), "truncated, or something follows it"},
		"junk behind":       {func(b []byte) []byte { return append(b, "junk"...) }, "truncated, or something follows it"},
		"junk in front":     {func(b []byte) []byte { return append([]byte("junkjunk"), b...) }, "do not fit"},
		"junk in front, accounted for": {func([]byte) []byte {
			w := zipWriter{b: []byte("junkjunk")}
			for _, r := range append([]forge{{"data.pkl", pickle}}, rest...) {
				w.record(r.name, r.data)
			}
			return w.finish()
		}, "a gap or an overlap"},
		"truncated":                {func(b []byte) []byte { return b[:len(b)-1] }, "truncated"},
		"empty":                    {func(b []byte) []byte { return nil }, "is not within the archive's 0 bytes"},
		"record outside":           {put32(central+42, 1<<30), "are not within the archive's"},
		"size beyond the end":      {func(b []byte) []byte { le.PutUint32(b[central+20:], 1<<30); return put32(central+24, 1<<30)(b) }, "are not within the archive's"},
		"size into the next":       {func(b []byte) []byte { le.PutUint32(b[central+20:], 400); return put32(central+24, 400)(b) }, "overlaps what follows"},
		"sizes differ":             {put32(central+24, 3), "when unpacked"},
		"no local header":          {put32(central+42, 8), "no local header of record"},
		"local name differs":       {func(b []byte) []byte { b[localSize+8] = 'X'; return b }, "local header does not agree"},
		"local size differs":       {put32(22, 9), "local header does not agree"},
		"local method":             {put16(8, 8), "local header does not agree"},
		"sum in directory differs": {put32(central+16, 1), "no data descriptor that agrees"},
		"pickle changed":           {func(b []byte) []byte { b[64+20] ^= 1; return b }, "record data.pkl has the CRC-32"},
		"record twice":             {made(append(rest, rest[0])...), "occurs twice"},
		"no pickle":                {func([]byte) []byte { return forged(rest...) }, "no record data.pkl"},
		"no storage":               {made(rest[0], rest[2]), "data.pkl wants the record data/0"},
		"two storages":             {made(append(rest, forge{"data/1", nil})...), "record \"data/1\" is not one of a tensor's archive"},
		"code":                     {made(append(rest, forge{"code/x.py", nil})...), "code/x.py"},
		"no version":               {made(rest[:2]...), "no record version"},
		"version 11":               {made(rest[0], rest[1], forge{"version", []byte("11\n")}), "version \"11\\n\" of the archive"},
		"byte order":               {made(forge{"byteorder", []byte("middle")}, rest[1], rest[2]), "byte order \"middle\""},
		"storage too short":        {made(rest[0], forge{"data/0", make([]byte, 20)}, rest[2]), "storage of 20 bytes, data.pkl has 6 elements of 4 bytes"},
		"long version":             {made(rest[0], rest[1], forge{"version", make([]byte, 100)}), "at most 32 are read"},
	} {
		t.Run(name, func(t *testing.T) {
			b := c.change(bytes.Clone(good))
			var err error
			used := spent(t, func() {
				_, err = ReadArchive(bytes.NewReader(b), Location{File: "__0_0.distcp", Length: int64(len(b))})
			})
			wantFormatError(t, err, c.want)
			if used > 256<<10 {
				t.Errorf("%d bytes of memory", used)
			}
		})
	}
	if _, err := ReadArchive(bytes.NewReader(good), Location{File: "f", Length: int64(len(good))}); err != nil {
		t.Errorf("unchanged: %v", err)
	}
	if _, err := ReadArchive(bytes.NewReader(good), Location{File: "f", Length: int64(len(good)) + 50}); err == nil {
		t.Error("the file ends before the archive, and no error")
	}
	broken := errors.New("broken disk")
	var format *FormatError
	if _, err := ReadArchive(failing{broken}, Location{File: "f", Length: 500}); !errors.Is(err, broken) || errors.As(err, &format) {
		t.Errorf("an error of the file is reported as %v", err)
	}
}

type failing struct{ err error }

func (f failing) ReadAt([]byte, int64) (int, error) { return 0, f.err }

var _ io.ReaderAt = failing{}

func TestLocationsStayInTheDirectory(t *testing.T) {
	for _, bad := range []string{
		"", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a/", `..\x`, `C:\x`, "C:x", "x\x00y", strings.Repeat("x", 5000),
	} {
		if err := (Location{File: bad}).Validate(); err == nil {
			t.Errorf("file %.20q is accepted", bad)
		}
	}
	for _, good := range []string{"__0_0.distcp", "sub/__0_0.distcp", "..x", "a b"} {
		if err := (Location{File: good}).Validate(); err != nil {
			t.Error(err)
		}
	}
	for _, l := range []Location{{"f", -1, 1}, {"f", 1, -1}, {"f", 1 << 62, 1 << 62}} {
		if err := l.Validate(); err == nil {
			t.Errorf("%+v is accepted", l)
		}
	}
}

// A forged tensor pickle's description of its storage is compared with the bytes.
func TestTensorsStayInTheirStorage(t *testing.T) {
	archive := func(class, first, sizes, strides, tail string) []byte {
		p := pickled(0x80, 2, "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagec", class, "\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ",
			first, sizes, strides, "\x89ccollections\nOrderedDict\n)R", tail, "tR.")
		return forged(forge{"data.pkl", p}, forge{"data/0", make([]byte, 24)}, forge{"version", []byte("3\n")})
	}
	const float = "torch\nFloatStorage"
	const big = "\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40" // 2^62
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"good":                {archive(float, "K\x00", "K\x02K\x03\x86", "K\x03K\x01\x86", ""), ""},
		"empty metadata":      {archive(float, "K\x00", "K\x02K\x03\x86", "K\x03K\x01\x86", "}"), ""},
		"expanded":            {archive(float, "K\x05", "M\xff\xffK\x03\x86", "K\x00K\x00\x86", ""), ""},
		"empty anywhere":      {archive(float, "K\x06", "K\x00K\x03\x86", big+big+"\x86", ""), ""},
		"one element too far": {archive(float, "K\x01", "K\x02K\x03\x86", "K\x03K\x01\x86", ""), "are not within the storage of 6 elements"},
		"stride overflow":     {archive(float, "K\x00", "K\x03K\x03\x86", big+big+"\x86", ""), "are not within the storage"},
		"size overflow":       {archive(float, "K\x00", big+"K\x03\x86", "K\x00K\x00\x86", ""), "2^63"},
		"negative offset":     {archive(float, "J\xff\xff\xff\xff", "K\x02\x85", "K\x01\x85", ""), "storage offset -1"},
		"offset behind":       {archive(float, "K\x07", "K\x00\x85", "K\x01\x85", ""), "storage offset 7"},
		"negative stride":     {archive(float, "K\x00", "K\x02\x85", "J\xff\xff\xff\xff\x85", ""), "strides: dimension 0 is -1"},
		"negative size":       {archive(float, "K\x00", "J\xff\xff\xff\xff\x85", "K\x01\x85", ""), "sizes: dimension 0 is -1"},
		"fewer strides":       {archive(float, "K\x00", "K\x02K\x03\x86", "K\x03\x85", ""), "of different length"},
		"conjugate":           {archive(float, "K\x00", "K\x06\x85", "K\x01\x85", "}X\x04\x00\x00\x00conj\x88s"), ""},
		"unknown bit":         {archive(float, "K\x00", "K\x06\x85", "K\x01\x85", "}X\x04\x00\x00\x00herm\x88s"), `the bit "herm" set`},
		"bit not set":         {archive(float, "K\x00", "K\x06\x85", "K\x01\x85", "}X\x03\x00\x00\x00neg\x89s"), ""},
		"argument too many":   {archive(float, "K\x00", "K\x06\x85", "K\x01\x85", "}}"), "with 8 arguments"},
		"no such storage":     {archive("torch\nQInt8Storage", "K\x00", "K\x06\x85", "K\x01\x85", ""), "global torch.QInt8Storage is not allowed"},
		"dtype as a storage":  {archive("torch\nfloat32", "K\x00", "K\x06\x85", "K\x01\x85", ""), "of a storage torch.float32"},
		"wider elements":      {archive("torch\nDoubleStorage", "K\x00", "K\x03\x85", "K\x01\x85", ""), "storage of 24 bytes, data.pkl has 6 elements of 8 bytes"},
		"many dimensions":     {archive(float, "K\x00", "("+strings.Repeat("K\x01", 65)+"t", "("+strings.Repeat("K\x01", 65)+"t", ""), "65 dimensions"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := ReadArchive(bytes.NewReader(c.b), Location{File: "f", Length: int64(len(c.b))})
			if c.want != "" {
				wantFormatError(t, err, c.want)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if p.Altered != (name == "conjugate") {
				t.Errorf("altered is %v", p.Altered)
			}
			p.Gather(make([]byte, p.Volume()*4), make([]byte, 24))
			if lo, n := p.Range(); lo < p.Offset || lo+n > p.Offset+p.Length {
				t.Errorf("range of %d bytes at %d is not in %+v", n, lo, p)
			}
		})
	}
}
