package faultproxy

import (
	"io"
	"net"
	"sync"
	"time"
)

// Shape is the speed of a network. The zero value is as fast as the machine.
type Shape struct {
	FirstByte time.Duration // added before the first byte of each response
	Sent      int64         // bytes a second of each connection from a client; 0: no limit
	Received  int64         // bytes a second of each connection to a client; 0: no limit
}

// listener makes accepted connections those of a proxy.
type listener struct {
	net.Listener
	proxy *Proxy
}

// Accept implements [net.Listener].
func (l listener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: accepted, proxy: l.proxy, done: make(chan struct{})}
	l.proxy.counters.connections.Add(1)
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.proxy.conns[c] = true
	return c, nil
}

// connKey is the key of a request's *conn in its context.
type connKey struct{}

// conn is a connection of a client, as slow as the proxy's shape.
type conn struct {
	net.Conn // not *net.TCPConn, whose ReadFrom would not be shaped
	proxy    *Proxy
	sent     pace // used by one reader at a time
	received pace // used by one writer at a time
	end      sync.Once
	done     chan struct{} // closed by Close
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (int, error) {
	rate := c.proxy.shape.Load().Sent
	n, err := c.Conn.Read(p[:piece(len(p), rate)])
	c.sent.wait(n, rate, c.done)
	return n, err
}

// Write implements [net.Conn].
func (c *conn) Write(p []byte) (written int, err error) {
	for {
		rate := c.proxy.shape.Load().Received
		n := piece(len(p), rate)
		c.received.wait(n, rate, c.done)
		n, err = c.Conn.Write(p[:n])
		written += n
		if p = p[n:]; err != nil || len(p) == 0 {
			return written, err
		}
	}
}

// Close implements [net.Conn].
func (c *conn) Close() error {
	c.end.Do(func() {
		close(c.done)
		c.proxy.mu.Lock()
		defer c.proxy.mu.Unlock()
		delete(c.proxy.conns, c)
	})
	return c.Conn.Close()
}

// reset closes the connection without sending what is still buffered.
func (c *conn) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails if it is closed already
	}
	_ = c.Close()
}

// pace delays bytes so that they do not exceed a rate.
type pace struct{ next time.Time }

// credit is the idle time that a pace makes up for. It covers timers that fire late.
const credit = 2 * time.Millisecond

// piece returns how many of n bytes are delayed together: at most about 10 ms' worth.
func piece(n int, rate int64) int {
	if rate <= 0 {
		return n
	}
	return min(n, int(min(max(rate/100, 1), 64<<10)))
}

// wait waits until n bytes may pass, or done is closed.
func (p *pace) wait(n int, rate int64, done <-chan struct{}) {
	if rate <= 0 || n <= 0 {
		return
	}
	if earliest := time.Now().Add(-credit); p.next.Before(earliest) {
		p.next = earliest
	}
	p.next = p.next.Add(time.Duration(int64(n) * int64(time.Second) / rate))
	pause := time.Until(p.next)
	if pause <= 0 {
		return
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-done:
	}
}

// buffers are *[bufferSize]byte.
var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// upstream is a connection to the server that bodies are copied to in large pieces.
type upstream struct{ net.Conn }

// ReadFrom implements [io.ReaderFrom], which the HTTP transport copies bodies with.
func (u upstream) ReadFrom(r io.Reader) (int64, error) {
	buffer := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buffer)
	return io.CopyBuffer(writerOnly{u.Conn}, r, buffer[:])
}

// writerOnly hides the other methods of a writer.
type writerOnly struct{ io.Writer }
