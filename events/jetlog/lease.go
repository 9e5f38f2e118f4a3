package jetlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

// LeaseHeldError says who holds a lease.
type LeaseHeldError struct {
	Name   string
	Holder []byte
	Until  time.Time // its end by this machine's clock, unless it is renewed

	revision uint64
}

// Error implements error.
func (e *LeaseHeldError) Error() string {
	return fmt.Sprintf("lease %q is held by %s until %s, unless renewed; wait for it to end or stop its holder",
		e.Name, e.Holder, e.Until.Format(time.RFC3339))
}

// Is makes errors.Is(err, ErrLeaseHeld) true.
func (e *LeaseHeldError) Is(target error) bool { return target == ErrLeaseHeld }

// Lease is a name that its holder alone has, for a term at a time. Its methods
// may be called concurrently.
type Lease struct {
	l     *Log
	kv    jetstream.KeyValue
	name  string
	value leaseValue

	mu       sync.Mutex
	revision uint64
	until    time.Time
	lost     bool
}

// Lease acquires the lease called name for term, which is at least a
// millisecond. holder says who has it, for people and for [Log.TakeOver]. If
// somebody else holds it, the error is a [*LeaseHeldError].
//
// The holder must stop what the lease protects when it could not renew it; by
// the time that another may acquire it, a whole term has passed since the last
// renewal began.
func (l *Log) Lease(ctx context.Context, name string, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, name, holder, term, 0)
}

// TakeOver acquires a lease before its end, when the caller knows that its
// holder is dead. held is what [Log.Lease] returned; if the lease was renewed
// or changed hands since, the error is a new [*LeaseHeldError].
func (l *Log) TakeOver(ctx context.Context, held *LeaseHeldError, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, held.Name, holder, term, held.revision)
}

// acquire takes the lease if it is free, over, or at the revision dead.
func (l *Log) acquire(ctx context.Context, name string, holder []byte, term time.Duration, dead uint64) (*Lease, error) {
	if name == "" || term < time.Millisecond {
		return nil, fmt.Errorf("acquire lease %q for %s: it needs a name and a term", name, term)
	}
	if l.opts.ReadOnly != nil {
		return nil, fmt.Errorf("acquire lease %q: %w", name, l.opts.ReadOnly)
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	lease := &Lease{l: l, name: name, value: leaseValue{Token: nuid.Next(), Holder: holder, TermMS: term.Milliseconds()}}
	err := l.retry(ctx, func(ctx context.Context) (err error) {
		if err = l.known(ctx); err != nil {
			return err
		}
		if lease.kv, err = l.leases(ctx); err != nil {
			return err
		}
		return lease.acquireOnce(ctx, dead)
	})
	var held *LeaseHeldError
	if errors.As(err, &held) {
		return nil, held
	}
	if err != nil {
		return nil, fmt.Errorf("acquire lease %q at %s: %w", name, l.opts.where(), err)
	}
	return lease, nil
}

func (e *Lease) acquireOnce(ctx context.Context, dead uint64) error {
	now, err := e.read(ctx)
	if err != nil {
		return err
	}
	if now.revision == 0 {
		begun := time.Now()
		revision, err := e.kv.Create(ctx, e.key(), e.encode())
		return e.written(begun, revision, err)
	}
	// Our own token is there after a lost acknowledgement. It is written again,
	// because the term counts from a write whose time is known.
	if now.value.Token != e.value.Token && now.revision != dead {
		left, err := e.left(ctx, now)
		if err != nil {
			return err
		}
		if left > 0 {
			return &LeaseHeldError{Name: e.name, Holder: now.value.Holder, Until: time.Now().Add(left), revision: now.revision}
		}
	}
	begun := time.Now()
	revision, err := e.kv.Update(ctx, e.key(), e.encode(), now.revision)
	return e.written(begun, revision, err)
}

// written notes a successful write that was begun then. A key that moved is a
// reason to look again.
func (e *Lease) written(begun time.Time, revision uint64, err error) error {
	if moved(err) {
		return fmt.Errorf("%w: %w", errAgain, err)
	}
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.revision, e.until = revision, begun.Add(e.value.term())
	return nil
}

// Renew makes the lease last for a whole term from now. It gives up when ctx
// ends, or the lease does. [ErrLeaseLost] says that somebody else has it or
// may have it: the holder must stop. After another error, the holder has it
// until [Lease.Until].
func (e *Lease) Renew(ctx context.Context) error {
	e.mu.Lock()
	revision, until, lost := e.revision, e.until, e.lost
	e.mu.Unlock()
	if lost {
		return e.failed("renew", ErrLeaseLost)
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	err := e.l.retry(ctx, func(ctx context.Context) error {
		if err := e.l.known(ctx); err != nil {
			return err
		}
		begun := time.Now()
		next, err := e.kv.Update(ctx, e.key(), e.encode(), revision)
		if moved(err) {
			if revision, err = e.ownRevision(ctx); err != nil {
				return err
			}
			next, err = e.kv.Update(ctx, e.key(), e.encode(), revision)
		}
		return e.written(begun, next, err)
	})
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrLeaseLost) || !time.Now().Before(until) {
		e.mu.Lock()
		e.lost = true
		e.mu.Unlock()
		err = fmt.Errorf("%w: %w", ErrLeaseLost, err)
	}
	return e.failed("renew", err)
}

// ownRevision tells a write whose acknowledgement was lost from a lease that
// somebody else took.
func (e *Lease) ownRevision(ctx context.Context) (uint64, error) {
	now, err := e.read(ctx)
	switch {
	case err != nil:
		return 0, err
	case now.revision == 0:
		return 0, ErrLeaseLost
	case now.value.Token != e.value.Token:
		return 0, fmt.Errorf("%w to %s", ErrLeaseLost, now.value.Holder)
	}
	return now.revision, nil
}

// Release ends the lease, so that another can have it at once. Releasing one
// that is lost does nothing.
func (e *Lease) Release(ctx context.Context) error {
	e.mu.Lock()
	revision, lost := e.revision, e.lost
	e.lost = true
	e.mu.Unlock()
	if lost {
		return nil
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	err := e.l.retry(ctx, func(ctx context.Context) error {
		err := e.kv.Delete(ctx, e.key(), jetstream.LastRevision(revision))
		if !moved(err) {
			return err
		}
		if revision, err = e.ownRevision(ctx); errors.Is(err, ErrLeaseLost) {
			return nil
		} else if err != nil {
			return err
		}
		return e.kv.Delete(ctx, e.key(), jetstream.LastRevision(revision))
	})
	if err != nil {
		return e.failed("release", err)
	}
	return nil
}

// Holder is what the lease was acquired with.
func (e *Lease) Holder() []byte { return e.value.Holder }

// Until is the time, by this process's monotonic clock, up to which nobody
// else can have the lease, unless it takes it over. It is zero once the lease
// is known to be lost or was released.
func (e *Lease) Until() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost {
		return time.Time{}
	}
	return e.until
}

func (e *Lease) failed(what string, err error) error {
	return fmt.Errorf("%s lease %q at %s: %w", what, e.name, e.l.opts.where(), err)
}
