package shm

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Files are numbered files of one server, in a directory that the first file
// creates: see [Make]. It is safe for concurrent use.
type Files struct {
	Shared string // parent of the directory
	Kind   string // use of the files, as a word in the directory's name
	Log    *slog.Logger

	mu     sync.Mutex
	dir    *Directory // nil: not created
	made   int
	closed bool
}

// New creates an empty file. A directory that was removed from outside, as
// systemd's RemoveIPC does when a user logs out, is created again.
func (f *Files) New() (*os.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.closed {
		if err := f.open(); err != nil {
			return nil, err
		}
		f.made++
		file, err := f.dir.Create(strconv.Itoa(f.made))
		if !errors.Is(err, os.ErrNotExist) {
			return file, err
		}
	}
	return nil, errors.New("the server has ended")
}

// open creates the directory, unless it exists and is this server's.
func (f *Files) open() (err error) {
	if f.dir != nil && f.dir.Lost() {
		f.Log.Warn("shared memory directory removed by another process; making another", "directory", f.dir.Path())
		_ = f.dir.Close() // its files are unreachable
		f.dir = nil
	}
	if f.dir == nil {
		f.dir, err = Make(f.Shared, f.Kind, f.Log)
	}
	return err
}

// Discard removes and closes a file. Its memory is freed when no process maps it.
// A file that was removed from outside is only closed.
func (f *Files) Discard(file *os.File) error {
	err := f.unlink(filepath.Base(file.Name()))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, file.Close()) // without the lock: it frees the memory
}

func (f *Files) unlink(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dir == nil {
		return nil
	}
	return f.dir.Unlink(name)
}

// Close removes the directory with its files. No new files can be created
// afterwards.
func (f *Files) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if f.dir == nil {
		return nil
	}
	err := errors.Join(f.dir.Remove(), f.dir.Close())
	f.dir = nil
	return err
}
