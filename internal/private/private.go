// Package private checks that only this user can open a file or directory: no other user
// owns it, can open it, or may have put it there. The caller passes the info of what it has
// opened, so that replacing the path meanwhile has no effect.
package private

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrNotPrivate reports a file or directory that is not this user's alone. It is an
// [fs.ErrPermission]. Test with errors.Is.
var ErrNotPrivate error = notPrivate{}

type notPrivate struct{}

func (notPrivate) Error() string { return "not private to this user" }

func (notPrivate) Is(target error) bool { return target == fs.ErrPermission }

func (notPrivate) ProblemKind() problem.Kind { return problem.Denied }

// File returns [ErrNotPrivate] unless info describes a regular file that this user owns and
// others have no rights to. The error names the path, its owner and mode, and the next step.
func File(path string, info fs.FileInfo, next string) error {
	return check(path, info, 0, os.Geteuid(), next)
}

// Secret is [File] for a secret handed to this user. Another user may own it, as when root
// in a container reads it. If that is root, a group of this user may read it: so Kubernetes
// hands the files of a Secret to a pod that does not run as root.
func Secret(path string, info fs.FileInfo, next string) error {
	groups, err := os.Getgroups()
	if err != nil {
		return fmt.Errorf("%s: groups of this user: %w", path, err)
	}
	return secret(path, info, os.Geteuid(), append(groups, os.Getegid()), next)
}

// secret is [Secret] for a user and its groups.
func secret(path string, info fs.FileInfo, user int, groups []int, next string) error {
	is, ok := info.Sys().(*syscall.Stat_t)
	if ok && is.Uid == 0 && user != 0 && slices.Contains(groups, int(is.Gid)) && info.Mode()&^0o700 == 0o040 {
		return nil
	}
	return check(path, info, 0, anyone, next)
}

// OnlyName is [File] for a file that must have one name only: a second name means that
// another user may have linked it here or elsewhere.
func OnlyName(path string, info fs.FileInfo, next string) error {
	if err := File(path, info, next); err != nil {
		return err
	}
	if is := info.Sys().(*syscall.Stat_t); is.Nlink > 1 {
		return fmt.Errorf("%s: %w: it has %d names: %s", path, ErrNotPrivate, is.Nlink, next)
	}
	return nil
}

// Directory is [File] for a directory.
func Directory(path string, info fs.FileInfo, next string) error {
	return check(path, info, fs.ModeDir, os.Geteuid(), next)
}

// anyone accepts every owner.
const anyone = -1

func check(path string, info fs.FileInfo, kind fs.FileMode, owner int, next string) error {
	is, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: %w: its owner is not known: %s", path, ErrNotPrivate, next)
	}
	if info.Mode().Type() != kind || info.Mode().Perm()&0o077 != 0 || owner != anyone && int(is.Uid) != owner {
		return fmt.Errorf("%s: %w (user %d): it belongs to user %d, mode %v: %s", path, ErrNotPrivate, os.Geteuid(), is.Uid, info.Mode(), next)
	}
	return nil
}
