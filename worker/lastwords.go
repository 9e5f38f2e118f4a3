package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// lastWords bounds how long a job that was told to end waits for a log that
// does not answer: over all that it still has to say, not each time anew.
const lastWordsTimeout = 30 * time.Second

// errUnserved says that the log did not answer a job that was told to end.
var errUnserved = fmt.Errorf("nobody served the log in the last %v of the job; what it still had to say is found out by the next one", lastWordsTimeout)

// lastWords is the log of a job. Once the job's context has ended, calls that
// are not answered share one deadline; the context of a call alone may have
// none, because what happened is told also when the job has to end.
type lastWords struct {
	Log
	job context.Context

	mu   sync.Mutex
	left time.Duration
}

func newLastWords(job context.Context, log Log) *lastWords {
	return &lastWords{Log: log, job: job, left: lastWordsTimeout}
}

// within makes one call of the log.
func (l *lastWords) within(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var began time.Time
	var timer *time.Timer
	stop := context.AfterFunc(l.job, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		began = time.Now()
		timer = time.AfterFunc(l.left, func() { cancel(errUnserved) })
	})
	err := call(ctx)
	stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	if timer != nil {
		timer.Stop()
		l.left -= time.Since(began)
	}
	if err == nil {
		l.left = lastWordsTimeout // it is served
	} else if errors.Is(context.Cause(ctx), errUnserved) {
		err = errors.Join(errUnserved, err)
	}
	return err
}

// Append implements Log.
func (l *lastWords) Append(ctx context.Context, facts ...events.Fact) (seqs []uint64, err error) {
	err = l.within(ctx, func(ctx context.Context) error {
		seqs, err = l.Log.Append(ctx, facts...)
		return err
	})
	return seqs, err
}

// Decide implements Log.
func (l *lastWords) Decide(ctx context.Context, d events.Decision, after uint64) (seq uint64, err error) {
	err = l.within(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Decide(ctx, d, after)
		return err
	})
	return seq, err
}

// Last implements Log.
func (l *lastWords) Last(ctx context.Context) (seq uint64, err error) {
	err = l.within(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Last(ctx)
		return err
	})
	return seq, err
}
