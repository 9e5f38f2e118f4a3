package filesystem

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// A client fills one block while earlier blocks are digested and written. Memory
// that was touched before takes a copy several times as fast as fresh memory, so
// a few blocks are reused, by later streams too. Blocks of 4 and 2 MiB, which
// need more requests, were no faster and took no less processor time.
const (
	blockSize  = 8 << 20
	ringBlocks = 8               // maximum of a stream
	allBlocks  = 16 * ringBlocks // maximum of all streams, except that each has at least one
)

// rest is how long the memory of a closed stream is kept for the next.
const rest = 10 * time.Second

// memory holds the rings of streams.
type memory struct {
	files shm.Files
	idle  shm.Idle[*ring]
	log   *slog.Logger
	room  func(*os.File) (int64, error)

	mu   sync.Mutex
	busy map[*ring]bool
}

// FullError reports that shared memory has no room for one block.
type FullError struct {
	Dir        string
	Need, Free int64 // bytes
}

// Error returns the sizes and the next step.
func (e *FullError) Error() string {
	return fmt.Sprintf("a file that is written needs %d bytes of shared memory in %s, and %d are free: make room there, or give it more (docker run --shm-size)", e.Need, e.Dir, e.Free)
}

// Is makes every FullError an ENOSPC.
func (e *FullError) Is(target error) bool { return target == syscall.ENOSPC }

func newMemory(shared string, log *slog.Logger) *memory {
	m := &memory{log: log, room: shm.Room, busy: map[*ring]bool{}}
	m.files.Shared, m.files.Kind, m.files.Log = shared, "writes", log
	m.idle.Rest, m.idle.Free = rest, m.free
	return m
}

// take returns memory for a stream, of as many blocks as there is room for.
func (m *memory) take() (*ring, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, err := m.choose()
	if err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	blocks, err := m.blocks(r)
	if err != nil {
		m.free(r)
		return nil, err
	}
	r.begin(blocks)
	m.busy[r] = true
	return r, nil
}

// choose returns the ring that was kept last, or a new ring, which takes no
// memory before it is written.
func (m *memory) choose() (*ring, error) {
	for r, ok := m.idle.Take(alike); ok; r, ok = m.idle.Take(alike) {
		if shm.Linked(r.file) {
			return r, nil
		}
		m.free(r)
	}
	file, err := m.files.New()
	if err != nil {
		return nil, err
	}
	r := &ring{file: file}
	if err = r.file.Truncate(ringBlocks * blockSize); err == nil {
		r.data, err = unix.Mmap(int(r.file.Fd()), 0, ringBlocks*blockSize, unix.PROT_READ, unix.MAP_SHARED)
	}
	if err != nil {
		m.free(r)
		return nil, fmt.Errorf("map %s: %w", file.Name(), err)
	}
	return r, nil
}

// alike ranks all rings as equal.
func alike(_, _ *ring) bool { return false }

// blocks returns how many blocks a ring may use: those that it has touched, and
// more if free memory is not promised to other rings.
func (m *memory) blocks(r *ring) (int, error) {
	left := allBlocks
	for other := range m.busy {
		left -= other.blocks
	}
	for {
		free, err := m.room(r.file)
		if err != nil {
			return 0, err
		}
		for other := range m.busy {
			free -= int64(other.blocks-min(other.touched(), other.blocks)) * blockSize
		}
		n := min(ringBlocks, max(left, 1), r.touched()+int(max(free, 0)/blockSize))
		switch {
		case n == ringBlocks || n > 0 && n >= left:
			return n, nil
		case m.idle.Spare(): // there is more room now
		case n > 0:
			return n, nil
		default:
			return 0, &FullError{Dir: m.files.Shared, Need: blockSize, Free: max(free, 0)}
		}
	}
}

// keep takes back the memory of a stream that its client has closed and no longer
// writes to. The memory of any other stream is freed instead: its client may not
// know yet that it has lost it, and would write into another stream's memory.
func (m *memory) keep(r *ring) {
	m.mu.Lock()
	delete(m.busy, r)
	m.mu.Unlock()
	m.idle.Keep(r)
}

// lose frees the memory of a stream that was not closed.
func (m *memory) lose(r *ring) {
	m.mu.Lock()
	delete(m.busy, r)
	m.mu.Unlock()
	m.free(r)
}

// free returns memory to the system, as soon as no client has it open.
func (m *memory) free(r *ring) {
	var unmapped error
	if r.data != nil {
		unmapped = unix.Munmap(r.data)
	}
	if err := errors.Join(unmapped, m.files.Discard(r.file)); err != nil {
		m.log.Warn("memory of a stream not freed", "file", r.file.Name(), "error", err)
	}
}

// close frees all kept rings, and the directory. No more rings can be taken.
func (m *memory) close() error {
	m.idle.Close()
	return m.files.Close()
}
