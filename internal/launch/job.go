package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/aftercommit"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/launch/standby"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// job is the state of one Run.
type job struct {
	*session.Job
	cfg       Config
	store     session.Store
	log       *slog.Logger
	guard     *process.Guard
	processes *process.Hunt // of this job
	output    *logs.Dir
	devices   *deviceGate
	standbys  *standby.Pool    // nil: there are none
	newest    session.LastSave // of the last attempt
	told      bool             // its workers were asked to end
	reached   int64            // the last step that they reported; -1: none
	orders    *orders
	reason    string // of the job's end, if it is not an error
	// Checkpoints that the next attempt does not resume from, because their files
	// are not whole.
	passed     []events.PassedOver
	morePassed int
	hooks      *hooks
	working    atomic.Pointer[func() bool] // whether workers of an attempt are alive; nil: no attempt has begun

	link     *nodes.Link // to the coordinating process; nil: this process coordinates
	idle     *idleness   // of this node under it; nil: requests are always for the job
	fleet    *fleet      // the job's other nodes; nil: it has one node
	port0    *HeldPort   // for rank 0 of the next group, if it is on this node
	members  *members    // of a session; nil: the job starts the workers itself
	grew     *growth     // why the last attempt ended, if to have more nodes
	finished bool        // all ranks of the last attempt reported that they are done
	succeeds string      // why this process coordinates a living group; empty: it does not
	living   *living     // the group that lives; nil: none, or not any more
}

// prepare returns a job whose processes are not started yet. It sets cfg's
// session.
func prepare(ctx context.Context, cfg Config, store session.Store, link *nodes.Link) *job {
	cfg.Reap = process.ReapEarlier
	j := &job{cfg: cfg, log: cfg.Logger, orders: newOrders(), link: link}
	j.processes = process.NewHunt(cfg.Job).Of(j.marks()...)
	own := cfg.Config
	own.Node, own.Aside = j.index(), cfg.Standby && link == nil
	if cfg.Judge != nil {
		own.Reported = func(ctx context.Context, m *events.Metrics) {
			if r := cfg.Judge(ctx, m); r != nil {
				j.ask(*r)
			}
		}
	}
	j.Job = session.NewJob(ctx, own, store)
	j.store = j.Store()
	return j
}

// index returns the index of this node in the job.
func (j *job) index() int {
	switch {
	case j.link != nil:
		return j.link.Index()
	case j.cfg.Endpoint != nil:
		return j.cfg.Endpoint.Self().Index
	}
	return j.cfg.Node
}

// marks are the variables of this node's workers that tell them from those of another
// node of the job on the same machine, and of another trial of a shared job.
func (j *job) marks() (all []string) {
	if j.cfg.Shared {
		all = append(all, client.EnvTrial+"="+j.cfg.Trial)
	}
	if j.link != nil || j.cfg.Endpoint != nil {
		all = append(all, fmt.Sprint(client.EnvNode, "=", j.index()))
	}
	return all
}

// Run runs a job until its workers are done, its failure budget is used up, or
// ctx ends. The caller holds the run's lease. When Run returns, no process of the
// job is left, even after a failure.
func Run(ctx context.Context, cfg Config, store session.Store) (err error) {
	return runJob(ctx, cfg, store, "")
}

// runJob runs a job. It continues a living group if succeeds is a reason.
func runJob(ctx context.Context, cfg Config, store session.Store, succeeds string) (err error) {
	cfg = cfg.withDefaults()
	if n := len(cfg.Local()); n < 1 && !cfg.Standby {
		return fmt.Errorf("%w: %d workers a node; --nproc must be 1 or more", ErrConfig, n)
	}
	if len(cfg.Command) == 0 {
		return fmt.Errorf("%w: no command to run; give one after --", ErrConfig)
	}
	// Check before an attempt begins: a command that cannot run must not count as
	// an attempt.
	if _, err := exec.LookPath(cfg.Command[0]); err != nil {
		return fmt.Errorf("%w: %w; give the path of a program after --", ErrConfig, err)
	}
	var hooks *hooks
	if cfg.Standby {
		cfg.Driver, cfg.Peers, cfg.Preload = nil, nil, nil // of nodes with ranks
	} else if hooks, err = newHooks(&cfg); err != nil {
		return err
	}
	keeper := aftercommit.New(cfg.Collect, "some old checkpoints not deleted", cfg.Logger)
	publisher := aftercommit.New(cfg.Publish, "last commit not published", cfg.Logger)
	use := cfg.DiskUse
	if use == nil {
		use = NewDiskUse(store, cfg.Logger, keepAdvice)
		use.Bounded = cfg.Collect != nil
	}
	cfg.Committed, cfg.Costs = func() { keeper.Committed(); publisher.Committed() }, use.Committed
	j := prepare(ctx, cfg, store, nil)
	j.hooks, j.succeeds = hooks, succeeds
	j.devices = &deviceGate{job: j}
	j.output = j.openOutput()
	if err := j.Open(); err != nil {
		return err
	}
	j.servePeers()
	defer func() { err = j.Close(err) }()
	if !cfg.Standby {
		if j.guard, err = process.StartGuard(cfg.Job, cfg.Logger, j.marks()...); err != nil {
			return err
		}
		defer j.guard.Stop()
		cfg.Contact.GuardedBy(j.guard)
	}
	withdraw, err := j.keepStandbys()
	if err != nil {
		return err
	}
	defer withdraw()
	keeper.Start()
	defer keeper.Stop(ctx, cfg.DrainTimeout)
	publisher.Start()
	defer publisher.Stop(context.WithoutCancel(ctx), publishTime)
	return j.run(ctx)
}

// publishTime is how long a job that ends waits until its last commit is published.
const publishTime = 10 * time.Second

// keepAdvice is what a job of one trial can do.
const keepAdvice = "--keep, such as --keep last=3, or with `ckptstore gc`"

// NewDiskUse returns the log of the disk of a store's data, for jobs that have no policy. advice
// completes "bound them with".
func NewDiskUse(store session.Store, log *slog.Logger, advice string) *aftercommit.DiskUse {
	return aftercommit.NewDiskUse(store.Data.Usage, log, advice)
}

func (j *job) run(ctx context.Context) (err error) {
	defer func() { err = caused(ctx, err) }()
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	defer j.takeRequests(ctx)()
	defer j.tellWhenIdle(ctx)()
	if j.cfg.Endpoint != nil {
		var stop func()
		j.fleet, stop = newFleet(context.WithoutCancel(ctx), j)
		defer stop()
	}
	last, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	switch {
	case j.succeeds != "":
		last, err = j.succeed(ctx, host)
	case !j.cfg.Shared:
		err = j.started(ctx, host)
	}
	if err != nil {
		return err
	}
	deaf := j.takeOrders(ctx, last+1)
	live := j.attempts
	if j.members != nil {
		live = j.attend
	}
	err = j.unheard(caused(ctx, live(ctx)))
	deaf()
	j.fleet.silenceLeft(ctx, err)
	if j.cfg.Shared {
		return err
	}
	return j.recordEnd(ctx, err)
}

// recordEnd records the job's end even if ctx has ended.
func (j *job) recordEnd(ctx context.Context, err error) error {
	end := context.WithoutCancel(ctx)
	if over := j.overtaken(end); over != nil {
		return errors.Join(err, over) // the job continues under another coordinator
	}
	ended := &events.JobEnded{Job: j.cfg.Job, ExitCode: j.cfg.ExitCode(err), Reason: j.reason}
	if err != nil {
		ended.Reason = session.Beginning(err.Error(), session.MaxMessage)
	}
	if j.cfg.Standby {
		ended.Term = j.JobTerm()
	}
	left := &events.NodeLeft{Job: j.cfg.Job, Node: j.index(), Reason: "the job ended", Term: ended.Term}
	unsaid := j.AppendOfRun(end, left, ended)
	if full := syscall.ENOSPC; errors.Is(err, full) && errors.Is(unsaid, full) {
		return err // the log refuses this for the same reason
	}
	return errors.Join(err, unsaid)
}

// started appends job.started and returns its place in the log. It does not wait
// for room: a job does not start on a full disk.
func (j *job) started(ctx context.Context, host string) error {
	recorded, err := j.AppendOfRunNow(ctx,
		&events.JobStarted{
			Job: j.cfg.Job, Host: host, PID: os.Getpid(), Command: j.cfg.Command,
			NProc: len(j.cfg.Local()), NNodes: j.nnodes(), Resume: j.cfg.Resume,
			Flags: j.cfg.Launch.Flags, Dir: j.cfg.Launch.Dir, Logs: j.cfg.Output.Recorded,
			SlurmJob: j.cfg.Launch.SlurmJob, SlurmRestarts: j.cfg.Launch.SlurmRestarts,
		},
		&events.NodeJoined{Job: j.cfg.Job, Node: j.index(), Host: host},
	)
	if err == nil && j.cfg.Launch.Recorded != nil {
		j.cfg.Launch.Recorded(ctx, recorded[0])
	}
	return err
}

// takeOver opens the trial, finishes the unfinished saves of earlier jobs where
// possible, and ends their processes. It returns the checkpoint to resume from.
func (j *job) takeOver(ctx context.Context) (trial projections.Trial, resume string, err error) {
	return j.takeOverFrom(ctx, j.firstResume)
}

// takeOverFrom is takeOver with the choice of the checkpoint, whose staged data stays.
func (j *job) takeOverFrom(ctx context.Context, choose func(context.Context, projections.Trial) (string, error)) (trial projections.Trial, resume string, err error) {
	if trial, err = j.OpenTrial(ctx, j.orders.saw); err != nil {
		return trial, "", err
	}
	resume, err = choose(ctx, trial)
	if err := errors.Join(err, j.KeepStaged(resume)); err != nil {
		return trial, "", err
	}
	return trial, resume, j.ReapEarlier(ctx)
}

// Settle finishes or aborts the saves that dead jobs of a trial left open, ends their processes,
// and frees their shared memory. It looks at no file of a checkpoint, so a damaged one is no error. It changes nothing if the store has no such trial. The caller
// holds the run's lease, and no job of the trial is live.
func Settle(ctx context.Context, cfg Config, store session.Store) (err error) {
	trial, err := store.Views.Trial(ctx, cfg.Run, cfg.Trial)
	if errors.Is(err, projections.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	j := prepare(ctx, cfg.withDefaults(), store, nil)
	if err := j.Open(); err != nil {
		return err
	}
	defer func() { err = j.Close(err) }()
	// Nothing is resumed, so it does not matter whether a checkpoint is whole.
	newest := func(_ context.Context, trial projections.Trial) (string, error) { return startOf(trial), nil }
	if trial, _, err = j.takeOverFrom(ctx, newest); err != nil {
		return err
	}
	if trial.Status == projections.Running || trial.Status == projections.Stopping {
		return j.paused(ctx, trial.Attempt, "the trainer ended without a record")
	}
	return nil
}

// attempts runs the worker group until it is done or may not restart.
func (j *job) attempts(ctx context.Context) error {
	var trial projections.Trial
	var resume string
	var err error
	if j.living != nil {
		trial, resume = j.living.trial, j.living.attempt.Resume
		trial.Attempt-- // the first one below
	} else {
		if trial, resume, err = j.takeOver(ctx); err != nil {
			return err
		}
		if j.fleet != nil {
			if err := j.fleet.outlive(ctx, trial); err != nil {
				return err
			}
		}
	}
	backoff, head, loop := blame.Backoff{Enough: j.cfg.ShortLife}, trial.Head, blame.CrashLoop{Run: j.cfg.Run}
	failures, losses := blame.Failures{Limit: j.cfg.MaxNodeFailures}, blame.Losses{Limit: j.cfg.MaxNodeFailures}
	budget := blame.Budgets{Workers: j.cfg.MaxRestarts, Infrastructure: j.cfg.MaxInfraRestarts}
	for ran := false; ; ran = true {
		if j.living != nil {
			j.fleet.join(j.living)
		} else if end, err := j.between(ctx, trial, ran); end {
			return err
		} else if ended, err := j.gather(ctx); err != nil {
			if ran {
				err = errors.Join(err, j.paused(context.WithoutCancel(ctx), trial.Attempt, session.Beginning(err.Error(), session.MaxMessage)))
			}
			return err
		} else if ended {
			continue // between ends the job
		}
		began := time.Now()
		j.log.Info("attempt started", "attempt", trial.Attempt+1, "world_size", j.cfg.World(), "resume", cmp.Or(resume, "nothing: a fresh start"))
		cause, err := j.attempt(ctx, trial.Attempt+1, budget.Used(blame.Worker), resume)
		if err != nil {
			return err
		}
		trial.Attempt++
		j.living = nil
		if end, err := j.obeyed(ctx, trial.Attempt, cause); end {
			return err
		}
		if j.grows(cause) {
			if trial, resume, err = j.regrow(ctx, trial.Attempt, cause); err != nil {
				return errors.Join(err, j.paused(context.WithoutCancel(ctx), trial.Attempt, session.Beginning(err.Error(), session.MaxMessage)))
			}
			head = trial.Head
			continue
		}
		if cause == nil {
			return j.completed(context.WithoutCancel(ctx), trial.Attempt)
		}
		n, lived := trial.Attempt, time.Since(began)
		var unknown error
		trial, unknown = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
		if unknown == nil {
			cause.Advice = loop.Failed(n, resume, trial.Head == resume || trial.Head == head, cause.Rank, cause.Cause)
		}
		if cause.Advice != "" {
			j.log.Warn(cause.Advice, "cause", cause.Cause)
			lived = 0 // even if it takes long to fail, the next wait is longer
		}
		if unknown == nil && j.fleet.unjoin(cause, trial.Head != head) {
			cause.Kind = blame.Preemption // it costs no budget
		} else {
			// This end is not charged yet.
			free, gone := j.fleet.quarantine(&failures, cause, trial.Head != head), j.fleet.quarantineLost(&losses, cause)
			budget.Excuse(blame.Worker, free-1)
			budget.Excuse(blame.Infrastructure, gone-1)
			if free+gone > 0 {
				cause.Kind, j.fleet.fresh = blame.Infrastructure, nil // another node is to blame
			}
		}
		if !budget.Charge(cause.Kind) {
			cause.Attempt, cause.Restarts = n, budget.Used(cause.Kind)
			err := j.Decide(context.WithoutCancel(ctx), &events.TrialErrored{Attempt: n, Message: cause.Cause})
			return errors.Join(cause, err)
		}
		if unknown != nil {
			return j.undecided(ctx, n, cause, unknown)
		}
		if resume, err = j.nextResume(ctx, trial); err != nil {
			after := context.WithoutCancel(ctx)
			return errors.Join(cause, err, j.paused(after, trial.Attempt, session.Beginning(err.Error(), session.MaxMessage)))
		}
		wait := backoff.After(lived, trial.Head != head)
		head = trial.Head
		j.log.Warn("restarting the group", "cause", cause.Cause, "from", cmp.Or(resume, "the beginning: nothing is committed"), "after", wait)
		if err := j.rest(ctx, wait); err != nil {
			return errors.Join(err, j.paused(context.WithoutCancel(ctx), trial.Attempt, err.Error()))
		}
	}
}

// nnodes returns the most nodes that the job may have.
func (j *job) nnodes() int {
	if j.cfg.Endpoint != nil {
		n := j.cfg.Endpoint.Max()
		if j.cfg.Standby {
			n++ // this node
		}
		return n
	}
	return len(j.cfg.Nodes)
}

// gather waits for the nodes of the next attempt. asked reports that the job was asked to
// end meanwhile.
func (j *job) gather(ctx context.Context) (asked bool, err error) {
	if j.fleet == nil {
		return false, nil
	}
	err = j.fleet.gather(ctx)
	if o, _ := j.orders.given(); err != nil && o != nil && ctx.Err() == nil {
		return true, nil
	}
	return false, err
}
