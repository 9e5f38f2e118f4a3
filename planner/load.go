package planner

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// MissingError says that a key which a rank wants is not in the checkpoint.
type MissingError struct{ FQN string }

func (e *MissingError) Error() string {
	return fmt.Sprintf("missing key %q: the checkpoint has no tensor or value of that name", e.FQN)
}

// Loader plans reads from one layout. It may be used by several goroutines.
type Loader struct {
	tensors map[string]plan.Tensor
	values  map[string][]plan.Value
}

// NewLoader indexes a layout.
func NewLoader(l plan.Layout) *Loader {
	p := &Loader{tensors: make(map[string]plan.Tensor, len(l.Tensors)), values: map[string][]plan.Value{}}
	for _, t := range l.Tensors {
		p.tensors[t.FQN] = t
	}
	for _, v := range l.Values {
		p.values[v.FQN] = append(p.values[v.FQN], v)
	}
	return p
}

// Load finds the stored chunks that overlap each want, in any number of
// dimensions, whatever layout they were saved in. The error joins every
// problem: a missing key, another dtype or shape than saved, and each region
// of a wanted box that no chunk covers.
func (p *Loader) Load(wants []plan.Want) ([]plan.Read, error) {
	var reads []plan.Read
	var problems []error
	for i, w := range wants {
		var got []plan.Read
		var err error
		if w.Value {
			got, err = p.value(i, w)
		} else {
			got, err = p.tensor(i, w)
		}
		reads = append(reads, got...)
		if err != nil {
			problems = append(problems, err)
		}
	}
	return reads, errors.Join(problems...)
}

func (p *Loader) tensor(i int, w plan.Want) ([]plan.Read, error) {
	t, ok := p.tensors[w.Shard.FQN]
	if _, value := p.values[w.Shard.FQN]; !ok && value {
		return nil, fmt.Errorf("%q is a value in the checkpoint and a tensor in the target", w.Shard.FQN)
	} else if !ok {
		return nil, &MissingError{w.Shard.FQN}
	}
	if err := w.Shard.Validate(); err != nil {
		return nil, err
	}
	if !t.Shape.Equal(w.Shard.Global) {
		return nil, fmt.Errorf("size mismatch for %q: the checkpoint has shape %v, the target %v", t.FQN, t.Shape, w.Shard.Global)
	}
	if t.DType != w.Shard.DType {
		return nil, fmt.Errorf("dtype mismatch for %q: the checkpoint has %v, the target %v", t.FQN, t.DType, w.Shard.DType)
	}
	var reads []plan.Read
	covered := int64(0)
	for _, c := range t.Chunks {
		if region, ok := c.Box.Intersect(w.Shard.Box); ok {
			covered += region.Volume()
			reads = append(reads, plan.Read{Want: i, FQN: t.FQN, Rank: c.Rank, Chunk: c.Box, Region: region})
		}
	}
	if covered == w.Shard.Box.Volume() {
		return reads, nil
	}
	if covered > w.Shard.Box.Volume() {
		return nil, fmt.Errorf("tensor %q: chunks of the checkpoint overlap in the wanted %v, its manifest is damaged", t.FQN, w.Shard.Box)
	}
	var problems []error
	for _, hole := range missing(w.Shard.Box, t.Chunks) {
		problems = append(problems, fmt.Errorf("tensor %q: the checkpoint does not cover %v of the wanted %v", t.FQN, hole, w.Shard.Box))
	}
	return nil, errors.Join(problems...)
}

func (p *Loader) value(i int, w plan.Want) ([]plan.Read, error) {
	have := p.values[w.Shard.FQN]
	if _, tensor := p.tensors[w.Shard.FQN]; tensor && len(have) == 0 {
		return nil, fmt.Errorf("%q is a tensor in the checkpoint and a value in the target", w.Shard.FQN)
	} else if len(have) == 0 {
		return nil, &MissingError{w.Shard.FQN}
	}
	v := have[0]
	if v.PerRank {
		at := slices.IndexFunc(have, func(v plan.Value) bool { return v.Rank == w.Rank })
		if at < 0 {
			return nil, fmt.Errorf("value %q was saved by each rank for itself, and rank %d saved none", w.Shard.FQN, w.Rank)
		}
		v = have[at]
	}
	return []plan.Read{{Want: i, FQN: v.FQN, Rank: v.Rank}}, nil
}

// Lacks reports whether w is a per-rank value that exists, but not of the rank
// that w names: fewer ranks have saved than now load.
func (p *Loader) Lacks(w plan.Want) bool {
	have := p.values[w.Shard.FQN]
	return w.Value && len(have) > 0 && have[0].PerRank &&
		!slices.ContainsFunc(have, func(v plan.Value) bool { return v.Rank == w.Rank })
}

// Size is the number of bytes that a want's destination needs: those of its
// box, or of the stored value. The want must have passed [Loader.Load].
func (p *Loader) Size(w plan.Want) int64 {
	if !w.Value {
		return w.Shard.Bytes()
	}
	for _, v := range p.values[w.Shard.FQN] {
		if !v.PerRank || v.Rank == w.Rank {
			return v.Bytes
		}
	}
	return 0
}

// Unread lists the keys of the layout, sorted, that none of the wants of any
// rank names.
func Unread(l plan.Layout, asked map[string]bool) []string {
	var keys []string
	for _, t := range l.Tensors {
		if !asked[t.FQN] {
			keys = append(keys, t.FQN)
		}
	}
	for _, v := range l.Values {
		if !asked[v.FQN] {
			keys = append(keys, v.FQN)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}
