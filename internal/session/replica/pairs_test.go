package replica

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// Each node that keeps replicas has one partner and is the partner of one node: nodes form
// pairs, with one triple if their number is odd. If no domain has more than half of the nodes,
// pairs are in two domains.
func TestPartners(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 33).Draw(t, "nodes")
		domains, takes := make([]string, n), make([]bool, n)
		count, many, taking := map[string]int{}, 0, 0
		for i := range n {
			if d := rapid.IntRange(0, 5).Draw(t, "domain"); d > 0 {
				domains[i] = fmt.Sprint("rack ", d)
			}
			if takes[i] = rapid.IntRange(0, 9).Draw(t, "takes") > 0; !takes[i] {
				continue
			}
			taking++
			if domains[i] != "" {
				count[domains[i]]++
				many = max(many, count[domains[i]])
			}
		}
		at := Partners(domains, takes)
		from := map[int]int{}
		triples, same := 0, 0
		for node, partner := range at {
			if want := takes[node] && taking > 1; want != (partner >= 0) {
				t.Fatalf("node %d has the partner %d, it keeps replicas: %v", node, partner, takes[node])
			}
			if partner < 0 {
				continue
			}
			if partner == node || !takes[partner] {
				t.Fatalf("the partner of node %d is %d", node, partner)
			}
			from[partner]++
			if domains[node] != "" && domains[node] == domains[partner] {
				same++
			}
			if at[partner] == node {
				continue
			}
			if at[at[partner]] != node {
				t.Fatalf("nodes %d, %d and %d are no triple", node, partner, at[partner])
			}
			triples++
		}
		for node, n := range from {
			if n != 1 {
				t.Fatalf("node %d keeps the slots of %d nodes", node, n)
			}
		}
		if want := 3 * (taking % 2); taking > 1 && triples != want {
			t.Fatalf("%d nodes are in triples, want %d", triples, want)
		}
		if taking%2 == 0 && 2*many <= taking && same > 0 {
			t.Fatalf("%d nodes have their replica in their own domain: %q, partners %v", same, domains, at)
		}
	})
}
