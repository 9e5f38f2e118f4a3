package shm

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
)

// Make makes a directory of this process's own in shared, named by what its files
// are for, and frees those of that kind whose owners were killed. [Remove] it, then
// close its lock.
func Make(shared, kind string, log *slog.Logger) (dir string, lock *os.File, err error) {
	pattern := "ckptstore-" + kind + "-*-n0"
	left, err := filepath.Glob(filepath.Join(shared, pattern))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range left {
		// Those of other users are not ours to look at.
		if n, gone, err := Free(dir); err != nil && !errors.Is(err, os.ErrPermission) {
			log.Warn("what a server that was killed has left in shared memory is not freed", "directory", dir, "error", err)
		} else if gone && n > 0 {
			log.Info("freed what a server that was killed has left in shared memory", "directory", dir, "bytes", n)
		}
	}
	for range 100 {
		dir, err := os.MkdirTemp(shared, pattern) // of mode 0700
		if err != nil {
			return "", nil, err
		}
		lock, err := Own(dir)
		if errors.Is(err, ErrOwned) {
			continue // a server that starts as well takes it for a leftover, and frees it
		}
		if err != nil {
			return "", nil, errors.Join(err, Remove(dir))
		}
		return dir, lock, nil
	}
	return "", nil, fmt.Errorf("no directory in %s stays this process's own", shared)
}
