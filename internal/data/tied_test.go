package data_test

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestTiedIsReadOnce loads two tensors that lie in the file once: their bytes
// are read once, for both.
func TestTiedIsReadOnce(t *testing.T) {
	const size = 2<<20 + 70_000
	m := newModel()
	m.full(0, "embed", tensor.Uint8, size)
	m.full(0, "head", tensor.Uint8, size)
	m.tensors["head"] = m.tensors["embed"]
	root := data.OpenBackend(objecttest.NewBucket(), vfs.NewMem())
	root.OfStore("store-1")
	w := root.Writer(ref).Reusing(nil)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	written, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
	if err != nil || written.BytesWritten != size {
		t.Fatalf("written %+v, %v", written, err)
	}
	manifest := m.manifest(map[int]data.Written{0: written})
	if _, err := w.Finish(t.Context(), manifest, commit); err != nil {
		t.Fatal(err)
	}
	if n := m.check(t, root.Reader(ref).WithManifest(checkpoint.Sum(checkpoint.EncodeManifest(manifest))), m.wantAll()); n != size {
		t.Errorf("%d bytes were read, the file has %d", n, size)
	}
}
