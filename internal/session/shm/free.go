package shm

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"
)

// Free removes this user's directories in shared whose names match a pattern and
// that no live process owns, including those of former versions. It returns their
// paths and total size in bytes. The error names the directories that cannot be
// removed; the others are freed anyway.
func Free(shared, pattern string) (freed []string, bytes int64, err error) {
	errs := each(shared, pattern, func(parent *os.File, name string) error {
		n, gone, err := free(parent, name)
		if gone {
			freed, bytes = append(freed, parent.Name()+"/"+name), bytes+n
		}
		return err
	})
	return freed, bytes, errors.Join(errs...)
}

// Look calls f with this user's directories in shared whose names match a
// pattern. It takes no lock: their owners may be alive. It skips directories that
// others can enter. It closes the directory when f returns.
func Look(shared, pattern string, f func(*Directory) error) error {
	errs := each(shared, pattern, func(parent *os.File, name string) error {
		dir, err := openDirectory(parent, name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // its owner has just ended
		}
		if err != nil {
			return err
		}
		defer dir.Close()
		return f(&Directory{name: name, parent: parent, dir: dir})
	})
	return errors.Join(slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, ErrNotPrivate) })...)
}

// each calls f with the name of every directory of this user that matches a
// pattern, below every parent.
func each(shared, pattern string, f func(parent *os.File, name string) error) []error {
	parents, errs := existingParents(shared)
	for _, parent := range parents {
		all, err := ownNames(parent)
		errs = append(errs, err)
		for _, name := range all {
			matches, err := path.Match(pattern, name)
			if matches {
				err = f(parent, name)
			}
			errs = append(errs, err)
		}
		errs = append(errs, parent.Close())
	}
	return errs
}

// freeLeft frees the directories in a parent that match a pattern, and logs them.
func freeLeft(parent *os.File, pattern string, log *slog.Logger) {
	left, err := names(parent)
	if err != nil {
		log.Warn("shared memory of killed servers not freed", "directory", parent.Name(), "error", err)
	}
	for _, name := range left {
		if matches, _ := path.Match(pattern, name); !matches {
			continue
		}
		if n, gone, err := free(parent, name); err != nil {
			log.Warn("shared memory of a killed server not freed", "directory", parent.Name()+"/"+name, "error", err)
		} else if gone && n > 0 {
			log.Info("shared memory of a killed server freed", "directory", parent.Name()+"/"+name, "bytes", n)
		}
	}
}

// free removes one directory, unless a live process owns it, and returns its size
// in bytes. It holds the lock meanwhile: a new owner sees that the lock has no
// name any more and creates another.
func free(parent *os.File, name string) (bytes int64, gone bool, err error) {
	if unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR) == nil {
		return 0, true, nil // it was empty
	}
	dir, err := openDirectory(parent, name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil // its owner has just ended
	}
	if err != nil {
		return 0, false, err
	}
	defer dir.Close()
	lock, err := takeLock(dir)
	if errors.Is(err, ErrOwned) {
		err = nil
	}
	if lock == nil {
		return 0, false, err
	}
	defer lock.Close()
	bytes, err = sizeOf(dir)
	if err = errors.Join(err, remove(parent, name, dir)); err != nil {
		return 0, false, err
	}
	return bytes, true, nil
}
