package jetlog

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/ckptstore/ckptstore/internal/front"
)

// Relay lets clients in over TCP to a log on a NATS server, through a front: it has
// that server's credentials, and its clients have none. Several relays may stand before
// one log. None of them knows the sessions of the others, so the lease of a client
// that has ended is free when its term has passed, and not before.
type Relay struct {
	guard *guard
	front *front.Front
	done  sync.WaitGroup
}

// RelayOptions say where and how clients come in to a [Relay].
type RelayOptions struct {
	Listen Listen
	Bounds front.Limits // what clients cost; zero fields are the defaults of a front
}

// Relay starts a relay to the log of l, which has a URL, and returns the address that
// clients come in by. It ends with [Relay.Close], not with l. The log must be there.
func (l *Log) Relay(ctx context.Context, o RelayOptions) (*Relay, net.Addr, error) {
	listen := o.Listen
	bad := func(err error) (*Relay, net.Addr, error) {
		return nil, nil, fmt.Errorf("listen on %s for the log at %s: %w", listen.Address, l.opts.where(), err)
	}
	if l.opts.URL == "" {
		return bad(errors.New("it is on no server: its owner lets clients in"))
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
		Log: g, Buckets: []string{Leases, Cursors, Witnesses}, Limits: o.Bounds, Logger: l.opts.Logger,
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
	r.done.Go(func() { _ = f.Serve(tcp, front.Door{Token: listen.Token, TLS: listen.TLS, Grant: listen.Grant}) })
	return r, tcp.Addr(), nil
}

// Close ends the connections of all clients, and returns when they have ended.
func (r *Relay) Close() {
	r.front.Close()
	r.done.Wait()
	r.guard.close()
}
