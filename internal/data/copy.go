package data

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Copied reports what [Root.CopyTo] wrote.
type Copied struct {
	Receipt checkpoint.Receipt // of the copy: store, sequence and event are those of the original
	// Original is the digest of the manifest that was copied. The copy's digest differs if
	// indexes had to change: where chunks lay in files of other checkpoints, or of other
	// programs.
	Original checkpoint.Digest
	Manifest checkpoint.Manifest // of the copy
	Files    int                 // with receipt, manifest and indexes
	Bytes    int64               // of tensors and values
}

// CopyTo copies a committed checkpoint to the same place below another root, so that it
// shares no file with anything: chunks in files of earlier checkpoints, or of another
// program, are written into the files of their rank. It compares each block with its checksum
// as it is read, and each chunk's digest with the original's, so that the chain from receipt
// to chunk holds in the copy too.
//
// digest is the manifest's digest according to the log; if zero, CopyTo uses the receipt's.
// to must belong to no other store and have nothing at ref. CopyTo calls read, if not nil,
// with the size of each item that it read. Everything is durable on return.
func (r *Root) CopyTo(ctx context.Context, ref checkpoint.Ref, digest checkpoint.Digest, to *Root, read func(bytes int64)) (Copied, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var out Copied
	if err == nil {
		out, err = r.copyTo(ctx, ref, digest, to, read)
	}
	if err != nil {
		return Copied{}, fmt.Errorf("copy checkpoint %s to %s: %w", ref, to.Dir(), err)
	}
	return out, nil
}

func (r *Root) copyTo(ctx context.Context, ref checkpoint.Ref, digest checkpoint.Digest, to *Root, read func(int64)) (out Copied, err error) {
	receipt, err := r.readReceipt(ctx, ref)
	if err != nil {
		return out, err
	}
	if digest == (checkpoint.Digest{}) {
		digest = receipt.Manifest
	}
	from := r.Reader(ref).WithManifest(digest)
	m, err := from.ReadMetadata(ctx)
	if err != nil {
		return out, err
	}
	if receipt.Manifest != digest {
		return out, fmt.Errorf("its receipt names manifest %s, the log names %s: run `ckptstore verify`", receipt.Manifest, digest)
	}
	if err := errors.Join(receipt.Matches(m), from.SetUp(ctx, m, true)); err != nil {
		return out, err
	}
	to.OfStore(m.Store)
	if err := to.Writer(ref).SetUp(ctx, true); err != nil {
		return out, err
	}
	out.Original, out.Manifest = digest, m
	out.Manifest.Ranks = make([]checkpoint.RankIndex, len(m.Ranks))
	for i, rank := range m.Ranks {
		x, err := from.load(ctx, rank.Rank)
		if err != nil {
			return out, err
		}
		written, err := copyRank(ctx, from, x.index, to.Writer(ref), read)
		if err != nil {
			return out, err
		}
		copied := checkpoint.RankIndex{Rank: rank.Rank, Index: written.Index}
		if err := to.sameChunks(ctx, ref, copied, x.index); err != nil {
			return out, err
		}
		out.Manifest.Ranks[i] = copied
		out.Files += len(written.Files)
		out.Bytes += written.BytesWritten + written.BytesReused
	}
	out.Files += 2 // manifest and receipt
	out.Receipt, err = to.Writer(ref).Finish(ctx, out.Manifest, func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		return checkpoint.Decision{Sequence: receipt.Sequence, Event: receipt.Event, Time: receipt.CommittedAt}, nil
	})
	return out, err
}

// copyRank writes the items of an index, in its order. If all of them lie in the rank's own
// file, the copy's files are identical to the last byte.
func copyRank(ctx context.Context, from *FileReader, x *checkpoint.Index, w *FileWriter, read func(int64)) (Written, error) {
	items := make([]checkpoint.Item, len(x.Entries))
	places := map[[2]int64]bool{}
	for i, e := range x.Entries {
		items[i] = e.Item
		if at := [2]int64{int64(e.File), e.Offset}; e.Item.Bytes >= MinReuse && places[at] {
			w.Reusing(nil) // tied: of equal chunks one is written, as it was
		} else {
			places[at] = true
		}
	}
	return w.WriteData(ctx, x.Rank, items, NewCopySource(ctx, from, x.Rank, items, read))
}

// sameChunks compares the digests of a copy with those of the original, as far as the
// original's are known.
func (r *Root) sameChunks(ctx context.Context, ref checkpoint.Ref, copied checkpoint.RankIndex, original *checkpoint.Index) error {
	x, err := r.readIndex(ctx, ref, copied)
	if err != nil {
		return err
	}
	if len(x.Entries) != len(original.Entries) {
		return fmt.Errorf("the copy of rank %d has %d chunks, the original %d", copied.Rank, len(x.Entries), len(original.Entries))
	}
	for i := range x.Entries {
		e, was := &x.Entries[i], &original.Entries[i]
		if was.Learned() && e.Digest != was.Digest {
			return &CorruptError{
				File: checkpointFiles{r, ref}.path(&x, e.File), FQN: e.Item.Shard.FQN, Chunk: e.BoxString(), Block: -1, Offset: e.Offset,
				Problem: "digest of the copied chunk", Want: was.Digest.String(), Got: e.Digest.String(),
			}
		}
	}
	return nil
}

// CopySource gives a [Writer] the items of one rank of a checkpoint, read by a [Reader], in
// order to copy a checkpoint from one place to another. It holds one item at a time.
type CopySource struct {
	ctx   context.Context
	from  Reader
	rank  int
	items []checkpoint.Item
	buf   []byte
	read  func(bytes int64)
}

var _ Source = (*CopySource)(nil)

// NewCopySource returns a source of items of rank. SetUp of from was called. NewCopySource
// calls read, if not nil, with the size of each item that was read.
func NewCopySource(ctx context.Context, from Reader, rank int, items []checkpoint.Item, read func(bytes int64)) *CopySource {
	return &CopySource{ctx: ctx, from: from, rank: rank, items: items, read: read}
}

// Item implements [Source].
func (s *CopySource) Item(i int) ([]byte, error) {
	it := s.items[i]
	if int64(cap(s.buf)) < it.Bytes {
		s.buf = nil // the old one goes first
		s.buf = make([]byte, it.Bytes)
	}
	buf := s.buf[:it.Bytes]
	want := checkpoint.Want{Value: it.Value, Shard: it.Shard, Rank: s.rank}
	read := checkpoint.Read{FQN: it.Shard.FQN, Rank: s.rank}
	if !it.Value {
		read.Chunk, read.Region = it.Shard.Box, it.Shard.Box
	}
	if _, err := s.from.ReadData(s.ctx, []checkpoint.Want{want}, []checkpoint.Read{read}, oneBuffer(buf)); err != nil {
		return nil, err
	}
	if s.read != nil {
		s.read(it.Bytes)
	}
	return buf, nil
}

// oneBuffer is the destination of a single want.
type oneBuffer []byte

// Want implements [Destination].
func (b oneBuffer) Want(int) []byte { return b }
