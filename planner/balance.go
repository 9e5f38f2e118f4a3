package planner

import (
	"cmp"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// balance gives each replica to one of its holders: largest first, to the holder with the
// fewest bytes so far, then by [balancer.refine].
func (o *Offers) balance() {
	b := balancer{load: slices.Clone(o.load)}
	for _, t := range o.tensors {
		if t.differ != nil {
			continue // the lowest ranks write all of it, so that it comes from one copy
		}
		for i := range t.replicas {
			if r := &t.replicas[i]; len(r.holders) > 1 {
				b.replicas = append(b.replicas, r)
			}
		}
	}
	if len(b.replicas) == 0 {
		return
	}
	slices.SortFunc(b.replicas, func(a, b *replica) int {
		return cmp.Or(cmp.Compare(b.bytes, a.bytes), cmp.Compare(a.first.local, b.first.local), cmp.Compare(a.first.item, b.first.item))
	})
	for _, r := range b.replicas {
		r.holder = r.holders[0].local
		for _, h := range r.holders[1:] {
			if b.load[h.local] < b.load[r.holder] {
				r.holder = h.local
			}
		}
		b.load[r.holder] += r.bytes
	}
	b.refine(slices.Max(o.load))
}

// balancer is an assignment of replicas that is being improved.
type balancer struct {
	replicas []*replica
	load     []int64      // bytes by local
	held     [][]*replica // by local: the replicas that it writes
	steps    int
}

// maxSteps bounds the search of refine: some milliseconds. It is a count and not a time, so
// that every coordinator computes the same layout.
const maxSteps = 1 << 21

// refine takes bytes from the busiest rank as long as this lowers the maximum: it gives one
// replica to another holder, which may pass one on. Largest first alone leaves 3 3 2 2 2 on
// two ranks as 7 and 5. refine ends where no layout can be better: at the mean, at the
// largest replica, or at the bytes that only one rank has.
func (b *balancer) refine(alone int64) {
	total := int64(0)
	for _, n := range b.load {
		total += n
	}
	n := int64(len(b.load))
	least := max((total+n-1)/n, b.replicas[0].bytes, alone)
	if slices.Max(b.load) <= least {
		return
	}
	b.held = make([][]*replica, n)
	for _, r := range b.replicas {
		b.held[r.holder] = append(b.held[r.holder], r)
	}
	for b.steps < maxSteps {
		busiest := int32(0)
		for i := range b.load {
			if b.load[i] > b.load[busiest] {
				busiest = int32(i)
			}
		}
		b.steps += len(b.load)
		if b.load[busiest] <= least {
			return
		}
		best := b.change(busiest)
		if best.give == nil {
			return
		}
		b.move(best.give, best.to)
		if best.pass != nil {
			b.move(best.pass, best.onto)
		}
	}
}

// change is the move of a replica to another rank, which may pass a replica on: to the first
// rank or to a third.
type change struct {
	give  *replica
	to    int32
	pass  *replica // or nil
	onto  int32
	after int64 // maximum bytes of the involved ranks
}

// change finds the best change for a rank; without one, the result has no replica to give.
func (b *balancer) change(from int32) change {
	best := change{after: b.load[from]}
	for _, give := range b.held[from] {
		for _, h := range give.holders {
			if after := max(b.load[h.local]+give.bytes, b.load[from]-give.bytes); h.local != from && after < best.after {
				best = change{give: give, to: h.local, after: after}
			}
		}
		b.steps += len(give.holders)
	}
	if best.give != nil {
		return best
	}
	for _, give := range b.held[from] {
		for _, h := range give.holders {
			if h.local == from {
				continue
			}
			for _, pass := range b.held[h.local] {
				rest := b.load[h.local] + give.bytes - pass.bytes
				if rest >= best.after {
					continue
				}
				for _, next := range pass.holders {
					after := max(rest, b.load[from]-give.bytes, b.load[next.local]+pass.bytes)
					if next.local == from {
						after = max(rest, b.load[from]-give.bytes+pass.bytes)
					}
					if next.local != h.local && after < best.after {
						best = change{give, h.local, pass, next.local, after}
					}
				}
				b.steps += len(pass.holders)
			}
			if b.steps += len(b.held[h.local]); b.steps > maxSteps {
				return best
			}
		}
	}
	return best
}

func (b *balancer) move(r *replica, to int32) {
	from := r.holder
	b.held[from] = slices.DeleteFunc(b.held[from], func(other *replica) bool { return other == r })
	b.held[to] = append(b.held[to], r)
	b.load[from] -= r.bytes
	b.load[to] += r.bytes
	r.holder = to
}

// Balance measures how evenly a layout is distributed over its ranks, in bytes.
type Balance struct {
	Busiest int64 // bytes of the rank that has the most
	Mean    float64
	Largest int64 // chunk or value: a lower bound of Busiest
}

// BalanceOf measures a layout over a number of ranks.
func BalanceOf(l checkpoint.Layout, ranks int) Balance {
	var b Balance
	load := map[int]int64{}
	add := func(rank int, bytes int64) {
		load[rank] += bytes
		b.Busiest, b.Largest = max(b.Busiest, load[rank]), max(b.Largest, bytes)
	}
	for _, t := range l.Tensors {
		for _, c := range t.Chunks {
			add(c.Rank, c.Box.Volume()*int64(t.DType.Size()))
		}
	}
	for _, v := range l.Values {
		add(v.Rank, v.Bytes)
	}
	b.Mean = float64(l.Bytes()) / float64(ranks)
	return b
}
