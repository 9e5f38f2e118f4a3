package answer

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Standing is how the time of a run was used, and what it would cost to kill it now.
type Standing struct {
	Run     string            `json:"run"`
	State   string            `json:"state"` // of its newest job; empty without one
	Usage   projections.Usage `json:"usage"`
	Goodput *float64          `json:"goodput,omitempty"` // the part of the time that led to the present
	// KilledNow has one verdict for each trial of the live job; none if no job is live.
	KilledNow []insight.KilledNow `json:"killed_now,omitempty"`
}

// StandingOf reads the standing of a run.
func StandingOf(ctx context.Context, from From, run string) (*Standing, error) {
	r, err := ReadRun(ctx, from, run)
	if err != nil {
		return nil, err
	}
	out := &Standing{Run: run, Usage: r.Usage}
	if part, ok := r.Usage.Goodput(); ok {
		out.Goodput = &part
	}
	jobs := r.List(from.Now)
	if len(jobs) == 0 {
		return out, nil
	}
	if out.State = jobs[0].State; jobs[0].Over() {
		return out, nil
	}
	now, err := query.Ask(ctx, from.Views, query.Standing, query.Params{Run: run})
	if err != nil {
		return nil, err
	}
	for _, t := range now.Trials {
		if t.Trial.Job == r.Live {
			out.KilledNow = append(out.KilledNow, insight.IfKilled(t))
		}
	}
	return out, nil
}
