package session

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// LastWordsTimeout bounds how long a job that was told to end waits for a log
// that does not answer: over all that it still has to say, not each time anew.
const LastWordsTimeout = 30 * time.Second

// Pauses between the attempts of a call that nobody answers. Each attempt has a
// deadline of its own in the log.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// ErrUnserved says that the log did not answer a job that was told to end.
var ErrUnserved = fmt.Errorf("nobody served the log in the last %v of the job; what it still had to say is found out by the next one", LastWordsTimeout)

// lastWords is the log of a job. A log that does not answer, because its owner
// is paused, its disk slow or full, or its cluster without a leader, fails no
// call: it is made again until it is answered or refused, or its own context
// ends. Nothing that the job has said is lost meanwhile, and nothing that it
// decides takes effect.
//
// Once the job was told to end, the calls that are not answered share one
// deadline; the context of a call alone may have none, because what happened is
// told also when the job has to end.
type lastWords struct {
	Log
	job  context.Context // ends when the job has to
	tell context.CancelCauseFunc

	unserved func(error) bool // Store.Unserved
	conflict func(error) bool // Store.Conflict
	log      *slog.Logger
	quiet    silenceMeter

	roomy  bool          // calls wait for room
	room   roomMeter     // of those that do
	noRoom chan struct{} // closed when none waits any more

	mu     sync.Mutex
	left   time.Duration
	silent time.Time // since when nobody answers; zero: they do
}

func newLastWords(job context.Context, log Log) *lastWords {
	never := func(error) bool { return false }
	l := &lastWords{Log: log, left: LastWordsTimeout, unserved: never, conflict: never, log: slog.New(slog.DiscardHandler)}
	l.job, l.tell = context.WithCancelCause(job)
	l.noRoom = make(chan struct{})
	context.AfterFunc(l.job, func() { time.AfterFunc(lastRoom, func() { close(l.noRoom) }) })
	return l
}

// patiently makes the job's calls of log and views wait for whoever serves them.
func (s Store) patiently(job context.Context, log *slog.Logger) Store {
	words := newLastWords(job, s.Log)
	if words.log = log; log == nil {
		words.log = slog.New(slog.DiscardHandler)
	}
	if s.Unserved != nil {
		words.unserved = s.Unserved
	}
	if s.Conflict != nil {
		words.conflict = s.Conflict
	}
	s.Log, s.Views, s.words = words, patientViews{s.Views, words}, words
	return s
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
		timer = time.AfterFunc(l.left, func() { cancel(ErrUnserved) })
	})
	err := l.insist(ctx, call)
	stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	if timer != nil {
		timer.Stop()
		l.left -= time.Since(began)
	}
	switch {
	case err == nil:
		l.left = LastWordsTimeout // it is served
	case errors.Is(context.Cause(ctx), ErrUnserved):
		err = errors.Join(ErrUnserved, err)
	case ctx.Err() == nil && !l.conflict(err):
		err = &RefusedError{Err: err}
	}
	return err
}

// asked is within for calls that have nothing to do while there is no room.
func (l *lastWords) asked(ctx context.Context, call func(context.Context) error) error {
	return l.forRoom(ctx, func() error { return l.within(ctx, call) })
}

// insist makes a call until it is answered or refused, or ctx ends.
func (l *lastWords) insist(ctx context.Context, call func(context.Context) error) error {
	l.quiet.begin()
	defer l.quiet.end()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := call(ctx)
		if err == nil || !l.unserved(err) {
			if ctx.Err() == nil {
				l.answered()
			}
			return err
		}
		if ctx.Err() != nil {
			return err
		}
		l.unanswered(err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// unanswered says once that nobody answers.
func (l *lastWords) unanswered(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.silent.IsZero() {
		l.silent = time.Now()
		l.log.Warn("log does not answer; the job goes on and retries", "error", why)
	}
}

func (l *lastWords) answered() {
	l.quiet.answered()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.silent.IsZero() {
		l.log.Info("log answers again", "after", time.Since(l.silent).Round(time.Millisecond))
		l.silent = time.Time{}
	}
}

// Append implements Log. It does not wait for room: who says something does.
func (l *lastWords) Append(ctx context.Context, facts ...events.Fact) (seqs []uint64, err error) {
	err = l.within(ctx, func(ctx context.Context) error {
		seqs, err = l.Log.Append(ctx, facts...)
		return err
	})
	return seqs, err
}

// Decide implements Log.
func (l *lastWords) Decide(ctx context.Context, d events.Decision, after uint64) (seq uint64, err error) {
	err = l.asked(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Decide(ctx, d, after)
		return err
	})
	return seq, err
}

// Last implements Log.
func (l *lastWords) Last(ctx context.Context) (seq uint64, err error) {
	err = l.asked(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Last(ctx)
		return err
	})
	return seq, err
}

// LastOf implements Log.
func (l *lastWords) LastOf(ctx context.Context, of events.Aggregate) (seq uint64, err error) {
	err = l.asked(ctx, func(ctx context.Context) error {
		seq, err = l.Log.LastOf(ctx, of)
		return err
	})
	return seq, err
}

// ReadTrial implements Log. It waits for the log's server by itself.
func (l *lastWords) ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return unsaidAfter(ctx, l.Log.ReadTrial(ctx, of, from, until))
}

// ReadLane implements Log. It waits for the log's server by itself.
func (l *lastWords) ReadLane(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return unsaidAfter(ctx, l.Log.ReadLane(ctx, of, from, until))
}

// unsaidAfter marks the error of a reading that ended before ctx did.
func unsaidAfter(ctx context.Context, all iter.Seq2[events.Recorded, error]) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for r, err := range all {
			if err != nil && ctx.Err() == nil {
				err = &RefusedError{Err: err}
			}
			if !yield(r, err) {
				return
			}
		}
	}
}
