package data

import (
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

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

// atEnd returns io.EOF for an end of a stream, as [io.ReaderAt] has it.
func atEnd(err error) error {
	if err == io.ErrUnexpectedEOF { //nolint:errorlint // the stream's own error may wrap it and says more
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
