package staging

import (
	"errors"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/object"
)

// ErrReused reports that a slot no longer holds the save that a reader was made for.
var ErrReused = errors.New("the slot has taken another save")

// Reader reads the file of one sealed slot as long as it holds that save, also after the save
// was written. It exists so that a slot can be copied to another node: it holds the slot only
// while it copies a block, so a slow receiver delays no save.
type Reader struct {
	slots      *Slots
	slot       *slot
	arena      *Arena
	generation uint64
	size       int64
}

var _ io.ReaderAt = (*Reader)(nil)

// Reader returns a reader of the sealed slot of a rank, or nil if no slot holds the checkpoint.
func (s *Slots) Reader(checkpoint string, rank int) *Reader {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.holding(rank, checkpoint)
	if sl == nil || sl.phase < sealed {
		return nil
	}
	return &Reader{s, sl, sl.arena, sl.generation, sl.plan.end}
}

// Size returns the size of the file in bytes.
func (r *Reader) Size() int64 { return r.size }

// ReadAt implements [io.ReaderAt]. It returns [ErrReused] once the slot holds another save.
func (r *Reader) ReadAt(p []byte, at int64) (int, error) {
	if at < 0 || at > r.size {
		return 0, fmt.Errorf("read a slot of %d bytes at %d", r.size, at)
	}
	if !r.hold() {
		return 0, ErrReused
	}
	n := 0
	ok := object.Readable(func() { n = copy(p, r.arena.data[at:r.size]) }) // the worker may have truncated its file
	r.slots.arenas.Release([]*Arena{r.arena})
	if !ok {
		return 0, object.ErrUnreadable
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// hold keeps the slot from its next use until the arena is released.
func (r *Reader) hold() bool {
	r.slots.mu.Lock()
	defer r.slots.mu.Unlock()
	sl := r.slot
	if sl.making || sl.phase == copying || sl.arena != r.arena || sl.generation != r.generation {
		return false
	}
	r.slots.arenas.Retain([]*Arena{r.arena})
	return true
}
