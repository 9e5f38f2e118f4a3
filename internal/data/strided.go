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

// readStrided reads all of a chunk whose elements are not in order.
func (c *chunkRead) readStrided(ctx context.Context, path string, file object.Object) (int64, error) {
	span, err := readSpan(c.entry, file)
	if err != nil {
		return 0, c.short(path, 0, err)
	}
	for _, b := range c.blocks {
		if _, err := c.readBlocks(ctx, path, gathered{c.entry, span}, b); err != nil {
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
