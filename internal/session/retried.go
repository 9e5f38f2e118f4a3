package session

import (
	"context"
	"iter"
	"log/slog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/projections"
)

// patiently makes the job's calls of log and views wait for the log's server.
func (s Store) patiently(job context.Context, log *slog.Logger) Store {
	s.calls = retry.New(job, retry.Options{Unserved: s.Unserved, Conflict: s.Conflict, Log: log})
	s.Log, s.Views = retriedLog{s.Log, s.calls}, retriedViews{s.Views, s.calls}
	return s
}

// untilRoom makes all appends and queries of a job wait for room, except the
// immediate ones.
func (s Store) untilRoom() Store {
	s.calls.WaitForRoom()
	if s.Blobs != nil {
		s.Blobs = roomyBlobs{s.Blobs, s.calls}
	}
	return s
}

// Insist repeats a call of the log, other than those of Log, until it is answered or refused, as those
// are repeated: once the job must end, for [retry.EndTimeout] at most.
func (s Store) Insist(ctx context.Context, call func(context.Context) error) error {
	return s.calls.UntilAnswered(ctx, call)
}

// retriedLog is the log of a job. Its calls are repeated until they are answered.
type retriedLog struct {
	Log
	calls *retry.Calls
}

var _ Log = retriedLog{}

// Append implements Log. It does not wait for room: eventWriter does.
func (l retriedLog) Append(ctx context.Context, facts ...events.Fact) (seqs []uint64, err error) {
	err = l.calls.UntilAnswered(ctx, func(ctx context.Context) error {
		seqs, err = l.Log.Append(ctx, facts...)
		return err
	})
	return seqs, err
}

// Decide implements Log.
func (l retriedLog) Decide(ctx context.Context, d events.Decision, after uint64) (seq uint64, err error) {
	err = l.calls.UntilDone(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Decide(ctx, d, after)
		return err
	})
	return seq, err
}

// Last implements Log.
func (l retriedLog) Last(ctx context.Context) (seq uint64, err error) {
	err = l.calls.UntilDone(ctx, func(ctx context.Context) error {
		seq, err = l.Log.Last(ctx)
		return err
	})
	return seq, err
}

// LastOf implements Log.
func (l retriedLog) LastOf(ctx context.Context, of events.Aggregate) (seq uint64, err error) {
	err = l.calls.UntilDone(ctx, func(ctx context.Context) error {
		seq, err = l.Log.LastOf(ctx, of)
		return err
	})
	return seq, err
}

// ReadTrial implements Log. It waits for the log's server by itself.
func (l retriedLog) ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return unsaidAfter(ctx, l.Log.ReadTrial(ctx, of, from, until))
}

// ReadLane implements Log. It waits for the log's server by itself.
func (l retriedLog) ReadLane(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return unsaidAfter(ctx, l.Log.ReadLane(ctx, of, from, until))
}

// unsaidAfter marks the error of a read that ended before ctx did.
func unsaidAfter(ctx context.Context, all iter.Seq2[events.Recorded, error]) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for r, err := range all {
			if err != nil && ctx.Err() == nil {
				err = &retry.RefusedError{Err: err}
			}
			if !yield(r, err) {
				return
			}
		}
	}
}

// retriedViews are the views of a job. Their queries wait as its log does.
type retriedViews struct {
	Views
	calls *retry.Calls
}

var _ Views = retriedViews{}

func ask[T any](ctx context.Context, c *retry.Calls, question func(context.Context) (T, error)) (answer T, err error) {
	err = c.UntilDone(ctx, func(ctx context.Context) error {
		answer, err = question(ctx)
		return err
	})
	return answer, err
}

// Trial implements Views.
func (v retriedViews) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return ask(ctx, v.calls, func(ctx context.Context) (projections.Trial, error) { return v.Views.Trial(ctx, run, trial) })
}

// Attempts implements Views.
func (v retriedViews) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return ask(ctx, v.calls, func(ctx context.Context) ([]projections.Attempt, error) { return v.Views.Attempts(ctx, run, trial) })
}

// OpenCheckpoints implements Views.
func (v retriedViews) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return ask(ctx, v.calls, func(ctx context.Context) ([]projections.Checkpoint, error) {
		return v.Views.OpenCheckpoints(ctx, run, trial)
	})
}

// Resolve implements Views.
func (v retriedViews) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return ask(ctx, v.calls, func(ctx context.Context) (projections.Checkpoint, error) { return v.Views.Resolve(ctx, ref) })
}

// Trials implements Views.
func (v retriedViews) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return ask(ctx, v.calls, func(ctx context.Context) ([]projections.Trial, error) { return v.Views.Trials(ctx, run) })
}

// roomyBlobs are blobs whose writes wait for room.
type roomyBlobs struct {
	Blobs
	calls *retry.Calls
}

var _ Blobs = roomyBlobs{}

// Put implements Blobs.
func (b roomyBlobs) Put(ctx context.Context, data []byte) (blob events.Blob, err error) {
	err = b.calls.UntilRoom(ctx, func() error {
		blob, err = b.Blobs.Put(ctx, data)
		return err
	})
	return blob, err
}
