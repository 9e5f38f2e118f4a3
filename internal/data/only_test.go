package data_test

import (
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
)

// TestOnly reads one tensor by a manifest that has the chunks of no other.
func TestOnly(t *testing.T) {
	m := newModel()
	for _, fqn := range []string{"a", "b", "c"} {
		m.full(0, fqn, tensor.Float32, 300)
	}
	root := open(t, memory(t))
	receipt := m.save(t, root)
	wants := m.wantAll()[1:2]
	for _, r := range []struct {
		name string
		n    int64
	}{
		{"by the receipt", m.check(t, root.Reader(ref).Only("b"), wants)},
		{"by the log", m.check(t, root.Reader(ref).WithManifest(receipt.Manifest).Only("b"), wants)},
	} {
		if r.n != 1200 {
			t.Errorf("%s: read %d bytes", r.name, r.n)
		}
	}
	partial, err := root.Reader(ref).Only("b").ReadMetadata(t.Context())
	if err != nil || len(partial.Layout.Tensors[0].Chunks) > 0 || len(partial.Layout.Tensors[1].Chunks) != 1 {
		t.Errorf("%+v, %v", partial.Layout, err)
	}
	// A reader of everything is not set up with it.
	if err := root.Reader(ref).WithManifest(receipt.Manifest).SetUp(t.Context(), partial, true); err == nil {
		t.Error("a part of the manifest was taken for all of it")
	}
}
