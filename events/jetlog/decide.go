package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

// Decide appends d and returns its sequence, if the lane of d still ends at after: the
// sequence of the last decision of the aggregate that the caller has seen (0: none).
// The decision is durable on return. If another decision came first, Decide appends
// nothing and returns a [*ConflictError].
//
// Decide retries lost acknowledgements and connections until ctx ends (30 s without a
// deadline). It then returns [ErrUnacknowledged], and d may or may not be in the log.
// Deciding the same event again, with the same after, is safe and returns its sequence,
// however long ago it was stored.
func (l *Log) Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error) {
	if l.opts.ReadOnly != nil {
		return 0, fmt.Errorf("decide %s: %w", d.Kind, l.opts.ReadOnly)
	}
	agg := events.Aggregate{Run: d.Scope.Run, Trial: d.Scope.Trial}
	if !d.Kind.Decides() || !agg.Owns(d.Event) {
		return 0, fmt.Errorf("decide %s: not a decision, or without the actor of decisions", d.Kind)
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	d, err := l.sign(ctx, d, after)
	if err != nil {
		return 0, fmt.Errorf("decide %s at %s: %w", d.Kind, l.opts.where(), err)
	}
	if _, err := check(d.Event); err != nil {
		return 0, fmt.Errorf("decide %s: %w", d.Kind, err)
	}

	lane := agg.Lane()
	release, err := l.enter(ctx, lane)
	if err != nil {
		return 0, fmt.Errorf("decide %s: wait for an earlier decision on %s: %w", d.Kind, lane, err)
	}
	defer release()
	if l.opts.Deciding != nil {
		l.opts.Deciding()
	}

	sequence, until := uint64(0), time.Now().Add(l.patience)
	err = l.retry(concerning(ctx, subjects(events.Subject(d.Scope, d.Kind))), func(ctx context.Context) error {
		sequence, err = l.decideOnce(ctx, d, lane, after, until)
		return err
	})
	var conflict *ConflictError
	switch {
	case err == nil:
		return sequence, nil
	case errors.As(err, &conflict):
		return 0, conflict
	case ctx.Err() != nil || l.ctx.Err() != nil:
		err = fmt.Errorf("%w: %w", ErrUnacknowledged, err)
	}
	return 0, fmt.Errorf("decide %s at %s: %w", d.Kind, l.opts.where(), err)
}

// sign returns the decision with its signature. A repetition with the same condition gets
// the same one.
func (l *Log) sign(ctx context.Context, d events.Decision, after uint64) (events.Decision, error) {
	if l.opts.Sign == nil {
		return d, nil
	}
	signature, err := l.opts.Sign(ctx, l, d.Event, after)
	if err != nil && (ctx.Err() != nil || l.ctx.Err() != nil) {
		err = fmt.Errorf("%w: %w", ErrUnacknowledged, err)
	}
	d.Signature = signature
	return d, err
}

func (l *Log) decideOnce(ctx context.Context, d events.Decision, lane string, after uint64, until time.Time) (uint64, error) {
	if err := l.known(ctx); err != nil {
		return 0, err
	}
	m, sealed, expected := message(d.Event), l.sealed().Last, after
	if after <= sealed && sealed > 0 {
		// The server of the tail has no message of this lane up to after.
		a, err := l.archived(ctx)
		if err != nil {
			return 0, err
		}
		if a.End().Last != sealed { // the log was cut again in this moment
			return 0, errAgain
		}
		head, err := a.Head(lane)
		if err != nil {
			return 0, damagedArchive(err)
		}
		if head != after {
			return l.refused(ctx, d, lane, after, until)
		}
		m.Header.Set(headerFollows, strconv.FormatUint(after, 10))
		expected = 0
	}
	sequence, refused := l.publishTo(ctx, tailName(sealed), m, jetstream.WithExpectLastSequenceForSubject(expected, lane))
	if !hasCode(refused, codeWrongLast, codeWrongLastPending) {
		return sequence, refused
	}
	// The server checks the expectation before the ID, so a retry of a stored decision
	// is refused because of itself.
	sequence, err := l.find(ctx, d.ID, lane, after)
	if err != nil || sequence != 0 {
		return sequence, err
	}
	if hasCode(refused, codeWrongLastPending) {
		// The append in flight may be this very event. It is settled soon.
		return 0, fmt.Errorf("%w: %w", errAgain, refused)
	}
	return l.refused(ctx, d, lane, after, until)
}

// refused resolves a decision whose lane has moved: it returns the sequence if the
// decision was a retry, and a conflict otherwise. Until then, an answer of a replicated log
// may be older than the refusal.
func (l *Log) refused(ctx context.Context, d events.Decision, lane string, after uint64, until time.Time) (uint64, error) {
	sequence, err := l.find(ctx, d.ID, lane, after)
	if err != nil || sequence != 0 {
		return sequence, err
	}
	actual, err := l.laneEnd(ctx, lane)
	if err != nil {
		return 0, err
	}
	if actual <= after && l.replicated() && time.Now().Before(until) {
		// This answer is older than the refusal: another server leads by now.
		return 0, fmt.Errorf("%w: the lane is at %d by one server, and was refused after %d", errAgain, actual, after)
	}
	return 0, &ConflictError{Lane: lane, After: after, Actual: actual}
}

// find returns the sequence of the event with this ID in the lane, if it was decided after
// the decision at after; 0 otherwise. Such an event is the first one there: its condition
// was that nothing follows. So a long lane is not read, which would take more than one
// attempt may.
func (l *Log) find(ctx context.Context, id, lane string, after uint64) (uint64, error) {
	e, err := l.get(ctx, msgGet{Seq: after + 1, NextFor: lane})
	switch {
	case errors.Is(err, errNoMessage):
		return 0, nil
	case err != nil:
		return 0, err
	case e.ID == id:
		return e.Sequence, nil
	}
	return 0, nil
}

// LaneEnd returns the sequence of the last decision of agg, 0 if there is none. The
// leader answers, so nothing acknowledged before the call is missing.
func (l *Log) LaneEnd(ctx context.Context, agg events.Aggregate) (uint64, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	end := uint64(0)
	err := l.retry(ctx, func(ctx context.Context) error {
		err := l.known(ctx)
		if err == nil {
			end, err = l.laneEnd(ctx, agg.Lane())
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("end of lane %s at %s: %w", agg.Lane(), l.opts.where(), err)
	}
	return end, nil
}

func (l *Log) laneEnd(ctx context.Context, lane string) (uint64, error) {
	e, err := l.get(ctx, msgGet{LastFor: lane})
	if errors.Is(err, errNoMessage) {
		return 0, nil
	}
	return e.Sequence, err
}

// enter waits until no other goroutine of this process decides on lane.
func (l *Log) enter(ctx context.Context, lane string) (release func(), err error) {
	v, _ := l.lanes.LoadOrStore(lane, make(chan struct{}, 1))
	turn := v.(chan struct{})
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
