package function

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Options of a [Runner].
type Options struct {
	Logger *slog.Logger // default: slog.Default
	// StopTimeout is how long [Runner.Stop] waits for the function to end;
	// default 10 s. After that Stop cancels the function's context and returns.
	StopTimeout time.Duration
	Quiet       bool // log no advice, such as to report; warnings of lost data are still logged
}

const defaultStopTimeout = 10 * time.Second

// Runner runs one function once. Step and Stop may be called concurrently.
type Runner struct {
	entry    Entry
	log      *slog.Logger
	patience time.Duration // of Stop
	quiet    bool
	ctx      context.Context
	cancel   context.CancelCauseFunc
	reporter *Reporter

	results  chan handed   // capacity 1
	errs     chan error    // capacity 1
	ended    chan struct{} // closed when the function has ended, after its error
	stopping chan struct{} // closed when a stop is requested
	ask      sync.Once
	why      string // set before stopping is closed

	turn    chan struct{} // holds a token during a Step, or while Stop cleans up; guards the rest
	started bool
	over    bool          // no more steps
	next    chan struct{} // of the last result returned; nil if no report waits
	last    Result
}

// NewRunner returns a runner. The function starts on the first step; its context
// is derived from ctx and ends with the function.
func NewRunner(ctx context.Context, entry Entry, o Options) *Runner {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.StopTimeout == 0 {
		o.StopTimeout = defaultStopTimeout
	}
	r := &Runner{
		entry: entry, log: o.Logger, patience: o.StopTimeout, quiet: o.Quiet,
		results: make(chan handed, 1), errs: make(chan error, 1), last: Result{},
		ended: make(chan struct{}), stopping: make(chan struct{}), turn: make(chan struct{}, 1),
	}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	r.reporter = &Reporter{r: r, turn: make(chan struct{}, 1)}
	return r
}

// Step resumes the function and returns its next result. If the function has
// returned without reporting "done", that is its last result with the marker. An
// error of the function is an [Error], and follows all of its results. If ctx ends
// first, the next step waits for the same result.
func (r *Runner) Step(ctx context.Context) (Result, error) {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("step: %w", context.Cause(ctx))
	}
	defer func() { <-r.turn }()
	if r.over {
		return nil, ErrEnded
	}
	r.proceed()
	return r.fetch(ctx)
}

// fetch waits for a result, or for the end of the function and its error.
func (r *Runner) fetch(ctx context.Context) (Result, error) {
	select {
	case h := <-r.results:
		return r.take(h), nil
	case <-r.ended:
	case <-ctx.Done():
		return nil, fmt.Errorf("step: %w", context.Cause(ctx))
	}
	select { // a result may have arrived just before the end
	case h := <-r.results:
		return r.take(h), nil
	default:
	}
	r.over = true
	select {
	case err := <-r.errs:
		return nil, err
	default:
	}
	if r.reporter.Stopping() != "" {
		return nil, ErrStop
	}
	return nil, ErrSilent
}

// proceed starts the function, or lets it return from its report.
func (r *Runner) proceed() {
	if !r.started {
		r.started = true
		r.reporter.since = time.Now()
		go r.supervise()
		return
	}
	r.release()
}

func (r *Runner) release() {
	if r.next != nil {
		close(r.next)
		r.next = nil
	}
}

// take turns a handed-over result into the result of a step.
func (r *Runner) take(h handed) Result {
	if len(r.errs) > 0 {
		r.log.Warn("function failed; returning its earlier results first")
	}
	r.next = h.next
	if h.result.isMarker() {
		h.result = r.last.with(h.result)
	}
	r.last = h.result
	if r.last.isDone() || r.last.isMarker() {
		r.over = true
		r.release() // no step follows: let the function clean up and return
	}
	return r.last.with(nil)
}

// RequestStop makes the function's next or current report return [ErrStop]. It
// does not wait. [Reporter.Stopping] returns why; only the first request counts.
func (r *Runner) RequestStop(why string) {
	r.ask.Do(func() {
		r.why = why
		close(r.stopping)
	})
}

// Stop requests a stop and waits until the function has ended. After
// Options.StopTimeout it returns [ErrRunning]. It logs a result that was not
// fetched, and returns an error of the function that no step has returned.
func (r *Runner) Stop(ctx context.Context) error {
	r.RequestStop("stop")
	limit := time.NewTimer(r.patience)
	defer limit.Stop()
	select {
	case r.turn <- struct{}{}:
	case <-limit.C:
		return ErrRunning // a step is still waiting for the function
	case <-ctx.Done():
		return fmt.Errorf("stop: %w", context.Cause(ctx))
	}
	defer func() { <-r.turn }()
	r.over = true
	if !r.started {
		r.cancel(ErrStop)
		return nil
	}
	var err error
	select {
	case <-r.ended:
	case <-limit.C:
		err = ErrRunning
		r.cancel(ErrStop)
	case <-ctx.Done():
		err = fmt.Errorf("stop: %w", context.Cause(ctx))
	}
	select {
	case h := <-r.results:
		if !h.result.isMarker() {
			r.log.Warn("result after stop lost", "result", h.result)
		}
	default:
	}
	select {
	case ferr := <-r.errs:
		err = errors.Join(ferr, err)
	default:
	}
	return err
}
