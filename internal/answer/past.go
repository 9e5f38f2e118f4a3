package answer

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Moment is a point of the log: a sequence, or a time on its server's clock. The zero moment
// is the end of the log.
type Moment struct {
	Sequence uint64
	At       time.Time
}

// IsEnd reports whether the moment is the end of the log.
func (m Moment) IsEnd() bool { return m.Sequence == 0 && m.At.IsZero() }

// String formats the moment for messages.
func (m Moment) String() string {
	if m.Sequence > 0 {
		return fmt.Sprint("sequence ", m.Sequence)
	}
	return m.At.Format(time.RFC3339)
}

// Past returns the source of queries as of a moment: the live views for the end of the log, else
// that of its past. For a time it folds the log in memory until an event is later.
func Past(ctx context.Context, s *store.Store, m Moment) (query.Source, error) {
	if m.IsEnd() {
		return s.Views(), nil
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	if m.Sequence > last {
		return nil, PastEnd("as-of", m.Sequence, last)
	}
	if m.Sequence > 0 {
		return s.Past.AsOf(ctx, m.Sequence)
	}
	rows := projections.NewMemory()
	seq, err := FoldTo(ctx, s, last, m, rows, func(events.Recorded) error { return nil })
	if err != nil {
		return nil, err
	}
	return query.Past{Rows: rows, Sequence: seq}, nil
}

// PastEnd returns the error for a sequence behind the end of the log.
func PastEnd(flag string, seq, last uint64) error {
	return fmt.Errorf("%w: --%s %d: the log ends at %d", projections.ErrNotFound, flag, seq, last)
}

// FoldTo folds the log into rows up to a moment, at most to the sequence last, and calls each
// with every event that it has folded. It returns the sequence of the last one.
func FoldTo(ctx context.Context, s *store.Store, last uint64, m Moment, rows *projections.Memory, each func(events.Recorded) error) (uint64, error) {
	if m.Sequence > 0 {
		last = m.Sequence
	}
	at := uint64(0)
	for r, err := range s.Log.Read(ctx, 1, last) {
		if err != nil {
			return at, err
		}
		if !m.At.IsZero() && r.Stored.After(m.At) {
			break
		}
		if err := projections.Apply(rows, r); err != nil {
			return at, err
		}
		at = r.Sequence
		if err := each(r); err != nil {
			return at, err
		}
	}
	if at == 0 {
		return 0, fmt.Errorf("%w: the log has no event before %s", projections.ErrNotFound, m.At.Format(time.RFC3339))
	}
	return at, nil
}
