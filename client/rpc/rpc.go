// Package rpc lets the workers of a group call each other's functions by name, through a
// built-in backend or a backend of the program.
//
//	registry := rpc.NewRegistry()
//	_, err := registry.Register("mine", rpc.Handlers{…})
//	agent, err := rpc.Open(ctx, c, registry, "mine", nil)   // on every rank
//	err = agent.Handle("square", square)
//	answer, err := agent.Call(ctx, client.AgentName(1), "square", []byte("7"))
//	err = agent.Shutdown(ctx)                               // on every rank
//
// A registry is a value, not a global: imports register nothing, and Register returns an
// error if the name is taken.
package rpc

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/client/collective"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// Names of the built-in backends. PROCESS_GROUP sends calls through the trainer;
// TENSORPIPE connects the workers with each other.
const (
	ProcessGroup = rpc.ProcessGroup
	TensorPipe   = rpc.TensorPipe
)

// Registry holds backends by name: Register(name, Handlers) (Backend, error),
// Registered(name) bool, Lookup(name) (Backend, error). Safe for concurrent use.
type Registry = rpc.Registry

// NewRegistry returns a registry with the built-in backends.
func NewRegistry() *Registry { return rpc.Builtin() }

// Backend is a handle of a registered backend. Handles of one entry are equal and stay
// valid when others are registered.
type Backend = rpc.Backend

// Handlers implement a backend:
//
//	Construct func(Settings) (_ Options, unknown []string, err error)  nil gives the defaults
//	Owns      func(Options) bool                                       options are of its type
//	Init      func(context.Context, Setup) (Agent, error)              opens the agent
type Handlers = rpc.Handlers

// Settings are options by name. Construct returns the names that it does not know, and
// [Open] logs a warning for them.
type Settings = rpc.Settings

// Options are the settings of an agent; each backend has its own type.
type Options = rpc.Options

// Setup holds the arguments of Init: Options, Name, Rank, World, the Group of the ranks, a
// Token that all ranks share, and Store, of type any. [Open] sets Store to a value that is
// both a [Store] and a [Messenger].
type Setup = rpc.Setup

// Agent is one worker among its peers:
//
//	Self() Peer
//	Handle(name string, f Func) error
//	Call(ctx, to, function string, body []byte) ([]byte, error)
//	Shutdown(ctx) error   on every rank; returns when no call is in flight
//	Close() error         at once
//
// A call fails with a [RemoteError] if the function failed, and with a [PeerError] if the
// peer is gone. All methods are safe for concurrent use.
type Agent = rpc.Agent

// Func is a function that peers call. Its context ends with the caller's.
type Func = rpc.Func

// Peer is the Name and Rank of an agent.
type Peer = rpc.Peer

// Store is where the agents of a group publish their addresses: Set(ctx, key, value) and
// Get(ctx, key), which blocks until the key is set.
type Store = rpc.Store

// Messenger moves messages among the ranks of a group: Send(ctx, to, data) and Recv(ctx).
// Each arrives once, in order.
type Messenger = rpc.Messenger

// Message is the result of Recv: the Data that rank From sent, or Gone if From is gone.
type Message = rpc.Message

// PeerError means that a call could not be sent, or got no answer.
type PeerError = rpc.PeerError

// RemoteError is the error that a peer's function returned.
type RemoteError = rpc.RemoteError

// meeting is the Setup.Store of [Open]: agents find each other through its keys, or
// exchange messages through the trainer.
type meeting struct {
	Store
	Messenger
}

// Open opens this worker's agent, named client.AgentName(c.Rank), with the named backend.
// Every rank calls it, and no other collective meanwhile. It logs unknown settings as
// warnings to [slog.Default].
func Open(ctx context.Context, c *client.Client, r *Registry, backend string, settings Settings) (Agent, error) {
	b, err := r.Lookup(backend)
	if err != nil {
		return nil, err
	}
	options, err := r.Construct(b, settings, slog.Default())
	if err != nil {
		return nil, err
	}
	group := collective.Of(c, collective.Options{})
	token, err := collective.Broadcast(ctx, group, 0, rand.Text())
	if err != nil {
		return nil, fmt.Errorf("open RPC agent: share the token: %w", err)
	}
	return r.Init(ctx, Setup{
		Backend: b, Options: options, Name: client.AgentName(c.Rank), Rank: rpc.AnyRank, World: rpc.AnyRank,
		Store: meeting{c.Store(), c.Messenger()}, Group: group, Token: token,
	})
}
