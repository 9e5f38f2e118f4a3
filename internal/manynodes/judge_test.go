package main

import (
	"slices"
	"testing"
)

// Ranks stay on their nodes. A rank that has made no record in an attempt may have been on the node of its later ones.
func TestPlaces(t *testing.T) {
	t.Parallel()
	rank := func(attempt, rank int, host string, node int) life {
		return life{identity: identity{Attempt: attempt, Rank: rank, Host: host, Node: node, World: 4}}
	}
	first := []life{rank(1, 0, "a", 0), rank(1, 1, "a", 0), rank(1, 2, "b", 1), rank(1, 3, "b", 1)}
	for name, c := range map[string]struct {
		lives []life
		moved bool
	}{
		"they stay":                   {slices.Concat(first, []life{rank(2, 0, "a", 0), rank(2, 1, "a", 0)}), false},
		"a spare takes a place":       {slices.Concat(first, []life{rank(2, 2, "c", 1), rank(2, 3, "c", 1)}), false},
		"no record of one at first":   {[]life{rank(1, 0, "a", 0), rank(2, 0, "a", 0), rank(2, 1, "a", 0)}, false},
		"no record of the other then": {[]life{rank(1, 0, "a", 0), rank(2, 1, "a", 0), rank(3, 0, "a", 0), rank(3, 1, "a", 0)}, false},
		"another rank":                {slices.Concat(first, []life{rank(2, 2, "a", 0)}), true},
		"another index":               {slices.Concat(first, []life{rank(2, 0, "a", 1)}), true},
		"another index of another":    {[]life{rank(1, 0, "a", 0), rank(2, 2, "a", 1), rank(2, 3, "a", 1)}, true},
	} {
		v := verdict{}
		places(&v, c.lives)
		if (len(v.Findings) > 0) != c.moved {
			t.Errorf("%s: findings %q", name, v.Findings)
		}
	}
}
