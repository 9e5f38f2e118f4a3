package beneath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// deepest limits how many nested directories are removed and walked. A store has
	// fewer than ten. Each holds a descriptor while the levels below it are processed.
	deepest = 64

	// attempts limits how often the removal of a directory restarts because its
	// entries change meanwhile.
	attempts = 16
)

// RemoveAll removes a path and everything below it. It removes a link itself, not its
// target. A missing path is success.
func (r Root) RemoveAll(path string) error {
	err := r.in("remove", path, func(dir int, base string) error { return removeAll(dir, base, path, deepest) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeAll removes base in dir. It opens a directory before emptying it and removes
// the entries relative to that descriptor. So nothing outside the directory is removed,
// even if its name is replaced.
func removeAll(dir int, base, path string, levels int) error {
	if levels == 0 {
		return &fs.PathError{Op: "remove", Path: path, Err: fmt.Errorf("more than %d directories inside one another", deepest)}
	}
	var err error
	for range attempts {
		if err = remove(dir, base); err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTDIR) {
			break
		}
		if inner := empty(dir, base, path, levels); inner != nil && !errors.Is(inner, unix.ENOTDIR) {
			return inner
		}
	}
	return &fs.PathError{Op: "remove", Path: path, Err: err}
}

// remove removes a file, a link itself, or an empty directory.
func remove(dir int, base string) error {
	err := retry(func() error { return unix.Unlinkat(dir, base, 0) })
	// For a directory, Linux returns EISDIR and POSIX EPERM.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	at := retry(func() error { return unix.Unlinkat(dir, base, unix.AT_REMOVEDIR) })
	if errors.Is(at, unix.ENOTDIR) && errors.Is(err, unix.EPERM) {
		return err // a file without permission to remove it
	}
	return at
}

// empty removes all entries of a directory.
func empty(dir int, base, path string, levels int) error {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "remove", Path: path, Err: err}
	}
	d := os.NewFile(uintptr(fd), path)
	names, err := d.Readdirnames(-1)
	for _, name := range names {
		if refused := removeAll(fd, name, filepath.Join(path, name), levels-1); err == nil {
			err = refused // the first one is enough
		}
	}
	return errors.Join(err, d.Close())
}

// WalkDir calls visit for a path and everything below it, in lexical order, as
// [filepath.WalkDir] does. It visits links and does not follow them.
func (r Root) WalkDir(path string, visit fs.WalkDirFunc) error {
	info, err := r.Lstat(path)
	if err != nil {
		err = visit(path, nil, err)
	} else {
		err = r.walk(path, fs.FileInfoToDirEntry(info), visit, deepest)
	}
	if errors.Is(err, fs.SkipDir) || errors.Is(err, fs.SkipAll) {
		return nil
	}
	return err
}

func (r Root) walk(path string, e fs.DirEntry, visit fs.WalkDirFunc, levels int) error {
	err := visit(path, e, nil)
	if err != nil || !e.IsDir() {
		if errors.Is(err, fs.SkipDir) && e.IsDir() {
			err = nil
		}
		return err
	}
	if levels == 0 {
		return visit(path, e, &fs.PathError{Op: "list", Path: path, Err: fmt.Errorf("more than %d directories inside one another", deepest)})
	}
	entries, err := r.ReadDir(path)
	if err != nil {
		if err = visit(path, e, err); err != nil {
			if errors.Is(err, fs.SkipDir) {
				err = nil
			}
			return err
		}
	}
	for _, sub := range entries {
		if err := r.walk(filepath.Join(path, sub.Name()), sub, visit, levels-1); err != nil {
			if errors.Is(err, fs.SkipDir) {
				break
			}
			return err
		}
	}
	return nil
}

// Plain returns an error unless a path and everything below it are directories and regular files. A
// missing path is fine.
func (r Root) Plain(path string) error {
	return r.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // or it was removed meanwhile
		case err != nil:
			return err
		case !e.IsDir() && !e.Type().IsRegular():
			return &TypeError{Path: path, Type: e.Type()}
		}
		return nil
	})
}

// Glob returns the entries of a directory whose names match a pattern of
// [filepath.Match], sorted. A missing directory has none.
func (r Root) Glob(dir, pattern string) ([]string, error) {
	entries, err := r.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var found []string
	for _, e := range entries {
		ok, merr := filepath.Match(pattern, e.Name())
		if merr != nil {
			return nil, merr
		}
		if ok {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found, err
}

// Chtimes sets the access and modification times of a file.
func (r Root) Chtimes(path string, at time.Time) error {
	t := unix.NsecToTimespec(at.UnixNano())
	return r.in("chtimes", path, func(dir int, base string) error {
		return unix.UtimesNanoAt(dir, base, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
	})
}
