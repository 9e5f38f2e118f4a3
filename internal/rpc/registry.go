package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// Handlers implement a backend.
type Handlers struct {
	// Construct returns options from settings, and the names of the unknown
	// settings. For nil it returns the defaults.
	Construct func(Settings) (_ Options, unknown []string, err error)
	// Owns reports whether options have this backend's type.
	Owns func(Options) bool
	// Init opens the agent. The setup's options have the backend's type, and its
	// rank and world size are those of its group.
	Init func(context.Context, Setup) (Agent, error)
}

// Backend is a handle of a registered backend. Handles of one entry are equal,
// and stay valid after later registrations. The zero value is no backend.
type Backend struct{ entry *entry }

type entry struct {
	name string
	Handlers
}

// Name returns the registered name; "" for no backend.
func (b Backend) Name() string {
	if b.entry == nil {
		return ""
	}
	return b.entry.name
}

// Registry holds backends by name. Its methods may be called concurrently.
type Registry struct {
	mu      sync.Mutex
	entries map[string]*entry
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry { return &Registry{entries: map[string]*entry{}} }

// Builtin returns a new registry with PROCESS_GROUP and TENSORPIPE.
func Builtin() *Registry {
	r := NewRegistry()
	r.entries[ProcessGroup] = &entry{ProcessGroup, Handlers{processGroupOptions, owns[*ProcessGroupOptions], initProcessGroup}}
	r.entries[TensorPipe] = &entry{TensorPipe, Handlers{tensorPipeOptions, owns[*TensorPipeOptions], initTensorPipe}}
	return r
}

func owns[T any](o Options) bool {
	_, ok := o.(T)
	return ok
}

// Register adds a backend under a free name.
func (r *Registry) Register(name string, h Handlers) (Backend, error) {
	if name == "" || h.Construct == nil || h.Owns == nil || h.Init == nil {
		return Backend{}, fmt.Errorf("register RPC backend %q: a backend has a name and all three handlers", name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.entries[name]; taken {
		return Backend{}, fmt.Errorf("RPC backend %s: already registered", name)
	}
	e := &entry{name, h}
	r.entries[name] = e
	return Backend{e}, nil
}

// Registered reports whether the name is taken.
func (r *Registry) Registered(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.entries[name] != nil
}

// Lookup returns the backend of a name.
func (r *Registry) Lookup(name string) (Backend, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.entries[name]; e != nil {
		return Backend{e}, nil
	}
	return Backend{}, fmt.Errorf("no RPC backend %q is registered: there are %q", name, slices.Sorted(maps.Keys(r.entries)))
}

// Construct returns options of a backend from settings. It logs a warning for
// each unknown setting, and ignores it.
func (r *Registry) Construct(b Backend, s Settings, log *slog.Logger) (Options, error) {
	if b.entry == nil {
		return nil, errors.New("construct RPC options: of no backend")
	}
	o, unknown, err := b.entry.Construct(s)
	if err != nil {
		return nil, fmt.Errorf("construct options of RPC backend %s: %w", b.Name(), err)
	}
	for _, name := range unknown {
		log.Warn("unknown RPC option ignored", "backend", b.Name(), "option", name)
	}
	return o, nil
}

// Setup holds the parameters for opening an agent.
type Setup struct {
	Backend Backend // none: the options' backend, or else TENSORPIPE
	Options Options // nil: the backend's defaults
	Name    string
	Rank    int // -1: the group's
	World   int // -1: the group's
	// Store connects the agents: a [Store] for TENSORPIPE, the [Messenger] of
	// this rank for PROCESS_GROUP.
	Store any
	// Group is this rank's group. All its ranks call Init, without other calls of
	// the group meanwhile; Shutdown uses the group again. Nil: a world of one.
	Group *collective.Group
	Token string // of TENSORPIPE: shared by all ranks
}

// Init opens an agent. Every rank of the group calls it. Each gets an error if
// the setups of the ranks do not fit. A rank whose own setup is wrong gets its
// error at once, and the others wait for it until ctx or the group's timeout
// ends.
func (r *Registry) Init(ctx context.Context, s Setup) (Agent, error) {
	fail := func(err error) (Agent, error) { return nil, fmt.Errorf("init RPC agent %q: %w", s.Name, err) }
	if s.Backend.entry == nil {
		b, err := r.infer(s.Options)
		if err != nil {
			return fail(err)
		}
		s.Backend = b
	}
	h := s.Backend.entry.Handlers
	if s.Options == nil {
		o, _, err := h.Construct(nil)
		if err != nil {
			return fail(err)
		}
		s.Options = o
	}
	if !h.Owns(s.Options) {
		return fail(&TypeError{"options", "those of " + s.Backend.Name(), s.Options})
	}
	if s.Group == nil {
		s.Group = collective.New(nil, collective.Options{})
	}
	if s.Rank != AnyRank && s.Rank != s.Group.Rank() {
		return fail(fmt.Errorf("rank %d is not the group's rank %d: give that, or -1", s.Rank, s.Group.Rank()))
	}
	if s.World != AnyRank && s.World != s.Group.Size() {
		return fail(fmt.Errorf("world size %d is not the group's size %d: give that, or -1", s.World, s.Group.Size()))
	}
	s.Rank, s.World = s.Group.Rank(), s.Group.Size()
	a, err := h.Init(ctx, s)
	if err != nil {
		return fail(err)
	}
	return a, nil
}

// infer returns the backend of options.
func (r *Registry) infer(o Options) (Backend, error) {
	if o == nil {
		return r.Lookup(TensorPipe)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var owners []string
	for _, name := range slices.Sorted(maps.Keys(r.entries)) {
		if r.entries[name].Owns(o) {
			owners = append(owners, name)
		}
	}
	switch len(owners) {
	case 0:
		return Backend{}, fmt.Errorf("no backend was given, and options of type %T belong to none of %q: name the backend", o, slices.Sorted(maps.Keys(r.entries)))
	case 1:
		return Backend{r.entries[owners[0]]}, nil
	}
	return Backend{}, fmt.Errorf("no backend was given, and options of type %T belong to several, %q: name the backend", o, owners)
}
