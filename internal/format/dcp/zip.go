package dcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
)

// Sizes and signatures of a ZIP file's structures, in bytes without the parts of variable
// length.
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

// Limits of the structures that are read into memory whole. Archives of one object have about
// seven records; PyTorch's pickle of a tensor has 160 bytes.
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

// problem returns a FormatError at a position in the archive.
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
		return nil, a.problem(rec.data, "record %s has the CRC-32 %08x, the central directory has %08x", rec.name, sum, rec.crc)
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

// openArchive reads the central directory and the local headers. The records must be
// consecutive from the first byte to the directory, and the directory must reach to the end,
// so that every byte of the archive is accounted for.
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
			return nil, a.problem(pos, "record %s occurs twice", quote(rec.name))
		}
		if len(a.records) == maxRecords {
			return nil, a.problem(pos, "more than %d records", maxRecords)
		}
		a.records = append(a.records, rec)
		rest = rest[n:]
	}
	if len(a.records) != count {
		return nil, a.problem(start, "central directory of %d records, its end has %d", len(a.records), count)
	}
	return a, a.layOut(start)
}

// maxRecords keeps the search for duplicates short.
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
			// Everything that the two structures both record must agree.
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

// agree reports whether a narrow field equals the wide one, or refers to it.
func agree(narrow, wide, mark uint64) bool { return narrow == wide || narrow == mark }
