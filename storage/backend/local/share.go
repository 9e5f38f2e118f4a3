package local

import (
	"errors"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/share"
)

// share gives the directories on the way to path to the group of the one above each,
// if [Dir] is a directory of a group.
func (d *Dir) share(path string) error {
	above, err := d.fs.OpenDir(d.dir)
	if err != nil {
		return err
	}
	defer func() { _ = above.Close() }()
	if above.Fd() == vfs.InvalidFd || !share.IsOfGroup(above.Fd()) {
		return nil
	}
	var levels []string
	for ; path != d.dir; path = d.fs.PathDir(path) {
		levels = append(levels, path)
	}
	for _, level := range slices.Backward(levels) {
		next, err := d.fs.OpenDir(level)
		if err != nil {
			return err
		}
		err = errors.Join(share.Descriptor(next.Fd(), above.Fd()), above.Close())
		if above = next; err != nil {
			return err
		}
	}
	return nil
}

// share gives a new file to the group of its directory.
func (u *upload) share() error {
	if u.file.Fd() == vfs.InvalidFd {
		return nil
	}
	dir, err := u.d.fs.OpenDir(u.d.fs.PathDir(u.temp))
	if err != nil {
		return err
	}
	return errors.Join(share.Descriptor(u.file.Fd(), dir.Fd()), dir.Close())
}
