package projections

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// best compares the reports at the steps of the line's checkpoints.
func (p place) best(ref, rest string) (Checkpoint, error) {
	metric, mode, _ := cutLast(rest, ':')
	if metric == "" || mode != "min" && mode != "max" {
		return Checkpoint{}, fmt.Errorf("%w %q: write RUN@best:METRIC:min or RUN@best:METRIC:max", ErrReference, ref)
	}
	c, found, err := p.one(ref, func(t Trial) (Checkpoint, bool, error) {
		return Best(p.r, t.Run, t.Name, metric, mode == "max")
	})
	if err == nil && !found {
		err = &NotFoundError{
			What: "checkpoint", Ref: ref,
			Hint: fmt.Sprintf("no committed checkpoint has a report of the metric %q at its step", metric),
		}
	}
	return c, err
}

// Best is the visible checkpoint of a trial with the best value of a metric:
// the greatest, or the least if not greatest. The value is that of the report
// at the checkpoint's step in its attempt; a checkpoint without one does not
// take part. NaN is worse than anything, and the newer one wins a tie.
func Best(r Reader, run, trial, metric string, greatest bool) (best Checkpoint, found bool, err error) {
	all, err := values(r, run, trial, metric)
	if err != nil {
		return best, false, err
	}
	// All committed ones have values, also those that are superseded: the
	// line is not asked before it must be.
	slices.SortStableFunc(all, func(a, b numbered) int {
		switch {
		case math.IsNaN(a.value) || math.IsNaN(b.value):
			return cmp.Compare(worst(a.value), worst(b.value))
		case greatest:
			return cmp.Compare(b.value, a.value)
		}
		return cmp.Compare(a.value, b.value)
	})
	for _, v := range all {
		c, found, err := load[Checkpoint](r, checkpointKey(run, trial, v.begun))
		if err != nil || found && c.Visible() {
			return c, found, err
		}
	}
	return Checkpoint{}, false, nil
}

// worst is 1 for what is worse than any number.
func worst(v float64) int {
	if math.IsNaN(v) {
		return 1
	}
	return 0
}

// MetricAt is the value of a metric in the report at a checkpoint's step; ok
// is false if there is none or it is not a number.
func MetricAt(r Reader, c Checkpoint, metric string) (value float64, ok bool, err error) {
	a, _, err := load[Attempt](r, attemptKey(c.Run, c.Trial, c.Attempt))
	if err != nil {
		return 0, false, err
	}
	at, found, err := reportAt(r, c, a.segment(c.BegunSeq).From)
	if err != nil || !found || at.Step != c.Step {
		return 0, false, err
	}
	value, ok = asNumber(at.Metrics[metric])
	return value, ok, nil
}
