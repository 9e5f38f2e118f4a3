package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// shelf holds the views of a store in this process. They are a cache of the log, so a failing file
// system does not stop the store: shelf folds the views again in memory, with a warning.
//
//	on disk ──fails──▶ rebuilding ──caught up──▶ in memory
//	   ▲                                             │
//	   └─────────── the directory works again ◀──────┘
//
// A query waits while they are rebuilt, as long as its caller lets it. shelf retries the directory
// after diskRetry and then less and less often; so does each process that opens the store.
type shelf struct {
	store  *Store
	source viewdb.Source
	past   *viewdb.History
	dir    string // directory of the views; empty: in memory from the start

	mu      sync.Mutex
	now     *viewdb.DB    // nil during a rebuild
	floor   uint64        // least sequence at which they answer
	memory  bool          // now is, or will be, in memory
	halted  error         // why no views are possible any more
	changed chan struct{} // closed and replaced when any of these changes
}

var _ query.Views = (*shelf)(nil)

// How long a failed directory is left alone. The wait doubles with each failure: each may leave
// a database behind that cannot be closed.
const (
	diskRetry    = 10 * time.Minute
	diskRetryMax = 6 * time.Hour
	// diskProbe is the number of bytes that the directory must accept first.
	diskProbe = 1 << 20
)

// viewWait bounds how long a query waits for a rebuild.
const viewWait = 30 * time.Second

// openShelf opens the views of a store and folds the log into them: on disk if there is a
// directory, or in memory if its file system fails.
func openShelf(ctx context.Context, s *Store, dir string, source viewdb.Source) (*shelf, error) {
	h := &shelf{store: s, source: source, dir: dir, memory: dir == "", changed: make(chan struct{})}
	h.past = viewdb.NewHistory(h, source)
	db, err := h.open(ctx)
	if err == nil {
		err = h.caughtUp(ctx, db)
	}
	if dir != "" && ctx.Err() == nil && useless(err) {
		h.degrade(err)
		if db, err = h.open(ctx); err == nil {
			err = h.caughtUp(ctx, db)
		}
	}
	if err != nil {
		return nil, err
	}
	if dir != "" && !h.inMemory() {
		s.noteViewsWork(filepath.Dir(dir))
	}
	h.now = db
	return h, nil
}

// useless reports whether the views on disk are unusable although the log has everything that is
// in them. Views of another store are left to the user.
func useless(err error) bool {
	return errors.Is(err, viewdb.ErrFailed) || errors.As(err, new(viewsError)) && !errors.Is(err, viewdb.ErrForeign)
}

// open opens the database for the views.
func (h *shelf) open(ctx context.Context) (*viewdb.DB, error) {
	if !h.inMemory() {
		return openViews(ctx, h.store, h.dir)
	}
	return viewdb.Open("views", viewdb.Options{FS: vfs.NewMem(), Store: h.store.ID, Logger: h.store.opts.Logger})
}

// caughtUp folds the log into db, and closes it on an error.
func (h *shelf) caughtUp(ctx context.Context, db *viewdb.DB) error {
	err := db.CatchUp(ctx, h.source)
	if err != nil {
		err = errors.Join(err, h.shut(db))
	}
	return err
}

// shut closes a failed database. Its failure was logged before.
func (h *shelf) shut(db *viewdb.DB) error {
	err := db.Close()
	if errors.Is(err, viewdb.ErrFailed) {
		h.store.opts.Logger.Debug("failed views abandoned", "error", err)
		return nil
	}
	return err
}

func (h *shelf) inMemory() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.memory
}

// present returns the current database, and a channel that is closed when another replaces it.
func (h *shelf) present() (db *viewdb.DB, changed <-chan struct{}, halted error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now, h.changed, h.halted
}

func (h *shelf) change(do func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	do()
	close(h.changed)
	h.changed = make(chan struct{})
}

// degrade switches the views to memory and logs the cause.
func (h *shelf) degrade(cause error) {
	h.change(func() {
		if h.now != nil {
			h.floor = max(h.floor, h.now.Cursor())
		}
		h.now, h.memory = nil, true
	})
	h.store.noteViewsFailed(filepath.Dir(h.dir), cause)
	h.store.opts.Logger.Warn("views kept in memory: their directory fails", "directory", h.dir, "error", cause,
		"next", fmt.Sprintf("free space there, repair the file system, or delete the damaged files; the directory is retried in %v and when the store is next opened", h.store.opts.diskRetry()))
}

// follow keeps the views up to date until ctx ends, whose error it then returns. Any other error
// is permanent.
func (h *shelf) follow(ctx context.Context) error {
	for {
		db, _, _ := h.present()
		life, cancel := context.WithCancel(ctx)
		var tried sync.WaitGroup
		if h.dir != "" && h.inMemory() {
			tried.Go(func() {
				for wait := h.store.opts.diskRetry(); sleep(life, wait); wait = min(2*wait, diskRetryMax) {
					if h.returnToDisk(life) {
						cancel() // restart Follow with the other database
						return
					}
				}
			})
		}
		err := db.Follow(life, h.source)
		cancel()
		tried.Wait()
		switch now, _, _ := h.present(); {
		case now != db: // they are on disk again
			if err := h.shut(db); err != nil {
				h.store.opts.Logger.Debug("views in memory closed", "error", err)
			}
		case ctx.Err() != nil:
			return ctx.Err()
		case h.dir == "" || !errors.Is(err, viewdb.ErrFailed):
			h.change(func() { h.halted = err })
			return err
		default:
			h.degrade(err)
			_ = h.shut(db) // its failure was logged
			if err := h.rebuild(ctx); err != nil {
				h.change(func() { h.halted = err })
				return err
			}
		}
	}
}

// rebuild folds the log in memory. It retries while the log does not answer.
func (h *shelf) rebuild(ctx context.Context) error {
	began := time.Now()
	for {
		db, err := h.open(ctx)
		if err != nil {
			return err
		}
		if err = h.caughtUp(ctx, db); err == nil {
			h.store.opts.Logger.Info("views rebuilt in memory", "sequence", db.Cursor(), "took", time.Since(began).Round(time.Millisecond))
			h.change(func() { h.now = db })
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if halts(err) {
			return err
		}
		h.store.opts.Logger.Debug("views not rebuilt; retrying", "error", err)
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
func (h *shelf) returnToDisk(ctx context.Context) bool {
	log := h.store.opts.Logger
	if err := h.probe(ctx); err != nil {
		log.Debug("views stay in memory", "directory", h.dir, "error", err)
		return false
	}
	db, err := openViews(ctx, h.store, h.dir)
	if err == nil {
		err = h.caughtUp(ctx, db)
	}
	if err != nil {
		log.Debug("views stay in memory", "directory", h.dir, "error", err)
		return false
	}
	h.change(func() {
		h.floor = max(h.floor, h.now.Cursor())
		h.now, h.memory = db, false
	})
	h.store.noteViewsWork(filepath.Dir(h.dir))
	log.Info("views kept on disk again", "directory", h.dir, "sequence", db.Cursor())
	return true
}

// probe writes to the file system of the views and returns an error if that fails. If the file
// system does not answer, a goroutine stays until it does.
func (h *shelf) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, viewWait)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		f, err := os.CreateTemp(filepath.Dir(h.dir), durable.TempPrefix+"probe-*")
		if info, missing := os.Lstat(h.dir); missing == nil && info.IsDir() {
			if err == nil {
				err = errors.Join(f.Close(), os.Remove(f.Name()))
			}
			if err == nil {
				f, err = os.CreateTemp(h.dir, "probe-*")
			}
		}
		if err != nil {
			ended <- err
			return
		}
		_, err = f.Write(make([]byte, diskProbe))
		ended <- errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("probe %s: %w", h.dir, ctx.Err())
	}
}

// Cursor returns the last sequence in the views, 0 during a rebuild.
func (h *shelf) Cursor() uint64 {
	if db, _, _ := h.present(); db != nil {
		return db.Cursor()
	}
	return 0
}

// Wait implements [query.Views].
func (h *shelf) Wait(ctx context.Context, seq uint64) error {
	for {
		db, changed, halted := h.present()
		if db != nil {
			err := db.Wait(ctx, seq)
			if err == nil || ctx.Err() != nil || !h.gone(db, err) {
				return err
			}
		} else if halted != nil {
			return halted
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for event %d in the views, which are being rebuilt: %w", seq, ctx.Err())
		}
	}
}

// gone reports whether an error of db means its end while the views continue. The follower replaces
// a failed database.
func (h *shelf) gone(db *viewdb.DB, err error) bool {
	if !errors.Is(err, viewdb.ErrFailed) && !errors.Is(err, viewdb.ErrClosed) {
		return false
	}
	now, _, halted := h.present()
	return halted == nil && (now != db || h.dir != "" && errors.Is(err, viewdb.ErrFailed))
}

// ViewAt implements [query.Views]. If a failing database interrupts a read, ViewAt repeats it with
// the database that replaces it, unless the read may still be running.
func (h *shelf) ViewAt(read func(r projections.Reader, cursor uint64) error) error {
	patient, cancel := context.WithTimeout(context.Background(), viewWait)
	defer cancel()
	for {
		db, changed, halted := h.present()
		if db == nil && halted != nil {
			return halted
		}
		if db != nil {
			h.mu.Lock()
			floor := h.floor
			h.mu.Unlock()
			err := db.Wait(patient, floor)
			var inside atomic.Bool
			if err == nil {
				err = db.ViewAt(func(r projections.Reader, cursor uint64) error {
					inside.Store(true)
					defer inside.Store(false)
					return read(r, cursor)
				})
			}
			switch {
			case err == nil || !h.gone(db, err):
				return err
			case inside.Load():
				return fmt.Errorf("read the views, which failed meanwhile; ask again: %w: %w", context.DeadlineExceeded, err)
			}
		}
		select {
		case <-changed:
		case <-patient.Done():
			return fmt.Errorf("read the views: they are being rebuilt in memory; ask again: %w", patient.Err())
		}
	}
}

// View is [shelf.ViewAt] without the sequence.
func (h *shelf) View(read func(projections.Reader) error) error {
	return h.ViewAt(func(r projections.Reader, _ uint64) error { return read(r) })
}

// settle folds the rest of the log into views on disk. The follower has ended.
func (h *shelf) settle(ctx context.Context) error {
	db, _, _ := h.present()
	if db == nil || h.inMemory() {
		return nil
	}
	return db.CatchUp(ctx, h.source)
}

// close closes the views. The follower has ended.
func (h *shelf) close() error {
	db, _, _ := h.present()
	if db == nil {
		return nil
	}
	return h.shut(db)
}

// aside has the views by which a process that neither owns the store nor has views of its own
// answers as of events: those of the present are the owner's. They are in memory, and only there
// after a query as of an event of a long log, while [Store.KeepPast] runs. Otherwise each such
// query would fold the log from its beginning. The owner cannot be asked instead: it may be a
// trainer.
type aside struct {
	mu      sync.Mutex
	kept    bool      // KeepPast runs
	wanted  bool      // a query needs the views
	of      *follower // nil: there are none
	err     error     // why there are none although they are wanted
	changed chan struct{}
}

// replayMost is up to which event a query folds the log from its beginning.
const replayMost = 8000

// change changes the state, and wakes all that wait for it.
func (a *aside) change(do func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	do()
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// keep notes that KeepPast runs, until it calls over.
func (a *aside) keep() (over func()) {
	a.change(func() { a.kept = true })
	return func() {
		a.close(nil)
		a.change(func() { a.kept, a.wanted, a.err = false, false, nil })
	}
}

// asked reports whether a query needs the views.
func (a *aside) asked() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wanted
}

// close closes the views, if there are any. A query opens others.
func (a *aside) close(why error) {
	var had *follower
	a.change(func() {
		had, a.of = a.of, nil
		if a.wanted {
			a.err = why
		}
	})
	if had != nil {
		if err := had.close(); err != nil {
			had.db.store.opts.Logger.Debug("views of the past closed", "error", err)
		}
	}
}

// prepared returns [ErrPreparing], or why that fails, if a query as of an event should wait for the views.
func (a *aside) prepared(seq uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.kept || a.of != nil || seq <= replayMost {
		return nil
	}
	a.wanted = true
	if a.err != nil {
		return fmt.Errorf("the past of the log is not prepared: %w", a.err)
	}
	return fmt.Errorf("%w: this process folds the log, which another one owns; ask again in a few seconds", ErrPreparing)
}

// openAside folds the log into views for the past.
func (s *Store) openAside(ctx context.Context) (*shelf, error) {
	f, err := follow(ctx, "", s.Log, s)
	if err != nil {
		return nil, err
	}
	s.aside.change(func() { s.aside.of, s.aside.err = f, nil })
	return f.db, nil
}

// pastViews returns the views that answer as of events, or nil.
func (s *Store) pastViews() *shelf {
	s.aside.mu.Lock()
	f := s.aside.of
	s.aside.mu.Unlock()
	if f != nil {
		return f.db
	}
	return s.ownViews()
}

// pastFor returns the views for a query as of an event, and nil if it folds the log from its
// beginning. It waits for views that it needs.
func (s *Store) pastFor(ctx context.Context, seq uint64) (*shelf, error) {
	for {
		a := &s.aside
		a.mu.Lock()
		if a.changed == nil {
			a.changed = make(chan struct{})
		}
		changed := a.changed
		a.mu.Unlock()
		if views := s.pastViews(); views != nil {
			return views, nil
		}
		if err := a.prepared(seq); !errors.Is(err, ErrPreparing) {
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for views of the past: %w", context.Cause(ctx))
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
	rows, ok := own.views.source.(query.Rows)
	if !ok {
		return false, nil
	}
	here, err = rows.Read(ctx, read)
	if err != nil && o.ownership() != own {
		// The store was released meanwhile: ask the next owner.
		return false, nil
	}
	return here, err
}

// Queries are a job's queries of the views.
type Queries struct{ From query.Source }

// Trial returns the row of a trial.
func (q Queries) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trial, query.Params{Run: run, Trial: trial})
}

// Trials returns the trials of a run.
func (q Queries) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return query.Ask(ctx, q.From, query.Trials, query.Params{Run: run})
}

// Attempts returns the attempts of a trial.
func (q Queries) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return query.Ask(ctx, q.From, query.Attempts, query.Params{Run: run, Trial: trial})
}

// OpenCheckpoints returns the saves of a trial that have not ended.
func (q Queries) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.OpenCheckpoints, query.Params{Run: run, Trial: trial})
}

// Resolve returns the checkpoint that a reference means.
func (q Queries) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return query.Ask(ctx, q.From, query.Resolve, query.Params{Ref: ref})
}

// ValidRun returns an error for a name that no run can have.
func ValidRun(name string) error {
	switch {
	case name == "":
		return errors.New("it is empty")
	case strings.ContainsFunc(name, unicode.IsControl):
		return errors.New("it has a control character")
	}
	return events.Scope{Run: name, Actor: events.Server}.Validate()
}
