package data

import "github.com/cockroachdb/pebble/v2/vfs"

// OpenUnsynced names a data directory whose files are synced when the kernel
// sees fit: for data that is generated, and generated again after a crash.
func OpenUnsynced(dir string) (*Root, error) { return Open(unsynced{vfs.Default}, dir) }

// unsynced is a filesystem that leaves syncing to the kernel.
type unsynced struct{ vfs.FS }

func (u unsynced) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return unsyncedFile(u.FS.Create(name, c))
}

func (u unsynced) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return unsyncedFile(u.FS.OpenReadWrite(name, c, o...))
}

func (u unsynced) OpenDir(name string) (vfs.File, error) { return unsyncedFile(u.FS.OpenDir(name)) }

func (u unsynced) Open(name string, o ...vfs.OpenOption) (vfs.File, error) {
	return unsyncedFile(u.FS.Open(name, o...))
}

func unsyncedFile(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return lazyFile{f}, nil
}

type lazyFile struct{ vfs.File }

func (lazyFile) Sync() error                { return nil }
func (lazyFile) SyncData() error            { return nil }
func (lazyFile) SyncTo(int64) (bool, error) { return true, nil }
