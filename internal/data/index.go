package data

import (
	"encoding/binary"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
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

	flagValue   = 1
	flagPerRank = 2
	flagStrided = 4 // of adopted chunks: strides follow
	flagRecord  = 8 // of adopted chunks: a checksum of the other program's follows
)

// index says what the data files of one rank hold.
type index struct {
	rank    int
	files   []File  // named by absolute paths where they are adopted
	entries []entry // in the order of the rank's items
	// modified is when each file was last written, in ns since 1970, if the
	// files are adopted; nil if they are the checkpoint's own.
	modified []int64
	// frames are, of each file, what lies between chunks, if the files are in
	// the format of another program and kept here; else nil.
	frames [][]frame
}

// adopted reports whether the files are another program's, in their place.
func (x index) adopted() bool { return x.modified != nil }

// entry is one stored chunk or value.
type entry struct {
	item   checkpoint.Item
	key    string // in the header of the data file
	file   int    // index of files
	offset int64  // in the file, in bytes
	digest checkpoint.Digest
	sums   []uint32 // CRC-32C of each block; nil while those of an adopted chunk are not learned

	strides []int64 // of an adopted chunk that is not row-major: see [strided]
	record  *Record // of an adopted chunk, if its file has a checksum
}

// learned reports whether the chunk's digest and sums are known.
func (e *entry) learned() bool { return e.digest != (checkpoint.Digest{}) }

// key names a chunk or value within a checkpoint. The box of a value is empty.
type key struct {
	value bool
	rank  int // whose file holds it
	fqn   string
	box   string
}

func itemKey(rank int, it checkpoint.Item) key {
	if it.Value {
		return key{value: true, rank: rank, fqn: it.Shard.FQN}
	}
	return key{rank: rank, fqn: it.Shard.FQN, box: it.Shard.Box.Key()}
}

// box is the chunk's box as people read it; empty for a value.
func (e entry) box() string {
	if e.item.Value {
		return ""
	}
	return e.item.Shard.Box.String()
}

// blocks is the number of checksums over size bytes.
func blocks(size int64) int64 { return (size + BlockSize - 1) / BlockSize }

// validateItem checks what every stored item must satisfy.
func validateItem(it checkpoint.Item) error {
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
func (x index) encode() []byte {
	size := 64
	for _, e := range x.entries {
		size += 128 + len(e.item.Shard.FQN) + len(e.key) + 4*len(e.sums)
	}
	b := make([]byte, 0, size)
	number := func(v int64) { b = binary.AppendUvarint(b, uint64(v)) }
	text := func(s string) { number(int64(len(s))); b = append(b, s...) }

	version := byte(indexVersion)
	if x.adopted() {
		version = adoptedVersion
	}
	if x.verbatim() {
		version = verbatimVersion
	}
	b = append(append(b, indexMagic...), version)
	number(int64(x.rank))
	number(int64(len(x.files)))
	for i, f := range x.files {
		text(f.Name)
		number(f.Size)
		if x.adopted() {
			number(x.modified[i])
		}
		if x.verbatim() {
			number(int64(len(x.frames[i])))
			for _, f := range x.frames[i] {
				number(f.offset)
				number(f.size)
				for _, sum := range f.sums {
					b = binary.LittleEndian.AppendUint32(b, sum)
				}
			}
		}
	}
	number(int64(len(x.entries)))
	for _, e := range x.entries {
		flags := int64(0)
		if e.item.Value {
			flags |= flagValue
		}
		if e.item.PerRank {
			flags |= flagPerRank
		}
		if e.strides != nil {
			flags |= flagStrided
		}
		if e.record != nil {
			flags |= flagRecord
		}
		number(flags)
		text(e.item.Shard.FQN)
		if !x.adopted() && !x.verbatim() {
			text(e.key)
		}
		number(int64(e.file))
		number(e.offset)
		number(e.item.Bytes)
		if s := e.item.Shard; !e.item.Value {
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
		for _, n := range e.strides {
			number(n)
		}
		if x.adopted() {
			if e.record != nil {
				number(e.record.Offset)
				number(e.record.Size)
				b = binary.LittleEndian.AppendUint32(b, e.record.CRC)
			}
			continue
		}
		b = append(b, e.digest[:]...)
		for _, sum := range e.sums {
			b = binary.LittleEndian.AppendUint32(b, sum)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32c.Checksum(b))
}
