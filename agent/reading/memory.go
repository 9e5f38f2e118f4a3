package reading

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/worker/shm"
)

// rest is how long memory that was given back is kept for the next read.
const rest = 10 * time.Second

// page is the unit of memory.
const page = 4096

// memory is the files of reads. The directory is made by the first of them.
type memory struct {
	shared string
	log    *slog.Logger
	rest   time.Duration
	room   func(*os.File) (int64, error)

	mu     sync.Mutex
	dir    string
	lock   *os.File
	uses   int
	idle   []*file // given back, the newest last
	closed bool
}

// file is mapped memory of one read.
type file struct {
	path  string
	file  *os.File
	data  []byte
	timer *time.Timer // frees it; nil: it is in use
}

// FullError says that shared memory has no room for a read.
type FullError struct {
	Dir        string
	Need, Free int64 // bytes
}

// Error says what to do.
func (e *FullError) Error() string {
	return fmt.Sprintf("the read needs %d bytes of shared memory in %s, and %d are free: read it in parts, fewer tensors or slices at a time, or make room there", e.Need, e.Dir, e.Free)
}

// Is makes every FullError one of a full disk.
func (e *FullError) Is(target error) bool { return target == syscall.ENOSPC }

func newMemory(shared string, log *slog.Logger) *memory {
	return &memory{shared: shared, log: log, rest: rest, room: shm.Room}
}

// open makes the directory, and frees those of servers that were killed. The
// caller holds the lock.
func (m *memory) open() (err error) {
	if m.dir == "" {
		m.dir, m.lock, err = shm.Make(m.shared, "reads", m.log)
	}
	return err
}

// bytes are the memory of a file; of none, none.
func (f *file) bytes() []byte {
	if f == nil {
		return nil
	}
	return f.data
}

// take is a file of at least size bytes, whose memory is there; of none, nil.
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

// choose is the smallest idle file that is large enough, or else the largest, to
// be grown, or else a new one.
func (m *memory) choose(size int64) (*file, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errors.New("the server has ended")
	}
	if err := m.open(); err != nil {
		return nil, err
	}
	best := -1
	for i, f := range m.idle {
		if best < 0 || better(f.size(), m.idle[best].size(), size) {
			best = i
		}
	}
	if best >= 0 {
		f := m.idle[best]
		m.idle = slices.Delete(m.idle, best, best+1)
		f.timer.Stop()
		f.timer = nil
		return f, nil
	}
	m.uses++
	path := filepath.Join(m.dir, strconv.Itoa(m.uses))
	opened, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return &file{path: path, file: opened}, nil
}

func (f *file) size() int64 { return int64(len(f.data)) }

// better reports whether a file of a bytes serves a need better than one of b.
func better(a, b, need int64) bool {
	if (a >= need) != (b >= need) {
		return a >= need
	}
	if a >= need {
		return a < b
	}
	return a > b
}

// grow makes a file hold at least size bytes.
func (m *memory) grow(ctx context.Context, f *file, size int64) error {
	if size <= f.size() {
		return nil
	}
	free, err := m.room(f.file)
	if err != nil {
		return err
	}
	if need := size - f.size(); need > free {
		m.spare()
		if free, err = m.room(f.file); err != nil {
			return err
		}
		if need > free {
			return &FullError{Dir: m.shared, Need: size, Free: free + f.size()}
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
		return fmt.Errorf("map %s: %w", f.path, err)
	}
	err = shm.Touch(ctx, f.file, f.data, old)
	if errors.Is(err, syscall.ENOSPC) { // somebody else has taken it meanwhile
		free, rerr := m.room(f.file)
		return errors.Join(&FullError{Dir: m.shared, Need: size, Free: free}, rerr)
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

// give takes a file back, and keeps it for a while. The caller that had it may
// still read it if it breaks its word: it then reads what others have asked for,
// in this store, as the same user.
func (m *memory) give(f *file) {
	if f == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		m.free(f)
		return
	}
	f.timer = time.AfterFunc(m.rest, func() {
		m.mu.Lock()
		at := slices.Index(m.idle, f)
		if at >= 0 {
			m.idle = slices.Delete(m.idle, at, at+1)
		}
		m.mu.Unlock()
		if at >= 0 {
			m.free(f)
		}
	})
	m.idle = append(m.idle, f)
}

// spare frees what is kept.
func (m *memory) spare() {
	m.mu.Lock()
	idle := m.idle
	m.idle = nil
	m.mu.Unlock()
	for _, f := range idle {
		f.timer.Stop()
		m.free(f)
	}
}

// free gives memory back to the system. What a caller still maps stays until it
// does not: to cut the file would kill it.
func (m *memory) free(f *file) {
	if f == nil {
		return
	}
	gone := os.Remove(f.path)
	if errors.Is(gone, os.ErrNotExist) {
		gone = nil // with the directory
	}
	if err := errors.Join(f.unmap(), gone, f.file.Close()); err != nil {
		m.log.Warn("the memory of a read is not freed", "file", f.path, "error", err)
	}
}

// close frees all that is idle, and the directory. Nothing is taken any more.
func (m *memory) close() error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.spare()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dir == "" {
		return nil
	}
	err := errors.Join(shm.Remove(m.dir), m.lock.Close())
	m.dir = ""
	return err
}
