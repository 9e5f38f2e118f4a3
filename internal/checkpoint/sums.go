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

// EncodeSums returns the file of sums of x, whose index has the digest of. All entries of x
// are learned.
//
// The sums of an adopted index are those that an own file's index would hold: the digest of
// each chunk and the checksum of each block. They are learned after the adoption, by reading
// the files once, and never change.
//
//	┌────────┬──────┬─────────────────┬───────┬────────┬─────────┐
//	│ "CKSM" │ 0x01 │ digest of index │ count │ chunk… │ CRC-32C │
//	│ 4 B    │ 1 B  │ 32 B            │       │        │ u32 LE  │
//	└────────┴──────┴─────────────────┴───────┴────────┴─────────┘
//	chunk  digest (32 B)  crc (u32 LE) for each 64 KiB
//
// The chunks are in the order of the index, whose sizes determine the number of blocks of
// each.
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

// DecodeSums fills in the digests and sums of x, whose index has the digest of. It
// trusts nothing, and leaves x as it was after an error.
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
	d := &decoder{b: data[:body], at: head + len(of)}
	if n := d.number(1 << 31); d.err == nil && n != int64(len(x.Entries)) {
		return fmt.Errorf("decode sums: of %d chunks, the index has %d", n, len(x.Entries))
	}
	entries := make([]Entry, len(x.Entries))
	copy(entries, x.Entries)
	for i := range entries {
		e := &entries[i]
		e.Digest = d.digest()
		if e.Sums = d.sums(e.Item.Bytes); d.err != nil {
			return fmt.Errorf("decode sums: %w", d.err)
		}
	}
	if d.left() > 0 {
		return fmt.Errorf("decode sums: %d bytes after the last chunk", d.left())
	}
	x.Entries = entries
	return nil
}
