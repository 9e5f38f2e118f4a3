package planner

import "github.com/ckptstore/ckptstore/internal/checkpoint"

// path is the path of an item that is the first of its name: the lowest
// rank's stands for all.
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
			o.disagree(k.value, rank, it) // the lowest rank's stands for all
			return
		}
	}
	o.load[at.local] += it.Bytes
	o.values[k.value] = append(o.values[k.value], checkpoint.Value{FQN: fqn, Path: path, Rank: rank, Bytes: it.Bytes, PerRank: it.PerRank})
}
