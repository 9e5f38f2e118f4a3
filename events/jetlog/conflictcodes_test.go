package jetlog

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"
)

// TestConflictCodes checks that a decision may be refused by either code on a
// replicated stream, and that a pending one is settled by a retry.
func TestConflictCodes(t *testing.T) {
	t.Parallel()
	_, s := newLog(t)
	for name, pending := range map[string]int{"10071": 0, "10164 once, then 10071": 1, "10164 three times": 3} {
		w := &pendings{s: s, left: pending}
		l := connectTo(t, Options{Dial: w.dial})
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		end, err := l.LaneEnd(t.Context(), trial)
		if err != nil {
			t.Fatal(err)
		}
		d := begun(t, name)
		at, err := l.Decide(t.Context(), d, end)
		if err != nil {
			t.Fatal(err)
		}
		// The retry finds its own event, whatever code the server returns.
		if again, err := l.Decide(t.Context(), d, end); err != nil || again != at {
			t.Errorf("%s: again: %d, %v, want %d", name, again, err, at)
		}
		w.mu.Lock()
		w.left = pending
		w.mu.Unlock()
		var c *ConflictError
		if _, err := l.Decide(t.Context(), begun(t, "late"), end); !errors.As(err, &c) || c.Actual != at {
			t.Errorf("%s: %v", name, err)
		}
		if w.mu.Lock(); w.left != 0 {
			t.Errorf("%s: %d were not used", name, w.left)
		}
		w.mu.Unlock()
	}
}

// pendings is a connection to a server that reports conflicts as a replicated one may
// while another append is in flight.
type pendings struct {
	s    *Server
	mu   sync.Mutex
	left int
}

func (w *pendings) dial(context.Context) (net.Conn, error) {
	c, err := w.s.Dial()
	return &pendingConn{c, w}, err
}

type pendingConn struct {
	net.Conn
	w *pendings
}

func (c *pendingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if at := bytes.Index(p[:n], []byte(`"err_code":10071`)); at >= 0 && c.w.left > 0 {
		c.w.left--
		copy(p[at:], `"err_code":10164`)
	}
	return n, err
}
