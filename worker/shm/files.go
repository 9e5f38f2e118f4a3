package shm

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Files are numbered files of one server, in a directory of its own that the first
// of them makes: see [Make]. It is safe for concurrent use.
type Files struct {
	Shared string // where the directory is made
	Kind   string // what the files are for, as a word in the directory's name
	Log    *slog.Logger

	mu     sync.Mutex
	dir    string
	lock   *os.File
	made   int
	closed bool
}

// New makes an empty file. A directory that was removed from outside, as systemd's
// RemoveIPC does when a user logs out, is made anew.
func (f *Files) New() (*os.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.closed {
		if err := f.open(); err != nil {
			return nil, err
		}
		f.made++
		file, err := os.OpenFile(filepath.Join(f.dir, strconv.Itoa(f.made)), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if !errors.Is(err, os.ErrNotExist) {
			return file, err
		}
	}
	return nil, errors.New("the server has ended")
}

// open makes the directory, unless it is there and this server's: without its lock it
// would be taken for a dead one's.
func (f *Files) open() (err error) {
	if f.dir != "" && !Linked(f.lock) {
		f.Log.Warn("shared memory was removed by somebody else, and is made anew", "directory", f.dir)
		_ = f.lock.Close() // of a file that nobody finds
		f.dir = ""
	}
	if f.dir == "" {
		f.dir, f.lock, err = Make(f.Shared, f.Kind, f.Log)
	}
	return err
}

// Close removes the directory with all that is in it. There are no new files any more.
func (f *Files) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if f.dir == "" {
		return nil
	}
	err := errors.Join(Remove(f.dir), f.lock.Close())
	f.dir = ""
	return err
}

// Linked reports whether a file still has its name, by which others open it.
func Linked(file *os.File) bool {
	mine, err := file.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(file.Name())
	return err == nil && os.SameFile(mine, now)
}

// Discard removes and closes a file. Its memory is free when nobody maps it.
func Discard(file *os.File) error {
	err := os.Remove(file.Name())
	if errors.Is(err, os.ErrNotExist) {
		err = nil // gone with the directory
	}
	return errors.Join(err, file.Close())
}
