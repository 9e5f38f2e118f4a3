//go:build testbed || outlive

package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// programs is the directory of the programs under test.
var programs string

func TestMain(m *testing.M) {
	testbed.Main()
	if run := ranks(os.Args); run != nil {
		if err := run(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 2 && os.Args[1] == serverVerb {
		if err := natstest.ServePeer(os.Args[2], neverEnds{}, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == loadVerb {
		if err := loadLog(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	// Tests wait for timeouts of nodes nearly all of their time.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	var err error
	if programs, err = os.MkdirTemp("", "manynodes-bin-"); err != nil {
		panic(err)
	}
	if dir := os.Getenv("MANYNODES_BIN"); dir != "" {
		programs = dir
	} else if out, err := exec.Command("go", "build", "-ldflags=-w", "-tags", skewTag, "-o", programs+"/", "../../cmd/ckptstore", "../../cmd/trainer").CombinedOutput(); err != nil {
		panic(fmt.Sprintf("%v\n%s", err, out))
	}
	goleak.VerifyTestMain(m)
}

const (
	limit       = 240 * time.Second // of a test
	nodeTimeout = 2 * time.Second
	// A busy machine can stop a process for a second, which is T/2 of nodeTimeout: the node is silent then, and its group
	// ends. firm and calm are T of scenes that would take this for their fault: firm if T must pass or attempts are counted, calm otherwise.
	firm = 4 * nodeTimeout
	calm = 10 * nodeTimeout
)

// start returns a cluster of nodes. What it did is judged when the test ends well.
func start(t *testing.T, s setting) (context.Context, *cluster) {
	t.Helper()
	return startFor(t, s, limit+longest)
}

// startFor is start for a test that takes longer than others.
func startFor(t *testing.T, s setting, most time.Duration) (context.Context, *cluster) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), most)
	s.bin = programs
	var err error
	if s.dir, err = os.MkdirTemp("", "manynodes-"); err != nil { //nolint:usetesting // kept if the test fails
		t.Fatal(err)
	}
	c, err := newCluster(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := c.close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("everything is in %s", s.dir)
			for _, tr := range c.trainers {
				t.Logf("trainer on %s:\n%s", tr.on.Name(), tr.log)
			}
			return
		}
		_ = os.RemoveAll(s.dir)
	})
	return ctx, c
}

func must[T any](t *testing.T) func(v T, err error) T {
	t.Helper()
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ends has the job finish and judges the cluster.
func (c *cluster) ends(ctx context.Context, t *testing.T, trainers ...*trainer) verdict {
	t.Helper()
	check(t, c.finish())
	return c.over(ctx, t, trainers...)
}

// over waits until the job has ended by itself and judges the cluster.
func (c *cluster) over(ctx context.Context, t *testing.T, trainers ...*trainer) verdict {
	t.Helper()
	for _, tr := range trainers {
		if code := must[int](t)(tr.code(ctx)); code != 0 {
			t.Errorf("the trainer on %s exits with %d", tr.on.Name(), code)
		}
	}
	v := must[verdict](t)(c.judge(ctx, nodeTimeout/2))
	for _, f := range v.Findings {
		t.Error(f)
	}
	t.Logf("%+v", v)
	return v
}

func twoNodes() job { return twoWithin(nodeTimeout) }

// twoWithin is a job of two nodes with a T.
func twoWithin(timeout time.Duration) job { return job{nnodes: "2", nproc: 2, timeout: timeout} }

// A job over two nodes saves, reports and exchanges, and ends.
func TestTwoNodes(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()})
	all := must[[]*trainer](t)(c.startAll(ctx, twoWithin(calm), "a", "b"))
	must[[]life](t)(c.trains(ctx, 0, 25))
	if v := c.ends(ctx, t, all...); v.Saved < 2 || v.Attempts != 1 {
		t.Errorf("%+v", v)
	}
}
