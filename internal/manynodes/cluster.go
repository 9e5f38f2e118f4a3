package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// Where nodes find what they share.
const (
	sharedAt = "/srv/shared" // the disk with the store
	livesAt  = "/srv/lives"  // the records of the ranks, on the host
	storeAt  = sharedAt + "/store"
)

// endpointPort is the port at which the nodes of a job meet.
const endpointPort = 29400

// run is the name of the run that all jobs of a cluster train.
const run = "run"

// setting configures a cluster.
type setting struct {
	bin    string   // directory of the programs
	dir    string   // directory of everything; the caller removes it
	nodes  []string // names
	seed   uint64
	disk   netfs.Options
	shm    int64 // bytes of /dev/shm of a node; 0: the default
	adapts bool  // the nodes' adapters segment and compute checksums
	copied bool  // each node has a directory of its own in place of the shared disk
}

// cluster is a testbed, its store and the records of all ranks that ran in it.
type cluster struct {
	setting
	lives   string // directory on the host
	bed     *testbed.Testbed
	disk    *netfs.Server
	nodes   []*machine
	sampler *sampler
	want    []string // the losses of an unbroken run; nil: those of [worker]
	elastic bool     // the number of ranks may change: the workers train a [replica]

	mu       sync.Mutex
	trainers []*trainer
	reader   *testbed.Node // see apart; nil: not started yet
}

// cut takes a node off the network.
func (c *cluster) cut(name string) {
	for _, other := range c.nodes {
		if other.Name() != name {
			c.bed.Switch().Cut(name, other.Name())
		}
	}
}

// cutTo loses what is sent to a node, and cutFrom what it sends.
func (c *cluster) cutTo(name string) {
	for _, other := range c.nodes {
		c.bed.Switch().Update(other.Name(), name, func(c *ethernet.Cable) { c.Down = true })
	}
}

func (c *cluster) cutFrom(name string) {
	for _, other := range c.nodes {
		c.bed.Switch().Update(name, other.Name(), func(c *ethernet.Cable) { c.Down = true })
	}
}

// heal undoes all cuts of a node.
func (c *cluster) heal(name string) {
	for _, other := range c.nodes {
		if other.Name() != name {
			c.bed.Switch().Heal(name, other.Name())
		}
	}
}

// newCluster starts the nodes. The caller calls close.
func newCluster(ctx context.Context, s setting) (c *cluster, err error) {
	c = &cluster{setting: s, lives: filepath.Join(s.dir, "lives")}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for _, dir := range []string{c.lives, c.shared(""), filepath.Join(s.dir, "logs")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return c, err
		}
	}
	if c.bed, err = testbed.New(testbed.Options{Seed: s.seed, Offload: s.adapts}); err != nil {
		return c, err
	}
	if c.disk, err = netfs.NewServer(c.shared("")); err != nil {
		return c, err
	}
	for _, name := range s.nodes {
		config := testbed.Config{Name: name, Shm: s.shm, Binds: map[string]string{livesAt: c.lives}}
		if s.copied {
			own := filepath.Join(s.dir, "disk-of-"+name)
			if err := os.Mkdir(own, 0o700); err != nil {
				return c, err
			}
			config.Binds[sharedAt] = own
		} else {
			config.Disks = []testbed.Disk{{At: sharedAt, Server: c.disk, Options: s.disk}}
		}
		n, err := c.bed.Start(ctx, config)
		if err != nil {
			return c, err
		}
		c.nodes = append(c.nodes, &machine{Node: n})
	}
	c.sampler = startSampler(func() []*machine { return c.nodes })
	return c, nil
}

// shared returns the path on the host of a file of the shared disk.
func (c *cluster) shared(name string) string { return filepath.Join(c.dir, "disk", name) }

// node returns a node by its name.
func (c *cluster) node(name string) *machine {
	i := slices.IndexFunc(c.nodes, func(m *machine) bool { return m.Name() == name })
	return c.nodes[i]
}

// names returns the names of the nodes.
func (c *cluster) names() (all []string) {
	for _, m := range c.nodes {
		all = append(all, m.Name())
	}
	return all
}

// close powers all nodes off.
func (c *cluster) close() error {
	var errs []error
	if c.sampler != nil {
		_, err := c.sampler.close()
		errs = append(errs, err)
		c.sampler = nil
	}
	if c.bed != nil {
		errs = append(errs, c.bed.Close())
		c.bed = nil
	}
	for _, t := range c.trainers {
		<-t.ended
	}
	if c.disk != nil {
		errs = append(errs, c.disk.Close())
		c.disk = nil
	}
	return errors.Join(errs...)
}

// job is the command line of a job, the same on all nodes.
type job struct {
	nnodes  string
	nproc   int
	store   string        // "": that of the shared disk
	meet    string        // node with the endpoint; "": the first one
	timeout time.Duration // of a node
	more    []string      // flags of trainer run
	worker  []string      // flags of the worker
	command []string      // in place of the worker of this program
	env     []string
	rates   map[string]float64 // of the nodes' clocks; 1 for others
}

// trainer is one trainer process on a node.
type trainer struct {
	*testbed.Cmd
	on    *machine
	log   *transcript
	ended chan struct{}
	err   error // valid once ended
}

// start starts the job's trainer on a node.
func (c *cluster) start(ctx context.Context, m *machine, j job) (*trainer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	meet := c.nodes[0]
	if j.meet != "" {
		meet = c.node(j.meet)
	}
	args := []string{
		"run", "--store", cmp.Or(j.store, storeAt), "--name", run, "--nnodes", j.nnodes, "--nproc", fmt.Sprint(j.nproc), "--node-timeout", j.timeout.String(),
		"--rdzv-endpoint", fmt.Sprintf("%v:%d", meet.Addr(), endpointPort), "--grace", "2s",
	}
	args = append(append(args, j.more...), "--")
	if j.command != nil {
		args = append(args, j.command...)
	} else {
		args = append(append(args, self, workerVerb, "--lives", livesAt), j.worker...)
	}
	env := slices.Clone(j.env)
	if rate, ok := j.rates[m.Name()]; ok {
		env = append(env, fmt.Sprintf("%s=%v", envRate, rate))
	}
	return c.execute(ctx, m, filepath.Join(c.bin, "trainer"), args, env)
}

// execute starts a program of a job on a node.
func (c *cluster) execute(ctx context.Context, m *machine, program string, args, env []string) (t *trainer, err error) {
	t = &trainer{Cmd: m.Command(context.WithoutCancel(ctx), program, args...), on: m, ended: make(chan struct{})}
	c.mu.Lock()
	name := filepath.Join(c.dir, "logs", fmt.Sprintf("%d-%s.log", len(c.trainers), m.Name()))
	c.mu.Unlock()
	if t.log, err = newTranscript(name); err != nil {
		return nil, err
	}
	t.Env = append(t.Env, env...)
	t.Stdout, t.Stderr = t.log, t.log
	if err := t.Start(); err != nil {
		return nil, errors.Join(err, t.log.Close())
	}
	go func() {
		t.err = t.Wait()
		_ = t.log.Close() // its text is in memory
		close(t.ended)
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trainers = append(c.trainers, t)
	return t, nil
}

// startAll starts the job's trainers on nodes.
func (c *cluster) startAll(ctx context.Context, j job, on ...string) (all []*trainer, err error) {
	for _, name := range on {
		t, err := c.start(ctx, c.node(name), j)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

// code waits for the trainer's end and returns its exit code, -1 after a signal.
func (t *trainer) code(ctx context.Context) (int, error) {
	select {
	case <-t.ended:
	case <-ctx.Done():
		return 0, fmt.Errorf("the trainer on %s does not end: %w", t.on.Name(), context.Cause(ctx))
	}
	var exit *exec.ExitError
	if t.err != nil && !errors.As(t.err, &exit) {
		return 0, t.err
	}
	return t.ProcessState.ExitCode(), nil
}

// gone reports whether the trainer has ended.
func (t *trainer) gone() bool {
	select {
	case <-t.ended:
		return true
	default:
		return false
	}
}

// kill kills the trainer's process alone.
func (t *trainer) kill() error { return unix.Kill(t.Process.Pid, unix.SIGKILL) }

// pause stops the trainer's process alone: its workers and its guard continue.
func (t *trainer) pause() error { return t.on.Pause(t.Process.Pid) }

func (t *trainer) resume() error { return t.on.Resume(t.Process.Pid) }

// finish has the ranks end after a step.
func (c *cluster) finish() error {
	return os.WriteFile(filepath.Join(c.lives, finishFile), nil, 0o600)
}

// await polls until done returns true.
func await(ctx context.Context, what string, done func() (bool, error)) error {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
	}
}

// trains waits until every rank of a group has trained so many steps, and returns the
// group's records. The group's attempt is the first one after the given attempt that comes
// so far.
func (c *cluster) trains(ctx context.Context, after int, steps int) (group []life, err error) {
	what := fmt.Sprintf("%d steps of a group after attempt %d", steps, after)
	err = await(ctx, what, func() (bool, error) {
		lives, err := readLives(c.lives, after)
		if err != nil {
			return false, err
		}
		for _, l := range lives {
			group = groupOf(lives, l.Attempt)
			if len(group) == l.World && !slices.ContainsFunc(group, func(l life) bool { return l.steps() < steps }) {
				return true, nil
			}
		}
		return false, nil
	})
	return group, err
}

// moves waits until every rank of a group after an attempt has trained 12 steps from now,
// and returns the group's attempt. The trainers must not end meanwhile.
func (c *cluster) moves(ctx context.Context, after int, trainers ...*trainer) (attempt int, err error) {
	before, err := readLives(c.lives, after)
	if err != nil {
		return 0, err
	}
	had := map[identity]int{}
	for _, l := range before {
		had[l.identity] = l.steps()
	}
	err = await(ctx, fmt.Sprintf("12 steps after attempt %d", after), func() (bool, error) {
		for _, t := range trainers {
			if t.gone() {
				return false, fmt.Errorf("the trainer on %s has ended: %w", t.on.Name(), t.err)
			}
		}
		lives, err := readLives(c.lives, after)
		if err != nil {
			return false, err
		}
		moved := map[int]int{}
		for _, l := range lives {
			if l.steps() >= had[l.identity]+12 {
				if moved[l.Attempt]++; moved[l.Attempt] == l.World {
					attempt = max(attempt, l.Attempt)
				}
			}
		}
		return attempt > 0, nil
	})
	return attempt, err
}

func groupOf(lives []life, attempt int) (group []life) {
	for _, l := range lives {
		if l.Attempt == attempt {
			group = append(group, l)
		}
	}
	return group
}

// prints waits until the trainer has printed a text.
func (t *trainer) prints(ctx context.Context, text string) error {
	return await(ctx, fmt.Sprintf("the trainer on %s prints %q", t.on.Name(), text), func() (bool, error) {
		return strings.Contains(t.log.String(), text), nil
	})
}

// workersOf returns the workers' processes on a node.
func (c *cluster) workersOf(m *machine) ([]testbed.Process, error) {
	all, err := m.Processes()
	return slices.DeleteFunc(all, func(p testbed.Process) bool { return p.Getenv("RANK") == "" || p.State == "Z" }), err
}

// workersOn counts the workers' processes on a node.
func (c *cluster) workersOn(m *machine) (int, error) {
	all, err := c.workersOf(m)
	return len(all), err
}

// killAny kills one of the workers of a node, if it has any.
func (c *cluster) killAny(m *machine) error {
	all, err := c.workersOf(m)
	if len(all) > 0 {
		return unix.Kill(all[0].PID, unix.SIGKILL)
	}
	return err
}

// noWorkers waits until a node has no worker.
func (c *cluster) noWorkers(ctx context.Context, m *machine) error {
	return await(ctx, "the end of the workers on "+m.Name(), func() (bool, error) {
		n, err := c.workersOn(m)
		return n == 0, err
	})
}

// ckptstore runs a command of the store where no fault reaches: on the host, or on a node of its own if the log has
// copies. The command looks for those at the nodes first, whose addresses the host's network may accept and not answer.
func (c *cluster) ckptstore(ctx context.Context, args ...string) ([]byte, error) {
	program := filepath.Join(c.bin, "ckptstore")
	cmd := exec.CommandContext(ctx, program, append(args, "--store", c.shared("store"))...)
	cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+c.dir, "XDG_STATE_HOME="+c.dir)
	run := cmd.Run
	if _, err := os.Stat(c.shared("store/join/log")); err == nil {
		n, err := c.apart(ctx)
		if err != nil {
			return nil, err
		}
		there := n.Command(ctx, program, append(args, "--store", storeAt)...)
		cmd, run = there.Cmd, there.Run
	}
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	err := run()
	if err != nil {
		err = fmt.Errorf("ckptstore %s: %w: %s", strings.Join(args, " "), err, problems.Bytes())
	}
	return out.Bytes(), err
}

// apart returns a node that is none of the cluster's, with the shared disk.
func (c *cluster) apart(ctx context.Context) (*testbed.Node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reader != nil {
		return c.reader, nil
	}
	n, err := c.bed.Start(ctx, testbed.Config{Name: "reader", Binds: map[string]string{sharedAt: c.shared("")}})
	if err == nil {
		c.reader = n
	}
	return n, err
}

// transcript keeps the output of a program, in memory and in a file.
type transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
	file *os.File
}

var _ io.WriteCloser = (*transcript)(nil)

func newTranscript(path string) (*transcript, error) {
	f, err := os.Create(path)
	return &transcript{file: f}, err
}

// Write implements io.Writer.
func (t *transcript) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text.Write(p)
	return t.file.Write(p)
}

// Close implements io.Closer.
func (t *transcript) Close() error { return t.file.Close() }

// String returns all output.
func (t *transcript) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}
