package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrOwned says that another process that is alive owns the directory.
var ErrOwned = errors.New("another process owns it")

// Own makes dir and takes the lock in it. An owner that ends removes the
// directory while it holds the lock, so a lock is only good if its file is still
// the one at that path. It is given up by closing the file.
func Own(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = lock.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = ErrOwned
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		mine, err := lock.Stat()
		if err != nil {
			return nil, err
		}
		if now, err := os.Stat(path); err == nil && os.SameFile(mine, now) {
			return lock, nil
		}
		_ = lock.Close()
	}
}

// Remove removes an owner's directory. The lock is held meanwhile; another process
// that looks whether the directory is a leftover may still make the file of a new
// one in it, between the last file's removal and the directory's.
func Remove(dir string) error {
	for range 100 {
		if err := os.RemoveAll(dir); !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
	}
	return os.RemoveAll(dir)
}
