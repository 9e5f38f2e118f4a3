package nodes

import (
	"context"
	"sync"
)

// queue passes values to a channel in order. put never blocks, because its callers answer
// requests. The queue has no bound of its own; callers that can refuse ask size first.
type queue[T any] struct {
	mu    sync.Mutex
	items []T
	ready chan struct{} // holds a value when items may not be empty
	out   chan T
}

func newQueue[T any]() *queue[T] {
	return &queue[T]{ready: make(chan struct{}, 1), out: make(chan T)}
}

func (q *queue[T]) put(values ...T) {
	q.mu.Lock()
	q.items = append(q.items, values...)
	q.mu.Unlock()
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// size returns the number of values that wait.
func (q *queue[T]) size() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}

func (q *queue[T]) take() []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items = nil
	return items
}

// run passes the values on until ctx ends, and closes the channel then.
func (q *queue[T]) run(ctx context.Context) {
	defer close(q.out)
	for {
		select {
		case <-q.ready:
		case <-ctx.Done():
			return
		}
		for _, v := range q.take() {
			select {
			case q.out <- v:
			case <-ctx.Done():
				return
			}
		}
	}
}
