package viewdb

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// fence is the file system of a database. It fails the database when an operation does
// not return within its patience, or returns an error that a retry does not cure, such
// as a full disk.
//
// After that, the fence cuts the database off from the file system. A failed database
// cannot be closed, and its background work would damage the directory for the next
// database there: it removes files that it considers its own. After raise, none of its
// operations reach the disk. Its files and its lock are closed, and another database
// may open the directory in this process.
type fence struct {
	vfs.FS
	gate *gate
}

var _ vfs.FS = fence{}

// gate is shared by a fence and its files. Every disk operation holds it, so that raise
// can tell when all operations have left.
type gate struct {
	fail     *failure
	patience time.Duration // for one operation

	mu   sync.RWMutex
	why  atomic.Pointer[error] // set when it is closed
	hold sync.Mutex
	open map[io.Closer]struct{}
}

func newFence(fs vfs.FS, fail *failure, patience time.Duration) fence {
	return fence{fs, &gate{fail: fail, patience: patience, open: map[io.Closer]struct{}{}}}
}

// incurable are the errors that a file system returns again when the operation is
// repeated: it is full, broken, read-only or gone.
var incurable = []error{
	syscall.ENOSPC, syscall.EDQUOT, syscall.EIO, syscall.EROFS, syscall.ENXIO, syscall.ENODEV,
	syscall.ESTALE, syscall.EUCLEAN, syscall.ETIMEDOUT, syscall.ENOTCONN, syscall.EREMOTEIO,
}

// raise closes the gate for good. Further calls do nothing. The files are closed when
// no operation is left inside. An operation that never returns keeps the files and the
// directory's lock open, but does not block the caller of raise.
func (g *gate) raise(why error) {
	if !g.why.CompareAndSwap(nil, &why) {
		return
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		g.mu.Lock()
		defer g.mu.Unlock()
		for c := range g.open {
			// The database has failed: no caller can use this error, and the next owner
			// reads the files as after a kill.
			_ = c.Close()
		}
		clear(g.open)
	}()
	timer := time.NewTimer(leaveTime)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
	}
}

// pass runs do unless the gate is closed.
func (g *gate) pass(do func() error) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if why := g.why.Load(); why != nil {
		return *why
	}
	stop := g.fail.after(g.patience, "an operation of their file system")
	err := do()
	stop()
	if err != nil && slices.ContainsFunc(incurable, func(bad error) bool { return errors.Is(err, bad) }) {
		g.fail.set(err.Error())
	}
	return err
}

// keep registers a file that must be closed with the gate. It must be called inside the
// gate.
func (g *gate) keep(c io.Closer) {
	g.hold.Lock()
	defer g.hold.Unlock()
	g.open[c] = struct{}{}
}

// close is the owner's own close. It does nothing if the gate is closed already.
func (g *gate) close(c io.Closer) error {
	return g.pass(func() error {
		g.hold.Lock()
		delete(g.open, c)
		g.hold.Unlock()
		return c.Close()
	})
}

func (f fence) file(open func() (vfs.File, error)) (file vfs.File, err error) {
	err = f.gate.pass(func() error {
		inner, err := open()
		if err == nil {
			f.gate.keep(inner)
			file = fenced{inner, f.gate}
		}
		return err
	})
	return file, err
}

// Create implements [vfs.FS].
func (f fence) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return f.file(func() (vfs.File, error) { return f.FS.Create(name, c) })
}

// Open implements [vfs.FS].
func (f fence) Open(name string, o ...vfs.OpenOption) (vfs.File, error) {
	return f.file(func() (vfs.File, error) { return f.FS.Open(name, o...) })
}

// OpenReadWrite implements [vfs.FS].
func (f fence) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return f.file(func() (vfs.File, error) { return f.FS.OpenReadWrite(name, c, o...) })
}

// OpenDir implements [vfs.FS].
func (f fence) OpenDir(name string) (vfs.File, error) {
	return f.file(func() (vfs.File, error) { return f.FS.OpenDir(name) })
}

// ReuseForWrite implements [vfs.FS].
func (f fence) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return f.file(func() (vfs.File, error) { return f.FS.ReuseForWrite(from, to, c) })
}

// Link implements [vfs.FS].
func (f fence) Link(from, to string) error {
	return f.gate.pass(func() error { return f.FS.Link(from, to) })
}

// Remove implements [vfs.FS].
func (f fence) Remove(name string) error {
	return f.gate.pass(func() error { return f.FS.Remove(name) })
}

// RemoveAll implements [vfs.FS].
func (f fence) RemoveAll(name string) error {
	return f.gate.pass(func() error { return f.FS.RemoveAll(name) })
}

// Rename implements [vfs.FS].
func (f fence) Rename(from, to string) error {
	return f.gate.pass(func() error { return f.FS.Rename(from, to) })
}

// MkdirAll implements [vfs.FS].
func (f fence) MkdirAll(name string, mode os.FileMode) error {
	return f.gate.pass(func() error { return f.FS.MkdirAll(name, mode) })
}

// List implements [vfs.FS].
func (f fence) List(name string) (names []string, err error) {
	err = f.gate.pass(func() error { names, err = f.FS.List(name); return err })
	return names, err
}

// Stat implements [vfs.FS].
func (f fence) Stat(name string) (info vfs.FileInfo, err error) {
	err = f.gate.pass(func() error { info, err = f.FS.Stat(name); return err })
	return info, err
}

// GetDiskUsage implements [vfs.FS].
func (f fence) GetDiskUsage(name string) (usage vfs.DiskUsage, err error) {
	err = f.gate.pass(func() error { usage, err = f.FS.GetDiskUsage(name); return err })
	return usage, err
}

// Lock implements [vfs.FS]. A locked directory fails the database: an earlier database
// of this process, whose file system did not answer, may hold the lock.
func (f fence) Lock(name string) (lock io.Closer, err error) {
	err = f.gate.pass(func() error {
		inner, err := f.FS.Lock(name)
		if err == nil {
			f.gate.keep(inner)
			lock = fencedLock{inner, f.gate}
		}
		return err
	})
	if err != nil {
		f.gate.fail.set(fmt.Sprintf("lock them: %v; another process may have them open", err))
	}
	return lock, err
}

// Unwrap implements [vfs.FS].
func (f fence) Unwrap() vfs.FS { return f.FS }

// fencedLock is the lock of a directory.
type fencedLock struct {
	lock io.Closer
	gate *gate
}

// Close implements [io.Closer].
func (l fencedLock) Close() error { return l.gate.close(l.lock) }

// fenced is a file behind a fence.
type fenced struct {
	vfs.File
	gate *gate
}

var _ vfs.File = fenced{}

func (f fenced) count(do func() (int, error)) (n int, err error) {
	err = f.gate.pass(func() (err error) { n, err = do(); return err })
	return n, err
}

// Close implements [vfs.File].
func (f fenced) Close() error { return f.gate.close(f.File) }

// Read implements [vfs.File].
func (f fenced) Read(p []byte) (int, error) {
	return f.count(func() (int, error) { return f.File.Read(p) })
}

// ReadAt implements [vfs.File].
func (f fenced) ReadAt(p []byte, at int64) (int, error) {
	return f.count(func() (int, error) { return f.File.ReadAt(p, at) })
}

// Write implements [vfs.File].
func (f fenced) Write(p []byte) (int, error) {
	return f.count(func() (int, error) { return f.File.Write(p) })
}

// WriteAt implements [vfs.File].
func (f fenced) WriteAt(p []byte, at int64) (int, error) {
	return f.count(func() (int, error) { return f.File.WriteAt(p, at) })
}

// Preallocate implements [vfs.File].
func (f fenced) Preallocate(offset, length int64) error {
	return f.gate.pass(func() error { return f.File.Preallocate(offset, length) })
}

// Stat implements [vfs.File].
func (f fenced) Stat() (info vfs.FileInfo, err error) {
	err = f.gate.pass(func() error { info, err = f.File.Stat(); return err })
	return info, err
}

// Sync implements [vfs.File].
func (f fenced) Sync() error { return f.gate.pass(f.File.Sync) }

// SyncData implements [vfs.File].
func (f fenced) SyncData() error { return f.gate.pass(f.File.SyncData) }

// SyncTo implements [vfs.File].
func (f fenced) SyncTo(length int64) (full bool, err error) {
	err = f.gate.pass(func() error { full, err = f.File.SyncTo(length); return err })
	return full, err
}

// Prefetch implements [vfs.File].
func (f fenced) Prefetch(offset, length int64) error {
	return f.gate.pass(func() error { return f.File.Prefetch(offset, length) })
}
