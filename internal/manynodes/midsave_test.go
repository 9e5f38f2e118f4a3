//go:build testbed || outlive

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// A node loses its power in the middle of a save, while another node of the group writes a
// file of the save that its disk delays. The log has the abort with the lost node's name.
// The save's files stay, and no group starts, until the other node has written; then the
// files are removed.
func TestPowerOffWhileAnotherWrites(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b", "c", "d"}, disk: netfs.NFS()})
	j := steady(twoNodes()) // the first abort is that of the lost node
	j.nnodes, j.worker = "3", []string{"--stubborn"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	check(t, s.a.prints(ctx, "node=1"))
	s.c = s.launch("c")
	s.group(0, 12)
	d := s.launch("d")
	check(t, s.a.prints(ctx, "node=3"))

	// Neither b nor c finishes a file of one save. If one of them had written its files of
	// the save before its disk broke, it is tried with another save.
	writing := func(name string) bool { return s.node(name).Disk(sharedAt).Counters().Hanging > 0 }
	for !writing("b") || !writing("c") {
		for _, name := range []string{"b", "c"} {
			s.node(name).Disk(sharedAt).Heal()
		}
		check(t, await(ctx, "the end of all writes", func() (bool, error) { return !writing("b") && !writing("c"), nil }))
		for _, name := range []string{"b", "c"} {
			s.node(name).Disk(sharedAt).Break(netfs.Fault{Ops: []netfs.Op{netfs.OpWrite}, Hang: true})
		}
		check(t, await(ctx, "a write that hangs", func() (bool, error) { return writing("b") || writing("c"), nil }))
		check(t, s.pass(nodeTimeout/4)) // for the other one
	}
	last := s.newest()
	check(t, s.node("b").PowerOff())

	var aborted event
	check(t, await(ctx, "an abort in the log", func() (bool, error) {
		all, err := s.eventsFrom("a")
		if some := of(all, "checkpoint.aborted"); len(some) > 0 {
			aborted = some[0]
		}
		return aborted.Type != "", err
	}))
	t.Logf("%s was aborted: %s", aborted.Data.Checkpoint, aborted.Data.Reason)
	if !strings.Contains(aborted.Data.Reason, "node 1 is lost") {
		t.Errorf("the reason names no lost node 1: %s", aborted.Data.Reason)
	}
	check(t, s.noWorkers(ctx, s.node("a")))
	check(t, s.noWorkers(ctx, s.node("c")))
	before := s.files(aborted.Data.Checkpoint)
	removals := s.node("a").Disk(sharedAt).Counters().Ops[netfs.OpRemove]
	check(t, s.pass(s.job.timeout))
	if lives := must[[]life](t)(readLives(s.lives, last)); !writing("c") || len(lives) > 0 {
		t.Errorf("c writes: %v; %d ranks of the next group run", writing("c"), len(lives))
	}
	if after := s.files(aborted.Data.Checkpoint); len(before) == 0 || !slices.Equal(before, after) {
		t.Errorf("while c writes, the save's files are %q, then %q", before, after)
	}
	if n := s.node("a").Disk(sharedAt).Counters().Ops[netfs.OpRemove]; n != removals {
		t.Errorf("a has removed %d files while c writes", n-removals)
	}
	s.node("c").Disk(sharedAt).Heal()
	s.on(s.group(last, 12), "a", "d", "c")
	check(t, await(ctx, "the removal of the save's files", func() (bool, error) {
		return len(s.files(aborted.Data.Checkpoint)) == 0, nil
	}))
	s.ends(ctx, t, s.a, s.c, d)
}

// files returns the files of a checkpoint, as the server of the disk has them.
func (s *scene) files(checkpoint string) []string {
	s.t.Helper()
	names := must[[]string](s.t)(filepath.Glob(filepath.Join(s.shared("store"), "data", run, "main", checkpoint, "*")))
	return slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Stat(name)
		return err != nil || info.IsDir()
	})
}

// eventsFrom returns the events of the run as far as they are in the log, from the node
// that owns it.
func (s *scene) eventsFrom(name string) (all []event, err error) {
	out, err := s.node(name).Command(s.ctx, filepath.Join(s.bin, "ckptstore"), "events", run, "-o", "jsonl", "--store", storeAt).Output()
	for line := range bytes.Lines(out) {
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, err
}
