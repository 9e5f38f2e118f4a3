package data

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/internal/object"
)

// sharedFile is a file that is open from its first user to its last. Since
// users come in the order of the files, few are open at a time.
type sharedFile struct {
	path   string
	opener func(context.Context) (object.Object, error)
	check  func(object.Info) error // of the open file; nil: none

	mu    sync.Mutex
	users int
	file  object.Object
}

func (f *sharedFile) open(ctx context.Context) (object.Object, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		file, err := f.opener(ctx)
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
