package jetlog

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/internal/front"
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

// Expired reports whether the holder has not renewed the lease for a whole
// term. It may be dead, or cut off from a log that has just come back.
func (e *LeaseHeldError) Expired() bool { return !time.Now().Before(e.Until) }

// Is makes errors.Is(err, ErrLeaseHeld) true.
func (e *LeaseHeldError) Is(target error) bool { return target == ErrLeaseHeld }

// Lease is a name that its holder alone has, for a term at a time. Its methods
// may be called concurrently.
//
// A lease that expired is still its holder's until somebody else takes it: a
// holder that was paused, or whose server was away, renews it by the revision
// of its last write. So a lease is advice on who goes on, not a fence; what it
// protects must be fenced by the log itself, as decisions are by their lane.
type Lease struct {
	l     *Log
	name  string
	value leaseValue

	mu       sync.Mutex
	kv       jetstream.KeyValue
	revision uint64
	until    time.Time
	lost     bool // somebody else took it, or it is released
	released bool // Release was called; it may have to be called again
}

// Lease acquires the lease called name for term, which is at least a
// millisecond. holder says who has it, for people and for [Log.TakeOver]. If
// somebody else holds it, the error is a [*LeaseHeldError], also when it has
// expired: the caller judges whether its holder may come back.
func (l *Log) Lease(ctx context.Context, name string, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, name, holder, term, 0)
}

// TakeOver acquires a lease that another has, when the caller knows that its
// holder is dead or that it has expired. held is what [Log.Lease] returned; if the lease was renewed
// or changed hands since, the error is a new [*LeaseHeldError].
func (l *Log) TakeOver(ctx context.Context, held *LeaseHeldError, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, held.Name, holder, term, held.revision)
}

// acquire takes the lease if it is free, or at the revision dead.
func (l *Log) acquire(ctx context.Context, name string, holder []byte, term time.Duration, dead uint64) (*Lease, error) {
	if name == "" || term < time.Millisecond {
		return nil, fmt.Errorf("acquire lease %q for %s: it needs a name and a term", name, term)
	}
	if l.opts.ReadOnly != nil {
		return nil, fmt.Errorf("acquire lease %q: %w", name, l.opts.ReadOnly)
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	lease := &Lease{l: l, name: name, value: leaseValue{Token: rand.Text(), Holder: holder, TermMS: term.Milliseconds()}}
	err := l.retry(lease.concerned(ctx), func(ctx context.Context) error {
		if err := l.known(ctx); err != nil {
			return err
		}
		if err := lease.open(ctx); err != nil {
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
	kv, _ := e.at()
	if now.revision == 0 {
		begun := time.Now()
		revision, err := kv.Create(ctx, e.key(), e.encode())
		return e.written(begun, revision, err)
	}
	// Our own token is there after a lost acknowledgement. It is written again,
	// because the term counts from a write whose time is known.
	if now.value.Token != e.value.Token && now.revision != dead {
		left, err := e.left(ctx, now)
		if err != nil {
			return err
		}
		return &LeaseHeldError{Name: e.name, Holder: now.value.Holder, Until: time.Now().Add(left), revision: now.revision}
	}
	begun := time.Now()
	revision, err := kv.Update(ctx, e.key(), e.encode(), now.revision)
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

// Renew makes the lease last for a whole term from now. It tries until ctx ends
// (30 s without a deadline) and may be called at any time, also after the end
// of the lease or of the server that had it: a lease that nobody else took is
// taken again, and so is one whose entry is gone. [ErrLeaseLost] says that
// somebody else took it, or that it was released: the holder must stop. After
// any other error the holder goes on and calls Renew again.
func (e *Lease) Renew(ctx context.Context) error {
	e.mu.Lock()
	lost := e.lost || e.released
	e.mu.Unlock()
	if lost {
		return e.failed("renew", ErrLeaseLost)
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	err := e.l.retry(e.concerned(ctx), func(ctx context.Context) error {
		if err := e.l.known(ctx); err != nil {
			return err
		}
		err := e.renewOnce(ctx)
		if errors.Is(err, jetstream.ErrNoStreamResponse) {
			err = errors.Join(e.open(ctx), err) // the bucket may be gone with its server
		}
		return err
	})
	if errors.Is(err, ErrLeaseLost) {
		e.mu.Lock()
		e.lost = true
		e.mu.Unlock()
	}
	if err != nil {
		return e.failed("renew", err)
	}
	return nil
}

// renewOnce writes the lease again where it is found. It looks first: revisions
// of a bucket that was made anew begin at 1 again.
func (e *Lease) renewOnce(ctx context.Context) error {
	revision, err := e.ownRevision(ctx)
	if err != nil {
		return err
	}
	kv, _ := e.at()
	begun := time.Now()
	if revision == 0 {
		revision, err = kv.Create(ctx, e.key(), e.encode())
	} else {
		revision, err = kv.Update(ctx, e.key(), e.encode(), revision)
	}
	return e.written(begun, revision, err)
}

// ownRevision is where the lease is. It tells a write whose acknowledgement was
// lost from a lease that somebody else took, and is 0 when nobody has it.
func (e *Lease) ownRevision(ctx context.Context) (uint64, error) {
	now, err := e.read(ctx)
	switch {
	case err != nil || now.revision == 0:
		return 0, err
	case now.value.Token != e.value.Token:
		return 0, fmt.Errorf("%w to %s", ErrLeaseLost, now.value.Holder)
	}
	return now.revision, nil
}

// Release ends the lease, so that another can have it at once. Releasing one
// that is lost does nothing. After an error it may be called again.
func (e *Lease) Release(ctx context.Context) error {
	e.mu.Lock()
	lost := e.lost
	e.released = true
	e.mu.Unlock()
	if lost {
		return nil
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	err := e.l.retry(e.concerned(ctx), func(ctx context.Context) error {
		if err := e.l.known(ctx); err != nil {
			return err
		}
		kv, revision := e.at()
		err := kv.Delete(ctx, e.key(), jetstream.LastRevision(revision))
		if !moved(err) {
			return err
		}
		revision, err = e.ownRevision(ctx)
		if errors.Is(err, ErrLeaseLost) || err == nil && revision == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		return kv.Delete(ctx, e.key(), jetstream.LastRevision(revision))
	})
	if err != nil {
		return e.failed("release", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lost = true
	return nil
}

// open opens the bucket, and makes it when there is none.
func (e *Lease) open(ctx context.Context) error {
	kv, err := e.l.leases(ctx)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kv = kv
	return nil
}

// at is where the lease was written last.
func (e *Lease) at() (jetstream.KeyValue, uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.kv, e.revision
}

// Holder is what the lease was acquired with.
func (e *Lease) Holder() []byte { return e.value.Holder }

// Until is the time, by this process's monotonic clock, up to which nobody
// else can have the lease, unless it takes it over. It is zero once the lease
// is known to be lost or was released.
func (e *Lease) Until() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost || e.released {
		return time.Time{}
	}
	return e.until
}

func (e *Lease) failed(what string, err error) error {
	return fmt.Errorf("%s lease %q at %s: %w", what, e.name, e.l.opts.where(), err)
}

// LeaseHolder is who holds the lease called name, as [Log.Lease] would say it,
// expired or not; nil if nobody does. It takes nothing: somebody may acquire the
// lease, and its holder release it, right after.
func (l *Log) LeaseHolder(ctx context.Context, name string) (held *LeaseHeldError, err error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	e := &Lease{l: l, name: name}
	err = l.retry(e.concerned(ctx), func(ctx context.Context) error {
		held = nil
		if err := l.known(ctx); err != nil {
			return err
		}
		now, err := e.read(ctx)
		if err != nil || now.revision == 0 {
			return err
		}
		left, err := e.left(ctx, now)
		if err != nil {
			return err
		}
		held = &LeaseHeldError{Name: name, Holder: now.value.Holder, Until: time.Now().Add(left), revision: now.revision}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ask who holds lease %q at %s: %w", name, l.opts.where(), err)
	}
	return held, nil
}

// Leases is the bucket of leases. A key is a lease's name, a value is
//
//	{"token": "…", "holder": "base64", "term_ms": 10000}
//
// Each acquisition has its own token. A renewal writes the same value again.
// A lease has expired when its last write is older than its term. Both times are
// the server's, so that nobody's clock but its matters; on a cluster, those of
// its members must agree to a fraction of the terms.
const Leases = "CKPT_LEASES"

const (
	leaseStream = "KV_" + Leases
	leasesAre   = "leases of a checkpoint store"
)

type leaseValue struct {
	Token  string `json:"token"`
	Holder []byte `json:"holder"`
	TermMS int64  `json:"term_ms"`
}

func (v leaseValue) term() time.Duration { return time.Duration(v.TermMS) * time.Millisecond }

// leaseEntry is a lease as it stands; revision 0: nobody has it.
type leaseEntry struct {
	value    leaseValue
	revision uint64
	at       time.Time // by the server's clock
}

func (e *Lease) read(ctx context.Context) (leaseEntry, error) {
	m, err := e.l.entry(ctx, Leases, e.key())
	if errors.Is(err, errUnreadable) {
		return leaseEntry{}, fmt.Errorf("%w: who has it is not known: stop all that use the store, the server of its log too, and delete the directory %s of the log", err, leaseStream)
	}
	if err != nil || m.Seq == 0 {
		return leaseEntry{}, err
	}
	entry := leaseEntry{revision: m.Seq, at: m.Time}
	if err := json.Unmarshal(m.Data, &entry.value); err != nil {
		return leaseEntry{}, fmt.Errorf("value of the lease: %w", err)
	}
	return entry, nil
}

// left is how much of its term the entry has, by the server's clock.
func (e *Lease) left(ctx context.Context, entry leaseEntry) (time.Duration, error) {
	s, err := e.l.js.Stream(ctx, leaseStream)
	if err != nil {
		return 0, err
	}
	return entry.value.term() - s.CachedInfo().TimeStamp.Sub(entry.at), nil
}

// moved reports that the key was not at the revision that a write expected, or
// that a front keeps it for its holder.
func moved(err error) bool {
	return err != nil && (errors.Is(err, jetstream.ErrKeyExists) || hasCode(err, codeWrongLast, codeWrongLastPending, front.CodeHeld))
}

// key spells the name in the characters that a key may have.
func (e *Lease) key() string { return bucketKey(e.name) }

func (e *Lease) encode() []byte {
	data, err := json.Marshal(e.value)
	if err != nil {
		panic("encode lease: " + err.Error()) // a struct of strings and numbers
	}
	return data
}

// concerned notes what calls of the lease ask the server for.
func (e *Lease) concerned(ctx context.Context) context.Context {
	return concerning(ctx, inBucket(Leases, e.key()))
}

// leases is the bucket of leases.
func (l *Log) leases(ctx context.Context) (jetstream.KeyValue, error) {
	return l.bucket(ctx, Leases, leasesAre)
}
