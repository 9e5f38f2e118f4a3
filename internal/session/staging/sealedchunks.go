package staging

import (
	"context"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// SealedChunks finds chunks of a store by digest in the staging slots of this
// machine: of saves that are being written, that were written, or that a dead
// trainer left. A slot in use may change at any moment, so bytes are copied first
// and digested then. SealedChunks takes no lock, changes nothing, and keeps the
// slots mapped until it is closed.
type SealedChunks struct {
	slots []sealedSlot
	buf   []byte
}

// sealedSlot is a slot that was sealed when it was opened.
type sealedSlot struct {
	path  string
	data  []byte
	local checkpoint.Local
	spans []Span
}

// OpenSealedChunks opens the slots of this user and a store in shared, such as
// /dev/shm. It skips files that are no sealed slots or that another user may have
// put there.
func OpenSealedChunks(shared, store string) (*SealedChunks, error) {
	s := &SealedChunks{}
	err := shm.Look(shared, directories(storeName(store)+"-*"), func(dir *shm.Directory) error {
		names, err := dir.Names()
		for _, name := range names {
			if isSlot(name) {
				s.look(dir, name)
			}
		}
		return err
	})
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("look for staging slots: %w", err)
	}
	return s, nil
}

// look adds a slot if it is sealed.
func (s *SealedChunks) look(dir *shm.Directory, name string) {
	data, err := mapLeft(dir, name)
	if err != nil || len(data) == 0 {
		return // removed meanwhile, or its memory is not allocated yet
	}
	h, sealed, err := readHeader(data)
	var local checkpoint.Local
	if err == nil && sealed {
		local, err = checkpoint.DecodeLocal(h.Plan)
	}
	if err != nil || !sealed || len(local.Items) != len(h.Spans) {
		_ = unix.Munmap(data) // only this process maps it
		return
	}
	s.slots = append(s.slots, sealedSlot{filepath.Join(dir.Path(), name), data, local, h.Spans})
}

// Chunk returns the bytes with a digest, of the same dtype and size as like, and
// the path of their slot; nil if no slot has them. They are valid until the next
// call. Calls must not be concurrent.
func (s *SealedChunks) Chunk(ctx context.Context, like checkpoint.Item, digest checkpoint.Digest) (data []byte, from string, err error) {
	for _, slot := range s.slots {
		for i, it := range slot.local.Items {
			at := slot.spans[i]
			if it.Value != like.Value || it.Shard.DType != like.Shard.DType || at.Size != like.Bytes {
				continue
			}
			if err := ctx.Err(); err != nil {
				return nil, "", err
			}
			s.buf = append(s.buf[:0], slot.data[at.Offset:at.Offset+at.Size]...)
			if checkpoint.Sum(s.buf) == digest {
				return s.buf, slot.path, nil
			}
		}
	}
	return nil, "", nil
}

// Close unmaps the slots.
func (s *SealedChunks) Close() {
	for _, slot := range s.slots {
		_ = unix.Munmap(slot.data) // only this process maps it
	}
	s.slots = nil
}

// storeName returns the part of a store's identity in the names of staging
// directories: its end, since its beginning is a time, which stores may share.
func storeName(store string) string { return store[max(0, len(store)-12):] }
