package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
)

// execute does what the coordinator asks for.
func (s *saver) execute(ctx context.Context, c planner.Command) error {
	switch c := c.(type) {
	case planner.Decide:
		_, err := s.lane.decide(ctx, c.Body)
		if errors.Is(err, errEnded) {
			return nil // the log says how, and comes by here
		}
		return err
	case planner.Publish:
		return s.publish(ctx, c.Body)
	case planner.Write:
		s.writing++
		go func() { s.written <- s.write(ctx, c) }()
		return nil
	case planner.Commit:
		return s.commit(ctx, c)
	}
	return fmt.Errorf("unknown command %T", c)
}

func (s *saver) publish(ctx context.Context, body events.Body) error {
	if g, ok := body.(*events.GlobalPlan); ok {
		layout, err := plan.DecodeLayout(g.Layout.Inline)
		if err != nil {
			return err
		}
		w := s.store.Data.Writer(s.ref(g.Checkpoint))
		if layout, err = w.PrepareGlobalPlan(ctx, layout); err != nil {
			return s.abort(ctx, plan.Manifest{Attempt: g.Attempt, Checkpoint: g.Checkpoint}, err)
		}
		b, err := s.store.Blobs.Put(ctx, plan.EncodeLayout(layout))
		if err != nil {
			return err
		}
		g.Layout = b
	}
	return s.lane.say(ctx, body)
}

func (s *saver) ref(checkpoint string) storage.Ref {
	return storage.Ref{
		Run: events.EncodeName(s.lane.run), Trial: events.EncodeName(s.lane.trial), Checkpoint: events.EncodeName(checkpoint),
	}
}

// write makes one rank's sealed bytes durable and says so. A failure to
// write is a fact too; only a failure to say it stops the saver.
func (s *saver) write(ctx context.Context, c planner.Write) error {
	s.permits <- struct{}{}
	defer func() { <-s.permits }()
	attempt := s.lane.attempt
	w, err := s.put(ctx, c)
	if err != nil && ctx.Err() != nil {
		return nil // the attempt is over, not the disk
	}
	if s.state(c.Checkpoint, c.Rank).State == client.Aborted {
		s.sweep(ctx, c.Checkpoint) // these files may have come after the first sweep
		return nil
	}
	if err != nil {
		s.log.Error("write failed", "checkpoint", c.Checkpoint, "rank", c.Rank, "error", err)
		return s.lane.say(ctx, &events.WriteFailed{Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank, Error: err.Error()})
	}
	done := &events.WriteCompleted{
		Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank,
		IndexDigest: w.Index.String(), BytesWritten: w.BytesWritten,
	}
	for _, f := range w.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size})
	}
	return s.lane.say(ctx, done)
}

func (s *saver) writeData(ctx context.Context, c planner.Write) (storage.Written, error) {
	src, release, err := s.slots.open(c.Checkpoint, c.Rank, c.Items)
	if err != nil {
		return storage.Written{}, err
	}
	defer release()
	w := s.store.Data.Writer(s.ref(c.Checkpoint))
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return storage.Written{}, err
	}
	return w.WriteData(ctx, c.Rank, c.Items, src)
}

// commit is the crash law of a save: manifest, decision, receipt.
func (s *saver) commit(ctx context.Context, c planner.Commit) error {
	id := c.Manifest.Checkpoint
	w := s.store.Data.Writer(s.ref(id))
	_, err := w.Finish(ctx, c.Manifest, func(ctx context.Context, manifest plan.Digest) (storage.Decision, error) {
		r, err := s.lane.decide(ctx, &events.CheckpointCommitted{
			Attempt: c.Manifest.Attempt, Checkpoint: id, Manifest: manifest.String(), Bytes: c.Bytes,
		})
		return storage.Decision{Sequence: r.Sequence, Event: r.ID, Time: r.Time}, err
	})
	var unrecorded *storage.UnrecordedError
	switch {
	case errors.Is(err, errEnded):
		return nil // the log says how, and comes by here
	case errors.As(err, &unrecorded):
		s.log.Warn("the receipt is missing; it is written when the store is next opened", "checkpoint", id, "error", err)
		return nil
	case errors.Is(err, ErrFenced):
		return err
	case err != nil:
		// The files are not as their writers said: the save has failed, the
		// training has not.
		return s.abort(ctx, c.Manifest, err)
	}
	return nil
}

func (s *saver) abort(ctx context.Context, m plan.Manifest, cause error) error {
	s.log.Error("commit failed", "checkpoint", m.Checkpoint, "error", cause)
	_, err := s.lane.decide(ctx, &events.CheckpointAborted{
		Attempt: m.Attempt, Checkpoint: m.Checkpoint, Reason: "commit: " + cause.Error(),
	})
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// sweep removes what an aborted save has left. A failure costs disk space,
// not correctness: without a receipt nobody reads it.
func (s *saver) sweep(ctx context.Context, checkpoint string) {
	if err := s.store.Data.Remove(ctx, s.ref(checkpoint)); err != nil {
		s.log.Warn("leftovers of an aborted save stay on disk", "checkpoint", checkpoint, "error", err)
	}
}
