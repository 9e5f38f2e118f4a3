package checkpoint

import (
	"encoding/binary"
	"slices"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

// BlockSize is the number of bytes that one checksum covers: the smallest unit of reading.
// The last block of a chunk may be shorter.
const BlockSize = 64 << 10

const (
	indexMagic      = "CKIX"
	indexVersion    = 1
	adoptedVersion  = 2
	verbatimVersion = 3 // see [Frame]
	fromVersion     = 4 // version 1 with files of other checkpoints

	entryValue   = 1
	entryPerRank = 2
	entryStrided = 4 // of adopted chunks: strides follow
	entryRecord  = 8 // of adopted chunks: a checksum of the other program's follows
)

// Index records where the chunks and values of one rank lie, with the digests and checksums
// that prove their bytes. The manifest names each rank's index by its digest. Its forms are
// drawn in the package comment.
type Index struct {
	Rank    int
	Files   []File  // named by absolute paths where they are adopted
	Entries []Entry // in the order of the rank's items
	// Modified is the time of each file's last write, in ns since 1970, if the files are
	// adopted; nil if they are the checkpoint's own.
	Modified []int64
	// Frames holds, for each file, the bytes between chunks, if the files are in the format
	// of another program and kept here; else nil.
	Frames [][]Frame
}

// refers reports whether a file lies in the directory of another checkpoint.
func (x Index) refers() bool {
	return slices.ContainsFunc(x.Files, func(f File) bool { return f.From != Ref{} })
}

// Adopted reports whether the files are those of another program, read in place.
func (x Index) Adopted() bool { return x.Modified != nil }

// Entry is one stored chunk or value.
type Entry struct {
	Item   Item
	Key    string // in the header of the data file
	File   int    // index of files
	Offset int64  // in the file, in bytes
	Digest Digest
	Sums   []uint32 // CRC-32C of each block; nil while those of an adopted chunk are not learned

	Strides []int64 // of an adopted chunk that is not row-major: see [Entry.Span]
	Record  *Record // of an adopted chunk, if its file has a checksum
}

// Learned reports whether the digest and sums of the chunk are known.
func (e *Entry) Learned() bool { return e.Digest != (Digest{}) }

// BoxString returns the chunk's box for messages; empty for a value.
func (e Entry) BoxString() string {
	if e.Item.Value {
		return ""
	}
	return e.Item.Shard.Box.String()
}

// Blocks returns the number of checksums over size bytes.
func Blocks(size int64) int64 { return (size + BlockSize - 1) / BlockSize }

// Encode returns the bytes of the index file. Equal indexes give equal bytes.
func (x Index) Encode() []byte {
	size := 64
	for _, e := range x.Entries {
		size += 128 + len(e.Item.Shard.FQN) + len(e.Key) + 4*len(e.Sums)
	}
	b := make([]byte, 0, size)
	number := func(v int64) { b = binary.AppendUvarint(b, uint64(v)) }
	text := func(s string) { number(int64(len(s))); b = append(b, s...) }

	version := byte(indexVersion)
	switch {
	case x.Adopted():
		version = adoptedVersion
	case x.Verbatim():
		version = verbatimVersion
	case x.refers():
		version = fromVersion
	}
	b = append(append(b, indexMagic...), version)
	number(int64(x.Rank))
	number(int64(len(x.Files)))
	for i, f := range x.Files {
		text(f.Name)
		number(f.Size)
		if version == fromVersion {
			text(f.from())
		}
		if x.Adopted() {
			number(x.Modified[i])
		}
		if x.Verbatim() {
			number(int64(len(x.Frames[i])))
			for _, f := range x.Frames[i] {
				number(f.Offset)
				number(f.Size)
				for _, sum := range f.Sums {
					b = binary.LittleEndian.AppendUint32(b, sum)
				}
			}
		}
	}
	number(int64(len(x.Entries)))
	for _, e := range x.Entries {
		flags := int64(0)
		if e.Item.Value {
			flags |= entryValue
		}
		if e.Item.PerRank {
			flags |= entryPerRank
		}
		if e.Strides != nil {
			flags |= entryStrided
		}
		if e.Record != nil {
			flags |= entryRecord
		}
		number(flags)
		text(e.Item.Shard.FQN)
		if !x.Adopted() && !x.Verbatim() {
			text(e.Key)
		}
		number(int64(e.File))
		number(e.Offset)
		number(e.Item.Bytes)
		if s := e.Item.Shard; !e.Item.Value {
			number(int64(s.DType))
			number(int64(len(s.Global)))
			for _, n := range s.Global {
				number(n)
			}
			for d := range s.Box.Offsets {
				number(s.Box.Offsets[d])
				number(s.Box.Sizes[d])
			}
		}
		for _, n := range e.Strides {
			number(n)
		}
		if x.Adopted() {
			if e.Record != nil {
				number(e.Record.Offset)
				number(e.Record.Size)
				b = binary.LittleEndian.AppendUint32(b, e.Record.CRC)
			}
			continue
		}
		b = append(b, e.Digest[:]...)
		for _, sum := range e.Sums {
			b = binary.LittleEndian.AppendUint32(b, sum)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32c.Checksum(b))
}

// File is one file in a checkpoint's directory.
type File struct {
	Name string
	Size int64 // in bytes
	// From is the checkpoint in whose directory the file lies, if not in that of the index: the
	// checkpoint that wrote it. Only data files, and none of adopted or verbatim ranks, have it.
	From Ref
}

// In returns the checkpoint in whose directory a file of an index of ref lies.
func (f File) In(ref Ref) Ref {
	if f.From != (Ref{}) {
		return f.From
	}
	return ref
}

// from returns the encoding of From: empty, or the path of the checkpoint.
func (f File) from() string {
	if f.From == (Ref{}) {
		return ""
	}
	return f.From.String()
}

// Record is a run of bytes in the file of another program, with that program's checksum.
type Record struct {
	Offset int64 // in the file, in bytes
	Size   int64
	CRC    uint32 // CRC-32 (IEEE), as in ZIP archives
}

// Frame is a run of bytes between the chunks of a verbatim file. A verbatim rank has its
// chunks in files of another program's format, kept byte for byte in the checkpoint's
// directory. Its index has version 3: entries are those of version 1, without keys and with
// optional strides. Each file has, after its name and size, the frames that fill it up:
//
//	file    │ frame │  chunk  │ frame │ chunk │ frame │
//	frame   offset size, crc (u32 LE) for each 64 KiB from its start
//
// So every byte of the file has a checksum: those of a chunk in the chunk's entry, those
// between chunks, and those below a chunk with strides, in a frame.
type Frame struct {
	Offset, Size int64
	Sums         []uint32
}

// Verbatim reports whether the files are in the format of another program and kept
// in the checkpoint.
func (x Index) Verbatim() bool { return x.Frames != nil }

// Extent is a run of bytes of a file whose checksums are known: a frame or a chunk.
type Extent struct {
	Offset, Size int64
	Sums         []uint32
}

// Extents returns the extents of the n-th file of a verbatim index in file order.
// Together they cover the file.
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

// Own returns the entries that have bytes of their own in the rank's data file, in the order
// of the items. Of equal entries that share their bytes, it returns the first.
func (x *Index) Own() []int {
	var own []int
	seen := map[int64]bool{}
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != 0 || e.Item.Bytes > 0 && seen[e.Offset] {
			continue
		}
		if e.Item.Bytes > 0 {
			seen[e.Offset] = true
		}
		own = append(own, i)
	}
	return own
}

// EncodedSize returns the size of the index file, also before the sums are known.
func (x Index) EncodedSize() int64 {
	size := int64(len(x.Encode()))
	for _, e := range x.Entries {
		size += 4 * (Blocks(e.Item.Bytes) - int64(len(e.Sums)))
	}
	return size
}

// Span returns the number of bytes from the first element of a strided chunk to the end of
// the last. ok is false if they cannot lie in a file of limit bytes.
//
// The elements of a strided chunk, such as a transposed tensor in an adopted file, are not in
// row-major order. Its offset is that of the first element. Its strides are the distances, in
// elements, to the next element in each dimension:
//
//	sizes [2 3], strides [1 2]   in the file   a0 b0 a1 b1 a2 b2
//	                             as a chunk    a0 a1 a2 b0 b1 b2
//
// Blocks, checksums and digests are always those of the chunk.
func (e *Entry) Span(limit int64) (bytes int64, ok bool) {
	sizes := e.Item.Shard.Box.Sizes
	if e.Item.Shard.Box.Empty() {
		return 0, true
	}
	size := int64(e.Item.Shard.DType.Size())
	limit /= size
	last := int64(0) // element
	for d, n := range sizes {
		if n == 1 {
			continue
		}
		if e.Strides[d] > limit/(n-1) {
			return 0, false
		}
		if add := e.Strides[d] * (n - 1); add > limit-last {
			return 0, false
		} else {
			last += add
		}
	}
	return (last + 1) * size, last < limit
}

// Gather fills window with the bytes of a strided chunk from start on, out of its
// whole span. Both ends are multiples of the element size.
func (e *Entry) Gather(window, span []byte, start int64) {
	size := int64(e.Item.Shard.DType.Size())
	sizes := e.Item.Shard.Box.Sizes
	at := make([]int64, len(sizes))
	pos, rest := int64(0), start/size
	for d := len(sizes) - 1; d >= 0; d-- {
		at[d] = rest % sizes[d]
		rest /= sizes[d]
		pos += at[d] * e.Strides[d]
	}
	for len(window) > 0 {
		copy(window[:size], span[pos*size:])
		window = window[size:]
		for d := len(sizes) - 1; d >= 0; d-- {
			at[d]++
			pos += e.Strides[d]
			if at[d] < sizes[d] {
				break
			}
			pos -= at[d] * e.Strides[d]
			at[d] = 0
		}
	}
}
