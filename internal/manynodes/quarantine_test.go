//go:build testbed || outlive

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// killOn kills the worker of a group with a rank.
func (s *scene) killOn(group []life, rank int) {
	s.t.Helper()
	for _, l := range group {
		if l.Rank == rank {
			s.killWorker(l)
		}
	}
}

// nodeStates returns the state and the reason of each node of the run's newest job, by host. No
// process may own the store.
func (s *scene) nodeStates() map[string]string {
	s.t.Helper()
	var l struct {
		Nodes []struct{ Host, State, Why string }
	}
	check(s.t, json.Unmarshal(must[[]byte](s.t)(s.ckptstore(s.ctx, "nodes", run, "--json")), &l))
	states := map[string]string{}
	for _, n := range l.Nodes {
		states[n.Host] = n.State + ": " + n.Why
	}
	return states
}

// excluded waits for the end of the trainer of an excluded node and checks what it prints.
func (s *scene) excluded(l *trainer) {
	s.t.Helper()
	if code := must[int](s.t)(l.code(s.ctx)); code != 1 {
		s.t.Errorf("the trainer on %s exits with %d, want 1", l.on.Name(), code)
	}
	if want := "this machine is excluded from the job: its ranks failed 2 times"; !strings.Contains(l.log.String(), want) {
		s.t.Errorf("the trainer on %s does not print %q", l.on.Name(), want)
	}
}

// The workers of a node die twice while those of the other do not: the node is excluded, a spare
// takes its place, and no restart of the workers' budget is used. The coordinating trainer is
// killed and started again: the node is still excluded, by the log.
func TestNodeQuarantined(t *testing.T) {
	t.Parallel()
	j := twoNodes()
	j.more = []string{"--max-restarts", "1", "--max-node-failures", "2"}
	s := withSpare(t, j)
	s.killOn(s.group(0, 12), 2)
	s.killOn(s.group(1, 12), 3)
	s.on(s.group(2, 12), "a", "c")
	s.excluded(s.b)
	s.b = s.launch("b")
	s.excluded(s.b)

	// The budget is whole: one more failure is tolerated.
	s.killOn(s.group(2, 12), 0)
	s.on(s.group(3, 12), "a", "c")

	check(t, s.a.kill())
	must[int](t)(s.a.code(s.ctx))
	s.a = s.launch("a")
	check(t, s.a.prints(s.ctx, "node excluded"))
	s.b = s.launch("b")
	s.excluded(s.b)
	s.on(s.group(4, 12), "a", "c")
	s.ends(s.ctx, t, s.a, s.c)
	states := s.nodeStates()
	if got := states["b"]; !strings.HasPrefix(got, "excluded: its ranks failed 2 times") || !strings.Contains(got, "SIGKILL") {
		t.Errorf("node b is %q", got)
	}
	for _, host := range []string{"a", "c"} {
		if got := states[host]; got != "left: the job ended" {
			t.Errorf("node %s is %q", host, got)
		}
	}
	found := false
	for _, e := range of(s.events(), "job.node_left") {
		found = found || e.Data.Excluded
	}
	if !found {
		t.Error("the log has no exclusion")
	}
}

// Ranks that fail on both nodes in turn exclude none.
func TestFailuresOfTwoNodes(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	for attempt, rank := range []int{2, 0, 3} {
		s.killOn(s.group(attempt, 12), rank)
	}
	s.on(s.group(3, 12), "a", "b")
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A spare that is frozen takes no place: the node whose ranks fail stays, with a warning. When the
// spare answers again, the next failure of that node excludes it.
func TestQuarantineWithFrozenSpare(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	check(t, s.node("c").freeze())
	check(t, s.a.prints(s.ctx, `msg="node lost" node=2`))
	s.killOn(s.group(0, 12), 2)
	s.killOn(s.group(1, 12), 2)
	s.on(s.group(2, 12), "a", "b")
	if want := "bad node is not excluded"; !strings.Contains(s.a.log.String(), want) {
		t.Errorf("the trainer on a does not print %q", want)
	}
	check(t, s.node("c").thaw())
	check(t, s.a.prints(s.ctx, "node rejoined"))
	check(t, s.guarded("c"))
	s.killOn(s.group(2, 12), 2)
	s.on(s.group(3, 12), "a", "c")
	if code := must[int](t)(s.b.code(s.ctx)); code != 1 || !strings.Contains(s.b.log.String(), "its ranks failed 3 times") {
		t.Errorf("the trainer on b exits with %d", code)
	}
	s.ends(s.ctx, t, s.a, s.c)
}

// Without a spare, the job waits for another node when --max-node-failures is given, and exits
// with 75 and the list of the excluded ones.
func TestTooFewAfterQuarantine(t *testing.T) {
	t.Parallel()
	j := twoNodes()
	j.more = []string{"--max-node-failures", "2", "--endpoint-wait", "4s"}
	j.worker = []string{"--stubborn"}
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, j)
	s.killOn(s.group(0, 12), 2)
	s.killOn(s.group(1, 12), 2)
	s.excluded(s.b)
	if code := must[int](t)(s.a.code(s.ctx)); code != 75 {
		t.Errorf("the trainer on a exits with %d, want 75", code)
	}
	if want := "excluded: node 1 on b: its ranks failed 2 times"; !strings.Contains(s.a.log.String(), want) {
		t.Errorf("the trainer on a does not print %q", want)
	}
	// The next job starts with no node excluded.
	s.a, s.b = s.launch("a"), s.launch("b")
	s.on(s.group(2, 12), "a", "b")
	s.ends(s.ctx, t, s.a, s.b)
}
