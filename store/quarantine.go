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
	// quarantineMost is how many it records each time: somebody may append many.
	quarantineMost = 100
)

// quarantine records the messages of the log that are no events, by a decision
// each: that they are there is known then, and was not overlooked. Readers get past
// them in any case.
type quarantine struct {
	log    *jetlog.Log
	view   func(func(projections.Reader) error) error
	logger *slog.Logger
	until  uint64 // of the voids, by sequence: these are recorded
}

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
	if err := q.view(func(r projections.Reader) (err error) {
		open, err = projections.Voids(r, true)
		return err
	}); err != nil {
		return err
	}
	n := 0
	for _, v := range open {
		if v.Sequence <= q.until { // the views have not come to the decision
			continue
		}
		if n++; n > quarantineMost {
			return nil
		}
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
