package launch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/projections"
)

// lost is a log and views that are gone with the job.
type lost struct {
	session.Log
	session.Views
	job context.Context
}

// Append implements Log.
func (l *lost) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if l.job.Err() == nil {
		return make([]uint64, len(facts)), nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// Trial implements Views.
func (l *lost) Trial(ctx context.Context, _, _ string) (projections.Trial, error) {
	<-ctx.Done()
	return projections.Trial{}, errors.New("the log does not answer")
}

// Last implements Log.
func (l *lost) Last(context.Context) (uint64, error) { return 1, nil }

// LastOf implements Log.
func (l *lost) LastOf(context.Context, events.Aggregate) (uint64, error) { return 1, nil }

// ReadTrial implements Log.
func (l *lost) ReadTrial(ctx context.Context, _ events.Aggregate, _, _ uint64) iter.Seq2[events.Recorded, error] {
	return func(func(events.Recorded, error) bool) { <-ctx.Done() }
}

// ReadLane implements Log.
func (l *lost) ReadLane(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return l.ReadTrial(ctx, of, from, until)
}

// The error of a job that was asked to end begins with the reason, even if the
// log no longer answers.
func TestCauseWithoutLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("the lease is lost")
		time.AfterFunc(time.Minute, func() { cancel(why) })
		var told error
		cfg := Config{Config: session.Config{Run: "run", Trial: "main", Job: "job", NewID: rand.Text, Logger: slog.New(slog.DiscardHandler)}, ExitCode: func(err error) int {
			told = err
			return 5
		}}.withDefaults()
		gone := &lost{job: ctx}
		j := prepare(ctx, cfg, session.Store{Log: gone, Views: gone}, nil)
		began := time.Now()
		err := j.run(ctx)
		if !errors.Is(err, why) || !strings.HasPrefix(err.Error(), why.Error()) || !errors.Is(told, why) {
			t.Errorf("error %v, told %v", err, told)
		}
		if took := time.Since(began); took != time.Minute+retry.EndTimeout {
			t.Errorf("it took %v", took)
		}
	})
}

func TestCaused(t *testing.T) {
	why, other := errors.New("told to stop"), errors.New("other")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	for _, c := range []struct {
		ctx       context.Context
		err, want error
	}{
		{ended, nil, nil},
		{ended, other, errors.Join(why, other)},
		{ended, why, why},
		{ended, &FailedError{Cause: "a bug"}, &FailedError{Cause: "a bug"}},
		{t.Context(), other, other},
	} {
		if got := caused(c.ctx, c.err); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

// A log that refuses an attempt's events is no fault of the workers.
func TestRefusedLogIsInfrastructure(t *testing.T) {
	t.Parallel()
	if got := new(handoffEnd).from(&retry.RefusedError{Err: errors.New("damaged")}); got.Kind != blame.Infrastructure || got.Cause != "damaged" {
		t.Errorf("the failure is %+v", got)
	}
}
