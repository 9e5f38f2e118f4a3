package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/storage/disk"
)

// Growing is a file that another process writes, through the page cache, from
// its beginning to its end: there the next reader finds it. This process reads
// along, and has the disk follow.
type Growing struct {
	path string
	file *os.File
}

// Grow creates an empty file for another process to write.
func (d *Dir) Grow(ctx context.Context, name string) (*Growing, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, disk.NoSpace(err))
	}
	return &Growing{path: path, file: file}, nil
}

// Path is where the other process opens it.
func (g *Growing) Path() string { return g.path }

// See gives what was written from an offset on, in memory that is only valid
// meanwhile, and has the disk begin to write that.
func (g *Growing) See(offset int64, size int, use func(data []byte)) (err error) {
	info, err := g.file.Stat()
	if err != nil {
		return err
	}
	if info.Size() < offset+int64(size) {
		return fmt.Errorf("%s has %d bytes, %d are said to be written", g.path, info.Size(), offset+int64(size))
	}
	err = unix.SyncFileRange(int(g.file.Fd()), offset, int64(size), unix.SYNC_FILE_RANGE_WRITE)
	if err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.ESPIPE) {
		return fmt.Errorf("write %s: %w", g.path, disk.NoSpace(err))
	}
	return Mapped(g.file.Fd(), g.path, offset, size, use)
}

// Mapped gives bytes of a file as they are in the page cache, without a copy. A
// file that is cut meanwhile, or cannot be read, is an error.
func Mapped(fd uintptr, path string, offset int64, size int, use func(data []byte)) (err error) {
	if size == 0 {
		use(nil)
		return nil
	}
	skip := int(offset % int64(os.Getpagesize()))
	data, err := unix.Mmap(int(fd), offset-int64(skip), size+skip, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes at %d of %s: %w", size, offset, path, err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(data)) }()
	// All at once is faster than page by page. An older kernel cannot, and a file
	// that was cut is found below.
	_ = unix.Madvise(data, unix.MADV_POPULATE_READ)
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = fmt.Errorf("read %d bytes at %d of %s: the file was cut, or the disk does not give them", size, offset, path)
		default:
			panic(fault)
		}
	}()
	use(data[skip:])
	return nil
}

// Finish makes the bytes durable, of which there are size, and closes the file.
func (g *Growing) Finish(size int64) error {
	info, err := g.file.Stat()
	if err == nil && info.Size() != size {
		err = fmt.Errorf("%s has %d bytes, %d were said to be written", g.path, info.Size(), size)
	}
	if err == nil {
		err = disk.NoSpace(g.file.Sync())
	}
	return errors.Join(err, g.file.Close())
}

// Abort closes and removes the file, if it is not finished.
func (g *Growing) Abort() {
	if g.file.Close() == nil {
		_ = os.Remove(g.path) // what stays goes with its directory
	}
}
