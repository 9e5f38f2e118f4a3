package launch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
)

// membership is what a session refuses, and why: all of its ranks when it is over,
// or those that have left.
type membership struct {
	leave  func(rank int) // is told of each that has left, once; nil: a trainer sees their end itself
	parted atomic.Pointer[error]
}

// afterwards are the requests that are still answered when a session is over:
// the news of what was saved, and the giving back.
var afterwards = []string{"wait", "loaded", "leave"}

// refuseFrom says that the session is over, because of cause if it is not nil.
func (p *membership) refuseFrom(cause *FailedError) {
	err := errors.New("the session is over")
	if cause != nil {
		err = fmt.Errorf("the session is over: %s", cause.Cause)
	}
	p.parted.Store(&err)
}

// admit refuses a request of a rank that takes no part any more.
func (s *rankServer) admit(op string) error {
	if slices.Contains(afterwards, op) {
		return nil
	}
	if s.left.Load() {
		return &problem{http.StatusGone, fmt.Errorf("rank %d has left attempt %d: join again to go on", s.rank, s.attempt)}
	}
	if why := s.parted.Load(); why != nil {
		return &problem{http.StatusGone, fmt.Errorf("rank %d of attempt %d: %w: join again to go on", s.rank, s.attempt, *why)}
	}
	return nil
}

// onLeave takes a rank's word that it takes no part any more. What it has sealed
// is in the log when it is answered. To a trainer it means nothing.
func (s *rankServer) onLeave(ctx context.Context, _ struct{}) (struct{}, error) {
	if s.leave == nil {
		return struct{}{}, nil
	}
	first := s.left.CompareAndSwap(false, true)
	ctx, cancel := s.store.answering(ctx, s.cfg.DrainTimeout)
	defer cancel()
	err := s.outbox.flush(ctx)
	if first {
		s.leave(s.rank)
	}
	return struct{}{}, err
}
