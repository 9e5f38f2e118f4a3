package dcp

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/ckptstore/ckptstore/tensor"
)

// Frame is the bytes around a tensor's payload in its archive:
//
//	Prefix | payload | Suffix(CRC-32 of the payload)
//
// With it, a payload can be streamed before its sum is known.
type Frame struct {
	Prefix []byte
	// Suffix is called once with the CRC-32 (IEEE) of the payload, as
	// hash/crc32 computes it.
	Suffix func(crc uint32) []byte
	// Size of the whole archive, in bytes: of prefix, payload and suffix.
	Size int64
}

const (
	folder    = "archive/"
	alignment = 64 // of the bytes of each record
)

// TensorArchive frames the payload of a tensor: its elements, row-major and little-endian,
// which begin at a multiple of 64 bytes in the archive. It fails for an invalid dtype or for
// sizes whose bytes cannot be counted.
func TensorArchive(dtype tensor.DType, sizes []int64) (Frame, error) {
	if !dtype.Valid() {
		return Frame{}, fmt.Errorf("frame tensor: invalid dtype %d", uint8(dtype))
	}
	if err := checkShape(dtype, sizes); err != nil {
		return Frame{}, fmt.Errorf("frame tensor: %w", err)
	}
	payload := tensor.Shape(sizes).Volume() * int64(dtype.Size())
	if payload > math.MaxInt64-1<<20 {
		return Frame{}, fmt.Errorf("frame tensor: %d bytes leave no room for the frame", payload)
	}
	var w zipWriter
	w.record("data.pkl", tensorPickle(dtype, sizes))
	w.head()
	w.begin("data/0", payload)
	prefix := w.b
	w.skip(payload)

	tail := func(crc uint32) []byte {
		t := w
		t.b, t.entries = nil, append([]written(nil), w.entries...)
		t.end(crc)
		t.record("version", []byte("3\n"))
		return t.finish()
	}
	return Frame{Prefix: prefix, Suffix: tail, Size: int64(len(prefix)) + payload + int64(len(tail(0)))}, nil
}

// wholeArchive returns an archive without a storage.
func wholeArchive(pickle []byte) []byte {
	var w zipWriter
	w.record("data.pkl", pickle)
	w.head()
	w.record("version", []byte("3\n"))
	return w.finish()
}

// zipWriter writes a ZIP file of stored records as torch.save does, which learns sums only
// after the bytes.
type zipWriter struct {
	b       []byte
	skipped int64 // bytes that the caller writes
	entries []written
}

type written struct {
	name         string
	crc          uint32
	size, header int64
}

func (w *zipWriter) pos() int64 { return w.skipped + int64(len(w.b)) }

// head writes the records that describe how to read the others.
func (w *zipWriter) head() {
	w.record(".format_version", []byte("1"))
	w.record(".storage_alignment", []byte("64"))
	w.record("byteorder", []byte("little"))
}

func (w *zipWriter) record(name string, data []byte) {
	w.begin(name, int64(len(data)))
	w.b = append(w.b, data...)
	w.end(crc32.ChecksumIEEE(data))
}

// begin writes the local header of a record of size bytes. Its extra field
// is padded up to the alignment.
func (w *zipWriter) begin(name string, size int64) {
	e := written{name: folder + name, size: size, header: w.pos()}
	w.entries = append(w.entries, e)
	le := binary.LittleEndian
	var extra []byte
	sizes := uint32(0)
	if size >= math.MaxUint32 {
		// Sizes behind such a record have 8 bytes, which this field announces.
		sizes = math.MaxUint32
		extra = le.AppendUint16(extra, extraZip64)
		extra = le.AppendUint16(extra, 16)
		extra = le.AppendUint64(extra, uint64(size))
		extra = le.AppendUint64(extra, uint64(size))
	}
	start := e.header + localSize + int64(len(e.name)) + int64(len(extra)) + 4
	pad := int((alignment - start%alignment) % alignment)
	extra = append(extra, 'F', 'B')
	extra = le.AppendUint16(extra, uint16(pad))
	for range pad {
		extra = append(extra, 'Z')
	}
	w.b = le.AppendUint32(w.b, localSig)
	w.b = le.AppendUint16(w.b, 0)
	w.b = le.AppendUint16(w.b, flagDescriptor|flagUTF8)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) // method, time, date, sum
	w.b = le.AppendUint32(w.b, sizes)
	w.b = le.AppendUint32(w.b, sizes)
	w.b = le.AppendUint16(w.b, uint16(len(e.name)))
	w.b = le.AppendUint16(w.b, uint16(len(extra)))
	w.b = append(w.b, e.name...)
	w.b = append(w.b, extra...)
}

// skip passes over bytes that the caller writes.
func (w *zipWriter) skip(n int64) {
	w.skipped += n + int64(len(w.b))
	w.b = nil
}

// end writes the data descriptor of the last record.
func (w *zipWriter) end(crc uint32) {
	e := &w.entries[len(w.entries)-1]
	e.crc = crc
	le := binary.LittleEndian
	w.b = le.AppendUint32(w.b, descriptorSig)
	w.b = le.AppendUint32(w.b, crc)
	if e.size >= math.MaxUint32 {
		w.b = le.AppendUint64(w.b, uint64(e.size))
		w.b = le.AppendUint64(w.b, uint64(e.size))
		return
	}
	w.b = le.AppendUint32(w.b, uint32(e.size))
	w.b = le.AppendUint32(w.b, uint32(e.size))
}

// finish writes the central directory and its ends.
func (w *zipWriter) finish() []byte {
	le := binary.LittleEndian
	start := w.pos()
	for _, e := range w.entries {
		var extra []byte
		size, header := narrow(e.size), narrow(e.header)
		if size == math.MaxUint32 {
			extra = le.AppendUint64(le.AppendUint64(extra, uint64(e.size)), uint64(e.size))
		}
		if header == math.MaxUint32 {
			extra = le.AppendUint64(extra, uint64(e.header))
		}
		if n := len(extra); n > 0 {
			extra = append(le.AppendUint16(le.AppendUint16(nil, extraZip64), uint16(n)), extra...)
		}
		w.b = le.AppendUint32(w.b, centralSig)
		w.b = append(w.b, 0, 0, 0, 0) // versions
		w.b = le.AppendUint16(w.b, flagDescriptor|flagUTF8)
		w.b = append(w.b, 0, 0, 0, 0, 0, 0) // method, time, date
		w.b = le.AppendUint32(w.b, e.crc)
		w.b = le.AppendUint32(w.b, size)
		w.b = le.AppendUint32(w.b, size)
		w.b = le.AppendUint16(w.b, uint16(len(e.name)))
		w.b = le.AppendUint16(w.b, uint16(len(extra)))
		w.b = append(w.b, make([]byte, 10)...) // comment, disk, attributes
		w.b = le.AppendUint32(w.b, header)
		w.b = append(w.b, e.name...)
		w.b = append(w.b, extra...)
	}
	end := w.pos()
	n, length := uint64(len(w.entries)), uint64(end-start)
	w.b = le.AppendUint32(w.b, end64Sig)
	w.b = le.AppendUint64(w.b, end64Size-12)
	w.b = le.AppendUint16(w.b, 45) // version that made it and that is needed
	w.b = le.AppendUint16(w.b, 45)
	w.b = append(w.b, make([]byte, 8)...) // disks
	for _, v := range []uint64{n, n, length, uint64(start)} {
		w.b = le.AppendUint64(w.b, v)
	}
	w.b = le.AppendUint32(w.b, locatorSig)
	w.b = le.AppendUint32(w.b, 0)
	w.b = le.AppendUint64(w.b, uint64(end))
	w.b = le.AppendUint32(w.b, 1)
	w.b = le.AppendUint32(w.b, endSig)
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = le.AppendUint16(w.b, uint16(n))
	w.b = le.AppendUint16(w.b, uint16(n))
	w.b = le.AppendUint32(w.b, uint32(length))
	w.b = le.AppendUint32(w.b, narrow(start))
	w.b = append(w.b, 0, 0)
	return w.b
}

// narrow returns n in 4 bytes, or the mark that refers to the wide field.
func narrow(n int64) uint32 { return uint32(min(n, math.MaxUint32)) }

const (
	copiedPerByte = 16       // bytes of copies for each byte of a .metadata file
	copiedAlways  = 64 << 10 // bytes of copies for a file of any size
)

// budget limits the bytes that the reader copies. A pickle refers in two bytes to an object
// that it has built before, so a small file can request many copies of a large object. Files
// of PyTorch need less than two bytes of copies per byte.
type budget struct {
	left int64 // bytes that may still be copied
	size int64 // bytes of the file, for the message
}

func newBudget(size int) budget {
	return budget{left: copiedAlways + copiedPerByte*int64(size), size: int64(size)}
}

// spend charges the copy of n bytes. It fails once the copies exceed the budget.
func (b *budget) spend(n int) error {
	if b.left -= int64(n); b.left < 0 {
		return fmt.Errorf("the same objects occur in too many places: their copies exceed the limit of %d bytes for a file of %d", copiedAlways+copiedPerByte*b.size, b.size)
	}
	return nil
}
