package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/zeebo/blake3"
)

// A scan passes over a run of bytes once: it reads a window, compares or takes the
// checksum of each block, and digests. Loads, saves, verifications, repairs and
// imports all use these parts:
//
//	scan          reads windows of a file, or of a strided chunk
//	scanBytes     cuts bytes in memory into windows, without a copy
//	tape          makes one stream of the windows, where each would be a request
//	damagedBlock  compares the blocks of a window with their checksums
//	digester      takes the digest of a chunk and the checksums of its blocks
//
// Damage is an error for a load, a finding for a verification, and an answer for a
// repair. So a scan reports only the place of damage, and its caller the rest.
const (
	windowBlocks = 16                                  // read at once, and compared while they are in the cache
	windowSize   = windowBlocks * checkpoint.BlockSize // bytes of that
	stepSize     = 1 << 18                             // digested and then checksummed, while they are in the cache
)

// buffers have windowSize bytes each. They are pooled because clearing a new one takes
// longer than the scan of a small chunk.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, windowSize)
	return &b
}}

// hashers are pooled because each has 10 KB, and many chunks of a checkpoint are small.
var hashers = sync.Pool{New: func() any { return blake3.New() }}

// shortError reports that a source ends, or cannot be read, within the bytes to scan. It
// names no file: callers convert it to an error, a finding or an answer.
type shortError struct {
	at  int64 // offset in the source of the first byte that is missing
	err error // of the read; [io.EOF] or nil where the source ends
}

// ends reports whether the source ends there, and was not merely unreadable.
func (e *shortError) ends() bool { return e.err == nil || errors.Is(e.err, io.EOF) }

// Error returns the text of the read's error.
func (e *shortError) Error() string { return e.Unwrap().Error() }

// Unwrap returns the error of the read, and [io.ErrUnexpectedEOF] where the source ends.
func (e *shortError) Unwrap() error {
	if e.ends() {
		return io.ErrUnexpectedEOF
	}
	return e.err
}

// shortOf returns the shortError in the chain of err, or nil.
func shortOf(err error) *shortError {
	var short *shortError
	if err == nil || !errors.As(err, &short) {
		return nil
	}
	return short
}

// scan reads the bytes of src from offset lo to hi and calls visit with one window after
// the other. Each window begins a multiple of windowSize after lo, and is whole: where src
// ends before, the error is a [*shortError] and the bytes of the last window are dropped.
// visit may keep nothing of the window. scan returns the number of bytes that were read.
//
// scan allocates nothing: the buffer is pooled, and visit does not escape. It copies
// windows out of the page cache, because mapping them takes half as much time again:
// the kernel maps pages one by one.
//
// A file whose reads are requests is read as one stream.
func scan(ctx context.Context, src io.ReaderAt, lo, hi int64, visit func(window []byte, at int64) error) (int64, error) {
	if _, far := src.(object.Ranger); far && hi > lo {
		on, stop, err := play(src.(object.Object), lo, hi)
		if err != nil {
			return 0, &shortError{at: lo, err: err}
		}
		defer stop()
		src = on
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for at := lo; at < hi; {
		if err := ctx.Err(); err != nil {
			return at - lo, err
		}
		window := (*buf)[:min(windowSize, hi-at)]
		n, err := src.ReadAt(window, at)
		if n < len(window) {
			return at - lo + int64(n), &shortError{at: at + int64(n), err: err}
		}
		if err := visit(window, at); err != nil {
			return at - lo + int64(n), err
		}
		at += int64(n)
	}
	return max(hi-lo, 0), nil
}

// scanBytes is [scan] for bytes in memory, which cannot be short.
func scanBytes(ctx context.Context, data []byte, visit func(window []byte, at int64) error) error {
	for at := 0; at < len(data); at += windowSize {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := visit(data[at:min(at+windowSize, len(data))], int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// damagedBlock compares the blocks of a window with sums, the checksums from its first
// block on. It returns the first block that has another checksum, and that checksum;
// -1 if all are right.
func damagedBlock(window []byte, sums []uint32) (block int, got uint32) {
	for block := 0; len(window) > 0; block++ {
		n := min(checkpoint.BlockSize, len(window))
		if got := crc32c.Checksum(window[:n]); got != sums[block] {
			return block, got
		}
		window = window[n:]
	}
	return -1, 0
}

// damagedBlocks calls found for every block of a window that has another checksum.
func damagedBlocks(window []byte, sums []uint32, found func(block int, got uint32)) {
	for first := 0; len(window) > 0; {
		block, got := damagedBlock(window, sums[first:])
		if block < 0 {
			return
		}
		found(first+block, got)
		first += block + 1
		window = window[min((block+1)*checkpoint.BlockSize, len(window)):]
	}
}

// digestOf returns the digest of the bytes of src from lo to hi.
func digestOf(ctx context.Context, src io.ReaderAt, lo, hi int64) (checkpoint.Digest, error) {
	d := newHasher()
	defer d.free()
	_, err := scan(ctx, src, lo, hi, d.window)
	return d.digest(), err
}

// digestBytes returns the digest of bytes in memory.
func digestBytes(ctx context.Context, data []byte) (checkpoint.Digest, error) {
	d := newHasher()
	defer d.free()
	err := scanBytes(ctx, data, d.window)
	return d.digest(), err
}

// hasher takes a BLAKE3 digest. It comes from a pool and must be freed.
type hasher struct{ *blake3.Hasher }

func newHasher() hasher {
	h := hashers.Get().(*blake3.Hasher)
	h.Reset()
	return hasher{h}
}

func (h hasher) free() { hashers.Put(h.Hasher) }

func (h hasher) add(p []byte) { _, _ = h.Write(p) } // never fails

// window is a visit of a scan.
func (h hasher) window(p []byte, _ int64) error {
	h.add(p)
	return nil
}

func (h hasher) digest() (out checkpoint.Digest) {
	h.Sum(out[:0])
	return out
}

// digester takes the digest of a chunk and the checksum of each of its blocks, in one pass.
type digester struct {
	hasher
	blockSums
}

// newDigester returns a digester for size bytes; 0 if that is not known. It must be freed.
func newDigester(size int64) *digester {
	return &digester{newHasher(), blockSums{sums: make([]uint32, 0, checkpoint.Blocks(size))}}
}

// begin makes the digester ready for another chunk.
func (d *digester) begin(size int64) {
	d.Reset()
	d.blockSums = blockSums{sums: make([]uint32, 0, checkpoint.Blocks(size))}
}

// add takes the next bytes. Both passes go over a step that is still in the cache.
func (d *digester) add(p []byte) {
	for len(p) > 0 {
		step := p[:min(len(p), stepSize)]
		d.hasher.add(step)
		d.blockSums.add(step)
		p = p[len(step):]
	}
}

// end returns digest and checksums of all that was added.
func (d *digester) end() (checkpoint.Digest, []uint32) { return d.digest(), d.blockSums.end() }

// blockSums takes the checksum of each block of a run of bytes.
type blockSums struct {
	sums []uint32
	crc  uint32
	n    int // bytes of the present block
}

func (b *blockSums) add(p []byte) {
	for len(p) > 0 {
		n := min(len(p), checkpoint.BlockSize-b.n)
		b.crc = crc32c.Update(b.crc, p[:n])
		b.n += n
		p = p[n:]
		if b.n == checkpoint.BlockSize {
			b.cut()
		}
	}
}

func (b *blockSums) cut() {
	b.sums = append(b.sums, b.crc)
	b.crc, b.n = 0, 0
}

// end returns all checksums, with that of a shorter last block.
func (b *blockSums) end() []uint32 {
	if b.n > 0 {
		b.cut()
	}
	return b.sums
}

// readSpan reads all of a strided chunk's span.
func readSpan(e *checkpoint.Entry, file object.Object) ([]byte, error) {
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

// inOrder returns the bytes of a chunk in order, from its offset on: those of its file,
// or of a strided chunk the elements of its span, which is read at once.
func inOrder(e *checkpoint.Entry, file object.Object) (io.ReaderAt, error) {
	if e.Strides == nil {
		return file, nil
	}
	span, err := readSpan(e, file)
	if err != nil {
		return nil, err
	}
	return gathered{e, span}, nil
}

// gathered is a strided chunk as if it lay in the file in order.
type gathered struct {
	*checkpoint.Entry
	span []byte
}

// ReadAt implements io.ReaderAt for windows of whole elements in the chunk,
// counted as if it began at the entry's offset.
func (g gathered) ReadAt(p []byte, off int64) (int, error) {
	g.Gather(p, g.span, off-g.Offset)
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

// play begins a tape of the bytes from lo to hi. A file whose reads are no requests is
// returned itself.
func play(file object.Object, lo, hi int64) (src object.Object, stop func(), err error) {
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

// rereads is how often a window that is damaged is requested again: the damage may have
// happened on the way.
const rereads = 2

// reread fills a window again, by a request of its own. It reports false for a file whose
// reads are no requests, and for an unreadable file.
func reread(file io.ReaderAt, window []byte, at int64) bool {
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

// reach is how much is read at once.
type reach struct {
	task  int64 // blocks read by one goroutine in one go
	small int64 // bytes of a part that is read together with its neighbours
	most  int64 // bytes of parts that are read together
	fill  bool  // parts are cut so that together they have most bytes
}

// near is the reach for files whose reads are no requests.
var near = reach{task: taskBlocks, small: smallPart, most: windowSize}

// reachOf returns the reach for a backend: where each read is a request, requests of a span.
func reachOf(r object.Reading) reach {
	if r.Span == 0 {
		return near
	}
	span := max(r.Span/checkpoint.BlockSize, 1)
	return reach{task: span, small: span * checkpoint.BlockSize, most: span * checkpoint.BlockSize, fill: true}
}

// readers returns the number of runs read at a time: some wait for the disk, or all for the
// network.
func (r *Root) readers() int {
	if depth := r.b.Reading().Depth; depth > 0 {
		return depth
	}
	return readers()
}
