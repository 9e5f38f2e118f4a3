package launch

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// attempt runs the worker group once. It returns nil when all workers ended
// well, a cause when the group failed and may be started again, and an error
// when the job cannot go on. On return no process of the job is left and no
// save is open, unless the error says so, and the log has the attempt's end.
func (j *job) attempt(ctx context.Context, n, restart int, resume string) (*FailedError, error) {
	if err := j.devices.admit(ctx, n); err != nil {
		return nil, err
	}
	j.decisions.attempt = n
	started, err := j.decisions.decide(ctx, j.groupStarted(n, resume))
	if err != nil {
		return nil, err
	}
	cause, err := j.live(ctx, n, restart, resume, started.Sequence)
	if err != nil {
		if cause, err = j.excuse(ctx, n, cause, err, started.Sequence); err != nil {
			return nil, j.broken(ctx, n, cause, err)
		}
	}
	if err := j.decisions.say(context.WithoutCancel(ctx), j.groupStopped(ctx, n, cause)); err != nil {
		return nil, j.broken(ctx, n, cause, err)
	}
	if cause != nil && ctx.Err() != nil {
		return nil, errors.Join(context.Cause(ctx), j.paused(context.WithoutCancel(ctx), n, cause.Cause))
	}
	return cause, nil
}

// live is an attempt from its group.started, which has the sequence from, to
// the end of its last process and save.
func (j *job) live(ctx context.Context, n, restart int, resume string, from uint64) (cause *FailedError, err error) {
	// What must still be said and finished is not cut short by ctx: it ends
	// the processes, and each later step has its own deadline.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g := &group{
		cfg: j.cfg, attempt: n, resume: resume, store: j.store, decisions: j.decisions,
		slots: staging.New(j.arenas, j.staging()), work: work, hub: collective.NewHub(j.cfg.World()), hello: make(chan int, j.cfg.World()),
		pulses: newPulses(j.cfg.World()), stopState: &stopState{orders: j.orders}, signals: newHeldSignals(),
	}
	g.loader = j.newLoader(g)
	defer g.slots.Close()
	defer func() {
		if !g.loader.Close(j.cfg.DrainTimeout) {
			err = errors.Join(err, fmt.Errorf("%w: a load was stopped %v ago and has not ended; look at the disk of the store, then start the run again", errStuck, j.cfg.DrainTimeout))
		}
	}()
	g.handoff = newHandoff(n, j.cfg.World(), j.cfg.Collective, j.cfg.Now, j.decisions.measured)
	g.handoff.stop, g.handoff.store, g.handoff.reports.log = g.stopState.tell, j.store, j.log
	g.saver = newSaver(j.decisions, j.store, planner.NewCoordinator(j.coordinator(n, j.cfg.World())), j.log, g.slots)
	g.saver.kept, g.saver.costs, g.saver.resume, g.saver.together = j.keeper.committed, j.diskUse.committed, resume, true
	g.loader.Prove()
	saving := make(chan error, 1)
	go func() { saving <- g.saver.run(work, from, from) }()

	w := &watch{job: j, group: g, saving: saving}
	if j.members != nil {
		g.leave = j.members.cfg.Leave
		cause, err = w.serveMembers(ctx, work)
		defer func() { err = errors.Join(err, w.closeServers()) }()
	} else {
		g.ask = j.ask
		cause, err = w.run(ctx, work, restart)
	}
	g.handoff.reports.settle()
	var saves error
	if err == nil || errors.Is(err, syscall.ENOSPC) && !w.savingEnded { // decisions are not refused
		saves = j.finishSaves(work, w, cause)
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
			return cause, errors.Join(err, saves, fmt.Errorf("%w: its writes were stopped %v ago and have not ended; look at the disk of the store, then start the run again", errStuck, j.cfg.DrainTimeout))
		}
	}
	j.newest, j.told, j.reached, j.finished = g.saver.last(), g.stopState.told.Load(), g.handoff.step.Load(), g.handoff.finishedAll()
	if errors.Is(saves, errDrain) {
		saves = j.takeOver(context.WithoutCancel(ctx), n, j.cfg.World(), from, nil)
	}
	return cause, errors.Join(err, saves)
}

// excuse makes an infrastructure failure of an error by which the log refused
// what an attempt had to say, so that the next one may go on from the last
// checkpoint. All saves of the attempt have ended then. Other errors, and one of
// a job that has to end, come back.
func (j *job) excuse(ctx context.Context, n int, cause *FailedError, err error, from uint64) (*FailedError, error) {
	if !errors.As(err, new(*unsaidError)) || ctx.Err() != nil {
		return cause, err
	}
	for _, final := range []error{ErrFenced, errLeft, errStuck, errUnserved, syscall.ENOSPC} {
		if errors.Is(err, final) {
			return cause, err
		}
	}
	j.log.Error("attempt failed because of the log", "attempt", n, "error", err)
	if ended := j.takeOver(context.WithoutCancel(ctx), n, j.cfg.World(), from, nil); ended != nil {
		return cause, errors.Join(err, ended)
	}
	if cause == nil || cause.Rank < 0 {
		cause = &FailedError{Rank: -1, Kind: InfrastructureFailure, Cause: beginning("the log refuses what the trainer has to say: "+err.Error(), maxMessage)}
	}
	return cause, nil
}

// broken closes an attempt in the log after an error that ends the job.
func (j *job) broken(ctx context.Context, n int, cause *FailedError, err error) error {
	if cause != nil {
		err = fmt.Errorf("%s; %w", cause.Cause, err)
	}
	if errors.Is(err, ErrFenced) {
		return err // the newer attempt has closed it
	}
	if !errors.Is(err, errLeft) {
		words, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWordsTimeout)
		defer cancel()
		stopped := &events.GroupStopped{Attempt: n, Reason: beginning(err.Error(), maxMessage)}
		if serr := j.decisions.say(words, stopped); !errors.Is(err, syscall.ENOSPC) { // which refuses this too
			err = errors.Join(err, serr)
		}
	}
	return j.undecided(ctx, n, cause, err)
}

// undecided says how the trial stands after attempt n, when err ends the job
// before it could be restarted or completed: paused when that was not the
// training's fault.
func (j *job) undecided(ctx context.Context, n int, cause *FailedError, err error) error {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWordsTimeout)
	defer cancel()
	if ctx.Err() != nil {
		return errors.Join(err, j.paused(words, n, context.Cause(ctx).Error()))
	}
	text := beginning(err.Error(), maxMessage)
	if errors.Is(err, syscall.ENOSPC) && (cause == nil || j.preempting()) {
		return errors.Join(err, j.paused(words, n, text))
	}
	_, derr := j.decisions.decide(words, &events.TrialErrored{Attempt: n, Message: text})
	return errors.Join(err, derr)
}

// paused says that the trial stands after an attempt, to be continued.
func (j *job) paused(ctx context.Context, n int, reason string) error {
	_, err := j.decisions.decide(ctx, &events.TrialPaused{Attempt: n, Reason: reason})
	return err
}

func (j *job) staging() staging.Config {
	return staging.Config{
		Slots: j.cfg.StagingSlots, Busy: j.cfg.WhenBusy, Ranks: j.cfg.World(),
		Memory: j.cfg.StagingMemory, Log: j.log,
	}
}

func (j *job) groupStarted(n int, resume string) *events.GroupStarted {
	g := &events.GroupStarted{Attempt: n, Job: j.cfg.Job, WorldSize: j.cfg.World(), Backend: j.cfg.Backend, Resume: resume, PassedOver: j.passed, MorePassedOver: j.morePassed}
	for rank := range j.cfg.World() {
		p := events.RankPlacement{Rank: rank}
		p.Node, p.LocalRank = j.cfg.Nodes.Of(rank)
		g.Ranks = append(g.Ranks, j.hooks.place(p))
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
	end, err := j.store.Log.LastOf(ctx, j.decisions.agg)
	if err != nil {
		return err
	}
	w.group.saver.drain <- drain{why, end}
	drained, cancel := j.store.answering(context.WithoutCancel(ctx), j.cfg.DrainTimeout)
	defer cancel()
	select {
	case err := <-w.saving:
		w.savingEnded = true
		return err
	case <-drained.Done():
		j.log.Warn("staged saves are not finished in time and are given up", "drain_timeout", j.cfg.DrainTimeout)
	}
	return errDrain
}

// errDrain asks for the recovery of what a drain could not finish.
var errDrain = errors.New("staged saves were not finished in time")

// errLeft says that processes of the attempt are alive at its end.
var errLeft = errors.New("processes of the job are left")

// errStuck says that a write does not even end when it is given up.
var errStuck = errors.New("a disk does not answer")
