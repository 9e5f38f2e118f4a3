package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

// link reaches one peer over one wire, for calls in both directions. Each side
// counts its own calls.
type link struct {
	*engine
	peer Peer
	// send passes a frame to the wire, which may retain it afterwards.
	send func(ctx context.Context, f frame) error

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan frame              // own calls that wait for an answer
	serving map[uint64]context.CancelCauseFunc // the peer's calls
	dead    error
	gone    chan struct{} // closed when dead is set
}

// newLink returns the link to a peer. The caller passes the peer's frames to
// take, and calls end after the last one.
func (e *engine) newLink(peer Peer, send func(context.Context, frame) error) *link {
	return &link{
		engine: e, peer: peer, send: send, gone: make(chan struct{}),
		pending: map[uint64]chan frame{}, serving: map[uint64]context.CancelCauseFunc{},
	}
}

// call makes one call and waits for its answer. ctx has a deadline unless none is
// wanted.
func (l *link) call(ctx context.Context, function string, body []byte) ([]byte, error) {
	fail := func(err error) ([]byte, error) { return nil, &PeerError{l.peer, function, err} }
	f := frame{kind: kindCall, function: function, body: body, bulk: len(body) > bulk}
	if at, ok := ctx.Deadline(); ok {
		if f.left = time.Until(at); f.left <= 0 {
			return fail(context.DeadlineExceeded)
		}
	}
	answer := make(chan frame, 1)
	l.mu.Lock()
	if l.dead != nil {
		l.mu.Unlock()
		return fail(l.dead)
	}
	l.next++
	f.id = l.next
	l.pending[f.id] = answer
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.pending, f.id)
		l.mu.Unlock()
	}()
	if err := l.send(ctx, f); err != nil {
		if ctx.Err() != nil {
			return fail(context.Cause(ctx))
		}
		return fail(err)
	}
	select {
	case got := <-answer:
		return l.result(function, got)
	case <-l.gone:
		select {
		case got := <-answer: // it arrived at the same moment
			return l.result(function, got)
		default:
			return fail(l.dead)
		}
	case <-ctx.Done():
		// The peer knows the deadline, but not that the caller has given up
		// before. The cancel frame follows the call on its channel, so that it
		// cannot overtake the call.
		l.spawn(func() {
			news, stop := context.WithTimeout(l.life, cancelPatience)
			defer stop()
			_ = l.send(news, frame{kind: kindCancel, id: f.id, bulk: f.bulk}) // the link's end cancels it too
		})
		return fail(context.Cause(ctx))
	}
}

// failure is the body of an error frame.
type failure struct {
	Message  string `json:"message"`
	Deadline bool   `json:"deadline,omitempty"`
	Canceled bool   `json:"canceled,omitempty"`
}

func (l *link) result(function string, got frame) ([]byte, error) {
	if got.kind == kindReply {
		return got.body, nil
	}
	var f failure
	if err := json.Unmarshal(got.body, &f); err != nil {
		return nil, &PeerError{l.peer, function, fmt.Errorf("decode its error: %w", err)}
	}
	e := &RemoteError{Peer: l.peer, Function: function, Message: f.Message}
	switch {
	case f.Deadline:
		e.cause = context.DeadlineExceeded
	case f.Canceled:
		e.cause = context.Canceled
	}
	return nil, e
}

// take handles one frame of the peer. It does not block.
func (l *link) take(f frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch f.kind {
	case kindReply, kindError:
		if answer, ok := l.pending[f.id]; ok { // otherwise the caller has given up
			delete(l.pending, f.id)
			answer <- f
		}
	case kindCancel:
		if cancel, ok := l.serving[f.id]; ok { // otherwise the answer is on its way
			cancel(context.Canceled)
		}
	case kindCall:
		if l.dead != nil {
			return
		}
		ctx, cancel := context.WithCancelCause(l.life)
		l.serving[f.id] = cancel
		taken := l.accept(func() {
			defer cancel(nil)
			reply := l.serve(ctx, f)
			l.mu.Lock()
			delete(l.serving, f.id)
			l.mu.Unlock()
			_ = l.send(l.life, reply) // the caller notices the link's end
		})
		if !taken {
			delete(l.serving, f.id)
			cancel(nil)
			l.spawn(func() { _ = l.send(l.life, refusal(f.id, errBusy)) })
		}
	}
}

var errBusy = fmt.Errorf("%d calls are waiting here already: make fewer at once", maxQueued)

// serve runs the called function.
func (l *link) serve(ctx context.Context, f frame) frame {
	if f.left > 0 {
		limited, cancel := context.WithTimeout(ctx, f.left)
		defer cancel()
		ctx = limited
	}
	body, err := l.run(ctx, f.function, f.body)
	if err == nil && len(body) > l.limit {
		err = fmt.Errorf("its result of %d bytes is larger than the limit of %d", len(body), l.limit)
	}
	if err != nil {
		return refusal(f.id, err)
	}
	return frame{kind: kindReply, id: f.id, body: body, bulk: len(body) > bulk}
}

func refusal(id uint64, err error) frame {
	text := err.Error()
	if len(text) > maxErrorText {
		text = text[:maxErrorText] + " (cut off)"
	}
	body, _ := json.Marshal(failure{ // strings and booleans always encode
		Message: text, Deadline: errors.Is(err, context.DeadlineExceeded), Canceled: errors.Is(err, context.Canceled),
	})
	return frame{kind: kindError, id: id, body: body, bulk: len(body) > bulk}
}

// run calls a function of this agent when a thread is free for it.
func (e *engine) run(ctx context.Context, name string, body []byte) (_ []byte, err error) {
	e.mu.Lock()
	f, ok := e.functions[name]
	e.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("no function %.100q is registered here", name)
	}
	select {
	case e.threads <- struct{}{}:
		defer func() { <-e.threads }()
	case <-ctx.Done():
		return nil, fmt.Errorf("it waited for one of %d threads: %w", cap(e.threads), context.Cause(ctx))
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("it panicked: %v\n%s", p, debug.Stack())
		}
	}()
	return f(ctx, body)
}

// end records that the peer is no longer reachable over this link. Only the first
// call has an effect.
func (l *link) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead != nil {
		return
	}
	l.dead = err
	close(l.gone)
	for _, cancel := range l.serving {
		cancel(fmt.Errorf("the caller %s: %w", l.peer, err))
	}
}
