package foreign

import (
	"context"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// sparseDCP makes a data.DCP directory whose archives are real and whose tensors
// are holes, so that it takes no space.
func sparseDCP(t *testing.T, ranks, tensors int, elements int64) string {
	t.Helper()
	dir := t.TempDir()
	m := dcp.Metadata{Version: "1.0.0"}
	zeros := make([]byte, 4*elements)
	crc := crc32.ChecksumIEEE(zeros)
	frame, err := dcp.TensorArchive(tensor.Float32, []int64{elements})
	if err != nil {
		t.Fatal(err)
	}
	for i := range tensors {
		m.Tensors = append(m.Tensors, dcp.Tensor{FQN: fmt.Sprintf("model.layers.%d.weight", i), DType: tensor.Float32, Shape: tensor.Shape{int64(ranks) * elements}})
	}
	for rank := range ranks {
		name := dcp.DataFile(rank, 0)
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for i := range m.Tensors {
			at := int64(i) * frame.Size
			_, err1 := f.WriteAt(frame.Prefix, at)
			_, err2 := f.WriteAt(frame.Suffix(crc), at+int64(len(frame.Prefix))+4*elements)
			if err1 != nil || err2 != nil {
				t.Fatal(err1, err2)
			}
			m.Tensors[i].Chunks = append(m.Tensors[i].Chunks, dcp.Chunk{
				Box:   tensor.Box{Offsets: []int64{int64(rank) * elements}, Sizes: []int64{elements}},
				Where: dcp.Location{File: name, Offset: at, Length: frame.Size},
			})
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	text, err := dcp.WriteMetadata(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, dcp.MetadataFile), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestAdoptionIsCheap adopts 2 GB in 3500 tensors of 2 ranks: nothing of them
// is copied.
func TestAdoptionIsCheap(t *testing.T) {
	const ranks, tensors, elements = 2, 3500, 72_000
	began := time.Now()
	root, err := data.Open(vfs.Default, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := sparseDCP(t, ranks, tensors, elements)
	t.Logf("made in %v", time.Since(began))

	began = time.Now()
	from := openForeign(t, dir)
	opened := time.Since(began)
	w := root.Writer(checkpoint.Ref{Run: "run", Trial: "main", Checkpoint: "large"})
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	size := int64(0)
	for rank := range ranks {
		written, err := w.AdoptData(t.Context(), rank, from.Items(rank), from)
		if err != nil {
			t.Fatal(err)
		}
		size += written.Files[0].Size
	}
	size += int64(len(checkpoint.EncodeManifest(from.Manifest())))
	bytes := from.Manifest().Layout.Bytes()
	t.Logf("%d bytes adopted in %v, %v of it to open them; %d bytes were written", bytes, time.Since(began), opened, size)
	if size > 1<<20 || bytes < 2e9 {
		t.Errorf("%d bytes were written for %d", size, bytes)
	}
}

// TestCopyIsBounded copies 256 MiB of tensors of 4 MiB and looks at the memory
// that is in use meanwhile.
func TestCopyIsBounded(t *testing.T) {
	from := openForeign(t, sparseDCP(t, 1, 64, 1<<20))
	root, err := data.Open(vfs.Default, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := root.Writer(checkpoint.Ref{Run: "run", Trial: "main", Checkpoint: "copied"})
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	inUse := func() uint64 {
		runtime.GC()
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		return now.HeapAlloc
	}
	before := inUse()
	var most atomic.Uint64
	items := from.Items(0)
	src := data.NewCopySource(context.Background(), from, 0, items, func(int64) { most.Store(max(most.Load(), inUse())) })
	if _, err := w.WriteData(t.Context(), 0, items, src); err != nil {
		t.Fatal(err)
	}
	if used := most.Load() - before; used > 32<<20 {
		t.Errorf("%d bytes were in use for tensors of 4 MiB", used)
	} else {
		t.Logf("%d bytes were in use at most", used)
	}
}
