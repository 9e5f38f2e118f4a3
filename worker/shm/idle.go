package shm

import (
	"slices"
	"sync"
	"time"
)

// Idle keeps what was given back for a while, for whoever asks next: memory that was
// touched before takes a copy several times as fast as fresh memory. It is safe for
// concurrent use.
type Idle[T comparable] struct {
	Rest time.Duration // for how long
	Free func(T)       // is called for what nobody has asked for; it must not call Idle

	mu     sync.Mutex
	kept   []resting[T] // the newest last
	closed bool
}

type resting[T any] struct {
	value T
	timer *time.Timer
}

// Keep takes a value back.
func (i *Idle[T]) Keep(value T) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		i.Free(value)
		return
	}
	i.kept = append(i.kept, resting[T]{value, time.AfterFunc(i.Rest, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		if at := slices.IndexFunc(i.kept, func(k resting[T]) bool { return k.value == value }); at >= 0 {
			i.kept = slices.Delete(i.kept, at, at+1)
			i.Free(value)
		}
	})})
}

// Take gives the best of what is kept away, of equals the newest; ok is false where
// nothing is kept.
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

// Spare frees all that is kept, and says whether there was anything.
func (i *Idle[T]) Spare() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.spare()
}

func (i *Idle[T]) spare() bool {
	any := len(i.kept) > 0
	for _, k := range i.kept {
		k.timer.Stop()
		i.Free(k.value)
	}
	i.kept = nil
	return any
}

// Close is Spare, and frees at once what is given back from now on.
func (i *Idle[T]) Close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed = true
	i.spare()
}
