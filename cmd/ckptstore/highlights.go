package main

import (
	"fmt"
	"math"

	"github.com/ckptstore/ckptstore/projections"
)

// highlight is one value of a metric, and where it was reported.
type highlight struct {
	Value     any   `json:"value"`
	Iteration int   `json:"iteration"`
	Step      int64 `json:"step"`
}

func (h *highlight) String() string { return fmt.Sprintf("%s (step %d)", number(h.Value), h.Step) }

// highlights are the last value of a metric in the line, the least and the
// greatest; those two are nil where there is no number but NaN. The newer one
// wins a tie.
type highlights struct {
	Name string     `json:"name"`
	Last *highlight `json:"last"`
	Min  *highlight `json:"min"`
	Max  *highlight `json:"max"`
}

// String is the line above a plot.
func (h highlights) String() string {
	text := h.Name
	if h.Last != nil {
		text += "  last " + h.Last.String()
	}
	if h.Min != nil && h.Max != nil {
		text += "  best:min " + h.Min.String() + "  best:max " + h.Max.String()
	}
	return text
}

// exactly asks for the reports of a row, of one metric or, if it is "", of all.
type exactly func(row projections.MetricsRow, name string) (projections.MetricsTable, error)

// highlightsOf finds them. A row that sums up several reports knows neither the
// step of its least value nor, if it lacks the metric in the end, that of its
// last: exact asks for the reports of such a row.
func highlightsOf(table projections.MetricsTable, name string, exact exactly) (highlights, error) {
	h := highlights{Name: name}
	var last, least, most *projections.MetricsRow
	low, high := math.Inf(1), math.Inf(-1)
	for i := range table.Rows {
		row := &table.Rows[i]
		s, has := row.Metrics[name]
		if !has || row.Hidden {
			continue
		}
		last = row
		if v, ok := projections.Number(s.Min); ok && v <= low {
			low, least = v, row
		}
		if v, ok := projections.Number(s.Max); ok && v >= high {
			high, most = v, row
		}
	}
	find := func(row *projections.MetricsRow, is func(any) bool) (*highlight, error) {
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
		var found *highlight
		for _, r := range rows {
			if s, has := r.Metrics[name]; has && !r.Hidden && is(s.Last) {
				found = &highlight{s.Last, r.Iteration, r.Step}
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
