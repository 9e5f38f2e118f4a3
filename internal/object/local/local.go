// Package local keeps the files of checkpoints in a directory, on a disk or on NFS. It works
// on a [vfs.FS], so that tests can crash the disk below it.
//
//	Create   opens NAME.RANDOM.tmp, and reserves its blocks where the filesystem can:
//	         a full disk, or a quota, is detected before anything is written
//	WriteAt  goes past the page cache where the filesystem supports it: see upload.go
//	Commit   fsync, then rename; an exclusive commit links instead, which never
//	         replaces
//	Sync     fsync of the directory; MakeDir also syncs each directory above it, up to
//	         the parent of the root
//
// Below the parent of the directory no symbolic link is followed: see confined.go.
package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Dir is a directory that keeps files.
type Dir struct {
	fs  vfs.FS
	dir string
}

var _ object.Backend = (*Dir)(nil)

// New returns the backend of a directory. It touches no files: the first MakeDir makes the
// directory, and reading needs no permission to write.
func New(files vfs.FS, dir string) *Dir { return &Dir{fs: confine(files, dir), dir: dir} }

// Files returns the filesystem through which the directory is reached, for readers of the
// files of another program in it.
func (d *Dir) Files() vfs.FS { return d.fs }

// Path implements [object.Backend].
func (d *Dir) Path(name string) string { return d.fs.PathJoin(d.dir, name) }

// at returns the path of a name; only the name of the root may be empty.
func (d *Dir) at(ctx context.Context, name string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if name == "" {
		return d.dir, nil
	}
	return d.Path(name), object.Validate(name)
}

// MakeDir implements [object.Backend].
func (d *Dir) MakeDir(ctx context.Context, dir string) error {
	path, err := d.at(ctx, dir)
	if err != nil {
		return err
	}
	err = d.fs.MkdirAll(path, 0o755)
	if errors.Is(err, os.ErrPermission) && d.reopen(path) {
		err = d.fs.MkdirAll(path, 0o755)
	}
	if err != nil {
		return fmt.Errorf("make directory %s: %w", path, disk.NoSpace(err))
	}
	for ; path != d.dir; path = d.fs.PathDir(path) {
		if err := disk.SyncDir(d.fs, path); err != nil {
			return err
		}
	}
	if err := disk.SyncDir(d.fs, d.dir); err != nil {
		return err
	}
	return disk.SyncDir(d.fs, d.fs.PathDir(d.dir))
}

// reopen removes the directory that prevents path from being made: a directory that a member
// of the group made before it was killed, and did not give to the group. If not empty, the
// directory stays.
func (d *Dir) reopen(path string) (again bool) {
	for ; path != d.dir; path = d.fs.PathDir(path) {
		if _, err := d.fs.Stat(path); err == nil {
			return d.fs.Remove(path) == nil
		}
	}
	return false
}

// Sync implements [object.Backend].
func (d *Dir) Sync(ctx context.Context, dir string) error {
	path, err := d.at(ctx, dir)
	if err != nil {
		return err
	}
	return disk.SyncDir(d.fs, path)
}

// Open implements [object.Backend].
func (d *Dir) Open(ctx context.Context, name string) (object.Object, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return nil, err
	}
	return Open(d.fs, path)
}

// Open opens a file in any directory. It refuses everything but regular files, since opening
// another type of file may wait for another process.
func Open(files vfs.FS, path string) (object.Object, error) {
	if _, looks := files.(*confined); !looks {
		if err := disk.Regular(files, path); err != nil {
			return nil, err
		}
	}
	f, err := files.Open(path)
	if err != nil {
		return nil, err
	}
	return openFile{f}, nil
}

// object is a file that is read.
type openFile struct{ vfs.File }

// Stat implements [object.Object].
func (o openFile) Stat() (object.Info, error) {
	info, err := o.File.Stat()
	if err != nil {
		return object.Info{}, err
	}
	return infoOf(info), nil
}

// Stat implements [object.Backend].
func (d *Dir) Stat(ctx context.Context, name string) (object.Info, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return object.Info{}, err
	}
	return Stat(d.fs, path)
}

// Stat returns the Info of a file in any directory.
func Stat(files vfs.FS, path string) (object.Info, error) {
	info, err := files.Stat(path)
	if err != nil {
		return object.Info{}, err
	}
	return infoOf(info), nil
}

func infoOf(of vfs.FileInfo) object.Info {
	info := object.Info{Size: of.Size(), Modified: of.ModTime(), Dir: of.IsDir()}
	if s, ok := of.Sys().(*syscall.Stat_t); ok {
		info.Links, info.ID = uint64(s.Nlink), strconv.FormatUint(uint64(s.Dev), 16)+":"+strconv.FormatUint(s.Ino, 16) //nolint:unconvert // their width depends on the machine
	}
	return info
}

// List implements [object.Backend].
func (d *Dir) List(ctx context.Context, dir string) ([]object.Entry, error) {
	path, err := d.at(ctx, dir)
	if err != nil {
		return nil, err
	}
	names, err := d.fs.List(path)
	entries := make([]object.Entry, len(names))
	for i, name := range names {
		entries[i].Name = name
	}
	return entries, err
}

// Get implements [object.Backend].
func (d *Dir) Get(ctx context.Context, name string, most int64) ([]byte, error) {
	f, err := d.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	var data []byte
	switch {
	case err != nil:
	case info.Size > most:
		err = fmt.Errorf("%s has %d bytes: %w", d.Path(name), info.Size, object.ErrTooLarge)
	default:
		data, err = io.ReadAll(io.NewSectionReader(f, 0, info.Size))
	}
	return data, errors.Join(err, f.Close())
}

// Reading implements [object.Backend].
func (d *Dir) Reading() object.Reading { return object.Reading{} }

// Remove implements [object.Backend].
func (d *Dir) Remove(ctx context.Context, names ...string) error {
	var problems error
	for _, name := range names {
		path, err := d.at(ctx, name)
		if err == nil {
			err = disk.Gone(d.fs.Remove(path))
		}
		problems = errors.Join(problems, err)
	}
	return problems
}

// Link implements [object.Backend].
func (d *Dir) Link(ctx context.Context, from, to string, mode object.Mode) error {
	return d.LinkFrom(ctx, d, from, to, mode)
}

// LinkFrom gives a file in another directory on the same filesystem a name in this one.
func (d *Dir) LinkFrom(ctx context.Context, other *Dir, from, to string, mode object.Mode) error {
	old, err := other.at(ctx, from)
	if err != nil {
		return err
	}
	path, err := d.at(ctx, to)
	if err != nil {
		return err
	}
	name := path
	if mode == object.Replace {
		name = partial(path)
	}
	if theirs, ok := other.fs.(*confined); ok {
		err = theirs.linkTo(d.fs, old, name)
	} else {
		err = d.fs.Link(old, name)
	}
	// The kernel's errors for filesystems without links, and for another disk. For some
	// filesystems it returns EPERM, which it also returns for another user's file.
	for _, unable := range []error{syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EXDEV} {
		if errors.Is(err, unable) {
			return fmt.Errorf("link %s to %s: %w: %w", old, path, errors.ErrUnsupported, err)
		}
	}
	if err == nil && mode == object.Replace {
		err = d.fs.Rename(name, path)
		// The old name remains after an error, and if both were names of one file. If it
		// cannot be removed, it is removed with its directory.
		_ = d.fs.Remove(name)
	}
	return disk.NoSpace(err)
}

// Usage implements [object.Backend].
func (d *Dir) Usage(ctx context.Context) (object.Usage, error) {
	// The directory and its parent may not have been made yet.
	for dir := d.dir; ; {
		if err := ctx.Err(); err != nil {
			return object.Usage{}, err
		}
		usage, err := d.fs.GetDiskUsage(dir)
		parent := d.fs.PathDir(dir)
		if errors.Is(err, os.ErrNotExist) && parent != dir {
			dir = parent
			continue
		}
		if errors.Is(err, vfs.ErrUnsupported) {
			err = errors.ErrUnsupported
		}
		if err != nil {
			return object.Usage{}, fmt.Errorf("free space of %s: %w", dir, err)
		}
		return object.Usage{Free: usage.AvailBytes, Size: usage.UsedBytes + usage.AvailBytes}, nil
	}
}
