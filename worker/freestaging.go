package worker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// SharedDir is where staging slots live on this machine, and whether that is
// memory: without /dev/shm they are files on a disk.
func SharedDir() (dir string, memory bool) {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err == nil && info.IsDir() {
		return shm, true
	}
	return os.TempDir(), false
}

// FreeStaging removes the staging directories in shared, such as /dev/shm, that
// no trainer uses: those whose lock is free. It returns their paths and the
// bytes of memory that they held. A save that a dead trainer had staged in one
// of them can then not be finished any more. Directories that it may not
// remove are in the error, beside the others that were freed.
func FreeStaging(shared string) (freed []string, bytes int64, err error) {
	dirs, err := filepath.Glob(filepath.Join(shared, "ckptstore-*-n[0-9]*"))
	if err != nil {
		return nil, 0, err
	}
	var errs []error
	for _, dir := range dirs {
		n, gone, err := freeStaging(dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("free %s: %w", dir, err))
		}
		if gone {
			freed, bytes = append(freed, dir), bytes+n
		}
	}
	return freed, bytes, errors.Join(errs...)
}

// freeStaging removes one directory, unless a trainer has it. It holds the
// lock meanwhile: a trainer that comes sees that the lock is not that of the
// directory any more, and makes another.
func freeStaging(dir string) (bytes int64, gone bool, err error) {
	if os.Remove(dir) == nil {
		return 0, true, nil // it was empty
	}
	path := filepath.Join(dir, "lock")
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil // its trainer has just ended
	}
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = lock.Close() }()
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	mine, err := lock.Stat()
	if err != nil {
		return 0, false, err
	}
	if now, err := os.Stat(path); err != nil || !os.SameFile(mine, now) {
		return 0, false, nil // another trainer has made the directory anew
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, false, err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return 0, false, err
		}
		bytes += info.Size()
	}
	if err := os.RemoveAll(dir); err != nil {
		return 0, false, err
	}
	return bytes, true, nil
}
