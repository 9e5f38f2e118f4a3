// Package shm keeps files in shared memory: who owns a directory of them, how
// their memory is made and kept for the next, and how that of a dead process is
// freed.
//
//	SHARED/ckptstore-<…>-n<…>/
//	  lock   flock(2) of the process that owns the directory
//	  …      its files
//
// The kernel frees the lock when its process is killed. From then on anybody may
// free the directory, whatever is in it.
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
			err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
			switch {
			case errors.Is(err, unix.EINVAL): // a kernel before 5.14
				err = unix.Fallocate(int(file.Fd()), 0, int64(from), int64(len(part)))
			case errors.Is(err, unix.EFAULT): // a copy would have been killed here
				err = unix.ENOSPC
			}
			return err
		})
	}
	return g.Wait()
}
