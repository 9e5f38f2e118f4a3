package shm

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// recordLimit is how long another process may hold the record.
const recordLimit = 10 * time.Second

// recordedParent opens the parent in this user's record. It returns nil if there
// is no record, or if the recorded directory is not private.
func recordedParent(root *os.File) (*os.File, error) {
	record, err := openRecord(root, openDirectory, unix.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNotPrivate) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer record.Close()
	return namedParent(root, record)
}

// recordParent creates a parent with an unpredictable name and records it. It
// locks the record meanwhile, so that processes that start together get the same
// parent.
func recordParent(root *os.File) (*os.File, error) {
	record, err := openRecord(root, makeDirectory, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, fmt.Errorf("record the name of shared memory: %w; set XDG_RUNTIME_DIR to a directory of mode 0700", err)
	}
	defer record.Close()
	if err := lockRecord(record); err != nil {
		return nil, err
	}
	if parent, err := namedParent(root, record); parent != nil || err != nil {
		return parent, err
	}
	name := parentName() + "-" + rand.Text()
	parent, err := makeDirectory(root, name)
	if err != nil {
		return nil, err
	}
	if err = record.Truncate(0); err == nil {
		_, err = record.WriteAt([]byte(name), 0)
	}
	if err != nil {
		return nil, errors.Join(err, parent.Close(), unix.Unlinkat(int(root.Fd()), name, unix.AT_REMOVEDIR))
	}
	return parent, nil
}

// namedParent opens the parent in a record. It returns nil if that is no longer a
// private directory.
func namedParent(root, record *os.File) (*os.File, error) {
	text, err := io.ReadAll(io.LimitReader(record, 256))
	name := string(text)
	if err != nil || !strings.HasPrefix(name, parentName()+"-") || strings.Contains(name, "/") {
		return nil, err
	}
	parent, err := openDirectory(root, name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrNotPrivate) {
		return nil, nil
	}
	return parent, err
}

// openRecord opens this user's record for a directory of shared memory.
func openRecord(root *os.File, open opener, flags int) (*os.File, error) {
	dir, err := runtimeDirectory(open)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	of := sha256.Sum256([]byte(root.Name()))
	return openFile(dir, fmt.Sprintf("ckptstore-memory-%x", of[:6]), flags)
}

// lockRecord waits for exclusive access to the record.
func lockRecord(record *os.File) error {
	for end := time.Now().Add(recordLimit); ; {
		err := unix.Flock(int(record.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("lock %s: held by another process for %v: end the trainer or agent that is starting", record.Name(), recordLimit)
		}
		<-time.After(5 * time.Millisecond) // bounded by recordLimit
	}
}

// opener is [openDirectory] or [makeDirectory].
type opener func(at *os.File, name string) (*os.File, error)

// runtimeDirectory opens a private directory of this user: XDG_RUNTIME_DIR, or
// one in the directory for temporary files if that is unset.
func runtimeDirectory(open opener) (*os.File, error) {
	if path := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(path) {
		if dir, err := openIn(path, openDirectory); err == nil {
			return dir, nil
		}
	}
	return openIn(filepath.Join(os.TempDir(), fmt.Sprintf("ckptstore-%d", os.Getuid())), open)
}

// openIn opens a directory by its path.
func openIn(path string, open opener) (*os.File, error) {
	at, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer at.Close()
	return open(at, filepath.Base(path))
}
