package data

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/tensor"
)

// decodeIndex is the inverse of encode. It trusts nothing.
func decodeIndex(data []byte) (index, error) {
	body := len(data) - 4
	if body < len(indexMagic)+1 || string(data[:len(indexMagic)]) != indexMagic {
		return index{}, errors.New("decode index: bad magic or too short")
	}
	version := data[len(indexMagic)]
	if v := version; v < indexVersion || v > verbatimVersion {
		return index{}, fmt.Errorf("decode index: version %d is not known, upgrade to read it", v)
	}
	want, got := binary.LittleEndian.Uint32(data[body:]), crc32c.Checksum(data[:body])
	if want != got {
		return index{}, fmt.Errorf("decode index: checksum %08x, want %08x", got, want)
	}
	d := &indexDecoder{b: data[len(indexMagic)+1 : body], size: body}
	x := index{rank: int(d.number(1 << 31))}
	valid, least := validateName, 6+len(checkpoint.Digest{})
	if version == adoptedVersion {
		valid, least, x.modified = disk.ValidatePath, 4, []int64{}
	}
	if version == verbatimVersion {
		valid, x.frames = plainName, [][]frame{}
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
		if x.verbatim() && d.err == nil {
			x.frames = append(x.frames, d.decodeFrames(f))
		}
	}
	n := d.count(least)
	x.entries = make([]entry, 0, n)
	for range n {
		x.entries = append(x.entries, d.entry(x.files, version))
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

func (d *indexDecoder) entry(files []File, version byte) entry {
	known := int64(flagValue | flagPerRank)
	adopted := version == adoptedVersion
	if adopted {
		known |= flagStrided | flagRecord
	} else if version == verbatimVersion {
		known |= flagStrided
	}
	flags := d.number(known)
	e := entry{item: checkpoint.Item{Value: flags&flagValue != 0, PerRank: flags&flagPerRank != 0}}
	e.item.Shard.FQN = d.text()
	if version == indexVersion {
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
		d.adoptedPart(&e, flags)
		copy(e.digest[:], d.bytes(int64(len(e.digest))))
	}
	if d.err != nil {
		return e
	}
	if err := validateItem(e.item); err != nil {
		d.fail("%v", err)
		return e
	}
	if version != indexVersion {
		if err := e.validatePlace(files); err != nil {
			d.fail("%v", err)
			return e
		}
	}
	if adopted {
		return e
	}
	if e.file >= len(files) || e.strides == nil && e.offset+e.item.Bytes > files[e.file].Size {
		d.fail("%q: %d bytes at %d do not lie in file %d", e.item.Shard.FQN, e.item.Bytes, e.offset, e.file)
		return e
	}
	e.sums = d.sums(e.item.Bytes)
	return e
}

// sums are the checksums of the blocks of size bytes.
func (d *indexDecoder) sums(size int64) []uint32 {
	raw := d.bytes(4 * blocks(size))
	sums := make([]uint32, len(raw)/4)
	for i := range sums {
		sums[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return sums
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
