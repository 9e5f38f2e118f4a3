//go:build testbed || outlive

package main

import (
	"errors"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// sealedOnly is a job on a and b, with the spare c, whose slots have copies. It returns a save
// that all ranks have sealed, and of which b has copied its slots and written nothing: the disk
// of b hangs.
func sealedOnly(t *testing.T) (s *scene, save string) {
	t.Helper()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c"}, disk: netfs.NFS()})
	j := steady(twoNodes()) // no other node is lost
	j.more, j.worker = []string{"--replicas", "1"}, []string{"--stubborn"}
	s = &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	s.group(0, 12)
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, "node=2"))

	disk := s.node("b").Disk(sharedAt)
	disk.Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite, netfs.OpFsync}, Hang: true})
	check(t, await(ctx, "a save that b has sealed and copied and not written", func() (bool, error) {
		all, err := s.eventsFrom("a")
		for _, copied := range of(all, "replica.node") {
			is := func(e event) bool { return e.Data.Checkpoint == copied.Data.Checkpoint }
			if copied.Data.Node != 0 || !slices.ContainsFunc(of(all, "checkpoint.staged"), is) {
				continue
			}
			if !slices.ContainsFunc(of(all, "checkpoint.committed"), is) && disk.Counters().Hanging > 0 {
				save = copied.Data.Checkpoint
			}
		}
		return save != "", err
	}))
	return s, save
}

// committed checks that a save was committed, from a, and not aborted.
func (s *scene) committed(save string) {
	s.t.Helper()
	all := must[[]event](s.t)(s.eventsFrom("a"))
	if !slices.ContainsFunc(of(all, "checkpoint.committed"), func(e event) bool { return e.Data.Checkpoint == save }) {
		s.t.Errorf("%s, sealed on all ranks before b was lost, is not committed", save)
	}
	for _, e := range of(all, "checkpoint.aborted") {
		if e.Data.Checkpoint == save {
			s.t.Errorf("%s is aborted: %s", save, e.Data.Reason)
		}
	}
}

// A node loses its power after all ranks have sealed a save, and before it has written any of
// its files: its disk hangs. Its partner has the slots and writes them, the save is committed,
// and the next group resumes from it, byte for byte.
func TestPowerOffAfterSeal(t *testing.T) {
	t.Parallel()
	s, save := sealedOnly(t)
	last := s.newest()
	check(t, s.node("b").PowerOff())
	s.on(s.group(last, 12), "a", "c")
	s.committed(save)
	s.ends(s.ctx, t, s.a, s.c)
}

// A node is cut off in the same state, and lives. The writes that its disk held back reach the
// shared directory after its partner has written in its place. They change no file of the
// checkpoint.
func TestCutOffAfterSeal(t *testing.T) {
	t.Parallel()
	s, save := sealedOnly(t)
	disk := s.node("b").Disk(sharedAt)
	last := s.newest()
	s.cut("b")
	s.on(s.group(last, 12), "a", "c")
	s.committed(save)
	disk.Heal()
	check(t, await(s.ctx, "the writes of b", func() (bool, error) { return disk.Counters().Hanging == 0, nil }))
	s.group(last, 40)
	s.heal("b")
	check(t, s.a.prints(s.ctx, "node rejoined"))
	s.ends(s.ctx, t, s.a, s.b, s.c)
}

// Two of three nodes lose their power at the same time, after all ranks have sealed a save and before these
// nodes have written any of its files: their disks hang. With two copies, the third node has the slots of
// both and writes them. The save is committed, and the group of one node continues from it.
func TestTwoPowerOffsAfterSeal(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, threeNodes())
	s := &scene{t: t, ctx: ctx, cluster: c, job: job{
		nnodes: "1:3", nproc: 1, timeout: firm, worker: []string{"--elastic", "--stubborn"},
		more: []string{"--replicas", "2", "--grow-interval", "0", "--last-call", "10s"},
	}}
	s.elastic = true
	s.b, s.c = s.launch("b"), s.launch("c")
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	group := s.group(0, 12)
	if len(group) != 3 {
		t.Fatalf("the group has %d ranks", len(group))
	}
	coordinator := ""
	for _, l := range group {
		if l.Node == 0 {
			coordinator = l.Host
		}
	}
	if coordinator != "a" {
		t.Fatalf("%s coordinates", coordinator)
	}
	writes := []netfs.Op{netfs.OpWrite, netfs.OpFsync}
	disks := []*netfs.Client{s.node("b").Disk(sharedAt), s.node("c").Disk(sharedAt)}
	for _, disk := range disks {
		disk.Break(netfs.Fault{Ops: writes, Hang: true})
	}
	save := ""
	check(t, await(ctx, "a save that b and c have sealed, copied to a and not written", func() (bool, error) {
		all, err := s.eventsFrom("a")
		copies := map[string]int{}
		for _, copied := range of(all, "replica.node") {
			if copied.Data.Node == 0 {
				copies[copied.Data.Checkpoint]++
			}
		}
		for _, staged := range of(all, "checkpoint.staged") {
			is := func(e event) bool { return e.Data.Checkpoint == staged.Data.Checkpoint }
			if copies[staged.Data.Checkpoint] == 2 && !slices.ContainsFunc(of(all, "checkpoint.committed"), is) {
				save = staged.Data.Checkpoint
			}
		}
		hangs := disks[0].Counters().Hanging > 0 && disks[1].Counters().Hanging > 0
		return save != "" && hangs, err
	}))
	last := s.newest()
	check(t, errors.Join(s.node("b").PowerOff(), s.node("c").PowerOff()))
	s.on(s.group(last, 12), "a")
	s.committed(save)
	s.ends(s.ctx, t, s.a)
}
