package nodes

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// bulkBuffer is how many bytes a connection between two nodes reads and writes at a time.
const bulkBuffer = 256 << 10

// firstBuffer is bulkBuffer for a connection to this node by which no request with the job's token has come: any
// process that reaches the port can open many.
const firstBuffer = 4 << 10

// tlsRecord is the most plaintext of a record of TLS in bytes.
const tlsRecord = 16 << 10

// bulk is a connection of TLS for large bodies. crypto/tls makes a system call for each record of
// 16 KiB, on both sides, and hands the kernel segments that are too short for it to send in one piece.
// bulk collects records: a copy in the cache costs less. The handshake is made by the caller, or by the
// first Read.
type bulk struct {
	*tls.Conn
	under *collected
	mu    sync.Mutex // held while data is written
}

var _ net.Conn = (*bulk)(nil)

// newBulk puts TLS on a connection, as [tls.Client] or [tls.Server] does. buffer is how many bytes it reads at a time
// until it is trusted.
func newBulk(raw net.Conn, as func(net.Conn, *tls.Config) *tls.Conn, c *tls.Config, buffer int) *bulk {
	under := &collected{Conn: raw, in: bufio.NewReaderSize(raw, buffer)}
	return &bulk{Conn: as(under, c), under: under}
}

// trust has the connection read bulkBuffer bytes at a time. It may be called concurrently with reads.
func (b *bulk) trust() {
	b.under.wide.Store(true)
	trust(b.under.Conn)
}

// Write implements [net.Conn]. When it returns, everything is written.
func (b *bulk) Write(p []byte) (n int, err error) {
	if len(p) <= tlsRecord {
		return b.Conn.Write(p)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.under.hold()
	n, err = b.Conn.Write(p)
	if ferr := b.under.flush(); err == nil {
		err = ferr
	}
	return n, err
}

// collected is a connection whose writes can be held back until there are bulkBuffer bytes. Reads and
// writes may be concurrent.
type collected struct {
	net.Conn
	in   *bufio.Reader
	wide atomic.Bool // in is to have bulkBuffer bytes

	mu   sync.Mutex
	held bool
	out  []byte
	err  error // of the first write that failed
}

// Read implements [net.Conn].
func (c *collected) Read(p []byte) (int, error) {
	if c.in.Size() < bulkBuffer && c.wide.Load() {
		left, _ := c.in.Peek(c.in.Buffered()) // what is there
		c.in = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(left), c.Conn), bulkBuffer)
	}
	return c.in.Read(p)
}

// hold holds back writes until flush is called.
func (c *collected) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = true
}

// Write implements [net.Conn]. The error of a write that was held back is that of a later call.
func (c *collected) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.held {
		return c.Conn.Write(p)
	}
	if c.out == nil {
		c.out = make([]byte, 0, bulkBuffer+2*tlsRecord)
	}
	c.out = append(c.out, p...)
	if len(c.out) >= bulkBuffer {
		c.send()
	}
	if c.err != nil {
		return 0, c.err
	}
	return len(p), nil
}

// flush writes what was held back.
func (c *collected) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = false
	c.send()
	return c.err
}

// send writes what was held back, unless a write has failed. The caller holds the lock.
func (c *collected) send() {
	if c.err == nil && len(c.out) > 0 {
		_, c.err = c.Conn.Write(c.out)
	}
	c.out = c.out[:0]
}

// bulkListener accepts connections of TLS for large bodies.
type bulkListener struct {
	net.Listener
	c *tls.Config
}

// Accept implements [net.Listener].
func (l bulkListener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newBulk(raw, tls.Server, l.c, firstBuffer), nil
}

// dialBulk returns how a client makes connections of TLS for large bodies.
func dialBulk(dial dialFunc, c *tls.Config) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		raw, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, peerPatience)
		defer cancel()
		b := newBulk(raw, tls.Client, c, bulkBuffer)
		if err := b.HandshakeContext(ctx); err != nil {
			_ = raw.Close() // nothing was sent
			return nil, err
		}
		return b, nil
	}
}
