package data

import (
	"errors"
	"io"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// lockDir locks a directory until it is closed, or this process ends. One that
// is no directory of the system has no lock, and needs none: only this process
// sees it.
// A link is not followed.
func lockDir(data, path string) (io.Closer, error) {
	f, err := beneath.At(filepath.Dir(data)).OpenDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
