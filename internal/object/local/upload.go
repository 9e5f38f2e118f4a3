package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
)

// A large file is opened twice. One descriptor writes past the page cache: through the cache,
// a save would evict the training's pages and pay for a copy. The other writes the parts that
// such writes cannot have: the end of a file, which is not a whole block. Support of the
// filesystem is detected by trying: first with the flag, then with the first write. Measured
// on ext4 over NVMe: 2 writes of 4 MiB at a time are as fast as any number of any size, and
// as fast as files whose blocks were not reserved.
const (
	smallFile   = 1 << 20 // below, the page cache is faster
	pieceSize   = 4 << 20
	directDepth = 2
)

// upload is a file under its temporary name.
type upload struct {
	d          *Dir
	path, temp string
	mode       object.Mode
	file       vfs.File
	past       vfs.File // past the page cache; nil if the filesystem does not support it
	reserved   bool
	refused    atomic.Bool // such a write was refused

	once sync.Once // for close
	err  error
}

// Create implements [object.Backend].
func (d *Dir) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return nil, err
	}
	u := &upload{d: d, path: path, temp: partial(path), mode: mode}
	if u.file, err = d.fs.OpenReadWrite(u.temp, vfs.WriteCategoryUnspecified); err != nil {
		return nil, fmt.Errorf("create %s: %w", u.temp, disk.NoSpace(err))
	}
	if size >= smallFile {
		if u.reserved, err = reserve(u.file, 0, size); err != nil {
			u.Abort()
			return nil, fmt.Errorf("reserve %d bytes for %s: %w", size, u.temp, disk.NoSpace(err))
		}
		if u.file.Fd() != vfs.InvalidFd {
			u.past = direct(d.fs, u.temp)
		}
	}
	return u, nil
}

// partial returns a name that no other upload has, in any process on any machine. A writer
// with a temporary name of its own can never publish the bytes of another.
func partial(path string) string {
	return fmt.Sprintf("%s.%016x%s", path, rand.Uint64(), object.Partial)
}

// reserve allocates a file's blocks. Where the filesystem cannot, a full disk fails a write
// instead.
func reserve(f vfs.File, from, size int64) (done bool, err error) {
	// An interrupting signal, such as the runtime's own, is not an answer of the disk.
	for err = syscall.EINTR; errors.Is(err, syscall.EINTR); {
		err = f.Preallocate(from, size)
	}
	for _, unable := range []error{syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EINVAL, syscall.ENODEV} {
		if errors.Is(err, unable) {
			return false, nil
		}
	}
	// A file in memory has no blocks to reserve.
	return err == nil && f.Fd() != vfs.InvalidFd, err
}

// Reserved implements [object.Upload].
func (u *upload) Reserved() bool { return u.reserved }

// direct reopens a file past the page cache; it returns nil where that is not supported.
func direct(files vfs.FS, path string) vfs.File {
	f, err := files.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags|unix.O_DIRECT)
	}
	if err == nil {
		return f
	}
	_ = f.Close() // nothing was written to it
	return nil
}

// Piece implements [object.Upload]. WriteAt accepts any other size, anywhere, too.
func (u *upload) Piece() int { return pieceSize }

// Depth implements [object.Upload].
func (u *upload) Depth() int {
	if u.past != nil {
		return directDepth
	}
	return 1
}

// WriteAt implements [object.Upload].
func (u *upload) WriteAt(p []byte, off int64) (int, error) {
	n := 0
	if u.past != nil && !u.refused.Load() && object.Aligned(p, off) {
		var err error
		n, err = u.past.WriteAt(p[:len(p)-len(p)%object.Align], off)
		if errors.Is(err, syscall.EINVAL) {
			u.refused.Store(true) // this disk needs larger blocks, or does not support it
		} else if err != nil {
			return n, disk.NoSpace(err)
		}
	}
	if n == len(p) {
		return n, nil
	}
	more, err := u.file.WriteAt(p[n:], off+int64(n))
	return n + more, disk.NoSpace(err)
}

// Commit implements [object.Upload].
func (u *upload) Commit(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		err = u.file.Sync()
	}
	if err = errors.Join(err, u.close()); err != nil {
		u.remove()
		return fmt.Errorf("write %s: %w", u.temp, disk.NoSpace(err))
	}
	if u.mode == object.Replace {
		if err := u.d.fs.Rename(u.temp, u.path); err != nil {
			u.remove()
			return fmt.Errorf("rename %s: %w", u.temp, disk.NoSpace(err))
		}
		return nil
	}
	err = u.d.fs.Link(u.temp, u.path)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("create %s: %w", u.path, disk.NoSpace(err))
	}
	if gone := disk.Gone(u.d.fs.Remove(u.temp)); gone != nil {
		err = errors.Join(err, fmt.Errorf("remove %s: %w", u.temp, gone))
	}
	return err
}

// Abort implements [object.Upload].
func (u *upload) Abort() {
	open := false
	u.once.Do(func() { open, u.err = true, u.closeFiles() })
	if open {
		u.remove()
	}
}

func (u *upload) close() error {
	u.once.Do(func() { u.err = u.closeFiles() })
	return u.err
}

func (u *upload) closeFiles() error {
	var err error
	if u.past != nil {
		err = u.past.Close()
	}
	return errors.Join(err, u.file.Close())
}

// remove frees space on a disk that may be full. The caller reports the error that led here;
// if the file cannot be removed, it is removed with its directory.
func (u *upload) remove() { _ = u.d.fs.Remove(u.temp) }
