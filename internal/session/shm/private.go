package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/private"
)

// ErrNotPrivate is [private.ErrNotPrivate].
var ErrNotPrivate = private.ErrNotPrivate

func refused(path string, why any) error {
	return fmt.Errorf("open %s: %w: %v", path, ErrNotPrivate, why)
}

func failed(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

// openDirectory opens a directory in another one by name. It follows no link, and
// returns [ErrNotPrivate] unless the directory is this user's and gives others no
// rights.
func openDirectory(at *os.File, name string) (*os.File, error) {
	path := filepath.Join(at.Name(), name)
	fd, err := unix.Openat(int(at.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EACCES) {
		return nil, refused(path, err)
	}
	if err != nil {
		return nil, failed("open", path, err)
	}
	dir := os.NewFile(uintptr(fd), path)
	is, err := dir.Stat()
	if err == nil {
		err = private.Directory(path, is, "look at what is in it, and remove it")
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// openFile opens a file in a directory by name. It follows no link and waits for
// no pipe. It returns [ErrNotPrivate] unless the file is a regular file of this
// user, with a single link and without permissions for others. A file that loses
// its name meanwhile does not exist.
func openFile(at *os.File, name string, flags int) (*os.File, error) {
	path := filepath.Join(at.Name(), name)
	fd, err := unix.Openat(int(at.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EACCES) {
		return nil, refused(path, err)
	}
	if err != nil {
		return nil, failed("open", path, err)
	}
	file := os.NewFile(uintptr(fd), path)
	is, err := file.Stat()
	switch {
	case err != nil:
	case is.Sys().(*syscall.Stat_t).Nlink == 0:
		err = failed("open", path, unix.ENOENT)
	default:
		err = private.OnlyName(path, is, "remove it")
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

func mine(is unix.Stat_t) bool { return is.Uid == uint32(os.Geteuid()) }
