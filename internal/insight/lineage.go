package insight

import (
	"cmp"
	"slices"

	"github.com/ckptstore/ckptstore/projections"
)

// Relative is a trial in a [Lineage].
type Relative struct {
	Run        string `json:"run"`
	Trial      string `json:"trial"`
	Depth      int    `json:"depth"`            // forks between it and the root
	Parent     string `json:"parent,omitempty"` // the reference to the checkpoint that it was forked from
	Status     string `json:"status,omitempty"` // empty for a trial that the store does not have
	Head       string `json:"head,omitempty"`
	Iterations int    `json:"iterations"`
}

// Lineage are the trials that forks connect with a trial: a tree.
type Lineage struct {
	Run   string `json:"run"`
	Trial string `json:"trial"`
	// Trials are the root, then each fork after its parent, by run and trial.
	Trials  []Relative `json:"trials"`
	Omitted int        `json:"omitted"` // further relatives, which are not listed
}

// mostRelatives is how many trials a lineage lists.
const mostRelatives = 150

// place names a trial of a store.
type place struct{ run, trial string }

// LineageOf returns the lineage of a trial among all trials of a store. The trial itself and those it
// descends from are always listed.
func LineageOf(all []projections.Trial, run, trial string) Lineage {
	trials, forks := map[place]projections.Trial{}, map[place][]place{}
	for _, t := range all {
		at := place{t.Run, t.Name}
		trials[at] = t
		if t.Parent != nil {
			from := place{t.Parent.Run, t.Parent.Trial}
			forks[from] = append(forks[from], at)
		}
	}
	for _, of := range forks {
		slices.SortFunc(of, func(a, b place) int { return cmp.Or(cmp.Compare(a.run, b.run), cmp.Compare(a.trial, b.trial)) })
	}
	own := map[place]bool{} // the trial, and those it descends from
	root := place{run, trial}
	for at := root; !own[at]; {
		own[at], root = true, at
		if p := trials[at].Parent; p != nil {
			at = place{p.Run, p.Trial}
		}
	}
	out := Lineage{Run: run, Trial: trial, Trials: []Relative{}}
	seen, left := map[place]bool{}, len(own) // left: of own, not listed yet
	var visit func(place, int)
	visit = func(at place, depth int) {
		if seen[at] { // a log that is not of this program
			return
		}
		seen[at] = true
		switch {
		case own[at]:
			left--
			out.Trials = append(out.Trials, relative(at, trials[at], depth))
		case len(out.Trials)+left < mostRelatives:
			out.Trials = append(out.Trials, relative(at, trials[at], depth))
		default:
			out.Omitted++
		}
		for _, fork := range forks[at] {
			visit(fork, depth+1)
		}
	}
	visit(root, 0)
	return out
}

func relative(at place, t projections.Trial, depth int) Relative {
	out := Relative{Run: at.run, Trial: at.trial, Depth: depth, Status: string(t.Status), Head: t.Head, Iterations: t.Iterations}
	if t.Parent != nil {
		out.Parent = projections.ParentRef(*t.Parent)
	}
	return out
}
