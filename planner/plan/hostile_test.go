package plan_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"runtime"
	"testing"
)

// raw writes a form by hand: strings with their length, numbers as they are.
func raw(magic string, parts ...any) []byte {
	data := append([]byte(magic), 1)
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			data = append(binary.AppendUvarint(data, uint64(len(p))), p...)
		case int:
			data = binary.AppendUvarint(data, uint64(p))
		case []byte:
			data = append(data, p...)
		}
	}
	return data
}

func TestHostileForms(t *testing.T) {
	const huge = math.MaxInt64
	for name, c := range map[string]struct {
		form int
		data []byte
		want string
	}{
		"items":             {0, raw("CKLP", 0, huge), "offset 15: a list of 9223372036854775807 entries does not fit in the 0 bytes"},
		"items and bytes":   {0, raw("CKLP", 0, 100, make([]byte, 299)), "a list of 100 entries does not fit in the 299 bytes"},
		"rank":              {0, raw("CKLP", 1<<31+1, 0), "number 2147483649 is too large"},
		"padded number":     {0, raw("CKLP", []byte{0x80, 0}, 0), "offset 5: bad number"},
		"endless number":    {0, raw("CKLP", bytes.Repeat([]byte{0xff}, 20)), "offset 5: bad number"},
		"flags":             {0, raw("CKLP", 0, 1, 4, "v", 0), "unknown flags 4"},
		"name":              {0, raw("CKLP", 0, 1, 1, huge, []byte("v")), "does not fit"},
		"no name":           {0, raw("CKLP", 0, 1, 1, "", 9), "without a name"},
		"negative size":     {0, raw("CKLP", 0, 1, 1, "v", []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}), "number 18446744073709551615 is too large"},
		"dtype":             {0, raw("CKLP", 0, 1, 0, "w", 4, 20, 0), "unknown dtype 20"},
		"dtype beyond byte": {0, raw("CKLP", 0, 1, 0, "w", 4, 256+12, 0), "unknown dtype 268"},
		"dimensions":        {0, raw("CKLP", 0, 1, 0, "w", 4, 12, huge), "does not fit"},
		"65 dimensions":     {0, raw("CKLP", 0, 1, 0, "w", 4, 12, 65, make([]byte, 65+130)), "65 dimensions"},
		"volume":            {0, raw("CKLP", 0, 1, 0, "w", 4, 12, 2, 1<<32, 1<<32, 0, 1, 0, 1), "more than 2^63 elements"},
		"bytes of volume":   {0, raw("CKLP", 0, 1, 0, "w", 4, 12, 1, 1<<62, 0, 1), "more than 2^63 bytes"},
		"bounds":            {0, raw("CKLP", 0, 1, 0, "w", 16, 12, 1, 4, 2, 4), `tensor "w": box [2]+[4] is out of bounds of shape [4]`},
		"bytes of box":      {0, raw("CKLP", 0, 1, 0, "w", 9, 12, 1, 4, 2, 2), `tensor "w" has 9 bytes, its box needs 8`},
		"tensors":           {1, raw("CKLY", huge), "does not fit"},
		"nameless tensor":   {1, raw("CKLY", 1, "", 12, 0, 0, 0), "tensor without a name"},
		"chunks":            {1, raw("CKLY", 1, "w", 12, 1, 4, huge, 0), "does not fit"},
		"chunk bounds":      {1, raw("CKLY", 1, "w", 12, 1, 4, 1, 0, 1, 4, 0), `tensor "w": box [1]+[4] is out of bounds`},
		"shape, no chunk":   {1, raw("CKLY", 1, "w", 12, 2, 1<<32, 1<<32, 0, 0), "more than 2^63 elements"},
		"values":            {1, raw("CKLY", 0, huge), "does not fit"},
		"nameless value":    {1, raw("CKLY", 0, 1, "", 0, 4, 0), "value without a name"},
		"value flags":       {1, raw("CKLY", 0, 1, "v", 0, 4, 1), "unknown flags 1"},
		"ranks":             {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, 3, make([]byte, 98)), "a list of 3 entries does not fit in the 98 bytes"},
		"ranks, no bytes":   {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, huge), "does not fit"},
		"step":              {2, raw("CKMF", "s", "r", "t", "c", "n", []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}), "is too large"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := forms[c.form].again(c.data)
			wantError(t, err, c.want)
			checkDecode(t, forms[c.form], c.data)
		})
	}
}

// What decoding allocates is bounded by the input, whatever the input says;
// of a list whose first entry is broken nothing is made.
func TestDecodingAllocatesInProportion(t *testing.T) {
	const size = 1 << 16
	for name, c := range map[string]struct {
		form int
		data []byte
		most int // bytes for each of the input
	}{
		"broken items":   {0, raw("CKLP", 0, size/3, bytes.Repeat([]byte{0xff}, size)), 10},
		"smallest items": {0, raw("CKLP", 0, size/4, bytes.Repeat([]byte{1, 1, 'v', 0}, size/4)), 500}, // a list grows by copying, which costs its size five times over
		"broken chunks":  {1, raw("CKLY", 1, "w", 12, 0, size, bytes.Repeat([]byte{0xff}, size)), 10},
		"scalar chunks":  {1, raw("CKLY", 1, "w", 12, 0, size, make([]byte, size), 0), 500}, // a list grows by copying, which costs its size five times over
		"huge tensors":   {1, raw("CKLY", size/4, bytes.Repeat([]byte{1, 'w', 12, 0xff}, size/4)), 10},
		"broken ranks":   {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, size/33, bytes.Repeat([]byte{0xff}, size)), 10},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, _ = forms[c.form].again(c.data)
			runtime.ReadMemStats(&after)
			if got, most := after.TotalAlloc-before.TotalAlloc, uint64(c.most*len(c.data)); got > most {
				t.Errorf("%d bytes were allocated for %d of input, want at most %d", got, len(c.data), most)
			}
		})
	}
}
