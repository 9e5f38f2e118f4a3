package main

import (
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/projections"
)

// highlights are the ends of a metric in the line. Those of a row that sums up
// several reports are looked up.
type highlights struct {
	name string
	projections.MetricEnds
}

// valueAt is a value and where it was reported.
func valueAt(v *projections.MetricValue) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%s (step %d)", console.Number(v.Value), v.Step)
}

// String is the line above a plot.
func (h highlights) String() string {
	text := h.name
	if h.Last != nil {
		text += "  last " + valueAt(h.Last)
	}
	if h.Min != nil && h.Max != nil {
		text += "  best:min " + valueAt(h.Min) + "  best:max " + valueAt(h.Max)
	}
	return text
}

// exactly asks for the reports of a row, of one metric or, if it is "", of all.
type exactly func(row projections.MetricsRow, name string) (projections.MetricsTable, error)

// highlightsOf finds them. A row that sums up several reports knows neither the
// step of its least value nor, if it lacks the metric in the end, that of its
// last: exact asks for the reports of such a row.
func highlightsOf(table projections.MetricsTable, name string, exact exactly) (highlights, error) {
	h := highlights{name: name}
	var last, least, most *projections.MetricsRow
	low, high := math.Inf(1), math.Inf(-1)
	for i := range table.Rows {
		row := &table.Rows[i]
		s, has := row.Metrics[name]
		if !has || row.Hidden {
			continue
		}
		last = row
		h.Reports += s.Count
		if v, ok := projections.Number(s.Min); ok && v <= low {
			low, least = v, row
		}
		if v, ok := projections.Number(s.Max); ok && v >= high {
			high, most = v, row
		}
	}
	find := func(row *projections.MetricsRow, is func(any) bool) (*projections.MetricValue, error) {
		if row == nil {
			return nil, nil
		}
		rows := []projections.MetricsRow{*row}
		if row.Reports > 1 {
			t, err := exact(*row, name)
			if err != nil {
				return nil, err
			}
			rows = t.Rows
		}
		var found *projections.MetricValue
		for _, r := range rows {
			if s, has := r.Metrics[name]; has && !r.Hidden && is(s.Last) {
				found = &projections.MetricValue{Value: s.Last, Iteration: r.Iteration, Step: r.Step}
			}
		}
		return found, nil
	}
	equals := func(want float64) func(any) bool {
		return func(v any) bool { n, ok := projections.Number(v); return ok && n == want }
	}
	var err error
	if h.Last, err = find(last, func(any) bool { return true }); err != nil {
		return h, err
	}
	if h.Min, err = find(least, equals(low)); err != nil {
		return h, err
	}
	h.Max, err = find(most, equals(high))
	return h, err
}
