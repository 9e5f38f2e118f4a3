package foreign

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestLongNameOfManyChunks opens a .metadata file that gives thousands of
// chunks to one tensor of a long name. An index would repeat the name for each.
func TestLongNameOfManyChunks(t *testing.T) {
	const chunks = 4000
	frame, err := dcp.TensorArchive(tensor.Float32, []int64{1})
	if err != nil {
		t.Fatal(err)
	}
	one := dcp.Tensor{FQN: strings.Repeat("n", 1<<16), DType: tensor.Float32, Shape: tensor.Shape{chunks}}
	for i := range int64(chunks) {
		one.Chunks = append(one.Chunks, dcp.Chunk{
			Box:   tensor.Box{Offsets: []int64{i}, Sizes: []int64{1}},
			Where: dcp.Location{File: "f", Length: frame.Size},
		})
	}
	text, err := dcp.WriteMetadata(dcp.Metadata{Tensors: []dcp.Tensor{one}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	archive := append(append(frame.Prefix, 0, 0, 0, 0), frame.Suffix(0x2144df1c)...) // the CRC-32 of four zeros
	for name, data := range map[string][]byte{dcp.MetadataFile: text, "f": archive} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err = Open(t.Context(), vfs.Default, dir)
	runtime.ReadMemStats(&after)
	if err == nil || !strings.Contains(err.Error(), "the same objects occur in too many places") {
		t.Errorf("got %v", err)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 200*uint64(len(text)) {
		t.Errorf("a file of %d bytes took %d", len(text), used)
	}
}
