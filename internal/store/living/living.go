// Package living keeps the word of a run's nodes that their part of an attempt lives, while no process
// coordinates it, and ends it for good. Each node has a lease for that. A coordinator takes it away
// before the next group starts, so the log decides which of the two came first.
package living

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Leases are the leases of a run's nodes. They may be used concurrently.
type Leases struct {
	log  *jetlog.Log
	run  string
	term time.Duration

	mu   sync.Mutex
	held map[int]heldLife // by node
}

// heldLife is the lease of a node's part of an attempt.
type heldLife struct {
	attempt int
	lease   *jetlog.Lease
}

// life is the holder of such a lease.
type life struct {
	Attempt int  `json:"attempt"`
	Ended   bool `json:"ended,omitempty"` // silenced: no process of the part may live on its word
}

// ErrSilenced reports that a node's part of an attempt may not live without a coordinator any more.
var ErrSilenced = problem.New(problem.Conflict, "another coordinator has ended this node's part of the attempt")

// New returns the leases of a run's nodes. term is that of the lease of the run.
func New(log *jetlog.Log, run string, term time.Duration) *Leases {
	return &Leases{log: log, run: run, term: term, held: map[int]heldLife{}}
}

// name returns the name of a node's lease.
func (l *Leases) name(node int) string { return fmt.Sprintf("living.%s.%d", l.run, node) }

// lifeTerm is the term of these leases. They do not expire: a newer attempt takes them.
const lifeTerm = time.Minute

// Term returns how long a coordinator has not renewed its lease of the run when another may take it.
func (l *Leases) Term() time.Duration { return l.term }

// Live records that a node's part of an attempt lives. It returns [ErrSilenced] after
// [Leases.Silence].
func (l *Leases) Live(ctx context.Context, node, attempt int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h, ok := l.held[node]; ok && h.attempt == attempt {
		err := h.lease.Renew(ctx)
		if errors.Is(err, jetlog.ErrLeaseLost) {
			return fmt.Errorf("%w: %w", ErrSilenced, err)
		}
		return err
	}
	lease, err := l.take(ctx, node, life{Attempt: attempt})
	if err == nil {
		l.held[node] = heldLife{attempt, lease}
	}
	return err
}

// Silence ends the word of a node's part of an attempt, and of earlier ones.
func (l *Leases) Silence(ctx context.Context, node, attempt int) error {
	_, err := l.take(ctx, node, life{Attempt: attempt, Ended: true})
	if errors.Is(err, ErrSilenced) {
		return nil // by another coordinator
	}
	return err
}

// take takes the lease of a node, unless its part of that attempt or a later one was ended.
func (l *Leases) take(ctx context.Context, node int, of life) (*jetlog.Lease, error) {
	text, err := json.Marshal(of)
	if err != nil {
		return nil, err
	}
	lease, err := l.log.Lease(ctx, l.name(node), text, lifeTerm)
	for held := (*jetlog.LeaseHeldError)(nil); errors.As(err, &held); {
		var now life
		if jerr := json.Unmarshal(held.Holder, &now); jerr != nil {
			return nil, errors.Join(err, jerr)
		}
		if now.Attempt > of.Attempt || now.Attempt == of.Attempt && now.Ended {
			return nil, fmt.Errorf("node %d, attempt %d: %w", node, of.Attempt, ErrSilenced)
		}
		// Refused if the lease has changed meanwhile.
		lease, err = l.log.TakeOver(ctx, held, text, lifeTerm)
	}
	return lease, err
}
