package staging

import (
	"context"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/session/shm"
	"golang.org/x/sys/unix"
)

// grow makes an arena hold at least size bytes. The memory is there and was
// touched when grow returns: a first touch costs several times as much as a
// copy, and a full shared memory is an error here and would be a SIGBUS in the
// middle of a copy. Ahead of its use that is done beside all else.
func (f *Arena) grow(ctx context.Context, size int64, ahead bool) error {
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
	touch := shm.Touch
	if ahead {
		touch = shm.TouchAhead
	}
	if err := touch(ctx, f.file, f.data, old); err != nil {
		return reserve(err)
	}
	return nil
}
