// Package launch runs one job on one node: it starts the worker processes,
// serves each of them a socket, shells the save coordinator, and starts the
// group again from the last committed checkpoint when a worker dies.
//
//	Job          one launch for a run: attempts until done or out of budget
//	attempt      one life of the worker group, opened by group.started
//	rankServer   the socket of one rank: package client has the protocol
//	handoff      reports of all ranks, one iteration at a time
//	orders       requests to end, by signal, time or log: the answers to reports carry them
//	saver        the log feeds the coordinator, its commands are executed
//	outbox       facts of saves that nobody waits for
//	lane         this attempt's decisions, refused by the log once fenced
//	pulses       the ranks' requests as signs of life: one that is silent hangs
//
// Package process has the processes themselves and the guard that kills them if
// the trainer dies, package staging the shared memory that ranks save and load
// by, package restore their loads.
//
// What the job knows comes from the log; what it decides goes there before it
// is acted on.
package launch

import (
	"context"
	"io"
	"iter"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// Log is what a job needs of the log. All methods may be called concurrently
// and retry lost connections until their context ends, or until a deadline of
// their own: then the job calls them again.
type Log interface {
	// Append stores facts; they are durable on return. Calling it again with
	// the same events stores nothing twice.
	Append(ctx context.Context, facts ...events.Fact) ([]uint64, error)
	// Decide stores a decision, durably, if the last one of its aggregate has
	// the sequence after. Otherwise the error is a conflict, for which
	// Options.Conflict reports true.
	Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error)
	// ReadTrial yields the events of a trial, and no others, in order from a
	// sequence to another; until 0 means to follow them for ever. A decision
	// that is missing is an error; that a fact is not there proves nothing.
	ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error]
	// ReadLane yields the decisions of a trial in the same way.
	ReadLane(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error]
	// Last is the sequence of the last event.
	Last(ctx context.Context) (uint64, error)
	// LastOf is that of the last event of a trial, 0 when it has none.
	LastOf(ctx context.Context, of events.Aggregate) (uint64, error)
}

// Views answers from the projections. An answer holds at least what was in
// the log when the call began.
type Views interface {
	Trial(ctx context.Context, run, trial string) (projections.Trial, error)
	Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error)
	OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error)
	Resolve(ctx context.Context, ref string) (projections.Checkpoint, error)
	// Trials are those of a run.
	Trials(ctx context.Context, run string) ([]projections.Trial, error)
}

// Blobs moves event bodies that are too large for the log to files and back.
type Blobs interface {
	// Put makes data durable and returns a claim check, or data itself when
	// it is small enough.
	Put(ctx context.Context, data []byte) (events.Blob, error)
	// Get returns the data, verified.
	Get(ctx context.Context, b events.Blob) ([]byte, error)
}

// Foreign opens a checkpoint of another program by its path, and checks that
// it is whole. An error names what is wrong and where.
type Foreign func(ctx context.Context, path string) (*data.Foreign, error)

// Store is where a job keeps its log and data.
type Store struct {
	ID       string // identity
	Log      Log
	Views    Views
	Blobs    Blobs
	Data     *data.Root
	Foreign  Foreign
	Conflict func(error) bool // whether Log.Decide failed because another decision came first
	// Unserved reports whether a call of Log or Views failed because nobody
	// answered it, or for want of room in the log. The job makes such a call again
	// until it is answered; nil: never.
	Unserved func(error) bool
	Runtime  string // private directory for sockets, with a short path
	Shared   string // directory in memory for staging, such as /dev/shm

	room  func(*os.File) (int64, error) // bytes that are free where a file of Shared is; nil: ask the system
	words *lastWords                    // what Log and Views wait by; nil: they do not wait
}

// ErrConfig says that a job cannot run as it was asked for.
var ErrConfig = session.ErrConfig

// Config says what to run: the group of ranks, which [session.Config] describes,
// and how its processes are started, watched and ended. Durations are deadlines;
// zero takes the default.
type Config struct {
	session.Config
	Command     []string
	MaxRestarts int    // failures that are tolerated; -1: any number
	Resume      string // auto, none, require, a reference or the path of another program's checkpoint
	Backend     string // name of the communication backend; default none
	BackendConfig
	Torch TorchConfig
	// Withheld names variables of the environment that workers do not inherit,
	// such as the trainer's credentials: a worker is given a socket of its own.
	Withheld []string

	// Collect deletes the checkpoints that are not to be kept, after commits
	// and beside the training; nil deletes none. It returns soon after its
	// context ends, and what it has not done a later call does.
	Collect func(context.Context) error

	// Driver is asked about DeviceIDs, the GPUs and MIG instances that the job
	// uses on this node, and to which [Run] adds those that it gives to workers:
	// before each attempt, and while one runs. Without either, nobody is asked.
	// DeviceTimeout is how long a look at them may take, and how
	// long memory may be held that a process which is gone had of them; default
	// 60 s.
	Driver        Devices
	DeviceIDs     []string
	DeviceTimeout time.Duration
	// HangTimeout is how long a rank that made a request before may make none,
	// while none is being answered, until its group is ended as hung; 0: for ever.
	HangTimeout time.Duration

	Grace     time.Duration // SIGTERM to SIGKILL; default 10 s
	ShortLife time.Duration // an attempt that failed sooner waits before the next; default 5 s

	// MaxInfraRestarts is as MaxRestarts, of failures that are not the workers'.
	MaxInfraRestarts int
	// Requests ask the job to end, as a signal to its trainer does. Deadline is
	// when its machine is taken away: it is preempted PreemptGrace and Grace
	// before. The zero time means never.
	Requests     <-chan StopRequest
	Deadline     time.Time
	PreemptGrace time.Duration // for workers that were told of a preemption, until SIGTERM; default 2 min
	Launch       Launch        // said in the log, so that the job can be launched again
	Output       Output        // where the workers' output is kept

	Stdout, Stderr io.Writer       // of the workers, line by line
	ExitCode       func(error) int // of the trainer, for job.ended; default 0 or 1
}

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

// exitCode is what a trainer exits with that has no codes of its own.
func exitCode(err error) int {
	if err != nil {
		return 1
	}
	return 0
}
