//go:build testbed || outlive

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// saves is a job that saves after each step.
func saves(steps int) job {
	j := twoWithin(calm)
	j.worker = []string{"--every", "1", "--steps", fmt.Sprint(steps)}
	return j
}

// Names that were missing are remembered for a minute, and no save is aborted for that.
func TestNegativeCache(t *testing.T) {
	t.Parallel()
	disk := netfs.NFS()
	disk.NegativeCache, disk.EntryCache, disk.ListingRevalidates = time.Minute, time.Minute, false
	const steps = 5
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: disk}, saves(steps))
	if v := s.over(s.ctx, t, s.a, s.b); v.Saved != steps || v.Aborted != 0 || v.Attempts != 1 {
		t.Errorf("%+v", v)
	}
}

// A command on a node looked into the store before the first job of several nodes made the
// directory where they meet. That name is remembered as missing for a minute, and the node joins.
func TestCommandBeforeTheJob(t *testing.T) {
	t.Parallel()
	disk := netfs.NFS()
	disk.NegativeCache, disk.EntryCache, disk.ListingRevalidates = time.Minute, time.Minute, false
	const steps = 5
	ctx, c := start(t, setting{nodes: []string{"a", "b"}, disk: disk})
	s := &scene{t: t, ctx: ctx, cluster: c, job: saves(steps)}
	for _, args := range [][]string{{"a", "init"}, {"b", "ls", "--offline"}, {"b", "ls"}} {
		out, err := s.node(args[0]).Command(ctx, filepath.Join(s.bin, "ckptstore"), append(args[1:], "--store", storeAt)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	s.a, s.b = s.launch("a"), s.launch("b")
	if v := s.over(ctx, t, s.a, s.b); v.Saved != steps || v.Aborted != 0 || v.Attempts != 1 {
		t.Errorf("%+v", v)
	}
}

// A node looked for directories of checkpoints before they existed, as a user does that
// waits for one.
func TestNamesSoughtEarly(t *testing.T) {
	t.Parallel()
	disk := netfs.NFS()
	disk.NegativeCache, disk.EntryCache = time.Minute, time.Minute
	s := scenario(t, setting{nodes: []string{"a", "b"}, disk: disk}, twoWithin(calm))
	s.group(0, 11)
	for _, name := range []string{"a", "b"} {
		early := s.node(name).Command(s.ctx, "sh", "-c", "for i in $(seq 20 10 200); do ls -d "+storeAt+"/data/run/main/step-$i.a1; done; true")
		out, err := early.Output()
		check(t, err)
		t.Logf("%s sees %q early", name, out)
	}
	s.group(0, 72)
	if v := s.ends(s.ctx, t, s.a, s.b); v.Saved < 7 || v.Aborted != 0 || v.Attempts != 1 {
		t.Errorf("%+v", v)
	}
}

// Locks that each node keeps for itself do not lead to two servers on one log: neither by
// the nodes of a job, nor by a command on another node.
func TestLocalLocks(t *testing.T) {
	t.Parallel()
	disk := netfs.NFS()
	disk.LocalLocks = true
	s := scenario(t, setting{nodes: []string{"a", "b", "c"}, disk: disk}, twoWithin(calm))
	s.group(0, 12)
	out, err := s.node("c").Command(s.ctx, filepath.Join(s.bin, "ckptstore"), "ls", "--store", storeAt, "--wait", "1s").CombinedOutput()
	t.Logf("ls on c: %v\n%s", err, out)
	text, err := os.ReadFile(filepath.Join(s.shared("store"), "owner.json"))
	t.Logf("%s %v", text, err)
	if !strings.Contains(string(text), `"host":"a"`) && !strings.Contains(string(text), `"host": "a"`) {
		t.Errorf("the owner is %s", text)
	}
	s.ends(s.ctx, t, s.a, s.b)
}
