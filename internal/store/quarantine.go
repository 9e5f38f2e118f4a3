package store

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
	// quarantineEvery is how often an owner looks for messages that are no events.
	quarantineEvery = time.Second
	// quarantineMost is how many it records each time: there may be many.
	quarantineMost = 100
)

// quarantine records the messages of the log that are no events, by a decision
// each: that they are there is known then, and was not overlooked. Readers get past
// them in any case.
type quarantine struct {
	log    *jetlog.Log
	view   func(func(projections.Reader) error) error
	logger *slog.Logger
	until  uint64 // all up to this sequence are recorded
}

// errEnough ends a look at the voids.
var errEnough = errors.New("enough for now")

// keep records what comes until ctx ends.
func (q *quarantine) keep(ctx context.Context) {
	said := false
	for {
		err := q.record(ctx)
		if errors.Is(err, jetlog.ErrNotAllowed) {
			return // others may
		}
		if err != nil && ctx.Err() == nil && !said {
			said = true
			q.logger.Warn("messages of the log that are no events are not recorded yet; it is tried again", "error", err)
		}
		if !sleep(ctx, quarantineEvery) {
			return
		}
	}
}

// record decides about the messages that the views know of.
func (q *quarantine) record(ctx context.Context) error {
	var open []projections.Void
	seen := q.until
	if err := q.view(func(r projections.Reader) error {
		return projections.Voids(r, q.until, func(v projections.Void) error {
			switch {
			case len(open) == quarantineMost:
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
	q.until = seen
	for _, v := range open {
		end, err := q.log.LaneEnd(ctx, events.Aggregate{})
		if err != nil {
			return err
		}
		d, err := events.NewDecision(Stamp("owner"), events.Aggregate{}, &events.LogVoided{Sequence: v.Sequence, Digest: v.Digest, Why: v.Why})
		if err != nil {
			return err
		}
		seq, err := q.log.Decide(ctx, d, end)
		if errors.Is(err, jetlog.ErrConflict) {
			return nil // another process may have recorded it: the views will tell
		}
		if err != nil {
			return err
		}
		q.until = v.Sequence
		q.logger.Warn("a message of the log is no event: recorded, and passed over", "sequence", v.Sequence, "subject", v.Subject, "why", v.Why, "recorded", seq)
	}
	return nil
}
