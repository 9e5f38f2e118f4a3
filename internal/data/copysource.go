package data

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// CopySource gives a [Writer] the items of one rank of a checkpoint, read by a
// [Reader]: the way to copy a checkpoint from one place to another. It holds
// one item at a time.
type CopySource struct {
	ctx   context.Context
	from  Reader
	rank  int
	items []checkpoint.Item
	buf   []byte
	read  func(bytes int64)
}

var _ Source = (*CopySource)(nil)

// NewCopySource reads items of rank. from was set up. read, if not nil, is
// told the size of each item that was read.
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
