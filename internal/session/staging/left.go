package staging

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// Left is a sealed slot of a dead owner, mapped until it is closed.
type Left struct {
	Header
	Local checkpoint.Local // the rank's plan, with as many items as the header has spans
	data  []byte
}

// Sealed returns the slots of an attempt that a dead owner left sealed. It logs
// the invalid slots, which [Arenas.KeepLeft] frees along with all that are not
// returned.
func (a *Arenas) Sealed(attempt int, log *slog.Logger) (found []*Left) {
	for _, name := range a.left {
		if !isSlot(name) {
			continue
		}
		data, err := mapLeft(a.dir, name)
		if err != nil || len(data) == 0 {
			log.Warn("staging slot of a dead trainer unreadable; freed", "file", a.path(name), "error", err)
			continue
		}
		h, complete, err := readHeader(data)
		s := &Left{Header: h, data: data}
		if err == nil && complete && h.Attempt == attempt {
			if s.Local, err = checkpoint.DecodeLocal(h.Plan); err == nil && len(s.Local.Items) == len(h.Spans) {
				found = append(found, s)
				continue
			}
		}
		s.Close()
		if err != nil {
			log.Warn("staging slot of a dead trainer has an invalid header; freed", "file", a.path(name), "error", err)
		}
	}
	return found
}

// Bytes returns the total size of the slot's items.
func (s *Left) Bytes() (n int64) {
	for _, at := range s.Spans {
		n += at.Size
	}
	return n
}

// Source returns the bytes of items in the slot.
func (s *Left) Source(items []checkpoint.Item) (data.Source, error) {
	at := make(map[string]Span, len(s.Spans))
	for i, it := range s.Local.Items {
		at[Key(it)] = s.Spans[i]
	}
	return source(s.data, at, s.Rank, items)
}

// Close unmaps the slot.
func (s *Left) Close() {
	_ = unix.Munmap(s.data) // only this process maps it
	s.data = nil
}

// isSlot reports whether a file in the directory is a slot.
func isSlot(name string) bool { return strings.Contains(name, "."+slotUse+".") }

// mapLeft maps a slot that another process made.
func mapLeft(dir *shm.Directory, name string) ([]byte, error) {
	f, err := dir.Open(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
}

// KeepLeft takes over the slots of a dead owner that hold a checkpoint, and frees
// all others. It logs and frees slots that cannot be read.
func (a *Arenas) KeepLeft(checkpoint string, log *slog.Logger) error {
	for _, name := range a.left {
		if checkpoint == "" || !isSlot(name) {
			continue
		}
		f, k, err := a.openLeft(name, checkpoint)
		if err != nil {
			log.Warn("staging slot of a dead trainer unreadable; freed", "file", a.path(name), "error", err)
		}
		if f == nil {
			continue
		}
		a.keep(f, k)
		a.mu.Lock()
		a.live[f] = true
		a.left = slices.DeleteFunc(slices.Clone(a.left), func(at string) bool { return at == name })
		a.mu.Unlock()
	}
	return a.freeLeft()
}

// freeLeft removes the files of a dead trainer.
func (a *Arenas) freeLeft() error {
	for _, name := range a.left {
		if err := a.dir.Unlink(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("free what a dead trainer left in shared memory: %w", err)
		}
	}
	a.left = nil
	return nil
}

// openLeft opens the slot in a file, if it is complete and holds the checkpoint.
func (a *Arenas) openLeft(name, id string) (f *Arena, k *kept, err error) {
	file, err := a.dir.Open(name, os.O_RDWR)
	if err != nil {
		return nil, nil, err
	}
	f = &Arena{path: a.path(name), use: slotUse, file: file, room: a.room}
	defer func() {
		if k == nil {
			err = errors.Join(err, f.unmap())
			f = nil
		}
	}()
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return f, nil, err
	}
	// The memory exists: to map it page by page takes longer than to copy it.
	if f.data, err = unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return f, nil, err
	}
	f.size.Store(info.Size())
	h, complete, err := readHeader(f.data)
	if err != nil || !complete || h.Checkpoint != id {
		if errors.Is(err, errNoSlot) {
			err = nil // Sealed has logged it
		}
		return f, nil, err
	}
	local, err := checkpoint.DecodeLocal(h.Plan)
	if err != nil || len(local.Items) != len(h.Spans) {
		return f, nil, err
	}
	f.rank = h.Rank
	return f, keptOf(id, h.Rank, local.Items, h.Spans, h.Digests), nil
}

// keptOf returns the content of a slot, by the description in its header.
func keptOf(id string, rank int, items []checkpoint.Item, spans []Span, digests []checkpoint.Digest) *kept {
	k := &kept{checkpoint: id, rank: rank, at: make(map[string]Span, len(items))}
	if digests != nil {
		k.digests = make(map[string]checkpoint.Digest, len(items))
	}
	for i, it := range items {
		key := Key(it)
		k.at[key] = spans[i]
		if digests != nil {
			k.digests[key] = digests[i]
		}
	}
	return k
}
