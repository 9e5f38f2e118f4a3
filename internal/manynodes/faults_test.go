//go:build testbed || outlive

package main

import (
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

func threeNodes() setting {
	return setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()}
}

// withSpare starts a job of two nodes on a and b, and then its spare c.
func withSpare(t *testing.T, j job) *scene {
	t.Helper()
	// A training that does not communicate does not notice that its node is cut off.
	j.worker = append(j.worker, "--stubborn")
	ctx, c := start(t, threeNodes())
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a = s.launch("a")
	s.b = s.launch("b")
	s.group(0, 12)
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, "node=2"))
	check(t, s.guarded("c"))
	return s
}

// pairWithin starts a job of two nodes with a T.
func pairWithin(t *testing.T, timeout time.Duration) *scene {
	t.Helper()
	return scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, twoWithin(timeout))
}

// A worker that dies ends its group, and the next one resumes on both nodes.
func TestWorkerKilled(t *testing.T) {
	t.Parallel()
	s := pairWithin(t, calm)
	for attempt := range 3 {
		group := s.group(attempt, 12)
		for _, l := range group {
			if l.Rank == 2 {
				s.killWorker(l)
			}
		}
	}
	group := s.group(3, 12)
	if group[0].Restart != 3 {
		t.Errorf("RESTART_COUNT is %d after 3 restarts", group[0].Restart)
	}
	s.ends(s.ctx, t, s.a, s.b)
}

// A node without power is replaced by a spare, which has waited.
func TestPowerOff(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	if n := s.workers("c"); n != 0 {
		t.Errorf("the spare has %d workers", n)
	}
	check(t, s.node("b").PowerOff())
	s.placed(1, "a", "c")
	s.ends(s.ctx, t, s.a, s.c)
}

// A node whose link is cut kills its workers before the group of its replacement starts.
// It joins again when the link is healed, as a spare.
func TestLinkCut(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(*cluster, string){
		"both ways": (*cluster).cut, "from the node": (*cluster).cutFrom, "to the node": (*cluster).cutTo,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := withSpare(t, twoNodes())
			cut(s.cluster, "b")
			s.placed(1, "a", "c")
			s.heal("b")
			check(t, s.a.prints(s.ctx, "node rejoined"))
			s.ends(s.ctx, t, s.a, s.b, s.c)
		})
	}
}

// A node with an index is cut off. After its loss, a node without one comes and takes the index. The first one joins
// again when the link is healed, as a spare with another index.
func TestIndexTakenMeanwhile(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, threeNodes())
	s := &scene{t: t, ctx: ctx, cluster: c, job: twoNodes()}
	s.job.worker = append(s.job.worker, "--stubborn")
	s.a = s.launch("a")
	s.job.more = []string{"--node-rank", "1"}
	s.b = s.launch("b")
	s.job.more = nil
	s.group(0, 12)
	s.cut("b")
	check(t, s.a.prints(ctx, "node lost"))
	s.c = s.launch("c")
	s.placed(1, "a", "c")
	s.heal("b")
	check(t, s.a.prints(ctx, `msg="node joined" node=2`))
	s.ends(ctx, t, s.a, s.b, s.c)
}

// A cut of about T/2 breaks connections, and may end the group or not. It is never the fault
// of a worker: a request of a rank that is lost with its connection is repeated.
func TestShortCuts(t *testing.T) {
	t.Parallel()
	j := twoNodes()
	j.more = []string{"--max-restarts", "0", "--max-infra-restarts", "-1"}
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, j)
	group := s.group(0, 12)
	for d := nodeTimeout / 4; d < nodeTimeout/2; d += nodeTimeout / 40 {
		s.cut("b")
		check(t, s.pass(d))
		s.heal("b")
		attempt := must[int](t)(s.moves(s.ctx, group[0].Attempt-1, s.a, s.b))
		group = s.group(attempt-1, 12)
	}
	s.ends(s.ctx, t, s.a, s.b)
}

// The guard of a node kills its workers when the trainer is stopped.
func TestAgentStopped(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	check(t, s.b.pause())
	check(t, s.noWorkers(s.ctx, s.node("b")))
	s.placed(1, "a", "c")
	check(t, s.b.resume())
	check(t, s.a.prints(s.ctx, "node rejoined"))
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A node that was frozen finds its group replaced.
func TestNodeFrozen(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	check(t, s.node("b").freeze())
	s.placed(1, "a", "c")
	check(t, s.node("b").thaw())
	check(t, s.noWorkers(s.ctx, s.node("b")))
	check(t, s.a.prints(s.ctx, "node rejoined"))
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// A coordinator that is stopped for less than T/2 costs no worker.
func TestCoordinatorStoppedBriefly(t *testing.T) {
	t.Parallel()
	const timeout = 2 * calm
	s := pairWithin(t, timeout)
	s.group(0, 12)
	check(t, s.a.pause())
	check(t, s.pass(timeout/4))
	check(t, s.a.resume())
	s.group(0, 60)
	if v := s.ends(s.ctx, t, s.a, s.b); v.Attempts != 1 {
		t.Errorf("%d attempts", v.Attempts)
	}
}

// A coordinator that is stopped for longer costs one restart at most, and no job.
func TestCoordinatorStopped(t *testing.T) {
	t.Parallel()
	s := pairWithin(t, firm)
	s.group(0, 12)
	check(t, s.a.pause())
	check(t, s.noWorkers(s.ctx, s.node("b")))
	check(t, s.pass(firm))
	check(t, s.a.resume())
	s.group(1, 12)
	if v := s.ends(s.ctx, t, s.a, s.b); v.Attempts != 2 {
		t.Errorf("%d attempts", v.Attempts)
	}
}

// The nodes of a coordinator that was killed kill their workers, and end with 75.
func TestCoordinatorKilled(t *testing.T) {
	t.Parallel()
	j := twoNodes()
	j.more = []string{"--endpoint-wait", "15s"} // also for the start of a, which may be slow
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, j)
	s.group(0, 12)
	check(t, s.a.kill())
	check(t, s.noWorkers(s.ctx, s.node("b")))
	if code := must[int](t)(s.b.code(s.ctx)); code != 75 {
		t.Errorf("the trainer on b exits with %d, want 75", code)
	}
	last := s.newest()
	s.a, s.b = s.launch("a"), s.launch("b")
	s.group(last, 12)
	s.ends(s.ctx, t, s.a, s.b)
}

// The nodes of a coordinator that was killed join the next one.
func TestCoordinatorStartedAgain(t *testing.T) {
	t.Parallel()
	s := pair(t)
	s.group(0, 12)
	check(t, s.a.kill())
	if code := must[int](t)(s.a.code(s.ctx)); code != -1 {
		t.Errorf("exit code %d", code)
	}
	last := s.newest()
	s.a = s.launch("a")
	s.placed(last, "a", "b")
	s.ends(s.ctx, t, s.a, s.b)
}

// A node that loses its power in the middle of a save aborts that save by its name.
func TestPowerOffInSave(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoNodes())
	// The files of b's ranks reach no disk from now on.
	s.node("b").Disk(sharedAt).Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite}, Hang: true})
	check(t, await(s.ctx, "a write that hangs", func() (bool, error) {
		return s.node("b").Disk(sharedAt).Counters().Hanging > 0, nil
	}))
	check(t, s.node("b").PowerOff())
	s.placed(1, "a", "c")
	check(t, s.a.prints(s.ctx, "checkpoint aborted"))
	s.ends(s.ctx, t, s.a, s.c)
}
