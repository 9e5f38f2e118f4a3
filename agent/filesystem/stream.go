package filesystem

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/storage"
)

// blockSize is after how many bytes a client says that they are written. So many
// more must then fit on the disk.
const blockSize = 8 << 20

// stream is a file that is written.
type stream struct {
	to   target
	name string
	file *storage.PendingFile
	// attach makes the file part of a committed checkpoint, once it is whole; nil
	// for a file of one that is pending.
	attach func(ctx context.Context) error
	giveUp func() error // removes the file of such a stream; nil for others

	mu    sync.Mutex
	ended bool
}

type createRequest struct {
	Path string `json:"path"`
}

type createReply struct {
	Stream uint64 `json:"stream"`
	Path   string `json:"path"`  // where the file is written
	Block  int    `json:"block"` // after how many bytes a write is due
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
	if err := s.file.Wrote(ctx, 0, nil, blockSize); err != nil {
		s.end(h)
		return createReply{}, s.wrap(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	id, err := h.number()
	if err != nil {
		s.file.Abort()
		return createReply{}, err
	}
	h.streams[id] = s
	if c := h.clientOf(ctx); c != nil {
		c.streams[id] = s
	}
	return createReply{Stream: id, Path: s.file.Path(), Block: blockSize}, nil
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
	Offset int64  `json:"offset"` // of bytes that are in the file now
	Length int    `json:"length"`
	// Cuts are where in the file something else begins: [offset, 1] the bytes of
	// one tensor, [offset, 0] anything else.
	Cuts [][2]int64 `json:"cuts"`
}

// write takes note of bytes that are in the file.
func (h *Handler) write(ctx context.Context, in writeRequest) (empty, error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return empty{}, err
	}
	return empty{}, s.wrap(s.wrote(ctx, in, blockSize))
}

func (s *stream) wrap(err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("write %s%s/%s/%s: %w", scheme, s.to.run, dirOf(s.to.name), s.name, err)
	if errors.Is(err, storage.ErrReplaced) {
		return conflict("%w", err)
	}
	return err
}

func (s *stream) wrote(ctx context.Context, in writeRequest, next int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if said := s.file.Said(); in.Offset != said || in.Length < 0 {
		return refused("%d bytes at %d are said to be written, after %d bytes", in.Length, in.Offset, said)
	}
	cuts := make([]storage.Cut, len(in.Cuts))
	last := in.Offset
	for i, c := range in.Cuts {
		if c[0] < last || c[0] > in.Offset+int64(in.Length) {
			return refused("cut %d at %d does not lie in the bytes that are said to be written", i, c[0])
		}
		cuts[i], last = storage.Cut{Offset: c[0], Payload: c[1] == 1}, c[0]
	}
	return s.file.Wrote(ctx, in.Length, cuts, next)
}

type closeRequest struct {
	writeRequest
	Size int64 `json:"size"` // of the file
}

type empty struct{}

// finish closes a stream: the file is durable on return.
func (h *Handler) finish(ctx context.Context, in closeRequest) (empty, error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return empty{}, err
	}
	if err := s.wrote(ctx, in.writeRequest, 0); err != nil {
		return empty{}, s.wrap(err)
	}
	if said := s.file.Said(); said != in.Size {
		return empty{}, refused("the file is said to have %d bytes, %d were written", in.Size, said)
	}
	err = s.file.Close()
	if err == nil && s.attach != nil {
		err = s.attach(ctx)
	}
	h.forget(in.Stream, s)
	return empty{}, s.wrap(err)
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

// end gives up a file that is not closed.
func (s *stream) end(h *Handler) {
	s.mu.Lock()
	first := !s.ended
	s.ended = true
	s.mu.Unlock()
	if !first {
		return
	}
	s.file.Abort() // of no effect on a file that is closed
	if s.giveUp == nil {
		return
	}
	if err := s.giveUp(); err != nil {
		h.log.Warn("what was written for an attachment stays on disk", "file", s.name, "error", err)
	}
}
