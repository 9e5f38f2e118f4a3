package store

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
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
	views, err := s.pastFor(ctx, seq)
	if err != nil {
		return nil, err
	}
	if views != nil {
		if err := views.Wait(ctx, seq); err != nil {
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
	views, err := p.pastFor(ctx, seq)
	if err != nil {
		return err
	}
	if views == nil {
		rows, err := viewdb.Replay(ctx, p.Log, seq)
		if err != nil {
			return err
		}
		return read(rows)
	}
	if err := views.Wait(ctx, seq); err != nil {
		return err
	}
	return views.past.At(ctx, seq, read)
}

// ErrPreparing reports that an answer as of an event would fold many events, as the keyframes
// that [Store.KeepPast] makes have not reached it yet.
var ErrPreparing = problem.New(problem.Unavailable, "the past of the log is being prepared")

// Prepared returns [ErrPreparing], with the progress, if a process that keeps the past ahead
// should not answer as of the event at a sequence yet. If keeping has failed and made no keyframe
// since, its error is returned.
func (s *Store) Prepared(seq uint64) error {
	views := s.pastViews()
	if views == nil {
		return s.aside.prepared(seq)
	}
	at, end, quick, err := views.past.Progress(seq)
	if err != nil || quick {
		return err
	}
	if f := s.unkept.Load(); f != nil && f.views == views && at <= f.at {
		return fmt.Errorf("the past of the log is not prepared further than %d of %d events: %w", at, end, f.err)
	}
	return fmt.Errorf("%w: %d of %d events, %.0f %%; ask again in a few seconds", ErrPreparing, at, end, 100*float64(at)/float64(max(end, 1)))
}

// unkeptPast is an error of keeping the past, with the last keyframe.
type unkeptPast struct {
	views *shelf
	at    uint64
	err   error
}

// pastRetry is how long [Store.KeepPast] waits when it cannot continue.
const pastRetry = 2 * time.Second

// KeepPast prepares answers as of events, for those that exist and as more are appended, until
// ctx ends: see [viewdb.History.Keep]. What it has made stays with the views. A process without
// views of its own folds some in memory when it is asked for the past of a long log: see [aside].
func (s *Store) KeepPast(ctx context.Context) {
	defer s.aside.keep()()
	said := false
	for {
		views := s.pastViews()
		var err error
		if views == nil && s.aside.asked() {
			views, err = s.openAside(ctx)
		}
		if views != nil {
			if err = views.past.Keep(ctx); ctx.Err() == nil && s.pastViews() == views {
				if at, _, _, perr := views.past.Progress(0); perr == nil {
					s.unkept.Store(&unkeptPast{views, at, err})
				}
			}
		}
		if err != nil && ctx.Err() == nil {
			if !said {
				said = true
				s.opts.Logger.Warn("past of the log not prepared further; retrying", "error", err)
			}
			s.aside.close(err)
		}
		if !sleep(ctx, pastRetry) {
			return
		}
	}
}
