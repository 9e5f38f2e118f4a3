package launch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// job is the state of one Run.
type job struct {
	cfg       Config
	store     Store
	log       *slog.Logger
	writer    *eventWriter
	decisions *decisionLog
	guard     *process.Guard
	processes *process.Hunt // the processes of this job
	output    *logs.Dir
	arenas    *staging.Arenas
	keeper    *keeper
	diskUse   *diskUse
	devices   *deviceGate
	runtime   string   // directory of this job's sockets
	newest    lastSave // of the last attempt
	told      bool     // its workers were told to end
	reached   int64    // the step that they reported last; -1: none
	orders    *orders
	reason    string // of the job's end, when it is not an error
	// Checkpoints that the next attempt does not resume from: their files are
	// not whole.
	passed     []events.PassedOver
	morePassed int
	hooks      *hooks
	working    atomic.Pointer[func() bool] // whether workers of an attempt live; nil: no attempt has begun

	members  *members // of a session; nil: the workers are started here
	finished bool     // all ranks of the last attempt have said that they are done
}

// Run runs a job until its workers are done, its failure budget is used up,
// or ctx ends. The caller holds the run's lease. On return no process of the
// job is left, whatever happened.
func Run(ctx context.Context, cfg Config, store Store) (err error) {
	cfg = cfg.withDefaults()
	if n := len(cfg.Local()); n < 1 {
		return fmt.Errorf("%w: %d workers a node; --nproc must be 1 or more", ErrConfig, n)
	}
	if len(cfg.Command) == 0 {
		return fmt.Errorf("%w: no command to run; give one after --", ErrConfig)
	}
	// Asked before an attempt begins: one that cannot run is none.
	if _, err := exec.LookPath(cfg.Command[0]); err != nil {
		return fmt.Errorf("%w: %w; give the path of a program after --", ErrConfig, err)
	}
	hooks, err := newHooks(&cfg)
	if err != nil {
		return err
	}
	store = store.patiently(ctx, cfg.Logger).untilRoom()
	j := &job{hooks: hooks, cfg: cfg, store: store, log: cfg.Logger, processes: process.NewHunt(cfg.Job), writer: newEventWriter(cfg, store.Log), orders: newOrders()}
	j.devices = &deviceGate{job: j}
	j.output = j.openOutput()
	j.writer.words = store.words
	if err := j.open(); err != nil {
		return err
	}
	defer func() { err = j.close(err) }()
	if j.guard, err = process.StartGuard(cfg.Job, cfg.Logger); err != nil {
		return err
	}
	defer j.guard.Stop()
	j.keeper = startKeeper(cfg.Collect, cfg.Logger)
	j.diskUse = &diskUse{usage: store.Data.Usage, bounded: cfg.Collect != nil, log: cfg.Logger}
	defer j.keeper.stop(ctx, cfg.DrainTimeout)
	return j.run(ctx)
}

func (j *job) run(ctx context.Context) (err error) {
	defer func() { err = caused(ctx, err) }()
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	defer j.takeRequests(ctx)()
	defer j.tellWhenIdle(ctx)()
	last, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	if err := j.started(ctx, host); err != nil {
		return err
	}
	deaf := j.takeOrders(ctx, last+1)
	live := j.attempts
	if j.members != nil {
		live = j.attend
	}
	err = j.unheard(caused(ctx, live(ctx)))
	deaf()
	// The job's end is told even when ctx has ended.
	end := context.WithoutCancel(ctx)
	ended := &events.JobEnded{Job: j.cfg.Job, ExitCode: j.cfg.ExitCode(err), Reason: j.reason}
	if err != nil {
		ended.Reason = beginning(err.Error(), maxMessage)
	}
	left := &events.NodeLeft{Job: j.cfg.Job, Node: j.cfg.Node, Reason: "the job ended"}
	unsaid := j.writer.sayAs(end, events.None, j.writer.node, left, ended)
	if full := syscall.ENOSPC; errors.Is(err, full) && errors.Is(unsaid, full) {
		return err // and for the same reason the log does not hear of it
	}
	return errors.Join(err, unsaid)
}

// started appends job.started and reports where it is in the log. It does not
// wait for room: a job does not start on a disk that has none.
func (j *job) started(ctx context.Context, host string) error {
	facts, err := j.writer.facts(events.None, j.writer.node, []events.Body{
		&events.JobStarted{
			Job: j.cfg.Job, Host: host, PID: os.Getpid(), Command: j.cfg.Command,
			NProc: len(j.cfg.Local()), NNodes: len(j.cfg.Nodes), Resume: j.cfg.Resume,
			Flags: j.cfg.Launch.Flags, Dir: j.cfg.Launch.Dir, Logs: j.cfg.Output.Said,
		},
		&events.NodeJoined{Job: j.cfg.Job, Node: j.cfg.Node, Host: host},
	})
	if err != nil {
		return err
	}
	sequences, err := j.writer.log.Append(ctx, facts...)
	if err == nil && j.cfg.Launch.Recorded != nil {
		j.cfg.Launch.Recorded(ctx, events.Recorded{Event: facts[0].Event, Sequence: sequences[0]})
	}
	return err
}

// attempts runs the worker group until it is done or may not be restarted.
func (j *job) attempts(ctx context.Context) error {
	trial, err := j.openTrial(ctx)
	if err != nil {
		return err
	}
	resume, err := j.firstResume(ctx, trial)
	// What could be finished is.
	if err := errors.Join(err, j.arenas.KeepLeft(resume, j.log)); err != nil {
		return err
	}
	if err := j.reapEarlier(ctx); err != nil {
		return err
	}
	backoff, head, loop := backoff{enough: j.cfg.ShortLife}, trial.Head, crashLoop{}
	budget := budgets{workers: j.cfg.MaxRestarts, infrastructure: j.cfg.MaxInfraRestarts}
	for ran := false; ; ran = true {
		if end, err := j.between(ctx, trial, ran); end {
			return err
		}
		began := time.Now()
		j.log.Info("attempt starts", "attempt", trial.Attempt+1, "world_size", j.cfg.World(), "resume", or(resume, "nothing: a fresh start"))
		cause, err := j.attempt(ctx, trial.Attempt+1, budget.used(WorkerFailure), resume)
		if err != nil {
			return err
		}
		trial.Attempt++
		if end, err := j.obeyed(ctx, trial.Attempt, cause); end {
			return err
		}
		if cause == nil {
			return j.completed(context.WithoutCancel(ctx), trial.Attempt)
		}
		n, lived := trial.Attempt, time.Since(began)
		var unknown error
		trial, unknown = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
		if unknown == nil {
			cause.Advice = loop.failed(n, resume, trial.Head == resume || trial.Head == head, cause, j.cfg.Run)
		}
		if cause.Advice != "" {
			j.log.Warn(cause.Advice, "cause", cause.Cause)
			lived = 0 // however long it takes to fail, the next wait is longer
		}
		if !budget.charge(cause.Kind) {
			cause.Attempt, cause.Restarts = n, budget.used(cause.Kind)
			_, err := j.decisions.decide(context.WithoutCancel(ctx), &events.TrialErrored{Attempt: n, Message: cause.Cause})
			return errors.Join(cause, err)
		}
		if unknown != nil {
			return j.undecided(ctx, n, cause, unknown)
		}
		if resume, err = j.nextResume(ctx, trial); err != nil {
			after := context.WithoutCancel(ctx)
			return errors.Join(cause, err, j.paused(after, trial.Attempt, beginning(err.Error(), maxMessage)))
		}
		wait := backoff.after(lived, trial.Head != head)
		head = trial.Head
		j.log.Warn("restarting the group", "cause", cause.Cause, "from", or(resume, "the beginning: nothing is committed"), "after", wait)
		if err := j.rest(ctx, wait); err != nil {
			return errors.Join(err, j.paused(context.WithoutCancel(ctx), trial.Attempt, err.Error()))
		}
	}
}

// earlierAttempts is how many attempts back processes are looked for.
const earlierAttempts = 10

// reapEarlier kills what earlier jobs of the run have left: their guard may
// have been killed with their trainer, or be still at work.
func (j *job) reapEarlier(ctx context.Context) error {
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil && !errors.Is(err, projections.ErrNotFound) {
		return err
	}
	slices.SortFunc(attempts, func(a, b projections.Attempt) int { return b.Attempt - a.Attempt })
	var jobs []string
	for _, a := range attempts[:min(len(attempts), earlierAttempts)] {
		if a.Job != "" && a.Job != j.cfg.Job && !slices.Contains(jobs, a.Job) {
			jobs = append(jobs, a.Job)
		}
	}
	if len(jobs) == 0 {
		return nil
	}
	// The log names them, and a client that can append to it can name a live job: of another
	// store or run, or of the store that this one is a copy of.
	hunt := process.NewHunt(jobs...).Of(client.EnvStoreID+"="+j.store.ID, client.EnvRun+"="+j.cfg.Run, client.EnvTrial+"="+j.cfg.Trial).Orphans(ctx, j.log)
	if err := hunt.Kill(ctx); err != nil {
		return fmt.Errorf("end what earlier jobs of the run have left: %w", err)
	}
	return nil
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// openTrial finds or creates the trial, and brings to an end what an earlier
// trainer has left open.
func (j *job) openTrial(ctx context.Context) (projections.Trial, error) {
	trial, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
	created := err == nil
	if err != nil && !errors.Is(err, projections.ErrNotFound) {
		return trial, err
	}
	j.decisions = &decisionLog{
		eventWriter: j.writer, agg: events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial},
		conflict: j.store.Conflict, attempt: trial.Attempt, last: trial.LaneSeq, noted: j.orders.saw,
	}
	if !created {
		_, err := j.decisions.decide(ctx, &events.TrialCreated{Config: j.cfg.TrialConfig})
		return trial, err
	}
	if err := j.recoverSaves(ctx, trial); err != nil {
		return trial, err
	}
	return j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
}

func (j *job) coordinator(attempt, world int) planner.CoordinatorConfig {
	return planner.CoordinatorConfig{
		Store: j.store.ID, Run: j.cfg.Run, Trial: j.cfg.Trial, Attempt: attempt,
		WorldSize: world, Timeout: j.cfg.SaveTimeout, Strict: j.cfg.StrictReplicas,
	}
}
