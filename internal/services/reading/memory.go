package reading

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// rest is how long released memory is kept for the next read.
const rest = 10 * time.Second

// page is the unit of memory.
const page = 4096

// memory is the files of reads.
type memory struct {
	files shm.Files
	idle  shm.Idle[*file]
	log   *slog.Logger
	room  func(*os.File) (int64, error)
}

// file is mapped memory of one read.
type file struct {
	file *os.File
	data []byte
}

// FullError reports that shared memory has no room for a read.
type FullError struct {
	Dir        string
	Need, Free int64 // bytes
}

// Error returns the sizes and the next step.
func (e *FullError) Error() string {
	return fmt.Sprintf("the read needs %d bytes of shared memory in %s, and %d are free: read it in parts, fewer tensors or slices at a time, or make room there", e.Need, e.Dir, e.Free)
}

// Is makes every FullError an ENOSPC.
func (e *FullError) Is(target error) bool { return target == syscall.ENOSPC }

func newMemory(shared string, log *slog.Logger) *memory {
	m := &memory{log: log, room: shm.Room}
	m.files.Shared, m.files.Kind, m.files.Log = shared, "reads", log
	m.idle.Rest, m.idle.Free = rest, m.free
	return m
}

// bytes returns the memory of a file; nil for nil.
func (f *file) bytes() []byte {
	if f == nil {
		return nil
	}
	return f.data
}

// take returns a file of at least size bytes with allocated memory; nil for size
// 0.
func (m *memory) take(ctx context.Context, size int64) (*file, error) {
	if size == 0 {
		return nil, ctx.Err()
	}
	size = (size + page - 1) / page * page
	f, err := m.choose(size)
	if err != nil {
		return nil, fmt.Errorf("shared memory for a read: %w", err)
	}
	if err := m.grow(ctx, f, size); err != nil {
		m.free(f)
		return nil, fmt.Errorf("shared memory for a read: %w", err)
	}
	return f, nil
}

// choose returns the smallest idle file that is large enough, or else the
// largest, to be grown, or else a new file.
func (m *memory) choose(size int64) (*file, error) {
	serves := func(a, b *file) bool { return better(a.size(), b.size(), size) }
	for f, ok := m.idle.Take(serves); ok; f, ok = m.idle.Take(serves) {
		if shm.Linked(f.file) {
			return f, nil
		}
		m.free(f)
	}
	opened, err := m.files.New()
	if err != nil {
		return nil, err
	}
	return &file{file: opened}, nil
}

func (f *file) size() int64 { return int64(len(f.data)) }

// better reports whether a file of a bytes fits a need better than a file of b
// bytes.
func better(a, b, need int64) bool {
	if (a >= need) != (b >= need) {
		return a >= need
	}
	if a >= need {
		return a < b
	}
	return a > b
}

// grow extends a file to at least size bytes.
func (m *memory) grow(ctx context.Context, f *file, size int64) error {
	if size <= f.size() {
		return nil
	}
	free, err := m.room(f.file)
	if err != nil {
		return err
	}
	if need := size - f.size(); need > free {
		m.idle.Spare()
		if free, err = m.room(f.file); err != nil {
			return err
		}
		if need > free {
			return &FullError{Dir: m.files.Shared, Need: size, Free: free + f.size()}
		}
	}
	old := len(f.data)
	if err := f.unmap(); err != nil {
		return err
	}
	if err := f.file.Truncate(size); err != nil {
		return err
	}
	if f.data, err = unix.Mmap(int(f.file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %s: %w", f.file.Name(), err)
	}
	err = shm.Touch(ctx, f.file, f.data, old)
	if errors.Is(err, syscall.ENOSPC) { // another process has taken it meanwhile
		free, rerr := m.room(f.file)
		return errors.Join(&FullError{Dir: m.files.Shared, Need: size, Free: free}, rerr)
	}
	return err
}

func (f *file) unmap() error {
	if f.data == nil {
		return nil
	}
	err := unix.Munmap(f.data)
	f.data = nil
	return err
}

// give takes a file back, and keeps it for a while. A misbehaving caller may
// still read it: it then sees the data of later reads in this store, by the same
// user.
func (m *memory) give(f *file) {
	if f != nil {
		m.idle.Keep(f)
	}
}

// free returns memory to the system. The part that a caller still maps stays
// until it unmaps it: truncating the file would kill the caller.
func (m *memory) free(f *file) {
	if f == nil {
		return
	}
	if err := errors.Join(f.unmap(), m.files.Discard(f.file)); err != nil {
		m.log.Warn("memory of a read not freed", "file", f.file.Name(), "error", err)
	}
}

// close frees all idle files, and the directory. No more files can be taken.
func (m *memory) close() error {
	m.idle.Close()
	return m.files.Close()
}
