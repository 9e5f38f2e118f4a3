package shm

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Free removes one directory, unless a process that is alive owns it, and says
// how many bytes were in it. It holds the lock meanwhile: an owner that comes sees
// that the lock is not that of the directory any more, and makes another.
func Free(dir string) (bytes int64, gone bool, err error) {
	if os.Remove(dir) == nil {
		return 0, true, nil // it was empty
	}
	path := filepath.Join(dir, "lock")
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil // its owner has just ended
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
		return 0, false, nil // another owner has made the directory anew
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
	if err := Remove(dir); err != nil {
		return 0, false, err
	}
	return bytes, true, nil
}
