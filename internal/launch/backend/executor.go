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
	// ErrLive says that a group was started while another one lives.
	ErrLive = errors.New("a session is live already")
	// ErrNoSession says that there is no group: none was started, or it has ended.
	ErrNoSession = errors.New("no session is live")
)

// Options are how an executor runs a backend.
type Options struct {
	// Init runs first of all for each group.
	Init func(ctx context.Context, g *Group) error
	// Share says whether workers see each other's devices; nil leaves it to the
	// backend.
	Share *bool
	// Ordered says that the workers' environment has CUDA_DEVICE_ORDER.
	Ordered bool
	Timeout time.Duration // of each hook; default 1 min
	Log     *slog.Logger  // default: nothing is logged
}

// Executor runs the hooks of a backend for one group after the other. At most
// one is live, from Start to End. Safe for concurrent use.
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
	started  bool // all hooks of the start have ended well
	training bool // OnTrainingStart has begun
	closed   bool // OnShutdown has begun, or must not run
	failed   bool // it must not run
}

// NewExecutor is an executor of a backend with a name for its errors.
func NewExecutor(name string, b Backend, o Options) *Executor {
	if o.Timeout == 0 {
		o.Timeout = time.Minute
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Executor{name: name, backend: b, opts: o}
}

// Start makes a group live: it runs the init hook, sets what devices workers
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

// TrainingStart says that all workers of the live group have said hello, once.
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

// Fetch decodes the data of a report of a worker of the live group.
func (e *Executor) Fetch(data map[string]any) (out map[string]any, err error) {
	e.mu.Lock()
	started := e.live != nil && e.live.started
	e.mu.Unlock()
	if !started {
		return nil, fmt.Errorf("backend %s: fetch a report: %w", e.name, ErrNoSession)
	}
	if err = guarded("DecodeData", func() (err error) { out, err = e.backend.DecodeData(data); return err }); err != nil {
		return nil, fmt.Errorf("backend %s: decode a report: %w", e.name, err)
	}
	return out, nil
}

// Shutdown begins the graceful end of the live group, unless it has begun or was
// refused: OnShutdown runs, and its error is logged. The group's workers may go
// on for a while, and their last reports are fetched.
func (e *Executor) Shutdown(ctx context.Context) {
	s := e.close()
	if s == nil {
		return
	}
	if err := e.call(ctx, "OnShutdown", s.group, e.backend.OnShutdown); err != nil {
		e.opts.Log.Warn("the backend did not shut down in order, as when a worker has died", "error", err)
	}
}

// Abort says that the end of the live group is not graceful: no hook but OnFailure runs
// any more.
func (e *Executor) Abort() {
	if s := e.close(); s != nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		s.failed = true
	}
}

// Failed tells a [FailureObserver] why the live group was aborted. Its error is logged.
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

// End says that no worker of the group is left.
func (e *Executor) End() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.live = nil
}

// close is the live session, the first time.
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

// guarded runs a hook. Its panic is an error with the stack: the trainer goes on, and
// ends the workers.
func guarded(name string, hook func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s panicked: %v\n%s", name, p, debug.Stack())
		}
	}()
	return hook()
}
