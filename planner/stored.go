package planner

import (
	"cmp"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Stored returns the number of stored bytes that reads need, each counted once however many
// reads need it: the minimum that a reader must read. For a chunk that reads cut into more
// than thousands of overlapping boxes, it counts the boxes, or the whole chunk if that is
// less.
func (p *Loader) Stored(reads []checkpoint.Read) int64 {
	type key struct {
		fqn, chunk string
		rank       int
	}
	type wanted struct {
		chunk   tensor.Box
		size    int64 // of an element
		regions []tensor.Box
		seen    map[string]bool
	}
	chunks, values, sum := map[key]*wanted{}, map[key]bool{}, int64(0)
	for _, r := range reads {
		k := key{fqn: r.FQN, rank: r.Rank}
		if _, ok := p.tensors[r.FQN]; !ok {
			if !values[k] {
				values[k] = true
				sum += p.valueOf(r.FQN, r.Rank)
			}
			continue
		}
		k.chunk = r.Chunk.Key()
		c := chunks[k]
		if c == nil {
			c = &wanted{chunk: r.Chunk, size: int64(r.DType.Size()), seen: map[string]bool{}}
			chunks[k] = c
		}
		if at := r.Region.Key(); !c.seen[at] {
			c.seen[at] = true
			c.regions = append(c.regions, r.Region)
		}
	}
	for _, c := range chunks {
		sum += c.size * union(c.chunk, c.regions)
	}
	return sum
}

// valueOf returns the size of a value that a rank has saved.
func (p *Loader) valueOf(fqn string, rank int) int64 {
	for _, v := range p.values[fqn] {
		if v.Rank == rank {
			return v.Bytes
		}
	}
	return 0
}

// union returns the volume of all regions of a chunk together.
func union(chunk tensor.Box, regions []tensor.Box) int64 {
	volume, most := int64(0), int64(0)
	for _, r := range regions {
		volume += r.Volume()
		most = max(most, r.Volume())
	}
	if whole := chunk.Volume(); most == whole || len(regions) == 1 {
		return most
	}
	// In the dimension with the most distinct beginnings, few earlier regions reach into a
	// later one.
	dim := busiest(regions)
	slices.SortFunc(regions, func(a, b tensor.Box) int { return cmp.Compare(a.Offsets[dim], b.Offsets[dim]) })
	sum := int64(0)
	var active []tensor.Box // disjoint
	for _, r := range regions {
		active = slices.DeleteFunc(active, func(a tensor.Box) bool { return a.Offsets[dim]+a.Sizes[dim] <= r.Offsets[dim] })
		left := []tensor.Box{r}
		for _, a := range active {
			var next []tensor.Box
			for _, b := range left {
				next = append(next, subtract(b, a)...)
			}
			left = next
		}
		for _, b := range left {
			sum += b.Volume()
		}
		if active = append(active, left...); len(active) > maxBoxes {
			return min(volume, chunk.Volume())
		}
	}
	return sum
}

// busiest returns the dimension in which boxes begin at the most places.
func busiest(boxes []tensor.Box) (dim int) {
	most := 0
	for d := range boxes[0].Offsets {
		starts := map[int64]bool{}
		for _, b := range boxes {
			starts[b.Offsets[d]] = true
		}
		if len(starts) > most {
			dim, most = d, len(starts)
		}
	}
	return dim
}
