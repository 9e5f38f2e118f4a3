package projections

import "github.com/ckptstore/ckptstore/events"

// ParentRef is the reference to the checkpoint that a trial was forked from.
func ParentRef(p events.TrialParent) string {
	if p.Trial == DefaultTrial {
		return p.Run + "@" + p.Checkpoint
	}
	return p.Run + "/" + p.Trial + "@" + p.Checkpoint
}
