package data

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// breaks takes note that nothing is to be learned of a rank.
func (v *verifier) breaks(x *checkpoint.Index) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.broken[x.Rank] = true
}

// sums reads what is known of an adopted index, or takes note that it is to be
// learned.
func (v *verifier) sums(ctx context.Context, x *checkpoint.Index, digest checkpoint.Digest) {
	name := checkpoint.SumsFile(x.Rank)
	v.known[name] = true
	known, err := v.root.readSums(ctx, v.ref, x, digest)
	var damaged *CorruptError
	switch {
	case errors.As(err, &damaged):
		v.find(Corrupt, name, "%s; remove it, and verify again to learn it anew", damaged.Problem)
	case err != nil:
		v.findError(name, err)
	case known:
		data := checkpoint.EncodeSums(x, digest)
		v.count(1, 0, 0)
		if !v.agrees(name, checkpoint.Sum(data)) {
			return
		}
		v.report.Sums = append(v.report.Sums, Sums{Name: name, Digest: checkpoint.Sum(data), Size: int64(len(data))})
	default:
		v.unknown = append(v.unknown, &unlearned{x, digest})
	}
}

// writeSums keeps what was learned of ranks in which nothing is wrong.
func (v *verifier) writeSums(ctx context.Context) error {
	if !v.learn {
		return nil
	}
	for _, u := range v.unknown {
		if v.broken[u.index.Rank] {
			continue
		}
		// A file that changed while it was read may have given some chunks
		// of before and some of after.
		if err := v.root.checkUnchanged(ctx, u.index); err != nil {
			v.find(Mismatch, checkpoint.IndexFile(u.index.Rank), "%v", err)
			continue
		}
		if !v.agrees(checkpoint.SumsFile(u.index.Rank), checkpoint.Sum(checkpoint.EncodeSums(u.index, u.digest))) {
			continue
		}
		sums, err := v.root.writeSums(ctx, v.ref, u.index, u.digest)
		if err != nil {
			return err
		}
		v.report.Sums = append(v.report.Sums, sums)
	}
	return nil
}

// agrees compares a file of sums with what the log has recorded of it.
func (v *verifier) agrees(name string, got checkpoint.Digest) bool {
	want, known := v.recorded[name]
	if known && want != got {
		v.find(Mismatch, name, "the bytes of the adopted files give sums with digest %s, the log has recorded %s", got, want)
		return false
	}
	return true
}

// recordSum takes the checksum of a record, as far as the chunk's own bytes are
// those of the record.
type recordSum struct {
	*checkpoint.Record
	crc  uint32
	next int64 // offset of the first byte that is not summed
}

func (r *recordSum) add(p []byte, at int64) {
	if r.Record == nil {
		return
	}
	if r.next == 0 {
		r.next = r.Offset
	}
	if at == r.next {
		r.crc = crc32.Update(r.crc, crc32.IEEETable, p)
		r.next += int64(len(p))
	}
}

// problem reads the rest of the record and reports bytes that are not those of
// its checksum.
func (r *recordSum) problem(ctx context.Context, file object.Object) (string, error) {
	if r.Record == nil {
		return "", nil
	}
	if r.next == 0 {
		r.next = r.Offset
	}
	_, err := scan(ctx, file, r.next, r.Offset+r.Size, func(window []byte, at int64) error {
		r.add(window, at)
		return nil
	})
	if short := shortOf(err); short != nil {
		return fmt.Sprintf("the record cannot be read at %d: %v", short.at, short.err), nil
	}
	if err != nil {
		return "", err
	}
	if r.next > r.Offset+r.Size {
		return "the chunk goes beyond its record", nil
	}
	if r.crc != r.CRC {
		return fmt.Sprintf("CRC-32 of the archive's record is %08x, want %08x", r.crc, r.CRC), nil
	}
	return "", nil
}

// archiveProblem reads a value's archive to its end, if it is one: its records
// have checksums of their own. A value of another kind has none.
func archiveProblem(file object.Object, e *checkpoint.Entry) (problem string, checked bool) {
	section := io.NewSectionReader(file, e.Offset, e.Item.Bytes)
	var magic [4]byte
	if n, err := section.ReadAt(magic[:], 0); n < len(magic) || err != nil || !bytes.Equal(magic[:], []byte("PK\x03\x04")) {
		return "", false
	}
	z, err := zip.NewReader(section, e.Item.Bytes)
	if err != nil {
		return fmt.Sprintf("the archive: %v", err), true
	}
	for _, f := range z.File {
		r, err := f.Open()
		if err == nil {
			_, err = io.Copy(io.Discard, io.LimitReader(r, e.Item.Bytes+1)) //nolint:gosec // bounded by the archive
			err = errors.Join(err, r.Close())
		}
		if err != nil {
			return fmt.Sprintf("the archive's record %q: %v", f.Name, err), true
		}
	}
	return "", true
}
