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

// Spot is where what is wanted lies in a file of this machine: its bytes, one
// after the other, as they are wanted.
type Spot struct {
	Path   string
	Offset int64
	Size   int64 // of the file
	Check  Check

	outside bool // it is of another program
}

// Check is how who copies some bytes of a chunk verifies them: by the checksums of the
// blocks that hold them, of which the first may begin in front of them and the last
// end behind them. All blocks have [checkpoint.BlockSize] but the last of the chunk.
type Check struct {
	Before, After int64    // bytes of the first and of the last block that are not wanted
	Sums          []uint32 // CRC-32C of each block
}

// Spots finds, by want, what a caller can copy straight out of the files, so that
// no memory is made for it and nothing is copied twice. Those are wants that one read
// fills, in the dtype that was stored, of chunks whose checksums are known.
//
// Either the caller verifies them by their checks while it copies, or ReadData with no
// buffer for them does: that reads them into the page cache, out of which the caller
// copies after it. What the cache loses in between comes from the disk once more, and
// is not verified again.
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

// sizeHere is the size of a file of this machine; -1 if it is none. Of the
// store's own files none is reached by a link.
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

// spot is where a read's bytes lie, if they lie there as they are wanted.
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

// within is where the bytes of a want lie in a chunk, if one read of it has them one
// after the other, as they are wanted, and the checksums of the chunk are known.
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

// checkOf is how the bytes from lo to hi of a chunk are verified.
func checkOf(e *checkpoint.Entry, lo, hi int64) Check {
	first, end := lo/checkpoint.BlockSize, checkpoint.Blocks(hi)
	return Check{Before: lo - first*checkpoint.BlockSize, After: min(end*checkpoint.BlockSize, e.Item.Bytes) - hi, Sums: e.Sums[first:end]}
}

// Check is how a copy of what one read brings is verified, wherever it comes from, if
// the read has all of the want one after the other.
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
