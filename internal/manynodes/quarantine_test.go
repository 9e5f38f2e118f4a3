//go:build testbed || outlive

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// flaky is a job on two nodes that excludes a node after two failures, without a commit between
// them.
func flaky(more ...string) job {
	j := twoWithin(firm)
	j.more, j.worker = append([]string{"--max-node-failures", "2"}, more...), []string{"--every", "0"}
	return j
}

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
	s.excludedFor(l, "its ranks failed 2 times")
}

// excludedFor is excluded with the reason.
func (s *scene) excludedFor(l *trainer, why string) {
	s.t.Helper()
	if code := must[int](s.t)(l.code(s.ctx)); code != 1 {
		s.t.Errorf("the trainer on %s exits with %d, want 1", l.on.Name(), code)
	}
	if want := "this machine is excluded from the job: " + why; !strings.Contains(l.log.String(), want) {
		s.t.Errorf("the trainer on %s does not print %q", l.on.Name(), want)
	}
}

// The workers of a node die twice while those of the other do not: the node is excluded, a spare
// takes its place, and no restart of the workers' budget is used. The coordinating trainer is
// killed and started again: the node is still excluded, by the log.
func TestNodeQuarantined(t *testing.T) {
	t.Parallel()
	s := withSpare(t, flaky("--max-restarts", "1"))
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
	s := withSpare(t, flaky())
	for attempt, rank := range []int{2, 0, 3} {
		s.killOn(s.group(attempt, 12), rank)
	}
	s.on(s.group(3, 12), "a", "b")
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A spare that is frozen takes no place: the job waits for it, without the node whose ranks fail.
func TestQuarantineWithFrozenSpare(t *testing.T) {
	t.Parallel()
	s := withSpare(t, flaky())
	check(t, s.node("c").freeze())
	check(t, s.a.prints(s.ctx, `msg="node lost" node=2`))
	s.killOn(s.group(0, 12), 2)
	s.killOn(s.group(1, 12), 2)
	s.excluded(s.b)
	check(t, s.node("c").thaw())
	check(t, s.a.prints(s.ctx, "node rejoined"))
	s.on(s.group(2, 12), "a", "c")
	s.ends(s.ctx, t, s.a, s.c)
}

// Without --max-node-failures, ranks of one node may fail at any time and in any number, and so may
// they with it while the training makes progress.
func TestNoQuarantine(t *testing.T) {
	t.Parallel()
	for name, j := range map[string]job{
		"without the flag": {more: []string{"--max-restarts", "2"}, worker: []string{"--every", "0"}},
		"with progress":    {more: []string{"--max-node-failures", "2"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			two := twoWithin(calm)
			two.more, two.worker = j.more, j.worker
			s := withSpare(t, two)
			s.killOn(s.group(0, 25), 2)
			s.killOn(s.group(1, 25), 2)
			s.on(s.group(2, 25), "a", "b")
			s.ends(s.ctx, t, s.a, s.b, s.c)
		})
	}
}

// A program that fails on all nodes excludes none, and a program whose last rank alone fails
// excludes one at most: the group does not shrink to one node.
func TestQuarantineOfBadProgram(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script   string
		excluded int
	}{
		"every rank":    {`trap "" TERM; sleep 1.$((9-3*RANK)); exit 3`, 0},
		"the last rank": {`[ $RANK != $((WORLD_SIZE-1)) ] || exit 3; sleep 1000`, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, on := start(t, threeNodes())
			s := &scene{t: t, ctx: ctx, cluster: on, job: job{
				nnodes: "1:3", nproc: 1, timeout: calm, command: []string{"sh", "-c", c.script},
				more: []string{"--max-node-failures", "2", "--max-restarts", "3", "--last-call", "10s", "--grace", "30s"},
			}}
			s.a, s.b, s.c = s.launch("a"), s.launch("b"), s.launch("c")
			if code := must[int](t)(s.a.code(s.ctx)); code == 0 {
				t.Error("the trainer on a exits with 0")
			}
			if got := strings.Count(s.a.log.String(), `msg="node excluded"`); got != c.excluded {
				t.Errorf("%d nodes are excluded, want %d", got, c.excluded)
			}
			if got := strings.Contains(s.a.log.String(), "ranks fail on a second node alike"); got != (c.excluded > 0) {
				t.Errorf("the program is blamed: %v", got)
			}
		})
	}
}

// A node that holds a copy of the log stays although its ranks fail and a spare is there.
func TestNoQuarantineOfCopyOfLog(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: job{nnodes: "3", nproc: 1, timeout: calm, worker: []string{"--every", "0", "--stubborn"}}}
	limit := []string{"--max-node-failures", "2"}
	s.a, s.b, s.c = s.copyOn("a", "0", limit...), s.copyOn("b", "1", limit...), s.copyOn("c", "2", limit...)
	s.group(0, 12)
	spare := s.copyOn("d", "", limit...)
	check(t, s.a.prints(ctx, "node=3"))
	s.killOn(s.group(0, 12), 1)
	s.killOn(s.group(1, 12), 1)
	s.on(s.group(2, 12), "a", "b", "c")
	if want := "the nodes 0 to 2 hold the copies of the log"; !strings.Contains(s.a.log.String(), want) {
		t.Errorf("the trainer on a does not print %q", want)
	}
	s.ends(s.ctx, t, s.a, s.b, s.c, spare)
}

// Without a spare, the job waits for another node when --max-node-failures is given, and exits
// with 75 and the list of the excluded ones.
func TestTooFewAfterQuarantine(t *testing.T) {
	t.Parallel()
	j := flaky("--endpoint-wait", "15s")
	j.worker = append(j.worker, "--stubborn")
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

// A node falls silent twice, and the training saves in between: the node is excluded although it comes
// back each time, a spare takes its place, and the two losses cost one restart for failures of the
// infrastructure: no more are allowed. The coordinating trainer is killed and started again: the node is
// still excluded, by the log.
func TestNodeLostAgainQuarantined(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, threeNodes())
	j := twoWithin(calm)
	j.more, j.worker = []string{"--max-node-failures", "2", "--max-restarts", "0", "--max-infra-restarts", "1"}, []string{"--stubborn"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	s.group(0, 25)
	s.freezes("b", 1)
	check(t, s.node("b").thaw())
	s.on(s.group(1, 25), "a", "b")
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, `msg="node joined" node=2`))
	s.freezes("b", 2)
	s.on(s.group(2, 12), "a", "c")
	check(t, s.node("b").thaw())
	s.excludedFor(s.b, "it was lost 2 times and no other node was; at last nothing was received for")
	s.b = s.launch("b")
	s.excludedFor(s.b, "it was lost 2 times")

	s.job.more[len(s.job.more)-1] = "-1" // the budget of the next coordinator is not the matter
	check(t, s.a.kill())
	must[int](t)(s.a.code(s.ctx))
	s.a = s.launch("a")
	check(t, s.a.prints(s.ctx, "node excluded"))
	s.b = s.launch("b")
	s.excludedFor(s.b, "it was lost 2 times")
	s.on(s.group(3, 12), "a", "c")
	s.ends(s.ctx, t, s.a, s.c)
	if got := s.nodeStates()["b"]; !strings.HasPrefix(got, "excluded: it was lost 2 times and no other node was; at last nothing was received for") {
		t.Errorf("node b is %q", got)
	}
}

// freezes freezes a node until it is lost for the n-th time.
func (s *scene) freezes(name string, n int) {
	s.t.Helper()
	check(s.t, s.node(name).freeze())
	check(s.t, await(s.ctx, "loss of "+name, func() (bool, error) {
		return strings.Count(s.a.log.String(), `msg="node lost" node=1`) >= n, nil
	}))
}
