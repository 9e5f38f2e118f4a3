package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// file is a file with the given JSON and size bytes of data.
func file(text string, size int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(b, text...), make([]byte, size)...)
}

func parseBytes(data []byte) (Header, error) { return Parse(bytes.NewReader(data), int64(len(data))) }

func TestTypes(t *testing.T) {
	for d := tensor.Bool; d.Valid(); d++ {
		name, ok := TypeOf(d)
		switch d {
		case tensor.Complex32, tensor.Complex64, tensor.Complex128, tensor.Float8E8M0, tensor.Float8E4M3FNUZ, tensor.Float8E5M2FNUZ:
			if ok {
				t.Errorf("%s has the name %s", d, name)
			}
		default:
			if back, known := name.DType(); !ok || !known || back != d {
				t.Errorf("%s is %s, which is %s", d, name, back)
			}
		}
	}
	if _, ok := Type("F4").DType(); ok {
		t.Error("F4 is known")
	}
}

// TestEncode checks the bytes against the specification, not against Parse.
func TestEncode(t *testing.T) {
	tensors := []Tensor{
		{Name: "w", Type: "F32", Shape: tensor.Shape{2, 3}, Start: 0, End: 24},
		{Name: "s\"\n", Type: "BF16", Shape: nil, Start: 24, End: 26},
		{Name: "e", Type: "BOOL", Shape: tensor.Shape{0, 7}, Start: 26, End: 26},
	}
	header, err := Encode(map[string]string{"format": "pt"}, tensors)
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(header)
	if len(header) != 4096 || n != 4088 {
		t.Fatalf("header of %d bytes, length %d", len(header), n)
	}
	text := strings.TrimRight(string(header[8:]), " ")
	want := `{"__metadata__":{"format":"pt"},` +
		`"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},` +
		`"s\"\n":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},` +
		`"e":{"dtype":"BOOL","shape":[0,7],"data_offsets":[26,26]}}`
	if text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	if !json.Valid(header[8:]) {
		t.Error("not JSON")
	}
	empty, err := Encode(nil, nil)
	if err != nil || strings.TrimRight(string(empty[8:]), " ") != "{}" {
		t.Errorf("empty: %q, %v", empty, err)
	}
}

func TestEncodeRefuses(t *testing.T) {
	byteAt := func(name string, at int64) Tensor {
		return Tensor{Name: name, Type: "U8", Shape: tensor.Shape{1}, Start: at, End: at + 1}
	}
	for name, tensors := range map[string][]Tensor{
		"hole":        {byteAt("a", 0), byteAt("b", 2)},
		"overlap":     {byteAt("a", 0), byteAt("b", 0)},
		"late start":  {byteAt("a", 1)},
		"duplicate":   {byteAt("a", 0), byteAt("a", 1)},
		"reserved":    {byteAt(MetadataKey, 0)},
		"bad UTF-8":   {byteAt("\xff", 0)},
		"type":        {{Name: "a", Type: "F4", Shape: tensor.Shape{1}, End: 1}},
		"size":        {{Name: "a", Type: "F32", Shape: tensor.Shape{1}, End: 5}},
		"end < start": {{Name: "a", Type: "U8", Start: 0, End: -1}},
		"overflow":    {{Name: "a", Type: "F64", Shape: tensor.Shape{math.MaxInt64 / 2}, End: math.MaxInt64}},
	} {
		if _, err := Encode(nil, tensors); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := Encode(map[string]string{"k": "\xff"}, nil); err == nil {
		t.Error("metadata in bad UTF-8: no error")
	}
}

// TestRoundTrip parses what was encoded.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfDistinct(rapid.String().Filter(func(s string) bool {
			return s != MetadataKey && strings.ToValidUTF8(s, "") == s
		}), rapid.ID[string]).Draw(t, "names")
		var tensors []Tensor
		at := int64(0)
		for _, name := range names {
			d := types[rapid.IntRange(0, len(types)-1).Draw(t, "type")]
			shape := tensor.Shape(rapid.SliceOfN(rapid.Int64Range(0, 9), 1, 3).Draw(t, "shape"))
			size := shape.Volume() * int64(d.dtype.Size())
			tensors = append(tensors, Tensor{Name: name, Type: d.name, Shape: shape, Start: at, End: at + size})
			at += size
		}
		metadata := rapid.MapOf(rapid.StringMatching("[a-z]{0,3}"), rapid.StringMatching("[ -~é]*")).Draw(t, "metadata")
		header, err := Encode(metadata, tensors)
		if err != nil {
			t.Fatal(err)
		}
		h, err := parseBytes(append(header, make([]byte, at)...))
		if err != nil {
			t.Fatal(err)
		}
		if h.DataStart != int64(len(header)) || h.DataStart%Align != 0 || h.DataSize() != at {
			t.Fatalf("data at %d, size %d", h.DataStart, h.DataSize())
		}
		if len(h.Tensors) != len(tensors) || len(tensors) > 0 && !reflect.DeepEqual(h.Tensors, tensors) || !reflect.DeepEqual(h.Metadata, metadata) {
			t.Fatalf("got %+v, want %+v", h, tensors)
		}
	})
}

// TestParseRefuses is hostile headers, with what the error has to name.
func TestParseRefuses(t *testing.T) {
	one := func(fields string) string { return `{"w":{` + fields + `}}` }
	w := `"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}`
	cases := []struct {
		name string
		data []byte
		want string
	}{
		{"no length", []byte{1, 2, 3}, "3 bytes is too short"},
		{"length above the cap", append(binary.LittleEndian.AppendUint64(nil, MaxHeader+1), make([]byte, 100)...), "limit"},
		{"huge length", append(binary.LittleEndian.AppendUint64(nil, math.MaxUint64), '{', '}'), "limit"},
		{"length above the file", append(binary.LittleEndian.AppendUint64(nil, 3), '{', '}'), "more than the 2 bytes"},
		{"empty", file("", 0), `does not begin with "{"`},
		{"leading space", file(" {}", 0), "offset 8"},
		{"not an object", file("[]", 0), "offset 8"},
		{"not JSON", file("{oops}", 0), "offset 9"},
		{"cut off", file(`{"w":{"dtype":"U8"`, 0), "unexpected EOF"},
		{"two objects", file("{}{}", 0), "after the header"},
		{"NUL padding", file("{}\x00", 0), "after the header"},
		{"bad UTF-8", file("{\"\xff\":1}", 0), "UTF-8"},
		{"tensor is a number", file(`{"w":1}`, 0), `tensor "w"`},
		{"duplicate tensor", file(`{`+w+`,`+w+`}`, 4), `"w" occurs twice`},
		{"duplicate by escape", file(`{`+w+`,`+strings.Replace(w, "w", `\u0077`, 1)+`}`, 4), `"w" occurs twice`},
		{"duplicate field", file(one(`"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]`), 1), `"dtype" occurs twice`},
		{"missing field", file(one(`"dtype":"U8","shape":[]`), 0), "all needed"},
		{"unknown field", file(one(`"dtype":"U8","shape":[],"data_offsets":[0,1],"x":{}`), 1), `unknown key "x"`},
		{"unknown dtype", file(one(`"dtype":"F4","shape":[4],"data_offsets":[0,2]`), 2), `unknown dtype "F4"`},
		{"dtype is a number", file(one(`"dtype":4,"shape":[4],"data_offsets":[0,2]`), 2), "want a string"},
		{"negative dimension", file(one(`"dtype":"U8","shape":[-1],"data_offsets":[0,1]`), 1), "-1 is not"},
		{"fraction", file(one(`"dtype":"U8","shape":[1.0],"data_offsets":[0,1]`), 1), "1.0 is not"},
		{"exponent", file(one(`"dtype":"U8","shape":[1e0],"data_offsets":[0,1]`), 1), "1e0 is not"},
		{"dimension too large", file(one(`"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]`), 1), "is not a whole number"},
		{"volume overflows", file(one(`"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,1]`), 1), "2^63"},
		{"bytes overflow", file(one(`"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]`), 0), "2^63"},
		{"too many dimensions", file(one(`"dtype":"U8","shape":[`+strings.Repeat("1,", 70)+`1],"data_offsets":[0,1]`), 1), "more than 64"},
		{"nested shape", file(one(`"dtype":"U8","shape":[[1]],"data_offsets":[0,1]`), 1), "want a number"},
		{"one offset", file(one(`"dtype":"U8","shape":[],"data_offsets":[0]`), 1), "has 1 numbers"},
		{"three offsets", file(one(`"dtype":"U8","shape":[],"data_offsets":[0,1,2]`), 1), "more than 2"},
		{"end before start", file(one(`"dtype":"U8","shape":[1],"data_offsets":[1,0]`), 1), "not a range"},
		{"shape and range differ", file(one(`"dtype":"F32","shape":[2],"data_offsets":[0,4]`), 4), "needs 8"},
		{"hole at the start", file(one(`"dtype":"U8","shape":[1],"data_offsets":[1,2]`), 2), "hole of 1 bytes at 0"},
		{"hole", file(`{`+w+`,"v":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}`, 6), `hole of 1 bytes at 4 between tensor "w"`},
		{"overlap", file(`{`+w+`,"v":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}`, 5), `"v" begins at 3 and overlaps tensor "w"`},
		{"same range", file(`{`+w+`,"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, 4), "overlaps"},
		{"data cut off", file(`{`+w+`}`, 3), "only 3 bytes of data"},
		{"trailing bytes", file(`{`+w+`}`, 5), "1 trailing bytes"},
		{"trailing bytes without tensors", file(`{}`, 1), "1 trailing bytes"},
		{"metadata is a list", file(`{"__metadata__":[]}`, 0), MetadataKey},
		{"metadata of numbers", file(`{"__metadata__":{"a":1}}`, 0), `"a": got 1`},
		{"metadata twice", file(`{"__metadata__":{},"__metadata__":{}}`, 0), "occurs twice"},
	}
	for _, c := range cases {
		_, err := parseBytes(c.data)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
	}
}

// TestParseAccepts covers the freedoms of other writers.
func TestParseAccepts(t *testing.T) {
	for name, data := range map[string][]byte{
		"no tensors": file(`{}`, 0),
		"any order":  file(`{"b":{"shape":[2],"data_offsets":[1,3],"dtype":"U8"},"a":{"dtype":"I8","data_offsets":[0,1],"shape":[]}}`, 3),
		"padded":     file(`{"__metadata__":{"k":"v"}}     `, 0),
	} {
		if _, err := parseBytes(data); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// brokenReader fails every read from some byte on.
type brokenReader struct {
	data []byte
	err  error
}

func (r brokenReader) ReadAt(b []byte, off int64) (int, error) {
	n := 0
	if off < int64(len(r.data)) {
		n = copy(b, r.data[off:])
	}
	if n == len(b) {
		return n, nil
	}
	return n, r.err
}

func TestParseReadErrors(t *testing.T) {
	whole := file(`{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}`, 1)
	boom := fmt.Errorf("boom")
	for cut := range len(whole) - 1 {
		for _, err := range []error{io.EOF, boom} {
			if _, got := Parse(brokenReader{whole[:cut], err}, int64(len(whole))); got == nil {
				t.Errorf("cut at %d with %v: no error", cut, err)
			}
		}
	}
}

// FuzzParse parses anything. What parses fills its file, and parses the same
// after encoding.
func FuzzParse(f *testing.F) {
	f.Add(file(`{}`, 0))
	f.Add(file(`{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}  `, 24))
	f.Add(file(`{"__metadata__":{"a":"b"},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"I8","shape":[],"data_offsets":[0,1]}}`, 3))
	f.Add(file(`{"w":{"dtype":"F8_E4M3","shape":[0,9223372036854775807],"data_offsets":[0,0]}}`, 0))
	f.Add(file(`{"w":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0))
	f.Add(binary.LittleEndian.AppendUint64(nil, math.MaxInt64))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := parseBytes(data)
		if err != nil {
			return
		}
		if h.DataStart+h.DataSize() != int64(len(data)) {
			t.Fatalf("data of %d bytes at %d in a file of %d", h.DataSize(), h.DataStart, len(data))
		}
		header, err := Encode(h.Metadata, h.Tensors)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseBytes(append(header, data[h.DataStart:]...))
		if err != nil {
			t.Fatal(err)
		}
		if again.DataStart = h.DataStart; !reflect.DeepEqual(h, again) {
			t.Fatalf("%+v became %+v", h, again)
		}
	})
}
