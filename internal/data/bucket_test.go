package data_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestBucket saves, lists, verifies, reads, repeats, reuses and removes where there are no
// directories, no links and no renames.
func TestBucket(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Float32, 1_300_000)
	m.full(1, "s", tensor.BFloat16, 8, 6)
	m.value("step", 0, 9, false)
	bucket := objecttest.NewBucket()
	root := data.OpenBackend(bucket, vfs.NewMem())
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
	told := 0
	w = root.Writer(next).Reusing(func(error) { told++ }, data.Base{Ref: ref, Manifest: receipt.Manifest})
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	written, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
	if err != nil || written.BytesReused != 4*1_300_000 || told != 0 || len(written.Files) != 3 || written.Files[1].From != ref {
		t.Errorf("written %+v, %v; %d reasons", written, err, told)
	}
	// A base that is gone is not named.
	third := ref
	third.Checkpoint = "step-300.a1"
	if w = root.Writer(third).Reusing(func(error) { told++ }, data.Base{Ref: ref, Manifest: receipt.Manifest}); w.SetUp(t.Context(), true) != nil {
		t.Fatal("set up")
	}
	if err := root.RemoveExcept(t.Context(), ref, func(name string) bool { return name == checkpoint.DataFile(1) }); err != nil {
		t.Fatal(err)
	}
	if written, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0)); err != nil || written.BytesReused != 0 || told != 1 {
		t.Errorf("written %+v, %v; %d reasons", written, err, told)
	}
	if err := root.Remove(t.Context(), third); err != nil {
		t.Fatal(err)
	}
	if names, err := bucket.List(t.Context(), ref.String()); err != nil || len(names) != 1 || names[0].Name != checkpoint.DataFile(1) {
		t.Errorf("left %v, %v", names, err)
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
	if _, err := root.Reader(ref).ReadMetadata(t.Context()); !errors.Is(err, data.ErrNotCommitted) {
		t.Errorf("read what was removed: %v", err)
	}
	if err := root.Reader(ref).SetUp(t.Context(), m.manifest(nil), true); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("set up what was removed: %v", err)
	}
}

// TestAttested verifies without reading tensors: the server's checksum of each file must be
// that of its index.
func TestAttested(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Float32, 300_000)
	m.full(0, "empty", tensor.Float32, 0)
	m.full(1, "s", tensor.BFloat16, 8, 6)
	m.value("step", 1, 9, false)
	bucket := objecttest.Count(objecttest.NewBucket())
	root := data.OpenBackend(bucket, vfs.NewMem())
	receipt := m.save(t, root)
	names := []string{ref.String() + "/" + checkpoint.DataFile(0), ref.String() + "/" + checkpoint.DataFile(1)}
	quick := func() data.Report {
		report, err := root.VerifyWith(t.Context(), ref, receipt.Manifest, data.VerifyOptions{Quick: true})
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	var sizes int64
	for _, name := range names {
		info, err := bucket.Stat(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		sizes += info.Size
	}
	bucket.Since()
	if report := quick(); !report.Clean() || report.Attested != sizes {
		t.Errorf("%d of %d bytes are attested: %+v", report.Attested, sizes, report)
	}
	hold(t, "quick", bucket.Since(), objecttest.Requests{List: 1, Head: 2, Get: 4, Read: 1 << 62})

	whole, err := bucket.Get(t.Context(), names[0], 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	whole[len(whole)-1] ^= 1
	up, err := bucket.Create(t.Context(), names[0], int64(len(whole)), object.Replace)
	if err == nil {
		_, err = up.WriteAt(whole, 0)
	}
	if err == nil {
		err = up.Commit(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	report := quick()
	if len(report.Findings) != 1 || report.Findings[0].File != checkpoint.DataFile(0) || report.Findings[0].Kind != data.Corrupt {
		t.Errorf("a replaced file: %+v", report.Findings)
	}
}

// reserving is a disk that gives a file its blocks when it is created.
type reserving struct {
	*objecttest.Bucket
	mu   sync.Mutex
	free uint64
}

func (r *reserving) Usage(context.Context) (object.Usage, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return object.Usage{Free: r.free, Size: 1 << 40}, nil
}

func (r *reserving) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u, err := r.Bucket.Create(ctx, name, size, mode)
	r.free -= uint64(size)
	return reservedUpload{u}, err
}

type reservedUpload struct{ object.Upload }

func (reservedUpload) Reserved() bool { return true }

// TestReserved counts bytes once that the disk counts as used before they are
// written: a save that just fits is not refused.
func TestReserved(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Uint8, 1<<20)
	m.full(1, "v", tensor.Uint8, 1<<20)
	disk := &reserving{Bucket: objecttest.NewBucket(), free: 5 << 19}
	root := data.OpenBackend(disk, vfs.NewMem())
	root.OfStore("store-1")
	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	_, err := w.WriteData(t.Context(), 0, m.layout.Items(0), source(func(i int) ([]byte, error) {
		if _, err := w.WriteData(t.Context(), 1, m.layout.Items(1), m.source(1)); err != nil {
			t.Errorf("the second rank: %v", err)
		}
		return m.source(0).Item(i)
	}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteData(t.Context(), 2, m.layout.Items(0), m.source(0)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a third rank, which does not fit: %v", err)
	}
}

// slowReserving begins another write when a file has its blocks, before the first writer
// knows it.
type slowReserving struct {
	*reserving
	first atomic.Bool
	then  func()
}

func (r *slowReserving) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	u, err := r.reserving.Create(ctx, name, size, mode)
	if !r.first.Swap(true) {
		r.then()
	}
	return u, err
}

// TestReservedOnce counts the space of a file once also at the moment when the disk reserves
// it: ranks begin to write at the same time.
func TestReservedOnce(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Uint8, 1<<20)
	m.full(1, "v", tensor.Uint8, 1<<20)
	disk := &slowReserving{reserving: &reserving{Bucket: objecttest.NewBucket(), free: 5 << 19}}
	root := data.OpenBackend(disk, vfs.NewMem())
	root.OfStore("store-1")
	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	second := make(chan error, 1)
	disk.then = func() { // of the first file
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, err := w.WriteData(t.Context(), 1, m.layout.Items(1), m.source(1))
			second <- err
		}()
		select {
		case <-ended: // it did not wait
		case <-time.After(50 * time.Millisecond):
		}
	}
	if _, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0)); err != nil {
		t.Fatal(err)
	}
	if err := <-second; err != nil {
		t.Errorf("the second rank: %v", err)
	}
}

// TestMemoryIsTruncated truncates the file behind a slot while a rank is written: the save
// fails, and not the process.
func TestMemoryIsTruncated(t *testing.T) {
	const size = 2 << 20
	for _, where := range []string{"bucket", "directory"} {
		for _, left := range []int64{0, size / 2} {
			t.Run(fmt.Sprintf("%s, %d bytes left", where, left), func(t *testing.T) {
				m := newModel()
				m.full(0, "w", tensor.Uint8, size)
				f, err := os.Create(filepath.Join(t.TempDir(), "slot"))
				if err == nil {
					err = f.Truncate(size)
				}
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				slot, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
				if err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := syscall.Munmap(slot); err != nil {
						t.Error(err)
					}
				}()
				if err := f.Truncate(left); err != nil {
					t.Fatal(err)
				}
				root := data.OpenBackend(objecttest.NewBucket(), vfs.NewMem())
				if where == "directory" {
					if root, err = data.Open(vfs.Default, t.TempDir()); err != nil {
						t.Fatal(err)
					}
				}
				w := root.Writer(ref).Reusing(func(error) {})
				if err := w.SetUp(t.Context(), true); err != nil {
					t.Fatal(err)
				}
				if _, err := w.WriteData(t.Context(), 0, m.layout.Items(0), lasting{items: [][]byte{slot}}); !errors.Is(err, object.ErrUnreadable) {
					t.Errorf("written from a truncated slot: %v", err)
				}
			})
		}
	}
}
