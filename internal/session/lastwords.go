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

// LastWordsTimeout bounds how long an ending job waits for a log that does not
// answer: in total, not per call.
const LastWordsTimeout = 30 * time.Second

// Pauses between retries of an unanswered call. Each try has its own deadline in
// the log.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 2 * time.Second
)

// ErrUnserved reports that the log did not answer an ending job.
var ErrUnserved = fmt.Errorf("the log did not answer in the last %v of the job; the next job records what is missing", LastWordsTimeout)

// lastWords is the log of a job. It retries a call that the log does not answer,
// because its owner is paused, its disk is slow or full, or its cluster has no
// leader. The retries end when the call is answered or refused, or its context
// ends. No event of the job is lost meanwhile, and none of its decisions takes
// effect.
//
// Once the job must end, unanswered calls share one deadline. The context of a
// call may have none, because events are recorded even when the job must end.
type lastWords struct {
	Log
	job  context.Context // ends when the job must end
	tell context.CancelCauseFunc

	unserved func(error) bool // Store.Unserved
	conflict func(error) bool // Store.Conflict
	log      *slog.Logger
	quiet    silenceMeter

	roomy  bool          // calls wait for room
	room   roomMeter     // of those that do
	noRoom chan struct{} // closed when calls stop waiting for room

	mu     sync.Mutex
	left   time.Duration
	silent time.Time // start of the silence; zero: the log answers
}

func newLastWords(job context.Context, log Log) *lastWords {
	never := func(error) bool { return false }
	l := &lastWords{Log: log, left: LastWordsTimeout, unserved: never, conflict: never, log: slog.New(slog.DiscardHandler)}
	l.job, l.tell = context.WithCancelCause(job)
	l.noRoom = make(chan struct{})
	context.AfterFunc(l.job, func() { time.AfterFunc(lastRoom, func() { close(l.noRoom) }) })
	return l
}

// patiently makes the job's calls of log and views wait for the log's server.
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

// within runs one call of the log, bounded by ctx and by the job's end.
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
		l.left = LastWordsTimeout // the log answers
	case errors.Is(context.Cause(ctx), ErrUnserved):
		err = errors.Join(ErrUnserved, err)
	case ctx.Err() == nil && !l.conflict(err):
		err = &RefusedError{Err: err}
	}
	return err
}

// Insist repeats a call of the log, other than those of Log, until it is answered or refused, as those
// are repeated: once the job must end, for [LastWordsTimeout] at most.
func (s Store) Insist(ctx context.Context, call func(context.Context) error) error {
	if s.words == nil {
		return call(ctx)
	}
	return s.words.within(ctx, call)
}

// asked is within for calls that do nothing while there is no room.
func (l *lastWords) asked(ctx context.Context, call func(context.Context) error) error {
	return l.forRoom(ctx, func() error { return l.within(ctx, call) })
}

// insist repeats a call until it is answered or refused, or ctx ends.
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

// unanswered logs the start of a silence once.
func (l *lastWords) unanswered(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.silent.IsZero() {
		l.silent = time.Now()
		l.log.Warn("log does not answer; retrying", "error", why)
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

// Append implements Log. It does not wait for room: eventWriter does.
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

// unsaidAfter marks the error of a read that ended before ctx did.
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
