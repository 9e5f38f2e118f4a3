//go:build testbed || outlive

package main

import (
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// A node loses its power after all ranks have sealed a save, and before it has written any of
// its files: its disk hangs. Its partner has the slots and writes them, the save is committed,
// and the next group resumes from it, byte for byte.
func TestPowerOffAfterSeal(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	j := twoNodes()
	j.more, j.worker = []string{"--replicas", "1"}, []string{"--stubborn"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	s.group(0, 12)
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, "node=2"))

	s.node("b").Disk(sharedAt).Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite}, Hang: true})
	save := ""
	check(t, await(ctx, "a save that b has sealed and copied and not written", func() (bool, error) {
		all, err := s.eventsFrom("a")
		for _, copied := range of(all, "replica.node") {
			id := copied.Data.Checkpoint
			is := func(e event) bool { return e.Data.Checkpoint == id }
			if copied.Data.Node != 0 || !slices.ContainsFunc(of(all, "checkpoint.staged"), is) {
				continue
			}
			if !slices.ContainsFunc(of(all, "checkpoint.committed"), is) && s.node("b").Disk(sharedAt).Counters().Hanging > 0 {
				save = id
			}
		}
		return save != "", err
	}))
	check(t, s.node("b").PowerOff())

	group := s.group(1, 12)
	s.on(group, "a", "c")
	all := must[[]event](t)(s.eventsFrom("a"))
	ended := slices.ContainsFunc(of(all, "checkpoint.committed"), func(e event) bool { return e.Data.Checkpoint == save })
	if !ended {
		t.Errorf("%s, sealed on all ranks before b lost its power, is not committed", save)
	}
	for _, e := range of(all, "checkpoint.aborted") {
		if e.Data.Checkpoint == save {
			t.Errorf("%s is aborted: %s", save, e.Data.Reason)
		}
	}
	s.ends(ctx, t, s.a, s.c)
}
