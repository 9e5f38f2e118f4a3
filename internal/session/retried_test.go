package session

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

var errAway = errors.New("no answer")

// away is a log without a server, until it has one again.
type away struct {
	Log
	until   time.Time
	refused error
	calls   int
}

// Append implements Log.
func (a *away) Append(context.Context, ...events.Fact) ([]uint64, error) {
	if a.calls++; time.Now().Before(a.until) {
		return nil, errAway
	}
	return []uint64{1}, a.refused
}

// The calls of a job's log, and others that it makes, are repeated while the log does not answer. A refusal is
// not repeated.
func TestRetriedLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &away{until: time.Now().Add(time.Hour)}
		s := Store{Log: a, Unserved: func(err error) bool { return errors.Is(err, errAway) }}.patiently(t.Context(), nil)
		if _, err := s.Log.Append(t.Context()); err != nil || a.calls < 100 {
			t.Errorf("%v after %d calls", err, a.calls)
		}
		a.until, a.calls = time.Now().Add(time.Hour), 0
		err := s.Insist(t.Context(), func(ctx context.Context) error {
			_, err := a.Append(ctx)
			return err
		})
		if err != nil || a.calls < 100 {
			t.Errorf("%v after %d calls", err, a.calls)
		}
		a.calls, a.refused = 0, errors.New("damaged")
		if _, err := s.Log.Append(t.Context()); !errors.As(err, new(*retry.RefusedError)) || a.calls != 1 {
			t.Errorf("%v after %d calls", err, a.calls)
		}
	})
}
