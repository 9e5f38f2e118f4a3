package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
)

// membership tracks whether the session is over. It refuses the requests of all
// ranks then, and those of a rank that left.
type membership struct {
	ended atomic.Pointer[error]
}

// afterwards are the requests that are still answered when a session is over:
// the news of what was saved, and the giving back.
var afterwards = []string{"wait", "loaded", "leave"}

// Refuse says that the session is over, because of why if it is not empty. All
// requests are refused from now on, but the news of what was saved.
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
