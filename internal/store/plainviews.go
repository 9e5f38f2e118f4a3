package store

import (
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// plainViews is the filesystem of views, which are looked at before a database
// opens their files on its own: it would follow symbolic links, and wait for
// pipes. The look is part of the first call that a database makes, so that a disk
// that does not answer is treated as in any other call.
type plainViews struct {
	vfs.FS
	dir string
}

// viewsOn returns the filesystem of the views in a directory; files may be nil for
// the machine's.
func viewsOn(files vfs.FS, dir string) vfs.FS {
	if files == nil {
		files = vfs.Default
	}
	return plainViews{files, dir}
}

// MkdirAll implements [vfs.FS].
func (p plainViews) MkdirAll(dir string, perm os.FileMode) error {
	if err := onlyPlain(filepath.Dir(p.dir), p.dir); err != nil {
		return err
	}
	return p.FS.MkdirAll(dir, perm)
}

// Unwrap implements [vfs.FS].
func (p plainViews) Unwrap() vfs.FS { return p.FS }
