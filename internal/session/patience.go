package session

import (
	"context"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// silenceAfter is how long a waiting call may stay unanswered before the log
// counts as silent.
const silenceAfter = 5 * time.Second

// silenceMeter adds up the time in which the log did not answer. Deadlines of a
// job are extended by it.
type silenceMeter struct {
	mu    sync.Mutex
	calls int           // calls that wait
	since time.Time     // time of the last answer, or start of the longest waiting call
	total time.Duration // of past silences
}

func (m *silenceMeter) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls++; m.calls == 1 {
		m.since = time.Now()
	}
}

func (m *silenceMeter) answered() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.total = m.lost()
	m.since = time.Now()
}

func (m *silenceMeter) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls == 1 {
		m.total = m.lost()
	}
	m.calls--
}

// lost returns the length of the current silence. The caller holds the lock.
func (m *silenceMeter) lost() time.Duration {
	if m.calls > 0 {
		if d := time.Since(m.since); d > silenceAfter {
			return m.total + d
		}
	}
	return m.total
}

func (m *silenceMeter) silence() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost()
}

// silence returns the total time in which the job's log did not answer or had no
// room.
func (s Store) silence() time.Duration {
	if s.words == nil {
		return 0
	}
	return s.words.quiet.silence() + s.words.room.waited()
}

// stride is how long a deadline waits between looks at the clock. Time beyond two
// strides passed while this process was stopped or its machine slept. It is not
// counted: the awaited event could not arrive either.
const stride = time.Second

// answering returns a context whose deadline is extended while the log does not
// answer, and while this process is stopped. It ends with
// [context.DeadlineExceeded].
func (s Store) answering(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if s.words == nil {
		return context.WithTimeout(parent, d)
	}
	c := &answeringCtx{Context: parent, done: make(chan struct{})}
	stop := make(chan struct{})
	silent := s.silence()
	go func() {
		timer := time.NewTimer(min(d, stride))
		defer timer.Stop()
		for left, last := d, time.Now(); ; timer.Reset(min(left, stride)) {
			select {
			case <-parent.Done():
				c.finish(parent.Err())
				return
			case <-stop:
				c.finish(context.Canceled)
				return
			case <-timer.C:
			}
			looked := time.Now()
			left -= min(looked.Sub(last), 2*stride)
			last = looked
			if left > 0 {
				continue
			}
			now := s.silence()
			if now <= silent {
				c.finish(context.DeadlineExceeded)
				return
			}
			left, silent = now-silent, now
		}
	}()
	return c, sync.OnceFunc(func() {
		close(stop)
		<-c.done
	})
}

// answeringCtx is a context that ends by its own timer.
type answeringCtx struct {
	context.Context
	done chan struct{}

	mu  sync.Mutex
	err error
}

var _ context.Context = (*answeringCtx)(nil)

func (c *answeringCtx) finish(why error) {
	c.mu.Lock()
	c.err = why
	c.mu.Unlock()
	close(c.done)
}

// Deadline implements context.Context. It returns the parent's, as its own is not
// known in advance.
func (c *answeringCtx) Deadline() (time.Time, bool) { return c.Context.Deadline() }

// Done implements context.Context.
func (c *answeringCtx) Done() <-chan struct{} { return c.done }

// Err implements context.Context.
func (c *answeringCtx) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// patientViews are the views of a job. Their queries wait as its log does.
type patientViews struct {
	Views
	words *lastWords
}

var _ Views = patientViews{}

func ask[T any](ctx context.Context, l *lastWords, question func(context.Context) (T, error)) (answer T, err error) {
	err = l.asked(ctx, func(ctx context.Context) error {
		answer, err = question(ctx)
		return err
	})
	return answer, err
}

// Trial implements Views.
func (v patientViews) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return ask(ctx, v.words, func(ctx context.Context) (projections.Trial, error) { return v.Views.Trial(ctx, run, trial) })
}

// Attempts implements Views.
func (v patientViews) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return ask(ctx, v.words, func(ctx context.Context) ([]projections.Attempt, error) { return v.Views.Attempts(ctx, run, trial) })
}

// OpenCheckpoints implements Views.
func (v patientViews) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return ask(ctx, v.words, func(ctx context.Context) ([]projections.Checkpoint, error) {
		return v.Views.OpenCheckpoints(ctx, run, trial)
	})
}

// Resolve implements Views.
func (v patientViews) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return ask(ctx, v.words, func(ctx context.Context) (projections.Checkpoint, error) { return v.Views.Resolve(ctx, ref) })
}

// Trials implements Views.
func (v patientViews) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return ask(ctx, v.words, func(ctx context.Context) ([]projections.Trial, error) { return v.Views.Trials(ctx, run) })
}
