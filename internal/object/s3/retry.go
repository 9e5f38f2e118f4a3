package s3

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// law is when a request is repeated.
type law struct {
	tries int
	least time.Duration // of a wait
	most  time.Duration
}

// usual gives a server half a minute on average, and two at most.
var usual = law{tries: 10, least: 100 * time.Millisecond, most: 20 * time.Second}

// pause returns the wait after the n-th failed attempt: a random part of a bound that doubles,
// so that many clients do not come back together.
func (l law) pause(n int) time.Duration {
	bound := l.most
	if n < 16 {
		bound = min(2*l.least<<(n-1), l.most)
	}
	if bound <= l.least {
		return bound
	}
	return l.least + rand.N(bound-l.least)
}

// request is one request of a bucket, however often it is sent.
type request struct {
	op     string // for errors
	key    string // empty for the bucket itself
	class  class
	header http.Header
	runs   [][]byte // the body, if it lies in memory of a caller
	sum    uint32   // of the body
	first  time.Duration
	needs  string // permissions; empty: those of the class

	// settle looks at the object after an attempt whose outcome is unclear, or that a condition
	// refused. It reports whether the request is thereby done, and with which result.
	settle func(ctx context.Context, failed error) (done bool, err error)
}

// do sends a request until it succeeds, cannot, or ctx ends. send makes one attempt.
func (b *Bucket) do(ctx context.Context, r request, send func(context.Context, *call) error) error {
	renewed := false
	for try := 1; ; try++ {
		c, err := b.attempt(ctx, r, try, send)
		if err == nil {
			return nil
		}
		verdict := judge(err, r, c)
		if ctx.Err() != nil {
			return b.fail(r, try, interrupted(ctx.Err(), err), c)
		}
		if verdict == expired && !renewed {
			renewed = true
			b.transport.keys.expire(ctx, c.used)
			b.transport.counts.repeated.Add(1)
			continue
		}
		if r.settle != nil && (verdict == unclear || verdict == refused) {
			done, result := r.settle(ctx, err)
			if done && result == nil {
				return nil
			}
			if done {
				return b.fail(r, try, result, c)
			}
		}
		if verdict == final || verdict == expired || verdict == refused && r.settle == nil || try >= b.law.tries {
			return b.fail(r, try, err, c)
		}
		wait := max(b.law.pause(try), min(retryAfter(c), b.law.most))
		b.log.LogAttrs(ctx, b.notice(try), "request repeated", slog.Duration("wait", wait.Round(time.Millisecond)), slog.Any("error", b.fail(r, try, err, c)))
		if ended := sleep(ctx, wait); ended != nil {
			return b.fail(r, try, interrupted(ended, err), c)
		}
		b.transport.counts.repeated.Add(1)
	}
}

// A request that fails so often is a warning, once in a while: callers wait for it.
const (
	warnAfter = 4
	warnEvery = 10 * time.Second
)

// notice returns the level at which the failure of an attempt is logged.
func (b *Bucket) notice(try int) slog.Level {
	if try < warnAfter {
		return slog.LevelDebug
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := time.Now(); now.Sub(b.warned) >= warnEvery {
		b.warned = now
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// interrupted returns the error of a context that ended a request, with the last failure.
func interrupted(ended, last error) error {
	if errors.Is(last, ended) {
		return last
	}
	return fmt.Errorf("%w; the last attempt: %w", ended, last)
}

// attempt sends a request once.
func (b *Bucket) attempt(ctx context.Context, r request, try int, send func(context.Context, *call) error) (*call, error) {
	c := &call{class: r.class, header: r.header, first: r.first, try: try}
	if c.first == 0 {
		c.first = b.transport.patience.first
	}
	began, err := b.gate.enter(ctx)
	if err != nil {
		return c, err
	}
	defer b.gate.leave()
	if r.runs != nil {
		c.body = newGather(r.runs)
		defer c.body.detach()
	}
	if c.core, err = b.core(ctx); err != nil {
		return c, err
	}
	err = send(with(ctx, c), c)
	if err != nil && judge(err, r, c) == throttled {
		b.transport.counts.throttled.Add(1)
		b.gate.throttled(began)
	} else {
		b.gate.served()
	}
	return c, err
}

// sleep waits, or returns the error of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// retryAfter returns the wait that a server asks for.
func retryAfter(c *call) time.Duration {
	if c.answer == nil {
		return 0
	}
	seconds, err := strconv.Atoi(c.answer.Get("Retry-After"))
	if err != nil || seconds < 0 || seconds > 3600 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}
