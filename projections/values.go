package projections

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// setValues writes a row for each metric of the report that is a number, and a row that
// names the report. The report is for the checkpoint's own step.
func (f *fold) setValues(begun uint64, at Report) error {
	for _, metric := range sortedNames(at.Metrics) {
		v, ok := asNumber(at.Metrics[metric])
		if !ok {
			continue
		}
		if err := f.t.Set(valueKey(f.run, f.name, metric, begun), encodeNumber(v)); err != nil {
			return err
		}
	}
	return store(f.t, valuedKey(f.run, f.name, begun), at.Iteration)
}

// unvalue removes the rows of a checkpoint that is no longer committed.
func (f *fold) unvalue(c Checkpoint) error {
	k := valuedKey(f.run, f.name, c.BegunSeq)
	iteration, found, err := load[int](f.t, k)
	if err != nil || !found {
		return err
	}
	at, _, err := loadReport(f.t, f.run, f.name, c.Attempt, iteration)
	if err != nil {
		return err
	}
	for _, metric := range sortedNames(at.Metrics) {
		if err := f.t.Delete(valueKey(f.run, f.name, metric, c.BegunSeq)); err != nil {
			return err
		}
	}
	return f.t.Delete(k)
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
	if err != nil {
		return nil, err
	}
	err = unsettled(r, run, trial, func(begun uint64, at Report) {
		if v, ok := asNumber(at.Metrics[metric]); ok {
			found = append(found, numbered{v, begun})
		}
	})
	slices.SortFunc(found, func(a, b numbered) int { return cmp.Compare(b.begun, a.begun) })
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
