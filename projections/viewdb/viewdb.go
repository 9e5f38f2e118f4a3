// Package viewdb keeps the rows of package projections in a Pebble database, up to date
// with a log, and rebuilds them when they are unusable.
//
//	view     the rows as of one sequence of the log: they may lag, never lead
//	cursor   the last sequence that the rows contain
//
// Keys:
//
//	0x00 "cursor"   {sequence, reducer, store}, JSON: the cursor, the version
//	                of the folds, the identity of the log's store
//	0x00 "frames"   the keyframes; see [keyframes]
//	0x00 'h' …      versions of rows as of keyframes
//	kind …          rows, as package projections lays them out
//
// Rows and their cursor are always in one batch. After any crash the database is
// therefore a view as of some sequence, and folding continues from its cursor. The
// database is synced each second, not with each batch: lost rows are folded again from
// the log. A view stops with an error at a gap in the log, at an event that cannot be
// folded, if the log ends before the cursor, and if the log belongs to another store.
// It skips nothing.
//
// The log contains everything that a view holds: its directory may be deleted.
package viewdb

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// Sentinels for [errors.Is]. All but ErrClosed and ErrBusy mean that the view and the
// log no longer match, and that a person must look into it.
var (
	// ErrForeign reports a view or a log of another store.
	ErrForeign = problem.New(problem.Damage, "another store's")
	// ErrRolledBack reports a log that ends before the view's cursor.
	ErrRolledBack = problem.New(problem.Damage, "the log was rolled back")
	// ErrGap reports a log in which a sequence is missing.
	ErrGap = problem.New(problem.Damage, "the log has a gap")
	// ErrClosed reports a view that was closed.
	ErrClosed = problem.New(problem.Unavailable, "the view is closed")
	// ErrBusy reports a second [DB.Follow] or [DB.CatchUp] during a running one.
	ErrBusy = errors.New("the view is already being updated")
)

// Options configure a view.
type Options struct {
	// FS is the file system of the view; nil means the machine's.
	FS vfs.FS
	// Store is the identity of the store that the log belongs to. Required.
	Store string
	// Logger receives the database's errors; nil discards them.
	Logger *slog.Logger
	// Patience is how long one operation of the file system may take before the view
	// fails; default 15 s.
	Patience time.Duration
}

// ensureDefaults sets the defaults of optional fields.
func (o *Options) ensureDefaults() {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Patience == 0 {
		o.Patience = 15 * time.Second
	}
}

// Validate rejects unusable options.
func (o *Options) Validate() error {
	if o.Store == "" {
		return errors.New("the identity of the store is missing")
	}
	return nil
}

// cursor is the value of the only row that does not belong to the projections.
type cursor struct {
	Sequence uint64 `json:"sequence"`
	Reducer  int    `json:"reducer"`
	Store    string `json:"store"`
}

var cursorKey = []byte("\x00cursor")

// firstRow is where the rows of the projections start.
var firstRow = []byte{1}

// DB is a view. Its methods may be called concurrently.
type DB struct {
	dir    string
	store  string
	log    *slog.Logger
	pebble *pebble.DB
	fail   *failure
	gate   *gate // of its file system

	life context.Context // ends when Close is called
	end  context.CancelFunc
	use  sync.RWMutex // held shared while pebble is used, exclusively to close it

	updating sync.Mutex // held by the one Follow or CatchUp

	mu       sync.Mutex
	sequence uint64
	halted   error         // why the last Follow or CatchUp stopped, unless its caller stopped it
	changed  chan struct{} // closed and replaced when sequence or halted change
	closed   bool
}

// givenUp is the failure of a view whose caller cancelled the opening.
const givenUp = "opening them was cancelled"

// Open is [OpenContext] without a context.
func Open(dir string, o Options) (*DB, error) { return OpenContext(context.Background(), dir, o) }

// OpenContext opens the view in dir, or creates one. It empties a view of another
// version of the folds, to be folded again. It returns [ErrForeign] for another store's
// view, and [ErrFailed] if the file system is full, broken or does not answer. Only one
// process can have the view open. The end of ctx ends the opening within seconds, and
// has no effect after it.
func OpenContext(ctx context.Context, dir string, o Options) (*DB, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("open views in %s: %w", dir, err)
	}
	fail := &failure{done: make(chan struct{})}
	disk := newFence(o.FS, fail, o.Patience)
	db := &DB{dir: dir, store: o.Store, log: o.Logger, fail: fail, gate: disk.gate, changed: make(chan struct{})}
	o.FS = disk
	db.life, db.end = context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- db.open(o) }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		timer := time.AfterFunc(leaveTime, func() { fail.set(givenUp) })
		err = <-ended
		timer.Stop()
	}
	if err == nil && ctx.Err() != nil {
		stop := fail.after(leaveTime, "closing them")
		err = db.Close()
		stop()
		return nil, errors.Join(fmt.Errorf("open views in %s: %w", dir, context.Cause(ctx)), err)
	}
	if err != nil {
		if why := db.fail.get(); why != nil {
			db.gate.raise(why)
			err = fmt.Errorf("open views in %s: %w", dir, why)
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return nil, err
	}
	return db, nil
}

// open opens the database itself.
func (db *DB) open(o Options) error {
	return db.fail.guard(func() error {
		p, err := pebble.Open(db.dir, pebbleOptions(o, db.fail))
		if err != nil {
			return fmt.Errorf("open views in %s: %w; if no other process has them open, delete the directory, it is rebuilt from the log", db.dir, err)
		}
		db.pebble = p
		db.fail.opened.Store(true)
		if err := db.start(); err != nil {
			return errors.Join(fmt.Errorf("open views in %s: %w", db.dir, err), p.Close())
		}
		return nil
	})
}

func pebbleOptions(o Options, fail *failure) *pebble.Options {
	po := &pebble.Options{
		FS:                 ordered{o.FS, fail},
		FormatMajorVersion: pebble.FormatNewest,
		// An owner holds these in memory: the cache, and up to two memtables.
		MemTableSize: 8 << 20,
		// Every report is looked up before it is stored. With the default of 8 MB, a
		// rebuild read the same blocks from the file repeatedly.
		CacheSize:     32 << 20,
		Logger:        quiet{o.Logger, fail},
		EventListener: fail.events(),
	}
	for i := range po.Levels {
		po.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	return po
}

// start reads the cursor, and empties a view that the folds cannot continue.
func (db *DB) start() error {
	c, found, err := readCursor(db.pebble)
	if err != nil {
		return err
	}
	switch {
	case found && c.Store != db.store:
		return fmt.Errorf("they are %w: of %s, not of %s; delete the directory, it is rebuilt from the log", ErrForeign, c.Store, db.store)
	case found && c.Reducer == projections.Version:
		again, err := db.knowsMore()
		if err != nil {
			return err
		}
		if !again {
			db.sequence = c.Sequence
			return db.startKeyframes()
		}
		db.log.Info("views rebuilt from the log: this version knows more events")
	case found:
		db.log.Warn("views rebuilt from the log: their folds are of another version", "theirs", c.Reducer, "ours", projections.Version)
	}
	b := db.pebble.NewBatch()
	err = b.DeleteRange(firstRow, []byte{0xff}, nil)
	if err == nil {
		err = dropKeyframes(b)
	}
	if err == nil {
		err = db.writeCursor(b, 0)
	}
	if err == nil {
		err = b.Commit(pebble.Sync)
	}
	return errors.Join(err, b.Close())
}

// startKeyframes drops keyframes of another version of the folds, which a program without
// keyframes left when it folded the rows again, and those of a program that knows other events.
func (db *DB) startKeyframes() error {
	k, err := readKeyframes(db.pebble, keyframeEvents)
	switch {
	case errors.Is(err, errKeyframes):
		db.log.Warn("keyframes of the views dropped", "error", err)
	case err != nil || k.Reducer == projections.Version && k.Kinds == knownKinds() && k.At <= db.sequence:
		return err
	}
	b := db.pebble.NewBatch()
	if err = dropKeyframes(b); err == nil {
		err = b.Commit(pebble.Sync)
	}
	return errors.Join(err, b.Close())
}

// knowsMore reports whether this program knows an event that the rows were folded
// without.
func (db *DB) knowsMore() (bool, error) {
	unknown, err := projections.AllNewer(reader{db.pebble, nil})
	return slices.ContainsFunc(unknown, projections.Newer.Known), err
}

func readCursor(r pebble.Reader) (c cursor, found bool, err error) {
	value, err := get(r, cursorKey)
	if err != nil || value == nil {
		return c, false, err
	}
	if err := json.Unmarshal(value, &c); err != nil {
		return c, false, fmt.Errorf("the cursor is damaged: %w; delete the directory, it is rebuilt from the log", err)
	}
	return c, true, nil
}

func (db *DB) writeCursor(b *pebble.Batch, sequence uint64) error {
	value, err := json.Marshal(cursor{Sequence: sequence, Reducer: projections.Version, Store: db.store})
	if err != nil {
		return err
	}
	return b.Set(cursorKey, value, nil)
}

// Cursor returns the last sequence that the rows contain, 0 for none.
func (db *DB) Cursor() uint64 {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.sequence
}

// Wait returns when the cursor is at seq or beyond. It returns an error when
// ctx ends, when the view is closed, and when it has halted before seq.
func (db *DB) Wait(ctx context.Context, seq uint64) error {
	for {
		db.mu.Lock()
		at, halted, changed := db.sequence, db.halted, db.changed
		db.mu.Unlock()
		switch {
		case at >= seq:
			return nil
		case halted != nil:
			return fmt.Errorf("wait for event %d in the views: they stopped at %d: %w", seq, at, halted)
		}
		select {
		case <-changed:
		case <-db.fail.done:
			return fmt.Errorf("wait for event %d in the views: they stopped at %d: %w", seq, at, db.fail.err)
		case <-db.life.Done():
			return fmt.Errorf("wait for event %d in the views: %w", seq, ErrClosed)
		case <-ctx.Done():
			return fmt.Errorf("wait for event %d in the views, which are at %d: %w", seq, at, ctx.Err())
		}
	}
}

// advance notifies the waiters of a change.
func (db *DB) advance(change func()) {
	db.mu.Lock()
	defer db.mu.Unlock()
	change()
	close(db.changed)
	db.changed = make(chan struct{})
}

// View calls read with the rows as of one sequence. The reader is valid during the
// call, and the view cannot be closed during it; read must not call View again.
func (db *DB) View(read func(projections.Reader) error) error {
	return db.ViewAt(func(r projections.Reader, _ uint64) error { return read(r) })
}

// ViewAt is [DB.View] with the sequence that the rows stand for.
func (db *DB) ViewAt(read func(r projections.Reader, cursor uint64) error) error {
	release, err := db.acquire()
	if err != nil {
		return err
	}
	defer release()
	return db.fail.guard(func() (err error) {
		snapshot := db.pebble.NewSnapshot()
		defer func() { err = errors.Join(err, snapshot.Close()) }()
		c, _, err := readCursor(snapshot)
		if err != nil {
			return fmt.Errorf("read views in %s: %w", db.dir, err)
		}
		return read(reader{snapshot, db}, c.Sequence)
	})
}

// Digest returns the digest of the rows, without the cursor, and the sequence of the
// rows. It reads every row.
func (db *DB) Digest() (sum [32]byte, cursor uint64, err error) {
	err = db.ViewAt(func(r projections.Reader, at uint64) error {
		cursor = at
		sum, err = projections.Digest(r)
		return err
	})
	return sum, cursor, err
}

// acquire keeps the database open until release is called.
func (db *DB) acquire() (release func(), err error) {
	db.use.RLock()
	if db.life.Err() != nil {
		db.use.RUnlock()
		return nil, ErrClosed
	}
	return db.use.RUnlock, nil
}

// closeTime is how long a view may take to close. It syncs files, and on a busy disk
// each sync may take seconds; [Options.Patience] ends a sync that does not return at
// all.
const closeTime = 30 * time.Second

// Close ends a running update, waits for readers, and closes the database. After a
// return without an error all folded events are durable, because every update ends with
// a sync. For a failed database, or if closing takes more than 30 s, Close returns
// [ErrFailed]: the goroutines stay, but the directory may be opened again, as after a
// kill. Further calls do nothing.
func (db *DB) Close() error {
	db.end()
	defer db.fail.after(closeTime, "closing them")()
	db.updating.Lock()
	defer db.updating.Unlock()
	db.use.Lock()
	defer db.use.Unlock()
	if db.closed {
		return nil
	}
	db.closed = true
	if err := db.fail.guard(db.pebble.Close); err != nil {
		if why := db.fail.get(); why != nil {
			db.gate.raise(why)
		}
		return fmt.Errorf("close views in %s: %w", db.dir, err)
	}
	return nil
}

// reader reads the projections' rows of a database or of a snapshot.
type reader struct {
	from pebble.Reader
	db   *DB // that from is a snapshot of; nil: it is none
}

var _ projections.Reader = reader{}

// get returns the caller's copy of a value, nil if there is none.
func get(r pebble.Reader, key []byte) ([]byte, error) {
	value, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	owned := append([]byte{}, value...)
	return owned, closer.Close()
}

// Get implements [projections.Reader].
func (r reader) Get(key []byte) ([]byte, error) { return get(r.from, key) }

// Scan implements [projections.Reader].
func (r reader) Scan(lo, hi []byte, visit func(key, value []byte) error) (err error) {
	it, err := r.from.NewIter(bounds(lo, hi))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for it.First(); it.Valid(); it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		if err := visit(it.Key(), value); err != nil {
			return err
		}
	}
	return it.Error()
}

// bounds restricts a scan to the keys of the projections.
func bounds(lo, hi []byte) *pebble.IterOptions {
	if bytes.Compare(lo, firstRow) < 0 {
		lo = firstRow
	}
	return &pebble.IterOptions{LowerBound: lo, UpperBound: hi}
}
