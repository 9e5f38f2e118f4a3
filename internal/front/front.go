// Package front protects the server of a log from untrusted clients. It speaks
// the client protocol of NATS to the clients, and holds one connection to the
// server for each of them. The server never sees what is not allowed.
//
//	client ── TCP, TLS, token ──▶ front ── pipe ──▶ server of the log
//	         PUB HPUB SUB UNSUB          the same, checked and encoded again
//	         ◀── INFO of the front       ◀── MSG HMSG PING PONG -ERR, frame by frame
//
//	door       who may connect, and under which name: a token, a certificate, a peer
//	session    one client: its connection, and the one to the server
//	frame      one operation of the protocol, read within limits
//	event      a publication to ckpt.>: decoded, checked against its lane, and
//	           stamped with the principal in the header ckpt-actor
//	batch      events that are appended together: held back until they are complete
//	request    a publication to $JS.API.>: a read of the log, its body parsed and
//	           encoded again
//	asks       the number of open requests
//	entry      a publication to $KV.>: a lease or a cursor, on its condition
//	clients    users with tokens of their own, which expire and can be revoked
//	claim      the first token of an inbox, which one live session has
//	refusal    a reason with a code, answered on the reply subject at once
//
// Everything else is denied, in the server's own words. The package knows the
// protocol and the rules. It asks [Log] about the meaning of streams and entries.
package front

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/ckptstore/ckptstore/events"
)

// Options configure a front. Dial and Log are required.
type Options struct {
	// Dial opens a connection to the server, with the rights of a client.
	Dial func() (net.Conn, error)
	// Credentials, when set, are members of CONNECT that the server asks for.
	Credentials func() map[string]string
	// Several reports that other fronts serve the same log: a session that is
	// unknown here may live there.
	Several bool
	Log     Log
	// Buckets are the buckets whose entries clients may read and write.
	Buckets []string
	// Asks are other subjects that clients may send requests to.
	Asks []string
	// Admit, when set, is called before facts are passed on. Its error refuses
	// them, for example when the disk is nearly full; decisions pass.
	Admit func() error
	// Deciding, when set, is called before each decision is passed on.
	Deciding func()
	// Signed, when set, is called with each decision and the sequence of the last one of
	// its lane. Its error refuses the decision; the client retries after any error except a
	// [*Refusal].
	Signed func(ctx context.Context, e events.Event, after uint64) error
	// Limits bound what clients cost; zero fields are the defaults.
	Limits Limits
	// Logger logs refused clients; nil discards that.
	Logger *slog.Logger
}

// Log is a front's interface to the log. Its methods are called concurrently,
// with contexts that have a deadline. Clients retry after any error except a
// [*Refusal].
type Log interface {
	// Tail reports whether a stream is a live stream of a log.
	Tail(stream string) bool
	// Head returns the last decision of a lane if it is in the archive, and not
	// in the live stream; otherwise 0.
	Head(ctx context.Context, lane string) (uint64, error)
	// Check validates a write to a bucket. It returns the entry's stamp.
	Check(ctx context.Context, w Write) (Stamp, error)
	// Holding reports whether who or another session has the lease of a run.
	Holding(ctx context.Context, run string, who Whose) (Holding, error)
	// Forget removes a consumer whose client is gone. It does not wait.
	Forget(stream, consumer string)
}

// Door defines who may connect through a listener.
type Door struct {
	Token string      // required of clients; "" requires none
	TLS   *tls.Config // nil: plaintext
	// Who, when set, identifies the connected client. An error rejects it.
	Who func(net.Conn) (Principal, error)
	// Trusted is the name of a principal whose decisions may be those of a user, as the client
	// names it: a server of the HTTP API knows its users. Only for a door that has Who.
	Trusted string
	// Grant is what the admitted clients may do.
	Grant Grant
	// Clients, when set, knows further clients, by tokens and with grants of their own.
	Clients Clients

	quota *quota
}

// Front serves clients until it is closed. Its methods may be called
// concurrently.
type Front struct {
	o       Options
	limits  Limits
	budget  *semaphore.Weighted // bytes that wait for their batch or frame
	local   *semaphore.Weighted // the same, of clients on unix sockets
	streams chan struct{}       // one for each batch that is passed on as it comes
	asks    *semaphore.Weighted // requests that the server has not answered
	info    map[string]any      // the server's INFO
	life    context.Context
	cancel  context.CancelFunc
	began   time.Time
	all     sync.WaitGroup // sessions and their goroutines

	mu        sync.Mutex
	listeners map[net.Listener]bool
	sessions  map[*session]bool
	hosts     map[string]int      // sessions by address
	waiting   []*session          // unauthenticated, the oldest first
	claims    map[string]*session // by name, see [HeaderSession]
	users     map[*session]shown  // that have shown a token of their own
	consumers map[string]*session // by name
	batches   map[string]bool     // by ID, while they are open
}

// New returns a front, after it has read the server's INFO once.
func New(o Options) (*Front, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	limits, err := o.Limits.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("front of the log: %w", err)
	}
	f := &Front{
		o: o, limits: limits, budget: semaphore.NewWeighted(limits.Bytes), local: semaphore.NewWeighted(limits.Bytes),
		listeners: map[net.Listener]bool{}, sessions: map[*session]bool{}, hosts: map[string]int{},
		streams: make(chan struct{}, streams), asks: semaphore.NewWeighted(asksOfAll),
		claims: map[string]*session{}, users: map[*session]shown{}, consumers: map[string]*session{}, batches: map[string]bool{},
	}
	conn, err := o.Dial()
	if err != nil {
		return nil, fmt.Errorf("front of the log: %w", err)
	}
	defer func() { _ = conn.Close() }()
	text, err := serverInfo(newReader(conn, limits), conn, limits)
	if err == nil {
		err = json.Unmarshal(text, &f.info)
	}
	if err != nil {
		return nil, fmt.Errorf("front of the log: decode the server's INFO: %w", err)
	}
	f.began = time.Now()
	f.life, f.cancel = context.WithCancel(context.Background())
	return f, nil
}

// acceptAgain is the pause after a failed accept, for example for lack of
// descriptors.
const acceptAgain = 100 * time.Millisecond

// Serve serves clients of l. It returns nil when l or the front is closed.
func (f *Front) Serve(l net.Listener, door Door) error {
	if err := door.Grant.Validate(); err != nil {
		return errors.Join(err, l.Close())
	}
	door.quota = &quota{most: door.Grant.Bytes}
	f.mu.Lock()
	if f.life.Err() != nil {
		f.mu.Unlock()
		_ = l.Close()
		return nil
	}
	f.listeners[l] = true
	if door.Clients != nil {
		stop := make(chan struct{})
		defer close(stop)
		f.all.Go(func() { f.recheck(door.Clients, stop) })
	}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.listeners, l)
		f.mu.Unlock()
		_ = l.Close()
	}()
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil:
			f.o.Logger.Warn("client not accepted; retrying", "address", l.Addr().String(), "error", err)
			if !f.pause(acceptAgain) {
				return nil
			}
		default:
			f.receive(conn, door)
		}
	}
}

// pause reports whether the whole time passed before the front was closed.
func (f *Front) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-f.life.Done():
		return false
	}
}

// Close ends all sessions and listeners, and returns when they have ended.
// Publications that were passed on and not acknowledged may be in the log.
func (f *Front) Close() {
	f.cancel()
	f.mu.Lock()
	for l := range f.listeners {
		_ = l.Close()
	}
	for s := range f.sessions {
		s.close()
	}
	f.mu.Unlock()
	f.all.Wait()
}
