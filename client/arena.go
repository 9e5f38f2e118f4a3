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

// sealedAt is where the generation of a slot that is complete is stored.
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
	// The memory was touched by the trainer; to enter it page by page here
	// would take ten times as long as to copy.
	data, err := syscall.Mmap(int(f.Fd()), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of %s: %w", size, path, err)
	}
	return &arena{data}, nil
}

// openArena opens a file that the trainer has made. It follows no link, and refuses a
// file that another user may have put in its place: what is copied there would be
// that user's.
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

// mappings are the slots of this rank, which stay mapped between saves.
type mappings struct {
	mu    sync.Mutex
	slots map[int]*mapping
	ahead sync.WaitGroup
	stop  context.CancelFunc // ends what runs ahead; nil when nothing does
}

// mapping is one slot. Who has its lock may use its memory.
type mapping struct {
	mu    sync.Mutex
	path  string
	arena *arena // nil: not mapped
}

// use maps a slot, unless it is, and calls f with its memory.
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
		_ = at.unmap() // the process goes on without it
		at.mu.Unlock()
	}
}

// mapAhead maps the slots that later saves will use, as soon as the trainer
// has made them, beside the training.
func (c *Client) mapAhead() {
	m := &c.maps
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop != nil {
		return // it is under way
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
		// Whatever goes wrong here is an error of the save that needs the slot.
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

// seal says that the bytes of a slot are complete, after all of them as every
// processor sees it.
func seal(data []byte, generation uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&data[sealedAt])), generation)
}
