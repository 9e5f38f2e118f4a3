package launch

import (
	"context"
	"fmt"

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
	if c.Run != j.cfg.Run {
		id = c.Run + "@" + c.ID
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
