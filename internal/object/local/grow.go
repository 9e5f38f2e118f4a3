package local

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/disk"
)

// ahead is the number of bytes reserved at a time for a growing file. Otherwise each write
// past the page cache moves the end of the file, and no two of them run in parallel. Files
// written with two parallel writes took 1.7 to 5.8 s of a busy disk without it, and 1.7 to
// 2.5 s with it.
const (
	ahead  = 64 << 20
	plenty = 16 * ahead // free bytes; below, only bytes that are certainly used are reserved
)

// Growing is a file of initially unknown size. It has its final name from the beginning,
// because no reader looks for it before it is finished.
type Growing struct {
	up upload

	mu       sync.Mutex
	size     int64 // bytes written
	reserved int64 // bytes whose blocks are reserved
	unable   bool  // blocks cannot be reserved
}

// Grow creates an empty file.
func (d *Dir) Grow(ctx context.Context, name string) (*Growing, error) {
	path, err := d.at(ctx, name)
	if err != nil {
		return nil, err
	}
	g := &Growing{up: upload{d: d, path: path, temp: path}}
	if g.up.file, err = d.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified); err != nil {
		return nil, fmt.Errorf("create %s: %w", path, disk.NoSpace(err))
	}
	if g.up.file.Fd() != vfs.InvalidFd {
		g.up.past = direct(d.fs, path)
	}
	return g, nil
}

// Depth returns the number of concurrent writes that the file can use.
func (g *Growing) Depth() int { return g.up.Depth() }

// WriteAt writes p at off: pieces of the file, in any order. It writes all of p, or returns
// an error.
func (g *Growing) WriteAt(p []byte, off int64) (n int, err error) {
	g.mu.Lock()
	g.size = max(g.size, off+int64(len(p)))
	g.mu.Unlock()
	if len(p) < smallFile {
		n, err = g.up.file.WriteAt(p, off) // the page cache is faster
		return n, disk.NoSpace(err)
	}
	if err := g.reserve(off + int64(len(p))); err != nil {
		return 0, err
	}
	return g.up.WriteAt(p, off)
}

// reserve allocates the file's blocks up to end, and some more.
func (g *Growing) reserve(end int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.unable || end <= g.reserved || g.up.file.Fd() == vfs.InvalidFd {
		return nil
	}
	more := int64(ahead)
	if usage, err := g.up.d.fs.GetDiskUsage(g.up.d.fs.PathDir(g.up.path)); err != nil || usage.AvailBytes < plenty {
		more = 0 // the reservation would distort the free space that others see
	}
	for ; ; more = 0 {
		done, err := reserve(g.up.file, g.reserved, end-g.reserved+more)
		switch {
		case err == nil && !done:
			g.unable = true
			return nil
		case err == nil:
			g.reserved = end + more
			return nil
		case more == 0: // not even for the bytes being written
			return fmt.Errorf("reserve %d bytes for %s: %w", end-g.reserved, g.up.temp, disk.NoSpace(err))
		}
	}
}

// Finish makes the size bytes of the file durable, and closes it.
func (g *Growing) Finish(size int64) error {
	var err error
	if g.size != size {
		err = fmt.Errorf("%s has %d bytes, the caller declared %d", g.up.temp, g.size, size)
	}
	if err == nil && g.reserved > 0 {
		// Blocks reserved beyond the end would otherwise stay with the file.
		err = unix.Ftruncate(int(g.up.file.Fd()), size)
	}
	if err == nil {
		err = disk.NoSpace(g.up.file.Sync())
	}
	return errors.Join(err, g.up.close())
}

// Abort closes and removes the file, if it is not finished.
func (g *Growing) Abort() { g.up.Abort() }
