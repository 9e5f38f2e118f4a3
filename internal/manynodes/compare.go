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

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// compareProgram is a worker that does nothing but collectives, under any launcher.
const compareProgram = `import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(8))
    time.sleep(0.02)
`

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
		{"worker killed", false, func(c *cluster) error { return c.killAny(c.node("b")) }},
		{"node killed", true, func(c *cluster) error { return c.node("b").PowerOff() }},
		{"link cut", true, func(c *cluster) error { c.cut("b"); return nil }},
		{"node frozen", true, func(c *cluster) error { return c.node("b").freeze() }},
	}
}

// compare measures how long it takes from a fault until a process of every rank was executed
// again, under the trainer and under torchrun in turn.
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
				for _, by := range []string{"trainer", "torchrun"} {
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
		fmt.Fprintf(o.out, "\nmedians of %d; --node-timeout %v\n%-16s %10s %10s\n", o.rounds, o.timeout, "", "trainer", "torchrun")
		for _, d := range disturbances() {
			if len(took[d.name+"trainer"]) > 0 {
				fmt.Fprintf(o.out, "%-16s %10s %10s\n", d.name, shown(median(took[d.name+"trainer"])), shown(median(took[d.name+"torchrun"])))
			}
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
			if err := c.executed(ctx, began); err != nil {
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
	err = c.executed(limited, at)
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return compareLimit, nil
	}
	return time.Duration(monotonic() - at), err
}

// executed waits until every rank has a process that was executed after a time.
func (c *cluster) executed(ctx context.Context, after int64) error {
	return await(ctx, "a process of each rank", func() (bool, error) { return c.sampler.ranksSince(after) >= 2*compareRanks, nil })
}

// launch starts the program on a node, by the trainer or by torchrun.
func (c *cluster) launch(ctx context.Context, by, python, program, name string, timeout time.Duration) error {
	env := []string{"OMP_NUM_THREADS=1", "USE_LIBUV=0"}
	if by == "trainer" {
		_, err := c.start(ctx, c.node(name), job{nnodes: "2", nproc: compareRanks, timeout: timeout, command: []string{python, program}, env: env})
		return err
	}
	args := []string{
		"-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", fmt.Sprint(compareRanks), "--max-restarts", "100", "--rdzv-backend", "c10d",
		"--rdzv-endpoint", fmt.Sprintf("%v:%d", c.nodes[0].Addr(), endpointPort), "--rdzv-id", run,
		"--rdzv-conf", fmt.Sprintf("is_host=%v,use_libuv=False", name == c.nodes[0].Name()), "--local-addr", c.node(name).Addr().String(), program,
	}
	_, err := c.execute(ctx, c.node(name), python, args, env)
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
