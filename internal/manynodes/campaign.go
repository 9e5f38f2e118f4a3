package main

import (
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// recovery bounds the time from the end of a fault to a group that trains.
const recovery = 90 * time.Second

// pace bounds the checkpoints of a long campaign. The server of the shared disk keeps a file
// open as long as the kernel of a node remembers it.
const pace = 20 * time.Millisecond

// options are the flags of all commands.
type options struct {
	faults   int
	duration time.Duration
	seed     uint64
	timeout  time.Duration
	skew     int // percent
	bin      string
	source   string
	keep     bool
	python   string
	only     string
	rounds   int
	link     int64
	adapts   bool
	out      io.Writer
}

// fault is one disturbance of a node.
type fault struct {
	Kind string        `json:"kind"`
	Node string        `json:"node"`
	For  time.Duration `json:"for"`
}

func (f fault) String() string { return fmt.Sprintf("%s %s for %v", f.Kind, f.Node, f.For) }

// The kinds of faults.
const (
	cutBoth  = "cut"
	cutTo    = "cut to"
	cutFrom  = "cut from"
	pauseOne = "pause the trainer of"
	freeze   = "freeze"
	killOne  = "kill a worker on"
)

// campaign is a job of two nodes with a spare, and faults of its nodes.
type campaign struct {
	*cluster
	options
	random   *rand.Rand
	rates    map[string]float64 // of the nodes' clocks
	trainers map[string]*trainer
}

// report is what a campaign prints.
type report struct {
	Seed    uint64             `json:"seed"`
	Timeout string             `json:"node_timeout"`
	Rates   map[string]float64 `json:"clock_rates"`
	Cores   int                `json:"cores"`
	Faults  map[string]int     `json:"faults"`
	Seconds float64            `json:"seconds"`
	verdict
}

// programsOf returns the directory of the programs. It builds them in dir if none is given.
func (o options) programsOf(ctx context.Context, dir string) (string, error) {
	if o.bin != "" {
		return filepath.Abs(o.bin)
	}
	dir = filepath.Join(dir, "bin")
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", skewTag, "-o", dir+"/", "./cmd/ckptstore", "./cmd/trainer")
	cmd.Dir = o.source
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the programs: %w\n%s", err, out)
	}
	return dir, nil
}

// inDirectory calls do with a directory of its own, which is kept if do fails.
func (o options) inDirectory(do func(dir string) error) error {
	dir, err := os.MkdirTemp("", "manynodes-")
	if err != nil {
		return err
	}
	err = do(dir)
	if err != nil || o.keep {
		fmt.Fprintf(o.out, "%s is kept\n", dir)
		return err
	}
	return os.RemoveAll(dir)
}

// run runs the campaign of the options.
func (o options) run(ctx context.Context) error {
	return o.inDirectory(func(dir string) error {
		bin, err := o.programsOf(ctx, dir)
		if err != nil {
			return err
		}
		if o.skew != 0 {
			if err := canSkew(bin); err != nil {
				return err
			}
		}
		c, err := newCluster(ctx, setting{bin: bin, dir: dir, nodes: []string{"a", "b", "c"}, seed: o.seed, disk: netfs.NFS()})
		if err != nil {
			return err
		}
		p := &campaign{
			cluster: c, options: o, rates: drawRates(o.seed, o.skew, c.names()),
			random: rand.New(rand.NewPCG(o.seed, 0)), trainers: map[string]*trainer{}, //nolint:gosec // for tests
		}
		r, err := p.disturb(ctx)
		err = errors.Join(err, c.close())
		enc := json.NewEncoder(o.out)
		enc.SetIndent("", "  ")
		if jerr := enc.Encode(r); err == nil {
			err = jerr
		}
		if n := len(r.Findings); n > 0 {
			err = errors.Join(err, fmt.Errorf("%d findings, with seed %d", n, o.seed))
		}
		return err
	})
}

// disturb runs the job, the faults one after the other, and judges the whole.
func (p *campaign) disturb(ctx context.Context) (r report, err error) {
	r = report{Seed: p.seed, Timeout: p.timeout.String(), Rates: p.rates, Cores: runtime.NumCPU(), Faults: map[string]int{}}
	j := job{
		nnodes: "2", nproc: 2, timeout: p.timeout,
		more: []string{"--max-restarts", "-1", "--max-infra-restarts", "-1", "--max-node-failures", "0"}, worker: []string{"--stubborn", "--pace", pace.String()},
		rates: p.rates,
	}
	for _, m := range p.nodes {
		if p.trainers[m.Name()], err = p.start(ctx, m, j); err != nil {
			return r, err
		}
	}
	began := time.Now()
	attempt, err := p.recovered(ctx, 0)
	for n := 0; err == nil && n < p.faults && (p.duration == 0 || time.Since(began) < p.duration); n++ {
		f := p.next()
		fmt.Fprintf(p.out, "%v: fault %d, attempt %d: %v\n", time.Since(began).Round(time.Millisecond), n+1, attempt, f)
		r.Faults[f.Kind]++
		if err = p.act(ctx, f); err == nil {
			attempt, err = p.recovered(ctx, attempt-1)
		}
		if err != nil {
			err = fmt.Errorf("fault %d: %v: %w", n+1, f, err)
		}
	}
	r.Seconds = time.Since(began).Seconds()
	if err != nil {
		return r, err
	}
	if err := p.finish(); err != nil {
		return r, err
	}
	end, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	for name, t := range p.trainers {
		code, err := t.code(end)
		if err != nil {
			return r, err
		}
		if code != 0 {
			r.find("the trainer on %s ended with %d", name, code)
		}
	}
	v, err := p.judge(ctx, p.timeout/2)
	v.Findings = append(v.Findings, r.Findings...)
	r.verdict = v
	return r, err
}

// next returns the next fault: of any node, shorter than T/2, up to T, or longer.
func (p *campaign) next() fault {
	kinds := []string{cutBoth, cutBoth, cutTo, cutFrom, pauseOne, pauseOne, freeze, freeze, freeze, killOne}
	nodes := []string{"a", "b", "b", "c", "c"}
	f := fault{Kind: kinds[p.random.IntN(len(kinds))], Node: nodes[p.random.IntN(len(nodes))]}
	if f.Kind != killOne {
		f.For = p.timeout/10 + time.Duration(p.random.Int64N(int64(2*p.timeout)))
	}
	return f
}

// act does a fault and undoes it when its time is over.
func (p *campaign) act(ctx context.Context, f fault) error {
	m, t := p.node(f.Node), p.trainers[f.Node]
	var undo func() error
	healed := func() error { p.heal(f.Node); return nil }
	switch f.Kind {
	case cutBoth:
		p.cut(f.Node)
		undo = healed
	case cutTo:
		p.cutTo(f.Node)
		undo = healed
	case cutFrom:
		p.cutFrom(f.Node)
		undo = healed
	case pauseOne:
		if err := t.pause(); err != nil {
			return err
		}
		undo = t.resume
	case freeze:
		if err := m.freeze(); err != nil {
			return err
		}
		undo = m.thaw
	case killOne:
		return p.killAny(m)
	}
	return errors.Join(wait(ctx, f.For), undo())
}

// recovered waits until a group after an attempt trains, newly counted from now, and returns
// its attempt.
func (p *campaign) recovered(ctx context.Context, after int) (attempt int, err error) {
	ctx, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	return p.moves(ctx, after, slices.Collect(maps.Values(p.trainers))...)
}

// Programs that are built with skewTag read the rate of their node's clock from envRate.
// internal/nodes/clock_testbed.go has the reason why that equals a skewed clock.
const (
	skewTag = "testbed"
	envRate = "CKPTSTORE_TESTBED_CLOCK_RATE"
)

// canSkew returns an error if the trainer in a directory does not read envRate: the clocks
// would be right, and nothing proved.
func canSkew(bin string) error {
	path := filepath.Join(bin, "trainer")
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return fmt.Errorf("skew the clocks: %w", err)
	}
	for _, s := range info.Settings {
		if s.Key == "-tags" && slices.Contains(strings.Split(s.Value, ","), skewTag) {
			return nil
		}
	}
	return fmt.Errorf("skew the clocks: %s is built without the tag %s; build it with it, or give --skew 0", path, skewTag)
}

// drawRates draws the rates of the nodes' clocks: each is right, or slow or fast by so many
// percent, and at least two of them differ.
func drawRates(seed uint64, percent int, nodes []string) map[string]float64 {
	random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // for tests
	rates := map[string]float64{}
	for {
		for _, name := range nodes {
			rates[name] = 1 + float64((random.IntN(3)-1)*percent)/100
		}
		same := func(name string) bool { return rates[name] == rates[nodes[0]] }
		if percent == 0 || len(nodes) < 2 || slices.ContainsFunc(nodes, func(name string) bool { return !same(name) }) {
			return rates
		}
	}
}
