package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// attempt runs the worker group once. It returns nil if all workers ended well, a
// cause if the group failed and may restart, and an error if the job cannot
// continue. When it returns, the log has the attempt's end. No process of the job
// is left and no save is open, unless the error reports it.
func (j *job) attempt(ctx context.Context, n, restart int, resume string) (*FailedError, error) {
	started, err := j.open(ctx, n, resume)
	if err != nil {
		return nil, err
	}
	if err := j.recordDevices(ctx, n); err != nil {
		j.log.Warn("devices not recorded", "attempt", n, "error", err)
	}
	cause, err := j.live(ctx, n, restart, resume, started)
	if err != nil {
		if cause, err = j.excuse(ctx, n, cause, err, started); err != nil {
			return nil, j.broken(ctx, n, cause, err)
		}
	}
	if over := j.overtaken(context.WithoutCancel(ctx)); over != nil {
		return nil, over
	}
	if err := j.recordStop(ctx, n, cause); err != nil {
		return nil, j.broken(ctx, n, cause, err)
	}
	if cause != nil && ctx.Err() != nil {
		return nil, errors.Join(context.Cause(ctx), j.paused(context.WithoutCancel(ctx), n, cause.Cause))
	}
	return cause, nil
}

// recordStop records the end of an attempt.
func (j *job) recordStop(ctx context.Context, n int, cause *FailedError) error {
	stopped := j.groupStopped(ctx, n, cause)
	stopped.Term = j.Term()
	return j.Append(context.WithoutCancel(ctx), stopped)
}

// open decides an attempt, and returns the sequence of its group.started.
func (j *job) open(ctx context.Context, n int, resume string) (uint64, error) {
	if j.living != nil {
		return j.living.attempt.StartedSeq, nil
	}
	if err := j.devices.admit(ctx, n); err != nil {
		return 0, err
	}
	group, err := j.groupStarted(ctx, n, resume)
	if err != nil {
		return 0, err
	}
	return j.StartAttempt(ctx, group)
}

// live runs an attempt from its group.started, at sequence from, to the end of
// its last process and save.
func (j *job) live(ctx context.Context, n, restart int, resume string, from uint64) (cause *FailedError, err error) {
	// ctx must not cut off the last appends and saves: it ends only the
	// processes, and each later step has its own deadline.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	w := &watch{job: j, stop: &stopState{orders: j.orders}}
	w.stop.resume(j.living)
	at := session.Attempt{Number: n, Resume: resume, Started: from, Orders: w.stop, Hooks: w, Nodes: j.cfg.Nodes, Node: j.cfg.Node}
	order := startOrder{Attempt: n, Restart: restart, Resume: resume, Started: from, Nodes: j.cfg.Nodes, Survives: j.cfg.Standby && j.cfg.Survival != nil && (j.succeeds == "" || j.living != nil)}
	w.others = j.fleet.others(work, order)
	if j.living != nil {
		at.Resumed = j.living.resumed
		w.others.resume(j.living)
	}
	if w.others != nil {
		at.Forward, at.Replicas = w.others, w.others.replicas()
		at.Index = j.fleet.indexAt
		at.PeerAt, at.PeerClient = w.others.peerAt, j.broadcasts()
	}
	if j.members != nil {
		w.signals, at.Leave = newHeldSignals(nil), j.members.cfg.Leave
	} else {
		w.signals = newHeldSignals(j.ask)
	}
	at.Signals = w.signals
	g := j.Begin(work, at)
	defer func() { err = errors.Join(err, g.Close()) }()
	w.group, w.pulses, w.hello, w.saving = g, g.Pulses(), g.Hello(), g.Saved()
	w.others.begin(g)
	if j.living != nil {
		j.fleet.bury(work, w.others, j.living)
	}
	ungrow := w.watchGrowth(work)
	if j.members != nil {
		cause, err = w.serveMembers(ctx, work)
		defer func() { err = errors.Join(err, g.ShutDownServers()) }()
	} else {
		cause, err = w.run(ctx, work, restart)
	}
	ungrow()
	g.SettleReports()
	var saves error
	if err == nil || errors.Is(err, syscall.ENOSPC) && !w.savingEnded { // decisions are not refused
		why := "the workers ended before the save was complete"
		if cause != nil {
			why = "the worker group failed: " + cause.Cause
		}
		w.savingEnded, saves = g.Drain(work, why)
	}
	if errors.Is(err, session.ErrOvertaken) {
		w.others.leaveAlone() // they have another coordinator
	} else {
		w.others.close(j.cfg.DrainTimeout + j.cfg.Grace)
	}
	stop()
	cause.fell(w.others.losses())
	if !w.savingEnded {
		if stuck := g.StopSaves(); stuck != nil {
			return cause, errors.Join(err, saves, stuck)
		}
	}
	j.newest, j.told, j.reached, j.finished = g.LastSave(), w.stop.told.Load(), g.Step(), g.Finished()
	if j.grew = w.stop.grew(); j.grew != nil {
		j.told = true // by the same answer as a request to the job
	}
	if errors.Is(saves, session.ErrDrain) {
		saves = j.TakeOver(context.WithoutCancel(ctx), n, from)
	}
	return cause, errors.Join(err, saves)
}

// excuse converts an error by which the log refused an attempt's events to an
// infrastructure failure, so that the next attempt can continue from the last
// checkpoint. All saves of the attempt have then ended. It returns other errors
// unchanged, and all errors of a job that must end.
func (j *job) excuse(ctx context.Context, n int, cause *FailedError, err error, from uint64) (*FailedError, error) {
	if !errors.As(err, new(*retry.RefusedError)) || ctx.Err() != nil {
		return cause, err
	}
	for _, final := range []error{session.ErrFenced, errLeft, session.ErrStuck, retry.ErrUnserved, syscall.ENOSPC} {
		if errors.Is(err, final) {
			return cause, err
		}
	}
	j.log.Error("attempt failed: log refused an event", "attempt", n, "error", err)
	if ended := j.TakeOver(context.WithoutCancel(ctx), n, from); ended != nil {
		return cause, errors.Join(err, ended)
	}
	if cause == nil || cause.Rank < 0 {
		cause = &FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: session.Beginning("the log refuses the trainer's events: "+err.Error(), session.MaxMessage)}
	}
	return cause, nil
}

// broken closes an attempt in the log after an error that ends the job.
func (j *job) broken(ctx context.Context, n int, cause *FailedError, err error) error {
	if cause != nil {
		err = fmt.Errorf("%s; %w", cause.Cause, err)
	}
	if errors.Is(err, session.ErrFenced) {
		return err // the newer attempt has closed it
	}
	if !errors.Is(err, errLeft) {
		words, cancel := context.WithTimeout(context.WithoutCancel(ctx), retry.EndTimeout)
		defer cancel()
		stopped := &events.GroupStopped{Attempt: n, Reason: session.Beginning(err.Error(), session.MaxMessage), Term: j.Term()}
		if serr := j.Append(words, stopped); !errors.Is(err, syscall.ENOSPC) { // a full disk refuses this too
			err = errors.Join(err, serr)
		}
	}
	return j.undecided(ctx, n, cause, err)
}

// undecided records how the trial stands after attempt n, when err ends the job
// before it could restart or complete: paused if the training did not cause err.
func (j *job) undecided(ctx context.Context, n int, cause *FailedError, err error) error {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), retry.EndTimeout)
	defer cancel()
	if ctx.Err() != nil {
		return errors.Join(err, j.paused(words, n, context.Cause(ctx).Error()))
	}
	text := session.Beginning(err.Error(), session.MaxMessage)
	if errors.Is(err, syscall.ENOSPC) && (cause == nil || j.preempting()) {
		return errors.Join(err, j.paused(words, n, text))
	}
	derr := j.Decide(words, &events.TrialErrored{Attempt: n, Message: text})
	return errors.Join(err, derr)
}

// paused records that the trial can be continued after an attempt.
func (j *job) paused(ctx context.Context, n int, reason string) error {
	return j.Decide(ctx, &events.TrialPaused{Attempt: n, Reason: reason})
}

// groupStarted returns the decision that opens an attempt. It places the ranks of a group
// over several nodes by node, because its size must not grow with their number.
func (j *job) groupStarted(ctx context.Context, n int, resume string) (*events.GroupStarted, error) {
	g := &events.GroupStarted{Attempt: n, Job: j.cfg.Job, WorldSize: j.cfg.World(), Backend: j.cfg.Backend, Resume: resume, PassedOver: j.passed, MorePassedOver: j.morePassed}
	if j.fleet != nil && len(j.cfg.Nodes) > 1 && j.cfg.Nodes.InOrder() {
		return g, j.fleet.place(ctx, g)
	}
	for at, ranks := range j.cfg.Nodes {
		for local, rank := range ranks {
			p := events.RankPlacement{Rank: rank, Node: j.fleet.indexAt(at), LocalRank: local}
			if at == j.cfg.Node {
				p = j.hooks.place(p)
			}
			g.Ranks = append(g.Ranks, p)
		}
	}
	slices.SortFunc(g.Ranks, func(a, b events.RankPlacement) int { return cmp.Compare(a.Rank, b.Rank) })
	return g, nil
}

// recordDevices records the devices of this node's ranks, in an attempt whose group.started
// does not.
func (j *job) recordDevices(ctx context.Context, n int) error {
	has := func(devices []string) bool { return len(devices) > 0 }
	if j.hooks == nil || len(j.cfg.Nodes) == 1 || !j.cfg.Nodes.InOrder() || !slices.ContainsFunc(j.hooks.given, has) {
		return nil
	}
	return j.Append(ctx, &events.NodeDevices{Attempt: n, Ranks: events.RankRuns(j.cfg.Local()), Devices: j.hooks.given})
}

// errLeft is returned if processes of the attempt are alive at its end.
var errLeft = errors.New("processes of the job are left")
