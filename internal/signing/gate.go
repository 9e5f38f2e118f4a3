// Package signing signs the decisions of a process, and knows which decisions a store takes.
// Package audit has the format of signatures, and checks them for verifiers.
//
//	Signer   the key of this process, from a file that only its user can read
//	Gate     signs, and refuses decisions that must be signed and are not
//	Keys     what the log grants
//
// The refusal is for programs that are honest: a user who can write to the files of the log
// appends what they like, and a verifier finds it.
package signing

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// EnvKey names the file with the key by which a process signs its decisions.
const EnvKey = "CKPTSTORE_SIGNING_KEY"

// FromEnv returns the key that the environment names, nil if it names none. A key in the
// directory of a store is refused: a user who can rewrite the log could sign it. Dir is "" for
// a store at a URL.
func FromEnv(dir string) (*audit.Signer, error) {
	file := os.Getenv(EnvKey)
	if file == "" {
		return nil, nil
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		dir = "" // opening the store reports it
	}
	file, err := filepath.Abs(file)
	var s *audit.Signer
	if err == nil {
		s, err = ledger.ReadSigner(dir, file)
	}
	if err != nil {
		return nil, fmt.Errorf("key that signs decisions, by $%s: %w", EnvKey, err)
	}
	return s, nil
}

// Gate signs decisions of this process, and checks decisions of others, for one store. Nil
// signs nothing and admits everything. Its methods may be called concurrently.
type Gate struct {
	signer *audit.Signer // nil: none

	mu    sync.Mutex
	store string // identity; "" until it was read
	ring  *audit.Ring
	end   uint64    // the ring has the lane of keys up to here
	read  time.Time // when that was the end of the lane
}

// NewGate returns the gate of a store. Its identity may be "": then the gate reads it from
// the log. Signer may be nil.
func NewGate(store string, signer *audit.Signer) *Gate { return &Gate{store: store, signer: signer} }

// Signer returns the key of this process, nil if it has none.
func (g *Gate) Signer() *audit.Signer {
	if g == nil {
		return nil
	}
	return g.signer
}

// currentFor is how long the ring is taken for current. A key that is revoked signs no
// longer than that.
const currentFor = 250 * time.Millisecond

// Sign signs a decision that this process appends to its lane after another, and returns
// the signature, "" without a key. It is also "" for a key that no admin has granted where none is
// required: verifiers would name that signature for ever. Its error is of the kind
// [problem.Denied] if the store does not take the decision.
func (g *Gate) Sign(ctx context.Context, l *jetlog.Log, e events.Event, after uint64) (string, error) {
	if g == nil {
		return "", nil
	}
	if g.signer != nil {
		store, err := g.identity(ctx, l)
		if err == nil {
			e.Signature, err = g.signer.Sign(store, e, after)
		}
		if err != nil {
			return "", err
		}
	}
	state, err := g.admit(ctx, l, e, after)
	if state == audit.UnknownKey {
		plain := e
		plain.Signature = ""
		if _, without := g.admit(ctx, l, plain, after); without == nil {
			return "", nil
		}
	}
	return e.Signature, err
}

// Admit checks a decision before it is appended to its lane after another. A signature that
// does not hold is refused with an error of the kind [problem.Denied].
func (g *Gate) Admit(ctx context.Context, l *jetlog.Log, e events.Event, after uint64) error {
	if g == nil {
		return nil
	}
	_, err := g.admit(ctx, l, e, after)
	return err
}

// admit is Admit, and returns the state of the signature.
func (g *Gate) admit(ctx context.Context, l *jetlog.Log, e events.Event, after uint64) (audit.State, error) {
	v, current, err := g.judge(ctx, l, e, after, false)
	if err == nil && v.Problem != "" && !current {
		v, _, err = g.judge(ctx, l, e, after, true) // the key may have been granted since
	}
	if err == nil && v.Problem != "" {
		err = problem.Errorf(problem.Denied, "the store does not take the decision: %s", v.Problem)
	}
	return v.State, err
}

// judge checks a decision by the ring, which it reads first if it is old or if fresh is set.
// Current reports whether it has read it.
func (g *Gate) judge(ctx context.Context, l *jetlog.Log, e events.Event, after uint64, fresh bool) (v audit.Verdict, current bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ring == nil || fresh || time.Since(g.read) > currentFor {
		if err := g.refresh(ctx, l); err != nil {
			return v, false, fmt.Errorf("which keys sign decisions: %w", err)
		}
		current = true
	}
	now := time.Now().Add(jetlog.DefaultAppend) // until when it is stored at the latest
	if (e.Scope == events.Scope{Trial: events.Keys, Actor: events.Server}) {
		return g.ring.Accepts(e, after, now), current, nil
	}
	return g.ring.Judge(e, after, now), current, nil
}

// identity returns the identity of the store.
func (g *Gate) identity(ctx context.Context, l *jetlog.Log) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.identify(ctx, l)
}

// identify is identity for a caller that holds the lock.
func (g *Gate) identify(ctx context.Context, l *jetlog.Log) (string, error) {
	if g.store != "" {
		return g.store, nil
	}
	first, err := l.At(ctx, 1)
	if err != nil {
		return "", fmt.Errorf("identity of the store: %w", err)
	}
	body, err := first.Body()
	if err != nil {
		return "", fmt.Errorf("identity of the store: %w", err)
	}
	created, ok := body.(*events.StoreCreated)
	if !ok {
		return "", problem.Errorf(problem.Damage, "identity of the store: event 1 is %s", first.Kind)
	}
	g.store = created.Store
	return g.store, nil
}

// refresh reads what the lane of keys has more. The caller holds the lock.
func (g *Gate) refresh(ctx context.Context, l *jetlog.Log) error {
	store, err := g.identify(ctx, l)
	if err != nil {
		return err
	}
	if g.ring == nil {
		g.ring = audit.NewRing(store, nil, nil)
	}
	lane := events.Aggregate{Trial: events.Keys}
	end, err := l.LaneEnd(ctx, lane)
	if err != nil {
		return err
	}
	if end > g.end {
		for r, err := range l.ReadLane(ctx, lane, g.end+1, end) {
			if err != nil {
				return err
			}
			g.ring.Fold(r, g.end)
			g.end = r.Sequence
		}
	}
	g.read = time.Now()
	return nil
}

// Keys are the keys that a log grants.
type Keys struct {
	Grants  []audit.Grant `json:"keys"`    // also the revoked ones, in order
	Require []string      `json:"require"` // patterns of runs whose decisions must be signed
}

// ReadKeys reads the keys that a log grants.
func ReadKeys(ctx context.Context, l *jetlog.Log) (Keys, error) {
	g := &Gate{}
	if err := g.refresh(ctx, l); err != nil {
		return Keys{}, fmt.Errorf("keys that sign decisions: %w", err)
	}
	k := Keys{Grants: g.ring.Grants(), Require: g.ring.Required()}
	if k.Require == nil {
		k.Require = []string{}
	}
	return k, nil
}

// ErrLastAdmin reports a revocation after which no key could decide about keys.
var ErrLastAdmin = problem.New(problem.Conflict, "the last key of an admin")

// MayDecide returns [ErrLastAdmin] for a decision about keys after which no admin has a key that
// does not expire.
func (k Keys) MayDecide(body events.Body) error {
	var ends []string // keys whose grants end
	switch b := body.(type) {
	case *events.AccessRevoked:
		ends = b.Keys
	case *events.AccessGranted:
		if b.Key == "" || b.Role == audit.RoleAdmin && b.Expires == "" || len(k.Grants) == 0 && b.Role != audit.RoleAdmin {
			return nil // the gate refuses the last one
		}
		ends = []string{audit.KeyOf(b.Key)} // it replaces the earlier grant
	}
	ended := len(k.Grants) == 0
	for _, g := range k.Grants {
		switch {
		case g.Until > 0 || g.Role != audit.RoleAdmin || !g.Expires.IsZero():
		case !slices.Contains(ends, g.Key):
			return nil
		default:
			ended = true
		}
	}
	if !ended {
		return nil
	}
	return fmt.Errorf("%w without an expiry: grant another first, because nothing else can change which keys sign", ErrLastAdmin)
}
