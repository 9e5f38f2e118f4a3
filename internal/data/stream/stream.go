// Package stream writes a data file while it computes the digests of its items.
//
//	Write  from copies, in pieces of the backend's preferred size
//	Send   from where the items lie, to a backend that takes several runs of memory
//	Item   the bytes of one item of a Source, as many as planned
package stream

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Source provides the bytes to write.
type Source interface {
	// Item returns the bytes of the i-th item, in place. Their number must be the item's size, and
	// they must not change until Item is called again or the write returns. The write does
	// not write to them. One goroutine calls Item, so that one buffer can serve all items. It
	// calls Item once for each item, unless files of the rank exist already or chunks are
	// reused: then it may call Item again for any item, and must get the same bytes.
	Item(i int) ([]byte, error)
}

// Item returns the bytes of an item of a source, and checks that there are as many as in the plan.
func Item(ctx context.Context, src Source, i int, it checkpoint.Item) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	data, err := src.Item(i)
	if err != nil {
		return nil, fmt.Errorf("bytes of %q: %w", it.Shard.FQN, err)
	}
	if int64(len(data)) != it.Bytes {
		return nil, fmt.Errorf("bytes of %q: got %d, the plan has %d", it.Shard.FQN, len(data), it.Bytes)
	}
	return data, nil
}

// buffers are kept from one save to the next. All have one size, unless stores of
// different kinds are written.
var buffers sync.Pool

// Borrow returns a buffer for a piece. The caller gives it back with [Return].
func Borrow(size int) *[]byte {
	if b, ok := buffers.Get().(*[]byte); ok && len(*b) == size {
		return b
	}
	b := object.Buffer(size)
	return &b
}

// Return takes back a buffer of [Borrow].
func Return(b *[]byte) { buffers.Put(b) }

// stream writes bytes to an upload, in pieces of the backend's preferred size. The caller
// fills and digests one piece while others are written, as many at a time as the backend can
// use. Small items share a piece. The first piece, which begins with the header, is written
// last. Its memory use does not depend on the amount of data.
//
//	caller    copy, digest │ copy, digest │ copy, digest │ copy, digest
//	writer                 └── write ──────────┘└── write ────────┘
//	writer                                └── write ──────────┘
//
// Copy and digests take 0.45 s of one core per GB, and a disk of 2 GB/s takes 0.5 s. So ranks
// with a core each wait only for the disk.
type stream struct {
	to      object.Upload
	used    func(bytes int64) // of the claim on bytes that the disk does not count yet; nil: it counts all
	now     piece
	head    piece // the first, once it is full
	size    int   // of a piece
	pieces  int
	filled  chan piece
	free    chan *[]byte
	writers sync.WaitGroup

	digesting time.Duration // in which the caller copied and digested, and did not wait

	once   sync.Once
	err    error         // of the first write that failed
	failed chan struct{} // closed once err is set
}

// piece is a run of bytes and where they go.
type piece struct {
	buf *[]byte
	n   int // bytes that are filled
	off int64
}

// Write writes a header and the items of an index after it, in order, and fills in their digests and
// sums. It copies the bytes of the source. used is called with the number of bytes that the disk counts
// from now on; it may be nil. Write returns the time in which it copied and digested.
func Write(ctx context.Context, to object.Upload, header []byte, used func(bytes int64), x checkpoint.Index, order []int, src Source) (digesting time.Duration, err error) {
	s := newStream(to, header, used)
	err = s.run(ctx, x, order, src)
	return s.digesting, err
}

// newStream writes a header and the items after it. It must be closed.
func newStream(to object.Upload, header []byte, used func(bytes int64)) *stream {
	depth := max(to.Depth(), 1)
	s := &stream{
		to: to, used: used, size: to.Piece(),
		pieces: depth + 3, // one is filled, one waits, and the first
		failed: make(chan struct{}),
	}
	s.filled, s.free = make(chan piece, s.pieces), make(chan *[]byte, s.pieces)
	for range s.pieces {
		s.free <- Borrow(s.size)
	}
	s.now.buf = <-s.free
	for range depth {
		s.writers.Go(s.write)
	}
	for len(header) > 0 {
		_ = s.room() // a write that fails is an error of the next call
		header = header[len(s.take(header)):]
	}
	return s
}

// write is a goroutine. After an error it only returns pieces, so that the caller does not
// block on it.
func (s *stream) write() {
	for p := range s.filled {
		s.put(p)
		s.free <- p.buf
	}
}

func (s *stream) put(p piece) {
	select {
	case <-s.failed:
		return
	default:
	}
	if _, err := s.to.WriteAt((*p.buf)[:p.n], p.off); err != nil {
		s.once.Do(func() { s.err = err; close(s.failed) })
	}
	if s.used != nil {
		s.used(int64(p.n))
	}
}

// room waits until the present piece has room. It returns the error of a write that failed.
func (s *stream) room() error {
	if s.now.n < s.size {
		return nil
	}
	if s.now.off == 0 {
		s.head = s.now
	} else {
		s.filled <- s.now
	}
	s.now = piece{buf: <-s.free, off: s.now.off + int64(s.size)}
	select {
	case <-s.failed:
		return s.err
	default:
		return nil
	}
}

// take copies the beginning of data, at most a step and as much as fits in the present piece,
// and returns the copy. The piece has room.
func (s *stream) take(data []byte) []byte {
	into := (*s.now.buf)[s.now.n:]
	n := copy(into[:min(len(into), scan.StepSize)], data)
	s.now.n += n
	return into[:n]
}

// close waits for the writers, and returns the error of the first failed write. If whole is
// set it writes the rest, and then the first piece.
func (s *stream) close(whole bool) error {
	if s.now.off == 0 {
		s.head, s.now = s.now, piece{}
	}
	if whole && s.now.n > 0 {
		s.filled <- s.now
	} else if s.now.buf != nil {
		s.free <- s.now.buf
	}
	close(s.filled)
	s.writers.Wait()
	if whole && s.head.n > 0 {
		s.put(s.head)
	}
	s.free <- s.head.buf
	for range s.pieces {
		Return(<-s.free)
	}
	return s.err
}

// run streams every item and ends the stream. If a write failed, run returns its error rather
// than the errors that it caused.
func (s *stream) run(ctx context.Context, x checkpoint.Index, order []int, src Source) error {
	err := s.items(ctx, x, order, src)
	if failed := s.close(err == nil); failed != nil {
		return failed
	}
	return err
}

// items streams every item in the order of the file.
func (s *stream) items(ctx context.Context, x checkpoint.Index, order []int, src Source) error {
	digest := scan.NewDigester(0)
	defer digest.Free()
	for _, i := range order {
		e := &x.Entries[i]
		data, err := Item(ctx, src, i, e.Item)
		if err != nil {
			return err
		}
		digest.Begin(e.Item.Bytes)
		for len(data) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := s.room(); err != nil {
				return err
			}
			began := time.Now()
			var step []byte
			if !object.Readable(func() { step = s.take(data) }) {
				err = object.ErrUnreadable
			}
			if err != nil {
				return err
			}
			// Both are computed from the copy that is written, so they hold even if the
			// source changes concurrently.
			digest.Add(step)
			data = data[len(step):]
			s.digesting += time.Since(began)
		}
		e.Digest, e.Sums = digest.End()
	}
	return nil
}
