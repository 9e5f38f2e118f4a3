// Package rpc lets the processes of a job call functions of each other by name.
//
//	registry   the backends that are known, by name; a value, not a global
//	backend    a handle of one entry: it makes options and agents
//	options    the settings of an agent, of a type for each backend
//	agent      one process among its peers: it calls and is called
//	peer       another agent: a name, and a rank or -1
//	function   what an agent runs when a peer calls its name
//	store      where the agents of TENSORPIPE find each other's addresses
//	messenger  point-to-point messages among the ranks of a group
//
// Two backends are built in. An agent of TENSORPIPE listens on a unix socket or
// on loopback TCP and opens several connections, the channels, to each peer that
// it calls: bodies above 64 KiB travel on channels of their own, so that a small
// call never waits behind a large one. An agent of PROCESS_GROUP sends over a
// [Messenger] of its group. The collectives of package collective cannot carry a call
// that the other side does not expect, so a group's transport has messages beside
// them: client has those of a trainer's group, whose ranks are processes,
// and [Switch] is where those of one process meet. A trainer's [Store] is there too.
//
// The caller's deadline travels with a call as the time that is left, so clocks
// need not agree, and a caller that gives up ends the context of the function
// that it called. When a peer goes, the calls to it fail at once, with a
// [PeerError] that names it.
//
// A connection of TENSORPIPE begins with a greeting, in which both sides prove
// that they know the token without sending it. Frames follow, all integers
// little-endian:
//
//	4  length of what follows, compared with the limit before it is allocated
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
	UnsetTimeout               = time.Duration(-1) // stands for the default
	AnyRank                    = -1                // of a setup: that of the group
	maxQueued                  = 1024              // calls that an agent has taken and not answered
	maxName                    = 1 << 10           // bytes of the name of a function or peer
	bulk                       = 64 << 10          // bodies above it have channels of their own
	handshakeTimeout           = 10 * time.Second
	maxGreeting                = 4 << 10
	maxErrorText               = 64 << 10
	cancelPatience             = time.Second // for the news that a caller has given up
	frameHeader            int = 1 + 8
)

// Func is a function that peers call. Its context ends with the caller's
// deadline, when the caller gives up or goes, and when the agent closes. A
// panic is an error of the call. The body is the function's own. It holds one of
// its agent's threads until it returns, also while it calls others.
type Func func(ctx context.Context, body []byte) ([]byte, error)

// Peer is one agent. Rank is -1 of one that is not in the group.
type Peer struct {
	Name string `json:"name"`
	Rank int    `json:"rank"`
}

// String is the name, with the rank of one that has one.
func (p Peer) String() string {
	if p.Rank < 0 {
		return p.Name
	}
	return fmt.Sprintf("%s (rank %d)", p.Name, p.Rank)
}

// Agent is one process among its peers. All methods may be called concurrently.
type Agent interface {
	// Self is this agent.
	Self() Peer
	// Handle registers a function under a name that is not taken.
	Handle(name string, f Func) error
	// Call runs a function of a peer and gives what it returns. A context
	// without a deadline has that of the options' timeout. The error is a
	// [RemoteError] when the function failed, a [PeerError] when the peer is
	// not there or has gone, which leaves open whether the function ran. An
	// agent can call itself. body is not kept.
	Call(ctx context.Context, to, function string, body []byte) ([]byte, error)
	// Shutdown is called by every agent of the group. It returns when no call
	// is under way among them, and closes. When ctx ends it closes at once.
	Shutdown(ctx context.Context) error
	// Close ends all calls, in both directions, and waits for the functions
	// that it ended, which have to heed their context.
	Close() error
}

// ErrClosed says that the agent is closed.
var ErrClosed = errors.New("the rpc agent is closed")

// ErrGone says that a peer is not there any more.
var ErrGone = errors.New("the peer is gone")

// ErrUnknownPeer says that nobody has such a name.
var ErrUnknownPeer = errors.New("no such peer")

// PeerError is a call that could not be made, or of which no answer came.
type PeerError struct {
	Peer     Peer
	Function string
	Err      error
}

// Error names the function and the peer.
func (e *PeerError) Error() string {
	return fmt.Sprintf("call %s of %s: %v", e.Function, e.Peer, e.Err)
}

// Unwrap is why.
func (e *PeerError) Unwrap() error { return e.Err }

// RemoteError is what a function of a peer returned, or why the peer did not
// run it.
type RemoteError struct {
	Peer     Peer
	Function string
	Message  string
	cause    error // what errors.Is shall find: a context's end or nil
}

// Error names the function and the peer.
func (e *RemoteError) Error() string {
	return fmt.Sprintf("%s on %s: %s", e.Function, e.Peer, e.Message)
}

// Unwrap makes a deadline that passed on the other side one here too.
func (e *RemoteError) Unwrap() error { return e.cause }

// TypeError says that a setup or setting has something of the wrong type.
type TypeError struct {
	What string // such as "store"
	Want string
	Got  any
}

// Error says what was wanted and what was given.
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
