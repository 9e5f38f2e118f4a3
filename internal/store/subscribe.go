package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
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

// ProblemKind returns [problem.Conflict].
func (*FollowedError) ProblemKind() problem.Kind { return problem.Conflict }

const (
	// cursorEvery is how often a cursor moves over events that were passed
	// over, and the pause after it could not be moved or held.
	cursorEvery = time.Second
	// cursorLast bounds the last move, when the subscriber wants to end.
	cursorLast = 5 * time.Second
)

// Subscription is a cursor that this process alone moves. It is moved in the
// background, by whole stretches: an event may be handled again after a
// crash, and is never left out.
//
// A lease keeps others from the cursor. One that somebody else took is asked for
// again, and so is known to be followed; that somebody moved the cursor meanwhile
// is seen by the next move.
type Subscription struct {
	name    string
	cursor  mover
	hold    func(context.Context) (held context.Context, release func() error, err error)
	release func() error
	fail    context.CancelCauseFunc
	log     *slog.Logger

	mu      sync.Mutex
	at      uint64
	hurry   chan struct{} // of capacity 1
	stop    chan struct{}
	stopped chan struct{}
}

// mover is a cursor. Move is durable on return, and may be repeated.
type mover interface {
	Sequence() uint64
	Move(ctx context.Context, sequence uint64) error
}

var _ mover = (*jetlog.Cursor)(nil)

// MaxCursorName is the length in bytes of the longest name that a new cursor may
// have. One that is there already goes on.
const MaxCursorName = 64

// ErrCursorName says that a cursor cannot have that name.
var ErrCursorName = problem.New(problem.Invalid, "bad name of a cursor")

// Subscribe takes a named cursor. While it is held no other process can; a
// holder of this machine that has died is succeeded at once, one of another
// after 20 s. The context that comes back ends, with the reason as its cause,
// when the cursor is somebody else's.
func (s *Store) Subscribe(ctx context.Context, name string) (context.Context, *Subscription, error) {
	sub := &Subscription{name: name, log: s.opts.Logger}
	id := NewID()
	sub.hold = func(ctx context.Context) (context.Context, func() error, error) { return s.holdCursor(ctx, name, id) }
	open := func(ctx context.Context) (mover, error) {
		c, err := s.Log.Cursor(ctx, name)
		if err == nil && c.Sequence() == 0 && len(name) > MaxCursorName {
			err = fmt.Errorf("%w: it has %d bytes, up to %d can be listed beside others", ErrCursorName, len(name), MaxCursorName)
		}
		return c, err
	}
	within, err := sub.begin(ctx, open)
	if err != nil {
		return nil, nil, fmt.Errorf("subscribe: %w", damage(err))
	}
	return within, sub, nil
}

func (s *Subscription) begin(ctx context.Context, open func(context.Context) (mover, error)) (context.Context, error) {
	held, release, err := s.hold(ctx)
	if err != nil {
		return nil, err
	}
	if s.cursor, err = open(ctx); err != nil {
		return nil, errors.Join(err, release())
	}
	within, fail := context.WithCancelCause(ctx)
	s.release, s.fail, s.at = release, fail, s.cursor.Sequence()
	s.hurry, s.stop, s.stopped = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	go s.run(within, held)
	return within, nil
}

// holdCursor takes the lease of a cursor for one subscription.
func (s *Store) holdCursor(ctx context.Context, name, id string) (context.Context, func() error, error) {
	return s.hold(ctx, jetlog.CursorLease(name), id, func(other holder) error {
		return &FollowedError{Cursor: name, Host: other.Host, PID: other.PID}
	})
}

// RemoveCursor forgets a cursor that nobody follows; of one that somebody
// does, the error is a [*FollowedError].
func (s *Store) RemoveCursor(ctx context.Context, name string) error {
	_, release, err := s.holdCursor(ctx, name, NewID())
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

// run moves the cursor and keeps it held until stop, or until it is somebody
// else's.
func (s *Subscription) run(ctx, held context.Context) {
	defer close(s.stopped)
	tick := time.NewTicker(cursorEvery)
	defer tick.Stop()
	lost := held.Done()
	for {
		var err error
		select {
		case <-s.stop:
			return
		case <-ctx.Done():
			return
		case <-lost:
			lost = nil // tried again with each tick
		case <-s.hurry:
			err = s.move(ctx)
		case <-tick.C:
			if lost == nil {
				if held, err = s.again(ctx); err == nil {
					lost = held.Done()
				}
			}
			if err == nil {
				err = s.move(ctx)
			}
		}
		var followed *FollowedError
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, jetlog.ErrCursorMoved) || errors.As(err, &followed):
			s.fail(err)
			return
		default:
			s.log.Warn("the cursor of a subscriber stays behind; after a crash, events since then are handled again", "cursor", s.name, "error", err)
		}
	}
}

// again takes the lease that was lost.
func (s *Subscription) again(ctx context.Context) (context.Context, error) {
	release := s.release
	s.release = func() error { return nil } // once
	if err := release(); err != nil {
		return nil, err
	}
	held, release, err := s.hold(ctx)
	if err != nil {
		return nil, err
	}
	s.release = release
	return held, nil
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
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), cursorLast)
	defer cancel()
	err := s.move(last)
	s.fail(nil)
	return errors.Join(err, s.release())
}
