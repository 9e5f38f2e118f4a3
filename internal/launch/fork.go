package launch

import "github.com/ckptstore/ckptstore/projections"

// startOf is what a trial continues from when nothing else is asked for: the
// newest checkpoint of its line or, before it has a line, the checkpoint that
// it was forked from.
func startOf(trial projections.Trial) string {
	if trial.Head != "" || trial.Parent == nil || trial.Attempt > 0 {
		return trial.Head
	}
	return projections.ParentRef(*trial.Parent)
}
