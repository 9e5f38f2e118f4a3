// Package preflight finds bad nodes before a job trains on them: by the network between them, and by
// what each node finds out about itself.
//
// Each node is measured with two partners, in rounds of pairs: all pairs of a round at the same
// time. In the second half, slow nodes are paired with fast ones, so that a slow node and a
// partner that only shared its pair differ. Nodes that seem bad are measured again. The time does
// not grow with the number of nodes.
//
//	Run      measures all nodes and judges them
//	Measure  the rate of one pair, from one of its nodes
//	Handler  the other side of Measure
//	Examine  the checks of a node by itself
//	Clock    the offset of its clock
package preflight

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// pair is two nodes that are measured with each other, the lower one first.
type pair struct{ a, b int }

func pairOf(a, b int) pair { return pair{min(a, b), max(a, b)} }

// Verdict is what the measurements show about one node.
type Verdict struct {
	Rate     float64 // bytes per second with its best partner; 0 if it reached none
	Partners []int
	Median   float64 // of the rates of all nodes
	// Bad reports a rate below half of the median with at least two partners. With fewer than
	// three nodes, no node can be told from its partner, and none is bad.
	Bad bool
	Err error // of its last measurement that failed; nil: none failed
}

// Run measures n nodes and judges each. measure returns the rate between two of them, and ends
// within its own limit.
func Run(ctx context.Context, n int, measure func(ctx context.Context, a, b int) (float64, error)) []Verdict {
	r := results{rates: map[pair]float64{}, errs: map[pair]error{}}
	r.round(ctx, first(n), measure)
	r.round(ctx, odd(n, r.rates), measure)
	r.round(ctx, second(n, r.rates), measure)
	r.round(ctx, odd(n, r.rates), measure)
	r.round(ctx, again(n, r.rates), measure)
	return judge(n, r.rates, r.errs)
}

type results struct {
	mu    sync.Mutex
	rates map[pair]float64
	errs  map[pair]error
}

func (r *results) round(ctx context.Context, pairs []pair, measure func(ctx context.Context, a, b int) (float64, error)) {
	var all sync.WaitGroup
	for _, p := range pairs {
		all.Go(func() {
			rate, err := measure(ctx, p.a, p.b)
			r.mu.Lock()
			defer r.mu.Unlock()
			r.rates[p] = max(r.rates[p], rate)
			if r.errs[p] = err; err == nil {
				delete(r.errs, p)
			}
		})
	}
	all.Wait()
}

// first pairs neighbours. With an odd number, the last one is left.
func first(n int) (pairs []pair) {
	for i := 0; i+1 < n; i += 2 {
		pairs = append(pairs, pair{i, i + 1})
	}
	return pairs
}

// second pairs the slowest nodes with the fastest ones, and no two nodes that were paired before.
func second(n int, rates map[pair]float64) (pairs []pair) {
	order, taken := byRate(n, rates), map[int]bool{}
	for _, slow := range order {
		for _, fast := range slices.Backward(order) {
			if _, known := rates[pairOf(slow, fast)]; known || slow == fast || taken[slow] || taken[fast] {
				continue
			}
			taken[slow], taken[fast] = true, true
			pairs = append(pairs, pairOf(slow, fast))
		}
	}
	return pairs
}

// odd pairs the nodes that have fewer partners than the others with fast ones.
func odd(n int, rates map[pair]float64) (pairs []pair) {
	partners, most := partnersOf(n, rates), 0
	for _, list := range partners {
		most = max(most, len(list))
	}
	taken := map[int]bool{}
	for node, list := range partners {
		if len(list) >= min(most, 2) || taken[node] {
			continue
		}
		for _, fast := range slices.Backward(byRate(n, rates)) {
			if fast != node && !taken[fast] && !slices.Contains(list, fast) {
				taken[node], taken[fast] = true, true
				pairs = append(pairs, pairOf(node, fast))
				break
			}
		}
	}
	return pairs
}

// again pairs the nodes that seem bad with fast ones again: a busy machine may have disturbed
// their measurements.
func again(n int, rates map[pair]float64) (pairs []pair) {
	verdicts, taken := judge(n, rates, nil), map[int]bool{}
	for _, slow := range byRate(n, rates) {
		if !verdicts[slow].Bad {
			break
		}
		for _, fast := range slices.Backward(byRate(n, rates)) {
			if !verdicts[fast].Bad && !taken[fast] {
				taken[fast] = true
				pairs = append(pairs, pairOf(slow, fast))
				break
			}
		}
	}
	return pairs
}

// partnersOf returns the partners of each node so far, ascending.
func partnersOf(n int, rates map[pair]float64) [][]int {
	partners := make([][]int, n)
	for p := range rates {
		partners[p.a], partners[p.b] = append(partners[p.a], p.b), append(partners[p.b], p.a)
	}
	for _, list := range partners {
		slices.Sort(list)
	}
	return partners
}

// best returns the rate of each node with its best partner.
func best(n int, rates map[pair]float64) []float64 {
	rate := make([]float64, n)
	for p, r := range rates {
		rate[p.a], rate[p.b] = max(rate[p.a], r), max(rate[p.b], r)
	}
	return rate
}

// byRate returns the nodes, the slowest first.
func byRate(n int, rates map[pair]float64) []int {
	rate, order := best(n, rates), make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(rate[a], rate[b]) })
	return order
}

func judge(n int, rates map[pair]float64, errs map[pair]error) []Verdict {
	rate, partners := best(n, rates), partnersOf(n, rates)
	verdicts := make([]Verdict, n)
	if n == 0 {
		return verdicts
	}
	median := slices.Sorted(slices.Values(rate))[n/2]
	for i := range verdicts {
		v := &verdicts[i]
		*v = Verdict{Rate: rate[i], Partners: partners[i], Median: median, Bad: len(partners[i]) >= 2 && rate[i] < median/2}
		for _, partner := range partners[i] {
			v.Err = cmp.Or(errs[pairOf(i, partner)], v.Err)
		}
	}
	return verdicts
}
