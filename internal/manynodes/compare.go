package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// compareProgram is a worker that does nothing but collectives, under any launcher.
//
// After its first one, each rank leaves a file named by the time, CLOCK_MONOTONIC in nanoseconds, with
// its process ID and node.
const compareProgram = `import os, socket, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
at = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
name = "` + livesAt + `/step-%s-%s" % (os.environ["RANK"], at)
with open(name + ".tmp", "w") as f:
    f.write("%d %s" % (os.getpid(), socket.gethostname()))
os.rename(name + ".tmp", name)
while True:
    dist.all_reduce(torch.ones(8))
    time.sleep(0.02)
`

// launchers are what is compared: the trainer, with processes in reserve that have imported PyTorch,
// and torchrun.
var launchers = []string{"trainer", "preloaded", "torchrun"}

// compareRanks is the number of ranks on each of the two nodes.
const compareRanks = 2

// compareLimit bounds the wait for a new group. torchrun does not notice some faults at all.
const compareLimit = 60 * time.Second

// disturbance is one fault of node b that is measured.
type disturbance struct {
	name  string
	spare bool // node c waits for a place
	do    func(*cluster) error
}

func disturbances() []disturbance {
	return []disturbance{
		{"worker killed", false, func(c *cluster) error { return c.killStepped(c.node("b")) }},
		{"node killed", true, func(c *cluster) error { return c.node("b").PowerOff() }},
		{"link cut", true, func(c *cluster) error { c.cut("b"); return nil }},
		{"node frozen", true, func(c *cluster) error { return c.node("b").freeze() }},
	}
}

// compare measures how long it takes from a fault until every rank has done the first step of a new
// group, under each launcher in turn.
func (o options) compare(ctx context.Context) error {
	return o.inDirectory(func(dir string) error {
		bin, err := o.programsOf(ctx, dir)
		if err != nil {
			return err
		}
		python, err := exec.LookPath(o.python)
		if err != nil {
			return err
		}
		took := map[string][]time.Duration{}
		for round := range o.rounds {
			for _, d := range disturbances() {
				if o.only != "" && o.only != d.name {
					continue
				}
				for _, by := range launchers {
					at := filepath.Join(dir, strings.ReplaceAll(fmt.Sprint(round, "-", d.name, "-", by), " ", "-"))
					t, err := o.restarts(ctx, setting{bin: bin, dir: at, nodes: []string{"a", "b", "c"}, disk: netfs.NFS()}, by, python, d)
					if err != nil {
						return fmt.Errorf("%s under %s: %w", d.name, by, err)
					}
					fmt.Fprintf(o.out, "round %d, %s, %s: %v\n", round+1, d.name, by, shown(t))
					took[d.name+by] = append(took[d.name+by], t)
				}
			}
		}
		fmt.Fprintf(o.out, "\nmedians of %d; --node-timeout %v\n%-16s %10s %10s %10s\n", o.rounds, o.timeout, "", launchers[0], launchers[1], launchers[2])
		for _, d := range disturbances() {
			if len(took[d.name+"trainer"]) == 0 {
				continue
			}
			fmt.Fprintf(o.out, "%-16s", d.name)
			for _, by := range launchers {
				fmt.Fprintf(o.out, " %10s", shown(median(took[d.name+by])))
			}
			fmt.Fprintln(o.out)
		}
		return nil
	})
}

func median(of []time.Duration) time.Duration {
	slices.Sort(of)
	return of[len(of)/2]
}

// shown formats a measured time. A time of [compareLimit] is a lower bound.
func shown(t time.Duration) string {
	if t >= compareLimit {
		return fmt.Sprintf("> %.0f s", compareLimit.Seconds())
	}
	return fmt.Sprintf("%.2f s", t.Seconds())
}

// restarts measures one fault.
func (o options) restarts(ctx context.Context, s setting, by, python string, d disturbance) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute+compareLimit)
	defer cancel()
	c, err := newCluster(ctx, s)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	program := filepath.Join(s.dir, "compare.py")
	if err := os.WriteFile(program, []byte(compareProgram), 0o600); err != nil {
		return 0, err
	}
	began := monotonic()
	for i, name := range s.nodes {
		if i == 2 && !d.spare {
			break
		}
		if i == 2 { // it comes when the group is complete
			if _, err := c.stepped(ctx, began); err != nil {
				return 0, err
			}
		}
		if err := c.launch(ctx, by, python, program, name, o.timeout); err != nil {
			return 0, err
		}
	}
	// A fault in the middle of the start of PyTorch would measure the start.
	if err := wait(ctx, 15*time.Second); err != nil {
		return 0, err
	}
	at := monotonic()
	if err := d.do(c); err != nil {
		return 0, err
	}
	limited, cancel := context.WithTimeout(ctx, compareLimit)
	defer cancel()
	last, err := c.stepped(limited, at)
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return compareLimit, nil
	}
	return time.Duration(last - at), err
}

// stepped waits until every rank has done a first step after a time, and returns when the last one
// had.
func (c *cluster) stepped(ctx context.Context, after int64) (last int64, err error) {
	err = await(ctx, "a first step of each rank", func() (bool, error) {
		names, err := filepath.Glob(filepath.Join(c.lives, "step-*"))
		ranks := map[int]bool{}
		last = 0
		for _, name := range names {
			var rank int
			var at int64
			if n, _ := fmt.Sscanf(filepath.Base(name), "step-%d-%d", &rank, &at); n == 2 && at > after && !strings.HasSuffix(name, ".tmp") {
				ranks[rank], last = true, max(last, at)
			}
		}
		return len(ranks) >= 2*compareRanks, err
	})
	return last, err
}

// killStepped kills a worker of a node that has done a step. A process in reserve that became a worker
// does not show its rank in the environment that it was executed with.
func (c *cluster) killStepped(m *machine) error {
	names, err := filepath.Glob(filepath.Join(c.lives, "step-*"))
	if err != nil {
		return err
	}
	all, err := m.Processes()
	if err != nil {
		return err
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for _, p := range all {
			if string(text) == fmt.Sprint(p.NodePID, " ", m.Name()) && p.State != "Z" {
				return unix.Kill(p.PID, unix.SIGKILL)
			}
		}
	}
	return fmt.Errorf("no worker on %s has done a step", m.Name())
}

// launch starts the program on a node, by the trainer or by torchrun.
func (c *cluster) launch(ctx context.Context, by, python, program, name string, timeout time.Duration) error {
	env := []string{"OMP_NUM_THREADS=1", "USE_LIBUV=0"}
	if by != "torchrun" {
		j := job{nnodes: "2", nproc: compareRanks, timeout: timeout, command: []string{python, program}, env: env}
		if by == "preloaded" {
			j.more = []string{"--preload", "torch,torch.distributed"}
		}
		_, err := c.start(ctx, c.node(name), j)
		return err
	}
	args := []string{
		"-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", fmt.Sprint(compareRanks), "--max-restarts", "100", "--rdzv-backend", "c10d",
		"--rdzv-endpoint", fmt.Sprintf("%v:%d", c.nodes[0].Addr(), endpointPort), "--rdzv-id", run,
		"--rdzv-conf", fmt.Sprintf("is_host=%v,use_libuv=False", name == c.nodes[0].Name()), "--local-addr", c.node(name).Addr().String(), program,
	}
	// By default the groups of a job share the store of the rendezvous. The ranks of a new one then find
	// there the addresses of the last group's, which are gone (PyTorch 2.15), and never meet.
	_, err := c.execute(ctx, c.node(name), python, args, append(env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"))
	return err
}

// wait passes a time of a measurement.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
