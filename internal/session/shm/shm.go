// Package shm keeps files in shared memory. It decides which users and processes
// may use a directory of them, allocates and reuses their memory, and frees the
// memory of dead processes.
//
//	SHARED/ckptstore-memory-<uid>/   the parent: of this user, mode 0700
//	  ckptstore-<…>-n<…>/            a directory of one process
//	    lock                         flock(2) of the process that owns it
//	    …                            its files
//
// Every user may create names in SHARED, so a name there proves nothing. A
// directory is used if it belongs to this user and has mode 0700, checked through
// its descriptor; everything below it is opened relative to that descriptor,
// without following links. If another user has taken the parent's name, the
// parent gets a random one, ckptstore-memory-<uid>-<random>, which a record of
// this user in XDG_RUNTIME_DIR names. The recorded directory must pass the same
// checks.
//
// Files have names and outlive their processes: the next owner of the directory
// finds them there. The kernel frees the lock when its process is killed. From
// then on any process of this user may free the directory with all its files.
package shm

import (
	"context"
	"errors"
	"os"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Dir returns the directory for such files on this machine, and whether it is in
// memory: without /dev/shm it is on a disk.
func Dir() (dir string, memory bool) {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err == nil && info.IsDir() {
		return shm, true
	}
	return os.TempDir(), false
}

// Room returns the free space in bytes where a file is.
func Room(file *os.File) (int64, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(file.Fd()), &fs)
	return int64(fs.Bavail) * fs.Bsize, err
}

// segment is the number of bytes that a thread touches at a time.
const segment = 32 << 20

// Touch makes the kernel allocate the memory of a mapped file from an offset on,
// with several threads. A first touch costs several times as much as a copy. If
// shared memory is full, Touch returns ENOSPC, where a copy would be killed by
// SIGBUS midway.
func Touch(ctx context.Context, file *os.File, data []byte, from int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(min(runtime.GOMAXPROCS(0), 8))
	for ; from < len(data); from += segment {
		part, from := data[from:min(from+segment, len(data))], from
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return populate(file, part, from)
		})
	}
	return g.Wait()
}

const (
	quiet        = 10      // the nice value of a thread that touches memory for later
	quietSegment = 4 << 20 // bytes, while it holds the process's map of memory
)

// TouchAhead is Touch for memory that is needed later. It uses one thread of low
// priority, which yields to all other computation. With two cores that save and
// train at the same time, the first save of 2 GB took three times as long without
// it.
func TouchAhead(ctx context.Context, file *os.File, data []byte, from int) error {
	return quietly(func() (err error) {
		for ; from < len(data) && err == nil; from += quietSegment {
			if err = ctx.Err(); err == nil {
				err = populate(file, data[from:min(from+quietSegment, len(data))], from)
			}
		}
		return err
	})
}

// quietly calls do in a thread of low priority.
func quietly(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread and its priority end with this goroutine
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, quiet)
		done <- do()
	}()
	return <-done
}

// Unhurried does work that is needed later: in a thread of low priority until hurry is closed, and then in
// the caller's. A nil hurry counts as closed. do returns when until is closed, and continues where it was when
// it is called again; a nil until is never closed.
func Unhurried(hurry <-chan struct{}, do func(until <-chan struct{}) error) error {
	if hurry != nil {
		if err := quietly(func() error { return do(hurry) }); err != nil {
			return err
		}
	}
	return do(nil)
}

// Closed reports whether a channel is closed; a nil one is not.
func Closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// populate makes the kernel allocate part, which begins at from in a mapped file.
func populate(file *os.File, part []byte, from int) error {
	err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
	switch {
	case errors.Is(err, unix.EINVAL): // a kernel before 5.14
		err = unix.Fallocate(int(file.Fd()), 0, int64(from), int64(len(part)))
	case errors.Is(err, unix.EFAULT): // a copy would be killed here
		err = unix.ENOSPC
	}
	return err
}
