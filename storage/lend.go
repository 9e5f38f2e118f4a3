package storage

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
)

// Spot is where what is wanted lies in a file of this machine: its bytes, one
// after the other, as they are wanted.
type Spot struct {
	Path   string
	Offset int64
	Size   int64 // of the file

	outside bool // it is of another program
}

// Spots finds, by want, what a caller can copy straight out of the files, so that
// no memory is made for it and nothing is copied twice. Those are wants that one read
// fills, in the dtype that was stored, of chunks whose checksums are known. ReadData
// with no buffer for them verifies them: that reads them into the page cache, out of
// which the caller copies after it. What the cache loses in between comes from the
// disk once more, and is not verified again.
func (r *FileReader) Spots(ctx context.Context, wants []plan.Want, reads []plan.Read) (map[int]Spot, error) {
	spots, err := r.spots(ctx, wants, reads)
	return spots, r.wrap("load", err)
}

func (r *FileReader) spots(ctx context.Context, wants []plan.Want, reads []plan.Read) (map[int]Spot, error) {
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
func (r chunkReader) spot(ctx context.Context, want plan.Want, read plan.Read) (Spot, bool, error) {
	x, i, err := r.find(ctx, readKey(want, read), read)
	if err != nil {
		return Spot{}, false, err
	}
	e := &x.index.entries[i]
	if e.strides != nil || !e.learned() || e.item.Bytes == 0 {
		return Spot{}, false, nil
	}
	at := Spot{Path: r.path(x.index, e.file), Offset: e.offset, outside: x.index.adopted()}
	if want.Value {
		return at, true, nil
	}
	lo, hi := tensor.Span(e.item.Shard.Box, read.Region)
	if want.Shard.DType != e.item.Shard.DType || !read.Region.Equal(want.Shard.Box) || hi-lo != read.Region.Volume() || hi == lo {
		return Spot{}, false, nil
	}
	at.Offset += lo * int64(e.item.Shard.DType.Size())
	return at, true, nil
}
