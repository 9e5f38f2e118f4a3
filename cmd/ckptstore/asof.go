package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// moment is a point of the log: a sequence, or a time on its server's clock.
// The zero moment is the end of the log.
type moment struct {
	seq uint64
	at  time.Time
}

// momentHelp describes the forms of a moment.
const momentHelp = `a sequence, or a time such as 2026-11-21, "2026-11-21 14:05:06" (local) or
2026-11-21T14:05:06Z, which means the last event stored by then`

func (m moment) isEnd() bool { return m.seq == 0 && m.at.IsZero() }

// String formats the moment for messages.
func (m moment) String() string {
	if m.seq > 0 {
		return fmt.Sprint("sequence ", m.seq)
	}
	return m.at.Format(time.RFC3339)
}

// parseTime parses a time in the forms that commands print or accept.
func parseTime(flag, text string) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	for _, form := range []string{time.DateTime, time.DateOnly} {
		if at, err := time.ParseInLocation(form, text, time.Local); err == nil {
			return at, nil
		}
	}
	return time.Time{}, console.Usagef("--%s %q: want a time as 2026-11-21, \"2026-11-21 14:05:06\" or 2026-11-21T14:05:06Z", flag, text)
}

func parseMoment(flag, text string) (moment, error) {
	if text == "" {
		return moment{}, nil
	}
	if seq, err := strconv.ParseUint(text, 10, 64); err == nil {
		if seq == 0 {
			return moment{}, console.Usagef("--%s 0: sequences count from 1", flag)
		}
		return moment{seq: seq}, nil
	}
	at, err := parseTime(flag, text)
	if err != nil {
		return moment{}, console.Usagef("--%s %q: want a sequence, or a time as 2026-11-21, \"2026-11-21 14:05:06\" or 2026-11-21T14:05:06Z", flag, text)
	}
	return moment{at: at}, nil
}

// asOfFlag adds --as-of to a command.
func asOfFlag(c *cobra.Command) *string {
	return c.Flags().String("as-of", "", "show the state as of a moment: "+momentHelp)
}

// past returns the source of queries as of a moment: the live views for the end of
// the log, else rows that it folds in memory from the first event on.
func past(ctx context.Context, s *store.Store, m moment) (query.Source, error) {
	if m.isEnd() {
		return s.Views(), nil
	}
	last, err := s.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	if m.seq > last {
		return nil, pastEnd("as-of", m.seq, last)
	}
	rows := projections.NewMemory()
	seq, err := foldTo(ctx, s, last, m, rows, func(events.Recorded) error { return nil })
	if err != nil {
		return nil, err
	}
	return query.Past{Rows: rows, Sequence: seq}, nil
}

// pastEnd returns the error for a sequence behind the end of the log.
func pastEnd(flag string, seq, last uint64) error {
	return fmt.Errorf("%w: --%s %d: the log ends at %d", projections.ErrNotFound, flag, seq, last)
}

// foldTo folds the log into rows up to a moment, at most to the sequence last. It
// returns the sequence of the last event folded.
func foldTo(ctx context.Context, s *store.Store, last uint64, m moment, rows *projections.Memory, each func(events.Recorded) error) (uint64, error) {
	if m.seq > 0 {
		last = m.seq
	}
	at := uint64(0)
	for r, err := range s.Log.Read(ctx, 1, last) {
		if err != nil {
			return at, err
		}
		if !m.at.IsZero() && r.Stored.After(m.at) {
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
		return 0, fmt.Errorf("%w: the log has no event before %s", projections.ErrNotFound, m.at.Format(time.RFC3339))
	}
	return at, nil
}
