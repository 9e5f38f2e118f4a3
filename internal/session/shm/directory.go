package shm

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrOwned says that another process that is alive owns the directory.
var ErrOwned = errors.New("another process owns it")

// lockName is the file whose flock(2) is that of a directory's owner.
const lockName = "lock"

// Directory is a private directory below the parent. It exists so that its files are
// reached through descriptors that were checked, and never by their paths: see
// [Directory.Open]. It may be used concurrently.
type Directory struct {
	name   string
	parent *os.File
	dir    *os.File
	lock   *os.File // nil: another process may own the directory
}

// Own makes the directory with a name below this user's parent in shared, such as
// /dev/shm, and takes its lock. It returns [ErrOwned] while another process has
// that.
func Own(shared, name string, log *slog.Logger) (*Directory, error) {
	parent, err := openParent(shared, log)
	if err != nil {
		return nil, err
	}
	d, err := own(parent, name)
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	return d, nil
}

// own is Own in an open parent, which becomes that of the directory.
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

// takeLock takes the lock in a directory. An owner that ends removes the directory
// while it holds the lock, so a lock is only good if its file still has its name:
// otherwise the result is nil.
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

// Make makes a directory of this process's own in shared, named by what its files
// are for, and frees those of that kind whose owners were killed.
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
		if !errors.Is(err, ErrOwned) { // that is a server that starts as well, and takes it for a leftover
			break
		}
	}
	return nil, errors.Join(err, parent.Close())
}

// Path is where the directory is.
func (d *Directory) Path() string { return d.dir.Name() }

// Lost reports whether the directory or its lock was removed from outside. Without
// its lock it would be taken for a dead owner's.
func (d *Directory) Lost() bool { return !Linked(d.lock) }

// Names lists the directory's files, but for the lock.
func (d *Directory) Names() ([]string, error) {
	all, err := names(d.dir)
	return slices.DeleteFunc(all, func(name string) bool { return name == lockName }), err
}

// Create makes an empty file that only this user can open.
func (d *Directory) Create(name string) (*os.File, error) {
	return openFile(d.dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
}

// Open opens a file that another process of this user has left. It returns
// [ErrNotPrivate] for a link, for what is no regular file, and for a file that
// another user owns, can open or has linked elsewhere.
func (d *Directory) Open(name string, flags int) (*os.File, error) {
	return openFile(d.dir, name, flags)
}

// Rename gives a file another name in the directory.
func (d *Directory) Rename(from, to string) error {
	if err := unix.Renameat(int(d.dir.Fd()), from, int(d.dir.Fd()), to); err != nil {
		return failed("rename", d.Path()+"/"+from, err)
	}
	return nil
}

// Unlink removes a file. Its memory is free when no process maps it.
func (d *Directory) Unlink(name string) error { return unlink(d.dir, name) }

// Remove removes the directory with all files in it.
func (d *Directory) Remove() error { return remove(d.parent, d.name, d.dir) }

// Close gives the lock up, if the directory was taken.
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

// remove removes a directory with its files. Its lock is held meanwhile; another
// process that looks whether the directory is a leftover may still make the file of
// a new one in it, between the last file's removal and the directory's.
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

// Linked reports whether a file still has its name, by which others open it.
func Linked(file *os.File) bool {
	var is unix.Stat_t
	return unix.Fstat(int(file.Fd()), &is) == nil && is.Nlink > 0
}
