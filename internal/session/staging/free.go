package staging

import (
	"log/slog"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// Free removes the staging directories of this user and one store in shared, such
// as /dev/shm, whose lock no living trainer holds. It returns their paths and the
// bytes of memory that they held. A save that a dead trainer had staged in one
// of them can then no longer be finished. A directory that cannot be removed is
// in the error; the others are freed all the same.
func Free(shared, store string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories(storeName(store)+"-*"))
}

// FreeAll is [Free] for every store. It also removes what dead agents left:
// their directories carry no store's name.
func FreeAll(shared string) (freed []string, bytes int64, err error) {
	return shm.Free(shared, directories("*"))
}

// sayFormer logs what dead trainers of a former version have left of a store: its layout
// is another, so that nothing is taken over from it.
func sayFormer(shared, store string, log *slog.Logger) {
	left, bytes, err := shm.Former(shared, directories(storeName(store)+"-*"))
	if len(left) > 0 {
		log.Warn("shared memory of a former version is not used: free it by `ckptstore gc --staging` of this store", "bytes", bytes, "directories", left)
	}
	if err != nil {
		log.Warn("shared memory of former versions not looked at: `ckptstore gc --staging` frees what is there", "directory", shared, "error", err)
	}
}

// directories is the pattern of the names of staging directories.
func directories(of string) string { return "ckptstore-" + of + "-n[0-9]*" }
