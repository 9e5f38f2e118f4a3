package session

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// unserved is a log that does not answer unless served.
type unserved struct {
	Log
	served bool
}

// Append implements Log.
func (u *unserved) Append(ctx context.Context, _ ...events.Fact) ([]uint64, error) {
	if u.served {
		return nil, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// All appends of a job that must end share one wait for its log.
func TestLastWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		job, end := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, end)
		u := &unserved{}
		l := newLastWords(job, u)
		began := time.Now()
		says := func(took time.Duration) {
			t.Helper()
			if _, err := l.Append(t.Context()); !errors.Is(err, ErrUnserved) {
				t.Errorf("error %v", err)
			}
			if d := time.Since(began); d != took {
				t.Errorf("it took %v, want %v", d, took)
			}
		}
		says(time.Hour + LastWordsTimeout)
		says(time.Hour + LastWordsTimeout)
		says(time.Hour + LastWordsTimeout)
		// A log that answers again gets the full time again.
		u.served = true
		l.left = time.Second
		if _, err := l.Append(t.Context()); err != nil {
			t.Error(err)
		}
		u.served = false
		says(time.Hour + 2*LastWordsTimeout)
	})
}

// Another call of the log than those of Log is repeated too while the log does not answer, and a refusal
// is not.
func TestInsist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		back := time.Now().Add(time.Hour)
		s := patient(t.Context(), &refusing{})
		calls := 0
		err := s.Insist(t.Context(), func(context.Context) error {
			if calls++; time.Now().Before(back) {
				return errAway
			}
			return nil
		})
		if err != nil || calls < 100 {
			t.Errorf("%v after %d calls", err, calls)
		}
		refused := errors.New("refused")
		calls = 0
		err = s.Insist(t.Context(), func(context.Context) error { calls++; return refused })
		if !errors.Is(err, refused) || calls != 1 {
			t.Errorf("%v after %d calls", err, calls)
		}
		if err := (Store{}).Insist(t.Context(), func(context.Context) error { return refused }); !errors.Is(err, refused) {
			t.Errorf("a store that does not wait: %v", err)
		}
	})
}
