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

// A large file is opened twice. One descriptor goes past the page cache, with
// which a save would push out what the training has there, and pay for a copy;
// the other takes what such writes cannot have: the end of a file, which is no
// whole block. Whether the filesystem can is found out by asking: first for the
// flag, then with the first write. Measured on ext4 over NVMe: 2 writes of
// 4 MiB at a time are as fast as any number of any size, and as files whose
// blocks were not reserved.
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
	past       vfs.File // past the page cache; nil if the filesystem has no such thing
	reserved   bool
	refused    atomic.Bool // a write that goes there was refused

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

// partial is a name that no other upload has, of this process or another, on
// this machine or another: who writes under a name that is his alone can give no
// other's bytes the name that all see.
func partial(path string) string {
	return fmt.Sprintf("%s.%016x%s", path, rand.Uint64(), object.Partial)
}

// reserve gives a file its blocks. Where that cannot be asked for, a full disk
// fails a write instead.
func reserve(f vfs.File, from, size int64) (done bool, err error) {
	// A signal that comes meanwhile, such as the runtime's own, is no answer of the disk.
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

// direct opens a file once more, past the page cache; nil if that cannot be
// had.
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

// Piece implements [object.Upload]. Writes of any other size, anywhere, are
// taken as well.
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
			u.refused.Store(true) // this disk wants larger blocks, or none at all
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

// remove makes room on a disk that may be full. The error that led here is the
// one to report; what cannot be removed goes with its directory.
func (u *upload) remove() { _ = u.d.fs.Remove(u.temp) }
