package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// LostSaveError says that all workers ended well, and that the last save that
// they began was aborted: what they did since the newest checkpoint is lost.
// Who wants to know it while there is time waits for the save.
type LostSaveError struct {
	Checkpoint string // that was aborted
	Reason     string
	Newest     string // committed checkpoint of the line; empty: there is none
}

// Error says what is lost and the next step.
func (e *LostSaveError) Error() string {
	from := "there is no other checkpoint, so it would start afresh"
	if e.Newest != "" {
		from = "it would resume from " + e.Newest
	}
	return fmt.Sprintf("the workers ended well, but their last save, %s, was aborted: %s; run the job again when that is mended: %s", e.Checkpoint, e.Reason, from)
}

// completed brings the trial to its end after an attempt in which all workers
// ended well.
func (j *job) completed(ctx context.Context, attempt int) error {
	if j.newest != "" {
		c, err := j.store.Views.Resolve(ctx, j.cfg.Run+"/"+j.cfg.Trial+"@"+j.newest)
		if err != nil {
			return err
		}
		if c.State == projections.Aborted {
			trial, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
			if err != nil {
				return err
			}
			lost := &LostSaveError{Checkpoint: j.newest, Reason: c.Reason, Newest: trial.Head}
			return errors.Join(lost, j.paused(ctx, attempt, beginning(lost.Error(), maxMessage)))
		}
	}
	_, err := j.lane.decide(ctx, &events.TrialCompleted{Attempt: attempt})
	return err
}
