// Package connections waits for the requests of a server that ends.
package connections

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// firstRequest is how long [Tracker.Settle] waits for the request of a new connection. A
// request that was sent before is in the socket, and is read at once.
const firstRequest = 200 * time.Millisecond

// Tracker follows the states of a server's connections.
type Tracker struct {
	mu      sync.Mutex
	states  map[net.Conn]http.ConnState // without those that are closed
	changed chan struct{}               // closed by the next change
}

// Track is the hook of [http.Server.ConnState].
func (c *Tracker) Track(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.states == nil {
		c.states = map[net.Conn]http.ConnState{}
	}
	c.states[conn] = state
	if state == http.StateClosed || state == http.StateHijacked {
		delete(c.states, conn)
	}
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// count returns the number of connections that have sent no request yet, and of those
// whose request is being served, and a channel that the next change closes.
func (c *Tracker) count() (unread, active int, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.states {
		switch s {
		case http.StateNew:
			unread++
		case http.StateActive:
			active++
		}
	}
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return unread, active, c.changed
}

// Settle returns when no request is being served, and no new connection is left
// that sent one. It returns the error of ctx if that ends before. It exists because
// [http.Server.Shutdown] drops requests that it reads after the call: their ranks
// would see the end of a connection in place of the reason. A request that comes later,
// on a connection that is idle now, may still meet the end.
func (c *Tracker) Settle(ctx context.Context) error {
	fresh, cancel := context.WithTimeout(ctx, firstRequest)
	defer cancel()
	for {
		unread, active, changed := c.count()
		if active == 0 && (unread == 0 || fresh.Err() != nil) {
			return nil
		}
		ended := fresh.Done()
		if fresh.Err() != nil {
			ended = ctx.Done()
		}
		select {
		case <-changed:
		case <-ended:
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
}
