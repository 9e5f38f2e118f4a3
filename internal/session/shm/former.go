package shm

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Former returns the paths and the total size in bytes of this user's directories
// in shared that former versions made, without a parent, whose names match a
// pattern and that no live process owns. It changes nothing: [Free] frees them.
func Former(shared, pattern string) (left []string, bytes int64, err error) {
	root, err := os.Open(filepath.Clean(shared))
	if err != nil {
		return nil, 0, err
	}
	defer root.Close()
	all, err := ownNames(root)
	errs := []error{err}
	for _, name := range all {
		matches, err := path.Match(pattern, name)
		if err == nil && matches {
			var n int64
			var dead bool
			if n, dead, err = leftIn(root, name); dead {
				left, bytes = append(left, filepath.Join(shared, name)), bytes+n
			}
		}
		errs = append(errs, err)
	}
	return left, bytes, errors.Join(errs...)
}

// Left is [Former] for the directories of this version whose names are a prefix and a number. It leaves out
// empty ones: a process that starts makes the directory before its lock.
func Left(shared, prefix string) (left []string, bytes int64, err error) {
	errs := each(shared, prefix+"*", func(parent *os.File, name string) error {
		if _, err := strconv.Atoi(strings.TrimPrefix(name, prefix)); err != nil {
			return nil
		}
		n, dead, err := leftIn(parent, name)
		if dead && n > 0 {
			left, bytes = append(left, filepath.Join(parent.Name(), name)), bytes+n
		}
		return err
	})
	return left, bytes, errors.Join(errs...)
}

// leftIn returns the size of a directory in bytes, and whether no process owns
// it.
func leftIn(at *os.File, name string) (bytes int64, dead bool, err error) {
	dir, err := openDirectory(at, name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil // freed meanwhile
	}
	if err != nil {
		return 0, false, err
	}
	defer dir.Close()
	lock, err := openFile(dir, lockName, unix.O_RDONLY)
	if err == nil {
		defer lock.Close()
		err = unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return 0, false, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, false, err
	}
	bytes, err = sizeOf(dir)
	return bytes, true, err
}

// sizeOf returns the total size in bytes of a directory's files.
func sizeOf(dir *os.File) (bytes int64, err error) {
	files, err := names(dir)
	for _, file := range files {
		var is unix.Stat_t
		err = errors.Join(err, unix.Fstatat(int(dir.Fd()), file, &is, unix.AT_SYMLINK_NOFOLLOW))
		bytes += is.Size
	}
	return bytes, err
}
