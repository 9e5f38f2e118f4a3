package staging

import (
	"context"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// SealedChunks finds bytes of a store's chunks in the staging slots of this
// machine: of saves that are being written, that were, or that a dead trainer
// has left. A slot that is in use may change at any moment: bytes are copied
// first and digested then, so that what is given out is what was asked for. It
// takes no lock, changes nothing, and holds the slots mapped until it is closed.
type SealedChunks struct {
	slots []sealedSlot
	buf   []byte
}

// sealedSlot is a slot that was sealed when it was looked at.
type sealedSlot struct {
	path  string
	data  []byte
	local checkpoint.Local
	spans []Span
}

// OpenSealedChunks looks at the slots of this user and a store in shared, such as
// /dev/shm. A file there that is no sealed slot, or that another user may have put
// there, has nothing to give, and is left out.
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

// look takes a slot in if it is sealed.
func (s *SealedChunks) look(dir *shm.Directory, name string) {
	data, err := mapLeft(dir, name)
	if err != nil || len(data) == 0 {
		return // it has just gone, or its memory is not made yet
	}
	h, sealed, err := readHeader(data)
	var local checkpoint.Local
	if err == nil && sealed {
		local, err = checkpoint.DecodeLocal(h.Plan)
	}
	if err != nil || !sealed || len(local.Items) != len(h.Spans) {
		_ = unix.Munmap(data) // it is only memory of this process
		return
	}
	s.slots = append(s.slots, sealedSlot{filepath.Join(dir.Path(), name), data, local, h.Spans})
}

// Chunk are the bytes with a digest, of the same dtype and size as like, and the
// path of the slot that has them; nil if none has. They are valid until the next
// call. Calls may not run at the same time.
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

// Close gives the mappings back.
func (s *SealedChunks) Close() {
	for _, slot := range s.slots {
		_ = unix.Munmap(slot.data) // it is only memory of this process
	}
	s.slots = nil
}

// storeName is how the names of staging directories say which store they are
// of: by the end of its identity, since its beginning is a time, which stores
// share.
func storeName(store string) string { return store[max(0, len(store)-12):] }
