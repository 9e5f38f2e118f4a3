package rpc

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// engine is the common part of the agents of all backends: functions, threads and
// the count of calls.
type engine struct {
	self    Peer
	timeout time.Duration // of a call without a deadline; 0: none
	limit   int           // maximum size of a body in bytes
	threads chan struct{}
	life    context.Context // ends when the agent closes
	die     context.CancelCauseFunc

	mu        sync.Mutex
	functions map[string]Func
	started   uint64        // calls that this agent has ever made
	calling   int           // calls without an answer yet
	queued    int           // unanswered calls of peers
	quiet     chan struct{} // not nil: closed when calling and queued are 0
	closed    bool
	work      sync.WaitGroup // goroutines; added to under mu while not closed
}

func newEngine(self Peer, timeout time.Duration, limit, threads int) *engine {
	e := &engine{self: self, timeout: timeout, limit: limit, threads: make(chan struct{}, threads), functions: map[string]Func{}}
	e.life, e.die = context.WithCancelCause(context.Background())
	return e
}

// Self implements Agent.
func (e *engine) Self() Peer { return e.self }

// Handle implements Agent.
func (e *engine) Handle(name string, f Func) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("register function %.100q: a name has 1 to %d bytes", name, maxName)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, taken := e.functions[name]; taken {
		return fmt.Errorf("register function %q: it is already registered", name)
	}
	e.functions[name] = f
	return nil
}

// spawn runs f in a goroutine that Close waits for.
func (e *engine) spawn(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.work.Go(f)
	return true
}

// accept runs f for a call of a peer, unless too many are running.
func (e *engine) accept(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.queued == maxQueued {
		return false
	}
	e.queued++
	e.work.Go(func() {
		defer e.settle(&e.queued)
		f()
	})
	return true
}

// settle decrements a count of calls.
func (e *engine) settle(account *int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	*account--
	if e.quiet != nil && e.calling == 0 && e.queued == 0 {
		close(e.quiet)
		e.quiet = nil
	}
}

// make makes a call over the link that reach returns.
func (e *engine) make(ctx context.Context, to Peer, function string, body []byte, reach func(context.Context) (*link, error)) ([]byte, error) {
	if function == "" || len(function) > maxName {
		return nil, &PeerError{to, fmt.Sprintf("%.100q", function), fmt.Errorf("a function's name has 1 to %d bytes", maxName)}
	}
	if len(body) > e.limit {
		return nil, &PeerError{to, function, fmt.Errorf("its argument of %d bytes is larger than the limit of %d", len(body), e.limit)}
	}
	if _, ok := ctx.Deadline(); !ok && e.timeout > 0 {
		limited, cancel := context.WithTimeout(ctx, e.timeout)
		defer cancel()
		ctx = limited
	}
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil, &PeerError{to, function, ErrClosed}
	}
	e.started++
	e.calling++
	if to == e.self {
		e.work.Add(1)
		defer e.work.Done()
	}
	e.mu.Unlock()
	defer e.settle(&e.calling)
	if to == e.self {
		return e.own(ctx, function, body)
	}
	l, err := reach(ctx)
	if err != nil {
		return nil, &PeerError{to, function, err}
	}
	return l.call(ctx, function, body)
}

// own calls a function of this agent itself. As on the wire, the function has its
// own body and context, which ends with the agent.
func (e *engine) own(ctx context.Context, function string, body []byte) ([]byte, error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer context.AfterFunc(e.life, func() { end(ErrClosed) })()
	reply, err := e.run(ctx, function, append([]byte(nil), body...))
	if err != nil {
		return nil, &RemoteError{Peer: e.self, Function: function, Message: err.Error(), cause: err}
	}
	return reply, nil
}

// idle waits until no call is running, and returns how many this agent has ever
// made.
func (e *engine) idle(ctx context.Context) (started uint64, err error) {
	for {
		e.mu.Lock()
		if e.calling == 0 && e.queued == 0 {
			defer e.mu.Unlock()
			return e.started, nil
		}
		if e.quiet == nil {
			e.quiet = make(chan struct{})
		}
		quiet := e.quiet
		e.mu.Unlock()
		select {
		case <-quiet:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// close ends the agent's life; it returns false if it was closed before. The
// backend then closes its wire and waits for work.
func (e *engine) close() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.closed = true
	e.die(ErrClosed)
	return true
}
