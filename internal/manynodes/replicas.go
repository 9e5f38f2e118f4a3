package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// Parameters of what is measured about replicas.
const (
	replicaBytes = 192 << 20 // of a rank that is restored
	costBytes    = 32 << 20  // of a rank whose training is measured
	costSteps    = 1000
	costEvery    = 250           // steps between two saves
	costWarm     = 3 * costEvery // steps before: partners allocate memory for the first three saves, once
	rawPort      = 7000
)

// replicasReport is what `manynodes replicas` prints. Rates are in bytes per second, and medians
// of the rounds.
type replicasReport struct {
	Rounds  int     `json:"rounds"`
	Link    int64   `json:"link_rate"`       // of the cables; 0: as fast as the machine
	Bytes   int64   `json:"bytes"`           // of the lost node's rank
	Raw     float64 `json:"raw_rate"`        // TCP from the partner to the new node, one stream
	Restore float64 `json:"restore_rate"`    // of the load of that rank, with all checks and the copy to its memory
	Fetch   float64 `json:"fetch_rate"`      // of it, the copy of the slot from the partner
	Ratio   float64 `json:"restore_to_raw"`  // median of the rounds
	Fetched float64 `json:"fetch_to_raw"`    // median of the rounds
	Files   int64   `json:"bytes_of_files"`  // that the new node read from the disk, at most
	Asked   float64 `json:"seconds_to_load"` // from the start of the rank's process to its request for the load: the copy may begin before
	Loaded  float64 `json:"seconds_loaded"`  // from the start of the rank's process to its loaded state
	CPU     float64 `json:"cpu_per_gb"`      // CPU seconds of the new node's trainer for each GB, with its start
	Steps   int     `json:"steps"`           // of a training
	Saved   int64   `json:"bytes_of_a_save"` // of both nodes
	Device  cost    `json:"device"`          // steps of a device, while the CPUs are idle
	Cores   cost    `json:"cores"`           // steps that take all of a core on each node
}

// cost is what replication costs a training.
type cost struct {
	Without float64 `json:"seconds_without"`
	With    float64 `json:"seconds_with"`
	Cost    float64 `json:"cost"`           // median over the rounds, of with over without, minus 1
	CPU     float64 `json:"cpu_per_gb"`     // CPU seconds of both nodes for each GB that is copied; the median
	Bed     float64 `json:"bed_cpu_per_gb"` // of the testbed's switch, which takes the same CPUs; the median

	with, without, costs, cpus, beds []float64
}

// kinds are the flags of the kinds of steps.
var kinds = map[string][]string{"device": {"--device", "10ms"}, "cores": {"--work", "8000000"}}

// add adds a round.
func (c *cost) add(with, without trained) {
	c.with, c.without = append(c.with, with.seconds), append(c.without, without.seconds)
	const copied = 2 * costBytes * ((costWarm + costSteps) / costEvery) / 1e9
	c.costs, c.cpus, c.beds = append(c.costs, with.seconds/without.seconds-1), append(c.cpus, (with.cpu-without.cpu)/copied), append(c.beds, (with.bed-without.bed)/copied)
	c.With, c.Without, c.Cost, c.CPU, c.Bed = middle(c.with), middle(c.without), middle(c.costs), middle(c.cpus), middle(c.beds)
}

// middle returns the median, or 0.
func middle(of []float64) float64 {
	if len(of) == 0 {
		return 0
	}
	of = slices.Sorted(slices.Values(of))
	return of[len(of)/2]
}

// replicas measures the restore of a rank from its node's partner, in turns with raw TCP between
// the same nodes, and a training with replicas, in turns with the same one without.
func (o options) replicas(ctx context.Context) error {
	return o.inDirectory(func(dir string) error {
		bin, err := o.programsOf(ctx, dir)
		if err != nil {
			return err
		}
		r := replicasReport{Rounds: o.rounds, Link: o.link, Bytes: replicaBytes, Steps: costSteps, Saved: 2 * costBytes}
		var raw, restore, fetch, ratio, fetched, asked, loaded, cpu []float64
		for round := range o.rounds {
			s := setting{bin: bin, dir: filepath.Join(dir, fmt.Sprint("restore-", round)), nodes: []string{"a", "b", "c"}, disk: netfs.NFS(), shm: 8 * replicaBytes, adapts: o.adapts}
			if o.only == "" || o.only == "restore" {
				m, err := o.restoredFromPeer(ctx, s)
				if err != nil {
					return fmt.Errorf("restore from a partner: %w", err)
				}
				fmt.Fprintf(os.Stderr, "round %d: raw %.0f MB/s, restore %.0f MB/s, fetch %.0f MB/s, load asked for after %.2f s and done after %.2f s, CPU %.2f s/GB, %d bytes of files\n",
					round+1, m.raw/1e6, m.restore/1e6, m.fetch/1e6, m.asked, m.loaded, m.cpu, m.files)
				asked, loaded, cpu = append(asked, m.asked), append(loaded, m.loaded), append(cpu, m.cpu)
				raw, restore, fetch = append(raw, m.raw), append(restore, m.restore), append(fetch, m.fetch)
				ratio, fetched = append(ratio, m.restore/m.raw), append(fetched, m.fetch/m.raw)
				r.Files = max(r.Files, m.files)
			}
			if o.only == "" || o.only == "cost" {
				s.dir, s.nodes = filepath.Join(dir, fmt.Sprint("cost-", round)), []string{"a", "b"}
				for kind, into := range map[string]*cost{"device": &r.Device, "cores": &r.Cores} {
					with, without, err := o.replicationCost(ctx, s, kind, round%2 == 0)
					if err != nil {
						return fmt.Errorf("training with and without replicas: %w", err)
					}
					fmt.Fprintf(os.Stderr, "round %d, %s: %.2f s (CPU %.2f) with replicas, %.2f s (%.2f) without\n", round+1, kind, with.seconds, with.cpu, without.seconds, without.cpu)
					into.add(with, without)
				}
			}
		}
		for into, of := range map[*float64][]float64{
			&r.Raw: raw, &r.Restore: restore, &r.Fetch: fetch, &r.Ratio: ratio, &r.Fetched: fetched,
			&r.Asked: asked, &r.Loaded: loaded, &r.CPU: cpu,
		} {
			*into = middle(of)
		}
		out := json.NewEncoder(o.out)
		out.SetIndent("", "  ")
		return out.Encode(r)
	})
}

// peerRestore is one measurement.
type peerRestore struct {
	raw, restore, fetch float64
	asked, loaded, cpu  float64
	files               int64
}

// restoredFromPeer measures one restore: two nodes save, one loses its power, and another one takes
// its place.
func (o options) restoredFromPeer(ctx context.Context, s setting) (m peerRestore, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	c, err := newCluster(ctx, s)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	c.limit(o.link)
	self, err := os.Executable()
	if err != nil {
		return m, err
	}
	j := job{
		nnodes: "2", nproc: 1, timeout: o.timeout, more: []string{"--replicas", "1", "--replica-rate", "0"},
		command: []string{self, bulkVerb, "--lives", livesAt, "--bytes", fmt.Sprint(replicaBytes), "--own", "--stay"},
	}
	a, err := c.start(ctx, c.node("a"), j)
	if err == nil {
		err = a.prints(ctx, "waiting for nodes") // it is the node with index 0
	}
	if err == nil {
		_, err = c.start(ctx, c.node("b"), j)
	}
	if err != nil {
		return m, err
	}
	if err := await(ctx, "a committed save with copies of both nodes", func() (bool, error) {
		out, err := c.node("a").Command(ctx, filepath.Join(c.bin, "ckptstore"), "events", run, "-o", "jsonl", "--store", storeAt).Output()
		return bytes.Count(out, []byte(`"ckpt.replica.node.`)) == 2 && bytes.Contains(out, []byte(`"ckpt.checkpoint.committed.`)), ignoreExit(err)
	}); err != nil {
		return m, err
	}
	before, err := c.rawRate(ctx, "a", "c")
	if err != nil {
		return m, err
	}
	if err := c.node("b").PowerOff(); err != nil {
		return m, err
	}
	t, err := c.start(ctx, c.node("c"), j)
	if err != nil {
		return m, err
	}
	for _, t := range []*trainer{a, t} {
		if code, err := t.code(ctx); code != 0 || err != nil {
			return m, fmt.Errorf("the trainer on %s exits with %d: %w\n%s", t.on.Name(), code, err, t.log)
		}
	}
	m.files = c.node("c").Disk(sharedAt).Counters().BytesRead
	after, err := c.rawRate(ctx, "a", "c")
	if err != nil {
		return m, err
	}
	m.raw = (before + after) / 2
	m.cpu = (t.ProcessState.UserTime() + t.ProcessState.SystemTime()).Seconds() / (replicaBytes / 1e9)
	lives, err := readLives(c.lives, 1)
	if err != nil {
		return m, err
	}
	for _, l := range lives {
		for _, line := range l.Lines {
			if l.Rank == 1 && line.What == whatLoaded {
				m.restore, m.asked, m.loaded = replicaBytes/line.Took, line.Asked, line.Asked+line.Took
			}
		}
	}
	took, err := fetchTook(t.log.String())
	if err != nil {
		return m, err
	}
	if m.fetch = replicaBytes / took.Seconds(); m.restore == 0 {
		return m, errors.New("rank 1 has not loaded")
	}
	return m, nil
}

// ownCPU returns the CPU seconds of this process.
func ownCPU() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err) // it cannot fail for this process
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// limit gives all cables between nodes a rate.
func (c *cluster) limit(rate int64) {
	for i, a := range c.nodes {
		for _, b := range c.nodes[:i] {
			c.bed.Switch().UpdateBoth(a.Name(), b.Name(), func(c *ethernet.Cable) { c.Rate = rate })
		}
	}
}

// ignoreExit returns nil for a command that fails: its caller asks again.
func ignoreExit(err error) error {
	if exit := new(interface{ ExitCode() int }); errors.As(err, exit) {
		return nil
	}
	return err
}

// fetchTook returns the time that the trainer's log has for the copy of a slot.
func fetchTook(text string) (time.Duration, error) {
	_, rest, ok := bytes.Cut([]byte(text), []byte(`msg="replicas fetched"`))
	_, rest, has := bytes.Cut(rest, []byte(" took="))
	if !ok || !has {
		return 0, fmt.Errorf("the trainer has fetched nothing:\n%s", text)
	}
	end := bytes.IndexAny(rest, " \n")
	return time.ParseDuration(string(rest[:max(end, 0)]))
}

// rawRate returns the rate of one TCP stream between two nodes.
func (c *cluster) rawRate(ctx context.Context, from, to string) (rate float64, err error) {
	at := fmt.Sprintf("%v:%d", c.node(to).Addr(), rawPort)
	l, err := c.node(to).Listen(ctx, "tcp", at)
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }() // nothing was written to it
	type received struct {
		n   int64
		err error
	}
	got := make(chan received, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			got <- received{0, err}
			return
		}
		defer func() { _ = conn.Close() }() // nothing was written to it
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{conn}, make([]byte, 1<<20))
		got <- received{n, err}
	}()
	conn, err := c.node(from).Dial(ctx, "tcp", at)
	if err != nil {
		return 0, errors.Join(err, l.Close(), (<-got).err)
	}
	began := time.Now()
	block := make([]byte, 4<<20)
	for sent := 0; sent < replicaBytes && err == nil; sent += len(block) {
		_, err = conn.Write(block)
	}
	err = errors.Join(err, conn.(*net.TCPConn).CloseWrite())
	r := <-got
	took := time.Since(began)
	if err = errors.Join(err, r.err, conn.Close()); err == nil && r.n != replicaBytes {
		err = fmt.Errorf("%d bytes came of %d", r.n, replicaBytes)
	}
	return replicaBytes / took.Seconds(), err
}

// trained is what a training took.
type trained struct {
	seconds float64 // of the slowest rank
	cpu     float64 // seconds, of all trainers and ranks
	bed     float64 // CPU seconds of this process: the network and the disk
}

// replicationCost trains with and without replicas, in steps of a kind.
func (o options) replicationCost(ctx context.Context, s setting, kind string, withFirst bool) (with, without trained, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	s.shm, s.dir = 16*costBytes, s.dir+"-"+kind
	c, err := newCluster(ctx, s)
	if err != nil {
		return with, without, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	c.limit(o.link)
	for _, replicas := range []bool{withFirst, !withFirst} {
		into := &without
		if replicas {
			into = &with
		}
		if *into, err = c.trainBulk(ctx, o.timeout, kinds[kind], replicas); err != nil {
			return with, without, err
		}
	}
	return with, without, nil
}

// trainBulk trains on all nodes.
func (c *cluster) trainBulk(ctx context.Context, timeout time.Duration, steps []string, replicas bool) (out trained, err error) {
	self, err := os.Executable()
	if err != nil {
		return out, err
	}
	old, err := readLives(c.lives, 0)
	if err != nil {
		return out, err
	}
	j := job{
		nnodes: fmt.Sprint(len(c.nodes)), nproc: 1, timeout: timeout, more: []string{"--resume", "none", "--keep", "last=1"},
		command: append([]string{self, bulkVerb, "--lives", livesAt, "--bytes", fmt.Sprint(costBytes), "--own", "--steps", fmt.Sprint(costSteps), "--warm", fmt.Sprint(costWarm), "--every", fmt.Sprint(costEvery)}, steps...),
	}
	if replicas {
		j.more = append(j.more, "--replicas", "1")
	}
	before := ownCPU()
	all, err := c.startAll(ctx, j, c.names()...)
	if err != nil {
		return out, err
	}
	for _, t := range all {
		if code, err := t.code(ctx); code != 0 || err != nil {
			return out, fmt.Errorf("the trainer on %s exits with %d: %w\n%s", t.on.Name(), code, err, t.log)
		}
		out.cpu += (t.ProcessState.UserTime() + t.ProcessState.SystemTime()).Seconds()
	}
	out.bed = ownCPU() - before
	lives, err := readLives(c.lives, 0)
	for _, l := range lives {
		if slices.ContainsFunc(old, func(o life) bool { return o.identity == l.identity }) {
			continue
		}
		for _, line := range l.Lines {
			if line.What == whatEnd {
				out.seconds = max(out.seconds, line.Took)
			}
		}
	}
	if err == nil && out.seconds == 0 {
		err = errors.New("no rank has ended its training")
	}
	return out, err
}
