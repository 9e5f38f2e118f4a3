package preflight

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"
)

// A node whose links are slow is found among any number of nodes from three on, and no other.
func TestSlowNodesFound(t *testing.T) {
	t.Parallel()
	for n := range 40 {
		for bad := -1; bad < n; bad++ {
			for _, fails := range []bool{false, true} {
				measure := func(_ context.Context, a, b int) (float64, error) {
					switch {
					case a != bad && b != bad:
						return 1e9, nil
					case fails:
						return 0, errors.New("no route")
					}
					return 12e6, nil
				}
				verdicts := Run(t.Context(), n, measure)
				var found []int
				for i, v := range verdicts {
					if v.Bad {
						found = append(found, i)
					}
					if n >= 3 && len(v.Partners) < 2 {
						t.Errorf("node %d of %d was measured with %v only", i, n, v.Partners)
					}
				}
				want := []int{}
				if bad >= 0 && n >= 3 {
					want = []int{bad}
				}
				if fmt.Sprint(found) != fmt.Sprint(want) {
					t.Errorf("%d nodes, %d is bad: found %v", n, bad, found)
				}
			}
		}
	}
}

// No node is in two pairs of one round.
func TestPairsAreApart(t *testing.T) {
	t.Parallel()
	for n := range 60 {
		rates := map[pair]float64{}
		for round := range 4 {
			var pairs []pair
			switch round {
			case 0:
				pairs = first(n)
			case 2:
				pairs = second(n, rates)
			default:
				pairs = odd(n, rates)
			}
			var busy []int
			for _, p := range pairs {
				if _, again := rates[p]; again || p.a >= p.b {
					t.Errorf("%d nodes: round %d has %v", n, round, p)
				}
				busy = append(busy, p.a, p.b)
				rates[p] = float64(1 + p.a*7%5)
			}
			slices.Sort(busy)
			if len(slices.Compact(slices.Clone(busy))) != len(busy) {
				t.Errorf("%d nodes: round %d has a node twice: %v", n, round, pairs)
			}
		}
	}
}

// Differences below a factor of two are no reason to exclude a node.
func TestUnevenNodes(t *testing.T) {
	t.Parallel()
	rates := []float64{1, 0.55, 0.9, 0.7, 1.2}
	for i, v := range Run(t.Context(), len(rates), func(_ context.Context, a, b int) (float64, error) { return min(rates[a], rates[b]), nil }) {
		if v.Bad {
			t.Errorf("node %d is bad: %+v", i, v)
		}
	}
}

// A node whose measurements were disturbed once is measured again, and is not bad.
func TestDisturbedNode(t *testing.T) {
	t.Parallel()
	for n := 3; n < 12; n++ {
		var mu sync.Mutex
		count := 0
		for i, v := range Run(t.Context(), n, func(_ context.Context, a, b int) (float64, error) {
			if a != 1 && b != 1 {
				return 1e9, nil
			}
			mu.Lock()
			defer mu.Unlock()
			if count++; count <= 2 {
				return 0, errors.New("busy")
			}
			return 1e9, nil
		}) {
			if v.Bad {
				t.Errorf("node %d of %d is bad: %+v", i, n, v)
			}
		}
	}
}

// A pair is measured over HTTP within its limit.
func TestMeasure(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(Handler())
	defer server.Close()
	began := time.Now()
	rate, err := Measure(t.Context(), server.Client(), server.URL)
	if took := time.Since(began); err != nil || rate < 1e6 || took > Limit {
		t.Errorf("%.0f bytes/s, %v after %v", rate, err, took)
	}
	server.Close()
	if _, err := Measure(t.Context(), server.Client(), server.URL); err == nil {
		t.Error("a server that is gone has a rate")
	}
}
