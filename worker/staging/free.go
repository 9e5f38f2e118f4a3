package staging

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/ckptstore/ckptstore/worker/shm"
)

// Free removes the staging directories of one store in shared, such as
// /dev/shm, whose lock no living trainer holds. It returns their paths and the
// bytes of memory that they held. A save that a dead trainer had staged in one
// of them can then no longer be finished. A directory that cannot be removed is
// in the error; the others are freed all the same.
func Free(shared, store string) (freed []string, bytes int64, err error) {
	return freeOf(shared, storeName(store)+"-*")
}

// FreeAll is [Free] for every store. It also removes what dead agents left:
// their directories carry no store's name.
func FreeAll(shared string) (freed []string, bytes int64, err error) {
	return freeOf(shared, "*")
}

func freeOf(shared, owners string) (freed []string, bytes int64, err error) {
	dirs, err := filepath.Glob(filepath.Join(shared, "ckptstore-"+owners+"-n[0-9]*"))
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
