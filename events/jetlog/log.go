// Package jetlog keeps the events of a store in one JetStream stream. It is
// the only package that knows NATS.
//
//	log       all events, from sequence 1 without a hole: nothing in it ever
//	          expires, is purged or deleted
//	tail      the live stream over the subjects ckpt.>, on file: CKPT with all of
//	          the log, or CKPT_<first> with what follows the archive
//	archive   the log before its tail, in sealed files: see package archive
//	fact      appended unconditionally ([Log.Append]); what is queued while an
//	          append is in flight goes out together as one atomic batch
//	decision  appended only if its lane has not moved ([Log.Decide])
//	lane      ckpt.<run>.<trial>.s.>, the one filter of an aggregate
//	lease     a key of the bucket CKPT_LEASES, held for a term ([Log.Lease])
//	cursor    a key of the bucket CKPT_CURSORS: how far a subscriber has come
//	witness   a key of the bucket CKPT_CURSOR_WITNESSES: that there is a cursor
//	server    an embedded NATS server in a directory ([StartServer]); its
//	          clients are users of the account ckpt, and come in through the
//	          process, a unix socket, or TCP with a token or certificate
//
// A server's directory is named by the account:
//
//	DIR/jetstream/ckpt/streams/CKPT/                      the log, or its tail
//	DIR/jetstream/ckpt/streams/KV_CKPT_LEASES/            the leases
//	DIR/jetstream/ckpt/streams/KV_CKPT_CURSORS/           the cursors
//	DIR/jetstream/ckpt/streams/KV_CKPT_CURSOR_WITNESSES/  their witnesses
//
// A message is stored as package events encodes it: the subject, the headers
// in the spelling of the wire, the body byte for byte. The append adds
//
//	Nats-Expected-Stream                           to what is sent singly
//	Nats-Expected-Last-Subject-Sequence[-Subject]  to a decision
//	ckpt-follows                                   to one that follows the archive
//	Nats-Expected-Last-Sequence                    to store.created
//	Nats-Batch-Id, -Sequence, -Commit              to the facts of a batch
//
// and readers ignore all of them.
//
// A lost acknowledgement is never a lost event and never a second one: every
// append is retried under the ID of its event, and the server knows the IDs
// of the last two minutes. A retry that comes later may store a fact twice;
// folds ignore the second. A decision is looked for in its lane, however old.
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

	"github.com/ckptstore/ckptstore/internal/archive"
)

// Defaults of [Options] and of calls without a deadline of their own.
const (
	DefaultTimeout = 5 * time.Second  // for one request
	DefaultAppend  = 30 * time.Second // for an append whose context has no deadline
)

// Options say where the log is. Exactly one of URL and Dial is set.
type Options struct {
	// URL of a NATS server or cluster, such as "nats://token@host:4222";
	// several are separated by commas.
	URL string
	// Dial opens a connection to whoever serves the log now. It is called
	// again for every reconnect, so that a new owner of the store is found.
	// Its context ends after Timeout.
	Dial func(ctx context.Context) (net.Conn, error)
	// Token that the server asks for; "" shows none. One in the URL goes before.
	Token string
	// FindToken, when set, takes the place of Token. It is called for every
	// connection, so that the token of a server that has started again is found.
	// It must not block.
	FindToken func() string
	// TLS, when set, is how the server is checked; nothing is then sent in
	// clear. Without it a tls:// URL, or a server that asks for it, uses the
	// machine's certificates.
	TLS *tls.Config
	// Archive is the directory of the log's sealed part; "" if it cannot be reached.
	// It need not exist while the live stream has all of the log.
	Archive string
	// Replicas of what [Log.Create] makes. 0 means three on a cluster that has
	// as many servers, and one otherwise.
	Replicas int
	// Name of this client in the server's listings.
	Name string
	// Timeout of one request, and of one attempt to connect. 0 means
	// [DefaultTimeout].
	Timeout time.Duration
	// Logger hears of disconnects, permission violations and other
	// asynchronous errors. nil discards them.
	Logger *slog.Logger
	// Admit, when set, is asked before facts are appended. Its error refuses
	// them, as when the disk is nearly full; decisions pass.
	Admit func() error
	// ReadOnly, when set, is the error of every append, decision, lease and move of
	// a cursor.
	ReadOnly error
	// Deciding, when set, is called before each decision is appended, so that
	// room can be made for it. It refuses nothing.
	Deciding func()
	// Down, when set, is asked why nobody serves the log, or why it takes nothing,
	// when a request is given up at its deadline. nil is no answer.
	Down func() error
	// OnDisconnect, when set, is called each time the connection is lost. It
	// must not block. The log reconnects by itself.
	OnDisconnect func(error)
}

func (o Options) withDefaults() (Options, error) {
	if (o.URL == "") == (o.Dial == nil) {
		return o, errors.New("connect to the log: exactly one of a URL and a dialer is needed")
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

// where names the server in errors, without its password.
func (o Options) where() string {
	if o.Dial != nil {
		return "the owner of the store"
	}
	return Redacted(o.URL)
}

// Log is a connection to the log of a store. Its methods may be called
// concurrently. Requests that fail because the connection is down are retried
// until the deadline of their context.
type Log struct {
	opts  Options
	nc    *nats.Conn
	js    jetstream.JetStream
	stall time.Duration // without an event, after which a reader looks at the log again

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	queue  queue               // facts that wait for the committer
	room   *semaphore.Weighted // of all facts whose callers wait
	idle   chan struct{}       // closed when the committer has ended

	lanes   sync.Map // lane → chan struct{} of capacity 1: who decides now
	denials denials  // what the server did not let this client do

	mu       sync.Mutex
	epoch    int                        // counts connections
	checked  int                        // the epoch whose stream was seen to be ours
	tail     tail                       // of the log that was opened; zero before
	store    string                     // whose log was opened
	old      *archive.Archive           // before the tail, once it was needed
	noOld    error                      // why it could not be opened
	noOldAt  time.Time                  // when that was
	opening  chan struct{}              // closed when it was opened; nil while nobody opens it
	watchers map[int]context.CancelFunc // readers, to be told of a new connection
	watchID  int
}

// Connect opens a connection and keeps it: a lost one is made again, for ever,
// until [Log.Close]. Nobody behind the URL is an error at once. Nothing is
// read or created; see [Log.Open] and [Log.Create].
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
		opts: o, stall: 5 * time.Second, epoch: 1,
		watchers: map[int]context.CancelFunc{}, idle: make(chan struct{}),
	}
	l.queue.ready, l.room = make(chan struct{}, 1), semaphore.NewWeighted(queueBytes)
	l.ctx, l.cancel = context.WithCancel(context.Background())

	target := o.URL
	opts := []nats.Option{
		nats.Name(o.Name),
		nats.Timeout(o.Timeout),
		// A secret: it is whose the leases are, and where answers go. The
		// library's own inboxes can be guessed from names that others see.
		nats.CustomInboxPrefix(inbox + rand.Text()),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(50 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 200*time.Millisecond),
		// Nothing is buffered while the connection is down: what is sent to the
		// next server is sent again by whoever waits for its acknowledgement.
		nats.ReconnectBufSize(-1),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(l.onDisconnect),
		nats.ReconnectHandler(l.onReconnect),
		nats.ErrorHandler(l.onError),
		// Who is refused keeps trying: the server's token may be put right.
		nats.IgnoreAuthErrorAbort(),
	}
	opts = append(opts, nats.SetCustomDialer(dialer{l}))
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

// connect ends with ctx although the library's call knows no context. A
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

// Close ends the connection. Appends that still wait get [ErrClosed]; what
// they sent may be stored. Close waits for the log's own goroutines.
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

// dialer makes every connection of the log. The library says that there is a
// new one some time after it has begun to use it: what was known of the server
// is forgotten before.
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
	// An owner that ends in order is replaced by whoever is told of it here.
	level := slog.LevelWarn
	if l.opts.OnDisconnect != nil {
		level = slog.LevelInfo
		l.opts.OnDisconnect(err)
	}
	l.opts.Logger.Log(l.ctx, level, "connection to the log lost", "server", l.opts.where(), "error", err)
}

func (l *Log) onReconnect(*nats.Conn) {
	l.opts.Logger.Info("connection to the log is back", "server", l.opts.where())
	l.renew()
}

// renew begins an epoch: nothing is known of the server behind the connection.
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
	if errors.Is(err, nats.ErrPermissionViolation) {
		subject = l.denials.add(err, l.opts.user())
	}
	l.opts.Logger.Error("error from the log's server", "server", l.opts.where(), "subject", subject, "error", err)
}

// watch calls cancel at the next reconnect. The result takes that back.
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

// Redacted is a URL, or several separated by commas, for messages: what stands
// before the host, which may be a password or a token, is replaced. One that
// cannot be parsed is not shown.
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
			return fmt.Errorf("URL %d of %s is none: want nats://HOST:PORT, characters such as @ and : in a password written as %%40 and %%3A", i+1, Redacted(urls))
		}
	}
	return nil
}
