package data

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

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

// readWindow reads the chunk's bytes from start on into buf. span is what
// readSpan gave for a strided chunk. It returns how many bytes could be read,
// and why not more.
func readWindow(e *checkpoint.Entry, file object.Object, span, buf []byte, start int64) (int, error) {
	if e.Strides == nil {
		return file.ReadAt(buf, e.Offset+start)
	}
	e.Gather(buf, span, start)
	return len(buf), nil
}

// readStrided reads all of a chunk whose elements are not in order.
func (c *chunkRead) readStrided(ctx context.Context, path string, file object.Object) (int64, error) {
	span, err := readSpan(c.entry, file)
	if err != nil {
		return 0, c.short(path, 0, err)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for _, b := range c.blocks {
		if _, err := c.readBlocks(ctx, path, gathered{c.entry, span}, b, *buf); err != nil {
			return 0, err
		}
	}
	return int64(len(span)), nil
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
