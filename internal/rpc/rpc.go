// Package rpc lets the processes of a job call functions of each other by name.
//
//	registry   the known backends, by name; a value, not a global
//	backend    a handle of one entry: it makes options and agents
//	options    the settings of an agent, of a type for each backend
//	agent      one process among its peers: it calls and is called
//	peer       another agent: a name, and a rank or -1
//	function   run by an agent when a peer calls its name
//	store      holds the addresses of the agents of TENSORPIPE for each other
//	messenger  point-to-point messages among the ranks of a group
//
// Two backends are built in. An agent of TENSORPIPE listens on a unix socket or
// on loopback TCP and opens several connections, the channels, to each peer that
// it calls: bodies above 64 KiB travel on channels of their own, so that a small
// call never waits behind a large one. An agent of PROCESS_GROUP sends over a
// [Messenger] of its group. The collectives of package collective cannot carry a
// call that the other side does not expect, so a group's transport also has
// messages: package client has those of a trainer's group, whose ranks are
// processes, and [Switch] connects the ranks of one process. A trainer also has a
// [Store].
//
// The caller's deadline travels with a call as the remaining time, so clocks need
// not agree. A caller that gives up ends the context of the called function. When
// a peer ends, the calls to it fail at once, with a [PeerError] that names it.
//
// A connection of TENSORPIPE begins with a greeting, in which both sides prove
// that they know the token without sending it. Frames follow, all integers
// little-endian:
//
//	4  length of the rest, compared with the limit before it is allocated
//	1  kind: call, reply, error, cancel
//	8  number of the call, counted by the caller
//	8  of a call: microseconds until its deadline, 0 when it has none
//	2  of a call: length of the function's name
//	   of a call: the function's name
//	   body
package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Names of the built-in backends.
const (
	ProcessGroup = "PROCESS_GROUP"
	TensorPipe   = "TENSORPIPE"
)

// Defaults of the options.
const (
	DefaultTimeout             = 60 * time.Second
	DefaultInitMethod          = "env://"
	DefaultSendRecvThreads     = 4
	DefaultWorkerThreads       = 16
	DefaultChannels            = 3
	DefaultMaxBytes            = 256 << 20
	UnsetTimeout               = time.Duration(-1) // use the default
	AnyRank                    = -1                // of a setup: the group's
	maxQueued                  = 1024              // unanswered calls that an agent accepts
	maxName                    = 1 << 10           // bytes of the name of a function or peer
	bulk                       = 64 << 10          // larger bodies have channels of their own
	handshakeTimeout           = 10 * time.Second
	maxGreeting                = 4 << 10
	maxErrorText               = 64 << 10
	cancelPatience             = time.Second // for the notice that a caller has given up
	frameHeader            int = 1 + 8
)

// Func is a function that peers call. Its context ends with the caller's
// deadline, when the caller gives up or ends, and when the agent closes. A panic
// is an error of the call. The function owns the body. It occupies one of its
// agent's threads until it returns, even while it calls others.
type Func func(ctx context.Context, body []byte) ([]byte, error)

// Peer is one agent. Rank is -1 for an agent outside the group.
type Peer struct {
	Name string `json:"name"`
	Rank int    `json:"rank"`
}

// String returns the name, with the rank if there is one.
func (p Peer) String() string {
	if p.Rank < 0 {
		return p.Name
	}
	return fmt.Sprintf("%s (rank %d)", p.Name, p.Rank)
}

// Agent is one process among its peers. All methods may be called concurrently.
type Agent interface {
	// Self returns this agent.
	Self() Peer
	// Handle registers a function under a free name.
	Handle(name string, f Func) error
	// Call runs a function of a peer and returns its result. A context without a
	// deadline gets the options' timeout. The error is a [RemoteError] if the
	// function failed, or a [PeerError] if the peer does not exist or has ended;
	// then the function may or may not have run. An agent can call itself. body
	// is not retained.
	Call(ctx context.Context, to, function string, body []byte) ([]byte, error)
	// Shutdown is called by every agent of the group. It returns when no call is
	// running among them, and closes the agent. When ctx ends it closes at once.
	Shutdown(ctx context.Context) error
	// Close ends all calls, in both directions, and waits for the functions that
	// it ended, which must heed their context.
	Close() error
}

// ErrClosed reports that the agent is closed.
var ErrClosed = errors.New("the rpc agent is closed")

// ErrGone reports that a peer has ended.
var ErrGone = errors.New("the peer is gone")

// ErrUnknownPeer reports that no agent has such a name.
var ErrUnknownPeer = errors.New("no such peer")

// PeerError reports a call that could not be made, or that got no answer.
type PeerError struct {
	Peer     Peer
	Function string
	Err      error
}

// Error names the function and the peer.
func (e *PeerError) Error() string {
	return fmt.Sprintf("call %s of %s: %v", e.Function, e.Peer, e.Err)
}

// Unwrap returns the cause.
func (e *PeerError) Unwrap() error { return e.Err }

// RemoteError is the error of a peer's function, or the reason why the peer did
// not run it.
type RemoteError struct {
	Peer     Peer
	Function string
	Message  string
	cause    error // for errors.Is: a context's end or nil
}

// Error names the function and the peer.
func (e *RemoteError) Error() string {
	return fmt.Sprintf("%s on %s: %s", e.Function, e.Peer, e.Message)
}

// Unwrap returns the context error if a deadline passed on the other side.
func (e *RemoteError) Unwrap() error { return e.cause }

// TypeError reports a setup or setting of the wrong type.
type TypeError struct {
	What string // such as "store"
	Want string
	Got  any
}

// Error names the wanted and the given type.
func (e *TypeError) Error() string {
	return fmt.Sprintf("%s must be %s, not a %T", e.What, e.Want, e.Got)
}

// Handle registers a function on typed values, which travel as JSON.
func Handle[In, Out any](a Agent, name string, f func(context.Context, In) (Out, error)) error {
	return a.Handle(name, func(ctx context.Context, body []byte) ([]byte, error) {
		var in In
		if err := json.Unmarshal(body, &in); err != nil {
			return nil, fmt.Errorf("decode the argument: %w", err)
		}
		out, err := f(ctx, in)
		if err != nil {
			return nil, err
		}
		return json.Marshal(out)
	})
}

// Call calls a function that was registered by [Handle].
func Call[In, Out any](ctx context.Context, a Agent, to, function string, in In) (Out, error) {
	var out Out
	body, err := json.Marshal(in)
	if err != nil {
		return out, fmt.Errorf("call %s of %s: encode the argument: %w", function, to, err)
	}
	reply, err := a.Call(ctx, to, function, body)
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal(reply, &out); err != nil {
		return out, fmt.Errorf("call %s of %s: decode the result: %w", function, to, err)
	}
	return out, nil
}
