package local

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/ckptstore/ckptstore/internal/object"
)

// pattern is memory that can go past the page cache, each page of it another.
func pattern(size int) []byte {
	b := object.Buffer(size)
	for i := range b {
		b[i] = byte(i>>12) ^ byte(i)
	}
	return b
}

// TestGrow writes pieces in any order; the file has their size, and no blocks
// beyond it.
func TestGrow(t *testing.T) {
	const piece = 2 << 20
	for _, tail := range []int{0, 1, object.Align, 3000, piece - 1} {
		dir := t.TempDir()
		g, err := New(vfs.Default, dir).Grow(t.Context(), "f")
		if err != nil {
			t.Fatal(err)
		}
		want := pattern(2*piece + tail)
		for _, at := range []int{piece, 0, 2 * piece} {
			part := want[at:min(at+piece, len(want))]
			if n, err := g.WriteAt(part, int64(at)); n != len(part) || err != nil {
				t.Fatalf("wrote %d bytes: %v", n, err)
			}
		}
		if err := g.Finish(int64(len(want))); err != nil {
			t.Fatal(err)
		}
		g.Abort() // of no effect
		path := filepath.Join(dir, "f")
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("tail %d: another file of %d bytes: %v", tail, len(got), err)
		}
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		if used := st.Blocks * 512; used > int64(len(want))+1<<20 {
			t.Errorf("tail %d: the file keeps %d bytes of the disk for %d", tail, used, len(want))
		}
	}
}

// TestGrowCut refuses a file that has another size than declared.
func TestGrowCut(t *testing.T) {
	g, err := New(vfs.Default, t.TempDir()).Grow(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.WriteAt(pattern(100), 0); err != nil {
		t.Fatal(err)
	}
	if err := g.Finish(101); err == nil {
		t.Error("101 bytes of 100")
	}
}

// TestGrowRefused continues through the page cache where a write past it is refused.
func TestGrowRefused(t *testing.T) {
	dir := t.TempDir()
	g, err := New(&refusing{FS: vfs.Default, err: syscall.EINVAL}, dir).Grow(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	want := pattern(3 << 20)
	for at := 0; at < len(want); at += 1 << 20 {
		if _, err := g.WriteAt(want[at:at+1<<20], int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Finish(int64(len(want))); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("another file: %v", err)
	}
}

// TestGrowReserves asks for less where more is not free, and finds a full disk
// before anything is written.
func TestGrowReserves(t *testing.T) {
	for _, c := range []struct {
		room int64 // that can be reserved at once
		err  error
		want error
	}{
		{room: 1 << 20, err: syscall.ENOSPC},
		{room: 1 << 20, err: syscall.EDQUOT},
		{err: syscall.ENOSPC, want: syscall.ENOSPC},
		{err: syscall.EDQUOT, want: syscall.EDQUOT},
		{err: syscall.EOPNOTSUPP},
	} {
		dir := t.TempDir()
		files := &reserving{FS: vfs.Default, room: c.room, err: c.err}
		g, err := New(files, dir).Grow(t.Context(), "f")
		if err != nil {
			t.Fatal(err)
		}
		_, err = g.WriteAt(pattern(1<<20), 0)
		if !errors.Is(err, c.want) {
			t.Errorf("%v with room for %d: %v", c.err, c.room, err)
		}
		if info, serr := os.Stat(filepath.Join(dir, "f")); serr != nil || (err != nil) != (info.Size() == 0) {
			t.Errorf("%v: %d bytes were written, %v", c.err, info.Size(), serr)
		}
		g.Abort()
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
	}
	// Where little is free, nothing is taken that others could have.
	files := &reserving{FS: vfs.Default, room: 1 << 40, free: plenty - 1}
	g, err := New(files, t.TempDir()).Grow(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Abort()
	if _, err := g.WriteAt(pattern(1<<20), 0); err != nil {
		t.Fatal(err)
	}
	if files.asked != 1<<20 {
		t.Errorf("%d bytes were reserved", files.asked)
	}
}

// TestGrowFails gives the error of a disk that fails.
func TestGrowFails(t *testing.T) {
	files := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileWriteAt {
			return syscall.EIO
		}
		return nil
	}))
	d := New(files, "data")
	if err := d.MakeDir(t.Context(), "run"); err != nil {
		t.Fatal(err)
	}
	g, err := d.Grow(t.Context(), "run/f")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Abort()
	for _, size := range []int{100, 2 << 20} {
		if _, err := g.WriteAt(pattern(size), 0); !errors.Is(err, syscall.EIO) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// reserving is a disk that reserves no more than room at once.
type reserving struct {
	vfs.FS
	room, free, asked int64
	err               error
}

func (r *reserving) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	f, err := r.FS.OpenReadWrite(name, c, o...)
	return reservingFile{f, r}, err
}

func (r *reserving) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	usage, err := r.FS.GetDiskUsage(path)
	if r.free > 0 {
		usage.AvailBytes = uint64(r.free)
	} else {
		usage.AvailBytes = 1 << 40
	}
	return usage, err
}

type reservingFile struct {
	vfs.File
	of *reserving
}

func (f reservingFile) Preallocate(_, size int64) error {
	if f.of.asked = size; size > f.of.room {
		return f.of.err
	}
	return nil
}

// TestReserveInterrupted: a signal during the call is no error of the disk.
func TestReserveInterrupted(t *testing.T) {
	asked := 0
	files := errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind != errorfs.OpFilePreallocate {
			return nil
		}
		if asked++; asked < 3 {
			return syscall.EINTR
		}
		return nil
	}))
	g, err := New(files, t.TempDir()).Grow(t.Context(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Abort()
	if n, err := g.WriteAt(pattern(2<<20), 0); n != 2<<20 || err != nil {
		t.Errorf("wrote %d bytes: %v", n, err)
	}
	if err := g.Finish(2 << 20); err != nil || asked != 3 {
		t.Errorf("reserved %d times: %v", asked, err)
	}
}
