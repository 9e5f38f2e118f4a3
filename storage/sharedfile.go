package storage

import (
	"sync"

	"github.com/ckptstore/ckptstore/storage/disk"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// sharedFile is a file that is open from its first user to its last. Since
// users come in the order of the files, few are open at a time.
type sharedFile struct {
	fs    vfs.FS
	path  string
	check func(vfs.FileInfo) error // of the open file; nil: none

	mu    sync.Mutex
	users int
	file  vfs.File
}

func (f *sharedFile) open() (vfs.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		if err := disk.Regular(f.fs, f.path); err != nil {
			return nil, err
		}
		file, err := f.fs.Open(f.path)
		if err != nil {
			return nil, err
		}
		if f.check != nil {
			info, err := file.Stat()
			if err == nil {
				err = f.check(info)
			}
			if err != nil {
				_ = file.Close() // nothing was written to it
				return nil, err
			}
		}
		f.file = file
	}
	return f.file, nil
}

// again adds a user, who may come when the file was closed already.
func (f *sharedFile) again() *sharedFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.users++
	return f
}

// done closes the file after its last user. Nothing was written to it, so that
// its closing can lose nothing.
func (f *sharedFile) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users == 0 && f.file != nil {
		_ = f.file.Close()
		f.file = nil
	}
}
