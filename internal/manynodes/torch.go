package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// torchSteps is the length of a training by PyTorch. A run that survives its fault ends
// earlier.
const torchSteps = 2000

// torchLimit bounds one training, with its starts of PyTorch.
const torchLimit = 3 * time.Minute

// act is one fault of a training by PyTorch.
type act struct {
	name  string
	nodes int // of the group; node c is a spare if there are two
	do    func(context.Context, *cluster, map[string]*trainer) error
	undo  func(*cluster) error // after the next group has trained; may be nil
}

// acts are what a real training must survive.
func acts() []act {
	heal := func(c *cluster) error { c.heal("b"); return nil }
	cutBy := func(how func(*cluster, string)) func(context.Context, *cluster, map[string]*trainer) error {
		return func(_ context.Context, c *cluster, _ map[string]*trainer) error { how(c, "b"); return nil }
	}
	kill := func(_ context.Context, c *cluster, _ map[string]*trainer) error { return c.killAny(c.node("b")) }
	return []act{
		{"worker killed", 2, kill, nil},
		{"node killed", 2, func(_ context.Context, c *cluster, _ map[string]*trainer) error { return c.node("b").PowerOff() }, nil},
		{"link cut", 2, cutBy((*cluster).cut), heal},
		{"link cut from the node", 2, cutBy((*cluster).cutFrom), heal},
		{"link cut to the node", 2, cutBy((*cluster).cutTo), heal},
		{
			"node frozen", 2,
			func(_ context.Context, c *cluster, _ map[string]*trainer) error { return c.node("b").freeze() },
			func(c *cluster) error { return c.node("b").thaw() },
		},
		{"worker of three nodes killed", 3, kill, nil},
		{
			"link of three nodes cut", 3,
			func(ctx context.Context, c *cluster, _ map[string]*trainer) error {
				c.cut("b")
				err := c.noWorkers(ctx, c.node("b"))
				c.heal("b")
				return err
			}, nil,
		},
	}
}

// torch trains with PyTorch over several nodes, once for each fault, and compares the
// losses with those of a training without one.
func (o options) torch(ctx context.Context) error {
	return o.inDirectory(func(dir string) error {
		bin, err := o.programsOf(ctx, dir)
		if err != nil {
			return err
		}
		python, err := exec.LookPath(o.python)
		if err != nil {
			return err
		}
		want := map[int][]string{}
		for _, a := range acts() {
			if o.only != "" && o.only != a.name {
				continue
			}
			if want[a.nodes] == nil {
				if want[a.nodes], err = o.unbrokenTorch(ctx, bin, filepath.Join(dir, fmt.Sprint("unbroken-", a.nodes)), python, a.nodes); err != nil {
					return fmt.Errorf("an unbroken training on %d nodes: %w", a.nodes, err)
				}
			}
			began := time.Now()
			v, err := o.tortured(ctx, bin, filepath.Join(dir, fmt.Sprintf("%d-%s", a.nodes, a.name)), python, a, want[a.nodes])
			if err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
			text, err := json.Marshal(v)
			if err != nil {
				return err
			}
			fmt.Fprintf(o.out, "%s: %d nodes, %.1f s: %s\n", a.name, a.nodes, time.Since(began).Seconds(), text)
			if len(v.Findings) > 0 {
				return fmt.Errorf("%s: %d findings", a.name, len(v.Findings))
			}
		}
		return nil
	})
}

// torchJob is a training of one rank on each node.
func (o options) torchJob(python string, nodes, steps int) (job, error) {
	source, err := filepath.Abs(o.source)
	if err != nil {
		return job{}, err
	}
	program := filepath.Join(source, "python", "tests", "torch", "many_nodes.py")
	return job{
		nnodes: fmt.Sprint(nodes), nproc: 1, timeout: o.timeout,
		command: []string{python, program, livesAt, "5", fmt.Sprint(steps)},
		// Gloo finds its address by the host's name. OMP has one thread, so that sums
		// have one order.
		env: []string{"OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1"},
	}, nil
}

func (o options) torchCluster(ctx context.Context, bin, dir string) (*cluster, error) {
	return newCluster(ctx, setting{bin: bin, dir: dir, nodes: []string{"a", "b", "c"}, seed: o.seed, disk: netfs.NFS()})
}

// unbrokenTorch returns the losses of a training that nothing disturbs.
func (o options) unbrokenTorch(ctx context.Context, bin, dir, python string, nodes int) (losses []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, torchLimit)
	defer cancel()
	c, err := o.torchCluster(ctx, bin, dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.close() }()
	const steps = 120
	j, err := o.torchJob(python, nodes, steps)
	if err != nil {
		return nil, err
	}
	all, err := c.startAll(ctx, j, []string{"a", "b", "c"}[:nodes]...)
	if err != nil {
		return nil, err
	}
	for _, t := range all {
		if code, err := t.code(ctx); err != nil || code != 0 {
			return nil, fmt.Errorf("the trainer on %s ends with %d, %w:\n%s", t.on.Name(), code, err, t.log)
		}
	}
	lives, err := readLives(c.lives, 0)
	if err != nil {
		return nil, err
	}
	for _, line := range lives[0].Lines {
		if line.What == whatStep {
			losses = append(losses, line.Loss)
		}
	}
	if len(losses) != steps {
		return nil, fmt.Errorf("%d losses of %d steps", len(losses), steps)
	}
	return losses, nil
}

// tortured trains with one fault.
func (o options) tortured(ctx context.Context, bin, dir, python string, a act, want []string) (v verdict, err error) {
	ctx, cancel := context.WithTimeout(ctx, torchLimit)
	defer cancel()
	c, err := o.torchCluster(ctx, bin, dir)
	if err != nil {
		return v, err
	}
	c.want = want
	defer func() {
		if cerr := c.close(); err == nil {
			err = cerr
		}
	}()
	j, err := o.torchJob(python, a.nodes, torchSteps)
	if err != nil {
		return v, err
	}
	trainers := map[string]*trainer{}
	for i, name := range []string{"a", "b", "c"} {
		if i == 2 && a.nodes == 2 { // the spare comes last
			if _, err := c.trains(ctx, 0, 7); err != nil {
				return v, err
			}
		}
		if trainers[name], err = c.start(ctx, c.node(name), j); err != nil {
			return v, err
		}
	}
	first, err := c.trains(ctx, 0, 7)
	if err != nil {
		return v, err
	}
	if first[0].Attempt != 1 {
		v.find("attempt %d trains first", first[0].Attempt)
	}
	if err := a.do(ctx, c, trainers); err != nil {
		return v, err
	}
	if _, err := c.trains(ctx, first[0].Attempt, 7); err != nil {
		return v, err
	}
	if a.undo != nil {
		if err := a.undo(c); err != nil {
			return v, err
		}
	}
	if err := c.finish(); err != nil {
		return v, err
	}
	for name, t := range trainers {
		if a.name == "node killed" && name == "b" {
			continue
		}
		code, err := t.code(ctx)
		if err != nil {
			return v, err
		}
		if code != 0 {
			v.find("the trainer on %s ends with %d: %s", name, code, t.log)
		}
	}
	judged, err := c.judge(ctx, o.timeout/2)
	judged.Findings = append(judged.Findings, v.Findings...)
	return judged, err
}
