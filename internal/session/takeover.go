package session

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// recoverSaves ends the saves that the trial's earlier attempts left open. A save
// of the newest attempt is committed if all its bytes are in files or in slots
// that the dead trainer left; all others are aborted.
func (j *Job) recoverSaves(ctx context.Context, trial projections.Trial) error {
	open, err := j.store.Views.OpenCheckpoints(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil || len(open) == 0 {
		return err
	}
	newest := false
	for _, c := range open {
		if c.Attempt == trial.Attempt {
			newest = true
			continue
		}
		_, err := j.decisions.decide(ctx, &events.CheckpointAborted{
			Attempt: c.Attempt, Checkpoint: c.ID, Reason: fmt.Sprintf("attempt %d took over", trial.Attempt),
		})
		if err != nil && !errors.Is(err, errEnded) {
			return err
		}
	}
	if !newest {
		return nil
	}
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at < 0 {
		return fmt.Errorf("trial %s of run %s: the views have no attempt %d; run `ckptstore verify`", trial.Name, trial.Run, trial.Attempt)
	}
	world, from := attempts[at].WorldSize, attempts[at].StartedSeq
	kept, err := j.adopt(ctx, trial.Attempt, world, from)
	if err != nil {
		return err
	}
	defer kept.close()
	err = j.takeOver(ctx, trial.Attempt, world, from, kept)
	if len(kept.saves) > 0 && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		j.log.Warn("staged saves of a dead trainer aborted: not finished in time", "drain_timeout", j.cfg.DrainTimeout, "error", err)
		err = j.takeOver(ctx, trial.Attempt, world, from, nil)
	}
	return err
}

// TakeOver ends the saves of an attempt of this job, whose group could not end
// them itself. from is the sequence at which the attempt began.
func (j *Job) TakeOver(ctx context.Context, attempt int, from uint64) error {
	return j.takeOver(ctx, attempt, j.world, from, nil)
}

// takeOver replays an attempt into a new coordinator, which ends its saves. The
// saves in kept have their bytes in shared memory and are finished.
func (j *Job) takeOver(ctx context.Context, attempt, world int, from uint64, kept *adopted) error {
	known, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	const why = "the trainer ended before the save was complete"
	coord := planner.NewCoordinator(j.coordinator(attempt, world))
	s := newSaver(j.decisions, j.store, coord, j.log, staging.New(j.arenas, j.cfg.staging(j.log)))
	s.alone = kept != nil // its slots are not locked: the trainer that wrote is dead
	s.onCommit(j.cfg.Committed, nil)
	if kept == nil {
		coord.Abandon(why)
	} else {
		coord.Abandon(why, kept.saves...)
		kept.serve(s)
	}
	defer s.slots.Close()
	s.drain <- drain{why, known}
	ctx, cancel := j.store.answering(ctx, j.cfg.DrainTimeout)
	defer cancel()
	if err := s.run(ctx, from, known); err != nil {
		return fmt.Errorf("end the saves that attempt %d left open: %w", attempt, err)
	}
	return nil
}
