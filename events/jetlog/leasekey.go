package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/nats-io/nats.go/jetstream"
)

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
