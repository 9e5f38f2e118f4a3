// Package scan passes over a run of bytes once: it reads a window, compares or takes the
// checksum of each block, and digests. Loads, saves, verifications, repairs and
// imports all use these parts:
//
//	Windows       reads windows of a file, or of a strided chunk
//	Bytes         cuts bytes in memory into windows, without a copy
//	Play          makes one stream of the windows, where each would be a request
//	DamagedBlock  compares the blocks of a window with their checksums
//	Digester      takes the digest of a chunk and the checksums of its blocks
//
// Damage is an error for a load, a finding for a verification, and an answer for a
// repair. So a scan reports only the place of damage, and its caller the rest.
package scan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Sizes of what is read and digested at once.
const (
	windowBlocks = 16                                  // read at once, and compared while they are in the cache
	WindowSize   = windowBlocks * checkpoint.BlockSize // bytes of that
	StepSize     = 1 << 18                             // digested and then checksummed, while they are in the cache
)

// Buffers have WindowSize bytes each. They are pooled because clearing a new one takes
// longer than the scan of a small chunk.
var Buffers = sync.Pool{New: func() any {
	b := make([]byte, WindowSize)
	return &b
}}

// ShortError reports that a source ends, or cannot be read, within the bytes to scan. It
// names no file: callers convert it to an error, a finding or an answer.
type ShortError struct {
	At  int64 // offset in the source of the first byte that is missing
	Err error // of the read; [io.EOF] or nil where the source ends
}

// Ends reports whether the source ends there, and was not merely unreadable.
func (e *ShortError) Ends() bool { return e.Err == nil || errors.Is(e.Err, io.EOF) }

// Error returns the text of the read's error.
func (e *ShortError) Error() string { return e.Unwrap().Error() }

// Unwrap returns the error of the read, and [io.ErrUnexpectedEOF] where the source ends.
func (e *ShortError) Unwrap() error {
	if e.Ends() {
		return io.ErrUnexpectedEOF
	}
	return e.Err
}

// ShortOf returns the ShortError in the chain of err, or nil.
func ShortOf(err error) *ShortError {
	var short *ShortError
	if err == nil || !errors.As(err, &short) {
		return nil
	}
	return short
}

// Windows reads the bytes of src from offset lo to hi and calls visit with one window after
// the other. Each window begins a multiple of WindowSize after lo, and is whole: where src
// ends before, the error is a [*ShortError] and the bytes of the last window are dropped.
// visit may keep nothing of the window. Windows returns the number of bytes that were read.
//
// Windows allocates nothing: the buffer is pooled, and visit does not escape. It copies
// windows out of the page cache, because mapping them takes half as much time again:
// the kernel maps pages one by one.
//
// A file whose reads are requests is read as one stream.
func Windows(ctx context.Context, src io.ReaderAt, lo, hi int64, visit func(window []byte, at int64) error) (int64, error) {
	if _, far := src.(object.Ranger); far && hi > lo {
		on, stop, err := Play(src.(object.Object), lo, hi)
		if err != nil {
			return 0, &ShortError{At: lo, Err: err}
		}
		defer stop()
		src = on
	}
	buf := Buffers.Get().(*[]byte)
	defer Buffers.Put(buf)
	for at := lo; at < hi; {
		if err := ctx.Err(); err != nil {
			return at - lo, err
		}
		window := (*buf)[:min(WindowSize, hi-at)]
		n, err := src.ReadAt(window, at)
		if n < len(window) {
			return at - lo + int64(n), &ShortError{At: at + int64(n), Err: err}
		}
		if err := visit(window, at); err != nil {
			return at - lo + int64(n), err
		}
		at += int64(n)
	}
	return max(hi-lo, 0), nil
}

// Bytes is [Windows] for bytes in memory, which cannot be short.
func Bytes(ctx context.Context, data []byte, visit func(window []byte, at int64) error) error {
	for at := 0; at < len(data); at += WindowSize {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := visit(data[at:min(at+WindowSize, len(data))], int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// ReadSpan reads all of a strided chunk's span.
func ReadSpan(e *checkpoint.Entry, file object.Object) ([]byte, error) {
	size, ok := e.Span(1 << 62)
	if !ok {
		return nil, fmt.Errorf("%q: strides %v are too large", e.Item.Shard.FQN, e.Strides)
	}
	span := make([]byte, size)
	if n, err := file.ReadAt(span, e.Offset); n < len(span) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return span, nil
}

// InOrder returns the bytes of a chunk in order, from its offset on: those of its file,
// or of a strided chunk the elements of its span, which is read at once.
func InOrder(e *checkpoint.Entry, file object.Object) (io.ReaderAt, error) {
	if e.Strides == nil {
		return file, nil
	}
	span, err := ReadSpan(e, file)
	if err != nil {
		return nil, err
	}
	return Gathered{e, span}, nil
}

// Gathered is a strided chunk as if it lay in the file in order.
type Gathered struct {
	*checkpoint.Entry
	Elements []byte // of its span: see [ReadSpan]
}

// ReadAt implements io.ReaderAt for windows of whole elements in the chunk,
// counted as if it began at the entry's offset.
func (g Gathered) ReadAt(p []byte, off int64) (int, error) {
	g.Gather(p, g.Elements, off-g.Offset)
	return len(p), nil
}

// tape reads a run of a file's bytes in order, from one stream: of files in a bucket, each
// ReadAt would be a request. Reads that are not in order, or go beyond the run, are requests
// of their own.
//
// A tape is for one goroutine. It hides [object.Ranger] of the file, so that a scan of a
// part of the run begins no stream of its own.
type tape struct {
	object.Object
	body    io.ReadCloser
	at, end int64 // offsets in the file
}

// Play begins a tape of the bytes from lo to hi. A file whose reads are no requests is
// returned itself.
func Play(file object.Object, lo, hi int64) (src object.Object, stop func(), err error) {
	r, ok := file.(object.Ranger)
	if !ok {
		return file, func() {}, nil
	}
	body, err := r.ReadRange(lo, hi-lo)
	if err != nil {
		return nil, nil, err
	}
	// The bytes were compared as they came, so an error of Close does not matter.
	return &tape{Object: file, body: body, at: lo, end: hi}, func() { _ = body.Close() }, nil
}

// ReadAt implements [io.ReaderAt].
func (t *tape) ReadAt(p []byte, off int64) (int, error) {
	if off < t.at || off+int64(len(p)) > t.end {
		return t.Object.ReadAt(p, off)
	}
	for t.at < off {
		n, err := io.CopyN(io.Discard, t.body, off-t.at)
		t.at += n
		if err != nil {
			return 0, fmt.Errorf("skip to %d: %w", off, atEnd(err))
		}
	}
	n, err := io.ReadFull(t.body, p)
	t.at += int64(n)
	return n, atEnd(err)
}

// Rereads is how often a window that is damaged is requested again: the damage may have
// happened on the way.
const Rereads = 2

// Reread fills a window again, by a request of its own. It reports false for a file whose
// reads are no requests, and for an unreadable file.
func Reread(file io.ReaderAt, window []byte, at int64) bool {
	if t, ok := file.(*tape); ok {
		file = t.Object
	}
	if _, far := file.(object.Ranger); !far {
		return false
	}
	n, _ := file.ReadAt(window, at) // an error leaves the window damaged
	return n == len(window)
}

// atEnd returns io.EOF for an end of a stream, as [io.ReaderAt] has it.
func atEnd(err error) error {
	if err == io.ErrUnexpectedEOF { //nolint:errorlint // the stream's own error may wrap it, and is more exact
		return io.EOF
	}
	return err
}
