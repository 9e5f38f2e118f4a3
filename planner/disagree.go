package planner

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Disagreement is a box of a tensor, or a value, that several ranks offer with different
// bytes according to their checks. Replicas that drift apart are a fault of the training; a
// checkpoint has to store one of them.
type Disagreement struct {
	FQN  string
	Box  tensor.Box // of a value, the zero box
	Kept int        // the lowest rank that offers it: its bytes are stored
	// Ranks, ascending, are the ranks whose bytes differ from Kept's or, if Kept sent no
	// check, from those of the lowest rank that did.
	Ranks []int
}

// Disagreements are sorted by FQN, those of a tensor by box.
type Disagreements []Disagreement

// Err returns an error that lists all of them, for callers that reject any difference; nil if
// there are none.
func (d Disagreements) Err() error {
	var all []error
	for _, e := range d {
		what := fmt.Sprintf("value %q", e.FQN)
		if e.Box.Sizes != nil {
			what = fmt.Sprintf("tensor %q: box %v", e.FQN, e.Box)
		}
		all = append(all, fmt.Errorf("%s is not the same on all ranks: ranks %v differ from rank %d", what, e.Ranks, e.Kept))
	}
	return errors.Join(all...)
}

// ranks lists all ranks whose bytes differ from the kept ones.
func (d Disagreements) ranks() []int {
	var all []int
	for _, e := range d {
		all = append(all, e.Ranks...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// maxListed bounds the list of disagreements in an event, in bytes: it has to fit the log
// together with an inline layout.
const maxListed = 128 << 10

// listed returns the beginning of the list, as far as it fits an event, and the number of the
// others.
func (d Disagreements) listed() (list []events.Disagreement, more int) {
	size := 0
	for i, e := range d {
		// This is an upper bound: names are escaped, numbers have up to 20 digits.
		size += 100 + 6*len(e.FQN) + 42*len(e.Box.Sizes) + 12*len(e.Ranks)
		if size > maxListed {
			return list, len(d) - i
		}
		list = append(list, events.Disagreement{FQN: e.FQN, Offsets: e.Box.Offsets, Sizes: e.Box.Sizes, Kept: e.Kept, Ranks: e.Ranks})
	}
	return list, 0
}

// disagree compares a value with the same value of earlier ranks.
func (o *Offers) disagree(value, rank int, it *checkpoint.Item) {
	ref := &o.checks[value]
	switch none := (checkpoint.Check{}); {
	case it.Check == none || it.Check == *ref:
	case *ref == none:
		*ref = it.Check
	default:
		if o.differ == nil {
			o.differ = map[int][]int{}
		}
		o.differ[value] = append(o.differ[value], rank)
	}
}

// compare checks whether the holders of a box have the same bytes.
func (o *Offers) compare(t *offered, holders []span) {
	var ref checkpoint.Check
	var ranks []int
	for _, h := range holders {
		switch c, none := o.locals[h.local].Items[h.item].Check, (checkpoint.Check{}); {
		case c == none || c == ref:
		case ref == none:
			ref = c
		default:
			ranks = append(ranks, o.locals[h.local].Rank)
		}
	}
	if ranks != nil {
		kept := holders[0]
		l := &o.locals[kept.local]
		t.differ = append(t.differ, Disagreement{FQN: t.shard.FQN, Box: l.Items[kept.item].Shard.Box, Kept: l.Rank, Ranks: ranks})
	}
}

// Disagreements returns the replicas and the shared values whose checks differ.
func (o *Offers) Disagreements() Disagreements {
	var all Disagreements
	for _, t := range o.tensors {
		all = append(all, t.differ...)
	}
	for i, v := range o.values {
		if ranks := o.differ[i]; ranks != nil {
			all = append(all, Disagreement{FQN: v[0].FQN, Kept: v[0].Rank, Ranks: ranks})
		}
	}
	slices.SortStableFunc(all, func(a, b Disagreement) int { return cmp.Compare(a.FQN, b.FQN) })
	return all
}
