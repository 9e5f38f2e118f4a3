package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
)

// membership tracks whether the session is over. It refuses the requests of all
// ranks then, and those of a rank that left.
type membership struct {
	ended atomic.Pointer[error]
}

// afterwards are the requests that are still answered when a session is over:
// the news of what was saved, and the giving back.
var afterwards = []string{"wait", "loaded", "leave"}

// Refuse refuses all requests from now on, but those that ask what was saved and
// those that give back memory. why says how the session ended, if it is not empty.
func (p *membership) Refuse(why string) {
	err := errors.New("the session is over")
	if why != "" {
		err = fmt.Errorf("the session is over: %s", why)
	}
	p.ended.Store(&err)
}

// admit refuses a request of a rank that takes no part any more.
func (s *rankServer) admit(op string) error {
	if slices.Contains(afterwards, op) {
		return nil
	}
	if s.left.Load() {
		return &problem{http.StatusGone, fmt.Errorf("rank %d has left attempt %d: join again to go on", s.rank, s.Number)}
	}
	if why := s.ended.Load(); why != nil {
		return &problem{http.StatusGone, fmt.Errorf("rank %d of attempt %d: %w: join again to go on", s.rank, s.Number, *why)}
	}
	return nil
}

// onLeave takes a rank's word that it takes no part any more. What it has sealed
// is in the log when it is answered. To a trainer it means nothing.
func (s *rankServer) onLeave(ctx context.Context, _ struct{}) (struct{}, error) {
	if s.Leave == nil {
		return struct{}{}, nil
	}
	first := s.left.CompareAndSwap(false, true)
	ctx, cancel := s.store.answering(ctx, s.cfg.DrainTimeout)
	defer cancel()
	err := s.outbox.flush(ctx)
	if first {
		s.Leave(s.rank)
	}
	return struct{}{}, err
}

// held blocks a hello until training has started, if the backend wants that.
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
		return &problem{http.StatusGone, errors.New("the attempt is over before training has started")}
	case <-timer.C:
		return &problem{http.StatusConflict, fmt.Errorf("the backend lets nobody start before all %d ranks have said hello, and they have not within %v: every rank must connect to the trainer", g.cfg.World(), g.cfg.Collective)}
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

// listens notes that a rank reports, or asks whether to stop.
func (g *Group) listens() {
	if g.Orders != nil {
		g.Orders.Listens()
	}
}

// onShouldStop answers one rank. The ranks agree by asking through one of them.
func (s *rankServer) onShouldStop(context.Context, struct{}) (client.StopReply, error) {
	if s.Orders == nil {
		return client.StopReply{}, nil
	}
	s.Orders.Listens()
	return client.StopReply{Stop: s.Orders.Tell()}, nil
}

// onHoldSignals blocks until the rank is to release the signals that it holds back.
func (s *rankServer) onHoldSignals(ctx context.Context, r client.HoldSignals) (struct{}, error) {
	if s.Signals == nil {
		<-ctx.Done()
		return struct{}{}, context.Cause(ctx)
	}
	return struct{}{}, s.Signals.Hold(ctx, s.rank, r.Signals)
}

// onReleaseSignals takes the word of a worker that it holds some signals back no
// more, because its script has handlers of its own, or none, because it was asked.
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

// onSignaled answers a worker that got a signal which it holds back.
func (s *rankServer) onSignaled(_ context.Context, r client.Signaled) (client.SignaledReply, error) {
	if r.Signal != "SIGTERM" && r.Signal != "SIGUSR1" {
		return client.SignaledReply{}, badRequest("signal %q: want SIGTERM or SIGUSR1", r.Signal)
	}
	if s.Signals == nil {
		return client.SignaledReply{End: true}, nil
	}
	return s.Signals.Signaled(s.rank, r.Signal), nil
}
