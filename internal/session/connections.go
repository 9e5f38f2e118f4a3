package session

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// firstRequest is how long settle waits for the request of a new connection. A
// request that was sent before is in the socket, and is read at once.
const firstRequest = 200 * time.Millisecond

// connections follows the states of a server's connections.
type connections struct {
	mu      sync.Mutex
	states  map[net.Conn]http.ConnState // without those that are closed
	changed chan struct{}               // closed by the next change
}

// track is the hook of [http.Server.ConnState].
func (c *connections) track(conn net.Conn, state http.ConnState) {
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
func (c *connections) count() (unread, active int, changed <-chan struct{}) {
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

// settle returns when no request is being served, and no new connection is left
// that sent one. It returns the error of ctx if that ends before. It exists because
// [http.Server.Shutdown] drops requests that it reads after the call: their ranks
// would see the end of a connection in place of the reason. A request that comes later,
// on a connection that is idle now, may still meet the end.
func (c *connections) settle(ctx context.Context) error {
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
