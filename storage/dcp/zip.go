package dcp

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"
)

// Sizes and signatures of a ZIP file's structures, in bytes without the
// parts of variable length.
const (
	localSize, localSig     = 30, 0x04034b50
	centralSize, centralSig = 46, 0x02014b50
	endSize, endSig         = 22, 0x06054b50
	end64Size, end64Sig     = 56, 0x06064b50
	locatorSize, locatorSig = 20, 0x07064b50
	descriptorSig           = 0x08074b50

	flagDescriptor = 0x0008 // sizes and sum follow the record
	flagUTF8       = 0x0800
	extraZip64     = 1
)

// Limits of what is read into memory at once. Archives of one object have
// about seven records; PyTorch's pickle of a tensor has 160 bytes.
const (
	maxCentral = 1 << 20
	maxRecord  = 1 << 24
)

// record is an entry of the central directory, with its bytes found.
type record struct {
	name   string // without the archive's folder
	crc    uint32
	size   int64
	header int64 // of the local header, from the start of the archive
	data   int64 // of the first byte, from the start of the archive
}

// archive is a ZIP file in a part of a file.
type archive struct {
	r       io.ReaderAt
	where   Location
	records []record // in the order of their bytes
}

// problem places what is wrong at a position in the archive.
func (a *archive) problem(pos int64, format string, args ...any) error {
	return &FormatError{File: a.where.File, Offset: a.where.Offset + pos, Problem: fmt.Sprintf(format, args...)}
}

func (a *archive) read(pos int64, n int64, what string) ([]byte, error) {
	if pos < 0 || n < 0 || pos > a.where.Length-n {
		return nil, a.problem(max(pos, 0), "%s of %d bytes is not within the archive's %d bytes", what, n, a.where.Length)
	}
	b := make([]byte, n)
	have, err := a.r.ReadAt(b, a.where.Offset+pos)
	switch {
	case int64(have) == n:
		return b, nil
	case err == nil || errors.Is(err, io.EOF):
		return nil, a.problem(pos, "the file ends within the %s", what)
	}
	return nil, fmt.Errorf("read %s of %s at offset %d: %w", what, quote(a.where.File), a.where.Offset+pos, err)
}

// content reads a record whole and checks its sum.
func (a *archive) content(rec record, limit int64) ([]byte, error) {
	if rec.size > limit {
		return nil, a.problem(rec.header, "record %s has %d bytes, at most %d are read", rec.name, rec.size, limit)
	}
	b, err := a.read(rec.data, rec.size, "record "+rec.name)
	if err != nil {
		return nil, err
	}
	if sum := crc32.ChecksumIEEE(b); sum != rec.crc {
		return nil, a.problem(rec.data, "record %s has the CRC-32 %08x, the central directory says %08x", rec.name, sum, rec.crc)
	}
	return b, nil
}

func (a *archive) find(name string) (record, bool) {
	for _, rec := range a.records {
		if rec.name == name {
			return rec, true
		}
	}
	return record{}, false
}

// openArchive reads the central directory and the local headers. The records
// must lie one behind the other from the first byte to the directory, and
// the directory must reach to the end: nothing in the archive is unaccounted
// for.
func openArchive(r io.ReaderAt, where Location) (*archive, error) {
	a := &archive{r: r, where: where}
	if err := where.Validate(); err != nil {
		return nil, a.problem(0, "%v", err)
	}
	start, size, count, err := a.end()
	if err != nil {
		return nil, err
	}
	if size > maxCentral {
		return nil, a.problem(start, "central directory of %d bytes, at most %d are read", size, maxCentral)
	}
	central, err := a.read(start, size, "central directory")
	if err != nil {
		return nil, err
	}
	if int64(count) > size/centralSize {
		return nil, a.problem(start, "central directory of %d bytes for %d records", size, count)
	}
	for rest := central; len(rest) > 0; {
		pos := start + size - int64(len(rest))
		rec, n, err := a.entry(rest, pos)
		if err != nil {
			return nil, err
		}
		if _, twice := a.find(rec.name); twice {
			return nil, a.problem(pos, "record %s stands twice", quote(rec.name))
		}
		if len(a.records) == maxRecords {
			return nil, a.problem(pos, "more than %d records", maxRecords)
		}
		a.records = append(a.records, rec)
		rest = rest[n:]
	}
	if len(a.records) != count {
		return nil, a.problem(start, "central directory of %d records, its end says %d", len(a.records), count)
	}
	return a, a.layOut(start)
}

// maxRecords keeps the look-up for doubles short.
const maxRecords = 4096

// end finds the central directory: its position, size and number of records.
func (a *archive) end() (start, size int64, count int, err error) {
	pos := a.where.Length - endSize
	b, err := a.read(pos, endSize, "end of central directory")
	if err != nil {
		return 0, 0, 0, err
	}
	le := binary.LittleEndian
	if le.Uint32(b) != endSig || le.Uint16(b[20:]) != 0 {
		return 0, 0, 0, a.problem(pos, "no end of a ZIP file here: the archive is truncated, or something follows it")
	}
	if le.Uint16(b[4:]) != 0 || le.Uint16(b[6:]) != 0 || le.Uint16(b[8:]) != le.Uint16(b[10:]) {
		return 0, 0, 0, a.problem(pos, "archive in several parts")
	}
	records, length, offset := uint64(le.Uint16(b[10:])), uint64(le.Uint32(b[12:])), uint64(le.Uint32(b[16:]))
	until := pos
	if until >= locatorSize {
		loc, err := a.read(until-locatorSize, locatorSize, "zip64 locator")
		if err != nil {
			return 0, 0, 0, err
		}
		if le.Uint32(loc) == locatorSig {
			until -= locatorSize + end64Size
			b, err := a.read(until, end64Size, "zip64 end of central directory")
			if err != nil {
				return 0, 0, 0, err
			}
			// All that the two structures say twice must agree.
			if le.Uint32(b) != end64Sig || le.Uint64(b[4:]) != end64Size-12 || le.Uint64(loc[8:]) != uint64(until) ||
				le.Uint32(loc[4:]) != 0 || le.Uint32(loc[16:]) != 1 ||
				le.Uint32(b[16:]) != 0 || le.Uint32(b[20:]) != 0 || le.Uint64(b[24:]) != le.Uint64(b[32:]) {
				return 0, 0, 0, a.problem(until, "zip64 end of central directory and its locator do not fit")
			}
			r64, l64, o64 := le.Uint64(b[32:]), le.Uint64(b[40:]), le.Uint64(b[48:])
			if !agree(records, r64, math.MaxUint16) || !agree(length, l64, math.MaxUint32) || !agree(offset, o64, math.MaxUint32) {
				return 0, 0, 0, a.problem(until, "the two ends of the central directory do not agree")
			}
			records, length, offset = r64, l64, o64
		}
	}
	if offset > uint64(until) || length != uint64(until)-offset {
		return 0, 0, 0, a.problem(until, "central directory of %d bytes at %d does not end where its end begins, at %d", length, offset, until)
	}
	if records > maxRecords {
		return 0, 0, 0, a.problem(until, "%d records, at most %d are read", records, maxRecords)
	}
	return int64(offset), int64(length), int(records), nil
}

// agree reports whether a narrow field is the wide one, or says to look there.
func agree(narrow, wide, mark uint64) bool { return narrow == wide || narrow == mark }

// entry decodes the first entry of b and gives its length.
func (a *archive) entry(b []byte, pos int64) (record, int, error) {
	le := binary.LittleEndian
	if len(b) < centralSize || le.Uint32(b) != centralSig {
		return record{}, 0, a.problem(pos, "no entry of the central directory here")
	}
	nameLen, extraLen, commentLen := int(le.Uint16(b[28:])), int(le.Uint16(b[30:])), int(le.Uint16(b[32:]))
	length := centralSize + nameLen + extraLen + commentLen
	if len(b) < length {
		return record{}, 0, a.problem(pos, "entry of %d bytes, the central directory has %d left", length, len(b))
	}
	full := string(b[centralSize : centralSize+nameLen])
	fail := func(format string, args ...any) (record, int, error) {
		return record{}, 0, a.problem(pos, "record %s: %s", quote(full), fmt.Sprintf(format, args...))
	}
	// The folder may have any name; it is that of all records.
	folder, name, ok := strings.Cut(full, "/")
	if !ok || name == "" || folder == "" {
		return fail("is not in a folder")
	}
	if flags := le.Uint16(b[8:]); flags&^(flagDescriptor|flagUTF8) != 0 {
		return fail("flags 0x%04x: encrypted and patched records are not read", flags)
	}
	if method := le.Uint16(b[10:]); method != 0 {
		return fail("compression method %d: only stored records are read", method)
	}
	if le.Uint16(b[34:]) != 0 {
		return fail("in another part of the archive")
	}
	wide := []uint64{uint64(le.Uint32(b[24:])), uint64(le.Uint32(b[20:])), uint64(le.Uint32(b[42:]))}
	if err := zip64(b[centralSize+nameLen:length-commentLen], wide); err != nil {
		return fail("%v", err)
	}
	if wide[0] != wide[1] {
		return fail("stored in %d bytes, %d when unpacked", wide[1], wide[0])
	}
	if wide[0] > uint64(a.where.Length) || wide[2] > uint64(a.where.Length) {
		return fail("%d bytes at %d are not within the archive's %d bytes", wide[0], wide[2], a.where.Length)
	}
	rec := record{name: name, crc: le.Uint32(b[16:]), size: int64(wide[0]), header: int64(wide[2])}
	data, err := a.local(rec, b[:centralSize+nameLen], pos)
	rec.data = data
	return rec, length, err
}

// zip64 replaces those of values that say to look in the extra field.
func zip64(extra []byte, values []uint64) error {
	le := binary.LittleEndian
	var wide []byte
	for len(extra) > 0 {
		if len(extra) < 4 || len(extra)-4 < int(le.Uint16(extra[2:])) {
			return errors.New("the extra field is cut off")
		}
		n := int(le.Uint16(extra[2:]))
		if le.Uint16(extra) == extraZip64 {
			wide = extra[4 : 4+n]
		}
		extra = extra[4+n:]
	}
	for i, v := range values {
		if v != math.MaxUint32 || wide == nil {
			continue
		}
		if len(wide) < 8 {
			return errors.New("the zip64 field is cut off")
		}
		values[i] = le.Uint64(wide)
		wide = wide[8:]
	}
	return nil
}

// local reads the header in front of a record, which must agree with the
// entry of the central directory, and gives the position of the bytes.
func (a *archive) local(rec record, central []byte, pos int64) (int64, error) {
	le := binary.LittleEndian
	b, err := a.read(rec.header, localSize, "local header")
	if err != nil {
		return 0, err
	}
	if le.Uint32(b) != localSig {
		return 0, a.problem(rec.header, "no local header of record %s here, where the central directory says", quote(rec.name))
	}
	nameLen, extraLen := int64(le.Uint16(b[26:])), int64(le.Uint16(b[28:]))
	rest, err := a.read(rec.header+localSize, nameLen+extraLen, "local header")
	if err != nil {
		return 0, err
	}
	if !bytes.Equal(rest[:nameLen], central[centralSize:]) || !bytes.Equal(b[6:10], central[8:12]) {
		return 0, a.problem(rec.header, "local header does not agree with the entry of record %s at %d", quote(rec.name), a.where.Offset+pos)
	}
	size, stored := uint64(le.Uint32(b[22:])), uint64(le.Uint32(b[18:]))
	wide := []uint64{size, stored}
	if err := zip64(rest[nameLen:], wide); err != nil {
		return 0, a.problem(rec.header, "record %s: %v", quote(rec.name), err)
	}
	sum := le.Uint32(b[14:])
	if le.Uint16(b[6:])&flagDescriptor == 0 || wide[0] != 0 || wide[1] != 0 || sum != 0 {
		// With a descriptor behind the record these may still be set: a
		// writer that knows the size says it here.
		known := sum == rec.crc || (sum == 0 && le.Uint16(b[6:])&flagDescriptor != 0)
		if !known || wide[0] != uint64(rec.size) || wide[1] != uint64(rec.size) {
			return 0, a.problem(rec.header, "local header does not agree with the entry of record %s at %d", quote(rec.name), a.where.Offset+pos)
		}
	}
	return rec.header + localSize + nameLen + extraLen, nil
}

// layOut sorts the records and checks that they and their descriptors fill
// the archive up to the central directory.
func (a *archive) layOut(end int64) error {
	slices.SortFunc(a.records, func(x, y record) int { return cmp.Compare(x.header, y.header) })
	next := int64(0)
	for i, rec := range a.records {
		if rec.header != next {
			return a.problem(next, "record %s begins at %d: a gap or an overlap", quote(rec.name), a.where.Offset+rec.header)
		}
		next = end
		if i+1 < len(a.records) {
			next = a.records[i+1].header
		}
		if rec.size > next-rec.data {
			return a.problem(rec.header, "record %s of %d bytes overlaps what follows at %d", quote(rec.name), rec.size, a.where.Offset+next)
		}
		if err := a.descriptor(rec, next); err != nil {
			return err
		}
	}
	if next != end {
		return a.problem(next, "no records")
	}
	return nil
}

// descriptor checks what is between a record and the next structure.
func (a *archive) descriptor(rec record, next int64) error {
	pos := rec.data + rec.size
	n := next - pos
	b, err := a.read(pos, min(n, 24), "data descriptor")
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	switch n {
	case 0:
		return nil
	case 16, 24:
		size, stored := uint64(le.Uint32(b[n-4:])), uint64(le.Uint32(b[8:]))
		if n == 24 {
			size, stored = le.Uint64(b[16:]), le.Uint64(b[8:])
		}
		if le.Uint32(b) == descriptorSig && le.Uint32(b[4:]) == rec.crc && size == uint64(rec.size) && stored == size {
			return nil
		}
	}
	return a.problem(pos, "%d bytes behind record %s are no data descriptor that agrees with the central directory", n, quote(rec.name))
}
