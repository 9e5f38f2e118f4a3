package jetlog

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Accounts of the embedded server. The directory of the streams is named after their
// account, so the name is part of a store's format.
const (
	Account       = "ckpt" // has the log; every client is a user of it
	systemAccount = "SYS"
)

const accounts = `accounts { ` + Account + ` { jetstream: enabled }, ` + systemAccount + ` {} }
system_account: ` + systemAccount

// minToken is the shortest token in bytes: 128 bits in hexadecimal.
const minToken = 32

// ErrExposed reports that the server would let unauthenticated clients in.
var ErrExposed = problem.New(problem.Invalid, "not safe to listen")

// Listen configures how clients connect over TCP.
type Listen struct {
	Address string        // HOST:PORT; port 0 takes any free port
	Token   string        // that clients must present; "" only if TLS asks for their certificates
	TLS     *tls.Config   // nil: no encryption. It may ask for client certificates.
	Grant   front.Grant   // rights of the clients
	Clients front.Clients // clients with tokens and rights of their own; nil: none
}

// Validate refuses a listener that asks clients for neither a token nor a certificate,
// and a listener whose token could be overheard. On loopback a token may be sent in
// clear: only this machine sees it.
func (o Listen) Validate() error {
	_, _, err := o.hostPort()
	if err != nil {
		return err
	}
	if err := o.Grant.Validate(); err != nil {
		return fmt.Errorf("listen on %s: %w", o.Address, err)
	}
	if o.Token != "" && len(o.Token) < minToken {
		return fmt.Errorf("listen on %s: %w: the token has %d bytes, want at least %d: make one with `openssl rand -hex 32`", o.Address, ErrExposed, len(o.Token), minToken)
	}
	switch {
	case o.TLS == nil && !o.Local():
		return fmt.Errorf("listen on %s: %w: other machines reach it, and their traffic, including a token, would cross the network in clear: give it a certificate and key, or a loopback address", o.Address, ErrExposed)
	case o.Open():
		return fmt.Errorf("listen on %s: %w: any client that reaches it could write: give it a token, or the CA of client certificates", o.Address, ErrExposed)
	}
	return nil
}

// Local reports whether only this machine reaches the address.
func (o Listen) Local() bool {
	host, _, err := o.hostPort()
	addr, perr := netip.ParseAddr(host)
	return err == nil && (host == "localhost" || perr == nil && addr.IsLoopback())
}

// Open reports whether clients need no credentials. [Listen.Validate] refuses such a
// listener.
func (o Listen) Open() bool {
	return o.Token == "" && o.Clients == nil && (o.TLS == nil || o.TLS.ClientAuth != tls.RequireAndVerifyClientCert)
}

func (o Listen) hostPort() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(o.Address)
	if err == nil {
		var n uint64
		n, err = strconv.ParseUint(text, 10, 16)
		port = int(n)
	}
	if err == nil && host == "" {
		err = errors.New("which address of this machine? 127.0.0.1 is for this machine alone, 0.0.0.0 for every network it is in")
	}
	if err != nil {
		return "", 0, fmt.Errorf("listen on %q: want HOST:PORT: %w", o.Address, err)
	}
	return host, port, nil
}

func (o Listen) listen() (net.Listener, error) {
	l, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w; choose another address, or end the process that has it", o.Address, err)
	}
	return l, nil
}

// Listen lets clients in over TCP at the address of [ServerOptions].Listen, through a
// front, and returns the address. Call it once, after the log was found to be sound.
// The front uses a separate connection to the log.
func (s *Server) Listen(ctx context.Context) (net.Addr, error) {
	if s.o.Listen == nil {
		return nil, errors.New("listen: the log's server was started without an address")
	}
	l, err := s.o.Listen.listen()
	if err != nil {
		return nil, err
	}
	f, err := s.stand(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", s.o.Listen.Address, err), l.Close())
	}
	addr := l.Addr()
	s.serving.Go(func() {
		_ = f.Serve(l, front.Door{Token: s.o.Listen.Token, TLS: s.o.Listen.TLS, Grant: s.o.Listen.Grant, Clients: s.o.Listen.Clients})
	})
	return addr, nil
}

// Relay lets clients in over TCP to a log on a NATS server, through a front. The relay
// has the credentials of that server; its clients have none. Several relays may serve
// one log. No relay knows the sessions of another, so the lease of a client that has
// ended becomes free when its term has passed, not before.
type Relay struct {
	guard *guard
	front *front.Front
	done  sync.WaitGroup
}

// RelayOptions configure how clients connect to a [Relay].
type RelayOptions struct {
	Listen Listen
	Bounds front.Limits // costs of clients; zero fields are the defaults of a front
	Signed signedFunc   // as in [ServerOptions]
}

// Relay starts a relay to the log of l, which must have a URL, and returns the address
// for clients. The relay ends with [Relay.Close], not with l. The log must exist.
func (l *Log) Relay(ctx context.Context, o RelayOptions) (*Relay, net.Addr, error) {
	listen := o.Listen
	bad := func(err error) (*Relay, net.Addr, error) {
		return nil, nil, fmt.Errorf("listen on %s for the log at %s: %w", listen.Address, l.opts.where(), err)
	}
	if l.opts.URL == "" {
		return bad(errors.New("the log is not on a server: its owner lets clients in"))
	}
	if err := listen.Validate(); err != nil {
		return nil, nil, err
	}
	log, err := Connect(ctx, l.opts)
	if err != nil {
		return bad(err)
	}
	g := &guard{l: log} // this process does not own the log
	if _, _, err := log.Open(ctx); err != nil {
		g.close()
		return bad(err)
	}
	if err := log.CreateBuckets(ctx); err != nil {
		g.close()
		return bad(err)
	}
	servers, err := newServers(log.opts)
	if err != nil {
		g.close()
		return bad(err)
	}
	f, err := front.New(front.Options{
		Dial: servers.dial, Credentials: servers.credentials, Several: true,
		Log: g, Buckets: []string{Leases, Cursors, Witnesses}, Signed: o.Signed.by(log), Limits: o.Bounds, Logger: l.opts.Logger,
	})
	if err != nil {
		g.close()
		return bad(err)
	}
	tcp, err := listen.listen()
	if err != nil {
		f.Close()
		g.close()
		return nil, nil, err
	}
	r := &Relay{guard: g, front: f}
	r.done.Go(func() {
		_ = f.Serve(tcp, front.Door{Token: listen.Token, TLS: listen.TLS, Grant: listen.Grant, Clients: listen.Clients})
	})
	return r, tcp.Addr(), nil
}

// Close closes the connections of all clients, and returns when they have ended.
func (r *Relay) Close() {
	r.front.Close()
	r.done.Wait()
	r.guard.close()
}

// doorman assigns a user to each connection. All connections come through the process:
// those of clients by a front, or by a unix socket, whose mode controls access. Only
// the owner's own connection, which presents a secret that never leaves the process,
// may change the streams behind the log.
type doorman struct {
	account *server.Account
	owner   string // secret of the owner's own connection
}

var _ server.Authentication = (*doorman)(nil)

func newDoorman() *doorman { return &doorman{owner: rand.Text()} }

// Check implements [server.Authentication].
func (d *doorman) Check(c server.ClientAuthentication) bool {
	from := c.RemoteAddress()
	if c.Kind() != server.CLIENT || from == nil || from.Network() != "pipe" {
		return false
	}
	shown := c.GetOpts().Token
	if shown != "" && subtle.ConstantTimeCompare([]byte(shown), []byte(d.owner)) == 1 {
		c.RegisterUser(&server.User{Username: "owner", Account: d.account})
		return true
	}
	c.RegisterUser(d.client())
	return true
}

// client returns a user that may only append and read.
func (d *doorman) client() *server.User {
	return &server.User{Username: "client", Account: d.account, Permissions: &server.Permissions{
		Publish: &server.SubjectPermission{Deny: destructive},
	}}
}

// destructive lists the requests that could change the log, the leases or the cursors
// without an event, whatever streams exist. No client of this package makes them.
var destructive = []string{
	"$JS.API.STREAM.UPDATE.*",
	"$JS.API.STREAM.DELETE.*",
	"$JS.API.STREAM.PURGE.*",
	"$JS.API.STREAM.RESTORE.*",
	"$JS.API.STREAM.MSG.DELETE.*",
	"$JS.API.STREAM.PEER.REMOVE.*",
}
