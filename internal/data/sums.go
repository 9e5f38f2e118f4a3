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

func sumsFile(rank int) string { return fmt.Sprintf("r%05d.sums", rank) }

// encodeSums is the file of sums of x, all of whose entries are learned.
func encodeSums(x *index, of checkpoint.Digest) []byte {
	b := append(append([]byte(sumsMagic), sumsVersion), of[:]...)
	b = binary.AppendUvarint(b, uint64(len(x.entries)))
	for _, e := range x.entries {
		b = append(b, e.digest[:]...)
		for _, sum := range e.sums {
			b = binary.LittleEndian.AppendUint32(b, sum)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32c.Checksum(b))
}

// decodeSums fills in the digests and sums of x, whose own digest is of. It
// trusts nothing.
func decodeSums(data []byte, x *index, of checkpoint.Digest) error {
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
	if n := d.number(1 << 31); d.err == nil && n != int64(len(x.entries)) {
		return fmt.Errorf("decode sums: of %d chunks, the index has %d", n, len(x.entries))
	}
	entries := make([]entry, len(x.entries))
	copy(entries, x.entries)
	for i := range entries {
		e := &entries[i]
		copy(e.digest[:], d.bytes(int64(len(e.digest))))
		// What the index says may be far more than what is here.
		raw := d.bytes(4 * blocks(e.item.Bytes))
		if d.err != nil {
			return fmt.Errorf("decode sums: %w", d.err)
		}
		e.sums = make([]uint32, len(raw)/4)
		for k := range e.sums {
			e.sums[k] = binary.LittleEndian.Uint32(raw[4*k:])
		}
	}
	if len(d.b) > 0 {
		return fmt.Errorf("decode sums: %d bytes after the last chunk", len(d.b))
	}
	x.entries = entries
	return nil
}

// readSums fills in the sums of an adopted index, if they are learned.
func (r *Root) readSums(ctx context.Context, ref Ref, x *index, of checkpoint.Digest) (known bool, err error) {
	data, err := r.readFile(ctx, ref, sumsFile(x.rank))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := decodeSums(data, x, of); err != nil {
		return false, &CorruptError{File: r.path(ref, sumsFile(x.rank)), Block: -1, Problem: err.Error()}
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
func (r *Root) writeSums(ctx context.Context, ref Ref, x *index, of checkpoint.Digest) (Sums, error) {
	data := encodeSums(x, of)
	// Another process may be learning the same.
	if err := r.create(ctx, ref, sumsFile(x.rank), data); err != nil {
		return Sums{}, err
	}
	if err := r.sync(ctx, ref); err != nil {
		return Sums{}, err
	}
	return Sums{Name: sumsFile(x.rank), Digest: checkpoint.Sum(data), Size: int64(len(data)), New: true}, nil
}
