package dcp

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// entry decodes the first entry of b and returns its length.
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
	// The folder may have any name, the same for all records.
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

// zip64 replaces the values that refer to the extra field.
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

// local reads the header in front of a record, which must agree with the entry of the central
// directory, and returns the position of the bytes.
func (a *archive) local(rec record, central []byte, pos int64) (int64, error) {
	le := binary.LittleEndian
	b, err := a.read(rec.header, localSize, "local header")
	if err != nil {
		return 0, err
	}
	if le.Uint32(b) != localSig {
		return 0, a.problem(rec.header, "no local header of record %s here, where the central directory places it", quote(rec.name))
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
		// With a descriptor behind the record these may still be set, by a writer that knows
		// the size in advance.
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
