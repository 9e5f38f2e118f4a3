// Package collective gives the ranks of a group collectives on objects, over a
// transport that only moves bytes.
//
//	group       the ranks 0..world-1 that call the same collectives in the
//	            same order
//	transport   a rank's connection to its group: gathers and broadcasts of
//	            bytes that are equally long on every rank
//	collective  one call that every rank makes and that ends on all of them
//	hub         joins the ranks' calls, in the process that supervises them
//
// Objects differ in length, so a collective on objects is two on bytes:
//
//	all gather  size of the own object (8 bytes, little-endian), gathered;
//	            then the objects, padded with zeros to the largest size,
//	            gathered; then each is cut to its rank's size
//	broadcast   size of the root's object (8 bytes), broadcast; then the object
//
// When the largest size is 0 there is nothing to move and no second collective. A
// rank that cannot encode its object announces size 2^64-1, so that all ranks end
// with an error that names it, instead of waiting for it.
package collective

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Transport moves bytes among the ranks of one group, for one of them. Every rank
// calls the same collectives in the same order, from one goroutine at a time. A
// call ends with an error when ctx ends. A transport retries whatever can be
// retried, so an error is final and the group is unusable afterwards. The caller
// owns the results; arguments are not retained.
type Transport interface {
	// Rank returns the own rank, 0..Size()-1. It never changes.
	Rank() int
	// Size returns the number of ranks, at least 1. It never changes.
	Size() int
	// AllGather returns the bytes of every rank in rank order. own is equally
	// long on every rank.
	AllGather(ctx context.Context, own []byte) ([][]byte, error)
	// Broadcast returns root's data on every rank. data is equally long on every
	// rank. On the other ranks it is a zeroed buffer that the transport may fill
	// and return, and whose content it need not send.
	Broadcast(ctx context.Context, root int, data []byte) ([]byte, error)
}

// Codec converts objects to bytes. Objects may encode to no bytes at all. It is
// the same on every rank.
type Codec interface {
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, v any) error
}

// Defaults of [Options].
const (
	DefaultMaxBytes = 1 << 30
	DefaultTimeout  = 10 * time.Minute
)

// Options are the settings of a group, equal on every rank. Zero values mean the
// defaults.
type Options struct {
	MaxBytes int64         // largest encoded object of a rank; 1 GiB by default
	Timeout  time.Duration // longest duration of one collective; 10 minutes by default
	Codec    Codec         // JSON by default; []byte is never encoded
}

// Validate rejects negative limits.
func (o Options) Validate() error {
	if o.MaxBytes < 0 {
		return fmt.Errorf("largest object of %d bytes: use a positive number, or 0 for %d", o.MaxBytes, int64(DefaultMaxBytes))
	}
	if o.Timeout < 0 {
		return fmt.Errorf("timeout of %v for a collective: use a positive duration, or 0 for %v", o.Timeout, DefaultTimeout)
	}
	return nil
}

// ErrBusy is returned by a collective that began while another one of the same
// group was running on this rank.
var ErrBusy = errors.New("another collective is under way on this rank: call collectives of a group from one goroutine")

// Group is a rank's view of its group. Its collectives are for one goroutine at a
// time; violations get [ErrBusy]. After an error of the transport the ranks may
// be out of step, so all later collectives return that error.
type Group struct {
	t       Transport
	options Options
	busy    atomic.Bool
	broken  error // guarded by busy
}

// New returns the group behind t. Without a transport (nil) nothing is
// initialised: the group has only rank 0, and collectives return their arguments.
// Invalid options fall back to the defaults; callers that take them from users
// call [Options.Validate] first.
func New(t Transport, o Options) *Group {
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Codec == nil {
		o.Codec = jsonCodec{}
	}
	return &Group{t: t, options: o}
}

// Initialized reports whether there is a transport.
func (g *Group) Initialized() bool { return g.t != nil }

// Rank returns the own rank; 0 without a transport.
func (g *Group) Rank() int {
	if g.t == nil {
		return 0
	}
	return g.t.Rank()
}

// Size returns the number of ranks; 1 without a transport.
func (g *Group) Size() int {
	if g.t == nil {
		return 1
	}
	return g.t.Size()
}

// begin claims the group for one collective. end releases it and remembers an
// error of the transport.
func (g *Group) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if !g.busy.CompareAndSwap(false, true) {
		return nil, nil, ErrBusy
	}
	if g.broken != nil {
		g.busy.Store(false)
		return nil, nil, fmt.Errorf("the group is out of step since an earlier collective: %w", g.broken)
	}
	limited, cancel := context.WithTimeout(ctx, g.options.Timeout)
	return limited, func() {
		cancel()
		g.busy.Store(false)
	}, nil
}

// breaks records that the ranks may be out of step.
func (g *Group) breaks(err error) error {
	g.broken = err
	return err
}

type jsonCodec struct{}

var _ Codec = jsonCodec{}

func (jsonCodec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (jsonCodec) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }
