// Package trusted keeps a user's list of directories that are trusted although others can write to
// them. It is one file per user:
//
//	$XDG_CONFIG_HOME/ckptstore/trusted       JSON, mode 0600
//	$XDG_CONFIG_HOME/ckptstore/trusted.lock  flock(2) of the process that changes it
package trusted

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// ErrLocked reports that another process changes the list.
var ErrLocked = problem.New(problem.Locked, "list of trusted directories is locked")

// Dir is a directory that this user trusts although others can write to it. The entry holds for
// the directory's owner at that time: a directory of another user in its place is not trusted. It
// omits device and inode numbers, since network and user-space filesystems change them.
type Dir struct {
	Path string `json:"path"` // absolute, without symbolic links
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

const (
	fileName = "trusted"
	// limit is the maximum size of a list in bytes.
	limit = 1 << 20
	// wait bounds the wait for another process that changes the list, and for the
	// list's filesystem.
	wait = 10 * time.Second
)

// Add adds a directory to this user's list.
func Add(ctx context.Context, dir string) (Dir, error) {
	entry, err := entryOf(dir)
	if err == nil {
		err = change(ctx, func(list []Dir) ([]Dir, error) {
			return append(without(list, entry.Path), entry), nil
		})
	}
	if err != nil {
		return entry, fmt.Errorf("trust %s: %w", dir, err)
	}
	return entry, nil
}

// Remove removes a directory from this user's list. The directory need not exist. It returns
// [projections.ErrNotFound] for a directory that is not on the list.
func Remove(ctx context.Context, dir string) error {
	path, err := filepath.Abs(dir)
	if err == nil {
		if resolved, rerr := filepath.EvalSymlinks(path); rerr == nil {
			path = resolved
		}
		err = change(ctx, func(list []Dir) ([]Dir, error) {
			rest := without(list, path)
			if len(rest) == len(list) {
				return nil, &projections.NotFoundError{What: "trusted directory", Ref: path, Hint: "`ckptstore config trust --list` prints the list"}
			}
			return rest, nil
		})
	}
	if err != nil {
		return fmt.Errorf("stop trusting %s: %w", dir, err)
	}
	return nil
}

// List returns the directories on this user's list.
func List() ([]Dir, error) {
	path, err := file()
	if err != nil {
		return nil, err
	}
	return read(path)
}

func without(list []Dir, path string) []Dir {
	return slices.DeleteFunc(slices.Clone(list), func(t Dir) bool { return t.Path == path })
}

// Env is the variable that adds directories to the list, separated by colons, for
// this process and those that it starts. It is for containers, whose homes do not last.
const Env = "CKPTSTORE_TRUST"

// Has reports whether a directory is named by [Env], or is on the list with its current
// owner. It returns an error if the home directory's filesystem does not answer within
// [wait].
func Has(dir string) (bool, error) {
	type answer struct {
		known bool
		err   error
	}
	ended := make(chan answer, 1)
	go func() {
		known, err := lookUp(dir)
		ended <- answer{known, err}
	}()
	select {
	case a := <-ended:
		return a.known, a.err
	case <-time.After(wait):
		return false, fmt.Errorf("the list of trusted directories was not read within %v: look at the filesystem of the home directory", wait)
	}
}

func lookUp(dir string) (bool, error) {
	for _, named := range filepath.SplitList(os.Getenv(Env)) {
		if sameDir(named, dir) {
			return true, nil
		}
	}
	path, err := file()
	if err != nil {
		return false, nil //nolint:nilerr // a user without a place for the list has none
	}
	list, err := read(path)
	if err != nil || len(list) == 0 {
		return false, err
	}
	entry, err := entryOf(dir)
	return slices.Contains(list, entry), err
}

// sameDir reports whether two paths lead to one directory. It returns false if a path leads nowhere,
// or where this user cannot look: then the user does not open that directory.
func sameDir(named, dir string) bool {
	there, err := os.Stat(named)
	here, err2 := os.Stat(dir)
	return err == nil && err2 == nil && os.SameFile(there, here)
}

func entryOf(dir string) (t Dir, err error) {
	if t.Path, err = filepath.Abs(dir); err != nil {
		return t, err
	}
	if t.Path, err = filepath.EvalSymlinks(t.Path); err != nil {
		return t, err
	}
	info, err := os.Stat(t.Path)
	if err != nil {
		return t, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() {
		return t, fmt.Errorf("%s: %w", t.Path, syscall.ENOTDIR)
	}
	t.UID, t.GID = int(st.Uid), int(st.Gid)
	return t, nil
}

func file() (string, error) {
	base, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("find the list of trusted directories: %w", err)
	}
	return filepath.Join(base, "ckptstore", fileName), nil
}

// read reads a list. A missing list is empty. A list that another user could have written,
// or a symbolic link, is an error.
func read(path string) ([]Dir, error) {
	bad := func(err error) error { return fmt.Errorf("list of trusted directories %s: %w", path, err) }
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrPermission) {
		return nil, nil // as after `sudo -u`, which keeps another user's HOME
	}
	if err != nil {
		return nil, bad(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, bad(err)
	}
	const next = "remove it, and trust the directories again"
	if err := private.File(path, info, next); err != nil {
		return nil, fmt.Errorf("list of trusted directories: %w", err)
	}
	if info.Size() > limit {
		return nil, bad(fmt.Errorf("it has %d bytes: %s", info.Size(), next))
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, bad(err)
	}
	var list []Dir
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, bad(fmt.Errorf("%w: %s", err, next))
	}
	return list, nil
}

// change replaces the list by the result of edit, under its lock.
func change(ctx context.Context, edit func([]Dir) ([]Dir, error)) (err error) {
	path, err := file()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	held, err := lock(ctx, path+".lock")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Flock(int(held.Fd()), unix.LOCK_UN), held.Close()) }()
	list, err := read(path)
	if err == nil {
		list, err = edit(list)
	}
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(path, append(text, '\n'))
}

// lock waits for the lock until ctx ends.
func lock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			select {
			case <-time.After(20 * time.Millisecond):
				continue
			case <-ctx.Done():
			}
		}
		return nil, errors.Join(fmt.Errorf("%w: %s: %w: end the process that holds it", ErrLocked, path, err), ctx.Err(), f.Close())
	}
}
