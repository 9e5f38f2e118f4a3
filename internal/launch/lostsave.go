package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// LostSaveError says that all workers ended well, and that the last save that
// they were let copy was aborted, or lost before the log had begun it: what they
// did since the newest checkpoint is lost. Who wants to know it while there is
// time waits for the save. A save that was refused to the worker itself is none.
type LostSaveError struct {
	Checkpoint string // that was aborted or lost
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
	if why, err := j.lost(ctx); err != nil {
		return err
	} else if why != "" {
		trial, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
		if err != nil {
			return err
		}
		lost := &LostSaveError{Checkpoint: j.newest.Checkpoint, Reason: why, Newest: trial.Head}
		return errors.Join(lost, j.paused(ctx, attempt, session.Beginning(lost.Error(), session.MaxMessage)))
	}
	return j.Decide(ctx, &events.TrialCompleted{Attempt: attempt})
}

// lost is why the last save of the last attempt does not exist; empty if it
// does, or if there was none.
func (j *job) lost(ctx context.Context) (why string, err error) {
	id := j.newest.Checkpoint
	if id == "" || j.newest.Unbegun != "" {
		return j.newest.Unbegun, nil
	}
	c, err := j.store.Views.Resolve(ctx, j.cfg.Run+"/"+j.cfg.Trial+"@"+id)
	switch {
	case errors.Is(err, projections.ErrNotFound) || err == nil && c.ID != id: // what is found has an ID that begins like it
		return "the log has not begun it", nil
	case err != nil:
		return "", err
	case c.State == projections.Aborted:
		return cmp.Or(c.Reason, "no reason is in the log"), nil
	}
	return "", nil
}
