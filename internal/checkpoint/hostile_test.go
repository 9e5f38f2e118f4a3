package checkpoint_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"runtime"
	"strings"
	"testing"
)

// raw writes a form by hand: strings with their length, numbers as they are.
func raw(magic string, parts ...any) []byte {
	return appendRaw(append([]byte(magic), 1), parts...)
}

func appendRaw(data []byte, parts ...any) []byte {
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

// rawLocal is a local plan of n items, with the structure's length before it.
func rawLocal(n int, structure []any, boxes ...any) []byte {
	return appendRaw(raw("CKLP", 0, n, string(appendRaw(nil, structure...))), boxes...)
}

func TestHostileForms(t *testing.T) {
	const huge = math.MaxInt64
	type of = []any
	beyond := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}
	long := strings.Repeat("x", 200)
	for name, c := range map[string]struct {
		form int
		data []byte
		want string
	}{
		"items":              {0, raw("CKLP", 0, huge), "offset 15: a list of 9223372036854775807 entries does not fit in the 0 bytes"},
		"items and bytes":    {0, raw("CKLP", 0, 100, make([]byte, 299)), "a list of 100 entries does not fit in the 299 bytes"},
		"rank":               {0, raw("CKLP", 1<<31+1, 0), "number 2147483649 is too large"},
		"padded number":      {0, raw("CKLP", []byte{0x80, 0}, 0), "offset 5: bad number"},
		"endless number":     {0, raw("CKLP", bytes.Repeat([]byte{0xff}, 20)), "offset 5: bad number"},
		"structure":          {0, raw("CKLP", 0, 0, huge), "does not fit"},
		"structure too long": {0, rawLocal(1, of{1, 0, "v", 7}, 3), "offset 12: 1 bytes after the last shape"},
		"structure is short": {0, rawLocal(1, of{1, 0}, "v", 3), "bad number"},
		"nothing and more":   {0, rawLocal(0, of{7}), "1 bytes after the last shape"},
		"flags":              {0, rawLocal(1, of{16, 0, "v"}, 3), "unknown flags 16"},
		"name":               {0, rawLocal(1, of{1, 0, huge, []byte("v")}), "does not fit"},
		"no name":            {0, rawLocal(1, of{1, 0, ""}, 9), "without a name"},
		"shared of nothing":  {0, rawLocal(1, of{1, 1, "v"}, 9), "1 bytes of the name before are not there to share"},
		"shared too much":    {0, rawLocal(2, of{1, 1, 0, "vw", 3, "v"}, 9, 9), "3 bytes of the name before are not there to share"},
		"shared too little":  {0, rawLocal(2, of{1, 1, 0, "vw", 1, "wx"}, 9, 9), "shares more of the name before than it declares"},
		"shared beyond most": {0, rawLocal(2, of{1, 1, 0, long, 128, "v"}, 9, 9), "128 bytes of the name before are not there"},
		"negative size":      {0, rawLocal(1, of{1, 0, "v"}, beyond), "number 18446744073709551615 is too large"},
		"dtype":              {0, rawLocal(1, of{0, 0, "w", 99, 0}), "unknown dtype 99"},
		"no dtype":           {0, rawLocal(1, of{0, 0, "w", 0, 0}), "unknown dtype 0"},
		"dimensions":         {0, rawLocal(1, of{0, 0, "w", 12, huge}), "9223372036854775807 dimensions, at most 64"},
		"65 dimensions":      {0, rawLocal(1, of{0, 0, "w", 12, 65, make([]byte, 65)}, make([]byte, 130)), "65 dimensions"},
		"no dimensions":      {0, rawLocal(1, of{0, 0, "w", 12, 64}), "does not fit"},
		"volume":             {0, rawLocal(1, of{0, 0, "w", 12, 2, 1 << 32, 1 << 32}, 0, 0, 0, 0), "more than 2^63 elements"},
		"bytes of volume":    {0, rawLocal(1, of{0, 0, "w", 12, 1, 1 << 62}, 0, 0), "more than 2^63 bytes"},
		"boxes":              {0, rawLocal(1, of{0, 0, "w", 12, 2, 4, 4}, 0, 0, 0), "a list of 4 entries does not fit in the 3 bytes"},
		"before":             {0, rawLocal(1, of{0, 0, "w", 12, 1, 4}, 5, 0), `tensor "w": 5 before and 0 behind the box are out of bounds of shape [4]`},
		"behind":             {0, rawLocal(1, of{0, 0, "w", 12, 1, 4}, 2, 3), `tensor "w": 2 before and 3 behind`},
		"behind, negative":   {0, rawLocal(1, of{0, 0, "w", 12, 1, 4}, 2, beyond), "out of bounds"},
		"path of nothing":    {0, rawLocal(1, of{5, 0, "v.w", 0}, 3), "a path of 0 keys is redundant"},
		"path of the name":   {0, rawLocal(1, of{5, 0, "v.w", 2}, 3), "a path of 1 keys is redundant"},
		"path, no bytes":     {0, rawLocal(1, of{5, 0, "v.w", huge}, 3), "does not fit"},
		"path without a dot": {0, rawLocal(1, of{5, 0, "v.w", 4, 4}, 3), `"v.w": no dot ends element 0 of the path, of 2 bytes`},
		"path too long":      {0, rawLocal(1, of{5, 0, "v.w", 6, 2, 2}, 3), "no dot ends element 1 of the path, of 1 bytes"},
		"path beyond":        {0, rawLocal(1, of{5, 0, "v.w", 4, beyond}, 3), "no dot ends element 0"},
		"index of letters":   {0, rawLocal(1, of{5, 0, "v.w", 5, 2}, 3), `element 1 of the path, "w", is no index`},
		"literals, no path":  {0, rawLocal(1, of{5, 0, "v.w", 1, 0}, 3), "a path of 0 keys is redundant"},
		"literals, a name":   {0, rawLocal(1, of{5, 0, "v.w", 1, 4}, 3), "a path of 1 keys is redundant"},
		"no literals":        {0, rawLocal(1, of{5, 0, "v.w", 1, 8, 4}, 3), "a path without literals"},
		"empty literal":      {0, rawLocal(1, of{5, 0, ".w", 1, 8, 2}, 3), "element 0 of the path is a literal without a text"},
		"fourth kind":        {0, rawLocal(1, of{5, 0, "v.w", 1, 8, 7}, 3), "element 0 of the path is of the unknown kind 3"},
		"padded index":       {0, rawLocal(1, of{5, 0, "v.01", 5, 2}, 3), `"01", is no index`},
		"signed index":       {0, rawLocal(1, of{5, 0, "v.-1", 5, 2}, 3), `"-1", is no index`},
		"huge index":         {0, rawLocal(1, of{5, 0, "v.9223372036854775807", 5, 2}, 3), "is no index"},
		"zero check":         {0, rawLocal(1, of{9, 0, "v"}, 3, make([]byte, 16)), `the check of "v" is zero`},
		"short check":        {0, rawLocal(1, of{9, 0, "v"}, 3, make([]byte, 15)), "a list of 1 entries does not fit in the 15 bytes"},
		"layout with checks": {1, raw("CKLY", 0, 1, 0, "v", 0, 4, 8), "unknown flags 8"},
		"path of a tensor":   {1, raw("CKLY", 1, 0, "a.b", []byte{0x80 | 12}, 0, 0, 0, 0), "a path of 0 keys is redundant"},
		"only a path":        {1, raw("CKLY", 1, 0, "a.b", []byte{0x80}, 0, 4, 2, 0, 0), "unknown dtype 128"},
		"path of a value":    {1, raw("CKLY", 0, 1, 0, "a.b", 0, 4, 4, 2), "a path of 1 keys is redundant"},
		"tensors":            {1, raw("CKLY", huge), "does not fit"},
		"nameless tensor":    {1, raw("CKLY", 1, 0, "", 12, 0, 0, 0), "tensor without a name"},
		"chunks":             {1, raw("CKLY", 1, 0, "w", 12, 1, 4, huge, 0), "does not fit"},
		"chunk bounds":       {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 2, 0, 2, 0, 0), `tensor "w": box at 1+4 is out of bounds`},
		"chunk overflow":     {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 2, 0, beyond, 0, 0), "is out of bounds"},
		"negative rank":      {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 2, 1, 2, 1, 0), "rank -1 is out of range"},
		"listed rule":        {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 2, 0, 0, 0, 0), "1 chunks are listed instead of a rule"},
		"whole cells":        {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 0, 4, 0, 0), "cells of 4 are out of bounds of shape [4]"},
		"rule of nothing":    {1, raw("CKLY", 1, 0, "w", 12, 1, 0, 0, 0, 0, 0), "no rule cuts shape [0]"},
		"bomb":               {1, raw("CKLY", 1, 0, "w", 12, 1, 1<<40, 0, 1, 0, 1, 1, 0), "no rule cuts shape [1099511627776] into cells [1]"},
		"large rule":         {1, raw("CKLY", 1, 0, "w", 12, 1, 1<<17, 0, 1, 0, 1, 1, 0), "the rule stands for 131072 chunks, which is more than a rule may"},
		"many rules":         {1, raw("CKLY", 999, 0, "w", bytes.Repeat([]byte{1, 0}, 998), bytes.Repeat([]byte{1}, 2*999), bytes.Repeat(appendRaw(nil, 100_000), 999), bytes.Repeat(appendRaw(nil, 0, 1, 0, 0, 1), 999)), "stands for 100000 chunks, which is more than a rule may"},
		"no interleave":      {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 0, 1, 0, 1, 0, 0), "4 chunks cannot be interleaved by 0"},
		"odd interleave":     {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 0, 1, 0, 1, 3, 0), "4 chunks cannot be interleaved by 3"},
		"idle interleave":    {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 0, 1, 0, 1, 4, 0), "4 chunks cannot be interleaved by 4"},
		"last rank":          {1, raw("CKLY", 1, 0, "w", 12, 1, 4, 0, 1, 1, 1<<30, 1, 0), "rank 1 and 3 steps of 1073741824 are too large"},
		"shape, no chunk":    {1, raw("CKLY", 1, 0, "w", 12, 2, 1<<32, 1<<32, 1, 0), "more than 2^63 elements"},
		"values":             {1, raw("CKLY", 0, huge), "does not fit"},
		"nameless value":     {1, raw("CKLY", 0, 1, 0, "", 0, 4, 0), "value without a name"},
		"value flags":        {1, raw("CKLY", 0, 1, 0, "v", 0, 4, 1), "unknown flags 1"},
		"ranks":              {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, 3, make([]byte, 98)), "a list of 3 entries does not fit in the 98 bytes"},
		"ranks, no bytes":    {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, huge), "does not fit"},
		"step":               {2, raw("CKMF", "s", "r", "t", "c", "n", beyond), "is too large"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := forms[c.form].again(c.data)
			wantError(t, err, c.want)
			checkDecode(t, forms[c.form], c.data)
		})
	}
}

// Decoding allocates in proportion to the input, whatever the input contains;
// for a list whose first entry is broken it allocates nothing.
func TestDecodingAllocatesInProportion(t *testing.T) {
	const size = 1 << 16
	for name, c := range map[string]struct {
		form int
		data []byte
		most int // bytes for each of the input
	}{
		"broken items":    {0, rawLocal(size/3, []any{bytes.Repeat([]byte{0xff}, size)}), 10},
		"smallest items":  {0, rawLocal(size/4, []any{bytes.Repeat([]byte{1}, size/4), 0, "v", bytes.Repeat([]byte{1, 0}, size/4-1)}, make([]byte, size/4)), 200},
		"longest names":   {0, rawLocal(size/4, []any{bytes.Repeat([]byte{1}, size/4), 0, strings.Repeat("v", 127), bytes.Repeat([]byte{127, 0}, size/4-1)}, make([]byte, size/4)), 400},
		"longest paths":   {0, rawLocal(1, []any{1 | 4, 0, strings.Repeat(".", size), (size + 1) << 1, make([]byte, size)}, 3), 40},
		"broken checks":   {0, rawLocal(size/4, []any{bytes.Repeat([]byte{9}, size/4), 0, "v", bytes.Repeat([]byte{1, 0}, size/4-1)}, make([]byte, size/4), make([]byte, size)), 100},
		"broken chunks":   {1, raw("CKLY", 1, 0, "w", 12, 0, size, bytes.Repeat([]byte{0xff}, size)), 10},
		"scalar chunks":   {1, raw("CKLY", 1, 0, "w", 12, 0, size, make([]byte, size), 0), 100},
		"many dimensions": {1, raw("CKLY", 1, 0, "w", 12, 64, make([]byte, 64), size/129, make([]byte, size), 0), 20},
		"huge tensors":    {1, raw("CKLY", size/5, bytes.Repeat([]byte{0, 1, 'w'}, size/4), bytes.Repeat([]byte{12}, size/2)), 10},
		"refused rules":   {1, raw("CKLY", 999, 0, "w", bytes.Repeat([]byte{1, 0}, 998), bytes.Repeat([]byte{1}, 2*999), bytes.Repeat(appendRaw(nil, 100_000), 999), bytes.Repeat(appendRaw(nil, 0, 1, 0, 0, 1), 999)), 100},
		"broken ranks":    {2, raw("CKMF", "s", "r", "t", "c", "n", 1, 1, 1, size/33, bytes.Repeat([]byte{0xff}, size)), 10},
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
