//go:build testbed || outlive

package main

import (
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// threeEqual is a job of three nodes.
func threeEqual(more ...string) job {
	return job{nnodes: "3", nproc: 1, timeout: calm, more: more}
}

// One of three nodes takes four times as long for its work as the others, which wait for it: the
// ranks report together. It alone is named, once, and it stays in the job.
func TestSlowNodeNamed(t *testing.T) {
	t.Parallel()
	j := threeEqual()
	j.worker = []string{"--work", "2000", "--slow-on", "b"}
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	all := must[[]*trainer](t)(c.startAll(ctx, j, "a", "b", "c"))
	s.a = all[0]
	group := s.group(0, 60)
	slow := -1
	for _, l := range group {
		if l.Host == "b" {
			slow = l.Node
		}
	}
	check(t, s.a.prints(ctx, `msg="node is slow"`))
	s.ends(ctx, t, all...)
	facts := of(s.events(), "node.slow")
	for _, f := range facts {
		t.Logf("%+v", f.Data)
	}
	if len(facts) != 1 || facts[0].Data.Node != slow || facts[0].Data.Over || facts[0].Data.By != "busy" || facts[0].Data.Seconds < 2*facts[0].Data.Others {
		t.Errorf("%d facts; node %d, on b, is slow", len(facts), slow)
	}
	if n := len(of(s.events(), "group.started")); n != 1 {
		t.Errorf("%d groups", n)
	}
}

// Nodes whose work is equal are not named.
func TestEqualNodesNotNamed(t *testing.T) {
	t.Parallel()
	j := threeEqual()
	j.worker = []string{"--work", "2000"}
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	all := must[[]*trainer](t)(c.startAll(ctx, j, "a", "b", "c"))
	s.a = all[0]
	s.group(0, 60)
	s.ends(ctx, t, all...)
	if facts := of(s.events(), "node.slow"); len(facts) > 0 {
		t.Errorf("facts %+v", facts)
	}
}

// The shared memory of one of three nodes is full, of what other programs left there: the node finds
// it out, and is excluded with the reason before it trains. The others are not.
func TestPreflightFindsFullMemory(t *testing.T) {
	j := job{nnodes: "2:3", nproc: 1, timeout: calm, more: []string{"--preflight", "--last-call", "1s"}}
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	if out, err := s.node("b").Command(ctx, "/bin/sh", "-c", "head -c 60000000 /dev/zero >/dev/shm/left").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	all := must[[]*trainer](t)(c.startAll(ctx, j, "a", "b", "c"))
	s.a, s.b, s.c = all[0], all[1], all[2]
	group := s.group(0, 12)
	hosts := map[string]bool{}
	for _, l := range group {
		hosts[l.Host] = true
	}
	if len(group) != 2 || hosts["b"] {
		t.Errorf("the group runs on %v", hosts)
	}
	if code := must[int](t)(s.b.code(ctx)); code != 1 || !strings.Contains(s.b.log.String(), "excluded from the job: its shared memory is bad: /dev/shm has no room for 16 MiB") {
		t.Errorf("the trainer on b exits with %d", code)
	}
	s.ends(ctx, t, s.a, s.c)
	for host, state := range s.nodeStates() {
		if bad := host == "b"; bad != strings.HasPrefix(state, "excluded: its shared memory is bad") {
			t.Errorf("node %s is %q", host, state)
		}
	}
	clocks := 0
	for _, e := range of(s.events(), "job.node_measured") {
		if e.Data.Clock != nil && *e.Data.Clock == 0 {
			clocks++
		}
	}
	if clocks != 3 { // they are of one machine
		t.Errorf("the clocks of %d nodes are equal", clocks)
	}
}
