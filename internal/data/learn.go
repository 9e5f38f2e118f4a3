package data

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
)

// breaks marks a rank from which no sums may be learned.
func (v *verifier) breaks(x *checkpoint.Index) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.broken[x.Rank] = true
}

// sums reads the known sums of an adopted index, or queues the index to be learned.
func (v *verifier) sums(ctx context.Context, x *checkpoint.Index, digest checkpoint.Digest) {
	name := checkpoint.SumsFile(x.Rank)
	v.known[name] = true
	known, err := v.root.readSums(ctx, v.ref, x, digest)
	var damaged *CorruptError
	switch {
	case errors.As(err, &damaged):
		v.find(Corrupt, name, "%s; remove it, and verify again to relearn it", damaged.Problem)
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

// writeSums makes the sums of undamaged ranks durable.
func (v *verifier) writeSums(ctx context.Context) error {
	if !v.learn {
		return nil
	}
	for _, u := range v.unknown {
		if v.broken[u.index.Rank] {
			continue
		}
		// A file that changed during the read may have given old bytes for some chunks and
		// new bytes for others.
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

// agrees compares the digest of a file of sums with the digest in the log.
func (v *verifier) agrees(name string, got checkpoint.Digest) bool {
	want, known := v.recorded[name]
	if known && want != got {
		v.find(Mismatch, name, "the bytes of the adopted files give sums with digest %s, the log has recorded %s", got, want)
		return false
	}
	return true
}

// recordSum computes the checksum of a record, as far as the chunk's own bytes are those of
// the record.
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

// problem reads the rest of the record and describes bytes that do not match its checksum.
func (r *recordSum) problem(ctx context.Context, file object.Object) (string, error) {
	if r.Record == nil {
		return "", nil
	}
	if r.next == 0 {
		r.next = r.Offset
	}
	_, err := scan.Windows(ctx, file, r.next, r.Offset+r.Size, func(window []byte, at int64) error {
		r.add(window, at)
		return nil
	})
	if short := scan.ShortOf(err); short != nil {
		return fmt.Sprintf("the record cannot be read at %d: %v", short.At, short.Err), nil
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

// archiveProblem reads a value's archive to its end, if it is one: its records have their own
// checksums. Other values have none.
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

// An adopted or foreign chunk has no sums of ours until they are learned, but its file may
// have a checksum of the whole record that holds it. That checksum does not verify a part. So
// it is compared as soon as reads have covered all of the chunk, at once or window by window.
// A copy then never gives damaged bytes a new, valid checksum.

// cover records that blocks of the i-th entry were read, and reports whether all of the entry
// is covered now. If so, it starts again from zero.
func (x *rankIndex) cover(i int, read []blocks.Range) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	seen := blocks.Merge(append(append([]blocks.Range(nil), x.seen[i]...), read...))
	all := (x.index.Entries[i].Item.Bytes + checkpoint.BlockSize - 1) / checkpoint.BlockSize
	if len(seen) == 1 && seen[0] == (blocks.Range{Lo: 0, Hi: all}) {
		delete(x.seen, i)
		return true
	}
	if x.seen == nil {
		x.seen = map[int][]blocks.Range{}
	}
	x.seen[i] = seen
	return false
}

// checkable reports whether a chunk's bytes have no sums except those left by the program
// that wrote them.
func (c *chunkRead) checkable() bool {
	e := c.entry
	return c.index.Adopted() && !e.Learned() && len(c.blocks) > 0 && (e.Record != nil || e.Item.Value)
}

// checkRecord compares the whole record of a chunk with its checksum, or all records of a
// value's archive.
func (c *chunkRead) checkRecord(ctx context.Context, f *sharedFile) error {
	file, err := f.open(ctx)
	if err != nil {
		return c.missing(f.path, err)
	}
	problem, err := recordProblem(ctx, file, c.entry)
	if err == nil && problem != "" {
		err = &CorruptError{File: f.path, FQN: c.entry.Item.Shard.FQN, Chunk: c.entry.BoxString(), Block: -1, Offset: c.entry.Offset, Problem: problem}
	}
	return err
}

func recordProblem(ctx context.Context, file object.Object, e *checkpoint.Entry) (string, error) {
	if e.Item.Value {
		problem, _ := archiveProblem(file, e)
		return problem, ctx.Err()
	}
	sum := recordSum{Record: e.Record}
	return sum.problem(ctx, file)
}

// readSums fills in the sums of an adopted index, if they are learned.
func (r *Root) readSums(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index, of checkpoint.Digest) (known bool, err error) {
	data, err := r.readFile(ctx, ref, checkpoint.SumsFile(x.Rank))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := checkpoint.DecodeSums(data, x, of); err != nil {
		return false, &CorruptError{File: r.path(ref, checkpoint.SumsFile(x.Rank)), Block: -1, Problem: err.Error()}
	}
	return true, nil
}

// Sums is a file of the sums learned for one rank's adopted bytes.
type Sums struct {
	Name   string // within the checkpoint's directory
	Digest checkpoint.Digest
	Size   int64 // in bytes
	New    bool  // it did not exist before
}

// writeSums makes the sums of an adopted index durable.
func (r *Root) writeSums(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index, of checkpoint.Digest) (Sums, error) {
	data := checkpoint.EncodeSums(x, of)
	// Another process may be learning the same sums.
	if err := r.create(ctx, ref, checkpoint.SumsFile(x.Rank), data); err != nil {
		return Sums{}, err
	}
	if err := r.sync(ctx, ref); err != nil {
		return Sums{}, err
	}
	return Sums{Name: checkpoint.SumsFile(x.Rank), Digest: checkpoint.Sum(data), Size: int64(len(data)), New: true}, nil
}
