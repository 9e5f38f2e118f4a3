package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/ckptstore/ckptstore/internal/private"
)

// sealedAt is the offset of a complete slot's generation.
const sealedAt = 8

// arena is a mapped file in shared memory. The file belongs to the trainer.
type arena struct{ data []byte }

func mapArena(path string, size int64) (*arena, error) {
	if size == 0 {
		return &arena{}, nil
	}
	f, err := openArena(path)
	if err != nil {
		return nil, fmt.Errorf("open shared memory: %w", err)
	}
	defer func() { _ = f.Close() }()
	// The trainer has touched the memory. Without MAP_POPULATE, page faults here
	// would take ten times as long as the copy.
	data, err := syscall.Mmap(int(f.Fd()), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of %s: %w", size, path, err)
	}
	return &arena{data}, nil
}

// openArena opens a file that the trainer created. It follows no symbolic link and
// refuses a file that another user may have put there: that user could read the state
// copied into it.
func openArena(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := private.OnlyName(path, info, "run the worker as the trainer's user"); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (a *arena) close() error {
	if a.data == nil {
		return nil
	}
	return syscall.Munmap(a.data)
}

// mappings holds the slots of this rank, which stay mapped between saves.
type mappings struct {
	mu    sync.Mutex
	slots map[int]*mapping
	ahead sync.WaitGroup
	stop  context.CancelFunc // ends mapAhead; nil when it is not running
}

// mapping is one slot.
type mapping struct {
	mu    sync.Mutex // held while the memory is in use
	path  string
	arena *arena // nil: not mapped
}

// use maps a slot if necessary and calls f with its memory.
func (m *mappings) use(slot int, path string, size int64, f func(data []byte)) error {
	m.mu.Lock()
	if m.slots == nil {
		m.slots = map[int]*mapping{}
	}
	at := m.slots[slot]
	if at == nil {
		at = &mapping{}
		m.slots[slot] = at
	}
	m.mu.Unlock()
	at.mu.Lock()
	defer at.mu.Unlock()
	if at.arena == nil || at.path != path || int64(len(at.arena.data)) < size {
		a, err := mapArena(path, size)
		if err != nil {
			return err
		}
		if err := at.unmap(); err != nil {
			return err
		}
		at.arena, at.path = a, path
	}
	f(at.arena.data)
	return nil
}

func (at *mapping) unmap() error {
	if at.arena == nil {
		return nil
	}
	err := at.arena.close()
	at.arena = nil
	return err
}

// close unmaps all slots.
func (m *mappings) close() {
	m.mu.Lock()
	stop := m.stop
	m.mu.Unlock()
	if stop != nil {
		stop()
	}
	m.ahead.Wait()
	m.mu.Lock()
	slots := m.slots
	m.slots = nil
	m.mu.Unlock()
	for _, at := range slots {
		at.mu.Lock()
		_ = at.unmap() // harmless: the memory just stays mapped
		at.mu.Unlock()
	}
}

// mapAhead maps the slots of later saves in the background, as soon as the
// trainer has allocated them.
func (c *Client) mapAhead() {
	m := &c.maps
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop != nil {
		return // already running
	}
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	m.ahead.Go(func() {
		defer func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			stop()
			m.stop = nil
		}()
		var ready Slots
		// Errors are ignored: the save that needs the slot returns them.
		if err := c.call(ctx, "slots", struct{}{}, &ready); err != nil {
			return
		}
		for _, s := range ready.Slots {
			if ctx.Err() == nil {
				_ = m.use(s.Slot, s.Arena, s.Size, func([]byte) {})
			}
		}
	})
}

// seal marks the bytes of a slot complete. The atomic store orders it after all
// of them, on every processor.
func seal(data []byte, generation uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&data[sealedAt])), generation)
}
