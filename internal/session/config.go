package session

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// ErrConfig says that a job cannot run as it was asked for.
var ErrConfig = errors.New("bad configuration")

// Nodes lists the ranks that live on each node, by the node's number. Together
// they are the ranks from 0 on, each of them once.
type Nodes [][]int

// OneNode returns the placement of a group that lives on one node.
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

// Of returns the node of a rank and its number on that node; -1 for a rank that
// lives on none.
func (n Nodes) Of(rank int) (node, local int) {
	for node, of := range n {
		if local := slices.Index(of, rank); local >= 0 {
			return node, local
		}
	}
	return -1, -1
}

// Config says which group of ranks a session serves, and within which limits.
// Durations are deadlines; zero takes the default.
type Config struct {
	Run         string
	Trial       string
	Job         string         // a UUID
	TrialConfig map[string]any // recorded when the job creates the trial; workers get it with their first reply

	// Nodes says where the ranks of the group live, and Node which of the nodes
	// this process serves.
	Nodes Nodes
	Node  int

	// StrictReplicas aborts a save in which ranks offer copies of a tensor or
	// value that differ, instead of saving the lowest rank's with a warning.
	StrictReplicas bool
	// Services answers what workers ask of the store itself, by requests below
	// ServicePath that have the right token; nil refuses them.
	Services http.Handler

	// StagingSlots is how many saves of a rank may be in shared memory at once,
	// within StagingMemory; default 2. WhenBusy says what a save does when they
	// all are in use; default [staging.BusyWait].
	StagingSlots  int
	StagingMemory staging.Memory
	WhenBusy      staging.WhenBusy

	SaveTimeout  time.Duration // begun to committed; default 10 min
	DrainTimeout time.Duration // finishing staged saves when a worker died; default 2 min
	Collective   time.Duration // until all ranks have joined a collective or a report; default 10 min

	// Reap kills the orphaned processes of earlier jobs: those that are marked with
	// one of the jobs and have all of the variables, NAME=value, in their environment.
	// It is called before an attempt is started. Without it, no attempt is started
	// in a trial that earlier jobs had.
	Reap func(ctx context.Context, log *slog.Logger, jobs []string, env ...string) error
	// Committed is called after each commit, before a rank that waits for it gets
	// its reply, and Costs with the bytes of each checkpoint that this job saved.
	// They must not block, and may be nil.
	Committed func()
	Costs     func(bytes int64)

	Redact redact.Names // names of secrets in what is recorded of the job, whose values stay out of the log
	Logger *slog.Logger
	Now    func() time.Time // default time.Now
	NewID  func() string    // mints UUIDv7s
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
