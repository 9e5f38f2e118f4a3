package jetlog

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// errAgain marks a refusal that a retry settles.
var errAgain = errors.New("try again")

// transient reports whether the same request may succeed later. That includes timeouts:
// ctx distinguishes the caller's deadline from that of one request.
func transient(err error) bool {
	switch {
	case errors.Is(err, errAgain):
		return true
	case err == nil, errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrMaxPayload),
		errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrHeadersNotSupported):
		return false
	case hasCode(err, codeStoreFailed, codeInsufficient), hasCode(err, forGood...):
		return false
	case hasCode(err, codePending, codeBatchIncomplete, codeBatchInflight, codeNotLeader):
		return true
	}
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.Code == 503
	}
	for _, e := range []error{
		nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected, nats.ErrConnectionReconnecting,
		nats.ErrReconnectBufExceeded, nats.ErrStaleConnection, jetstream.ErrNoStreamResponse,
		jetstream.ErrNoHeartbeat, jetstream.ErrConsumerDeleted, jetstream.ErrConsumerNotFound,
		context.DeadlineExceeded, context.Canceled,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// backoff is a pause between attempts that grows to 250 ms.
type backoff struct{ next time.Duration }

func (b *backoff) reset() { b.next = 0 }

// wait pauses, or ends with ctx.
func (b *backoff) wait(ctx context.Context) error {
	b.next = min(max(2*b.next, 5*time.Millisecond), 250*time.Millisecond)
	t := time.NewTimer(b.next/2 + rand.N(b.next/2))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// retry calls f with the timeout of one request until f succeeds or fails permanently,
// or ctx or the log ends. The result includes the last error of f.
func (l *Log) retry(ctx context.Context, f func(ctx context.Context) error) error {
	var b backoff
	since := l.denials.mark()
	for {
		once, cancel := l.attempt(ctx)
		err := f(once)
		cancel()
		if l.ctx.Err() != nil && err != nil {
			return fmt.Errorf("%w: %w", ErrClosed, err)
		}
		if err == nil || !transient(err) {
			return refusedBy(err)
		}
		if denied := l.denials.of(since, concernOf(ctx)); denied != nil {
			return denied
		}
		if b.wait(ctx) != nil {
			return l.because(fmt.Errorf("%w (%w)", context.Cause(ctx), err))
		}
	}
}

// because adds the known cause to the error of an abandoned wait.
func (l *Log) because(err error) error {
	if !l.nc.IsConnected() {
		err = fmt.Errorf("%w (no process serves the log at the moment)", err)
	}
	if l.opts.Down != nil {
		if why := l.opts.Down(); why != nil {
			err = fmt.Errorf("%w: %w", err, why)
		}
	}
	return err
}

// attempt bounds one attempt by the timeout of a request, by the next reconnect,
// because the next server knows nothing of the request, and by the server's denial of
// the request.
func (l *Log) attempt(ctx context.Context) (context.Context, context.CancelFunc) {
	once, cancel := context.WithTimeout(ctx, l.opts.Timeout)
	unwatch := l.watch(cancel)
	heed := l.denials.watch(cancel, concernOf(ctx))
	return once, func() {
		heed()
		unwatch()
		cancel()
	}
}

// deadline adds a deadline to a ctx without one.
func deadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}

// Unanswered reports whether a call failed because the server did not answer or had no
// room. The same call may succeed later.
func Unanswered(err error) bool {
	return errors.Is(err, ErrUnacknowledged) || hasCode(err, codeStoreFailed, codeInsufficient) || transient(err)
}
