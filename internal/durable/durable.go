// Package durable makes small files and the names of files survive a loss of
// power.
package durable

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/share"
)

// TempPrefix starts the name of a file that [Write] has not renamed. What is left
// of a process that was killed in between may be deleted.
const TempPrefix = ".tmp-"

// Write writes a file under a temporary name, syncs it, renames it into
// place and syncs the directory. Whatever is cut off, and whatever the machine
// has not synced then, the file is the old one or the new one; on return it is
// the new one.
func Write(path string, data []byte) error { return replace(system{}, path, data) }

// CreateTemp makes a file with a temporary name. In a directory of a group it is the
// group's, and elsewhere this user's alone.
func CreateTemp(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, TempPrefix+"*")
	if err != nil {
		return nil, err
	}
	if err := share.File(f); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return f, nil
}

// WriteBelow is [Write] for a path below a root, where no symbolic link is
// followed.
func WriteBelow(root beneath.Root, path string, data []byte) error {
	return replace(below{root}, path, data)
}

// files are what replace needs of a filesystem.
type files interface {
	// createTemp makes a file in dir with a name that nothing else has.
	createTemp(dir string) (tempFile, error)
	rename(from, to string) error
	remove(name string) error
	// syncDir makes the names in dir durable.
	syncDir(dir string) error
}

// tempFile is durable by its bytes when it was synced, by its name when its
// directory was.
type tempFile interface {
	io.WriteCloser
	Name() string
	Sync() error
}

func replace(fs files, path string, data []byte) error {
	f, err := fs.createTemp(filepath.Dir(path))
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = fs.rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, fs.remove(f.Name()))
	}
	return fs.syncDir(filepath.Dir(path))
}

// system is the machine's filesystem.
type system struct{}

var _ files = system{}

func (system) createTemp(dir string) (tempFile, error) { return CreateTemp(dir) }
func (system) rename(from, to string) error            { return os.Rename(from, to) }
func (system) remove(name string) error                { return os.Remove(name) }
func (system) syncDir(dir string) error                { return SyncDir(dir) }

// below is what can be reached below a root.
type below struct{ root beneath.Root }

var _ files = below{}

func (b below) createTemp(dir string) (tempFile, error) {
	return b.root.OpenFile(filepath.Join(dir, TempPrefix+rand.Text()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

func (b below) rename(from, to string) error { return b.root.Rename(from, to) }
func (b below) remove(name string) error     { return b.root.Remove(name) }
func (b below) syncDir(dir string) error     { return b.root.SyncDir(dir) }

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
