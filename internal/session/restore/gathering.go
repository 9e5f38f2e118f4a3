package restore

import (
	"fmt"
	"slices"
)

// gathering is one load in a [Meeting]. It is open while ranks are missing, then being
// resolved, then resolved, and ended when the outcome of all nodes is known. It is
// guarded by the meeting's lock.
type gathering struct {
	of      loadOf
	n       int     // of the attempt, from 1; 0: not begun
	parts   [][]int // participants on each node
	world   int     // number of participants
	present int     // number of nodes with participants

	asked     map[int]Ask // by rank
	fqns      map[string]bool
	resolving bool
	resolved  chan struct{} // closed when reply is set
	reply     ResolveReply  // of all nodes
	took      *float64      // seconds of the resolution

	sharing *sharing // what nodes share; nil: none has asked

	reports map[int]Report // by node
	ending  bool           // the outcome is being recorded
	ended   chan struct{}  // closed when failure is set
	failure *Failure       // of all nodes; nil: the load is complete

	unwatch func() // ends the limit of the present wait
}

// newGathering returns an open load. Without participants, all ranks take part.
func (m *Meeting) newGathering(of loadOf, participants []int) (*gathering, error) {
	g := &gathering{
		of: of, parts: m.nodes, world: m.cfg.World, asked: map[int]Ask{}, fqns: map[string]bool{}, resolved: make(chan struct{}),
		reports: map[int]Report{}, ended: make(chan struct{}), unwatch: func() {},
	}
	if p := participants; len(p) > 0 {
		g.world, g.parts = len(p), make([][]int, len(m.nodes))
		known := 0
		for node, ranks := range m.nodes {
			for _, rank := range ranks {
				if _, ok := slices.BinarySearch(p, rank); ok {
					g.parts[node] = append(g.parts[node], rank)
					known++
				}
			}
		}
		if known != len(p) || !slices.IsSorted(p) {
			return nil, &MisuseError{fmt.Errorf("participants %v are not distinct ranks of a world of %d, ascending", p, m.cfg.World)}
		}
	}
	for _, ranks := range g.parts {
		if len(ranks) > 0 {
			g.present++
		}
	}
	return g, nil
}

// open reports whether ranks may still join.
func (g *gathering) open() bool { return !g.resolving && !g.isResolved() }

// isResolved reports whether reply is set.
func (g *gathering) isResolved() bool {
	select {
	case <-g.resolved:
		return true
	default:
		return false
	}
}

// failedUnresolved reports whether the load has failed before it was resolved.
func (g *gathering) failedUnresolved() bool {
	return g.isResolved() && g.reply.Failure != nil && !g.ending
}

// over reports whether the outcome is known.
func (g *gathering) over() bool {
	select {
	case <-g.ended:
		return true
	default:
		return g.failedUnresolved()
	}
}

// absent lists the participants that have not asked.
func (g *gathering) absent() (ranks []int) {
	for _, of := range g.parts {
		for _, rank := range of {
			if _, ok := g.asked[rank]; !ok {
				ranks = append(ranks, rank)
			}
		}
	}
	slices.Sort(ranks)
	return ranks
}

// unreported lists the participants on nodes that have not reported.
func (g *gathering) unreported() (ranks []int) {
	for node, of := range g.parts {
		if _, ok := g.reports[node]; !ok {
			ranks = append(ranks, of...)
		}
	}
	slices.Sort(ranks)
	return ranks
}

// sum returns the reports of all nodes as one.
func (g *gathering) sum() (all Report) {
	for _, r := range g.reports {
		all.Parts = append(all.Parts, r.Parts...)
		all.Slots += r.Slots
		all.Peers += r.Peers
		all.Passed += r.Passed
		all.Files += r.Files
		all.Wanted += r.Wanted
		all.Read, all.Check = longer(all.Read, r.Read), longer(all.Check, r.Check)
	}
	slices.SortFunc(all.Parts, func(a, b Part) int { return a.Rank - b.Rank })
	return all
}

// end publishes the outcome. Calls for the checkpoint get a failure too from then on.
func (g *gathering) end(failure *Failure) {
	g.failure, g.reports, g.sharing = failure, nil, nil
	if g.reply.opened = nil; failure != nil {
		g.reply = ResolveReply{Load: g.n, Failure: failure}
	}
	close(g.ended)
}
