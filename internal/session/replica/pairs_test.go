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
		at := make([]int, n)
		for node, partners := range Partners(domains, takes, 1) {
			if at[node] = -1; len(partners) > 0 {
				at[node] = partners[0]
			}
			if len(partners) > 1 {
				t.Fatalf("node %d has the partners %v", node, partners)
			}
		}
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

// With k copies, each node that keeps replicas has k other ones as partners, and is the partner of k, or of
// all if there are fewer. A group of nodes that send to each other has at most 2k+1 nodes. If no domain has
// more than a k+1st of the nodes, a node and its partners are in different domains, if they can be divided evenly.
func TestPartnersOfSeveralCopies(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n, k := rapid.IntRange(0, 40).Draw(t, "nodes"), rapid.IntRange(1, 3).Draw(t, "copies")
		domains, takes := make([]string, n), make([]bool, n)
		count, many, taking := map[string]int{}, 0, 0
		for i := range n {
			domains[i] = fmt.Sprint("rack ", rapid.IntRange(1, 6).Draw(t, "domain"))
			if takes[i] = rapid.IntRange(0, 9).Draw(t, "takes") > 0; takes[i] {
				taking++
				count[domains[i]]++
				many = max(many, count[domains[i]])
			}
		}
		at := Partners(domains, takes, k)
		from := map[int]int{}
		for node, partners := range at {
			want := min(k, taking-1)
			if !takes[node] {
				want = 0
			}
			if len(partners) != max(want, 0) {
				t.Fatalf("node %d has the partners %v, want %d of them", node, partners, want)
			}
			seen := map[int]bool{node: true}
			for _, partner := range partners {
				if seen[partner] || !takes[partner] {
					t.Fatalf("node %d has the partners %v", node, partners)
				}
				seen[partner] = true
				from[partner]++
				if taking%(k+1) == 0 && many*(k+1) <= taking && domains[partner] == domains[node] {
					t.Fatalf("nodes %d and %d are in one domain: %q, partners %v", node, partner, domains, at)
				}
			}
			reached, todo := map[int]bool{}, []int{node}
			for len(todo) > 0 && takes[node] {
				for _, next := range at[todo[0]] {
					if !reached[next] {
						reached[next], todo = true, append(todo, next)
					}
				}
				todo = todo[1:]
			}
			if len(reached) > 2*k+1 {
				t.Fatalf("node %d is in a group of %d nodes", node, len(reached))
			}
		}
		for node, n := range from {
			if n != min(k, taking-1) {
				t.Fatalf("node %d keeps the slots of %d nodes", node, n)
			}
		}
	})
}
