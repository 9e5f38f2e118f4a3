//go:build testbed || outlive

package testbed_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

func itoa(n int) string { return strconv.Itoa(n) }

// comms counts the processes of a node by name.
func comms(t *testing.T, n *testbed.Node) map[string]int {
	t.Helper()
	all, err := n.Processes()
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, p := range all {
		count[p.Comm]++
	}
	return count
}

// TestFreeze: no process of a frozen node runs, by either freezer, and a process that
// was paused before stays so after the thaw.
func TestFreeze(t *testing.T) {
	for name, signals := range map[string]bool{"cgroup": false, "signals": true} {
		t.Run(name, func(t *testing.T) {
			ctx, bed := newBed(t, testbed.Options{Signals: signals})
			a := start(ctx, t, bed, "a")[0]
			// A tree that forks all the time, and a counter that shows whether it runs.
			c := a.Command(ctx, "/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >/dev/shm/n.new; mv /dev/shm/n.new /dev/shm/n; done")
			paused := a.Command(ctx, "/bin/sleep", "1000")
			for _, c := range []*testbed.Cmd{c, paused} {
				if err := c.Start(); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.Pause(paused.Process.Pid); err != nil {
				t.Fatal(err)
			}
			count := func() string { s, _ := read(t, a, "/dev/shm/n"); return s }
			eventually(t, "the counter", func() bool { return count() != "" })
			for range 3 {
				if err := a.Freeze(); err != nil {
					t.Fatal(err)
				}
				at, old := cpu(t, a), count()
				if err := a.Command(ctx, "/bin/true").Run(); !errors.Is(err, testbed.ErrFrozen) {
					t.Errorf("a command on a frozen node: %v", err)
				}
				for range 50 {
					if now := cpu(t, a); now != at || count() != old {
						t.Fatalf("a frozen node runs: %s %s, then %s %s", at, old, now, count())
					}
				}
				if err := a.Thaw(); err != nil {
					t.Fatal(err)
				}
				eventually(t, "the counter after a thaw", func() bool { return count() != old && count() != "" })
			}
			all, err := a.Processes()
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range all {
				if p.PID == paused.Process.Pid && p.State != "T" {
					t.Errorf("the paused process is in state %s", p.State)
				}
			}
			if err := a.Resume(paused.Process.Pid); err != nil {
				t.Fatal(err)
			}
			// A frozen node loses its power as well as any other.
			if err := a.Freeze(); err != nil {
				t.Fatal(err)
			}
			if err := a.PowerOff(); err != nil {
				t.Fatal(err)
			}
			for _, c := range []*testbed.Cmd{c, paused} {
				_ = c.Wait()
			}
		})
	}
}

// cpu describes the processes of a node and their state.
func cpu(t *testing.T, n *testbed.Node) string {
	t.Helper()
	all, err := n.Processes()
	if err != nil {
		t.Fatal(err)
	}
	var text []string
	for _, p := range all {
		if p.NodePID != 1 {
			text = append(text, itoa(p.PID)+" "+p.Comm)
		}
	}
	return strings.Join(text, ",")
}

// TestProcesses: every process of a node is listed with what identifies it.
func TestProcesses(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	a := start(ctx, t, bed, "a")[0]
	first := a.Command(ctx, "/bin/sleep", "1000")
	first.Env = append(first.Env, "RANK=3")
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the environment of sleep", func() bool {
		all, err := a.Processes()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if p.PID == first.Process.Pid && p.Comm == "sleep" && p.Getenv("RANK") == "3" && p.NodePID > 1 && p.Started > 0 {
				return len(all) == 2
			}
		}
		return false
	})
	if err := a.Pause(1); err == nil {
		t.Error("a process of the host can be paused")
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	if got := comms(t, a); got["sleep"] != 0 {
		t.Errorf("the processes are %v", got)
	}
}
