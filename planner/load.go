package planner

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// MissingError reports that a key which a rank wants is not in the checkpoint.
type MissingError struct {
	FQN     string
	PerRank bool // the value exists, but was not saved by rank Rank
	Rank    int
}

func (e *MissingError) Error() string {
	if e.PerRank {
		return fmt.Sprintf("value %q was saved by each rank for itself, and rank %d saved none", e.FQN, e.Rank)
	}
	return fmt.Sprintf("missing key %q: the checkpoint has no tensor or value of that name", e.FQN)
}

// MissingRegionError reports that a part of a wanted tensor was not saved. PyTorch silently
// leaves such a part of the target unchanged.
type MissingRegionError struct {
	FQN    string
	Region tensor.Box // that no chunk covers
	Want   tensor.Box
}

func (e *MissingRegionError) Error() string {
	return fmt.Sprintf("tensor %q: the checkpoint does not cover %v of the wanted %v", e.FQN, e.Region, e.Want)
}

// UnreadError reports that a strict load leaves out keys of the checkpoint.
type UnreadError struct{ FQNs []string }

func (e *UnreadError) Error() string {
	return fmt.Sprintf("saved keys that no rank asks for: %q; ask for them, or load without strict", e.FQNs)
}

// LoadOptions selects the conditions that fail a load.
type LoadOptions struct {
	// Partial leaves out the wants whose key the checkpoint lacks, instead of returning a
	// [MissingError]. An existing key must still match the want.
	Partial bool
	// Strict returns an [UnreadError] for saved keys that are not requested.
	Strict bool
	// Asked holds the keys that the other ranks of a collective load request.
	Asked map[string]bool
	// StrictDType makes every dtype that differs from the saved one an error. Without it,
	// only conversions that [tensor.Convert] refuses are errors.
	StrictDType bool
	// SameKind makes conversions of floats to integers an error, since fractions would be
	// lost. Narrower floats are of the same kind.
	SameKind bool
}

// Loaded is the plan of a load.
type Loaded struct {
	Reads  []checkpoint.Read
	Absent []int    // wants that a partial load leaves out, ascending
	Unread []string // saved keys that are not requested, sorted
}

// Loader plans reads from one layout. It is safe for concurrent use.
type Loader struct {
	layout  checkpoint.Layout
	tensors map[string]checkpoint.Tensor
	values  map[string][]checkpoint.Value
}

// NewLoader indexes a layout.
func NewLoader(l checkpoint.Layout) *Loader {
	p := &Loader{layout: l, tensors: make(map[string]checkpoint.Tensor, len(l.Tensors)), values: map[string][]checkpoint.Value{}}
	for _, t := range l.Tensors {
		p.tensors[t.FQN] = t
	}
	for _, v := range l.Values {
		p.values[v.FQN] = append(p.values[v.FQN], v)
	}
	return p
}

// Load is [Loader.LoadWith] without options, for a caller that requests part of a checkpoint
// and needs all of that part.
func (p *Loader) Load(wants []checkpoint.Want) ([]checkpoint.Read, error) {
	l, err := p.load(wants, LoadOptions{})
	return l.Reads, err
}

// LoadWith finds the stored chunks that overlap each want, in any number of dimensions,
// whatever layout and dtype they were saved in.
//
// The error joins every problem, each once: a [MissingError] for each key, a tensor that is
// wanted as a value or the reverse, a shape that differs from the saved one, a dtype that the
// saved one cannot be converted to, a [MissingRegionError] for each part of a wanted box that
// no chunk covers, and an [UnreadError].
func (p *Loader) LoadWith(wants []checkpoint.Want, o LoadOptions) (Loaded, error) {
	l, err := p.load(wants, o)
	asked := maps.Clone(o.Asked)
	if asked == nil {
		asked = map[string]bool{}
	}
	for _, w := range wants {
		asked[w.Shard.FQN] = true
	}
	if l.Unread = Unread(p.layout, asked); o.Strict && len(l.Unread) > 0 {
		err = errors.Join(err, &UnreadError{l.Unread})
	}
	return l, err
}

func (p *Loader) load(wants []checkpoint.Want, o LoadOptions) (l Loaded, err error) {
	var problems []error
	said := map[string]bool{}
	for i, w := range wants {
		var reads []checkpoint.Read
		var errs []error
		if w.Value {
			reads, errs = p.value(i, w)
		} else {
			reads, errs = p.tensor(i, w, o)
		}
		l.Reads = append(l.Reads, reads...)
		for _, err := range errs {
			if missing := (*MissingError)(nil); o.Partial && errors.As(err, &missing) {
				l.Absent = append(l.Absent, i)
			} else if text := err.Error(); !said[text] {
				said[text] = true
				problems = append(problems, err)
			}
		}
	}
	return l, errors.Join(problems...)
}

func (p *Loader) tensor(i int, w checkpoint.Want, o LoadOptions) (reads []checkpoint.Read, problems []error) {
	t, ok := p.tensors[w.Shard.FQN]
	if _, value := p.values[w.Shard.FQN]; !ok && value {
		return nil, []error{fmt.Errorf("%q is a value in the checkpoint and a tensor in the target", w.Shard.FQN)}
	} else if !ok {
		return nil, []error{&MissingError{FQN: w.Shard.FQN}}
	}
	if err := w.Shard.Validate(); err != nil {
		return nil, []error{err} // its chunks are unreliable
	}
	if o.StrictDType && t.DType != w.Shard.DType {
		problems = append(problems, fmt.Errorf("dtype mismatch for %q: the checkpoint has %v, the target %v", t.FQN, t.DType, w.Shard.DType))
	} else if err := tensor.Convertible(t.DType, w.Shard.DType); err != nil {
		problems = append(problems, fmt.Errorf("dtype mismatch for %q: %w; load it as %v", t.FQN, err, t.DType))
	} else if o.SameKind && tensor.LosesFractions(t.DType, w.Shard.DType) {
		problems = append(problems, fmt.Errorf("dtype mismatch for %q: the checkpoint has %v, the target %v, and fractions would be lost: load it as %v, or ask for any conversion (in Python strict_dtype=False)", t.FQN, t.DType, w.Shard.DType, t.DType))
	}
	if !t.Shape.Equal(w.Shard.Global) {
		return nil, append(problems, fmt.Errorf("size mismatch for %q: the checkpoint has shape %v, the target %v", t.FQN, t.Shape, w.Shard.Global))
	}
	covered := int64(0)
	for _, c := range t.Chunks {
		if region, ok := c.Box.Intersect(w.Shard.Box); ok {
			covered += region.Volume()
			reads = append(reads, checkpoint.Read{Want: i, FQN: t.FQN, Rank: c.Rank, DType: t.DType, Chunk: c.Box, Region: region})
		}
	}
	switch volume := w.Shard.Box.Volume(); {
	case covered > volume:
		problems = append(problems, fmt.Errorf("tensor %q: chunks of the checkpoint overlap in the wanted %v, its manifest is damaged", t.FQN, w.Shard.Box))
	case covered < volume:
		problems = append(problems, holes(t, w.Shard.Box)...)
	}
	if len(problems) > 0 {
		return nil, problems
	}
	return reads, nil
}

// holes returns the parts of a wanted box that no chunk of t covers. There must be at least
// one.
func holes(t checkpoint.Tensor, want tensor.Box) (problems []error) {
	boxes, all := missing(want, t.Chunks)
	for i, hole := range boxes {
		if all = all && i < maxPerTensor; !all {
			break
		}
		problems = append(problems, &MissingRegionError{FQN: t.FQN, Region: hole, Want: want})
	}
	if !all {
		problems = append(problems, fmt.Errorf("tensor %q: the checkpoint has %d chunks and does not cover more of the wanted %v", t.FQN, len(t.Chunks), want))
	}
	return problems
}

// Holes returns a [MissingRegionError] for each part of a tensor that no chunk covers, in a
// layout without overlaps: at most a hundred, followed by errors with the number of the
// others. Checkpoints of other programs may have holes: PyTorch does not check for them when
// only one rank saves.
func Holes(l checkpoint.Layout) (problems []error) {
	for _, t := range l.Tensors {
		volume := int64(0)
		for _, c := range t.Chunks {
			volume += c.Box.Volume()
		}
		if volume != t.Shape.Volume() {
			problems = append(problems, holes(t, t.Shape.Full())...)
		}
	}
	return capped(problems)
}

func (p *Loader) value(i int, w checkpoint.Want) ([]checkpoint.Read, []error) {
	have := p.values[w.Shard.FQN]
	if _, tensor := p.tensors[w.Shard.FQN]; tensor && len(have) == 0 {
		return nil, []error{fmt.Errorf("%q is a tensor in the checkpoint and a value in the target", w.Shard.FQN)}
	} else if len(have) == 0 {
		return nil, []error{&MissingError{FQN: w.Shard.FQN}}
	}
	if p.Lacks(w) {
		return nil, []error{&MissingError{FQN: w.Shard.FQN, PerRank: true, Rank: w.Rank}}
	}
	v := have[0]
	if v.PerRank {
		v = have[slices.IndexFunc(have, func(v checkpoint.Value) bool { return v.Rank == w.Rank })]
	}
	return []checkpoint.Read{{Want: i, FQN: v.FQN, Rank: v.Rank}}, nil
}

// Lacks reports whether w is a per-rank value that exists, but not for the rank in w: fewer
// ranks have saved than now load.
func (p *Loader) Lacks(w checkpoint.Want) bool {
	have := p.values[w.Shard.FQN]
	return w.Value && len(have) > 0 && have[0].PerRank &&
		!slices.ContainsFunc(have, func(v checkpoint.Value) bool { return v.Rank == w.Rank })
}

// Size returns the number of bytes that a want's destination needs: those of its box, or of
// the stored value. The want must have passed [Loader.Load].
func (p *Loader) Size(w checkpoint.Want) int64 {
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

// Unread lists the keys of the layout, sorted, that no want of any rank names.
func Unread(l checkpoint.Layout, asked map[string]bool) []string {
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
