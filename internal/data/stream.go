package data

import (
	"context"
	"os"
	"runtime"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// pieceBuffers are kept from one save to the next. All have one size, unless stores of
// different kinds are written.
var pieceBuffers sync.Pool

func pieceBuffer(size int) *[]byte {
	if b, ok := pieceBuffers.Get().(*[]byte); ok && len(*b) == size {
		return b
	}
	b := object.Buffer(size)
	return &b
}

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
	claim   *claim // of bytes that the disk does not count yet; nil: it counts all
	now     piece
	head    piece // the first, once it is full
	size    int   // of a piece
	pieces  int
	filled  chan piece
	free    chan *[]byte
	writers sync.WaitGroup

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

// newStream writes a header and the items after it. It must be closed.
func newStream(to object.Upload, header []byte, c *claim) *stream {
	depth := max(to.Depth(), 1)
	s := &stream{
		to: to, claim: c, size: to.Piece(),
		pieces: depth + 3, // one is filled, one waits, and the first
		failed: make(chan struct{}),
	}
	s.filled, s.free = make(chan piece, s.pieces), make(chan *[]byte, s.pieces)
	for range s.pieces {
		s.free <- pieceBuffer(s.size)
	}
	s.now.buf = <-s.free
	for range depth {
		s.writers.Go(s.write)
	}
	for len(header) > 0 {
		n, _ := s.take(header) // a write that fails is an error of the next call
		header = header[len(n):]
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
	if s.claim != nil {
		s.claim.use(int64(p.n))
	}
}

// take copies the beginning of data, at most a step and as much as fits in the present piece,
// and returns the copy.
func (s *stream) take(data []byte) ([]byte, error) {
	if s.now.n == s.size {
		if s.now.off == 0 {
			s.head = s.now
		} else {
			s.filled <- s.now
		}
		s.now = piece{buf: <-s.free, off: s.now.off + int64(s.size)}
		select {
		case <-s.failed:
			return nil, s.err
		default:
		}
	}
	into := (*s.now.buf)[s.now.n:]
	n := copy(into[:min(len(into), stepSize)], data)
	s.now.n += n
	return into[:n], nil
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
		pieceBuffers.Put(<-s.free)
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
	digest := newDigester(0)
	defer digest.free()
	for _, i := range order {
		e := &x.Entries[i]
		data, err := itemBytes(ctx, src, i, e.Item)
		if err != nil {
			return err
		}
		digest.begin(e.Item.Bytes)
		for len(data) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			step, err := s.take(data)
			if err != nil {
				return err
			}
			// Both are computed from the copy that is written, so they hold even if the
			// source changes concurrently.
			digest.add(step)
			data = data[len(step):]
		}
		e.Digest, e.Sums = digest.end()
	}
	return nil
}

// waiting is the number of threads that may wait for a disk while others compute: those of
// two ranks that write past the page cache.
const waiting = 4

// Threads lets Go run as many threads as there are cores while others wait for the disk. A
// write past the page cache holds its thread for milliseconds, and the runtime takes a while
// to notice. A command that saves or loads calls Threads once. A $GOMAXPROCS set by the user
// stays.
func Threads() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + waiting)
	}
}
