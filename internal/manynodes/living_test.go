//go:build testbed || outlive

package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// living starts a job whose log has three copies, on a, b and c. Only b and c have ranks; a coordinates.
func living(t *testing.T, more ...string) *scene {
	t.Helper()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	// The log has a leader again, also on a busy machine, before the time has passed for which a node lives without it.
	s := &scene{t: t, ctx: ctx, cluster: c, job: job{nnodes: "3", nproc: 1, timeout: 2 * usualTimeout}}
	s.job.worker = []string{"--ringless", "--stubborn", "--pace", "20ms"}
	s.a = s.copyOn("a", "0", append([]string{"--coordinator-only"}, more...)...)
	s.b, s.c = s.copyOn("b", "1", more...), s.copyOn("c", "2", more...)
	return s
}

// goesOn waits until the group of attempt 1 has waited for more than a second after a fault, and trains and saves
// on. It returns how long the ranks have waited at most.
func (s *scene) goesOn(since int64) (gap time.Duration) {
	s.t.Helper()
	before := s.commits()
	check(s.t, await(s.ctx, "steps after the takeover", func() (bool, error) {
		for _, tr := range []*trainer{s.b, s.c} {
			if tr.gone() {
				s.t.Fatalf("the trainer on %s has ended", tr.on.Name())
			}
		}
		lives := must[[]life](s.t)(readLives(s.lives, 0))
		if i := slices.IndexFunc(lives, func(l life) bool { return l.Attempt != 1 }); i >= 0 {
			s.t.Fatalf("the group was restarted: rank %d of attempt %d", lives[i].Rank, lives[i].Attempt)
		}
		moved := 0
		for _, l := range lives {
			after, last := 0, since
			for _, line := range l.Lines {
				if line.What == whatStep && line.At > since {
					gap = max(gap, time.Duration(line.At-last))
					last = line.At
					after++
				}
			}
			if after > 60 && gap > time.Second {
				moved++
			}
		}
		return moved == len(lives) && s.commits() > before+1, nil
	}))
	return gap
}

// lived checks that the group lived through the loss of its coordinator, that no save was aborted, and that
// the log has one end of it. It returns the events.
func (s *scene) lived(v verdict) []event {
	s.t.Helper()
	if v.Attempts != 1 || v.Lives != 2 || v.Aborted > 0 {
		s.t.Errorf("%+v", v)
	}
	all := s.events()
	s.one(all)
	for _, kind := range []string{"group.stopped", "job.ended"} {
		if some := of(all, kind); len(some) != 1 {
			s.t.Errorf("%s is in the log %d times", kind, len(some))
		}
	}
	return all
}

// one checks that the job had one group, which one other node took over.
func (s *scene) one(all []event) {
	s.t.Helper()
	if n := len(of(all, "group.started")); n != 1 {
		s.t.Errorf("%d groups were started, want 1", n)
	}
	taken := of(all, "group.coordinator")
	if len(taken) != 1 || taken[0].Data.Node != 1 {
		s.t.Errorf("takeovers %+v, want one by node 1", taken)
	}
	if n := len(of(all, "job.started")); n != 1 {
		s.t.Errorf("%d jobs were started, want 1", n)
	}
	seen := map[int]bool{}
	for _, e := range of(all, "report.metrics") {
		seen[e.Data.Iteration] = true
	}
	for i := range len(seen) {
		if !seen[i+1] {
			s.t.Errorf("iteration %d of %d is not in the log", i+1, len(seen))
		}
	}
}

// The node of the coordinator, which has no ranks, loses its power. Another node coordinates the
// group, which trains on: no rank ends, and no step is lost.
func TestLivingGroupOutlivesCoordinator(t *testing.T) {
	t.Parallel()
	s := living(t)
	s.group(0, 60)
	lost := monotonic()
	check(t, s.node("a").PowerOff())
	t.Logf("the ranks have waited for %v", s.goesOn(lost))
	if v := s.ends(s.ctx, t, s.b, s.c); v.Attempts != 1 || v.Lives != 2 || v.Aborted > 0 {
		t.Errorf("%+v", v)
	}
	s.one(s.events())
}

// The coordinating trainer, without ranks, is frozen with its node until another one coordinates its
// group. When it continues, it decides and records nothing more about the group, and ends.
func TestPausedCoordinatorOfLivingGroup(t *testing.T) {
	t.Parallel()
	s := living(t)
	s.group(0, 60)
	lost := monotonic()
	check(t, s.node("a").freeze())
	t.Logf("the ranks have waited for %v", s.goesOn(lost))
	check(t, s.node("a").thaw())
	if code := must[int](t)(s.a.code(s.ctx)); code != 5 {
		t.Errorf("the trainer on a exits with %d, want 5", code)
	}
	must[int](t)(s.moves(s.ctx, 0, s.b, s.c))
	s.lived(s.ends(s.ctx, t, s.b, s.c))
}

// The coordinating trainer, without ranks, is cut off until another one coordinates its group, and has lost all nodes
// by then. When it reaches the log again, it records nothing about the group, whose saves are committed as before.
func TestCutOffCoordinatorOfLivingGroup(t *testing.T) {
	t.Parallel()
	s := living(t)
	s.group(0, 60)
	lost := monotonic()
	s.cut("a")
	t.Logf("the ranks have waited for %v", s.goesOn(lost))
	check(t, s.a.prints(s.ctx, "node lost"))
	s.heal("a")
	if code := must[int](t)(s.a.code(s.ctx)); code != 5 {
		t.Errorf("the trainer on a exits with %d, want 5", code)
	}
	before := s.commits()
	check(t, await(s.ctx, "commits after the takeover", func() (bool, error) { return s.commits() > before+1, nil }))
	all := s.lived(s.ends(s.ctx, t, s.b, s.c))
	if ended := of(all, "group.worker_exited"); len(ended) != 2 {
		t.Errorf("ends of ranks in the log: %+v", ended)
	}
}

// A save is under way when the coordinator's node loses its power: its ranks have sealed it, and those
// of one have not written their files. The next coordinator commits it.
func TestCoordinatorLostBetweenSealAndCommit(t *testing.T) {
	t.Parallel()
	s := living(t, "--log-replica-dir", "/tmp/log") // not on the disk that hangs
	s.group(0, 30)
	var save string
	disk := s.node("c").Disk(sharedAt)
	disk.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite, netfs.OpFsync}, Hang: true})
	check(t, await(s.ctx, "a save that all have sealed and that is not committed", func() (bool, error) {
		all, err := s.eventsFrom("a")
		for _, staged := range of(all, "checkpoint.staged") {
			is := func(e event) bool { return e.Data.Checkpoint == staged.Data.Checkpoint }
			if !slices.ContainsFunc(of(all, "checkpoint.committed"), is) {
				save = staged.Data.Checkpoint
			}
		}
		return save != "", err
	}))
	lost := monotonic()
	check(t, s.node("a").PowerOff())
	check(t, await(s.ctx, "a node that takes over", func() (bool, error) { return strings.Contains(s.b.log.String(), "living group continues"), nil }))
	disk.Heal()
	t.Logf("the ranks have waited for %v", s.goesOn(lost))
	all := must[[]event](t)(s.eventsFrom("b"))
	check(t, s.finish()) // the judge has no access to the copies of the log
	s.ended(s.b, s.c)
	s.one(all)
	if n := len(of(all, "checkpoint.aborted")); n > 0 {
		t.Errorf("%d saves were aborted", n)
	}
	if !slices.ContainsFunc(of(all, "checkpoint.committed"), func(e event) bool { return e.Data.Checkpoint == save }) {
		t.Errorf("%s, which was sealed, is not committed", save)
	}
}
