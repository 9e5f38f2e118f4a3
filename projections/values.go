package projections

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A committed checkpoint has a row for each metric of the report that stands for it, so
// that a query for the best checkpoint need not decode every checkpoint and its
// reports. Reports are queued and decisions are not, so the report may come after the
// commit. Until a report ends its step, the checkpoint awaits the next one: it has a
// row under that report's iteration, and the iteration has a mark. A report looks up
// only the mark of its own iteration. A run that never reports adds one row with each
// commit, and no commit reads the rows before it.

// awaiting is the row of a waiting checkpoint. It holds enough to skip a report that
// changes nothing without reading another row.
type awaiting struct {
	Begun uint64 `json:"begun"`
	Step  int64  `json:"step"`            // the checkpoint's
	Found bool   `json:"found,omitempty"` // the report before the awaited one stands for it, so far
	At    int64  `json:"at,omitempty"`    // step of that report
}

// value writes the rows of a committed checkpoint's values, and registers it with the
// report that could change them.
func (f *fold) value(c Checkpoint, from int) error {
	at, found, err := reportAt(f.t, c, from)
	if err != nil {
		return err
	}
	if found {
		if err := f.setValues(c, at); err != nil {
			return err
		}
	}
	next := at.Iteration + 1
	if reported, err := f.t.Get(reportKey(f.run, f.name, c.Attempt, next)); err != nil || reported != nil {
		return err // which includes the context
	}
	return f.await(c.Attempt, next, awaiting{c.BegunSeq, c.Step, found, at.Step})
}

func (f *fold) await(attempt, iteration int, some ...awaiting) error {
	k := awaitKey(f.run, f.name, attempt, iteration)
	if err := f.t.Set(k, awaitMark); err != nil {
		return err
	}
	for _, w := range some {
		if err := store(f.t, number(slices.Clone(k), w.Begun), w); err != nil {
			return err
		}
	}
	return nil
}

// awaitMark is the value of an iteration's mark.
var awaitMark = []byte("true")

// takeAwaiting removes the checkpoints that await a report and returns them. marked reports
// whether the iteration had a mark: a rollup may await the report too.
func (f *fold) takeAwaiting(attempt, iteration int) (list []awaiting, marked bool, err error) {
	k := awaitKey(f.run, f.name, attempt, iteration)
	if mark, err := f.t.Get(k); err != nil || mark == nil {
		return nil, false, err
	}
	if err := f.t.Delete(k); err != nil {
		return nil, true, err
	}
	list, err = all[awaiting](f.t, k)
	for _, w := range list {
		if err == nil {
			err = f.t.Delete(number(slices.Clone(k), w.Begun))
		}
	}
	return list, true, err
}

// awaited passes a new report, and the reports that arrived ahead of it, to the
// checkpoints that await it. marked reports whether the iteration had a mark.
func (f *fold) awaited(attempt int, report Report) (marked bool, err error) {
	list, marked, err := f.takeAwaiting(attempt, report.Iteration)
	if err != nil || len(list) == 0 {
		return marked, err
	}
	for {
		kept := list[:0]
		for _, w := range list {
			if !stands(w.Step, report, w.At, w.Found) {
				continue // nor does any later one
			}
			if err := f.replace(w, attempt, report); err != nil {
				return marked, err
			}
			kept = append(kept, awaiting{w.Begun, w.Step, true, report.Step})
		}
		if list = kept; len(list) == 0 {
			return marked, nil
		}
		next, more, err := loadReport(f.t, f.run, f.name, attempt, report.Iteration+1)
		if err != nil {
			return marked, err
		}
		if !more {
			return marked, f.await(attempt, report.Iteration+1, list...)
		}
		report = next
	}
}

// replace makes the report stand for a checkpoint.
func (f *fold) replace(w awaiting, attempt int, report Report) error {
	had, has := w.Found && w.At == w.Step, report.Step == w.Step
	if !had && !has {
		return nil
	}
	c, found, err := load[Checkpoint](f.t, checkpointKey(f.run, f.name, w.Begun))
	if err != nil || !found || c.State != Committed {
		return err
	}
	if had {
		old, _, err := loadReport(f.t, f.run, f.name, attempt, report.Iteration-1)
		if err != nil {
			return err
		}
		if err := f.dropValues(c, old); err != nil {
			return err
		}
	}
	return f.setValues(c, report)
}

// unvalue removes the rows of a checkpoint that is no longer committed.
func (f *fold) unvalue(c Checkpoint) error {
	a, _, err := load[Attempt](f.t, attemptKey(f.run, f.name, c.Attempt))
	if err != nil {
		return err
	}
	at, found, err := reportAt(f.t, c, a.segment(c.BegunSeq).From)
	if err != nil || !found {
		return err
	}
	return f.dropValues(c, at)
}

// setValues writes a row for each metric that is a number. Only a report of the
// checkpoint's own step counts.
func (f *fold) setValues(c Checkpoint, at Report) error {
	if at.Step != c.Step {
		return nil
	}
	for _, metric := range sortedNames(at.Metrics) {
		v, ok := asNumber(at.Metrics[metric])
		if !ok {
			continue
		}
		if err := f.t.Set(valueKey(f.run, f.name, metric, c.BegunSeq), encodeNumber(v)); err != nil {
			return err
		}
	}
	return nil
}

func (f *fold) dropValues(c Checkpoint, at Report) error {
	if at.Step != c.Step {
		return nil
	}
	for _, metric := range sortedNames(at.Metrics) {
		if err := f.t.Delete(valueKey(f.run, f.name, metric, c.BegunSeq)); err != nil {
			return err
		}
	}
	return nil
}

// sortedNames returns the names in a fixed order, so that a fold's writes do not depend
// on map order.
func sortedNames(metrics map[string]any) []string {
	names := make([]string, 0, len(metrics))
	for name := range metrics {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// nonFinite holds the numbers that JSON cannot represent.
var nonFinite = map[string]float64{
	"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1),
}

// asNumber returns a metric's value; ok is false if it is not a number.
func asNumber(v any) (value float64, ok bool) {
	switch v := v.(type) {
	case float64:
		return v, true
	case string:
		value, ok = nonFinite[v]
		return value, ok
	}
	return 0, false
}

func encodeNumber(v float64) []byte {
	for name, n := range nonFinite {
		if v == n || math.IsNaN(v) && math.IsNaN(n) {
			return strconv.AppendQuote(nil, name)
		}
	}
	return strconv.AppendFloat(nil, v, 'g', -1, 64)
}

func decodeNumber(key, value []byte) (float64, error) {
	if v, err := strconv.ParseFloat(string(value), 64); err == nil {
		return v, nil
	}
	var v any
	if err := decode(key, value, &v); err != nil {
		return 0, err
	}
	n, ok := asNumber(v)
	if !ok {
		return 0, fmt.Errorf("row %q is damaged: %s is not a number; delete the views, they are rebuilt from the log", key, value)
	}
	return n, nil
}

// numbered is a value and the checkpoint that it belongs to.
type numbered struct {
	value float64
	begun uint64
}

// values returns the values of a metric, the newest checkpoint first.
func values(r Reader, run, trial, metric string) (found []numbered, err error) {
	prefix := key(keyValue, run, trial, metric)
	err = r.Scan(prefix, after(prefix), func(k, value []byte) error {
		if len(k) != len(prefix)+8 {
			return errors.New("the key of a checkpoint's value has another length")
		}
		v, err := decodeNumber(k, value)
		found = append(found, numbered{v, begunOf(k)})
		return err
	})
	return found, err
}

// Number returns a metric's value as a number; "NaN", "Infinity" and "-Infinity" are
// numbers too. ok is false if it is not a number.
func Number(v any) (value float64, ok bool) { return asNumber(v) }

// FileMark separates directory and file in the name of a checkpoint that is a single
// file.
const FileMark = "~~"

// FileName returns the name of a checkpoint that is a single file, in a directory that
// is not itself a checkpoint.
func FileName(dir, file string) string { return dir + FileMark + file }

// SplitFile splits the name of a single-file checkpoint; ok is false for other names.
func SplitFile(name string) (dir, file string, ok bool) {
	dir, file, ok = strings.Cut(name, FileMark)
	if !ok || dir == "" || file == "" {
		return name, "", false
	}
	return dir, file, true
}

// IsFile reports whether the checkpoint is a single file. Such a checkpoint is in no
// line: nothing resumes from it, and it supersedes nothing.
func (c Checkpoint) IsFile() bool {
	_, _, ok := SplitFile(c.Name)
	return ok
}
