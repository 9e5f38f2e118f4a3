package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"
)

// Reporter reports the results of a function. Its methods are safe for concurrent
// use; reports are handled one at a time.
type Reporter struct {
	r     *Runner
	turn  chan struct{} // holds a token during a report
	since time.Time     // when the function last resumed
	count int           // reports that were handed over
	done  bool          // "done" or the marker was among them
}

// handed is a result that was handed over. The reporter waits until next is closed.
type handed struct {
	result Result
	next   chan struct{}
}

// Report hands over a copy of the metrics and blocks until the next step asks
// for more. It sets [TimeThisIter], unless given, to the time since the last report
// returned. After a stop request it returns [ErrStop], whether or not the trainer
// has taken the metrics; the function must then clean up and return.
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

// hand hands a result over. If there is room, it does so even after a stop request:
// Stop then logs the result as lost.
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
		p.r.log.Warn("result after stop lost", "result", h.result)
		return ErrStop
	case <-ctx.Done():
		return fmt.Errorf("report: hand over the result: %w", context.Cause(ctx))
	}
}

// Stopping returns the reason of a stop request, such as "stop" or "preempt", or
// "" without one. A function that is preempted should save before it returns.
func (p *Reporter) Stopping() string {
	select {
	case <-p.r.stopping:
		return p.r.why
	default:
		return ""
	}
}

// finish hands over the marker, unless the function has reported "done". It does
// not wait for another step.
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
		p.r.log.Warn("function returned without a report; call Report once an iteration to see metrics")
	}
	return p.hand(ctx, handed{Result{Duplicate: true}, make(chan struct{})})
}

type reporterKey struct{}

// Report is [Reporter.Report] for functions that take no reporter. ctx must be the
// context of the function, or derived from it.
func Report(ctx context.Context, metrics Result) error {
	p, ok := ctx.Value(reporterKey{}).(*Reporter)
	if !ok {
		return errors.New("report: this context belongs to no training function; pass the function's own context")
	}
	return p.Report(ctx, metrics)
}
