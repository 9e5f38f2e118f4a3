package projections

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// minPrefix is the number of characters of an ID that are enough to search for it.
const minPrefix = 4

// Resolve returns the one checkpoint that a reference stands for.
//
//	RUN                     the newest in the line of the run
//	RUN@latest              the same
//	RUN@best:METRIC:min     the checkpoint whose report has the least METRIC, of all
//	                        trials that RUN means; or :max
//	RUN@ID                  the checkpoint with that ID, in any state
//	RUN@NAME                the newest of that name in the line
//	RUN@TAG                 the checkpoint with that tag
//	RUN@PREFIX              the only committed checkpoint whose ID starts so;
//	                        at least 4 characters
//	ID, PREFIX              the same among all runs, if no run has that name
//
// They are tried in this order, and exact ones before prefixes. RUN may be RUN/TRIAL;
// without a trial it means "main", or the only trial. A run's name may contain "@" and
// "/": the whole reference is tried as a run first, then the part before the last "@",
// before the second-last, and so on.
//
// Only RUN@ID and ID can return a checkpoint that is not committed. Errors are a
// [NotFoundError], an [AmbiguousError], or [ErrReference].
func Resolve(r Reader, ref string) (Checkpoint, error) {
	if ref == "" {
		return Checkpoint{}, fmt.Errorf("%w: it is empty; write RUN, RUN@NAME or an ID", ErrReference)
	}
	line, found, err := findTrial(r, ref)
	if err != nil {
		return Checkpoint{}, err
	}
	if found {
		return line.latest(ref)
	}
	for end := strings.LastIndexByte(ref, '@'); end >= 0; end = strings.LastIndexByte(ref[:end], '@') {
		line, found, err := findTrial(r, ref[:end])
		if err != nil {
			return Checkpoint{}, err
		}
		if found {
			return line.resolve(ref, ref[end+1:])
		}
	}
	if run, _, has := cutLast(ref, '@'); has {
		runs, err := Runs(r)
		if err != nil {
			return Checkpoint{}, err
		}
		return Checkpoint{}, notFound("run", run, names(runs, func(run Run) string { return run.Name }))
	}
	return anywhere(r, ref)
}

func cutLast(s string, sep byte) (before, after string, found bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// place is the trial, or the trials, that the left side of a reference means.
type place struct {
	r      Reader
	trials []Trial // as stored
}

// findTrial looks for RUN, then for RUN/TRIAL.
func findTrial(r Reader, name string) (place, bool, error) {
	if _, found, err := load[Run](r, key(keyRun, name)); err != nil {
		return place{}, false, err
	} else if found {
		main, found, err := load[Trial](r, trialKey(name, DefaultTrial))
		if err != nil || found {
			return place{r, []Trial{main}}, true, err
		}
		trials, err := all[Trial](r, key(keyTrial, name))
		return place{r, trials}, true, err
	}
	for end := strings.LastIndexByte(name, '/'); end >= 0; end = strings.LastIndexByte(name[:end], '/') {
		t, found, err := load[Trial](r, trialKey(name[:end], name[end+1:]))
		if err != nil || found {
			return place{r, []Trial{t}}, found, err
		}
	}
	return place{}, false, nil
}

// one runs a search in each trial. Several hits are ambiguous.
func (p place) one(ref string, search func(Trial) (Checkpoint, bool, error)) (Checkpoint, bool, error) {
	var hits []Checkpoint
	for _, t := range p.trials {
		c, found, err := search(t)
		if err != nil {
			return c, false, err
		}
		if found {
			hits = append(hits, c)
		}
	}
	switch len(hits) {
	case 0:
		return Checkpoint{}, false, nil
	case 1:
		return hits[0], true, nil
	}
	return Checkpoint{}, false, ambiguous(ref, hits)
}

// ambiguous returns an [AmbiguousError] with full references.
func ambiguous(ref string, hits []Checkpoint) error {
	return &AmbiguousError{Ref: ref, Candidates: names(hits, func(c Checkpoint) string {
		return c.Run + "/" + c.Trial + "@" + c.ID
	})}
}

func (p place) latest(ref string) (Checkpoint, error) {
	c, found, err := p.one(ref, func(t Trial) (Checkpoint, bool, error) {
		c, found, err := load[Checkpoint](p.r, checkpointKey(t.Run, t.Name, t.HeadSeq))
		return c, found && c.Visible(), err
	})
	if err == nil && !found {
		err = &NotFoundError{What: "checkpoint", Ref: ref, Hint: "none is committed in its line"}
	}
	return c, err
}

func (p place) resolve(ref, what string) (Checkpoint, error) {
	if what == "latest" {
		return p.latest(ref)
	}
	if what == "" {
		return Checkpoint{}, fmt.Errorf("%w %q: nothing after the \"@\"; write RUN@NAME, RUN@latest or RUN@best:METRIC:min", ErrReference, ref)
	}
	if rest, ok := strings.CutPrefix(what, "best:"); ok {
		return p.best(ref, rest)
	}
	searches := []func(Trial) (Checkpoint, bool, error){
		func(t Trial) (Checkpoint, bool, error) { return checkpointByID(p.r, t.Run, t.Name, what) },
		func(t Trial) (Checkpoint, bool, error) { return p.named(t, what) },
		func(t Trial) (Checkpoint, bool, error) { return p.tagged(t, what) },
	}
	for _, search := range searches {
		if c, found, err := p.one(ref, search); err != nil || found {
			return c, err
		}
	}
	return p.prefixed(ref, what)
}

// named returns the newest visible checkpoint of a name; its ID starts with the name.
func (p place) named(t Trial, name string) (newest Checkpoint, found bool, err error) {
	rows, err := p.startingWith(t, name+".a")
	for _, c := range rows {
		if c.Name == name && c.Visible() && c.BegunSeq > newest.BegunSeq {
			newest, found = c, true
		}
	}
	return newest, found, err
}

// startingWith returns the checkpoints whose ID starts with prefix.
func (p place) startingWith(t Trial, prefix string) ([]Checkpoint, error) {
	ids, err := identifiers(p.r, t.Run, t.Name, prefix)
	if err != nil {
		return nil, err
	}
	rows := make([]Checkpoint, len(ids))
	for i, id := range ids {
		if rows[i], _, err = checkpointByID(p.r, t.Run, t.Name, id); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

func (p place) tagged(t Trial, tag string) (Checkpoint, bool, error) {
	begun, found, err := load[uint64](p.r, tagKey(t.Run, t.Name, tag))
	if err != nil || !found {
		return Checkpoint{}, false, err
	}
	c, found, err := load[Checkpoint](p.r, checkpointKey(t.Run, t.Name, begun))
	return c, found && c.State == Committed, err
}

// prefixed is the last try: the committed checkpoints whose ID starts with prefix. If
// any checkpoint has exactly that name, only such checkpoints count; otherwise the name
// of a deleted step-1 would stand for step-10.
func (p place) prefixed(ref, prefix string) (Checkpoint, error) {
	var found []Checkpoint
	if len(prefix) >= minPrefix {
		for _, t := range p.trials {
			rows, err := p.startingWith(t, prefix)
			if err != nil {
				return Checkpoint{}, err
			}
			found = append(found, rows...)
		}
	}
	if slices.ContainsFunc(found, func(c Checkpoint) bool { return c.Name == prefix }) {
		found = slices.DeleteFunc(found, func(c Checkpoint) bool { return c.Name != prefix })
	}
	var hits, others []Checkpoint
	for _, c := range found {
		if c.State == Committed {
			hits = append(hits, c)
		} else {
			others = append(others, c)
		}
	}
	switch {
	case len(hits) == 1:
		return hits[0], nil
	case len(hits) > 1:
		return Checkpoint{}, ambiguous(ref, hits)
	case len(others) > 0:
		return Checkpoint{}, &NotFoundError{
			What: "committed checkpoint", Ref: ref,
			Hint: fmt.Sprintf("%q is %s", others[0].ID, others[0].State),
		}
	}
	var have []string
	for _, t := range p.trials {
		rows, err := all[Checkpoint](p.r, key(keyCheckpoint, t.Run, t.Name))
		if err != nil {
			return Checkpoint{}, err
		}
		for _, c := range rows {
			if c.State == Committed {
				have = append(have, c.ID)
			}
		}
	}
	e := notFound("checkpoint", prefix, have)
	e.Ref = ref
	return Checkpoint{}, e
}

// anywhere looks for an ID or a prefix of one in all runs.
func anywhere(r Reader, ref string) (Checkpoint, error) {
	trials, err := all[Trial](r, key(keyTrial))
	if err != nil {
		return Checkpoint{}, err
	}
	p := place{r, trials}
	c, found, err := p.one(ref, func(t Trial) (Checkpoint, bool, error) {
		return checkpointByID(r, t.Run, t.Name, ref)
	})
	if err != nil || found {
		return c, err
	}
	c, err = p.prefixed(ref, ref)
	var missing *NotFoundError
	if errors.As(err, &missing) && missing.What == "checkpoint" {
		runs, err := Runs(r)
		if err != nil {
			return Checkpoint{}, err
		}
		return Checkpoint{}, notFound("run or checkpoint", ref, names(runs, func(run Run) string { return run.Name }))
	}
	return c, err
}

// best compares the reports at the steps of the line's checkpoints.
func (p place) best(ref, rest string) (Checkpoint, error) {
	metric, mode, _ := cutLast(rest, ':')
	if metric == "" || mode != "min" && mode != "max" {
		return Checkpoint{}, fmt.Errorf("%w %q: write RUN@best:METRIC:min or RUN@best:METRIC:max", ErrReference, ref)
	}
	c, found, err := p.bestOf(metric, mode == "max")
	if err == nil && !found {
		err = &NotFoundError{
			What: "checkpoint", Ref: ref,
			Hint: fmt.Sprintf("no committed checkpoint has a report of the metric %q at its step", metric),
		}
	}
	return c, err
}

// bestOf returns the best of all trials.
func (p place) bestOf(metric string, greatest bool) (best Checkpoint, found bool, err error) {
	value := math.NaN()
	for _, t := range p.trials {
		c, has, err := Best(p.r, t.Run, t.Name, metric, greatest)
		if err != nil {
			return c, false, err
		}
		if !has {
			continue
		}
		v, _, err := MetricAt(p.r, c, metric)
		if err != nil {
			return c, false, err
		}
		if !found || betterOf(v, value, greatest) || !betterOf(value, v, greatest) && c.CommittedSeq > best.CommittedSeq {
			best, value, found = c, v, true
		}
	}
	return best, found, nil
}

// betterOf reports whether a value is better than another. NaN is worse than any number.
func betterOf(a, b float64, greatest bool) bool {
	switch {
	case math.IsNaN(a) || math.IsNaN(b):
		return worst(a) < worst(b)
	case greatest:
		return a > b
	}
	return a < b
}

// Best returns the visible checkpoint of a trial with the best value of a metric: the
// greatest, or the least if greatest is false. The value is taken from the report at
// the checkpoint's step in its attempt; a checkpoint without such a report is ignored.
// NaN is worse than any number, and the newer checkpoint wins a tie.
func Best(r Reader, run, trial, metric string, greatest bool) (best Checkpoint, found bool, err error) {
	all, err := values(r, run, trial, metric)
	if err != nil {
		return best, false, err
	}
	// All committed checkpoints have values, including superseded ones. The line is
	// read only if needed.
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

// worst returns 1 for NaN, which is worse than any number, and 0 otherwise.
func worst(v float64) int {
	if math.IsNaN(v) {
		return 1
	}
	return 0
}

// MetricAt returns the value of a metric in the report at a checkpoint's step; ok is
// false if there is none or it is not a number.
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
