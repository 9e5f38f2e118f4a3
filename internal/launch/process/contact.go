package process

import (
	"sync"
	"time"
)

// Contact holds how long the group of this node may live: until half of the timeout has
// passed since the last answered beat was sent, or in the coordinating process since its
// last tick. It exists because the beats begin before the guard does. A nil Contact is that of
// a job on one node, whose group has no such deadline.
type Contact struct {
	mu     sync.Mutex
	until  time.Time
	lapses int // how often until had passed when it was extended, or a guard of before had killed the group
	guard  *Guard
}

// Answered records the answer to a beat that was sent at a time, or a tick of the coordinating process: see
// JoinConfig and EndpointConfig of package nodes.
func (c *Contact) Answered(sent time.Time, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.late() {
		c.lapses++
	}
	c.extendTo(sent.Add(timeout / 2))
}

// Survive lets the group live until a time at least: it may outlive its coordinator.
func (c *Contact) Survive(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.extendTo(until)
}

// extendTo extends the deadline. The caller holds the lock.
func (c *Contact) extendTo(until time.Time) {
	if until.Before(c.until) {
		return
	}
	if c.until = until; c.guard != nil {
		c.guard.LiveUntil(until)
	}
}

// Survives reports whether the group may live now.
func (c *Contact) Survives() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Before(c.until)
}

func (c *Contact) late() bool { return !c.until.IsZero() && time.Now().After(c.until) }

// Lapsed counts how often the guard had to kill the group: by this process's clock, and by the guard's own word. An
// answer that comes in the last moment may reach the guard too late. One kill may count twice: a caller compares two counts.
func (c *Contact) Lapsed() int {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.lapses
	if c.late() {
		n++
	}
	if c.guard != nil {
		n += c.guard.Kills()
	}
	return n
}

// GuardedBy passes the deadline to a guard from now on.
func (c *Contact) GuardedBy(g *Guard) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.guard != nil {
		c.lapses += c.guard.Kills()
	}
	if c.guard = g; !c.until.IsZero() {
		g.LiveUntil(c.until)
	}
}
