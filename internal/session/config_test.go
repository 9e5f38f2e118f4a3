package session

import (
	"encoding/json"
	"slices"
	"testing"
)

// The ranks of a group are those of all its nodes; a session serves the ranks of
// its own node.
func TestRanksOfNodes(t *testing.T) {
	t.Parallel()
	cfg := Config{Nodes: Nodes{{0, 1}, {2, 3, 4}}, Node: 1}
	if got := cfg.World(); got != 5 {
		t.Errorf("%d ranks, want 5", got)
	}
	if got := cfg.Local(); !slices.Equal(got, []int{2, 3, 4}) {
		t.Errorf("ranks %v of node 1", got)
	}
	for rank, want := range [][2]int{{0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {-1, -1}} {
		if node, local := cfg.Nodes.Of(rank); node != want[0] || local != want[1] {
			t.Errorf("rank %d is number %d of node %d, want %d of %d", rank, local, node, want[1], want[0])
		}
	}
	if got := OneNode(3); got.World() != 3 || len(got) != 1 || !slices.Equal(got[0], []int{0, 1, 2}) {
		t.Errorf("one node has %v", got)
	}
	if got := (Config{Node: 2, Nodes: OneNode(1)}).Local(); got != nil {
		t.Errorf("a node that is not in the group has %v", got)
	}
}

// A placement in order is encoded by the number of ranks of nodes; any placement is decoded
// as it was.
func TestPlacementEncoded(t *testing.T) {
	t.Parallel()
	var large Nodes
	for rank := 0; rank < 16_384; rank += 8 {
		var of []int
		for i := range 8 {
			of = append(of, rank+i)
		}
		large = append(large, of)
	}
	for _, n := range []Nodes{large, {{0, 1}, {2}, {}, {3, 4}}, {{1, 0}, {2}}, OneNode(3)} {
		text, err := json.Marshal(n)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > 64 {
			t.Errorf("%d bytes", len(text))
		}
		var again Nodes
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(again, n, func(a, b []int) bool { return slices.Equal(a, b) }) {
			t.Errorf("%s is read as %v", text, again)
		}
	}
	for _, text := range []string{`{"counts":[[8,1000000000]]}`, `{"counts":[[-1,1]]}`, `{"counts":[[1048577,1]]}`, `7`} {
		if json.Unmarshal([]byte(text), new(Nodes)) == nil {
			t.Errorf("%s is a placement", text)
		}
	}
}
