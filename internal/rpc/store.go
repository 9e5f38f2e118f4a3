package rpc

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// Store holds the addresses of the agents of a group for each other. Its methods
// may be called concurrently.
type Store interface {
	// Set makes the value visible to every rank.
	Set(ctx context.Context, key string, value []byte) error
	// Get waits until the key is set or ctx ends.
	Get(ctx context.Context, key string) ([]byte, error)
}

// MemoryStore is a store for the ranks of one process.
type MemoryStore struct {
	mu   sync.Mutex
	keys map[string]*value
}

var _ Store = (*MemoryStore)(nil)

type value struct {
	data []byte
	set  chan struct{} // closed when data is set
	is   bool
}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore { return &MemoryStore{keys: map[string]*value{}} }

func (m *MemoryStore) at(key string) *value {
	v := m.keys[key]
	if v == nil {
		v = &value{set: make(chan struct{})}
		m.keys[key] = v
	}
	return v
}

// Set implements Store.
func (m *MemoryStore) Set(_ context.Context, key string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.at(key)
	v.data = bytes.Clone(data)
	if !v.is {
		v.is = true
		close(v.set)
	}
	return nil
}

// Get implements Store.
func (m *MemoryStore) Get(ctx context.Context, key string) ([]byte, error) {
	m.mu.Lock()
	v := m.at(key)
	m.mu.Unlock()
	select {
	case <-v.set:
		m.mu.Lock()
		defer m.mu.Unlock()
		return bytes.Clone(v.data), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for %q in the store: %w", key, context.Cause(ctx))
	}
}

// initTensorPipe is the Init handler of TENSORPIPE.
func initTensorPipe(ctx context.Context, s Setup) (_ Agent, err error) {
	store, ok := s.Store.(Store)
	if !ok {
		return nil, &TypeError{"store", "a Store", s.Store}
	}
	o, err := s.Options.(*TensorPipeOptions).checked()
	if err != nil {
		return nil, err
	}
	all, err := collective.AllGatherObject(ctx, s.Group, devices{s.Name, o.Devices, o.DeviceMaps, rand.Text()})
	if err != nil {
		return nil, fmt.Errorf("announce the devices to the other ranks: %w", err)
	}
	if err := checkDevices(all); err != nil {
		return nil, err
	}
	meeting := all[0].Meeting
	p, err := NewPipe(PipeConfig{
		Self: Peer{s.Name, s.Rank}, Network: o.Network, Address: o.Listen,
		Token: s.Token, Options: &o, Group: s.Group,
	})
	// A rank that cannot listen reports it to the ranks that wait for its
	// address.
	address := struct {
		Endpoint
		Error string `json:"error,omitempty"`
	}{}
	if err != nil {
		address.Error = err.Error()
	} else {
		address.Endpoint = p.Endpoint()
	}
	text, jerr := json.Marshal(address)
	if jerr == nil {
		jerr = store.Set(ctx, addressKey(meeting, s.Rank), text)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = p.Close() // the earlier error is returned
		}
	}()
	if jerr != nil {
		return nil, fmt.Errorf("put the address into the store: %w", jerr)
	}
	for rank := range s.World {
		if rank == s.Rank {
			continue
		}
		text, err := store.Get(ctx, addressKey(meeting, rank))
		if err != nil {
			return nil, fmt.Errorf("find rank %d: %w", rank, err)
		}
		there := address
		there.Error, there.Endpoint = "", Endpoint{}
		if err := json.Unmarshal(text, &there); err != nil {
			return nil, fmt.Errorf("find rank %d: decode its address: %w", rank, err)
		}
		if there.Error != "" {
			return nil, fmt.Errorf("find rank %d: %s", rank, there.Error)
		}
		if err := p.Add(there.Endpoint); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// addressKey returns a key that differs each time the agents are opened: the
// store may hold the addresses of an earlier time.
func addressKey(meeting string, rank int) string { return fmt.Sprintf("rpc/%s/%d", meeting, rank) }
