// Package shm keeps files in shared memory: who may put them there, who owns a
// directory of them, how their memory is made and kept for the next, and how that of
// a dead process is freed.
//
//	SHARED/ckptstore-memory-<uid>/   the parent: of this user, mode 0700
//	  ckptstore-<…>-n<…>/            a directory of one process
//	    lock                         flock(2) of the process that owns it
//	    …                            its files
//
// Every user may make names in SHARED, so nothing in it is what its name says. A
// directory is used if it belongs to this user and has mode 0700, seen through its
// descriptor, and what is below it is opened relative to that, without following
// links. If another user has taken the parent's name, the parent has a random one,
// ckptstore-memory-<uid>-<random>, and a record of this user in XDG_RUNTIME_DIR
// names it. What the record names has to pass the same checks.
//
// Files have names, and stay when their processes have died: the next owner of the
// directory finds them there. The kernel frees the lock when its process is killed.
// From then on any process of this user may free the directory, whatever is in it.
package shm

import (
	"context"
	"errors"
	"os"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Dir is where such files live on this machine, and whether that is memory:
// without /dev/shm they are files on a disk.
func Dir() (dir string, memory bool) {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err == nil && info.IsDir() {
		return shm, true
	}
	return os.TempDir(), false
}

// Room is how many bytes are free where a file is.
func Room(file *os.File) (int64, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(file.Fd()), &fs)
	return int64(fs.Bavail) * fs.Bsize, err
}

// segment is how much memory a thread touches at a time, in bytes.
const segment = 32 << 20

// Touch makes the kernel provide the memory of a mapped file from an offset on,
// by several threads: a first touch costs several times as much as a copy, and a
// full shared memory is ENOSPC here and would be a SIGBUS in the middle of a
// copy.
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

// TouchAhead is Touch for memory that is needed later: by one thread of a low priority,
// which gives way to whatever else is to be computed. Beside two cores that save and
// train, the first save of 2 GB took three times as long as it does with this.
func TouchAhead(ctx context.Context, file *os.File, data []byte, from int) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread and its priority end with this
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, quiet)
		var err error
		for ; from < len(data) && err == nil; from += quietSegment {
			if err = ctx.Err(); err == nil {
				err = populate(file, data[from:min(from+quietSegment, len(data))], from)
			}
		}
		done <- err
	}()
	return <-done
}

// populate has the kernel provide a part of a mapped file, which begins at from.
func populate(file *os.File, part []byte, from int) error {
	err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
	switch {
	case errors.Is(err, unix.EINVAL): // a kernel before 5.14
		err = unix.Fallocate(int(file.Fd()), 0, int64(from), int64(len(part)))
	case errors.Is(err, unix.EFAULT): // a copy would have been killed here
		err = unix.ENOSPC
	}
	return err
}
