package shm

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// ErrOwned reports that another live process owns the directory.
var ErrOwned = errors.New("another process owns it")

// lockName is the file whose flock(2) marks the owner of a directory.
const lockName = "lock"

// Directory is a private directory below the parent. It exists so that its files
// are reached through checked descriptors, and never by their paths: see
// [Directory.Open]. It may be used concurrently.
type Directory struct {
	name   string
	parent *os.File
	dir    *os.File
	lock   *os.File // nil: another process may own the directory
}

// Own creates the named directory below this user's parent in shared, such as
// /dev/shm, and takes its lock. It returns [ErrOwned] while another process holds
// the lock.
func Own(shared, name string, log *slog.Logger) (*Directory, error) {
	parent, err := openParent(shared, log)
	if err != nil {
		return nil, err
	}
	d, err := own(parent, name)
	for range looks {
		if !errors.Is(err, ErrOwned) {
			break
		}
		<-time.After(look)
		d, err = own(parent, name)
	}
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	return d, nil
}

// A process that looks whether a directory has an owner holds its lock for a moment: see [Left] and [Free].
const (
	looks = 5
	look  = 20 * time.Millisecond
)

// own is Own in an open parent, which the directory then owns.
func own(parent *os.File, name string) (*Directory, error) {
	for {
		dir, err := makeDirectory(parent, name)
		if err != nil {
			return nil, err
		}
		lock, err := takeLock(dir)
		if lock != nil {
			return &Directory{name, parent, dir, lock}, nil
		}
		if err = errors.Join(err, dir.Close()); err != nil {
			return nil, err
		}
	}
}

// takeLock takes the lock in a directory. An owner that ends removes the
// directory while it holds the lock, so a lock counts only if its file still has
// its name. Otherwise takeLock returns nil.
func takeLock(dir *os.File) (*os.File, error) {
	lock, err := openFile(dir, lockName, unix.O_RDWR|unix.O_CREAT)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrOwned
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", lock.Name(), err), lock.Close())
	}
	if !Linked(lock) {
		return nil, lock.Close()
	}
	return lock, nil
}

// Make creates a directory for this process in shared, named by kind, and frees
// the directories of that kind whose owners were killed.
func Make(shared, kind string, log *slog.Logger) (*Directory, error) {
	parent, err := openParent(shared, log)
	if err != nil {
		return nil, err
	}
	freeLeft(parent, "ckptstore-"+kind+"-*-n0", log)
	for range 100 {
		var d *Directory
		if d, err = own(parent, "ckptstore-"+kind+"-"+rand.Text()+"-n0"); err == nil {
			return d, nil
		}
		if !errors.Is(err, ErrOwned) { // another server that starts may take the directory for a leftover
			break
		}
	}
	return nil, errors.Join(err, parent.Close())
}

// Path returns the path of the directory.
func (d *Directory) Path() string { return d.dir.Name() }

// Lost reports whether the directory or its lock was removed from outside.
// Without its lock it looks like a dead owner's.
func (d *Directory) Lost() bool { return !Linked(d.lock) }

// Names lists the directory's files, without the lock.
func (d *Directory) Names() ([]string, error) {
	all, err := names(d.dir)
	return slices.DeleteFunc(all, func(name string) bool { return name == lockName }), err
}

// Create creates an empty file that only this user can open.
func (d *Directory) Create(name string) (*os.File, error) {
	return openFile(d.dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
}

// Open opens a file that another process of this user left. It returns
// [ErrNotPrivate] for a link, for a file that is not regular, and for a file that
// another user owns, can open or has linked elsewhere.
func (d *Directory) Open(name string, flags int) (*os.File, error) {
	return openFile(d.dir, name, flags)
}

// Rename renames a file within the directory.
func (d *Directory) Rename(from, to string) error {
	if err := unix.Renameat(int(d.dir.Fd()), from, int(d.dir.Fd()), to); err != nil {
		return failed("rename", d.Path()+"/"+from, err)
	}
	return nil
}

// Unlink removes a file. Its memory is freed when no process maps it.
func (d *Directory) Unlink(name string) error { return unlink(d.dir, name) }

// Remove removes the directory with all its files.
func (d *Directory) Remove() error { return remove(d.parent, d.name, d.dir) }

// Close releases the lock, if the process holds it.
func (d *Directory) Close() error {
	err := errors.Join(d.dir.Close(), d.parent.Close())
	if d.lock == nil {
		return err
	}
	return errors.Join(err, d.lock.Close())
}

func unlink(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, 0); err != nil {
		return failed("remove", dir.Name()+"/"+name, err)
	}
	return nil
}

// remove removes a directory with its files. The caller holds its lock. A process
// that checks whether the directory is a leftover may still create a new lock
// file in it, between the removal of the last file and that of the directory.
func remove(parent *os.File, name string, dir *os.File) error {
	var err error
	for range 100 {
		if err = unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.ENOTEMPTY) {
			break
		}
		files, lerr := names(dir)
		if lerr != nil {
			return lerr
		}
		for _, file := range files {
			if err := unlink(dir, file); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return failed("remove", dir.Name(), err)
}

// Linked reports whether a file still has its name, by which other processes open
// it.
func Linked(file *os.File) bool {
	var is unix.Stat_t
	return unix.Fstat(int(file.Fd()), &is) == nil && is.Nlink > 0
}
