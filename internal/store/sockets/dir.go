// Package sockets has the directories in which the processes of one user on one machine find each
// other. It keeps them while they are in use, and removes what killed processes have left:
//
//	dir.go    $XDG_RUNTIME_DIR/ckptstore-<identity>/  the sockets of one store's processes
//	token.go  $XDG_RUNTIME_DIR/ckptstore-listeners/   the tokens of owners that listen on loopback
//	sweep.go                                          removes what is left
//
// Only this user can open them.
package sockets

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/private"
)

// maxRuntime limits the length of a runtime directory's path. The path of a socket may have 107
// bytes at most, and the sockets of a job's workers are one directory deeper.
const maxRuntime = 107 - 40

// ErrIdentity reports an identity that no store has.
var ErrIdentity = errors.New("invalid identity")

// Dir returns this user's directory for a store's sockets: in XDG_RUNTIME_DIR or, if that
// is missing or too long, in the directory for temporary files.
func Dir(id string) (string, error) {
	if err := uuid.Validate(id); err != nil {
		return "", fmt.Errorf("%w %q: %w", ErrIdentity, id, err)
	}
	name := "ckptstore-" + id[len(id)-12:]
	base := sessionDir()
	if base == "" || len(filepath.Join(base, name)) > maxRuntime {
		var err error
		if base, err = temporaryDir(); err != nil {
			return "", err
		}
	}
	dir := filepath.Join(base, name)
	if len(dir) > maxRuntime {
		return "", fmt.Errorf("runtime directory %s: the path has %d bytes, sockets need one of at most %d: set XDG_RUNTIME_DIR to a shorter one", dir, len(dir), maxRuntime)
	}
	return dir, makePrivate(dir)
}

// sessionDir returns XDG_RUNTIME_DIR, or "" if that is not a directory.
func sessionDir() string {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if info, err := os.Stat(dir); dir == "" || err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// temporaryDir makes this user's directory below the one for temporary files.
func temporaryDir() (string, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("ckptstore-%d", os.Getuid()))
	return dir, makePrivate(dir)
}

// makePrivate makes a directory that only this user can open. In a shared parent, another user
// may have put something in its place first.
func makePrivate(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the runtime directory: %w: set XDG_RUNTIME_DIR to another", err)
	}
	err := isPrivate(dir)
	if errors.Is(err, os.ErrNotExist) {
		return makePrivate(dir) // another process has just removed it
	}
	return err
}

// isPrivate returns an error unless a directory is accessible only to this user.
func isPrivate(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	if err := private.Directory(dir, info, "remove it, or set XDG_RUNTIME_DIR"); err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	return nil
}

// Held is the runtime directory of an open store. Every process that has the store open
// holds a shared flock(2) on the directory. A process that removes the directory holds the
// exclusive lock, so that it never removes the directory of an open store. A process that opens
// the store at that moment makes the directory again.
type Held struct {
	Path string   // of the directory
	lock *os.File // nil after Release
}

// holdLimit is how long another process may keep the exclusive lock.
const holdLimit = 10 * time.Second

// Hold makes the runtime directory of a store and protects it from removal.
func Hold(id string) (*Held, error) {
	for end := time.Now().Add(holdLimit); ; {
		dir, err := Dir(id)
		if err != nil {
			return nil, err
		}
		held, err := lock(dir, unix.LOCK_SH)
		if held != nil {
			return &Held{dir, held}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("hold the runtime directory: %w", err)
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("hold the runtime directory: another process keeps %s locked for %v: end it, or set XDG_RUNTIME_DIR to another directory", dir, holdLimit)
		}
		<-time.After(5 * time.Millisecond) // bounded by holdLimit
	}
}

// lock locks a directory. It returns nil if another process holds a conflicting lock, or if
// the path leads to another directory by now.
func lock(dir string, how int) (*os.File, error) {
	f, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, f.Close()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if !samePlace(f) {
		return nil, f.Close()
	}
	return f, nil
}

// samePlace reports whether an open file still has its path.
func samePlace(f *os.File) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(mine, now)
}

// Release unlocks the directory, and removes it if it is empty and no other process has the store
// open. Otherwise the next owner of any store sweeps what remains in it.
func (h *Held) Release() error {
	if h == nil || h.lock == nil {
		return nil
	}
	lock := h.lock
	h.lock = nil
	// The kernel drops the shared lock before it takes the exclusive one, so the path may
	// lead to another process's new directory by now.
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && samePlace(lock) {
		// The removal fails while a job's or an agent's files are in it.
		_ = os.Remove(h.Path)
	}
	return lock.Close()
}

// UserDir makes a directory of this user's runtime directory, which only this user can open,
// and returns its path.
func UserDir(name string) (string, error) {
	base := sessionDir()
	if base == "" {
		var err error
		if base, err = temporaryDir(); err != nil {
			return "", err
		}
	}
	dir := filepath.Join(base, name)
	return dir, makePrivate(dir)
}
