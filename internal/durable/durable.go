// Package durable writes small files that survive a loss of power, with their names.
package durable

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/share"
)

// TempPrefix starts the name of a file that [Write] has not renamed yet. A killed
// process may leave such files; they may be deleted.
const TempPrefix = ".tmp-"

// Write writes a file under a temporary name, syncs it, renames it into place and
// syncs the directory. After a crash the file holds the old content or the new
// content, never a mix. When Write returns nil, it holds the new content.
func Write(path string, data []byte) error { return replace(system{}, path, data) }

// CreateTemp creates a file with a temporary name. In a group's directory the file
// is shared with the group; elsewhere only this user can open it.
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

// WritePrivate is [Write] for a file that only its owner may open, in a group's directory too. A
// file that it replaces keeps its owner.
func WritePrivate(path string, data []byte) error {
	owner := os.Geteuid()
	if info, err := os.Lstat(path); err == nil {
		owner = int(info.Sys().(*syscall.Stat_t).Uid)
	}
	return replace(secret{owner: owner}, path, data)
}

// CreateBelow creates a file with a temporary name in a directory below a root.
func CreateBelow(root beneath.Root, dir string) (*os.File, error) {
	return root.OpenFile(filepath.Join(dir, TempPrefix+rand.Text()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

// WriteBelow is [Write] for a path below a root. It follows no symbolic link.
func WriteBelow(root beneath.Root, path string, data []byte) error {
	return replace(below{root}, path, data)
}

// files is the filesystem that replace needs.
type files interface {
	// createTemp creates a file in dir with an unused name.
	createTemp(dir string) (tempFile, error)
	rename(from, to string) error
	remove(name string) error
	// syncDir makes the names in dir durable.
	syncDir(dir string) error
}

// tempFile is a new file. Its content is durable after Sync; its name is durable
// after the directory is synced.
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

// secret is the machine's filesystem, for files that only one user may open.
type secret struct {
	system
	owner int
}

var _ files = secret{}

func (s secret) createTemp(dir string) (tempFile, error) {
	f, err := os.CreateTemp(dir, TempPrefix+"*") // 0600
	if err != nil || s.owner == os.Geteuid() {
		return f, err
	}
	if err := f.Chown(s.owner, -1); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return f, nil
}

// below is the filesystem below a root.
type below struct{ root beneath.Root }

var _ files = below{}

func (b below) createTemp(dir string) (tempFile, error) {
	return CreateBelow(b.root, dir)
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
