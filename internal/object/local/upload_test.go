package local

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/ckptstore/ckptstore/internal/object"
)

// refusing is a disk on which the second descriptor of a file, which writes past the page
// cache, refuses every write.
type refusing struct {
	vfs.FS
	err    error
	opened int
	asked  int
}

type refusingFile struct {
	vfs.File
	of *refusing
}

func (f refusingFile) WriteAt([]byte, int64) (int, error) {
	f.of.asked++
	return 0, f.of.err
}

func (r *refusing) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	f, err := r.FS.OpenReadWrite(name, c, o...)
	if r.opened++; r.opened == 2 && err == nil {
		return refusingFile{f, r}, nil
	}
	return f, err
}

// supported reports whether the filesystem of dir takes writes past the page
// cache, asked without the code that is tested.
func supported(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "probe"), os.O_CREATE|os.O_WRONLY|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(object.Buffer(object.Align), 0)
	return errors.Join(err, f.Close()) == nil
}

// TestDirect goes past the page cache where that can be had, and writes with
// more at a time then.
func TestDirect(t *testing.T) {
	dir := t.TempDir()
	want := 1
	if supported(t, dir) {
		want = directDepth
	}
	for size, want := range map[int64]int{smallFile: want, smallFile - 1: 1} {
		u, err := New(vfs.Default, dir).Create(t.Context(), "f", size, object.Replace)
		if err != nil {
			t.Fatal(err)
		}
		if u.Depth() != want {
			t.Errorf("%d bytes: %d writes at a time, want %d", size, u.Depth(), want)
		}
		u.Abort()
	}
}

// TestDirectRefused continues through the page cache when the first write past it
// is refused, as by a disk with larger blocks.
func TestDirectRefused(t *testing.T) {
	dir := t.TempDir()
	disk := &refusing{FS: vfs.Default, err: syscall.EINVAL}
	u, err := New(disk, dir).Create(t.Context(), "f", 2<<20, object.Replace)
	if err != nil {
		t.Fatal(err)
	}
	data := object.Buffer(2 << 20)
	for i := range data {
		data[i] = byte(i >> 9)
	}
	for at := 0; at < len(data); at += 1 << 20 {
		if n, err := u.WriteAt(data[at:at+1<<20], int64(at)); n != 1<<20 || err != nil {
			t.Fatalf("wrote %d bytes: %v", n, err)
		}
	}
	if err := u.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if disk.opened == 2 && disk.asked != 1 {
		t.Errorf("asked %d times", disk.asked)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || !bytes.Equal(got, data) {
		t.Errorf("another file: %v", err)
	}
}

// TestDirectFails gives the error of a disk that fails, and leaves nothing.
func TestDirectFails(t *testing.T) {
	dir := t.TempDir()
	var want error // of the page cache, if that is all there is
	if supported(t, t.TempDir()) {
		want = syscall.EIO
	}
	disk := &refusing{FS: vfs.Default, err: syscall.EIO}
	u, err := New(disk, dir).Create(t.Context(), "f", 2<<20, object.Replace)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := u.WriteAt(object.Buffer(1<<20), 0); !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
	u.Abort()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestReserve finds a full disk, or a quota, before anything is written, and
// continues where blocks cannot be reserved.
func TestReserve(t *testing.T) {
	for _, c := range []struct {
		err  error
		want error
	}{{syscall.ENOSPC, syscall.ENOSPC}, {syscall.EDQUOT, syscall.EDQUOT}, {syscall.EOPNOTSUPP, nil}, {nil, nil}} {
		mem := vfs.NewMem()
		disk := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind == errorfs.OpFilePreallocate {
				return c.err
			}
			return nil
		}))
		d := New(disk, "data")
		if err := d.MakeDir(context.Background(), "run"); err != nil {
			t.Fatal(err)
		}
		u, err := d.Create(t.Context(), "run/f", 2<<20, object.Replace)
		if !errors.Is(err, c.want) {
			t.Errorf("%v: create gives %v", c.err, err)
		}
		if err == nil {
			u.Abort()
		}
		if names, err := mem.List("data/run"); err != nil || len(names) > 0 {
			t.Errorf("%v: left %v, %v", c.err, names, err)
		}
	}
}
