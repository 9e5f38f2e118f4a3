package session

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// ErrConfig reports that a job's configuration is invalid.
var ErrConfig = problem.New(problem.Invalid, "bad configuration")

// ErrTaken reports that another process of this machine has the memory of a run's ranks.
var ErrTaken = staging.ErrTaken

// Nodes lists the ranks on each node, indexed by node number. Together the nodes
// hold the ranks from 0 on, each exactly once.
type Nodes [][]int

// OneNode returns the placement of a group on a single node.
func OneNode(ranks int) Nodes {
	all := make([]int, ranks)
	for rank := range all {
		all[rank] = rank
	}
	return Nodes{all}
}

// World returns the number of ranks on all nodes.
func (n Nodes) World() (ranks int) {
	for _, of := range n {
		ranks += len(of)
	}
	return ranks
}

// InOrder reports whether the ranks are placed in the order of the nodes.
func (n Nodes) InOrder() bool {
	next := 0
	for _, of := range n {
		for _, rank := range of {
			if rank != next {
				return false
			}
			next++
		}
	}
	return true
}

// nodeCounts is the form of a placement in order: pairs of a number of ranks, and of the
// consecutive nodes that have so many. Its size does not depend on the number of ranks.
type nodeCounts struct {
	Counts [][2]int `json:"counts"`
}

// MarshalJSON implements [json.Marshaler].
func (n Nodes) MarshalJSON() ([]byte, error) {
	if !n.InOrder() {
		return json.Marshal([][]int(n))
	}
	var c nodeCounts
	for _, of := range n {
		if last := len(c.Counts) - 1; last >= 0 && c.Counts[last][0] == len(of) {
			c.Counts[last][1]++
			continue
		}
		c.Counts = append(c.Counts, [2]int{len(of), 1})
	}
	return json.Marshal(c)
}

// MaxDuration bounds the durations that users may give: sums and multiples of them are durations too.
const MaxDuration = 10 * 365 * 24 * time.Hour

// mostRanks bounds the ranks of a placement that is decoded.
const mostRanks = 1 << 20

// UnmarshalJSON implements [json.Unmarshaler].
func (n *Nodes) UnmarshalJSON(text []byte) error {
	if !bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		return json.Unmarshal(text, (*[][]int)(n))
	}
	var c nodeCounts
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	*n = nil
	rank := 0
	for _, run := range c.Counts {
		ranks, nodes := run[0], run[1]
		if ranks < 0 || nodes < 1 || nodes > mostRanks || ranks > (mostRanks-rank)/nodes {
			return fmt.Errorf("a placement of %d ranks on each of %d nodes", ranks, nodes)
		}
		for range nodes {
			of := make([]int, ranks)
			for i := range of {
				of[i] = rank
				rank++
			}
			*n = append(*n, of)
		}
	}
	return nil
}

// Of returns the node of a rank and its index on that node, or -1 for a rank that
// is on no node.
func (n Nodes) Of(rank int) (node, local int) {
	for node, of := range n {
		if local := slices.Index(of, rank); local >= 0 {
			return node, local
		}
	}
	return -1, -1
}

// Config describes the group of ranks that a session serves, and its limits.
// Durations are deadlines; zero means the default.
type Config struct {
	Run         string
	Trial       string
	Job         string         // a UUID
	TrialConfig map[string]any // recorded when the job creates the trial; workers get it with their first reply

	// Nodes places the ranks of the group; Node is the node that this process
	// serves.
	Nodes Nodes
	Node  int
	// Aside is set for a process that serves no ranks: its node may have another job of the run,
	// with the ranks' shared memory.
	Aside bool

	// StrictReplicas aborts a save if ranks offer differing copies of a tensor or
	// value. Otherwise the lowest rank's copy is saved with a warning.
	StrictReplicas bool
	// Services answers the workers' requests to the store: those below
	// ServicePath with the right token. Nil refuses them.
	Services http.Handler

	// StagingSlots bounds how many saves of a rank may be in shared memory at
	// once, within StagingMemory; default 2. WhenBusy is what a save does when
	// all slots are in use; default [staging.BusyWait].
	StagingSlots  int
	StagingMemory staging.Memory
	WhenBusy      staging.WhenBusy

	// Replicas is how many other nodes keep a copy of each sealed slot. A node sends
	// at most ReplicaRate bytes in a second; 0: any number.
	Replicas    int
	ReplicaRate int64

	SaveTimeout  time.Duration // begun to committed; default 10 min
	DrainTimeout time.Duration // finishing staged saves when a worker died; default 2 min
	Collective   time.Duration // until all ranks have joined a collective or a report; default 10 min

	// Reap kills the orphaned processes of earlier jobs: processes that are
	// marked with one of the jobs and have all of the variables, NAME=value, in
	// their environment. It runs before an attempt starts. Without it, no attempt
	// starts in a trial that had earlier jobs.
	Reap func(ctx context.Context, log *slog.Logger, jobs []string, env ...string) error
	// Committed is called after each commit, before a rank that waits for the
	// commit gets its reply. Costs is called with the size in bytes of each
	// checkpoint that this job saved. Neither may block; both may be nil.
	Committed func()
	Costs     func(bytes int64)
	// Reported is called with each report of all ranks that the log has, before the ranks
	// get their reply, which has the request that Orders then tells. It may block until
	// ctx, which ends with the attempt; nil: nothing is called.
	Reported func(ctx context.Context, m *events.Metrics)

	Redact redact.Names // names of secrets, whose values are redacted from the job's records
	Logger *slog.Logger
	Now    func() time.Time // default time.Now
	NewID  func() string    // mints UUIDv7s

	peers []int // ranks of another node whose replicas share the memory
}

// World returns the number of ranks of the group, on all nodes.
func (c Config) World() int { return c.Nodes.World() }

// Local returns the ranks that live on this node, in the order of their local
// ranks.
func (c Config) Local() []int {
	if c.Node < 0 || c.Node >= len(c.Nodes) {
		return nil
	}
	return c.Nodes[c.Node]
}

// apart reports whether ranks of the group live on other nodes than that of this process.
func (c Config) apart() bool { return len(c.Nodes) > 1 || c.Node < 0 }

// others returns the other nodes of the group that have ranks.
func (c Config) others() (nodes []int) {
	for node, ranks := range c.Nodes {
		if node != c.Node && len(ranks) > 0 {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// WithDefaults returns the configuration with its zero values replaced.
func (c Config) WithDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.SaveTimeout, 10*time.Minute)
	def(&c.DrainTimeout, 2*time.Minute)
	def(&c.Collective, 10*time.Minute)
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.StagingSlots == 0 {
		c.StagingSlots = 2
	}
	if c.WhenBusy == "" {
		c.WhenBusy = staging.BusyWait
	}
	return c
}
