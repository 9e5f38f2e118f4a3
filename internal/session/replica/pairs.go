package replica

import (
	"cmp"
	"slices"
)

// Partners returns, for each node, the node to which it sends its slots, or -1. Nodes form
// pairs, and one triple if their number is odd: the loss of two random nodes then loses both
// copies with a probability of about 1/(n-1), where a ring has twice as much. domains has the
// failure domain of each node; nodes of different domains are paired as far as possible, and
// an empty name is a domain of its own. takes reports which nodes keep replicas; the others
// have no partner.
func Partners(domains []string, takes []bool) []int {
	partner := make([]int, len(domains))
	groups := map[string][]int{}
	var alone int
	for node, domain := range domains {
		partner[node] = -1
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
	n := len(ordered)
	if n < 2 {
		return partner
	}
	// In an order by domain, nodes that are half of the list apart share a domain only if it
	// has more than half of all nodes.
	half := n / 2
	for i := range half {
		a, b := ordered[i], ordered[i+half]
		partner[a], partner[b] = b, a
	}
	if n%2 == 1 { // the last node joins the pair of the first
		a, b, c := ordered[0], ordered[half], ordered[n-1]
		partner[a], partner[b], partner[c] = b, c, a
	}
	return partner
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
