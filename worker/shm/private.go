package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrNotPrivate reports a directory or file that another user owns, can open, or
// may have put there. It is an [fs.ErrPermission]. Test with errors.Is.
var ErrNotPrivate error = notPrivate{}

type notPrivate struct{}

func (notPrivate) Error() string { return "not private to this user" }

func (notPrivate) Is(target error) bool { return target == fs.ErrPermission }

func refused(path string, why any) error {
	return fmt.Errorf("open %s: %w: %v", path, ErrNotPrivate, why)
}

func failed(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

// openDirectory opens the directory with a name in another one. It follows no link,
// and returns [ErrNotPrivate] unless the directory is this user's and has mode 0700.
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
	var is unix.Stat_t
	if err = unix.Fstat(fd, &is); err == nil && (!mine(is) || is.Mode&0o777 != 0o700) {
		err = refused(path, fmt.Sprintf("user %d, mode %04o: look at what is in it, and remove it", is.Uid, is.Mode&0o7777))
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// openFile opens the file with a name in a directory. It follows no link and waits
// for no pipe, and returns [ErrNotPrivate] unless the file is a regular one of this
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
	var is unix.Stat_t
	err = unix.Fstat(fd, &is)
	switch {
	case err != nil:
		err = failed("stat", path, err)
	case is.Nlink == 0:
		err = failed("open", path, unix.ENOENT)
	case !mine(is) || is.Mode&unix.S_IFMT != unix.S_IFREG || is.Mode&0o077 != 0 || is.Nlink != 1:
		err = refused(path, fmt.Sprintf("user %d, mode %06o, %d links: remove it", is.Uid, is.Mode, is.Nlink))
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

func mine(is unix.Stat_t) bool { return is.Uid == uint32(os.Geteuid()) }
