package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// sameParts counts what two checkpoints have in common.
type sameParts struct {
	Tensors int   `json:"tensors"`
	Values  int   `json:"values"`
	Bytes   int64 `json:"bytes"`
}

// contained is a tensor or a value of a checkpoint. Digest is that of its bytes,
// or, of a tensor in several chunks, of their digests in the order of their
// boxes; it is left out if one is not known.
type contained struct {
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

// checkpoints compares two checkpoints by their manifests and indexes.
func (d *compared) checkpoints(ctx context.Context, s *store.Store, x, y projections.Checkpoint) error {
	d.Of, d.Same = "checkpoints", &sameParts{}
	d.A, d.B = checkpointSide(x), checkpointSide(y)
	left, err := partsOf(ctx, s, x)
	if err != nil {
		return err
	}
	right, err := partsOf(ctx, s, y)
	if err != nil {
		return err
	}
	keys := maps.Clone(left)
	maps.Copy(keys, right)
	for _, key := range slices.SortedFunc(maps.Keys(keys), func(a, b partKey) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name))
	}) {
		a, b := left[key], right[key]
		changes := a.changes(b)
		if len(changes) > 0 {
			one := difference{Kind: key.kind, Name: key.name, Changes: changes}
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
	return nil
}

func checkpointSide(c projections.Checkpoint) comparedSide {
	return comparedSide{
		Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, Step: c.Step, Status: string(c.State), Attempt: c.Attempt,
		Iterations: c.Iteration, WorldSize: c.WorldSize, Bytes: c.Bytes, Manifest: c.Manifest, Parent: c.Parent,
	}
}

// partsOf reads what a checkpoint has; no data is read.
func partsOf(ctx context.Context, s *store.Store, c projections.Checkpoint) (map[partKey]*contained, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, err
	}
	r := s.Data.Reader(store.RefOf(c)).WithManifest(digest)
	m, err := r.ReadMetadata(ctx)
	if err == nil {
		err = r.SetUp(ctx, m, true)
	}
	if err != nil {
		return nil, err
	}
	contents, err := r.Contents(ctx)
	if err != nil {
		return nil, err
	}
	return partsFrom(contents), nil
}

func partsFrom(contents []data.Stored) map[partKey]*contained {
	slices.SortStableFunc(contents, func(a, b data.Stored) int {
		return slices.Compare(a.Item.Shard.Box.Offsets, b.Item.Shard.Box.Offsets)
	})
	parts := map[partKey]*contained{}
	for _, stored := range contents {
		it := stored.Item
		key := partKey{"tensor", it.Shard.FQN}
		if it.Value {
			key.kind = "value"
		}
		if it.PerRank {
			key.name += fmt.Sprintf(" of rank %d", stored.Rank)
		}
		p := parts[key]
		if p == nil {
			p = &contained{DType: it.Shard.DType, Shape: it.Shard.Global}
			parts[key] = p
		}
		p.Bytes += it.Bytes
		p.Chunks++
		if !it.Value {
			p.boxes = append(p.boxes, it.Shard.Box.Key())
		}
		p.digests = append(p.digests, stored.Digest)
	}
	for _, p := range parts {
		p.Digest = p.digest()
	}
	return parts
}

func (p *contained) digest() string {
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

// changes says how a part became another; either may be nil.
func (p *contained) changes(to *contained) (changes []string) {
	switch {
	case p == nil:
		return []string{isAdded}
	case to == nil:
		return []string{isRemoved}
	}
	if p.DType != to.DType {
		changes = append(changes, isDType)
	}
	if !slices.Equal(p.Shape, to.Shape) {
		changes = append(changes, isShape)
	}
	if len(changes) == 0 && p.Bytes != to.Bytes {
		changes = append(changes, isSize)
	}
	switch {
	case len(changes) > 0: // then the bytes are others too
	case !slices.Equal(p.boxes, to.boxes):
		changes = append(changes, isChunks)
	case p.Digest == "" || to.Digest == "":
		changes = append(changes, isUnknown)
	case p.Digest != to.Digest:
		changes = append(changes, isContent)
	}
	return changes
}

// String is a part in a table.
func (p *contained) String() string {
	text := bytesize.Text(p.Bytes)
	if p.DType != 0 {
		text = fmt.Sprintf("%s %v, %s", p.DType, p.Shape, text)
	}
	if p.Chunks > 1 {
		text += fmt.Sprintf(" in %d chunks", p.Chunks)
	}
	if p.Digest != "" {
		text += ", " + console.Short(p.Digest)
	}
	return text
}

func (d compared) printCheckpoints(w *tabwriter.Writer, _ bool) {
	fmt.Fprintln(w)
	fmt.Fprintf(w, "%d tensors and %d values, %s, are the same\n", d.Same.Tensors, d.Same.Values, bytesize.Text(d.Same.Bytes))
	if len(d.Differences) == 0 {
		return
	}
	fmt.Fprintln(w)
	console.Row(w, "KIND", "NAME", "DIFFERS IN", "A", "B")
	for _, one := range d.Differences {
		cells := []any{one.Kind, one.Name, strings.Join(one.Changes, ", "), "", ""}
		if one.A != nil {
			cells[3] = one.A
		}
		if one.B != nil {
			cells[4] = one.B
		}
		console.Row(w, cells...)
	}
}
