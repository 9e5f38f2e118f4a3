// Package jetlog keeps the events of a store in one JetStream stream. It is
// the only package that speaks to NATS; internal/logpeers runs servers for it.
//
//	log       all events, from sequence 1 without a gap; no event ever expires
//	          or is purged or deleted
//	tail      the live stream over the subjects ckpt.>, on file: CKPT with all of
//	          the log, or CKPT_<first> with the events after the archive
//	archive   the log before its tail, in sealed files: see package archive
//	fact      appended unconditionally ([Log.Append]); facts queued while an
//	          append is in flight form one atomic batch
//	decision  appended only if its lane has not moved ([Log.Decide])
//	lane      ckpt.<run>.<trial>.s.>, the one filter of an aggregate
//	lease     a key of the bucket CKPT_LEASES, held for a term ([Log.Lease])
//	cursor    a key of the bucket CKPT_CURSORS: the position of a subscriber
//	witness   a key of the bucket CKPT_CURSOR_WITNESSES: proof that a cursor exists
//	server    an embedded NATS server in a directory ([StartServer]); its
//	          clients are users of the account ckpt, and come in through the
//	          process, a unix socket, or TCP with a token or certificate
//
// The paths in a server's directory contain the account:
//
//	DIR/jetstream/ckpt/streams/CKPT/                      the log, or its tail
//	DIR/jetstream/ckpt/streams/KV_CKPT_LEASES/            the leases
//	DIR/jetstream/ckpt/streams/KV_CKPT_CURSORS/           the cursors
//	DIR/jetstream/ckpt/streams/KV_CKPT_CURSOR_WITNESSES/  their witnesses
//
// A message is stored as package events encodes it: the subject, the headers
// in the spelling of the wire, the body byte for byte. The append adds
//
//	Nats-Expected-Stream                           to single appends
//	Nats-Expected-Last-Subject-Sequence[-Subject]  to a decision
//	ckpt-follows                                   to a decision whose predecessor is archived
//	Nats-Expected-Last-Sequence                    to store.created
//	Nats-Batch-Id, -Sequence, -Commit              to the facts of a batch
//
// and readers ignore all of them.
//
// A lost acknowledgement is never a lost event and never a second one: every
// append is retried under the ID of its event, and the server remembers the IDs
// of the last two minutes. A later retry may store a fact twice; folds ignore the
// second. A retried decision is searched for in its lane, however old it is.
package jetlog

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/semaphore"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/archive"
)

// Defaults of [Options] and of calls without a deadline of their own.
const (
	DefaultTimeout = 5 * time.Second  // for one request
	DefaultAppend  = 30 * time.Second // for an append whose context has no deadline
)

// Options locate the log. Exactly one of URL and Dial must be set.
type Options struct {
	// URL of a NATS server or cluster, such as "nats://token@host:4222";
	// several are separated by commas.
	URL string
	// InOrder has the servers of URL tried in their order. Otherwise the order is random.
	InOrder bool
	// Dial opens a connection to the process that currently serves the log. It is
	// called again for every reconnect, so that a new owner of the store is found. Its
	// context ends after Timeout.
	Dial func(ctx context.Context) (net.Conn, error)
	// Token that the server asks for; "" sends none. A token in the URL takes
	// precedence.
	Token string
	// FindToken, when set, replaces Token. It is called for every connection, so that
	// the token of a restarted server is found. It must not block.
	FindToken func() string
	// TLS, when set, verifies the server; nothing is then sent unencrypted. Without it
	// a tls:// URL, or a server that asks for TLS, uses the machine's certificates.
	TLS *tls.Config
	// Archive is the directory of the log's sealed part; "" if it is out of reach. It
	// need not exist while the live stream holds the whole log.
	Archive string
	// Replicas of the streams that [Log.Create] makes. 0 means three on a cluster with
	// at least three servers, and one otherwise.
	Replicas int
	// Name of this client in the server's listings.
	Name string
	// Timeout of one request, and of one attempt to connect. 0 means
	// [DefaultTimeout].
	Timeout time.Duration
	// Logger receives disconnects, permission violations and other asynchronous errors.
	// nil discards them.
	Logger *slog.Logger
	// Admit, when set, is called before facts are appended. Its error refuses them, for
	// example when the disk is nearly full; decisions pass.
	Admit func() error
	// ReadOnly, when set, is the error of every append, decision, lease and move of a
	// cursor.
	ReadOnly error
	// Deciding, when set, is called before each decision is appended, so that the
	// callee can make room for it. It cannot refuse.
	Deciding func()
	// Sign, when set, is called with each decision before it is appended after another of
	// its lane, and returns the signature that it gets; "" is none. Its error refuses the
	// decision. It may read the log.
	Sign func(ctx context.Context, l *Log, e events.Event, after uint64) (string, error)
	// Down, when set, returns why no process serves the log, or why the log takes
	// nothing. It is called when a request is abandoned at its deadline. nil means
	// unknown.
	Down func() error
	// OnDisconnect, when set, is called each time the connection is lost. It
	// must not block. The log reconnects by itself.
	OnDisconnect func(error)
}

func (o Options) withDefaults() (Options, error) {
	if (o.URL == "") == (o.Dial == nil) {
		return o, errors.New("connect to the log: exactly one of a URL and a dialer is required")
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Name == "" {
		o.Name = "ckptstore"
	}
	return o, nil
}

// Intervals of pings. The client leaves a server that answers none of two.
const (
	pingOne     = 5 * time.Second // there is no other server
	pingSeveral = time.Second     // another server of the cluster may answer
)

func (o Options) pingInterval() time.Duration {
	if strings.Contains(o.URL, ",") {
		return pingSeveral
	}
	return pingOne
}

// where names the server in errors, without its password.
func (o Options) where() string {
	if o.Dial != nil {
		return "the owner of the store"
	}
	return Redacted(o.URL)
}

// Log is a connection to the log of a store. Its methods may be called concurrently.
// Requests that fail because the connection is down are retried until the deadline of
// their context.
type Log struct {
	opts  Options
	nc    *nats.Conn
	js    jetstream.JetStream
	stall time.Duration // time without an event after which a reader checks the log
	// patience is how long the answers of a replicated log may be behind what was seen.
	patience time.Duration

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	queue  queue               // facts that wait for the committer
	room   *semaphore.Weighted // of all facts whose callers wait
	idle   chan struct{}       // closed when the committer has ended

	lanes   sync.Map // lane → chan struct{} of capacity 1, held by the current decider
	denials denials  // operations that the server did not allow this client

	mu       sync.Mutex
	epoch    int                        // counts connections
	checked  int                        // the epoch in which the stream was last verified as ours
	tail     tail                       // of the log that was opened; zero before
	store    string                     // identity of the store whose log was opened
	seen     uint64                     // the log has at least the events up to here
	behind   time.Time                  // since then servers have fewer; zero if the last one had not
	stale    time.Time                  // of the last answer of such a server
	old      *archive.Archive           // archive before the tail, once it was needed
	noOld    error                      // why the archive could not be opened
	noOldAt  time.Time                  // when that was
	opening  chan struct{}              // closed when it was opened; nil while no goroutine opens it
	watchers map[int]context.CancelFunc // readers to notify of a new connection
	watchID  int
}

// Connect opens a connection and keeps it: it reconnects forever, until [Log.Close]. If
// no server answers at the URL, Connect returns an error at once. It reads and creates
// nothing; see [Log.Open] and [Log.Create].
func Connect(ctx context.Context, o Options) (*Log, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if o.Dial == nil {
		if err := parse(o.URL); err != nil {
			return nil, fmt.Errorf("connect to the log: %w", err)
		}
	}
	l := &Log{
		opts: o, stall: 5 * time.Second, patience: behindPatience, epoch: 1,
		watchers: map[int]context.CancelFunc{}, idle: make(chan struct{}),
	}
	l.queue.ready, l.room = make(chan struct{}, 1), semaphore.NewWeighted(queueBytes)
	l.ctx, l.cancel = context.WithCancel(context.Background())

	target := o.URL
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.Timeout(o.Timeout),
		// A secret: it identifies the owner of leases and the inbox of answers. The
		// library's own inboxes can be guessed from names that others see.
		nats.CustomInboxPrefix(inbox + rand.Text()),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(50 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 200*time.Millisecond),
		// Nothing is buffered while the connection is down: callers that wait for an
		// acknowledgement send their messages again.
		nats.ReconnectBufSize(-1),
		nats.PingInterval(o.pingInterval()),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(l.onDisconnect),
		nats.ReconnectHandler(l.onReconnect),
		nats.ErrorHandler(l.onError),
		// A refused client keeps trying: the server's token may be corrected.
		nats.IgnoreAuthErrorAbort(),
	}
	opts = append(opts, nats.SetCustomDialer(dialer{l}))
	if o.InOrder {
		opts = append(opts, nats.DontRandomize())
	}
	if o.Dial != nil {
		target = "nats://owner"
		opts = append(opts, nats.SkipHostLookup())
	}
	opts = append(opts, o.credentials()...)
	nc, err := connect(ctx, target, opts)
	if err != nil {
		l.cancel()
		return nil, fmt.Errorf("connect to the log at %s: %w", o.where(), o.refused(err))
	}
	l.nc = nc
	if l.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(o.Timeout)); err != nil {
		l.cancel()
		nc.Close()
		return nil, fmt.Errorf("connect to the log at %s: %w", o.where(), err)
	}
	go l.commit()
	return l, nil
}

// connect returns when ctx ends, although the library's call knows no context. A
// connection that comes too late is closed.
func connect(ctx context.Context, target string, opts []nats.Option) (*nats.Conn, error) {
	type result struct {
		nc  *nats.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		nc, err := nats.Connect(target, opts...)
		done <- result{nc, err}
	}()
	select {
	case r := <-done:
		return r.nc, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.nc != nil {
				r.nc.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// Close closes the connection. Waiting appends get [ErrClosed]; their events may be
// stored. Close waits for the log's own goroutines.
func (l *Log) Close() {
	l.cancel()
	l.nc.Close()
	<-l.idle
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.old != nil {
		l.dropArchive()
	}
}

// dialer makes every connection of the log. The library announces a new connection only
// some time after it has begun to use it. So the dialer forgets the state of the server
// before.
type dialer struct{ l *Log }

func (d dialer) Dial(network, address string) (net.Conn, error) {
	d.l.renew()
	ctx, cancel := context.WithTimeout(d.l.ctx, d.l.opts.Timeout)
	defer cancel()
	if d.l.opts.Dial != nil {
		return d.l.opts.Dial(ctx)
	}
	var tcp net.Dialer
	return tcp.DialContext(ctx, network, address)
}

func (l *Log) onDisconnect(_ *nats.Conn, err error) {
	if l.ctx.Err() != nil {
		return
	}
	// OnDisconnect finds a successor for an owner that ends in order.
	level := slog.LevelWarn
	if l.opts.OnDisconnect != nil {
		level = slog.LevelInfo
		l.opts.OnDisconnect(err)
	}
	l.opts.Logger.Log(l.ctx, level, "connection to the log lost", "server", l.opts.where(), "error", err)
}

func (l *Log) onReconnect(*nats.Conn) {
	l.opts.Logger.Info("connection to the log is back", "server", l.opts.where())
	l.denials.bar(nil)
	l.renew()
}

// renew begins an epoch: the server behind the connection is unknown.
func (l *Log) renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.epoch++
	for _, cancel := range l.watchers {
		cancel()
	}
}

func (l *Log) onError(_ *nats.Conn, sub *nats.Subscription, err error) {
	if l.ctx.Err() != nil {
		return
	}
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		subject = l.denials.add(err, l.opts.user())
	case errors.Is(err, nats.ErrAuthRevoked), errors.Is(err, nats.ErrAuthExpired):
		l.denials.bar(l.opts.refused(err))
	}
	l.opts.Logger.Error("error from the log's server", "server", l.opts.where(), "subject", subject, "error", err)
}

// watch calls cancel at the next reconnect. The returned function stops the watch.
func (l *Log) watch(cancel context.CancelFunc) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watchID++
	id := l.watchID
	l.watchers[id] = cancel
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.watchers, id)
	}
}

// Redacted returns one or more URLs, separated by commas, for messages. It replaces
// everything before the host, which may be a password or a token. It does not show a
// URL that cannot be parsed.
func Redacted(urls string) string {
	list := strings.Split(urls, ",")
	for i, text := range list {
		text = strings.TrimSpace(text)
		if !strings.Contains(text, "://") {
			text = "nats://" + text // as the client reads it
		}
		u, err := url.Parse(text)
		switch {
		case err != nil || u.Host == "":
			list[i] = "a URL that cannot be read"
		case u.User != nil:
			u.User = url.User("xxxxx")
			fallthrough
		default:
			list[i] = (&url.URL{Scheme: u.Scheme, User: u.User, Host: u.Host}).String()
		}
	}
	return strings.Join(list, ",")
}

// parse checks URLs. The client's own error would show a password.
func parse(urls string) error {
	for i, text := range strings.Split(urls, ",") {
		if text = strings.TrimSpace(text); !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		if u, err := url.Parse(text); err != nil || u.Host == "" {
			return fmt.Errorf("URL %d of %s is invalid: want nats://HOST:PORT, characters such as @ and : in a password written as %%40 and %%3A", i+1, Redacted(urls))
		}
	}
	return nil
}
