package insight

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// SameParts counts the parts that two checkpoints have in common.
type SameParts struct {
	Tensors int   `json:"tensors"`
	Values  int   `json:"values"`
	Bytes   int64 `json:"bytes"`
}

// Part is a tensor or a value of a checkpoint. Digest is the digest of its bytes
// or, for a tensor in several chunks, of the chunks' digests in the order of
// their boxes. It is omitted if one is unknown.
type Part struct {
	DType  tensor.DType `json:"dtype,omitzero"`
	Shape  tensor.Shape `json:"shape,omitempty"`
	Bytes  int64        `json:"bytes"`
	Chunks int          `json:"chunks"`
	Digest string       `json:"digest,omitempty"`

	boxes   []string // of the chunks
	digests []checkpoint.Digest
}

// partKey names a part. A per-rank value has one for each rank.
type partKey struct {
	kind string // "tensor" or "value"
	name string
}

// Content is a tensor or a value in a checkpoint's index.
type Content struct {
	Rank   int // of the index
	Item   checkpoint.Item
	Digest checkpoint.Digest // zero if the bytes have not been read yet
}

// CompareCheckpoints compares two checkpoints by what their indexes list.
func CompareCheckpoints(x, y projections.Checkpoint, inX, inY []Content) Diff {
	d := Diff{Of: "checkpoints", A: checkpointSide(x), B: checkpointSide(y), Differences: []Difference{}, Same: &SameParts{}}
	left, right := partsFrom(inX), partsFrom(inY)
	keys := maps.Clone(left)
	maps.Copy(keys, right)
	for _, key := range slices.SortedFunc(maps.Keys(keys), func(a, b partKey) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name))
	}) {
		a, b := left[key], right[key]
		changes := a.changes(b)
		if len(changes) > 0 {
			one := Difference{Kind: key.kind, Name: key.name, Changes: changes}
			if a != nil { // a nil part is not a nil value
				one.A = a
			}
			if b != nil {
				one.B = b
			}
			d.Differences = append(d.Differences, one)
			continue
		}
		d.Same.Bytes += a.Bytes
		if key.kind == "tensor" {
			d.Same.Tensors++
		} else {
			d.Same.Values++
		}
	}
	d.Equal = len(d.Differences) == 0
	return d
}

func checkpointSide(c projections.Checkpoint) DiffSide {
	return DiffSide{
		Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, Step: c.Step, Status: string(c.State), Attempt: c.Attempt,
		Iterations: c.Iteration, WorldSize: c.WorldSize, Bytes: c.Bytes, Manifest: c.Manifest, Parent: c.Parent,
	}
}

func partsFrom(contents []Content) map[partKey]*Part {
	slices.SortStableFunc(contents, func(a, b Content) int {
		return slices.Compare(a.Item.Shard.Box.Offsets, b.Item.Shard.Box.Offsets)
	})
	parts := map[partKey]*Part{}
	for _, one := range contents {
		it := one.Item
		key := partKey{"tensor", it.Shard.FQN}
		if it.Value {
			key.kind = "value"
		}
		if it.PerRank {
			key.name += fmt.Sprintf(" of rank %d", one.Rank)
		}
		p := parts[key]
		if p == nil {
			p = &Part{DType: it.Shard.DType, Shape: it.Shard.Global}
			parts[key] = p
		}
		p.Bytes += it.Bytes
		p.Chunks++
		if !it.Value {
			p.boxes = append(p.boxes, it.Shard.Box.Key())
		}
		p.digests = append(p.digests, one.Digest)
	}
	for _, p := range parts {
		p.Digest = p.digest()
	}
	return parts
}

func (p *Part) digest() string {
	var all []byte
	for _, d := range p.digests {
		if d == (checkpoint.Digest{}) {
			return ""
		}
		all = append(all, d[:]...)
	}
	if len(p.digests) == 1 {
		return p.digests[0].String()
	}
	return checkpoint.Sum(all).String()
}

// changes lists how a part changed; either side may be nil.
func (p *Part) changes(to *Part) (changes []string) {
	switch {
	case p == nil:
		return []string{Added}
	case to == nil:
		return []string{Removed}
	}
	if p.DType != to.DType {
		changes = append(changes, DTypeDiffers)
	}
	if !slices.Equal(p.Shape, to.Shape) {
		changes = append(changes, ShapeDiffers)
	}
	if len(changes) == 0 && p.Bytes != to.Bytes {
		changes = append(changes, SizeDiffers)
	}
	switch {
	case len(changes) > 0: // then the bytes differ too
	case !slices.Equal(p.boxes, to.boxes):
		changes = append(changes, ChunksDiffer)
	case p.Digest == "" || to.Digest == "":
		changes = append(changes, UnknownContent)
	case p.Digest != to.Digest:
		changes = append(changes, ContentDiffers)
	}
	return changes
}
