package nodes

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// errOther reports an endpoint with another certificate than that of the job.
var errOther = problem.New(problem.Foreign, "the endpoint has another certificate than the job")

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// connections is an HTTP client of the endpoint that can drop its connections: a dead
// connection would otherwise hold each request until TCP notices.
type connections struct {
	dial        dialFunc
	certificate string
	patience    time.Duration

	mu        sync.Mutex
	transport *http.Transport
	at        string // HOST:PORT in place of that of the requests; empty: theirs
	open      map[net.Conn]bool
	local     net.Addr // of the last connection
	closed    bool
	// dials ends the attempts to connect: the transport continues them after their request
	// has ended.
	dials context.Context
	abort context.CancelFunc
}

// connect returns a client that talks only to the endpoint with this certificate, or to
// any if it is empty. Within patience a connection must be made, and must answer a ping:
// otherwise it is closed.
func connect(dial dialFunc, certificate string, patience time.Duration) *connections {
	c := &connections{dial: dial, certificate: certificate, patience: patience, open: map[net.Conn]bool{}}
	c.dials, c.abort = context.WithCancel(context.Background())
	if dial == nil {
		c.dial = (&net.Dialer{}).DialContext
	}
	c.transport = c.newTransport()
	return c
}

func (c *connections) newTransport() *http.Transport {
	return &http.Transport{
		DialContext: c.connect,
		TLSClientConfig: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			InsecureSkipVerify: true, // the digest decides, not a name
			VerifyConnection: func(state tls.ConnectionState) error {
				c.mu.Lock()
				certificate := c.certificate
				c.mu.Unlock()
				if certificate != "" && !same(digest(state.PeerCertificates[0].Raw), certificate) {
					return errOther
				}
				return nil
			},
		},
		ForceAttemptHTTP2:   true,
		DisableCompression:  true,
		TLSHandshakeTimeout: c.patience,
		IdleConnTimeout:     time.Minute,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: c.patience, PingTimeout: c.patience, WriteByteTimeout: 2 * c.patience},
	}
}

// RoundTrip implements [http.RoundTripper].
func (c *connections) RoundTrip(r *http.Request) (*http.Response, error) {
	c.mu.Lock()
	transport := c.transport
	c.mu.Unlock()
	return transport.RoundTrip(r)
}

func (c *connections) connect(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	c.mu.Lock()
	dials := c.dials
	if c.at != "" {
		address = c.at
	}
	c.mu.Unlock()
	defer context.AfterFunc(dials, cancel)()
	raw, err := c.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn := &tracked{Conn: raw, of: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || dials.Err() != nil {
		_ = raw.Close()
		return nil, net.ErrClosed
	}
	c.open[conn], c.local = true, raw.LocalAddr()
	return conn, nil
}

// drop closes all connections. The next request makes a new one.
func (c *connections) drop() {
	c.mu.Lock()
	// A transport learns only later that a connection is closed. A new one has none.
	old, open := c.transport, c.open
	c.transport, c.open = c.newTransport(), map[net.Conn]bool{}
	c.abort()
	if !c.closed {
		c.dials, c.abort = context.WithCancel(context.Background())
	}
	c.mu.Unlock()
	for conn := range open {
		_ = conn.Close()
	}
	old.CloseIdleConnections()
}

// move drops all connections, and makes those of later requests to another endpoint.
func (c *connections) move(at, certificate string) {
	c.mu.Lock()
	c.at, c.certificate = at, certificate
	c.mu.Unlock()
	c.drop()
}

// close ends the client.
func (c *connections) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.drop()
}

func (c *connections) localAddr() net.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.local
}

// tracked is a connection that its client knows until it is closed.
type tracked struct {
	net.Conn
	of *connections
}

func (t *tracked) Close() error {
	t.of.mu.Lock()
	delete(t.of.open, t)
	t.of.mu.Unlock()
	return t.Conn.Close()
}

// refusal is an answer of the endpoint that refuses a request.
type refusal struct {
	httpkit.Details
	within time.Duration // for a conflict that may end by itself
}

func (r *refusal) Error() string             { return r.Detail }
func (r *refusal) ProblemKind() problem.Kind { return r.Kind }

// credential is what a request bears.
type credential struct{ token, session string }

func (c credential) set(r *http.Request) {
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	if c.session != "" {
		r.Header.Set(sessionHeader, c.session)
	}
}

// call sends one request and decodes its answer, which has at most limit bytes. It
// returns a *refusal if the endpoint answers with an error.
func call[Out any](ctx context.Context, c *connections, as credential, method, url string, in any, limit int64) (out Out, state *tls.ConnectionState, err error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return out, nil, err
		}
		body = bytes.NewReader(data)
	}
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return out, nil, err
	}
	as.set(r)
	reply, err := c.RoundTrip(r)
	if err != nil {
		return out, nil, err
	}
	defer reply.Body.Close()
	data, err := io.ReadAll(io.LimitReader(reply.Body, limit+1))
	if err != nil {
		return out, reply.TLS, err
	}
	if int64(len(data)) > limit {
		return out, reply.TLS, fmt.Errorf("the answer has more than %d bytes", limit)
	}
	if reply.StatusCode != http.StatusOK {
		refused := &refusal{}
		if json.Unmarshal(data, &refused.Details) != nil || refused.Detail == "" {
			return out, reply.TLS, fmt.Errorf("%w: status %s", errForeign, reply.Status)
		}
		refused.within, _ = time.ParseDuration(reply.Header.Get(retryHeader))
		return out, reply.TLS, refused
	}
	if err := json.Unmarshal(data, &out); err != nil {
		return out, reply.TLS, fmt.Errorf("%w: %w", errForeign, err)
	}
	return out, reply.TLS, nil
}

// errForeign reports a server that is no endpoint of a trainer.
var errForeign = problem.New(problem.Foreign, "the answer is not that of a trainer")
