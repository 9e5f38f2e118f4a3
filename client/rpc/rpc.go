// Package rpc lets the workers of a group call functions of each other by name, through
// a backend that is built in or that the program registers.
//
//	registry := rpc.NewRegistry()
//	_, err := registry.Register("mine", rpc.Handlers{…})
//	agent, err := rpc.Open(ctx, c, registry, "mine", nil)   // on every rank
//	err = agent.Handle("square", square)
//	answer, err := agent.Call(ctx, client.AgentName(1), "square", []byte("7"))
//	err = agent.Shutdown(ctx)                               // on every rank
//
// A registry is a value of the program: two backends of one name are an error of
// Register, and nothing is registered by an import.
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

// Handlers are what a backend does:
//
//	Construct func(Settings) (_ Options, unknown []string, err error)  of nil, the defaults
//	Owns      func(Options) bool                                       options of its type
//	Init      func(context.Context, Setup) (Agent, error)              opens the agent
type Handlers = rpc.Handlers

// Settings are options by name. Construct returns the names that it does not know, and
// [Open] warns of them.
type Settings = rpc.Settings

// Options are the settings of an agent, of a type for each backend.
type Options = rpc.Options

// Setup is what Init opens an agent with: Options, Name, Rank, World, the Group of the
// ranks, a Token that all ranks share, and Store, of type any: with [Open] it is both a
// [Store] and a [Messenger].
type Setup = rpc.Setup

// Agent is one worker among its peers:
//
//	Self() Peer
//	Handle(name string, f Func) error
//	Call(ctx, to, function string, body []byte) ([]byte, error)
//	Shutdown(ctx) error   every rank; returns when no call is under way
//	Close() error         at once
//
// A call fails with a [RemoteError] if the function failed, and with a [PeerError] if the
// peer has gone. All methods are safe for concurrent use.
type Agent = rpc.Agent

// Func is a function that peers call. Its context ends with the caller's.
type Func = rpc.Func

// Peer is the Name and Rank of an agent.
type Peer = rpc.Peer

// Store is where the agents of a group leave their addresses: Set(ctx, key, value) and
// Get(ctx, key), which waits for the key.
type Store = rpc.Store

// Messenger moves messages among the ranks of a group: Send(ctx, to, data) and Recv(ctx).
// Each arrives once, in order.
type Messenger = rpc.Messenger

// Message is what Recv returns: the Data of rank From, or that From has Gone.
type Message = rpc.Message

// PeerError says that a call could not be made, or got no answer.
type PeerError = rpc.PeerError

// RemoteError is what a function of a peer returned.
type RemoteError = rpc.RemoteError

// meeting is how the agents of a group find each other: by the keys that they leave, or
// by messages through the trainer.
type meeting struct {
	Store
	Messenger
}

// Open opens this worker's agent, named client.AgentName(c.Rank), through the backend of
// a name. Every rank calls it, and no other collective meanwhile. Unknown settings are
// warned of through [slog.Default].
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
