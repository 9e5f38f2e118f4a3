package store

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// heldRuntime is the runtime directory of an open store. Every process that has
// the store open holds a shared flock(2) on the directory. Whoever removes the
// directory holds the exclusive one, so that it is never removed under a store
// that is open; a process that comes at that moment makes the directory again.
type heldRuntime struct {
	dir  string
	lock *os.File // nil when it was released
}

// holdLimit is how long a remover may keep the exclusive lock.
const holdLimit = 10 * time.Second

// holdRuntime makes the runtime directory of a store and keeps it from being
// removed.
func holdRuntime(id string) (*heldRuntime, error) {
	for end := time.Now().Add(holdLimit); ; {
		dir, err := runtimeDir(id)
		if err != nil {
			return nil, err
		}
		lock, err := lockRuntime(dir, unix.LOCK_SH)
		if lock != nil {
			return &heldRuntime{dir, lock}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("hold the runtime directory: %w", err)
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("hold the runtime directory: another process keeps %s locked for %v: end it, or set XDG_RUNTIME_DIR to another directory", dir, holdLimit)
		}
		<-time.After(5 * time.Millisecond) // bounded by holdLimit
	}
}

// lockRuntime takes a lock of a directory. It returns nil when another process
// has one in its way, or when the directory at the path is another by now.
func lockRuntime(dir string, how int) (*os.File, error) {
	lock, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, lock.Close()
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if !samePlace(lock) {
		return nil, lock.Close()
	}
	return lock, nil
}

// samePlace reports whether an open file still has its path.
func samePlace(f *os.File) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(mine, now)
}

// release lets go of the directory, and removes it if it is empty and no other
// process has the store open. What is in it otherwise is swept by the next owner
// of any store.
func (h *heldRuntime) release() error {
	if h == nil || h.lock == nil {
		return nil
	}
	lock := h.lock
	h.lock = nil
	// The kernel drops the shared lock before it takes the other one, so the
	// directory may be somebody else's new one by now.
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && samePlace(lock) {
		// It is not empty while a job's or an agent's files are in it.
		_ = os.Remove(h.dir)
	}
	return lock.Close()
}

// sweepRuntimes removes the runtime directories beside own that dead processes
// have left. What cannot be removed is for the next owner.
func sweepRuntimes(own string, log *slog.Logger) {
	dirs, err := filepath.Glob(filepath.Join(filepath.Dir(own), "ckptstore-????????????"))
	if err != nil {
		return // only of a bad pattern
	}
	for _, dir := range dirs {
		if dir == own {
			continue
		}
		if err := sweepRuntime(dir); err != nil {
			log.Debug("runtime directory not removed", "directory", dir, "error", err)
		}
	}
}

// sweepRuntime removes a runtime directory that no living process uses: nobody
// has the store open, all sockets refuse, and no file in it is locked. It keeps
// the exclusive lock meanwhile.
func sweepRuntime(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() || !ownedByMe(info) || time.Since(info.ModTime()) < sweepAge {
		return err
	}
	lock, err := lockRuntime(dir, unix.LOCK_EX)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case e.Type() == os.ModeSocket:
			conn, err := net.Dial("unix", path)
			if err == nil {
				_ = conn.Close()
			}
			if !errors.Is(err, unix.ECONNREFUSED) {
				return err // it answers, or has just gone
			}
		case e.IsDir():
			// A job between two attempts of a program that knows no lock on the
			// directory has no sockets.
			info, err := e.Info()
			sockets, dead := socketsIn(path)
			if err != nil || !dead || sockets == 0 && time.Since(info.ModTime()) < 24*time.Hour {
				return err
			}
		case e.Type().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
				return err // an agent has it
			}
		default:
			return fmt.Errorf("%s is a %v, which nothing of ours makes", path, e.Type())
		}
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return os.Remove(dir) // fails, as it should, if something has come
}
