package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// AsOf returns a source that answers as of the event at a sequence, as the views did then. A
// process with views of its own, such as the owner, folds only the events behind the last
// keyframe, and makes those that are missing; see [viewdb.History]. Any other process folds the log from its beginning,
// unless [Store.KeepPast] runs in it: then it waits until there are views for that. It
// returns [projections.ErrNotFound] if the log has no such event.
func (s *Store) AsOf(ctx context.Context, seq uint64) (query.Source, error) {
	last, err := s.Log.Last(ctx)
	switch {
	case err != nil:
		return nil, err
	case seq == 0:
		return nil, fmt.Errorf("%w: the state as of event 0: sequences count from 1", projections.ErrNotFound)
	case seq > last:
		return nil, fmt.Errorf("%w: the state as of event %d: the log ends at %d", projections.ErrNotFound, seq, last)
	}
	v, err := s.pastFor(ctx, seq)
	if err != nil {
		return nil, err
	}
	if v != nil {
		if err := v.Wait(ctx, seq); err != nil {
			return nil, err
		}
		return query.Then{History: pasts{s}, Sequence: seq}, nil
	}
	rows, err := viewdb.Replay(ctx, s.Log, seq)
	if err != nil {
		return nil, err
	}
	return query.Past{Rows: rows, Sequence: seq}, nil
}

// pasts answers as of events by the views that this process has at that moment: others may own the
// store by then.
type pasts struct{ *Store }

var _ query.History = pasts{}

// At implements [query.History].
func (p pasts) At(ctx context.Context, seq uint64, read func(projections.Reader) error) error {
	v, err := p.pastFor(ctx, seq)
	if err != nil {
		return err
	}
	if v == nil {
		rows, err := viewdb.Replay(ctx, p.Log, seq)
		if err != nil {
			return err
		}
		return read(rows)
	}
	if err := v.Wait(ctx, seq); err != nil {
		return err
	}
	return v.History.At(ctx, seq, read)
}

// ErrPreparing reports that an answer as of an event would fold many events, as the keyframes
// that [Store.KeepPast] makes have not reached it yet.
var ErrPreparing = problem.New(problem.Unavailable, "the past of the log is being prepared")

// Prepared returns [ErrPreparing], with the progress, if a process that keeps the past ahead
// should not answer as of the event at a sequence yet. If keeping has failed and made no keyframe
// since, its error is returned.
func (s *Store) Prepared(seq uint64) error {
	v := s.pastViews()
	if v == nil {
		return s.aside.prepared(seq)
	}
	at, end, quick, err := v.History.Progress(seq)
	if err != nil || quick {
		return err
	}
	if f := s.unkept.Load(); f != nil && f.views == v && at <= f.at {
		return fmt.Errorf("the past of the log is not prepared further than %d of %d events: %w", at, end, f.err)
	}
	return fmt.Errorf("%w: %d of %d events, %.0f %%; ask again in a few seconds", ErrPreparing, at, end, 100*float64(at)/float64(max(end, 1)))
}

// unkeptPast is an error of keeping the past, with the last keyframe.
type unkeptPast struct {
	views *views.Views
	at    uint64
	err   error
}

// pastRetry is how long [Store.KeepPast] waits when it cannot continue.
const pastRetry = 2 * time.Second

// KeepPast prepares answers as of events, for those that exist and as more are appended, until
// ctx ends: see [viewdb.History.Keep]. What it has made stays with the views. A process without
// views of its own folds some in memory when it is asked for the past of a long log: see [aside].
func (s *Store) KeepPast(ctx context.Context) {
	defer s.aside.keep(s.opts.Logger)()
	said := false
	for {
		v := s.pastViews()
		var err error
		if v == nil && s.aside.asked() {
			v, err = s.openAside(ctx)
		}
		if v != nil {
			if err = v.History.Keep(ctx); ctx.Err() == nil && s.pastViews() == v {
				if at, _, _, perr := v.History.Progress(0); perr == nil {
					s.unkept.Store(&unkeptPast{v, at, err})
				}
			}
		}
		if err != nil && ctx.Err() == nil {
			if !said {
				said = true
				s.opts.Logger.Warn("past of the log not prepared further; retrying", "error", err)
			}
			s.aside.close(err, s.opts.Logger)
		}
		if !sleep(ctx, pastRetry) {
			return
		}
	}
}

// aside has the views by which a process that neither owns the store nor has views of its own
// answers as of events: those of the present are the owner's. They are in memory, and only there
// after a query as of an event of a long log, while [Store.KeepPast] runs. Otherwise each such
// query would fold the log from its beginning. The owner cannot be asked instead: it may be a
// trainer.
type aside struct {
	mu      sync.Mutex
	kept    bool         // KeepPast runs
	wanted  bool         // a query needs the views
	of      *views.Views // nil: there are none
	err     error        // why there are none although they are wanted
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
func (a *aside) keep(logger *slog.Logger) (over func()) {
	a.change(func() { a.kept = true })
	return func() {
		a.close(nil, logger)
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
func (a *aside) close(why error, logger *slog.Logger) {
	var had *views.Views
	a.change(func() {
		had, a.of = a.of, nil
		if a.wanted {
			a.err = why
		}
	})
	if had != nil {
		if err := had.Close(); err != nil {
			logger.Debug("views of the past closed", "error", err)
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
func (s *Store) openAside(ctx context.Context) (*views.Views, error) {
	v, err := s.openViews(ctx, "", s.Log)
	if err != nil {
		return nil, err
	}
	s.aside.change(func() { s.aside.of, s.aside.err = v, nil })
	return v, nil
}

// pastViews returns the views that answer as of events, or nil.
func (s *Store) pastViews() *views.Views {
	s.aside.mu.Lock()
	v := s.aside.of
	s.aside.mu.Unlock()
	if v != nil {
		return v
	}
	return s.ownViews()
}

// pastFor returns the views for a query as of an event, and nil if it folds the log from its
// beginning. It waits for views that it needs.
func (s *Store) pastFor(ctx context.Context, seq uint64) (*views.Views, error) {
	for {
		a := &s.aside
		a.mu.Lock()
		if a.changed == nil {
			a.changed = make(chan struct{})
		}
		changed := a.changed
		a.mu.Unlock()
		if v := s.pastViews(); v != nil {
			return v, nil
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
