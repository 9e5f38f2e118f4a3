package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/projections"
)

// stopState tracks whether the workers of an attempt poll for stop requests, and
// whether one of them was asked to end.
type stopState struct {
	orders *orders
	open   atomic.Bool // one of them has reported, or asked whether to stop
	told   atomic.Bool // one of them was asked to end, by an answer or by SIGTERM
	growing
}

var _ session.Orders = (*stopState)(nil)

// resume continues the state that the coordinator before a living group's had; l may be nil.
func (h *stopState) resume(l *living) {
	if l == nil {
		return
	}
	h.open.Store(l.listens || l.resumed.Last.Iteration > 0)
	if l.grew != nil {
		h.growing.resume(l.grew)
	} else {
		h.told.Store(l.told != "")
	}
}

// Listens implements [session.Orders].
func (h *stopState) Listens() { h.open.Store(true) }

// Tell implements [session.Orders].
func (h *stopState) Tell() string {
	if o, _ := h.orders.given(); o != nil {
		h.told.Store(true)
		return o.asks()
	}
	if h.tellGrowth(time.Now()) {
		return session.Grow
	}
	return ""
}

// obey ends the workers when the job is asked to end, until the caller calls
// done. Workers that poll learn of the request from the answers to their reports
// and questions, and have a while to save and end. Others get SIGTERM.
func (w *watch) obey(term func()) (done func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if w.awaitOrder(ctx) {
			w.stop.told.Store(true)
			term()
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// awaitOrder blocks until the workers must get SIGTERM, because they do not poll
// for the order or do not obey it in time.
func (w *watch) awaitOrder(ctx context.Context) bool {
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	for {
		o, came := w.orders.given()
		if o != nil {
			if w.lives() == 0 {
				return false // they have ended; only the news is late
			}
			if !w.stop.open.Load() {
				w.log.Warn("workers neither report nor poll for stop requests; sending SIGTERM", "reason", o.Reason, "grace", w.cfg.Grace)
				return true
			}
			if !o.Last {
				timer.Reset(w.patience(o))
			}
		}
		select {
		case <-came:
		case <-timer.C:
			w.log.Warn("workers did not end when asked; sending SIGTERM", "how", o.asks(), "after", w.patience(o), "grace", w.cfg.Grace)
			return true
		case <-ctx.Done():
			return false
		}
	}
}

// patience is how long workers may take to end after they were asked to.
func (w *watch) patience(o *stopOrder) time.Duration {
	if o.Preempt {
		return w.cfg.PreemptGrace
	}
	return w.cfg.Grace
}

// PreemptedError is returned if a job ended because it was preempted: its trial
// is paused, and the next job of the run continues.
type PreemptedError struct {
	Reason     string // who requested it
	Checkpoint string // the line's newest; empty: none exists
	// Saved reports that the workers' progress is not lost: this attempt began a
	// checkpoint of the line since the request and it was committed, or no report
	// of the attempt is of a later step than the line's newest checkpoint. An
	// attempt without reports, in a trial that has some, made no progress.
	Saved bool
	Why   string // why it is not saved
	Idle  bool   // only this node was preempted, which had no ranks
}

// Error returns what is kept and the next step.
func (e *PreemptedError) Error() string {
	switch {
	case e.Idle:
		return fmt.Sprintf("preempted (%s): this node had no ranks and has left the job; start its trainer again to have it as a spare", e.Reason)
	case e.Saved:
		return fmt.Sprintf("preempted (%s): %s is committed; start the run again to continue from there", e.Reason, e.Checkpoint)
	case e.Checkpoint == "":
		return fmt.Sprintf("preempted (%s), and %s; started again, the run begins afresh", e.Reason, e.Why)
	}
	return fmt.Sprintf("preempted (%s), and %s; started again, the run continues from %s", e.Reason, e.Why, e.Checkpoint)
}

// groupStopped describes the end of an attempt, with the budget that pays for it.
func (j *job) groupStopped(ctx context.Context, n int, cause *FailedError) *events.GroupStopped {
	stopped := &events.GroupStopped{Attempt: n, Reason: "all workers ended"}
	if cause != nil {
		stopped.Reason = cause.Cause
		if ctx.Err() == nil {
			stopped.Failure = string(cause.Kind.Or())
		}
	}
	o, _ := j.orders.given()
	switch {
	case ctx.Err() != nil:
	case o != nil && j.told && !o.Last:
		stopped.Failure = ""
		if o.Preempt {
			stopped.Failure = string(blame.Preemption)
		}
		stopped.Reason = session.Beginning(fmt.Sprintf("%s (%s): %s", o.asks(), o.Reason, stopped.Reason), session.MaxMessage)
	case j.grows(cause):
		stopped.Failure, stopped.Reason = "", j.grew.ending(cause)
	}
	return stopped
}

// obeyed ends the job after attempt n if it was asked to end; it returns false if
// the job continues. If all workers ended well before they learned of the
// request, the training is complete.
func (j *job) obeyed(ctx context.Context, n int, cause *FailedError) (bool, error) {
	o, _ := j.orders.given()
	if o == nil || cause == nil && (!j.told || o.Last) {
		return false, nil
	}
	if o.Last {
		j.orders.void(o)
		return false, nil
	}
	ctx = context.WithoutCancel(ctx)
	unsaved := ""
	if cause == nil {
		var err error
		if unsaved, err = j.lost(ctx); err != nil {
			return true, err
		}
	}
	trial, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return true, err
	}
	if o.Preempt {
		e := &PreemptedError{Reason: o.Reason, Checkpoint: trial.Head}
		if e.Why, err = j.unsaved(ctx, n, o, trial); err != nil {
			return true, err
		}
		if unsaved != "" {
			e.Why = fmt.Sprintf("the last save, %s, is lost: %s", j.newest.Checkpoint, unsaved)
		}
		e.Saved = e.Why == ""
		return true, errors.Join(e, j.paused(ctx, n, session.Beginning("preempted: "+o.Reason, session.MaxMessage)))
	}
	j.reason = session.Beginning("stopped as asked: "+o.Reason, session.MaxMessage)
	err = j.paused(ctx, n, j.reason)
	if unsaved != "" {
		return true, errors.Join(&LostSaveError{Checkpoint: j.newest.Checkpoint, Reason: unsaved, Newest: trial.Head}, err)
	}
	j.log.Info("job stopped as requested; start the run again to continue", "reason", o.Reason, "from", cmp.Or(trial.Head, "the beginning: nothing is committed"))
	return true, err
}

// unsaved returns why the progress of attempt n is not in the line's newest
// checkpoint, "" if it is. If the trial has reports, but none of this attempt,
// the workers were still starting or loading and made no progress.
func (j *job) unsaved(ctx context.Context, n int, o *stopOrder, trial projections.Trial) (string, error) {
	const none = "no checkpoint was committed"
	head := trial.Head
	if head == "" {
		return none, nil
	}
	c, err := j.store.Views.Resolve(ctx, j.cfg.Run+"/"+j.cfg.Trial+"@"+head)
	switch {
	case errors.Is(err, projections.ErrNotFound) || err == nil && c.ID != head:
		return none + " by this run", nil
	case err != nil:
		return "", err
	case c.Attempt == n && c.BegunSeq > o.after: // an earlier one may be of an earlier step
		return "", nil
	case j.reached < 0 && trial.Iterations > 0 && trial.Resume == head:
		return "", nil
	case j.reached < 0:
		return none + " since, and the workers do not report how far they are", nil
	case j.reached > c.Step:
		return fmt.Sprintf("%s since: the workers reported step %d", none, j.reached), nil
	}
	return "", nil
}

// between ends a job that is asked to end while no attempt is alive. This loses
// no progress beyond failed attempts. ran is whether the job had any attempt.
func (j *job) between(ctx context.Context, trial projections.Trial, ran bool) (bool, error) {
	o, _ := j.orders.given()
	if o == nil {
		return false, nil
	}
	ctx = context.WithoutCancel(ctx)
	var err error
	reason := session.Beginning("preempted: "+o.Reason, session.MaxMessage)
	if !o.Preempt {
		reason = session.Beginning("stopped as asked: "+o.Reason, session.MaxMessage)
		j.reason = reason
	}
	if ran || trial.Status == projections.Running || trial.Status == projections.Stopping {
		err = j.paused(ctx, trial.Attempt, reason)
	}
	if !o.Preempt {
		return true, err
	}
	e := &PreemptedError{Reason: o.Reason, Checkpoint: trial.Head, Saved: trial.Head != ""}
	if !e.Saved {
		e.Why = "no checkpoint was committed"
	}
	return true, errors.Join(e, err)
}

// errAsked is the cause when a job was asked to end and no worker of it is alive.
var errAsked = errors.New("the job was asked to end")

// works records how to check whether workers of an attempt are alive, until the
// caller calls over.
func (j *job) works(alive func() bool) (over func()) {
	j.working.Store(&alive)
	return func() { j.working.Store(nil) }
}

// idleEvery is how often a job that is asked to end checks whether its workers
// have ended.
const idleEvery = 100 * time.Millisecond

// tellWhenIdle stops waiting for the log as soon as a job is asked to end and no
// worker is alive, until the caller calls stop.
func (j *job) tellWhenIdle(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			o, came := j.orders.given()
			alive := j.working.Load()
			switch {
			case o == nil || o.Last: // the job may restart the group
				select {
				case <-came:
				case <-ctx.Done():
				}
			case alive == nil || !(*alive)():
				j.Hurry(errAsked)
				return
			default:
				select {
				case <-time.After(idleEvery):
				case <-ctx.Done():
				}
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// unheard returns the error of a preempted job whose log no longer takes its
// events: it is unknown what was saved, or too little was.
func (j *job) unheard(err error) error {
	if !j.preempting() || errors.As(err, new(*PreemptedError)) {
		return err
	}
	why := ""
	switch {
	case errors.Is(err, retry.ErrUnserved):
		why = "the log does not answer, so it is unknown what is saved"
	case errors.Is(err, syscall.ENOSPC):
		why = "the disk of the log is full, so what came after its last commit is lost; free space there"
	default:
		return err
	}
	o, _ := j.orders.given()
	return errors.Join(&PreemptedError{Reason: o.Reason, Checkpoint: "its newest checkpoint", Why: why}, err)
}

// preempting reports whether a preemption asked the job to end.
func (j *job) preempting() bool {
	o, _ := j.orders.given()
	return o != nil && o.Preempt && !o.Last
}

// rest waits between two attempts, or until the job is asked to end.
func (j *job) rest(ctx context.Context, d time.Duration) error {
	o, came := j.orders.given()
	if o != nil {
		return nil
	}
	resting, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-came:
	case <-resting.Done():
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
