// Package views keeps the views of a store in this process. They are a cache of the log, so a failing
// file system does not stop the store: the log is folded again in memory, with a warning.
//
//	on disk ──fails──▶ rebuilding ──caught up──▶ in memory
//	   ▲                                             │
//	   └─────────── the directory works again ◀──────┘
//
// A query waits while the views are rebuilt, as long as its caller lets it. The directory is retried
// after [Retry] and then less and less often; so does each process that opens the store.
package views

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// How long a failed directory is left alone. The wait doubles with each failure: each may leave
// a database behind that cannot be closed.
const (
	Retry    = 10 * time.Minute
	retryMax = 6 * time.Hour
)

const (
	// patience bounds how long a query waits for a rebuild.
	patience = 30 * time.Second
	// unfollowTime is how long Close waits for the follower. A follower that is blocked in a file
	// system ends when its database is closed.
	unfollowTime = 2 * time.Second
)

// Options configure the views of a store.
type Options struct {
	Dir      string        // of the views, in the directory of the store; empty: in memory from the start
	Store    string        // its ID
	Log      viewdb.Source // which is folded
	ReadOnly bool          // record no failure for the next owner
	FS       vfs.FS        // for the views on disk; nil: the machine's filesystem
	Retry    time.Duration // before a failed directory is retried; default [Retry]
	Logger   *slog.Logger
}

// Views follow a log, and answer queries from what it leads to. They may be used concurrently until
// Close.
type Views struct {
	o       Options
	History *viewdb.History // answers as of earlier events

	cancel context.CancelFunc // ends the follower
	done   chan error         // of the follower

	mu      sync.Mutex
	now     *viewdb.DB    // nil during a rebuild
	floor   uint64        // least sequence at which they answer
	memory  bool          // now is, or will be, in memory
	halted  error         // why no views are possible any more
	changed chan struct{} // closed and replaced when any of these changes
}

// Open opens views, folds the log into them and follows it from then on. They are in memory if their
// file system fails.
func Open(ctx context.Context, o Options) (*Views, error) {
	if o.Retry <= 0 {
		o.Retry = Retry
	}
	v := &Views{o: o, memory: o.Dir == "", changed: make(chan struct{}), done: make(chan error, 1)}
	v.History = viewdb.NewHistory(v, o.Log)
	db, err := v.open(ctx)
	if err == nil {
		err = v.caughtUp(ctx, db)
	}
	if o.Dir != "" && ctx.Err() == nil && useless(err) {
		v.degrade(err)
		if db, err = v.open(ctx); err == nil {
			err = v.caughtUp(ctx, db)
		}
	}
	if err != nil {
		return nil, err
	}
	if o.Dir != "" && !v.inMemory() {
		o.noteWorks()
	}
	v.now = db
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	v.cancel = cancel
	go func() {
		err := v.follow(life)
		if life.Err() == nil {
			// Queries fail from here on with this error: see Wait in package viewdb.
			o.Logger.Error("views halted", "error", err)
		}
		v.done <- err
		close(v.done)
	}()
	return v, nil
}

// Finish stops following the log and folds the rest of it, unless the views are in memory.
func (v *Views) Finish(ctx context.Context) error {
	v.cancel()
	select {
	case err := <-v.done:
		if !errors.Is(err, context.Canceled) {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	db, _, _ := v.present()
	if db == nil || v.inMemory() {
		return nil
	}
	return db.CatchUp(ctx, v.o.Log)
}

// Close stops following the log and closes the views.
func (v *Views) Close() error {
	v.cancel()
	timer := time.NewTimer(unfollowTime)
	defer timer.Stop()
	var err error
	select {
	case err = <-v.done:
	case <-timer.C:
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, viewdb.ErrFailed) {
		err = nil
	}
	if db, _, _ := v.present(); db != nil {
		err = errors.Join(err, v.shut(db))
	}
	return err
}

// Source answers queries from the views, as of the end of the log or later.
func (v *Views) Source() *query.Local { return &query.Local{Views: v, Last: v.o.Log.Last} }

// useless reports whether the views on disk are unusable although the log has everything that is
// in them. Views of another store are left to the user.
func useless(err error) bool {
	return errors.Is(err, viewdb.ErrFailed) || errors.As(err, new(DamageError)) && !errors.Is(err, viewdb.ErrForeign)
}

// open opens the database for the views.
func (v *Views) open(ctx context.Context) (*viewdb.DB, error) {
	if !v.inMemory() {
		return v.o.openDisk(ctx)
	}
	return viewdb.Open("views", viewdb.Options{FS: vfs.NewMem(), Store: v.o.Store, Logger: v.o.Logger})
}

// caughtUp folds the log into db, and closes it on an error.
func (v *Views) caughtUp(ctx context.Context, db *viewdb.DB) error {
	err := db.CatchUp(ctx, v.o.Log)
	if err != nil {
		err = errors.Join(err, v.shut(db))
	}
	return err
}

// shut closes a failed database. Its failure was logged before.
func (v *Views) shut(db *viewdb.DB) error {
	err := db.Close()
	if errors.Is(err, viewdb.ErrFailed) {
		v.o.Logger.Debug("failed views abandoned", "error", err)
		return nil
	}
	return err
}

func (v *Views) inMemory() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.memory
}

// present returns the current database, and a channel that is closed when another replaces it.
func (v *Views) present() (db *viewdb.DB, changed <-chan struct{}, halted error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.now, v.changed, v.halted
}

func (v *Views) change(do func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	do()
	close(v.changed)
	v.changed = make(chan struct{})
}

// degrade switches the views to memory and logs the cause.
func (v *Views) degrade(cause error) {
	v.change(func() {
		if v.now != nil {
			v.floor = max(v.floor, v.now.Cursor())
		}
		v.now, v.memory = nil, true
	})
	v.o.noteFailed(cause)
	v.o.Logger.Warn("views kept in memory: their directory fails", "directory", v.o.Dir, "error", cause,
		"next", fmt.Sprintf("free space there, repair the file system, or delete the damaged files; the directory is retried in %v and when the store is next opened", v.o.Retry))
}

// follow keeps the views up to date until ctx ends, whose error it then returns. Any other error
// is permanent.
func (v *Views) follow(ctx context.Context) error {
	for {
		db, _, _ := v.present()
		life, cancel := context.WithCancel(ctx)
		var tried sync.WaitGroup
		if v.o.Dir != "" && v.inMemory() {
			tried.Go(func() {
				for wait := v.o.Retry; sleep(life, wait); wait = min(2*wait, retryMax) {
					if v.returnToDisk(life) {
						cancel() // restart Follow with the other database
						return
					}
				}
			})
		}
		err := db.Follow(life, v.o.Log)
		cancel()
		tried.Wait()
		switch now, _, _ := v.present(); {
		case now != db: // they are on disk again
			if err := v.shut(db); err != nil {
				v.o.Logger.Debug("views in memory closed", "error", err)
			}
		case ctx.Err() != nil:
			return ctx.Err()
		case v.o.Dir == "" || !errors.Is(err, viewdb.ErrFailed):
			v.change(func() { v.halted = err })
			return err
		default:
			v.degrade(err)
			_ = v.shut(db) // its failure was logged
			if err := v.rebuild(ctx); err != nil {
				v.change(func() { v.halted = err })
				return err
			}
		}
	}
}

// rebuild folds the log in memory. It retries while the log does not answer.
func (v *Views) rebuild(ctx context.Context) error {
	began := time.Now()
	for {
		db, err := v.open(ctx)
		if err != nil {
			return err
		}
		if err = v.caughtUp(ctx, db); err == nil {
			v.o.Logger.Info("views rebuilt in memory", "sequence", db.Cursor(), "took", time.Since(began).Round(time.Millisecond))
			v.change(func() { v.now = db })
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if halts(err) {
			return err
		}
		v.o.Logger.Debug("views not rebuilt; retrying", "error", err)
		if !sleep(ctx, time.Second) {
			return ctx.Err()
		}
	}
}

// halts reports whether another reading of the log would fail in the same way.
func halts(err error) bool {
	for _, is := range []error{viewdb.ErrForeign, viewdb.ErrRolledBack, viewdb.ErrGap} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// returnToDisk switches to the views on disk, if their directory works, once they hold what those
// in memory held.
func (v *Views) returnToDisk(ctx context.Context) bool {
	log := v.o.Logger
	if err := v.probe(ctx); err != nil {
		log.Debug("views stay in memory", "directory", v.o.Dir, "error", err)
		return false
	}
	db, err := v.o.openDisk(ctx)
	if err == nil {
		err = v.caughtUp(ctx, db)
	}
	if err != nil {
		log.Debug("views stay in memory", "directory", v.o.Dir, "error", err)
		return false
	}
	v.change(func() {
		v.floor = max(v.floor, v.now.Cursor())
		v.now, v.memory = db, false
	})
	v.o.noteWorks()
	log.Info("views kept on disk again", "directory", v.o.Dir, "sequence", db.Cursor())
	return true
}

// sleep waits for d and reports whether ctx lasted that long.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
