// Package launch runs the processes of one job on one node: it starts them,
// watches them, ends them, and starts the group again from the last committed
// checkpoint when a worker dies. Package session serves their ranks.
//
//	Run          attempts of a job, until it is done or out of budget
//	Attend       one attempt of processes that started by themselves
//	attempt      one life of the worker group, opened by group.started
//	watch        the processes of one attempt: start, wait, end
//	orders       requests to end, by signal, time or log; replies to reports carry them
//	stopState    whether the workers poll for such requests
//	heldSignals  signals that workers hold back until the trainer ends them
//	deviceGate   the health of the job's GPUs, before and during an attempt
//	budgets      how many failures are tolerated, by whose fault they are
//	candidate    a checkpoint to resume from, which must be whole
//
// Package process has the processes themselves and the guard that kills them if
// the trainer dies.
package launch

import (
	"context"
	"io"
	"time"

	"github.com/ckptstore/ckptstore/internal/session"
)

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
	Quiet    bool // workers are told that no advice is wanted, by [client.EnvQuiet]

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
