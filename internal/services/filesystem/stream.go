package filesystem

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
)

// stream is a file that is written.
type stream struct {
	to   target
	name string
	file *data.PendingFile
	ring *ring
	// own has the file alone, so that those who write one name at once are not in each
	// other's way; nil for a file of DCP, which is one of all that are pending.
	own *data.Pending

	mu    sync.Mutex
	ended bool
	whole bool // its client has closed it, and goes by what it was told
}

type createRequest struct {
	Path string `json:"path"`
}

type createReply struct {
	Stream uint64 `json:"stream"`
	Memory string `json:"memory"` // a file of blocks in shared memory, which the client fills
	Blocks int    `json:"blocks"`
	Block  int    `json:"block"` // size of each, in bytes: after so many a write is due
}

// create begins a file. The first one below a name opens a pending checkpoint,
// unless it is a file beside a committed one.
func (h *Handler) create(ctx context.Context, in createRequest) (createReply, error) {
	p, err := parse(in.Path)
	if err != nil {
		return createReply{}, err
	}
	to, name, err := p.written()
	if err != nil {
		return createReply{}, err
	}
	s := &stream{to: to, name: name}
	if err := h.place(ctx, s); err != nil {
		return createReply{}, err
	}
	if s.ring, err = h.memory.take(); err == nil {
		err = s.file.Room(ctx, blockSize)
	}
	if err != nil {
		s.end(h)
		return createReply{}, s.wrap(err)
	}
	id, err := h.admit(ctx, s)
	if err != nil {
		s.end(h)
		return createReply{}, err
	}
	return createReply{Stream: id, Memory: s.ring.file.Name(), Blocks: s.ring.blocks, Block: blockSize}, nil
}

// admit gives a stream its number.
func (h *Handler) admit(ctx context.Context, s *stream) (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	id, err := h.number()
	if err != nil {
		return 0, err
	}
	c, err := h.clientOf(ctx)
	if err != nil {
		return 0, err
	}
	h.streams[id] = s
	if c != nil {
		c.streams[id] = s
	}
	return id, nil
}

func (h *Handler) stream(id uint64) (*stream, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.streams[id]
	if s == nil {
		return nil, conflict("there is no stream %d: the file was closed, or the trainer or agent that had it has ended; save again", id)
	}
	return s, nil
}

type writeRequest struct {
	Stream uint64 `json:"stream"`
	Offset int64  `json:"offset"` // in the file, of bytes that are in memory now
	Length int    `json:"length"`
	// Cuts are where in the file something else begins: [offset, 1] the bytes of
	// one tensor, [offset, 0] anything else.
	Cuts [][2]int64 `json:"cuts"`
}

// write takes the bytes that are in memory. When it replies, the client may go on
// to the end of the block in which they end, or of the next one if they fill it.
func (h *Handler) write(ctx context.Context, in writeRequest) (empty, error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return empty{}, err
	}
	if err = s.wrote(ctx, in, blockSize); err == nil {
		err = s.ring.wait(ctx, in.Offset+int64(in.Length))
	}
	return empty{}, s.wrap(err)
}

func (s *stream) wrap(err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("write %s%s/%s/%s: %w", scheme, s.to.run, dirOf(s.to.name), s.name, err)
	if errors.Is(err, data.ErrReplaced) {
		return conflict("%w", err)
	}
	return err
}

// wrote hands bytes on, after which about next more come.
func (s *stream) wrote(ctx context.Context, in writeRequest, next int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return data.ErrReplaced
	}
	if said := s.file.Said(); in.Offset != said || in.Length < 0 {
		return refused("%d bytes at %d are said to be written, after %d bytes", in.Length, in.Offset, said)
	}
	if _, within := s.ring.at(in.Offset); in.Length > blockSize-within {
		return refused("%d bytes at %d are said to be written, and the block ends after %d", in.Length, in.Offset, blockSize-within)
	}
	if !isData(s.name) { // one value, of which the digest is found on the way
		in.Cuts = nil
		if in.Offset == 0 {
			in.Cuts = [][2]int64{{0, 1}}
		}
	}
	cuts := make([]data.Cut, len(in.Cuts))
	last := in.Offset
	for i, c := range in.Cuts {
		if c[0] < last || c[0] > in.Offset+int64(in.Length) {
			return refused("cut %d at %d does not lie in the bytes that are said to be written", i, c[0])
		}
		cuts[i], last = data.Cut{Offset: c[0], Payload: c[1] == 1}, c[0]
	}
	if next > 0 {
		if err := s.file.Room(ctx, next); err != nil {
			return err
		}
	}
	data, done := s.ring.run(in.Offset, in.Length)
	err := s.file.Write(ctx, data, cuts, done)
	if err != nil {
		done()
	}
	return err
}

type closeRequest struct {
	writeRequest
	Size int64 `json:"size"` // of the file
}

type empty struct{}

type closeReply struct {
	Checkpoint string `json:"checkpoint,omitempty"` // that the file is, by itself
	Pending    bool   `json:"pending,omitempty"`    // it belongs to a save that is not committed
}

// finish closes a stream: the file is durable on return. After an error there is
// neither.
func (h *Handler) finish(ctx context.Context, in closeRequest) (out closeReply, err error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return out, err
	}
	if err = s.wrote(ctx, in.writeRequest, 0); err == nil {
		if said := s.file.Said(); said != in.Size {
			err = refused("the file is said to have %d bytes, %d were written", in.Size, said)
		}
	}
	if err == nil {
		err = s.file.Close()
	}
	switch {
	case err != nil:
	case s.own == nil:
		out.Pending = true
	default:
		out, err = h.closedAlone(ctx, s)
	}
	s.mu.Lock()
	s.whole = err == nil
	s.mu.Unlock()
	h.forget(in.Stream, s)
	return out, s.wrap(err)
}

type discardRequest struct {
	Stream uint64 `json:"stream"`
}

// discard gives a stream up.
func (h *Handler) discard(_ context.Context, in discardRequest) (empty, error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return empty{}, err
	}
	h.forget(in.Stream, s)
	return empty{}, nil
}

func (h *Handler) forget(id uint64, s *stream) {
	h.release(id)
	s.end(h)
}

// end gives up a file that is not closed, and the memory of any.
func (s *stream) end(h *Handler) {
	s.mu.Lock()
	first, whole := !s.ended, s.whole
	s.ended = true
	s.mu.Unlock()
	if !first {
		return
	}
	s.file.Abort() // of no effect on a file that is closed
	switch {
	case s.ring == nil:
	case whole:
		h.memory.keep(s.ring)
	default:
		h.memory.lose(s.ring)
	}
	if s.own == nil {
		if p := h.pendingOf(s.to); p != nil && !whole {
			p.files.Drop(s.name, s.file)
		}
		return
	}
	if err := s.own.Remove(context.Background()); err != nil {
		h.log.Warn("what was written of a file stays on disk", "file", s.name, "error", err)
	}
}
