// Package beneath reaches files below a directory and follows no symbolic link
// on the way, so that a user who can write to a store cannot lead another user's
// process out of it.
//
//	/mnt/link/store/data/run/step-1
//	└── the root ──┘└─── below ───┘
//	 links are       a link in any part is
//	 the caller's    a [*TypeError]
//
// [os.Root] refuses only links that lead out of it. It follows a link within it, so a
// removal would empty the wrong directory.
//
// Each call opens the directory that holds the name, with openat2 and
// RESOLVE_NO_SYMLINKS, and works relative to that descriptor. So replacing a directory
// by a link meanwhile has no effect. Without openat2 (an old kernel, a container), and
// to find out which part is a link, the call walks: it opens every directory on the
// way relative to its parent, with O_NOFOLLOW. No call follows a link or waits for the
// other end of a named pipe.
//
// A file or directory made in a group's directory belongs to the group: see package
// share.
package beneath

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/share"
)

// Root is a directory below which no symbolic link is followed. It holds no
// descriptor: the directory may be made, renamed and replaced at any time. All
// paths given to its methods begin with the root's path.
type Root struct {
	dir   string
	walks bool // do not use openat2; set by tests
}

// At returns the root at a directory. It does not access the disk.
func At(dir string) Root { return Root{dir: filepath.Clean(dir)} }

// OpenFile opens a regular file. It refuses directories, pipes and devices. It also
// refuses the flag O_TRUNC, which would empty a file before it is checked.
func (r Root) OpenFile(path string, flag int, perm fs.FileMode) (*os.File, error) {
	if flag&os.O_TRUNC != 0 {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrInvalid}
	}
	// O_NONBLOCK: opening a pipe must not wait for its other end.
	fd, err := r.open(path, flag|unix.O_NONBLOCK, perm)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		err = regular(path, modeOf(st))
	}
	if err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Open opens a regular file for reading.
func (r Root) Open(path string) (*os.File, error) { return r.OpenFile(path, os.O_RDONLY, 0) }

// ReadFile returns the content of a small file.
func (r Root) ReadFile(path string) ([]byte, error) {
	f, err := r.Open(path)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(f)
	return data, errors.Join(err, f.Close())
}

// OpenDir opens a directory, to list, lock or sync it.
func (r Root) OpenDir(path string) (*os.File, error) {
	fd, err := r.open(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// SyncDir makes the names in a directory durable.
func (r Root) SyncDir(path string) error {
	d, err := r.OpenDir(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// ReadDir lists a directory, sorted by name. The entry of a link has the type of the
// link.
func (r Root) ReadDir(path string) ([]fs.DirEntry, error) {
	d, err := r.OpenDir(path)
	if err != nil {
		return nil, err
	}
	entries, err := d.ReadDir(-1)
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, errors.Join(err, d.Close())
}

// Lstat describes a file, a directory, or a link itself.
func (r Root) Lstat(path string) (fs.FileInfo, error) {
	fd, err := r.open(path, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	info, err := f.Stat()
	return info, errors.Join(err, f.Close())
}

// Stat describes a file or directory. A link is a [*TypeError].
func (r Root) Stat(path string) (fs.FileInfo, error) {
	info, err := r.Lstat(path)
	if err == nil && info.Mode().Type() == fs.ModeSymlink {
		return nil, &TypeError{Path: path, Type: fs.ModeSymlink}
	}
	return info, err
}

// MkdirAll makes a directory and its parents below the root, which must exist.
func (r Root) MkdirAll(path string, perm fs.FileMode) error {
	name, err := r.name("mkdir", path)
	if err != nil {
		return err
	}
	dir, err := r.top()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	at := r.dir
	for _, part := range parts(name) {
		if part == "." {
			break // the root itself
		}
		at = filepath.Join(at, part)
		err := retry(func() error { return unix.Mkdirat(dir, part, uint32(perm.Perm())) })
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return explain("mkdir", dir, part, at, err)
		}
		// Another process of this user may have made it, and not shared it yet.
		if share.IsOfGroup(uintptr(dir)) {
			if err := share.Entry(dir, part); err != nil {
				return explain("share", dir, part, at, err)
			}
		}
		if dir, err = step(dir, part, at); err != nil {
			return err
		}
	}
	return nil
}

// Rename renames a file or directory and replaces an existing target.
func (r Root) Rename(from, to string) error {
	return r.in("rename", from, func(old int, base string) error {
		return r.in("rename", to, func(dir int, name string) error { return unix.Renameat(old, base, dir, name) })
	})
}

// Link gives the regular file at from, below this root, a second name below
// another root. It refuses a link, a pipe or a device. It checks the new name, not
// the old one, which may be replaced at any moment.
func (r Root) Link(from string, other Root, to string) error {
	return r.in("link", from, func(old int, base string) error {
		return other.in("link", to, func(dir int, name string) error {
			if err := unix.Linkat(old, base, dir, name, 0); err != nil {
				return err
			}
			err := plain(dir, name, from)
			if err != nil {
				err = errors.Join(err, unix.Unlinkat(dir, name, 0))
			}
			return err
		})
	})
}

// Remove removes a file, a link itself, or an empty directory.
func (r Root) Remove(path string) error { return r.in("remove", path, remove) }

// in calls do with a descriptor of the directory that holds path, and the base name.
func (r Root) in(op, path string, do func(dir int, base string) error) error {
	name, err := r.name(op, path)
	if err != nil {
		return err
	}
	dir, err := r.top()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	parent, base := filepath.Split(name)
	if parent != "" {
		if dir, err = r.reach(dir, filepath.Clean(parent)); err != nil {
			return err
		}
	}
	return explain(op, dir, base, path, retry(func() error { return do(dir, base) }))
}

// open opens a path. With O_PATH the result may be a link.
func (r Root) open(path string, flag int, perm fs.FileMode) (fd int, err error) {
	err = r.in("open", path, func(dir int, base string) (err error) {
		fd, err = unix.Openat(dir, base, flag|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(perm.Perm()))
		if err != nil || flag&os.O_CREATE == 0 {
			return err
		}
		if err = share.Descriptor(uintptr(fd), uintptr(dir)); err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
		return err
	})
	return fd, err
}

// name returns the part of a path below the root.
func (r Root) name(op, path string) (string, error) {
	name, err := filepath.Rel(r.dir, path)
	if err != nil || !filepath.IsLocal(name) || strings.ContainsRune(path, 0) {
		return "", &fs.PathError{Op: op, Path: path, Err: fmt.Errorf("not below %s: %w", r.dir, fs.ErrInvalid)}
	}
	return name, nil
}

func parts(name string) []string { return strings.Split(name, string(filepath.Separator)) }

// directory holds the open flags of a directory on the way: search permission is
// enough.
const directory = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC

// top opens the root's own directory. Links may lead to it.
func (r Root) top() (dir int, err error) {
	err = retry(func() (err error) {
		dir, err = unix.Open(r.dir, directory, 0)
		return err
	})
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: r.dir, Err: err}
	}
	return dir, nil
}

// reach opens a directory below dir, the root's own, and closes dir. On an error it
// returns a descriptor that is still open, dir or another.
func (r Root) reach(dir int, name string) (last int, err error) {
	if !r.walks {
		how := unix.OpenHow{Flags: directory, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH}
		err = retry(func() (err error) {
			last, err = unix.Openat2(dir, name, &how)
			return err
		})
		switch {
		case err == nil:
			return last, unix.Close(dir)
		case errors.Is(err, unix.ENOENT):
			return dir, &fs.PathError{Op: "open", Path: filepath.Join(r.dir, name), Err: err}
		}
	}
	at := r.dir
	for _, part := range parts(name) {
		at = filepath.Join(at, part)
		if dir, err = step(dir, part, at); err != nil {
			return dir, err
		}
	}
	return dir, nil
}

// step opens a directory in dir and closes dir. On an error it returns dir, still
// open.
func step(dir int, name, path string) (next int, err error) {
	err = retry(func() (err error) {
		next, err = unix.Openat(dir, name, directory|unix.O_NOFOLLOW, 0)
		return err
	})
	if err != nil {
		return dir, explain("open", dir, name, path, err)
	}
	return next, unix.Close(dir)
}

// retry repeats a system call while signals interrupt it.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
