// Package tune decides which trials of a search are trained, how far, and with which
// configuration: by asynchronous successive halving or population-based training over the reports
// in the log. It has no clock, no files and no network: the same events give the same decisions.
//
// The rule of successive halving is Algorithm 2 of Li et al., "A System for Massively Parallel Hyperparameter
// Tuning" (MLSys 2020): the variant that promotes. A trial is trained to the steps of its
// rung and then gives its slot away; a free slot gets the best trial that may be promoted
// from the highest rung that has one, or else a new trial. The other variant stops a trial
// at a rung for good, because its systems cannot pause one. Here each trial that pauses has a
// committed checkpoint, so a trial that turns out to be among the best later is not lost.
//
// The rule of population-based training is that of Jaderberg et al., "Population Based Training
// of Neural Networks" (2017), with truncation selection, in its synchronous form. All trials are
// trained for one interval, report and save. Then each of the worst gives its place to a clone of
// one of the best: a new trial, forked from the donor's checkpoint, with the donor's configuration
// perturbed. The next interval begins when all trials have the last one, so no decision depends on
// which trial was faster, or on when a tuner was killed.
//
//	Definition   what is searched, as in search.begun
//	Space        the configurations of the trials
//	Search       the state of a search: a fold of the run's events
//	population   the part of it that population-based training adds
//	Search.Next  the next decision: a function of that state alone
//	Replay       compares the decisions in a log with those that follow from it
package tune

import (
	"fmt"
	"math"
	"strconv"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrDefinition reports a search that cannot be run as it is defined.
var ErrDefinition = problem.New(problem.Invalid, "bad search")

// Modes: which values of the metric are better.
const (
	Min = "min"
	Max = "max"
)

// PBT is the scheduler of population-based training. Without a scheduler, a search is
// asynchronous successive halving.
const PBT = "pbt"

// Bounds of a search.
const (
	mostTrials    = 100_000
	mostIntervals = 100_000
)

// Definition is what is searched. It exists apart from the event because it is checked and
// has the space decoded.
type Definition struct {
	Metric    string
	Mode      string // [Min] or [Max]
	Trials    int
	Seed      int64
	Grace     int64 // steps of the first rung
	Reduction int
	MaxSteps  int64 // steps of the last rung
	Finite    bool  // infinite values of the metric count as NaN; not so in older searches
	Space     Space

	Scheduler   string // [PBT]; empty: asynchronous successive halving
	Every       int64  // steps of an interval, of population-based training
	Quantile    float64
	Exploration // of population-based training
}

// Define checks a definition as it is in the log. The error is an [ErrDefinition].
func Define(b events.SearchBegun) (d Definition, err error) {
	bad := func(format string, args ...any) (Definition, error) {
		return Definition{}, fmt.Errorf("%w: %s", ErrDefinition, fmt.Sprintf(format, args...))
	}
	d = Definition{
		Metric: b.Metric, Mode: b.Mode, Trials: b.Trials, Seed: b.Seed, Grace: b.Grace, Reduction: b.Reduction, MaxSteps: b.MaxSteps, Finite: b.Finite,
		Scheduler: b.Scheduler, Every: b.Every, Quantile: b.Quantile, Exploration: Exploration{Resample: b.Resample, Factors: b.Factors, Perturb: b.Perturb},
	}
	switch {
	case b.Metric == "":
		return bad("no metric: name what the workers report, such as loss")
	case b.Mode != Min && b.Mode != Max:
		return bad("mode %q: give min or max", b.Mode)
	case b.Trials < 1 || b.Trials > mostTrials:
		return bad("%d trials: give 1 to %d", b.Trials, mostTrials)
	case b.MaxSteps < 1:
		return bad("at most %d steps: give 1 or more", b.MaxSteps)
	case b.Scheduler != "" && b.Scheduler != PBT:
		return bad("scheduler %q: this version knows %s alone", b.Scheduler, PBT)
	case d.PBT():
	case b.Reduction < 2:
		return bad("reduction factor %d: give 2 or more", b.Reduction)
	case b.Grace < 1 || b.Grace > b.MaxSteps:
		return bad("%d steps for each trial: give 1 to the most steps, %d", b.Grace, b.MaxSteps)
	}
	if d.Space, err = parseSpace(b.Space); err != nil {
		return bad("%s", err)
	}
	if d.PBT() {
		err = d.checkPopulation()
	}
	return d, err
}

// PBT reports whether the search is population-based training.
func (d Definition) PBT() bool { return d.Scheduler == PBT }

// Body returns the definition as it is in the log.
func (d Definition) Body(job string) *events.SearchBegun {
	return &events.SearchBegun{
		Job: job, Metric: d.Metric, Mode: d.Mode, Trials: d.Trials, Seed: d.Seed,
		Grace: d.Grace, Reduction: d.Reduction, MaxSteps: d.MaxSteps, Finite: d.Finite, Space: d.Space.Values(),
		Scheduler: d.Scheduler, Every: d.Every, Quantile: d.Quantile, Resample: d.Resample, Factors: d.Factors, Perturb: d.Perturb,
	}
}

// Rungs returns the steps of each rung: grace × reduction^k below the most steps, and the
// most steps. If those are a power of the reduction factor apart, these are the paper's. In
// population-based training, a rung is the end of an interval.
func (d Definition) Rungs() (rungs []int64) {
	if d.PBT() {
		for steps := d.Every; steps < d.MaxSteps; steps += d.Every {
			if rungs = append(rungs, steps); steps >= d.MaxSteps-d.Every {
				break
			}
		}
		return append(rungs, d.MaxSteps)
	}
	for steps := d.Grace; steps < d.MaxSteps; steps *= int64(d.Reduction) {
		rungs = append(rungs, steps)
		if steps > math.MaxInt64/int64(d.Reduction) {
			break
		}
	}
	return append(rungs, d.MaxSteps)
}

// Name returns the name of a trial, counted from 0: t00, t01 and so on. Names sort in the
// order of the trials.
func (d Definition) Name(trial int) string {
	return fmt.Sprintf("t%0*d", max(2, len(strconv.Itoa(d.Trials-1))), trial)
}

// Index returns the number of a trial, or -1 if the search has none of that name.
func (d Definition) Index(name string) int {
	if len(name) < 2 || name[0] != 't' {
		return -1
	}
	i, err := strconv.Atoi(name[1:])
	if err != nil || i < 0 || i >= d.Trials || d.Name(i) != name {
		return -1
	}
	return i
}

// Drawn returns the configuration that a trial begins with, unless it is a clone. It depends on
// the space, the seed and the trial's number alone.
func (d Definition) Drawn(trial int) map[string]any { return d.Space.Draw(d.Seed, trial) }

// counts reports whether a trial with a value of the metric may be trained further, or be the
// best.
func (d Definition) counts(v float64) bool {
	return !math.IsNaN(v) && !(d.Finite && math.IsInf(v, 0))
}

// better reports whether a value of the metric is better than another. A value that does not count
// is worse than every other.
func (d Definition) better(a, b float64) bool {
	switch {
	case !d.counts(a):
		return false
	case !d.counts(b):
		return true
	case d.Mode == Max:
		return a > b
	}
	return a < b
}
