package retry

import (
	"context"
	"sync"
	"time"
)

// stride is how long a deadline waits between looks at the clock. Time beyond two
// strides passed while this process was stopped or its machine slept. It is not
// counted: the awaited event could not arrive either.
const stride = time.Second

// Timeout returns a context whose deadline is extended while the log does not
// answer, and while this process is stopped. It ends with
// [context.DeadlineExceeded].
func (c *Calls) Timeout(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if c == nil {
		return context.WithTimeout(parent, d)
	}
	out := &answeringCtx{Context: parent, done: make(chan struct{})}
	stop := make(chan struct{})
	silent := c.Silence()
	go func() {
		timer := time.NewTimer(min(d, stride))
		defer timer.Stop()
		for left, last := d, time.Now(); ; timer.Reset(min(left, stride)) {
			select {
			case <-parent.Done():
				out.finish(parent.Err())
				return
			case <-stop:
				out.finish(context.Canceled)
				return
			case <-timer.C:
			}
			looked := time.Now()
			left -= min(looked.Sub(last), 2*stride)
			last = looked
			if left > 0 {
				continue
			}
			now := c.Silence()
			if now <= silent {
				out.finish(context.DeadlineExceeded)
				return
			}
			left, silent = now-silent, now
		}
	}()
	return out, sync.OnceFunc(func() {
		close(stop)
		<-out.done
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
