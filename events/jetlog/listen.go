package jetlog

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Accounts of the embedded server. The directory of the streams has the name
// of their account, so it is part of the format of a store.
const (
	Account       = "ckpt" // has the log; every client is a user of it
	systemAccount = "SYS"
)

const accounts = `accounts { ` + Account + ` { jetstream: enabled }, ` + systemAccount + ` {} }
system_account: ` + systemAccount

// minToken is the shortest token in bytes: 128 bits in hexadecimal.
const minToken = 32

// ErrExposed says that the server would let strangers in.
var ErrExposed = problem.New(problem.Invalid, "not safe to listen")

// Listen is where and how clients come in over TCP.
type Listen struct {
	Address string      // HOST:PORT; port 0 is any free one
	Token   string      // which clients must show; "" only if TLS asks for their certificates
	TLS     *tls.Config // nil: in clear. It may ask for client certificates.
	Grant   front.Grant // what clients may do
}

// Validate refuses a listener that asks clients for neither a token nor a
// certificate, and one whose token could be overheard. On loopback a token may
// be sent in clear: only this machine sees it.
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
		return fmt.Errorf("listen on %s: %w: other machines reach it, and what they send, a token too, would cross the network in clear: give it a certificate and key, or a loopback address", o.Address, ErrExposed)
	case o.Open():
		return fmt.Errorf("listen on %s: %w: anybody who reaches it could write: give it a token, or the CA of client certificates", o.Address, ErrExposed)
	}
	return nil
}

// Local reports whether only this machine reaches the address.
func (o Listen) Local() bool {
	host, _, err := o.hostPort()
	addr, perr := netip.ParseAddr(host)
	return err == nil && (host == "localhost" || perr == nil && addr.IsLoopback())
}

// Open reports whether clients would need nothing to be let in. [Listen.Validate]
// refuses such a listener.
func (o Listen) Open() bool {
	return o.Token == "" && (o.TLS == nil || o.TLS.ClientAuth != tls.RequireAndVerifyClientCert)
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

// Listen lets clients in over TCP at the address of [ServerOptions].Listen, through
// a front, and returns the address. It is called once, when the log was found to
// be sound. The front asks the log over a connection of its own.
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
		_ = f.Serve(l, front.Door{Token: s.o.Listen.Token, TLS: s.o.Listen.TLS, Grant: s.o.Listen.Grant})
	})
	return addr, nil
}
