package data

import (
	"context"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
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
	if s.claim != nil {
		s.claim.use(int64(p.n))
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
	digest := scan.NewDigester(0)
	defer digest.Free()
	for _, i := range order {
		e := &x.Entries[i]
		data, err := itemBytes(ctx, src, i, e.Item)
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

// Lasting is a [Source] whose items stay in place until WriteData returns: sealed slots, as
// opposed to one buffer for all.
type Lasting interface {
	Source
	// Lasts does nothing. It declares that the bytes of every item stay as they are.
	Lasts()
}

// sender sends a data file from where its items lie, without a copy: digests are taken from
// the source's memory, and each piece is sent with the sum of the bytes that were digested. If
// a byte changes in between, the backend refuses the piece. Memory does not depend on the
// amount of data, and a piece is as large as the backend likes it: with copies, pieces of
// 32 MiB to 8 connections would cost each rank 350 MiB.
//
//	caller   digest │ digest │ digest │ digest
//	piece           └── send ─────────────┘
//	piece                    └── send ─────────────┘
//
// The items need not end where pieces do: a piece has several runs of memory.
type sender struct {
	to    object.Gatherer
	claim *claim // of bytes that the disk does not count yet; nil: it counts all
	size  int64  // of a piece

	off  int64 // of the piece that is gathered
	runs [][]byte
	n    int64 // bytes in it
	sum  uint32

	sending *errgroup.Group
	ctx     context.Context // ends with the first piece that fails

	digesting time.Duration
}

// send sends a header and the items after it, and fills in their digests and sums.
// It returns the time in which it computed digests.
func send(ctx context.Context, up object.Upload, to object.Gatherer, header []byte, c *claim, x checkpoint.Index, order []int, src Source) (digesting time.Duration, err error) {
	s := &sender{to: to, claim: c, size: int64(up.Piece())}
	s.sending, s.ctx = errgroup.WithContext(ctx)
	s.sending.SetLimit(max(to.GatherDepth(), 1))
	err = s.items(header, x, order, src)
	if failed := s.sending.Wait(); failed != nil {
		return 0, failed // the cause of err
	}
	return s.digesting, err
}

func (s *sender) items(header []byte, x checkpoint.Index, order []int, src Source) error {
	digest := scan.NewDigester(0)
	defer digest.Free()
	if err := s.add(header, func([]byte) {}); err != nil {
		return err
	}
	for _, i := range order {
		e := &x.Entries[i]
		data, err := itemBytes(s.ctx, src, i, e.Item)
		if err != nil {
			return err
		}
		digest.Begin(e.Item.Bytes)
		if err := s.add(data, digest.Add); err != nil {
			return err
		}
		e.Digest, e.Sums = digest.End()
	}
	return s.flush()
}

// add puts bytes into pieces, and sends those that are full. It calls take for each step of
// them before it sums the step, so that both passes go over bytes in the cache, and bytes
// that change after they were digested are not sent under the right sum.
func (s *sender) add(data []byte, take func([]byte)) error {
	for len(data) > 0 {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		step := data[:min(int64(len(data)), scan.StepSize, s.size-s.n)]
		data = data[len(step):]
		began := time.Now()
		if !object.Readable(func() {
			take(step)
			s.sum = crc32c.Update(s.sum, step)
		}) {
			return object.ErrUnreadable
		}
		s.digesting += time.Since(began)
		s.gather(step)
		if s.n == s.size {
			if err := s.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// gather adds a run of memory to the piece, or makes its last run longer.
func (s *sender) gather(step []byte) {
	s.n += int64(len(step))
	if k := len(s.runs) - 1; k >= 0 {
		last := s.runs[k]
		if joined := last[:len(last):cap(last)]; cap(last) >= len(last)+len(step) {
			joined = joined[:len(last)+len(step)]
			if &joined[len(last)] == &step[0] {
				s.runs[k] = joined
				return
			}
		}
	}
	s.runs = append(s.runs, step)
}

// flush sends the gathered piece while others are gathered. It waits if as many as the backend
// can use are being sent.
func (s *sender) flush() error {
	if s.n == 0 {
		return s.ctx.Err()
	}
	runs, off, n, sum := s.runs, s.off, s.n, s.sum
	s.runs, s.off, s.n, s.sum = nil, s.off+s.n, 0, 0
	s.sending.Go(func() error {
		if err := s.to.WriteFrom(runs, off, sum); err != nil {
			return err
		}
		if s.claim != nil {
			s.claim.use(n)
		}
		return nil
	})
	return s.ctx.Err()
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
