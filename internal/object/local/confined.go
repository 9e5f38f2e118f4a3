package local

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// confined is the system's filesystem, restricted to one directory. It follows no symbolic
// link on the way: the directory is [Dir]'s own, and another user may be able to write to it.
// Links that lead to its parent are the caller's responsibility.
type confined struct {
	vfs.FS
	root beneath.Root
	top  string // the parent of the directory
}

var _ vfs.FS = (*confined)(nil)

// confine returns the filesystem of a directory. A filesystem other than the system's own is
// a test's, and is returned unchanged.
func confine(files vfs.FS, dir string) vfs.FS {
	if files != vfs.Default {
		return files
	}
	top := filepath.Dir(filepath.Clean(dir))
	return &confined{FS: files, root: beneath.At(top), top: top}
}

// Open implements [vfs.FS]: it opens a regular file, without waiting for another process.
func (c *confined) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := c.root.Open(name)
	return opened(f, err, opts)
}

// OpenReadWrite implements [vfs.FS]. It refuses a file with a second name: that name may be
// in another directory, whose file would be written to.
func (c *confined) OpenReadWrite(name string, _ vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := c.root.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	info, err := file{f}.Stat()
	if err == nil && infoOf(info).Links > 1 {
		err = &fs.PathError{Op: "write", Path: name, Err: errSecondName}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return opened(f, nil, opts)
}

var errSecondName = errors.New("the file has a second name, by which it may be another's; remove it")

// OpenDir implements [vfs.FS].
func (c *confined) OpenDir(name string) (vfs.File, error) {
	d, err := c.root.OpenDir(name)
	return opened(d, err, nil)
}

// List implements [vfs.FS].
func (c *confined) List(dir string) ([]string, error) {
	d, err := c.root.OpenDir(dir)
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	return names, errors.Join(err, d.Close())
}

// Stat implements [vfs.FS]. A link is a [*beneath.TypeError].
func (c *confined) Stat(name string) (vfs.FileInfo, error) {
	info, err := c.root.Stat(name)
	if err != nil {
		return nil, err
	}
	return described{info}, nil
}

// MkdirAll implements [vfs.FS].
func (c *confined) MkdirAll(dir string, perm os.FileMode) error {
	if err := os.MkdirAll(c.top, perm); err != nil {
		return err
	}
	return c.root.MkdirAll(dir, perm)
}

// Remove implements [vfs.FS]. It removes a link itself.
func (c *confined) Remove(name string) error { return c.root.Remove(name) }

// RemoveAll implements [vfs.FS].
func (c *confined) RemoveAll(name string) error { return c.root.RemoveAll(name) }

// Rename implements [vfs.FS].
func (c *confined) Rename(from, to string) error { return c.root.Rename(from, to) }

// Link implements [vfs.FS].
func (c *confined) Link(from, to string) error { return c.root.Link(from, c.root, to) }

// linkTo gives a file a name below another directory.
func (c *confined) linkTo(other vfs.FS, from, to string) error {
	if there, ok := other.(*confined); ok {
		return c.root.Link(from, there.root, to)
	}
	return other.Link(from, to)
}

// Create implements [vfs.FS]. [Dir] does not use it.
func (c *confined) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	return nil, unused("create", name)
}

// ReuseForWrite implements [vfs.FS]. [Dir] does not use it.
func (c *confined) ReuseForWrite(from, _ string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	return nil, unused("reuse", from)
}

// Lock implements [vfs.FS]. [Dir] does not use it.
func (c *confined) Lock(name string) (io.Closer, error) { return nil, unused("lock", name) }

func unused(op, name string) error {
	return &fs.PathError{Op: op, Path: name, Err: errors.ErrUnsupported}
}

// Unwrap implements [vfs.FS].
func (c *confined) Unwrap() vfs.FS { return c.FS }

// opened converts a file of the system to a file of [vfs.FS].
func opened(f *os.File, err error, opts []vfs.OpenOption) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	for _, opt := range opts {
		opt.Apply(file{f})
	}
	return file{f}, nil
}

// file is an open file or directory.
type file struct{ *os.File }

var _ vfs.File = file{}

// Preallocate implements [vfs.File].
func (f file) Preallocate(offset, length int64) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, offset, length)
}

// Stat implements [vfs.File].
func (f file) Stat() (vfs.FileInfo, error) {
	info, err := f.File.Stat()
	if err != nil {
		return nil, err
	}
	return described{info}, nil
}

// SyncData implements [vfs.File].
func (f file) SyncData() error { return unix.Fdatasync(int(f.Fd())) }

// SyncTo implements [vfs.File].
func (f file) SyncTo(int64) (fullSync bool, err error) { return true, f.SyncData() }

// Prefetch implements [vfs.File]. It does nothing: readers request the bytes that they need.
func (file) Prefetch(int64, int64) error { return nil }

// described is a file's Info. Its device is never queried.
type described struct{ os.FileInfo }

// DeviceID implements [vfs.FileInfo].
func (described) DeviceID() vfs.DeviceID { return vfs.DeviceID{} }
