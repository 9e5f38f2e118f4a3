package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/storage"
)

const (
	blockSize  = 8 << 20 // bytes of a block of a ring
	ringBlocks = 4
	idleRings  = 16 // that are kept, since the first touch of memory is slow
)

// ring is shared memory through which the bytes of a stream come.
type ring struct {
	file *os.File
	data []byte
}

// rings are those that nobody uses.
type rings struct {
	mu   sync.Mutex
	idle []*ring
	over bool
}

func (r *rings) take() (*ring, error) {
	r.mu.Lock()
	if n := len(r.idle) - 1; n >= 0 {
		one := r.idle[n]
		r.idle = r.idle[:n]
		r.mu.Unlock()
		return one, nil
	}
	r.mu.Unlock()
	fd, err := unix.MemfdCreate("ckptstore-ring", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make shared memory: %w", err)
	}
	one := &ring{file: os.NewFile(uintptr(fd), "ckptstore-ring")}
	err = unix.Ftruncate(fd, ringBlocks*blockSize)
	if err == nil {
		one.data, err = unix.Mmap(fd, 0, ringBlocks*blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, fmt.Errorf("make %d bytes of shared memory: %w", ringBlocks*blockSize, errors.Join(err, one.file.Close()))
	}
	return one, nil
}

func (r *rings) give(one *ring) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || len(r.idle) >= idleRings {
		one.free()
		return
	}
	r.idle = append(r.idle, one)
}

func (r *rings) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.over = true
	for _, one := range r.idle {
		one.free()
	}
	r.idle = nil
}

// free unmaps it: it is only memory.
func (r *ring) free() {
	_ = unix.Munmap(r.data)
	_ = r.file.Close()
}

// path is how another process of the user opens it.
func (r *ring) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), r.file.Fd()) }

// stream is a file that is written.
type stream struct {
	to   target
	name string
	ring *ring
	file *storage.PendingFile
	// attach makes the file part of a committed checkpoint, once it is whole; nil
	// for a file of one that is pending.
	attach func(ctx context.Context) error
	giveUp func() error // removes the file of such a stream; nil for others

	mu     sync.Mutex
	size   int64
	free   chan int // blocks
	posted map[int]bool
	ended  bool
}

type createRequest struct {
	Path string `json:"path"`
}

type createReply struct {
	Stream uint64 `json:"stream"`
	Ring   string `json:"ring"` // path
	Blocks int    `json:"blocks"`
	Size   int    `json:"size"` // of a block, in bytes
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
	s := &stream{to: to, name: name, free: make(chan int, ringBlocks), posted: map[int]bool{}}
	if err := h.place(ctx, s); err != nil {
		return createReply{}, err
	}
	if s.ring, err = h.rings.take(); err != nil {
		s.file.Abort()
		return createReply{}, err
	}
	for i := range ringBlocks {
		s.free <- i
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	id, err := h.number()
	if err != nil {
		s.file.Abort()
		h.rings.give(s.ring)
		return createReply{}, err
	}
	h.streams[id] = s
	if c := h.clientOf(ctx); c != nil {
		c.streams[id] = s
	}
	return createReply{Stream: id, Ring: s.ring.path(), Blocks: ringBlocks, Size: blockSize}, nil
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
	Block  int    `json:"block"`  // in which the bytes are; -1: none, a block is asked for
	Offset int64  `json:"offset"` // of them in the file
	Length int    `json:"length"`
	// Cuts are where in the file something else begins: [offset, 1] the bytes of
	// one tensor, [offset, 0] anything else.
	Cuts [][2]int64 `json:"cuts"`
}

type writeReply struct {
	Block int `json:"block"` // the next to fill
}

// write takes a block, and gives the next.
func (h *Handler) write(ctx context.Context, in writeRequest) (writeReply, error) {
	s, err := h.stream(in.Stream)
	if err != nil {
		return writeReply{}, err
	}
	if err := s.post(in); err != nil {
		return writeReply{}, s.wrap(err)
	}
	for {
		select {
		case block := <-s.free:
			s.mu.Lock()
			delete(s.posted, block)
			s.mu.Unlock()
			return writeReply{Block: block}, s.wrap(s.file.Err())
		case <-ctx.Done():
			return writeReply{}, ctx.Err()
		}
	}
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

// post hands a block to the file.
func (s *stream) post(in writeRequest) error {
	if in.Block < 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended:
		return conflict("it is closed")
	case in.Block >= ringBlocks || in.Length < 0 || in.Length > blockSize || s.posted[in.Block]:
		return refused("block %d of %d bytes is none that may be written", in.Block, in.Length)
	case in.Offset != s.size:
		return refused("the block is for offset %d, %d bytes were written before", in.Offset, s.size)
	case in.Offset%blockSize != 0:
		return refused("a block shorter than %d bytes was not the last", blockSize)
	}
	cuts := make([]storage.Cut, len(in.Cuts))
	last := in.Offset
	for i, c := range in.Cuts {
		if c[0] < last || c[0] > in.Offset+int64(in.Length) {
			return refused("cut %d at %d does not lie in the block", i, c[0])
		}
		cuts[i], last = storage.Cut{Offset: c[0], Payload: c[1] == 1}, c[0]
	}
	s.posted[in.Block] = true
	s.size += int64(in.Length)
	data := s.ring.data[in.Block*blockSize:][:in.Length]
	return s.file.Post(data, in.Offset, cuts, func() { s.free <- in.Block })
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
	if in.Length > 0 {
		if err := s.post(in.writeRequest); err != nil {
			return empty{}, s.wrap(err)
		}
	}
	if s.size != in.Size {
		return empty{}, refused("the file is said to have %d bytes, %d were written", in.Size, s.size)
	}
	// Not ctx: a client that dies now has written the file all the same.
	err = s.file.Close(context.WithoutCancel(ctx))
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

// end gives the ring back once nobody reads it any more.
func (s *stream) end(h *Handler) {
	s.mu.Lock()
	first := !s.ended
	s.ended = true
	s.mu.Unlock()
	if !first {
		return
	}
	s.file.Abort() // of no effect on a file that is closed
	go func() {
		s.file.Wait()
		h.rings.give(s.ring)
		if s.giveUp == nil {
			return
		}
		if err := s.giveUp(); err != nil {
			h.log.Warn("what was written for an attachment stays on disk", "file", s.name, "error", err)
		}
	}()
}
