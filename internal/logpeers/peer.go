package logpeers

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/claim"
)

// account has the log, as on every server of a store.
const account = "ckpt"

const accounts = `accounts { ` + account + ` { jetstream: enabled }, SYS {} }
system_account: SYS`

// destructive lists the requests that could change the log without an event. No client
// makes them.
var destructive = []string{
	"$JS.API.STREAM.UPDATE.*", "$JS.API.STREAM.DELETE.*", "$JS.API.STREAM.PURGE.*",
	"$JS.API.STREAM.RESTORE.*", "$JS.API.STREAM.MSG.DELETE.*", "$JS.API.STREAM.PEER.REMOVE.*",
}

// hold is the exclusive use of a copy's directory.
type hold struct {
	dir   string
	lock  *os.File
	claim *claim.Claim
}

// lockAgain is the pause before a copy that another process has is tried again.
const lockAgain = 50 * time.Millisecond

// holdCopy locks and claims the directory of a copy, and checks that the copy in it is want.
// wait bounds the wait for the lock of a process of this machine. A claim of another machine that
// is dead delays it by the term of claims. Its caller releases it.
func holdCopy(ctx context.Context, dir string, want copyID, formed bool, wait time.Duration, log *slog.Logger) (_ *hold, err error) {
	if formed && !hasCopy(dir) {
		return nil, lostCopy(dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	h := &hold{dir: dir, lock: f}
	defer func() {
		if err != nil && h.claim != nil {
			err = errors.Join(err, h.claim.Release())
		}
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	locking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		select {
		case <-time.After(lockAgain):
		case <-locking.Done():
			return nil, fmt.Errorf("%w: another process serves %s: end it, or connect to it", context.Cause(locking), dir)
		}
	}
	if h.claim, err = claim.Take(ctx, dir, log); err != nil {
		return nil, err
	}
	if err := want.identify(dir, formed); err != nil {
		return nil, err
	}
	return h, nil
}

// lost is closed when another machine has taken the directory; nil if that cannot be.
func (h *hold) lost() <-chan struct{} {
	if h.claim == nil {
		return nil
	}
	return h.claim.Lost()
}

func (h *hold) release() error {
	var err error
	if h.claim != nil {
		err = h.claim.Release()
	}
	// A forked child holds the file too until it calls exec.
	return errors.Join(err, unix.Flock(int(h.lock.Fd()), unix.LOCK_UN), h.lock.Close())
}

// Peer is this process's server of a copy.
type Peer struct {
	ns   *server.Server
	held *hold
	log  *slog.Logger
	over chan struct{}
	ends sync.WaitGroup
	once sync.Once
}

// listenTime bounds the start of a server. The cluster may have no leader then.
const listenTime = 30 * time.Second

// startPeer starts the server of a copy with the others where their cards are.
func startPeer(ctx context.Context, k int, held *hold, all [Copies]*card, s *secret, log *slog.Logger) (*Peer, error) {
	o := &server.Options{}
	if err := o.ProcessConfigString(accounts); err != nil {
		return nil, err
	}
	o.ServerName, o.NoSigs, o.DisableJetStreamBanner = "copy-"+strconv.Itoa(k), true, true
	o.JetStream, o.StoreDir, o.SyncAlways = true, held.dir, true
	o.JetStreamMaxStore, o.JetStreamMaxMemory = 1<<50, 256<<20
	o.TLSConfig, o.TLSTimeout, o.AuthTimeout = s.server(), 10, 30
	o.Cluster = server.ClusterOpts{
		Name: "ckptstore", TLSConfig: s.route(), TLSTimeout: 10, AuthTimeout: 30, Username: "peer", Password: s.Token,
	}
	var err error
	if o.Host, o.Port, err = hostPort(all[k].Client); err != nil {
		return nil, err
	}
	if o.Cluster.Host, o.Cluster.Port, err = hostPort(all[k].Route); err != nil {
		return nil, err
	}
	for _, c := range all {
		if c != nil {
			o.Routes = append(o.Routes, &url.URL{Scheme: "nats", Host: c.Route, User: url.UserPassword("peer", s.Token)})
		}
	}
	door := &door{token: s.Token}
	o.CustomClientAuthentication = door
	ns, err := server.NewServer(o)
	if err != nil {
		return nil, err
	}
	if door.account, err = ns.LookupAccount(account); err != nil {
		return nil, err
	}
	fatal := make(chan string, 1)
	ns.SetLoggerV2(serverLog{log.With("copy", k), fatal}, false, false, false)
	p := &Peer{ns: ns, held: held, log: log, over: make(chan struct{})}
	p.ends.Go(ns.Start)
	limit, cancel := context.WithTimeout(ctx, listenTime)
	defer cancel()
	for !ns.ReadyForConnections(50 * time.Millisecond) {
		select {
		case why := <-fatal:
			p.stop()
			return nil, fmt.Errorf("%s: start the trainer again", why)
		case <-limit.Done():
			p.stop()
			return nil, fmt.Errorf("the server in %s is not up: %w", held.dir, context.Cause(limit))
		default:
		}
	}
	p.ends.Go(func() {
		select {
		case <-held.lost():
			log.Error("copy of the log was taken by another machine; its server here ends", "dir", held.dir)
			ns.Shutdown()
		case <-p.over:
		}
	})
	return p, nil
}

func hostPort(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	return host, port, err
}

// current reports whether the peers have a leader and this one follows it.
func (p *Peer) current() bool { return p.ns.JetStreamIsCurrent() }

// settled reports whether the streams have leaders too, which a request would wait for.
func (p *Peer) settled() bool {
	h := p.ns.Healthz(nil)
	return p.current() && h.StatusCode == 200
}

// stop ends the server, and keeps the directory.
func (p *Peer) stop() {
	p.once.Do(func() { close(p.over) })
	p.ns.Shutdown()
	p.ns.WaitForShutdown()
	p.ends.Wait()
}

// Close ends the server and releases its copy. The others serve the log as long as they
// are two.
func (p *Peer) Close() {
	p.stop()
	if err := p.held.release(); err != nil {
		p.log.Warn("copy of the log not released", "dir", p.held.dir, "error", err)
	}
}

// door lets clients in that show the token.
type door struct {
	token   string
	account *server.Account
}

var _ server.Authentication = (*door)(nil)

// Check implements [server.Authentication].
func (d *door) Check(c server.ClientAuthentication) bool {
	if c.Kind() != server.CLIENT || subtle.ConstantTimeCompare([]byte(c.GetOpts().Token), []byte(d.token)) != 1 {
		return false
	}
	c.RegisterUser(&server.User{Username: "client", Account: d.account, Permissions: &server.Permissions{
		Publish: &server.SubjectPermission{Deny: destructive},
	}})
	return true
}

// serverLog passes the server's messages on, the ordinary ones for debugging only.
type serverLog struct {
	to    *slog.Logger
	fatal chan string
}

var _ server.Logger = serverLog{}

func (l serverLog) Noticef(format string, v ...any) { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Warnf(format string, v ...any)   { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Errorf(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Debugf(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Tracef(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default:
	}
}
