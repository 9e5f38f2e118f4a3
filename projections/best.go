package projections

import (
	"fmt"
	"math"
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
	top := math.NaN()
	err = each(r, key(keyCheckpoint, run, trial), func(c Checkpoint) error {
		if !c.Visible() {
			return nil
		}
		value, ok, err := MetricAt(r, c, metric)
		if err != nil || !ok {
			return err
		}
		if !greatest {
			value = -value
		}
		if better := value > top || math.IsNaN(top) && !math.IsNaN(value); better || !found {
			best, top, found = c, value, true
		}
		return nil
	})
	return best, found, err
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
	switch v := at.Metrics[metric].(type) {
	case float64:
		return v, true, nil
	case string:
		value, ok := nonFinite[v]
		return value, ok, nil
	}
	return 0, false, nil
}

// nonFinite are the numbers that JSON cannot hold.
var nonFinite = map[string]float64{
	"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1),
}
