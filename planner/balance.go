package planner

import (
	"cmp"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// balance gives each replica to one of its holders: largest first, to the one
// with the fewest bytes so far, then by [balancer.refine].
func (o *Offers) balance() {
	b := balancer{load: slices.Clone(o.load)}
	for _, t := range o.tensors {
		if t.differ != nil {
			continue // all of it is the lowest ranks', so that it is from one copy
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
	held     [][]*replica // by local: those that it writes
	steps    int
}

// maxSteps bounds what refine looks at: some milliseconds. Being a count and
// not a time, it gives every coordinator the same layout.
const maxSteps = 1 << 21

// refine takes bytes from the busiest rank as long as all are left with less
// than that by giving one replica to another holder, who may pass one on.
// Largest first alone leaves 3 3 2 2 2 on two ranks as 7 and 5. It ends where
// nothing can be better: at the mean, at the largest replica, or at what a
// rank has alone.
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

// change is a replica that goes to another rank, and one that this rank may
// pass on: to the first or to a third.
type change struct {
	give  *replica
	to    int32
	pass  *replica // or nil
	onto  int32
	after int64 // most bytes of the ranks that take part
}

// change finds the best one for a rank; none has no replica to give.
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

// Balance says how evenly a layout lies on its ranks, in bytes.
type Balance struct {
	Busiest int64 // bytes of the rank that has most
	Mean    float64
	Largest int64 // chunk or value: no rank can have less than that
}

// BalanceOf measures a layout over so many ranks.
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
