package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
)

// The end of an agent ends its calls to itself as well: their functions' contexts
// end, and Close waits for them.
func TestCloseEndsOwnCalls(t *testing.T) {
	each(t, func(t *testing.T, backend string) {
		a := open(t, backend, 1, nil)[0]
		began, ended := make(chan bool), make(chan error, 1)
		handle(t, a, "hangs", func(ctx context.Context, _ []byte) ([]byte, error) {
			began <- true
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return nil, ctx.Err()
		})
		failed := make(chan error, 1)
		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		go func() {
			_, err := a.Call(ctx, "worker0", "hangs", nil)
			failed <- err
		}()
		within(t, began, "the function")
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		select {
		case err := <-ended:
			if !errors.Is(err, ErrClosed) {
				t.Errorf("the function's context ended with %v", err)
			}
		default:
			t.Error("the agent is closed, and the function has not ended")
		}
		if err := within(t, failed, "the end of the call"); err == nil {
			t.Error("the call went well")
		}
	})
}

// onceStore refuses a second value of a key: a rank may have read the first.
type onceStore struct {
	*MemoryStore
	mu   sync.Mutex
	seen map[string]bool
}

func (o *onceStore) Set(ctx context.Context, key string, data []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen[key] {
		return fmt.Errorf("%q was set before", key)
	}
	o.seen[key] = true
	return o.MemoryStore.Set(ctx, key, data)
}

// Agents that are opened again meet at their new addresses, over the store that
// has the old ones.
func TestOpenedAgain(t *testing.T) {
	store := &onceStore{MemoryStore: NewMemoryStore(), seen: map[string]bool{}}
	for range 2 {
		agents := open(t, TensorPipe, 2, func(_ int, s *Setup) { s.Store = store })
		handle(t, agents[1], "echo", echo)
		if _, err := agents[0].Call(t.Context(), "worker1", "echo", nil); err != nil {
			t.Fatal(err)
		}
		for _, a := range agents {
			if err := a.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
