package jetlog

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Errors to test with errors.Is.
var (
	// ErrNoLog reports that there is no stream, or an empty one whose first boot was
	// cut.
	ErrNoLog = errors.New("no log")
	// ErrServed reports that another server has the directory.
	ErrServed = problem.New(problem.Locked, "another server has the log open")
	// ErrForeign reports that the log belongs to another store, or was recreated since
	// it was opened.
	ErrForeign = errors.New("foreign log")
	// ErrUnsafe reports that the stream is configured so that it could lose events.
	ErrUnsafe = problem.New(problem.Damage, "unsafe log")
	// ErrReplicas reports that the server cannot keep the requested number of copies.
	ErrReplicas = errors.New("too few servers")
	// ErrGap reports that an event of the log is missing or unreadable.
	ErrGap = problem.New(problem.Damage, "gap in the log")
	// ErrUnrecovered reports that the embedded server could not recover its files.
	ErrUnrecovered = problem.New(problem.Damage, "the log cannot be recovered")
	// ErrEnd reports that the log ends before the requested event.
	ErrEnd = problem.New(problem.NotFound, "end of the log")
	// ErrConflict reports that another decision of the aggregate came first.
	ErrConflict = errors.New("conflict")
	// ErrUnacknowledged reports that the deadline passed before an acknowledgement. The
	// event may or may not be in the log; appending it again settles that.
	ErrUnacknowledged = errors.New("not acknowledged")
	// ErrClosed reports that this process closed the log.
	ErrClosed = errors.New("log is closed")
	// ErrLeaseHeld reports that another holder has the lease.
	ErrLeaseHeld = errors.New("lease is held")
	// ErrLeaseLost reports that another holder took the lease, or that it was released.
	ErrLeaseLost = errors.New("lease is lost")
)

// restore is the remedy for an incomplete log. The copy comes first because a server
// that opens the log may truncate what it cannot read.
const restore = "stop, keep a copy of the directory, and restore log/ from a backup; without one, move log/ away and run `ckptstore recover`, which makes a log of the receipts"

// ConflictError reports that a lane has moved since the caller read it.
type ConflictError struct {
	Lane   string
	After  uint64 // the end of the lane that the caller expected
	Actual uint64 // its current end
}

// Error implements error.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("decide on %s after %d: conflict: the lane is at %d; read it and decide again", e.Lane, e.After, e.Actual)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Codes of the JetStream API.
const (
	codeWrongLast        = jetstream.ErrorCode(10071) // an expected sequence is not the last one
	codeWrongLastPending = jetstream.ErrorCode(10164) // the same, against an append that is in flight
	codePending          = jetstream.ErrorCode(10158) // the same ID is in flight: an earlier attempt without a quorum
	codeBatchIncomplete  = jetstream.ErrorCode(10176) // a message of the batch is missing
	codeBatchDuplicate   = jetstream.ErrorCode(10201) // an ID of the batch is in the log already
	codeBatchInflight    = jetstream.ErrorCode(10210) // too many open batches
	codeStoreFailed      = jetstream.ErrorCode(10077) // disk or quota
	codeInsufficient     = jetstream.ErrorCode(10023) // the server's quota
	codeNoPeers          = jetstream.ErrorCode(10005) // the cluster has too few servers
	codeNotClustered     = jetstream.ErrorCode(10074) // more than one replica without a cluster
	codeNoMessage        = jetstream.ErrorCode(10037)
	codeNotLeader        = jetstream.ErrorCode(10009)
	codeNoStream         = jetstream.ErrorCode(10059)
	codeOtherStream      = jetstream.ErrorCode(10060) // the append was for another stream
)

func hasCode(err error, codes ...jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	for _, c := range codes {
		if api.ErrorCode == c {
			return true
		}
	}
	return false
}

// ErrRefused reports that the owner of the store refuses this client's request. The
// same call is refused again.
var ErrRefused = errors.New("refused by the owner of the store")

// RefusedError is a refusal by a front, with its reason. It matches [ErrRefused]. It
// also matches [ErrNotAllowed] if clients may never do that, and [syscall.ENOSPC] if
// the store's disk is nearly full.
type RefusedError struct {
	Code int // one of package internal/front
	Text string
}

// Error implements error.
func (e *RefusedError) Error() string {
	if e.Code == front.CodeDenied {
		return fmt.Sprintf("%v: %s", ErrNotAllowed, e.Text)
	}
	return fmt.Sprintf("%v: %s", ErrRefused, e.Text)
}

// ProblemKind returns [problem.Denied] if clients may never do that.
func (e *RefusedError) ProblemKind() problem.Kind {
	if e.Code == front.CodeDenied {
		return problem.Denied
	}
	return ""
}

// Is implements errors.Is.
func (e *RefusedError) Is(target error) bool {
	switch target {
	case ErrRefused:
		return true
	case ErrNotAllowed:
		return e.Code == front.CodeDenied
	case syscall.ENOSPC:
		return e.Code == front.CodeNoRoom
	}
	return false
}

// forGood lists the codes of refusals that an immediate retry does not settle.
var forGood = []jetstream.ErrorCode{
	front.CodeUnknownKind, front.CodeNewer, front.CodeEvent, front.CodeTooLarge, front.CodeLane,
	front.CodeNoRoom, front.CodeDenied, front.CodeBatch, front.CodeEntry, front.CodeHeld,
}

// refusedBy turns a front's refusal into a [*RefusedError]. It returns other errors
// unchanged.
func refusedBy(err error) error {
	var api *jetstream.APIError
	var known *RefusedError
	if !errors.As(err, &api) || errors.As(err, &known) || !slices.Contains(forGood, api.ErrorCode) {
		return err
	}
	return &RefusedError{Code: int(api.ErrorCode), Text: api.Description}
}

// ErrNotAllowed reports that the server does not let this client in, or that the client
// does not trust the server.
var ErrNotAllowed = problem.New(problem.Denied, "not allowed")

// credentials returns the connection options for the client's credentials and TLS.
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

// refused adds the cause and the next step to the error of a first connection.
func (o Options) refused(err error) error {
	var (
		unknown x509.UnknownAuthorityError
		check   *tls.CertificateVerificationError
		remote  *net.OpError
	)
	switch {
	case errors.Is(err, nats.ErrAuthorization) && o.Token == "" && o.FindToken == nil:
		return fmt.Errorf("%w: the server asks for a token or a password, and none was given: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthRevoked), worded(err, nats.AUTHENTICATION_REVOKED_ERR):
		return fmt.Errorf("%w: the token was revoked: ask the operator of the server for another: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthExpired), worded(err, nats.AUTHENTICATION_EXPIRED_ERR):
		return fmt.Errorf("%w: the token has expired: ask the operator of the server for another: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthorization):
		return fmt.Errorf("%w: the server does not know this token: %w", ErrNotAllowed, err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: the server's certificate is signed by a CA that is not trusted here: %w", ErrNotAllowed, err)
	case errors.As(err, &check):
		return fmt.Errorf("%w: the server's certificate is not valid for this address: %w", ErrNotAllowed, err)
	// By the time the server's alert arrives, the error is one of these.
	case errors.As(err, &remote) && remote.Op == "remote error", errors.Is(err, nats.ErrTLS):
		return fmt.Errorf("%w: the server does not accept this client's certificate, or its lack of one: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fmt.Errorf("%w: the server has no TLS and tls:// asks for it: %w", ErrNotAllowed, err)
	case o.Dial != nil:
		return fmt.Errorf("%w; check that the process that holds the store is alive", err)
	}
	return fmt.Errorf("%w; check that a NATS server with JetStream runs there ('nats-server -js' starts one)", err)
}

// worded reports whether an error of a first connection has the server's text: the library gives
// it no name there.
func worded(err error, text string) bool { return strings.Contains(strings.ToLower(err.Error()), text) }
