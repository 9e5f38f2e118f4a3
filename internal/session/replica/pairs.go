package replica

import (
	"cmp"
	"slices"
)

// Partners returns, for each node, the nodes to which it sends its slots, k of them or as many as there
// are. Nodes form groups of k+1, some larger, in which each sends to the next k: with k = 1, pairs, and
// one triple if their number is odd. The loss of k+1 random nodes then loses all copies with the least
// probability; that of two nodes of pairs with about 1/(n-1), where a ring has twice as much. domains has
// the failure domain of each node; groups have nodes of different domains as far as possible, and an empty
// name is a domain of its own. takes reports which nodes keep replicas; the others have no partner.
func Partners(domains []string, takes []bool, k int) [][]int {
	partners := make([][]int, len(domains))
	groups := map[string][]int{}
	var alone int
	for node, domain := range domains {
		if !takes[node] {
			continue
		}
		if domain == "" {
			alone++
			domain = string(rune(0)) + string(rune(alone)) // no other node has it
		}
		groups[domain] = append(groups[domain], node)
	}
	ordered := byDomain(groups)
	if len(ordered) < 2 {
		return partners
	}
	k = min(k, len(ordered)-1)
	// In an order by domain, nodes that are a whole number of steps apart share a domain only if it has
	// more nodes than a step.
	step := len(ordered) / (k + 1)
	for first := range step {
		var group []int
		for at := first; at < len(ordered); at += step {
			group = append(group, ordered[at])
		}
		for i, node := range group {
			for next := range k {
				// Spread over the group, which is in the order of domains.
				partners[node] = append(partners[node], group[(i+(next+1)*len(group)/(k+1))%len(group)])
			}
		}
	}
	return partners
}

// byDomain lists the nodes domain by domain, the largest domain first.
func byDomain(groups map[string][]int) (ordered []int) {
	list := make([][]int, 0, len(groups))
	for _, nodes := range groups {
		list = append(list, nodes)
	}
	slices.SortFunc(list, func(a, b []int) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a[0], b[0]))
	})
	for _, nodes := range list {
		ordered = append(ordered, nodes...)
	}
	return ordered
}
