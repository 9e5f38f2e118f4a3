package worker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrBusy says that another trainer of the run is alive on this machine, also
// one that is stopped and has lost the run.
var ErrBusy = errors.New("another trainer of this run is alive on this machine")

// lockDir makes dir and takes the lock in it. A trainer that ends removes the
// directory while it holds the lock, so a lock is only good if its file is
// still the one at that path.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = lock.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = ErrBusy
			}
			return nil, fmt.Errorf("lock %s: %w: stop it, or choose another --name", path, err)
		}
		mine, err := lock.Stat()
		if err != nil {
			return nil, err
		}
		if now, err := os.Stat(path); err == nil && os.SameFile(mine, now) {
			return lock, nil
		}
		_ = lock.Close()
	}
}
