package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
)

// ownership is everything that runs while this process owns the store. leave ends it in the
// reverse order of its fields.
type ownership struct {
	dir     string
	store   *Store
	since   time.Time
	why     error // the failure; set before the owner is notified
	lock    *hold
	card    card // its owner.json
	server  *jetlog.Server
	log     *jetlog.Log // the owner's own connection
	views   *views.Views
	keeper  *ledger.Keeper // nil without tamper evidence
	settler *settler
	api     *http.Server
	socket  net.Listener   // for NATS
	token   *sockets.Token // that clients over TCP show; nil if it was not made here
	served  chan error     // two: of the API and of the socket
	nserve  int
	unload  func() // stops keeping the ballast and watching the server
	unshare func() // stops sharing files with the store's group
}

// takeOwnership starts the server, brings the views up to date, repairs what a crash has left,
// and opens the sockets. On success the ownership holds the lock; on an error the caller keeps
// it.
func takeOwnership(ctx context.Context, s *Store, dir string, lock *hold) (_ *ownership, err error) {
	w := &ownership{dir: dir, store: s, since: time.Now(), served: make(chan error, 2)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("own the store %s: %w", dir, damage(err)), w.close())
		}
	}()
	if w.unshare, err = s.shareFiles(context.WithoutCancel(ctx), dir); err != nil {
		return w, err
	}
	opened, err := openLog(ctx, s, dir, s.opts.Listen)
	w.server, w.log = opened.server, opened.log
	if err != nil {
		return w, err
	}
	var keeper *ledger.Keeper
	if s.unwritable() == nil && ledger.On(dir) { // before anything is appended
		if keeper, err = ledger.Open(ctx, ledger.Options{
			Store: dir, Log: ledgerLog{w.log}, Fed: true, Logger: s.opts.Logger, Lost: lock.claim.Lost(), Step: s.opts.auditStep, Reread: &s.reread,
			Stamp: func() events.Stamp { return Stamp("owner") },
		}); err != nil {
			return w, err
		}
	}
	w.keeper = keeper
	if w.views, err = views.Open(ctx, s.viewsOf(filepath.Join(dir, "views"), fedLog{w.log, keeper})); err != nil {
		return w, err
	}
	settled := opened.settled
	if !s.opts.Reader {
		if settled, err = repair(ctx, s, w.log, w.views, settled); err != nil {
			return w, err
		}
	}
	w.settler = &settler{store: s, log: w.log, views: w.views}
	w.settler.settled.Store(settled)
	if err = w.listen(ctx, s); err != nil {
		return w, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var kept sync.WaitGroup
	kept.Go(func() { w.watch(life, s, lock) })
	kept.Go(func() { w.keepEnd(life, s) })
	if s.unwritable() == nil { // a copy stays as it was made
		kept.Go(func() { w.keepSealed(life, s) })
	}
	if keeper != nil {
		kept.Go(func() { keeper.Keep(life) })
	}
	if !s.opts.Reader {
		kept.Go(func() { s.ballast().Keep(life) })
		kept.Go(func() { w.settler.keep(life, settleEvery) })
		if s.unwritable() == nil && !s.opts.LeaveVoids {
			kept.Go(func() { s.recordVoids(life, w.log, w.views) })
		}
	}
	w.unload = func() {
		cancel()
		kept.Wait()
	}
	w.lock = lock
	return w, nil
}

// sweep removes what dead processes have left in the runtime directories.
func (s *Store) sweep() error {
	// Owners before this one are gone, but their sockets may remain.
	stale, err := filepath.Glob(filepath.Join(s.sockets(), "o*"))
	if err != nil {
		return err
	}
	for _, path := range stale {
		// A socket that answers belongs to a copy of this store.
		if err := abandoned(path); err != nil {
			return err
		}
	}
	early, err := filepath.Glob(filepath.Join(s.sockets(), earlySocket+"*"))
	if err != nil {
		return err
	}
	for _, path := range early {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > earlyAge {
			if err := abandoned(path); err != nil {
				return err
			}
		}
	}
	if err := sockets.SweepJobs(s.Runtime); err != nil {
		return err
	}
	sockets.SweepOthers(s.Runtime, s.opts.Logger)
	return nil
}

// listen opens the owner's sockets and records them in owner.json.
func (w *ownership) listen(ctx context.Context, s *Store) (err error) {
	c := card{PID: os.Getpid(), Started: time.Now().UTC().Round(0)}
	if !s.opts.Reader {
		if err := s.sweep(); err != nil {
			return err
		}
	}
	stem := filepath.Join(s.sockets(), fmt.Sprintf("o%d-%x", c.PID, c.Started.UnixNano()&0xffffff))
	c.Log, c.API = stem+".log", stem+".api"
	if c.Host, err = os.Hostname(); err != nil {
		return err
	}
	if s.unwritable() == nil { // clients may not make streams
		if err := w.log.CreateBuckets(context.WithoutCancel(ctx)); err != nil {
			return err
		}
	}
	if w.socket, err = s.listenUnix(c.Log); err != nil {
		return err
	}
	w.nserve++
	go func() { w.served <- w.server.Serve(w.socket) }()
	api, err := s.listenUnix(c.API)
	if err != nil {
		return err
	}
	w.api = &http.Server{Handler: query.Handler(w.views), ReadHeaderTimeout: 10 * time.Second}
	w.nserve++
	go func() { w.served <- w.api.Serve(api) }()
	var bound net.Addr
	if s.opts.Listen != nil {
		if err := w.log.Announce(jetlog.Served{Store: s.ID, Directory: w.dir, Host: c.Host}); err != nil {
			return err
		}
		if bound, err = w.server.Listen(ctx); err != nil {
			return err
		}
		c.Address = bound.String()
		if s.opts.sharing {
			if w.token, err = sockets.ShareToken(c.Address, s.opts.Listen.Token); err != nil {
				return err
			}
		}
		// Keep a port that was chosen when this process takes the store again, as after a cut of
		// its log: clients know it.
		same := *s.opts.Listen
		same.Address = c.Address
		s.opts.Listen = &same
	}
	w.card = c
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := durable.Write(filepath.Join(w.dir, cardName), append(text, '\n')); err != nil {
		return err
	}
	if bound != nil && s.opts.Bound != nil {
		s.opts.Bound(bound)
	}
	return nil
}

// abandoned removes a socket on which no process listens.
func abandoned(path string) error {
	conn, err := net.Dial("unix", path)
	if err == nil {
		return conn.Close()
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return removed(path)
	}
	return nil
}

// listenUnix listens for processes of this user, or of the group that the store is shared
// with. The socket gets its name when it answers: between bind(2) and listen(2) it refuses
// connections, as a dead one does, and the owner of a copy of this store would remove it.
func (s *Store) listenUnix(path string) (net.Listener, error) {
	dir, name := filepath.Split(path)
	early := filepath.Join(dir, earlySocket+name[1:]) // as long as path, which may be the longest possible
	l, err := net.Listen("unix", early)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	mode := os.FileMode(0o600)
	gid, shared := s.group()
	if shared {
		mode = 0o660
	}
	err = os.Chmod(early, mode)
	if err == nil {
		err = os.Rename(early, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close(), removed(early))
	}
	l = named{l, path}
	if shared {
		l = members{l, gid}
	}
	return l, nil
}

// earlySocket begins the names of sockets that do not answer yet, in place of the "o" of an
// owner's. A socket that is older than earlyAge was left by a process that was killed.
const (
	earlySocket = "n"
	earlyAge    = time.Minute
)

// named is a listener that removes the name of its socket.
type named struct {
	net.Listener
	path string
}

// Close implements [net.Listener].
func (n named) Close() error { return errors.Join(n.Listener.Close(), removed(n.path)) }

// close releases everything, the lock last.
func (w *ownership) close() error {
	lock, err := w.leave()
	if lock != nil {
		err = errors.Join(err, lock.release())
	}
	return err
}

// leave releases everything except the lock, which it returns.
func (w *ownership) leave() (*hold, error) {
	var errs []error
	if w.unload != nil {
		w.unload()
	}
	if w.lock != nil {
		// From here on, readers of the file must not find this process.
		errs = append(errs, removed(filepath.Join(w.dir, cardName)))
	}
	errs = append(errs, w.token.Withdraw())
	if w.socket != nil {
		errs = append(errs, w.socket.Close())
	}
	if w.api != nil {
		errs = append(errs, w.api.Close())
	}
	for range w.nserve {
		if err := <-w.served; !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if w.lock != nil && w.why == nil {
		w.settle()
	}
	if w.views != nil {
		errs = append(errs, w.views.Close())
	}
	if w.log != nil {
		w.log.Close()
	}
	if w.server != nil {
		w.server.Shutdown()
	}
	if w.unshare != nil {
		w.unshare()
	}
	return w.lock, errors.Join(errs...)
}

// RefOf returns where a checkpoint's files are.
func RefOf(c projections.Checkpoint) checkpoint.Ref {
	return checkpoint.RefOf(c.Run, c.Trial, c.ID)
}

// How often a process tries to own a store without an owner. After it lost the store soon
// after taking it, it waits longer each time.
const (
	ownEvery  = 50 * time.Millisecond
	ownSeldom = 2 * time.Second
	ownSoon   = 10 * time.Second
	// cutSeldom is how long it waits after a failure to cut the live stream.
	cutSeldom = time.Hour
)

// watch takes the store over when its owner goes. It releases the store when this process owns
// it and cannot serve it any more. Then the store has no owner until the cause is over, such
// as a full disk; a waiting process takes it. Appenders retry until their deadlines.
func (o *owner) watch() {
	defer close(o.done)
	pause := ownEvery
	for {
		select {
		case <-o.life.Done():
			return
		case <-o.lost:
		case own := <-o.cut:
			if o.cutTail(own) {
				continue
			}
		case own := <-o.broke:
			if time.Since(own.since) < ownSoon {
				pause = min(2*pause, ownSeldom)
			} else {
				pause = ownEvery
			}
			o.giveUp(own)
			if !sleep(o.life, pause) {
				return
			}
		}
		if !o.find() {
			return
		}
	}
}

// find returns when the store has an owner. It stops when there can be no owner, and when o's
// life ends.
func (o *owner) find() bool {
	said := false
	for {
		took, err := o.tryOwn(o.life)
		if err == nil && !took {
			var conn net.Conn
			if conn, err = o.dialOwner(o.life); err == nil {
				_ = conn.Close()
			}
		}
		o.explain(err)
		if err == nil {
			return true // the log reconnects on its own
		}
		if errors.Is(err, ErrDamaged) || errors.Is(err, ErrForeign) {
			// Each try starts a server. Appends end at their deadlines.
			o.store.opts.Logger.Error("store not taken over from its last owner", "error", err)
			return false
		}
		if errors.Is(err, syscall.ENOSPC) && !said {
			said = true
			o.store.opts.Logger.Error("disk full: store without an owner until there is room", "error", err)
		}
		o.store.opts.Logger.Debug("no owner of the store answers", "error", err)
		if !sleep(o.life, ownEvery) {
			return false
		}
	}
}

// giveUp releases the store while this process continues.
func (o *owner) giveUp(own *ownership) {
	o.mu.Lock()
	mine := o.own == own
	if mine {
		o.own, o.why = nil, own.why
	}
	o.mu.Unlock()
	if !mine {
		return
	}
	o.store.opts.Logger.Error("lost ownership; retrying", "error", own.why)
	if err := own.close(); err != nil {
		o.store.opts.Logger.Warn("release of the store incomplete", "error", err)
	}
}

// cutTail ends the work of an ownership, cuts the live stream of its log, and starts again, all
// under the same lock. Appends and queries retry meanwhile. It returns false when this process
// does not own the store any more.
func (o *owner) cutTail(own *ownership) bool {
	o.taking.Lock()
	defer o.taking.Unlock()
	o.mu.Lock()
	mine := o.own == own
	if mine {
		o.own = nil
	}
	o.mu.Unlock()
	if !mine {
		return true // it was released meanwhile
	}
	log := o.store.opts.Logger
	begun := time.Now()
	lock, err := own.leave()
	if err != nil {
		log.Warn("release of the store incomplete", "error", err)
	}
	if lock == nil {
		return false
	}
	stop, err := o.store.shareFiles(o.life, o.dir) // files that the cut makes
	if err != nil {
		log.Warn("lost ownership before the log cut", "error", errors.Join(err, lock.release()))
		return false
	}
	defer stop()
	if err := cutTail(o.life, o.store, o.dir, nil); err != nil {
		log.Warn("log not cut; the live stream continues", "error", err)
		o.cutAgain = time.Now().Add(cutSeldom)
	}
	next, err := succeed(o.life, o.store, o.dir, lock)
	if err != nil {
		log.Warn("lost ownership after the log cut", "error", errors.Join(err, lock.release()))
		return false
	}
	o.mu.Lock()
	o.own, o.why = next, nil
	o.mu.Unlock()
	log.Info("log cut", "seconds", time.Since(begun).Seconds())
	return true
}

// explain records why the store has no owner.
func (o *owner) explain(why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.why = why
}

// down returns why the store has no owner or cannot be written to, or nil if no cause is
// known.
func (o *owner) down() error {
	o.mu.Lock()
	why := o.why
	o.mu.Unlock()
	if full := o.store.space.Check(space.ToOwn); full != nil && !errors.Is(why, syscall.ENOSPC) {
		why = errors.Join(why, full)
	}
	return why
}

// watch notifies the owner when this ownership has failed: no appends are possible.
func (w *ownership) watch(ctx context.Context, s *Store, lock *hold) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	taken := make(chan struct{})
	go func() {
		select {
		case <-lock.claim.Lost():
			close(taken)
			cancel()
		case <-ctx.Done():
		}
	}()
	err := w.server.Watch(ctx)
	select {
	case <-taken:
		err = fmt.Errorf("%w: another machine has taken it", ErrLocked)
		ctx = context.WithoutCancel(ctx)
	default:
		if ctx.Err() != nil {
			return
		}
	}
	w.why = fmt.Errorf("own the store %s: %w", w.dir, err)
	if errors.Is(err, jetlog.ErrBroken) {
		if full := s.space.Check(space.ToOwn); full != nil {
			w.why = fmt.Errorf("%w: %w", w.why, full)
		}
	}
	select {
	case s.owner.broke <- w:
	case <-ctx.Done(): // it is being released already
	}
}
