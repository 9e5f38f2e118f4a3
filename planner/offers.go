package planner

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// Offers collects the items that the ranks of a save offer, with equal boxes found. [Global]
// works on it in three steps: [Dedup], [Offers.Layout] and [Offers.Validate], in this order
// and once each.
type Offers struct {
	locals   []checkpoint.Local // by rank
	tensors  []*offered
	values   [][]checkpoint.Value // by name
	checks   []checkpoint.Check   // of each value, for comparison with later offers
	differ   map[int][]int        // by value, the ranks with other bytes
	checked  bool                 // some item has a check
	load     []int64              // bytes that only this rank offers, by local
	problems []problem
}

// place is an item of a local plan.
type place struct{ local, item int32 }

// problem is an error of an item; problems are reported in the order of items.
type problem struct {
	at  place
	err error
}

// offered collects everything that the ranks offer of one tensor.
type offered struct {
	shard    tensor.Shard    // as the first rank described it
	path     checkpoint.Path // likewise; nil where it is the FQN alone
	rank     int             // that rank
	valid    bool            // whether its shape and dtype are valid
	refused  bool            // a shard was left out because of a problem: holes mean nothing
	sole     []place         // offers of boxes; each box once unless there are replicas
	replicas []replica       // every box, if one is offered twice
	differ   Disagreements
}

// replica is one box and the ranks that offer it.
type replica struct {
	holders []span // ascending
	first   place
	holder  int32 // the rank that writes it: an index of locals
	bytes   int64
}

func (t *offered) boxes() int {
	if t.replicas != nil {
		return len(t.replicas)
	}
	return len(t.sole)
}

// key is one name's entry in [Dedup].
type key struct {
	tensor int // index, or -1 for a value
	value  int
	last   int // the last rank that offered the value
}

// Dedup collects the ranks' offers, by tensor, and finds the replicas.
func Dedup(locals []checkpoint.Local) *Offers {
	o := &Offers{}
	sorted := slices.Clone(locals)
	slices.SortStableFunc(sorted, func(a, b checkpoint.Local) int { return cmp.Compare(a.Rank, b.Rank) })
	for i, l := range sorted {
		if i > 0 && sorted[i-1].Rank == l.Rank {
			o.problem(place{int32(len(o.locals)) - 1, int32(len(sorted[i-1].Items))}, "rank %d sent two plans", l.Rank)
			continue
		}
		o.locals = append(o.locals, l)
	}
	o.load = make([]int64, len(o.locals))
	o.collect()

	load := make([][]int64, runtime.GOMAXPROCS(0))
	problems := make([][]problem, len(load))
	each(len(load), len(o.tensors), func(worker, i int) {
		if load[worker] == nil {
			load[worker] = make([]int64, len(o.locals))
		}
		problems[worker] = append(problems[worker], o.dedup(o.tensors[i], load[worker])...)
	})
	for w := range load {
		for i, n := range load[w] {
			o.load[i] += n
		}
	}
	o.problems = append(o.problems, slices.Concat(problems...)...)
	return o
}

func (o *Offers) problem(at place, format string, args ...any) {
	o.problems = append(o.problems, problem{at, fmt.Errorf(format, args...)})
}

// collect sorts all items by name.
//
// Maps and their keys once dominated the profile of this pass. Ranks save the same names in
// the same order, and plans that were decoded together share the names' bytes. So a name is
// first compared with its place in the plan before, which needs no look at the bytes, and the
// map is used for the first plan only.
func (o *Offers) collect() {
	total := 0
	for _, l := range o.locals {
		total += len(l.Items)
	}
	keys := map[string]*key{}
	slab := make([]int32, total) // each item's tensor, or -1
	var counts []int
	var last []checkpoint.Item
	var lastKeys, thisKeys []*key
	for i, next := 0, 0; i < len(o.locals); i++ {
		l := &o.locals[i]
		thisKeys = thisKeys[:0]
		for j := range l.Items {
			it := &l.Items[j]
			var k *key
			if j < len(last) && last[j].Shard.FQN == it.Shard.FQN {
				k = lastKeys[j]
			} else if k = keys[it.Shard.FQN]; k == nil {
				k = &key{tensor: -1, value: -1, last: -1}
				keys[it.Shard.FQN] = k
			}
			thisKeys = append(thisKeys, k)
			o.checked = o.checked || it.Check != (checkpoint.Check{})
			slab[next] = -1
			if it.Value {
				o.addValue(k, place{int32(i), int32(j)}, it)
			} else if o.addShard(k, place{int32(i), int32(j)}, it) {
				slab[next] = int32(k.tensor)
				if k.tensor == len(counts) {
					counts = append(counts, 0)
				}
				counts[k.tensor]++
			}
			next++
		}
		last, lastKeys, thisKeys = l.Items, thisKeys, lastKeys
	}
	places := make([]place, total)
	for i, n := range counts {
		o.tensors[i].sole, places = places[:0:n], places[n:]
	}
	for i, next := 0, 0; i < len(o.locals); i++ {
		for j := range o.locals[i].Items {
			if id := slab[next]; id >= 0 {
				t := o.tensors[id]
				t.sole = append(t.sole, place{int32(i), int32(j)})
			}
			next++
		}
	}
}

func (o *Offers) addShard(k *key, at place, it *checkpoint.Item) bool {
	rank := o.locals[at.local].Rank
	if k.value >= 0 {
		o.problem(at, "%q is a value on rank %d and a tensor on rank %d", it.Shard.FQN, o.values[k.value][0].Rank, rank)
		return false
	}
	if k.tensor < 0 {
		k.tensor = len(o.tensors)
		whole := it.Shard
		whole.Box = whole.Global.Full()
		o.tensors = append(o.tensors, &offered{shard: it.Shard, path: o.path(at, it), rank: rank, valid: whole.Validate() == nil})
	}
	return true
}

// dedup checks the shards of one tensor and finds equal boxes. It adds the bytes that only
// one rank has to load.
func (o *Offers) dedup(t *offered, load []int64) (problems []problem) {
	spans := make([]span, 0, len(t.sole))
	ascending, repeated := true, false
	for _, at := range t.sole {
		it := &o.locals[at.local].Items[at.item]
		if errs := t.fits(o.locals[at.local].Rank, it); errs != nil {
			t.refused = true
			for _, err := range errs {
				problems = append(problems, problem{at, err})
			}
			continue
		}
		s, empty := spanOf(&it.Shard)
		if empty {
			continue // nothing to store, and nothing to overlap with
		}
		s.place = at
		if n := len(spans); n > 0 {
			order := compareSpans(spans[n-1], s)
			ascending, repeated = ascending && order <= 0, repeated || order == 0
		}
		spans = append(spans, s)
	}
	t.sole = t.sole[:0]
	for _, s := range spans {
		t.sole = append(t.sole, s.place)
	}
	if !ascending {
		slices.SortFunc(spans, func(a, b span) int {
			return cmp.Or(compareSpans(a, b), cmp.Compare(a.local, b.local), cmp.Compare(a.item, b.item))
		})
		for i := 1; i < len(spans) && !repeated; i++ {
			repeated = compareSpans(spans[i-1], spans[i]) == 0
		}
	}
	if !repeated {
		for _, s := range spans {
			load[s.local] += s.bytes
		}
		return problems
	}
	for len(spans) > 0 {
		n := 1
		for n < len(spans) && compareSpans(spans[n], spans[0]) == 0 {
			n++
		}
		r := replica{holders: spans[:1:n], first: spans[0].place, holder: spans[0].local, bytes: spans[0].bytes}
		for _, s := range spans[1:n] {
			if s.local == r.holders[len(r.holders)-1].local {
				l := o.locals[s.local]
				problems = append(problems, problem{s.place, fmt.Errorf("tensor %q: rank %d offers the box %v twice",
					t.shard.FQN, l.Rank, l.Items[s.item].Shard.Box)})
				continue
			}
			r.holders = append(r.holders, s)
		}
		if o.checked {
			o.compare(t, r.holders)
		}
		t.replicas = append(t.replicas, r)
		spans = spans[n:]
	}
	for _, r := range t.replicas {
		if len(r.holders) == 1 || t.differ != nil {
			load[r.holder] += r.bytes
		}
	}
	return problems
}

// fits returns how an item differs from the first description of its tensor.
func (t *offered) fits(rank int, it *checkpoint.Item) (errs []error) {
	s := &it.Shard
	if t.valid && !it.PerRank && t.shard.DType == s.DType && t.shard.Global.Equal(s.Global) && s.Box.Validate(s.Global) == nil {
		return nil
	}
	if it.PerRank {
		errs = append(errs, fmt.Errorf("tensor %q is marked per rank by rank %d: only values can be, give each rank's tensor its own name", s.FQN, rank))
	}
	if t.shard.DType != s.DType {
		errs = append(errs, fmt.Errorf("tensor %q has dtype %v on rank %d and %v on rank %d", s.FQN, t.shard.DType, t.rank, s.DType, rank))
	}
	if !t.shard.Global.Equal(s.Global) {
		errs = append(errs, fmt.Errorf("tensor %q has shape %v on rank %d and %v on rank %d", s.FQN, t.shard.Global, t.rank, s.Global, rank))
	}
	if err := s.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("rank %d: %w", rank, err))
	}
	return errs
}

// path returns the path of an item that is the first of its name: the lowest rank's path is
// used for all.
func (o *Offers) path(at place, it *checkpoint.Item) checkpoint.Path {
	if it.Path.Plain(it.Shard.FQN) {
		return nil
	}
	if err := it.Path.Validate(it.Shard.FQN); err != nil {
		o.problem(at, "rank %d: %w", o.locals[at.local].Rank, err)
		return nil
	}
	return it.Path
}

func (o *Offers) addValue(k *key, at place, it *checkpoint.Item) {
	rank, fqn := o.locals[at.local].Rank, it.Shard.FQN
	if k.tensor >= 0 {
		t := o.tensors[k.tensor]
		o.problem(at, "%q is a tensor on rank %d and a value on rank %d", fqn, t.rank, rank)
		t.refused = true
		return
	}
	if k.last == int(at.local) {
		o.problem(at, "value %q is offered twice by rank %d", fqn, rank)
		return
	}
	k.last = int(at.local)
	var path checkpoint.Path
	if k.value < 0 {
		k.value = len(o.values)
		o.values = append(o.values, nil)
		o.checks = append(o.checks, it.Check)
		path = o.path(at, it)
	} else {
		have := o.values[k.value]
		path = have[0].Path
		last := have[len(have)-1]
		switch {
		case last.PerRank != it.PerRank:
			o.problem(at, "value %q is per rank on one of the ranks %d and %d and shared on the other", fqn, last.Rank, rank)
			return
		case !it.PerRank:
			o.disagree(k.value, rank, it) // the lowest rank's is used for all
			return
		}
	}
	o.load[at.local] += it.Bytes
	o.values[k.value] = append(o.values[k.value], checkpoint.Value{FQN: fqn, Path: path, Rank: rank, Bytes: it.Bytes, PerRank: it.PerRank})
}
