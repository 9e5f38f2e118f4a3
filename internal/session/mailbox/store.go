package mailbox

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// Store is the key-value store of an attempt's ranks. It bounds their keys and the memory of all
// values. Nothing is allocated until a rank uses it. The zero value is ready. The methods may be
// called concurrently.
type Store struct {
	mu     sync.Mutex
	values *rpc.MemoryStore
	sizes  map[string]int // of each key with its value
	size   int            // the sum of them
}

// Set stores the value of a key.
func (s *Store) Set(ctx context.Context, key string, value []byte) error {
	values, err := s.keep(key, len(value))
	if err != nil {
		return err
	}
	return values.Set(ctx, key, value)
}

// Get waits for the value of a key.
func (s *Store) Get(ctx context.Context, key string) ([]byte, error) {
	values, err := s.keep(key, -1)
	if err != nil {
		return nil, err
	}
	return values.Get(ctx, key)
}

// keep accounts for the memory of a key with a value of n bytes; n is -1 for a
// key that a rank waits for.
func (s *Store) keep(key string, n int) (*rpc.MemoryStore, error) {
	if key == "" || len(key) > client.MaxKey {
		return nil, problem.Errorf(problem.Invalid, "a key of %d bytes: it has 1 to %d", len(key), client.MaxKey)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.values == nil {
		s.values, s.sizes = rpc.NewMemoryStore(), map[string]int{}
	}
	size := len(key) + n
	if n < 0 {
		size = max(len(key), s.sizes[key])
	}
	after := s.size - s.sizes[key] + size
	if after > client.MaxStored {
		return nil, problem.Errorf(problem.NoSpace, "key %.100q: the ranks' store would hold %d bytes, and holds %d at most: leave large values in files", key, after, client.MaxStored)
	}
	s.size, s.sizes[key] = after, size
	return s.values, nil
}
