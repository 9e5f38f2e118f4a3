package beneath

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// TypeError reports an entry below a root that is not opened or passed through: a
// symbolic link, a named pipe, a socket, a device, or a directory where a file is
// wanted. Test with errors.As.
type TypeError struct {
	Path string
	Type fs.FileMode // of its [fs.ModeType] bits
}

// Error names the type of the entry and the next step.
func (e *TypeError) Error() string {
	switch {
	case e.Link():
		return e.Path + " is a symbolic link; ckptstore follows none inside a store: remove it, or put what it points to in its place"
	case e.Type.IsDir():
		return e.Path + " is a directory"
	}
	return fmt.Sprintf("%s is not a regular file (%v), so it is not opened; remove it", e.Path, e.Type)
}

// ProblemKind returns [problem.Denied]: another user has put it there.
func (*TypeError) ProblemKind() problem.Kind { return problem.Denied }

// Unwrap returns [fs.ErrPermission], since only another user puts such an entry into
// a store. For a directory it returns EISDIR.
func (e *TypeError) Unwrap() error {
	if e.Type.IsDir() {
		return unix.EISDIR
	}
	return fs.ErrPermission
}

// Link reports whether the entry is a symbolic link.
func (e *TypeError) Link() bool { return e.Type == fs.ModeSymlink }

// explain adds path to the error of an operation on base in dir. If a link, a
// pipe or a device caused it, explain returns a [*TypeError] instead.
func explain(op string, dir int, base, path string, err error) error {
	if err == nil || errors.As(err, new(*TypeError)) || errors.As(err, new(*fs.PathError)) {
		return err
	}
	for _, odd := range []error{unix.ELOOP, unix.ENOTDIR, unix.ENXIO} {
		if !errors.Is(err, odd) {
			continue
		}
		if is := plain(dir, base, path); errors.Is(is, fs.ErrPermission) {
			return is
		}
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// plain returns an error unless name in dir is a regular file. The error shows path.
func plain(dir int, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return regular(path, modeOf(st))
}

// regular returns an error unless mode is that of a regular file.
func regular(path string, mode fs.FileMode) error {
	if mode == 0 {
		return nil
	}
	return &TypeError{Path: path, Type: mode}
}

// modeOf returns the type of a file, 0 for a regular one.
func modeOf(st unix.Stat_t) fs.FileMode {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 0
	case unix.S_IFDIR:
		return fs.ModeDir
	case unix.S_IFLNK:
		return fs.ModeSymlink
	case unix.S_IFIFO:
		return fs.ModeNamedPipe
	case unix.S_IFSOCK:
		return fs.ModeSocket
	case unix.S_IFCHR:
		return fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		return fs.ModeDevice
	}
	return fs.ModeIrregular
}
