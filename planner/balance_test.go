package planner_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// copies are tensors of so many bytes, each offered by some ranks.
type copies struct {
	bytes   []int64
	holders [][]int
}

func (c copies) locals(ranks int) []checkpoint.Local {
	locals := make([]checkpoint.Local, ranks)
	for rank := range locals {
		locals[rank].Rank = rank
	}
	for i, n := range c.bytes {
		s := shard(fmt.Sprint("w", i), tensor.Shape{n}, part(0, n))
		s.DType = tensor.Int8
		for _, rank := range c.holders[i] {
			locals[rank].Items = append(locals[rank].Items, item(s))
		}
	}
	return locals
}

// assigned returns the rank that holds each tensor, and the bytes of each rank.
func (c copies) assigned(t interface{ Fatal(...any) }, ranks int) (rankOf []int, load []int64) {
	rankOf, load = make([]int, len(c.bytes)), make([]int64, ranks)
	for _, tensor := range global(t, c.locals(ranks)).Tensors {
		var i int
		if _, err := fmt.Sscanf(tensor.FQN, "w%d", &i); err != nil {
			t.Fatal(err)
		}
		rankOf[i] = tensor.Chunks[0].Rank
		load[rankOf[i]] += c.bytes[i]
	}
	return rankOf, load
}

func (c copies) total() (sum int64) {
	for _, n := range c.bytes {
		sum += n
	}
	return sum
}

func replicated(ranks int, bytes ...int64) (c copies) {
	for _, n := range bytes {
		c.bytes, c.holders = append(c.bytes, n), append(c.holders, nil)
		for rank := range ranks {
			c.holders[len(c.bytes)-1] = append(c.holders[len(c.bytes)-1], rank)
		}
	}
	return c
}

// optimum is the least that the busiest rank can have, by trying everything.
func (c copies) optimum(ranks int) int64 {
	load, best := make([]int64, ranks), c.total()
	var try func(i int)
	try = func(i int) {
		if i == len(c.bytes) {
			best = min(best, slices.Max(load))
			return
		}
		for _, rank := range c.holders[i] {
			if load[rank] += c.bytes[i]; load[rank] < best {
				try(i + 1)
			}
			load[rank] -= c.bytes[i]
		}
	}
	try(0)
	return best
}

func TestBalance(t *testing.T) {
	for name, c := range map[string]struct {
		ranks  int
		copies copies
		want   int64
	}{
		"greedy is not enough":  {2, replicated(2, 3, 3, 2, 2, 2), 6},
		"greedy, three ranks":   {3, replicated(3, 5, 5, 4, 4, 3, 3, 3), 9},
		"the largest forces it": {4, replicated(4, 100, 1, 1, 1), 100},
		"fewer than ranks":      {8, replicated(8, 7, 7, 7), 7},
		"room is with others":   {3, copies{[]int64{6, 5, 5, 2}, [][]int{{0, 1, 2}, {0, 1}, {0, 1}, {2}}}, 8},
	} {
		t.Run(name, func(t *testing.T) {
			if _, load := c.copies.assigned(t, c.ranks); slices.Max(load) != c.want {
				t.Errorf("the ranks have %v bytes, want at most %d", load, c.want)
			}
			if best := c.copies.optimum(c.ranks); best > c.want {
				t.Errorf("nothing is below %d", best)
			}
		})
	}
}

// Where no tensor has more than a twentieth of a rank's share, the busiest
// rank has at most 1.05 of it.
func TestBalanceOfSmallTensorsIsWithinFivePercent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(2, 9).Draw(t, "ranks")
		c := replicated(ranks, rapid.SliceOfN(rapid.Int64Range(1, 1000), 25*ranks, 60*ranks).Draw(t, "bytes")...)
		mean := float64(c.total()) / float64(ranks)
		_, load := c.assigned(t, ranks)
		bound := max(1.05*mean, mean+float64(slices.Max(c.bytes)))
		if float64(slices.Max(c.bytes)) <= mean/20 {
			bound = 1.05 * mean
		}
		if got := float64(slices.Max(load)); got > bound {
			t.Fatalf("the busiest rank has %.3f of the mean, want at most %.3f", got/mean, bound/mean)
		}
		even := planner.BalanceOf(global(t, c.locals(ranks)), ranks)
		if even.Busiest != slices.Max(load) || even.Largest != slices.Max(c.bytes) || even.Mean != mean {
			t.Fatalf("measured as %+v, want %v", even, load)
		}
	})
}

// No replica that goes to another holder, and none that this one passes on
// for it, leave the busiest rank with less. Of replicas that all ranks have,
// it has at most 4/3 of the least that is possible.
func TestBalanceCannotBeBetterByOneChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(2, 4).Draw(t, "ranks")
		c := replicated(ranks, rapid.SliceOfN(rapid.Int64Range(1, 20), 1, 7).Draw(t, "bytes")...)
		everywhere := rapid.Bool().Draw(t, "on all ranks")
		for i := range c.holders {
			if !everywhere {
				c.holders[i] = slices.DeleteFunc(c.holders[i], func(int) bool { return rapid.Bool().Draw(t, "missing") })
				if len(c.holders[i]) == 0 {
					c.holders[i] = []int{i % ranks}
				}
			}
		}
		rankOf, load := c.assigned(t, ranks)
		most := slices.Max(load)
		if best := c.optimum(ranks); everywhere && 3*most > 4*best {
			t.Fatalf("the ranks have %v, %d is possible", load, best)
		}
		busiest := 0
		for _, n := range load {
			if n == most {
				busiest++
			}
		}
		if busiest > 1 {
			return // one change lowers only one of them
		}
		from := slices.Index(load, most)
		for i, give := range c.bytes {
			if rankOf[i] != from {
				continue
			}
			for _, to := range c.holders[i] {
				if to != from && load[to]+give < most {
					t.Fatalf("the ranks have %v: %d could go from rank %d to %d", load, give, from, to)
				}
				for k, pass := range c.bytes {
					for _, onto := range c.holders[k] {
						after := slices.Clone(load)
						after[from] -= give
						after[to] += give - pass
						after[onto] += pass
						if rankOf[k] == to && to != from && onto != to && slices.Max(after) < most {
							t.Fatalf("the ranks have %v: %d could go from rank %d to %d and %d from there to %d", load, give, from, to, pass, onto)
						}
					}
				}
			}
		}
	})
}
