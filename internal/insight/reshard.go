package insight

import (
	"maps"
	"slices"

	"github.com/ckptstore/ckptstore/planner"
)

// Gap is a value that some ranks do not have.
type Gap struct {
	FQN   string
	Ranks []int
}

// Lacking lists the values that each rank saved for itself, with the ranks of a
// preview for which none was saved.
func Lacking(p *planner.Preview) []Gap {
	ranks := map[string][]int{}
	for _, r := range p.Ranks {
		for _, fqn := range r.Lacks {
			ranks[fqn] = append(ranks[fqn], r.Rank)
		}
	}
	return gaps(ranks)
}

// Unread lists the values that no rank of a preview reads, with the ranks that
// saved them.
func Unread(p *planner.Preview) []Gap {
	ranks := map[string][]int{}
	for _, v := range p.Unread {
		ranks[v.FQN] = append(ranks[v.FQN], v.Rank)
	}
	return gaps(ranks)
}

func gaps(ranks map[string][]int) (list []Gap) {
	for _, fqn := range slices.Sorted(maps.Keys(ranks)) {
		list = append(list, Gap{fqn, ranks[fqn]})
	}
	return list
}
