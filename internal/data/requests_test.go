package data_test

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestRequests holds the number of requests that a bucket is asked, at a sixteenth of the usual
// sizes: eight ranks with 34 MB, in parts of 2 MiB, and reads of 1 MiB.
func TestRequests(t *testing.T) {
	m := newModel()
	for rank := range 8 {
		for i := range 40 {
			m.full(rank, fmt.Sprintf("layer%d.%d", rank, i), tensor.Float32, 25_600)
		}
		m.full(rank, fmt.Sprintf("large%d", rank), tensor.Uint8, 160_000)
		m.value("step", rank, 9, true)
	}
	kept := objecttest.NewBucketOf(2<<20, 1<<20)
	bucket := objecttest.Count(kept)
	root := data.OpenBackend(bucket, vfs.NewMem())
	root.OfStore("store-1")

	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	written := map[int]data.Written{}
	for _, rank := range m.ranks() {
		out, err := w.WriteData(t.Context(), rank, m.layout.Items(rank), lastingOf(t, m, rank, 0))
		if err != nil {
			t.Fatal(err)
		}
		written[rank] = out
	}
	receipt, err := w.Finish(t.Context(), m.manifest(written), commit)
	if err != nil {
		t.Fatal(err)
	}
	hold(t, "save", bucket.Since(), objecttest.Requests{List: 2, Put: 10, Create: 8, Part: 24, Complete: 8})

	if report := verify(t, root, receipt.Manifest); !report.Clean() {
		t.Fatalf("%+v", report)
	}
	verified := bucket.Since()
	if over := float64(verified.Read) / float64(m.bytes()); over > 1.1 {
		t.Errorf("the verification reads %.2f of the bytes", over)
	}
	hold(t, "verify", verified, objecttest.Requests{List: 1, Get: 10 + 2*8, Read: verified.Read})

	m.check(t, root.Reader(ref), m.wantAll())
	loaded := bucket.Since()
	if over := float64(loaded.Read) / float64(m.bytes()); over > 1.1 {
		t.Errorf("the load reads %.2f of the bytes", over)
	}
	hold(t, "load", loaded, objecttest.Requests{List: 1, Get: 10 + 5*8, Read: loaded.Read})

	count, priced, err := data.OpenBackend(kept, vfs.NewMem()).Requests(t.Context(), ref, m.manifest(written))
	if want := (data.Requests{Writes: 52, Reads: 50, Lists: 1, Bytes: count.Bytes}); err != nil || !priced || count != want {
		t.Errorf("counted as %+v, %v, want %+v", count, err, want)
	}
	if receipts, _, err := root.Checkpoints(t.Context()); err != nil || len(receipts) != 1 {
		t.Fatalf("%v, %v", receipts, err)
	}
	hold(t, "ls", bucket.Since(), objecttest.Requests{List: 3, Get: 1, Read: 1 << 62})

	if err := root.RemoveCommitted(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	hold(t, "remove", bucket.Since(), objecttest.Requests{List: 2, Get: 2, Delete: 2, Read: 1 << 62})
}

// hold reports requests that differ from the numbers that are held. More is a regression, and
// fewer must be held from now on.
func hold(t *testing.T, what string, got, want objecttest.Requests) {
	t.Helper()
	if want.Read == 1<<62 {
		got.Read, want.Read = 0, 0
	}
	if got != want {
		t.Errorf("%s: %d requests, %+v; want %d, %+v", what, got.Total(), got, want.Total(), want)
	}
}

// bytes returns the size of all tensors and values.
func (m *model) bytes() (sum int64) {
	for _, rank := range m.ranks() {
		for _, it := range m.layout.Items(rank) {
			sum += it.Bytes
		}
	}
	return sum
}
