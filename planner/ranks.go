package planner

import (
	"slices"

	"github.com/ckptstore/ckptstore/events"
)

// ranks are the participants of a save. All ranks of a world, the usual case, are kept as their
// number, so that comparing and searching them costs the same in a world of any size.
type ranks struct {
	n      int
	list   []int // nil: 0 to n-1
	sorted bool  // list is strictly ascending, as it should be
}

// ranksOf returns the ranks that an event lists: all of the world if it lists none.
func ranksOf(listed []int, world int) ranks {
	if len(listed) == 0 {
		return ranks{n: max(world, 0)}
	}
	if events.Listed(listed, len(listed)) == nil {
		return ranks{n: len(listed)}
	}
	sorted := true
	for i, rank := range listed[1:] {
		sorted = sorted && listed[i] < rank
	}
	return ranks{n: len(listed), list: listed, sorted: sorted}
}

// listed is the inverse of [ranksOf].
func (r ranks) listed(world int) []int {
	if r.list == nil && r.n == world {
		return nil
	}
	return r.all()
}

// all returns the ranks in their order.
func (r ranks) all() []int { return events.Participants(r.list, r.n) }

func (r ranks) equal(other ranks) bool { return r.n == other.n && slices.Equal(r.list, other.list) }

func (r ranks) has(rank int) bool {
	switch {
	case r.list == nil:
		return rank >= 0 && rank < r.n
	case r.sorted:
		_, found := slices.BinarySearch(r.list, rank)
		return found
	}
	return slices.Contains(r.list, rank)
}

// distinct returns the number of different ranks.
func (r ranks) distinct() int {
	if r.list == nil || r.sorted {
		return r.n
	}
	return len(slices.Compact(slices.Sorted(slices.Values(r.list))))
}

// ordered returns some of the ranks in the order of r. It changes some.
func (r ranks) ordered(some []int) []int {
	if r.list == nil || r.sorted {
		slices.Sort(some)
		return some
	}
	return slices.DeleteFunc(slices.Clone(r.list), func(rank int) bool { return !slices.Contains(some, rank) })
}
