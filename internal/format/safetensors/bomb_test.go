package safetensors

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// Parse and ParseIndex allocate in proportion to the JSON, whatever it
// contains.
func TestParsingAllocatesInProportion(t *testing.T) {
	const size = 1 << 18
	long := strings.Repeat("\u0080", size/2) // quoted, its characters take six bytes
	header := func(text string) { _, _ = parseBytes(file(text, 0)) }
	index := func(text string) { _, _ = ParseIndex([]byte(text)) }
	many := func(entry string) string {
		var b strings.Builder
		for i := 0; b.Len() < size; i++ {
			fmt.Fprintf(&b, entry, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	for name, c := range map[string]struct {
		parse func(string)
		text  string
	}{
		"a long name":         {header, `{"` + long + `":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`},
		"a long unknown key":  {header, `{"w":{"` + long + `":0}}`},
		"long metadata":       {header, `{"__metadata__":{"` + long + `":"x"}}`},
		"many tensors":        {header, "{" + many(`"%d":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`) + "}"},
		"many metadata":       {header, `{"__metadata__":{` + many(`"%d":"",`) + "}}"},
		"many dimensions":     {header, "{" + many(`"%d":{"dtype":"U8","data_offsets":[0,0],"shape":[`+strings.Repeat("0,", 63)+"0]},") + "}"},
		"too many dimensions": {header, `{"w":{"shape":[` + strings.Repeat("0,", size/2) + "0]}}"},
		"nested":              {header, `{"w":` + strings.Repeat("[", size)},
		"index of long name":  {index, `{"weight_map":{"` + long + `":"a.safetensors"}}`},
		"index of many names": {index, `{"weight_map":{` + many(`"%d":"a.safetensors",`) + "}}"},
		"nested index":        {index, `{"x":` + strings.Repeat("[", size) + strings.Repeat("]", size) + "}"},
		"index of objects":    {index, `{"x":` + strings.Repeat(`{"":`, size/4)},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			c.parse(c.text)
			runtime.ReadMemStats(&after)
			used := (after.TotalAlloc - before.TotalAlloc) / uint64(len(c.text))
			if used > 150 {
				t.Errorf("%d bytes were allocated for each of the JSON", used)
			}
		})
	}
}
