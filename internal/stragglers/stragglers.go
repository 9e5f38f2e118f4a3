// Package stragglers finds nodes that are slower than the other nodes of their group.
//
// The ranks of a synchronous training finish an iteration together, however unequal their work
// is. So the time at which they report shows nothing. The sources are times in which a rank waits
// for no other rank:
//
//	Busy  the rank's own work in an iteration, as the worker measures it
//	Copy  the copy of its tensors in a save, for each GB, of at least 1 MiB
//
// A sample is one iteration or one save. In each, the time of a node is the median of its ranks.
// The node is behind if its time is at least 1.3 times the median of the other nodes. It is slow if
// it is behind in 20 of its last 30 samples of a source, and well again if it is behind in at most
// 10 of them in each source.
//
// A node that becomes slow again and again stays slow after the fifth time, so a group has at most
// nine facts about a node.
package stragglers

import (
	"math"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/events"
)

const (
	ratio    = 1.3 // of a node's time to the median of the others, from which on it is behind
	window   = 30  // samples of a node that count
	enough   = 20  // samples in which a slow node is behind
	few      = 10  // samples in which a node that is well again is behind, at most
	mostOnes = 5   // times that a node becomes slow in a group; then it stays slow

	leastCopy = 1 << 20 // bytes of a copy whose time counts
	mostSaves = 64      // open saves whose copies are noted
)

// Source is what the times of samples are.
type Source string

// The sources.
const (
	Busy Source = "busy" // seconds of a rank's own work in an iteration
	Copy Source = "copy" // seconds of a rank's copy in a save, for each GB
)

// sources are in the order in which a node that is slow by several is named.
var sources = [...]Source{Busy, Copy}

// Watch judges the nodes of one group. Its methods may be called concurrently.
type Watch struct {
	job     string
	attempt int
	index   func(place int) int
	ranks   [][]int // by place
	world   int

	mu     sync.Mutex
	nodes  []node               // by place
	copies map[string][]float64 // of open saves, by ID: seconds for each GB by rank; 0: unknown
}

// node is what is known about the node at one place.
type node struct {
	seen [len(sources)]samples
	slow bool
	by   int // source by which it became slow
	ones int // how often it became slow
}

// samples are the last samples of a node, in a ring.
type samples struct {
	own, others [window]float64 // the time of the node, and the median of the others
	n           int             // all samples so far
}

func (s *samples) add(own, others float64) {
	s.own[s.n%window], s.others[s.n%window] = own, others
	s.n++
}

// last returns the samples that count.
func (s *samples) last() (own, others []float64) {
	n := min(s.n, window)
	return s.own[:n], s.others[:n]
}

// behind returns the number of samples in which the node is behind.
func (s *samples) behind() (n int) {
	own, others := s.last()
	for i := range own {
		if own[i] >= ratio*others[i] {
			n++
		}
	}
	return n
}

// New watches a group of several nodes. ranks are those at each place, and index returns the
// index of the node at a place.
func New(job string, attempt int, ranks [][]int, index func(place int) int) *Watch {
	w := &Watch{job: job, attempt: attempt, index: index, ranks: ranks, nodes: make([]node, len(ranks)), copies: map[string][]float64{}}
	for _, of := range ranks {
		w.world += len(of)
	}
	return w
}

// Sample adds one sample, the time of each rank, and returns the facts that follow. Times that
// are not positive do not count: they are unknown.
func (w *Watch) Sample(source Source, times []float64) []events.Body {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sample(source, times)
}

// Sealed notes the copy of a rank. A nil Watch ignores it, as do the methods below.
func (w *Watch) Sealed(b *events.WriteSealed) {
	if w == nil || b.Attempt != w.attempt || b.Copied == nil || b.Bytes < leastCopy || b.Rank < 0 || b.Rank >= w.world {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	times := w.copies[b.Checkpoint]
	if times == nil {
		if len(w.copies) >= mostSaves {
			clear(w.copies) // seals that came after their saves were aborted
		}
		times = make([]float64, w.world)
		w.copies[b.Checkpoint] = times
	}
	times[b.Rank] = *b.Copied / (float64(b.Bytes) / 1e9)
}

// Saved adds the copies of a save that all of its ranks have sealed as a sample, and returns the
// facts that follow.
func (w *Watch) Saved(checkpoint string) []events.Body {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sample(Copy, w.take(checkpoint))
}

// Replayed is Saved for a save of an earlier coordinator of the group, which has recorded the facts
// that followed: see [Watch.Recorded].
func (w *Watch) Replayed(checkpoint string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.add(Copy, w.take(checkpoint), func(int) {})
}

// take returns and forgets the copies of a save.
func (w *Watch) take(checkpoint string) []float64 {
	times := w.copies[checkpoint]
	delete(w.copies, checkpoint)
	return times
}

// Recorded takes a fact that an earlier coordinator of the group has recorded.
func (w *Watch) Recorded(b *events.NodeSlow) {
	if w == nil || b.Attempt != w.attempt {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for place := range w.nodes {
		if w.index(place) != b.Node {
			continue
		}
		n := &w.nodes[place]
		n.slow = !b.Over
		if n.slow {
			n.ones++
			n.by = max(0, slices.Index(sources[:], Source(b.By)))
		}
	}
}

// Aborted forgets the copies of a save.
func (w *Watch) Aborted(checkpoint string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.copies, checkpoint)
}

func (w *Watch) sample(source Source, times []float64) (facts []events.Body) {
	w.add(source, times, func(place int) {
		if by, changed := w.nodes[place].judge(source); changed {
			facts = append(facts, w.fact(place, by))
		}
	})
	return facts
}

// add adds one sample, and calls judge with the place of each node that has a time.
func (w *Watch) add(source Source, times []float64, judge func(place int)) {
	at := slices.Index(sources[:], source)
	own := w.medians(times)
	sorted := make([]float64, 0, len(own))
	for _, t := range own {
		if t > 0 {
			sorted = append(sorted, t)
		}
	}
	slices.Sort(sorted)
	if len(sorted) < 2 {
		return
	}
	for place, t := range own {
		if !(t > 0) {
			continue
		}
		w.nodes[place].seen[at].add(t, upperWithout(sorted, t))
		judge(place)
	}
}

// medians returns the time of each node, or 0 where no rank has one.
func (w *Watch) medians(times []float64) []float64 {
	out := make([]float64, len(w.ranks))
	var known []float64
	for place, ranks := range w.ranks {
		known = known[:0]
		for _, rank := range ranks {
			if rank < len(times) && times[rank] > 0 && !math.IsInf(times[rank], 1) {
				known = append(known, times[rank])
			}
		}
		if len(known) > 0 {
			slices.Sort(known)
			out[place] = median(known)
		}
	}
	return out
}

// judge changes the state of a node after a sample. by is the source to name.
func (n *node) judge(sampled Source) (by Source, changed bool) {
	most := 0
	for at, source := range sources {
		behind := n.seen[at].behind()
		if !n.slow && behind >= enough {
			n.slow, n.by = true, at
			n.ones++
			return source, true
		}
		most = max(most, behind)
	}
	// After another coordinator has recorded that it is slow, there may be no samples yet.
	if n.slow && most <= few && n.ones < mostOnes && n.seen[n.by].n >= enough {
		n.slow = false
		return sampled, true
	}
	return "", false
}

// fact returns the fact about a node whose state has changed.
func (w *Watch) fact(place int, by Source) *events.NodeSlow {
	n := &w.nodes[place]
	seen := &n.seen[slices.Index(sources[:], by)]
	own, others := seen.last()
	own, others = slices.Sorted(slices.Values(own)), slices.Sorted(slices.Values(others))
	return &events.NodeSlow{
		Job: w.job, Attempt: w.attempt, Node: w.index(place), Over: !n.slow, By: string(by),
		Seconds: median(own), Others: median(others), Behind: seen.behind(), Of: len(own),
	}
}

// median returns the median of sorted values: the mean of the two in the middle of an even number.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// upperWithout returns the upper median of sorted values without one of them. With the upper one,
// at most half of the nodes are behind in a sample.
func upperWithout(sorted []float64, value float64) float64 {
	gone, _ := slices.BinarySearch(sorted, value)
	i := (len(sorted) - 1) / 2
	if i >= gone {
		i++
	}
	return sorted[i]
}
