package answer

import (
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/projections"
)

// Marked is the answer to `pin`, `unpin` and `tag`: the marks of a checkpoint after them.
type Marked struct {
	Run       string   `json:"run"`
	Trial     string   `json:"trial"`
	ID        string   `json:"id"`
	Pinned    bool     `json:"pinned"`
	PinReason string   `json:"pin_reason,omitempty"`
	Tags      []string `json:"tags"`
	From      string   `json:"from,omitempty"` // the checkpoint that had the tag before
}

// MarkedFrom returns the marks of a row. from is the checkpoint that had the tag before, or
// empty.
func MarkedFrom(c projections.Checkpoint, from string) Marked {
	return Marked{Run: c.Run, Trial: c.Trial, ID: c.ID, Pinned: c.Pinned, PinReason: c.PinReason, Tags: append([]string{}, c.Tags...), From: from}
}

// Stopped is the answer to `stop` and `preempt`.
type Stopped struct {
	Run     string       `json:"run"`
	Job     string       `json:"job"`
	Host    string       `json:"host"`
	PID     int          `json:"pid"`
	Preempt bool         `json:"preempt"` // the job saves first
	Reason  string       `json:"reason"`
	Ended   *insight.Job `json:"ended,omitempty"` // how the job ended, if the caller waited for it
}

// Forked is the answer to `fork`.
type Forked struct {
	Run    string         `json:"run"`
	Trial  string         `json:"trial"`
	Parent string         `json:"parent"` // the reference to the checkpoint
	Config map[string]any `json:"config"`
}

// ForkedFrom returns the answer for the trial of a new run.
func ForkedFrom(t projections.Trial) Forked {
	out := Forked{Run: t.Run, Trial: t.Name, Config: t.Config}
	if t.Parent != nil {
		out.Parent = projections.ParentRef(*t.Parent)
	}
	if out.Config == nil {
		out.Config = map[string]any{}
	}
	return out
}
