// Package disk holds the filesystem operations of the packages that write files, so
// that they all check the same things and report the same errors.
//
//	name     durable only once the directory that holds it is synced
//	path     absolute, clean, and short enough for the system
//	regular  a file that opens without waiting for another process
//	full     a disk or a quota without room for more bytes
package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// SyncDir makes the names in a directory durable.
func SyncDir(files vfs.FS, dir string) error {
	d, err := files.OpenDir(dir)
	if err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, NoSpace(err))
	}
	return nil
}

// ReadFile returns the content of a small file.
func ReadFile(files vfs.FS, name string) ([]byte, error) {
	f, err := files.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	data, err := io.ReadAll(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return data, nil
}

// NoSpace adds the next step to the error of a full disk and returns any other error
// unchanged.
func NoSpace(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w; free space, then save again", err)
	case errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; raise the quota or free space, then save again", err)
	}
	return err
}

// Gone returns nil for the error of a missing file, which a removal takes as success,
// and any other error unchanged.
func Gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Regular returns an error unless name is a regular file. Call it before opening the
// file: opening a pipe waits for a writer, without a limit.
func Regular(files vfs.FS, name string) error {
	info, err := files.Stat(name)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("%s is a directory", name)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file (%v), so it is not read", name, info.Mode().Type())
	}
	return nil
}
