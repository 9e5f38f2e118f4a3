package projections

import (
	"encoding/binary"
	"slices"
)

// A committed checkpoint has a row for each metric of the report that stands for it, so
// that a query for the best checkpoint need not decode every checkpoint and its
// reports. Reports are queued and decisions are not, so the report may come after the
// commit, and a later report may replace it. Until no report can, the checkpoint awaits
// the next one. All checkpoints that await the same report are three sets, and the
// iteration of that report has a row that names the sets. A report visits only the
// checkpoints whose part in this it changes: a checkpoint enters a set at most three
// times, however many reports pass it. A run that never reports adds one row with each
// commit, and so does a run whose saves count steps that no report reaches.

// awaiting is the row of an iteration whose report is awaited: by checkpoints, or, if the
// sets are empty, by a rollup alone.
type awaiting struct {
	At    int64 `json:"at,omitempty"`   // step of the report before, which stands for Equal and Above
	Fresh held  `json:"fresh,omitzero"` // no report stands for these
	Equal held  `json:"equal,omitzero"` // their step is At
	Above held  `json:"above,omitzero"` // their step is greater than At
}

// held is a set of checkpoints, which are rows of their own, ordered by step. Of two sets
// that meet, the rows of the smaller one move.
type held struct {
	Set uint64 `json:"set"` // number of the set, part of the keys of its rows
	N   int    `json:"n"`   // checkpoints in it
}

// waiting is a checkpoint in a set.
type waiting struct {
	Begun uint64 `json:"begun"`
	Step  int64  `json:"step"`
}

// Numbers that tell apart the sets that one event begins.
const (
	freshSet = iota
	equalSet
	aboveSet
)

// heldKey returns the start of the keys of a set.
func heldKey(run, trial string, set uint64) []byte { return number(key(keyHeld, run, trial), set) }

// ordered returns a number whose order is that of steps.
func ordered(step int64) uint64 { return uint64(step) ^ 1<<63 }

// value registers a committed checkpoint with the report that could change its values, or
// writes their rows if none can.
func (f *fold) value(c Checkpoint, from int) error {
	at, found, err := reportAt(f.t, c, from)
	if err != nil {
		return err
	}
	next := at.Iteration + 1
	reported, err := f.t.Get(reportKey(f.run, f.name, c.Attempt, next))
	if err != nil {
		return err
	}
	w := waiting{c.BegunSeq, c.Step}
	if reported != nil {
		if !found || at.Step != c.Step {
			return nil
		}
		return f.setValues(w.Begun, at)
	}
	k := awaitKey(f.run, f.name, c.Attempt, next)
	a, _, err := load[awaiting](f.t, k)
	if err != nil {
		return err
	}
	switch {
	case !found:
		err = f.hold(&a.Fresh, freshSet, w)
	case at.Step == c.Step:
		a.At, err = at.Step, f.hold(&a.Equal, equalSet, w)
	default:
		a.At, err = at.Step, f.hold(&a.Above, aboveSet, w)
	}
	if err != nil {
		return err
	}
	return store(f.t, k, a)
}

// hold adds a checkpoint to a set.
func (f *fold) hold(h *held, kind uint64, w waiting) error {
	if h.N == 0 {
		h.Set = f.r.Sequence<<2 | kind
	}
	h.N++
	return store(f.t, number(number(heldKey(f.run, f.name, h.Set), ordered(w.Step)), w.Begun), w)
}

// take removes the checkpoints of a set whose keys are below hi, and returns them. Those below
// lo were taken before, so it does not look for them.
func (f *fold) take(h *held, lo, hi []byte) (list []waiting, err error) {
	if h.N == 0 {
		return nil, nil
	}
	var keys [][]byte
	err = f.t.Scan(lo, hi, func(k, value []byte) error {
		var w waiting
		keys, list = append(keys, slices.Clone(k)), append(list, w)
		return decode(k, value, &list[len(list)-1])
	})
	for _, k := range keys {
		if err == nil {
			err = f.t.Delete(k)
		}
	}
	if h.N -= len(list); h.N == 0 {
		*h = held{}
	}
	return list, err
}

// takeAll empties a set. Steps below since were taken before.
func (f *fold) takeAll(h *held, since int64) ([]waiting, error) {
	prefix := heldKey(f.run, f.name, h.Set)
	return f.take(h, number(slices.Clone(prefix), ordered(since)), after(prefix))
}

// takeUntil removes the checkpoints from a step, below which all were taken before, up to
// another one.
func (f *fold) takeUntil(h *held, since, until int64) ([]waiting, error) {
	prefix := heldKey(f.run, f.name, h.Set)
	return f.take(h, number(slices.Clone(prefix), ordered(since)), after(number(slices.Clone(prefix), ordered(until))))
}

// join adds the checkpoints of another set, which is empty then.
func (f *fold) join(h *held, kind uint64, other held, since int64) error {
	if h.N < other.N {
		*h, other = other, *h
	}
	list, err := f.takeAll(&other, since)
	for _, w := range list {
		if err == nil {
			err = f.hold(h, kind, w)
		}
	}
	return err
}

// awaited passes a new report, and the reports that arrived ahead of it, to the
// checkpoints that await it. marked reports whether its iteration had a row.
func (f *fold) awaited(attempt int, report Report) (marked bool, err error) {
	k := awaitKey(f.run, f.name, attempt, report.Iteration)
	a, marked, err := load[awaiting](f.t, k)
	if err != nil || !marked {
		return false, err
	}
	if err := f.t.Delete(k); err != nil {
		return true, err
	}
	for a.Fresh.N+a.Equal.N+a.Above.N > 0 {
		if err := f.advance(&a, attempt, report); err != nil {
			return true, err
		}
		next, more, err := loadReport(f.t, f.run, f.name, attempt, report.Iteration+1)
		if err != nil {
			return true, err
		}
		if !more {
			return true, f.wait(a, attempt, report.Iteration+1)
		}
		report = next
	}
	return true, nil
}

// wait registers checkpoints with a report that has not come, together with those that await
// it already.
func (f *fold) wait(a awaiting, attempt, iteration int) error {
	if a.Equal.N+a.Above.N == 0 {
		return nil // a report has passed, so none of them is fresh
	}
	k := awaitKey(f.run, f.name, attempt, iteration)
	other, _, err := load[awaiting](f.t, k)
	if err != nil {
		return err
	}
	a.Fresh = other.Fresh
	if err := f.join(&a.Equal, equalSet, other.Equal, a.At); err != nil {
		return err
	}
	if err := f.join(&a.Above, aboveSet, other.Above, a.At); err != nil {
		return err
	}
	return store(f.t, k, a)
}

// advance passes a report to the checkpoints that await it: see [stands].
func (f *fold) advance(a *awaiting, attempt int, report Report) error {
	if a.Equal.N > 0 && report.Step != a.At {
		if err := f.valued(&a.Equal, attempt, a.At, report.Iteration-1); err != nil {
			return err
		}
	}
	// Of Above, those drop out that the report does not stand for: nor does any later one.
	var list []waiting
	var err error
	if report.Step > a.At {
		list, err = f.takeUntil(&a.Above, a.At, report.Step)
	} else {
		_, err = f.takeAll(&a.Above, a.At)
	}
	if err != nil {
		return err
	}
	fresh, err := f.takeAll(&a.Fresh, minStep)
	if err != nil {
		return err
	}
	a.At = report.Step
	for _, w := range append(list, fresh...) {
		switch {
		case w.Step == a.At:
			err = f.hold(&a.Equal, equalSet, w)
		case w.Step > a.At:
			err = f.hold(&a.Above, aboveSet, w)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// minStep is the least step.
const minStep = -1 << 63

// valued writes the values of checkpoints whose step is that of the report at an iteration. No
// later report stands for them.
func (f *fold) valued(h *held, attempt int, step int64, iteration int) error {
	at, _, err := loadReport(f.t, f.run, f.name, attempt, iteration)
	if err != nil {
		return err
	}
	list, err := f.takeAll(h, step)
	for _, w := range list {
		if err != nil {
			return err
		}
		c, found, failed := load[Checkpoint](f.t, checkpointKey(f.run, f.name, w.Begun))
		if err = failed; err == nil && found && c.State == Committed {
			err = f.setValues(w.Begun, at)
		}
	}
	return err
}

// unsettled visits the checkpoints that have no rows of values yet, with the report for their
// step that stands for them so far. Some may be deleted.
func unsettled(r Reader, run, trial string, visit func(begun uint64, at Report)) error {
	prefix := key(keyAwait, run, trial)
	return r.Scan(prefix, after(prefix), func(k, value []byte) error {
		var a awaiting
		if err := decode(k, value, &a); err != nil || a.Equal.N == 0 {
			return err
		}
		attempt := int(binary.BigEndian.Uint64(k[len(k)-16:]))
		at, found, err := loadReport(r, run, trial, attempt, int(binary.BigEndian.Uint64(k[len(k)-8:]))-1)
		if err != nil || !found {
			return err
		}
		return each(r, heldKey(run, trial, a.Equal.Set), func(w waiting) error {
			visit(w.Begun, at)
			return nil
		})
	})
}
