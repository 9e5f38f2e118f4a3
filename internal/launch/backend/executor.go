package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

var (
	// ErrLive is returned if a group is started while another is live.
	ErrLive = errors.New("a session is live already")
	// ErrNoSession is returned if no group is live: none was started, or it has
	// ended.
	ErrNoSession = errors.New("no session is live")
)

// Options configure how an executor runs a backend.
type Options struct {
	// Init runs before all other hooks of each group.
	Init func(ctx context.Context, g *Group) error
	// Share is whether workers see each other's devices; nil leaves the choice to
	// the backend.
	Share *bool
	// Ordered sets CUDA_DEVICE_ORDER in the workers' environment.
	Ordered bool
	Timeout time.Duration // of each hook on the trainer; default 1 min
	Log     *slog.Logger  // default: nothing is logged
}

// Executor runs the hooks of a backend for one group after another. At most one
// group is live, from Start to End. It is safe for concurrent use.
type Executor struct {
	name    string
	backend Backend
	opts    Options

	mu   sync.Mutex // not held during hooks
	live *session
}

// session is a live group.
type session struct {
	group    *Group
	started  bool // all hooks of the start succeeded
	training bool // OnTrainingStart has begun
	closed   bool // OnShutdown has begun, or must not run
	failed   bool // OnShutdown must not run
}

// NewExecutor returns an executor of a backend. Errors contain the name.
func NewExecutor(name string, b Backend, o Options) *Executor {
	if o.Timeout == 0 {
		o.Timeout = time.Minute
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Executor{name: name, backend: b, opts: o}
}

// Start makes a group live: it runs the init hook, sets the devices that workers
// see, and calls OnStart. After an error no group is live.
func (e *Executor) Start(ctx context.Context, g *Group) error {
	s := &session{group: g}
	e.mu.Lock()
	if live := e.live; live != nil {
		e.mu.Unlock()
		return fmt.Errorf("backend %s: start attempt %d: %w: attempt %d has not ended", e.name, g.Attempt, ErrLive, live.group.Attempt)
	}
	e.live = s
	e.mu.Unlock()
	err := e.start(ctx, g)
	e.mu.Lock()
	defer e.mu.Unlock()
	s.started = true
	if err != nil && e.live == s {
		e.live = nil
	}
	return err
}

func (e *Executor) start(ctx context.Context, g *Group) error {
	if e.opts.Init != nil {
		if err := e.call(ctx, "init hook", g, e.opts.Init); err != nil {
			return err
		}
	}
	share, err := e.Shares()
	if err != nil {
		return err
	}
	if err := g.show(share, !e.opts.Ordered); err != nil {
		return fmt.Errorf("backend %s: %w", e.name, err)
	}
	return e.call(ctx, "OnStart", g, e.backend.OnStart)
}

// Shares reports whether workers see each other's devices.
func (e *Executor) Shares() (share bool, err error) {
	if e.opts.Share != nil {
		return *e.opts.Share, nil
	}
	if err = guarded("ShareVisibleDevices", func() error { share = e.backend.ShareVisibleDevices(); return nil }); err != nil {
		return false, fmt.Errorf("backend %s: %w", e.name, err)
	}
	return share, nil
}

// HoldsHello reports whether hellos are answered only after TrainingStart.
func (e *Executor) HoldsHello() (holds bool, err error) {
	g, ok := e.backend.(Gate)
	if !ok {
		return false, nil
	}
	if err = guarded("HoldsHello", func() error { holds = g.HoldsHello(); return nil }); err != nil {
		return false, fmt.Errorf("backend %s: %w", e.name, err)
	}
	return holds, nil
}

// TrainingStart runs OnTrainingStart, once, after all workers of the live group
// have sent hello.
func (e *Executor) TrainingStart(ctx context.Context) error {
	e.mu.Lock()
	s := e.live
	if s == nil || !s.started || s.training {
		e.mu.Unlock()
		if s != nil && s.training {
			return fmt.Errorf("backend %s: start training: the training of attempt %d has started already", e.name, s.group.Attempt)
		}
		return fmt.Errorf("backend %s: start training: %w", e.name, ErrNoSession)
	}
	s.training = true
	e.mu.Unlock()
	return e.call(ctx, "OnTrainingStart", s.group, e.backend.OnTrainingStart)
}

// Fetch decodes a report of a worker of the live group. After an error the caller must not use
// data: a hook that has not ended in time may still change it.
func (e *Executor) Fetch(data map[string]any) (map[string]any, error) {
	e.mu.Lock()
	started := e.live != nil && e.live.started
	e.mu.Unlock()
	if !started {
		return nil, fmt.Errorf("backend %s: fetch a report: %w", e.name, ErrNoSession)
	}
	type decoded struct {
		out map[string]any
		err error
	}
	done := make(chan decoded, 1)
	go func() {
		var d decoded
		d.err = guarded("DecodeData", func() (err error) { d.out, err = e.backend.DecodeData(data); return err })
		done <- d
	}()
	limit := time.NewTimer(e.opts.Timeout)
	defer limit.Stop()
	var d decoded
	select {
	case d = <-done:
	case <-limit.C:
		d.err = fmt.Errorf("DecodeData does not end within %v", e.opts.Timeout)
	}
	if d.err != nil {
		return nil, fmt.Errorf("backend %s: decode a report: %w", e.name, d.err)
	}
	return d.out, nil
}

// Shutdown begins the graceful end of the live group, unless it has begun or was
// aborted: it runs OnShutdown, and logs its error. The group's workers may
// continue for a while, and their last reports are fetched.
func (e *Executor) Shutdown(ctx context.Context) {
	s := e.close()
	if s == nil {
		return
	}
	if err := e.call(ctx, "OnShutdown", s.group, e.backend.OnShutdown); err != nil {
		e.opts.Log.Warn("backend did not shut down in order, as when a worker has died", "error", err)
	}
}

// Abort marks the end of the live group as not graceful: of the hooks only
// OnFailure still runs.
func (e *Executor) Abort() {
	if s := e.close(); s != nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		s.failed = true
	}
}

// Failed passes the cause of the live group's abort to a [FailureObserver]. It logs
// the hook's error.
func (e *Executor) Failed(ctx context.Context, cause error) {
	observer, ok := e.backend.(FailureObserver)
	e.mu.Lock()
	s := e.live
	ok = ok && s != nil && s.failed
	e.mu.Unlock()
	if !ok {
		return
	}
	err := e.call(ctx, "OnFailure", s.group, func(ctx context.Context, g *Group) error { return observer.OnFailure(ctx, g, cause) })
	if err != nil {
		e.opts.Log.Warn("OnFailure failed", "backend", e.name, "error", err)
	}
}

// End ends the live group; no worker of it is left.
func (e *Executor) End() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.live = nil
}

// close returns the live session, on the first call only.
func (e *Executor) close() *session {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.live
	if s == nil || s.closed {
		return nil
	}
	s.closed = true
	return s
}

// call runs a hook until it returns, ctx ends or the time is up.
func (e *Executor) call(ctx context.Context, name string, g *Group, hook func(context.Context, *Group) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, e.opts.Timeout, fmt.Errorf("it does not end within %v", e.opts.Timeout))
	defer cancel()
	if ctx.Err() != nil {
		return fmt.Errorf("backend %s: %s: %w", e.name, name, context.Cause(ctx))
	}
	done := make(chan error, 1)
	go func() { done <- guarded(name, func() error { return hook(ctx, g) }) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("backend %s: %s: %w", e.name, name, err)
	}
	return nil
}

// guarded runs a hook. It returns a panic as an error with the stack: the trainer
// continues, and ends the workers.
func guarded(name string, hook func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s panicked: %v\n%s", name, p, debug.Stack())
		}
	}()
	return hook()
}
