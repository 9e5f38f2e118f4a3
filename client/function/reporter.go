package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"
)

// Reporter is what a function reports through. Its methods may be called by
// several goroutines; their reports are taken one by one.
type Reporter struct {
	r     *Runner
	turn  chan struct{} // holds a token while a report is not answered
	since time.Time     // when the function went on
	count int           // reports that were handed over
	done  bool          // one of them said so
}

// handed is a result on its way. The reporter waits until next is closed.
type handed struct {
	result Result
	next   chan struct{}
}

// Report hands over a copy of the metrics and blocks until the next step asks
// for more. It fills in [TimeThisIter] unless that is given: the time since
// the last report was answered. When a stop was requested it returns
// [ErrStop]: the metrics may have been taken, and the function is to clean up
// and return.
func (p *Reporter) Report(ctx context.Context, metrics Result) error {
	if err := metrics.check(); err != nil {
		return err
	}
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("report: %w", context.Cause(ctx))
	}
	defer func() { <-p.turn }()
	if p.done {
		return ErrDone
	}
	result := maps.Clone(metrics)
	if result == nil {
		result = Result{}
	}
	if _, has := result[TimeThisIter]; !has {
		result[TimeThisIter] = time.Since(p.since).Seconds()
	}
	h := handed{result, make(chan struct{})}
	if err := p.hand(ctx, h); err != nil {
		return err
	}
	p.count++
	p.done = result.isDone()
	select {
	case <-h.next:
	case <-p.r.stopping:
	case <-ctx.Done():
		return fmt.Errorf("report: wait for the next step: %w", context.Cause(ctx))
	}
	// The hand-off is not the function's work.
	p.since = time.Now()
	if p.Stopping() != "" {
		return ErrStop
	}
	return nil
}

// hand puts a result into the place for it. One that has room is handed over
// even if a stop was requested: whoever stops says that it was left.
func (p *Reporter) hand(ctx context.Context, h handed) error {
	select {
	case p.r.results <- h:
		return nil
	default:
	}
	select {
	case p.r.results <- h:
		return nil
	case <-p.r.stopping:
		p.r.log.Warn("a result came after the stop and is lost", "result", h.result)
		return ErrStop
	case <-ctx.Done():
		return fmt.Errorf("report: hand over the result: %w", context.Cause(ctx))
	}
}

// Stopping is why a stop was requested, such as "stop" or "preempt", or empty:
// a function that is preempted saves before it returns.
func (p *Reporter) Stopping() string {
	select {
	case <-p.r.stopping:
		return p.r.why
	default:
		return ""
	}
}

// finish hands over the marker, unless the function has said that it is done.
// Nobody waits for a step after it.
func (p *Reporter) finish(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("end of the function: %w", context.Cause(ctx))
	}
	defer func() { <-p.turn }()
	if p.done {
		return nil
	}
	p.done = true
	if p.count == 0 && !p.r.quiet {
		p.r.log.Warn("the function ran until completion without reporting; call Report once an iteration to see metrics")
	}
	return p.hand(ctx, handed{Result{Duplicate: true}, make(chan struct{})})
}

type reporterKey struct{}

// Report is [Reporter.Report] of the function that ctx was given to, for
// functions that take no reporter.
func Report(ctx context.Context, metrics Result) error {
	p, ok := ctx.Value(reporterKey{}).(*Reporter)
	if !ok {
		return errors.New("report: this context belongs to no training function: pass on the one that the function was given")
	}
	return p.Report(ctx, metrics)
}
