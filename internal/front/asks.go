package front

import (
	"context"
	"slices"
	"strings"
	"time"
)

// Bounds on unanswered requests: of one session, and of all. The server answers
// one after the other, and some take long: a client with many open requests would
// delay the reads and the leases of all others.
const (
	asksOfOne = 8
	asksOfAll = 32
)

// next is the subject prefix of requests that are answered when there are events:
// they cost the server nothing until then.
const next = api + "CONSUMER.MSG.NEXT."

// bounded reports whether a publication is a request that counts until it is
// answered.
func bounded(subject string) bool {
	return strings.HasPrefix(subject, api) && !strings.HasPrefix(subject, next)
}

// waiting is a request that was passed on.
type waiting struct {
	reply string
	at    time.Time
}

// ask waits for room for a request, and takes it until the server answers.
func (s *session) ask(reply string) error {
	if !s.mayAsk(context.Background(), false) {
		ctx, cancel, err := s.looking()
		defer cancel()
		if err != nil {
			return err
		}
		if !s.mayAsk(ctx, true) {
			return &Refusal{Code: CodeBusy, Status: 503, Text: "the owner of the store has too many requests to answer at the moment"}
		}
	}
	s.subsMu.Lock()
	s.asked = append(s.asked, waiting{reply, time.Now()})
	s.subsMu.Unlock()
	return nil
}

func (s *session) mayAsk(ctx context.Context, wait bool) bool {
	if wait {
		s.lapse(time.Now().Add(-s.f.limits.Check))
		if s.asks.Acquire(ctx, 1) != nil {
			return false
		}
		if s.f.asks.Acquire(ctx, 1) != nil {
			s.asks.Release(1)
			return false
		}
		return true
	}
	if !s.asks.TryAcquire(1) {
		return false
	}
	if !s.f.asks.TryAcquire(1) {
		s.asks.Release(1)
		return false
	}
	return true
}

// answered returns the room of a request, if subject is that of its answer. The
// caller holds the lock of the subscriptions.
func (s *session) answered(subject []byte) {
	for i, a := range s.asked {
		if a.reply == string(subject) {
			s.asked = append(s.asked[:i], s.asked[i+1:]...)
			s.asks.Release(1)
			s.f.asks.Release(1)
			return
		}
	}
}

// awaits reports whether a request waits for its answer on a subject.
func (s *session) awaits(reply string) bool {
	s.subsMu.Lock()
	defer s.subsMu.Unlock()
	return slices.ContainsFunc(s.asked, func(w waiting) bool { return w.reply == reply })
}

// lapse returns the room of requests from before a time: they were answered
// elsewhere, or never will be.
func (s *session) lapse(before time.Time) {
	s.subsMu.Lock()
	defer s.subsMu.Unlock()
	for len(s.asked) > 0 && s.asked[0].at.Before(before) {
		s.asked = s.asked[1:]
		s.asks.Release(1)
		s.f.asks.Release(1)
	}
}
