package foreign

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"sync"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/disk"
)

// While an export is made, these lie next to its directory:
//
//	DIR.partial-XXXXXXXXXXXXX/         the new files
//	DIR.partial-XXXXXXXXXXXXX/.lock    locked while the export is running
//	DIR.replaced-XXXXXXXXXXXXX/        the previous DIR, until it is removed
const (
	partialMark  = ".partial-"
	replacedMark = ".replaced-"
	exportLock   = ".lock"
)

// working has the paths of the new files of all exports of this process: its own locks do not
// exclude it.
var working sync.Map

// stale reports the leftovers of killed exports next to dir.
func (x *exporter) stale() error {
	names, err := x.fs.List(path.Dir(x.dir))
	if err != nil || x.o.Stale == nil {
		return disk.Gone(err)
	}
	for _, name := range names {
		full := path.Join(path.Dir(x.dir), name)
		rest, ok := strings.CutPrefix(name, path.Base(x.dir))
		if !ok || !strings.HasPrefix(rest, partialMark) && !strings.HasPrefix(rest, replacedMark) {
			continue
		}
		busy, err := x.busy(full)
		if err != nil {
			return fmt.Errorf("check whether the export to %s is running: %w", full, err)
		}
		if !busy {
			x.o.Stale(full, strings.HasPrefix(rest, replacedMark))
		}
	}
	return nil
}

// busy reports whether an export writes to a directory. If the lock may not be opened or
// locked, the directory does not count as busy.
func (x *exporter) busy(dir string) (bool, error) {
	if _, ok := working.Load(dir); ok {
		return true, nil
	}
	lock := path.Join(dir, exportLock)
	if _, err := x.fs.Stat(lock); err != nil {
		return false, disk.Gone(err)
	}
	held, err := x.fs.Lock(lock)
	var opened *fs.PathError
	switch {
	case err == nil:
		return false, held.Close()
	case lockless(err), errors.As(err, &opened) && (errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS)):
		return false, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.EACCES):
		return true, nil // or it has ended just now
	}
	return false, err
}

// lockless reports whether err is from a filesystem without locks.
func lockless(err error) bool {
	return errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.ENOTSUP) || errors.Is(err, syscall.ENOLCK)
}

// claim makes the directory next to dir for the new files, under a name that no other export
// has on any machine.
func (x *exporter) claim() (partial string, lock io.Closer, err error) {
	x.suffix = strings.ToLower(rand.Text()[:13])
	partial = x.dir + partialMark + x.suffix
	if _, err := x.fs.Stat(partial); err == nil {
		return "", nil, fmt.Errorf("%s already exists; try again", partial)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", nil, err
	}
	if err := x.fs.MkdirAll(partial, 0o755); err != nil {
		return "", nil, unwritable(disk.NoSpace(err))
	}
	lock, err = x.fs.Lock(path.Join(partial, exportLock))
	if err != nil && !lockless(err) {
		return "", nil, errors.Join(disk.NoSpace(err), x.fs.RemoveAll(partial))
	}
	working.Store(partial, nil)
	return partial, lock, nil
}

// unlock ends the claim of a complete directory.
func (x *exporter) unlock(partial string, lock io.Closer) error {
	if lock == nil {
		return nil
	}
	return errors.Join(lock.Close(), x.fs.Remove(path.Join(partial, exportLock)))
}
