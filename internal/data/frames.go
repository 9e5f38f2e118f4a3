package data

import (
	"errors"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/zeebo/blake3"
)

// framesOf are the parts of a file of size bytes that no chunk in order covers,
// with their checksums.
func framesOf(x *checkpoint.Index, n int, file io.ReaderAt) ([]checkpoint.Frame, error) {
	at := int64(0)
	out := []checkpoint.Frame{}
	fill := func(to int64) error {
		if to <= at {
			return nil
		}
		f := checkpoint.Frame{Offset: at, Size: to - at}
		var sums blockSums
		buf := make([]byte, min(f.Size, windowSize))
		for off := int64(0); off < f.Size; {
			part := buf[:min(int64(len(buf)), f.Size-off)]
			if k, err := file.ReadAt(part, at+off); k < len(part) {
				return fmt.Errorf("read %d bytes at %d of %s: %w", len(part), at+off, x.Files[n].Name, err)
			}
			sums.add(part)
			off += int64(len(part))
		}
		f.Sums = sums.end()
		out = append(out, f)
		return nil
	}
	chunks := x.Extents(n)
	for _, c := range chunks {
		if err := fill(c.Offset); err != nil {
			return nil, err
		}
		at = max(at, c.Offset+c.Size)
	}
	return out, fill(x.Files[n].Size)
}

// digestEntry finds the digest and checksums of a chunk by reading it.
func digestEntry(e *checkpoint.Entry, file object.Object) error {
	var span []byte
	if e.Strides != nil {
		var err error
		if span, err = readSpan(e, file); err != nil {
			return err
		}
	}
	hash := blake3.New()
	var sums blockSums
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for start := int64(0); start < e.Item.Bytes; {
		window := (*buf)[:min(int64(len(*buf)), e.Item.Bytes-start)]
		n, err := readWindow(e, file, span, window, start)
		if n < len(window) {
			return fmt.Errorf("read %q: %w", e.Item.Shard.FQN, errors.Join(io.ErrUnexpectedEOF, err))
		}
		_, _ = hash.Write(window) // never fails
		sums.add(window)
		start += int64(n)
	}
	hash.Sum(e.Digest[:0])
	e.Sums = sums.end()
	return nil
}

// frames checks what lies between the chunks of a verbatim file.
func (v *verifier) checkFrames(x *checkpoint.Index, n int, file object.Object) {
	name := x.Files[n].Name
	for _, f := range x.Frames[n] {
		buf := make([]byte, checkpoint.BlockSize)
		for block, want := range f.Sums {
			start := int64(block) * checkpoint.BlockSize
			part := buf[:min(checkpoint.BlockSize, f.Size-start)]
			if k, err := file.ReadAt(part, f.Offset+start); k < len(part) {
				if errors.Is(err, io.EOF) {
					return // the file is too short, which is a finding already
				}
				v.add(Finding{Kind: Unreadable, File: name, Block: -1, Offset: f.Offset + start, Problem: err.Error()})
				return
			}
			if got := crc32c.Checksum(part); got != want {
				v.add(Finding{
					Kind: Corrupt, File: name, Block: -1, Offset: f.Offset + start,
					Problem: fmt.Sprintf("checksum of the bytes between tensors is %08x, want %08x", got, want),
				})
			}
		}
	}
}
