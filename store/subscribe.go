package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// FollowedError says that a cursor has a live subscriber.
type FollowedError struct {
	Cursor string
	Host   string
	PID    int
}

func (e *FollowedError) Error() string {
	return fmt.Sprintf("cursor %q is being followed by process %d on %s: stop it, or choose another --cursor", e.Cursor, e.PID, e.Host)
}

// cursorEvery is how often a cursor moves over events that were passed over,
// and the longest that it lags behind one that was handled.
const cursorEvery = time.Second

// Subscription is a cursor that this process alone moves. It is moved in the
// background, by whole stretches: an event may be handled again after a
// crash, and is never left out.
type Subscription struct {
	cursor  *jetlog.Cursor
	release func() error
	fail    context.CancelCauseFunc

	mu      sync.Mutex
	at      uint64
	hurry   chan struct{} // of capacity 1
	stop    chan struct{}
	stopped chan struct{}
}

// Subscribe takes a named cursor. While it is held no other process can; a
// holder of this machine that has died is succeeded at once, one of another
// after 15 s. The context that comes back ends, with the reason as its cause,
// when the cursor may be somebody else's.
func (s *Store) Subscribe(ctx context.Context, name string) (context.Context, *Subscription, error) {
	held, release, err := s.holdCursor(ctx, name)
	if err != nil {
		return nil, nil, fmt.Errorf("subscribe: %w", err)
	}
	cursor, err := s.Log.Cursor(ctx, name)
	if err != nil {
		return nil, nil, errors.Join(err, release())
	}
	held, fail := context.WithCancelCause(held)
	sub := &Subscription{
		cursor: cursor, release: release, fail: fail, at: cursor.Sequence(),
		hurry: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	go sub.run(held)
	return held, sub, nil
}

func (s *Store) holdCursor(ctx context.Context, name string) (context.Context, func() error, error) {
	return s.hold(ctx, "cursor."+name, "", func(other holder) error {
		return &FollowedError{Cursor: name, Host: other.Host, PID: other.PID}
	})
}

// RemoveCursor forgets a cursor that nobody follows; of one that somebody
// does, the error is a [*FollowedError].
func (s *Store) RemoveCursor(ctx context.Context, name string) error {
	_, release, err := s.holdCursor(ctx, name)
	if err != nil {
		return fmt.Errorf("remove cursor: %w", err)
	}
	_, err = s.Log.RemoveCursor(ctx, name)
	return errors.Join(err, release())
}

// Sequence is where the subscription goes on: after this event, or at the
// start of the log if it is 0.
func (s *Subscription) Sequence() uint64 { return s.cursor.Sequence() }

// Handled says that the event at seq, and all before it, need not be seen
// again. The cursor follows at once.
func (s *Subscription) Handled(seq uint64) {
	s.Passed(seq)
	select {
	case s.hurry <- struct{}{}:
	default:
	}
}

// Passed is [Subscription.Handled] for what the subscriber did not ask for:
// the cursor follows within a second.
func (s *Subscription) Passed(seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = max(s.at, seq)
}

func (s *Subscription) run(ctx context.Context) {
	defer close(s.stopped)
	tick := time.NewTicker(cursorEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-ctx.Done():
			return
		case <-s.hurry:
		case <-tick.C:
		}
		// Not the subscriber's context: an interrupt must not cut a write.
		if err := s.move(context.WithoutCancel(ctx)); err != nil {
			s.fail(err)
			return
		}
	}
}

func (s *Subscription) move(ctx context.Context) error {
	s.mu.Lock()
	at := s.at
	s.mu.Unlock()
	if at <= s.cursor.Sequence() {
		return nil
	}
	return s.cursor.Move(ctx, at)
}

// Close moves the cursor to what was handled last and lets go of it.
func (s *Subscription) Close(ctx context.Context) error {
	close(s.stop)
	<-s.stopped
	err := s.move(context.WithoutCancel(ctx))
	s.fail(nil)
	return errors.Join(err, s.release())
}
