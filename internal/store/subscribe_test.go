package store

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// fakeCursor is a cursor whose moves fail while err is set.
type fakeCursor struct {
	mu  sync.Mutex
	at  uint64
	err error
}

func (f *fakeCursor) Sequence() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at
}

func (f *fakeCursor) Move(_ context.Context, sequence uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.at = sequence
	}
	return f.err
}

func (f *fakeCursor) fails(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// fakeLease is a lease that can be lost, and taken by another process.
type fakeLease struct {
	mu       sync.Mutex
	err      error // of the next hold
	held     int
	released int
	lose     context.CancelFunc
}

func (f *fakeLease) fails(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	if f.lose != nil && err != nil {
		f.lose()
	}
}

func (f *fakeLease) counts() (held, released int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.held, f.released
}

func (f *fakeLease) hold(ctx context.Context) (context.Context, func() error, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return nil, nil, f.err
	}
	f.held++
	held, lose := context.WithCancel(ctx)
	f.lose = lose
	once := false
	return held, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if once {
			panic("released twice")
		}
		once = true
		f.released++
		lose()
		return nil
	}, nil
}

func subscribed(t *testing.T, lease *fakeLease, cursor *fakeCursor) (context.Context, *Subscription) {
	t.Helper()
	s := &Subscription{name: "c", hold: lease.hold, log: slog.New(slog.DiscardHandler)}
	ctx, err := s.begin(t.Context(), func(context.Context) (mover, error) { return cursor, nil })
	if err != nil {
		t.Fatal(err)
	}
	return ctx, s
}

// A subscription survives an outage in which the lease ends and the cursor cannot move.
func TestSubscriptionSurvivesAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease, cursor := &fakeLease{}, &fakeCursor{at: 3}
		ctx, s := subscribed(t, lease, cursor)
		after := func(d time.Duration) {
			<-time.After(d)
			synctest.Wait()
		}
		s.Handled(5)
		synctest.Wait()
		if cursor.Sequence() != 5 {
			t.Errorf("the cursor is at %d, want 5 at once", cursor.Sequence())
		}
		s.Passed(7)
		synctest.Wait()
		if cursor.Sequence() != 5 {
			t.Error("the cursor moved at once over what was passed over")
		}
		after(cursorEvery)
		if cursor.Sequence() != 7 {
			t.Errorf("the cursor is at %d, want 7 after a while", cursor.Sequence())
		}
		down := errors.New("down")
		cursor.fails(down)
		lease.fails(down)
		s.Handled(9)
		after(5 * cursorEvery)
		if ctx.Err() != nil {
			t.Fatalf("the outage ended it: %v", context.Cause(ctx))
		}
		cursor.fails(nil)
		lease.fails(nil)
		after(cursorEvery)
		err := s.Close(t.Context())
		if held, released := lease.counts(); err != nil || cursor.Sequence() != 9 || held != 2 || released != 2 {
			t.Errorf("after the outage the cursor is at %d, was held %d times and released %d times: %v", cursor.Sequence(), held, released, err)
		}
	})
}

// A subscription ends when another process has the cursor.
func TestSubscriptionEndsWhenItIsTaken(t *testing.T) {
	for _, taken := range []error{jetlog.ErrCursorMoved, &FollowedError{Cursor: "c"}} {
		synctest.Test(t, func(t *testing.T) {
			lease, cursor := &fakeLease{}, &fakeCursor{}
			ctx, s := subscribed(t, lease, cursor)
			cursor.fails(taken)
			lease.fails(taken)
			s.Handled(1)
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), taken) {
				t.Errorf("it ended with %v, want %v", context.Cause(ctx), taken)
			}
			err := s.Close(t.Context())
			if _, released := lease.counts(); !errors.Is(err, taken) || released != 1 {
				t.Errorf("closed with %v, released %d times", err, released)
			}
		})
	}
}
