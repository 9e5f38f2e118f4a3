package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
)

// copied is a file in shared memory with the bytes of a file of another machine that were read so
// far. It exists because clients read by path, and a bucket has none. Bytes are written to it once
// they are verified; what was not read takes no memory.
type copied struct {
	of     *data.VerbatimFile
	from   ranger
	file   *os.File
	memory *memory

	whole  sync.Once // fetches an attachment, which has one digest
	failed error     // of whole
}

// ranger is a file of another machine.
type ranger interface {
	object.Object
	object.Ranger
}

// copyOf returns an empty copy of a file. The caller discards it.
func (m *memory) copyOf(of *data.VerbatimFile, from ranger) (*copied, error) {
	file, err := m.files.New()
	if err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	c := &copied{of: of, from: from, file: file, memory: m}
	if err := file.Truncate(of.Size); err != nil {
		c.discard()
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	return c, nil
}

// fetchTries is how often bytes that arrive damaged are requested.
const fetchTries = 3

// fetch reads some bytes of the file into the copy, and verifies them.
func (c *copied) fetch(ctx context.Context, from, to int64) error {
	if c.attached() {
		c.whole.Do(func() { c.failed = c.tries(func() error { return c.fetchWhole(ctx) }) })
		return c.failed
	}
	return c.tries(func() error { return c.fetchBlocks(ctx, from, to) })
}

// attached reports whether the file has one digest in place of checksums of its blocks.
func (c *copied) attached() bool {
	for range c.of.Sums(0, c.of.Size) {
		return false
	}
	return true
}

// tries repeats an operation while the bytes that it gets are damaged.
func (c *copied) tries(do func() error) (err error) {
	for range fetchTries {
		if err = do(); !errors.As(err, new(*data.CorruptError)) {
			return err
		}
	}
	return err
}

// fetchBlocks fetches the blocks that hold some bytes. The first and the last block may extend
// beyond them: that part is verified, and left to another call.
func (c *copied) fetchBlocks(ctx context.Context, from, to int64) error {
	lo, hi := max(from-checkpoint.BlockSize, 0), min(to+checkpoint.BlockSize, c.of.Size)
	bytes := make([]byte, hi-lo)
	stream, err := c.from.ReadRange(lo, hi-lo)
	if err != nil {
		return err
	}
	_, err = io.ReadFull(stream, bytes)
	if err = errors.Join(err, stream.Close(), ctx.Err()); err != nil {
		return fmt.Errorf("read %s at %d: %w", c.of.Path, lo, err)
	}
	if _, _, err := c.of.Verify(ctx, window{bytes, lo}, from, to); err != nil {
		return err
	}
	return c.write(bytes[from-lo:to-lo], from)
}

// fetchWhole fetches all bytes. No client reads them before it has returned.
func (c *copied) fetchWhole(ctx context.Context) error {
	stream, err := c.from.ReadRange(0, c.of.Size)
	if err != nil {
		return err
	}
	bytes := make([]byte, min(pieceSize, c.of.Size))
	for at := int64(0); at < c.of.Size && err == nil; at += int64(len(bytes)) {
		bytes = bytes[:min(int64(len(bytes)), c.of.Size-at)]
		if _, err = io.ReadFull(stream, bytes); err == nil {
			err = errors.Join(c.write(bytes, at), ctx.Err())
		}
	}
	if err = errors.Join(err, stream.Close()); err != nil {
		return fmt.Errorf("read %s: %w", c.of.Path, err)
	}
	_, _, err = c.of.Verify(ctx, c.file, 0, c.of.Size)
	return err
}

func (c *copied) write(p []byte, at int64) error {
	_, err := c.file.WriteAt(p, at)
	if errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%s is read into shared memory, where it has no room: %w: make room in %s, or give it more (docker run --shm-size)", c.of.Path, err, c.memory.files.Shared)
	}
	return err
}

// discard frees the memory.
func (c *copied) discard() {
	if err := c.memory.files.Discard(c.file); err != nil {
		c.memory.log.Warn("memory of a file that was read not freed", "file", c.of.Path, "error", err)
	}
}

// window is a part of a file in memory.
type window struct {
	bytes []byte
	at    int64
}

// ReadAt implements io.ReaderAt within the part.
func (w window) ReadAt(p []byte, off int64) (int, error) {
	if off < w.at || off-w.at > int64(len(w.bytes)) {
		return 0, io.EOF
	}
	n := copy(p, w.bytes[off-w.at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
