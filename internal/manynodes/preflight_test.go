//go:build testbed || outlive

package main

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// slow is the rate of a port of 100 Mbit/s, in bytes per second.
const slow = 100e6 / 8

// The tests of the preflight run alone: what else the machine does is measured too.

// withSlowNode starts a job on four nodes. Node c has a slow port.
func withSlowNode(t *testing.T, j job) *scene {
	t.Helper()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	for _, other := range []string{"a", "b", "d"} {
		c.bed.Switch().UpdateBoth("c", other, func(c *ethernet.Cable) { c.Rate = slow })
	}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	all := must[[]*trainer](t)(c.startAll(ctx, j, "a", "b", "c", "d"))
	s.a, s.b, s.c = all[0], all[1], all[2]
	check(t, s.a.prints(ctx, "msg=preflight"))
	took := regexp.MustCompile(`msg=preflight nodes=4 bad=1 .* took=(\S+)`).FindStringSubmatch(s.a.log.String())
	if took == nil {
		t.Fatal("the preflight has not found one bad node of four")
	}
	if d := must[time.Duration](t)(time.ParseDuration(took[1])); d > 10*time.Second {
		t.Errorf("the preflight took %v", d)
	}
	t.Log(took[0])
	return s
}

// Of four nodes, the one with a port of 100 Mbit/s is excluded, its partners are not, and the job
// trains on three.
func TestPreflightFindsSlowNode(t *testing.T) {
	s := withSlowNode(t, job{nnodes: "3:4", nproc: 1, timeout: calm, more: []string{"--preflight", "--last-call", "1s"}})
	group := s.group(0, 12)
	hosts := map[string]bool{}
	for _, l := range group {
		hosts[l.Host] = true
	}
	if len(group) != 3 || hosts["c"] {
		t.Errorf("the group runs on %v", hosts)
	}
	if code := must[int](t)(s.c.code(s.ctx)); code != 1 || !strings.Contains(s.c.log.String(), "excluded from the job: its network has") {
		t.Errorf("the trainer on c exits with %d", code)
	}
	s.ends(s.ctx, t, s.a, s.b)
	var l struct {
		Nodes []struct {
			Host, State, Why string
			Rate             int64 `json:"bytes_per_second"`
		}
	}
	check(t, json.Unmarshal(must[[]byte](t)(s.ckptstore(s.ctx, "nodes", run, "--json")), &l))
	for _, n := range l.Nodes {
		t.Logf("%+v", n)
		bad := n.Host == "c"
		if bad != (n.State == "excluded") || n.Rate <= 0 || bad != (n.Rate < 2*slow) {
			t.Errorf("%+v", n)
		}
	}
	if len(l.Nodes) != 4 {
		t.Errorf("%d nodes", len(l.Nodes))
	}
}

// A node that joins later is measured before the group grows by it. Node c has a slow port: three
// nodes continue without it.
func TestPreflightOfJoiner(t *testing.T) {
	j := job{
		nnodes: "3:4", nproc: 1, timeout: firm, worker: []string{"--elastic"},
		more: []string{"--preflight", "--last-call", "1s", "--grow-interval", "500ms", "--preempt-grace", "4s", "--max-restarts", "0"},
	}
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	for _, other := range []string{"a", "b", "d"} {
		c.bed.Switch().UpdateBoth("c", other, func(c *ethernet.Cable) { c.Rate = slow })
	}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.elastic = true
	all := must[[]*trainer](t)(c.startAll(ctx, j, "a", "b", "d"))
	s.a = all[0]
	s.group(0, 25)
	s.c = s.launch("c")
	if code := must[int](t)(s.c.code(s.ctx)); code != 1 || !strings.Contains(s.c.log.String(), "excluded from the job: its network has") {
		t.Errorf("the trainer on c exits with %d", code)
	}
	if group := s.group(1, 25); len(group) != 3 {
		t.Errorf("%d ranks", len(group))
	}
	s.ends(s.ctx, t, all...)
}

// Without a spare, a bad node stays with a warning.
func TestPreflightWithoutSpare(t *testing.T) {
	s := withSlowNode(t, job{nnodes: "4", nproc: 1, timeout: calm, more: []string{"--preflight"}})
	if group := s.group(0, 12); len(group) != 4 {
		t.Errorf("%d ranks", len(group))
	}
	if log := s.a.log.String(); !regexp.MustCompile(`"bad node is not excluded" node=\d host=c .*no spare`).MatchString(log) || strings.Count(log, "bad node") != 1 {
		t.Error("the bad node is not named")
	}
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// With --max-node-failures 0, the preflight measures and warns, and excludes no node.
func TestPreflightExcludesNone(t *testing.T) {
	s := withSlowNode(t, job{nnodes: "3:4", nproc: 1, timeout: calm, more: []string{"--preflight", "--max-node-failures", "0", "--last-call", "1s"}})
	if group := s.group(0, 12); len(group) != 4 {
		t.Errorf("%d ranks", len(group))
	}
	if log := s.a.log.String(); !regexp.MustCompile(`"bad node is not excluded" node=\d host=c .*--max-node-failures is 0`).MatchString(log) {
		t.Error("the bad node is not named")
	}
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A job that is stopped during the preflight starts no group.
func TestPreflightStopped(t *testing.T) {
	j := twoWithin(calm)
	j.more = []string{"--preflight"}
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, j)
	check(t, s.a.prints(s.ctx, `msg="node joined" node=1`))
	check(t, unix.Kill(s.a.Process.Pid, unix.SIGTERM))
	must[int](t)(s.a.code(s.ctx))
	if log := s.a.log.String(); strings.Contains(log, "attempt started") {
		t.Error("a group was started")
	}
}

// With --max-node-failures, the job waits for another node, and exits with 75 and the list.
func TestPreflightTooFew(t *testing.T) {
	s := withSlowNode(t, job{nnodes: "4", nproc: 1, timeout: calm, more: []string{"--preflight", "--max-node-failures", "2", "--endpoint-wait", "15s"}})
	if code := must[int](t)(s.a.code(s.ctx)); code != 75 || !regexp.MustCompile(`excluded: node \d on c: its network has`).MatchString(s.a.log.String()) {
		t.Errorf("the trainer on a exits with %d", code)
	}
}
