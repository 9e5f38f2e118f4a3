package cmd_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestCatSlice reads slices of a matrix of 4 MiB: cat reads only the blocks that overlap
// the slice, and writes the right bytes.
func TestCatSlice(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const rows, columns = 1024, 1024 // of float32: 16 rows a block of 64 KiB
	data := make([]byte, 4*rows*columns)
	for i := range data {
		data[i] = byte(i * 31 >> 3)
	}
	header, err := json.Marshal(map[string]any{"w": map[string]any{"dtype": "F32", "shape": []int{rows, columns}, "data_offsets": []int{0, len(data)}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "m.safetensors")
	whole := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...)
	if err := os.WriteFile(file, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	store := "--store=" + filepath.Join(dir, "store")
	output(t, 0, "ckptstore", "import", file, "--run", "r", "--step", "1", "--quiet", store)
	at := func(row, from, to int) []byte { return data[4*(row*columns+from) : 4*(row*columns+to)] }
	for _, c := range []struct {
		spec  string
		want  []byte
		read  int64
		shape []int64
	}{
		{"0:16", data[:64<<10], 64 << 10, []int64{16, columns}},
		{"17,3:5", at(17, 3, 5), 64 << 10, []int64{2}},
		{"-1,-1", at(rows-1, columns-1, columns), 64 << 10, []int64{}},
		{"15:17,:", data[15*4096 : 17*4096], 128 << 10, []int64{2, columns}},
		{"5:5", nil, 0, []int64{0, columns}},
		{"...", data, 4 << 20, []int64{rows, columns}},
	} {
		for _, more := range [][]string{nil, {"--offline"}} {
			out := filepath.Join(dir, "out")
			text := output(t, 0, "ckptstore", append([]string{"cat", "r", "w", "--slice", c.spec, "-o", out, "--json", store}, more...)...)
			if len(c.shape) > 0 {
				schema(t, "cat-slice", text)
			}
			var got struct {
				Shape     []int64
				Bytes     int64
				BytesRead int64 `json:"bytes_read"`
			}
			decode(t, text, &got)
			wrote, err := os.ReadFile(out)
			if err != nil || !bytes.Equal(wrote, c.want) {
				t.Errorf("%s: %d bytes, want %d: %v", c.spec, len(wrote), len(c.want), err)
			}
			if got.BytesRead != c.read || got.Bytes != int64(len(c.want)) || len(got.Shape) != len(c.shape) {
				t.Errorf("%s: %+v, want %d bytes read, %d written, shape %v", c.spec, got, c.read, len(c.want), c.shape)
			}
		}
	}
}
