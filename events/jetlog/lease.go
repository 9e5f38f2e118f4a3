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

// LeaseHeldError names the holder of a lease.
type LeaseHeldError struct {
	Name   string
	Holder []byte
	Until  time.Time // its end by this machine's clock, unless it is renewed
	// Elected is set if the term counts from the election of the log's leader. Then the holder could
	// renew the lease for the whole term.
	Elected bool

	revision uint64
}

// Error implements error.
func (e *LeaseHeldError) Error() string {
	return fmt.Sprintf("lease %q is held by %s until %s, unless renewed; wait for it to end or stop its holder",
		e.Name, e.Holder, e.Until.Format(time.RFC3339))
}

// Expired reports whether the holder has not renewed the lease for a whole term. The
// holder may be dead, or cut off from a log that has just come back.
func (e *LeaseHeldError) Expired() bool { return !time.Now().Before(e.Until) }

// Is makes errors.Is(err, ErrLeaseHeld) true.
func (e *LeaseHeldError) Is(target error) bool { return target == ErrLeaseHeld }

// Lease is a name that only its holder has, for a term at a time. Its methods may be
// called concurrently.
//
// A lease that expired still belongs to its holder until another takes it: a holder
// that was paused, or whose server was away, renews it by the revision of its last
// write. So a lease is advice on which process continues, not a fence. The log itself
// must fence what the lease protects, as it fences decisions by their lane.
type Lease struct {
	l     *Log
	name  string
	value leaseValue

	mu       sync.Mutex
	kv       jetstream.KeyValue
	revision uint64
	until    time.Time
	lost     bool // another holder took it, or it is released
	released bool // Release was called; it may have to be called again
}

// Lease acquires the lease called name for term, which is at least a millisecond.
// holder describes the new holder, for people and for [Log.TakeOver]. If the lease is
// held, Lease returns a [*LeaseHeldError], even if it has expired: the caller judges
// whether its holder may come back.
func (l *Log) Lease(ctx context.Context, name string, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, name, holder, term, 0)
}

// TakeOver acquires a lease that another holder has, when the caller knows that the
// holder is dead or that the lease has expired. held is the error that [Log.Lease]
// returned. If the lease was renewed or changed hands since, TakeOver returns a new
// [*LeaseHeldError].
func (l *Log) TakeOver(ctx context.Context, held *LeaseHeldError, holder []byte, term time.Duration) (*Lease, error) {
	return l.acquire(ctx, held.Name, holder, term, held.revision)
}

// acquire takes the lease if it is free, or if its revision is dead.
func (l *Log) acquire(ctx context.Context, name string, holder []byte, term time.Duration, dead uint64) (*Lease, error) {
	if name == "" || term < time.Millisecond {
		return nil, fmt.Errorf("acquire lease %q for %s: a name and a term are required", name, term)
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
	// Our own token is there after a lost acknowledgement. It is written again, because
	// the term counts from a write whose time is known.
	if now.value.Token != e.value.Token && now.revision != dead {
		held, err := e.heldBy(ctx, now)
		if err != nil {
			return err
		}
		return held
	}
	begun := time.Now()
	revision, err := kv.Update(ctx, e.key(), e.encode(), now.revision)
	return e.written(begun, revision, err)
}

// written records a successful write that began at begun. If the key has moved, it
// returns an error that makes the caller look again.
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

// Renew extends the lease by a whole term from now. It tries until ctx ends (30 s
// without a deadline). It may be called at any time, even after the lease has expired
// or its server has ended: it takes a lease again if no other holder took it or if its
// entry is gone. It returns [ErrLeaseLost] if another holder took the lease, or if the
// lease was released: the holder must stop. After any other error the holder continues
// and calls Renew again.
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

// renewOnce writes the lease again where it finds it. It looks first, because the
// revisions of a recreated bucket start at 1 again.
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

// ownRevision returns the revision of this lease, or 0 if it has no holder. It
// distinguishes a write whose acknowledgement was lost from a lease that another holder
// took.
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

// Release ends the lease, so that another can acquire it at once. Releasing a lost
// lease does nothing. After an error it may be called again.
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

// open opens the bucket, or creates a missing one.
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

// at returns where the lease was written last.
func (e *Lease) at() (jetstream.KeyValue, uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.kv, e.revision
}

// Holder returns the holder that the lease was acquired with.
func (e *Lease) Holder() []byte { return e.value.Holder }

// Until returns the time, by this process's monotonic clock, until which no other can
// have the lease, except by TakeOver. It is zero once the lease was released or is
// known to be lost.
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

// LeaseHolder returns the holder of the lease called name as [Log.Lease] would report
// it, expired or not; nil if there is none. It takes nothing: the lease may be acquired
// or released right after.
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
		held, err = e.heldBy(ctx, now)
		return err
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
// Each acquisition has its own token. A renewal writes the same value again. A lease
// has expired when its last write is older than its term. Both times are the server's,
// so no client's clock matters. On a cluster, the term counts from the election of the
// leader if that is later.
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

// leaseEntry is the current state of a lease; revision 0: there is no holder.
type leaseEntry struct {
	value    leaseValue
	revision uint64
	at       time.Time // by the server's clock
}

func (e *Lease) read(ctx context.Context) (leaseEntry, error) {
	m, err := e.l.entry(ctx, Leases, e.key())
	if errors.Is(err, errUnreadable) {
		return leaseEntry{}, fmt.Errorf("%w: its holder is unknown: stop all processes that use the store, and the server of its log, and delete the directory %s of the log", err, leaseStream)
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

// heldBy describes the holder of an entry. The rest of the term is by the server's clock. On a
// cluster, a leader that was elected after the entry was written gives it a whole term from its
// election: it has another clock than the leader before, and without a leader no holder could
// renew.
func (e *Lease) heldBy(ctx context.Context, entry leaseEntry) (*LeaseHeldError, error) {
	s, err := e.l.js.Stream(ctx, leaseStream)
	if err != nil {
		return nil, err
	}
	held := &LeaseHeldError{Name: e.name, Holder: entry.value.Holder, revision: entry.revision}
	info, from := s.CachedInfo(), entry.at
	if c := info.Cluster; c != nil && c.LeaderSince != nil && c.LeaderSince.After(from) {
		from, held.Elected = *c.LeaderSince, true
	}
	held.Until = time.Now().Add(entry.value.term() - info.TimeStamp.Sub(from))
	return held, nil
}

// moved reports whether the key was not at the revision that a write expected, or
// whether a front keeps it for its holder.
func moved(err error) bool {
	return err != nil && (errors.Is(err, jetstream.ErrKeyExists) || hasCode(err, codeWrongLast, codeWrongLastPending, front.CodeHeld))
}

// key encodes the name in the characters that a key may have.
func (e *Lease) key() string { return bucketKey(e.name) }

func (e *Lease) encode() []byte {
	data, err := json.Marshal(e.value)
	if err != nil {
		panic("encode lease: " + err.Error()) // a struct of strings and numbers
	}
	return data
}

// concerned notes the subjects that calls of the lease use.
func (e *Lease) concerned(ctx context.Context) context.Context {
	return concerning(ctx, inBucket(Leases, e.key()))
}

// leases returns the bucket of leases.
func (l *Log) leases(ctx context.Context) (jetstream.KeyValue, error) {
	return l.bucket(ctx, Leases, leasesAre)
}
