// Package share gives what a process makes in a directory of a group to that group.
//
// A directory is a group's if its members can write to it and what is made in it has
// the same group:
//
//	drwxrws---   mode 2770: set-group-ID, written by the group
//
// A file that is made there becomes 0660 and a directory 2770, whatever the umask and
// the mode that it was made with. In any other directory nothing is changed. So the
// rule needs no setting: what lies below a group's directory is the group's, level by
// level.
//
// Only what belongs to this process's user is changed, through a descriptor of it. No
// symbolic link is followed. A file with a second name is left alone: another member
// may have put a link there to a file of this user that is not the group's.
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

// What is the group's has these permissions.
const (
	dirMode  = unix.S_ISGID | 0o770
	fileMode = 0o660
)

// ofGroup reports whether a directory is a group's.
func ofGroup(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&(unix.S_ISGID|0o020) == unix.S_ISGID|0o020
}

// File gives a file that the caller has made to the group of its directory. It is to
// be called before the file has the name by which others look for it.
func File(f *os.File) error {
	dir, err := unix.Open(filepath.Dir(f.Name()), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(Descriptor(f.Fd(), uintptr(dir)), unix.Close(dir))
	}
	return wrap(f.Name(), err)
}

// Descriptor gives an open file or directory to the group of the open directory that
// it lies in.
func Descriptor(fd, dir uintptr) error {
	var above, st unix.Stat_t
	err := unix.Fstat(int(dir), &above)
	if err != nil || !ofGroup(&above) {
		return err
	}
	if err = unix.Fstat(int(fd), &st); err == nil {
		err = lend(int(fd), &st, above.Gid)
	}
	return err
}

// IsOfGroup reports whether an open directory is a group's.
func IsOfGroup(dir uintptr) bool {
	var st unix.Stat_t
	return unix.Fstat(int(dir), &st) == nil && ofGroup(&st)
}

// lend changes the mode of an open file or directory that lies in a directory of a
// group.
func lend(fd int, st *unix.Stat_t, gid uint32) error {
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
	// A file of another group was not made here: it was moved here.
	if int(st.Uid) != os.Geteuid() || st.Gid != gid || st.Mode&0o7777 == mode {
		return nil
	}
	// The descriptor may be one that is not open for anything.
	return unix.Fchmodat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), mode, 0)
}

// MkdirAll is [os.MkdirAll]. A directory that it makes in one of a group is the
// group's.
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

// Dirs gives the directories of this user on the way from top to dir to the group of
// the one above each. top itself stays as it is.
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

// Entry gives what has a name in an open directory to the group of that.
func Entry(dir int, name string) error {
	fd, err := entry(dir, name)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// entry opens what has a name in a directory, and gives it to the group of that.
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

// Tree gives everything of this user below a directory to the group that the
// directory is of. each, if not nil, is called with every directory, before it is
// read. What goes away meanwhile is passed over.
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
			continue // of another member, and not lent yet
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
