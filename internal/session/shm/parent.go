package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// parentName returns the default name of this user's parent, which another user
// may have taken.
func parentName() string { return fmt.Sprintf("ckptstore-memory-%d", os.Geteuid()) }

// openParent opens this user's parent in shared: the one in the user's record, if
// there is a record, or the one with the default name, which it creates if
// missing. If another user has taken the name, or if others can enter the
// directory and may have put files there, openParent creates a parent with a new
// name and records it.
func openParent(shared string, log *slog.Logger) (*os.File, error) {
	root, err := os.Open(filepath.Clean(shared))
	if err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	defer root.Close()
	if parent, err := recordedParent(root); parent != nil || err != nil {
		return parent, err
	}
	parent, err := makeDirectory(root, parentName())
	if !errors.Is(err, ErrNotPrivate) {
		return parent, err
	}
	log.Warn("shared memory directory passed over: not private to this user", "directory", filepath.Join(shared, parentName()), "error", err)
	return recordParent(root)
}

// makeDirectory opens a private directory, and creates it if missing.
func makeDirectory(at *os.File, name string) (dir *os.File, err error) {
	for range 100 {
		if err := unix.Mkdirat(int(at.Fd()), name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, failed("mkdir", at.Name()+"/"+name, err)
		}
		if dir, err = openDirectory(at, name); !errors.Is(err, fs.ErrNotExist) {
			return dir, err
		}
	}
	return nil, err
}

// existingParents opens all parents of this user in shared, under any name, and
// shared itself, where directories of former versions lie. It creates nothing.
// The errors name parents that others can enter.
func existingParents(shared string) (parents []*os.File, errs []error) {
	root, err := os.Open(filepath.Clean(shared))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, []error{err}
	}
	all, err := ownNames(root)
	errs = append(errs, err)
	for _, name := range all {
		if name != parentName() && !strings.HasPrefix(name, parentName()+"-") {
			continue
		}
		parent, err := openDirectory(root, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		parents = append(parents, parent)
	}
	return append(parents, root), errs
}

// ownNames lists the entries of a directory that belong to this user.
func ownNames(dir *os.File) ([]string, error) {
	all, err := names(dir)
	return slices.DeleteFunc(all, func(name string) bool {
		var is unix.Stat_t
		return unix.Fstatat(int(dir.Fd()), name, &is, unix.AT_SYMLINK_NOFOLLOW) != nil || !mine(is)
	}), err
}

// names lists the entries of a directory in order.
func names(dir *os.File) ([]string, error) {
	// A new descriptor, since the position in the list belongs to the descriptor.
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, failed("open", dir.Name(), err)
	}
	list := os.NewFile(uintptr(fd), dir.Name())
	defer list.Close()
	all, err := list.Readdirnames(-1)
	slices.Sort(all)
	return all, err
}
