package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// membership tracks whether the session is over. Once it is, all requests are
// refused; the requests of a rank that left are refused as well.
type membership struct {
	ended atomic.Pointer[error]
}

// afterwards are the requests that are still answered after the session: asking
// for the state of a save, and releasing memory.
var afterwards = []string{"wait", "loaded", "leave"}

// Refuse refuses all requests from now on, except those that ask for the state of
// a save or release memory. why, if not empty, is the reason in the refusals.
func (p *membership) Refuse(why string) {
	err := errors.New("the session is over")
	if why != "" {
		err = fmt.Errorf("the session is over: %s", why)
	}
	p.ended.Store(&err)
}

// admit refuses a request of a rank that has left.
func (s *rankServer) admit(op string) error {
	if slices.Contains(afterwards, op) {
		return nil
	}
	if s.left.Load() {
		return problem.Errorf(problem.Gone, "rank %d has left attempt %d: join again to continue", s.rank, s.Number)
	}
	if why := s.ended.Load(); why != nil {
		return problem.Errorf(problem.Gone, "rank %d of attempt %d: %w: join again to continue", s.rank, s.Number, *why)
	}
	return nil
}

// onLeave handles a rank's announcement that it leaves. The rank's seals are in
// the log when it gets the reply. A trainer does nothing else with it.
func (s *rankServer) onLeave(ctx context.Context, _ struct{}) (struct{}, error) {
	if s.Leave == nil {
		return struct{}{}, nil
	}
	first := s.left.CompareAndSwap(false, true)
	ctx, cancel := s.store.calls.Timeout(ctx, s.cfg.DrainTimeout)
	defer cancel()
	err := s.outbox.Flush(ctx)
	if first {
		s.Leave(s.rank)
	}
	return struct{}{}, err
}

// held blocks a hello until training has started, if the backend requires that.
func (g *Group) held(ctx context.Context) error {
	var begun <-chan struct{}
	if g.Hooks != nil {
		begun = g.Hooks.Begun()
	}
	if begun == nil {
		return nil
	}
	timer := time.NewTimer(g.cfg.Collective)
	defer timer.Stop()
	select {
	case <-begun:
		return nil
	case <-g.work.Done():
		return problem.Errorf(problem.Gone, "the attempt is over before training has started")
	case <-timer.C:
		return problem.Errorf(problem.Conflict, "the backend starts no rank before all %d ranks have connected, and they have not within %v: every rank must connect to the trainer", g.cfg.World(), g.cfg.Collective)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fetch returns the metrics of a report as the backend decodes them.
func (g *Group) fetch(metrics map[string]any) (map[string]any, error) {
	if g.Hooks == nil {
		return metrics, nil
	}
	return g.Hooks.Fetch(metrics)
}

// listens records that a rank reports, or polls for stop requests.
func (g *Group) listens() {
	if g.Orders != nil {
		g.Orders.Listens()
	}
}

// onShouldStop answers one rank. The ranks agree because only one of them asks.
// request is what it is asked to do, as [Orders.Tell] returns it.
func (s *rankServer) onShouldStop() (reply client.StopReply, request string) {
	if s.Orders == nil {
		return reply, ""
	}
	s.Orders.Listens()
	request = s.Orders.Tell()
	return client.StopReply{Stop: asked(request)}, request
}

// onHoldSignals blocks until the rank must release the signals that it holds
// back.
func (s *rankServer) onHoldSignals(ctx context.Context, r client.HoldSignals) (struct{}, error) {
	if s.Signals == nil {
		<-ctx.Done()
		return struct{}{}, context.Cause(ctx)
	}
	return struct{}{}, s.Signals.Hold(ctx, s.rank, r.Signals)
}

// onReleaseSignals handles a worker's notice that it no longer holds back some
// signals: its script installed its own handlers, or the worker was asked to
// release them.
func (s *rankServer) onReleaseSignals(_ context.Context, r client.HoldSignals) (struct{}, error) {
	switch {
	case s.Signals == nil:
	case len(r.Signals) > 0:
		s.Signals.Replaced(s.rank, r.Signals)
	default:
		s.Signals.Confirm(s.rank)
	}
	return struct{}{}, nil
}

// onSignaled answers a worker that received a signal which it holds back.
func (s *rankServer) onSignaled(_ context.Context, r client.Signaled) (client.SignaledReply, error) {
	if r.Signal != "SIGTERM" && r.Signal != "SIGUSR1" {
		return client.SignaledReply{}, badRequest("signal %q: want SIGTERM or SIGUSR1", r.Signal)
	}
	if s.Signals == nil {
		return client.SignaledReply{End: true}, nil
	}
	return s.Signals.Signaled(s.rank, r.Signal), nil
}
