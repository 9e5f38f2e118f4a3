package checkpoint

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/tensor"
)

// decodeIndex is the inverse of encode. It trusts nothing.
func DecodeIndex(data []byte) (Index, error) {
	body := len(data) - 4
	if body < len(indexMagic)+1 || string(data[:len(indexMagic)]) != indexMagic {
		return Index{}, errors.New("decode index: bad magic or too short")
	}
	version := data[len(indexMagic)]
	if v := version; v < indexVersion || v > verbatimVersion {
		return Index{}, fmt.Errorf("decode index: version %d is not known, upgrade to read it", v)
	}
	want, got := binary.LittleEndian.Uint32(data[body:]), crc32c.Checksum(data[:body])
	if want != got {
		return Index{}, fmt.Errorf("decode index: checksum %08x, want %08x", got, want)
	}
	d := &indexDecoder{b: data[len(indexMagic)+1 : body], size: body}
	x := Index{Rank: int(d.number(1 << 31))}
	valid, least := ValidateName, 6+len(Digest{})
	if version == adoptedVersion {
		valid, least, x.Modified = ValidatePath, 4, []int64{}
	}
	if version == verbatimVersion {
		valid, x.Frames = ValidatePlainName, [][]Frame{}
	}
	for range d.count(2) {
		f := File{Name: d.text(), Size: d.number(1 << 62)}
		if err := valid(f.Name); err != nil && d.err == nil {
			d.fail("file %d: %v", len(x.Files), err)
		}
		x.Files = append(x.Files, f)
		if x.Adopted() {
			x.Modified = append(x.Modified, d.number(math.MaxInt64))
		}
		if x.Verbatim() && d.err == nil {
			x.Frames = append(x.Frames, d.decodeFrames(f))
		}
	}
	n := d.count(least)
	x.Entries = make([]Entry, 0, n)
	for range n {
		x.Entries = append(x.Entries, d.entry(x.Files, version))
		if d.err != nil {
			break
		}
	}
	if d.err == nil && len(d.b) > 0 {
		d.fail("%d bytes after the last entry", len(d.b))
	}
	if d.err != nil {
		return Index{}, fmt.Errorf("decode index: %w", d.err)
	}
	return x, nil
}

func (d *indexDecoder) entry(files []File, version byte) Entry {
	known := int64(entryValue | entryPerRank)
	adopted := version == adoptedVersion
	if adopted {
		known |= entryStrided | entryRecord
	} else if version == verbatimVersion {
		known |= entryStrided
	}
	flags := d.number(known)
	e := Entry{Item: Item{Value: flags&entryValue != 0, PerRank: flags&entryPerRank != 0}}
	e.Item.Shard.FQN = d.text()
	if version == indexVersion {
		e.Key = d.text()
	}
	e.File = int(d.number(1 << 31))
	e.Offset = d.number(1 << 62)
	e.Item.Bytes = d.number(1 << 62)
	if !e.Item.Value {
		e.Item.Shard.DType = tensor.DType(d.number(255))
		ndim := d.number(tensor.MaxDims)
		e.Item.Shard.Global = make(tensor.Shape, ndim)
		e.Item.Shard.Box = tensor.Box{Offsets: make([]int64, ndim), Sizes: make([]int64, ndim)}
		for i := range ndim {
			e.Item.Shard.Global[i] = d.number(1 << 62)
		}
		for i := range ndim {
			e.Item.Shard.Box.Offsets[i] = d.number(1 << 62)
			e.Item.Shard.Box.Sizes[i] = d.number(1 << 62)
		}
	}
	if adopted {
		d.adoptedPart(&e, flags)
	} else {
		d.adoptedPart(&e, flags)
		copy(e.Digest[:], d.bytes(int64(len(e.Digest))))
	}
	if d.err != nil {
		return e
	}
	if err := ValidateItem(e.Item); err != nil {
		d.fail("%v", err)
		return e
	}
	if version != indexVersion {
		if err := e.ValidatePlace(files); err != nil {
			d.fail("%v", err)
			return e
		}
	}
	if adopted {
		return e
	}
	if e.File >= len(files) || e.Strides == nil && e.Offset+e.Item.Bytes > files[e.File].Size {
		d.fail("%q: %d bytes at %d do not lie in file %d", e.Item.Shard.FQN, e.Item.Bytes, e.Offset, e.File)
		return e
	}
	e.Sums = d.sums(e.Item.Bytes)
	return e
}

// sums are the checksums of the blocks of size bytes.
func (d *indexDecoder) sums(size int64) []uint32 {
	raw := d.bytes(4 * Blocks(size))
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

// adoptedPart reads what an adopted chunk has instead of a digest and sums.
func (d *indexDecoder) adoptedPart(e *Entry, flags int64) {
	if flags&entryStrided != 0 {
		if e.Item.Value {
			d.fail("value %q has strides", e.Item.Shard.FQN)
			return
		}
		e.Strides = make([]int64, len(e.Item.Shard.Global))
		for i := range e.Strides {
			e.Strides[i] = d.number(1 << 62)
		}
	}
	if flags&entryRecord != 0 {
		e.Record = &Record{Offset: d.number(1 << 62), Size: d.number(1 << 62)}
		if crc := d.bytes(4); crc != nil {
			e.Record.CRC = binary.LittleEndian.Uint32(crc)
		}
	}
}

// ValidatePlace checks that an adopted chunk lies in its file.
func (e *Entry) ValidatePlace(files []File) error {
	if e.File < 0 || e.File >= len(files) {
		return fmt.Errorf("%q: there is no file %d", e.Item.Shard.FQN, e.File)
	}
	size := files[e.File].Size
	need, ok := e.Item.Bytes, true
	if e.Strides != nil {
		need, ok = e.Span(size)
	}
	if !ok || e.Offset < 0 || e.Offset > size || need > size-e.Offset {
		return fmt.Errorf("%q: its bytes at %d do not lie in the %d bytes of %s", e.Item.Shard.FQN, e.Offset, size, files[e.File].Name)
	}
	if r := e.Record; r != nil && (r.Offset < 0 || r.Size < 0 || r.Offset > size || r.Size > size-r.Offset) {
		return fmt.Errorf("%q: the record of %d bytes at %d does not lie in the %d bytes of %s",
			e.Item.Shard.FQN, r.Size, r.Offset, size, files[e.File].Name)
	}
	return nil
}

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
