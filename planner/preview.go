package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Preview describes what the ranks of a group would read of a checkpoint if each wanted its
// rows of every tensor, as [Rows] returns them, all of every tensor without dimensions, every
// shared value, and its own per-rank values.
type Preview struct {
	Bytes int64         `json:"bytes"` // all that the ranks want and the checkpoint has
	Read  int64         `json:"read"`  // bytes of the blocks that they read for it
	Ranks []RankPreview `json:"ranks"`
	// Unread lists per-rank values of ranks that the group does not have.
	Unread []UnreadValue `json:"unread"`
}

// RankPreview describes the reads of one rank.
type RankPreview struct {
	Rank    int           `json:"rank"`
	Bytes   int64         `json:"bytes"`
	Read    int64         `json:"read"`    // bytes of whole blocks, each once
	Reads   int           `json:"reads"`   // chunks and values
	Missing int64         `json:"missing"` // wanted bytes that the checkpoint does not have
	Lacks   []string      `json:"lacks"`   // per-rank values that were not saved for this rank, sorted
	Files   []FilePreview `json:"files"`   // ascending
}

// FilePreview describes the reads of one rank from the file of another.
type FilePreview struct {
	Rank  int   `json:"rank"` // that saved it
	Bytes int64 `json:"bytes"`
	Read  int64 `json:"read"`
}

// UnreadValue is a per-rank value that no rank reads.
type UnreadValue struct {
	FQN  string `json:"fqn"`
	Rank int    `json:"rank"`
}

// MaxPreview bounds the ranks of a preview, whose size grows with them.
const MaxPreview = 1 << 16

// Rows returns the part of a tensor that rank has under Shard(0) on a number of ranks: equal
// parts rounded up, the last ones shorter or empty. The shape must have a dimension.
func Rows(shape tensor.Shape, ranks, rank int) tensor.Box {
	b := shape.Full()
	each := rowsEach(shape[0], ranks)
	b.Offsets[0] = min(int64(rank)*each, shape[0])
	b.Sizes[0] = min(each, shape[0]-b.Offsets[0])
	return b
}

func rowsEach(n int64, ranks int) int64 {
	each := n / int64(ranks)
	if n%int64(ranks) > 0 {
		each++
	}
	return each
}

// NewPreview returns the preview of a load on a number of ranks. Bytes are read and verified
// in blocks of block bytes, counted from the start of a chunk.
func NewPreview(l checkpoint.Layout, ranks int, block int64) (Preview, error) {
	if ranks < 1 || ranks > MaxPreview {
		return Preview{}, fmt.Errorf("preview a load on %d ranks: want 1 to %d", ranks, MaxPreview)
	}
	if block < 1 {
		return Preview{}, fmt.Errorf("preview a load: blocks of %d bytes", block)
	}
	v := preview{ranks: make([]RankPreview, ranks), files: make([]map[int]*FilePreview, ranks), block: block}
	for rank := range ranks {
		v.ranks[rank] = RankPreview{Rank: rank, Lacks: []string{}, Files: []FilePreview{}}
		v.files[rank] = map[int]*FilePreview{}
	}
	for _, t := range l.Tensors {
		v.tensor(t)
	}
	p := Preview{Unread: v.values(l.Values), Ranks: v.ranks}
	for rank := range v.ranks {
		r := &v.ranks[rank]
		for _, f := range v.files[rank] {
			r.Files = append(r.Files, *f)
			r.Bytes, r.Read = r.Bytes+f.Bytes, r.Read+f.Read
		}
		slices.SortFunc(r.Files, func(a, b FilePreview) int { return cmp.Compare(a.Rank, b.Rank) })
		p.Bytes, p.Read = p.Bytes+r.Bytes, p.Read+r.Read
	}
	return p, nil
}

type preview struct {
	ranks []RankPreview
	files []map[int]*FilePreview // by reading rank, and by saving rank
	block int64
}

// add counts the bytes from lo to hi of a chunk, or of a value, of size bytes.
func (v *preview) add(rank, saved int, lo, hi, size int64) {
	f := v.files[rank][saved]
	if f == nil {
		f = &FilePreview{Rank: saved}
		v.files[rank][saved] = f
	}
	v.ranks[rank].Reads++
	f.Bytes += hi - lo
	if hi > lo {
		first, last := lo/v.block, (hi-1)/v.block
		f.Read += size - first*v.block
		if last < (size-1)/v.block {
			f.Read -= size - (last+1)*v.block
		}
	}
}

// tensor visits each chunk once, and for each the ranks whose rows lie in it. In a chunk,
// rows follow each other without a gap.
func (v *preview) tensor(t checkpoint.Tensor) {
	size := int64(t.DType.Size())
	for rank := range v.ranks {
		part := t.Shape.Full()
		if len(t.Shape) > 0 {
			part = Rows(t.Shape, len(v.ranks), rank)
		}
		v.ranks[rank].Missing += part.Volume() * size
	}
	for _, c := range t.Chunks {
		if c.Box.Empty() {
			continue
		}
		bytes := c.Box.Volume() * size
		if len(t.Shape) == 0 {
			for rank := range v.ranks {
				v.add(rank, c.Rank, 0, bytes, bytes)
				v.ranks[rank].Missing -= bytes
			}
			continue
		}
		each, row := rowsEach(t.Shape[0], len(v.ranks)), bytes/c.Box.Sizes[0]
		start, end := c.Box.Offsets[0], c.Box.Offsets[0]+c.Box.Sizes[0]
		for rank := start / each; rank <= (end-1)/each; rank++ {
			lo, hi := (max(rank*each, start)-start)*row, bytes
			if first := rank * each; end-first > each {
				hi = (first + each - start) * row
			}
			v.add(int(rank), c.Rank, lo, hi, bytes)
			v.ranks[rank].Missing -= hi - lo
		}
	}
}

// values assigns shared values to all ranks and per-rank values to their own.
func (v *preview) values(values []checkpoint.Value) (unread []UnreadValue) {
	unread = []UnreadValue{}
	own := map[string]map[int]bool{}
	for _, x := range values {
		switch {
		case !x.PerRank:
			for rank := range v.ranks {
				v.add(rank, x.Rank, 0, x.Bytes, x.Bytes)
			}
			continue
		case x.Rank < len(v.ranks):
			v.add(x.Rank, x.Rank, 0, x.Bytes, x.Bytes)
		default:
			unread = append(unread, UnreadValue{x.FQN, x.Rank})
		}
		if own[x.FQN] == nil {
			own[x.FQN] = map[int]bool{}
		}
		own[x.FQN][x.Rank] = true
	}
	for _, fqn := range slices.Sorted(maps.Keys(own)) {
		for rank := range v.ranks {
			if !own[fqn][rank] {
				v.ranks[rank].Lacks = append(v.ranks[rank].Lacks, fqn)
			}
		}
	}
	return unread
}
