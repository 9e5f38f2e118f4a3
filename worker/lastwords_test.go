package worker

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

// All that a job says after it was told to end waits for its log once.
func TestLastWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		job, end := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, end)
		u := &unserved{}
		l := newLastWords(job, u)
		began := time.Now()
		says := func(took time.Duration) {
			t.Helper()
			if _, err := l.Append(t.Context()); !errors.Is(err, errUnserved) {
				t.Errorf("error %v", err)
			}
			if d := time.Since(began); d != took {
				t.Errorf("it took %v, want %v", d, took)
			}
		}
		says(time.Hour + lastWordsTimeout)
		says(time.Hour + lastWordsTimeout)
		says(time.Hour + lastWordsTimeout)
		// A log that answers again has all its time again.
		u.served = true
		l.left = time.Second
		if _, err := l.Append(t.Context()); err != nil {
			t.Error(err)
		}
		u.served = false
		says(time.Hour + 2*lastWordsTimeout)
	})
}

func TestBackoffWaits(t *testing.T) {
	b := backoff{enough: 5 * time.Second}
	for i, c := range []struct {
		lived     time.Duration
		committed bool
		want      time.Duration
	}{
		{0, false, 100 * time.Millisecond},
		{time.Second, false, 200 * time.Millisecond},
		{0, false, 400 * time.Millisecond},
		{0, true, 0},
		{0, false, 100 * time.Millisecond},
		{5 * time.Second, false, 0},
		{0, false, 100 * time.Millisecond},
	} {
		if got := b.after(c.lived, c.committed); got != c.want {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
	}
	for range 20 {
		b.after(0, false)
	}
	if got := b.after(0, false); got != maxBackoff {
		t.Errorf("at last %v", got)
	}
}
