// Package disk is what every room that writes files asks of a filesystem, so
// that each asks it in the same way, and says the same when it is refused.
//
//	name     durable only once the directory that holds it is synced
//	path     absolute, clean, and short enough for the system
//	regular  a file that can be opened without waiting for somebody
//	full     a disk, or a quota, that takes no more bytes
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

// ReadFile is the content of a small file.
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

// NoSpace adds the next step to an error of a full disk, and leaves any other
// as it is.
func NoSpace(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w; free space, then save again", err)
	case errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; raise the quota or free space, then save again", err)
	}
	return err
}

// Gone takes what is already removed for removed: nil for the error of a file
// that is not there.
func Gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Regular refuses what is no plain file before it is opened: opening a pipe
// waits for whoever writes to it, and nothing ends that.
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
