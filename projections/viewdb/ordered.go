package viewdb

import (
	"errors"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// ordered is a file system on which Pebble's markers are reliable after a crash. A
// marker is a file whose name identifies the current manifest. Pebble creates the
// manifest, creates the new marker, removes the old one, and only then syncs the
// directory once. Until then a file system may keep any of the three: a marker without
// its manifest does not open, and no marker at all looks like an empty database.
// Syncing before each of the last two steps keeps them in order.
//
// It also prevents panics of Pebble that cannot be recovered. If Pebble cannot create
// its next write-ahead log, for example on a full disk, it panics with a lock that it
// has already released, which kills the process. Instead, the database fails, and its
// goroutine blocks: see [failure].
type ordered struct {
	vfs.FS
	fail *failure
}

var _ vfs.FS = ordered{}

// Create implements [vfs.FS].
func (o ordered) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if err := o.before(name); err != nil {
		return nil, err
	}
	f, err := o.FS.Create(name, category)
	return o.log(name, f, err)
}

// ReuseForWrite implements [vfs.FS].
func (o ordered) ReuseForWrite(from, to string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := o.FS.ReuseForWrite(from, to, category)
	return o.log(to, f, err)
}

// log wraps a file that may be a write-ahead log. In an open database it does not
// return without the next one.
func (o ordered) log(name string, f vfs.File, err error) (vfs.File, error) {
	switch {
	case !strings.HasSuffix(name, ".log"):
	case err == nil:
		return modest{f, o.fail}, nil
	default:
		return nil, o.fail.lasting(err)
	}
	return f, err
}

// modest is a write-ahead log that allocates no room in advance. Pebble asks for more
// than a memtable's, 35 MB: on a nearly full disk that takes the room of the log's
// decisions, if only until it is refused.
//
// A write error would surface when Pebble closes the file for the next log, and panic
// there as described.
type modest struct {
	vfs.File
	fail *failure
}

// Write implements [vfs.File].
func (m modest) Write(p []byte) (int, error) {
	n, err := m.File.Write(p)
	return n, m.fail.lasting(err)
}

// Sync implements [vfs.File].
func (m modest) Sync() error { return m.fail.lasting(m.File.Sync()) }

// SyncData implements [vfs.File].
func (m modest) SyncData() error { return m.fail.lasting(m.File.SyncData()) }

// Preallocate implements [vfs.File]. It may do nothing, and does nothing.
func (modest) Preallocate(int64, int64) error { return nil }

// Remove implements [vfs.FS].
func (o ordered) Remove(name string) error {
	if err := o.before(name); err != nil {
		return err
	}
	return o.FS.Remove(name)
}

// Unwrap implements [vfs.FS].
func (o ordered) Unwrap() vfs.FS { return o.FS }

// before makes earlier changes in the directory of a marker durable.
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
