// Package faultproxy puts faults, delays and counters between S3 clients and a server, for
// tests. A [Proxy] forwards each request unchanged, with its Host header, so that its
// signature stays valid. Bodies stream through.
//
//	client ── connection, Shape ──▶ proxy ──▶ server
//	                                  │
//	           Counts ◀── Request ── Fault: Match, Skip, Times, Share, Do
//
// A [Fault] chooses requests, and its [Action] states what happens to them:
//
//	before the server acts   Refuse, SlowDown, Kill, Stop(Before)
//	on the way to it         DropHeaders, DropElements, WrongRange, FlipSent, CutSent, StallSent
//	after the server acted   DropAnswer, Hang, Delay, Stop(After)
//	in its answer            WrongETag, FlipReceived, AddByte, Shorten, CutReceived, StallReceived
//
// Go's HTTP client repeats a GET without a report if a connection that it had used before is
// closed without an answer. Such a request is counted twice, and meets the faults twice.
package faultproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/sigv4"
)

const (
	bufferSize   = 256 << 10
	connectLimit = 5 * time.Second
	answerLimit  = 10 * time.Minute // the end of a large multipart upload takes minutes
	closeLimit   = 10 * time.Second
)

// Options describe a proxy.
type Options struct {
	Target string // URL of the server, http://host:port

	// Key is the clients' key. A request is signed with it again after its headers or its
	// document were changed. Only DropHeaders, DropElements and WrongRange need it.
	Key sigv4.Key
}

// Proxy is an HTTP proxy in front of one server. Its methods may be called concurrently.
type Proxy struct {
	target    *url.URL
	key       sigv4.Key
	server    http.Server
	transport *http.Transport
	address   string
	served    chan struct{} // closed when the server accepts no more
	cancel    context.CancelFunc
	counters  counters
	shape     atomic.Pointer[Shape]
	running   sync.WaitGroup // requests

	mu      sync.Mutex
	number  int
	faults  []*Injection
	conns   map[*conn]bool
	stopped bool
	closed  bool
}

// Start starts a proxy on a port of the loopback interface.
func Start(o Options) (*Proxy, error) {
	target, err := url.Parse(o.Target)
	if err != nil || target.Scheme != "http" || target.Host == "" || target.Path != "" {
		return nil, fmt.Errorf("start proxy: target %.200q is not of the form http://host:port", o.Target)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	p := &Proxy{target: target, key: o.Key, address: l.Addr().String(), served: make(chan struct{}), conns: map[*conn]bool{}}
	p.shape.Store(&Shape{})
	dialer := net.Dialer{Timeout: connectLimit}
	p.transport = &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return upstream{c}, nil
		},
		DisableCompression:    true,
		MaxIdleConnsPerHost:   1024,
		IdleConnTimeout:       time.Minute,
		ResponseHeaderTimeout: answerLimit,
		ExpectContinueTimeout: time.Second,
		ReadBufferSize:        bufferSize,
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.server = http.Server{
		Handler:           p,
		ReadHeaderTimeout: time.Minute,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ErrorLog:          log.New(io.Discard, "", 0),
	}
	go func() {
		defer close(p.served)
		_ = p.server.Serve(listener{l, p}) // returns when the proxy is closed
	}()
	return p, nil
}

// URL returns the address for clients, http://host:port.
func (p *Proxy) URL() string { return "http://" + p.address }

// Counts returns what was counted since the start or the last Reset. A request counts when
// it arrives. The last bytes of a body may be counted shortly after the client has them.
func (p *Proxy) Counts() Counts { return p.counters.read(false) }

// Reset returns the counts and begins again at zero.
func (p *Proxy) Reset() Counts { return p.counters.read(true) }

// SetShape changes the speed of all connections, also of open ones.
func (p *Proxy) SetShape(s Shape) { p.shape.Store(&s) }

// Stopped reports whether the action Stop has been reached.
func (p *Proxy) Stopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}

// Resume ends the effect of the action Stop.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = false
}

// Disconnect closes all connections of clients, as if a network had failed for a moment.
func (p *Proxy) Disconnect() {
	p.mu.Lock()
	open := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, c := range open {
		c.reset()
	}
}

// Close closes all connections, releases requests that hang, and returns when all have
// ended. The functions of faults must not call it.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	err := p.server.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-p.served
		p.running.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(closeLimit):
		return errors.Join(err, fmt.Errorf("close proxy: requests still run after %v; does the function of a fault block?", closeLimit))
	}
	p.transport.CloseIdleConnections()
	if err != nil {
		return fmt.Errorf("close proxy: %w", err)
	}
	return nil
}
