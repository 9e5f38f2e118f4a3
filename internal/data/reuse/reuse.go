// Package reuse decides which chunks of a save need no writing, because a checkpoint before it or the
// rank's own file has them.
//
//	Chunk  a chunk of a checkpoint before, Match the item that equals it
//	Plan   what is reused of a rank's items, as [Settle] decides
//	Uses   what all ranks of a save would use of a file
package reuse

import (
	"context"
	"errors"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/tensor"
)

// Content identifies equal chunks.
type Content struct {
	digest checkpoint.Digest
	dtype  tensor.DType
	value  bool
	size   int64
}

// ContentOf returns the content of an item whose bytes have a digest.
func ContentOf(it checkpoint.Item, digest checkpoint.Digest) Content {
	return Content{digest: digest, dtype: it.Shard.DType, value: it.Value, size: it.Bytes}
}

// Probe is a cheap fingerprint of a chunk. It differs for most unequal chunks: most tensors
// change in their first block.
type Probe struct {
	size  int64
	dtype tensor.DType
	value bool
	crc   uint32 // of the first block
}

// ProbeOf returns the probe of an item whose first block has a checksum.
func ProbeOf(it checkpoint.Item, crc uint32) Probe {
	return Probe{size: it.Bytes, dtype: it.Shard.DType, value: it.Value, crc: crc}
}

// Plan lists the items of a rank that need no writing.
type Plan struct {
	Files []File       // to be linked in, or named
	Of    map[int]Spot // by item
}

// File is a file of a base.
type File struct {
	Name string // in the directory of this checkpoint, or where it lies
	From string // where it lies now, in the backend
	Size int64
	In   checkpoint.Ref // the directory where it stays; zero if it is linked in
}

// Spot is the place of an item's bytes.
type Spot struct {
	Digest checkpoint.Digest
	File   int               // of the files; -1: this rank's own
	Entry  *checkpoint.Entry // of the base, if in one of the files
	Tied   int               // the item that is written, if in the rank's own
}

// Match is an item whose digest is known, and the equal chunk of a base, if any.
type Match struct {
	Content Content
	Held    *Chunk
}

// errAlone ends the digest of an item that matches no candidate.
var errAlone = errors.New("no candidate has these bytes")

// DigestAmong digests data, as long as one of the candidates may be equal or always is set.
func DigestAmong(ctx context.Context, data []byte, candidates []Chunk, always bool) (digest checkpoint.Digest, known bool, err error) {
	alive := slices.Clone(candidates)
	hash := scan.NewHasher()
	defer hash.Free()
	err = scan.Bytes(ctx, data, func(window []byte, at int64) error {
		first := int(at / checkpoint.BlockSize)
		for lo := 0; lo < len(window) && len(alive) > 0; lo += checkpoint.BlockSize {
			crc, block := crc32c.Checksum(window[lo:min(lo+checkpoint.BlockSize, len(window))]), first+lo/checkpoint.BlockSize
			alive = slices.DeleteFunc(alive, func(h Chunk) bool { return h.Entry.Sums[block] != crc })
		}
		if len(alive) == 0 && !always {
			return errAlone
		}
		hash.Add(window)
		return nil
	})
	if errors.Is(err, errAlone) {
		return digest, false, nil
	}
	return hash.Digest(), err == nil, err
}

// Settle decides what is reused. Of files it takes those that are not unfit and at least half
// live; of equal items that are written, it keeps the first. It is a pure function.
func Settle(items []checkpoint.Item, matches map[int]Match, live map[string]int64, unfit map[string]bool) Plan {
	u := Plan{Of: map[int]Spot{}}
	at := map[string]int{}
	first := map[Content]int{}
	for i := range items {
		m, ok := matches[i]
		if !ok {
			continue
		}
		if h := m.Held; h != nil && !unfit[h.File.From] && half(live, h.File) {
			n, ok := at[h.File.From]
			if !ok {
				n = len(u.Files)
				at[h.File.From] = n
				u.Files = append(u.Files, h.File)
			}
			u.Of[i] = Spot{Digest: m.Content.digest, File: n, Entry: h.Entry}
			continue
		}
		if tied, ok := first[m.Content]; ok {
			u.Of[i] = Spot{Digest: m.Content.digest, File: -1, Tied: tied}
			continue
		}
		first[m.Content] = i
	}
	return u
}

// Chunk is a chunk of a base.
type Chunk struct {
	Entry *checkpoint.Entry
	File  File
}
