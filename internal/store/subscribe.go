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
	"github.com/ckptstore/ckptstore/internal/store/holder"
)

// FollowedError reports that a cursor has a live subscriber.
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
	// cursorEvery is how often a cursor moves over skipped events, and the pause after a
	// failure to move or hold it.
	cursorEvery = time.Second
	// cursorLast bounds the last move of a subscriber that ends.
	cursorLast = 5 * time.Second
)

// Subscription is a cursor that only this process moves. It moves in the background, over several
// events at a time: after a crash an event may be handled again, but none is left out.
//
// A lease keeps other processes from the cursor. If another process takes the lease, the
// subscription requests it again and so learns of the other subscriber. If another process moves the
// cursor, the next move detects it.
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

// mover is a cursor. Move is durable on return and may be repeated.
type mover interface {
	Sequence() uint64
	Move(ctx context.Context, sequence uint64) error
}

var _ mover = (*jetlog.Cursor)(nil)

// MaxCursorName is the length in bytes of the longest name of a new cursor. Existing cursors with
// longer names keep working.
const MaxCursorName = 64

// ErrCursorName reports a name that a cursor cannot have.
var ErrCursorName = problem.New(problem.Invalid, "bad name of a cursor")

// Subscribe takes a named cursor. While it is held, no other process can take it. A dead holder on
// this machine is replaced at once, one on another machine after 20 s. The returned context ends,
// with the reason as its cause, when another process has the cursor.
func (s *Store) Subscribe(ctx context.Context, name string) (context.Context, *Subscription, error) {
	sub := &Subscription{name: name, log: s.opts.Logger}
	id := NewID()
	sub.hold = func(ctx context.Context) (context.Context, func() error, error) { return s.holdCursor(ctx, name, id) }
	open := func(ctx context.Context) (mover, error) {
		c, err := s.Log.Cursor(ctx, name)
		if err == nil && c.Sequence() == 0 && len(name) > MaxCursorName {
			err = fmt.Errorf("%w: it has %d bytes, the limit is %d", ErrCursorName, len(name), MaxCursorName)
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
	return s.hold(ctx, jetlog.CursorLease(name), id, func(other holder.Process) error {
		return &FollowedError{Cursor: name, Host: other.Host, PID: other.PID}
	})
}

// RemoveCursor removes a cursor without a subscriber. If the cursor has one, it returns a
// [*FollowedError].
func (s *Store) RemoveCursor(ctx context.Context, name string) error {
	_, release, err := s.holdCursor(ctx, name, NewID())
	if err != nil {
		return fmt.Errorf("remove cursor: %w", err)
	}
	_, err = s.Log.RemoveCursor(ctx, name)
	return errors.Join(err, release())
}

// Sequence returns the event after which the subscription continues, 0 for the start of the log.
func (s *Subscription) Sequence() uint64 { return s.cursor.Sequence() }

// Handled marks all events up to seq as handled. The cursor follows at once.
func (s *Subscription) Handled(seq uint64) {
	s.Passed(seq)
	select {
	case s.hurry <- struct{}{}:
	default:
	}
}

// Passed is [Subscription.Handled] for events that the subscriber did not ask for: the cursor follows
// within a second.
func (s *Subscription) Passed(seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = max(s.at, seq)
}

// run moves the cursor and holds it until stop, or until another process has it.
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
			lost = nil // retried with each tick
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
			s.log.Warn("cursor not moved; after a crash, later events are handled again", "cursor", s.name, "error", err)
		}
	}
}

// again takes a lost lease again.
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

// Close moves the cursor to the last handled event and releases it.
func (s *Subscription) Close(ctx context.Context) error {
	close(s.stop)
	<-s.stopped
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), cursorLast)
	defer cancel()
	err := s.move(last)
	s.fail(nil)
	return errors.Join(err, s.release())
}
