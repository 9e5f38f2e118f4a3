//go:build outlive

package main

import (
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// A coordinator that is started again does not start a group while a node that it cannot
// reach may have workers of the earlier one.
func TestStartedAgainWithoutANode(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	last := s.newest()
	s.cut("b")
	check(t, s.a.kill())
	must[int](t)(s.a.code(s.ctx))
	s.a = s.launch("a")
	s.on(s.group(last, 12), "a", "c")
	s.ends(s.ctx, t, s.a, s.c)
}

// The coordinator is cut off: all workers of the other nodes die, and the job continues when
// the link is healed.
func TestCoordinatorCutOff(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	last := s.newest()
	s.cut("a")
	check(t, s.noWorkers(s.ctx, s.node("b")))
	check(t, s.a.prints(s.ctx, "node lost"))
	check(t, s.pass(nodeTimeout))
	s.heal("a")
	s.group(last, 12)
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// The coordinator's whole node is frozen for longer than T.
func TestCoordinatorFrozen(t *testing.T) {
	t.Parallel()
	s := withSpare(t, steady(twoNodes()))
	last := s.newest()
	check(t, s.node("a").freeze())
	check(t, s.noWorkers(s.ctx, s.node("b")))
	check(t, s.pass(2*s.job.timeout))
	check(t, s.node("a").thaw())
	s.group(last, 12)
	if v := s.ends(s.ctx, t, s.a, s.b, s.c); v.Attempts != last+1 {
		t.Errorf("%d attempts", v.Attempts)
	}
}

// The coordinator alone is stopped for 3 T.
func TestCoordinatorStoppedLong(t *testing.T) {
	t.Parallel()
	s := withSpare(t, steady(twoNodes()))
	last := s.newest()
	check(t, s.a.pause())
	check(t, s.pass(3*s.job.timeout))
	check(t, s.a.resume())
	s.group(last, 12)
	if v := s.ends(s.ctx, t, s.a, s.b, s.c); v.Attempts != last+1 {
		t.Errorf("%d attempts", v.Attempts)
	}
}

// A node comes back between T/2 and T: its workers are dead, so the group restarts on the
// same nodes.
func TestNodeFrozenBriefly(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	last := s.newest()
	check(t, s.node("b").freeze())
	check(t, s.pass(nodeTimeout*3/4))
	check(t, s.node("b").thaw())
	s.group(last, 12)
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A node is cut off in the middle of a write, and continues it after its group was
// replaced.
func TestCutInSave(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	disk := s.node("b").Disk(sharedAt)
	disk.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite}, Hang: true})
	check(t, await(s.ctx, "a write that hangs", func() (bool, error) { return disk.Counters().Hanging > 0, nil }))
	last := s.newest()
	s.cut("b")
	s.on(s.group(last, 25), "a", "c")
	disk.Heal()
	check(t, await(s.ctx, "the writes of b", func() (bool, error) { return disk.Counters().Hanging == 0, nil }))
	s.group(last, 60)
	s.heal("b")
	check(t, s.a.prints(s.ctx, "node rejoined"))
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A coordinator's node loses its power; a trainer that is started there again continues the job.
func TestCoordinatorPowerOff(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	last := s.newest()
	check(t, s.node("a").PowerOff())
	check(t, s.node("a").PowerOn(s.ctx))
	s.a = s.launch("a")
	s.group(last, 12)
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A node loses its power, and a trainer is started there again.
func TestNodeStartedAgain(t *testing.T) {
	t.Parallel()
	s := pair(t)
	s.group(0, 12)
	for range 3 {
		last := s.newest()
		check(t, s.node("b").PowerOff())
		check(t, s.node("b").PowerOn(s.ctx))
		s.b = s.launch("b")
		s.on(s.group(last, 12), "a", "b")
	}
	s.ends(s.ctx, t, s.a, s.b)
}

// A trainer on a node is killed, and started again at once.
func TestAgentKilled(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	last := s.newest()
	check(t, s.b.kill())
	s.b = s.launch("b")
	s.group(last, 12)
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// Data that was copied to each node is refused.
func TestCopiedDirectory(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b"}, copied: true})
	s := &scene{t: t, ctx: ctx, cluster: c, job: twoNodes()}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.job.more = []string{"--endpoint-wait", "10s"} // b looks for the data of a for half of it
	s.b = s.launch("b")
	code := must[int](t)(s.b.code(ctx))
	t.Logf("%d\n%s", code, s.b.log)
	if code != 64 || !strings.Contains(s.b.log.String(), storeAt) || !strings.Contains(s.b.log.String(), "node b") {
		t.Errorf("exit code %d", code)
	}
}
