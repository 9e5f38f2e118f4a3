package storage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
)

// BlockSize is the number of bytes that one checksum covers: the smallest
// piece that is read. The last block of a chunk may be shorter.
const BlockSize = 64 << 10

const (
	indexMagic     = "CKIX"
	indexVersion   = 1
	adoptedVersion = 2

	flagValue   = 1
	flagPerRank = 2
	flagStrided = 4 // of adopted chunks: strides follow
	flagRecord  = 8 // of adopted chunks: a checksum of the other program's follows
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// index says what the data files of one rank hold.
type index struct {
	rank    int
	files   []File  // named by absolute paths where they are adopted
	entries []entry // in the order of the rank's items
	// modified is when each file was last written, in ns since 1970, if the
	// files are adopted; nil if they are the checkpoint's own.
	modified []int64
}

// adopted reports whether the files are another program's, in their place.
func (x index) adopted() bool { return x.modified != nil }

// entry is one stored chunk or value.
type entry struct {
	item   plan.Item
	key    string // in the header of the data file
	file   int    // index of files
	offset int64  // in the file, in bytes
	digest plan.Digest
	sums   []uint32 // CRC-32C of each block; nil while those of an adopted chunk are not learned

	strides []int64 // of an adopted chunk that is not row-major: see [strided]
	record  *record // of an adopted chunk, if its file has a checksum
}

// learned reports whether the chunk's digest and sums are known.
func (e *entry) learned() bool { return e.digest != (plan.Digest{}) }

// key names a chunk or value within a checkpoint. The box of a value is empty.
type key struct {
	value bool
	rank  int // whose file holds it
	fqn   string
	box   string
}

func itemKey(rank int, it plan.Item) key {
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
func validateItem(it plan.Item) error {
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
	b = append(append(b, indexMagic...), version)
	number(int64(x.rank))
	number(int64(len(x.files)))
	for i, f := range x.files {
		text(f.Name)
		number(f.Size)
		if x.adopted() {
			number(x.modified[i])
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
		if !x.adopted() {
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
		if x.adopted() {
			for _, n := range e.strides {
				number(n)
			}
			if e.record != nil {
				number(e.record.offset)
				number(e.record.size)
				b = binary.LittleEndian.AppendUint32(b, e.record.crc)
			}
			continue
		}
		b = append(b, e.digest[:]...)
		for _, sum := range e.sums {
			b = binary.LittleEndian.AppendUint32(b, sum)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decodeIndex is the inverse of encode. It trusts nothing.
func decodeIndex(data []byte) (index, error) {
	body := len(data) - 4
	if body < len(indexMagic)+1 || string(data[:len(indexMagic)]) != indexMagic {
		return index{}, errors.New("decode index: bad magic or too short")
	}
	version := data[len(indexMagic)]
	if v := version; v != indexVersion && v != adoptedVersion {
		return index{}, fmt.Errorf("decode index: version %d is not known, upgrade to read it", v)
	}
	want, got := binary.LittleEndian.Uint32(data[body:]), crc32.Checksum(data[:body], castagnoli)
	if want != got {
		return index{}, fmt.Errorf("decode index: checksum %08x, want %08x", got, want)
	}
	d := &indexDecoder{b: data[len(indexMagic)+1 : body], size: body}
	x := index{rank: int(d.number(1 << 31))}
	valid, least := validateName, 6+len(plan.Digest{})
	if version == adoptedVersion {
		valid, least, x.modified = validatePath, 4, []int64{}
	}
	for range d.count(2) {
		f := File{Name: d.text(), Size: d.number(1 << 62)}
		if err := valid(f.Name); err != nil && d.err == nil {
			d.fail("file %d: %v", len(x.files), err)
		}
		x.files = append(x.files, f)
		if x.adopted() {
			x.modified = append(x.modified, d.number(math.MaxInt64))
		}
	}
	n := d.count(least)
	x.entries = make([]entry, 0, n)
	for range n {
		x.entries = append(x.entries, d.entry(x.files, x.adopted()))
		if d.err != nil {
			break
		}
	}
	if d.err == nil && len(d.b) > 0 {
		d.fail("%d bytes after the last entry", len(d.b))
	}
	if d.err != nil {
		return index{}, fmt.Errorf("decode index: %w", d.err)
	}
	return x, nil
}

func (d *indexDecoder) entry(files []File, adopted bool) entry {
	known := int64(flagValue | flagPerRank)
	if adopted {
		known |= flagStrided | flagRecord
	}
	flags := d.number(known)
	e := entry{item: plan.Item{Value: flags&flagValue != 0, PerRank: flags&flagPerRank != 0}}
	e.item.Shard.FQN = d.text()
	if !adopted {
		e.key = d.text()
	}
	e.file = int(d.number(1 << 31))
	e.offset = d.number(1 << 62)
	e.item.Bytes = d.number(1 << 62)
	if !e.item.Value {
		e.item.Shard.DType = tensor.DType(d.number(255))
		ndim := d.number(tensor.MaxDims)
		e.item.Shard.Global = make(tensor.Shape, ndim)
		e.item.Shard.Box = tensor.Box{Offsets: make([]int64, ndim), Sizes: make([]int64, ndim)}
		for i := range ndim {
			e.item.Shard.Global[i] = d.number(1 << 62)
		}
		for i := range ndim {
			e.item.Shard.Box.Offsets[i] = d.number(1 << 62)
			e.item.Shard.Box.Sizes[i] = d.number(1 << 62)
		}
	}
	if adopted {
		d.adoptedPart(&e, flags)
	} else {
		copy(e.digest[:], d.bytes(int64(len(e.digest))))
	}
	if d.err != nil {
		return e
	}
	if err := validateItem(e.item); err != nil {
		d.fail("%v", err)
		return e
	}
	if adopted {
		if err := e.validatePlace(files); err != nil {
			d.fail("%v", err)
		}
		return e
	}
	if e.file >= len(files) || e.offset+e.item.Bytes > files[e.file].Size {
		d.fail("%q: %d bytes at %d do not lie in file %d", e.item.Shard.FQN, e.item.Bytes, e.offset, e.file)
		return e
	}
	raw := d.bytes(4 * blocks(e.item.Bytes))
	e.sums = make([]uint32, len(raw)/4)
	for i := range e.sums {
		e.sums[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return e
}

// indexDecoder reads the body of an index. The first error sticks, and counts
// are checked against the bytes that are left before anything is allocated.
type indexDecoder struct {
	b    []byte
	size int // where the checksum begins in the file
	err  error
}

func (d *indexDecoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("offset %d: %s", d.size-len(d.b), fmt.Sprintf(format, args...))
		d.b = nil
	}
}

func (d *indexDecoder) number(limit int64) int64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || n > 1 && d.b[n-1] == 0 || v > uint64(limit) {
		d.fail("bad number")
		return 0
	}
	d.b = d.b[n:]
	return int64(v)
}

// count reads the length of a list whose elements have at least size bytes.
func (d *indexDecoder) count(size int) int64 { return d.number(int64(len(d.b) / size)) }

func (d *indexDecoder) bytes(n int64) []byte {
	if n > int64(len(d.b)) {
		d.fail("%d bytes do not fit in the %d that are left", n, len(d.b))
		return nil
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *indexDecoder) text() string { return string(d.bytes(d.count(1))) }
