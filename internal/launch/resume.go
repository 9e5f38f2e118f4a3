package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// firstResume resolves the user's choice of what to resume from. Later attempts
// resume from the last committed checkpoint of the line: see [job.nextResume].
func (j *job) firstResume(ctx context.Context, trial projections.Trial) (string, error) {
	head := startOf(trial)
	switch j.cfg.Resume {
	case "auto":
		return j.wholeFrom(ctx, head)
	case "none":
		return "", nil
	case "require":
		if head == "" {
			return "", fmt.Errorf("%w: --resume require: run %q has no committed checkpoint; use --resume auto to start afresh", ErrConfig, j.cfg.Run)
		}
		return head, j.wholeOnly(ctx, "require", head)
	}
	if restore.IsPath(j.cfg.Resume) {
		f, err := j.store.Foreign(ctx, j.cfg.Resume)
		if err != nil {
			return "", fmt.Errorf("%w: --resume: %w", ErrConfig, err)
		}
		return f.Path(), nil
	}
	c, err := j.store.Views.Resolve(ctx, restore.Qualify(j.cfg.Run, j.cfg.Trial, j.cfg.Resume))
	if err != nil {
		return "", fmt.Errorf("%w: --resume: %w", ErrConfig, err)
	}
	id := c.ID
	if c.Run != j.cfg.Run || c.Trial != j.cfg.Trial {
		id = projections.ParentRef(events.TrialParent{Run: c.Run, Trial: c.Trial, Checkpoint: c.ID})
	}
	return id, j.wholeOnly(ctx, j.cfg.Resume, id)
}

// nextResume returns what a later attempt of the job resumes from: the last committed
// checkpoint of the line, whatever the first attempt resumed from.
func (j *job) nextResume(ctx context.Context, trial projections.Trial) (string, error) {
	if j.cfg.Resume == "require" && trial.Head != "" {
		return trial.Head, j.wholeOnly(ctx, "require", trial.Head)
	}
	return j.wholeFrom(ctx, trial.Head)
}

// startOf returns what a trial continues from by default: the newest checkpoint
// of its line or, if its line is empty, the checkpoint that it was forked from.
func startOf(trial projections.Trial) string {
	if trial.Head != "" || trial.Parent == nil || trial.Attempt > 0 {
		return trial.Head
	}
	return projections.ParentRef(*trial.Parent)
}

// LostSaveError is returned if all workers ended well but their last accepted
// save was aborted, or lost before it was in the log. The work since the newest
// checkpoint is lost. A worker can wait for its save to learn this in time. A
// save that was refused to the worker itself does not count.
type LostSaveError struct {
	Checkpoint string // the checkpoint that was aborted or lost
	Reason     string
	Newest     string // committed checkpoint of the line; empty: none exists
}

// Error returns what is lost and the next step.
func (e *LostSaveError) Error() string {
	from := "there is no other checkpoint, so it would start afresh"
	if e.Newest != "" {
		from = "it would resume from " + e.Newest
	}
	return fmt.Sprintf("the workers ended well, but their last save, %s, was aborted: %s; fix that and run the job again: %s", e.Checkpoint, e.Reason, from)
}

// completed completes the trial after an attempt in which all workers ended well.
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

// lost returns why the last save of the last attempt does not exist. It returns
// "" if the save exists, or if there was none.
func (j *job) lost(ctx context.Context) (why string, err error) {
	id := j.newest.Checkpoint
	if id == "" || j.newest.Unbegun != "" {
		return j.newest.Unbegun, nil
	}
	c, err := j.store.Views.Resolve(ctx, j.cfg.Run+"/"+j.cfg.Trial+"@"+id)
	switch {
	case errors.Is(err, projections.ErrNotFound) || err == nil && c.ID != id: // Resolve may find an ID with this prefix
		return "the log has not begun it", nil
	case err != nil:
		return "", err
	case c.State == projections.Aborted:
		return cmp.Or(c.Reason, "no reason is in the log"), nil
	}
	return "", nil
}
