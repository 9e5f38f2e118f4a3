// Package retry repeats the calls of a job that its log does not answer or has no room for.
//
//	Calls    the calls of one job: they are repeated, and share one deadline once the job must end
//	Timeout  a context whose deadline leaves out the time in which the log did not answer
//
// No event of the job is lost while a call is repeated, and none of its decisions takes effect.
package retry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// EndTimeout bounds how long an ending job waits for a log that does not answer: in total, not
// per call.
const EndTimeout = 30 * time.Second

// Pauses between retries of an unanswered call. Each try has its own deadline in
// the log.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// ErrUnserved reports that the log did not answer an ending job.
var ErrUnserved = fmt.Errorf("the log did not answer in the last %v of the job; the next job records what is missing", EndTimeout)

// RefusedError reports that the log refused an event of this process. The ranks
// are not at fault.
type RefusedError struct{ Err error }

// Unwrap returns the log's reason.
func (e *RefusedError) Unwrap() error { return e.Err }

// Error returns the text of the log's reason.
func (e *RefusedError) Error() string { return e.Err.Error() }

// Options specify which errors of a call mean what. A nil function is false for all errors.
type Options struct {
	Unserved func(error) bool // the call got no answer, and is repeated
	Conflict func(error) bool // another decision came first: no [RefusedError]
	Log      *slog.Logger     // nil: nothing is logged
}

// Calls repeats the calls of a job that its log does not answer, because its owner is
// paused, its disk is slow or full, or its cluster has no leader. The retries end when the
// call is answered or refused, or its context ends.
//
// Once the job must end, unanswered calls share one deadline. The context of a call may have
// none, because events are recorded even when the job must end.
//
// The methods may be called concurrently. The calls of nil are made once.
type Calls struct {
	Options
	job   context.Context // ends when the job must end
	hurry context.CancelCauseFunc
	quiet silenceMeter

	roomy  bool          // calls wait for room
	room   roomMeter     // of those that do
	noRoom chan struct{} // closed when calls stop waiting for room

	mu     sync.Mutex
	left   time.Duration
	silent time.Time // start of the silence; zero: the log answers
}

// New returns the calls of a job that must end with a context.
func New(job context.Context, o Options) *Calls {
	never := func(error) bool { return false }
	if o.Unserved == nil {
		o.Unserved = never
	}
	if o.Conflict == nil {
		o.Conflict = never
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	c := &Calls{Options: o, left: EndTimeout, noRoom: make(chan struct{})}
	c.job, c.hurry = context.WithCancelCause(job)
	context.AfterFunc(c.job, func() { time.AfterFunc(lastRoom, func() { close(c.noRoom) }) })
	return c
}

// Hurry records that the job must end, because of why.
func (c *Calls) Hurry(why error) {
	if c != nil {
		c.hurry(why)
	}
}

// UntilAnswered repeats a call until it is answered, bounded by ctx and by the job's end. A
// refusal is a [RefusedError].
func (c *Calls) UntilAnswered(ctx context.Context, call func(context.Context) error) error {
	if c == nil {
		return call(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var began time.Time
	var timer *time.Timer
	stop := context.AfterFunc(c.job, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		began = time.Now()
		timer = time.AfterFunc(c.left, func() { cancel(ErrUnserved) })
	})
	err := c.insist(ctx, call)
	stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	if timer != nil {
		timer.Stop()
		c.left -= time.Since(began)
	}
	switch {
	case err == nil:
		c.left = EndTimeout // the log answers
	case errors.Is(context.Cause(ctx), ErrUnserved):
		err = errors.Join(ErrUnserved, err)
	case ctx.Err() == nil && !c.Conflict(err):
		err = &RefusedError{Err: err}
	}
	return err
}

// UntilDone is [Calls.UntilAnswered] for a call that does nothing while there is no room.
func (c *Calls) UntilDone(ctx context.Context, call func(context.Context) error) error {
	return c.UntilRoom(ctx, func() error { return c.UntilAnswered(ctx, call) })
}

// insist repeats a call until it is answered or refused, or ctx ends.
func (c *Calls) insist(ctx context.Context, call func(context.Context) error) error {
	c.quiet.begin()
	defer c.quiet.end()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := call(ctx)
		if err == nil || !c.Unserved(err) {
			if ctx.Err() == nil {
				c.answered()
			}
			return err
		}
		if ctx.Err() != nil {
			return err
		}
		c.unanswered(err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// unanswered logs the start of a silence once.
func (c *Calls) unanswered(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent.IsZero() {
		c.silent = time.Now()
		c.Log.Warn("log does not answer; retrying", "error", why)
	}
}

func (c *Calls) answered() {
	c.quiet.answered()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.silent.IsZero() {
		c.Log.Info("log answers again", "after", time.Since(c.silent).Round(time.Millisecond))
		c.silent = time.Time{}
	}
}
