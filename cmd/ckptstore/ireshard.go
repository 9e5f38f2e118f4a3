package main

import (
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/planner"
)

// gap is a value that some ranks do not have.
type gap struct {
	fqn   string
	ranks []int
}

// lacking lists the values that each rank saved for itself, with the ranks of a
// preview for which none was saved.
func lacking(p *planner.Preview) []gap {
	ranks := map[string][]int{}
	for _, r := range p.Ranks {
		for _, fqn := range r.Lacks {
			ranks[fqn] = append(ranks[fqn], r.Rank)
		}
	}
	return gaps(ranks)
}

// unread lists the values that no rank of a preview reads, with the ranks that
// saved them.
func unread(p *planner.Preview) []gap {
	ranks := map[string][]int{}
	for _, v := range p.Unread {
		ranks[v.FQN] = append(ranks[v.FQN], v.Rank)
	}
	return gaps(ranks)
}

func gaps(ranks map[string][]int) (list []gap) {
	for _, fqn := range slices.Sorted(maps.Keys(ranks)) {
		list = append(list, gap{fqn, ranks[fqn]})
	}
	return list
}
