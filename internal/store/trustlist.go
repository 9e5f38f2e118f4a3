package store

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
	"github.com/ckptstore/ckptstore/projections"
)

// Trusted is a directory that this user trusts although others can write to it.
// The entry holds for the owner that the directory had: if another user's comes
// in its place, that one is not trusted. Numbers of devices and inodes are not
// kept, since network and user-space filesystems change them.
type Trusted struct {
	Path string `json:"path"` // absolute, without symbolic links
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// The list of trusted directories is one file of each user:
//
//	$XDG_CONFIG_HOME/ckptstore/trusted       JSON, mode 0600
//	$XDG_CONFIG_HOME/ckptstore/trusted.lock  flock(2) of the process that changes it
const (
	trustedName = "trusted"
	// trustedLimit is the most bytes that a list may have.
	trustedLimit = 1 << 20
	// trustedWait bounds the wait for another process that changes the list, and for the
	// filesystem that the list is on.
	trustedWait = 10 * time.Second
)

// Trust adds a directory to the list of this user.
func Trust(ctx context.Context, dir string) (Trusted, error) {
	entry, err := entryOf(dir)
	if err == nil {
		err = changeTrusted(ctx, func(list []Trusted) ([]Trusted, error) {
			return append(without(list, entry.Path), entry), nil
		})
	}
	if err != nil {
		return entry, fmt.Errorf("trust %s: %w", dir, err)
	}
	return entry, nil
}

// Distrust removes a directory from the list of this user. The directory may be
// gone. One that is not on the list is [projections.ErrNotFound].
func Distrust(ctx context.Context, dir string) error {
	path, err := filepath.Abs(dir)
	if err == nil {
		if resolved, rerr := filepath.EvalSymlinks(path); rerr == nil {
			path = resolved
		}
		err = changeTrusted(ctx, func(list []Trusted) ([]Trusted, error) {
			rest := without(list, path)
			if len(rest) == len(list) {
				return nil, &projections.NotFoundError{What: "trusted directory", Ref: path, Hint: "`ckptstore config trust --list` prints those that there are"}
			}
			return rest, nil
		})
	}
	if err != nil {
		return fmt.Errorf("stop trusting %s: %w", dir, err)
	}
	return nil
}

// TrustedDirs are the directories on the list of this user.
func TrustedDirs() ([]Trusted, error) {
	path, err := trustedFile()
	if err != nil {
		return nil, err
	}
	return readTrusted(path)
}

func without(list []Trusted, path string) []Trusted {
	return slices.DeleteFunc(slices.Clone(list), func(t Trusted) bool { return t.Path == path })
}

// EnvTrust is the variable that adds directories to the list, separated by colons, for
// this process and those that it starts. It is for containers, whose homes do not last.
const EnvTrust = "CKPTSTORE_TRUST"

// isTrusted reports whether a directory is named by [EnvTrust], or is on the list with
// the owner it has now. A home whose filesystem does not answer is an error after
// [trustedWait].
func isTrusted(dir string) (bool, error) {
	type answer struct {
		known bool
		err   error
	}
	ended := make(chan answer, 1)
	go func() {
		known, err := lookUpTrusted(dir)
		ended <- answer{known, err}
	}()
	select {
	case a := <-ended:
		return a.known, a.err
	case <-time.After(trustedWait):
		return false, fmt.Errorf("the list of trusted directories was not read within %v: look at the filesystem of the home directory", trustedWait)
	}
}

func lookUpTrusted(dir string) (bool, error) {
	for _, named := range filepath.SplitList(os.Getenv(EnvTrust)) {
		if sameDir(named, dir) {
			return true, nil
		}
	}
	path, err := trustedFile()
	if err != nil {
		return false, nil //nolint:nilerr // a user without a place for the list has none
	}
	list, err := readTrusted(path)
	if err != nil || len(list) == 0 {
		return false, err
	}
	entry, err := entryOf(dir)
	return slices.Contains(list, entry), err
}

// sameDir reports whether two paths lead to one directory. One that leads nowhere, or
// where this user cannot look, is no directory that the user opens.
func sameDir(named, dir string) bool {
	there, err := os.Stat(named)
	here, err2 := os.Stat(dir)
	return err == nil && err2 == nil && os.SameFile(there, here)
}

func entryOf(dir string) (t Trusted, err error) {
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

func trustedFile() (string, error) {
	base, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("find the list of trusted directories: %w", err)
	}
	return filepath.Join(base, "ckptstore", trustedName), nil
}

// readTrusted reads a list. One that another user could have written is an error,
// and so is a symbolic link; none is an empty one.
func readTrusted(path string) ([]Trusted, error) {
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
	if info.Size() > trustedLimit {
		return nil, bad(fmt.Errorf("it has %d bytes: %s", info.Size(), next))
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, bad(err)
	}
	var list []Trusted
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, bad(fmt.Errorf("%w: %s", err, next))
	}
	return list, nil
}

// changeTrusted replaces the list by what change makes of it, under its lock.
func changeTrusted(ctx context.Context, change func([]Trusted) ([]Trusted, error)) (err error) {
	path, err := trustedFile()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, trustedWait)
	defer cancel()
	lock, err := lockTrusted(ctx, path+".lock")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock(lock)) }()
	list, err := readTrusted(path)
	if err == nil {
		list, err = change(list)
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

// lockTrusted waits for the lock until ctx ends.
func lockTrusted(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || !sleep(ctx, 20*time.Millisecond) {
			return nil, errors.Join(fmt.Errorf("%w: %s: %w: end the process that holds it", ErrLocked, path, err), ctx.Err(), f.Close())
		}
	}
}
