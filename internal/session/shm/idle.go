package shm

import (
	"slices"
	"sync"
	"time"
)

// Idle keeps returned values for a while, for the next caller of Take: memory
// that was touched before takes a copy several times as fast as fresh memory. It
// is safe for concurrent use.
type Idle[T comparable] struct {
	Rest time.Duration // how long a value is kept
	Free func(T)       // frees a value that was not taken in time

	mu     sync.Mutex
	kept   []resting[T] // newest last
	closed bool
}

type resting[T any] struct {
	value T
	timer *time.Timer
}

// Keep returns a value to the pool.
func (i *Idle[T]) Keep(value T) {
	if !i.keep(value) {
		i.Free(value)
	}
}

func (i *Idle[T]) keep(value T) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return false
	}
	i.kept = append(i.kept, resting[T]{value, time.AfterFunc(i.Rest, func() {
		if i.remove(value) {
			i.Free(value) // without the lock: it takes a quarter of a second for a GiB
		}
	})})
	return true
}

func (i *Idle[T]) remove(value T) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	at := slices.IndexFunc(i.kept, func(k resting[T]) bool { return k.value == value })
	if at < 0 {
		return false
	}
	i.kept = slices.Delete(i.kept, at, at+1)
	return true
}

// Take removes and returns the best kept value, of equals the newest. ok is false
// if nothing is kept.
func (i *Idle[T]) Take(better func(a, b T) bool) (value T, ok bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	best := len(i.kept) - 1
	if best < 0 {
		return value, false
	}
	for at := best - 1; at >= 0; at-- {
		if better(i.kept[at].value, i.kept[best].value) {
			best = at
		}
	}
	value = i.kept[best].value
	i.kept[best].timer.Stop()
	i.kept = slices.Delete(i.kept, best, best+1)
	return value, true
}

// Spare frees all kept values, and reports whether there were any.
func (i *Idle[T]) Spare() bool { return i.spare(false) }

// Close is Spare; values that are returned afterwards are freed at once.
func (i *Idle[T]) Close() { i.spare(true) }

func (i *Idle[T]) spare(last bool) bool {
	i.mu.Lock()
	kept := i.kept
	i.kept, i.closed = nil, i.closed || last
	i.mu.Unlock()
	for _, k := range kept {
		k.timer.Stop()
		i.Free(k.value)
	}
	return len(kept) > 0
}
