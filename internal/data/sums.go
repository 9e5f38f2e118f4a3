package data

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
)

// The sums of an adopted index are what its own index would have said: the
// digest of each chunk and the checksum of each block. They are learned after
// the adoption, by reading the files once, and never change.
//
//	┌────────┬──────┬─────────────────┬───────┬────────┬─────────┐
//	│ "CKSM" │ 0x01 │ digest of index │ count │ chunk… │ CRC-32C │
//	│ 4 B    │ 1 B  │ 32 B            │       │        │ u32 LE  │
//	└────────┴──────┴─────────────────┴───────┴────────┴─────────┘
//	chunk  digest (32 B)  crc (u32 LE) for each 64 KiB
//
// The chunks are in the order of the index, whose sizes say how many blocks
// each has.

const (
	sumsMagic   = "CKSM"
	sumsVersion = 1
)

func SumsFile(rank int) string { return fmt.Sprintf("r%05d.sums", rank) }

// encodeSums is the file of sums of x, all of whose entries are learned.
func EncodeSums(x *Index, of checkpoint.Digest) []byte {
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
func DecodeSums(data []byte, x *Index, of checkpoint.Digest) error {
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
	if got := checkpoint.Digest(data[head : head+len(of)]); got != of {
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

// readSums fills in the sums of an adopted index, if they are learned.
func (r *Root) readSums(ctx context.Context, ref Ref, x *Index, of checkpoint.Digest) (known bool, err error) {
	data, err := r.readFile(ctx, ref, SumsFile(x.Rank))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := DecodeSums(data, x, of); err != nil {
		return false, &CorruptError{File: r.path(ref, SumsFile(x.Rank)), Block: -1, Problem: err.Error()}
	}
	return true, nil
}

// Sums is the file of what was learned of one rank's adopted bytes.
type Sums struct {
	Name   string // within the checkpoint's directory
	Digest checkpoint.Digest
	Size   int64 // in bytes
	New    bool  // it was not there before
}

// writeSums makes the sums of an adopted index durable.
func (r *Root) writeSums(ctx context.Context, ref Ref, x *Index, of checkpoint.Digest) (Sums, error) {
	data := EncodeSums(x, of)
	// Another process may be learning the same.
	if err := r.create(ctx, ref, SumsFile(x.Rank), data); err != nil {
		return Sums{}, err
	}
	if err := r.sync(ctx, ref); err != nil {
		return Sums{}, err
	}
	return Sums{Name: SumsFile(x.Rank), Digest: checkpoint.Sum(data), Size: int64(len(data)), New: true}, nil
}
