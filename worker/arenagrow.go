package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// grow makes an arena hold at least size bytes. The memory is there and was
// touched when grow returns: a first touch costs several times as much as a
// copy, and a full shared memory is an error here and would be a SIGBUS in the
// middle of a copy.
func (f *arena) grow(ctx context.Context, size int64) error {
	size = (size + arenaPage - 1) / arenaPage * arenaPage
	if size <= int64(len(f.data)) {
		return nil
	}
	reserve := func(err error) error {
		return fmt.Errorf("reserve %d bytes in %s: %w: make room in shared memory", size, f.path, err)
	}
	room, err := f.room(f.file)
	if err != nil {
		return reserve(err)
	}
	if size-int64(len(f.data)) > room {
		return reserve(unix.ENOSPC)
	}
	old := len(f.data)
	if f.data != nil {
		if err := unix.Munmap(f.data); err != nil {
			return fmt.Errorf("unmap %s: %w", f.path, err)
		}
		f.data = nil
	}
	if err := f.file.Truncate(size); err != nil {
		return reserve(err)
	}
	data, err := unix.Mmap(int(f.file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", f.path, err)
	}
	f.data = data
	f.size.Store(size)
	if err := f.touch(ctx, old); err != nil {
		return reserve(err)
	}
	return nil
}

// roomOf is how many bytes of shared memory are free where a file is.
func roomOf(file *os.File) (int64, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(int(file.Fd()), &fs)
	return int64(fs.Bavail) * fs.Bsize, err
}

// touchSegment is how much memory a thread touches at a time, in bytes.
const touchSegment = 32 << 20

// touch makes the kernel provide the memory from an offset on, by several
// threads.
func (f *arena) touch(ctx context.Context, from int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(min(runtime.GOMAXPROCS(0), 8))
	for from := from; from < len(f.data); from += touchSegment {
		part := f.data[from:min(from+touchSegment, len(f.data))]
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
			switch {
			case errors.Is(err, unix.EINVAL): // a kernel before 5.14
				err = unix.Fallocate(int(f.file.Fd()), 0, int64(from), int64(len(part)))
			case errors.Is(err, unix.EFAULT): // a copy would have been killed here
				err = unix.ENOSPC
			}
			return err
		})
	}
	return g.Wait()
}
