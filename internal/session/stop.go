package session

import (
	"context"

	"github.com/ckptstore/ckptstore/client"
)

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
