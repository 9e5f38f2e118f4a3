//go:build testbed || outlive

package main

import (
	"strings"
	"testing"
	"time"
)

// skewed starts a job whose nodes' clocks have these rates: of the coordinating node, of b,
// and of the spare.
func skewed(t *testing.T, timeout time.Duration, a, b, c float64) *scene {
	t.Helper()
	check(t, canSkew(programs))
	j := twoWithin(timeout)
	j.rates = map[string]float64{"a": a, "b": b, "c": c}
	return withSpare(t, j)
}

// The workers of a node that is cut off or whose trainer is stopped are gone before the next
// group starts, if the coordinating node's clock is fast and the node's is slow. If it is the
// other way round, a node is not lost too early.
func TestClocksSkewed(t *testing.T) {
	t.Parallel()
	for name, rates := range map[string][3]float64{"coordinator fast": {1.1, 0.9, 1}, "coordinator slow": {0.9, 1.1, 1.1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := skewed(t, firm, rates[0], rates[1], rates[2])
			s.cut("b")
			s.on(s.group(1, 12), "a", "c")
			s.heal("b")
			check(t, s.a.prints(s.ctx, "node rejoined"))
			check(t, s.c.pause())
			s.on(s.group(2, 12), "a", "b")
			check(t, s.c.resume())
			check(t, s.noWorkers(s.ctx, s.node("c")))
			if v := s.ends(s.ctx, t, s.a, s.b, s.c); v.Attempts != 3 {
				t.Errorf("%d attempts", v.Attempts)
			}
		})
	}
}

// Clocks whose rates differ by a factor of four leave no margin: the judge sees that the
// ranks of two groups run at the same time.
func TestOverlapIsSeen(t *testing.T) {
	t.Parallel()
	s := skewed(t, calm, 1.6, 0.4, 1)
	s.cut("b")
	s.on(s.group(1, 12), "a", "c")
	check(t, s.noWorkers(s.ctx, s.node("b")))
	s.heal("b")
	check(t, s.a.prints(s.ctx, "node rejoined"))
	check(t, s.finish())
	for _, tr := range []*trainer{s.a, s.b, s.c} {
		must[int](t)(tr.code(s.ctx))
	}
	v := must[verdict](t)(s.judge(s.ctx, nodeTimeout/2))
	if !strings.Contains(strings.Join(v.Findings, "\n"), "/proc: rank 2 of attempt 1 on b ran ") {
		t.Errorf("the judge finds %q", v.Findings)
	}
	t.Logf("%+v", v)
}
