package checkpoint

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/tensor"
)

// DecodeIndex is the inverse of [Index.Encode]. It trusts nothing.
func DecodeIndex(data []byte) (Index, error) {
	body := len(data) - 4
	if body < len(indexMagic)+1 || string(data[:len(indexMagic)]) != indexMagic {
		return Index{}, errors.New("decode index: bad magic or too short")
	}
	version := data[len(indexMagic)]
	if v := version; v < indexVersion || v > fromVersion {
		return Index{}, fmt.Errorf("decode index: version %d is not known, upgrade to read it", v)
	}
	want, got := binary.LittleEndian.Uint32(data[body:]), crc32c.Checksum(data[:body])
	if want != got {
		return Index{}, fmt.Errorf("decode index: checksum %08x, want %08x", got, want)
	}
	d := &decoder{b: data[:body], at: len(indexMagic) + 1}
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
		if version == fromVersion {
			d.from(&f, len(x.Files))
		}
		if err := valid(f.Name); err != nil && d.err == nil {
			d.fail("file %d: %v", len(x.Files), err)
		}
		x.Files = append(x.Files, f)
		if x.Adopted() {
			x.Modified = append(x.Modified, d.number(math.MaxInt64))
		}
		if x.Verbatim() && d.err == nil {
			x.Frames = append(x.Frames, d.frames(f))
		}
	}
	if version == fromVersion && d.err == nil && !x.refers() {
		d.fail("no file of version %d lies in another checkpoint", version)
	}
	n := d.count(least)
	x.Entries = make([]Entry, 0, n)
	for range n {
		x.Entries = append(x.Entries, d.entry(x.Files, version))
		if d.err != nil {
			break
		}
	}
	if d.err == nil && d.left() > 0 {
		d.fail("%d bytes after the last entry", d.left())
	}
	if d.err != nil {
		return Index{}, fmt.Errorf("decode index: %w", d.err)
	}
	return x, nil
}

// from reads the checkpoint in whose directory the n-th file lies. The first is the rank's own.
func (d *decoder) from(f *File, n int) {
	text := d.text()
	if text == "" || d.err != nil {
		return
	}
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		d.fail("file %d lies in %q, which is not the path of a checkpoint", n, text)
		return
	}
	f.From = Ref{Run: parts[0], Trial: parts[1], Checkpoint: parts[2]}
	if err := f.From.Validate(); err != nil {
		d.fail("file %d: %v", n, err)
	}
	if n == 0 || !HoldsData(f.Name) {
		d.fail("file %d, %q, of checkpoint %s is not a data file that can be reused", n, f.Name, text)
	}
}

// entry reads one entry of an index whose files are known.
func (d *decoder) entry(files []File, version byte) Entry {
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
	own := version == indexVersion || version == fromVersion
	if own {
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
	d.adoptedPart(&e, flags)
	if !adopted {
		e.Digest = d.digest()
	}
	if d.err != nil {
		return e
	}
	if err := e.Item.Validate(); err != nil {
		d.fail("%v", err)
		return e
	}
	if !own {
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

// sums reads the checksums of the blocks of size bytes.
func (d *decoder) sums(size int64) []uint32 {
	raw := d.take(4 * Blocks(size))
	sums := make([]uint32, len(raw)/4)
	for i := range sums {
		sums[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return sums
}

// number reads a number of at most limit.
func (d *decoder) number(limit int64) int64 {
	v := d.uint()
	if v > uint64(limit) {
		d.fail("bad number")
		return 0
	}
	return int64(v)
}

// take reads n bytes, without a copy.
func (d *decoder) take(n int64) []byte {
	if n > int64(d.left()) {
		d.fail("%d bytes do not fit in the %d that are left", n, d.left())
		return nil
	}
	d.at += int(n)
	return d.b[d.at-int(n) : d.at]
}

func (d *decoder) text() string { return string(d.bytes()) }

// adoptedPart reads the strides and the record of an entry, according to its flags.
func (d *decoder) adoptedPart(e *Entry, flags int64) {
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
		if crc := d.take(4); crc != nil {
			e.Record.CRC = binary.LittleEndian.Uint32(crc)
		}
	}
}

// ValidatePlace returns an error for an adopted chunk, or its record, outside its file.
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

// frames reads the frames of one file.
func (d *decoder) frames(f File) []Frame {
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
