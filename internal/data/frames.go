package data

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/zeebo/blake3"
)

// A verbatim rank has its chunks in files that came in the format of another
// program, and are kept byte for byte in the checkpoint's own directory. Its
// index has version 3: entries are as those of version 1, without keys and with
// strides where a chunk has some; and each file has, beside its name and size,
// the frames that fill it up:
//
//	file    │ frame │  chunk  │ frame │ chunk │ frame │
//	frame   offset size, crc (u32 LE) for each 64 KiB from its start
//
// So every byte of the file has a checksum: those of a chunk in the chunk's
// entry, those between them, and below a chunk with strides, in a frame.
type Frame struct {
	Offset, Size int64
	Sums         []uint32
}

// verbatim reports whether the files are another program's, kept here.
func (x Index) Verbatim() bool { return x.Frames != nil }

// verbatimSuffix ends the names of DCP's data files: one that no chunk is in holds
// nothing that anybody names.
const VerbatimSuffix = ".distcp"

// decodeFrames reads those of one file.
func (d *indexDecoder) decodeFrames(f File) []Frame {
	frames := make([]Frame, 0)
	for range d.count(6) {
		fr := Frame{Offset: d.number(1 << 62), Size: d.number(1 << 62)}
		if d.err == nil && (fr.Offset > f.Size || fr.Size > f.Size-fr.Offset) {
			d.fail("a frame of %d bytes at %d does not lie in the %d bytes of %s", fr.Size, fr.Offset, f.Size, f.Name)
		}
		if d.err != nil {
			return frames
		}
		fr.Sums = d.sums(fr.Size)
		frames = append(frames, fr)
	}
	return frames
}

// extent is a run of bytes of a file whose checksums are known.
type Extent struct {
	Offset, Size int64
	Sums         []uint32
}

// extents are those of a file of a verbatim index, in their order: together
// they are all of it.
func (x *Index) Extents(n int) []Extent {
	var out []Extent
	for _, f := range x.Frames[n] {
		out = append(out, Extent(f))
	}
	for i := range x.Entries {
		if e := &x.Entries[i]; e.File == n && e.Strides == nil && e.Item.Bytes > 0 {
			out = append(out, Extent{e.Offset, e.Item.Bytes, e.Sums})
		}
	}
	slices.SortFunc(out, func(a, b Extent) int { return int(min(max(a.Offset-b.Offset, -1), 1)) })
	return out
}

// framesOf are the parts of a file of size bytes that no chunk in order covers,
// with their checksums.
func framesOf(x *Index, n int, file io.ReaderAt) ([]Frame, error) {
	at := int64(0)
	out := []Frame{}
	fill := func(to int64) error {
		if to <= at {
			return nil
		}
		f := Frame{Offset: at, Size: to - at}
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
func digestEntry(e *Entry, file object.Object) error {
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
func (v *verifier) checkFrames(x *Index, n int, file object.Object) {
	name := x.Files[n].Name
	for _, f := range x.Frames[n] {
		buf := make([]byte, BlockSize)
		for block, want := range f.Sums {
			start := int64(block) * BlockSize
			part := buf[:min(BlockSize, f.Size-start)]
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
