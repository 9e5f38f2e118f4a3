package staging

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/ckptstore/ckptstore/worker/shm"
)

// Free removes the staging directories in shared, such as /dev/shm, that
// no trainer uses: those whose lock is free. It returns their paths and the
// bytes of memory that they held. A save that a dead trainer had staged in one
// of them can then not be finished any more. Directories that it may not
// remove are in the error, beside the others that were freed.
func Free(shared string) (freed []string, bytes int64, err error) {
	dirs, err := filepath.Glob(filepath.Join(shared, "ckptstore-*-n[0-9]*"))
	if err != nil {
		return nil, 0, err
	}
	var errs []error
	for _, dir := range dirs {
		n, gone, err := shm.Free(dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("free %s: %w", dir, err))
		}
		if gone {
			freed, bytes = append(freed, dir), bytes+n
		}
	}
	return freed, bytes, errors.Join(errs...)
}
