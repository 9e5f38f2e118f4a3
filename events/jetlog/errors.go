package jetlog

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Errors to be told apart with errors.Is.
var (
	// ErrNoLog: there is no stream, or an empty one whose first boot was cut.
	ErrNoLog = errors.New("no log")
	// ErrServed: another server has the directory.
	ErrServed = problem.New(problem.Locked, "another server has the log open")
	// ErrForeign: the log is another store's, or was made anew since it was
	// opened.
	ErrForeign = errors.New("foreign log")
	// ErrUnsafe: the stream is configured so that it could lose events.
	ErrUnsafe = problem.New(problem.Damage, "unsafe log")
	// ErrReplicas: the server cannot keep as many copies as were asked for.
	ErrReplicas = errors.New("too few servers")
	// ErrGap: an event that was in the log is not there any more, or cannot be
	// read.
	ErrGap = problem.New(problem.Damage, "gap in the log")
	// ErrUnrecovered: the embedded server could not make sense of its files.
	ErrUnrecovered = problem.New(problem.Damage, "the log cannot be recovered")
	// ErrEnd: the log ends before the event that was asked for.
	ErrEnd = problem.New(problem.NotFound, "end of the log")
	// ErrConflict: another decision of the aggregate came first.
	ErrConflict = errors.New("conflict")
	// ErrUnacknowledged: the deadline came before an acknowledgement. The event
	// may be in the log or not; appending it again settles that.
	ErrUnacknowledged = errors.New("not acknowledged")
	// ErrClosed: the log was closed by this process.
	ErrClosed = errors.New("log is closed")
	// ErrLeaseHeld: somebody else holds the lease.
	ErrLeaseHeld = errors.New("lease is held")
	// ErrLeaseLost: somebody else took the lease, or it was released.
	ErrLeaseLost = errors.New("lease is lost")
)

// restore is what to do about a log that is not whole. A server that opens it
// may cut off what it cannot read, hence the copy.
const restore = "stop, keep a copy of the directory, and restore log/ from a backup; without one, move log/ away and run `ckptstore recover`, which makes a log of the receipts"

// ConflictError says that a lane has moved since the caller looked.
type ConflictError struct {
	Lane   string
	After  uint64 // the end of the lane that the caller expected
	Actual uint64 // its end now
}

// Error implements error.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("decide on %s after %d: conflict: the lane is at %d; read it and decide again", e.Lane, e.After, e.Actual)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Codes of the JetStream API.
const (
	codeWrongLast        = jetstream.ErrorCode(10071) // an expected sequence is not the last one
	codeWrongLastPending = jetstream.ErrorCode(10164) // the same, against an append that is in flight
	codePending          = jetstream.ErrorCode(10158) // the same ID is in flight: an earlier attempt without a quorum
	codeBatchIncomplete  = jetstream.ErrorCode(10176) // a message of the batch is missing
	codeBatchDuplicate   = jetstream.ErrorCode(10201) // an ID of the batch is in the log already
	codeBatchInflight    = jetstream.ErrorCode(10210) // too many open batches
	codeStoreFailed      = jetstream.ErrorCode(10077) // disk or quota
	codeInsufficient     = jetstream.ErrorCode(10023) // the server's quota
	codeNoPeers          = jetstream.ErrorCode(10005) // the cluster has too few servers
	codeNotClustered     = jetstream.ErrorCode(10074) // more than one replica without a cluster
	codeNoMessage        = jetstream.ErrorCode(10037)
	codeNotLeader        = jetstream.ErrorCode(10009)
	codeNoStream         = jetstream.ErrorCode(10059)
	codeOtherStream      = jetstream.ErrorCode(10060) // the append was for another stream
)

func hasCode(err error, codes ...jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	for _, c := range codes {
		if api.ErrorCode == c {
			return true
		}
	}
	return false
}

// errAgain marks a refusal that is settled by trying again.
var errAgain = errors.New("try again")

// transient reports whether the same request may do better later. Time-outs
// count: ctx tells the caller's deadline from that of one request.
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

// retry calls f with a context of one request's time-out until it succeeds,
// errs for good, or ctx or the log ends. The last error of f is in the result.
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

// because adds to the error of a wait that was given up why it was so long,
// where that is known.
func (l *Log) because(err error) error {
	if !l.nc.IsConnected() {
		err = fmt.Errorf("%w (nobody serves the log at the moment)", err)
	}
	if l.opts.Down != nil {
		if why := l.opts.Down(); why != nil {
			err = fmt.Errorf("%w: %w", err, why)
		}
	}
	return err
}

// attempt bounds one attempt: by the time-out of a request, by the next
// reconnect, because whoever is behind it knows nothing of the request, and by
// the server's refusal of what the attempt sends.
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

// deadline gives ctx one when it has none.
func deadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}

// Unanswered reports whether a call failed because the server did not answer, or
// had no room: the same call may do better later.
func Unanswered(err error) bool {
	return errors.Is(err, ErrUnacknowledged) || hasCode(err, codeStoreFailed, codeInsufficient) || transient(err)
}
