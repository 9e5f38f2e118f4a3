// Package share gives files and directories that a process makes in a group's directory
// to that group.
//
// A directory is a group's if its members can write to it and new entries inherit the
// group:
//
//	drwxrws---   mode 2770: set-group-ID, written by the group
//
// A new file there becomes 0660 and a new directory 2770, whatever the umask and the
// mode it was made with. Other directories are left alone. So the rule needs no setting:
// a group's directory passes it on level by level.
//
// The package changes only entries that this process's user owns, through a descriptor
// of each. It follows no symbolic link. It skips a file with a second name: another
// member may have linked a file of this user there that is not the group's.
package share

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Modes of a group's directories and files.
const (
	dirMode  = unix.S_ISGID | 0o770
	fileMode = 0o660
)

// ofGroup reports whether a directory is a group's.
func ofGroup(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&(unix.S_ISGID|0o020) == unix.S_ISGID|0o020
}

// File gives a new file to the group of its directory. Call it before the file gets the
// name under which other processes look for it.
func File(f *os.File) error {
	dir, err := unix.Open(filepath.Dir(f.Name()), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(Descriptor(f.Fd(), uintptr(dir)), unix.Close(dir))
	}
	return wrap(f.Name(), err)
}

// Descriptor gives an open file or directory to the group of its open directory dir.
func Descriptor(fd, dir uintptr) error {
	var above, st unix.Stat_t
	err := unix.Fstat(int(dir), &above)
	if err != nil || !ofGroup(&above) {
		return err
	}
	if err = unix.Fstat(int(fd), &st); err == nil {
		err = setMode(int(fd), &st, above.Gid)
	}
	return err
}

// IsOfGroup reports whether an open directory is a group's.
func IsOfGroup(dir uintptr) bool {
	var st unix.Stat_t
	return unix.Fstat(int(dir), &st) == nil && ofGroup(&st)
}

// setMode sets the mode of an open file or directory in a group's directory. It leaves
// other kinds of file, and files of another user or group, as they are.
func setMode(fd int, st *unix.Stat_t, gid uint32) error {
	mode := uint32(0)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		mode = dirMode
	case unix.S_IFREG:
		if st.Nlink != 1 {
			return nil
		}
		mode = fileMode
	default:
		return nil
	}
	// A file with another group was moved here, not made here.
	if int(st.Uid) != os.Geteuid() || st.Gid != gid || st.Mode&0o7777 == mode {
		return nil
	}
	// By path, because fchmod fails on an O_PATH descriptor.
	return unix.Fchmodat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), mode, 0)
}

// MkdirAll is [os.MkdirAll]. It gives the directories that it makes in a group's
// directory to the group.
func MkdirAll(dir string, perm fs.FileMode) error {
	dir = filepath.Clean(dir)
	top := dir
	for {
		_, err := os.Stat(top)
		if err == nil || !errors.Is(err, fs.ErrNotExist) || filepath.Dir(top) == top {
			break
		}
		top = filepath.Dir(top)
	}
	if err := os.MkdirAll(dir, perm); err != nil {
		return err
	}
	return Dirs(top, dir)
}

// Dirs gives each directory of this user on the way from top to dir to the group of its
// parent. It leaves top as it is.
func Dirs(top, dir string) error {
	rest, err := filepath.Rel(top, dir)
	if err != nil {
		return err
	}
	at, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return wrap(top, err)
	}
	defer func() { _ = unix.Close(at) }()
	for _, name := range strings.Split(rest, string(filepath.Separator)) {
		if name == "." || name == "" {
			continue
		}
		next, err := entry(at, name)
		_ = unix.Close(at)
		if at = next; err != nil {
			return wrap(dir, err)
		}
	}
	return nil
}

// Entry gives the entry name of an open directory to that directory's group.
func Entry(dir int, name string) error {
	fd, err := entry(dir, name)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// entry opens an entry of a directory and gives it to that directory's group.
func entry(at int, name string) (int, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := Descriptor(uintptr(fd), uintptr(at)); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// Tree gives everything of this user below a directory to the directory's group. It
// calls each, if not nil, with every directory before reading it. It skips entries that
// disappear meanwhile.
func Tree(dir string, each func(path string) error) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return wrap(dir, err)
	}
	return tree(os.NewFile(uintptr(fd), dir), each)
}

func tree(d *os.File, each func(string) error) error {
	defer d.Close()
	if each != nil {
		if err := each(fmt.Sprintf("/proc/self/fd/%d", d.Fd())); err != nil {
			return err
		}
	}
	names, err := d.Readdirnames(-1)
	if err != nil {
		return wrap(d.Name(), err)
	}
	for _, name := range names {
		path := filepath.Join(d.Name(), name)
		fd, err := entry(int(d.Fd()), name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return wrap(path, err)
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		_ = unix.Close(fd)
		if err != nil {
			return wrap(path, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		fd, err = unix.Openat(int(d.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, fs.ErrPermission):
			continue // another member's, not shared yet
		case err != nil:
			return wrap(path, err)
		}
		if err := tree(os.NewFile(uintptr(fd), path), each); err != nil {
			return err
		}
	}
	return nil
}

func wrap(path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("share %s with its group: %w", path, err)
}
