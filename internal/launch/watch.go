package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/logs"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/pulse"
)

// watch runs the processes of one attempt.
type watch struct {
	*job
	group       *session.Group
	stop        *stopState
	signals     *heldSignals
	pulses      *pulse.Ranks // the group's
	hello       <-chan int   // the group's
	saving      <-chan error // the end of the group's saves
	savingEnded bool
	procs       []*process.Process // by local rank
	files       []*logs.File       // of their output
	tokens      map[int]string     // of the ranks' sockets
	port        *HeldPort
	others      *others // the group's other nodes; nil: there are none, or another process coordinates
	part        *part   // nil: this process coordinates
	exits       chan process.Exit
	reported    chan error   // the hand-off's end
	iterations  int          // valid once reported
	failures    []failure    // of this node's ranks
	failed      map[int]bool // indexes of other nodes whose ranks failed by themselves
	*backendHooks

	hung    chan string // why the group hangs; see hang.go
	unwatch func()      // nil: hangs are not detected
}

// run starts the processes and waits until all of them, and all their
// descendants, are gone. ctx ends them; work is the context for recording events
// about it.
func (w *watch) run(ctx, work context.Context, restart int) (cause *FailedError, err error) {
	w.exits = make(chan process.Exit, len(w.cfg.Local()))
	w.reported = make(chan error, 1)
	w.failed = map[int]bool{}
	defer w.others.loopOver()
	if w.job.living == nil {
		err = w.start(ctx, restart)
	}
	if err != nil {
		w.others.abandon(err.Error(), w.cfg.DrainTimeout)
	}
	defer func() { w.backendHooks.over() }()
	defer w.works(func() bool { return w.lives() > 0 })()
	if refused := (hookError{}); errors.As(err, &refused) {
		cause, err = &FailedError{Rank: -1, Kind: w.stopKind(ctx), Cause: refused.Error()}, nil
	} else if err == nil {
		if w.part == nil {
			go func() {
				var err error
				w.iterations, err = w.group.TakeReports(work)
				w.reported <- err
			}()
		}
		stopHangs := w.watchHangs(work)
		cause, err = w.wait(ctx, work)
		stopHangs()
	}
	if cause == nil && err == nil {
		w.backendHooks.shutDown(work, w.cfg.Grace)
	}
	if !w.standsBy() { // otherwise the node may have another job's ranks
		w.signal(syscall.SIGKILL)
		if rerr := w.processes.Kill(context.WithoutCancel(work)); rerr == nil {
			w.devices.leave(w.processes)
			w.processes.Forget()
			w.guard.Release()
		} else {
			err = errors.Join(err, fmt.Errorf("%w: %w", errLeft, rerr))
		}
	}
	process.CloseOutput(w.log, w.procs...)
	w.closeFiles()
	err = errors.Join(err, w.group.CloseServers())
	if w.port != nil {
		w.port.release()
	}
	w.group.EndCollectives(errors.New("the attempt is over"))
	if cause != nil && slices.Contains(w.cfg.Local(), cause.Rank) {
		cause.Tail = w.proc(cause.Rank).Tail()
	}
	if cause != nil {
		cause.failed = w.failing()
	}
	w.backendHooks.observe(work, cause, w.cfg.Grace)
	return cause, err
}

// wait follows the processes until all have ended. The first failure ends the
// others: SIGTERM, and SIGKILL after the grace.
func (w *watch) wait(ctx, work context.Context) (cause *FailedError, err error) {
	// The signals must not wait for the loop below: it may be appending to a log
	// that does not answer, such as after the loss of the run's lease.
	var giveUp <-chan time.Time
	killed := make(chan struct{})
	grace := time.AfterFunc(math.MaxInt64, func() {
		n := w.alive()
		if n == 0 {
			return
		}
		w.log.Warn("workers ignore SIGTERM and are killed", "workers", n, "grace", w.cfg.Grace)
		w.signal(syscall.SIGKILL)
		close(killed)
	})
	defer grace.Stop()
	term := sync.OnceFunc(func() {
		w.backendHooks.shutDown(work, w.cfg.Grace)
		left := w.releaseSignals()
		w.signal(syscall.SIGTERM)
		grace.Reset(left)
	})
	var interrupted atomic.Bool // workers lived when the job was stopped
	defer context.AfterFunc(ctx, func() {
		interrupted.Store(w.alive() > 0)
		w.log.Warn("stopping workers", "cause", context.Cause(ctx))
		term()
	})()
	defer w.obey(func() {
		term()
		if w.standsBy() {
			w.others.stop("the workers did not end when they were asked to")
		}
	})()
	end := func(why *FailedError) {
		if cause == nil {
			cause = why
			if ctx.Err() == nil {
				w.backendHooks.failed()
			}
			w.endsHangs()
			term()
			w.others.stop(why.Cause)
			if w.part != nil {
				w.part.tell(msgFailed, w.part.ended(why))
			}
		}
	}
	stopped := func() {
		end(&FailedError{Rank: -1, Kind: w.stopKind(ctx), Cause: context.Cause(ctx).Error()})
	}
	say := func(body events.Body) {
		serr := w.Append(work, body)
		if full := syscall.ENOSPC; errors.Is(serr, full) && errors.Is(err, full) {
			return // reported once, not by each rank
		}
		err = errors.Join(err, serr)
	}
	deviceFailed, unwatch := w.devices.listen(work)
	defer unwatch()
	var unsaid handoffEnd
	lapsed := w.cfg.Contact.Lapsed()
	greeted := map[int]bool{}
	sick := map[int]string{}
	failedAt := -1 // index of another node whose ranks are the cause
	hosts := 1     // nodes whose ranks have not all connected
	if w.others != nil {
		hosts = len(w.cfg.Nodes)
	}
	trained := w.job.living != nil && !w.job.living.attempt.TrainingAt.IsZero()
	ready := func() {
		if hosts--; hosts > 0 || trained {
			return
		}
		if w.part != nil {
			w.part.tell(msgHello, attemptOnly{w.group.Number})
		} else {
			trains, terr := w.backendHooks.trains()
			if terr != nil {
				end(&FailedError{Rank: -1, Cause: terr.Error()})
			}
			if trains {
				say(&events.TrainingStarted{Attempt: w.group.Number})
			}
		}
	}
	greet := func(rank int) {
		if greeted[rank] = true; len(greeted) == len(w.cfg.Local()) {
			ready()
		}
	}
	noSaves := func(why error) {
		w.savingEnded = true
		w.saving = nil
		err = errors.Join(err, why)
		end(&FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: fmt.Sprintf("the trainer can no longer accept saves: %v", why)})
	}
	if of := w.job.living; of != nil {
		for range of.greeted {
			ready()
		}
		if of.broken != "" {
			end(&FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: of.broken})
		}
	}
	alive := len(w.procs)
	heard := func(n nodeEvent) {
		w.others.ended(n)
		if n.ended && n.end != nil && n.end.failed[n.index] {
			w.failed[n.index] = true
		}
		if n.end != nil {
			maps.Copy(sick, n.end.sick)
		}
		switch {
		case n.hello:
			ready()
		case n.end != nil && cause == nil:
			failedAt = n.index
			end(n.end)
		case n.end != nil && failedAt == n.index: // its ranks' output is complete by now
			cause.complete(n.end)
		}
		if n.ended && alive == 0 && w.others.running() == 0 {
			w.group.EndReports()
		}
	}
	reported, done := w.reported, ctx.Done()
	if w.part != nil {
		reported = nil // the coordinating process takes the reports
	}
	for alive > 0 || reported != nil || w.others.running() > 0 {
		select {
		case e := <-w.exits:
			if interrupted.Load() { // done may be chosen last, after workers that ended well
				stopped()
			}
			switch {
			case !e.Failed():
			case w.part == nil && w.cfg.Contact.Lapsed() > lapsed:
				end(&FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: "the coordinating process was paused, and the guard has killed its ranks"})
			case w.part != nil && w.part.cutOff():
				stopped()
			}
			if len(w.saving) > 0 { // so may this, after workers that failed of it
				noSaves(<-w.saving)
			}
			var later []nodeEvent
			for e.Failed() && len(w.others.events()) > 0 { // so may the end of another node's contact
				if n := <-w.others.events(); n.end != nil && n.end.Kind.Or() == blame.Worker {
					later = append(later, n) // which of the two was first is unknown
				} else {
					heard(n)
				}
			}
			if alive--; alive == 0 && w.others.running() == 0 {
				w.group.EndReports()
			}
			for len(w.hello) > 0 { // its messages came before its end
				greet(<-w.hello)
			}
			told := w.errorFile(e.Rank)
			unsaid.exited(e)
			if e.Failed() {
				w.failures = append(w.failures, failure{e, told, w.cfg.Now().Unix(), cause != nil})
				end(&FailedError{Rank: e.Rank, Cause: w.failures[0].String()})
			}
			if !e.Failed() {
				w.signaled(e.Rank)
			}
			w.group.Gone(e.Rank, errors.New(e.String()))
			if w.part != nil {
				w.part.tell(msgExited, rankEnd{w.group.Number, e.Rank, e.String()})
			}
			w.group.Flush(work, e.Rank)
			say(&events.WorkerExited{
				Attempt: w.group.Number, Rank: e.Rank, Code: e.Code, Signal: e.Signal,
				Message: told.message, Traceback: told.traceback,
			})
			for _, n := range later {
				heard(n)
			}
		case rank := <-w.hello:
			greet(rank)
		case n := <-w.others.events():
			heard(n)
		case rerr := <-reported:
			reported = nil
			if rerr != nil {
				if ctx.Err() != nil { // the ranks were stopped before all could report
					stopped()
				}
				if cause != nil {
					w.log.Warn("last reports discarded: not all ranks have reported", "error", rerr)
				}
				end(unsaid.from(rerr))
			}
		case serr := <-w.saving:
			if errors.Is(serr, session.ErrOvertaken) {
				w.savingEnded = true
				return nil, serr
			}
			noSaves(serr)
		case <-deviceFailed:
			deviceFailed = nil
			end(w.devices.blame(nil))
		case why := <-w.hung:
			end(&FailedError{Rank: -1, Cause: why})
		case <-done:
			done = nil
			if over := w.overtaken(context.WithoutCancel(work)); over != nil {
				return nil, over
			}
			stopped()
		case <-killed:
			killed = nil
			giveUp = time.After(process.ReapTimeout)
		case <-giveUp:
			if w.alive() == 0 {
				giveUp = nil // they died in time; only the news is late
				continue
			}
			return cause, errors.Join(err, fmt.Errorf("%w: workers of attempt %d do not die %v after SIGKILL; look for processes in state D, a driver or a disk hangs", errLeft, w.group.Number, process.ReapTimeout))
		}
	}
	if cause = unsaid.or(cause); cause != nil && slices.Contains(w.cfg.Local(), cause.Rank) {
		root := rootCause(w.failures)
		cause.Rank, cause.Cause = root.Rank, root.String()
	}
	if cause != nil && ctx.Err() == nil {
		cause = w.devices.blame(cause)
		cause.sick = sick
	}
	if cause == nil && len(greeted) > 0 && w.iterations == 0 && w.part == nil {
		w.log.Info("workers ran until completion without reporting; call report once an iteration to see metrics")
	}
	return cause, err
}

// stopKind returns the kind of a failure that the end of ctx explains: no worker is at fault if this
// node left its group or lost its contact.
func (w *watch) stopKind(ctx context.Context) blame.Kind {
	if w.part != nil && ctx.Err() != nil {
		return blame.Infrastructure
	}
	return ""
}

// failing returns the indexes of the nodes whose ranks have failed by themselves: this one, and
// others that have reported it.
func (w *watch) failing() map[int]bool {
	all := maps.Clone(w.failed)
	for _, f := range w.failures {
		if f.itself(w.proc(f.Rank).Tail()) {
			all[w.index()] = true
		}
	}
	return all
}

// proc returns the process of a rank on this node.
func (w *watch) proc(rank int) *process.Process {
	return w.procs[slices.Index(w.cfg.Local(), rank)]
}

// standsBy reports whether this node takes no ranks and coordinates.
func (w *watch) standsBy() bool { return w.cfg.Standby && w.part == nil }

// lives counts what is left of the group: processes here, or nodes if this one has none.
func (w *watch) lives() int {
	if w.standsBy() {
		return w.others.running()
	}
	return w.alive()
}

// alive counts the processes here that have not ended. It is ahead of the reports of
// their ends, which wait until the log has taken the previous one.
func (w *watch) alive() (n int) {
	for _, p := range w.procs {
		if !p.Ended() {
			n++
		}
	}
	return n
}

// signal sends sig to the process groups of all ranks. First it records their
// descendants: once its parent is gone, a descendant can be found only by its
// marker.
func (w *watch) signal(sig syscall.Signal) {
	if _, err := w.processes.Look(); err != nil {
		w.log.Warn("children of workers can only be found by their environment", "error", err)
	}
	for _, p := range w.procs {
		p.Signal(sig)
	}
}
