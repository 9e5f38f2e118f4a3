package data

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Spot is the place of a want's bytes in a file of this machine. They lie there contiguously,
// in the want's order.
type Spot struct {
	Path   string
	Offset int64
	Size   int64 // of the file
	Check  Check

	outside bool // it belongs to another program
}

// Check holds the checksums with which a caller verifies its copy of some bytes of a chunk:
// those of the blocks that hold them. The first block may begin before these bytes and the
// last may end after them. All blocks have [checkpoint.BlockSize] bytes except the last of
// the chunk.
type Check struct {
	Before, After int64    // bytes of the first and of the last block that are not wanted
	Sums          []uint32 // CRC-32C of each block
	// Chunk is the committed digest of the whole chunk, for a caller that knows that of its source; zero:
	// the index has none.
	Chunk checkpoint.Digest
}

// Spots finds, by want, the bytes that a caller can copy straight out of the files, without
// memory allocated for them and without a second copy. These are wants that one read fills,
// in the stored dtype, of chunks whose checksums are known.
//
// Either the caller verifies them by their checks while it copies, or it calls ReadData
// without a buffer for them first. ReadData reads and verifies them into the page cache, and
// the caller copies them from there. Bytes that the cache drops in between are read from the
// disk again, and are not verified again.
func (r *FileReader) Spots(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read) (map[int]Spot, error) {
	spots, err := r.spots(ctx, wants, reads)
	return spots, r.wrap("load", err)
}

func (r *FileReader) spots(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read) (map[int]Spot, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return nil, err
	}
	if r.ranks == nil {
		return nil, errors.New("SetUp was not called")
	}
	chunks, count := r.chunks(), map[int]int{}
	for _, read := range reads {
		count[read.Want]++
	}
	spots, sizes := map[int]Spot{}, map[string]int64{}
	for _, read := range reads {
		if count[read.Want] > 1 {
			continue
		}
		spot, ok, err := chunks.spot(ctx, wants[read.Want], read)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		size, known := sizes[spot.Path]
		if !known {
			size = r.sizeHere(spot)
			sizes[spot.Path] = size
		}
		if spot.Size = size; size >= 0 {
			spots[read.Want] = spot
		}
	}
	return spots, nil
}

// sizeHere returns the size of a file of this machine, or -1 if the spot is not one. None of
// the store's own files is reached through a link.
func (r *FileReader) sizeHere(at Spot) int64 {
	stat := os.Stat
	if !at.outside {
		stat = beneath.At(filepath.Dir(r.root.Dir())).Stat
	}
	if info, err := stat(at.Path); err == nil && info.Mode().IsRegular() {
		return info.Size()
	}
	return -1
}

// spot returns the place of a read's bytes, if they lie there in the want's order.
func (r chunkReader) spot(ctx context.Context, want checkpoint.Want, read checkpoint.Read) (Spot, bool, error) {
	x, i, err := r.find(ctx, readKey(want, read), read)
	if err != nil {
		return Spot{}, false, err
	}
	e := &x.index.Entries[i]
	lo, hi, ok := within(e, want, read)
	if !ok {
		return Spot{}, false, nil
	}
	return Spot{Path: r.path(x.index, e.File), Offset: e.Offset + lo, Check: checkOf(e, lo, hi), outside: x.index.Adopted()}, true, nil
}

// within returns the range of a want's bytes in a chunk, if one read has all of them
// contiguously, in the want's order, and the checksums of the chunk are known.
func within(e *checkpoint.Entry, want checkpoint.Want, read checkpoint.Read) (lo, hi int64, ok bool) {
	if e.Strides != nil || !e.Learned() || e.Item.Bytes == 0 {
		return 0, 0, false
	}
	if want.Value {
		return 0, e.Item.Bytes, true
	}
	lo, hi = tensor.Span(e.Item.Shard.Box, read.Region)
	size := int64(e.Item.Shard.DType.Size())
	ok = want.Shard.DType == e.Item.Shard.DType && read.Region.Equal(want.Shard.Box) && hi-lo == read.Region.Volume() && lo < hi
	return lo * size, hi * size, ok
}

// checkOf returns the check for the bytes from lo to hi of a chunk.
func checkOf(e *checkpoint.Entry, lo, hi int64) Check {
	first, end := lo/checkpoint.BlockSize, checkpoint.Blocks(hi)
	return Check{Before: lo - first*checkpoint.BlockSize, After: min(end*checkpoint.BlockSize, e.Item.Bytes) - hi, Sums: e.Sums[first:end], Chunk: e.Digest}
}

// Check returns the check for a copy of the bytes of one read, from any source, if the read
// has all of the want contiguously.
func (r *FileReader) Check(ctx context.Context, want checkpoint.Want, read checkpoint.Read) (c Check, ok bool, err error) {
	if r.ranks == nil {
		return Check{}, false, r.wrap("load", errors.New("SetUp was not called"))
	}
	x, i, err := r.chunks().find(ctx, readKey(want, read), read)
	if err != nil {
		return Check{}, false, r.wrap("load", err)
	}
	e := &x.index.Entries[i]
	lo, hi, ok := within(e, want, read)
	if !ok {
		return Check{}, false, nil
	}
	return checkOf(e, lo, hi), true, nil
}
