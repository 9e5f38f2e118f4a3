package restore

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/data"
)

// For any wishes of nodes: the ranges of each node are disjoint, rising and not short. They have
// the blocks that it and at least one other node want, and no others, except short runs. All nodes
// of a range have it alike. Each of its blocks has one reader.
func TestDivision(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := rapid.IntRange(1, mostNodes+3).Draw(t, "nodes")
		kinds := rapid.IntRange(1, 5).Draw(t, "different wishes")
		var wishes [][]data.BlockRange
		for range kinds {
			var of []data.BlockRange
			for range rapid.IntRange(0, 4).Draw(t, "ranges") {
				lo := rapid.Int64Range(0, 300).Draw(t, "from")
				of = append(of, data.BlockRange{Rank: rapid.IntRange(0, 1).Draw(t, "rank"), Lo: lo, Hi: lo + rapid.Int64Range(0, 200).Draw(t, "blocks")})
			}
			wishes = append(wishes, mergeRanges([][]data.BlockRange{of}))
		}
		wants := map[int][]data.BlockRange{}
		for node := range nodes {
			wants[node] = wishes[rapid.IntRange(0, kinds-1).Draw(t, "wish")]
		}
		whole := divide(wants)
		has := func(ranges []data.BlockRange, rank int, block int64) bool {
			return slices.ContainsFunc(ranges, func(r data.BlockRange) bool { return r.Rank == rank && r.Lo <= block && block < r.Hi })
		}
		readers := map[string]int{}
		for node := range nodes {
			reply := whole.of(node)
			last := data.BlockRange{Rank: -1}
			for _, r := range reply.Shared {
				if r.Rank < last.Rank || r.Rank == last.Rank && r.Lo < last.Hi || r.Hi-r.Lo < leastShared {
					t.Fatalf("node %d: %v after %v", node, r, last)
				}
				last = r.BlockRange
				set := reply.Nodes[r.Set]
				if len(set) < 2 || len(set) > mostNodes || !slices.Contains(set, node) {
					t.Fatalf("node %d shares %v with %v", node, r, set)
				}
				for _, other := range set {
					for block := r.Lo; block < r.Hi; block++ {
						if !has(wants[other], r.Rank, block) {
							t.Fatalf("node %d does not want block %d of %d", other, block, r.Rank)
						}
					}
					same := whole.of(other)
					if !slices.ContainsFunc(same.Shared, func(o SharedRange) bool {
						return o.BlockRange == r.BlockRange && slices.Equal(same.Nodes[o.Set], set)
					}) {
						t.Fatalf("node %d does not share %v with %v", other, r, set)
					}
				}
			}
			s := newShared(&Loader{cfg: Config{Node: node}}, 1, reply)
			for _, r := range s.own {
				for block := r.Lo; block < r.Hi; block++ {
					readers[fmt.Sprint(reply.Nodes[r.Set], r.Rank, block)]++
				}
			}
		}
		for node := range nodes {
			reply := whole.of(node)
			for _, r := range reply.Shared {
				for block := r.Lo; block < r.Hi; block++ {
					if n := readers[fmt.Sprint(reply.Nodes[r.Set], r.Rank, block)]; n != 1 {
						t.Fatalf("block %d of rank %d has %d readers among %v", block, r.Rank, n, reply.Nodes[r.Set])
					}
				}
			}
		}
	})
}

// peersOfTest has the nodes of a group serve each other.
func peersOfTest(nodes ...int) func(*Config) {
	return func(cfg *Config) {
		cfg.Peer = func(node int) Peer {
			if slices.Contains(nodes, node) {
				return Peer{URL: fmt.Sprint("https://node-", node), Pin: "pin"}
			}
			return Peer{}
		}
	}
}

var wide = []data.BlockRange{{Rank: 0, Lo: 0, Hi: 100}}

// resolved returns a meeting of two nodes with a load that is resolved.
func resolved(t *testing.T, serving ...int) *Meeting {
	t.Helper()
	cfg := Config{World: 4, Log: &eventLog{}, Work: t.Context()}
	peersOfTest(serving...)(&cfg)
	m := NewMeeting(cfg, [][]int{{0, 1}, {2, 3}}, limit)
	t.Cleanup(func() { m.Close(limit) })
	m.mu.Lock()
	defer m.mu.Unlock()
	g, err := m.find(0, Key{N: 1})
	if err != nil {
		t.Fatal(err)
	}
	m.begin(g)
	close(g.resolved)
	return m
}

// Nodes learn what they share when all have told what they want, and get the same answer again.
func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := resolved(t, 0, 1)
		ask := func(n, node int, ranges []data.BlockRange) (ShareReply, error) {
			return m.Share(t.Context(), node, ShareRequest{Key: Key{N: n}, Ranges: ranges})
		}
		if _, err := ask(2, 0, wide); err == nil {
			t.Error("blocks of a load that is not resolved are shared")
		}
		want := ShareReply{
			Shared: []SharedRange{{data.BlockRange{Rank: 0, Lo: 50, Hi: 100}, 0}}, Nodes: [][]int{{0, 1}},
			Peers: map[int]Peer{0: {"https://node-0", "pin"}, 1: {"https://node-1", "pin"}},
		}
		first := make(chan ShareReply, 1)
		go func() {
			reply, err := ask(1, 0, wide)
			if err != nil {
				t.Error(err)
			}
			first <- reply
		}()
		synctest.Wait()
		if len(first) > 0 {
			t.Error("a node does not wait for the other")
		}
		for range 2 {
			if got, err := ask(1, 1, []data.BlockRange{{Rank: 0, Lo: 50, Hi: 200}}); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%+v, %v, want %+v", got, err, want)
			}
		}
		if got := <-first; !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
		if again, err := ask(1, 0, nil); err != nil || len(again.Shared) > 0 {
			t.Errorf("a node that wants nothing: %+v, %v", again, err)
		}
	})
}

// A node that asks nothing holds the others up for a while only. A node that serves no requests
// of others is not waited for. The end of the load ends the wait.
func TestShareWithoutANode(t *testing.T) {
	for name, c := range map[string]struct {
		serving []int
		waits   bool
		ends    bool
	}{
		"silent": {[]int{0, 1}, true, false}, "serves nothing": {[]int{0}, false, false}, "the load fails": {[]int{0, 1}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := resolved(t, c.serving...)
				answered := make(chan ShareReply, 1)
				began := time.Now()
				go func() {
					reply, err := m.Share(t.Context(), 0, ShareRequest{Key: Key{N: 1}, Ranges: wide})
					if err != nil {
						t.Error(err)
					}
					answered <- reply
				}()
				synctest.Wait()
				if waits := len(answered) == 0; waits != c.waits {
					t.Errorf("the node waits: %v, want %v", waits, c.waits)
				}
				if c.ends {
					m.EndNode(1, errOver)
				}
				if reply := <-answered; len(reply.Shared) > 0 {
					t.Errorf("%+v", reply)
				}
				if took := time.Since(began); (took > 0) != (c.waits && !c.ends) {
					t.Errorf("the node waited for %v", took)
				}
			})
		})
	}
}

// What nodes want is held up to a number of ranges: a node beyond it reads alone.
func TestShareOfTooManyRanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := resolved(t, 0, 1)
		many := make([]data.BlockRange, mostWanted)
		for i := range many {
			many[i] = data.BlockRange{Rank: 0, Lo: int64(40 * i), Hi: int64(40*i + 20)}
		}
		first := make(chan ShareReply, 1)
		go func() {
			reply, err := m.Share(t.Context(), 0, ShareRequest{Key: Key{N: 1}, Ranges: many})
			if err != nil {
				t.Error(err)
			}
			first <- reply
		}()
		synctest.Wait()
		if reply, err := m.Share(t.Context(), 1, ShareRequest{Key: Key{N: 1}, Ranges: wide}); err != nil || len(reply.Shared) > 0 {
			t.Errorf("%d ranges are shared, %v", len(reply.Shared), err)
		}
		if reply := <-first; len(reply.Shared) > 0 {
			t.Errorf("%d ranges are shared", len(reply.Shared))
		}
	})
}

// What the coordinator answers is bounded by different sets of nodes, not by their number.
func TestLargeReplyIsShort(t *testing.T) {
	wants := map[int][]data.BlockRange{}
	for node := range 1250 {
		wants[node] = wide
	}
	reply := divide(wants)
	if len(reply.Nodes) != 40 || len(reply.Shared) != 40 || len(reply.of(700).Shared) != 1 {
		t.Errorf("%d sets, %d ranges", len(reply.Nodes), len(reply.Shared))
	}
	if n := len(reply.of(700).Nodes); n != 1 {
		t.Errorf("a node gets %d sets", n)
	}
}
