package store

import (
	"context"
	"fmt"
	"path/filepath"
)

// Whereabouts is what a process must know of a store to find who serves it.
type Whereabouts struct {
	ID       string
	Location string // an absolute path, or a URL as it was given
	Name     string // the location for messages: a URL is without its password
	Runtime  string // private directory for sockets of this store, which is made
}

// Identity returns a store's ID without opening its log or making its runtime
// directory. Only a URL is connected to.
func Identity(ctx context.Context, o Options) (string, error) {
	location, isURL, err := parseLocation(o.Location)
	if err != nil {
		return "", fmt.Errorf("find the store: %w", err)
	}
	if isURL {
		s, err := Open(ctx, o)
		if err != nil {
			return "", err
		}
		return s.ID, s.Close()
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("find the store: %w", err)
	}
	id, err := identityIn(dir)
	return id.Store, err
}

// Locate finds a store without opening it: neither lock nor log of a directory
// is touched. A URL is asked for the store's identity.
func Locate(ctx context.Context, o Options) (Whereabouts, error) {
	location, isURL, err := parseLocation(o.Location)
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store: %w", err)
	}
	if isURL {
		s, err := Open(ctx, o)
		if err != nil {
			return Whereabouts{}, err
		}
		return Whereabouts{s.ID, location, s.Location, s.Runtime}, s.Close()
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store: %w", err)
	}
	id, err := readIdentity(dir)
	if err != nil {
		return Whereabouts{}, err
	}
	runtime, err := runtimeDir(id.runtime())
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store %s: %w", dir, err)
	}
	return Whereabouts{id.Store, dir, dir, runtime}, nil
}
