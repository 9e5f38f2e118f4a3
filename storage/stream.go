package storage

import (
	"hash/crc32"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	pieceSize = windowBlocks * BlockSize // bytes of one write
	pieces    = 3                        // one filled, one written, one in between
)

// buffers are of pieceSize.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, pieceSize)
	return &b
}}

// stream writes bytes to a file at rising offsets, in pieces of 1 MiB. The
// caller fills and digests one piece while a goroutine writes another. Small
// items share a piece. Its memory does not depend on how much is written.
type stream struct {
	now    piece
	filled chan piece
	free   chan *[]byte
	failed chan struct{} // closed after err is set
	ended  chan struct{} // closed when the goroutine is gone
	err    error
}

// piece is a run of bytes and where they go.
type piece struct {
	buf *[]byte
	n   int // bytes that are filled
	off int64
}

// newStream writes to f from off on, or nowhere if f is nil. It must be closed.
func newStream(f vfs.File, off int64, c *claim) *stream {
	s := &stream{
		now:    piece{buf: buffers.Get().(*[]byte), off: off},
		filled: make(chan piece, pieces), free: make(chan *[]byte, pieces),
		failed: make(chan struct{}), ended: make(chan struct{}),
	}
	for range pieces - 1 {
		s.free <- buffers.Get().(*[]byte)
	}
	go s.write(f, c)
	return s
}

// write is the goroutine. After an error it only hands pieces back, so that
// nobody waits for it.
func (s *stream) write(f vfs.File, c *claim) {
	defer close(s.ended)
	for p := range s.filled {
		if f != nil && p.n > 0 && s.err == nil {
			if _, err := f.WriteAt((*p.buf)[:p.n], p.off); err != nil {
				s.err = err
				close(s.failed)
			}
			c.use(int64(p.n))
		}
		s.free <- p.buf
	}
}

// take copies the beginning of data, as much as fits in the present piece, and
// returns the copy.
func (s *stream) take(data []byte) ([]byte, error) {
	if s.now.n == pieceSize {
		s.filled <- s.now
		s.now = piece{buf: <-s.free, off: s.now.off + pieceSize}
		select {
		case <-s.failed:
			return nil, s.err
		default:
		}
	}
	into := (*s.now.buf)[s.now.n:]
	n := copy(into, data)
	s.now.n += n
	return into[:n], nil
}

// close writes the rest, waits for the goroutine, and is the error of the
// first write that failed.
func (s *stream) close() error {
	s.filled <- s.now
	close(s.filled)
	<-s.ended
	for range pieces {
		buffers.Put(<-s.free)
	}
	return s.err
}

// blockSums takes the checksum of each block of a chunk.
type blockSums struct {
	sums []uint32
	crc  uint32
	n    int // bytes of the present block
}

func (b *blockSums) add(p []byte) {
	for len(p) > 0 {
		n := min(len(p), BlockSize-b.n)
		b.crc = crc32.Update(b.crc, castagnoli, p[:n])
		b.n += n
		p = p[n:]
		if b.n == BlockSize {
			b.cut()
		}
	}
}

func (b *blockSums) cut() {
	b.sums = append(b.sums, b.crc)
	b.crc, b.n = 0, 0
}

// end is all checksums, with that of a shorter last block.
func (b *blockSums) end() []uint32 {
	if b.n > 0 {
		b.cut()
	}
	return b.sums
}
