package checkpoint

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

// BlockSize is the number of bytes that one checksum covers: the smallest
// piece that is read. The last block of a chunk may be shorter.
const BlockSize = 64 << 10

const (
	indexMagic      = "CKIX"
	indexVersion    = 1
	adoptedVersion  = 2
	verbatimVersion = 3 // see verbatim.go

	entryValue   = 1
	entryPerRank = 2
	entryStrided = 4 // of adopted chunks: strides follow
	entryRecord  = 8 // of adopted chunks: a checksum of the other program's follows
)

// index says what the data files of one rank hold.
type Index struct {
	Rank    int
	Files   []File  // named by absolute paths where they are adopted
	Entries []Entry // in the order of the rank's items
	// modified is when each file was last written, in ns since 1970, if the
	// files are adopted; nil if they are the checkpoint's own.
	Modified []int64
	// frames are, of each file, what lies between chunks, if the files are in
	// the format of another program and kept here; else nil.
	Frames [][]Frame
}

// adopted reports whether the files are another program's, in their place.
func (x Index) Adopted() bool { return x.Modified != nil }

// entry is one stored chunk or value.
type Entry struct {
	Item   Item
	Key    string // in the header of the data file
	File   int    // index of files
	Offset int64  // in the file, in bytes
	Digest Digest
	Sums   []uint32 // CRC-32C of each block; nil while those of an adopted chunk are not learned

	Strides []int64 // of an adopted chunk that is not row-major: see [strided]
	Record  *Record // of an adopted chunk, if its file has a checksum
}

// learned reports whether the chunk's digest and sums are known.
func (e *Entry) Learned() bool { return e.Digest != (Digest{}) }

// box is the chunk's box as people read it; empty for a value.
func (e Entry) BoxString() string {
	if e.Item.Value {
		return ""
	}
	return e.Item.Shard.Box.String()
}

// blocks is the number of checksums over size bytes.
func Blocks(size int64) int64 { return (size + BlockSize - 1) / BlockSize }

// validateItem checks what every stored item must satisfy.
func ValidateItem(it Item) error {
	if it.Value {
		if it.Shard.FQN == "" || it.Bytes < 0 {
			return fmt.Errorf("value %q of %d bytes has no name or a negative size", it.Shard.FQN, it.Bytes)
		}
		return nil
	}
	if err := it.Shard.Validate(); err != nil {
		return err
	}
	if need := it.Shard.Bytes(); it.Bytes != need {
		return fmt.Errorf("tensor %q has %d bytes, its box %v needs %d", it.Shard.FQN, it.Bytes, it.Shard.Box, need)
	}
	return nil
}

// encode is the index's file. Equal indexes give equal bytes.
func (x Index) Encode() []byte {
	size := 64
	for _, e := range x.Entries {
		size += 128 + len(e.Item.Shard.FQN) + len(e.Key) + 4*len(e.Sums)
	}
	b := make([]byte, 0, size)
	number := func(v int64) { b = binary.AppendUvarint(b, uint64(v)) }
	text := func(s string) { number(int64(len(s))); b = append(b, s...) }

	version := byte(indexVersion)
	if x.Adopted() {
		version = adoptedVersion
	}
	if x.Verbatim() {
		version = verbatimVersion
	}
	b = append(append(b, indexMagic...), version)
	number(int64(x.Rank))
	number(int64(len(x.Files)))
	for i, f := range x.Files {
		text(f.Name)
		number(f.Size)
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
}

// Record is a run of bytes in the file of another program, of which that
// program has left a checksum.
type Record struct {
	Offset int64 // in the file, in bytes
	Size   int64
	CRC    uint32 // CRC-32 (IEEE), as in ZIP archives
}

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

// own are the entries that have bytes of their own in the rank's data file, in
// the order of the items: of equal ones that lie there once, the first.
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

// encodedSize is the size of the index's file, before the sums are known.
func (x Index) EncodedSize() int64 {
	size := int64(len(x.Encode()))
	for _, e := range x.Entries {
		size += 4 * (Blocks(e.Item.Bytes) - int64(len(e.Sums)))
	}
	return size
}
