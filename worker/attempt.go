package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/dist"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
)

// attempt runs the worker group once. It returns nil when all workers ended
// well, a cause when the group failed and may be started again, and an error
// when the job cannot go on. On return no process of the job is left and no
// save is open.
func (j *job) attempt(ctx context.Context, n, restart int, resume string) (*FailedError, error) {
	j.lane.attempt = n
	started, err := j.lane.decide(ctx, j.groupStarted(n, resume))
	if err != nil {
		return nil, err
	}
	// What must still be said and finished is not cut short by ctx: it ends
	// the processes, and each later step has its own deadline.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g := &group{
		cfg: j.cfg, attempt: n, resume: resume, store: j.store, lane: j.lane,
		slots: newStaging(j.arenas), hub: dist.NewHub(j.cfg.NProc), hello: make(chan int, j.cfg.NProc),
	}
	g.loader = newLoader(g, j.arenas)
	defer g.slots.close()
	defer g.loader.close()
	g.handoff = newHandoff(n, j.cfg.NProc, j.cfg.Collective, j.cfg.Now, j.lane.say)
	g.saver = newSaver(j.lane, j.store, planner.NewCoordinator(j.coordinator(n, j.cfg.NProc)), j.log, g.slots)
	saving := make(chan error, 1)
	go func() { saving <- g.saver.run(work, started.Sequence, started.Sequence) }()

	w := &watch{job: j, group: g, saving: saving}
	cause, err := w.run(ctx, work, restart)
	if err == nil {
		err = j.finishSaves(work, w, cause)
	}
	stop()
	if !w.savingEnded {
		timer := time.NewTimer(j.cfg.DrainTimeout)
		defer timer.Stop()
		select {
		case err := <-saving:
			if err != nil && !errors.Is(err, context.Canceled) {
				j.log.Warn("the saver ended with an error after the attempt", "error", err)
			}
		case <-timer.C:
			return nil, errors.Join(err, fmt.Errorf("%w: its writes were stopped %v ago and have not ended; look at the disk of the store, then start the run again", errStuck, j.cfg.DrainTimeout))
		}
	}
	if errors.Is(err, errDrain) {
		err = j.takeOver(context.WithoutCancel(ctx), n, j.cfg.NProc, started.Sequence)
	}
	if err != nil {
		return nil, err
	}
	return cause, j.groupStopped(ctx, n, cause)
}

// groupStopped says how the attempt ended. When it was ctx that ended it, the
// trial is paused and the error is the cause of ctx's end.
func (j *job) groupStopped(ctx context.Context, n int, cause *FailedError) error {
	reason := "all workers ended"
	if cause != nil {
		reason = cause.Cause
	}
	if cause == nil || ctx.Err() == nil {
		return j.lane.say(context.WithoutCancel(ctx), &events.GroupStopped{Attempt: n, Reason: reason})
	}
	err := j.lane.say(context.WithoutCancel(ctx), &events.GroupStopped{Attempt: n, Reason: reason})
	if err == nil {
		err = j.paused(ctx, n, reason)
	}
	return errors.Join(context.Cause(ctx), err)
}

// paused says that the trial stands after an attempt because ctx has ended.
func (j *job) paused(ctx context.Context, n int, reason string) error {
	_, err := j.lane.decide(context.WithoutCancel(ctx), &events.TrialPaused{Attempt: n, Reason: reason})
	return err
}

func (j *job) groupStarted(n int, resume string) *events.GroupStarted {
	g := &events.GroupStarted{Attempt: n, Job: j.cfg.Job, WorldSize: j.cfg.NProc, Backend: j.cfg.Backend, Resume: resume}
	for rank := range j.cfg.NProc {
		g.Ranks = append(g.Ranks, events.RankPlacement{Rank: rank, LocalRank: rank})
	}
	return g
}

// finishSaves drains the saver when the processes are gone: what is staged
// by all ranks is finished, the rest aborted.
func (j *job) finishSaves(ctx context.Context, w *watch, cause *FailedError) error {
	why := "the workers ended before the save was complete"
	if cause != nil {
		why = "the worker group failed: " + cause.Cause
	}
	end, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	w.group.saver.drain <- drain{why, end}
	timer := time.NewTimer(j.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case err := <-w.saving:
		w.savingEnded = true
		return err
	case <-timer.C:
		j.log.Warn("staged saves are not finished in time and are given up", "drain_timeout", j.cfg.DrainTimeout)
	}
	return errDrain
}

// errDrain asks for the recovery of what a drain could not finish.
var errDrain = errors.New("staged saves were not finished in time")

// errStuck says that a write does not even end when it is given up.
var errStuck = errors.New("a disk does not answer")
