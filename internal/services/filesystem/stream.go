package filesystem

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/data/segments"
)

// stream is a file that is being written.
type stream struct {
	to   target
	name string
	file *data.PendingFile
	ring *ring
	// own has only this file, so that concurrent writers of one name do not
	// conflict; nil for a file of DCP, which is one of the pending files.
	own *data.Pending
	// away is set where another process has the pending save.
	away *away

	mu    sync.Mutex
	ended bool
	whole bool // its client has closed it and relies on the reply
}

type createRequest struct {
	Path string `json:"path"`
}

type createReply struct {
	Stream uint64 `json:"stream"`
	Memory string `json:"memory"` // file of blocks in shared memory, which the client fills
	Blocks int    `json:"blocks"`
	Block  int    `json:"block"` // size of each, in bytes: a write is due after so many
}

// create begins a file. The first file below a name opens a pending checkpoint,
// unless it joins a committed one.
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
	if up := h.upstream(ctx); up != nil {
		err = h.placeAway(ctx, up, s, in.Path)
	} else {
		err = h.place(ctx, s)
	}
	if err != nil {
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
	Offset int64  `json:"offset"` // in the file, of bytes that are now in memory
	Length int    `json:"length"`
	// Cuts are the offsets in the file where another part begins: [offset, 1] the
	// bytes of one tensor, [offset, 0] anything else.
	Cuts [][2]int64 `json:"cuts"`
}

// write accepts the bytes in memory. After its reply, the client may continue to
// the end of the block in which the bytes end, or of the next block if they fill
// it.
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

// wrote passes bytes on; about next more bytes will follow.
func (s *stream) wrote(ctx context.Context, in writeRequest, next int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return data.ErrReplaced
	}
	if said := s.file.Accepted(); in.Offset != said || in.Length < 0 {
		return refused("write of %d bytes at %d, after %d bytes", in.Length, in.Offset, said)
	}
	if _, within := s.ring.at(in.Offset); in.Length > blockSize-within {
		return refused("write of %d bytes at %d, and the block ends after %d", in.Length, in.Offset, blockSize-within)
	}
	if !isData(s.name) { // one value, whose digest is computed on the way
		in.Cuts = nil
		if in.Offset == 0 {
			in.Cuts = [][2]int64{{0, 1}}
		}
	}
	cuts := make([]segments.Cut, len(in.Cuts))
	last := in.Offset
	for i, c := range in.Cuts {
		if c[0] < last || c[0] > in.Offset+int64(in.Length) {
			return refused("cut %d at %d is outside of the written bytes", i, c[0])
		}
		cuts[i], last = segments.Cut{Offset: c[0], Payload: c[1] == 1}, c[0]
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
	Checkpoint string `json:"checkpoint,omitempty"` // the file as a checkpoint of its own
	Pending    bool   `json:"pending,omitempty"`    // it belongs to an uncommitted save
}

// finish closes a stream: the file is durable on return. After an error, the
// stream and the file are gone.
func (h *Handler) finish(ctx context.Context, in closeRequest) (out closeReply, err error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return out, err
	}
	if err = s.wrote(ctx, in.writeRequest, 0); err == nil {
		if said := s.file.Accepted(); said != in.Size {
			err = refused("close with a size of %d bytes, %d were written", in.Size, said)
		}
	}
	if err == nil {
		err = s.file.Close()
	}
	switch {
	case err != nil:
	case s.away != nil:
		out, err = s.hand(ctx)
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

// discard abandons a stream.
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

// end abandons a file that is not closed, and releases its memory in any case.
func (s *stream) end(h *Handler) {
	s.mu.Lock()
	first, whole := !s.ended, s.whole
	s.ended = true
	s.mu.Unlock()
	if !first {
		return
	}
	s.file.Abort() // no effect on a closed file
	switch {
	case s.ring == nil:
	case whole:
		h.memory.keep(s.ring)
	default:
		h.memory.lose(s.ring)
	}
	if s.away != nil {
		if !whole {
			s.away.drop(h)
		}
		return
	}
	if s.own == nil {
		if p := h.pendingOf(s.to); p != nil && !whole {
			p.files.Drop(s.name, s.file)
		}
		return
	}
	if err := s.own.Remove(context.Background()); err != nil {
		h.log.Warn("partial file not removed", "file", s.name, "error", err)
	}
}
