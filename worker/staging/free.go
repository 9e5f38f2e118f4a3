package staging

import "github.com/ckptstore/ckptstore/worker/shm"

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

// directories is the pattern of the names of staging directories.
func directories(of string) string { return "ckptstore-" + of + "-n[0-9]*" }
