package checkpoint

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

const (
	sumsMagic   = "CKSM"
	sumsVersion = 1
)

// encodeSums is the file of sums of x, all of whose entries are learned.
func EncodeSums(x *Index, of Digest) []byte {
	b := append(append([]byte(sumsMagic), sumsVersion), of[:]...)
	b = binary.AppendUvarint(b, uint64(len(x.Entries)))
	for _, e := range x.Entries {
		b = append(b, e.Digest[:]...)
		for _, sum := range e.Sums {
			b = binary.LittleEndian.AppendUint32(b, sum)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32c.Checksum(b))
}

// decodeSums fills in the digests and sums of x, whose own digest is of. It
// trusts nothing.
func DecodeSums(data []byte, x *Index, of Digest) error {
	body := len(data) - 4
	head := len(sumsMagic) + 1
	if body < head+len(of) || string(data[:len(sumsMagic)]) != sumsMagic {
		return errors.New("decode sums: bad magic or too short")
	}
	if v := data[len(sumsMagic)]; v != sumsVersion {
		return fmt.Errorf("decode sums: version %d is not known, upgrade to read it", v)
	}
	want, got := binary.LittleEndian.Uint32(data[body:]), crc32c.Checksum(data[:body])
	if want != got {
		return fmt.Errorf("decode sums: checksum %08x, want %08x", got, want)
	}
	if got := Digest(data[head : head+len(of)]); got != of {
		return fmt.Errorf("decode sums: they are of the index %s, not of %s", got, of)
	}
	d := &indexDecoder{b: data[head+len(of) : body], size: body}
	if n := d.number(1 << 31); d.err == nil && n != int64(len(x.Entries)) {
		return fmt.Errorf("decode sums: of %d chunks, the index has %d", n, len(x.Entries))
	}
	entries := make([]Entry, len(x.Entries))
	copy(entries, x.Entries)
	for i := range entries {
		e := &entries[i]
		copy(e.Digest[:], d.bytes(int64(len(e.Digest))))
		// What the index says may be far more than what is here.
		raw := d.bytes(4 * Blocks(e.Item.Bytes))
		if d.err != nil {
			return fmt.Errorf("decode sums: %w", d.err)
		}
		e.Sums = make([]uint32, len(raw)/4)
		for k := range e.Sums {
			e.Sums[k] = binary.LittleEndian.Uint32(raw[4*k:])
		}
	}
	if len(d.b) > 0 {
		return fmt.Errorf("decode sums: %d bytes after the last chunk", len(d.b))
	}
	x.Entries = entries
	return nil
}
