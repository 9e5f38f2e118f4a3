package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// owner is this process's side of the ownership of a directory: it holds the lock and
// serves, or connects to the process that does.
type owner struct {
	dir   string
	store *Store

	life   context.Context // ends with close
	cancel context.CancelFunc
	lost   chan struct{}   // the connection to the owner broke or failed
	broke  chan *ownership // this process's ownership, which has failed
	cut    chan *ownership // this process's ownership, whose live stream is due for a cut
	done   chan struct{}   // the watcher has ended; nil before it started
	client *query.Client

	cutAgain time.Time  // when to try again to cut the live stream, after a failure
	taking   sync.Mutex // held while this process tries to own the store; may take long

	mu  sync.Mutex // held for a moment
	own *ownership // nil while another process owns the store
	why error      // the store has no owner; nil while it has one
}

// card is owner.json: the owner of the store and its addresses.
type card struct {
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Log     string    `json:"log"`               // socket for NATS
	API     string    `json:"api"`               // socket for queries
	Address string    `json:"address,omitempty"` // HOST:PORT for clients over TCP
}

const lockName, cardName, auditName = "LOCK", "owner.json", "audit"

// Door is one of the sockets of an owner.
type Door string

// Doors of an owner.
const (
	LogDoor     Door = "log"     // NATS
	QueriesDoor Door = "queries" // questions about the views
)

// DialOwner connects to the owner of this store's directory, which is this process or
// another one of this machine: see [Options].Owner.
func (s *Store) DialOwner(ctx context.Context, door Door) (net.Conn, error) {
	if s.owner == nil {
		return nil, fmt.Errorf("connect to the owner of the store %s: it is on a server, which has none", s.Location)
	}
	switch door {
	case LogDoor:
		if own := s.owner.ownership(); own != nil {
			return dialUnix(ctx, own.card.Log)
		}
		return s.owner.dialOwner(ctx)
	case QueriesDoor:
		if own := s.owner.ownership(); own != nil {
			return dialUnix(ctx, own.card.API)
		}
		return s.owner.dialAPI(ctx)
	}
	return nil, fmt.Errorf("connect to the owner of the store: no door %q", door)
}

func newOwner(dir string, s *Store) *owner {
	o := &owner{dir: dir, store: s, lost: make(chan struct{}, 1), broke: make(chan *ownership, 1), cut: make(chan *ownership)}
	o.life, o.cancel = context.WithCancel(context.Background())
	return o
}

// tryLock takes the lock of a store's directory, if this process may write there. It returns
// nil when another process holds it.
func tryLock(dir string) (*os.File, error) {
	if err := mayWrite(dir); err != nil {
		if cannot := canWrite(dir); cannot != nil {
			err = fmt.Errorf("lock the store: %w; `ckptstore ls --offline` reads without the lock", cannot)
		}
		return nil, err
	}
	f, err := beneath.At(dir).OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the store: %w; `ckptstore ls --offline` reads without the lock", err)
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock the store: %w", err)
}

// join owns the store or connects to its owner, and sets the store's log. The owner may leave
// at any moment. Patience bounds the wait for other processes, not this process's own work as
// the owner.
func (o *owner) join(ctx context.Context) error {
	// Every process reads the segments of the archive, the owner or not.
	if err := beneath.At(o.dir).Plain(archiveDir(o.dir)); err != nil {
		return fmt.Errorf("open the store: %w", err)
	}
	o.done = make(chan struct{})
	go o.watch()
	patient, cancel := context.WithTimeout(ctx, o.store.opts.Patience)
	defer cancel()
	for {
		took, err := o.tryOwn(ctx)
		if err != nil {
			return err
		}
		within := patient
		if took {
			within = ctx
		}
		err = o.connect(within)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("open the store: %w: %w", ctx.Err(), err)
		case took, errors.Is(err, ErrForeign), errors.Is(err, ErrNewer), errors.Is(err, ErrDamaged):
			return err
		case !sleep(patient, 20*time.Millisecond) && ctx.Err() == nil:
			return o.locked(err)
		}
	}
}

// connect opens the log through the current owner.
func (o *owner) connect(ctx context.Context) error {
	log, err := jetlog.Connect(ctx, jetlog.Options{
		Dial: o.dialLog, Logger: o.store.opts.Logger, Archive: archiveDir(o.dir),
		OnDisconnect: func(error) { o.lose() }, Admit: o.store.space.Admit, Deciding: o.store.ballast().Release, Down: o.down,
		ReadOnly: o.store.unwritable(), Sign: o.store.signs.Sign,
	})
	if err != nil {
		return err
	}
	if err := checkLog(ctx, log, o.store.ID); err != nil {
		log.Close()
		return err
	}
	o.store.useLog(log)
	o.client = query.NewClient(o.dialAPI, log.Last)
	return nil
}

// lose notifies the watcher that there may be no owner.
func (o *owner) lose() {
	select {
	case o.lost <- struct{}{}:
	default: // it is notified already
	}
}

// locked returns the error for an owner that does not answer. If the owner's socket is not
// visible, as from another container, waiting does not help.
func (o *owner) locked(cause error) error {
	who, next := "another process", "wait for it or end that process"
	c, err := readCard(o.dir)
	if err != nil && errors.Is(cause, context.DeadlineExceeded) {
		cause = err // the actual cause of the delay
	}
	if err == nil && c.PID > 0 {
		who = fmt.Sprintf("process %d on %s, owner since %s,", c.PID, c.Host, c.Started.Local().Format(time.DateTime))
		next = fmt.Sprintf("its socket is %s: wait for it or end that process", c.Log)
		if _, serr := os.Lstat(c.Log); errors.Is(serr, os.ErrNotExist) {
			next = fmt.Sprintf("its socket %s is not visible here, as when each container has a /tmp of its own: share XDG_RUNTIME_DIR between them, or run `ckptstore serve --listen HOST:PORT` next to the store and use --store nats://HOST:PORT", c.Log)
		}
	}
	return fmt.Errorf("%w: %s holds %s and does not answer: %w: %s; `ckptstore ls --offline` reads without the lock",
		ErrLocked, who, filepath.Join(o.dir, lockName), cause, next)
}

// OwnedElsewhere reports whether the last owner of a store's directory was on another machine.
// It may have ended.
func OwnedElsewhere(dir string) bool {
	c, err := readCard(dir)
	host, herr := os.Hostname()
	return err == nil && herr == nil && c.Host != host
}

// tryOwn takes the lock and starts serving. It returns false when another process holds the
// lock.
func (o *owner) tryOwn(ctx context.Context) (bool, error) {
	if o.store.opts.Owner != nil {
		return false, nil
	}
	o.taking.Lock()
	defer o.taking.Unlock()
	if o.ownership() != nil {
		return true, nil
	}
	lock, err := tryLock(o.dir)
	if err != nil || lock == nil {
		return false, err
	}
	claimed, err := claim.Take(ctx, o.dir, o.store.opts.Logger)
	if held := (*claim.HeldError)(nil); errors.As(err, &held) {
		err = fmt.Errorf("%w: %w: run this on %s, or run `ckptstore serve --listen HOST:PORT` there and use --store nats://HOST:PORT; `ckptstore ls --offline` reads without the lock", ErrLocked, err, held.Owner.Host)
	}
	if err != nil {
		return false, errors.Join(err, unlock(lock))
	}
	locked := &hold{lock, claimed}
	own, err := succeed(ctx, o.store, o.dir, locked)
	if err != nil {
		return false, errors.Join(err, locked.release())
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.own, o.why = own, nil
	return true, nil
}

// hold is what makes this process the only owner of a directory.
type hold struct {
	lock  *os.File
	claim *claim.Claim // nil: the lock suffices
}

// release lets the next process own the directory.
func (h *hold) release() error { return errors.Join(h.claim.Release(), unlock(h.lock)) }

// unlock releases a lock. Closing the file is not enough: a child that is being started shares
// it until it executes its program.
func unlock(f *os.File) error {
	return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close())
}

func (o *owner) ownership() *ownership {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.own
}

// dialLog connects to the embedded server, here or in the owner's process. A failure means that
// the owner has left, also before the log reconnects.
func (o *owner) dialLog(ctx context.Context) (net.Conn, error) {
	if own := o.ownership(); own != nil {
		return own.server.Dial()
	}
	conn, err := o.dialOwner(ctx)
	if err != nil {
		o.lose()
	}
	return conn, err
}

func (o *owner) dialOwner(ctx context.Context) (net.Conn, error) {
	if remote := o.store.opts.Owner; remote != nil {
		return remote(ctx, LogDoor)
	}
	c, err := readCard(o.dir)
	if err != nil {
		return nil, err
	}
	return dialUnix(ctx, c.Log)
}

func (o *owner) dialAPI(ctx context.Context) (net.Conn, error) {
	if remote := o.store.opts.Owner; remote != nil {
		return remote(ctx, QueriesDoor)
	}
	c, err := readCard(o.dir)
	if err != nil {
		return nil, err
	}
	return dialUnix(ctx, c.API)
}

// Answer implements [query.Source] with this process's views or the owner's. While the store
// passes to the next owner, the query waits.
func (o *owner) Answer(ctx context.Context, kind string, p query.Params) (json.RawMessage, error) {
	patient, cancel := context.WithTimeout(ctx, o.store.opts.Patience)
	defer cancel()
	for {
		if o.life.Err() != nil {
			return nil, fmt.Errorf("ask %s: %w", kind, errClosed)
		}
		var answer json.RawMessage
		var err error
		own := o.ownership()
		if own != nil {
			answer, err = own.views.Source().Answer(ctx, kind, p)
			if err == nil || o.ownership() == own {
				return answer, err
			}
		} else {
			answer, err = o.client.Answer(ctx, kind, p)
			if !errors.Is(err, query.ErrUnreachable) {
				return answer, err
			}
		}
		if !sleep(patient, 20*time.Millisecond) {
			if why := o.down(); why != nil {
				err = fmt.Errorf("%w: %w", err, why)
			}
			return answer, err
		}
	}
}

var _ query.Rows = (*owner)(nil)

// Read implements [query.Rows]: the owner of a store has the rows.
func (o *owner) Read(ctx context.Context, read func(projections.Reader) error) (here bool, err error) {
	own := o.ownership()
	if own == nil || o.life.Err() != nil {
		return false, nil
	}
	here, err = own.views.Source().Read(ctx, read)
	if err != nil && o.ownership() != own {
		// The store was released meanwhile: ask the next owner.
		return false, nil
	}
	return here, err
}

// errClosed reports a store that this process has closed.
var errClosed = errors.New("the store is closed")

var _ query.Source = (*owner)(nil)

// Owns reports whether this process owns the store now.
func (s *Store) Owns() bool { return s.owner != nil && s.owner.ownership() != nil }

// closeTimeout bounds how long close waits for the release of the store: a disk that does not
// answer may hold its log, its views and its notes.
const closeTimeout = 50 * time.Second

// close releases the store. It may be called again. Work that does not end in time ends with
// the process, as does the lock.
func (o *owner) close() error {
	ended := make(chan error, 1)
	go func() { ended <- o.giveBack() }()
	timer := time.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		return fmt.Errorf("close the store %s: not released within %v: its disk does not answer; the lock is held until this process ends", o.dir, closeTimeout)
	}
}

func (o *owner) giveBack() error {
	o.cancel()
	if s := o.store; s.scrub != nil {
		s.scrub.stop()
		if s.study != nil { // not of a backup
			s.study.stop()
		}
	}
	if o.done != nil {
		<-o.done
	}
	if o.store.Log != nil {
		o.store.Log.Close()
	}
	o.mu.Lock()
	own := o.own
	o.own = nil
	o.mu.Unlock()
	if own != nil {
		return own.close()
	}
	return nil
}

// removed removes a file that may be missing.
func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func readCard(dir string) (card, error) {
	var c card
	data, err := readFile(filepath.Join(dir, cardName))
	if err != nil {
		return c, fmt.Errorf("find the owner of the store: %w", err)
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("find the owner of the store: %s: %w", cardName, err)
	}
	return c, nil
}

func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", path)
}

// A process that opens a store with [Options].Reader changes nothing in it, whether or not it
// owns the store:
//
//	                          Reader            otherwise
//	append, decide, lease     refused           allowed
//	own the store             if it has none    if it has none
//	receipts, aborted saves   left as they are  written, removed
//	digests, read.json        left as they are  learned, written
//	sealing, cutting          left as they are  done
//	ballast                   on a full disk    released
//	sockets of dead jobs      left as they are  removed
//
// The skipped work waits for the next owner that is not a reader; end.json records how far it is
// done. Owning writes LOCK, owner.json and end.json, and the server of the log and the views
// write to their own directories. So a reader takes only a store that it could write to: see
// [ReadOnly] for other stores.

// errReading reports an operation that a reader refuses.
var errReading = errors.New("the store was opened for reading")

// unwritable returns why this process changes nothing in the store, or nil if it may.
func (s *Store) unwritable() error {
	if s.backup == nil && s.opts.Reader {
		return errReading
	}
	return s.backup
}

// owed removes from a reader's report the receipt that a crash has left unwritten: the log
// commits the checkpoint, and the next owner writes the receipt.
func (s *Store) owed(c projections.Checkpoint, report data.Report) data.Report {
	if !s.opts.Reader {
		return report
	}
	kept := report.Findings[:0:0]
	for _, f := range report.Findings {
		if f.Kind == data.Missing && f.File == checkpoint.ReceiptFile {
			s.opts.Logger.Warn("receipt missing; `ckptstore verify --repair` writes it", "checkpoint", RefOf(c).String())
			continue
		}
		kept = append(kept, f)
	}
	report.Findings = kept
	return report
}

// Unserved reports whether an append, a decision or a query failed because no process answered
// it: the store's owner is gone, paused or busy, or the log's server has no room or no leader.
// A retry may succeed later. A refusal is not unserved, such as that of facts on a disk that is
// nearly full.
func Unserved(err error) bool {
	switch {
	case err == nil, IsDamage(err), errors.Is(err, ErrForeign), errors.Is(err, jetlog.ErrForeign), errors.Is(err, jetlog.ErrClosed), errors.Is(err, errClosed),
		errors.Is(err, jetlog.ErrNotAllowed):
		return false
	case errors.Is(err, jetlog.ErrUnacknowledged), errors.Is(err, query.ErrUnreachable), errors.Is(err, context.DeadlineExceeded):
		return true // the cause may be a full disk
	}
	return !errors.Is(err, syscall.ENOSPC) && jetlog.Unanswered(err)
}
