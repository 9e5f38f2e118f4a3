// Package launch runs the processes of one job. It starts, watches and ends them, and
// restarts the group from the last committed checkpoint when a worker dies. Package
// session serves their ranks.
//
// A job may have several nodes, with one process of this package on each. One of them
// coordinates: it alone decides, and it gathers the nodes of each attempt, starts their
// parts, and ends all when one fails. Package nodes connects them.
//
//	Run          attempts of a job, until it is done or out of budget
//	Follow       this node's parts of a job that another process coordinates
//	Resume       the attempts of a job whose coordinator is gone, the first of them living
//	Attend       one attempt of processes that started by themselves
//	attempt      one life of the worker group, opened by group.started
//	watch        the processes of one attempt on this node: start, wait, end
//	fleet        the job's other nodes, as the coordinating process sees them
//	others       their parts of one attempt
//	part         this node's part of one attempt, under another process
//	orders       requests to end, by signal, time or log; replies to reports carry them
//	stopState    whether the workers poll for such requests
//	heldSignals  signals that workers hold back until the trainer ends them
//	deviceGate   the health of the job's GPUs, before and during an attempt
//	candidate    a checkpoint to resume from, which must be whole
//
// Package process has the processes themselves and the guard that kills them if
// the trainer dies. Package blame judges failed attempts. Package aftercommit does what follows commits.
package launch

import (
	"context"
	"io"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/aftercommit"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// ErrConfig is returned if a job cannot run as configured.
var ErrConfig = session.ErrConfig

// Config describes a job: the group of ranks, as in [session.Config], and how its
// processes are started, watched and ended. Durations are deadlines; zero selects
// the default.
type Config struct {
	session.Config
	Command     []string
	MaxRestarts int    // tolerated failures; -1: any number
	Resume      string // auto, none, require, a reference or the path of another program's checkpoint
	Backend     string // name of the communication backend; default none
	BackendConfig
	Torch TorchConfig
	// Endpoint connects the job with the processes of its other nodes; nil: it has one
	// node. GatherTimeout bounds the wait for them before an attempt, and LastCall the
	// wait for more than the fewest.
	Endpoint      *nodes.Endpoint
	GatherTimeout time.Duration
	LastCall      time.Duration
	// GrowInterval is how long a group trains before it is asked to save and end for nodes that
	// have joined since; 0: it is not asked.
	GrowInterval time.Duration
	// MaxNodeFailures is after how many failures of its ranks in a row, while the ranks of other
	// nodes do not fail, a node is excluded, and after how many losses in a row; 0: never.
	MaxNodeFailures int
	Preflight       bool // all nodes are examined, and their network is measured, before the first attempt
	Exclude         Exclusion
	LogCopies       int // nodes with an index below it hold copies of the log
	// Standby is set for a node that takes no ranks: it only coordinates. Then the group outlives its
	// coordinator, if Survival is set: another node coordinates it with [Resume].
	Standby  bool
	Survival Survival
	// Coordinates, if set, is called by [Resume] once the log has this process as coordinator.
	Coordinates func()
	Carrier     *Carrier // of [Follow]; nil: there is none
	// Contact passes to the guard how long the processes of this node may live; nil if the
	// job has one node.
	Contact *process.Contact
	// Peers serves the requests of other nodes: replicas, if the session's configuration has
	// Replicas, measurements, and loads. With Broadcast, what several nodes read in a load is read
	// once and passed on.
	Peers     *nodes.Peers
	Broadcast bool
	// Port is what the node of [Follow] promised for rank 0 when it joined.
	Port *HeldPort
	// Withheld names environment variables that workers do not inherit, such as
	// the trainer's credentials: each worker has a socket of its own instead.
	Withheld []string
	// Preload names Python modules that processes import which wait for the ranks of the next
	// group; empty: there are no such processes.
	Preload []string
	Quiet   bool // [client.EnvQuiet] tells the workers to give no advice

	// Collect deletes the checkpoints that need not be kept, after commits and in
	// parallel with the training; nil deletes none. It returns soon after its
	// context ends. A later call does the rest.
	Collect func(context.Context) error
	// Publish makes the newest commit known outside of the store, after commits and in
	// parallel with the training; nil does not. It returns soon after its context ends.
	Publish func(context.Context) error

	// Driver is queried about DeviceIDs before each attempt and during it.
	// DeviceIDs are the GPUs and MIG instances that the job uses on this node;
	// [Run] adds those that it assigns to workers. If either is empty, devices
	// are not checked. DeviceTimeout bounds an inspection, and how long a process
	// that is gone may hold device memory; default 60 s.
	Driver        Devices
	DeviceIDs     []string
	DeviceTimeout time.Duration
	// HangTimeout is how long a rank that has made a request may make no other,
	// while no request of it is pending, before its group is ended as hung; 0:
	// forever.
	HangTimeout time.Duration

	Grace     time.Duration // SIGTERM to SIGKILL; default 10 s
	ShortLife time.Duration // an attempt that fails sooner waits before the next; default 5 s

	// MaxInfraRestarts is like MaxRestarts, for failures that the workers did not
	// cause.
	MaxInfraRestarts int
	// Requests ask the job to end, as a signal to its trainer does. Deadline is
	// when the job loses its machine: it is preempted PreemptGrace and Grace
	// before. Zero means never.
	Requests     <-chan StopRequest
	Deadline     time.Time
	PreemptGrace time.Duration // from a preemption until the workers get SIGTERM; default 2 min
	Launch       Launch        // recorded in the log, so that the job can be launched again
	// Shared is set if other trials of the run are trained by the same job at the same
	// time. The caller then records the start and the end of the job.
	Shared bool
	// Judge is called with each report of all ranks that the log has. A request that it
	// returns is in the reply to that report. It may block until ctx, which ends with the
	// attempt; nil: it is not called.
	Judge  func(ctx context.Context, m *events.Metrics) *StopRequest
	Output Output // where the workers' output is kept
	// DiskUse logs how the saves use the disk, for several jobs; nil: the job has its own.
	DiskUse *aftercommit.DiskUse

	Stdout, Stderr io.Writer       // of the workers, line by line
	ExitCode       func(error) int // of the trainer, for job.ended; default 0 or 1
}

// Exclusion is when a bad node is excluded from a job.
type Exclusion int

// Exclusions of bad nodes.
const (
	ExcludeSpared Exclusion = iota // if the job can continue without it
	ExcludeAlways                  // also if the job then waits for another node
	ExcludeNever
)

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	c.Config = c.Config.WithDefaults()
	def(&c.Grace, 10*time.Second)
	def(&c.ShortLife, 5*time.Second)
	def(&c.PreemptGrace, 2*time.Minute)
	def(&c.DeviceTimeout, time.Minute)
	if c.ExitCode == nil {
		c.ExitCode = exitCode
	}
	if c.Resume == "" {
		c.Resume = "auto"
	}
	if c.Backend == "" {
		c.Backend = "none"
	}
	return c
}

// exitCode is the exit code of a trainer without codes of its own.
func exitCode(err error) int {
	if err != nil {
		return 1
	}
	return 0
}
