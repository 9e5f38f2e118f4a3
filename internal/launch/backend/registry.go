package backend

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Config names a backend and creates it.
type Config interface {
	Name() string
	// Backend creates a backend for a job.
	Backend() Backend
}

// Named returns the config of a backend that all jobs share.
func Named(name string, b Backend) Config { return named{name, b} }

type named struct {
	name    string
	backend Backend
}

// Name implements Config.
func (n named) Name() string { return n.name }

// Backend implements Config.
func (n named) Backend() Backend { return n.backend }

// Registry holds the backends that a trainer knows. Register all before other
// calls: Register is not safe for concurrent use.
type Registry struct {
	configs map[string]Config
}

// UnknownError is returned if no backend has the name.
type UnknownError struct {
	Name       string
	Registered []string
}

// Error implements error.
func (e *UnknownError) Error() string {
	return fmt.Sprintf("no backend %q is registered; choose one of %s", e.Name, strings.Join(e.Registered, ", "))
}

// Register adds a backend under its name, which must be free.
func (r *Registry) Register(c Config) error {
	name := c.Name()
	if name == "" {
		return fmt.Errorf("register a backend of type %T: it has no name", c)
	}
	if _, taken := r.configs[name]; taken {
		return fmt.Errorf("register backend %q: it is already registered; choose another name", name)
	}
	if r.configs == nil {
		r.configs = map[string]Config{}
	}
	r.configs[name] = c
	return nil
}

// Lookup returns the backend of a name, or an [UnknownError].
func (r *Registry) Lookup(name string) (Config, error) {
	c, ok := r.configs[name]
	if !ok {
		return nil, &UnknownError{name, r.Names()}
	}
	return c, nil
}

// Names returns the names of all backends, sorted.
func (r *Registry) Names() []string { return slices.Sorted(maps.Keys(r.configs)) }
