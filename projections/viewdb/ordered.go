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
//
// It also keeps Pebble from panicking where it cannot be caught: when it cannot
// make its next write-ahead log, as on a full disk, it panics with a lock that
// it has given back, and the process dies of that. There the database has
// failed, and its goroutine stays where it is, as [failure] has it.
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

// log is a file that may be a write-ahead log. An open database does not return
// from here without the next one.
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

// modest is a write-ahead log that takes no room before it is needed. Pebble
// asks for more than a memtable's, 35 MB: on a disk that is nearly full that
// is the room of the log's decisions, if only for the moment until it is
// refused.
//
// What cannot be written to it would come up when Pebble closes it for the
// next one: there it panics as described.
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

// Preallocate implements [vfs.File] and does nothing, which it may.
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
