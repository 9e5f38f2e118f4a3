package s3

import (
	"context"
	"math/bits"
	"sync"
	"time"
)

// gate limits the requests at the same time. The limit is halved when the server asks for
// fewer, and grows by one a second up to the depth: many clients of one server thereby share
// what it can do. Servers refuse a few requests at any load, as while they divide a partition.
// If each of these halved the limit, 5 % of them would keep it at a few requests, and a save
// would take four times as long. So a fifth of the recent answers must be such.
type gate struct {
	mu     sync.Mutex
	limit  float64
	depth  int
	inside int
	halved time.Time
	recent uint32 // the last answers, a bit each: set if it asked for fewer requests
	grown  time.Time
	queue  []chan struct{} // in order; closed when it is their turn
}

func newGate(depth int) *gate { return &gate{limit: float64(depth), depth: depth} }

// enter waits for a turn, and returns when it came.
func (g *gate) enter(ctx context.Context) (time.Time, error) {
	if err := ctx.Err(); err != nil {
		return time.Time{}, err
	}
	g.mu.Lock()
	g.grow()
	if len(g.queue) == 0 && g.inside < int(g.limit) {
		g.inside++
		g.mu.Unlock()
		return time.Now(), nil
	}
	turn := make(chan struct{})
	g.queue = append(g.queue, turn)
	g.mu.Unlock()
	tick := time.NewTicker(time.Second) // the limit grows
	defer tick.Stop()
	for {
		select {
		case <-turn:
			return time.Now(), nil
		case <-tick.C:
			g.mu.Lock()
			g.admit()
			g.mu.Unlock()
		case <-ctx.Done():
			g.withdraw(turn)
			return time.Time{}, ctx.Err()
		}
	}
}

// withdraw removes a request from the queue, or returns the turn it was given meanwhile.
func (g *gate) withdraw(turn chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, queued := range g.queue {
		if queued == turn {
			g.queue = append(g.queue[:i], g.queue[i+1:]...)
			return
		}
	}
	g.inside--
	g.admit()
}

// leave ends a turn.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.admit()
}

// admit gives turns to the first of the queue.
func (g *gate) admit() {
	g.grow()
	for len(g.queue) > 0 && g.inside < int(g.limit) {
		close(g.queue[0])
		g.queue = g.queue[1:]
		g.inside++
	}
}

// grow raises the limit for the time that has passed.
func (g *gate) grow() {
	if g.limit >= float64(g.depth) {
		return
	}
	now := time.Now()
	g.limit = min(g.limit+now.Sub(g.grown).Seconds(), float64(g.depth))
	g.grown = now
}

// How many of how many recent answers halve the limit.
const (
	recently  = 20
	tooMany   = 4
	recentSet = 1<<recently - 1
)

// served notes an answer that did not ask for fewer requests.
func (g *gate) served() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.recent = g.recent << 1 & recentSet
}

// throttled notes an answer that asks for fewer requests. Those to requests that began before
// the last halving do not count.
func (g *gate) throttled(began time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.grow()
	if !began.After(g.halved) {
		return
	}
	g.recent = (g.recent<<1 | 1) & recentSet
	if bits.OnesCount32(g.recent) < min(tooMany, int(g.limit)) {
		return
	}
	g.recent = 0
	now := time.Now()
	g.limit, g.halved, g.grown = max(g.limit/2, 1), now, now
}
