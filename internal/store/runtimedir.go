package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/google/uuid"

	"github.com/ckptstore/ckptstore/internal/private"
)

// maxRuntime is the length of a runtime directory's path. A socket's may have
// 107 bytes at most, and those of a job's workers lie one directory deeper.
const maxRuntime = 107 - 40

// runtimeDir is this user's directory for a store's sockets: in
// XDG_RUNTIME_DIR, or where that is not there or too long, in the directory
// for temporary files.
func runtimeDir(id string) (string, error) {
	if err := uuid.Validate(id); err != nil {
		return "", fmt.Errorf("%w: its identity %q is none: %w", ErrDamaged, id, err)
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

// sessionDir is XDG_RUNTIME_DIR, "" where that is no directory.
func sessionDir() string {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if info, err := os.Stat(dir); dir == "" || err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// temporaryDir makes this user's directory below that for temporary files.
func temporaryDir() (string, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("ckptstore-%d", os.Getuid()))
	return dir, makePrivate(dir)
}

// makePrivate makes a directory that only this user can look into. In a shared
// one, somebody else could have put something in its place first.
func makePrivate(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the runtime directory: %w: set XDG_RUNTIME_DIR to another", err)
	}
	err := isPrivate(dir)
	if errors.Is(err, os.ErrNotExist) {
		return makePrivate(dir) // its last user has just removed it
	}
	return err
}

// isPrivate refuses a directory that is not this user's alone.
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
