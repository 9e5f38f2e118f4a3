package storage_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/storage/backend/backendtest"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestBucket saves, lists, verifies, reads, repeats and removes where there are
// no directories, no links and no renames. What could be reused is written
// again, and why is said.
func TestBucket(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Float32, 1_300_000)
	m.full(1, "s", tensor.BFloat16, 8, 6)
	m.value("step", 0, 9, false)
	bucket := backendtest.NewBucket()
	root := storage.OpenBackend(bucket, vfs.NewMem())
	root.OfStore("store-1")
	if _, err := root.Free(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("free: %v", err)
	}
	receipt := m.save(t, root)
	if receipts, err := listed(t, root); err != nil || len(receipts) != 1 {
		t.Fatalf("listed %v, %v", receipts, err)
	}
	if report := verify(t, root, receipt.Manifest); !report.Clean() || report.Bytes == 0 {
		t.Fatalf("verified: %+v", report)
	}
	m.check(t, root.Reader(ref), m.wantAll())

	// Repeated, as by a caller whose answer was lost.
	w := root.Writer(ref)
	if _, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0)); err != nil {
		t.Error(err)
	}
	next := ref
	next.Checkpoint = "step-200.a1"
	said := 0
	w = root.Writer(next).Reusing(func(error) { said++ }, storage.Base{Ref: ref, Manifest: receipt.Manifest})
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	written, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
	if err != nil || written.BytesReused != 0 || said != 1 {
		t.Errorf("written %+v, %v; said %d times why", written, err, said)
	}

	if err := root.RemoveCommitted(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if err := root.Remove(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if names, err := bucket.List(t.Context(), ""); err != nil || len(names) > 0 {
		t.Errorf("left %v, %v", names, err)
	}
	if _, err := root.Reader(ref).ReadMetadata(t.Context()); !errors.Is(err, storage.ErrNotCommitted) {
		t.Errorf("read what was removed: %v", err)
	}
	if err := root.Reader(ref).SetUp(t.Context(), m.manifest(nil), true); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("set up what was removed: %v", err)
	}
}
