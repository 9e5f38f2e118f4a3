// Package voids records each message of the log that is not an event, a void, by a decision, to show
// that it is known and was not overlooked. Readers skip voids in any case.
package voids

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// every is how often an owner checks for messages that are not events.
	every = time.Second
	// most limits the messages recorded each time: there may be many.
	most = 100
)

// Recorder records voids by decisions.
type Recorder struct {
	Log    *jetlog.Log
	View   func(func(projections.Reader) error) error
	Stamp  func() events.Stamp // of a decision
	Logger *slog.Logger

	until uint64 // all messages up to this sequence are recorded
}

// errEnough ends a pass over the voids.
var errEnough = errors.New("enough for now")

// Keep records new messages until ctx ends.
func (r *Recorder) Keep(ctx context.Context) {
	said := false
	for {
		err := r.record(ctx)
		if errors.Is(err, jetlog.ErrNotAllowed) {
			return // another process may record them
		}
		if err != nil && ctx.Err() == nil && !said {
			said = true
			r.Logger.Warn("messages that are not events not recorded; retrying", "error", err)
		}
		select {
		case <-time.After(every):
		case <-ctx.Done():
			return
		}
	}
}

// record decides about the messages that the views list.
func (r *Recorder) record(ctx context.Context) error {
	var open []projections.Void
	seen := r.until
	if err := r.View(func(rows projections.Reader) error {
		return projections.Voids(rows, r.until, func(v projections.Void) error {
			switch {
			case len(open) == most:
				return errEnough
			case v.RecordedSeq == 0:
				open = append(open, v)
			case len(open) == 0:
				seen = v.Sequence
			}
			return nil
		})
	}); err != nil && !errors.Is(err, errEnough) {
		return err
	}
	r.until = seen
	for _, v := range open {
		end, err := r.Log.LaneEnd(ctx, events.Aggregate{})
		if err != nil {
			return err
		}
		d, err := events.NewDecision(r.Stamp(), events.Aggregate{}, &events.LogVoided{Sequence: v.Sequence, Digest: v.Digest, Why: v.Why})
		if err != nil {
			return err
		}
		seq, err := r.Log.Decide(ctx, d, end)
		if errors.Is(err, jetlog.ErrConflict) {
			return nil // another process may have recorded it: the views will show it
		}
		if err != nil {
			return err
		}
		r.until = v.Sequence
		r.Logger.Warn("message of the log is not an event: recorded and skipped", "sequence", v.Sequence, "subject", v.Subject, "why", v.Why, "recorded", seq)
	}
	return nil
}
