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
type frame struct {
	offset, size int64
	sums         []uint32
}

// verbatim reports whether the files are another program's, kept here.
func (x index) verbatim() bool { return x.frames != nil }

// verbatimSuffix ends the names of DCP's data files: one that no chunk is in holds
// nothing that anybody names.
const verbatimSuffix = ".distcp"

// decodeFrames reads those of one file.
func (d *indexDecoder) decodeFrames(f File) []frame {
	frames := make([]frame, 0)
	for range d.count(6) {
		fr := frame{offset: d.number(1 << 62), size: d.number(1 << 62)}
		if d.err == nil && (fr.offset > f.Size || fr.size > f.Size-fr.offset) {
			d.fail("a frame of %d bytes at %d does not lie in the %d bytes of %s", fr.size, fr.offset, f.Size, f.Name)
		}
		if d.err != nil {
			return frames
		}
		fr.sums = d.sums(fr.size)
		frames = append(frames, fr)
	}
	return frames
}

// extent is a run of bytes of a file whose checksums are known.
type extent struct {
	offset, size int64
	sums         []uint32
}

// extents are those of a file of a verbatim index, in their order: together
// they are all of it.
func (x *index) extents(n int) []extent {
	var out []extent
	for _, f := range x.frames[n] {
		out = append(out, extent(f))
	}
	for i := range x.entries {
		if e := &x.entries[i]; e.file == n && e.strides == nil && e.item.Bytes > 0 {
			out = append(out, extent{e.offset, e.item.Bytes, e.sums})
		}
	}
	slices.SortFunc(out, func(a, b extent) int { return int(min(max(a.offset-b.offset, -1), 1)) })
	return out
}

// framesOf are the parts of a file of size bytes that no chunk in order covers,
// with their checksums.
func framesOf(x *index, n int, file io.ReaderAt) ([]frame, error) {
	at := int64(0)
	out := []frame{}
	fill := func(to int64) error {
		if to <= at {
			return nil
		}
		f := frame{offset: at, size: to - at}
		var sums blockSums
		buf := make([]byte, min(f.size, windowSize))
		for off := int64(0); off < f.size; {
			part := buf[:min(int64(len(buf)), f.size-off)]
			if k, err := file.ReadAt(part, at+off); k < len(part) {
				return fmt.Errorf("read %d bytes at %d of %s: %w", len(part), at+off, x.files[n].Name, err)
			}
			sums.add(part)
			off += int64(len(part))
		}
		f.sums = sums.end()
		out = append(out, f)
		return nil
	}
	chunks := x.extents(n)
	for _, c := range chunks {
		if err := fill(c.offset); err != nil {
			return nil, err
		}
		at = max(at, c.offset+c.size)
	}
	return out, fill(x.files[n].Size)
}

// digestEntry finds the digest and checksums of a chunk by reading it.
func digestEntry(e *entry, file object.Object) error {
	var span []byte
	if e.strides != nil {
		var err error
		if span, err = e.readSpan(file); err != nil {
			return err
		}
	}
	hash := blake3.New()
	var sums blockSums
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for start := int64(0); start < e.item.Bytes; {
		window := (*buf)[:min(int64(len(*buf)), e.item.Bytes-start)]
		n, err := e.window(file, span, window, start)
		if n < len(window) {
			return fmt.Errorf("read %q: %w", e.item.Shard.FQN, errors.Join(io.ErrUnexpectedEOF, err))
		}
		_, _ = hash.Write(window) // never fails
		sums.add(window)
		start += int64(n)
	}
	hash.Sum(e.digest[:0])
	e.sums = sums.end()
	return nil
}

// frames checks what lies between the chunks of a verbatim file.
func (v *verifier) checkFrames(x *index, n int, file object.Object) {
	name := x.files[n].Name
	for _, f := range x.frames[n] {
		buf := make([]byte, BlockSize)
		for block, want := range f.sums {
			start := int64(block) * BlockSize
			part := buf[:min(BlockSize, f.size-start)]
			if k, err := file.ReadAt(part, f.offset+start); k < len(part) {
				if errors.Is(err, io.EOF) {
					return // the file is too short, which is a finding already
				}
				v.add(Finding{Kind: Unreadable, File: name, Block: -1, Offset: f.offset + start, Problem: err.Error()})
				return
			}
			if got := crc32c.Checksum(part); got != want {
				v.add(Finding{
					Kind: Corrupt, File: name, Block: -1, Offset: f.offset + start,
					Problem: fmt.Sprintf("checksum of the bytes between tensors is %08x, want %08x", got, want),
				})
			}
		}
	}
}
