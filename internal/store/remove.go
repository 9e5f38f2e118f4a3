package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Remove deletes the store in a directory, and the directory. It is
// [ErrLocked] while a process has the store open, and nothing if there is no
// directory.
func Remove(dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if _, err := readIdentity(dir); errors.Is(err, ErrNoStore) {
		if err := vacant(dir); err != nil { // not what an init leaves
			return fmt.Errorf("remove: %w", err)
		}
	} else if errors.Is(err, ErrForeign) {
		return fmt.Errorf("remove: %w", err)
	}
	lock, err := tryLock(dir)
	if err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	if lock == nil {
		return fmt.Errorf("remove: %w: another process holds %s: wait for it or end it", ErrLocked, filepath.Join(dir, lockName))
	}
	return errors.Join(os.RemoveAll(dir), lock.Close())
}
