package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/front"
)

// embeddedName is the name of an embedded server. Only an embedded server cuts its log.
const embeddedName = "ckptstore"

// ServerOptions configure an embedded server.
type ServerOptions struct {
	Dir    string       // created if absent; only this user may read it
	Name   string       // of the server; "" means [embeddedName]
	Logger *slog.Logger // nil discards the server's messages
	// Listen, when set, is where [Server.Listen] will let clients in.
	Listen *Listen
	// Archive is the directory of the log's sealed part. Fronts compare decisions with
	// it.
	Archive string
	// Admit and Deciding are called by a front before it passes on facts and decisions
	// of clients: see the fields of [Options].
	Admit    func() error
	Deciding func()
	// Signed, when set, is called by a front with each decision of a client, and the
	// sequence after which it is appended to its lane. An error of the kind
	// [problem.Denied] refuses it for good. It may read the log.
	Signed signedFunc
	// Bounds limit the costs of a front's clients; zero fields are its defaults.
	Bounds front.Limits
	// Unsynced acknowledges events before the disk has them: for logs that can be
	// generated again after a crash.
	Unsynced bool
}

// Server is an embedded NATS server with JetStream in a directory. It syncs everything
// to the disk before it acknowledges it, unless it is Unsynced. Clients come through
// [Server.Dial] and [Server.Serve], and over TCP after [Server.Listen], each through a
// front. All are users of one account, [Account], and none of them may delete, purge or
// update a stream: see [Server.OwnerOptions].
//
// Two servers on one directory would both acknowledge the same sequences. So the server
// holds a lock, flock(2), on the directory for its lifetime. The store's own lock is
// taken first, and names its holder.
type Server struct {
	ns      *server.Server
	doorman *doorman
	o       ServerOptions
	lock    *os.File // the directory

	standing  sync.Mutex // held while the front is created
	mu        sync.Mutex
	front     *front.Front // nil until clients need one
	guard     *guard       // of the front
	stopped   bool
	listeners map[net.Listener]bool
	serving   sync.WaitGroup
	stopOnce  sync.Once
	fatal     chan string
}

// StartServer starts a server and returns when it has recovered its streams and is
// healthy, never before. Without a deadline in ctx it gives up after a minute. It
// returns [ErrUnrecovered] at once if a stream could not be recovered. After an error,
// including the end of ctx, nothing keeps running: StartServer waits for a recovery in
// progress, because that writes to the directory.
func StartServer(ctx context.Context, o ServerOptions) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("start the log's server: no directory")
	}
	if o.Name == "" {
		o.Name = embeddedName
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := deadline(ctx, time.Minute)
	defer cancel()
	bad := func(err error) (*Server, error) {
		return nil, fmt.Errorf("start the log's server in %s: %w", o.Dir, err)
	}
	if err := os.MkdirAll(filepath.Clean(o.Dir), 0o700); err != nil {
		return bad(err)
	}
	lock, err := lockDir(ctx, o.Dir)
	if err != nil {
		return bad(err)
	}
	if o.Listen != nil {
		if err := o.Listen.Validate(); err != nil {
			return bad(errors.Join(err, lock.Close()))
		}
	}
	doorman := newDoorman()
	ns, err := o.newServer(doorman)
	if err == nil {
		doorman.account, err = ns.LookupAccount(Account)
	}
	if err != nil {
		return bad(errors.Join(err, lock.Close()))
	}
	s := &Server{ns: ns, doorman: doorman, o: o, lock: lock, listeners: map[net.Listener]bool{}, fatal: make(chan string, 1)}
	ns.SetLoggerV2(serverLog{o.Logger, s.fatal}, false, false, false)
	started := make(chan struct{})
	go func() {
		defer close(started)
		ns.Start()
	}()
	if err := s.healthy(ctx, started); err != nil {
		// The caller releases the lock of the directory when we return.
		<-started
		s.Shutdown()
		return bad(err)
	}
	return s, nil
}

// lockDir waits this long for the lock of a process that is ending.
const (
	lockPatience = 2 * time.Second
	lockAgain    = 5 * time.Millisecond
)

// lockDir takes the lock of a directory. The kernel releases it when the process ends, and
// releases a killed process's locks one after another: a process that has got the store's
// lock may come here before this one is free.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	patient, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || patient.Err() != nil {
			break
		}
		<-time.After(lockAgain)
	}
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, unix.EWOULDBLOCK):
		err = fmt.Errorf("%w: connect to that one, or end it", ErrServed)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (o ServerOptions) newServer(d *doorman) (*server.Server, error) {
	opts := &server.Options{}
	if err := opts.ProcessConfigString(accounts); err != nil {
		return nil, err
	}
	opts.ServerName = o.Name
	opts.JetStream, opts.StoreDir, opts.SyncAlways = true, o.Dir, !o.Unsynced
	// Clients over TCP come through a front.
	opts.DontListen, opts.NoSigs, opts.DisableJetStreamBanner = true, true, true
	opts.CustomClientAuthentication = d
	// Seconds to authenticate. A busy machine takes more than the default.
	opts.AuthTimeout = 30
	// A quota that no disk reaches: the store watches the disk itself, and the server's
	// own estimate would refuse decisions before it does.
	opts.JetStreamMaxStore, opts.JetStreamMaxMemory = 1<<50, 256<<20
	return server.NewServer(opts)
}

// healthy waits until the server is healthy or dies, or ctx ends. A stream that was not
// recovered when the start has ended never will be.
func (s *Server) healthy(ctx context.Context, started <-chan struct{}) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	status := "it is not up yet"
	for {
		select {
		case why := <-s.fatal:
			return fmt.Errorf("%s; look at what else uses the directory, and at its permissions", why)
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", context.Cause(ctx), status)
		case <-tick.C:
		}
		// Each of these alone can be true of a start that has failed.
		if !s.ns.ReadyForConnections(time.Millisecond) || !s.ns.JetStreamEnabled() {
			continue
		}
		over := false
		select {
		case <-started:
			over = true
		default:
		}
		h := s.ns.Healthz(nil)
		if h.StatusCode == 200 || h.Status == "ok" {
			return nil
		}
		status = h.Status + " " + h.Error
		if over && strings.Contains(h.Error, "could not be recovered") {
			return fmt.Errorf("%w: %s: restore it from a backup", ErrUnrecovered, h.Error)
		}
	}
}

// OwnerOptions returns the options of the owner's own connection. Only that connection
// may change the streams themselves; all other connections are clients that append and
// read.
func (s *Server) OwnerOptions() Options {
	return Options{Dial: func(context.Context) (net.Conn, error) { return s.Dial() }, Token: s.doorman.owner}
}

// Dial opens a connection within the process, with the rights of a client.
func (s *Server) Dial() (net.Conn, error) {
	conn, err := s.ns.InProcessConn()
	if err != nil {
		return nil, fmt.Errorf("connect to the embedded server: %w", err)
	}
	return conn, nil
}

// serveStand bounds the time to create a front.
const serveStand = time.Minute

// Serve lets the clients of a unix socket in, through a front. It returns nil when l is
// closed, which [Server.Shutdown] does too. The listener alone controls who may
// connect, for example by the mode of the socket; the kernel identifies the peer. The
// log must exist.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		_ = l.Close()
		return nil
	}
	s.listeners[l] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
		_ = l.Close()
	}()
	ctx, cancel := context.WithTimeout(context.Background(), serveStand)
	defer cancel()
	f, err := s.stand(ctx)
	switch {
	case errors.Is(err, ErrClosed):
		return nil
	case err != nil:
		return fmt.Errorf("serve the log on %s: %w", l.Addr(), err)
	}
	// A process that connects here can open the files of the store too.
	own := front.OfUser(uint32(os.Geteuid())).Name //nolint:gosec // of this process
	return f.Serve(l, front.Door{Who: ofPeer, Trusted: own, Grant: front.Grant{Delete: true, Access: true}})
}

// ofPeer returns the user of the process at the other end of a unix socket.
func ofPeer(conn net.Conn) (front.Principal, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return front.Principal{}, fmt.Errorf("identify the peer of %s: not a unix socket", conn.RemoteAddr())
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return front.Principal{}, err
	}
	var cred *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) { cred, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, asked); err != nil {
		return front.Principal{}, err
	}
	return front.OfUser(cred.Uid), nil
}

// Disconnect closes all connections except those of [Server.Dial], and refuses new
// ones. Later appends are acknowledged to none of the closed connections, so the next
// end of the log that is read includes all acknowledged appends.
func (s *Server) Disconnect() {
	s.mu.Lock()
	s.stopped = true
	for l := range s.listeners {
		_ = l.Close()
	}
	f, g := s.front, s.guard
	s.mu.Unlock()
	if f != nil {
		f.Close()
	}
	if g != nil {
		g.close()
	}
	s.serving.Wait()
}

// Shutdown closes all connections, stops the server and waits until its files are
// closed. The directory may be opened again afterwards. Shutdown may be called more
// than once.
func (s *Server) Shutdown() {
	s.Disconnect()
	s.stopOnce.Do(s.ns.Shutdown)
	s.ns.WaitForShutdown()
	// A forked child holds the file too until it calls exec, so closing alone would not
	// release the lock. On a second call the file is closed already.
	_ = unix.Flock(int(s.lock.Fd()), unix.LOCK_UN)
	_ = s.lock.Close()
}

// serverLog passes the server's messages on. A fatal error does not exit the process
// here; it is passed to the waiting StartServer.
type serverLog struct {
	to    *slog.Logger
	fatal chan string
}

var _ server.Logger = serverLog{}

func (l serverLog) Noticef(format string, v ...any) { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Warnf(format string, v ...any)   { l.to.Warn(fmt.Sprintf(format, v...)) }
func (l serverLog) Errorf(format string, v ...any)  { l.to.Error(fmt.Sprintf(format, v...)) }
func (l serverLog) Debugf(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Tracef(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Fatalf(format string, v ...any) {
	message := fmt.Sprintf(format, v...)
	l.to.Error(message)
	select {
	case l.fatal <- message:
	default:
	}
}

// ErrBroken reports that an embedded server cannot write its files.
var ErrBroken = errors.New("the log's server cannot write")

// healthEvery is the interval of the checks of [Server.Watch].
const healthEvery = 200 * time.Millisecond

// Watch returns when the server can no longer write, with an error that is [ErrBroken]
// and includes the cause, or when ctx ends, with its cause.
//
// After one failed write, for example on a full disk, the server accepts nothing more
// into that stream for its lifetime, and does not answer: an append waits for its
// deadline. Everything it acknowledged is on the disk, and a restarted server continues
// after it.
func (s *Server) Watch(ctx context.Context) error {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if why := s.broken(); why != "" {
			return fmt.Errorf("%w: %s", ErrBroken, why)
		}
	}
}

// broken returns a description of what cannot be written, or "".
func (s *Server) broken() string {
	if !s.ns.JetStreamEnabled() {
		return "it has stopped its streams"
	}
	// All other health errors may be transient: on a busy machine the server is
	// occasionally not ready within a millisecond.
	if h := s.ns.Healthz(nil); strings.Contains(h.Error, "write error") {
		return strings.TrimSpace(h.Error)
	}
	return ""
}

// servedSubject is where the owner of a served store answers. It is not a subject of
// the log.
const servedSubject = "ckptstore.served"

// Served is the owner's description of its directory, for clients that cannot read
// owner.json.
type Served struct {
	Store     string `json:"store"`     // identity
	Directory string `json:"directory"` // absolute, on Host
	Host      string `json:"host"`
}

// Announce answers [Log.Served] until the log is closed.
func (l *Log) Announce(s Served) error {
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("announce the store: %w", err)
	}
	_, err = l.nc.Subscribe(servedSubject, func(m *nats.Msg) {
		// A client without an answer asks again.
		_ = m.Respond(text)
	})
	if err == nil {
		err = l.nc.FlushTimeout(l.opts.Timeout)
	}
	if err != nil {
		return fmt.Errorf("announce the store: %w", err)
	}
	return nil
}

// Whoami asks the owner of the store, or the gateway, who this client is.
func (l *Log) Whoami(ctx context.Context) (front.Who, error) {
	ctx, cancel := deadline(ctx, 10*time.Second)
	defer cancel()
	var w front.Who
	err := l.retry(concerning(ctx, subjects(front.WhoSubject)), func(ctx context.Context) error {
		m, err := l.nc.RequestWithContext(ctx, front.WhoSubject, nil)
		if errors.Is(err, nats.ErrNoResponders) {
			return fmt.Errorf("%w: it is a NATS server, which does not tell: ask the operator of that server", ErrNotAllowed)
		}
		if err != nil {
			return err
		}
		return json.Unmarshal(m.Data, &w)
	})
	if err == nil && w.Principal == "" {
		err = fmt.Errorf("%w: it is of an older version, which does not tell", ErrNotAllowed)
	}
	if err != nil {
		return front.Who{}, fmt.Errorf("ask %s who this is: %w", l.opts.where(), err)
	}
	return w, nil
}

// Served asks the owner of the store for its directory. There is no answer if the log
// is on a separate server.
func (l *Log) Served(ctx context.Context) (Served, error) {
	ctx, cancel := deadline(ctx, 10*time.Second)
	defer cancel()
	var s Served
	err := l.retry(ctx, func(ctx context.Context) error {
		m, err := l.nc.RequestWithContext(ctx, servedSubject, nil)
		if err != nil {
			return err
		}
		return json.Unmarshal(m.Data, &s)
	})
	if err != nil {
		return Served{}, fmt.Errorf("ask the owner at %s for the store's directory: %w", l.opts.where(), err)
	}
	return s, nil
}
