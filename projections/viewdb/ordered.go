package viewdb

import (
	"errors"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// ordered is a file system on which Pebble's markers can be trusted after a
// crash. A marker is a file whose name says which manifest is the present
// one. Pebble makes the manifest, makes the new marker, removes the old one,
// and syncs the directory once, after all of it. Until then a file system may
// keep any of the three: a marker without its manifest does not open, and no
// marker at all is taken for an empty database. Syncing before each of the
// last two keeps them in order.
type ordered struct{ vfs.FS }

var _ vfs.FS = ordered{}

// Create implements [vfs.FS].
func (o ordered) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if err := o.before(name); err != nil {
		return nil, err
	}
	return o.FS.Create(name, category)
}

// Remove implements [vfs.FS].
func (o ordered) Remove(name string) error {
	if err := o.before(name); err != nil {
		return err
	}
	return o.FS.Remove(name)
}

// Unwrap implements [vfs.FS].
func (o ordered) Unwrap() vfs.FS { return o.FS }

// before makes what happened in the directory of a marker durable.
func (o ordered) before(name string) error {
	if !strings.HasPrefix(o.PathBase(name), "marker.") {
		return nil
	}
	dir, err := o.OpenDir(o.PathDir(name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
