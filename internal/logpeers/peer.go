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
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/durable"
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
	copy  copyID
	lock  *os.File
	claim *claim.Claim
}

// lockAgain is the pause before a copy that another process has is tried again.
const lockAgain = 50 * time.Millisecond

// holdCopy locks and claims the directory of a copy, and checks that the copy in it is want.
// wait bounds the wait for the lock of a process of this machine. Its caller releases it.
func holdCopy(ctx context.Context, dir string, want copyID, formed bool, wait time.Duration, log *slog.Logger) (*hold, error) {
	locking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	h, err := lockCopy(locking, dir, want, formed)
	if err != nil {
		return nil, err
	}
	if err := h.take(ctx, formed, log); err != nil {
		return nil, errors.Join(err, h.release())
	}
	return h, nil
}

// lockCopy locks the directory of a copy on this machine.
func lockCopy(ctx context.Context, dir string, want copyID, formed bool) (_ *hold, err error) {
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
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return &hold{dir: dir, copy: want, lock: f}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		select {
		case <-time.After(lockAgain):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: another process serves %s: end it, or connect to it", context.Cause(ctx), dir)
		}
	}
}

// take claims a locked directory on all machines, and checks the copy. The claim of a machine that
// is dead delays it by the term of claims.
func (h *hold) take(ctx context.Context, formed bool, log *slog.Logger) (err error) {
	if h.claim, err = claim.Take(ctx, h.dir, log); err != nil {
		return err
	}
	return h.copy.identify(h.dir, formed)
}

// intact returns an error if the directory no longer has the copy that was served from it.
func (h *hold) intact() error {
	locked, err := h.lock.Stat()
	if err != nil {
		return err
	}
	now, err := os.Stat(h.dir)
	if err == nil && !os.SameFile(locked, now) {
		err = fmt.Errorf("%w: %s is another directory than before", ErrForeignCopy, h.dir)
	}
	if err != nil {
		return err
	}
	return h.copy.identify(h.dir, true)
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
	held    *hold
	log     *slog.Logger
	options *server.Options
	token   string
	quota   chan struct{} // of the copy's disk, met by the server that runs
	over    context.CancelFunc
	ends    sync.WaitGroup

	mu sync.Mutex
	ns *server.Server // another one after a full disk
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
	life, over := context.WithCancelCause(context.Background())
	p := &Peer{held: held, log: log.With("copy", k), options: o, token: s.Token, quota: make(chan struct{}, 1), over: func() { over(nil) }}
	if p.ns, err = p.start(ctx); err != nil {
		over(nil)
		return nil, err
	}
	p.ends.Go(func() {
		select {
		case <-held.lost():
			over(errTaken)
		case <-life.Done():
		}
	})
	p.ends.Go(func() { p.watch(life) })
	return p, nil
}

// errTaken ends a server whose copy another machine has taken.
var errTaken = errors.New("copy of the log was taken by another machine")

// start returns a server that accepts connections.
func (p *Peer) start(ctx context.Context) (*server.Server, error) {
	o, door := p.options.Clone(), &door{token: p.token}
	o.CustomClientAuthentication = door
	ns, err := server.NewServer(o)
	if err != nil {
		return nil, err
	}
	if door.account, err = ns.LookupAccount(account); err != nil {
		return nil, err
	}
	fatal := make(chan string, 1)
	ns.SetLoggerV2(serverLog{p.log, fatal, p.quota, o.StoreDir}, false, false, false)
	go ns.Start()
	limit, cancel := context.WithTimeout(ctx, listenTime)
	defer cancel()
	for !ns.ReadyForConnections(50 * time.Millisecond) {
		select {
		case why := <-fatal:
			end(ns)
			if strings.Contains(why, syscall.EADDRINUSE.Error()) {
				return nil, fmt.Errorf("%s: start the trainer again (%w)", why, syscall.EADDRINUSE)
			}
			return nil, fmt.Errorf("%s: start the trainer again", why)
		case <-limit.Done():
			end(ns)
			return nil, fmt.Errorf("the server in %s is not up: %w", p.held.dir, context.Cause(limit))
		default:
		}
	}
	return ns, nil
}

func end(ns *server.Server) {
	ns.Shutdown()
	ns.WaitForShutdown()
}

// watch ends the server when another machine takes the copy, and starts it again after its
// disk was full: the server stops serving its copy then, until it is started again. On a quota
// that is used up, the server only stops the streams that could not write; watch stops the rest.
// It also notes when a copy that was made again has caught up.
func (p *Peer) watch(life context.Context) {
	var restarted time.Time
	filling := isFilling(p.held.dir)
	for pause, wait, stopped := fullPoll, fullPoll, false; ; {
		select {
		case <-time.After(wait):
		case <-p.quota:
			if err := p.server().ShutdownJetStream(); err != nil {
				p.log.Warn("copy of the log not stopped", "dir", p.held.dir, "error", err)
			}
		case <-life.Done():
			if err := context.Cause(life); errors.Is(err, errTaken) {
				p.log.Error("copy of the log not served", "dir", p.held.dir, "error", err)
				p.server().Shutdown()
			}
			return
		}
		if p.server().JetStreamEnabled() {
			if stopped = false; time.Since(restarted) > mostPoll {
				pause = fullPoll
			}
			wait = pause
			if filling && p.filled() {
				filling = false
				if err := durableRemove(filepath.Join(p.held.dir, fillingName)); err != nil {
					p.log.Warn("copy of the log still marked as filling", "dir", p.held.dir, "error", err)
				}
			}
			continue
		}
		if !stopped {
			stopped = true
			p.log.Error("copy of the log not served: its disk or its quota is full, or the disk fails; the other copies serve the log", "dir", p.held.dir, "free_bytes_wanted", roomy)
		}
		if room(p.held.dir) < roomy {
			wait = pause
			continue
		}
		if !reserve(p.held.dir, roomy) {
			wait = min(2*wait, mostProbe)
			continue
		}
		if err := p.held.intact(); err != nil {
			p.log.Error("copy of the log not served again", "dir", p.held.dir, "error", err)
			return
		}
		end(p.server())
		select {
		case <-p.quota: // of the server that has ended
		default:
		}
		ns, err := p.start(life)
		if err != nil {
			p.log.Warn("copy of the log not served again", "dir", p.held.dir, "error", err)
		} else {
			p.mu.Lock()
			p.ns = ns
			p.mu.Unlock()
			p.log.Info("copy of the log is served again", "dir", p.held.dir)
		}
		pause, restarted = min(2*pause, mostPoll), time.Now()
		wait = pause
	}
}

// A copy whose disk was full is served again when roomy bytes are free. The server's own files
// grow by blocks of up to 8 MiB. The pauses grow while that does not help, and while a quota does not
// allow it: some filesystems write all of roomy to find out.
const (
	roomy     = 64 << 20
	fullPoll  = time.Second
	mostPoll  = time.Minute
	mostProbe = 30 * time.Second
)

// room returns the free bytes of a directory's disk; 0 if it does not answer.
func room(dir string) int64 {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return 0
	}
	return int64(s.Bavail) * s.Bsize
}

// reserve reports whether a directory's disk has room for so many bytes more, which a quota may
// not allow: it is not in what the disk reports as free.
func reserve(dir string, size int64) bool {
	f, err := os.CreateTemp(dir, durable.TempPrefix+"room-")
	if err != nil {
		return false
	}
	defer func() { _ = errors.Join(f.Close(), os.Remove(f.Name())) }() // empty, or soon tried again
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err == nil
	}
	if _, err := f.Write(make([]byte, size)); err != nil {
		return false
	}
	return f.Sync() == nil
}

// server returns the server that runs now.
func (p *Peer) server() *server.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ns
}

func hostPort(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	return host, port, err
}

// current reports whether the peers have a leader and this one follows it.
func (p *Peer) current() bool { return p.server().JetStreamIsCurrent() }

// settled reports whether the streams have leaders too, which a request would wait for.
func (p *Peer) settled() bool {
	h := p.server().Healthz(nil)
	return p.current() && h.StatusCode == 200
}

// filled reports whether a copy has caught up, with the log too and not only with the peers' own group.
func (p *Peer) filled() bool {
	for group := range positions(p.server()) {
		if strings.HasPrefix(group, account+"/") {
			return p.settled()
		}
	}
	return false
}

// stop ends the server, and keeps the directory.
func (p *Peer) stop() {
	p.over()
	p.ends.Wait()
	end(p.server())
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

// serverLog passes the server's messages on, the ordinary ones for debugging only. Its messages are
// all that tells of a quota: the server knows a full disk by its error's text, and no quota.
type serverLog struct {
	to    *slog.Logger
	fatal chan string
	quota chan struct{}
	dir   string // of the copy; the leader's server also writes what the disks of others refuse
}

var _ server.Logger = serverLog{}

func (l serverLog) Noticef(format string, v ...any) { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Warnf(format string, v ...any)   { l.failure(fmt.Sprintf(format, v...)) }
func (l serverLog) Errorf(format string, v ...any)  { l.failure(fmt.Sprintf(format, v...)) }
func (l serverLog) Debugf(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Tracef(format string, v ...any)  { l.to.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) failure(text string) {
	l.to.Debug(text)
	if strings.Contains(text, unix.EDQUOT.Error()) && strings.Contains(text, l.dir+string(filepath.Separator)) {
		select {
		case l.quota <- struct{}{}:
		default:
		}
	}
}

func (l serverLog) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- fmt.Sprintf(format, v...):
	default:
	}
}
