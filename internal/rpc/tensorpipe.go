package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// Endpoint is an address to listen on: network "unix" with the path of a socket,
// or "tcp" with host and port.
type Endpoint struct {
	Peer    Peer   `json:"peer"`
	Network string `json:"network"`
	Address string `json:"address"`
}

// PipeConfig identifies an agent of TENSORPIPE.
type PipeConfig struct {
	Self Peer
	// Network and Address are the address to listen on, as in [Endpoint]; without
	// a network the agent only calls. Port 0 is any free port.
	Network, Address string
	Token            string // shared by all peers; not empty
	Options          *TensorPipeOptions
	Group            *collective.Group // for Shutdown; nil: this agent alone
}

// Pipe is an agent of TENSORPIPE.
type Pipe struct {
	*engine
	token    string
	channels int
	group    *collective.Group
	listener net.Listener // nil: the agent only calls

	mu     sync.Mutex
	peers  map[string]Endpoint
	routes map[string]*route
	open   map[string]*partial // sessions that lack connections
}

var _ Agent = (*Pipe)(nil)

// route is the way to one peer. Its lock is held during connecting, so that only
// one goroutine connects.
type route struct {
	lock chan struct{}
	to   *channels // nil, or perhaps ended
}

// NewPipe opens an agent that knows no peers except itself; [Pipe.Add] adds them.
func NewPipe(c PipeConfig) (*Pipe, error) {
	if c.Self.Name == "" || len(c.Self.Name) > maxName {
		return nil, fmt.Errorf("open an rpc agent named %.100q: a name has 1 to %d bytes", c.Self.Name, maxName)
	}
	if c.Token == "" {
		return nil, fmt.Errorf("open rpc agent %s: there is no token, and without one any process could call it", c.Self)
	}
	if c.Options == nil {
		c.Options = DefaultTensorPipe()
	}
	o, err := c.Options.checked()
	if err != nil {
		return nil, fmt.Errorf("open rpc agent %s: %w", c.Self, err)
	}
	p := &Pipe{
		engine: newEngine(c.Self, o.Timeout, o.MaxBytes, o.WorkerThreads),
		token:  c.Token, channels: o.Channels, group: c.Group,
		peers: map[string]Endpoint{}, routes: map[string]*route{}, open: map[string]*partial{},
	}
	if c.Network == "" {
		return p, nil
	}
	if p.listener, err = listen(c.Network, c.Address); err != nil {
		return nil, fmt.Errorf("open rpc agent %s: %w", c.Self, err)
	}
	p.spawn(p.serveAll)
	return p, nil
}

func listen(network, address string) (net.Listener, error) {
	switch network {
	case "unix":
	case "tcp":
		at, err := net.ResolveTCPAddr("tcp", address)
		if err != nil {
			return nil, err
		}
		if !at.IP.IsLoopback() {
			return nil, fmt.Errorf("listen on %s: calls are not encrypted, so only loopback addresses such as 127.0.0.1:0 and unix sockets are served", address)
		}
	default:
		return nil, fmt.Errorf("listen on network %q: it must be unix or tcp", network)
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		if err := os.Chmod(address, 0o600); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// Endpoint returns the address of this agent; its network is empty if the agent
// only calls.
func (p *Pipe) Endpoint() Endpoint {
	if p.listener == nil {
		return Endpoint{Peer: p.self}
	}
	at := p.listener.Addr()
	return Endpoint{Peer: p.self, Network: at.Network(), Address: at.String()}
}

// Add adds a peer. It returns an error if another rank or address has the name.
func (p *Pipe) Add(e Endpoint) error {
	if e.Peer.Name == p.self.Name {
		return fmt.Errorf("add peer %s: this agent has that name", e.Peer)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if old, ok := p.peers[e.Peer.Name]; ok && old != e {
		return fmt.Errorf("add peer %s at %s: the name belongs to %s at %s", e.Peer, e.Address, old.Peer, old.Address)
	}
	p.peers[e.Peer.Name] = e
	return nil
}

// Call implements Agent.
func (p *Pipe) Call(ctx context.Context, to, function string, body []byte) ([]byte, error) {
	if to == p.self.Name {
		return p.make(ctx, p.self, function, body, nil)
	}
	p.mu.Lock()
	at, ok := p.peers[to]
	p.mu.Unlock()
	if !ok {
		return nil, &PeerError{Peer{Name: to, Rank: AnyRank}, function, ErrUnknownPeer}
	}
	return p.make(ctx, at.Peer, function, body, func(ctx context.Context) (*link, error) { return p.reach(ctx, at) })
}

// reach returns the link to a peer, and connects it first if necessary.
func (p *Pipe) reach(ctx context.Context, at Endpoint) (*link, error) {
	p.mu.Lock()
	r, ok := p.routes[at.Peer.Name]
	if !ok {
		r = &route{lock: make(chan struct{}, 1)}
		p.routes[at.Peer.Name] = r
	}
	p.mu.Unlock()
	select {
	case r.lock <- struct{}{}:
		defer func() { <-r.lock }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if r.to != nil {
		select {
		case <-r.to.done:
		default:
			return r.to.link, nil
		}
	}
	conns, err := p.dial(ctx, at)
	if err != nil {
		return nil, err
	}
	r.to = p.connect(at.Peer, conns)
	return r.to.link, nil
}

// dial opens all channels to a peer.
func (p *Pipe) dial(ctx context.Context, at Endpoint) (conns []net.Conn, err error) {
	defer func() {
		if err != nil {
			for _, c := range conns {
				_ = c.Close()
			}
		}
	}()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(p.life, func() { stop(ErrClosed) })()
	session := rand.Text()
	for i := range p.channels {
		var d net.Dialer
		c, err := d.DialContext(ctx, at.Network, at.Address)
		if err != nil {
			if ctx.Err() != nil {
				return conns, context.Cause(ctx)
			}
			return conns, fmt.Errorf("%w: it does not listen at %s: %w", ErrGone, at.Address, err)
		}
		conns = append(conns, c)
		cut := context.AfterFunc(ctx, func() { _ = c.Close() })
		there, err := greet(c, p.token, greeting{Peer: p.self, Session: session, Channel: i, Of: p.channels})
		if !cut() {
			return conns, context.Cause(ctx)
		}
		if closed(err) { // it ended in between
			err = gone(err)
		}
		if err != nil {
			return conns, fmt.Errorf("greet it at %s: %w", at.Address, err)
		}
		if there.Peer != at.Peer {
			return conns, fmt.Errorf("greet it at %s: %s answers there", at.Address, there.Peer)
		}
	}
	return conns, nil
}

// serveAll accepts connections until the agent closes.
func (p *Pipe) serveAll() {
	for {
		c, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Too many open files, or a caller that left at once. Others may
			// come, and the pause keeps this loop from spinning.
			if !p.pause() {
				return
			}
			continue
		}
		if !p.spawn(func() { p.receive(c) }) {
			_ = c.Close()
		}
	}
}

// receive greets a connection and adds it to its session.
func (p *Pipe) receive(c net.Conn) {
	cut := context.AfterFunc(p.life, func() { _ = c.Close() })
	g, err := welcome(c, p.token, p.self)
	if !cut() || err != nil {
		_ = c.Close() // a refused caller has the reason
		return
	}
	if conns := p.gather(g, c); conns != nil {
		p.connect(g.Peer, conns)
	}
}

// Shutdown implements Agent. The number of calls ever made is gathered until it
// is the same twice, each time when no rank has a running call: then there is
// none between the ranks either.
func (p *Pipe) Shutdown(ctx context.Context) error {
	return errors.Join(p.engine.join(ctx, p.group), p.Close())
}

// Close implements Agent.
func (p *Pipe) Close() error {
	if !p.close() {
		return nil
	}
	var err error
	if p.listener != nil {
		if err = p.listener.Close(); errors.Is(err, fs.ErrNotExist) {
			err = nil // another process has removed the socket, as intended
		}
	}
	p.mu.Lock()
	for session := range p.open {
		p.drop(session)
	}
	p.mu.Unlock()
	p.work.Wait()
	return err
}

// Peers returns the known agents, including this one, by name.
func (p *Pipe) Peers() []Peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := []Peer{p.self}
	for _, e := range p.peers {
		all = append(all, e.Peer)
	}
	slices.SortFunc(all, byName)
	return all
}
