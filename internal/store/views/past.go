package views

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// Past answers queries as of events of a log, by the views that this process has at that moment:
// others may own the store by then.
//
// A process that neither owns the store nor has views of its own folds some for the past alone: those
// of the present are the owner's. They are in memory, and only there after a query as of an event of a
// long log, while [Past.Keep] runs. Otherwise each such query would fold the log from its beginning.
// The owner cannot be asked instead: it may be a trainer.
type Past struct {
	o      Options       // of the views for the past alone
	own    func() *Views // the views of this process, or nil
	failed atomic.Pointer[failedKeep]

	mu      sync.Mutex
	kept    bool   // Keep runs
	wanted  bool   // a query needs views for the past alone
	apart   *Views // the views for the past alone, or nil
	err     error  // why there are none although they are wanted
	changed chan struct{}
}

var _ query.History = (*Past)(nil)

// failedKeep is an error of keeping the past, with the last keyframe.
type failedKeep struct {
	views *Views
	at    uint64
	err   error
}

const (
	// keepRetry is how long [Past.Keep] waits when it cannot continue.
	keepRetry = 2 * time.Second
	// replayMost is up to which event a query folds the log from its beginning.
	replayMost = 8000
)

// ErrPreparing reports that an answer as of an event would fold many events, as the keyframes
// that [Past.Keep] makes have not reached it yet.
var ErrPreparing = problem.New(problem.Unavailable, "the past of the log is being prepared")

// NewPast returns the past of the log of o, whose directory it does not use. own returns the views of
// this process, or nil while it has none.
func NewPast(o Options, own func() *Views) *Past {
	o.Dir = ""
	return &Past{o: o, own: own}
}

// AsOf returns a source that answers as of the event at a sequence, as the views did then. A
// process with views of its own, such as the owner, folds only the events behind the last
// keyframe, and makes those that are missing; see [viewdb.History]. Any other process folds the log from its beginning,
// unless [Past.Keep] runs in it: then it waits until there are views for that. It
// returns [projections.ErrNotFound] if the log has no such event.
func (p *Past) AsOf(ctx context.Context, seq uint64) (query.Source, error) {
	last, err := p.o.Log.Last(ctx)
	switch {
	case err != nil:
		return nil, err
	case seq == 0:
		return nil, fmt.Errorf("%w: the state as of event 0: sequences count from 1", projections.ErrNotFound)
	case seq > last:
		return nil, fmt.Errorf("%w: the state as of event %d: the log ends at %d", projections.ErrNotFound, seq, last)
	}
	v, err := p.viewsFor(ctx, seq)
	if err != nil {
		return nil, err
	}
	if v != nil {
		if err := v.Wait(ctx, seq); err != nil {
			return nil, err
		}
		return query.Then{History: p, Sequence: seq}, nil
	}
	rows, err := viewdb.Replay(ctx, p.o.Log, seq)
	if err != nil {
		return nil, err
	}
	return query.Past{Rows: rows, Sequence: seq}, nil
}

// At implements [query.History].
func (p *Past) At(ctx context.Context, seq uint64, read func(projections.Reader) error) error {
	v, err := p.viewsFor(ctx, seq)
	if err != nil {
		return err
	}
	if v == nil {
		rows, err := viewdb.Replay(ctx, p.o.Log, seq)
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

// Prepared returns [ErrPreparing], with the progress, if a process that keeps the past ahead
// should not answer as of the event at a sequence yet. If keeping has failed and made no keyframe
// since, its error is returned.
func (p *Past) Prepared(seq uint64) error {
	v := p.views()
	if v == nil {
		return p.prepared(seq)
	}
	at, end, quick, err := v.History.Progress(seq)
	if err != nil || quick {
		return err
	}
	if f := p.failed.Load(); f != nil && f.views == v && at <= f.at {
		return fmt.Errorf("the past of the log is not prepared further than %d of %d events: %w", at, end, f.err)
	}
	return fmt.Errorf("%w: %d of %d events, %.0f %%; ask again in a few seconds", ErrPreparing, at, end, 100*float64(at)/float64(max(end, 1)))
}

// Keep prepares answers as of events, for those that exist and as more are appended, until
// ctx ends: see [viewdb.History.Keep]. What it has made stays with the views. A process without
// views of its own folds some in memory when it is asked for the past of a long log: see [Past].
func (p *Past) Keep(ctx context.Context) {
	defer p.keep()()
	said := false
	for {
		v := p.views()
		var err error
		if v == nil && p.asked() {
			v, err = p.open(ctx)
		}
		if v != nil {
			if err = v.History.Keep(ctx); ctx.Err() == nil && p.views() == v {
				if at, _, _, perr := v.History.Progress(0); perr == nil {
					p.failed.Store(&failedKeep{v, at, err})
				}
			}
		}
		if err != nil && ctx.Err() == nil {
			if !said {
				said = true
				p.o.Logger.Warn("past of the log not prepared further; retrying", "error", err)
			}
			p.close(err)
		}
		if !sleep(ctx, keepRetry) {
			return
		}
	}
}

// change changes the state, and wakes all that wait for it.
func (p *Past) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// keep notes that Keep runs, until it calls over.
func (p *Past) keep() (over func()) {
	p.change(func() { p.kept = true })
	return func() {
		p.close(nil)
		p.change(func() { p.kept, p.wanted, p.err = false, false, nil })
	}
}

// asked reports whether a query needs the views.
func (p *Past) asked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.wanted
}

// close closes the views, if there are any. A query opens others.
func (p *Past) close(why error) {
	var had *Views
	p.change(func() {
		had, p.apart = p.apart, nil
		if p.wanted {
			p.err = why
		}
	})
	if had != nil {
		if err := had.Close(); err != nil {
			p.o.Logger.Debug("views of the past closed", "error", err)
		}
	}
}

// prepared returns [ErrPreparing], or why that fails, if a query as of an event should wait for the views.
func (p *Past) prepared(seq uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.kept || p.apart != nil || seq <= replayMost {
		return nil
	}
	p.wanted = true
	if p.err != nil {
		return fmt.Errorf("the past of the log is not prepared: %w", p.err)
	}
	return fmt.Errorf("%w: this process folds the log, which another one owns; ask again in a few seconds", ErrPreparing)
}

// open folds the log into views for the past.
func (p *Past) open(ctx context.Context) (*Views, error) {
	v, err := Open(ctx, p.o)
	if err != nil {
		return nil, err
	}
	p.change(func() { p.apart, p.err = v, nil })
	return v, nil
}

// views returns the views that answer as of events, or nil.
func (p *Past) views() *Views {
	p.mu.Lock()
	v := p.apart
	p.mu.Unlock()
	if v != nil {
		return v
	}
	return p.own()
}

// viewsFor returns the views for a query as of an event, and nil if it folds the log from its
// beginning. It waits for views that it needs.
func (p *Past) viewsFor(ctx context.Context, seq uint64) (*Views, error) {
	for {
		p.mu.Lock()
		if p.changed == nil {
			p.changed = make(chan struct{})
		}
		changed := p.changed
		p.mu.Unlock()
		if v := p.views(); v != nil {
			return v, nil
		}
		if err := p.prepared(seq); !errors.Is(err, ErrPreparing) {
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for views of the past: %w", context.Cause(ctx))
		}
	}
}
