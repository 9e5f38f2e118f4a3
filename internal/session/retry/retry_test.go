package retry

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

var errAway = errors.New("no answer")

// away is a log without a server, until it has one again.
type away struct {
	until time.Time
	calls int
}

// call is a call of the log.
func (a *away) call(ctx context.Context) error {
	a.calls++
	select {
	case <-time.After(min(30*time.Second, max(0, time.Until(a.until)))):
	case <-ctx.Done():
		return ctx.Err()
	}
	if time.Now().Before(a.until) {
		return fmt.Errorf("append: %w", errAway)
	}
	return nil
}

// patient returns the calls of a job that waits for a log that is away.
func patient(job context.Context) *Calls {
	return New(job, Options{Unserved: func(err error) bool { return errors.Is(err, errAway) }})
}

// All calls of a job that must end share one wait for its log.
func TestEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		job, end := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, end)
		c := New(job, Options{})
		served := false
		call := func(ctx context.Context) error {
			if served {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		began := time.Now()
		says := func(took time.Duration) {
			t.Helper()
			if err := c.UntilAnswered(t.Context(), call); !errors.Is(err, ErrUnserved) {
				t.Errorf("error %v", err)
			}
			if d := time.Since(began); d != took {
				t.Errorf("it took %v, want %v", d, took)
			}
		}
		says(time.Hour + EndTimeout)
		says(time.Hour + EndTimeout)
		says(time.Hour + EndTimeout)
		// A log that answers again gets the full time again.
		served = true
		c.left = time.Second
		if err := c.UntilAnswered(t.Context(), call); err != nil {
			t.Error(err)
		}
		served = false
		says(time.Hour + 2*EndTimeout)
	})
}

// A call is retried until the log answers, with a bound once the job must end. A
// refusal is not retried.
func TestUntilAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		job, end := context.WithCancel(t.Context())
		defer end()
		a := &away{until: time.Now().Add(10 * time.Hour)}
		c := patient(job)
		began := time.Now()
		if err := c.UntilAnswered(t.Context(), a.call); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d < 10*time.Hour || d > 10*time.Hour+lastPause || a.calls < 100 {
			t.Errorf("it took %v and %d calls", d, a.calls)
		}
		if got := c.Silence(); got < 10*time.Hour || got > 10*time.Hour+lastPause {
			t.Errorf("the log was silent for %v", got)
		}
		a.until = time.Now().Add(10 * time.Hour)
		time.AfterFunc(time.Hour, func() { c.Hurry(errors.New("told to end")) })
		began = time.Now()
		if err := c.UntilAnswered(t.Context(), a.call); !errors.Is(err, ErrUnserved) {
			t.Errorf("error %v", err)
		}
		if d := time.Since(began); d != time.Hour+EndTimeout {
			t.Errorf("it took %v", d)
		}
		refused := errors.New("damaged")
		calls := 0
		err := patient(t.Context()).UntilAnswered(t.Context(), func(context.Context) error { calls++; return refused })
		if !errors.As(err, new(*RefusedError)) || !errors.Is(err, refused) || calls != 1 {
			t.Errorf("%v after %d calls", err, calls)
		}
		var once *Calls
		if err := once.UntilAnswered(t.Context(), func(context.Context) error { return refused }); err != refused { //nolint:errorlint // the error itself
			t.Errorf("calls that are not repeated: %v", err)
		}
	})
}
