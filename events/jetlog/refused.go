package jetlog

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"

	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrNotAllowed says that the server does not let this client in, or that the
// client does not trust the server.
var ErrNotAllowed = problem.New(problem.Denied, "not allowed")

// credentials are what this client shows and asks for.
func (o Options) credentials() []nats.Option {
	var opts []nats.Option
	switch {
	case o.FindToken != nil:
		opts = append(opts, nats.TokenHandler(o.FindToken))
	case o.Token != "":
		opts = append(opts, nats.Token(o.Token))
	}
	if o.TLS != nil {
		opts = append(opts, nats.Secure(o.TLS))
	}
	return opts
}

// refused says what is wrong with a first connection, and what to do.
func (o Options) refused(err error) error {
	var (
		unknown x509.UnknownAuthorityError
		check   *tls.CertificateVerificationError
		remote  *net.OpError
	)
	switch {
	case errors.Is(err, nats.ErrAuthorization) && o.Token == "" && o.FindToken == nil:
		return fmt.Errorf("%w: the server asks for a token or a password, and none was given: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthorization):
		return fmt.Errorf("%w: the server does not know this token: %w", ErrNotAllowed, err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: the server's certificate is signed by a CA that is not trusted here: %w", ErrNotAllowed, err)
	case errors.As(err, &check):
		return fmt.Errorf("%w: the server's certificate is not valid for this address: %w", ErrNotAllowed, err)
	// By when the server's alert arrives, it is one of these.
	case errors.As(err, &remote) && remote.Op == "remote error", errors.Is(err, nats.ErrTLS):
		return fmt.Errorf("%w: the server does not accept this client's certificate, or its lack of one: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fmt.Errorf("%w: the server has no TLS and tls:// asks for it: %w", ErrNotAllowed, err)
	case o.Dial != nil:
		return fmt.Errorf("%w; check that the process that holds the store is alive", err)
	}
	return fmt.Errorf("%w; check that a NATS server with JetStream runs there ('nats-server -js' starts one)", err)
}
